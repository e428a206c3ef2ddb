"""Drives a scheduler: launches the kernels of ready firings and feeds their results back.

A firing that cannot wait is a plain call. It runs on the event loop if it is known to be short. It runs on one of the
device's threads if it may take longer than 0.2 ms. Only a coroutine op costs a task. On an asynchronous device the call
launches the kernel, whose result counts as there. One executor lives for one run of one partition. The partitions of a
run meet in its rendezvous, and nothing above them schedules them.

`PartitionRun` has the state, and says how it ends. The event loop enters an executor only by `start`, `drive` and the
callbacks of `PartitionRun.expect`.

For example, a plan on a CPU computes ``b(a(x))``, where `a` takes 10 µs and `b` 2 ms. `start` feeds ``x`` and drives:
`a` is a plain call, its result makes `b` ready, and `b` goes to a thread, with ``in_flight`` at 1. Nothing is ready any
more, so `drive` returns False. When the thread is done, the event loop calls the callback of `expect`: ``in_flight`` is
0, `b` completes, and the executor drives the fetch. Then it is quiet, and so the run ends.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from functools import partial
from time import perf_counter_ns
from typing import TYPE_CHECKING

from asyncflow.compiler.plan import FiringWay, Kind
from asyncflow.devices.machine.cost import INLINE_LIMIT_NS
from asyncflow.devices.protocol import AsynchronousDevice, recording
from asyncflow.graph.op import KernelContext
from asyncflow.ops.rows.by_row import Paused
from asyncflow.ops.user.recorded_calls import Raised
from asyncflow.runtime.executor.coroutines import Coroutines
from asyncflow.runtime.executor.kernels.first_guess import first_guess
from asyncflow.runtime.executor.kernels.sliced_region import in_parts, size_of
from asyncflow.runtime.executor.partition_run import PartitionRun
from asyncflow.runtime.executor.ports import Ports
from asyncflow.runtime.executor.region_launch import Regions
from asyncflow.runtime.executor.threads import (
    goes_to_a_thread,
    launch_on_a_thread,
    must_wait,
)
from asyncflow.runtime.executor.waits import Waits
from asyncflow.runtime.scheduler.scheduler import SchedulingError
from asyncflow.runtime.watch.picks import COMPUTED, UNANSWERED, OnCard
from asyncflow.state.waiting.lines import PlaceInLine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncflow.compiler.plan import PlanNode
    from asyncflow.runtime.executor.scope import PlaceInSession
    from asyncflow.runtime.scheduler.frame import Iteration
    from asyncflow.values import Value

_SMALL, _LIGHT, _LINED = int(FiringWay.SMALL), int(FiringWay.LIGHT), (int(FiringWay.LIGHT), int(FiringWay.IN_LINE))
_AWAITED, _SLICED, _SEND = int(FiringWay.AWAITED), int(FiringWay.SLICED), int(FiringWay.SEND)

_log = logging.getLogger("asyncflow.runtime")

BLOCKED_NS = 5_000_000
"""A session in debug mode logs a kernel that held the event loop for longer (5 ms)."""

_CHECK_EVERY = 32
"""Small firings between two looks at the clock."""


class Executor(PartitionRun):
    """An executor: executes one partition once."""

    __slots__ = ()

    # -- the loop ----------------------------------------------------------------------------------------------------

    def start(self, fed: Sequence[Value]) -> None:
        """Deliver its part of the plan's feeds, and drive as far as the current turn allows."""
        feeds = list(map(fed.__getitem__, self.scheduler.partition.feed_indexes))
        try:
            if self.asynchronous is None:
                if self._swapping is not None or self.device.pacing is not None:  # the device has a memory limit
                    self._fed = self.device.memory.uncounted(feeds)
                self.scheduler.start(feeds)
                self.run.turn.drive_now(self)
            else:
                if self.asynchronous.charge is not None:
                    self.asynchronous.charge("run", 1)
                self._ports = Ports(self)
                self._ports.copy_in(self.asynchronous, feeds, self._begin)
        except SchedulingError as error:
            self._rule_broken(error)
            self.check_quiet()
        except BaseException as error:
            self.broken(error)

    def _begin(self, feeds: Sequence[Value]) -> None:
        """Go on once the feeds are on their way to the device."""
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
        elif run.awaited is not None and run.awaited.cancelled():  # the task sees the cancellation in its next turn
            run.stop("cancelled")
            return False
        if run.ticket is not None and run.ticket.is_aside and not self._may_go_on(run.ticket):
            return False
        self.is_driven = True
        try:
            if run.own_context is not None:
                # A copy: one partition may be driven from inside another, and a context cannot be entered twice.
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
            return True  # only fetches are left
        if not ticket.is_aside:
            return True  # another call has brought the run back
        return ticket.come_back(self.run.come_back)

    def _drive_on_device(self, deadline_ns: int) -> bool:
        with nullcontext() if self.asynchronous is None else self.asynchronous.activate():
            return self._drive(deadline_ns)

    def drive_in_caller(self) -> None:
        """Go on in the task of the run's caller."""
        if not (self.is_closed or self.is_driven):
            self.run.turn.drive_in_caller(self)

    def _drive(self, deadline_ns: int) -> bool:
        # Ready firings go first. Suspended regions come next: other work may wait for the ready firings, and no region
        # has a known end. Arrivals at an asynchronous device come last, since each holds up its stream until the copy
        # is done. Names are local and a small kernel is called here, not in `_launch`: thousands of firings pass in a
        # turn of 1 ms. Each further call or attribute is a good part of the cost of a firing.
        scheduler = self.scheduler
        ready = scheduler.ready
        next_firing = scheduler.next_firing
        complete = scheduler.complete
        # Kernels run in the run's context: a pooled loop reads there which run its activation belongs to.
        in_context = self.run.context.run
        quick = self.recorder is None
        small, light = _SMALL, _LIGHT
        # On an asynchronous device an iteration ends when it is launched, and other partitions wait for that news.
        is_eager = self.asynchronous is not None
        charge = None if self.asynchronous is None else self.asynchronous.charge
        # Reading the clock costs as much as a small firing, so it is read once in a while. `budget` falls by 1 for a
        # small firing, by 8 for a firing that takes `_launch`, and to 0 for a region, which takes a slice.
        budget = _CHECK_EVERY
        # The current firing, which has failed if an exception is raised; None if no firing would be the cause.
        node = iteration = None
        inputs: Sequence[Value] = ()
        try:
            while True:
                # Called only if firings are ready: most drives end after launching a single firing.
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
                    way = node.way
                    if way == small and quick:
                        complete(node, iteration, node.kernel(*inputs))  # type: ignore[misc]
                        budget -= 1
                        if budget > 0:
                            continue
                    elif way == light and quick:
                        result = in_context(node.kernel, *inputs)  # type: ignore[arg-type]
                        if isinstance(result, PlaceInLine):
                            self._wait(result, node, iteration, inputs)
                        else:
                            complete(node, iteration, result)
                        budget -= 1
                    else:
                        self._launch(node, iteration, inputs)
                        budget -= 8
                elif ready:  # routed many primitives
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
                if self.stopped:  # by a failure, or by a woken run
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
            self._waits.look()  # checked here, as other work may always be ready
        if self.stopped:
            return None  # stopped: no work is left
        if self._has_to_pause():
            self._throttled = True
            self.in_flight += 1
            return False
        return True if self.run.turn.now() >= deadline_ns else None

    def _acknowledge_ended(self) -> None:
        if self._ports is None:  # a dead iteration may end without any value sent or received
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
            return  # the device failed when it was asked
        self._throttled = False
        self.in_flight -= 1
        try:
            # Incoming values must not wait for ever behind a loop that is always ready.
            while self._ports is not None and self._ports.incoming and not self.stopped:
                self._ports.take_incoming()
        except BaseException as error:
            self.broken(error)
        else:
            self.go_on()

    # -- launching ---------------------------------------------------------------------------------------------------

    def _launch(self, node: PlanNode, iteration: Iteration, inputs: Sequence[Value]) -> None:
        """Starts a firing that is timed, traced, needs its context, or may wait."""
        run, swapping = self.run, self._swapping
        way, conduct = node.way, node.conduct
        if way >= _SEND:
            if self._ports is None:
                self._ports = Ports(self)
            self._ports.cross(node, iteration, inputs)
            return
        if conduct.needs_context:
            context = KernelContext(seed=run.seed, run=run.number, tag=iteration.counters(), at_end=run.at_end)
            inputs = (context, *inputs)
        if self.recorder is not None and self.recorder.order is not None and self._is_answered(node, iteration, inputs):
            return
        if way in _LINED:
            self._claim(node, iteration, inputs)
            return
        if way == _AWAITED:
            if self._coroutines is None:
                self._coroutines = Coroutines(self)
            self._coroutines.launch(node, iteration, inputs)
            return
        if way == _SLICED:
            if self._regions is None:
                self._regions = Regions(self)
            self._regions.launch(node, iteration, inputs)
            return
        if isinstance(run.begun, Paused):
            launch_on_a_thread(self, node, iteration, inputs, size_of(inputs), run.begun)
            return
        if self.asynchronous is not None:
            is_held_up = swapping is not None and swapping.has_file and must_wait(swapping, node, inputs)
            if not is_held_up or not self._launch_later(node, iteration, inputs):
                self._launch_asynchronous(self.asynchronous, node, iteration, inputs)
            return
        size = size_of(inputs)
        cost = node.times.cost
        if cost is None:
            cost = node.times.cost = first_guess(node, inputs)
        expected_ns = cost.predict_ns(size)
        may_leave = expected_ns > INLINE_LIMIT_NS or conduct.alone is not None
        has_to_wait = swapping is not None and must_wait(swapping, node, inputs)
        if has_to_wait or (may_leave and goes_to_a_thread(self, node, expected_ns)):
            launch_on_a_thread(self, node, iteration, inputs, size)
            return
        started = perf_counter_ns()
        try:
            result = self._call_user(node, iteration, inputs) if conduct.is_user else node.kernel(*inputs)  # type: ignore[misc]
        except BaseException as error:
            if self.recorder is not None:
                self.recorder.firing(node, iteration, "inline", started, perf_counter_ns(), None, "error")
            self.kernel_failed(error, node, iteration, inputs)
            return
        ended = perf_counter_ns()
        cost.observe(size, ended - started)
        if run.options.debug and ended - started > BLOCKED_NS:
            _warn_blocked(node, ended - started)
        if isinstance(result, Paused):
            launch_on_a_thread(self, node, iteration, inputs, size, result)
            return
        if self.recorder is not None:
            self.recorder.firing(node, iteration, "inline", started, ended, result, "ok")
        self.complete(node, iteration, inputs, result)

    def _is_answered(self, node: PlanNode, iteration: Iteration, inputs: Sequence[Value]) -> bool:
        """Completes a firing whose answer is in the record of the run that is done again; False for any other."""
        assert self.recorder is not None
        answer = self.recorder.answer(node, iteration)
        if answer is COMPUTED:
            return False
        if isinstance(answer, OnCard):
            if self._ports is None:
                self._ports = Ports(self)
            self._ports.give(node, iteration, inputs, answer)
        elif isinstance(answer, Raised):
            self.fail(answer.error(), node.source.id)
        elif answer is not UNANSWERED:  # UNANSWERED: the recorded run ended before the answer came
            self.recorder.given(node, iteration, answer)
            self.complete(node, iteration, inputs, answer)
        return True

    def _claim(self, node: PlanNode, iteration: Iteration, inputs: Sequence[Value]) -> None:
        """Starts a firing that claims something in line, and waits in line where that is not there yet."""
        began = 0 if self.recorder is None else self.recorder.now()
        result = self.run.context.run(node.kernel, *inputs)  # type: ignore[arg-type]
        if isinstance(result, PlaceInLine):
            self._wait(result, node, iteration, inputs)
            return
        if self.recorder is not None:
            self.recorder.firing(node, iteration, "inline", began, self.recorder.now(), result, "ok")
        self.complete(node, iteration, inputs, result)

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
                result = self._call_user(node, iteration, inputs) if node.conduct.is_user else node.kernel(*inputs)
        except BaseException as error:
            self.kernel_failed(error, node, iteration, inputs)
            return
        if self.recorder is not None:
            self.recorder.ended(node, iteration, result, at_once=True)
        self.record_spans(spans, device, node, iteration, result)
        self.complete(node, iteration, inputs, result)


def _warn_blocked(node: PlanNode, taken_ns: int) -> None:
    _log.warning(
        "%s (%s) held the event loop for %.1f ms; declare its cost=, or make it a coroutine\n  built at %s",
        node.name,
        node.source.op.name,
        taken_ns / 1e6,
        node.source.location,
    )
