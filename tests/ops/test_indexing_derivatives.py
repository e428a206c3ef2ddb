"""Derivatives of indexing against central differences: all forms of keys, take, and changed copies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.graph.op import derivative_of
from asyncflow.ops.indexing.scatter import sum_of_gradients
from tests.autodiff.sweep import assert_derivatives, gradients_at, kept_values

if TYPE_CHECKING:
    from collections.abc import Callable


def sample(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def squared(build: Callable[..., af.Tensor]) -> Callable[..., af.Tensor]:
    """The output squared, so that the second derivative is not zero."""
    return lambda *inputs: af.square(build(*inputs))


# -- x[key] ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key",
    [
        1,
        -1,
        (1, 2),
        slice(1, None),
        slice(None, None, 2),
        slice(None, None, -1),
        slice(5, 5),
        (slice(0, 2), slice(None), -1),
        (..., 0),
        (..., slice(0, 2), None),
        (None, 1, ..., None),
        (),
        ...,
        (1, 2, 3),
        (slice(-2, None), 1, slice(3, 0, -2)),
    ],
    ids=str,
)
def test_static_keys(key: Any) -> None:
    assert_derivatives(squared(lambda x: x[key]), sample(3, 4, 4), order=2)


@pytest.mark.parametrize(
    "key",
    [
        [0, 2, 0],
        np.array([[0, 1], [1, 1]]),
        np.array([-1, 0, 2, -3]),
        (slice(None), [1, 1, 3]),
        (..., [1, 1, 3]),
        (..., [1, 1, 3], slice(None)),
        ([0, 1, 0], [1, 2, 1]),
        ([[0], [1]], [1, 2, 1]),
        ([0, 1, 0], slice(None), [1, 2, 1]),
        ([0, 1, 0], None, slice(1, 3)),
        (1, slice(None), [0, 0, 1]),
        (slice(0, 2), [0, 0, 1]),
        np.array([], np.int64),
        np.array([True, False, True]),
        (slice(None), np.array([True, False, True, True])),
        (np.array([True, False, True]), [1, 2]),
    ],
    ids=str,
)
def test_keys_with_arrays(key: Any) -> None:
    """Indices that name an element twice: its gradients add."""
    assert_derivatives(squared(lambda x: x[key]), sample(3, 4, 4), order=2)


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8, np.uint64])
def test_keys_with_index_tensors(dtype: Any) -> None:
    x = sample(3, 4)
    rows = np.array([0, 2, 0, 1], dtype)
    assert_derivatives(squared(lambda x, i: x[i]), x, rows, order=2)
    assert_derivatives(squared(lambda x, i: x[:, i]), x, rows, order=2)
    assert_derivatives(squared(lambda x, i: x[1:, i]), x, rows, order=2)
    assert_derivatives(squared(lambda x, i, j: x[i, j]), x, rows, rows, order=2)
    assert_derivatives(squared(lambda x, i: x[i, 1]), x, dtype(2), order=2)
    assert_derivatives(squared(lambda x, i, j: x[i, j]), x, dtype(2), rows, order=2)


def test_keys_with_bounds_and_masks_known_in_the_run() -> None:
    x = sample(4, 3)
    assert_derivatives(squared(lambda x, a, b: x[a:b]), x, np.int64(1), np.int64(3), order=2)
    assert_derivatives(squared(lambda x, a: x[a::2, 1]), x, np.int64(1), order=2)
    assert_derivatives(squared(lambda x, a: x[::a]), x, np.int64(-2), order=2)
    assert_derivatives(squared(lambda x, a, i: x[a:, i]), x, np.int64(1), np.array([1, 1, 0]), order=2)
    assert_derivatives(squared(lambda x, m: x[m]), x, x > 0, order=2)
    assert_derivatives(squared(lambda x, m: x[m]), x, np.zeros(4, bool), order=2)
    assert_derivatives(squared(lambda x: x[af.square(x) > 0.5]), x, order=2)


def test_rank_zero_and_size_zero() -> None:
    assert_derivatives(squared(lambda x: x[...]), np.float64(2.0), order=2)
    assert_derivatives(squared(lambda x: x[None]), np.float64(2.0), order=2)
    assert_derivatives(squared(lambda x: x[1:]), sample(0, 3), order=2)
    assert_derivatives(squared(lambda x: x[:, [0, 0]]), sample(0, 3), order=2)


def test_repeated_indices_add_in_every_dtype() -> None:
    rows = np.array([0, 0, 0, 1])
    for dtype in ("float16", "float32", "float64", "complex64"):
        grad = np.array([[1, 2], [3, 4], [5, 6], [7, 8]], dtype)
        (found,) = gradients_at(lambda x: x[rows], np.zeros((3, 2), dtype), grad=[grad])
        assert found is not None
        assert found.dtype == dtype
        assert found.tolist() == [[9, 12], [7, 8], [0, 0]]


def test_integers_get_no_gradient() -> None:
    assert gradients_at(lambda x, y: y * af.astype(x[0], "float64"), np.array([1, 2]), np.float64(2.0))[0] is None


def test_many_rows_of_a_large_table() -> None:
    """An embedding has such rows; the sums equal a loop's."""
    rng = np.random.default_rng(3)
    rows, grad = rng.integers(-50, 50, (7, 30)), rng.normal(size=(4, 7, 30, 8))
    (found,) = gradients_at(lambda x: x[:, rows], np.zeros((4, 50, 8)), grad=[grad])
    expected = np.zeros((4, 50, 8))
    for place in np.ndindex(rows.shape):
        expected[:, rows[place]] += grad[:, *place]
    assert found is not None
    np.testing.assert_allclose(found, expected, rtol=1e-12)


