"""T6, T7, T8: copies through pinned memory, beside kernels, and between devices."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.devices.cuda.device import CudaDevice
from asyncflow.devices.cuda.transfers.pinned import PinnedSlab, shared_slab
from asyncflow.streams.cuda.stream import CudaStream
from tests.gpu.card import Card, now_us
from tests.gpu.figures import Figures
from tests.gpu.on_loop import on_loop, ticket


async def _elapsed_ms(card: Card, stream: CudaStream, work: Callable[[], None]) -> float:
    """The time of `work` on its stream."""
    first, last = (card.cupy.cuda.Event(block=True) for _ in range(2))
    with stream:
        first.record(stream.raw)
        work()
        last.record(stream.raw)
    await ticket(stream)
    elapsed: float = card.cupy.cuda.get_elapsed_time(first, last)
    return elapsed


def _copy(card: Card, stream: CudaStream, target: int, origin: int, nbytes: int) -> None:
    with stream:
        card.cupy.cuda.runtime.memcpyAsync(target, origin, nbytes, card.cupy.cuda.runtime.memcpyDefault, stream.raw.ptr)


@on_loop
async def test_t06_bandwidth_of_pinned_memory(card: Card, figures: Figures) -> None:
    nbytes, times = card.choose(64 << 20, 1 << 20), card.choose(10, 2)
    async with card.device() as device:
        buffer = await asyncio.to_thread(_pinned, card, nbytes)
        with device.activate():
            array = card.cupy.zeros(nbytes, np.uint8)
        await ticket(device.compute)
        pointer = array.data.ptr
        for name, stream, ends in (
            ("h2d", device.h2d, (pointer, buffer.ptr)),
            ("d2h", device.d2h, (buffer.ptr, pointer)),
            ("d2d", device.peer, (pointer + nbytes // 2, pointer)),
        ):
            size = nbytes // 2 if name == "d2d" else nbytes

            def work(stream: CudaStream = stream, ends: tuple[int, int] = ends, size: int = size) -> None:
                for _ in range(times):
                    _copy(card, stream, *ends, size)

            await _elapsed_ms(card, stream, work)
            gb_per_s = times * size / 1e6 / max(await _elapsed_ms(card, stream, work), 1e-6)
            figures.above(f"{name}_GB_per_s", gb_per_s, 20.0)
        buffer.free()


def _pinned(card: Card, nbytes: int) -> Any:
    """A buffer of a slab of its own."""
    return PinnedSlab(card.cupy, nbytes).take(nbytes)


@pytest.mark.slow
@on_loop
async def test_t06_round_trips_are_equal(card: Card) -> None:
    """In any size: within a piece, in several, more than the pinned memory has; and not contiguous."""
    random_ = np.random.default_rng(0)
    slab = shared_slab(card.cupy)
    async with card.device() as device:
        for size in (0, 1, 1000, 1 << 18, slab.nbytes // 4 + 3, card.choose(slab.nbytes // 2, slab.nbytes // 3)):
            array = random_.standard_normal(size, np.float32)
            value = await device.fed(array, "x")
            np.testing.assert_array_equal(await device.fetched(value), array)
        matrix = random_.standard_normal((64, 48), np.float32)
        value = await device.fed(matrix, "x")
        value.order(device.compute)
        with device.activate():
            value.array = value.array.T
        np.testing.assert_array_equal(await device.fetched(value), matrix.T)
    assert slab.free_bytes == slab.nbytes


@on_loop
async def test_t06_a_buffer_is_not_lent_again_before_its_copy_is_done(card: Card) -> None:
    slab = shared_slab(card.cupy)
    async with card.device() as device:
        array = np.arange(1 << 14, dtype=np.float32)
        value = await device.fed(array, "x")
        await ticket(device.h2d)
        with card.never_blocks(), card.stall(device.d2h, ms=50):
            found = device.fetched(value)
            taken = []
            while (buffer := slab.take(min(1 << 20, slab.nbytes))) is not None:
                buffer.view(np.uint8, (buffer.nbytes,)).fill(0xFF)
                taken.append(buffer)
            assert not found.done()
        for buffer in taken:
            buffer.free()
        np.testing.assert_array_equal(await found, array)


@on_loop
async def test_t06_a_copy_to_pageable_memory_blocks(card: Card, figures: Figures) -> None:
    """CuPy's ``blocking=False`` is not enough: this is why copies go through the slab."""
    async with card.device() as device:
        with device.activate():
            array = card.cupy.ones(1 << 20, np.float32)
        await ticket(device.compute)

        card.spin(device.compute, 20)
        before = [] if card.fake is None else card.fake.blocking()
        started = now_us()
        with device.activate():
            array.get(stream=device.compute.raw, blocking=False)
        figures["get_behind_a_kernel_of_20_ms_ms"] = (now_us() - started) / 1e3
        assert card.fake is None or len(card.fake.blocking()) > len(before)


