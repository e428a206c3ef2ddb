"""Rows of rows as one row axis."""

from __future__ import annotations

from asyncflow.graph.building.build import as_tensor
from asyncflow.graph.ir import Tensor
from asyncflow.graph.values.dtypes import VARIANT, int64
from asyncflow.ops.arrays.manipulation import concat, permute_dims, reshape
from asyncflow.ops.arrays.shape import extent_of
from asyncflow.ops.rows.rule import CannotLift, LiftedValue, RowAxis


class FoldedRows:
    """The rows of each row, of which all have the same number, behind one another.

    Args:
        outer: the axis of the rows.
        inner: how many rows each of them has.
    """

    def __init__(self, outer: RowAxis, inner: int | Tensor) -> None:
        self._rows = outer
        self._inner = inner
        self._outer = outer.count if outer.extent is None else outer.extent

    def axis(self, inner: RowAxis, numbers: LiftedValue) -> RowAxis:
        """Return the folded axis, given the axis `inner` of the rows of one row, and their numbers."""
        count = self._outer * self._inner
        outer = (*self._rows.places(), *inner.outer)
        loops, own_loops, label = inner.loops, inner.own_loops, self.label(inner.label)
        return RowAxis(
            as_tensor(count, int64),
            count if isinstance(count, int) else None,
            lambda: self.numbers(numbers),
            loops=loops,
            own_loops=own_loops,
            outer=outer,
            label=label,
        )

    def label(self, inner: str) -> str:
        """Return a name for both axes, with colons in place of their numbers; `inner` is the inner axis's name."""
        outer = self._rows.label
        return f"{outer}/:/{inner.removeprefix(f'{outer}/').removeprefix('body/')}"

    def numbers(self, inner: LiftedValue) -> Tensor:
        """Return the numbers of both axes, given the numbers of the rows of each row."""
        outer = self.fold(LiftedValue(self._rows.numbers(), True), False)
        return concat([outer.tensor, self.fold(inner, True).tensor], axis=1)

    def fold(self, value: LiftedValue, has_inner: bool) -> LiftedValue:
        """A value of all rows; `has_inner`: it is another one for each row of a row."""
        if not has_inner and not value.has_rows:
            return value
        if value.tensor.dtype == VARIANT:
            raise CannotLift(f"{value.tensor.name}, a store or TensorArray, has rows of rows")
        whole = self._rows.spread(value)
        if not has_inner:
            whole = RowAxis(as_tensor(self._inner, int64), None, self._rows.numbers).spread(LiftedValue(whole, False))
            whole = permute_dims(whole, (1, 0, *range(2, whole.ndim or 0)))
        return LiftedValue(reshape(whole, (self._outer * self._inner, *_tail(whole, 2))), True)

    def unfold(self, x: Tensor) -> Tensor:
        """Folded rows as rows of rows."""
        return reshape(x, (self._outer, self._inner, *_tail(x, 1)))


def _tail(x: Tensor, first: int) -> list[int | Tensor]:
    """The extents of `x` from axis `first` on."""
    if x.shape is None:
        raise CannotLift(f"the rank of {x.name} is not known while the graph is built")
    return [extent_of(x, axis) for axis in range(first, len(x.shape))]
