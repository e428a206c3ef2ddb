"""Devices allowed for each node, given the requests that `resolve_requests` left on a graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from asyncflow.compiler.placement.constraints import usable_devices
from asyncflow.compiler.placement.node_costs import spec_nbytes
from asyncflow.compiler.program.kernels.device_kernels import NO_KERNELS, Kernels
from asyncflow.devices.protocol import Device
from asyncflow.graph.builtin import CONSTANT
from asyncflow.graph.facts import MOVE
from asyncflow.graph.graph import Graph
from asyncflow.graph.ir import Node
from asyncflow.graph.resource import resources_of
from asyncflow.graph.structured import WhileNode
from asyncflow.graph.values.spec import Spec


class Choices:
    """The devices that every node of a graph may choose from.

    A group with members in different branches or loops, such as a variable's, is settled at once, on the first allowed
    device that has room. So the parts of the graph can be placed one by one.

    Attributes:
        names: of the devices.
        everywhere: the positions of all of them.
        limits: bytes each device may hold beside the groups that are settled; None is no limit.
        trials: see `Problem`.
        refused: nodes that are not where they asked to be, as no kernel runs there.
    """

    trials = 60_000

    def __init__(self, graph: Graph, devices: Sequence[Device], kernels: Kernels = NO_KERNELS) -> None:
        self.devices = devices
        self._kernels = kernels
        self.names = [device.name for device in devices]
        self.everywhere = tuple(range(len(devices)))
        self.limits: list[float | None] = [device.memory.limit for device in devices]
        self.refused: set[Node] = set()
        self._allowed: dict[Node, tuple[int, ...]] = {}
        self._is_free = all(device.capabilities.kernels == "all" for device in devices)
        self._settled: set[str] = set()
        groups: dict[str, list[Node]] = {}
        levels: dict[str, set[object]] = {}
        for node, level in _nodes_and_levels(graph):
            if node.colocated_with is not None:
                groups.setdefault(node.colocated_with, []).append(node)
                levels.setdefault(node.colocated_with, set()).add(level)
            elif node.device is not None or not self._is_free:
                self._allow([node])
        for label, members in groups.items():
            self._allow(members)
            if len(levels[label]) > 1:
                self._settle(label, members)

    def allowed(self, node: Node) -> tuple[int, ...]:
        """Positions of the devices the node may be on."""
        return self._allowed.get(node, self.everywhere)

    def is_bound(self, node: Node) -> bool:
        """Return True if the node has any request."""
        return node.device is not None or node.colocated_with is not None

    def label(self, node: Node) -> str | Node | None:
        """Return a label that is equal for nodes that must be together; None for a node by itself."""
        return node.colocated_with

    def asked_reason(self, node: Node) -> str | None:
        """The request for a node, for people; None if nothing was."""
        label = node.colocated_with
        if node in self.refused:
            return f"asked for {node.device!r} at {node.location}, where no kernel of it runs"
        if label is not None and label != node.name:
            return f"colocated with {label}"
        if node.device is not None:
            return f"asked for {node.device!r} at {node.location}"
        return None

    def held(self, nodes: Iterable[Node]) -> float:
        """Return the bytes of the variables that nodes use, without the variables of settled groups."""
        return _held_nbytes(node for node in nodes if node.colocated_with not in self._settled)

    def common(self, nodes: Iterable[Node]) -> tuple[int, ...]:
        """Positions of the devices that all of the nodes may be on."""
        common = self.everywhere
        for node in nodes:
            allowed = self._allowed.get(node)
            if allowed is not None:
                common = tuple(device for device in common if device in allowed)
        return common

    def counters(self, loop: WhileNode, common: Sequence[int]) -> dict[Node, int]:
        """Return counters and predicates of a loop without requests, and the device where they are kept together.

        Args:
            loop: a `while` that is cut.
            common: see `common`; of all in the loop.
        """
        preferred = self.allowed(loop) if self.is_bound(loop) else common
        place = preferred[0] if preferred else 0
        return {node: place for node in find_counters(loop) if not self.is_bound(node)}

    def _allow(self, members: Sequence[Node]) -> None:
        allowed, as_asked = usable_devices(members, members[0].device, self.devices, self._kernels)
        self._allowed.update(dict.fromkeys(members, allowed))
        if not as_asked:
            self.refused.update(members)

    def _settle(self, label: str, members: Sequence[Node]) -> None:
        nbytes = _held_nbytes(members)
        allowed = self._allowed[members[0]]
        device = next((d for d in allowed if self._room(d) >= nbytes), max(allowed, key=self._room))
        limit = self.limits[device]
        if limit is not None:
            self.limits[device] = limit - nbytes
        self._allowed.update(dict.fromkeys(members, (device,)))
        self._settled.add(label)

    def _room(self, device: int) -> float:
        limit = self.limits[device]
        return float("inf") if limit is None else limit


def _held_nbytes(nodes: Iterable[Node]) -> float:
    held: dict[object, float] = {}
    for node in nodes:
        for resource in resources_of(node):
            spec = getattr(resource, "spec", None)
            if isinstance(spec, Spec):  # an input's spec may be a nest
                held[resource.effect_key] = spec_nbytes(spec)
    return sum(held.values())


def _nodes_and_levels(graph: Graph) -> Iterator[tuple[Node, object]]:
    """Yield every node, with a key that is equal for nodes placed together: the two bodies of a loop are one level."""
    stack: list[tuple[Graph, object]] = [(graph, graph)]
    while stack:
        here, level = stack.pop()
        for node in here.nodes:
            yield node, level
            stack.extend((body, node if isinstance(node, WhileNode) else body) for body in node.subgraphs)


def find_counters(loop: WhileNode) -> Iterator[Node]:
    """Nodes of a loop that make integer or boolean scalars of such."""
    return (node for part in loop.subgraphs for node in part.nodes if _is_counter(node))


def _is_counter(node: Node) -> bool:
    if node.op is CONSTANT or not MOVE.allows(node.op):
        return False
    return bool(node.outputs) and all(
        tensor.shape == () and tensor.spec.dtype.kind in "biu" for tensor in (*node.inputs, *node.outputs)
    )
