"""Moments at which a session's state is that between runs, although some are in flight.

A run that writes several variables is *half way* while it is in flight: some may be written, and others not yet. A cut
is taken as soon as no run is half way; runs do not wait for it, and it costs one reference per variable. A run that
waits for a cut itself, at a node that all its writes are ordered with, is not half way.

Runs may overlap so that one is always half way. Then the runs in flight when the cut was asked for end first, and new
runs that use the same variables wait: for `HOLD_S` at most. If that was not enough, the next wait is four times as
long, after as many more runs have ended. No run is held up for good: a run in flight may wait for a run that is held
up, in a way that the session cannot see.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from asyncflow.runtime.gates.atomic import AtomicRuns
from asyncflow.runtime.lines.gate import Gate
from asyncflow.runtime.run.run import Run
from asyncflow.streams.holding import RunPart, current_part, enclosing_parts

HOLD_S: Final = 0.001
"""Time for which runs are held up at first, where no moment for the cut comes by itself."""

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _CutWaiter(Generic[T]):
    """A cut that a caller waits for.

    Attributes:
        act: takes the cut.
        rests: the run that waits for the cut.
        before: runs that were in flight when the cut was asked for.
        taken: what `act` returned, once it was called.
    """

    act: Callable[[], T]
    rests: RunPart | None
    before: set[Run] = field(default_factory=set)
    taken: list[T] = field(default_factory=list)


class Cuts:
    """The cuts that are waited for in a session; belongs to the thread of its event loop.

    Attributes:
        waiting: waiting cuts, admitted when they are taken, or all runs that they waited for have ended.
    """

    __slots__ = ("_atomic", "_in_flight", "waiting")

    def __init__(self, in_flight: Collection[Run], atomic: AtomicRuns) -> None:
        self.waiting = Gate[_CutWaiter[object]]()
        self._in_flight = in_flight
        self._atomic = atomic

    async def take(self, act: Callable[[], T], *, in_order: bool = False) -> T:
        """Return the result of `act`, called when no run is half way.

        Args:
            act: called once, on the event loop; it does not wait.
            in_order: all writes of the run that asks are done, or wait until it goes on.

        Raises:
            RuntimeError: the run that asks is half way, and would wait for itself.
        """
        if not in_order:
            self._refuse_half_way()
        cut = _CutWaiter(act, current_part() if in_order else None)
        with self.waiting.stand(cut) as waiter:  # type: ignore[arg-type]  # what it gives is for this caller alone
            self._look()
            hold_s = HOLD_S
            while not cut.taken:
                cut.before = self._half_way()
                waiter.forget()  # other runs may have ended while new runs were held up
                await waiter.wait()
                if not cut.taken and not in_order:
                    await self._hold(hold_s)
                    hold_s *= 4
        return cut.taken[0]

    def on_end(self, run: Run) -> None:
        """A run has ended, and cuts are waited for."""
        self._look()
        for cut in self.waiting:
            cut.before.discard(run)
            if not cut.before:
                self.waiting.admit(cut)

    def _half_way(self) -> set[Run]:
        resting = {cut.rests for cut in self.waiting}
        return {run for run in self._in_flight if len(run.survey.writes) > 1 and run.part not in resting}

    def _look(self) -> None:
        if not self._half_way():
            for cut in self.waiting:
                if not cut.taken:
                    cut.taken.append(cut.act())
                    self.waiting.admit(cut)

    async def _hold(self, seconds: float) -> None:
        half_way = self._half_way()
        try:
            async with asyncio.timeout(seconds):
                states = frozenset().union(*(run.survey.states for run in half_way))
                claim = await self._atomic.claim(states, frozenset(), half_way)
        except TimeoutError:
            return
        try:
            self._look()
        finally:
            self._atomic.leave(claim)

    def _refuse_half_way(self) -> None:
        within = enclosing_parts()
        for run in self._in_flight if within else ():
            if len(run.survey.writes) > 1 and run.part in within:
                raise RuntimeError(
                    "the state cannot be saved inside a run that writes several variables: it may have written only "
                    "some of them; save between runs, or put saver.maybe_save(step) into the graph, which orders it "
                    "with the run's writes"
                )
