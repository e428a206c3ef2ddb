"""The rules as an oracle: the results of runs, in any order and setting, are among the outcomes that the rules allow.

``python -m tests.semantics.oracle 0 100000`` checks 100,000 random graphs, numbered from 0 on.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from random import Random
from typing import Any, TypeAlias

import asyncflow as af
from asyncflow.compiler.plan import Kind, PlanNode
from asyncflow.runtime.watch.picks import PickLog
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
"""Settings in which programs run; a card is the stand-in."""


@dataclass(slots=True)
class Checked:
    """Counts of the oracle.

    Attributes:
        graphs: graphs whose outcomes could be explored.
        allowed: outcomes of the graphs that may have two to four.
        met: allowed outcomes that runs had.
    """

    graphs: int = 0
    allowed: int = 0
    met: int = 0


class Steered(PickLog):
    """Has one partition read and write in the order that leads to an outcome; all else comes as soon as it can."""

    def __init__(self, order: Sequence[str]) -> None:
        super().__init__()
        self.left = list(order)

    def position(self, partition: int, ready: Sequence[tuple[PlanNode, Any]]) -> int | None:
        """Return the place of a step without an order, or of the next one in the order; None if there is neither."""
        steps = [self._step(*each) for each in ready]
        free = (place for place, step in enumerate(steps) if step not in self.left)
        return next(free, steps.index(self.left[0]) if self.left[:1] and self.left[0] in steps else None)

    def may_take(self, partition: int, ready: Sequence[tuple[PlanNode, Any]]) -> bool:
        """Return True if a step may be taken now."""
        return self.position(partition, ready) is not None

    def taken(self, partition: int, node: PlanNode, iteration: Any) -> None:
        """A node was taken."""
        super().taken(partition, node, iteration)
        if (step := self._step(node, iteration)) in self.left:
            self.left.remove(step)

    @staticmethod
    def _step(node: PlanNode, iteration: Any) -> str:
        """As `Outcome.order` has it; empty for a primitive."""
        iterations = list(iteration.counters())
        return "" if node.kind != Kind.KERNEL else f"{node.source.name} {iterations or ''}".rstrip()


async def check_all_shown(program: Program, found: af.Exploration) -> None:
    """Steers runs to each outcome of a program.

    Raises:
        AssertionError: one of them had another.
    """
    graph, fetches, variables = program
    af.allow_races(*graph.resources)
    touched = [each for each in variables if each in found.outcomes[0].variables]
    for outcome in found.outcomes:
        trace = af.Trace(capacity=0)
        trace.order = steered = Steered(outcome.order)
        async with af.Session(graph, ["cpu:0"], regions=False, seed=0) as session:
            fetched = await session.run(fetches, trace=trace)
            left = await session.run(touched)
        wanted = outcome_key(outcome.fetches, {each: outcome.variables[each] for each in touched})
        given = outcome_key(fetched, dict(zip(touched, left, strict=True)))
        assert given == wanted and not steered.left, (
            f"{outcome.order} gave {fetched} and left {left}, and not {outcome.fetches}\n{af.print_graph(graph)}"
        )


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
