"""Values that become tensors, values that are refused, and messages of `apply` about inputs that do not fit."""

from __future__ import annotations

import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from asyncflow.errors import DTypeError, GraphError, ShapeError
from asyncflow.graph.building import build
from asyncflow.graph.building.build import apply, as_tensor, constant, group, identity, placeholder
from asyncflow.graph.graph import Graph
from asyncflow.graph.ir import Tensor
from tests.graph.programs import ADD, LESS

STRING = np.dtypes.StringDType()


@pytest.fixture(autouse=True)
def graph() -> Any:
    with Graph() as graph:
        yield graph


def value_of(tensor: Tensor) -> np.ndarray[Any, Any]:
    value: np.ndarray[Any, Any] = tensor.node.attrs["value"]
    assert tensor.dtype == value.dtype
    assert tensor.shape == value.shape
    return value


@pytest.mark.parametrize(
    ("value", "dtype", "expected"),
    [
        (1, None, np.int64(1)),
        (True, None, np.True_),
        (1.5, None, np.float64(1.5)),
        (1j, None, np.complex128(1j)),
        (2**63, None, np.uint64(2**63)),
        ([[1, 2], [3, 4]], None, np.array([[1, 2], [3, 4]])),
        ([1, 2.5], None, np.array([1, 2.5])),
        ([], None, np.array([], np.float64)),
        ([], "int32", np.array([], np.int32)),
        ([[]], "int32", np.zeros((1, 0), np.int32)),
        (range(3), None, np.arange(3)),
        (np.float16(2), None, np.float16(2)),
        (np.arange(3, dtype=">i4"), None, np.arange(3, dtype=np.int32)),
        (np.asfortranarray(np.eye(2)), None, np.eye(2)),
        (True, "int32", np.int32(1)),
        (1, "float32", np.float32(1)),
        (1, "complex64", np.complex64(1)),
        (1.5, "complex64", np.complex64(1.5)),
        (0.1, "float32", np.float32(0.1)),
        (0.1, "float16", np.float16(0.1)),
        (-128, "int8", np.int8(-128)),
        (255, "uint8", np.uint8(255)),
        (float("inf"), "float32", np.float32("inf")),
        (float("nan"), "float16", np.float16("nan")),
        (np.float64(0.1), "float32", np.float32(0.1)),
        (np.float32(0.1), "float64", np.float64(np.float32(0.1))),
        (np.array(3), "int8", np.int8(3)),
        (1.5, "bfloat16", np.array(1.5, ml_dtypes.bfloat16)),
        (3, "bfloat16", np.array(3, ml_dtypes.bfloat16)),
        (np.array([1.5], np.float32), "bfloat16", np.array([1.5], ml_dtypes.bfloat16)),
    ],
)
def test_constants_take(value: Any, dtype: Any, expected: Any) -> None:
    found = value_of(constant(value, dtype))
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    "value", ["a", ["a", "é"], np.array(["a", "bc"]), np.array(["a"], STRING), np.str_("a"), [["a"], ["b"]]]
)
@pytest.mark.parametrize("dtype", [None, "string"])
def test_constants_take_strings(value: Any, dtype: Any) -> None:
    found = value_of(constant(value, dtype))
    assert found.dtype == STRING
    assert found.tolist() == np.array(value).tolist()


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (2**70, None),
        (-(2**70), "float32"),
        ([2**64], "int64"),
        (None, None),
        ([None], None),
        (object(), None),
        ({1: 2}, None),
        ({1, 2}, None),
        (b"x", None),
        (np.array([1, None]), None),
        (np.array([1, 2], object), "float32"),
        (np.datetime64("2020"), None),
        (np.zeros(2, "f4,i4"), None),
        ([1, "a"], None),
        (1, "variant"),
        (1.5, "int32"),
        (1.0, "int32"),
        ([1, 2.5], "int32"),
        (float("nan"), "int32"),
        (1.5, "bool"),
        (1j, "float32"),
        (300, "int8"),
        (-1, "uint8"),
        ([1, 300], "int8"),
        ("1", "float32"),
        ("1", "int32"),
        (["1"], "bool"),
        (1, "string"),
        (True, "string"),
        (1e300, "float32"),
        (2**40, "float16"),
        (np.array(1.5), "int32"),
        (np.array(300), "int8"),
        (np.int64(300), "int8"),
        (np.array(-1), "uint8"),
        (np.float64(1e300), "float32"),
        (np.array(["1"]), "float32"),
        (np.array(["1"]), "bfloat16"),
        (np.array([1j]), "float64"),
        (np.array([1j]), "bfloat16"),
        (np.array(1), "bool"),
    ],
)
def test_constants_refuse_what_would_be_changed(value: Any, dtype: Any) -> None:
    with pytest.raises(DTypeError, match=r"does not fit dtype|cannot make a tensor of"):
        constant(value, dtype)


