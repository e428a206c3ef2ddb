"""Figures are taken where no variable holds a library back, and they say which kernels were used."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from asyncflow.devices.machine.hardware import blas_library
from benchmarks.environment import HINDRANCES, kernels, set_variables
from benchmarks.peers import NO_PEERS
from tests.patience import PATIENCE_S


def test_variables_that_hold_a_library_back_are_found_among_others() -> None:
    environment = {"HOME": "/root", "OPENBLAS_CORETYPE": "Haswell", "PYTHONDONTWRITEBYTECODE": "1"}
    assert set_variables(environment) == {"OPENBLAS_CORETYPE": "Haswell", "PYTHONDONTWRITEBYTECODE": "1"}


@pytest.mark.slow
def test_the_command_measures_without_them() -> None:
    clean = {name: value for name, value in os.environ.items() if name not in HINDRANCES}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "import_time", "--no-peers", "--repeats", "1"],
        env={**clean, "OPENBLAS_L2_SIZE": "512", "PYTHONDEVMODE": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    assert "measuring without OPENBLAS_L2_SIZE=512 PYTHONDEVMODE=1, which the environment sets" in done.stderr
    header = next(line for line in done.stdout.splitlines() if line.startswith("matrix products: "))
    assert header.startswith("matrix products: numpy ")
    assert "import_time" in done.stdout


def test_numpy_kernels_match_the_processor_its_blas_detected() -> None:
    assert kernels(NO_PEERS) == {"numpy": blas_library()}
