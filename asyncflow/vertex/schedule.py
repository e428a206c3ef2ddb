"""The order in which the vertices of a batch are computed, in sets, and the places of their children: one host op.

Results are kept in a store with a row a vertex, in the order in which they are made, behind a row 0 for missing
children. So the *rank* of a vertex, the number of its row, is its position in that order plus 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np

from asyncflow.errors import DTypeError, GraphError, ShapeError
from asyncflow.graph.building.build import apply, as_tensor
from asyncflow.graph.ir import Tensor
from asyncflow.graph.op import define, inputs_from, not_differentiable
from asyncflow.graph.values.dtypes import int64
from asyncflow.graph.values.shapes import format_shape
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.arrays.shape import shape
from asyncflow.ops.rows.rule import no_row_rule
from asyncflow.values import Array, Kernel, Namespace
from asyncflow.vertex.policies.agenda import agenda
from asyncflow.vertex.policies.breadth_first import breadth_first
from asyncflow.vertex.policies.depth import depth
from asyncflow.vertex.structure.edges import Edges, owners, read_edges, roots
from asyncflow.vertex.structure.equal_chains import are_equal_chains, order_chains
from asyncflow.vertex.structure.input_graph import InputGraph, named_parts

POLICIES: Final[dict[str, Callable[[Edges], Array]]] = {
    "breadth_first": breadth_first,
    "depth": depth,
    "agenda": agenda,
}
"""A policy numbers the set of each vertex, every child's below its parents'; sets are computed in ascending order.

With types, each is then cut into sets of one type.
"""

BY_NUMBER: Final = "by_number"
"""No policy: all vertices are one set, in the order of their numbers. For uses that do not depend on when a vertex is
computed."""


class VertexSchedule(NamedTuple):
    """Vectors of int64, of a batch or a part of it; vectors that only other arities or graphs need are None."""

    order: Tensor
    """Vertices in execution order: set by set, and by number within a set. The numbers refer to the batch."""
    positions: Tensor
    """The position of each vertex in that order."""
    set_starts: Tensor
    """Start of each set in that order, and the end of the last one."""
    root_ranks: Tensor
    """Ranks of the roots, ordered by vertex number."""
    child_ranks: Tensor
    """For each vertex in execution order, ``[vertices, arity]``, the rank of each of its children, 0 where there is
    none; where the arity is None, a vector of the ranks of all children of all vertices in execution order."""
    child_starts: Tensor | None
    """Start of each vertex's children, in execution order, in that vector, and the end of the last ones."""
    child_positions: Tensor | None
    """For each entry of that vector the position of the vertex whose child it is."""
    set_types: Tensor | None
    """The type of each set's vertices."""


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
        check_order(policy)
    arrays = named_parts(graph)
    unknown = _of_unknown_rows(pulls, as_tensor(graph.offsets))
    rows = [shape(pulls[name]) for name in unknown]
    found = apply(
        SCHEDULE,
        *arrays.values(),
        *rows,
        policy=policy,
        arity=arity,
        n_types=n_types,
        parts=parts,
        known=tuple(arrays)[3:],
        pulls=tuple(unknown),
    )
    each = len(found) // parts
    return [_schedule(found[first : first + each], graph, arity) for first in range(0, len(found), each)]


def check_order(policy: object) -> str:
    """Return the name of a policy; raise `GraphError` unless there is such a one."""
    if not isinstance(policy, str) or policy not in POLICIES:
        raise GraphError(f"policies are {', '.join(map(repr, POLICIES))}; got {policy!r}")
    return policy


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
    arity: int | None,
    parts: int,
    known: tuple[str, ...],
    **others: object,
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
    of_sets = (any_number,) * ("types" in known)
    return (per_vertex, per_vertex, any_number, any_number, *ranks, *of_sets) * parts


