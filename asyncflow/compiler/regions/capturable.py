"""Capture of nodes in CUDA graphs: allowed are nodes known to launch kernels, or to work on a store or a variable.

Left out are tensor products (CuPy calls cuBLAS for them, which it does not while a stream captures). So are sorting,
linear algebra and ops with data-dependent shapes (they wait for the device). So are random numbers, queues and users'
functions. Products of matrices are not CuPy's on a device that captures (`devices/cuda/graphs/products.py`).

A store of saved values, or a TensorArray, is a list of addresses while Python captures, if no other region uses it. The
graph has nothing of the list. A variable is at a fixed address, where the graph reads and writes it.

Python decides while it captures. So branches and loops in a graph follow the values on the host at that time, which are
part of the graph's validity. Only loops that a device runs by itself decide by its own values, and so do branches and
loops in them. These work on no store and no variable.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet

from asyncflow.autodiff.stores.saved_values import MOVING_STORE, READ_SAVED
from asyncflow.compiler.program.host_values import add_host_values, computes_on_host, finds_its_inputs, keeping
from asyncflow.compiler.program.loops.counters import trip_count
from asyncflow.compiler.regions.device_logs import inner_stores, is_new_store, origins, saves_of
from asyncflow.compiler.regions.regions import Region
from asyncflow.devices.decisions import LogSpec
from asyncflow.errors import counted
from asyncflow.graph.builtin import CONSTANT, IDENTITY, NO_OP, PARAMETER
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import WAITS, Op, runs_on_host
from asyncflow.graph.structured import CondNode, StructuredNode, WhileNode
from asyncflow.graph.values.dtypes import VARIANT
from asyncflow.graph.values.shapes import is_static
from asyncflow.graph.values.spec import Spec
from asyncflow.state.variables.variable import UPDATE, VARIABLE_READ
from asyncflow.values import Kernel, Namespace

_NO_LAUNCH = CONSTANT, IDENTITY, NO_OP, PARAMETER

_COPIES_A_LAUNCH = 2
"""Number of array copies in or out of a graph's buffers that take as long as launching a kernel from Python."""

_LEAST_GAIN = 2
"""Launches that looking up and launching the graph take."""

_USUAL_ITERATIONS = 8
"""Number of iterations of a loop, if it is not known: for fewer a graph costs a few launches more than it saves."""


def why_not_captured(region: Region, on_host: AbstractSet[Tensor]) -> str | None:
    """Return the reason why a region does not become a CUDA graph; None if it can, and is launched faster as one.

    The reason names the first node that no graph can hold, with its line, or the numbers of kernels and copies.

    Args:
        region: of a device whose regions enqueue.
        on_host: tensors whose values are on the host; see `find_host_values`.
    """
    stored = next((x for x in (*region.inputs, *region.outputs) if x.dtype == VARIANT), None)
    if stored is not None:
        return f"the store {stored.node.name} ({stored.node.location}) is used in another region, too"
    on_host = captured_host_values(region, on_host)
    obstacles = [obstacle for node in region.nodes if (obstacle := why_not_in_graph(node, on_host)) is not None]
    if obstacles:
        others = f", and {counted(len(obstacles) - 1, 'node')} more" if len(obstacles) > 1 else ""
        return f"{obstacles[0]}{others}"
    launches = _launches(region.nodes, on_host)
    copies = sum(tensor not in on_host for tensor in (*region.inputs, *region.outputs))
    if launches > _LEAST_GAIN + copies / _COPIES_A_LAUNCH:
        return None
    return f"{counted(launches, 'kernel')} would become a graph with {counted(copies, 'array')} to copy, without gain"


def captured_host_values(region: Region, on_host: AbstractSet[Tensor]) -> set[Tensor]:
    """Return the tensors of a region that are on the host in a graph of it.

    Numbers that change from call to call, such as learning rates, must not be parts of a graph, as counters are: the
    card has them, and computes with them.
    """
    found = {x for x in region.inputs if x in on_host and (x.shape != () or x.dtype.kind in "biu")}
    # Constants are outside regions, but are not inputs of regions: add them.
    found.update(x for node in region.walk() for x in node.inputs if x.node.op is CONSTANT and x in on_host)
    inside = (x for node in region.walk() for x in node.outputs)
    vectors = {x for x in inside if x in on_host and x.shape != () and x.dtype.kind in "biu"}
    add_host_values(region.nodes, found, kept=keeping(vectors))
    return found


