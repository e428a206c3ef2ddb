"""The mover of saved values as stores and runs see it (`Swapping`), the base class of the devices' movers.

A store of saved values that may move (`asyncflow.autodiff.stores.stores.MovingLog`) calls `keep`, `take` and `release`;
it holds a `SavedEntry` in place of a value. As long as much is free it keeps its values as they are (`is_at_rest`).
When less is, or on request, all stores hand over their values, in the order in which these were saved.

If values are valid in the order of a stream, `take` returns a COMING one, and its user waits for its event. If values
must be present (`waits`), `take` waits, and `must_wait` says so before, for callers that cannot.
"""

from __future__ import annotations

import weakref
from asyncio import AbstractEventLoop
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field
from math import inf
from threading import Lock
from typing import Protocol, SupportsIndex, TypeAlias

from asyncflow.devices.memory import MemoryAccount, MemoryLimitExceeded, format_bytes
from asyncflow.devices.saved.mover import Mover
from asyncflow.devices.saved.saved_handle import (
    SavedEntry,
    SavedGroup,
    SavedHandle,
    SavedState,
    SavedValue,
    Space,
    SwapCopy,
)
from asyncflow.devices.saved.swap import Moves, SwapStatistics
from asyncflow.devices.saved.working_set import WorkingSet
from asyncflow.devices.values import Placed
from asyncflow.values import Value


class RestingLog(Protocol):
    """A store whose values have not been reported yet.

    Attributes:
        source: the run, and the loop in which they are saved.
        label: the node that saves them.
        together: bytes of its values that move by one copy.
        lock: held while entries change.
        reference: to the store, by which it may die.
    """

    source: tuple[int, str]
    label: str
    together: float
    lock: Lock
    reference: weakref.ref[RestingLog]

    def __len__(self) -> int: ...

    def tag(self, index: int) -> str:
        """The iteration that saved value `index`, if the run is traced."""

    def __getitem__(self, index: SupportsIndex, /) -> Value: ...

    def __setitem__(self, index: SupportsIndex, value: Value, /) -> None: ...

    def hand_over(self, index: int) -> None:
        """Put an entry in the place of value `index`, if it is there."""


@dataclass(slots=True, eq=False)
class _GatheredSet:
    """Values of one run that stores keep themselves until there are enough to move together.

    Attributes:
        group: of the run.
        room: bytes of further values that may move with them.
        saves: of each the store, its number there, and the stream that made it.
    """

    group: SavedGroup
    room: float
    saves: list[tuple[weakref.ref[RestingLog], int, object]] = field(default_factory=list)


_Values: TypeAlias = defaultdict[int, Counter[str]]
"""Number of values of each label, by run."""


def _names(values: Counter[str]) -> str:
    """Format as ``12 values (9 of while/body/tanh, 3 of while/body/x)``."""
    return f"{values.total()} values ({', '.join(f'{count} of {label}' for label, count in sorted(values.items()))})"


def memory_sample(account: MemoryAccount, swapping: Swapping | None) -> tuple[int, ...]:
    """The figures that a `MemorySample` has of a device with these now."""
    return (account.used,) if swapping is None else swapping.sample()


