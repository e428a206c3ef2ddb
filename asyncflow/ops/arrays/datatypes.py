"""Data type functions of the Array API standard: casting, promotion, limits; and broadcasting to a shape."""

from __future__ import annotations

from typing import Any, TypeAlias, cast

import numpy as np

from asyncflow.errors import DTypeError, ShapeError
from asyncflow.graph.building.build import TensorLike, apply, as_tensor, graph_for, identity, symbolic
from asyncflow.graph.building.scopes import placed_on
from asyncflow.graph.ir import Tensor
from asyncflow.graph.op import KERNELS, VIEW, Memory, Traits, define, inputs_from
from asyncflow.graph.values.dtypes import VARIANT, DType, DTypeLike, as_dtype, bfloat16, dtype_name, float32, string
from asyncflow.graph.values.shapes import Shape, broadcast, format_shape, is_compatible
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.arrays.extents import ExtentsLike, apply_to_shape, shape_reader, template_shape
from asyncflow.ops.cuda.source import convert
from asyncflow.ops.promotion import is_weak, kind_of, promoted_dtype
from asyncflow.values import Array, Kernel, Namespace

FloatLimits: TypeAlias = "np.finfo[Any]"
IntegerLimits: TypeAlias = "np.iinfo[Any]"

_KINDS = {
    "bool": "b",
    "signed integer": "i",
    "unsigned integer": "u",
    "integral": "iu",
    "real floating": "f",
    "complex floating": "c",
    "numeric": "iufc",
}


# -- casting ---------------------------------------------------------------------------------------------------------


def _astype_spec(x: Spec, *, dtype: DType) -> Spec:
    if VARIANT in (x.dtype, dtype):
        raise DTypeError("a variant cannot be converted")
    if x.dtype.kind == "c" and kind_of(dtype) in "iuf":
        raise DTypeError(f"{x.dtype} to {dtype_name(dtype)} would drop the imaginary part; take af.real(x) first")
    return Spec(dtype, x.shape)


def _astype_kernel(xp: Namespace, *, dtype: DType) -> Kernel:
    def convert(x: Array) -> Array:
        if dtype == string or x.dtype == string:
            return _convert_string(x, dtype)
        return x.astype(dtype, copy=False)

    return convert


def _convert_string(x: Array, dtype: DType) -> Array:
    # NumPy has no casts between bfloat16 and strings; and a string scalar would come back as a Python str.
    array = np.asarray(x)
    if kind_of(array.dtype) == "f" and array.dtype.kind != "f":
        array = array.astype(float32)
    if kind_of(dtype) == "f" and dtype.kind != "f":
        array = array.astype(float32)
    return array.astype(dtype, copy=False)


ASTYPE = define(
    "astype",
    _astype_spec,
    _astype_kernel,
    is_total=True,
    rows="elementwise",
    cuda=lambda attrs, inputs, output, operands: convert(operands[0], inputs[0], output),
    traits=Traits(Memory.ANY, is_capturable=True, is_cheap=True),
)


def astype(x: TensorLike, dtype: DTypeLike, /, *, copy: bool = True, device: str | None = None) -> Tensor:
    """`x` converted to `dtype`.

    Floats are truncated to integers; strings are parsed and printed.

    Args:
        x: any tensor.
        dtype: of the result.
        copy: accepted for the standard's sake: values are never written to, so sharing one is never seen.
        device: where to make the result; None for no request.

    Raises:
        DTypeError: from complex to real, which would drop the imaginary part.
    """
    x, dtype = as_tensor(x), as_dtype(dtype)
    if device is not None:
        with graph_for(x), placed_on(device):
            return astype(x, dtype)
    return identity(x) if x.dtype == dtype else apply(ASTYPE, x, dtype=dtype)[0]


def in_dtype(x: Tensor, dtype: DType) -> Tensor:
    """Convert `x` to `dtype`, or return `x` itself if it has that dtype."""
    return x if x.dtype == dtype else astype(x, dtype)


# -- broadcasting ----------------------------------------------------------------------------------------------------


def _broadcast_arrays_spec(*inputs: Spec) -> tuple[Spec, ...]:
    shape = broadcast(x.shape for x in inputs)
    return tuple(Spec(x.dtype, shape) for x in inputs)


def _broadcast_arrays_kernel(xp: Namespace) -> Kernel:
    return lambda *values: tuple(xp.broadcast_arrays(*values))


BROADCAST_ARRAYS = define(
    "broadcast_arrays", _broadcast_arrays_spec, _broadcast_arrays_kernel, flops=lambda *_: 0.0, traits=KERNELS
)


