"""The three parts of a vertex function: eager before the sets, the core in them, lazy after them (Cavs §3.3).

What no gather reaches is *eager*: it is computed once for all vertices, but for views that only sets read. What a
gather reaches and the state does not need is *lazy*: it is computed once for all vertices when their states are there.
The rest is the *core*, which has to go set by set.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from asyncflow.graph.builtin import CONSTANT, PARAMETER
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import Memory
from asyncflow.graph.values.dtypes import VARIANT
from asyncflow.graph.values.shapes import size_of
from asyncflow.vertex.function import REDUCE_CHILDREN, TracedFunction


@dataclass(frozen=True, slots=True)
class FunctionParts:
    """The nodes of each part, and the values that cross from one to another.

    Attributes:
        eager: nodes that no gather reaches.
        core: nodes behind a gather that the state needs.
        lazy: the other nodes behind a gather.
        before: what eager nodes and pulls give to the core and to lazy ones.
        kept: what the core gives to lazy nodes and pushes, beside states.
    """

    eager: frozenset[Node]
    core: frozenset[Node]
    lazy: frozenset[Node]
    before: tuple[Tensor, ...]
    kept: tuple[Tensor, ...]


def split(traced: TracedFunction, *, all_in_core: bool) -> FunctionParts:
    """The parts of a vertex function; `all_in_core` leaves everything in the core."""
    nodes = [node for node in traced.body.nodes if node.op is not PARAMETER]
    behind = set(nodes) if all_in_core else _behind_gathers(traced, nodes)
    # Nodes that read all children must run in the core, where their set is available.
    held = {node for node in nodes if node.op is REDUCE_CHILDREN}
    core = behind if all_in_core else _core(nodes, behind, {x.node for x in traced.scattered} | held)
    results = tuple(traced.pushes.values())
    if not all_in_core:
        core = core | _views_for(core, set(nodes) - behind, nodes, results)
    eager, lazy = set(nodes) - behind - core, behind - core
    of_vertex = traced.of_children
    before = [
        x
        for x in _read_by(core | lazy, (*traced.scattered, *results))
        if x.node in eager or (x.node.op is PARAMETER and x not in of_vertex)
    ]
    kept = [x for x in _read_by(lazy, results) if x.node in core]
    return FunctionParts(frozenset(eager), frozenset(core), frozenset(lazy), tuple(before), tuple(kept))


def _behind_gathers(traced: TracedFunction, nodes: Sequence[Node]) -> set[Node]:
    reached, before = {x.node for x in traced.of_children}, -1
    while len(reached) > before:
        before = len(reached)
        for node in nodes:
            if node.op is REDUCE_CHILDREN or any(source in reached for source in _sources(node)):
                reached.add(node)
                reached.update(_makers_of_stores(node))
    return {node for node in reached if node.op is not PARAMETER}


def _core(nodes: Sequence[Node], behind: set[Node], wanted: set[Node]) -> set[Node]:
    """Return the nodes that the state needs, and the nodes that read a store filled in a set."""
    core = behind & _needed(nodes, wanted)
    while late := {node for node in behind - core if not core.isdisjoint(_makers_of_stores(node))}:
        core |= behind & _needed(nodes, late)
    return core


def _makers_of_stores(node: Node) -> set[Node]:
    """The nodes that give it TensorArrays and other stores, which cannot be sliced: all are of one part."""
    makers = {x.node for x in node.inputs if x.dtype == VARIANT and x.node.op is not PARAMETER}
    parted = (maker.graph.parted.get(maker) for maker in makers)
    return makers.union(*(each.made for each in parted if each is not None))


def _views_for(core: set[Node], eager: set[Node], nodes: list[Node], results: Sequence[Tensor]) -> set[Node]:
    """Views of eager values that only the core reads: a set makes its own, whose gradients it then joins to one."""
    users: dict[Node, set[Node]] = {}
    for node in nodes:
        for source in node.sources:
            users.setdefault(source, set()).add(node)
    kept = {x.node for x in results}
    late: set[Node] = set()
    for node in reversed(nodes):
        is_view = node.op.traits.memory in (Memory.VIEW, Memory.WHOLE_VIEW) and not node.control_inputs
        is_view = is_view and not _makers_of_stores(node)
        if node in eager and is_view and node not in kept and users.get(node, set()) <= core | late:
            late.add(node)
    return late


def _needed(nodes: Sequence[Node], wanted: set[Node]) -> set[Node]:
    needed = set(wanted)
    for node in reversed(nodes):
        if node in needed:
            parted = node.graph.parted.get(node)
            needed.update(_sources(node) if parted is None else parted.made)
    return needed


def _sources(node: Node) -> Iterable[Node]:
    """Return the nodes that a node depends on; the nodes made of one branch or loop over rows count as one."""
    parted = node.graph.parted.get(node)
    return node.sources if parted is None else [*node.sources, *(x.node for x in parted.needs)]


def _read_by(nodes: Collection[Node], results: Iterable[Tensor]) -> list[Tensor]:
    """Values that nodes read, and results, each once and in the order of the body."""
    read = {x for node in nodes for x in node.inputs} | set(results)
    return sorted(read, key=lambda x: (x.node.id, x.index))


def explained(parts: FunctionParts, kept: Mapping[str, Iterable[Tensor]]) -> str:
    """Describe the ops of each part for `Plan.explain`, and the values `kept` of each vertex."""
    nodes = [("before the sets", parts.eager), ("in each set", parts.core), ("after the sets", parts.lazy)]
    ops = "; ".join(f"{where} {_counted(part)}" for where, part in nodes)
    return f"vertex_map computes {ops}. Bytes kept a vertex: {', '.join(f'{k} {_nbytes(x)}' for k, x in kept.items())}"


def _counted(nodes: Collection[Node]) -> str:
    counts = Counter(node.op.name for node in sorted(nodes, key=lambda node: node.id) if node.op is not CONSTANT)
    return ", ".join(f"{count} {name}" if count > 1 else name for name, count in counts.items()) or "nothing"


def _nbytes(values: Iterable[Tensor]) -> str:
    return f"{sum((size_of(x.shape) or 0) * x.dtype.itemsize for x in values):,}"
