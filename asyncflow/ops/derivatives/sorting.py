"""Derivative of `sort`, a permutation; the positions of `argsort` and `top_k` have none."""

from __future__ import annotations

from collections.abc import Sequence

from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import derivative, not_differentiable
from asyncflow.ops.derivatives.scatter import scatter_along_axis
from asyncflow.ops.derivatives.shapes import shape_of
from asyncflow.ops.sorting import ARGSORT, SORT, TOP_K, argsort

not_differentiable(ARGSORT, TOP_K, because="positions are integers")


@derivative(SORT)
def _sort(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    """Pass each gradient to the origin of its element; among equal elements the stable order decides."""
    (x,) = node.inputs
    axis = node.attrs["axis"]
    order = argsort(x, axis=axis, descending=node.attrs["descending"])
    return [scatter_along_axis(grad, order, shape_of(x), axis=axis, distinct=True)]
