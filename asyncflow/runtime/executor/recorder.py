"""The records of one executor in a trace; exist only for traced runs."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import Context
from functools import partial
from itertools import islice
from typing import NamedTuple

from asyncflow.compiler.plan import PlanNode
from asyncflow.devices.memory import Requests, format_bytes
from asyncflow.devices.protocol import AsynchronousDevice, CountedSpans, Device, RequestingSpans, Span, Spans
from asyncflow.devices.saved.saved_handle import SwapCopy
from asyncflow.devices.swapping import memory_sample
from asyncflow.ops.user.recorded_calls import in_log
from asyncflow.runtime.executor.kernels.limited_calls import Attempt
from asyncflow.runtime.executor.kernels.provenance import describe
from asyncflow.runtime.executor.kernels.sliced_region import SlicedRegion
from asyncflow.runtime.scheduler.frame import Iteration
from asyncflow.runtime.scheduler.scheduler import ShuffledQueue
from asyncflow.runtime.watch.picks import PickLog
from asyncflow.runtime.watch.trace import LATE_COPY, LOOP, DeviceRequests, Firing, MemorySample, Trace, Transfer
from asyncflow.values import Value


class _Launched(NamedTuple):
    """The notes of an asynchronous device about one firing."""

    spans: Spans
    """For `AsynchronousDevice.settle`."""
    device: AsynchronousDevice
    node: PlanNode
    tag: str
    scheduled_ns: int | None
    outputs: str
    memory: tuple[int, ...]
    """Bytes the device held, and what else a `MemorySample` says."""

    def records(self, run: int, spans: Sequence[Span], count: int) -> tuple[list[Firing], list[MemorySample]]:
        """Make the records of the first `count` spans of the work."""
        node, name, tag, outputs = self.node, self.device.name, self.tag, self.outputs
        label, op, location = node.label, node.source.op.name, str(node.source.location)
        # Some devices report every kernel that a region launches.
        is_region = node.region is not None
        # Work that began before its recorded ready time was ready when it began.
        after = sys.maxsize if self.scheduled_ns is None else self.scheduled_ns
        firings, samples = [], []
        # Bypass the constructors, for speed: a loop launches thousands of kernels.
        for own_label, stream, began, ended, nbytes, sample in islice(spans, count):
            shown, kind = own_label if is_region and not nbytes else label, "copy" if nbytes else op
            scheduled = min(began, after)
            rest = None, 0, None, nbytes, 0
            record = run, shown, kind, tag, name, stream, scheduled, began, ended, outputs, "ok", location, *rest
            firings.append(_new_tuple(Firing, record))
            held = sample or (ended, *self.memory)
            samples.append(_new_tuple(MemorySample, (name, *held, *_NO_MOVES[len(held) :])))
        return firings, samples


class Recorder:
    """Records the firings of one partition in one run."""

    def __init__(
        self, trace: Trace, run_id: int, device: Device, now: Callable[[], int], seed: int | None, partition: int
    ) -> None:
        self.now = now
        self.order = trace.order
        """Log of picks, which may choose the next one; None for a run that is only traced."""
        self._is_full = self.order is None and trace.count >= trace.capacity
        self.ready = self._ready_queue(seed, partition)
        """The scheduler's ready queue, which notes when each firing became ready; None where that is not needed."""
        self._trace = trace
        self._partition = partition
        self._run_id = run_id
        self._device = device
        self._launched: list[_Launched] = []
        self._counted: list[tuple[AsynchronousDevice, Spans]] = []
        self._asking: list[RequestingSpans] = []
        device.memory.lap(self)  # measure peaks from here on, until `finish`
        # The mover appends to its own list when copies end, on any thread; `finish` reads it after the run.
        self.moves: Sequence[SwapCopy] = ()
        """Moves of saved values."""

    def _ready_queue(self, seed: int | None, partition: int) -> deque[tuple[PlanNode, Iteration]] | None:
        if self.order is not None:
            return _OrderedQueue(self.now, seed, self.order, partition)
        if self._is_full:
            return None
        return _TimedQueue(self.now) if seed is None else _TimedShuffledQueue(self.now, seed)

    def firing(
        self,
        node: PlanNode,
        iteration: Iteration,
        stream: str,
        started: int,
        ended: int,
        result: Value,
        status: str,
        queued_ns: int | None = None,
        attempt: int = 0,
    ) -> None:
        """Record a firing that ran on the event loop, on a stream's thread or as a coroutine."""
        if status == "ok":
            self.ended(node, iteration, result, at_once=stream == "inline")
        elif self.order is not None and status == "cancelled":
            self.order.withdrawn(self._partition, node, iteration)
        ready = self._since(node, iteration, started)
        fired = self._fired(node, iteration.tag(), stream, ready, started, ended, _outputs(node, result, status))
        self._add(fired._replace(status=status, queued_ns=queued_ns, part=max(attempt - 1, 0), attempt=attempt))

    def coroutine(
        self,
        node: PlanNode,
        iteration: Iteration,
        started: int,
        attempts: Sequence[Attempt],
        result: Value,
        status: str,
    ) -> None:
        """Record a firing that was a coroutine; of a function with limits, each of its attempts."""
        for number, attempt in enumerate(attempts[:-1]):
            ready = self._since(node, iteration, attempt.asked_ns)
            fired = self._fired(node, iteration.tag(), "async", ready, attempt.started_ns, attempt.ended_ns, "")
            self._add(fired._replace(status="error", queued_ns=attempt.asked_ns, part=number, attempt=number + 1))
        ended, queued = self.now(), None
        if attempts:
            queued, started, ended, last_status = attempts[-1]
            status = last_status if status == "cancelled" else status  # perhaps cancelled while waiting for a retry
        self.firing(node, iteration, "async", started, ended, result, status, queued, attempt=len(attempts))

    def answer(self, node: PlanNode, iteration: Iteration) -> object:
        """Return the recorded answer to a firing of a run that is done again; see `PickLog.answer`."""
        assert self.order is not None
        return self.order.answer(self._partition, node, iteration)

    def given(self, node: PlanNode, iteration: Iteration, result: Value) -> None:
        """Record a firing whose result is the recorded answer."""
        now = self.now()
        self.firing(node, iteration, "inline", now, now, result, "ok")

    def context_of(self, context: Context, node: PlanNode, iteration: Iteration) -> Context:
        """`context`, in which the firing's calls of user functions are written down, or given again."""
        assert self.order is not None
        log = self.order.calls(self._partition, node, iteration)
        return context if log is None else in_log(context, log)

    def ended(self, node: PlanNode, iteration: Iteration, result: Value, *, at_once: bool) -> None:
        """Note that a firing has its result, or that a device with a stream will have it; see `PickLog.ended`."""
        if self.order is not None:
            self.order.ended(self._partition, node, iteration, result, self._device, at_once=at_once)

    def failed(self, node: PlanNode, iteration: Iteration, error: BaseException) -> None:
        """Note that a firing failed with `error`, which ends the run unless that was ended before."""
        if self.order is not None:
            self.order.failed(self._partition, node, iteration, error)

    def region(
        self,
        firing: SlicedRegion,
        stream: str,
        started: int,
        ended: int,
        result: Value,
        status: str,
        queued_ns: int | None,
    ) -> None:
        """Record a time in which a region computed without a pause: as its loops, and the parts between them."""
        node, iteration = firing.node, firing.iteration
        ready = self._since(node, iteration, started) if firing.paused_ns is None else firing.paused_ns
        whole = self._fired(node, iteration.tag(), stream, ready, started, ended, _outputs(node, result, status))
        whole = whole._replace(status=status, queued_ns=queued_ns, part=firing.parts)
        spans = [span for span in firing.take_phases() if span.phase.nodes]
        for place, (phase, began, until) in enumerate(spans):
            is_first, is_last = place == 0, place == len(spans) - 1
            part = firing.seen_phases.get(phase, 0)
            firing.seen_phases[phase] = part + 1
            self._add(
                whole._replace(
                    node=phase.label,
                    op=LOOP if phase.is_loop else whole.op,
                    location=str(phase.nodes[0].location),
                    scheduled_ns=whole.scheduled_ns if is_first else began,
                    started_ns=began,
                    ended_ns=until,
                    outputs=whole.outputs if is_last else "",
                    status=status if is_last else "ok",
                    queued_ns=queued_ns if is_first else None,
                    part=part,
                    iterations=firing.iterations.get(phase),
                ),
                None if is_last else (),
            )
        if not spans:
            self._add(whole)

    def _fired(
        self, node: PlanNode, tag: str, stream: str, ready: int, started: int, ended: int, outputs: str
    ) -> Firing:
        return Firing(
            run=self._run_id,
            node=node.label,
            op=node.source.op.name,
            tag=tag,
            device=self._device.name,
            stream=stream,
            scheduled_ns=min(ready, started),
            started_ns=started,
            ended_ns=ended,
            outputs=outputs,
            status="ok",
            location=str(node.source.location),
        )

    def _since(self, node: PlanNode, iteration: Iteration, started: int) -> int:
        since = iteration.since(node)
        return started if since is None else since

    def new_spans(self) -> Spans:
        """Return a list for a device to record into; for a full trace, a list that only counts."""
        spans = CountedSpans() if self._is_full else RequestingSpans()  # a full trace still counts the firings it drops
        self._asking.append(spans)
        return spans

    def spans(
        self, spans: Spans, device: AsynchronousDevice, node: PlanNode, iteration: Iteration | None, result: Value
    ) -> None:
        """Note the work of an asynchronous device for one firing (None: before any): the kernel, and copies.

        Their times may not be known before the run has ended: see `finish`.
        """
        if self._is_full:
            self._counted.append((device, spans))
            return
        tag = "" if iteration is None else iteration.tag()
        scheduled = None if iteration is None else iteration.since(node)
        held = memory_sample(device.memory, device.swapping)
        self._launched.append(_Launched(spans, device, node, tag, scheduled, _outputs(node, result), held))

    def finish(self) -> None:
        """Record launched work and moved values, once all of that has ended."""
        for move in self.moves:
            copied = Firing(
                run=self._run_id,
                node=move.label,
                op=LATE_COPY if move.is_late else "copy",
                tag=move.tag,
                device=self._device.name,
                stream=move.stream,
                scheduled_ns=move.started_ns,
                started_ns=move.started_ns,
                ended_ns=move.ended_ns,
                outputs=format_bytes(move.nbytes),
                status="ok",
                location="",
                nbytes=move.nbytes,
            )
            self._add(copied, (move.ended_ns, *move.memory))
        trace = self._trace
        for launched in self._launched:
            # Only now: times of a card are read from events, which must be done.
            spans = launched.device.settle(launched.spans)
            room = max(0, trace.capacity - trace.count)
            trace.dropped += max(0, len(spans) - room)
            count = min(len(spans), room)
            trace._add_later(count, partial(launched.records, self._run_id, spans, count))
        trace.dropped += sum(len(device.settle(spans)) for device, spans in self._counted)
        for asked in self._requests():
            trace._ask(asked)
        self._counted.clear()
        self._launched.clear()
        self._asking.clear()
        self._device.memory.end_laps(self)

    def _requests(self) -> list[DeviceRequests]:
        """Return the requests to each card: to the partition's own, and to a card that had to send a value."""
        totals: dict[str, Requests] = {}
        if self._device.capabilities.own_memory:
            totals[self._device.name] = Requests(copies=len(self.moves))
        for spans in self._asking:
            if spans.device:
                totals.setdefault(spans.device, Requests()).add(spans.requests)
        return [
            DeviceRequests(self._run_id, device, each.kernels, each.graphs, each.copies, each.allocations)
            for device, each in totals.items()
        ]

    def transfer(self, node: PlanNode, iteration: Iteration, value: Value, sent_ns: int) -> None:
        """Record a value that has come from another device."""
        self._trace.transfers.append(
            Transfer(
                run=self._run_id,
                node=node.name,
                tag=iteration.tag(),
                source=node.peer,
                target=self._device.name,
                sent_ns=sent_ns,
                received_ns=max(self.now(), sent_ns),  # the host of a simulated device may be ahead of the clock
                nbytes=int(getattr(value, "nbytes", 0)),
            )
        )

    def _add(self, firing: Firing, sample: tuple[int, ...] | None = None) -> None:
        """Record a firing, and the bytes that its device held; the first figure is the time.

        Without a sample, the bytes held now are recorded, and none where the device has no figures.
        """
        trace = self._trace
        if trace.count >= trace.capacity:
            trace.dropped += 1
            return
        if sample is None:
            samples = self._memory_now(firing)
        else:
            samples = [MemorySample(firing.device, *sample)] if sample else []
        trace._add_one(firing, samples)

    def _memory_now(self, firing: Firing) -> list[MemorySample]:
        """Sample the bytes that the device holds at the end of a firing; and, if the peak within it was higher, that
        peak in the middle of the firing's time.
        """
        now = memory_sample(self._device.memory, self._device.swapping)
        samples = [MemorySample(firing.device, firing.ended_ns, *now)]
        # On an asynchronous device the peak since the last look belongs to no single firing: firings overlap.
        if self._device.asynchronous is None:
            most, _ = self._device.memory.lap(self)
            if most > now[0]:
                amid = (firing.started_ns + firing.ended_ns) // 2
                samples.insert(0, MemorySample(firing.device, amid, most, *now[1:]))
        return samples


