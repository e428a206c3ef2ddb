"""Fourier transforms of the Array API standard, as ``af.fft``.

``n`` and ``s`` crop the transformed axes, or pad them with zeros, before the transform. ``norm`` says which of a
transform and its inverse divides by the number of elements: ``"backward"`` the inverse, ``"forward"`` the other, and
``"ortho"`` both, by the root. Single precision gives single precision; functions of complex values also take real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import log2
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from asyncflow.errors import DTypeError, GraphError, ShapeError
from asyncflow.foreign_names import public_names
from asyncflow.graph.building.build import TensorLike, apply, as_tensor, constant, graph_for
from asyncflow.graph.building.scopes import placed_on
from asyncflow.graph.op import OPAQUE, Op, define, inputs_from
from asyncflow.graph.values.dtypes import (
    DType,
    DTypeLike,
    as_dtype,
    complex64,
    complex128,
    dtype_name,
    float32,
    float64,
)
from asyncflow.graph.values.shapes import Shape, normalize_axis
from asyncflow.graph.values.spec import Spec, known_int
from asyncflow.ops.arithmetic.elementwise import conj
from asyncflow.ops.arrays.datatypes import astype
from asyncflow.ops.arrays.manipulation import roll
from asyncflow.ops.axes import Axes, as_axes, normalize_axes, replaced, static_int
from asyncflow.ops.cost import elements
from asyncflow.ops.promotion import kind_of

if TYPE_CHECKING:
    from asyncflow.graph.ir import Tensor
    from asyncflow.values import Array, Kernel, Namespace, Value

Norm: TypeAlias = Literal["backward", "ortho", "forward"]

OPPOSITE: dict[Norm, Norm] = {"backward": "forward", "ortho": "ortho", "forward": "backward"}
"""The norm with which the inverse transform is the transpose of a transform."""


def _flops(inputs: Sequence[Shape], outputs: Sequence[Shape], **attrs: object) -> float:
    # 5 n log2(n) is the usual count if n is a power of 2. Here n counts all elements, not one axis: an upper bound.
    count = elements(outputs[0])
    return 5.0 * count * log2(max(count, 2))


def _is_single(dtype: DType) -> bool:
    return dtype in (float32, complex64)


def _transformed(x: Spec, axis: int, extent: int | None) -> Shape:
    if x.shape is None:
        return None
    normalize_axis(axis, len(x.shape))
    return replaced(x.shape, axis, extent)


def _extent(x: Spec, axis: int, n: int | None) -> int | None:
    if n is not None or x.shape is None:
        return n
    known = x.shape[normalize_axis(axis, len(x.shape))]
    if known == 0:
        raise ShapeError(f"there is nothing to transform along axis {axis} of {x}; give n to pad it with zeros")
    return known


def _complex_spec(x: Spec, *size: Spec, n: int | None, axis: int, norm: str) -> Spec:
    return Spec(x.dtype, _transformed(x, axis, known_int(size[0]) if size else _extent(x, axis, n)))


def _half_spec(x: Spec, *, n: int | None, axis: int, norm: str) -> Spec:
    extent = _extent(x, axis, n)
    found = complex64 if _is_single(x.dtype) else complex128
    return Spec(found, _transformed(x, axis, None if extent is None else extent // 2 + 1))


def _whole_spec(x: Spec, *, n: int | None, axis: int, norm: str) -> Spec:
    # The spectrum of `n` real elements has n // 2 + 1, the same for 2k and 2k + 1: without `n`, assume the even number.
    extent = _extent(x, axis, None if n is None else n // 2 + 1)
    if n is None and extent == 1:
        raise ShapeError(f"one element along axis {axis} of {x} stands for none; give n")
    whole = n if n is not None or extent is None else 2 * (extent - 1)
    return Spec(float32 if _is_single(x.dtype) else float64, _transformed(x, axis, whole))


def _transform(name: str, infer: Callable[..., Spec]) -> Op:
    """Register the op that is the function of that name in ``xp.fft``, along one axis.

    A second input, which derivatives give, stands for an `n` that only a run knows.
    """

    def kernel(xp: Namespace, *, n: int | None, axis: int, norm: str) -> Kernel:
        function = getattr(xp.fft, name)

        def run(x: Array, *size: Array) -> Value:
            found = function(x, n=int(size[0]) if size else n, axis=axis, norm=norm)
            single = {"c": complex64, "f": float32}[found.dtype.kind]
            return found.astype(single, copy=False) if _is_single(x.dtype) else found

        return run

    return define(name, infer, kernel, flops=_flops, host_inputs=inputs_from(1), traits=OPAQUE)


FFT = _transform("fft", _complex_spec)
IFFT = _transform("ifft", _complex_spec)
RFFT = _transform("rfft", _half_spec)
IRFFT = _transform("irfft", _whole_spec)


def _operand(name: str, x: TensorLike, *, is_complex: bool) -> Tensor:
    """Return `x` as the transform takes it: real, or complex, in single or double precision."""
    tensor = as_tensor(x)
    kind = kind_of(tensor.dtype)
    if kind not in "fc" or tensor.dtype.itemsize < float32.itemsize:
        raise DTypeError(
            f"{name}: takes float32, float64{', complex64, complex128' if is_complex else ''}, not "
            f"{dtype_name(tensor.dtype)}; convert with af.astype first"
        )
    # A separate op converts to complex, and its derivative takes the real part: derivatives of transforms need not.
    if is_complex and kind == "f":
        return astype(tensor, complex64 if _is_single(tensor.dtype) else complex128)
    if not is_complex and kind == "c":
        raise DTypeError(f"{name}: takes real numbers, not {dtype_name(tensor.dtype)}; use af.fft.fft or af.real")
    return tensor


def _opposite(name: str, norm: Norm) -> Norm:
    if norm not in OPPOSITE:
        raise GraphError(f"{name}: norm is 'backward', 'ortho' or 'forward', got {norm!r}")
    return OPPOSITE[norm]


def _along(op: Op, x: TensorLike, n: int | None, axis: int, norm: Norm, *, is_complex: bool) -> Tensor:
    _opposite(op.name, norm)
    count = None if n is None else static_int(n, "n")
    if count is not None and count < 1:
        raise GraphError(f"{op.name}: n is 1 or more, got {n}")
    with graph_for(x):
        tensor = _operand(op.name, x, is_complex=is_complex)
        return apply(op, tensor, n=count, axis=static_int(axis, "axis"), norm=norm)[0]


def fft(x: TensorLike, /, *, n: int | None = None, axis: int = -1, norm: Norm = "backward") -> Tensor:
    """The discrete Fourier transform along `axis`, complex.

    Args:
        x: complex or real floats.
        n: how many elements to transform; None for all.
        axis: along which.
        norm: see `asyncflow.fft`.
    """
    return _along(FFT, x, n, axis, norm, is_complex=True)


def ifft(x: TensorLike, /, *, n: int | None = None, axis: int = -1, norm: Norm = "backward") -> Tensor:
    """The inverse of `fft`; arguments as there."""
    return _along(IFFT, x, n, axis, norm, is_complex=True)


def rfft(x: TensorLike, /, *, n: int | None = None, axis: int = -1, norm: Norm = "backward") -> Tensor:
    """`fft` of real floats, of which the first ``n // 2 + 1`` elements say all; arguments as there."""
    return _along(RFFT, x, n, axis, norm, is_complex=False)


