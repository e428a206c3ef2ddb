"""`VertexRows`: runs join and leave between sets, and each has the rows of its own vertices."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import pytest

from asyncflow.graph.spec import Spec
from asyncflow.runtime.vertex_rows import RunOfSets, VertexRows
from asyncflow.vertex.shared import InputCounts
from tests.vertex.evaluation import forest, in_order
from tests.vertex.graphs import children_of, ordered

FLOAT = Spec(np.dtype("float64"), (None, 2))


@dataclass(eq=False)
class Member:
    sets: RunOfSets
    expected: Any
    is_gone: bool = False


def member(number: int, arity: int | None) -> Member:
    """One whose states are its own rows and those of its children, with what stands for one that is not there."""
    random = np.random.default_rng(number)
    graph = forest(random, random.integers(1, 8, int(random.integers(0, 3))).tolist())
    plan = ordered(graph, arity=arity)
    own, initial = random.normal(size=(graph.n_vertices, 2)), np.full(2, float(number))
    states: dict[int, Any] = {}
    for vertex in in_order(graph):
        below = [states[child] for child in children_of(graph)[vertex]]
        missing = 0 if arity is None else arity - len(below)
        states[vertex] = sum(below, own[vertex] + missing * initial)
    order = plan.order.tolist()
    counts = InputCounts(2 + (arity is None), 1, 1, 0)
    starts = () if plan.child_starts is None else (plan.child_starts,)
    inputs = (plan.set_starts, plan.child_ranks, *starts, initial, own[order])
    return Member(RunOfSets.of(inputs, counts), np.array([states[v] for v in order]).reshape(-1, 2))


def step(rows: VertexRows[Member], members: list[Member], *, arity: int | None) -> None:
    at = rows.rows(members)
    own, children, *edges = rows.inputs(members, at)
    if arity is not None:
        below = children.sum(axis=1)
    else:
        owners, starts = edges
        assert np.array_equal(np.diff(starts), np.bincount(owners, minlength=len(at)))
        below = np.zeros_like(own)
        np.add.at(below, owners, children)
    rows.advance(members, at, [own + below])


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("arity", [2, None])
def test_each_run_has_its_own_rows(seed: int, arity: int | None) -> None:
    """They come and go at any set, some unfinished; steps are for all of them or for halves."""
    random = Random(seed)
    rows: VertexRows[Member] = VertexRows([FLOAT])
    ended: list[Member] = []
    asked: list[Member] = []
    while len(asked) < 60 or not rows.is_empty:
        for _ in range(random.randrange(4) if len(asked) < 60 else 0):
            asked.append(member(len(asked), arity))
            rows.waiting.append(asked[-1])
        if asked and random.random() < 0.1:
            random.choice(asked).is_gone = True
        rows.admit()
        assert not any(each.is_gone for each in rows.members)
        for each, (found,) in rows.ended():  # without vertices
            ended.append(each)
            assert found.shape == (0, 2)
        middle = random.randrange(len(rows.members) + 1)
        for part in (rows.members[:middle], rows.members[middle:]):
            if part:
                step(rows, part, arity=arity)
        if rows.members and random.random() < 0.1:
            failed = random.choice(rows.members)
            failed.is_gone = True
            rows.remove([failed])
        for each, (found,) in rows.ended():
            ended.append(each)
            np.testing.assert_allclose(found, each.expected)
    assert len(ended) == len(set(ended))
    assert {each for each in asked if not each.is_gone} <= set(ended)


def test_slabs_are_as_large_as_what_is_there() -> None:
    """However many runs have come and gone."""
    rows: VertexRows[Member] = VertexRows([FLOAT])
    largest = 0
    for number in range(300):
        each = member(number, 2)
        largest = max(largest, each.sets.size + 1)
        rows.waiting.append(each)
        rows.admit()
        while not rows.is_empty and not rows.ended():
            step(rows, rows.members, arity=2)
    assert rows._room <= 2 * largest
