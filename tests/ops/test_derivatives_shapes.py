"""Broadcasting undone: known shapes are used and kept, and extents that only look equal are not taken for equal."""

from __future__ import annotations

import numpy as np
import pytest

from asyncflow.autodiff.gradients import gradients
from asyncflow.control.stores.tensor_array import TensorArray
from asyncflow.graph.building.build import identity, placeholder
from asyncflow.graph.graph import Graph
from asyncflow.graph.values.dtypes import VARIANT
from asyncflow.ops.arrays.shape import shape
from asyncflow.ops.derivatives.dtypes import in_dtype_of
from asyncflow.ops.derivatives.shapes import carries_gradient, sum_to, sum_to_like
from tests.autodiff.sweep import KNOWN, assert_derivatives, gradients_at


def test_equal_static_shapes_need_no_sum() -> None:
    with Graph():
        x = placeholder("float64", (2, 3))
        assert sum_to(x, (2, 3)) is x
        assert sum_to_like(x, placeholder("float64", (2, 3))) is x


def test_unknown_extents_that_look_alike_may_differ() -> None:
    """Both are ``[?,3]`` while the graph is built; in the run one is [1,3], the other [4,3]."""
    with Graph():
        x = placeholder("float64", (None, 3))
        like = placeholder("float64", (None, 3))
        summed = sum_to(x, (shape(like)[0], 3))
        assert summed is not x
        assert summed.shape == (None, 3)
    (of_x, of_like) = gradients_at(lambda a, b: a * b, np.ones((1, 3)), np.full((4, 3), 2.0), known="rank")
    assert of_x is not None and of_x.shape == (1, 3)
    assert of_like is not None and of_like.shape == (4, 3)


@pytest.mark.parametrize("known", [None, (None, None), (None, 3), (4, 3)])
def test_the_gradient_has_the_known_extents_of_its_value(known: tuple[int | None, ...] | None) -> None:
    """The gradient's shape is known even if the shape of the incoming gradient is not; so is the gradient's
    gradient.
    """
    with Graph():
        x, grad = placeholder("float64", known), placeholder("float64", None)
        reached = sum_to_like(grad, x)
        assert reached.shape == known
        assert gradients(reached * reached, grad).shape is None


@pytest.mark.parametrize("known", KNOWN)
@pytest.mark.parametrize("extents", [(1, 3), (4, 1), (3,), (1,), ()])
def test_broadcasting_both_ways(extents: tuple[int, ...], known: str) -> None:
    """A factor that is stretched, in first and second order."""
    x, y = np.arange(12.0).reshape(4, 3) / 5 + 0.4, np.full(extents, 1.3)
    assert_derivatives(lambda a, b: a * b * b, x, y, order=2, known=(known,))


def test_arrays_carry_gradients() -> None:
    """Ops that pass values on pass the gradients of arrays, too."""
    with Graph():
        array = TensorArray("float64", 1).write(0, placeholder("float64", (2,)))
        assert array.handle.dtype == VARIANT
        assert carries_gradient(array.handle.spec)
        assert in_dtype_of(array.handle, identity(array.handle)) is array.handle


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64"])
def test_floats_carry_gradients(dtype: str) -> None:
    with Graph():
        x = placeholder(dtype, (2,))
        assert carries_gradient(x.spec)
        assert gradients(x * x, x, x).spec == x.spec


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint64", "string"])
def test_other_values_carry_none(dtype: str) -> None:
    with Graph():
        assert not carries_gradient(placeholder(dtype, (2,)).spec)
