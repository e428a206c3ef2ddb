"""Sums of matrix products over a loop's iterations, many iterations at a time (Cavs' lazy ops).

``total = total + x.T @ g`` in every iteration, as for the gradient of weights, is one product of all the x and all the
g, one below the other. Both are copied into a block of as many rows as pays, and the product of a full block is added
to the total. Sums that share g share its block and are one product: ``(x; h; 1).T @ g``, where a column of ones gives
the sum of g itself.

On a card each copy is a launch. So the operands of several iterations stay where they are, and a few launches put them
below one another once there are enough. Blocks have half as many rows as on a CPU, since the card has the rows twice
meanwhile. Its products gain little from more, and operands are freed when they are multiplied.

A `PendingSums` is changed in place. It is a loop variable that only this pass makes, and that has a single user: the
next iteration, or the node behind the loop. Its allocations count when they happen, and not once an iteration.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final, TypeAlias

import numpy as np

from asyncflow.compiler.batching.products_ahead import most_at_once
from asyncflow.devices.values import NoData
from asyncflow.graph.op import BATCHED, NEW_EACH, Op
from asyncflow.graph.values.dtypes import VARIANT
from asyncflow.graph.values.shapes import Shape
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.cost import elements, free
from asyncflow.values import Array, Kernel, Namespace, Value

_ENOUGH_ROWS: Final = ((1 << 13, 128), (1 << 19, 256))
"""Row counts, by number of elements of the total, at which the product takes far longer than its addition; more rows
gain nothing.
"""
_MOST_ROWS: Final = 1024
"""The same for larger totals, as of an LSTM of 512 units: with 256 rows its training step takes 4 to 6 % longer."""
_ENOUGH_ITERATIONS: Final = 64
_WORTH_ITERATIONS: Final = 3
"""Fewest iterations of a card's block: to stack the operands of two takes as many launches as their sums."""


class _PendingRows:
    """Rows to be multiplied, and the sum of the products so far.

    In a simulation of shapes, rows may have no data. All products of such rows are NaN, and none is computed: a CPU
    would take as long as in a real run.

    Attributes:
        edges: where the columns of each sum begin on the left, and the last one's end.
        capacity: number of rows.
    """

    __slots__ = ("_counts", "_filled", "_is_known", "_left", "_right", "_sum", "capacity", "edges")

    def __init__(
        self, right: Array, lefts: Sequence[Array | None], capacity: int, counts: Callable[[Array], object]
    ) -> None:
        widths = [1 if left is None else left.shape[0] for left in lefts]
        self.edges = [0]
        for width in widths:
            self.edges.append(self.edges[-1] + width)
        self.capacity = capacity
        self._left = np.empty((capacity, self.edges[-1]), right.dtype)
        self._right = np.empty((capacity, right.shape[1]), right.dtype)
        self._counts = counts
        counts(self._left)
        counts(self._right)
        for place, left in enumerate(lefts):
            if left is None:
                self._left[:, self.edges[place]] = 1
        self._sum: Array | None = None
        self._filled = 0
        self._is_known = True

    def takes(self, right: Array, lefts: Sequence[Array | None]) -> bool:
        """Return True if these operands fit the block's shapes, except for the number of rows."""
        rows, columns = right.shape
        return (
            columns == self._right.shape[1]
            and rows <= self.capacity
            and all(
                left is None or left.shape == (end - start, rows)
                for left, (start, end) in zip(lefts, pairwise(self.edges), strict=True)
            )
        )

    def is_full_with(self, right: Array) -> bool:
        """Return True if the block has no room for these rows."""
        return self._filled + len(right) > self.capacity

    def add(self, right: Array, lefts: Sequence[Array | None]) -> None:
        """The sums with the products of each of `lefts` and `right`; None stands for a row of ones."""
        start, end = self._filled, self._filled + len(right)
        if self.is_full_with(right):
            self._multiply()
            start, end = 0, len(right)
        self._filled = end
        if isinstance(right.base, NoData) and right.dtype.kind in "fc":  # else they are 0, and are added as such
            self._is_known = False
        if not self._is_known:
            return
        self._right[start:end] = right
        for left, first, last in zip(lefts, self.edges[:-1], self.edges[1:], strict=True):
            if left is not None:
                self._left[start:end, first:last] = left.T

    def sums(self) -> list[Array]:
        """Return the results of the products, below one another; the block gives up their memory."""
        self._multiply()
        assert self._sum is not None
        # No copy: sums are parts of one array, which is freed once the last one was added to its total.
        found, self._sum = self._sum, None
        return [found[first:last] for first, last in pairwise(self.edges)]

    def _multiply(self) -> None:
        if self._is_known:
            product = np.matmul(self._left[: self._filled].T, self._right[: self._filled])
            self._counts(product)
            self._sum = product if self._sum is None else np.add(self._sum, product, out=self._sum)
        else:
            shape = self._left.shape[1], self._right.shape[1]
            self._sum = np.broadcast_to(np.asarray(np.nan, self._right.dtype), shape)
        self._filled = 0


