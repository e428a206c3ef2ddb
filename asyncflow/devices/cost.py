"""How long will a kernel of the host take? It decides where it is placed, and whether it may run on the event loop."""

from __future__ import annotations

NS_PER_CALL = 2_000.0
"""Calling a NumPy kernel, with the run's own work around it."""

NS_PER_FLOP = 0.1
"""10 GFLOP/s: one core, between what a matrix product and a transcendental function reach."""

NS_PER_BYTE = 0.1
"""10 GB/s: what one core reads and writes of main memory."""

INLINE_LIMIT_NS = 200_000
"""A kernel that is expected to take longer does not run on the event loop (0.2 ms)."""

_WEIGHT = 0.25


class MeasuredCost:
    """The expected time of one node's kernel, as a line over the size of its work: ``base_ns + slope_ns * size``.

    It begins as the static estimate it is given; the first measurement replaces that, and each later one moves
    exponentially weighted means (a quarter each), through which the least-squares line goes. While sizes do not differ
    there is no line to fit: then a larger size is expected to cost in proportion and a smaller one as much as the mean,
    both of them the most that a straight line through the mean could say, for the event loop's sake.

    A first measurement that is beyond what the second says counts for nothing: it was cold (caches, imports, memory
    that was new to the process), and must not keep a node off the event loop.

    What "size" is, is the caller's choice (elements, bytes, flops), but always the same for one node. Measure kernels
    wherever they ran: that is how one that was sent to a thread wrongly finds its way back.
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
        """Whether a measurement has replaced the estimate."""
        return self._measured > 0

    @property
    def mean_ns(self) -> float:
        """The mean of what was measured lately; 0 before."""
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
        # Noise can tilt the line; no kernel gets faster with more work, nor takes less than nothing.
        slope = max(self._covariance / self._variance, 0.0)
        self.slope_ns = min(slope, self._mean_ns / max(self._mean_size, 1.0))
        self.base_ns = self._mean_ns - self.slope_ns * self._mean_size
