"""Bounds for gradients. Each takes a nest of float tensors, in which None stands for no gradient and stays None."""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING, Any

from asyncflow.errors import GraphError, user_location
from asyncflow.graph import nest
from asyncflow.graph.build import as_tensor, constant
from asyncflow.graph.dtypes import float32
from asyncflow.graph.ir import Tensor
from asyncflow.ops.datatypes import astype
from asyncflow.ops.elementwise import add, clip, maximum, sqrt, square
from asyncflow.ops.promotion import is_weak
from asyncflow.ops.statistical import sum

if TYPE_CHECKING:
    from asyncflow.graph.build import TensorLike


def clip_by_value(grads: Any, low: TensorLike, high: TensorLike) -> Any:
    """`grads` with every element at least `low` and at most `high`.

    >>> import asyncflow as af
    >>> with af.Graph():
    ...     clip_by_value([af.ones(3), None], -0.5, 0.5)
    [<Tensor clip:0 float64[3]>, None]
    """
    leaves, structure = nest.flatten(grads)
    return structure.unflatten([clip(as_tensor(x), low, high) for x in leaves])


def clip_by_norm(grads: Any, max_norm: TensorLike) -> Any:
    """Each of `grads` scaled down, if need be, to a Euclidean norm of `max_norm`, by itself.

    Args:
        grads: a nest of floats.
        max_norm: above 0; a number or a scalar tensor.
    """
    _check_norm(max_norm)
    leaves, structure = nest.flatten(grads)
    tensors = [as_tensor(leaf) for leaf in leaves]
    return structure.unflatten([_scaled(x, sqrt(_squares(x)), max_norm) for x in tensors])


def clip_by_global_norm(grads: Any, max_norm: TensorLike) -> tuple[Any, Tensor]:
    """`grads` all scaled down by one factor, if need be, so that together they have a Euclidean norm of `max_norm`.

    Args:
        grads: a nest of floats.
        max_norm: above 0; a number or a scalar tensor.

    Returns:
        The scaled nest, and the norm that `grads` had: a scalar of their dtype, float32 at least. Where it is not
        finite the scaled gradients are not either.

    Raises:
        GraphError: there is no gradient in `grads`, or `max_norm` is a number that is not above 0.
    """
    _check_norm(max_norm)
    leaves, structure = nest.flatten(grads)
    tensors = [as_tensor(leaf) for leaf in leaves]
    if not tensors:
        raise GraphError(f"clip_by_global_norm: there is no gradient in {grads!r}\n  written at {user_location()}")
    norm = sqrt(reduce(add, [_squares(x) for x in tensors]))
    return structure.unflatten([_scaled(x, norm, max_norm) for x in tensors]), norm


def _check_norm(max_norm: TensorLike) -> None:
    if isinstance(max_norm, int | float) and not max_norm > 0:
        raise GraphError(f"max_norm is above 0; got {max_norm!r}\n  written at {user_location()}")


def _squares(x: Tensor) -> Tensor:
    """The sum of the squares of all elements, in float32 at least: half precision ends at 65504."""
    return sum(square(x if x.dtype.itemsize >= float32.itemsize else astype(x, float32)))


def _scaled(x: Tensor, norm: Tensor, max_norm: TensorLike) -> Tensor:
    bound = constant(max_norm, norm.dtype) if is_weak(max_norm) else astype(max_norm, norm.dtype)
    factor = bound / maximum(norm, bound)
    return x * (factor if factor.dtype == x.dtype else astype(factor, x.dtype))


__all__ = ["clip_by_global_norm", "clip_by_norm", "clip_by_value"]
