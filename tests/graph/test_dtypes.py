"""Dtypes that tensors may have, their names, and promotion."""

from __future__ import annotations

from itertools import combinations_with_replacement
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from asyncflow.errors import DTypeError
from asyncflow.graph.values.dtypes import VARIANT, as_dtype, dtype_name, is_supported, promote, string

NAMES = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128", "bfloat16", "string", "variant"),
]


@pytest.mark.parametrize("name", NAMES)
def test_names_read_back(name: str) -> None:
    dtype = as_dtype(name)
    assert dtype_name(dtype) == name
    assert as_dtype(dtype) == dtype
    assert is_supported(dtype)


@pytest.mark.parametrize(
    ("like", "expected"),
    [
        (bool, np.dtype(bool)),
        (int, np.dtype("int64")),
        (float, np.dtype("float64")),
        (complex, np.dtype("complex128")),
        (str, string),
        (np.str_, string),
        ("U5", string),
        ("f4", np.dtype("float32")),
        (np.float16, np.dtype("float16")),
        (np.dtype(">i4"), np.dtype("int32")),
        (ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16)),
        (object, VARIANT),
    ],
)
def test_as_dtype_takes(like: Any, expected: np.dtype[Any]) -> None:
    found = as_dtype(like)
    assert found == expected
    assert found.isnative


@pytest.mark.parametrize("bad", ["nope", 3, None, "datetime64[s]", "V4", "S3", "i4,i4", [1]])
def test_as_dtype_refuses(bad: Any) -> None:
    with pytest.raises(DTypeError, match=r"is not a dtype; (use a name|did you mean)|cannot be the dtype of a tensor"):
        as_dtype(bad)


NUMERIC = [name for name in NAMES if name not in ("bfloat16", "string", "variant")]


@pytest.mark.parametrize(("a", "b"), list(combinations_with_replacement(NUMERIC, 2)))
def test_promotion_is_numpys(a: str, b: str) -> None:
    expected = (np.ones(1, a) + np.ones(1, b)).dtype
    assert promote([as_dtype(a), as_dtype(b)]) == promote([as_dtype(b), as_dtype(a)]) == expected


@pytest.mark.parametrize("scalar", [True, 3, 2.5, 1j])
@pytest.mark.parametrize("name", NUMERIC)
def test_python_scalars_are_weak(name: str, scalar: complex) -> None:
    assert promote([as_dtype(name), scalar]) == (np.ones(1, name) * scalar).dtype


@pytest.mark.parametrize(
    ("operands", "message"),
    [
        ([as_dtype("int8"), 300], "no common dtype for int8, 300; convert one with af.astype"),
        ([as_dtype("uint8"), -1], "no common dtype for uint8, -1"),
        ([as_dtype("string"), as_dtype("float32")], "no common dtype for string, float32"),
        ([as_dtype("string"), as_dtype("bfloat16")], "no common dtype for string, bfloat16"),
    ],
)
def test_operands_without_a_common_dtype_are_refused(operands: list[Any], message: str) -> None:
    with pytest.raises(DTypeError, match=message):
        promote(operands)


@pytest.mark.parametrize(("name", "meant"), [("flaot32", "float32"), ("Int8", "int8"), ("boolean", "bool")])
def test_a_misspelt_dtype_is_told_the_name(name: str, meant: str) -> None:
    with pytest.raises(DTypeError, match=rf"'{name}' is not a dtype; did you mean .*'{meant}'"):
        as_dtype(name)
