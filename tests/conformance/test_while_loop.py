"""Behaviour 25-32: results and refusals of `while_loop`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest

import asyncflow as af
from tests.conformance.gates import settle
from tests.patience import PATIENCE_S

Run = Callable[..., Awaitable[Any]]

pytestmark = pytest.mark.usefixtures("graph")


class Pair(NamedTuple):
    count: Any
    total: Any


@dataclass
class Counter:
    count: Any
    total: Any


def count_to(limit: Any, start: Any = 0, **options: Any) -> Any:
    return af.while_loop(lambda i: i < limit, lambda i: i + 1, (start,), **options)[0]


# -- 25: zero iterations ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bool", "int8", "int32", "uint64", "float16", "float32", "complex64"])
async def test_zero_iterations_return_the_inits(run: Run, dtype: str) -> None:
    """Behaviour 25: dtype and shape of the inits come back."""
    init = np.ones((2, 3), dtype)
    (result,) = await run(af.while_loop(lambda x: False, lambda x: x, (init,)))
    assert result.dtype == init.dtype
    np.testing.assert_array_equal(result, init)


async def test_zero_iterations_keep_the_structure(run: Run) -> None:
    """Behaviour 25: so does the nest."""
    init = {"a": (1, [2.0]), "b": Pair(3, np.zeros((0, 2)))}
    result = await run(af.while_loop(lambda x: False, lambda x: x, init))
    assert (result["a"], result["b"].count) == ((1, [2.0]), 3)
    assert type(result["b"]) is Pair and result["b"].total.shape == (0, 2)


async def test_zero_iterations_keep_strings(run: Run) -> None:
    """Behaviour 25: values that no kernel touches may be strings."""
    (result,) = await run(af.while_loop(lambda x: False, lambda x: x, (np.array(["left", "right"]),)))
    assert list(result) == ["left", "right"]


# -- 26: long and bounded loops --------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_ten_thousand_steps(run: Run) -> None:
    """Behaviour 26: a counter of 10,000 steps."""
    assert await run(count_to(10_000)) == 10_000


@pytest.mark.parametrize(("maximum", "expected"), [(0, 0), (1, 1), (3, 3), (100, 10)])
async def test_maximum_iterations(run: Run, maximum: int, expected: int) -> None:
    """Behaviour 26: whichever of predicate and maximum says stop first."""
    assert await run(count_to(10, maximum_iterations=maximum)) == expected


@pytest.mark.parametrize("dtype", ["int8", "int32", "uint32", "int64"])
async def test_maximum_iterations_as_a_run_time_tensor(run: Run, dtype: str) -> None:
    """Behaviour 26: the maximum may be fed, and computed."""
    fed = af.placeholder(dtype, ())
    result = count_to(10, maximum_iterations=fed * 2)
    assert [await run(result, {fed: n}) for n in (0, 1, 3, 50)] == [0, 2, 6, 10]


async def test_maximum_iterations_keeps_the_structure(run: Run) -> None:
    """Behaviour 26: a bounded loop gives back the nest it was given, for every kind of nest."""

    def body(*x: Any) -> Any:
        return x[0] if len(x) == 1 else x

    for init in ((0,), [0], (0, 1), {"i": 0}, Pair(0, 0), 0):
        result = await run(af.while_loop(lambda *x: True, body, init, maximum_iterations=2))
        assert result == init
        assert isinstance(result, np.int64 if init == 0 else type(init))


@pytest.mark.parametrize("maximum", [1.5, [1, 2], True])
def test_maximum_iterations_is_an_integer_scalar(maximum: Any) -> None:
    """Behaviour 26: anything else is refused when the loop is built."""
    with pytest.raises(af.GraphError, match="maximum_iterations is an integer scalar"):
        count_to(10, maximum_iterations=maximum)


# -- 27: parallel_iterations -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 2, 10, 32, 10**9])
async def test_parallel_iterations_never_change_the_values(run: Run, window: int) -> None:
    """Behaviour 27: also not where iterations overlap, nor for a long loop."""
    elements = af.constant(np.arange(10.0))

    def step(i: Any, total: Any) -> Any:
        return i + 1, total + af.sqrt(elements[i]) * 2

    _, total = af.while_loop(lambda i, t: i < 10, step, (0, 0.0), parallel_iterations=window)
    values = await run((total, count_to(1000, parallel_iterations=window)))
    assert values == (pytest.approx(2 * np.sqrt(np.arange(10.0)).sum()), 1000)


@pytest.mark.parametrize("window", [1, 2, 3])
async def test_no_more_iterations_are_under_way(run: Run, window: int) -> None:
    """Behaviour 27: as many as are allowed have begun when one node ends in none, and not one more on any device."""
    begun: list[list[int]] = [[], [], [], []]
    opened = asyncio.Event()

    def node(place: int, i: Any) -> Any:
        @af.op(outputs=lambda spec: spec)
        async def begin(i: Any) -> Any:
            begun[place].append(int(i))
            if not place:
                await opened.wait()
            return i

        return begin(i)

    def step(i: Any, *totals: Any) -> Any:
        return i + 1, *(total + node(place, i) for place, total in enumerate(totals))

    _, *totals = af.while_loop(lambda i, *_: i < 7, step, (0, *[0] * len(begun)), parallel_iterations=window)
    pending = asyncio.ensure_future(run(totals))
    async with asyncio.timeout(PATIENCE_S):
        while min(map(len, begun)) < window:
            await settle()
        await settle()
        ahead = [sorted(found) for found in begun]
        opened.set()
        assert await pending == [21] * len(begun)
    assert ahead == [list(range(window))] * len(begun)


@pytest.mark.parametrize("window", [0, -1, 1.0, True, None])
def test_parallel_iterations_below_one_are_rejected(window: Any) -> None:
    """Behaviour 27: other types than int are rejected as well."""
    with pytest.raises(af.GraphError, match="parallel_iterations is an int of at least 1"):
        count_to(3, parallel_iterations=window)


def test_swapping_is_asked_for_or_not() -> None:
    with pytest.raises(af.GraphError, match="swap_memory is True or False, got 'yes'"):
        count_to(3, swap_memory="yes")


# -- 28: what a body and a predicate must give -----------------------------------------------------------------------


REFUSED_BODIES: dict[str, tuple[Callable[..., Any], type[Exception], str]] = {
    "one value too many": (
        lambda i, x: (i, x, x),
        af.GraphError,
        "expected a tuple of 2 values, got a tuple of 3 values",
    ),
    "one value too few": (lambda i, x: (i,), af.GraphError, "expected a tuple of 2 values"),
    "another structure": (lambda i, x: (i, (x,)), af.GraphError, r"\[1\]: expected one value, got a tuple of 1 value"),
    "another dtype": (lambda i, x: (i, af.astype(x, "float64")), af.DTypeError, r"loop_vars\[1\].*float32.*float64"),
    "nothing": (lambda i, x: None, af.GraphError, "must return a nest like its arguments"),
}


@pytest.mark.parametrize("case", REFUSED_BODIES)
def test_bodies_that_do_not_fit(case: str) -> None:
    """Behaviour 28: the error names the variable, and the expected spec."""
    body, error, message = REFUSED_BODIES[case]
    with pytest.raises(error, match=message):
        af.while_loop(lambda i, x: i < 3, body, (0, np.float32(0)))


def test_a_dict_variable_is_named_by_its_key() -> None:
    """Behaviour 28: the path leads to the variable in a nest."""
    with pytest.raises(af.DTypeError, match=r"loop_vars\['state'\]\[0\] of while"):
        af.while_loop(lambda v: True, lambda v: {"i": v["i"], "state": (v["i"] > 0,)}, {"i": 0, "state": (1,)})


REFUSED_PREDICATES: dict[str, tuple[Any, type[Exception], str]] = {
    "a number": (lambda i: i, af.DTypeError, "boolean scalar"),
    "two booleans": (lambda i: [i < 3, i < 4], af.GraphError, "one boolean scalar"),
    "a vector": (lambda i: af.stack([i < 3, i < 4]), af.ShapeError, r"boolean scalar; got shape \[2\]"),
    "nothing": (lambda i: None, af.GraphError, "one boolean scalar"),
}


@pytest.mark.parametrize("case", REFUSED_PREDICATES)
def test_predicates_that_are_no_boolean_scalar(case: str) -> None:
    """Behaviour 28: build errors that say what a predicate is."""
    pred, error, message = REFUSED_PREDICATES[case]
    with pytest.raises(error, match=message):
        af.while_loop(pred, lambda i: i + 1, (0,))


async def test_a_predicate_may_have_shape_1_1(run: Run) -> None:
    """Behaviour 28: decided as for `cond`: one element is enough."""
    assert await run(af.while_loop(lambda i: af.reshape(i < 3, (1, 1)), lambda i: i + 1, (0,))) == (3,)


@pytest.mark.parametrize("shape", [(2,), (1, 3)])
async def test_a_maximum_that_turns_out_to_have_several_elements_fails(run: Run, shape: tuple[int, ...]) -> None:
    """Behaviour 28: the error names the argument, rather than the predicate made of it."""
    most = af.placeholder("int64", None)
    count = af.while_loop(lambda i: i < 10, lambda i: i + 1, (0,), maximum_iterations=most)
    assert await run(count, {most: 3}) == (3,)
    with pytest.raises(af.KernelError, match="maximum_iterations is an integer scalar; got shape"):
        await run(count, {most: np.ones(shape, np.int64)})


def test_no_loop_variables() -> None:
    """Behaviour 28: a loop needs something to iterate on."""
    with pytest.raises(af.GraphError, match="at least one loop variable"):
        af.while_loop(lambda: True, lambda: (), ())


# -- 29: shapes that change ------------------------------------------------------------------------------------------


def doubled(x: Any) -> Any:
    return af.concat([x, x], axis=0)


def test_growth_without_an_invariant_quotes_both_shapes() -> None:
    """Behaviour 29: [2,2] becomes [4,2]."""
    with pytest.raises(af.ShapeError, match=r"has shape \[2,2\] but the body returns \[4,2\].*shape_invariants"):
        af.while_loop(lambda x: True, doubled, (np.ones((2, 2)),))


async def test_growth_with_an_invariant(run: Run) -> None:
    """Behaviour 29: [2,2] grows to [8,8]."""

    def grow(i: Any, x: Any) -> Any:
        return i + 1, af.concat([doubled(x), doubled(x)], axis=1)

    shapes = ((), (None, None))
    _, x = af.while_loop(lambda i, x: i < 2, grow, (0, np.ones((2, 2))), shape_invariants=shapes)
    assert x.shape == (None, None)
    np.testing.assert_array_equal(await run(x), np.ones((8, 8)))


def test_an_incompatible_invariant_is_rejected() -> None:
    """Behaviour 29: the init has to fit it."""
    with pytest.raises(af.ShapeError, match=r"loop_vars\[0\] starts with shape \[2,2\].* \[\?,3\]"):
        af.while_loop(lambda x: True, doubled, (np.ones((2, 2)),), shape_invariants=((None, 3),))


async def test_a_declared_unknown_rank_stays_unknown(run: Run) -> None:
    """Behaviour 29: whatever the init's shape is."""
    seen = []

    def body(i: Any, x: Any) -> Any:
        seen.append(x.shape)
        return i + 1, af.expand_dims(x, axis=0)

    fed = af.placeholder("float32", None)
    _, x = af.while_loop(lambda i, x: i < 2, body, (0, af.reshape(fed, (2,))), shape_invariants=((), None))
    assert seen == [None] and x.shape is None
    assert (await run(x, {fed: np.zeros((2, 1), np.float32)})).shape == (1, 1, 2)


