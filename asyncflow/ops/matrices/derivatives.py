"""Derivatives of products, diagonals, inverses, determinants, equations and decompositions of matrices.

A product's is made of products. Taking a diagonal and putting it into a matrix are each other's transposes. For complex
values they are in the convention of `asyncflow.ops.arithmetic.derivatives`. The rules of decompositions are from Giles,
"An extended collection of matrix derivative results" (2008). The complex and rectangular cases are as in Seeger et al.,
"Auto-differentiating linear algebra" (2017), and Townsend, "Differentiating the singular value
decomposition" (2016).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from string import ascii_letters

from asyncflow.errors import GraphError, ShapeError
from asyncflow.graph.building.build import apply, as_tensor
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import derivative, gradient_of_first, not_differentiable
from asyncflow.graph.values.dtypes import int64
from asyncflow.ops.arithmetic.derivatives import reaching
from asyncflow.ops.arithmetic.elementwise import imag, maximum, negative, reciprocal, square
from asyncflow.ops.arithmetic.logic import equal
from asyncflow.ops.arrays.creation import eye, ones, tril, triu
from asyncflow.ops.arrays.datatypes import broadcast_to
from asyncflow.ops.arrays.manipulation import concat, expand_dims, permute_dims, reshape
from asyncflow.ops.arrays.shape import extent_of, shape, size
from asyncflow.ops.derivatives import shapes
from asyncflow.ops.derivatives.dtypes import conjugated, in_dtype_of
from asyncflow.ops.derivatives.shapes import Extents, ensure_shape, shape_of, sum_to, sum_to_like
from asyncflow.ops.matrices import decompositions as d
from asyncflow.ops.matrices import products as linalg
from asyncflow.ops.matrices.decompositions import adjoint, eigh, inv, svd
from asyncflow.ops.matrices.diagonals import DIAGONAL, DIAGONAL_MATRIX, diagonal, diagonal_matrix
from asyncflow.ops.matrices.products import einsum, matmul, matrix_transpose, tensordot
from asyncflow.ops.reductions.statistical import prod
from asyncflow.ops.searching.searching import where

# -- matmul ----------------------------------------------------------------------------------------------------------


@derivative(linalg.MATMUL)
def _matmul(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    x, y = node.inputs
    return [
        reaching(x, lambda: _matmul_left(grad, conjugated(y), x)),
        reaching(y, lambda: _matmul_right(conjugated(x), grad, y)),
    ]


def _matmul_left(grad: Tensor, y: Tensor, x: Tensor) -> Tensor:
    """The gradient of `x`, given that of ``x @ y``, and `y`.

    Only batches on both sides can have been broadcast: elsewhere there is one product of matrices, and no sum.
    """
    if x.ndim is None or y.ndim is None:
        whole, rows, columns = _as_matrices(grad, shape_of(x), shape(y))
        found = sum_to(matmul(whole, matrix_transpose(reshape(y, columns))), rows)
        return ensure_shape(reshape(found, shape_of(x)), x.shape)
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
    """The gradient of `y`, given `x`, and that of ``x @ y``."""
    if x.ndim is None or y.ndim is None:
        whole, as_rows, columns = _as_matrices(grad, shape(x), shape_of(y))
        found = sum_to(matmul(matrix_transpose(reshape(x, as_rows)), whole), columns)
        return ensure_shape(reshape(found, shape_of(y)), y.shape)
    if x.ndim == 1:
        return x * grad if y.ndim == 1 else expand_dims(x, axis=-1) * expand_dims(grad, axis=-2)
    if y.ndim == 1 and x.ndim == 2:
        return matmul(grad, x)
    if y.ndim == 1 or (y.ndim == 2 < x.ndim):
        rows = tuple(range(x.ndim - 1))
        return tensordot(x, grad, axes=(rows, rows))
    found = matmul(matrix_transpose(x), grad)
    return sum_to_like(found, y) if x.ndim > 2 else found


def _as_matrices(grad: Tensor, left: Extents, right: Extents) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of a product whose operands have these shapes, and the shapes, with the axes that vectors lack.

    A vector on the left is a row, and one on the right a column.
    """
    known = [as_tensor(extents, int64) for extents in (left, right)]
    left_ones, right_ones = (ones((maximum(2 - size(extents), 0),), dtype=int64) for extents in known)
    rows, columns = concat([left_ones, known[0]]), concat([known[1], right_ones])
    own = shape(grad)
    batch = own[: size(own) - 2 + size(left_ones) + size(right_ones)]
    return reshape(grad, concat([batch, rows[-2:-1], columns[-1:]])), rows, columns


