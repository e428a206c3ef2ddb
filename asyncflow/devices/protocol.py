"""What every kind of device offers: streams for its work, an account of its memory, an array namespace."""

from __future__ import annotations

from types import ModuleType
from typing import Protocol

from asyncflow.devices.memory import MemoryAccount
from asyncflow.streams.protocol import Stream


class Device(Protocol):
    """A place where kernels run and values live.

    The invariant: a value is valid in the order of its device's ``compute`` stream. Whoever touches it elsewhere, on
    ``h2d``, ``d2h``, another device or the host, orders that with an event (`asyncflow.streams`).
    """

    @property
    def name(self) -> str:
        """Such as ``cpu:0``."""
        ...

    @property
    def kind(self) -> str:
        """Such as ``cpu``; kernels are registered by kind."""
        ...

    @property
    def xp(self) -> ModuleType:
        """The array namespace its kernels compute in, such as `numpy`."""
        ...

    @property
    def compute(self) -> Stream:
        """The stream of kernels."""
        ...

    @property
    def h2d(self) -> Stream:
        """The stream of copies from host memory."""
        ...

    @property
    def d2h(self) -> Stream:
        """The stream of copies to host memory."""
        ...

    @property
    def memory(self) -> MemoryAccount:
        """The bytes it holds, and their limit."""
        ...

    async def aclose(self, grace_s: float) -> bool:
        """Take no more work and wait up to ``grace_s`` seconds for its streams to end; True if all did. Idempotent."""
        ...

    def describe(self) -> str:
        """One line for people: name, limit, what is in use."""
        ...
