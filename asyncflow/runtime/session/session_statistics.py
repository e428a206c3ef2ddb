"""`SessionStatistics`: what a session holds at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from asyncflow.devices.protocol import Device
from asyncflow.runtime.executor.kernels.limited_calls import LimitStatistics
from asyncflow.runtime.shared.batches import BatchStatistics


class DeviceMemory(NamedTuple):
    """The memory of one device of a session at one moment, in bytes.

    Attributes:
        held: in the device's memory now. On a CPU, compiled loops report their bytes at least every few milliseconds.
        peak: the most that was held at a time. On a CPU without a `memory_limit`, compiled runs report it within about
            5 %; memory that a kernel takes while it computes does not count.
        saved: of that, values that loops have saved for their gradients and that could move away; 0 where nothing can
            (`Session(spill_directory=)`, and a device with a memory of its own).
        host: such values that are in the memory of the host instead.
        disk: such values that are in the spill file.
        moved_out: bytes that have moved away so far.
        moved_in: bytes that have come back so far, without values that were no longer needed.
    """

    held: int
    peak: int
    saved: int = 0
    host: int = 0
    disk: int = 0
    moved_out: int = 0
    moved_in: int = 0


class SessionStatistics(NamedTuple):
    """Statistics of a session at one moment.

    Attributes:
        runs: runs in flight, streams that are iterated over among them.
        plans: compiled plans that are kept, one for each set of fetches and fed tensors.
        completed: runs that have ended, in whatever way.
        used_bytes: bytes held in the memory of each device, by its name. On a CUDA device that is all of this session
            there, in pieces of 512 bytes: values of runs, constants, variables, captured CUDA graphs, and values
            fetched by `on_device`, until the first run after their last reference is gone. On a CPU it is arrays of 4
            KiB or more that runs have made: values inside compiled runs, variables that a run has assigned, and results
            while the caller keeps them. All arrays that TensorArrays and loops with gradients keep count, too. Feeds,
            constants, and initial values of variables belong to the caller. With a limit, small values that stores keep
            count too, and results that a caller has got count no longer.
        memory: of each device, by its name.
        queued: with `max_runs`, runs that wait for their turn.
        refused: with `max_runs`, runs that were not started, because there were too many or it was too late, and
            requests that a server refused ahead (`asyncflow.serving`).
        batches: of each batched function that runs have called, by its name in the graph.
        late: number of refused runs whose turn came too late.
        queued_bytes: with `max_queued_bytes`, bytes of the feeds of queued runs.
        aside: with `max_runs`, runs in flight that have given their place to others until they go on. They wait at a
            queue, input, mutex or barrier, or for the consumer of their stream. Runs that wait for an atomic run
            meanwhile count, too. With ``max_runs="auto"`` also runs that wait in coroutines.
        limits: of each function with limits (``@af.op(timeout=, retries=, ...)``) that runs have called, by its name.
    """

    runs: int
    plans: int
    completed: int
    used_bytes: dict[str, int]
    memory: dict[str, DeviceMemory]
    queued: int = 0
    refused: int = 0
    batches: Mapping[str, BatchStatistics] = MappingProxyType({})
    late: int = 0
    queued_bytes: int = 0
    aside: int = 0
    limits: Mapping[str, LimitStatistics] = MappingProxyType({})


def device_memory(device: Device) -> DeviceMemory:
    """The memory of a device now."""
    held, peak = device.memory.exact, device.memory.peak
    if device.swapping is None:
        return DeviceMemory(held, peak)
    moved = device.swapping.statistics()
    return DeviceMemory(held, peak, moved.kept, moved.host, moved.disk, moved.moved_out, moved.moved_in)
