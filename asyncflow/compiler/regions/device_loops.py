"""Pass: makes one node of a loop that a card can run by itself, with all that is in it, and gives it its code.

A `device_while` node takes and gives what the `while` node did. To the executor it is a node that waits: it launches
the loop, and looks once at how far it came (`loop_launch.py` of CUDA devices). All its results are the device's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from collections.abc import Set as AbstractSet

from asyncflow.compiler.program.detached import detached_node
from asyncflow.compiler.program.host_values import find_host_values, keeping
from asyncflow.compiler.program.kernels.kernels import bind_member, find_unknown_vectors
from asyncflow.compiler.program.kernels.work import KernelCounter
from asyncflow.compiler.program.reads_before import read_before
from asyncflow.compiler.program.replacements import Replacements
from asyncflow.compiler.regions.absent_values import Filled, fill_absent
from asyncflow.compiler.regions.capturable import (
    DEVICE_WHILE,
    captures_on_host,
    host_values_inside,
    why_host_drives,
)
from asyncflow.compiler.regions.device_functions import DeviceFunctions
from asyncflow.compiler.regions.device_logs import saves_of, use_logs
from asyncflow.compiler.regions.fuse import fuse_bodies
from asyncflow.devices.decisions import LoopCode
from asyncflow.devices.protocol import AsynchronousDevice, CodeInfo, KernelInfo
from asyncflow.errors import LoopIdentity
from asyncflow.graph.builtin import CONSTANT, PARAMETER
from asyncflow.graph.graph import Graph, Subgraph
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.structured import WhileNode
from asyncflow.values import Kernel, Namespace


def make_device_loops(
    graph: Graph,
    devices: Collection[str],
    *,
    fusion: bool = True,
    kept: AbstractSet[Tensor] = frozenset(),
    limited: bool = False,
) -> dict[Node, str]:
    """Replace loops by `device_while` nodes, in place, also in the bodies of other loops and of branches.

    Args:
        graph: with the device of every node in ``node.device``.
        devices: names of the CUDA devices.
        fusion: make one kernel of chains of elementwise ones.
        kept: tensors whose values a pass keeps on the host.
        limited: a device has a limit of memory, so that saved values may have to move, which they do for the host.

    Returns:
        The loops of one card that decide by its values, and that the host drives all the same, with the reasons.
    """
    loops = _DeviceLoops(graph, devices, kept, limited)
    # Replace one loop at a time: values that depend on its counter are then no longer on the host.
    while replaced := loops.replace_one(graph):
        for loop, made in reversed(replaced.items()):
            loops.finish(loop, made, fusion)
        loops.look()
    return loops.reasons


def find_device_loops(graph: Graph, *, limited: bool = False) -> set[Node]:
    """Return the loops that `make_device_loops` would replace if all nodes without a request were on one card."""
    loops, found = _DeviceLoops(graph, None, frozenset(), limited), dict[WhileNode, Node]()
    while replaced := loops.replace_one(graph):
        found |= replaced
    loops.put_back(found)
    return set(found)


class _DeviceLoops:
    """Replaces loops of a graph; arguments are as of `make_device_loops`, but `devices` may be None for any."""

    def __init__(self, graph: Graph, devices: Collection[str] | None, kept: AbstractSet[Tensor], limited: bool) -> None:
        self.graph = graph
        self.devices = devices
        self.kept = kept
        self.limited = limited
        self.reasons: dict[Node, str] = {}
        self.filled: dict[Node, list[Filled]] = {}
        self.look()

    def look(self) -> None:
        """Find the values on the host anew."""
        self.on_host = find_host_values(self.graph, keeping(self.kept))

    def replace_one(self, graph: Graph) -> dict[WhileNode, Node]:
        """Replace one loop and the readers of its saved values, in the graph or below; return old and new nodes."""
        for node in graph.nodes:
            if isinstance(node, WhileNode) and self.may_run(node) and node.decision not in self.on_host:
                replaced: dict[WhileNode, Node] = {}
                reason = self.replace(node, replaced)
                if reason is None:
                    return replaced
                self.put_back(replaced)
                self.look()
                # Keep the first reason: later a card may run inner loops, which hides the content of this one.
                self.reasons.setdefault(node, reason)
            for body in node.subgraphs:
                if found := self.replace_one(body):
                    return found
        return {}

    def may_run(self, loop: WhileNode) -> bool:
        """Return True if all of a loop is on one card."""
        places = devices_of_loop(loop)
        return len(places) <= 1 and (self.devices is None or not set(places).isdisjoint(self.devices))

    def replace(self, loop: WhileNode, replaced: dict[WhileNode, Node]) -> str | None:
        """Replace a loop, and then the loops that read its saved values; return the reason if one of them stays."""
        if self.limited and saves_of(loop):
            return "its saved values may have to leave a card with a memory_limit"
        filled = fill_absent(loop)
        if (obstacle := why_host_drives(loop, self.on_host)) is not None:
            _undo(filled)
            return obstacle
        made, self.filled[loop] = _device_while(loop, self.on_host), filled
        replaced[loop] = made
        _swap(loop, made)
        self.look()
        for place, save in saves_of(loop).items():
            store, value = made.outputs[place], save.inputs[2].node
            saved = f"its saved value {value.name} ({value.location}) is"
            if isinstance(made.graph, Subgraph) and any(result is store for result in made.graph.results):
                return f"{saved} a result of {made.graph.label}, which the host runs"
            for reader in [node for node in made.graph.nodes if any(x is store for x in node.inputs)]:
                obstacle = self.why_no_reader(reader, made, replaced)
                if obstacle is not None:
                    return f"{saved} read by {reader.name}: {obstacle}"
        return None

    def why_no_reader(self, reader: Node, made: Node, replaced: dict[WhileNode, Node]) -> str | None:
        """Return the reason why the card does not run a reader of its loop's saved values; None if it does from now."""
        if reader in replaced or reader.op is DEVICE_WHILE:
            return None
        if not isinstance(reader, WhileNode):
            return "the host runs it"
        if not set(devices_of_loop(reader)) <= {made.device}:
            return "it is not all on that card"
        if reader.decision in self.on_host:
            return "it decides by numbers on the host"
        return self.replace(reader, replaced)

    def put_back(self, replaced: dict[WhileNode, Node]) -> None:
        """Undo the replacement of loops."""
        for loop, made in reversed(replaced.items()):
            _swap(made, loop)
            _undo(self.filled[loop])

    def finish(self, loop: WhileNode, made: Node, fusion: bool) -> None:
        """Make a replaced loop the code for the card."""
        self.reasons.pop(loop, None)
        graph, initial = loop.graph, [x.node for x in loop.inputs]
        reads = read_before(loop, loop.subgraphs)
        logs, constants = use_logs(loop)
        if fusion:
            fuse_bodies(loop)
        made.inputs = [x for place, x in enumerate(loop.inputs) if place not in logs]
        made.attrs = {"loop": loop, "captured_on_host": captures_on_host(loop, self.on_host), "logs": logs}
        more = loop.outputs[len(made.outputs) :]
        made.outputs += tuple(Tensor(made, output.index, output.spec) for output in more)
        position = graph.nodes.index(made)
        graph.nodes[position:position] = [*constants, *reads]
        for place in logs:
            graph.nodes.remove(initial[place])  # the card creates its logs itself


