"""Things in an order in which each stands behind what it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from asyncflow.errors import InternalError

T = TypeVar("T")


def ordered(things: Iterable[T], needs: Callable[[T], Sequence[T]]) -> list[T]:
    """`things`, each behind what it `needs`, which comes earlier than it stands if it has to."""
    done: dict[T, None] = {}
    begun: set[T] = set()
    for first in things:
        stack = [first]
        while stack:
            missing = [each for each in needs(stack[-1]) if each not in done]
            if not missing:
                done.setdefault(stack.pop())
            elif stack[-1] in begun:
                raise InternalError(f"{stack[-1]!r} waits for itself by way of {', '.join(map(repr, missing))}")
            else:
                begun.add(stack[-1])
                stack += missing
    return list(done)
