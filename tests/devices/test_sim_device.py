"""Results and times of a simulated device: times are worked out by hand from `tests.devices.sim_machines`."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from asyncflow.devices.cpu.device import CpuDevice
from asyncflow.devices.memory import MemoryLimitExceeded
from asyncflow.devices.protocol import AsynchronousDevice, recording
from asyncflow.devices.sim.device import SimDevice
from asyncflow.devices.sim.links import CopyLane, first_common_gap
from asyncflow.devices.sim.machine import SimMachine
from asyncflow.devices.sim.values import SimArray, SimMemoryAccount
from asyncflow.errors import SessionClosedError
from asyncflow.streams.virtual import VirtualClockLoop
from asyncflow.values import Conduct
from tests.devices.sim_machines import (
    CARD,
    DISPATCH_NS,
    HOST,
    HOST_OP_NS,
    KERNEL_NS,
    LATENCY_NS,
    PEER_LINK,
    US,
    bind,
    fetched,
    idle,
    machine_of,
    received,
)

MIB = 1 << 20


@pytest.fixture
def loop() -> Iterator[VirtualClockLoop]:
    made = VirtualClockLoop()
    yield made
    made.close()


@pytest.fixture
def machine(loop: VirtualClockLoop) -> SimMachine:
    return machine_of(loop)


@pytest.fixture
def device(machine: SimMachine) -> SimDevice:
    return SimDevice(machine)


def zeros(device: SimDevice, nbytes: int) -> SimArray:
    result = bind(device, lambda: np.zeros(nbytes, np.uint8), "zeros")()
    assert isinstance(result, SimArray)
    return result


def span(value: SimArray) -> tuple[int, int]:
    return value.written.started_ns, value.written.time_ns


def test_it_is_an_asynchronous_device(device: SimDevice) -> None:
    same: AsynchronousDevice = device
    assert (same.name, same.kind, same.xp, same.asynchronous) == ("sim:0", "sim", np, same)
    assert same.memory.limit == CARD.memory_bytes
    assert [stream.name for stream in same.compute_streams] == ["sim:0/compute"]
    assert same.describe() == "sim:0  simulated round  0 B in 0 buffers, limit 1.0 GiB"


# -- kernels ---------------------------------------------------------------------------------------------------------


def test_a_small_kernel_takes_the_least_time_after_its_dispatch(device: SimDevice) -> None:
    x = zeros(device, 8)
    y = bind(device, np.negative)(x)
    assert span(x) == (DISPATCH_NS, DISPATCH_NS + KERNEL_NS)
    # Dispatched while x runs.
    assert span(y) == (DISPATCH_NS + KERNEL_NS, DISPATCH_NS + 2 * KERNEL_NS)
    assert device.machine.now_ns() == 0, "launching takes the caller no time"


def test_many_small_kernels_are_bound_by_the_host(loop: VirtualClockLoop) -> None:
    machine = machine_of(loop, host=dataclasses.replace(HOST, launch_s=4.5e-6))
    device = SimDevice(machine)
    x = zeros(device, 8)
    for _ in range(9):
        x = bind(device, np.negative)(x)
    assert x.written.time_ns == 10 * 5 * US + KERNEL_NS


@pytest.mark.parametrize(
    ("dtype", "flops", "duration_ns"),
    [
        ("float32", 1e7, 10 * US),  # 1e7 operations at 1e12 a second
        ("float64", 1e7, 20 * US),  # at half that
        ("float16", 1e7, 10 * US),
        ("float32", 1.0, 8 * US),  # 2 * 0.4 MB at 1e11 bytes a second
        ("float64", 1.0, 16 * US),
    ],
)
def test_a_kernel_is_bound_by_arithmetic_or_memory(
    device: SimDevice, dtype: str, flops: float, duration_ns: int
) -> None:
    x = device.constant(np.zeros(100_000, dtype))
    started, ended = span(bind(device, np.negative, flops=flops)(x))
    assert ended - started == duration_ns


def test_small_kernels_on_two_streams_overlap(machine: SimMachine) -> None:
    device = SimDevice(machine, compute_streams=2)
    x = device.constant(np.zeros(4))
    a = bind(device, np.negative, flops=1.0)(x)
    b = bind(device, np.negative, flops=1.0, stream=1)(x)
    assert span(a) == (DISPATCH_NS, DISPATCH_NS + KERNEL_NS)
    assert span(b) == (2 * DISPATCH_NS, 2 * DISPATCH_NS + KERNEL_NS)
    c = bind(device, np.add, flops=1.0, stream=1)(a, b)
    assert c.written.started_ns == b.written.time_ns


def test_large_kernels_on_two_streams_share_the_card(machine: SimMachine) -> None:
    device = SimDevice(machine, compute_streams=2)
    x = device.constant(np.zeros(4))
    a = bind(device, np.negative, flops=1e8)(x)
    b = bind(device, np.negative, flops=1e8, stream=1)(x)
    # Float64: 200 us each.
    assert span(a) == (DISPATCH_NS, DISPATCH_NS + 200 * US)
    assert span(b) == (DISPATCH_NS + 200 * US, DISPATCH_NS + 400 * US)


def test_counters_stay_on_the_host(device: SimDevice) -> None:
    def add(i: Any) -> Any:
        return i + np.int32(1)

    increment = bind(device, add, on_host=add)
    assert increment(np.int32(1)) == 2
    assert device.dispatched_ns == HOST_OP_NS
    x = zeros(device, 8)
    assert x.written.started_ns == HOST_OP_NS + DISPATCH_NS
    total = bind(device, np.sum, on_host=np.sum)(x)
    assert isinstance(total, SimArray) and total.shape == ()


def test_scalars_of_launched_kernels_are_on_the_device(device: SimDevice, loop: VirtualClockLoop) -> None:
    total = bind(device, np.sum)(device.constant(np.arange(4, dtype=np.float32)))
    assert isinstance(total, SimArray) and total.shape == () and total.dtype == np.float32
    value = loop.run_until_complete(fetched(device, total))
    assert value == 6 and isinstance(value, np.float32)


def test_views_are_not_launched(device: SimDevice) -> None:
    x = zeros(device, 800)
    y = bind(device, lambda x: x.reshape(2, 400).T, flops=0.0)(x)
    assert y.written is x.written and y.shape == (400, 2)
    assert device.dispatched_ns == DISPATCH_NS + HOST_OP_NS


def test_constants_and_host_values_cost_nothing(device: SimDevice) -> None:
    x = device.constant(np.ones(100, np.float32))
    assert span(x) == (0, 0) and device.memory.used == 400
    for value in (np.int64(3), np.bool_(True), np.array(2), np.float32(1), "text", None):
        assert device.constant(value) == device.copy_in(value) == value
    assert device.dispatched_ns == 0
    assert isinstance(SimDevice(device.machine, kind="cpu").constant(np.float32(1)), SimArray)


def test_errors_of_kernels_come_out_as_they_are(device: SimDevice) -> None:
    error = ValueError("mine")

    def fail() -> None:
        raise error

    with pytest.raises(ValueError, match="mine") as raised:
        bind(device, fail)()
    assert raised.value is error and device.dispatched_ns == 0


def test_infinities_and_nan_are_values(device: SimDevice, loop: VirtualClockLoop) -> None:
    x = device.constant(np.array([1.0, 0.0]))
    assert (
        loop.run_until_complete(fetched(device, bind(device, np.divide)(x, device.constant(np.zeros(2)))))[0] == np.inf
    )


def test_a_context_is_handed_on_and_tuples_are_wrapped_one_by_one(device: SimDevice) -> None:
    launch = bind(device, lambda context, x: (x + 1, context), conduct=Conduct(needs_context=True), single=False)
    array, context = launch("ctx", device.constant(np.zeros(3)))
    assert isinstance(array, SimArray) and context == "ctx"


def test_a_coroutine_gets_host_arrays_and_its_result_is_copied_in(device: SimDevice, loop: VirtualClockLoop) -> None:
    async def slow(x: np.ndarray, n: Any) -> np.ndarray:
        assert isinstance(x, np.ndarray)
        await asyncio.sleep(1.0)
        return x * n

    x = zeros(device, 10_000)
    y = loop.run_until_complete(bind(device, slow, is_async=True)(x, np.uint8(2)))
    fetch_end = x.written.time_ns + LATENCY_NS + 1 * US  # 10 kB at 1e10 bytes a second
    assert span(y) == (fetch_end + 10**9 + DISPATCH_NS, fetch_end + 10**9 + DISPATCH_NS + LATENCY_NS + 1 * US)


# -- copies ----------------------------------------------------------------------------------------------------------


def test_a_fetch_arrives_when_the_value_and_the_copy_are_done(device: SimDevice, loop: VirtualClockLoop) -> None:
    x = zeros(device, 100_000)
    assert not loop.run_until_complete(fetched(device, x)).any()
    # 10 us for 100 kB, in latency and at 1e10 bytes a second.
    assert loop.time_ns() == x.written.time_ns + LATENCY_NS + 10 * US


def test_a_fetched_value_is_the_callers(device: SimDevice, loop: VirtualClockLoop) -> None:
    x = zeros(device, 100)
    got = loop.run_until_complete(fetched(device, x))
    got[:] = 9
    assert not loop.run_until_complete(fetched(device, x)).any()
    del x
    loop.run_until_complete(idle(device))
    assert got.tolist() == [9] * 100


def test_a_feed_is_a_copy_that_kernels_wait_for(device: SimDevice, loop: VirtualClockLoop) -> None:
    mine = np.ones(25_000, np.float32)
    x = device.copy_in(mine)
    mine[:] = 5
    y = bind(device, np.negative)(x)
    assert span(x) == (DISPATCH_NS, DISPATCH_NS + LATENCY_NS + 10 * US)
    assert y.written.started_ns == x.written.time_ns
    assert (loop.run_until_complete(fetched(device, y)) == -1).all()


def test_a_peer_copy_is_received_at_once_with_its_event(machine: SimMachine, loop: VirtualClockLoop) -> None:
    one, other = SimDevice(machine, 0), SimDevice(machine, 1)
    x = zeros(one, 40_000)
    y = received(other, x, one)
    # 1 us of latency, and 40 kB at 4e10 bytes a second.
    assert span(y) == (x.written.time_ns, x.written.time_ns + 2 * US)
    assert y.device == "sim:1" and y.written.stream is other.peer
    assert one.memory.used == other.memory.used == 40_000


def test_without_peer_access_a_copy_goes_through_the_host_with_an_equal_result(loop: VirtualClockLoop) -> None:
    results = []
    for machine in (machine_of(loop), machine_of(loop, peer=None)):
        one, other = SimDevice(machine, 0), SimDevice(machine, 1)
        x = bind(one, lambda: np.linspace(0, 1, 5_000))()
        y = received(other, x, one)
        results.append((y.written.stream.name, loop.run_until_complete(fetched(other, y))))
        assert machine.hazards == []
        if machine.spec.peer_link is None:
            # Down and up, 4 us each at 1e10 bytes a second.
            assert y.written.time_ns == x.written.time_ns + 2 * (LATENCY_NS + 4 * US)
    (peer, by_peer), (staged, by_host) = results
    assert (peer, staged) == ("sim:1/peer", "sim:1/h2d")
    np.testing.assert_array_equal(by_peer, by_host)


@pytest.mark.parametrize(("engines", "overlap"), [(1, False), (2, True)])
def test_copy_engines_limit_what_overlaps(loop: VirtualClockLoop, engines: int, overlap: bool) -> None:
    device = SimDevice(machine_of(loop, card=dataclasses.replace(CARD, copy_engines=engines)))
    x = device.constant(np.zeros(100_000, np.uint8))
    x.to_host(lambda *_: None)
    fed = device.copy_in(np.zeros(100_000, np.uint8))
    copy_ns = LATENCY_NS + 10 * US
    first_end = DISPATCH_NS + copy_ns
    assert span(fed)[0] == (2 * DISPATCH_NS if overlap else first_end)


def test_links_are_shared_by_all_users(machine: SimMachine) -> None:
    """Two sessions' devices of one card have one link to the host in each direction."""
    one, same = SimDevice(machine, 0), SimDevice(machine, 0)
    first, second = one.copy_in(np.zeros(100_000, np.uint8)), same.copy_in(np.zeros(100_000, np.uint8))
    assert second.written.started_ns == first.written.time_ns
    elsewhere = SimDevice(machine, 1).copy_in(np.zeros(100_000, np.uint8))
    assert elsewhere.written.started_ns == 3 * DISPATCH_NS, "one host asks for all three"


