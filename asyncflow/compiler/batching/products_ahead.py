"""Matrix products whose rows are known ahead of a loop's iterations, several iterations at a time (Cavs' eager ops).

Nothing in ``xs[t] @ W`` depends on the loop's variables, but for the counter `t`. So the products of the next
iterations are one product, of all their rows at once, made when the first of them is asked for. The nodes that make the
rows (``xs[t]``) run once for each iteration as in the loop, only earlier.

Blocks begin with one iteration and double, so a loop that ends early has made no more rows in vain than it has used.
Where the predicate says how many iterations are left, blocks are as long as pays. On a CPU that is some thousand rows,
fewer if the event loop makes them. A card makes the rows of all iterations at once if there is room: one launch costs
more than it saves to keep the rows in a cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from math import inf, prod
from threading import Lock
from typing import Any

import numpy as np

from asyncflow.devices.memory import MemoryLimitExceeded
from asyncflow.devices.values import as_scalar
from asyncflow.graph.ir import Node
from asyncflow.graph.op import BATCHED, NEW_EACH, Op, find_op
from asyncflow.graph.values.dtypes import VARIANT, DType
from asyncflow.graph.values.shapes import Shape
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.cost import elements, free
from asyncflow.ops.indexing.indexing import GETITEM
from asyncflow.ops.matrices.products import MATMUL
from asyncflow.ops.straight_line import LineStep, straight_line
from asyncflow.values import Array, Kernel, Namespace, Value

ENOUGH_ROWS = 4096
"""Number of rows with which a matrix product is as fast as it gets; with 512 rows it takes a fifth longer."""

INLINE_FLOPS = 8e6
"""The arithmetic done in one go of work that is done on the event loop: less than 0.2 ms on one core."""

LONG_FLOPS = 2e6
"""Floating-point operations of a product too long for the event loop (`asyncflow.compiler.placement.node_costs`)."""

_REMEMBERED = 256
"""Blocks that an iteration which comes late may still ask for; more overlap only if `parallel_iterations` says so."""


def most_at_once(
    rows: int, enough: float, nbytes: int, flops: float, block_bytes: int, *, on_card: bool = False
) -> int:
    """Return the number of iterations worth doing at once, at least 1.

    Args:
        rows: of one iteration.
        enough: of all together.
        nbytes: of the operands and results of one.
        flops: of its products.
        block_bytes: most bytes of all together.
        on_card: a card makes the products, and the event loop only launches them.
    """
    most = min(enough / max(rows, 1), block_bytes / max(nbytes, 1))
    if flops < LONG_FLOPS and not on_card:
        most = min(most, INLINE_FLOPS / max(flops, 1))  # the block is computed on the event loop, like a single row
    return max(1, int(most))


# -- steps that compute rows -----------------------------------------------------------------------------------------

Steps = tuple[tuple[str, dict[str, object], tuple[int, ...], bool], ...]
"""Ops with their attributes, the numbers of their inputs, and True if the host computes the step for a card. Number 0
is the loop's counter, then come the inputs of the node, then the results of earlier steps."""


@dataclass(slots=True)
class _BlockProgress:
    """Progress of a block, passed to each step; a step may fall short.

    Attributes:
        count: number of iterations complete so far.
        rows: of one iteration's products.
        nbytes: of their operands and results.
        flops: of them.
    """

    count: int
    rows: int = 0
    nbytes: int = 0
    flops: float = 0.0

    def add(self, row: Array, matrix: Array, product: Array) -> None:
        """Count the product of one iteration."""
        rows = row.size // max(row.shape[-1], 1)
        self.rows = max(self.rows, rows)
        self.nbytes += row.nbytes + product.nbytes
        self.flops += 2.0 * row.size * matrix.size / max(row.shape[-1], 1)


def _bound(xp: Namespace, steps: Steps, results: Sequence[int], n_inputs: int) -> Kernel:
    """The maker of a block, of a `_BlockProgress`, the counters of its iterations and the inputs of the node."""
    varying = [False, True, *[False] * n_inputs]
    line: list[LineStep] = []
    for name, attrs, inputs, on_host in steps:
        op, operands = find_op(name), tuple(1 + place for place in inputs)
        assert op.kernel is not None
        kernel = op.kernel(np if on_host else xp, **attrs)
        if on_host:
            kernel = _giving_scalars(kernel)
        varies = [varying[place] for place in operands]
        varying.append(any(varies))
        if any(varies):  # else it is computed once for all iterations
            is_slice = op is GETITEM and attrs["key"] == (("input", 0),) and varies == [False, True]
            if op is MATMUL:
                kernel = _joined(xp, kernel, varies)
            else:
                kernel = _one_by_one(kernel, varies, xp.ndarray if is_slice else None)
            operands = 0, *operands
        line.append(LineStep(kernel, operands))
    return straight_line(2 + n_inputs, line, [1 + place for place in results])


def _giving_scalars(kernel: Kernel) -> Kernel:
    return lambda *operands: as_scalar(kernel(*operands))


