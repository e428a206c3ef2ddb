"""Cells of the conformance matrix, in which tests run, and the choice of cells for a run of the suite.

The matrix is {asyncio, uvloop, virtual time} x {one device with regions, one device interpreted, three devices with
every node placed at random}, and four cells on a stand-in for CuPy. Of its 13 cells, five caught every fault that any
cell caught, when faults were put into the code on purpose (`make mutants`). These five run always. The others run with
``--full``, or by turns with ``--turn=WORD``. Then every tenth test runs in one more cell, with nodes placed as the word
draws, and a tenth of the slow tests runs. One of the others leaves out a pass of the compiler, another for each test;
``--without=PASS`` leaves it out of all tests.

A test with three sets of parameters or more runs in all five cells as well, but each set in two of them, which change
by turns. A fault that one set finds in one cell alone is found in a later turn, or with ``--full``. Outside these
rooms, half of the sets of a product of parameters run, by turns, as on a chessboard: each value of each parameter runs.

``costly.txt`` lists functions that take much processor time in all: a part of their remaining sets runs, by turns.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import environ
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias
from zlib import crc32

import pytest

from asyncflow.compiler.pipeline import PASSES
from asyncflow.streams.virtual import VirtualClockLoop
from tests.loops import new_loop, new_uvloop

if TYPE_CHECKING:
    from _pytest.python import CallSpec

LoopFactory: TypeAlias = Callable[[], asyncio.AbstractEventLoop]

SEEDS = int(environ.get("ASYNCFLOW_SEEDS", "1"))
"""In how many random places every conformance test puts its nodes."""

DISTRIBUTED_ROOMS = ("conformance", "control", "state", "vertex")
"""Folders whose tests also run on three devices, and on virtual time."""

ON_CARDS = "gpu"
"""Folder of the tests of a card, where nothing is left out."""

DRAWS = 10_000
"""Number of random placements that have their turn."""

PARTS = 10
"""Number of parts of the slow tests, and of the tests of one more cell; one part has its turn."""

FEW = 5
"""Number of sets of parameters up to which all run."""

COSTLY_LIST = Path(__file__).parent / "costly.txt"
"""Each line names a function of tests, and says of how many parts of it one runs; see `tests.processor_time`.

One part: all of it runs, since single sets of its parameters reach lines that no other test does, or find faults of
`tests.mutants` alone.
"""

COSTLY = {name: int(parts) for name, parts in map(str.split, COSTLY_LIST.read_text(encoding="utf-8").splitlines())}

REAL_CPUS_ONLY: Mapping[str, str] = {
    "test_device_scopes": "asks for CPUs by name; tests/distributed asks for cards",
    "test_pieces_that_are_never_joined": "asks for CPUs by name",
    "test_the_times_of_a_firing": "looks for work on a stream's thread",
    "test_only_plans_without_functions_of_the_users_are_computed_on_several_threads": "waits for a CPU's threads",
    "test_cancel_in_a_kernel_and_in_a_loop": "blocks a stream's thread; simulated streams have none",
    "test_two_sessions_in_one_loop": "blocks a stream's thread",
    "test_other_coroutines_keep_their_latency": "measures the processor time of the loop",
    "test_a_loop_without_kernels": "measures the processor time of the loop",
    "test_the_guard_names_a_kernel_that_holds_the_loop": "measures the processor time of the loop",
    "test_the_guard_says_nothing_of_threads": "measures the processor time of the loop",
    "test_asyncio_debug_mode": "looks for calls from threads",
}
"""Tests of the distributed rooms that run neither on virtual time nor on cards, and why."""

LOOPS: Mapping[str, LoopFactory] = {
    "asyncio": new_loop,
    "uvloop": new_uvloop,
    "virtual": VirtualClockLoop,
}


@dataclass(frozen=True)
class Arrangement:
    """A cell of the matrix, in which a test's sessions run.

    Attributes:
        name: for people.
        loop: the event loop, one of `LOOPS`.
        regions: True if sessions compile regions.
        draw: number of the random placement on three devices; None for one device.
        cuda: True if devices are CUDA's, with a stand-in for CuPy; otherwise they are CPUs, or simulated cards.
        graphs: True if regions are captured as CUDA graphs at once, and loops run on the card if possible.
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

