"""`Gate`: coroutines of a session wait here for each other, and no turn gets lost when a coroutine is cancelled.

A coroutine may be cancelled, or pass its deadline, in the very pass of the event loop in which its turn comes. Its task
then ends although it has the turn. If the turn were lost, all other coroutines would wait for ever. Trio's `ParkingLot`
cannot meet this, because trio takes a cancelled task out of the lot at once. asyncio runs a cancelled task in a later
pass, so a gate tells its owner of the turn that was not used.

A waiter is admitted or refused once, now or as soon as it waits. A leaving waiter, because its task was cancelled or
its deadline has passed, is passed over. If it was admitted before it left, `lost` is called, which may admit another.

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

What not to do: set the result of a future, and take for granted that its waiter receives it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from math import inf
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Waiter:
    """A coroutine that waits, or is about to wait, until it is admitted or refused.

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
            try:
                if until_s == inf:
                    await self._future
                else:
                    async with asyncio.timeout_at(until_s):
                        await self._future
            finally:
                self._future = None  # else a later admission would be lost
        if self._refusal is not None:
            error, self._refusal = self._refusal, None
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame: avoid a cycle
        self.is_admitted = False

    def _go_on(self) -> None:
        if self._future is not None and not self._future.done():
            self._future.set_result(None)


class Gate(Generic[K]):
    """The coroutines that wait for one thing, by keys, in the order in which they came.

    Args:
        lost: takes the key of a waiter that left although it was admitted; None if an admission is worth nothing.
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
        """Let the first waiter through that still waits; return its key, or None without any."""
        for key, waiter in self._waiters.items():
            if not (waiter.is_admitted or waiter.is_leaving):
                waiter.admit()
                return key
        return None

    @contextmanager
    def stand(self, key: K) -> Iterator[Waiter]:
        """Stand at the gate inside the block, under a key that no other waiter has."""
        waiter = self._waiters[key] = Waiter()
        try:
            yield waiter
        finally:
            del self._waiters[key]
            if waiter.is_admitted and self._lost is not None:
                self._lost(key)
