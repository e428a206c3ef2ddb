"""The namespace of kernels on CUDA devices, and its use by state, on arrays without visible values."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, cast

import ml_dtypes
import numpy as np
import pytest

import asyncflow as af
from asyncflow.devices.cuda.namespace import CudaNamespace
from asyncflow.graph.graph import Graph
from asyncflow.graph.op import host_inputs
from asyncflow.ops.indexing.add_at import add_at
from asyncflow.state.variables.variable import USER_UPDATE
from asyncflow.state.variables.variable_state import VariableState
from tests.fake_cupy.module import FakeCupy
from tests.ops.device_arrays import XP, DeviceArray, values_of

if TYPE_CHECKING:
    from collections.abc import Sequence

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


class Cupy:
    """CuPy's names, of which tests replace some; arrays are NumPy's."""

    ndarray = DeviceArray

    def __init__(self, **functions: Any) -> None:
        self.looked_up: list[str] = []
        self._functions = functions

    def __getattr__(self, name: str) -> Any:
        self.looked_up.append(name)
        return self._functions.get(name) or getattr(np, name)


def test_other_names_are_cupys_and_found_once() -> None:
    cupy = Cupy()
    xp = CudaNamespace(cupy)
    cupy.looked_up.clear()
    assert xp.add is np.add
    assert xp.add is np.add
    assert cupy.looked_up == ["add"]


def test_what_cupy_lacks_is_lacking() -> None:
    assert not hasattr(XP, "vecdot")
    with pytest.raises(AttributeError, match="unstack"):
        XP.unstack  # noqa: B018


def test_a_scalar_becomes_an_array_without_a_copy() -> None:
    uploaded: list[Any] = []
    xp = CudaNamespace(Cupy(full=lambda shape, value, dtype: ("filled", shape, value, dtype)), uploaded.append)
    assert xp.asarray(np.float32(2)) == ("filled", (), np.float32(2), np.dtype("float32"))
    assert not uploaded


@pytest.mark.parametrize("shape", [(1 << 60, 2), (1 << 32, 1 << 32), 1 << 61, [1 << 57]])
def test_no_array_has_more_bytes_than_can_be_counted(shape: Any) -> None:
    """CuPy counts them modulo 2**64: kernels then wrote where there is no memory, and the card was lost."""
    xp = CudaNamespace(Cupy(full=lambda *_: pytest.fail("an array was made")))
    for call in (partial(xp.empty, dtype="int8"), partial(xp.zeros, dtype="int8"), xp.ones, lambda n: xp.full(n, 1.0)):
        with pytest.raises(ValueError, match="larger than any memory"):
            call(shape)
    assert xp.zeros(3).shape == (3,)
    assert xp.ones(()).shape == ()


@pytest.mark.parametrize("n", [1, 8, 9, 65])
def test_many_arrays_are_joined_a_few_at_a_time(n: int) -> None:
    """For more than eight CuPy copies a table of their addresses to the device."""
    counts: list[int] = []

    def concatenate(arrays: Sequence[Any], axis: int | None, out: Any = None) -> Any:
        counts.append(len(arrays))
        return np.concatenate(arrays, axis=axis, out=out)

    xp = CudaNamespace(Cupy(concatenate=concatenate), lambda array: array)
    rows = [np.asfortranarray(row) for row in np.arange(6.0 * n).reshape(n, 2, 3)]  # and else they are stacked
    for axis in (0, 1, -1):
        np.testing.assert_array_equal(xp.stack(rows, axis=axis), np.stack(rows, axis=axis))
        np.testing.assert_array_equal(xp.concatenate(rows, axis=axis), np.concatenate(rows, axis=axis))
    np.testing.assert_array_equal(xp.concatenate(rows, axis=None), np.concatenate(rows, axis=None))
    assert max(counts) <= 8


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "int64", "float16", "float32", "complex128", "bfloat16"])
def test_many_arrays_of_one_shape_are_stacked_by_one_launch(dtype: str) -> None:
    """One launch stacks 64 arrays by their addresses; arrays that are not in C order are joined."""
    values = np.random.default_rng(1).integers(0, 100, (150, 2, 3)).astype(BFLOAT16 if dtype == "bfloat16" else dtype)
    with FakeCupy(seed=1) as cupy:
        xp = CudaNamespace(cupy)
        rows = [cupy.asarray(value) for value in values]
        for n, launches in ((9, 1), (64, 1), (65, 2), (150, 3)):
            first = len(cupy.engine.launches)
            stacked = xp.stack(rows[:n])
            assert [name for _, name in cupy.engine.launches[first:]] == ["asyncflow_stack"] * launches
            np.testing.assert_array_equal(stacked.get(), values[:n])
        np.testing.assert_array_equal(xp.stack([row.T for row in rows]).get(), values.transpose(0, 2, 1))
        np.testing.assert_array_equal(xp.stack([row[0, 0] for row in rows]).get(), values[:, 0, 0])
        assert xp.stack([row[:0] for row in rows]).shape == (150, 0, 3)


def test_an_array_of_numpy_is_uploaded() -> None:
    xp = CudaNamespace(Cupy(), lambda array: ("there", array))
    x = np.arange(3)
    for copied in (xp.asarray(x), xp.array(x)):
        assert copied[0] == "there"
        assert copied[1] is x


def test_an_array_of_the_device_is_itself_or_a_copy() -> None:
    x = DeviceArray(np.arange(3.0))
    assert XP.asarray(x) is x
    copied = XP.array(x)
    copied[0] = 7.0
    assert values_of(x).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("name", "arguments", "options"),
    [
        ("broadcast_to", (np.int64(2), (2, 3)), {}),
        ("stack", ((np.int64(1), np.int64(2)),), {"axis": 0}),
        ("tile", (np.float32(1), (2, 2)), {}),
        ("repeat", (np.float32(1), 3), {}),
        ("expand_dims", (np.int64(4), 0), {}),
        ("meshgrid", (np.int64(4), np.int64(5)), {"indexing": "ij"}),
        ("where", (np.True_, np.int64(4), np.int64(5)), {}),
        ("logical_not", (np.complex64(0),), {}),
    ],
)
def test_functions_take_counters_of_the_host(name: str, arguments: Any, options: Any) -> None:
    found, expected = getattr(XP, name)(*arguments, **options), getattr(np, name)(*arguments, **options)
    if name != "meshgrid":
        found, expected = [found], [expected]
    for one, other in zip(found, expected, strict=True):
        assert isinstance(one, DeviceArray)
        np.testing.assert_array_equal(values_of(one), other)
        assert one.dtype == np.asarray(other).dtype


def test_a_choice_of_bfloat16_stays_one() -> None:
    """CuPy chooses in float32."""
    xp = CudaNamespace(Cupy(where=lambda condition, x, y: np.asarray(np.where(condition, x, y)).astype(np.float32)))
    x = np.ones(2, BFLOAT16)
    assert xp.where(np.array([True, False]), x, x).dtype == BFLOAT16


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "int32", "int64", "uint64", "float16", "float32"])
def test_sums_at_positions_named_twice(dtype: str) -> None:
    """CUDA adds some dtypes alone."""
    _check_sums(np.dtype(dtype))


@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype("complex64"), np.dtype("complex128")], ids=str)
def test_sums_of_more_at_positions_named_twice(dtype: Any) -> None:
    _check_sums(dtype)


def _check_sums(dtype: Any) -> None:
    start, index = np.array([1, 0, 3]).astype(dtype), np.array([0, 2, 0, 0])
    values = np.array([2, -1 if dtype.kind in "ifc" else 1, 1, 0]).astype(dtype)
    if dtype.kind == "c":
        values = values * dtype.type(1 + 2j)
    here, there = start.copy(), cast("Any", DeviceArray(start.copy()))
    add_at(np, here, index, values)
    add_at(XP, there, DeviceArray(index), cast("Any", DeviceArray(values)))
    assert there.dtype == dtype
    np.testing.assert_array_equal(values_of(there), here)


# -- state -----------------------------------------------------------------------------------------------------------


def _state(variable: af.Variable) -> VariableState:
    return variable.create_state()


def _kernel(tensor: Any, state: VariableState, xp: Any = XP) -> Any:
    node = tensor.node
    return node.op.kernel(xp, **{**node.attrs, "variable": state})


def test_an_initial_value_is_copied_in_once() -> None:
    variable = af.Variable(np.arange(3.0), name="v")
    state = _state(variable)
    with Graph():
        read = _kernel(variable.read(), state)
    first = read()
    assert isinstance(first, DeviceArray)
    assert read() is first
    assert _kernel_of_numpy(variable, state)() is state.value


def _kernel_of_numpy(variable: af.Variable, state: VariableState) -> Any:
    with Graph():
        return _kernel(variable.read(), state, np)


def test_a_new_value_is_copied_in_again_and_a_devices_own_never() -> None:
    variable = af.Variable(np.arange(3.0), name="v")
    state = _state(variable)
    with Graph():
        read, assign = _kernel(variable.read(), state), _kernel(variable.assign(np.ones(3)), state)
    before = read()
    assign(np.full(3, 2.0))
    after = read()
    assert after is not before
    assert values_of(after).tolist() == [2, 2, 2]
    own = DeviceArray(np.ones(3))
    assign(own)
    assert read() is own


def test_two_devices_do_not_mix_their_copies() -> None:
    state = _state(af.Variable(np.arange(3.0), name="v"))
    other = CudaNamespace(Cupy(), lambda array: ("other", array.tolist()))
    assert isinstance(state.read_in(XP), DeviceArray)
    assert state.read_in(other) == ("other", [0, 1, 2])
    assert isinstance(state.read_in(XP), DeviceArray)


def test_writes_compute_on_the_device() -> None:
    variable = af.Variable(np.arange(3.0), name="v")
    state = _state(variable)
    with Graph():
        added = _kernel(variable.assign_add(np.ones(3)), state)(DeviceArray(np.ones(3)))
        taken = _kernel(variable.assign_sub(np.ones(3)), state)(DeviceArray(np.full(3, 0.5)))
    assert values_of(added).tolist() == [1, 2, 3]
    assert taken is state.value
    assert values_of(taken).tolist() == [0.5, 1.5, 2.5]


def test_an_update_computes_on_the_device_with_counters_of_the_host() -> None:
    variable = af.Variable(np.zeros((3, 2)), name="v")
    state = _state(variable)
    weights = np.array([1.0, 10.0])
    with Graph():
        step, x = af.placeholder("int64", ()), af.placeholder("float64", (2,))
        row = variable.update(lambda old, i, new: af.index_update(old, slice(i + 1, i + 2), new * weights), step, x)
        assert row.node.op is not USER_UPDATE
        assert host_inputs(row.node) == {0}
        update = _kernel(row, state)
    found = update(np.int64(1), DeviceArray(np.array([2.0, 3.0])))
    assert values_of(found).tolist() == [[0, 0], [0, 0], [2, 30]]


def test_an_update_that_looks_at_values_of_the_device_belongs_on_a_cpu() -> None:
    variable = af.Variable(np.zeros(3), name="v")
    with Graph():
        mask = af.placeholder("bool", (3,))
        assert variable.update(lambda old, m: af.index_update(old, m, 1.0), mask).node.op is USER_UPDATE
        assert variable.update(lambda old: af.reshape(old, af.shape(old))).node.op is not USER_UPDATE
