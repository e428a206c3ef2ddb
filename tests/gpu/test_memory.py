"""T3, T4, T5: memory that other streams use, a primed pool, and a limit that holds."""

from __future__ import annotations

import random
from time import perf_counter
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.devices.cuda.device import CudaDevice
from asyncflow.devices.cuda.transfers.pinned import PinnedBuffer, shared_slab
from asyncflow.devices.memory import MemoryLimitExceeded
from tests.gpu.card import Card
from tests.gpu.figures import Figures
from tests.gpu.on_loop import on_loop, ticket

WORDS = 1 << 14
LIMIT = 64 << 20


def _slow_read(card: Card, device: CudaDevice, source: Any, buffer: PinnedBuffer) -> None:
    """A copy to the host, ordered after what compute has been given."""
    device.d2h.wait(device.compute.record())
    with device.d2h:
        kind = card.cupy.cuda.runtime.memcpyDeviceToHost
        card.cupy.cuda.runtime.memcpyAsync(buffer.ptr, source.data.ptr, source.nbytes, kind, device.d2h.raw.ptr)


async def _read_while_overwritten(card: Card, device: CudaDevice, *, held: bool) -> np.ndarray:
    """Return the values that a slow reader finds when its array is dropped and the memory reused; `held`: with the
    ledger.
    """
    buffer = shared_slab(card.cupy).take(4 * WORDS)
    assert buffer is not None
    with device.activate():
        source = card.cupy.full(WORDS, 1.0, np.float32)
    address = source.data.ptr
    with card.stall(device.d2h, ms=20):
        _slow_read(card, device, source, buffer)
        if held:
            device.d2h.hold(source)
        del source
        with device.activate():
            other = card.cupy.full(WORDS, 2.0, np.float32)
        assert (other.data.ptr == address) is not held
        await ticket(device.compute)
    await ticket(device.d2h)
    found = buffer.view(np.float32, (WORDS,)).copy()
    buffer.free()
    return found


@on_loop
async def test_t03_memory_dropped_while_another_stream_reads_it(card: Card) -> None:
    """Without the ledger the reader finds the next values: this shows that the next test can fail."""
    async with card.device(memory_limit=1 << 20) as device:
        assert (await _read_while_overwritten(card, device, held=False) == 2.0).all()


@pytest.mark.slow
@on_loop
async def test_t03_memory_held_while_another_stream_reads_it(card: Card) -> None:
    async with card.device(memory_limit=1 << 20) as device:
        for _ in range(card.choose(200, 20)):
            assert (await _read_while_overwritten(card, device, held=True) == 1.0).all()


def _allocate_at_random(card: Card, device: CudaDevice, count: int, seed: int) -> float:
    """Allocates, fills and frees; gives the µs of an allocation."""
    random_ = random.Random(seed)
    kept: list[Any] = []
    spent = 0.0
    for _ in range(count):
        if len(kept) > 32 or (kept and random_.random() < 0.45):
            del kept[random_.randrange(len(kept))]
            continue
        started = perf_counter()
        with device.activate():
            array = card.cupy.empty(random_.choice((1, 100, 5_000, 250_000)), np.float32)
        spent += perf_counter() - started
        kept.append(array)
    return 1e6 * spent / count


@on_loop
async def test_t04_a_primed_pool_asks_cuda_for_nothing(card: Card, figures: Figures) -> None:
    async with card.device(memory_limit=LIMIT) as device:
        primed = card.total_bytes(device)
        assert primed == LIMIT
        with card.never_blocks():
            figures["allocation_us"] = _allocate_at_random(card, device, card.choose(10_000, 500), seed=0)
        assert card.total_bytes(device) == primed
        assert device.memory.peak <= LIMIT
        assert device.memory.used == 0


