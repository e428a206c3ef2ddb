"""One firing of a region that is a generator, because of its loops or of long kernels: driven in slices.

It starts on the event loop, where loops over scalars stay: they hold the GIL wherever they run, and a slice ends with
the session's turn. When an iteration takes longer than a kernel may on the event loop, the rest moves to the device's
stream thread; that is safe where the generator stands still: at a back edge, or behind a kernel that may be long.
"""

from __future__ import annotations

from time import perf_counter_ns, thread_time_ns
from typing import TYPE_CHECKING, Any

from asyncflow.devices.cost import INLINE_LIMIT_NS

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from asyncflow.compiler.plan import PlanNode
    from asyncflow.runtime.frame import Iteration

_SLICE_NS = 200_000
"""How long a slice should take: short beside a turn, long beside looking at the clock."""

_OVERRUN_NS = 1_000_000
"""A slice that takes longer holds heavy work among light, though its mean iteration be short."""

_GROWTH = 16


class Stopped(Exception):
    """The run was stopped while the region ran on a thread."""


class RegionFiring:
    """A region in progress.

    Attributes:
        budget: the number of back edges and long kernels until it yields again; None before it has begun.
        is_heavy: the last slice held the event loop for too long, so that the rest belongs on a thread.
        is_suspect: an earlier slice may have.
        is_watched: the next slice's time of the processor will be taken.
        spans: what an asynchronous device records of it; None if the run is not traced.
    """

    __slots__ = (
        "budget",
        "generator",
        "inputs",
        "is_heavy",
        "is_suspect",
        "is_watched",
        "iteration",
        "node",
        "spans",
        "started_ns",
    )

    def __init__(
        self,
        node: PlanNode,
        iteration: Iteration,
        inputs: Sequence[Any],
        generator: Generator[bool | None, int | None, tuple[Any, ...]],
        spans: list[Any] | None = None,
    ) -> None:
        self.node = node
        self.iteration = iteration
        self.inputs = inputs
        self.generator = generator
        self.spans = spans
        self.budget: int | None = None
        self.is_heavy = False
        self.is_suspect = False
        self.is_watched = True
        self.started_ns = perf_counter_ns()

    def run_slice(self) -> int:
        """Runs until the budget is spent and sets the next one; gives the time afterwards.

        Raises:
            StopIteration: it has ended; the exception's value is the tuple of outputs.
        """
        # The processor's time leaves out the moments when others ran, but is dear to ask for.
        busy_ns = thread_time_ns() if self.is_watched else 0
        before = perf_counter_ns()
        begins_loop = self.generator.send(self.budget)
        now = perf_counter_ns()
        taken, spent = now - before, self.budget or 1
        limit_ns = min(INLINE_LIMIT_NS * spent, _OVERRUN_NS)
        self.is_heavy = taken > limit_ns and self.is_watched and thread_time_ns() - busy_ns > limit_ns
        self.is_suspect |= taken > limit_ns
        self.is_watched = self.is_suspect or bool(begins_loop)
        # What iterations took so far says nothing about those of another loop.
        self.budget = 1 if begins_loop else max(1, min(spent * _GROWTH, spent * _SLICE_NS // max(taken, 1)))
        return now

    def run_to_end(self, is_stopped: Callable[[], bool]) -> tuple[Any, ...]:
        """Runs on a thread until it ends.

        Raises:
            Stopped: `is_stopped` said so at a back edge.
        """
        try:
            while not is_stopped():
                self.run_slice()
        except StopIteration as ended:
            outputs: tuple[Any, ...] = ended.value
            return outputs
        self.generator.close()
        raise Stopped
