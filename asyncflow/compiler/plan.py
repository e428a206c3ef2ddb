"""The compiled form of a graph: `Plan`, one `Partition` per device, primitives only, laid out for the scheduler.

Each loop frame has fixed tables: a slot for every input of every node in it, and how many inputs each node waits for.
An iteration copies the tables and is ready to receive tokens.
"""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from asyncflow.compiler.batching.pending_sums import ADD_PRODUCTS
from asyncflow.compiler.batching.products_ahead import PRODUCT_AHEAD
from asyncflow.compiler.memory.saved import Saved, explain_saved
from asyncflow.compiler.placement.node_costs import RegionEstimate, estimate_region
from asyncflow.compiler.program.extract import EMIT, FEED, FETCH
from asyncflow.compiler.program.kernels.fused import FUSED
from asyncflow.compiler.program.kernels.kernel_text import kernel_source
from asyncflow.compiler.program.kernels.kernels import is_small_spec
from asyncflow.compiler.program.kernels.transfers import RECV, SEND, TO_HOST
from asyncflow.compiler.program.survey import NOTHING_TOUCHED, Survey
from asyncflow.compiler.regions.code.region_code import RegionCode
from asyncflow.compiler.regions.regions import REGION, Region
from asyncflow.compiler.run_cost import RunCost
from asyncflow.control.primitives.control_trigger import CONTROL_TRIGGER
from asyncflow.control.primitives.enter import ENTER
from asyncflow.control.primitives.exit import EXIT
from asyncflow.control.primitives.loop_cond import LOOP_COND
from asyncflow.control.primitives.merge import MERGE
from asyncflow.control.primitives.next_iteration import NEXT_ITERATION
from asyncflow.control.primitives.switch import SWITCH
from asyncflow.errors import counted
from asyncflow.graph.builtin import IDENTITY
from asyncflow.ops.rows.by_row import called_op
from asyncflow.semantics.report import describe_races

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from asyncflow.compiler.lowering.single_call import SingleCall
    from asyncflow.compiler.memory.plan_memory import PlannedLoop
    from asyncflow.compiler.placement.place import Placement
    from asyncflow.compiler.program.request import PlanRequest
    from asyncflow.devices.machine.cost import MeasuredCost
    from asyncflow.devices.protocol import Into
    from asyncflow.devices.saved.working_set import WorkingSet
    from asyncflow.errors import LoopIdentity
    from asyncflow.graph.frames import FramePath
    from asyncflow.graph.graph import Graph
    from asyncflow.graph.ir import Node
    from asyncflow.graph.op import Op
    from asyncflow.values import Conduct, Kernel, Value


_SMALL_REGION = 64
"""Maximum number of small kernels in a region, without loops, that is itself small."""


class FiringWay(enum.IntEnum):
    """The executor's way with a firing of a node with a kernel, or at the edge of its partition."""

    SMALL = 0
    """Shapes are known and small, so the kernel runs on the event loop without being timed."""
    LIGHT = 1
    """The kernel may return a place in line, needs no context, and has small results."""
    IN_LINE = 2
    """The kernel may return a place in line."""
    AWAITED = 3
    """The kernel is a coroutine."""
    TIMED = 4
    """Called where its time, as measured, lets it: on the event loop, or on a thread."""
    SLICED = 5
    """A region that gives way in between."""
    SEND = 6
    """Takes a value to another partition; this and the next ones have no kernel."""
    RECV = 7
    TO_HOST = 8
    EMIT = 9


_CROSSINGS: dict[Op, FiringWay] = {
    SEND: FiringWay.SEND,
    RECV: FiringWay.RECV,
    TO_HOST: FiringWay.TO_HOST,
    EMIT: FiringWay.EMIT,
}


class Kind(enum.IntEnum):
    """The scheduler's treatment of a node."""

    KERNEL = 0
    SWITCH = 1
    MERGE = 2
    NEXT_ITERATION = 3
    ENTER = 4
    EXIT = 5
    PASS = 6
    FETCH = 7
    TRIGGER = 8
    FEED = 9


_KINDS: dict[Op, Kind] = {
    SWITCH: Kind.SWITCH,
    MERGE: Kind.MERGE,
    NEXT_ITERATION: Kind.NEXT_ITERATION,
    ENTER: Kind.ENTER,
    EXIT: Kind.EXIT,
    LOOP_COND: Kind.PASS,
    IDENTITY: Kind.PASS,
    FETCH: Kind.FETCH,
    CONTROL_TRIGGER: Kind.TRIGGER,
    FEED: Kind.FEED,
}


