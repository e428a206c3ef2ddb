"""Derivatives of casts and of broadcasting; and conversion of gradients to the dtype of their values."""

from __future__ import annotations

from collections.abc import Sequence

from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import derivative, gradient_of_first
from asyncflow.ops.datatypes import ASTYPE, BROADCAST_ARRAYS, BROADCAST_TO, astype
from asyncflow.ops.derivatives.shapes import carries_gradient, sum_to_like
from asyncflow.ops.elementwise import conj, real
from asyncflow.ops.promotion import kind_of


def in_dtype_of(grad: Tensor, x: Tensor) -> Tensor | None:
    """`grad` as what reaches `x`, which was converted to the dtype of `grad`; None if nothing does.

    To a real tensor comes the real part: the imaginary one says where `x` cannot go.
    """
    if not carries_gradient(x.spec):
        return None
    if grad.dtype == x.dtype:
        return grad
    if kind_of(grad.dtype) == "c" and kind_of(x.dtype) != "c":
        grad = real(grad)
    return grad if grad.dtype == x.dtype else astype(grad, x.dtype)


def conjugated(x: Tensor) -> Tensor:
    """The complex conjugate of `x`, without a node if `x` is real."""
    return conj(x) if kind_of(x.dtype) == "c" else x


gradient_of_first(ASTYPE, lambda node, grad: in_dtype_of(grad, node.inputs[0]))
gradient_of_first(BROADCAST_TO, lambda node, grad: sum_to_like(grad, node.inputs[0]))


@derivative(BROADCAST_ARRAYS)
def _broadcast_arrays(node: Node, *grads: Tensor | None) -> Sequence[Tensor | None]:
    pairs = zip(grads, node.inputs, strict=True)
    return [None if grad is None else sum_to_like(grad, x) for grad, x in pairs]
