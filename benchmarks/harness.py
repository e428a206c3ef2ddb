"""The harness: repeats of several systems, interleaved, checked to agree, and summarised as medians.

A workload gives one `Trial` per system. Trials alternate (A B C, B C A, …), so that a slow moment of the machine hits
all systems alike. Their results have to be the same: bit for bit, or within a tolerance that the workload states. A
trial begins when the threads of the one before have come to rest.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import platform
import statistics
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter, process_time, thread_time
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np

from asyncflow.devices.machine.hardware import processor
from benchmarks.environment import kernels

if TYPE_CHECKING:
    from benchmarks.peers import Peers

ASYNCFLOW: Final = "asyncflow"
"""The system that ratios compare the others with."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A quantity of a trial: its name, and its unit."""

    name: str
    unit: str
    higher_is_better: bool = False


@dataclass(frozen=True, slots=True)
class Sample:
    """The outcome of one trial: its figures, and its results (None if there is nothing to compare)."""

    figures: Mapping[Figure, float]
    answer: object = None


Trial: TypeAlias = Callable[[], Awaitable[Sample]]
"""Does the work once, on the event loop, and times it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One figure of one system, over all repeats.

    Attributes:
        workload: the program's name.
        case: the work, with its size.
        figure: the quantity and its unit.
        system: the system that did the work.
        values: one per repeat, in order.
        ratio: asyncflow's value over this system's, the median over repeats, whose trials ran next to each other; None
            for asyncflow itself and for baselines.
    """

    workload: str
    case: str
    figure: Figure
    system: str
    values: tuple[float, ...]
    ratio: float | None

    @property
    def median(self) -> float:
        """The middle of the repeats."""
        return statistics.median(self.values)

    @property
    def best(self) -> float:
        """The repeat that was disturbed least."""
        return max(self.values) if self.figure.higher_is_better else min(self.values)

    @property
    def worst(self) -> float:
        """The repeat that was disturbed most."""
        return min(self.values) if self.figure.higher_is_better else max(self.values)


class DifferentAnswers(Exception):
    """Two systems did not compute the same numbers, so their times say nothing."""


async def compare(
    workload: str,
    case: str,
    trials: Mapping[str, Trial],
    *,
    repeats: int,
    warm_ups: int = 1,
    lead_ins: int = 0,
    baselines: Collection[str] = (),
    tolerance: float = 0.0,
) -> list[Result]:
    """Run every trial `warm_ups` times unmeasured and `repeats` times measured, and summarise.

    Args:
        workload: the program's name.
        case: the work of the trials.
        trials: by system.
        repeats: measured trials of each system.
        warm_ups: trials before those; 0 where a trial makes everything anew.
        lead_ins: unmeasured trials of the same system right before each trial, for work that is done over and over in
            practice. Memory that a system gives back between its steps is cheap to get again at once. After the others'
            turns a virtual machine may have passed it on to its host, which makes a page cost ten times as much.
        baselines: systems that others are not compared with.
        tolerance: largest difference of two answers, relative to the larger of 1 and the value.

    Raises:
        DifferentAnswers: two systems computed different values or dtypes.
    """
    systems = list(trials)
    taken: dict[str, list[Mapping[Figure, float]]] = {system: [] for system in systems}
    expected: tuple[str, object] | None = None
    for repeat in range(-warm_ups, repeats):
        turn = repeat % len(systems)
        for system in systems[turn:] + systems[:turn]:
            for _ in range(lead_ins):
                await _undisturbed(trials[system])
            sample = await _undisturbed(trials[system])
            if sample.answer is not None:
                expected = expected or (system, sample.answer)
                _require_equal(f"{workload}, {case}", expected, (system, sample.answer), tolerance)
            if repeat >= 0:
                # Not the answer: it would lie among the memory that the next trials use again, and take some from them.
                taken[system].append(sample.figures)
            del sample
    return _summarise(workload, case, taken, baselines)


async def _undisturbed(trial: Trial) -> Sample:
    """Once nothing is left of the trial before, or this one pays for its garbage and shares cores with its threads."""
    gc.collect()
    await wait_for_idle_threads()
    return await trial()


PROBE_S: Final = 0.01
PROBES: Final = 100


def cpu_of_other_threads() -> float:
    """Seconds of CPU time that this process has taken on threads other than the caller's."""
    return process_time() - thread_time()


async def wait_for_idle_threads(cpu_s: Callable[[], float] = cpu_of_other_threads) -> bool:
    """Wait until other threads of this process release the cores, for about a second at most.

    The threads of a BLAS do not sleep at once when they run out of work: OpenBLAS's were seen to spin for 20 to 120 ms,
    OpenMP's for 5 ms. The next trial would have one core less for so long.

    Args:
        cpu_s: their CPU time so far, in seconds.

    Returns:
        True if they took less than a tenth of a core during the last look at them.
    """
    before = cpu_s()
    for _ in range(PROBES):
        await asyncio.sleep(PROBE_S)
        after = cpu_s()
        if after - before < PROBE_S / 10:
            return True
        before = after
    return False


