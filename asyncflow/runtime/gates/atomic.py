"""Runs with `atomic=True`: each is one step for all other runs of the session that touch the same states.

Such a run claims its states when it is asked for. It *begins* when the runs in flight that touch them have ended. Rules
for other runs that are asked for until it has ended:

========================================================  ==========================================================
touches nothing that is claimed                           starts
is part of the run that has the claim                     starts: it is part of that step
else                                                      waits until the claim is given up
and the claiming run waits for a run around this one,
which it does before it has begun                         goes before it
and they wait for each other, and both have begun         is refused: `RuntimeError`
is atomic itself, part of a run that touches its states
and has not claimed them                                  is refused, as it would wait for that one
========================================================  ==========================================================

A run that is part of no other waits for claims in the order in which they were made. No run in flight waits for it.
Only a run that is part of another can close a circle: the outer run holds up others while the inner one waits. The last
run of a circle to wait finds it. If a claim in the circle has not begun, the run that waits for it goes before it; else
no run of the circle could go on.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass, field

from asyncflow.runtime.lines.gate import Gate, Waiter
from asyncflow.runtime.run.run import Run
from asyncflow.streams.holding import RunPart


@dataclass(slots=True, eq=False)
class Claim:
    """The states that an atomic run has claimed for itself.

    Attributes:
        states: keys of the states.
        within: the runs of which the claiming run is part.
        before: runs in flight for which the claim waits; empty once it has begun.
        alone: admitted when `before` is empty.
        part: the run, once it has started.
    """

    states: frozenset[Hashable]
    within: frozenset[RunPart]
    before: set[Run]
    alone: Waiter = field(default_factory=Waiter)
    part: RunPart | None = None


@dataclass(slots=True, eq=False)
class _HeldUp:
    """A run that has not started: it touches `states`, and is part of `within`."""

    states: Collection[Hashable]
    within: frozenset[RunPart]


class AtomicRuns:
    """The claims of a session's atomic runs, and the runs that wait for them. Runs ask here only while there is a
    claim.
    """

    __slots__ = ("_waiters", "claims")

    def __init__(self) -> None:
        self.claims: list[Claim] = []
        self._waiters = Gate[_HeldUp]()

    def holds_up(self, states: Collection[Hashable]) -> bool:
        """Return whether a run that touches `states`, and is part of no other, has to wait."""
        return any(not claim.states.isdisjoint(states) for claim in self.claims)

    async def wait(self, states: Collection[Hashable], within: frozenset[RunPart]) -> None:
        """Returns when a run that touches `states` and is part of `within` may start, if it starts at once.

        Raises:
            RuntimeError: it would wait for ever.
        """
        run = _HeldUp(states, within)
        if not self._ahead(run):
            return
        with self._waiters.stand(run) as waiter:
            if within:
                self._wake()  # recheck: a deadlock is possible now
            while ahead := self._ahead(run):
                if within and any(not claim.before and self._waits_for(claim, within, True) for claim in ahead):
                    raise RuntimeError(
                        "this run and an atomic one would wait for each other for ever: each is part of a run that has "
                        "begun and has variables that the other needs; let both outer runs use one variable in common, "
                        "so that one of them "
                        "waits for the other before it begins"
                    )
                await waiter.wait()

    async def claim(self, states: frozenset[Hashable], within: frozenset[RunPart], in_flight: Collection[Run]) -> Claim:
        """Returns when no other run that touches `states` is in flight; call `leave` when this one has ended.

        Raises:
            RuntimeError: it would wait for ever.
        """
        if within:
            self._check_outer(states, within, in_flight)
        await self.wait(states, within)
        before = {run for run in in_flight if run.part not in within and not run.survey.states.isdisjoint(states)}
        claim = Claim(states, within, before)
        self.claims.append(claim)
        try:
            self._wake()
            if claim.before and within and self._waits_for(claim, within, True):
                raise RuntimeError(
                    "this atomic run and a run in flight would wait for each other for ever: the other run uses a "
                    "variable that this one needs, and a run inside it waits for an enclosing run of this one; let "
                    "both outer runs use one variable in common, so that one of "
                    "them waits for the other before it begins"
                )
            if claim.before:
                await claim.alone.wait()
        except BaseException:
            self.leave(claim)
            raise
        return claim

    def leave(self, claim: Claim) -> None:
        """The run has ended, or will not start."""
        self.claims.remove(claim)
        self._wake()

    def on_start(self, run: Run) -> None:
        """Note that a run starts. A run that goes before a claim is waited for like runs in flight when the claim
        was made.
        """
        for claim in self.claims:
            if claim.before and not claim.states.isdisjoint(run.survey.states):
                claim.before.add(run)

    def on_end(self, run: Run) -> None:
        """A run has ended."""
        for claim in self.claims:
            claim.before.discard(run)
            if not claim.before:
                claim.alone.admit()

    def _check_outer(self, states: frozenset[Hashable], within: frozenset[RunPart], in_flight: Iterable[Run]) -> None:
        own = frozenset[object]().union(*(claim.states for claim in self.claims if claim.part in within))
        if any(run.part in within and not (run.survey.states & states) <= own for run in in_flight):
            raise RuntimeError(
                "atomic=True for a run that another asks for, which uses the same variables and is not atomic: this "
                "one would wait for the run it is part of; make that one atomic"
            )

    def _wake(self) -> None:
        for run in self._waiters:
            if not self._ahead(run):
                self._waiters.admit(run)

    def _conflicts(self, run: _HeldUp) -> list[Claim]:
        """Return the claims of other runs on the waiter's states."""
        return [c for c in self.claims if c.part not in run.within and not c.states.isdisjoint(run.states)]

    def _ahead(self, run: _HeldUp) -> list[Claim]:
        """Return the claims for which the run waits. Claims that wait for a run it is part of are left out, while that
        is avoidable.
        """
        within = run.within
        claims = self._conflicts(run)
        return [c for c in claims if not (c.before and within and self._waits_for(c, within, False))]

    def _waits_for(self, claim: Claim, parts: frozenset[RunPart], is_final: bool) -> bool:
        """Return whether a claim is kept until one of the runs `parts` has ended.

        Args:
            claim: the claim.
            parts: runs.
            is_final: count a waiting run only if it cannot go before the claim.
        """
        seen = {claim}
        stack = [claim]
        while stack:
            claim = stack.pop()
            runs: set[RunPart | None] = {run.part for run in claim.before} or {claim.part}
            if not runs.isdisjoint(parts):
                return True
            found = [other for other in self.claims if other.before and not runs.isdisjoint(other.within)]
            for held_up in self._waiters:
                if not runs.isdisjoint(held_up.within):
                    found += [other for other in self._conflicts(held_up) if not (is_final and other.before)]
            stack += set(found) - seen
            seen.update(found)
        return False
