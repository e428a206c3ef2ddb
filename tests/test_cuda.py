from __future__ import annotations

import asyncio

import pytest

import asyncflow as af
from asyncflow.devices.cuda import backend
from asyncflow.devices.cuda.backend import CudaBackend
from tests.fake_cupy.stand_in import last_of


async def test_without_cuda_the_error_says_why() -> None:
    off = CudaBackend(None, reason="no NVIDIA driver found")
    with (
        last_of(backend.stand_ins, off),
        pytest.raises(RuntimeError, match="needs CUDA, which is off on this machine: no NVIDIA driver found"),
    ):
        await af.cuda.done(0)


async def test_nothing_but_a_stream_is_awaited_even_without_cuda() -> None:
    with last_of(backend.stand_ins, CudaBackend(None, reason="off")), pytest.raises(TypeError):
        await af.cuda.done(asyncio.get_running_loop())
