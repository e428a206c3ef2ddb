"""First-order linear recurrences along an axis: what running products are differentiated by."""

from __future__ import annotations

from collections.abc import Sequence

from asyncflow.graph.building.build import apply
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import OPAQUE, define, derivative
from asyncflow.graph.values.shapes import Shape
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.arrays.creation import zeros_like
from asyncflow.ops.arrays.manipulation import concat
from asyncflow.ops.cost import PASS, elements
from asyncflow.ops.derivatives.dtypes import conjugated
from asyncflow.ops.indexing.indexing import sliced
from asyncflow.values import Array, Kernel, Namespace


def _recurrence_spec(x: Spec, factors: Spec, *, axis: int, reverse: bool) -> Spec:
    return x


def _recurrence_kernel(xp: Namespace, *, axis: int, reverse: bool) -> Kernel:
    def recur(x: Array, factors: Array) -> Array:
        result = xp.array(x)
        lines, steps = xp.moveaxis(result, axis, 0), xp.moveaxis(factors, axis, 0)
        if reverse:
            for i in range(len(lines) - 2, -1, -1):
                lines[i] += steps[i + 1] * lines[i + 1]
        else:
            for i in range(1, len(lines)):
                lines[i] += steps[i] * lines[i - 1]
        return result

    return recur


_TURN = 25_000.0
"""The cost of a turn of the kernel's loop in Python, for each place along the axis."""


def _recurrence_flops(inputs: Sequence[Shape], outputs: Sequence[Shape], *, axis: int, **attrs: object) -> float:
    return _TURN * elements((outputs[0] or ())[axis:][:1]) + 2 * PASS * elements(outputs[0])


LINEAR_RECURRENCE = define(
    "linear_recurrence", _recurrence_spec, _recurrence_kernel, flops=_recurrence_flops, rows="axis", traits=OPAQUE
)


def linear_recurrence(x: Tensor, factors: Tensor, *, axis: int, reverse: bool = False) -> Tensor:
    """Return ``r[i] = x[i] + factors[i] * r[i - 1]`` along `axis`; `reverse`: ``r[i] = x[i] + factors[i + 1] * r[i +
    1]``.

    Factor ``i`` stands between the elements ``i - 1`` and ``i`` in both directions, and the first factor is not used.
    So each direction is the transpose of the other.

    Args:
        x: floats or complex numbers.
        factors: of the shape and dtype of `x`.
        axis: along which it runs.
        reverse: from the end.
    """
    return apply(LINEAR_RECURRENCE, x, factors, axis=axis, reverse=reverse)[0]


def shifted(x: Tensor, axis: int, first: Tensor) -> Tensor:
    """`x` moved one place on along `axis`: `first` comes in at the front, the last slice goes."""
    return concat([first, sliced(x, axis, None, -1)], axis=axis)


@derivative(LINEAR_RECURRENCE)
def _linear_recurrence(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    axis, reverse = node.attrs["axis"], node.attrs["reverse"]
    back = linear_recurrence(grad, conjugated(node.inputs[1]), axis=axis, reverse=not reverse)
    result = conjugated(node.outputs[0])
    before, after = (back, result) if reverse else (result, back)
    return [back, shifted(before, axis, zeros_like(sliced(before, axis, None, 1))) * after]
