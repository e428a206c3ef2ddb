"""The rows of a pool as a pure machine: whoever joins or leaves, every row has its owner's values."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest

from asyncflow.runtime.pool import Activation, PoolRows


class Counting(Activation):
    """Goes on while its variable is below its limit; its own number stands beside it, so that a mix-up shows."""

    def __init__(self, name: int, start: int, limit: int, by: np.ndarray[Any, Any]) -> None:
        super().__init__((np.array(start), np.array([name, start]), np.array(limit), by))
        self.name, self.start, self.limit = name, start, limit


def expected(each: Counting, by: int) -> tuple[int, list[int]]:
    value = each.start
    while value < each.limit:
        value += by
    return value, [each.name, value]


@pytest.mark.parametrize("seed", range(30))
def test_every_activation_gets_its_own(seed: int) -> None:
    random = Random(seed)
    by = np.array(random.randint(1, 3))
    pool: PoolRows[Counting] = PoolRows(random.randint(1, 6), 2, (True, True, True, False))
    found: dict[int, tuple[int, list[int]]] = {}
    gone: set[int] = set()
    made: list[Counting] = []

    def take(ended: list[tuple[Counting, list[np.ndarray[Any, Any]]]]) -> None:
        for each, (value, pair) in ended:
            assert each.name not in found
            found[each.name] = int(value), pair.tolist()

    while len(made) < 20 or not pool.is_empty:
        for _ in range(random.choice((0, 0, 1, 3)) if len(made) < 20 else 0):
            made.append(Counting(len(made), random.randint(0, 5), random.randint(0, 9), by))
            pool.join(made[-1])
        if pool.rows and random.random() < 0.1:
            gone.add(pool.remove(random.randrange(len(pool.rows))).name)
        if pool.waiting and random.random() < 0.1:
            pool.waiting[-1].is_gone = True
            gone.add(pool.waiting[-1].name)
        first = pool.admit()
        if len(pool.rows) > first:
            value, _, limit, _ = pool.inputs(first, len(pool.rows))
            take(pool.settle(first, value < limit))
        if pool.rows:
            value, pair, limit, step = pool.inputs(0, len(pool.rows))
            assert [owner.name for owner in pool.rows] == pair[:, 0].tolist()
            following = value + step
            take(pool.advance([following, np.stack([pair[:, 0], following], axis=1)], following < limit))
    assert {each.name: expected(each, int(by)) for each in made if each.name not in gone} == found


def test_a_row_is_an_array_or_a_number_like_its_variable() -> None:
    pool: PoolRows[Activation] = PoolRows(2, 1, (True,))
    pool.join(Activation((np.array(2, np.float32),)))
    assert pool.admit() == 0
    ((_, (value,)),) = pool.settle(0, np.array([False]))
    assert value == 2
    assert value.dtype == np.float32
    assert value.shape == ()
    assert pool.is_empty
