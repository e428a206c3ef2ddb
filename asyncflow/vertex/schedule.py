"""The order in which the vertices of a batch are computed, in sets, and where each finds its children: one host op.

Results are kept in a store with a row a vertex, in the order in which they are made, behind a row 0 that stands for
children that are missing. So the *rank* of a vertex, the number of its row, is its position in that order plus 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np

from asyncflow.errors import DTypeError, GraphError, ShapeError
from asyncflow.graph.build import apply, as_tensor
from asyncflow.graph.dtypes import int64
from asyncflow.graph.ir import Tensor
from asyncflow.graph.op import define, inputs_from, not_differentiable
from asyncflow.graph.shapes import format_shape
from asyncflow.graph.spec import Spec
from asyncflow.ops.rows.rule import no_row_rule
from asyncflow.ops.shape import shape
from asyncflow.values import Array, Kernel, Namespace
from asyncflow.vertex.agenda import agenda
from asyncflow.vertex.breadth_first import breadth_first
from asyncflow.vertex.depth import depth
from asyncflow.vertex.edges import Edges, owners, read_edges, roots
from asyncflow.vertex.input_graph import InputGraph

POLICIES: Final[dict[str, Callable[[Edges], Array]]] = {
    "breadth_first": breadth_first,
    "depth": depth,
    "agenda": agenda,
}
"""A policy numbers the set of each vertex, every child's below its parents'; sets are computed in ascending order.

With types, each is then cut into sets of one type.
"""

BY_NUMBER: Final = "by_number"
"""No policy: all vertices are one set, in the order of their numbers. For what is told of them, but not when they are
computed."""


class VertexSchedule(NamedTuple):
    """Vectors of int64, of a batch or a part of it; those that another arity or graph does not need are None."""

    order: Tensor
    """Vertices in execution order: set by set, and by number within a set. The numbers are those of the batch."""
    positions: Tensor
    """The position of each vertex in that order."""
    set_starts: Tensor
    """Where each set begins in that order, and where the last one ends."""
    root_ranks: Tensor
    """Ranks of the roots, by their numbers."""
    child_ranks: Tensor
    """For each vertex in execution order, ``[vertices, arity]``, the rank of each of its children, 0 where there is
    none; where the arity is None, a vector of the ranks of all children of all vertices in execution order."""
    child_starts: Tensor | None
    """Where the children of each vertex, in execution order, begin in that vector, and where the last ones end."""
    child_positions: Tensor | None
    """For each entry of that vector the position of the vertex whose child it is."""
    set_types: Tensor | None
    """The type of each set's vertices."""


def schedule(
    graph: InputGraph,
    policy: str = "breadth_first",
    pulls: Mapping[str, Tensor] = MappingProxyType({}),
    *,
    arity: int | None,
    n_types: int | None = None,
) -> VertexSchedule:
    """The order of a whole batch; see `schedules`."""
    return schedules(graph, policy, pulls, arity=arity, n_types=n_types)[0]


def schedules(
    graph: InputGraph,
    policy: str = "breadth_first",
    pulls: Mapping[str, Tensor] = MappingProxyType({}),
    *,
    arity: int | None,
    n_types: int | None = None,
    parts: int = 1,
) -> list[VertexSchedule]:
    """Adds the node that orders the vertices of a batch, or of each of its parts, on the host.

    Args:
        graph: of tensors or arrays; with types, each set has vertices of one type alone.
        policy: one of `POLICIES`, on which results do not depend, or `BY_NUMBER`.
        pulls: tensors that have a row for each vertex of the batch; the run looks where that is not known before.
        arity: how many children a vertex may have; None for any number.
        n_types: types are below it; None for any.
        parts: of the batch, each with an order of its own; see `Edges.part`. One node for all of them, so that none
            is begun before the others could be.

    Raises:
        GraphError: there is no such policy, or what the graph holds are no vectors of integers. The run fails if they
            form no graph; the error names sample and vertex.
        ShapeError: a tensor has not as many rows; a run fails if it is found there.
    """
    if policy != BY_NUMBER:
        check_policy(policy)
    arrays = (graph.offsets, graph.children, graph.samples, *(() if graph.types is None else (graph.types,)))
    unknown = _of_unknown_rows(pulls, as_tensor(graph.offsets))
    rows = [shape(pulls[name]) for name in unknown]
    found = apply(
        SCHEDULE, *arrays, *rows, policy=policy, arity=arity, n_types=n_types, parts=parts, pulls=tuple(unknown)
    )
    each = len(found) // parts
    return [_schedule(found[first : first + each], graph, arity) for first in range(0, len(found), each)]


def check_policy(policy: str) -> None:
    """Raises `GraphError` unless there is a policy of that name."""
    if policy not in POLICIES:
        raise GraphError(f"policies are {', '.join(map(repr, POLICIES))}; got {policy!r}")


def _schedule(found: Sequence[Tensor], graph: InputGraph, arity: int | None) -> VertexSchedule:
    order, positions, set_starts, root_ranks, child_ranks = found[:5]
    starts, parents = found[5:7] if arity is None else (None, None)
    types = None if graph.types is None else found[-1]
    return VertexSchedule(order, positions, set_starts, root_ranks, child_ranks, starts, parents, types)


