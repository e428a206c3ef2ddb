"""Experiments on simulated machines: virtual time is the same each time, so tests may compare speeds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

import asyncflow as af
from asyncflow.testing import virtual_clock
from benchmarks import (
    dependency_patterns,
    distributed_loop,
    parallel_iterations,
    stacked_lstm,
    stacked_lstm_training,
    white_paper_pipelines,
)
from benchmarks.harness import ASYNCFLOW
from benchmarks.simulation import (
    DRIVERS,
    ITERATION_RATE,
    PAPER,
    as_results,
    by_host,
    driven_by,
    host_note,
    simulate,
    spread,
    with_host,
    without_host,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


@pytest.fixture(autouse=True)
def a_thread_a_device() -> Iterator[None]:
    """Drive each device by a thread of its own, so that devices decide which program is faster, and not one host
    thread.
    """
    with driven_by("c++"):
        yield


@pytest.mark.slow
def test_one_host_thread_holds_up_what_launches_much() -> None:
    """Behaviour 99: a training step launches hundreds of kernels a time step, so eight cards gain nothing with it."""

    def gain() -> float:
        one, eight = (stacked_lstm_training.simulated(n, steps=2, batch=64, hidden=512).seconds for n in (1, 8))
        return one / eight

    assert gain() > 1.5
    with driven_by("asyncflow"):
        assert gain() < 1


def test_large_kernels_hide_the_host() -> None:
    """Behaviour 99: fig. 12 has a kernel a device and iteration, and gains with either host, but little with one thread
    for all copies.
    """
    curves = by_host(lambda: {"": parallel_iterations.curve((1, 8), iterations=8)})
    assert list(curves) == ["this runtime", "a thread a device"]
    threads, ours = (curve[8] / curve[1] for curve in reversed(curves.values()))
    assert 1.05 < ours < 1.5 < threads
    assert "one Python thread for all devices, by regions" in host_note()


@pytest.mark.slow
def test_more_iterations_at_once_are_faster_until_the_pipeline_is_full() -> None:
    windows = 1, 2, 4, 8, 16, 32
    rates = parallel_iterations.curve(windows, iterations=100)
    for fewer, more in ((1, 2), (2, 4), (4, 8)):
        assert 1.5 < rates[more] / rates[fewer] <= 2.1
    # What fig. 12 shows: the best is reached at 8, one iteration a layer.
    assert rates[32] > 5 * rates[1]
    assert rates[8] > 0.95 * max(rates.values())


def test_a_window_of_one_lets_one_device_work_at_a_time() -> None:
    busy = {window: _most_devices_at_once(parallel_iterations.run(window, iterations=9, traced=True).trace)
            for window in (1, 4, 8)}  # fmt: skip
    assert busy == {1: 1, 4: 4, 8: 8}


def _most_devices_at_once(trace: af.Trace) -> int:
    kernels = [firing for firing in trace.firings if firing.stream == "compute"]
    return max(
        len({other.device for other in kernels if other.started_ns <= firing.started_ns < other.ended_ns})
        for firing in kernels
    )


def test_a_barrier_costs_more_with_every_machine() -> None:
    curves = distributed_loop.curves((1, 2, 8), iterations=20)
    free, barrier = curves["without a barrier"], curves["with a barrier"]
    assert free[1] == barrier[1]
    # Fewer with every machine, and as the paper has it, at every count more without a barrier.
    assert free[1] > free[2] > free[8]
    assert barrier[2] > 1.1 * barrier[8]
    assert free[8] > 2 * barrier[8]


def test_the_less_iterations_depend_on_each_other_the_faster_they_are() -> None:
    curves = dependency_patterns.curves((1, 4), iterations=6)
    alone = {pattern: curve[1] for pattern, curve in curves.items()}
    assert len(set(alone.values())) == 1
    assert curves["independent"][4] > 1.2 * curves["ring"][4] > 1.4 * curves["barrier"][4]


@pytest.mark.parametrize("pattern", dependency_patterns.PATTERNS)
def test_patterns_compute_their_formula(pattern: str) -> None:
    matrix = np.eye(3, dtype=np.float32)
    with virtual_clock("3 x v100, nvlink2") as clock, af.Graph():
        states = [af.constant(np.float32(10**k) * matrix) for k in range(3)]
        inputs = dependency_patterns.inputs(pattern, states)

        async def main() -> list[np.ndarray]:
            async with af.Session() as session:
                return await session.run(inputs)

        found = [int(value[0, 0]) for value in clock.run(main())]
    assert found == {"independent": [1, 10, 100], "ring": [101, 11, 110], "barrier": [111] * 3}[pattern]


@pytest.mark.slow
def test_replicas_and_devices_add_speed() -> None:
    for pipeline in (white_paper_pipelines.SYNCHRONOUS, white_paper_pipelines.ASYNCHRONOUS):
        rates = white_paper_pipelines.curve(pipeline, (1, 2, 4), steps=4)
        assert rates[4] > 1.5 * rates[2] > 2 * rates[1]
    rates = white_paper_pipelines.curve(white_paper_pipelines.CONCURRENT, (1, 4), steps=8)
    assert rates[4] > 1.5 * rates[1]


@pytest.mark.slow
def test_replicas_without_waits_are_faster_where_times_vary(monkeypatch: pytest.MonkeyPatch) -> None:
    # By much: they start two runs each, which takes the thread of the parameters' device some of what they gain.
    monkeypatch.setattr(white_paper_pipelines, "JITTER", 0.5)
    synchronous = white_paper_pipelines.synchronous(4, steps=6)
    assert white_paper_pipelines.asynchronous(4, steps=6).seconds < 0.95 * synchronous.seconds


def _trained(training: white_paper_pipelines.Training, replicas: int, steps: Sequence[af.Node]) -> np.ndarray:
    with training.graph:
        weights = training.weights.read()

    async def main() -> np.ndarray:
        async with af.Session() as session:
            for step in steps:
                await session.run(step)
            return await session.run(weights)

    with virtual_clock(f"{replicas + 1} x v100, nvlink2") as clock:
        return clock.run(main())


@pytest.mark.parametrize("replicas", [1, 2])
def test_training_follows_the_gradient(replicas: int) -> None:
    x, y = np.random.default_rng(0).standard_normal((2, 4, 3), np.float32)
    rate = white_paper_pipelines.LEARNING_RATE / 4
    training = white_paper_pipelines.Training(replicas, batch=4, features=3, data=(x, y))

    together = _trained(training, replicas, [training.synchronous] * 2)
    expected = np.zeros((3, 3), np.float32)
    for _ in range(2):
        expected -= rate * x.T @ (x @ expected - y)
    np.testing.assert_allclose(together, expected, rtol=1e-4)

    training = white_paper_pipelines.Training(replicas, batch=4, features=3, data=(x, y))
    apart = _trained(training, replicas, [*training.compute, *training.apply])
    # All have seen the parameters as they were.
    np.testing.assert_allclose(apart, rate * x.T @ y, rtol=1e-4)


@pytest.mark.slow
def test_layers_over_more_devices_are_faster() -> None:
    curves = stacked_lstm.curves((1, 2, 8), steps=12, **stacked_lstm.SIZES)
    for rates in curves.values():
        assert rates[8] > 1.5 * rates[2] > 1.5 * rates[1] or rates[8] > 2 * rates[1]
    few, many = curves.values()
    assert few[1] == pytest.approx(many[1], rel=0.01)


@pytest.mark.parametrize(("count", "expected"), [(1, "aaaa"), (2, "aabb"), (4, "abcd")])
def test_spread(count: int, expected: str) -> None:
    assert "".join(spread(4, "abcd"[:count])) == expected


def test_curves_are_named_by_quantity_and_driver() -> None:
    for host in DRIVERS:
        for name in ("", "ring", "data parallel, synchronous"):
            assert without_host(with_host(name, host)) == name


def test_a_simulation_is_timed_after_its_warm_up() -> None:
    with af.Graph():
        x = af.constant(np.zeros((64, 64), np.float32))
        products = [af.matmul(x, x) for _ in range(2)]

    async def short(session: af.Session) -> None:
        await session.run(products[0])

    async def long(session: af.Session) -> None:
        for _ in range(3):
            await session.run(products[0])

    once, thrice = simulate("v100", short), simulate("v100", long, warm_up=short, traced=True)
    assert thrice.seconds == pytest.approx(3 * once.seconds)
    assert (len(once.trace.runs), len(thrice.trace.runs)) == (0, 3)
    assert simulate("v100", short, jitter=0.3).seconds != once.seconds


def test_rows_of_curves() -> None:
    ours, paper = (
        as_results("work", {"fast": {1: 2.0, 4: 8.0}}, ITERATION_RATE, "{curve} on {x}", system=system)
        for system in (ASYNCFLOW, PAPER)
    )
    assert [(row.case, row.median, row.system) for row in ours] == [
        ("fast on 1", 2.0, ASYNCFLOW),
        ("fast on 4", 8.0, ASYNCFLOW),
    ]
    assert [row.system for row in paper] == [PAPER] * 2
