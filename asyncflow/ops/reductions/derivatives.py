"""Derivatives of reductions and of running sums and products.

At kinks: equal extremes share their gradient equally; where a standard deviation is 0 so is its gradient. Products may
hold any number of zeros. Nothing flows to the elements of a slice with a NaN in it through its `max` or `min`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from asyncflow.graph.building.build import constant
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import derivative, gradient_of_first, not_differentiable
from asyncflow.graph.values.dtypes import float16, float32, float64
from asyncflow.graph.values.shapes import is_static
from asyncflow.ops.arithmetic.elementwise import maximum
from asyncflow.ops.arithmetic.logic import equal
from asyncflow.ops.arrays.creation import ones_like
from asyncflow.ops.arrays.datatypes import astype, broadcast_to
from asyncflow.ops.arrays.manipulation import expand_dims, flip, reshape
from asyncflow.ops.axes import Axes, normalize_axes
from asyncflow.ops.derivatives.dtypes import conjugated, in_dtype_of
from asyncflow.ops.derivatives.shapes import shape_of
from asyncflow.ops.indexing.indexing import gather, sliced
from asyncflow.ops.promotion import real_dtype
from asyncflow.ops.reductions import statistical as s
from asyncflow.ops.reductions.recurrence import linear_recurrence, shifted
from asyncflow.ops.reductions.segments import BINCOUNT, SEGMENT_IDS
from asyncflow.ops.reductions.utility import ALL, ANY
from asyncflow.ops.searching.searching import where


def _with_axes(reduced: Tensor, node: Node) -> Tensor:
    """The result of a reduction, or its gradient, with the reduced axes back as extents of 1."""
    axis: Axes = node.attrs["axis"]
    if node.attrs["keepdims"] or axis is None:
        return reduced
    return expand_dims(reduced, axis=axis)


def _spread(grad: Tensor, node: Node) -> Tensor:
    """Return the gradient of a reduction, repeated for each element of its input."""
    return broadcast_to(_with_axes(grad, node), shape_of(node.inputs[0]))


# -- sums and means --------------------------------------------------------------------------------------------------


@derivative(s.SUM)
def _sum(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    own = in_dtype_of(grad, node.inputs[0])
    return [None if own is None else _spread(own, node)]


def _divided(x: Tensor, node: Node, correction: float, least: float) -> Tensor:
    """`x` divided by how many elements `node` reduces to one, less `correction`, but by no less than `least`."""
    # float16 counts only to 65504.
    wide = astype(x, float32) if x.dtype == float16 else x
    count = _count(node)
    divisor: Tensor | float
    if isinstance(count, int):
        divisor = max(count - correction, least)
    else:
        divisor = astype(maximum(astype(count, float64) - correction, least), real_dtype(wide.dtype))
    quotient = wide / divisor
    return quotient if quotient.dtype == x.dtype else astype(quotient, x.dtype)


def _count(node: Node) -> int | Tensor:
    (x,), axis = node.inputs, node.attrs["axis"]
    if x.shape is not None:
        extents = [x.shape[i] for i in normalize_axes(axis, len(x.shape))]
        if is_static(tuple(extents)):
            return math.prod(extent for extent in extents if extent is not None)
    whole = shape_of(x)
    if axis is None:
        return s.prod(whole)
    return s.prod(gather(whole, constant(axis if isinstance(axis, tuple) else (axis,), "int64")))


@derivative(s.VAR)
def _var(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    return [_deviations(node) * _with_axes(_divided(2 * grad, node, node.attrs["correction"], 0.0), node)]


@derivative(s.STD)
def _std(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    """Gives a slice whose elements are all equal a gradient of 0."""
    (spread,) = node.outputs
    zero = constant(0, spread.dtype)
    flat = equal(spread, zero)
    slope = where(flat, zero, grad / where(flat, constant(1, spread.dtype), spread))
    return [_deviations(node) * _with_axes(_divided(slope, node, node.attrs["correction"], 0.0), node)]


def _deviations(node: Node) -> Tensor:
    (x,) = node.inputs
    return x - s.mean(x, axis=node.attrs["axis"], keepdims=True)


gradient_of_first(s.MEAN, lambda node, grad: _spread(_divided(grad, node, 0.0, 1.0), node))


# -- extremes --------------------------------------------------------------------------------------------------------


@derivative(s.MAX, s.MIN)
def _extreme(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    """Equal extremes share the gradient equally."""
    (x,) = node.inputs
    chosen = equal(x, _with_axes(node.outputs[0], node))
    ties = s.sum(chosen, axis=node.attrs["axis"], keepdims=node.attrs["keepdims"])
    share = grad / astype(maximum(ties, 1), real_dtype(grad.dtype))
    return [where(chosen, _with_axes(share, node), constant(0, grad.dtype))]


# -- products --------------------------------------------------------------------------------------------------------


@derivative(s.PROD)
def _prod(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    """Each element's gradient is the product of all others, found without dividing by it."""
    (x,) = node.inputs
    others = _products_of_others(x if x.dtype == grad.dtype else astype(x, grad.dtype), node.attrs["axis"])
    return [in_dtype_of(_with_axes(grad, node) * conjugated(others), x)]


