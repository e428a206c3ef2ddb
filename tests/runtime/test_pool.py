"""The rows of a pool as a pure machine: whoever joins or leaves, every row has its owner's values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pytest

from asyncflow.errors import InternalError
from asyncflow.runtime.shared.rows.pool import PoolRows, RowGroup

Array = np.ndarray[Any, Any]


class Counting:
    """Goes on while its variable is below its limit; its own number stands beside it, so that a mix-up shows."""

    def __init__(self, name: int, start: int, limit: int, by: Array, rank: tuple[int, float] = (0, 0)) -> None:
        self.inputs: Sequence[Array] = [np.array(start), np.array([name, start]), np.array(limit), by]
        self.name, self.start, self.limit = name, start, limit
        self.priority, self.due_s = rank
        self.is_gone = self.is_checked = False
        self.number = self.since = 0

    def expected(self, by: int) -> tuple[int, list[int]]:
        value = self.start
        while value < self.limit:
            value += by
        return value, [self.name, value]


HAS_ROWS = (True, True, True, False)
Ended = list[tuple[Counting, list[Array]]]


def rows_of(pool: PoolRows[Counting]) -> list[Counting]:
    return [each for group in pool.groups.values() for each in group.rows]


def check(pool: PoolRows[Counting]) -> Ended:
    """End the activations that have joined and do not go on at all."""
    ended: Ended = []
    for group, first in pool.admit():
        value, _, limit, _ = group.inputs(first, len(group.rows))
        ended += pool.settle(group, first, value < limit)
    return ended


def step_alone(pool: PoolRows[Counting], steps: int) -> Ended:
    """The only one there is makes a few steps, as long as it goes on; nothing if there are several."""
    alone = pool.single_out()
    if alone is None:
        return []
    value, (name, _), limit, by = alone.inputs
    assert name == alone.name
    made = 0
    while value < limit and made < steps:
        value, made = value + by, made + 1
    following = [np.asarray(value), np.array([name, value])]
    pool.advance_alone(following, goes_on=bool(value < limit), steps=made)
    return [] if value < limit else [(alone, following)]


def step_of(group: RowGroup[Counting]) -> tuple[list[Array], Array]:
    """Compute a step, from copies: rows may change while it is under way."""
    value, pair, limit, by = (np.array(x) for x in group.inputs(0, len(group.rows)))
    assert [owner.name for owner in group.rows] == pair[:, 0].tolist()
    following = value + by
    return [following, np.stack([pair[:, 0], following], axis=1)], following < limit


@pytest.mark.parametrize("seed", range(30))
def test_every_activation_gets_its_own(seed: int) -> None:
    random = Random(seed)
    by = np.array(random.randint(1, 3))
    pool: PoolRows[Counting] = PoolRows(random.randint(1, 6), 2, HAS_ROWS, is_watched=True)
    found: dict[int, tuple[int, list[int]]] = {}
    gone: set[int] = set()
    made: list[Counting] = []

    def take(ended: Ended) -> None:
        for each, (value, pair) in ended:
            assert each.name not in found
            found[each.name] = int(value), pair.tolist()

    while len(made) < 20 or not pool.is_empty:
        for _ in range(random.choice((0, 0, 1, 3)) if len(made) < 20 else 0):
            rank = (random.randint(0, 2), random.random())
            made.append(Counting(len(made), random.randint(0, 5), random.randint(0, 9), by, rank))
            pool.join(made[-1])
        if random.random() < 0.2 and not pool.is_empty:
            left = random.choice(list(pool.everybody()))
            pool.give_up(left)
            gone.add(left.name)
        pool.drop()
        if random.random() < 0.7:
            take(step_alone(pool, random.randint(1, 3)))
        if pool.alone is None or random.random() < 0.2:
            take(check(pool))
        for group in list(pool.groups.values()):
            if random.random() < 0.1:
                pool.join(pool.park(group, random.randrange(len(group.rows))))
            if group.rows:
                take(pool.advance(group, *step_of(group)))
    assert {each.name: each.expected(int(by)) for each in made if each.name not in gone} == found
    assert not pool.groups


class _State(NamedTuple):
    """A pool of two rows on the way of four activations, and the step that is under way."""

    pool: PoolRows[Counting]
    members: list[Counting]
    outcome: dict[int, str]
    step: tuple[list[Array], Array] | None

    def key(self) -> object:
        rows = [
            (each.name, int(x))
            for g in self.pool.groups.values()
            for each, x in zip(g.rows, g.inputs(0, len(g.rows))[0], strict=True)
        ]
        waiting = [each.name for each in self.pool.line]
        gone = [each.name for each in self.members if each.is_gone]
        alone = [(each.name, int(each.inputs[0])) for each in (self.pool.alone,) if each is not None]
        return str((rows, waiting, gone, alone, sorted(self.outcome.items()), self.step is None))


def _end(state: _State, ended: Ended) -> None:
    for each, (value, pair) in ended:
        assert each.name not in state.outcome or each.is_gone
        if not each.is_gone:
            assert (int(value), pair.tolist()) == each.expected(1)
            state.outcome[each.name] = "ended"


def _events(state: _State) -> Iterator[tuple[str, int]]:
    joined = len(state.members)
    if joined < 4:
        yield "offer", joined
    yield from (("cancel", each.name) for each in state.members if each.name not in state.outcome)
    if state.step is not None:
        yield "ends", 0
        yield from (("fails", each.name) for each in rows_of(state.pool))
    elif not state.pool.is_empty:
        yield "pass", 0
        yield "pass, or alone", 0


def _after(state: _State, event: str, name: int) -> _State:
    pool, members, outcome, step = deepcopy(state)
    state = _State(pool, members, outcome, None)
    if event == "offer":  # of 0 to 2 steps, the last one of the highest rank
        members.append(Counting(name, 0, (2, 0, 1, 2)[name], np.array(1), (-(name == 3), 0)))
        pool.join(members[-1])
    elif event == "cancel":  # by whoever waits, or by a deadline
        pool.give_up(members[name])
        outcome[name] = "gone"
    elif event in ("pass", "pass, or alone"):
        pool.drop()
        if event != "pass":
            _end(state, step_alone(pool, 1))
            if pool.alone is not None or pool.is_empty:
                return state
        _end(state, check(pool))
        for group in pool.groups.values():
            return state._replace(step=step_of(group))
        return state
    elif event == "ends":
        assert step is not None
        (group,) = pool.groups.values()
        _end(state, pool.advance(group, *step))
        return state
    else:  # for one, which leaves; the others have been computed by themselves
        assert step is not None
        (group,) = pool.groups.values()
        failed = next(each for each in group.rows if each.name == name)
        if not failed.is_gone:
            outcome[name] = "failed"
        pool.give_up(failed)
        _end(state, pool.advance(group, *step))
        return state
    return state._replace(step=step)


def test_every_order_of_what_may_happen_to_four() -> None:
    """Offers, cancels, steps that end and that fail for one, in every order: no activation is lost, or served twice."""
    start = _State(PoolRows(2, 2, HAS_ROWS, is_watched=True), [], {}, None)
    seen, pending, ends = {start.key()}, [start], 0
    while pending:
        state = pending.pop()
        assert state.pool.live == len(rows_of(state.pool)) <= 2
        assert state.pool.alone is None or not state.pool.live
        followers = [_after(state, *event) for event in _events(state)]
        if not followers:
            ends += 1
            assert len(state.outcome) == 4
            assert state.pool.is_empty
            assert not state.pool.groups
        for each in followers:
            if each.key() not in seen:
                seen.add(each.key())
                pending.append(each)
    assert ends > 10
    assert len(seen) > 1_000


def test_the_only_one_is_no_row() -> None:
    """The steps of the only activation count, and it is a row again, with its values, as soon as another activation is
    there.
    """
    pool: PoolRows[Counting] = PoolRows(2, 2, HAS_ROWS, is_watched=True)
    first, second = (Counting(name, 0, 9, np.array(1)) for name in range(2))
    pool.join(first)
    assert pool.single_out() is pool.single_out() is first
    assert pool.live == 0
    pool.advance_alone([np.array(4), np.array([0, 4])], goes_on=True, steps=4)
    pool.join(second)
    assert pool.single_out() is None
    assert list(pool.everybody()) == [first, second]
    assert check(pool) == []
    assert pool.alone is None
    (group,) = pool.groups.values()
    values = {each.name: int(value) for each, value in zip(group.rows, group.inputs(0, 2)[0], strict=True)}
    assert values == {0: 4, 1: 0}
    assert [pool.steps - each.since for each in (first, second)] == [4, 0]
    pool.give_up(second)
    pool.drop()
    assert pool.single_out() is first
    assert first.inputs[0] == 4
    assert pool.steps - first.since == 4
    pool.give_up(first)
    pool.drop()
    assert pool.is_empty


def test_the_order_in_which_waiting_activations_become_rows() -> None:
    """Activations go by rank, and within one rank by arrival."""
    pool: PoolRows[Counting] = PoolRows(2, 2, HAS_ROWS)
    ranks = ((0, 5.0), (0, 4.0), (-1, 9.0), (0, 4.0))
    for name, rank in enumerate(ranks):
        pool.join(Counting(name, 0, 1, np.array(1), rank))
    order: list[int] = []
    while not pool.is_empty:
        check(pool)
        order += [each.name for each in rows_of(pool)]
        for group in list(pool.groups.values()):
            pool.advance(group, *step_of(group))
    assert order == [2, 1, 3, 0]


def test_no_activation_waits_for_ever() -> None:
    """Of the rows given away while higher ranks keep coming, one in eight goes to the others."""
    pool: PoolRows[Counting] = PoolRows(1, 2, HAS_ROWS)
    for name in range(4):
        pool.join(Counting(name, 0, 1, np.array(1), (1, 0)))
    order: list[int] = []
    for turn in range(40):
        for name in (100 + turn, 200 + turn):
            pool.join(Counting(name, 0, 1, np.array(1), (0, 0)))
        check(pool)
        order += [each.name for each in rows_of(pool)]
        for group in list(pool.groups.values()):
            pool.advance(group, *step_of(group))
    assert [turn for turn, name in enumerate(order) if name < 100] == [7, 15, 23, 31]


def test_rows_of_other_shapes_are_groups() -> None:
    """A row whose values have become as large as another group's joins that group."""
    pool: PoolRows[Counting] = PoolRows(8, 1, (True,), is_watched=True)
    for name, length in enumerate((1, 1, 2)):
        each = Counting(name, 0, 0, np.array(0))
        each.inputs, each.is_checked = [np.full(length, name)], True
        pool.join(each)
    assert pool.admit() == []
    short, long = pool.groups.values()
    assert [len(short.rows), len(long.rows)] == [2, 1]
    grown = np.concatenate([short.inputs(0, 2)[0], [[0], [1]]], axis=1)
    assert pool.advance(short, [grown], np.array([True, True])) == []
    assert list(pool.groups.values()) == [long]
    assert long.inputs(0, 3)[0].tolist() == [[2, 2], [0, 0], [1, 1]]
    ended = pool.advance(long, [long.inputs(0, 3)[0].copy()], np.array([False, True, False]))
    assert {each.name: values[0].tolist() for each, values in ended} == {2: [2, 2], 1: [1, 1]}


