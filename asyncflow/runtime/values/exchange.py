"""Reads arrays of other libraries by DLPack: what they hold, and where."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from asyncflow.devices.foreign import CUDA_MEMORY, HOST_MEMORY, ForeignArray
from asyncflow.graph.dtypes import DType, as_dtype, bfloat16


class NotExchangeable(Exception):
    """An object with ``__dlpack__`` cannot be read; the message says why, and what to do."""


def is_exchangeable(value: object) -> bool:
    """Whether another library's array may be read by DLPack; NumPy's own need not be."""
    return hasattr(value, "__dlpack__") and not isinstance(value, np.ndarray | np.generic)


def exchanged(value: Any) -> np.ndarray[Any, Any] | ForeignArray:
    """An array that `is_exchangeable`: as one of NumPy that shares its memory, or where it is, in the memory of a card.

    Raises:
        NotExchangeable: it is neither on the host nor on a card of CUDA's, or records gradients, or cannot be read.
    """
    if getattr(value, "requires_grad", False):
        raise NotExchangeable("it requires grad, and what is fed is not recorded; feed its .detach()")
    try:
        memory, number = value.__dlpack_device__()
        if memory in CUDA_MEMORY:
            return ForeignArray(value, _dtype_of(value), tuple(value.shape), number)
        if memory in HOST_MEMORY:
            return _on_host(value)
    except NotExchangeable:
        raise
    except Exception as error:  # libraries raise what they like
        raise NotExchangeable(f"it cannot be read by DLPack: {error}") from error
    raise NotExchangeable(f"it is on a device of DLPack's type {int(memory)}; feed a copy in the memory of the host")


def _dtype_of(value: Any) -> DType:
    """From names such as ``torch.float32``: libraries have dtypes of their own."""
    dtype = value.dtype
    return as_dtype(str(getattr(dtype, "name", dtype)).rpartition(".")[2])


def _on_host(value: Any) -> np.ndarray[Any, Any]:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor) and value.dtype is torch.bfloat16:
        # NumPy's DLPack has no bfloat16.
        bits: np.ndarray[Any, Any] = value.contiguous().view(torch.int16).numpy()
        return bits.view(bfloat16())
    if hasattr(value, "__array__"):  # which knows more dtypes than DLPack
        return np.asarray(value)
    return np.from_dlpack(value)


__all__ = ["NotExchangeable", "exchanged", "is_exchangeable"]
