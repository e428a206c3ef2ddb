"""Derivatives of products of vectors, matrices and stacks of them.

A product that is linear in each operand has two transposes, which say what reaches one operand given the other:
``left(grad, y)`` and ``right(x, grad)``. Each is again linear in both, and the product and the other transpose are its
transposes, so three ops a product are enough for every order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncflow.graph.build import apply
from asyncflow.graph.op import Op, derivative, register
from asyncflow.graph.shapes import normalize_axis
from asyncflow.graph.spec import Spec
from asyncflow.ops import linalg
from asyncflow.ops.axes import normalize_axes
from asyncflow.ops.cost import elements
from asyncflow.ops.derivatives.datatypes import conjugated
from asyncflow.ops.derivatives.elementwise import reaching
from asyncflow.ops.derivatives.shapes import shape_of, sum_to_like
from asyncflow.ops.extents import ExtentsLike, shape_reader, split_extents, template_shape
from asyncflow.ops.linalg import matmul, matrix_transpose, tensordot, vecdot
from asyncflow.ops.manipulation import expand_dims
from asyncflow.ops.promotion import promoted_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from asyncflow.graph.ir import Node, Tensor
    from asyncflow.graph.op import Kernel
    from asyncflow.graph.shapes import Shape

# -- transposes that find out at run time how their operands are shaped ----------------------------------------------


def _transpose_spec(x: Spec, y: Spec, *sizes: Spec, shape: Shape, **attrs: object) -> Spec:
    return Spec(promoted_dtype((x.dtype, y.dtype)), template_shape(shape, sizes))


def _transpose_flops(inputs: Sequence[Shape], outputs: Sequence[Shape], **attrs: object) -> float:
    return 2.0 * max(elements(shape) for shape in (*inputs[:2], outputs[0]))


def _transpose_op(name: str, find: Callable[..., Any]) -> Op:
    """Registers an op; ``find(xp, x, y, shape, **attrs)`` gives its value but for broadcast axes, not yet summed."""

    def kernel(xp: Any, *, shape: Shape, **attrs: Any) -> Kernel:
        read = shape_reader(shape)

        def run(x: Any, y: Any, *sizes: Any) -> Any:
            target = read(sizes)
            found = find(xp, x, y, target, **attrs)
            return _summed_to(xp, found, target).astype(xp.result_type(x.dtype, y.dtype), copy=False)

        return run

    return register(Op(name=name, infer=_transpose_spec, kernel=kernel, flops=_transpose_flops))


def _summed_to(xp: Any, x: Any, shape: tuple[int, ...]) -> Any:
    """`x` summed over the axes by which its shape is broadcast from `shape`."""
    if x.shape == shape:
        return x
    added = x.ndim - len(shape)
    axes = [axis for axis in range(x.ndim) if axis < added or (shape[axis - added] == 1 and x.shape[axis] != 1)]
    return xp.sum(x, axis=tuple(axes)).reshape(shape)


def _apply_transpose(op: Op, x: Tensor, y: Tensor, shape: ExtentsLike, **attrs: Any) -> Tensor:
    template, sizes = split_extents(shape)
    return apply(op, x, y, *sizes, shape=template, **attrs)[0]


def _product_rules(product_op: Op, left: Op, right: Op, product: Callable[..., Tensor], *names: str) -> None:
    """Installs the derivatives of the transposes of a product whose attributes have these names."""

    def attrs_of(node: Node) -> dict[str, Any]:
        return {name: node.attrs[name] for name in names}

    @derivative(left)
    def by_left(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
        reached, y, *sizes = node.inputs
        attrs = attrs_of(node)
        by_reached = reaching(reached, lambda: product(grad, conjugated(y), **attrs))
        by_y = reaching(y, lambda: _apply_transpose(right, grad, conjugated(reached), shape_of(y), **attrs))
        return [by_reached, by_y, *[None] * len(sizes)]

    @derivative(right)
    def by_right(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
        x, reached, *sizes = node.inputs
        attrs = attrs_of(node)
        by_x = reaching(x, lambda: _apply_transpose(left, conjugated(reached), grad, shape_of(x), **attrs))
        by_reached = reaching(reached, lambda: product(conjugated(x), grad, **attrs))
        return [by_x, by_reached, *[None] * len(sizes)]
