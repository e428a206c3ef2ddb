"""Puts a stand-in where sessions look for CuPy, for `cuda.bindings`, and for cuBLAS."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from asyncflow.devices.cuda.backend import using_cupy
from asyncflow.devices.cuda.experimental.bindings import using_bindings
from asyncflow.devices.cuda.experimental.products import using_cublas
from asyncflow.devices.cuda.transfers.pinned import close_shared_slab, shared_slab
from tests.fake_cupy.module import FakeCupy

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def stand_in(*, pinned_nbytes: int = 1 << 20, **options: Any) -> Iterator[FakeCupy]:
    """Sessions opened inside find the cards of a `FakeCupy` of these options, and a slab of so much pinned memory."""
    with FakeCupy(**options) as fake:
        shared_slab(fake, pinned_nbytes)
        try:
            with using_cupy(fake), using_bindings(fake.bindings), using_cublas(fake.cublas):
                yield fake
        finally:
            close_shared_slab(fake)


__all__ = ["stand_in"]
