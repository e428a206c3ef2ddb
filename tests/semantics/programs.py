"""Random programs with state, small enough to explore: variables, updates that do not commute, branches and loops."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from random import Random
from typing import Literal, NamedTuple

import numpy as np

import asyncflow as af
from asyncflow.graph.resource import Resource
from asyncflow.semantics.state import digest
from asyncflow.values import Value

Effects = Literal["ordered", "unordered"]


class Program(NamedTuple):
    """A graph, what to fetch of it, and all its variables."""

    graph: af.Graph
    fetches: list[af.Tensor]
    variables: list[af.Variable]


def stateful_program(random: Random, effects: Effects = "unordered") -> Program:
    """A program of two to four statements, each of which reads, writes, or holds others."""
    with af.Graph(effects=effects) as graph:
        variables = [af.Variable(k, name=f"v{k}") for k in range(random.choice((1, 1, 2)))]
        made = _Block(random, variables, [af.constant(random.randrange(5))]).statements(random.randint(2, 4), depth=0)
    return Program(graph, made, variables)


def acyclic_program(random: Random, effects: Effects = "unordered") -> Program:
    """A graph of the paper's own kind: reads, assignments and Assign-f, ordered by values and control edges alone."""
    with af.Graph(effects=effects) as graph:
        variables = [af.Variable(k, name=f"v{k}") for k in range(random.choice((1, 1, 2)))]
        known, made = [af.constant(random.randrange(5))], list[af.Tensor]()
        for _ in range(random.randint(2, 5)):
            x, variable = random.choice(known), random.choice(variables)
            with af.control_dependencies(random.sample(made, random.choice((0, 0, 0, 1))) if made else []):
                kind = random.choice(("read", "assign", "update", "update", "add"))
                if kind == "read":
                    found = variable.read() + x
                elif kind == "assign":
                    found = variable.assign(x * 2 + 1)
                elif kind == "update":
                    factor = random.choice((-1, 2, 3))
                    found = variable.update(lambda old, by, factor=factor: old * factor + by, x)
                else:
                    found = variable.assign_add(x)
            known.append(found)
            made.append(found)
    return Program(graph, made, variables)


class _Block:
    """Statements that may use values made before them."""

    def __init__(self, random: Random, variables: Sequence[af.Variable], known: Sequence[af.Tensor]) -> None:
        self.random, self.variables, self.known = random, variables, list(known)

    def statements(self, count: int, depth: int) -> list[af.Tensor]:
        made = [self.statement(depth) for _ in range(count)]
        self.known += made
        return made

    def statement(self, depth: int) -> af.Tensor:
        random, x, variable = self.random, self.random.choice(self.known), self.random.choice(self.variables)
        kind = random.choice(("read", "add", "update", "update", "assign", "order", *(("cond", "loop") * (depth < 2))))
        if kind == "read":
            return variable.read() + x
        if kind == "add":
            return variable.assign_add(x)
        if kind == "update":
            factor = random.choice((-1, 2, 3))
            return variable.update(lambda old, by: old * factor + by, x)
        if kind == "assign":
            return variable.assign(variable + x)
        if kind == "order":
            with af.control_dependencies([x]):
                return variable.update(lambda old: 1 - 2 * old)
        return self.cond(x, depth) if kind == "cond" else self.loop(x, depth)

    def cond(self, x: af.Tensor, depth: int) -> af.Tensor:
        return af.cond(x % 2 == 0, lambda: self.inside([x], depth), lambda: self.inside([x], depth))

    def loop(self, x: af.Tensor, depth: int) -> af.Tensor:
        n, start = self.random.randint(1, 2), x % 3
        loop = af.while_loop(lambda i, _: i < n, lambda i, s: (i + 1, self.inside([i, s], depth)), (0, start))
        return loop[1]

    def inside(self, known: Sequence[af.Tensor], depth: int) -> af.Tensor:
        made = _Block(self.random, self.variables, known).statements(self.random.randint(1, 2), depth + 1)
        # The first result is used or not, and with it what it does goes on or is pruned.
        return made[0] + made[-1] if self.random.random() < 0.5 else made[-1]


def queued_program(random: Random, effects: Effects = "unordered") -> Program:
    """Producers and consumers of one queue, with as many elements in as out; taken elements change a variable."""
    with af.Graph(effects=effects) as graph:
        queue = af.FIFOQueue(random.randint(1, 3), af.spec("int64", ()), name="q")
        total = af.Variable(0, name="total")
        count, made = random.randint(2, 4), list[af.Tensor]()
        looped = random.randint(0, 2)

        def produce(i: af.Tensor) -> af.Tensor:
            with af.control_dependencies([queue.enqueue(i + 10)]):
                return i + 1

        made += af.while_loop(lambda i: i < looped, produce, (0,))
        puts = [queue.enqueue(k) for k in range(count - looped)]
        while count:
            many = random.choice((1, 1, 2)) if count > 1 else 1
            taken = queue.dequeue() if many == 1 else af.sum(queue.dequeue_many(2) * np.array([1, 2]))
            made.append(total.update(lambda old, x: old * 3 + x, taken))
            count -= many
        with af.control_dependencies(puts):
            made.append(af.constant(0) + 0)
    return Program(graph, made, [total])


def outcome_keys(found: af.Exploration, variables: Sequence[Resource] | None = None) -> set[Hashable]:
    """The outcomes of a program, without their orders, and of some variables alone."""

    def of_interest(outcome: af.Outcome) -> dict[Resource, Value]:
        return {
            each: value
            for each, value in outcome.variables.items()
            if variables is None or any(each is other for other in variables)
        }

    return {outcome_key(outcome.fetches, of_interest(outcome)) for outcome in found.outcomes}


def outcome_key(fetched: Sequence[Value], variables: Mapping[Resource, Value]) -> Hashable:
    """Equal for outcomes of the same bits."""
    return tuple(map(digest, fetched)), frozenset((each, digest(value)) for each, value in variables.items())