def why_not_in_graph(node: Node, on_host: AbstractSet[Tensor]) -> str | None:
    """Return the reason why no CUDA graph can hold the node's work in a region; None if one can."""
    if node.op in _NO_LAUNCH:
        return None
    if isinstance(node, StructuredNode):
        if node.decision not in on_host:
            return f"{_named(node)} decides by a value on the card"
        inside = (why_not_in_graph(inner, on_host) for body in node.subgraphs for inner in body.nodes)
        return next((obstacle for obstacle in inside if obstacle is not None), None)
    if computes_on_host(node, on_host):
        return None
    if runs_on_host(node):
        return f"{_named(node)} runs on the host"
    if node.op is MOVING_STORE and node.attrs["moves"] == "always":
        return f"{_named(node)} is to move all its values away, as swap_memory=True or saved_values='swap' says"
    if not node.op.traits.is_capturable:
        return f"{_named(node)} {_nature(node)}"
    if node.op is UPDATE and (obstacle := _why_no_update(node)) is not None:
        return f"{_named(node)} has a function with {obstacle}"
    return None if finds_its_inputs(node, on_host) else f"{_named(node)} would copy an input between host and card"


def _why_no_update(node: Node) -> str | None:
    """Return the first node in the function of an update that no CUDA graph can hold, and why; None without one."""
    for inner in node.attrs["function"].nodes:
        if inner.op is CONSTANT and inner.outputs[0].shape != ():
            return f"{_named(inner)}, which is copied from the host"
        if inner.op not in _NO_LAUNCH and not inner.op.traits.is_capturable:
            return f"{_named(inner)}, which {_nature(inner)}"
    return None


def _named(node: Node) -> str:
    return f"{node.name} ({node.op.name}, {node.location})"


def _nature(node: Node) -> str:
    if node.op.effects is not None:
        return "reads or writes state"
    return "does more than launch kernels"


def _keeps_state(node: Node) -> bool:
    """Return True if the host works on a store or a variable, once for each run of the node."""
    return node.op.effects is not None or any(x.dtype == VARIANT for x in (*node.inputs, *node.outputs))


def _launches(nodes: Iterable[Node], on_host: AbstractSet[Tensor]) -> int:
    """Return how many kernels the nodes launch, in loops without a known number of iterations by a guess."""
    count = 0
    for node in nodes:
        if isinstance(node, StructuredNode):
            times = trip_count(node) if isinstance(node, WhileNode) else 1
            inner = sum(_launches(body.nodes, on_host) for body in node.subgraphs)
            count += inner * (_USUAL_ITERATIONS if times is None else times)
        else:
            count += (
                _launches(node.attrs["function"].nodes, on_host) if node.op is UPDATE else _is_launch(node, on_host)
            )
    return count


def _is_launch(node: Node, on_host: AbstractSet[Tensor]) -> bool:
    launches = node.op.kernel is not None and node.op not in (CONSTANT, VARIABLE_READ)
    return launches and not computes_on_host(node, on_host)


# -- loops -----------------------------------------------------------------------------------------------------------


def _not_bound(
    _xp: Namespace, *, loop: WhileNode, captured_on_host: Collection[int], logs: Mapping[int, LogSpec]
) -> Kernel:
    raise NotImplementedError(f"{loop.name} is bound by bind_device_loop")


DEVICE_WHILE = Op(
    "device_while",
    lambda *_, loop, captured_on_host, logs: tuple(output.spec for output in loop.outputs),
    _not_bound,
    conduct=WAITS,
)
"""Op for a loop that a device runs by itself.

`loop` is the old node, and `captured_on_host` is as in `captures_on_host`. `logs` has the specs of variables that are
logs, by their places: the new node does not get these as inputs.
"""


def why_host_drives(loop: WhileNode, on_host: AbstractSet[Tensor], *, is_inside: bool = False) -> str | None:
    """Return the reason why a device cannot run a loop by itself, in a few words; None if it can.

    Its variables have numbers and shapes that never change; variables that the host has outside, such as counters, are
    the device's inside. In it there may be loops of that kind, whatever they decide by, and branches with such results.

    Args:
        loop: of one device.
        on_host: tensors whose values are on the host.
        is_inside: it is part of another loop, which the device may run.
    """
    # Inside, the device has its own copies of the host's counters, so that it can count by itself.
    inside = host_values_inside(loop, captures_on_host(loop, on_host))
    return (
        # Inside another loop, all stores belong to the outer loop, which has its own check.
        (None if is_inside else _no_log(loop))
        or _no_buffers(loop)
        or ("its predicate is a number on the host" if loop.decision in inside else None)
        or _host_vector(loop.inputs[: loop.n_vars], on_host)
        or _host_vector(loop.body.results, inside)
        or _first_obstacle(loop, inside, frozenset())
    )


