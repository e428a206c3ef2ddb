"""Derivative of `where`; positions have none."""

from __future__ import annotations

from collections.abc import Sequence

from asyncflow.graph.build import constant
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import derivative, not_differentiable
from asyncflow.ops.derivatives.shapes import sum_to_like
from asyncflow.ops.searching import ARGMAX, ARGMIN, NONZERO, SEARCHSORTED, WHERE, where

not_differentiable(ARGMAX, ARGMIN, NONZERO, SEARCHSORTED, because="positions are integers")


@derivative(WHERE)
def _where(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    """Pass the gradient to the chosen operand, and zeros to the other: infinities and NaNs on one side never reach
    the other.
    """
    condition, x1, x2 = node.inputs
    zero = constant(0, grad.dtype)
    return [None, sum_to_like(where(condition, grad, zero), x1), sum_to_like(where(condition, zero, grad), x2)]
