"""Derivatives of convolution and pooling: each op's are others of the same few."""

from __future__ import annotations

from collections.abc import Sequence

from asyncflow.graph.building.build import apply
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import Op, derivative, gradient_of_first, not_differentiable
from asyncflow.ops.arrays.extents import apply_to_shape
from asyncflow.ops.derivatives.shapes import ensure_shape, extent_of
from asyncflow.ops.windows.conv import CONV, CONV_INPUT, CONV_WEIGHT
from asyncflow.ops.windows.pool import MAX_POOL, PICKED, POOL_PLACES, SUM_POOL, SUM_POOL_INPUT, UNPOOLED


def _like(x: Tensor, op: Op, axes: int, node: Node, *inputs: Tensor) -> Tensor:
    """Return the result of an op that is told the extents of the last `axes` axes of a forward value."""
    attrs = {name: value for name, value in node.attrs.items() if name != "shape"}
    extents = [extent_of(x, axis) for axis in range(-axes, 0)]
    return ensure_shape(apply_to_shape(op, extents, *inputs, **attrs), x.shape)


def _same(op: Op, node: Node, *inputs: Tensor) -> Tensor:
    return apply(op, *inputs, **{name: value for name, value in node.attrs.items() if name != "shape"})[0]


def _axes(node: Node) -> int:
    return 1 + len(node.attrs["windows"].stride)


@derivative(CONV)
def _conv(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    (x, w), axes = node.inputs, _axes(node)
    return [_like(x, CONV_INPUT, axes, node, grad, w), _like(w, CONV_WEIGHT, axes, node, x, grad)]


@derivative(CONV_INPUT)
def _conv_input(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    y, w, *sizes = node.inputs
    by_y = ensure_shape(_same(CONV, node, grad, w), y.shape)
    return [by_y, _like(w, CONV_WEIGHT, _axes(node), node, grad, y), *[None] * len(sizes)]


@derivative(CONV_WEIGHT)
def _conv_weight(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    x, y, *sizes = node.inputs
    by_y = ensure_shape(_same(CONV, node, x, grad), y.shape)
    return [_like(x, CONV_INPUT, _axes(node), node, y, grad), by_y, *[None] * len(sizes)]


@derivative(MAX_POOL)
def _max_pool(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    (x,) = node.inputs
    return [_like(x, UNPOOLED, _axes(node) - 1, node, grad, _same(POOL_PLACES, node, x))]


@derivative(UNPOOLED)
def _unpooled(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    y, places, *sizes = node.inputs
    return [ensure_shape(_same(PICKED, node, grad, places), y.shape), None, *[None] * len(sizes)]


@derivative(PICKED)
def _picked(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    x, places = node.inputs
    return [_like(x, UNPOOLED, _axes(node) - 1, node, grad, places), None]


gradient_of_first(SUM_POOL, lambda node, grad: _like(node.inputs[0], SUM_POOL_INPUT, _axes(node) - 1, node, grad))
gradient_of_first(SUM_POOL_INPUT, lambda node, grad: ensure_shape(_same(SUM_POOL, node, grad), node.inputs[0].shape))
not_differentiable(POOL_PLACES, because="places are integers")
