"""T1, T2: how the host learns that work is done, and that it failed."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from time import perf_counter

import numpy as np
import pytest

from asyncflow.devices.cuda.device import CudaDevice
from tests.gpu.card import Card, now_us
from tests.gpu.figures import Figures
from tests.gpu.on_loop import Heartbeat, on_loop, percentile, ticket
from tests.gpu.programs_run import run_program

TICKETS = 200


@on_loop
async def test_t01_many_tickets_behind_a_long_kernel(card: Card, figures: Figures) -> None:
    """The loop goes on meanwhile, and is woken for batches of them, in order."""
    loop = asyncio.get_running_loop()
    order: list[int] = []
    batches: list[int] = []
    is_new = True
    done = asyncio.Event()

    def next_turn() -> None:
        nonlocal is_new
        is_new = True

    def deliver(index: int, error: BaseException | None) -> None:
        nonlocal is_new
        assert error is None
        order.append(index)
        if is_new:
            batches.append(0)
            is_new = False
            loop.call_soon(next_turn)
        batches[-1] += 1
        if len(order) == TICKETS:
            done.set()

    async with card.device() as device:
        with device.activate():
            x = card.cupy.zeros(16, np.float32)
            x += 1  # its kernel may have to be compiled, which takes longer than what is launched next
        await ticket(device.compute)
        heartbeat = Heartbeat()
        with card.never_blocks(), card.stall(device.compute, ms=100), heartbeat.beating():
            for index in range(TICKETS):
                with device.activate():
                    x += 1
                device.compute.notify(lambda error, index=index: deliver(index, error))  # type: ignore[misc]
                if index % 20 == 19:
                    await asyncio.sleep(0)  # the gaps are to be those of delivering, not of launching
            await heartbeat.ticks(20)
            assert order == []
        await done.wait()
        assert order == list(range(TICKETS))
        figures.below("heartbeat_gap_p99_ms", heartbeat.p99_ms, 5.0)
        figures["heartbeat_gap_worst_ms"] = heartbeat.worst_ms
        figures["batches"] = batches
        figures.below("wake_ups", len(batches), TICKETS / 4)


async def _latencies(card: Card, device: CudaDevice, count: int) -> list[float]:
    """From the launch of a tiny kernel until a coroutine resumes, in µs."""
    with device.activate():
        x = card.cupy.zeros(16, np.float32)
    found = []
    for _ in range(count):
        started = now_us()
        with device.activate():
            x += 1
        await ticket(device.compute)
        found.append(now_us() - started)
    return found


async def _keep_busy() -> None:
    """Python code, a millisecond at a time."""
    while True:
        until = perf_counter() + 1e-3
        while perf_counter() < until:
            pass
        await asyncio.sleep(0)


@pytest.mark.slow
@on_loop
async def test_t01_latency_of_a_ticket(card: Card, figures: Figures) -> None:
    count = card.choose(1000, 20)
    async with card.device() as device:
        await _latencies(card, device, count // 10)
        idle = await _latencies(card, device, count)
        figures["ticket_us_idle"] = {share: percentile(idle, share) for share in (50, 90, 99)}
        task = asyncio.create_task(_keep_busy())
        busy = await _latencies(card, device, count // 10)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        figures["ticket_us_busy_loop"] = {share: percentile(busy, share) for share in (50, 90, 99)}
        # The reaper waits for the GIL, which a busy loop hands over every 5 ms; see `asyncflow.streams.handover`.
        figures.below("ticket_us_busy_loop_p90", percentile(busy, 90), 40_000)
    assert len(idle) == count


@on_loop
async def test_t01_events_that_sleep_and_events_that_spin(card: Card, figures: Figures) -> None:
    """From the record of an event until a thread that waits for it goes on."""
    count = card.choose(500, 10)

    def measure(device: CudaDevice, *, block: bool) -> list[float]:
        found = []
        with device.activate():
            event = card.cupy.cuda.Event(block=block, disable_timing=True)
            for _ in range(count):
                card.spin(device.compute, 0.05)
                started = now_us()
                event.record(device.compute.raw)
                event.synchronize()
                found.append(now_us() - started)
        return found

    async with card.device() as device:
        for name, block in (("sleeping", True), ("spinning", False)):
            found = await asyncio.to_thread(measure, device, block=block)
            figures[f"event_after_50us_{name}_us"] = {share: percentile(found, share) for share in (50, 99)}
            assert len(found) == count


@pytest.mark.slow
def test_t02_a_lost_device_fails_everything_that_waits(card: Card) -> None:
    """In a process of its own, which ends by itself."""
    outcome = run_program("lost_device")
    assert outcome["tickets"] == {"failed": 50, "delivered": 50}
    assert outcome["run"][-1] == "DeviceLostError"
    assert outcome["next_run"][-1] == "DeviceLostError"
    assert outcome["closed"]


@on_loop
async def test_t02_what_a_cancelled_wait_leaves_is_kept(card: Card) -> None:
    """The card still writes to it."""
    async with card.device() as device:
        with device.activate():
            x = card.cupy.ones(1 << 12, np.float32)
        used = device.memory.used
        with card.stall(device.d2h, ms=100):
            task = asyncio.ensure_future(ticket(device.d2h, x))
            del x
            await asyncio.sleep(0)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            assert device.memory.used == used
            assert device.d2h.pending == 1
        await ticket(device.d2h)
        assert device.memory.used < used
