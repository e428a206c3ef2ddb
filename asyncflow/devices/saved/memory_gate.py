"""The gate in front of the iterations of loops while a device's memory is short: which may begin, and which wait.

A loop asks before each iteration for the most that one takes, as `WorkingSet` has measured it. The gate knows the
promise to each run, the age of runs that only compute, and the launchers that wait. It moves no value: `Room` is asked
to let values go, and tells how many bytes copies under way will free.

Rules:

1. While less than half of the limit is held, nothing is decided, and a loop that has been measured need not even ask.
2. If the bytes for an iteration are not free, values go. The iteration begins once there is room, or no copy out is
   under way that could make some: then it fails by itself, with its own numbers.
3. To begin an iteration, a run leaves the older runs the memory of theirs. If it cannot, all of its own values go, and
   it waits until the older runs have ended, or there is room. The oldest waits for copies alone, so that no run waits
   for ever.
4. Only runs with an age wait for runs. A run with effects, or within a kernel of another run, may be the very run that
   an older one waits for.

Without a `Room` nothing can go, so that all may begin. The gate then measures iterations, as on a CPU without a file.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple, Protocol

from asyncflow.devices.saved.working_set import Account, WorkingSet

REST = 0.5
"""Share of the limit up to which nothing is decided: a limit that is never reached costs no more than counting."""


class Room(Protocol):
    """The saved values of a device, which may leave it."""

    @property
    def to_be_free(self) -> int:
        """Bytes that copies out will free when they end."""

    @property
    def is_held_up(self) -> bool:
        """True if launching has to pause whatever is launched."""

    def owed(self, run: int) -> int:
        """Return the bytes of a run's values that its next iteration reads, and that are away."""

    def free(self, nbytes: float, run: int | None = None, *, with_sets: bool = True) -> None:
        """Let values go until `nbytes` are to be free: of one run, or of all of them, the youngest first.

        Values that move together go before there are enough of them only `with_sets`.
        """


class _Pause(NamedTuple):
    """A launcher that waits for memory."""

    run: int | None
    """The run, if it has asked for room for an iteration."""
    resume: Callable[[], None]
    loop: AbstractEventLoop


