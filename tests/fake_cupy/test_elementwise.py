"""The fake's `ElementwiseKernel` compiles and runs the C++ it is given."""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest

from tests.fake_cupy import FakeCupy
from tests.fake_cupy.errors import CompileException

# A compiler takes half a second for each.
pytestmark = pytest.mark.slow


@pytest.fixture
def cupy() -> Iterator[FakeCupy]:
    with FakeCupy(nbytes=4 << 20) as fake:
        yield fake


def test_a_kernel_broadcasts_and_runs_when_executed(cupy: FakeCupy) -> None:
    kernel = cupy.ElementwiseKernel("T x, T y, float64 c", "T z, bool big", "z = exp(x) * y + c; big = z > 5;", "fused")
    x, y = np.linspace(0, 2, 6, dtype=np.float32).reshape(2, 3), np.arange(3, dtype=np.float32)
    xs, ys = cupy.asarray(x), cupy.asarray(y)
    out = cupy.zeros((2, 3), np.float32), cupy.zeros((2, 3), np.bool_)
    cupy.wait_idle()
    cupy.pause()
    cupy.calls.clear()
    result = kernel(xs, ys, 1.5, *out)
    assert cupy.blocking() == ["compile"]
    cupy.resume()
    expected = (np.exp(x) * y + 1.5).astype(np.float32)
    np.testing.assert_allclose(result[0].get(), expected, rtol=1e-6)
    np.testing.assert_array_equal(out[1].get(), expected > 5)
    cupy.calls.clear()
    kernel(xs, ys, 1.5, *out)
    assert cupy.blocking() == []


def test_narrow_floats_compute_in_float_and_round(cupy: FakeCupy) -> None:
    kernel = cupy.ElementwiseKernel(
        "float16 x, bfloat16 b", "float16 h, bfloat16 c", "h = x * x + 1; c = b / 3.0f", "narrow"
    )
    half = np.array([1e-4, 3e-3, 0.1, 255.9, -17, 250], np.float16)
    brain = half.astype(np.float32).astype(ml_dtypes.bfloat16)
    h, c = kernel(cupy.asarray(half), cupy.asarray(brain))
    np.testing.assert_array_equal(h.get(), (half.astype(np.float32) ** 2 + 1).astype(np.float16))
    np.testing.assert_array_equal(c.get(), (brain.astype(np.float32) / np.float32(3)).astype(ml_dtypes.bfloat16))


def test_raw_arguments_and_strided_outputs(cupy: FakeCupy) -> None:
    kernel = cupy.ElementwiseKernel("raw T table, int64 i0", "T out", "out = table[(i + i0) % table.size()]", "gather")
    target = cupy.zeros((4, 2), np.int32)
    kernel(cupy.asarray(np.array([10, 20, 30], np.int32)), 1, target[:, 0])
    assert target.get().tolist() == [[20, 0], [30, 0], [10, 0], [20, 0]]
    assert kernel(cupy.asarray(np.array([1, 2], np.int32)), 0, size=3).get().tolist() == [1, 2, 1]


def test_mistakes(cupy: FakeCupy) -> None:
    x, d = cupy.zeros(3, np.float32), cupy.zeros(3)
    kernel = cupy.ElementwiseKernel("float32 x", "T z", "z = x", "k")
    with pytest.raises(TypeError, match=r"Type is mismatched\. x float64 float32"):
        kernel(d, d)
    with pytest.raises(ValueError, match="shape mismatch"):
        kernel(x, cupy.zeros(2, np.float32))
    with pytest.raises(ValueError, match="not decided"):
        kernel(x)
    with pytest.raises(TypeError, match="Wrong number of arguments for 'k'"):
        kernel()
    with pytest.raises(TypeError, match=r"Unsupported type <class 'numpy.ndarray'>"):
        kernel(np.zeros(3), d)
    with pytest.raises(ValueError, match="Can not use 'i' as a parameter name"):
        cupy.ElementwiseKernel("T i", "T z", "z = i")
    with pytest.raises(CompileException, match="nothing"):
        cupy.ElementwiseKernel("T x", "T z", "z = nothing(x)", "bad")(x)
