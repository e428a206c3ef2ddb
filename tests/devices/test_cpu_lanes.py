"""The threads that firings go to. Events show the order; no test looks at a clock."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

import asyncflow as af
from asyncflow.devices.cpu import lanes as lanes_module
from asyncflow.devices.cpu.device import CpuDevice
from asyncflow.devices.cpu.lanes import MEDIUM_NS, SHORT_NS, Lanes
from tests.patience import PATIENCE_S

LONG_NS = 20 * MEDIUM_NS
CORES = 2


class Held:
    """Lanes of a machine with two cores, and work that stays there until it is let go."""

    def __init__(self, planned: int = 1) -> None:
        self.lanes = Lanes("cpu:0", planned)
        self.loop = asyncio.get_running_loop()
        self.gate = threading.Event()
        self.outcomes: list[asyncio.Future[Any]] = []
        self.now_ns = 0

    def give(self, expected_ns: float | None, *, planned: int = 0, owner: object = None, node: object = None) -> str:
        """The lane that a firing goes to, which it stays on."""
        before = [stream.pending for stream in self.lanes.streams]
        self.submit(self.gate.wait, PATIENCE_S, expected_ns=expected_ns, planned=planned, owner=owner, node=node)
        (taken,) = [s for s, n in zip(self.lanes.streams, before, strict=True) if s.pending > n]
        return taken.name.removeprefix("cpu:0/")

    def submit(self, work: Any, *args: Any, **options: Any) -> None:
        outcome = self.loop.create_future()
        self.outcomes.append(outcome)
        self.lanes.submit(work, args, lambda *found: outcome.set_result(found), self.loop, **options)

    async def ended(self) -> list[Any]:
        """Return the deliveries, once all have ended."""
        self.gate.set()
        async with asyncio.timeout(PATIENCE_S):
            return [await outcome for outcome in self.outcomes]


@pytest.fixture
async def held(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Held]:
    monkeypatch.setattr(lanes_module, "usable_cores", lambda: CORES)
    made = Held()
    monkeypatch.setattr(lanes_module, "perf_counter_ns", lambda: made.now_ns)
    yield made
    await made.ended()
    for stream in made.lanes.streams:
        assert await stream.aclose(PATIENCE_S)


async def test_long_ones_have_as_many_lanes_as_there_are_cores(held: Held) -> None:
    assert [held.give(LONG_NS) for _ in range(4)] == ["compute", "compute:1", "compute", "compute:1"]


@pytest.mark.parametrize(("devices", "each"), [(1, 4), (2, 2), (3, 1), (9, 1)])
def test_cpu_devices_of_a_session_share_the_cores(monkeypatch: pytest.MonkeyPatch, devices: int, each: int) -> None:
    """A thread a core for every device would be more threads than cores; beside them are two for short firings."""
    monkeypatch.setattr(lanes_module, "usable_cores", lambda: 4)
    session = af.Session(devices=[f"cpu:{index}" for index in range(devices)])
    found = [len(device.lanes.streams) - 2 for device in session.devices if isinstance(device, CpuDevice)]
    assert found == [each] * devices


async def test_unmeasured_firings_have_one_more_lane(held: Held) -> None:
    """The lane keeps long known firings from holding up an unmeasured one; nor does it wait behind another while a lane
    is free.
    """
    assert [held.give(None, node=node) for node in "abc"] == ["compute", "compute:1", "compute:2"]
    assert held.give(LONG_NS) in ("compute", "compute:1")


async def test_a_burst_of_first_firings_does_not_hold_up_another_node(held: Held) -> None:
    """Behaviour 95: a firing may be long as long as other firings of its node are under way."""
    burst = [held.give(None, node="large") for _ in range(6)]
    assert burst == ["compute", "compute:1"] * 3
    assert held.give(None, node="small") == "compute:2"
    assert held.give(None, node="large") in ("compute", "compute:1")


async def test_short_ones_never_wait_for_others(held: Held) -> None:
    """Behaviour 95: whatever else there is, one lane has nothing but short ones."""
    for expected in (LONG_NS, None, MEDIUM_NS, LONG_NS, None, None):
        assert held.give(expected) != "compute:3"
    assert {held.give(SHORT_NS) for _ in range(5)} == {"compute:3"}


async def test_least_loaded_first(held: Held) -> None:
    assert held.give(LONG_NS) == "compute"
    assert [held.give(LONG_NS / 4) for _ in range(3)] == ["compute:1"] * 3
    assert held.give(2 * LONG_NS) == "compute:1"
    assert held.give(LONG_NS) == "compute"


async def test_a_little_wait_wakes_no_further_thread(held: Held) -> None:
    assert [held.give(400_000) for _ in range(4)] == ["compute", "compute:1", "compute", "compute:1"]


async def test_nothing_queues_behind_a_function_that_waits_while_a_lane_is_idle(held: Held) -> None:
    """The first was expected to take 1 ms, and waits for something else than the processor since 30 ms."""
    assert held.give(1_000_000) == "compute"
    held.now_ns += 30_000_000
    burst = [held.give(2_000_000) for _ in range(12)]
    assert "compute" not in burst
    assert set(burst) == {"compute:1", "compute:2", "compute:3"}


async def test_a_lane_is_free_again_when_its_work_is_delivered(held: Held) -> None:
    held.give(LONG_NS)
    held.give(LONG_NS)
    await held.ended()
    held.gate.clear()
    assert [held.give(LONG_NS), held.give(LONG_NS)] == ["compute", "compute:1"]


async def test_a_firing_stays_on_the_planned_lane_if_that_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes_module, "usable_cores", lambda: CORES)
    held = Held(planned=4)
    assert len(held.lanes.streams) == 6
    assert [stream.name for stream in held.lanes.planned] == [
        "cpu:0/compute",
        "cpu:0/compute:1",
        "cpu:0/compute:2",
        "cpu:0/compute:3",
    ]
    assert [held.give(LONG_NS, planned=number) for number in (2, 0, 2)] == ["compute:2", "compute", "compute:1"]
    await held.ended()
    for stream in held.lanes.streams:
        assert await stream.aclose(PATIENCE_S)


async def test_one_state_is_never_on_two_threads_at_once(held: Held) -> None:
    """Code that keeps state queues only behind its own kind, however long it is expected to take."""
    owner, other = [1], [1]  # which are equal, and cannot be hashed
    assert not held.lanes.holds(owner)
    lane = held.give(SHORT_NS, owner=owner)
    assert [held.give(expected, owner=owner) for expected in (None, LONG_NS, SHORT_NS)] == [lane] * 3
    assert held.give(SHORT_NS, owner=other) != lane
    assert held.lanes.holds(owner)
    await held.ended()
    assert not held.lanes.holds(owner)
    assert not held.lanes.holds(other)


async def test_the_delivered_outcome(held: Held) -> None:
    """The result, or the error without a frame of the lane's; and the processor's time within that of the clock."""

    def spin(count: int) -> int:
        return sum(range(count))

    held.submit(spin, 200_000, expected_ns=None)
    held.submit(spin, "no number", expected_ns=None)
    good, bad = await held.ended()
    assert good[:2] == (sum(range(200_000)), None)
    times = good[2]
    assert times.lane == "compute"
    assert times.queued_ns <= times.started_ns < times.ended_ns
    assert 0 < times.computed_ns <= times.ended_ns - times.started_ns + 1_000_000  # the two clocks tick apart
    assert bad[0] is None
    assert isinstance(bad[1], TypeError)
    assert bad[1].__traceback__ is not None
    assert bad[1].__traceback__.tb_frame.f_code is spin.__code__
