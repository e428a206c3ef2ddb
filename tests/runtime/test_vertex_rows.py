"""`VertexRows`: runs join and leave between sets, and each has the rows of its own vertices."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.errors import ShapeError
from asyncflow.graph.values.spec import Spec
from asyncflow.runtime.shared.rows.vertex_rows import RunOfSets, VertexGroup, VertexRows, joined
from asyncflow.vertex.shared import InputCounts
from tests.vertex.evaluation import forest, in_order
from tests.vertex.graphs import children_of, ordered

FLOAT = Spec(np.dtype("float64"), (None, 2))


@dataclass(eq=False)
class Member:
    sets: RunOfSets
    roots: Any
    states: Any
    is_gone: bool = False


def member(number: int, arity: int | None) -> Member:
    """Return a member whose states are its own rows plus its children's, with a value for a missing child."""
    random = np.random.default_rng(number)
    graph = forest(random, random.integers(1, 8, int(random.integers(0, 3))).tolist())
    own, initial = random.normal(size=(graph.n_vertices, 2)), np.full(2, float(number % 2))
    states: dict[int, Any] = {}
    for vertex in in_order(graph):
        below = [states[child] for child in children_of(graph)[vertex]]
        missing = 0 if arity is None else arity - len(below)
        states[vertex] = sum(below, own[vertex] + missing * initial)
    every = np.array([states[v] for v in range(graph.n_vertices)]).reshape(-1, 2)
    return Member(sets_of(graph, initial, own), every[graph.roots], every)


def sets_of(graph: Any, initial: Any, own: Any) -> RunOfSets:
    inputs = (graph.offsets, graph.children, graph.samples, initial, own)
    return RunOfSets.of(inputs, InputCounts(3, 1, 1, 0), ["x"])


def in_groups(rows: VertexRows[Member], arity: int | None, waiting: list[Member]) -> list[tuple[Member, list[Any]]]:
    """Let waiting members join; return the ones without vertices."""
    together, empty = rows.sorted_out(waiting)
    for members in together:
        graph = af.InputGraph(*joined([each.sets for each in members]))
        plan = ordered(graph, arity=arity)
        starts = () if plan.child_starts is None else (plan.child_starts,)
        schedule = (plan.order, plan.positions, plan.set_starts, plan.root_ranks, plan.child_ranks, *starts)
        rows.groups.append(VertexGroup.of(members, schedule, rows.specs))
    return empty


def step(rows: VertexRows[Member], groups: list[VertexGroup[Member]], *, arity: int | None) -> None:
    own, children, *edges = rows.inputs(groups)
    if arity is not None:
        below = children.sum(axis=1)
    else:
        owners, starts = edges
        assert np.array_equal(np.diff(starts), np.bincount(owners, minlength=len(own)))
        below = np.zeros_like(own)
        np.add.at(below, owners, children)
    rows.advance(groups, [own + below])


def check(found: tuple[Member, list[Any]]) -> Member:
    each, (roots, states) = found
    np.testing.assert_allclose(roots, each.roots)
    np.testing.assert_allclose(states, each.states)
    return each


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("arity", [2, None])
def test_each_run_has_its_own_rows(seed: int, arity: int | None) -> None:
    """Runs come together and go at any set, some unfinished; steps are for all groups, or for each run by itself."""
    random = Random(seed)
    rows: VertexRows[Member] = VertexRows([FLOAT], n_states=1, gives_rows=True)
    ended: list[Member] = []
    asked: list[Member] = []
    waiting: list[Member] = []
    largest = 0
    while len(asked) < 60 or rows.groups or waiting:
        for _ in range(random.randrange(4) if len(asked) < 60 else 0):
            asked.append(member(len(asked), arity))
            waiting.append(asked[-1])
        if asked and random.random() < 0.1:
            random.choice(asked).is_gone = True
        rows.drop()
        ended += map(check, in_groups(rows, arity, waiting))
        waiting.clear()
        assert not any(each.is_gone for each in rows.members)
        largest = max([largest, *(len(group.places) for group in rows.groups)])
        groups = list(rows.groups)
        if random.random() < 0.1:
            groups = rows.part(groups)
            assert all(len(group.places) == 1 for group in groups)
        middle = random.randrange(len(groups) + 1)
        for part in (groups[:middle], groups[middle:]):
            if part:
                step(rows, part, arity=arity)
        if rows.groups and random.random() < 0.1:
            failed = random.choice(rows.groups)
            for each in failed.members:
                each.is_gone = True
            rows.remove([failed])
        ended += map(check, rows.ended())
    assert largest > 1
    assert len(ended) == len(set(ended))
    assert {each for each in asked if not each.is_gone} <= set(ended)


