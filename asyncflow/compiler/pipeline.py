"""How a graph becomes a plan: the passes, in order."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, cast

from asyncflow.compiler.batching.batch_loops import block_bytes
from asyncflow.compiler.lowering.delay_recvs import delay_recvs
from asyncflow.compiler.lowering.layout import build_partition
from asyncflow.compiler.lowering.lower import lower
from asyncflow.compiler.lowering.single_call import find_single_call
from asyncflow.compiler.optimize.passes import optimize as run_optimizations
from asyncflow.compiler.placement.assign_streams import assign_streams
from asyncflow.compiler.placement.constraints import resolve_requests
from asyncflow.compiler.placement.node_costs import NodeCosts
from asyncflow.compiler.placement.place import place
from asyncflow.compiler.plan import Plan
from asyncflow.compiler.program.extract import FEED, extract
from asyncflow.compiler.program.frames import assign_frames, is_everywhere
from asyncflow.compiler.program.host_values import find_host_values
from asyncflow.compiler.program.kernels import bind_kernel, bind_launch, bind_member, bind_region
from asyncflow.compiler.program.order_effects import order_effects
from asyncflow.compiler.program.saved import find_saved
from asyncflow.compiler.regions.capturable import can_capture
from asyncflow.compiler.regions.codegen import generate
from asyncflow.compiler.regions.device_loops import DEVICE_WHILE, bind_device_loop, make_device_loops
from asyncflow.compiler.regions.fuse import fuse_region
from asyncflow.compiler.regions.join_regions import RegionCosts
from asyncflow.compiler.regions.loop_drivers import find_loop_drivers
from asyncflow.compiler.regions.regions import REGION, make_regions
from asyncflow.devices.names import DeviceSpec
from asyncflow.devices.protocol import has_own_memory
from asyncflow.errors import PlacementError
from asyncflow.graph.dtypes import VARIANT
from asyncflow.graph.graph import STRUCTURED, has_side_effect
from asyncflow.graph.op import host_inputs, runs_on_host
from asyncflow.graph.resource import resources_of
from asyncflow.graph.verify import verify

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
    from types import ModuleType

    from asyncflow.compiler.plan import Partition
    from asyncflow.compiler.program.extract import Extract
    from asyncflow.compiler.program.kernels import Resolve
    from asyncflow.compiler.program.request import PlanOptions, PlanRequest
    from asyncflow.compiler.regions.loop_drivers import LoopDriver
    from asyncflow.compiler.regions.region_code import RegionCode
    from asyncflow.compiler.regions.regions import Region
    from asyncflow.devices.memory import MemoryAccount
    from asyncflow.devices.protocol import AsynchronousDevice, Device
    from asyncflow.graph.graph import Graph
    from asyncflow.graph.ir import Node, Tensor
    from asyncflow.graph.op import Kernel


def compile_plan(
    request: PlanRequest,
    options: PlanOptions,
    *,
    devices: Sequence[Device],
    resolve: Resolve,
    costs: Mapping[str, float] | None = None,
    homes: dict[Hashable, str] | None = None,
) -> Plan:
    """Compiles what one kind of run needs.

    Args:
        request: the kind of run; its graph is not changed.
        options: those of the session.
        devices: those of the session.
        resolve: looks up the state of resources.
        costs: mean nanoseconds that nodes took in earlier runs, by name.
        homes: where state is, of devices with a memory of their own; what this plan puts somewhere is added.

    Raises:
        FeedError: a needed placeholder is not fed.
        GraphError: the graph is not a valid program.
        PlacementError: no device fits the constraints of a node.
    """
    extracted = extract(
        request.graph, request.fetches, request.feeds, streamed=request.streamed, all_effects=request.all_effects
    )
    working = extracted.graph
    check = verify if options.debug else _do_not_verify
    if homes:
        _send_home(working, homes)
    spread = options.placement_seed is not None
    notes = resolve_requests(working, request.graph, devices, soft=options.soft_placement, spread=spread)
    check(working)
    if options.optimize:
        run_optimizations(
            working,
            keep=extracted.kept,
            on_host=not any(has_own_memory(device) for device in devices),
            check_numerics=options.check_numerics,
            debug=options.debug,
            block_bytes=block_bytes(devices) if options.loop_batching else None,
        )
    order_effects(working)
    check(working)
    saved = find_saved(working)
    placement = place(working, devices, costs, seed=options.placement_seed, notes=notes)
    touched = list(_state_of(working))
    if homes is not None:
        homes.update((key, node.device) for node, key in touched if node.device is not None)
    is_repeatable = not any(map(_is_noticed, working.walk()))
    read_on_host = _states_for_host(working, devices, resolve)
    asynchronous = {device.name for device in devices if device.is_asynchronous}
    enqueuing = {device.name for device in devices if runs_regions(device)}
    on_host, loops = _decide_loops(working, enqueuing, devices, options, check)
    streams = assign_streams(working, {device.name: len(device.compute_streams) for device in devices}, costs)
    if request.regions:
        region_costs = _region_costs(devices) if enqueuing else None
        streams = make_regions(working, streams, asynchronous - enqueuing, enqueuing, on_host, region_costs)
        if options.fusion:
            _fuse(working, enqueuing)
        check(working)
    lowered = lower(
        working,
        asynchronous=asynchronous,
        truncate=options.transfer_dtype is not None,
        reads=partial(_read_on_host, asynchronous=asynchronous, enqueuing=enqueuing, on_host=on_host),
        delay=partial(delay_recvs, devices=devices, costs=costs),
    )
    check(lowered)
    partitions = _Binding(options, resolve, streams, on_host).partitions(extracted, lowered, devices)
    return Plan(
        graph=lowered,
        partitions=partitions,
        fetches=extracted.order,
        placement=placement,
        single_call=find_single_call(partitions, devices),
        saved=saved,
        loops=loops,
        read_on_host=read_on_host,
        is_repeatable=is_repeatable,
        states=frozenset(key for _, key in touched),
    )


def _is_noticed(node: Node) -> bool:
    """Whether somebody might notice that a node runs twice: it changes something, or is the user's own code."""
    op = node.op
    return op.is_user or op.is_async or (op.effects is not None and has_side_effect(node))