class _KeptRows:
    """The same on a card, whose operands are kept until they are multiplied, each total by itself.

    No sum of products is held beside the totals: each product is added to them when it is made.
    """

    __slots__ = ("_columns", "_filled", "_lefts", "_rights", "_widths", "_xp", "capacity")

    def __init__(self, xp: Namespace, right: Array, lefts: Sequence[Array | None], capacity: int) -> None:
        self._xp = xp
        self._columns = right.shape[1]
        self._widths = [None if left is None else left.shape[0] for left in lefts]
        self.capacity = capacity
        self._rights: list[Array] = []
        self._lefts: list[list[Array]] = [[] for _ in lefts]
        self._filled = 0

    def takes(self, right: Array, lefts: Sequence[Array | None]) -> bool:
        """Return True if these operands fit the block's shapes, except for the number of rows."""
        rows, columns = right.shape
        return (
            columns == self._columns
            and rows <= self.capacity
            and all(
                left is None or left.shape == (width, rows) for left, width in zip(lefts, self._widths, strict=True)
            )
        )

    def is_full_with(self, right: Array) -> bool:
        """Return True if the block has no room for these rows."""
        return self._filled + len(right) > self.capacity

    def add(self, right: Array, lefts: Sequence[Array | None]) -> None:
        """Keep the operands, which have to have room; None stands for a row of ones."""
        self._rights.append(right)
        for kept, left in zip(self._lefts, lefts, strict=True):
            if left is not None:
                kept.append(left.T)
        self._filled += len(right)

    def sums(self) -> list[Array]:
        """Return the products of the rows that wait, which it gives up."""
        xp = self._xp
        # Free operands one by one, as each is joined: holding all of them twice would exceed the plan. One product of
        # all together would need another copy of each.
        right, self._filled = self._joined(self._rights), 0
        return [
            xp.sum(right, axis=0) if width is None else xp.matmul(self._joined(kept).T, right)
            for kept, width in zip(self._lefts, self._widths, strict=True)
        ]

    def _joined(self, parts: list[Array]) -> Array:
        """The rows of `parts`, below one another; the list gives them up."""
        # Stacking arrays of one shape takes a launch for 64 of them; concatenating others takes one for 8.
        xp, first = self._xp, parts[0]
        if len(parts) == 1:
            joined = first
        elif all(part.shape == first.shape for part in parts):
            joined = xp.stack(parts).reshape(-1, first.shape[1])
        else:
            joined = xp.concatenate(parts)
        parts.clear()
        return joined


class PendingSums:
    """Totals, with products still to be added to them.

    Attributes:
        counts: is told of each array that it allocates.
    """

    __slots__ = ("_block", "_block_bytes", "_totals", "_xp", "counts")

    def __init__(self, totals: Sequence[Array], block_bytes: int, xp: Namespace = np) -> None:
        self._xp = xp
        self._totals = list(totals)
        self._block: _PendingRows | _KeptRows | None = None
        self._block_bytes = block_bytes
        self.counts: Callable[[Array], object] = id

    def add(self, rights: Sequence[Array], lefts: Sequence[Array | None]) -> None:
        """Adds ``left @ right`` to each total; the sum of the rows of `right` where `left` is None."""
        right, block = rights[0], self._block
        is_shared = all(other is right for other in rights)
        if block is not None and is_shared and block.takes(right, lefts):
            # The number of rows may grow, and an iteration with few rows has made a small block.
            is_too_small = block.is_full_with(right) and self._most_rows(right, lefts) >= 2 * block.capacity
            if not is_too_small:
                # A card's block has no separate sum, as another array of the totals' size is not planned.
                if isinstance(block, _KeptRows) and block.is_full_with(right):
                    self._add_all(block.sums())
                block.add(right, lefts)
                return
        # Operands of another shape, or products with different right operands: add the pending products first. So the
        # order of additions, and with it the last bits, follows from the operands alone.
        self.settle()
        self._block = block = self._new_block(right, lefts) if is_shared else None
        if block is not None:
            block.add(right, lefts)
            return
        for place, (left, right) in enumerate(zip(lefts, rights, strict=True)):
            self._add_own(place, self._xp.sum(right, axis=0) if left is None else self._xp.matmul(left, right))

    def settle(self) -> list[Array]:
        """The totals, with all that was pending."""
        if self._block is not None:
            block, self._block = self._block, None
            found = block.sums()
            if isinstance(block, _KeptRows):
                self._add_all(found)  # in place: each product is a separate array
            else:
                for place, added in enumerate(found):
                    self._add(place, added.reshape(self._totals[place].shape))
        return self._totals

    @property
    def nbytes(self) -> int:
        """Bytes of the totals; blocks are bounded separately."""
        return sum(total.nbytes for total in self._totals)

    def _add_all(self, products: Sequence[Array]) -> None:
        for place, product in enumerate(products):
            self._add_own(place, product)

    def _add_own(self, place: int, product: Array) -> None:
        """Add a product that nothing else refers to: the new total takes its memory, beside the old one's."""
        total = self._totals[place]
        if product.shape == total.shape and product.dtype == total.dtype:
            self._totals[place] = self._xp.add(total, product, out=product)
            self.counts(product)
        else:
            self._add(place, product)

    def _add(self, place: int, product: Array) -> None:
        total = self._totals[place] = self._xp.add(self._totals[place], product)
        self.counts(total)

    def _new_block(self, right: Array, lefts: Sequence[Array | None]) -> _PendingRows | _KeptRows | None:
        """Room for several iterations; None if the products are better added one by one."""
        if not self._fits(right, lefts):
            return None
        most = self._most_rows(right, lefts)
        if most <= len(right):
            return None
        # A CPU copies operands while they are in its cache. A card would need a launch for each copy.
        if self._xp is np:
            return _PendingRows(right, lefts, most, self.counts)
        return _KeptRows(self._xp, right, lefts, most)

    def _most_rows(self, right: Array, lefts: Sequence[Array | None]) -> int:
        width = sum(left.shape[0] for left in lefts if left is not None)  # without `left`, the ones exist already
        columns, on_card = int(right.shape[1]), self._xp is not np
        return rows_at_once(len(right), width, columns, right.dtype.itemsize, self._block_bytes, on_card=on_card)

    def _fits(self, right: Array, lefts: Sequence[Array | None]) -> bool:
        if right.ndim != 2:
            return False
        columns = right.shape[1]
        for total, left in zip(self._totals, lefts, strict=True):
            if left is None:
                if total.shape != (columns,):
                    return False
            elif left.ndim != 2 or left.shape[1] != len(right) or total.shape != (left.shape[0], columns):
                return False
        return True


