"""Pooled loops: activations of different runs that are stepped together, each with its own result."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
import warnings
from functools import partial
from math import inf
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import asyncflow as af
from asyncflow.runtime.executor.kernels import single_call
from asyncflow.runtime.lines.shares import PATIENCE_S
from asyncflow.runtime.shared import pools, work
from asyncflow.runtime.shared.pools import LoopPool
from tests.conftest import OpenSession
from tests.others import others_end
from tests.patience import PATIENCE_S as PATIENCE

WEIGHTS = np.linspace(-0.4, 0.4, 9, dtype=np.float32).reshape(3, 3)


def recurrent(x: af.Tensor, n: af.Tensor, capacity: int = 4) -> tuple[af.Tensor, af.Tensor]:
    """A loop whose length and input are each activation's own."""
    weights = af.constant(WEIGHTS)

    def body(i: af.Tensor, s: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
        grown = af.cond(af.sum(s) > 0, lambda: s * 0.5, lambda: s + 1)
        return i + 1, af.tanh(grown @ weights + x)

    result = af.while_loop(lambda i, s: i < n, body, (0, x), pool=af.Pool(capacity), name="steps")
    return result[0], result[1]


def recurrent_of(x: np.ndarray[Any, Any], n: int) -> tuple[int, np.ndarray[Any, Any]]:
    s = x
    for _ in range(n):
        s = np.tanh((s * np.float32(0.5) if s.sum() > 0 else s + 1) @ WEIGHTS + x)
    return max(n, 0), s


async def test_activations_join_and_leave(open_session: OpenSession) -> None:
    """Lengths from 0 on, more activations than rows, arrivals at any time: each result is that of the loop alone."""
    with af.Graph() as graph:
        x, n = af.placeholder("float32", (3,), name="x"), af.placeholder("int64", (), name="n")
        fetches = recurrent(x, n)
    random, rows = Random(3), np.random.default_rng(3)
    async with open_session(graph) as session:

        async def request() -> None:
            for _ in range(random.randrange(4)):
                await asyncio.sleep(0)
            start, length = rows.normal(size=3).astype(np.float32), random.randrange(9)
            count, last = await session.run(fetches, {x: start, n: length})
            assert count == length
            np.testing.assert_allclose(last, recurrent_of(start, length)[1], rtol=1e-5, atol=1e-6)

        await asyncio.gather(*(request() for _ in range(25)))
        counts = session.statistics().batches["steps"]
        await others_end()
    assert 1 < counts.largest <= 4


@settings(max_examples=12)
@given(st.data())
async def test_whoever_comes_and_goes(data: st.DataObject) -> None:
    """Fault F42: random arrivals, lengths, capacities, cancels and failures; exact results are equal to the bit."""

    @af.op(outputs=af.spec("int64", ()), rows=True, pure=True)
    def checked(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        if (x == 13).any():
            raise ValueError("13")
        return x + 1

    with af.Graph() as graph:
        x, n = af.placeholder("int64", (), name="x"), af.placeholder("int64", (), name="n")
        y = af.while_loop(lambda s: s < n, checked, x, pool=af.Pool(data.draw(st.integers(1, 5))), name="steps")
    kinds = st.tuples(st.integers(0, 14), st.integers(0, 6), st.integers(0, 5), st.sampled_from(("run", "cancel")))
    asked = data.draw(st.lists(kinds, min_size=1, max_size=12))
    async with af.Session(graph, debug=data.draw(st.booleans())) as session:

        async def request(start: int, steps: int, passes: int, how: str) -> object:
            for _ in range(passes):
                await asyncio.sleep(0)
            run = asyncio.ensure_future(session.run(y, {x: start, n: start + steps}))
            for _ in range(passes if how == "cancel" else 0):
                await asyncio.sleep(0)
            if how == "cancel":
                run.cancel()
            ends: list[object] = await asyncio.gather(run, return_exceptions=True)
            return ends.pop()

        results = await asyncio.gather(*(request(*each) for each in asked))
        for (start, steps, _, how), found in zip(asked, results, strict=True):
            if how == "cancel" and isinstance(found, asyncio.CancelledError):
                continue
            if start <= 13 < start + steps:
                assert isinstance(found, af.KernelError)
            else:
                assert found == start + steps
        del results, found
        await others_end()
        assert session.statistics().runs == 0


@pytest.mark.usefixtures("work")
async def test_steps_are_neither_runs_nor_tasks() -> None:
    """Short steps are calls on the event loop: a request is one run, all requests together need one task for steps."""
    with af.Graph() as graph:
        x, n = af.placeholder("float32", (3,), name="x"), af.placeholder("int64", (), name="n")
        fetches = recurrent(x, n, capacity=16)
    start = np.ones(3, np.float32)
    async with af.Session(graph) as session:
        await asyncio.gather(*(session.run(fetches, {x: start, n: k}) for k in (20, 30)))  # and steps are measured
        before = session.statistics().completed
        requests = [asyncio.ensure_future(session.run(fetches, {x: start, n: 30 + k})) for k in range(10)]
        await asyncio.sleep(0)
        others = asyncio.all_tasks() - {asyncio.current_task(), *requests}
        assert [task.get_coro().__name__ for task in others] == ["drive"]  # type: ignore[union-attr]
        await asyncio.gather(*requests)
        assert session.statistics().completed == before + len(requests) + 1  # one that says who goes on at all


@pytest.mark.usefixtures("work")
async def test_a_lone_activation_is_stepped_as_written() -> None:
    """The bits are the same as without a pool, and many steps share a pass of the event loop."""
    with af.Graph() as graph:
        x = af.placeholder("float32", (64,), name="x")
        weights = af.constant(np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32))

        def loop(pool: af.Pool | None) -> af.Tensor:
            found: af.Tensor = af.while_loop(
                lambda i, _: i < 500, lambda i, s: (i + 1, af.tanh(s @ weights + x)), (0, x), pool=pool
            )[1]
            return found

        fetches = loop(None), loop(af.Pool())
    value = np.linspace(-1, 1, 64, dtype=np.float32)
    async with af.Session(graph) as session:
        await session.run(fetches, {x: value})
        passes = 0

        async def count() -> None:
            nonlocal passes
            while True:
                passes += 1
                await asyncio.sleep(0)

        counting = asyncio.ensure_future(count())
        alone, pooled = await session.run(fetches, {x: value})
        counting.cancel()
        assert alone.tobytes() == pooled.tobytes()
        assert passes < 250


@pytest.mark.usefixtures("work")
async def test_only_where_an_activation_may_join_steps_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other activations may follow when one comes or goes, so the pool makes one step; a full pool steps until a row
    ends.
    """
    with af.Graph() as graph:
        x, n = af.placeholder("float32", (3,), name="x"), af.placeholder("int64", (), name="n")
        loops = {capacity: recurrent(x, n, capacity) for capacity in (2, 3)}
    asked: list[tuple[int, int]] = []
    call = pools._Steps.call

    def noted(steps: pools._Steps, values: list[Any], size: int, most: int) -> list[Any]:
        if not steps.is_one:
            asked.append((len(values[0]), most))
        return call(steps, values, size, most)

    monkeypatch.setattr(pools._Steps, "call", noted)
    start = np.ones(3, np.float32)
    async with af.Session(graph) as session:
        for capacity, fetches in loops.items():
            await asyncio.gather(*(session.run(fetches, {x: start, n: k}) for k in (20, 30)))  # and steps are measured
            asked.clear()
            await asyncio.gather(*(session.run(fetches, {x: start, n: k}) for k in (5, 90)))
            together = [most for rows, most in asked if rows == 2]
            if capacity == 2:
                assert len(together) == 1
                assert together[0] >= 5
            else:
                assert together == [1, 1, 4]  # when they have come, then as long as nobody has


async def test_pools_share_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that is short enough for the event loop is too long for each of two pools: it is a run then, on a
    thread.
    """
    with af.Graph() as graph:
        x, n = af.placeholder("float32", (3,), name="x"), af.placeholder("int64", (), name="n")
        loops = [recurrent(x, n), recurrent(x, n)]
    monkeypatch.setattr(
        "asyncflow.runtime.executor.kernels.single_call.CountedCall.expected_ns", lambda *_: pools._TURN_NS * 0.7
    )
    runs = 0
    run = pools._Steps.run

    def counted(steps: pools._Steps, *given: Any) -> Any:
        nonlocal runs
        runs += 1
        return run(steps, *given)

    monkeypatch.setattr(pools._Steps, "run", counted)
    monkeypatch.setattr(pools, "_BESIDE_NS", 0.0)  # a step each
    feeds = {x: np.ones(3, np.float32), n: 10}
    async with af.Session(graph) as session:
        await asyncio.gather(*(session.run(fetches, feeds) for fetches in loops))  # and steps are measured
        runs = 0
        await session.run(loops[0], feeds)
        assert runs == 0
        await asyncio.gather(*(session.run(fetches, feeds) for fetches in loops))
        assert runs > 10


async def test_variables_that_change_places(open_session: OpenSession) -> None:
    with af.Graph() as graph:
        x, n = af.placeholder("int64", (), name="x"), af.placeholder("int64", (), name="n")
        y = af.while_loop(lambda i, a, b: i < n, lambda i, a, b: (i + 1, b, a), (0, x, x + 1), pool=af.Pool())[1:]
    async with open_session(graph) as session:
        found = await asyncio.gather(*(session.run(y, {x: k, n: k}) for k in range(6)))
        await others_end()
    assert found == [(k, k + 1) if k % 2 == 0 else (k + 1, k) for k in range(6)]


async def test_loops_in_loops_and_branches_share_a_pool(open_session: OpenSession) -> None:
    """Activations of one run, in iterations of a loop around the pooled one and in branches, share it too."""
    with af.Graph() as graph:
        x = af.placeholder("int64", (), name="x")

        def outer(i: af.Tensor, total: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
            def inner() -> af.Tensor:
                loop = af.while_loop(lambda j, s: j < i, lambda j, s: (j + 1, s + x * j), (0, total), pool=af.Pool())
                found: af.Tensor = loop[1]
                return found

            return i + 1, af.cond(i % 2 == 0, inner, lambda: total - 1)

        y = af.while_loop(lambda i, _: i < 7, outer, (0, 0))[1]
    async with open_session(graph) as session:
        found = await asyncio.gather(*(session.run(y, {x: k}) for k in range(5)))
        await others_end()
    for k, value in enumerate(found):
        total = 0
        for i in range(7):
            total = total + sum(k * j for j in range(i)) if i % 2 == 0 else total - 1
        assert value == total


async def test_a_step_that_fails_for_one(open_session: OpenSession) -> None:
    """Behaviour 88: the activation at fault fails with its own node; the others come to their ends."""

    @af.op(outputs=af.spec("int64", ()), rows=True, pure=True)
    def checked(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        if (x == 13).any():
            raise ValueError("13")
        return x + 1

    with af.Graph() as graph:
        x, n = af.placeholder("int64", (), name="x"), af.placeholder("int64", (), name="n")

        def again(s: af.Tensor) -> af.Tensor:
            return checked(s) + 0

        y = af.while_loop(lambda s: s < n, again, x, pool=af.Pool(8), name="steps")
    async with open_session(graph) as session:
        asked = [(k, k + 4) for k in range(14)]
        found = await asyncio.gather(*(session.run(y, {x: a, n: b}) for a, b in asked), return_exceptions=True)
        for (start, end), result in zip(asked, found, strict=True):
            if start <= 13 < end:
                assert isinstance(result, af.KernelError)
                assert result.node.startswith("steps/") and result.tag == f"steps/{13 - start}", str(result)
                assert result.location.function == "again"
                assert result.__notes__ == [f"in steps (pooled_while), built at {y.node.location}"]
                assert isinstance(result.__cause__, ValueError)
            else:
                assert result == end
        del found, result
        assert await session.run(y, {x: 1, n: 3}) == 3
        await others_end()


@pytest.mark.usefixtures("work")
@pytest.mark.parametrize("debug", [False, True])
async def test_unrepeatable_work_fails_its_own_members(debug: bool) -> None:
    """Behaviour 88: elements that may be read once are not read again, one by one; others, that wait, go on."""
    with af.Graph() as graph:
        n = af.placeholder("int64", (), name="n")

        def body(i: af.Tensor, a: af.TensorArray) -> tuple[af.Tensor, af.TensorArray]:
            a = a.write(i, i)
            return i + a.read(af.minimum(i, n)) * 0 + 1, a

        array = af.TensorArray("int64", size=20, element_shape=())
        y = af.while_loop(lambda i, _: i < 6, body, (0, array), pool=af.Pool(2))[0]
    async with af.Session(graph, debug=debug) as session:
        assert await asyncio.gather(*(session.run(y, {n: 9}) for _ in range(2))) == [6, 6]
        found = await asyncio.gather(*(session.run(y, {n: k}) for k in (9, 9, 2, 9, 9, 9)), return_exceptions=True)
        assert [each for each in found if not isinstance(each, BaseException)] == [6] * (len(found) - 2)
        assert all(isinstance(each, af.KernelError) for each in (found[2], found[3]))
        del found
        assert await session.run(y, {n: 9}) == 6
        await others_end()


async def test_memory_that_is_short_for_all_is_enough_for_some() -> None:
    """Activations that do not fit into memory together are stepped in parts, and none of them fails."""
    with af.Graph() as graph:
        x = af.placeholder("float32", (50_000,), name="x")
        loop = af.while_loop(lambda i, _: i < 3, lambda i, s: (i + 1, s * 0.5), (0, x), pool=af.Pool(64))
        y = af.sum(loop[1])
    value = np.ones(50_000, np.float32)
    async with af.Session(graph, memory_limit=2_000_000) as session:
        assert await asyncio.gather(*(session.run(y, {x: value}) for _ in range(16))) == [6250] * 16


@pytest.mark.parametrize(("limit", "fits"), [(1_000_000, True), (100_000, False)])
async def test_tensor_arrays_of_activations_count_for_a_memory_limit(limit: int, fits: bool) -> None:
    with af.Graph() as graph:
        x, n = af.placeholder("float64", (), name="x"), af.placeholder("int64", (), name="n")
        array = af.TensorArray("float64", n, element_shape=())
        found = af.while_loop(
            lambda i, _: i < n, lambda i, a: (i + 1, a.write(i, x)), (0, array), pool=af.Pool(4), name="steps"
        )[1].stack()
    async with af.Session(graph, memory_limit=limit) as session:
        runs = (session.run(found, {x: k, n: 4000}) for k in (1.0, 2.0))
        ends = await asyncio.gather(*runs, return_exceptions=True)
    for value, end in zip((1.0, 2.0), ends, strict=True):
        if fits:
            assert not isinstance(end, BaseException) and np.array_equal(end, np.full(4000, value))
        else:
            assert isinstance(end, af.OutOfMemoryError), end


async def test_a_cancelled_activation_leaves(open_session: OpenSession) -> None:
    """Behaviour 88: an activation that would never end, and a deadline."""
    with af.Graph() as graph:
        n = af.placeholder("int64", (), name="n")
        y = af.while_loop(lambda i: i != n, lambda i: i + 1, 0, pool=af.Pool(8))
    async with open_session(graph) as session:
        endless = asyncio.ensure_future(session.run(y, {n: -1}))
        late = asyncio.ensure_future(session.run(y, {n: -1}, timeout=0.05))
        assert await asyncio.gather(*(session.run(y, {n: k}) for k in range(5))) == list(range(5))
        endless.cancel()
        ends = await asyncio.gather(endless, late, return_exceptions=True)
        assert isinstance(ends[0], asyncio.CancelledError)
        assert isinstance(ends[1], af.DeadlineExceeded)
        del ends
        assert await session.run(y, {n: 4}) == 4
        await others_end()


@pytest.mark.parametrize("capacity", [1, 4])
async def test_cancelled_at_every_pass(open_session: OpenSession, capacity: int) -> None:
    """Fault F18, F20: wherever it is then, one of several, the others are untouched, and it is told once."""
    with af.Graph() as graph:
        x, n = af.placeholder("float32", (3,), name="x"), af.placeholder("int64", (), name="n")
        fetches = recurrent(x, n, capacity)
    start = np.ones(3, np.float32)
    async with open_session(graph) as session:
        alone = [await session.run(fetches, {x: start, n: k}) for k in range(4)]
        for passes in range(9):
            others = [asyncio.ensure_future(session.run(fetches, {x: start, n: k})) for k in range(4)]
            endless = asyncio.ensure_future(session.run(fetches, {x: start, n: 1 << 40}, priority=-1))
            for _ in range(passes):
                await asyncio.sleep(0)
            endless.cancel()
            endless.cancel()  # Fault F24: no other than once
            with pytest.raises(asyncio.CancelledError):
                await endless
            for (count, last), (same_count, same) in zip(await asyncio.gather(*others), alone, strict=True):
                assert count == same_count
                np.testing.assert_allclose(last, same, rtol=1e-5, atol=1e-6)
        await others_end()
        assert session.statistics().runs == 0


async def test_timeouts_around_a_pooled_loop(open_session: OpenSession) -> None:
    """Fault F22, F24: the innermost scope that is over says so; a shielded run goes on, and can be awaited."""
    with af.Graph() as graph:
        n = af.placeholder("int64", (), name="n")
        y = af.while_loop(lambda i: i != n, lambda i: i + 1, 0, pool=af.Pool(8))
    async with open_session(graph) as session:
        for delay in (0.0, 0.02):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(100):
                    async with asyncio.timeout(delay):
                        await session.run(y, {n: -1})
        run = asyncio.ensure_future(session.run(y, {n: 100}))
        waiting = asyncio.ensure_future(asyncio.shield(run))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert await run == 100
        await others_end()


@pytest.mark.real_time
async def test_long_steps_share_a_run_until_an_activation_joins_or_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that are too long for the event loop are made in one run, which joins and cancellations cut short."""
    with af.Graph() as graph:
        x, n = af.placeholder("float32", (3,), name="x"), af.placeholder("int64", (), name="n")
        fetches = recurrent(x, n, capacity=4)
    monkeypatch.setattr(
        "asyncflow.runtime.executor.kernels.single_call.CountedCall.expected_ns", lambda *_: pools._TURN_NS * 2
    )
    monkeypatch.setattr(pools, "_BESIDE_NS", 1e18)
    sizes: list[tuple[bool, int, int]] = []
    run = pools._Steps.run

    async def noted(steps: pools._Steps, values: list[Any], size: int, most: Any) -> Any:
        found = await run(steps, values, size, most)
        sizes.append((steps.is_one, int(found[-1]), int(most)))
        return found

    monkeypatch.setattr(pools._Steps, "run", noted)
    start, endless = np.ones(3, np.float32), 1 << 40
    async with af.Session(graph) as session:
        assert (await session.run(fetches, {x: start, n: 200}))[0] == 200
        assert [made for _, made, _ in sizes] == [200]
        sizes.clear()
        async with asyncio.timeout(PATIENCE):
            running = [asyncio.ensure_future(session.run(fetches, {x: start, n: endless}))]  # stepped alone at first
            for length in (3, endless, 40):
                await asyncio.sleep(0)
                joining = asyncio.ensure_future(session.run(fetches, {x: start, n: length}))
                if length == endless:
                    running.append(joining)
                else:
                    count, last = await joining
                    assert count == length
                    np.testing.assert_allclose(last, recurrent_of(start, length)[1], rtol=1e-5, atol=1e-6)
            for each in running:
                each.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            await others_end()
    assert all(made < endless for _, made, _ in sizes)
    assert any(most == 1 for *_, most in sizes)


async def test_limits_on_iterations(open_session: OpenSession) -> None:
    with af.Graph() as graph:
        n = af.placeholder("int64", (), name="n")
        bounded = af.while_loop(lambda i: i < n, lambda i: i + 1, 0, pool=af.Pool(8), maximum_iterations=5)
        free = af.while_loop(lambda i: i < n, lambda i: i + 1, 0, pool=af.Pool(8), name="free")
    async with open_session(graph, max_iterations=50) as session:
        assert await asyncio.gather(*(session.run(bounded, {n: k}) for k in (0, 3, 5, 9))) == [0, 3, 5, 5]
        assert await session.run(free, {n: 50}) == 50
        with pytest.raises(af.KernelError, match="max_iterations=50") as caught:
            await session.run(free, {n: 51})
        assert (caught.value.node, caught.value.location) == ("free", free.node.location)
        await others_end()


async def test_rows_of_other_shapes_count_their_own_steps(open_session: OpenSession) -> None:
    """Groups are stepped apart: neither a limit nor an error takes the steps of one group for the steps of another."""
    with af.Graph() as graph:
        n, z = af.placeholder("int64", (), name="n"), af.placeholder("float64", (None,), name="z")
        total = af.while_loop(
            lambda i, s: i < n, lambda i, s: (i + 1, s + af.check_numerics(1 / (9 - i)) + z[0]), (0, 0.0),
            pool=af.Pool(8), name="sum",
        )[1]  # fmt: skip
    ones = [np.ones(size) for size in (1, 2, 3)]
    async with open_session(graph, max_iterations=10) as session:
        for length in (8, 10):
            runs = (session.run(total, {n: length, z: each}) for each in ones)
            for found in await asyncio.gather(*runs, return_exceptions=True):
                if length == 8:
                    assert found == pytest.approx(8 + sum(1 / (9 - i) for i in range(8)))
                else:
                    assert isinstance(found, af.KernelError)
                    assert found.tag == "sum/9"
        await others_end()


async def test_rows_that_grow_at_different_times(open_session: OpenSession) -> None:
    """Rows of one shape get several shapes in one step; rows of one element are not taken for rows of many."""
    with af.Graph() as graph:
        n, k = af.placeholder("int64", (), name="n"), af.placeholder("int64", (), name="k")
        x = af.placeholder("float64", (None,), name="x")

        def body(i: af.Tensor, s: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
            return i + 1, af.cond(i % k == 0, lambda: af.concat([s, af.concat([s, s[:1] + 1])]), lambda: s * 2)

        grown = af.while_loop(
            lambda i, s: i < n, body, (0, x), shape_invariants=((), (None,)), pool=af.Pool(8), name="grown"
        )[1]
    asked = [(steps, every, np.arange(1.0, size + 1)) for steps in (1, 4) for every in (1, 2, 3) for size in (1, 3)]
    async with open_session(graph) as session:
        runs = (session.run(grown, {n: steps, k: every, x: value}) for steps, every, value in asked)
        found = await asyncio.gather(*runs)
        await others_end()
    for (steps, every, value), last in zip(asked, found, strict=True):
        for i in range(steps):
            value = np.concatenate([value, value, value[:1] + 1]) if i % every == 0 else value * 2
        assert last.tolist() == value.tolist()


async def test_variables_that_grow(open_session: OpenSession) -> None:
    """Activations whose variables are of one length are stepped together; lengths differ from the start, too."""
    with af.Graph() as graph:
        x, n = af.placeholder("float32", (None,), name="x"), af.placeholder("int64", (), name="n")

        def body(i: af.Tensor, s: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
            return i + 1, af.concat([s, af.expand_dims(af.sum(s) + af.sum(x), axis=0)])

        y = af.while_loop(
            lambda i, s: i < n, body, (0, x), shape_invariants=((), (None,)), pool=af.Pool(8), name="steps"
        )[1]
    random = Random(1)
    async with open_session(graph) as session:
        asked = [(np.arange(random.randrange(1, 4), dtype=np.float32), random.randrange(5)) for _ in range(12)]
        found = await asyncio.gather(*(session.run(y, {x: value, n: k}) for value, k in asked))
        counts = session.statistics().batches["steps"]
        await others_end()
    for (value, length), last in zip(asked, found, strict=True):
        expected = value
        for _ in range(length):
            expected = np.append(expected, expected.sum() + value.sum())
        assert last.tolist() == expected.tolist()
    assert counts.largest > 1


ROOM, WIDTH = 8, 4
"""Of a cache."""
ASK, KEY = np.random.default_rng(0).normal(size=(2, WIDTH, WIDTH)) / WIDTH**0.5


def decoded(prompt: np.ndarray[Any, Any], n: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The last output and the cache."""
    x, cache = prompt[-1], np.zeros((ROOM, WIDTH))
    cache[: len(prompt)] = prompt @ KEY
    for at in range(len(prompt), len(prompt) + n):
        cache[at] = x @ KEY
        cache[0] += x * 0.1
        scores = np.exp(cache[: at + 1] @ (x @ ASK))
        x = np.tanh(scores / scores.sum() @ cache[: at + 1])
    return x, cache


@pytest.mark.parametrize("debug", [False, True])
async def test_caches_of_different_lengths_are_filled_together(open_session: OpenSession, debug: bool) -> None:
    """Fault F18: each as it is filled alone, whoever comes, is cancelled, or fails as there is no room."""

    def step(at: af.Tensor, x: af.Tensor, cache: af.Tensor) -> tuple[af.Tensor, ...]:
        cache = af.index_add(af.index_update(cache, at, x @ KEY), 0, x * 0.1)
        scores = af.where(af.arange(ROOM) <= at, cache @ (x @ ASK), -np.inf)
        x = af.where(at == ROOM - 1, np.nan, af.softmax(scores) @ cache)
        return at + 1, af.tanh(af.check_numerics(x, "it is full")), cache

    with af.Graph() as graph:
        prompt, n = af.placeholder("float64", (None, WIDTH), name="prompt"), af.placeholder("int64", (), name="n")
        length = af.shape(prompt)[0]
        cache = af.index_update(af.zeros((ROOM, WIDTH), dtype="float64"), slice(None, length), prompt @ KEY)
        start = (length, prompt[-1], cache)
        fetches = af.while_loop(lambda at, *_: at < length + n, step, start, pool=af.Pool(4), name="decode")[1:]
    rows = np.random.default_rng(0)
    asked = [(rows.normal(size=(length, WIDTH)), steps) for length, steps in ((4, 9), (2, 5), (1, 6), (5, 2), (3, 0))]
    async with open_session(graph, debug=debug) as session:
        for passes in (0, 3):
            runs = [asyncio.ensure_future(session.run(fetches, {prompt: x, n: k})) for x, k in (*asked, asked[1])]
            for _ in range(passes):
                await asyncio.sleep(0)
            runs[-1].cancel()
            failed, *found, _ = await asyncio.gather(*runs, return_exceptions=True)
            assert isinstance(failed, af.KernelError)
            assert "it is full" in str(failed)
            del failed, runs
            for each, (x, k) in zip(found, asked[1:], strict=True):
                assert not isinstance(each, BaseException), each
                for value, expected in zip(each, decoded(x, k), strict=True):
                    np.testing.assert_allclose(value, expected, rtol=1e-9, atol=1e-12)
        assert session.statistics().batches["decode"].largest > 1
        await others_end()
        assert session.statistics().runs == 0


@pytest.mark.usefixtures("work")
async def test_rows_of_caches_are_written_where_they_stand() -> None:
    """A step makes no other array as large as all of them."""
    with af.Graph() as graph:
        x, n = af.placeholder("float64", (64, 64), name="x"), af.placeholder("int64", (), name="n")
        y = af.while_loop(
            lambda i, _: i < n,
            lambda i, cache: (i + 1, af.index_update(cache, i % 64, cache[i % 64] + 1)),
            (0, x),
            pool=af.Pool(8),
        )[1]
    async with af.Session(graph) as session:
        start = np.zeros((64, 64))

        async def peak(steps: int) -> int:
            tracemalloc.reset_peak()
            first = tracemalloc.get_traced_memory()[0]
            await asyncio.gather(*(session.run(y, {x: start, n: steps + k}) for k in range(8)))
            return tracemalloc.get_traced_memory()[1] - first

        await peak(3)
        tracemalloc.start()
        try:
            # Slabs of four rows become some of eight, and nothing else of that size is made.
            await peak(9)
            assert await peak(9) < 15 * start.nbytes
        finally:
            tracemalloc.stop()


async def test_many_lengths_do_not_hold_the_event_loop_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each length may be stepped for a turn, and then others have theirs; one of its length is stepped as if alone."""
    with af.Graph() as graph:
        x, n = af.placeholder("float32", (None,), name="x"), af.placeholder("int64", (), name="n")
        y = af.while_loop(
            lambda i, s: i < n,
            lambda i, s: (i + 1, af.concat([s, af.expand_dims(af.sum(s), axis=0)])),
            (0, x),
            shape_invariants=((), (None,)),
            pool=af.Pool(4),
        )[1]
    monkeypatch.setattr(single_call.CountedCall, "expected_ns", lambda *_: 1.0)
    feeds = [{x: np.full(1 + 100 * k, 0.001, np.float32), n: 8} for k in range(4)]
    alone: list[bool] = []
    call = pools._Steps.call

    async with af.Session(graph) as session:
        await asyncio.gather(*(session.run(y, each) for each in feeds))  # and steps are measured
        turn = session._runs.batches.turn  # type: ignore[union-attr]
        passes: list[int] = []

        def noted(steps: pools._Steps, values: list[Any], size: int, most: int) -> list[Any]:
            alone.append(steps.is_one)
            passes.append(turn.count())
            return call(steps, values, size, most)

        monkeypatch.setattr(pools._Steps, "call", noted)
        monkeypatch.setattr(pools, "_TURN_NS", -1.0)  # is over before the next one
        monkeypatch.setattr(pools._Steps, "most", lambda *_: 4)
        found = await asyncio.gather(*(session.run(y, each) for each in feeds))
    assert [len(each) for each in found] == [9, 109, 209, 309]
    assert all(alone)
    assert len(set(passes)) == len(passes)  # each in a pass of its own


async def test_each_activation_has_tensor_arrays_of_its_own(open_session: OpenSession) -> None:
    """Arrays are written at positions of each activation's own, grow, and are read; also in an activation that is
    alone.
    """
    with af.Graph() as graph:
        x, n = af.placeholder("float32", (2,), name="x"), af.placeholder("int64", (), name="n")

        def body(i: af.Tensor, a: af.TensorArray, s: af.Tensor) -> tuple[af.Tensor, af.TensorArray, af.Tensor]:
            a = a.write(i, s)
            return i + 1, a, s + a.read(i // 2) + x

        array = af.TensorArray("float32", size=1, dynamic_size=True, element_shape=(2,), clear_after_read=False)
        found = af.while_loop(lambda i, a, s: i < n, body, (0, array, x), pool=af.Pool(4), name="steps")
        y = found[1].stack(), found[2]

    def expected(value: np.ndarray[Any, Any], length: int) -> tuple[list[list[float]], list[float]]:
        written, s = [], value
        for i in range(length):
            written.append(s)
            s = s + written[i // 2] + value
        return [each.tolist() for each in written], s.tolist()

    async with open_session(graph) as session:
        asked = [(np.array([k, 1], np.float32), 1 + k % 5) for k in range(9)]
        results = await asyncio.gather(*(session.run(y, {x: value, n: k}) for value, k in asked))
        results.append(await session.run(y, {x: asked[4][0], n: asked[4][1]}))
        assert session.statistics().batches["steps"].largest > 1
        await others_end()
    for (value, length), (whole, last) in zip([*asked, asked[4]], results, strict=True):
        assert (whole.tolist(), last.tolist()) == expected(value, length)


async def test_an_inner_loop_and_branches_are_lifted(open_session: OpenSession) -> None:
    """Live rows of the inner loop side by side; a branch is computed for the rows that take it."""
    with af.Graph() as graph:
        x, n = af.placeholder("int64", (), name="x"), af.placeholder("int64", (), name="n")

        def body(i: af.Tensor, s: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
            inner = af.while_loop(lambda j, _: j < i, lambda j, t: (j + 1, t + x), (0, s))[1]
            return i + 1, af.cond(inner % 2 == 0, lambda: inner // 2, lambda: inner * 3 + 1)

        y = af.while_loop(lambda i, s: i < n, body, (0, x), pool=af.Pool(4), name="steps")[1]
    async with open_session(graph) as session:
        found = await asyncio.gather(*(session.run(y, {x: k, n: 4 - k}) for k in range(5)))
        await others_end()
    for k, value in enumerate(found):
        s = k
        for i in range(4 - k):
            s += i * k
            s = s // 2 if s % 2 == 0 else s * 3 + 1
        assert value == s


async def test_what_cannot_be_pooled_is_a_loop_and_explained() -> None:
    """Behaviour 111: each computes the same as without pool=; a warning, and the plan, give the reason."""
    total = af.Variable(0, name="total")

    @af.op(outputs=af.spec("int64", ()))
    async def awaits(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        await asyncio.sleep(0)
        return x + 1

    def cut(i: af.Tensor) -> af.Tensor:
        with af.device("cpu:0"):
            i = i + 1
        with af.device("cpu:1"):
            return i + 1

    def stores(i: af.Tensor, a: af.TensorArray) -> tuple[af.Tensor, af.TensorArray]:
        return i + 1, af.cond(i > 0, lambda: a.write(i, i), lambda: a.write(0, i))

    with af.Graph() as graph, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        x = af.placeholder("int64", (), name="x")
        pooled = partial(af.while_loop, pool=af.Pool(), name="steps")
        array = af.TensorArray("int64", size=5)
        cases: list[tuple[Any, str, Any]] = [
            (pooled(lambda i: i < 3, total.assign_add, x), "has an effect", 4),
            (pooled(lambda i: i < 5, awaits, x), "awaits", 5),
            (pooled(lambda i: i < 5, cut, x), "several devices", 5),
            (pooled(lambda i, a: i < 5, stores, (x, array))[1].stack(), "each row has of its own", [0, 1, 2, 3, 4]),
        ]
    for warning, (_, reason, _) in zip(told, cases, strict=True):
        assert "is not pooled" in str(warning.message)
        assert reason in str(warning.message)
        assert warning.filename == __file__
    async with af.Session(graph, devices=["cpu:0", "cpu:1"]) as session:
        for y, reason, expected in cases:
            assert "is not pooled: " in session.plan(y, [x]).explain()
            assert reason in session.plan(y, [x]).explain()
            found = await session.run(y, {x: 1})
            assert np.asarray(found).tolist() == expected


def test_faults_of_a_pool_are_named() -> None:
    with af.Graph():
        z = af.placeholder("float32", ())
        with pytest.raises(af.GraphError, match=r"is an af\.Pool; got 64"):
            af.while_loop(lambda i: i < 3, lambda i: i, z, pool=64)  # type: ignore[call-overload]
        with pytest.raises(af.GraphError, match="no gradient"):
            af.gradients(af.while_loop(lambda y: y < 3, lambda y: y * 2, z, pool=af.Pool()), z)
        with pytest.raises(af.GraphError, match=r"inner.* is not computed for several rows at once.*given already"):
            af.batched(lambda x: af.while_loop(lambda y: y < 3, lambda y: y * 2, x, pool=af.Pool(), name="inner"))(z)
        with pytest.raises(af.GraphError, match="capacity"):
            af.Pool(0)


def streaming(capacity: int = 4, ahead: int = 2) -> tuple[af.Graph, af.Tensor, af.Tensor, af.Tensor, af.Tensor]:
    """A graph, start and end of a pooled count, its squares in the body, and its last value."""
    squares: list[af.Tensor] = []
    with af.Graph() as graph:
        x, n = af.placeholder("int64", (), name="x"), af.placeholder("int64", (), name="n")

        def body(i: af.Tensor) -> af.Tensor:
            squares.append(i * i)
            return i + 1

        y = af.while_loop(lambda i: i < n, body, x, pool=af.Pool(capacity), parallel_iterations=ahead, name="counting")
    return graph, x, n, squares[0], y


async def test_each_activation_hands_out_its_own(open_session: OpenSession) -> None:
    """Streams of one pool, of different lengths and with plain runs among them, by consumers of any speed."""
    graph, x, n, square, y = streaming()
    random = Random(5)
    async with open_session(graph) as session:

        async def consume(start: int, end: int) -> list[int]:
            found = []
            async for value in session.stream(square, {x: start, n: end}):
                found.append(int(value))
                for _ in range(random.choice((0, 0, 1, 7))):
                    await asyncio.sleep(0)
            return found

        asked = [(k, k + random.randrange(9)) for k in range(12)]
        streams = asyncio.gather(*(consume(*each) for each in asked))
        assert await asyncio.gather(*(session.run(y, {x: a, n: b}) for a, b in asked)) == [b for _, b in asked]
        assert await streams == [[k * k for k in range(a, b)] for a, b in asked]
        await others_end()


@pytest.mark.usefixtures("work")
async def test_a_slow_consumer_holds_up_itself_alone() -> None:
    """Fault F47: an endless loop whose items are not taken stands still after two, outside the pool's only row."""
    graph, x, n, square, y = streaming(capacity=1)
    async with af.Session(graph) as session:
        items = session.stream(square, {x: 0, n: -1 & 0xFFFF})
        assert [int(await anext(items)) for _ in range(2)] == [0, 1]
        for _ in range(20):
            await asyncio.sleep(0)
        steps = session.statistics().batches["counting"].calls
        assert steps <= 4  # two are taken, and two wait
        assert await session.run(y, {x: 5, n: 9}) == 9
        await others_end()
        assert session.statistics().batches["counting"].calls == steps + 4
        assert [int(await anext(items)) for _ in range(5)] == [4, 9, 16, 25, 36]
        await items.aclose()
        assert session.statistics().runs == 0


@pytest.mark.parametrize("taken", [0, 1, 3])
async def test_a_stream_that_is_dropped(open_session: OpenSession, taken: int) -> None:
    """Fault F48: by ``break`` or at once; its activation leaves, set aside or not, and the others go on."""
    graph, x, n, square, y = streaming()
    async with open_session(graph) as session:
        items = session.stream(square, {x: 0, n: 1 << 40})
        other = asyncio.ensure_future(session.run(y, {x: 0, n: 50}))
        for _ in range(taken):
            await anext(items)
        await items.aclose()
        assert await other == 50
        await others_end()
        assert session.statistics().runs == 0


@pytest.mark.parametrize("pool", [None, af.Pool(4)])
async def test_a_stream_that_fails_is_told_with_its_own_axis_and_iteration(pool: af.Pool | None) -> None:
    """Earlier items are handed out; a loop with a pool behaves like a loop without one."""
    seen: list[af.Tensor] = []
    with af.Graph() as graph:
        row = af.placeholder("int64", (None,), name="row")

        def step(i: af.Tensor) -> af.Tensor:
            seen.append(row[i])
            return i + 1

        af.while_loop(lambda i: i < 9, step, 0, pool=pool, parallel_iterations=1, name="loop")
    async with af.Session(graph) as session:

        async def items(length: int) -> list[object]:
            found: list[object] = []
            try:
                async for item in session.stream(seen[0], {row: np.arange(length)}):
                    found.append(int(item))  # noqa: PERF401 - what came before a failure is kept
            except af.KernelError as error:
                found += [error.reason, error.tag]
            return found

        every, failed, _ = await asyncio.gather(*map(items, (9, 5, 9)))
    assert every == [*range(9)]
    assert failed == [*range(5), "IndexError: index 5 is out of bounds for axis 0 with size 5", "loop/5"]


async def test_values_deeper_in_a_pooled_loop_are_not_handed_out() -> None:
    inside: list[af.Tensor] = []
    with af.Graph() as graph:

        def body(i: af.Tensor) -> af.Tensor:
            def double() -> af.Tensor:
                inside.append(i * 2)
                return inside[0]

            return af.cond(i > 2, double, lambda: i + 1)

        af.while_loop(lambda i: i < 9, body, 0, pool=af.Pool())
    async with af.Session(graph) as session:
        with pytest.raises(af.FetchError, match="in a branch or loop inside of a loop with a pool"):
            await anext(session.stream(inside[0]))


@pytest.mark.usefixtures("work")
@pytest.mark.parametrize(("patience_s", "in_order"), [(inf, ["a", "b", "c"]), (PATIENCE_S, ["b", "a", "c"])])
async def test_a_run_of_higher_priority_is_a_row_first(
    monkeypatch: pytest.MonkeyPatch, patience_s: float, in_order: list[str]
) -> None:
    """Of equal priorities the first deadline goes first; a deadline that is far off gives no precedence."""
    monkeypatch.setattr(work, "PATIENCE_S", patience_s)
    with af.Graph() as graph:
        n = af.placeholder("int64", (), name="n")
        y = af.while_loop(lambda i: i < n, lambda i: i + 1, 0, pool=af.Pool(1))
    ended: list[str] = []
    async with af.Session(graph) as session:

        async def request(name: str, priority: int, timeout: float | None) -> None:
            await session.run(y, {n: 3}, priority=priority, timeout=timeout)
            ended.append(name)

        asked = [("b", 0, None), ("late", 1, None), ("a", 0, 1e6), ("first", -1, None), ("c", 0, None)]
        await asyncio.gather(*(request(*each) for each in asked))
    assert ended == ["first", *in_order, "late"]


@pytest.mark.usefixtures("no_collector")
async def test_a_pool_is_freed_with_its_last_activation() -> None:
    with af.Graph() as graph:
        n = af.placeholder("int64", ())
        pooled = af.while_loop(lambda i: i < n, lambda i: i + 1, 0, pool=af.Pool(4))
    async with af.Session(graph) as session:
        assert await session.run(pooled, {n: 3}) == 3
        await others_end()
        assert not [each for each in gc.get_objects() if isinstance(each, LoopPool)]
