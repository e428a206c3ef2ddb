"""Derivatives of distinct values: each is one of the input's elements."""

from __future__ import annotations

from collections.abc import Sequence

from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import derivative
from asyncflow.ops.derivatives.scatter import scatter_along_axis
from asyncflow.ops.derivatives.shapes import ensure_shape, shape_of
from asyncflow.ops.manipulation import reshape
from asyncflow.ops.sets import UNIQUE_ALL, UNIQUE_COUNTS, UNIQUE_INVERSE, UNIQUE_VALUES, unique_all


@derivative(UNIQUE_ALL, UNIQUE_COUNTS, UNIQUE_INVERSE, UNIQUE_VALUES)
def _unique(node: Node, grad: Tensor | None, *_: Tensor | None) -> Sequence[Tensor | None]:
    """The gradient of each value goes to the first element that has it."""
    if grad is None:
        return [None]
    (x,) = node.inputs
    flat = reshape(x, (-1,))
    found = scatter_along_axis(grad, unique_all(x).indices, shape_of(flat), axis=0, distinct=True)
    return [ensure_shape(reshape(found, shape_of(x)), x.shape)]
