"""Behaviour 114: a simulated figure in the docs is what its command prints.

A row has the command, words of the page that state figures, and the way to find each of them among the command's.
Change a figure on the page and in its row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple, TypeAlias

import pytest

import asyncflow as af
from benchmarks import (
    dependency_patterns,
    distributed_loop,
    dynamic_unrolling,
    parallel_iterations,
    stacked_lstm,
    stacked_lstm_training,
    white_paper_pipelines,
)
from benchmarks.simulation import Curve, by_host, require_bodies, simulate

DOCS = Path(__file__).parents[2] / "docs"
PAGE = " ".join(" ".join((DOCS / page).read_text().split()) for page in ("performance.md", "performance_tables.md"))

OURS, CPP = "this runtime", "a thread a device"

Curves: TypeAlias = Mapping[str, Curve]


class Row(NamedTuple):
    """Figures of one sentence.

    Attributes:
        command: the workload of ``python -m benchmarks``.
        words: of the page for users, or of the tables.
        values: figures in these words, as the page has them.
        found: the same, of the command's curves.
        tolerance: largest relative difference, for the digits that the page leaves out.
    """

    command: str
    words: str
    values: tuple[float, ...]
    found: Callable[[Curves], tuple[float, ...]]
    tolerance: float = 0.02


def _unrolling() -> dict[str, Curve]:
    return by_host(lambda: {"": dynamic_unrolling.curve((64, 256, 512), **dynamic_unrolling.SIZES)})


def _stacked() -> dict[str, Curve]:
    sizes = {"hidden 512": stacked_lstm.SIZES, "hidden 1024": stacked_lstm.LARGE}
    return {
        f"{name}, {curve}": points
        for name, size in sizes.items()
        for curve, points in by_host(
            partial(stacked_lstm.curves, (1, 8), steps=stacked_lstm.SIMULATED_STEPS, **size)
        ).items()
    }


def _training() -> dict[str, Curve]:
    return {
        **by_host(partial(stacked_lstm_training.curves, (8,))),
        "widths": stacked_lstm_training.widths((1024, 2048))[f"batch 512, {OURS}"],
    }


def _patterns() -> dict[str, Curve]:
    return by_host(partial(dependency_patterns.curves, (1, 8)))


def _pipelines() -> dict[str, Curve]:
    return by_host(lambda: {name: white_paper_pipelines.curve(name) for name in white_paper_pipelines.PIPELINES})


COMMANDS: Mapping[str, Callable[[], Curves]] = {
    "dependency_patterns": _patterns,
    "distributed_loop": lambda: by_host(lambda: distributed_loop.curves((2, 64))),
    "dynamic_unrolling": _unrolling,
    "parallel_iterations": lambda: by_host(lambda: {"": parallel_iterations.curve((1, 8, 32))}),
    "stacked_lstm": _stacked,
    "stacked_lstm_training": _training,
    "white_paper_pipelines": _pipelines,
}

ROWS = [
    Row(
        "dynamic_unrolling",
        "the loop takes 1.04 of the time at batch 64, and 1.00 at 256 and 512",
        (1.035, 1.001, 1.001),
        lambda c: (c[CPP][64], c[CPP][256], c[CPP][512]),
        0.005,
    ),
    Row(
        "dynamic_unrolling",
        "0.75 of it, and 1.03 at batch 512",
        (0.752, 1.030),
        lambda c: (c[OURS][64], c[OURS][512]),
        0.005,
    ),
    Row(
        "stacked_lstm_training",
        "at batch 64 is 6.4 times as fast as on one. At 512 it is 6.0 times as fast",
        (6.4, 6.0),
        lambda c: (c[f"batch 64, {CPP}"][8], c[f"batch 512, {CPP}"][8]),
    ),
    Row(
        "stacked_lstm_training",
        "5.2 times as fast as one with 2,048 units a layer, and 1.5 times with 1,024. "
        "With 512 units they are slower: 0.51 times",
        (5.2, 1.48, 0.51),
        lambda c: (c["widths"][2048], c["widths"][1024], c[f"batch 512, {OURS}"][8]),
    ),
    Row(
        "stacked_lstm_training",
        "2,048 units a layer they are 5.2 times as fast as one card, of 1,024 units 1.5 times, of 512 units 0.51 times",
        (5.2, 1.48, 0.51),
        lambda c: (c["widths"][2048], c["widths"][1024], c[f"batch 512, {OURS}"][8]),
    ),
    Row(
        "stacked_lstm_training",
        "and 0.26 times at batch 64",
        (0.258,),
        lambda c: (c[f"batch 64, {OURS}"][8],),
    ),
    Row(
        "parallel_iterations",
        "32 iterations at once are 7.5 times as fast as one, and 8 are as fast as 32",
        (7.5, 1.0),
        lambda c: (c[CPP][32] / c[CPP][1], c[CPP][8] / c[CPP][32]),
    ),
    Row(
        "parallel_iterations",
        "With this runtime's host they are 1.09 times as fast",
        (1.09,),
        lambda c: (c[OURS][32] / c[OURS][1],),
    ),
    Row(
        "dependency_patterns",
        "5,800, 4,200 and 1,600 iterations/s on eight",
        (5800, 4200, 1600),
        lambda c: tuple(c[f"{name}, {CPP}"][8] for name in dependency_patterns.PATTERNS),
        0.03,
    ),
    Row(
        "dependency_patterns",
        "1,400, 320 and 270 iterations/s on eight, 5,700 on one",
        (1400, 320, 270, 5700),
        lambda c: (
            *(c[f"{name}, {OURS}"][8] for name in dependency_patterns.PATTERNS),
            c[f"independent, {OURS}"][1],
        ),
    ),
    Row(
        "distributed_loop",
        "from 15 times at two to 4.3 at 64",
        (15, 4.3),
        lambda c: tuple(c[f"without a barrier, {CPP}"][n] / c[f"with a barrier, {CPP}"][n] for n in (2, 64)),
        0.04,
    ),
    Row(
        "distributed_loop",
        "1.6 times at two machines and 3.3 at 64, where they make 1,850 iterations/s without a barrier and 550",
        (1.6, 3.3, 1850, 550),
        lambda c: (
            *(c[f"without a barrier, {OURS}"][n] / c[f"with a barrier, {OURS}"][n] for n in (2, 64)),
            c[f"without a barrier, {OURS}"][64],
            c[f"with a barrier, {OURS}"][64],
        ),
    ),
    Row(
        "white_paper_pipelines",
        "eight synchronous replicas are 4.7 times as fast as one. Asynchronous ones are another 14 % faster",
        (4.7, 1.14),
        lambda c: (
            c[f"data parallel, synchronous, {CPP}"][8] / c[f"data parallel, synchronous, {CPP}"][1],
            c[f"data parallel, asynchronous, {CPP}"][8] / c[f"data parallel, synchronous, {CPP}"][8],
        ),
    ),
    Row(
        "white_paper_pipelines",
        "four replicas are 1.6 times as fast as one, and eight slower than four. Asynchronous ones suffer most, 88 "
        "steps/s with four and 44 with eight",
        (1.6, 88, 44),
        lambda c: (
            c[f"data parallel, synchronous, {OURS}"][4] / c[f"data parallel, synchronous, {OURS}"][1],
            c[f"data parallel, asynchronous, {OURS}"][4],
            c[f"data parallel, asynchronous, {OURS}"][8],
        ),
        0.03,
    ),
    Row(
        "white_paper_pipelines",
        "up to 4.8 times as fast with a thread a device; with this runtime's host 1.8 times on two devices",
        (4.78, 1.82),
        lambda c: (
            c[f"model parallel, {CPP}"][8] / c[f"model parallel, {CPP}"][1],
            c[f"model parallel, {OURS}"][2] / c[f"model parallel, {OURS}"][1],
        ),
    ),
    Row(
        "white_paper_pipelines",
        "2.7 times as many runs a second with a thread a device. With this runtime's host it is 1.07 times",
        (2.66, 1.07),
        lambda c: tuple(c[f"concurrent steps, {host}"][8] / c[f"concurrent steps, {host}"][1] for host in (CPP, OURS)),
        0.03,
    ),
    Row(
        "stacked_lstm",
        "eight are 5.5 times as fast as one at hidden 512, and 5.5 times at 1024",
        (5.5, 5.5),
        lambda c: tuple(
            c[f"hidden {size}, 32 steps at once, {CPP}"][8] / c[f"hidden {size}, 32 steps at once, {CPP}"][1]
            for size in (512, 1024)
        ),
    ),
    Row(
        "stacked_lstm",
        "1,190 steps/s instead of 1,900. Each further device adds copies and calls of regions to its work: 290 steps/s",
        (1190, 1900, 290),
        lambda c: (
            c[f"hidden 512, 32 steps at once, {OURS}"][1],
            c[f"hidden 512, 32 steps at once, {CPP}"][1],
            c[f"hidden 512, 32 steps at once, {OURS}"][8],
        ),
    ),
]


@cache
def curves(command: str) -> Curves:
    """Return the results of a command, at the points that the page has."""
    return COMMANDS[command]()


def test_figures_stand_on_the_page() -> None:
    """Behaviour 114."""
    assert [row.words for row in ROWS if row.words not in PAGE] == []
    assert {row.command for row in ROWS} == set(COMMANDS)


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_figures_are_what_their_commands_print(command: str) -> None:
    """Behaviour 114."""
    found = {row.words: row.found(curves(command)) for row in ROWS if row.command == command}
    wrong = [
        (row.words, found[row.words])
        for row in ROWS
        if row.command == command and found[row.words] != pytest.approx(row.values, rel=row.tolerance)
    ]
    assert wrong == []


def test_a_loop_that_is_cut_has_a_part_on_each_device() -> None:
    """Equal counters are joined, so that a loop of them measures nothing on all machines but one."""
    with af.Graph():
        same = af.while_loop(lambda i, *_: i < 3, _counting, (0, 0, 0))

    async def run(session: af.Session) -> None:
        with pytest.raises(AssertionError, match=r"sim:1: no part in the body of a loop"):
            require_bodies(session.plan(same), ["sim:0", "sim:1"])

    simulate("2 x k40, ethernet10", run)
    assert distributed_loop.curves((2,), iterations=3).keys() == set(distributed_loop.PAPERS)


def _counting(step: af.Tensor, *counts: af.Tensor) -> tuple[af.Tensor, ...]:
    after = []
    for device, count in zip(("sim:0", "sim:1"), counts, strict=True):
        with af.device(device):
            after.append(count + 1)
    return step + 1, *after
