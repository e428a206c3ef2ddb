"""A card of the stand-in, as far as captures go."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncflow.devices.cuda.memory import CudaPool, install_allocator
from asyncflow.streams.cuda.stream import CudaStream

if TYPE_CHECKING:
    from tests.fake_cupy import FakeCupy

MIB = 2**20


class CapturingCard:
    """Memory and a compute stream."""

    def __init__(self, cupy: FakeCupy, limit: int | None = None) -> None:
        install_allocator(cupy)
        self.cupy = cupy
        self.pool = CudaPool(cupy, 0, "cuda:0", limit)
        self.stream = CudaStream(cupy, 0, "cuda:0/compute", self.pool)
