"""One `await session.run(...)`: from feeds to fetched values, or to exactly one exception."""

from __future__ import annotations

import asyncio
import itertools
from contextvars import Context, copy_context
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import TYPE_CHECKING, Final

from asyncflow.compiler.memory_advice import memory_advice
from asyncflow.errors import DeadlineExceeded, InternalError, OutOfMemoryError, SessionClosedError
from asyncflow.graph.graph import leave_graphs
from asyncflow.ops.user.recorded_calls import call_log
from asyncflow.runtime.executor.executor import Executor
from asyncflow.runtime.executor.kernels.limited_calls import attempts_of
from asyncflow.runtime.executor.lone_firing import LoneFiring
from asyncflow.runtime.scheduler.rendezvous import Rendezvous
from asyncflow.runtime.watch.trace import RunSpan, Trace
from asyncflow.state.elements.taken import Taken, own_taken
from asyncflow.streams.holding import RunPart, current_part, own_context

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

    from asyncflow.compiler.plan import Plan
    from asyncflow.compiler.program.survey import Survey
    from asyncflow.devices.protocol import Device
    from asyncflow.runtime.calls.session_options import SessionOptions
    from asyncflow.runtime.executor.kernels.single_call import Begun
    from asyncflow.runtime.executor.scope import PlaceInSession
    from asyncflow.runtime.executor.turn import Turn
    from asyncflow.runtime.run.channel import Channel
    from asyncflow.values import Value


_NO_MEETING: Final = Rendezvous()
"""Of runs with a single partition, which stays empty."""

_MOST_TOLD = 5
"""Maximum number of waiting firings listed in a message."""


def _enter(part: RunPart) -> None:
    """Have the current context belong to a run. Each run does, so this is one call."""
    leave_graphs()
    if call_log.get() is not None:
        call_log.set(None)  # a recorded function started this run, which logs its own calls
    if attempts_of.get() is not None:
        attempts_of.set(None)  # likewise for a traced function
    own_context(part)


