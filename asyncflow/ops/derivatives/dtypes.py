"""Conversion of gradients to the dtype of their values."""

from __future__ import annotations

from asyncflow.graph.ir import Tensor
from asyncflow.ops.arithmetic.elementwise import conj, real
from asyncflow.ops.arrays.datatypes import astype
from asyncflow.ops.derivatives.shapes import carries_gradient
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
