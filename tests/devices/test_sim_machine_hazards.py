"""The race detector: ordered accesses pass, and unordered ones are found."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import pytest

from asyncflow.devices.sim.device import IN_ORDER_BYTES, SimDevice
from asyncflow.devices.sim.machine import SimMachine
from asyncflow.devices.sim.values import SimArray, SimOpaque, poison
from asyncflow.errors import HazardError, InternalError
from asyncflow.streams.virtual import VirtualClockLoop
from tests.devices.sim_machines import bind, fetched, idle, machine_of, received


@pytest.fixture
def machine() -> Iterator[SimMachine]:
    loop = VirtualClockLoop()
    yield machine_of(loop)
    loop.close()


@pytest.fixture
def unordered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device whose streams wait for nothing."""
    monkeypatch.setattr(SimDevice, "order", lambda *_: None)


def array(device: SimDevice, value: float = 1.0, size: int = 8) -> SimArray:
    result = bind(device, lambda: np.full(size, value, np.float32), "make")()
    assert isinstance(result, SimArray)
    return result


# -- reads without a wait --------------------------------------------------------------------------------------------


def test_streams_of_a_device_are_ordered_by_it(machine: SimMachine) -> None:
    device = SimDevice(machine, compute_streams=2)
    x = array(device)
    y = bind(device, np.negative, "negate", stream=1)(x)
    assert y.written.stream is device.compute_streams[1]
    assert y.written.started_ns >= x.written.time_ns
    assert machine.hazards == []


@pytest.mark.usefixtures("unordered")
def test_a_read_without_a_wait_is_found(machine: SimMachine) -> None:
    device = SimDevice(machine, compute_streams=2)
    x = array(device)
    message = (
        r"'negate' reads 'make' on stream sim:0/compute:1 with no event that it is written: 'make' writes it on stream "
        r"sim:0/compute; record an event on sim:0/compute after that and let sim:0/compute:1 wait for it"
    )
    with pytest.raises(HazardError, match=message):
        bind(device, np.negative, "negate", stream=1)(x)
    assert len(machine.hazards) == 1
    device.compute_streams[1].wait(x.written)
    bind(device, np.negative, stream=1)(x)


@pytest.mark.usefixtures("unordered")
@pytest.mark.parametrize("read", ["fetch", "receive"])
def test_a_copy_without_a_wait_is_found(machine: SimMachine, read: str) -> None:
    one, other = SimDevice(machine, 0), SimDevice(machine, 1)
    x = array(one, size=IN_ORDER_BYTES)
    if read == "fetch":
        with pytest.raises(HazardError, match=r"reads 'make' on stream sim:0/d2h .* on stream sim:0/compute;"):
            x.to_host(lambda *_: None)
    else:
        outcome: list[Any] = []
        other.receive(x, one, lambda *result: outcome.append(result))
        assert isinstance(outcome[0][1], HazardError)
        assert "on stream sim:1/peer" in str(outcome[0][1])


@pytest.mark.usefixtures("unordered")
def test_a_kernel_that_does_not_wait_for_a_copy_is_found(machine: SimMachine) -> None:
    device = SimDevice(machine)
    x = device.copy_in(np.ones(IN_ORDER_BYTES))
    with pytest.raises(HazardError, match="'feed' writes it on stream sim:0/h2d"):
        bind(device, np.negative)(x)


@pytest.mark.usefixtures("unordered")
def test_what_the_host_has_seen_done_needs_no_event(machine: SimMachine) -> None:
    device = SimDevice(machine, compute_streams=2)
    x = array(device)
    machine.loop.run_until_complete(x.written.wait())
    bind(device, np.negative, stream=1)(x)
    assert machine.hazards == []


def test_the_host_cannot_look_at_a_value(machine: SimMachine) -> None:
    x = array(SimDevice(machine))
    for look in (np.asarray, bool, list):
        with pytest.raises(HazardError, match=r"reads 'make' on sim:0 .* fetch the value first"):
            look(x)


