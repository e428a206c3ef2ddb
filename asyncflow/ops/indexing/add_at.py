"""Adding in place at positions that may name one element several times."""

from __future__ import annotations

import numpy as np

from asyncflow.graph.values.dtypes import DType, summed_in
from asyncflow.values import Array, Index, Namespace

_ATOMIC = frozenset("fdiILQ")
"""Type characters of what CUDA adds atomically, and CuPy at positions; that of uint64 is ``L`` or ``Q``."""


def add_at(xp: Namespace, result: Array, index: Index, values: Array) -> None:
    """``result[index] += values``, where all values for one element add up; unlike `+=`, which adds the last alone.

    Elsewhere than on the CPU the order in which floats are added is open, and positions out of range wrap around.
    """
    dtype = result.dtype
    wide = summed_in(dtype)
    if xp is np and wide is dtype:
        np.add.at(result, index, values)
        return
    values = xp.asarray(values)
    if wide is not dtype:
        _add_in(xp, wide, result, index, values)
        return
    if dtype.kind == "c":
        add_at(xp, result.real, index, values.real)
        add_at(xp, result.imag, index, values.imag)
    elif dtype == np.int64:
        # Wrapping sums have the same bits as signed ones.
        xp.add.at(result.view(np.uint64), index, values.astype(np.uint64))
    elif dtype.char in _ATOMIC:
        xp.add.at(result, index, values)
    else:
        _add_in(xp, np.dtype(np.int32), result, index, values)


def _add_in(xp: Namespace, wide: DType, result: Array, index: Index, values: Array) -> None:
    """Do the work of `add_at` in the dtype `wide`."""
    total = result.astype(wide)
    xp.add.at(total, index, values.astype(wide))
    result[...] = total.astype(result.dtype)
