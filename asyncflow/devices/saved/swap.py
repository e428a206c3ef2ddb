"""Choice and time of saved values' moves out of a device's memory and back: a pure state machine (EuroSys '18 §5.3).

It starts no copy, knows no device and never waits: it is told of saves, reads and copies that have ended, and answers
which copies to start next. `asyncflow.devices.swapping` carries out its orders.

Rules, the paper's:

1. A value under 64 KiB never moves, and no buffer moves twice: a returned value stays. 2. Of a run, the oldest value
goes first, since a gradient loop reads it last; of several runs, the youngest run's values. 3. A value that *always*
moves goes once a newer one is saved. Other values go once more than 70 % of the limit are held, and only as many as
needed; values planned to stay, above 90 %. 4. Values come back in the order in which they are read, the newest first:
an iteration ahead, and only into free memory. They come back further ahead once an iteration's bytes are known, if the
times of copies and steps show that they would come late. 5. A value that is read before it has left stays where it is.
6. A loop asks before each iteration for what one takes at most, as measured. If that is not free, more values go, and
the iteration begins once there is room, or no copy out is in flight that could make some. A copy out holds the memory
of its value until it ends, even if the value is GONE by then. 7. Runs that only compute have an age. To begin an
iteration, a run leaves the older ones the memory of theirs. If it cannot, all of its values go, and it waits until they
have ended, or there is room. The oldest waits for copies alone, so that no run waits for ever. Other runs wait for no
run, and no run for them. 8. While less than half of the limit is held nothing is decided, and stores keep their saved
values to themselves.

==========  ===========================  ================================================================
state       told                         becomes
==========  ===========================  ================================================================
KEPT        (chosen)                     LEAVING: start the copy out
LEAVING     left                         AWAY: the device's buffer goes
LEAVING     wanted, or will be soon      KEPT: the copy is thrown away when it ends
LEAVING     stays (the copy failed)      KEPT
AWAY        wanted, or will be soon      COMING: start the copy in
COMING      refused (it did not start)   AWAY
COMING      came                         KEPT
any         dropped by the last holder   GONE: what is away is freed, at the end of a copy that is in flight
==========  ===========================  ================================================================

Bytes that went out come in, or are thrown away: ``moved_out == moved_in + discarded`` once all values are GONE.
"""

from __future__ import annotations

import enum
import itertools
from bisect import insort
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from operator import attrgetter
from threading import Lock
from typing import Literal, NamedTuple, TypeAlias

from asyncflow.devices.protocol import Placed
from asyncflow.devices.saved.working_set import Account, Pace, WorkingSet

LEAST_BYTES = 64 << 10
"""Smaller values never move: a copy would cost more than the memory is worth."""

SHORT = 0.70
"""Above this part of the limit, memory is short."""

LATE = 0.90
"""The same for values that were planned to stay: they go only where more is held than was predicted."""

FULL = 0.85
"""Above this part, whoever needs more waits for copies out."""

REST = 0.5
"""Up to this part values need not be told of."""

_GRAIN = 1 / 256
"""Share of the limit saved between two checks for short memory."""

_AHEAD_UP_TO = 0.75
"""Share of the memory above which values do not come back ahead of their reads: an iteration needs the rest. With a
plan that has counted that, the share is `FULL`."""

_AHEAD = 2.0
"""Factor on a copy's expected time for which a value is requested before its read."""


Moves: TypeAlias = Literal["short", "late", "always"]
"""Time at which a value moves: once memory is short, once more is held than was planned, or from the first byte."""


class Space:
    """A place where values go: the host's memory, or a file. Devices of a session share it; any thread may use it.

    Attributes:
        name: ``"host"`` or ``"disk"``.
        limit: bytes; None for no limit.
        used: bytes.
    """

    __slots__ = ("_lock", "limit", "name", "used")

    def __init__(self, name: str, limit: int | None = None) -> None:
        self.name = name
        self.limit = limit
        self.used = 0
        self._lock = Lock()

    def take(self, nbytes: int) -> bool:
        """Take `nbytes` bytes, if they are free; return True if so."""
        with self._lock:
            if self.limit is not None and self.used + nbytes > self.limit:
                return False
            self.used += nbytes
            return True

    def give(self, nbytes: int) -> None:
        """Give bytes back."""
        with self._lock:
            self.used -= nbytes


