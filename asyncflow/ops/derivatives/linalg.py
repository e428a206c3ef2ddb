"""Derivatives of products of vectors, matrices and stacks of them.

A product that is linear in each operand has two transposes, which say what reaches one operand given the other:
``left(grad, y)`` and ``right(x, grad)``. Each is again linear in both, and the product and the other transpose are its
transposes, so three ops a product are enough for every order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from string import ascii_letters

from asyncflow.graph.ir import Attrs, Node, Tensor
from asyncflow.graph.op import OPAQUE, Op, define, derivative, gradient_of_first, inputs_from
from asyncflow.graph.shapes import Shape, merge
from asyncflow.graph.spec import Spec
from asyncflow.ops import linalg
from asyncflow.ops.cost import elements
from asyncflow.ops.creation import eye
from asyncflow.ops.datatypes import broadcast_to
from asyncflow.ops.derivatives.datatypes import conjugated
from asyncflow.ops.derivatives.elementwise import reaching
from asyncflow.ops.derivatives.shapes import shape_of, sum_to, sum_to_like
from asyncflow.ops.extents import (
    apply_to_shape,
    shape_reader,
    template_shape,
)
from asyncflow.ops.linalg import einsum, matmul, matrix_transpose, tensordot
from asyncflow.ops.logic import equal
from asyncflow.ops.manipulation import expand_dims
from asyncflow.ops.promotion import promoted_dtype
from asyncflow.ops.searching import where
from asyncflow.ops.shape import extent_of
from asyncflow.values import Array, Kernel, Namespace

# -- transposes that find out at run time how their operands are shaped ----------------------------------------------


def _transpose_spec(x: Spec, y: Spec, *sizes: Spec, shape: Shape, known: Shape, **attrs: object) -> Spec:
    return Spec(promoted_dtype((x.dtype, y.dtype)), merge(template_shape(shape, sizes), known))


def _transpose_flops(inputs: Sequence[Shape], outputs: Sequence[Shape], **attrs: object) -> float:
    # Each axis is one of two of the three values, but for those of a batch: of matrices this is 2 * m * k * n.
    return 2.0 * math.sqrt(math.prod(elements(shape) for shape in (*inputs[:2], outputs[0])))


def _transpose_op(name: str, find: Callable[..., Array]) -> Op:
    """Registers an op; ``find(xp, x, y, shape, **attrs)`` gives its value but for broadcast axes, not yet summed."""

    def kernel(xp: Namespace, *, shape: Shape, known: Shape, **attrs: object) -> Kernel:
        read = shape_reader(shape)

        def run(x: Array, y: Array, *sizes: Array) -> Array:
            target = read(sizes)
            found = find(xp, x, y, target, **attrs)
            return _summed_to(xp, found, target).astype(xp.result_type(x.dtype, y.dtype), copy=False)

        return run

    return define(name, _transpose_spec, kernel, flops=_transpose_flops, host_inputs=inputs_from(2), traits=OPAQUE)


def _summed_to(xp: Namespace, x: Array, shape: tuple[int, ...]) -> Array:
    """`x` summed over the axes by which its shape is broadcast from `shape`."""
    if x.shape == shape:
        return x
    added = x.ndim - len(shape)
    axes = [axis for axis in range(x.ndim) if axis < added or (shape[axis - added] == 1 and x.shape[axis] != 1)]
    return xp.sum(x, axis=tuple(axes)).reshape(shape)


def _apply_transpose(op: Op, x: Tensor, y: Tensor, like: Tensor, **attrs: object) -> Tensor:
    """The result of a transpose for the operand `like`, of which it takes the shape alone."""
    return apply_to_shape(op, shape_of(like), x, y, known=like.shape, **attrs)


def _product_rules(left: Op, right: Op, product: Callable[..., Tensor], *names: str) -> None:
    """Installs the derivatives of the transposes of a product whose attributes have these names."""

    def attrs_of(node: Node) -> Attrs:
        return {name: node.attrs[name] for name in names}

    @derivative(left)
    def by_left(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
        reached, y, *sizes = node.inputs
        attrs = attrs_of(node)
        by_reached = reaching(reached, lambda: product(grad, conjugated(y), **attrs))
        by_y = reaching(y, lambda: _apply_transpose(right, grad, conjugated(reached), y, **attrs))
        return [by_reached, by_y, *[None] * len(sizes)]

    @derivative(right)
    def by_right(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
        x, reached, *sizes = node.inputs
        attrs = attrs_of(node)
        by_x = reaching(x, lambda: _apply_transpose(left, conjugated(reached), grad, x, **attrs))
        by_reached = reaching(reached, lambda: product(conjugated(x), grad, **attrs))
        return [by_x, by_reached, *[None] * len(sizes)]


# -- matmul ----------------------------------------------------------------------------------------------------------


def _as_columns(grad: Array, x_rank: int, y_rank: int) -> Array:
    """The gradient of a product with the axes back that vectors among the operands have taken away."""
    if y_rank == 1:
        grad = grad[..., None]
    return grad[..., None, :] if x_rank == 1 else grad


def _find_matmul_left(xp: Namespace, grad: Array, y: Array, shape: tuple[int, ...]) -> Array:
    columns = y[:, None] if y.ndim == 1 else y
    found = xp.matmul(_as_columns(grad, len(shape), y.ndim), xp.swapaxes(columns, -1, -2))
    return found[..., 0, :] if len(shape) == 1 else found


def _find_matmul_right(xp: Namespace, x: Array, grad: Array, shape: tuple[int, ...]) -> Array:
    rows = x[None, :] if x.ndim == 1 else x
    found = xp.matmul(xp.swapaxes(rows, -1, -2), _as_columns(grad, x.ndim, len(shape)))
    return found[..., 0] if len(shape) == 1 else found


MATMUL_LEFT = _transpose_op("matmul_left", _find_matmul_left)
"""The gradient of `x`, given that of ``x @ y``, and `y`; for ranks that only a run knows."""
MATMUL_RIGHT = _transpose_op("matmul_right", _find_matmul_right)
"""The gradient of `y`, given `x` and the gradient of ``x @ y``; for ranks that only a run knows."""
_product_rules(MATMUL_LEFT, MATMUL_RIGHT, matmul)


@derivative(linalg.MATMUL)
def _matmul(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    x, y = node.inputs
    return [
        reaching(x, lambda: _matmul_left(grad, conjugated(y), x)),
        reaching(y, lambda: _matmul_right(conjugated(x), grad, y)),
    ]


def _matmul_left(grad: Tensor, y: Tensor, x: Tensor) -> Tensor:
    """`MATMUL_LEFT`, in ordinary products where ranks are known.

    Only batches on both sides can have been broadcast: elsewhere there is one product of matrices, and no sum.
    """
    if x.ndim is None or y.ndim is None:
        return _apply_transpose(MATMUL_LEFT, grad, y, x)
    if y.ndim == 1:
        return expand_dims(grad, axis=-1) * y
    if x.ndim == 1 and y.ndim == 2:
        return matmul(y, grad)
    if x.ndim <= 2 < y.ndim:
        batch = tuple(range(y.ndim - 2))
        return tensordot(grad, y, axes=((*batch, y.ndim - 3 + x.ndim), (*batch, y.ndim - 1)))
    found = matmul(grad, matrix_transpose(y))
    return sum_to_like(found, x) if y.ndim > 2 else found


def _matmul_right(x: Tensor, grad: Tensor, y: Tensor) -> Tensor:
    """`MATMUL_RIGHT`, likewise."""
    if x.ndim is None or y.ndim is None:
        return _apply_transpose(MATMUL_RIGHT, x, grad, y)
    if x.ndim == 1:
        return x * grad if y.ndim == 1 else expand_dims(x, axis=-1) * expand_dims(grad, axis=-2)
    if y.ndim == 1 and x.ndim == 2:
        return matmul(grad, x)
    if y.ndim == 1 or (y.ndim == 2 < x.ndim):
        rows = tuple(range(x.ndim - 1))
        return tensordot(x, grad, axes=(rows, rows))
    found = matmul(matrix_transpose(x), grad)
    return sum_to_like(found, y) if x.ndim > 2 else found


gradient_of_first(linalg.MATRIX_TRANSPOSE, lambda node, grad: reaching(node.inputs[0], lambda: matrix_transpose(grad)))


# -- tensordot -------------------------------------------------------------------------------------------------------


def _free(rank: int, summed: Sequence[int]) -> tuple[int, ...]:
    return tuple(axis for axis in range(rank) if axis not in summed)


def _ordered(xp: Namespace, x: Array, axes: Sequence[int]) -> Array:
    """`x`, whose axis ``i`` is to become axis ``axes[i]``."""
    return xp.transpose(x, sorted(range(len(axes)), key=axes.__getitem__))


def _find_tensordot_left(
    xp: Namespace, grad: Array, y: Array, shape: tuple[int, ...], *, axes: linalg.Contraction
) -> Array:
    first, second = linalg._summed_axes(len(shape), y.ndim, axes)
    free_x, free_y = _free(len(shape), first), _free(y.ndim, second)
    found = xp.tensordot(grad, y, axes=(tuple(range(len(free_x), grad.ndim)), free_y))
    return _ordered(xp, found, [*free_x, *(first[second.index(j)] for j in sorted(second))])


def _find_tensordot_right(
    xp: Namespace, x: Array, grad: Array, shape: tuple[int, ...], *, axes: linalg.Contraction
) -> Array:
    first, second = linalg._summed_axes(x.ndim, len(shape), axes)
    free_x, free_y = _free(x.ndim, first), _free(len(shape), second)
    found = xp.tensordot(x, grad, axes=(free_x, tuple(range(len(free_x)))))
    return _ordered(xp, found, [*(second[first.index(i)] for i in sorted(first)), *free_y])


TENSORDOT_LEFT = _transpose_op("tensordot_left", _find_tensordot_left)
"""The gradient of `x`, given that of ``tensordot(x, y)``, and `y`."""
TENSORDOT_RIGHT = _transpose_op("tensordot_right", _find_tensordot_right)
"""The gradient of `y`, given `x` and the gradient of ``tensordot(x, y)``."""
_product_rules(TENSORDOT_LEFT, TENSORDOT_RIGHT, tensordot, "axes")


@derivative(linalg.TENSORDOT)
def _tensordot(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    x, y = node.inputs
    axes = node.attrs["axes"]
    return [
        reaching(x, lambda: _apply_transpose(TENSORDOT_LEFT, grad, conjugated(y), x, axes=axes)),
        reaching(y, lambda: _apply_transpose(TENSORDOT_RIGHT, conjugated(x), grad, y, axes=axes)),
    ]


# -- vecdot ----------------------------------------------------------------------------------------------------------


@derivative(linalg.VECDOT)
def _vecdot(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    x, y = node.inputs
    reached = expand_dims(grad, axis=node.attrs["axis"])  # which is counted from the last, as ranks may differ
    return [
        reaching(x, lambda: sum_to_like(conjugated(reached) * y, x)),
        reaching(y, lambda: sum_to_like(x * reached, y)),
    ]


# -- einsum ----------------------------------------------------------------------------------------------------------


def fit_to(x: Tensor, extents: Sequence[int | Tensor]) -> Tensor:
    """`x` summed over its axes that are to have extent 1, and repeated along its own of extent 1."""

    def kept(axis: int, extent: int | Tensor) -> int | Tensor:
        own = extent_of(x, axis)
        if isinstance(extent, int):
            return 1 if extent == 1 else own
        return where(equal(extent, 1), 1, own)

    return broadcast_to(sum_to(x, [kept(*each) for each in enumerate(extents)]), extents)


@derivative(linalg.EINSUM)
def _einsum(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    """The product of all other operands with the gradient, summed to the letters of each."""
    terms, result = linalg._parse(node.attrs["subscripts"])

    def operand(position: int) -> Tensor:
        others = [i for i in range(len(terms)) if i != position]
        factors = [(result, grad), *((terms[i], conjugated(node.inputs[i])) for i in others)]
        return _einsum_operand(node.inputs[position], terms[position], factors)

    return [reaching(x, partial(operand, i)) for i, x in enumerate(node.inputs)]


def _einsum_operand(x: Tensor, term: str, factors: Sequence[tuple[str, Tensor]]) -> Tensor:
    """The gradient of the operand `x` with the letters `term`, as the product of `factors`."""
    letters = "".join(dict.fromkeys(term))
    found_in = set("".join(letters_of for letters_of, _ in factors))
    kept = "".join(letter for letter in letters if letter in found_in)
    found = einsum(f"{','.join(letters_of for letters_of, _ in factors)}->{kept}", *(value for _, value in factors))
    # A letter of this operand alone was summed, or had extent 1 in all others.
    missing = tuple(i for i, letter in enumerate(letters) if letter not in found_in)
    if missing:
        found = expand_dims(found, axis=missing)
    extents = _extents(x, len(term))
    found = fit_to(found, [extents[term.index(letter)] for letter in letters])
    return found if letters == term else _on_diagonals(found, term, extents)


def _extents(x: Tensor, rank: int) -> list[int | Tensor]:
    known, shape = x.shape or (None,) * rank, shape_of(x)
    return [shape[axis] if extent is None else extent for axis, extent in enumerate(known)]


def _on_diagonals(x: Tensor, term: str, extents: Sequence[int | Tensor]) -> Tensor:
    """`x`, with an axis for each letter of `term`, on the diagonal of the axes that share one; zeros elsewhere."""
    unused = iter(letter for letter in ascii_letters if letter not in term)
    spread, masks, subscripts = "", [], ["".join(dict.fromkeys(term))]
    for axis, letter in enumerate(term):
        if letter not in spread:
            spread += letter
            continue
        fresh = next(unused)
        spread += fresh
        subscripts.append(letter + fresh)
        masks.append(eye(extents[axis], dtype=x.dtype))
    return einsum(f"{','.join(subscripts)}->{spread}", x, *masks)
