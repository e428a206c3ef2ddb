"""Checkpoints: a loop keeps its variables once a segment of iterations, and its gradient runs each segment again.

A segment is a run of neighbouring iterations. The loop's variables at the start of each are put into stores
(`saved_values`), as entry number 0, 1, ... The segment of an iteration depends on its number alone. So the forward loop
and the gradient agree on it whatever the loop decides by. Either all segments have one length, or, for loops with an
unknown number of iterations, each is one iteration longer than the one before. Of n iterations there are then about
``sqrt(2 * n)`` segments, of at most as many iterations.

The first iterations may be *kept* instead: they are a segment whose values the forward loop saves, and which does not
run again. The gradient comes to it last, so that the kept values can be away for longest.
"""

from __future__ import annotations

from functools import partial
from math import isqrt

import numpy as np

from asyncflow.autodiff.stores.saved_values import inputs_of_save
from asyncflow.autodiff.stores.stores import STORE, SavedValues
from asyncflow.graph.op import KERNELS, Op
from asyncflow.graph.values.dtypes import int64
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.cost import free
from asyncflow.values import Kernel, Namespace, Value


def segment_of(number: int, length: int | None, kept: int = 0) -> tuple[int, int]:
    """The segment of iteration `number`, and the number of the first iteration in it.

    Args:
        number: of an iteration, from 0 on.
        length: of each segment; None if they have 1, 2, 3, ... iterations.
        kept: iterations of the first segment, if it does not run again.
    """
    if kept:
        if number < kept:
            return 0, 0
        segment, first = segment_of(number - kept, length)
        return segment + 1, first + kept
    if length is not None:
        segment = number // length
        return segment, segment * length
    segment = (isqrt(8 * number + 1) - 1) // 2
    return segment, segment * (segment + 1) // 2


def _checkpoint_kernel(xp: Namespace, *, length: int | None, kept: int, stays: bool = False) -> Kernel:
    def keep(store: SavedValues, number: int, value: Value) -> SavedValues:
        segment, first = segment_of(int(number), length, kept)
        return store.saved(segment, value) if first == number else store

    return keep


def _segment_kernel(xp: Namespace, *, length: int | None, kept: int) -> Kernel:
    def find(end: int) -> tuple[Value, Value, Value]:
        segment, first = segment_of(int(end) - 1, length, kept)
        return np.int64(segment), np.int64(first), np.int64(end if first < kept else first)

    return find


def _save_first_kernel(xp: Namespace, *, kept: int, stays: bool = False) -> Kernel:
    def save(store: SavedValues, number: int, value: Value) -> SavedValues:
        return store.saved(int(number), value) if number < kept else store

    return save


# Compiler passes make these, and users never: they have no derivatives.
_segmenting = partial(Op, flops=free, traits=KERNELS)
CHECKPOINT = _segmenting(
    "checkpoint",
    lambda store, number, value, *, length, kept, stays=False: STORE,
    _checkpoint_kernel,
    host_inputs=inputs_of_save,
    is_total=True,
)
"""The store with the value of a loop variable in it, if iteration `number` is the first of a segment."""
SEGMENT = _segmenting("segment", lambda end, *, length, kept: (Spec(int64, ()),) * 3, _segment_kernel, host_inputs=(0,))
"""Op that returns the segment of the iteration before `end`, its first iteration, and the iteration from which it
runs again.
"""
SAVE_FIRST = _segmenting(
    "save_first",
    lambda store, number, value, *, kept, stays=False: STORE,
    _save_first_kernel,
    host_inputs=inputs_of_save,
    is_total=True,
)
"""The store with one value more, if iteration `number` is kept."""
SEGMENT_STORE = _segmenting(
    "segment_store",
    lambda store, new, first, *, kept: STORE,
    lambda xp, *, kept: lambda store, new, first: store if first < kept else new,
    host_inputs=(2,),
    is_total=True,
)
"""Op that returns the store for the segment that begins with iteration `first`: the store of kept values, or a new
one.
"""
