from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

from asyncflow.devices import CpuDevice, Device
from asyncflow.errors import SessionClosedError
from tests.patience import PATIENCE_S


def test_it_is_a_device() -> None:
    device: Device = CpuDevice(2, memory_limit=3 << 20)
    assert (device.name, device.kind, device.xp, device.memory.limit) == ("cpu:2", "cpu", np, 3 << 20)
    assert [stream.name for stream in (device.compute, device.h2d, device.d2h)] == [
        "cpu:2/compute",
        "cpu:2/h2d",
        "cpu:2/d2h",
    ]


def test_several_compute_streams() -> None:
    device: Device = CpuDevice(1, compute_streams=3)
    names = [stream.name for stream in device.compute_streams]
    assert names == ["cpu:1/compute", "cpu:1/compute:1", "cpu:1/compute:2"]
    assert device.compute is device.compute_streams[0]
    assert len(CpuDevice().compute_streams) == 1


@pytest.mark.parametrize("count", [0, -1])
def test_a_device_has_a_compute_stream(count: int) -> None:
    with pytest.raises(ValueError, match=f"the number of compute streams is a positive int, not {count}"):
        CpuDevice(compute_streams=count)


async def test_kernels_on_two_compute_streams_overlap() -> None:
    """Each waits for the other, which one thread could never do."""
    device, meeting = CpuDevice(compute_streams=2), threading.Barrier(2)
    for stream in device.compute_streams:
        stream.enqueue(meeting.wait, PATIENCE_S)
    for stream in device.compute_streams:
        await stream.record().wait()
    assert await device.aclose(PATIENCE_S)


async def test_a_value_crosses_compute_streams_behind_an_event() -> None:
    device, value = CpuDevice(compute_streams=2), np.zeros(1000)
    first, second = device.compute_streams
    for _ in range(100):
        first.enqueue(np.add, value, 1.0, value)
        second.wait(first.record())
        second.enqueue(np.multiply, value, 0.5, value)
        first.wait(second.record())
    await first.record().wait()
    np.testing.assert_allclose(value, 1.0)
    assert await device.aclose(PATIENCE_S)


def test_results_are_there_when_kernels_return() -> None:
    assert CpuDevice().asynchronous is None


def test_a_kernel_takes_the_longer_of_its_arithmetic_and_its_memory() -> None:
    device = CpuDevice()
    assert device.kernel_ns(0, 0) == 2_000
    assert device.kernel_ns(1e6, 1e3) == 102_000
    assert device.kernel_ns(1e3, 1e6) == 102_000


class _Accelerator:
    """A device with memory of its own, behind a link of 1 byte a nanosecond."""

    name = "sim:0"
    asynchronous = True

    def transfer_ns(self, nbytes: float, target: Device) -> float:
        """5 us, and the bytes."""
        return 5_000 + nbytes


def test_a_transfer_between_cpu_devices_is_by_reference() -> None:
    one, other = CpuDevice(0), CpuDevice(1)
    assert one.transfer_ns(1e9, one) == 0
    assert one.transfer_ns(1, other) == one.transfer_ns(1e9, other) == 30_000


def test_a_transfer_to_a_device_with_its_own_memory_takes_what_its_link_takes() -> None:
    accelerator: Any = _Accelerator()
    assert CpuDevice().transfer_ns(1_000, accelerator) == 6_000


async def test_only_streams_that_are_used_have_a_thread() -> None:
    one, other = CpuDevice(0), CpuDevice(1)
    one.compute.enqueue(int)
    other.h2d.enqueue(int)
    names = {thread.name for thread in threading.enumerate() if "cpu:" in thread.name}
    assert names == {"asyncflow:cpu:0/compute", "asyncflow:cpu:1/h2d"}
    assert await one.aclose(PATIENCE_S) and await other.aclose(PATIENCE_S)
    assert not any("cpu:" in thread.name for thread in threading.enumerate())


async def test_closing_is_idempotent_and_refuses_work_on_every_stream() -> None:
    device = CpuDevice(compute_streams=2)
    done: list[int] = []
    device.compute.enqueue(done.append, 1)
    assert await device.aclose(PATIENCE_S) and await device.aclose(PATIENCE_S)
    assert done == [1]
    for stream in (*device.compute_streams, device.h2d, device.d2h):
        with pytest.raises(SessionClosedError):
            stream.enqueue(int)


async def test_cancelling_a_close_leaves_no_stream_open() -> None:
    device, gate = CpuDevice(compute_streams=2), threading.Event()
    device.d2h.enqueue(gate.wait, PATIENCE_S)
    closing = asyncio.create_task(device.aclose(PATIENCE_S))
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    for stream in (*device.compute_streams, device.h2d, device.d2h):
        with pytest.raises(SessionClosedError):
            stream.enqueue(int)
    gate.set()
    assert await device.aclose(PATIENCE_S)


async def test_a_kernel_that_does_not_end_makes_the_close_say_so() -> None:
    device, gate = CpuDevice(), threading.Event()
    device.compute.enqueue(gate.wait, PATIENCE_S)
    assert not await device.aclose(0.0)
    gate.set()
    assert await device.aclose(PATIENCE_S)


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
    assert await device.aclose(PATIENCE_S)


def test_it_describes_itself() -> None:
    device = CpuDevice(1, memory_limit=2 << 20)
    kept = np.zeros(1 << 20, np.uint8)
    device.memory.track(kept)
    assert device.describe() == f"cpu:1  numpy {np.__version__}  1.0 MiB in 1 buffers, limit 2.0 MiB"
    assert CpuDevice().describe().endswith("0 B in 0 buffers, no limit")
