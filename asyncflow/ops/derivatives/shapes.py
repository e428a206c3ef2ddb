"""Tools of derivatives: shapes of forward values, without keeping the values, and broadcasting undone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from asyncflow.graph.building.build import apply
from asyncflow.graph.building.scopes import device
from asyncflow.graph.graph import reopened
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import KERNELS, OPAQUE, Memory, Traits, define, gradient_of_first, inputs_from
from asyncflow.graph.values.dtypes import VARIANT, summed_in
from asyncflow.graph.values.shapes import Shape, format_shape, is_static, is_subshape, merge
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.arrays.creation import zeros
from asyncflow.ops.arrays.datatypes import broadcast_to
from asyncflow.ops.arrays.extents import (
    ExtentsLike,
    apply_to_shape,
    brought_to_shape,
    in_given_shape,
    shape_reader,
    template_shape,
)
from asyncflow.ops.arrays.shape import shape
from asyncflow.ops.cost import elements, free
from asyncflow.values import Array, Kernel, Namespace, Value

Extents: TypeAlias = "tuple[int, ...] | Tensor"


def carries_gradient(spec: Spec) -> bool:
    """Return True if gradients flow through values of this spec: floats, and the stores and arrays that hold them."""
    return spec.dtype.kind in "fc" or spec.dtype == VARIANT or spec.dtype.name == "bfloat16"


def shape_of(x: Tensor) -> Extents:
    """The shape of a forward value: ints where it is known, else a tensor. Keeps the shape alone for later, not `x`."""
    if x.shape is not None and is_static(x.shape):
        return tuple(extent for extent in x.shape if extent is not None)
    known = x.graph.shapes
    if x not in known:
        with reopened(x.graph), device(x.node.device):
            known[x] = shape(x)
    return known[x]


def extent_of(x: Tensor, axis: int) -> int | Tensor:
    """One extent of a forward value: an int where it is known, else a tensor."""
    known = None if x.shape is None else x.shape[axis]
    return shape_of(x)[axis] if known is None else known


def zeros_of(x: Tensor) -> Tensor:
    """Zeros of the shape and dtype of a forward value."""
    return zeros(shape_of(x), dtype=x.dtype)


def summed(x: Array, axes: tuple[int, ...]) -> Array:
    """Return the sum of floats over `axes`, accumulated as `summed_in` says."""
    accumulator = summed_in(x.dtype)
    total: Array = x.sum(axes, dtype=accumulator)
    return total if accumulator == x.dtype else total.astype(x.dtype)


def _sum_to_kernel(xp: Namespace, *, shape: Shape) -> Kernel:
    read = shape_reader(shape)

    def sum_to_shape(x: Array, *sizes: Array) -> Value:
        target = read(sizes)
        if x.shape == target:
            return x
        added = x.ndim - len(target)
        axes = tuple(range(added)) + tuple(
            axis for axis, extent in enumerate(target, start=added) if extent == 1 and x.shape[axis] != 1
        )
        return summed(x, axes).reshape(target)

    return sum_to_shape


def _sum_to_flops(inputs: Sequence[Shape], outputs: Sequence[Shape], *, shape: Shape) -> float:
    return 0.0 if inputs[0] == outputs[0] else elements(outputs[0])


SUM_TO = define(
    "sum_to", in_given_shape, _sum_to_kernel, flops=_sum_to_flops, host_inputs=inputs_from(1), traits=KERNELS
)
"""The sum over the axes along which a value of the given shape was broadcast: the transpose of `broadcast_to`."""


def sum_to(x: Tensor, shape: ExtentsLike) -> Tensor:
    """`x` summed over the axes that broadcasting a value of `shape` to the shape of `x` adds or stretches."""
    return brought_to_shape(SUM_TO, x, shape)


def sum_to_like(grad: Tensor, like: Tensor) -> Tensor:
    """`grad` as the gradient of `like`, which was broadcast to its shape."""
    if grad.shape is not None and is_static(grad.shape) and grad.shape == like.shape:
        return grad
    return ensure_shape(sum_to(grad, shape_of(like)), like.shape)


def _spread(node: Node, grad: Tensor) -> Tensor:
    x = node.inputs[0]
    return ensure_shape(broadcast_to(grad, shape_of(x)), x.shape)


gradient_of_first(SUM_TO, _spread)

# -- known shapes ----------------------------------------------------------------------------------------------------

ENSURE_SHAPE = define(
    "ensure_shape",
    lambda x, *, shape: Spec(x.dtype, merge(x.shape, shape)),
    lambda xp, *, shape: lambda value: value,
    flops=free,
    traits=Traits(Memory.ANY, is_capturable=True, is_cheap=True),
)
"""Op that passes its input on with a shape that inference could not find."""


def ensure_shape(x: Tensor, shape: Shape) -> Tensor:
    """Return `x` with the (partial) shape that it is known to have."""
    return x if is_subshape(x.shape, shape) else apply(ENSURE_SHAPE, x, shape=shape)[0]


gradient_of_first(ENSURE_SHAPE, lambda node, grad: grad)


def _check_shape_spec(x: Spec, *sizes: Spec, shape: Shape, what: str) -> Spec:
    return Spec(x.dtype, merge(x.shape, template_shape(shape, sizes)))


def _check_shape_kernel(xp: Namespace, *, shape: Shape, what: str) -> Kernel:
    read = shape_reader(shape)

    def check(x: Array, *sizes: Array) -> Array:
        expected = read(sizes)
        if x.shape != expected:
            raise ValueError(f"{what} has shape {format_shape(x.shape)}; it is to have shape {format_shape(expected)}")
        return x

    return check


CHECK_SHAPE = define(
    "check_shape", _check_shape_spec, _check_shape_kernel, flops=free, host_inputs=inputs_from(1), traits=OPAQUE
)
"""Op that passes its input on after a check of its shape. A mismatch is an error and not broadcast: the result would
be wrong.
"""


def checked_shape(x: Tensor, like: Tensor, what: str) -> Tensor:
    """Return `x`, made by a user's function, with the shape of the forward value `like`.

    The caller has checked known shapes while the graph is built; the rest is checked in the run, where `what` names
    `x`.
    """
    if is_static(x.shape) and x.shape == like.shape:
        return x
    return ensure_shape(apply_to_shape(CHECK_SHAPE, shape_of(like), x, what=what), like.shape)


gradient_of_first(CHECK_SHAPE, lambda node, grad: grad)
