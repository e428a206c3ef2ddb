"""Derivatives of looking at values: what passes a value on passes its gradient back."""

from __future__ import annotations

from collections.abc import Sequence

from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import derivative, not_differentiable
from asyncflow.ops.checks import ASSERT, CHECK_NUMERICS, PRINT
from asyncflow.ops.derivatives.datatypes import in_dtype_of


@derivative(PRINT, CHECK_NUMERICS)
def _passed_on(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    """To the first value, which is the result. The gradient is neither printed nor checked."""
    x, *shown = node.inputs
    return [in_dtype_of(grad, x), *[None] * len(shown)]


not_differentiable(ASSERT, because="its result is boolean")
