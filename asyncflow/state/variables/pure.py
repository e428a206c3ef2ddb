"""Bodies of pure nodes, called as one Python function: what `Variable.update` applies to the old value."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from asyncflow.errors import GraphError
from asyncflow.graph.builtin import CONSTANT, PARAMETER
from asyncflow.graph.facts import UPDATE
from asyncflow.graph.graph import Subgraph
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import host_inputs, runs_on_host
from asyncflow.ops.arrays.shape import RANK, SHAPE, SIZE
from asyncflow.ops.straight_line import LineStep, straight_line
from asyncflow.state.variables.immutable import sealed
from asyncflow.values import Kernel, Namespace, Value


def check_pure(body: Subgraph, label: str) -> None:
    """Checks that `body` may run any number of times.

    Raises:
        GraphError: it uses state, coroutines, random numbers, branches or loops; the message names the node.
    """
    for node in body.nodes:
        fault = None if node.op is PARAMETER else UPDATE.why_not(node.op)
        if fault is not None:
            raise GraphError(
                f"{label}: {node.name} ({node.op.name}) {fault}; the function of an update may run several times and "
                f"is made of pure ops only: compute this outside and pass it as an argument\n  built at {node.location}"
            )


def stays_on_host(x: Tensor) -> bool:
    """Return True if a value is a counter or predicate, which devices leave to the host."""
    return x.shape == () and x.dtype.kind in "biu"


def _host_values(body: Subgraph) -> set[Tensor]:
    """Values that `body` computes on the host, from its inputs there: such as ``i + 1`` for a slice."""
    found = {x for x in body.inputs[1:] if stays_on_host(x)}
    for node in body.nodes:
        is_known = node.op in (SHAPE, SIZE, RANK) or all(x in found for x in node.inputs)
        if node.op is not PARAMETER and is_known:
            found.update(x for x in node.outputs if stays_on_host(x) or node.op is SHAPE)
    return found


def needs_host(body: Subgraph) -> bool:
    """Return True if a node needed by `body` calls user code, or reads a value on the host that a device may have
    made.
    """
    known = _host_values(body)
    return any(
        runs_on_host(node) or any(node.inputs[place] not in known for place in host_inputs(node))
        for node in _needed(body)
    )


def compile_pure(xp: Namespace, function: Subgraph) -> Callable[..., Value]:
    """One Python callable for a body of pure nodes: input values to the result."""
    on_host = set() if xp is np else _host_values(function)
    slots = {tensor: slot for slot, tensor in enumerate(function.inputs)}
    steps: list[LineStep] = []
    for node in _needed(function):
        assert node.op.kernel is not None
        is_counter = all(x in on_host for x in node.outputs)
        kernel = node.op.kernel(np if is_counter else xp, **node.attrs)
        if node.op is CONSTANT and xp is not np and isinstance(kernel(), np.ndarray):
            kernel = _copied_in(xp, kernel)
        operands = tuple(slots[x] for x in node.inputs)
        steps.append(LineStep(_noting(kernel, node), operands, None if node.single else len(node.outputs)))
        for output in node.outputs:
            slots[output] = len(slots)
    call = straight_line(len(function.inputs), steps, slots[function.results[0]])
    # A user's function may keep its returned array, so copy it.
    return call if any(node.op.conduct.is_user for node in _needed(function)) else sealed(call)


def _noting(kernel: Kernel, node: Node) -> Kernel:
    """`kernel`, whose errors name the node: the firing's is that of the whole update."""

    def call(*inputs: Value) -> Value:
        try:
            return kernel(*inputs)
        except Exception as error:
            error.add_note(f"in {node.name} ({node.op.name}), built at {node.location}")
            raise

    return call


def _copied_in(xp: Namespace, constant: Kernel) -> Kernel:
    # Copied at each call, on the caller's stream.
    return lambda: xp.asarray(constant())


def _needed(function: Subgraph) -> list[Node]:
    """The nodes that the result depends on, in the order they were built."""
    needed = {function.results[0].node: None}
    for node in reversed(function.nodes):
        if node in needed:
            needed.update(dict.fromkeys(tensor.node for tensor in node.inputs))
    return [node for node in function.nodes if node in needed and node.op is not PARAMETER]
