from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from asyncflow.errors import DTypeError, GraphError, ShapeError
from asyncflow.graph.building.build import placeholder
from asyncflow.graph.graph import Graph
from asyncflow.graph.values.dtypes import string
from asyncflow.ops.arithmetic.elementwise import square
from asyncflow.ops.arrays.datatypes import astype
from asyncflow.ops.reductions import counts
from asyncflow.ops.searching import searching, sorting
from tests.autodiff.sweep import assert_derivatives
from tests.ops.against_numpy import NUMBERS, compare, sample

DTYPES = [*NUMBERS, ml_dtypes.bfloat16]
UP: Any = "up"
WORDS = np.array(["b", "", "a", "b"], dtype=string)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("zero", [0.0, -0.0, 1.0])
def test_where_of_a_large_array_and_a_scalar_gives_the_same_bits(dtype: Any, zero: float) -> None:
    """Elements that are not chosen are left out, whatever they are: infinities, NaN and signs of zeros."""
    x, c = sample((40, 50), dtype), sample((40, 50), "bool", 2)
    if x.dtype.kind in "fc":
        x[::3, ::2], x[::2, ::5], x[1::4] = np.nan, np.inf, -0.0
    other = np.array(zero).astype(x.dtype)
    assert searching.WHERE.kernel is not None
    for mask in (c, c[:, :1]):
        found = searching.WHERE.kernel(np)(mask, x, other)
        assert found.dtype == x.dtype
        assert found.tobytes() == np.where(mask, x, other).tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["argmax", "argmin"])
def test_positions_of_extremes(evaluate: Any, name: Any, dtype: Any) -> None:
    x, build, reference = sample((3, 4), dtype), getattr(searching, name), getattr(np, name)
    for axis in (None, 0, -1):
        for keepdims in (False, True):
            expected = reference(x, axis=axis, keepdims=keepdims)
            compare(evaluate, lambda t, a=axis, k=keepdims: build(t, axis=a, keepdims=k), expected, x)
    compare(evaluate, build, np.int64(0), x[0, 0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_nonzero(evaluate: Any, dtype: Any) -> None:
    for shape in [(5,), (2, 3), (0, 2)]:
        x = sample(shape, dtype)
        compare(evaluate, searching.nonzero, np.nonzero(x), x, known=("all", "rank"))


def test_nonzero_strings_are_not_empty(evaluate: Any) -> None:
    compare(evaluate, searching.nonzero, np.array([0, 2, 3]), WORDS, known=("all", "rank"))
    compare(evaluate, counts.count_nonzero, np.int64(3), WORDS)


@pytest.mark.parametrize("side", ["left", "right"])
def test_searchsorted(evaluate: Any, side: Any) -> None:
    x, v = np.array([1, 2, 2, 5], np.float32), np.array([[0, 2], [5, 7]], np.int32)
    compare(evaluate, lambda s, t: searching.searchsorted(s, t, side=side), np.searchsorted(x, v, side), x, v)
    compare(evaluate, lambda s, t: searching.searchsorted(s, t, side=side), np.searchsorted(x, 2, side), x, np.int8(2))
    shuffled = x[::-1].copy()
    order = np.argsort(shuffled)
    compare(
        evaluate,
        lambda s, t, o: searching.searchsorted(s, t, side=side, sorter=o),
        np.searchsorted(shuffled, v, side, order),
        shuffled,
        v,
        order,
    )


@pytest.mark.parametrize("first", DTYPES)
def test_where_promotes_and_broadcasts(evaluate: Any, first: Any) -> None:
    x = sample((3, 4), first)
    for second in ("bool", "int8", "float32"):
        y, c = sample((4,), second, 1), sample((3, 1), "bool", 2)
        compare(evaluate, searching.where, np.where(c, x, y), c, x, y)


def test_where_of_scalars_and_strings(evaluate: Any) -> None:
    compare(evaluate, searching.where, np.float32(1), np.True_, np.float32(1), np.float32(2))
    compare(evaluate, lambda c, x: searching.where(c, x, 0), np.float32(0), np.False_, np.float32(1))
    mask = np.array([True, False, False, True])
    compare(
        evaluate, lambda c, x: searching.where(c, x, "z"), np.array(["b", "z", "z", "b"], dtype=string), mask, WORDS
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axis", [0, -1])
def test_sort_and_argsort(evaluate: Any, dtype: Any, axis: Any) -> None:
    x = sample((4, 5), dtype)
    compare(evaluate, lambda t: sorting.sort(t, axis=axis), np.sort(x, axis=axis), x)
    compare(evaluate, lambda t: sorting.sort(t, axis=axis, stable=False), np.sort(x, axis=axis), x)
    compare(evaluate, lambda t: sorting.argsort(t, axis=axis), np.argsort(x, axis=axis, kind="stable"), x)
    descending = np.flip(np.sort(x, axis=axis), axis)
    compare(evaluate, lambda t: sorting.sort(t, axis=axis, descending=True), descending, x)


def test_descending_order_keeps_the_order_of_equal_elements(evaluate: Any) -> None:
    x = np.array([1, 3, 1, 3, 2], np.int8)
    compare(evaluate, lambda t: sorting.argsort(t, descending=True), np.array([1, 3, 4, 0, 2]), x)
    with Graph():
        t = placeholder("float64", (3,))
        result = evaluate(sorting.sort(t, descending=True), {t: np.array([0.0, -0.0, 0.0])})
    np.testing.assert_array_equal(np.signbit(result), [False, True, False])


def test_nan_is_larger_than_any_number(evaluate: Any) -> None:
    x = np.array([2, np.nan, 1], np.float32)
    compare(evaluate, sorting.sort, np.array([1, 2, np.nan], np.float32), x)
    compare(evaluate, lambda t: sorting.sort(t, descending=True), np.array([np.nan, 2, 1], np.float32), x)


def test_strings_sort(evaluate: Any) -> None:
    compare(evaluate, sorting.sort, np.array(["", "a", "b", "b"], dtype=string), WORDS)
    compare(evaluate, sorting.argsort, np.array([1, 2, 0, 3]), WORDS)


def _p(dtype: Any, *shape: Any) -> Any:
    return placeholder(dtype, shape)


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: searching.nonzero(_p("int8")), ShapeError, "known rank 1 or higher"),
        (lambda: searching.nonzero(placeholder("int8")), ShapeError, "known rank 1 or higher"),
        (lambda: searching.where(_p("int8", 2), 1.0, 2.0), DTypeError, "a boolean condition, not int8"),
        (lambda: searching.where(_p("bool", 2), _p("int8", 3), 1), ShapeError, "do not broadcast"),
        (lambda: searching.searchsorted(_p("int8", 2, 2), 1), ShapeError, "must be of rank 1"),
        (lambda: searching.searchsorted(_p("int8", 2), 1, side=UP), GraphError, "side must be 'left' or 'right'"),
        (lambda: searching.searchsorted(_p("int8", 2), 1, sorter=[0, 1, 2]), ShapeError, "must be shaped like x1"),
        (lambda: searching.argmax(_p("int8", 2), axis=1), ShapeError, "axis 1 is out of range"),
        (lambda: sorting.sort(_p("int8")), ShapeError, "axis -1 is out of range"),
        (lambda: sorting.argsort(_p("int8", 2), axis=1), ShapeError, "axis 1 is out of range"),
    ],
)
def test_errors_name_the_fault(build: Any, error: Any, message: Any) -> None:
    with Graph(), pytest.raises(error, match=message):
        build()


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_top_k(evaluate: Any, axis: int, largest: bool) -> None:
    for dtype in ("bool", "int8", "uint8", "float32", "complex64"):
        x = sample((4, 5), dtype)
        for k in (0, 2, 4):
            order = np.argsort(np.flip(x, axis) if largest else x, axis=axis, kind="stable")
            places = x.shape[axis] - 1 - np.flip(order, axis) if largest else order
            places = np.take(places, range(k), axis=axis)
            expected = (np.take_along_axis(x, places, axis), places)
            compare(evaluate, lambda t, k=k: sorting.top_k(t, k, axis=axis, largest=largest), expected, x)


