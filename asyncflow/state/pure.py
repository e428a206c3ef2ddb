"""Bodies of pure nodes, called as one Python function: what `Variable.update` applies to the old value."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncflow.errors import GraphError
from asyncflow.graph.builtin import PARAMETER
from asyncflow.graph.graph import STRUCTURED, node_effects
from asyncflow.state.immutable import sealed

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncflow.graph.graph import Subgraph
    from asyncflow.graph.ir import Node
    from asyncflow.graph.op import Kernel


def check_pure(body: Subgraph, label: str) -> None:
    """Checks that `body` may run any number of times.

    Raises:
        GraphError: it uses state, coroutines, random numbers, branches or loops; the message names the node.
    """
    for node in body.nodes:
        fault = None if node.op is PARAMETER else _impurity(node)
        if fault is not None:
            raise GraphError(
                f"{label}: {node.name} ({node.op.name}) {fault}; the function of an update may run several times and "
                f"is made of pure ops only: compute this outside and pass it as an argument\n  built at {node.location}"
            )


def _impurity(node: Node) -> str | None:
    if node.op.name in STRUCTURED:
        return "is a branch or loop"
    if node_effects(node):
        return "uses state or has a side effect"
    if node.op.is_async:
        return "is a coroutine"
    if node.op.is_random or node.op.needs_context:
        return "draws random numbers"
    return "has no value of its own" if node.op.kernel is None else None


def compile_pure(xp: Any, function: Subgraph) -> Callable[..., Any]:
    """One Python callable for a body of pure nodes: input values to the result."""
    slots = {tensor: slot for slot, tensor in enumerate(function.inputs)}
    steps: list[tuple[Kernel, tuple[int, ...], Node]] = []
    for node in _needed(function):
        assert node.op.kernel is not None
        steps.append((node.op.kernel(xp, **node.attrs), tuple(slots[x] for x in node.inputs), node))
        for output in node.outputs:
            slots[output] = len(slots)
    last = slots[function.results[0]]

    def call(*inputs: Any) -> Any:
        values = list(inputs)
        for kernel, sources, node in steps:
            try:
                result = kernel(*[values[source] for source in sources])
            except Exception as error:
                error.add_note(f"in {node.name} ({node.op.name}), built at {node.location}")
                raise
            if node.single:
                values.append(result)
            else:
                values.extend(result)
        return values[last]

    # A user's function may keep the array it returns, so that one is copied.
    return call if any(node.op.is_user for _, _, node in steps) else sealed(call)


def _needed(function: Subgraph) -> list[Node]:
    """The nodes that the result depends on, in the order they were built."""
    needed = {function.results[0].node: None}
    for node in reversed(function.nodes):
        if node in needed:
            needed.update(dict.fromkeys(tensor.node for tensor in node.inputs))
    return [node for node in function.nodes if node in needed and node.op is not PARAMETER]


__all__ = ["check_pure", "compile_pure"]
