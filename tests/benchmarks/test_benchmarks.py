"""Every workload runs at a tiny size and gives finite figures, and the harness summarises and compares as it says."""

from __future__ import annotations

import json
import math
import threading
from time import thread_time
from typing import TYPE_CHECKING

import numpy as np
import pytest

from asyncflow.devices.machine.hardware import blas_library
from benchmarks import (
    batched_requests,
    checkpoints,
    concurrent_runs,
    convolution,
    dependency_patterns,
    distributed_loop,
    dqn,
    dynamic_lstm,
    dynamic_unrolling,
    graph_size,
    harness,
    import_time,
    loop_gap,
    loop_overhead,
    lstm_training,
    memory,
    memory_limits,
    nested_loop,
    overload,
    parallel_iterations,
    pooled_decoder,
    pooled_loop,
    pooled_transformer,
    ragged_training,
    run_latency,
    saved_values,
    scheduling,
    small_beside_large,
    stacked_lstm,
    stacked_lstm_training,
    training_memory,
    tree_requests,
    trees,
    two_device_loop,
    vertex_models,
    vertex_parts,
    white_paper_pipelines,
)
from benchmarks.__main__ import WORKLOADS, Workload, main
from benchmarks.harness import (
    ASYNCFLOW,
    DifferentAnswers,
    Figure,
    Result,
    Sample,
    Trial,
    compare,
    cpu_of_other_threads,
    describe_machine,
    format_table,
    timed,
    timed_await,
    wait_for_idle_threads,
    write_json,
)
from benchmarks.peers import NO_PEERS, Peers

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence
    from pathlib import Path

TINY_MODELS = vertex_models.Sizes(steps=4, leaves=4, files=12)
TINY = {
    "loop_overhead": lambda: loop_overhead.measure(repeats=2, iterations=10),
    "nested_loop": lambda: nested_loop.measure(repeats=2, sequences=2),
    "dynamic_lstm": lambda: dynamic_lstm.measure(repeats=2, steps=3, batch=2, hidden=4),
    "run_latency": lambda: run_latency.measure(repeats=2, runs=3, nodes=(1, 4)),
    "concurrent_runs": lambda: concurrent_runs.measure(repeats=2, clients=3, runs=9),
    "batched_requests": lambda: batched_requests.measure(repeats=2, hidden=4, steps=2, clients=(1, 2), requests=5),
    "overload": lambda: overload.measure(
        repeats=2, seconds=0.05, times=(5.0,), extent=16, wait_ms=1.0, alone=3, rates=(400.0,)
    ),
    "tree_requests": lambda: tree_requests.measure(repeats=2, hidden=(4,), clients=(1, 2), requests=3, files=8),
    "pooled_loop": lambda: pooled_loop.measure(repeats=2, hidden=(4,), clients=(1, 2), requests=3, lengths=(1, 4)),
    "pooled_decoder": lambda: pooled_decoder.measure(
        repeats=2, width=4, room=8, clients=(1, 2), requests=3, prompts=(1, 4), lengths=(1, 4)
    ),
    "pooled_transformer": lambda: pooled_transformer.measure(
        repeats=2,
        width=4,
        layers=2,
        heads=2,
        room=10,
        clients=(1, 2),
        requests=3,
        prompts=(1, 4),
        lengths=(1, 4),
        late=0,
    ),
    "small_beside_large": lambda: small_beside_large.measure(repeats=2, large=200, small=16, runs=9),
    "loop_gap": lambda: loop_gap.measure(repeats=2, nodes=10, iterations=20),
    "checkpoints": lambda: checkpoints.measure(repeats=2, megabytes=1, variables=2),
    "import_time": lambda: import_time.measure(repeats=1),
    "memory": lambda: memory.measure(repeats=1, iterations=(3,)),
    "graph_size": lambda: graph_size.measure(repeats=2, nodes=(5, 10)),
    "two_device_loop": lambda: two_device_loop.measure(repeats=2, iterations=10),
    "stacked_lstm": lambda: stacked_lstm.measure(
        repeats=2, steps=3, batch=2, hidden=4, counts=(1, 2), simulated_steps=3
    ),
    "dependency_patterns": lambda: dependency_patterns.measure(counts=(1, 2), rows=2, size=8, iterations=3),
    "dqn": lambda: dqn.measure(repeats=2, steps=2, latencies_ms=(0.0,)),
    "distributed_loop": lambda: distributed_loop.measure(counts=(1, 2), iterations=3),
    "parallel_iterations": lambda: parallel_iterations.measure(windows=(1, 2), layers=2, size=8, iterations=3),
    "white_paper_pipelines": lambda: white_paper_pipelines.measure(counts=(1, 2), steps=2, sizes=TINY_PIPELINES),
    "lstm_training": lambda: lstm_training.measure(repeats=2, steps=3, batch=2, hidden=4),
    "ragged_training": lambda: ragged_training.measure(repeats=2, shortest=1, longest=3, batch=2, hidden=4),
    "convolution": lambda: convolution.measure(repeats=1, steps=1, layers=(convolution.Layer(2, 2, 4, 3, 3),)),
    "training_memory": lambda: training_memory.measure(repeats=1, steps=3, batch=2, hidden=4),
    "memory_limits": lambda: memory_limits.measure(repeats=1, steps=3, batch=2, hidden=4),
    "saved_values": lambda: saved_values.measure(lengths=(2,), cards=("k40",), steps=(3,), most=(2,)),
    "dynamic_unrolling": lambda: dynamic_unrolling.measure(
        repeats=2, batches=(2,), steps=3, hidden=4, simulated_batches=(2,), simulated_sizes={"steps": 3, "hidden": 4}
    ),
    "stacked_lstm_training": lambda: stacked_lstm_training.measure(
        repeats=2,
        steps=2,
        batch=2,
        hidden=4,
        counts=(1, 2),
        batches=(2,),
        simulated_steps=2,
        simulated_hidden=4,
        simulated_widths=(4,),
    ),
    "trees": lambda: trees.measure(repeats=1, fc_sizes=((4, 2, 3),), lstm_sizes=((2, 3),), files=12),
    "vertex_models": lambda: vertex_models.measure(repeats=1, batches=(1,), hiddens=(3,), at=(2, 3), sizes=TINY_MODELS),
    "scheduling": lambda: scheduling.measure(
        repeats=1, batches=(2,), hiddens=(3,), vertices=(100,), depth=5, sizes=TINY_MODELS
    ),
    "vertex_parts": lambda: vertex_parts.measure(repeats=1, batch=2, hidden=3, sizes=TINY_MODELS),
}
TINY_PIPELINES: dict[str, dict[str, int]] = {
    white_paper_pipelines.SYNCHRONOUS: {"batch": 4, "features": 8},
    white_paper_pipelines.ASYNCHRONOUS: {"batch": 4, "features": 8},
    white_paper_pipelines.MODEL: {"batch": 2, "hidden": 4},
    white_paper_pipelines.CONCURRENT: {"batch": 2, "features": 8},
}
TIME = Figure("time", "s")
RATE = Figure("rate", "1/s", higher_is_better=True)


