"""`RunCost`: what runs of one plan take, learnt from those that have ended."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import inf

_COLD = 3
"""So many runs may have taken longer than later ones will: caches, imports, memory that was new to the process."""

_FRESH = 1 / 8
"""The weight of a new time in the mean, and of a new deviation in the mean one."""

_FAR = 4.0
"""A time counts in the mean for so many times the mean at most: runs that take exponentially long lose 2 % by it."""

_FORGOTTEN_S = 10.0
"""After this time without a missed deadline, any number of runs may be in progress again."""

_FADING = 1 / 64
"""By so much of what it is above the mean, the longest time is forgotten with each run."""


_RECENT = 16
"""So many runs tell what part of them misses its deadline."""

_LEAST_CROWD = 8
"""So many runs of a plan may always be in progress."""


@dataclass(slots=True, eq=False)
class Crowd:
    """Runs of one plan that are in progress and mostly wait, and how many may be so that they end in time.

    What they wait for, such as a database, may serve a few at a time, and the session cannot know how many. It learns
    that when most of them miss their deadlines: as many as ended in time during the life of one are about as many as
    end within a deadline. For example, requests take 20 ms and have 200 ms, and 8 are served at a time. When 2,000 a
    second come, 80 end while the first one misses its deadline. Half of these may be in progress then: they keep the
    database busy, and wait for half of their time. While runs end in time the number grows by one each time that so
    many have ended. A few misses among many runs change nothing, as some calls just take long. Nor do misses while no
    run ends in time: clients that poll wait for something rare, and not for one another.

    Attributes:
        count: runs that are in progress.
        most: how many may be; infinity while none has missed its deadline of late.
        ended: how many have ended in time so far.
        missed: part of the last ones that missed their deadlines.
        missed_s: when the last one did.
    """

    count: int = 0
    most: float = inf
    ended: int = 0
    missed: float = 0.0
    missed_s: float = -inf

    def is_full(self, now_s: float) -> bool:
        """Return True if one more would probably end too late."""
        if self.most < inf and now_s > self.missed_s + _FORGOTTEN_S:
            self.most = inf
        return self.count >= self.most

    def end(self) -> None:
        """One has ended in time."""
        self.ended += 1
        self.missed -= self.missed / _RECENT
        if self.count + 1 >= self.most:
            self.most += 1 / self.most

    def miss(self, ended: int, now_s: float) -> None:
        """One has missed its deadline, and `ended` had ended in time when it began."""
        self.missed_s = now_s
        self.missed += (1 - self.missed) / _RECENT
        is_crowded = self.ended > ended or self.most < inf
        if is_crowded and self.missed > 0.5 and self.count > _LEAST_CROWD:
            self.most = max(_LEAST_CROWD, (self.ended - ended) / 2)


@dataclass(slots=True, eq=False)
class RunCost:
    """How long runs take, and what memory.

    One run is told from the last five by their median, so that a slow one refuses no others. That is enough for one
    that can start at once. Under load there are always more to choose from than can run, and those that wait do so
    until their time is almost up: if only the median had to fit, half of them would be computed for nobody. So one that
    waits has to fit with the mean and four times the mean deviation, by which TCP tells that an answer is lost
    (Jacobson 1988), or with the longest time of late, if that is less. What many take together is told from their mean.

    Attributes:
        recent_s: what the last ones took.
        mean_s: what they take on average; 0 before the first.
        is_known: True once a few runs have ended.
        crowd: runs of the plan that are in progress, if they wait and have deadlines.
        nbytes: what one needs of a device's memory at a time, beside what is there without it; 0 if that is not known.
    """

    recent_s: deque[float] = field(default_factory=lambda: deque(maxlen=5))
    mean_s: float = 0.0
    nbytes: int = 0
    is_known: bool = False
    crowd: Crowd = field(default_factory=Crowd)
    _deviation_s: float = 0.0
    _longest_s: float = 0.0
    _observed: int = 0

    @property
    def expected_s(self) -> float:
        """How long a run will take; 0 if that is not known."""
        ordered = sorted(self.recent_s)
        half = len(ordered) // 2
        return (ordered[half] + ordered[~half]) / 2 if ordered else 0.0

    @property
    def likely_s(self) -> float:
        """The time that it will hardly exceed."""
        return max(self.expected_s, min(self._longest_s, self.mean_s + 4 * self._deviation_s))

    def observe(self, taken_s: float) -> None:
        """A run took so long."""
        self.recent_s.append(taken_s)
        mean_s = self.mean_s
        if self._observed < _COLD or not mean_s:
            self._observed += 1
            self.is_known = self._observed >= _COLD
            self.mean_s = self._longest_s = min(mean_s or taken_s, taken_s)
        else:
            off_s = min(taken_s, _FAR * mean_s) - mean_s
            self.mean_s = mean_s + _FRESH * off_s
            self._deviation_s += _FRESH * (abs(off_s) - self._deviation_s)
            self._longest_s = max(taken_s, self._longest_s - _FADING * (self._longest_s - mean_s))

    def observe_bytes(self, nbytes: int) -> None:
        """A run needed so many bytes; more than before count at once, fewer by and by."""
        self.nbytes = max(nbytes, self.nbytes + int(_FRESH * (nbytes - self.nbytes)))
