"""Puts a stand-in where sessions look for CuPy, for `cuda.bindings`, and for cuBLAS."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from asyncflow.devices.cuda import backend
from asyncflow.devices.cuda.graphs import products
from asyncflow.devices.cuda.transfers.pinned import close_shared_slab, shared_slab
from asyncflow.streams.cuda import bindings
from tests.fake_cupy.module import FakeCupy

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def last_of(stand_ins: list[Any], thing: Any) -> Iterator[None]:
    """Make a thing the answer to requests inside the block."""
    stand_ins.append(thing)
    try:
        yield
    finally:
        stand_ins.remove(thing)


@contextmanager
def stand_in(*, pinned_nbytes: int = 1 << 20, **options: Any) -> Iterator[FakeCupy]:
    """Sessions opened inside find the cards of a `FakeCupy` of these options, and a slab of so much pinned memory."""
    with FakeCupy(**options) as fake:
        shared_slab(fake, pinned_nbytes)
        try:
            with (
                last_of(backend.stand_ins, backend.describe_cards(fake)),
                last_of(bindings.stand_ins, fake.bindings),
                last_of(products.stand_ins, fake.cublas),
            ):
                yield fake
        finally:
            close_shared_slab(fake)


__all__ = ["last_of", "stand_in"]
