"""The calls of functions with limits: they wait for their turn, are stopped in time, and are tried again.

One `LimitedFunction` stands for one function in one session. A call is a coroutine of its run. It waits in line for a
slot (`max_concurrency`) and a token (`rate`), makes an attempt, and gives the slot back; between two attempts it has
none. A token comes back `period_s` after a call has taken it, so no more than `tokens` calls begin within any time of
that length. For example, with ``rate=(2, 1.0)`` calls that come together begin at 0, 0, 1, 1, 2 s, and so on.

The line goes by priority, then by deadline, then by arrival. A call without a deadline counts as due after
`PATIENCE_S`, and every priority gets its share, as in the other lines of a session. A call that is retried keeps its
first position in the line, before calls that came after it.

The first call of the line is told that it may go on, and then claims its slot and token by itself
(`asyncflow.state.waiting.lines`): a call whose run was cancelled meanwhile takes nothing from the next one. A run that
can only wait for its turn gives its place in the session to others. It has its place back before an attempt begins, so
`max_runs` holds for attempts too; ``max_runs="auto"`` gives no places to runs that wait or call. While a run waits for
its place, later calls may go first: the run that has the place may itself wait for a run inside it that calls.

What not to do: hand a slot to the next call when an attempt times out. A plain function cannot be stopped. Its thread
still works, so its slot is free when the thread returns and not before.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from contextvars import ContextVar
from functools import partial
from itertools import pairwise
from math import inf
from operator import add
from random import Random
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar, TypeVarTuple, Unpack, cast
from weakref import WeakKeyDictionary

from asyncflow.errors import in_attempt
from asyncflow.ops.user.limits import CallLimits, install_limited_calls
from asyncflow.runtime.executor.kernels.call_cycles import BegunAttempt, waiting
from asyncflow.runtime.lines.priority_line import PriorityLine
from asyncflow.runtime.lines.shares import PATIENCE_S
from asyncflow.runtime.watch.observer import note_retry
from asyncflow.state.waiting.awaiting import wake_on
from asyncflow.state.waiting.lines import NOT_YET, LinedState, PlaceInLine
from asyncflow.streams.beside import call_beside
from asyncflow.streams.holding import RunPart, current_part, in_line
from asyncflow.streams.latch import Latch
from asyncflow.streams.loop import clock_of, is_virtual

if TYPE_CHECKING:
    from asyncflow.values import Nest, Value

_Args = TypeVarTuple("_Args")
_Result = TypeVar("_Result")

_MOST_TOLD = 8
"""Errors of the last attempts that a call keeps, as each holds what the function did: a poll may fail for hours."""


class Attempt(NamedTuple):
    """An attempt of a call: when it began to wait for its turn, when it began, and how it ended."""

    asked_ns: int
    started_ns: int
    ended_ns: int
    status: str
    """``ok``, ``error`` or ``cancelled``."""


attempts_of: ContextVar[list[Attempt] | None] = ContextVar("asyncflow_attempts", default=None)
"""The attempts of the current firing, for its trace; None where it has none."""


_within: ContextVar[tuple[BegunAttempt, ...]] = ContextVar("asyncflow_limited_calls", default=())
"""The attempts that the current context is part of."""


class LimitStatistics(NamedTuple):
    """Calls of one function with limits: so far, and at this moment.

    Attributes:
        calls: number of calls that runs have asked for.
        attempts: number of times that the function was called for them.
        retries: number of attempts after a failed one.
        timeouts: number of attempts that took longer than `timeout`.
        failed: number of calls that failed for good.
        running: number of attempts under way, with those left behind.
        left_behind: of these, plain functions that go on though their attempt timed out or their run has ended.
        waiting: number of calls that wait for their turn.
        backing_off: number of calls that wait until they are tried again.
    """

    calls: int = 0
    attempts: int = 0
    retries: int = 0
    timeouts: int = 0
    failed: int = 0
    running: int = 0
    left_behind: int = 0
    waiting: int = 0
    backing_off: int = 0

    def plus(self, other: LimitStatistics) -> LimitStatistics:
        """Return the sums of both."""
        return LimitStatistics(*map(add, self, other))


class CallPlace(PlaceInLine):
    """The place of one call; lower `rank` first.

    Attributes:
        is_away: True while its run waits for its place in the session.
    """

    __slots__ = ("is_away", "priority", "rank")

    def __init__(self, state: LimitedFunction, what: str, priority: int, rank: tuple[float, int]) -> None:
        super().__init__(state, what, lambda _: ())
        self.priority, self.rank, self.is_away = priority, rank, False


class LimitedFunction(LinedState):
    """The line of one function in one session, and the slots and tokens that its calls hold; used on the event loop's
    thread alone.

    Invariant: a call is called while a slot and a token are free and calls wait.

    Args:
        limits: of the function; not kept, as the session knows the function by them.
        loop: of the session.
        seed: of the delays before retries; None for delays that differ between processes.
    """

    def __init__(self, limits: CallLimits, loop: asyncio.AbstractEventLoop, seed: int | None) -> None:
        super().__init__()
        self.name, self._slots, self._tokens = limits.name, limits.max_concurrency, limits.tokens
        self._period_s = limits.period_s
        self.loop, self._clock = loop, clock_of(loop)
        self._random = Random(None if seed is None else f"{seed} {limits.name}")
        self._line = PriorityLine[tuple[float, int], CallPlace]()
        self._called: CallPlace | None = None
        """The next call in line, for which a slot and a token are kept until it claims them."""
        self._begun_s: deque[float] = deque(maxlen=limits.tokens)
        """Times at which the last calls began; no more of them than there are tokens."""
        self._timer: asyncio.TimerHandle | None = None
        self._arrivals = 0
        self._counts: dict[str, int] = dict.fromkeys(LimitStatistics._fields, 0)
        self.attempts: set[BegunAttempt] = set()

    # -- the line ------------------------------------------------------------------------------------------------

    def places(self) -> list[PlaceInLine]:
        """See `LinedState.places`."""
        return list(self._line)

    def left(self, place: PlaceInLine) -> None:
        """See `LinedState.left`."""
        assert isinstance(place, CallPlace)
        if self._remove(place):
            self._settle()

    def claimed(self, place: PlaceInLine) -> object:
        """See `LinedState.claimed`."""
        assert isinstance(place, CallPlace)
        if place is not self._called:
            place.is_called = False
            return NOT_YET
        self._line.shares.took(place.priority, 1.0, self._line.by_priority)
        self._remove(place)
        self._begin()
        self._settle()
        return None

    def describe(self) -> str:
        """See `LinedState.describe`."""
        return f"{self._counts['running']} run, {len(self.places())} wait"

    def _remove(self, place: CallPlace) -> bool:
        if place is self._called:
            self._called = None
        return self._line.discard(place.priority, place.rank, place) is not None

    @property
    def _has_turn(self) -> bool:
        """True if a call that comes now need not wait."""
        return not self._line and self._wait_s() == 0

    @property
    def is_full(self) -> bool:
        """True if every slot is taken."""
        return self._slots is not None and self._counts["running"] >= self._slots

    def _begin(self) -> None:
        self._counts["running"] += 1
        if self._tokens is not None:
            self._begun_s.append(self.loop.time())

    def _wait_s(self) -> float:
        """Return the seconds until a call may begin: 0 for now, and infinity while all slots are taken."""
        if self.is_full:
            return float("inf")
        if len(self._begun_s) != self._tokens:
            return 0.0
        return max(0.0, self._begun_s[0] + self._period_s - self.loop.time())

    def _settle(self) -> None:
        """Call the next waiting call if it may begin; look again when a token comes back."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        line, wait_s = self._line, self._wait_s()
        if not line or wait_s == float("inf"):
            return
        if wait_s > 0:
            self._timer = self.loop.call_later(wait_s, self._look)
        elif self._called is None:
            firsts = (next((each for each in places if not each.is_away), None) for places in line.by_priority.values())
            here = {place.priority: place for place in firsts if place is not None}
            if here:
                self._called = here[line.shares.next(dict.fromkeys(here, 1.0))]
                self.call(self._called)

    def _look(self) -> None:
        with self.lock:
            self._settle()
        self.wake_called()

    async def _turn(self, part: RunPart, what: str, rank: tuple[float, int], within: Sequence[BegunAttempt]) -> None:
        """Return once an attempt may begin, which has a slot and a token then.

        Cancellation: the place in line is given up, and nothing was taken.

        Raises:
            RuntimeError: that would never be.
        """
        if self._has_turn and (coming := part.coming_back()) is not None:
            await coming  # the run may have stepped aside before this retry
        if self._has_turn:  # checked again: another call may have started while the run waited for its slot
            self._begin()
            return
        with waiting(self, within if part.deadline_s == inf else ()):
            await self._in_line(part, what, rank)

    async def _in_line(self, part: RunPart, what: str, rank: tuple[float, int]) -> None:
        """Wait in line until an attempt may begin."""
        place = CallPlace(self, what, part.priority, rank)
        with self.lock:
            self._line.add(part.priority, rank, place)
            self._settle()
        called = asyncio.Event()
        wake_on(self.loop, place, called.set)
        try:
            while True:
                with in_line(place.describe):
                    await called.wait()
                if (coming := part.coming_back()) is not None:
                    self._set_away(place, True)
                    await coming
                    self._set_away(place, False)
                called.clear()
                if place.claim() is not NOT_YET:
                    return
        except BaseException:
            place.leave()
            raise

    def _set_away(self, place: CallPlace, is_away: bool) -> None:
        """Let later calls have the turn of a call whose run has no place; call it again when the run has its place
        back.
        """
        with self.lock:
            place.is_away = is_away
            place.is_called = not is_away and self._wait_s() == 0
            if place.is_called:
                self._called = place
            elif place is self._called:
                self._called = None
            self._settle()
        self.wake_called()

    def _ended(self, begun: BegunAttempt) -> None:
        """Give back the slot of an attempt, once."""
        if begun.is_over:
            return
        begun.is_over = True
        self.attempts.discard(begun)
        with self.lock:
            self._counts["running"] -= 1
            self._counts["left_behind"] -= begun.is_left
            self._settle()
        self.wake_called()

    # -- calls ---------------------------------------------------------------------------------------------------

    async def result(
        self, part: RunPart, limits: CallLimits, function: Callable[..., Nest], is_async: bool, values: Sequence[Value]
    ) -> Nest:
        """Return the result of a call of a run: of its first attempt that succeeds."""
        self._arrivals += 1
        rank = min(part.deadline_s, self.loop.time() + PATIENCE_S), self._arrivals
        log, counts = attempts_of.get(), self._counts
        counts["calls"] += 1
        within = _within.get()
        attempt = partial(self._awaited if is_async else self._beside, limits, function, values)
        failed, errors = 0, deque[Exception](maxlen=_MOST_TOLD)
        try:
            if part.deadline_s == inf:
                self._refuse_to_wait_for_itself(within)
            while True:
                asked_ns = self._clock()
                await self._turn(part, f"a call of {limits.name}", rank, within)
                counts["attempts"] += 1
                counts["retries"] += failed > 0
                started_ns, status = self._clock(), "cancelled"
                begun = BegunAttempt(self, ends=limits.timeout is not None or part.deadline_s != inf)
                self.attempts.add(begun)
                _within.set((*within, begun))
                try:
                    found = await attempt(begun)
                    status = "ok"
                    return found
                except Exception as error:
                    failed, status = failed + 1, "error"
                    errors.append(error)
                    delay_s = self._delay_s(limits, part, failed, error)
                    if delay_s is None:
                        raise
                finally:
                    if log is not None:
                        log.append(Attempt(asked_ns, started_ns, self._clock(), status))
                note_retry()
                await self._back_off(delay_s)
        except Exception:
            counts["failed"] += 1
            _chain(errors)
            raise
        finally:
            errors.clear()  # their tracebacks refer to this frame: avoid a cycle

    def _refuse_to_wait_for_itself(self, within: Sequence[BegunAttempt]) -> None:
        """Raise if every slot is taken by attempts that this call, which has no deadline, is part of.

        Raises:
            RuntimeError: they would wait for one another for ever.
        """
        around = sum(begun.function is self and not begun.is_over for begun in within)
        if self._slots is not None and around >= self._slots:
            raise RuntimeError(
                f"{self.name} asked for a run that calls it again, which would wait for ever: its own "
                f"{'calls count' if around > 1 else 'call counts'} for max_concurrency={self._slots}"
            )

    def _delay_s(self, limits: CallLimits, part: RunPart, failed: int, error: Exception) -> float | None:
        """Return the seconds before the next attempt; None if there is none, which the error then says."""
        if not limits.retries:
            return None
        what = f"attempt {failed} of {limits.retries + 1}"
        if failed > limits.retries:
            in_attempt(error, what)
        elif not _answer("retry_on", what, limits.is_retried, error):
            in_attempt(error, f"{what}: {_no_retry(limits)}")
        else:
            delay_s = _answer("backoff", what, limits.delay_s, failed, error, self._random)
            left_s = part.deadline_s - self.loop.time()
            if delay_s < left_s:
                return delay_s
            left = f"its run has {max(0.0, left_s):.2g} s left"
            in_attempt(error, f"{what}: the next would be after {delay_s:.2g} s, and {left}")
        return None

    async def _back_off(self, delay_s: float) -> None:
        self._counts["backing_off"] += 1
        try:
            with in_line():
                await asyncio.sleep(delay_s)
        finally:
            self._counts["backing_off"] -= 1

    # -- attempts ------------------------------------------------------------------------------------------------

    async def _awaited(
        self, limits: CallLimits, function: Callable[..., Nest], values: Sequence[Value], begun: BegunAttempt
    ) -> Nest:
        """Await a coroutine function, which is cancelled when its time is up."""
        scope = asyncio.timeout(limits.timeout)
        try:
            async with scope:
                return await function(*values)
        except TimeoutError:
            if not scope.expired():
                raise  # the function's own
        finally:
            del scope  # it refers to the task, whose error refers to this frame: avoid a cycle
            self._ended(begun)
        # Outside `except`: otherwise the scope's error, which also refers to the task, would be this error's context.
        raise self._timed_out(limits, "")

    async def _beside(
        self, limits: CallLimits, function: Callable[..., Nest], values: Sequence[Value], begun: BegunAttempt
    ) -> Nest:
        """Call a plain function on a thread of its own, which keeps the slot until it returns."""
        loop, returned = self.loop, Latch()

        def on_thread() -> Nest:
            try:
                return function(*values)
            finally:
                with suppress(RuntimeError):  # the loop has closed, and its session with it
                    loop.call_soon_threadsafe(ended)

        def ended() -> None:
            returned.set()
            self._ended(begun)

        on_thread.__name__ = limits.name
        scope = asyncio.timeout(limits.timeout)
        try:
            async with scope:
                return await call_beside(on_thread, outlasts_program=False)
        except TimeoutError:
            if not scope.expired():
                raise
            self._leave(begun)
        except RuntimeError:
            self._ended(begun)  # no thread could start, or the function itself raised it
            raise
        except asyncio.CancelledError:
            self._leave(begun)
            if limits.timeout is None:
                # A run waits for its function before it ends, unless the function has a timeout.
                with loop.outside_work() if is_virtual(loop) else nullcontext():
                    await returned.wait()
            raise
        finally:
            del scope  # as above
        slot = "" if self._slots is None else f", and counts for max_concurrency={self._slots} until then"
        raise self._timed_out(limits, f"; its thread goes on until it returns{slot}")

    def _leave(self, begun: BegunAttempt) -> None:
        """Leave the thread of an attempt behind, unless it has returned."""
        begun.is_left = not begun.is_over
        self._counts["left_behind"] += begun.is_left

    def _timed_out(self, limits: CallLimits, more: str) -> TimeoutError:
        self._counts["timeouts"] += 1
        return TimeoutError(f"{limits.name} did not return within timeout={limits.timeout:g} s{more}")

    # -- statistics ----------------------------------------------------------------------------------------------

    def statistics(self) -> LimitStatistics:
        """Return the counts now."""
        return LimitStatistics(**self._counts)._replace(waiting=len(self.places()))


