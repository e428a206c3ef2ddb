"""`Taken`: the elements that a run has taken from queues and inputs, and gives back if it ends early.

A run that is cancelled has no caller that could handle an element, so the element goes back to its place. That is safe
only while nothing outlasts the run that may depend on the element: a variable that was assigned, an element that was
put elsewhere, a call of the user's function. So such effects call `Taken.keep`, and everything taken before counts as
used. For example, a run takes x, then waits for y; cancelled there, it gives x back. A run that takes x, assigns it to
a variable and then waits for y gives nothing back: x would be handled twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import TypeAlias

from asyncflow.errors import DeadlineExceeded, EndOfInput, QueueClosedError, SessionClosedError
from asyncflow.state.elements.element_orders import Element

MOST_ELEMENTS = 1_000
"""Number of elements that a run remembers at most, of its last take aside."""

MOST_BYTES = 64 << 20
"""Bytes that these elements have at most."""


GivenBack: TypeAlias = Callable[[Sequence[Element], object], None]
"""``give_back(elements, where)`` puts elements back to their places."""


class Taken:
    """The elements that a run has taken since the last effect of it that outlasts the run.

    One thread at a time uses it: the event loop's, or the thread of a firing of the run.

    Attributes:
        count: number of these elements.
    """

    __slots__ = ("_nbytes", "_takes", "count")

    def __init__(self) -> None:
        self._takes: list[tuple[GivenBack, Sequence[Element], object]] = []
        self.count = self._nbytes = 0

    def add(self, source: GivenBack, elements: Sequence[Element], where: object) -> None:
        """Remember elements that were taken just now, and from where.

        Earlier elements count as used where there are too many to remember: a loop may take any number.
        """
        nbytes = 0
        for element in elements:
            for value in element:
                nbytes += getattr(value, "nbytes", 0)
        if self.count + len(elements) > MOST_ELEMENTS or self._nbytes + nbytes > MOST_BYTES:
            self.keep()
        self.count += len(elements)
        self._nbytes += nbytes
        self._takes.append((source, elements, where))

    def keep(self) -> None:
        """Count all elements as used."""
        self._takes.clear()
        self.count = self._nbytes = 0

    def give_back(self) -> None:
        """Give all elements back to where they came from, the last ones first."""
        while self._takes:
            give_back, elements, where = self._takes.pop()
            give_back(elements, where)
        self.keep()

    def settle(self, error: BaseException | None) -> None:
        """Give the elements back if the run ended early, with this error; else count them as used.

        A kernel that fails has used them: were an element back in its place, the next run would fail as well, for ever.
        """
        if isinstance(error, _ENDS_EARLY):
            self.give_back()
        else:
            self.keep()


_ENDS_EARLY = (asyncio.CancelledError, DeadlineExceeded, SessionClosedError, QueueClosedError, EndOfInput)

_taken: ContextVar[Taken | None] = ContextVar("asyncflow_taken", default=None)

current_taken: Callable[[], Taken | None] = _taken.get
"""Gives what the run that the current context is of has taken; None outside of runs that take anything."""

own_taken: Callable[[Taken | None], object] = _taken.set
"""Says that the current context is of the run which has taken this."""
