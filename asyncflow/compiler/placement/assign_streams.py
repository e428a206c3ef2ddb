"""Pass: chooses a compute stream for every node on a device that has several of them.

It runs after placement, on the structured graph, and solves the same problem again. Nodes on one stream run one after
the other, as on one device. A value that goes to another stream is handed over, which costs time. What differs:

- A node may go to the streams of its device alone. Light kernels cost nothing, for two streams of them do not overlap:
  they go with the last heavy node that they use, or else with the first that uses them.
- The counters, predicates and first nodes of a loop are on the first stream. So the next iteration begins before the
  later stages of this one are done.
- Control flow written by hand stays on the first stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from asyncflow.compiler.placement.choices import Choices, find_counters
from asyncflow.compiler.placement.followers import place_followers
from asyncflow.compiler.placement.node_costs import NodeCosts, assumed_ns
from asyncflow.compiler.placement.place import find_places
from asyncflow.compiler.placement.simulated_execution import NO_HOSTS, Hosts
from asyncflow.compiler.program.extract import FEED
from asyncflow.compiler.program.loops.frames import has_primitives, is_everywhere
from asyncflow.graph.builtin import CONSTANT, IDENTITY, NO_OP, PARAMETER
from asyncflow.graph.graph import Graph
from asyncflow.graph.ir import Node
from asyncflow.graph.structured import WhileNode, levels

_LIGHT_NS = 20_000.0
"""Lighter kernels hold the interpreter's lock most of their time: two streams of them do not overlap."""


class ComputeStream(NamedTuple):
    """A compute stream of a device: where nodes run one after the other."""

    device: str | None
    stream: int


def assign_streams(
    graph: Graph, counts: Mapping[str, int], handovers: Mapping[str, float], costs: Mapping[str, float] | None = None
) -> dict[Node, int]:
    """The compute stream of each node.

    Args:
        graph: structured, with the full name of a device in the ``device`` of every node, bodies included.
        counts: the number of compute streams of each device; one, where a device is not named.
        handovers: the time from one stream of a device to another in ns; see `Device.handover_ns`.
        costs: measured time of one firing in ns, by the node's name; other nodes are estimated.

    Returns:
        Streams from 1 up; nodes that are not in it have stream 0, parameters and plain constants always.
    """
    devices = dict.fromkeys(node.device for node in graph.walk())
    if all(counts.get(device or "", 1) < 2 for device in devices):
        return {}
    streams = [ComputeStream(name, stream) for name in devices for stream in range(counts.get(name or "", 1))]
    stream_costs = _StreamCosts(streams, handovers, costs or {})
    choices = _StreamChoices(graph, streams, stream_costs)
    where, why = find_places(graph, choices, stream_costs)
    place_followers(graph, choices, where, why)
    for node in reversed(list(graph.walk())):
        if isinstance(node, WhileNode):
            _first_things_first(node, choices, stream_costs, where)
    working = (node for node in where if not has_no_stream(node))
    return {node: streams[where[node]].stream for node in working if streams[where[node]].stream}


def has_no_stream(node: Node) -> bool:
    """Return True if every stream can use the node's value without a handover."""
    return node.op in (FEED, PARAMETER) or is_everywhere(node)


