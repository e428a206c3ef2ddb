"""Stages between a source and the program: elements go in one by one, and come out shuffled or in batches.

An element is a tuple of values, one for each leaf of its spec. What a stage gives is a function of what went in, its
seed and the number of the pass, so that reading again gives the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np

from asyncflow.errors import DTypeError, GraphError, ShapeError
from asyncflow.graph.dtypes import dtype_name, int64
from asyncflow.graph.nest import Structure
from asyncflow.graph.shapes import format_shape, is_static, is_subshape
from asyncflow.graph.spec import Spec
from asyncflow.state.queue_arrays import open_axes, stacked
from asyncflow.values import Nest

Element: TypeAlias = tuple[Nest, ...]
"""Values as the user's sources give them: arrays, NumPy's scalars, text."""


class Passing(Protocol):
    """A stage in one pass over its source."""

    def feed(self, element: Element) -> Iterable[Element]:
        """Gives what comes out when `element` goes in."""

    def finish(self) -> Iterable[Element]:
        """Gives what is left when the source has ended."""


@dataclass(frozen=True, slots=True)
class Shuffle:
    """Gives a random one of `size` elements each time, and takes the next in its place."""

    size: int
    seed: int

    def start(self, number: int) -> Passing:
        """The stage for a pass of that number."""
        return _Shuffling(self.size, np.random.default_rng([self.seed, number]))


class _Shuffling:
    def __init__(self, size: int, rng: np.random.Generator) -> None:
        self._size = size
        self._rng = rng
        self._held: list[Element] = []

    def feed(self, element: Element) -> Iterable[Element]:
        if len(self._held) < self._size:
            self._held.append(element)
            return ()
        place = self._rng.integers(self._size)
        drawn, self._held[place] = self._held[place], element
        return (drawn,)

    def finish(self) -> Iterable[Element]:
        order = self._rng.permutation(len(self._held))
        return [self._held[place] for place in order]


@dataclass(frozen=True, slots=True)
class Batched:
    """Stacks `size` elements along a new first axis.

    Attributes:
        size: how many; a last batch may have fewer, unless `drop_remainder`.
        specs: of the leaves of an element.
        pad: fills open extents up to the longest of the batch; None where they have to be equal.
        drop_remainder: leaves a last batch of fewer elements out.
    """

    size: int
    specs: tuple[Spec, ...]
    pad: complex | None
    drop_remainder: bool

    def start(self, number: int) -> Passing:
        """The stage for a pass of that number."""
        return _Batching(self)

    def outputs(self, structure: Structure) -> tuple[Structure, tuple[Spec, ...]]:
        """The nest of a batch, and the specs of its leaves."""
        count = self.size if self.drop_remainder else None
        whole = tuple(Spec(s.dtype, None if s.shape is None else (count, *s.shape)) for s in self.specs)
        if self.pad is None:
            return structure, whole
        found = [open_axes(spec) for spec in self.specs]
        lengths = [Spec(int64, (count,) if len(axes) == 1 else (count, len(axes))) for axes in found if axes]
        leaf, nothing = Structure(None), Structure(type(None))
        of_lengths = _with_leaves(structure, iter([leaf if axes else nothing for axes in found]))
        return Structure(tuple, (0, 1), (structure, of_lengths)), (*whole, *lengths)

    def stacked(self, elements: Sequence[Element]) -> Element:
        """Some elements as one.

        Raises:
            ShapeError: they are not alike, and there is no `pad`.
        """
        return stacked(self.specs, None if self.pad is None else (self.pad,) * len(self.specs), elements)


def _with_leaves(structure: Structure, leaves: Iterator[Structure]) -> Structure:
    if structure.kind is None:
        return next(leaves)
    children = tuple(_with_leaves(child, leaves) for child in structure.children)
    return Structure(structure.kind, structure.keys, children, structure.aux)


class _Batching:
    def __init__(self, stage: Batched) -> None:
        self._stage = stage
        self._held: list[Element] = []

    def feed(self, element: Element) -> Iterable[Element]:
        self._held.append(element)
        return self._batch() if len(self._held) == self._stage.size else ()

    def finish(self) -> Iterable[Element]:
        return self._batch() if self._held and not self._stage.drop_remainder else ()

    def _batch(self) -> Iterable[Element]:
        held, self._held = self._held, []
        return (self._stage.stacked(held),)


@dataclass(frozen=True, slots=True)
class Repetition:
    """Reads the source again when it has ended; `times` in all, None without end."""

    times: int | None


Stage: TypeAlias = Shuffle | Batched | Repetition


class Passes:
    """The way of elements through stages, over all passes.

    Stages before a `Repetition` start anew with each pass; those behind it go on.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        place = next((k for k, stage in enumerate(stages) if isinstance(stage, Repetition)), None)
        repeat = None if place is None else stages[place]
        self._times = repeat.times if isinstance(repeat, Repetition) else 1
        cut = len(stages) if place is None else place
        self._before: list[Shuffle | Batched] = [each for each in stages[:cut] if not isinstance(each, Repetition)]
        behind: list[Shuffle | Batched] = [each for each in stages[cut:] if not isinstance(each, Repetition)]
        self._behind = [stage.start(0) for stage in behind]
        self._number = 0
        self._given = 0
        self._start_pass()

    def _start_pass(self) -> None:
        self._here = [stage.start(self._number) for stage in self._before]
        self._all = [*self._here, *self._behind]

    def feed(self, element: Element) -> Iterable[Element]:
        """Gives what comes out when an element of the source goes in."""
        self._given += 1
        return _through(self._all, (element,))

    def end_of_pass(self) -> tuple[Iterable[Element], bool]:
        """Gives what comes out when the source has ended, and whether to read it again.

        A pass without a single element is the last: another one would give nothing either.
        """
        found = _through(self._behind, _finished(self._here))
        self._number += 1
        more = self._given > 0 and (self._times is None or self._number < self._times)
        self._given = 0
        if not more:
            return [*found, *_finished(self._behind)], False
        self._start_pass()
        return found, True


