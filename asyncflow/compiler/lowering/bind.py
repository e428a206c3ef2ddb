"""Pass: gives nodes their code, bound to device, attributes and state, and lays out what each device runs.

The tables themselves are made in `layout`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import partial
from math import inf

import numpy as np

from asyncflow.autodiff.stores.row_gradients import READ_ROWS, RowGradient
from asyncflow.autodiff.stores.saved_values import MOVING_STORE, NEW_STORE, READ_SAVED, SAVE
from asyncflow.compiler.batching.pending_sums import ADD_PRODUCTS, NEW_SUMS
from asyncflow.compiler.batching.products_ahead import PRODUCTS_AHEAD
from asyncflow.compiler.lowering.lasting import keeping, lasts
from asyncflow.compiler.lowering.layout import Layout
from asyncflow.compiler.plan import Partition, PlanFrame
from asyncflow.compiler.program.kernels.kernels import (
    SAVES,
    Resolve,
    asks_for_memory,
    bind_kernel,
    bind_launch,
    bind_member,
    find_unknown_vectors,
    kernel_flops,
    kernel_specs,
)
from asyncflow.compiler.program.kernels.work import KernelCounter
from asyncflow.compiler.program.loops.frames import assign_frames, is_everywhere
from asyncflow.compiler.program.purity import nbytes
from asyncflow.compiler.program.request import PlanOptions
from asyncflow.compiler.regions.capturable import DEVICE_WHILE, captured_host_values, why_not_captured
from asyncflow.compiler.regions.code.codegen import RegionGenerator
from asyncflow.compiler.regions.code.region_code import RegionCode
from asyncflow.compiler.regions.device_loops import bind_device_loop
from asyncflow.compiler.regions.regions import Region
from asyncflow.devices.captures import GraphCode
from asyncflow.devices.memory import TRACKED_BYTES, MemoryAccount
from asyncflow.devices.protocol import (
    AsynchronousDevice,
    Capabilities,
    CodeInfo,
    Device,
    KernelInfo,
    is_coroutine_kernel,
)
from asyncflow.devices.saved.working_set import WorkingSet
from asyncflow.devices.told import ToldAccount
from asyncflow.graph.builtin import CONSTANT
from asyncflow.graph.frames import FramePath
from asyncflow.graph.graph import Graph, has_side_effect
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import Memory, bound_kernel
from asyncflow.graph.resource import resources_of, waits_in_line
from asyncflow.graph.structured import WhileNode
from asyncflow.graph.values.dtypes import VARIANT
from asyncflow.state.variables.captured import CapturedVariable
from asyncflow.state.variables.variable import Variable
from asyncflow.values import Kernel, Namespace, Value

_SPARE = 16
"""Divisor of a memory limit: the part of it that a region may keep as buffers to write to again."""

_SPARE_ON_CARD = 256 << 20
"""Bytes of buffers that a loop on a card without a limit keeps: for large arrays, an allocation is a small part."""


@dataclass(frozen=True, slots=True)
class Binding:
    """Code for nodes: kernels and regions, bound to devices."""

    options: PlanOptions
    resolve: Resolve
    streams: Mapping[Node, int]
    on_host: AbstractSet[Tensor]
    takes: bool = False
    """True if runs take elements of queues or inputs."""

    def partitions(self, graph: Graph, fetches: Iterable[Node], devices: Sequence[Device]) -> list[Partition]:
        """Return one partition per device that has nodes.

        Args:
            graph: lowered.
            fetches: its FETCH nodes, in the order of the values that the plan gives.
            devices: the session's devices.
        """
        nodes: dict[str | None, list[Node]] = {}
        for node in graph.nodes:
            if not is_everywhere(node):
                nodes.setdefault(node.device, []).append(node)
        positions = {node: position for position, node in enumerate(fetches)}
        frames = assign_frames(graph)
        used = [device for device in devices if device.name in nodes] or devices[:1]
        partitions = []
        for device in used:
            bind, bind_region = partial(self.kernel, device), partial(self.region, device)
            layout = Layout(nodes.get(device.name, ()), frames, self.streams, bind, bind_region, self.on_host)
            fetched = {node: position for node, position in positions.items() if node.device == device.name}
            partitions.append(layout.build(device.name, fetched, len(positions)))
            if device.pacing is not None or (device.swapping is not None and device.memory.limit is not None):
                _watch_iterations(partitions[-1].frames, device)
        return partitions

    def kernel(self, device: Device, node: Node) -> Kernel:
        """The function that a firing of `node` calls."""
        launching = device.asynchronous
        if launching is None:
            kernel = self.bare(device.xp, node)
            if device.memory.limit is None and node.op is not NEW_SUMS:
                return kernel
            return _counted(kernel, node, device.memory)
        if node.op is DEVICE_WHILE:
            return bind_device_loop(node, self.bare, launching, self.streams.get(node, 0), self.options.max_iterations)
        is_checked = self.options.debug or self.options.check_numerics or (self.takes and lasts(node))
        stream = self.streams.get(node, 0)
        bare = self._bare_on(launching, node)
        return bind_launch(node, bare, launching, stream, self.on_host, is_checked=is_checked)

    def bare(self, xp: Namespace, node: Node) -> Kernel:
        """Return the kernel itself."""
        options = self.options
        checks = options.check_numerics
        kernel = bind_kernel(node, xp, self.resolve, check_outputs=options.debug, check_numerics=checks)
        return keeping(kernel) if self.takes and lasts(node) else kernel

    def _bare_on(self, device: AsynchronousDevice, node: Node) -> Callable[[Namespace], Kernel]:
        """Return what gives the node's kernel for an array namespace, or for the device's namespace of stores."""
        if node.op in (NEW_SUMS, PRODUCTS_AHEAD):
            return lambda _: self.bare(device.store_xp, node)
        return partial(self.bare, node=node)

    def region(self, device: Device, node: Node) -> tuple[RegionCode, Kernel]:
        """Return a region's code, and the kernel that a firing calls."""
        region: Region = node.attrs["region"]
        generator = partial(
            RegionGenerator, region=region, max_iterations=self.options.max_iterations, swapping=device.swapping
        )
        launching, stream = device.asynchronous, self.streams.get(node, 0)
        limit = device.memory.limit
        if launching is None:
            # Tracking each value costs a region more than many kernels do: without a limit it tells only its total.
            track = device.memory.track if self.options.debug or limit is not None else None
            spare_bytes = inf if limit is None else limit / _SPARE
            kernel = partial(self.kernel, device)
            account = device.memory if track is None and isinstance(device.memory, ToldAccount) else None
            code = generator(bind=kernel, track=track, spare_bytes=spare_bytes, account=account).generate(node.name)
            return code, code.function

        def bind(member: Node) -> Kernel:
            return bind_member(member, self._bare_on(launching, member), launching, stream, self.on_host)

        # On a card with a limit, a kept buffer might force saved values to move.
        spare_bytes = _SPARE_ON_CARD if limit is None else 0
        # A simulated card launches and counts its kernels itself.
        counter = KernelCounter(None if launching.xp is np else launching.memory.requests, self.on_host)
        code = generator(bind=bind, enqueues=True, spare_bytes=spare_bytes, counter=counter).generate(node.name)
        asked = self.options.cuda_graphs
        why_not = why_not_captured(region, self.on_host)
        if self.options.check_numerics:  # a replayed graph cannot raise
            why_not = "check_numerics=True looks at every value"
        code = replace(code, launching=_launching(why_not, launching.capabilities, asked))
        graph = None
        if why_not is None and launching.capabilities.capture_if(asked):
            graph = self.graph_code(launching, node, stream, bind)
        launch = _bound_region(node, code, launching, stream, self.on_host, graph, could_capture=why_not is None)
        # A graph that is replayed calls no kernel of its members.
        lasting = self.takes and not is_coroutine_kernel(launch) and any(map(lasts, region.walk()))
        return code, keeping(launch) if lasting else launch

    def graph_code(
        self, device: AsynchronousDevice, node: Node, stream: int, usual: Callable[[Node], Kernel]
    ) -> GraphCode:
        """Return a region's code for CUDA graphs.

        Args:
            device: where it runs.
            node: the region.
            stream: number of the compute stream.
            usual: binds a node for the region's usual code, with which constants are shared.
        """
        region: Region = node.attrs["region"]
        # Keyed by state: variables of one name in a container share it.
        shown: dict[object, CapturedVariable] = {}
        for member in region.walk():
            for resource in resources_of(member):
                if isinstance(resource, Variable):
                    state, is_written = self.resolve(resource), has_side_effect(member)
                    found = shown.setdefault(state, CapturedVariable(state, device.xp, is_written=is_written))
                    found.is_written |= is_written
        binding = replace(self, resolve=lambda resource: shown.get(state := self.resolve(resource), state))
        on_host = captured_host_values(region, self.on_host)

        def bind(member: Node) -> Kernel:
            if member.op is CONSTANT:
                return usual(member)  # no second copy of a large constant on the card
            if member.op is MOVING_STORE:
                # A copy to the host would be made once, when the graph is captured.
                return bound_kernel(NEW_STORE, device.xp, {}, of_scalars=False)
            return bind_member(member, partial(binding.bare, node=member), device, stream, on_host)

        code = RegionGenerator(
            region=region,
            max_iterations=self.options.max_iterations,
            bind=bind,
            enqueues=True,
            spare_bytes=_SPARE_ON_CARD,
        ).generate(node.name)
        numbers = frozenset(k for k, x in enumerate(region.inputs) if x in self.on_host and x not in on_host)
        # Launches of all regions take locks in one order, so that they cannot deadlock.
        variables = sorted(shown.values(), key=lambda variable: id(variable.lock))
        return GraphCode(code.function, code.is_generator, variables, numbers, code.extent)


