"""The rules as an oracle: what runs give, in any order and setting, is among the outcomes that the rules allow.

``python -m tests.semantics.oracle 0 100000`` checks so many random graphs, of the numbers from 0 on.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from random import Random
from typing import TypeAlias

import asyncflow as af
from tests.semantics.programs import Effects, Program, acyclic_program, outcome_key, outcome_keys

Build: TypeAlias = Callable[[Random, Effects], Program]
Open: TypeAlias = Callable[[af.Graph, int], AbstractAsyncContextManager[af.Session]]
"""Opens a session of a graph, which takes one of its orders as a seed says."""


def _opens(devices: Sequence[str], *, regions: bool) -> Open:
    return lambda graph, seed: af.Session(graph, devices, regions=regions, seed=seed, placement_seed=seed)


SETTINGS: Mapping[str, Open] = {
    f"{name}, regions {'on' if regions else 'off'}": _opens(devices, regions=regions)
    for name, devices in {"one": ["cpu:0"], "three": ["cpu:0", "cpu:1", "cpu:2"], "card": ["cuda:0"]}.items()
    for regions in (True, False)
}
"""Where programs run; a card is the stand-in."""


@dataclass(slots=True)
class Checked:
    """Counts of what was checked.

    Attributes:
        graphs: those whose outcomes could be explored.
        allowed: outcomes that those have which may have two to four.
        met: those of them that runs had.
    """

    graphs: int = 0
    allowed: int = 0
    met: int = 0


async def check(
    build: Build, effects: Effects, numbers: Iterable[int], opens: Open, *, runs: int = 1, max_states: int = 500
) -> Checked:
    """Runs random programs, and compares with the rules.

    Args:
        build: makes a program.
        effects: of the graphs.
        numbers: what programs are drawn from; the first run of each has its number as seed.
        opens: where they run.
        runs: of each program, with other seeds.
        max_states: programs with more are left out.

    Raises:
        AssertionError: a run gave what the rules do not allow.
    """
    checked = Checked()
    for number in numbers:
        graph, fetches, variables = build(Random(number), effects)
        af.allow_races(*graph.resources)
        found = af.explore(graph, fetches, max_states=max_states)
        if found.stopped:
            continue
        allowed, met = outcome_keys(found, variables), set[Hashable]()
        assert len(allowed) == 1 or effects == "unordered", f"program {number} has {len(allowed)} outcomes"
        touched = [each for each in variables if each in found.outcomes[0].variables]
        for seed in range(number, number + runs):
            async with opens(graph, seed) as session:
                fetched = await session.run(fetches)
                left = await session.run(touched)
            outcome = outcome_key(fetched, dict(zip(touched, left, strict=True)))
            assert outcome in allowed, (
                f"program {number} ({effects}), seed {seed}, gave {fetched} and left {left}, which no order "
                f"of its reads and writes does\n{af.print_graph(graph)}"
            )
            met.add(outcome)
        checked.graphs += 1
        if 2 <= len(allowed) <= 4:
            checked.allowed, checked.met = checked.allowed + len(allowed), checked.met + len(met)
    return checked


def main(first: int, count: int) -> None:
    """Checks graphs of the paper's own kind on CPUs, and says how far it has come."""
    settings = [opens for name, opens in SETTINGS.items() if "card" not in name]
    graphs = 0
    for number in range(first, first + count):
        effects: Effects = "ordered" if number % 5 == 0 else "unordered"
        graphs += asyncio.run(check(acyclic_program, effects, [number], settings[number % 4])).graphs
        if (number + 1) % 1000 == 0:
            print(f"{graphs} graphs, none outside of the rules", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