def _kernel(
    xp: Namespace,
    *,
    policy: str,
    arity: int | None,
    n_types: int | None,
    parts: int = 1,
    known: tuple[str, ...] = (),
    pulls: tuple[str, ...] = (),
) -> Kernel:
    def kernel(offsets: Array, children: Array, samples: Array, *more: Array) -> tuple[Array, ...]:
        edges = None
        if not may_be_chains or not are_equal_chains(offsets, children, samples):
            edges = read_edges(offsets, children, samples, **dict(zip(known, more, strict=False)))
            edges.check(arity, n_types)
        size = len(offsets) - 1
        for name, found in zip(pulls, more[len(known) :], strict=True):
            if found[:1] != size:
                raise ValueError(
                    f"pulls[{name!r}] has a row for each vertex: the graph has {size} vertices, and the pulled rows "
                    f"are of shape {format_shape(found.tolist())}"
                )
        if edges is None:
            return order_chains(len(samples) - 1, size, arity)
        if parts == 1:
            return _ordered(edges, policy, arity)
        return tuple(x for part in range(parts) for x in _ordered(edges.part(part, parts), policy, arity))

    may_be_chains = parts == 1 and arity != 0 and policy != BY_NUMBER and "types" not in known
    return kernel


SCHEDULE = define("schedule", _spec, _kernel, runs_on_host=True, host_inputs=inputs_from(0))
not_differentiable(SCHEDULE, because="all of its outputs are integers")
no_row_rule(SCHEDULE, because="it orders the vertices of a whole batch at once")


def _ordered(edges: Edges, policy: str, arity: int | None) -> tuple[Array, ...]:
    numbers = np.zeros(edges.size, np.int64) if policy == BY_NUMBER else POLICIES[policy](edges)
    order, set_starts = _sorted(edges, numbers)
    positions = np.empty_like(order)
    positions[order] = np.arange(edges.size)
    # Vertices of the first set, often half of all, have no children.
    first = 0 if policy == BY_NUMBER or not len(edges.children) else int(set_starts[1])
    if arity is None:
        found: tuple[Array, ...] = _ranked(edges, order, positions, first)
    else:
        found = (_table(edges, positions, arity),)
    if first and edges.heights is not None:
        _check_ranks(edges, set_starts, *found[:2])
    of_sets = () if edges.types is None else (edges.types[order[set_starts[:-1]]],)
    numbers = edges.first_vertex + order if edges.first_vertex else order
    return numbers, positions, set_starts, positions[roots(edges.size, edges.children)] + 1, *found, *of_sets


def _sorted(edges: Edges, numbers: Array) -> tuple[Array, Array]:
    """The vertices in the order of the numbers, and of types where there are some, and where each set begins."""
    if edges.types is not None:
        numbers = numbers * (edges.types.max(initial=0) + 1) + edges.types
        if numbers.max(initial=0) > 65535:
            numbers = np.unique(numbers, return_inverse=True)[1]
    # NumPy sorts small integers by radix sort, in linear time.
    numbers = numbers.astype(np.min_scalar_type(numbers.max(initial=0)))
    order = numbers.argsort(kind="stable")
    numbers = numbers.take(order)
    (inner,) = (numbers[1:] != numbers[:-1]).nonzero()
    set_starts = np.zeros(len(inner) + 1 + (len(numbers) > 0), np.int64)
    set_starts[-1] = len(numbers)
    np.add(inner, 1, out=set_starts[1:-1])
    return order, set_starts


def _table(edges: Edges, positions: Array, arity: int) -> Array:
    table = np.zeros((edges.size, arity), np.int64)
    slots = (positions * arity - edges.offsets[:-1])[edges.parents] + np.arange(len(edges.children))
    table.reshape(-1)[slots] = positions[edges.children] + 1
    return table


def _ranked(edges: Edges, order: Array, positions: Array, first: int) -> tuple[Array, Array, Array]:
    inner, count = order[first:], len(edges.children)
    starts = np.zeros(edges.size + 1, np.int64)
    edges.counts.take(inner).cumsum(out=starts[first + 1 :])
    if starts[-1] != count:
        raise edges.too_low()
    parents = owners(starts[first:])
    moved = edges.offsets.take(inner)  # first edge of each vertex; edges are in the order of their parents' numbers
    moved -= starts[first:-1]
    places = moved.take(parents)
    places += np.arange(count)
    ranks = positions.take(edges.children.take(places))
    ranks += 1
    parents += first
    return ranks, starts, parents


def _check_ranks(edges: Edges, set_starts: Array, ranks: Array, child_starts: Array | None = None) -> None:
    """Looks for a child that does not stand before the set of its parent."""
    starts = set_starts * ranks.shape[-1] if child_starts is None else child_starts.take(set_starts)
    (filled,) = (starts[1:] > starts[:-1]).nonzero()
    if (np.maximum.reduceat(ranks.reshape(-1), starts.take(filled)) > set_starts.take(filled)).any():
        raise edges.too_low()
