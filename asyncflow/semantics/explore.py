"""Every outcome that a small program may have, and an order of its reads and writes that leads to each.

The search is exhaustive up to what cannot show. Two firings without a common resource commute. So in each state only a
*persistent* set of enabled firings is tried: nothing left out, and nothing still to come, touches a resource of the set
before the set does. States that were seen before are not searched again. A program that may fail is searched a second
time without the first of the two: a failure shows how far the other firings have come.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from time import monotonic
from typing import TypeAlias, cast

from asyncflow.errors import FetchError
from asyncflow.graph.building.build import TensorLike
from asyncflow.graph.building.feeds import Feeds
from asyncflow.graph.builtin import PARAMETER
from asyncflow.graph.graph import Graph
from asyncflow.graph.resource import Resource
from asyncflow.semantics.arguments import fed_arrays, initial_values
from asyncflow.semantics.program import NeededGraph, Touches, conflict
from asyncflow.semantics.rules import OutOfBounds, Rules
from asyncflow.semantics.state import Firing, ProgramState, digest
from asyncflow.state.elements.queue import QueueSnapshot
from asyncflow.state.mutex import Barrier, Mutex, whole_number
from asyncflow.state.variables.variable import Variable
from asyncflow.values import Array, Nest

_Order: TypeAlias = "tuple[_Order, Firing] | None"


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """An outcome: one possible end of the runs of a program.

    Attributes:
        fetches: values of the fetched tensors and variables, of one run after the other; none if the run failed.
        variables: the value of each variable afterwards; of a queue, a tuple of its elements; of an input, how many of
            them were taken.
        error: why the run failed; empty if it did not.
        order: reads and writes in an order that leads here: names of nodes, with the iterations of the loops around
            them in brackets, and, of several runs, the number of the run in front.
    """

    fetches: tuple[Array, ...]
    variables: Mapping[Resource, Array]
    error: str
    order: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Exploration:
    """The outcomes of a program.

    Attributes:
        outcomes: no two alike.
        states: how many were searched.
        stopped: the bound that was met, after which there may be further outcomes; empty if these are all.
    """

    outcomes: tuple[Outcome, ...]
    states: int
    stopped: str


def explore(
    graph: Graph,
    fetches: Nest,
    feeds: Feeds | None = None,
    *,
    variables: Mapping[Variable, TensorLike] | None = None,
    runs: int = 1,
    seed: int = 0,
    max_states: int = 20_000,
    max_seconds: float = 10.0,
) -> Exploration:
    """Find every outcome of a run, under every order that the program leaves open (MAPL '17 §3.2).

    A session that runs the graph gives one of them, on any devices. For small programs: every access to a resource that
    others may write in the meantime doubles the work. Iterations of loops overlap as far as their `parallel_iterations`
    and, with ordered effects, the turns of each resource let them.

    Args:
        graph: with ordered effects it has one outcome, if it does not fail and its queues are first in, first out.
            Nothing in it may be a coroutine. Of an input the first hundred elements are read, once.
        fetches: any nest of tensors, nodes and variables, or names; None for all effects of the graph.
        feeds: values by tensor or tensor name, as in `Session.run`.
        variables: values before the runs; those left out have their initial values.
        runs: how many runs of it are in flight together in one session, with these feeds.
        seed: of random ops, if the graph has none.
        max_states: search no more than this many.
        max_seconds: search no longer than this.

    Raises:
        FeedError: a placeholder is needed and not fed, or a value does not fit.
        FetchError: a fetch is nothing of the graph.
        GraphError: `graph`, `variables` or `runs` make no sense, or the program acts on the world outside, or has
            primitives written by hand.

    >>> import asyncflow as af
    >>> with af.Graph(effects="unordered") as graph:
    ...     v = af.Variable(0, name="v")
    ...     writes = [v.assign(v + 1), v.assign(v + 2)]
    >>> sorted(int(outcome.variables[v]) for outcome in explore(graph, [each.node for each in writes]).outcomes)
    [1, 2, 3]
    """
    given = fed_arrays(graph, feeds)
    program = NeededGraph(graph, fetches, given)
    inside = next((tensor for tensor in program.values if tensor.graph.is_subgraph), None)
    if inside is not None:
        raise FetchError(f"explore fetches tensors outside branches and loops; {inside!r} is inside one")
    rules = Rules(program, seed)
    memory = initial_values(variables)
    search = _Exploring(rules, whole_number(runs, "explore(runs=)"), max_states, max_seconds)
    with redirect_stdout(StringIO()):  # otherwise the program would print for every order
        search.run(lambda: rules.start(given, memory, runs))
    return Exploration(tuple(search.outcomes.values()), search.states, search.stopped)


class _Exploring:
    def __init__(self, rules: Rules, runs: int, max_states: int, max_seconds: float) -> None:
        self.rules, self.runs = rules, runs
        self.max_states, self.max_seconds = max_states, max_seconds
        self.outcomes: dict[Hashable, Outcome] = {}
        self.states, self.stopped, self.fails = 0, "", False
        rules.ends_at = monotonic() + max_seconds

    def run(self, begin: Callable[[], ProgramState]) -> None:
        """Searches all states, if need be twice."""
        try:
            start = begin()
            self._search(start, reduced=True)
            if self.fails:
                self._search(start, reduced=False)
        except OutOfBounds as bound:
            self.stopped = str(bound) or f"after max_seconds={self.max_seconds:g} seconds"  # `OutOfTime` has no message

    def _search(self, start: ProgramState, *, reduced: bool) -> None:
        """Searches all states, until a failure is found where not everything is tried."""
        seen: set[Hashable] = set()
        stack: list[tuple[ProgramState, _Order]] = [(start, None)]
        while stack and not self.stopped and not (reduced and self.fails):
            state, order = stack.pop()
            key = self.rules.key(state)
            if key in seen:
                continue
            if self.states == self.max_states:
                self.stopped = f"after max_states={self.max_states} states"
                return
            seen.add(key)
            self.states += 1
            enabled = self.rules.enabled(state)
            for firing, error in state.failing.items():
                self._note(state, order, firing, error)
            if not state.waiting:
                self._note(state, order)
            elif not enabled and not state.failing:
                stuck = next(firing for firing in state.waiting if not self.rules.missing(state, firing))
                self._note(state, order, stuck, TimeoutError("waits for ever"))
            for firing in reversed(self._persistent(state, enabled) if reduced else enabled):
                following = state.copy()
                try:
                    self.rules.fire(following, firing)
                except OutOfBounds:
                    raise
                except Exception as error:  # as in `Rules.settle`
                    self._note(state, order, firing, error)
                    continue
                self.rules.settle(following)
                stack.append((following, (order, firing)))

    def _note(
        self, state: ProgramState, order: _Order, failed: Firing | None = None, error: Exception | None = None
    ) -> None:
        """Adds an outcome: of runs that have ended, or one of which has failed."""
        self.fails |= failed is not None
        runs, tensors = range(0 if failed else self.runs), self.rules.program.values
        fetched = tuple(cast("Array", self.rules.find(state, tensor, (run,))) for run in runs for tensor in tensors)
        reason = f"{failed[0].name}: {type(error).__name__}: {error}" if failed else ""
        key = reason, *map(digest, fetched), *map(digest, state.memory.values())
        if key not in self.outcomes:
            contents = [each.elements if isinstance(each, QueueSnapshot) else each for each in state.memory.values()]
            found = zip(map(self.rules.resources.__getitem__, state.memory), contents, strict=True)
            variables = {each: cast("Array", value) for each, value in found if not isinstance(each, Mutex | Barrier)}
            self.outcomes[key] = Outcome(fetched, variables, reason, tuple(self._told(order)))

    def _told(self, order: _Order) -> list[str]:
        told: list[str] = []
        while order is not None:
            order, (node, tag) = order
            iterations = f" {list(tag[1:])}" if len(tag) > 1 else ""
            told.append(f"{f'run {tag[0] + 1}: ' if self.runs > 1 else ''}{node.name}{iterations}")
        return told[::-1]

    # -- partial order reduction ---------------------------------------------------------------------------------

    def _persistent(self, state: ProgramState, enabled: list[Firing]) -> list[Firing]:
        """Return the smallest set of enabled firings that must be tried: no other firing can interfere before them."""
        # All waiting firings that touch a resource, here or in branches and loops that have not started.
        shares, begun = self.rules.program.shares, state.decided
        to_come = [(f, shares(f[0])) for f in state.waiting if shares(f[0]) and not (f[0].subgraphs and f in begun)]
        ahead: dict[Firing, set[Firing]] = {}
        closed = [self._closed(state, first, enabled, to_come, ahead) for first in enabled]
        return min([enabled, *(each for each in closed if each is not None)], key=len)

    def _closed(
        self,
        state: ProgramState,
        first: Firing,
        enabled: list[Firing],
        to_come: list[tuple[Firing, Touches]],
        ahead: dict[Firing, set[Firing]],
    ) -> list[Firing] | None:
        """Return `first` with the enabled firings that it may depend on; None if other firings may interfere first."""
        chosen, others = [first], list[Firing]()
        for mine in chosen:
            touched = self.rules.program.shares(mine[0])
            rivals = [f for f, touches in to_come if f not in chosen and conflict(touches, touched)]
            chosen += [rival for rival in rivals if rival in enabled]
            others += [rival for rival in rivals if rival not in enabled]
        return None if any(self._ahead(state, other, ahead).isdisjoint(chosen) for other in others) else chosen

    def _ahead(self, state: ProgramState, firing: Firing, known: dict[Firing, set[Firing]]) -> set[Firing]:
        """Return the firings that certainly precede a waiting one."""
        if firing not in known:
            found = known[firing] = set[Firing]()
            if firing[0].subgraphs:
                return found  # firings inside may have started
            for before in self.rules.missing(state, firing):
                if before[0].op is not PARAMETER and not before[0].subgraphs:
                    found |= {before, *self._ahead(state, before, known)}
        return known[firing]
