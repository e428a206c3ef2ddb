"""Choice and time of saved values' moves out of a device's memory and back: a pure state machine (EuroSys '18 §5.3).

It starts no copy, knows no device and never waits: it is told of saves, reads and copies that have ended, and answers
which copies to start next. `asyncflow.devices.swapping` carries out its orders. Whether an iteration may begin is the
matter of `asyncflow.devices.saved.memory_gate`, which asks for values to go.

Rules, the paper's:

1. A value under 64 KiB never moves, and no buffer moves twice: a returned value stays.
2. Of a run, the oldest value goes first, since a gradient loop reads it last; of several runs, the youngest run's.
3. Values that *always* move form sets, up to `TOGETHER` bytes and a share of the limit. A set goes once a newer value
   does not fit in. A copy of eight small values takes a card's host less than half the time of eight copies. Other
   values go one by one once more than 70 % of the limit are held, and only as many as needed; values planned to stay,
   above 90 %.
4. Values come back in the order in which they are read, the newest first: an iteration ahead, and only into free
   memory. They come back further ahead once an iteration's bytes are known, if the times of copies and steps show that
   they would come late.
5. A value that is read before it has left stays where it is.
6. A copy out holds the memory of its value until it ends, even if the value is GONE by then.
7. Values that left together come back together, to one buffer. If there is no room for that beside an iteration, the
   newest of them come first, as many as have room.

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
any         dropped by the last holder   GONE: its place is freed, at the end of a copy that is in flight
==========  ===========================  ================================================================

Bytes that went out come in, or are thrown away: ``moved_out == moved_in + discarded`` once all values are GONE.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence
from math import inf
from operator import attrgetter
from typing import Literal, NamedTuple, TypeAlias

from asyncflow.devices.saved.memory_gate import MemoryGate
from asyncflow.devices.saved.saved_handle import SHORT, SavedGroup, SavedHandle, SavedState, SavedValue, Space
from asyncflow.devices.saved.working_set import Account

LEAST_BYTES = 64 << 10
"""Smaller values never move: a copy would cost more than the memory is worth."""

LATE = 0.90
"""Share of the limit above which values planned to stay go, too: more is held than the plan predicted."""

FULL = 0.85
"""Above this part, whoever needs more waits for copies out."""

TOGETHER = 8 << 20
"""Most bytes that move by one copy, unless one value has more: by PCIe that takes some times what the host takes."""

_TOGETHER_SHARE = 0.15
"""The same as a share of the limit. Each of two loops side by side has a set that leaves, or comes, and another that is
saved or read. With 0.3 these did not fit, and copies took 3 % less of the time."""

_GRAIN = 1 / 256
"""Share of the limit saved between two checks for short memory."""

_AHEAD_UP_TO = 0.75
"""Share of the memory above which values do not come back ahead of their reads: an iteration needs the rest. With a
plan that has counted that, the share is `FULL`."""

_AHEAD = 2.0
"""Factor on a copy's expected time for which a value is requested before its read."""


Moves: TypeAlias = Literal["short", "late", "always"]
"""Time at which a value moves: once memory is short, once more is held than was planned, or from the first byte."""


_RANK = attrgetter("rank")


class Orders(NamedTuple):
    """Copies to start now, in this order."""

    out: Sequence[SavedHandle] = ()
    into: Sequence[SavedHandle] = ()


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


