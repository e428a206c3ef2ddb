"""Expected time of a kernel on the host. It decides the kernel's place, and whether the kernel may run on the event
loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Final

NS_PER_CALL = 2_000.0
"""Calling a NumPy kernel, with the run's own work around it."""

NS_PER_FLOP = 0.1
"""10 GFLOP/s: one core, between what a matrix product and a transcendental function reach."""

NS_PER_BYTE = 0.1
"""10 GB/s: what one core reads and writes of main memory."""

INLINE_LIMIT_NS = 200_000
"""A kernel that is expected to take longer does not run on the event loop (0.2 ms)."""

SLICE_NS = 200_000
"""Target time of a region's slice: short beside a turn, long beside a look at the clock."""

_WEIGHT = 0.25

_PROVING_CALLS = 8
"""Short calls in a row after which a user function may run on the event loop."""

_GOOD_RECORD = 512
"""Short calls in a row behind which one slow call counts as the machine's doing."""

_MORE_PROOF = 8
"""Factor on the number of calls of the next proof, after a proved call was slow on the event loop."""


class MeasuredCost:
    """The expected time of one node's kernel, as a line over the size of its work: ``base_ns + slope_ns * size``.

    It begins as the static estimate it is given; the first measurement replaces that, and each later one moves
    exponentially weighted means (a quarter each), through which the least-squares line goes. While sizes do not differ
    there is no line to fit. Then a larger size is expected to cost in proportion and a smaller one as much as the mean.
    Both are upper bounds over all lines through the mean, for the event loop's sake.

    A first measurement that is beyond what the second says counts for nothing: it was cold (caches, imports, memory
    that was new to the process), and must not keep a node off the event loop.

    What "size" is, is the caller's choice (elements, bytes, flops), but always the same for one node. Measure kernels
    wherever they ran: so a kernel that was sent to a thread wrongly finds its way back.
    """

    __slots__ = ("_covariance", "_mean_ns", "_mean_size", "_measured", "_variance", "base_ns", "slope_ns")

    def __init__(self, base_ns: float = 0.0, slope_ns: float = 0.0) -> None:
        """Begin with a static estimate: ``base_ns`` a call and ``slope_ns`` a unit of size."""
        self.base_ns = base_ns
        self.slope_ns = slope_ns
        self._measured = 0
        self._mean_size = 0.0
        self._mean_ns = 0.0
        self._variance = 0.0
        self._covariance = 0.0

    @property
    def is_measured(self) -> bool:
        """True if a measurement has replaced the estimate."""
        return self._measured > 0

    @property
    def mean_ns(self) -> float:
        """Mean of recent measurements; 0 before the first."""
        return self._mean_ns

    def predict_ns(self, size: int) -> float:
        """The expected time of a call on work of ``size``."""
        if self._variance == 0.0 and self._measured:
            return self._mean_ns if size <= self._mean_size else self._mean_ns * size / max(self._mean_size, 1.0)
        return self.base_ns + self.slope_ns * size

    def measured_ns(self, size: int) -> float | None:
        """`predict_ns`, if a measurement has replaced the estimate."""
        return self.predict_ns(size) if self._measured else None

    def observe(self, size: int, ns: int) -> None:
        """Learn that a call on work of ``size`` took ``ns`` nanoseconds."""
        self._measured += 1
        if self._measured == 1 or (self._measured == 2 and ns < self.predict_ns(size)):
            self._mean_size = size
            self._mean_ns = ns
            return
        off_size = size - self._mean_size
        off_ns = ns - self._mean_ns
        self._mean_size += _WEIGHT * off_size
        self._mean_ns += _WEIGHT * off_ns
        if off_size == 0.0 and self._variance == 0.0:
            return
        self._variance = (1 - _WEIGHT) * (self._variance + _WEIGHT * off_size * off_size)
        self._covariance = (1 - _WEIGHT) * (self._covariance + _WEIGHT * off_size * off_ns)
        # Noise can tilt the line, but no kernel gets faster with more work, or takes negative time.
        slope = max(self._covariance / self._variance, 0.0)
        self.slope_ns = min(slope, self._mean_ns / max(self._mean_size, 1.0))
        self.base_ns = self._mean_ns - self.slope_ns * self._mean_size


