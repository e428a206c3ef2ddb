"""One `await session.run(...)`: from feeds to fetched values, or to exactly one exception."""

from __future__ import annotations

import asyncio
import itertools
from contextvars import Context, copy_context
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from asyncflow.errors import DeadlineExceeded, InternalError, SessionClosedError
from asyncflow.graph.graph import leave_graphs
from asyncflow.runtime.executor import Executor
from asyncflow.runtime.trace import RunSpan

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from asyncflow.compiler.plan import Plan
    from asyncflow.devices.protocol import Device
    from asyncflow.runtime.channel import Channel
    from asyncflow.runtime.trace import Trace
    from asyncflow.runtime.turn import Turn

_ids = itertools.count(1)


def _kernel_context() -> Context:
    """The caller's context variables, for the user's kernels, but outside any graph the caller is building."""
    context = copy_context()
    context.run(leave_graphs)
    return context


class Run:
    """A structured-concurrency scope: when `wait` returns or raises, nothing of the run is left.

    Ends in exactly one way: with values, with the first failure, with `DeadlineExceeded`, or cancelled.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        number: int,
        device: Device,
        loop: asyncio.AbstractEventLoop,
        turn: Turn,
        seed: int,
        shuffle_seed: int | None,
        max_iterations: int | None,
        trace: Trace | None,
        channel: Channel | None = None,
        guard: bool = False,
        on_end: Callable[[Run], None] | None = None,
    ) -> None:
        self.id = next(_ids)
        self._on_end = on_end
        self._channel = channel
        self._loop = loop
        self._trace = trace
        self._started_ns = perf_counter_ns() if trace is not None else 0
        self._finished: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._status = "ok"
        self.executor = Executor(
            plan.partitions[0],
            device=device,
            loop=loop,
            turn=turn,
            owner=self,
            context=_kernel_context(),
            run_id=self.id,
            run_number=number,
            seed=seed,
            shuffle_seed=None if shuffle_seed is None else shuffle_seed + number,
            max_iterations=max_iterations,
            trace=trace,
            emitter=channel,
            guard=guard,
        )

    def start(self, feeds: Sequence[Any], timeout: float | None, asked_s: float) -> None:
        """Starts; returns once the current turn's share of work is done.

        Args:
            feeds: in the order of the plan's.
            timeout: seconds since `asked_s` until the run has to have ended.
            asked_s: when the run was asked for, in the event loop's time.
        """
        if timeout is not None:
            if asked_s + timeout <= self._loop.time():
                self._expire(timeout)
                return
            self._timer = self._loop.call_at(asked_s + timeout, self._expire, timeout)
        self.executor.start(feeds)

    @property
    def is_finished(self) -> bool:
        """Whether nothing of the run is left to do."""
        return self.executor.finished

    async def wait(self) -> list[Any]:
        """The fetched values.

        Cancellation: stops the run, waits until what is in flight has ended, then raises CancelledError. Of a failure
        and a cancellation, the one that stopped the run is raised.
        """
        cancelled: asyncio.CancelledError | None = None
        while not self.executor.finished:
            self._finished = self._loop.create_future()
            try:
                await self._finished
            except asyncio.CancelledError as error:
                cancelled = error
                self.stop("cancelled")
            except GeneratorExit:  # the coroutine is thrown away: there is nobody to wait
                if not self._loop.is_closed():
                    self.stop("cancelled")
                raise
        self._close_books()
        failure = self.executor.first_failure()
        if self._status == "cancelled" or failure is None:
            if cancelled is not None and failure is not None:
                cancelled.add_note(f"a kernel in flight failed: {failure}")
            failure = cancelled
        try:
            if failure is not None:
                raise failure
        finally:
            del failure, cancelled  # their tracebacks lead to this frame, and that would be a cycle
        return self._values()

    def stop(self, status: str) -> None:
        """Stops the run early; `wait` then only waits for what is in flight."""
        if not self.executor.stopped and not self.executor.finished:
            self._status = status
            self.executor.stop()
            self.executor.check_finished()

    @property
    def is_abandoned(self) -> bool:
        """Whether it hands its items to a consumer that is not there."""
        return self._channel is not None and not self._channel.has_consumer

    def close(self) -> None:
        """Ends the run because its session closes."""
        if self._channel is not None:
            self._channel.discard()
        if not self.executor.stopped and not self.executor.finished:
            self.executor.fail(SessionClosedError("the session was closed while the run was in flight"))
            self.executor.check_finished()

    def on_finished(self) -> None:
        """Called by the executor: nothing is in flight any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._channel is not None:
            self._channel.close()
        if self._finished is not None and not self._finished.done():
            self._finished.set_result(None)
        if self._on_end is not None:
            self._on_end(self)
            self._on_end = None

    def _expire(self, timeout: float) -> None:
        if self.executor.finished or self.executor.stopped:
            return
        self._status = "deadline"
        self.executor.fail(DeadlineExceeded(f"the run did not end within timeout={timeout} s; it was stopped"))
        self.executor.check_finished()

    def _values(self) -> list[Any]:
        scheduler = self.executor.scheduler
        if not scheduler.done:
            raise InternalError(
                "the run stalled: nothing is ready or running, and these nodes still wait:\n  "
                + "\n  ".join(scheduler.waiting() or ["none"])
            )
        return scheduler.results

    def _close_books(self) -> None:
        if self._trace is None:
            return
        if self._status == "ok" and self.executor.failures:
            self._status = "error"
        span = RunSpan(self.id, f"run {self.id}", self._started_ns, perf_counter_ns(), self._status)
        self._trace.runs.append(span)
