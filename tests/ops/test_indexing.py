from __future__ import annotations

import operator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from asyncflow.errors import DTypeError, GraphError, ShapeError
from asyncflow.graph.building.build import constant, placeholder
from asyncflow.graph.graph import Graph
from asyncflow.graph.values.dtypes import string
from asyncflow.ops.indexing import indexing
from tests.ops.against_numpy import NUMBERS, compare, kernel_of, sample
from tests.ops.conftest import _evaluate

SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)


def _numbered(shape: Any) -> Any:
    return np.arange(int(np.prod(shape))).reshape(shape)


# -- x[key] against NumPy --------------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(data=st.data(), shape=SHAPES)
def test_basic_keys_mean_the_same_as_in_numpy(data: Any, shape: Any) -> None:
    x = _numbered(shape)
    key = data.draw(hnp.basic_indices(shape, allow_newaxis=True, allow_ellipsis=True))
    compare(_evaluate, lambda t: t[key], x[key], x)


@st.composite
def _mixed_keys(draw: Any) -> Any:
    """A shape, and a key of ints, slices, newaxes, an ellipsis, integer arrays that broadcast, and masks."""
    shape = draw(hnp.array_shapes(min_dims=1, max_dims=4, min_side=1, max_side=4))
    joint = draw(hnp.array_shapes(min_dims=0, max_dims=2, min_side=1, max_side=3))
    key: list[Any] = []
    axis = 0
    while axis < len(shape):
        kind = draw(st.sampled_from(["int", "slice", "newaxis", "ellipsis", "array", "array", "mask"]))
        extent = shape[axis]
        if kind == "newaxis":
            key.append(None)
            continue
        if kind == "ellipsis":
            if not any(item is Ellipsis for item in key):
                key.append(Ellipsis)
                axis += draw(st.integers(0, len(shape) - axis))
            continue
        if kind == "int":
            key.append(draw(st.integers(-extent, extent - 1)))
        elif kind == "slice":
            key.append(draw(st.slices(extent)))
        elif kind == "array":
            trimmed = joint[draw(st.integers(0, len(joint))) :]
            ones = tuple(dim if draw(st.booleans()) else 1 for dim in trimmed)
            key.append(draw(hnp.arrays(np.int64, ones, elements=st.integers(-extent, extent - 1))))
        else:
            # One true element, so that the mask broadcasts with the arrays.
            mask = np.zeros(extent, bool)
            mask[draw(st.integers(0, extent - 1))] = True
            key.append(mask)
        axis += 1
    return shape, tuple(key)


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(case=_mixed_keys())
def test_advanced_keys_mean_the_same_as_in_numpy(case: Any) -> None:
    shape, key = case
    x = _numbered(shape)
    compare(_evaluate, lambda t: t[key], x[key], x)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(case=_mixed_keys())
def test_arrays_in_a_key_may_be_tensors_of_unknown_shape(case: Any) -> None:
    shape, key = case
    x = _numbered(shape)
    arrays = [item for item in key if isinstance(item, np.ndarray)]

    def build(t: Any, *tensors: Any) -> Any:
        rest = iter(tensors)
        return t[tuple(next(rest) if isinstance(item, np.ndarray) else item for item in key)]

    compare(_evaluate, build, x[key], x, *arrays)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(case=_mixed_keys(), data=st.data())
def test_changed_copies_are_numpys(case: Any, data: Any) -> None:
    shape, key = case
    x = _numbered(shape)
    values = -_numbered(x[key].shape)
    added = x.copy()
    np.add.at(added, key, values)
    compare(_evaluate, lambda t, v: indexing.index_add(t, key, v), added, x, values)
    updated = x.copy()
    updated[key] = 7
    compare(_evaluate, lambda t: indexing.index_update(t, key, 7), updated, x)


# -- single cases ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*NUMBERS, ml_dtypes.bfloat16])
def test_every_dtype(evaluate: Any, dtype: Any) -> None:
    x = sample((3, 4), dtype)
    for key in (1, (1, 2), slice(1, None), (..., None), [0, 2], x.astype(bool), ()):
        compare(evaluate, lambda t, k=key: t[k], x[key], x)
    compare(evaluate, lambda t: t[()], x[1, 2], x[1, 2])


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "int64", "uint64"])
def test_scalar_tensor_index(evaluate: Any, dtype: Any) -> None:
    x = sample((3, 4), "float32")
    for i in (0, 2) if dtype.startswith("u") else (0, 2, -1):
        compare(evaluate, lambda t, i: t[i], x[i], x, np.array(i, dtype))
        compare(evaluate, lambda t, i: t[i, i], x[i, i], x, np.array(i, dtype))
        compare(evaluate, lambda t, i: t[..., i], x[..., i], x, np.array(i, dtype))


