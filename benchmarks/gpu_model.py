"""The model of a card and its host beside real runs: ``python -m benchmarks.gpu_model`` prints a table of both.

Each row is a figure of a run on a card (`docs/gpu`) whose program can be simulated. Measured figures are medians, of
both runs where both have the row. With ``--fit`` the command also prints the costs of the host that explain all rows
best: least squares of the logarithms of ratios. Where rows say little, costs are held near the ones of the presets.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

import asyncflow as af
from asyncflow.devices.captures import WARM_UPS
from asyncflow.devices.figures.host import Call
from asyncflow.devices.figures.presets import DEFAULT_HOST
from asyncflow.testing import virtual_clock
from benchmarks import gpu, loop_overhead, parallel_iterations, stacked_lstm_training
from benchmarks.harness import ASYNCFLOW
from benchmarks.lstm import AsyncflowStep, looped, random_model

RUNS: Final = Path(__file__).parents[1] / "docs" / "gpu"
FIRST, SECOND = "2026-11-22-h100", "2026-11-28-h100"
MACHINE: Final = "4 x h100, nvlink4"
_AS_THEN: Final[dict[str, Any]] = {"without": ["batch_loops"]}
"""Options with which plans for cards are as they were in the runs: products of several iterations were not joined."""


class Simulated(NamedTuple):
    """A simulated run: its virtual time, and the host's calls in it."""

    seconds: float
    calls: Mapping[Call, int]

    def as_then(self, calls: Mapping[Call, int]) -> Simulated:
        """The run with the calls of the plan that was measured, in place of calls of today's plan.

        The programs keep the host busy, so a run takes as much longer as these calls take the host.
        """
        more = sum((count - self.calls.get(call, 0)) * DEFAULT_HOST.cost_s(call) for call, count in calls.items())
        return Simulated(self.seconds + more, {**self.calls, **calls})


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A figure of a real run.

    Attributes:
        name: of the table.
        unit: of the figure.
        measured: the medians of the runs that have it.
        repeats: all repeats, where the files have them.
        program: simulates it.
        then: the host's calls in the run that was measured, as far as plans may make others since.
        scale: seconds of a run to the figure.
        is_rate: the figure is `scale` divided by the seconds.
    """

    name: str
    unit: str
    measured: tuple[float, ...]
    repeats: tuple[float, ...] = ()
    program: Callable[[], Simulated]
    then: Mapping[Call, int] = field(default_factory=dict)
    scale: float
    is_rate: bool = False

    def simulate(self) -> Simulated:
        """The simulated run, with the calls of then."""
        return self.program().as_then(self.then)

    def figure(self, seconds: float) -> float:
        """The figure of a run that takes so long."""
        return self.scale / seconds if self.is_rate else self.scale * seconds

    def ratio(self, found: Simulated) -> float:
        """The simulated time of a run to the measured time."""
        return found.seconds / self.seconds

    @property
    def seconds(self) -> float:
        """The measured time of a run: the mean of the runs' medians."""
        middle = sum(self.measured) / len(self.measured)
        return self.scale / middle if self.is_rate else middle / self.scale


# -- simulating ------------------------------------------------------------------------------------------------------


def simulate(
    work: Callable[[af.Session], Awaitable[object]], *, shapes_only: bool = True, cards: int = 1, **options: Any
) -> Simulated:
    """The run of a warm program on cards of `MACHINE`."""

    names = [f"sim:{index}" for index in range(cards)]

    def opened() -> tuple[af.Session, Callable[[], Awaitable[object]]]:
        session = af.Session(devices=names, **_AS_THEN, **options)
        return session, lambda: work(session)

    return _timed(opened, shapes_only=shapes_only)


