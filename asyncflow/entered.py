"""Stacks of the objects that a task or thread has entered with ``with`` and not yet left."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Generic, TypeVar

T = TypeVar("T")


class Entered(Generic[T]):
    """A stack of each context's own; a task begins with that of the task that made it.

    Tokens of context variables would not do: what one task enters, another may leave, as the hooks of servers for
    start-up and shutdown do, and an `AsyncExitStack` that is handed on.
    """

    __slots__ = ("_stack",)

    def __init__(self, name: str) -> None:
        self._stack: ContextVar[tuple[T, ...]] = ContextVar(name, default=())

    def innermost(self) -> T | None:
        """The one entered last; None if nothing is entered."""
        stack = self._stack.get()
        return stack[-1] if stack else None

    def all(self) -> tuple[T, ...]:
        """All that is entered, innermost last."""
        return self._stack.get()

    def enter(self, item: T) -> None:
        """Adds an item, which may be there already."""
        self._stack.set((*self._stack.get(), item))

    def leave(self, item: T) -> None:
        """Takes away the innermost entry of `item`; nothing happens where it was not entered."""
        stack = self._stack.get()
        for place in range(len(stack) - 1, -1, -1):
            if stack[place] is item:
                self._stack.set(stack[:place] + stack[place + 1 :])
                return

    def leave_all(self) -> None:
        """Takes away everything."""
        self._stack.set(())
