"""Adding in place at positions that may name one element several times."""

from __future__ import annotations

import numpy as np

from asyncflow.graph.dtypes import float32
from asyncflow.values import Array, Index, Namespace

_ATOMIC = frozenset("efdiILQ")
"""Type characters of what CUDA adds atomically, and CuPy at positions; that of uint64 is ``L`` or ``Q``."""


def add_at(xp: Namespace, result: Array, index: Index, values: Array) -> None:
    """``result[index] += values``, where all values for one element add up; unlike `+=`, which adds the last alone.

    Elsewhere than on the CPU the order in which floats are added is open, and positions out of range wrap around.
    """
    if xp is np:
        np.add.at(result, index, values)
        return
    values, dtype = xp.asarray(values), result.dtype
    if dtype.kind == "c":
        add_at(xp, result.real, index, values.real)
        add_at(xp, result.imag, index, values.imag)
    elif dtype == np.int64:
        # Sums that wrap around have the same bits.
        xp.add.at(result.view(np.uint64), index, values.astype(np.uint64))
    elif dtype.char in _ATOMIC:
        xp.add.at(result, index, values)
    else:
        wide = np.dtype(np.int32) if dtype.kind in "biu" else float32
        total = result.astype(wide)
        xp.add.at(total, index, values.astype(wide))
        result[...] = total.astype(dtype)
