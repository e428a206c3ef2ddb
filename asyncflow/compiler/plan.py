"""The compiled form of a graph: `Plan`, one `Partition` per device, primitives only, laid out for the scheduler.

Each loop frame has fixed tables: a slot for every input of every node in it, and how many inputs each node waits for.
An iteration copies the tables and is ready to receive tokens.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncflow.compiler.codegen import RegionCode
from asyncflow.compiler.estimate import estimate_region
from asyncflow.compiler.extract import EMIT, FEED, FETCH
from asyncflow.compiler.kernels import is_small_spec
from asyncflow.compiler.regions import REGION
from asyncflow.control.primitives.control_trigger import CONTROL_TRIGGER
from asyncflow.control.primitives.enter import ENTER
from asyncflow.control.primitives.exit import EXIT
from asyncflow.control.primitives.loop_cond import LOOP_COND
from asyncflow.control.primitives.merge import MERGE
from asyncflow.control.primitives.next_iteration import NEXT_ITERATION
from asyncflow.control.primitives.switch import SWITCH
from asyncflow.errors import GraphError
from asyncflow.graph.builtin import CONSTANT, IDENTITY
from asyncflow.graph.frames import output_frame

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from asyncflow.compiler.estimate import RegionEstimate
    from asyncflow.compiler.regions import Region
    from asyncflow.compiler.straight import Straight
    from asyncflow.graph.frames import FramePath
    from asyncflow.graph.graph import Graph
    from asyncflow.graph.ir import Node, Tensor
    from asyncflow.graph.op import Kernel, Op


_SMALL_REGION = 64
"""A region of at most so many small kernels, without loops, is itself small."""


class Kind(enum.IntEnum):
    """What the scheduler does with a node."""

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


class PlanNode:
    """A node as the scheduler sees it.

    Attributes:
        position: its place in its frame's tables.
        slot: where its inputs start in an iteration's values.
        targets: per output, ``(plain, merges)``: ``(position, slot, target)`` for every input it feeds, and
            ``(position, slot, target, input_index)`` for Merges.
        dead_targets: the same for dead tokens, which Exit and NextIteration do not get.
        controls: ``(position, target)`` for every control edge out.
        kernel: what to call; bound to device, attributes and state.
        is_heavy: a region that has proved too long for the event loop.
        is_small: shapes are known and small, so the kernel runs on the event loop without being timed.
    """

    __slots__ = (
        "blanks",
        "child",
        "controls",
        "cost",
        "dead",
        "dead_targets",
        "estimate",
        "fetch_index",
        "frame",
        "id",
        "index_values",
        "is_async",
        "is_constant",
        "is_emit",
        "is_heavy",
        "is_small",
        "is_user",
        "kernel",
        "kind",
        "n_inputs",
        "name",
        "needs_context",
        "position",
        "region",
        "single",
        "slot",
        "source",
        "targets",
        "uses_index",
    )

    def __init__(self, source: Node, frame: PlanFrame) -> None:
        self.source = source
        self.id = source.id
        self.name = source.name
        self.kind = int(_KINDS.get(source.op, Kind.KERNEL))
        self.frame = frame
        self.position = len(frame.nodes)
        self.slot = 0
        self.n_inputs = len(source.inputs)
        self.blanks = [None] * self.n_inputs
        self.single = source.single
        self.targets: tuple[_Targets, ...] = ()
        self.dead_targets: tuple[_DeadTargets, ...] = ()
        self.controls: tuple[tuple[int, PlanNode], ...] = ()
        self.kernel: Kernel | None = None
        self.cost: Any = None
        self.dead = Dead(source.name, str(source.location))
        self.child: PlanFrame | None = None
        self.is_constant = bool(source.attrs.get("constant")) if source.op is ENTER else False
        self.is_async = source.op.is_async
        self.is_emit = source.op is EMIT
        self.is_user = source.op.is_user
        self.needs_context = source.op.needs_context
        self.region: RegionCode | None = None
        self.estimate: RegionEstimate | None = None
        self.is_heavy = False
        self.is_small = _is_small(source)
        self.fetch_index = -1
        self.uses_index = False
        self.index_values: tuple[np.int32, ...] = ()

    def set_region(self, code: RegionCode, region: Region) -> None:
        """Makes the node run generated code."""
        self.region = code
        self.kernel = code.function
        self.estimate = estimate_region(region.walk())
        self.needs_context = code.needs_context
        self.is_small = (
            not (code.is_generator or code.needs_context)
            and len(region.nodes) <= _SMALL_REGION
            and all(_is_small(node) for node in region.walk())
        )

    def __repr__(self) -> str:
        return f"<PlanNode {self.name} ({self.source.op.name})>"


_Plain = tuple[tuple[int, int, PlanNode], ...]
_Merges = tuple[tuple[int, int, PlanNode, int], ...]
_Targets = tuple[_Plain, _Merges]
_DeadTargets = tuple[tuple[tuple[int, PlanNode], ...], _Merges]


class PlanFrame:
    """The tables of one loop, or of what lies outside all loops.

    Attributes:
        path: frame names from the outermost inward.
        label: the innermost name, as tags show it.
        values: an iteration's values before any token arrived; constants are there already.
        pending: how many inputs each node waits for.
        initial: nodes that wait for none.
        n_enters: Enters that lead into it.
        exits: Exits that lead out of it.
    """

    __slots__ = ("exits", "initial", "label", "n_enters", "nodes", "parallel_iterations", "path", "pending", "values")

    def __init__(self, path: FramePath, parallel_iterations: int) -> None:
        self.path = path
        self.label = path[-1].rpartition("/")[2] if path else ""
        self.parallel_iterations = parallel_iterations
        self.nodes: list[PlanNode] = []
        self.values: list[Any] = []
        self.pending: list[int] = []
        self.initial: list[PlanNode] = []
        self.exits: list[PlanNode] = []
        self.n_enters = 0


@dataclass(slots=True, kw_only=True)
class Partition:
    """What runs on one device.

    Attributes:
        device: its name.
        root: the frame outside all loops.
        feeds: nodes that take the fed values, in the order of the plan's feeds.
        n_fetches: number of fetched values.
        frames: all frames by their paths, the root included.
    """

    device: str
    root: PlanFrame
    feeds: list[PlanNode] = field(default_factory=list)
    n_fetches: int = 0
    frames: dict[FramePath, PlanFrame] = field(default_factory=dict)

    @property
    def nodes(self) -> list[PlanNode]:
        """Every node, in the order of the lowered graph."""
        return sorted((node for frame in self.frames.values() for node in frame.nodes), key=lambda node: node.id)


@dataclass(slots=True, kw_only=True)
class Plan:
    """A compiled graph, ready to run any number of times.

    Attributes:
        graph: the lowered graph.
        partitions: one per device.
        fetches: per fetch asked for, its position among the fetched values; None for a node, which has no value.
        straight: the plan as one call, if it is that simple.
    """

    graph: Graph
    partitions: list[Partition]
    fetches: list[int | None]
    straight: Straight | None = None

    def explain(self, *, source: bool = False) -> str:
        """What will run: the frames, and every node with its frame, kind and inputs; with `source`, regions' code."""
        lines = []
        for partition in self.partitions:
            lines.append(f"partition on {partition.device}: {len(partition.nodes)} nodes")
            for path, frame in partition.frames.items():
                name = f"frame {'/'.join(path)!r}, up to {frame.parallel_iterations} iterations" if path else "root"
                lines.append(f"  {name}")
                lines.extend(f"    {_explain(node)}" for node in frame.nodes)
            if source:
                lines.extend(f"\n# {n.name}\n{n.region.source}" for n in partition.nodes if n.region is not None)
        return "\n".join(lines)


