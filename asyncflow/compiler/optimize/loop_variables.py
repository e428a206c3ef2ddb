"""Pass: drops loop variables that do not change, or go on like another.

A variable that the body gives back as it is becomes a capture, and two that start and go on alike become one.
"""

from __future__ import annotations

from collections.abc import Hashable

from asyncflow.compiler.optimize.cse import Unhashable, attrs_key
from asyncflow.compiler.program.purity import has_variants
from asyncflow.compiler.program.replacements import Replacements, join_inputs
from asyncflow.graph.graph import Graph
from asyncflow.graph.ir import Tensor
from asyncflow.graph.structured import WhileNode

_DEEPEST = 4
"""How far back the next values of two variables are compared."""


def reduce_loop_variables(graph: Graph) -> None:
    """Does so in all loops of `graph`, inner ones first, in place."""
    replaced = Replacements()
    for node in graph.nodes:
        if replaced.tensors:
            replaced.apply(node)
        for body in node.subgraphs:
            reduce_loop_variables(body)
        if isinstance(node, WhileNode):
            _capture_invariants(node, replaced)
            _join_equal(node, replaced)
    replaced.apply_to_results(graph)


def _capture_invariants(node: WhileNode, replaced: Replacements) -> None:
    n_vars = node.n_vars
    invariant = [place for place, (variable, result) in enumerate(node.carried) if result is variable]
    if len(invariant) == n_vars:
        invariant = invariant[1:]  # a loop iterates on something
    if not invariant:
        return
    moved = set(invariant)
    variables = [place for place in range(n_vars) if place not in moved]
    order = [*variables, *range(n_vars, len(node.inputs)), *invariant]
    replaced.tensors.update((node.outputs[place], node.inputs[place]) for place in invariant)
    node.inputs = [node.inputs[place] for place in order]
    for part in node.subgraphs:
        part.inputs = [part.inputs[place] for place in order]
    node.keep_variables(variables)


def _join_equal(node: WhileNode, replaced: Replacements) -> None:
    n_vars = node.n_vars
    first: dict[Hashable, int] = {}
    stands_for: dict[int, int] = {}
    for place in range(n_vars):
        earlier = first.setdefault(_course(node, place), place)
        if earlier != place:
            stands_for[place] = earlier
    if not stands_for:
        return
    replaced.tensors.update((node.outputs[later], node.outputs[earlier]) for later, earlier in stands_for.items())
    join_inputs(node, stands_for)
    node.keep_variables([place for place in range(n_vars) if place not in stands_for])


def _course(node: WhileNode, place: int) -> Hashable:
    """Equal for variables that have the same value in every iteration: the same first, and then by induction."""
    variable, result = node.carried[place]
    if has_variants([variable]):
        return place
    return variable.spec, _value(node.inputs[place]), _value(result, variable)


def _value(tensor: Tensor, variable: Tensor | None = None, depth: int = 0) -> Hashable:
    """Equal for tensors of one graph that have the same value, given that the `variable` of each does."""
    if tensor is variable:
        return "variable"
    node = tensor.node
    if depth == _DEEPEST or not node.op.is_pure or node.control_inputs:
        return id(tensor)
    try:
        attrs = attrs_key(node)
    except Unhashable:
        return id(tensor)
    inputs = (_value(given, variable, depth + 1) for given in node.inputs)
    return node.op, tensor.index, node.device, attrs, *inputs
