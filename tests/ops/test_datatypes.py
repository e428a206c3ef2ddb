from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import ml_dtypes
import numpy as np
import pytest

from asyncflow.errors import DTypeError, ShapeError
from asyncflow.graph.building.build import constant, placeholder
from asyncflow.graph.graph import Graph
from asyncflow.graph.values.dtypes import string
from asyncflow.ops.arrays.datatypes import (
    astype,
    broadcast_arrays,
    broadcast_to,
    can_cast,
    finfo,
    iinfo,
    isdtype,
    result_type,
)
from asyncflow.ops.arrays.shape import shape

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(c) for c in "?bhilBHILefdFD"] + [BFLOAT16]

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import TypeAlias

    Evaluate: TypeAlias = Callable[..., Any]


@pytest.fixture(autouse=True)
def _graph() -> Iterator[None]:
    with Graph():
        yield


@pytest.mark.parametrize("source", DTYPES, ids=str)
def test_astype_equals_numpy(evaluate: Evaluate, source: np.dtype) -> None:
    x = np.array([[0, 1], [1, 3]]).astype(source)
    for target in DTYPES:
        if source.kind == "c" and target.kind not in "bc":
            with pytest.raises(DTypeError, match=r"would drop the imaginary part; take af.real"):
                astype(x, target)
            continue
        got = evaluate(astype(x, target))
        assert got.dtype == target
        assert np.array_equal(got, x.astype(target))
        assert evaluate(astype(x[0, 1], target)) == x[0, 1].astype(target)


@pytest.mark.parametrize("dtype", [np.dtype("f4"), np.dtype("i8"), BFLOAT16], ids=str)
def test_strings_are_parsed_and_printed(evaluate: Evaluate, dtype: Any) -> None:
    x = constant(np.array(["1", "25"], dtype=string))
    numbers = astype(x, dtype)
    assert evaluate(numbers).astype("f8").tolist() == [1, 25]
    back = evaluate(astype(numbers, "string"))
    assert [float(item) for item in back] == [1, 25]
    assert evaluate(astype(constant("2"), dtype)) == 2
    assert float(str(evaluate(astype(constant(dtype.type(2)), string)))) == 2


def test_astype_to_the_same_dtype_is_the_value_itself(evaluate: Evaluate) -> None:
    x = np.ones(3)
    assert astype(x, "float64").node.op.name == "identity"
    assert evaluate(astype(x, "float64")).tolist() == [1, 1, 1]


def test_a_variant_cannot_be_converted() -> None:
    with pytest.raises(DTypeError, match=r"astype: a variant cannot be converted"):
        astype(placeholder("variant", ()), "float32")


def test_broadcast_arrays(evaluate: Evaluate) -> None:
    x, y = placeholder("float32", (None, 1)), constant(np.arange(3))
    a, b = broadcast_arrays(x, y)
    assert a.shape == b.shape == (None, 3)
    assert a.dtype == np.float32 and b.dtype == np.int64
    assert evaluate(b, {x: np.ones((2, 1), "f4")}).shape == (2, 3)
    assert broadcast_arrays() == []


def test_broadcast_to_a_static_shape(evaluate: Evaluate) -> None:
    x = placeholder("int8", (None, 1))
    y = broadcast_to(x, (4, 2, 3))
    assert y.shape == (4, 2, 3)
    assert evaluate(y, {x: np.array([[1], [2]], np.int8)}).tolist() == np.broadcast_to([[1], [2]], (4, 2, 3)).tolist()
    assert broadcast_to(placeholder("int8"), 3).shape == (3,)
    with pytest.raises(ShapeError, match=r"broadcast_to: shapes \[2\] and \[3\] do not broadcast"):
        broadcast_to(np.ones(2), 3)
    with pytest.raises(ShapeError, match=r"does not broadcast"):
        broadcast_to(np.ones((1, 2)), 2)
    with pytest.raises(ShapeError, match=r"does not broadcast"):
        broadcast_to(np.ones(2), 1)


def test_broadcast_to_a_shape_known_only_in_the_run(evaluate: Evaluate) -> None:
    n, like = placeholder("int32", ()), placeholder("float32", (None, None))
    x = np.array([1, 2], np.float64)
    mixed, whole = broadcast_to(x, (n, 2)), broadcast_to(x, shape(like))
    assert mixed.shape == (None, 2)
    assert whole.shape == (None, None)
    assert evaluate(mixed, {n: np.int32(3)}).shape == (3, 2)
    assert evaluate(whole, {like: np.ones((4, 2), "f4")}).shape == (4, 2)
    assert broadcast_to(x, constant([5, 2])).shape == (5, 2)
    with pytest.raises(DTypeError, match=r"a shape holds integers"):
        broadcast_to(x, (constant(1.5), 2))
    with pytest.raises(ShapeError, match=r"take it from af.shape"):
        broadcast_to(x, cast("Any", (None, 2)))
    with pytest.raises(ShapeError, match=r"not negative; got -1"):
        broadcast_to(x, (-1, 2))


def test_limits() -> None:
    assert finfo("float32").eps == np.finfo("f4").eps
    assert finfo(constant(1j)).bits == 64
    assert float(finfo("bfloat16").eps) == 2**-7
    assert iinfo(constant(np.uint8(1))).max == 255
    with pytest.raises(DTypeError, match=r"use af.iinfo"):
        finfo("int32")
    with pytest.raises(DTypeError, match=r"use af.finfo"):
        iinfo("float32")


@pytest.mark.parametrize(
    ("kind", "members"),
    [
        ("bool", "?"),
        ("signed integer", "bhil"),
        ("unsigned integer", "BHIL"),
        ("integral", "bhilBHIL"),
        ("real floating", "efd"),
        ("complex floating", "FD"),
        ("numeric", "bhilBHILefdFD"),
    ],
)
def test_isdtype(kind: str, members: str) -> None:
    for dtype in DTYPES:
        in_kind = dtype.char in members if dtype != BFLOAT16 else kind in ("real floating", "numeric")
        assert isdtype(dtype, kind) == in_kind
        assert isdtype(dtype, (kind, dtype))
    assert isdtype("string", "string") and not isdtype("string", "numeric")


def test_result_type_takes_tensors_dtypes_and_weak_scalars() -> None:
    assert result_type(constant(np.float32(1)), 2.0) == np.float32
    assert result_type("int8", np.uint8(1)) == np.int16
    assert result_type("bfloat16", 1.0) == BFLOAT16
    assert result_type(True, 1) == np.int64
    with pytest.raises(DTypeError, match=r"no common dtype for string, int32"):
        result_type("string", "int32")
    with pytest.raises(DTypeError, match=r"at least one"):
        result_type()


def test_can_cast() -> None:
    assert can_cast("int8", "int16") and not can_cast("int16", "int8")
    assert can_cast(constant(np.float32(1)), "float64")
