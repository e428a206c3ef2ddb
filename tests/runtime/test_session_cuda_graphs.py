"""Sessions that replay regions as CUDA graphs, and loops that the card drives itself."""

from __future__ import annotations

import gc
import math
import random
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.devices.captures import WARM_UPS
from asyncflow.devices.cuda.graphs import loop_launch as cuda_while_launch
from tests.conftest import small_cards
from tests.fake_cupy import FakeCupy


async def test_a_region_is_captured_and_gives_the_same() -> None:
    with small_cards(0):
        with af.Graph() as graph:
            x = y = af.placeholder("float32", (64,))
            for _ in range(5):  # a few kernels more than the copies around a graph
                y = af.tanh(y * 2 + 1) - af.max(y)
        async with af.Session(graph, ["cuda:0"], cuda_graphs=True) as session:
            for n in range(6):
                fed = np.linspace(-1, n, 64, dtype=np.float32)
                found = await session.run(y, {x: fed})
                want = fed
                for _ in range(5):
                    want = np.tanh(want * 2 + 1) - want.max()
                np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)
            assert any("CUDA graph" in buffer.label for buffer in session.devices[0].memory.top(100))


@pytest.mark.parametrize("in_loop", [False, True], ids=["straight", "loop"])
async def test_calls_that_fail_leave_the_graphs_of_others(in_loop: bool) -> None:
    with small_cards(0) as cupy:
        with af.Graph() as graph:
            x, y = af.placeholder("float32", (None,)), af.placeholder("float32", (None,))
            z = x + y
            if in_loop:
                z = af.while_loop(lambda i, _: i < 6, lambda i, z: (i + 1, af.tanh(z) - af.max(z) + y), (0, z))[1]
            else:
                for _ in range(3):
                    z = af.tanh(z) - af.max(z)
        three, four = np.ones(3, np.float32), np.ones(4, np.float32)
        async with af.Session(graph, ["cuda:0"], cuda_graphs=True) as session:
            expected = [await session.run(z, {x: four, y: four}) for _ in range(WARM_UPS)]
            for _ in range(WARM_UPS + 1):  # of a client whose every request is wrong
                with pytest.raises(af.KernelError, match="broadcast"):
                    await session.run(z, {x: three, y: four})
            cupy.engine.launches.clear()
            np.testing.assert_array_equal(await session.run(z, {x: four, y: four}), expected[0])
            assert launched(cupy).count("graph") == 1


@pytest.mark.parametrize(
    ("options", "graphs"), [({}, 0), ({"device_while": True}, 1), ({"cuda_graphs": True}, 1)], ids=str
)
async def test_graphs_run_only_where_asked_for(options: dict[str, Any], graphs: int) -> None:
    with small_cards(0) as cupy:
        with af.Graph() as graph:
            x = y = af.placeholder("float64", (64,))
            for _ in range(5):  # a few kernels more than the copies around a graph
                y = af.tanh(y * 2 + 1) - af.max(y)
            if "cuda_graphs" not in options:
                (y,) = af.while_loop(lambda y: af.sum(y) < 50, lambda y: (y * 1.5 + 0.01,), (y * y,))
        async with af.Session(graph, ["cuda:0"], **options) as session:
            for _ in range(5):  # a region is captured once it has run a few times
                cupy.engine.launches.clear()
                await session.run(y, {x: np.ones(64)})
            assert launched(cupy).count("graph") == graphs


@pytest.mark.parametrize("limit", [0.5, 3.0, 1e6])
async def test_a_loop_that_decides_by_arrays_runs_on_the_card(limit: float) -> None:
    with small_cards(0):
        with af.Graph() as graph:
            x = af.placeholder("float64", (8,))
            (y,) = af.while_loop(lambda y: af.sum(y) < limit, lambda y: (y * 1.5 + 0.01,), (x,))
        want = np.full(8, 0.1)
        while want.sum() < limit:
            want = want * 1.5 + 0.01
        async with af.Session(graph, ["cuda:0"], device_while=True) as session:
            for _ in range(3):
                np.testing.assert_allclose(await session.run(y, {x: np.full(8, 0.1)}), want)
            assert "device" in session.plan(y, [x]).explain()


async def test_a_loop_on_the_card_uses_numbers_of_the_host() -> None:
    with small_cards(0):
        with af.Graph() as graph:
            x, factor, limit = af.placeholder("float64", (8,)), *(af.placeholder("float64", ()) for _ in range(2))
            (y,) = af.while_loop(lambda y: af.sum(y) < limit, lambda y: (y * factor,), (x,))
        async with af.Session(graph, ["cuda:0"], device_while=True) as session:
            found = await session.run(y, {x: np.ones(8), factor: 2.0, limit: 50.0})
            np.testing.assert_array_equal(found, np.full(8, 8.0))
            assert "device" in session.plan(y, [x, factor, limit]).explain()


