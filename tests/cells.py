"""Where tests run: the cells of the conformance matrix, and which of them a run of the suite generates.

The matrix is {asyncio, uvloop, virtual time} x {one device with regions, one device interpreted, three devices with
every node placed at random}, and four cells on a stand-in for CuPy. Of its 13 cells five caught every fault that any
cell caught, when faults were put into the code on purpose (`make mutants`). These five run always; the others run with
``--full``, or by turns with ``--turn=WORD``: then every tenth test runs in one more cell, with nodes placed as the word
draws, and a tenth of the slow tests runs. One of the others leaves out a pass of the compiler, another for each test;
``--without=PASS`` leaves it out of all tests.

A test with three sets of parameters or more runs in all five cells as well, but each set in two of them, which change
by turns: what one set finds in one cell alone is found in a later turn, or with ``--full``. Outside these rooms, of a
product of parameters half of the sets run, by turns, as on a chessboard: each value of each parameter does.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import environ
from typing import TypeAlias, cast
from zlib import crc32

import pytest
import uvloop

from asyncflow.compiler.pipeline import PASSES
from asyncflow.streams.virtual import VirtualClockLoop

LoopFactory: TypeAlias = Callable[[], asyncio.AbstractEventLoop]

SEEDS = int(environ.get("ASYNCFLOW_SEEDS", "1"))
"""In how many random places every conformance test puts its nodes."""

DISTRIBUTED_ROOMS = ("conformance", "control", "state", "vertex")
"""Folders whose tests also run on three devices, and on virtual time."""

ON_CARDS = "gpu"
"""The folder whose tests are those of a card, where nothing is left out."""

DRAWS = 10_000
"""So many random placements have their turn."""

PARTS = 10
"""Of so many parts of the slow tests, and of what one more cell adds, one has its turn."""

FEW = 5
"""Of so many sets of parameters all run."""

REAL_CPUS_ONLY: Mapping[str, str] = {
    "test_43_device_scopes": "asks for CPUs by name; tests/distributed asks for cards",
    "test_77_what_is_never_joined": "asks for CPUs by name",
    "test_73_the_times_of_a_firing": "looks for work on a stream's thread",
    "test_only_plans_without_functions_of_the_users_are_computed_on_several_threads": "waits for a CPU's threads",
    "test_84_cancel_in_a_kernel_and_in_a_loop": "blocks a stream's thread; simulated streams have none",
    "test_86_two_sessions_in_one_loop": "blocks a stream's thread",
    "test_87_other_coroutines_keep_their_latency": "measures the processor time of the loop",
    "test_87_a_loop_without_kernels": "measures the processor time of the loop",
    "test_87_the_guard_names_a_kernel_that_holds_the_loop": "measures the processor time of the loop",
    "test_87_the_guard_says_nothing_of_threads": "measures the processor time of the loop",
    "test_89_asyncio_debug_mode": "looks for calls from threads",
}
"""Tests of the distributed rooms that run neither on virtual time nor on cards, and why."""

LOOPS: Mapping[str, LoopFactory] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
    "virtual": VirtualClockLoop,
}


@dataclass(frozen=True)
class Arrangement:
    """Where a test's sessions run: a cell of the matrix.

    Attributes:
        name: for people.
        loop: the event loop, one of `LOOPS`.
        regions: whether sessions compile regions.
        draw: which of the random placements on three devices; None for one device.
        cuda: whether devices are CUDA's, with a stand-in for CuPy; otherwise they are CPUs, or simulated cards.
        graphs: whether regions are captured as CUDA graphs, at once, and loops run on the card where they can.
        streams: for kernels, on each device.
        without: a pass of the compiler that is left out.
        devices: their names; none: one or three of a kind.
    """

    name: str
    loop: str
    regions: bool = True
    draw: int | None = None
    cuda: bool = False
    graphs: bool = False
    streams: int = 1
    without: str = ""
    devices: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.loop}-{self.name}"


REGIONS, INTERPRETED = Arrangement("regions", "uvloop"), Arrangement("interpreted", "uvloop", regions=False)
THREE = tuple(Arrangement(f"three-{k}" if k else "three", "virtual", draw=k) for k in range(SEEDS))

ALWAYS = (
    REGIONS,
    replace(INTERPRETED, loop="asyncio"),
    *THREE,
    Arrangement("three-cuda", "asyncio", draw=0, cuda=True),
    Arrangement("graphs-cuda", "uvloop", cuda=True, graphs=True),
)
"""Each caught faults that no other one did. On the stand-in for CuPy, what nothing orders goes wrong."""

OTHERS = (
    *(replace(REGIONS, loop=loop) for loop in ("asyncio", "virtual")),
    *(replace(INTERPRETED, loop=loop) for loop in ("uvloop", "virtual")),
    *(replace(cell, loop=loop) for cell in THREE for loop in ("asyncio", "uvloop")),
    Arrangement("cuda", "uvloop", cuda=True),
    Arrangement("mixed-cuda", "asyncio", draw=1, cuda=True, devices=("cpu:0", "cuda:0", "cuda:1")),
)
"""The rest of the matrix."""

_CONCERNED: Mapping[str, Arrangement] = {
    "assign_streams": replace(REGIONS, streams=2),
    "delay_recvs": THREE[0],
    "device_loops": ALWAYS[-1],
    "fuse": ALWAYS[-1],
}
"""Cells in which passes have something to do that do nothing on one CPU."""

WITHOUT = tuple(
    replace(_CONCERNED.get(each.name, REGIONS), name=f"without-{each.name}", without=each.name)
    for each in PASSES
    if not each.needed
)
"""Without each of the compiler's passes that may be left out; a test runs in one of them, which changes by turns."""


