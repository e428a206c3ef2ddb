"""Sorting functions: `argsort`, `sort` and `top_k`."""

from __future__ import annotations

from functools import partial
from typing import Final

import numpy as np

from asyncflow.errors import GraphError, ShapeError
from asyncflow.graph.building.build import TensorLike, apply, as_tensor, graph_for
from asyncflow.graph.ir import Tensor
from asyncflow.graph.op import OPAQUE, define
from asyncflow.graph.values.dtypes import float32, int64
from asyncflow.graph.values.shapes import format_shape, normalize_axis
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.axes import replaced, static_int
from asyncflow.ops.cost import several_passes, sorting
from asyncflow.ops.indexing.indexing import take_along_axis
from asyncflow.ops.promotion import require_kind
from asyncflow.values import Array, Kernel, Namespace, Value


def _sort_spec(x: Spec, *, axis: int, descending: bool, stable: bool) -> Spec:
    require_kind(x, "biufcT", "numbers, booleans and strings")
    if x.rank is not None:
        normalize_axis(axis, x.rank)
    return x


def _argsort_spec(x: Spec, *, axis: int, descending: bool, stable: bool) -> Spec:
    return Spec(int64, _sort_spec(x, axis=axis, descending=descending, stable=stable).shape)


def _sortable(x: Array) -> Array:
    """Return `x`, or float32 of the same values for bfloat16, whose NaNs NumPy leaves where they are."""
    return x.astype(float32) if x.dtype.kind == "V" else x


def _sort_kernel(xp: Namespace, *, axis: int, descending: bool, stable: bool) -> Kernel:
    sorted_by = partial(xp.sort, axis=axis, kind="stable" if stable else None)

    def ascending(x: Array) -> Array:
        return sorted_by(_sortable(x)).astype(x.dtype, copy=False)

    if not descending:
        return ascending
    # Flip the input as well, so that equal elements with different bits (0.0, -0.0) keep their order.
    return lambda x: xp.flip(ascending(xp.flip(x, axis)), axis)


def _argsort_kernel(xp: Namespace, *, axis: int, descending: bool, stable: bool) -> Kernel:
    sorted_by = partial(xp.argsort, axis=axis, kind="stable" if stable else None)

    def ascending(x: Array) -> Array:
        return sorted_by(_sortable(x))

    if not descending:
        return ascending
    return lambda x: x.shape[axis] - 1 - xp.flip(ascending(xp.flip(x, axis)), axis)


SORT = define("sort", _sort_spec, _sort_kernel, flops=sorting, rows="axis", traits=OPAQUE)
ARGSORT = define("argsort", _argsort_spec, _argsort_kernel, flops=sorting, rows="axis", traits=OPAQUE)


def sort(x: TensorLike, /, *, axis: int = -1, descending: bool = False, stable: bool = True) -> Tensor:
    """`x` sorted along `axis`. NaNs count as larger than any number.

    Args:
        x: numbers, booleans or strings, of rank 1 or higher; complex numbers compare by real part first.
        axis: along which to sort.
        descending: largest first.
        stable: keep the order of equal elements.
    """
    at = static_int(axis, "axis")
    return apply(SORT, x, axis=at, descending=bool(descending), stable=bool(stable))[0]


def argsort(x: TensorLike, /, *, axis: int = -1, descending: bool = False, stable: bool = True) -> Tensor:
    """The int64 positions that sort `x` along `axis`; arguments as for `sort`."""
    at = static_int(axis, "axis")
    return apply(ARGSORT, x, axis=at, descending=bool(descending), stable=bool(stable))[0]


def _top_k_spec(x: Spec, *, k: int, axis: int, largest: bool) -> Spec:
    require_kind(x, "biufc", "numbers and booleans")
    if x.shape is None:
        return Spec(int64)
    extent = x.shape[normalize_axis(axis, len(x.shape))]
    if extent is not None and k > extent:
        raise ShapeError(f"there are no {k} elements along axis {axis} of {format_shape(x.shape)}")
    return Spec(int64, replaced(x.shape, axis, k))


def _top_k_kernel(xp: Namespace, *, k: int, axis: int, largest: bool) -> Kernel:
    positions = _argsort_kernel(xp, axis=axis, descending=largest, stable=True)

    def kernel(x: Array) -> Value:
        at = axis % x.ndim
        if k > x.shape[at]:
            raise ValueError(f"there are no {k} elements along axis {axis} of {format_shape(x.shape)}")
        if xp is np and x.dtype.kind != "c" and x.size >= _MANY and 0 < k * _FEW <= x.shape[at]:
            chosen = _chosen(np.moveaxis(x, at, -1), k, largest=largest)
            if chosen is not None:
                return np.moveaxis(chosen, -1, at)
        # A copy: a view would keep the memory of all positions.
        return positions(x)[(slice(None),) * at + (slice(k),)].copy()

    return kernel


_MANY: Final = 4_096
_FEW: Final = 8
"""A partition pays from `_MANY` elements on, of which at most one in `_FEW` is asked for."""


def _chosen(x: Array, k: int, *, largest: bool) -> Array | None:
    """Return the positions of the `k` first along the last axis, in order; None if the last of them is a NaN.

    A partition takes a tenth of the time of a sort, and tells only the value of the last.
    """
    values = _sortable(x)
    last = k - 1 if not largest else x.shape[-1] - k
    bound = np.partition(values, last, axis=-1)[..., last : last + 1]
    if (bound != bound).any():
        return None
    # NaNs count as large, and compare as False.
    taken = ~(values < bound) if largest else values <= bound
    if (np.count_nonzero(taken, axis=-1) > k).any():
        ties = values == bound
        room = k - np.count_nonzero(taken & ~ties, axis=-1, keepdims=True)
        taken &= ~ties | (np.cumsum(ties, axis=-1) <= room)
    positions = np.nonzero(taken)[-1].reshape(*x.shape[:-1], k)
    order = _argsort_kernel(np, axis=-1, descending=largest, stable=True)
    found: Array = np.take_along_axis(positions, order(np.take_along_axis(x, positions, axis=-1)), axis=-1)
    return found


TOP_K = define("top_k", _top_k_spec, _top_k_kernel, flops=several_passes, rows="axis", traits=OPAQUE)


def top_k(x: TensorLike, k: int, /, *, axis: int = -1, largest: bool = True) -> tuple[Tensor, Tensor]:
    """The `k` largest elements of `x` along `axis`, the largest first, and their positions (int64).

    Of equal elements the one at the lower position comes first. NaNs count as larger than any number.

    Args:
        x: numbers or booleans, of rank 1 or higher.
        k: how many.
        axis: along which.
        largest: False gives the smallest, the smallest first.

    Raises:
        ShapeError: there are fewer than `k`; where the extent is not known, the run fails instead.
        GraphError: `k` is below 0.
    """
    count = static_int(k, "k")
    if count < 0:
        raise GraphError(f"top_k: k is 0 or more, got {count}")
    with graph_for(x):
        tensor, at = as_tensor(x), static_int(axis, "axis")
        positions = apply(TOP_K, tensor, k=count, axis=at, largest=bool(largest))[0]
        return take_along_axis(tensor, positions, axis=at), positions