def test_a_copy_takes_the_first_gap_that_is_long_enough() -> None:
    lane = CopyLane("lane")
    for busy in ((100, 200), (210, 300), (0, 10)):
        lane.occupy(*busy, now_ns=0)
    assert [lane.first_gap(0, duration) for duration in (10, 90, 91)] == [10, 10, 300]
    assert lane.first_gap(205, 5) == 205 and lane.first_gap(205, 6) == 300
    lane.occupy(400, 500, now_ns=250)
    assert lane.first_gap(0, 200) == 0, "the past is forgotten"
    other = CopyLane("other")
    other.occupy(300, 390, now_ns=0)
    assert first_common_gap([lane, other], 250, 10) == 390
    assert first_common_gap([lane, other], 250, 11) == 500


def test_a_message_does_not_overtake_the_host_that_made_it(loop: VirtualClockLoop) -> None:
    machine = machine_of(loop, message_s=1e-4)
    one, other = SimDevice(machine, 0), SimDevice(machine, 1)
    for _ in range(10):
        zeros(one, 8)
    got: list[tuple[Any, int]] = []
    other.receive(np.int32(5), one, lambda value, error: got.append((value, loop.time_ns())))
    assert got == []
    loop.run_until_complete(asyncio.sleep(1))
    # The host of the other has a node to interpret when the message comes.
    assert got == [(5, 10 * DISPATCH_NS + 100 * US + HOST_OP_NS)]


