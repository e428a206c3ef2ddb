"""Values of a pooled loop: bytes that it copies and holds, shapes that it steps apart, and the code of its steps."""

from __future__ import annotations

import asyncio
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.ops.indexing import in_place, indexing
from asyncflow.ops.indexing.in_place import OwnBuffer
from asyncflow.runtime.shared import pools
from asyncflow.runtime.shared.rows.pool import RowGroup

Array = np.ndarray[Any, Any]

ROOM, HEADS, WIDTH = 16, 2, 4
CACHE = HEADS * ROOM * WIDTH * 4
"""Bytes of the cache of one request."""


class Copied:
    """Bytes of whole variables that steps copy, to change them and back into their rows."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.to_change = self.back = self.steps = 0
        writable, write = in_place.writable, RowGroup.write

        def counted(xp: Any, x: Array, index: Any, own: Array | OwnBuffer | None) -> Array:
            found = writable(xp, x, index, own)
            if x.nbytes >= CACHE:
                self.to_change += 0 if found is x else x.nbytes
            return found

        def written(group: RowGroup[Any], following: Sequence[Array]) -> bool:
            before = list(group._slabs)
            lent = [*group._lent, *[None] * len(following)]
            self.steps += 1
            self.back += sum(x.nbytes for x, mine in zip(following, lent, strict=False) if x is not mine)
            assert len(before) == len(group._slabs)
            return write(group, following)

        patch.setattr(indexing, "writable", counted)
        patch.setattr(RowGroup, "write", written)


def decoder(prompt: af.Tensor, n: af.Tensor, *, pool: af.Pool | None) -> tuple[af.Tensor, af.Tensor]:
    """Attention over a cache that each step writes a row of; the last state, and the state of each iteration."""
    states: list[af.Tensor] = []
    empty = af.zeros((HEADS, ROOM, WIDTH), dtype="float32")

    def step(at: af.Tensor, state: af.Tensor, cache: af.Tensor) -> tuple[af.Tensor, af.Tensor, af.Tensor]:
        cache = af.index_update(cache, (slice(None), at), state)
        found = af.nn.scaled_dot_product_attention(state[:, None], cache, cache, lengths=at + 1)
        states.append(af.tanh(found[:, 0] + state))
        return at + 1, states[-1], cache

    state = af.reshape(prompt, (HEADS, WIDTH))
    found = af.while_loop(lambda at, *_: at < n, step, (0, state, empty), pool=pool)
    return found[1], states[0]


@pytest.mark.parametrize("clients", [1, 3])
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_no_step_copies_a_cache(clients: int, is_streamed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with af.Graph() as graph:
        prompt, n = af.placeholder("float32", (HEADS * WIDTH,)), af.placeholder("int64", ())
        last, state = decoder(prompt, n, pool=af.Pool(4))
        expected, _ = decoder(prompt, n, pool=None)
    prompts = np.random.default_rng(0).normal(size=(clients, HEADS * WIDTH)).astype(np.float32)
    async with af.Session(graph) as session:

        async def ask(k: int) -> Array:
            feeds = {prompt: prompts[k], n: 12 - k}
            if not is_streamed:
                return await session.run(last, feeds)
            items = [item async for item in session.stream(state, feeds)]
            assert len(items) == 12 - k
            return items[-1]

        wanted = [await session.run(expected, {prompt: prompts[k], n: 12 - k}) for k in range(clients)]
        copied = Copied(monkeypatch)
        found = await asyncio.gather(*map(ask, range(clients)))
    for mine, its in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine, its, rtol=1e-5, atol=1e-6)
    assert copied.to_change == 0
    assert copied.back <= copied.steps * clients * CACHE / 4, "states and positions alone"
    assert (copied.steps > 3) is (clients > 1), "a request that is alone has no row, streamed or not"


async def test_rows_let_go_of_their_initial_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slabs have the values of rows; initial values beside them would take the memory of the caches twice."""
    began: list[weakref.ref[Array]] = []
    add = RowGroup.add

    def noted(group: RowGroup[Any], activation: Any, values: Sequence[Array]) -> None:
        add(group, activation, values)
        began.extend(weakref.ref(x) for x in values if getattr(x, "nbytes", 0) >= 1 << 16)

    monkeypatch.setattr(RowGroup, "add", noted)
    numbers: list[af.Tensor] = []

    def step(at: af.Tensor, cache: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
        numbers.append(at + 0)
        return at + 1, af.index_update(cache, at, 1.0)

    with af.Graph() as graph:
        n = af.placeholder("int64", ())
        cache = af.index_update(af.zeros((1 << 14,), dtype="float32"), 0, af.astype(n, "float32"))
        af.while_loop(lambda at, _: at < n, step, (0, cache), pool=af.Pool(4))
    kept: list[int] = []
    async with af.Session(graph) as session:

        async def ask() -> None:
            kept.extend(
                [sum(each() is not None for each in began) async for x in session.stream(numbers[0], {n: 9}) if x == 5]
            )

        await asyncio.gather(*(ask() for _ in range(3)))
    assert len(began) >= 3
    assert kept == [0, 0, 0]


@pytest.mark.parametrize("clients", [1, 2])
async def test_steps_leave_shared_values_alone(clients: int) -> None:
    """A loop begins with the cache that another has made, and both are fetched, as is the cache before them."""

    def filled(cache: af.Tensor, begin: af.Tensor, pool: af.Pool | None) -> af.Tensor:
        def step(at: af.Tensor, cache: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
            return at + 1, af.index_update(cache, at, af.sum(cache) + 1)

        end = begin + 4
        found: af.Tensor = af.while_loop(lambda at, _: at < end, step, (begin, cache), pool=pool)[1]
        return found

    with af.Graph() as graph:
        n = af.placeholder("int64", ())
        fetches = []
        for pool in (af.Pool(2), None):
            before = af.full((16,), 1.0) + af.astype(n, "float64")
            first = filled(before, n, pool)
            fetches.append([before, first, filled(first, n + 2, pool), filled(first, n, pool)])
    async with af.Session(graph) as session:
        for _ in range(3):
            found = await asyncio.gather(*(session.run(fetches, {n: k}) for k in range(clients)))
            for mine, its in found:
                np.testing.assert_array_equal(mine, its)


def summed(pool: af.Pool | None = None) -> tuple[af.Graph, list[af.Tensor], af.Tensor]:
    """A loop that captures an array of any length."""
    with af.Graph() as graph:
        n, x = af.placeholder("int64", ()), af.placeholder("float64", (None,), name="memory")
        found = af.while_loop(lambda i, _: i < n, lambda i, s: (i + 1, s + af.sum(x)), (0, 0.0), pool=pool)
    return graph, [n, x], found[1]


async def test_captures_of_many_shapes_are_told_once() -> None:
    """Requests whose captured values differ in shape share no step, though their variables are alike."""
    graph, feeds, found = summed(af.Pool(8))
    async with af.Session(graph) as session:
        run = session.prepare(found, feeds)
        for lengths, told in (((2, 3, 4, 4), 0), ((2, 3, 4, 5, 2), 1), ((2, 3, 4, 6), 0)):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                sums = await asyncio.gather(*(run(20, np.ones(length)) for length in lengths))
            assert sums == [20.0 * length for length in lengths]
            messages = [str(each.message) for each in caught]
            assert len(messages) == told
            for message in messages:
                assert "memory:0, which the loop captures, has shapes [2], [3], [4], [5]" in message
                assert "pad it to one shape" in message


async def test_explain_shows_the_steps_of_a_pooled_loop() -> None:
    graph, feeds, found = summed(af.Pool(8))
    async with af.Session(graph) as session:
        plan = session.plan(found, feeds)
        assert "steps of" not in plan.explain(source=True)
        await session.run(found, dict(zip(feeds, (3, np.ones(2)), strict=True)))
        text = plan.explain(source=True)
        assert "steps of" not in plan.explain()
    several, one = text.split(", steps of several requests\n")[1].split(", steps of one request\n")
    assert "steps_together_iteration += 1" in several
    assert "steps_together_iteration += 1" in one


async def test_runs_of_steps_are_short_beside_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool whose steps are long makes them in runs of 20 ms, but of a turn while requests of another pool stream."""
    asked: list[tuple[bool, float]] = []
    is_streaming = False

    def most_beside(steps: pools._Steps, size: int, time_ns: float) -> int:
        asked.append((is_streaming, time_ns))
        return 2

    monkeypatch.setattr(pools._Steps, "most", lambda *_: 0)
    monkeypatch.setattr(pools._Steps, "most_beside", most_beside)
    numbers: list[af.Tensor] = []

    def step(at: af.Tensor) -> af.Tensor:
        numbers.append(at * 1)
        return at + 1

    with af.Graph() as graph:
        n = af.placeholder("int64", ())
        end = af.while_loop(lambda at: at < n, step, 0, pool=af.Pool(4), parallel_iterations=1 << 20)
    async with af.Session(graph) as session:
        assert await session.run(end, {n: 9}) == 9
        words = session.stream(numbers[0], {n: 1_000_000})
        await anext(words)
        is_streaming = True
        assert await session.run(end, {n: 9}) == 9
        is_streaming = False
        await words.aclose()
    longest = {streaming: max(time_ns for told, time_ns in asked if told is streaming) for streaming in (False, True)}
    assert longest == {False: pools._BESIDE_NS, True: pools._TURN_NS}
