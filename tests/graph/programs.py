"""Ops and small programs that the tests of the graph room share; branches and loops are put together by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncflow.errors import DTypeError
from asyncflow.graph.building.build import apply, constant, placeholder
from asyncflow.graph.graph import Graph, Subgraph
from asyncflow.graph.op import Op
from asyncflow.graph.structured import CondNode, WhileNode
from asyncflow.graph.values.dtypes import bool_, int32, promote
from asyncflow.graph.values.shapes import broadcast, relax
from asyncflow.graph.values.spec import Spec

if TYPE_CHECKING:
    from asyncflow.graph.ir import Node, Tensor


def _promoted(a: Spec, b: Spec) -> Spec:
    return Spec(promote([a.dtype, b.dtype]), broadcast([a.shape, b.shape]))


def _less(a: Spec, b: Spec) -> Spec:
    if a.dtype != b.dtype:
        raise DTypeError(f"dtypes {a.dtype} and {b.dtype} differ")
    return Spec(bool_, broadcast([a.shape, b.shape]))


def _cond(pred: Spec, *_: Spec, true_branch: Subgraph, false_branch: Subgraph) -> tuple[Spec, ...]:
    pairs = zip(true_branch.results, false_branch.results, strict=True)
    return tuple(Spec(a.dtype, relax(a.shape, b.shape)) for a, b in pairs)


def _while(*inputs: Spec, n_vars: int, body: Subgraph, cond: Subgraph) -> tuple[Spec, ...]:
    return tuple(tensor.spec for tensor in body.inputs[:n_vars])


def _merge(*inputs: Spec) -> tuple[Spec, Spec]:
    return inputs[0], Spec(int32, ())


ADD = Op(name="test_add", infer=_promoted)
LESS = Op(name="test_less", infer=_less)
HOLD = Op(name="test_hold", infer=lambda *inputs, **attrs: ())
SPLIT = Op(name="test_split", infer=lambda x, *, parts: (x,) * parts)
COND = Op(name="cond", infer=_cond, node_type=CondNode)
WHILE = Op(name="while", infer=_while, node_type=WhileNode)
MERGE = Op(name="merge", infer=_merge)
NEXT_ITERATION = Op(name="next_iteration", infer=lambda x: x)
OPS = {op.name: op for op in (ADD, LESS, HOLD, SPLIT, COND, WHILE, MERGE, NEXT_ITERATION)}


def hold(**attrs: Any) -> Node:
    """A node with nothing but attrs."""
    graph = Graph()
    return graph.add_node(HOLD, (), attrs, (), name="hold")


def add(a: Tensor, b: Tensor, name: str | None = None) -> Tensor:
    return apply(ADD, a, b, name=name)[0]


def counting_loop() -> Graph:
    """``i = 0; while i < limit: i = i + step`` with `limit` captured by the predicate and `step` by the body."""
    with Graph(seed=7) as graph:
        start = constant(0, "int32", name="start")
        limit = placeholder("int32", (), name="limit")
        step = constant(1, "int32", name="step")
        predicate, body = Subgraph(graph, "loop/cond"), Subgraph(graph, "loop/body")
        with predicate:
            predicate.results.append(apply(LESS, predicate.add_input(start.spec, "i"), limit)[0])
        with body:
            body.results.append(add(body.add_input(start.spec, "i"), step))
        for part in (predicate, body):
            inputs = [part.inputs[0], part.import_tensor(limit), part.import_tensor(step)]
            part.inputs[:] = inputs
            part.closed = True
        attrs = {"cond": predicate, "body": body, "n_vars": 1}
        graph.add_node(WHILE, [start, limit, step], attrs, (start.spec,), name="loop")
    return graph


def branching() -> Graph:
    """``x + x if pred else x`` for a vector `x`, after a node that both branches wait for."""
    with Graph() as graph:
        pred = placeholder("bool", (), name="pred")
        x = placeholder("float32", (None,), name="x")
        first = graph.add_node(HOLD, (), {}, (), name="first")
        branches = Subgraph(graph, "pick/true"), Subgraph(graph, "pick/false")
        for branch in branches:
            with branch:
                inner = branch.import_tensor(x)
                branch.results.append(add(inner, inner) if branch is branches[0] else inner)
                branch.import_control(first)
            branch.closed = True
        attrs = {"true_branch": branches[0], "false_branch": branches[1]}
        pick = graph.add_node(COND, [pred, x], attrs, (x.spec,), name="pick")
        pick.control_inputs.append(first)
    return graph


def handwritten_loop() -> Graph:
    """A loop of primitives: a merge whose second input is built after it."""
    with Graph() as graph:
        start = constant(0, "int32", name="start")
        merged = apply(MERGE, start, name="merge")[0]
        following = apply(NEXT_ITERATION, add(merged, start, name="sum"), name="next")[0]
        merged.node.inputs.append(following)
    return graph