class Proof:
    """The proof that a user function asks for, wherever it is called.

    Attributes:
        slow: how many of its calls were slow on the event loop, all nodes together.
        needed: short calls in a row that a node needs, before it may call the function on the event loop.
    """

    __slots__ = ("needed", "slow")

    def __init__(self) -> None:
        self.slow = 0
        self.needed = _PROVING_CALLS


class UserCost(MeasuredCost):
    """The expected time of code of the user's, by the clock on the wall: infinite until it has proved to be short.

    A function may wait for a disk or a server, or turn slow at any call; meanwhile the event loop would stand still. So
    a call is for a thread until eight in a row took at most `INLINE_LIMIT_NS`, and their mean and mean deviation do. A
    call that is slow on the event loop takes the proof back, from all nodes that call the function. The next proof
    takes eight times as many calls (8, 64, 512), so that a function that is slow now and then stays on threads. After
    512 short calls in a row, or eight times the last proof, it takes eight calls again: a busy machine may have delayed
    the slow one. A call that was expected to be slow, as it is on more elements, proves nothing.
    """

    __slots__ = ("_deviation_ns", "_proofs", "_short", "_slow")

    def __init__(self, proofs: Sequence[Proof], base_ns: float = inf) -> None:
        """Begin with a declared estimate, which is trusted; infinite for none.

        Args:
            proofs: of the functions that a call may call.
            base_ns: the estimate.
        """
        super().__init__(base_ns)
        self._proofs = proofs
        self._slow = self._count()
        self._short = 0 if base_ns == inf else self._needed()
        self._deviation_ns = 0.0

    def _count(self) -> int:
        return sum([proof.slow for proof in self._proofs])

    def _needed(self) -> int:
        return max([proof.needed for proof in self._proofs])

    def _is_proved(self) -> bool:
        slow = needed = 0
        for proof in self._proofs:  # `_count` and `_needed`, inlined: every firing comes here
            slow += proof.slow
            if proof.needed > needed:
                needed = proof.needed
        if slow != self._slow:
            self._slow, self._short = slow, 0
        return self._short >= needed

    def predict_ns(self, size: int) -> float:
        """The expected time of a call on work of ``size``; infinite if it seems short and that is not proved."""
        expected_ns = MeasuredCost.predict_ns(self, size) + self._deviation_ns
        return expected_ns if expected_ns > INLINE_LIMIT_NS or self._is_proved() else inf

    def measured_ns(self, size: int) -> float | None:
        """The expected time, proved or not, if there was any call."""
        return MeasuredCost.predict_ns(self, size) if self._measured else None

    def observe(self, size: int, ns: int) -> None:
        """Learn that a call on work of ``size`` took ``ns`` nanoseconds by the clock."""
        was_proved = self._is_proved()
        if ns <= INLINE_LIMIT_NS:
            self._short += 1
        elif not was_proved:
            self._short = 0
        elif self.predict_ns(size) <= INLINE_LIMIT_NS:  # it ran on the loop
            is_rare = self._short >= max(_GOOD_RECORD, _MORE_PROOF * self._needed())
            for proof in self._proofs:
                proof.slow += 1
                proof.needed = _PROVING_CALLS if is_rare else _MORE_PROOF * proof.needed
            self._slow, self._short = self._count(), 0
        off_ns = abs(ns - MeasuredCost.predict_ns(self, size)) if self._measured > 1 else 0.0
        MeasuredCost.observe(self, size, ns)
        self._deviation_ns += _WEIGHT * (off_ns - self._deviation_ns)


class _Unlearnt(MeasuredCost):
    """A cost that no measurement changes."""

    __slots__ = ()

    def observe(self, size: int, ns: int) -> None:
        """Ignore the measurement."""


ON_A_THREAD: Final = _Unlearnt(base_ns=inf)
"""Of a function that has asked for a run and waited for it: short as that was, the event loop would wait for itself."""
