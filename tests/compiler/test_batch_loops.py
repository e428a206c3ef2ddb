"""`batch_loops`: where it applies, how much memory it takes, and its state after a run that stops."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.compiler.batching.batch_loops import batch_loops, block_bytes
from asyncflow.devices.cpu.device import CpuDevice
from tests.compiler.batching import WIDTH, Recurrent, run_both
from tests.compiler.stages import optimized


def gradients_of(cell: Recurrent) -> list[af.Tensor]:
    """Of the mean square of the last state, by the weights and the first state."""
    y = cell.loop()
    return [y, *af.gradients(af.mean(y * y), [cell.w, cell.u, cell.h])]


def test_the_graph_is_sound_and_can_be_printed(graph: af.Graph) -> None:
    """Rows made ahead stand before the loop, delayed sums behind it."""
    cell = Recurrent(10)
    text = optimized(graph, gradients_of(cell), batch_loops)
    order = [text.index(part) for part in ("= rows_ahead(", "= while(", "= pending_sums(", "= sums(", "= fetch(")]
    assert order == sorted(order)
    assert "= row_ahead(" in text and "= add_products(" in text


async def test_the_switch(graph: af.Graph) -> None:
    """Neither batched nor explained: with the switch, unoptimised, and where every value is checked."""
    cell = Recurrent(10)
    fetches = gradients_of(cell)
    options: list[dict[str, Any]] = [{"loop_batching": False}, {"optimize": False}, {"check_numerics": True}]
    for chosen in options:
        async with af.Session(**chosen) as session:
            assert "at once" not in session.plan(fetches, list(cell.feeds)).explain()
    async with af.Session() as session:
        assert session.plan(fetches, list(cell.feeds)).explain().startswith("loop/body/matmul: made ahead")


@pytest.mark.parametrize("options", [{"compute_streams": 2}, {"seed": 0, "regions": False}])
async def test_streams_and_shuffled_schedules(options: dict[str, Any], graph: af.Graph) -> None:
    """Iterations that overlap on threads, and firings in any order."""
    cell = Recurrent(16)
    assert await run_both(gradients_of(cell), cell.feeds, **options)


async def test_iterations_that_overlap(graph: af.Graph) -> None:
    """Rows asked for out of order, by many iterations at a time."""
    cell = Recurrent(60)
    y = af.map_fn(lambda x: af.tanh(x @ cell.w), cell.xs, lift=False, parallel_iterations=50)
    for seed in range(3):
        assert await run_both([y], cell.feeds, seed=seed, regions=False, compute_streams=2)


async def test_requests_for_several_devices(graph: af.Graph) -> None:
    """Nodes requested on one device are batched there; nodes on several devices stay in the loop."""
    cell = Recurrent(20)

    def cut(t: af.Tensor, h: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
        with af.device("cpu:0"):
            x = cell.xs[t]
        with af.device("cpu:1"):
            product = x @ cell.w
        return t + 1, af.tanh(product + h @ cell.u)

    y = af.while_loop(lambda t, h: t < 20, cut, (0, cell.h))[1]
    assert await run_both([y], cell.feeds, devices=["cpu:0", "cpu:1"]) == ""
    with af.device("cpu:1"):
        whole = gradients_of(cell)
    said = await run_both(whole, cell.feeds, devices=["cpu:0", "cpu:1"])
    assert said.count("made ahead") == said.count("summed up") == 1


def test_blocks_are_a_small_part_of_the_memory_limit() -> None:
    """And none are made where kernels are launched ahead."""
    assert block_bytes([CpuDevice()]) == 24 << 20
    assert block_bytes([CpuDevice(), CpuDevice(1, memory_limit=64 << 20)]) == 1 << 20


async def test_under_a_memory_limit(graph: af.Graph) -> None:
    """A program that fits without batching fits with it."""
    cell = Recurrent(40)
    fetches = gradients_of(cell)
    assert await run_both(fetches, cell.feeds, memory_limit=24 << 20)


async def test_a_cancelled_run_leaves_nothing(graph: af.Graph) -> None:
    """The next run begins anew; that nothing is left of the first is checked after every test."""
    cell = Recurrent(10)
    entered, released = asyncio.Event(), asyncio.Event()

    @af.op(outputs=af.spec("float32", (8, 16 * WIDTH)))
    async def pause(h: Any) -> Any:
        entered.set()
        await released.wait()
        return h

    y = af.while_loop(lambda t, h: t < 10, lambda t, h: (t + 1, pause(cell.step(cell.xs[t], h))), (0, cell.h))[1]
    async with af.Session(debug=True) as session:
        assert "ahead" in session.plan(y, list(cell.feeds)).explain()
        first = asyncio.create_task(session.run(y, dict(cell.feeds)))
        await entered.wait()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert session.statistics().runs == 0
        released.set()
        several = await asyncio.gather(*(session.run(y, dict(cell.feeds)) for _ in range(3)))
    async with af.Session(loop_batching=False) as session:
        expected = await session.run(y, dict(cell.feeds))
    for found in several:
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_blocks_are_smaller_where_iterations_overlap() -> None:
    one, two = CpuDevice(), CpuDevice(compute_streams=2)
    alone, together = block_bytes([one]), block_bytes([two])
    assert alone is not None
    assert together is not None
    assert together < alone