# -- 30: structures and bodies ---------------------------------------------------------------------------------------

NESTS: dict[str, tuple[Any, Callable[..., Any], Callable[..., Any], Any]] = {
    "tuple": ((0, 0.5), lambda i, x: i < 3, lambda i, x: (i + 1, x * 2), (3, 4.0)),
    "list": ([0, 0.5], lambda i, x: i < 3, lambda i, x: [i + 1, x * 2], [3, 4.0]),
    "list of one": ([0], lambda i: i < 3, lambda i: [i + 1], [3]),
    "bare": (0, lambda i: i < 3, lambda i: i + 1, 3),
    "dict": (
        {"i": 0, "x": 0.5},
        lambda v: v["i"] < 3,
        lambda v: {"x": v["x"] * 2, "i": v["i"] + 1},
        {"i": 3, "x": 4.0},
    ),
    "namedtuple": (Pair(0, 0.5), lambda v: v.count < 3, lambda v: Pair(v.count + 1, v.total * 2), Pair(3, 4.0)),
    "dataclass": (
        Counter(0, 0.5),
        lambda v: v.count < 3,
        lambda v: Counter(v.count + 1, v.total * 2),
        Counter(3, 4.0),
    ),
    "numpy scalars": (
        (np.int8(0), np.float32(0.5)),
        lambda i, x: i < 3,
        lambda i, x: (i + 1, x * 2),
        (np.int8(3), np.float32(4.0)),
    ),
    "mixed": ((0, {"a": [1, (2,)]}), lambda i, v: i < 2, lambda i, v: (i + 1, {"a": [5, (i,)]}), (2, {"a": [5, (1,)]})),
}


