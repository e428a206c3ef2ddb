"""Stages between a source and the program: elements go in, and come out shuffled or in batches.

An element is a tuple of values, one for each leaf of its spec. The output of a stage is a function of its input, its
seed and the number of the pass: reading again gives the same. The number of elements fed at a time makes no difference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, overload

import numpy as np

from asyncflow.errors import DTypeError, GraphError, ShapeError
from asyncflow.graph.values.dtypes import dtype_name, int64
from asyncflow.graph.values.nest import Structure
from asyncflow.graph.values.shapes import format_shape, is_static, is_subshape
from asyncflow.graph.values.spec import Spec
from asyncflow.state.elements.queue_arrays import open_axes, stacked
from asyncflow.values import Array, Nest

Element: TypeAlias = tuple[Nest, ...]
"""Values as the user's source yields them: arrays, NumPy scalars, text."""


class Stacked(Sequence[Element]):
    """Elements stacked in arrays, one array for each leaf, as in a file.

    A batch of them is one copy: taking each element by itself would hold the GIL for longer than the read.
    """

    __slots__ = ("values",)

    def __init__(self, values: tuple[Array, ...]) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values[0])

    def __iter__(self) -> Iterator[Element]:
        return zip(*self.values, strict=True)

    @overload
    def __getitem__(self, place: int) -> Element: ...
    @overload
    def __getitem__(self, place: slice) -> Stacked: ...
    def __getitem__(self, place: int | slice) -> Element | Stacked:
        found = tuple(value[place] for value in self.values)
        return Stacked(found) if isinstance(place, slice) else found


class Passing(Protocol):
    """One pass of a stage over its source."""

    def feed(self, elements: Sequence[Element]) -> Sequence[Element]:
        """Feed elements, and return the elements that come out."""

    def finish(self) -> Sequence[Element]:
        """Return the remaining elements after the source has ended."""


@dataclass(frozen=True, slots=True)
class Shuffle:
    """A stage that returns a random one of `size` buffered elements, and refills its place from the source."""

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

    def feed(self, elements: Sequence[Element]) -> Sequence[Element]:
        held = self._held
        first = min(self._size - len(held), len(elements))
        held.extend(elements[:first])
        if first == len(elements):
            return ()
        found = list(elements[first:])
        # Draw the same numbers, however many are drawn at a time.
        places = (
            [self._rng.integers(self._size)] if len(found) == 1 else self._rng.integers(self._size, size=len(found))
        )
        for number, place in enumerate(places):
            found[number], held[place] = held[place], found[number]
        return found

    def finish(self) -> Sequence[Element]:
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

    def joined(self, parts: Sequence[Sequence[Element]]) -> Element:
        """Join elements into one batch.

        Raises:
            ShapeError: the elements differ in shape, and there is no `pad`.
        """
        arrays = [part.values for part in parts if isinstance(part, Stacked)]
        if len(arrays) == len(parts):
            # Copied even where a slice would do: a kept batch must not keep the whole file in memory.
            return tuple(map(np.concatenate, zip(*arrays, strict=True)))
        elements = [element for part in parts for element in part]
        return stacked(self.specs, None if self.pad is None else (self.pad,) * len(self.specs), elements)


def _with_leaves(structure: Structure, leaves: Iterator[Structure]) -> Structure:
    if structure.kind is None:
        return next(leaves)
    children = tuple(_with_leaves(child, leaves) for child in structure.children)
    return Structure(structure.kind, structure.keys, children, structure.aux)


class _Batching:
    def __init__(self, stage: Batched) -> None:
        self._stage = stage
        self._parts: list[Sequence[Element]] = []
        self._missing = stage.size

    def feed(self, elements: Sequence[Element]) -> Sequence[Element]:
        found = []
        while elements:
            part, elements = elements[: self._missing], elements[self._missing :]
            self._parts.append(part)
            self._missing -= len(part)
            if not self._missing:
                found.append(self._batch())
        return found

    def finish(self) -> Sequence[Element]:
        return [self._batch()] if self._parts and not self._stage.drop_remainder else ()

    def _batch(self) -> Element:
        parts, self._parts, self._missing = self._parts, [], self._stage.size
        return self._stage.joined(parts)


@dataclass(frozen=True, slots=True)
class Repetition:
    """A stage that reads the source again when it has ended; `times` in all, None without end."""

    times: int | None


Stage: TypeAlias = Shuffle | Batched | Repetition


class Passes:
    """The way of elements through stages, over all passes.

    Stages before a `Repetition` start anew with each pass; later stages go on.

    Attributes:
        at_once: how many elements are best fed at a time: as many as make a batch.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        place = next((k for k, stage in enumerate(stages) if isinstance(stage, Repetition)), None)
        repeat = None if place is None else stages[place]
        self._times = repeat.times if isinstance(repeat, Repetition) else 1
        cut = len(stages) if place is None else place
        self._before: list[Shuffle | Batched] = [each for each in stages[:cut] if not isinstance(each, Repetition)]
        behind: list[Shuffle | Batched] = [each for each in stages[cut:] if not isinstance(each, Repetition)]
        self._behind = [stage.start(0) for stage in behind]
        self.at_once = next((stage.size for stage in (*self._before, *behind) if isinstance(stage, Batched)), 1)
        self._number = 0
        self._start_pass()

    def _start_pass(self) -> None:
        self._here = [stage.start(self._number) for stage in self._before]
        self._given = 0

    def feed(self, elements: Sequence[Element]) -> Sequence[Element]:
        """Feed elements of the source, and return the elements that come out."""
        for stage in self._here:
            elements = stage.feed(elements)
        return self._pass_on(elements)

    def _pass_on(self, elements: Sequence[Element]) -> Sequence[Element]:
        self._given += len(elements)
        for stage in self._behind:
            elements = stage.feed(elements)
        return elements

    def end_of_pass(self) -> tuple[Sequence[Element], bool]:
        """Return the remaining elements after the source has ended, and True if it must be read again.

        A pass without a single element is the last: another pass would be empty, too.
        """
        found = self._pass_on(_finished(self._here))
        self._number += 1
        more = self._given > 0 and (self._times is None or self._number < self._times)
        if not more:
            return [*found, *_finished(self._behind)], False
        self._start_pass()
        return found, True


def _finished(stages: Sequence[Passing]) -> Sequence[Element]:
    found: Sequence[Element] = ()
    for stage in stages:
        found = [*stage.feed(found), *stage.finish()]
    return found


def as_value(value: Nest, spec: Spec, what: str) -> Nest:
    """A value of the user's as one of that spec: what Python leaves without a dtype takes it.

    Raises:
        DTypeError, ShapeError: it is none.
    """
    if isinstance(value, str) and spec.dtype.kind != "T":  # NumPy's text is a str, too
        raise DTypeError(f"{what} is declared as {spec}, and cannot be {value!r}")
    if isinstance(value, str | np.ndarray | np.generic):
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
        GraphError: `size` is below 1, or an element to be padded has no known rank, or is text.
    """
    if size < 1:
        raise GraphError(f"a batch has 1 element or more; got size={size}")
    for spec in specs if pad is not None else ():
        if spec.shape is None or (spec.dtype.kind == "T" and not is_static(spec.shape)):
            raise GraphError(f"padding needs a known rank, and numbers to fill up with; elements are {spec}")