def _undo(filled: Sequence[Filled]) -> None:
    for each in reversed(filled):
        each.undo()


def _swap(node: Node, other: Node) -> None:
    """Put a node in the place of another one."""
    graph = node.graph
    position = graph.nodes.index(node)
    graph.nodes[position] = other
    replacements = Replacements(dict(zip(node.outputs, other.outputs, strict=True)), {node: other})
    for later in graph.nodes[position:]:
        replacements.apply(later)
    replacements.apply_to_results(graph)


def devices_of_loop(node: WhileNode) -> tuple[str, ...]:
    """Return the devices of a loop's nodes, in order of first mention."""
    members = [inner for part in node.subgraphs for inner in part.walk() if not inner.subgraphs]
    found = [inner.device for inner in members if inner.op is not PARAMETER and inner.op is not CONSTANT]
    return tuple(dict.fromkeys(device for device in found if device is not None))


def _device_while(node: WhileNode, on_host: AbstractSet[Tensor]) -> Node:
    attrs = {"loop": node, "captured_on_host": captures_on_host(node, on_host), "logs": {}}
    specs = tuple(output.spec for output in node.outputs)
    made = detached_node(node.graph, DEVICE_WHILE, node.inputs, attrs, node, specs, reserved_name=f"{node.name}/device")
    made.control_inputs = list(node.control_inputs)
    made.device = next(iter(devices_of_loop(node)), None)
    return made


def bind_device_loop(
    node: Node,
    bare: Callable[[Namespace, Node], Kernel],
    device: AsynchronousDevice,
    stream: int,
    max_iterations: int | None,
) -> Kernel:
    """The function that a firing of a `device_while` node calls.

    Args:
        node: of a CUDA device.
        bare: gives a node's kernel for an array namespace.
        device: where it runs.
        stream: number of the compute stream.
        max_iterations: most iterations of a loop.
    """
    loop: WhileNode = node.attrs["loop"]
    there: Collection[int] = node.attrs["captured_on_host"]
    inside = host_values_inside(loop, there)

    def bind(member: Node) -> Kernel:
        return bind_member(member, lambda xp: bare(xp, member), device, stream, inside)

    functions = DeviceFunctions(node.name, bind, KernelCounter(device.memory.requests, inside))
    launches = sum(1 for part in loop.subgraphs for _ in part.walk())
    places = (place for place in range(len(loop.inputs)) if place not in node.attrs["logs"])
    on_host = {x for place, x in zip(places, node.inputs, strict=True) if place in there}
    info = KernelInfo(
        name=node.name,
        stream=stream,
        single=False,
        code=CodeInfo(vectors=find_unknown_vectors(node.inputs, on_host), launches=launches),
        flops=lambda inputs, outputs: 0.0,
        infer=lambda inputs, values: None,
    )
    code = LoopCode(
        condition=functions.condition(loop.predicate),
        body=functions.body(loop.body),
        n_vars=loop.n_vars,
        identity=LoopIdentity(loop.name, loop.location),
        logs=node.attrs["logs"],
        limit=max_iterations,
    )
    return device.bind_loop(code, info)