class SavedState(enum.Enum):
    """Place of a value; see the table above."""

    KEPT = enum.auto()
    LEAVING = enum.auto()
    AWAY = enum.auto()
    COMING = enum.auto()
    GONE = enum.auto()


@dataclass(slots=True, eq=False)
class SavedGroup:
    """The values of one run, in the order in which they were saved, which is the reverse of their reads.

    Attributes:
        key: of the run.
        count: how many were saved so far.
        live: how many of them are not GONE.
        newest: the last value that always moves, and has not been asked to.
        kept: values that may go once memory is short, the oldest first.
        out: values that have left, or are leaving, the newest last, whichever went first.
        short: memory is for them above this part of the limit.
        saves, reads: how fast they follow one another.
        last: the rank of the last value that each node saved.
        until: an iteration reads values of higher rank, as far as is known.
        sets: of the loops that have asked last for room for an iteration.
        largest: what any has asked for.
    """

    key: int
    count: int = 0
    live: int = 0
    newest: SavedHandle | None = None
    kept: deque[SavedHandle] = field(default_factory=deque)
    out: list[SavedHandle] = field(default_factory=list)
    short: float = SHORT
    saves: Pace = field(default_factory=Pace)
    reads: Pace = field(default_factory=Pace)
    last: dict[str, int] = field(default_factory=dict)
    until: int = 0
    sets: Sequence[WorkingSet] = ()
    largest: int = 0

    @property
    def takes(self) -> int:
        """Bytes that its iteration takes; a guess without measurement."""
        takes = 0
        for working_set in self.sets:
            takes += working_set.expected(self.largest)
        return takes

    @property
    def needs(self) -> int:
        """The same, with values that have to come back first."""
        if not self.out:
            return self.takes
        read = itertools.takewhile(lambda handle: handle.rank > self.until, reversed(self.out))
        return self.takes + sum(handle.nbytes for handle in read if handle.state is SavedState.AWAY)


@dataclass(slots=True, eq=False, repr=False)
class SavedHandle:
    """A saved value that may move.

    Attributes:
        nbytes: its size.
        label: the node that saves it.
        group: its group.
        rank: its place there.
        stride: distance in places to the value that the same node saved before: the values of one iteration.
        state: where it is; `SwapManager` alone changes it.
        holders: how many entries of stores refer to it.
        has_moved: it has left, or was about to, and never will again.
        space: where it goes or is.
        copying: a copy of it is in flight.
        here: the device's buffer, for whoever copies it.
        there: the copied value.
        error: why it cannot come back.
        tag: its iteration, where that is traced.
        is_late: True if a reader waits for it to come back.
    """

    nbytes: int
    label: str
    group: SavedGroup
    rank: int = 0
    stride: int = 1
    state: SavedState = SavedState.KEPT
    holders: int = 1
    has_moved: bool = False
    space: Space | None = None
    copying: bool = False
    here: Placed = None
    there: Placed = None
    error: BaseException | None = None
    tag: str = ""
    is_late: bool = False

    def __repr__(self) -> str:
        return f"<SavedHandle {self.label} #{self.rank} {self.state.name} {self.nbytes} B>"


_RANK = attrgetter("rank")


@dataclass(slots=True)
class _Lap:
    """The beginning of an iteration that is measured.

    Attributes:
        group: of the run.
        used, total, ahead: the account's figures then, and the bytes that had come ahead of their reads.
        taken: the most bytes that it has taken; None until it has ended, or a loop inside it has begun.
    """

    group: SavedGroup
    used: int
    total: int
    ahead: int
    taken: int | None = None


class Orders(NamedTuple):
    """Copies to start now, in this order."""

    out: Sequence[SavedHandle] = ()
    into: Sequence[SavedHandle] = ()


_NOTHING = Orders()


class SwapStatistics(NamedTuple):
    """Bytes of saved values of one device."""

    kept: int = 0
    """Bytes on the device, including leaving and coming values."""
    host: int = 0
    """Away, in the memory of the host."""
    disk: int = 0
    """Away, in a file."""
    moved_out: int = 0
    """So far, counted when a copy starts."""
    moved_in: int = 0
    discarded: int = 0
    """Moved out so far, and not needed any more."""
    coming: int = 0
    """Bytes on their way back, among the bytes on the device."""
    late: int = 0
    """Number of reads of values that were away, and had not been requested ahead."""


