"""Counts of nonzero values, and of values by interval."""

from __future__ import annotations

import numpy as np

from asyncflow.errors import GraphError, ShapeError
from asyncflow.graph.building.build import TensorLike, as_tensor, constant, graph_for
from asyncflow.graph.ir import Tensor
from asyncflow.graph.values.dtypes import bool_, float32, float64, int64
from asyncflow.ops.arithmetic.elementwise import clip, subtract
from asyncflow.ops.arithmetic.logic import equal, greater_equal, less_equal, logical_and
from asyncflow.ops.arrays.datatypes import astype
from asyncflow.ops.arrays.manipulation import reshape
from asyncflow.ops.axes import Axes
from asyncflow.ops.promotion import require_kind
from asyncflow.ops.reductions.segments import segment_sum
from asyncflow.ops.reductions.statistical import max as largest
from asyncflow.ops.reductions.statistical import min as smallest
from asyncflow.ops.reductions.statistical import sum
from asyncflow.ops.searching.searching import searchsorted, where


def count_nonzero(x: TensorLike, /, *, axis: Axes = None, keepdims: bool = False) -> Tensor:
    """Number of nonzero (true, nonempty) elements, over `axis` or all axes, as int64.

    Args:
        x: any tensor.
        axis: one axis, several, or None for all.
        keepdims: leave reduced axes in the shape, with extent 1.
    """
    return sum(astype(x, bool_), axis=axis, keepdims=keepdims)


def histogram(
    x: TensorLike,
    /,
    bins: int | TensorLike = 10,
    *,
    range: tuple[TensorLike, TensorLike] | None = None,
    weights: TensorLike | None = None,
) -> tuple[Tensor, Tensor]:
    """Count the values of `x` in each of several intervals, as NumPy does; return the counts and the edges.

    An interval has its left edge, and the last one has both. Values outside of all intervals, and NaNs, count nowhere.

    Args:
        x: real numbers, of any shape.
        bins: how many intervals of equal width, a Python integer; or their edges, an ascending vector.
        range: the first and the last edge of `bins` intervals. None: the smallest and the largest value of `x`, which
            then is not empty; if they are equal, 0.5 less and more.
        weights: numbers of the shape of `x`, to be summed in place of counting.

    Returns:
        A vector of int64 (or of the dtype of `weights`), and the vector of edges, a float one longer.

    Raises:
        GraphError: `bins` is no positive integer, or `range` is given beside edges.
    """
    with graph_for(x, weights):
        values = as_tensor(x)
        require_kind(values.spec, "biuf", "real numbers")
        if values.dtype != float32 and values.dtype != float64:
            values = astype(values, float64)
        flat = reshape(values, (-1,))
        edges, count = _edges(flat, bins, range)
        first, last = edges[0], edges[-1]
        places = subtract(searchsorted(edges, flat, side="right"), 1)
        places = where(equal(flat, last), count - 1, places)
        is_inside = logical_and(greater_equal(flat, first), less_equal(flat, last))
        ones = astype(is_inside, int64)
        if weights is not None:
            given = reshape(as_tensor(weights), (-1,))
            ones = where(is_inside, given, constant(np.zeros((), given.dtype)))
        return segment_sum(ones, clip(places, 0, count - 1), count), edges


def _edges(
    flat: Tensor, bins: int | TensorLike, range: tuple[TensorLike, TensorLike] | None
) -> tuple[Tensor, int | Tensor]:
    if isinstance(bins, bool) or (isinstance(bins, int) and bins < 1):
        raise GraphError(f"histogram: bins is a positive integer, or a vector of edges; got {bins!r}")
    if not isinstance(bins, int):
        if range is not None:
            raise GraphError("histogram: range is for a number of bins; edges say where they begin and end")
        edges = astype(as_tensor(bins), flat.dtype)
        if edges.shape is None or len(edges.shape) != 1 or edges.shape[0] is None or edges.shape[0] < 2:
            raise ShapeError(f"histogram: edges are a vector of 2 or more, of a known length; got {edges.spec}")
        return edges, edges.shape[0] - 1
    if range is None:
        first, last = smallest(flat), largest(flat)
    else:
        if len(range) != 2:
            raise GraphError(f"histogram: range is a pair of numbers, the first edge and the last; got {range!r}")
        first, last = (astype(as_tensor(each), flat.dtype) for each in range)
    is_one = equal(first, last)
    first, last = where(is_one, first - 0.5, first), where(is_one, last + 0.5, last)
    steps = constant(np.arange(bins + 1) / bins, dtype=flat.dtype)
    inner = first + (last - first) * steps
    return where(constant(np.arange(bins + 1) == bins), last, inner), bins  # rounding must not move the last edge
