"""Saved values on simulated cards: to the host and back on virtual time, noticed without a wait."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.devices.sim import swapping
from asyncflow.devices.sim.device import SimDevice
from asyncflow.devices.sim.timeline import Timeline
from asyncflow.devices.swapping import Swapping
from asyncflow.errors import HazardError
from asyncflow.profiler.arrows import find_arrows
from asyncflow.profiler.lanes import firing_lanes
from asyncflow.runtime.session.session_statistics import DeviceMemory
from asyncflow.runtime.watch.trace import LATE_COPY
from asyncflow.testing import virtual_clock
from tests.conftest import held_buffers

SIDE, STEPS = 256, 30
VALUE = SIDE * SIDE * 4
"""A value that may move: 256 KiB."""


@dataclass
class Outcome:
    """The results of a training step.

    Attributes:
        values: the gradients.
        seconds: of virtual time.
        memory: of the card, afterwards.
        late: reads that came before the value was back.
        swapping: of the card.
        trace: if it was asked for.
    """

    values: list[np.ndarray[Any, Any]]
    seconds: float
    memory: DeviceMemory
    late: int
    swapping: Swapping
    trace: af.Trace | None = None


def loop(x: Any, w: Any, *, swap_memory: bool, steps: int = STEPS, window: int = 32) -> Any:
    def body(i: Any, y: Any) -> Any:
        return i + 1, af.tanh(y @ w)

    loop_vars = (0, x)
    return af.while_loop(lambda i, _: i < steps, body, loop_vars, swap_memory=swap_memory, parallel_iterations=window)[
        1
    ]


def nested(x: Any, w: Any, *, swap_memory: bool) -> Any:
    """Stores of inner loops, of which one in three does nothing, are values of the outer one's."""

    def body(i: Any, y: Any) -> Any:
        return i + 1, af.cond(i % 3 == 2, lambda: y * w, lambda: inner(y))

    def inner(y: Any) -> Any:
        return loop(y, w, swap_memory=swap_memory, steps=4, window=1)

    return af.while_loop(lambda i, _: i < 6, body, (0, x), swap_memory=swap_memory, parallel_iterations=1)[1]


@pytest.fixture(autouse=True)
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values move by themselves, unless a test lets them move together: each copy is then of one value."""
    monkeypatch.setattr(swapping, "TOGETHER", 0)


def train(
    build: Any = loop,
    *,
    limit: int | None = None,
    swap_memory: bool = False,
    card: str = "k40",
    device_name: str = "sim:0",
    host: str = "asyncflow",
    trace: bool = False,
    seed: int = 0,
    shapes_only: bool = False,
    side: int = SIDE,
    least_bytes: int | None = None,
    **options: Any,
) -> Outcome:
    """Run a training step on a device of its own; afterwards nothing is held anywhere, and no hazard was met. Nothing
    is planned ahead: values move because memory is short, or because the step asks for it.

    Nothing is planned ahead: what moves does so because memory is short, or because it was asked to.
    """
    world = virtual_clock(card, seed=seed, jitter=0.1 if seed else 0.0, shapes_only=shapes_only, host=host)
    with world as clock, af.Graph():
        x = af.placeholder("float32", (side, side))
        w = af.placeholder("float32", (side, side))
        grads = af.gradients(af.sum(build(x, w, swap_memory=swap_memory)), [x, w])
        fed = np.random.default_rng(0).normal(size=(side, side)).astype(np.float32) / 20
        record = af.Trace() if trace else None

        async def main() -> Outcome:
            async with af.Session(
                devices=[device_name], memory_limit=limit, without=["plan_memory"], **options
            ) as session:
                (device,) = session.devices
                assert isinstance(device, SimDevice)
                if least_bytes is not None:
                    assert device.swapping is not None
                    device.swapping.moves.least_bytes = least_bytes
                began_s = clock.loop.time()
                values = await session.run(grads, {x: fed, w: fed}, trace=record)
                took_s = clock.loop.time() - began_s
                assert device.swapping is not None
                memory = session.statistics().memory[device_name]
                now = device.swapping.statistics()
                assert now.moved_out == now.moved_in + now.discarded
                assert (now.kept, now.host, now.disk) == (0, 0, 0)
                assert device.swapping.spaces[0].used == 0
                assert not device.swapping._known
                assert held_buffers(session) == {}
                return Outcome(values, took_s, memory, now.late, device.swapping, record)

        return clock.run(main())


LIMIT = 24 * VALUE
"""Of the loop's values, about half."""


