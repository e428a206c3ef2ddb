"""Begin and end of work on a CUDA device, in the host's time: for timelines.

CUDA tells the time between two events of one device, in milliseconds as a float32. So times are counted from an
*anchor*, an event whose host time is known to some microseconds. Anchors are renewed before the steps of a float32
show.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter_ns
from typing import TYPE_CHECKING

from asyncflow.devices.protocol import Span, Spans

if TYPE_CHECKING:
    from asyncflow.streams.cuda.cupy_types import Cupy, Raw
    from asyncflow.streams.cuda.stream import CudaStream

_TRIES = 5
_OLD_NS = 5_000_000_000
"""After 5 s the steps of a float32 in milliseconds are half a microsecond."""


class Clock:
    """The host's time of events on one device.

    Attributes:
        anchor: an event and its host time in nanoseconds.
    """

    def __init__(self, cupy: Cupy, stream: CudaStream) -> None:
        """Blocks until the device has answered a few times."""
        self._cupy = cupy
        self._stream = stream
        self.refresh()

    @property
    def is_old(self) -> bool:
        """True if it is time for `refresh`."""
        return perf_counter_ns() - self.anchor[1] > _OLD_NS

    def refresh(self) -> None:
        """Take a new anchor; blocks, so call it on a thread that may wait."""
        best = None
        for _ in range(_TRIES):
            with self._stream:
                event = self.new_event()
                asked_ns = perf_counter_ns()
                event.record(self._stream.raw)
                event.synchronize()
                known_ns = perf_counter_ns()
            if best is None or known_ns - asked_ns < best[0]:
                best = known_ns - asked_ns, (event, known_ns)
        assert best is not None
        self.anchor = best[1]

    def new_event(self) -> Raw:
        """An event of the card that is current, from which times are counted."""
        # No thread sleeps on it; a stream has few events that a thread can sleep on: see `EventPool`.
        return self._cupy.cuda.Event(block=False, disable_timing=False)

    def time_ns(self, event: Raw, anchor: tuple[Raw, int]) -> int:
        """The host time of an event that has completed."""
        origin, origin_ns = anchor
        elapsed_ms: float = self._cupy.cuda.get_elapsed_time(origin, event)
        return origin_ns + round(1e6 * elapsed_ms)


class PendingSpan:
    """Work given to a stream between entering and leaving this as a context manager."""

    __slots__ = ("_anchor", "_clock", "_ended", "_into", "_label", "_nbytes", "_role", "_started", "_stream")

    def __init__(self, clock: Clock, stream: CudaStream, label: str, role: str, nbytes: int, into: Spans) -> None:
        self._clock = clock
        self._anchor = clock.anchor
        self._stream = stream
        self._label = label
        self._role = role
        self._nbytes = nbytes
        self._into = into

    def __enter__(self) -> None:
        self._started = self._clock.new_event()
        self._started.record(self._stream.raw)

    def __exit__(self, *exc: object) -> None:
        self._ended = self._clock.new_event()
        self._ended.record(self._stream.raw)
        self._into.append(self)

    def settled(self) -> Span:
        """Return the span, once all of it has ended."""
        started, ended = (self._clock.time_ns(event, self._anchor) for event in (self._started, self._ended))
        return Span(self._label, self._role, started, max(started, ended), self._nbytes)


@dataclass(slots=True, eq=False, repr=False)
class HostSpan:
    """A kernel that the host computes, between entering and leaving this as a context manager."""

    label: str
    into: Spans
    started_ns: int = 0
    ended_ns: int = 0

    def __enter__(self) -> None:
        self.started_ns = perf_counter_ns()

    def __exit__(self, *exc: object) -> None:
        self.ended_ns = perf_counter_ns()
        self.into.append(self)

    def settled(self) -> Span:
        """The span."""
        return Span(self.label, "host", self.started_ns, self.ended_ns, 0)
