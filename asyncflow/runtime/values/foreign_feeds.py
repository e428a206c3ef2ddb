"""Fed arrays of other libraries: read by DLPack on the host, or left in the memory of a card.

A feed is a snapshot. If a CUDA device uses it, it is copied on the card when the run starts. The copy is in the order
of its library's stream. If the run needs it on the host, it is read on a thread. Code that has to wait before that gets
a copy first, made by the library itself.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from asyncflow.devices.cuda.backend import cuda_backend
from asyncflow.devices.cuda.transfers.exchange import CUDA_MEMORY, HOST_MEMORY, ForeignArray, read, view
from asyncflow.graph.values.dtypes import DType, as_dtype, bfloat16
from asyncflow.streams.beside import call_beside
from asyncflow.values import Array, Value


class NotExchangeable(Exception):
    """An object with ``__dlpack__`` cannot be read; the message says why, and what to do."""


def is_exchangeable(value: object) -> bool:
    """Return True if another library's array may be read by DLPack; NumPy's own need not be."""
    return hasattr(value, "__dlpack__") and not isinstance(value, np.ndarray | np.generic)


def exchanged(value: Any) -> Array | ForeignArray:
    """An array that `is_exchangeable`: as one of NumPy that shares its memory, or where it is, in the memory of a card.

    Raises:
        NotExchangeable: it is neither on the host nor on a card of CUDA's, or records gradients, or cannot be read.
    """
    if getattr(value, "requires_grad", False):
        raise NotExchangeable("it requires grad, and torch does not record feeds; feed its .detach()")
    try:
        memory, number = value.__dlpack_device__()
        if memory in CUDA_MEMORY:
            return ForeignArray(value, _dtype_of(value), tuple(value.shape), number)
        if memory in HOST_MEMORY:
            return _on_host(value)
    except NotExchangeable:
        raise
    except Exception as error:  # other libraries may raise anything
        raise NotExchangeable(f"it cannot be read by DLPack: {error}") from error
    raise NotExchangeable(f"it is on a device of DLPack's type {int(memory)}; feed a copy in the memory of the host")


def _dtype_of(value: Any) -> DType:
    """Return the dtype for a name such as ``torch.float32``: libraries have dtypes of their own."""
    dtype = value.dtype
    return as_dtype(str(getattr(dtype, "name", dtype)).rpartition(".")[2])


def _on_host(value: Any) -> Array:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor) and value.dtype is torch.bfloat16:
        # NumPy's DLPack has no bfloat16.
        bits: Array = value.contiguous().view(torch.int16).numpy()
        return bits.view(bfloat16())
    if hasattr(value, "__array__"):  # supports more dtypes than DLPack
        return np.asarray(value)
    return np.from_dlpack(value)


def has_foreign(values: Sequence[Value]) -> bool:
    """Return True if a checked value is in the memory of a card."""
    return ForeignArray in map(type, values)


def as_of_now(values: list[Value]) -> list[Value]:
    """Return the values, with copies of arrays in the memory of a card, which their owners may change."""
    if not has_foreign(values):
        return values
    # Copy now, as the current stream orders the copies. CuPy is imported already, unless another library's values are
    # fed to a session without cards.
    cupy = cuda_backend().cupy
    return [value.snapshot(cupy) if type(value) is ForeignArray else value for value in values]


async def on_host(foreign: ForeignArray) -> Array:
    """The values of an array in the memory of a card, read on a thread.

    Raises:
        NotExchangeable: they cannot be read.
    """
    backend = cuda_backend()
    if backend.cupy is None:
        raise NotExchangeable(
            f"it is in the memory of a card, which takes CuPy to read ({backend.reason}); feed a copy on the host"
        )
    try:
        array, written = view(backend.cupy, foreign)
        return await call_beside(read, backend.cupy, array, written, foreign.card)
    except Exception as error:
        raise NotExchangeable(f"it cannot be copied from card {foreign.card}: {error}") from error