def test_a_scalar_index_is_the_plain_operator() -> None:
    assert kernel_of(indexing.GETITEM)(np, key=(("input", 0),)) is operator.getitem


def test_scalar_tensor_index_keeps_the_rest_of_the_shape() -> None:
    with Graph():
        x, i = placeholder("float32", (3, None, 5)), placeholder("int64", ())
        assert x[i].shape == (None, 5)
        assert x[i, 0].shape == (5,)
        assert x[:, i].shape == (3, 5)
        assert x[i, 1:, ::2].shape == (None, 3)


@pytest.mark.parametrize("step", [None, 1, 2, -1])
def test_tensor_bounds(evaluate: Any, step: Any) -> None:
    x = sample((6, 2), "float32")
    for a, b in [(1, 4), (-2, 10), (4, 1), (0, 0)]:
        compare(evaluate, lambda t, a, b: t[a:b:step], x[a:b:step], x, np.int64(a), np.int64(b))
    compare(evaluate, lambda t, c: t[1:5:c], x[1:5:2], x, np.int32(2))


@pytest.mark.parametrize("mask_shape", [(2,), (2, 3), (2, 3, 4), ()])
def test_masks(evaluate: Any, mask_shape: Any) -> None:
    x, mask = sample((2, 3, 4), "int32"), sample(mask_shape, "bool", 3)
    compare(evaluate, lambda t, m: t[m], x[mask], x, mask)
    compare(
        evaluate,
        lambda t, m: indexing.index_update(t, m, 9),
        np.where(mask[(..., *(None,) * (3 - mask.ndim))], 9, x),
        x,
        mask,
    )


def test_python_bools_and_empty_lists_are_numpys(evaluate: Any) -> None:
    x = sample((2, 3), "int32")
    compare(evaluate, lambda t: t[True], x[True], x)
    compare(evaluate, lambda t: t[np.False_], x[np.False_], x)
    compare(evaluate, lambda t: t[[]], x[[]], x)


def test_strings_stay_arrays(evaluate: Any) -> None:
    x = np.array([["a", "bc"], ["d", ""]], dtype=string)
    for key in (0, (0, 1), (1, slice(None)), ([0, 1], [1, 0]), (..., 0)):
        compare(evaluate, lambda t, k=key: t[k], np.asarray(x[key], dtype=string), x)
    compare(evaluate, lambda t, i: t[i, i], np.asarray("", dtype=string), x, np.int64(1))
    for axis in (0, 1, -1):
        compare(evaluate, lambda t, i, a=axis: indexing.gather(t, i, axis=a), x.take(1, axis=axis), x, np.int64(1))
    compare(
        evaluate, lambda t: indexing.index_update(t, (0, 0), "z"), np.array([["z", "bc"], ["d", ""]], dtype=string), x
    )


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("indices", [1, [0, -1], [[0, 1, 1], [1, 0, 0]], np.zeros((0,), np.int8), np.uint64(1)])
def test_take_and_gather(evaluate: Any, axis: Any, indices: Any) -> None:
    x, positions = sample((2, 3, 2), "float32"), np.asarray(indices)
    expected = np.take(x, positions.astype(np.int64), axis=axis)
    compare(evaluate, lambda t, i: indexing.take(t, i, axis=axis), expected, x, positions)
    compare(evaluate, lambda t, i: indexing.gather(t, i, axis=axis), expected, x, positions)


def test_take_from_a_vector_needs_no_axis(evaluate: Any) -> None:
    x = sample((4,), "float32")
    compare(evaluate, lambda t: indexing.take(t, [3, 0]), x[[3, 0]], x, known=("all", "rank"))


@pytest.mark.parametrize("axis", [0, -1])
def test_take_along_axis(evaluate: Any, axis: Any) -> None:
    x = sample((3, 4), "float32")
    order = np.argsort(x, axis=axis)
    compare(
        evaluate, lambda t, i: indexing.take_along_axis(t, i, axis=axis), np.take_along_axis(x, order, axis), x, order
    )
    row = order[:1] if axis == -1 else order[:, :1]
    compare(evaluate, lambda t, i: indexing.take_along_axis(t, i, axis=axis), np.take_along_axis(x, row, axis), x, row)


@pytest.mark.parametrize("dtype", ["int32", "float32", "complex64", ml_dtypes.bfloat16])
def test_scatter_add_adds_duplicates(evaluate: Any, dtype: Any) -> None:
    x, indices = sample((3, 2), dtype), np.array([[0, 0], [2, -1]])
    updates = sample((2, 2, 2), dtype, 1)
    expected = x.copy()
    np.add.at(expected, indices, updates)
    compare(evaluate, indexing.scatter_add, expected, x, indices, updates)
    expected = x.T.copy()
    across: Any = (slice(None), indices)
    np.add.at(expected, across, np.asarray(1, dtype))
    compare(evaluate, lambda t, i: indexing.scatter_add(t, i, 1, axis=1), expected, x.T, indices)
    compare(evaluate, lambda t, i: indexing.scatter_add(t, i, 1, axis=-1), expected, x.T, indices)


