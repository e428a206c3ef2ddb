"""Pass: makes one node of a loop that a card can run by itself, with all that is in it, and gives it its code.

A `device_while` node takes and gives what the `while` node did. To the executor it is a node that waits: it launches
the loop, and looks once at how far it came (`loop_launch.py` of CUDA devices). All its results are the device's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from collections.abc import Set as AbstractSet

from asyncflow.compiler.program.detached import detached_node
from asyncflow.compiler.program.host_values import find_host_values, keeping
from asyncflow.compiler.program.kernels.kernels import bind_member, find_unknown_vectors
from asyncflow.compiler.program.kernels.work import KernelCounter
from asyncflow.compiler.program.reads_before import read_before
from asyncflow.compiler.program.replacements import Replacements
from asyncflow.compiler.regions.capturable import DEVICE_WHILE, captures_on_host, host_values_inside, is_device_loop
from asyncflow.compiler.regions.device_functions import DeviceFunctions
from asyncflow.compiler.regions.fuse import fuse_bodies
from asyncflow.devices.decisions import LoopCode
from asyncflow.devices.protocol import AsynchronousDevice, CodeInfo, KernelInfo
from asyncflow.errors import LoopIdentity
from asyncflow.graph.builtin import CONSTANT, PARAMETER
from asyncflow.graph.graph import Graph
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.structured import WhileNode
from asyncflow.values import Kernel, Namespace


def make_device_loops(
    graph: Graph, devices: Collection[str], *, fusion: bool = True, kept: AbstractSet[Tensor] = frozenset()
) -> set[Tensor]:
    """Replace loops by `device_while` nodes, in place, also in the bodies of other loops and of branches.

    Args:
        graph: with the device of every node in ``node.device``.
        devices: names of the CUDA devices.
        fusion: make one kernel of chains of elementwise ones.
        kept: tensors whose values a pass keeps on the host.

    Returns:
        The tensors whose values are on the host then, as `find_host_values` does.
    """
    on_host = find_host_values(graph, keeping(kept))
    # What depends on the counter of a loop that was replaced is no longer on the host, so one is replaced at a time.
    while _replace_one(graph, devices, on_host, fusion):
        on_host = find_host_values(graph, keeping(kept))
    return on_host


def _replace_one(graph: Graph, devices: Collection[str], on_host: AbstractSet[Tensor], fusion: bool) -> bool:
    """Replace one loop, in the graph or below; return True if there was one."""
    for position, node in enumerate(graph.nodes):
        places = devices_of_loop(node) if isinstance(node, WhileNode) else ()
        device = places[0] if len(places) == 1 else None
        if isinstance(node, WhileNode) and device in devices and is_device_loop(node, on_host):
            reads = read_before(node, node.subgraphs)
            made = _device_while(node, device, on_host)
            graph.nodes[position : position + 1] = [*reads, made]
            if fusion:
                fuse_bodies(node)
            replacements = Replacements(dict(zip(node.outputs, made.outputs, strict=True)), {node: made})
            for later in graph.nodes[position + len(reads) :]:
                replacements.apply(later)
            replacements.apply_to_results(graph)
            return True
        if any(_replace_one(body, devices, on_host, fusion) for body in node.subgraphs):
            return True
    return False


def devices_of_loop(node: WhileNode) -> tuple[str, ...]:
    """Return the devices of a loop's nodes, in order of first mention."""
    members = [inner for part in node.subgraphs for inner in part.walk() if not inner.subgraphs]
    found = [inner.device for inner in members if inner.op is not PARAMETER and inner.op is not CONSTANT]
    return tuple(dict.fromkeys(device for device in found if device is not None))


def _device_while(node: WhileNode, device: str | None, on_host: AbstractSet[Tensor]) -> Node:
    attrs = {"loop": node, "captured_on_host": captures_on_host(node, on_host)}
    specs = tuple(tensor.spec for tensor in node.outputs)
    name = f"{node.name.removeprefix(node.graph.scope.name_scope)}/device"  # the graph puts its scope in front
    made = detached_node(node.graph, DEVICE_WHILE, node.inputs, attrs, node, specs, name=name)
    made.control_inputs = list(node.control_inputs)
    made.device = device
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
    info = KernelInfo(
        name=node.name,
        stream=stream,
        single=False,
        code=CodeInfo(
            vectors=find_unknown_vectors(node.inputs, {node.inputs[place] for place in there}), launches=launches
        ),
        flops=lambda inputs, outputs: 0.0,
        infer=lambda inputs, values: None,
    )
    code = LoopCode(
        condition=functions.condition(loop.predicate),
        body=functions.body(loop.body),
        n_vars=loop.n_vars,
        identity=LoopIdentity(loop.name, loop.location),
        limit=max_iterations,
    )
    return device.bind_loop(code, info)
