"""The most that values and loops may come to, where only a run knows their shapes or numbers of iterations.

A branch gives what the larger of its results takes. A TensorArray of fixed size has as many rows as it was made for.
An inner loop that counts up to the outer loop's counter has at most as many iterations as the counter reaches.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest

from asyncflow.compiler.placement.node_costs import spec_nbytes
from asyncflow.compiler.program.loops.counters import counters, trip_count
from asyncflow.control.stores.tensor_array import STACK, array_node
from asyncflow.graph.builtin import is_constant
from asyncflow.graph.graph import Graph
from asyncflow.graph.ir import Tensor
from asyncflow.graph.op import Memory
from asyncflow.graph.structured import CondNode, StructuredNode, WhileNode
from asyncflow.graph.values.dtypes import VARIANT
from asyncflow.graph.values.shapes import is_static
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.arithmetic.elementwise import ADD, SUBTRACT
from asyncflow.ops.arithmetic.logic import LESS, LESS_EQUAL

_DEPTH = 6
"""Maximum number of nodes looked at behind a value, each of which may have several inputs."""


def largest_spec(value: Tensor, depth: int = _DEPTH) -> Spec:
    """Return the spec of a value at its largest; with open extents if these are not known within `depth` nodes."""
    spec, node = value.spec, value.node
    if is_static(spec.shape) or spec.dtype == VARIANT or not depth:
        return spec
    if isinstance(node, CondNode):
        specs = [largest_spec(body.results[value.index], depth - 1) for body in node.subgraphs]
        return max(specs, key=spec_nbytes) if all(is_static(each.shape) for each in specs) else spec
    if node.op is STACK and spec.shape and is_static(spec.shape[1:]):
        array = array_node(node.inputs[0])
        size = None if array is None or array.attrs["dynamic_size"] else array.inputs[0]
        if size is not None and is_constant(size):
            return Spec(spec.dtype, (int(size.node.attrs["value"]), *spec.shape[1:]))
    if node.op.rows == "elementwise" and node.op.traits.memory is Memory.NEW:
        shapes = [largest_spec(x, depth - 1).shape for x in node.inputs]
        if all(map(is_static, shapes)):
            extents = zip_longest(*(reversed(shape or ()) for shape in shapes), fillvalue=1)
            return Spec(spec.dtype, tuple(max(extent or 0 for extent in each) for each in extents)[::-1])
    return spec


def most_iterations(loop: WhileNode, owners: Mapping[Graph, StructuredNode]) -> int | None:
    """Return the most iterations that a loop may have; None if only a run knows.

    Args:
        loop: which.
        owners: the branch or loop of each body.
    """
    count, node = trip_count(loop), loop.decision.node
    if count is not None or node.op not in (LESS, LESS_EQUAL):
        return count
    counter, bound = node.inputs
    most = _most(loop.captured(loop.predicate).get(bound, bound), owners)
    for place, step in counters(loop):
        start = loop.inputs[place]
        if most is not None and step == 1 and counter is loop.predicate.inputs[place] and is_constant(start):
            return max(0, most - int(start.node.attrs["value"]) + (node.op is LESS_EQUAL))
    return None


def _most(number: Tensor, owners: Mapping[Graph, StructuredNode]) -> int | None:
    """Return the most that a number of a body comes to: a constant, or the counter of a loop around, and constants."""
    if is_constant(number):
        return int(number.node.attrs["value"]) if number.shape == () and number.dtype.kind in "iu" else None
    if number.node.op in (ADD, SUBTRACT):
        left, right = number.node.inputs
        more = _most(right, owners) if number.node.op is ADD or is_constant(right) else None
        most = None if more is None else _most(left, owners)
        return None if most is None or more is None else most + (more if number.node.op is ADD else -more)
    owner = owners.get(number.node.graph)
    body = None if owner is None else next(each for each in owner.subgraphs if each is number.node.graph)
    if owner is None or body is None:
        return None
    outer = owner.captured(body).get(number)
    if outer is not None or not isinstance(owner, WhileNode):
        return None if outer is None else _most(outer, owners)
    for place, step in counters(owner):
        start = owner.inputs[place]
        if step == 1 and body is owner.body and number is body.inputs[place] and is_constant(start):
            count = most_iterations(owner, owners)
            return None if count is None else int(start.node.attrs["value"]) + count - 1
    return None
