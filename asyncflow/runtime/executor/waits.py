"""The firings of one executor that wait in lines of states, such as queues: no task, and no thread, waits for them.

A called firing goes on at once, on the stack of the caller; its consequences follow in the next turn, unless the call
came from outside of all firings. A run that waits for a queue goes on in its caller's task alone (`Run.in_caller`):
there the firing claims its result. Only a *new* firing, which has come since its executor last had nothing else to do,
is not woken. Its element is most often put in later by the same program, and asking then costs half as much.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from asyncflow.errors import QueueClosedError
from asyncflow.state.waiting.awaiting import wake_on
from asyncflow.state.waiting.lines import NOT_YET, PlaceInLine, ToldPlace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncflow.compiler.plan import PlanNode
    from asyncflow.runtime.executor.partition_run import PartitionRun
    from asyncflow.runtime.scheduler.frame import Iteration
    from asyncflow.values import Value


_SMALL = 1 << 14
"""Bytes of an array that a waiting firing may keep though it is not needed any more."""


class _Waiting(NamedTuple):
    """A firing that waits, since `started_ns`."""

    node: PlanNode
    iteration: Iteration
    inputs: Sequence[Value]
    started_ns: int


def _described(value: Value) -> Value:
    """Return the value, or in place of a large array one element with its shape and dtype: errors tell no more."""
    if isinstance(value, np.ndarray) and value.nbytes > _SMALL:
        return np.broadcast_to(np.zeros((), value.dtype), value.shape)
    return value


class Waits:
    """The places in line of one executor, in the order in which they were taken.

    Attributes:
        new: places that are not woken yet.
        in_line: number of firings that wait for other runs, and not for their own run's computation.
    """

    __slots__ = ("_executor", "_places", "in_line", "new")

    def __init__(self, executor: PartitionRun) -> None:
        self._executor = executor
        self._places: dict[PlaceInLine, _Waiting] = {}
        self.new: list[PlaceInLine] = []
        self.in_line = 0

    def add(self, place: PlaceInLine, node: PlanNode, iteration: Iteration, inputs: Sequence[Value]) -> None:
        """Lets a firing wait."""
        executor = self._executor
        if place.has_inputs:
            inputs = [_described(x) for x in inputs]
        self._places[place] = _Waiting(node, iteration, inputs, executor.run.turn.clock())
        executor.in_flight += 1
        self.in_line += not isinstance(place, ToldPlace)
        place.is_given_up = executor.run.is_given_up
        if place.is_asked_later and executor.is_driven:
            self.new.append(place)
        else:
            self._have_woken(place)

    def look(self) -> None:
        """Claim the results of new places that were called; if there are none, new places are woken from now on."""
        new, self.new = self.new, []
        called = [place for place in new if place.is_called]
        for place in called:
            self._wake(place)
        for place in new:
            if place not in self._places or self._executor.stopped:
                continue  # claimed or given up before
            if called and not place.is_called:
                self.new.append(place)
            else:
                self._have_woken(place)

    def _have_woken(self, place: PlaceInLine) -> None:
        run = self._executor.run
        # In the run's context, where a batched call reads which run it belongs to.
        run.context.run(wake_on, run.turn.loop, place, partial(self._wake, place))

    def _wake(self, place: PlaceInLine) -> None:
        executor = self._executor
        if place not in self._places or executor.run.is_stopped:
            return  # given up: the result belongs to the next place in line
        if executor.run.leaves_to_caller(partial(self._wake, place)):
            return  # if the task is cancelled before it runs, the next place in line gets the result
        try:
            try:
                result = place.claim()
            except Exception as error:
                if isinstance(error, QueueClosedError):
                    error.__traceback__ = None  # its frames lead to the caller that closed the queue, and to its values
                waiting = self._ended(place, None, "error")
                executor.kernel_failed(error, waiting.node, waiting.iteration, waiting.inputs)
            else:
                if result is NOT_YET:
                    return
                waiting = self._ended(place, result, "ok")
                executor.complete(waiting.node, waiting.iteration, waiting.inputs, result)
                del result, waiting  # the run may need their memory
            executor.go_on(later=not place.is_called_outside)
        except BaseException as error:
            executor.broken(error)

    def _ended(self, place: PlaceInLine, result: Value, status: str) -> _Waiting:
        executor, waiting = self._executor, self._places.pop(place)
        executor.in_flight -= 1
        self.in_line -= not isinstance(place, ToldPlace)
        if executor.recorder is not None:
            node, iteration, _, started = waiting
            executor.recorder.firing(node, iteration, "async", started, executor.run.turn.clock(), result, status)
        return waiting

    def leave(self) -> None:
        """Gives up all places: the run is being stopped, and whoever stops it looks whether it is quiet then."""
        self.new = []
        for place in list(self._places):
            place.leave()
            self._ended(place, None, "cancelled")

    def describe(self) -> list[str]:
        """A line for each firing that waits, for messages."""
        return [
            f"{node.name}: {place.describe()}\n    built at {node.source.location}"
            for place, (node, *_) in self._places.items()
        ]
