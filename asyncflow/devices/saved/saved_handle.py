"""Saved values that may move (`SavedHandle`): their groups by run, their entries in stores, their copies and places."""

from __future__ import annotations

import enum
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock
from typing import NamedTuple

from asyncflow.devices.saved.working_set import Pace
from asyncflow.devices.values import Placed
from asyncflow.values import Value

SHORT = 0.70
"""Above this part of the limit, memory is short."""


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
        self._lock = Lock()  # copies of several devices end on threads of their own

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

    @property
    def owed(self) -> int:
        """Bytes that the next iteration reads, and that have to come back first."""
        # The newest is read first, and stands last. Of what is leaving or coming the memory counts already.
        if not self.out:
            return 0
        read = itertools.takewhile(lambda handle: handle.rank > self.until, reversed(self.out))
        return sum(handle.nbytes for handle in read if handle.state is SavedState.AWAY)


# Compared by identity: two saves of equal values are two values, of which one may be away.
@dataclass(slots=True, eq=False, repr=False)
class SavedHandle:
    """A saved value that may move.

    Attributes:
        nbytes: its size.
        label: the node that saves it.
        group: its group.
        rank: its place there.
        stride: distance in places to the value that the same node saved before: the values of one iteration.
        state: where it is; `SavedMoves` alone changes it.
        holders: how many entries of stores refer to it.
        has_moved: it has left, or was about to, and never will again.
        space: where it goes or is.
        copying: a copy of it is in flight.
        here: the device's buffer, which copies read.
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


class Movable(NamedTuple):
    """A value that a device can move."""

    owner: object
    """Sole owner of the value's memory, as its identity; it can be referred to weakly."""
    buffer: object
    """Object that the device copies: the owner, or another one."""
    view: Callable[[Placed], Value] | None
    """Gives the value for a buffer that has come back; None where it is the buffer."""


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
