"""The order of steps of the pools, shared vertex maps and batches of a session: a pure state machine.

Each is a *stepper*. Its *rank* is the lowest number of priority among its members, its *place* the device that makes
its steps; a CPU has room for several long ones. A stepper that is alone, or of one rank with all others, begins without
asking: each makes a step, or a launch, before any makes its next one.

======== ============================================================== ===============================================
event    state                                                          action
======== ============================================================== ===============================================
`come`                                                                  it has work, until it has `gone`
`ask`    steppers of lower ranks, with others that make a step there,   it begins
         leave room in its place
`ask`    else, but its rank is owed a step there, and makes none there  it begins
`ask`    else                                                           it waits, and `next` says when it begins
`ended`  it made a step                                                 its rank is owed the next one there 8 times as
                                                                        long as it took after it was owed this one
======== ============================================================== ===============================================

A rank that is not the lowest has an eighth of the time, or an equal part where more than eight ask; where steps of
others are longer, it has one step between two of each. The lowest waits for no more than the others' shares, or a step
of each. Of waiting steppers of a rank, the most overdue goes first: a step is due a second after it was asked for, or
at the first deadline of its members. A stepper that was there until a moment ago counts as there (`LINGER_NS`), as
clients whose calls have ended ask again.

A `PriorityLine` would not do for the waiting steppers. The rank of a stepper changes while it waits, as members come
and leave. Shares are of the time in each place, where several steps may run at once. A rank is owed its share although
none of its steppers waits. Their tasks do stand at a `Gate` (`StepWaits`).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from math import inf
from typing import Protocol

from asyncflow.runtime.lines.shares import PATIENCE_S, share_of

LINGER_NS = 1_000_000
"""Time for which a stepper counts as there after it has gone or made a step (1 ms)."""

_AWAY_NS = 8 * LINGER_NS
"""A rank that is away for longer is owed nothing for that time."""


class Present(Protocol):
    """A stepper that may have work.

    Attributes:
        rank: the lowest number of priority among its members; infinity without members.
        place: the device that makes its steps; None before it is known.
        is_stepping: True while it makes a step that the machine knows of.
    """

    place: Hashable
    is_stepping: bool

    @property
    def rank(self) -> float:
        """See above."""


@dataclass(slots=True, eq=False)
class Stepper:
    """A pool, vertex map or batch in the turns of the session.

    Attributes:
        rank: see `Present`, as are others.
        room: number of steps that its place makes at a time.
        is_in_line: True if steps are made there one after another, and wait for each other.
        deadline_ns: the first deadline of its members.
        began_ns: when its step began.
        together: number of steppers, itself included, that wait for each other.
        owed_ns: since when it was owed that.
        due_ns: when the step that it waits for is due.
        is_behind: True if it makes a step because that was due, and others would go before it.
    """

    rank: float = inf
    place: Hashable = None
    room: int = 1
    is_in_line: bool = False
    deadline_ns: float = inf
    is_stepping: bool = False
    began_ns: int = 0
    together: int = 1
    owed_ns: float = 0.0
    due_ns: float = inf
    is_behind: bool = False


class StepTurns:
    """The steppers of one session."""

    def __init__(self) -> None:
        self.is_contended = False
        """True if a stepper has to ask before it begins."""
        self._has_ranks = False
        self._rank: float | None = None
        """Rank of the first stepper since there was none; until another rank comes, no stepper has to ask."""
        self._present: dict[Present, None] = {}
        self._waiting: dict[Stepper, None] = {}
        self._owed_ns: dict[tuple[float, Hashable], float] = {}
        """Times at which a rank is next owed a step in a place, however many others are there."""
        self._ended_ns: dict[tuple[float, Hashable], int] = {}
        """Times at which a rank made its last step in a place."""

    def come(self, stepper: Present, rank: float) -> None:
        """Note that a stepper has work of a rank, or more than before."""
        self._present[stepper] = None
        if self._rank is None:
            self._rank = rank
        elif rank != self._rank:
            self._has_ranks = True
        self.is_contended = self._has_ranks and len(self._present) > 1

    def gone(self, stepper: Stepper, now_ns: int) -> None:
        """Note that a stepper has no work any more."""
        self.ended(stepper, now_ns)
        self._present.pop(stepper, None)
        self._waiting.pop(stepper, None)
        if not self._present:
            self._rank, self._has_ranks = None, False
        self.is_contended = self._has_ranks and len(self._present) > 1

    def ask(self, stepper: Stepper, now_ns: int) -> bool:
        """Return whether a stepper makes a step now; if not, it waits."""
        assert not stepper.is_stepping, "it asks for a step while it makes one"
        # A missed deadline does not make a stepper more urgent than others.
        stepper.due_ns = min(max(stepper.deadline_ns, now_ns), now_ns + PATIENCE_S * 1e9)
        self._forget(now_ns)
        self._waiting[stepper] = None
        return self._begins(stepper, now_ns)

    def ended(self, stepper: Stepper, now_ns: int) -> None:
        """Note that a stepper has made a step, if it asked for it."""
        if stepper.is_stepping:
            taken_ns = (now_ns - stepper.began_ns) / max(stepper.together, self._together(stepper))
            stepper.is_stepping = stepper.is_behind = False
            self.took(stepper.rank, stepper.place, taken_ns, stepper.owed_ns, now_ns)

    def took(self, rank: float, place: Hashable, taken_ns: float, owed_ns: float, now_ns: int) -> None:
        """A step of that rank has ended, which took so long, and was owed since then."""
        ranks = {other.rank for other in self._present if other.place == place and other.rank < inf}
        self._owed_ns[rank, place] = owed_ns + taken_ns / share_of(len(ranks | {rank}))
        self._ended_ns[rank, place] = now_ns

    def next(self, now_ns: int) -> list[Stepper]:
        """Return the waiting steppers that now make a step."""
        waiting = sorted(self._waiting, key=lambda each: (each.rank, each.due_ns))
        return [stepper for stepper in waiting if self._begins(stepper, now_ns)]

    def wake_ns(self, now_ns: int) -> float:
        """Return when a waiting stepper may begin, whatever the others do; infinity if that is with the end of a
        step.
        """
        held = (self.held_until_ns(each, each.rank, each.place, each.room, now_ns) for each in self._waiting)
        return min(held, default=inf)

    def held_until_ns(self, one: Present, rank: float, place: Hashable, room: int, now_ns: int) -> float:
        """Return until when a step of that rank waits, if the others stay as they are; minus infinity if none go before
        it.

        Args:
            one: the stepper; it is not held up by itself.
            rank: of the step.
            place: where it is to be computed.
            room: number of steps that the place makes at a time.
            now_ns: the time.
        """
        others = [other for other in self._present if other is not one and other.place == place]
        above = sum(other.rank < rank for other in others)
        left_ns = -inf
        if not above:
            lower = (ended for (other, where), ended in self._ended_ns.items() if other < rank and where == place)
            left_ns = max(lower, default=-inf) + LINGER_NS
            if left_ns <= now_ns:
                return -inf
            above = 1
        if above + sum(other.is_stepping and other.rank >= rank for other in others) < room:
            return -inf
        owed_ns = self._owed_ns.get((rank, place), 0.0)
        if any(other.is_stepping and other.rank == rank for other in others):
            owed_ns = inf
        return owed_ns if left_ns == -inf else min(owed_ns, left_ns)

    def _begins(self, stepper: Stepper, now_ns: int) -> bool:
        until_ns = self.held_until_ns(stepper, stepper.rank, stepper.place, stepper.room, now_ns)
        if until_ns <= now_ns:
            del self._waiting[stepper]
            stepper.is_stepping, stepper.is_behind, stepper.began_ns = True, until_ns > -inf, now_ns
            stepper.together = self._together(stepper)
            owed_ns = self._owed_ns.get((stepper.rank, stepper.place), now_ns)
            stepper.owed_ns = owed_ns if stepper.is_behind and owed_ns < now_ns else now_ns
        return stepper.is_stepping

    def _together(self, stepper: Stepper) -> int:
        """Return the number of steppers that wait for each other's steps, itself included."""
        if not stepper.is_in_line:
            return 1
        return sum(each.is_stepping for each in self._present if each.place == stepper.place)

    def _forget(self, now_ns: int) -> None:
        """Drop the claims of ranks that were away."""
        waiting = {(each.rank, each.place) for each in self._waiting}
        for key in [key for key, ended_ns in self._ended_ns.items() if ended_ns + _AWAY_NS < now_ns]:
            if key not in waiting and self._owed_ns[key] <= now_ns:
                del self._ended_ns[key], self._owed_ns[key]
