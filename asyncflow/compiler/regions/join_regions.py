"""Joining of a card's regions whose calls cost the host more than waiting for one another costs.

`make_regions` keeps nodes apart that wait for different values, or whose values other nodes await at different times.
On a card this gains the time of kernels that run meanwhile. It costs a call of a region each, in host time, which takes
as long as many a kernel. So two regions of one lane become one where

- neither waits for a value that it would not need anyway, unless the other is the only user of its values;
- no third node runs between them;
- they do not wait for different large values of other devices, which would all have to be present at once;
- the remaining delay is worth a call: kernels that no longer run while the region waits for its inputs, and kernels
  that run before others get the region's results.

In a loop, a delay comes back in each iteration only if it is on a cycle of the loop: if the delayed values are needed,
by way of others, for values that the region awaits in a later iteration. Else it is the time that a pipeline takes to
fill.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from graphlib import TopologicalSorter
from math import inf
from typing import NamedTuple

from asyncflow.compiler.placement.assign_streams import ComputeStream, has_no_stream
from asyncflow.compiler.placement.node_costs import ASSUMED_ITERATIONS, SMALL_NBYTES, NodeCosts, tensor_nbytes
from asyncflow.compiler.program.extract import FETCH
from asyncflow.compiler.program.kernels.transfers import is_made_ahead
from asyncflow.devices.protocol import Device
from asyncflow.graph.graph import Graph
from asyncflow.graph.ir import Node, Tensor

_MOST_IN_LANE = 48
"""All pairs of a lane are looked at, again and again; where it has more regions, they stay as they are."""

_MOST_UNITS = 8192
"""Maximum number of units; the sets of units before and behind each take up to 16 MiB."""


@dataclass(frozen=True, slots=True)
class RegionCosts:
    """The costs of regions of cards.

    Attributes:
        call_ns: the host's time for calling one, by the names of the devices.
        kernel_ns: the time of a node's kernels.
    """

    call_ns: Mapping[str, float]
    kernel_ns: Callable[[Node], float]


def region_costs(devices: Sequence[Device]) -> RegionCosts:
    """Return the costs of regions on `devices`, as far as known beforehand; branches and loops count as infinite."""
    costs = NodeCosts(devices, {})
    launching = [device.asynchronous for device in devices if device.capabilities.runs_regions]
    calls = {device.name: device.host_times.region_ns for device in launching if device is not None}

    def kernel_ns(node: Node) -> float:
        by_device = zip(devices, costs.times(node), strict=True)
        return inf if node.subgraphs else next((ns for device, ns in by_device if device.name == node.device), 0.0)

    return RegionCosts(calls, kernel_ns)


class Body(NamedTuple):
    """A graph or body whose nodes are clustered, with the ways its nodes wait for each other.

    Attributes:
        graph: all nodes.
        carried: for a loop's body, each variable where it stands, and the result that is its next value.
        wanted: results that are wanted as soon as they exist: by the decision on the next iteration, or by users of a
            branch.
        is_loop: whether it is a loop's body.
    """

    graph: Graph
    carried: Sequence[tuple[Tensor, Tensor]] = ()
    wanted: Sequence[Tensor] = ()
    is_loop: bool = False


def join_regions(
    body: Body,
    clusters: Sequence[Sequence[Node]],
    lane_of: Callable[[Sequence[Node]], ComputeStream | None],
    costs: RegionCosts,
    on_host: AbstractSet[Tensor],
    largest: int,
) -> list[list[Node]]:
    """Return `clusters`, some of them joined.

    Args:
        body: the graph or body of the clusters.
        clusters: nodes that may be in a region, single ones too; they do not wait for each other in a circle.
        lane_of: where a cluster runs; None if it has to stay as it is.
        costs: the devices' costs.
        on_host: tensors whose values the host computes; these delay nothing, and neither do nodes of the host that
            need no others.
        largest: nodes in a region.
    """
    numbers: dict[ComputeStream, list[int]] = {}
    for number, cluster in enumerate(clusters):
        if (lane := lane_of(cluster)) is not None:
            numbers.setdefault(lane, []).append(number)
    lanes = {lane: found for lane, found in numbers.items() if 1 < len(found) <= _MOST_IN_LANE}
    inside = {node for cluster in clusters for node in cluster}
    alone = [[node] for node in body.graph.nodes if node not in inside and not has_no_stream(node)]
    if not lanes or len(clusters) + len(alone) > _MOST_UNITS:
        return [list(cluster) for cluster in clusters]
    units = _Units(body, [*clusters, *alone], costs.kernel_ns, on_host)
    for lane, found in lanes.items():
        units.join(found, costs.call_ns[lane.device or ""], largest)
    position = {node: index for index, node in enumerate(body.graph.nodes)}
    joined = [unit for unit in units.units[: len(clusters)] if unit.own]
    return [sorted(unit.nodes, key=position.__getitem__) for unit in joined]


@dataclass(slots=True)
class _JoinedUnit:
    """Nodes that run as one, and sets of units, as bits.

    Attributes:
        nodes: in no particular order.
        kernels_ns: the time of their kernels.
        own: the unit itself, with the units joined into it; 0 once it is part of another.
        before: units it needs, directly or not, in the same iteration.
        behind: units that need it.
        waits: units it needs directly, without numbers of the host.
        received: units on other devices that give it large values.
        carried: units whose values of the iteration before it needs directly.
        late: likewise directly, or by way of units before it.
        wanted: units that want its values, in this iteration or the next; the bit behind the last unit's is for others.
        returns: units that need it in this iteration or a later one, by any way.
    """

    nodes: list[Node]
    kernels_ns: float
    own: int
    before: int = 0
    behind: int = 0
    waits: int = 0
    received: int = 0
    carried: int = 0
    late: int = 0
    wanted: int = 0
    returns: int = 0


class _Units:
    def __init__(
        self,
        body: Body,
        clusters: Sequence[Sequence[Node]],
        kernel_ns: Callable[[Node], float],
        on_host: AbstractSet[Tensor],
    ) -> None:
        self.is_loop = body.is_loop
        self.units = [
            _JoinedUnit(list(nodes), sum(map(kernel_ns, nodes)), 1 << index) for index, nodes in enumerate(clusters)
        ]
        self.owner = {node: index for index, nodes in enumerate(clusters) for node in nodes}
        self.find_edges(body, on_host)
        self.close()

    def find_edges(self, body: Body, on_host: AbstractSet[Tensor]) -> None:
        outside = 1 << len(self.units)
        given_by = dict(body.carried)
        for node, index in self.owner.items():
            for control in node.control_inputs:
                self.add_edge(control, index)
            for tensor in node.inputs:
                # A result of the run gains nothing by being early, as the run ends when all work is launched.
                if node.op is FETCH and tensor in on_host:
                    continue
                is_awaited = not (tensor in on_host or is_made_ahead(tensor.node, on_host))
                if tensor in given_by:
                    self.add_carried(given_by[tensor], index, is_awaited)
                else:
                    self.add_edge(tensor.node, index, is_awaited)
                    self.add_received(tensor, node)
        for tensor in body.wanted:
            if tensor.node in self.owner:
                self.units[self.owner[tensor.node]].wanted |= outside

    def add_edge(self, source: Node, index: int, is_awaited: bool = True) -> None:
        giver = self.owner.get(source, index)
        if giver != index:
            self.units[index].before |= 1 << giver
            self.units[index].waits |= is_awaited << giver
            self.units[giver].wanted |= 1 << index

    def add_received(self, tensor: Tensor, node: Node) -> None:
        giver = self.owner.get(tensor.node)
        if giver is not None and tensor.node.device != node.device and tensor_nbytes(tensor) >= SMALL_NBYTES:
            self.units[self.owner[node]].received |= 1 << giver

    def add_carried(self, result: Tensor, index: int, is_awaited: bool) -> None:
        giver = self.owner.get(result.node)
        if giver is not None:
            self.units[index].carried |= is_awaited << giver
            self.units[giver].wanted |= 1 << index

    def close(self) -> None:
        """Close the relation: add to each unit's direct needs the needs of those units."""
        units = self.units
        order = list(TopologicalSorter({i: list(_bits(unit.before)) for i, unit in enumerate(units)}).static_order())
        for index in order:
            unit = units[index]
            unit.late = unit.carried
            for source in _bits(unit.before):
                unit.before |= units[source].before
                unit.late |= units[source].late
        for index in order:
            for source in _bits(units[index].before):
                units[source].behind |= units[index].own
        changes = True
        while changes:
            changes = False
            for index in reversed(order):
                unit = units[index]
                found = unit.wanted
                for user in _bits(unit.wanted & ~(1 << len(units))):
                    found |= units[user].returns
                changes |= found != unit.returns
                unit.returns = found

    def join(self, lane: Sequence[int], call_ns: float, largest: int) -> None:
        """Joins units of one lane, as long as there are two that are better joined."""
        changes = True
        while changes:
            changes = False
            for place, first in enumerate(lane):
                for second in lane[place + 1 :]:
                    one, other = self.units[first], self.units[second]
                    if not (one.own and other.own) or len(one.nodes) + len(other.nodes) > largest:
                        continue
                    if self.may_join(one, other) and self.delay_ns(one, other) + self.delay_ns(other, one) <= call_ns:
                        self.merge(one, other)
                        changes = True

    def may_join(self, one: _JoinedUnit, other: _JoinedUnit) -> bool:
        """Return True if no other unit has to run between them, and only time of kernels is lost."""
        is_between = one.behind & other.before or other.behind & one.before
        receives_more = one.received & ~other.received and other.received & ~one.received
        return not (is_between or receives_more) and _may_wait(one, other) and _may_wait(other, one)

    def delay_ns(self, unit: _JoinedUnit, other: _JoinedUnit) -> float:
        """The time lost where `unit` runs as one with `other`."""
        if unit.before & other.own:
            return 0.0  # `unit` runs after `other` anyway
        both = unit.own | other.own
        awaited = (other.waits & ~(both | unit.before)) | (other.carried & ~(both | unit.late))
        users = unit.wanted & ~both
        lost = 0.0
        if awaited:
            lost += unit.kernels_ns / self.share(bool((unit.returns | other.returns) & awaited))
        if users:
            outside = 1 << len(self.units)
            comes_back = any(self.units[user].returns & both for user in _bits(users & ~outside))
            lost += other.kernels_ns / self.share(comes_back or bool(users & outside))
        return lost

    def share(self, comes_back: bool) -> float:
        """Return the number of iterations that share a delay."""
        return 1 if comes_back or not self.is_loop else ASSUMED_ITERATIONS

    def merge(self, one: _JoinedUnit, other: _JoinedUnit) -> None:
        """Makes `other` part of `one`."""
        one.nodes += other.nodes
        one.kernels_ns += other.kernels_ns
        for name in ("own", "before", "behind", "waits", "received", "carried", "late", "wanted", "returns"):
            setattr(one, name, getattr(one, name) | getattr(other, name))
        other.own = 0
        for name in ("before", "behind", "waits"):
            setattr(one, name, getattr(one, name) & ~one.own)
        for unit in self.units:
            if unit.before & one.own:
                unit.before |= one.before | one.own
                unit.late |= one.late
            if unit.behind & one.own:
                unit.behind |= one.behind | one.own


def _may_wait(unit: _JoinedUnit, other: _JoinedUnit) -> bool:
    """Return True if only time of kernels is lost when `unit` waits for everything that `other` waits for."""
    both = unit.own | other.own
    if not unit.wanted & ~both:
        return True
    return not (other.waits & ~(both | unit.before) or other.carried & ~(both | unit.late))


def _bits(numbers: int) -> Iterator[int]:
    while numbers:
        lowest = numbers & -numbers
        yield lowest.bit_length() - 1
        numbers ^= lowest
