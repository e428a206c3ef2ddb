"""The rendezvous of one run's partitions: sent values that were not received yet, and waiting Recvs.

A key is the number of a transfer and the iteration numbers of its tag. The rendezvous belongs to one run, lives on the
event loop and does nothing by itself: a Send hands its value over, and if the Recv is there, it takes it at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from asyncflow.compiler.plan import PlanNode
from asyncflow.runtime.scheduler.frame import Iteration
from asyncflow.values import Value

Key: TypeAlias = tuple[int, tuple[int, ...]]
Arrived: TypeAlias = "Callable[[PlanNode, Iteration, Value, int], None]"
"""Callback with the Recv, its iteration, the awaited value, and the time at which that was sent."""
Acknowledged: TypeAlias = "Callable[[PlanNode, Iteration], None]"
"""Takes the Send, and its iteration, which has ended elsewhere."""


class RendezvousStatistics(NamedTuple):
    """Contents of a rendezvous; all zero after a run."""

    sent: int
    """Values that no Recv has taken."""
    waiting: int
    """Recvs without a value."""
    unacknowledged: int
    """Sends that wait for an iteration to end elsewhere."""


@dataclass(slots=True, eq=False)
class Rendezvous:
    """Matches the Sends and Recvs of one run."""

    _sent: dict[Key, tuple[Value, int]] = field(default_factory=dict)
    _waiting: dict[Key, tuple[Arrived, PlanNode, Iteration]] = field(default_factory=dict)
    _unacknowledged: dict[Key, tuple[Acknowledged, PlanNode, Iteration]] = field(default_factory=dict)

    def send(self, node: PlanNode, iteration: Iteration, value: Value, sent_ns: int = 0) -> None:
        """Hands `value` to the Recv, now or when it comes."""
        key = node.number, iteration.counters()
        receiver = self._waiting.pop(key, None)
        if receiver is None:
            self._sent[key] = value, sent_ns
        else:
            arrived, recv, where = receiver
            arrived(recv, where, value, sent_ns)

    def receive(self, arrived: Arrived, node: PlanNode, iteration: Iteration) -> None:
        """Has ``arrived`` called with the value, now or when it is sent."""
        key = node.number, iteration.counters()
        if key in self._sent:
            arrived(node, iteration, *self._sent.pop(key))
        else:
            self._waiting[key] = arrived, node, iteration

    def await_acknowledgement(self, acknowledged: Acknowledged, node: PlanNode, iteration: Iteration) -> None:
        """Has ``acknowledged`` called when the iteration has ended where `node` sent its value."""
        self._unacknowledged[node.number, iteration.counters()] = acknowledged, node, iteration

    def acknowledge(self, transfer: int, counters: tuple[int, ...]) -> None:
        """Note the end of an iteration; the sender does not wait for it if the loop was not taken."""
        waiting = self._unacknowledged.pop((transfer, counters), None)
        if waiting is not None:
            acknowledged, node, iteration = waiting
            acknowledged(node, iteration)

    def clear(self) -> None:
        """Forget all values and Recvs: the run has stopped."""
        self._sent.clear()
        self._waiting.clear()
        self._unacknowledged.clear()

    def statistics(self) -> RendezvousStatistics:
        """Return the numbers of values and Recvs held now."""
        return RendezvousStatistics(len(self._sent), len(self._waiting), len(self._unacknowledged))

    def waiting(self) -> list[str]:
        """For a run that stalls: which Recvs and Sends wait, and under which tag."""
        lines = [
            f"{node.name}{_where(iteration)} waits for its value from {node.peer}"
            for _, node, iteration in self._waiting.values()
        ]
        lines.extend(
            f"{node.name}{_where(iteration)} waits until {node.peer} ends that iteration"
            for _, node, iteration in self._unacknowledged.values()
        )
        return lines


def _where(iteration: Iteration) -> str:
    return f" in iteration {iteration.tag()}" if iteration.tag() else ""