@pytest.mark.parametrize("case", NESTS)
async def test_nests_keep_their_structure(run: Run, case: str) -> None:
    """Behaviour 30: Python and NumPy scalars in tuples, lists, dicts, named tuples and dataclasses."""
    init, pred, body, expected = NESTS[case]
    result = await run(af.while_loop(pred, body, init))
    assert result == expected
    assert isinstance(result, np.int64 if expected == 3 else type(expected))


async def test_numpy_scalars_keep_their_dtype(run: Run) -> None:
    """Behaviour 30: a Python number in the body does not widen them."""
    result = await run(af.while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * 0.5), (np.int8(0), np.float16(8))))
    assert [value.dtype for value in result] == [np.int8, np.float16]


async def test_variables_and_nodes(run: Run) -> None:
    """Behaviour 30: a variable as init is read once; a node as a result is true once it has run."""
    v = af.Variable(5)
    (x,) = af.while_loop(lambda x: x < 10, lambda x: x + 1, (v,))
    i, done = af.while_loop(lambda i, done: i < 3, lambda i, done: (i + 1, v.assign_add(1).node), (0, False))
    assert await run([x, i, done, v]) == [10, 3, True, 8]


async def test_a_body_that_ignores_its_input(run: Run) -> None:
    """Behaviour 30: constants and outer tensors as results."""
    outer = af.placeholder("float64", ())
    i, fixed, taken = af.while_loop(lambda i, a, b: i < 4, lambda i, a, b: (i + 1, 7.0, outer), (0, 1.0, 2.0))
    assert await run((i, fixed, taken), {outer: 9.0}) == (4, 7.0, 9.0)


