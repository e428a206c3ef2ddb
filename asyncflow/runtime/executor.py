"""Drives a scheduler: launches the kernels of ready firings and feeds their results back.

A firing that cannot wait is a plain call, on the event loop if it is short and on the device's stream thread if it is
expected to take longer than 0.2 ms; only a coroutine op costs a task. One executor lives for one run of one partition.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Protocol

from asyncflow.compiler.estimate import NS_PER_CALL, NS_PER_ELEMENT, kernel_ns
from asyncflow.devices.cost import INLINE_LIMIT_NS, MeasuredCost
from asyncflow.devices.memory import MemoryLimitExceeded
from asyncflow.errors import KernelError
from asyncflow.graph.op import KernelContext
from asyncflow.runtime.provenance import as_kernel_error, describe, with_provenance
from asyncflow.runtime.region_firing import RegionFiring, Stopped
from asyncflow.runtime.scheduler import Scheduler, SchedulingError
from asyncflow.runtime.trace import Firing, MemorySample

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextvars import Context

    from asyncflow.compiler.plan import Partition, PlanNode
    from asyncflow.devices.protocol import Device
    from asyncflow.runtime.frame import Iteration
    from asyncflow.runtime.trace import Trace
    from asyncflow.runtime.turn import Turn

_log = logging.getLogger("asyncflow.runtime")

BLOCKED_NS = 5_000_000
"""A session in debug mode logs a kernel that held the event loop for longer (5 ms)."""

_CHECK_EVERY = 32
"""Small firings between two looks at the clock."""


class Emitter(Protocol):
    """Takes the values a streamed loop hands out."""

    def offer(self, values: tuple[Any, ...], taken: Callable[[], None]) -> None:
        """Keeps `values` for the consumer and calls ``taken()`` once it has them."""
        ...


class Owner(Protocol):
    """The run an executor works for."""

    def on_finished(self) -> None:
        """Called once, when nothing is running any more and nothing will."""
        ...


class Executor:
    """Executes one partition once.

    Invariants: ``in_flight`` counts firings launched and not completed, on threads and in tasks; after a failure or a
    stop no firing starts, and the owner hears of the end once ``in_flight`` is 0. ``_untaken`` counts items that a
    consumer has not taken, which a stop does not wait for.
    """

    __slots__ = (
        "_context",
        "_device",
        "_emitter",
        "_guard",
        "_loop",
        "_owner",
        "_run_id",
        "_run_number",
        "_seed",
        "_suspended",
        "_tasks",
        "_times",
        "_trace",
        "_turn",
        "_untaken",
        "failures",
        "finished",
        "in_flight",
        "is_queued",
        "scheduler",
        "stopped",
    )

    def __init__(
        self,
        partition: Partition,
        *,
        device: Device,
        loop: asyncio.AbstractEventLoop,
        turn: Turn,
        owner: Owner,
        context: Context,
        run_id: int,
        run_number: int,
        seed: int,
        shuffle_seed: int | None,
        max_iterations: int | None,
        trace: Trace | None,
        emitter: Emitter | None,
        guard: bool = False,
    ) -> None:
        self.scheduler = Scheduler(partition, seed=shuffle_seed, max_iterations=max_iterations)
        self.is_queued = False
        self.in_flight = 0
        self.stopped = False
        self.finished = False
        self.failures: list[tuple[int, int, BaseException]] = []
        self._device = device
        self._loop = loop
        self._turn = turn
        self._owner: Owner | None = owner
        self._context = context
        self._run_id = run_id
        self._run_number = run_number
        self._seed = seed
        self._trace = trace
        self._emitter = emitter
        self._guard = guard
        self._untaken = 0
        self._suspended: deque[RegionFiring] = deque()
        self._tasks: dict[asyncio.Task[Any], None] = {}  # not a set: they are cancelled in the order they started
        self._times: _TimedQueue | None = None
        if trace is not None:
            self.scheduler.ready = self._times = _TimedQueue()

    # -- the loop ------------------------------------------------------------------------------------------------

    def start(self, feeds: Sequence[Any]) -> None:
        """Delivers the feeds and drives as far as the current turn allows."""
        try:
            self.scheduler.start(feeds)
        except SchedulingError as error:
            self._rule_broken(error)
            self.check_finished()
        else:
            self._turn.drive_now(self)

    def drive(self, deadline_ns: int) -> bool:
        """Executes ready firings until none is left (False) or the deadline has passed (True)."""
        if self.finished:
            return False
        scheduler = self.scheduler
        next_firing = scheduler.next_firing
        complete = scheduler.complete
        quick = self._trace is None
        budget = _CHECK_EVERY
        node = iteration = None
        inputs: Sequence[Any] = ()
        try:
            while True:
                firing = next_firing()
                if firing is not None:
                    node, iteration, inputs = firing
                    if node.is_small and quick:
                        complete(node, iteration, node.kernel(*inputs))  # type: ignore[misc]
                    else:
                        self._launch(node, iteration, inputs)
                        if self.stopped:
                            break
                        budget -= 7
                elif scheduler.ready:
                    budget -= 7
                elif self._suspended:
                    self._step_region(self._suspended.popleft(), deadline_ns)
                    if self.stopped:
                        break
                    budget = 0
                else:
                    break
                budget -= 1
                if budget <= 0:
                    if perf_counter_ns() >= deadline_ns:
                        return True
                    budget = _CHECK_EVERY
        except SchedulingError as error:
            self._rule_broken(error)
        except BaseException as error:
            assert node is not None and iteration is not None
            self._kernel_failed(error, node, iteration, inputs)
        self.check_finished()
        return False

    def check_finished(self) -> None:
        """Tells the owner, once, if nothing is left to do or to wait for."""
        if self.in_flight or self.finished:
            return
        if not self.stopped and (self.scheduler.ready or self._untaken):
            return
        self.finished = True
        owner, self._owner, self._emitter = self._owner, None, None  # no cycle may hold the values of a run that ended
        if owner is not None:
            owner.on_finished()

    # -- launching -----------------------------------------------------------------------------------------------

    def _launch(self, node: PlanNode, iteration: Iteration, inputs: Sequence[Any]) -> None:
        """Starts a firing that is timed, traced, needs its context, or may wait."""
        if node.is_emit:
            self._emit(node, iteration, tuple(inputs))
            return
        if node.needs_context:
            inputs = (KernelContext(seed=self._seed, run=self._run_number, tag=iteration.counters()), *inputs)
        if node.is_async:
            self._launch_coroutine(node, iteration, inputs)
            return
        if node.region is not None and node.region.is_generator:
            self._launch_region(node, iteration, inputs)
            return
        size = 0
        for value in inputs:
            size += getattr(value, "size", 1)
        cost: MeasuredCost | None = node.cost
        if cost is None:
            cost = node.cost = _estimate(node, inputs)
        if cost.predict_ns(size) > INLINE_LIMIT_NS:
            self._launch_on_stream(node, iteration, inputs, size)
            return
        started = perf_counter_ns()
        try:
            result = self._context.run(node.kernel, *inputs) if node.is_user else node.kernel(*inputs)  # type: ignore[arg-type,misc]
        except BaseException as error:
            self._record(node, iteration, "inline", started, perf_counter_ns(), None, "error")
            self._kernel_failed(error, node, iteration, inputs)
            return
        ended = perf_counter_ns()
        cost.observe(size, ended - started)
        if self._guard and ended - started > BLOCKED_NS:
            _log.warning(
                "%s (%s) held the event loop for %.1f ms; declare its cost=, or make it a coroutine\n  built at %s",
                node.name,
                node.source.op.name,
                (ended - started) / 1e6,
                node.source.location,
            )
        self._record(node, iteration, "inline", started, ended, result, "ok")
        self._complete(node, iteration, inputs, result)

    def _launch_on_stream(self, node: PlanNode, iteration: Iteration, inputs: Sequence[Any], size: int) -> None:
        self.in_flight += 1
        work, args = node.kernel, tuple(inputs)
        if node.is_user:
            work, args = self._context.copy().run, (node.kernel, *args)

        def deliver(result: object, error: BaseException | None, started: int, ended: int) -> None:
            self.in_flight -= 1
            status = "ok" if error is None else "error"
            self._record(node, iteration, "compute", started, ended, result, status)
            if error is not None:
                self._kernel_failed(error, node, iteration, inputs)
            elif not self.stopped:
                node.cost.observe(size, ended - started)
                self._complete(node, iteration, inputs, result)
            self._continue()

        assert work is not None
        self._device.compute.submit(work, args, deliver, self._loop)

    def _launch_coroutine(self, node: PlanNode, iteration: Iteration, inputs: Sequence[Any]) -> None:
        self.in_flight += 1
        started = perf_counter_ns()
        assert node.kernel is not None
        # A real task, in the context of the caller: libraries look at current_task and at context variables.
        task = self._loop.create_task(node.kernel(*inputs), context=self._context.copy(), name=node.name)
        self._tasks[task] = None

        def done(task: asyncio.Task[Any]) -> None:
            del self._tasks[task]
            self.in_flight -= 1
            cancelled = task.cancelled()
            error = asyncio.CancelledError("the coroutine was cancelled") if cancelled else task.exception()
            status = "ok" if error is None else "cancelled" if cancelled and self.stopped else "error"
            result = task.result() if error is None else None
            self._record(node, iteration, "async", started, perf_counter_ns(), result, status)
            if error is not None:
                # A run that is being stopped cancels its coroutines itself; that is no failure.
                if not (cancelled and self.stopped):
                    self._kernel_failed(error, node, iteration, inputs)
            elif not self.stopped:
                self._complete(node, iteration, inputs, result)
            self._continue()

        task.add_done_callback(done)

    def _launch_region(self, node: PlanNode, iteration: Iteration, inputs: Sequence[Any]) -> None:
        self.in_flight += 1
        assert node.kernel is not None
        firing = RegionFiring(node, iteration, inputs, node.kernel(*inputs))
        assert node.estimate is not None
        if node.is_heavy or node.estimate.expects(INLINE_LIMIT_NS, inputs):
            self._region_on_stream(firing)
        else:
            self._suspended.append(firing)

    def _step_region(self, firing: RegionFiring, deadline_ns: int) -> None:
        """Runs slices of a region until it ends, the turn does, or it proves too heavy for the event loop."""
        node, iteration = firing.node, firing.iteration
        try:
            now = 0
            while now < deadline_ns:
                now = firing.run_slice()
                if firing.is_heavy:  # looked at first: a heavy slice ends behind the deadline
                    node.is_heavy = True
                    self._region_on_stream(firing)
                    return
        except StopIteration as ended:
            self.in_flight -= 1
            self._record(node, iteration, "inline", firing.started_ns, perf_counter_ns(), ended.value, "ok")
            self._complete(node, iteration, firing.inputs, ended.value)
        except BaseException as error:
            self.in_flight -= 1
            self._record(node, iteration, "inline", firing.started_ns, perf_counter_ns(), None, "error")
            self._kernel_failed(error, node, iteration, firing.inputs)
        else:
            self._suspended.append(firing)

    def _region_on_stream(self, firing: RegionFiring) -> None:
        node, iteration = firing.node, firing.iteration

        def deliver(result: object, error: BaseException | None, started: int, ended: int) -> None:
            self.in_flight -= 1
            status = "ok" if error is None else "cancelled" if isinstance(error, Stopped) else "error"
            self._record(node, iteration, "compute", firing.started_ns, ended, result, status)
            if error is None and not self.stopped:
                self._complete(node, iteration, firing.inputs, result)
            elif error is not None and not isinstance(error, Stopped):
                self._kernel_failed(error, node, iteration, firing.inputs)
            self._continue()

        self._device.compute.submit(firing.run_to_end, (lambda: self.stopped,), deliver, self._loop)

    def _emit(self, node: PlanNode, iteration: Iteration, values: tuple[Any, ...]) -> None:
        assert self._emitter is not None
        self._untaken += 1

        def taken() -> None:
            self._untaken -= 1
            if not self.stopped:
                self.scheduler.complete(node, iteration, ())
                self._turn.drive_now(self)

        self._emitter.offer(values, taken)

    def _complete(self, node: PlanNode, iteration: Iteration, inputs: Sequence[Any], result: Any) -> None:
        """Accounts for the result and hands it to the scheduler."""
        track = self._device.memory.track
        try:
            if node.single:
                track(result, node.name)
            else:
                for value in result:
                    track(value, node.name)
            self.scheduler.complete(node, iteration, result)
        except MemoryLimitExceeded as error:
            self._kernel_failed(error, node, iteration, inputs)
        except SchedulingError as error:
            self._rule_broken(error)

    def _continue(self) -> None:
        """After something in flight has ended."""
        if self.stopped:
            self.check_finished()
        else:
            self._turn.drive_now(self)

    # -- ending --------------------------------------------------------------------------------------------------

    def _kernel_failed(self, error: BaseException, node: PlanNode, iteration: Iteration, inputs: Sequence[Any]) -> None:
        self.fail(as_kernel_error(error, node, iteration.tag(), inputs, self._device.name), node.id)

    def _rule_broken(self, error: SchedulingError) -> None:
        provenance = with_provenance(
            KernelError, error.reason, error.node, error.iteration.tag(), self._device.name, ()
        )
        self.fail(provenance, error.node.id)

    def fail(self, error: BaseException, order: int = -1) -> None:
        """Ends the run with `error`: nothing starts any more, what runs is waited for."""
        self.failures.append((self._turn.count(), order, error))
        self.stop()

    def stop(self) -> None:
        """Starts nothing more, cancels coroutines, and lets kernels that run finish."""
        if self.stopped:
            return
        self.stopped = True
        self.scheduler.abort()
        for task in self._tasks:
            task.cancel()
        self.in_flight -= len(self._suspended)
        while self._suspended:
            self._suspended.popleft().generator.close()

    def first_failure(self) -> BaseException | None:
        """Takes the failure of the earliest turn and, within it, of the first node; the others become its notes."""
        if not self.failures:
            return None
        ranked = [error for _, _, error in sorted(self.failures, key=lambda failure: failure[:2])]
        self.failures.clear()  # their tracebacks lead back here
        for other in ranked[1:]:
            first_line = str(other).partition("\n")[0]
            ranked[0].add_note(f"also failed: {type(other).__name__}: {first_line}")
        return ranked[0]

    # -- tracing -------------------------------------------------------------------------------------------------

    def _record(
        self, node: PlanNode, iteration: Iteration, stream: str, started: int, ended: int, result: Any, status: str
    ) -> None:
        trace = self._trace
        if trace is None or self._times is None:
            return
        scheduled = self._times.taken.pop((node, iteration), started)
        if len(trace.firings) >= trace.capacity:
            trace.dropped += 1
            return
        values = () if status != "ok" else (result,) if node.single else result
        trace.firings.append(
            Firing(
                run=self._run_id,
                node=node.name,
                op=node.source.op.name,
                tag=iteration.tag(),
                device=self._device.name,
                stream=stream,
                scheduled_ns=scheduled,
                started_ns=started,
                ended_ns=ended,
                outputs=", ".join(map(describe, values)),
                status=status,
                location=str(node.source.location),
            )
        )
        trace.memory.append(MemorySample(self._device.name, ended, self._device.memory.used))


class _TimedQueue(deque[Any]):
    """A ready queue that remembers when each firing became ready."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: dict[Any, int] = {}

    def append(self, item: Any) -> None:
        self.taken[item] = perf_counter_ns()
        super().append(item)


def _estimate(node: PlanNode, inputs: Sequence[Any]) -> MeasuredCost:
    """A first guess at a kernel's cost, before it has been measured."""
    source = node.source
    if node.estimate is not None:
        too_long = node.estimate.expects(INLINE_LIMIT_NS, inputs)
        return MeasuredCost(base_ns=2 * INLINE_LIMIT_NS if too_long else node.estimate.once_ns)
    if source.op.is_user and source.op.flops is None:
        return MeasuredCost(base_ns=NS_PER_CALL)
    shapes = [getattr(value, "shape", ()) for value in inputs[-len(source.inputs) :]]
    base_ns = kernel_ns(source, shapes, [tensor.shape for tensor in source.outputs])
    return MeasuredCost(base_ns=base_ns, slope_ns=NS_PER_ELEMENT if source.op.flops is None else 0.0)
