"""Derivatives of `where`, of sorting, and of distinct values; positions have none."""

from __future__ import annotations

from collections.abc import Sequence

from asyncflow.graph.building.build import constant
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import derivative, not_differentiable
from asyncflow.ops.arrays.manipulation import reshape
from asyncflow.ops.derivatives.shapes import ensure_shape, shape_of, sum_to_like
from asyncflow.ops.indexing.scatter import scatter_along_axis
from asyncflow.ops.searching.searching import ARGMAX, ARGMIN, NONZERO, SEARCHSORTED, WHERE, where
from asyncflow.ops.searching.sets import UNIQUE_ALL, UNIQUE_COUNTS, UNIQUE_INVERSE, UNIQUE_VALUES, unique_all
from asyncflow.ops.searching.sorting import ARGSORT, SORT, TOP_K, argsort

not_differentiable(ARGMAX, ARGMIN, NONZERO, SEARCHSORTED, because="positions are integers")


@derivative(WHERE)
def _where(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    """Pass the gradient to the chosen operand, and zeros to the other: infinities and NaNs on one side never reach
    the other.
    """
    condition, x1, x2 = node.inputs
    zero = constant(0, grad.dtype)
    return [None, sum_to_like(where(condition, grad, zero), x1), sum_to_like(where(condition, zero, grad), x2)]


# -- sorting ---------------------------------------------------------------------------------------------------------


not_differentiable(ARGSORT, TOP_K, because="positions are integers")


@derivative(SORT)
def _sort(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    """Pass each gradient to the origin of its element; among equal elements the stable order decides."""
    (x,) = node.inputs
    axis = node.attrs["axis"]
    order = argsort(x, axis=axis, descending=node.attrs["descending"])
    return [scatter_along_axis(grad, order, shape_of(x), axis=axis, distinct=True)]


# -- distinct values -------------------------------------------------------------------------------------------------


@derivative(UNIQUE_ALL, UNIQUE_COUNTS, UNIQUE_INVERSE, UNIQUE_VALUES)
def _unique(node: Node, grad: Tensor | None, *_: Tensor | None) -> Sequence[Tensor | None]:
    """The gradient of each value goes to the first element that has it."""
    if grad is None:
        return [None]
    (x,) = node.inputs
    flat = reshape(x, (-1,))
    found = scatter_along_axis(grad, unique_all(x).indices, shape_of(flat), axis=0, distinct=True)
    return [ensure_shape(reshape(found, shape_of(x)), x.shape)]