def _timed(opened: Callable[[], tuple[af.Session, Callable[[], Awaitable[object]]]], *, shapes_only: bool) -> Simulated:
    async def main() -> Simulated:
        session, work = opened()
        async with session:
            for _ in range(WARM_UPS + 2):
                await work()
            loop = asyncio.get_running_loop()
            (thread,) = clock.machine.threads.values()
            started, before = loop.time(), thread.calls.copy()
            await work()
            return Simulated(loop.time() - started, thread.calls - before)

    with virtual_clock(MACHINE, shapes_only=shapes_only) as clock:
        return clock.run(main())


def _program(make: Callable[[], gpu.Program], *, shapes_only: bool = True, **options: Any) -> Callable[[], Simulated]:
    def run() -> Simulated:
        _, fetches, feeds = make()
        return simulate(lambda session: session.run(fetches, feeds), shapes_only=shapes_only, **options)

    return run


def _loop(case: loop_overhead.Case) -> Simulated:
    _, limit, last = loop_overhead.build(case)
    return simulate(lambda session: session.run(last, {limit: case.iterations}))


def _pipeline(cards: int, window: int) -> Simulated:
    sizes = gpu.PIPELINE_SIZES
    names = [f"sim:{layer * cards // sizes['layers']}" for layer in range(sizes["layers"])]
    _, top = parallel_iterations.build(window, **sizes, names=names)
    return simulate(lambda session: session.run(top), cards=cards)


def _lstm() -> Simulated:
    model = random_model(**gpu.LSTM_SIZES)

    def opened() -> tuple[af.Session, Callable[[], Awaitable[object]]]:
        length = [np.array(len(model.xs), np.int32)]
        step = AsyncflowStep(model, looped, model.xs.size, length, devices=["sim:0"], **_AS_THEN)
        return step.session, step.run

    return _timed(opened, shapes_only=True)


def _training(steps: int, size: int) -> gpu.Program:
    """The training step of T5 (`tests/gpu/test_memory.py`)."""
    with af.Graph() as graph:
        x = af.placeholder("float32", (size, size))
        weight = af.Variable(np.eye(size, dtype=np.float32) * 0.5, name="weight").read()
        last = af.while_loop(lambda i, _: i < steps, lambda i, h: (i + 1, af.tanh(h @ weight) + x), (np.int32(0), x))[1]
        loss = af.sum(af.square(last))
        return gpu.Program(graph, [loss, *af.gradients(loss, [x, weight])], {x: np.zeros((size, size), np.float32)})


def _stacked() -> Simulated:
    return simulate(stacked_lstm_training.build(1, steps=10, batch=64, hidden=512))


# -- the rows --------------------------------------------------------------------------------------------------------