def test_a_run_with_few_sets_waits_for_no_other() -> None:
    """The run leaves with its own last set, whatever the sets of runs that joined with it."""
    rows: VertexRows[Member] = VertexRows([FLOAT], n_states=1, gives_rows=False)
    structures = [(length, af.InputGraph.chain([length])) for length in (2, 5, 3)]
    sets = [sets_of(chain, np.zeros(2), np.ones((length, 2))) for length, chain in structures]
    in_groups(rows, 1, [Member(each, None, None) for each in sets])
    (group,) = rows.groups
    left = []
    while rows.groups:
        step(rows, rows.groups, arity=1)
        left += [(group.done, found) for _, (found,) in rows.ended()]
    assert [done for done, _ in left] == [2, 3, 5]
    assert [found.tolist() for _, found in left] == [[[2.0, 2.0]], [[3.0, 3.0]], [[5.0, 5.0]]]


@pytest.mark.parametrize("arity", [2, None])
def test_an_order_of_several_graphs(arity: int | None) -> None:
    """Each as a group of its own has the order of its graph alone."""
    members = [each for each in (member(number, arity) for number in range(0, 40, 2)) if each.sets.size]
    rows: VertexRows[Member] = VertexRows([FLOAT], n_states=1, gives_rows=False)
    in_groups(rows, arity, members)
    (group,) = rows.groups
    for each, found in zip(members, rows.part([group]), strict=True):
        plan = ordered(af.InputGraph(*each.sets.graph), arity=arity)
        assert found.members == [each]
        assert found.set_starts == plan.set_starts.tolist()
        assert np.array_equal(found.positions, plan.positions)
        assert np.array_equal(found.ranks, plan.child_ranks)
        assert np.array_equal(found.places[0].roots, plan.root_ranks)
        if plan.child_starts is not None:
            assert found.child_starts is not None
            assert np.array_equal(found.child_starts, plan.child_starts)


@pytest.mark.parametrize(
    ("offsets", "children", "samples"),
    [
        ([1, 1, 2], [0, 0], [0, 2]),
        ([0, 1, 1], [0, 0], [0, 2]),
        ([0, 0, 1], [0], [0, 1]),
        ([0, 0, 1], [0], [1, 2]),
        ([0, 0, 1], [0], []),
        ([], [], [0]),
    ],
)
def test_what_would_shift_others_is_put_in_order_apart(
    offsets: list[int], children: list[int], samples: list[int]
) -> None:
    """Behaviour 88: arrays that do not fit one another share no group."""
    graph = [np.array(x, np.int64) for x in (offsets, children, samples)]
    inputs = (*graph, np.zeros(2), np.ones((max(len(offsets) - 1, 0), 2)))
    wrong = Member(RunOfSets.of(inputs, InputCounts(3, 1, 1, 0), ["x"]), None, None)
    right = [member(2, 2), member(4, 2)]
    rows: VertexRows[Member] = VertexRows([FLOAT], n_states=1, gives_rows=False)
    assert rows.sorted_out([right[0], wrong, right[1]]) == ([[wrong], right], [])


def test_runs_with_other_states_of_missing_children_are_other_groups() -> None:
    rows: VertexRows[Member] = VertexRows([FLOAT], n_states=1, gives_rows=False)
    waiting = [each for each in (member(number, 2) for number in range(9)) if each.sets.size]
    expected = [[each for each in waiting if each.sets.initial[0][0] == value] for value in (0.0, 1.0)]
    together, _ = rows.sorted_out(waiting)
    assert sorted(together, key=lambda members: float(members[0].sets.initial[0][0])) == expected


def test_a_row_for_each_vertex() -> None:
    with pytest.raises(ShapeError, match=r"pulls\['x'\] has a row for each vertex: .* 3 vertices, .* \[4,2\]"):
        sets_of(af.InputGraph.chain([3]), np.zeros(2), np.ones((4, 2)))


def test_the_example_of_two_runs_in_one_group() -> None:
    """A root with two leaves, and a lone leaf: the example of the module."""
    tree, leaf = af.InputGraph.from_edges(3, [(0, 1), (0, 2)]), af.InputGraph.from_edges(1, [])
    members = [
        Member(sets_of(graph, np.zeros(2), np.ones((graph.n_vertices, 2))), None, None) for graph in (tree, leaf)
    ]
    rows: VertexRows[Member] = VertexRows([FLOAT], n_states=1, gives_rows=True)
    in_groups(rows, 2, members)
    (group,) = rows.groups
    assert group.set_starts == [0, 3, 4]
    assert group.ranks[3].tolist() == [1, 2]
    step(rows, rows.groups, arity=2)
    assert [each for each, _ in rows.ended()] == members[1:]