def test_a_message_on_one_host_takes_the_host_a_node(machine: SimMachine, loop: VirtualClockLoop) -> None:
    got: list[tuple[Any, int]] = []
    one, other = SimDevice(machine, 0), SimDevice(machine, 1)
    other.receive(np.int32(5), one, lambda value, error: got.append((value, loop.time_ns())), one.send())
    loop.run_until_complete(asyncio.sleep(1))
    assert got == [(5, 2 * HOST_OP_NS)], "to send it, and to receive it"


def test_a_cpu_on_virtual_time_copies_for_nothing(machine: SimMachine, loop: VirtualClockLoop) -> None:
    cpu, card = SimDevice(machine, 3, kind="cpu"), SimDevice(machine, 0)
    assert (cpu.name, cpu.kind, cpu.memory.limit) == ("cpu:3", "cpu", None)
    x = cpu.copy_in(np.zeros(1_000_000, np.uint8))
    assert x.written.time_ns == x.written.started_ns
    y = received(card, x, cpu)
    assert y.written.time_ns - y.written.started_ns == LATENCY_NS + 100 * US
    assert loop.run_until_complete(fetched(cpu, x)).size == 1_000_000
    assert machine.hazards == []


# -- estimates -------------------------------------------------------------------------------------------------------


def test_estimates_equal_the_simulation(loop: VirtualClockLoop) -> None:
    for peer in (PEER_LINK, None):
        machine = machine_of(loop, peer=peer)
        card, other, cpu = SimDevice(machine, 0), SimDevice(machine, 1), SimDevice(machine, kind="cpu")
        assert card.kernel_ns(1e7, 0) == card.kernel_ns(0, 1e6) == 10 * US and card.kernel_ns(0, 0) == KERNEL_NS
        assert card.transfer_ns(80_000, card) == 0
        copy_ns = LATENCY_NS + 8 * US
        assert card.transfer_ns(80_000, cpu) == cpu.transfer_ns(80_000, card) == pytest.approx(copy_ns)
        assert card.transfer_ns(80_000, other) == pytest.approx(3 * US if peer else 2 * copy_ns)
        assert card.transfer_ns(80_000, CpuDevice()) == pytest.approx(copy_ns)
        x = card.constant(np.zeros(80_000, np.uint8))
        y = received(other, x, card)
        assert y.written.time_ns == DISPATCH_NS + card.transfer_ns(80_000, other)


