"""A call that fails for several members is made again for halves of them, until the member at fault is alone.

A call may fail because memory is short, because one member is at fault, or because its result has another shape. The
error does not tell which member it was. So both halves are called, each by itself. All other members have their results
after about `2 * log2(n)` further calls.

For example, of five members the fourth fails: calls are for 0-4, 0-2, 3-4, 3, 4.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def halves(members: Sequence[T]) -> list[Sequence[T]]:
    """Return both halves of the members, the larger one first; leave out an empty one."""
    middle = (len(members) + 1) // 2
    return [part for part in (members[:middle], members[middle:]) if len(part)]


async def in_halves(
    whole: Sequence[T],
    compute: Callable[[Sequence[T]], Awaitable[R]],
    failed: Callable[[Sequence[T], Exception], Sequence[T]],
) -> list[R]:
    """Compute members together, or in halves if that fails; return the results of the calls, in order.

    Args:
        whole: the members.
        compute: computes some of them.
        failed: takes members whose call has failed; returns the members to compute in halves. It returns none, and
            tells the members, if there was one only, or if computing again does harm.
    """
    found: list[R] = []
    to_do = [whole]
    del whole  # memory may be short: keep only one reference to members to compute again
    while to_do:
        part = to_do.pop()
        failure: Exception | None = None
        try:
            found.append(await compute(part))
        except Exception as error:
            failure = error
        if failure is not None:
            part = failed(part, failure)
            del failure  # else it would be the next failure's context, and its frames would stay alive
            to_do += reversed(halves(part))
    return found
