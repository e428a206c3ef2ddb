"""Utility functions: `all`, `any` and `diff` of the standard, and `nan_to_num`."""

from __future__ import annotations

from asyncflow.errors import ShapeError
from asyncflow.graph.building.build import TensorLike, apply, as_tensor, graph_for
from asyncflow.graph.ir import Tensor
from asyncflow.graph.values.dtypes import bool_
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.arithmetic.elementwise import imag, real, subtract
from asyncflow.ops.arithmetic.logic import greater, isinf, isnan, less, logical_and, not_equal
from asyncflow.ops.arrays.datatypes import astype, finfo
from asyncflow.ops.arrays.manipulation import concat
from asyncflow.ops.axes import Axes, as_axes, reduced, static_int
from asyncflow.ops.indexing.indexing import sliced
from asyncflow.ops.promotion import kind_of, require_kind
from asyncflow.ops.reductions.statistical import method_reduction
from asyncflow.ops.searching.searching import where


def _test_spec(x: Spec, *, axis: Axes, keepdims: bool) -> Spec:
    require_kind(x, "biufcT", "numbers, booleans and strings")
    return Spec(bool_, reduced(x.shape, axis, keepdims))


ALL = method_reduction("all", _test_spec)
ANY = method_reduction("any", _test_spec)


def all(x: TensorLike, /, *, axis: Axes = None, keepdims: bool = False) -> Tensor:
    """Return True if all elements are true (nonzero), over `axis` or all axes; true where there are none.

    Args:
        x: numbers, booleans or strings.
        axis: one axis, several, or None for all.
        keepdims: leave reduced axes in the shape, with extent 1.
    """
    return apply(ALL, x, axis=as_axes(axis), keepdims=bool(keepdims))[0]


def any(x: TensorLike, /, *, axis: Axes = None, keepdims: bool = False) -> Tensor:
    """Return True if some element is true (nonzero), over `axis` or all axes; false where there are none.

    Args:
        x: numbers, booleans or strings.
        axis: one axis, several, or None for all.
        keepdims: leave reduced axes in the shape, with extent 1.
    """
    return apply(ANY, x, axis=as_axes(axis), keepdims=bool(keepdims))[0]


def diff(
    x: TensorLike, /, *, axis: int = -1, n: int = 1, prepend: TensorLike | None = None, append: TensorLike | None = None
) -> Tensor:
    """Differences of neighbours along `axis`, taken `n` times; "not equal" for booleans.

    Args:
        x: numbers or booleans, of rank 1 or higher.
        axis: where neighbours lie.
        n: how often to take differences; each makes the axis one shorter.
        prepend: put before `x` along `axis` first; same rank as `x`.
        append: put behind `x` along `axis` first; same rank as `x`.
    """
    parts = [part for part in (prepend, x, append) if part is not None]
    at, times = static_int(axis, "axis"), static_int(n, "n")
    if times < 0:
        raise ShapeError(f"diff: n must be 0 or more, got {times}")
    with graph_for(*parts):
        found = concat(parts, axis=at) if len(parts) > 1 else as_tensor(x)
        require_kind(found.spec, "biufc", "numbers and booleans")
        difference = not_equal if kind_of(found.dtype) == "b" else subtract
        for _ in range(times):
            found = difference(sliced(found, at, 1, None), sliced(found, at, None, -1))
        return found


def nan_to_num(
    x: TensorLike, /, *, nan: float = 0.0, posinf: float | None = None, neginf: float | None = None
) -> Tensor:
    """Replace NaNs and infinities by numbers, in both parts of complex ones; integers and booleans stay as they are.

    Args:
        x: numbers or booleans.
        nan: in place of NaN.
        posinf: in place of infinity; None for the largest number of the dtype.
        neginf: in place of minus infinity; None for the smallest.

    No gradient flows through replaced elements.
    """
    with graph_for(x):
        tensor = as_tensor(x)
        require_kind(tensor.spec, "biufc", "numbers and booleans")
        kind = kind_of(tensor.dtype)
        if kind in "biu":
            return tensor
        if kind == "c":
            parts = [nan_to_num(part, nan=nan, posinf=posinf, neginf=neginf) for part in (real(tensor), imag(tensor))]
            return astype(parts[0], tensor.dtype) + astype(parts[1], tensor.dtype) * 1j
        limits = finfo(tensor.dtype)
        most, least = limits.max if posinf is None else posinf, limits.min if neginf is None else neginf
        found = where(logical_and(isinf(tensor), greater(tensor, 0)), most, tensor)
        found = where(logical_and(isinf(tensor), less(tensor, 0)), least, found)
        return where(isnan(tensor), nan, found)
