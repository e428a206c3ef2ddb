"""The environment that figures are taken in: no variable may hold a library, or Python, back."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, Final

from asyncflow.devices.machine.hardware import KERNEL_VARIABLES, blas_library

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.peers import Peers

HINDRANCES: Final = (
    *KERNEL_VARIABLES,
    # Kernels of NumPy itself, of PyTorch, and of oneDNN, which PyTorch, TensorFlow and JAX call.
    "NPY_DISABLE_CPU_FEATURES",
    "NPY_ENABLE_CPU_FEATURES",
    "ATEN_CPU_CAPABILITY",
    "DNNL_MAX_CPU_ISA",
    "ONEDNN_MAX_CPU_ISA",
    "TF_ENABLE_ONEDNN_OPTS",
    "XLA_FLAGS",
    # Numbers of threads, which the harness sets itself, for all systems alike.
    "MKL_NUM_THREADS",
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    # Imports without compiled code, and the modes of Python and asyncio for looking for mistakes.
    "PYTHONASYNCIODEBUG",
    "PYTHONDEVMODE",
    "PYTHONDONTWRITEBYTECODE",
    "PYTHONMALLOC",
    "PYTHONTRACEMALLOC",
)
"""Environment variables that change what a measured program takes, for one system or for all."""


def set_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of `environment` that would hold a system back."""
    return {name: environment[name] for name in HINDRANCES if name in environment}


def restart_without_hindrances(arguments: Sequence[str]) -> None:
    """Starts ``python -m benchmarks`` anew, in this process's place, if such a variable is set; says which it took out.

    Libraries read these variables while they are loaded, so to unset them now would come too late.
    """
    found = set_variables(os.environ)
    if not found:
        return
    settings = " ".join(f"{name}={value}" for name, value in found.items())
    print(f"measuring without {settings}, which the environment sets", file=sys.stderr, flush=True)
    clean = {name: value for name, value in os.environ.items() if name not in found}
    os.execve(sys.executable, [sys.executable, "-m", "benchmarks", *arguments], clean)


def kernels(peers: Peers) -> dict[str, str]:
    """Return the matrix kernels of each system, by its own account."""
    used = {"numpy": blas_library()}
    if (torch := peers.torch) is not None:
        used["torch"] = f"{_torch_library(torch)}, kernels for {torch.backends.cpu.get_cpu_capability()}"
    if peers.tensorflow is not None:
        used["tensorflow"] = "Eigen and oneDNN, by the processor"
    if peers.jax is not None:
        used["jax"] = "XLA with Eigen and oneDNN, by the processor"
    return used


def _torch_library(torch: Any) -> str:
    for name in ("mkl", "openblas"):
        backend = getattr(torch.backends, name, None)
        if backend is not None and backend.is_available():
            return name
    return "a BLAS of its own"
