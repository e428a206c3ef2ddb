"""Immutable values, as states hold them: readers keep them without a lock or a copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from asyncflow.values import Array, Value

LARGE_BYTES = 1 << 20
"""An array of more bytes (1 MiB) is not copied on the event loop."""


def immutable(value: Any) -> Any:
    """Return `value` if its memory is read-only, else a read-only copy; rank 0 becomes a NumPy scalar.

    Arrays of a device cannot be made read-only, and need not be: no outside code has them, and kernels never write to
    their inputs.
    """
    if not isinstance(value, np.ndarray):
        return value
    if value.ndim == 0 and value.dtype.kind in "biufc":
        return value[()]
    if is_immutable(value):
        return value
    copied = value.copy()
    copied.flags.writeable = False
    return copied


def lock(value: object) -> None:
    """Make an array of a graph read-only if its memory is its own, so that no copy is needed to keep it.

    Nothing writes to the array any more. A view into other memory stays as it is: that memory may go on changing.
    """
    if type(value) is np.ndarray and value.base is None and value.flags.owndata:
        value.flags.writeable = False


def is_immutable(array: Array) -> bool:
    """Return True if the array and all that share its memory are read-only, as far as NumPy knows."""
    holder: object = array
    while isinstance(holder, np.ndarray) and not holder.flags.writeable:
        holder = holder.base
    # Other code may write to any other owner at the end of the chain, such as a memory map.
    return holder is None or type(holder) is bytes


def sealed(function: Callable[..., Value]) -> Callable[..., Value]:
    """`function`, whose results are fresh memory, with its results made read-only: no copy is needed to keep them."""

    def call(old: Value, *args: Value) -> Value:
        result = function(old, *args)
        if isinstance(result, np.ndarray) and result.base is None and all(result is not x for x in (old, *args)):
            result.flags.writeable = False
        return result

    return call
