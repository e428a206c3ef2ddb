"""Linear algebra: products of vectors, matrices and stacks of them."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from functools import partial
from string import ascii_letters
from typing import Any, TypeAlias

import numpy as np

from asyncflow.errors import DTypeError, GraphError, ShapeError
from asyncflow.graph.building.build import TensorLike, apply, graph_for
from asyncflow.graph.ir import Tensor
from asyncflow.graph.op import NEW, NEW_UNCAPTURED, OPAQUE, Op, define
from asyncflow.graph.values import operators
from asyncflow.graph.values.dtypes import DType, summed_in
from asyncflow.graph.values.shapes import Shape, broadcast, format_shape, normalize_axis
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.arrays.datatypes import astype
from asyncflow.ops.arrays.manipulation import moveaxis, view_op
from asyncflow.ops.axes import normalize_axes, static_int
from asyncflow.ops.cost import PASS, elements, per_input_element
from asyncflow.ops.promotion import promote_operands, promoted_dtype, require_kind
from asyncflow.values import Array, Kernel, Namespace

Contraction: TypeAlias = int | tuple[tuple[int, ...], tuple[int, ...]]


def _product_dtype(*inputs: Spec) -> DType:
    for x in inputs:
        require_kind(x, "biufc", "numbers and booleans")
    return promoted_dtype(x.dtype for x in inputs)


def _narrowed(product: Kernel, dtype: DType) -> Kernel:
    """`product`, cast for the dtypes in which NumPy computes wider than it should answer."""
    if dtype.name != "bfloat16":
        return product
    return lambda *xs: product(*xs).astype(dtype)


def _apply_product(op: Op, *xs: TensorLike, **attrs: Any) -> Tensor:
    tensors = promote_operands(*xs)
    return apply(op, *tensors, dtype=promoted_dtype(x.dtype for x in tensors), **attrs)[0]


def _require_equal(n: int | None, m: int | None, x1: Spec, x2: Spec) -> None:
    if n is not None and m is not None and n != m:
        seen = f"{format_shape(x1.shape)} and {format_shape(x2.shape)}"
        raise ShapeError(f"summed extents of {seen} must be equal, found {n} and {m}")


# -- matmul ----------------------------------------------------------------------------------------------------------


def _matmul_shape(x1: Spec, x2: Spec) -> Shape:
    for x in (x1, x2):
        if x.shape == ():
            raise ShapeError("operands must be of rank 1 or higher, one is a scalar; multiply by it instead")
    if x1.shape is None or x2.shape is None:
        return None
    rows, columns = x1.shape[-2:-1], x2.shape[-1:] if len(x2.shape) > 1 else ()
    _require_equal(x1.shape[-1], x2.shape[-2] if len(x2.shape) > 1 else x2.shape[0], x1, x2)
    batch = broadcast((x1.shape[:-2], x2.shape[:-2]))
    assert batch is not None
    return batch + rows + columns


def _matmul_flops(inputs: Sequence[Shape], outputs: Sequence[Shape], **attrs: object) -> float:
    summed = elements((inputs[0] or (1,))[-1:])
    return 2.0 * elements(outputs[0]) * summed


MATMUL = define(
    "matmul",
    lambda x1, x2, *, dtype: Spec(_product_dtype(x1, x2), _matmul_shape(x1, x2)),
    lambda xp, dtype: _narrowed(xp.matmul, dtype),
    is_total=True,
    flops=_matmul_flops,
    traits=NEW,
)


def matmul(x1: TensorLike, x2: TensorLike, /) -> Tensor:
    """Matrix product; vectors are rows on the left and columns on the right, leading axes broadcast as a batch.

    Shapes: ``(..., m, k) @ (..., k, n) -> (..., m, n)``; the axis of a vector operand is summed away.

    Raises:
        ShapeError: the summed extents differ, or an operand is a scalar.
    """
    return _apply_product(MATMUL, x1, x2)


# -- matrix_transpose ------------------------------------------------------------------------------------------------


def _matrix_transpose_spec(x: Spec) -> Spec:
    if x.shape is None:
        return x
    if len(x.shape) < 2:
        raise ShapeError(f"needs rank 2 or higher, got {format_shape(x.shape)}")
    return Spec(x.dtype, (*x.shape[:-2], x.shape[-1], x.shape[-2]))


MATRIX_TRANSPOSE = view_op(
    "matrix_transpose", _matrix_transpose_spec, lambda xp: operator.methodcaller("swapaxes", -1, -2)
)


def matrix_transpose(x: TensorLike, /) -> Tensor:
    """Return `x` with the last two axes swapped.

    Raises:
        ShapeError: `x` has fewer than two axes.
    """
    return apply(MATRIX_TRANSPOSE, x)[0]


# -- tensordot -------------------------------------------------------------------------------------------------------


def _summed_axes(rank1: int, rank2: int, axes: Contraction) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if isinstance(axes, int):
        if not 0 <= axes <= min(rank1, rank2):
            raise ShapeError(f"cannot sum over {axes} axes of operands of rank {rank1} and {rank2}")
        return tuple(range(rank1 - axes, rank1)), tuple(range(axes))
    first, second = axes
    if len(first) != len(second):
        raise ShapeError(f"axes {axes} must name equally many axes of both operands")
    return normalize_axes(first, rank1), normalize_axes(second, rank2)


def _tensordot_spec(x1: Spec, x2: Spec, *, axes: Contraction, dtype: DType) -> Spec:
    result = _product_dtype(x1, x2)
    if x1.shape is None or x2.shape is None:
        return Spec(result)
    first, second = _summed_axes(len(x1.shape), len(x2.shape), axes)
    for i, j in zip(first, second, strict=True):
        _require_equal(x1.shape[i], x2.shape[j], x1, x2)
    left = [dim for i, dim in enumerate(x1.shape) if i not in first]
    right = [dim for j, dim in enumerate(x2.shape) if j not in second]
    return Spec(result, (*left, *right))


def _tensordot_flops(inputs: Sequence[Shape], outputs: Sequence[Shape], *, axes: Contraction, **attrs: object) -> float:
    x1 = inputs[0] or ()
    first = range(-axes, 0) if isinstance(axes, int) else axes[0]
    # The rank may be a guess.
    summed = elements(tuple(x1[i] for i in first if -len(x1) <= i < len(x1)))
    return 2.0 * elements(outputs[0]) * summed


def _tensordot_kernel(xp: Namespace, *, axes: Contraction, dtype: DType) -> Kernel:
    return _narrowed(partial(xp.tensordot, axes=axes), dtype)


TENSORDOT = define("tensordot", _tensordot_spec, _tensordot_kernel, flops=_tensordot_flops, traits=OPAQUE)


def tensordot(x1: TensorLike, x2: TensorLike, /, *, axes: int | tuple[Sequence[int], Sequence[int]] = 2) -> Tensor:
    """Product summed over pairs of axes.

    Args:
        x1: left operand.
        x2: right operand.
        axes: how many of the last axes of `x1` pair with the first of `x2`; or which axes of both, in two sequences.

    Shapes: the remaining axes of `x1`, then the remaining axes of `x2`.
    """
    if isinstance(axes, tuple | list):
        if len(axes) != 2:
            raise GraphError(f"tensordot: axes must be an int or two sequences of ints, got {axes!r}")
        first, second = (tuple(static_int(item, "an axis") for item in side) for side in axes)
        return _apply_product(TENSORDOT, x1, x2, axes=(first, second))
    return _apply_product(TENSORDOT, x1, x2, axes=static_int(axes, "axes"))


# -- vecdot ----------------------------------------------------------------------------------------------------------


def _vecdot_spec(x1: Spec, x2: Spec, *, axis: int, dtype: DType) -> Spec:
    result = _product_dtype(x1, x2)
    for x in (x1, x2):
        if x.shape is not None:
            normalize_axis(axis, len(x.shape))
    if x1.shape is None or x2.shape is None:
        return Spec(result)
    _require_equal(x1.shape[axis], x2.shape[axis], x1, x2)
    return Spec(result, broadcast(_without(shape, axis) for shape in (x1.shape, x2.shape)))


def _without(shape: tuple[int | None, ...], axis: int) -> Shape:
    at = axis % len(shape)
    return shape[:at] + shape[at + 1 :]


def _vecdot_kernel(xp: Namespace, *, axis: int, dtype: DType) -> Kernel:
    if hasattr(xp, "vecdot"):
        return _narrowed(partial(xp.vecdot, axis=axis), dtype)

    def kernel(x1: Array, x2: Array) -> Array:
        row, column = xp.moveaxis(x1, axis, -1).conj()[..., None, :], xp.moveaxis(x2, axis, -1)[..., :, None]
        return xp.matmul(row, column)[..., 0, 0]

    return _narrowed(kernel, dtype)


VECDOT = define("vecdot", _vecdot_spec, _vecdot_kernel, flops=per_input_element, rows="axis", traits=OPAQUE)


def vecdot(x1: TensorLike, x2: TensorLike, /, *, axis: int = -1) -> Tensor:
    """Dot product of vectors along `axis`, the first conjugated; the other axes broadcast.

    Args:
        x1: numbers, of rank 1 or higher.
        x2: likewise.
        axis: the one along which the vectors lie; below 0 where a rank is not known.

    Raises:
        ShapeError: the extents along `axis` differ, or it is not below 0 and a rank is not known.
    """
    at = static_int(axis, "axis")
    with graph_for(x1, x2):
        if at >= 0:  # with different ranks, `at` names a different axis of each
            x1, x2, at = moveaxis(x1, at, -1), moveaxis(x2, at, -1), -1
        return _apply_product(VECDOT, x1, x2, axis=at)


# -- einsum ----------------------------------------------------------------------------------------------------------


def _parse(subscripts: str) -> tuple[list[str], str]:
    """The letters of each operand and of the result; NumPy's implicit result where there is no arrow."""
    left, arrow, result = subscripts.replace(" ", "").partition("->")
    terms = left.split(",")
    letters = "".join(terms)
    _check_signs(subscripts, (*terms, result))
    if not arrow:
        result = _implicit_result(letters)
    unknown = set(result) - set(letters)
    if unknown or len(set(result)) < len(result):
        raise GraphError(f"einsum result {result!r} of {subscripts!r} must name letters of the operands, each once")
    return terms, result


