"""A user's function that has a thread of a session to itself, and what it may not wait for meanwhile.

Such a function can ask for another run of its session and wait for it. A run that then queues for the session's threads
may queue behind the function itself, or behind another that waits just so: nobody would ever go on. Which run was asked
for by which function, and by which run, is known by context variables, as these go along with every way into an event
loop; also with tasks that go on when the run that began them has ended, and are then part of it no more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar
from dataclasses import dataclass, field
from math import inf
from typing import Protocol, TypeVar, TypeVarTuple, Unpack

from asyncflow.values import Value

_Args = TypeVarTuple("_Args")
_Result = TypeVar("_Result")


class TakesItems(Protocol):
    """Where a run hands out items."""

    def offer(self, values: tuple[Value, ...], taken: Callable[[], None]) -> None:
        """Keeps `values` until they are taken, then calls `taken`."""


@dataclass(slots=True, eq=False)
class RunPart:
    """A run, for what is asked for inside it.

    Attributes:
        owner: anything that all runs of its session have in common.
        outer: the run that it is part of; None if it is part of none.
        is_over: nothing is part of it any more.
        deadline_s: when it has to have ended, in its event loop's time.
        priority: of those that wait for others, lower ones go first.
        emitter: takes what it hands out while it goes on; None for one that hands out nothing.
        run: its number in traces.
        trace: what it is recorded into; None if it is not.
        in_line: tasks of it that wait for other runs, and functions that say what for.
        on_wait: is called when one of them begins to.
        back: gives None if the run has its place in the session, and else waits for it; None if it never gives it away.
    """

    owner: object
    outer: RunPart | None
    is_over: bool = False
    deadline_s: float = inf
    priority: int = 0
    emitter: TakesItems | None = None
    run: int = 0
    trace: object = None
    in_line: dict[asyncio.Task[object], Callable[[], str]] = field(default_factory=dict)
    on_wait: Callable[[], None] | None = None
    back: Callable[[], Awaitable[None] | None] | None = None

    def coming_back(self) -> Awaitable[None] | None:
        """Return the wait for the place of the run, if it has given it away; None if it can go on."""
        return None if self.back is None else self.back()


_part: ContextVar[RunPart | None] = ContextVar("asyncflow_part", default=None)
"""The run that began what runs here; it may be over."""

own_context: Callable[[RunPart], object] = _part.set
"""Says which run the current context is of."""


@dataclass(slots=True, eq=False)
class ThreadHold:
    """A function's hold of a thread.

    Attributes:
        owner: whose run it is part of; None before it has begun and once it has ended.
        has_asked: it has asked for a run. On the event loop's thread it would block the very run that it waits for,
            however short its waits were so far.
    """

    owner: object = None
    has_asked: bool = False


_holds: ContextVar[tuple[ThreadHold, ...]] = ContextVar("asyncflow_holds", default=())


def current_part() -> RunPart | None:
    """The innermost run that has not ended and that the current context is of."""
    part = _part.get()
    while part is not None and part.is_over:
        part = part.outer
    return part


def enclosing_parts() -> frozenset[RunPart]:
    """All runs that have not ended and that the current context is of, in whatever session."""
    found = []
    part = current_part()
    while part is not None:
        if not part.is_over:
            found.append(part)
        part = part.outer
    return frozenset(found)


@contextmanager
def in_line(describe: Callable[[], str] = str) -> Iterator[None]:
    """Have the current task, of a run, count as one that waits for other runs; ``describe()`` says what for."""
    part, task = current_part(), asyncio.current_task()
    if part is None or task is None:
        yield
        return
    part.in_line[task] = describe
    try:
        if part.on_wait is not None:
            part.on_wait()
        yield
    finally:
        part.in_line.pop(task, None)


def is_within(owner: object) -> bool:
    """Whether the current context is of one of its runs that has not ended."""
    return _part.get() is not None and any(part.owner is owner for part in enclosing_parts())


def holding(hold: ThreadHold, work: Callable[[Unpack[_Args]], _Result], *args: *_Args) -> _Result:
    """``work(*args)`` for a user's function on a session's thread; in a copy of its run's context, which it changes."""
    part = _part.get()
    hold.owner = None if part is None else part.owner
    _holds.set((*(earlier for earlier in _holds.get() if earlier.owner is not None), hold))
    try:
        return work(*args)
    finally:
        hold.owner = None


def note_ask() -> None:
    """Tells the functions that the current context comes from that they have asked for a run."""
    for hold in _holds.get():
        hold.has_asked = True


def may_wait_for_itself(context: Context) -> bool:
    """Whether a run was asked for by a function that has a thread of the same session, still."""
    part = context.get(_part)
    holds = context.get(_holds, ())
    return part is not None and holds != () and any(hold.owner is part.owner for hold in holds)


def refuse_to_queue(context: Context) -> None:
    """Raises if work in `context` would queue for a thread, and nobody knows whether that can end.

    Raises:
        RuntimeError: a function that has a thread of this session asked for the run.
    """
    if may_wait_for_itself(context):
        raise RuntimeError(
            "a function on a thread of the session asked for this run, which needs a thread of the session too: it "
            "might wait for itself, for ever; make that function a coroutine (async def) that awaits session.run(...), "
            "put what it runs into its own graph, or use another session"
        )