class SwapManager:
    """The manager of the saved values of one device of a session; see the rules above. One caller at a time.

    Attributes:
        least_bytes: smaller values never move.
        missing: bytes of the largest value that had no place to go.
        plenty: bytes up to which it need not be told of values.
        ns_per_byte: what a copy takes, as measured so far.
    """

    def __init__(
        self, account: Account, spaces: Sequence[Space], *, least_bytes: int = LEAST_BYTES, ns_per_byte: float = 0.1
    ) -> None:
        """Begin without values.

        Args:
            account: of the device.
            spaces: where values may go, the best place first.
            least_bytes: smaller values never move.
            ns_per_byte: what a copy is expected to take, until one has been measured.
        """
        self.least_bytes = least_bytes
        self.missing = 0
        self._account = account
        self._spaces = spaces
        self.plenty = inf if account.limit is None else REST * account.limit
        self._groups: dict[int, SavedGroup] = {}
        self._ages: set[int] = set()
        self._laps: dict[WorkingSet, _Lap] = {}
        self._ahead = 0
        self.ns_per_byte = ns_per_byte
        self._copied = [0, 0]
        self._on_the_way: set[SavedHandle] = set()
        self._held = {"kept": 0, "host": 0, "disk": 0}
        self._leaving = self._ending = self._coming = self._arriving = self._unasked = 0
        self._moved_out = self._moved_in = self._discarded = self._late = 0

    # -- told ----------------------------------------------------------------------------------------------------

    def saved(self, handle: SavedHandle, now_ns: int | None, *, moves: Moves = "short") -> Orders:
        """A value of at least `least_bytes` was saved, for the first time; None if that was some time ago."""
        group = handle.group
        handle.rank, group.count, group.live = group.count, group.count + 1, group.live + 1
        handle.stride = handle.rank - group.last.get(handle.label, handle.rank - 1)
        group.last[handle.label] = handle.rank
        if now_ns is not None:
            group.saves.note(now_ns, handle.rank, 1)
        group.until = handle.rank - handle.stride
        self._held["kept"] += handle.nbytes
        self._unasked += handle.nbytes
        out: list[SavedHandle] = []
        if moves == "late":
            group.short = LATE
        if moves == "always":
            before, group.newest = group.newest, handle
            if before is not None and not self._goes(before, out):
                group.kept.append(before)
        else:
            group.kept.append(handle)
        self._relieve(out)
        return Orders(out=out)

    def wanted(self, handle: SavedHandle, now_ns: int, rank: int | None = None) -> Orders:
        """A value is to be read: if it is away, it is the first to come; others that are read after it follow.

        Args:
            handle: of the value.
            now_ns: the time.
            rank: the place of the save that is read, if `again` gave one; else the value's own.
        """
        group = handle.group
        into: list[SavedHandle] = []
        rank = handle.rank if rank is None else rank
        group.reads.note(now_ns, rank, -1)
        group.until = rank - 2 * handle.stride
        self._late += handle.state is SavedState.AWAY
        if handle.state is SavedState.LEAVING:
            self._stay(handle)
        elif handle.state is SavedState.AWAY:
            self._come(handle, into)
        if group.out:
            self._fetch_ahead(group, rank - handle.stride, into)
        return Orders(into=into)

    def left(self, handle: SavedHandle, taken_ns: int | None) -> Orders:
        """A copy out has ended. If the value is AWAY now, its buffer goes; else the copy goes.

        None: it has not, but whoever uses the memory again comes after it; `took` tells the time.
        """
        self._ended(handle, taken_ns)
        if handle.state is SavedState.LEAVING:
            handle.state = SavedState.AWAY
            self._leaving -= handle.nbytes
            self._held["kept"] -= handle.nbytes
            self._hold(handle, handle.nbytes)
        else:
            self._discard(handle)
        self._has_ended(handle)
        return self.relieve()

    def took(self, nbytes: int, taken_ns: int) -> None:
        """Note the time of a copy."""
        copied = self._copied
        copied[0], copied[1] = copied[0] + nbytes, copied[1] + taken_ns
        self.ns_per_byte = copied[1] / copied[0] if copied[0] else self.ns_per_byte

    def stays(self, handle: SavedHandle) -> None:
        """A copy out has failed: the value stays where it is."""
        handle.copying = False
        if handle.state is SavedState.LEAVING:
            self._stay(handle)
        self._discard(handle)
        self._has_ended(handle)

    def came(self, handle: SavedHandle, taken_ns: int) -> None:
        """Note the end of a copy in: the memory where the value was is free."""
        self._ended(handle, taken_ns)
        self._on_the_way.discard(handle)
        self._coming -= handle.nbytes
        self._free(handle)
        if handle.state is SavedState.COMING:
            handle.state = SavedState.KEPT
            self._arriving -= handle.nbytes

    def refused(self, handle: SavedHandle) -> None:
        """A copy in could not be started: the value is AWAY as before, and comes when it is asked for again."""
        handle.state, handle.copying = SavedState.AWAY, False
        self._on_the_way.discard(handle)
        self._coming -= handle.nbytes
        self._arriving -= handle.nbytes
        self._moved_in -= handle.nbytes
        self._held["kept"] -= handle.nbytes
        self._hold(handle, handle.nbytes)
        if handle not in handle.group.out:
            insort(handle.group.out, handle, key=_RANK)

    def shared(self, handle: SavedHandle) -> None:
        """One more entry of a store refers to the value."""
        handle.holders += 1

    def again(self, handle: SavedHandle, label: str) -> int:
        """Note that node `label` saves a known value once more, and return the place of this save.

        All iterations may save one buffer, such as a matrix of weights. The gradient's first iteration reads it first,
        although it was saved before all others: its own place would say that all values are read next.
        """
        group = handle.group
        handle.holders += 1
        rank = group.count - 1
        if label == handle.label:
            handle.stride = max(1, rank - group.last[label])
            group.last[label] = rank
        return rank

    def dropped(self, handle: SavedHandle) -> bool:
        """An entry of a store refers to the value no longer; whether that was the last."""
        handle.holders -= 1
        if handle.holders:
            return False
        state, handle.state = handle.state, SavedState.GONE
        if state is SavedState.AWAY:
            self._hold(handle, -handle.nbytes)
            self._discard(handle)
        else:
            self._held["kept"] -= handle.nbytes
        if state is SavedState.LEAVING:
            self._leaving -= handle.nbytes
        if state is SavedState.COMING:
            self._arriving -= handle.nbytes
        elif handle.copying:
            self._ending += handle.nbytes
        group = handle.group
        if group.newest is handle:
            group.newest = None
        for known in (group.kept, group.out):
            while known and known[-1].state is SavedState.GONE:
                known.pop()
        group.live -= 1
        if not (group.live or group.sets) and self._groups.get(group.key) is group:
            del self._groups[group.key]
        return True

    def enters(self, key: int) -> None:
        """A run begins that only computes: it may wait for older ones, and younger ones for it."""
        self._ages.add(key)

    def knows(self, key: int) -> bool:
        """Return True if a run has an age, or has saved values or asked for room."""
        return key in self._ages or key in self._groups

    def leaves(self, key: int) -> None:
        """A run has ended."""
        self._ages.discard(key)
        self._groups.pop(key, None)

    def asks(self, key: int, sets: Sequence[WorkingSet]) -> tuple[bool, Orders]:
        """Let a run begin an iteration of these loops, or not yet; return that, and the orders that make room."""
        group = self.group(key)
        most, used = self._account.lap()
        self._measure(group, sets, most)
        group.sets = sets
        for working_set in sets:
            group.largest = max(group.largest, working_set.most)
        return self._admits(group, used)

    def _measure(self, group: SavedGroup, sets: Sequence[WorkingSet], most: int) -> None:
        """End the laps of loops that ask; where a loop inside asks, its own iterations take all that follows."""
        fed, total = self._ahead + self._account.fed, self._account.total
        for lap in self._laps.values():
            if lap.taken is None:
                lap.taken = most - lap.used - (fed - lap.ahead)
        ended = self._laps.get(sets[0]) if len(sets) == 1 else None
        if ended is not None and ended.group is group and ended.taken is not None:
            is_alone = len(self._groups) < 2 and len(self._ages) < 2
            sets[0].measured(ended.taken, total - ended.total - (fed - ended.ahead), is_alone=is_alone)
        around = {outer for each in sets for outer in each.loops_around()}
        is_placed = bool(around) or any(each.is_around for each in sets)
        for each in list(self._laps):
            if each not in around and (is_placed or not each.is_around):
                del self._laps[each]

    def has_plenty(self, takes: float = 0) -> bool:
        """Return True if much is free beside `takes` bytes; thread-safe."""
        return self._account.at_most + takes <= self.plenty

    def need_not_ask(self, key: int, sets: Sequence[WorkingSet]) -> bool:
        """Return True if a run need not ask before an iteration: it has been measured, and much is free."""
        group = self._groups.get(key)
        if group is None:
            return False
        takes: float = 0
        for working_set in sets:
            takes += working_set.most if working_set.is_measured else inf
        if not self.has_plenty(takes):
            return False
        group.sets = sets
        self._laps.clear()
        return True

    @property
    def is_empty(self) -> bool:
        """True if no value is known, here or away: then no needed copy is in flight."""
        return not any(self._held.values())

    def admits(self, key: int) -> tuple[bool, Orders]:
        """Decide again, for a run that has asked before."""
        group = self._groups.get(key)
        return (True, _NOTHING) if group is None else self._admits(group, self._account.lap()[1])

    def _admits(self, group: SavedGroup, used: int) -> tuple[bool, Orders]:
        """Return whether an iteration may begin while `used` bytes are held, as the account has just reported."""
        limit = self._account.limit
        if limit is None:
            return True, _NOTHING
        missing, elders = used + group.needs - limit, self._elders(group) if len(self._groups) > 1 else ()
        missing += sum(elder.needs for elder in elders)
        orders = _NOTHING
        if missing > 0:
            orders = Orders(out=(out := list[SavedHandle]()))
            if elders:
                self._clear(limit, (group,), out)
            else:  # for the next iteration as well, which then need not wait
                self._clear(missing + group.needs - self._to_be_free, self._youngest_first(), out)
            if self._to_be_free or elders:
                return False, orders
        if len(group.sets) == 1:
            (working_set,) = group.sets
            self._laps[working_set] = _Lap(group, used, self._account.total, self._ahead + self._account.fed)
        return True, orders

    def _elders(self, group: SavedGroup) -> list[SavedGroup]:
        """Return the older runs for which this one has to wait if memory is short."""
        ages = self._ages
        return [x for x in self._groups.values() if x.key < group.key and x.key in ages and group.key in ages]

    def relieve(self, nbytes: float | None = None) -> Orders:
        """Return orders for values that go because memory is short now, or because `nbytes` more are needed at once."""
        out: list[SavedHandle] = []
        if nbytes is None:
            self._relieve(out)
        else:
            self._clear(nbytes, self._youngest_first(), out)
        return Orders(out=out)

    # -- asked ---------------------------------------------------------------------------------------------------

    def group(self, key: int) -> SavedGroup:
        """The values that one run saves; to be asked for at each save."""
        found = self._groups.get(key)
        if found is None:
            found = self._groups[key] = SavedGroup(key)
        return found

    @property
    def is_short(self) -> bool:
        """True if code that needs more memory should wait for the copies out in flight."""
        limit = self._account.limit
        if not self._to_be_free or limit is None:
            return False
        return self._account.used > min(FULL * limit, limit - self.largest)

    @property
    def _to_be_free(self) -> int:
        """Bytes that copies out free when they end: of values that leave, or are GONE by now."""
        return self._leaving + self._ending

    @property
    def largest(self) -> int:
        """The most bytes that an iteration of a run in flight has taken."""
        return max((group.largest for group in list(self._groups.values())), default=0)

    def away(self) -> list[SavedHandle]:
        """All values that are AWAY, or COMING by copies that have not ended."""
        out = [handle for group in list(self._groups.values()) for handle in list(group.out)]
        away = [handle for handle in out if handle.state is SavedState.AWAY]
        return away + [handle for handle in list(self._on_the_way) if handle.state is SavedState.COMING]

    def statistics(self) -> SwapStatistics:
        """A snapshot."""
        return SwapStatistics(
            **self._held,
            moved_out=self._moved_out,
            moved_in=self._moved_in,
            discarded=self._discarded,
            coming=self._arriving,
            late=self._late,
        )

    def sample(self) -> tuple[int, ...]:
        """The figures of `statistics` that a `MemorySample` has; a trace asks at every launch."""
        return (*self._held.values(), self._moved_out, self._moved_in, self._arriving)

    # -- deciding ------------------------------------------------------------------------------------------------

    def _relieve(self, out: list[SavedHandle]) -> None:
        """Have the oldest of the youngest run go, and so on, until what stays is no more than may."""
        limit = self._account.limit
        if limit is None or self._unasked < limit * _GRAIN:
            return
        self._unasked = 0
        short = max((group.short for group in self._groups.values()), default=SHORT)
        self._clear(self._account.used - self._to_be_free - short * limit, self._youngest_first(), out)

    def _youngest_first(self) -> list[SavedGroup]:
        return sorted(self._groups.values(), key=lambda group: -group.key)

    def _clear(self, nbytes: float, groups: Iterable[SavedGroup], out: list[SavedHandle]) -> None:
        """Make `nbytes` of these runs go, of each the oldest values first."""
        for group in groups:
            while nbytes > 0 and group.kept:
                handle = group.kept[0]
                if handle.state is SavedState.KEPT and not handle.has_moved:
                    if not self._goes(handle, out):
                        return
                    nbytes -= handle.nbytes
                group.kept.popleft()

    def _goes(self, handle: SavedHandle, out: list[SavedHandle]) -> bool:
        """Return True if there is a place for the value; then it goes."""
        space = next((space for space in self._spaces if space.take(handle.nbytes)), None)
        if space is None:
            self.missing = max(self.missing, handle.nbytes)
            return False
        handle.state, handle.space, handle.has_moved, handle.copying = SavedState.LEAVING, space, True, True
        self._leaving += handle.nbytes
        self._moved_out += handle.nbytes
        insort(handle.group.out, handle, key=_RANK)
        out.append(handle)
        return True

    def _fetch_ahead(self, group: SavedGroup, rank: int, into: list[SavedHandle]) -> None:
        """Start copies of values that are read soon: all down to this rank, an iteration away, and values that would
        come late.
        """
        limit, step_ns = self._account.limit, group.reads.step_ns() or group.saves.step_ns()
        takes, is_measured = group.takes, all(each.is_measured for each in group.sets)
        free = inf
        if limit is not None:
            most = min((FULL if group.short > SHORT else _AHEAD_UP_TO) * limit, limit - takes)
            free = most - self._account.used - sum(x.nbytes for x in into)
        while group.out:
            handle = group.out[-1]
            if handle.state in (SavedState.AWAY, SavedState.LEAVING):
                is_away, is_further = handle.state is SavedState.AWAY, handle.rank < rank
                needs_ns = (self._coming + _AHEAD * handle.nbytes) * self.ns_per_byte
                is_early = step_ns is not None and (rank - handle.rank) * step_ns > needs_ns
                if is_further and (is_early or not is_measured):
                    return
                # This iteration may end with more than it began with, and the next needs its room beside that.
                room = free - (takes if is_further else 0) + (0 if is_away else self._leaving)
                if room < handle.nbytes:
                    return
                if is_away:
                    self._come(handle, into)
                    free -= handle.nbytes
                    if is_further:
                        self._ahead += handle.nbytes
                else:
                    self._stay(handle)
            group.out.pop()

    def _come(self, handle: SavedHandle, into: list[SavedHandle]) -> None:
        handle.state, handle.copying = SavedState.COMING, True
        self._on_the_way.add(handle)
        self._hold(handle, -handle.nbytes)
        self._held["kept"] += handle.nbytes
        self._coming += handle.nbytes
        self._arriving += handle.nbytes
        self._moved_in += handle.nbytes
        into.append(handle)

    def _stay(self, handle: SavedHandle) -> None:
        handle.state = SavedState.KEPT
        self._leaving -= handle.nbytes

    # -- counting ------------------------------------------------------------------------------------------------

    def _ended(self, handle: SavedHandle, taken_ns: int | None) -> None:
        handle.copying = False
        if taken_ns is not None:
            self.took(handle.nbytes, taken_ns)

    def _has_ended(self, handle: SavedHandle) -> None:
        """Note that a copy out has ended: it held the memory of a value that is GONE."""
        if handle.state is SavedState.GONE:
            self._ending -= handle.nbytes

    def _hold(self, handle: SavedHandle, nbytes: int) -> None:
        assert handle.space is not None
        self._held[handle.space.name] += nbytes

    def _discard(self, handle: SavedHandle) -> None:
        self._discarded += handle.nbytes
        self._free(handle)

    def _free(self, handle: SavedHandle) -> None:
        assert handle.space is not None
        handle.space.give(handle.nbytes)
        handle.space = None