def _counted(kernel: Kernel, node: Node, memory: MemoryAccount) -> Kernel:
    """`kernel`, of whose outputs the stores are counted wherever it is called: their values may be small and many."""
    stores = [tensor.index for tensor in node.outputs if tensor.dtype == VARIANT]
    if not stores:
        return kernel

    def call(*inputs: Any) -> Any:
        result = kernel(*inputs)
        for index in stores:
            memory.track(result if node.single else result[index], node.name)
        return result

    return call


def _do_not_verify(_: Graph) -> None:
    pass


def _decide_loops(
    graph: Graph,
    enqueuing: Collection[str],
    devices: Sequence[Device],
    options: PlanOptions,
    check: Callable[[Graph], None],
) -> tuple[set[Tensor], tuple[LoopDriver, ...]]:
    """Gives cards the loops that they are to run; and the values that stay on the host, and who drives which loop."""
    if not enqueuing:
        return set(), ()
    cards = [device for device in devices if device.name in enqueuing]
    may_run = options.device_while and all(cast("AsynchronousDevice", card).runs_loops for card in cards)
    if may_run:
        on_host = make_device_loops(graph, enqueuing, fusion=options.fusion)
        check(graph)
    else:
        on_host = find_host_values(graph)
    return on_host, find_loop_drivers(graph, enqueuing, on_host, device_while=may_run)


def _region_costs(devices: Sequence[Device]) -> RegionCosts:
    """What regions cost on `devices`, as far as it is known beforehand; nobody knows of branches and loops."""
    costs = NodeCosts(devices, {})
    calls = {device.name: cast("AsynchronousDevice", device).region_ns for device in devices if runs_regions(device)}

    def kernel_ns(node: Node) -> float:
        by_device = zip(devices, costs.times(node), strict=True)
        is_known = node.op.name not in STRUCTURED
        return next((ns for device, ns in by_device if device.name == node.device), 0.0) if is_known else inf

    return RegionCosts(calls, kernel_ns)


def _fuse(graph: Graph, enqueuing: Collection[str]) -> None:
    for node in graph.walk():
        if node.op is REGION and node.device in enqueuing:
            node.attrs["region"] = fuse_region(node.attrs["region"])


def _state_of(graph: Graph) -> Iterator[tuple[Node, Hashable]]:
    """Nodes that touch a resource, with what tells resources apart."""
    for node in graph.walk():
        for resource in resources_of(node):
            yield node, resource.effect_key


def _states_for_host(graph: Graph, devices: Sequence[Device], resolve: Resolve) -> tuple[Any, ...]:
    """The states that CPUs use, and that another session, which shares the container, may have on a card."""
    by_name = {device.name: device for device in devices}
    found: dict[int, Any] = {}
    for node in graph.walk():
        for resource in resources_of(node):
            if resource.container is not None and not by_name[node.device or devices[0].name].is_asynchronous:
                state = resolve(resource)
                found[id(state)] = state
    return tuple(found.values())


