"""Half of a pass: matrix products in a loop's body that depend on its counter and its captures are made ahead.

Found are the products themselves and what their rows are made of: rows of captured arrays, and what cheap ops make of
them. All that becomes a small program, which a node in front of the loop holds; in the body a product becomes a look at
what the program has made (`products_ahead`). The nodes that made its rows are then dropped from the body, unless they
may fail: those run in their own iteration as before, and the product waits for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from asyncflow.autodiff.stores.saved_values import READ_SAVED
from asyncflow.compiler.batching.products_ahead import ENOUGH_ROWS, PRODUCT_AHEAD, PRODUCTS_AHEAD
from asyncflow.compiler.program.detached import detached_node
from asyncflow.compiler.program.host_values import computes_on_host, finds_its_inputs, is_metadata
from asyncflow.compiler.program.loops.counters import counters
from asyncflow.compiler.program.purity import awaited_nodes, cannot_fail, has_variants
from asyncflow.control.stores.tensor_array import READ, UNSTACK
from asyncflow.graph.builtin import CONSTANT, is_constant
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import Memory, Op, host_inputs, runs_on_host
from asyncflow.graph.structured import WhileNode
from asyncflow.graph.values.dtypes import VARIANT
from asyncflow.graph.values.shapes import size_of
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.arithmetic.elementwise import FLOOR_DIVIDE, REMAINDER
from asyncflow.ops.arithmetic.logic import GREATER, GREATER_EQUAL, LESS, LESS_EQUAL, LOGICAL_AND
from asyncflow.ops.cost import free
from asyncflow.ops.indexing.indexing import GETITEM
from asyncflow.ops.matrices.products import MATMUL

FAST = frozenset({"float32", "float64", "complex64", "complex128"})
"""Dtypes that have a matrix product in BLAS."""

_WORTH_FLOPS = 200_000
"""On a CPU smaller products take no longer than looking for the row that was made ahead. To launch one on a card takes
longer, whatever its size."""


def batch_rows(loop: WhileNode, block_bytes: int, on_host: AbstractSet[Tensor] | None = None) -> list[Node]:
    """Make products of `loop` ahead, in place; return the nodes to stand in front of it.

    Args:
        loop: a `while`.
        block_bytes: most bytes of a block of rows.
        on_host: where a device is a card, the tensors whose values are on the host; None without cards.
    """
    moved: list[Node] = []
    for place, step in counters(loop):
        classes = classified(loop, place, on_host)
        products = _find(loop, place, classes)
        if products:
            moved += _Move(loop, place, step, classes, products, block_bytes).run()
    return moved


# -- products that can be computed ahead -----------------------------------------------------------------------------


@dataclass(slots=True)
class Classes:
    """Dependencies of the tensors of a body.

    Attributes:
        captured: captures, and the tensors outside that they stand for.
        on_host: see `batch_rows`.
        fixed: tensors that are the same in every iteration.
        varying: tensors that depend on the counter as well.
        products: matrix products among the nodes of `varying` that are faster with many rows.
    """

    captured: dict[Tensor, Tensor]
    on_host: AbstractSet[Tensor] | None = None
    fixed: set[Tensor] = field(default_factory=set)
    varying: set[Tensor] = field(default_factory=set)
    products: dict[Node, None] = field(default_factory=dict)

    def classify(self, node: Node) -> None:
        """Classify the outputs of a node; its inputs are classified already."""
        if node.outputs and is_constant(node.outputs[0]):
            self.fixed.update(node.outputs)
        elif self._may_move(node):
            if self.varying.isdisjoint(node.inputs):
                self.fixed.update(node.outputs)
            elif _is_cheap(node):
                self.varying.update(node.outputs)
            elif self._is_row_product(node):
                self.varying.update(node.outputs)
                self.products[node] = None

    def _may_move(self, node: Node) -> bool:
        if not (node.op.is_pure and node.single) or node.control_inputs:
            return False
        if not node.inputs or not all(tensor in self.varying or tensor in self.fixed for tensor in node.inputs):
            return False
        if self.on_host is not None and not self._runs_ahead_on_cards(node, self.on_host):
            return False
        if node.op is READ:  # a read uses up the array, so read the unstacked value instead
            return self.captured[node.inputs[0]].node.op is UNSTACK
        return node.op.traits.memory is Memory.STORE or not has_variants((*node.inputs, *node.outputs))

    def _is_row_product(self, node: Node) -> bool:
        if node.op is not MATMUL:
            return False
        left, right = node.inputs
        is_left = right in self.fixed
        row, matrix = (left, right) if is_left else (right, left)
        return matrix in self.fixed and self.pays_ahead(row.spec, matrix.spec, is_left=is_left)

    def pays_ahead(self, row: Spec, matrix: Spec, *, is_left: bool) -> bool:
        """`pays_ahead`, on this session's devices."""
        return pays_ahead(row, matrix, is_left=is_left, on_card=self.on_host is not None)

    def _runs_ahead_on_cards(self, node: Node, on_host: AbstractSet[Tensor]) -> bool:
        """Return True if a card computes the node by the op's own kernel, of values that are where the kernel reads
        them.

        Kernels of other nodes are bound with more than the op: with copies of the host's values, or with casts.
        """
        if computes_on_host(node, on_host):
            # In a CUDA graph other numbers of the host, such as learning rates, are on the card.
            return all(x.dtype.kind in "biu" or is_constant(x) or x in self.varying for x in node.inputs)
        if runs_on_host(node) or is_metadata(node) or node.op in (FLOOR_DIVIDE, REMAINDER, READ_SAVED):
            # A saved value may be away from the card until its iteration reads it. Reading ahead would bring it back
            # too early, or end the block there: the last bits would depend on when copies end.
            return False
        if any(tensor.dtype.name == "bfloat16" for tensor in node.outputs) or not finds_its_inputs(node, on_host):
            return False
        read = host_inputs(node)
        return any(tensor not in on_host for index, tensor in enumerate(node.inputs) if index not in read)


