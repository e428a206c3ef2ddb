"""Kernels of our own: records of parameters, and launches by the driver, on the stand-in."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest

import asyncflow as af
from asyncflow.devices.cuda.kernels import KernelLaunchError, KernelLaunches, LaunchRecord
from asyncflow.graph.graph import Graph
from asyncflow.streams.cuda import bindings
from tests.fake_cupy import FakeCupy
from tests.fake_cupy.stand_in import last_of, stand_in

OPTIONS = ("--fmad=false",)
FILLED = """
extern "C" __global__ void filled(long long* q0, const long long n) {
  for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (long long)gridDim.x * blockDim.x)
    q0[i] = i;
}
"""


@pytest.fixture
def cupy() -> Iterator[FakeCupy]:
    with FakeCupy(nbytes=4 << 20) as fake:
        yield fake


def test_a_record_is_a_table_of_addresses_before_its_values() -> None:
    record = LaunchRecord([7, 1 << 63, 0])
    record.values[2] = 5
    table = (ctypes.c_ulonglong * 3).from_address(record.address)
    assert [ctypes.c_ulonglong.from_address(place).value for place in table] == [7, 1 << 63, 5]
    with pytest.raises((ValueError, OverflowError)):
        record.values[0] = -1


def test_a_kernel_is_compiled_at_its_first_launch_and_covers_all_elements(cupy: FakeCupy) -> None:
    launches = KernelLaunches(cupy, cupy.bindings)
    kernel = launches.kernel(FILLED, "filled", OPTIONS)
    assert launches.kernel(FILLED, "filled", OPTIONS) is kernel
    assert "compile" not in cupy.blocking()
    for size in (1, 128, 1000):
        out = cupy.zeros(size, "q")
        kernel.launch(-(-size // 128), 128, kernel.record([out.data.ptr, size]))
        np.testing.assert_array_equal(out.get(), np.arange(size))
    assert cupy.blocking().count("compile") == 1


def test_the_stream_is_the_current_one(cupy: FakeCupy) -> None:
    kernel = KernelLaunches(cupy, cupy.bindings).kernel(FILLED, "filled", OPTIONS)
    out, stream = cupy.zeros(3, "q"), cupy.cuda.Stream(non_blocking=True)
    cupy.wait_idle()
    cupy.pause()
    with stream:
        kernel.launch(1, 128, kernel.record([out.data.ptr, 3]))
    assert cupy.pending(stream) == 1
    cupy.resume()
    cupy.wait_idle()


def test_a_refusal_of_the_driver_is_an_error(cupy: FakeCupy) -> None:
    kernel = KernelLaunches(cupy, cupy.bindings).kernel(FILLED, "filled", OPTIONS)
    out = cupy.zeros(3, "q")
    cupy.fail_next(701, "launchKernel")
    with pytest.raises(KernelLaunchError, match="CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES: cuLaunchKernel of filled"):
        kernel.launch(1, 128, kernel.record([out.data.ptr, 3]))
    kernel.launch(1, 128, kernel.record([out.data.ptr, 3]))
    assert out.get().tolist() == [0, 1, 2]


@pytest.mark.parametrize("has_bindings", [True, False])
async def test_a_run_gives_the_same_with_bindings_and_without(graph: Graph, has_bindings: bool) -> None:
    x, y = af.placeholder("float32", (3, 4), name="x"), af.placeholder("float32", (4,), name="y")
    z = (x * 2.0 + y) * x - 1.0
    feeds = {x: np.arange(12, dtype="f").reshape(3, 4), y: np.arange(4, dtype="f")}
    with stand_in(devices=1) as cupy, last_of(bindings.stand_ins, cupy.bindings if has_bindings else None):
        async with af.Session(graph, ["cuda:0"]) as session:
            got = await session.run(z, feeds)
            await session.run(z, feeds)
        names = [name for _, name in cupy.engine.launches if name.startswith("asyncflow_multiply")]
    np.testing.assert_array_equal(got, (feeds[x] * 2 + feeds[y]) * feeds[x] - 1)
    assert len(names) == 2
    assert bool(cupy.raw_kernels) == has_bindings


async def test_a_device_that_a_launch_finds_lost_says_so(graph: Graph) -> None:
    x = af.placeholder("float32", (4,), name="x")
    y = x * 2.0 + x
    with stand_in(devices=1) as cupy:
        async with af.Session(graph, ["cuda:0"]) as session:
            await session.run(y, {x: np.ones(4, "f")})
            cupy.fail_next(700, "launchKernel")
            with pytest.raises(af.DeviceLostError, match="CUDA_ERROR_ILLEGAL_ADDRESS: cuLaunchKernel of asyncflow_"):
                await session.run(y, {x: np.ones(4, "f")})
