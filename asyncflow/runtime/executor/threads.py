"""The firings of one executor that go to a thread of its CPU: too long for the event loop, or bound to a thread."""

from __future__ import annotations

from functools import partial
from math import inf
from typing import TYPE_CHECKING, cast

from asyncflow.compiler.program.kernels.kernels import waits_for_saved
from asyncflow.devices.cpu.lanes import Times
from asyncflow.devices.machine.cost import INLINE_LIMIT_NS, ON_A_THREAD
from asyncflow.devices.memory import MemoryLimitExceeded
from asyncflow.ops.rows.by_row import Paused
from asyncflow.runtime.executor.kernels.sliced_region import Stopped, in_parts
from asyncflow.streams.holding import ThreadHold, holding, may_wait_for_itself, refuse_to_queue

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextvars import Context

    from asyncflow.autodiff.stores.stores import SavedValues
    from asyncflow.compiler.plan import PlanNode
    from asyncflow.devices.cpu.device import CpuDevice
    from asyncflow.devices.swapping import Swapping
    from asyncflow.runtime.executor.partition_run import PartitionRun
    from asyncflow.runtime.scheduler.frame import Iteration
    from asyncflow.values import Value


def goes_to_a_thread(executor: PartitionRun, node: PlanNode, expected_ns: float) -> bool:
    """Return True if a firing of this expected time is not for the event loop."""
    if executor.recorder is not None and executor.recorder.order is not None and node.source.op.effects is not None:
        return False  # with logged picks, the next firing is picked after this one's effects
    if node.conduct.alone is not None and cast("CpuDevice", executor.device).lanes.holds(node.conduct.alone):
        return True  # other work on the state that the kernel changes is in progress
    # Measure an unknown time on the loop if a thread might wait for itself.
    return expected_ns > INLINE_LIMIT_NS and (expected_ns < inf or not may_wait_for_itself(executor.run.context))


def must_wait(swapping: Swapping, node: PlanNode, inputs: Sequence[Value]) -> bool:
    """Return True if a firing waits for a saved value that is away, or for room for one."""
    waits = waits_for_saved(node.source)
    return waits is not None and swapping.must_wait(*cast("tuple[SavedValues, int]", inputs[: len(waits)]))


def launch_on_a_thread(
    executor: PartitionRun,
    node: PlanNode,
    iteration: Iteration,
    inputs: Sequence[Value],
    size: int,
    begun: Paused | None = None,
) -> None:
    """Start a firing on inputs of `size` elements, or continue a firing that has `begun` on the event loop."""
    assert node.kernel is not None
    work: Callable[..., object] = node.kernel if begun is None else begun.go_on
    args = tuple(inputs) if begun is None else ()
    hold = None
    if node.conduct.is_user:
        work = partial(_to_end, executor, in_parts(node) if begun is None else work)
        work, args, hold = held(executor.context_of(node, iteration), work, args)
    elif executor.run.own_context is not None:
        work, args = executor.on_thread(work, args)
    if executor.device.memory.limit is not None:
        work, args = _counted, (executor, node, work, *args)

    def take(result: Value, error: BaseException | None, times: Times) -> None:
        if executor.recorder is not None:
            lane, queued_ns, started_ns, ended_ns, _ = times
            status = "ok" if error is None else "cancelled" if isinstance(error, Stopped) else "error"
            executor.recorder.firing(node, iteration, lane, started_ns, ended_ns, result, status, queued_ns)
        if error is not None:
            if not isinstance(error, Stopped):
                executor.kernel_failed(error, node, iteration, inputs)
        elif not executor.stopped:
            if hold is not None and hold.has_asked:
                node.times.cost = ON_A_THREAD
            elif begun is None and (cost := node.times.cost) is not None:
                # A user's function may wait, so use its wall time.
                taken_ns = times.ended_ns - times.started_ns if node.conduct.is_user else times.computed_ns
                cost.observe(size, taken_ns)
            executor.complete(node, iteration, inputs, result)

    submit(executor, node, size, work, args, take)


def held(
    context: Context, work: Callable[..., object], args: tuple[Value, ...]
) -> tuple[Callable[..., object], tuple[Value, ...], ThreadHold]:
    """Work that calls a user's function, for a thread: in a copy of a context, and with the hold that it has there."""
    hold = ThreadHold()
    return context.copy().run, (holding, hold, work, *args), hold


def _to_end(executor: PartitionRun, work: Callable[..., object], *args: Value) -> object:
    """The results of work that may pause; no more of it is done once the run has stopped.

    Raises:
        Stopped: it has.
    """
    found = work(*args)
    while isinstance(found, Paused):
        if executor.stopped:
            raise Stopped
        found = found.go_on()
    return found


def _counted(executor: PartitionRun, node: PlanNode, work: Callable[..., object], *args: Value) -> object:
    """The results of work on a device with a limit, counted where they are made.

    The event loop takes the results of many firings at a time: all would be there before it has counted the first.

    Raises:
        MemoryLimitExceeded: the device now holds more than its limit.
    """
    found = work(*args)
    try:
        executor.count(node, found)
    except MemoryLimitExceeded as error:
        del found
        raise error.with_traceback(None) from None  # drop frames, which would keep the results
    return found


def submit(
    executor: PartitionRun,
    node: PlanNode,
    size: int,
    work: Callable[..., object],
    args: tuple[Value, ...],
    take: Callable[..., None],
) -> None:
    """Gives work to a thread of a CPU; ``take(result, error, times)`` is called at its end.

    Args:
        executor: is notified when it ends.
        node: whose firing it is.
        size: how many elements it is on.
        work: what to call.
        args: its arguments.
        take: takes the outcome.
    """
    cost = node.times.cost
    deliver = executor.expect(take)
    try:
        refuse_to_queue(executor.run.context)
        withdraw = cast("CpuDevice", executor.device).lanes.submit(
            work,
            args,
            deliver,
            executor.run.turn.loop,
            expected_ns=None if cost is None else cost.measured_ns(size),
            planned=node.stream,
            owner=node.conduct.alone,
            node=node.source,
        )
    except BaseException as error:
        deliver(None, error, Times.never())
    else:
        executor.submitted[take] = withdraw


def withdraw_all(executor: PartitionRun) -> None:
    """Withdraw the firings of a stopped run that no thread has started: their results are not wanted any more."""
    while executor.submitted:
        take, withdraw = executor.submitted.popitem()
        if withdraw():
            executor.in_flight -= 1
            take(None, Stopped(), Times.never())
