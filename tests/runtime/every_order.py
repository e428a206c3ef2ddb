"""Explores every order in which a plan's nodes may fire and its kernels may complete.

A run is a sequence of choices: which partition goes on, which ready node its scheduler takes next, or which kernel
completes first. The
explorer replays a run up to a choice, then tries each alternative; states already seen are not entered again, so the
work grows with the number of states and not with that of orders.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

import asyncflow as af
from asyncflow.compiler.plan import FiringWay
from asyncflow.runtime.scheduler.frame import Frame, Iteration
from asyncflow.runtime.scheduler.rendezvous import Rendezvous
from asyncflow.runtime.scheduler.scheduler import Scheduler
from asyncflow.runtime.values.feeds import feed_value
from tests.runtime.by_hand import NOTHING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from asyncflow.compiler.plan import Partition, PlanNode
    from asyncflow.runtime.scheduler.scheduler import Firing


NOTHING_MEETS = (0, 0, 0)
"""The statistics of a rendezvous that holds nothing."""


@dataclass(slots=True)
class Outcomes:
    """The results of all orders."""

    results: set[tuple[Any, ...]] = field(default_factory=set)
    """The fetched values, which are scalars; one element if the order makes no difference."""
    fired: set[tuple[str, ...]] = field(default_factory=set)
    """The kernels that ran, by node and tag."""
    states: int = 0
    complete: int = 0
    """Runs that reached the end; the others met a state seen before."""
    most_live: dict[str, int] = field(default_factory=dict)
    """Per frame, the most iterations that were ever live at once."""


class _Undecided(BaseException):
    """The choices given are used up, and there are several ways to go on."""

    def __init__(self, options: int, of: str) -> None:
        self.options = options
        self.of = of


class _ChosenOrder(deque[Any]):
    """A ready queue whose next item the run chooses."""

    def __init__(self, choose: Callable[[], int]) -> None:
        super().__init__()
        self._choose = choose

    def popleft(self) -> Any:
        taken = self[position := self._choose()]
        del self[position]
        return taken


class _Run:
    """A run along given choices; where they end it raises `_Undecided`. Of several partitions any may go on, after each
    of its firings; Send and Recv meet as the executors' do.

    Of several partitions any may go on, after each of its firings; Send and Recv meet as the executors' do.
    """

    def __init__(self, partitions: Sequence[Partition], feeds: Sequence[Any], choices: tuple[int, ...]) -> None:
        self.schedulers = [Scheduler(partition) for partition in partitions]
        self.rendezvous = Rendezvous()
        self.choices = iter(choices)
        self.running: list[tuple[Scheduler, Firing]] = []
        self.fired: list[str] = []
        self.feeds = feeds
        for scheduler in self.schedulers:
            scheduler.ready = _ChosenOrder(partial(self.take_ready, scheduler))

    def to_the_end(self) -> None:
        for scheduler in self.schedulers:
            scheduler.start([self.feeds[index] for index in scheduler.partition.feed_indexes])
            self.acknowledge(scheduler)
        while True:
            able = [scheduler for scheduler in self.schedulers if scheduler.ready]
            if not able:
                if not self.running:
                    return
                self.complete(self.choose(len(self.running), "kernels"))
                continue
            scheduler = able[self.choose(len(able), "partitions")]
            firing = scheduler.next_firing()
            self.acknowledge(scheduler)
            if firing is not None:
                self.fired.append(_label(firing[0], firing[1]))
                self.launch(scheduler, firing)

    def launch(self, scheduler: Scheduler, firing: Firing) -> None:
        node, iteration, inputs = firing
        if node.way == FiringWay.RECV:
            self.rendezvous.receive(partial(self.arrived, scheduler), node, iteration)
        elif node.way == FiringWay.SEND:
            if node.source.attrs["is_acknowledged"]:
                self.rendezvous.await_acknowledgement(partial(self.finish, scheduler, ()), node, iteration)
            self.rendezvous.send(node, iteration, inputs[0] if inputs else np.True_)
            if not node.source.attrs["is_acknowledged"]:
                self.finish(scheduler, (), node, iteration)
        else:
            self.running.append((scheduler, firing))

    def arrived(self, scheduler: Scheduler, node: PlanNode, iteration: Iteration, value: Any, sent_ns: int) -> None:
        self.finish(scheduler, value, node, iteration)

    def finish(self, scheduler: Scheduler, result: Any, node: PlanNode, iteration: Iteration) -> None:
        scheduler.complete(node, iteration, result)
        self.acknowledge(scheduler)

    def acknowledge(self, scheduler: Scheduler) -> None:
        ended, scheduler.ended = scheduler.ended, []
        for transfer, counters in ended:
            self.rendezvous.acknowledge(transfer, counters)

    def take_ready(self, scheduler: Scheduler) -> int:
        # A kernel may also complete before the scheduler takes its next node.
        of = f"ready in {scheduler.partition.device}"
        while (choice := self.choose(len(scheduler.ready) + len(self.running), of)) >= len(scheduler.ready):
            self.complete(choice - len(scheduler.ready))
        return choice

    def choose(self, options: int, of: str) -> int:
        choice = 0 if options == 1 else next(self.choices, None)
        if choice is None:
            raise _Undecided(options, of)
        return choice

    def complete(self, position: int) -> None:
        scheduler, (node, iteration, inputs) = self.running.pop(position)
        assert node.kernel is not None
        self.finish(scheduler, node.kernel(*inputs), node, iteration)

    def cancel(self) -> None:
        """Stops the run where it is."""
        for scheduler in self.schedulers:
            scheduler.abort()
        self.rendezvous.clear()

    def results(self) -> tuple[Any, ...]:
        """The fetched values."""
        found = self.schedulers[0].results
        for scheduler in self.schedulers[1:]:
            for index in scheduler.partition.fetch_indexes:
                found[index] = scheduler.results[index]
        return tuple(found)

    # -- the state -----------------------------------------------------------------------------------------------

    def state(self) -> str:
        """Everything that the rest of the run depends on."""
        running = sorted(f"{_label(node, iteration)}{inputs}" for _, (node, iteration, inputs) in self.running)
        states = []
        for scheduler in self.schedulers:
            ready = sorted(_label(node, iteration) for node, iteration in scheduler.ready)
            states.append((ready, scheduler.results, _frame_state(scheduler._root)))
        meeting = self.rendezvous
        return repr((states, running, meeting._sent, [*meeting._waiting], [*meeting._unacknowledged]))

    def frames(self) -> Iterator[Frame]:
        stack = [scheduler._root for scheduler in self.schedulers if scheduler._root.newest is not None]
        while stack:
            frame = stack.pop()
            yield frame
            for iteration in _iterations(frame):
                stack.extend(iteration.children.values())


def _label(node: PlanNode, iteration: Iteration) -> str:
    return f"{node.name}@{iteration.tag()}"


def _iterations(frame: Frame) -> Iterator[Iteration]:
    iteration = frame.newest
    while iteration is not None:
        yield iteration
        iteration = iteration.previous


def _frame_state(frame: Frame) -> tuple[Any, ...]:
    parked = [(node.name, value) for node, value in frame.parked]
    exits = sorted(node.name for node in frame.live_exits)
    iterations = [_iteration_state(iteration) for iteration in _iterations(frame)]
    return frame.info.path, parked, exits, frame.pending_enters, frame.pending, frame.values, iterations


def _iteration_state(it: Iteration) -> tuple[Any, ...]:
    children = sorted((_frame_state(child) for child in it.children.values()), key=repr)
    return it.index, it.outstanding, it.pending, it.values, sorted(it.dead or ()), children


def explore(
    fetches: Any, feeds: Mapping[af.Tensor, Any], *, devices: int = 1, placement_seed: int | None = None
) -> Outcomes:
    """Run the fetches in every order; check in every state that the counts are right, and that nothing is left.

    Args:
        fetches: of the run.
        feeds: of the run.
        devices: how many CPU devices its nodes are on.
        placement_seed: puts nodes there at random; None where they finish first.
    """
    checked = {tensor: feed_value(tensor, value) for tensor, value in feeds.items()}
    names = [f"cpu:{index}" for index in range(devices)]
    session = af.Session(debug=True, regions=False, devices=names, placement_seed=placement_seed)
    partitions, values = session.plan(fetches, list(feeds)).partitions, list(checked.values())
    outcomes = Outcomes()
    seen: set[str] = set()
    open_ends: list[tuple[int, ...]] = [()]
    while open_ends:
        choices = open_ends.pop()
        run = _Run(partitions, values, choices)
        try:
            run.to_the_end()
        except _Undecided as undecided:
            _check(run, outcomes)
            state = undecided.of + run.state()
            if state not in seen:
                seen.add(state)
                open_ends.extend((*choices, option) for option in range(undecided.options))
            run.cancel()
        else:
            waiting = [line for scheduler in run.schedulers for line in scheduler.waiting()]
            assert all(scheduler.done for scheduler in run.schedulers), waiting + run.rendezvous.waiting()
            assert len(set(run.fired)) == len(run.fired), "a node fired twice under one tag"
            outcomes.complete += 1
            outcomes.results.add(run.results())
            outcomes.fired.add(tuple(sorted(run.fired)))
        assert [scheduler.statistics() for scheduler in run.schedulers] == [NOTHING] * len(partitions)
        assert run.rendezvous.statistics() == NOTHING_MEETS, run.rendezvous.waiting()
    outcomes.states = len(seen)
    return outcomes


def _check(run: _Run, outcomes: Outcomes) -> None:
    counted = [scheduler.statistics() for scheduler in run.schedulers]
    frames = list(run.frames())
    live = sum(frame.live for frame in frames)
    assert sum(each.frames for each in counted) == len(frames)
    assert sum(each.iterations for each in counted) == live == sum(len([*_iterations(frame)]) for frame in frames)
    assert sum(each.parked for each in counted) == sum(len(frame.parked) for frame in frames)
    assert sum(each.running for each in counted) == len(run.running) + _meeting(run.rendezvous)
    assert all(frame.live <= frame.info.parallel_iterations for frame in frames)
    for frame in frames:
        outcomes.most_live[frame.info.label] = max(outcomes.most_live.get(frame.info.label, 0), frame.live)


def _meeting(rendezvous: Rendezvous) -> int:
    """Firings that wait in a rendezvous."""
    return rendezvous.statistics().waiting + rendezvous.statistics().unacknowledged