class SavedMoves:
    """The moves of the saved values of one device of a session; see the rules above. One caller at a time.

    An example: ten iterations save a value of 1 MiB each, under a limit of 10 MiB. A copy takes as long as two of them.

    - Values 0 to 6 stay. With value 7, 8 MiB are held, more than 70 %, and value 0 is ordered out. It counts as free
      from now on: else each save would order one more out until the copy has ended. Values 8 and 9 order out 1 and 2.
    - The gradient reads 9, 8 and 7. Then value 2 would have to come back in time, but has not left yet: it stays, and
      its copy is thrown away.
    - While 6 is read, 1 and 0 are ordered in: 1 is read in four iterations, twice the time of its copy (`_AHEAD`). They
      are back when they are read. Else `wanted` would order them, and `SwapStatistics.late` would count them.

    Attributes:
        least_bytes: smaller values never move.
        together: most bytes of several values that move by one copy.
        missing: bytes of the largest value that had no place to go.
        ns_per_byte: what a copy takes, as measured so far.
    """

    def __init__(
        self, account: Account, gate: MemoryGate, spaces: Sequence[Space], *, ns_per_byte: float, together: int = 0
    ) -> None:
        """Begin without values, which may go to `spaces`, the best place first, and at most `together` bytes at a time.

        Without a limit they go one by one: no less is held if many leave later.

        Values that come back leave runs the memory that `gate` has promised them.
        """
        self.least_bytes = LEAST_BYTES
        self.together = min(together, int(_TOGETHER_SHARE * (account.limit or 0)))
        self.missing = 0
        self.ns_per_byte = ns_per_byte
        self._account = account
        self._gate = gate
        self._spaces = spaces
        self._groups: dict[int, SavedGroup] = {}
        self._copied = [0, 0]
        self._on_the_way: set[SavedHandle] = set()
        self._held = {"kept": 0, "host": 0, "disk": 0}
        self._leaving = self._ending = self._coming = self._arriving = self._unasked = 0
        self._moved_out = self._moved_in = self._discarded = self._late = 0

    # -- events --------------------------------------------------------------------------------------------------

    def saved(self, handle: SavedHandle, now_ns: int | None, *, moves: Moves = "short") -> Orders:
        """The values of a handle were saved, for the first time; None if that was some time ago."""
        group, last, newest = handle.group, handle.group.last, handle.values[-1]
        group.live += 1
        last.update([(value.label, value.rank) for value in handle.values[:-1]])
        handle.label = handle.values[0].label
        handle.rank = rank = newest.rank
        handle.stride = max(1, rank - last.get(newest.label, rank - 1))  # a buffer may be saved again meanwhile
        last[newest.label] = rank
        # The next iteration that reads begins with newer values than the set's.
        group.until = rank - (handle.stride if handle.values[0] is newest else 0)
        handle.live = len(handle.values)
        handle.nbytes = nbytes = sum([value.nbytes for value in handle.values])
        self._held["kept"] += nbytes
        self._unasked += nbytes
        if now_ns is not None:  # values of stores at rest arrive all at once, which shows no pace
            group.saves.note(now_ns, handle.rank, 1)
        out: list[SavedHandle] = []
        if moves == "late":
            group.short = LATE
        if moves == "always":
            before, group.newest = group.newest, handle
            if before is not None and not self._goes(before, out):
                group.kept.append(before)  # there may be room elsewhere later, once memory is short
        else:
            group.kept.append(handle)
        self._relieve(out)
        return Orders(out=out)

    def adds(self, handle: SavedHandle, nbytes: int, label: str, before: int = 0) -> SavedValue:
        """Add a value of at least `least_bytes` to a handle that `saved` will be told of.

        Args:
            handle: the value's.
            nbytes: its size.
            label: the node that saves it.
            before: how many older values have no place yet.
        """
        group = handle.group
        rank = group.count
        group.count = rank + (not before)
        value = SavedValue(handle, nbytes, label, rank + before)
        handle.values.append(value)
        return value

    def set_of(self, group: SavedGroup) -> SavedHandle:
        """Return the handle that further values of a run move with: that of its newest ones, or a new one."""
        newest, group.newest = group.newest, None
        if newest is None:
            return SavedHandle("", group)
        self._unasked -= newest.nbytes
        self._held["kept"] -= newest.nbytes
        group.live -= 1
        return newest

    def newest_goes(self, run: int) -> Orders:
        """Order out the newest values of a run that always move: a set of them is full."""
        out: list[SavedHandle] = []
        group = self.group(run)
        newest, group.newest = group.newest, None
        if newest is not None and not self._goes(newest, out):
            group.kept.append(newest)
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
        group.until = rank - 2 * handle.stride  # this iteration's reads, and the next one's
        self._late += handle.state is SavedState.AWAY
        if handle.state is SavedState.LEAVING:
            self._stay(handle)  # copies cannot be withdrawn: this copy is discarded at its end
        elif handle.state is SavedState.AWAY:
            self._come(handle, into)
            if len(handle.values) > 1 and not self._gate.in_pieces:
                self._gate.ahead += handle.nbytes  # the iteration is owed them, and does not take them each time
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
        else:  # the value was read or dropped meanwhile
            self._discard(handle)
        self._has_ended(handle)
        out: list[SavedHandle] = []
        self._relieve(out)
        return Orders(out=out)

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
        self._moved_in -= handle.nbytes  # it never started
        self._held["kept"] -= handle.nbytes
        self._hold(handle, handle.nbytes)
        if handle not in handle.group.out:
            insort(handle.group.out, handle, key=_RANK)

    def split(self, handle: SavedHandle, newest: list[SavedValue]) -> SavedHandle:
        """Take the newest of the values that are AWAY together apart from the others; return their own handle."""
        group = handle.group
        others = [value for value in handle.held if value not in newest]
        group.out.remove(handle)
        dropped = handle.nbytes - sum(value.nbytes for value in (*others, *newest))
        self._hold(handle, -dropped)
        self._discarded += dropped
        _space(handle).give(dropped)
        first = newest[0]
        own = SavedHandle(
            first.label, group, sum(value.nbytes for value in newest), newest, rank=handle.rank, stride=handle.stride,
            state=SavedState.AWAY, has_moved=True, space=handle.space, tag=handle.tag,
        )  # fmt: skip
        for value in newest:
            value.handle = own
        own.live, handle.live, group.live = len(newest), len(others), group.live + 1
        handle.values, handle.rank = others, others[-1].rank
        handle.nbytes = sum(value.nbytes for value in others)
        for each in (handle, own):
            insort(group.out, each, key=_RANK)
        return own

    def shared(self, value: SavedValue) -> None:
        """One more entry of a store refers to the value."""
        value.holders += 1

    def again(self, value: SavedValue, label: str) -> int:
        """Note that node `label` saves a known value once more, and return the place of this save.

        All iterations may save one buffer, such as a matrix of weights. The gradient's first iteration reads it first,
        although it was saved before all others: its own place would say that all values are read next.
        """
        handle = value.handle
        group = handle.group
        value.holders += 1
        rank = group.count - 1
        if label == value.label:
            handle.stride = max(1, rank - group.last.get(label, rank))  # none yet while its set is reported
            group.last[label] = rank
        return rank

    def dropped(self, value: SavedValue) -> bool:
        """An entry of a store refers to a value no longer; return True if no store refers to any of the handle's."""
        value.holders -= 1
        if value.holders:
            return False
        handle = value.handle
        handle.live -= 1
        if handle.live:
            if not handle.has_moved:  # its own memory is free now
                handle.values.remove(value)
                handle.nbytes -= value.nbytes
                self._held["kept"] -= value.nbytes
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
        # Gradients read the newest value first, so values usually end at the right of these queues. Values that end
        # elsewhere are skipped later.
        for known in (group.kept, group.out):
            while known and known[-1].state is SavedState.GONE:
                known.pop()
        group.live -= 1
        # A run with promised memory has more iterations, for which the pace and the order of its values stay valid.
        if not (group.live or self._gate.has_promised(group.key)) and self._groups.get(group.key) is group:
            del self._groups[group.key]
        return True

    def has_saved(self, run: int) -> bool:
        """Return True if a run has saved values here."""
        return run in self._groups

    def leaves(self, run: int) -> None:
        """A run has ended."""
        self._groups.pop(run, None)

    @property
    def is_empty(self) -> bool:
        """True if no value is known, here or away: then no needed copy is in flight."""
        return not any(self._held.values())

    def clear(self, nbytes: float, run: int | None = None) -> Orders:
        """Return orders for values that go because `nbytes` more are needed: of one run, or of the youngest first."""
        out: list[SavedHandle] = []
        self._clear(nbytes, self._youngest_first() if run is None else [self.group(run)], out)
        return Orders(out=out)

    # -- queries -------------------------------------------------------------------------------------------------

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
        if not (self._leaving or self._ending) or limit is None:
            return False
        return self._account.used > min(FULL * limit, limit - self._gate.largest)

    def room(self, run: int) -> float:
        """Return the bytes that are free besides an iteration of a run."""
        limit = self._account.limit
        return inf if limit is None else limit - self._account.used - self._gate.promised(run)

    @property
    def to_be_free(self) -> int:
        """Bytes that copies out free when they end: of values that leave, or are GONE by now."""
        return self._leaving + self._ending

    def owed(self, run: int) -> int:
        """Return the bytes of a run's values that its next iteration reads, and that are away."""
        group = self._groups.get(run)
        return 0 if group is None else group.owed

    def away(self) -> list[SavedHandle]:
        """All values that are AWAY, or COMING by copies that have not ended."""
        # Copy each collection: the caller that finds the device lost does not hold the lock, and another thread may.
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
            return  # too slow for each value: the account takes its lock, and groups are sorted
        self._unasked = 0
        short = max((group.short for group in self._groups.values()), default=SHORT)
        self._clear(self._account.used - self.to_be_free - short * limit, self._youngest_first(), out)

    def _youngest_first(self) -> list[SavedGroup]:
        return sorted(self._groups.values(), key=lambda group: -group.key)

    def _clear(self, nbytes: float, groups: Iterable[SavedGroup], out: list[SavedHandle]) -> None:
        """Make `nbytes` of these runs go, of each the oldest values first."""
        for group in groups:
            while nbytes > 0 and group.kept:
                handle = group.kept[0]
                # A value that came back stays: otherwise a value that is read late would move back and forth.
                if handle.state is SavedState.KEPT and not handle.has_moved:
                    if not self._goes(handle, out):
                        return
                    nbytes -= handle.nbytes
                group.kept.popleft()
            # The newest value by itself is read first: its copy would end too late to free anything.
            newest = group.newest
            if nbytes > 0 and newest is not None and len(newest.values) > 1:
                group.newest = None
                if not self._goes(newest, out):
                    group.kept.append(newest)
                    return
                nbytes -= newest.nbytes

    def _goes(self, handle: SavedHandle, out: list[SavedHandle]) -> bool:
        """Return True if there is a place for the value; then it goes."""
        space = next((space for space in self._spaces if space.take(handle.nbytes)), None)
        if space is None:
            self.missing = max(self.missing, handle.nbytes)
            return False
        handle.state, handle.space, handle.has_moved, handle.copying = SavedState.LEAVING, space, True, True
        self._leaving += handle.nbytes
        self._moved_out += handle.nbytes
        insort(handle.group.out, handle, key=_RANK)  # sorted: a newer value that always moves may have left earlier
        out.append(handle)
        return True

    def _fetch_ahead(self, group: SavedGroup, rank: int, into: list[SavedHandle]) -> None:
        """Start copies of values that are read soon: all down to this rank, an iteration away, and values that would
        come late.
        """
        limit, step_ns = self._account.limit, group.reads.step_ns() or group.saves.step_ns()
        takes, is_measured = self._gate.promised(group.key), self._gate.is_measured(group.key)
        free = inf
        if limit is not None:
            most = min((FULL if group.short > SHORT else _AHEAD_UP_TO) * limit, limit - takes)
            free = most - self._account.used - sum(x.nbytes for x in into)
        while group.out:
            handle = group.out[-1]
            if handle.state in (SavedState.AWAY, SavedState.LEAVING):
                is_away, is_further = handle.state is SavedState.AWAY, handle.rank < rank
                # Copies in run one after the other: this copy waits for all earlier ones.
                needs_ns = (self._coming + _AHEAD * handle.nbytes) * self.ns_per_byte
                is_early = step_ns is not None and (rank - handle.rank) * step_ns > needs_ns
                # Before an iteration is measured its bytes are a guess, which values from further ahead might exceed.
                if is_further and (is_early or not is_measured):
                    return
                # An iteration may end with more bytes than it began with, and the next one needs its room in addition.
                # A handle with several values brings more than the next iteration reads.
                room = free - (takes if is_further or handle.live > 1 else 0) + (0 if is_away else self._leaving)
                if room < handle.nbytes:
                    return
                if is_away:
                    self._come(handle, into)
                    free -= handle.nbytes
                    if is_further:
                        self._gate.ahead += handle.nbytes
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
        self._held[_space(handle).name] += nbytes

    def _discard(self, handle: SavedHandle) -> None:
        self._discarded += handle.nbytes
        self._free(handle)

    def _free(self, handle: SavedHandle) -> None:
        _space(handle).give(handle.nbytes)
        handle.space = None


def _space(handle: SavedHandle) -> Space:
    assert handle.space is not None
    return handle.space
