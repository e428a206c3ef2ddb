"""Pass: drops loop variables that do not change, or count like another.

A variable that the body gives back as it is becomes a capture, and two counters that start and go on alike become one.
"""

from __future__ import annotations

from collections.abc import Hashable

from asyncflow.compiler.program.loops.counters import counters
from asyncflow.compiler.program.replacements import Replacements, join_inputs
from asyncflow.graph.builtin import is_constant
from asyncflow.graph.graph import Graph
from asyncflow.graph.structured import WhileNode


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
            _join_counters(node, replaced)
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


def _join_counters(node: WhileNode, replaced: Replacements) -> None:
    first: dict[Hashable, int] = {}
    same: dict[int, int] = {}
    for place, step in counters(node):
        start = node.inputs[place]
        begins: Hashable = start.node.attrs["value"].item() if is_constant(start) else id(start)
        earlier = first.setdefault((start.dtype, begins, is_constant(start), step), place)
        if earlier != place:
            same[place] = earlier
    replaced.tensors.update((node.outputs[later], node.outputs[earlier]) for later, earlier in same.items())
    join_inputs(node, same)
    if same:
        node.keep_variables([place for place in range(node.n_vars) if place not in same])
