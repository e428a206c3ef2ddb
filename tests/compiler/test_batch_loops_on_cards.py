"""`batch_loops` on CUDA devices (the stand-in) and simulated cards: products of many iterations are one launch."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.compiler.batching.batch_loops import block_bytes
from asyncflow.compiler.memory.plan_memory import PlannedLoop
from asyncflow.devices.captures import WARM_UPS
from asyncflow.devices.sim.device import SimDevice
from asyncflow.testing import virtual_clock
from tests.compiler.batching import WIDTH, Recurrent, values, where
from tests.fake_cupy.stand_in import stand_in

if TYPE_CHECKING:
    from tests.fake_cupy.module import FakeCupy

Fed = tuple[Sequence[af.Tensor], Mapping[af.Tensor, Any]]
"""Fetches and feeds."""

STEPS = 8

WAYS: Mapping[str, Mapping[str, Any]] = {
    "launched": {},
    "captured": {"cuda_graphs": True},
    "interpreted": {"regions": False},
    "two cards": {"placement_seed": 3, "devices": ["cuda:0", "cuda:1"]},
    "within a limit": {"memory_limit": 8 << 20},
}


@pytest.fixture
def cupy() -> Iterator[FakeCupy]:
    """The stand-in, with two cards."""
    with stand_in(devices=2, nbytes=64 << 20) as found:
        yield found


# -- programs --------------------------------------------------------------------------------------------------------


def trained(y: af.Tensor, *by: af.Tensor) -> list[af.Tensor]:
    """A value, and gradients of its mean square."""
    return [y, *af.gradients(af.mean(y * y), list(by))]


def recurrent() -> Fed:
    cell = Recurrent(STEPS, batch=4, width=4)
    return trained(cell.loop(), cell.w, cell.u, cell.h), cell.feeds


def of_unknown_shapes() -> Fed:
    cell = Recurrent(STEPS, batch=3, width=4, known=False)
    return trained(cell.loop(), cell.w, cell.u, cell.h), cell.feeds


def without_iterations() -> Fed:
    cell = Recurrent(STEPS, batch=3, width=4)
    return trained(cell.loop(last=0), cell.w, cell.h), cell.feeds


def that_ends_early() -> Fed:
    """Its values decide if it goes on, and are waited for."""
    cell = Recurrent(STEPS, batch=4, width=4)
    count, y = af.while_loop(
        lambda t, h: af.logical_and(t < STEPS, af.sum(h[0, :1]) < 0.2),
        lambda t, h: (t + 1, h * 0.5 + 0.05 + 0.01 * cell.step(cell.xs[t], h)),
        (0, cell.h * 0.0),
    )
    return [count, *trained(y, cell.w, cell.u)], cell.feeds


def with_branches() -> Fed:
    """Products ahead of a branch, in it, and sums of gradients of both."""
    cell = Recurrent(STEPS, batch=4, width=4)

    def body(t: af.Tensor, h: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
        x = cell.xs[t] @ cell.w
        return t + 1, af.cond(t % 3 == 0, lambda: af.tanh(x + h @ cell.u), lambda: af.tanh(h - x))

    return trained(af.while_loop(lambda t, _: t < STEPS, body, (0, cell.h))[1], cell.w, cell.u), cell.feeds


def with_work_on_the_host() -> Fed:
    """Rows picked by numbers that the host computes, with constants, and two layers of them."""
    cell, first = Recurrent(STEPS, batch=4, width=4), values(4, 4, seed=8)
    scale = np.linspace(0.5, 1.5, 4, dtype="float32")

    def body(t: af.Tensor, h: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
        x = cell.xs[STEPS - 1 - t].T * 0.5
        rows = af.tanh((x.T * scale + af.astype(t, "float32")) @ first)
        return t + 1, af.tanh(rows @ cell.w + h @ cell.u)

    return trained(af.while_loop(lambda t, _: t < STEPS, body, (0, cell.h))[1], cell.w, cell.u), cell.feeds


def ragged() -> Fed:
    """Sums over iterations of different numbers of rows."""
    xs, gs = (af.placeholder("float32", (STEPS, None, width)) for width in (6, 8))
    n = af.placeholder("int64", (None,), name="n")
    total = af.while_loop(
        lambda t, a: t < STEPS,
        lambda t, a: (t + 1, a + xs[t, : n[t]].T @ gs[t, : n[t]]),
        (0, np.zeros((6, 8), "float32")),
    )[1]
    lengths = np.array([3, 3, 1, 5, 0, 5, 5, 2])
    return [total], {xs: values(STEPS, 5, 6, seed=1), gs: values(STEPS, 5, 8, seed=2), n: lengths}


def nested() -> Fed:
    """An inner loop over the rows of an outer iteration, whose sums the outer loop hands on, and a scan."""
    cell = Recurrent(4, batch=4, width=4)

    def outer(s: af.Tensor, h: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
        return s + 1, af.while_loop(lambda t, _: t < 4, lambda t, h: (t + 1, cell.step(cell.xs[t], h)), (0, h))[1]

    y = af.while_loop(lambda s, _: s < 2, outer, (0, cell.h))[1]
    scanned = af.scan(lambda h, x: cell.step(x, h), cell.xs, y)
    return trained(scanned, cell.w, cell.u, cell.h), cell.feeds


PROGRAMS: Mapping[str, Callable[[], Fed]] = {
    build.__name__: build
    for build in (
        recurrent,
        of_unknown_shapes,
        without_iterations,
        that_ends_early,
        with_branches,
        with_work_on_the_host,
        ragged,
        nested,
    )
}


async def outcome(fed: Fed, *, runs: int = 1, **options: Any) -> tuple[list[Any], str]:
    """The values of the last of some runs, and the plan."""
    fetches, feeds = fed
    async with af.Session(fetches[0].graph, **{"devices": ["cuda:0"], **options}) as session:
        found = [await session.run(list(fetches), dict(feeds)) for _ in range(runs)]
        return found[-1], session.plan(list(fetches), list(feeds)).explain()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", PROGRAMS)
async def test_batched_loops_equal_a_cpus(name: str, way: str, graph: af.Graph, cupy: FakeCupy) -> None:
    """Within rounding, however the card is driven; captured graphs are launched, too."""
    fed = PROGRAMS[name]()
    expected, _ = await outcome(fed, devices=["cpu:0"], loop_batching=False)
    found, plan = await outcome(fed, runs=WARM_UPS + 2 if way == "captured" else 1, **WAYS[way])
    assert "for several iterations at once" in plan
    for batched, plain in zip(found, expected, strict=True):
        assert (batched.dtype, batched.shape) == (plain.dtype, plain.shape)
        np.testing.assert_allclose(batched, plain, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("build", [recurrent, that_ends_early, with_work_on_the_host, ragged])
async def test_launched_captured_and_interpreted_give_the_same_bits(
    build: Callable[[], Fed], graph: af.Graph, cupy: FakeCupy
) -> None:
    """So does a session with a limit that leaves room for the blocks."""
    fed = build()
    ways: Sequence[dict[str, Any]] = ({}, {"cuda_graphs": True}, {"regions": False, "memory_limit": 32 << 20})
    (first, _), *others = [await outcome(fed, runs=WARM_UPS + 2, fusion=False, **options) for options in ways]
    for other, _ in others:
        assert [value.tobytes() for value in other] == [value.tobytes() for value in first]


# -- how much is launched --------------------------------------------------------------------------------------------


async def launched(cupy: FakeCupy, fed: Fed, **options: Any) -> Counter[str]:
    """Return how often a warm run launches what."""
    fetches, feeds = fed
    async with af.Session(fetches[0].graph, ["cuda:0"], **options) as session:
        await session.run(list(fetches), dict(feeds))
        cupy.engine.launches.clear()
        await session.run(list(fetches), dict(feeds))
        return Counter(name for _, name in cupy.engine.launches)


def lstm(steps: int) -> Fed:
    """A training step of an LSTM: the gradients of its weights and bias."""
    xs = af.placeholder("float32", (steps, 4, 6), name="xs")
    weights = [af.placeholder("float32", shape) for shape in ((6, 32), (8, 32), (32,))]
    w, u, bias = weights

    def cell(t: af.Tensor, h: af.Tensor, c: af.Tensor) -> tuple[af.Tensor, ...]:
        i, f, o, g = af.split(xs[t] @ w + h @ u + bias, 4, axis=-1)
        c = af.sigmoid(f) * c + af.sigmoid(i) * af.tanh(g)
        return t + 1, af.sigmoid(o) * af.tanh(c), c

    zeros = af.zeros((4, 8), dtype="float32")
    _, h, _ = af.while_loop(lambda t, *_: t < steps, cell, (0, zeros, zeros))
    shapes = (steps, 4, 6), (6, 32), (8, 32), (32,)
    feeds = {x: values(*shape, seed=len(shape)) for x, shape in zip((xs, *weights), shapes, strict=True)}
    return af.gradients(af.sum(h * h), weights), feeds


async def test_a_training_step_of_an_lstm_makes_two_products_an_iteration(graph: af.Graph, cupy: FakeCupy) -> None:
    """Of five. Besides, there are two products for the rows of the loop, and two for a block of 16 iterations."""
    for steps, blocks in ((10, 1), (42, 3)):
        fed = lstm(steps)
        plain = await launched(cupy, fed, loop_batching=False)
        batched = await launched(cupy, fed)
        assert plain["matmul"] == 5 * steps
        assert batched["matmul"] == 2 * steps + 2 + 2 * blocks
        assert plain["sum"] - batched["sum"] == steps - blocks
        assert batched["asyncflow_stack"] == 3 * blocks
        assert sum(plain.values()) - sum(batched.values()) > 5 * steps


async def test_all_rows_of_a_loop_are_one_product_as_far_as_memory_allows(graph: af.Graph, cupy: FakeCupy) -> None:
    """A CPU makes them in blocks. The first product has the rows of one iteration, which tells how large they are."""
    cell = Recurrent(30, batch=64, width=4)
    y = af.while_loop(lambda t, _: t < 30, lambda t, total: (t + 1, total + cell.xs[t] @ cell.w), (0, cell.h))[1]
    assert (await launched(cupy, ([y], cell.feeds)))["matmul"] == 2
    nbytes = 64 * (4 + 64) * 4
    assert (await launched(cupy, ([y], cell.feeds), memory_limit=64 * 10 * nbytes))["matmul"] == 1 + 3


# -- where it applies ------------------------------------------------------------------------------------------------


async def test_loops_that_the_card_runs_by_itself_stay_so(graph: af.Graph, cupy: FakeCupy) -> None:
    """Blocks are filled by the host."""
    x, w = af.placeholder("float32", (4, 8)), values(8, 8)
    _, y = af.while_loop(
        lambda t, y: af.logical_and(af.max(y) > 1e-2, t < 50),
        lambda t, y: (t + 1, y * 0.5 + 0.0 * (af.astype(t, "float32") * x @ w)),
        (0, x),
    )
    feeds = {x: np.ones((4, 8), "float32")}
    by_host, plan = await outcome(([y], feeds))
    assert "made ahead" in plan
    by_card, plan = await outcome(([y], feeds), device_while=True)
    assert "made ahead" not in plan
    np.testing.assert_array_equal(by_host[0], by_card[0])


async def test_cards_with_several_streams_do_not_batch(graph: af.Graph, cupy: FakeCupy) -> None:
    _, plan = await outcome(recurrent(), compute_streams=2)
    assert "at once" not in plan


def test_blocks_of_cards_are_larger_and_a_small_part_of_a_limit() -> None:
    with virtual_clock("2 x v100") as clock:

        async def sizes() -> list[int | None]:
            cards = [SimDevice(clock.machine, 0, memory_limit=limit) for limit in (1 << 40, 64 << 20)]
            return [block_bytes(cards[:1]), block_bytes(cards)]

        assert clock.run(sizes()) == [256 << 20, 1 << 20]


async def test_errors_come_from_the_same_iteration(graph: af.Graph, cupy: FakeCupy) -> None:
    """An index out of range, of a row that was to be made ahead."""
    cell = Recurrent(STEPS, batch=4, width=4)
    y = af.while_loop(
        lambda t, _: t < STEPS + 2, lambda t, h: (t + 1, cell.step(cell.xs[t], h)), (0, cell.h), name="loop"
    )[1]
    seen = []
    for batching in (True, False):
        async with af.Session(devices=["cuda:0"], loop_batching=batching) as session:
            with pytest.raises(af.KernelError) as failed:
                await session.run(y, cell.feeds)
            seen.append(where(failed.value))
    assert seen[0] == seen[1]
    assert seen[0][1] == f"loop/{STEPS}"


async def test_a_cancelled_run_gives_its_memory_back(graph: af.Graph, cupy: FakeCupy) -> None:
    fetches, feeds = recurrent()
    async with af.Session(devices=["cuda:0"]) as session:
        await session.run(list(fetches), dict(feeds))
        account = session.devices[0].memory
        held = account.statistics().used
        run = asyncio.ensure_future(session.run(list(fetches), dict(feeds)))
        await asyncio.sleep(0)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        await session.run(list(fetches), dict(feeds))
        assert account.statistics().used <= held


# -- on simulated cards ----------------------------------------------------------------------------------------------


def simulated(fed: Fed, *, shapes_only: bool = False, **options: Any) -> tuple[list[Any], float, int]:
    """The values of a run, its seconds, and the most bytes held; the account ends where it began."""

    async def run(fetches: Sequence[af.Tensor], feeds: Mapping[af.Tensor, Any]) -> tuple[list[Any], float, int]:
        async with af.Session(fetches[0].graph, ["sim:0"], **options) as session:
            await session.run(list(fetches), dict(feeds))
            loop, account = asyncio.get_running_loop(), session.devices[0].memory
            began_s, held = loop.time(), account.statistics().used
            found = await session.run(list(fetches), dict(feeds))
            assert account.statistics().used == held
            return found, loop.time() - began_s, account.statistics().peak

    with virtual_clock("1 x v100", shapes_only=shapes_only) as clock:
        return clock.run(run(*fed))


def test_a_simulated_step_is_shorter_and_as_long_without_data(graph: af.Graph) -> None:
    """Its kernels are counted where a block is made, and so is their memory."""
    steps = 24
    cell = Recurrent(steps, batch=32, width=WIDTH)
    fed = [af.sum(each) for each in trained(cell.loop(), cell.w, cell.u)], cell.feeds
    plain, long_s, _ = simulated(fed, loop_batching=False)
    batched, short_s, peak = simulated(fed)
    for each, expected in zip(batched, plain, strict=True):
        np.testing.assert_allclose(each, expected, rtol=1e-3)
    assert short_s < 0.85 * long_s
    assert peak >= steps * 32 * 16 * WIDTH * 4  # all rows of the loop
    nothing = [each * 0.0 for each in fed[0]], fed[1]
    grown = []
    for shapes_only in (False, True):
        _, without_s, least = simulated(nothing, shapes_only=shapes_only, loop_batching=False)
        _, with_s, most = simulated(nothing, shapes_only=shapes_only)
        grown.append((without_s, with_s, most - least))
    assert grown[0] == pytest.approx(grown[1])


@pytest.mark.parametrize("share", [0.9, 0.7])
def test_limits_hold_for_operands_that_wait(graph: af.Graph, share: float) -> None:
    """The plan of the memory counts them: the same values in less memory, and sums in blocks of the usual size.

    The products of the forward loop are of fewer rows each. On processors without AVX-512, these round differently.
    """
    steps, room = 96, 64 << 20
    cell = Recurrent(steps, batch=32, width=16)
    fetches = trained(cell.loop(last=steps), cell.w, cell.u)

    async def run(limit: int) -> tuple[list[Any], int, PlannedLoop]:
        async with af.Session(graph, ["sim:0"], memory_limit=limit) as session:
            plan = session.plan(fetches, list(cell.feeds))
            assert "summed up" in plan.explain()
            found = await session.run(fetches, dict(cell.feeds))
            account = session.devices[0].memory
            assert account.used == 0
            return found, account.peak, plan.memory[0]

    with virtual_clock("1 x v100") as clock:
        kept, most, _ = clock.run(run(room))
    limit = int(share * most)
    with virtual_clock("1 x v100") as clock:
        less, peak, planned = clock.run(run(limit))
    for each, expected in zip(less, kept, strict=True):
        np.testing.assert_allclose(each, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())
    assert peak <= limit
    assert planned.has_usual_blocks
    assert planned.held == pytest.approx(peak, rel=0.1)