@pytest.mark.parametrize("regions", [True, False])
@pytest.mark.parametrize("build", [loop, nested])
def test_gradients_are_the_same_bits_however_values_move(
    monkeypatch: pytest.MonkeyPatch, build: Any, regions: bool
) -> None:
    """Behaviour 68: never, once memory is short, always, whatever their size, and by one copy for three of them."""
    never = train(build, regions=regions)
    short = train(build, regions=regions, limit=LIMIT)
    always = train(build, regions=regions, swap_memory=True)
    small = train(build, regions=regions, swap_memory=True, least_bytes=0)
    monkeypatch.setattr(swapping, "TOGETHER", 3 * VALUE)
    together = train(build, regions=regions, swap_memory=True)
    tight = train(build, regions=regions, swap_memory=True, limit=LIMIT)
    assert never.memory.moved_out == 0
    assert short.memory.peak <= LIMIT
    assert 0 < short.memory.moved_out < always.memory.moved_out <= small.memory.moved_out
    assert tight.memory.peak <= LIMIT
    assert 0 < together.memory.moved_out <= always.memory.moved_out + VALUE  # the oldest of the last set
    for other in (short, always, small, together, tight):
        np.testing.assert_array_equal(other.values, never.values)


@pytest.mark.parametrize("shapes_only", [True, False])
def test_values_that_move_together_take_the_host_one_copy(monkeypatch: pytest.MonkeyPatch, shapes_only: bool) -> None:
    """Each way: for three values of `VALUE`, whether they have data or not."""
    copies, seconds = [], []
    for together in (0, 3 * VALUE):
        monkeypatch.setattr(swapping, "TOGETHER", together)
        outcome = train(swap_memory=True, shapes_only=shapes_only)
        assert outcome.memory.moved_in > 20 * VALUE
        copies.append(outcome.swapping._device.memory.requests.copies)  # type: ignore[attr-defined]
        seconds.append(outcome.seconds)
    assert copies[1] < copies[0] / 2
    assert seconds[1] < seconds[0]


@pytest.mark.parametrize("seed", range(1, 6))
def test_gradients_do_not_depend_on_when_copies_end(seed: int) -> None:
    """Kernels and copies take a tenth more or less; ready firings start in any order."""
    never = train()
    moved = train(limit=LIMIT, seed=seed)
    assert moved.memory.moved_in > 0
    np.testing.assert_array_equal(moved.values, never.values)


@pytest.mark.parametrize("choice", ["keep", "recompute"])
def test_a_session_may_choose_for_all_loops(choice: Any) -> None:
    """Nothing moves where values are kept; what segments of iterations save moves as all else does."""
    never = train()
    chosen = train(swap_memory=True, saved_values=choice)
    assert (chosen.memory.moved_out > 0) == (choice != "keep")
    assert choice == "keep" or chosen.memory.peak < never.memory.peak
    np.testing.assert_allclose(chosen.values, never.values, rtol=1e-5)


def test_shapes_alone_move_as_data_does() -> None:
    """The same bytes at the same times."""
    real, shapes = train(swap_memory=True), train(swap_memory=True, shapes_only=True)
    assert (shapes.memory[2:], shapes.seconds, shapes.late) == (real.memory[2:], real.seconds, real.late)
    assert train(limit=LIMIT, shapes_only=True).memory.moved_in > 0


@pytest.mark.parametrize("swap_memory", [True, False], ids=["always", "short"])
@pytest.mark.parametrize("build", [loop, nested])
def test_a_card_that_falls_behind_keeps_its_limit_with_two_streams(build: Any, swap_memory: bool) -> None:
    """Each product takes 1.5 ms of a K40: all that one stream reads for another is yet to be read when it is freed."""
    side = 1500
    limit = 16 * side * side * 4
    options: dict[str, Any] = {"swap_memory": swap_memory, "shapes_only": True, "side": side, "regions": True}
    moved = train(build, limit=limit, compute_streams=2, **options)
    assert moved.memory.peak <= limit
    assert moved.memory.moved_in > 0


