"""Sums and counts by integer label: `segment_sum` and `bincount`."""

from __future__ import annotations

import numpy as np

from asyncflow.errors import GraphError, ShapeError
from asyncflow.graph.building.build import TensorLike, apply, as_tensor, graph_for
from asyncflow.graph.ir import Tensor
from asyncflow.graph.op import OPAQUE, define
from asyncflow.graph.values.dtypes import DType, float64, int64
from asyncflow.graph.values.shapes import format_shape, is_compatible
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.arrays.creation import zeros
from asyncflow.ops.arrays.extents import Extent, ExtentsLike
from asyncflow.ops.arrays.manipulation import concat, reshape
from asyncflow.ops.arrays.shape import extent_of, shape
from asyncflow.ops.axes import static_int
from asyncflow.ops.cost import free
from asyncflow.ops.indexing.indexing import scatter_add
from asyncflow.ops.promotion import require_kind
from asyncflow.values import Array, Kernel, Namespace


def _segment_ids_spec(segment_ids: Spec, x: Spec) -> Spec:
    require_kind(x, "iufc", "numbers")
    require_kind(segment_ids, "iu", "integer segment ids")
    if x.rank == 0:
        raise ShapeError(f"takes a value of rank 1 or more, whose rows are summed; got {x}")
    if segment_ids.rank not in (1, None):
        raise ShapeError(f"segment ids are a vector, one for each row; got {segment_ids}")
    rows = (None,) if x.shape is None else x.shape[:1]
    if not is_compatible(segment_ids.shape, rows):
        raise ShapeError(f"takes one segment id for each row of {x}; got {segment_ids}")
    return Spec(segment_ids.dtype, rows if segment_ids.shape in (None, (None,)) else segment_ids.shape)


def _segment_ids_kernel(xp: Namespace) -> Kernel:
    def kernel(segment_ids: Array, x: Array) -> Array:
        if segment_ids.shape != x.shape[:1]:
            seen = format_shape(segment_ids.shape)
            raise ValueError(f"takes one segment id for each of {x.shape[0]} rows; got {seen}")
        return segment_ids

    return kernel


SEGMENT_IDS = define(
    "segment_ids", _segment_ids_spec, _segment_ids_kernel, flops=free, rows="row by row", traits=OPAQUE
)
"""Op that returns its first input after a check of its length: `scatter_add` would otherwise broadcast a single row."""


def segment_sum(x: TensorLike, segment_ids: TensorLike, /, num_segments: Extent) -> Tensor:
    """Sums of the rows of `x` that have the same segment id: shape ``(num_segments, *x.shape[1:])``.

    Args:
        x: numbers, of rank 1 or higher.
        segment_ids: a vector of integers, one for each row, in any order; a segment that none names sums to 0.
        num_segments: an int or an integer tensor of rank 0.

    On the CPU an id of `num_segments` or more fails the run, as in `scatter_add`.
    """
    with graph_for(x, segment_ids):
        tensor = as_tensor(x)
        ids = apply(SEGMENT_IDS, segment_ids, tensor)[0]
        return scatter_add(zeros(_summed_shape(tensor, num_segments), dtype=tensor.dtype), ids, tensor)


def _summed_shape(x: Tensor, num_segments: Extent) -> ExtentsLike:
    if x.shape is None:
        return concat([reshape(num_segments, (1,)), shape(x)[1:]])
    return (num_segments, *(extent_of(x, axis) for axis in range(1, len(x.shape))))


def _bincount_spec(x: Spec, *weights: Spec, minlength: int, dtype: DType) -> Spec:
    require_kind(x, "iu", "integers")
    if not is_compatible(x.shape, (None,)):
        raise ShapeError(f"takes a vector, got {x}")
    for item in weights:
        require_kind(item, "f", "weights as floats")
        if not is_compatible(item.shape, x.shape):
            raise ShapeError(f"takes one weight for each of {format_shape(x.shape)} integers, got {item}")
    return Spec(dtype, (None,))


def _bincount_kernel(xp: Namespace, *, minlength: int, dtype: DType) -> Kernel:
    def kernel(x: Array, *weights: Array) -> Array:
        counted = weights[0].astype(float64) if weights else None
        return np.bincount(x.astype(int64), counted, minlength).astype(dtype, copy=False)

    return kernel


BINCOUNT = define("bincount", _bincount_spec, _bincount_kernel, rows="as found", runs_on_host=True)


def bincount(x: TensorLike, /, *, weights: TensorLike | None = None, minlength: int = 0) -> Tensor:
    """Counts of each integer from 0 on in `x`: a vector whose length only the run knows.

    Args:
        x: a vector of integers that are 0 or more; one below fails the run.
        weights: floats that are summed instead of counted, one for each integer; None counts, as int64.
        minlength: of the result, which else ends with the largest integer.
    """
    least = static_int(minlength, "minlength")
    if least < 0:
        raise GraphError(f"bincount: minlength is 0 or more, got {least}")
    with graph_for(x, weights):
        extra = () if weights is None else (as_tensor(weights),)
        dtype = extra[0].dtype if extra else int64
        return apply(BINCOUNT, x, *extra, minlength=least, dtype=dtype)[0]