def irfft(x: TensorLike, /, *, n: int | None = None, axis: int = -1, norm: Norm = "backward") -> Tensor:
    """The inverse of `rfft`, real: `n` elements along `axis`; None for an even number.

    Args:
        x: complex or real floats.
        n: length of the result; None for the even number that fits.
        axis: the one to transform.
        norm: as for `fft`.
    """
    return _along(IRFFT, x, n, axis, norm, is_complex=True)


def hfft(x: TensorLike, /, *, n: int | None = None, axis: int = -1, norm: Norm = "backward") -> Tensor:
    """Return the `fft` of values with Hermitian symmetry, given their first half `x`; real, `n` elements as in `irfft`.

    Args:
        x: complex or real floats.
        n: length of the result; None for the even number that fits.
        axis: the one to transform.
        norm: as for `fft`.
    """
    with graph_for(x):
        # The same sum as in `irfft`, but with the opposite sign of the exponent, hence `conj`, and the opposite norm.
        # So two ops, with their derivatives, serve four functions.
        tensor = _operand("hfft", x, is_complex=True)
        return _along(IRFFT, conj(tensor), n, axis, _opposite("hfft", norm), is_complex=True)


def ihfft(x: TensorLike, /, *, n: int | None = None, axis: int = -1, norm: Norm = "backward") -> Tensor:
    """The inverse of `hfft`: of real floats the first ``n // 2 + 1`` elements of `ifft`.

    Args:
        x: real floats.
        n: how many elements of `x` to take; None for all, more are zeros.
        axis: the one to transform.
        norm: as for `fft`.
    """
    with graph_for(x):
        tensor = _operand("ihfft", x, is_complex=False)
        return conj(_along(RFFT, tensor, n, axis, _opposite("ihfft", norm), is_complex=False))


