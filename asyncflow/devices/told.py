"""The account of a device whose functions report the bytes held at a few places, and track no values.

To track each value would cost a compiled loop more than many a kernel does. So the compiler finds the live values at
each place (`asyncflow.compiler.regions.code.held_bytes`), and a function reports the sum: where its loops begin and
end, where it is fullest, and at times where it may stop. Stores report their bytes, or their new values are looked at.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Container, Iterable
from sys import getsizeof
from time import perf_counter_ns
from typing import Protocol

import numpy as np

from asyncflow.devices.memory import TOLD, TRACKED_BYTES, Held, MemoryAccount, Watch, owner_of

_SHARE, _MOST_NS = 100, 2_000_000
"""Factor on a report's own duration until the next one of a function that may stop, and the most nanoseconds of
that: each report takes up to 0.02 ms.
"""

_LOOKED_AT = 16
"""Number of values of a store that `tell` looks at again where the store has not grown."""

_ARRAY_NBYTES = getsizeof(np.empty(0))
"""Bytes that Python takes for an array, beside its numbers."""


class HeldState(Protocol):
    """A state of a store."""

    @property
    def held(self) -> Held:
        """The values that all states share."""


class SavedHeld(HeldState, Protocol):
    """A state of a store that knows its bytes."""

    def standing(self) -> tuple[object, int, int]:
        """Return the first value, if it is there, and the bytes and number of all that are."""


class Unbound:
    """The value of a name that a branch or loop of a function has not bound: it takes no memory."""

    nbytes = 0
    counts = None


UNBOUND = Unbound()


class Holding:
    """A token for the values that a function holds, alive as long as its variables.

    Args:
        given: arrays that it has not made, and that stores may keep.
    """

    __slots__ = ("__weakref__", "_given", "_others", "due_ns", "has_told")

    def __init__(self, *given: object) -> None:
        self._given = given
        self._others: frozenset[int] | None = None
        self.due_ns = 0
        self.has_told = False

    def others(self) -> frozenset[int]:
        """Ids of the owners of these arrays."""
        if self._others is None:
            self._others = frozenset(id(owner_of(x)) for x in self._given if isinstance(x, np.ndarray))
        return self._others


class ToldAccount(MemoryAccount):
    """An account to which functions report the bytes they hold. All methods may be called on any thread.

    Invariant, under the lock: ``_owners`` has the ids of the large arrays that count as parts of mixed stores.
    """

    __slots__ = ("_owners",)

    def __init__(self, device_name: str) -> None:
        super().__init__(device_name)
        self._owners: set[int] = set()

    def tell(
        self,
        holding: Holding,
        nbytes: int,
        ahead: int,
        saved: tuple[SavedHeld | Unbound, ...] = (),
        begun: tuple[SavedHeld | Unbound, ...] = (),
        others: tuple[object, ...] = (),
        *,
        may_look: bool = True,
    ) -> None:
        """Count the values that a function holds. Stores count for as long as they live.

        Args:
            holding: of the function; its values no longer count once that is gone.
            nbytes: bytes of its values now.
            ahead: most bytes held beyond these since the last report.
            saved: stores whose values it has made.
            begun: stores of which it has made only the first value: the others are in `saved`, too.
            others: stores that must be looked into, or report their bytes.
            may_look: all values of a store may be looked at; else this comes so often that a few have to do.

        A function without a report so far, and without a new peak, waits until it may stop: most functions end before.
        """
        if not (holding.has_told or saved or begun or others) and not self._is_peak(nbytes + ahead):
            return
        holding.has_told = True
        more = 0
        with self._lock:
            self._settle()
            for state in saved:
                if isinstance(state, Unbound):
                    continue
                watch, kept, count = self._saved(state, holding)
                kept += count * (state.held.entry_nbytes + _ARRAY_NBYTES) - watch.given
                more += watch.update(kept if count else 0)
            for state in begun:
                if isinstance(state, Unbound):
                    continue
                watch, _, count = self._saved(state, holding)
                more += watch.update(watch.first - watch.given if count else 0)
            for store in others:
                if hasattr(store, "held"):
                    watch = self._watch_of(store.held)
                    if not watch.nbytes:  # the buffer that it has outgrown was held as well
                        ahead = max(ahead, store.held.grown_from)
                    more += watch.update(self._looked_at(store.held, watch, holding.others(), may_look=may_look))
                elif not hasattr(store, "counts"):  # a store with `counts` tracks its arrays itself
                    nbytes += getattr(store, "nbytes", 0)
            more += self._watch_of(holding).update(nbytes)
            # No call between reading and writing `at_most`: a finalizer could run there, and settle freed buffers.
            self.at_most += more
            if self.at_most + ahead > self._lap:
                self._lap = self.at_most + ahead

    def tell_often(self, holding: Holding, nbytes: int, ahead: int, *stores: tuple[SavedHeld | Unbound, ...]) -> None:
        """`tell` at the end of an inner loop."""
        self.tell(holding, nbytes, ahead, *stores, may_look=False)

    def pause(self, holding: Holding, nbytes: int, ahead: int, *stores: tuple[SavedHeld | Unbound, ...]) -> None:
        """`tell` where a function may stop, if it has not for a while."""
        now = perf_counter_ns()
        if not holding.due_ns:  # a short run tells only where its loops end
            holding.due_ns = now + _MOST_NS // 4
        elif now >= holding.due_ns:
            holding.has_told = True
            self.tell(holding, nbytes, ahead, *stores, may_look=False)
            after = perf_counter_ns()
            holding.due_ns = after + min(_SHARE * (after - now), _MOST_NS)

    def passed(self, nbytes: int) -> None:
        """Count the bytes that a function held at its fullest line, and no longer holds."""
        if self._is_peak(nbytes):
            with self._lock:
                self._lap = max(self._lap, self.at_most + nbytes)

    def _is_peak(self, nbytes: int) -> bool:
        """Return True if `nbytes` more bytes make a new peak."""
        if self.at_most + nbytes <= self._lap:  # even though `at_most` still counts freed buffers
            return False
        with self._lock:
            self._settle()
        return self.at_most + nbytes > self._lap

    def _watch_of(self, what: object) -> _ToldWatch:
        watch = self._live.get(id(what))
        if type(watch) is not _ToldWatch:
            watch = self._live[id(what)] = _ToldWatch(what, self._freed.append)
        return watch

    def _saved(self, state: SavedHeld, holding: Holding) -> tuple[_ToldWatch, int, int]:
        watch = self._watch_of(state.held)
        first, nbytes, count = state.standing()
        if not watch.first and isinstance(first, np.ndarray):
            watch.first = first.nbytes
            watch.given = first.nbytes if id(owner_of(first)) in holding.others() else 0
        return watch, nbytes, count

    def _looked_at(self, held: Held, watch: _ToldWatch, others: Container[int], *, may_look: bool) -> int:
        """Return the bytes in a store, from the new values since the last time.

        For removed values, all are looked at again. If that could be often, each new value pays for one look, and each
        time for a few. So the cost of a value does not grow with their number.
        """
        fresh = held.since(watch.seen)
        watch.seen += len(fresh)
        watch.credit += len(fresh) or _LOOKED_AT
        if fresh:
            watch.in_values += self._in_arrays(fresh, others, watch, held.entry_nbytes)
        elif watch.seen and (may_look or watch.credit >= watch.seen):
            watch.credit = 0
            self._forget_owners(watch)
            watch.in_values = self._in_arrays(held.since(0), others, watch, held.entry_nbytes)
        return watch.in_values + sum([buffer.nbytes for buffer in held.buffers()])

    def _in_arrays(self, values: Iterable[object], others: Container[int], watch: _ToldWatch, entry_nbytes: int) -> int:
        """Bytes of the arrays among values that count nowhere else, with what Python takes for each."""
        total, live, owners = 0, self._live, self._owners
        for value in values:
            if not isinstance(value, np.ndarray):
                continue
            owner = value if value.base is None else owner_of(value)
            key, nbytes = id(owner), owner.nbytes
            if key in others:
                continue
            if nbytes >= TRACKED_BYTES:
                if key in owners or key in live:
                    continue
                owners.add(key)
                watch.owners.append(key)
            total += nbytes + entry_nbytes + _ARRAY_NBYTES
        return total

    def _forget_owners(self, watch: _ToldWatch) -> None:
        if watch.owners:
            self._owners.difference_update(watch.owners)
            del watch.owners[:]

    def _end(self, watch: Watch) -> None:
        if isinstance(watch, _ToldWatch):
            self._forget_owners(watch)
        else:
            super()._end(watch)


class _ToldWatch(Watch):
    """A watch of a function's `Holding`, or of a store that it tells of.

    Attributes:
        first: bytes of the first of saved values.
        given: the same, if that is an array that the function was given.
        seen: number of its values that were looked at.
        credit: number of values that may be looked at again.
        in_values: bytes of arrays among them.
        owners: ids of the large ones.
    """

    __slots__ = ("credit", "first", "given", "in_values", "owners", "seen")

    def __init__(self, what: object, _freed: Callable[[Watch], object]) -> None:
        self.key, self.nbytes, self.label, self.count = id(what), 0, "", TOLD
        self.first = self.given = self.seen = self.credit = self.in_values = 0
        self.owners = array("Q")

    def update(self, nbytes: int) -> int:
        """Take a new count; gives by how much it is more."""
        more, self.nbytes = nbytes - self.nbytes, nbytes
        return more