def _check_signs(subscripts: str, terms: Iterable[str]) -> None:
    if not all((term.isascii() and term.isalpha()) or not term for term in terms):
        raise GraphError(
            f"einsum subscripts {subscripts!r} may hold letters, commas, one '...' a term and one '->' only"
        )


def _implicit_result(letters: str) -> str:
    return "".join(sorted(letter for letter in set(letters) if letters.count(letter) == 1))


def _spelled_out(subscripts: str, xs: Sequence[Tensor]) -> str:
    """The subscripts with letters for what each ``...`` stands for: the axes without one, which broadcast.

    Raises:
        GraphError: they are malformed.
        ShapeError: an operand with ``...`` has unknown rank, or fewer axes than letters.
    """
    left, arrow, result = subscripts.replace(" ", "").partition("->")
    terms = left.split(",")
    _check_signs(subscripts, [term.replace("...", "", 1) for term in (*terms, result)])
    if "..." not in subscripts or len(terms) != len(xs):
        return subscripts  # the shape rule reports a wrong number of operands
    ranks = [_axes_of_ellipsis(x, term) for x, term in zip(xs, terms, strict=True)]
    unused = [letter for letter in ascii_letters if letter not in subscripts]
    if max(ranks) > len(unused):
        raise GraphError(f"einsum subscripts {subscripts!r} stand for more axes than there are letters")
    batch = "".join(unused[: max(ranks)])
    if not arrow:
        result = "..." + _implicit_result(left.replace(",", "").replace(".", ""))
    if batch and "..." not in result:
        raise GraphError(f"einsum result {result!r} of {subscripts!r} must hold '...': it stands for {len(batch)} axes")
    spelled = [term.replace("...", batch[len(batch) - rank :]) for term, rank in zip(terms, ranks, strict=True)]
    return f"{','.join(spelled)}->{result.replace('...', batch)}"