@pytest.mark.parametrize("value", [[[1], [1, 2]], [1, [2]], [np.zeros(2), np.zeros(3)]])
def test_ragged_lists_are_refused(value: Any) -> None:
    with pytest.raises(
        GraphError, match=r"cannot make a tensor of .*: its nested lists differ in length or depth; pad"
    ):
        constant(value)


def test_lists_with_tensors_are_refused() -> None:
    for listed in ([1, [constant(2)]], [constant([1, 2]), [3, 4]], (1, (2, (constant(3),)))):
        with pytest.raises(GraphError, match=r"a list with tensors in it is not a constant; use af.stack"):
            constant(listed)


def test_a_list_of_strings_takes_the_memory_of_its_strings() -> None:
    """And not, for each of them, that of the longest."""
    value = ["a" * 200_000, *("b" for _ in range(199))]
    tracemalloc.start()
    try:
        tensor = constant([value])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert value_of(tensor).tolist() == [value]
    assert peak < 2_000_000


@pytest.mark.parametrize("value", [[1.0] * 500, [[1, 2]] * 500, ["a"] * 500], ids=["flat", "nested", "strings"])
def test_numbers_are_not_asked_whether_they_are_tensors(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """That took 300 times as long as to make an array of them."""
    asked: list[object] = []

    def count(value: object) -> bool:
        asked.append(value)
        return False

    monkeypatch.setattr(build, "is_symbolic", count)
    as_tensor(value)
    assert len(asked) <= 1


@pytest.mark.slow
def test_messages_stay_short() -> None:
    with pytest.raises(DTypeError) as caught:
        constant(list(range(100_000)), "int8")
    assert len(str(caught.value)) < 300


def test_constants_are_copies_and_read_only() -> None:
    source = np.arange(3)
    value = value_of(constant(source))
    source[0] = 9
    assert value[0] == 0
    assert not value.flags.writeable
    assert source.flags.writeable


def test_as_tensor_passes_tensors_on() -> None:
    x = placeholder("float32", (2,))
    assert as_tensor(x) is x
    assert as_tensor(x, "float32") is x
    with pytest.raises(DTypeError, match=r"<Tensor placeholder:0 float32\[2\]> is not of dtype int32; .*af.astype"):
        as_tensor(x, "int32")


def test_as_tensor_reads_what_reads_as_a_tensor() -> None:
    x = constant(1)

    class Readable:
        def __asyncflow_tensor__(self) -> Tensor:
            return x

    assert as_tensor(Readable()) is x
    with pytest.raises(DTypeError, match="is not of dtype float32"):
        as_tensor(Readable(), "float32")


def test_inputs_that_do_not_fit_name_op_inputs_and_line() -> None:
    x, y = placeholder("float32", (2,), name="x"), placeholder("float32", (3,), name="y")
    with pytest.raises(ShapeError) as caught:
        apply(ADD, x, y)
    assert str(caught.value).startswith("test_add: shapes [2] and [3] do not broadcast")
    assert "\n  inputs   x:0 float32[2], y:0 float32[3]\n  written at " in str(caught.value)
    assert "test_build.py:" in str(caught.value)
    with pytest.raises(DTypeError, match="test_less: dtypes"):
        apply(LESS, x, constant(1))


def test_a_failed_apply_adds_no_node(graph: Graph) -> None:
    x, y = placeholder("float32", (2,)), placeholder("float32", (3,))
    before = list(graph.nodes)
    with pytest.raises(ShapeError):
        apply(ADD, x, y)
    assert graph.nodes == before


def test_placeholders_have_the_spec_asked_for() -> None:
    assert str(placeholder("bfloat16", (2, None)).spec) == "bfloat16[2,?]"
    assert str(placeholder(str).spec) == "string[...]"
    with pytest.raises(ShapeError, match="a shape holds non-negative ints"):
        placeholder("float32", (-1,))
    with pytest.raises(DTypeError, match="is not a dtype"):
        placeholder("float33")


def test_group_runs_after_its_items() -> None:
    a, b = constant(0), group()
    assert group(a, b).control_inputs == [a.node, b]


def test_identity_builds_without_a_current_graph(graph: Graph) -> None:
    x = constant(0)
    graph.__exit__()
    assert identity(x).graph is graph
    graph.__enter__()