# -- take ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [0, 1, -1, -3])
@pytest.mark.parametrize("indices", [[0, 1, 1], [[0, -1], [1, 1]], 1, []], ids=str)
def test_take(axis: int, indices: Any) -> None:
    positions = np.array(indices, np.int64)
    assert_derivatives(squared(lambda x, i: af.take(x, i, axis=axis)), sample(2, 3, 2), positions, order=2)


def test_take_of_a_vector_and_gather() -> None:
    assert_derivatives(squared(lambda x: af.take(x, [2, 2, 0])), sample(3), order=2, known=("all", "rank"))
    assert_derivatives(squared(af.gather), sample(3, 2), np.array([1, 1], np.uint64), order=2)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_take_along_axis(axis: int) -> None:
    build = squared(lambda x, i: af.take_along_axis(x, i, axis=axis))
    assert_derivatives(build, sample(2, 3), np.array([[0, 1, 1], [0, 0, -1]]), order=2)
    assert_derivatives(build, sample(2, 3), np.zeros((2, 0) if axis else (0, 3), np.int64))


def test_take_along_axis_broadcasts() -> None:
    build = squared(lambda x, i: af.take_along_axis(x, i, axis=1))
    assert_derivatives(build, sample(1, 3), np.array([[0, 1, 1], [0, 0, 2]]), order=2)
    assert_derivatives(build, sample(2, 3), np.array([[0, 0]]), order=2)
    assert_derivatives(squared(af.take_along_axis), sample(3), np.array([2, 2]), order=2)


# -- changed copies --------------------------------------------------------------------------------------------------

CHANGES = [
    (1, (4,)),
    (slice(0, 2), (2, 4)),
    (slice(0, 2), (4,)),
    (slice(0, 2), ()),
    ((..., -1), (3,)),
    ([2, 0], (2, 4)),
    ([2, 0], (1, 4)),
    (([0, 1], [2, 2]), (2,)),
    (np.array([True, False, True]), (2, 4)),
]


@pytest.mark.parametrize(("key", "shape"), CHANGES, ids=str)
@pytest.mark.parametrize("change", [af.index_add, af.index_update])
def test_changed_copies(change: Any, key: Any, shape: tuple[int, ...]) -> None:
    build = squared(lambda x, v: change(x, key, v))
    assert_derivatives(build, sample(3, 4), np.asarray(sample(*shape, seed=1)), order=2)


@pytest.mark.parametrize("change", [af.scatter_add, af.scatter_update])
def test_scatters(change: Any) -> None:
    rows = np.array([2, 0])
    assert_derivatives(squared(lambda x, v, i: change(x, i, v)), sample(3, 4), sample(2, 4, seed=1), rows, order=2)
    build = squared(lambda x, v, i: change(x, i, v, axis=-1))
    assert_derivatives(build, sample(3, 4), sample(3, 2, seed=1), rows, order=2)
    assert_derivatives(build, sample(3, 4), sample(3, 1, seed=1), rows, order=2)


def test_additions_to_one_element_all_count() -> None:
    rows = np.array([1, 1, 0])
    assert_derivatives(squared(lambda x, v: af.scatter_add(x, rows, v)), sample(3), sample(3, seed=1), order=2)


def test_of_several_updates_of_one_element_the_surviving_one_counts() -> None:
    rows = np.array([1, 1, 0, 1])
    build = squared(lambda x, v: af.scatter_update(x, rows, v))
    assert_derivatives(build, sample(3), sample(4, seed=1), order=2)
    assert_derivatives(build, sample(3, 2), sample(4, 2, seed=1), order=2)
    assert_derivatives(build, sample(3, 2), sample(1, 2, seed=1), order=2)


def test_positions_known_in_the_run() -> None:
    x, v = sample(3, 4), sample(4, seed=1)
    for change in (af.index_add, af.index_update):
        assert_derivatives(squared(lambda x, v, i, f=change: f(x, i, v)), x, v, np.int64(1), order=2)
        assert_derivatives(squared(lambda x, v, a, f=change: f(x, slice(a, None), v)), x, v, np.int64(1), order=2)