def _explain(node: PlanNode) -> str:
    inputs = ", ".join(tensor.name for tensor in node.source.inputs)
    after = "".join(f" after {control.name}" for control in node.source.control_inputs)
    outputs = ", ".join(str(tensor.spec) for tensor in node.source.outputs)
    return f"{node.name} = {node.source.op.name}({inputs}){after}{' : ' + outputs if outputs else ''}"


def _is_small(node: Node) -> bool:
    op = node.op
    if op in (EMIT, REGION) or op.is_user or op.is_async or op.needs_context:
        return False
    return all(is_small_spec(tensor.spec) for tensor in (*node.inputs, *node.outputs))


def build_partition(
    graph: Graph,
    frames: Mapping[Node, FramePath],
    *,
    device: str,
    feeds: Sequence[Node],
    fetches: Sequence[Node],
    bind: Callable[[Node], Kernel],
    bind_region: Callable[[Node], RegionCode],
) -> Partition:
    """Lays a flat graph out for the scheduler; `bind` and `bind_region` give each node's code."""
    return _Layout(graph, frames, bind, bind_region).build(device, feeds, fetches)


class _Layout:
    def __init__(
        self,
        graph: Graph,
        frames: Mapping[Node, FramePath],
        bind: Callable[[Node], Kernel],
        bind_region: Callable[[Node], RegionCode],
    ) -> None:
        self.graph = graph
        self.frame_of = frames
        self.bind = bind
        self.bind_region = bind_region
        self.frames: dict[FramePath, PlanFrame] = {(): PlanFrame((), 1)}
        self.nodes: dict[Node, PlanNode] = {}
        self.targets: dict[Tensor, tuple[list[Any], list[Any]]] = {}
        self.control_targets: dict[Node, list[tuple[int, PlanNode]]] = {}
        self.constants: dict[Node, Any] = {}
        # A LoopCond without control inputs only gives a name to its input.
        self.aliases: dict[Tensor, Tensor] = {}
        self.indexed_merges = {
            tensor.node
            for node in graph.nodes
            for tensor in node.inputs
            if tensor.node.op is MERGE and tensor.index == 1
        }
        controls = {control for node in graph.nodes for control in node.control_inputs}
        for node in graph.nodes:
            if node.op is LOOP_COND and not node.control_inputs and node not in controls:
                self.aliases[node.outputs[0]] = node.inputs[0]

    def build(self, device: str, feeds: Sequence[Node], fetches: Sequence[Node]) -> Partition:
        for node in self.graph.nodes:
            if node.op is not CONSTANT or node.control_inputs:
                self.place(node)
        for plan_node in list(self.nodes.values()):
            self.connect(plan_node)
        for source, plan_node in self.nodes.items():
            self.finish(source, plan_node)
        for index, fetch in enumerate(fetches):
            self.nodes[fetch].fetch_index = index
        root = self.frames[()]
        root.initial = [n for n in root.nodes if not root.pending[n.position] and n.kind != Kind.FEED]
        return Partition(
            device=device,
            root=root,
            feeds=[self.nodes[feed] for feed in feeds],
            n_fetches=len(fetches),
            frames=self.frames,
        )

    def place(self, node: Node) -> None:
        """Gives the node its place in its frame's tables."""
        if node.outputs and node.outputs[0] in self.aliases:
            return
        frame = self.frames[self.frame_of[node]]
        planned = self.nodes[node] = PlanNode(node, frame)
        planned.slot = len(frame.values)
        frame.nodes.append(planned)
        if node.op is MERGE:
            self.place_merge(node, planned, frame)
            return
        frame.values.extend([None] * len(node.inputs))
        frame.pending.append(len(node.inputs) + len(node.control_inputs))
        if node.op is ENTER:
            path = output_frame(node, self.frame_of[node])
            if path not in self.frames:
                self.frames[path] = PlanFrame(path, node.attrs["parallel_iterations"])
            planned.child = self.frames[path]
            planned.child.n_enters += 1
        elif node.op is EXIT:
            frame.exits.append(planned)
        if node.op is REGION:
            planned.set_region(self.bind_region(node), node.attrs["region"])
        elif planned.kind == Kind.KERNEL and not planned.is_emit:
            planned.kernel = self.bind(node)

    def place_merge(self, node: Node, planned: PlanNode, frame: PlanFrame) -> None:
        """A Merge has one slot for its value and one for the index; it waits for one live input, and its controls."""
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
        planned.index_values = tuple(np.int32(index) for index in range(len(node.inputs)))
        frame.values.extend([None, None])
        frame.pending.append(1 + len(node.control_inputs))

    def connect(self, planned: PlanNode) -> None:
        """Enters the node's inputs into the target lists of what feeds them."""
        node, frame = planned.source, planned.frame
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
        """Puts a constant outside all loops where it is needed, so that it costs nothing in a run."""
        frame = planned.frame
        value = self.constant(tensor.node)
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

    def constant(self, node: Node) -> Any:
        if node not in self.constants:
            self.constants[node] = self.bind(node)()
        return self.constants[node]

    def finish(self, source: Node, planned: PlanNode) -> None:
        targets, dead_targets = [], []
        for tensor in source.outputs:
            plain, merges = self.targets.get(tensor, ([], []))
            targets.append((tuple(plain), tuple(merges)))
            stopped = (Kind.EXIT, Kind.NEXT_ITERATION)
            dead_plain = tuple((position, target) for position, _, target in plain if target.kind not in stopped)
            dead_targets.append((dead_plain, tuple(merges)))
        planned.targets, planned.dead_targets = tuple(targets), tuple(dead_targets)
        planned.controls = tuple(self.control_targets.get(source, ()))
        planned.uses_index = source in self.indexed_merges
        if source.op is EXIT:
            planned.dead = Dead(source.inputs[0].node.name, str(source.location))