# -- several axes ----------------------------------------------------------------------------------------------------


def _axes_of(name: str, x: Tensor, s: Sequence[int] | None, axes: Sequence[int] | None) -> list[tuple[int, int | None]]:
    """The axes, counted from the back, and how many elements of each are transformed."""
    sizes = None if s is None else [static_int(size, "a size") for size in s]
    if axes is None and sizes is None and x.ndim is None:
        raise ShapeError(f"{name}: the rank of {x!r} is not known; give axes")
    # Counted from the end: `s` alone means the last axes, even if the rank is unknown.
    count = (x.ndim or 0) if sizes is None else len(sizes)
    found = list(range(-count, 0)) if axes is None else [static_int(axis, "an axis") for axis in axes]
    if x.ndim is not None:
        normalize_axes(tuple(found), x.ndim)
    if not found:
        raise ShapeError(f"{name}: there is no axis to transform")
    if sizes is not None and len(sizes) != len(found):
        raise ShapeError(f"{name}: s {sizes} and axes {found} must have one length")
    whole: list[int | None] = [None] * len(found)
    return list(zip(found, whole if sizes is None else sizes, strict=True))


def _complex_axes(
    along: Callable[..., Tensor], x: TensorLike, s: Sequence[int] | None, axes: Sequence[int] | None, norm: Norm
) -> Tensor:
    with graph_for(x):
        result = as_tensor(x)
        for axis, n in _axes_of(f"{along.__name__}n", result, s, axes):
            result = along(result, n=n, axis=axis, norm=norm)
        return result


def fftn(
    x: TensorLike, /, *, s: Sequence[int] | None = None, axes: Sequence[int] | None = None, norm: Norm = "backward"
) -> Tensor:
    """`fft` along several axes.

    Args:
        x: complex or real floats.
        s: how many elements of each axis to transform; None for all.
        axes: along which; None for the last ``len(s)``, or all.
        norm: see `asyncflow.fft`.
    """
    return _complex_axes(fft, x, s, axes, norm)


def ifftn(
    x: TensorLike, /, *, s: Sequence[int] | None = None, axes: Sequence[int] | None = None, norm: Norm = "backward"
) -> Tensor:
    """The inverse of `fftn`; arguments as there."""
    return _complex_axes(ifft, x, s, axes, norm)


def rfftn(
    x: TensorLike, /, *, s: Sequence[int] | None = None, axes: Sequence[int] | None = None, norm: Norm = "backward"
) -> Tensor:
    """Return the `fftn` of real floats: `rfft` along the last of the axes, `fft` along the others.

    Args:
        x: real floats.
        s: how many elements to take along `axes`; None for all.
        axes: the axes to transform; None for the last ones, as many as `s` has, or all.
        norm: as for `fft`.
    """
    with graph_for(x):
        tensor = as_tensor(x)
        *others, (last, n) = _axes_of("rfftn", tensor, s, axes)
        # The real transform goes first, while values are real, and halves the work of the others.
        result = rfft(tensor, n=n, axis=last, norm=norm)
        for axis, size in others:
            result = fft(result, n=size, axis=axis, norm=norm)
        return result


