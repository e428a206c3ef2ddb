"""The elements of an array as Python's numbers and strings, or as base64 of their bytes, and back: bit by bit."""

from __future__ import annotations

import base64
import sys
from typing import Any

import numpy as np

from asyncflow.errors import GraphError
from asyncflow.graph.values.dtypes import VARIANT, string
from asyncflow.graph.values.spec import Spec
from asyncflow.values import Array

# Python types from which NumPy stores elements exactly; other types would be converted silently.
_ELEMENT_TYPES: dict[str, type] = {"b": bool, "i": int, "u": int, "T": str, "c": complex}


def python_values(array: Array) -> list[object]:
    """The elements in C order; floats with the fewest digits that tell them apart in their own dtype."""
    flat = array.ravel()
    if array.dtype.kind == "c":
        return [complex(float(str(x.real)), float(str(x.imag))) for x in flat]
    if array.dtype.kind == "f" or array.dtype.name == "bfloat16":
        return [float(str(x)) for x in flat]
    return flat.tolist()


def encode(array: Array) -> str:
    """The bytes of the elements in C order, little-endian, as base64."""
    return base64.b64encode(_little_endian(array).tobytes()).decode("ascii")


def read_array(spec: Spec, data: object, *, is_encoded: bool) -> Array:
    """Return the array of that spec from nested lists, or from base64; read-only, like a constant's.

    Raises:
        GraphError: the data do not make such an array exactly, or the spec cannot be written.
    """
    shape = tuple(extent for extent in spec.shape or () if extent is not None)
    if shape != spec.shape or spec.dtype == VARIANT or len(shape) > 64:
        wanted = "a full shape of at most 64 axes and a dtype that can be written"
        raise GraphError(f"expected {wanted}, found {str(spec)[:80]}")
    try:
        if 0 in shape:
            array = np.empty(shape, spec.dtype)
        elif is_encoded:
            array = _little_endian(np.frombuffer(_decode(spec, str(data)), spec.dtype).reshape(shape).copy())
        else:
            array = np.array(_flat(spec, shape, data), spec.dtype).reshape(shape)
    except (ValueError, TypeError, OverflowError) as error:
        raise GraphError(f"the data do not make {str(spec)[:80]}: {error}") from error
    array.flags.writeable = False
    return array


def _flat(spec: Spec, shape: tuple[int, ...], nested: object) -> list[object]:
    flat: list[Any] = [nested]
    for extent in shape:
        if any(type(item) is not list or len(item) != extent for item in flat):
            raise ValueError(f"the lists do not have {extent} items each along one axis")
        flat = [inner for item in flat for inner in item]
    kind = _ELEMENT_TYPES.get("T" if spec.dtype == string else spec.dtype.kind, float)
    if any(type(item) is not kind for item in flat):
        raise GraphError(f"the elements of an array of {spec.dtype} are all of type {kind.__name__}")
    return flat


def _decode(spec: Spec, encoded: str) -> bytes:
    if spec.dtype == string:
        raise GraphError("strings are written out, not as base64")
    try:
        data = base64.b64decode(encoded, validate=True)
    except ValueError as error:
        raise GraphError(f"this is not base64: {error}") from error
    if spec.dtype.kind == "b" and data.strip(b"\0\1"):
        raise GraphError("the bytes of booleans are 0 or 1")
    return data


def _little_endian(array: Array) -> Array:
    # An involution, so it also converts little-endian bytes to the machine's order.
    swaps = array.dtype.kind in "iufc" and sys.byteorder == "big"
    return array.byteswap() if swaps else array
