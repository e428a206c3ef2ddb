"""`RunCost`: time and memory of a plan's runs, learnt from finished ones."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import inf

_COLD = 3
"""Number of first runs that may be slower than later ones: caches, imports, memory that was new to the process."""

_FRESH = 1 / 8
"""The weight of a new time in the mean, and of a new deviation in the mean one."""

_FAR = 4.0
"""Factor of the mean at which a time is clipped for the mean: runs of exponential duration lose 2 % by it."""

_FORGOTTEN_S = 10.0
"""After this time without a missed deadline, any number of runs may be in progress again."""

_FADING = 1 / 64
"""Share of its excess over the mean that the longest time loses with each run."""


_RECENT = 16
"""Number of recent runs that determine the share of missed deadlines."""

_LEAST_CROWD = 8
"""Number of runs of a plan that may always be in progress."""


@dataclass(slots=True, eq=False)
class Crowd:
    """A crowd: runs of one plan that are in progress and mostly wait, and the limit within which they end in time.

    The resource they wait for, such as a database, may serve a few at a time, and the session cannot know its capacity.
    It learns the limit when most of them miss their deadlines: the number that ends in time during the life of one run
    is about the number that ends within a deadline. For example, requests take 20 ms and have 200 ms, and 8 are served
    at a time. When 2,000 a second come, 80 end while the first one misses its deadline. Half of these may be in
    progress then: they keep the database busy, and wait for half of their time. While runs end in time, the limit grows
    by one each time that as many runs as the limit have ended. A few misses among many runs change nothing, as some
    calls just take long. Nor do misses while no run ends in time: clients that poll wait for something rare, and not
    for one another. Polls with some success do count: ten messages a second end ten runs a second however many wait,
    and a database that serves ten requests a second does the same. Runs that wait in lines of queues do not count.

    Attributes:
        count: runs that are in progress.
        most: how many may be; infinity while none has missed its deadline of late.
        ended: how many have ended in time so far.
        missed: share of the last runs that missed their deadlines.
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
        """Count a run that has ended in time."""
        self.ended += 1
        self.missed -= self.missed / _RECENT
        if self.count + 1 >= self.most:
            self.most += 1 / self.most

    def miss(self, ended: int, now_s: float) -> None:
        """Count a run that has missed its deadline; `ended` runs had ended in time when it began."""
        self.missed_s = now_s
        self.missed += (1 - self.missed) / _RECENT
        is_crowded = self.ended > ended or self.most < inf
        if is_crowded and self.missed > 0.5 and self.count > _LEAST_CROWD:
            self.most = max(_LEAST_CROWD, (self.ended - ended) / 2)


@dataclass(slots=True, eq=False)
class RunCost:
    """Learnt duration and memory of runs.

    One run is predicted by the median of the last five, so that a slow one refuses no others. That is enough for a run
    that can start at once. Under load there are always more runs than can start, and they wait until their time is
    almost up: if only the median had to fit, half of them would be computed in vain. So a waiting run has to fit with
    the mean plus four mean deviations, the time after which TCP takes an answer for lost (Jacobson 1988). If the
    longest recent time is less, that one has to fit. What many take together is told from their mean.

    Attributes:
        recent_s: durations of the last ones.
        mean_s: mean duration; 0 before the first.
        is_known: True once a few runs have ended.
        crowd: runs of the plan that are in progress, if they wait and have deadlines.
        nbytes: bytes that one run needs of a device's memory at a time; 0 if unknown.
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
        """Expected duration of a run; 0 if unknown."""
        ordered = sorted(self.recent_s)
        half = len(ordered) // 2
        return (ordered[half] + ordered[~half]) / 2 if ordered else 0.0

    @property
    def likely_s(self) -> float:
        """Duration that a run will hardly exceed."""
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
        """Record the bytes that a run needed; a higher need counts at once, a lower one gradually."""
        self.nbytes = max(nbytes, self.nbytes + int(_FRESH * (nbytes - self.nbytes)))
