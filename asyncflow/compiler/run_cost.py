"""`RunCost`: what runs of one plan take, learnt from those that have ended."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

_COLD = 3
"""So many runs may have taken longer than later ones will: caches, imports, memory that was new to the process."""

_FRESH = 1 / 8
"""The weight of a new time in the mean, and of a new deviation in the mean one."""

_FAR = 4.0
"""A time counts in the mean for so many times the mean at most: runs that take exponentially long lose 2 % by it."""

_FADING = 1 / 64
"""By so much of what it is above the mean, the longest time is forgotten with each run."""


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
        nbytes: what one needs of a device's memory at a time, beside what is there without it; 0 if that is not known.
    """

    recent_s: deque[float] = field(default_factory=lambda: deque(maxlen=5))
    mean_s: float = 0.0
    nbytes: int = 0
    is_known: bool = False
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
