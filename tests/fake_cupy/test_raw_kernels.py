"""The fake's `cuLaunchKernel` runs the CUDA C++ of raw kernels, and rejects records that do not fit."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.fake_cupy import FakeCupy
from tests.fake_cupy.bindings import CUresult
from tests.fake_cupy.errors import CompileException
from tests.fake_cupy.raw_kernels import RecordError, parameters_of

# A compiler takes half a second for each kernel.
pytestmark = pytest.mark.slow

SCALED = """
extern "C" __global__ void scaled(const float* p0, float* q0, const float by, const int n) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) q0[i] = p0[i] * by;
}
"""
SUMMED = """
extern "C" __global__ void summed(const float* p0, float* q0, const int n) {
  __shared__ float part[64];
  float own = 0;
  for (int i = threadIdx.x; i < n; i += blockDim.x) own += p0[blockIdx.x * n + i];
  part[threadIdx.x] = own;
  for (int half = blockDim.x / 2; half; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
  }
  if (!threadIdx.x) q0[blockIdx.x] = part[0];
}
"""


@pytest.fixture
def cupy() -> Iterator[FakeCupy]:
    with FakeCupy(nbytes=4 << 20) as fake:
        yield fake


def bits(value: float) -> int:
    return int(np.float32(value).view(np.uint32))


def launch(
    cupy: FakeCupy, source: str, name: str, values: list[int], blocks: int = 1, threads: int = 64
) -> tuple[CUresult, Any]:
    """Launch with a record of these values; returns the driver's answer, and the record."""
    count = len(values)
    record = np.empty(2 * count, np.uint64)
    address = record.ctypes.data
    record[:count] = [address + 8 * (count + index) for index in range(count)]
    record[count:] = values
    driver = cupy.bindings.driver
    function = driver.CUfunction(cupy.RawKernel(source, name, ("--fmad=false",)).kernel.ptr)
    stream = cupy.cuda.get_current_stream().ptr
    (answer,) = driver.cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, 0, stream, address, 0)
    return answer, record


def test_a_kernel_runs_with_what_the_record_had_at_the_launch(cupy: FakeCupy) -> None:
    x, y = cupy.asarray(np.arange(300, dtype="f")), cupy.zeros(300, "f")
    cupy.wait_idle()
    cupy.pause()
    answer, record = launch(cupy, SCALED, "scaled", [x.data.ptr, y.data.ptr, bits(0.5), 300], blocks=2)
    assert answer == CUresult.CUDA_SUCCESS
    record[:] = 0
    cupy.resume()
    np.testing.assert_array_equal(y.get(), np.arange(300, dtype="f") / 2)
    assert [name for _, name in cupy.engine.launches].count("scaled") == 1


def test_threads_wait_for_one_another_at_barriers(cupy: FakeCupy) -> None:
    x = np.random.default_rng(len("barriers")).integers(-9, 9, (3, 100)).astype("f")
    xs, sums = cupy.asarray(x), cupy.zeros(3, "f")
    launch(cupy, SUMMED, "summed", [xs.data.ptr, sums.data.ptr, 100], blocks=3)
    np.testing.assert_array_equal(sums.get(), x.sum(axis=1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values: values[:-1], "scaled takes 4 parameters, and its record has another number"),
        (lambda values: [*values, 1], "scaled takes 4 parameters, and its record has another number"),
        (lambda values: [*values[:2], int(np.float64(0.5).view(np.uint64)), 300], "scaled: by has 4 bytes"),
        (lambda values: [*values[:3], 300 | 1 << 32], "scaled: n has 4 bytes, and is given 0x10000012c"),
        (lambda values: [0, *values[1:]], "p0 is 0x0, which is in no memory in use on device 0"),
        (lambda values: [values[0], values[1] + (1 << 20), *values[2:]], "q0 is .* which is in no memory in use"),
    ],
)
def test_a_record_that_does_not_fit_is_rejected(cupy: FakeCupy, change: Any, message: str) -> None:
    x, y = cupy.zeros(300, "f"), cupy.zeros(300, "f")
    with pytest.raises(RecordError, match=message):
        launch(cupy, SCALED, "scaled", change([x.data.ptr, y.data.ptr, bits(0.5), 300]))


def test_an_address_whose_array_is_gone_is_rejected(cupy: FakeCupy) -> None:
    kept, x, y = (cupy.zeros(300, "f") for _ in range(3))
    values = [x.data.ptr, y.data.ptr, bits(0.5), 300]
    launch(cupy, SCALED, "scaled", values)
    del x
    with pytest.raises(RecordError, match="p0 is"):
        launch(cupy, SCALED, "scaled", values)
    del kept


def test_memory_beside_an_array_is_not_touched_and_loses_the_device(cupy: FakeCupy) -> None:
    x, y = cupy.zeros(4096, "f"), cupy.zeros(16, "f")
    beside = cupy.ones(16, "f")
    cupy.wait_idle()
    launch(cupy, SCALED, "scaled", [x.data.ptr, y.data.ptr, bits(2), 4096], blocks=64)
    cupy.wait_idle()
    assert cupy.engine.lost == {0: 700}
    nbytes = ctypes.string_at(beside.data.ptr, 64)
    assert nbytes == np.ones(16, "f").tobytes()


def test_the_driver_gives_errors(cupy: FakeCupy) -> None:
    x = cupy.zeros(3, "f")
    values = [x.data.ptr, x.data.ptr, bits(1), 3]
    cupy.fail_next(701, "launchKernel")
    answer, _ = launch(cupy, SCALED, "scaled", values)
    assert (answer, answer.name) == (701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES")
    assert launch(cupy, SCALED, "scaled", values, blocks=0)[0] == CUresult.CUDA_ERROR_INVALID_VALUE
    cupy.fail_device(0)
    assert launch(cupy, SCALED, "scaled", values)[0] == 700


def test_signatures() -> None:
    assert [(p.ctype, p.name, p.is_address) for p in parameters_of(SUMMED, "summed")] == [
        ("const float", "p0", True),
        ("float", "q0", True),
        ("const int", "n", False),
    ]
    with pytest.raises(CompileException, match="named symbol not found: other"):
        parameters_of(SUMMED, "other")
    with pytest.raises(CompileException, match="no parameters of type 'struct S'"):
        parameters_of('extern "C" __global__ void f(struct S s) {}', "f")
