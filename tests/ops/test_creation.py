from __future__ import annotations

import contextvars
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import ml_dtypes
import numpy as np
import pytest

from asyncflow.errors import DTypeError, GraphError, ShapeError
from asyncflow.graph.building.build import constant, placeholder
from asyncflow.graph.graph import Graph
from asyncflow.ops.arrays import creation
from asyncflow.ops.arrays.shape import shape

DTYPES = ["bool", "int8", "uint64", "float16", "float32", "float64", "complex64", "bfloat16"]

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import TypeAlias

    Evaluate: TypeAlias = Callable[..., Any]


@pytest.fixture(autouse=True)
def _graph() -> Iterator[None]:
    with Graph():
        yield


def check(got: Any, want: Any) -> None:
    assert np.asarray(got).dtype == want.dtype
    assert np.array_equal(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_ones_and_full(evaluate: Evaluate, dtype: Any) -> None:
    numpy_dtype = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
    for extents in [(), (0, 3), (2, 3)]:
        check(evaluate(creation.zeros(extents, dtype=dtype)), np.zeros(extents, numpy_dtype))
        check(evaluate(creation.ones(extents, dtype=dtype)), np.ones(extents, numpy_dtype))
        check(evaluate(creation.full(extents, True, dtype=dtype)), np.ones(extents, numpy_dtype))
        x = np.ones(extents, numpy_dtype)
        check(evaluate(creation.zeros_like(x)), np.zeros(extents, numpy_dtype))
        check(evaluate(creation.ones_like(x, dtype="int32")), np.ones(extents, "int32"))
        check(evaluate(creation.empty_like(x)), np.zeros(extents, numpy_dtype))
    check(evaluate(creation.empty(4, dtype=dtype)), np.zeros(4, numpy_dtype))


def test_full_takes_the_dtype_of_its_value(evaluate: Evaluate) -> None:
    assert creation.full(2, 1).dtype == np.int64
    assert creation.full(2, 1.5).dtype == np.float64
    assert creation.full(2, constant(np.float32(1))).dtype == np.float32
    check(evaluate(creation.full(2, constant(2.75), dtype="int8")), np.array([2, 2], np.int8))
    check(evaluate(creation.full_like(np.array([1, 2], np.float32), 7)), np.array([7, 7], np.float32))
    with pytest.raises(ShapeError, match=r"full: takes tensors of rank 0 here, not float64\[2\]"):
        creation.full(2, np.ones(2))
    with pytest.raises(DTypeError, match=r"1.5 does not fit dtype int8"):
        creation.full(2, 1.5, dtype="int8")
    with pytest.raises(DTypeError, match=r"there is no 0 of dtype string; use af.full"):
        creation.zeros(2, dtype="string")


def test_shapes_known_only_in_the_run(evaluate: Evaluate) -> None:
    n, x = placeholder("int32", ()), placeholder("float32", (None, 3))
    mixed = creation.zeros((n, 3))
    assert mixed.shape == (None, 3)
    check(evaluate(mixed, {n: np.int32(2)}), np.zeros((2, 3)))
    assert creation.ones(n).shape == (None,)
    check(evaluate(creation.ones(n), {n: np.array(2, "int32")}), np.ones(2))
    whole = creation.full(shape(x), 5)
    assert whole.shape == (None, None)
    check(evaluate(whole, {x: np.ones((4, 3), "f4")}), np.full((4, 3), 5))
    assert creation.full(placeholder("int64"), 5).shape is None
    like = creation.zeros_like(x)
    assert like.shape == (None, 3)
    check(evaluate(like, {x: np.ones((4, 3), "f4")}), np.zeros((4, 3), "f4"))
    assert creation.zeros(constant([2, 3])).shape == (2, 3)
    assert creation.zeros((constant(2), np.int32(3))).shape == (2, 3)


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        ((2, None), ShapeError, r"not known while the graph is built; take it from af.shape\(x\)"),
        (None, ShapeError, r"of unknown rank while the graph is built; take it from af.shape\(x\)"),
        (-1, ShapeError, "an extent is not negative; got -1"),
        ((2.5,), DTypeError, "a shape holds integers, not 2.5"),
        ((True,), DTypeError, "a shape holds integers, not True"),
    ],
)
def test_bad_shapes(bad: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        creation.zeros(bad)


def test_bad_shape_tensors() -> None:
    with pytest.raises(ShapeError, match=r"a shape is an integer tensor of rank 1; .* has rank 2"):
        creation.zeros(placeholder("int32", (1, 1)))
    with pytest.raises(ShapeError, match=r"an extent is an integer tensor of rank 0; .* has rank 1"):
        creation.zeros((placeholder("int32", (1,)), 2))
    with pytest.raises(DTypeError, match=r"a shape holds integers; .* does not"):
        creation.zeros(placeholder("float32", (1,)))


@pytest.mark.parametrize(
    "bounds",
    [(5,), (2, 5), (5, 2), (0, 10, 3), (10, 0, -3), (0, 1, 0.1), (1.5,), (0, -0.5, -0.2)],
)
@pytest.mark.parametrize("dtype", [None, "float32", "int16"])
def test_arange_equals_numpy(evaluate: Evaluate, bounds: tuple, dtype: Any) -> None:
    x = creation.arange(*bounds, dtype=dtype)
    want = np.arange(*bounds, dtype=dtype)
    assert x.shape == want.shape
    check(evaluate(x), want)


def test_arange_up_to_a_tensor(evaluate: Evaluate) -> None:
    n = placeholder("int32", ())
    x = creation.arange(n)
    assert x.dtype == np.int32 and x.shape == (None,)
    check(evaluate(x, {n: np.int32(3)}), np.array([0, 1, 2], np.int32))
    check(evaluate(creation.arange(1, n, 0.5), {n: np.int32(2)}), np.array([1, 1.5]))
    check(evaluate(creation.arange(3, dtype="bfloat16")), np.arange(3).astype(ml_dtypes.bfloat16))
    with pytest.raises(GraphError, match=r"arange: the step is 0"):
        creation.arange(0, n, 0)
    for stop in (float("inf"), float("nan")):
        with pytest.raises(
            GraphError, match=r"arange: start, stop and step are finite.*; got 0.0, (inf|nan), 1.0[\s\S]*test_creation"
        ):
            creation.arange(0, stop)
    with pytest.raises(DTypeError, match=r"arange: takes real numbers, not complex128"):
        creation.arange(1j)
    with pytest.raises(ShapeError, match=r"arange: takes tensors of rank 0"):
        creation.arange(np.arange(3))


@pytest.mark.parametrize("options", [{}, {"endpoint": False}, {"dtype": "float32"}, {"dtype": "int32"}])
@pytest.mark.parametrize("ends", [(0, 1), (-2.5, 7), (3, 3), (np.float32(0), np.float32(1))])
@pytest.mark.parametrize("num", [0, 1, 7])
def test_linspace_equals_numpy(evaluate: Evaluate, options: Any, ends: tuple, num: int) -> None:
    x = creation.linspace(ends[0], ends[1], num, **options)
    want = np.linspace(ends[0], ends[1], num, **options)
    assert x.shape == want.shape
    check(evaluate(x), want)


def test_linspace_with_tensors(evaluate: Evaluate) -> None:
    stop, num = placeholder("float32", ()), placeholder("int64", ())
    x = creation.linspace(0, stop, num)
    assert x.dtype == np.float32 and x.shape == (None,)
    check(evaluate(x, {stop: np.float32(1), num: np.int64(3)}), np.array([0, 0.5, 1], np.float32))
    assert evaluate(creation.linspace(0, 1j, 3)).tolist() == [0, 0.5j, 1j]


def test_eye(evaluate: Evaluate) -> None:
    n = placeholder("int32", ())
    check(evaluate(creation.eye(3)), np.eye(3))
    check(evaluate(creation.eye(2, 4, k=1, dtype="bool")), np.eye(2, 4, k=1, dtype=bool))
    x = creation.eye(n, 2, k=-1)
    assert x.shape == (None, 2)
    check(evaluate(x, {n: np.int32(3)}), np.eye(3, 2, k=-1))
    assert creation.eye(n).shape == (None, None)
    check(evaluate(creation.eye(n), {n: np.int32(2)}), np.eye(2))
    with pytest.raises(DTypeError, match=r"eye: takes a dtype of numbers, not string"):
        creation.eye(2, dtype="string")


@pytest.mark.parametrize("name", ["tril", "triu"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_triangles(evaluate: Evaluate, name: str, dtype: Any) -> None:
    x = np.arange(1, 13).reshape(1, 3, 4).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    for k in (-1, 0, 2):
        check(evaluate(getattr(creation, name)(x, k=k)), getattr(np, name)(x, k=k))
    with pytest.raises(ShapeError, match=rf"{name}: takes a matrix or a stack of them"):
        getattr(creation, name)(x[0, 0])


@pytest.mark.parametrize("name", ["tril", "triu", "eye"])
def test_a_diagonal_that_a_run_computes_is_refused_at_the_call(name: str) -> None:
    x: Any = 3 if name == "eye" else np.ones((3, 3))
    with pytest.raises(GraphError, match="k must be an int known while the graph is built, got <Tensor"):
        getattr(creation, name)(x, k=constant(1))


@pytest.mark.parametrize("bounds", [(0, 1e300), (0, 1, 1e-300), (1e19,)])
def test_an_arange_of_more_elements_than_an_array_has_is_refused(bounds: tuple[float, ...]) -> None:
    with pytest.raises(ShapeError, match="a vector has at most 9223372036854775807 elements; these would be 1e"):
        creation.arange(*bounds)


@pytest.mark.parametrize("make", [lambda n: creation.zeros((2, n)), creation.eye, partial(creation.linspace, 0, 1)])
def test_an_extent_that_no_array_has_is_refused(make: Callable[[int], object]) -> None:
    with pytest.raises(ShapeError, match=r"an extent is at most 9223372036854775807; got 1e\+30"):
        make(10**30)


@pytest.mark.parametrize("indexing", ["xy", "ij"])
def test_meshgrid(evaluate: Evaluate, indexing: Any) -> None:
    for arrays in ([np.arange(3)], [np.arange(3), np.ones(2)], [np.arange(3), np.float32(1), np.ones(4)]):
        grids = creation.meshgrid(*arrays, indexing=indexing)
        for grid, want in zip(grids, np.meshgrid(*arrays, indexing=indexing), strict=True):
            assert grid.shape == want.shape
            check(evaluate(grid), want)
    assert creation.meshgrid() == []
    with pytest.raises(GraphError, match=r"indexing must be 'xy' or 'ij'"):
        creation.meshgrid([1], indexing=cast("Any", "yx"))
    with pytest.raises(ShapeError, match=r"meshgrid: takes vectors"):
        creation.meshgrid(np.ones((2, 2)))


def test_asarray(evaluate: Evaluate) -> None:
    x = np.array([1, 2], np.float32)
    t = creation.asarray(x)
    x[0] = 9
    check(evaluate(t), np.array([1, 2], np.float32))
    assert creation.asarray(t) is t
    check(evaluate(creation.asarray(t, dtype=t.dtype, copy=False)), np.array([1, 2], np.float32))
    for copied, dtype in (([1, 2], None), (x, None), (3, None), (t, "int8")):
        with pytest.raises(ValueError, match=r"asarray\(copy=False\): an? \w+ becomes a tensor only by a copy"):
            creation.asarray(copied, dtype=dtype, copy=False)
    check(evaluate(creation.asarray(t, dtype="int8")), np.array([1, 2], np.int8))
    check(evaluate(creation.asarray([[1], [2]], dtype="float32")), np.array([[1], [2]], np.float32))
    with pytest.raises(GraphError, match=r"use af.stack"):
        creation.asarray([t, t])


def test_from_dlpack(evaluate: Evaluate) -> None:
    check(evaluate(creation.from_dlpack(np.arange(3))), np.arange(3))
    with pytest.raises(GraphError, match=r"from_dlpack: cannot read list in host memory"):
        creation.from_dlpack(cast("Any", [1, 2]))


def test_likes_work_outside_the_graph_that_is_built() -> None:
    with Graph() as graph:
        x = placeholder("float32", (None,))
    for function in (creation.zeros_like, creation.ones_like, lambda x: creation.full_like(x, 3)):
        assert contextvars.Context().run(function, x).graph is graph