def test_every_workload_has_a_tiny_size() -> None:
    assert TINY.keys() == WORKLOADS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
async def test_workload(name: str) -> None:
    measuring: Coroutine[None, None, list[Result]] = TINY[name]()
    results = await measuring
    assert ASYNCFLOW in {result.system for result in results}
    for result in results:
        assert result.workload == name
        assert all(math.isfinite(value) and value >= 0 for value in result.values), result
        assert sorted([result.best, result.median, result.worst], reverse=result.figure.higher_is_better) == [
            result.best,
            result.median,
            result.worst,
        ]


def _trial(times: list[float], answer: object = None, log: list[str] | None = None, name: str = "") -> Trial:
    remaining = iter(times)

    async def trial() -> Sample:
        if log is not None:
            log.append(name)
        time = next(remaining)
        return Sample({TIME: time, RATE: 1 / time}, answer)

    return trial


async def test_medians_best_and_ratio() -> None:
    trials = {ASYNCFLOW: _trial([9.0, 1.0, 2.0, 4.0]), "peer": _trial([9.0, 8.0, 8.0, 2.0])}
    results = await compare("work", "case", trials, repeats=3)
    ours, theirs = (result for result in results if result.figure is TIME)
    assert (ours.values, ours.median, ours.best, ours.worst, ours.ratio) == ((1.0, 2.0, 4.0), 2.0, 1.0, 4.0, None)
    assert (theirs.median, theirs.best, theirs.ratio) == (8.0, 2.0, 0.25)
    assert [result.best for result in results if result.figure is RATE] == [1.0, 0.5]


async def test_a_baseline_gets_no_ratio() -> None:
    trials = {ASYNCFLOW: _trial([1.0]), "idle": _trial([1.0])}
    results = await compare("work", "case", trials, repeats=1, warm_ups=0, baselines=["idle"])
    assert [result.ratio for result in results] == [None] * 4


async def test_trials_alternate() -> None:
    log: list[str] = []
    trials = {name: _trial([1.0] * 4, log=log, name=name) for name in "abc"}
    await compare("work", "case", trials, repeats=3, warm_ups=0)
    assert "".join(log) == "abcbcacab"


async def test_a_trial_begins_when_other_threads_are_idle() -> None:
    readings = iter([1.0, 1.01, 1.02, 1.0205, 9.0])
    assert await wait_for_idle_threads(lambda: next(readings))
    assert list(readings) == [9.0]


async def test_waiting_for_idle_threads_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "PROBES", 3)
    readings = iter([1.0, 2.0, 3.0, 4.0, 5.0])
    assert not await wait_for_idle_threads(lambda: next(readings))
    assert list(readings) == [5.0]


async def test_every_trial_waits_for_idle_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    async def wait() -> bool:
        log.append("wait")
        return True

    monkeypatch.setattr(harness, "wait_for_idle_threads", wait)
    trials = {name: _trial([1.0], log=log, name=name) for name in "ab"}
    await compare("work", "case", trials, repeats=1, warm_ups=0)
    assert log == ["wait", "a", "wait", "b"]


