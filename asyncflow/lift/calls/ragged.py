"""Members of a batched function whose arguments differ in an extent: padded to be alike, or put side by side."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from asyncflow.errors import GraphError
from asyncflow.graph.ir import Tensor
from asyncflow.graph.values.dtypes import int64
from asyncflow.graph.values.shapes import Shape
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.arrays.manipulation import stack
from asyncflow.ops.arrays.shape import shape
from asyncflow.ops.rows.rule import LiftedValue
from asyncflow.ops.user.batch import Batch
from asyncflow.values import Array, Namespace

_SIDE_BY_SIDE = -1
"""The axis of a packed result that members have parts of."""


class OpenExtent(NamedTuple):
    """An extent that each member has its own of.

    Attributes:
        place: of the argument.
        axis: of it.
    """

    place: int
    axis: int


class RaggedRows:
    """Arguments of different extents that share a call, and each member's part of the results.

    Args:
        batch: the options.
        given: the arguments of one member.
        label: the name of the call.

    Attributes:
        is_packed: they are side by side; else they are padded.
        extents: that differ.
        told: the place of one more argument, which tells a member's extents, and all members' offsets.

    Raises:
        GraphError: no extent differs, or a differing extent is not allowed.
    """

    def __init__(self, batch: Batch, given: Sequence[Tensor], label: str) -> None:
        self.is_packed = batch.ragged is not None
        self.told = len(given)
        self._label, self._pad, self._bucket = label, batch.pad, batch.bucket
        self.extents: list[OpenExtent] = []
        for place, x in enumerate(given):
            if x.shape is None:
                raise self._refused(f"argument {place} is {x.spec}, whose rank is not known")
            found = [OpenExtent(place, axis) for axis, extent in enumerate(x.shape) if extent is None]
            if self.is_packed and any(each.axis > 0 for each in found):
                raise self._refused(f"argument {place} is {x.spec}: rows side by side differ in the first extent alone")
            if found and not self.is_packed:
                self._fill(x.dtype, place)
            self.extents += found
        if not self.extents:
            raise self._refused("all extents of its arguments are fixed; leave out pad=, bucket= and ragged=")
        self._ragged = {extent.place for extent in self.extents}
        self._cuts: list[dict[int, OpenExtent]] = []

    def _refused(self, why: str) -> GraphError:
        return GraphError(f"{self._label} cannot be batched over members of different extents: {why}")

    def _fill(self, dtype: np.dtype[np.generic], place: int) -> Array:
        """The element that an argument is padded with."""
        pad = self._pad if self._pad is not None else "" if dtype.kind == "T" else 0
        try:
            fill = np.asarray(pad).astype(dtype)
        except (TypeError, ValueError):
            fill = None
        if fill is None or (fill != np.asarray(pad) and pad == pad):
            raise self._refused(f"argument {place} is of {dtype}, which cannot be padded with {pad!r}")
        return fill

    # -- building ------------------------------------------------------------------------------------------------

    @property
    def told_spec(self) -> Spec:
        """Of a member's extents: a scalar, or a vector if there are several."""
        return Spec(int64, () if len(self.extents) == 1 else (len(self.extents),))

    def tell_row(self, given: Sequence[LiftedValue]) -> LiftedValue:
        """The extents of each of many rows, which are alike."""
        found = [shape(given[place].tensor)[axis + given[place].has_rows] for place, axis in self.extents]
        return LiftedValue(found[0] if len(found) == 1 else stack(found), has_rows=False)

    def spec_inside(self, place: int, spec: Spec) -> Spec:
        """Return the spec of an argument, or of the extra argument, as the function sees it."""
        if not self.is_packed:
            return spec
        if place == self.told:
            return Spec(int64, (*(spec.shape or ()), None))
        return spec if place in self._ragged else Spec(spec.dtype, (None, *(spec.shape or ())))

    def find_parts(
        self,
        specs: Sequence[Spec],
        shapes_with: Callable[[dict[OpenExtent, int], int], list[Shape]],
        side_by_side: Sequence[bool],
    ) -> None:
        """Find the argument extents that determine the extents of the results.

        Args:
            specs: of the results, as the function gives them.
            shapes_with: gives their shapes for these extents of the arguments, and a number of members.
            side_by_side: which results are, as far as it was said.

        Raises:
            GraphError: an extent of a result depends on the arguments' extents in another way, or in an unknown way.
        """
        unlike = list(islice(_unlike(), len(self.extents) + 1))
        of = dict(zip(unlike[1:], self.extents, strict=True))
        shapes = shapes_with({extent: length for length, extent in of.items()}, unlike[0])
        for number, (spec, found) in enumerate(zip(specs, shapes, strict=True)):
            if spec.shape is None or (self.is_packed and not spec.shape):
                raise self._refused(f"result {number} is {spec}, in which no member's part is known")
            axes = (0,) if self.is_packed else [axis for axis, extent in enumerate(spec.shape) if extent is None]
            cuts: dict[int, OpenExtent] = {}
            for axis in axes:
                length = None if found is None else found[axis]
                if length in of:
                    cuts[_SIDE_BY_SIDE if self.is_packed else axis] = of[length]
                elif any(side_by_side[number : number + 1]):
                    cuts[_SIDE_BY_SIDE] = self.extents[0]
                elif self.is_packed and length in (unlike[0], None):
                    pass  # a row for each member, or the call fails
                elif length is None and len(self.extents) == 1:
                    cuts[axis] = self.extents[0]  # or the call fails
                else:
                    why = "that of an argument" + (", or one for each member" if self.is_packed else "")
                    raise self._refused(f"it is not known that extent {axis} of result {number}, {spec}, is {why}")
            self._cuts.append(cuts)

    def spec_outside(self, number: int, spec: Spec) -> Spec:
        """The spec of a result as each member gets it."""
        if not self.is_packed or _SIDE_BY_SIDE in self._cuts[number] or spec.shape is None:
            return spec
        return Spec(spec.dtype, spec.shape[1:])

    # -- running -------------------------------------------------------------------------------------------------

    def with_told(self, inputs: tuple[Array, ...]) -> tuple[Array, ...]:
        """Return the inputs of a member, with its extents."""
        lengths = np.array([inputs[place].shape[axis] for place, axis in self.extents], np.int64)
        return (*inputs[: self.told], lengths[0] if len(lengths) == 1 else lengths, *inputs[self.told :])

    def kind(self, inputs: Sequence[Array]) -> Hashable:
        """Equal for members that may share a call.

        Raises:
            Exception: the user's ``bucket(length)`` raised.
            ValueError: it gave something else than an extent that is as large.
        """
        shapes: list[list[int | None]] = [list(value.shape) for value in inputs]
        for place, axis in self.extents:
            length = inputs[place].shape[axis]
            shapes[place][axis] = None if self._bucket is None else self._padded(length)
        return tuple([(value.dtype, tuple(extents)) for value, extents in zip(inputs, shapes, strict=True)])

    def _padded(self, length: int) -> int:
        bucket = self._bucket
        if not callable(bucket):
            return next((edge for edge in bucket or () if edge >= length), length)
        edge: object = bucket(length)
        if isinstance(edge, bool) or not isinstance(edge, int | np.integer) or edge < length:
            raise ValueError(f"bucket= gives an extent of at least {length} for that length; it gave {edge!r}")
        return int(edge)

    def joined(self, place: int, xp: Namespace, rows: Sequence[Array]) -> Array:
        """Join one input of all members; the argument that holds extents is on the host."""
        if self.is_packed and place == self.told:
            lengths = np.stack(rows, axis=-1)
            offsets = np.zeros((*lengths.shape[:-1], len(rows) + 1), np.int64)
            np.cumsum(lengths, axis=-1, out=offsets[..., 1:])
            return offsets
        if place not in self._ragged:
            return xp.stack(rows)
        if self.is_packed:
            return xp.concatenate(rows)
        fill = self._fill(rows[0].dtype, place)
        padded = xp.full((len(rows), *self._longest(place, rows)), fill[()], fill.dtype)
        for row, value in enumerate(rows):
            own: tuple[int | slice, ...] = (row, *map(slice, value.shape))
            padded[own] = value
        return padded

    def _longest(self, place: int, rows: Sequence[Array]) -> list[int]:
        """The shape that the rows of an argument are padded to."""
        longest = [max(lengths) for lengths in zip(*(value.shape for value in rows), strict=True)]
        if self._bucket is None:
            return longest
        axes = [axis for other, axis in self.extents if other == place]
        return [self._padded(extent) if axis in axes else extent for axis, extent in enumerate(longest)]

    def parts(
        self, results: Sequence[Array], fed: Sequence[Array], members: Sequence[Sequence[Array]]
    ) -> Iterator[list[Array]]:
        """The results of each member.

        Args:
            results: of the call.
            fed: its inputs.
            members: the inputs of each.

        Raises:
            ValueError: a result is not as long as it has to be.
        """
        for number, (value, cuts) in enumerate(zip(results, self._cuts, strict=True)):
            lengths = {axis + 1: self._length(extent, fed, members) for axis, extent in cuts.items()}
            if self.is_packed and not cuts:
                lengths[0] = len(members)
            self._require(number, value, lengths)
        for row, inputs in enumerate(members):
            yield [self._part(value, cuts, row, inputs, fed) for value, cuts in zip(results, self._cuts, strict=True)]

    def require_own(self, results: Sequence[Array], inputs: Sequence[Array]) -> None:
        """Raises ValueError if a result of a member alone is not as long as it would have to be among others."""
        for number, (value, cuts) in enumerate(zip(results, self._cuts, strict=True)):
            self._require(number, value, {axis: inputs[place].shape[of] for axis, (place, of) in cuts.items()})

    def _require(self, number: int, value: Array, lengths: dict[int, int]) -> None:
        for axis, length in lengths.items():
            if value.shape[axis] != length:
                raise ValueError(
                    f"result {number} of {self._label} has extent {value.shape[axis]} where there are {length} rows or "
                    f"members: whose part is whose is not known"
                )

    def _length(self, extent: OpenExtent, fed: Sequence[Array], members: Sequence[Sequence[Array]]) -> int:
        """The extent of all members' arguments together."""
        if self.is_packed:
            return int(np.atleast_2d(fed[self.told])[self.extents.index(extent), -1])
        return self._longest(extent.place, [inputs[extent.place] for inputs in members])[extent.axis]

    def _part(
        self, value: Array, cuts: dict[int, OpenExtent], row: int, inputs: Sequence[Array], fed: Sequence[Array]
    ) -> Array:
        if _SIDE_BY_SIDE in cuts:
            number = self.extents.index(cuts[_SIDE_BY_SIDE])
            offsets = np.atleast_2d(fed[self.told])[number]
            return value[offsets[row] : offsets[row + 1]]
        lengths = {axis: inputs[place].shape[of] for axis, (place, of) in cuts.items()}
        part = value[row, ...]
        if part.ndim == 0:  # a string is an array, a number is none
            return part if part.dtype.kind == "T" else part[()]
        return part[tuple([slice(lengths.get(axis)) for axis in range(part.ndim)])]


def _unlike() -> Iterator[int]:
    """Yield unusual extents, none of which results from another by the usual operations on extents."""
    length = 193
    while True:
        yield length
        length = 4 * length + 7
