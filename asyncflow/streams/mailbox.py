"""Results cross from a stream's thread to the event loop in batches, with one wake-up each."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from asyncflow.streams.handover import Handover, handover_of

Item = TypeVar("Item")


@dataclass(slots=True, eq=False, repr=False)
class Mailbox(Generic[Item]):
    """Completions of one stream on their way to one loop.

    Waking a loop costs a system call and two thread switches, so an unanswered wake-up stands for every completion that
    follows. `collect` clears ``_waking`` *before* reading the queue. A completion that comes too late to be seen
    therefore finds the flag clear, and sends its own wake-up.

    Attributes:
        loop: where items are delivered.
        deliver: called with each item, on the loop.
        discard: called instead once the loop is closed.
        expected: number of items that the loop makes way for, in case it is busy all the while.
    """

    loop: asyncio.AbstractEventLoop
    deliver: Callable[[Item], object]
    discard: Callable[[Item], object]
    expected: int = 0
    _items: deque[Item] = field(default_factory=deque)
    _waking: bool = False
    _handover: Handover = field(init=False)

    def __post_init__(self) -> None:
        self._handover = handover_of(self.loop)

    def expect(self) -> None:
        """Expect one more item; on the loop's thread."""
        self.expected += 1
        self._handover.expect(self.loop)

    def forget(self) -> None:
        """Expect one item less, if any; on the loop's thread."""
        if self.expected:
            self.expected -= 1
            self._handover.arrived()

    def post(self, *items: Item) -> None:
        """Have the items delivered on the loop, in order; from the stream's thread.

        On a closed loop they are discarded without a word. That is by design: the awaiting tasks went with the loop,
        and `asyncio.run` has cancelled and reported the run already. The only message left would be an "Event loop is
        closed" traceback in the user's terminal at exit.
        """
        self._items.extend(items)
        self._wake()

    def collect(self) -> None:
        """Deliver the items that have come so far; on the loop's thread.

        A delivery that raises reaches the loop's exception handler, and the rest is delivered by another wake-up.
        """
        self._waking = False
        items = self._items
        try:
            # Only items that have arrived by now: a fast stream must not hold the loop for ever. Later items wake it
            # again.
            for _ in range(len(items)):
                item = items.popleft()
                self.forget()
                self.deliver(item)
        finally:
            if items:
                self._wake()

    def settle(self) -> None:
        """Deliver the items that have come if this is their loop; discard them if their loop is closed."""
        if self.loop.is_closed():
            self._empty()
        elif asyncio.get_running_loop() is self.loop:
            self.collect()

    def _wake(self) -> None:
        if not self._waking:
            self._waking = True
            try:
                self.loop.call_soon_threadsafe(self.collect)
            except RuntimeError:
                if not self.loop.is_closed():
                    raise
        if self.loop.is_closed():
            self._empty()

    def _empty(self) -> None:
        """Discard all; two threads may be at it."""
        while True:
            try:
                item = self._items.popleft()
            except IndexError:
                return
            self.discard(item)