def test_cpu_time_of_other_threads() -> None:
    def spin() -> None:
        started = thread_time()
        while thread_time() < started + 0.04:
            pass

    start = cpu_of_other_threads()
    thread = threading.Thread(target=spin)
    thread.start()
    thread.join()
    after_the_other = cpu_of_other_threads()
    assert after_the_other - start >= 0.02  # on some machines the clocks tick in steps of 10 ms
    spin()
    assert cpu_of_other_threads() - after_the_other < 0.02


async def test_lead_ins_are_not_measured() -> None:
    log: list[str] = []
    trials = {name: _trial([9.0, 1.0, 8.0, 2.0], log=log, name=name) for name in "ab"}
    results = await compare("work", "case", trials, repeats=2, warm_ups=0, lead_ins=1)
    assert "".join(log) == "aabbbbaa"
    assert [result.values for result in results if result.figure is TIME] == [(1.0, 2.0)] * 2


@pytest.mark.parametrize("other", [np.int32(4), np.int64(3), np.array([3], np.int32)])
async def test_different_answers_are_an_error(other: object) -> None:
    trials = {ASYNCFLOW: _trial([1.0], np.int32(3)), "peer": _trial([1.0], other)}
    with pytest.raises(DifferentAnswers, match="work, case: peer computed"):
        await compare("work", "case", trials, repeats=1, warm_ups=0)


async def test_answers_within_the_tolerance_are_the_same() -> None:
    trials = {ASYNCFLOW: _trial([1.0], np.float32(100.0)), "peer": _trial([1.0], np.float32(100.01))}
    assert len(await compare("work", "case", trials, repeats=1, warm_ups=0, tolerance=1e-3)) == 4
    trials = {ASYNCFLOW: _trial([1.0], np.float32(100.0)), "peer": _trial([1.0], np.float32(101.0))}
    with pytest.raises(DifferentAnswers, match="peer computed"):
        await compare("work", "case", trials, repeats=1, warm_ups=0, tolerance=1e-3)


async def test_timed() -> None:
    async def work() -> int:
        return 3

    for trial in (timed(TIME, 2.0, lambda: 3), timed_await(TIME, 2.0, work)):
        sample = await trial()
        assert sample.answer == 3
        assert sample.figures.keys() == {TIME}
        assert sample.figures[TIME] > 0


def test_peers_that_are_missing() -> None:
    assert NO_PEERS.missing == ["tensorflow", "torch", "jax", "dynet"]
    assert Peers(torch=object()).missing == ["tensorflow", "jax", "dynet"]


async def test_table_and_json(tmp_path: Path) -> None:
    trials = {ASYNCFLOW: _trial([0.5]), "peer": _trial([250.0])}
    results = await compare("work", "case", trials, repeats=1, warm_ups=0)
    lines = format_table(results).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert [cell.strip() for cell in lines[3].split("|")[1:-1]] == [
        "work", "case", "time, s", "peer", "250", "250", "250", "0.002x",
    ]  # fmt: skip
    path = tmp_path / "results.json"
    write_json(path, describe_machine(NO_PEERS), results)
    document = json.loads(path.read_text(encoding="utf-8"))
    assert document["machine"]["packages"]["numpy"] == np.__version__
    assert document["machine"]["kernels"] == {"numpy": blas_library()}
    assert document["results"][1] == {
        "workload": "work",
        "case": "case",
        "figure": {"name": "time", "unit": "s", "higher_is_better": False},
        "system": "peer",
        "values": [250.0],
        "ratio": 0.002,
        "median": 250.0,
        "best": 250.0,
        "worst": 250.0,
    }


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    async def measure(
        peers: Peers = NO_PEERS, *, repeats: int = 3, nodes: Sequence[int] = (), words: Sequence[str] = ()
    ) -> list[Result]:
        assert (peers, repeats, nodes, words) == (NO_PEERS, 1, (3, 4), ("a-b",))
        return await compare("work", "case", {ASYNCFLOW: _trial([1.0, 2.0])}, repeats=repeats)

    chosen: Workload = measure
    monkeypatch.setitem(WORKLOADS, "graph_size", chosen)
    path = tmp_path / "results.json"
    sizes = ["--size", "nodes=3,4", "--size", "words=a-b"]
    assert main(["graph_size", "--no-peers", "--repeats", "1", "--json", str(path), *sizes]) == 0
    output = capsys.readouterr().out
    assert "tensorflow, torch, jax, dynet skipped: left out" in output
    assert "time, s" in output
    assert json.loads(path.read_text(encoding="utf-8"))["results"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["nonsense"], "no workload nonsense"),
        (["--repeats", "0"], "at least 1; got 0"),
        (["trees", "--size", "batches"], "written name=1,2"),
        (["trees", "vertex_models", "--size", "batches=1"], "not every workload"),
    ],
)
def test_command_refuses(arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert reason in capsys.readouterr().err
