from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from asyncflow.errors import DTypeError, GraphError, ShapeError
from asyncflow.graph.building.build import constant, placeholder
from asyncflow.graph.graph import Graph
from asyncflow.ops.indexing import indexing
from asyncflow.ops.reductions import counts, statistical, utility
from asyncflow.ops.searching import searching
from tests.ops.against_numpy import NUMBERS, compare, sample

FLOAT: Any = 1.0
AXES = [None, 0, -1, (0, 2), (), (-2, 0)]
REDUCTIONS = ["sum", "prod", "mean", "std", "var", "max", "min"]


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_are_numpys_in_every_dtype(evaluate: Any, name: Any, dtype: Any) -> None:
    x = sample((2, 3, 4), dtype)
    for axis in AXES:
        for keepdims in (False, True):
            expected = in_float32(getattr(np, name), x, axis=axis, keepdims=keepdims)
            build = getattr(statistical, name)
            compare(
                evaluate, lambda t, a=axis, k=keepdims, f=build: f(t, axis=a, keepdims=k), expected, x, known=("all",)
            )
    compare(evaluate, getattr(statistical, name), in_float32(getattr(np, name), x), x)


def in_float32(function: Any, x: np.ndarray, **options: Any) -> Any:
    """Return what NumPy's function gives; of float16 it is computed in float32, where NumPy rounds each step."""
    return (
        function(x.astype("float32"), **options).astype("float16") if x.dtype == "float16" else function(x, **options)
    )


@pytest.mark.parametrize("name", ["all", "any"])
@pytest.mark.parametrize("dtype", NUMBERS)
def test_all_and_any(evaluate: Any, name: Any, dtype: Any) -> None:
    x = sample((2, 3, 4), dtype)
    for axis in AXES:
        compare(
            evaluate,
            lambda t, a=axis: getattr(utility, name)(t, axis=a),
            getattr(np, name)(x, axis=axis).astype(bool),
            x,
        )
    compare(evaluate, lambda t: getattr(utility, name)(t, keepdims=True), getattr(np, name)(x, keepdims=True), x)


@pytest.mark.parametrize("dtype", NUMBERS)
def test_count_nonzero(evaluate: Any, dtype: Any) -> None:
    x = sample((2, 3, 4), dtype)
    for axis in (None, 0, (1, 2)):
        expected = np.asarray(np.count_nonzero(x, axis=axis, keepdims=True), dtype=np.int64)
        compare(evaluate, lambda t, a=axis: counts.count_nonzero(t, axis=a, keepdims=True), expected, x)


@pytest.mark.parametrize("name", [*REDUCTIONS, "all", "any"])
def test_scalars_reduce_to_themselves(evaluate: Any, name: Any) -> None:
    build = getattr(statistical if name in REDUCTIONS else utility, name)
    compare(evaluate, build, getattr(np, name)(np.float32(3)), np.float32(3))


def test_a_reduction_over_nothing_gives_the_identity(evaluate: Any) -> None:
    x = np.zeros((0, 3), np.float32)
    compare(evaluate, lambda t: statistical.sum(t, axis=0), np.zeros(3, np.float32), x)
    compare(evaluate, lambda t: statistical.prod(t, axis=0), np.ones(3, np.float32), x)
    compare(evaluate, lambda t: statistical.max(t, axis=1), np.zeros(0, np.float32), x)


@pytest.mark.parametrize("function", [statistical.max, statistical.min, searching.argmax, searching.argmin])
def test_extremes_of_nothing_are_refused_while_building(function: Any) -> None:
    with Graph(), pytest.raises(ShapeError, match="nothing to choose from"):
        function(placeholder("float32", (0, 3)), axis=0)


