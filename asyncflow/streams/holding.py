"""A user's function that occupies a thread of a session, and the waits that are forbidden to it.

Such a function can ask for another run of its session and wait for it. A run that then queues for the session's threads
may queue behind the function itself, or behind another function that waits in the same way: a deadlock. Context
variables record which function and which run asked for a run, as they follow every way into an event loop. They also
follow tasks that go on after the run that began them has ended; such tasks no longer count as part of it.
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
    """A receiver of items that a run hands out."""

    def offer(self, values: tuple[Value, ...], taken: Callable[[], None]) -> None:
        """Keeps `values` until they are taken, then calls `taken`."""


@dataclass(slots=True, eq=False)
class RunPart:
    """A run, as seen by the runs and calls that it asks for.

    Attributes:
        owner: anything that all runs of its session have in common.
        outer: the run that it is part of; None if it is part of none.
        is_over: nothing is part of it any more.
        deadline_s: when it has to have ended, in its event loop's time.
        priority: among waiting runs, lower values go first.
        emitter: receives the items of a run that streams; None for other runs.
        run: its number in traces.
        trace: the trace that the run is recorded into; None without one.
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
        """Return the wait for the run's place if the run has given it away; None if the run can go on."""
        return None if self.back is None else self.back()


_part: ContextVar[RunPart | None] = ContextVar("asyncflow_part", default=None)
"""The run that started the current code; it may be over."""

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
    """Count the current task of a run as waiting for other runs; ``describe()`` says for which."""
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
    """Return True if the current context belongs to an unfinished run of `owner`."""
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
    """Return True if a function that occupies a thread of the same session asked for the run."""
    part = context.get(_part)
    holds = context.get(_holds, ())
    return part is not None and holds != () and any(hold.owner is part.owner for hold in holds)


def refuse_to_queue(context: Context) -> None:
    """Raise if work in `context` would queue for a thread and could deadlock.

    Raises:
        RuntimeError: a function that has a thread of this session asked for the run.
    """
    if may_wait_for_itself(context):
        raise RuntimeError(
            "a function on a thread of the session asked for this run, which needs a thread of the session too: it "
            "might wait for itself, for ever; make that function a coroutine (async def) that awaits session.run(...), "
            "put the nodes of that run into its own graph, or use another session"
        )
