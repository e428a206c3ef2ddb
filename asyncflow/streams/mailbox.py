"""How results cross from a stream's thread to the event loop: in batches, one wake-up each."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable


class Mailbox:
    """Completions of one stream on their way to one loop.

    Waking a loop costs a system call and two thread switches, so a wake-up that has been sent and not yet answered
    stands for every completion that follows it. `collect` clears ``_waking`` *before* it looks at the queue: a
    completion that came too late to be seen therefore finds the flag clear, and sends its own wake-up.
    """

    __slots__ = ("_completions", "_waking", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._completions: deque[Callable[[], object]] = deque()
        self._waking = False

    def post(self, completion: Callable[[], object]) -> None:
        """Have ``completion()`` called on the loop; from the stream's thread.

        On a closed loop the completion is dropped without a word. That is by design: whoever awaited it went with
        the loop, `asyncio.run` has cancelled and reported the run already, and the only thing left to say would be
        an "Event loop is closed" traceback in the user's terminal at exit.
        """
        if self.loop.is_closed():
            self._completions.clear()
            return
        self._completions.append(completion)
        self._wake()

    def collect(self) -> None:
        """Deliver what has come so far; on the loop's thread.

        A completion that raises reaches the loop's exception handler, and the rest is delivered by another wake-up.
        """
        self._waking = False
        completions = self._completions
        try:
            # Only what is here now: a fast stream must not hold the loop for ever. The rest has its own wake-up.
            for _ in range(len(completions)):
                completions.popleft()()
        finally:
            if completions:
                self._wake()

    def _wake(self) -> None:
        if self._waking:
            return
        self._waking = True
        try:
            self.loop.call_soon_threadsafe(self.collect)
        except RuntimeError:
            if not self.loop.is_closed():
                raise
            self._completions.clear()
