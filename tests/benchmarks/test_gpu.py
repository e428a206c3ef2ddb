"""The workloads of a card, at tiny sizes on a stand-in for CuPy, whose figures say nothing."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest

from asyncflow.devices.cuda.backend import CudaBackend
from benchmarks import __main__ as command
from benchmarks import gpu, gpu_memory, gpu_rows
from benchmarks.harness import ASYNCFLOW
from benchmarks.vertex_models import Sizes
from tests.fake_cupy import FakeCupy
from tests.fake_cupy.stand_in import stand_in

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator
    from pathlib import Path

    from benchmarks.harness import Result

TINY_PIPELINE = {"layers": 2, "size": 8, "iterations": 4}
TINY_LSTM = {"steps": 3, "batch": 2, "hidden": 4}
TINY_MODELS = Sizes(steps=6, leaves=4, files=8)
TINY_MEMORY = [{"hidden": 128, "batch": 128, "steps": 8}]
"""Sizes whose values are just large enough to move."""

TINY = {
    "gpu_launches": lambda: gpu.measure_launches(repeats=2, operations=10),
    "gpu_run": lambda: gpu.measure_run(repeats=1, runs=3, size=10),
    "gpu_chain": lambda: gpu.measure_chain(repeats=1, rounds=2, sizes=(10,)),
    "gpu_layers": lambda: gpu.measure_layers(repeats=1, sizes={"layers": 4, "batch": 2, "hidden": 4}),
    "gpu_decisions": lambda: gpu.measure_decisions(repeats=1, iterations=4, size=10),
    "gpu_loop": lambda: gpu.measure_loop(repeats=1, iterations=10),
    "gpu_pipeline": lambda: gpu.measure_pipeline(repeats=1, counts=(1, 2), windows=(1, 2), sizes=TINY_PIPELINE),
    "gpu_lstm_training": lambda: gpu.measure_lstm(repeats=1, sizes=TINY_LSTM),
    "gpu_vertex_models": lambda: gpu_rows.measure_vertices(repeats=1, batches=(1, 3), hidden=8, sizes=TINY_MODELS),
    "gpu_pooled_loop": lambda: gpu_rows.measure_pool(repeats=1, hidden=4, rows=6, lengths=((3, 3), (2, 5))),
    "gpu_batched": lambda: gpu_rows.measure_batched(repeats=1, hidden=4, steps=2, clients=(1, 3), requests=6),
    "gpu_memory": lambda: gpu_memory.measure_memory(repeats=1, models=TINY_MEMORY, lengths=(2,)),
}


@pytest.fixture(autouse=True)
def fake() -> Iterator[FakeCupy]:
    with stand_in(nbytes=64 << 20, pinned_nbytes=4 << 20) as fake:
        yield fake


def test_every_workload_has_a_tiny_size() -> None:
    assert TINY.keys() == command.GPU_WORKLOADS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
async def test_workload(name: str) -> None:
    measuring: Coroutine[None, None, list[Result]] = TINY[name]()
    results = await measuring
    assert ASYNCFLOW in {result.system for result in results}
    for result in results:
        assert result.workload == name
        assert all(math.isfinite(value) and value >= 0 for value in result.values), result


@pytest.mark.slow
def test_timelines(tmp_path: Path) -> None:
    paths = [
        *gpu.draw_pipeline([], tmp_path, count=2, sizes=TINY_PIPELINE),
        *gpu.draw_lstm([], tmp_path, sizes=TINY_LSTM),
        *gpu_memory.draw_memory([], tmp_path, models=TINY_MEMORY),
    ]
    assert len(paths) == 10
    assert all(path.stat().st_size > 1000 for path in paths)


def test_there_has_to_be_a_card(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "cuda_backend", lambda: CudaBackend(None, reason="no driver"))
    for name in ("gpu", "gpu_loop"):
        with pytest.raises(SystemExit):
            command.main([name])
        assert "there is no card: no driver" in capsys.readouterr().err
