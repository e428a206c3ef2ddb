"""A user's function that has a thread of a session to itself, and what it may not wait for meanwhile.

Such a function can ask for another run of its session and wait for it. A run that then queues for the session's threads
may queue behind the function itself, or behind another that waits just so: nobody would ever go on. Which run was asked
for by which function is known by context variables, as these go along with every way into an event loop.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import Context, ContextVar
from typing import TypeVar, TypeVarTuple, Unpack

_Args = TypeVarTuple("_Args")
_Result = TypeVar("_Result")

_owner: ContextVar[object] = ContextVar("asyncflow_owner", default=None)
"""Whose run this is: anything that all runs of a session have in common."""


class Hold:
    """A function's hold of a thread.

    Attributes:
        owner: whose run it is part of; None before it has begun and once it has ended.
        has_asked: it has asked for a run. On the event loop's own thread it would wait for ever for what it holds up,
            however short its waits were so far.
    """

    __slots__ = ("has_asked", "owner")

    def __init__(self) -> None:
        self.owner: object = None
        self.has_asked = False


_holds: ContextVar[tuple[Hold, ...]] = ContextVar("asyncflow_holds", default=())


def own_context(owner: object) -> None:
    """Says whose run the current context is of."""
    _owner.set(owner)


def is_within(owner: object) -> bool:
    """Whether the current context is of one of its runs."""
    return _owner.get() is owner


def holding(hold: Hold, work: Callable[[Unpack[_Args]], _Result], *args: *_Args) -> _Result:
    """``work(*args)`` for a user's function on a session's thread; in a copy of its run's context, which it changes."""
    hold.owner = _owner.get()
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
    owner = context.get(_owner)
    return owner is not None and any(hold.owner is owner for hold in context.get(_holds, ()))


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


__all__ = ["Hold", "holding", "is_within", "may_wait_for_itself", "note_ask", "own_context", "refuse_to_queue"]