async def test_a_body_that_swaps_its_variables(run: Run) -> None:
    """Behaviour 30: each takes the other's old value."""
    _, a, b = af.while_loop(lambda i, a, b: i < 5, lambda i, a, b: (i + 1, b, a), (0, 1, 2))
    assert await run((a, b)) == (2, 1)


async def test_arrays_that_take_turns(run: Run) -> None:
    """Behaviour 30: all variables change at once, also in a loop that a card runs by itself, and in each run from its
    feeds.
    """
    x, y = (af.placeholder("float64", (2,)) for _ in range(2))
    loop = af.while_loop(lambda x, y: af.sum(x) < 100, lambda x, y: (x + y, x), (x, y))
    for first in ([1.0, 2.0], [3.0, 0.0], [99.0, 1.0]):
        a, b = np.array(first), np.ones(2)
        found = await run(loop, {x: a, y: b})
        while a.sum() < 100:
            a, b = a + b, a
        np.testing.assert_array_equal(found, [a, b])


async def test_an_all_constant_body(run: Run) -> None:
    """Behaviour 30: the predicate alone ends it."""
    assert await run(af.while_loop(lambda i: i < 1, lambda i: 10, 0)) == 10


# -- 31: captures ----------------------------------------------------------------------------------------------------


async def test_an_outer_tensor_in_predicate_and_body(run: Run) -> None:
    """Behaviour 31: captured once, seen in every iteration."""
    limit, step = af.placeholder("int64", ()), af.placeholder("int64", ())
    result = af.while_loop(lambda i: i < limit + step, lambda i: i + step, (0,))
    assert await run(result, {limit: 10, step: 4}) == (16,)


