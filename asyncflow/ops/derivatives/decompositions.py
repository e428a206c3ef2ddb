"""Derivatives of inverses, determinants, equations and decompositions.

For complex values they are in the convention of `asyncflow.ops.derivatives.elementwise`. The rules of decompositions
are from Giles, "An extended collection of matrix derivative results" (2008). The complex and rectangular cases are as
in Seeger et al., "Auto-differentiating linear algebra" (2017), and Townsend, "Differentiating the singular value
decomposition" (2016).
"""

from __future__ import annotations

from collections.abc import Sequence

from asyncflow.errors import GraphError
from asyncflow.graph.build import apply
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import derivative, not_differentiable
from asyncflow.ops import decompositions as d
from asyncflow.ops.creation import tril, triu
from asyncflow.ops.decompositions import adjoint, eigh, inv, svd
from asyncflow.ops.derivatives.datatypes import conjugated, in_dtype_of
from asyncflow.ops.derivatives.shapes import ensure_shape, sum_to_like
from asyncflow.ops.diagonals import diagonal
from asyncflow.ops.elementwise import imag, negative, reciprocal, square
from asyncflow.ops.logic import equal
from asyncflow.ops.manipulation import expand_dims
from asyncflow.ops.searching import where

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
    if by_sign is not None and sign.dtype.kind == "c":  # the sign of real matrices stays
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
