"""Derivatives of creation: what fills gets the sum; shapes, ranges and identity matrices have none."""

from __future__ import annotations

from collections.abc import Sequence

from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import derivative, gradient_of_first, not_differentiable
from asyncflow.ops.creation import ARANGE, EYE, FULL, FULL_LIKE, LINSPACE, TRIL, TRIU, linspace, tril, triu
from asyncflow.ops.derivatives.datatypes import in_dtype_of
from asyncflow.ops.promotion import real_dtype
from asyncflow.ops.statistical import sum as sum_of

not_differentiable(ARANGE, because="its bounds say how many values there are, which jumps")
not_differentiable(EYE, because="it is made of sizes alone")


gradient_of_first(FULL, lambda node, grad: sum_of(grad))


@derivative(FULL_LIKE)
def _full_like(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    return [None, sum_of(grad)]


@derivative(LINSPACE)
def _linspace(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    """Each value lies between the bounds; the nearer one gets the more of its gradient."""
    start, stop, *size = node.inputs
    num = size[0] if size else node.attrs["num"][0]
    weights = linspace(0.0, 1.0, num, dtype=real_dtype(grad.dtype), endpoint=node.attrs["endpoint"])
    own = in_dtype_of(sum_of(grad * (1 - weights)), start), in_dtype_of(sum_of(grad * weights), stop)
    return [*own, *[None] * len(size)]


gradient_of_first(TRIL, lambda node, grad: tril(grad, k=node.attrs["k"]))


gradient_of_first(TRIU, lambda node, grad: triu(grad, k=node.attrs["k"]))