def _axes_of_ellipsis(x: Tensor, term: str) -> int:
    letters = term.replace("...", "")
    if letters == term:
        return 0
    if x.ndim is None:
        raise ShapeError(
            f"einsum: {x!r} has unknown rank, so the meaning of '...' in {term!r} is open; give it a shape, "
            f"or write a letter for each axis"
        )
    if x.ndim < len(letters):
        raise ShapeError(f"einsum: {x!r} has fewer axes than {term!r} has letters")
    return x.ndim - len(letters)


def _extents(xs: Sequence[Spec], terms: Sequence[str]) -> dict[str, int | None]:
    """Extent of each letter; letters of operands of unknown rank, and of extent 1, broadcast."""
    shapes: dict[str, list[Shape]] = {}
    for x, term in zip(xs, terms, strict=True):
        if x.shape is not None and len(x.shape) != len(term):
            raise ShapeError(f"operand {format_shape(x.shape)} does not have the {len(term)} axes of {term!r}")
        for letter, dim in zip(term, x.shape or (None,) * len(term), strict=True):
            shapes.setdefault(letter, []).append((dim,))
    extents: dict[str, int | None] = {}
    for letter, dims in shapes.items():
        joined = broadcast(dims)
        assert joined is not None
        extents[letter] = joined[0]
    return extents


def _einsum_spec(*xs: Spec, subscripts: str, dtype: DType) -> Spec:
    terms, result = _parse(subscripts)
    if len(terms) != len(xs):
        raise ShapeError(f"subscripts {subscripts!r} are for {len(terms)} operands, got {len(xs)}")
    extents = _extents(xs, terms)
    if any(x.dtype != dtype for x in xs):
        raise DTypeError(f"operands must be of one dtype, got {', '.join(map(str, xs))}")
    return Spec(_product_dtype(*xs), tuple(extents[letter] for letter in result))


