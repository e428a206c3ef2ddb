"""T9, T10, T11: how far ahead is launched, on which stream, and that nothing is compiled after warm-up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.devices.cuda.device import CudaDevice
from asyncflow.devices.cuda.progress import MOST_AHEAD
from asyncflow.devices.cuda.values import CudaArray
from asyncflow.streams.cuda.stream import CudaStream, active
from tests.gpu.card import Card
from tests.gpu.figures import Figures
from tests.gpu.on_loop import Heartbeat, on_loop, ticket

TINY_OPS = 5000
QUIET_TICKS = 30


async def _settled(heartbeat: Heartbeat, progress: list[int]) -> None:
    """Return once `progress` has not grown for a while."""
    before = -1
    while len(progress) != before:
        before = len(progress)
        await heartbeat.ticks(QUIET_TICKS)


@pytest.mark.slow
@on_loop
async def test_t09_a_session_stops_launching_while_the_card_is_behind(card: Card, figures: Figures) -> None:
    """The event loop goes on, and the driver's queue is never full."""
    with af.Graph() as graph:
        x = af.placeholder("float32", (4,))
        count = af.placeholder("int32", ())
        y = af.while_loop(lambda i, _: i < count, lambda i, y: (i + 1, af.sin(y)), (np.int32(0), x))[1]
    fed = np.full(4, 0.5, np.float32)
    async with af.Session(graph, devices=["cuda:0"], regions=False, memory_limit=1 << 20) as session:
        device = session.devices[0]
        assert isinstance(device, CudaDevice)
        await session.run(y, {x: fed, count: 10})
        heartbeat = Heartbeat()
        with card.never_blocks(), card.stall(device.compute, ms=300), heartbeat.beating():
            run = asyncio.ensure_future(session.run(y, {x: fed, count: TINY_OPS}))
            while not device._resumes and not run.done():
                await heartbeat.ticks(1)
            await heartbeat.ticks(50)
            assert not run.done()
            figures["in_flight_behind_a_stall"] = device._in_flight + device.launched
            assert MOST_AHEAD <= device._in_flight + device.launched < 2 * MOST_AHEAD
        with heartbeat.beating():
            found = await run
        figures.below("heartbeat_gap_p99_ms", heartbeat.p99_ms, 10.0)
        figures["heartbeat_gap_worst_ms"] = heartbeat.worst_ms
    expected = fed
    for _ in range(TINY_OPS):
        expected = np.sin(expected)
    np.testing.assert_allclose(found, expected, rtol=1e-3)


@pytest.mark.slow
@on_loop
async def test_t09_without_a_throttle_launching_blocks(card: Card, figures: Figures) -> None:
    """On another thread here; it is what the throttle is there for."""
    launched: list[int] = []

    def launch(device: CudaDevice, array: Any) -> None:
        for index in range(2 * TINY_OPS):
            with device.activate():
                card.cupy.add(array, 1.0, out=array)
            launched.append(index)

    async with card.device() as device:
        with device.activate():
            array = card.cupy.zeros(4, np.float32)
        heartbeat = Heartbeat()
        with heartbeat.beating():
            with card.stall(device.compute, ms=1000):
                task = asyncio.create_task(asyncio.to_thread(launch, device, array))
                await _settled(heartbeat, launched)
                figures["launches_until_it_blocks"] = len(launched)
                assert MOST_AHEAD < len(launched) < 2 * TINY_OPS
            await task
        assert float((await device.fetched(_value(device, array)))[0]) == 2 * TINY_OPS


@on_loop
async def test_t09_work_given_to_streams_that_are_behind(card: Card, figures: Figures) -> None:
    """Tickets, events, spans and feeds: there is more room than for the few events that a thread can sleep on."""
    async with card.device(memory_limit=1 << 20) as device:
        with device.activate():
            array = card.cupy.zeros(4, np.float32)
            array += 1
        fed = np.ones(4, np.float32)
        await device.fed(fed, "x")  # whatever has to be compiled or pinned is, by now
        await ticket(device.compute)
        spans: list[Any] = []

        def timed() -> None:
            with device.timed(device.compute, "add"):
                array.__iadd__(1)

        kinds: dict[str, Callable[[], object]] = {
            "ticket": lambda: device.compute.notify(lambda error: None),
            "order": lambda: device.d2h.wait(device.compute.record()),
            "span": timed,
            "feed": lambda: device.fed(fed, "x"),
        }
        before = device.record_into(spans)
        for name, give in kinds.items():
            worst_ms, kept = 0.0, []
            with card.never_blocks(), card.stall(device.compute, ms=200):
                for _ in range(100):
                    started = perf_counter()
                    with device.activate():
                        kept.append(give())
                    worst_ms = max(worst_ms, 1e3 * (perf_counter() - started))
            await asyncio.gather(*(ticket(stream) for stream in (device.compute, device.d2h, device.h2d)))
            figures.below(f"worst_{name}_ms", worst_ms, 50.0)
        device.record_into(before)
        assert len(device.settle(spans)) == 200  # of the spans and the feeds


def _value(device: CudaDevice, array: Any) -> Any:
    return CudaArray(array, device, device.compute, "x")


@on_loop
async def test_t10_the_current_stream_is_that_of_the_task(card: Card) -> None:
    """Two tasks take turns inside one thread, a third one works on another."""
    cupy = card.cupy

    def current() -> tuple[int, int, CudaStream | None]:
        return cupy.cuda.runtime.getDevice(), cupy.cuda.get_current_stream().ptr, active.stream

    def check(stream: CudaStream, array: Any) -> None:
        before = current()
        with stream:
            assert current() == (stream.physical, stream.raw.ptr, stream)
            array += 1
            with stream:
                array += 1
            assert current() == (stream.physical, stream.raw.ptr, stream)
        assert current() == before

    def checks(stream: CudaStream, array: Any) -> None:
        for _ in range(100):
            check(stream, array)

    async def works_on(stream: CudaStream, array: Any, turns: int) -> None:
        for _ in range(turns):
            check(stream, array)
            await asyncio.sleep(0)

    async with card.device(0) as first, card.device(1) as second:
        arrays = []
        for device in (first, second, first):
            with device.activate():
                arrays.append(cupy.zeros(8, np.float32))
        outside = current()
        await asyncio.gather(
            works_on(first.compute, arrays[0], 100),
            works_on(second.compute, arrays[1], 100),
            asyncio.to_thread(checks, first.compute, arrays[2]),
        )
        assert current() == outside
        for device, array in zip((first, second, first), arrays, strict=True):
            np.testing.assert_array_equal(await device.fetched(_value(device, array)), np.full(8, 200, np.float32))
    assert threading.current_thread() is threading.main_thread()


@pytest.mark.slow
@on_loop
async def test_t11_nothing_is_compiled_after_warm_up(card: Card, figures: Figures) -> None:
    with af.Graph() as graph:
        x = af.placeholder("float32", (16, 16))
        y = af.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, af.tanh(y @ y) * 0.5 + x), (np.int32(0), x))[1]
        loss = af.sum(af.square(y))
        fetches = [loss, *af.gradients(loss, [x])]
    async with af.Session(graph, devices=["cuda:0"], memory_limit=4 << 20) as session:
        await session.run(fetches, {x: np.full((16, 16), 0.1, np.float32)})
        warm = card.compiled()
        assert warm or not card.is_real
        figures["kernels"] = len(warm)
        for scale in (0.2, 0.3):
            await session.run(fetches, {x: np.full((16, 16), scale, np.float32)})
        assert card.compiled() == warm
