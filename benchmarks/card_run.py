"""Costs of a run on a card besides its kernels, stage by stage: ``python -m benchmarks.card_run``.

Counted on the stand-in for CuPy, so the numbers are the same on every machine, and stand for no time: functions of the
package on the event loop's thread, and calls of CUDA, of one run of a warm program. A call belongs to the innermost
stage around it. Each row of a program is the run with the fewest functions of several, as in `benchmarks.walks`.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

import asyncflow as af
from benchmarks.walks import PACKAGE, TAKEN
from tests.fake_cupy.stand_in import stand_in

if TYPE_CHECKING:
    from types import FrameType

WARM_UPS: Final = 8
SIZE: Final = 8
LARGE: Final = 1 << 16

REST: Final = "call and scheduling"
"""The stage of functions that are in no other."""

STAGES: Final[Mapping[str, str]] = {
    "Ports.copy_in": "feeds",
    "CudaRegionLauncher.__call__": "kernels",
    "CudaRegionLauncher._stepped.<locals>.steps": "kernels",
    "CudaLauncher.__call__": "kernels",
    "Ports._to_host": "fetches",
    "CudaCopies.told.<locals>.notice": "fetches",
    "Lookout._turn": "tickets",
    "Lookout._probe": "tickets",
    "Reaper.flush": "tickets",
    "Progress.when_done": "end of the run",
    "Run._drain": "end of the run",
    "Executor._begin": REST,
}
"""The stages, by the functions with which they begin."""

NAMES: Final = (*(name for name in dict.fromkeys(STAGES.values()) if name != REST), REST)

CALLS: Final[Mapping[str, str]] = {
    "Runtime.memcpyAsync": "copies",
    "Runtime.eventRecord": "records",
    "Runtime.streamWaitEvent": "waits",
    "Bindings.write_value": "flags",
    "Runtime.eventQuery": "queries",
    "CudaPool.malloc": "arrays",
}
"""Calls of CUDA, and arrays, by the functions of the stand-in or of ours that make them."""

COLUMNS: Final = ("functions", *CALLS.values())


@dataclass(slots=True)
class Stages:
    """Counts of each stage of a run.

    Attributes:
        counts: by stage and column.
        around: the stages of the functions that have not returned.
    """

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    around: list[str] = field(default_factory=list)

    def note(self, frame: FrameType, event: str, _: object) -> None:
        """Note what `sys.setprofile` tells of."""
        code = frame.f_code
        if event == "return" and self.around:
            self.around.pop()
        elif event == "call":
            stage = STAGES.get(code.co_qualname, self.around[-1] if self.around else REST)
            self.around.append(stage)
            if code.co_filename.startswith(PACKAGE):
                self.counts[stage, "functions"] += 1
            if (column := CALLS.get(code.co_qualname)) is not None:
                self.counts[stage, column] += 1

    @property
    def total(self) -> int:
        """Number of functions in all stages."""
        return sum(count for (_, column), count in self.counts.items() if column == "functions")

    def row(self, stage: str) -> list[int]:
        """Return the counts of a stage, by column."""
        return [self.counts[stage, column] for column in COLUMNS]


async def stages_of(call: Callable[[], Awaitable[object]]) -> Stages:
    """Return the counts of a call that has been made a few times."""
    for _ in range(WARM_UPS):
        await call()
    found = []
    for _ in range(TAKEN):
        stages = Stages()
        sys.setprofile(stages.note)
        try:
            await call()
        finally:
            sys.setprofile(None)
        found.append(stages)
    return min(found, key=lambda stages: stages.total)


@dataclass(frozen=True, slots=True)
class Program:
    """A program whose run is counted.

    Attributes:
        build: makes its graph, and returns the fetched tensor and the feeds.
        cards: number of cards.
        cuda_graphs: option of the session.
    """

    build: Callable[[], tuple[af.Tensor, Mapping[af.Tensor, object]]]
    cards: int = 1
    cuda_graphs: bool = False


def small() -> tuple[af.Tensor, Mapping[af.Tensor, object]]:
    """Two kernels on eight numbers."""
    x = af.placeholder("float32", (SIZE,), name="x")
    return af.tanh(x @ af.constant(np.ones((SIZE, SIZE), np.float32))), {x: np.ones(SIZE, np.float32)}


def large() -> tuple[af.Tensor, Mapping[af.Tensor, object]]:
    """A kernel on 256 KiB, which are fed and fetched."""
    x = af.placeholder("float32", (LARGE,), name="x")
    return af.tanh(x), {x: np.ones(LARGE, np.float32)}


def resident() -> tuple[af.Tensor, Mapping[af.Tensor, object]]:
    """Two kernels on a variable; eight numbers are fetched."""
    return af.tanh(af.Variable(np.ones(SIZE, np.float32), name="v") * 2.0), {}


def chain() -> tuple[af.Tensor, Mapping[af.Tensor, object]]:
    """Sixteen kernels on eight numbers."""
    x = af.placeholder("float32", (SIZE,), name="x")
    y = x
    for _ in range(8):
        y = af.tanh(y @ af.constant(np.ones((SIZE, SIZE), np.float32)))
    return y, {x: np.ones(SIZE, np.float32)}


def transfer() -> tuple[af.Tensor, Mapping[af.Tensor, object]]:
    """A kernel on one card, and one on another that uses its value."""
    x = af.placeholder("float32", (SIZE,), name="x")
    with af.device("cuda:0"):
        there = af.tanh(x)
    with af.device("cuda:1"):
        return there * 2.0, {x: np.ones(SIZE, np.float32)}


PROGRAMS: Final[Mapping[str, Program]] = {
    "small": Program(small),
    "256 KiB": Program(large),
    "nothing fed": Program(resident),
    "one graph": Program(chain, cuda_graphs=True),
    "two cards": Program(transfer, cards=2),
}


async def measured(program: Program) -> Stages:
    """Return the counts of a program, which finds its cards."""
    with af.Graph() as graph:
        fetched, feeds = program.build()
    cards = [f"cuda:{index}" for index in range(program.cards)]
    async with af.Session(graph, cards, cuda_graphs=program.cuda_graphs) as session:
        return await stages_of(lambda: session.run(fetched, feeds))


def measure(program: Program) -> Stages:
    """Return the counts of a program, on an event loop and on cards of its own."""
    with stand_in(devices=program.cards):
        return asyncio.run(measured(program))


def table(name: str, stages: Stages) -> str:
    """Return a line for each stage of a program, and one for all of them."""
    lines = [f"{name:22}{''.join(f'{column:>10}' for column in COLUMNS)}"]
    rows = {stage: stages.row(stage) for stage in NAMES}
    rows["all"] = [sum(counts) for counts in zip(*rows.values(), strict=True)]
    for stage, row in rows.items():
        lines.append(f"  {stage:20}" + "".join(f"{count or '-':>10}" for count in row))
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.card_run", description=__doc__)
    parser.add_argument("program", nargs="?", choices=PROGRAMS, help="only this one")
    chosen = parser.parse_args(arguments).program
    print("\n\n".join(table(name, measure(each)) for name, each in PROGRAMS.items() if chosen in (None, name)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
