"""`Ask`: the terms of one run, beside the values that it computes."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple

from asyncflow.errors import DeadlineExceeded

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from asyncflow.runtime.run.channel import Channel
    from asyncflow.runtime.run.run import Run
    from asyncflow.runtime.watch.trace import Trace


class Ask(NamedTuple):
    """The terms of one run, given by its caller, or by the batch or pool that it computes for.

    A tuple, as each run makes one: a frozen data class of ten fields takes twice as long.

    Attributes:
        asked_s: when, in the event loop's time.
        timeout: seconds since then until it has to have ended; None for no matter when.
        trace: what to record into.
        priority: among waiting runs, lower numbers go first.
        atomic: it is one step for others that touch the same states.
        emitter: takes streamed values.
        staying: indexes of fetched values that stay on their device.
        is_part: it is a part of the runs that it computes for, also while these are drained.
        name: as the trace shows it; without one, its number.
        on_end: called with the run at its end, which may be before the run has been returned.
    """

    asked_s: float
    timeout: float | None = None
    trace: Trace | None = None
    priority: int = 0
    atomic: bool = False
    emitter: Channel | None = None
    staying: Sequence[int] = ()
    is_part: bool = False
    name: str = ""
    on_end: Callable[[Run], None] | None = None

    @asynccontextmanager
    async def in_time(self, what: str, then: str = "it did not start") -> AsyncIterator[None]:
        """Raise DeadlineExceeded, which says `what` and `then`, if the block takes longer than the run may.

        Args:
            what: is not done.
            then: the consequence.
        """
        try:
            async with asyncio.timeout_at(None if self.timeout is None else self.asked_s + self.timeout):
                yield
        except TimeoutError:
            raise DeadlineExceeded(f"{what} within timeout={self.timeout} s; {then}") from None
