"""Learnt costs of calls for several members: how long calls take, and how soon answered members return."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from random import Random

import numpy as np

_MOST_SIZES = 64
"""Most sizes for which call times are kept; calls of further sizes count for the nearest but 1."""

_FRESH = 0.25
"""Weight of a new measurement against the earlier mean."""

_MOST_GROWN = 2
"""A call that takes more than this multiple of its mean was held up, and teaches no more than that."""

_SURE = 3
"""Number of measurements that make a size known; before, it may be better than it seemed."""

_NEWS = 0.1
"""Relative change of a mean that makes other sizes the best ones."""

EXPLORE = 32
"""One call in 32 tries another size than the best known: a size that was slow may not be any more."""

LONG = 2
"""A call is long if it takes this multiple of its learnt time, which may be wrong by as much."""

_SHORT_NS = 1_000_000
"""Differences up to this may be noise."""

_WORTH_NS = 2_000_000
"""Calls that take less are made whole: to start another is work, too, and what keeps a thread waiting is chance."""

_LATE = 2
"""Answered members are expected back with this multiple of the usual deviation from their mean time."""

_PATIENT = 1.5
"""Waiting for members lasts at least this multiple of their usual time: to give up just before they come loses most."""


@dataclass(slots=True)
class SizeTimes:
    """Times of calls by size, as running means; size 1 is kept by itself.

    Attributes:
        taken_ns: the means, by size.
    """

    taken_ns: dict[int, float] = field(default_factory=dict)
    _counts: dict[int, int] = field(default_factory=dict)

    def observe(self, size: int, taken_ns: float) -> int:
        """Note that a call of a size took so long; return the size for which it is counted."""
        known = self.taken_ns.get(size)
        if known is None and size > 1 and len(self.taken_ns) >= _MOST_SIZES:
            size = min([other for other in self.taken_ns if other > 1], key=lambda other: abs(other - size))
            known = self.taken_ns[size]
        count = self._counts[size] = self._counts.get(size, 0) + 1
        if known is None:
            mean = taken_ns
        elif count <= _SURE:  # the first calls were cold
            mean = min(known, taken_ns)
        else:
            mean = known + _FRESH * (min(taken_ns, _MOST_GROWN * known + _SHORT_NS) - known)
        self.taken_ns[size] = mean
        return size

    def predict_ns(self, size: int) -> float:
        """Return the expected time of a size: on a line between measured sizes, beyond them as the nearest."""
        known = self.taken_ns.get(size)
        if known is not None and (self._counts[size] >= _SURE or size == 1):
            return known
        if size == 1:
            return 0.0  # so that this size is tried
        smaller = max((n for n in self.taken_ns if 1 < n < size), default=0)
        larger = min((n for n in self.taken_ns if n > size), default=0)
        # Optimistic, so that this size is tried: as if more members were free.
        hoped = self.taken_ns.get(smaller or larger or 1, 0.0)
        if smaller and larger:
            hoped += (size - smaller) / (larger - smaller) * (self.taken_ns[larger] - hoped)
        return hoped if known is None else min(hoped, known)


@dataclass(slots=True)
class _Answered:
    """The members answered by a call: how many, since when, when they should be back, and late, and how many are
    missing.
    """

    size: int
    since_ns: int
    due_ns: float
    late_ns: float
    missing: int


@dataclass(slots=True)
class Returns:
    """Times until the members that a call has answered come back.

    Clients that ask again once they have their answer come back together. A member that waited for the call to end had
    better wait for these clients too, if one call for all takes much less time: otherwise both halves take turns for
    ever.

    Attributes:
        taken: time until as many members had come as were answered.
        apart: deviation of that time from the expected one.
    """

    taken: SizeTimes = field(default_factory=SizeTimes)
    apart: SizeTimes = field(default_factory=SizeTimes)
    _away: list[_Answered] = field(default_factory=list)
    """Answered members that are not back, by when they were answered."""

    def answer(self, size: int, now_ns: int) -> None:
        """Note that a call for `size` members has ended."""
        while self._away and now_ns > self._away[0].late_ns:
            self._learn(self._away.pop(0), now_ns)  # these clients may never come back
        expected_ns = self.taken.predict_ns(size)
        due_ns = now_ns + expected_ns + _LATE * self.apart.predict_ns(size)
        late_ns = max(due_ns, now_ns + _PATIENT * expected_ns)
        self._away.append(_Answered(size, now_ns, due_ns, late_ns, size))

    def come(self, now_ns: int) -> None:
        """A member has come."""
        if self._away:
            first = self._away[0]
            first.missing -= 1
            if not first.missing:
                self._learn(self._away.pop(0), now_ns)

    def waits_until_ns(self, costs: CallCosts, waiting: int, most: int, now_ns: int) -> float:
        """Return until when it pays to wait for answered members to come back; minus infinity if it does not pay.

        It pays if less time is lost until all are back than a call of their own would take.
        """
        if not self._away:
            return -inf
        late_ns = max([each.late_ns for each in self._away])
        if now_ns >= late_ns:
            return -inf
        saved_ns = costs.saved_ns(waiting, sum(each.missing for each in self._away), most)
        return late_ns if max([each.due_ns for each in self._away]) < now_ns + saved_ns else -inf

    def _learn(self, away: _Answered, now_ns: int) -> None:
        expected_ns = self.taken.predict_ns(away.size)
        taken_ns = now_ns - away.since_ns
        self.apart.observe(away.size, abs(taken_ns - expected_ns))
        self.taken.observe(away.size, taken_ns)


@dataclass(slots=True)
class CallCosts(SizeTimes):
    """Times of calls by size.

    A product of one row and of two take different kernels, so that two may cost more than twice one.

    Attributes:
        fits: the most members for which memory sufficed, once it did not for more.
        threads: how many calls the device may compute at the same time.
        returns: how soon members that such calls answered come back.
    """

    fits: int | None = None
    threads: int = 1
    returns: Returns = field(default_factory=Returns)
    _in_parts: dict[int, SizeTimes] = field(default_factory=dict)
    """Times by how many calls were made at once for a size."""
    _used: dict[int, float] = field(default_factory=dict)
    """Times by which the sizes below were chosen."""
    _in_all: list[float] = field(default_factory=list)
    """The least time for each number of members."""
    _first: list[int] = field(default_factory=list)
    """By number of members, the size of the first call in the division that takes least time."""
    _most: int = 0
    """The most members that could share a call when these were computed."""
    _line: tuple[float, float] | None = None
    """A line through the times of all sizes but one: the time whatever the size, and the time per member."""

    def observe(self, size: int, taken_ns: float, parts: int = 1, mean_ns: float | None = None) -> int:
        """A call of that size took so long, or calls for the parts of it; gives the size that it counts for.

        Args:
            size: how many members there were.
            taken_ns: until the last of them had its results.
            parts: how many calls that were.
            mean_ns: how long they waited on average, if that is something else.
        """
        if self.threads > 1:
            # Members with results go on while other parts are computed, which slows those parts down.
            weighed_ns = taken_ns if mean_ns is None else (taken_ns + mean_ns) / 2
            self._in_parts.setdefault(parts, SizeTimes()).observe(_size_class(size), weighed_ns)
        size = SizeTimes.observe(self, size, taken_ns)
        self._line = None
        used = self._used.get(size)
        if used is None or self._counts[size] <= _SURE or abs(self.taken_ns[size] - used) > _NEWS * used:
            self._used.clear()
        return size

    def best(self, waiting: int, most: int) -> int:
        """Of `waiting` members, how many to take first, so that all of them take the least time in all.

        Args:
            waiting: how many there are.
            most: how many may share a call.
        """
        if not self.taken_ns:
            return min(waiting, most)
        if not self._used or self._most != most:
            self._used, self._in_all, self._first, self._most = dict(self.taken_ns), [0.0], [0], most
        waiting = min(waiting, 2 * most)  # more members do not change the best first size
        if waiting >= len(self._first):
            alone = np.array([self.predict_ns(size) for size in range(1, most + 1)])
            for count in range(len(self._first), waiting + 1):
                taken = alone[:count] + self._in_all[: -most - 1 : -1]
                # Prefer the largest size unless another is clearly better: fewer calls, and measurements vary as much.
                size = len(taken) if (1 - _NEWS) * taken[-1] <= taken.min() else len(taken) - int(taken[::-1].argmin())
                self._in_all.append(float(taken[size - 1]))
                self._first.append(size)
        return self._first[waiting]

    def parts(self, size: int, random: Random) -> int:
        """Return the best number of calls, made at once, for `size` members; now and then another number is tried."""
        like = _size_class(size)
        if self.threads == 1 or 1 not in self._in_parts or self._in_parts[1].predict_ns(like) < _WORTH_NS:
            return 1
        counts = [1 << power for power in range(min(self.threads, size).bit_length())]
        if random.randrange(EXPLORE) == 0:
            return random.choice(counts)
        return min(counts, key=lambda count: self._in_parts.setdefault(count, SizeTimes()).predict_ns(like))

    def likely_ns(self, size: int) -> float:
        """Return how long a call will take; of a size that is not known, as told from all others."""
        known = self.taken_ns
        if not known or self._counts.get(size, 0) >= _SURE:
            return known.get(size, 0.0)
        if len(known) == 1:
            ((only, taken_ns),) = known.items()
            return taken_ns * max(1.0, size / (2 * only))
        larger = [each for each in known if each > 1]
        least = min(larger)
        if 1 in known and (size < least or len(larger) == 1):
            return known[1] + (size - 1) / (least - 1) * (known[least] - known[1])
        fixed, each = self._line = self._line or self._fitted()
        return max(self.predict_ns(size), fixed + each * size)

    def saved_ns(self, waiting: int, coming: int, most: int) -> float:
        """Return how much less time it takes in all if waiting members go with the coming ones, and not before them."""
        coming = min(coming, most - waiting)
        if coming <= 0 or not waiting:
            return 0.0
        # Use a line through all sizes: the difference of two sizes would be mostly noise.
        fixed, each = self._line = self._line or self._fitted()
        alone = self.taken_ns.get(1, fixed + each)

        def least_ns(size: int) -> float:
            return min(fixed + each * size, alone * size)

        return least_ns(waiting) + least_ns(coming) - least_ns(waiting + coming)

    def _fitted(self) -> tuple[float, float]:
        sizes = np.array([size for size in self.taken_ns if size > 1])
        if not sizes.size:
            return 0.0, 0.0
        taken = np.array([self.taken_ns[size] for size in sizes])
        spread = sizes - sizes.mean()
        each = max(0.0, float(spread @ taken / max(1.0, spread @ spread)))  # optimistic: 0 if only one size is known
        return max(0.0, float(taken.mean() - each * sizes.mean())), each


def _size_class(size: int) -> int:
    """The largest size that is about as large: of each doubling there are four, such as 10, 12, 14 and 16."""
    shift = max(0, (size - 1).bit_length() - 3)
    return (((size - 1) >> shift) + 1) << shift