def _first_obstacle(node: StructuredNode, inside: AbstractSet[Tensor], stores: AbstractSet[Node]) -> str | None:
    """Return the reason why the first unsuitable node in a branch or loop cannot be in a device's loop; None without
    one.
    """
    # Inner device loops come last: if another obstacle exists, name that one.
    nodes = [inner for body in node.subgraphs for inner in body.nodes]
    logged = _in_logs(node) | stores
    for inner in sorted(nodes, key=lambda inner: inner.op is DEVICE_WHILE):
        if isinstance(inner, StructuredNode):
            if isinstance(inner, WhileNode):
                obstacle = why_host_drives(inner, inside, is_inside=True)
            else:
                obstacle = _why_no_branch(inner, inside, logged)
            if obstacle is not None:
                return f"in {inner.name}, {obstacle}"
        elif inner in logged or inner.op is PARAMETER:
            continue
        elif inner.op is VARIABLE_READ:
            continue  # read in front of the loop, which writes no variables
        # A card that runs alone cannot use a list of the host, or a variable whose address changes.
        elif _keeps_state(inner):
            return f"{_named(inner)} works on a store or variable, which the host does"
        elif (obstacle := why_not_in_graph(inner, inside)) is not None:
            return obstacle
    return None


def _in_logs(node: StructuredNode) -> set[Node]:
    """Return the nodes of a branch or loop that make, fill or read stores which logs of the device can be."""
    found = set(saves_of(node).values()) if isinstance(node, WhileNode) else set()
    for body in node.subgraphs:
        found.update(filter(is_new_store, inner_stores(body)))
        found.update(inner for inner in body.nodes if inner.op is READ_SAVED)
    return found


def _no_log(loop: WhileNode) -> str | None:
    """Return a store among the captures of a loop that is no log of a card, in words; None if there is none."""
    stores = (capture for capture in loop.captures if capture.dtype == VARIANT)
    other = next((capture for capture in stores if capture.node.op is not DEVICE_WHILE), None)
    return None if other is None else f"it reads the store {other.node.name}, which is the host's"


def _why_no_branch(node: StructuredNode, inside: AbstractSet[Tensor], stores: AbstractSet[Node]) -> str | None:
    results = [result for branch in node.subgraphs for result in branch.results]
    return _no_buffers(node) or _host_vector(results, inside) or _first_obstacle(node, inside, stores)


def _no_buffers(node: StructuredNode) -> str | None:
    """Return the first output that is no number, or whose shape is unknown, in words; None if there is none."""
    # Buffers are part of a graph, so another shape would need another capture. Entries of a log are all of one size: a
    # kernel finds them by their number.
    saves = saves_of(node) if isinstance(node, WhileNode) else {}
    for place, tensor in enumerate(node.outputs):
        if place in saves:
            if (obstacle := _why_no_entry(saves[place])) is not None:
                return obstacle
        elif tensor.dtype == VARIANT and isinstance(node, CondNode) and all(map(is_new_store, origins(tensor))):
            continue  # stores not for the enclosing loop are refused as nodes
        elif tensor.dtype == VARIANT and isinstance(node, WhileNode) and node.inputs[place].node.op is MOVING_STORE:
            return "its saved values are to leave the card"
        elif not _is_fixed(tensor.spec):
            return f"a value of it is {_unfit(tensor.spec)}"
    return None


def _why_no_entry(save: Node) -> str | None:
    """Return the reason why a saved value cannot be an entry of a device's log; None if it can."""
    value = save.inputs[2]
    if value.dtype == VARIANT:
        # A store from an outer loop would have one base in all iterations, and no cursor.
        return (
            None
            if all(map(is_new_store, origins(value)))
            else f"its saved value {_named(value.node)} is a store, which the host keeps"
        )
    return None if _is_fixed(value.spec) else f"its saved value {_named(value.node)} is {_unfit(value.spec)}"


def _is_number(spec: Spec) -> bool:
    return spec.dtype.kind in "biufc" or spec.dtype.name == "bfloat16"


def _is_fixed(spec: Spec) -> bool:
    """Return True if values of this spec can be in memory of a device's loop."""
    return _is_number(spec) and is_static(spec.shape)


def _unfit(spec: Spec) -> str:
    return f"{spec}, whose shape is not fixed" if _is_number(spec) else f"{spec}, no number"


def _host_vector(tensors: Sequence[Tensor], on_host: AbstractSet[Tensor]) -> str | None:
    """Return words about a host array among the tensors, such as a shape, which a graph cannot copy to the device."""
    found = any(tensor in on_host and tensor.shape != () for tensor in tensors)
    return "a value of it is an array of the host's, such as a shape" if found else None


def captures_on_host(loop: WhileNode, on_host: AbstractSet[Tensor]) -> frozenset[int]:
    """Positions of the inputs of a loop that are captures whose values are on the host."""
    return frozenset(place for place, outer in enumerate(loop.captures, start=loop.n_vars) if outer in on_host)


def host_values_inside(loop: WhileNode, there: Collection[int]) -> set[Tensor]:
    """The tensors in the predicate and the body of a device's loop whose values are on the host: none of a variable.

    Args:
        loop: which the device runs.
        there: see `captures_on_host`.
    """
    found: set[Tensor] = set()
    for part in loop.subgraphs:
        found.update(part.inputs[place] for place in there)
        add_host_values(part.nodes, found, in_buffers=True)
    return found
