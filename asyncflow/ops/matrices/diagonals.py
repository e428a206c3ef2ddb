"""Diagonals of matrices and stacks: taken, summed, and turned into matrices."""

from __future__ import annotations

import operator

from asyncflow.errors import ShapeError
from asyncflow.graph.building.build import TensorLike, apply, as_tensor, graph_for
from asyncflow.graph.ir import Tensor
from asyncflow.graph.op import OPAQUE, PARTS, define, inputs_from
from asyncflow.graph.values.dtypes import DTypeLike
from asyncflow.graph.values.shapes import Shape, format_shape, is_compatible
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.arrays.extents import Extent, apply_to_shape, shape_reader, template_shape
from asyncflow.ops.arrays.shape import extent_of
from asyncflow.ops.axes import static_int
from asyncflow.ops.cost import free
from asyncflow.ops.promotion import require_kind
from asyncflow.ops.reductions.statistical import sum
from asyncflow.values import Array, Kernel, Namespace


def diagonal_length(rows: int, columns: int, offset: int) -> int:
    """Length of a diagonal; 0 where it passes the matrix by."""
    return max(0, min(rows + min(offset, 0), columns - max(offset, 0)))


def _diagonal_spec(x: Spec, *, offset: int) -> Spec:
    if x.shape is None:
        return Spec(x.dtype)
    if len(x.shape) < 2:
        raise ShapeError(f"takes a matrix or a stack of them, rank 2 or more; got {x}")
    rows, columns = x.shape[-2:]
    length = None if rows is None or columns is None else diagonal_length(rows, columns, offset)
    return Spec(x.dtype, (*x.shape[:-2], length))


def _diagonal_kernel(xp: Namespace, *, offset: int) -> Kernel:
    return operator.methodcaller("diagonal", offset, -2, -1)


DIAGONAL = define(
    "diagonal", _diagonal_spec, _diagonal_kernel, is_total=True, flops=free, rows="matrices", traits=PARTS
)


def _diagonal_matrix_spec(x: Spec, *sizes: Spec, shape: Shape, offset: int) -> Spec:
    require_kind(x, "biufc", "numbers and booleans")
    if x.shape is None:
        return Spec(x.dtype)
    rows, columns = template_shape(shape, sizes) or (None, None)
    if rows is not None and columns is not None:
        length = diagonal_length(rows, columns, offset)
        if not x.shape or not is_compatible(x.shape[-1:], (length,)):
            seen = f"{format_shape(shape)} has {length} elements, not {format_shape(x.shape)}"
            raise ShapeError(f"diagonal {offset} of a matrix {seen}")
    return Spec(x.dtype, (*x.shape[:-1], rows, columns))


def _diagonal_matrix_kernel(xp: Namespace, *, shape: Shape, offset: int) -> Kernel:
    read = shape_reader(shape)

    def kernel(x: Array, *sizes: Array) -> Array:
        rows, columns = read(sizes)
        length = diagonal_length(rows, columns, offset)
        if x.shape[-1] != length:
            raise ValueError(f"diagonal {offset} of {rows} x {columns} elements has {length}, not {x.shape[-1]}")
        flat = xp.zeros((*x.shape[:-1], rows * columns), dtype=x.dtype)
        start = offset if offset >= 0 else -offset * columns
        # From one element of a diagonal to the next it is a row and a column on.
        flat[..., start : start + length * (columns + 1) : columns + 1] = x
        return flat.reshape((*x.shape[:-1], rows, columns))

    return kernel


DIAGONAL_MATRIX = define(
    "diagonal_matrix",
    _diagonal_matrix_spec,
    _diagonal_matrix_kernel,
    host_inputs=inputs_from(1),
    rows="matrices",
    traits=OPAQUE,
)
"""Zeros with the vectors along the last axis of the input on a diagonal: the transpose of `DIAGONAL`."""


def diagonal_matrix(x: TensorLike, rows: Extent, columns: Extent, *, offset: int) -> Tensor:
    """Matrices of `rows` by `columns` zeros, with the vectors along the last axis of `x` on a diagonal."""
    return apply_to_shape(DIAGONAL_MATRIX, (rows, columns), x, offset=offset)


def diagonal(x: TensorLike, /, *, offset: int = 0) -> Tensor:
    """A diagonal of the last two axes of `x`, along a last axis that takes their place.

    Args:
        x: a matrix or a stack of them.
        offset: which one: 0 is the main diagonal, and positive ones lie above it.

    Raises:
        ShapeError: `x` has fewer than two axes.
    """
    return apply(DIAGONAL, x, offset=static_int(offset, "offset"))[0]


def trace(x: TensorLike, /, *, offset: int = 0, dtype: DTypeLike | None = None) -> Tensor:
    """The sum over a diagonal of the last two axes of `x`.

    Args:
        x: a matrix of numbers or a stack of them.
        offset: which diagonal, see `asyncflow.linalg.diagonal`.
        dtype: of the sum; None as for `asyncflow.sum`.
    """
    return sum(diagonal(x, offset=offset), axis=-1, dtype=dtype)


def diag(x: TensorLike, /, *, k: int = 0) -> Tensor:
    """Return a square matrix with the vector `x` on diagonal `k`, and zeros elsewhere; of a matrix `x`, its diagonal
    `k`.

    Args:
        x: a vector or a matrix of numbers; `asyncflow.linalg.diagonal` takes stacks of matrices.
        k: which diagonal: 0 is the main one, and positive ones lie above it.

    Raises:
        ShapeError: another rank, or a rank that is not known while the graph is built.
    """
    offset = static_int(k, "k")
    with graph_for(x):
        tensor = as_tensor(x)
        if tensor.ndim == 2:
            return diagonal(tensor, offset=offset)
        if tensor.shape is None or len(tensor.shape) != 1:
            raise ShapeError(f"diag: takes a vector or a matrix, of rank 1 or 2; got {tensor!r}")
        extent = extent_of(tensor, 0) + abs(offset)
        return diagonal_matrix(tensor, extent, extent, offset=offset)
