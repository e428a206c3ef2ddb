from __future__ import annotations

import copy
import gc
from weakref import ref

import numpy as np
import pytest

import asyncflow as af
from asyncflow.graph.home import LeftOutputs


def tensors() -> tuple[af.Tensor, af.Tensor]:
    """An input, and a result of a loop, whose graph is gone."""
    with af.Graph():
        x = af.placeholder("float32", (), name="x")
        af.constant(1, name="unused")
        y = af.while_loop(lambda i, a: i < 3, lambda i, a: (i + 1, af.cond(a > 0, lambda: a * 2, lambda: a)), (0, x))[1]
        return x, y


async def test_tensors_run_without_their_graph(session: af.Session) -> None:
    x, y = tensors()
    assert isinstance(y.node.outputs, LeftOutputs)
    assert [await session.run(y, {x: np.float32(k)}) for k in (1, 2)] == [8, 16]
    assert x.graph is y.graph is y.node.graph
    assert session.statistics().plans == 1
    assert await session.run(y + x, {x: np.float32(1)}) == 9


def test_tensors_keep_their_sources() -> None:
    x, y = tensors()
    graph = y.graph
    assert x in x.node.outputs
    assert graph.node("x") is x.node
    with pytest.raises(af.GraphError, match="no node is named 'unused'"):
        graph.node("unused")
    with graph:
        assert af.constant(1, name="x").name == "x_1:0"  # names stay taken
    assert [body.parent for body in y.node.subgraphs] == [graph, graph]
    assert af.parse_graph(af.print_graph(graph)).node("x").op is x.node.op


def test_unreferenced_outputs_are_made_again() -> None:
    with af.Graph():
        _, y = af.split(af.placeholder("float32", (4,)), 2)
    first, second = y.node.outputs
    assert (first.name, first.shape, second) == ("split:0", (2,), y)


async def test_a_body_is_lifted_with_its_rules_without_its_graph(session: af.Session) -> None:
    @af.custom_gradient
    def clipped(x: af.Tensor) -> object:
        return x * 3, lambda grad: grad * 0 + 5

    with af.Graph():
        x = af.placeholder("float32", ())
        y = af.batched(lambda a: af.gradients(af.cond(a > 0, lambda: clipped(a), lambda: a), a))(x)
    assert await session.run(y, {x: np.float32(1)}) == 5


def test_gradients_ask_for_the_graph_where_it_kept_their_needs() -> None:
    """A rule of the user's is not passed over in silence."""

    @af.custom_gradient
    def clipped(x: af.Tensor) -> object:
        return x, lambda grad: grad * 0

    with af.Graph():
        x = af.placeholder("float32", ())
        y, z = clipped(x), af.tanh(x)
    with pytest.raises(af.GraphError, match=r"(?s)graph of .*clipped.* was dropped.*keep the graph.*test_home"):
        af.gradients(y, x)
    assert af.gradients(z, x).shape == ()


async def test_a_constant_that_a_shape_depends_on_is_not_fed_without_its_graph(session: af.Session) -> None:
    """A result of the shape of before would be wrong."""
    with af.Graph():
        n = af.constant(3)
        rows, x = n + 1, af.tanh(af.zeros((2,)))
        y = af.sum(af.ones((rows,))) + af.sum(x)
    del rows
    with pytest.raises(af.FeedError, match="cannot feed constant:0 the value 5"):
        await session.run(y, {n: 5})
    assert await session.run(y, {x: np.ones(2)}) == 6


def test_a_copy_has_a_home_of_its_own() -> None:
    with af.Graph() as graph:
        (y,) = af.while_loop(lambda i: i < 3, lambda i: i + 1, (0,))
    copied = copy.deepcopy(graph)
    node = copied.node(y.node.name)
    assert node.graph is copied is not graph
    assert {inner.graph.root for inner in copied.walk()} == {copied}
    x = copy.deepcopy(y)
    assert x.graph is not graph
    assert x.graph.node(y.node.name) is x.node


@pytest.mark.usefixtures("no_collector")
def test_a_long_chain_ends_without_recursion() -> None:
    with af.Graph() as graph:
        y = af.constant(0)
        for _ in range(20_000):
            y = af.identity(y)
        last = ref(y)
    del graph
    assert y.node.inputs[0].node.op is y.node.op
    del y
    assert last() is None


def test_a_loop_written_by_hand_is_a_circle_that_the_collector_ends() -> None:
    def built() -> tuple[ref[af.Graph], af.Tensor]:
        with af.Graph() as graph:
            entered = af.raw.enter(af.constant(0), "frame")
            merged, _ = af.raw.merge(entered, entered)
        return ref(graph), merged

    graph, merged = built()
    assert merged.graph is graph()
    del merged
    gc.collect()
    assert graph() is None