def _of_unknown_rows(pulls: Mapping[str, Tensor], offsets: Tensor) -> list[str]:
    """The pulls of which is not known before the run whether they have a row for each vertex."""
    ends = (offsets.shape or (None,))[0]
    wanted = None if ends is None else ends - 1
    unknown = []
    for name, x in pulls.items():
        rows = (None,) if x.shape is None else x.shape[:1]
        if not rows or (None not in (*rows, wanted) and rows != (wanted,)):
            raise ShapeError(f"vertex_map: pulls[{name!r}] has a row for each vertex, {wanted or 'as many'}; got {x!r}")
        if None in (*rows, wanted):
            unknown.append(name)
    return unknown


def _spec(
    offsets: Spec,
    children: Spec,
    *rest: Spec,
    policy: str,
    arity: int | None,
    n_types: int | None,
    parts: int,
    pulls: tuple[str, ...],
) -> tuple[Spec, ...]:
    for spec in (offsets, children, *rest):
        if spec.dtype.kind not in "iu":
            raise DTypeError(f"the arrays of an input graph are integers; got {spec}")
        if spec.rank not in (1, None):
            raise ShapeError(f"the arrays of an input graph are vectors; got {spec}")
    ends = offsets.shape[0] if offsets.shape and parts == 1 else None
    size = None if ends is None else max(ends - 1, 0)
    per_vertex, any_number = Spec(int64, (size,)), Spec(int64, (None,))
    per_child = Spec(int64, children.shape if children.shape and parts == 1 else (None,))
    table = (Spec(int64, (size, arity)),)
    ranks = table if arity is not None else (per_child, Spec(int64, (ends,)), per_child)
    of_sets = (any_number,) * (len(rest) - len(pulls) - 1)
    return (per_vertex, per_vertex, any_number, any_number, *ranks, *of_sets) * parts


def _kernel(
    xp: Namespace,
    *,
    policy: str,
    arity: int | None,
    n_types: int | None,
    parts: int = 1,
    pulls: tuple[str, ...] = (),
) -> Kernel:
    def kernel(offsets: Array, children: Array, samples: Array, *more: Array) -> tuple[Array, ...]:
        types, shapes = more[: len(more) - len(pulls)], more[len(more) - len(pulls) :]
        edges = read_edges(offsets, children, samples, *types)
        edges.check(arity, n_types)
        for name, found in zip(pulls, shapes, strict=True):
            if found[:1] != edges.size:
                raise ValueError(
                    f"pulls[{name!r}] has a row for each vertex: the graph has {edges.size} vertices, and what is "
                    f"pulled is of shape {format_shape(found.tolist())}"
                )
        if parts == 1:
            return _ordered(edges, policy, arity)
        return tuple(x for part in range(parts) for x in _ordered(edges.part(part, parts), policy, arity))

    return kernel


SCHEDULE = define("schedule", _spec, _kernel, runs_on_host=True, host_inputs=inputs_from(0))
not_differentiable(SCHEDULE, because="all of its outputs are integers")
no_row_rule(SCHEDULE, because="it orders the vertices of a whole batch at once")


def _ordered(edges: Edges, policy: str, arity: int | None) -> tuple[Array, ...]:
    numbers = np.zeros(edges.size, np.int64) if policy == BY_NUMBER else POLICIES[policy](edges)
    sets, set_starts = _sets(edges, numbers)
    order = np.argsort(sets, kind="stable")
    positions = np.empty_like(order)
    positions[order] = np.arange(edges.size)
    if arity is None:
        ranks: tuple[Array, ...] = _ranked(edges, order, positions)
    else:
        ranks = (_table(edges, positions, arity),)
    of_sets = () if edges.types is None else (edges.types[order[set_starts[:-1]]],)
    numbers = edges.first_vertex + order if edges.first_vertex else order
    return numbers, positions, set_starts, positions[roots(edges.size, edges.children)] + 1, *ranks, *of_sets


def _sets(edges: Edges, numbers: Array) -> tuple[Array, Array]:
    """The set of each vertex, in the smallest integers that will do, and where each begins."""
    if edges.types is not None:
        numbers = numbers * (edges.types.max(initial=0) + 1) + edges.types
        if numbers.max(initial=0) > 65535:
            numbers = np.unique(numbers, return_inverse=True)[1]
    sizes = np.bincount(numbers)
    # NumPy sorts small integers by their digits, in a time that is linear.
    kind = np.uint8 if len(sizes) <= 256 else np.uint16 if len(sizes) <= 65536 else np.int64
    return numbers.astype(kind), np.concatenate([[0], sizes[sizes > 0].cumsum()])


def _table(edges: Edges, positions: Array, arity: int) -> Array:
    table = np.zeros((edges.size, arity), np.int64)
    slots = (positions * arity - edges.offsets[:-1])[edges.parents] + np.arange(len(edges.children))
    table.reshape(-1)[slots] = positions[edges.children] + 1
    return table


def _ranked(edges: Edges, order: Array, positions: Array) -> tuple[Array, Array, Array]:
    starts = np.concatenate([[0], edges.counts[order].cumsum()])
    parents = owners(starts)
    first = edges.offsets[order]  # of the edges of each vertex, which stand in the order of their parents' numbers
    first -= starts[:-1]
    places = first[parents]
    places += np.arange(len(parents))
    ranks = positions[edges.children[places]]
    ranks += 1
    return ranks, starts, parents
