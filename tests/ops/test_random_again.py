from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from asyncflow.graph.building.build import constant
from asyncflow.graph.graph import Graph
from asyncflow.graph.op import KernelContext, find_op
from asyncflow.ops.draws import RowContexts
from asyncflow.ops.random import random
from asyncflow.ops.random.random_again import RANDOM_AGAIN, RANDOM_KEY, draw_by_key, draws_numbers, random_key
from asyncflow.ops.reductions import utility
from asyncflow.ops.rows.by_row import BY_ROW_DRAWN


@pytest.mark.parametrize("seed", [0, -1, 2**63, 2**64 - 1])
@pytest.mark.parametrize("inside", [0, 1])
def test_a_key_draws_what_its_firing_draws(seed: int, inside: int) -> None:
    """In another run and loop, the key stands for the firing, and inner loops count from its loops on."""
    with Graph():
        key = random_key()
        node = random.normal((3,), seed=5).node
        draw = node.op.kernel(np, **node.attrs)  # type: ignore[misc]
        draw_by_key(node, key, inside)
    assert node.op is RANDOM_AGAIN
    assert node.inputs == [key]
    make, again = RANDOM_KEY.kernel, RANDOM_AGAIN.kernel
    assert make is not None
    assert again is not None
    value = make(np, **key.node.attrs)(KernelContext(seed, 8, (4,)))
    loops = (6,) * inside
    expected = draw(KernelContext(seed, 8, (4, *loops)))
    by_key: Any = again(np, **node.attrs)
    assert np.array_equal(by_key(KernelContext(1, 1, (9, 9, *loops)), value), expected)
    rows = by_key.of_rows(
        lambda: RowContexts(1, 1, np.array([[9, *loops]] * 2)), [np.stack([value, value + 1])], [True]
    )
    assert np.array_equal(rows[0], expected)
    assert not np.array_equal(rows[1], expected)


@pytest.mark.parametrize("draws_by_key", [False, True])
def test_a_number_draws_what_that_iteration_draws(draws_by_key: bool) -> None:
    """The iteration number replaces a key: two loops stand for the iteration's loop, and inner ones are as they
    were.
    """
    with Graph():
        key, number = random_key(), constant(7)
        node = random.normal((3,), seed=5).node
        if draws_by_key:
            draw_by_key(node, key, 2)
        draw = node.op.kernel(np, **node.attrs)  # type: ignore[misc]
        draw_by_key(node, number, 1)
    again: Any = RANDOM_AGAIN.kernel
    told = [np.array([3, 8, 5])] if draws_by_key else []
    expected = draw(KernelContext(3, 8, (4, 7, 6)), *told)
    assert np.array_equal(again(np, **node.attrs)(KernelContext(3, 8, (4, 1, 2, 6)), np.int64(7), *told), expected)
    assert not np.array_equal(again(np, **node.attrs)(KernelContext(3, 8, (4, 1, 2, 6)), np.int64(8), *told), expected)


def test_a_key_that_is_the_same_for_all_rows_draws_the_same_for_all() -> None:
    """The key is known to be the same for each row."""
    attrs = {"draws": "random_uniform", "arguments": {"seed": 1, "shape": (), "dtype": np.dtype("f8")}}
    make: Any = RANDOM_AGAIN.kernel
    draw = make(np, **attrs, axes=0, inside=0, specs=())
    assert draw.of_rows(lambda: RowContexts(1, 1, np.zeros((2, 0))), [np.arange(3)], [False]) is None


def test_what_draws_is_known() -> None:
    drawn = [random.NORMAL, random.SEEDED, RANDOM_KEY, BY_ROW_DRAWN]
    assert all(map(draws_numbers, drawn))
    others = [RANDOM_AGAIN, find_op("table_sample"), find_op("saved_values"), find_op("tensor_array"), utility.ALL]
    assert not any(map(draws_numbers, others))


def test_the_width_of_a_key_is_known_where_loops_are() -> None:
    with Graph():
        assert random_key().shape == (None,)
        assert random_key(1).shape == (3,)
