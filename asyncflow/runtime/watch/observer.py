"""`RunObserver` looks on while a session runs: it is told of every run and every call of a batched function.

Without one, a run costs nothing more. With some, they are told on the event loop, one after the other. What one raises
is logged the first time, and changes no run.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator
from contextlib import aclosing, contextmanager
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field
from operator import methodcaller
from typing import Final, Literal, NamedTuple, Protocol, TypeAlias, TypeVar
from weakref import ref

from asyncflow.errors import DeadlineExceeded, FeedError, OverloadedError, SessionClosedError, brief

RunStatus: TypeAlias = Literal["running", "ok", "invalid", "refused", "deadline", "cancelled", "error"]
"""``invalid``: its feeds do not fit. ``refused``: it did not start, as the session was busy or closed."""

Result = TypeVar("Result")
_log: Final = logging.getLogger("asyncflow.runtime")


@dataclass(slots=True, eq=False, weakref_slot=True)
class ObservedRun:
    """A run as observers see it; times are of ``time.perf_counter``, in seconds, or virtual ones.

    Attributes:
        label: the name of the first thing that it fetches.
        asked_s: when it was asked for.
        context: its context variables, a copy of its caller's: variables that an observer sets there hold in the
            coroutines of the run.
        started_s: when all that it needs was there; None if it never was.
        ended_s: when it ended, in whatever way.
        status: how.
        error: the exception, if it failed.
        retries: how often a function with ``retries=`` was called again for it.
    """

    label: str
    asked_s: float
    context: Context = field(default_factory=copy_context)
    started_s: float | None = None
    ended_s: float | None = None
    status: RunStatus = "running"
    error: BaseException | None = None
    retries: int = 0


class ObservedBatch(NamedTuple):
    """One call of a batched function; times are of ``time.perf_counter``, in seconds, or virtual ones.

    Attributes:
        function: its name in the graph.
        size: how many members it had.
        runs: theirs, one for each, as far as they were observed and have not ended before.
        started_s: when it started.
        ended_s: when its results were there, or it failed.
        error: the exception, if it failed.
    """

    function: str
    size: int
    runs: tuple[ObservedRun, ...]
    started_s: float
    ended_s: float
    error: BaseException | None = None


class RunObserver(Protocol):
    """Is told of runs. On the event loop, so none of these methods may wait or take long."""

    def run_began(self, run: ObservedRun) -> None:
        """A run was asked for."""

    def run_ended(self, run: ObservedRun) -> None:
        """Note the end of a run."""

    def batch_ended(self, batch: ObservedBatch) -> None:
        """A call of a batched function has ended."""

    def pool_stepped(self, function: str, size: int, steps: int) -> None:
        """Note that a pooled loop was stepped for `size` activations, `steps` times in one go."""


def check_observer(observer: object) -> None:
    """Raise TypeError for an object that lacks a method of a `RunObserver`."""
    wanted = [name for name in vars(RunObserver) if not name.startswith("_")]
    missing = [name for name in wanted if isinstance(observer, type) or not callable(getattr(observer, name, None))]
    if missing:
        rule = f"an observer of runs is an object with the methods {', '.join(wanted)}, as serving.RunObserver has them"
        raise TypeError(f"{rule}; got {type(observer).__name__} {brief(observer)}, without {', '.join(missing)}")


_current: ContextVar[Callable[[], ObservedRun | None]] = ContextVar("asyncflow_observed_run", default=lambda: None)
"""A weak reference to the run that is asked for here, or that this is part of.

A failed run has an error, whose traceback leads to the context with this variable: that would be a cycle.
"""


def status_of(error: BaseException | None) -> RunStatus:
    """Return the status of a run that raised this error."""
    match error:
        case None:
            return "ok"
        case FeedError():
            return "invalid"
        case OverloadedError() | SessionClosedError():
            return "refused"
        case DeadlineExceeded():
            return "deadline"
        case asyncio.CancelledError() | GeneratorExit():
            return "cancelled"
    return "error"


def start_observed(now_s: float) -> Context:
    """Return the context variables for a run that starts; note the time, unless it is part of a run that has started
    before.
    """
    run = _current.get()()
    if run is None or run.started_s is not None:
        return copy_context()
    run.started_s = now_s
    return run.context.copy()


def note_retry() -> None:
    """Count another attempt of a function for the run that the current context is of, if it is observed."""
    run = _current.get()()
    if run is not None:
        run.retries += 1


class Observers:
    """The observers of one session.

    Args:
        clock: gives nanoseconds; not the event loop's own, which uvloop's goes on by only once in a round.
    """

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock_ns = clock
        self._all: list[RunObserver] = []
        self._warned: set[int] = set()

    def now(self) -> float:
        """The time of an event."""
        return self._clock_ns() / 1e9

    def add(self, observer: RunObserver) -> Callable[[], None]:
        """Tell an observer from now on, until the returned function is called."""
        self._all.append(observer)

        def remove() -> None:
            if observer in self._all:
                self._all.remove(observer)

        return remove

    async def watch(self, label: str, work: Awaitable[Result]) -> Result:
        """Await a run, and tell observers of it."""
        with self._watched(label) as run:
            return await self._within(run, work)

    async def watch_stream(self, label: str, items: AsyncGenerator[Result, None]) -> AsyncGenerator[Result, None]:
        """Iterate over a stream, and tell observers of it."""
        with self._watched(label) as run:
            async with aclosing(items):
                while True:
                    try:
                        item = await self._within(run, anext(items))
                    except StopAsyncIteration:
                        return
                    yield item

    def batch_ended(
        self, function: str, contexts: Iterable[Context], taken_s: float, error: BaseException | None
    ) -> None:
        """Tells of a call of a batched function, for members with these context variables."""
        members = [context.get(_current) for context in contexts]
        runs = tuple(run for member in members if member is not None and (run := member()) is not None)
        now = self.now()
        batch = ObservedBatch(function, len(members), runs, now - taken_s, now, error)
        self._tell(lambda observer: observer.batch_ended(batch))

    def pool_stepped(self, function: str, size: int, steps: int) -> None:
        """Tells of steps of a pooled loop."""
        self._tell(lambda observer: observer.pool_stepped(function, size, steps))

    @contextmanager
    def _watched(self, label: str) -> Iterator[ref[ObservedRun]]:
        """Tell observers of a run requested inside the block, from beginning to end."""
        run = ObservedRun(label, self.now())
        run.context.run(_current.set, ref(run))
        self._tell(methodcaller("run_began", run))
        error: BaseException | None = None
        try:
            yield ref(run)
        except BaseException as raised:
            error = raised
            raise
        finally:
            run.ended_s = self.now()
            run.error, run.status = error, status_of(error)
            self._tell(methodcaller("run_ended", run))
            del run, error  # avoid a cycle: it has the error, whose traceback refers to this frame

    async def _within(self, run: ref[ObservedRun], work: Awaitable[Result]) -> Result:
        """Await the work that starts this run."""
        token = _current.set(run)
        try:
            return await work
        finally:
            if _current.get() is run:  # else the coroutine is dropped, in another context
                _current.reset(token)

    def _tell(self, what: Callable[[RunObserver], None]) -> None:
        for observer in tuple(self._all):
            try:
                what(observer)
            except (Exception, asyncio.CancelledError, GeneratorExit):
                if id(observer) not in self._warned:
                    self._warned.add(id(observer))
                    _log.warning(
                        "an observer of runs raised; this is said once, and runs go on: %r", observer, exc_info=True
                    )