gradient_of_first(linalg.MATRIX_TRANSPOSE, lambda node, grad: reaching(node.inputs[0], lambda: matrix_transpose(grad)))


# -- tensordot -------------------------------------------------------------------------------------------------------


@derivative(linalg.TENSORDOT)
def _tensordot(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    x, y = node.inputs
    axes = node.attrs["axes"]
    if x.ndim is not None and y.ndim is not None:
        first, second = linalg._summed_axes(x.ndim, y.ndim, axes)
        free_x, free_y = _free(x.ndim, first), _free(y.ndim, second)
        rows, columns = tuple(range(len(free_x))), tuple(range(len(free_x), len(free_x) + len(free_y)))
        by_x = [*free_x, *(first[second.index(axis)] for axis in sorted(second))]
        by_y = [*(second[first.index(axis)] for axis in sorted(first)), *free_y]
        return [
            reaching(x, lambda: _ordered(tensordot(grad, conjugated(y), axes=(columns, free_y)), by_x)),
            reaching(y, lambda: _ordered(tensordot(conjugated(x), grad, axes=(free_x, rows)), by_y)),
        ]
    if not isinstance(axes, int):
        raise ShapeError(
            f"tensordot over the axes {axes} has a gradient where ranks are known, and they are not: {x!r}, {y!r}"
            f"\n  written at {node.location}"
        )
    left, right = (as_tensor(shape_of(operand), int64) for operand in (x, y))
    outer, inner, last = prod(left[: size(left) - axes]), prod(right[:axes]), prod(right[axes:])
    whole = reshape(grad, (outer, last))
    x_matrix, y_matrix = reshape(conjugated(x), (outer, inner)), reshape(conjugated(y), (inner, last))
    return [
        reaching(x, lambda: ensure_shape(reshape(matmul(whole, matrix_transpose(y_matrix)), shape_of(x)), x.shape)),
        reaching(y, lambda: ensure_shape(reshape(matmul(matrix_transpose(x_matrix), whole), shape_of(y)), y.shape)),
    ]


def _free(rank: int, summed: Sequence[int]) -> tuple[int, ...]:
    return tuple(axis for axis in range(rank) if axis not in summed)


def _ordered(x: Tensor, axes: Sequence[int]) -> Tensor:
    """`x`, whose axis ``i`` is to become axis ``axes[i]``."""
    return permute_dims(x, sorted(range(len(axes)), key=axes.__getitem__))


# -- vecdot ----------------------------------------------------------------------------------------------------------


@derivative(linalg.VECDOT)
def _vecdot(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    x, y = node.inputs
    reached = expand_dims(grad, axis=node.attrs["axis"])  # `axis` counts from the end, as ranks may differ
    return [
        reaching(x, lambda: sum_to_like(conjugated(reached) * y, x)),
        reaching(y, lambda: sum_to_like(x * reached, y)),
    ]


# -- einsum ----------------------------------------------------------------------------------------------------------


def fit_to(x: Tensor, extents: Sequence[int | Tensor]) -> Tensor:
    """Return `x` summed over axes that must have extent 1, and repeated along its own axes of extent 1."""

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
    # Letters found only in this operand were summed, or had extent 1 in all others.
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


# -- diagonals -------------------------------------------------------------------------------------------------------


@derivative(DIAGONAL)
def _diagonal(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    (x,) = node.inputs
    rows, columns = (shapes.extent_of(x, axis) for axis in (-2, -1))
    return [ensure_shape(diagonal_matrix(grad, rows, columns, offset=node.attrs["offset"]), x.shape)]


gradient_of_first(
    DIAGONAL_MATRIX,
    lambda node, grad: ensure_shape(diagonal(grad, offset=node.attrs["offset"]), node.inputs[0].shape),
)


# -- decompositions --------------------------------------------------------------------------------------------------


not_differentiable(d.MATRIX_RANK, because="a rank is an integer")


def _columns(x: Tensor) -> Tensor:
    """Vectors along the last axis, as what multiplies the columns of matrices."""
    return expand_dims(x, axis=-2)


def _everywhere(x: Tensor) -> Tensor:
    """Return one number a matrix with two more axes, as a factor of the whole matrix."""
    return expand_dims(x, axis=(-2, -1))


def _hermitian(x: Tensor) -> Tensor:
    return (x + adjoint(x)) / 2


def _inverse_differences(values: Tensor) -> Tensor:
    """``1 / (values[j] - values[i])`` at row i and column j; 0 where they are equal."""
    # Equal eigenvalues do not determine their vectors, so a loss that depends on the choice has no derivative: pass 0.
    difference = expand_dims(values, axis=-2) - expand_dims(values, axis=-1)
    is_zero = equal(difference, 0)
    return where(is_zero, 0.0, reciprocal(where(is_zero, 1.0, difference)))


# -- square matrices -------------------------------------------------------------------------------------------------


@derivative(d.CHOLESKY)
def _cholesky(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    lower = node.outputs[0]
    reached = adjoint(lower) @ grad
    # The lower triangle, with half of the diagonal.
    half = (tril(reached) + tril(reached, k=-1)) / 2
    right = adjoint(solve_matrices(adjoint(lower), adjoint(solve_matrices(adjoint(lower), half))))
    return [ensure_shape(_hermitian(right), node.inputs[0].shape)]


@derivative(d.DET)
def _det(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    (x,) = node.inputs
    return [_everywhere(grad * conjugated(node.outputs[0])) * adjoint(inv(x))]


@derivative(d.SLOGDET)
def _slogdet(node: Node, by_sign: Tensor | None, by_log: Tensor | None) -> Sequence[Tensor | None]:
    (x,) = node.inputs
    sign = node.outputs[0]
    factor = by_log
    if by_sign is not None and sign.dtype.kind == "c":  # the sign of real matrices is constant
        turned = -1j * imag(conjugated(by_sign) * sign)
        factor = turned if factor is None else turned + factor
    return [None if factor is None else in_dtype_of(_everywhere(factor) * adjoint(inv(x)), x)]


@derivative(d.INV)
def _inv(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    turned = adjoint(node.outputs[0])
    return [negative(turned @ grad @ turned)]


@derivative(d.EIGH)
def _eigh(node: Node, by_values: Tensor | None, by_vectors: Tensor | None) -> Sequence[Tensor | None]:
    values, vectors = node.outputs
    turned, found = adjoint(vectors), None
    if by_vectors is not None:
        found = vectors @ (turned @ by_vectors * _inverse_differences(values)) @ turned
    if by_values is not None:
        diagonal_part = (vectors * _columns(by_values)) @ turned
        found = diagonal_part if found is None else found + diagonal_part
    assert found is not None
    return [_hermitian(found)]


@derivative(d.EIGVALSH)
def _eigvalsh(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    # The forward op computes no vectors, so that programs without a gradient do not pay for them.
    vectors = eigh(node.inputs[0]).eigenvectors
    return [(vectors * _columns(grad)) @ adjoint(vectors)]


@derivative(d.SOLVE)
def _solve(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    x1, x2 = node.inputs
    found = solve_matrices(adjoint(x1), grad)
    by_x1 = negative(found @ adjoint(node.outputs[0]))
    return [sum_to_like(by_x1, x1), sum_to_like(found, x2)]


def solve_matrices(x1: Tensor, x2: Tensor) -> Tensor:
    """`solve`, where `x2` holds matrices whatever is known of its rank."""
    return apply(d.SOLVE, x1, x2)[0]


# -- any matrices ----------------------------------------------------------------------------------------------------


@derivative(d.QR)
def _qr(node: Node, by_q: Tensor | None, by_r: Tensor | None) -> Sequence[Tensor | None]:
    """Needs independent columns, and no more of them in `Q` than in `x`.

    Raises:
        GraphError: it is known that there are more.
    """
    (x,), (q, r) = node.inputs, node.outputs
    rows, columns = (None, None) if r.shape is None else r.shape[-2:]
    if rows is not None and columns is not None and rows != columns:
        raise GraphError(
            f"qr has a gradient where R is square, and that of {x!r} (mode {node.attrs['mode']!r}) is not: it is "
            f"{rows} by {columns}\n  written at {node.location}"
        )
    inner = None if by_r is None else by_r @ adjoint(r)
    if by_q is not None:
        part = negative(adjoint(q) @ by_q)
        inner = part if inner is None else inner + part
    assert inner is not None
    mirrored = triu(inner, k=1) + adjoint(triu(inner))
    found = q @ _hermitian(mirrored)
    if by_q is not None:
        found = found + by_q
    return [ensure_shape(adjoint(solve_matrices(r, adjoint(found))), x.shape)]


@derivative(d.SVD)
def _svd(node: Node, by_u: Tensor | None, by_s: Tensor | None, by_vh: Tensor | None) -> Sequence[Tensor | None]:
    (x,), (u, _, vh) = node.inputs, node.outputs
    if by_u is None and by_vh is None:
        assert by_s is not None
        if node.attrs["full_matrices"]:
            u, _, vh = svd(x, full_matrices=False)
        return [ensure_shape((u * _columns(by_s)) @ vh, x.shape)]
    if node.attrs["full_matrices"] and not (x.shape and x.shape[-1] is not None and x.shape[-2] == x.shape[-1]):
        raise GraphError(
            f"svd has a gradient through U and Vh of square matrices only, or with full_matrices=False; x is {x!r}"
            f"\n  written at {node.location}"
        )
    return [ensure_shape(_by_vectors(node, by_u, by_s, by_vh), x.shape)]


def _by_vectors(node: Node, by_u: Tensor | None, by_s: Tensor | None, by_vh: Tensor | None) -> Tensor:
    u, s, vh = node.outputs
    inverse = _inverse_differences(square(s))
    inner, around = None, None
    if by_u is not None:
        reached = adjoint(u) @ by_u
        inner = (reached - adjoint(reached)) * inverse * _columns(s)
        if u.dtype.kind == "c":
            inner = inner + _on_diagonal(inner, 1j * imag(diagonal(reached)) / s)
        around = ((by_u - u @ reached) / _columns(s)) @ vh
    if by_vh is not None:
        v, by_v = adjoint(vh), adjoint(by_vh)
        reached = vh @ by_v
        part = expand_dims(s, axis=-1) * ((reached - adjoint(reached)) * inverse)
        inner = part if inner is None else inner + part
        outside = (u / _columns(s)) @ adjoint(by_v - v @ reached)
        around = outside if around is None else around + outside
    assert inner is not None
    assert around is not None
    found = u @ inner @ vh + around
    return found if by_s is None else found + (u * _columns(by_s)) @ vh


def _on_diagonal(like: Tensor, values: Tensor) -> Tensor:
    """`values` on the diagonal of matrices shaped like `like`, zeros elsewhere."""
    # Built from `like`, as its shape may be known only in the run.
    everywhere = like * 0 + _columns(values)
    return tril(triu(everywhere))


@derivative(d.SVDVALS)
def _svdvals(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    (x,) = node.inputs
    u, _, vh = svd(x, full_matrices=False)
    return [ensure_shape((u * _columns(grad)) @ vh, x.shape)]


@derivative(d.PINV)
def _pinv(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    """Golub and Pereyra's, where the rank does not change."""
    (x,), (y,) = node.inputs, node.outputs
    turned, reached = adjoint(y), adjoint(grad)
    left = reached @ y @ turned
    right = turned @ y @ reached
    found = (left - x @ (y @ left)) + (right - (right @ y) @ x) - turned @ grad @ turned
    return [ensure_shape(found, x.shape)]
