"""Sorting functions: `argsort` and `sort`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from asyncflow.graph.build import TensorLike, apply
from asyncflow.graph.dtypes import int64
from asyncflow.graph.op import Op, register
from asyncflow.graph.shapes import normalize_axis
from asyncflow.graph.spec import Spec
from asyncflow.ops.axes import static_int
from asyncflow.ops.cost import sorting
from asyncflow.ops.promotion import require_kind

if TYPE_CHECKING:
    from asyncflow.graph.ir import Tensor
    from asyncflow.graph.op import Kernel


def _sort_spec(x: Spec, *, axis: int, descending: bool, stable: bool) -> Spec:
    require_kind(x, "biufcT", "numbers, booleans and strings")
    if x.rank is not None:
        normalize_axis(axis, x.rank)
    return x


def _argsort_spec(x: Spec, *, axis: int, descending: bool, stable: bool) -> Spec:
    return Spec(int64, _sort_spec(x, axis=axis, descending=descending, stable=stable).shape)


def _sort_kernel(xp: Any, *, axis: int, descending: bool, stable: bool) -> Kernel:
    ascending = partial(xp.sort, axis=axis, kind="stable" if stable else None)
    if not descending:
        return ascending
    # Flipped on the way in as well: equal elements that differ in their bits (0.0, -0.0) then keep their order.
    return lambda x: xp.flip(ascending(xp.flip(x, axis)), axis)


def _argsort_kernel(xp: Any, *, axis: int, descending: bool, stable: bool) -> Kernel:
    ascending = partial(xp.argsort, axis=axis, kind="stable" if stable else None)
    if not descending:
        return ascending
    return lambda x: x.shape[axis] - 1 - xp.flip(ascending(xp.flip(x, axis)), axis)


SORT = register(Op(name="sort", infer=_sort_spec, kernel=_sort_kernel, flops=sorting))
ARGSORT = register(Op(name="argsort", infer=_argsort_spec, kernel=_argsort_kernel, flops=sorting))


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


__all__ = ["argsort", "sort"]
