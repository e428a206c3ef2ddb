"""Bounds for gradients. Each takes a nest of floats, in which None stands for no gradient and stays None."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce

from asyncflow.errors import DTypeError, GraphError
from asyncflow.graph.building.build import TensorLike, as_tensor
from asyncflow.graph.ir import Tensor
from asyncflow.graph.values import nest
from asyncflow.graph.values.dtypes import float32, float64
from asyncflow.ops.arithmetic.elementwise import add, clip, maximum, sqrt, square
from asyncflow.ops.arithmetic.logic import isfinite
from asyncflow.ops.promotion import kind_of, promoted_dtype
from asyncflow.ops.reductions.statistical import sum
from asyncflow.ops.searching.searching import where
from asyncflow.optim.scalars import as_dtype_of, as_scalar, is_number
from asyncflow.values import Nest


def clip_by_value(grads: Nest, low: TensorLike, high: TensorLike) -> Nest:
    """`grads` with every element at least `low` and at most `high`.

    Args:
        grads: a nest of floats.
        low: a number, or a tensor of the same dtype that broadcasts with each of them.
        high: likewise.

    Raises:
        DTypeError: `grads` are no floats.

    >>> import asyncflow as af
    >>> with af.Graph():
    ...     clip_by_value([af.ones(3), None], -0.5, 0.5)
    [<Tensor clip:0 float64[3]>, None]
    """
    tensors, structure = _floats("clip_by_value", grads)
    return structure.unflatten([clip(x, low, high) for x in tensors])


def clip_by_norm(grads: Nest, max_norm: TensorLike) -> Nest:
    """Scale each of `grads` down, if need be, to a Euclidean norm of `max_norm`, by itself.

    Args:
        grads: a nest of floats.
        max_norm: above 0; a number or a scalar tensor.

    Returns:
        The scaled nest, of the dtypes and shapes of `grads`. Gradients with an infinite or NaN norm become NaN.

    Raises:
        GraphError: `max_norm` is a number that is not above 0.
        DTypeError, ShapeError: `grads` are no floats, or `max_norm` is no scalar.
    """
    _check_norm("clip_by_norm", max_norm)
    tensors, structure = _floats("clip_by_norm", grads)
    factors = [_factor("clip_by_norm", _norm([x]), max_norm) for x in tensors]
    return structure.unflatten([_scaled(x, factor) for x, factor in zip(tensors, factors, strict=True)])


def clip_by_global_norm(grads: Nest, max_norm: TensorLike) -> tuple[Nest, Tensor]:
    """`grads` all scaled down by one factor, if need be, so that together they have a Euclidean norm of `max_norm`.

    Args:
        grads: a nest of floats.
        max_norm: above 0; a number or a scalar tensor.

    Returns:
        The scaled nest, and the norm that `grads` had: a scalar of their dtype, float32 at least. Where it is not
        finite, all scaled gradients are NaN. Squares are added up in float64, so float32 gradients do not overflow.

    Raises:
        GraphError: there is no gradient in `grads`, or `max_norm` is a number that is not above 0.
        DTypeError, ShapeError: `grads` are no floats, or `max_norm` is no scalar.
    """
    _check_norm("clip_by_global_norm", max_norm)
    tensors, structure = _floats("clip_by_global_norm", grads)
    if not tensors:
        raise GraphError(f"clip_by_global_norm: there is no gradient in {grads!r}")
    norm = _norm(tensors)
    factor = _factor("clip_by_global_norm", norm, max_norm)
    return structure.unflatten([_scaled(x, factor) for x in tensors]), norm


def _floats(what: str, grads: Nest) -> tuple[list[Tensor], nest.Structure]:
    leaves, structure = nest.flatten(grads)
    tensors = [as_tensor(leaf) for leaf in leaves]
    for x in tensors:
        if kind_of(x.dtype) != "f":
            raise DTypeError(f"{what}: takes gradients that are floats; got {x!r}")
    return tensors, structure


def _check_norm(what: str, max_norm: TensorLike) -> None:
    if is_number(max_norm) and not max_norm > 0:
        raise GraphError(f"{what}: max_norm is above 0; got {max_norm!r}")


def _norm(tensors: Sequence[Tensor]) -> Tensor:
    """The norm of all elements together, in their common dtype, float32 at least."""
    squares = reduce(add, [sum(square(as_dtype_of(x, float64))) for x in tensors])
    return as_dtype_of(sqrt(squares), promoted_dtype([float32, *(x.dtype for x in tensors)]))


def _factor(what: str, norm: Tensor, max_norm: TensorLike) -> Tensor:
    """The factor to multiply by, at most 1."""
    bound = as_scalar(f"{what}: max_norm", max_norm, norm.dtype)
    # NaN for an infinite norm: a factor of 0 would hide the failure.
    return where(isfinite(norm), bound / maximum(norm, bound), math.nan)


def _scaled(x: Tensor, factor: Tensor) -> Tensor:
    return x * as_dtype_of(factor, x.dtype)
