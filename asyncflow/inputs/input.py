"""`Input`: a source of elements as a resource, and the ops that take one a firing."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import ClassVar

import numpy as np

from asyncflow.errors import CheckpointError, GraphError, brief
from asyncflow.graph.building.build import apply
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import Access, Effects, define, not_differentiable
from asyncflow.graph.resource import Resource
from asyncflow.graph.values import nest
from asyncflow.graph.values.dtypes import bool_
from asyncflow.graph.values.nest import Structure
from asyncflow.graph.values.spec import Spec
from asyncflow.inputs.read_ahead import ReadAhead, Source
from asyncflow.inputs.stages import Batched, Element, Repetition, Shuffle, Stage, check_batch
from asyncflow.ops.axes import static_int
from asyncflow.values import Array, Conduct, Kernel, Namespace, Nest


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The way from a source to the elements of an input.

    Attributes:
        source: the files or generator to read.
        structure: the nest of an element.
        specs: of its leaves.
        stages: what elements go through.
        ahead: how many are read before they are asked for.
    """

    source: Source
    structure: Structure
    specs: tuple[Spec, ...]
    stages: tuple[Stage, ...] = ()
    ahead: int = 4


class Input(Resource):
    """Elements that come in from outside, one a firing; made by `read_lines`, `read_arrays`, `read_records` and
    `from_async_generator`.

    It belongs to no graph, and each session reads it for itself, from the start. Reading is a few elements ahead of the
    program, on a thread or in a task, and stops when these wait to be taken. How many have been taken is its position:
    state, which a checkpoint may save. Closing the session closes the open files and generators.

    `shuffle`, `repeat` and `batch` give another input, which reads for itself.

    >>> import asyncflow as af
    >>> batches = af.read_lines("corpus.txt").shuffle(10_000, seed=1).repeat().batch(32)
    >>> with af.Graph():
    ...     batches.next()
    <Tensor lines/next:0 string[?]>
    """

    noun = "input"

    def __init__(self, pipeline: Pipeline, name: str) -> None:
        if static_int(pipeline.ahead, "prefetch") < 1:
            raise GraphError(f"at least 1 element is read ahead; got prefetch={pipeline.ahead}")
        super().__init__(name, None)
        self.pipeline = pipeline

    @property
    def spec(self) -> Nest:
        """The spec of an element: a `Spec`, or a nest of them."""
        return self.pipeline.structure.unflatten(self.pipeline.specs)

    def create_state(self) -> InputState:
        """A reading from the start."""
        return InputState(self.name, self.pipeline)

    def next(self, *, name: str | None = None) -> Nest:
        """Take the next element, and wait for it. Raises `EndOfInput`, in the run, where there is none."""
        return self.pipeline.structure.unflatten(apply(INPUT_NEXT, name=name or f"{self.name}/next", input=self))

    def has_more(self, *, name: str | None = None) -> Tensor:
        """Return True if another element comes, as a bool tensor; waits until that is known, and takes nothing."""
        return apply(INPUT_HAS_MORE, name=name or f"{self.name}/has_more", input=self)[0]

    def shuffle(self, size: int, *, seed: int = 0) -> Input:
        """Elements in random order: each time one of `size` that are held, and in another with each pass of a `repeat`.

        Args:
            size: how many are held, 1 or more; with as many as there are, all orders are equally likely.
            seed: of the order, 0 or more.
        """
        if static_int(size, "size") < 1 or static_int(seed, "seed") < 0:
            raise GraphError(f"shuffle holds 1 element or more, and its seed is not negative; got {size} and {seed}")
        return self._with(Shuffle(size, seed))

    def repeat(self, times: int | None = None) -> Input:
        """Reads the source `times` in all; None: again and again.

        Raises:
            GraphError: `times` is below 1, or the input is repeated already.
        """
        if times is not None and static_int(times, "times") < 1:
            raise GraphError(f"an input is read once or more; got times={times}")
        if any(isinstance(stage, Repetition) for stage in self.pipeline.stages):
            raise GraphError(f"input {self.name!r} is repeated already; give one repeat() all the times")
        return self._with(Repetition(times))

    def batch(self, size: int, *, pad: complex | None = None, drop_remainder: bool = False) -> Input:
        """Stacks `size` elements along a new first axis; the last batch may have fewer.

        Args:
            size: 1 or more.
            pad: fills open extents up to the longest of the batch. The element is then ``(elements, lengths)``, and
                `lengths` a nest like the element: ``int64[size]`` for a value with one open extent, one more axis for
                several, None for none.
            drop_remainder: leaves a last batch of fewer elements out, so that the extent is known.

        Raises:
            GraphError: `size` is below 1, or there is nothing that could be padded.
        """
        given = self.pipeline
        check_batch(static_int(size, "size"), given.specs, pad)
        stage = Batched(size, given.specs, pad, drop_remainder)
        structure, specs = stage.outputs(given.structure)
        return self._with(stage, structure=structure, specs=specs)

    def _with(self, stage: Stage, **changed: object) -> Input:
        pipeline = self.pipeline
        return Input(replace(pipeline, stages=(*pipeline.stages, stage), **changed), self.name)  # type: ignore[arg-type]


