"""`summary`: the variables of a graph by scope, and the memory of the values that its gradients need."""

from __future__ import annotations

from collections import defaultdict
from math import prod

from asyncflow.devices.memory import format_bytes
from asyncflow.errors import GraphError, brief, counted
from asyncflow.graph.builtin import PLACEHOLDER
from asyncflow.graph.graph import Graph
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import Memory
from asyncflow.graph.resource import resources_of
from asyncflow.graph.values.dtypes import VARIANT
from asyncflow.graph.values.spec import Spec
from asyncflow.profiler.summary import align
from asyncflow.state.variables.variable import Variable

_GRADIENTS = "gradients/"


def summary(graph: Graph, *, extent: int = 1) -> str:
    """Return a table of a graph's variables by scope, with their shapes, elements and bytes, and the totals.

    The last line tells the memory of activations: the values that nodes of gradients read and other nodes make. They
    live until the gradients are computed. Values inside the bodies of loops and branches are not among them.

    Args:
        graph: any graph.
        extent: stands for each extent that is not known while the graph is built, such as a batch's.

    Raises:
        GraphError: `graph` is no graph, or `extent` is below 0.

    >>> import asyncflow as af
    >>> with af.Graph() as graph:
    ...     w = af.Variable([[1.0, 2.0]], name="dense/w")
    ...     loss = af.sum(af.tanh(af.placeholder("float64", (None, 1)) @ w))
    ...     grad = af.gradients(loss, w)
    >>> print(summary(graph, extent=32))
    variable  value         elements  bytes
    --------  ------------  --------  -----
    dense/                         2   16 B
      w       float64[1,2]         2   16 B
    <BLANKLINE>
    1 variable, 2 elements, 16 B
    activations: 512 B in 1 value (open extents taken as 32)
    """
    if not isinstance(graph, Graph):
        raise GraphError(f"summary: takes a graph; got {brief(graph)}")
    if extent < 0:
        raise GraphError(f"summary: extent is at least 0; got {extent}")
    variables = sorted((each for each in graph.resources if isinstance(each, Variable)), key=lambda each: each.name)
    kept = _activations(graph)
    total = sum(_bytes(each.spec, extent) for each in variables)
    elements = sum(_elements(each.spec, extent) for each in variables)
    rows = _rows(variables, extent)
    table = align(("variable", "value", "elements", "bytes"), rows, left=2) + "\n\n" if rows else ""
    is_open = any(x.shape is None or None in x.shape for x in (*variables, *kept))
    return (
        f"{table}{counted(len(variables), 'variable')}, {elements:,} elements, {format_bytes(total)}\n"
        f"activations: {format_bytes(sum(_bytes(x.spec, extent) for x in kept))} in {counted(len(kept), 'value')}"
        f"{f' (open extents taken as {extent})' if is_open else ''}"
    )


def _rows(variables: list[Variable], extent: int) -> list[tuple[str, ...]]:
    """Return a line for each variable, and before the first variable of a scope a line with the scope's totals."""
    totals: dict[tuple[str, ...], list[int]] = defaultdict(lambda: [0, 0])
    for each in variables:
        scopes = each.name.split("/")[:-1]
        for depth in range(1, len(scopes) + 1):
            found = totals[tuple(scopes[:depth])]
            found[0] += _elements(each.spec, extent)
            found[1] += _bytes(each.spec, extent)
    rows: list[tuple[str, ...]] = []
    told: set[tuple[str, ...]] = set()
    for each in variables:
        *scopes, name = each.name.split("/")
        for depth in range(1, len(scopes) + 1):
            scope = tuple(scopes[:depth])
            if scope not in told:
                told.add(scope)
                count, size = totals[scope]
                rows.append((f"{'  ' * (depth - 1)}{scope[-1]}/", "", f"{count:,}", format_bytes(size)))
        count, size = _elements(each.spec, extent), _bytes(each.spec, extent)
        rows.append((f"{'  ' * len(scopes)}{name}", str(each.spec), f"{count:,}", format_bytes(size)))
    return rows


def _activations(graph: Graph) -> list[Tensor]:
    """Return the values that nodes of gradients read and that other nodes compute from feeds and variables."""
    computed: set[Node] = set()
    for node in graph.nodes:
        starts = node.op is PLACEHOLDER or next(resources_of(node), None) is not None
        if starts or any(x.node in computed for x in node.inputs):
            computed.add(node)
    read = dict.fromkeys(x for node in graph.nodes if _is_of_gradient(node) for x in node.inputs)
    return [x for x in read if x.node in computed and x.node.inputs and _is_kept(x)]


def _is_kept(x: Tensor) -> bool:
    """Return True if a value of an ordinary node has memory of its own: shapes have next to none."""
    return not _is_of_gradient(x.node) and x.dtype != VARIANT and x.node.op.traits.memory is not Memory.METADATA


def _is_of_gradient(node: Node) -> bool:
    return node.name.startswith(_GRADIENTS)


def _elements(spec: Spec, extent: int) -> int:
    return prod(extent if each is None else each for each in spec.shape or ())


def _bytes(spec: Spec, extent: int) -> int:
    return _elements(spec, extent) * spec.dtype.itemsize
