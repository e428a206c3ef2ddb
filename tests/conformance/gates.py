"""Nodes that a test lets complete when it likes: coroutine ops that wait for an event."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import asyncflow as af
from asyncflow.streams.virtual import VirtualClockLoop

if TYPE_CHECKING:
    from asyncflow.graph.building.build import TensorLike


class Gate:
    """Gives its input back once it is open."""

    def __init__(self, name: str = "gate") -> None:
        self._event = asyncio.Event()
        self.arrived = 0
        """Number of firings that have come to the gate."""

        @af.op(outputs=lambda spec: spec, name=name)
        async def wait(x: object) -> object:
            self.arrived += 1
            await self._event.wait()
            return x

        self._wait = wait

    def __call__(self, x: TensorLike) -> af.Tensor:
        """`x`, once the gate is open."""
        tensor: af.Tensor = self._wait(x)
        return tensor

    def open(self) -> None:
        """Lets everything pass, from now on."""
        self._event.set()


async def settle() -> None:
    """Lets the event loop turn often enough for all that can happen to have happened; on virtual time, waits for it."""
    for _ in range(100):
        await asyncio.sleep(0)
    if isinstance(asyncio.get_running_loop(), VirtualClockLoop):
        await asyncio.sleep(1)
