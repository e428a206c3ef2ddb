"""Vertex functions, and their results vertex after vertex in plain NumPy."""

from __future__ import annotations

from graphlib import TopologicalSorter
from typing import Any

import numpy as np

import asyncflow as af
from tests.vertex.graphs import children_of

H = 3
RNG = np.random.default_rng(0)
U, W, V = RNG.normal(size=(H, H)), RNG.normal(size=(2, H)), RNG.normal(size=(H, H))


def forest(rng: np.random.Generator, lengths: list[int], types: int = 0) -> af.InputGraph:
    """Samples of these sizes: trees, chains, stars and graphs with shared children."""
    samples = []
    for number, n in enumerate(lengths):
        kinds = rng.integers(0, types, n).tolist() if types else None
        if number % 3 == 2:
            edges = [(a, b) for a in range(n) for b in range(a + 1, n) if rng.random() < 1.5 / n]
            taken: dict[int, int] = {}
            few = [e for e in edges if taken.setdefault(e[0], 0) < 2 and not taken.update({e[0]: taken[e[0]] + 1})]
            samples.append(af.InputGraph.from_edges(n, few, kinds))
        else:
            parents, room = [-1] * n, [2] * n
            for vertex in range(1, n):
                free = [p for p in range(vertex) if room[p]]
                parents[vertex] = free[-1] if number % 3 == 1 else int(rng.choice(free))
                room[parents[vertex]] -= 1
            samples.append(af.InputGraph.from_parents(parents, kinds))
    return af.InputGraph.batch(samples)


def in_order(graph: af.InputGraph) -> list[int]:
    """Children before their parents."""
    return list(TopologicalSorter(dict(enumerate(children_of(graph)))).static_order())


def sigmoid(x: Any) -> Any:
    return 1.0 / (1.0 + np.exp(-x))


@af.vertex_function(state=af.spec("float64", (H,)), children=2)
def slotted(v: Any) -> None:
    """Two children, told apart; eager, core and lazy operations."""
    left, right = v.gather(0), v.gather(1)
    h = af.tanh(v.pull() @ W + left @ U - right @ V)
    v.scatter(h)
    v.push(af.sum(h * left) + af.sum(v.pull()))
    v.push(v.is_leaf, name="leaf")


def slotted_alone(graph: af.InputGraph, x: Any, initial: float = 0.0) -> tuple[Any, Any]:
    states: dict[int, Any] = {}
    pushed = np.zeros(len(x))
    for vertex in in_order(graph):
        below = [states[child] for child in children_of(graph)[vertex]]
        left, right = (*below, np.full(H, initial), np.full(H, initial))[:2]
        states[vertex] = np.tanh(x[vertex] @ W + left @ U - right @ V)
        pushed[vertex] = (states[vertex] * left).sum() + x[vertex].sum()
    return pushed, np.array([states[root] for root in graph.roots.tolist()]).reshape(-1, H)


@af.vertex_function(state=(af.spec("float64", (H,)), af.spec("float64", (H,))))
def child_sum(v: Any) -> None:
    """A Tree-LSTM of any fan-in, with a forget gate for each child."""
    x = v.pull() @ W
    h = v.gather_all(lambda child: child[0])
    kept = v.gather_all(lambda child: af.sigmoid(x + child[0] @ U) * child[1])
    most = v.gather_all(lambda child: child[1], reduce="max")
    mean = v.gather_all(lambda child: child[0], reduce="mean")
    c = kept + af.tanh(x + h @ V) + 0.1 * most
    v.scatter((af.tanh(c) + mean, c))
    v.push(af.sum(c))


def child_sum_alone(graph: af.InputGraph, x: Any, initial: float = 0.0) -> tuple[Any, Any]:
    states: dict[int, tuple[Any, Any]] = {}
    for vertex in in_order(graph):
        below = [states[child] for child in children_of(graph)[vertex]]
        own = x[vertex] @ W
        h = sum((each[0] for each in below), np.zeros(H))
        kept = sum((sigmoid(own + each[0] @ U) * each[1] for each in below), np.zeros(H))
        most = np.max([each[1] for each in below], axis=0) if below else np.zeros(H)
        c = kept + np.tanh(own + h @ V) + 0.1 * most
        states[vertex] = np.tanh(c) + h / max(len(below), 1), c
    pushed = np.array([states[vertex][1].sum() for vertex in range(len(x))])
    return pushed, np.array([states[root][0] for root in graph.roots.tolist()]).reshape(-1, H)


@af.vertex_function(state=af.spec("float64", (H,)), children=2)
def word(v: Any) -> None:
    """A vertex of type 0: it looks at no child."""
    v.scatter(af.tanh(v.pull() @ W))
    v.push(af.sum(v.pull()))


@af.vertex_function(state=af.spec("float64", (H,)), children=2)
def phrase(v: Any) -> None:
    """A vertex of type 1, with a push of its own."""
    h = af.tanh(v.gather(0) @ U + v.gather(1) @ V)
    v.scatter(h)
    v.push(af.sum(h) + af.sum(v.gather(0)))
    v.push(af.max(h), name="most")


def typed_alone(graph: af.InputGraph, x: Any) -> tuple[Any, Any, Any]:
    states: dict[int, Any] = {}
    pushed, most = np.zeros(len(x)), np.zeros(len(x))
    for vertex in in_order(graph):
        left, right = (*(states[child] for child in children_of(graph)[vertex]), np.zeros(H), np.zeros(H))[:2]
        if np.asarray(graph.types)[vertex] == 0:
            states[vertex] = np.tanh(x[vertex] @ W)
            pushed[vertex] = x[vertex].sum()
        else:
            states[vertex] = np.tanh(left @ U + right @ V)
            pushed[vertex], most[vertex] = states[vertex].sum() + left.sum(), states[vertex].max()
    return pushed, most, np.array([states[root] for root in graph.roots.tolist()]).reshape(-1, H)
