"""A batch cut into parts, each with a loop of its own: results stay as they are, and the loops overlap."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import asyncflow as af
from asyncflow.errors import GraphError, KernelError
from asyncflow.graph.values import nest
from asyncflow.testing import virtual_clock
from tests.conftest import OpenSession, small_cards
from tests.vertex.evaluation import H, child_sum, forest, phrase, slotted, slotted_alone, word
from tests.vertex.graphs import batches, ordered

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Run = Callable[..., Awaitable[Any]]

PROGRAMS: dict[str, Any] = {"slotted": slotted, "child_sum": child_sum, "typed": {"word": word, "phrase": phrase}}
TREE = af.InputGraph.from_nested((((0, 1), (2, 3)), ((4, 5), (6, 7))))[0]
own_devices = pytest.mark.asyncio(loop_factories=["asyncio", "uvloop"])


@settings(max_examples=60)
@given(graph=batches(typed=True), count=st.integers(1, 4))
def test_parts_are_whole_samples_one_behind_the_other(graph: af.InputGraph, count: int) -> None:
    """Of about as many vertices each; a part is ordered as it would be alone."""
    parts = [ordered(graph, part=(number, count)) for number in range(count)]
    sizes = [len(part.order) for part in parts]
    starts = np.cumsum([0, *sizes])
    samples = np.asarray(graph.samples).tolist()
    assert starts[-1] == graph.n_vertices
    assert set(starts.tolist()) <= set(samples)
    largest = int(np.diff(samples).max(initial=0))
    assert all(abs(size - graph.n_vertices / count) <= largest for size in sizes)
    for start, stop, part in zip(starts[:-1].tolist(), starts[1:].tolist(), parts, strict=True):
        alone = ordered(af.InputGraph.batch([graph[k] for k in range(len(graph)) if start <= samples[k] < stop]))
        assert (part.order - start).tolist() == alone.order.tolist()
        assert all(map(np.array_equal, part[1:7], alone[1:7]))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "streams"), [("slotted", 2), ("slotted", 3), ("child_sum", 3), ("typed", 2)])
async def test_parts_give_what_the_batch_gives(graph: af.Graph, run: Run, name: str, streams: int) -> None:
    """Gradients too; parts may be empty, and there may be one sample."""
    rng = np.random.default_rng(0)
    fed, x = af.InputGraph.placeholder(types=name == "typed"), af.placeholder("float64", (None, 2))
    initial = af.placeholder("float64", ())
    fetches = []
    for count, policy in ((streams, "agenda"), (1, "breadth_first")):
        found = af.vertex_map(PROGRAMS[name], fed, x, initial=initial, policy=policy, streams=count)
        roots = found.roots[0] if name == "child_sum" else found.roots
        loss = af.sum(af.square(found.pushes["y"])) + af.sum(roots * af.astype(af.shape(roots)[0], "float64"))
        fetches.append((found.pushes, found.roots, af.gradients(loss, [x, initial], unconnected="zero")))
    for sizes in ([5, 1, 6, 2, 7], [4], []):
        types = 2 if name == "typed" else 0
        data = forest(rng, sizes, types) if sizes else af.InputGraph.from_edges(0, [], [] if types else None)
        rows = rng.normal(size=(sum(sizes), 2))
        parts, whole = await run(fetches, {**fed.feeds(data), x: rows, initial: 0.5})
        for got, want in zip(nest.flatten(parts)[0], nest.flatten(whole)[0], strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-14)


async def test_pushes_and_roots_of_parts_are_in_order(graph: af.Graph, run: Run) -> None:
    data = forest(np.random.default_rng(0), [5, 1, 6, 2, 7])
    rows = np.random.default_rng(1).normal(size=(21, 2))
    found = af.vertex_map(slotted, data, rows, streams=2)
    pushed, roots = await run((found.pushes["y"], found.roots))
    want_pushed, want_roots = slotted_alone(data, rows)
    np.testing.assert_allclose(pushed, want_pushed, rtol=1e-12)
    np.testing.assert_allclose(roots, want_roots, rtol=1e-12)


@pytest.mark.slow
async def test_parts_inside_a_loop(graph: af.Graph, run: Run) -> None:
    data = forest(np.random.default_rng(1), [4, 3, 4])
    fed, x = af.InputGraph.placeholder(), af.placeholder("float64", (11, 2))
    totals = []
    for streams in (2, 1):

        def body(i: Any, total: Any, streams: int = streams) -> Any:
            rows = x * af.astype(i + 1, "float64")
            return i + 1, total + af.vertex_map(slotted, fed, rows, streams=streams).pushes["y"]

        totals.append(af.while_loop(lambda i, _: i < 3, body, (0, af.zeros(11)))[1])
    fetches = [(total, af.gradients(af.sum(af.square(total)), x)) for total in totals]
    rows = np.random.default_rng(2).normal(size=(11, 2))
    parts, whole = await run(fetches, {**fed.feeds(data), x: rows})
    for got, want in zip(parts, whole, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-14)


async def test_random_draws_do_not_depend_on_the_parts(open_session: OpenSession) -> None:
    @af.vertex_function(state=af.spec("float64", (H,)), children=2)
    def noisy(v: Any) -> None:
        v.scatter(v.gather(0) + v.gather(1) + af.random.normal((H,), seed=3))

    data = forest(np.random.default_rng(0), [6, 9, 4])
    with af.Graph(seed=7) as graph:
        roots = [af.vertex_map(noisy, data, streams=streams).roots for streams in (1, 2, 3)]
    async with open_session(graph) as session:
        one, two, three = await session.run(roots)
    assert np.array_equal(one, two)
    assert np.array_equal(one, three)


async def test_errors_name_samples_and_vertices_of_the_whole_batch(graph: af.Graph, run: Run) -> None:
    fed, x = af.InputGraph.placeholder(), af.placeholder("float64", (None, H))

    @af.vertex_function(state=af.spec("float64", (H,)), children=1)
    def checked(v: Any) -> None:
        total = v.pull() + v.gather(0)
        af.assert_that(af.sum(total) > 0, "not positive")
        v.scatter(total)

    roots = af.vertex_map(checked, fed, x, streams=2).roots
    chains = af.InputGraph.chain([4, 5, 3])
    rows = np.ones((12, H))
    rows[7] = -9.0
    with pytest.raises(KernelError, match="not positive") as found:
        await run(roots, {**fed.feeds(chains), x: rows})
    assert "vertex_map/checked (sample/vertex)/1/3" in found.value.tag
    assert isinstance(fed.children, af.Tensor)
    cycle = {**fed.feeds(chains), fed.children: np.array([0, 1, 2, 5, 5, 6, 7, 9, 10]), x: rows}
    with pytest.raises(KernelError, match=r"vertex 1 of sample 1 \(5 in the batch\) is of height 1, and has a .* 1;"):
        await run(roots, cycle)
    with pytest.raises(KernelError, match=r"the graph has 12 vertices, and .* of shape \[7,3\]"):
        await run(roots, {**fed.feeds(chains), x: rows[:7]})
    for streams, message in ((0, "1 or more; got 0"), (1.5, "must be an int")):
        with pytest.raises(GraphError, match=message):
            af.vertex_map(checked, fed, x, streams=streams)  # type: ignore[arg-type]


def test_a_function_is_called_once_for_all_parts() -> None:
    calls = []

    @af.vertex_function(state=af.spec("float64", ()), children=1)
    def counted(v: Any) -> None:
        calls.append(v)
        v.scatter(v.pull() + v.gather(0))

    with af.Graph():
        af.vertex_map(counted, af.InputGraph.chain([2, 3]), np.ones(5), streams=2)
    assert len(calls) == 1


# -- streams ---------------------------------------------------------------------------------------------------------


def two_loops(hidden: int) -> tuple[af.Graph, af.Tensor, dict[af.Tensor, Any]]:
    """A product in each set, and its feeds."""
    rng = np.random.default_rng(0)
    u = rng.normal(size=(hidden, hidden)).astype(np.float32) / hidden

    @af.vertex_function(state=af.spec("float32", (hidden,)), children=2)
    def products(v: Any) -> None:
        v.scatter(af.tanh(v.pull() + (v.gather(0) + v.gather(1)) @ u))

    data = af.InputGraph.batch([TREE] * 32)
    with af.Graph() as graph:
        fed, x = af.InputGraph.placeholder(), af.placeholder("float32", (None, hidden))
        roots = af.vertex_map(products, fed, x, streams=2).roots
    return graph, roots, {**fed.feeds(data), x: rng.normal(size=(data.n_vertices, hidden)).astype(np.float32)}


def streams_of(trace: af.Trace) -> dict[str, set[str]]:
    """The compute streams that each of the two loops ran on."""
    found: dict[str, set[str]] = {"sets": set(), "sets_1": set()}
    for firing in trace.firings:
        loop = firing.node.removeprefix("vertex_map/").partition("/")[0]
        if loop in found and firing.stream.startswith("compute"):
            found[loop].add(firing.stream)
    return found


@own_devices
async def test_on_a_card_each_part_has_a_stream() -> None:
    graph, roots, feeds = two_loops(64)
    trace = af.Trace(detail="region")
    with small_cards(0):
        async with af.Session(graph, devices=["cuda:0"], compute_streams=2) as session:
            await session.run(roots, feeds)
            await session.run(roots, feeds, trace=trace)
            (partition,) = session.plan(roots, list(feeds)).partitions
    regions = [(node.stream, inner) for node in partition.nodes for inner in node.region_nodes()]
    loops = {inner.name: stream for stream, inner in regions if inner.op.name == "while"}
    assert loops == {"vertex_map/sets": 0, "vertex_map/sets_1": 1}
    assert {"compute", "compute:1"} <= {firing.stream for firing in trace.firings}


@own_devices
async def test_on_a_cpu_each_part_has_a_thread() -> None:
    graph, roots, feeds = two_loops(512)
    trace = af.Trace(detail="region")
    async with af.Session(graph, devices=["cpu:0"], compute_streams=2) as session:
        await session.run(roots, feeds, trace=trace)
    assert sorted(map(sorted, streams_of(trace).values())) == [["compute"], ["compute:1"]]


def test_on_a_simulated_card_the_loops_overlap() -> None:
    """Neither waits for the other to have been launched: they take turns, and each has a stream."""
    graph, roots, feeds = two_loops(512)

    async def traced() -> af.Trace:
        trace = af.Trace()
        async with af.Session(graph, devices=["sim:0"], compute_streams=2) as session:
            await session.run(roots, feeds, trace=trace)
        return trace

    with virtual_clock("v100", host="c++") as clock:
        trace = clock.run(traced())
    products: dict[str, list[int]] = {}
    for firing in trace.firings:
        if firing.op == "matmul":
            products.setdefault(firing.stream, []).append(firing.started_ns)
    assert sorted(products) == ["compute", "compute:1"]
    one, other = products["compute"], products["compute:1"]
    assert len(one) == len(other) == 3
    assert min(other) < max(one)
    assert min(one) < max(other)
