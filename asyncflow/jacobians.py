"""Jacobians, Hessians and products with them: gradients for all elements of a value at once, by `vmap`."""

from __future__ import annotations

from asyncflow.autodiff.gradients import gradients
from asyncflow.errors import DTypeError, GraphError, ShapeError
from asyncflow.graph.building.build import TensorLike, as_tensor, graph_for, symbolic
from asyncflow.graph.ir import Tensor
from asyncflow.graph.values import nest
from asyncflow.graph.values.dtypes import dtype_name
from asyncflow.graph.values.shapes import format_shape, is_compatible, size_of
from asyncflow.lift.vmap import vmap
from asyncflow.ops.arrays.creation import eye
from asyncflow.ops.arrays.datatypes import isdtype
from asyncflow.ops.arrays.manipulation import reshape
from asyncflow.ops.arrays.shape import extent_of, size
from asyncflow.ops.derivatives.shapes import carries_gradient
from asyncflow.state.variables.variable import Variable
from asyncflow.values import Nest


def jacobian(y: Tensor, xs: Nest) -> Nest:
    """The derivative of each element of `y` by each element of `xs`: shape ``y.shape + x.shape`` for each of them.

    The gradients of all elements of `y` are computed together, as rows of `vmap`.

    Args:
        y: floats, of known rank.
        xs: a tensor or `Variable` that `y` depends on, of known rank, or a nest of them.

    Returns:
        A nest like `xs`; zeros where `y` does not depend on one.

    Raises:
        ShapeError: a rank is not known.
        DTypeError: `y` is not of floats, or an x has no gradient, as integers have none.
        GraphError: from `gradients`, or as there is no derivative that is computed for several rows at once.

    >>> import asyncflow as af
    >>> with af.Graph():
    ...     x = af.placeholder("float64", (3,))
    ...     af.jacobian(x[:2] * af.sum(x), x)
    <Tensor reshape_1:0 float64[2,3]>
    """
    leaves, structure = nest.flatten(xs)
    with graph_for(y, *leaves):
        target = _differentiable("jacobian: y", y, is_y=True)
        extents = [_extents(target), *(_extents(_differentiable("jacobian: an x", leaf)) for leaf in leaves)]
        count = size_of(target.shape)
        rows = size(target) if count is None else count
        units = reshape(eye(rows, dtype=target.dtype), (rows, *extents[0]))
        found = vmap(lambda unit: tuple(gradients([target], leaves, [unit], unconnected="zero")))(units)
        shaped = [reshape(x, (*extents[0], *own)) for x, own in zip(found, extents[1:], strict=True)]
        return structure.unflatten(shaped)


def hessian(y: Tensor, x: Tensor | Variable) -> Tensor:
    """The second derivatives of the scalar `y` by the elements of `x`: shape ``x.shape + x.shape``.

    Args:
        y: a float.
        x: a tensor or `Variable` that `y` depends on, of known rank.

    Raises:
        ShapeError: `y` is no scalar, or the rank of `x` is not known.
        DTypeError: `y` is not of floats, or `x` has no gradient.
    """
    found = jacobian(_slope(y, x), x)
    return as_tensor(found)


def hvp(y: Tensor, x: Tensor | Variable, v: TensorLike) -> Tensor:
    """The Hessian of the scalar `y` by `x`, times `v`, without the Hessian: about the cost of two gradients.

    Args:
        y: a float.
        x: a tensor or `Variable` that `y` depends on.
        v: of the shape and dtype of `x`.

    Raises:
        ShapeError: `y` is no scalar, or `v` of another shape.
        DTypeError: `y` is not of floats, `x` has no gradient, or `v` is of another dtype.
    """
    slope = _differentiable("hvp: the gradient by x", _slope(y, x), is_y=True)
    with graph_for(slope):
        weights = as_tensor(v) if hasattr(v, "dtype") else as_tensor(v, slope.dtype)
    if weights.dtype != slope.dtype:
        raise DTypeError(
            f"hvp: v has the dtype of x, {dtype_name(slope.dtype)}; got {weights!r}: convert it with af.astype"
        )
    if not is_compatible(weights.shape, slope.shape):
        raise ShapeError(f"hvp: v has the shape of x, {format_shape(slope.shape)}; got {weights!r}")
    (found,) = gradients([slope], [x], [weights], unconnected="zero")
    return as_tensor(found)


def _slope(y: Tensor, x: Tensor | Variable) -> Tensor:
    target = _differentiable("second derivatives: y", y, is_y=True)
    if target.shape != ():
        raise ShapeError(f"second derivatives need a scalar, not {y!r}; af.jacobian takes any shape")
    _differentiable("second derivatives: x", x)
    (slope,) = gradients([target], [x], unconnected="zero")
    return as_tensor(slope)


def _differentiable(what: str, x: TensorLike, *, is_y: bool = False) -> Tensor:
    value = symbolic(x)
    if not isinstance(value, Tensor):
        raise GraphError(f"{what} is a tensor or a variable; got {x!r}")
    if not carries_gradient(value.spec):
        raise DTypeError(f"{what} is of floats, since others have no gradient; got {x!r}")
    if is_y and not isdtype(value.dtype, "real floating"):
        raise DTypeError(f"{what} is of floats; differentiate the real and the imaginary part of {x!r}, each by itself")
    return value


def _extents(x: Tensor) -> list[int | Tensor]:
    if x.shape is None:
        raise ShapeError(f"jacobian: the rank of {x!r} is not known while the graph is built")
    return [extent_of(x, axis) for axis in range(len(x.shape))]
