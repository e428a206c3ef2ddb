"""The mover of saved values on one device: base class of the devices' movers, each with a `SwapManager`.

A store of saved values that may move (`asyncflow.autodiff.stores.stores.MovingLog`) calls `keep`, `take` and `release`;
it holds a `SavedEntry` in place of a value. A kind of device says which values can move (`movable`), and starts copies
(`send`, `bring`). At their ends `sent`, `not_sent`, `brought` or `not_brought` is called, on any thread.

As long as much is free a store keeps its values as they are (`is_at_rest`). When less is, or on request, all stores
hand over their values, in the order in which these were saved.

If values are valid in the order of a stream, `take` returns a COMING one, and its user waits for its event. If values
must be present (`waits`), `take` waits, and `must_wait` says so before, for callers that cannot.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from asyncio import AbstractEventLoop
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from math import inf
from threading import Condition, Lock
from typing import NamedTuple, Protocol, TypeAlias

from asyncflow.devices.memory import MemoryAccount, MemoryLimitExceeded, format_bytes
from asyncflow.devices.protocol import Placed
from asyncflow.devices.saved.swap import (
    LEAST_BYTES,
    Moves,
    Orders,
    SavedHandle,
    SavedState,
    Space,
    SwapManager,
    SwapStatistics,
)
from asyncflow.devices.saved.working_set import WorkingSet
from asyncflow.errors import SessionClosedError
from asyncflow.values import Value


class RestingLog(Protocol):
    """A store whose values have not been reported yet.

    Attributes:
        source: the run, and the loop in which they are saved.
        label: the node that saves them.
    """

    source: tuple[int, str]
    label: str

    def __len__(self) -> int: ...

    def hand_over(self, index: int) -> None:
        """Put an entry in the place of value `index`, if it is there."""


class Movable(NamedTuple):
    """A value that a device can move."""

    owner: object
    """Sole owner of the value's memory, as its identity; it can be referred to weakly."""
    buffer: object
    """Object that the device copies: the owner, or another one."""
    view: Callable[[Placed], Value] | None
    """Gives the value for a buffer that has come back; None where it is the buffer."""


_Values: TypeAlias = defaultdict[int, Counter[str]]
"""Number of values of each label, by run."""


class SavedEntry:
    """An entry of a store in place of a value that may move.

    Attributes:
        handle: of the value, which several entries may share.
        nbytes: its size.
        view: gives the value for a buffer that has come back; None where it is the buffer.
        rank: place of this save among the run's saves.
    """

    __slots__ = ("handle", "nbytes", "rank", "view")

    def __init__(self, handle: SavedHandle, nbytes: int, view: Callable[[Placed], Value] | None, rank: int) -> None:
        self.handle = handle
        self.nbytes = nbytes
        self.view = view
        self.rank = rank


class SwapCopy(NamedTuple):
    """A copy of a saved value, for timelines; times are the trace's."""

    label: str
    """Node that saved the value."""
    tag: str
    """The iteration that did."""
    stream: str
    """``d2h`` or ``h2d``."""
    started_ns: int
    ended_ns: int
    nbytes: int
    is_late: bool
    """True if a reader waited for it."""
    memory: tuple[int, ...]
    """Bytes at its end, see `memory_sample`."""


class _Pause(NamedTuple):
    """A launcher that waits for memory."""

    run: int | None
    """The run, if it has asked for room for an iteration."""
    resume: Callable[[], None]
    loop: AbstractEventLoop


class _Owner(weakref.ref[object]):
    """A weak reference to the owner of a value's memory, as the value's identity."""

    __slots__ = ("handle", "key")

    handle: SavedHandle
    key: int


def _names(values: Counter[str]) -> str:
    """Format as ``12 values (9 of while/body/tanh, 3 of while/body/x)``."""
    return f"{values.total()} values ({', '.join(f'{count} of {label}' for label, count in sorted(values.items()))})"


def _forget(known: dict[int, _Owner], reference: weakref.ref[object]) -> None:
    assert isinstance(reference, _Owner)
    if known.get(reference.key) is reference:
        del known[reference.key]


def memory_sample(account: MemoryAccount, swapping: Swapping | None) -> tuple[int, ...]:
    """The figures that a `MemorySample` has of a device with these now."""
    return (account.used,) if swapping is None else swapping.sample()