def _bound_region(
    node: Node,
    code: RegionCode,
    device: AsynchronousDevice,
    stream: int,
    on_host: AbstractSet[Tensor],
    graph: GraphCode | None,
    *,
    could_capture: bool,
) -> Kernel:
    """Return the function that a firing of a region calls on a device that enqueues it as a whole."""
    region: Region = node.attrs["region"]
    first = 1 if code.conduct.needs_context else 0
    launches = sum(member.op.kernel is not None and member.op is not CONSTANT for member in region.walk())
    info = KernelInfo(
        name=node.name,
        stream=stream,
        single=False,
        conduct=code.conduct,
        code=CodeInfo(
            vectors=tuple(first + index for index in find_unknown_vectors(region.inputs, on_host)),
            launches=launches,
            graph=graph,
            could_capture=could_capture,
            host_outputs=[place for place, x in enumerate(region.outputs) if x in on_host],
        ),
        flops=partial(kernel_flops, node),
        infer=partial(kernel_specs, node),
    )
    return device.bind_region(code.function, info, is_generator=code.is_generator)


def _launching(why_not: str | None, capabilities: Capabilities, asked: bool) -> str:
    """Describe for `Plan.explain` how a card launches a region."""
    if why_not is not None:
        return f"launches its kernels one by one: {why_not}"
    if capabilities.capture_if(asked):
        return "becomes a CUDA graph for each kind of inputs that comes again"
    option = "Session(cuda_graphs=True) makes a graph of them" if capabilities.captures == "asked" else "no graphs here"
    return f"launches its kernels one by one: {option}"


