"""Saved values that may move: alone or several together (`SavedHandle`), their runs, stores, copies and places."""

from __future__ import annotations

import enum
import itertools
from collections import deque
from collections.abc import Callable, Sequence
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
        live: how many of their handles are not GONE, and sets that a store still gathers.
        newest: the last values that always move, and have not been asked to.
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
        # The newest value is read first, and stands last. Memory of values that are leaving or coming counts already.
        if not self.out:
            return 0
        read = itertools.takewhile(lambda handle: handle.rank > self.until, reversed(self.out))
        return sum(handle.nbytes for handle in read if handle.state is SavedState.AWAY)


# Compared by identity: two saves of equal values are two values, of which one may be away.
class SavedValue:
    """One saved value of a `SavedHandle`, with which it moves.

    Attributes:
        handle: moves it; another one once values that cannot move together are taken apart.
        nbytes: its size.
        label: the node that saves it.
        rank: its place among the values of its run.
        holders: how many entries of stores refer to it.
        here: the device's buffer, which copies read, until it has left.
        start: where its bytes begin in the copy of all values, and in their buffer once that has come back.
    """

    # Defaults of the class: most values never set them, and thousands of values are made.
    holders = 1
    here: Placed = None
    start = 0

    def __init__(self, handle: SavedHandle, nbytes: int, label: str, rank: int) -> None:
        self.handle = handle
        self.nbytes = nbytes
        self.label = label
        self.rank = rank


@dataclass(slots=True, eq=False, repr=False)
class SavedHandle:
    """Saved values that move together, by one copy; one value, if that is large.

    Attributes:
        label: the node that saves the first of them.
        group: their group.
        nbytes: their size in all.
        values: the values, in the order of their places; none once all are GONE.
        live: how many of them a store still refers to.
        rank: the place of the newest of them, which is read first.
        stride: distance in places to the value that the same node saved before: the values of one iteration.
        state: where they are; `SavedMoves` alone changes it.
        has_moved: they have left, or were about to, and never will again.
        space: where they go or are.
        copying: a copy of them is in flight.
        block: the device's buffer of all of them, once they have come back.
        asks: the values at whose last reads further copies start, once all have come back.
        there: the copied values.
        error: why they cannot come back.
        tag: the iteration of the first, where that is traced.
        is_late: True if a reader waits for them to come back.
    """

    label: str
    group: SavedGroup
    nbytes: int = 0
    values: list[SavedValue] = field(default_factory=list)
    live: int = 0
    rank: int = 0
    stride: int = 1
    state: SavedState = SavedState.KEPT
    has_moved: bool = False
    space: Space | None = None
    copying: bool = False
    block: Placed = None
    asks: Sequence[SavedValue] = ()
    there: Placed = None
    error: BaseException | None = None
    tag: str = ""
    is_late: bool = False

    def __repr__(self) -> str:
        return f"<SavedHandle {self.label} #{self.rank} {self.state.name} {self.nbytes} B>"

    @property
    def held(self) -> list[SavedValue]:
        """The values that a store refers to."""
        return [value for value in self.values if value.holders]

    @property
    def is_here(self) -> bool:
        """True if the device has a buffer of them."""
        return self.block is not None or any(value.here is not None for value in self.values)


class Movable(NamedTuple):
    """A value that a device can move."""

    owner: object
    """Sole owner of the value's memory, as its identity; it can be referred to weakly."""
    buffer: object
    """Object that the device copies: the owner, or another one."""
    view: Callable[[Placed, int], Value]
    """Gives the value for a buffer, and the number of the byte where it begins there."""


class SavedEntry:
    """An entry of a store in place of a value that may move.

    Attributes:
        value: the value, to which several entries may refer.
        view: see `Movable`.
        rank: place of this save among the run's saves.
    """

    __slots__ = ("rank", "value", "view")

    def __init__(self, value: SavedValue, view: Callable[[Placed, int], Value], rank: int) -> None:
        self.value = value
        self.view = view
        self.rank = rank

    @property
    def nbytes(self) -> int:
        """Size of the value."""
        return self.value.nbytes


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