async def test_a_variable_is_read_anew_in_each_iteration(run: Run) -> None:
    """Behaviour 31: assigns in the body are seen by the reads after them."""
    power = af.Variable(1)

    def body(i: Any, total: Any) -> Any:
        power.assign(power * 2)
        return i + 1, total + power

    _, total = af.while_loop(lambda i, t: i < 4, body, (0, 0))
    assert await run(total) == 2 + 4 + 8 + 16


# -- 32: nesting -----------------------------------------------------------------------------------------------------


def doubled_past_20(x: Any) -> Any:
    return af.while_loop(lambda x: x < 20.0, lambda x: x + x, (x,))[0]


async def test_nested_loops(run: Run) -> None:
    """Behaviour 32: 225 and 1048576."""

    def add_sum(x: Any) -> Any:
        return x + af.while_loop(lambda i, s: i < 10, lambda i, s: (i + 1, s + i), (0, 0))[1]

    simple = af.while_loop(lambda x: x < 200, add_sum, (0,))
    squares = af.while_loop(lambda x: x < 3000.0, lambda x: (lambda y: y * y)(doubled_past_20(x)), (2.0,))
    assert await run((simple, squares)) == ((225,), (1048576.0,))


async def test_eight_levels(run: Run) -> None:
    """Behaviour 32: each of two iterations."""

    def nested(depth: int, x: Any) -> Any:
        if depth == 0:
            return x + 1
        return af.while_loop(lambda i, y: i < 2, lambda i, y: (i + 1, nested(depth - 1, y)), (0, x))[1]

    assert await run(nested(8, af.constant(0))) == 2**8


@pytest.mark.parametrize("taken", [True, False])
async def test_while_in_a_branch(run: Run, taken: bool) -> None:
    """Behaviour 32: taken it runs, untaken it ends at once."""
    pred = af.placeholder("bool", ())
    result = af.cond(pred, lambda: count_to(10), lambda: af.constant(-1))
    assert await run(result, {pred: taken}) == (10 if taken else -1)


async def test_cond_in_while(run: Run) -> None:
    """Behaviour 32: a predicate that changes from iteration to iteration."""

    def body(i: Any, evens: Any, odds: Any) -> Any:
        even = i % 2 == 0
        return i + 1, af.cond(even, lambda: evens + i, lambda: evens), af.cond(even, lambda: odds, lambda: odds + i)

    assert await run(af.while_loop(lambda i, e, o: i < 10, body, (0, 0, 0))) == (10, 20, 25)


async def test_while_cond_while(run: Run) -> None:
    """Behaviour 32: three levels, the innermost in some iterations only."""

    def body(i: Any, total: Any) -> Any:
        return i + 1, total + af.cond(i % 3 == 0, lambda: count_to(i), lambda: af.constant(100))

    _, total = af.while_loop(lambda i, t: i < 7, body, (0, 0))
    assert await run(total) == (0 + 3 + 6) + 4 * 100


async def test_a_loop_in_the_predicate(run: Run) -> None:
    """Behaviour 32: the predicate may itself loop."""
    assert await run(af.while_loop(lambda i: count_to(i) < 5, lambda i: i + 1, (0,))) == (5,)
