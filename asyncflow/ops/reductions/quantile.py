"""`quantile`, built of other ops: sorted values, interpolated between the two on either side of a rank."""

from __future__ import annotations

import math

import numpy as np

from asyncflow.errors import GraphError, ShapeError
from asyncflow.graph.building.build import TensorLike, as_tensor, graph_for
from asyncflow.graph.ir import Tensor
from asyncflow.graph.values.dtypes import float64, int64
from asyncflow.graph.values.shapes import normalize_axis
from asyncflow.ops.arithmetic.elementwise import ceil, clip, floor
from asyncflow.ops.arithmetic.logic import isnan, logical_and, logical_not
from asyncflow.ops.arrays.datatypes import astype
from asyncflow.ops.arrays.known_values import default_value
from asyncflow.ops.arrays.manipulation import expand_dims, moveaxis, reshape
from asyncflow.ops.arrays.shape import shape
from asyncflow.ops.axes import require_elements, static_int
from asyncflow.ops.indexing.indexing import gather
from asyncflow.ops.promotion import kind_of, require_kind
from asyncflow.ops.searching.searching import where
from asyncflow.ops.searching.sorting import sort


def quantile(x: TensorLike, q: TensorLike, /, *, axis: int | None = None, keepdims: bool = False) -> Tensor:
    """The value below which a share `q` of `x` lies, with linear interpolation; 0.5 gives the median.

    Args:
        x: real numbers; integers and booleans count as float64.
        q: from 0 to 1: a scalar, or a vector, whose axis leads the result. Where only a run knows it and it is
            outside, the result is NaN, as where there is a NaN in `x`.
        axis: along which; None flattens `x`.
        keepdims: leave `axis` with an extent of 1 (all axes for None).

    Raises:
        GraphError: a `q` that is known while the graph is built is outside 0 to 1.
        ShapeError: there are no elements; `q` is no scalar and no vector; or `axis` is to move or to be kept, and the
            rank of `x` is not known.
    """
    with graph_for(x, q):
        tensor, share = as_tensor(x), as_tensor(q)
        _check(tensor, share)
        if kind_of(tensor.dtype) in "biu":
            tensor = astype(tensor, float64)
        at = 0 if axis is None else static_int(axis, "axis")
        require_elements(tensor.shape, None if axis is None else at)
        found = _along(reshape(tensor, -1) if axis is None else tensor, astype(share, float64), at)
        if not keepdims:
            return found
        if tensor.ndim is None:
            raise ShapeError(f"quantile: keepdims needs a known rank, not that of {tensor!r}")
        kept = range(tensor.ndim) if axis is None else [normalize_axis(at, tensor.ndim)]
        return expand_dims(found, axis=tuple(place + (share.ndim or 0) for place in kept))


def _check(x: Tensor, q: Tensor) -> None:
    require_kind(x.spec, "biuf", "real numbers")
    require_kind(q.spec, "iuf", "real shares")
    if q.ndim not in (0, 1):
        raise ShapeError(f"quantile: q is a scalar or a vector, of a rank that is known; got {q!r}")
    known = default_value(q)
    if known is not None and not np.all((known >= 0) & (known <= 1)):
        raise GraphError(f"quantile: q lies from 0 to 1, got {known}")


def _along(x: Tensor, q: Tensor, axis: int) -> Tensor:
    ordered = sort(x, axis=axis)
    last = astype(shape(x)[axis], float64) - 1
    inside = logical_and(q >= 0, q <= 1)
    place = clip(where(inside, q, 0.0), 0.0, 1.0) * last
    low, high = floor(place), ceil(place)
    below, above = (gather(ordered, astype(bound, int64), axis=axis) for bound in (low, high))
    greatest = gather(ordered, shape(x)[axis] - 1, axis=axis)  # NaNs sort behind all numbers
    part, is_good = astype(place - low, x.dtype), logical_not(isnan(greatest))
    if q.ndim == 1:
        if x.ndim is None:
            raise ShapeError(f"quantile: several shares need a known rank, not that of {x!r}")
        at = normalize_axis(axis, x.ndim)
        below, above = (moveaxis(values, at, 0) for values in (below, above))
        part, inside = (expand_dims(item, axis=tuple(range(1, x.ndim))) for item in (part, inside))
    return where(logical_and(inside, is_good), below + (above - below) * part, math.nan)