@dataclass(slots=True)
class _Promise:
    """The memory that a run was promised for its next iteration.

    Attributes:
        run: its number.
        sets: of the loops that asked last.
        largest: the most bytes that an iteration of any of its loops has taken.
    """

    run: int
    sets: Sequence[WorkingSet] = ()
    largest: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes that the iteration takes; a guess without measurement."""
        nbytes = 0
        for working_set in self.sets:
            nbytes += working_set.expected(self.largest)
        return nbytes


@dataclass(slots=True)
class _Lap:
    """The beginning of an iteration that is measured.

    Attributes:
        run: its number.
        used, total, ahead: the account's figures then, and the bytes that had come ahead of their reads.
        taken: the most bytes that it has taken; None until it has ended, or a loop inside it has begun.
    """

    run: int
    used: int
    total: int
    ahead: int
    taken: int | None = None


class MemoryGate:
    """Leave for iterations to begin, on one device of a session; see the rules above. One caller at a time.

    Attributes:
        room: the values that can go; None if values never move.
        ahead: bytes of values that have come back ahead of their reads, so that no iteration has taken them.
        in_pieces: True if free memory may be in pieces: an iteration then needs room for a set of values besides.
        plenty: bytes up to which nothing is decided.
        paused: launchers that wait for memory.
    """

    def __init__(self, account: Account, room: Room | None = None) -> None:
        self.room = room
        self.ahead = 0
        self.in_pieces = False
        self.plenty = inf if account.limit is None else REST * account.limit
        self._account = account
        self._promises: dict[int, _Promise] = {}
        self._ages: set[int] = set()
        self._laps: dict[WorkingSet, _Lap] = {}
        self.paused: list[_Pause] = []

    # -- runs ----------------------------------------------------------------------------------------------------

    def enters(self, run: int) -> None:
        """A run begins that only computes: it may wait for older ones, and younger ones for it."""
        self._ages.add(run)

    def leaves(self, run: int) -> None:
        """A run has ended."""
        self._ages.discard(run)
        self._promises.pop(run, None)

    def knows(self, run: int) -> bool:
        """Return True if a run has an age, or was promised memory."""
        return run in self._ages or run in self._promises

    def has_promised(self, run: int) -> bool:
        """Return True if a run has asked for memory."""
        return run in self._promises

    def promised(self, run: int) -> int:
        """Return the bytes that an iteration of a run takes, as far as known; 0 if it has not asked."""
        promise = self._promises.get(run)
        return 0 if promise is None else promise.nbytes

    def is_measured(self, run: int) -> bool:
        """Return True if the bytes promised to a run are no guess."""
        promise = self._promises.get(run)
        return promise is None or all(working_set.is_measured for working_set in promise.sets)

    @property
    def largest(self) -> int:
        """The most bytes that an iteration of a run in flight has taken."""
        return max((promise.largest for promise in list(self._promises.values())), default=0)

    # -- iterations ----------------------------------------------------------------------------------------------

    def has_plenty(self, takes: float = 0) -> bool:
        """Return True if much is free besides `takes` bytes; any thread may ask."""
        return self._account.at_most + takes <= self.plenty

    def need_not_ask(self, run: int, sets: Sequence[WorkingSet]) -> bool:
        """Return True if an iteration may begin without `asks`: it has been measured, and much is free."""
        promise = self._promises.get(run)
        if promise is None:
            return False
        takes: float = 0
        for working_set in sets:
            takes += working_set.most if working_set.is_measured else inf
        if not self.has_plenty(takes):
            return False
        promise.sets = sets
        self._laps.clear()  # unless each iteration asks, the time between two calls is no iteration
        return True

    def asks(self, run: int, sets: Sequence[WorkingSet]) -> bool:
        """Return True if a run may begin an iteration of these loops now; else it asks `admits` later."""
        promise = self._promises.get(run)
        if promise is None:
            promise = self._promises[run] = _Promise(run)
        # One call for both figures, since it takes the account's lock to settle freed buffers.
        most, used = self._account.lap()
        self._measure(run, sets, most)
        promise.sets = sets
        for working_set in sets:
            promise.largest = max(promise.largest, working_set.most)
        return self._admits(promise, used)

    def admits(self, run: int) -> bool:
        """Return True if a run that has asked may begin now."""
        promise = self._promises.get(run)
        return promise is None or self._admits(promise, self._account.lap()[1])

    def _admits(self, promise: _Promise, used: int) -> bool:
        """Return True if an iteration may begin while `used` bytes are held."""
        limit, room = self._account.limit, self.room
        if limit is None:
            return True
        needs = self._needs(promise)
        elders = self._elders(promise.run) if len(self._promises) > 1 else ()
        missing = used + needs - limit + sum(map(self._needs, elders))
        if missing > 0 and room is not None:
            if elders:  # free all its values: an older run must never wait for a younger one
                room.free(limit, promise.run)
            else:  # free enough for the next iteration, too, so that it need not wait
                leaving = room.to_be_free
                room.free(missing + needs - leaving, with_sets=missing > leaving and self.is_measured(promise.run))
            if room.to_be_free or elders:
                return False
        if len(promise.sets) == 1:
            (working_set,) = promise.sets
            self._laps[working_set] = _Lap(promise.run, used, self._account.total, self.ahead + self._account.fed)
        return True

    def _needs(self, promise: _Promise) -> int:
        return promise.nbytes + (0 if self.room is None else self.room.owed(promise.run))

    def _elders(self, run: int) -> list[_Promise]:
        """Return the promises to older runs for which this one has to wait while memory is short."""
        if run not in self._ages:
            return []
        return [promise for elder, promise in self._promises.items() if elder < run and elder in self._ages]

    def _measure(self, run: int, sets: Sequence[WorkingSet], most: int) -> None:
        """End the laps of loops that ask. If a loop inside another asks, the following bytes are its own."""
        fed, total = self.ahead + self._account.fed, self._account.total
        for lap in self._laps.values():
            if lap.taken is None:
                lap.taken = most - lap.used - (fed - lap.ahead)
        ended = self._laps.get(sets[0]) if len(sets) == 1 else None
        if ended is not None and ended.run == run and ended.taken is not None:
            is_alone = len(self._promises) < 2 and len(self._ages) < 2
            sets[0].measured(ended.taken, total - ended.total - (fed - ended.ahead), is_alone=is_alone)
        around = {outer for each in sets for outer in each.loops_around()}
        is_placed = bool(around) or any(each.is_around for each in sets)
        for each in list(self._laps):
            if each not in around and (is_placed or not each.is_around):
                del self._laps[each]

    # -- pauses --------------------------------------------------------------------------------------------------

    def pause(self, resume: Callable[[], None], loop: AbstractEventLoop, run: int | None = None) -> None:
        """Have `loop` call ``resume()`` once a run may begin its iteration; None: once launching is not held up."""
        self.paused.append(_Pause(run, resume, loop))

    def look_again(self) -> None:
        """Resume the launchers that may go on, the oldest run first: it waits for no other."""
        paused, self.paused = sorted(self.paused, key=lambda pause: pause.run or 0), []
        for pause in paused:
            if not self.may_go_on(pause.run):
                self.paused.append(pause)
            elif not pause.loop.is_closed():
                pause.loop.call_soon_threadsafe(pause.resume)

    def may_go_on(self, run: int | None) -> bool:
        """Return True if a run may begin its iteration; None: if launching is not held up."""
        if run is not None:
            return self.admits(run)
        return self.room is None or not self.room.is_held_up
