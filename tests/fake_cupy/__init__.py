"""A stand-in for the module `cupy` that needs no GPU: NumPy's results, with the asynchrony and hazards of a card.

::

    with FakeCupy(devices=2, seed=3) as cupy:
        ...  # pass it where the module `cupy` is expected

Its names and refusals follow CuPy 14.2 (`names.json`, by `write_names.py`). Not covered: `cupy.random`, `cupyx`,
`RawKernel`, `ReductionKernel`, `fuse`, host functions, NVTX, NCCL, `MemoryAsyncPool`, DLPack with other libraries,
child graphs, captures of several streams. It is stricter than CuPy: an array of another device is an error, and so
is a call that blocks a thread which has paused the GPU. It is laxer: destructors stay silent on a lost device, and
`cudaFree` does not block, but is logged. ``cupy.bindings`` stands in for `cuda.bindings` (conditional nodes of graphs).
"""

from __future__ import annotations

from tests.fake_cupy.module import FakeCupy as FakeCupy
