"""Products of children joined into one: ``v.gather(0) @ u + v.gather(1) @ w`` is both states in a row, times both.

A set then takes the states of all those children at once, and multiplies once; so does its gradient. The order of
additions changes, so results differ within rounding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import reduce

from asyncflow.graph.graph import reopened
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.values.dtypes import DType
from asyncflow.graph.values.shapes import size_of
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.arithmetic.elementwise import ADD, add
from asyncflow.ops.arrays.manipulation import concat
from asyncflow.ops.matrices.products import MATMUL, matmul
from asyncflow.vertex.function import TracedFunction


def join_products(traced: TracedFunction) -> None:
    """Joins products of single children that are added up, in place."""
    joining = _Joining(traced)
    seen: set[Node] = set()
    for node in reversed(traced.body.nodes.copy()):
        if node.op is ADD and node not in seen:
            terms = list(joining.terms(node.outputs[0], seen))
            joining.replace(node, terms)


class _Joining:
    """A vertex function whose products are being joined.

    Attributes:
        places: for each vector that is gathered, which part of the state it is, and of which child.
        fixed: nodes whose values are the same for all vertices.
        uses: how often each value is used.
    """

    def __init__(self, traced: TracedFunction) -> None:
        self.traced = traced
        body = traced.body
        self.places = {
            x: (part, slot)
            for slot, tensors in traced.gathers.items()
            for part, x in enumerate(tensors)
            if x.spec.rank == 1
        }
        captured = {x.node for x in body.captures.values()}
        varied = {x.node for x in body.inputs} - captured
        for node in body.nodes:
            if node.op.conduct.is_random or any(source in varied for source in node.sources):
                varied.add(node)
        self.fixed = set(body.nodes) - varied
        self.uses = Counter(x for node in body.nodes for x in node.inputs)
        self.uses.update([*traced.scattered, *traced.pushes.values()])
        self.awaited = {before for node in body.nodes for before in node.control_inputs}

    def terms(self, x: Tensor, seen: set[Node]) -> Iterator[Tensor]:
        """The terms that are added up to `x`; `seen` gets the nodes that add."""
        node = x.node
        seen.add(node)
        for term in node.inputs:
            inner = term.node
            is_sum = inner.op is ADD and inner not in seen and term.spec == x.spec and self._is_free(inner)
            yield from self.terms(term, seen) if is_sum else (term,)

    def _is_free(self, node: Node) -> bool:
        """Return True if only the sum uses a node, as one of its terms."""
        return self.uses[node.outputs[0]] == 1 and not node.control_inputs and node not in self.awaited

    def _key(self, term: Tensor) -> tuple[int, DType] | None:
        """The part and dtype that products which are joined have in common; None for any other term."""
        node = term.node
        if node.op is not MATMUL or not self._is_free(node):
            return None
        state, weights = node.inputs
        if state not in self.places or weights.node not in self.fixed or weights.spec.rank != 2:
            return None
        if not size_of(state.shape):
            return None
        return (self.places[state][0], node.attrs["dtype"]) if state.dtype == weights.dtype else None

    def replace(self, node: Node, terms: list[Tensor]) -> None:
        """Puts a sum with fewer products in place of a node that adds up all of these."""
        groups: dict[tuple[int, DType], list[Tensor]] = {}
        for term in terms:
            key = self._key(term)
            if key is not None and term.spec == node.outputs[0].spec:
                groups.setdefault(key, []).append(term)
        groups = {key: products for key, products in groups.items() if len(products) > 1}
        if not groups or node.control_inputs or node in self.awaited:
            return
        joined = {product for products in groups.values() for product in products}
        body = self.traced.body
        count = len(body.nodes)
        with reopened(body), body.scoped(device=node.device):
            sums = [term for term in terms if term not in joined]
            total = reduce(add, [*sums, *(self._product(part, group) for (part, _), group in groups.items())])
        made = body.nodes[count:]
        del body.nodes[count:]
        place = body.nodes.index(node)
        body.nodes[place : place + 1] = made
        self._use(node.outputs[0], total)

    def _product(self, part: int, products: list[Tensor]) -> Tensor:
        """One product in place of several of one part of the state."""
        slots = tuple(self.places[product.node.inputs[0]][1] for product in products)
        known = self.traced.side_by_side
        if (part, slots) not in known:
            state = products[0].node.inputs[0]
            width = len(slots) * (size_of(state.shape) or 0)
            known[part, slots] = self.traced.body.add_input(Spec(state.dtype, (width,)), "children")
        return matmul(known[part, slots], concat([product.node.inputs[1] for product in products]))

    def _use(self, old: Tensor, new: Tensor) -> None:
        """Puts a value in place of another, wherever that is used."""
        traced = self.traced
        for node in traced.body.nodes:
            if old in set(node.inputs):
                node.inputs = [new if x is old else x for x in node.inputs]
        traced.scattered[:] = [new if x is old else x for x in traced.scattered]
        traced.pushes.update((name, new) for name, x in traced.pushes.items() if x is old)