class LimitedCalls:
    """The functions with limits that runs of one session have called.

    Args:
        loop: of the session.
        seed: of the delays before retries.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, seed: int | None) -> None:
        self._loop, self._seed = loop, seed
        self._known: WeakKeyDictionary[CallLimits, LimitedFunction] = WeakKeyDictionary()

    def of(self, limits: CallLimits) -> LimitedFunction:
        """Return the line of a function."""
        found = self._known.get(limits)
        if found is None:
            found = self._known[limits] = LimitedFunction(limits, self._loop, self._seed)
        return found

    def statistics(self) -> dict[str, LimitStatistics]:
        """Return the counts by the names of functions; counts of functions of one name are added up."""
        found: dict[str, LimitStatistics] = {}
        for limits, function in list(self._known.items()):
            found[limits.name] = found.get(limits.name, LimitStatistics()).plus(function.statistics())
        return found


class _SessionTurn(Protocol):
    """The session's share of the event loop, in which runs find functions with limits."""

    limited: LimitedCalls


def _chain(errors: Iterable[Exception]) -> None:
    """Let the traceback of each error go on with the traceback of the attempt before."""
    for earlier, later in pairwise({id(error): error for error in errors}.values()):
        inner: BaseException = later
        seen = {id(earlier)}  # avoid a circle: a function may raise one error twice, or chain an earlier one
        while id(inner) not in seen:
            seen.add(id(inner))
            further = inner.__cause__ or (None if inner.__suppress_context__ else inner.__context__)
            if further is not None:
                inner = further
            else:  # an error's own `__setattr__` may refuse
                name = "__cause__" if inner.__suppress_context__ else "__context__"
                object.__setattr__(inner, name, earlier)


def _answer(option: str, which: str, ask: Callable[[Unpack[_Args]], _Result], *args: *_Args) -> _Result:
    """Ask a function that the user may have given as an option; an error of it names the option."""
    try:
        return ask(*args)
    except Exception as error:
        in_attempt(error, f"{which}: {option}= failed")
        raise


def _no_retry(limits: CallLimits) -> str:
    return "such an error is not retried" if limits.retry_on is None else "retry_on= leaves it out"


async def _call(limits: CallLimits, function: Callable[..., Nest], is_async: bool, values: Sequence[Value]) -> Nest:
    part = current_part()
    assert part is not None, "functions with limits are called by runs"
    return await cast("_SessionTurn", part.owner).limited.of(limits).result(part, limits, function, is_async, values)


install_limited_calls(_call)
