"""Half of a pass: matrix products in a loop's body are taken apart if a part need not wait for its iteration.

LSTM cells are mostly written as ``concat([x, h]) @ W``. That is ``x @ W[:k] + h @ W[k:]``, of which the first can be
made ahead for many iterations (`batch_rows`); the second remains in the loop. Conversely, the gradient of a joined
tensor of which only pieces are used is computed for these pieces alone.

The sum is added up in another order, so it is the same within rounding, as all products are that are made ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from functools import reduce
from itertools import accumulate, groupby

from asyncflow.compiler.batching.batch_rows import Classes, classified
from asyncflow.compiler.program.detached import detached_node
from asyncflow.compiler.program.loops.counters import counters
from asyncflow.compiler.program.purity import awaited_nodes
from asyncflow.graph.builtin import is_constant
from asyncflow.graph.ir import Attrs, Node, Tensor
from asyncflow.graph.op import OPAQUE, Op
from asyncflow.graph.structured import WhileNode
from asyncflow.graph.values.shapes import format_shape, is_static
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.arithmetic.elementwise import ADD
from asyncflow.ops.arrays.manipulation import CONCAT
from asyncflow.ops.indexing.indexing import GETITEM
from asyncflow.ops.indexing.keys import ELLIPSIS
from asyncflow.ops.indexing.scatter import sliced_axis
from asyncflow.ops.matrices.products import MATMUL
from asyncflow.values import Array, Kernel, Namespace, Value


def take_apart(loop: WhileNode, on_host: AbstractSet[Tensor] | None = None) -> list[Node]:
    """Take products of `loop` apart, in place; return the nodes to stand in front of it.

    Args:
        loop: a `while`.
        on_host: see `batch_rows`.
    """
    apart = _Apart(loop)
    for place, _ in counters(loop):
        classes = classified(loop, place, on_host)
        for node in list(apart.body.nodes):
            if node.op is MATMUL and node.outputs[0] not in classes.varying:
                apart.take(node, classes)
    apart.narrow()
    return apart.front


class _Apart:
    """The products taken apart in one loop.

    Attributes:
        front: new nodes that stand in front of the loop.
    """

    def __init__(self, loop: WhileNode) -> None:
        self.loop = loop
        self.body = loop.body
        self.front: list[Node] = []
        self.made: list[Node] = []
        self.captured = loop.captured(loop.body)

    def is_outside(self, matrix: Tensor) -> bool:
        """Return True if a tensor of the body is a matrix that exists before the loop."""
        return matrix.spec.rank == 2 and (matrix in self.captured or is_constant(matrix))

    def take(self, product: Node, classes: Classes) -> None:
        """Turn a product of joined rows into a sum of products, if one of them can be made ahead."""
        is_left = product.inputs[1] in classes.fixed
        joined, matrix = product.inputs if is_left else reversed(product.inputs)
        widths = _widths(joined, is_left)
        axis = 0 if is_left else 1
        if widths is None or not self.is_outside(matrix) or (matrix.shape or ())[axis] != sum(widths):
            return
        ends = list(accumulate(widths, initial=0))
        runs = [
            [place for place, _ in run]
            for _, run in groupby(enumerate(joined.node.inputs), lambda pair: _need_not_wait(pair[1], classes))
        ]
        cuts = [(ends[run[0]], ends[run[-1] + 1]) for run in runs]
        rows = [[joined.node.inputs[place] for place in run] for run in runs]
        if len(runs) == 1 or not any(
            not classes.varying.isdisjoint(row)
            and _need_not_wait(row[0], classes)
            and classes.pays_ahead(_joined_spec(row), _cut_spec(matrix, cut, axis), is_left=is_left)
            for row, cut in zip(rows, cuts, strict=True)
        ):
            return
        terms = [
            self._product(product, row, self._cut(product, matrix, cut, axis), is_left)
            for row, cut in zip(rows, cuts, strict=True)
        ]
        # The sum takes the product's place, so all users of the product use the sum.
        op = ADD if is_static(joined.shape) else ADD_ALIKE
        *others, last = terms
        total = reduce(lambda total, term: self._add(op, [total, term], {}, product, product.outputs[0].spec), others)
        self._put_before(product)
        product.op, product.attrs, product.inputs = op, {}, [total, last]

    def narrow(self) -> None:
        """Reduce products to the columns that are cut out of them, if not all columns are used."""
        uses: dict[Tensor, list[Node]] = {}
        for node in self.body.nodes:
            for tensor in node.inputs:
                uses.setdefault(tensor, []).append(node)
        kept = {*awaited_nodes(self.body), *(result.node for result in self.body.results)}
        for product in list(self.body.nodes):
            if product.op is not MATMUL or product in kept:
                continue
            rows, matrix = product.inputs
            (whole,) = product.outputs
            cuts = [_columns(node, whole) for node in uses.get(whole, ())]
            known = {cut for cut in cuts if cut is not None}
            if None in cuts or not self.is_outside(matrix) or whole.shape is None or not whole.shape:
                continue
            columns = whole.shape[-1]
            if columns is None or sum(stop - start for start, stop in known) >= columns:
                continue
            for node, cut in zip(uses[whole], cuts, strict=True):
                assert cut is not None
                piece = self._cut(product, matrix, cut, 1)
                self._put_before(node)
                node.op, node.attrs, node.inputs = MATMUL, product.attrs, [rows, piece]

    def _add(self, op: Op, inputs: Sequence[Tensor], attrs: Attrs, like: Node, spec: Spec) -> Tensor:
        """The output of a new node of the body; `_put_before` says where it stands."""
        self.made.append(detached_node(self.body, op, inputs, attrs, like, spec))
        return self.made[-1].outputs[0]

    def _put_before(self, node: Node) -> None:
        at = self.body.nodes.index(node)
        self.body.nodes[at:at] = self.made
        self.made.clear()

    def _cut(self, like: Node, matrix: Tensor, cut: tuple[int, int], axis: int) -> Tensor:
        """Rows or columns of a matrix, as the body sees them."""
        spec = _cut_spec(matrix, cut, axis)
        entry = ("slice", *cut, None)
        attrs = {"key": (ELLIPSIS, entry) if axis else (entry,)}
        if is_constant(matrix):
            return self._add(GETITEM, [matrix], attrs, like, spec)
        self.front.append(detached_node(self.loop.graph, GETITEM, [self.captured[matrix]], attrs, like, spec))
        outer = self.front[-1].outputs[0]
        inner = self.loop.add_capture(outer, self.body)
        self.captured[inner] = outer
        return inner

    def _product(self, like: Node, row: Sequence[Tensor], matrix: Tensor, is_left: bool) -> Tensor:
        operand = row[0] if len(row) == 1 else self._add(CONCAT, row, {"axis": -1}, like, _joined_spec(row))
        inputs = [operand, matrix] if is_left else [matrix, operand]
        spec = MATMUL.infer(*(tensor.spec for tensor in inputs), **like.attrs)
        assert isinstance(spec, Spec)
        return self._add(MATMUL, inputs, like.attrs, like, spec)


def _widths(joined: Tensor, is_left: bool) -> list[int] | None:
    """Return the extents of the tensors joined along the last axis; None for anything else."""
    node = joined.node
    if node.op is not CONCAT or node.control_inputs or joined.shape is None:
        return None
    rank, axis = len(joined.shape), node.attrs["axis"]
    if not (is_left or rank == 1) or axis not in (-1, rank - 1) or any(x.dtype != joined.dtype for x in node.inputs):
        return None
    widths = [x.shape[-1] if x.shape else None for x in node.inputs]
    known = [width for width in widths if width is not None]
    return known if len(known) == len(widths) else None


def _columns(node: Node, product: Tensor) -> tuple[int, int] | None:
    """The columns that a node cuts out of a product; None if it does anything else."""
    if node.op is not GETITEM or len(node.inputs) > 1 or product.shape is None:
        return None
    cut = sliced_axis(node.attrs["key"], product.shape)
    return cut[1:] if cut is not None and cut[0] == len(product.shape) - 1 > 0 else None


def _need_not_wait(row: Tensor, classes: Classes) -> bool:
    return row in classes.varying or row in classes.fixed


def _joined_spec(row: Sequence[Tensor]) -> Spec:
    spec = CONCAT.infer(*(x.spec for x in row), axis=-1)
    assert isinstance(spec, Spec)
    return spec


def _cut_spec(matrix: Tensor, cut: tuple[int, int], axis: int) -> Spec:
    assert matrix.shape is not None
    extent, (rows, columns) = cut[1] - cut[0], matrix.shape
    return Spec(matrix.dtype, (rows, extent) if axis else (extent, columns))


def _add_alike_kernel(xp: Namespace) -> Kernel:
    def add(left: Array, right: Array) -> Value:
        if left.shape != right.shape:
            raise ValueError(
                f"concat: pieces joined along the last axis must be alike in all others; the products of the pieces "
                f"have shapes {format_shape(left.shape)} and {format_shape(right.shape)}"
            )
        return xp.add(left, right)

    return add


ADD_ALIKE = Op("add_alike", ADD.infer, _add_alike_kernel, traits=OPAQUE)
"""The sum of the products of pieces whose rows only a run knows: joining them would not have broadcast."""