class InputState:
    """One session's reading of an input.

    Attributes:
        reading: the elements read ahead.
    """

    __slots__ = ("__weakref__", "_pipeline", "name", "reading")

    def __init__(self, name: str, pipeline: Pipeline) -> None:
        self.name = name
        self._pipeline = pipeline
        self.reading = self._from(0)

    def __repr__(self) -> str:
        return f"<InputState {self.name}, {self.position} elements taken>"

    @property
    def position(self) -> int:
        """Number of the first element that was never taken."""
        return self.reading.progress[0]

    def _from(self, position: int, returned: Sequence[int] = ()) -> ReadAhead:
        pipeline = self._pipeline
        return ReadAhead(self.name, pipeline.source, pipeline.stages, pipeline.ahead, position, returned)

    async def has_more(self) -> np.bool_:
        """Return True if another element comes."""
        return np.bool_(await self.reading.has_more())

    async def next(self) -> Element:
        """The next element."""
        return await self.reading.take()

    def next_or_wait(self) -> Element | Awaitable[Element]:
        """Return the next element if it has been read, which needs no task; otherwise an awaitable for it."""
        return self.reading.take_nowait() if self.reading.is_ready else self.next()

    def has_more_or_wait(self) -> np.bool_ | Awaitable[np.bool_]:
        """Return True if another element has been read; otherwise an awaitable for the answer."""
        return np.True_ if self.reading.is_ready else self.has_more()

    kind: ClassVar[str] = "input"

    def capture(self) -> dict[str, Array]:
        """Return the position, and earlier elements that runs have given back; elements read ahead are read again."""
        position, returned = self.reading.progress
        arrays: dict[str, Array] = {"position": np.array(position)}
        if returned:
            arrays["returned"] = np.array(returned)
        return arrays

    def check_arrays(self, arrays: Mapping[str, Array]) -> None:
        """Checks that a capture is one of an input.

        Raises:
            CheckpointError: it is not.
        """
        position = arrays.get("position")
        if (
            not {"position"} <= set(arrays) <= {"position", "returned"}
            or position is None
            or position.shape
            or position.dtype != np.int64
            or position < 0
        ):
            raise CheckpointError(
                f"input {self.name!r} has a position, an int64 of 0 or more; found {brief(dict(arrays))}"
            )
        returned = arrays.get("returned", np.zeros(0, np.int64))
        numbers = [-1, *returned.tolist(), int(position)] if returned.ndim == 1 else []
        if returned.dtype != np.int64 or not numbers or any(a >= b for a, b in pairwise(numbers)):
            raise CheckpointError(
                f"input {self.name!r}: the numbers of elements that were given back ascend, and are below the position "
                f"{position}; found {brief(returned)}"
            )

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Resume at a captured position: read from the start, and skip the elements taken before.

        Raises:
            CheckpointError: it is no capture of an input; nothing has changed.
        """
        self.check_arrays(arrays)
        self.reading.stop()
        self.reading = self._from(int(arrays["position"]), arrays.get("returned", np.zeros(0, np.int64)).tolist())

    async def aclose(self) -> None:
        """Close open files and generators."""
        await self.reading.aclose()


def new_input(source: Source, spec: Nest, *, prefetch: int, name: str) -> Input:
    """An input of elements of that spec.

    Raises:
        GraphError: it is no spec, or nothing is read ahead.
    """
    specs, structure = nest.flatten(spec)
    for leaf in specs:
        if not isinstance(leaf, Spec):
            raise GraphError(f"elements are described by af.spec(dtype, shape), or a nest of these; got {leaf!r}")
    return Input(Pipeline(source, structure, tuple(specs), ahead=prefetch), name)


def _effects(node: Node) -> Effects:
    return ((node.attrs["input"].effect_key, Access.WRITE),)


def _next_spec(*, input: Input) -> tuple[Spec, ...]:
    return input.pipeline.specs


def _next_kernel(xp: Namespace, *, input: InputState) -> Kernel:
    return input.next_or_wait


def _has_more_kernel(xp: Namespace, *, input: InputState) -> Kernel:
    return input.has_more_or_wait


# Elements are the user's, and so may be the code that reads them.
_of_input = partial(define, conduct=Conduct(is_async=True, is_user=True, is_undone=True), effects=_effects)
INPUT_NEXT = _of_input("input_next", _next_spec, _next_kernel)
INPUT_HAS_MORE = _of_input("input_has_more", lambda *, input: Spec(bool_, ()), _has_more_kernel)
not_differentiable(INPUT_NEXT, INPUT_HAS_MORE, because="elements come from outside, as feeds do")
