"""Streams of other libraries, awaited on the event loop.

A stream of ours waits for an event on the other stream, and has a ticket behind it. So the other stream only gets an
event, which takes no room in it. It is not used again, and its library may destroy it.

Open waits for one stream share one stream of ours, in order. Waits for two streams never share one: the first might end
only after the second.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING, Final

from asyncflow.errors import DeviceLostError
from asyncflow.streams.cuda.bindings import bindings_beside
from asyncflow.streams.cuda.pooled_event import DONE, NOT_READY
from asyncflow.streams.cuda.reaper import Reaper, Ticket

if TYPE_CHECKING:
    from asyncflow.streams.cuda.card import PhysicalCard
    from asyncflow.streams.cuda.cupy_types import Cupy, Raw

DEFAULT_STREAMS: Final = frozenset({0, 1, 2})
"""Handles of the default streams, which the current device and the current thread decide."""


def handle_of(stream: object) -> int:
    """CUDA's handle of a stream.

    Raises:
        TypeError: `stream` is none.
    """
    found: Raw = getattr(stream, "__cuda_stream__", None)
    if found is not None:
        version, handle = found() if callable(found) else found
        if version != 0:
            raise TypeError(f"{type(stream).__name__}.__cuda_stream__ has version {version}; 0 is the known one")
        return index(handle)
    plain: Raw = getattr(stream, "cuda_stream", stream)
    if isinstance(plain, bool) or not hasattr(plain, "__index__"):
        raise TypeError(
            "af.cuda.done takes a CUDA stream: an object with __cuda_stream__, a PyTorch stream, or an integer handle; "
            f"not {type(stream).__name__}"
        )
    return index(plain)


def device_of(cupy: Cupy, stream: object, handle: int) -> int:
    """The CUDA ordinal of a stream's device: as the stream, CUDA, or else the current device says."""
    for name in ("device_id", "device_index"):  # of CuPy, of PyTorch
        ordinal = getattr(stream, name, None)
        if isinstance(ordinal, int) and ordinal >= 0:
            return ordinal
    bindings = None if handle in DEFAULT_STREAMS else bindings_beside(cupy)
    ask = getattr(bindings and bindings.runtime, "cudaStreamGetDevice", None)
    if ask is not None:
        code, ordinal = ask(handle)
        if not int(code):
            return int(ordinal)
    return int(cupy.cuda.runtime.getDevice())


@dataclass(slots=True, eq=False)
class ForeignWait:
    """The open waits for one stream of another library, on one event loop.

    Attributes:
        card: that the stream is of.
        reaper: of the stream of ours.
        count: of open waits.
    """

    card: PhysicalCard
    reaper: Reaper
    count: int = 0

    def add(self, key: tuple[asyncio.AbstractEventLoop, int], event: Raw) -> asyncio.Future[None]:
        """Wait for one more event; the future resolves behind it."""
        reached: asyncio.Future[None] = key[0].create_future()

        def deliver(error: BaseException | None) -> None:
            self.count -= 1
            if not self.count:
                del self.card.awaited[key]
                self.end()
            if not reached.done():
                reached.set_result(None) if error is None else reached.set_exception(_lost(self.card.physical, error))

        self.reaper.follow(event)
        self.reaper.give(Ticket(deliver))
        self.count += 1
        return reached

    def end(self) -> None:
        """End the thread, if one had to wait, and return our stream, which has no work any more."""
        self.reaper.stop()
        if self.reaper.lost is None:
            self.card.give_back(self.reaper.raw)


async def done(card: PhysicalCard, handle: int) -> None:
    """Return when all work that a stream of the card has by now is done.

    Raises:
        DeviceLostError: the card is lost.
        ValueError: the stream is not of this card, or captures a graph.

    Cancellation: the work goes on.
    """
    loop = asyncio.get_running_loop()
    runtime = card.cupy.cuda.runtime
    _end_closed(card)
    try:
        with card.cupy.cuda.Device(card.physical):
            if handle not in DEFAULT_STREAMS and runtime.streamIsCapturing(handle):
                raise ValueError(f"the stream {handle:#x} captures a CUDA graph, which runs later: await it then")
            code = runtime.streamQuery(handle)
            if code == DONE:
                return
            if code != NOT_READY:
                raise runtime.CUDARuntimeError(code)
            event = card.events.take()
            runtime.eventRecord(event.raw.ptr, handle)
        key = loop, handle
        waits = card.awaited.get(key)
        if waits is None:
            waits = ForeignWait(card, _new_reaper(card))
        try:
            reached = waits.add(key, event)
        except BaseException:
            if not waits.count:
                waits.end()
            raise
        card.awaited[key] = waits
    except runtime.CUDARuntimeError as error:
        if getattr(error, "status", None) in WRONG_HANDLE:
            raise ValueError(
                f"CUDA has no stream {handle:#x} on device {card.physical}: pass device= if it is of another, and "
                "await it before it is destroyed"
            ) from error
        raise _lost(card.physical, error) from error
    await reached


WRONG_HANDLE: Final = frozenset({1, 400, 709})
"""CUDA's codes for a stream that is not there, or of another device or context."""


def _new_reaper(card: PhysicalCard) -> Reaper:
    return Reaper(f"cuda:{card.physical}/foreign", card.cupy, card.physical, card.take_stream(), card.events, _forget)


def _end_closed(card: PhysicalCard) -> None:
    """Let the threads of loops that were closed with open waits end, after the work."""
    for key, waits in list(card.awaited.items()):
        if key[0].is_closed():
            card.awaited.pop(key, None)
            waits.reaper.stop()


def _forget(_: BaseException) -> None:
    """Do nothing: each wait gets the error."""


def _lost(physical: int, error: BaseException) -> DeviceLostError:
    loss = DeviceLostError(f"CUDA device {physical} is lost, and its work with it: {error}; restart the process")
    loss.__cause__ = error
    return loss