def test_rows_that_grow_begin_together() -> None:
    """Rows wait for others only while values grow, and unless one of them was a row before."""
    pool: PoolRows[Counting] = PoolRows(64, 1, (True,))

    def join(count: int, *, is_checked: bool = False) -> list[int]:
        for _ in range(count):
            each = Counting(0, 0, 0, np.array(0))
            each.inputs, each.is_checked = [np.zeros(1)], is_checked
            pool.join(each)
        if pool.has_returned() or not pool.is_growing or len(pool.line) >= pool.live:
            pool.admit()
        return [len(group.rows) for group in pool.groups.values()]

    def step() -> None:
        for group in list(pool.groups.values()):
            rows = len(group.rows)
            pool.advance(group, [np.zeros((rows, 1 + group.inputs(0, rows)[0].shape[1]))], np.ones(rows, bool))

    assert [join(1), join(3)] == [[1], [4]]  # nothing has grown yet
    step()
    assert [join(3), join(1)] == [[4], [4, 4]]
    step()
    assert [join(7), join(1)] == [[4, 4], [4, 4, 8]]
    step()
    pool.settle(next(iter(pool.groups.values())), 0, np.zeros(4, bool))
    assert join(2) == [4, 8]
    pool.admit()
    step()
    assert join(1, is_checked=True)[-1] == 1
    step()
    pool.remove_where(lambda _: True)
    assert [join(1), join(3)] == [[1], [4]]
    (group,) = pool.groups.values()
    pool.advance(group, [np.zeros((4, 1))], np.ones(4, bool))
    assert join(1) == [5]  # they grow no more


