"""Pass: lets a transfer begin only when its value will soon be needed (white paper 2015 §5.2).

A Recv waits only for its gate. So a value takes memory of its target device from the moment it exists, even if its
users run much later. All users of a Recv may come after some node *p* of the same device anyway. If they come late
enough after it for the transfer, the Recv gets a control edge from *p*. The best *p* is the node that ends last in the
schedule in which every node runs as soon as it can.

What that gains is memory of the device that receives: the value stays where it was made until the copy is due. On an
asynchronous device *p* counts as done once it is launched, and the host launches far ahead. But memory is used again in
the order of launches. So it matters only that the Recv comes after *p*, and that the copy's target is free again once
its users are launched (`asyncflow.devices.cuda.values.Landing`). Measured on two simulated v100, one straight line of
12 steps of two products each, to which the other card gives 12 values of 5 MiB: the peak was 75.0 MiB without and 25.0
with, in 6.77 ms both. On this runtime's own host it was 75.0 and 35.0, in 7.95 and 7.48 ms.

The edge can neither deadlock nor change which nodes are live. All users of the Recv already come after *p*, so nothing
but the Recv itself has to wait for more than before; in particular *p* does not wait for the Recv, whatever edges are
added to others. And *p* is in the same *place* (the same branch, the same part of the same loop), so it is live when
the Recv is.

Users come after *p* by its path, and not merely later in some schedule. That also keeps them on time if the estimates
of other nodes are wrong or the device is busy: the path itself takes longer than the transfer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from heapq import heappop, heappush

from asyncflow.compiler.placement.node_costs import SMALL_NBYTES, NodeCosts, spec_nbytes
from asyncflow.compiler.program.extract import FEED
from asyncflow.compiler.program.kernels.transfers import EXPAND, RECV, SEND
from asyncflow.compiler.regions.regions import REGION
from asyncflow.control.primitives.enter import ENTER
from asyncflow.control.primitives.loop_cond import LOOP_COND
from asyncflow.control.primitives.next_iteration import NEXT_ITERATION
from asyncflow.devices.protocol import Device
from asyncflow.graph.builtin import CONSTANT
from asyncflow.graph.graph import Graph
from asyncflow.graph.ir import Node

_MOST_VISITED = 256
"""Maximum number of nodes looked at before a user, so that large graphs compile in linear time.

