"""Norms of vectors and matrices, distances, and products of vectors, of what graphs have."""

from __future__ import annotations

import math
from typing import Literal

from asyncflow.errors import GraphError, ShapeError
from asyncflow.graph.building.build import TensorLike, as_tensor, graph_for
from asyncflow.graph.ir import Attrs, Tensor
from asyncflow.graph.values.dtypes import float64, summed_in
from asyncflow.graph.values.shapes import format_shape, normalize_axis
from asyncflow.ops.arithmetic.elementwise import abs, multiply, pow, sqrt, square, subtract
from asyncflow.ops.arithmetic.logic import equal, not_equal
from asyncflow.ops.arrays.datatypes import astype
from asyncflow.ops.arrays.manipulation import concat, expand_dims
from asyncflow.ops.arrays.splitting import split
from asyncflow.ops.axes import Axes, as_axes, static_int
from asyncflow.ops.matrices.decompositions import svdvals
from asyncflow.ops.promotion import kind_of, promote_operands, require_kind
from asyncflow.ops.reductions.statistical import max, min, sum
from asyncflow.ops.searching.searching import where


def vector_norm(x: TensorLike, /, *, axis: Axes = None, keepdims: bool = False, ord: float = 2) -> Tensor:
    """The norm of vectors: ``sum(abs(x) ** ord) ** (1 / ord)``, real.

    Args:
        x: numbers; integers count as float64.
        axis: over which one vector extends; several, or None for all.
        keepdims: leave `axis` with an extent of 1.
        ord: kind of norm: infinity takes the largest magnitude, -infinity the smallest, 0 counts non-zero elements.

    The gradient of norms above 1 is 0 where the norm is.
    """
    with graph_for(x):
        sizes = _magnitudes(x)
        wide = summed_in(sizes.dtype)
        if wide != sizes.dtype:
            norm = vector_norm(astype(sizes, wide), axis=axis, keepdims=keepdims, ord=ord)
            return astype(norm, sizes.dtype)
        over: Attrs = {"axis": as_axes(axis), "keepdims": bool(keepdims)}
        if ord == math.inf:
            return max(sizes, **over)
        if ord == -math.inf:
            return min(sizes, **over)
        if ord == 0:
            return sum(astype(not_equal(sizes, 0), sizes.dtype), **over)
        if ord == 1:
            return sum(sizes, **over)
        if ord == 2:
            return _root(sum(square(sizes), **over))
        total = sum(pow(sizes, float(ord)), **over)
        return _root(total, float(ord)) if ord > 1 else pow(total, 1 / float(ord))


def cdist(x1: TensorLike, x2: TensorLike, /, *, ord: float = 2) -> Tensor:
    """Distances of each row of `x1` to each row of `x2`: the `vector_norm` of their difference.

    Args:
        x1: numbers, of shape ``[..., m, d]``.
        x2: numbers, of shape ``[..., n, d]``; axes before the last two broadcast.
        ord: which norm, as of `vector_norm`.

    Returns:
        Floats, of shape ``[..., m, n]``. All differences are computed, ``m * n * d`` numbers. The gradient of
        norms above 1 is 0 where two rows are equal.

    Raises:
        ShapeError: an operand is no matrix, or their rows differ in length.
    """
    with graph_for(x1, x2):
        one, other = promote_operands(x1, x2)
        for each in (one, other):
            if each.shape is not None and len(each.shape) < 2:
                raise ShapeError(f"cdist takes matrices, or stacks of them; got {each.spec}")
        return vector_norm(subtract(expand_dims(one, axis=-2), expand_dims(other, axis=-3)), axis=-1, ord=ord)


def _magnitudes(x: TensorLike) -> Tensor:
    tensor = as_tensor(x)
    require_kind(tensor.spec, "biufc", "numbers")
    return abs(astype(tensor, float64) if kind_of(tensor.dtype) in "biu" else tensor)


def _root(x: Tensor, degree: float = 2.0) -> Tensor:
    """The root of a degree, with the gradient 0 at 0."""
    is_zero = equal(x, 0)
    away = where(is_zero, 1.0, x)
    return where(is_zero, 0.0, sqrt(away) if degree == 2.0 else pow(away, 1 / degree))


def matrix_norm(x: TensorLike, /, *, keepdims: bool = False, ord: float | Literal["fro", "nuc"] = "fro") -> Tensor:
    """The norm of the matrices in the last two axes, real.

    Args:
        x: numbers, of rank 2 or more; integers count as float64.
        keepdims: leave the two axes with an extent of 1.
        ord: ``"fro"``: the root of the sum of squares; ``"nuc"``: the sum of singular values; 2 and -2: the largest and
            the smallest of them; 1 and -1: the largest and smallest sum of magnitudes in a column, and
            infinity and -infinity in a row.

    Raises:
        GraphError: another `ord`.
        ShapeError: fewer axes.
    """
    with graph_for(x):
        tensor = as_tensor(x)
        if tensor.ndim is not None and tensor.ndim < 2:
            raise ShapeError(f"matrix_norm: takes matrices, of rank 2 or more; got {tensor!r}")
        if ord == "fro":
            return vector_norm(tensor, axis=(-2, -1), keepdims=keepdims)
        found = _matrix_norm(tensor, ord)
        return expand_dims(found, axis=(-2, -1)) if keepdims else found


def _matrix_norm(x: Tensor, ord: object) -> Tensor:
    if ord in (1, -1):
        return (max if ord == 1 else min)(sum(_magnitudes(x), axis=-2), axis=-1)
    if ord in (math.inf, -math.inf):
        return (max if ord == math.inf else min)(sum(_magnitudes(x), axis=-1), axis=-1)
    if ord not in ("nuc", 2, -2):
        raise GraphError(f"matrix_norm: ord is 'fro', 'nuc', 1, -1, 2, -2, inf or -inf, got {ord!r}")
    values = svdvals(astype(x, float64) if kind_of(x.dtype) in "biu" else x)
    return {"nuc": sum, 2: max, -2: min}[ord](values, axis=-1)


def outer(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """The products of each element of the vector `x1` with each of the vector `x2`: a matrix.

    Raises:
        ShapeError: one is no vector.
    """
    with graph_for(x1, x2):
        left, right = promote_operands(x1, x2)
        for x in (left, right):
            if x.ndim not in (1, None):
                raise ShapeError(f"outer: takes vectors, got {x!r}")
        return multiply(left[:, None], right[None, :])


def cross(x1: TensorLike, x2: TensorLike, /, *, axis: int = -1) -> Tensor:
    """The cross product of vectors of 3 elements along `axis`; the other axes broadcast.

    Args:
        x1: numbers.
        x2: likewise.
        axis: below 0 where the ranks differ.

    Raises:
        ShapeError: another number of elements; where it is not known, the run fails instead.
    """
    at = static_int(axis, "axis")
    with graph_for(x1, x2):
        operands = promote_operands(x1, x2)
        for x in operands:
            require_kind(x.spec, "iufc", "numbers")
            if x.shape is not None and x.shape[normalize_axis(at, len(x.shape))] not in (3, None):
                raise ShapeError(f"cross: vectors have 3 elements, along axis {at}; got {format_shape(x.shape)}")
        (a, b, c), (d, e, f) = (split(x, (1, 1, 1), axis=at) for x in operands)
        return concat([b * f - c * e, c * d - a * f, a * e - b * d], axis=at)
