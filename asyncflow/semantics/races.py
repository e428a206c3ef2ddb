"""Races: reads and writes of one resource that nothing orders, so that a program may have more than one outcome."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal, TypeAlias

from asyncflow.errors import GraphError
from asyncflow.graph.graph import Graph
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import Access
from asyncflow.graph.resource import Resource, resources_of
from asyncflow.semantics.orders import AccessOrder
from asyncflow.semantics.program import NeededGraph
from asyncflow.state.elements.queue_ops import PUTS, TAKES
from asyncflow.state.mutex import Barrier, Mutex
from asyncflow.state.queues import Queue
from asyncflow.values import Nest

_Between: TypeAlias = Literal["nodes", "iterations", "runs"]


@dataclass(frozen=True, slots=True, eq=False)
class Race:
    """A race: two nodes that touch one resource in no order, at least one of which writes it.

    Attributes:
        resource: the resource in words, such as ``variable w``.
        variable: the resource itself; None for printing, and for effects of a user-defined op.
        first: the node written first.
        second: the other; or the same node, in another iteration or run.
        between: the unordered firings: the two ``"nodes"`` wherever both fire, only firings in different
            ``"iterations"`` of a loop around them, or firings of two ``"runs"``.
    """

    resource: str
    variable: Resource | None
    first: Node
    second: Node
    between: _Between

    def __str__(self) -> str:
        by_line = sorted({self.first, self.second}, key=lambda node: (node.location.file, node.location.line, node.id))
        pair = " and ".join(map(_told, by_line))
        where = {"nodes": "", "iterations": " in different iterations", "runs": " in two runs"}[self.between]
        verb = "has" if self.first is self.second else "have"
        return f"race on {self.resource}: {pair} {verb} no order{where}"


def find_races(
    graph: Graph,
    fetches: Nest,
    feeds: Iterable[Tensor | str] = (),
    *,
    runs: int = 1,
    most: int = 1000,
) -> tuple[Race, ...]:
    """Find pairs of reads and writes that nothing orders, and whose order can show.

    Quick, for programs of any size: it tries no orders (that does `explore`). For each pair it asks if a path or a soft
    order leads from one to the other, through branches, and from iteration to iteration. So it may name pairs that make
    no difference to the values at hand, and leaves out none that does. Two writes that commute are no race as long as
    no node reads their results: `assign_add` and `assign_sub` of integers.

    In a queue, two that put in race, and two that take out, as the order of elements follows theirs. An enqueue and a
    dequeue do not race, since a dequeue waits for its element and an enqueue for room. In a `ShuffleQueue`, a
    `PriorityQueue` or a `PaddingQueue` with buckets they do, in ordered programs too: there the other elements decide
    which is next. What asks for the size races with both, and `close` with what puts in.

    Args:
        graph: with ordered effects, it has only races of such queues, and races between runs.
        fetches: any nest of tensors, nodes and variables, or names; None for all effects of the graph.
        feeds: the tensors, or their names, that runs get values for.
        runs: 2 also looks for pairs in two runs of one session at once; that both are atomic is not asked.
        most: maximum number of races.

    Returns:
        Pairs, in the order in which the second of them was written.

    Raises:
        FetchError: a fetch is nothing of the graph.
        FeedError: one of `feeds` cannot be fed.
        GraphError: `graph` is none, or `runs` makes no sense, or the program has primitives written by hand.

    >>> import asyncflow as af
    >>> with af.Graph(effects="unordered") as graph:
    ...     v = af.Variable(0, name="v")
    ...     write, read = v.assign(1), v.read()
    >>> [race.between for race in find_races(graph, [write.node, read])]
    ['nodes']
    >>> with af.Graph() as graph:
    ...     write, read = v.assign(1), v.read()
    >>> find_races(graph, [write.node, read])
    ()
    """
    if runs not in (1, 2):
        raise GraphError(f"find_races(runs=) is 1 or 2; got {runs!r}")
    orders = AccessOrder(NeededGraph(graph, fetches, feeds))
    places = {node: place for place, node in enumerate(orders.nodes)}
    races: list[Race] = []
    races += sorted(islice(_within(orders), most), key=lambda race: (places[race.second], places[race.first]))
    if runs > 1:
        races += islice(_between(orders), most - len(races))
    return tuple(races)


def allow_races(*resources: Resource) -> None:
    """Says that races on these variables are meant, as in training without locks: none of them is reported again.

    Args:
        resources: variables, queues or tables, in whatever graphs they are used.

    Raises:
        GraphError: one is something else.
    """
    for resource in resources:
        if not isinstance(resource, Resource):
            raise GraphError(f"allow_races takes variables and other resources; got {resource!r}")
        resource.allows_races = True


_AGAINST = {
    "read": ("write", "add"),
    "write": ("read", "write", "add"),
    "add": ("read", "write"),
    "put": ("take",),
    "take": ("put",),
}
"""The roles that each races with."""


class _Rivals:
    """The accesses, for each access, whose order relative to it can show, as bits."""

    def __init__(self, program: NeededGraph, nodes: Sequence[Node], *, ordered: bool = False) -> None:
        self._places: dict[tuple[Hashable, str], int] = defaultdict(int)
        self._roles = [_queue_roles(node) + ([] if ordered else _roles(program, node)) for node in nodes]
        for place, roles in enumerate(self._roles):
            for role in roles:
                self._places[role] |= 1 << place

    def of(self, place: int) -> Iterator[tuple[Hashable, int]]:
        """The resources that the access at a place touches, and its rivals on each."""
        for key, role in self._roles[place]:
            rivals = 0
            for other in _AGAINST[role]:
                rivals |= self._places.get((key, other), 0)
            yield key, rivals


def _roles(program: NeededGraph, node: Node) -> list[tuple[Hashable, str]]:
    """The role of an access on each resource whose races are told."""
    is_used = any(map(program.is_used, node.outputs))
    writes = "add" if node.op.conduct.commutes and not is_used and node.outputs[0].spec.dtype.kind in "biu" else "write"
    return [
        (key, writes if access is Access.WRITE else "read")
        for key, access in program.touches(node).items()
        if _is_watched(node, key) and (access is Access.WRITE or is_used)
    ]


def _queue_roles(node: Node) -> list[tuple[Hashable, str]]:
    """Return the roles of a node in queues that are not first in, first out; no soft order covers these races."""
    role = "put" if node.op in PUTS else "take" if node.op in TAKES else ""
    queues = [each for each in resources_of(node) if isinstance(each, Queue)] if role else []
    return [(each.effect_key, role) for each in queues if not each.is_fifo and not each.allows_races]


def _within(orders: AccessOrder) -> Iterator[Race]:
    nodes, seen = orders.nodes, set[tuple[Hashable, int, int]]()
    rivals = _Rivals(orders.program, nodes, ordered=orders.program.graph.effects == "ordered")
    for place, before in enumerate(orders.before):
        for key, against in rivals.of(place):
            together = against & ((1 << place) - 1) & ~before & ~orders.excluded[place]
            apart = 0
            for depth, inside in enumerate(orders.loops[place], start=1):
                apart |= against & inside & ~(before >> len(nodes) * depth)
            for other in _places(together | apart):
                first, second = sorted((place, other))
                if (key, first, second) not in seen:
                    seen.add((key, first, second))
                    is_free = _is_free(orders, first, second)
                    yield _race(key, nodes[first], nodes[second], "nodes" if is_free else "iterations")


def _is_free(orders: AccessOrder, first: int, second: int) -> bool:
    """Return True if two accesses have no order within one iteration."""
    return first < second and not (orders.before[second] | orders.excluded[second]) >> first & 1


def _between(orders: AccessOrder) -> Iterator[Race]:
    rivals = _Rivals(orders.program, orders.nodes)
    for place, node in enumerate(orders.nodes):
        for key, against in rivals.of(place):
            for other in _places(against & ((2 << place) - 1)):
                yield _race(key, orders.nodes[other], node, "runs")


def _places(bits: int) -> Iterator[int]:
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


def _resource(node: Node, key: Hashable) -> Resource | None:
    return next((each for each in resources_of(node) if key in (each.effect_key, *_sides(each))), None)


def _sides(resource: Resource) -> tuple[Hashable, ...]:
    """Return the keys of a queue's enqueues and dequeues."""
    return (resource.effect_key, "put"), (resource.effect_key, "take")


def _is_watched(node: Node, key: Hashable) -> bool:
    """Return True if races on a resource are reported: not for mutexes and barriers, nor for a node's own resource."""
    resource = _resource(node, key)
    if isinstance(key, Node) or isinstance(resource, Mutex | Barrier):
        return False
    return resource is None or not resource.allows_races


def _race(key: Hashable, first: Node, second: Node, between: _Between) -> Race:
    variable = _resource(second, key)
    name = str(key) if variable is None else f"{_kind(second)} {variable.name}"
    return Race(name, variable, first, second, between)


def action(node: Node) -> str:
    """Return the verb for a node's effect on a resource, such as ``assign_add``."""
    return node.op.name.removeprefix(f"{_kind(node)}_").removeprefix("user_")


def _kind(node: Node) -> str:
    """The kind of resource that a node touches: ``variable``, ``queue``, ``table``; empty if there is none."""
    return next((name for name, value in node.attrs.items() if isinstance(value, Resource)), "")


def _told(node: Node) -> str:
    place = node.location
    file = Path(place.file)
    here = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
    return f"{action(node)} ({here}:{place.line})"
