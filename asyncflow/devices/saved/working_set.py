"""The memory that an iteration of a loop takes (`WorkingSet`), and the time (`Pace`), measured from one to the next."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

_GUESS = 2
"""Factor on another loop's bytes for an iteration's expected bytes, until the iteration's own are measured."""

_MEASURED = 3
"""Number of measured iterations of a loop that suffice."""

_SPARE = 4
"""Factor on the first iterations' bytes for which there must be room before iterations overlap without a
measurement.
"""


_MEMORY = 0.9
"""Weight of earlier measurements."""


class Account(Protocol):
    """The memory of the device."""

    @property
    def limit(self) -> int | None:
        """Bytes it may hold."""

    @property
    def used(self) -> int:
        """Bytes held, including copies that come in."""

    @property
    def at_most(self) -> int:
        """The same, or a little more, and quicker to ask for."""

    @property
    def total(self) -> int:
        """Bytes taken so far, including freed ones."""

    @property
    def fed(self) -> int:
        """Bytes of feeds among `total`."""

    def lap(self) -> tuple[int, int]:
        """Return the peak of bytes held since the last call, and the bytes held now."""


class WorkingSet:
    """The memory that one iteration of a loop takes, as measured where one ran by itself.

    Attributes:
        most: bytes held at a time, at most, above those when it began.
        total: bytes taken, whatever it gave back.
        is_measured: they can be relied upon.
        outer: that of the loop around, if that asks too; None where that is not known.
        is_around: loops inside it ask as well; then `most` is that of an iteration until one of them does.
    """

    __slots__ = (
        "_account",
        "_count",
        "_is_beside",
        "_is_shared",
        "is_around",
        "is_measured",
        "most",
        "outer",
        "total",
    )

    def __init__(self, account: Account, outer: WorkingSet | None = None, *, is_around: bool = False) -> None:
        self.most = self.total = 0
        self.outer = outer
        self.is_around = is_around
        self._account = account
        self._count = 0
        self._is_beside = self._is_shared = self.is_measured = False

    def loops_around(self) -> Iterator[WorkingSet]:
        """Yield the working sets of the loops around, from the innermost outward."""
        outer = self.outer
        while outer is not None:
            yield outer
            outer = outer.outer

    def expected(self, largest: int) -> int:
        """Return the peak, guessed before a few iterations were measured, from the `largest` of other loops."""
        return self.most if self.is_measured else _GUESS * max(self.most, largest)

    def fits(self, count: int) -> bool:
        """Return True if there is room for `count` iterations at a time, in whatever order they run, beside the
        present bytes.
        """
        limit = self._account.limit
        if limit is None:
            return True
        # If much memory is free, one measured iteration is enough.
        expected = self.total if self.is_measured else _SPARE * self.total
        fits = self._count > 0 and count * expected <= limit - self._account.used
        self._is_shared |= fits
        return fits

    def measured(self, most: int, total: int, *, is_alone: bool = True) -> None:
        """Note the bytes taken since the last iteration began that ran alone.

        If other runs took some of it (not `is_alone`), it is too much, and stands until a run is alone.
        """
        if not self._is_shared:
            if is_alone and self._is_beside and total:
                self.most = self.total = self._count = 0
                self._is_beside = False
            self._is_beside |= not is_alone
            self.most, self.total = max(self.most, most), max(self.total, total)
            self._count += 1
            self.is_measured = self._count >= _MEASURED
        self._is_shared = False


class Pace:
    """The mean time from one value to the next, of late."""

    __slots__ = ("_last", "_ns", "_ranks")

    def __init__(self) -> None:
        self._last: tuple[int, int] | None = None
        self._ns = self._ranks = 0.0

    def note(self, now_ns: int, rank: int, towards: int) -> None:
        """A value of that rank was saved (`towards` 1) or read (-1)."""
        if self._last is not None and rank == self._last[1]:
            return  # the same save, or a second read of one buffer: measure from the first
        if self._last is not None and (rank - self._last[1]) * towards > 0:
            self._ns = _MEMORY * self._ns + now_ns - self._last[0]
            self._ranks = _MEMORY * self._ranks + abs(rank - self._last[1])
        self._last = (now_ns, rank)

    def step_ns(self) -> float | None:
        """None before there were two."""
        return self._ns / self._ranks if self._ranks else None
