"""Linear algebra of the Array API standard, as ``af.linalg``: of matrices in the last two axes, and stacks of them."""

from __future__ import annotations

from typing import TYPE_CHECKING as _TYPE_CHECKING

from asyncflow.foreign_names import public_names as _public_names
from asyncflow.ops.decompositions import (
    EighResult,
    QRResult,
    SlogdetResult,
    SVDResult,
    cholesky,
    det,
    eigh,
    eigvalsh,
    inv,
    matrix_power,
    matrix_rank,
    pinv,
    qr,
    slogdet,
    solve,
    svd,
    svdvals,
)
from asyncflow.ops.diagonals import diagonal, trace
from asyncflow.ops.linalg import matmul, matrix_transpose, tensordot, vecdot
from asyncflow.ops.norms import cross, matrix_norm, outer, vector_norm

__all__ = [
    "EighResult",
    "QRResult",
    "SVDResult",
    "SlogdetResult",
    "cholesky",
    "cross",
    "det",
    "diagonal",
    "eigh",
    "eigvalsh",
    "inv",
    "matmul",
    "matrix_norm",
    "matrix_power",
    "matrix_rank",
    "matrix_transpose",
    "outer",
    "pinv",
    "qr",
    "slogdet",
    "solve",
    "svd",
    "svdvals",
    "tensordot",
    "trace",
    "vecdot",
    "vector_norm",
]

if not _TYPE_CHECKING:  # or every misspelt name would pass the type checker
    __getattr__, __dir__ = _public_names("asyncflow.linalg", __all__)