def _one_by_one(kernel: Kernel, varies: Sequence[bool], sliced: type[Array] | None) -> Kernel:
    """`kernel` for each iteration, up to the first for which it fails; that is an error only for the very first.

    Args:
        kernel: of a step.
        varies: which of its operands differ from iteration to iteration.
        sliced: the type of arrays whose rows the kernel picks by the counter alone; None for any other kernel.
    """

    def step(progress: _BlockProgress, *operands: Any) -> Sequence[Value] | Array:
        is_slice = sliced is not None and isinstance(operands[0], sliced)
        rows = _neighbours(operands[0], operands[1], progress.count) if is_slice else None
        if rows is not None:
            return rows
        columns = [operand if each else repeat(operand) for operand, each in zip(operands, varies, strict=True)]
        found: list[Value] = []
        for _, *arguments in zip(range(progress.count), *columns, strict=False):
            try:
                found.append(kernel(*arguments))
            except Exception as error:
                if not found or isinstance(error, MemoryLimitExceeded):
                    raise
                break
        progress.count = len(found)
        return found

    return step


def _joined(xp: Namespace, kernel: Kernel, varies: Sequence[bool]) -> Kernel:
    """Return `kernel`, a matrix product, for all iterations at once, as far as their rows fit below one another."""
    is_left, array_type, on_card = varies[0], xp.ndarray, xp is not np

    def step(progress: _BlockProgress, *operands: Any) -> Sequence[Array]:
        rows, matrix = operands if is_left else operands[::-1]
        rows, first = rows[: progress.count], rows[0]
        by = matrix if is_left or matrix.ndim != 2 else matrix.T
        fits = matrix.ndim == 2 and first.ndim >= 1 and (is_left or first.ndim == 1) and first.shape[-1] == by.shape[0]
        is_array = isinstance(rows, array_type)
        products: Sequence[Array]
        progress.count = (len(rows) if is_array else _alike(rows)) if fits else 1
        rows = rows[: progress.count]
        if progress.count <= 1:
            products = [kernel(first, matrix) if is_left else kernel(matrix, first)]
        elif is_array or (on_card and all(row.shape == first.shape for row in rows)):
            # On a card one kernel stacks many rows, but concatenates only few.
            product = kernel((rows if is_array else xp.stack(rows)).reshape(-1, by.shape[0]), by)
            products = product.reshape(progress.count, *first.shape[:-1], product.shape[1])
        else:
            products = _split(kernel(xp.concatenate([row.reshape(-1, by.shape[0]) for row in rows]), by), rows)
        progress.add(first, matrix, products[0])
        return products

    return step


def _alike(rows: Sequence[Array]) -> int:
    """Return the number of first `rows` that fit below one another: matrices may have different numbers of rows."""
    first = rows[0]
    fixed = 1 if first.ndim == 2 else 0
    others = (
        place for place, row in enumerate(rows) if row.ndim != first.ndim or row.shape[fixed:] != first.shape[fixed:]
    )
    return next(others, len(rows))


def _split(product: Array, rows: Sequence[Array]) -> list[Array]:
    """The products of each of `rows`, which were one below the other."""
    found, start = [], 0
    for row in rows:
        end = start + prod(row.shape[:-1])
        found.append(product[start:end].reshape(*row.shape[:-1], product.shape[1]))
        start = end
    return found


def _neighbours(array: Array, indices: Sequence[Any], count: int) -> Array | None:
    """The rows of `array` at `indices`, if they follow each other; None if not, or if there are none."""
    first, last = int(indices[0]), int(indices[count - 1])
    if array.ndim < 2 or not (0 <= first < len(array) and 0 <= last < len(array)):
        return None
    step = 1 if first <= last else -1
    if any(index != first + step * place for place, index in enumerate(indices[:count])):
        return None
    return array[first : last + 1] if step > 0 else array[last : first + 1][::-1]


@dataclass(frozen=True, slots=True)
class _MadeAhead:
    """Products made for the iterations from the one with the counter `first` on."""

    first: int
    step: int
    count: int
    outputs: Sequence[Sequence[Any]]
    nbytes: int

    def has(self, index: int) -> bool:
        """Return True if the iteration with this counter is one of them."""
        return 0 <= (index - self.first) * self.step < self.count


@dataclass(frozen=True, slots=True)
class _Course:
    """The course of a counter through the iterations.

    Attributes:
        dtype: of the counter.
        step: 1 or -1.
        margin: number of iterations left beyond the distance to the bound; None without a bound.
        is_exact: the loop runs up to the bound, if nothing fails.
    """

    dtype: DType
    step: int
    margin: int | None
    is_exact: bool