def test_cancelled_activations_leave_the_line() -> None:
    """A policy is told of the others alone, and the line forgets their values."""
    pool: PoolRows[Counting] = PoolRows(2, 2, HAS_ROWS)
    waiting = [Counting(name, 0, 9, np.array(1), (name % 2, name)) for name in range(6)]
    for each in waiting:
        pool.join(each)
    for each in waiting[::3]:
        pool.give_up(each)
    pool.drop()
    assert [each.name for each in pool.line] == [2, 4, 1, 5]


def test_rows_that_have_grown_count_with_all_their_elements() -> None:
    pool: PoolRows[Counting] = PoolRows(4, 2, HAS_ROWS)
    for name in range(2):
        pool.join(Counting(name, 0, 9, np.array(1)))
    ((group, _),) = pool.admit()
    assert group.size() == 2 * (1 + 2 + 1)
    pool.advance(group, [np.ones(2, int), np.ones((2, 300), int)], np.array([True, True]))
    (group,) = pool.groups.values()
    assert group.size() == 2 * (1 + 300 + 1)


def test_a_result_that_looks_into_another_slab() -> None:
    """Two variables change places: the first write does not change the source of the second."""
    pool: PoolRows[Counting] = PoolRows(2, 2, (True, True))
    each = Counting(0, 0, 0, np.array(0))
    each.inputs, each.is_checked = [np.array(1), np.array(2)], True
    pool.join(each)
    pool.admit()
    (group,) = pool.groups.values()
    one, other = group.inputs(0, 1)
    ((_, values),) = pool.advance(group, [other, one], np.array([False]))
    assert values == [2, 1]


