"""Functions with limits whose calls wait for one another for ever.

A call has a slot (`max_concurrency`) until the function returns. If the function awaits a run that calls a second
function, it has its slot until that call has had its turn. An example: `a` and `b` have one slot each, and each awaits
a run that calls the other one.

1. A run calls `a`, which takes the slot of `a`. Another run calls `b`, which takes the slot of `b`.
2. `a` asks for a run that calls `b`. This call waits in the line of `b`. `b` may still return, so all is well.
3. `b` asks for a run that calls `a`. This call would wait in the line of `a`: every slot of `a` is held by an attempt
   that waits for `b`, and every slot of `b` by an attempt that waits for `a`. No event can end that.

The last call to come closes the cycle, and gets the error. So only a call inside an attempt has to look, before it
waits. An attempt with a `timeout=` ends by itself, as does a run with a deadline: neither counts as stuck. A run that a
function asks for counts as awaited by the function, also if it is a task of its own. The function may await the task
later, and no event tells of that: a cycle that is closed by such an await would hang without an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol


class HasSlots(Protocol):
    """A function with limits, of one session."""

    name: str
    loop: asyncio.AbstractEventLoop
    attempts: set[BegunAttempt]

    @property
    def is_full(self) -> bool:
        """True if every slot is taken."""


@dataclass(slots=True, eq=False)
class Wait:
    """A call that waits in the line of `function`."""

    function: HasSlots


@dataclass(slots=True, eq=False)
class BegunAttempt:
    """An attempt of a function: for giving its slot back, and for the runs that the function asks for.

    Attributes:
        function: called by the attempt.
        ends: True if a timeout of the attempt, or the deadline of its run, ends it.
        is_over: True if it has given back its slot.
        is_left: True if its thread goes on although no call waits for it.
        waits: calls inside the attempt that wait for their turn, without a deadline.
    """

    function: HasSlots
    ends: bool = False
    is_over: bool = False
    is_left: bool = False
    waits: set[Wait] = field(default_factory=set)


@contextmanager
def waiting(function: HasSlots, within: Iterable[BegunAttempt]) -> Iterator[None]:
    """Count a call of `function` as waiting for its turn, in the attempts that it is part of.

    Raises:
        RuntimeError: the call would close a cycle.
    """
    # Skip attempts of sessions on other event loops, which change on other threads.
    around = [each for each in within if not each.is_over and each.function.loop is function.loop]
    wait = Wait(function)
    for attempt in around:
        attempt.waits.add(wait)
    try:
        stuck = _stuck_functions(function) if around else []
        if stuck:
            names = " and ".join(each.name for each in stuck)
            raise RuntimeError(
                f"this call of {function.name} would wait for ever: all calls that max_concurrency= of {names} allows "
                "await runs that call these functions again; allow more calls, or give one of them a timeout="
            )
        yield
    finally:
        for attempt in around:
            attempt.waits.discard(wait)


def _stuck_functions(function: HasSlots) -> list[HasSlots]:
    """Return the functions that wait for one another, `function` first; none if its calls can go on."""
    stuck = [function]
    for each in stuck:  # which grows meanwhile
        waited = (wait.function for attempt in each.attempts for wait in attempt.waits)
        stuck += [other for other in dict.fromkeys(waited) if other not in stuck]
    before = 0
    while len(stuck) != before:
        before = len(stuck)
        stuck = [each for each in stuck if each.is_full and all(_waits_for(x, stuck) for x in each.attempts)]
    return stuck if function in stuck else []


def _waits_for(attempt: BegunAttempt, stuck: list[HasSlots]) -> bool:
    return not attempt.ends and any(wait.function in stuck for wait in attempt.waits)
