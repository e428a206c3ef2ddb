"""Convolution by Fourier transforms: `fftconvolve`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Literal, TypeAlias, get_args

from asyncflow.errors import GraphError, ShapeError
from asyncflow.graph.building.build import TensorLike, apply, as_tensor, graph_for
from asyncflow.graph.ir import Tensor
from asyncflow.graph.values.dtypes import DType, complex64, complex128, float32, float64
from asyncflow.ops.arithmetic.elementwise import maximum, minimum, multiply, real
from asyncflow.ops.arithmetic.logic import greater_equal, logical_and
from asyncflow.ops.arrays.datatypes import astype
from asyncflow.ops.arrays.extents import apply_to_shape
from asyncflow.ops.arrays.shape import extent_of
from asyncflow.ops.axes import as_axes, normalize_axes, replaced
from asyncflow.ops.derivatives.shapes import CHECK_SHAPE, ensure_shape
from asyncflow.ops.indexing.indexing import sliced
from asyncflow.ops.promotion import kind_of, require_kind
from asyncflow.ops.searching.searching import where
from asyncflow.ops.transforms.fft import FFT, IFFT, irfftn, rfftn

ConvolutionMode: TypeAlias = Literal["full", "same", "valid"]


def fftconvolve(
    x: TensorLike,
    y: TensorLike,
    /,
    mode: ConvolutionMode = "full",
    *,
    axes: int | Sequence[int] | None = None,
) -> Tensor:
    """Convolve two arrays by Fourier transforms, as SciPy's `fftconvolve` does.

    Its time grows with ``n log n``, where that of a sum of products grows with the product of both lengths. Its errors
    are of the size of the largest result: an infinity or NaN anywhere reaches everything.

    Args:
        x: numbers.
        y: numbers of the same rank.
        mode: ``"full"``: all ``n + m - 1`` elements along each axis; ``"same"``: as many as `x` has, from the middle;
            ``"valid"``: only elements that need no zeros around the larger array.
        axes: along which; None for all. The other axes broadcast.

    Returns:
        Floats, complex if an operand is: in single precision if both operands have that or half precision, and else in
        double precision. Of two scalars it is the product, in their own dtype.

    Raises:
        DTypeError: an operand has no numbers.
        GraphError: `mode` is another, or `axes` is empty.
        ShapeError: a rank is not known, ranks differ, other axes do not broadcast, an array is empty; or, for
            ``"valid"``, neither array is at least as large as the other along all `axes`. Extents that only the run
            knows make it a `KernelError` there; of arrays that are empty only there, sums are zeros.

    >>> import asyncflow as af
    >>> with af.Graph():
    ...     fftconvolve(af.placeholder("float32", (None, 100)), af.ones((1, 9)), "same", axes=1)
    <Tensor getitem_1:0 float64[?,100]>
    """
    if mode not in get_args(ConvolutionMode):
        raise GraphError(f"fftconvolve: mode is 'full', 'same' or 'valid'; got {mode!r}")
    with graph_for(x, y):
        one, other = as_tensor(x), as_tensor(y)
        found = _axes_of(one, other, axes)
        if not one.ndim:
            return multiply(one, other)
        _check(one, other, found, mode)
        checked = _valid(one, other, found) if mode == "valid" else one
        dtype = _dtype_of(one, other)
        whole = _whole(astype(checked, dtype), astype(other, dtype), found)
        for axis in range(one.ndim):
            whole = _part(whole, axis, extent_of(one, axis), extent_of(other, axis), mode, is_summed=axis in found)
        return whole


def _axes_of(one: Tensor, other: Tensor, axes: int | Sequence[int] | None) -> tuple[int, ...]:
    for each in (one, other):
        require_kind(each.spec, "biufc", "numbers")
        if each.ndim is None:
            raise ShapeError(f"fftconvolve: the rank of {each!r} is not known; give its placeholder one")
    assert one.ndim is not None
    if one.ndim != other.ndim:
        raise ShapeError(f"fftconvolve: both arrays have one rank; got {one.spec} and {other.spec}")
    found = normalize_axes(as_axes(axes), one.ndim)
    if axes is not None and not found:
        raise GraphError("fftconvolve: axes is empty; leave it out for all axes")
    return found


def _check(one: Tensor, other: Tensor, axes: Sequence[int], mode: ConvolutionMode) -> None:
    """Raise ShapeError for extents that do not fit, as far as they are known."""
    assert one.shape is not None and other.shape is not None
    pairs = list(zip(one.shape, other.shape, strict=True))
    if 0 in one.shape or 0 in other.shape:
        raise ShapeError(f"fftconvolve: an empty array has no convolution; got {one.spec} and {other.spec}")
    for axis, (n, m) in enumerate(pairs):
        if axis not in axes and n is not None and m is not None and n != m and 1 not in (n, m):
            raise ShapeError(f"fftconvolve: axis {axis} is not in axes, and {n} and {m} do not broadcast")
    known = [(n, m) for n, m in map(pairs.__getitem__, axes) if n is not None and m is not None]
    if mode == "valid" and any(n > m for n, m in known) and any(n < m for n, m in known):
        raise ShapeError(
            f"fftconvolve: mode='valid' needs one array that is at least as large as the other along all axes; got "
            f"{one.spec} and {other.spec}"
        )


def _valid(one: Tensor, other: Tensor, axes: Sequence[int]) -> Tensor:
    """Return `one`, in the run only if one array is at least as large as the other along all `axes`."""
    extents = [(axis, extent_of(one, axis), extent_of(other, axis)) for axis in axes]
    if len(axes) == 1 or all(isinstance(n, int) and isinstance(m, int) for _, n, m in extents):
        return one  # checked by `_check`
    is_larger = reduce(logical_and, (greater_equal(n, m) for _, n, m in extents))
    expected: list[int | Tensor] = [extent_of(one, axis) for axis in range(one.ndim or 0)]
    for axis, n, m in extents:
        expected[axis] = where(is_larger, maximum(n, m), minimum(n, m))
    what = "mode='valid' needs one array that is at least as large as the other along all axes: the first"
    return ensure_shape(apply_to_shape(CHECK_SHAPE, expected, one, what=what), one.shape)


def _dtype_of(one: Tensor, other: Tensor) -> DType:
    dtypes = one.dtype, other.dtype
    is_single = all(dtype == complex64 or (kind_of(dtype) == "f" and dtype != float64) for dtype in dtypes)
    if any(kind_of(dtype) == "c" for dtype in dtypes):
        return complex64 if is_single else complex128
    return float32 if is_single else float64


def _whole(one: Tensor, other: Tensor, axes: Sequence[int]) -> Tensor:
    """Return the full convolution along `axes`, and behind it zeros where that makes the transforms fast."""
    # SciPy leaves out axes of one element, where a product is enough.
    extents = [(axis, extent_of(one, axis), extent_of(other, axis)) for axis in axes]
    extents = [(axis, n, m) for axis, n, m in extents if not (_is_one(n) or _is_one(m))]
    sizes = {
        axis: _fast(n + m - 1) if isinstance(n, int) and isinstance(m, int) else n + m - 1 for axis, n, m in extents
    }
    if not sizes:
        return multiply(one, other)
    static = [size for size in sizes.values() if isinstance(size, int)]
    is_real = kind_of(one.dtype) == "f"
    if is_real and len(static) == len(sizes):
        transforms = [rfftn(each, s=static, axes=list(sizes)) for each in (one, other)]
        return irfftn(multiply(*transforms), s=static, axes=list(sizes))
    transforms = [
        astype(each, complex64 if each.dtype in (float32, complex64) else complex128) for each in (one, other)
    ]
    for axis, size in sizes.items():
        transforms = [_transformed(each, axis, size) for each in transforms]
    found = multiply(*transforms)
    for axis in sizes:
        found = apply(IFFT, found, n=None, axis=axis, norm="backward")[0]
    return real(found) if is_real else found


def _is_one(extent: int | Tensor) -> bool:
    return isinstance(extent, int) and extent == 1


def _transformed(x: Tensor, axis: int, size: int | Tensor) -> Tensor:
    if isinstance(size, int):
        return apply(FFT, x, n=size, axis=axis, norm="backward")[0]
    return apply(FFT, x, size, n=None, axis=axis, norm="backward")[0]


def _fast(least: int) -> int:
    """Return the first number from `least` on without a prime factor above 5, whose transform is fast."""
    while True:
        rest = least
        for prime in (2, 3, 5):
            while rest % prime == 0:
                rest //= prime
        if rest == 1:
            return least
        least += 1


def _part(
    whole: Tensor, axis: int, n: int | Tensor, m: int | Tensor, mode: ConvolutionMode, *, is_summed: bool
) -> Tensor:
    """Cut one axis of a full convolution of `n` and `m` elements as the mode says."""
    smaller: int | Tensor
    larger: int | Tensor
    if _is_one(n) or _is_one(m):
        smaller, larger = (n, m) if _is_one(n) else (m, n)
    elif isinstance(n, int) and isinstance(m, int):
        smaller, larger = min(n, m), max(n, m)
    else:
        smaller, larger = minimum(n, m), maximum(n, m)
    extent = n + m - 1 if is_summed else larger
    start: int | Tensor = 0
    count = extent
    if mode == "same" and n is not extent:
        start, count = (extent - n) // 2, n
    elif mode == "valid" and is_summed:
        start, count = smaller - 1, larger - smaller + 1
    if isinstance(count, int) and isinstance(start, int):
        return whole if count == extent_of(whole, axis) else sliced(whole, axis, start, start + count)
    if count is extent:
        return whole  # a length known only in the run was not padded
    found = sliced(whole, axis, start, start + count)
    return ensure_shape(found, replaced(found.shape, axis, count)) if isinstance(count, int) else found