def test_a_row_with_the_values_of_another_is_found_out() -> None:
    pool: PoolRows[Counting] = PoolRows(2, 2, HAS_ROWS, is_watched=True)
    for name in range(2):
        pool.join(Counting(name, 0, 9, np.array(1)))
    check(pool)
    (group,) = pool.groups.values()
    group.rows.reverse()
    with pytest.raises(InternalError, match="another activation"):
        pool.remove(group, 0)


def test_a_row_is_an_array_or_a_number_like_its_variable() -> None:
    pool: PoolRows[Counting] = PoolRows(2, 1, (True,))
    each = Counting(0, 0, 0, np.array(0))
    each.inputs = [np.array(2, np.float32)]
    pool.join(each)
    ((group, first),) = pool.admit()
    ((_, (value,)),) = pool.settle(group, first, np.array([False]))
    assert value == 2
    assert value.dtype == np.float32
    assert value.shape == ()
    assert pool.is_empty


def test_the_example_of_rows_that_end_and_join() -> None:
    """The example of the module: the last row takes the place of a row that ends, and the next one joins behind."""
    pool: PoolRows[Counting] = PoolRows(4, 2, HAS_ROWS)
    a, b, c, d = [Counting(name, 0, limit, np.array(1)) for name, limit in enumerate([9, 1, 9, 9])]
    for each in (a, b, c):
        pool.join(each)
    check(pool)
    (group,) = pool.groups.values()
    assert rows_of(pool) == [a, b, c]
    assert [ended for ended, _ in pool.advance(group, *step_of(group))] == [b]
    assert rows_of(pool) == [a, c]
    pool.join(d)
    check(pool)
    assert rows_of(pool) == [a, c, d]
