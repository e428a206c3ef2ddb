"""The interface of every kind of stream: a first-in-first-out queue of work on one device.

The words are CUDA's. A stream does its work in the order it was given; two streams are ordered only by events::

    event = producer.record()   # completes when all work given to `producer` so far is done
    consumer.wait(event)        # work given to `consumer` from here on waits for it; the host does not
    await event.wait()          # the host waits, without blocking its event loop

All methods are called on the thread of the event loop that owns the stream. None of them blocks it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Event(Protocol):
    """A point in a stream's order, made by `Stream.record`."""

    def done(self) -> bool:
        """Return True if all work before this point is done; never blocks, and does not report failures."""

    async def wait(self) -> None:
        """Return when the work before this point is done.

        Raises:
            BaseException: what fire-and-forget work before this point failed with, if no event has raised it yet.

        Cancellation: leaves the event and the stream as they were.
        """


class Stream(Protocol):
    """A FIFO queue of work on one device."""

    @property
    def name(self) -> str:
        """Name of the stream, such as ``cpu:0/compute``."""

    @property
    def pending(self) -> int:
        """Number of items given to the stream and not done yet."""

    def enqueue(self, work: Callable[..., object], *args: object) -> None:
        """Do ``work(*args)`` after all earlier work; its result is dropped, its failure surfaces at an event.

        Raises:
            SessionClosedError: the stream is closed, or this process is a fork of its owner.
        """

    def record(self) -> Event:
        """An event that completes when all work given so far is done."""

    def wait(self, event: Event) -> None:
        """Make work given from here on wait for ``event`` of another stream."""

    def stop(self) -> None:
        """Refuse further work; finish the work already given. Idempotent, never blocks."""

    async def aclose(self, grace_s: float) -> bool:
        """`stop`, then wait up to ``grace_s`` seconds for the work to end; True if it did. Idempotent."""
