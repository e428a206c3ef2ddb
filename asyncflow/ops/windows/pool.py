"""Pooling: the largest element of each window, its place, and sums of windows.

Each op takes any number of axes in front of its spatial ones. A window's place is the number of an element in it. With
it `UNPOOLED` brings values back, and `PICKED` finds them again; they are one another's derivatives, as are the sum of
windows and its transpose.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import numpy as np

from asyncflow.errors import ShapeError
from asyncflow.graph.op import NEW, define, inputs_from
from asyncflow.graph.values.dtypes import DType, int32, summed_in
from asyncflow.graph.values.shapes import Shape, format_shape, is_compatible
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.arrays.extents import shape_reader, template_shape
from asyncflow.ops.cost import PASS, elements
from asyncflow.ops.promotion import kind_of, require_kind
from asyncflow.ops.windows.geometry import Extents, Windows
from asyncflow.values import Array, Index, Kernel, Namespace

Key: TypeAlias = "tuple[Index, ...]"


def _pooled(x: Shape, windows: Windows, kernel: Extents) -> Shape:
    """Return the shape of windows' results.

    Raises:
        ShapeError: a window is larger than the input with padding, or the rank is too low.
    """
    rank = windows.rank
    if x is None:
        return None
    if len(x) < rank:
        raise ShapeError(f"takes {rank} spatial axes, behind any others; got {format_shape(x)}")
    return (*x[: len(x) - rank], *windows.counts(x[len(x) - rank :], kernel))


def _spec(x: Spec, *, windows: Windows, kernel: Extents) -> Spec:
    require_kind(x, "iuf", "real numbers")
    return Spec(x.dtype, _pooled(x.shape, windows, kernel))


def _places_spec(x: Spec, *, windows: Windows, kernel: Extents) -> Spec:
    return Spec(int32, _spec(x, windows=windows, kernel=kernel).shape)


def _picked_spec(x: Spec, places: Spec, *, windows: Windows, kernel: Extents) -> Spec:
    found = _pooled(x.shape, windows, kernel)
    if not is_compatible(found, places.shape):
        raise ShapeError(f"windows of {x} give {format_shape(found)}; got {places}")
    return Spec(x.dtype, found)


def _spread_spec(y: Spec, *sizes: Spec, shape: Shape, windows: Windows, kernel: Extents) -> Spec:
    found = template_shape(shape, sizes)
    if y.shape is None or found is None:
        return Spec(y.dtype, None)
    whole = (*y.shape[: len(y.shape) - windows.rank], *found)
    if not is_compatible(_pooled(whole, windows, kernel), y.shape):
        raise ShapeError(f"windows of {format_shape(whole)} do not make {y}")
    return Spec(y.dtype, whole)


def _unpooled_spec(y: Spec, places: Spec, *sizes: Spec, shape: Shape, windows: Windows, kernel: Extents) -> Spec:
    if not is_compatible(y.shape, places.shape):
        raise ShapeError(f"takes a place for each value; got {y} and {places}")
    return _spread_spec(y, *sizes, shape=shape, windows=windows, kernel=kernel)


def _flops(inputs: Sequence[Shape], outputs: Sequence[Shape], *, kernel: Extents, **attrs: object) -> float:
    # Count windows at the smaller end, input or output.
    return PASS * math.prod(kernel) * min(elements(inputs[0]), elements(outputs[0]))


# -- kernels ---------------------------------------------------------------------------------------------------------


class _PoolWindows:
    """Windows of values of one shape.

    Attributes:
        shape: of the result.
    """

    def __init__(self, windows: Windows, kernel: Extents, x: Extents) -> None:
        self._windows, self._kernel, self._sizes = windows, kernel, x[len(x) - windows.rank :]
        self.shape = tuple(each for each in _pooled(x, windows, kernel) or () if each is not None)

    def __iter__(self) -> Iterator[tuple[int, Key, Key]]:
        """Yield places of a window by number, with the results that have an element there, and these elements."""
        whole = [slice(0, count) for count in self.shape[len(self.shape) - len(self._sizes) :]]
        for number, (_, there, inner) in enumerate(self._windows.places(self._kernel, self._sizes, whole)):
            yield number, (..., *there), (..., *inner)


def _least(dtype: DType) -> object:
    return dtype.type(-np.inf) if kind_of(dtype) == "f" else np.iinfo(dtype).min


def _max(xp: Namespace, pool: _PoolWindows, x: Array) -> Array:
    y = xp.full(pool.shape, _least(x.dtype), x.dtype)
    for _, there, inner in pool:
        y[there] = xp.maximum(y[there], x[inner])
    return y


def _places(xp: Namespace, pool: _PoolWindows, x: Array) -> Array:
    y, found = xp.full(pool.shape, _least(x.dtype), x.dtype), xp.full(pool.shape, -1, int32)
    for number, there, inner in pool:
        value, best, place = x[inner], y[there], found[there]
        # As in PyTorch, take the first of equal elements, and the last NaN.
        is_better = (place < 0) | (value > best) | (value != value)
        y[there] = xp.where(is_better, value, best)
        found[there] = xp.where(is_better, int32.type(number), place)
    return found


def _picked(xp: Namespace, pool: _PoolWindows, x: Array, places: Array) -> Array:
    y = xp.zeros(pool.shape, x.dtype)
    for number, there, inner in pool:
        y[there] = xp.where(places[there] == number, x[inner], y[there])
    return y


def _sum(xp: Namespace, pool: _PoolWindows, x: Array) -> Array:
    y = xp.zeros(pool.shape, summed_in(x.dtype))
    for _, there, inner in pool:
        y[there] += x[inner]
    return y.astype(x.dtype, copy=False)


def _unpooled(xp: Namespace, pool: _PoolWindows, x: Array, y: Array, places: Array) -> None:
    for number, there, inner in pool:
        x[inner] += xp.where(places[there] == number, y[there], y.dtype.type(0))


def _spread(xp: Namespace, pool: _PoolWindows, x: Array, y: Array) -> None:
    for _, there, inner in pool:
        x[inner] += y[there]


def _of_input(find: Callable[..., Array]) -> Callable[..., Kernel]:
    """Return the kernel of an op that is given the input of windows, and perhaps places."""

    def kernel(xp: Namespace, *, windows: Windows, kernel: Extents) -> Kernel:
        return lambda x, *rest: find(xp, _PoolWindows(windows, kernel, x.shape), x, *rest)

    return kernel


def _to_input(add: Callable[..., None], given: int) -> Callable[..., Kernel]:
    """Return the kernel of an op that adds to zeros of the input's extents, which follow the values `given`."""

    def bound(xp: Namespace, *, shape: Shape, windows: Windows, kernel: Extents) -> Kernel:
        read = shape_reader(shape)

        def run(*inputs: Array) -> Array:
            y = inputs[0]
            whole = (*y.shape[: y.ndim - windows.rank], *read(inputs[given:]))
            pool = _PoolWindows(windows, kernel, whole)
            if pool.shape != y.shape:
                raise ShapeError(f"windows of {format_shape(whole)} do not make {format_shape(y.shape)}")
            x = xp.zeros(whole, summed_in(y.dtype))
            add(xp, pool, x, *inputs[:given])
            return x.astype(y.dtype, copy=False)

        return run

    return bound


MAX_POOL = define("max_pool", _spec, _of_input(_max), flops=_flops, traits=NEW)
POOL_PLACES = define("pool_places", _places_spec, _of_input(_places), flops=_flops, traits=NEW)
PICKED = define("picked", _picked_spec, _of_input(_picked), flops=_flops, traits=NEW)
UNPOOLED = define(
    "unpooled", _unpooled_spec, _to_input(_unpooled, 2), flops=_flops, host_inputs=inputs_from(2), traits=NEW
)
SUM_POOL = define("sum_pool", _spec, _of_input(_sum), flops=_flops, traits=NEW)
SUM_POOL_INPUT = define(
    "sum_pool_input", _spread_spec, _to_input(_spread, 1), flops=_flops, host_inputs=inputs_from(1), traits=NEW
)