def broadcast_arrays(*arrays: TensorLike) -> list[Tensor]:
    """Return the tensors, each broadcast to the common shape; dtypes stay."""
    return list(apply(BROADCAST_ARRAYS, *arrays)) if arrays else []


def _broadcast_to_spec(x: Spec, *sizes: Spec, shape: Shape) -> Spec:
    target = template_shape(shape, sizes)
    if target is None:
        return Spec(x.dtype, None)
    if x.shape is not None and not (
        len(x.shape) <= len(target) and is_compatible(broadcast([x.shape, target]), target)
    ):
        raise ShapeError(f"shape {format_shape(x.shape)} does not broadcast to {format_shape(target)}")
    return Spec(x.dtype, target)


def _broadcast_to_kernel(xp: Namespace, *, shape: Shape) -> Kernel:
    read = shape_reader(shape)
    return lambda x, *sizes: xp.broadcast_to(x, read(sizes))


BROADCAST_TO = define(
    "broadcast_to",
    _broadcast_to_spec,
    _broadcast_to_kernel,
    flops=lambda *_, **__: 0.0,
    host_inputs=inputs_from(1),
    traits=VIEW,
)


def broadcast_to(x: TensorLike, /, shape: ExtentsLike) -> Tensor:
    """`x` repeated along new axes and axes of extent 1, to `shape`.

    Args:
        x: any tensor.
        shape: ints and integer tensors of rank 0, or one integer tensor of rank 1.

    Raises:
        ShapeError: `x` does not broadcast to `shape`.
    """
    return apply_to_shape(BROADCAST_TO, shape, x)


# -- questions about dtypes ------------------------------------------------------------------------------------------


def _dtype_of(x: TensorLike | DTypeLike) -> DType:
    x = symbolic(x)
    if isinstance(x, Tensor | np.ndarray | np.generic):
        return as_dtype(x.dtype)
    return as_dtype(cast("DTypeLike", x))


def can_cast(from_: TensorLike | DTypeLike, to: DTypeLike, /) -> bool:
    """Return True if every value of the one dtype (or tensor's dtype) is a value of the other."""
    return bool(np.can_cast(_dtype_of(from_), as_dtype(to)))


def finfo(type: TensorLike | DTypeLike, /) -> FloatLimits:
    """Limits of a float or complex dtype: ``bits``, ``eps``, ``max``, ``min``, ``smallest_normal``, ``dtype``.

    Raises:
        DTypeError: another kind of dtype.
    """
    dtype = _dtype_of(type)
    if kind_of(dtype) not in "fc":
        raise DTypeError(f"finfo: {dtype_name(dtype)} is not a float or complex dtype; use af.iinfo for integers")
    return np.finfo(dtype) if dtype.kind in "fc" else _bfloat16_limits()


def _bfloat16_limits() -> FloatLimits:
    import ml_dtypes

    limits: FloatLimits = ml_dtypes.finfo(bfloat16())  # type: ignore[no-untyped-call]
    return limits


def iinfo(type: TensorLike | DTypeLike, /) -> IntegerLimits:
    """Limits of an integer dtype: ``bits``, ``max``, ``min``, ``dtype``.

    Raises:
        DTypeError: another kind of dtype.
    """
    dtype = _dtype_of(type)
    if dtype.kind not in "iu":
        raise DTypeError(f"iinfo: {dtype_name(dtype)} is not an integer dtype; use af.finfo for floats")
    return np.iinfo(dtype)


def isdtype(dtype: DTypeLike, kind: DTypeLike | tuple[DTypeLike, ...]) -> bool:
    """Return True if `dtype` is of a kind, one of several, or is the dtype given.

    Args:
        dtype: a dtype.
        kind: ``"bool"``, ``"signed integer"``, ``"unsigned integer"``, ``"integral"``, ``"real floating"``,
            ``"complex floating"``, ``"numeric"``, a dtype, or a tuple of these.
    """
    if isinstance(kind, tuple):
        return any(isdtype(dtype, one) for one in kind)
    if isinstance(kind, str) and kind in _KINDS:
        return kind_of(as_dtype(dtype)) in _KINDS[kind]
    return as_dtype(dtype) == as_dtype(kind)


def result_type(*arrays_and_dtypes: TensorLike | DTypeLike) -> DType:
    """The dtype that operands of these dtypes promote to; Python scalars are weak.

    Raises:
        DTypeError: there is none, or nothing was given.
    """
    if not arrays_and_dtypes:
        raise DTypeError("result_type needs at least one tensor or dtype")
    return promoted_dtype(x if is_weak(x) else _dtype_of(x) for x in arrays_and_dtypes)