# -- sums of gradients -----------------------------------------------------------------------------------------------


def taken_apart(build: Callable[..., Any]) -> Callable[..., af.Tensor]:
    """Return the gradient of a sum of what `build` takes of x: x times the number of times that each element was
    taken.
    """

    def total(x: af.Tensor, *others: af.Tensor) -> af.Tensor:
        back: list[af.Tensor] = []
        for y in build(x, *others):
            rule = derivative_of(y.node.op)
            assert rule is not None
            back += [grad for grad in rule(y.node, y)[:1] if grad is not None]
        return sum_of_gradients(back)

    return total


def ops_of_sum(build: Callable[..., Any], shape: tuple[int | None, ...] | None) -> list[str]:
    """Return the ops that the sum needs."""
    with af.Graph():
        total = taken_apart(build)(af.placeholder("float64", shape))
    return [total.node.op.name, *(x.node.op.name for x in total.node.inputs if x.node.op.name in ("add", "scatter_to"))]


SIDE_BY_SIDE = [
    lambda x: [x[:, 4:], x[:, :2], x[:, 2:4]],
    lambda x: [x[..., -3:], x[..., 0:3]],
    lambda x: [x[:, :0], x[:, 0:6]],
]
OTHERS = [
    lambda x: [x[:, :2], x[:, 3:]],
    lambda x: [x[:, :3], x[:, 2:]],
    lambda x: [x[:, ::2], x[:, 1::2]],
    lambda x: [x[:1], x[:, 1:]],
    lambda x: [x[0], x[1], x[0], x[0, 1]],
    lambda x: [x[[0, 0]], x[1:], x[:, [1, 1]]],
    lambda x: [x[:, : af.size(x) // 4], x[:, 3:]],
    lambda x: [x[None, :, :3], x[None, :, 3:]],
]


@pytest.mark.parametrize("build", SIDE_BY_SIDE)
@pytest.mark.parametrize("shape", [(2, 6), (None, 6)])
def test_slices_side_by_side_are_joined(build: Any, shape: tuple[int | None, ...]) -> None:
    """As the gates of an LSTM are, in whatever order and notation."""
    assert ops_of_sum(build, shape) == ["concat"]


@pytest.mark.parametrize("build", OTHERS)
@pytest.mark.parametrize("shape", [(2, 6), (None, None), None])
def test_other_slices_come_back_in_one_array(build: Any, shape: tuple[int | None, ...] | None) -> None:
    assert ops_of_sum(build, shape) == ["scatter_to"]


def test_one_slice_and_slices_beside_others() -> None:
    assert ops_of_sum(lambda x: [x[0]], (2, 6)) == ["scatter_to"]
    assert ops_of_sum(lambda x: [x[0], x * 2.0, x[1]], (2, 6)) == ["add", "scatter_to"]
    assert ops_of_sum(lambda x: [x * 2.0, x * 3.0], (2, 6)) == ["add"]


@pytest.mark.parametrize("build", [*SIDE_BY_SIDE, *OTHERS, lambda x: [x[0], x[1], x[:, 1:], af.positive(x)]])
def test_sums_of_slices_equal_sums_of_whole_arrays(build: Any) -> None:
    x = sample(2, 6)
    with af.Graph():
        takes = len(build(af.placeholder("float64", x.shape)))
    singles = [gradients_at(lambda x, k=k: af.sum(build(x)[k]), x, grad=[1.0])[0] for k in range(takes)]
    counts = np.sum([single for single in singles if single is not None], axis=0)
    for known in ("all", "rank", "nothing"):
        (grad,) = gradients_at(taken_apart(build), x, grad=[np.ones_like(x)], known=known)
        assert grad is not None
        np.testing.assert_array_equal(grad, counts)
    assert_derivatives(squared(taken_apart(build)), x, order=2)


# -- what is kept, and errors ----------------------------------------------------------------------------------------


def test_only_shapes_and_indices_are_kept() -> None:
    x = sample(3, 4)
    assert kept_values(lambda x: x[1:, 0], x) == set()
    assert kept_values(lambda x, i: x[i], x, np.array([0])) == {"x1"}
    assert kept_values(lambda x, i: af.take(x, i, axis=1), x, np.array([0])) == {"x1"}
    assert kept_values(lambda x, v: af.index_add(x, 1, v), x, x[0]) == set()


def test_a_position_out_of_range_is_an_error_in_the_gradient_too() -> None:
    for rows in (np.array([0, 4]), np.array([-5]), np.array([7], np.uint8)):
        with pytest.raises(IndexError, match=f"index {rows[-1]} is out of bounds for axis 0 with size 4"):
            gradients_at(lambda x, i: x[i], sample(4), rows, grad=[np.ones(len(rows))])
