"""The mover of saved values of one device (`Mover`): it starts the copies that `SavedMoves` order, and notes their end.

A kind of device says which values can move (`movable`), and starts copies (`send`, `bring`). At their ends `sent`,
`not_sent`, `brought` or `not_brought` is called, on any thread. The gate, the moves and their counts are asked and
changed under one lock. Stores let go of values wherever they are collected, maybe on a thread that has the lock: such
values wait in `_released` until that thread gives the lock back.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from threading import Condition, Lock

from asyncflow.devices.memory import MemoryAccount, MemoryLimitExceeded
from asyncflow.devices.saved.memory_gate import MemoryGate
from asyncflow.devices.saved.saved_handle import (
    Movable,
    SavedEntry,
    SavedHandle,
    SavedState,
    SavedValue,
    Space,
    SwapCopy,
)
from asyncflow.devices.saved.swap import Orders, SavedMoves
from asyncflow.devices.values import Placed
from asyncflow.errors import SessionClosedError
from asyncflow.values import Value


class _Owner(weakref.ref[object]):
    """A weak reference to the owner of a value's memory, as the value's identity."""

    __slots__ = ("key", "value")

    value: SavedValue
    key: int


class _Owners(dict[int, _Owner]):
    """The owners of values' memory that are alive, by their identity."""

    def forget(self, reference: weakref.ref[object]) -> None:
        """Drop an owner that has died."""
        assert isinstance(reference, _Owner)
        if self.get(reference.key) is reference:
            del self[reference.key]