def _outputs(node: PlanNode, result: Value, status: str = "ok") -> str:
    if status != "ok":
        return ""  # failed and cancelled firings have no outputs
    values = (result,) if node.single else result if isinstance(result, tuple) else ()
    return ", ".join(map(describe, values))


_new_tuple = tuple.__new__
_NO_MOVES = (0,) * (len(MemorySample._fields) - 1)
"""Ends the sample of a device that moves no saved values: the defaults of a `MemorySample`."""


class _Timed(deque["tuple[PlanNode, Iteration]"]):
    """A ready queue by which iterations remember when each of their firings became ready."""

    _now: Callable[[], int]

    def append(self, item: tuple[PlanNode, Iteration]) -> None:
        node, iteration = item
        if iteration.ready_ns is None:  # created on demand, so that untraced runs have no such dict
            iteration.ready_ns = {}
        iteration.ready_ns[node] = self._now()
        super().append(item)


class _TimedQueue(_Timed):
    """A timed queue that gives the oldest firing.

    Args:
        now: nanoseconds.
    """

    def __init__(self, now: Callable[[], int]) -> None:
        super().__init__()
        self._now = now


class _TimedShuffledQueue(_Timed, ShuffledQueue):
    """A timed queue that gives any of its firings.

    Args:
        now: nanoseconds.
        seed: of the picks.
    """

    def __init__(self, now: Callable[[], int], seed: int | None) -> None:
        super().__init__(seed)
        self._now = now


class _OrderedQueue(_TimedShuffledQueue):
    """A ready queue with a log of its picks, which may choose the next one.

    Args:
        now: nanoseconds.
        seed: of the picks.
        order: the log.
        partition: whose queue it is.
    """

    def __init__(self, now: Callable[[], int], seed: int | None, order: PickLog, partition: int) -> None:
        super().__init__(now, seed)
        self._order = order
        self._partition = partition

    # The scheduler sees an empty queue until the next recorded firing is ready.
    def __bool__(self) -> bool:
        return self._order.may_take(self._partition, self)

    def popleft(self) -> tuple[PlanNode, Iteration]:
        """Take one firing."""
        order = self._order
        position = order.position(self._partition, self)
        if position is None:
            taken = super().popleft()
        else:
            taken = self[position]
            del self[position]
        order.taken(self._partition, *taken)
        return taken