The nearest come first, and nodes further away are early anyway."""

_UNFIT = frozenset({ENTER, NEXT_ITERATION, LOOP_COND, SEND, CONSTANT, FEED})
"""Ops without outgoing control edges: their outputs are in another frame, are only another name, are done late (a Send
may wait for an acknowledgement), or exist from the start."""


def delay_recvs(
    graph: Graph, places: Mapping[Node, object], devices: Sequence[Device], costs: Mapping[str, float] | None = None
) -> list[Node]:
    """Add control inputs to the Recvs of large values that would come much too early.

    Only where a value is copied: between CPU devices it goes by reference, and early or late makes no difference.

    Args:
        graph: flat, each node with its device, in an order in which the nodes can run; changed in place.
        places: where each node that is not in all of them is live; nodes of the same place are live together.
        devices: the session's devices.
        costs: mean ns of a firing by node name, from earlier runs; missing ones are estimated.

    Returns:
        The Recvs that are delayed.
    """
    by_name = {device.name: index for index, device in enumerate(devices)}
    large = [node for node in graph.nodes if node.op is RECV and _is_worth_it(node, devices, by_name)]
    if not large:
        return []
    schedule = _Schedule(graph, devices, by_name, costs or {})
    delayed = []
    for recv in large:
        after = _last_before(recv, schedule, places)
        if after is not None:
            recv.control_inputs = [*recv.control_inputs, after]
            delayed.append(recv)
    return delayed


def _is_worth_it(recv: Node, devices: Sequence[Device], by_name: Mapping[str, int]) -> bool:
    spec = recv.attrs["spec"]
    if spec.dtype.kind in "OT" or spec_nbytes(spec) < SMALL_NBYTES:
        return False
    ends = (recv.device, recv.attrs["source"])
    return any(devices[by_name[end]].asynchronous is not None for end in ends if end is not None)


def _last_before(recv: Node, schedule: _Schedule, places: Mapping[Node, object]) -> Node | None:
    """Return the node that ends last among those `recv` can wait for; None if the Recv should not be delayed."""
    users, needed = schedule.users_of_value(recv)
    if not users:
        return None
    sent = schedule.ends[schedule.sends[recv.attrs["transfer"]]]
    if min(schedule.starts[user] for user in users) - sent < 2 * needed:
        return None  # the delay would be shorter than the transfer

    def is_fit(node: Node) -> bool:
        return (
            node.device == recv.device
            and node.op not in _UNFIT
            and node not in recv.control_inputs
            and schedule.ends[node] > sent
            and places.get(node) is places[recv]
            and schedule.positions[node] < schedule.positions[recv]
        )

    first, *others = (dict.fromkeys(schedule.before(user, needed)) for user in users)
    shared = (node for node in first if is_fit(node) and all(node in other for other in others))
    return max(shared, key=schedule.ends.__getitem__, default=None)


class _Schedule:
    """Start and end of every node if it runs as soon as it can, in ns; of a loop, one iteration.

    Attributes:
        positions: of every node in the graph.
        sends: by number of the transfer.
        users: the nodes that wait for each.
        times: duration of each node.
    """

    def __init__(
        self, graph: Graph, devices: Sequence[Device], by_name: Mapping[str, int], measured: Mapping[str, float]
    ) -> None:
        self.nodes, self.by_name, self.measured = graph.nodes, by_name, measured
        self.positions = {node: position for position, node in enumerate(self.nodes)}
        self.sends = {node.attrs["transfer"]: node for node in self.nodes if node.op is SEND}
        self.users: dict[Node, list[Node]] = {node: [] for node in self.nodes}
        costs = NodeCosts(devices, measured)
        self.times = {node: self.time(node, costs) for node in self.nodes}
        self.starts: dict[Node, float] = {}
        self.ends: dict[Node, float] = {}
        for node in self.nodes:
            sources = self.sources(node)
            for source in sources:
                self.users[source].append(node)
            self.starts[node] = max((self.ends[source] for source in sources), default=0.0)
            self.ends[node] = self.starts[node] + self.times[node]

    def sources(self, node: Node) -> list[Node]:
        """The nodes that a node waits for in its own iteration; a Recv for its Send, too."""
        found = dict.fromkeys(node.sources)
        if node.op is RECV:
            found[self.sends[node.attrs["transfer"]]] = None
        return [source for source in found if source.op is not NEXT_ITERATION]

    def time(self, node: Node, costs: NodeCosts) -> float:
        if node.op is CONSTANT or node.device is None:
            return 0.0
        device = self.by_name[node.device]
        if node.op is RECV:
            return costs.transfer(spec_nbytes(node.attrs["spec"]), self.by_name[node.attrs["source"]], device)
        if node.op is REGION and node.name not in self.measured:
            return sum(costs.times(inner)[device] for inner in node.attrs["region"].walk())
        return costs.times(node)[device]

    def users_of_value(self, recv: Node) -> tuple[list[Node], float]:
        """Return the users of the value that `recv` brings, and the time it must begin before them."""
        users, needed = self.users[recv], self.times[recv]
        expand = next((user for user in users if user.op is EXPAND), None)
        if expand is None:
            return users, needed
        later = [user for user in users if user is not expand]
        return [*later, *self.users[expand]], needed + self.times[expand]

    def before(self, user: Node, needed: float) -> Iterator[Node]:
        """Nodes that `user` comes after, at least so much later.

        What runs next on the way to `user` does not count: it is ready as soon as the node is done, as a Recv that
        waits for that node would be, and is launched first; a copy into the same device's memory then waits for it.
        """
        latest = {user: 0.0}  # time before the start of `user` at which a node must have ended
        margins = {user: 0.0}  # the same for what runs next after the node
        queue = [-self.positions[user]]
        for _ in range(_MOST_VISITED):
            if not queue:
                return
            node = self.nodes[-heappop(queue)]  # all later nodes before `user` have been visited
            if node is not user and margins[node] >= needed:
                yield node
            ahead = 0.0 if node is user else latest[node] + self.times[node]
            for source in self.sources(node):
                if source not in latest:
                    heappush(queue, -self.positions[source])
                latest[source] = max(latest.get(source, 0.0), ahead)
                margins[source] = max(margins.get(source, 0.0), latest[node])