@pytest.mark.parametrize("dtype", [*DTYPES, "ties"])
def test_top_k_of_many(dtype: Any) -> None:
    """The first of a sort, whatever is equal or a NaN, where a partition finds them; no result keeps a longer array."""
    rng = np.random.default_rng(0)
    x = rng.integers(-2, 2, (3, 2_000)) if dtype == "ties" else rng.normal(size=(3, 2_000)) * 100
    with np.errstate(all="ignore"):
        x = x.astype("float64" if dtype == "ties" else dtype)
    if x.dtype.kind in "fV":
        x[0, ::3], x[1, :5], x[2, 1:9] = np.nan, np.nan, -0.0
    assert sorting.TOP_K.kernel is not None
    for largest in (False, True):
        for k in (1, 7, 200):
            found = sorting.TOP_K.kernel(np, k=k, axis=1, largest=largest)(x)
            wide = x.astype("float32") if x.dtype.kind == "V" else x
            order = np.argsort(np.flip(wide, 1) if largest else wide, axis=1, kind="stable")
            order = x.shape[1] - 1 - np.flip(order, 1) if largest else order
            np.testing.assert_array_equal(found, order[:, :k])
            assert found.base is None or found.base.nbytes <= found.nbytes


def test_nans_of_bfloat16_are_sorted_behind_all_numbers(evaluate: Any) -> None:
    x = np.array([1, np.nan, -3, 2, np.nan, 0], ml_dtypes.bfloat16)
    compare(evaluate, sorting.argsort, np.array([2, 5, 0, 3, 1, 4]), x)
    compare(
        evaluate, lambda t: astype(sorting.sort(t), "float32"), np.array([-3, 0, 1, 2, np.nan, np.nan], "float32"), x
    )


def test_top_k_errors(evaluate: Any) -> None:
    with Graph():
        x = placeholder("float32", (2, None))
        with pytest.raises(ShapeError, match="there are no 3 elements along axis 0"):
            sorting.top_k(x, 3, axis=0)
        with pytest.raises(GraphError, match="k is 0 or more, got -1"):
            sorting.top_k(x, -1)
        with pytest.raises(IndexError, match="axis 2"):
            sorting.top_k(x, 1, axis=2)
        values, _ = sorting.top_k(x, 4)
    with pytest.raises(ValueError, match="there are no 4 elements along axis -1"):
        evaluate(values, {x: np.ones((2, 3), np.float32)})


def test_top_k_derivative() -> None:
    x = np.random.default_rng(0).normal(size=(3, 4))
    assert_derivatives(lambda t: square(sorting.top_k(t, 2)[0]), x, order=2)
