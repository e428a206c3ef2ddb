"""Inverses, determinants, equations and decompositions of matrices and stacks of them, as in ``af.linalg``.

All take float32, float64, complex64 and complex128. What fails on the CPU, such as the inverse of a singular matrix,
gives NaN on a GPU, which does not wait to find out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from asyncflow.errors import DTypeError, GraphError, ShapeError
from asyncflow.graph.building.build import TensorLike, apply, as_tensor, graph_for
from asyncflow.graph.ir import Tensor
from asyncflow.graph.op import OPAQUE, Op, define
from asyncflow.graph.values.dtypes import dtype_name, int64
from asyncflow.graph.values.shapes import Shape, broadcast, format_shape
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.arithmetic.elementwise import add, conj
from asyncflow.ops.arrays.creation import eye, zeros_like
from asyncflow.ops.arrays.datatypes import astype
from asyncflow.ops.arrays.shape import shape
from asyncflow.ops.axes import static_int
from asyncflow.ops.cost import elements
from asyncflow.ops.matrices.products import matmul, matrix_transpose
from asyncflow.ops.promotion import promote_operands, promoted_dtype, real_dtype
from asyncflow.values import Array, Kernel, Namespace, Value

_DTYPES = ("float32", "float64", "complex64", "complex128")


class EighResult(NamedTuple):
    """The result of `eigh`."""

    eigenvalues: Tensor
    eigenvectors: Tensor


class QRResult(NamedTuple):
    """The result of `qr`."""

    Q: Tensor
    R: Tensor


class SlogdetResult(NamedTuple):
    """The result of `slogdet`."""

    sign: Tensor
    logabsdet: Tensor


class SVDResult(NamedTuple):
    """The result of `svd`."""

    U: Tensor
    S: Tensor
    Vh: Tensor


def adjoint(x: Tensor) -> Tensor:
    """The conjugate transpose of the last two axes."""
    turned = matrix_transpose(x)
    return conj(turned) if x.dtype.kind == "c" else turned


def _matrices(x: Spec) -> Shape:
    """The shape of matrices, whose dtype and rank are checked."""
    if x.dtype.name not in _DTYPES:
        raise DTypeError(f"takes matrices of {', '.join(_DTYPES)}, not {dtype_name(x.dtype)}; convert with af.astype")
    if x.shape is not None and len(x.shape) < 2:
        raise ShapeError(f"takes a matrix or a stack of them, rank 2 or more; got {format_shape(x.shape)}")
    return x.shape


def _square(x: Spec) -> Shape:
    """The shape of square matrices."""
    dims = _matrices(x)
    if dims is None:
        return None
    rows, columns = dims[-2:]
    if rows is not None and columns is not None and rows != columns:
        raise ShapeError(f"takes square matrices, got {format_shape(dims)}")
    extent = columns if rows is None else rows  # square, so a known extent holds for both
    return (*dims[:-2], extent, extent)


def _same_square(x: Spec) -> Spec:
    return Spec(x.dtype, _square(x))


_STEPS = 150
"""Operations on each element in whose time LAPACK does the rest."""


def _cubic(factor: float) -> Callable[..., float]:
    """An estimate of `factor` times rows times columns times the smaller of the two, for each matrix.

    With small ones LAPACK's own steps take longer than the arithmetic.
    """

    def flops(inputs: Sequence[Shape], outputs: Sequence[Shape], **attrs: object) -> float:
        known = [1 if dim is None else dim for dim in inputs[0] or ()][-2:] or [1]
        return factor * elements(inputs[0]) * (min(known) + _STEPS)

    return flops


def _of_linalg(name: str, infer: Callable[..., Spec | tuple[Spec, ...]], factor: float) -> Op:
    """Define the op that is the function of that name in ``xp.linalg``, with its attributes as options."""

    def kernel(xp: Namespace, **options: object) -> Kernel:
        function = getattr(xp.linalg, name)

        def run(x: Array) -> Value:
            found = function(x, **options)
            return tuple(found) if isinstance(found, tuple) else found

        return run

    return define(name, infer, kernel, flops=_cubic(factor), rows="matrices", traits=OPAQUE)


# -- square matrices -------------------------------------------------------------------------------------------------


def _det_spec(x: Spec) -> Spec:
    dims = _square(x)
    return Spec(x.dtype, None if dims is None else dims[:-2])


def _slogdet_spec(x: Spec) -> tuple[Spec, Spec]:
    sign = _det_spec(x)
    return sign, Spec(real_dtype(x.dtype), sign.shape)


def _eigenvalues_spec(x: Spec) -> Spec:
    dims = _square(x)
    return Spec(real_dtype(x.dtype), None if dims is None else dims[:-1])


# Operations divided by n^3: LU factorization takes 2/3, with the inverse 2; reduction to tridiagonal form takes 4/3.
CHOLESKY = _of_linalg("cholesky", _same_square, 1 / 3)
DET = _of_linalg("det", _det_spec, 2 / 3)
EIGH = _of_linalg("eigh", lambda x: (_eigenvalues_spec(x), _same_square(x)), 9.0)
EIGVALSH = _of_linalg("eigvalsh", _eigenvalues_spec, 4 / 3)
INV = _of_linalg("inv", _same_square, 2.0)
SLOGDET = _of_linalg("slogdet", _slogdet_spec, 2 / 3)


def cholesky(x: TensorLike, /, *, upper: bool = False) -> Tensor:
    """The lower triangular `L` of ``x = L @ L^H``, for Hermitian and positive definite `x`; or its `upper` adjoint.

    Only the lower triangle of `x` is read; its gradient is Hermitian, as `x` is. The run fails where `x` is not
    positive definite.
    """
    lower = apply(CHOLESKY, x)[0]
    return adjoint(lower) if upper else lower


def det(x: TensorLike, /) -> Tensor:
    """The determinant of square matrices. Where it is 0, its gradient is not finite, or the run fails."""
    return apply(DET, x)[0]


def slogdet(x: TensorLike, /) -> SlogdetResult:
    """The sign (of complex matrices: of magnitude 1) and the logarithm of the magnitude of the determinant."""
    return SlogdetResult(*apply(SLOGDET, x))


def inv(x: TensorLike, /) -> Tensor:
    """The inverse of square matrices. The run fails where one is singular."""
    return apply(INV, x)[0]


def eigh(x: TensorLike, /) -> EighResult:
    """Eigenvalues in ascending order, real, and eigenvectors, as columns, of Hermitian matrices.

    Only the lower triangle of `x` is read; its gradient is Hermitian. Gradients through eigenvectors need distinct
    eigenvalues, and, of complex matrices, a loss that does not depend on the vectors' phases.
    """
    return EighResult(*apply(EIGH, x))


def eigvalsh(x: TensorLike, /) -> Tensor:
    """The eigenvalues of Hermitian matrices, real and in ascending order; only the lower triangle is read."""
    return apply(EIGVALSH, x)[0]


def matrix_power(x: TensorLike, n: int, /) -> Tensor:
    """Return the `n`-th power of square matrices; below 0, of their inverses; 0 gives identity matrices."""
    count = static_int(n, "n")
    with graph_for(x):
        factor = as_tensor(x)
        _square(factor.spec)
        if count == 0:
            # The sum broadcasts the identity to the stack, whose shape only the run may know.
            return add(zeros_like(factor), eye(shape(factor)[-1], dtype=factor.dtype))
        if count < 0:
            factor, count = inv(factor), -count
        # Square and multiply: about 2 log2(n) products. The square after the last bit is skipped, as it is unused.
        result = None
        while count:
            if count % 2:
                result = factor if result is None else matmul(result, factor)
            count //= 2
            if count:
                factor = matmul(factor, factor)
        assert result is not None
        return result


# -- equations -------------------------------------------------------------------------------------------------------


def _solve_spec(x1: Spec, x2: Spec) -> Spec:
    dims, other = _square(x1), _matrices(x2)
    if x1.dtype != x2.dtype:
        raise DTypeError(f"takes values of one dtype, got {x1} and {x2}")
    if dims is None or other is None:
        return Spec(x1.dtype)
    if dims[-1] is not None and other[-2] is not None and dims[-1] != other[-2]:
        raise ShapeError(f"{format_shape(dims)} and {format_shape(other)} differ in rows")
    batch = broadcast((dims[:-2], other[:-2]))
    assert batch is not None
    return Spec(x1.dtype, (*batch, other[-2] if dims[-1] is None else dims[-1], other[-1]))


def _solve_kernel(xp: Namespace) -> Kernel:
    def kernel(x1: Array, x2: Array) -> Array:
        # CuPy does not broadcast stacks, unlike NumPy. These are views, without a copy.
        batch = np.broadcast_shapes(x1.shape[:-2], x2.shape[:-2])
        left = xp.broadcast_to(x1, (*batch, *x1.shape[-2:]))
        return xp.linalg.solve(left, xp.broadcast_to(x2, (*batch, *x2.shape[-2:])))

    return kernel


SOLVE = define("solve", _solve_spec, _solve_kernel, flops=_cubic(2 / 3), traits=OPAQUE)


def solve(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """Return the `y` of ``x1 @ y = x2``.

    Args:
        x1: square matrices.
        x2: one vector (rank 1), or matrices whose columns are solved for; stacks broadcast with the stacks of `x1`.

    Raises:
        ShapeError: rows differ, or the rank of `x2` is not known while the graph is built.
    """
    with graph_for(x1, x2):
        left, right = promote_operands(x1, x2)
        dtype = promoted_dtype((left.dtype, right.dtype))
        left, right = (x if x.dtype == dtype else astype(x, dtype) for x in (left, right))
        # NumPy decides by the rank of `x2` in the run if it is a vector: the shape rule needs the rank earlier.
        if right.ndim is None:
            raise ShapeError(f"solve: the rank of {right!r} is not known: it may be a vector or matrices")
        if right.ndim == 1:
            return apply(SOLVE, left, right[:, None])[0][..., 0]
        return apply(SOLVE, left, right)[0]


# -- any matrices ----------------------------------------------------------------------------------------------------


def _smaller(rows: int | None, columns: int | None) -> int | None:
    if 0 in (rows, columns):  # the other extent may be unknown
        return 0
    return None if rows is None or columns is None else min(rows, columns)


def _qr_spec(x: Spec, *, mode: str) -> tuple[Spec, Spec]:
    dims = _matrices(x)
    if dims is None:
        return Spec(x.dtype), Spec(x.dtype)
    *batch, rows, columns = dims
    inner = rows if mode == "complete" else _smaller(rows, columns)
    return Spec(x.dtype, (*batch, rows, inner)), Spec(x.dtype, (*batch, inner, columns))


def _svd_spec(x: Spec, *, full_matrices: bool) -> tuple[Spec, Spec, Spec]:
    values = _svdvals_spec(x)
    if x.shape is None:
        return Spec(x.dtype), values, Spec(x.dtype)
    *batch, rows, columns = x.shape
    inner = _smaller(rows, columns)
    left, right = (rows, columns) if full_matrices else (inner, inner)
    return Spec(x.dtype, (*batch, rows, left)), values, Spec(x.dtype, (*batch, right, columns))


def _svdvals_spec(x: Spec) -> Spec:
    dims = _matrices(x)
    return Spec(real_dtype(x.dtype), None if dims is None else (*dims[:-2], _smaller(*dims[-2:])))


def _pinv_spec(x: Spec, *, rtol: float | None) -> Spec:
    dims = _matrices(x)
    return Spec(x.dtype, None if dims is None else (*dims[:-2], dims[-1], dims[-2]))


def _relative(x: Array, rtol: float | None) -> float:
    """The share of the largest singular value up to which others count as 0."""
    return max(x.shape[-2:]) * float(np.finfo(x.dtype).eps) if rtol is None else rtol


def _pinv_kernel(xp: Namespace, *, rtol: float | None) -> Kernel:
    # Always passed: NumPy's default of 1e-15 for all dtypes counts float32 noise as values.
    return lambda x: xp.linalg.pinv(x, _relative(x, rtol))


def _matrix_rank_spec(x: Spec, *, rtol: float | None) -> Spec:
    dims = _matrices(x)
    return Spec(int64, None if dims is None else dims[:-2])


def _matrix_rank_kernel(xp: Namespace, *, rtol: float | None) -> Kernel:
    def kernel(x: Array) -> Value:
        if not x.size:  # no singular values, so no maximum: rank 0
            return xp.zeros(x.shape[:-2], dtype=int64)
        values = xp.linalg.svd(x, compute_uv=False)
        return (values > values.max(axis=-1, keepdims=True) * _relative(x, rtol)).sum(axis=-1, dtype=int64)

    return kernel


def _svdvals_kernel(xp: Namespace) -> Kernel:
    return lambda x: xp.linalg.svd(x, compute_uv=False)


QR = _of_linalg("qr", _qr_spec, 4.0)
SVD = _of_linalg("svd", _svd_spec, 20.0)
SVDVALS = define("svdvals", _svdvals_spec, _svdvals_kernel, flops=_cubic(4.0), rows="matrices", traits=OPAQUE)
PINV = define("pinv", _pinv_spec, _pinv_kernel, flops=_cubic(24.0), rows="matrices", traits=OPAQUE)
MATRIX_RANK = define(
    "matrix_rank", _matrix_rank_spec, _matrix_rank_kernel, flops=_cubic(4.0), rows="matrices", traits=OPAQUE
)


def qr(x: TensorLike, /, *, mode: Literal["reduced", "complete"] = "reduced") -> QRResult:
    """Orthonormal columns `Q` and the upper triangular `R` of ``x = Q @ R``.

    Args:
        x: ``m`` by ``n`` matrices.
        mode: ``"reduced"`` gives as many columns as the smaller of ``m`` and ``n``, ``"complete"`` gives ``m``.

    Gradients need independent columns, and as many of them in `Q` as in `x`.
    """
    if mode not in ("reduced", "complete"):
        raise GraphError(f"qr: mode must be 'reduced' or 'complete', got {mode!r}")
    return QRResult(*apply(QR, x, mode=mode))


def svd(x: TensorLike, /, *, full_matrices: bool = True) -> SVDResult:
    """Return singular vectors `U` and `Vh`, and singular values `S` in descending order, of ``x = U @ diag(S) @ Vh``.

    Args:
        x: any matrices.
        full_matrices: `U` and `Vh` are square; else they have as many columns and rows as there are values.

    Gradients through vectors need distinct values other than 0, whether or not `x` is square or `full_matrices` is set.
    For complex matrices they also need a loss that does not depend on the vectors' phases.
    """
    return SVDResult(*apply(SVD, x, full_matrices=bool(full_matrices)))


def svdvals(x: TensorLike, /) -> Tensor:
    """The singular values of matrices, in descending order."""
    return apply(SVDVALS, x)[0]


def pinv(x: TensorLike, /, *, rtol: float | None = None) -> Tensor:
    """The Moore-Penrose inverse of matrices.

    Args:
        x: any matrices.
        rtol: singular values up to this share of the largest count as 0; None: the larger extent times epsilon.
    """
    return apply(PINV, x, rtol=None if rtol is None else float(rtol))[0]


def matrix_rank(x: TensorLike, /, *, rtol: float | None = None) -> Tensor:
    """Number of singular values of each matrix that count as more than 0, as int64; for `rtol` see `pinv`."""
    return apply(MATRIX_RANK, x, rtol=None if rtol is None else float(rtol))[0]
