"""Derivatives of the ops every graph needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncflow.graph.builtin import CONSTANT, IDENTITY, NO_OP, PARAMETER, PLACEHOLDER
from asyncflow.graph.op import derivative, not_differentiable
from asyncflow.ops.derivatives.datatypes import in_dtype_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncflow.graph.ir import Node, Tensor


@derivative(IDENTITY)
def _identity(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    return [in_dtype_of(grad, node.inputs[0])]


not_differentiable(CONSTANT, PARAMETER, PLACEHOLDER, because="it has no inputs")
not_differentiable(NO_OP, because="it has no outputs")