def pays_ahead(row: Spec, matrix: Spec, *, is_left: bool, on_card: bool = False) -> bool:
    """Return True if a product with a fixed matrix becomes faster with many rows at once.

    Args:
        row: the operand that changes from iteration to iteration.
        matrix: the fixed operand.
        is_left: the row stands on the left.
        on_card: a card computes the product.
    """
    if row.dtype.name not in FAST or row.dtype != matrix.dtype:
        return False
    if matrix.rank != 2 or row.shape is None or not row.shape:
        return False
    if not is_left and len(row.shape) > 1:
        return False
    rows, size = size_of(row.shape[:-1]), size_of(matrix.shape)
    if rows is None or size is None:
        return True
    return 4 * rows <= ENOUGH_ROWS and (on_card or 2 * rows * size >= _WORTH_FLOPS)


def _is_cheap(node: Node) -> bool:
    """Return True if running it a second time costs next to nothing beside a product."""
    return node.op.flops in (None, free) or node.op is GETITEM


def classified(loop: WhileNode, place: int, on_host: AbstractSet[Tensor] | None = None) -> Classes:
    """Dependencies of the tensors of a loop's body, of which the loop variable at `place` is the counter."""
    classes = Classes(loop.captured(loop.body), on_host)
    if on_host is not None and loop.body.inputs[place] not in on_host:
        return classes  # each read of a row would wait for the card
    classes.fixed.update(classes.captured)
    classes.varying.add(loop.body.inputs[place])
    for node in loop.body.nodes:
        classes.classify(node)
    return classes


