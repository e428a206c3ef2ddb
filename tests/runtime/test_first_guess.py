"""First runs: code that may be long does not begin on the event loop, and code that proves short comes back to it."""

from __future__ import annotations

import threading
from math import inf
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.devices.machine.cost import INLINE_LIMIT_NS
from asyncflow.runtime.executor.kernels.first_guess import first_guess
from tests.clocks import LIGHT_NS, WorkClock
from tests.faults.kernels import INT
from tests.patience import PATIENCE_S

LOOP_THREAD = threading.current_thread().name


def where(trace: af.Trace, op: str) -> list[str]:
    """The streams on which the nodes of an op computed."""
    return [firing.stream for firing in trace.firings if firing.op == op]


def guessed(fetch: af.Tensor, *feeds: Any) -> float:
    """The first guess at the node that makes `fetch`, in ns, on these values."""
    session = af.Session()
    plan = session.plan(fetch, list(dict.fromkeys(fetch.node.inputs)))
    (node,) = [node for node in plan.partitions[0].nodes if node.name == fetch.node.name]
    return first_guess(node, feeds).predict_ns(sum(np.size(value) for value in feeds))


async def test_an_unmeasured_function_goes_to_a_thread_and_comes_back(work: WorkClock, graph: af.Graph) -> None:
    """Behaviour 95: a function that blocks does not block the loop; a short function is called there, once known."""
    threads = list[str]()

    @af.op(outputs=INT)
    def mine(v: Any) -> Any:
        threads.append(threading.current_thread().name)
        work.work(LIGHT_NS)
        return v

    x = af.placeholder("int64", ())
    fetch = mine(x)
    async with af.Session(graph) as session:
        for _ in range(9):
            await session.run(fetch, {x: 1})
    assert [thread == LOOP_THREAD for thread in threads] == [False] * 8 + [True]


def test_a_write_to_a_table_takes_as_long_as_its_rows(graph: af.Graph) -> None:
    """Fault F37: the result is only the positions, and the loop does not copy large rows."""
    table = af.Table(4, af.spec("float32", (1 << 20,)))
    row, rows = af.placeholder("float32", (1 << 20,)), af.placeholder("float32", (None, 1 << 20))
    index = af.placeholder("int64", ())
    assert guessed(table.append(row), np.ones(1 << 20, np.float32)) > INLINE_LIMIT_NS
    assert guessed(table.append(rows), np.ones((2, 1 << 20), np.float32)) > INLINE_LIMIT_NS
    assert guessed(table.write(index, row), np.int64(1), np.ones(1 << 20, np.float32)) > INLINE_LIMIT_NS
    small = af.Table(4, af.spec("float32", (8,)))
    assert guessed(small.append(af.placeholder("float32", (8,))), np.ones(8, np.float32)) < INLINE_LIMIT_NS


async def test_a_function_that_says_that_it_is_short_is_believed(graph: af.Graph) -> None:
    threads: list[str] = []

    @af.op(outputs=INT, cost=10.0)
    def mine(v: Any) -> Any:
        threads.append(threading.current_thread().name)
        return v

    async with af.Session(graph) as session:
        await session.run(mine(af.constant(1)))
    assert threads == [LOOP_THREAD]


async def test_a_run_that_a_function_waits_for_finds_out_on_the_loop(graph: af.Graph) -> None:
    """Fault F65: a function on a thread may wait for a run with another function that is not known to be long."""
    asked: list[Any] = []
    inner = af.op(outputs=INT, name="inner")(lambda v: v + 1)(af.constant(1))
    async with af.Session(graph) as session:

        @af.op(outputs=INT)
        def outer(v: Any) -> Any:
            asked.append(session.run_threadsafe(inner).result(PATIENCE_S))
            return v

        await session.run(outer(af.constant(1)))
    assert asked == [2]


@pytest.mark.parametrize("regions", [True, False])
@pytest.mark.parametrize("shape", [(None, None), None, (600, 600)], ids=str)
async def test_one_large_product(graph: af.Graph, shape: Any, regions: bool) -> None:
    """A plan of one node asks for the shapes, in the run if the graph does not know them."""
    x = af.placeholder("float64", shape)
    trace = af.Trace(detail="region")
    async with af.Session(graph, regions=regions) as session:
        await session.run(af.matmul(x, x), {x: np.ones((600, 600))}, trace=trace)
    (stream,) = where(trace, "matmul")
    assert stream.startswith("compute")


