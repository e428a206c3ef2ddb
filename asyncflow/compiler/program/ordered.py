"""Topological order: each item behind the items that it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from asyncflow.errors import InternalError

T = TypeVar("T")


def ordered(things: Iterable[T], needs: Callable[[T], Iterable[T]]) -> list[T]:
    """Return `things`, each behind the things that it `needs`, which move forward if necessary."""
    present = dict.fromkeys(things)
    done: dict[T, None] = {}
    begun: set[T] = set()
    for first in present:
        stack = [first]
        while stack:
            missing = [each for each in needs(stack[-1]) if each in present and each not in done]
            if not missing:
                done.setdefault(stack.pop())
            elif stack[-1] in begun:
                raise InternalError(f"{stack[-1]!r} waits for itself by way of {', '.join(map(repr, missing))}")
            else:
                begun.add(stack[-1])
                stack += missing
    return list(done)