ON_STAND_IN = ALWAYS[-2:]
"""Cells on the stand-in for CuPy; each set of parameters runs in one of them, by turns."""

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
    """Tests of a run of the suite: always a fixed part, with ``--full`` everything, with ``--turn`` one part more."""

    def __init__(self, config: pytest.Config) -> None:
        self.full: bool = config.getoption("full")
        word: str = config.getoption("turn")
        self.turn = crc32(word.encode()) if word else None
        # Each seed of the adversary, too, takes other sets of parameters.
        self._drawn = crc32((word or config.getoption("adversary")).encode())
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
        if self.full and is_distributed(test) and "machine" in getattr(test, "fixturenames", ()):
            return tuple(LOOPS)  # any other session would open real CPUs, whose threads virtual time knows nothing of
        return ("asyncio", "uvloop") if self.full or test.get_closest_marker("every_loop") else ("uvloop",)

    def chosen(self, metafunc: pytest.Metafunc) -> list[CallSpec]:
        """Return the sets of parameters of a function that run: not all slow ones, and unless files were named, not
        every set in every cell."""
        calls = metafunc._calls
        if self.full:
            return calls
        test, sets = metafunc.definition, dict[str, int]()
        for call in calls if self.is_thinned else ():
            if cell := _cell(call):
                sets.setdefault(_parameters(call, cell), len(sets))
        is_halved = self.is_thinned and len(calls) > FEW and not sets and _is_product(test)
        seen: defaultdict[str, dict[int, int]] = defaultdict(dict)
        n_slow = 0

        def has_turn(call: CallSpec) -> bool:
            nonlocal n_slow
            if not _is_slow(test, call):
                return not is_halved or self._is_on_its_half(test, call, seen)
            n_slow += 1
            return self.is_slow_turn(test, n_slow)

        chosen = [call for call in calls if self._is_in_its_cells(test, call, sets) and has_turn(call)]
        return self._part(test, chosen) if self.is_thinned else chosen

    def _part(self, test: pytest.Item, calls: list[CallSpec]) -> list[CallSpec]:
        """Return the part of a costly function's sets that has its turn; slow ones have turns of their own."""
        quick = [call for call in calls if not _is_slow(test, call)]
        step = min(COSTLY.get(_function(test), 1), len(quick)) or 1
        first = (crc32(_function(test).encode()) + self._drawn) % step
        left_out = {id(call) for place, call in enumerate(quick) if place % step != first}
        return [call for call in calls if id(call) not in left_out]

    def is_slow_turn(self, test: pytest.Item, number: int) -> bool:
        """Return True if the slow set of this number has its turn: one of ten each time, and another one next time."""
        return self.full or self.turn is None or (number + crc32(_function(test).encode()) + self.turn) % PARTS == 0

    def _is_on_its_half(self, test: pytest.Item, call: CallSpec, seen: defaultdict[str, dict[int, int]]) -> bool:
        """Return True if a set of a product of parameters is one of the half that runs, as on a chessboard."""
        total = self._drawn
        for mark in test.iter_markers("parametrize"):
            names = mark.args[0]
            first = names.split(",")[0].strip() if isinstance(names, str) else names[0]
            total += seen[first].setdefault(id(call.params[first]), len(seen[first]))
        return total % 2 == 0

    def _is_in_its_cells(self, test: pytest.Item, call: CallSpec, sets: Mapping[str, int]) -> bool:
        """Return True if a test runs in its cell, where `sets` numbers the sets of parameters of its function."""
        cell, cells = _cell(call), ALWAYS if is_distributed(test) else (REGIONS, INTERPRETED)
        if cell is None or cell not in cells or not sets:
            return True
        place, turn = sets[_parameters(call, cell)], self._drawn
        # Tests on the stand-in for CuPy cost several times as much as others: no set runs in both of its cells.
        if cell in ON_STAND_IN and cell is not ON_STAND_IN[(place + crc32(_function(test).encode()) + turn) % 2]:
            return False
        count = len(cells) // 2
        if len(sets) * count < len(cells):
            return True
        # The sets go through the cells one after another; products of parameters do not always meet in the same.
        first = place * count + place // len(cells) + turn
        return (cells.index(cell) - first) % len(cells) < count


def is_distributed(test: pytest.Item) -> bool:
    return test.path.parent.name in DISTRIBUTED_ROOMS


def _cell(call: CallSpec) -> Arrangement | None:
    """Return the cell that a test with sessions runs in."""
    cell = call.params.get("arrangement")
    return cell if isinstance(cell, Arrangement) else None


def _is_product(test: pytest.Item) -> bool:
    """Return True if the parameters are a product of lists; of one list, all sets run."""
    return len(list(test.iter_markers("parametrize"))) > 1 and test.path.parent.name != ON_CARDS


def _is_slow(test: pytest.Item, call: CallSpec) -> bool:
    return test.get_closest_marker("slow") is not None or any(mark.name == "slow" for mark in call.marks)


def _function(test: pytest.Item) -> str:
    return test.nodeid.partition("[")[0]


def _parameters(call: CallSpec, cell: Arrangement) -> str:
    """Return the name of a set of parameters, whatever the cell."""
    return call.id.replace(str(cell), "")


def _name(test: pytest.Item) -> str:
    return test.name.partition("[")[0]