def _send_home(graph: Graph, homes: Mapping[Hashable, str]) -> None:
    """Asks for the device that holds the state a node touches.

    Raises:
        PlacementError: the node asks for another.
    """
    for node, key in _state_of(graph):
        home = homes.get(key)
        if home is None:
            continue
        if node.device is not None and not DeviceSpec.parse(node.device).matches(home):
            raise PlacementError(
                f"{node.name} ({node.op.name}) asks for {node.device!r}, and what it touches is in the memory of "
                f"{home}, where an earlier run of this session has put it; ask for {home!r} or for none"
                f"\n  built at {node.location}"
            )
        node.device = home


def runs_regions(device: Device) -> bool:
    """Whether the device is asynchronous, and one call enqueues all kernels of a region."""
    return device.is_asynchronous and cast("AsynchronousDevice", device).runs_regions


def _read_on_host(
    node: Node, *, asynchronous: Collection[str], enqueuing: Collection[str], on_host: Collection[Tensor]
) -> list[int]:
    """Positions of inputs that the kernel, or of primitives the scheduler, reads, and that may be the device's."""
    if node.device not in (asynchronous if node.op.kernel is None else enqueuing) or runs_on_host(node):
        return []
    return [index for index in sorted(host_inputs(node)) if node.inputs[index] not in on_host]


@dataclass(frozen=True, slots=True)
class _Binding:
    """How nodes get their code."""

    options: PlanOptions
    resolve: Resolve
    streams: Mapping[Node, int]
    on_host: Collection[Tensor]

    def partitions(self, extracted: Extract, lowered: Graph, devices: Sequence[Device]) -> list[Partition]:
        """One per device that has something to do."""
        used = {node.device for node in lowered.nodes if not is_everywhere(node)}
        devices = [device for device in devices if device.name in used] or devices[:1]
        frames = assign_frames(lowered)
        fetches = [fetch for fetch in extracted.fetches if fetch is not None]
        nodes: dict[str | None, list[Node]] = {device.name: [] for device in devices}
        for node in lowered.nodes:
            if not is_everywhere(node):
                nodes[node.device].append(node)
        return [
            build_partition(
                nodes[device.name],
                frames,
                device=device.name,
                streams=self.streams,
                feeds={n: n.attrs["index"] for n in nodes[device.name] if n.op is FEED},
                fetches={n: index for index, n in enumerate(fetches) if n.device == device.name},
                n_fetches=len(fetches),
                bind=partial(self.kernel, device),
                bind_region=partial(self.region, device),
            )
            for device in devices
        ]

    def kernel(self, device: Device, node: Node) -> Kernel:
        """What a firing of `node` calls."""
        if not device.is_asynchronous:
            kernel = self.bare(device.xp, node)
            return kernel if device.memory.limit is None else _counted(kernel, node, device.memory)
        launching = cast("AsynchronousDevice", device)
        if node.op is DEVICE_WHILE:
            return bind_device_loop(node, self.bare, launching, self.streams.get(node, 0), self.options.max_iterations)
        return bind_launch(node, partial(self.bare, node=node), launching, self.streams.get(node, 0))

    def bare(self, xp: ModuleType, node: Node) -> Kernel:
        """The kernel itself."""
        options = self.options
        return bind_kernel(node, xp, self.resolve, check_outputs=options.debug, check_numerics=options.check_numerics)

    def region(self, device: Device, node: Node) -> tuple[RegionCode, Kernel]:
        """A region's code, and what a firing calls."""
        region: Region = node.attrs["region"]
        generate_region = partial(generate, region, node.name, max_iterations=self.options.max_iterations)
        if not device.is_asynchronous:
            # Accounting costs a region more than many a kernel: without a limit only what enters and leaves counts.
            track = device.memory.track if self.options.debug or device.memory.limit is not None else None
            code = generate_region(partial(self.kernel, device), track=track)
            return code, code.function
        launching, stream = cast("AsynchronousDevice", device), self.streams.get(node, 0)

        def bind(member: Node) -> Kernel:
            return bind_member(member, partial(self.bare, node=member), launching, stream, self.on_host)

        code = generate_region(bind, track=None, enqueues=True)
        # A graph that is replayed raises nothing.
        asks = launching.captures(self.options.cuda_graphs) or launching.charge is not None
        could_capture = asks and not self.options.check_numerics and can_capture(region, self.on_host)
        asked = self.options.cuda_graphs
        return code, bind_region(node, code, launching, stream, self.on_host, could_capture=could_capture, asked=asked)