@pytest.mark.parametrize(
    ("source", "target"), [("int8", "float32"), ("float32", "float64"), ("bool", "int8"), ("float32", "complex64")]
)
def test_dtype_says_what_sums_are_computed_in(evaluate: Any, source: Any, target: Any) -> None:
    x = sample((3, 4), source)
    for name in ("sum", "prod", "cumulative_sum", "cumulative_prod"):
        build = getattr(statistical, name)
        compare(evaluate, lambda t, f=build: f(t, axis=1, dtype=target), getattr(np, name)(x, axis=1, dtype=target), x)


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("name", ["cumulative_sum", "cumulative_prod"])
def test_running_sums(evaluate: Any, name: Any, dtype: Any) -> None:
    x = sample((3, 4), dtype)
    build = getattr(statistical, name)
    for axis in (0, -1):
        for initial in (False, True):
            expected = getattr(np, name)(x, axis=axis, include_initial=initial)
            compare(evaluate, lambda t, a=axis, i=initial: build(t, axis=a, include_initial=i), expected, x)
    compare(evaluate, build, getattr(np, name)(x[0]), x[0], known=("all", "rank"))


def test_running_sums_need_an_axis_beyond_rank_one() -> None:
    for shape in [(2, 3), (), None]:
        with Graph(), pytest.raises(ShapeError, match="give axis="):
            statistical.cumulative_sum(placeholder("float32", shape))


@pytest.mark.parametrize("name", ["std", "var"])
def test_correction(evaluate: Any, name: Any) -> None:
    x = np.array([1.0, 2.0, 4.0], np.float32)
    compare(evaluate, lambda t: getattr(statistical, name)(t, correction=1), getattr(np, name)(x, ddof=1), x)


def test_bfloat16_accumulates_wider_than_it_can_count(evaluate: Any) -> None:
    ones = np.ones((1000,), ml_dtypes.bfloat16)
    compare(evaluate, statistical.sum, np.asarray(1000, ml_dtypes.bfloat16), ones)
    compare(evaluate, statistical.mean, np.asarray(1, ml_dtypes.bfloat16), ones)
    compare(
        evaluate,
        lambda t: indexing.getitem(statistical.cumulative_sum(t), 999),
        np.asarray(1000, ml_dtypes.bfloat16),
        ones,
        known=["all"],
    )
    for name in ("prod", "std", "var", "max", "min"):
        expected = getattr(np, name)(ones.astype(np.float32)).astype(ml_dtypes.bfloat16)
        compare(evaluate, getattr(statistical, name), expected, ones)
    compare(evaluate, utility.diff, np.zeros(999, ml_dtypes.bfloat16), ones)


@pytest.mark.parametrize("dtype", NUMBERS)
def test_diff(evaluate: Any, dtype: Any) -> None:
    x = sample((3, 4), dtype)
    for n in (0, 1, 2, 5):
        compare(evaluate, lambda t, n=n: utility.diff(t, n=n), np.diff(x, n=n), x)
    compare(
        evaluate,
        lambda t: utility.diff(t, axis=0, prepend=t, append=t),
        np.diff(x, axis=0, prepend=x, append=x),
        x,
    )


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: statistical.sum(constant(["a"])), DTypeError, "sum: takes numbers and booleans, not string"),
        (lambda: statistical.max(constant(["a"])), DTypeError, "takes numbers and booleans"),
        (lambda: statistical.sum(placeholder("complex64", (2,)), dtype="float32"), DTypeError, "imaginary part"),
        (
            lambda: statistical.sum(placeholder("float32", (2,)), dtype="string"),
            DTypeError,
            "accumulate in dtype string",
        ),
        (lambda: statistical.sum(placeholder("float32", (2, 3)), axis=2), ShapeError, "axis 2 is out of range"),
        (lambda: statistical.sum(placeholder("float32", (2, 3)), axis=(0, -2)), ShapeError, "names an axis twice"),
        (lambda: statistical.sum(placeholder("float32", (2, 3)), axis=FLOAT), GraphError, "axis must be an int"),
        (lambda: utility.diff(placeholder("float32", (3,)), n=-1), ShapeError, "n must be 0 or more"),
    ],
)
def test_errors_name_the_fault(build: Any, error: Any, message: Any) -> None:
    with Graph(), pytest.raises(error, match=message):
        build()
