"""Linear algebra of the Array API standard, as ``af.linalg``: of matrices in the last two axes, and stacks of them."""

from __future__ import annotations

import typing as _typing

from asyncflow.foreign_names import facade as _facade
from asyncflow.ops.matrices.decompositions import EighResult as EighResult
from asyncflow.ops.matrices.decompositions import QRResult as QRResult
from asyncflow.ops.matrices.decompositions import SlogdetResult as SlogdetResult
from asyncflow.ops.matrices.decompositions import SVDResult as SVDResult
from asyncflow.ops.matrices.decompositions import cholesky as cholesky
from asyncflow.ops.matrices.decompositions import det as det
from asyncflow.ops.matrices.decompositions import eigh as eigh
from asyncflow.ops.matrices.decompositions import eigvalsh as eigvalsh
from asyncflow.ops.matrices.decompositions import inv as inv
from asyncflow.ops.matrices.decompositions import matrix_power as matrix_power
from asyncflow.ops.matrices.decompositions import matrix_rank as matrix_rank
from asyncflow.ops.matrices.decompositions import pinv as pinv
from asyncflow.ops.matrices.decompositions import qr as qr
from asyncflow.ops.matrices.decompositions import slogdet as slogdet
from asyncflow.ops.matrices.decompositions import solve as solve
from asyncflow.ops.matrices.decompositions import svd as svd
from asyncflow.ops.matrices.decompositions import svdvals as svdvals
from asyncflow.ops.matrices.diagonals import diagonal as diagonal
from asyncflow.ops.matrices.diagonals import trace as trace
from asyncflow.ops.matrices.norms import cross as cross
from asyncflow.ops.matrices.norms import matrix_norm as matrix_norm
from asyncflow.ops.matrices.norms import outer as outer
from asyncflow.ops.matrices.norms import vector_norm as vector_norm
from asyncflow.ops.matrices.products import matmul as matmul
from asyncflow.ops.matrices.products import matrix_transpose as matrix_transpose
from asyncflow.ops.matrices.products import tensordot as tensordot
from asyncflow.ops.matrices.products import vecdot as vecdot

if not _typing.TYPE_CHECKING:  # type checkers see the imports above; with `__getattr__` a misspelt name would pass
    __all__, __getattr__, __dir__ = _facade("asyncflow.linalg", globals())
