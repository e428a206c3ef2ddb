"""Lays the nodes of one device out for the scheduler, as a `Partition`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from asyncflow.compiler.plan import Dead, FiringWay, Kind, Partition, PlanFrame, PlanNode
from asyncflow.compiler.program.kernels.kernels import is_small_spec
from asyncflow.compiler.program.loops.frames import is_everywhere
from asyncflow.compiler.regions.code.region_code import RegionCode
from asyncflow.compiler.regions.regions import REGION
from asyncflow.control.primitives.enter import ENTER, require_one_window
from asyncflow.control.primitives.exit import EXIT
from asyncflow.control.primitives.loop_cond import LOOP_COND
from asyncflow.control.primitives.merge import MERGE
from asyncflow.control.primitives.next_iteration import NEXT_ITERATION
from asyncflow.devices.protocol import host_kernel, is_coroutine_kernel
from asyncflow.errors import GraphError, LoopIdentity
from asyncflow.graph.builtin import CONSTANT
from asyncflow.graph.frames import FramePath, output_frame
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.resource import waits_in_line
from asyncflow.values import Kernel, Value


@dataclass(slots=True)
class Layout:
    """Lays out the nodes of one device of a flat graph.

    Attributes:
        sources: the nodes, and constants of all devices, since each partition has its own copy of the constants it
            uses.
        frame_of: the frame of every node.
        streams: which compute stream a node runs on; 0 for those left out.
        bind: gives a node's kernel.
        bind_region: gives a region's code, and what a firing of it calls.
        on_host: tensors whose values are on the host; see `find_host_values`.
    """

    sources: Sequence[Node]
    frame_of: Mapping[Node, FramePath]
    streams: Mapping[Node, int]
    bind: Callable[[Node], Kernel]
    bind_region: Callable[[Node], tuple[RegionCode, Kernel]]
    on_host: AbstractSet[Tensor] = frozenset()
    frames: dict[FramePath, PlanFrame] = field(default_factory=lambda: {(): PlanFrame((), 1, LoopIdentity(""))})
    nodes: dict[Node, PlanNode] = field(default_factory=dict)
    targets: dict[Tensor, tuple[list[Any], list[Any]]] = field(default_factory=dict)
    control_targets: dict[Node, list[tuple[int, PlanNode]]] = field(default_factory=dict)
    constants: dict[Node, Value] = field(default_factory=dict)
    aliases: dict[Tensor, Tensor] = field(default_factory=dict)
    """A LoopCond without control inputs only gives a name to its input."""
    indexed_merges: set[Node] = field(default_factory=set)
    host_feeds: set[PlanNode] = field(default_factory=set)
    uses_host: bool = False
    """True if the device leaves work to the host."""

    def __post_init__(self) -> None:
        controls = {control for node in self.sources for control in node.control_inputs}
        for node in self.sources:
            for tensor in node.inputs:
                if tensor.node.op is MERGE and tensor.index == 1:
                    self.indexed_merges.add(tensor.node)
            if node.op is LOOP_COND and not node.control_inputs and node not in controls:
                self.aliases[node.outputs[0]] = node.inputs[0]

    def build(self, device: str, fetches: Mapping[Node, int], n_fetches: int) -> Partition:
        """Return the partition of the device of that name.

        Args:
            device: its name.
            fetches: nodes that fetch, with their positions among the plan's fetched values.
            n_fetches: number of the plan's fetched values.
        """
        for node in self.sources:
            if not is_everywhere(node):
                self.place(node)
        for plan_node in list(self.nodes.values()):
            self.connect(plan_node)
        for source, plan_node in self.nodes.items():
            self.finish(source, plan_node)
        if self.uses_host or self.on_host:
            for plan_node in self.nodes.values():
                self.leave_on_host(plan_node)
        for fetch, index in fetches.items():
            self.nodes[fetch].number = index
        root = self.frames[()]
        feeds = [node for node in root.nodes if node.kind == Kind.FEED]
        root.initial = [n for n in root.nodes if not root.pending[n.position] and n.kind != Kind.FEED]
        return Partition(
            device=device,
            root=root,
            feeds=feeds,
            feed_indexes=[feed.source.attrs["index"] for feed in feeds],
            n_fetches=n_fetches,
            fetch_indexes=list(fetches.values()),
            host_feeds=self.host_feeds,
            frames=self.frames,
            is_on_host=self.uses_host and all(map(self.is_on_host, root.nodes)),
        )

    def place(self, node: Node) -> None:
        """Give the node its place in its frame's tables."""
        if node.outputs and node.outputs[0] in self.aliases:
            return
        frame = self.frames[self.frame_of[node]]
        planned = PlanNode(node, len(frame.nodes), len(frame.values), self.streams.get(node, 0))
        self.nodes[node] = planned
        frame.nodes.append(planned)
        if node.op is MERGE:
            self.place_merge(node, planned, frame)
            return
        frame.values.extend([None] * len(node.inputs))
        frame.pending.append(len(node.inputs) + len(node.control_inputs))
        if node.op is ENTER:
            path = output_frame(node, self.frame_of[node])
            if path not in self.frames:
                lowered_from = node.attrs.get("loop")
                loop = LoopIdentity(lowered_from or path[-1], node.location, by_hand=lowered_from is None)
                self.frames[path] = PlanFrame(path, node.attrs["parallel_iterations"], loop)
            require_one_window(node, path, self.frames[path].parallel_iterations)
            planned.child = self.frames[path]
            planned.child.n_enters += 1
        elif node.op is EXIT:
            frame.exits.append(planned)
        if node.op is REGION:
            planned.set_region(*self.bind_region(node), node.attrs["region"])
        elif planned.way >= FiringWay.SEND:
            planned.number = node.attrs.get("transfer", 0)
            if planned.way == FiringWay.RECV and node.attrs["is_acknowledged"]:
                frame.acknowledges = planned.number
        elif planned.kind == Kind.KERNEL:
            planned.kernel = self.bind(node)
            if is_coroutine_kernel(planned.kernel):
                planned.way = int(FiringWay.AWAITED)
                self.uses_host = self.uses_host or host_kernel(planned.kernel) is not None
            elif waits_in_line(node):
                gives_small = all(is_small_spec(x.spec) for x in node.outputs)
                is_light = gives_small and not planned.conduct.needs_context
                planned.way = int(FiringWay.LIGHT if is_light else FiringWay.IN_LINE)

    def place_merge(self, node: Node, planned: PlanNode, frame: PlanFrame) -> None:
        """Give a Merge one slot for its value and one for the index; it waits for one live input, and its controls."""
        back_edges = sum(tensor.node.op is NEXT_ITERATION for tensor in node.inputs)
        planned.n_inputs -= back_edges
        if back_edges and (back_edges, planned.n_inputs) != (1, 1):
            raise GraphError(
                f"{node.name}: the merge of a loop takes one enter and one next_iteration; it has {planned.n_inputs} "
                f"and {back_edges}\n  built at {node.location}"
            )
        if any(tensor.node.op is ENTER and tensor.node.attrs["constant"] for tensor in node.inputs):
            raise GraphError(
                f"{node.name}: a constant enter reaches every iteration, so a merge never gets it as its only live "
                f"input; use an enter that is not constant, or an identity of it\n  built at {node.location}"
            )
        if node in self.indexed_merges:
            planned.index_values = tuple(np.int32(index) for index in range(len(node.inputs)))
        frame.values.extend([None, None])
        frame.pending.append(1 + len(node.control_inputs))

    def connect(self, planned: PlanNode) -> None:
        """Enter the node's inputs into the target lists of their sources."""
        node, frame = planned.source, self.frames[self.frame_of[planned.source]]
        is_loop_merge = any(tensor.node.op is NEXT_ITERATION for tensor in node.inputs)
        for index, tensor in enumerate(node.inputs):
            tensor = self.aliases.get(tensor, tensor)
            if tensor.node.op is CONSTANT and tensor.node not in self.nodes:
                self.prefill(planned, index, tensor)
                continue
            plain, merges = self.targets.setdefault(tensor, ([], []))
            if node.op is not MERGE:
                plain.append((planned.position, planned.slot + index, planned))
            elif is_loop_merge and node not in self.indexed_merges:
                plain.append((planned.position, planned.slot, planned))
            else:
                merges.append((planned.position, planned.slot, planned, index))
        for control in node.control_inputs:
            if control not in self.nodes:  # a constant is always there
                frame.pending[planned.position] -= 1
                continue
            self.control_targets.setdefault(control, []).append((planned.position, planned))

    def prefill(self, planned: PlanNode, index: int, tensor: Tensor) -> None:
        """Put a constant outside all loops into the slots of its users, so that it costs nothing in a run."""
        frame = self.frames[self.frame_of[planned.source]]
        is_for_host = self.uses_host and host_kernel(planned.kernel) is not None and tensor.shape != ()
        value = tensor.node.attrs["value"] if is_for_host else self.constant(tensor.node)
        if planned.kind == Kind.MERGE:
            if frame.values[planned.slot] is not None:
                raise GraphError(
                    f"{planned.name}: the merge always gets two live inputs, {index} and "
                    f"{frame.values[planned.slot + 1]}, which are constants\n  built at {planned.source.location}"
                )
            frame.values[planned.slot : planned.slot + 2] = [value, index]
            frame.pending[planned.position] -= 1
            return
        frame.values[planned.slot + index] = value
        frame.pending[planned.position] -= 1

    def constant(self, node: Node) -> Value:
        """The value of a constant, made once."""
        if node not in self.constants:
            self.constants[node] = self.bind(node)()
        return self.constants[node]

    def finish(self, source: Node, planned: PlanNode) -> None:
        """Give the node the lists of its targets."""
        targets, dead_targets = [], []
        for tensor in source.outputs:
            plain, merges = self.targets.get(tensor, ([], []))
            targets.append((tuple(plain), tuple(merges)))
            stopped = (Kind.EXIT, Kind.NEXT_ITERATION)
            dead_plain = tuple((position, target) for position, _, target in plain if target.kind not in stopped)
            dead_targets.append((dead_plain, tuple(merges)))
        planned.targets, planned.dead_targets = tuple(targets), tuple(dead_targets)
        planned.controls = tuple(self.control_targets.get(source, ()))
        if source.op is EXIT:
            planned.dead = Dead(source.inputs[0].node.name, str(source.location))

    def leave_on_host(self, planned: PlanNode) -> None:
        """Keep fed values, and results of host kernels, on the host if only the host uses them."""
        if planned.kind == Kind.FEED:
            ((plain, merges),) = planned.targets
            is_for_host = plain and not merges and all(host_kernel(each.kernel) for *_, each in plain)
            if planned.source.attrs.get("stays") or is_for_host:
                self.host_feeds.add(planned)
        elif (kernel := host_kernel(planned.kernel)) is not None:
            kernel.offers = [planned.offer_of(index) for index in range(len(planned.targets))]
            kernel.staying = [
                index
                for index, (plain, merges) in enumerate(planned.targets)
                if planned.source.outputs[index] in self.on_host
                or (not merges and all(host_kernel(each.kernel) or each.way == FiringWay.TO_HOST for *_, each in plain))
            ]

    def is_on_host(self, planned: PlanNode) -> bool:
        """Return True if the device has no part in a node."""
        if planned.kind == Kind.FEED:
            return planned in self.host_feeds or planned.source.outputs[0].shape == ()
        kernel = host_kernel(planned.kernel)
        if kernel is not None:
            return len(kernel.staying) == len(planned.targets)
        return planned.kind == Kind.FETCH or planned.way == FiringWay.TO_HOST
