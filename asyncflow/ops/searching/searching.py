"""Searching functions: positions of extremes and of nonzero elements, sorted insertion, and choice by `where`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, Literal

import numpy as np

from asyncflow.errors import DTypeError, GraphError, ShapeError
from asyncflow.graph.building.build import TensorLike, apply, graph_for
from asyncflow.graph.ir import Tensor
from asyncflow.graph.op import KERNELS, NEW, OPAQUE, define
from asyncflow.graph.values.dtypes import int64
from asyncflow.graph.values.shapes import broadcast, format_shape, is_compatible
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.arrays.datatypes import astype
from asyncflow.ops.axes import flat_extent, reduced, require_elements, static_int
from asyncflow.ops.cost import per_input_element
from asyncflow.ops.promotion import promote_operands, promoted_dtype, require_kind
from asyncflow.values import Array, Kernel, Namespace

# -- extremes --------------------------------------------------------------------------------------------------------


def _argument_spec(x: Spec, *, axis: int | None, keepdims: bool) -> Spec:
    require_kind(x, "biufc", "numbers and booleans")
    require_elements(x.shape, axis)
    return Spec(int64, reduced(x.shape, axis, keepdims))


def _function(name: str) -> Callable[..., Kernel]:
    return lambda xp, **attrs: partial(getattr(xp, name), **attrs)


ARGMAX = define("argmax", _argument_spec, _function("argmax"), flops=per_input_element, rows="axis", traits=KERNELS)
ARGMIN = define("argmin", _argument_spec, _function("argmin"), flops=per_input_element, rows="axis", traits=KERNELS)


def argmax(x: TensorLike, /, *, axis: int | None = None, keepdims: bool = False) -> Tensor:
    """Position (int64) of the first largest element along `axis`, or in the flattened `x`; of the first NaN if any.

    Args:
        x: numbers or booleans.
        axis: the one to search along; None for the flattened `x`.
        keepdims: leave reduced axes in the shape, with extent 1.

    Raises:
        ShapeError: there are no elements to choose from.
    """
    at = None if axis is None else static_int(axis, "axis")
    return apply(ARGMAX, x, axis=at, keepdims=bool(keepdims))[0]


def argmin(x: TensorLike, /, *, axis: int | None = None, keepdims: bool = False) -> Tensor:
    """Position (int64) of the first smallest element along `axis`, or in the flattened `x`; of the first NaN if any.

    Args:
        x: numbers or booleans.
        axis: the one to search along; None for the flattened `x`.
        keepdims: leave reduced axes in the shape, with extent 1.

    Raises:
        ShapeError: there are no elements to choose from.
    """
    at = None if axis is None else static_int(axis, "axis")
    return apply(ARGMIN, x, axis=at, keepdims=bool(keepdims))[0]


# -- nonzero elements ------------------------------------------------------------------------------------------------


def _nonzero_spec(x: Spec) -> tuple[Spec, ...]:
    require_kind(x, "biufcT", "numbers, booleans and strings")
    if not x.rank:
        raise ShapeError(f"needs a value of known rank 1 or higher, got {format_shape(x.shape)}")
    extent = 0 if flat_extent(x.shape) == 0 else None
    return (Spec(int64, (extent,)),) * x.rank


NONZERO = define(
    "nonzero", _nonzero_spec, lambda xp: xp.nonzero, flops=per_input_element, rows="as found", runs_on_host=True
)


def nonzero(x: TensorLike, /) -> tuple[Tensor, ...]:
    """Positions of the nonzero elements: one int64 vector per axis of `x`, of a length only the run knows.

    Raises:
        ShapeError: `x` is a scalar, or its rank is not known.
    """
    return apply(NONZERO, x)


# -- sorted insertion ------------------------------------------------------------------------------------------------


def _searchsorted_spec(x1: Spec, x2: Spec, sorter: Spec | None = None, *, side: str) -> Spec:
    require_kind(x1, "biufcT", "numbers, booleans and strings")
    promoted_dtype((x1.dtype, x2.dtype))
    if not is_compatible(x1.shape, (None,)):
        raise ShapeError(f"x1 must be of rank 1, got {format_shape(x1.shape)}")
    if sorter is not None:
        require_kind(sorter, "iu", "an integer sorter")
        if not is_compatible(sorter.shape, x1.shape):
            raise ShapeError(f"sorter {format_shape(sorter.shape)} must be shaped like x1 {format_shape(x1.shape)}")
    return Spec(int64, x2.shape)


def _searchsorted_kernel(xp: Namespace, *, side: str) -> Kernel:
    return lambda x1, x2, sorter=None: xp.searchsorted(x1, x2, side=side, sorter=sorter)


SEARCHSORTED = define("searchsorted", _searchsorted_spec, _searchsorted_kernel, rows="row by row", traits=OPAQUE)


def searchsorted(
    x1: TensorLike, x2: TensorLike, /, *, side: Literal["left", "right"] = "left", sorter: TensorLike | None = None
) -> Tensor:
    """Position in the sorted vector `x1` at which to insert each element of `x2`: int64, in the shape of `x2`.

    Args:
        x1: vector, ascending (or so ordered by `sorter`).
        x2: values to place.
        side: before (``"left"``) or behind (``"right"``) equal elements.
        sorter: integer positions that sort `x1`, such as `argsort` gives.
    """
    if side not in ("left", "right"):
        raise GraphError(f"searchsorted: side must be 'left' or 'right', got {side!r}")
    extra = () if sorter is None else (sorter,)
    with graph_for(x1, x2, *extra):
        return apply(SEARCHSORTED, *promote_operands(x1, x2), *extra, side=side)[0]


# -- choice ----------------------------------------------------------------------------------------------------------


def _where_spec(condition: Spec, x1: Spec, x2: Spec) -> Spec:
    require_kind(condition, "b", "a boolean condition")
    if x1.dtype != x2.dtype:
        raise DTypeError(f"x1 and x2 must have one dtype, got {x1} and {x2}")
    return Spec(x1.dtype, broadcast((condition.shape, x1.shape, x2.shape)))


def _where_on_host(condition: Array, x1: Array, x2: Array, out: Array | None = None) -> Array:
    """`numpy.where`, which branches for each element: where one side is 0, the other's bits times the condition."""
    if x2.ndim == 0 and x1.size >= _MANY and condition.shape == x1.shape and x1.itemsize <= 8:
        bits = np.dtype(f"u{x1.itemsize}")
        if not x2.view(bits):  # -0.0 has a bit
            chosen: Array = np.multiply(x1.view(bits), condition, out=None if out is None else out.view(bits))
            return chosen.view(x1.dtype) if out is None else out
    chosen = np.where(condition, x1, x2)
    if out is None:
        return chosen
    out[...] = chosen
    return out


_where_on_host.takes_out = True  # type: ignore[attr-defined]


_MANY: Final = 1024
"""Number of elements beside which two views of an array cost nothing."""
WHERE = define(
    "where",
    _where_spec,
    lambda xp: _where_on_host if xp is np else xp.where,
    scalar_kernel=lambda condition, x1, x2: x1 if condition else x2,
    is_total=True,
    rows="elementwise",
    cuda=lambda attrs, inputs, output, operands: "{} ? {} : {}".format(*operands),
    traits=NEW,
)


def where(condition: TensorLike, x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """Elements of `x1` where `condition` is true, of `x2` elsewhere; all three broadcast, `x1` and `x2` promote.

    Both are computed; to run only one of two computations use `cond`.

    Args:
        condition: booleans.
        x1: chosen where `condition` is true.
        x2: chosen elsewhere.
    """
    with graph_for(condition, x1, x2):
        operands = promote_operands(x1, x2)
        dtype = promoted_dtype(x.dtype for x in operands)
        return apply(WHERE, condition, *(x if x.dtype == dtype else astype(x, dtype) for x in operands))[0]
