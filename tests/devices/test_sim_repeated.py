"""Launches like earlier ones: a simulated device leaves out checks, and every figure stays as it is with them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import FrameType
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.devices.memory import MemoryLimitExceeded
from asyncflow.devices.protocol import recording
from asyncflow.devices.sim import device as device_module
from asyncflow.devices.sim.device import SimDevice
from asyncflow.devices.sim.launch import SimLauncher
from asyncflow.devices.sim.shapes import SpecRule
from asyncflow.streams.virtual import VirtualClockLoop
from asyncflow.testing import virtual_clock
from tests.devices.sim_machines import bind, machine_of


@pytest.fixture
def loop() -> Iterator[VirtualClockLoop]:
    made = VirtualClockLoop()
    yield made
    made.close()


def check_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every launch be the first of its kind."""
    monkeypatch.setattr(device_module, "sim_launcher", SimLauncher)


def trained(rows: int = 3, hidden: int = 8, **options: Any) -> tuple[object, ...]:
    """The figures of a few steps of a recurrent loop on two cards, with gradients."""
    with af.Graph() as graph:
        x = af.placeholder("float32", (None, rows, 8))
        losses = []
        for number in range(2):
            with af.device(f"sim:{number}"):
                cell = partial(af.nn.lstm_cell, weights=af.nn.lstm_weights(8, hidden, seed=number).read())
                zeros = af.zeros((rows, hidden), dtype="float32")
                outputs, _ = af.nn.dynamic_rnn(cell, x, (zeros, zeros), af.constant([5, 4, 2] * (rows // 3)))
                losses.append(af.sum(outputs))
        (gradient,) = af.gradients(af.sum(af.stack(losses)), [x])
    trace = af.Trace(detail="region")

    async def main() -> list[Any]:
        async with af.Session(graph) as session:
            return [
                await session.run(gradient, {x: np.ones((length, rows, 8), np.float32)}, trace=trace)
                for length in (5, 7, 5)
            ]

    with virtual_clock("2 x v100, nvlink2", **options) as clock:
        gradients = clock.run(main())
        now_s, threads = clock.now_s, [(each.calls, each.busy_ns) for each in clock.machine.threads.values()]
    firings = [firing._replace(run=0) for firing in trace.firings]
    return [array.tobytes() for array in gradients], firings, trace.memory, now_s, threads


WIDE: dict[str, Any] = {"rows": 24, "hidden": 64, "shapes_only": True}
"""A simulation in which most values have no data."""


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"jitter": 0.2, "seed": 7},
        {"launches": "graphs"},
        {"shapes_only": True},
        {**WIDE, "jitter": 0.2, "seed": 7},
        {**WIDE, "launches": "graphs"},
    ],
)
def test_figures_are_the_same_without_the_checks(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    found = trained(**options)
    check_everything(monkeypatch)
    assert found == trained(**options)


def test_shapes_are_inferred_once(loop: VirtualClockLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimDevice(machine_of(loop))
    x, y = (device.constant(np.ones(length, np.float32)) for length in (4, 5))
    double = bind(device, lambda a: a * np.float32(2))
    double(x)
    inferred: list[object] = []
    infer = SpecRule.without_values

    def count(self: SpecRule, values: Sequence[Any]) -> object:
        inferred.append(values)
        return infer(self, values)

    monkeypatch.setattr(SpecRule, "without_values", count)
    double(x)
    assert inferred == []
    double(y)
    assert len(inferred) == 1


KERNELS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "new array": (lambda a, b: a + b, {}),
    "its input": (lambda a, b: a, {}),
    "a view that counts as work": (lambda a, b: a[::-1], {}),
    "a view": (lambda a, b: a[::-1], {"flops": 0}),
    "a copy that counts as no work": (lambda a, b: a.copy(), {"flops": 0}),
    "a new array, seen through a view": (lambda a, b: (a + b)[::-1], {}),
    "another dtype than inferred": (lambda a, b: (a + b).astype(np.float64), {}),
    "another shape than inferred": (lambda a, b: (a + b)[:2].copy(), {}),
    "a scalar": (lambda a, b: np.float32(3), {"infer": lambda specs: [(np.dtype(np.float32), ())]}),
    "one array twice": (lambda a, b: (a + b,) * 2, {"single": False, "infer": lambda specs: [specs[0]] * 2}),
    "new and input": (lambda a, b: (a + b, b), {"single": False, "infer": lambda specs: [specs[0]] * 2}),
}


def launched(kernel: Callable[..., Any], options: dict[str, Any], loop: VirtualClockLoop, rows: int) -> list[object]:
    """The figures of three launches of one kernel, the last of which has a scalar of the host among its inputs.

    Arrays of more than 4 KiB have no data.
    """
    device = SimDevice(machine_of(loop, shapes_only=rows > 1024))
    a, b = (device.constant(np.full(rows, number, np.float32)) for number in range(2))
    call = bind(device, kernel, **options)
    found: list[object] = []
    for inputs in ((a, b), (a, b), (a, np.float32(2))):
        outputs = call(*inputs)
        for output in outputs if isinstance(outputs, tuple) else (outputs,):
            if not isinstance(output, np.generic | np.ndarray):
                shared = [output.storage is each.storage for each in (a, b)]
                found += [
                    np.asarray(output.stand_in()).tobytes(),
                    output.dtype,
                    output.shape,
                    *shared,
                    output.storage.nbytes,
                ]
                found += [output.written.started_ns, output.written.time_ns, output.storage.array is None]
        found += [device.memory.used, device.memory.peak, device.dispatched_ns, device.compute.free_at_ns]
    return found


@pytest.mark.parametrize("rows", [64, 2048])
@pytest.mark.parametrize("name", KERNELS)
def test_what_a_kernel_gives_is_where_it_is_with_all_checks(
    name: str, rows: int, loop: VirtualClockLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = launched(*KERNELS[name], loop, rows)
    check_everything(monkeypatch)
    assert found == launched(*KERNELS[name], loop, rows)


def test_small_arrays_with_data_and_without_are_told_apart(loop: VirtualClockLoop) -> None:
    """An array of up to 4 KiB has data in a simulation of shapes, unless it is computed from an array without data."""
    device = SimDevice(machine_of(loop, shapes_only=True))
    small, large = (device.constant(np.ones(length, np.float32)) for length in (4, 2048))
    unknown = bind(device, lambda a: a[:4] * 2, infer=lambda specs: [(np.dtype(np.float32), (4,))])(large)
    double = bind(device, lambda a: a * np.float32(2))
    assert [double(x).data is None for x in (small, unknown, small, unknown)] == [False, True, False, True]


def test_a_launch_without_data_that_does_not_fit_takes_no_time(loop: VirtualClockLoop) -> None:
    device = SimDevice(machine_of(loop, shapes_only=True), memory_limit=20_000)
    x = device.constant(np.ones(2048, np.float32))
    double = bind(device, lambda a: a * np.float32(2))
    kept = double(x)
    before = device.dispatched_ns, device.compute.free_at_ns, device.memory.used
    with pytest.raises(MemoryLimitExceeded):
        double(x)
    assert before == (device.dispatched_ns, device.compute.free_at_ns, device.memory.used)
    del kept
    assert double(x).shape == (2048,)


def test_memory_is_checked_before_a_launch_like_an_earlier_one(loop: VirtualClockLoop) -> None:
    device = SimDevice(machine_of(loop), memory_limit=1000)
    runs: list[int] = []
    x = device.constant(np.ones(100, np.float32))

    def count(a: Any) -> Any:
        runs.append(1)
        return a * np.float32(2)

    double = bind(device, count)
    kept = double(x)
    with pytest.raises(MemoryLimitExceeded):
        double(x)
    assert (len(runs), device.memory.used) == (1, 800)
    del kept


def functions_called(call: Callable[[], object]) -> list[str]:
    """The names of the library's functions that run inside a call."""
    names: list[str] = []

    def note(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            names.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return names


@pytest.mark.usefixtures("no_collector")  # finalizers of earlier tests would be counted
@pytest.mark.parametrize("recorded", [False, True])
def test_a_launch_like_an_earlier_one_calls_few_functions(recorded: bool, loop: VirtualClockLoop) -> None:
    """A training makes a hundred thousand of them; what each function more costs shows in no other test."""
    device = SimDevice(machine_of(loop, shapes_only=True))
    x = device.constant(np.ones(2048, np.float32))
    double = bind(device, lambda a: a * np.float32(2), in_region=True)
    kept = [double(x)]
    with recording(device, [] if recorded else None):
        names = functions_called(lambda: kept.append(double(x)))
    assert len(names) <= (15 if recorded else 12), names
    assert "SimLauncher._checked" not in names
