"""Drives a scheduler: launches the kernels of ready firings and feeds their results back.

A firing that cannot wait is a plain call. It runs on the event loop if it is known to be short, and on one of the
device's threads if it may take longer than 0.2 ms; only a coroutine op costs a task. On an asynchronous device the call
launches the kernel, whose result counts as there. One executor lives for one run of one partition. The partitions of a
run meet in its rendezvous, and nothing above them schedules them.

An exception ends the run, wherever it is raised: a firing's failure by `Executor.kernel_failed`, any other by
`Executor.broken`. The event loop enters an executor only by `start`, `drive` and the callbacks of `expect`.

For example, a plan on a CPU computes ``b(a(x))``, where `a` takes 10 µs and `b` 2 ms. `start` feeds ``x`` and drives:
`a` is a plain call, its result makes `b` ready, and `b` goes to a thread, with ``in_flight`` at 1. Nothing is ready any
more, so `drive` returns False. When the thread is done, the event loop calls the callback of `expect`: ``in_flight`` is
0, `b` completes, and the executor drives the fetch. Then it is quiet, and so the run ends.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import InitVar, dataclass, field
from functools import partial
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from asyncflow.compiler.plan import Kind
from asyncflow.devices.machine.cost import INLINE_LIMIT_NS, MeasuredCost
from asyncflow.devices.memory import Buffer, MemoryLimitExceeded
from asyncflow.devices.protocol import AsynchronousDevice, Device, Mark, Spans, recording
from asyncflow.errors import DeviceLostError, KernelError
from asyncflow.graph.op import KernelContext
from asyncflow.ops.rows.by_row import Paused
from asyncflow.runtime.executor.coroutines import Coroutines
from asyncflow.runtime.executor.kernels.first_guess import first_guess
from asyncflow.runtime.executor.kernels.provenance import as_kernel_error, with_provenance
from asyncflow.runtime.executor.kernels.sliced_region import in_parts, size_of
from asyncflow.runtime.executor.ports import Ports
from asyncflow.runtime.executor.recorder import Recorder
from asyncflow.runtime.executor.region_launch import Regions
from asyncflow.runtime.executor.threads import (
    goes_to_a_thread,
    launch_on_a_thread,
    must_wait,
    withdraw_all,
)
from asyncflow.runtime.executor.waits import Waits
from asyncflow.runtime.scheduler.scheduler import Scheduler, SchedulingError
from asyncflow.runtime.watch.picks import COMPUTED, UNANSWERED, OnCard
from asyncflow.state.waiting.lines import PlaceInLine

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextvars import Context

    from asyncflow.compiler.plan import Partition, PlanNode
    from asyncflow.devices.swapping import Swapping
    from asyncflow.runtime.executor.scope import PlaceInSession, RunScope
    from asyncflow.runtime.scheduler.frame import Iteration
    from asyncflow.values import Value

_log = logging.getLogger("asyncflow.runtime")

BLOCKED_NS = 5_000_000
"""A session in debug mode logs a kernel that held the event loop for longer (5 ms)."""

_CHECK_EVERY = 32
"""Small firings between two looks at the clock."""


@dataclass(slots=True, eq=False, repr=False)
class Executor:
    """An executor: executes one partition once.

    Invariants: ``in_flight`` counts firings launched and not completed, on threads, in tasks and as copies. After a
    failure or a stop no firing starts, and the owner is notified once ``in_flight`` is 0 and no code is inside `drive`.
    A stop does not wait for ports that wait with nothing in flight (Recvs without a value, items not taken).
    """

    partition: InitVar[Partition]
    run: RunScope
    """Run of the executor; its ports, regions, coroutines and threads look here too."""
    scheduler: Scheduler = field(init=False)
    device: Device = field(init=False)
    """Of the partition."""
    asynchronous: AsynchronousDevice | None = field(init=False)
    """The device, if it is asynchronous."""
    launched: Mark = field(default=None, init=False)
    """Mark for the end of all work that this executor launched on an asynchronous device."""
    recorder: Recorder | None = field(default=None, init=False)
    in_flight: int = field(default=0, init=False)
    is_queued: bool = field(default=False, init=False)
    is_closed: bool = field(default=False, init=False)
    stopped: bool = field(default=False, init=False)
    is_driven: bool = field(default=False, init=False)
    """True while code is inside `drive`."""
    failures: list[tuple[int, int, BaseException]] = field(default_factory=list, init=False)
    submitted: dict[Callable[..., None], Callable[[], bool]] = field(default_factory=dict, init=False)
    """Firings on threads: functions that withdraw them, by the callbacks for their outcomes."""
    _fed: Sequence[Buffer] = field(default=(), init=False)
    """Buffers of the feeds, counted only as long as the executor goes on."""
    _swapping: Swapping | None = field(init=False)
    _throttled: bool = field(default=False, init=False)
    _ended: Mark = field(default=None, init=False)
    """The value of `launched` whose end was asked for."""
    lacks_memory: bool = field(default=False, init=False)
    """An iteration is to begin for which there may be no memory yet."""
    # Made when something is to cross, or is a generator or a coroutine.
    _ports: Ports | None = field(default=None, init=False)
    _regions: Regions | None = field(default=None, init=False)
    _coroutines: Coroutines | None = field(default=None, init=False)
    _waits: Waits | None = field(default=None, init=False)

    def __post_init__(self, partition: Partition) -> None:
        run = self.run
        seed = None if run.options.seed is None else run.options.seed + run.number
        self.scheduler = Scheduler(partition, seed=seed, max_iterations=run.options.max_iterations)
        self.device = run.devices[partition.device]
        self.asynchronous = self.device.asynchronous
        self._swapping = self.device.swapping
        if self._swapping is not None and run.has_age:
            self._swapping.enter(run.number)
        if run.trace is not None:
            number = len(run.executors)
            self.recorder = Recorder(run.trace, run.id, self.device, run.turn.clock, seed, number)
            if self._swapping is not None:
                self.recorder.moves = self._swapping.watch(run.number)
            if self.recorder.ready is not None:
                self.scheduler.ready = self.recorder.ready
            if run.trace.order is not None:
                run.trace.order.join(
                    number, partial(run.turn.enqueue, self), partial(run.turn.loop.call_soon, run.close)
                )

    # -- the loop ------------------------------------------------------------------------------------------------

    def start(self, fed: Sequence[Value]) -> None:
        """Deliver its part of the plan's feeds, and drive as far as the current turn allows."""
        feeds = list(map(fed.__getitem__, self.scheduler.partition.feed_indexes))
        try:
            if self.asynchronous is None:
                if self._swapping is not None or self.device.pacing is not None:  # it has a limit
                    self._fed = self.device.memory.uncounted(feeds)
                self._begin(feeds)
            else:
                if self.asynchronous.charge is not None:
                    self.asynchronous.charge("run", 1)
                self._ports = Ports(self)
                self._ports.copy_in(self.asynchronous, feeds, self._begin)
        except BaseException as error:
            self.broken(error)

    def _begin(self, feeds: Sequence[Value]) -> None:
        try:
            if not self.stopped:
                self.scheduler.start(feeds)
        except SchedulingError as error:
            self._rule_broken(error)
        if self.stopped:
            self.check_quiet()
        else:
            self.run.turn.drive_now(self)

    def drive(self, deadline_ns: int) -> bool:
        """Executes ready firings until none is left (False) or the deadline has passed (True)."""
        if self.is_closed or self._throttled:
            return False
        run = self.run
        if run.in_caller:
            if run.leaves_to_caller(self.drive_in_caller):
                return False
        elif run.awaited is not None and run.awaited.cancelled():  # the task will learn of it in its next turn
            run.stop("cancelled")
            return False
        if run.ticket is not None and run.ticket.is_aside and not self._may_go_on(run.ticket):
            return False
        self.is_driven = True
        try:
            if run.own_context is not None:
                # A copy: one partition may be driven from inside another, and no context is entered twice.
                has_more = run.own_context.copy().run(self._drive_on_device, deadline_ns)
            elif self.asynchronous is None:
                has_more = self._drive(deadline_ns)
            else:
                with self.asynchronous.activate():
                    has_more = self._drive(deadline_ns)
        except BaseException as error:
            self.fail(self._named(error))
            has_more = False
        self.is_driven = False
        if not has_more:
            if not self.in_flight:
                self.run.on_quiet()
            elif self.run.ticket is not None:
                self.run.look_aside()
        return has_more

    def _may_go_on(self, ticket: PlaceInSession) -> bool:
        """Return True if the run, which stepped aside, has its place in the session again, or needs none.

        Its called firings claim their results here: others may stand behind them in line.
        """
        if self._regions is not None:
            self._regions.claim()
        if self.stopped:
            return False
        if all(node.kind == Kind.FETCH for node, _ in self.scheduler.ready) and not self._has_suspended:
            return True  # no kernel goes on
        if not ticket.is_aside:
            return True  # somebody whom a claim has woken has brought it back
        return ticket.come_back(self.run.come_back)

    def _drive_on_device(self, deadline_ns: int) -> bool:
        with nullcontext() if self.asynchronous is None else self.asynchronous.activate():
            return self._drive(deadline_ns)

    def on_thread(
        self, work: Callable[..., object], args: tuple[Value, ...]
    ) -> tuple[Callable[..., object], tuple[Value, ...]]:
        """Return `work` and `args` as a thread calls them, where kernels have to find the run's taken elements."""
        own = self.run.own_context
        return (work, args) if own is None else (own.copy().run, (work, *args))

    def drive_in_caller(self) -> None:
        """Go on in the task of the run's caller."""
        if not (self.is_closed or self.is_driven):
            self.run.turn.drive_in_caller(self)

    def _drive(self, deadline_ns: int) -> bool:
        # What is ready goes first. A suspended region comes behind it: others may wait for what is ready, and regions
        # have no end that is known. Arrivals at an asynchronous device come last, since each holds up its stream until
        # the copy is done. Names are local and a small kernel is called here, not in `_launch`, because thousands of
        # firings pass in a turn of 1 ms: each further call or attribute is a good part of what a firing costs.
        scheduler = self.scheduler
        ready = scheduler.ready
        next_firing = scheduler.next_firing
        complete = scheduler.complete
        # That of the run: a pooled loop asks whose activation it is.
        in_context = self.run.context.run
        quick = self.recorder is None
        # Where nothing is waited for, an iteration has ended when it is launched, and other partitions wait to be told.
        is_eager = self.asynchronous is not None
        charge = None if self.asynchronous is None else self.asynchronous.charge
        # A clock costs as much as a small firing, so it is looked at once in a while: `budget` counts down by 1 for a
        # small firing, by 8 for one that takes `_launch`, and by all for a region, which is a slice long.
        budget = _CHECK_EVERY
        # The current firing, which has failed if something raises; None where no firing would be to blame.
        node = iteration = None
        inputs: Sequence[Value] = ()
        try:
            while True:
                # Asked only where something is ready: most drives end behind the one firing that they launch.
                firing = next_firing() if ready else None
                if charge is not None and scheduler.routed:
                    charge("primitive", scheduler.routed)
                    scheduler.routed = 0
                if is_eager and scheduler.ended:
                    self._acknowledge_ended()
                    if self.stopped:
                        break
                if firing is not None:
                    node, iteration, inputs = firing
                    if node.is_small and quick:
                        complete(node, iteration, node.kernel(*inputs))  # type: ignore[misc]
                        budget -= 1
                        if budget > 0:
                            continue
                    elif node.is_light and quick:
                        result = in_context(node.kernel, *inputs)  # type: ignore[arg-type]
                        if isinstance(result, PlaceInLine):
                            self._wait(result, node, iteration, inputs)
                        else:
                            complete(node, iteration, result)
                        budget -= 1
                    else:
                        self._launch(node, iteration, inputs)
                        budget -= 8
                elif ready:  # many primitives were routed
                    budget = 0 if scheduler.asks else budget - 8
                else:
                    node = None
                    budget -= 1
                    if self._waits is not None and self._waits.new:
                        self._waits.look()
                    elif self._regions is not None and self._regions.suspended:
                        if not self.lacks_memory:
                            self._regions.step(deadline_ns)
                        budget = 0
                    elif self._ports is not None and self._ports.incoming:
                        self._ports.take_incoming()
                    else:
                        break
                if self.stopped:  # by a failure, or by somebody who was woken
                    break
                if budget <= 0:
                    node = None
                    has_more = self._look_around(deadline_ns)
                    if has_more is not None:
                        return has_more
                    budget = _CHECK_EVERY
        except SchedulingError as error:
            self._rule_broken(error)
        except BaseException as error:
            if node is None or iteration is None:
                raise  # no firing's failure
            self.kernel_failed(error, node, iteration, inputs)
        if scheduler.ended:
            self._acknowledge_ended()
        if self.asynchronous is not None:
            self.launched = self.asynchronous.mark()
        return False

    def _look_around(self, deadline_ns: int) -> bool | None:
        """Do rare checks; return None if driving goes on, and otherwise True if there is more to do."""
        if self.scheduler.ended:
            self._acknowledge_ended()
        if self._waits is not None and self._waits.new:
            self._waits.look()  # others may always be ready
        if self.stopped:
            return None  # and then nothing is left
        if self._has_to_pause():
            self._throttled = True
            self.in_flight += 1
            return False
        return True if self.run.turn.now() >= deadline_ns else None

    def _acknowledge_ended(self) -> None:
        if self._ports is None:  # a dead iteration ends where no value has come in or gone out
            self._ports = Ports(self)
        self._ports.acknowledge_ended()

    def _has_to_pause(self) -> bool:
        """Return True if the device, or its memory, needs time before further launches; `_resume` is called then."""
        device, swapping = self.asynchronous, self._swapping
        if device is not None and device.throttle(self._resume):
            return True
        asks, self.scheduler.asks = self.scheduler.asks, []
        if swapping is None:
            if asks and self.device.pacing is not None:
                self.device.pacing.asks(self.run.number, asks)
            return False
        lacks, self.lacks_memory = self.lacks_memory, False
        run = self.run.number if lacks or (asks and swapping.lacks(self.run.number, *asks)) else None
        return swapping.throttle(self._resume, self.run.turn.loop, run)

    def _resume(self) -> None:
        """Resume after the device has caught up with the launched work."""
        if not self._throttled:
            return  # it failed when it was asked
        self._throttled = False
        self.in_flight -= 1
        try:
            # They must not wait for ever behind a loop that is always ready.
            while self._ports is not None and self._ports.incoming and not self.stopped:
                self._ports.take_incoming()
        except BaseException as error:
            self.broken(error)
        else:
            self.go_on()

    def expect(self, take: Callable[..., None], then: Callable[[], None] | None = None) -> Callable[..., None]:
        """Return a callback for work in flight, to be called once it has ended: `take` gets ``(value, error, ...)``.

        Then the run goes on, by ``then()`` if it is given. A device may accept a request and fail afterwards: of later
        calls only an error counts.
        """
        self.in_flight += 1
        is_awaited = True

        def deliver(value: Value, error: BaseException | None, *times: int) -> None:
            nonlocal is_awaited
            if not is_awaited:
                if error is not None and not self.is_closed:
                    self.broken(error)
                return
            is_awaited = False
            self.in_flight -= 1
            if self.submitted:
                self.submitted.pop(take, None)
            try:
                take(value, error, *times)
            except BaseException as raised:
                self.fail(self._named(raised))
            try:
                (then or self.go_on)()
            except BaseException as raised:
                self.broken(raised)

        return deliver

    def when_done(
        self,
        mark: Mark,
        done: Callable[[], None] | None = None,
        then: Callable[[], None] | None = None,
        *,
        elsewhere: bool = False,
    ) -> None:
        """Calls ``done()``, unless the run has been stopped by then, when the device has come as far as `mark`.

        Args:
            mark: None for the end of all that is launched by now.
            done: called then.
            then: as of `expect`.
            elsewhere: another device is told.
        """
        assert self.asynchronous is not None

        def take(_: object, error: BaseException | None) -> None:
            if error is not None:
                self.fail(error)
            elif done is not None and not self.stopped:
                done()

        deliver = self.expect(take, then)
        try:
            self.asynchronous.when_done(partial(deliver, None), mark, elsewhere=elsewhere)
        except BaseException as error:
            deliver(None, error)

    @property
    def is_quiet(self) -> bool:
        """True if no work is left or in flight, unless another partition sends a value."""
        if self.in_flight or self.is_driven:
            return False
        scheduler, ports, regions = self.scheduler, self._ports, self._regions
        return self.stopped or not (
            scheduler.ready
            or scheduler.ended
            or (regions is not None and regions.suspended)
            or (ports is not None and (ports.untaken or ports.incoming))
        )

    @property
    def is_in_line(self) -> bool:
        """True if all that is left waits for other runs in lines of queues and the like, or for the stream's consumer.

        With ``max_runs="auto"`` that includes coroutines.
        """
        scheduler, ports = self.scheduler, self._ports
        if self.is_driven or self.stopped or scheduler.ready or scheduler.ended or self._has_suspended:
            return False
        untaken = 0 if ports is None else ports.untaken
        if ports is not None and ports.incoming:
            return False
        kinds = (self._waits, self._regions, self._coroutines)
        in_line = sum(kind.in_line for kind in kinds if kind is not None)
        return in_line == self.in_flight and in_line + untaken > 0

    @property
    def is_auto(self) -> bool:
        """True if the run gives its place to others whenever it waits."""
        return self.run.ticket is not None and self.run.ticket.is_auto

    @property
    def _has_suspended(self) -> bool:
        return self._regions is not None and bool(self._regions.suspended)

    def has_launched(self, then: Callable[[], None]) -> bool:
        """Return True if an asynchronous device may still work for this; ``then()`` is called when it has ended."""
        if self.asynchronous is None or self._ended is self.launched:
            return False
        self._ended = self.launched
        self.when_done(self.launched, then=then)
        return True

    def check_quiet(self) -> None:
        """Has the owner look whether anything is left to do or in flight."""
        if not self.is_closed:
            self.run.on_quiet()

    def waiting(self) -> list[str]:
        """A line for each firing that waits for others, for messages."""
        kinds = (self._waits, self._regions, self._coroutines)
        return [line for kind in kinds if kind is not None for line in kind.describe()]

    def close(self) -> None:
        """Lets go of the run, which has ended: no cycle may hold its values."""
        self.is_closed = True
        if self._coroutines is not None:
            self._coroutines.close()
        if self._swapping is not None:
            self._swapping.leave(self.run.number)
        elif self.device.pacing is not None:
            self.device.pacing.leaves(self.run.number)
        if self._fed:
            self.device.memory.forget(self._fed)
        del self.run, self._fed, self._ports, self._regions, self._coroutines, self._waits

    # -- launching -----------------------------------------------------------------------------------------------

    def _launch(self, node: PlanNode, iteration: Iteration, inputs: Sequence[Value]) -> None:
        """Starts a firing that is timed, traced, needs its context, or may wait."""
        if node.crossing:
            if self._ports is None:
                self._ports = Ports(self)
            self._ports.cross(node, iteration, inputs)
            return
        if node.needs_context:
            run = self.run
            inputs = (
                KernelContext(seed=run.seed, run=run.number, tag=iteration.counters(), at_end=run.at_end),
                *inputs,
            )
        if self.recorder is not None and self.recorder.order is not None:
            answer = self.recorder.answer(node, iteration)
            if answer is UNANSWERED:
                return  # nor was it in the run that is done again
            if isinstance(answer, OnCard):
                if self._ports is None:
                    self._ports = Ports(self)
                self._ports.give(node, iteration, inputs, answer)
                return
            if answer is not COMPUTED:
                self.recorder.given(node, iteration, answer)
                self.complete(node, iteration, inputs, answer)
                return
        if node.waits_in_line:
            began = 0 if self.recorder is None else self.recorder.now()
            result = self.run.context.run(node.kernel, *inputs)  # type: ignore[arg-type]
            if isinstance(result, PlaceInLine):
                self._wait(result, node, iteration, inputs)
                return
            if self.recorder is not None:
                self.recorder.firing(node, iteration, "inline", began, self.recorder.now(), result, "ok")
            self.complete(node, iteration, inputs, result)
            return
        if node.is_async:
            if self._coroutines is None:
                self._coroutines = Coroutines(self)
            self._coroutines.launch(node, iteration, inputs)
            return
        if node.region is not None and node.region.is_generator:
            if self._regions is None:
                self._regions = Regions(self)
            self._regions.launch(node, iteration, inputs)
            return
        if isinstance(self.run.begun, Paused):
            launch_on_a_thread(self, node, iteration, inputs, size_of(inputs), self.run.begun)
            return
        swapping = self._swapping
        if self.asynchronous is not None:
            is_held_up = swapping is not None and swapping.has_file and must_wait(swapping, node, inputs)
            if not is_held_up or not self._launch_later(node, iteration, inputs):
                self._launch_asynchronous(self.asynchronous, node, iteration, inputs)
            return
        has_to_wait = swapping is not None and must_wait(swapping, node, inputs)
        size = size_of(inputs)
        cost: MeasuredCost | None = node.cost
        if cost is None:
            cost = node.cost = first_guess(node, inputs)
        expected_ns = cost.predict_ns(size)
        may_leave = expected_ns > INLINE_LIMIT_NS or node.owner is not None
        if has_to_wait or (may_leave and goes_to_a_thread(self, node, expected_ns)):
            launch_on_a_thread(self, node, iteration, inputs, size)
            return
        started = perf_counter_ns()
        try:
            result = self._call_user(node, iteration, inputs) if node.is_user else node.kernel(*inputs)  # type: ignore[misc]
        except BaseException as error:
            if self.recorder is not None:
                self.recorder.firing(node, iteration, "inline", started, perf_counter_ns(), None, "error")
            self.kernel_failed(error, node, iteration, inputs)
            return
        ended = perf_counter_ns()
        cost.observe(size, ended - started)
        if self.run.options.debug and ended - started > BLOCKED_NS:
            _log.warning(
                "%s (%s) held the event loop for %.1f ms; declare its cost=, or make it a coroutine\n  built at %s",
                node.name,
                node.source.op.name,
                (ended - started) / 1e6,
                node.source.location,
            )
        if isinstance(result, Paused):
            launch_on_a_thread(self, node, iteration, inputs, size, result)
            return
        if self.recorder is not None:
            self.recorder.firing(node, iteration, "inline", started, ended, result, "ok")
        self.complete(node, iteration, inputs, result)

    def context_of(self, node: PlanNode, iteration: Iteration) -> Context:
        """The context of a firing: its run's, with a log of its calls where these are written down or given again."""
        if self.recorder is None or self.recorder.order is None:
            return self.run.context
        return self.recorder.context_of(self.run.context, node, iteration)

    def _call_user(self, node: PlanNode, iteration: Iteration, inputs: Sequence[Value]) -> Value:
        return self.context_of(node, iteration).run(in_parts(node), *inputs)

    def _wait(self, place: PlaceInLine, node: PlanNode, iteration: Iteration, inputs: Sequence[Value]) -> None:
        if self._waits is None:
            self._waits = Waits(self)
        self._waits.add(place, node, iteration, inputs)

    def _launch_later(self, node: PlanNode, iteration: Iteration, inputs: Sequence[Value]) -> bool:
        """Launches a kernel once a saved value is there, or there is room for one; False where that is so by now."""
        assert self._swapping is not None

        def take(_value: Value, _error: BaseException | None) -> None:
            if not self.stopped:
                self._launch(node, iteration, inputs)

        deliver = self.expect(take)
        if self._swapping.throttle(partial(deliver, None, None), self.run.turn.loop):
            return True
        self.in_flight -= 1
        return False

    def _launch_asynchronous(
        self, device: AsynchronousDevice, node: PlanNode, iteration: Iteration, inputs: Sequence[Value]
    ) -> None:
        """Launches a kernel; its result is there in the order of its stream."""
        assert node.kernel is not None
        spans = self.new_spans()
        try:
            with recording(device, spans):
                result = self._call_user(node, iteration, inputs) if node.is_user else node.kernel(*inputs)
        except BaseException as error:
            self.kernel_failed(error, node, iteration, inputs)
            return
        self.record_spans(spans, device, node, iteration, result)
        self.complete(node, iteration, inputs, result)

    def recording(self, spans: Spans | None) -> AbstractContextManager[None]:
        """Inside, an asynchronous device records into `spans`."""
        return nullcontext() if self.asynchronous is None else recording(self.asynchronous, spans)

    def complete(self, node: PlanNode, iteration: Iteration, inputs: Sequence[Value], result: Any) -> None:
        """Accounts for the result and hands it to the scheduler."""
        track = self.device.memory.track
        try:
            if node.single:
                track(result, node.name)
            else:
                for value in result:
                    track(value, node.name)
            self.scheduler.complete(node, iteration, result)
        except MemoryLimitExceeded as error:
            self.kernel_failed(error, node, iteration, inputs)
        except SchedulingError as error:
            self._rule_broken(error)

    def go_on(self, *, later: bool = False) -> None:
        """Go on after work in flight has ended.

        Args:
            later: in the next turn, as the caller may be in the middle of another run, and deep in it.
        """
        if self.stopped:
            self.check_quiet()
        elif not self.is_driven:  # else it goes on anyway
            if self.run.in_caller:
                if not self.run.leaves_to_caller(self.drive_in_caller, later=later):
                    self.drive_in_caller()
                return
            turn = self.run.turn
            (turn.enqueue if later else turn.drive_now)(self)

    # -- ending --------------------------------------------------------------------------------------------------

    def kernel_failed(
        self, error: BaseException, node: PlanNode, iteration: Iteration, inputs: Sequence[Value]
    ) -> None:
        """Ends the run because a firing failed."""
        if self.recorder is not None:
            self.recorder.failed(node, iteration, error)
        self.fail(as_kernel_error(error, node, iteration.tag(), inputs, self.device.name), node.id)

    def _rule_broken(self, error: SchedulingError) -> None:
        reason, node, tag = error.reason, error.node, error.iteration.tag()
        if isinstance(reason, str):
            self.fail(with_provenance(KernelError, reason, node, tag, self.device.name, ()), node.id)
        else:
            self.fail(as_kernel_error(reason, node, tag, (), self.device.name), node.id)

    def broken(self, error: BaseException) -> None:
        """Ends the run because something raised that is no firing: a device's call, say."""
        if self.is_closed:
            raise error  # nobody waits for this run any more
        self.fail(self._named(error))
        self.check_quiet()

    def _named(self, error: BaseException) -> BaseException:
        error.add_note(f"raised by device {self.device.name} or on its behalf, outside of any node")
        return error

    def fail(self, error: BaseException, order: int = -1) -> None:
        """Ends the run with `error`: nothing starts any more, what runs is waited for."""
        if isinstance(error, DeviceLostError) and self._swapping is not None:
            self._swapping.tell_loss(error, self.run.number)
        self.failures.append((self.run.turn.count(), order, error))
        self.run.on_failed()  # all at once: what one of them gives up must not go to another
        self.stop()

    def stop(self) -> None:
        """Starts nothing more, cancels coroutines, and lets kernels that run finish."""
        if self.stopped:
            return
        self.stopped = True
        self.scheduler.abort()
        if self._swapping is not None:
            self._swapping.leave(self.run.number)
        if self._ports is not None:
            self._ports.incoming.clear()
        if self._coroutines is not None:
            self._coroutines.cancel()
        if self._waits is not None:
            self._waits.leave()
        if self.submitted:
            withdraw_all(self)
        for error in () if self._regions is None else self._regions.stop():
            self.failures.append((self.run.turn.count(), -1, self._named(error)))

    def new_spans(self) -> Spans | None:
        """The list that an asynchronous device is to record into; None if the run is not traced."""
        return None if self.recorder is None else self.recorder.new_spans()

    def record_spans(
        self,
        spans: Spans | None,
        device: AsynchronousDevice,
        node: PlanNode,
        iteration: Iteration | None,
        result: Value,
    ) -> None:
        """Record a device's work for one firing (None: before any)."""
        if spans and self.recorder is not None:
            self.recorder.spans(spans, device, node, iteration, result)
