"""Shapes as values: the actual shape of a tensor in a run.

They are NumPy values on every device, as the host knows them: ops that take a shape read it there.
"""

from __future__ import annotations

import numpy as np

from asyncflow.graph.building.build import TensorLike, apply
from asyncflow.graph.ir import Tensor
from asyncflow.graph.op import METADATA, define
from asyncflow.graph.values.dtypes import int64
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.cost import free
from asyncflow.values import Kernel, Namespace


def _shape_kernel(xp: Namespace) -> Kernel:
    return lambda x: np.array(x.shape, dtype=int64)


def _size_kernel(xp: Namespace) -> Kernel:
    return lambda x: np.int64(x.size)


def _rank_kernel(xp: Namespace) -> Kernel:
    return lambda x: np.int64(x.ndim)


SHAPE = define("shape", lambda x: Spec(int64, (x.rank,)), _shape_kernel, is_total=True, flops=free, traits=METADATA)
SIZE = define("size", lambda x: Spec(int64, ()), _size_kernel, is_total=True, flops=free, traits=METADATA)
RANK = define("rank", lambda x: Spec(int64, ()), _rank_kernel, is_total=True, flops=free, traits=METADATA)


def shape(x: TensorLike, /) -> Tensor:
    """Return the shape of `x` in the run, as a vector of int64. The shape known while building is ``x.shape``."""
    return apply(SHAPE, x)[0]


def size(x: TensorLike, /) -> Tensor:
    """The number of elements of `x` in the run, an int64 scalar."""
    return apply(SIZE, x)[0]


def rank(x: TensorLike, /) -> Tensor:
    """Return the number of dimensions of `x` in the run, an int64 scalar. The rank known while building is
    ``x.ndim``.
    """
    return apply(RANK, x)[0]


def extent_of(x: Tensor, axis: int) -> int | Tensor:
    """The extent of an axis of `x`, whose rank is known: an int if that is known while the graph is built."""
    known = None if x.shape is None else x.shape[axis]
    return shape(x)[axis] if known is None else known