def _find(loop: WhileNode, place: int, classes: Classes) -> dict[Node, set[Node]]:
    """The products that can be made ahead by one counter, and for each the nodes that it is made by."""
    program: set[Node] = set()
    products: dict[Node, set[Node]] = {}
    for product in classes.products:
        members = _ancestors(product, loop.body.inputs[place].node, classes.captured)
        devices = {node.device for node in (*program, *members) if node.op is not CONSTANT}
        labels = {node.colocated_with for node in (*products, product)}
        if len(devices) == 1 and (classes.on_host is None or len(labels) == 1):
            program |= members
            products[product] = members
    return products


def _ancestors(product: Node, counter: Node, captured: Iterable[Tensor]) -> set[Node]:
    """`product` and all it is made by, down to the counter and captures."""
    ends = {counter, *(tensor.node for tensor in captured)}
    found, stack = {product}, [product]
    while stack:
        for tensor in stack.pop().inputs:
            if tensor.node not in found and tensor.node not in ends:
                found.add(tensor.node)
                stack.append(tensor.node)
    return found


# -- bounds of the loop ----------------------------------------------------------------------------------------------

_BOUNDS: dict[Op, tuple[int, int]] = {LESS: (1, 0), LESS_EQUAL: (1, 1), GREATER: (-1, 0), GREATER_EQUAL: (-1, 1)}
"""Comparisons of a counter with a bound: the step that leads there, and how many iterations there are at the bound."""
_SWAPPED: dict[Op, Op] = {LESS: GREATER, LESS_EQUAL: GREATER_EQUAL, GREATER: LESS, GREATER_EQUAL: LESS_EQUAL}


@dataclass(frozen=True, slots=True)
class _Bound:
    value: Tensor
    margin: int
    is_exact: bool


def _bound(loop: WhileNode, place: int, step: int, on_host: AbstractSet[Tensor] | None) -> _Bound | None:
    """Return the counter's bound in the predicate; `value` is a tensor outside, or a constant inside."""
    outer, compared = loop.captured(loop.predicate), loop.predicate.inputs[place]
    terms = list(_terms(loop.decision))
    for term in terms:
        if term.node.op not in _BOUNDS:
            continue
        op, (counter, value) = term.node.op, term.node.inputs
        if value is compared:
            op, counter, value = _SWAPPED[op], value, counter
        leads_there = counter is compared and _BOUNDS[op][0] == step
        is_known = (value in outer or is_constant(value)) and value.dtype.kind in "iu" and value.shape == ()
        is_found = on_host is None or is_constant(value) or value in on_host
        if leads_there and is_known and is_found:
            return _Bound(outer.get(value, value), _BOUNDS[op][1], len(terms) == 1)
    return None


def _terms(predicate: Tensor) -> Iterator[Tensor]:
    """All that must hold."""
    if predicate.node.op is LOGICAL_AND:
        for part in predicate.node.inputs:
            yield from _terms(part)
    else:
        yield predicate