class Swapping(ABC):
    """A mover of saved values of one device of a session. All threads may call it; it never blocks but where it
    `waits`.

    Attributes:
        account: of the device.
        manager: decides; only to be asked under the lock.
        spaces: where values may go.
        waits: True if `take` waits until the value is present.
        start_ns: the time that a copy is expected to take whoever launches kernels.
        has_file: True if streams wait for all values except those that must be read from a file first.
        is_at_rest: stores keep their values, and no value of theirs is away.
    """

    waits = False
    has_file = False
    start_ns = 0.0

    def __init__(
        self,
        account: MemoryAccount,
        spaces: Sequence[Space],
        *,
        least_bytes: int = LEAST_BYTES,
        ns_per_byte: float = 0.1,
    ) -> None:
        self.account = account
        self.manager = SwapManager(account, spaces, least_bytes=least_bytes, ns_per_byte=ns_per_byte)
        self.spaces = spaces
        # By what owns their memory, as long as that is alive: a value may have left while others still use it here.
        self._known: dict[int, _Owner] = {}
        self._dies = partial(_forget, self._known)  # which keeps that alive, and nothing else
        self.is_at_rest = True
        self._resting: dict[int, weakref.ref[RestingLog]] = {}
        # Stores let go of values wherever they are collected, maybe while this thread holds the lock.
        self._released: deque[SavedEntry] = deque()
        self._lock = Lock()
        self._changed = Condition(self._lock)
        self._waiting = 0
        self._is_closed = False
        self._paused: list[_Pause] = []
        self._moves: dict[int, list[SwapCopy]] = {}
        # By run, once the device is lost: saved values that are gone with it, and those that were away.
        self._gone: tuple[_Values, _Values] = (defaultdict(Counter), defaultdict(Counter))

    @property
    def ns_per_byte(self) -> float:
        """The time of a copy, out or back: as measured, or before that as expected."""
        return self.manager.ns_per_byte

    @property
    def room(self) -> float:
        """Bytes that are free where values go; infinity for no limit."""
        return sum(inf if space.limit is None else space.limit - space.used for space in self.spaces)

    # -- for stores ----------------------------------------------------------------------------------------------

    def keep(self, value: Value, label: str, run: int, *, moves: Moves, tag: str = "") -> Value:
        """Take a value that is saved, or leave it to the store: gives what that is to hold.

        Args:
            value: as kernels have it.
            label: the node that saves it.
            run: which it belongs to.
            moves: when it does.
            tag: the iteration, if the run is traced.
        """
        if getattr(value, "nbytes", 0) < self.manager.least_bytes:
            return value
        with self._lock:
            if self.is_at_rest:
                self._wake()
            while self.waits and self.manager.is_short:
                self._wait()
            entry = self.entry(value, label, run, self.now_ns(), moves=moves, tag=tag)
        if self._released:
            self._settle()
        return entry

    def entry(self, value: Value, label: str, run: int, now_ns: int | None, *, moves: Moves, tag: str) -> Value:
        """The result of `keep` for a value saved now, or some time ago (None); under the lock."""
        manager = self.manager
        nbytes: int = getattr(value, "nbytes", 0)
        found = self.movable(value) if nbytes >= manager.least_bytes else None
        if found is None:
            return value
        known = self._known.get(id(found.owner))
        handle = None if known is None else known.handle
        if handle is not None and handle.state is not SavedState.GONE:
            rank = manager.again(handle, label)
        elif handle is not None and handle.has_moved:  # it was read, and is saved again by the loop that reads it
            return value
        else:
            handle = SavedHandle(nbytes, label, manager.group(run), tag=tag)
            self.arrives(handle, found.owner, found.buffer)
            self._start(manager.saved(handle, now_ns, moves=moves))
            rank = handle.rank
        return SavedEntry(handle, nbytes, found.view, rank)

    def rests(self, log: RestingLog) -> bool:
        """Return True if a store may keep one more value unreported; under its lock."""
        if not (self.is_at_rest and self.account.at_most <= self.manager.plenty):
            return False
        if id(log) not in self._resting:
            self._resting[id(log)] = weakref.ref(log)
        return True

    def begin(self) -> None:
        """A store begins: rest, if nothing else is known, nor asked for by traces."""
        if not (self.is_at_rest or self._moves) and self.manager.is_empty:
            with self._locked():
                self.is_at_rest = self.manager.is_empty

    def _wake(self) -> None:
        """Make stores hand over their values, an iteration's together; under the lock."""
        self.is_at_rest = False
        resting, self._resting = self._resting, {}
        logs = [log for reference in list(resting.values()) if (log := reference()) is not None]
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
        handle = entry.handle
        with self._lock:
            try:
                self._start(self.manager.wanted(handle, self.now_ns(), entry.rank), handle)
                handle.is_late = handle.state is SavedState.COMING and self.comes_late(handle)
                while self.waits and handle.state is SavedState.COMING and handle.error is None:
                    self._wait()
                if handle.error is not None:
                    raise copy(handle.error)  # its traceback will lead to the store, and so to the handle: no cycle
                buffer = handle.here
            finally:
                if is_last:  # the store has let go of it already
                    self._drop(handle)
                self._tell()
        if self._released:
            self._settle()
        return buffer if entry.view is None else entry.view(buffer)

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
                    self.manager.shared(entry.handle)

    def must_wait(self, store: Placed, number: int | None = None) -> bool:
        """Return True if value `number` of a store, or room for one more, is missing and a copy will bring it."""
        if number is None:
            return self.manager.is_short
        entry = store.log[number]
        if type(entry) is not SavedEntry:
            return False
        state = entry.handle.state
        if self.waits:
            return state is SavedState.AWAY or state is SavedState.COMING
        return state is SavedState.AWAY and self.manager.is_short

    # -- for runs ------------------------------------------------------------------------------------------------

    def enter(self, run: int) -> None:
        """A run begins that only computes, and may wait for older ones."""
        self.manager.enters(run)

    def leave(self, run: int) -> None:
        """Note the end of a run: it waits no more, and no run waits for it."""
        if self.manager.knows(run):
            with self._locked():
                self.manager.leaves(run)
        self._moves.pop(run, None)

    def watch(self, run: int) -> list[SwapCopy]:
        """Return a list that collects the copies of a run's values here as they end, until the run has ended."""
        self.wake()
        return self._moves.setdefault(run, [])

    def wake(self) -> None:
        """Have the manager know of all values."""
        with self._locked():
            self._wake()

    def is_watched(self, run: int) -> bool:
        """Return True if the run is watched."""
        return run in self._moves

    def device_is_lost(self) -> None:
        """Note which values are lost, and which are away; takes no lock, since the caller may hold it."""
        gone, away = self._gone
        for log in [log for reference in list(self._resting.values()) if (log := reference()) is not None]:
            gone[log.source[0]][log.label] += len(log)
        for handle in [owner.handle for owner in list(self._known.values())]:
            if handle.state in (SavedState.KEPT, SavedState.LEAVING):
                gone[handle.group.key][handle.label] += 1
        for handle in self.manager.away():
            away[handle.group.key][handle.label] += 1

    def tell_loss(self, error: BaseException, run: int) -> None:
        """Add notes to the error of a lost device: the run's saved values that are lost with it, and the surviving
        ones.
        """
        gone, away = self._gone
        if run in gone:
            error.add_note(f"lost with {self.account.device}: {_names(gone[run])}")
        if run in away:
            error.add_note(f"away from it, and so not lost: {_names(away[run])}")

    def sample(self) -> tuple[int, ...]:
        """Return the bytes held by the device, and the figures of `SwapStatistics` that a `MemorySample` has."""
        with self._lock:
            return (self.account.used, *self.manager.sample())

    def lacks(self, run: int, *sets: WorkingSet) -> bool:
        """Return True if a run must pause before an iteration of these loops."""
        if self.is_at_rest and self.manager.need_not_ask(run, sets):
            return False
        with self._lock:
            if self.is_at_rest and not self.manager.has_plenty(sum(each.expected(0) for each in sets)):
                self._wake()
            may, orders = self.manager.asks(run, sets)
            if orders.out:
                self._start(orders)
            return not may

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
        with self._locked():  # which looks whether that is still so
            self._paused.append(_Pause(run, resume, loop))
        return True

    @property
    def is_held_up(self) -> bool:
        """True if launching must pause."""
        return self.manager.is_short

    def close(self) -> None:
        """Release all waiting code."""
        with self._locked():
            self._is_closed = True

    def statistics(self) -> SwapStatistics:
        """A snapshot."""
        with self._locked():
            self._wake()
            return self.manager.statistics()

    def advice(self) -> str:
        """Tells what an iteration takes, and why more did not move, for the error that says that memory is short."""
        missing, largest = self.manager.missing, self.manager.largest
        advice = [f"an iteration of a loop took up to {format_bytes(largest)} of it"] if largest else []
        if missing:
            full = " and ".join(f"the {space.name} has {format_bytes(space.limit or 0)}" for space in self.spaces)
            advice.append(
                f"a saved value of {format_bytes(missing)} had no place to go ({full}, all in use); raise "
                "host_memory_limit=, or give spill_directory="
            )
        return "; ".join(advice)

    # -- for kinds of devices ------------------------------------------------------------------------------------

    @abstractmethod
    def movable(self, value: Value) -> Movable | None:
        """Return how the value can be moved; None if it cannot, or if that would free nothing."""

    @abstractmethod
    def send(self, handle: SavedHandle) -> None:
        """Start to copy ``handle.here`` to ``handle.space``; it ends with `sent` or `not_sent`, never before."""

    @abstractmethod
    def bring(self, handle: SavedHandle) -> None:
        """Start to copy ``handle.there`` back; it ends with `brought` or `not_brought`, never before."""

    @abstractmethod
    def discard(self, there: object) -> None:
        """Give back the copy's memory or disk space."""

    @abstractmethod
    def now_ns(self) -> int:
        """The time by which saves, reads and copies are measured."""

    def ended_ns(self) -> int:
        """The time of a trace, when a copy has just ended."""
        return self.now_ns()

    def comes_late(self, handle: SavedHandle) -> bool:
        """Return True if a COMING value will not be there in time for its present reader."""
        return True

    def sent(self, handle: SavedHandle, there: object, taken_ns: int) -> None:
        """A copy out has ended, and has made `there`."""
        with self._noted(handle, "d2h", taken_ns), self._locked():
            self._has_left(handle, there, taken_ns)

    def not_sent(self, handle: SavedHandle) -> None:
        """A copy out has failed: the value stays on the device."""
        with self._locked():
            self.manager.stays(handle)

    def brought(self, handle: SavedHandle, taken_ns: int, here: object = None) -> None:
        """A copy in has ended. `here` is the buffer that owns its memory, if `bring` has not said so before."""
        with self._noted(handle, "h2d", taken_ns), self._locked():
            self.manager.came(handle, taken_ns)
            if handle.state is not SavedState.GONE and here is not None:
                self.arrives(handle, here, here)
            self._discard(handle)

    def not_brought(self, handle: SavedHandle, error: BaseException) -> None:
        """A copy in has failed: whoever reads the value gets the error."""
        with self._locked():
            self.manager.came(handle, 0)
            handle.error = copy(error)
            self._discard(handle)

    # -- inside --------------------------------------------------------------------------------------------------

    @contextmanager
    def _noted(self, handle: SavedHandle, stream: str, taken_ns: int) -> Iterator[None]:
        yield
        moves = self._moves.get(handle.group.key)
        if moves is not None:
            until, is_late = self.ended_ns(), stream == "h2d" and handle.is_late
            sample = self.sample()
            moves.append(
                SwapCopy(handle.label, handle.tag, stream, until - taken_ns, until, handle.nbytes, is_late, sample)
            )

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            with self._lock:
                yield
                self._tell()
        finally:
            self._settle()

    def _tell(self) -> None:
        """Wake waiting readers, and resume paused launchers that may go on."""
        if self._waiting:
            self._changed.notify_all()
        if not self._paused:
            return
        paused, self._paused = sorted(self._paused, key=lambda pause: pause.run or 0), []
        for pause in paused:
            if self._may_go_on(pause.run):
                if not pause.loop.is_closed():
                    pause.loop.call_soon_threadsafe(pause.resume)
            else:
                self._paused.append(pause)

    def _may_go_on(self, run: int | None) -> bool:
        if run is None:
            return not self.is_held_up
        may, orders = self.manager.admits(run)
        self._start(orders)
        return may

    def _settle(self) -> None:
        """Drop entries that stores have released; a thread with the lock does so when it gives the lock back."""
        while self._released and self._lock.acquire(blocking=False):
            try:
                while self._released:
                    self._drop(self._released.popleft().handle)
            finally:
                self._lock.release()

    def _wait(self) -> None:
        if self._is_closed:
            raise SessionClosedError("the session was closed while a saved value was on its way")
        self._waiting += 1
        try:
            self._changed.wait()
        finally:
            self._waiting -= 1

    def _start(self, orders: Orders, wanted: SavedHandle | None = None) -> None:
        """Start copies. For the value that is `wanted` now there has to be room, and for what follows it need not."""
        for handle in orders.out:
            self.send(handle)
        for number, handle in enumerate(orders.into):
            try:
                self.bring(handle)
            except BaseException as error:
                for refused in orders.into[number:]:
                    self.manager.refused(refused)
                if handle is not wanted and isinstance(error, MemoryLimitExceeded):
                    return
                raise

    def _has_left(self, handle: SavedHandle, there: object, taken_ns: int | None) -> None:
        handle.there = there
        orders = self.manager.left(handle, taken_ns)
        if handle.state is SavedState.AWAY:
            handle.here = None
        else:
            self._discard(handle)
        self._start(orders)

    def _drop(self, handle: SavedHandle) -> None:
        if self.manager.dropped(handle):
            handle.here = None
            if not handle.copying:
                self._discard(handle)

    def arrives(self, handle: SavedHandle, owner: object, here: object) -> None:
        """The device's buffer of a value is `here`; `bring` may say so at once, where streams order what follows."""
        handle.here = here
        reference = _Owner(owner, self._dies)
        reference.key, reference.handle = id(owner), handle
        self._known[reference.key] = reference

    def _discard(self, handle: SavedHandle) -> None:
        there, handle.there = handle.there, None
        if there is not None:
            self.discard(there)
