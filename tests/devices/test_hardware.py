"""The description of this machine, and of settings that slow its BLAS down."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import threadpoolctl

from asyncflow.devices.machine import hardware
from asyncflow.devices.machine.hardware import KERNEL_VARIABLES, blas_hindrance, blas_library
from tests.patience import PATIENCE_S


def printed(*arguments: str, **variables: str) -> str:
    """Return Python's output in an environment with these variables, and no others of their kind."""
    clean = {name: value for name, value in os.environ.items() if name not in KERNEL_VARIABLES}
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**clean, **variables},
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    return done.stdout.strip()


def devices_with(**variables: str) -> str:
    """Return the output of ``asyncflow devices`` in such an environment."""
    return printed("-m", "asyncflow", "devices", **variables)


def test_the_kernels_of_the_blas_are_named() -> None:
    architectures = {info["architecture"] for info in threadpoolctl.threadpool_info() if "architecture" in info}
    assert architectures
    assert all(f"with its {each} kernels" in blas_library() for each in architectures)


def test_without_a_variable_nothing_holds_the_blas_back(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in KERNEL_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert blas_hindrance() is None


@pytest.mark.slow
def test_what_the_blas_would_use_by_itself_is_asked_of_a_process_without_the_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The process that runs the tests may have been started with such a variable, and loaded its BLAS by it.
    by_itself = printed("-c", "from asyncflow.devices.machine.hardware import blas_library; print(blas_library())")
    for name in KERNEL_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MKL_CBWR", "AVX2")
    monkeypatch.setattr(hardware, "blas_library", lambda: by_itself)
    assert blas_hindrance() is None, "this variable is another library's"
    monkeypatch.setattr(hardware, "blas_library", lambda: "openblas with its Old kernels")
    assert blas_hindrance() == (
        "MKL_CBWR=AVX2 in the environment holds NumPy's BLAS back: it uses openblas with its Old kernels, and by "
        f"itself {by_itself}; unset it before Python starts, unless this machine needs it"
    )


@pytest.mark.slow
def test_devices_says_what_holds_the_blas_back() -> None:
    assert "holds" not in devices_with()
    smaller = devices_with(OPENBLAS_L2_SIZE="64")
    assert "OPENBLAS_L2_SIZE=64 in the environment holds NumPy's BLAS back: it cuts its blocks for another" in smaller
