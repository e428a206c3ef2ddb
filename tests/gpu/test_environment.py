"""T0: what the machine has, and that a kernel computes there."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from time import perf_counter

import pytest

from tests.gpu.card import Card
from tests.gpu.figures import Figures

PACKAGES = (
    "cupy-cuda13x",
    "cupy-cuda12x",
    "numpy",
    "uvloop",
    "ml-dtypes",
    "torch",
    "jax",
    "cuda-bindings",
    "cuda-core",
)

FIRST = """
import json
from time import perf_counter
times = [perf_counter()]
import cupy
times.append(perf_counter())
cupy.cuda.runtime.setDevice(0); cupy.cuda.runtime.free(0)
times.append(perf_counter())
total = int((cupy.arange(4) + 1).sum())
times.append(perf_counter())
import cupy.cuda.nccl as nccl
print(json.dumps({
    "import_s": times[1] - times[0], "context_s": times[2] - times[1], "first_kernel_s": times[3] - times[2],
    "total": total, "nccl": nccl.get_version() if nccl.available else None,
}))
"""


def test_t00_a_kernel_computes(card: Card, figures: Figures) -> None:
    cupy = card.cupy
    for package in PACKAGES:
        try:
            figures[package] = version(package)
        except PackageNotFoundError:
            figures[package] = None
    runtime = cupy.cuda.runtime
    figures["driver"] = runtime.driverGetVersion()
    figures["runtime"] = runtime.runtimeGetVersion()
    name = runtime.getDeviceProperties(0)["name"]
    figures["card"] = name.decode() if isinstance(name, bytes) else name
    figures["total_bytes"] = runtime.memGetInfo()[1]
    started = perf_counter()
    assert int((cupy.arange(4) + 1).sum()) == 10
    figures["kernel_ms"] = 1e3 * (perf_counter() - started)


@pytest.mark.needs("card")
def test_t00_the_first_kernel_of_a_process(card: Card, figures: Figures) -> None:
    done = subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True, timeout=100, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["total"] == 10
    figures.update(found)


@pytest.mark.needs("card")
def test_t00_what_cupy_was_built_with(card: Card, figures: Figures) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import cupy; cupy.show_config()"],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    figures["config"] = done.stdout.splitlines()
    assert "CuPy Version" in done.stdout