def chain(x: af.Tensor) -> af.Tensor:
    for _ in range(20):
        x = af.tanh(x) - af.max(x)
    return x


async def test_graphs_give_way_when_memory_is_short_the_longest_unused_first() -> None:
    with small_cards(0):
        with af.Graph() as graph:
            first, second, large = (af.placeholder("float32", (size,)) for size in (7_000, 3_500, None))
            programs = {x: chain(x) for x in (first, second)}
            sum_of_large = af.sum(large)
        limit = 256 << 10
        async with af.Session(graph, ["cuda:0"], cuda_graphs=True, memory_limit=limit) as session:
            memory = session.devices[0].memory

            async def run(x: af.Tensor, times: int) -> str:
                assert x.shape is not None
                fed, y = np.linspace(-1, 1, x.shape[0] or 0, dtype=np.float32), programs[x]
                results = [await session.run(y, {x: fed}) for _ in range(times)]
                assert len({result.tobytes() for result in results}) == 1
                return session.plan(y, [x]).explain().partition("comes again: ")[2].partition("\n")[0]

            made, gone = "1 made, for 1 kind of inputs", "0 made, for 0 kinds of inputs; memory was short for earlier"
            assert await run(second, WARM_UPS + 1) == made
            before = memory.used
            assert await run(first, WARM_UPS + 1) == made
            assert await run(second, 1) == made
            held = memory.used
            # More than is free, and less than what is with one graph less.
            size = (limit - held + (held - before) // 2) // 4
            assert await session.run(sum_of_large, {large: np.ones(size, np.float32)}) == size
            explained = {x: session.plan(y, [x]).explain() for x, y in programs.items()}
            assert gone in explained[first]
            assert made in explained[second]
            assert 0 < memory.used < held
            # Much later it gets one again.
            assert "0 made, for 1 kind" in await run(first, 4 * WARM_UPS)
            assert f"{made}; memory was short" in await run(first, 1)


async def test_a_plan_tells_the_memory_of_its_graphs() -> None:
    with small_cards(0), af.Graph() as graph:
        x = af.placeholder("float32", (None,))
        y = chain(x)
        async with af.Session(graph, ["cuda:0"], cuda_graphs=True) as session:
            memory = session.devices[0].memory
            before = memory.used
            for size in (1 << 12, 1 << 11):
                await session.warm_up(y, {x: np.zeros(size, np.float32)})
            told = session.plan(y, [x]).explain(memory=True).splitlines()[-3:]
            total, *each = [int(re.search(r": ([\d,]+) bytes", line)[1].replace(",", "")) for line in told]  # type: ignore[index]
            assert told[0].startswith(f"2 CUDA graphs on cuda:0: {total:,} bytes in all, as graphs share temporary")
            assert total == memory.used - before
            assert max(each) < total < sum(each)


@pytest.mark.slow
async def test_nothing_is_left_of_a_thousand_captures() -> None:
    """Of regions with variables, loops and results that are held, and of graphs that give way or are forgotten."""
    with small_cards(0) as cupy:
        with af.Graph() as graph:
            x = af.placeholder("float32", (None,))
            w = af.Variable(np.float32(0), name="w")
            y = x
            for _ in range(4):
                y = af.tanh(y * 2 + 1) - af.max(y)
            step = w.assign_add(af.max(y))
        async with af.Session(graph, ["cuda:0"], cuda_graphs=True) as session:
            memory, fed = session.devices[0].memory, np.linspace(-1, 1, 64, dtype=np.float32)
            (region,) = [
                node for node in session.plan([y, step], [x]).partitions[0].root.nodes if node.region is not None
            ]
            graphs = region.kernel.graphs  # type: ignore[union-attr]
            used: list[int] = []
            queues: list[int] = []
            for number in range(1000):
                value = fed[: 60 + number % 5].copy()
                await session.warm_up([y, step], {x: value})
                assert "made" in str(graphs)
                await session.run([y, step], {x: value})
                assert len(graphs.made) == 1
                graphs.clear()
                if number in (9, 999):
                    gc.collect()
                    cupy.wait_idle()
                    used.append(memory.used)
                    queues.append(len(cupy.engine.all_queues()))
            assert used[0] == used[1]
            assert queues[0] >= queues[1] - 1
            assert cupy.engine.captures == []


async def test_memory_of_a_graph_without_arrays_outside_stays() -> None:
    """Only variables and a counter come in and go out, and the arrays of an iteration are at addresses of the graph."""
    with small_cards(0) as cupy:
        with af.Graph() as graph:
            w = af.Variable(np.array([3.0, -2.0]), name="w")

            def step(i: af.Tensor) -> af.Tensor:
                with af.control_dependencies([w.assign_sub(af.tanh(af.square(w.read()) - 1) / 8)]):
                    return af.identity(i + 1)

            steps = af.while_loop(lambda i: i < 20, step, 0)
        async with af.Session(graph, ["cuda:0"], cuda_graphs=True) as session:
            for _ in range(WARM_UPS + 3):
                assert await session.run(steps) == 20
            assert launched(cupy).count("graph") == 3
            want = np.array([3.0, -2.0])
            for _ in range(20 * (WARM_UPS + 3)):
                want = want - np.tanh(want * want - 1) / 8
            np.testing.assert_allclose(await session.run(w), want, rtol=1e-9)


# -- branches and loops inside -----------------------------------------------------------------------------------------


@asynccontextmanager
async def on_the_card(graph: af.Graph, seed: int = 0, **options: Any) -> AsyncIterator[tuple[af.Session, FakeCupy]]:
    """A session whose card runs loops by itself."""
    with small_cards(seed) as cupy:
        async with af.Session(graph, ["cuda:0"], device_while=True, **options) as session:
            yield session, cupy


def launched(cupy: FakeCupy) -> list[str]:
    """Return the names of the launches, without copies."""
    return [name for _, name in cupy.engine.launches if "cop" not in name and name != "poison"]


def collatz(n: af.Tensor) -> Any:
    def step(n: af.Tensor, steps: af.Tensor, largest: af.Tensor) -> Any:
        n = af.cond(n % 2 == 0, lambda: n // 2, lambda: 3 * n + 1)
        return n, steps + 1, af.maximum(largest, n)

    return af.while_loop(lambda n, *_: n != 1, step, (n, 0, n))


@pytest.mark.parametrize("start", [1, 2, 27])
async def test_a_branch_in_a_loop_runs_on_the_card(start: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_while_launch, "LONG_S", math.inf)  # one launch, however busy the machine is
    with af.Graph() as graph:
        x = af.placeholder("float64", (1,))  # the host would keep fed integers, and drive the loop by itself
        n, steps, largest = collatz(af.astype(af.sum(x), "int64"))
    want = [1, 0, start]
    k = start
    while k != 1:
        k = k // 2 if k % 2 == 0 else 3 * k + 1
        want = [1, want[1] + 1, max(want[2], k)]
    async with on_the_card(graph) as (session, cupy):
        for _ in range(2):
            assert await session.run([n, steps, largest], {x: np.asarray([start], float)}) == want
        cupy.engine.launches.clear()
        assert await session.run([n, steps, largest], {x: np.asarray([start], float)}) == want
        assert launched(cupy).count("graph") == 1
        assert not any("floor_divide" in name or "multiply" in name for name in launched(cupy))


def newton(a: af.Tensor, limit: float = 1e-9) -> af.Tensor:
    (root,) = af.while_loop(lambda r: af.max(af.abs(r * r - a)) > limit, lambda r: ((r + a / r) * 0.5,), (a,))
    return root


async def test_loops_in_branches_in_loops_run_on_the_card() -> None:
    with af.Graph() as graph:
        x = af.placeholder("float64", (3,))

        def body(y: af.Tensor, taken: af.Tensor) -> Any:
            root, k = af.cond(af.max(y) > 5, lambda: (newton(y), 1), lambda: (y * 1.25, 2))
            return root + 0.125, taken * 10 + k

        found = af.while_loop(lambda y, taken: af.logical_and(taken < 10_000, af.sum(y) < 1e6), body, (x, 0))
    fed = {x: np.asarray([0.5, 3.0, 4.0])}
    async with af.Session(graph) as cpu:
        want = await cpu.run([*found], fed)
    async with on_the_card(graph) as (session, cupy):
        for _ in range(2):
            y, taken = await session.run([*found], fed)
            np.testing.assert_allclose(y, want[0], rtol=1e-9)
            assert taken == want[1]
        assert "graph" in launched(cupy)


@pytest.mark.parametrize("limit", [5, 40])
async def test_the_limit_holds_for_loops_inside(limit: int) -> None:
    with af.Graph() as graph:
        x = af.placeholder("float64", (2,))

        def body(y: af.Tensor) -> Any:
            (y,) = af.while_loop(lambda z: af.max(z) % 10 != 9, lambda z: (z + 1,), (y + 1,), name="inner")
            return (y,)

        (y,) = af.while_loop(lambda y: af.max(y) < 29, body, (x,), name="outer")
    async with on_the_card(graph, max_iterations=limit) as (session, _):
        if limit >= 9:
            assert (await session.run(y, {x: np.zeros(2)})).tolist() == [29, 29]
        else:
            with pytest.raises(af.KernelError, match="loop inner reached max_iterations=5") as caught:
                await session.run(y, {x: np.zeros(2)})
            assert (caught.value.node, caught.value.op) == ("outer/body/inner", "while")
        assert (await session.run(y, {x: np.full(2, 27.0)})).tolist() == [29, 29]


class Programs:
    """Random graphs of nested branches and loops, over a vector, a matrix and a counter."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def update(self, x: af.Tensor, y: af.Tensor, k: af.Tensor) -> Any:
        choices: list[Callable[[], Any]] = [
            lambda: (af.tanh(x) + y[0, 1], y, k + 1),
            lambda: (x * 0.5, af.permute_dims(y, (1, 0)), k),
            lambda: (x, y * 0.5 + af.mean(x), k * 3 % 7),
            lambda: (x + af.astype(k % 5, "float64"), y, k),
            lambda: (x, y + 0.25, af.constant(2)),
            lambda: (af.where(x > 1, x, -x), af.full((2, 2), 0.5), k - 1),
            lambda: (x[::-1], y, k),
        ]
        return self.random.choice(choices)()

    def predicate(self, x: af.Tensor, y: af.Tensor, k: af.Tensor) -> af.Tensor:
        choices: list[Callable[[], af.Tensor]] = [
            lambda: k % 2 == 0,
            lambda: af.sum(x) > af.sum(y),
            lambda: af.all(x < 1),
            lambda: af.max(y) < 2,
        ]
        return self.random.choice(choices)()

    def block(self, depth: int, values: Any) -> Any:
        for _ in range(self.random.randint(0, 3)):
            kind = self.random.choice(["update", "update", "branch", "loop"] if depth else ["update"])
            if kind == "update":
                values = self.update(*values)
            elif kind == "branch":
                here = values
                sides = [lambda: self.block(depth - 1, here)] * 2  # noqa: B023 - called at once
                values = af.cond(self.predicate(*values), *sides)
            else:
                values = self.loop(depth, values)
        return values

    def loop(self, depth: int, values: Any) -> Any:
        most = self.random.randint(0, 3)
        *values, _ = af.while_loop(
            lambda *v: af.logical_and(v[3] < most, self.predicate(*v[:3])),
            lambda *v: (*self.block(depth - 1, v[:3]), v[3] + 1),
            (*values, 0),
        )
        return tuple(values)

    def program(self, x: af.Tensor, y: af.Tensor, k: af.Tensor) -> Any:
        return af.while_loop(
            lambda i, x, *_: af.logical_and(i < 4, af.sum(x) < 50),
            lambda i, *v: (i + 1, *self.block(3, v)),
            (0, x, y, k),
        )


@pytest.mark.parametrize(
    ("seed", "has_else"), [*((seed, True) for seed in range(8)), *((seed, False) for seed in range(8, 12))]
)
async def test_random_programs_give_what_the_cpu_gives(seed: int, has_else: bool) -> None:
    """Programs with branches without else are driven by the host."""
    with af.Graph() as graph:
        x, y = af.placeholder("float64", (4,)), af.placeholder("float64", (2, 2))
        k = af.placeholder("int64", ())
        results = Programs(seed).program(x, y, k)
    generator = np.random.default_rng(seed)
    feeds = [{x: generator.normal(size=4), y: generator.normal(size=(2, 2)), k: np.int64(n)} for n in (0, seed, seed)]
    async with af.Session(graph) as cpu:
        wanted = [await cpu.run(list(results), feed) for feed in feeds]
    async with on_the_card(graph, seed, debug=True) as (session, cupy):
        cupy.bindings.has_else = has_else
        for feed, want in zip(feeds, wanted, strict=True):
            for left, right in zip(await session.run(list(results), feed), want, strict=True):
                np.testing.assert_allclose(left, right, rtol=1e-9)
                assert np.asarray(left).dtype == np.asarray(right).dtype
        assert "device" in session.plan(list(results), [x, y, k]).explain()
        if has_else:
            assert "graph" in launched(cupy)