# -- memory ----------------------------------------------------------------------------------------------------------


def test_a_limit_is_checked_before_the_kernel_runs_where_shapes_are_known(machine: SimMachine) -> None:
    device = SimDevice(machine, memory_limit=3 * MIB)
    x = zeros(device, 2 * MIB)
    ran: list[int] = []

    def negate(x: np.ndarray) -> np.ndarray:
        ran.append(1)
        return -x

    kernel = bind(device, negate, "negate")
    with pytest.raises(MemoryLimitExceeded, match=r"sim:0 holds 4.0 MiB, over its limit of 3.0 MiB") as raised:
        kernel(x)
    error = raised.value
    assert (error.requested, error.used, error.limit) == (2 * MIB, 4 * MIB, 3 * MIB)
    assert [buffer.label for buffer in error.top] == ["zeros", "negate"]
    assert ran == [] and device.memory.used == 2 * MIB
    unknown = bind(device, negate, infer=lambda specs: None)
    with pytest.raises(MemoryLimitExceeded):
        unknown(x)
    assert ran == [1] and device.memory.used == 2 * MIB
    del x, kernel, unknown, error, raised
    assert (device.memory.used, device.memory.peak) == (0, 2 * MIB)
    zeros(device, 3 * MIB)


def test_a_view_needs_no_room(machine: SimMachine) -> None:
    device = SimDevice(machine, memory_limit=3 * MIB)
    x = zeros(device, 2 * MIB)
    assert bind(device, lambda x: x.reshape(2, -1), flops=0.0)(x).storage is x.storage


