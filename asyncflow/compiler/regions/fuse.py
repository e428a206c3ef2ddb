"""Pass: joins elementwise nodes that feed one another, also through views, into one node: on a card, one kernel.

A straight line of nodes, all on one device and none of which waits, is covered with *units*: at first one per node.
Units are joined if they share an edge, or else an input of their shape. All their values must have one shape as far as
known, and no other node may have to run between them. Where an extent that is not known turns out to be 1, the `fused`
node runs its members one by one.

Units then take in views that only they use, and units of which they only use views: a chain may compute a matrix, cut
it into four parts and go on with these. No value may be computed for more elements than it has. At last units take in
joins of their results (`concat`), whose parts the kernel then writes, and reductions and softmaxes over last axes.

Left alone are integers and booleans of rank 0, which are kept on the host, and dtypes without C++ type.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from itertools import pairwise

from asyncflow.compiler.program.detached import detached_node
from asyncflow.compiler.program.kernels.chains import ENDS_OF_ROWS, SCALINGS, Chain, Member
from asyncflow.compiler.program.kernels.fused import FUSED
from asyncflow.compiler.program.kernels.kernel_text import in_use
from asyncflow.compiler.program.ordered import ordered
from asyncflow.compiler.program.replacements import Replacements
from asyncflow.compiler.regions.fusable import Looks, is_elementwise, is_join, is_reduction, looks_of
from asyncflow.compiler.regions.regions import REGION, Region
from asyncflow.graph.graph import Graph
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.values.shapes import Shape
from asyncflow.ops.arrays.manipulation import CONCAT
from asyncflow.ops.axes import normalize_axes

_MOST_PARAMETERS = 20
"""Inputs and outputs of a kernel."""

_MOST_PARAMETER_BYTES = 3500
"""CUDA takes 4096 bytes; an array is passed as its address, its size, and an extent and a stride per axis."""

_MOST_MEMBERS = 64

_UNKNOWN = 1009

_LONGEST = 1000
"""A line of more nodes is fused piece by piece: the sets of nodes before and behind each node grow with its length."""


def fuse_regions(graph: Graph, devices: Collection[str], on_host: AbstractSet[Tensor] = frozenset()) -> None:
    """Fuses in all regions on `devices`, in place.

    Args:
        graph: has the device of every node in ``node.device``.
        devices: names of devices.
        on_host: tensors whose values are on the host, which computes the vectors among them.
    """
    for node in graph.walk():
        if node.op is REGION and node.device in devices:
            node.attrs["region"] = fuse_region(node.attrs["region"], on_host)


def fuse_region(region: Region, on_host: AbstractSet[Tensor] = frozenset()) -> Region:
    """Return `region` with fused nodes; its branches and loops are fused in place."""
    for node in region.nodes:
        fuse_bodies(node, on_host)
    nodes, outputs = fuse_line(region.nodes, region.outputs, on_host)
    return replace(region, nodes=tuple(nodes), outputs=tuple(outputs))


def fuse_bodies(node: Node, on_host: AbstractSet[Tensor] = frozenset()) -> None:
    """Fuse the bodies of a branch or loop in place, and all inner bodies."""
    for body in node.subgraphs:
        for inner in body.nodes:
            fuse_bodies(inner, on_host)
        body.nodes[:], body.results = fuse_line(body.nodes, body.results, on_host)


def fuse_line(
    nodes: Sequence[Node], results: Sequence[Tensor], on_host: AbstractSet[Tensor] = frozenset()
) -> tuple[list[Node], list[Tensor]]:
    """Fuses a straight line.

    Args:
        nodes: of one graph or body and one device, in an order in which they can run. Users of a fused node are changed
            in place.
        results: tensors that are used outside; they may be of other nodes.
        on_host: see `fuse_regions`.

    Returns:
        Returns the nodes, in an order in which they can run, and the replacements of `results`.
    """
    made: list[Node] = []
    replacements = Replacements()
    for start in range(0, len(nodes), _LONGEST):
        piece = nodes[start : start + _LONGEST]
        later = (tensor for node in nodes[start + _LONGEST :] for tensor in node.inputs)
        made += _Line(piece, {*results, *later}, replacements, on_host).fuse()
    for node in made:
        replacements.apply(node)
    return made, [replacements.tensor(tensor) for tensor in results]


def _common_shape(first: Shape, second: Shape) -> Shape:
    """Facts about one shape from both; None if they may differ. An unknown extent is not taken for a 1."""
    if first is None or second is None or len(first) != len(second):
        return None
    pairs = list(zip(first, second, strict=True))
    if any(a != b and not (None in (a, b) and 1 not in (a, b)) for a, b in pairs):
        return None
    return tuple(b if a is None else a for a, b in pairs)


def _size(shape: Shape) -> int:
    """Return the number of elements; an unknown extent stands for the same number in all shapes."""
    return math.prod(_UNKNOWN if extent is None else extent for extent in shape or ())


def _n_reduced(node: Node) -> int:
    return len(normalize_axes(node.attrs["axis"], len(node.inputs[0].shape or ())))


def _again(values: Sequence[tuple[int, tuple[int, ...]]]) -> Counter[int]:
    """Return how often each value behind views is computed for an element of the results."""
    return Counter(number for number, steps in values if steps)


@dataclass(slots=True, eq=False)
class _FusedUnit:
    """A unit: nodes that run as one.

    Attributes:
        members: numbers of the nodes, ascending.
        shape: of their results, before these are joined; None for a node that cannot be computed with others.
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
    on_host: AbstractSet[Tensor] = frozenset()
    units: list[_FusedUnit] = field(default_factory=list)
    users: dict[Tensor, list[int]] = field(default_factory=dict)
    _looks: dict[int, Looks] = field(default_factory=dict)

    def fuse(self) -> list[Node]:
        numbers = {node: number for number, node in enumerate(self.nodes)}
        of_host = [self._is_on_host(node) for node in self.nodes]
        fusable = [not there and is_elementwise(node) for node, there in zip(self.nodes, of_host, strict=True)]
        if not (any(fusable) or any(node.op in SCALINGS for node in self.nodes)):
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
                # Only users with the shared input's shape are likely to share a shape.
                if _common_shape(tensor.shape, self.units[first].shape) is not None:
                    self._try_to_join(first, second)
        on_card = [(number, node) for number, node in enumerate(self.nodes) if not of_host[number]]
        self._looks = {number: looks for number, node in on_card if (looks := looks_of(node))}
        # Views come last: a view of a view shows which unit the inner view belongs to.
        self._take_in_all()
        for number, node in on_card:
            if is_join(node):
                self._join_results(number, numbers)
        self._take_in_all()
        for number, node in on_card:
            if node.op in ENDS_OF_ROWS:
                self._reduce_results(number, numbers)
        return self._replaced(numbers)

    def _is_on_host(self, node: Node) -> bool:
        return any(x.shape != () and x in self.on_host for x in node.outputs)

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
        if a is not b and shape is not None:
            self._join(a, b, shape)

    def _join(self, a: _FusedUnit, b: _FusedUnit, shape: Shape) -> bool:
        """Make one unit of two, if one kernel can do it; return True if so."""
        if (a.before & b.behind) | (a.behind & b.before):
            return False  # a node between them depends on one, and the other on it
        members = sorted((*a.members, *b.members))
        if not self._fits(members, shape):
            return False
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
        return True

    def _take_in_all(self) -> None:
        """Take in views, and the units behind views, as far as possible."""
        # Backwards, so that views go in before the units they view; each step may allow another.
        while sum(self._take_in(number) for number in reversed(range(len(self.nodes)))):
            pass

    def _take_in(self, number: int) -> bool:
        """Join a view, or a unit of which only views are used, to the only unit that uses it; return True if done."""
        unit = self.units[number]
        is_view = number in self._looks and unit.members == [number]
        if number != unit.members[-1] or not (is_view or unit.shape is not None):
            return False
        outputs = self._interface(unit.members)[1]
        users = {user for tensor in outputs for user in self.users.get(tensor, ())} - set(unit.members)
        # Users of several parts of one value share no tensor, so no earlier step has tried to join them.
        if is_view:
            for first, second in pairwise(sorted(users)):
                self._try_to_join(first, second)
        targets = {self.units[user] for user in users}
        if len(targets) != 1 or not self.results.isdisjoint(outputs):
            return False
        (target,) = targets
        # A user of the whole value, besides views of it, would need it in memory.
        if target.shape is None or not (is_view or users <= self._looks.keys()):
            return False
        return self._join(unit, target, target.shape)

    def _join_results(self, number: int, numbers: dict[Node, int]) -> None:
        """Add a join to the unit that computes all of its inputs, if one unit does."""
        places = [numbers.get(tensor.node) for tensor in self.nodes[number].inputs]
        known = [place for place in places if place is not None]
        if len(known) < len(places):
            return
        for first, second in pairwise(known):
            self._try_to_join(first, second)
        unit = self.units[known[0]]
        if any(self.units[place] is not unit for place in known) or unit.shape is None:
            return
        if all(_common_shape(tensor.shape, unit.shape) for tensor in self.nodes[number].inputs):
            self._join(unit, self.units[number], unit.shape)

    def _reduce_results(self, number: int, numbers: dict[Node, int]) -> None:
        """Add a reduction to the unit that computes its input, if one does."""
        node = self.nodes[number]
        shape, place = node.inputs[0].shape, numbers.get(node.inputs[0].node)
        if node.op in SCALINGS and is_reduction(node, shape):
            self.units[number].shape = shape  # a separate kernel, unless another unit takes it in
        if place is None or place in self._looks or self._ends(place):
            return
        unit = self.units[place]
        if unit.shape is None or not is_reduction(node, unit.shape):
            return
        if _common_shape(node.inputs[0].shape, unit.shape) is not None:
            self._join(unit, self.units[number], unit.shape)

    def _fits(self, members: Sequence[int], shape: Shape) -> bool:
        inputs, outputs = self._interface(members)
        count, computed = len(inputs) + len(outputs), len(members)
        if not self._looks.keys().isdisjoint(members) or any(map(self._ends, members)):
            chain = self._chain(members, inputs, outputs)
            if chain is None:
                return False
            # A value read through several views is loaded, or computed, for each view.
            reads, values = in_use(chain)
            if len({_n_reduced(self.nodes[member]) for member in members if self.nodes[member].op in ENDS_OF_ROWS}) > 1:
                return False
            count, computed = len(reads) + len(chain.stores) + len(chain.reduced), len(values)
            if any(_size(shape) * times > _size(chain.specs[each].shape) for each, times in _again(values).items()):
                return False
        nbytes = count * (16 + 16 * len(shape or ()))
        return computed <= _MOST_MEMBERS and count <= _MOST_PARAMETERS and nbytes <= _MOST_PARAMETER_BYTES

    def _interface(self, members: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the outside values that members use, and the members' values used outside."""
        inside = set(members)
        made = [output for member in members for output in self.nodes[member].outputs]
        used = dict.fromkeys(tensor for member in members for tensor in self.nodes[member].inputs)
        inputs = [tensor for tensor in used if tensor not in set(made)]
        outputs = [t for t in made if t in self.results or not inside.issuperset(self.users.get(t, ()))]
        return inputs, outputs

    # -- replacing -----------------------------------------------------------------------------------------------

    def _replaced(self, numbers: dict[Node, int]) -> list[Node]:
        """Return the line with the units' nodes in it, which still use their old inputs."""
        made: list[Node] = []
        # Each unit behind its inputs, and otherwise where its last member stood.
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
        kernels = [self.nodes[member] for member in unit.members if member not in self._looks]
        return len(kernels) > 1 or kernels[0].op.is_composite or kernels[0].op in SCALINGS

    def _ends(self, number: int) -> bool:
        """Return True if a node can be part of a chain only as its end."""
        return self.nodes[number].op in (CONCAT, *ENDS_OF_ROWS)

    def _chain(self, numbers: Sequence[int], inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Chain | None:
        """Return the chain of a unit's nodes; None if a node uses what another one has joined or reduced."""
        values = {tensor: number for number, tensor in enumerate(inputs)}
        members: list[Member] = []
        # Ends come last: their numbers then belong to outputs alone, and kernels that cannot join leave them out.
        for number in (*(number for number in numbers if not self._ends(number)), *filter(self._ends, numbers)):
            node = self.nodes[number]
            if any(tensor not in values for tensor in node.inputs):
                return None
            operands = tuple([values[tensor] for tensor in node.inputs])
            alone: Looks = {node.outputs[0]: (node.op, node.attrs)}
            for tensor, (op, attrs) in self._looks.get(number, alone).items():
                members.append(Member(op, attrs, operands, tensor.spec, node.name))
                values[tensor] = len(values)
        specs = tuple([tensor.spec for tensor in inputs])
        return Chain(specs, tuple(members), tuple([values[tensor] for tensor in outputs]))

    def _fused_node(self, unit: _FusedUnit) -> Node:
        inputs, outputs = self._interface(unit.members)
        chain = self._chain(unit.members, inputs, outputs)
        assert chain is not None
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
