"""Ordered and overlapping work. `Stream` and `Event`, the thread stream of the CPU, and virtual time."""

from __future__ import annotations

from asyncflow.streams.beside import call_beside
from asyncflow.streams.cpu.stream import ThreadEvent, ThreadStream
from asyncflow.streams.latch import Latch
from asyncflow.streams.protocol import Event, Stream
from asyncflow.streams.virtual import VirtualClockLoop

__all__ = ["Event", "Latch", "Stream", "ThreadEvent", "ThreadStream", "VirtualClockLoop", "call_beside"]