@pytest.mark.parametrize("regions", [True, False])
async def test_what_values_make_large(graph: af.Graph, regions: bool) -> None:
    """Inputs of one element say nothing of the time that `arange` and what follows will take."""
    n = af.placeholder("int64", ())
    total = af.sum(af.arange(n))
    trace = af.Trace(detail="region")
    async with af.Session(graph, regions=regions) as session:
        assert await session.run(total, {n: 1_000}, trace=trace) == 499_500
    first = where(trace, "region" if regions else "arange")[0]
    assert first.startswith("compute")


def test_guesses(graph: af.Graph) -> None:
    """The known shapes count, and assumed ones never do."""
    x = af.placeholder("float32", (None, None))
    small, large = np.ones((10, 10), np.float32), np.ones((2_000, 2_000), np.float32)
    for fetch in (af.matmul(x, x), af.einsum("ij,jk->ik", x, x), af.tanh(x)):
        inputs = len(fetch.node.inputs)
        assert guessed(fetch, *[small] * inputs) < INLINE_LIMIT_NS / 4
        assert INLINE_LIMIT_NS < guessed(fetch, *[large] * inputs) < inf
    n = af.placeholder("int64", ())
    assert guessed(af.arange(n), np.int64(3)) == inf
    assert guessed(af.reshape(x, af.stack([n, -1])), large, np.array([-1, 1])) < INLINE_LIMIT_NS


N = 90_000
LONG: dict[str, tuple[Any, ...]] = {
    "sort": (af.sort, np.ones(N)),
    "argsort": (af.argsort, np.ones(N)),
    "top_k": (lambda x: af.top_k(x, 5)[0], np.ones(N)),
    "unique": (af.unique_values, np.ones(N)),
    "eigvalsh": (af.linalg.eigvalsh, np.ones((2_000, 8, 8))),
    "solve": (lambda x: af.linalg.solve(x, x), np.ones((2_000, 8, 8))),
    "gamma": (lambda x: af.random.gamma(N, alpha=x), np.array(2.0)),
    "categorical": (af.random.categorical, np.ones((N // 10, 10))),
    "strings": (lambda x: af.astype(x, "string"), np.ones(N, np.int64)),
    "std": (lambda x: af.std(x, axis=0), np.ones((N, 2))),
    "logsumexp": (lambda x: af.logsumexp(x, axis=0) * 2.0, np.ones((2 * N, 2))),
    "rows": (lambda x: x[:, af.constant(np.zeros(N, np.int64))], np.ones((2, 3))),
    "index_add": (lambda x: af.index_add(x, np.zeros(N, np.int64), x), np.ones(N)),
}


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("name", LONG)
async def test_what_holds_the_loop_goes_to_a_thread(graph: af.Graph, name: str, known: bool) -> None:
    """Behaviour 95: each of these takes 3 to 30 ms; a cost rule that expects less than the work is would leave it on
    the loop."""
    build, value = LONG[name]
    x = af.placeholder(value.dtype, value.shape if known else (None,) * value.ndim)
    y = build(x)
    async with af.Session(graph) as session:
        plan = session.plan(y, [x])
        (node,) = [node for node in plan.partitions[0].nodes if node.name == y.node.name or node.region is not None]
        inputs = [tensor.node.attrs.get("value", value) for tensor in node.source.inputs]
        assert first_guess(node, inputs).predict_ns(value.size) > INLINE_LIMIT_NS


async def test_a_first_sort_is_on_a_thread(graph: af.Graph) -> None:
    """Behaviour 95."""
    x = af.placeholder("float64", (None,))
    trace = af.Trace(detail="region")
    async with af.Session(graph) as session:
        await session.run(af.argsort(x), {x: np.zeros(N)}, trace=trace)
    (stream,) = where(trace, "argsort")
    assert stream.startswith("compute")


def test_inputs_that_do_not_fit_are_for_the_kernel_to_refuse(graph: af.Graph) -> None:
    """Behaviour 93: an estimate never raises."""
    x, y = af.placeholder("float32", None), af.placeholder("float32", None)
    assert guessed(af.matmul(x, y), np.ones((3, 4)), np.ones((5, 6))) > 0


async def test_other_coroutines_go_on_while_a_new_function_blocks(graph: af.Graph) -> None:
    """A function that sleeps ends because the event loop goes on: it would be waiting for itself."""
    gone_on = threading.Event()

    @af.op(outputs=INT)
    def waits(v: Any) -> Any:
        assert gone_on.wait(PATIENCE_S)
        return v

    async with af.Session(graph) as session:
        loop_goes_on = session._bind()
        loop_goes_on.call_soon(gone_on.set)
        assert await session.run(waits(af.constant(4))) == 4