@cache
def _results(run: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((RUNS / run / "benchmarks.json").read_text())["results"]
    return found


@cache
def _figures(run: str, part: str) -> dict[str, dict[str, Any]]:
    lines = map(json.loads, (RUNS / run / f"results-{part}.jsonl").read_text().splitlines())
    return {line["name"]: line.get("figures", {}) for line in lines}


def _bench(workload: str, case: str, system: str = ASYNCFLOW) -> dict[str, Any]:
    """The figures of a benchmark in the first run."""
    (found,) = [
        each
        for each in _results(FIRST)
        if (each["workload"], each["system"]) == (workload, system) and each["case"] == case
    ]
    return {"measured": (found["median"],), "repeats": tuple(found["values"])}


def _tested(part: str, test: str, name: str) -> dict[str, Any]:
    """The figures of a test of `tests/gpu`, in each run that has it."""
    found = [_figures(run, part).get(test, {}).get(name) for run in (FIRST, SECOND)]
    return {"measured": tuple(value for value in found if value is not None)}


def rows() -> Iterator[Row]:
    """Every row that can be simulated."""
    yield from _operation_rows(1000)
    yield from _loop_rows()
    yield from _training_rows()


def _operation_rows(operations: int) -> Iterator[Row]:
    """Rows of straight lines of operations."""
    for name, regions in ((ASYNCFLOW, True), (gpu.INTERPRETED, False)):
        yield Row(
            name=f"product of 8x8{'' if regions else ', interpreted'}",
            unit="µs",
            **_bench(gpu.LAUNCHES, "1,000 products of 8x8", name),
            program=_program(lambda: gpu.build_products(operations), regions=regions),
            scale=1e6 / operations,
        )
    for regions in (True, False):
        yield Row(
            name=f"the same within a limit (T18){'' if regions else ', interpreted'}",
            unit="a second",
            **_tested("B", f"test_t18_a_large_graph[{'regions' if regions else 'interpreted'}]", "ops_per_s"),
            program=_program(lambda: gpu.build_products(operations), regions=regions, memory_limit=16 << 20),
            scale=operations,
            is_rate=True,
        )
    for size in (1_000, 1_000_000):
        for way, options in gpu.CHAIN_WAYS.items():
            yield Row(
                name=f"chain of {size:,} numbers{way.removeprefix(ASYNCFLOW)}",
                unit="µs an operation",
                **_bench(gpu.CHAIN, f"25 times four operations and a mean of {size:,} numbers", way),
                program=_program(lambda size=size: gpu.build_chain(size, 25), **options),  # type: ignore[misc]
                then={} if "cuda_graphs" in options else {"launch": 101 if options else 26, "library": 26},
                scale=1e6 / 127,
            )


def _loop_rows() -> Iterator[Row]:
    """Rows of loops, over one card and several."""
    for case in loop_overhead.cases(10_000):
        yield Row(
            name=f"loop: {case.name}",
            unit="µs an iteration",
            **_bench(gpu.LOOP, case.name),
            program=lambda case=case: _loop(case),  # type: ignore[misc]
            scale=1e6 / case.iterations,
        )
    yield Row(
        name="loop decided by an array, by the host",
        unit="µs an iteration",
        **_bench(gpu.DECISIONS, "about 1,000 iterations over 1,000 numbers"),
        program=_program(lambda: gpu.build_decisions(1000, 1000), shapes_only=False),
        scale=1e6 / 1000,
    )
    for cards in (1, 2, 4):
        for window in (1, 8):
            yield Row(
                name=f"4 layers over {cards} device{'s' if cards > 1 else ''}, {window} iterations at once",
                unit="iterations/s",
                **_bench(
                    gpu.PIPELINE,
                    f"4 layers of 512x512, logical devices: {cards}, parallel_iterations {window}",
                ),
                program=lambda cards=cards, window=window: _pipeline(cards, window),  # type: ignore[misc]
                scale=gpu.PIPELINE_SIZES["iterations"],
                is_rate=True,
            )


def _training_rows() -> Iterator[Row]:
    """Rows of training steps."""
    yield Row(
        name="LSTM, a training step",
        unit="ms",
        **_bench(gpu.LSTM, "hidden 512, batch 64, 100 steps"),
        program=_lstm,
        then={"view": 922, "step": 2621, "launch": 704, "product": 500, "library": 300},
        scale=1e3,
    )
    yield Row(
        name="300 steps of 512x512, forward and backward (T5)",
        unit="ms",
        **_tested("A", "test_t05_a_training_step_that_swaps", "kept_ms"),
        program=_program(lambda: _training(300, 512), memory_limit=40 * (64 << 20)),
        then={"view": 304, "step": 2703, "launch": 904, "product": 900, "library": 1},
        scale=1e3,
    )
    yield Row(
        name="8 LSTM layers on one device, 10 steps, a training step",
        unit="ms",
        measured=(41.0,),  # between the two runs, by hand: docs/performance_tables.md
        program=_stacked,
        then={"view": 651, "step": 1276, "launch": 541, "product": 470, "library": 160},
        scale=1e3,
    )


# -- a second card ---------------------------------------------------------------------------------------------------

CHAIN_MACHINE: Final = "2 x v100, nvlink2"
CHAIN_SIZES: Final = (32, 256, 512, 1024, 2048)


def chains(size: int, cards: int, *, length: int = 20) -> float:
    """Seconds of two independent chains of products, on some cards without `af.device`."""
    with af.Graph():
        ends = []
        for name in ("left", "right"):
            x, w = (af.Variable(np.zeros((size, size), np.float32), name=f"{name}_{each}").read() for each in "xw")
            for _ in range(length):
                x = x @ w
            ends.append(af.sum(x))

        async def main() -> float:
            async with af.Session(devices=[f"sim:{index}" for index in range(cards)]) as session:
                await session.run(ends)
                loop = asyncio.get_running_loop()
                started = loop.time()
                await session.run(ends)
                return loop.time() - started

        with virtual_clock(CHAIN_MACHINE, shapes_only=True) as clock:
            return clock.run(main())


# -- the table -------------------------------------------------------------------------------------------------------

FITTED: Final[tuple[Call, ...]] = (
    *("run", "node", "step", "view", "region"),
    *("launch", "product", "library", "copy", "transfer"),
)
"""The costs that ``--fit`` changes."""

_HOLD: Final = 0.3
"""The weight of a cost that is e times that of the presets; a row that is e times its time has weight 1."""


def fitted(found: list[tuple[Row, Simulated]]) -> dict[Call, float]:
    """The seconds of each call that explain the rows best."""
    costs = np.array([DEFAULT_HOST.cost_s(call) for call in FITTED])
    counts = np.array([[simulated.calls.get(call, 0) for call in FITTED] for _, simulated in found])
    others = np.array([simulated.seconds for _, simulated in found]) - counts @ costs
    measured = np.array([row.seconds for row, _ in found])
    logs = np.zeros(len(FITTED))
    for _ in range(50):
        parts = counts * (costs * np.exp(logs))
        seconds = np.maximum(others + parts.sum(axis=1), 1e-9)
        errors = np.concatenate([np.log(seconds / measured), _HOLD * logs])
        slopes = np.concatenate([parts / seconds[:, None], _HOLD * np.eye(len(FITTED))])
        logs -= 0.7 * np.linalg.lstsq(slopes, errors, rcond=None)[0]
    return dict(zip(FITTED, costs * np.exp(logs), strict=True))


def table(found: list[tuple[Row, Simulated]]) -> list[str]:
    """The rows of the page `docs/gpu/README.md`."""
    lines = ["| | measured | simulated | of the time |", "| :-- | --: | --: | --: |"]
    for row, simulated in found:
        figures = ", ".join(_number(value) for value in row.measured)
        if row.repeats:
            figures += f" ({_number(min(row.repeats))} to {_number(max(row.repeats))})"
        lines.append(
            f"| {row.name}, {row.unit} | {figures} | {_number(row.figure(simulated.seconds))} | "
            f"{row.ratio(simulated):.2f} |"
        )
    return lines


def chain_table(sizes: Sequence[int] = CHAIN_SIZES) -> list[str]:
    """Rows of two chains of products: how much faster two cards are than one."""
    lines = [
        "| two chains of 20 products | one card, ms | two cards, ms | times as fast |",
        "| --: | --: | --: | --: |",
    ]
    for size in sizes:
        one, two = (1e3 * chains(size, cards) for cards in (1, 2))
        lines.append(f"| {size}x{size} | {one:.2f} | {two:.2f} | {one / two:.2f} |")
    return lines


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_model", description=__doc__)
    parser.add_argument("--calls", action="store_true", help="print the host's calls in each row, too")
    parser.add_argument("--fit", action="store_true", help="print the costs that explain the rows best")
    chosen = parser.parse_args()
    found = [(row, row.simulate()) for row in rows()]
    print("\n".join([*table(found), "", *chain_table()]))
    if chosen.calls:
        for row, simulated in found:
            print(f"{row.name}: {dict(simulated.calls)}")
    if chosen.fit:
        for call, seconds in fitted(found).items():
            print(f"{call}_s={seconds * 1e6:.2g}e-6, {DEFAULT_HOST.cost_s(call) * 1e6:.2g}e-6 in the presets")


if __name__ == "__main__":
    main()
