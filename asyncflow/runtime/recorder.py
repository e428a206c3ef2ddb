"""Writes what one executor does into a trace; there is none unless the run is traced."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from asyncflow.runtime.provenance import describe
from asyncflow.runtime.trace import Firing, MemorySample, Transfer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from asyncflow.compiler.plan import PlanNode
    from asyncflow.devices.protocol import AsynchronousDevice, Device, Span
    from asyncflow.runtime.frame import Iteration
    from asyncflow.runtime.trace import Trace


class Recorder:
    """Records the firings of one partition in one run."""

    def __init__(self, trace: Trace, run_id: int, device: Device, now: Callable[[], int]) -> None:
        self.now = now
        self.ready = _TimedQueue(now)
        """The scheduler's ready queue, which remembers when each firing became ready."""
        self._trace = trace
        self._run_id = run_id
        self._device = device

    def firing(
        self, node: PlanNode, iteration: Iteration, stream: str, started: int, ended: int, result: Any, status: str
    ) -> None:
        """One firing that ran on the event loop, on a stream's thread or as a coroutine."""
        scheduled = self.ready.since(node, iteration, started)
        values = () if status != "ok" else (result,) if node.single else result
        outputs = ", ".join(map(describe, values))
        op, device = node.source.op.name, self._device.name
        self._add(node, iteration.tag(), op, stream, scheduled, started, ended, outputs, status, device)

    def spans(
        self,
        spans: Iterable[Span],
        device: AsynchronousDevice,
        node: PlanNode,
        iteration: Iteration | None,
        result: Any,
    ) -> None:
        """What an asynchronous device did for one firing (None: before any): the kernel, and copies."""
        tag = "" if iteration is None else iteration.tag()
        for span in spans:
            started = span.started_ns
            scheduled = started if iteration is None else self.ready.since(node, iteration, started)
            op = node.source.op.name if not span.nbytes else "copy"
            outputs = _outputs(node, result)
            self._add(node, tag, op, span.stream, scheduled, span.started_ns, span.ended_ns, outputs, "ok", device.name)

    def transfer(self, node: PlanNode, iteration: Iteration, value: Any, sent_ns: int) -> None:
        """A value that has come from another device."""
        self._trace.transfers.append(
            Transfer(
                run=self._run_id,
                node=node.name,
                tag=iteration.tag(),
                source=node.peer,
                target=self._device.name,
                sent_ns=sent_ns,
                received_ns=max(self.now(), sent_ns),  # on a simulated device the host may be ahead of the clock
                nbytes=int(getattr(value, "nbytes", 0)),
            )
        )

    def _add(
        self,
        node: PlanNode,
        tag: str,
        op: str,
        stream: str,
        scheduled: int,
        started: int,
        ended: int,
        outputs: str,
        status: str,
        device: str,
    ) -> None:
        trace = self._trace
        if len(trace.firings) >= trace.capacity:
            trace.dropped += 1
            return
        trace.firings.append(
            Firing(
                run=self._run_id,
                node=node.name,
                op=op,
                tag=tag,
                device=device,
                stream=stream,
                scheduled_ns=min(scheduled, started),
                started_ns=started,
                ended_ns=ended,
                outputs=outputs,
                status=status,
                location=str(node.source.location),
            )
        )
        trace.memory.append(MemorySample(self._device.name, ended, self._device.memory.used))


def _outputs(node: PlanNode, result: Any) -> str:
    values = (result,) if node.single else result if isinstance(result, tuple) else ()
    return ", ".join(map(describe, values))


class _TimedQueue(deque[Any]):
    """A ready queue that remembers when each firing became ready, for as long as its iteration lives."""

    def __init__(self, now: Callable[[], int]) -> None:
        super().__init__()
        self._times: WeakKeyDictionary[Iteration, dict[PlanNode, int]] = WeakKeyDictionary()
        self._now = now

    def append(self, item: tuple[PlanNode, Iteration]) -> None:
        node, iteration = item
        self._times.setdefault(iteration, {})[node] = self._now()
        super().append(item)

    def since(self, node: PlanNode, iteration: Iteration, started_ns: int) -> int:
        """When the firing became ready; `started_ns` if that is not known, or was asked for before."""
        times = self._times.get(iteration)
        return started_ns if times is None else times.pop(node, started_ns)
