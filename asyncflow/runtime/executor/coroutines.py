"""The firings of one executor that are coroutines: each is a task, cancelled with the run, and given a grace then."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from asyncflow.errors import UNKNOWN_LOCATION, SourceLocation, is_users
from asyncflow.graph.resource import resources_of
from asyncflow.runtime.executor.kernels.limited_calls import Attempt, attempts_of

if TYPE_CHECKING:
    from asyncflow.compiler.plan import PlanNode
    from asyncflow.runtime.executor.partition_run import PartitionRun
    from asyncflow.runtime.scheduler.frame import Iteration
    from asyncflow.values import Value

_log = logging.getLogger("asyncflow.runtime")

GRACE_S = 5.0
"""Seconds for a coroutine function's cleanup, in ``finally`` and ``except asyncio.CancelledError``."""


class CancellationIgnoredError(Exception):
    """A coroutine that goes on though it was cancelled."""


class Coroutines:
    """The tasks of one executor, in the order in which they started: in that order they are cancelled."""

    __slots__ = ("_executor", "_grace", "_tasks")

    def __init__(self, executor: PartitionRun) -> None:
        self._executor = executor
        # Tasks, each with its node and the callback for its end.
        self._tasks: dict[asyncio.Task[object], tuple[PlanNode, Callable[..., None]]] = {}
        self._grace: asyncio.TimerHandle | None = None

    def launch(self, node: PlanNode, iteration: Iteration, inputs: Sequence[Value]) -> None:
        """Start a firing, which has ended if its kernel returns its result at once."""
        executor, run, device = self._executor, self._executor.run, self._executor.asynchronous
        spans = executor.new_spans()
        started = run.turn.clock()
        assert node.kernel is not None
        context = executor.context_of(node, iteration)
        with ExitStack() as undone:
            with executor.recording(spans):
                coroutine = node.kernel(*inputs)
                if not isinstance(coroutine, Coroutine):
                    if executor.recorder is not None:
                        executor.recorder.firing(node, iteration, "async", started, run.turn.clock(), coroutine, "ok")
                    executor.complete(node, iteration, inputs, coroutine)
                    return
                undone.callback(coroutine.close)
            undone.pop_all()
        # A real task, in the context of the caller: libraries look at current_task and at context variables.
        context, attempts = context.copy(), list[Attempt]()
        if executor.recorder is not None:
            context.run(attempts_of.set, attempts)
        task = run.turn.loop.create_task(_contained(coroutine), context=context, name=node.source.name)

        def take(result: Value, error: BaseException | None) -> None:
            del self._tasks[task]
            # A stopping run cancels its coroutines itself, which is not a failure.
            was_cancelled = task.cancelled() and executor.stopped
            if executor.recorder is not None:
                status = "ok" if error is None else "cancelled" if was_cancelled else "error"
                executor.recorder.coroutine(node, iteration, started, attempts, result, status)
            if device is not None:
                executor.record_spans(spans, device, node, iteration, result)
            if error is None and not executor.stopped:
                executor.complete(node, iteration, inputs, result)
            elif error is not None and not was_cancelled:
                executor.kernel_failed(error, node, iteration, inputs)

        deliver = executor.expect(take)
        self._tasks[task] = node, deliver

        def ended(task: asyncio.Task[object]) -> None:
            coroutine.close()  # a task cancelled at once has not started it
            deliver(*_outcome(task))

        task.add_done_callback(ended)

    @property
    def in_line(self) -> int:
        """Number of firings that wait for other runs, or for elements of inputs; with ``max_runs="auto"``, all."""
        if self._executor.is_auto:
            return len(self._tasks)
        in_line = self._executor.run.part.in_line
        if self._executor.asynchronous is None:
            return sum(node.source.op.conduct.is_undone or task in in_line for task, (node, _) in self._tasks.items())
        return len(in_line.keys() & self._tasks.keys())

    def cancel(self) -> None:
        """Cancels all, and waits for none longer than the grace."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            self._grace = self._executor.run.turn.loop.call_later(GRACE_S, leave_behind, self._tasks)

    def describe(self) -> list[str]:
        """A line for each firing, for messages."""
        in_line, lines = self._executor.run.part.in_line, []
        for task, (node, _) in self._tasks.items():
            resources = ", ".join(map(repr, resources_of(node.source)))
            what = resources or in_line.get(task, str)() or "a coroutine"
            lines.append(f"{node.name}: {what}\n    built at {node.source.location}")
        return lines

    def close(self) -> None:
        """Release the grace timer: the run has ended, and all coroutines with it."""
        if self._grace is not None:
            self._grace.cancel()


class _Exit:
    """An error of a coroutine that is meant for the interpreter; out of its task it would end the event loop."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


async def _contained(coroutine: Awaitable[object]) -> object:
    """Return the result of a coroutine; an error that would end the event loop is left to the run to raise."""
    try:
        return await coroutine
    except (KeyboardInterrupt, SystemExit) as error:
        return _Exit(error)


def _outcome(task: asyncio.Task[object]) -> tuple[Value, BaseException | None]:
    if task.cancelled():
        return None, asyncio.CancelledError("the coroutine was cancelled")
    error = task.exception()
    if error is not None:
        return None, error
    result = task.result()
    return (None, result.error) if isinstance(result, _Exit) else (result, None)


def leave_behind(tasks: Mapping[asyncio.Task[object], tuple[PlanNode, Callable[..., None]]]) -> None:
    """Stops waiting for cancelled tasks that have not ended, and reports each as a failure."""
    for task, (_, deliver) in list(tasks.items()):
        place = _waits_at(task)
        if place is UNKNOWN_LOCATION:  # not a user's coroutine: a plain function with limits
            message = (
                f"{task.get_name()} cannot be stopped: {GRACE_S:g} s after its run ended early, its function still "
                f"works on a thread; the run ends without it. With a timeout= for the function, no run waits for it"
            )
        else:
            message = (
                f"{task.get_name()} ignores cancellation: {GRACE_S:g} s after it was cancelled, its coroutine "
                f"function still waits at {place} (in {place.function}); the run ends without it. Let "
                f"asyncio.CancelledError out of the function, and keep its cleanup short"
            )
        _log.warning("%s", message)
        deliver(None, CancellationIgnoredError(message))


def _waits_at(task: asyncio.Task[object]) -> SourceLocation:
    """The outermost line of the user's where a suspended coroutine is."""
    awaited: Any = task.get_coro()
    while inspect.iscoroutine(awaited):
        frame = awaited.cr_frame
        if frame is not None and is_users(frame.f_code.co_filename):
            return SourceLocation(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        awaited = awaited.cr_await
    return UNKNOWN_LOCATION
