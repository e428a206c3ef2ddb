"""Derivative of differences of neighbours."""

from __future__ import annotations

from collections.abc import Sequence

from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import OPAQUE, define, derivative, gradient_of_first, inputs_from
from asyncflow.graph.shapes import Shape, normalize_axis
from asyncflow.ops.derivatives.datatypes import in_dtype_of
from asyncflow.ops.derivatives.shapes import ensure_shape, shape_of
from asyncflow.ops.extents import ExtentsLike, apply_to_shape, in_given_shape, shape_reader
from asyncflow.ops.utility import DIFF, diff
from asyncflow.values import Array, Kernel, Namespace


def _diff_transpose_kernel(xp: Namespace, *, axis: int, n: int, shape: Shape) -> Kernel:
    read = shape_reader(shape)
    odd = n % 2

    def run(grad: Array, *sizes: Array) -> Array:
        target = read(sizes)
        at = normalize_axis(axis, len(target))
        if not grad.shape[at]:
            return xp.zeros(target, dtype=grad.dtype)
        padding = [(n, n) if i == at else (0, 0) for i in range(len(target))]
        spread = xp.diff(xp.pad(grad, padding), n=n, axis=at)
        return -spread if odd else spread

    return run


DIFF_TRANSPOSE = define(
    "diff_transpose", in_given_shape, _diff_transpose_kernel, host_inputs=inputs_from(1), traits=OPAQUE
)
"""The gradient of values, given that of their differences: the transpose of `diff`."""


def diff_transpose(grad: Tensor, shape: ExtentsLike, *, axis: int, n: int) -> Tensor:
    """The gradient of values of `shape`, of whose `n`-th differences along `axis` `grad` is the gradient.

    Args:
        grad: of the differences.
        shape: of the values.
        axis: along which.
        n: how many times.
    """
    return apply_to_shape(DIFF_TRANSPOSE, shape, grad, axis=axis, n=n)


@derivative(DIFF)
def _diff(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    (x,) = node.inputs
    found = diff_transpose(grad, shape_of(x), **node.attrs)
    return [in_dtype_of(ensure_shape(found, x.shape), x)]


gradient_of_first(DIFF_TRANSPOSE, lambda node, grad: diff(grad, axis=node.attrs["axis"], n=node.attrs["n"]))