def irfftn(
    x: TensorLike, /, *, s: Sequence[int] | None = None, axes: Sequence[int] | None = None, norm: Norm = "backward"
) -> Tensor:
    """Return the inverse of `rfftn`: `ifft` along all axes but the last, and `irfft` along the last.

    Args:
        x: complex or real floats.
        s: extents of the result along `axes`; None for the extents of `x`, and along the last axis the even number that
            fits.
        axes: the axes to transform; None for the last ones, as many as `s` has, or all.
        norm: as for `fft`.
    """
    with graph_for(x):
        result = as_tensor(x)
        *others, (last, n) = _axes_of("irfftn", result, s, axes)
        # On the way back it goes last: only after the other axes is the half spectrum the spectrum of real values.
        for axis, size in others:
            result = ifft(result, n=size, axis=axis, norm=norm)
        return irfft(result, n=n, axis=last, norm=norm)


# -- frequencies -----------------------------------------------------------------------------------------------------


def fftfreq(n: int, /, *, d: float = 1.0, dtype: DTypeLike | None = None, device: str | None = None) -> Tensor:
    """Return the frequencies of the `n` elements of `fft`, in cycles per unit of the sample distance `d`.

    Args:
        n: length of the transformed axis, 1 or more.
        d: distance between samples; not 0.
        dtype: of the result; None for float64.
        device: where to make it; None for no request.
    """
    return _frequencies(np.fft.fftfreq, n, d, dtype, device)


def rfftfreq(n: int, /, *, d: float = 1.0, dtype: DTypeLike | None = None, device: str | None = None) -> Tensor:
    """Return the frequencies of the elements of `rfft` for `n` real samples, see `fftfreq`.

    Args:
        n: length of the transformed axis, 1 or more.
        d: distance between samples; not 0.
        dtype: of the result; None for float64.
        device: where to make it; None for no request.
    """
    return _frequencies(np.fft.rfftfreq, n, d, dtype, device)


def _frequencies(
    function: Callable[[int, float], Array], n: int, d: float, dtype: DTypeLike | None, device: str | None
) -> Tensor:
    count, found = static_int(n, "n"), float64 if dtype is None else as_dtype(dtype)
    if count < 1 or d == 0:
        raise GraphError(f"{function.__name__}: n is 1 or more and d is not 0, got n={n}, d={d}")
    if kind_of(found) != "f":
        raise DTypeError(f"{function.__name__}: frequencies are floats, not {dtype_name(found)}")
    with placed_on(device):
        return constant(function(count, d).astype(found))


def fftshift(x: TensorLike, /, *, axes: Axes = None) -> Tensor:
    """`x` with the frequency 0 in the middle of `axes` (None: all), where `fft` has it first.

    Raises:
        ShapeError: an extent, or for None the rank, is not known while the graph is built.
    """
    return _shifted("fftshift", x, axes, lambda extent: extent // 2)


def ifftshift(x: TensorLike, /, *, axes: Axes = None) -> Tensor:
    """The inverse of `fftshift`; arguments as there."""
    return _shifted("ifftshift", x, axes, lambda extent: -(extent // 2))


def _shifted(name: str, x: TensorLike, axes: Axes, by: Callable[[int], int]) -> Tensor:
    with graph_for(x):
        tensor = as_tensor(x)
        # Shift by half an extent, computed now, as `roll` takes numbers.
        if tensor.shape is None:
            raise ShapeError(f"{name}: the rank of {tensor!r} is not known")
        shifts, found = [], normalize_axes(as_axes(axes), len(tensor.shape))
        for axis in found:
            extent = tensor.shape[axis]
            if extent is None:
                raise ShapeError(f"{name}: the extent of axis {axis} of {tensor!r} is not known")
            shifts.append(by(extent))
        return roll(tensor, tuple(shifts), axis=found) if found else tensor


__all__ = [
    "fft",
    "fftfreq",
    "fftn",
    "fftshift",
    "hfft",
    "ifft",
    "ifftn",
    "ifftshift",
    "ihfft",
    "irfft",
    "irfftn",
    "rfft",
    "rfftfreq",
    "rfftn",
]

if not TYPE_CHECKING:  # with `__getattr__`, every misspelt name would pass the type checker
    __getattr__, __dir__ = public_names("asyncflow.fft", __all__)
