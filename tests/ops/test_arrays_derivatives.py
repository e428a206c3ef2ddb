"""Derivatives of manipulation, casts, broadcasting and creation against central differences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.graph.values.dtypes import bfloat16
from tests.autodiff.sweep import assert_derivatives, gradients_at, kept_values

if TYPE_CHECKING:
    from collections.abc import Callable

KNOWN_RANK = ("all", "rank")


def sample(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def squared(build: Callable[..., Any]) -> Callable[..., Any]:
    """The outputs squared, so that the second derivative is not zero."""

    def squares(*inputs: af.Tensor) -> list[af.Tensor]:
        built = build(*inputs)
        return [af.square(y) for y in ([built] if isinstance(built, af.Tensor) else built)]

    return squares


# -- joining ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [0, 1, -1, None])
def test_concat(axis: int | None) -> None:
    build = squared(lambda x, y, z: af.concat([x, y, z], axis=axis))
    assert_derivatives(build, sample(2, 3), sample(2, 3, seed=1), sample(2, 3, seed=2), order=2)


def test_concat_of_different_extents_and_repeated_inputs() -> None:
    build = squared(lambda x, y: af.concat([x, y, x], axis=1))
    assert_derivatives(build, sample(2, 3), sample(2, 0), order=2)
    assert_derivatives(squared(lambda x: af.concat([x])), sample(3))
    assert_derivatives(squared(lambda x, y: af.concat([x, y], axis=None)), sample(2, 3), np.float64(1.5))


def test_concat_promotes_and_gives_back_each_dtype() -> None:
    whole, narrow, wide, plane = gradients_at(
        lambda i, x, y, z: af.concat([i, x, y, z]),
        np.array([1, 2]),
        np.ones(1, np.float32),
        np.ones(1),
        np.ones(1, np.complex64),
        grad=[[1, 2, 3 + 1j, 4 + 1j, 5 + 1j]],
    )
    assert whole is None
    assert narrow is not None and wide is not None and plane is not None
    assert (narrow.dtype, wide.dtype, plane.dtype) == (np.float32, np.float64, np.complex64)
    assert (narrow.tolist(), wide.tolist(), plane.tolist()) == ([3.0], [4.0], [5 + 1j])


@pytest.mark.parametrize("axis", [0, 1, -1, -2])
def test_stack(axis: int) -> None:
    assert_derivatives(squared(lambda x, y: af.stack([x, y], axis=axis)), sample(3), sample(3, seed=1), order=2)


def test_stack_of_scalars_and_of_integers() -> None:
    assert_derivatives(squared(lambda x, y: af.stack([x, y, x])), np.float64(2.0), np.float64(3.0), order=2)
    assert_derivatives(squared(lambda x, i: af.stack([x, i])), sample(2), np.array([1, 2]))


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_unstack(axis: int) -> None:
    assert_derivatives(squared(lambda x: af.unstack(x, axis=axis)), sample(3, 2), order=2, known=("all",))


def test_unstack_of_which_one_part_is_used() -> None:
    assert_derivatives(squared(lambda x: af.unstack(x)[1]), sample(3, 2), order=2, known=("all",))


# -- axes and order --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [0, 2, -1, (0, 3), (0, -1), ()])
def test_expand_dims(axis: Any) -> None:
    assert_derivatives(squared(lambda x: af.expand_dims(x, axis=axis)), sample(2, 3), order=2)


@pytest.mark.parametrize("axis", [1, -3, (1, 3), (-1, 1), ()])
def test_squeeze(axis: Any) -> None:
    assert_derivatives(squared(lambda x: af.squeeze(x, axis)), sample(2, 1, 3, 1), order=2)


@pytest.mark.parametrize("axes", [(2, 0, 1), (-1, 0, 1), (0, 1, 2)])
def test_permute_dims(axes: tuple[int, ...]) -> None:
    assert_derivatives(squared(lambda x: af.permute_dims(x, axes)), sample(2, 3, 4), order=2)


def test_moveaxis() -> None:
    assert_derivatives(squared(lambda x: af.moveaxis(x, (0, 2), (-1, 0))), sample(2, 3, 4), known=KNOWN_RANK)


@pytest.mark.parametrize("axis", [0, -1, (0, 1), None])
def test_flip(axis: Any) -> None:
    assert_derivatives(squared(lambda x: af.flip(x, axis=axis)), sample(2, 3), order=2)


@pytest.mark.parametrize(
    ("shift", "axis"), [(1, 0), (-2, 1), ((1, 2), (0, -1)), (4, None), (1, (0, 1)), ((1, 1), (0, 0))]
)
def test_roll(shift: Any, axis: Any) -> None:
    assert_derivatives(squared(lambda x: af.roll(x, shift, axis=axis)), sample(3, 4), order=2)


@pytest.mark.parametrize("dtype", [np.int64, np.uint8])
def test_roll_by_a_tensor(dtype: Any) -> None:
    assert_derivatives(squared(lambda x, by: af.roll(x, by, axis=-1)), sample(3, 4), dtype(3), order=2)


@pytest.mark.parametrize("shape", [(6,), (3, 2), (-1, 1, 3), (2, 3)])
def test_reshape(shape: tuple[int, ...]) -> None:
    assert_derivatives(squared(lambda x: af.reshape(x, shape)), sample(2, 3), order=2)


def test_reshape_of_scalars_and_of_nothing() -> None:
    assert_derivatives(squared(lambda x: af.reshape(x, (1, 1))), np.float64(2.0), order=2)
    assert_derivatives(squared(lambda x: af.reshape(x, (0, 5))), sample(2, 0), order=2)


def test_reshape_to_a_shape_known_in_the_run() -> None:
    assert_derivatives(squared(af.reshape), sample(2, 3), np.array([3, 2]), order=2)
    assert_derivatives(squared(lambda x, n: af.reshape(x, (n, -1))), sample(2, 3), np.int64(3), order=2)


# -- repeating -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("repeats", [2, 1, 0])
@pytest.mark.parametrize("axis", [0, 1, -2, None])
def test_repeat(repeats: int, axis: int | None) -> None:
    assert_derivatives(squared(lambda x: af.repeat(x, repeats, axis=axis)), sample(2, 3), order=2)


@pytest.mark.parametrize(
    ("counts", "axis"), [([2, 0, 1], 1), ([2, 0, 1], -1), ([3], 0), (2, 0), ([1, 0, 2, 1, 0, 3], None)]
)
def test_repeat_by_counts(counts: Any, axis: int | None) -> None:
    assert_derivatives(
        squared(lambda x, n: af.repeat(x, n, axis=axis)), sample(2, 3), np.array(counts, np.int32), order=2
    )


@pytest.mark.parametrize("repetitions", [2, (2, 3), (2, 1, 2), (0, 1), (), 1])
def test_tile(repetitions: Any) -> None:
    assert_derivatives(squared(lambda x: af.tile(x, repetitions)), sample(2, 3), order=2)


def test_tile_and_repeat_of_scalars_and_of_nothing() -> None:
    assert_derivatives(squared(lambda x: af.tile(x, (2, 2))), np.float64(2.0), order=2)
    assert_derivatives(squared(lambda x: af.tile(x, 2)), sample(2, 0))
    assert_derivatives(squared(lambda x: af.repeat(x, 3, axis=1)), sample(2, 0))
    assert_derivatives(squared(lambda x: af.repeat(x, 3)), np.float64(2.0), order=2)


def test_bfloat16_tiles_are_summed_in_float32() -> None:
    ones = np.ones(1, bfloat16())
    for build in (lambda x: af.tile(x, 1000), lambda x: af.repeat(x, 1000)):
        (grad,) = gradients_at(build, ones, grad=[np.ones(1000)])
        assert grad is not None
        assert grad.dtype == bfloat16()
        assert float(grad[0]) == 1000.0


# -- casts and broadcasting ------------------------------------------------------------------------------------------


def test_casts_between_floats_pass() -> None:
    (grad,) = gradients_at(lambda x: af.astype(x, "float64"), np.ones(2, np.float32), grad=[[0.1, 2.0]])
    assert grad is not None
    assert grad.dtype == np.float32
    np.testing.assert_array_equal(grad, np.array([0.1, 2.0], np.float32))
    assert_derivatives(squared(lambda x: af.astype(af.astype(x, "complex128"), "complex128")), sample(3), order=2)


def test_casts_to_and_from_integers_do_not() -> None:
    assert gradients_at(lambda x: af.astype(af.astype(x, "int32"), "float64"), sample(3)) == [None]
    assert gradients_at(lambda x: af.astype(x, "float64"), np.array([1, 2])) == [None]
    assert gradients_at(lambda x: af.astype(af.astype(x, "bool"), "float64"), sample(3)) == [None]


def test_a_real_tensor_made_complex_gets_the_real_part() -> None:
    (grad,) = gradients_at(lambda x: af.astype(x, "complex128"), np.ones(2), grad=[[1 + 2j, 3 - 1j]])
    assert grad is not None
    assert grad.tolist() == [1.0, 3.0]


@pytest.mark.parametrize("shape", [(2, 3), (4, 2, 3), (2, 2, 3)])
def test_broadcast_to(shape: tuple[int, ...]) -> None:
    assert_derivatives(squared(lambda x: af.broadcast_to(x, shape)), sample(1, 3), order=2)
    assert_derivatives(squared(lambda x: af.broadcast_to(x, shape)), np.float64(2.0), order=2)


def test_broadcast_to_a_shape_known_in_the_run() -> None:
    assert_derivatives(squared(af.broadcast_to), sample(2, 1), np.array([3, 2, 2]), order=2)


def test_broadcast_arrays() -> None:
    build = squared(lambda x, y, i: af.broadcast_arrays(x, y, i)[:2])
    assert_derivatives(build, sample(2, 1), sample(3), np.array([[1]]), order=2)
    assert_derivatives(squared(lambda x, y: af.broadcast_arrays(x, y)[1]), sample(2, 1), sample(3))


# -- creation --------------------------------------------------------------------------------------------------------


def test_full() -> None:
    assert_derivatives(squared(lambda v: af.full((2, 3), v)), np.float64(2.0), order=2)
    assert_derivatives(squared(lambda v, n: af.full((2, n), v)), np.float64(2.0), np.int64(4), order=2)
    assert_derivatives(squared(lambda v: af.full((0,), v)), np.float64(2.0))


def test_full_like() -> None:
    assert_derivatives(squared(af.full_like), sample(2, 3), np.float64(2.0), order=2)


def test_linspace() -> None:
    bounds = np.float64(1.0), np.float64(3.0)
    for endpoint in (True, False):
        for num in (5, 1, 0):
            build = squared(lambda a, b, n=num, end=endpoint: af.linspace(a, b, n, endpoint=end))
            assert_derivatives(build, *bounds, order=2)
    assert_derivatives(squared(af.linspace), *bounds, np.int64(4), order=2)


def test_linspace_from_an_integer_and_of_complex_numbers() -> None:
    assert_derivatives(squared(lambda a, b: af.linspace(a, b, 4)), np.int64(1), np.float64(3.0))
    assert_derivatives(squared(lambda a, b: af.linspace(a, b, 4)), np.complex128(1j), np.complex128(2 - 1j))


@pytest.mark.parametrize("k", [0, 1, -1])
@pytest.mark.parametrize("triangle", [af.tril, af.triu])
def test_triangles(triangle: Any, k: int) -> None:
    assert_derivatives(squared(lambda x: triangle(x, k=k)), sample(2, 3, 3), order=2)


@pytest.mark.parametrize("indexing", ["xy", "ij"])
def test_meshgrid(indexing: Any) -> None:
    build = squared(lambda *xs: af.meshgrid(*xs, indexing=indexing))
    assert_derivatives(build, sample(2), sample(3), np.float64(1.5), order=2)
    assert_derivatives(build, sample(2), order=2)
    some = squared(lambda x, y, i: af.meshgrid(x, y, i, indexing=indexing)[1])
    assert_derivatives(some, sample(2), sample(3), np.array([1, 2]))


# -- what is kept ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "build",
    [
        lambda x: af.concat([x, x], axis=1),
        lambda x: af.stack([x, x]),
        lambda x: af.reshape(x, (-1,)),
        lambda x: af.permute_dims(x, (1, 0)),
        lambda x: af.tile(x, 2),
        lambda x: af.repeat(x, 2, axis=0),
        lambda x: af.broadcast_to(x, (4, 2, 3)),
        lambda x: af.astype(x, "float32"),
        af.flip,
        lambda x: af.roll(x, 1),
        af.expand_dims,
    ],
)
def test_only_shapes_are_kept(build: Any) -> None:
    assert kept_values(build, sample(2, 3)) == set()