class _Copies:
    """A kernel and copies both ways, each on a stream of its own, that take about as long as one another."""

    def __init__(self, card: Card, device: CudaDevice, nbytes: int, buffers: list[Any]) -> None:
        with device.activate():
            self._arrays = [card.cupy.zeros(nbytes, np.uint8) for _ in range(2)]
        self._card, self._compute, self._buffers, self._nbytes = card, device.compute, buffers, nbytes
        self.streams = {"kernel": device.compute, "h2d": device.h2d, "d2h": device.d2h}
        self.kernel_ms, self.blocks, self.pieces = 0.0, 1, 4

    def give(self, name: str) -> None:
        """Launch the kernel, or copy the bytes of four arrays in several pieces."""
        if name == "kernel":
            self._card.spin(self._compute, self.kernel_ms, self.blocks)
            return
        at = int(name == "d2h")
        size, ends = 4 * self._nbytes // self.pieces, [self._arrays[at].data.ptr, self._buffers[at].ptr]
        for piece in range(self.pieces):
            target, origin = (end + piece * size % self._nbytes for end in (reversed(ends) if at else ends))
            _copy(self._card, self.streams[name], target, origin, size)

    async def alone_ms(self, name: str) -> float:
        return await _elapsed_ms(self._card, self.streams[name], lambda: self.give(name))

    async def together_ms(self, *names: str, waits: str = "events of ours") -> dict[str, list[float]]:
        """Return the start and end of each part on its stream, given in this order; and of all, by the compute
        stream.
        """
        events = self._card.cupy.cuda.Event

        def marked(stream: CudaStream) -> Any:
            event = events(block=True)
            with stream:
                event.record(stream.raw)
            return event

        def wait(stream: CudaStream, other: CudaStream) -> None:
            if waits == "events of ours":
                stream.wait(other.record())
            else:  # those that a thread can sleep on, which all were once
                event = events(block=True, disable_timing=True)
                with other:
                    event.record(other.raw)
                stream.raw.wait_event(event)

        begin, others = marked(self._compute), [self.streams[name] for name in names if name != "kernel"]
        if waits != "none before":
            for stream in others:
                wait(stream, self._compute)
        spans = {}
        for name in names:
            first = marked(self.streams[name])
            self.give(name)
            spans[name] = first, marked(self.streams[name])
        for stream in others:
            wait(self._compute, stream)
        spans["all"] = begin, marked(self._compute)
        await ticket(self._compute)
        elapsed = self._card.cupy.cuda.get_elapsed_time
        return {name: [round(elapsed(begin, event), 3) for event in span] for name, span in spans.items()}