def _einsum_flops(inputs: Sequence[Shape], outputs: Sequence[Shape], *, subscripts: str, **attrs: object) -> float:
    terms, _ = _parse(subscripts)
    extents: dict[str, int] = {}
    for shape, term in zip(inputs, terms, strict=True):
        for letter, dim in zip(term, shape or (), strict=False):
            extents[letter] = max(extents.get(letter, 1), 1 if dim is None else dim)
    # Products of more than two operands are counted element by element.
    return (1.0 if len(inputs) < 3 else PASS) * len(inputs) * elements(tuple(extents.values()))


def _einsum_kernel(xp: Namespace, *, subscripts: str, dtype: DType) -> Kernel:
    # An optimized path contracts pairs with matrix products; for one or two operands it is the plain call.
    product: Kernel = partial(xp.einsum, subscripts, optimize=True)
    if xp is np and dtype.kind in "fc":
        product = _one_product(subscripts, product) or product
    if summed_in(dtype) == dtype:
        # With one operand the result may be a view, which would keep the operand's memory.
        return (lambda x: xp.array(product(x))) if len(_parse(subscripts)[0]) == 1 else product
    return lambda *xs: product(*(x.astype(summed_in(dtype)) for x in xs)).astype(dtype)


def _one_product(subscripts: str, otherwise: Kernel) -> Kernel | None:
    """Return a contraction of two operands as a product of matrices, or None for any other contraction.

    NumPy plans a path in each call, which takes as long as the products of a few rows: heads of attention take half of
    the time like this.
    """
    terms, result = _parse(subscripts)
    if len(terms) != 2 or any(len(set(term)) < len(term) for term in terms):
        return None
    of_x, of_y = terms
    shared = [letter for letter in of_x if letter in of_y]
    batch = [letter for letter in result if letter in shared]
    summed = [letter for letter in shared if letter not in result]
    left = [letter for letter in result if letter in of_x and letter not in shared]
    right = [letter for letter in result if letter in of_y and letter not in shared]
    if not summed or len(shared) + len(left) != len(of_x) or len(shared) + len(right) != len(of_y):
        return None
    first, n_summed = len(batch), len(summed)
    to_x = tuple(of_x.index(letter) for letter in (*batch, *left, *summed))
    to_y = tuple(of_y.index(letter) for letter in (*batch, *summed, *right))
    back = tuple((*batch, *left, *right).index(letter) for letter in result)

    def product(x: Array, y: Array) -> Array:
        x_axes, y_axes = x.transpose(to_x), y.transpose(to_y)
        rows, columns = x_axes.shape[first:-n_summed], y_axes.shape[first + n_summed :]
        inner = x_axes.shape[-n_summed:]
        if inner != y_axes.shape[first : first + n_summed]:  # an extent of 1 broadcasts
            found: Array = otherwise(x, y)
            return found
        count = math.prod(inner)
        flat: Array = np.matmul(
            x_axes.reshape((*x_axes.shape[:first], math.prod(rows), count)),
            y_axes.reshape((*y_axes.shape[:first], count, math.prod(columns))),
        )
        return flat.reshape((*flat.shape[:first], *rows, *columns)).transpose(back)

    return product


EINSUM = define("einsum", _einsum_spec, _einsum_kernel, flops=_einsum_flops, traits=NEW_UNCAPTURED)


def einsum(subscripts: str, /, *operands: TensorLike) -> Tensor:
    """Return an Einstein summation, such as ``af.einsum("bik,bkj->bij", x, y)``.

    Args:
        subscripts: a letter per axis of each operand, and ``...`` for all that have none, which broadcast. Without
            ``->`` the result has the unnamed axes first, then the letters that occur once, sorted.
        operands: one tensor per comma-separated term; with ``...``, of known rank.

    Raises:
        GraphError: the subscripts are malformed.
        ShapeError: an operand has another rank than its term, or extents of one letter differ.
    """
    if not isinstance(subscripts, str):
        raise GraphError(f"einsum takes its subscripts first, such as 'ij,jk->ik'; got {subscripts!r}")
    with graph_for(*operands):
        tensors = promote_operands(*operands)
        subscripts = _spelled_out(subscripts, tensors)
        _parse(subscripts)
        # NumPy contracts pairs without promotion, so early pairs would be multiplied in their own dtype.
        dtype = promoted_dtype(x.dtype for x in tensors)
        return _apply_product(
            EINSUM, *(x if x.dtype == dtype else astype(x, dtype) for x in tensors), subscripts=subscripts
        )


operators.install(matmul=matmul, matrix_transpose=matrix_transpose)
