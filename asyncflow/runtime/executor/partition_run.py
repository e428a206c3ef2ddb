"""`PartitionRun`: the state of one partition of one run, the events it waits for, and how it ends.

An exception ends the run, wherever it is raised: a firing's failure by `PartitionRun.kernel_failed`, any other by
`PartitionRun.broken`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import InitVar, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from asyncflow.devices.memory import Buffer, MemoryLimitExceeded
from asyncflow.devices.protocol import AsynchronousDevice, Device, Mark, Spans, recording
from asyncflow.errors import DeviceLostError, KernelError
from asyncflow.runtime.executor.coroutines import Coroutines
from asyncflow.runtime.executor.kernels.provenance import as_kernel_error, with_provenance
from asyncflow.runtime.executor.ports import Ports
from asyncflow.runtime.executor.recorder import Recorder
from asyncflow.runtime.executor.region_launch import Regions
from asyncflow.runtime.executor.threads import (
    withdraw_all,
)
from asyncflow.runtime.executor.waits import Waits
from asyncflow.runtime.scheduler.scheduler import Scheduler, SchedulingError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextvars import Context

    from asyncflow.compiler.plan import Partition, PlanNode
    from asyncflow.devices.swapping import Swapping
    from asyncflow.runtime.executor.scope import RunScope
    from asyncflow.runtime.scheduler.frame import Iteration
    from asyncflow.values import Value


@dataclass(slots=True, eq=False, repr=False)
class PartitionRun(ABC):
    """One partition that is executed once; an `Executor` drives it.

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
    # Created on demand: for crossing values, sliced regions, coroutines and waits.
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

    # -- awaited work ------------------------------------------------------------------------------------------------

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
                # Ignore a second result, which would complete the firing twice; an error may report a lost device.
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
            # Even after a failure: the run ends only once none of its work is in flight.
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
        # A refusal counts as a device failure, delivered here: otherwise the request would stay in flight.
        try:
            self.asynchronous.when_done(partial(deliver, None), mark, elsewhere=elsewhere)
        except BaseException as error:
            deliver(None, error)

    def has_ended(self) -> bool:
        """Return True if an asynchronous device is known to have ended its work, so that nothing need ask for that."""
        try:
            return self.asynchronous is not None and self.asynchronous.has_ended()
        except BaseException as error:
            self.fail(error)
            return False

    def has_launched(self, then: Callable[[], None]) -> bool:
        """Return True if an asynchronous device may still work for this; ``then()`` is called when it has ended."""
        if self.asynchronous is None or self._ended is self.launched:
            return False
        # Set before the call, as the device may answer at once: each end is requested once.
        self._ended = self.launched
        self.when_done(self.launched, then=then)
        return True

    @property
    def is_quiet(self) -> bool:
        """True if no work is left or in flight, unless another partition sends a value."""
        if self.in_flight or self.is_driven:
            return False
        scheduler, ports, regions = self.scheduler, self._ports, self._regions
        # A stopped run has dropped its tokens, so its ports would wait for ever.
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

    def waiting(self) -> list[str]:
        """A line for each firing that waits for others, for messages."""
        kinds = (self._waits, self._regions, self._coroutines)
        return [line for kind in kinds if kind is not None for line in kind.describe()]

    def check_quiet(self) -> None:
        """Has the owner look whether anything is left to do or in flight."""
        if not self.is_closed:
            self.run.on_quiet()

    def go_on(self, *, later: bool = False) -> None:
        """Go on after work in flight has ended.

        Args:
            later: in the next turn, as the caller may be in the middle of another run, and deep in it.
        """
        if self.stopped:
            self.check_quiet()
        elif not self.is_driven:  # a driven partition goes on anyway
            if self.run.in_caller:
                if not self.run.leaves_to_caller(self.drive_in_caller, later=later):
                    self.drive_in_caller()
                return
            turn = self.run.turn
            (turn.enqueue if later else turn.drive_now)(self)

    # -- firings -----------------------------------------------------------------------------------------------------

    def context_of(self, node: PlanNode, iteration: Iteration) -> Context:
        """The context of a firing: its run's, with a log of its calls where these are written down or given again."""
        if self.recorder is None or self.recorder.order is None:
            return self.run.context
        return self.recorder.context_of(self.run.context, node, iteration)

    def on_thread(
        self, work: Callable[..., object], args: tuple[Value, ...]
    ) -> tuple[Callable[..., object], tuple[Value, ...]]:
        """Return `work` and `args` as a thread calls them, where kernels have to find the run's taken elements."""
        own = self.run.own_context
        return (work, args) if own is None else (own.copy().run, (work, *args))

    def recording(self, spans: Spans | None) -> AbstractContextManager[object]:
        """Inside, an asynchronous device records into `spans`."""
        return nullcontext() if self.asynchronous is None else recording(self.asynchronous, spans)

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
        if spans is not None and self.recorder is not None:  # records of copies in pieces are added later
            self.recorder.spans(spans, device, node, iteration, result)

    def complete(self, node: PlanNode, iteration: Iteration, inputs: Sequence[Value], result: Any) -> None:
        """Accounts for the result and hands it to the scheduler."""
        try:
            self.count(node, result)
            self.scheduler.complete(node, iteration, result)
        except MemoryLimitExceeded as error:
            self.kernel_failed(error, node, iteration, inputs)
        except SchedulingError as error:
            self._rule_broken(error)

    def count(self, node: PlanNode, result: Any) -> None:
        """Count the memory of a firing's result, once more if it was counted before; on any thread.

        Raises:
            MemoryLimitExceeded: the device now holds more than its limit.
        """
        track = self.device.memory.track
        if node.single:
            track(result, node.source.name)
        else:
            for value in result:
                track(value, node.source.name)

    # -- ending ------------------------------------------------------------------------------------------------------

    def kernel_failed(
        self, error: BaseException, node: PlanNode, iteration: Iteration, inputs: Sequence[Value]
    ) -> None:
        """Ends the run because a firing failed."""
        error = as_kernel_error(error, node, iteration.tag(), inputs, self.device.name)
        if self.recorder is not None:
            self.recorder.failed(node, iteration, error)
        self.fail(error, node.source.id)

    def _rule_broken(self, error: SchedulingError) -> None:
        reason, node, tag = error.reason, error.node, error.iteration.tag()
        if isinstance(reason, str):
            self.fail(with_provenance(KernelError, reason, node, tag, self.device.name, ()), node.source.id)
        else:
            self.fail(as_kernel_error(reason, node, tag, (), self.device.name), node.source.id)

    def broken(self, error: BaseException) -> None:
        """Ends the run because something raised that is no firing: a device's call, say."""
        if self.is_closed:
            raise error  # no caller waits for this run any more
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
        self.run.on_failed()  # stop all partitions at once: no partition may take what another gives up
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

    @abstractmethod
    def drive(self, deadline_ns: int) -> bool:
        """Execute ready firings until none is left (False) or the deadline has passed (True)."""

    @abstractmethod
    def drive_in_caller(self) -> None:
        """Go on in the task of the run's caller."""
