"""Stores that a loop carries from iteration to iteration: of saved values, and of gradients that add up.

A store is a value like any other, a VARIANT, of which each write gives a new version. Versions share one log: the
newest is written to in place, and an older one first copies its part of the log, so that all keep their meaning. Each
kind has its rule for entries and reads: here are `SavedValues`, one value a number and in order, and `StoreGradient`,
whose entries for one element add up. `part_sums` has the sums of parts of a value.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from threading import Lock
from typing import Any, Generic, Self, TypeAlias, TypeVar

from asyncflow.devices.saved.saved_handle import SavedEntry
from asyncflow.devices.saved.swap import Moves
from asyncflow.devices.swapping import RestingLog, Swapping
from asyncflow.graph.op import KERNELS, PURE, HostInputs, Op, define
from asyncflow.graph.values.dtypes import VARIANT, summed_in
from asyncflow.graph.values.shapes import format_shape
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.cost import free
from asyncflow.values import Array, Conduct, Kernel, Namespace, Value

STORE = Spec(VARIANT, ())
"""The spec of every store."""

Entry = TypeVar("Entry")


class StoreLog(list[Entry]):
    """The entries that versions of a store share; see `asyncflow.devices.memory.Held`."""

    __slots__ = ("__weakref__", "lock")
    entry_nbytes = 8
    gives_views = False
    grown_from = 0

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        super().__init__()
        self.lock = Lock()
        self.extend(entries)

    add = list.append

    def get(self, index: int) -> Entry:
        """Entry number `index`."""
        return self[index]

    def take(self, index: int) -> Entry:
        """Return entry number `index`, for the last time: the log lets go of it."""
        entry, self[index] = self[index], None  # type: ignore[assignment]
        return entry

    def copied(self, length: int) -> Self:
        """A log of its own with the first `length` entries."""
        return type(self)(self[:length])

    def since(self, count: int) -> Sequence[object]:
        """The values behind the first `count`."""
        return self[count:]

    def buffers(self) -> Sequence[Array]:
        """None: values are kept as they come."""
        return ()


class MovingLog(StoreLog["Value"]):
    """A log of saved values; large values may leave the device's memory, and come back before their reads.

    Args:
        entries: with which it begins.
        swapping: the mover of the values.
        label: the node that saves them.
        run: the run that they belong to.
        moves: when they move.
        together: bytes of values that move by one copy, if they always move.
        loop: the loop that saves them, and the iterations of the loops around it, as tags show them.
    """

    __slots__ = ("_moves", "_swapping", "label", "reference", "source", "together")

    def __init__(
        self,
        entries: Iterable[Value],
        swapping: Swapping,
        *,
        label: str,
        run: int,
        moves: Moves,
        together: float = 0,
        loop: str = "",
    ) -> None:
        super().__init__(entries)
        self._swapping, self.label, self._moves, self.source = swapping, label, moves, (run, loop)
        self.together = together if moves == "always" else 0
        self.reference: weakref.ref[RestingLog] = weakref.ref(self)
        swapping.begin()

    def add(self, value: Value) -> None:
        """Add one value."""
        swapping = self._swapping
        # The mover counts the value alone. It looks at the value once a set is full, at all of them in one go.
        if self.together and swapping.gathers(self, value):
            self.append(value)
            return
        if swapping.is_at_rest and self._moves != "always":
            # To make logs hand over, the mover takes its own lock before a log's lock. So do not take it under this
            # one: `rests` takes none.
            with self.lock:
                if swapping.rests(self):
                    self.append(value)
                    return
        if getattr(value, "nbytes", 0) >= swapping.moves.least_bytes:
            value = swapping.keep(value, self.label, self.source[0], moves=self._moves, tag=self.tag(len(self)))
        self.append(value)

    def hand_over(self, index: int) -> None:
        """See `asyncflow.devices.swapping.RestingLog`."""
        swapping, run = self._swapping, self.source[0]
        with self.lock:
            value = self[index] if index < len(self) else None  # None if it was read, or the store has ended
            least_bytes = swapping.moves.least_bytes
            if type(value) is not SavedEntry and getattr(value, "nbytes", -1) >= least_bytes:
                self[index] = swapping.entry(value, self.label, run, None, moves=self._moves, tag=self.tag(index))

    def tag(self, index: int) -> str:
        """See `asyncflow.devices.swapping.RestingLog`."""
        run, loop = self.source
        return f"{loop}/{index}" if self._swapping.is_watched(run) else ""

    def get(self, index: int) -> Value:
        """Value number `index`."""
        entry = self[index]
        return self._swapping.take(entry, is_last=False) if type(entry) is SavedEntry else entry

    def take(self, index: int) -> Value:
        """Value number `index`, for the last time."""
        with self.lock:  # `hand_over` would put an entry back in its place
            entry, self[index] = self[index], None
        return self._swapping.take(entry, is_last=True) if type(entry) is SavedEntry else entry

    def copied(self, length: int) -> MovingLog:
        """A log of its own with the first `length` entries."""
        self._swapping.wake()  # so that only one log hands a value over
        entries = self[:length]
        self._swapping.share(entries)
        run, loop = self.source
        return MovingLog(
            entries,
            self._swapping,
            label=self.label,
            run=run,
            moves=self._moves,
            together=self.together,
            loop=loop,
        )

    def __del__(self) -> None:
        with self.lock:  # another thread may be making it hand over
            entries = self[:]
            self.clear()
        self._swapping.release(self, entries)


class StoreVersion(Generic[Entry]):
    """A version of a store: the first `length` entries of a log. Any thread may use any version.

    Attributes:
        log: the log, shared with other versions.
        length: number of its entries that this version sees.
        nbytes: bytes of their values, for the profiler; counted as they come, since it is asked for in each iteration.
    """

    __slots__ = ("length", "log", "nbytes")

    def __init__(self, log: StoreLog[Entry], length: int, nbytes: int) -> None:
        self.log = log
        self.length = length
        self.nbytes = nbytes

    @property
    def held(self) -> StoreLog[Entry]:
        """The log, for the account of a device that has a limit."""
        return self.log

    def entries(self) -> Sequence[Entry]:
        """The entries that this version sees."""
        return self.log[: self.length]

    def grown(self, entries: Sequence[Entry]) -> StoreLog[Entry]:
        """The log with more entries: in place, or a copy if there is a newer version."""
        log = self.log
        with log.lock:
            if self.length == len(log):
                log.extend(entries)
                return log
        copy = log.copied(self.length)
        copy.extend(entries)
        return copy


def _is_gone(entry: object) -> bool:
    return entry is None


class SavedValues(StoreVersion["Value"]):
    """The values that a loop saves for its gradient, one in each iteration (EuroSys '18 §5)."""

    __slots__ = ()

    def saved(self, index: int, value: Value) -> SavedValues:
        """Return the store with one value more, number `index`."""
        length = self.length
        if index != length:
            raise IndexError(f"value number {index} is saved into a store of {length}")
        log = self.log
        if length != len(log):  # a loop saves to each version once, so no other thread does
            log = log.copied(length)
        log.add(value)
        return SavedValues(log, length + 1, self.nbytes + getattr(value, "nbytes", 0))

    def read(self, index: int) -> Value:
        """The value saved as number `index`."""
        return self.log.get(index)

    def standing(self) -> tuple[object, int, int]:
        """Return the first value, if it is there, and the bytes and number of all that are; they go from the last."""
        log, length = self.log, self.length
        count = length
        if length and log[length - 1] is None:  # gradients read from the last to the first, so the tail is gone
            count = bisect_left(log, True, 0, length, key=_is_gone)
        return (log[0], self.nbytes * count // length, count) if count else (None, 0, 0)

    def read_last(self, index: int) -> Value:
        """Return the value and drop it from the store; for the last read."""
        return self.log.take(index)


Grad: TypeAlias = Any
"""A gradient of an element: an array, or a store of gradients if the element is a store."""
Reached: TypeAlias = tuple[int, Grad]
"""The index of an element, and a gradient of it."""


class _GradientLog(StoreLog[Reached]):
    """Entries that are found by the element they belong to."""

    __slots__ = ("positions",)
    entry_nbytes = 200  # a pair, its index, and the list of an element's positions

    def __init__(self, entries: Iterable[Reached]) -> None:
        self.positions: dict[int, list[int]] = {}
        super().__init__(entries)

    def since(self, count: int) -> Sequence[object]:
        return [grad for _, grad in self[count:]]

    def extend(self, entries: Iterable[Reached]) -> None:
        for entry in entries:
            self.positions.setdefault(entry[0], []).append(len(self))
            self.append(entry)


class StoreGradient(StoreVersion[Reached]):
    """Gradients of the elements of a store or array; several of one element add up when they are read."""

    __slots__ = ()
    log: _GradientLog

    @classmethod
    def of(cls, entries: Sequence[Reached]) -> StoreGradient:
        """Make a gradient of these entries alone."""
        return cls(_GradientLog(entries), len(entries), _nbytes(entries))

    def with_entries(self, entries: Sequence[Reached]) -> StoreGradient:
        """The store with more entries."""
        return StoreGradient(self.grown(entries), self.length + len(entries), self.nbytes + _nbytes(entries))

    def merged(self, other: StoreGradient) -> StoreGradient:
        """The store with the entries of `other`; the cost is that of the shorter one."""
        if other.length > self.length:
            return other.merged(self)
        return self.with_entries(other.entries()) if other.length else self

    def read(self, index: int) -> list[Grad]:
        """The gradients of one element."""
        return [self.log[place][1] for place in self.log.positions.get(index, ()) if place < self.length]

    def take(self, index: int) -> list[Grad]:
        """Return the gradients and drop them from the store; for the last read."""
        found, log = self.read(index), self.log
        for place in log.positions.pop(index, ()):
            log[place] = index, None  # keep the places of later entries
        return found

    def total(self, index: int, shape: tuple[int, ...], xp: Namespace, *, is_last: bool = False) -> Array | None:
        """Return the sum of the gradients of one element of this shape; None if there are none.

        Args:
            index: of the element.
            shape: of the element.
            xp: the namespace of its arrays.
            is_last: True for the last read.

        Raises:
            ValueError: one has another shape. It is not broadcast: the sum would be silently wrong.
        """
        found = self.take(index) if is_last else self.read(index)
        for grad in found:
            if grad.shape != shape:
                raise ValueError(
                    f"a gradient of shape {format_shape(grad.shape)} has reached element {index} of an array, which "
                    f"has shape {format_shape(shape)}; they can only be added up if they are alike"
                )
        if len(found) < 2:
            return found[0] if found else None
        dtype = found[0].dtype
        wide = summed_in(dtype)
        total: Array = reduce(xp.add, found if wide is dtype else [grad.astype(wide) for grad in found])
        return total if wide is dtype else total.astype(dtype)


def _nbytes(entries: Sequence[Reached]) -> int:
    return sum(getattr(value, "nbytes", 0) for _, value in entries)


def store_op(
    name: str,
    infer: Callable[..., Spec],
    kernel: Kernel,
    host_inputs: HostInputs = (),
    *,
    conduct: Conduct = PURE,
    is_total: bool = False,
) -> Op:
    """Register an op that moves values into a store or out of it, by the same kernel on all devices; see `Op`."""
    return define(
        name,
        infer,
        lambda xp, **attrs: kernel,
        flops=free,
        host_inputs=host_inputs,
        conduct=conduct,
        is_total=is_total,
        traits=KERNELS,
    )
