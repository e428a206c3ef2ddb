"""The rules: how one state follows another (MAPL '17 §3.2; for branches and loops EuroSys '18, fig. 5).

=================  ==================================================================================================
node               rule
=================  ==================================================================================================
operation          fires once its inputs are there and its waits are over; its outputs are its kernel's
read, write        likewise; the resource and the outputs change in one step (Read-x, Assign-x, Assign-f-x)
enqueue, dequeue   likewise, once the queue lets it, in one step for all of its elements; until then it has not begun
lock, unlock       a section of a mutex begins once no other is under way, and ends
barrier            comes, and is done with the last of as many as wait for one another
input              takes the next element, or says whether there is one: they are the same in every order
cond               once the predicate is there, the nodes of the branch taken wait, each for its own inputs, and the
                   results leave one by one (Switch, Merge); nodes of the other branch are dead and never fire
while              the predicate's nodes wait in each iteration that has begun, and once it holds the body's; a
                   variable enters the next iteration as soon as its value is there (Enter, Merge, NextIteration), and
                   leaves when the predicate does not hold (Exit)
any, failing       a kernel that raises has no effect; it ends the run, at any moment from when its inputs are there
=================  ==================================================================================================

All but reads, writes and failures is the same whenever it happens, and so happens at once: `Rules.settle`. In a graph
with ordered effects each resource that a loop writes has its turn: a node that touches it waits for all nodes of the
last iteration that does, and a body for all effects of its predicate. No more than `parallel_iterations` are under way.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import cached_property
from math import inf
from time import monotonic
from typing import Final, Protocol, cast

import numpy as np

from asyncflow.errors import EndOfInput, FeedError, GraphError
from asyncflow.graph.builtin import PARAMETER, PLACEHOLDER
from asyncflow.graph.graph import Graph
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import KernelContext
from asyncflow.graph.resource import Resource, resources_of
from asyncflow.graph.structured import CondNode, StructuredNode, WhileNode, levels
from asyncflow.semantics.program import NeededGraph
from asyncflow.semantics.state import Firing, ProgramState, Tag, digest
from asyncflow.state.elements.queue import QueueSnapshot, QueueState
from asyncflow.state.mutex import WAIT, Barrier, BarrierState, MutexState
from asyncflow.state.waiting.lines import LinedState, PlaceInLine, worked
from asyncflow.values import Kernel, Nest, Value

MISSING: Final = object()
"""In place of a value that is not there yet."""

_MOST_ELEMENTS = 100
"""Of an input, that are read."""


class _Cell(Protocol):
    """The state of a variable or table, as kernels use it."""

    value: Value


class _Elements:
    """The elements of an input, read once: they come from outside, and are the same in every order.

    Attributes:
        value: how many have been taken.
    """

    def __init__(self, state: _Reading, rules: Rules) -> None:
        self._state, self._rules, self.value = state, rules, 0

    def next_or_wait(self) -> Nest:
        """The next element."""
        found = self._following()
        self.value += 1
        return found

    def has_more_or_wait(self) -> Value:
        """Return True if there is one more element."""
        try:
            self._following()
        except EndOfInput:
            return np.False_
        return np.True_

    def _following(self) -> Nest:
        if isinstance(found := self._known[self.value], Exception):
            raise found
        return found

    @cached_property
    def _known(self) -> list[Nest]:
        with ThreadPoolExecutor(1) as thread:  # this thread may be running an event loop
            return thread.submit(asyncio.run, self._read()).result()

    async def _read(self) -> list[Nest]:
        known: list[Nest] = []
        time = asyncio.timeout(None if self._rules.ends_at == inf else self._rules.ends_at - monotonic())
        try:
            async with aclosing(self._state), time:
                while len(known) < _MOST_ELEMENTS:
                    known.append(await self._state.next())
            raise OutOfBounds(f"after {_MOST_ELEMENTS} elements of an input")
        except Exception as error:  # such as EndOfInput: raised when a program takes this element
            known.append(OutOfTime() if time.expired() else error)
        return known


class _Reading(Protocol):
    """The state of an input."""

    async def next(self) -> Nest: ...

    async def aclose(self) -> None: ...


class _RunEnd(dict[object, Callable[[], None]]):
    """Identity of a run, for comparison with the run that is in a mutex's section."""

    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__


