"""Bytes that loops hold besides saved values: their inputs, and the most in an iteration.

Values are counted from the node that makes them to the last use of all that keeps their memory: views of them, and
arrays and stores that they were put into. What a loop saves counts elsewhere (`memory_choices`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Container, Iterable, Sequence

from asyncflow.autodiff.stores.saved_values import SAVE
from asyncflow.compiler.memory.largest import largest_spec
from asyncflow.compiler.placement.node_costs import spec_nbytes
from asyncflow.compiler.program.purity import has_variants
from asyncflow.control.stores.tensor_array import STACK, array_node
from asyncflow.graph.builtin import PARAMETER
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import Memory
from asyncflow.graph.structured import WhileNode
from asyncflow.graph.values.dtypes import VARIANT
from asyncflow.graph.values.shapes import Shape
from asyncflow.graph.values.spec import Spec


def standing_bytes(loops: Iterable[WhileNode]) -> int:
    """Return the bytes held besides saved values: the loops' inputs, and the peak of one of their bodies."""
    loops = list(loops)
    sizes = Sizes(loops)
    outside = {x for loop in loops for x in loop.inputs if x.dtype != VARIANT and not x.node.op.traits.is_cheap}
    inside = (most_live(loop.body.nodes, loop.body.results, sizes) for loop in loops)
    return round(sum(map(sizes.of, outside)) + max(inside, default=0.0))


class Sizes:
    """Bytes of values. Stacked TensorArrays tell the lengths that shapes such as ``[None, 3]`` have in some loops."""

    def __init__(self, loops: Iterable[WhileNode]) -> None:
        self._known: dict[Shape, Spec] = {}
        self.arrays: dict[Tensor, float] = {}
        for node in [node for loop in loops for node in loop.body.walk() if node.op is STACK]:
            array, spec, largest = array_node(node.inputs[0]), node.outputs[0].spec, largest_spec(node.outputs[0])
            if largest != spec:
                self._known[spec.shape] = max(largest, self._known.get(spec.shape, largest), key=spec_nbytes)
            if array is not None and not array.attrs["dynamic_size"]:
                self.arrays[array.outputs[0]] = spec_nbytes(largest)

    def of(self, value: Tensor) -> float:
        """Return the bytes of a value; of a TensorArray of fixed size that is stacked, the bytes of its elements."""
        if value in self.arrays:
            return self.arrays[value]
        known = self._known.get(value.shape)
        return spec_nbytes(largest_spec(value) if known is None else Spec(value.dtype, known.shape))


def most_live(
    nodes: Sequence[Node], results: Iterable[Tensor], sizes: Sizes, elsewhere: Container[Tensor] = ()
) -> float:
    """Return the most bytes of values of a straight line that are there at a time, one node after the other.

    While a branch or loop in it runs, what that takes at most is there besides. Values `elsewhere` do not count.
    """
    kept = memory_of_values(nodes, sizes.arrays)
    last = {memory: at for at, node in enumerate(nodes) for x in node.inputs for memory in kept.get(x, ())}
    last.update((memory, len(nodes)) for x in results for memory in kept.get(x, ()))
    gone: dict[int, float] = defaultdict(float)
    live = most = 0.0
    for at, node in enumerate(nodes):
        if node.subgraphs:
            inside = (most_live(body.nodes, body.results, sizes, elsewhere) for body in node.subgraphs)
            most = max(most, live + max(inside))
        for x in node.outputs:
            if x in kept.get(x, ()) and x not in elsewhere:
                live += sizes.of(x)
                gone[last.get(x, at)] += sizes.of(x)
        most = max(most, live)
        live -= gone[at]
    return most


def memory_of_values(nodes: Iterable[Node], arrays: Container[Tensor]) -> dict[Tensor, Collection[Tensor]]:
    """Return for each value the values of `nodes` whose memory it keeps; each stands for the memory made with it."""
    kept: dict[Tensor, Collection[Tensor]] = {}
    for node in nodes:
        for x in node.outputs:
            if x in arrays or _is_memory(x, arrays):
                kept[x] = {x}
            elif node.op is SAVE:
                kept[x] = kept.get(node.inputs[0], ())
            elif x.dtype == VARIANT or node.op is STACK:
                given = [each for each in node.inputs if each.dtype == VARIANT or not node.subgraphs]
                kept[x] = {memory for each in given for memory in kept.get(each, ())}
            elif node.op.traits.is_cheap and node.inputs:
                kept[x] = kept.get(node.inputs[0], ())
    return kept


def _is_memory(value: Tensor, arrays: Container[Tensor]) -> bool:
    """Return True if a node of a body has made memory for a value, which is not saved."""
    node = value.node
    traits = node.op.traits
    is_cast = traits.memory is Memory.ANY and bool(node.inputs) and value.dtype != node.inputs[0].dtype
    if node.op is PARAMETER or value.dtype == VARIANT or (traits.is_cheap and not is_cast):
        return False
    if node.op is STACK:
        array = array_node(node.inputs[0])
        return array is None or array.outputs[0] not in arrays
    return bool(node.subgraphs) or not has_variants(node.inputs)