def test_scatter_update(evaluate: Any) -> None:
    x = sample((3, 2), "int32")
    expected = x.copy()
    expected[[2, 0]] = [[8, 9], [6, 7]]
    updates = np.array([[8, 9], [6, 7]], np.int32)
    compare(evaluate, indexing.scatter_update, expected, x, np.array([2, 0]), updates)


def test_changed_copies_leave_their_input_alone(evaluate: Any) -> None:
    x = np.zeros(3, np.float32)
    x.flags.writeable = False
    compare(evaluate, lambda t, i: indexing.index_update(t, i, 1), np.array([0, 1, 0], np.float32), x, np.int64(1))
    compare(evaluate, lambda t: indexing.index_add(t, slice(None), 1), np.ones(3, np.float32), x)
    compare(evaluate, lambda t: indexing.index_add(t, (), 1), np.float32(3), np.float32(2))
    assert not x.any()


# -- errors ----------------------------------------------------------------------------------------------------------


def test_a_position_out_of_range_names_itself_and_the_extent(evaluate: Any) -> None:
    x = sample((3,), "float32")
    for build in (
        lambda t, i: t[i],
        indexing.gather,
        lambda t, i: indexing.index_add(t, i, 1),
        lambda t, i: indexing.index_update(t, i, 1),
    ):
        with pytest.raises(IndexError, match="index 5 is out of bounds for axis 0 with size 3"):
            compare(evaluate, build, None, x, np.array(5))


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda x: x[3], ShapeError, r"getitem: index 3 is out of range for axis 0 of extent 3"),
        (lambda x: x[:, -6], ShapeError, "index -6 is out of range for axis 1 of extent 5"),
        (lambda x: x[0, 0, 0], ShapeError, r"too many indices: 3 for a value of shape \[3,5\]"),
        (lambda x: x[..., ...], GraphError, "only one ellipsis"),
        (lambda x: x[::0], ShapeError, "step cannot be 0"),
        (lambda x: x[1.5], DTypeError, "an index must be ints, slices"),
        (lambda x: x["a"], DTypeError, "of dtype string"),
        (lambda x: x[x], DTypeError, "of dtype float32"),
        (lambda x: x[1.5:], GraphError, "a slice bound must be an int"),
        (lambda x: x[x:], DTypeError, "a slice bound must be an integer scalar"),
        (lambda x: x[np.ones((4,), bool)], ShapeError, r"got \[4\] for axes of extent \[3\]"),
        (lambda x: x[[0, 1], [0, 1, 2]], ShapeError, "do not broadcast"),
        (lambda x: indexing.take(x, [0]), ShapeError, "give axis="),
        (lambda x: indexing.take(x, [0.5], axis=0), DTypeError, "integer indices, not float64"),
        (lambda x: indexing.take(x, [0], axis=2), ShapeError, "axis 2 is out of range"),
        (lambda x: indexing.take_along_axis(x, [0]), ShapeError, "must have one rank"),
        (lambda x: indexing.index_update(x, 0, constant([1.0])), DTypeError, "is not of dtype float32"),
        (lambda x: indexing.index_add(x, 0, np.ones(4, np.float32)), ShapeError, r"\[4\] do not broadcast to \[5\]"),
        (lambda x: indexing.index_add(constant(["a"]), 0, "b"), DTypeError, "numbers and booleans"),
        (lambda x: indexing.scatter_add(x, [True, False, True], 1), DTypeError, "integer indices, not bool"),
    ],
)
def test_errors_name_the_fault(build: Any, error: Any, message: Any) -> None:
    with Graph(), pytest.raises(error, match=message):
        build(placeholder("float32", (3, 5)))


def test_keys_are_plain_data() -> None:
    with Graph():
        x, i = placeholder("float32", (3, 5)), placeholder("int64", ())
        node = x[i, 1:i:2].node
    assert node.attrs == {"key": (("input", 0), ("slice", 1, ("input", 1), 2))}
    assert [tensor is i for tensor in node.inputs] == [False, True, True]


def test_array_keys_work_outside_the_graph_block(evaluate: Any) -> None:
    with Graph():
        x = placeholder("float32", (3,))
    np.testing.assert_array_equal(evaluate(x[[2, 0]], {x: np.arange(3, dtype=np.float32)}), [2, 0])