def test_no_copy_is_begun_that_has_no_room(loop: VirtualClockLoop) -> None:
    machine = machine_of(loop, peer=None)
    one, other = SimDevice(machine, 0), SimDevice(machine, 1, memory_limit=MIB)
    other.receive(zeros(one, 2 * MIB), one, lambda *_: None)
    assert one.d2h.free_at_ns == 0


def test_copies_and_constants_need_room(machine: SimMachine) -> None:
    one, other = SimDevice(machine, 0), SimDevice(machine, 1, memory_limit=MIB)
    x, outcome = zeros(one, 2 * MIB), []
    other.receive(x, one, lambda *result: outcome.append(result))
    assert outcome[0][0] is None and isinstance(outcome[0][1], MemoryLimitExceeded)
    for call in (other.copy_in, other.constant):
        with pytest.raises(MemoryLimitExceeded):
            call(np.zeros(2 * MIB, np.uint8))
    assert other.memory.used == 0


def test_the_account_tells_its_contents(device: SimDevice) -> None:
    held = [zeros(device, n) for n in (10, 5_000, 300)]
    device.memory.track(np.zeros(10_000))
    assert [buffer.nbytes for buffer in device.memory.top(2)] == [5_000, 300]
    now = device.memory.statistics()
    assert (now.used, now.peak, now.buffers, now.device) == (5_310, 5_310, 3, "sim:0")
    held.clear()
    assert device.memory.statistics().buffers == 0


# -- the rest of a device --------------------------------------------------------------------------------------------


def test_spans_are_recorded_while_asked_for(device: SimDevice, loop: VirtualClockLoop) -> None:
    zeros(device, 8)
    notes: list[Any] = []
    assert device.record_into(notes) is None
    x = device.copy_in(np.zeros(10_000, np.uint8))
    y = bind(device, np.negative, "negate")(x)
    bind(device, lambda i: i, "count", on_host=lambda i: i)(np.int32(1))
    loop.run_until_complete(fetched(device, y))
    assert device.record_into(None) is notes
    spans = device.settle(notes)
    assert len(spans) == 4
    assert spans[1:3] == [spans[1], spans[2]]
    assert [(each.label, each.stream, each.nbytes) for each in spans] == [
        ("feed", "h2d", 10_000),
        ("negate", "compute", 0),
        ("count", "host", 0),
        ("negate", "d2h", 10_000),
    ]
    assert (spans[1].started_ns, spans[1].ended_ns) == span(y)
    assert spans[2].ended_ns - spans[2].started_ns == HOST_OP_NS
    zeros(device, 8)
    assert len(spans) == 4


def test_recordings_nest(device: SimDevice) -> None:
    """Launches of another run are in no other record."""
    mine: list[Any] = []
    with recording(device, mine):
        with recording(device, None):
            zeros(device, 8)
        assert mine == []
        bind(device, lambda: np.zeros(1), "make")()
    zeros(device, 8)
    assert [each.label for each in device.settle(mine)] == ["make"]


