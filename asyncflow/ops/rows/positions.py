"""Positions that know their row, so that the error for one out of range names the row.

That costs nothing unless it happens: then the kernel is called again with the positions of fewer and fewer rows, until
the first row is found with which it fails.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from math import prod

import numpy as np

from asyncflow.errors import in_row
from asyncflow.graph.building.build import apply
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import VIEW, bound_kernel, define, not_differentiable
from asyncflow.ops.arrays.shape import shape
from asyncflow.ops.cost import free
from asyncflow.ops.rows.folded import FoldedRows
from asyncflow.ops.rows.rule import LiftedValue, RowAxis, row_rule
from asyncflow.values import Array, Kernel, Namespace, Value


class RowPositions(np.ndarray):
    """Positions, grouped by row; `numbers` has a vector for each row, and `label` the name of its axis.

    Attributes:
        axes: number of axes that the indexed value has in front of a row's axes.
    """

    numbers: Array | None = None
    label = ""
    axes = 0

    def of_first(self, count: int) -> Array:
        """Return the positions of the first rows; later rows get 0."""
        found = np.array(self)
        if self.numbers is not None:
            found.reshape(-1, prod(self.shape[self.numbers.ndim - 1 :]))[count:] = 0
        return found


def name_row(error: IndexError, node: Node, values: Sequence[Value]) -> IndexError:
    """Return a node's error with the first row whose positions are out of range, if the positions know their rows."""
    named = [x for x in values if isinstance(x, RowPositions) and x.numbers is not None]
    if not named or not named[0].size:
        return error
    positions = named[0]
    assert positions.numbers is not None
    numbers = positions.numbers.reshape(-1, positions.numbers.shape[-1])
    kernel = bound_kernel(node.op, np, node.attrs, of_scalars=False)

    def failure(count: int) -> IndexError | None:
        try:
            kernel(*(x.of_first(count) if isinstance(x, RowPositions) else x for x in values))
        except IndexError as raised:
            return raised
        return None

    row = bisect_left(range(1, len(numbers)), True, key=lambda count: failure(count) is not None)
    axes = positions.axes
    text = re.sub(r"(?<= axis )\d+", lambda axis: str(int(axis[0]) - axes), str(failure(row + 1) or error))
    told = IndexError(text)
    for each in (told, error):
        in_row(each, positions.label, numbers[row].tolist())
    return told


def _kernel(xp: Namespace, *, label: str, axes: int) -> Kernel:
    def mark(positions: Array, numbers: Array) -> Array:
        if type(positions) is not np.ndarray:
            return positions  # a card wraps positions around
        found = positions.view(RowPositions)
        found.numbers, found.label, found.axes = numbers, label, axes
        return found

    return mark


ROW_POSITIONS = define(
    "row_positions", lambda positions, numbers, label, axes: positions, _kernel, flops=free, is_total=True, traits=VIEW
)
"""Op that attaches the numbers of their rows to positions."""
not_differentiable(ROW_POSITIONS, because="positions are integers")


def positions_of_rows(rows: RowAxis, positions: Tensor, *, axes: int) -> Tensor:
    """Positions with a row axis in front, for a kernel; `axes`: see `RowPositions`."""
    if positions.node.op is ROW_POSITIONS:
        return positions
    return apply(ROW_POSITIONS, positions, rows.numbers(), label=rows.label, axes=axes)[0]


@row_rule(ROW_POSITIONS)
def _of_rows_of_rows(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    positions, numbers = inputs
    folded = FoldedRows(rows, shape(numbers.tensor)[int(numbers.has_rows)])
    both = folded.unfold(folded.numbers(numbers))
    attrs = {"label": folded.label(node.attrs["label"]), "axes": node.attrs["axes"] + 1}
    return apply(ROW_POSITIONS, rows.spread(positions), both, **attrs)