@pytest.mark.parametrize("regions", [True, False])
def test_what_the_host_has_no_room_for_goes_to_its_disk(tmp_path: Path, regions: bool) -> None:
    """The same bits; one value after another goes through the disk, at its speed."""
    options: dict[str, Any] = {"host_memory_limit": 4 * VALUE, "spill_directory": str(tmp_path), "regions": regions}
    kept = train(regions=regions)
    on_host = train(swap_memory=True, regions=regions)
    on_both = train(swap_memory=True, **options)
    on_disk = train(swap_memory=True, **{**options, "host_memory_limit": VALUE - 1})
    for way in (on_both, on_disk):
        np.testing.assert_array_equal(way.values, kept.values)
        assert way.memory.moved_out == on_host.memory.moved_out
    assert on_disk.seconds > on_both.seconds > on_host.seconds
    assert on_disk.seconds > (on_disk.memory.moved_out + on_disk.memory.moved_in) / 2e9
    limit = kept.memory.peak * 2 // 3
    short = train(limit=limit, **options)
    np.testing.assert_array_equal(short.values, kept.values)
    assert short.memory.peak <= limit


@pytest.mark.parametrize("shapes_only", [True, False])
def test_a_cpu_on_virtual_time_spills_as_a_real_one_does(tmp_path: Path, shapes_only: bool) -> None:
    """To the disk of its host at once, at its speed; without a directory the error says what to give."""
    # Without batching, since how many products are done at once depends on the limit.
    way: dict[str, Any] = {"device_name": "cpu:0", "shapes_only": shapes_only, "loop_batching": False}
    kept = train(limit=1 << 30, spill_directory=str(tmp_path), **way)
    assert kept.memory.moved_out == 0
    limit = kept.memory.peak * 2 // 3
    with pytest.raises(af.OutOfMemoryError, match="or give spill_directory="):
        train(limit=limit, **way)
    spilled = train(limit=limit, spill_directory=str(tmp_path), trace=True, **way)
    np.testing.assert_array_equal(spilled.values, kept.values)
    assert spilled.memory.peak <= limit
    assert spilled.memory.moved_in > kept.memory.peak // 5
    assert spilled.seconds > (spilled.memory.moved_out + spilled.memory.moved_in) / 2e9
    assert spilled.trace is not None
    assert {sample.disk > 0 for sample in spilled.trace.memory} == {True, False}
    assert not any(sample.host for sample in spilled.trace.memory)


