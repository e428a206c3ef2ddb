"""Arrays and functions of the fake: NumPy's results, CuPy's rules, nothing computed before it is executed."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.fake_cupy import FakeCupy
from tests.fake_cupy.errors import CompileException, CUDARuntimeError, WouldBlockForEverError


@pytest.fixture
def cupy() -> Iterator[FakeCupy]:
    with FakeCupy(devices=2, nbytes=4 << 20) as fake:
        yield fake


def grid(dtype: Any = np.float32) -> np.ndarray:
    return np.arange(12, dtype=dtype).reshape(3, 4) + np.ones((), dtype)


FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "arithmetic": lambda xp, x: (2 * x - 1) / x + x**2 // 3 % 5,
    "comparison": lambda xp, x: (x > 3) & (x <= 7) | ~(x == 5),
    "in place": lambda xp, x: operator.iadd(x.copy(), x[0]),
    "ufuncs": lambda xp, x: xp.maximum(xp.exp(-x), xp.log1p(x)) + xp.where(x > 4, x, 0),
    "reductions": lambda xp, x: [x.sum(), x.mean(axis=0), xp.max(x, axis=1, keepdims=True), x.argmax(), xp.prod(x)],
    "linear algebra": lambda xp, x: [x @ x.T, xp.tensordot(x, x, 2), xp.einsum("ij,kj->ik", x, x), xp.linalg.norm(x)],
    "views": lambda xp, x: [x.T, x[1:, ::2], x[-1], xp.expand_dims(x, 1), xp.broadcast_to(x[0], (2, 4)), xp.flip(x)],
    "joining": lambda xp, x: [
        xp.stack([x, x]),
        xp.concatenate([x, x[:1]]),
        *xp.split(x, 2, axis=1),
        xp.tile(x, (2, 1)),
    ],
    "gathering": lambda xp, x: [x[xp.asarray([2, 0])], xp.take(x, xp.asarray([1, 1]), axis=1), x[xp.asarray(1), 2]],
    "sorting": lambda xp, x: [xp.sort(-x, axis=1), xp.argsort(-x), xp.searchsorted(x[0], x[0]), xp.cumsum(x, axis=1)],
    "values": lambda xp, x: [*xp.nonzero(x > 5), xp.unique(x % 3), x[x > 5], xp.argwhere(x > 9), xp.count_nonzero(x)],
    "creation": lambda xp, x: [
        xp.zeros((2, 3)),
        xp.arange(5),
        xp.linspace(0, 1, 4),
        xp.eye(3),
        xp.full((2,), 7, "int8"),
    ],
    "transforms": lambda xp, x: [xp.fft.rfft(x, axis=1), xp.pad(x, 1), xp.roll(x, 1), xp.diff(x), xp.clip(x, 2, 5)],
    "tuples": lambda xp, x: [*divmod(x, 3), *xp.frexp(x), *xp.meshgrid(x[0], x[1])],
    "scalars": lambda xp, x: [x + np.float64(1), np.float32(2) * x, x + True, xp.add(1, 2)],
}


def flat(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (list, tuple)) else [result]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_results_are_numpys(cupy: FakeCupy, name: str) -> None:
    x = grid()
    expected = flat(FUNCTIONS[name](np, x))
    got = flat(FUNCTIONS[name](cupy, cupy.asarray(x)))
    assert len(got) == len(expected)
    for ours, theirs in zip(got, expected, strict=True):
        assert isinstance(ours, cupy.ndarray)
        theirs = np.asarray(theirs)
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        np.testing.assert_array_equal(ours.get(), theirs)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.int64, np.complex64, np.bool_])
def test_dtypes(cupy: FakeCupy, dtype: Any) -> None:
    x = grid(np.int64).astype(dtype)
    np.testing.assert_array_equal((cupy.asarray(x) * cupy.asarray(x)).get(), x * x)


def test_nothing_is_computed_before_it_is_executed(cupy: FakeCupy) -> None:
    x = cupy.asarray(grid())
    warm = x.sum(axis=0)
    del warm
    cupy.wait_idle()
    cupy.pause()
    before = len(cupy.calls)
    y = (x * 2).sum(axis=0)
    y += x[0]
    x[1:, 0] = 5
    assert (y.shape, len(cupy.calls) - before) == ((4,), cupy.blocking()[before:].count("malloc"))
    with pytest.raises(WouldBlockForEverError):
        float(y[0])
    cupy.resume()
    np.testing.assert_array_equal(y.get(), (grid() * 2).sum(axis=0) + grid()[0])


@pytest.mark.parametrize(
    "call",
    [
        lambda cupy, x: x.get(),
        lambda cupy, x: x[0, 0].item(),
        lambda cupy, x: bool(x[0, 0]),
        lambda cupy, x: cupy.nonzero(x),
        lambda cupy, x: cupy.where(x > 1),
        lambda cupy, x: x[x > 1],
        lambda cupy, x: operator.setitem(x, x > 1, 0),
        lambda cupy, x: cupy.unique(x),
        lambda cupy, x: cupy.linalg.inv(x[:, :3]),
        lambda cupy, x: x.get(out=np.empty((3, 4), np.float32), blocking=False),
        lambda cupy, x: cupy.asnumpy(x),
        lambda cupy, x: repr(x),
    ],
)
def test_what_blocks_is_logged_with_its_thread(cupy: FakeCupy, call: Callable[[Any, Any], Any]) -> None:
    x = cupy.asarray(grid())
    x += cupy.eye(3, 4, dtype=np.float32)
    cupy.wait_idle()
    cupy.calls.clear()
    cupy.pause()
    x += 1
    with pytest.raises(WouldBlockForEverError):
        call(cupy, x)
    assert cupy.blocking()


def test_views_share_memory_and_copies_do_not(cupy: FakeCupy) -> None:
    x = cupy.asarray(grid())
    row, column, flat_view, copied = x[1], x[:, 1], x.reshape(-1), x.T.reshape(-1)
    assert (row.base is x, column.strides, flat_view.base is x, copied.base) == (True, (16,), True, None)
    row[...] = 0
    column[:] = cupy.asarray([7, 8, 9])
    expected = grid()
    expected[1] = 0
    expected[:, 1] = [7, 8, 9]
    np.testing.assert_array_equal(flat_view.get(), expected.ravel())
    np.testing.assert_array_equal(copied.get(), grid().T.ravel())
    assert (x.T.flags.f_contiguous, x.T.flags.c_contiguous, column.flags.forc, row.flags.owndata) == (
        True,
        False,
        False,
        False,
    )
    assert (x.T * 2).flags.fnc


def test_indices_wrap_and_scatters_add(cupy: FakeCupy) -> None:
    x = cupy.zeros(4, np.float32)
    cupy.add.at(x, cupy.asarray([0, 5, 5]), cupy.asarray([1.0, 2.0, 3.0], np.float32))
    x[cupy.asarray([-1, 6])] = cupy.float32(9)
    assert x.get().tolist() == [1, 5, 9, 9]
    assert x[cupy.asarray([4])].get().tolist() == [1]
    with pytest.raises(IndexError, match="out of bounds"):
        x[4]
    cupy.add.at(cupy.zeros(2, np.int64), cupy.asarray([0]), 1)
    for dtype in (np.int8, np.complex64):
        with pytest.raises(TypeError, match=rf"cupy.add.at only supports int32.*not {np.dtype(dtype)}"):
            cupy.add.at(cupy.zeros(2, dtype), cupy.asarray([0]), 1)


def test_division_with_remainder_is_that_of_cupy(cupy: FakeCupy) -> None:
    """CuPy rounds the quotient; NumPy gives 4 and 0.2."""
    x = cupy.full((1,), 1.0)
    assert (x // 0.2).get().tolist() == [5.0]
    assert (x % 0.2).get().tolist() == [0.0]
    assert cupy.remainder(cupy.asarray([-7, 7, 7]), cupy.asarray([3, -3, 0])).get().tolist() == [2, -2, 0]


def test_what_cupy_cannot_do_with_bfloat16(cupy: FakeCupy) -> None:
    x = cupy.ones((2, 2), ml_dtypes.bfloat16)
    assert (x @ x).get().tolist() == [[2, 2], [2, 2]]
    with pytest.raises(TypeError, match="data type 'E' not understood"):
        x[None] @ x
    with pytest.raises(CompileException, match="no operator matches"):
        cupy.cumsum(x, axis=0)


REFUSED: dict[str, tuple[type[Exception], str, Callable[[Any, Any], Any]]] = {
    "a NumPy operand": (TypeError, "Unsupported type <class 'numpy.ndarray'>", lambda cp, x: x + np.ones(4)),
    "a NumPy operand first": (TypeError, "Unsupported type <class 'numpy.ndarray'>", lambda cp, x: np.ones(4) + x),
    "a list operand": (TypeError, "Unsupported type <class 'list'>", lambda cp, x: cp.add(x, [1, 2, 3, 4])),
    "a list": (TypeError, "takes a device array", lambda cp, x: cp.sum([1, 2])),
    "NumPy among devices": (TypeError, "device arrays", lambda cp, x: cp.concatenate([x, np.ones((3, 4))])),
    "numpy.asarray": (TypeError, "Implicit conversion to a NumPy array", lambda cp, x: np.asarray(x)),
    "a NumPy value": (ValueError, "cannot be used for fill", lambda cp, x: operator.setitem(x, 0, np.ones(4))),
    "an object": (ValueError, "Unsupported dtype object", lambda cp, x: cp.array([object()])),
    "text": (ValueError, "Unsupported dtype", lambda cp, x: cp.array(["a"])),
    "a keyword of NumPy": (TypeError, "unexpected keyword argument 'where'", lambda cp, x: cp.sum(x, where=x > 1)),
    "a keyword of NumPy's method": (TypeError, "argument 'initial'", lambda cp, x: x.sum(initial=1)),
    "a name of NumPy": (AttributeError, "module 'cupy' has no attribute 'vecdot'", lambda cp, x: cp.vecdot(x, x)),
    "a method of NumPy": (AttributeError, "no attribute 'newbyteorder'", lambda cp, x: x.newbyteorder()),
    "repeats on the device": (ValueError, "as `repeats`", lambda cp, x: cp.repeat(x, cp.asarray([1, 2, 3]), 0)),
    "an unsafe out": (TypeError, "same_kind", lambda cp, x: cp.add(x, 1.5, out=cp.zeros((3, 4), np.int32))),
    "a NumPy out": (
        TypeError,
        "return arrays must be of ndarray, not ndarray",
        lambda cp, x: cp.add(x, 1, out=np.zeros((3, 4))),
    ),
    "an index": (TypeError, "list indices must be integers", lambda cp, x: [1, 2][cp.asarray(1)]),
    "a hash": (TypeError, "unhashable", lambda cp, x: {x}),
    "truth of many": (ValueError, "ambiguous", lambda cp, x: bool(x)),
    "shapes": (ValueError, "broadcast", lambda cp, x: x + cp.zeros(3)),
    "a namespace left out": (AttributeError, "cupy.random is not covered", lambda cp, x: cp.random),
    "bytes": (NotImplementedError, "gives no array", lambda cp, x: x.tobytes()),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cupy_refuses_is_refused(cupy: FakeCupy, name: str) -> None:
    error, text, call = REFUSED[name]
    with pytest.raises(error, match=text):
        call(cupy, cupy.asarray(grid()))


def test_numpys_functions_dispatch(cupy: FakeCupy) -> None:
    x = cupy.asarray(grid())
    assert isinstance(np.sum(x), cupy.ndarray)
    assert isinstance(np.exp(x), cupy.ndarray)
    assert isinstance(np.linalg.norm(x), cupy.ndarray)


def test_a_kernel_that_raises_loses_the_device_and_close_tells() -> None:
    cupy = FakeCupy()
    x = cupy.zeros(2)
    cupy._functions.kernels.launch("broken", lambda view: [view / None], [x])
    with pytest.raises(CUDARuntimeError, match="unspecified launch failure"):
        x.get()
    with pytest.raises(ExceptionGroup, match="kernels failed on the fake GPU") as raised:
        cupy.close()
    assert raised.group_contains(TypeError)


def test_a_launch_can_fail(cupy: FakeCupy) -> None:
    x = cupy.zeros(2)
    cupy.fail_next(701, "launchKernel")
    with pytest.raises(cupy.cuda.driver.CUDADriverError, match="CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES: too many"):
        x + 1
    assert not issubclass(cupy.cuda.driver.CUDADriverError, CUDARuntimeError)
    assert (x + 1).get().tolist() == [1, 1]


def test_arrays_without_elements(cupy: FakeCupy) -> None:
    x = cupy.zeros((0, 3), np.float32)
    assert ((x + 1).shape, x.sum(axis=0).get().tolist(), x.T.shape, x.get().shape) == (
        (0, 3),
        [0, 0, 0],
        (3, 0),
        (0, 3),
    )


def test_the_cuda_array_interface(cupy: FakeCupy) -> None:
    x = cupy.asarray(grid())[:, 1]
    face = x.__cuda_array_interface__
    assert (face["shape"], face["typestr"], face["strides"], face["version"]) == ((3,), "<f4", (16,), 3)
    assert face["data"] == (x.data.ptr, False)
    assert cupy.from_dlpack(x).data.ptr == x.data.ptr