@dataclass(slots=True, eq=False, repr=False)
class Run:
    """A structured-concurrency scope: when `wait` returns or raises, nothing of the run is left.

    Ends in exactly one way: with values, with the first failure, with `DeadlineExceeded`, or cancelled. There is one
    executor per partition; the run only waits for all of them, and stops all when one fails.
    """

    plan: InitVar[Plan]
    _: KW_ONLY
    number: int
    """Counts the session's runs."""
    devices: Mapping[str, Device]
    """Devices of the session, by name."""
    turn: Turn
    """The session's share of the event loop."""
    options: SessionOptions
    """Of the session."""
    seed: int
    """Of random ops."""
    trace: Trace | None
    """Trace to record into."""
    emitter: Channel | None = None
    """Takes streamed values."""
    staying: Collection[int | None] = ()
    """Indexes of the fetches whose values stay on their device."""
    on_end: Callable[[Run], None] | None = None
    has_age: bool = False
    """True if it only computes: when memory is short, it waits for older runs, and younger ones for it."""
    name: str = ""
    """Name in traces; without one, its number."""
    ticket: PlaceInSession | None = None
    """Place in the session, which it gives back while it waits for other runs; None if it never does."""
    id: int = field(default_factory=itertools.count(1).__next__, init=False)
    """Unique in the process."""
    part: RunPart = field(init=False)
    """The run, as seen by runs requested inside it."""
    context: Context = field(default_factory=copy_context)
    """The caller's context variables, for the user's kernels, but outside any graph the caller is building."""
    rendezvous: Rendezvous = field(init=False)
    """Meeting point of the partitions."""
    survey: Survey = field(init=False)
    """States and nodes that it touches."""
    at_end: dict[object, Callable[[], None]] = field(default_factory=dict, init=False)
    """Functions that release the run's holdings, such as a mutex."""
    stayed: dict[int, Value] = field(default_factory=dict, init=False)
    """The values of `staying`."""
    is_finished: bool = field(default=False, init=False)
    """True if no work of the run is left."""
    executors: list[Executor | LoneFiring] = field(default_factory=list, init=False)
    _plan: Plan = field(init=False)
    _started_ns: int = field(init=False)
    awaited: asyncio.Future[None] | None = field(default=None, init=False)
    """Future that the caller's task waits for."""
    _timer: asyncio.TimerHandle | None = field(default=None, init=False)
    _status: str = field(default="ok", init=False)
    _came: asyncio.Event | None = field(default=None, init=False)
    """Set when the run, some of whose tasks wait for that, has its place again."""
    taken: Taken | None = field(default=None, init=False)
    """Elements that it has taken and gives back if it ends early; None if it takes none."""
    own_context: Context | None = field(default=None, init=False)
    """Context in which such a run is driven, so that kernels find its taken elements: a copy of `context`, which
    kernels enter.
    """
    in_caller: bool = field(init=False)
    """True if it goes on in its caller's task alone.

    Such a run waits in the line of a queue, say. A cancelled task takes no further step. Nothing can cancel it between
    a step and its result. So the run takes no element and puts none once its caller is cancelled.
    """
    is_in_caller: bool = field(default=False, init=False)
    """True while its caller's task takes steps of it."""
    begun: Begun | None = field(default=None, init=False)
    """Its only firing, if that has begun on the event loop and continues on a thread."""
    _steps: dict[Callable[[], object], None] = field(default_factory=dict, init=False)
    """Steps that wait for the caller's task, in order."""
    is_stopped: bool = field(default=False, init=False)
    """True if it ends early: none of its firings starts, or goes on, any more."""
    _is_busy: bool = field(default=False, init=False)
    _undrained: list[Executor] = field(default_factory=list, init=False)
    """Executors whose devices must have ended their work before the run ends."""

    def __post_init__(self, plan: Plan) -> None:
        self.part = RunPart(self.turn, current_part(), run=self.id, trace=self.trace)
        self.context.run(_enter, self.part)
        self.part.emitter = self.emitter
        if self.ticket is not None:
            self.part.on_wait = self.look_aside
            if not self.ticket.is_auto:  # with "auto", coroutines need no slot
                self.part.back = self.back
        if plan.survey.takes:
            self.taken = Taken()
            self.context.run(own_taken, self.taken)
            self.own_context = self.context.copy()
        elif plan.survey.waits:
            self.context.run(own_taken, None)  # do not inherit elements taken by an outer run
        self.in_caller = plan.survey.waits and self.emitter is None
        self.survey = plan.survey
        self._started_ns = self.turn.clock() if self.trace is not None else 0
        self._plan = plan
        self.rendezvous = Rendezvous() if len(plan.partitions) > 1 else _NO_MEETING
        if plan.lone_firing is not None and self.trace is None:
            self.executors.append(LoneFiring(plan.lone_firing, self, self.devices[plan.partitions[0].device]))
            return
        for partition in plan.partitions:
            executor = Executor(partition, self)
            self.executors.append(executor)
            if executor.asynchronous is not None and (self.staying or not partition.is_on_host):
                self._undrained.append(executor)

    def start(self, feeds: Sequence[Value], timeout: float | None, asked_s: float) -> None:
        """Starts; returns once the current turn's share of work is done.

        Args:
            feeds: in the order of the plan's.
            timeout: seconds since `asked_s` until the run has to have ended.
            asked_s: when the run was asked for, in the event loop's time.
        """
        if timeout is not None:
            if asked_s + timeout <= self.turn.loop.time():  # compiling or copying feeds may have taken that long
                self._expire(timeout)
                return
            self.part.deadline_s = asked_s + timeout
            self._timer = self.turn.loop.call_at(self.part.deadline_s, self._expire, timeout)
        if len(self.executors) == 1 and not self.in_caller:  # most runs
            self.executors[0].start(feeds)
            return
        self.is_in_caller = self.in_caller
        # The first partition may be quiet before the second has begun, so the run decides only after all have started.
        self._is_busy = len(self.executors) > 1
        try:
            for executor in self.executors:
                if not self.is_stopped:
                    executor.start(feeds)
        finally:
            self.is_in_caller = False
        if self._is_busy:
            self._is_busy = False
            self.on_quiet()

    def leaves_to_caller(self, step: Callable[[], object], *, later: bool = False) -> bool:
        """Leave a step to the caller's task and return True, if the run goes on there alone and this is not there.

        With `later` the step is left to it there as well: this may be in the middle of a kernel of the run.
        """
        if not self.in_caller or (self.is_in_caller and not later) or self.is_stopped:
            return False
        self._steps[step] = None
        if self.awaited is not None and not self.awaited.done():
            self.awaited.set_result(None)
        return True

    def _go_on(self) -> None:
        """Take the steps that were left to this task."""
        steps, self._steps = self._steps, {}
        self.is_in_caller = True
        try:
            for step in steps:
                if not self.is_stopped:
                    step()
        finally:
            self.is_in_caller = False

    def is_given_up(self) -> bool:
        """Return True if the caller has been cancelled, also where its task has not learnt of that yet."""
        return self.awaited is not None and self.awaited.cancelled()

    def stay(self, index: int, value: Value) -> None:
        """A value of `staying` is there."""
        self.stayed[index] = value
        if self.awaited is not None and not self.awaited.done():
            self.awaited.set_result(None)  # the caller then checks for all values

    async def wait_for_staying(self) -> bool:
        """Returns whether all values of `staying` are there, once they are, or the run has ended.

        Cancellation: as of `wait`.
        """
        while not (self.is_stopped or all(index is None or index in self.stayed for index in self.staying)):
            if self.is_finished:
                return False
            self.awaited = self.turn.loop.create_future()
            try:
                await self.awaited
            except asyncio.CancelledError:
                self.stop("cancelled")
                await self.wait()
                raise
        return not self.is_stopped

    async def wait(self) -> list[Value]:
        """Return the fetched values.

        Cancellation: stops the run, waits until work in flight has ended, then raises CancelledError. Of a failure and
        a cancellation, the earlier one is raised.
        """
        cancelled: asyncio.CancelledError | None = None
        while not self.is_finished:
            if self._steps and not self.is_stopped:
                self._go_on()
                continue
            self.awaited = self.turn.loop.create_future()
            try:
                await self.awaited
            except asyncio.CancelledError as error:
                cancelled = error
                self.stop("cancelled")
            except GeneratorExit:  # the coroutine was dropped: no task waits any more
                if not self.turn.loop.is_closed():
                    self.stop("cancelled")
                raise
        try:
            return self.outcome(cancelled)
        finally:
            del cancelled  # its traceback refers to this frame: avoid a cycle

    def outcome(self, cancelled: asyncio.CancelledError | None = None) -> list[Value]:
        """The fetched values of a run that has finished, once; or raises as `wait`, whose wait was `cancelled`."""
        if self.trace is not None:
            try:
                self._close_books(self.trace)
            except BaseException as error:
                self.is_stopped = True
                self.executors[0].failures.append((self.turn.count(), -1, error))
        if self.is_stopped or cancelled is not None:
            failure = self._failure(cancelled)
            try:
                if failure is not None:
                    raise failure
            finally:
                del failure, cancelled  # their tracebacks refer to this frame: avoid a cycle
        results = self.executors[0].scheduler.results
        if len(self.executors) == 1 and not self.stayed:
            return results
        for executor, partition in zip(self.executors, self._plan.partitions, strict=True):
            scheduler = executor.scheduler
            if scheduler.results is not results:
                for index in partition.fetch_indexes:
                    results[index] = scheduler.results[index]
        for index, value in self.stayed.items():
            results[index] = value
        return results

    def _failure(self, cancelled: asyncio.CancelledError | None) -> BaseException | None:
        """Return the error that the run ends with, where its wait may have been `cancelled`; None if it has results."""
        failure = self._first_failure()
        if isinstance(failure, OutOfMemoryError):
            for advice in memory_advice(failure, self._plan, self.devices):
                failure.add_note(advice)
        if self._status != "cancelled" and failure is not None:
            return failure
        if cancelled is not None and failure is not None:
            cancelled.add_note(f"a kernel in flight failed: {failure}")
        return cancelled

    def stop(self, status: str) -> None:
        """Stop the run early; `wait` then only waits for work in flight."""
        if not (self.is_stopped or self.is_finished):
            self._status = status
            self._stop_all()
            self.on_quiet()

    def _stop_all(self) -> None:
        self.is_stopped = True
        for executor in self.executors:
            executor.stop()
        self.rendezvous.clear()
        self.stayed.clear()
        self._steps.clear()

    def close(self) -> None:
        """End the run because its session closes."""
        if self.emitter is not None:
            self.emitter.discard()  # else the run could wait for a consumer that never takes another value
        self._fail(SessionClosedError("the session was closed while the run was in flight"))

    def on_failed(self) -> None:
        """Called by an executor: the others stop too."""
        if not self.is_stopped:
            self._stop_all()

    def on_quiet(self) -> None:
        """Note that an executor has nothing left to do: the run ends when none has."""
        if self.is_finished or self._is_busy:
            return
        is_stalled = False
        for executor in self.executors:
            if not executor.is_quiet:
                if self.ticket is not None:
                    self.look_aside()
                return
            is_stalled = is_stalled or not executor.scheduler.done
        if self._undrained:
            self._drain()
            return
        if is_stalled and not self.is_stopped:
            self._fail(self._stalled())
            return
        self.is_finished = True
        self.part.is_over, self.part.on_wait, self.part.back = True, None, None
        if self.taken is not None and self.is_stopped and self._status in ("cancelled", "deadline"):
            self.taken.give_back()
        for let_go in self.at_end.values():
            let_go()
        for executor in self.executors:
            executor.close()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.emitter is not None:
            self.emitter.close()
        if self.awaited is not None and not self.awaited.done():
            self.awaited.set_result(None)
        if self.on_end is not None:
            self.on_end(self)
            self.on_end = None

    def look_aside(self) -> None:
        """Give the run's place in the session to others if all that is left of it waits for other runs."""
        ticket = self.ticket
        if ticket is None or ticket.is_aside or self.is_stopped or self._is_busy:
            return
        executors = [each for each in self.executors if isinstance(each, Executor)]
        if not executors:
            return  # a lone firing keeps its slot until it ends
        if not all(each.is_in_line or each.is_quiet for each in executors):
            return
        if not any(each.has_launched(self.on_quiet) for each in executors):
            ticket.step_aside()

    def back(self) -> Awaitable[None] | None:
        """Return None if the run has its place, which it may have given to others; otherwise the wait for it."""
        return None if self._has_place() else self._until_back()

    def _has_place(self) -> bool:
        return self.ticket is None or not self.ticket.is_aside or self.ticket.come_back(self.come_back)

    async def _until_back(self) -> None:
        while not self._has_place():
            self._came = self._came or asyncio.Event()
            await self._came.wait()

    def come_back(self) -> None:
        """Go on: the run, which stepped aside, has its place again."""
        if self._came is not None:
            self._came.set()
            self._came = None
        for executor in () if self.is_finished else self.executors:
            if isinstance(executor, Executor):
                executor.go_on(later=True)

    def _drain(self) -> None:
        """Asynchronous devices count kernels as done when they are launched; a run ends when they have ended."""
        undrained, self._undrained = self._undrained, []
        self._is_busy = True
        for executor in undrained:
            if executor.has_ended():  # known from the value fetched last
                continue
            # After a stop, this run's launches are not distinguished from launches of other runs: wait for all.
            executor.when_done(None if executor.stopped else executor.launched, then=self.on_quiet)
        self._is_busy = False
        self.on_quiet()

    def _fail(self, error: BaseException, status: str = "ok") -> None:
        if not (self.is_stopped or self.is_finished):
            self._status = status
            self.executors[0].fail(error)
            self.on_quiet()

    def _expire(self, timeout: float) -> None:
        message = f"the run did not end within timeout={timeout} s; it was stopped"
        waiting = [line for executor in self.executors if not executor.is_closed for line in executor.waiting()]
        if waiting:
            more = [f"and {len(waiting) - _MOST_TOLD} more"] if len(waiting) > _MOST_TOLD else []
            message = "\n  ".join([f"{message}, while these waited:", *waiting[:_MOST_TOLD], *more])
        self._fail(DeadlineExceeded(message), "deadline")

    def _first_failure(self) -> BaseException | None:
        """Takes the failure of the earliest turn and, within it, of the first node; the others become its notes."""
        failures = [failure for executor in self.executors for failure in executor.failures]
        if not failures:
            return None
        ranked = [error for _, _, error in sorted(failures, key=lambda failure: failure[:2])]
        for executor in self.executors:
            executor.failures.clear()  # their tracebacks refer to this object
        for other in ranked[1:]:
            first_line = str(other).partition("\n")[0]
            ranked[0].add_note(f"also failed: {type(other).__name__}: {first_line}")
        return ranked[0]

    def _stalled(self) -> InternalError:
        waiting = [line for executor in self.executors for line in executor.scheduler.waiting()]
        return InternalError(
            "the run stalled: nothing is ready or running, and these nodes still wait:\n  "
            + "\n  ".join(waiting + self.rendezvous.waiting() or ["none"])
        )

    def _close_books(self, trace: Trace) -> None:
        for executor in self.executors:
            assert isinstance(executor, Executor) and executor.recorder is not None
            executor.recorder.finish()
        if self._status == "ok" and any(executor.failures for executor in self.executors):
            self._status = "error"
        span = RunSpan(self.id, self.name or f"run {self.id}", self._started_ns, self.turn.clock(), self._status)
        trace.runs.append(span)
