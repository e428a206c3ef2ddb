"""Pass: joins elementwise nodes that feed one another into one node, which on a card is one kernel launch.

A straight line of nodes, all on one device and none of which waits, is covered with *units*: at first one per node.
Units are joined if they share an edge, or else an input of their shape. All their values must have one shape as far as
known, and no other node may have to run between them. Where an extent that is not known turns out to be 1, the `fused`
node runs its members one by one.

Left alone are integers and booleans of rank 0, which are kept on the host, and dtypes without C++ type.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from asyncflow.compiler.program.detached import detached_node
from asyncflow.compiler.program.kernels.chains import Chain, Member
from asyncflow.compiler.program.kernels.fused import FUSED
from asyncflow.compiler.program.kernels.kernels import is_host_spec
from asyncflow.compiler.program.ordered import ordered
from asyncflow.compiler.program.replacements import Replacements
from asyncflow.compiler.regions.regions import REGION, Region
from asyncflow.graph.graph import Graph
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.values.shapes import Shape
from asyncflow.ops.cuda.source import expression

_MOST_PARAMETERS = 20
"""Inputs and outputs of a kernel."""

_MOST_PARAMETER_BYTES = 3500
"""CUDA takes 4096 bytes; an array is passed as its address, its size, and an extent and a stride per axis."""

_MOST_MEMBERS = 64

_LONGEST = 1000
"""A line of more nodes is fused piece by piece: the sets of nodes before and behind each node grow with its length."""


def fuse_regions(graph: Graph, devices: Collection[str]) -> None:
    """Fuses in all regions on `devices`, in place; `graph` has the device of every node in ``node.device``."""
    for node in graph.walk():
        if node.op is REGION and node.device in devices:
            node.attrs["region"] = fuse_region(node.attrs["region"])


def fuse_region(region: Region) -> Region:
    """Return `region` with fused nodes; its branches and loops are fused in place."""
    for node in region.nodes:
        fuse_bodies(node)
    nodes, outputs = fuse_line(region.nodes, region.outputs)
    return replace(region, nodes=tuple(nodes), outputs=tuple(outputs))


def fuse_bodies(node: Node) -> None:
    """Fuse the bodies of a branch or loop in place, and all inner bodies."""
    for body in node.subgraphs:
        for inner in body.nodes:
            fuse_bodies(inner)
        body.nodes[:], body.results = fuse_line(body.nodes, body.results)


def fuse_line(nodes: Sequence[Node], results: Sequence[Tensor]) -> tuple[list[Node], list[Tensor]]:
    """Fuses a straight line.

    Args:
        nodes: of one graph or body and one device, in an order in which they can run. Users of a fused node are changed
            in place.
        results: tensors that are used outside; they may be of other nodes.

    Returns:
        Returns the nodes, in an order in which they can run, and the replacements of `results`.
    """
    made: list[Node] = []
    replacements = Replacements()
    for start in range(0, len(nodes), _LONGEST):
        piece = nodes[start : start + _LONGEST]
        later = (tensor for node in nodes[start + _LONGEST :] for tensor in node.inputs)
        made += _Line(piece, {*results, *later}, replacements).fuse()
    for node in made:
        replacements.apply(node)
    return made, [replacements.tensor(tensor) for tensor in results]


def _may_fuse(node: Node) -> bool:
    specs = [tensor.spec for tensor in (*node.inputs, *node.outputs)]
    if not node.single or not node.inputs or any(spec.shape is None for spec in specs) or is_host_spec(specs[-1]):
        return False
    *inputs, output = (spec.dtype for spec in specs)
    names = [f"v{index}" for index in range(len(inputs))]
    return expression(node.op, node.attrs, inputs, output, names) is not None


def _common_shape(first: Shape, second: Shape) -> Shape:
    """Facts about one shape from both; None if they may differ. An unknown extent is not taken for a 1."""
    if first is None or second is None or len(first) != len(second):
        return None
    pairs = list(zip(first, second, strict=True))
    if any(a != b and not (None in (a, b) and 1 not in (a, b)) for a, b in pairs):
        return None
    return tuple(b if a is None else a for a, b in pairs)


@dataclass(slots=True, eq=False)
class _FusedUnit:
    """A unit: nodes that run as one.

    Attributes:
        members: numbers of the nodes, ascending.
        shape: of their results; None for a node that cannot be fused.
        own: the set of its members, as bits.
        before: the set of nodes that have to run before it, with whole units.
        behind: likewise the nodes that have to run after it.
    """

    members: list[int]
    shape: Shape
    own: int
    before: int = 0
    behind: int = 0


@dataclass(slots=True)
class _Line:
    nodes: Sequence[Node]
    results: set[Tensor]
    replacements: Replacements
    units: list[_FusedUnit] = field(default_factory=list)
    users: dict[Tensor, list[int]] = field(default_factory=dict)

    def fuse(self) -> list[Node]:
        numbers = {node: number for number, node in enumerate(self.nodes)}
        fusable = [_may_fuse(node) for node in self.nodes]
        if not any(fusable):
            return list(self.nodes)
        for number, node in enumerate(self.nodes):
            self.units.append(_FusedUnit([number], node.outputs[0].shape if fusable[number] else None, 1 << number))
            for tensor in dict.fromkeys(node.inputs):
                self.users.setdefault(tensor, []).append(number)
        self._find_order(numbers)
        for number, node in enumerate(self.nodes):
            if fusable[number]:
                for tensor in node.inputs:
                    if tensor.node in numbers:
                        self._try_to_join(numbers[tensor.node], number)
        for tensor, users in self.users.items():
            for first, second in pairwise(users):
                # Only what has the shared input's shape is likely to have one shape.
                if _common_shape(tensor.shape, self.units[first].shape) is not None:
                    self._try_to_join(first, second)
        return self._replaced(numbers)

    def _find_order(self, numbers: dict[Node, int]) -> None:
        """Set the nodes before and behind each node."""
        for number, node in enumerate(self.nodes):
            for source in node.sources:
                if source in numbers:
                    other = self.units[numbers[source]]
                    self.units[number].before |= other.before | other.own
        for number in reversed(range(len(self.nodes))):
            unit = self.units[number]
            for source in self.nodes[number].sources:
                if source in numbers:
                    self.units[numbers[source]].behind |= unit.behind | unit.own

    # -- joining -------------------------------------------------------------------------------------------------

    def _try_to_join(self, first: int, second: int) -> None:
        a, b = self.units[first], self.units[second]
        shape = _common_shape(a.shape, b.shape)
        if a is b or shape is None or (a.before & b.behind) | (a.behind & b.before):
            return  # the last: something stands between them
        members = sorted((*a.members, *b.members))
        if not self._fits(members, shape):
            return
        joined = _FusedUnit(members, shape, a.own | b.own)
        joined.before = (a.before | b.before) & ~joined.own
        joined.behind = (a.behind | b.behind) & ~joined.own
        for member in members:
            self.units[member] = joined
        for unit in self.units:
            if unit is not joined and unit.own & joined.before:
                unit.behind |= joined.own | joined.behind
            elif unit is not joined and unit.own & joined.behind:
                unit.before |= joined.own | joined.before

    def _fits(self, members: Sequence[int], shape: Shape) -> bool:
        inputs, outputs = self._interface(members)
        count = len(inputs) + len(outputs)
        nbytes = count * (16 + 16 * len(shape or ()))
        return len(members) <= _MOST_MEMBERS and count <= _MOST_PARAMETERS and nbytes <= _MOST_PARAMETER_BYTES

    def _interface(self, members: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the outside values that members use, and the members' values used outside."""
        inside = set(members)
        made = [self.nodes[member].outputs[0] for member in members]
        used = dict.fromkeys(tensor for member in members for tensor in self.nodes[member].inputs)
        inputs = [tensor for tensor in used if tensor not in set(made)]
        outputs = [t for t in made if t in self.results or not inside.issuperset(self.users.get(t, ()))]
        return inputs, outputs

    # -- replacing -----------------------------------------------------------------------------------------------

    def _replaced(self, numbers: dict[Node, int]) -> list[Node]:
        """Return the line with the units' nodes in it, which still use their old inputs."""
        made: list[Node] = []
        # Each behind what it needs, and else where its last member stood.
        last = (unit for number, unit in enumerate(self.units) if unit.members[-1] == number)
        for unit in ordered(last, lambda unit: self._needed(unit, numbers)):
            if self._is_worthwhile(unit):
                made.append(self._fused_node(unit))
            else:
                made.extend(self.nodes[member] for member in unit.members)
        return made

    def _is_worthwhile(self, unit: _FusedUnit) -> bool:
        if unit.shape is None or not self._interface(unit.members)[1]:
            return False
        return len(unit.members) > 1 or self.nodes[unit.members[0]].op.is_composite

    def _fused_node(self, unit: _FusedUnit) -> Node:
        inputs, outputs = self._interface(unit.members)
        values = {tensor: number for number, tensor in enumerate(inputs)}
        members: list[Member] = []
        for number in unit.members:
            node = self.nodes[number]
            operands = tuple(values[tensor] for tensor in node.inputs)
            members.append(Member(node.op, node.attrs, operands, node.outputs[0].spec, node.name))
            values[node.outputs[0]] = len(values)
        chain = Chain(
            tuple(tensor.spec for tensor in inputs), tuple(members), tuple(values[tensor] for tensor in outputs)
        )
        specs = tuple(tensor.spec for tensor in outputs)
        last = self.nodes[unit.members[-1]]
        node = detached_node(
            last.graph,
            FUSED,
            inputs,
            {"chain": chain},
            last,
            specs if len(specs) > 1 else specs[0],
            name=f"{last.name.rpartition('/')[2]}/fused",
        )
        inside = {self.nodes[number] for number in unit.members}
        awaited = dict.fromkeys(control for number in unit.members for control in self.nodes[number].control_inputs)
        node.control_inputs = [control for control in awaited if control not in inside]
        self.replacements.tensors.update(zip(outputs, node.outputs, strict=True))
        self.replacements.nodes.update(dict.fromkeys(inside, node))
        return node

    def _needed(self, unit: _FusedUnit, numbers: dict[Node, int]) -> list[_FusedUnit]:
        sources = (numbers.get(source) for member in unit.members for source in self.nodes[member].sources)
        found = dict.fromkeys(self.units[number] for number in sources if number is not None)
        return [other for other in found if other is not unit]
