"""How is work ordered and overlapped? `Stream` and `Event`, and the thread stream of the CPU."""

from __future__ import annotations

from asyncflow.streams.latch import Latch
from asyncflow.streams.protocol import Deliver, Event, Stream
from asyncflow.streams.thread import ThreadEvent, ThreadStream

__all__ = ["Deliver", "Event", "Latch", "Stream", "ThreadEvent", "ThreadStream"]
