from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from asyncflow.devices import CpuDevice, Device
from asyncflow.errors import SessionClosedError

GRACE_S = 10.0


def test_it_is_a_device() -> None:
    device: Device = CpuDevice(2, memory_limit=3 << 20)
    assert (device.name, device.kind, device.xp, device.memory.limit) == ("cpu:2", "cpu", np, 3 << 20)
    assert [stream.name for stream in (device.compute, device.h2d, device.d2h)] == [
        "cpu:2/compute",
        "cpu:2/h2d",
        "cpu:2/d2h",
    ]


async def test_only_streams_that_are_used_have_a_thread() -> None:
    one, other = CpuDevice(0), CpuDevice(1)
    one.compute.enqueue(int)
    other.h2d.enqueue(int)
    names = {thread.name for thread in threading.enumerate() if "cpu:" in thread.name}
    assert names == {"asyncflow:cpu:0/compute", "asyncflow:cpu:1/h2d"}
    assert await one.aclose(GRACE_S) and await other.aclose(GRACE_S)
    assert not any("cpu:" in thread.name for thread in threading.enumerate())


async def test_closing_is_idempotent_and_refuses_work_on_every_stream() -> None:
    device = CpuDevice()
    done: list[int] = []
    device.compute.enqueue(done.append, 1)
    assert await device.aclose(GRACE_S) and await device.aclose(GRACE_S)
    assert done == [1]
    for stream in (device.compute, device.h2d, device.d2h):
        with pytest.raises(SessionClosedError):
            stream.enqueue(int)


async def test_cancelling_a_close_leaves_no_stream_open() -> None:
    device, gate = CpuDevice(), threading.Event()
    device.d2h.enqueue(gate.wait, GRACE_S)
    closing = asyncio.create_task(device.aclose(GRACE_S))
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    for stream in (device.compute, device.h2d, device.d2h):
        with pytest.raises(SessionClosedError):
            stream.enqueue(int)
    gate.set()
    assert await device.aclose(GRACE_S)


async def test_a_kernel_that_does_not_end_makes_the_close_say_so() -> None:
    device, gate = CpuDevice(), threading.Event()
    device.compute.enqueue(gate.wait, GRACE_S)
    assert not await device.aclose(0.0)
    gate.set()
    assert await device.aclose(GRACE_S)


async def test_a_value_copied_out_and_in_again_keeps_its_order() -> None:
    device = CpuDevice()
    value, host, back = np.zeros(1000), np.empty(1000), np.empty(1000)
    device.compute.enqueue(np.add, value, 1.0, value)
    device.d2h.wait(device.compute.record())
    device.d2h.enqueue(np.copyto, host, value)
    device.h2d.wait(device.d2h.record())
    device.h2d.enqueue(np.copyto, back, host)
    device.compute.wait(device.h2d.record())
    device.compute.enqueue(np.multiply, back, 2.0, back)
    await device.compute.record().wait()
    np.testing.assert_array_equal(back, np.full(1000, 2.0))
    assert await device.aclose(GRACE_S)


def test_it_describes_itself() -> None:
    device = CpuDevice(1, memory_limit=2 << 20)
    kept = np.zeros(1 << 20, np.uint8)
    device.memory.track(kept)
    assert device.describe() == f"cpu:1  numpy {np.__version__}  1.0 MiB in 1 buffers, limit 2.0 MiB"
    assert CpuDevice().describe().endswith("0 B in 0 buffers, no limit")