class _StreamChoices(Choices):
    """The streams that every node may choose from, by their positions among all."""

    trials = 1_000  # less to gain than between devices

    def __init__(self, graph: Graph, streams: Sequence[ComputeStream], costs: _StreamCosts) -> None:
        self.names = [f"stream {stream} of {device}" for device, stream in streams]
        self.everywhere = tuple(range(len(streams)))
        self.limits = [None] * len(streams)
        self.of: dict[str | None, tuple[int, ...]] = {}
        for place, stream in enumerate(streams):
            self.of[stream.device] = (*self.of.get(stream.device, ()), place)
        self.leaders: dict[Node, Node] = {}
        by_hand: set[Node] = set()
        for level in levels(graph):
            self._join_light(level.nodes, costs)
            if has_primitives(level.nodes):
                by_hand.update(level.walk())
        self._allowed = {
            node: self.of[node.device][:1] if node in by_hand else self.of[node.device]
            for node in graph.walk()
            if not (has_no_stream(node) or node.subgraphs)
        }

    def _join_light(self, nodes: Iterable[Node], costs: _StreamCosts) -> None:
        """Finds the heavy node that each node of a graph or body goes with."""
        plain = [node for node in nodes if not (node.subgraphs or has_no_stream(node))]
        for node in plain:
            used = [self.leaders[each] for each in node.sources if each in self.leaders and each.device == node.device]
            if costs.ns(node):
                self.leaders[node] = node
            elif used:
                self.leaders[node] = used[-1]
        wanted: dict[Node, Node] = {}
        for node in reversed(plain):
            leader = self.leaders.get(node) or wanted.get(node)
            if leader is not None:
                self.leaders[node] = leader
                wanted.update((source, leader) for source in node.sources if source.device == node.device)

    def is_bound(self, node: Node) -> bool:
        """See `Choices.is_bound`."""
        return False

    def counters(self, loop: WhileNode, common: Sequence[int]) -> dict[Node, int]:
        """See `Choices.counters`."""
        return {node: self.of[node.device][0] for node in find_counters(loop)}

    def label(self, node: Node) -> Node | None:
        """See `Choices.label`."""
        return self.leaders.get(node)

    def asked_reason(self, node: Node) -> str | None:
        """See `Choices.asked_reason`."""
        return ""  # reasons for streams are not shown

    def held(self, nodes: object) -> float:
        """See `Choices.held`."""
        return 0.0


class _StreamCosts(NodeCosts):
    """The costs of nodes on each stream."""

    def __init__(
        self, streams: Sequence[ComputeStream], handovers: Mapping[str, float], measured: Mapping[str, float]
    ) -> None:
        self.streams = streams
        self.handovers = handovers
        self.measured = measured

    def ns(self, node: Node) -> float:
        """The time of one firing, on any stream."""
        if node.op.kernel is None or node.op in (CONSTANT, IDENTITY, NO_OP):
            return 0.0
        expected = self.measured.get(node.name)
        expected = assumed_ns(node) if expected is None else expected
        return expected if expected >= _LIGHT_NS else 0.0

    def times(self, node: Node) -> tuple[float, ...]:
        """See `NodeCosts.times`."""
        return (self.ns(node),) * len(self.streams)

    def hosts(self, *, is_root: bool) -> Hosts:
        """See `NodeCosts.hosts`: whatever the stream, the host has the same work."""
        return NO_HOSTS

    def launches(self, node: Node) -> tuple[float, ...]:
        """See `NodeCosts.launches`."""
        return (0.0,) * len(self.streams)

    def is_small(self, node: Node) -> bool:
        """See `NodeCosts.is_small`."""
        return not self.ns(node)

    def transfer(self, nbytes: float, source: int, target: int) -> float:
        """See `NodeCosts.transfer`: whatever its size, a value is handed over."""
        return 0.0 if source == target else self.handovers.get(self.streams[target].device or "", 0.0)


def _first_things_first(loop: WhileNode, choices: _StreamChoices, costs: _StreamCosts, where: dict[Node, int]) -> None:
    """Number the streams that a loop uses on each device in the order of their first nodes: the streams are
    interchangeable.
    """
    counters = set(find_counters(loop))
    inside = [node for body in loop.subgraphs for node in body.walk() if node in where and node not in counters]
    used = dict.fromkeys(where[node] for node in inside if costs.ns(node))
    for streams in choices.of.values():
        before = [place for place in used if place in streams]
        if len(before) > 1:
            renumbered = dict(zip([*before, *(place for place in streams if place not in used)], streams, strict=True))
            where.update((node, renumbered[where[node]]) for node in inside if where[node] in renumbered)