def test_a_value_of_another_device_has_to_be_sent(machine: SimMachine) -> None:
    x = array(SimDevice(machine, 0))
    with pytest.raises(InternalError, match="'kernel' runs on sim:1 and was given 'make', which is on sim:0"):
        bind(SimDevice(machine, 1), np.negative)(x)


# -- memory that is freed too early ----------------------------------------------------------------------------------


def test_memory_of_one_stream_is_reused_in_its_order(machine: SimMachine) -> None:
    device = SimDevice(machine)
    x = array(device)
    y = bind(device, np.negative)(x)
    del x
    del y
    array(device)
    assert machine.hazards == []


def test_what_another_stream_reads_stays_until_it_has(machine: SimMachine) -> None:
    device = SimDevice(machine, compute_streams=2)
    x = array(device, size=100)
    y = bind(device, np.negative, stream=1)(x)
    storage, used = x.storage, device.memory.used
    del x, storage
    assert device.memory.used == used, "the other stream still reads it"
    machine.loop.run_until_complete(idle(device))
    assert device.memory.used == y.nbytes
    assert machine.hazards == []


def test_memory_freed_while_another_stream_reads_it_is_found(
    machine: SimMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = SimDevice(machine, compute_streams=2)
    x = array(device)
    monkeypatch.setattr(SimDevice, "hold", lambda *_: None)
    bind(device, np.negative, "negate", stream=1)(x)
    assert machine.hazards == []
    del x
    message = (
        r"the buffer of 'make' on sim:0 \(32 bytes\) is freed while stream sim:0/compute:1 still reads it "
        r"\('negate'\): it goes back to the pool of sim:0/compute, .* until an event recorded on sim:0/compute:1"
    )
    with pytest.raises(HazardError, match=message):
        array(device)
    array(device)  # it is raised once
    assert len(machine.hazards) == 1


@pytest.mark.parametrize("call", ["fetch", "feed", "receive", "when_done"])
def test_any_next_call_says_so(machine: SimMachine, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    one, other = SimDevice(machine, 0), SimDevice(machine, 1)
    x, y = array(one), array(one)
    monkeypatch.setattr(SimDevice, "hold", lambda *_: None)
    received(other, x, one)
    del x

    def delivered(_: Any, error: BaseException | None) -> None:
        assert error is not None
        raise error  # whoever receives gets it, not the sender who calls

    calls: dict[str, Any] = {
        "fetch": lambda: y.to_host(lambda *_: None),
        "feed": lambda: other.copy_in(np.ones(3)),
        "receive": lambda: other.receive(y, one, delivered),
        "when_done": lambda: other.when_done(lambda _: None),
    }
    with pytest.raises(HazardError, match="freed while stream sim:1/peer still reads it"):
        calls[call]()


def test_a_wait_by_the_pools_stream_is_as_good(machine: SimMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimDevice(machine, compute_streams=2)
    x = array(device)
    monkeypatch.setattr(SimDevice, "hold", lambda *_: None)
    y = bind(device, np.negative, stream=1)(x)
    device.compute.wait(y.written)
    del x
    machine.check()


def test_memory_for_a_copy_may_still_be_in_use_by_compute(machine: SimMachine) -> None:
    device = SimDevice(machine)
    x = array(device)
    fed = device.copy_in(np.ones(IN_ORDER_BYTES))
    assert fed.written.started_ns >= x.written.time_ns
    assert device.h2d.has_seen(x.written)


def test_memory_for_a_copy_is_free_where_the_host_has_seen_the_end_of_compute(machine: SimMachine) -> None:
    """Then the copy waits for nothing, and the host makes no event."""
    device = SimDevice(machine)
    x = array(device)
    machine.loop.run_until_complete(x.written.wait())
    events = device.thread.calls["event"]
    device.copy_in(np.ones(IN_ORDER_BYTES))
    assert device.thread.calls["event"] == events and machine.hazards == []


def test_a_small_copy_beside_a_large_one_holds_up_no_kernel(machine: SimMachine) -> None:
    """A card makes one copy in a direction at a time; kernels behind the small one would wait for the large one."""
    device = SimDevice(machine)
    large, small = device.copy_in(np.ones(IN_ORDER_BYTES)), device.copy_in(np.ones(3))
    assert {large.written.stream, small.written.stream} == {device.h2d}
    machine.loop.run_until_complete(small.written.wait())
    assert device.copy_in(np.ones(3)).written.stream is device.compute


@pytest.mark.usefixtures("unordered")
def test_a_small_copy_needs_no_wait(machine: SimMachine) -> None:
    """The copy is on the stream of its readers, also where the copy is the last use of its memory."""
    device = SimDevice(machine)
    x = device.copy_in(np.ones(3))
    y = bind(device, np.negative)(x)
    del x
    y.to_host(lambda *_: None)
    assert {y.written.stream, *(y.storage.readers or {})} == {device.compute} and machine.hazards == []


def test_closed_devices_are_forgotten(machine: SimMachine) -> None:
    """A machine on which many sessions come and go forgets them, and takes their remains for no hazard.

    One device stays open, and receives from all of them.
    """
    staying = SimDevice(machine, 1)
    kept: list[SimArray] = []

    async def session() -> None:
        device = SimDevice(machine, 0)
        x = array(device)
        kept.append(x)
        received(staying, x, device)
        await fetched(staying, array(staying))
        assert await device.aclose(1.0)

    for _ in range(20):
        machine.loop.run_until_complete(session())
    n_streams = 4
    assert len(machine.host.seen) <= n_streams
    array(staying)
    assert all(len(stream._seen) <= n_streams for stream in staying._streams.values())
    kept.clear()
    array(staying)
    machine.check()


@pytest.mark.usefixtures("unordered")
def test_a_closed_device_that_has_not_ended_is_not_forgotten(machine: SimMachine) -> None:
    """The work of the device may go on, so that a read of it is a hazard as before."""
    one, other = SimDevice(machine, 0), SimDevice(machine, 1)
    x = bind(one, np.ones, "slow", flops=1e12, infer=lambda _: None)(8)
    machine.loop.run_until_complete(idle(other))
    assert not machine.loop.run_until_complete(one.aclose(0.001))
    errors: list[BaseException | None] = []
    other.receive(x, one, lambda _, error: errors.append(error))
    assert isinstance(errors[0], HazardError) and "'slow' writes it on stream sim:0/compute" in str(errors[0])


@pytest.mark.parametrize("held", [True, False])
def test_a_cancelled_run_leaves_buffers_to_copies(
    machine: SimMachine, monkeypatch: pytest.MonkeyPatch, held: bool
) -> None:
    """Everything a run has goes at once, while copies on both sides are under way."""
    if not held:
        monkeypatch.setattr(SimDevice, "hold", lambda *_: None)
        monkeypatch.setattr(machine, "landing", WeakValueDictionary())
    one, other = SimDevice(machine, 0), SimDevice(machine, 1)

    async def program() -> None:
        x = array(one, size=10_000)
        received(other, x, one)
        x.to_host(lambda *_: None)
        await asyncio.Event().wait()

    async def main() -> None:
        running = asyncio.create_task(program())
        await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        del running
        if held:
            assert (one.memory.used, other.memory.used) == (40_000, 40_000)
        await asyncio.gather(idle(one), idle(other))

    if held:
        machine.loop.run_until_complete(main())
        assert (one.memory.used, other.memory.used) == (0, 0)
        assert machine.hazards == []
    else:
        with pytest.raises(HazardError, match="sim:1/peer still"):
            machine.loop.run_until_complete(main())


@pytest.mark.parametrize("copy", ["receive", "feed"])
@pytest.mark.parametrize("is_used", [True, False])
def test_memory_that_a_copy_fills_is_kept_until_its_pool_waits_for_the_copy(
    machine: SimMachine, copy: str, is_used: bool
) -> None:
    """The host is far ahead: the copy of a value that it has used and dropped has not even begun."""
    one, other = SimDevice(machine, 0), SimDevice(machine, 1)
    x = received(other, array(one, size=10_000), one) if copy == "receive" else other.copy_in(np.ones(10_000, "f4"))
    y = bind(other, np.negative)(x) if is_used else None
    del x
    assert other.memory.used == 40_000, "of what was used there is the result alone, of what was not there is the copy"
    del y
    array(other, size=10_000)
    assert other.memory.used == (0 if is_used else 40_000)
    machine.loop.run_until_complete(idle(other))
    assert other.memory.used == 0
    assert machine.hazards == []


def test_another_stream_that_waits_does_not_give_the_memory_back(machine: SimMachine) -> None:
    """The memory belongs to the first stream, which may use it again as soon as it is free."""
    one, other = SimDevice(machine, 0), SimDevice(machine, 1, compute_streams=2)
    x = received(other, array(one, size=10_000), one)
    y = bind(other, np.negative, stream=1)(x)
    del x
    array(other, size=10_000)
    assert other.memory.used == 80_000
    machine.loop.run_until_complete(idle(other))
    assert other.memory.used == y.nbytes
    assert machine.hazards == []


# -- poison ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "pattern"),
    [
        ("float32", np.nan),
        ("complex64", np.nan),
        ("bool", True),
        ("uint8", 0xDD),
        ("int32", np.uint32(0xDDDDDDDD).view(np.int32)),
    ],
)
def test_freed_memory_is_overwritten(machine: SimMachine, dtype: str, pattern: Any) -> None:
    device = SimDevice(machine)
    made: list[np.ndarray] = []

    def kernel() -> np.ndarray:
        made.append(np.zeros((2, 3), dtype))
        return made[-1].T

    x = bind(device, kernel)()
    assert not made[0].any()
    del x
    np.testing.assert_array_equal(made[0], np.full((2, 3), pattern, dtype))


def test_foreign_memory_is_not_overwritten(machine: SimMachine) -> None:
    device = SimDevice(machine)
    mine = np.ones(4)
    device.constant(mine)
    fed = device.copy_in(mine)
    bind(device, lambda x: x)(mine)
    del fed
    gc.collect()
    assert mine.tolist() == [1, 1, 1, 1]
    read_only = np.ones(4)
    read_only.flags.writeable = False
    poison(read_only)
    poison(read_only[1:])
    assert read_only.tolist() == [1, 1, 1, 1]


def test_a_view_keeps_the_memory_it_looks_into(machine: SimMachine) -> None:
    device = SimDevice(machine)
    x = array(device, 7.0, 100)
    view = bind(device, lambda x: x.reshape(10, 10)[1:3], "view", flops=0.0)(x)
    assert view.storage is x.storage and view.written is x.written and view.shape == (2, 10)
    storage_bytes = x.storage.nbytes
    del x
    assert device.memory.used == storage_bytes
    assert machine.loop.run_until_complete(fetched(device, view)).tolist() == [[7.0] * 10] * 2
    del view
    machine.loop.run_until_complete(idle(device))
    assert device.memory.used == 0


def test_outputs_of_one_kernel_that_share_memory_share_storage(machine: SimMachine) -> None:
    device = SimDevice(machine)
    a, b = bind(device, lambda: tuple(np.arange(8.0).reshape(2, 4)), single=False)()
    assert a.storage is b.storage and device.memory.used == 64


# -- state -----------------------------------------------------------------------------------------------------------


class Cell:
    """A holder of an array."""

    def __init__(self, value: np.ndarray | None = None) -> None:
        self.value = value

    def set(self, value: np.ndarray) -> np.ndarray:
        self.value = value
        return value

    def get(self) -> np.ndarray:
        assert self.value is not None
        return self.value


def test_what_state_keeps_is_not_overwritten_and_counts_once(machine: SimMachine) -> None:
    device = SimDevice(machine)
    cell = Cell()
    x = array(device, 5.0, 100)
    written = x.written
    bind(device, cell.set, "set", keeps_arrays=True)(x)
    del x
    assert device.memory.used == 400 and cell.get().tolist() == [5.0] * 100
    read = bind(device, cell.get, "get", keeps_arrays=True)
    again = read()
    assert again.written is written, "it is a reference: no kernel fills it"
    assert device.memory.used == 400
    cell.value = None
    del again
    assert device.memory.used == 0 and machine.hazards == []


def test_state_with_an_initial_value_is_there_from_the_start(machine: SimMachine) -> None:
    device = SimDevice(machine, compute_streams=2)
    cell = Cell(np.ones(50))
    x = bind(device, cell.get, "get", keeps_arrays=True)()
    assert x.written.time_ns == 0 and device.memory.used == 400
    y = bind(device, cell.get, "get", keeps_arrays=True)()
    assert y.storage is x.storage


def test_writes_of_state_on_two_streams_are_ordered(machine: SimMachine) -> None:
    device = SimDevice(machine, compute_streams=2)
    cell = Cell(np.ones(50))

    def add(x: np.ndarray) -> np.ndarray:
        return cell.set(cell.get() + x)

    x, y = array(device, 1.0, 50), array(device, 2.0, 50)
    first = bind(device, add, "add", keeps_arrays=True, flops=1e9)(x)
    second = bind(device, add, "add", keeps_arrays=True, stream=1)(y)
    assert second.written.started_ns >= first.written.time_ns
    got = bind(device, cell.get, "get", keeps_arrays=True)()
    assert got.written is second.written
    assert machine.loop.run_until_complete(fetched(device, got)).tolist() == [4.0] * 50
    assert machine.hazards == []


def test_an_opaque_state_carries_its_dependencies(machine: SimMachine) -> None:
    device = SimDevice(machine, compute_streams=2)
    append = bind(device, lambda items, x: Items((*items.arrays, x)), "append", keeps_arrays=True, flops=0.0)
    stack = bind(device, lambda items: np.stack(items.arrays), "stack", keeps_arrays=True, stream=1)
    x, y = array(device, 1.0), array(device, 2.0)
    items = append(append(Items(()), x), y)
    assert isinstance(items, SimOpaque) and items.events == (y.written,)
    last = y.written.time_ns
    del x, y
    stacked = stack(items)
    assert stacked.written.started_ns >= last
    assert machine.loop.run_until_complete(fetched(device, stacked)).tolist() == [[1.0] * 8, [2.0] * 8]
    assert len(machine.loop.run_until_complete(fetched(device, items)).arrays) == 2
    assert machine.hazards == []


def test_memory_that_no_kernel_fills_is_ordered_with_its_stream(machine: SimMachine) -> None:
    device = SimDevice(machine, compute_streams=2)
    append = bind(device, lambda items, x: Items((x.copy(),)), "append", keeps_arrays=True, flops=0.0)
    x = array(device)
    read = bind(device, lambda items: items.arrays[0], "read", keeps_arrays=True, flops=0.0, stream=1)
    y = read(append(Items(()), x))
    assert y.written is x.written and y.storage.pool is device.compute_streams[1]
    assert device.compute_streams[1].has_seen(x.written)
    del y
    machine.check()


def test_values_dropped_with_their_loop_are_no_hazard(machine: SimMachine) -> None:
    device = SimDevice(machine, compute_streams=2)
    x = array(device)
    bind(device, np.negative, stream=1)(x)
    del x
    machine.loop.close()
    gc.collect()
    assert device.memory.used == 0 and machine.hazards == []


class Items:
    """A persistent tuple of arrays."""

    def __init__(self, arrays: tuple[np.ndarray, ...]) -> None:
        self.arrays = arrays