def _through(stages: Sequence[Passing], elements: Sequence[Element]) -> Sequence[Element]:
    for stage in stages:
        elements = [out for element in elements for out in stage.feed(element)]
    return elements


def _finished(stages: Sequence[Passing]) -> list[Element]:
    found: list[Element] = []
    for stage in stages:
        found = [out for element in found for out in stage.feed(element)]
        found.extend(stage.finish())
    return found


def as_value(value: Nest, spec: Spec, what: str) -> Nest:
    """A value of the user's as one of that spec: what Python leaves without a dtype takes it.

    Raises:
        DTypeError, ShapeError: it is none.
    """
    if (spec.dtype.kind == "T" and isinstance(value, str)) or isinstance(value, np.ndarray | np.generic):
        found = value
    else:
        found = np.asarray(value)
        if not np.can_cast(found.dtype, spec.dtype, "same_kind"):
            raise DTypeError(f"{what} is declared as {spec}, and cannot be {value!r}")
        found = found.astype(spec.dtype)
    dtype, shape = (spec.dtype, ()) if isinstance(found, str) else (found.dtype, found.shape)
    if dtype != spec.dtype:
        raise DTypeError(f"{what} is declared as {spec}, and came as {dtype_name(dtype)}{format_shape(shape)}")
    if not is_subshape(shape, spec.shape):
        raise ShapeError(f"{what} is declared as {spec}, and came as {dtype_name(dtype)}{format_shape(shape)}")
    return found if isinstance(found, str | np.generic) or shape else found[()]


def check_batch(size: int, specs: Sequence[Spec], pad: complex | None) -> None:
    """Refuses a batch that cannot be.

    Raises:
        GraphError: `size` is below 1, or what is to be padded has no known rank, or is text.
    """
    if size < 1:
        raise GraphError(f"a batch has 1 element or more; got size={size}")
    for spec in specs if pad is not None else ():
        if spec.shape is None or (spec.dtype.kind == "T" and not is_static(spec.shape)):
            raise GraphError(f"padding needs a known rank, and numbers to fill up with; elements are {spec}")