def _content(cell: _Cell | _Elements | LinedState) -> Value:
    if isinstance(cell, MutexState | BarrierState):
        return cell.owner if isinstance(cell, MutexState) else frozenset()
    return cell.capture() if isinstance(cell, QueueState) else cast("_Cell", cell).value


def _fill(cell: _Cell | _Elements | LinedState, content: Value) -> None:
    if isinstance(cell, LinedState):
        for place in cell.places():
            cell.left(place)
    if isinstance(cell, MutexState):
        cell.owner = content
    elif isinstance(cell, QueueState):
        cell.become(cast("QueueSnapshot", content))
    else:
        cast("_Cell", cell).value = content


class OutOfBounds(Exception):
    """A program goes on for longer, or reads further, than whoever asked will follow; says how far that was."""


class OutOfTime(OutOfBounds):
    """There is no time to follow it any further."""


class Rules:
    """The rules for one program.

    Args:
        program: what runs.
        seed: of random ops; the graph's own goes first.
    """

    def __init__(self, program: NeededGraph, seed: int = 0) -> None:
        self.program = program
        self.ends_at = inf
        self.seed = program.graph.seed if program.graph.seed is not None else seed
        self.cells: dict[Hashable, _Cell | _Elements | LinedState] = {}
        self._ends: dict[int, _RunEnd] = defaultdict(_RunEnd)
        self.resources: dict[Hashable, Resource] = {}
        self._kernels: dict[Node, Kernel] = {}
        for body in levels(program.graph):
            for node in program.nodes(body):
                self._bind(node)

    def _bind(self, node: Node) -> None:
        op = node.op
        if op is PLACEHOLDER:
            x = node.outputs[0]
            raise FeedError(f"{x.name} {x.spec} is needed; give it a value in feeds={{...}}")
        for resource in resources_of(node):
            if resource.effect_key not in self.cells:
                made = resource.create_state()
                is_input = getattr(made, "kind", "") == "input"
                self.cells[resource.effect_key] = _Elements(made, self) if is_input else made
                self.resources[resource.effect_key] = resource
        may_wait = any(isinstance(self.cells[x.effect_key], LinedState | _Elements) for x in resources_of(node))
        is_unseen = op.conduct.is_user and op.effects is not None and not any(resources_of(node))
        if is_unseen or (op.conduct.is_async and not may_wait):
            raise GraphError(
                f"{node.name} ({op.name}) acts on the world outside, and exploring would do so in every order; feed a "
                f"value in its place\n  built at {node.location}"
            )
        if op.kernel is not None:
            attrs = node.attrs.items()
            bound = {k: self.cells[v.effect_key] if isinstance(v, Resource) else v for k, v in attrs}
            self._kernels[node] = op.kernel(np, **bound)

    def start(self, feeds: Mapping[Tensor, Value], memory: Mapping[Hashable, Value], runs: int) -> ProgramState:
        """Return the initial state of `runs` runs."""
        values: dict[tuple[Tensor, Tag], Value] = {
            (tensor, (run,)): value for tensor, value in feeds.items() for run in range(runs)
        }
        cells = {key: memory.get(key, _content(cell)) for key, cell in self.cells.items()}
        state = ProgramState(cells, values, {}, set(), {}, {})
        for run in range(runs):
            self._begin(state, self.program.graph, (run,))
        self.settle(state)
        return state

    def _begin(self, state: ProgramState, body: Graph, tag: Tag) -> None:
        state.waiting.update({(node, tag): -1 for node in self.program.nodes(body)})

    # -- values and contents -------------------------------------------------------------------------------------

    def find(self, state: ProgramState, tensor: Tensor, tag: Tag) -> Value:
        """The value on an edge, or MISSING: where a branch or loop takes it from, at once or in the end."""
        while (tensor, tag) not in state.values:
            node = tensor.node
            if isinstance(node, StructuredNode):
                decided = state.decided.get((node, tag))
                if decided is None:
                    return MISSING
                if isinstance(node, CondNode):
                    tensor = node.subgraphs[decided].results[tensor.index]
                else:
                    # The loop's result: the body's input in the iteration that did not run.
                    tensor, tag = node.subgraphs[1].inputs[tensor.index], (*tag, decided)
            elif node.op is not PARAMETER:
                return MISSING
            else:
                owner, place = self.program.homes[node]
                if not isinstance(owner, WhileNode) or place >= owner.n_vars:
                    tensor = owner.inputs[place]
                    tag = tag[:-1] if isinstance(owner, WhileNode) else tag
                elif tag[-1] == 0:
                    tensor, tag = owner.inputs[place], tag[:-1]
                else:
                    tensor, tag = owner.body.results[place], (*tag[:-1], tag[-1] - 1)
        return state.values[tensor, tag]

    def _is_done(self, state: ProgramState, node: Node, tag: Tag) -> bool:
        is_value = node.op in (PARAMETER, PLACEHOLDER)
        return self.find(state, node.outputs[0], tag) is not MISSING if is_value else (node, tag) in state.done

    def missing(self, state: ProgramState, firing: Firing) -> list[Firing]:
        """Return the firings that a waiting one needs directly; they may lie in a branch or loop that has to end."""
        node, tag = firing
        found = [(x.node, tag) for x in node.inputs if self.find(state, x, tag) is MISSING]
        return found + self._ahead(state, firing)

    def _ahead(self, state: ProgramState, firing: Firing) -> list[Firing]:
        """Return the needed firings whose values the firing does not use."""
        node, tag = firing
        before = [(each, (*tag[:-1], tag[-1] - lag)) for each, lag in self.program.before(node) if lag <= tag[-1]]
        return [each for each in before if not self._is_done(state, *each)]

    def enabled(self, state: ProgramState) -> list[Firing]:
        """The reads and writes that may be next."""
        ready = (f for f in state.waiting if not f[0].subgraphs and f not in state.failing)
        return [firing for firing in ready if not self.missing(state, firing) and self._is_served(state, firing)]

    def _is_served(self, state: ProgramState, firing: Firing) -> bool:
        """Return True if a queue lets a firing go on, or refuses it for good, or a barrier has not counted it yet."""
        if firing[0].op is WAIT:
            come = state.memory[firing[0].attrs["barrier"].effect_key]
            return firing not in cast("frozenset[Firing]", come)
        try:
            return not firing[0].op.conduct.is_async or not isinstance(self._result(state, firing), PlaceInLine)
        except Exception:  # `fire` raises it again
            return True

    # -- firings -------------------------------------------------------------------------------------------------

    def fire(self, state: ProgramState, firing: Firing) -> None:
        """Do an operation, read or write: all of it, in one step. If its kernel raises, the state is as it was."""
        node, tag = firing
        if node.op is WAIT:
            self._meet(state, firing, node.attrs["barrier"])
            return
        found = self._result(state, firing)
        for resource in resources_of(node):
            state.memory[resource.effect_key] = _content(self.cells[resource.effect_key])
        for tensor, value in zip(node.outputs, (found,) if node.single else found, strict=True):
            state.values.setdefault((tensor, tag), value)  # a fed tensor keeps its value
        del state.waiting[firing]
        state.done.add(firing)

    def _meet(self, state: ProgramState, firing: Firing, barrier: Barrier) -> None:
        """Count a firing at a barrier; with the last one, all of them go on."""
        met = cast("frozenset[Firing]", state.memory[barrier.effect_key]) | {firing}
        state.memory[barrier.effect_key] = met if len(met) < barrier.n else frozenset()
        for each in met if len(met) == barrier.n else ():
            del state.waiting[each]
            state.done.add(each)

    def _result(self, state: ProgramState, firing: Firing) -> Nest:
        """Call a kernel, which leaves the state of its resources in the cells; return a place in line if it waits.

        Only dequeues can stand in line, namely before an enqueue of more elements than there is room for.
        """
        touched = list(resources_of(firing[0]))
        # All states of the search share the cells, which are filled before each call and read after it.
        found = self._call(state, firing, touched)
        for other in state.waiting if isinstance(found, PlaceInLine) else ():
            if list(resources_of(other[0])) == touched and other != firing and not self.missing(state, other):
                first = self._call(state, other, touched)
                if isinstance(first, PlaceInLine):
                    found = self._call(state, firing)
                    first.leave()
                    if not isinstance(found, PlaceInLine):
                        return found
        return found

    def _call(self, state: ProgramState, firing: Firing, fresh: Iterable[Resource] = ()) -> Nest:
        for resource in fresh:
            _fill(self.cells[resource.effect_key], state.memory[resource.effect_key])
        node, tag = firing
        inputs = [self.find(state, tensor, tag) for tensor in node.inputs]
        if node.op.conduct.needs_context:
            inputs.insert(0, KernelContext(self.seed, tag[0], tag[1:], self._ends[tag[0]]))
        return worked(self._kernels[node](*inputs))

    def settle(self, state: ProgramState) -> None:
        """Fire all firings whose outcome does not depend on their moment."""
        # The search does not branch here, as every order gives the same state. Each round may make more firings ready.
        moved = True
        while moved:
            moved = False
            if monotonic() > self.ends_at:
                raise OutOfTime
            for firing in list(state.waiting):
                node, tag = firing
                if firing in state.decided:
                    moved |= self._end(state, node, tag)
                elif isinstance(node, CondNode):
                    moved |= self._cond(state, node, tag)
                elif isinstance(node, WhileNode):
                    moved |= self._while(state, node, tag)
                elif firing not in state.failing and not self.program.touches(node):
                    moved |= self._operation(state, firing)

    def _operation(self, state: ProgramState, firing: Firing) -> bool:
        if self.missing(state, firing):
            return False
        try:
            self.fire(state, firing)
        except Exception as error:  # a failure is one of the program's outcomes, whatever it raises
            state.failing[firing] = error
        return True

    def _cond(self, state: ProgramState, node: CondNode, tag: Tag) -> bool:
        predicate = self.find(state, node.predicate, tag)
        if predicate is MISSING or self._ahead(state, (node, tag)):
            return False
        branch = state.decided[node, tag] = 0 if predicate else 1
        self._begin(state, node.subgraphs[branch], tag)
        return True

    def _while(self, state: ProgramState, node: WhileNode, tag: Tag) -> bool:
        current = state.waiting[node, tag]
        iteration = (*tag, current)
        if current >= 0 and (node, iteration) not in state.done:  # the predicate has started, but not the body
            predicate = self.find(state, node.decision, iteration)
            is_ordered = self.program.graph.effects == "ordered"
            if predicate is MISSING or (is_ordered and self._runs_inside(state, node, iteration)):
                return False
            if not predicate:
                state.decided[node, tag] = current
                return True
            self._begin(state, node.body, iteration)
            state.done.add((node, iteration))
            return True
        # The next predicate starts once the iteration `parallel_iterations` before it has ended. A negative number
        # names no iteration, so nothing runs inside.
        oldest = (*tag, current + 1 - node.parallel_iterations)
        if self._ahead(state, (node, tag)) or self._runs_inside(state, node, oldest):
            return False
        state.waiting[node, tag] = current + 1
        self._begin(state, node.predicate, (*tag, current + 1))
        return True

    def _end(self, state: ProgramState, node: Node, tag: Tag) -> bool:
        if self._runs_inside(state, node, tag):
            return False
        del state.waiting[node, tag]
        state.done.add((node, tag))
        return True

    def _runs_inside(self, state: ProgramState, node: Node, tag: Tag) -> bool:
        bodies = {each for body in node.subgraphs for each in levels(body)}
        return any(each.graph in bodies and inner[: len(tag)] == tag for each, inner in state.waiting)

    # -- keys of states ------------------------------------------------------------------------------------------

    def key(self, state: ProgramState) -> Hashable:
        """Equal for states from which the same may follow: resources, and values in transit."""
        transit = []
        for (node, tag), at in state.waiting.items():
            edges = [(tensor, tag) for tensor in node.inputs]
            if isinstance(node, WhileNode) and at >= 0:
                edges += [(node.body.inputs[k], (*tag, i)) for k in self.program.kept[node] for i in (at, at + 1)]
            begun = (node, tag) in state.decided, (node, (*tag, at)) in state.done
            transit.append((node, tag, at, begun, self._digests(state, edges)))
        runs = {tag[0] for _, tag in state.waiting} | {tag[0] for _, tag in state.done}
        fetched = [(tensor, (run,)) for run in sorted(runs) for tensor in self.program.values]
        memory = tuple((key, digest(value)) for key, value in state.memory.items())
        return memory, frozenset(transit), self._digests(state, fetched)

    def _digests(self, state: ProgramState, edges: Iterable[tuple[Tensor, Tag]]) -> tuple[Hashable, ...]:
        return tuple(digest(self.find(state, tensor, tag)) for tensor, tag in edges)
