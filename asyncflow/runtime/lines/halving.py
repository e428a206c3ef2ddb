"""What fails for several is computed again in halves, until the member at fault is alone.

A call for several members may fail because memory is short, because one member is at fault, or because a result of one
has another shape. Nobody can tell from the error which it was. So both halves are computed by themselves: in `log2(n)`
further calls for the one at fault, all others have their results.

For example, of five members the fourth fails: calls are for 0-4, 0-2, 3-4, 3, 4.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def halves(members: Sequence[T]) -> list[Sequence[T]]:
    """Return both halves of some members, the first of which is no smaller; without one that would be empty."""
    middle = (len(members) + 1) // 2
    return [part for part in (members[:middle], members[middle:]) if len(part)]


async def in_halves(
    whole: Sequence[T],
    compute: Callable[[Sequence[T]], Awaitable[R]],
    failed: Callable[[Sequence[T], Exception], Sequence[T]],
) -> list[R]:
    """Compute members together, or, where that fails, in halves; return what each call gave, in their order.

    Args:
        whole: the members.
        compute: computes some of them.
        failed: takes members that have failed, and returns those of them to be computed in halves: none if there was
            only one, or if computing again does harm, which it has dealt with then.
    """
    found: list[R] = []
    to_do = [whole]
    del whole  # memory may be short: what is to be done again stands there once
    while to_do:
        part = to_do.pop()
        failure: Exception | None = None
        try:
            found.append(await compute(part))
        except Exception as error:
            failure = error
        if failure is not None:
            part = failed(part, failure)
            del failure  # and what its frames hold, which would be the context of the next one
            to_do += reversed(halves(part))
    return found
