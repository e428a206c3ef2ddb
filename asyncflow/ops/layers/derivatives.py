"""Derivatives of activations, normalisations and looking up rows.

`relu` passes nothing at 0. Where a sum is taken, half-precision values are widened first, as the ops do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import derivative, gradient_of_first, not_differentiable
from asyncflow.graph.values.dtypes import DType, float32
from asyncflow.ops.arithmetic.elementwise import abs, clip, exp, negative, sqrt, square, tanh
from asyncflow.ops.arrays.datatypes import astype
from asyncflow.ops.arrays.manipulation import expand_dims
from asyncflow.ops.derivatives.dtypes import in_dtype_of
from asyncflow.ops.derivatives.shapes import shape_of, sum_to_like
from asyncflow.ops.indexing.scatter import scatter_to
from asyncflow.ops.layers import nn
from asyncflow.ops.layers.erf import ERF
from asyncflow.ops.layers.nn import sigmoid
from asyncflow.ops.promotion import weak_constant
from asyncflow.ops.reductions.statistical import mean, sum
from asyncflow.ops.searching.searching import where


def _widened(x: Tensor) -> Tensor:
    return x if x.dtype.itemsize >= float32.itemsize else astype(x, float32)


def _narrowed(x: Tensor, dtype: DType) -> Tensor:
    return x if x.dtype == dtype else astype(x, dtype)


# -- activations -----------------------------------------------------------------------------------------------------


gradient_of_first(nn.RELU, lambda node, grad: where(node.outputs[0] > 0, grad, 0))
gradient_of_first(nn.SIGMOID, lambda node, grad: grad * (node.outputs[0] * (1 - node.outputs[0])))


@derivative(nn.SILU)
def _silu(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    # As for gelu.
    x = clip(node.inputs[0], -1000, 1000)
    s = sigmoid(x)
    return [grad * (s * (1 + x * (1 - s)))]


@derivative(ERF)
def _erf(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    (x,) = node.inputs
    return [in_dtype_of(grad * (2 / math.sqrt(math.pi) * exp(negative(square(x)))), x)]


gradient_of_first(nn.SOFTPLUS, lambda node, grad: grad * sigmoid(node.inputs[0]))


@derivative(nn.GELU)
def _gelu(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    # Outside these bounds the slope is exactly 0 or 1; without them it would compute infinity times 0.
    x = clip(_widened(node.inputs[0]), -20, 20)
    scale, cubic = math.sqrt(2 / math.pi), 0.044715
    squared = square(x)
    t = tanh(scale * x * (1 + cubic * squared))
    slope = 0.5 * (1 + t) + (0.5 * scale) * x * (1 - square(t)) * (1 + (3 * cubic) * squared)
    return [grad * _narrowed(slope, grad.dtype)]


# -- over an axis ----------------------------------------------------------------------------------------------------


@derivative(nn.SOFTMAX)
def _softmax(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    y, reached = _widened(node.outputs[0]), _widened(grad)
    inner = sum(reached * y, axis=node.attrs["axis"], keepdims=True)
    return [_narrowed(y * (reached - inner), grad.dtype)]


@derivative(nn.LOG_SOFTMAX)
def _log_softmax(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    y, reached = _widened(node.outputs[0]), _widened(grad)
    total = sum(reached, axis=node.attrs["axis"], keepdims=True)
    return [_narrowed(reached - exp(y) * total, grad.dtype)]


@derivative(nn.LOGSUMEXP)
def _logsumexp(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    """0 where all that is summed is -inf."""
    x, y, reached = _widened(node.inputs[0]), _widened(node.outputs[0]), _widened(grad)
    # A sum of only exp(-inf) would give -inf - -inf.
    y = where(y == -math.inf, 0, y)
    if node.attrs["axis"] is not None and not node.attrs["keepdims"]:
        y, reached = (expand_dims(item, axis=node.attrs["axis"]) for item in (y, reached))
    return [_narrowed(reached * exp(x - y), grad.dtype)]


@derivative(nn.LAYER_NORM)
def _layer_norm(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    """Differentiate, keeping the values and their scale: mean and deviation are cheap to find again."""
    scaled, shifted = node.attrs["scaled"], node.attrs["shifted"]
    axis, epsilon = node.attrs["axis"], node.attrs["epsilon"]
    x, reached = _widened(node.inputs[0]), _widened(grad)
    limit, factor, least = nn.scale_of_squares(x.dtype)
    is_large = sum(abs(x), axis=axis, keepdims=True) > limit

    def either(large: float, small: float) -> Tensor:
        return where(is_large, weak_constant(large, x.dtype), weak_constant(small, x.dtype))

    shrunk = x * either(factor, 1)
    centred = shrunk - mean(shrunk, axis=axis, keepdims=True)
    deviation = sqrt(mean(square(centred), axis=axis, keepdims=True) + either(least, epsilon))
    normal = centred / deviation
    inner = reached * _widened(node.inputs[1]) if scaled else reached
    along = normal * mean(inner * normal, axis=axis, keepdims=True)
    by_x = (inner - mean(inner, axis=axis, keepdims=True) - along) / deviation * either(factor, 1)
    found = [by_x]
    if scaled:
        found.append(sum_to_like(reached * normal, node.inputs[1]))
    if shifted:
        found.append(sum_to_like(reached, node.inputs[-1]))
    return [_narrowed(item, grad.dtype) for item in found]


# -- rows ------------------------------------------------------------------------------------------------------------


@derivative(nn.EMBEDDING)
def _embedding(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    """The rows of one id add up."""
    table, ids = node.inputs
    return [scatter_to(grad, (("input", 0),), [ids], shape_of(table), known=table.shape), None]


not_differentiable(nn.ONE_HOT, because="its inputs are integers")