class ProductsAhead:
    """The products of a loop's next iterations. It holds the last two blocks, as iterations overlap.

    Blocks follow one another from the loop's first iteration on, whichever iteration asks first. So the members of a
    product, and its last bits, do not depend on the order of the iterations.
    """

    __slots__ = (
        "_asked",
        "_block_bytes",
        "_blocks",
        "_bound",
        "_course",
        "_end",
        "_inputs",
        "_lock",
        "_next",
        "_on_card",
        "_program",
    )

    def __init__(
        self, program: Kernel, course: _Course, block_bytes: int, inputs: Sequence[Any], *, on_card: bool
    ) -> None:
        self._program = program
        self._on_card = on_card
        self._course = course
        self._block_bytes = block_bytes
        self._bound = None if course.margin is None else int(inputs[-2])
        self._inputs = inputs
        self._end = int(inputs[-1])
        """The counter of the iteration behind all blocks."""
        self._blocks: tuple[_MadeAhead, ...] = ()
        self._asked: deque[tuple[int, int]] = deque(maxlen=_REMEMBERED)
        """Counters at which blocks began, and the number of iterations asked for."""
        self._next = 1
        self._lock = Lock()

    def row(self, which: int, index: int) -> Value:
        """Return output number `which` in the iteration with the counter `index`."""
        # No lock, as most iterations find their row here: the tuple of blocks is replaced as a whole.
        for block in self._blocks:
            place = (index - block.first) * block.step
            if 0 <= place < block.count:
                return block.outputs[which][place]
        with self._lock:
            block = next((block for block in self._blocks if block.has(index)), None) or self._block_of(index)
        return block.outputs[which][(index - block.first) * block.step]

    @property
    def nbytes(self) -> int:
        """Bytes of the rows held."""
        return sum([block.nbytes for block in self._blocks])

    def _block_of(self, index: int) -> _MadeAhead:
        step = self._course.step
        if (index - self._end) * step < 0:  # computed before, and dropped
            found = next((each for each in reversed(self._asked) if (index - each[0]) * step >= 0), (index, 1))
            return self._make(*found)[0]
        while True:
            first, count = self._end, self._next
            try:
                block, progress = self._make(first, count)
            except Exception:
                if first == index:
                    raise
                return self._make(index, 1)[0]  # the failing iteration raises when its turn comes
            self._asked.append((first, count))
            self._end = first + step * block.count
            most = self._most(progress)
            self._next = most if self._course.is_exact else min(2 * self._next, most)
            if block.has(index):
                return block

    def _most(self, of_one: _BlockProgress) -> int:
        enough, on_card = inf if self._on_card else ENOUGH_ROWS, self._on_card
        return most_at_once(of_one.rows, enough, of_one.nbytes, of_one.flops, self._block_bytes, on_card=on_card)

    def _make(self, first: int, count: int) -> tuple[_MadeAhead, _BlockProgress]:
        counters = self._counters(first, count)
        progress = _BlockProgress(len(counters))
        outputs = self._program(progress, counters, *self._inputs)
        nbytes = sum(
            [rows.nbytes if hasattr(rows, "nbytes") else sum([row.nbytes for row in rows]) for rows in outputs]
        )
        block = _MadeAhead(first, self._course.step, progress.count, outputs, nbytes)
        self._blocks = (block, *self._blocks[:1])
        return block, progress

    def _counters(self, index: int, count: int) -> Sequence[Value]:
        course = self._course
        if self._bound is not None and course.margin is not None:
            count = min(count, (self._bound - index) * course.step + course.margin)
        # Stop at the end of the dtype, where the counter would wrap around; the loop itself may never get there.
        limits = np.iinfo(course.dtype)
        count = min(count, limits.max - index + 1 if course.step > 0 else index - limits.min + 1)
        ahead = range(index, index + course.step * max(count, 1), course.step)
        return list(np.array(ahead, course.dtype))


# -- ops -------------------------------------------------------------------------------------------------------------


Course = tuple[DType, int, int | None, bool]
"""The attributes of a `_Course`, as a graph holds them."""


def _ahead_kernel(
    xp: Namespace, *, steps: Steps, results: tuple[int, ...], n_inputs: int, course: Course, block_bytes: int
) -> Kernel:
    program = _bound(xp, steps, results, n_inputs)
    on_card = xp is not np
    return lambda *inputs: ProductsAhead(program, _Course(*course), block_bytes, inputs, on_card=on_card)


def _ends(node: Node) -> Sequence[int]:
    """The inputs that say where the counter begins and ends."""
    count, margin = len(node.inputs), node.attrs["course"][2]
    return (count - 1,) if margin is None else (count - 2, count - 1)


def _row_flops(inputs: Sequence[Shape], outputs: Sequence[Shape], *, which: int, value: Spec, summed: int) -> float:
    return 2.0 * elements(outputs[0]) * summed  # its share of the large product


# Each result belongs to one activation of one loop, so two equal nodes are never merged into one. Its shape is unknown,
# so it may be large.
PRODUCTS_AHEAD = Op(
    "rows_ahead",
    lambda *_, **attrs: Spec(VARIANT),
    _ahead_kernel,
    conduct=NEW_EACH,
    flops=free,
    host_inputs=_ends,
    traits=BATCHED,
)
PRODUCT_AHEAD = Op(
    "row_ahead",
    lambda *_, which, value, summed: value,
    lambda xp, *, which, value, summed: lambda rows, counter, *needed: rows.row(which, int(counter)),
    flops=_row_flops,
    host_inputs=(1,),
    traits=BATCHED,
)
"""One row of a `ProductsAhead`; further inputs are what fails in this iteration if its rows cannot be made."""
