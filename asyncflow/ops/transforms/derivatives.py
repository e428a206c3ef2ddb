"""Derivatives of Fourier transforms: a transform's conjugate transpose is its inverse, with the opposite norm."""

from __future__ import annotations

from collections.abc import Sequence

from asyncflow.graph.building.build import apply
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import Op, derivative, gradient_of_first
from asyncflow.ops.arithmetic.elementwise import real
from asyncflow.ops.arrays.manipulation import concat
from asyncflow.ops.derivatives.shapes import ensure_shape, extent_of, shape_of, zeros_of
from asyncflow.ops.indexing.indexing import sliced
from asyncflow.ops.transforms.fft import FFT, IFFT, IRFFT, OPPOSITE, RFFT


def _fitted(node: Node, grad: Tensor) -> Tensor:
    """Return the gradient of the input, given `grad` for the transformed elements."""
    x, *size = node.inputs
    axis = node.attrs["axis"]
    if node.attrs["n"] is not None or size:
        # Elements that were cut off have a gradient of zeros; zeros that were added have none.
        grad = sliced(concat([grad, zeros_of(x)], axis=axis), axis, 0, extent_of(x, axis))
    return ensure_shape(grad, x.shape)


def _inverse(op: Op, node: Node, grad: Tensor, *size: Tensor, n: int | None = None) -> Tensor:
    attrs = node.attrs
    return apply(op, grad, *size, n=n, axis=attrs["axis"], norm=OPPOSITE[attrs["norm"]])[0]


gradient_of_first(FFT, lambda node, grad: _fitted(node, _inverse(IFFT, node, grad)))


gradient_of_first(IFFT, lambda node, grad: _fitted(node, _inverse(FFT, node, grad)))


@derivative(RFFT)
def _rfft(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    """Pass the gradient back with zeros in place of the elements that the transform left out."""
    (x,) = node.inputs
    n = node.attrs["n"]
    if n is None:
        extent = shape_of(x)[node.attrs["axis"]]
        found = _inverse(IFFT, node, grad, n=extent) if isinstance(extent, int) else _inverse(IFFT, node, grad, extent)
    else:
        found = _inverse(IFFT, node, grad, n=n)
    return [_fitted(node, real(found))]


@derivative(IRFFT)
def _irfft(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    """Elements of the half that `irfft` takes stand for two each, but the first, and of an even transform the last."""
    n, axis = node.attrs["n"], node.attrs["axis"]
    half = _inverse(RFFT, node, grad)
    end = -1 if n is None or n % 2 == 0 else None
    parts = [sliced(half, axis, None, 1), 2 * sliced(half, axis, 1, end)]
    return [_fitted(node, concat(parts if end is None else [*parts, sliced(half, axis, end, None)], axis=axis))]
