"""The firings of one executor that wait in lines of states, such as queues: no task, and no thread, waits for them.

A firing that is called goes on at once, on the stack of whoever made that so; what comes of it is done in the
next turn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from asyncflow.state.waiting.awaiting import wake_on
from asyncflow.state.waiting.lines import NOT_YET

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncflow.compiler.plan import PlanNode
    from asyncflow.runtime.scheduler.executor import Executor
    from asyncflow.runtime.scheduler.frame import Iteration
    from asyncflow.state.waiting.lines import PlaceInLine
    from asyncflow.values import Value


class _Waiting(NamedTuple):
    """A firing that waits, since `started_ns`."""

    node: PlanNode
    iteration: Iteration
    started_ns: int


class Waits:
    """The places in line of one executor, in the order in which they were taken."""

    __slots__ = ("_executor", "_places")

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._places: dict[PlaceInLine, _Waiting] = {}

    def add(self, place: PlaceInLine, node: PlanNode, iteration: Iteration, inputs: Sequence[Value]) -> None:
        """Lets a firing wait."""
        executor = self._executor
        run = executor.run
        waiting = _Waiting(node, iteration, run.turn.clock())

        def take(result: Value, error: BaseException | None) -> None:
            del self._places[place]
            self._record(waiting, result, "ok" if error is None else "error")
            if error is not None:
                executor.kernel_failed(error, node, iteration, inputs)
            else:
                executor.complete(node, iteration, inputs, result)

        deliver = executor.expect(take, self._go_on)

        def wake() -> None:
            if place not in self._places or run.is_stopped:
                return  # what is there is for others
            try:
                result = place.claim()
            except Exception as error:
                deliver(None, error)
            else:
                if result is not NOT_YET:
                    deliver(result, None)

        self._places[place] = waiting
        wake_on(run.turn.loop, place, wake)

    def _go_on(self) -> None:
        # Not here: this may be in the middle of another run, and deep in it.
        executor = self._executor
        if executor.stopped:
            executor.check_quiet()
        elif not executor.is_driven:
            executor.run.turn.enqueue(executor)

    def leave(self) -> None:
        """Gives up all places: the run is being stopped, and whoever stops it looks whether it is quiet then."""
        executor, places = self._executor, self._places
        for place in list(places):
            place.leave()
            self._record(places.pop(place), None, "cancelled")
            executor.in_flight -= 1

    def _record(self, waiting: _Waiting, result: Value, status: str) -> None:
        executor = self._executor
        if executor.recorder is not None:
            node, iteration, started = waiting
            executor.recorder.firing(node, iteration, "async", started, executor.run.turn.clock(), result, status)

    def describe(self) -> list[str]:
        """A line for each firing that waits, for messages."""
        return [
            f"{node.name}: {place.describe()}\n    built at {node.source.location}"
            for place, (node, _, _) in self._places.items()
        ]
