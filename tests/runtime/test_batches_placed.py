"""Members of a batched function on a card: their rows are brought together there, and their results stay there."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from tests.conftest import assert_freed
from tests.fake_cupy.module import FakeCupy
from tests.fake_cupy.stand_in import stand_in
from tests.others import others_end

Array = np.ndarray[Any, Any]
WEIGHTS = np.linspace(-1, 1, 16, dtype=np.float32).reshape(4, 4)
CARD = 8 << 20


@pytest.fixture
def cupy(request: pytest.FixtureRequest) -> Iterator[FakeCupy]:
    with stand_in(devices=1, seed=getattr(request, "param", 3)) as fake:
        yield fake


def copies_and_stacks(cupy: FakeCupy, first: int) -> tuple[int, int]:
    """Of the work that was given to the card since then."""
    found = Counter(name for _, name in cupy.engine.launches[first:])
    return found["memcpyAsync"], found["asyncflow_stack"] + found["concatenate"]


def served(count: int) -> tuple[af.Graph, af.Tensor, list[af.Tensor]]:
    """A function between others of the device, for `count` members at a time: rows, a counter, and a number of each."""
    with af.Graph() as graph:
        x = af.placeholder("float32", (4,), name="x")
        inside = af.batched(
            lambda x, scale: (af.tanh(x @ WEIGHTS), af.argmax(x), af.sum(x) * scale),
            count,
            max_delay_s=3600,
            cost="none",
        )
        y, place, total = inside(x * 2, af.sum(x))
        fetches = [af.exp(y), place, total + 1]
    return graph, x, fetches


def served_of(x: Array) -> list[Any]:
    return [np.exp(np.tanh(2 * x @ WEIGHTS)), x.argmax(), 2 * x.sum() ** 2 + 1]


@pytest.mark.parametrize("cupy", range(3), indirect=True)
@pytest.mark.parametrize("count", [1, 5, 20])
async def test_rows_are_brought_together_where_they_are(cupy: FakeCupy, count: int) -> None:
    """The card does its work in any order. Copied are only feeds and fetches, and counters all at once."""
    graph, x, fetches = served(count)
    values = np.random.default_rng(count).normal(size=(2, count, 4)).astype(np.float32)
    async with af.Session(graph, devices=["cuda:0"], memory_limit=CARD) as session:
        first = blocking = 0
        for given in values:  # the first time compiles
            first, blocking = len(cupy.engine.launches), len(cupy.blocking())
            found = await asyncio.gather(*(session.run(fetches, {x: value}) for value in given))
            for value, (y, place, total) in zip(given, found, strict=True):
                expected = served_of(value)
                np.testing.assert_allclose(y, expected[0], rtol=1e-5)
                assert place == expected[1]
                np.testing.assert_allclose(total, expected[2], rtol=1e-4, atol=1e-5)
        assert session.statistics().batches["batched"].calls == 2
        assert copies_and_stacks(cupy, first) == (3 * count + 1, 2 if count > 1 else 0)
        assert cupy.blocking()[blocking:] == []
    assert_freed(session)


async def test_values_fed_and_fetched_singly_stay_in_between(cupy: FakeCupy) -> None:
    """Members of different runs and iterations: what one iteration gives is what the next one gets."""
    with af.Graph() as graph:
        n, x = af.placeholder("int64", (), name="n"), af.placeholder("float32", (4,), name="x")
        step = af.batched(lambda s: af.tanh(s @ WEIGHTS) + 1, cost="none")
        _, y = af.while_loop(lambda i, s: i < n, lambda i, s: (i + 1, step(s)), (0, x))
    async with af.Session(graph, devices=["cuda:0"], memory_limit=CARD) as session:
        start = np.ones(4, np.float32)
        await session.run(y, {n: 1, x: start})
        await asyncio.gather(*(session.run(y, {n: 1, x: start}) for _ in range(12)))  # constants are there
        first = len(cupy.engine.launches)
        found = await asyncio.gather(*(session.run(y, {n: k, x: start}) for k in range(12)))
        assert copies_and_stacks(cupy, first)[0] == 2 * 12
    for value in found:
        np.testing.assert_allclose(value, start, rtol=1e-5)
        start = np.tanh(start @ WEIGHTS) + 1
    assert_freed(session)


@pytest.mark.usefixtures("work")
async def test_results_that_are_only_fetched_are_copied_at_once(cupy: FakeCupy) -> None:
    """One copy fetches the results of all members, but for results that further nodes use."""
    with af.Graph() as graph:
        x = af.placeholder("float32", (4,), name="x")
        y, z = af.batched(lambda x: (af.tanh(x), x + 1), 10, max_delay_s=3600, cost="none")(x * 2)
        w = z * 2
    async with af.Session(graph, devices=["cuda:0"], memory_limit=CARD) as session:
        values = np.random.default_rng(1).normal(size=(10, 4)).astype(np.float32)
        for fetches, copies in (([y], 10 + 2), ([y, w], 10 + 1 + 10)):  # x, both results at once or one, and w
            await asyncio.gather(*(session.run(fetches, {x: value}) for value in values))  # compiles
            first = len(cupy.engine.launches)
            found = await asyncio.gather(*(session.run(fetches, {x: value}) for value in values))
            assert copies_and_stacks(cupy, first)[0] == copies
            for value, results in zip(values, found, strict=True):
                for result, expected in zip(results, (np.tanh(2 * value), 4 * value + 2), strict=False):
                    np.testing.assert_allclose(result, expected, rtol=1e-5)
    assert_freed(session)


@pytest.mark.parametrize("seed", range(6))
async def test_whoever_leaves_or_fails(seed: int) -> None:
    """Members are cancelled at any pass, or fail, which halving finds: all others get their own results."""

    @af.op(outputs=af.spec("float32", (4,)), rows=True, pure=True)
    def checked(x: Array) -> Array:
        if (x >= 90).any():
            raise ValueError("90")
        return x

    random = Random(seed)
    with stand_in(devices=1, seed=seed) as cupy, af.Graph() as graph:
        x = af.placeholder("float32", (4,), name="x")
        y = af.batched(lambda x: checked(x) + 1, cost="none")(x * 2) * 3
        async with af.Session(graph, devices=["cuda:0"], memory_limit=CARD) as session:
            blocking = len(cupy.blocking())

            async def request(k: int) -> None:
                for _ in range(random.randrange(6)):
                    await asyncio.sleep(0)
                value = 50.0 if k in (3, 11) else float(k)
                run = asyncio.ensure_future(session.run(y, {x: np.full(4, value, np.float32)}))
                if k % 5 == 4:
                    for _ in range(random.randrange(12)):
                        await asyncio.sleep(0)
                    run.cancel()
                found: Any = (await asyncio.gather(run, return_exceptions=True))[0]
                if value == 50:
                    assert isinstance(found, af.KernelError)
                    assert isinstance(found.__cause__, ValueError)
                elif not isinstance(found, asyncio.CancelledError):
                    assert not isinstance(found, BaseException), found
                    assert found.tolist() == [6 * k + 3] * 4

            await asyncio.gather(*map(request, range(24)))
            await others_end()
            assert session.statistics().runs == 0
            assert set(cupy.blocking()[blocking:]) <= {"compile"}
        assert_freed(session)


async def test_what_does_not_fit_is_computed_in_halves(cupy: FakeCupy) -> None:
    """Memory for rows side by side is the device's, and runs out as any other does."""
    with af.Graph() as graph:
        x = af.placeholder("float32", (16_384,), name="x")
        y = af.sum(af.batched(lambda x: af.sort(x) * 2, cost="none")(x + 1))
    async with af.Session(graph, devices=["cuda:0"], memory_limit=2 << 20) as session:
        for _ in range(2):
            found = await asyncio.gather(*(session.run(y, {x: np.full(16_384, k, np.float32)}) for k in range(12)))
            assert found == [16_384 * 2 * (k + 1) for k in range(12)]
        counts = session.statistics().batches["batched"]
    assert 0 < counts.failed <= 8
    assert counts.largest > 1
    assert_freed(session)


