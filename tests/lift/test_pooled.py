"""The programs of a pooled loop, each by itself: their results for rows equal the loop's for each activation."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import asyncflow as af
from asyncflow.lift.calls.batched import BodyProgram, identity_of
from asyncflow.lift.calls.pooled import SharedLoop

Array = np.ndarray[Any, Any]


def shared_of(y: af.Tensor) -> SharedLoop:
    shared = y.node.attrs["shared"]
    assert isinstance(shared, SharedLoop)
    return shared


def collatz(x: af.Tensor, most: af.Tensor) -> af.Tensor:
    """Steps to 1, or as many as there may be; the two variables are how many, and where it is."""

    def body(made: af.Tensor, at: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
        return made + 1, af.cond(at % 2 == 0, lambda: at // 2, lambda: 3 * at + 1)

    made: af.Tensor = af.while_loop(
        lambda made, at: af.logical_and(at > 1, made < most), body, (0, x), pool=af.Pool(), name="collatz"
    )[0]
    return made


def after(at: int, steps: int, most: int, made: int = 0) -> tuple[int, int, bool]:
    """Return the number of steps made, the value after them, and True if the loop goes on."""
    while steps and at > 1 and made < most:
        at, made, steps = at // 2 if at % 2 == 0 else 3 * at + 1, made + 1, steps - 1
    return made, at, at > 1 and made < most


async def found(program: BodyProgram, *values: object) -> list[Any]:
    async with af.Session(program.graph) as session:
        results: list[Any] = await session.run(list(program.fetches), dict(zip(program.feeds, values, strict=True)))
        return results


@pytest.fixture(scope="module")
def shared() -> SharedLoop:
    with af.Graph():
        return shared_of(collatz(af.placeholder("int64", ()), af.placeholder("int64", ())))


ROWS = st.lists(st.tuples(st.integers(-1, 30), st.integers(0, 9)), min_size=1, max_size=6)


@settings(max_examples=15)
@given(rows=ROWS)
async def test_check_tells_the_activations_that_go_on(shared: SharedLoop, rows: list[tuple[int, int]]) -> None:
    at, most = (np.array(column) for column in zip(*rows, strict=True))
    (goes_on,) = await found(shared.check, np.zeros(len(rows), int), at, most)
    assert goes_on.tolist() == [after(*row[:1], 0, row[1])[2] for row in rows]


@settings(max_examples=15)
@given(rows=ROWS, asked=st.integers(1, 12))
async def test_steps_end_with_the_first_row_that_does(
    shared: SharedLoop, rows: list[tuple[int, int]], asked: int
) -> None:
    """Of rows that all go on: as many steps as were asked for, or as come before one of them has made its last."""
    rows = [row for row in rows if after(row[0], 0, row[1])[2]] or [(27, 9)]
    at, most = (np.array(column) for column in zip(*rows, strict=True))
    n_rows = len(rows)
    *following, goes_on, made = await found(shared.steps, asked, np.ones(n_rows, bool), np.zeros(n_rows, int), at, most)
    expected = min(asked, *(after(start, asked, limit)[0] for start, limit in rows))
    assert made == expected
    assert list(zip(*(x.tolist() for x in (*following, goes_on)), strict=True)) == [
        after(start, expected, limit) for start, limit in rows
    ]


@settings(max_examples=15)
@given(row=st.tuples(st.integers(-1, 30), st.integers(0, 9)), asked=st.integers(1, 12))
async def test_alone_is_the_loop_itself(shared: SharedLoop, row: tuple[int, int], asked: int) -> None:
    """The loop runs in parts of `asked` steps: also a loop that does not go on at all, or no more."""
    made, at = np.int64(0), np.int64(row[0])
    for _ in range(3):
        before = int(made)
        made, at, goes_on, steps = await found(shared.alone, asked, made, at, row[1])
        assert (made, at, goes_on) == after(*row[:1], before + asked, row[1])
        assert steps == made - before


async def test_rows_are_taken_and_put_together() -> None:
    """On a device, where slabs are not written to: `taking` gives rows of some, `exchange` has others behind them."""
    with af.Graph():
        x = af.placeholder("float32", (2,))
        weights = af.placeholder("float32", ())
        loop = af.while_loop(lambda i, _: i < 3, lambda i, s: (i + 1, s * weights), (0, x), pool=af.Pool())
        shared = shared_of(loop[1])
    assert shared.has_rows == (True, True, True)
    assert shared.is_static
    slabs = [np.arange(4), np.arange(8, dtype=np.float32).reshape(4, 2), np.arange(4, dtype=np.float32)]
    places = np.array([3, 1])
    taken = await found(shared.taking(2), places, *slabs[:2])
    assert [x.tolist() for x in taken] == [[3, 1], [[6, 7], [2, 3]]]
    fresh = [np.array([9]), np.full((1, 2), 9, np.float32), np.array([9], np.float32)]
    together = await found(shared.exchange, places, *slabs, *fresh)
    assert [x.tolist() for x in together] == [[3, 1, 9], [[6, 7], [2, 3], [9, 9]], [3, 1, 9]]


async def test_a_step_hands_out_values_of_the_body() -> None:
    with af.Graph():
        squares = []

        def body(i: af.Tensor) -> af.Tensor:
            squares.append(i * i)
            return i + 1

        n = af.placeholder("int64", ())
        shared = shared_of(af.while_loop(lambda i: i < n, body, 0, pool=af.Pool()))
    rows = np.ones(2, bool), np.array([2, 5]), np.array([9, 6])
    following, emitted, goes_on, made = await found(shared.emitting((squares[0],)), 1, *rows)
    assert [x.tolist() for x in (following, emitted, goes_on)] == [[3, 6], [4, 25], [True, False]]
    assert made == 1


def test_weights_of_layer_norm_are_not_spread_over_rows() -> None:
    ones = np.ones(3, np.float32)

    def body(i: af.Tensor, x: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
        return i + 1, af.layer_norm(x, ones, ones)

    with af.Graph():
        x = af.placeholder("float32", (3,))
        shared = shared_of(af.while_loop(lambda i, _: i < 3, body, (0, x), pool=af.Pool())[1])
    names = [node.op.name for node in shared.steps.graph.walk()]
    assert "layer_norm" in names
    assert "spread_rows" not in names


def test_common_values_have_no_rows() -> None:
    """Constants and variables; and what an element of a TensorArray goes into is not computed again."""
    with af.Graph():
        x, n = af.placeholder("float32", (3,)), af.placeholder("int64", ())
        weights = af.Variable(np.eye(3, dtype=np.float32), name="weights")
        shared = shared_of(
            af.while_loop(lambda i, _: i < n, lambda i, s: (i + 1, s @ weights.read() + 1), (0, x), pool=af.Pool())[1]
        )
        assert shared.has_rows[: shared.n_vars] == (True, True)
        assert sum(shared.has_rows) == 3
        assert shared.is_repeatable
        assert shared.programs() == (shared.check, shared.steps, shared.alone)
        store = af.TensorArray("float32", 3, element_shape=()).unstack(x)
        reading = shared_of(
            af.while_loop(
                lambda i, *_: i < 3, lambda i, s, kept: (i + 1, s + kept.read(i), kept), (0, 0.0, store), pool=af.Pool()
            )[1]
        )
    assert not reading.is_repeatable
    assert reading.programs() == (reading.check, reading.steps)


def test_what_activations_share_is_told_apart_by_its_value() -> None:
    """Shapes count, and strings as they read; a large array is only ever itself."""
    long = "a text that is too long to stand in the array itself"
    assert identity_of(np.zeros((2, 2))) == identity_of(np.zeros((2, 2)))
    assert identity_of(np.zeros((2, 2))) != identity_of(np.zeros((4, 1)))
    assert identity_of(np.array([long], "T")) == identity_of(np.array([long], "T"))
    assert identity_of(np.array([long], "T")) != identity_of(np.array([long.upper()], "T"))
    large = np.zeros(1000)
    assert identity_of(large) != identity_of(large.copy())


def test_a_loop_that_is_not_pooled_is_told_of_once() -> None:
    """Behaviour 111: a function that is traced again and again builds the loop as often."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        for _ in range(3):
            with af.Graph():
                x, total = af.placeholder("float64", ()), af.Variable(0.0, name="total")
                af.while_loop(lambda y: y < 3, total.assign_add, x, pool=af.Pool(), name="adding")
    assert len(told) == 1
    assert "adding is not pooled, so each run computes it by itself" in str(told[0].message)
    assert "has an effect" in str(told[0].message)