@dataclass(frozen=True, slots=True)
class Dead:
    """The token of a branch not taken; `killer` names the Switch that made it dead, `location` is its place."""

    killer: str
    location: str


@dataclass(slots=True, eq=False)
class NodeTimes:
    """Times of the firings of a node, as estimated and as measured.

    Attributes:
        estimate: of a region.
        cost: measured time of a firing; None before the first.
        hold: for a region that gives way in between, the time for which it holds a thread; None until that is long.
        is_suspect: True if a firing may have been long, and nothing has checked yet whether the kernel itself was.
    """

    estimate: RegionEstimate | None = None
    cost: MeasuredCost | None = None
    hold: MeasuredCost | None = None
    is_suspect: bool = False


@dataclass(slots=True, eq=False)
class PlanNode:
    """A node, as the scheduler sees it.

    Attributes:
        position: its place in its frame's tables.
        slot: where its inputs start in an iteration's values.
        stream: which of the device's compute streams it runs on.
        targets: per output, ``(plain, merges)``: ``(position, slot, target)`` for every input it feeds, and
            ``(position, slot, target, input_index)`` for Merges.
        dead_targets: the same for dead tokens, which Exit and NextIteration do not get.
        controls: ``(position, target)`` for every control edge out.
        kernel: the function to call; bound to device, attributes and state.
        region: the generated code that the kernel calls.
        child: of an Enter, the frame that it leads into.
        number: of a fetch, its position among the fetched values; of a Send or Recv, that of the transfer, which both
            share.
        index_values: of a Merge whose index is asked for, the indexes.
        way: how the executor fires it; a `FiringWay`.
        conduct: that of the op whose kernel is called, or of the region.
    """

    source: Node
    position: int
    slot: int
    stream: int = 0
    targets: tuple[_Targets, ...] = ()
    dead_targets: tuple[_DeadTargets, ...] = ()
    controls: tuple[tuple[int, PlanNode], ...] = ()
    kernel: Kernel | None = None
    region: RegionCode | None = None
    child: PlanFrame | None = None
    number: int = -1
    index_values: tuple[np.int32, ...] = ()
    times: NodeTimes = field(init=False, default_factory=NodeTimes)
    kind: int = field(init=False)
    way: int = field(init=False)
    conduct: Conduct = field(init=False)
    n_inputs: int = field(init=False)
    blanks: list[None] = field(init=False)
    single: bool = field(init=False)
    dead: Dead = field(init=False)

    # Facts about `source` are copied into the node's slots: scheduler and executor read them at every firing.
    def __post_init__(self) -> None:
        source = self.source
        self.single = source.single
        # Plain ints, not enumeration members: they are compared at every firing.
        self.kind = int(_KINDS.get(source.op, Kind.KERNEL))
        self.n_inputs = len(source.inputs)
        self.blanks = [None] * self.n_inputs  # overwrites the inputs of a firing, to drop their values
        self.dead = Dead(source.attrs.get("stands_for", source.name), str(source.location))
        self.conduct = called_op(source).conduct
        way = FiringWay.AWAITED if self.conduct.is_async else FiringWay.SMALL if _is_small(source) else FiringWay.TIMED
        self.way = int(_CROSSINGS.get(source.op, way))

    def offer_of(self, output: int) -> Into | None:
        """Return the function of a region that reads an output, which may offer memory for a copy of it."""
        for _, slot, target in self.targets[output][0]:
            offer = getattr(target.kernel, "offer", None)
            if offer is not None:
                return partial(offer, slot - target.slot)
        return None

    def set_region(self, code: RegionCode, kernel: Kernel, region: Region) -> None:
        """Make the node run generated code, by calling `kernel`."""
        self.region, self.kernel, self.conduct = code, kernel, code.conduct
        self.times.estimate = estimate_region(region.walk())
        is_small = len(region.nodes) <= _SMALL_REGION and all(_is_small(node) for node in region.walk())
        way = FiringWay.SMALL if is_small and not code.conduct.needs_context else FiringWay.TIMED
        self.way = int(FiringWay.SLICED if code.is_generator else way)

    @property
    def name(self) -> str:
        """That of its source."""
        return self.source.name

    @property
    def label(self) -> str:
        """Name on timelines: the node's, or a label for the nodes of its region."""
        return self.source.name if self.region is None else self.region.label

    @property
    def peer(self) -> str:
        """The device at the other end of a transfer."""
        return str(self.source.attrs["target" if self.way == FiringWay.SEND else "source"])

    def region_nodes(self) -> Iterator[Node]:
        """Yield the nodes of its region, also inside branches and loops; nothing without a region."""
        return self.source.attrs["region"].walk() if self.region is not None else iter(())

    def __repr__(self) -> str:
        return f"<PlanNode {self.name} ({self.source.op.name})>"


