"""Pass: reads the user's placement requests: devices, colocation, and which kinds of device have kernels.

Before a graph is optimised, nodes that have to be on one device become a *group* (union-find): a node and the one it is
placed with, and all nodes that touch one resource (a variable lives on one device). Control flow written by hand is a
group where `hand_written` finds no way to cut it. A loop written by hand is kept together as well, unless its nodes ask
for several devices. If devices have a memory of their own, all nodes that a variant (the state of a TensorArray) passes
through form a group as well. Its elements stay where they were written, and requests for another device are ignored.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence

from asyncflow.autodiff.stores.saved_values import SAVE
from asyncflow.autodiff.stores.store_gradients import NO_GRADIENT
from asyncflow.compiler.program.extract import EMIT, FETCH
from asyncflow.compiler.program.kernels.device_kernels import NO_KERNELS, Kernels
from asyncflow.compiler.program.loops.frames import has_primitives
from asyncflow.compiler.program.loops.hand_written import HandWritten
from asyncflow.devices.names import DeviceSpec
from asyncflow.devices.protocol import Device
from asyncflow.errors import PlacementError
from asyncflow.graph.frames import format_frame, output_frame
from asyncflow.graph.graph import Graph, Subgraph
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import runs_on_host
from asyncflow.graph.resource import resources_of
from asyncflow.graph.structured import StructuredNode, WhileNode, levels
from asyncflow.graph.values.dtypes import VARIANT


def needs_all_kernels(node: Node) -> bool:
    """Return True if a device with kernels on arrays alone has none for the node (`Capabilities.kernels`).

    It computes on the host: with strings, by the user's own function or coroutine, or outputs whose shapes depend on
    data.
    """
    return node.op not in (EMIT, FETCH) and not isinstance(node, StructuredNode) and runs_on_host(node)


def usable_devices(
    nodes: Iterable[Node], request: str | None, devices: Sequence[Device], kernels: Kernels = NO_KERNELS
) -> tuple[tuple[int, ...], bool]:
    """Return positions of the devices that all `nodes` may share, and True if `request` names these devices.

    False means that no device of the request has kernels for all the nodes: then devices that have them are returned.
    If none has, any will do: what a device has no kernel for, the host computes on its behalf, with a copy out and in.
    """
    asked = _matching(request, devices)
    needing = list(filter(needs_all_kernels, nodes))
    usable = tuple(
        index
        for index, device in enumerate(devices)
        if device.capabilities.kernels == "all" or all(kernels.find(node, device.kind) for node in needing)
    )
    if len(usable) in (0, len(devices)) or not needing:
        return asked, True
    # Prefer a device with its own kernels: for a card without them the host computes, with copies both ways.
    chosen = tuple(index for index in asked if index in usable)
    return (chosen, True) if chosen else (usable, False)


def resolve_requests(
    graph: Graph,
    source: Graph,
    devices: Sequence[Device],
    kernels: Kernels = NO_KERNELS,
    *,
    soft: bool = True,
    spread: bool = False,
) -> tuple[str, ...]:
    """Check the constraints, and give each node the constraints of its whole group.

    Afterwards `node.device` joins the requests of its group (``"sim:1"`` for ``"sim"`` and ``"sim:1"``), or is None.
    `node.colocated_with` is a label that the members of a group share, or None if there is no other member. Later
    passes may join and drop nodes, and nothing is lost.

    Args:
        graph: a private copy of the needed part of the user's graph, changed in place.
        source: the user's graph, in which nodes are looked up that are not needed and yet name a device.
        devices: the session's devices.
        kernels: of users, for kinds of device.
        soft: a request for a kind of device that has no kernel is let pass, and `place` finds another device.
        spread: cut loops written by hand although nothing asks for it.

    Returns:
        Notes for people: which control flow written by hand stays on one device, and why.

    Raises:
        PlacementError: no device of the session fits all requests of a group, or one of them names no device; or, not
            `soft`, no device that fits has the kernels.
    """
    nodes = list(graph.walk())
    if len(devices) == 1 and not any(node.device or node.colocated_with for node in nodes):
        return ()  # groups only matter if there is a choice
    groups = _Groups(graph, nodes, source, devices)
    if not spread:
        groups.gather_loops(devices)
    groups.resolve(devices, None if soft else kernels)
    return tuple(dict.fromkeys(groups.notes))


class _Groups:
    """Union-find over the names of nodes, and over hubs that stand for resources and hand-written graphs."""

    def __init__(self, graph: Graph, nodes: Sequence[Node], source: Graph, devices: Sequence[Device]) -> None:
        self.nodes = nodes
        self.present = {node.name for node in nodes}
        self.parent: dict[Hashable, Hashable] = {}
        self.links: dict[Hashable, list[tuple[Hashable, str]]] = {}
        """Links between joined nodes, with reasons; for messages."""
        self.askers: dict[str, Node] = {}
        self.pruned: dict[str, Node] = {}
        self.hubs: dict[Tensor, object] = {}
        """The stand-in for a variant, at each place that holds it."""
        self.notes: list[str] = []
        self.loops: list[list[Node]] = []
        """The nodes of each loop written by hand, with inner loops."""
        self.keepers: list[Node] = []
        """Nodes of gradients that ask for the device of the differentiated node: a preference."""
        # Kernels cannot follow a reference into the memory of another card.
        self.follows_variants = any(device.capabilities.own_memory for device in devices)
        for node in nodes:
            self._add(node)
        for part in levels(graph):
            if has_primitives(part.nodes):
                self._add_hand_written(part)
        # A chain of colocations may lead through nodes that the run does not need: their requests count as well.
        waiting = deque(nodes)
        while waiting:
            target = waiting.popleft().colocated_with
            if target is not None and target not in self.present and target not in self.pruned:
                found = self.pruned[target] = source.node(target)
                self._add(found)
                waiting.append(found)

    def _add(self, node: Node) -> None:
        follows = self.follows_variants and any(tensor.dtype == VARIANT for tensor in node.inputs)
        if self.follows_variants:
            self._join_variants(node)
        prefers = self.follows_variants and node.op in (SAVE, NO_GRADIENT)
        if node.device is not None and prefers:
            self.keepers.append(node)
        elif node.device is not None and not follows:
            self.askers[node.name] = node
        if node.colocated_with is not None:
            target = node.colocated_with
            self._join(node.name, target, f"{node.name} is colocated with {target}, as written at {node.location}")
        for resource in resources_of(node):
            if not resource.waits:  # queues and the like are on the host, and nodes of any device may wait for them
                self._join(node.name, resource.effect_key, f"{node.name} uses {resource!r}, built at {node.location}")

    def _add_hand_written(self, part: Graph) -> None:
        found = HandWritten(part)
        if isinstance(part, Subgraph) and found.whole_because:
            self.notes.append(f"{part.label} stays on one device: {found.whole_because}")
            for node in part.walk():
                self._join(node.name, part, f"{node.name} is in a body whose {found.whole_because}")
            return
        for frame in found.frames.values():
            if frame.trouble is not None:
                self.notes.append(f"{format_frame(frame.path)} stays on one device: {frame.trouble}")
        for node, other, why in found.together():
            self._join(node.name, other.name, why)
        loops: dict[str, list[Node]] = {}
        for node, around in found.frame_of.items():
            path = around or output_frame(node, around)
            if path:
                inside = (inner for body in node.subgraphs for inner in body.walk())
                loops.setdefault(path[0], []).extend((node, *inside))
        self.loops.extend(loops.values())

    def gather_loops(self, devices: Sequence[Device]) -> None:
        """Keep each loop written by hand together if a single device fits the requests of all its nodes."""
        for members in self.loops:
            roots = {self._root(node.name) for node in members}
            asking = (_parse(node) for name, node in self.askers.items() if self._root(name) in roots)
            specs = set(asking)
            if any(all(spec.matches(device.name) for spec in specs) for device in devices):
                for node in members:
                    self._join(node.name, members[0].name, f"{node.name} is in one loop with {members[0].name}")

    def _join_variants(self, node: Node) -> None:
        """Join the makers of a variant with its users, through branches and loops."""
        if isinstance(node, StructuredNode):
            for one, other in _same_values(node):
                if one.dtype == VARIANT:
                    why = f"the variant {one.node.name} passes through {node.name}, built at {node.location}"
                    self._join(self._hub(one), self._hub(other), why)
            return
        for tensor in (*node.inputs, *node.outputs):
            if tensor.dtype == VARIANT:
                why = f"{node.name} and the variant {tensor.node.name} share memory, built at {node.location}"
                self._join(node.name, self._hub(tensor), why)

    def _hub(self, variant: Tensor) -> Hashable:
        return self.hubs.setdefault(variant, object())

    def _join(self, name: Hashable, other: Hashable, why: str) -> None:
        if name == other:
            return
        self.links.setdefault(name, []).append((other, why))
        self.links.setdefault(other, []).append((name, why))
        self.parent[self._root(name)] = self._root(other)

    def _root(self, key: Hashable) -> Hashable:
        parent = self.parent
        root = parent.setdefault(key, key)
        while parent[root] != root:
            root = parent[root]
        while parent[key] != root:  # path compression, as variables of long programs make chains
            parent[key], key = root, parent[key]
        return root

    def resolve(self, devices: Sequence[Device], required: Kernels | None) -> None:
        """Give nodes the constraints of their groups; there are to be kernels, unless `required` is None."""
        askers: dict[Hashable, list[Node]] = {}
        members: dict[Hashable, list[Node]] = {}
        for name, node in self.askers.items():
            askers.setdefault(self._root(name) if name in self.parent else name, []).append(node)
        for node in self.nodes:
            members.setdefault(self._root(node.name) if node.name in self.parent else node.name, []).append(node)
        merged = {group: self._merged(asking, devices) for group, asking in askers.items()}
        for node in self.keepers:
            # Keep a value where it is made, and gradients of a store with its first part, unless the user asks
            # otherwise. Else all would be on one card, and cross to it in every iteration.
            assert node.device is not None
            if _matching(node.device, devices):
                merged.setdefault(self._root(node.name), node.device)
        for group, listed in members.items():
            request = merged.get(group)
            if required is not None and request is not None:
                _require_kernels(listed, request, devices, required)
            asking = [node for node in askers.get(group, ()) if node.name in self.present]
            label = (asking or listed)[0].name if len(listed) > 1 else None
            for node in listed:
                node.device, node.colocated_with = request, label

    def _merged(self, asking: Sequence[Node], devices: Sequence[Device]) -> str:
        """The one request that the requests of a group amount to."""
        specs: dict[DeviceSpec, Node] = {}
        for node in asking:
            spec = _parse(node)
            if not _matching(str(spec), devices):
                others = f"{devices[0].name!r}{', ...' if len(devices) > 1 else ''}"
                raise PlacementError(
                    f"no device fits {node.device!r}: this session has {_names(devices)}; ask for one of these, or add "
                    f"it to the session's: Session(devices=[{others}, {node.device!r}])"
                    f"\n  asked for by {_described(node)}"
                )
            specs.setdefault(spec, node)
        if not any(all(spec.matches(device.name) for spec in specs) for device in devices):
            raise self._conflict(list(specs.values()), devices)
        # One device fits all requests, so they name one kind; a request with a number is the most specific.
        return str(max(specs, key=lambda spec: spec.index is not None))

    def _conflict(self, asking: Sequence[Node], devices: Sequence[Device]) -> PlacementError:
        listed = "\n".join(f"  {node.device!r} asked for by {_described(node)}" for node in asking)
        fitting = {node: set(_matching(node.device, devices)) for node in asking}
        # A request names a kind or one device: if every two fit together, all do. So a conflicting pair exists.
        first, second = next((a, b) for a in asking for b in asking if not fitting[a] & fitting[b])
        reasons = "\n".join(f"  {why}" for why in self._path(first.name, second.name))
        return PlacementError(
            f"nodes that have to be on one device ask for different ones; this session has {_names(devices)}"
            f"\n{listed}\nthey have to be together because\n{reasons}"
            f"\nask for one device for all of them, or take away what joins them"
        )

    def _path(self, start: str, end: str) -> list[str]:
        """Explain why two nodes are in one group: the links on a shortest path between them."""
        came_from: dict[Hashable, tuple[Hashable, str]] = {}
        waiting: deque[Hashable] = deque([start])
        while end not in came_from:
            here = waiting.popleft()
            for there, why in self.links[here]:
                if there != start and there not in came_from:
                    came_from[there] = here, why
                    waiting.append(there)
        reasons: list[str] = []
        step: Hashable = end
        while step != start:
            step, why = came_from[step]
            reasons.append(why)
        return list(dict.fromkeys(reversed(reasons)))


def _same_values(node: StructuredNode) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of tensors, outside and inside a branch or loop, that stand for one value or one variable."""
    for body in node.subgraphs:
        yield from zip(body.inputs, node.entering, strict=True)
    if isinstance(node, WhileNode):
        yield from node.carried
        yield from zip(node.outputs, node.body.inputs, strict=False)
    else:
        for body in node.subgraphs:
            yield from zip(body.results, node.outputs, strict=True)


def _require_kernels(nodes: Sequence[Node], request: str, devices: Sequence[Device], kernels: Kernels) -> None:
    if usable_devices(nodes, request, devices, kernels)[1]:
        return
    node = next(filter(needs_all_kernels, nodes))
    raise PlacementError(
        f"{node.name} ({node.op.name}) is asked to be on {request!r}, and no kernel of it runs there; take the request "
        f"away, or allow another device with Session(soft_placement=True)\n  built at {node.location}"
    )


def _parse(node: Node) -> DeviceSpec:
    assert node.device is not None
    try:
        return DeviceSpec.parse(node.device)
    except PlacementError as error:
        raise PlacementError(f"{error}\n  asked for by {_described(node)}") from None


def _matching(request: str | None, devices: Sequence[Device]) -> tuple[int, ...]:
    if request is None:
        return tuple(range(len(devices)))
    spec = DeviceSpec.parse(request)
    return tuple(index for index, device in enumerate(devices) if spec.matches(device.name))


def _described(node: Node) -> str:
    return f"{node.name} ({node.op.name}), built at {node.location}"


def _names(devices: Sequence[Device]) -> str:
    return ", ".join(device.name for device in devices)
