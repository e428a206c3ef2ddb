"""Nodes that a CUDA graph may capture, and loops that a GPU runs by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import asyncflow as af
from asyncflow.compiler.program.extract import extract
from asyncflow.compiler.program.host_values import find_host_values
from asyncflow.compiler.regions.capturable import DEVICE_WHILE, why_host_drives, why_not_captured, why_not_in_graph
from asyncflow.compiler.regions.device_loops import make_device_loops
from asyncflow.compiler.regions.regions import Region
from asyncflow.graph.graph import Graph
from asyncflow.graph.structured import WhileNode
from asyncflow.graph.verify import verify


@pytest.fixture
def x(graph: af.Graph) -> af.Tensor:
    return af.placeholder("float64", (3, 3), name="x")


@pytest.fixture
def n(graph: af.Graph) -> af.Tensor:
    return af.placeholder("int64", (), name="n")


def working(*fetches: af.Tensor) -> Graph:
    """The part of the graph that the fetches need, as passes see it, on one device."""
    graph = fetches[0].graph
    feeds = [node.outputs[0] for node in graph.nodes if node.op.name == "placeholder"]
    extracted = extract(graph, list(fetches), feeds).graph
    for node in extracted.walk():
        node.device = "cuda:0"
    return extracted


def captured(fetch: af.Tensor) -> bool:
    """Return True if all nodes for `fetch` may be captured."""
    graph = working(fetch)
    on_host = find_host_values(graph)
    return all(why_not_in_graph(node, on_host) is None for node in graph.nodes if node.op.name not in ("feed", "fetch"))


YES: dict[str, Callable[[af.Tensor, af.Tensor], af.Tensor]] = {
    "elementwise": lambda x, n: af.tanh(x) * 2 + af.where(x > 0, x, 0.0),
    "reductions": lambda x, n: af.sum(x, axis=0) - af.max(x) + af.mean(x),
    "shapes": lambda x, n: af.permute_dims(af.reshape(x, (9, 1)), (1, 0))[:, 2:],
    "a shape of the host": lambda x, n: af.broadcast_to(af.sum(x), (n, 2)),
    "a counter": lambda x, n: x * af.astype(n + 1, af.float64),
    "an index of the device": lambda x, n: x[af.argmax(x)],
    "a branch on the host": lambda x, n: af.cond(n > 2, lambda: x + 1, lambda: x - 1),
    "products of matrices": lambda x, n: af.matmul(x, x),
    "products in a branch": lambda x, n: af.cond(n > 2, lambda: x @ x, lambda: x),
    "a loop on the host": lambda x, n: af.while_loop(lambda i, y: i < n, lambda i, y: (i + 1, y * 2), (0, x))[1],
}
NO: dict[str, Callable[[af.Tensor, af.Tensor], af.Tensor]] = {
    "cuBLAS by CuPy": lambda x, n: af.tensordot(x, x, axes=1),
    "a branch on the device": lambda x, n: af.cond(af.max(x) > 2, lambda: x + 1, lambda: x - 1),
    "a loop on the device": lambda x, n: af.while_loop(lambda y: af.max(y) < 2, lambda y: y * 2, (x,))[0],
    "sorting": lambda x, n: af.sort(x),
    "a shape that depends on the data": lambda x, n: af.nonzero(x)[0],
    "random numbers": lambda x, n: x + af.random.normal((3, 3)),
    "a shape as data": lambda x, n: af.astype(af.shape(x), af.float64) + 1.0,
}


@pytest.mark.parametrize("name", YES)
def test_what_may_be_captured(x: af.Tensor, n: af.Tensor, name: str) -> None:
    assert captured(YES[name](x, n))


@pytest.mark.parametrize("name", NO)
def test_what_may_not_be_captured(x: af.Tensor, n: af.Tensor, name: str) -> None:
    assert not captured(NO[name](x, n))


def test_variables_are_captured_and_queues_are_not(graph: af.Graph) -> None:
    variable, queue = af.Variable([1.0, 2.0]), af.FIFOQueue(2, af.spec("float64", (2,)))
    assert captured(variable.read() + 1)
    assert captured(variable.assign_add([1.0, 1.0]))
    assert not captured(queue.dequeue() + 1)


@pytest.mark.parametrize(("launches", "pays"), [(1, False), (3, False), (4, True), (20, True)])
def test_a_graph_has_to_save_more_launches_than_it_costs(x: af.Tensor, launches: int, pays: bool) -> None:
    y = x
    for _ in range(launches):
        y = af.tanh(y)
    graph = working(y)
    nodes = [node for node in graph.nodes if node.op.name == "tanh"]
    region = Region(tuple(nodes), tuple(nodes[0].inputs), tuple(nodes[-1].outputs))
    assert (why_not_captured(region, set()) is None) is pays


@pytest.mark.parametrize(("limit", "pays"), [("fed", True), (1, False), (2, True), (10_000, True)])
def test_the_launches_of_a_loop_count_in_each_iteration(
    x: af.Tensor, n: af.Tensor, limit: int | str, pays: bool
) -> None:
    most = n if limit == "fed" else limit
    graph = working(af.while_loop(lambda i, y: i < most, lambda i, y: (i + 1, af.tanh(y) @ x), (0, x))[1])
    (loop,) = (node for node in graph.nodes if node.op.name == "while")
    region = Region((loop,), (*loop.inputs,), (loop.outputs[1],))
    assert (why_not_captured(region, find_host_values(graph)) is None) is pays


# -- loops -------------------------------------------------------------------------------------------------------------


def newton(x: af.Tensor) -> Any:
    return af.while_loop(lambda i, y: af.max(af.abs(y * y - x)) > 1e-6, lambda i, y: (i + 1, (y + x / y) / 2), (0, x))


def inside(x: af.Tensor, body: Callable[[af.Tensor], Any]) -> Any:
    """A loop on the device with that body."""
    return af.while_loop(lambda y: af.max(y) < 9, lambda y: (body(y),), (x,))[0]


LOOPS: dict[str, tuple[bool, Callable[[af.Tensor, af.Tensor], Any]]] = {
    "newton": (True, lambda x, n: newton(x)),
    "bounded": (
        True,
        lambda x, n: af.while_loop(lambda y: af.max(y) < 9, lambda y: y * 2, (x,), maximum_iterations=5),
    ),
    "with a number of the host": (
        True,
        lambda x, n: af.while_loop(lambda y: af.max(y) < 9, lambda y: y + af.astype(n * 2, af.float64), (x,)),
    ),
    "decided by the host": (False, lambda x, n: af.while_loop(lambda i, y: i < n, lambda i, y: (i + 1, y), (0, x))),
    "with products": (True, lambda x, n: af.while_loop(lambda y: af.max(y) < 9, lambda y: y @ y, (x,))),
    "with sorting": (False, lambda x, n: af.while_loop(lambda y: af.max(y) < 9, af.sort, (x,))),
    "with a branch of the host": (
        True,
        lambda x, n: af.while_loop(
            lambda y: af.max(y) < 9, lambda y: af.cond(n > 1, lambda: y + 1, lambda: y * 2), (x,)
        ),
    ),
    "with a branch": (True, lambda x, n: inside(x, lambda y: af.cond(af.max(y) > 1, lambda: y + 1, lambda: y * 2))),
    "with a branch in its predicate": (
        True,
        lambda x, n: af.while_loop(
            lambda y: af.cond(af.max(y) > 1, lambda: af.sum(y) < 9, lambda: True), lambda y: y + 1, (x,)
        ),
    ),
    "with a loop": (True, lambda x, n: inside(x, lambda y: newton(y + 1)[1])),
    "with a loop over a counter": (
        True,
        lambda x, n: inside(x, lambda y: af.while_loop(lambda i, z: i < n, lambda i, z: (i + 1, z + 1), (0, y))[1]),
    ),
    "with a loop in a branch in a loop": (
        True,
        lambda x, n: inside(x, lambda y: inside(y, lambda z: af.cond(af.max(z) > 1, lambda: newton(z)[1], lambda: z))),
    ),
    "with sorting in a branch": (
        False,
        lambda x, n: inside(x, lambda y: af.cond(af.max(y) > 1, lambda: af.sort(y), lambda: y + 1)),
    ),
    "with sorting in a loop": (False, lambda x, n: inside(x, lambda y: inside(y, af.sort))),
    "with branches of two shapes": (
        False,
        lambda x, n: inside(x, lambda y: y + af.sum(af.cond(af.max(y) > 1, lambda: y, lambda: y[:1]))),
    ),
    "with a shape from a branch": (
        False,
        lambda x, n: inside(x, lambda y: y + af.sum(af.ones((af.cond(af.max(y) > 1, lambda: 1, lambda: n),)))),
    ),
    "with a branch of shapes": (
        False,
        lambda x, n: inside(
            x, lambda y: y + af.sum(af.cond(af.max(y) > 1, lambda: af.shape(y), lambda: af.shape(y[:1])))
        ),
    ),
    "with a loop from a shape": (
        False,
        lambda x, n: inside(
            x, lambda y: y + af.sum(af.while_loop(lambda s: af.max(s) < 9, lambda s: s * 2, (af.shape(y),))[0])
        ),
    ),
    "with a shape of the counter of a loop": (
        False,
        lambda x, n: inside(
            x,
            lambda y: af.while_loop(lambda i, z: i < n, lambda i, z: (i + 1, z + af.sum(af.ones((i,)))), (0, y))[1],
        ),
    ),
    "with a loop that does not look at its variables": (
        False,
        lambda x, n: inside(x, lambda y: af.while_loop(lambda z: n > 1, lambda z: z + 1, (y,))[0]),
    ),
    "with a shape that changes": (
        False,
        lambda x, n: af.while_loop(
            lambda y: af.max(y) < 9,
            lambda y: af.concat([y, y + 1]),
            (x,),
            shape_invariants=((None, 3),),
        ),
    ),
    "with a shape of its counter": (
        False,
        lambda x, n: af.while_loop(lambda i, y: af.max(y) < 9, lambda i, y: (i + 1, y + af.sum(af.ones((i,)))), (1, x)),
    ),
}


@pytest.mark.parametrize("name", LOOPS)
def test_loops_of_a_device(x: af.Tensor, n: af.Tensor, name: str) -> None:
    expected, build = LOOPS[name]
    found = build(x, n)
    graph = working(*(found if isinstance(found, tuple | list) else [found]))
    (loop,) = [node for node in graph.nodes if node.op.name == "while"]
    on_host = find_host_values(graph)
    assert isinstance(loop, WhileNode)
    assert (loop.decision not in on_host and why_host_drives(loop, on_host) is None) is expected
    make_device_loops(graph, {"cuda:0"})
    assert any(node.op is DEVICE_WHILE for node in graph.nodes) is expected
    assert not (expected and any(node.subgraphs for node in graph.walk()))
    verify(graph)


def test_a_loop_over_several_devices_stays(x: af.Tensor) -> None:
    """Also where only a branch is elsewhere."""
    y = inside(x, lambda y: af.cond(af.max(y) > 1, lambda: af.tanh(y), lambda: y + 1))
    graph = working(y)
    next(node for node in graph.walk() if node.op.name == "tanh").device = "cuda:1"
    make_device_loops(graph, {"cuda:0", "cuda:1"})
    assert not any(node.op is DEVICE_WHILE for node in graph.walk())


def test_loops_of_other_devices_stay(x: af.Tensor) -> None:
    graph = working(newton(x)[1])
    make_device_loops(graph, {"cuda:1"})
    assert not any(node.op is DEVICE_WHILE for node in graph.walk())


def test_a_loop_in_a_loop_that_the_host_drives(x: af.Tensor, n: af.Tensor) -> None:
    _, y = af.while_loop(lambda i, y: i < n, lambda i, y: (i + 1, newton(y + 1)[1]), (0, x))
    graph = working(y)
    make_device_loops(graph, {"cuda:0"})
    (outer,) = [node for node in graph.nodes if node.op.name == "while"]
    assert [node.op for node in outer.attrs["body"].nodes].count(DEVICE_WHILE) == 1
    verify(graph)


def test_what_follows_from_a_counter_of_the_device_is_not_on_the_host(x: af.Tensor) -> None:
    """A loop that takes a value of another, replaced loop has to find it on the device."""
    count, y = newton(x)
    _, again = af.while_loop(lambda i, z: af.max(z) < 9, lambda i, z: (i + 1, z + 1), (count + 1, y))
    graph = working(count * 2, again)
    make_device_loops(graph, {"cuda:0"})
    on_host = find_host_values(graph)
    loops = [node for node in graph.nodes if node.op is DEVICE_WHILE]
    assert len(loops) == 2
    assert not any(output in on_host for loop in loops for output in loop.outputs)
    assert not any(t in on_host for node in graph.nodes if node.op.name == "multiply" for t in node.outputs)
