"""Training steps on simulated devices, whose times can be asserted, and pictures of measurements."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import asyncflow as af
from benchmarks import dynamic_unrolling, stacked_lstm_training
from benchmarks.harness import ASYNCFLOW
from benchmarks.lstm import STEP_TIME
from benchmarks.simulation import PAPER, driven_by
from benchmarks.stacked_lstm import SPEED_UP

if TYPE_CHECKING:
    from pathlib import Path

PNG = b"\x89PNG\r\n"


def test_a_loop_costs_little_over_its_steps_written_out_and_less_with_larger_batches() -> None:
    with driven_by("c++"):
        slowdown = dynamic_unrolling.curve((64, 512), steps=8, hidden=512)
    assert 1.25 > slowdown[64] > slowdown[512] > 1


@pytest.mark.slow
def test_layers_over_more_devices_train_faster() -> None:
    with driven_by("c++"):
        (speed_up,) = stacked_lstm_training.curves((2, 8), (64,), steps=10, hidden=512).values()
    # Forward and backward fill and empty the pipeline, which counts in short sequences.
    assert speed_up.keys() == {2, 8}
    assert 1.4 < speed_up[2] <= 2
    assert 4 < speed_up[8] <= 8


@pytest.mark.slow
def test_devices_work_on_different_steps_of_the_gradient_at_once() -> None:
    with driven_by("c++"):
        trace = stacked_lstm_training.simulated(4, steps=8, batch=64, hidden=512, traced=True).trace
    middle = sum(span.ended_ns + span.started_ns for span in trace.runs) / (2 * len(trace.runs))
    kernels = [firing for firing in trace.firings if firing.stream == "compute" and firing.started_ns > middle]
    at_once = max(
        len({other.device for other in kernels if other.started_ns <= firing.started_ns < other.ended_ns})
        for firing in kernels
    )
    assert at_once == 4


@pytest.mark.slow
def test_the_slowdown_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"steps": 3, "hidden": 4}
    for name, value in {"BATCHES": (2, 4), "CPU_BATCHES": (2,), "SIZES": sizes, "CPU_SIZES": sizes}.items():
        monkeypatch.setattr(dynamic_unrolling, name, value)
    results = af.run(
        dynamic_unrolling.measure(
            repeats=1, batches=(2,), steps=3, hidden=4, simulated_batches=(2, 4), simulated_sizes=sizes
        )
    )
    paths = dynamic_unrolling.draw(results, tmp_path)
    assert [path.name for path in paths] == ["dynamic_unrolling_simulated.png", "dynamic_unrolling.png"]
    assert all(path.read_bytes().startswith(PNG) for path in paths)
    measured, simulated = (
        [result.case for result in results if result.figure == figure]
        for figure in (dynamic_unrolling.SLOWDOWN, dynamic_unrolling.SIMULATED_SLOWDOWN)
    )
    assert measured == ["hidden 4, 3 steps, batch 2"]
    hosts = "this runtime", "a thread a device"
    assert simulated == [f"hidden 4, 3 steps, batch {batch}, {host}" for host in hosts for batch in (2, 4)]
    assert dynamic_unrolling.draw([], tmp_path / "nothing") == []
    assert not (tmp_path / "nothing").exists()


@pytest.mark.slow
def test_the_speed_up_is_drawn_beside_the_papers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "BATCHES": (2,),
        "COUNTS": (1, 2),
        "STEPS": 2,
        "HIDDEN": 4,
        "TIMELINE_STEPS": 2,
        "LAYERS": 2,
    }.items():
        monkeypatch.setattr(stacked_lstm_training, name, value)
    results = af.run(
        stacked_lstm_training.measure(
            repeats=1,
            steps=2,
            batch=2,
            hidden=4,
            counts=(1, 2),
            batches=(2,),
            simulated_steps=2,
            simulated_hidden=4,
            simulated_widths=(4,),
        )
    )
    assert [result.median for result in results if result.system == PAPER] == [5.5]
    measured = [result for result in results if result.figure == SPEED_UP]
    times = {result.system: result for result in results if result.figure == STEP_TIME}
    numpy = stacked_lstm_training.SEPARATE_LAYERS
    assert [result.system for result in measured] == [f"{ASYNCFLOW}, 2 devices", f"{numpy}, 2 threads"]
    for result, alone in zip(measured, (ASYNCFLOW, numpy), strict=True):
        assert result.median == pytest.approx(times[alone].median / times[result.system].median)
        assert times[alone].ratio is None
    paths = stacked_lstm_training.draw(results, tmp_path)
    assert len(paths) == 3
    assert all(path.read_bytes().startswith(PNG) for path in paths)
    assert stacked_lstm_training.draw([], tmp_path) == []
