"""`dropout`: noise for training, which drops some elements and scales the others."""

from __future__ import annotations

import numpy as np

from asyncflow.errors import GraphError, ShapeError
from asyncflow.graph.building.build import TensorLike, as_tensor, graph_for
from asyncflow.graph.ir import Tensor
from asyncflow.graph.values.dtypes import float32
from asyncflow.ops.arithmetic.elementwise import maximum
from asyncflow.ops.arrays.datatypes import astype, finfo
from asyncflow.ops.arrays.known_values import default_value
from asyncflow.ops.arrays.shape import shape
from asyncflow.ops.promotion import is_weak, require_kind
from asyncflow.ops.random.random import SeedLike, uniform
from asyncflow.ops.searching.searching import where


def dropout(x: TensorLike, /, rate: TensorLike, *, seed: SeedLike = None, name: str | None = None) -> Tensor:
    """`x` with each element dropped, which makes it 0, with probability `rate`, and the others divided by ``1 - rate``.

    So the expected value stays, and nothing is to be done when the model is used: there, feed a `rate` of 0 or leave
    the call out.

    Args:
        x: floats.
        rate: from 0 to 1: a number, or a tensor of rank 0.
        seed: of the random numbers, see `asyncflow.random.normal`.
        name: of their node.

    Raises:
        GraphError: `rate` is known while the graph is built, and not from 0 to 1.
        ShapeError: `rate` is no scalar.
    """
    with graph_for(x, rate):
        tensor = as_tensor(x)
        require_kind(tensor.spec, "f", "floats")
        chance = as_tensor(rate, tensor.dtype) if is_weak(rate) else astype(rate, tensor.dtype)
        if chance.ndim not in (0, None):
            raise ShapeError(f"dropout: rate is a scalar, got {chance!r}")
        known = rate if is_weak(rate) else default_value(as_tensor(rate))
        if known is not None and not np.all((np.asarray(known) >= 0) & (np.asarray(known) <= 1)):
            raise GraphError(f"dropout: rate lies from 0 to 1, got {known}")
        draws = uniform(shape(tensor), dtype=float32, seed=seed, name=name)
        # Where all are dropped, an infinite scale would make the gradients NaN.
        kept = maximum(1 - chance, float(finfo(tensor.dtype).smallest_normal))
        return where(draws >= chance, tensor / kept, 0.0)
