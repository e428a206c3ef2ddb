"""Places in line of enqueues and dequeues, and copies of elements on a thread.

To copy a large element takes tens of milliseconds, for which event loops have better use. So a place stays in line
while its elements are copied: later places do not overtake it, and a place that gives up has put nothing in and taken
nothing. A put copies first and then waits; a take waits and then copies, and is served when that is done:

=======  =======================================  =================================================================
stage    a put                                    a take
=======  =======================================  =================================================================
WAITING  for room                                 for elements
COPYING  the elements that it was given           the elements in its hand, which for others are in the queue still
MADE                                              its elements leave the queue
=======  =======================================  =================================================================
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

from asyncflow.state.waiting.awaiting import granted
from asyncflow.state.waiting.lines import PlaceInLine
from asyncflow.values import Value

if TYPE_CHECKING:
    from asyncflow.state.elements.element_orders import Element
    from asyncflow.state.elements.queue import QueueState
    from asyncflow.state.elements.taken import Taken


class Stage(enum.Enum):
    """Progress of a place that copies."""

    WAITING = "waiting"
    COPYING = "copying"
    MADE = "made"


class QueuePlace(PlaceInLine):
    """A place in line of an enqueue or dequeue.

    Attributes:
        count: of elements.
        add: puts the elements in; None for a dequeue.
        or_fewer: take the remaining elements, if there will never be enough.
        is_refused: the queue was closed meanwhile, and the wait is over.
        is_beside: the place belongs to a coroutine of the application, and to no run.
        taken: elements taken by the same run, which count as used once it has put an element in; None for a coroutine.
        stage: see the table.
    """

    stage = Stage.WAITING

    __slots__ = ("add", "count", "is_beside", "is_refused", "or_fewer", "taken")

    def __init__(
        self,
        state: QueueState,
        what: str,
        finish: Callable[..., Value],
        count: int,
        add: Callable[[], object] | None = None,
        *,
        or_fewer: bool = False,
        taken: Taken | None = None,
    ) -> None:
        super().__init__(state, what, finish)
        self.count = count
        self.add = add
        self.or_fewer = or_fewer
        self.is_refused = False
        self.is_beside = False
        self.taken = taken


async def granted_beside(found: Value | PlaceInLine) -> Value:
    """As `granted`, for a coroutine of the application's."""
    if isinstance(found, QueuePlace):
        found.is_beside = True
    return await granted(found)


class CopyingPlace(QueuePlace):
    """A place in line of a firing that copies elements, on a thread where they are large.

    Attributes:
        work: makes the copies, and of a put what puts them in; None where none is to be begun.
        made: the result of a take, once it is made.
        error: why there are no copies.
    """

    works = True

    __slots__ = ("_start", "error", "is_asked_later", "made", "stage", "work")

    def __init__(
        self,
        state: QueueState,
        what: str,
        finish: Callable[..., Value],
        count: int,
        *,
        puts: Callable[[], Callable[[], object]] | None = None,
        or_fewer: bool = False,
        taken: Taken | None = None,
    ) -> None:
        add = None if puts is None else _not_made
        super().__init__(state, what, finish, count, add, or_fewer=or_fewer, taken=taken)
        self.work: Callable[[], object] | None = puts
        self.is_asked_later = puts is None  # else copying must start first
        self.stage = Stage.WAITING if puts is None else Stage.COPYING
        self.made: Value = None
        self.error: BaseException | None = None
        self._start: Callable[[Callable[[], None]], None] | None = None

    def copy(self, taken: Sequence[Element]) -> None:
        """Has the result made of elements, under the lock."""
        finish, self.finish, self.is_called = self.finish, _as_it_is, False
        self.stage, self.work = Stage.COPYING, partial(finish, taken)
        self.is_asked_later = False

    def do_beside(self, start: Callable[[Callable[[], None]], None]) -> None:
        """See `PlaceInLine.do_beside`."""
        self._start = start
        self._begin()

    def _begin(self) -> None:
        if self._start is not None and self.work is not None:
            work, self.work = self.work, None
            self._start(partial(self._do, work))

    def _do(self, work: Callable[[], object]) -> None:
        made: object = None
        error: BaseException | None = None
        try:
            made = work()
        except BaseException as raised:
            error = raised.with_traceback(raised.__traceback__ and raised.__traceback__.tb_next)
        cast("QueueState", self.state).copied(self, made, error)

    def claim(self) -> Value:
        """See `PlaceInLine.claim`."""
        result = super().claim()
        self._begin()
        return result


def _not_made() -> None:
    raise AssertionError("it has no copies yet")


def _as_it_is(found: Value) -> Value:
    return found