def test_a_coroutine_launches_for_whoever_called_it(device: SimDevice, loop: VirtualClockLoop) -> None:
    async def double(x: Any) -> Any:
        return 2 * x

    called: list[Any] = []
    kernel = bind(device, double, "double", is_async=True)
    with recording(device, called):
        coroutine = kernel(zeros(device, 8))
    others: list[Any] = []
    with recording(device, others):
        loop.run_until_complete(coroutine)
    assert [each.stream for each in device.settle(called)] == ["compute", "d2h", "h2d"]
    assert others == []


def test_a_second_compute_stream_has_a_name_of_its_own(machine: SimMachine) -> None:
    device = SimDevice(machine, compute_streams=2)
    notes: list[Any] = []
    device.record_into(notes)
    bind(device, lambda: np.zeros(1), stream=1)()
    assert [each.stream for each in device.settle(notes)] == ["compute:1"]


def test_when_done_is_called_later_and_once(device: SimDevice, loop: VirtualClockLoop) -> None:
    seen: list[int] = []
    device.when_done(lambda _: seen.append(loop.time_ns()))
    assert seen == []
    loop.run_until_complete(asyncio.sleep(0))
    x = zeros(device, 8)
    device.when_done(lambda _: seen.append(loop.time_ns()))
    loop.run_until_complete(asyncio.sleep(1))
    assert seen == [0, x.written.time_ns]


def test_closing_waits_for_what_there_is_and_refuses_more(device: SimDevice, loop: VirtualClockLoop) -> None:
    x = zeros(device, 8)
    assert loop.run_until_complete(device.aclose(1.0))
    assert loop.time_ns() == x.written.time_ns
    assert loop.run_until_complete(device.aclose(1.0))
    with pytest.raises(SessionClosedError, match="sim:0/compute is closed"):
        zeros(device, 8)
    with pytest.raises(SessionClosedError, match="sim:0/compute is closed"):
        x.to_host(lambda *_: None)


@pytest.mark.parametrize("options", [{"memory_limit": 0}, {"compute_streams": 0}])
def test_counts_are_positive(machine: SimMachine, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="is a positive int, not 0"):
        SimDevice(machine, **options)


# -- determinism -----------------------------------------------------------------------------------------------------


def history(seed: int, jitter: float) -> list[tuple[int, int]]:
    loop = VirtualClockLoop()
    machine = machine_of(loop, seed=seed, jitter=jitter)
    devices = [SimDevice(machine, i, compute_streams=2) for i in range(2)]
    recorded: list[list[Any]] = [[], []]
    for device, notes in zip(devices, recorded, strict=True):
        device.record_into(notes)
    x = devices[0].copy_in(np.zeros(1000))
    for i in range(20):
        source, target = devices[i % 2], devices[(i + 1) % 2]
        x = bind(target, np.negative, stream=i // 2 % 2)(received(target, x, source))
    loop.run_until_complete(fetched(devices[0], x))
    loop.close()
    assert machine.hazards == []
    spans = [each for device, notes in zip(devices, recorded, strict=True) for each in device.settle(notes)]
    return [(each.started_ns, each.ended_ns) for each in spans]


def test_a_seed_gives_one_history() -> None:
    assert history(1, 0.3) == history(1, 0.3) != history(2, 0.3)
    assert history(1, 0.0) == history(2, 0.0)


def test_jitter_stays_within_its_fraction(loop: VirtualClockLoop) -> None:
    machine = machine_of(loop, jitter=0.25)
    device = SimDevice(machine)
    launch = bind(device, lambda: np.zeros(4, np.float32), flops=1e9)
    times = [ended - started for started, ended in (span(launch()) for _ in range(200))]
    assert 750 * US <= min(times) < 800 * US and 1200 * US < max(times) <= 1250 * US
    with pytest.raises(ValueError, match=r"0 <= jitter < 1, not 1.5"):
        machine_of(loop, jitter=1.5)


def test_bytes_that_another_thread_has_settled_count_once() -> None:
    """The account of a simulated device takes no lock: another thread may have the last one between two steps."""
    account = SimMemoryAccount("sim:0", 100)
    charges = [account.charge(nbytes, "a") for nbytes in (10, 20)]

    class Raced(deque[int]):
        def popleft(self) -> int:
            if len(self) == 1:
                super().popleft()  # the other thread's look
                account._charges.pop(charges[1])
                account.at_most -= 20
            return super().popleft()

    account._credited = Raced(charges)
    assert account.used == 0
    assert account.charge(100, "b")