_Plain = tuple[tuple[int, int, PlanNode], ...]
_Merges = tuple[tuple[int, int, PlanNode, int], ...]
_Targets = tuple[_Plain, _Merges]
_DeadTargets = tuple[tuple[tuple[int, PlanNode], ...], _Merges]


@dataclass(slots=True, eq=False, repr=False)
class PlanFrame:
    """The tables of one loop, or of what lies outside all loops.

    Attributes:
        path: frame names from the outermost inward.
        loop: which loop it is a frame of, for errors.
        label: of that loop, as tags show it.
        values: an iteration's values before any token arrived; constants are there already.
        pending: how many inputs each node waits for.
        initial: nodes that wait for none.
        n_enters: Enters that lead into it.
        exits: Exits that lead out of it.
        acknowledges: the transfer that brings the predicate, of which the sender wants to hear when an iteration has
            ended here; 0 where the predicate is made, and outside loops over several devices.
        working_set: memory of an iteration, for iterations that ask for memory before they begin.
    """

    path: FramePath
    parallel_iterations: int
    loop: LoopIdentity
    label: str = field(init=False)
    nodes: list[PlanNode] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)
    initial: list[PlanNode] = field(default_factory=list)
    exits: list[PlanNode] = field(default_factory=list)
    n_enters: int = 0
    acknowledges: int = 0
    working_set: WorkingSet | None = None

    def __post_init__(self) -> None:
        self.label = self.loop.label


@dataclass(slots=True, kw_only=True)
class Partition:
    """The part of a plan that runs on one device.

    Attributes:
        device: its name.
        root: the frame outside all loops.
        feeds: nodes that take fed values.
        feed_indexes: for each of them, which of the plan's feeds it takes.
        n_fetches: number of values the whole plan fetches.
        fetch_indexes: which of them this partition fetches.
        host_feeds: nodes that take values which the host alone uses, and which are not copied in.
        frames: all frames by their paths, the root included.
        is_on_host: nothing of it is done by the device, which leaves all of it to the host.
    """

    device: str
    root: PlanFrame
    feeds: list[PlanNode] = field(default_factory=list)
    feed_indexes: list[int] = field(default_factory=list)
    n_fetches: int = 0
    fetch_indexes: list[int] = field(default_factory=list)
    host_feeds: set[PlanNode] = field(default_factory=set)
    frames: dict[FramePath, PlanFrame] = field(default_factory=dict)
    is_on_host: bool = False

    def __del__(self) -> None:
        # Frames and nodes refer to one another: without this, only the garbage collector would free a dropped plan and
        # its constants. Every run holds its partition.
        for frame in self.frames.values():
            for node in frame.nodes:
                node.targets, node.dead_targets, node.controls = (), (), ()
            frame.nodes, frame.initial, frame.exits = [], [], []

    @property
    def nodes(self) -> list[PlanNode]:
        """Every node, in the order of the lowered graph."""
        return sorted((node for frame in self.frames.values() for node in frame.nodes), key=lambda node: node.source.id)


