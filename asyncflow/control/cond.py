"""`cond`: runs one of two branches (EuroSys '18 §4.2)."""

from __future__ import annotations

from typing import TYPE_CHECKING, overload

from asyncflow.control.body import add_outer_controls, as_predicate, result_tensor, user_function
from asyncflow.control.primitives.switch import check_predicate
from asyncflow.errors import DTypeError
from asyncflow.graph.building.build import TensorLike, graph_for
from asyncflow.graph.graph import Subgraph
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import define
from asyncflow.graph.structured import CondNode, join_captures
from asyncflow.graph.values import nest
from asyncflow.graph.values.dtypes import dtype_name
from asyncflow.graph.values.shapes import relax
from asyncflow.graph.values.spec import Spec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from asyncflow.control.nest_types import N
    from asyncflow.values import Nest


def _infer(pred: Spec, *captures: Spec, true_branch: Subgraph, false_branch: Subgraph) -> tuple[Spec, ...]:
    check_predicate(pred)
    pairs = zip(true_branch.results, false_branch.results, strict=True)
    return tuple(Spec(a.dtype, relax(a.shape, b.shape)) for a, b in pairs)


COND = define("cond", _infer, node_type=CondNode)


@overload
def cond(pred: TensorLike, true_fn: Callable[[], N], false_fn: Callable[[], N], *, name: str | None = None) -> N: ...
@overload
def cond(
    pred: TensorLike, true_fn: Callable[[], None], false_fn: Callable[[], None], *, name: str | None = None
) -> Node: ...
@overload
def cond(
    pred: TensorLike, true_fn: Callable[[], Nest], false_fn: Callable[[], Nest], *, name: str | None = None
) -> Nest: ...


def cond(
    pred: TensorLike, true_fn: Callable[[], Nest], false_fn: Callable[[], Nest], *, name: str | None = None
) -> Nest:
    """Return the results of `true_fn` if `pred` holds, else of `false_fn`; only that branch's nodes run.

    Each function is called once, while the graph is built, and may use any tensor around it. A fetch of one of several
    results runs only the nodes it needs. In a graph with ordered effects it also runs all effects of the branch taken.

    Args:
        pred: a boolean with one element. A Python bool is a constant: both branches are still built.
        true_fn: no arguments; returns any nest of values. A `Node` in it gives a boolean that is true once it ran.
        false_fn: as `true_fn`; the same nest, with the same dtypes. Extents that differ are unknown in the result.
        name: of the node.

    Returns:
        The nest; the node itself if the functions return None.

    Raises:
        GraphError, DTypeError: the branches do not match; the message names the result.
        ShapeError: `pred` has several elements.

    >>> import asyncflow as af
    >>> with af.Graph():
    ...     x = af.placeholder("float32", ())
    ...     y = af.cond(x > 0, lambda: x, lambda: -x)
    >>> y
    <Tensor cond:0 float32[]>
    """
    functions = user_function(true_fn, "true_fn", 0, ""), user_function(false_fn, "false_fn", 0, "")
    graph = graph_for(pred)
    predicate = graph.import_tensor(as_predicate(pred, "the predicate of cond"))
    check_predicate(predicate.spec)
    label = graph.unique_name("cond" if name is None else name)
    branches = Subgraph(graph, f"{label}/true"), Subgraph(graph, f"{label}/false")
    returned = []
    for branch, fn in zip(branches, functions, strict=True):
        with branch:
            returned.append(fn())
    structure = _match(label, branches, returned)
    node = add_cond(predicate, branches, label)
    return structure.unflatten(node.outputs) if node.outputs else node


def add_cond(predicate: Tensor, branches: Sequence[Subgraph], label: str) -> Node:
    """Adds the node of a `cond` whose branches, true first, are built; `label` is a name reserved for it."""
    captured = join_captures(branches, 0)
    attrs = {"true_branch": branches[0], "false_branch": branches[1]}
    specs = _infer(predicate.spec, **attrs)
    node = predicate.graph.add_node(COND, [predicate, *captured], attrs, specs, reserved_name=label)
    add_outer_controls(node)
    return node


def effects_advice(returned: Sequence[Nest]) -> str:
    """Return advice on differing branches, if one of them returns None."""
    return "; for branches that only have effects return None from both" if any(x is None for x in returned) else ""


def _match(label: str, branches: tuple[Subgraph, Subgraph], returned: list[Nest]) -> nest.Structure:
    true_leaves, structure = nest.flatten(returned[0])
    rule = f"the branches of {label} return different nests (true_fn first)"
    false_leaves = nest.match(structure, returned[1], rule, advice=effects_advice(returned))
    for path, on_true, on_false in zip(structure.paths("result"), true_leaves, false_leaves, strict=True):
        a = result_tensor(branches[0], on_true, on_false if isinstance(on_false, Tensor) else None)
        b = result_tensor(branches[1], on_false, a)
        if a.dtype != b.dtype:
            raise DTypeError(
                f"{path} of {label} is {dtype_name(a.dtype)} in true_fn and {dtype_name(b.dtype)} in false_fn; "
                f"convert one with af.astype"
            )
        branches[0].results.append(a)
        branches[1].results.append(b)
    return structure
