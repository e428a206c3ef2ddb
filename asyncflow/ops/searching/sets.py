"""Set functions: the distinct elements of a tensor, whose number only the run knows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import NamedTuple

from asyncflow.graph.building.build import TensorLike, apply
from asyncflow.graph.ir import Tensor
from asyncflow.graph.op import Op, define
from asyncflow.graph.values.dtypes import int64
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.axes import flat_extent
from asyncflow.ops.cost import sorting
from asyncflow.ops.promotion import require_kind
from asyncflow.values import Array, Kernel, Namespace


class UniqueAll(NamedTuple):
    """The result of `unique_all`."""

    values: Tensor
    """Distinct elements, sorted."""
    indices: Tensor
    """Position of the first of each in the flattened input, int64."""
    inverse_indices: Tensor
    """Position in `values` of each input element, int64, in the input's shape."""
    counts: Tensor
    """Number of times that each occurs, int64."""


class UniqueCounts(NamedTuple):
    """The result of `unique_counts`."""

    values: Tensor
    """Distinct elements, sorted."""
    counts: Tensor
    """Number of times that each occurs, int64."""


class UniqueInverse(NamedTuple):
    """The result of `unique_inverse`."""

    values: Tensor
    """Distinct elements, sorted."""
    inverse_indices: Tensor
    """Position in `values` of each input element, int64, in the input's shape."""


def _values_spec(x: Spec) -> Spec:
    require_kind(x, "biufcT", "numbers, booleans and strings")
    extent = flat_extent(x.shape)
    # With 0 or 1 elements, all are distinct; otherwise the data decide.
    return Spec(x.dtype, (extent if extent in (0, 1) else None,))


def _all_spec(x: Spec) -> tuple[Spec, ...]:
    values = _values_spec(x)
    per_value = Spec(int64, values.shape)
    return values, per_value, Spec(int64, x.shape), per_value


def _unique_op(name: str, infer: Callable[[Spec], Spec | tuple[Spec, ...]], *others: str) -> Op:
    """Defines an op that gives the distinct values, and others of what NumPy's function may return."""
    options = {f"return_{other}": True for other in others}

    def kernel(xp: Namespace) -> Kernel:
        unique = partial(xp.unique, equal_nan=False, **options)

        def run(x: Array) -> tuple[Array, ...]:
            found = zip(("values", *others), unique(x), strict=True)
            return tuple(each.reshape(x.shape) if of == "inverse" else each for of, each in found)

        return run if others else unique

    return define(name, infer, kernel, flops=sorting, rows="as found", runs_on_host=True)


UNIQUE_ALL = _unique_op("unique_all", _all_spec, "index", "inverse", "counts")
UNIQUE_COUNTS = _unique_op("unique_counts", lambda x: _all_spec(x)[::3], "counts")
UNIQUE_INVERSE = _unique_op("unique_inverse", lambda x: _all_spec(x)[::2], "inverse")
UNIQUE_VALUES = _unique_op("unique_values", _values_spec)


def _distinct(op: Op, x: TensorLike) -> tuple[Tensor, ...]:
    import_module("numpy.ma")  # else NumPy imports it in the first call, on the event loop
    return apply(op, x)


def unique_all(x: TensorLike, /) -> UniqueAll:
    """Distinct elements of `x`, sorted, with first positions, inverse and counts. Each NaN is distinct."""
    return UniqueAll(*_distinct(UNIQUE_ALL, x))


def unique_counts(x: TensorLike, /) -> UniqueCounts:
    """Distinct elements of `x`, sorted, and how often each occurs. Each NaN is distinct."""
    return UniqueCounts(*_distinct(UNIQUE_COUNTS, x))


def unique_inverse(x: TensorLike, /) -> UniqueInverse:
    """Distinct elements of `x`, sorted, and which of them each element of `x` is. Each NaN is distinct."""
    return UniqueInverse(*_distinct(UNIQUE_INVERSE, x))


def unique_values(x: TensorLike, /) -> Tensor:
    """Distinct elements of `x`, sorted; a vector of a length only the run knows. Each NaN is distinct."""
    return _distinct(UNIQUE_VALUES, x)[0]
