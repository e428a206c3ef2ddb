"""Element types of tensors: NumPy dtypes, strings, and the opaque `VARIANT`.

A dtype is a plain `numpy.dtype`, so results compare with NumPy's own. Promotion follows NEP 50: Python scalars are
weak, everything else is strong.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np

from asyncflow.errors import DTypeError
from asyncflow.foreign_names import close_names, install

DType: TypeAlias = np.dtype[Any]
DTypeLike: TypeAlias = DType | type | str

bool_ = np.dtype(np.bool_)
int8, int16, int32, int64 = (np.dtype(f"int{n}") for n in (8, 16, 32, 64))
uint8, uint16, uint32, uint64 = (np.dtype(f"uint{n}") for n in (8, 16, 32, 64))
float16, float32, float64 = (np.dtype(f"float{n}") for n in (16, 32, 64))
complex64, complex128 = np.dtype(np.complex64), np.dtype(np.complex128)
string: DType = np.dtypes.StringDType()
VARIANT: DType = np.dtype(object)
"""Values that only ops understand, such as the store behind a TensorArray; never fed, fetched or computed with."""

_BY_NAME: dict[str, DType] = {
    "bool": bool_,
    "int": int64,
    "float": float64,
    "complex": complex128,
    "str": string,
    "string": string,
    "variant": VARIANT,
}
_BY_TYPE: dict[type, DType] = {bool: bool_, int: int64, float: float64, complex: complex128, str: string}
_KINDS = frozenset("biufc")
_NAMES = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("bfloat16", "float16", "float32", "float64", "complex64", "complex128", "string"),
]
_ADVICE = "use a name such as 'float32', or a numpy dtype"


def as_dtype(dtype: DTypeLike | None) -> DType:
    """The dtype that `dtype` (a numpy dtype, a scalar type or a name such as ``"bfloat16"``) stands for.

    Raises:
        DTypeError: it names no dtype that tensors may have.
    """
    if dtype is None:  # NumPy would read it as float64.
        raise DTypeError(f"None is not a dtype; {_ADVICE}")
    if isinstance(dtype, str):
        if dtype in _BY_NAME:
            return _BY_NAME[dtype]
        if dtype == "bfloat16":
            return bfloat16()
    elif isinstance(dtype, type):
        if dtype in _BY_TYPE:
            return _BY_TYPE[dtype]
        if dtype is not object and not issubclass(dtype, np.generic):  # NumPy would read it as object.
            raise DTypeError(f"{dtype!r} is not a dtype; {_ADVICE}")
    else:
        _require_dtype(dtype)
    try:
        found = np.dtype(dtype)
    except (TypeError, ValueError) as error:
        close = close_names(dtype, _NAMES) if isinstance(dtype, str) else []
        advice = f"did you mean {' or '.join(map(repr, close))}?" if close else _ADVICE
        raise DTypeError(f"{dtype!r} is not a dtype; {advice}") from error
    if is_supported(found):
        return found if found.isnative else found.newbyteorder("=")
    if found.kind == "U":
        return string
    raise DTypeError(
        f"dtype {found} cannot be the dtype of a tensor; tensors hold booleans, integers, floats, complex numbers "
        f"or strings"
    )


def _require_dtype(given: object) -> None:
    """Refuse objects that NumPy takes for a dtype only because they have one, such as a tensor."""
    if hasattr(given, "dtype"):
        raise DTypeError(f"a dtype is fixed when the graph is built; got {given!r}: use a name, or its .dtype")
    if not isinstance(given, np.dtype):
        raise DTypeError(f"{given!r} is not a dtype; use a name such as 'float32', or a numpy dtype")


def summed_in(dtype: DType) -> DType:
    """Return the dtype in which sums of `dtype` accumulate: float32 for float16 and bfloat16, else `dtype` itself.

    Adding ones one by one, float16 stops at 2,048 and bfloat16 at 256.
    """
    return float32 if dtype.itemsize == 2 and dtype.kind in "fV" else dtype  # a name takes 1 µs to make


def bfloat16() -> DType:
    """The bfloat16 dtype, from the optional package ``ml-dtypes``."""
    try:
        import ml_dtypes
    except ImportError as error:
        raise DTypeError(f"bfloat16 needs the package ml-dtypes: {install('bfloat16')}") from error
    dtype: DType = np.dtype(ml_dtypes.bfloat16)
    return dtype


def is_supported(dtype: DType) -> bool:
    """Return True if tensors may have this dtype."""
    return dtype.kind in _KINDS or dtype in (string, VARIANT) or dtype.name == "bfloat16"


def dtype_name(dtype: DType) -> str:
    """The name `as_dtype` reads back."""
    if dtype == VARIANT:
        return "variant"
    return "string" if isinstance(dtype, np.dtypes.StringDType) else dtype.name


def promote(operands: Iterable[DType | bool | int | float | complex]) -> DType:
    """The common dtype of dtypes and (weak) Python scalars, by NEP 50.

    Raises:
        DTypeError: there is none, or a Python integer does not fit.
    """
    listed = list(operands)
    try:
        common: DType = np.result_type(*listed)
        for operand in listed:
            # `result_type` ignores how large a Python integer is.
            if type(operand) is int and common.kind in "iu":
                np.array(operand, common)
    except (TypeError, OverflowError) as error:
        seen = ", ".join(dtype_name(x) if isinstance(x, np.dtype) else repr(x) for x in listed)
        raise DTypeError(f"no common dtype for {seen}; convert one with af.astype") from error
    return common