class Mover(ABC):
    """A mover of the saved values of one device of a session. All threads may call it.

    Attributes:
        account: of the device.
        gate: says which iterations may begin; only to be asked under the lock, as are `moves`.
        moves: says what moves, and when.
        spaces: where values may go.
        waits: True if readers wait until a value is present, and not the streams that use it.
        together: most bytes of several values that move by one copy.
    """

    waits = False
    together = 0

    def __init__(self, account: MemoryAccount, spaces: Sequence[Space], *, ns_per_byte: float) -> None:
        """Begin without values; `ns_per_byte` is what a copy is expected to take, until one has been measured."""
        self.account = account
        self.gate = MemoryGate(account, self)
        self.moves = SavedMoves(account, self.gate, spaces, ns_per_byte=ns_per_byte, together=self.together)
        self.spaces = spaces
        # Keyed by the owner of the memory, while it lives: a value may have left while other code still uses it here.
        self._known = _Owners()
        self._released: deque[SavedEntry] = deque()
        self._lock = Lock()
        self._changed = Condition(self._lock)
        self._waiting = 0
        self._is_closed = False
        self._copies: dict[int, list[SwapCopy]] = {}

    @property
    def ns_per_byte(self) -> float:
        """The time of a copy, out or back: as measured, or before that as expected."""
        return self.moves.ns_per_byte

    # -- for kinds of devices ------------------------------------------------------------------------------------

    @abstractmethod
    def movable(self, value: Value, writer: Placed) -> Movable | None:
        """Return how the value that `writer` made can be moved; None if it cannot, or if that would free nothing."""

    @abstractmethod
    def send(self, handle: SavedHandle) -> None:
        """Start to copy ``handle.held`` to ``handle.space``, one after the other, where `SavedValue.start` says.

        It ends with `sent` or `not_sent`, never before.
        """

    @abstractmethod
    def bring(self, handle: SavedHandle) -> None:
        """Start to copy ``handle.there`` back; it ends with `brought` or `not_brought`, never before."""

    def take_over(self, nbytes: float) -> None:  # noqa: B027 - most devices have none
        """Free up to `nbytes` that are kept only until the work of other streams is done; under the lock."""

    def parts_of(self, there: Placed, start: int) -> tuple[Placed, Placed] | None:
        """Return the parts of a copy before this byte and from there on; None if no part can come by itself."""
        return None

    @abstractmethod
    def discard(self, there: object) -> None:
        """Give back the copy's memory or disk space."""

    @abstractmethod
    def now_ns(self) -> int:
        """The time by which saves, reads and copies are measured."""

    def writer(self) -> object:
        """Return the stream that makes the values saved now; None if the device has one order."""
        return None

    def ended_ns(self) -> int:
        """The time of a trace, when a copy has just ended."""
        return self.now_ns()

    def comes_late(self, handle: SavedHandle, *, was_away: bool) -> bool:
        """Return True if a COMING value, which may have been AWAY until now, will be there too late for its reader."""
        return True

    def sent(self, handle: SavedHandle, there: object, taken_ns: int) -> None:
        """A copy out has ended, and has made `there`."""
        with self._noted(handle, "d2h", taken_ns), self._locked():
            self._has_left(handle, there, taken_ns)

    def not_sent(self, handle: SavedHandle) -> None:
        """A copy out has failed: the value stays on the device."""
        with self._locked():
            self.moves.stays(handle)

    def brought(self, handle: SavedHandle, taken_ns: int, here: object = None) -> None:
        """A copy in has ended. `here` is the buffer that owns its memory, if `bring` has not said so before."""
        with self._noted(handle, "h2d", taken_ns), self._locked():
            self.moves.came(handle, taken_ns)
            if handle.state is not SavedState.GONE and here is not None:
                self.arrive(handle, here, here)
            self._discard(handle)

    def not_brought(self, handle: SavedHandle, error: BaseException) -> None:
        """Note that a copy in has failed: each reader of the value gets the error."""
        with self._locked():
            self.moves.came(handle, 0)
            handle.error = copy(error)
            handle.asks = [*handle.values]
            self._discard(handle)

    # -- for the memory gate -------------------------------------------------------------------------------------

    @property
    def is_held_up(self) -> bool:
        """True if launching has to pause."""
        return self.moves.is_short

    @property
    def to_be_free(self) -> int:
        """See `Room`."""
        return self.moves.to_be_free

    def owed(self, run: int) -> int:
        """See `Room`."""
        return self.moves.owed(run)

    def free(self, nbytes: float, run: int | None = None, *, with_sets: bool = True) -> None:
        """See `Room`; under the lock."""
        if with_sets:
            self.hand_over(run, least=2)
        self._start(self.moves.clear(nbytes, run))

    @abstractmethod
    def hand_over(self, run: int | None = None, *, least: int = 1) -> None:
        """Report the values that stores gather, if at least `least`, of one run or of all; under the lock."""

    def sample(self) -> tuple[int, ...]:
        """Return the bytes held by the device, and the figures of `SwapStatistics` that a `MemorySample` has."""
        with self._lock:
            return (self.account.used, *self.moves.sample())

    # -- inside --------------------------------------------------------------------------------------------------

    @contextmanager
    def _noted(self, handle: SavedHandle, stream: str, taken_ns: int) -> Iterator[None]:
        yield  # after the lock is released, which `sample` takes
        moves = self._copies.get(handle.group.key)
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
        if self.gate.paused:
            self.gate.look_again()

    def _settle(self) -> None:
        """Drop entries that stores have released; a thread with the lock does so when it gives the lock back."""
        # Finalizers run on any thread, at any moment, maybe on the thread that has the lock: to wait would never end.
        while self._released and self._lock.acquire(blocking=False):
            try:
                self._drop_released()
            finally:
                self._lock.release()

    def _drop_released(self) -> None:
        while self._released:
            value = self._released.popleft().value
            if value.handle.block is not None and value.holders == 1 and value.handle.live > 1:
                value.holders = 0  # as `_drop` does for a value of a block that has others
                value.handle.live -= 1
            else:
                self._drop(value)

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
                # The rest would find no room, either: each is fetched again when it is read.
                for refused in orders.into[number:]:
                    self.moves.refused(refused)
                if handle is not wanted and isinstance(error, MemoryLimitExceeded):
                    return
                raise

    def _has_left(self, handle: SavedHandle, there: object, taken_ns: int | None) -> None:
        handle.there = there
        orders = self.moves.left(handle, taken_ns)
        if handle.state is SavedState.AWAY:
            for value in handle.values:
                value.here = None
        else:
            self._discard(handle)
        self._start(orders)

    def _drop(self, value: SavedValue) -> None:
        handle = value.handle
        is_last = self.moves.dropped(value)
        if not value.holders:
            value.here = None
        if is_last:
            handle.values.clear()  # each refers to the handle
            handle.block, handle.asks = None, ()
            if not handle.copying:  # else at the end of the copy, which uses its memory
                self._discard(handle)

    def _fit(self, value: SavedValue, room: float) -> bool:
        """Take a value that is AWAY apart from the others, but for older ones, as many as have `room`.

        Returns False if nothing could be taken apart.
        """
        handle = value.handle
        held = handle.held
        index = first = held.index(value)
        nbytes = value.nbytes
        while first and nbytes + held[first - 1].nbytes <= room:
            first, nbytes = first - 1, nbytes + held[first - 1].nbytes
        newer, own = held[index + 1 :], held[first : index + 1]
        return (bool(newer) and self._split(handle, newer)) | (first > 0 and self._split(handle, own))

    def _split(self, handle: SavedHandle, newest: list[SavedValue]) -> bool:
        """Split the newest values from a handle that is AWAY; return False if its copy cannot be split."""
        start = newest[0].start
        parts = self.parts_of(handle.there, start)
        if parts is None:
            return False
        own = self.moves.split(handle, newest)
        handle.there, own.there = parts
        for value in newest:
            value.start -= start
        return True

    def arrive(self, handle: SavedHandle, owner: object, here: object) -> None:
        """The device's buffer of values is `here`; `bring` may say so at once, where streams order what follows."""
        held = handle.held
        handle.block = here
        # Further copies are ordered two iterations before the oldest is read, and where it is.
        handle.asks = [held[0], *held[2 * handle.stride :][:1]]
        self.is_in(held[0], owner)

    def is_in(self, value: SavedValue, owner: object) -> None:
        """Note that `owner` owns the memory of a value."""
        reference = _Owner(owner, self._known.forget)
        reference.key, reference.value = id(owner), value
        self._known[reference.key] = reference

    def _discard(self, handle: SavedHandle) -> None:
        there, handle.there = handle.there, None
        if there is not None:
            self.discard(there)
