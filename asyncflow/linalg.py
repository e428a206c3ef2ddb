"""Linear algebra of the Array API standard, as ``af.linalg``: of matrices in the last two axes, and stacks of them."""

from __future__ import annotations

import typing as _typing

from asyncflow.foreign_names import facade as _facade
from asyncflow.ops.decompositions import EighResult as EighResult
from asyncflow.ops.decompositions import QRResult as QRResult
from asyncflow.ops.decompositions import SlogdetResult as SlogdetResult
from asyncflow.ops.decompositions import SVDResult as SVDResult
from asyncflow.ops.decompositions import cholesky as cholesky
from asyncflow.ops.decompositions import det as det
from asyncflow.ops.decompositions import eigh as eigh
from asyncflow.ops.decompositions import eigvalsh as eigvalsh
from asyncflow.ops.decompositions import inv as inv
from asyncflow.ops.decompositions import matrix_power as matrix_power
from asyncflow.ops.decompositions import matrix_rank as matrix_rank
from asyncflow.ops.decompositions import pinv as pinv
from asyncflow.ops.decompositions import qr as qr
from asyncflow.ops.decompositions import slogdet as slogdet
from asyncflow.ops.decompositions import solve as solve
from asyncflow.ops.decompositions import svd as svd
from asyncflow.ops.decompositions import svdvals as svdvals
from asyncflow.ops.diagonals import diagonal as diagonal
from asyncflow.ops.diagonals import trace as trace
from asyncflow.ops.linalg import matmul as matmul
from asyncflow.ops.linalg import matrix_transpose as matrix_transpose
from asyncflow.ops.linalg import tensordot as tensordot
from asyncflow.ops.linalg import vecdot as vecdot
from asyncflow.ops.norms import cross as cross
from asyncflow.ops.norms import matrix_norm as matrix_norm
from asyncflow.ops.norms import outer as outer
from asyncflow.ops.norms import vector_norm as vector_norm

if not _typing.TYPE_CHECKING:  # it sees what is imported `as` itself, and every misspelt name would pass it
    __all__, __getattr__, __dir__ = _facade("asyncflow.linalg", globals())
