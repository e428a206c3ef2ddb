"""The way of a card's saved values through pinned memory (`Passage`): to the host, on to the spill file, and back."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager

from asyncflow.devices.cuda.transfers.pinned import PinnedBuffer
from asyncflow.devices.cuda.transfers.slabs import PinnedSlabs
from asyncflow.devices.saved.saved_handle import Space
from asyncflow.streams.cpu.stream import ThreadStream

PASSING_BYTES = 16 << 20
"""Most bytes that pass through pinned memory to the file and from there at a time, or one value if that is larger."""


class Passage:
    """Pinned memory for values, and the order in which they pass through it; used on the thread of the event loop.

    Attributes:
        slabs: the pinned memory.
        passing: bytes on their way to the file or from there.
        failure: why a copy, pinning or the file failed last, for the error that says that memory is short.
    """

    def __init__(
        self, name: str, slabs: PinnedSlabs, host: Space, locked: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """Begin without values; `locked` is the lock of their mover, under which work that has waited goes on."""
        self.slabs = slabs
        self.passing = 0
        self.failure = ""
        self._host = host
        self._locked = locked
        self._thread = ThreadStream(name)
        self._roomless: deque[tuple[int, Callable[[PinnedBuffer | None], None]]] = deque()
        self._spills: deque[tuple[int, Callable[[], None]]] = deque()
        self._is_growing = self._is_refused = False

    def with_room(self, nbytes: int, then: Callable[[PinnedBuffer | None], None]) -> None:
        """Call ``then(buffer)`` with pinned memory, now or once there is more; with None if the system has no more."""
        buffer = self.slabs.take(nbytes)
        if buffer is not None or self._is_refused:
            then(buffer)
        else:
            self._roomless.append((nbytes, then))
        if self._is_growing or self._is_refused:
            return
        if self._roomless or self.slabs.is_low(self._host.limit):  # grow ahead of need, as `make_room` does not wait
            self._is_growing = True
            self.submit(self.slabs.grow, (nbytes,), self._has_grown)

    def refuse(self, error: BaseException) -> None:
        """Ask the system for no more pinned memory: it has refused some."""
        self._is_refused = True
        self.failure = f"the system pins no more memory of the host: {error}"

    def enter(self, nbytes: int, work: Callable[[], None], *, is_first: bool = False) -> None:
        """Do work that ends with `leave`, once there is room for it; `is_first` puts it before other waiting work."""
        (self._spills.appendleft if is_first else self._spills.append)((nbytes, work))
        self._pass_on()

    def leave(self, nbytes: int) -> None:
        """End work of `nbytes`, and do work that waits for their room."""
        self.passing -= nbytes
        if self._spills:
            with self._locked():
                self._pass_on()

    def submit(self, work: Callable[..., object], args: tuple[object, ...], deliver: Callable[..., None]) -> None:
        """Do blocking work on a thread; the loop calls ``deliver``."""
        self._thread.submit(work, args, deliver, asyncio.get_running_loop())

    async def aclose(self, grace_s: float) -> bool:
        """End the thread; return True if it has ended in time."""
        return await self._thread.aclose(grace_s)

    def _has_grown(self, _result: object, error: BaseException | None, *_times: int) -> None:
        self._is_growing = False
        if error is not None:
            self.refuse(error)
        with self._locked():
            waiting, self._roomless = self._roomless, deque()
            for nbytes, then in waiting:
                self.with_room(nbytes, then)

    def _pass_on(self) -> None:
        while self._spills and (not self.passing or self.passing + self._spills[0][0] <= PASSING_BYTES):
            nbytes, work = self._spills.popleft()
            self.passing += nbytes
            work()