class Swapping(Mover):
    """A mover of saved values of one device of a session. All threads may call it; it never blocks but where it
    `waits`.

    Attributes:
        start_ns: expected nanoseconds that starting a copy takes the thread that launches kernels.
        part_ns: the same for one more value in a copy.
        has_file: True if a value may be in a file, whose reads no stream can wait for: launching waits instead.
        is_at_rest: True while stores keep their values themselves, and none of these is away.
    """

    has_file = False
    start_ns = 0.0
    part_ns = 0.0

    def __init__(self, account: MemoryAccount, spaces: Sequence[Space], *, ns_per_byte: float) -> None:
        super().__init__(account, spaces, ns_per_byte=ns_per_byte)
        self.is_at_rest = True
        # By identity, and weak: a store that is dropped takes its values with it, and there is nothing to move.
        self._resting: dict[int, weakref.ref[RestingLog]] = {}
        self._gathered: dict[int, _GatheredSet] = {}
        # By run, once the device is lost: saved values lost with it, and saved values that were away.
        self._gone: tuple[_Values, _Values] = (defaultdict(Counter), defaultdict(Counter))

    @property
    def room(self) -> float:
        """Bytes that are free where values go; infinity for no limit."""
        return sum(inf if space.limit is None else space.limit - space.used for space in self.spaces)

    # -- for stores ----------------------------------------------------------------------------------------------

    def keep(self, value: Value, label: str, run: int, *, moves: Moves, tag: str = "") -> Value:
        """Take a value that is saved, or leave it to the store: gives what that is to hold.

        Args:
            value: as kernels have it, of at least `SavedMoves.least_bytes`.
            label: the node that saves it.
            run: which it belongs to.
            moves: when it does.
            tag: the iteration, if the run is traced.
        """
        with self._lock:
            if self.is_at_rest:
                self._wake()
            while self.waits and self.moves.is_short:
                self._wait()
            entry = self.entry(value, label, run, self.now_ns(), moves=moves, tag=tag)
        if self._released:
            self._settle()
        return entry

    def entry(self, value: Value, label: str, run: int, now_ns: int | None, *, moves: Moves, tag: str) -> Value:
        """The result of `keep` for a value saved now, or some time ago (None); under the lock."""
        gathered = self._gathered.get(run)
        before = 0 if gathered is None else len(gathered.saves)  # saved earlier, and without a place yet
        handle = SavedHandle(label, self.moves.group(run), tag=tag)
        entry = self._added(handle, value, label, self.writer(), before)
        if handle.values:
            self._start(self.moves.saved(handle, now_ns, moves=moves))
        return entry

    def _added(self, handle: SavedHandle, value: Value, label: str, writer: object, before: int = 0) -> Value:
        """Add a value to a handle; return its entry, or the value itself if it may not move."""
        found = self.movable(value, writer)
        if found is None:
            return value
        owner, buffer, view = found
        known = self._known.get(id(owner))
        if known is not None and (known.value.holders or known.value.handle.has_moved):
            # A value that came back is saved again by the loop that reads it.
            again = known.value
            return SavedEntry(again, view, self.moves.again(again, label)) if again.holders else value
        saved = self.moves.adds(handle, getattr(value, "nbytes", 0), label, before)
        saved.here = buffer
        self.is_in(saved, owner)
        return SavedEntry(saved, view, saved.rank)

    def gathers(self, log: RestingLog, value: Value) -> bool:
        """Return True if the store may keep one more value itself, until there are enough to move together."""
        nbytes = getattr(value, "nbytes", 0)
        if not self.moves.least_bytes <= nbytes <= log.together:
            return False
        gathered = self._gathered.get(log.source[0])
        if gathered is None or gathered.room < nbytes:
            gathered = self._gather_anew(log, nbytes)
        gathered.room -= nbytes
        gathered.saves.append((log.reference, len(log), self.writer()))
        return True

    def _gather_anew(self, log: RestingLog, nbytes: int) -> _GatheredSet:
        """Have the values that a run has gathered go if no more of them would move together; begin with none."""
        run = log.source[0]
        with self._locked():
            if self.is_at_rest:
                self._wake()
            self.hand_over(run)
            # Several saves may be of one buffer, or have been read: then further values have room.
            group, space = self.moves.group(run), self.spaces[0]
            if group.newest is not None and group.newest.nbytes + nbytes > log.together:
                self._start(self.moves.newest_goes(run))
            room = log.together - (0 if group.newest is None else group.newest.nbytes)
            group.live += 1
            # A set that is larger than the space would not leave at all.
            gathered = _GatheredSet(group, room if space.limit is None else min(room, space.limit - space.used))
            self._gathered[run] = gathered
        return gathered

    def hand_over(self, run: int | None = None, *, least: int = 1) -> None:
        """See `Mover`: each run's are a set."""
        for each in [*self._gathered] if run is None else [run]:
            gathered = self._gathered.get(each)
            if gathered is not None and len(gathered.saves) >= least:
                del self._gathered[each]
                gathered.group.live -= 1
                self._report(gathered)

    def _report(self, gathered: _GatheredSet) -> None:
        handle = self.moves.set_of(gathered.group)
        for reference, index, writer in gathered.saves:
            log = reference()
            if log is None:
                continue
            with log.lock:
                value = log[index] if index < len(log) else None  # the value was read, or the store ended
                if value is not None and type(value) is not SavedEntry:
                    log[index] = self._added(handle, value, log.label, writer)
        if self._copies and not handle.tag:
            first = gathered.saves[0]
            log = first[0]()
            handle.tag = "" if log is None else log.tag(first[1])
        if handle.values:
            self._start(self.moves.saved(handle, self.now_ns(), moves="always"))

    def rests(self, log: RestingLog) -> bool:
        """Return True if a store may keep one more value unreported; under its lock."""
        if not (self.is_at_rest and self.account.at_most <= self.gate.plenty):
            return False
        if id(log) not in self._resting:
            self._resting[id(log)] = log.reference
        return True

    def begin(self) -> None:
        """Note that a store begins: let stores keep their values if no value is known and no trace asks for moves."""
        if not (self.is_at_rest or self._copies) and self.moves.is_empty:
            with self._locked():
                self.is_at_rest = self.moves.is_empty

    def _wake(self) -> None:
        """Make stores hand over their values, an iteration's together; under the lock."""
        self.is_at_rest = False
        resting, self._resting = self._resting, {}
        logs = [log for reference in list(resting.values()) if (log := reference()) is not None]
        # By iteration and not by store, as a gradient reads the values of one iteration together.
        first: dict[tuple[int, str], int] = {}
        for number, log in enumerate(logs):
            first.setdefault(log.source, number)
        for _, index, number in sorted((first[x.source], k, n) for n, x in enumerate(logs) for k in range(len(x))):
            logs[number].hand_over(index)

    def take(self, entry: SavedEntry, *, is_last: bool) -> Value:
        """The value, for the last time or not; where this `waits`, once it is there.

        Raises:
            BaseException: why it cannot come back.
        """
        value = entry.value
        handle = value.handle
        if is_last and handle.block is not None and value not in handle.asks:
            # The value stays in place. The handle's last value, which does not come here, takes the lock for all.
            self._released.append(entry)
            return entry.view(handle.block, value.start)
        with self._lock:
            try:
                was_away = value.handle.state is SavedState.AWAY
                self._want(value, entry.rank)
                handle = value.handle
                handle.is_late = handle.state is SavedState.COMING and self.comes_late(handle, was_away=was_away)
                while self.waits and handle.state is SavedState.COMING and handle.error is None:
                    self._wait()
                if handle.error is not None:
                    raise copy(handle.error)  # a copy: its traceback refers to the store, and so to the handle, a cycle
                buffer, start = (value.here, 0) if handle.block is None else (handle.block, value.start)
            finally:
                if is_last:  # the store has dropped it already
                    self._drop(value)
                self._tell()
        if self._released:
            self._settle()
        return entry.view(buffer, start)

    def _want(self, value: SavedValue, rank: int) -> None:
        """Bring back a value for its reader, and the values beside it in the copy, as far as there is room."""
        handle = value.handle
        if handle.state is SavedState.AWAY and handle.live > 1:
            room = self.moves.room(handle.group.key)
            if room < handle.nbytes:  # take memory that only waits for other streams, in their order
                self.take_over(handle.nbytes - room)
                room = self.moves.room(handle.group.key)
            if room < handle.nbytes and self._fit(value, room):
                handle = value.handle
        orders = self.moves.wanted(handle, self.now_ns(), rank)
        if not orders.into:
            return
        try:
            self._start(orders, handle)
        except MemoryLimitExceeded:
            if not self._fit(value, 0):
                raise
            self._start(self.moves.wanted(value.handle, self.now_ns(), rank), value.handle)

    def release(self, log: object, entries: Iterable[object]) -> None:
        """End a store with these entries; takes no lock."""
        self._resting.pop(id(log), None)
        self._released.extend(entry for entry in entries if type(entry) is SavedEntry)
        self._settle()

    def share(self, entries: Iterable[object]) -> None:
        """A copy of a store holds these entries, too."""
        with self._locked():
            for entry in entries:
                if type(entry) is SavedEntry:
                    self.moves.shared(entry.value)

    def must_wait(self, store: Placed, number: int | None = None) -> bool:
        """Return True if value `number` of a store, or room for one more, is missing and a copy will bring it."""
        if number is None:
            return self.moves.is_short
        entry = store.log[number]
        if type(entry) is not SavedEntry:
            return False
        state = entry.value.handle.state
        if self.waits:
            return state is SavedState.AWAY or state is SavedState.COMING
        return state is SavedState.AWAY and self.moves.is_short

    # -- for runs ------------------------------------------------------------------------------------------------

    def enter(self, run: int) -> None:
        """A run begins that only computes, and may wait for older ones."""
        self.gate.enters(run)

    def leave(self, run: int) -> None:
        """Note the end of a run: it waits no more, and no run waits for it."""
        if self.gate.knows(run) or self.moves.has_saved(run):
            with self._locked():
                self.gate.leaves(run)
                self.moves.leaves(run)
                self._gathered.pop(run, None)
        self._copies.pop(run, None)

    def watch(self, run: int) -> list[SwapCopy]:
        """Return a list that collects the copies of a run's values here as they end, until the run has ended."""
        self.wake()
        return self._copies.setdefault(run, [])

    def wake(self) -> None:
        """Make stores hand over all values that they keep to themselves."""
        with self._locked():
            self._wake()
            self.hand_over()

    def is_watched(self, run: int) -> bool:
        """Return True if the run is watched."""
        return run in self._copies

    def device_is_lost(self) -> None:
        """Note which values are lost, and which are away; takes no lock, since the caller may hold it."""
        gone, away = self._gone
        for log in [log for reference in list(self._resting.values()) if (log := reference()) is not None]:
            gone[log.source[0]][log.label] += len(log)
        for gathered in list(self._gathered.values()):
            for reference, index, *_ in list(gathered.saves):
                log = reference()
                if log is not None and index < len(log) and log[index] is not None:
                    gone[log.source[0]][log.label] += 1
        here = SavedState.KEPT, SavedState.LEAVING
        known = {owner.value.handle for owner in list(self._known.values())}
        for places, handles in ((gone, (x for x in known if x.state in here)), (away, self.moves.away())):
            for handle in handles:
                places[handle.group.key].update(value.label for value in handle.held)

    def tell_loss(self, error: BaseException, run: int) -> None:
        """Add notes to the error of a lost device: the run's saved values that are lost with it, and the surviving
        ones.
        """
        gone, away = self._gone
        if run in gone:
            error.add_note(f"lost with {self.account.device}: {_names(gone[run])}")
        if run in away:
            error.add_note(f"away from it, and so not lost: {_names(away[run])}")

    def lacks(self, run: int, *sets: WorkingSet) -> bool:
        """Return True if a run must pause before an iteration of these loops."""
        if self.is_at_rest and self.gate.need_not_ask(run, sets):
            return False
        with self._lock:
            self._drop_released()  # these may make room for the iteration
            if self.is_at_rest and not self.gate.has_plenty(sum(each.expected(0) for each in sets)):
                self._wake()
            return not self.gate.asks(run, sets)

    def throttle(self, resume: Callable[[], None], loop: AbstractEventLoop, run: int | None = None) -> bool:
        """Return True if launching must pause; later, `loop` calls ``resume()``.

        Args:
            resume: goes on.
            loop: the event loop.
            run: a run that `lacks` memory, and waits for it; None to wait until there is some, or no copy out is in
                flight.
        """
        if run is None and not self.is_held_up:
            return False
        with self._locked():  # `pause` checks again whether it must wait
            self.gate.pause(resume, loop, run)
        return True

    # -- as a whole ----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Release all waiting code."""
        with self._locked():
            self._is_closed = True

    def statistics(self) -> SwapStatistics:
        """A snapshot."""
        with self._locked():
            self._wake()
            self.hand_over()
            return self.moves.statistics()

    def advice(self) -> str:
        """Say what an iteration takes, and why more did not move, for the error that says that memory is short."""
        missing, largest = self.moves.missing, self.gate.largest
        advice = [f"an iteration of a loop took up to {format_bytes(largest)} of it"] if largest else []
        if missing:
            full = " and ".join(f"the {space.name} has {format_bytes(space.limit or 0)}" for space in self.spaces)
            advice.append(
                f"a saved value of {format_bytes(missing)} had no place to go ({full}, all in use); raise "
                "host_memory_limit=, or give spill_directory="
            )
        return "; ".join(advice)
