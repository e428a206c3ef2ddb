"""Random arrays to start training from: NumPy arrays, the same for the same generator."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from asyncflow.errors import ShapeError, brief
from asyncflow.graph.values.dtypes import DTypeLike, as_dtype, float32
from asyncflow.values import Array


def glorot_uniform(
    random: np.random.Generator, rows: int, columns: int, blocks: int = 1, *, dtype: DTypeLike = float32
) -> Array:
    """Draw a matrix that keeps the variance of its products, forward and back (Glorot and Bengio 2010).

    Args:
        random: where the numbers come from.
        rows: how many inputs it has.
        columns: how many outputs, in each block.
        blocks: how many such matrices stand side by side, as the gates of a cell do.
        dtype: of the result, which is of shape ``(rows, blocks * columns)``.
    """
    limit = (6 / max(rows + columns, 1)) ** 0.5
    return random.uniform(-limit, limit, (rows, blocks * columns)).astype(as_dtype(dtype))


def orthogonal(random: np.random.Generator, size: int, blocks: int = 1, *, dtype: DTypeLike = float32) -> Array:
    """Draw random rotations and reflections, which keep the length of vectors (Saxe et al. 2014).

    Args:
        random: where the numbers come from.
        size: rows and columns of each.
        blocks: how many stand side by side.
        dtype: of the result, which is of shape ``(size, blocks * size)``.
    """

    def rotation() -> NDArray[np.float64]:
        q, r = np.linalg.qr(random.standard_normal((size, size)))
        # Fix the signs, which depend on the algorithm: otherwise the distribution would not be uniform.
        return q * np.sign(np.diag(r))

    return np.hstack([rotation() for _ in range(blocks)]).astype(as_dtype(dtype))


def he_uniform(random: np.random.Generator, shape: Sequence[int], *, dtype: DTypeLike = float32) -> Array:
    """Draw evenly weights that keep the variance of values through `relu` (He et al. 2015).

    Args:
        random: where the numbers come from.
        shape: ``(inputs, outputs)`` of a matrix, or ``(filters, channels, ...)`` of a convolution.
        dtype: of the result.
    """
    limit = (6 / _inputs(shape)) ** 0.5
    return random.uniform(-limit, limit, tuple(shape)).astype(as_dtype(dtype))


def he_normal(random: np.random.Generator, shape: Sequence[int], *, dtype: DTypeLike = float32) -> Array:
    """Draw weights as `he_uniform` does, from a normal distribution."""
    return random.normal(0, (2 / _inputs(shape)) ** 0.5, tuple(shape)).astype(as_dtype(dtype))


def _inputs(shape: Sequence[int]) -> int:
    """Return how many inputs each output is a sum of."""
    if len(shape) < 2:
        raise ShapeError(f"weights have a shape (inputs, outputs) or (filters, channels, ...); got {brief(shape)}")
    return max(1, shape[0] if len(shape) == 2 else math.prod(shape[1:]))