@dataclass(slots=True, weakref_slot=True, eq=False, kw_only=True, repr=False)
class Plan:
    """A compiled graph, ready to run any number of times.

    Attributes:
        request: the kind of run that it was compiled for.
        graph: the lowered graph.
        partitions: one per device.
        fetches: per fetch asked for, its position among the fetched values; None for a node, which has no value.
        placement: why each node is on its device.
        single_call: the plan as one call, if it is that simple.
        lone_firing: the plan as one firing that waits in line, likewise.
        saved: what its loops save for their gradients.
        memory: the treatment of saved values on devices with a limit, and its predicted cost.
        memory_notes: for other loops, why nothing is predicted, and the treatment of their values.
        loops: for people, the driver of each loop on a card.
        survey: states and nodes that its runs touch.
        cost: learnt time and memory of its runs.
        used: the number of its last run, among the runs of its session.
        remarks: lines for people on its maps and loops.
        kernels: lines for people on kernels of users.
        is_shared: True if it computes a body for several runs at once.
    """

    request: PlanRequest
    graph: Graph
    partitions: list[Partition]
    fetches: list[int | None]
    placement: Placement
    single_call: SingleCall | None = None
    lone_firing: SingleCall | None = None
    survey: Survey = NOTHING_TOUCHED
    cost: RunCost = field(default_factory=RunCost)
    used: int = 0
    saved: tuple[Saved, ...] = ()
    memory: tuple[PlannedLoop, ...] = ()
    memory_notes: tuple[str, ...] = ()
    loops: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    is_shared: bool = False

    def __repr__(self) -> str:
        parts = (f"{counted(len(partition.nodes), 'node')} on {partition.device}" for partition in self.partitions)
        where = ", ".join(parts)
        return f"<Plan: {where}; explain() tells more>"

    def renew(self, other: Plan) -> None:
        """Take over the content of `other`, of an equal request: later runs follow it.

        Measurements stay, if the nodes are the same.
        """
        # Replace the contents in place, so that prepared runs see the new plan and the measured cost stays.
        for mine, theirs in zip(self.partitions, other.partitions, strict=False):
            known, found = mine.nodes, theirs.nodes
            # Other nodes must not inherit these times: they would count as their own until measured.
            if [node.name for node in known] == [node.name for node in found]:
                for node, new in zip(known, found, strict=True):
                    new.times.cost, new.times.hold = node.times.cost, node.times.hold
                    new.times.is_suspect = node.times.is_suspect
        for name in _COMPILED:
            setattr(self, name, getattr(other, name))

    def explain(self, *, source: bool = False, memory: bool = False, races: bool = False) -> str:
        """Describe the plan in words: per device the frames, and every node with its inputs.

        Of ops with kernels for kinds of device it tells which kernel each node calls, and why. The same goes for
        functions that the host computes for a card. All other nodes call the library's kernels.

        Of each `map_fn` whether it is lifted, and if not, why; of each `vertex_map` its three parts. With several
        devices, the text also gives the reason for each node's device, and counts the values that go from device to
        device. It tells which control flow written by hand stays on one device and why. It lists the products of loops
        that are done for several iterations at once. With CUDA devices, also whether a card runs a loop by itself
        (`Session(device_while=True)`), and if not, why. Of a region on a card it tells how many CUDA graphs launch it
        by now (`Session(cuda_graphs=True)`). If none can, it names the node, option or rule that prevents them.

        Args:
            source: also the code of regions, and of CUDA kernels made of chains of elementwise nodes. Of a pooled loop
                that has made steps it shows the code of steps of several requests, and of one.
            memory: only the memory of CUDA graphs that there are by now, and the values that loops save for their
                gradients: each with its bytes an iteration and its readers. On devices with a limit, also the choice
                for each (``Session(saved_values="auto")``) or the treatment asked for (``"keep"``, ``"swap"``), its
                predicted cost, and the cost of less memory. Without a limit, the most bytes of values at a time, in
                the order of the plan and in the order as written.
            races: only reads and writes that nothing orders, and the lines that built them; of small
                programs also the outcomes, each with an order that leads to it.
        """
        if races:
            graph, request = self.request.graph, self.request
            return "\n".join(describe_races(graph, request.roots, request.feeds)) or "there are no races"
        if memory:
            chosen = [line for loop in self.memory for line in loop.explain()]
            return "\n".join([*explain_saved(self.saved), *chosen, *self.memory_notes, *self._explain_graph_memory()])
        lines = [
            *self.remarks,
            *self.placement.notes,
            *self.kernels,
            *self._explain_transfers(),
            *self._explain_batching(),
            *self.loops,
        ]
        for partition in self.partitions:
            lines.append(f"partition on {partition.device}: {counted(len(partition.nodes), 'node')}")
            for path, frame in partition.frames.items():
                name = f"frame {'/'.join(path)!r}, up to {frame.parallel_iterations} iterations" if path else "root"
                lines.append(f"  {name}")
                for node in frame.nodes:
                    lines += self._explain_node(node)
            if source:
                for planned in partition.nodes:
                    if planned.region is not None:
                        lines.append(f"\n# {planned.name}\n{planned.region.source}")
                        lines += _explain_kernels(planned.source)
                    for source_node in _nodes_of(planned.source):
                        steps = getattr(source_node.attrs.get("shared"), "step_sources", {})
                        lines += [f"\n# {source_node.name}, {kind}\n{code}" for kind, code in steps.items()]
        return "\n".join(lines)

    def _explain_graph_memory(self) -> list[str]:
        lines = []
        for partition in self.partitions:
            nodes = [(node.name, getattr(node.kernel, "graphs", None)) for node in partition.nodes]
            made = [(name, graph.held) for name, graphs in nodes if graphs is not None for graph in graphs.made]
            total = sum({block: size for _, held in made for block, size in held.items()}.values())
            if made:
                what = f"{counted(len(made), 'CUDA graph')} on {partition.device}"
                lines.append(f"{what}: {total:,} bytes in all, as graphs share temporary memory")
                lines += [f"  {name}: {sum(held.values()):,} bytes" for name, held in made]
        return lines

    def _explain_transfers(self) -> list[str]:
        pairs = Counter(
            (partition.device, node.peer)
            for partition in self.partitions
            for node in partition.nodes
            if node.way == FiringWay.SEND
        )
        return [f"{source} sends {counted(count, 'value')} to {target}" for (source, target), count in pairs.items()]

    def _explain_batching(self) -> list[str]:
        lines: list[str] = []
        for partition in self.partitions:
            for planned in partition.nodes:
                for node in _nodes_of(planned.source):
                    if node.op is PRODUCT_AHEAD:
                        lines.append(f"{node.name}: made ahead, for several iterations at once")
                    elif node.op is ADD_PRODUCTS:
                        others = len(node.attrs["operands"]) - 1
                        joined = f", with {others} more" if others else ""
                        lines.append(f"{node.name}: summed up{joined}, for several iterations at once")
        return lines

    def _explain_node(self, node: PlanNode) -> list[str]:
        """Describe a node, and the reason for its device, if there was a choice; of a region, the reason of each
        node.
        """
        lines = [f"    {_explain(node)}"]
        if node.region is not None and node.region.launching:
            graphs = getattr(node.kernel, "graphs", None)
            lines.append(f"      # {node.region.launching}{'' if graphs is None else f': {graphs}'}")
        if len(self.partitions) == 1:
            return lines
        reasons = self.placement.reasons
        if node.source.op is not REGION:
            return [f"{lines[0]}  # {reasons[node.name]}"] if node.name in reasons else lines
        names: dict[str, list[str]] = {}
        for inner in node.source.attrs["region"].nodes:
            if inner.name in reasons:
                names.setdefault(reasons[inner.name], []).append(inner.name)
        return [*lines, *(f"      # {', '.join(together)}: {reason}" for reason, together in names.items())]


