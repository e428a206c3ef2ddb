"""The memory_limit that an error names is enough, for random programs of loops, scans, TensorArrays and branches."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from tests.patience import PATIENCE_S

ROOM = 48 << 20

Body = Callable[[Any, Any], Any]
"""The change that a loop makes to its state, given a matrix."""


def repeated(times: Any, body: Body, y: Any, w: Any) -> Any:
    """The state behind a loop."""
    return af.while_loop(lambda i, _: i < times, lambda i, z: (i + 1, body(z, w)), (0, y))[1]


async def train(body: Body, counts: tuple[int, ...], side: int, **options: Any) -> tuple[list[Any], int, Any]:
    """Gradients through loops of `body`, bytes held at most, and the plan."""
    with af.Graph():
        x, w = (af.placeholder("float32", (side, side)) for _ in range(2))
        y = x
        for times in counts:
            y = repeated(times, body, y, w)
        grads = af.gradients(af.sum(y), [x, w], unconnected="zero")
        fed = np.random.default_rng(0).normal(size=(side, side)).astype(np.float32) / 20
        async with af.Session(devices=["cpu:0"], **options) as session, asyncio.timeout(PATIENCE_S):
            plan = session.plan(grads, [x, w])
            return await session.run(grads, {x: fed, w: fed}), session.devices[0].memory.peak, plan


def once(body: Body, counts: tuple[int, ...], side: int = 32, **options: Any) -> tuple[list[Any], int, Any]:
    return asyncio.run(train(body, counts, side, **options))


def named_limit(body: Body, counts: tuple[int, ...], limit: int, side: int = 32) -> int:
    """The limit that the error of a run in `limit` names; `limit` if the run succeeds."""
    try:
        once(body, counts, side, memory_limit=limit)
    except af.OutOfMemoryError as error:
        found = [re.search(r"memory_limit=([\d_]+) ", note) for note in getattr(error, "__notes__", ())]
        named = {int(each[1]) for each in found if each is not None}
        assert len(named) == 1, "every loop names the limit of the device"
        return named.pop()
    return limit


def holds(body: Body, counts: tuple[int, ...], limit: int, kept: list[Any], side: int = 32) -> None:
    """Check the gradients within a limit; gradients of the matrix are sums, which several iterations of a segment may
    make.
    """
    values, peak, _ = once(body, counts, side, memory_limit=limit)
    assert peak <= limit
    np.testing.assert_array_equal(values[0], kept[0])
    np.testing.assert_allclose(values[1], kept[1], rtol=1e-3, atol=1e-5 * np.abs(kept[1]).max())


def plain(y: Any, w: Any) -> Any:
    return af.sin(y @ w) * y


def last_of_a_scan(y: Any, w: Any) -> Any:
    return af.scan(lambda carry, _: plain(carry, w), af.arange(4), y)[-1]


def part(y: Any, _: Any) -> Any:
    return af.stack([af.sin(y)] * 32)[-1]


def part_of_a_branch(y: Any, _: Any) -> Any:
    return af.cond(af.sum(y) < 1e9, lambda: af.stack([af.sin(y)] * 8)[3], lambda: af.cos(y))


def through_an_array(y: Any, w: Any) -> Any:
    def body(j: Any, z: Any, array: Any) -> Any:
        z = plain(z, w)
        return j + 1, z, array.write(j, z)

    array = af.TensorArray("float32", 5, element_shape=y.shape)
    _, z, array = af.while_loop(lambda j, *_: j < 5, body, (0, y, array))
    return z + af.sum(af.sin(array.stack()), axis=0)


def loop_in_a_branch(y: Any, w: Any) -> Any:
    return af.cond(af.sum(y) < 1e9, lambda: repeated(5, plain, y, w), lambda: af.sin(y))


def random_body(random: Random, side: int, depth: int) -> Body:
    """A body of random pieces; the same one each time it is built."""
    kinds = ["plain", "part", "wide", *(["loop", "scan", "array", "branch"] if depth else [])]
    kind, size, choice = random.choice(kinds), random.choice((2, 3, 5)), random.random() < 0.5
    inner = random_body(random, side, depth - 1) if depth else plain

    def in_an_array(y: Any, w: Any) -> Any:
        def body(j: Any, z: Any, array: Any) -> Any:
            z = inner(z, w)
            return j + 1, z, array.write(j, z)

        array = af.TensorArray("float32", size, element_shape=(side, side) if choice else None)
        array = af.while_loop(lambda j, *_: j < size, body, (0, y, array))[2]
        return af.reshape(af.sum(af.sin(array.stack()), axis=0), (side, side))

    def in_a_scan(y: Any, w: Any) -> Any:
        found = af.scan(lambda carry, _: inner(carry, w), af.arange(size), y)
        return found[-1] if choice else af.sum(found, axis=0)

    def wide(y: Any, w: Any) -> Any:
        joined = af.tanh(af.concat([y @ w] * size, axis=0))
        return joined[:side] * y if choice else af.sum(af.reshape(joined, (size, side, side)), axis=0)

    def in_a_branch(y: Any, w: Any) -> Any:
        is_chosen = af.sum(y) > 0 if choice else af.sum(y) < 1e9
        return af.cond(is_chosen, lambda: inner(y, w), lambda: af.sin(y))

    bodies: dict[str, Body] = {
        "plain": plain,
        "part": lambda y, _: af.stack([af.sin(y)] * size)[size // 2],
        "wide": wide,
        "loop": lambda y, w: repeated(size, inner, y, w),
        "scan": in_a_scan,
        "array": in_an_array,
        "branch": in_a_branch,
    }
    return bodies[kind]


@pytest.mark.parametrize("seed", range(30))
def test_the_limit_that_an_error_names_is_enough(seed: int) -> None:
    """F30: whatever fraction of its memory a program gets, it runs, or runs in the limit that its error names."""
    random = Random(seed)
    side, depth = random.choice((32, 64)), random.choice((0, 1, 1, 2))
    counts = tuple(random.choice((4, 8, 20)) for _ in range(random.choice((1, 1, 2))))
    body = random_body(random, side, depth)
    inside: Body = lambda y, w: body(af.sin(y), w)  # noqa: E731
    kept, peak, _ = once(inside, counts, side, memory_limit=ROOM)
    limits = {named_limit(inside, counts, int(share * peak), side) for share in (0.5, 0.2)}
    for limit in limits:
        holds(inside, counts, limit, kept, side)


@pytest.mark.parametrize("share", [0.5, 0.2])
def test_a_carried_part_of_an_array_is_copied(share: float) -> None:
    """The last element of a scan keeps none of the others: the array of an iteration goes at its end."""
    kept, peak, plan = once(last_of_a_scan, (6,), 128, memory_limit=ROOM)
    assert plan.memory[0].held == pytest.approx(peak, rel=0.1)
    holds(last_of_a_scan, (6,), named_limit(last_of_a_scan, (6,), int(share * peak), 128), kept, 128)


@pytest.mark.parametrize("body", [part, part_of_a_branch])
def test_a_loop_saves_no_array_for_a_part(body: Body) -> None:
    value = 64 * 64 * 4
    _, peak, _ = once(body, (50,), 64, memory_limit=ROOM)
    assert peak < 120 * value


def test_parts_that_are_most_of_an_array_are_not_copied() -> None:
    """As the gates of a cell: copies would cost time, and take as much memory."""

    def body(y: Any, w: Any) -> Any:
        gates = af.concat([y @ w] * 3, axis=1)
        return af.sin(gates[:, :64]) * af.tanh(gates[:, 64:128]) * gates[:, 128:]

    _, _, plan = once(body, (4,), 64)
    assert "positive" not in plan.explain()


def test_arrays_of_inner_loops_have_their_sizes() -> None:
    """An array that goes through a loop has an unknown number of rows; the plan knows the number that it was made
    for.
    """
    kept, peak, plan = once(through_an_array, (8,), 128, memory_limit=ROOM)
    assert peak <= plan.memory[0].held <= 1.12 * peak
    limit = named_limit(through_an_array, (8,), int(0.1 * peak), 128)
    assert limit < 0.4 * peak
    holds(through_an_array, (8,), limit, kept, 128)


def test_a_loop_in_a_branch_counts_as_if_it_always_ran() -> None:
    kept, peak, _ = once(loop_in_a_branch, (8,), 128, memory_limit=ROOM)
    holds(loop_in_a_branch, (8,), int(0.4 * peak), kept, 128)
    holds(loop_in_a_branch, (8,), named_limit(loop_in_a_branch, (8,), int(0.1 * peak), 128), kept, 128)


@dataclass(frozen=True)
class Trained:
    """A loop whose values stay about as large, so that each iteration counts in the sums."""

    rows: int
    side: int
    count: int
    dtype: str
    has_bias: bool
    is_nested: bool

    @classmethod
    def drawn(cls, random: Random) -> Trained:
        sizes = random.choice([4, 8, 16, 32]), random.choice([32, 64]), random.choice([60, 90, 120])
        return cls(*sizes, random.choice(["float32", "float64"]), random.random() < 0.5, random.random() < 0.3)

    async def gradients(self, **options: Any) -> tuple[list[Any], int, Any]:
        """The gradients of weight and bias, the bytes held at most, and the plan."""
        with af.Graph():
            shapes = (self.rows, self.side), (self.side, self.side), (self.side,)
            x, w, b = (af.placeholder(self.dtype, shape) for shape in shapes)

            def cell(z: Any, _: Any) -> Any:
                return af.tanh(z @ w + b if self.has_bias else z @ w) + 0.1 * x

            inner: Body = (lambda z, w: repeated(5, cell, z, w)) if self.is_nested else cell
            y = repeated(self.count // 5 if self.is_nested else self.count, inner, x, w)
            grads = af.gradients(af.sum(y * y), [x, w, b], unconnected="zero")
            draw = np.random.default_rng(0).normal
            drawn = [(draw(size=shape) / self.side**0.5).astype(self.dtype) for shape in shapes]
            feeds = dict(zip([x, w, b], drawn, strict=True))
            async with af.Session(devices=["cpu:0"], **options) as session, asyncio.timeout(PATIENCE_S):
                plan = session.plan(grads, [x, w, b])
                return await session.run(grads, feeds), session.devices[0].memory.peak, plan


@pytest.mark.parametrize("seed", range(6))
async def test_sums_of_small_loops_round_the_same_in_a_limit(seed: int) -> None:
    """Blocks of sums end at the same iterations, also where the gradient runs in segments: the bits are the same.

    Where the blocks do not fit, the plan says that sums round differently.
    """
    trained = Trained.drawn(Random(seed))
    kept, _, _ = await trained.gradients()
    _, peak, _ = await trained.gradients(memory_limit=ROOM)
    for share in (0.8, 0.65):
        found, held, plan = await trained.gradients(memory_limit=int(share * peak))
        assert held <= share * peak
        assert "run again" in plan.explain(memory=True)
        is_told = "round differently" in plan.explain(memory=True)
        assert not (is_told and share == 0.8)
        for one, other in zip(found, kept, strict=True):
            if is_told:
                np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5 * np.abs(other).max())
            else:
                np.testing.assert_array_equal(one, other)


async def test_sums_that_round_differently_are_told() -> None:
    trained = Trained(8, 32, 90, "float32", has_bias=False, is_nested=False)
    kept, peak, _ = await trained.gradients(memory_limit=ROOM)
    found, _, plan = await trained.gradients(memory_limit=int(0.2 * peak))
    assert "sums over iterations are made in smaller blocks" in plan.explain(memory=True)
    np.testing.assert_allclose(found[1], kept[1], rtol=1e-3, atol=1e-5 * np.abs(kept[1]).max())


async def triangle(**options: Any) -> tuple[list[Any], int]:
    """Inner loops up to the number of the outer iteration."""
    with af.Graph():
        x, w = (af.placeholder("float32", (128, 128)) for _ in range(2))
        body: Any = lambda i, y: (i + 1, repeated(i + 1, plain, y, w))  # noqa: E731
        y = af.while_loop(lambda i, _: i < 8, body, (0, x))[1]
        grads = af.gradients(af.sum(y), [x, w], unconnected="zero")
        fed = np.random.default_rng(0).normal(size=(128, 128)).astype(np.float32) / 20
        async with af.Session(devices=["cpu:0"], **options) as session, asyncio.timeout(PATIENCE_S):
            return await session.run(grads, {x: fed, w: fed}), session.devices[0].memory.peak


def test_inner_loops_up_to_the_outer_counter_are_planned() -> None:
    kept, peak = asyncio.run(triangle(memory_limit=ROOM))
    less, held = asyncio.run(triangle(memory_limit=int(0.4 * peak)))
    assert held <= 0.4 * peak
    np.testing.assert_array_equal(less[0], kept[0])
    np.testing.assert_array_equal(less[1], kept[1])


def test_loops_on_one_device_name_one_limit() -> None:
    """The limit is the least that all of them hold: a loop that saves little does not ask for its share of much
    more.
    """

    def small(y: Any, w: Any) -> Any:
        return plain(y, w)

    kept, peak, _ = once(small, (40, 2), 64, memory_limit=ROOM)
    limit = named_limit(small, (40, 2), int(0.1 * peak), 64)
    assert limit < 0.6 * peak
    holds(small, (40, 2), limit, kept, 64)