def _products_of_others(x: Tensor, axis: Axes) -> Tensor:
    """For each element the product of all others over `axis`."""
    if axis is None:
        flat = x if x.ndim == 1 else reshape(x, (-1,))
        others = _products_along(flat, 0)
        return others if x.ndim == 1 else reshape(others, shape_of(x))
    # Axis by axis: multiply the product of other elements on this axis with the earlier axes' result.
    others, rest = ones_like(x), x
    for item in axis if isinstance(axis, tuple) else (axis,):
        others = others * _products_along(rest, item)
        rest = s.prod(rest, axis=item, keepdims=True)
    return others


def _products_along(x: Tensor, axis: int) -> Tensor:
    before = sliced(s.cumulative_prod(x, axis=axis, include_initial=True), axis, None, -1)
    after = sliced(s.cumulative_prod(flip(x, axis=axis), axis=axis, include_initial=True), axis, None, -1)
    return before * flip(after, axis=axis)


# -- running sums and products ---------------------------------------------------------------------------------------


def _running(node: Node, grad: Tensor) -> tuple[int, Tensor]:
    """The axis a running sum or product runs along, and the gradient without that of the initial 0 or 1."""
    axis: int = 0 if node.attrs["axis"] is None else node.attrs["axis"]
    return axis, sliced(grad, axis, 1, None) if node.attrs["include_initial"] else grad


@derivative(s.CUMULATIVE_SUM)
def _cumulative_sum(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    (x,) = node.inputs
    axis, own = _running(node, grad)
    return [in_dtype_of(flip(s.cumulative_sum(flip(own, axis=axis), axis=axis), axis=axis), x)]


@derivative(s.CUMULATIVE_PROD)
def _cumulative_prod(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    """The product before each element times what the later products pass back; zeros need no care."""
    (x,) = node.inputs
    axis, own = _running(node, grad)
    (product,) = node.outputs
    if node.attrs["include_initial"]:
        before = sliced(product, axis, None, -1)
    else:
        before = shifted(product, axis, ones_like(sliced(product, axis, None, 1)))
    factors = conjugated(x if x.dtype == grad.dtype else astype(x, grad.dtype))
    return [in_dtype_of(conjugated(before) * linear_recurrence(own, factors, axis=axis, reverse=True), x)]


# -- sums by label, and tests of all elements ------------------------------------------------------------------------


not_differentiable(SEGMENT_IDS, because="segment ids are integers")


@derivative(BINCOUNT)
def _bincount(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    x, *weights = node.inputs
    return [None, *(gather(grad, x) for _ in weights)]


not_differentiable(ALL, ANY, because="its result is boolean")