_COMPILED = tuple(field.name for field in fields(Plan) if field.name not in ("request", "cost", "used", "is_shared"))
"""Fields of a plan that compiling sets."""


def _nodes_of(source: Node) -> Iterable[Node]:
    """Return the nodes of a region, or a node that is none."""
    return source.attrs["region"].walk() if source.op is REGION else (source,)


def _explain_kernels(region: Node) -> Iterator[str]:
    for node in region.attrs["region"].walk():
        if node.op is FUSED:
            kernel = kernel_source(node.attrs["chain"])
            yield f"# {node.name}: ({kernel.in_params}) -> ({kernel.out_params})\n{kernel.operation}\n"


def _explain(node: PlanNode) -> str:
    inputs = ", ".join(tensor.name for tensor in node.source.inputs)
    after = "".join(f" after {control.name}" for control in node.source.control_inputs)
    outputs = ", ".join(str(tensor.spec) for tensor in node.source.outputs)
    return f"{node.name} = {node.source.op.name}({inputs}){after}{' : ' + outputs if outputs else ''}"


def _is_small(node: Node) -> bool:
    conduct = node.op.conduct
    # Small values mean a short kernel only for the library's own ops: a user's function may take any time.
    if node.op in (REGION, *_CROSSINGS) or conduct.is_user or conduct.is_async or conduct.needs_context:
        return False
    return all(is_small_spec(tensor.spec) for tensor in (*node.inputs, *node.outputs))
