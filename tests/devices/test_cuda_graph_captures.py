"""A CUDA device one of whose streams captures, on the stand-in for CuPy: other threads, copies and errors meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
import pytest

from asyncflow.devices.captures import WARM_UPS, GraphCode
from asyncflow.devices.cuda import device as cuda
from asyncflow.devices.cuda.device import CudaDevice
from asyncflow.devices.cuda.graphs import graph as cuda_graph
from asyncflow.devices.cuda.graphs.graph import CapturedRegion, PrivateMemory, capture
from asyncflow.devices.cuda.memory import PrivatePool
from asyncflow.devices.cuda.transfers.pinned import PinnedSlab
from asyncflow.devices.cuda.values import CudaArray
from asyncflow.streams.cuda.stream import capturing
from tests.fake_cupy import FakeCupy
from tests.patience import PATIENCE_S

VALUE = np.arange(100_000, dtype=np.float32)


@pytest.fixture
def cupy() -> Iterator[FakeCupy]:
    with FakeCupy() as fake:
        yield fake


@pytest.fixture
async def device(cupy: FakeCupy) -> AsyncIterator[CudaDevice]:
    device = CudaDevice(cupy, pinned=PinnedSlab(cupy, 256 << 10))
    await device.open()
    yield device
    assert await device.aclose(PATIENCE_S)


class Lock:
    """`capturing`, which tells when a thread has to wait for it."""

    def __init__(self, waits: threading.Event) -> None:
        self.waits = waits
        self.release = capturing.release

    def acquire(self) -> None:
        if not capturing.acquire(blocking=False):
            self.waits.set()
            capturing.acquire()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Beside:
    """A call on another thread: `begin` returns when it has ended, or waits for `capturing`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, call: Callable[[], Any]) -> None:
        self.has_ended_or_waits = threading.Event()
        for module in (cuda, cuda_graph):
            monkeypatch.setattr(module, "capturing", Lock(self.has_ended_or_waits), raising=False)
        self._call = call
        self._results: list[Any] = []
        self._errors: list[BaseException] = []
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            self._results.append(self._call())
        except RuntimeError as error:
            self._errors.append(error)
        self.has_ended_or_waits.set()

    def begin(self) -> None:
        self._thread.start()
        assert self.has_ended_or_waits.wait(PATIENCE_S)

    def end(self) -> Any:
        self._thread.join(PATIENCE_S)
        assert not self._errors
        return self._results[0]


def region(device: CudaDevice, function: Callable[..., Any]) -> CapturedRegion:
    return CapturedRegion(device.cupy, device.compute, device.pool, function, "region", GraphCode(function))


def upload(device: CudaDevice, value: np.ndarray[Any, Any]) -> CudaArray:
    """An array that a kernel on another thread uses, as a constant."""
    return CudaArray(device.upload(value), device, device.compute, "upload")


COPIES = {"constant": CudaDevice.constant, "upload": upload}


@pytest.mark.parametrize("name", COPIES)
async def test_a_thread_copies_while_the_loop_captures(
    device: CudaDevice, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    copying = Beside(monkeypatch, lambda: COPIES[name](device, VALUE))
    calls = 0

    def function(x: Any) -> Any:
        nonlocal calls
        calls += 1
        doubled = x * 2
        if calls == WARM_UPS + 1:
            copying.begin()
        return (doubled + 1,)

    captured = region(device, function)
    x = await device.fed(VALUE, "x")
    x.settle(device.compute)
    with device.compute:
        results = [captured(x.array)[0] for _ in range(WARM_UPS + 3)]
    assert calls == WARM_UPS + 1, "it was not captured"
    copied = copying.end()
    with device.compute:
        results.append(captured(x.array)[0])
    for result in results:
        np.testing.assert_array_equal(result.get(), VALUE * 2 + 1)
    np.testing.assert_array_equal(await device.fetched(copied), VALUE)


async def test_a_thread_gets_no_memory_of_a_graph(device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    copying = Beside(monkeypatch, lambda: device.constant(VALUE))
    with PrivateMemory(device.compute, PrivatePool(device.cupy, device.pool, "CUDA graph")):
        copying.begin()
    copied = copying.end()
    assert [buffer.label for buffer in device.memory.top()] == ["constant"]
    np.testing.assert_array_equal(await device.fetched(copied), VALUE)


async def test_the_loop_captures_while_a_copy_of_a_thread_waits_for_the_card(
    cupy: FakeCupy, device: CudaDevice
) -> None:
    def waiting() -> list[str]:
        return [name for thread, name in cupy.engine.calls if thread == copying.ident and "ynchronize" in name]

    copied: list[Any] = []
    copying = threading.Thread(target=lambda: copied.append(device.constant(VALUE)))
    cupy.pause()
    with device.compute:
        x = cupy.ones(3)
    copying.start()
    async with asyncio.timeout(PATIENCE_S):
        # Nothing tells when a thread of the stand-in waits, and no longer allocates.
        while not (waiting() and capturing.acquire(blocking=False)):  # noqa: ASYNC110
            await asyncio.sleep(0)
    capturing.release()
    with device.compute:
        graph, result = capture(device.compute.raw, lambda: x * 2)
        graph.launch(stream=device.compute.raw)
    cupy.resume()
    copying.join(PATIENCE_S)
    assert result.get().tolist() == [2, 2, 2]
    np.testing.assert_array_equal(await device.fetched(copied[0]), VALUE)


async def test_an_error_during_a_capture_loses_neither_the_device_nor_the_graph(device: CudaDevice) -> None:
    calls = 0

    def function(x: Any) -> Any:
        nonlocal calls
        calls += 1
        error = RuntimeError("of the user's")
        assert device.cause_of(error) is error
        return (x + 1,)

    captured = region(device, function)
    with device.compute:
        x = device.cupy.zeros(3)
        for _ in range(WARM_UPS + 3):
            assert captured(x)[0].get().tolist() == [1, 1, 1]
    assert calls == WARM_UPS + 1
    device.check()


async def test_a_copy_from_the_host_costs_the_graph_only(device: CudaDevice) -> None:
    captured = region(device, lambda x: (x + device.upload(np.arange(3.0)),))
    with device.compute:
        x = device.cupy.zeros(3)
        for _ in range(WARM_UPS + 3):
            assert captured(x)[0].get().tolist() == [0, 1, 2]
    device.check()
    assert (await device.fetched(await device.fed(np.arange(3.0), "x"))).tolist() == [0, 1, 2]