def ragged_rows(x: af.Tensor, lengths: af.Tensor) -> af.Tensor:
    is_own = (af.arange(af.shape(x)[0]) < lengths)[:, None]
    return af.where(is_own, x, 0) / af.sum(af.where(is_own, x, 0))


def packed_rows(x: af.Tensor, offsets: af.Tensor) -> af.Tensor:
    ids = af.searchsorted(offsets[1:], af.arange(af.shape(x)[0]), side="right")
    return x / af.segment_sum(af.sum(x, axis=1), ids, af.shape(offsets)[0] - 1)[ids][:, None]


@pytest.mark.parametrize(
    ("fn", "options"),
    [(ragged_rows, {"pad": 0}), (ragged_rows, {"bucket": (16,)}), (packed_rows, {"ragged": "packed"})],
    ids=["pad", "bucket", "packed"],
)
async def test_rows_of_other_lengths(cupy: FakeCupy, fn: Any, options: Any) -> None:
    """Rows are padded, or side by side, on the card: only fed and fetched rows are copied."""
    with af.Graph() as graph:
        x = af.placeholder("float32", (None, 3), name="x")
        y = af.batched(fn, 10, max_delay_s=3600, cost="none", **options)(x * 2) + 1
    values = [np.arange(1, 3 * n + 1, dtype=np.float32).reshape(n, 3) for n in (1, 5, 2, 7, 3, 3, 11, 1, 4, 6)]
    async with af.Session(graph, devices=["cuda:0"], memory_limit=CARD) as session:
        first = blocking = 0
        for _ in range(2):  # the first time compiles
            first, blocking = len(cupy.engine.launches), len(cupy.blocking())
            found = await asyncio.gather(*(session.run(y, {x: value}) for value in values))
            for value, result in zip(values, found, strict=True):
                np.testing.assert_allclose(result, value / value.sum() + 1, rtol=1e-5)
        (counts,) = session.statistics().batches.values()
        assert counts.calls == 2
        assert copies_and_stacks(cupy, first)[0] <= 2 * len(values) + 4  # lengths, and what the body asks the host
        assert cupy.blocking()[blocking:] == []
    assert_freed(session)