@on_loop
async def test_t04_what_does_not_fit_is_refused_at_once(card: Card, figures: Figures) -> None:
    """A long kernel in flight does not hold the refusal up."""
    async with card.device(memory_limit=LIMIT) as device:
        with card.never_blocks(), card.stall(device.compute, ms=200), device.activate():
            started = perf_counter()
            with pytest.raises(MemoryLimitExceeded, match="cuda:0"):
                card.cupy.empty(LIMIT // 4 + 1, np.float32)
            figures.below("refusal_ms", 1e3 * (perf_counter() - started), 5.0)
        assert card.total_bytes(device) == LIMIT


def _training_step(steps: int, size: int) -> tuple[af.Graph, af.Tensor, list[af.Tensor]]:
    with af.Graph() as graph:
        x = af.placeholder("float32", (size, size))
        weight = af.Variable(np.eye(size, dtype=np.float32) * 0.5, name="weight").read()
        last = af.while_loop(lambda i, _: i < steps, lambda i, h: (i + 1, af.tanh(h @ weight) + x), (np.int32(0), x))[1]
        loss = af.sum(af.square(last))
        return graph, x, [loss, *af.gradients(loss, [x, weight])]


@pytest.mark.slow
@on_loop
async def test_t05_a_training_step_within_a_limit(card: Card, figures: Figures) -> None:
    """Same numbers as without a limit, and never more memory than that; what passes it is an error, and no more."""
    size = card.choose(512, 64)
    limit = LIMIT if card.is_real else 1 << 20
    fed = np.random.default_rng(0).standard_normal((size, size), np.float32) * np.float32(0.1)
    graph, x, fetches = _training_step(8, size)
    async with af.Session(graph, devices=["cuda:0"]) as session:
        free = await session.run(fetches, {x: fed})
    async with af.Session(graph, devices=["cuda:0"], memory_limit=limit) as session:
        device = session.devices[0]
        assert isinstance(device, CudaDevice)
        limited = await session.run(fetches, {x: fed})
        figures["peak_bytes"] = device.memory.peak
        assert device.memory.peak <= limit
        assert card.total_bytes(device) <= limit
    for one, other in zip(free, limited, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)

    graph, x, fetches = _training_step(2000, size)
    async with af.Session(graph, devices=["cuda:0"], memory_limit=limit, saved_values="keep") as session:
        device = session.devices[0]
        assert isinstance(device, CudaDevice)
        with pytest.raises(af.OutOfMemoryError, match="cuda:0"):
            await session.run(fetches, {x: fed})
        assert device.memory.peak <= limit
        assert card.total_bytes(device) <= limit
        figures["bytes_after_an_error"] = device.memory.used


@pytest.mark.slow
@on_loop
async def test_t05_a_training_step_that_swaps(card: Card, figures: Figures) -> None:
    """More is saved than fits: values move to the host and back, the loop's thread never waits, the bits are equal."""
    size, steps = card.choose(512, 128), card.choose(300, 40)
    limit = LIMIT if card.is_real else 20 * 4 * size * size
    fed = np.random.default_rng(0).standard_normal((size, size), np.float32) * np.float32(0.1)
    graph, x, fetches = _training_step(steps, size)

    async def stepped(session: af.Session, name: str) -> list[Any]:
        await session.run(fetches, {x: fed})  # compiles, and pins
        started = perf_counter()
        with card.never_blocks():
            values: list[Any] = await session.run(fetches, {x: fed})
        figures[f"{name}_ms"] = 1e3 * (perf_counter() - started)
        return values

    async with af.Session(graph, devices=["cuda:0"], memory_limit=card.choose(40, 12) * limit) as session:
        free = await stepped(session, "kept")
    async with af.Session(graph, devices=["cuda:0"], memory_limit=limit, saved_values="swap") as session:
        limited = await stepped(session, "swapped")
        memory = session.statistics().memory["cuda:0"]
        figures["moved_out_bytes"], figures["peak_bytes"] = memory.moved_out, memory.peak
        assert memory.moved_out >= memory.moved_in > limit // 4
        assert memory.peak <= limit
        assert card.total_bytes(session.devices[0]) <= limit  # type: ignore[arg-type]
    for one, other in zip(free, limited, strict=True):
        np.testing.assert_array_equal(one, other)