class Selection:
    """What a run of the suite generates: what always runs, with ``--full`` everything, with ``--turn`` a part of it."""

    def __init__(self, config: pytest.Config) -> None:
        self.full: bool = config.getoption("full")
        word: str = config.getoption("turn")
        self.turn = crc32(word.encode()) if word else None
        self.is_thinned = not any(".py" in arg for arg in config.args)
        self.without = next((cell for cell in WITHOUT if cell.without == config.getoption("without")), None)

    def arrangements(self, test: pytest.Item) -> Sequence[Arrangement]:
        """The cells in which a test with sessions runs."""
        cell = self.without
        if cell is not None:
            is_anywhere = is_distributed(test) and _name(test) not in REAL_CPUS_ONLY
            return [cell if is_anywhere else replace(REGIONS, name=cell.name, without=cell.without)]
        if not is_distributed(test):
            loops = self.loops(test)
            return [replace(cell, loop=loop) for loop in loops for cell in (REGIONS, INTERPRETED)]
        drawn = crc32(test.nodeid.encode()) + (self.turn or 0)
        always, others = ALWAYS, (*OTHERS, WITHOUT[drawn // (len(OTHERS) + 1) % len(WITHOUT)])
        if _name(test) in REAL_CPUS_ONLY:
            always = (REGIONS, replace(INTERPRETED, loop="asyncio"), *(replace(cell, loop="uvloop") for cell in THREE))
            others = tuple(cell for cell in others if not cell.cuda and cell.loop != "virtual" and cell not in always)
        if self.full:
            return always + others
        if self.turn is None or (drawn >> 16) % PARTS:
            return always
        cell = others[drawn % len(others)]
        if cell.draw is not None:  # nodes have never been put like this before
            draw = self.turn % DRAWS
            cell = replace(cell, draw=draw, name=f"{cell.name}-{draw}")
        return (*always, cell)

    def loops(self, test: pytest.Item) -> Sequence[str]:
        """The event loops on which a test without sessions, or outside the distributed rooms, runs."""
        asked = test.get_closest_marker("asyncio")
        if asked is not None and "loop_factories" in asked.kwargs:
            return asked.kwargs["loop_factories"]
        if self.full and is_distributed(test) and _name(test) not in REAL_CPUS_ONLY:
            return tuple(LOOPS)
        return ("asyncio", "uvloop") if self.full or test.get_closest_marker("every_loop") else ("uvloop",)

    def chosen(self, tests: Sequence[pytest.Item]) -> list[pytest.Item]:
        """Those that run: not all slow ones; unless files were named, not every set of parameters in every cell."""
        if self.full:
            return list(tests)
        sets: defaultdict[str, dict[str, int]] = defaultdict(dict)
        for test in tests if self.is_thinned else ():
            if cell := _cell(test):
                sets[_function(test)].setdefault(_parameters(test, cell), len(sets[_function(test)]))
        count = Counter(map(_function, tests))
        slow = Counter[str]()
        seen: defaultdict[tuple[str, str], dict[int, int]] = defaultdict(dict)

        def has_turn(test: pytest.Item) -> bool:
            if test.get_closest_marker("slow") is None:
                is_large = self.is_thinned and count[_function(test)] > FEW and not sets[_function(test)]
                return not is_large or self._is_on_its_half(test, seen)
            if self.turn is None:
                return True
            # Not by chance: of one that has ten cells and sets there is one each time, and another one the next time.
            slow[_function(test)] += 1
            return (slow[_function(test)] + crc32(_function(test).encode()) + self.turn) % PARTS == 0

        return [test for test in tests if self._is_in_its_cells(test, sets[_function(test)]) and has_turn(test)]

    def _is_on_its_half(self, test: pytest.Item, seen: defaultdict[tuple[str, str], dict[int, int]]) -> bool:
        """Whether a set of a product of parameters is one of those that run; sets of one list of parameters all are."""
        lists = [mark.args[0] for mark in test.iter_markers("parametrize")]
        if len(lists) < 2 or test.path.parent.name == ON_CARDS:
            return True
        params, total = cast("pytest.Function", test).callspec.params, self.turn or 0
        for names in lists:
            first = names.split(",")[0].strip() if isinstance(names, str) else names[0]
            places = seen[_function(test), first]
            total += places.setdefault(id(params[first]), len(places))
        return total % 2 == 0

    def _is_in_its_cells(self, test: pytest.Item, sets: Mapping[str, int]) -> bool:
        """Whether a test runs in its cell, if these are the sets of parameters of its function, in order."""
        cell, cells = _cell(test), ALWAYS if is_distributed(test) else (REGIONS, INTERPRETED)
        count = len(cells) // 2
        if cell is None or cell not in cells or len(sets) * count < len(cells):
            return True
        # The sets go through the cells one after another; products of parameters do not always meet in the same.
        place = sets[_parameters(test, cell)]
        first = place * count + place // len(cells) + (self.turn or 0)
        return (cells.index(cell) - first) % len(cells) < count


def is_distributed(test: pytest.Item) -> bool:
    return test.path.parent.name in DISTRIBUTED_ROOMS


def _cell(test: pytest.Item) -> Arrangement | None:
    """In which a test with sessions runs."""
    if not (isinstance(test, pytest.Function) and hasattr(test, "callspec")):
        return None
    cell = test.callspec.params.get("arrangement")
    return cell if isinstance(cell, Arrangement) else None


def _function(test: pytest.Item) -> str:
    return test.nodeid.partition("[")[0]


def _parameters(test: pytest.Item, cell: Arrangement) -> str:
    """All but the cell."""
    return test.name.replace(str(cell), "")


def _name(test: pytest.Item) -> str:
    return test.name.partition("[")[0]
