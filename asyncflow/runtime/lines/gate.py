"""`Gate`: the one way in which coroutines of a session wait for each other; nothing that one is given gets lost.

A coroutine may be cancelled, or pass its deadline, in the very pass of the event loop in which its turn comes. Its task
then ends though it was let through: what it was given, such as the only permission to compute, would be nobody's, and
all others would wait for ever. Trio's `ParkingLot` cannot meet this, as trio takes a cancelled task out of the lot at
once. asyncio runs a cancelled task in a later pass, so a gate hands back what the task was let through for.

======================== ===================================== =====================================================
event                    state of the waiter                   what happens
======================== ===================================== =====================================================
`admit`                  it waits, or will                     it is admitted, and goes on
`admit`                  it is admitted, or is leaving         nothing
`refuse`                 it waits, or will                     it goes on with the error
the task is cancelled    it waits                              it is leaving: `admit` passes it over
the task is cancelled    it is admitted, and has not gone on   `lost` is called, which may admit another one
======================== ===================================== =====================================================

For example, three tasks want one lamp::

    gate = Gate[str](lost=lambda name: hand_on())

    def hand_on() -> None:
        gate.admit_first()

    async def with_lamp(name: str) -> None:
        with gate.stand(name) as waiter:
            await waiter.wait(until_s)
        ...
        hand_on()

"a" has the lamp, and "b" and "c" stand at the gate. "a" hands on: "b" is admitted. Before the task of "b" runs, it is
cancelled; leaving the block calls ``lost("b")``, and "c" has the lamp.

What not to do: set the result of a future, and take for granted that somebody receives it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from math import inf
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Waiter:
    """A coroutine that waits, or is about to, until it is admitted or refused.

    Attributes:
        is_admitted: True if it was admitted and has not gone on since.
    """

    __slots__ = ("_future", "_refusal", "is_admitted")

    def __init__(self) -> None:
        self.is_admitted = False
        self._future: asyncio.Future[None] | None = None
        self._refusal: BaseException | None = None

    @property
    def is_leaving(self) -> bool:
        """True if the wait was cancelled, or its deadline has passed."""
        return self._future is not None and self._future.cancelled()

    def admit(self) -> None:
        """Have the coroutine go on, now or as soon as it waits."""
        if not (self.is_admitted or self.is_leaving):
            self.is_admitted = True
            self._go_on()

    def refuse(self, error: BaseException) -> None:
        """Have the coroutine raise an error, now or as soon as it waits."""
        if not (self.is_admitted or self.is_leaving):
            self._refusal = error
            self._go_on()

    def forget(self) -> None:
        """Forget an admission that came while the coroutine did not wait."""
        self.is_admitted = False

    async def wait(self, until_s: float = inf) -> None:
        """Return once admitted.

        Raises:
            TimeoutError: it was not before `until_s`, in the event loop's time.
        """
        if not self.is_admitted and self._refusal is None:
            self._future = asyncio.get_running_loop().create_future()
            if until_s == inf:
                await self._future
            else:
                async with asyncio.timeout_at(until_s):
                    await self._future
            self._future = None
        if self._refusal is not None:
            error, self._refusal = self._refusal, None
            try:
                raise error
            finally:
                del error  # its traceback leads to this frame, and that would be a cycle
        self.is_admitted = False

    def _go_on(self) -> None:
        if self._future is not None and not self._future.done():
            self._future.set_result(None)


class Gate(Generic[K]):
    """The coroutines that wait for one thing, by keys, in the order in which they came.

    Args:
        lost: takes the key of a waiter that left although it was admitted; None if nothing is given with an admission.
    """

    __slots__ = ("_lost", "_waiters")

    def __init__(self, lost: Callable[[K], object] | None = None) -> None:
        self._lost = lost
        self._waiters: dict[K, Waiter] = {}

    def __len__(self) -> int:
        return len(self._waiters)

    def __contains__(self, key: K) -> bool:
        return key in self._waiters

    def __iter__(self) -> Iterator[K]:
        return iter(self._waiters)

    def admit(self, key: K) -> None:
        """Let a waiter through."""
        self._waiters[key].admit()

    def admit_first(self) -> K | None:
        """Let the first one through that still waits, and return its key; None if there is none."""
        for key, waiter in self._waiters.items():
            if not (waiter.is_admitted or waiter.is_leaving):
                waiter.admit()
                return key
        return None

    @contextmanager
    def stand(self, key: K) -> Iterator[Waiter]:
        """Be one of the waiters inside the block, of which no other has the same key."""
        waiter = self._waiters[key] = Waiter()
        try:
            yield waiter
        finally:
            del self._waiters[key]
            if waiter.is_admitted and self._lost is not None:
                self._lost(key)