def test_copies_are_hidden_behind_compute_where_they_are_shorter() -> None:
    """EuroSys '18 §6.2: on a card whose steps take longer than their copies, half the memory costs 1 % of the time."""
    side, steps = 2048, 60  # 4 ms of products a step, 16 MiB or 1.4 ms of copies

    def long_loop(x: Any, w: Any, *, swap_memory: bool) -> Any:
        return loop(x, w, swap_memory=swap_memory, steps=steps)

    free = train(long_loop, shapes_only=True, side=side)
    half = train(long_loop, shapes_only=True, side=side, limit=free.memory.peak // 2)
    assert half.memory.moved_in > free.memory.peak // 3
    assert half.seconds < 1.01 * free.seconds
    assert half.late <= 1


def test_the_host_takes_no_more_than_its_limit() -> None:
    """A value without a place stays on the card, and the error says how many bytes were missing where."""
    outcome = train(swap_memory=True, host_memory_limit=5 * VALUE)
    assert 0 < outcome.memory.moved_out < 30 * VALUE
    with pytest.raises(af.OutOfMemoryError) as caught:
        train(limit=LIMIT, host_memory_limit=2 * VALUE)
    assert "a saved value of 256.0 KiB had no place to go (the host has 512.0 KiB, all in use)" in str(caught.value)
    assert "raise host_memory_limit=" in str(caught.value)


def test_a_value_read_before_it_is_back_is_a_hazard(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check itself: where a stream does not wait for copies in, it is found."""
    order = Timeline.order

    def careless(self: Timeline, stream: Any, events: Any) -> None:
        order(self, stream, [event for event in events if not event.stream.name.endswith("h2d") or stream is self.h2d])

    with monkeypatch.context() as patched:
        patched.setattr(Timeline, "order", careless)
        with pytest.raises((HazardError, af.KernelError), match="no event that it is written"):
            train(swap_memory=True)


@pytest.mark.parametrize(("build", "steps"), [(loop, [f"while/{k}" for k in range(STEPS - 1)]), (nested, [])])
def test_copies_on_the_timeline_name_the_value_its_iteration_and_its_bytes(build: Any, steps: list[str]) -> None:
    """Copies belong to their run, whichever run started them; counters say how much has moved so far."""
    outcome = train(build, swap_memory=True, trace=True)
    assert outcome.trace is not None
    copies = [firing for firing in outcome.trace.firings if firing.outputs == "256.0 KiB"]
    out = [firing for firing in copies if firing.stream == "d2h"]
    back = [firing for firing in copies if firing.stream == "h2d"]
    assert {firing.nbytes for firing in copies} == {VALUE}
    assert len(out) * VALUE == outcome.memory.moved_out
    assert len(back) * VALUE == outcome.memory.moved_in
    places = [(firing.node, firing.tag) for firing in out]
    assert len({*places}) == len(places)  # no buffer twice
    assert {(firing.node, firing.tag) for firing in back} <= {*places}
    if steps:
        assert [tag for node, tag in places if node == "while/body/tanh"] == steps
    else:
        assert {f"while/{outer}/while/{inner}" for outer in (0, 1) for inner in range(4)} <= {tag for _, tag in places}
    samples = outcome.trace.memory
    assert max(sample.host for sample in samples) > 0
    assert max(sample.saved for sample in samples) > 0
    assert max(sample.moved_out for sample in samples) == outcome.memory.moved_out
    assert max(sample.moved_in for sample in samples) == outcome.memory.moved_in


@pytest.mark.parametrize("regions", [True, False])
def test_counters_tell_the_state_at_the_launch(regions: bool) -> None:
    """One region launches a whole loop; yet the counters of its kernels have the values of their times."""
    outcome = train(swap_memory=True, trace=True, regions=regions)
    assert outcome.trace is not None
    samples = sorted(outcome.trace.memory, key=lambda sample: sample.time_ns)
    assert sum(one.host == 0 < following.host for one, following in pairwise(samples)) == 1
    assert max(sample.host for sample in samples) > 10 * VALUE
    assert max(sample.coming for sample in samples) >= VALUE
    assert all(0 <= sample.coming <= sample.saved <= sample.nbytes for sample in samples)


def test_a_copy_that_comes_late_is_a_stall_arrow_to_the_kernel_that_waited() -> None:
    """Each kernel takes 16 us and each copy 340: the stream waits for most, and arrows end with the copies."""

    def light(x: Any, w: Any, *, swap_memory: bool) -> Any:
        loop_vars = (0, x)
        return af.while_loop(lambda i, _: i < STEPS, lambda i, y: (i + 1, af.tanh(y) * w), loop_vars)[1]

    side = 1024
    limit = 24 * side * side * 4
    trace = train(light, shapes_only=True, side=side, limit=limit, trace=True, card="v100", host="c++").trace
    assert trace is not None
    late = [firing for firing in trace.firings if firing.op == LATE_COPY]
    arrows = find_arrows(trace, firing_lanes(trace))
    assert len(arrows) == len(late) > 8
    for arrow, copy in zip(arrows, late, strict=True):
        assert arrow.is_stall
        assert (arrow.tensor, arrow.transfer.tag, arrow.transfer.nbytes) == (copy.node, copy.tag, copy.nbytes)
        assert (arrow.start.time_ns, arrow.end.time_ns) == (copy.ended_ns - 1, copy.ended_ns)
        assert arrow.transfer.node.startswith("gradients/")


def test_copies_that_come_in_time_have_no_arrows() -> None:
    trace = train(limit=LIMIT, trace=True).trace
    assert trace is not None
    assert any(firing.stream == "h2d" and firing.outputs == "256.0 KiB" for firing in trace.firings)
    assert find_arrows(trace, firing_lanes(trace)) == []


@pytest.mark.parametrize("share", [0.2, 0.45, 0.6, 0.9])
def test_a_cancelled_run_gives_back_all_memory(share: float) -> None:
    """Whenever it is cancelled, copies in flight included; a run after it is right."""
    whole = train(limit=LIMIT)
    with virtual_clock("k40") as clock, af.Graph():
        x = af.placeholder("float32", (SIDE, SIDE))
        grad = af.gradients(af.sum(loop(x, x, swap_memory=False)), x)
        fed = np.ones((SIDE, SIDE), np.float32)

        async def main() -> None:
            async with af.Session(devices=["sim:0"], memory_limit=LIMIT, without=["plan_memory"]) as session:
                (device,) = session.devices
                assert device.swapping is not None
                with pytest.raises(af.DeadlineExceeded):
                    await session.run(grad, {x: fed}, timeout=share * whole.seconds)
                await asyncio.sleep(0.1)  # virtual: copies end
                now = device.swapping.statistics()
                assert now.moved_out == now.moved_in + now.discarded
                assert (now.kept, now.host, device.swapping.spaces[0].used) == (0, 0, 0)
                assert device.memory.used == 0
                await session.run(grad, {x: fed})

        clock.run(main())
