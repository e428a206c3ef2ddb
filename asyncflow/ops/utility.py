"""Utility functions of the standard: `all`, `any`, `diff`."""

from __future__ import annotations

from functools import partial

from asyncflow.errors import ShapeError
from asyncflow.graph.build import TensorLike, apply
from asyncflow.graph.dtypes import bool_
from asyncflow.graph.ir import Tensor
from asyncflow.graph.op import KERNELS, define
from asyncflow.graph.shapes import normalize_axis
from asyncflow.graph.spec import Spec
from asyncflow.ops.axes import Axes, as_axes, reduced, replaced, static_int
from asyncflow.ops.manipulation import concat
from asyncflow.ops.promotion import require_kind
from asyncflow.ops.statistical import method_reduction


def _test_spec(x: Spec, *, axis: Axes, keepdims: bool) -> Spec:
    require_kind(x, "biufcT", "numbers, booleans and strings")
    return Spec(bool_, reduced(x.shape, axis, keepdims))


ALL = method_reduction("all", _test_spec)
ANY = method_reduction("any", _test_spec)


def all(x: TensorLike, /, *, axis: Axes = None, keepdims: bool = False) -> Tensor:
    """True if all elements are true (nonzero), over `axis` or all axes; true where there are none.

    Args:
        x: numbers, booleans or strings.
        axis: one axis, several, or None for all.
        keepdims: leave reduced axes in the shape, with extent 1.
    """
    return apply(ALL, x, axis=as_axes(axis), keepdims=bool(keepdims))[0]


def any(x: TensorLike, /, *, axis: Axes = None, keepdims: bool = False) -> Tensor:
    """True if some element is true (nonzero), over `axis` or all axes; false where there are none.

    Args:
        x: numbers, booleans or strings.
        axis: one axis, several, or None for all.
        keepdims: leave reduced axes in the shape, with extent 1.
    """
    return apply(ANY, x, axis=as_axes(axis), keepdims=bool(keepdims))[0]


def _diff_spec(x: Spec, *, axis: int, n: int) -> Spec:
    require_kind(x, "biufc", "numbers and booleans")
    if n < 0:
        raise ShapeError(f"n must be 0 or more, got {n}")
    if x.shape is None:
        return x
    extent = x.shape[normalize_axis(axis, len(x.shape))]
    return Spec(x.dtype, replaced(x.shape, axis, None if extent is None else extent - n if extent > n else 0))


DIFF = define("diff", _diff_spec, lambda xp, *, axis, n: partial(xp.diff, n=n, axis=axis), rows="axis", traits=KERNELS)


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
    at = static_int(axis, "axis")
    joined = concat(parts, axis=at) if len(parts) > 1 else x
    return apply(DIFF, joined, axis=at, n=static_int(n, "n"))[0]