def timed(figure: Figure, scale: float, work: Callable[[], object]) -> Trial:
    """A trial of an ordinary function: its time in seconds times `scale` is the figure, its result the answer."""

    async def trial() -> Sample:
        started = perf_counter()
        answer = work()
        return Sample({figure: (perf_counter() - started) * scale}, answer)

    return trial


def timed_await(figure: Figure, scale: float, work: Callable[[], Awaitable[object]]) -> Trial:
    """Make a trial like `timed`, of awaited work."""

    async def trial() -> Sample:
        started = perf_counter()
        answer = await work()
        return Sample({figure: (perf_counter() - started) * scale}, answer)

    return trial


def _require_equal(what: str, expected: tuple[str, object], given: tuple[str, object], tolerance: float) -> None:
    reference, answer = np.asarray(expected[1]), np.asarray(given[1])
    if (
        answer.dtype != reference.dtype
        or answer.shape != reference.shape
        or not np.allclose(answer, reference, rtol=tolerance, atol=tolerance)
    ):
        raise DifferentAnswers(
            f"{what}: {given[0]} computed {answer!r}, {expected[0]} {reference!r}; make both programs do the same "
            "work before comparing their times"
        )


def _summarise(
    workload: str, case: str, taken: Mapping[str, Sequence[Mapping[Figure, float]]], baselines: Collection[str]
) -> list[Result]:
    names = dict.fromkeys(figure for trials in taken.values() for figures in trials for figure in figures)
    results = []
    for figure in names:
        values = {
            system: tuple(figures[figure] for figures in trials)
            for system, trials in taken.items()
            if all(figure in figures for figures in trials)
        }
        ours = values.get(ASYNCFLOW)
        for system, measured in values.items():
            comparable = system != ASYNCFLOW and system not in baselines and 0 not in measured
            ratio = (
                statistics.median(mine / its for mine, its in zip(ours, measured, strict=True))
                if comparable and ours is not None
                else None
            )
            results.append(
                Result(workload=workload, case=case, figure=figure, system=system, values=measured, ratio=ratio)
            )
    return results


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Place and time of the measurements."""

    processor: str
    cores: int
    system: str
    python: str
    packages: dict[str, str]
    kernels: dict[str, str]
    """Library of each system for matrix products."""
    load: float
    """Mean number of busy processes over the last minute, before the first trial."""

    def __str__(self) -> str:
        packages = ", ".join(f"{name} {installed}" for name, installed in self.packages.items())
        return (
            f"{self.processor}, {self.cores} cores, load {self.load:.2f} before the run\n"
            f"{self.system}, Python {self.python}, {packages}\n"
            f"matrix products: {'; '.join(f'{system} {used}' for system, used in self.kernels.items())}"
        )


def describe_machine(peers: Peers) -> Machine:
    """This machine, now, and what the systems that take part compute with."""
    packages = {}
    for name in ("numpy", "uvloop", "tensorflow-cpu", "torch", "jax", "dyNET38"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = "not installed"
    return Machine(
        processor=processor(),
        cores=os.cpu_count() or 1,
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        packages=packages,
        kernels=kernels(peers),
        load=os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan"),
    )


def format_table(results: Sequence[Result]) -> str:
    """A Markdown table, aligned for reading in a terminal too."""
    header = ("workload", "case", "figure", "system", "median", "best", "worst", "asyncflow ÷ it")
    rows = [header, *(_row(result) for result in results)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    n_text = 4
    lines = []
    for row in rows:
        cells = [
            text.ljust(width) if column < n_text else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(f"| {' | '.join(cells)} |")
    rule = [
        f":{'-' * (width - 1)}" if column < n_text else f"{'-' * (width - 1)}:" for column, width in enumerate(widths)
    ]
    lines.insert(1, f"| {' | '.join(rule)} |")
    return "\n".join(lines)


def _row(result: Result) -> tuple[str, ...]:
    return (
        result.workload,
        result.case,
        f"{result.figure.name}, {result.figure.unit}",
        result.system,
        _number(result.median),
        _number(result.best),
        _number(result.worst),
        "" if result.ratio is None else f"{_number(result.ratio)}x",
    )


def _number(value: float) -> str:
    """About three digits, never an exponent."""
    magnitude = abs(value)
    return f"{value:.0f}" if magnitude >= 100 else f"{value:.1f}" if magnitude >= 10 else f"{value:.3g}"


def write_json(path: Path, machine: Machine, results: Sequence[Result]) -> None:
    """Everything that was measured, for other programs."""
    rows = [
        asdict(result) | {"median": result.median, "best": result.best, "worst": result.worst} for result in results
    ]
    document = {"machine": asdict(machine), "results": rows}
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
