"""Drives the regions of one partition that are generators: in slices on the event loop, or to their end on a thread.

On an asynchronous device a slice launches, and the device decides whether it goes on.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from time import perf_counter_ns
from types import GeneratorType
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from asyncflow.devices.machine.cost import INLINE_LIMIT_NS, ON_A_THREAD
from asyncflow.runtime.executor.kernels.sliced_region import SlicedRegion, Stopped
from asyncflow.runtime.executor.threads import goes_to_a_thread, held, submit
from asyncflow.state.waiting.awaiting import wake_on
from asyncflow.state.waiting.lines import ToldPlace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from asyncflow.compiler.plan import PlanNode
    from asyncflow.devices.cpu.lanes import Times
    from asyncflow.runtime.executor.partition_run import PartitionRun
    from asyncflow.runtime.scheduler.frame import Iteration
    from asyncflow.values import Value

T = TypeVar("T")


class Regions:
    """The regions of one executor.

    Attributes:
        suspended: firings that go on when nothing else is ready.
    """

    __slots__ = ("_executor", "_waiting", "suspended")

    def __init__(self, executor: PartitionRun) -> None:
        self.suspended: deque[SlicedRegion] = deque()
        self._waiting: dict[SlicedRegion, None] = {}
        self._executor = executor

    def stop(self) -> Iterator[BaseException]:
        """End suspended and waiting regions; yield their exceptions."""
        self._executor.in_flight -= len(self._waiting)
        self.suspended.extend(self._waiting)
        self._waiting.clear()
        while self.suspended:
            try:
                self.suspended.popleft().close()
            except BaseException as error:
                yield error

    @property
    def in_line(self) -> int:
        """Number of regions that wait for other runs."""
        return sum(not isinstance(firing.place, ToldPlace) for firing in self._waiting)

    def claim(self) -> None:
        """Claim the results for firings that go on; a region whose turn it is not yet waits again."""
        called, self.suspended = self.suspended, deque()
        for firing in called:
            if firing.place is None or firing.place.claim_early():
                self.suspended.append(firing)
            else:
                self._put_back(firing)

    def describe(self) -> list[str]:
        """A line for each that waits in a line, for messages."""
        return [firing.describe() for firing in self._waiting]

    def launch(self, node: PlanNode, iteration: Iteration, inputs: Sequence[Value]) -> None:
        """Starts a firing: on a thread if it is known to hold one for long."""
        assert node.kernel is not None and node.times.estimate is not None
        executor = self._executor
        begun = executor.run.begun
        if isinstance(begun, GeneratorType):
            firing = SlicedRegion(node, iteration, inputs, begun)
            firing.budget = 1
            self._on_stream(firing)
            return
        spans = executor.new_spans()
        with executor.recording(spans):
            clock = None if executor.asynchronous is None else executor.asynchronous.now_ns
            is_traced = executor.recorder is not None and executor.asynchronous is None
            firing = SlicedRegion(node, iteration, inputs, node.kernel(*inputs), spans, clock, is_traced=is_traced)
        # A thread gains nothing if steps only launch.
        hold_ns = firing.expected_hold_ns() if executor.asynchronous is None else 0.0
        may_leave = hold_ns > INLINE_LIMIT_NS or node.conduct.alone is not None
        if may_leave and executor.asynchronous is None and goes_to_a_thread(executor, node, hold_ns):
            self._on_stream(firing)
        else:
            self.suspended.append(firing)

    def step(self, deadline_ns: int) -> None:
        """Run slices of the oldest region until it ends, the turn ends, or it proves too heavy for the event loop."""
        executor, firing = self._executor, self.suspended.popleft()
        node, iteration, device = firing.node, firing.iteration, executor.asynchronous
        began, now = perf_counter_ns(), 0
        run_slice = firing.run_slice
        if node.conduct.is_user:
            run_slice = partial(executor.run.context.run, _quiet, run_slice)
        try:
            with executor.recording(firing.spans):
                while now < deadline_ns:
                    now = run_slice()
                    if firing.lacks_memory:
                        executor.lacks_memory = True
                        break
                    if firing.place is not None or device is not None:
                        break  # the throttle decides whether to go on
                    if firing.is_heavy or firing.is_waiting:  # checked first, as a heavy slice ends after the deadline
                        self._record_part(firing, "inline", began, now)
                        if firing.is_heavy:
                            firing.learn_hold()
                        self._on_stream(firing)
                        return
        except StopIteration as ended:
            if device is None:
                self._record_part(firing, "inline", began, perf_counter_ns(), ended.value)
                firing.learn()
            else:
                executor.record_spans(firing.spans, device, node, iteration, ended.value)
            if not executor.stopped:  # a caller woken meanwhile may have stopped it
                executor.complete(node, iteration, firing.inputs, ended.value)
        except BaseException as error:
            self._record_part(firing, "inline", began, perf_counter_ns(), status="error")
            executor.kernel_failed(error, node, iteration, firing.inputs)
        else:
            if device is None:
                self._record_part(firing, "inline", began, now)
            self._put_back(firing)

    def _put_back(self, firing: SlicedRegion) -> None:
        """Put a stopped region back, to go on in its turn or, with neither a task nor a thread, once it is called."""
        executor = self._executor
        if executor.stopped:
            firing.close()
        elif firing.place is None:
            self.suspended.append(firing)
        else:
            self._waiting[firing] = None
            executor.in_flight += 1
            firing.place.is_given_up = executor.run.is_given_up
            executor.run.context.run(wake_on, executor.run.turn.loop, firing.place, partial(self._wake, firing))

    def _wake(self, firing: SlicedRegion) -> None:
        executor = self._executor
        if firing in self._waiting and not executor.run.is_stopped:  # else the result belongs to the next place in line
            del self._waiting[firing]
            executor.in_flight -= 1
            self.suspended.append(firing)
            executor.go_on(later=True)

    def _on_stream(self, firing: SlicedRegion) -> None:
        executor, node, iteration = self._executor, firing.node, firing.iteration

        def take(result: object, error: BaseException | None, times: Times) -> None:
            status = "ok" if error is None else "cancelled" if isinstance(error, Stopped) else "error"
            self._record_part(firing, times.lane, times.started_ns, times.ended_ns, result, status, times.queued_ns)
            if error is None and (firing.lacks_memory or firing.place is not None):  # a thread must not wait for these
                executor.lacks_memory |= firing.lacks_memory
                self._put_back(firing)
            elif error is None and not executor.stopped:
                firing.learn(times.ended_ns - times.started_ns if node.conduct.is_user else times.computed_ns)
                if hold is not None and hold.has_asked:
                    node.times.cost = node.times.hold = ON_A_THREAD
                executor.complete(node, iteration, firing.inputs, result)
            elif error is not None and not isinstance(error, Stopped):
                executor.kernel_failed(error, node, iteration, firing.inputs)

        work: Callable[..., object] = firing.run_to_end
        args: tuple[Value, ...] = (lambda: executor.stopped,)
        hold = None
        if node.conduct.is_user:
            work, args, hold = held(executor.run.context, _quiet, (work, *args))
        elif executor.run.own_context is not None:
            work, args = executor.on_thread(work, args)
        submit(executor, node, firing.size, work, args, take)

    def _record_part(
        self,
        firing: SlicedRegion,
        stream: str,
        started: int,
        ended: int,
        result: Value = (),
        status: str = "ok",
        queued_ns: int | None = None,
    ) -> None:
        """Records a time in which a region computed without a pause."""
        recorder = self._executor.recorder
        if recorder is not None:
            recorder.region(firing, stream, started, ended, result, status, queued_ns)
        firing.parts += 1
        firing.paused_ns = ended
        if queued_ns is None:
            firing.inline_ns += ended - started


def _quiet(work: Callable[..., T], *args: Value) -> T:
    """``work(*args)`` without NumPy's floating-point warnings, which the context of a run has not turned off."""
    with np.errstate(all="ignore"):
        return work(*args)
