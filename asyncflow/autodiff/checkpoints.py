"""Checkpoints: a loop keeps its variables once a segment of iterations, and its gradient runs each segment again.

A segment is a run of neighbouring iterations. The loop's variables at the start of each are put into stores
(`saved_values`), as entry number 0, 1, ... Which segment an iteration is in is a rule of its number alone, so that the
forward loop and the gradient agree on it whatever the loop decides by. Either all segments have one length, or, for
loops whose number of iterations nobody knows, each is one iteration longer than the one before. Of n iterations there
are then about ``sqrt(2 * n)`` segments, of at most as many iterations.
"""

from __future__ import annotations

from math import isqrt
from typing import TYPE_CHECKING

import numpy as np

from asyncflow.autodiff.stores import STORE
from asyncflow.graph.dtypes import int64
from asyncflow.graph.op import OPAQUE, Op
from asyncflow.graph.spec import Spec
from asyncflow.ops.cost import free

if TYPE_CHECKING:
    from asyncflow.autodiff.stores import SavedValues
    from asyncflow.values import Kernel, Namespace, Value


def segment_of(number: int, length: int | None) -> tuple[int, int]:
    """The segment of iteration `number`, and the number of the first iteration in it.

    Args:
        number: of an iteration, from 0 on.
        length: of each segment; None if they have 1, 2, 3, ... iterations.
    """
    if length is not None:
        segment = number // length
        return segment, segment * length
    segment = (isqrt(8 * number + 1) - 1) // 2
    return segment, segment * (segment + 1) // 2


def _checkpoint_kernel(xp: Namespace, *, length: int | None) -> Kernel:
    def keep(store: SavedValues, number: int, value: Value) -> SavedValues:
        segment, first = segment_of(int(number), length)
        return store.saved(segment, value) if first == number else store

    return keep


def _segment_kernel(xp: Namespace, *, length: int | None) -> Kernel:
    def find(end: int) -> tuple[Value, Value]:
        segment, first = segment_of(int(end) - 1, length)
        return np.int64(segment), np.int64(first)

    return find


# Compiler passes make these, and users never: they have no derivatives.
CHECKPOINT = Op(
    "checkpoint",
    lambda store, number, value, *, length: STORE,
    _checkpoint_kernel,
    flops=free,
    host_inputs=(1,),
    traits=OPAQUE,
)
"""The store with the value of a loop variable in it, if iteration `number` is the first of a segment."""
SEGMENT = Op(
    "segment",
    lambda end, *, length: (Spec(int64, ()), Spec(int64, ())),
    _segment_kernel,
    flops=free,
    host_inputs=(0,),
    traits=OPAQUE,
)
"""The segment of the iteration before number `end`, and its first iteration."""