async def test_a_body_that_is_computed_elsewhere(cupy: FakeCupy) -> None:
    """Then values come to the host, and go back."""

    def fn(x: af.Tensor) -> af.Tensor:
        with af.device("cpu:0"):
            return af.cumulative_sum(x) + 1

    with af.Graph() as graph:
        x = af.placeholder("float32", (4,), name="x")
        with af.device("cuda:0"):
            y = af.batched(fn, cost="none")(x * 2) * 3
    async with af.Session(graph, devices=["cuda:0", "cpu:0"]) as session:
        for _ in range(2):
            found = await asyncio.gather(*(session.run(y, {x: np.full(4, k, np.float32)}) for k in range(12)))
            assert [value.tolist() for value in found] == [[6 * k * n + 3 for n in range(1, 5)] for k in range(12)]
        assert session.statistics().batches["fn"].largest > 1
    assert_freed(session)


async def test_calls_are_checked_on_a_card(cupy: FakeCupy, caplog: pytest.LogCaptureFixture) -> None:
    @af.op(outputs=af.spec("float32", (4,)), rows=True, pure=True)
    def centred(x: Array) -> Array:
        return x - x.mean(axis=0) if x.ndim > 1 else x

    with af.Graph() as graph:
        x = af.placeholder("float32", (4,), name="x")
        sound, wrong = (
            af.batched(fn, cost="none")(x * 2) for fn in (lambda x: af.sin(x) * 3, lambda x: centred(x) + 1)
        )
    async with af.Session(graph, devices=["cuda:0"]) as session:
        session.check_batches(1.0)
        for y, is_told in ((sound, False), (wrong, True)):
            await asyncio.gather(*(session.run(y, {x: np.full(4, k, np.float32)}) for k in range(6)))
            await others_end()
            assert any("differs for member" in message for message in caplog.messages) == is_told
    assert_freed(session)