def pays(rows: int, width: int, columns: int) -> bool:
    """Return True if copying ``width + columns`` numbers a row costs less than adding ``width * columns`` to totals."""
    return 0 < rows * (width + columns) < 3 * width * columns


def rows_at_once(rows: int, width: int, columns: int, itemsize: int, block_bytes: int, *, on_card: bool = False) -> int:
    """Return the number of rows worth one product, given the rows of one iteration."""
    if not pays(rows, width, columns):
        return rows
    nbytes, flops = rows * (width + columns) * itemsize, 2.0 * rows * width * columns
    most = most_at_once(rows, enough_rows(width, columns), nbytes, flops, block_bytes, on_card=on_card)
    most = min(most, _ENOUGH_ITERATIONS)
    if on_card:
        most //= 2  # while multiplying, a card holds the block's rows twice, within the planned bytes
        most = most if most >= _WORTH_ITERATIONS else 1
    return rows * most


def enough_rows(width: int, columns: int) -> int:
    """Return the number of rows that a block has at most, unless one iteration has more.

    It does not depend on the memory limit, and is as small as costs nothing. So blocks fit into most limits, and a
    gradient rounds the same with a limit and without.
    """
    return next((rows for numbers, rows in _ENOUGH_ROWS if width * columns <= numbers), _MOST_ROWS)


# -- ops -------------------------------------------------------------------------------------------------------------


Operands: TypeAlias = tuple[tuple[int, int], ...]
"""For each total, the number of its right operand among the inputs, and of its left one: -1 for a row of ones."""


def _add_kernel(xp: Namespace, *, operands: Operands) -> Kernel:
    rights, lefts = zip(*operands, strict=True)

    def add(pending: PendingSums, *inputs: Value) -> PendingSums:
        pending.add([inputs[place] for place in rights], [None if place < 0 else inputs[place] for place in lefts])
        return pending

    return add


def _add_flops(inputs: Sequence[Shape], outputs: Sequence[Shape], *, operands: Operands) -> float:
    values = inputs[1:]
    return sum(
        2.0 * elements((values[left] or (1,))[:1]) * elements(values[right]) for right, left in operands if left >= 0
    )


NEW_SUMS = Op(
    "pending_sums",
    lambda *totals, block_bytes: Spec(VARIANT),  # of unknown shape: it may be large
    lambda xp, *, block_bytes: lambda *totals: PendingSums(totals, block_bytes, xp),
    conduct=NEW_EACH,
    flops=free,
    traits=BATCHED,
)
ADD_PRODUCTS = Op(
    "add_products", lambda *_, operands: Spec(VARIANT), _add_kernel, conduct=NEW_EACH, flops=_add_flops, traits=BATCHED
)
SUMS = Op(
    "sums",
    lambda pending, *, values: values,
    lambda xp, *, values: lambda pending: tuple(pending.settle()),
    conduct=NEW_EACH,
    traits=BATCHED,
)