@on_loop
async def test_t07_copies_run_beside_kernels(card: Card, figures: Figures) -> None:
    """All three together take about as long as the kernel, or as both copies: what the link gives is not ours."""
    nbytes = card.choose(128 << 20, 1 << 16)
    async with card.device() as device:
        buffers = [await asyncio.to_thread(_pinned, card, nbytes) for _ in range(2)]
        copies = _Copies(card, device, nbytes, buffers)
        await ticket(device.compute)
        alone = {name: await copies.alone_ms(name) for name in ("h2d", "d2h")}
        copies.kernel_ms = max(alone.values())
        alone["kernel"] = await copies.alone_ms("kernel")
        figures["alone_ms"] = alone
        tries = figures["together_ms"] = [await copies.together_ms("kernel", "h2d", "d2h") for _ in range(3)]

        # What to look at if they take longer: which of the three began late, or took longer, and in which company.
        others: dict[str, Any] = {}
        for waits in ("events that sleep", "none before"):
            others[waits] = [await copies.together_ms("kernel", "h2d", "d2h", waits=waits) for _ in range(2)]
        others["kernel last"] = [await copies.together_ms("d2h", "h2d", "kernel") for _ in range(2)]
        for names in (("h2d", "d2h"), ("kernel", "h2d"), ("kernel", "d2h")):
            others[" and ".join(names)] = await copies.together_ms(*names)
        copies.pieces = 64
        others["copies in 64 pieces"] = await copies.together_ms("kernel", "h2d", "d2h")
        copies.pieces, copies.blocks = 4, 264  # two on each multiprocessor of an H100, all it takes of this size
        others["a kernel that fills the card"] = await copies.together_ms("kernel", "h2d", "d2h")
        copies.blocks = 1
        copies.streams["d2h"], copies.streams["h2d"] = device.peer, device.d2h
        others["on other streams"] = [await copies.together_ms("kernel", "h2d", "d2h") for _ in range(2)]
        figures["others_ms"] = others
        figures["connections"] = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "8, by default")
        figures["streams_of_the_process"] = len(device.compute._card._made)
        # Whose machine this is may copy as well, so the best of some tries counts.
        longest = min(span["all"][1] for span in tries) / max(alone["kernel"], others["h2d and d2h"]["all"][1], 1e-6)
        figures.below("together_over_longest", longest, 1.3)
        assert longest > 0
        for buffer in buffers:
            buffer.free()


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
@on_loop
async def test_t08_values_between_logical_devices_of_one_card(card: Card, count: int) -> None:
    """Only events order the streams, and every value arrives."""
    random_ = random.Random(count)
    transfers = card.choose(500, 60)
    async with card.devices(count, memory_limit=32 << 20) as devices:
        values = [device.constant(np.full(4096, 1.0, np.float32)) for device in devices]
        expected = [1.0] * count
        for index in range(transfers):
            source, target = random_.sample(range(count), 2)
            here, there = devices[target], devices[source]
            for stream in random_.sample([there.compute, here.compute, here.peer], index % 3):
                card.spin(stream, random_.random())
            value = _received(here, there, values[source])
            value.settle(here.compute)
            with here.activate():
                value.array = value.array + 1.0
            values[target], expected[target] = value, expected[source] + 1.0
            if index % 32 == 31:  # no more in flight than a session would have
                await asyncio.gather(*(ticket(device.compute) for device in devices))
        for device, value, number in zip(devices, values, expected, strict=True):
            np.testing.assert_array_equal(await device.fetched(value), np.full(4096, number, np.float32))


def _received(here: CudaDevice, there: CudaDevice, value: Any) -> Any:
    """The value of another device, at once."""
    outcomes: list[tuple[Any, BaseException | None]] = []
    here.receive(value, there, lambda value, error: outcomes.append((value, error)))
    ((found, error),) = outcomes
    assert error is None
    return found


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
@on_loop
async def test_t08_an_all_reduce_over_logical_devices(card: Card, count: int) -> None:
    """Around a ring, a share of the values at a time; every device ends with NumPy's sum."""
    names = [f"cuda:{index}" for index in range(count)]
    with af.Graph() as graph:
        fed = [af.placeholder("float32", (count * 1000,)) for _ in names]
        shares = []
        for name, x in zip(names, fed, strict=True):
            with af.device(name):
                shares.append([x[1000 * part : 1000 * (part + 1)] for part in range(count)])
        for part in range(count):
            for step in range(1, count):
                rank = (part + step) % count
                with af.device(names[rank]):
                    shares[rank][part] = shares[rank - 1][part] + shares[rank][part]
            for step in range(count, 2 * count - 1):
                rank = (part + step) % count
                with af.device(names[rank]):
                    shares[rank][part] = af.identity(shares[rank - 1][part])
        totals = []
        for name, parts in zip(names, shares, strict=True):
            with af.device(name):
                totals.append(af.concat(parts))
    numbers = [np.arange(count * 1000, dtype=np.float32) + 10_000 * index for index in range(count)]
    async with af.Session(graph, devices=names) as session:
        for _ in range(3):
            found = await session.run(totals, dict(zip(fed, numbers, strict=True)))
            for total in found:
                np.testing.assert_array_equal(total, sum(numbers))
