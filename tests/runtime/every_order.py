"""Explores every order in which a plan's nodes may fire and its kernels may complete.

A run is a sequence of choices: which ready node the scheduler takes next, or which kernel completes first. The
explorer replays a run up to a choice, then tries each alternative; states already seen are not entered again, so the
work grows with the number of states and not with that of orders.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from asyncflow.runtime.scheduler.frame import Frame, Iteration
from asyncflow.runtime.scheduler.scheduler import Scheduler
from asyncflow.runtime.values.feeds import feed_value
from tests.runtime.by_hand import NOTHING, partition_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import asyncflow as af
    from asyncflow.compiler.plan import Partition, PlanNode
    from asyncflow.runtime.scheduler.scheduler import Firing


@dataclass(slots=True)
class Outcomes:
    """What all orders came to."""

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

    def __init__(self, options: int) -> None:
        self.options = options


class _ChosenOrder(deque[Any]):
    """A ready queue whose next item the run chooses."""

    run: _Run

    def popleft(self) -> Any:
        return self.run.take_ready()


class _Run:
    """One run along given choices; where they end it raises `_Undecided`."""

    def __init__(self, partition: Partition, feeds: list[Any], choices: tuple[int, ...]) -> None:
        self.scheduler = Scheduler(partition)
        self.ready = self.scheduler.ready = _ChosenOrder()
        self.ready.run = self
        self.choices = iter(choices)
        self.running: list[Firing] = []
        self.fired: list[str] = []
        self.feeds = feeds

    def to_the_end(self) -> None:
        self.scheduler.start(self.feeds)
        while True:
            while (firing := self.scheduler.next_firing()) is not None:
                self.running.append(firing)
                self.fired.append(_label(firing[0], firing[1]))
            if not self.running:
                return
            self.complete(self.choose(len(self.running)))

    def take_ready(self) -> tuple[PlanNode, Iteration]:
        # A kernel may also complete before the scheduler takes its next node.
        while (choice := self.choose(len(self.ready) + len(self.running))) >= len(self.ready):
            self.complete(choice - len(self.ready))
        taken: tuple[PlanNode, Iteration] = self.ready[choice]
        del self.ready[choice]
        return taken

    def choose(self, options: int) -> int:
        choice = 0 if options == 1 else next(self.choices, None)
        if choice is None:
            raise _Undecided(options)
        return choice

    def complete(self, position: int) -> None:
        node, iteration, inputs = self.running.pop(position)
        assert node.kernel is not None
        self.scheduler.complete(node, iteration, node.kernel(*inputs))

    # -- the state -----------------------------------------------------------------------------------------------

    def state(self) -> str:
        """Everything that the rest of the run depends on."""
        ready = sorted(_label(node, iteration) for node, iteration in self.ready)
        running = sorted(f"{_label(node, iteration)}{inputs}" for node, iteration, inputs in self.running)
        return repr((ready, running, self.scheduler.results, _frame_state(self.scheduler._root)))

    def frames(self) -> Iterator[Frame]:
        stack = [self.scheduler._root]
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


def explore(fetches: Any, feeds: Mapping[af.Tensor, Any]) -> Outcomes:
    """Runs the fetches in every order; checks in every state that the counts are right, and that nothing is left."""
    checked = {tensor: feed_value(tensor, value) for tensor, value in feeds.items()}
    partition, values = partition_of(fetches, checked), list(checked.values())
    outcomes = Outcomes()
    seen: set[str] = set()
    open_ends: list[tuple[int, ...]] = [()]
    while open_ends:
        choices = open_ends.pop()
        run = _Run(partition, values, choices)
        try:
            run.to_the_end()
        except _Undecided as undecided:
            _check(run, outcomes)
            state = run.state()
            if state not in seen:
                seen.add(state)
                open_ends.extend((*choices, option) for option in range(undecided.options))
        else:
            assert run.scheduler.done, run.scheduler.waiting()
            assert run.scheduler.statistics() == NOTHING
            assert len(set(run.fired)) == len(run.fired), "a node fired twice under one tag"
            outcomes.complete += 1
            outcomes.results.add(tuple(run.scheduler.results))
            outcomes.fired.add(tuple(sorted(run.fired)))
    outcomes.states = len(seen)
    return outcomes


def _check(run: _Run, outcomes: Outcomes) -> None:
    counted = run.scheduler.statistics()
    frames = list(run.frames())
    assert counted.frames == len(frames)
    assert counted.iterations == sum(frame.live for frame in frames) == sum(len([*_iterations(f)]) for f in frames)
    assert counted.parked == sum(len(frame.parked) for frame in frames)
    assert counted.running == len(run.running)
    assert all(frame.live <= frame.info.parallel_iterations for frame in frames)
    for frame in frames:
        outcomes.most_live[frame.info.label] = max(outcomes.most_live.get(frame.info.label, 0), frame.live)
