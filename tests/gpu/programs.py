"""Programs that tests run in a process of its own: ``python -m tests.gpu.programs NAME`` prints the results as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Callable, Coroutine
from time import perf_counter
from typing import Any

import numpy as np

import asyncflow as af
from asyncflow.devices.cuda.device import CudaDevice
from asyncflow.errors import DeviceLostError
from tests.gpu.card import GRACE_S, Card, opened_card

Outcome = dict[str, Any]


def _device(session: af.Session) -> CudaDevice:
    device = session.devices[0]
    assert isinstance(device, CudaDevice)
    return device


async def _errors(work: Coroutine[Any, Any, object]) -> list[str]:
    """Return the names of the error and of its causes, down to the device's loss."""
    names: list[str] = []
    try:
        await work
    except Exception as raised:
        error: BaseException | None = raised
        while error is not None and names[-1:] != [DeviceLostError.__name__]:
            names.append(type(error).__name__)
            error = error.__cause__
    return names


async def lost_device(card: Card) -> Outcome:
    """A kernel writes where there is no memory, while tickets and a run wait behind it."""
    with af.Graph() as graph:
        x = af.placeholder("float32", (None,))
        y = af.sum(x * 2.0)
    outcomes: list[BaseException | None] = []
    session = af.Session(graph, devices=["cuda:0"])
    async with session:
        await session.run(y, {x: np.ones(8, np.float32)})
        device = _device(session)
        everyone = asyncio.Event()

        def deliver(error: BaseException | None) -> None:
            outcomes.append(error)
            if len(outcomes) == 50:
                everyone.set()

        with card.stall(device.compute, ms=50):
            card.fault(device.compute)
            for _ in range(50):
                device.compute.notify(deliver)
            run = asyncio.ensure_future(_errors(session.run(y, {x: np.ones(8, np.float32)})))
            await asyncio.sleep(0)
        await everyone.wait()
        found: Outcome = {"run": await run}
        found["next_run"] = await _errors(session.run(y, {x: np.ones(8, np.float32)}))
    found["tickets"] = {"delivered": len(outcomes), "failed": sum(error is not None for error in outcomes)}
    found["closed"] = True
    return found


async def shutdown(card: Card) -> Outcome:
    """Devices close with work in flight, twice."""
    found: Outcome = {"close_s": [], "values": []}
    before = threading.active_count()
    for _ in range(2):
        device = CudaDevice(card.cupy, 0, memory_limit=16 << 20)
        await device.open()
        delivered: list[BaseException | None] = []
        fetched: list[Any] = []
        with card.stall(device.compute, device.d2h, ms=100):
            with device.activate():
                array = card.cupy.full(1 << 10, 3.0, np.float32)
            value = device.constant(np.arange(4.0))
            for _ in range(20):
                device.compute.notify(delivered.append)
            value.to_host(lambda array, error, fetched=fetched: fetched.append(array.tolist()))
            del array, value
            closing = asyncio.ensure_future(device.aclose(GRACE_S))
            await asyncio.sleep(0)
        started = perf_counter()
        assert await closing
        found["close_s"].append(perf_counter() - started)
        found["values"] += fetched
        assert delivered == [None] * 20
        found["used"] = device.memory.used
    found["threads"] = [thread.name for thread in threading.enumerate() if thread.name.startswith("asyncflow")]
    found["more_threads"] = threading.active_count() - before
    return found


async def peers(card: Card) -> Outcome:
    """Values go around between four logical devices, and to the host and back."""
    names = [f"cuda:{index}" for index in range(4)]
    with af.Graph() as graph:
        x = y = af.placeholder("float32", (64, 64))
        for name in names * 3:
            with af.device(name):
                y = af.tanh(af.matmul(y, y) / 64.0) + 0.25
    fed = np.full((64, 64), 0.125, np.float32)
    async with af.Session(graph, devices=names, memory_limit=16 << 20) as session:
        values = [await session.run(y, {x: fed}) for _ in range(5)]
    assert all(np.array_equal(value, values[0]) for value in values)
    return {"sum": float(values[0].sum())}


async def graphs(card: Card) -> Outcome:
    """A loop, its gradient and a branch."""
    with af.Graph() as graph:
        x = af.placeholder("float32", (8, 8))
        looped = af.while_loop(lambda i, _: i < 5, lambda i, y: (i + 1, af.tanh(y @ y)), (np.int32(0), x))[1]
        loss = af.cond(af.sum(looped) > 0, lambda: af.sum(looped), lambda: -af.sum(looped))
        (gradient,) = af.gradients(loss, [x])
    async with af.Session(graph, devices=["cuda:0"], memory_limit=16 << 20) as session:
        value = await session.run(gradient, {x: np.full((8, 8), 0.25, np.float32)})
    return {"sum": float(np.sum(value))}


PROGRAMS: dict[str, Callable[[Card], Coroutine[Any, Any, Outcome]]] = {
    program.__name__: program for program in (lost_device, shutdown, peers, graphs)
}


def main(name: str) -> None:
    with opened_card() as card:
        print(json.dumps(af.run(PROGRAMS[name](card))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