def _watch_iterations(frames: Mapping[FramePath, PlanFrame], device: Device) -> None:
    """Have loops ask for memory that save or read values which may move; where nothing moves, any values.

    No more iterations are live at a time than fit, of loops around others neither.
    """
    may_ask = _saves if device.pacing is not None else asks_for_memory
    asking: set[FramePath] = set()
    around: set[FramePath] = set()
    for path, frame in frames.items():
        nodes = [node for planned in frame.nodes for node in (planned.source, *planned.region_nodes())]
        if path and may_ask(nodes):
            asking.add(path)
            around.update(path[:depth] for depth in range(1, len(path)))
            if any(isinstance(node, WhileNode) and may_ask(node.body.walk()) for node in nodes):
                around.add(path)
    for path in sorted(asking | around, key=len):
        outer = frames[path[:-1]].working_set
        frames[path].working_set = WorkingSet(device.memory, outer, is_around=path in around)


def _saves(nodes: Iterable[Node]) -> bool:
    return any(node.op in (*SAVES, READ_SAVED) for node in nodes)


def _counted(kernel: Kernel, node: Node, memory: MemoryAccount) -> Kernel:
    """`kernel`, of whose outputs the stores are counted wherever it is called: their values may be small and many."""
    if node.op is READ_ROWS:
        return partial(_read_rows, kernel, memory.track, node.name)
    if node.op is NEW_SUMS:
        return partial(_new_sums, kernel, memory.track, node.name)
    if node.op is ADD_PRODUCTS:
        return kernel
    stores = [tensor.index for tensor in node.outputs if tensor.dtype == VARIANT]
    if not stores or waits_in_line(node):  # results of a place in line count when they are claimed
        return kernel
    if node.op is SAVE and (nbytes(node.inputs[2].spec) or 0) >= TRACKED_BYTES:  # large values count by themselves
        is_new = node.inputs[2].node.op.traits.memory is Memory.NEW
        return kernel if is_new else partial(_save, kernel, memory.track, node.name)

    def call(*inputs: Value) -> Value:
        result = kernel(*inputs)
        for index in stores:
            memory.track(result if node.single else result[index], node.name)
        return result

    return call


def _new_sums(new: Kernel, track: Kernel, label: str, *totals: Value) -> Value:
    sums = new(*totals)
    sums.counts = partial(track, label=label)
    return sums


def _read_rows(read: Kernel, track: Kernel, label: str, grads: RowGradient, first: Value, second: Value) -> Value:
    if not grads.length:
        return read(grads, first, second)
    log = grads.log
    before = log.total
    rows = read(grads, first, second)
    if log.total is not before:  # the array of all sums is made when one is read first
        track(grads, label)
    return rows


def _save(save: Kernel, track: Kernel, label: str, store: Value, index: Value, value: Value) -> Value:
    result = save(store, index, value)
    if result.held[-1] is value:  # a feed counts once a store keeps it; other values have been counted
        track(value, label)
    return result