# -- the move --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Move:
    """A move of products with one counter out of a loop's body."""

    loop: WhileNode
    place: int
    step: int
    classes: Classes
    products: dict[Node, set[Node]]
    block_bytes: int
    program: list[Node] = field(default_factory=list)
    outer: dict[Tensor, int] = field(default_factory=dict)
    """Outside tensors, with their numbers in the program."""
    constants: dict[Tensor, Tensor] = field(default_factory=dict)
    """Constants of the body, with equal ones in front of the loop."""

    def run(self) -> list[Node]:
        members = set().union(*self.products.values())
        self.program = [node for node in self.loop.body.nodes if node in members and node.op is not CONSTANT]
        like = next(iter(self.products))
        front: list[Node] = []
        sources = [[self._source(node, tensor, front) for tensor in node.inputs] for node in self.program]
        outer = list(self.outer)
        on_host = self.classes.on_host
        bound = _bound(self.loop, self.place, self.step, on_host)
        if bound is not None:
            value = bound.value
            if is_constant(value):
                value = self._in_front(value, front)
            outer.append(value)
        outer.append(self.loop.inputs[self.place])
        numbers = {node: 1 + len(outer) + place for place, node in enumerate(self.program)}
        steps = tuple(
            _as_step(
                node,
                tuple(each if isinstance(each, int) else numbers[each] for each in inputs),
                on_host is not None and computes_on_host(node, on_host),
            )
            for node, inputs in zip(self.program, sources, strict=True)
        )
        counter = self.loop.body.inputs[self.place]
        ends = (None, False) if bound is None else (bound.margin, bound.is_exact)
        ahead = detached_node(self.loop.graph, PRODUCTS_AHEAD, outer, {}, like, Spec(VARIANT))
        rows = self.loop.add_capture(ahead.outputs[0], self.loop.body)
        kept = self._replace(rows, counter)
        if on_host is not None:
            # Cards cannot read each other's memory, and device requests were resolved before this pass: so colocate the
            # nodes of the store here.
            ahead.colocated_with = ahead.colocated_with or ahead.name
            for node in kept:
                node.colocated_with = ahead.colocated_with
        ahead.attrs.update(
            steps=steps,
            results=tuple(numbers[node] for node in kept),
            n_inputs=len(outer),
            course=(counter.dtype, self.step, *ends),
            block_bytes=self.block_bytes,
        )
        return [*front, ahead]

    def _in_front(self, constant: Tensor, front: list[Node]) -> Tensor:
        like = next(iter(self.products))
        front.append(detached_node(self.loop.graph, CONSTANT, (), constant.node.attrs, like, constant.spec))
        return front[-1].outputs[0]

    def _source(self, node: Node, tensor: Tensor, front: list[Node]) -> int | Node:
        """The number of an input of a node of the program, or the node that makes it."""
        if tensor is self.loop.body.inputs[self.place]:
            return 0
        if tensor not in self.classes.captured and is_constant(tensor):
            # Constants are placed with the device that computes, which only a node of the plan can request.
            if tensor not in self.constants:
                self.constants[tensor] = self._in_front(tensor, front)
            return self.outer.setdefault(self.constants[tensor], 1 + len(self.outer))
        if tensor not in self.classes.captured:
            return tensor.node
        outer = self.classes.captured[tensor]
        if node.op is READ and tensor is node.inputs[0]:
            outer = outer.node.inputs[1]
        return self.outer.setdefault(outer, 1 + len(self.outer))

    def _replace(self, rows: Tensor, counter: Tensor) -> list[Node]:
        """Make the body's products read `rows`, drop nodes that become unused, and return the remaining products."""
        products = self.products
        droppable = {node for node in self.program if cannot_fail(node)}
        for product, members in products.items():
            needed = {
                node.outputs[0]: None
                for node in self.program
                if node in members and node not in products and node not in droppable
            }
            if product not in droppable:
                needed |= dict.fromkeys(product.inputs)
            row = next(tensor for tensor in product.inputs if tensor in self.classes.varying)
            summed = (row.shape or (None,))[-1] or 1
            product.attrs = {"which": 0, "value": product.outputs[0].spec, "summed": summed}
            product.op = PRODUCT_AHEAD
            product.inputs = [rows, counter, *needed]
        self._drop(droppable)
        kept = [node for node in self.loop.body.nodes if node in products]
        for which, node in enumerate(kept):
            node.attrs["which"] = which
        return kept

    def _drop(self, droppable: set[Node]) -> None:
        used = {*awaited_nodes(self.loop.body), *(result.node for result in self.loop.body.results)}
        kept: list[Node] = []
        for node in reversed(self.loop.body.nodes):
            if node in droppable and node not in used:
                continue
            kept.append(node)
            used.update(tensor.node for tensor in node.inputs)
        self.loop.body.nodes[:] = kept[::-1]


def _as_step(
    node: Node, inputs: tuple[int, ...], on_host: bool
) -> tuple[str, dict[str, object], tuple[int, ...], bool]:
    if node.op is READ:
        return GETITEM.name, {"key": (("input", 0),)}, inputs, on_host
    return node.op.name, node.attrs, inputs, on_host
