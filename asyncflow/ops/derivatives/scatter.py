"""Scatters: zeros of a shape with values added at positions, the transposes of indexing.

`scatter_to` is the transpose of `getitem` and `take`, `scatter_along_axis` that of `take_along_axis`. Values for one
element all add up.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncflow.errors import ShapeError
from asyncflow.graph.build import apply
from asyncflow.graph.op import Op, derivative, register
from asyncflow.graph.shapes import format_shape, is_compatible
from asyncflow.graph.spec import Spec
from asyncflow.ops.cost import elements
from asyncflow.ops.extents import ExtentsLike, shape_reader, split_extents, template_shape
from asyncflow.ops.indexing import GETITEM, take_along_axis
from asyncflow.ops.keys import Key, compile_key, indexed_shape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncflow.graph.ir import Node, Tensor
    from asyncflow.graph.op import Kernel
    from asyncflow.graph.shapes import Shape

# -- at a key --------------------------------------------------------------------------------------------------------


def _size_count(shape: Shape) -> int:
    """How many inputs a template leaves open."""
    return 1 if shape is None else shape.count(None)


def _scatter_spec(values: Spec, *rest: Spec, key: Key, shape: Shape) -> Spec:
    count = len(rest) - _size_count(shape)
    target = template_shape(shape, rest[count:])
    named = indexed_shape(target, key, rest[:count])
    if not is_compatible(values.shape, named):
        seen = f"{format_shape(values.shape)} for {format_shape(named)}"
        raise ShapeError(f"values must be shaped like what the key names, got {seen}")
    return Spec(values.dtype, target)


def _scatter_kernel(xp: Any, *, key: Key, shape: Shape) -> Kernel:
    static, build = compile_key(key)
    read, open_sizes = shape_reader(shape), _size_count(shape)

    def at_slices(values: Any, *sizes: Any) -> Any:
        result = xp.zeros(read(sizes), dtype=values.dtype)
        result[static] = values
        return result

    def at_indices(values: Any, *rest: Any) -> Any:
        count = len(rest) - open_sizes
        result = xp.zeros(read(rest[count:]), dtype=values.dtype)
        indices = rest[:count]
        index = build(*indices)
        if any(item.ndim and item.dtype.kind != "b" for item in indices):
            _add_at(xp, result, index if isinstance(index, tuple) else (index,), values)
        else:  # slices, single positions and masks name no element twice
            result[index] = values
        return result

    return at_indices if static is None else at_slices


def _add_at(xp: Any, result: Any, index: tuple[Any, ...], values: Any) -> None:
    """``result[index] += values`` where values for one element all add."""
    axis = _only_axis(index, result.ndim)
    if xp is not np or axis is None:
        xp.add.at(result, index, values)
        return
    # NumPy adds at positions of a vector several times faster than at those of rows.
    extent, inner = result.shape[axis], math.prod(result.shape[axis + 1 :])
    (rows,) = (item for item in index if isinstance(item, np.ndarray))
    outer = math.prod(result.shape[:axis])
    at = _checked(rows, extent, axis).reshape(1, -1, 1) + np.arange(outer).reshape(-1, 1, 1) * extent
    positions = at * inner + np.arange(inner)
    np.add.at(result.reshape(-1), positions.reshape(-1), values.reshape(-1))


def _only_axis(index: tuple[Any, ...], rank: int) -> int | None:
    """The axis that `index` picks from by one array of integers, if it takes all others whole."""
    at = [place for place, item in enumerate(index) if isinstance(item, np.ndarray)]
    others = [item for item in index if not isinstance(item, np.ndarray)]
    if len(at) != 1 or any(item is not Ellipsis and item != slice(None) for item in others):
        return None
    behind = Ellipsis in index[: at[0]] if Ellipsis in others else False
    return rank - (len(index) - at[0]) if behind else at[0]


def _checked(rows: Any, extent: int, axis: int) -> Any:
    """`rows` as int64 counted from the front; out of range raises, as indexing does."""
    wrong = (rows < -extent) | (rows >= extent) if rows.dtype.kind == "i" else rows >= extent
    if wrong.any():
        raise IndexError(f"index {rows[wrong].flat[0]} is out of bounds for axis {axis} with size {extent}")
    counted = rows.astype(np.int64)
    return np.where(counted < 0, counted + extent, counted)


def _scatter_flops(inputs: Sequence[Shape], outputs: Sequence[Shape], **attrs: object) -> float:
    return float(elements(outputs[0]) + elements(inputs[0]))


SCATTER_TO = register(Op(name="scatter_to", infer=_scatter_spec, kernel=_scatter_kernel, flops=_scatter_flops))


def scatter_to(values: Tensor, key: Key, indices: Sequence[Tensor], shape: ExtentsLike) -> Tensor:
    """Zeros of `shape` with `values` added at a key: the transpose of ``x[key]``.

    Args:
        values: of the shape of ``x[key]``.
        key: encoded, see `asyncflow.ops.keys`.
        indices: the tensors in it.
        shape: of `x`.
    """
    template, sizes = split_extents(shape)
    return apply(SCATTER_TO, values, *indices, *sizes, key=key, shape=template)[0]


@derivative(SCATTER_TO)
def _scatter_to(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    rest = node.inputs[1:]
    indices = rest[: len(rest) - _size_count(node.attrs["shape"])]
    return [apply(GETITEM, grad, *indices, key=node.attrs["key"])[0], *[None] * len(rest)]


# -- along an axis ---------------------------------------------------------------------------------------------------


def _along_spec(values: Spec, indices: Spec, *sizes: Spec, axis: int, distinct: bool, shape: Shape) -> Spec:
    return Spec(values.dtype, template_shape(shape, sizes))


def _along_kernel(xp: Any, *, axis: int, distinct: bool, shape: Shape) -> Kernel:
    read = shape_reader(shape)

    def scatter(values: Any, indices: Any, *sizes: Any) -> Any:
        result = xp.zeros(read(sizes), dtype=values.dtype)
        at, rank = axis % result.ndim, result.ndim
        index = tuple(
            indices if i == at else xp.arange(result.shape[i]).reshape([-1 if k == i else 1 for k in range(rank)])
            for i in range(rank)
        )
        if distinct:
            result[index] = values
        else:
            xp.add.at(result, index, values)
        return result

    return scatter


SCATTER_ALONG_AXIS = register(
    Op(name="scatter_along_axis", infer=_along_spec, kernel=_along_kernel, flops=_scatter_flops)
)


def scatter_along_axis(
    values: Tensor, indices: Tensor, shape: ExtentsLike, *, axis: int, distinct: bool = False
) -> Tensor:
    """Zeros of `shape` with `values` added at positions along `axis`: the transpose of `take_along_axis`.

    Args:
        values: of the shape that `take_along_axis` gives.
        indices: positions along `axis`, of the rank of `shape`; the other axes broadcast.
        shape: of what elements were taken from.
        axis: along which the positions count.
        distinct: no element is named twice, as in a permutation, which is quicker.
    """
    template, sizes = split_extents(shape)
    inputs = (values, indices, *sizes)
    return apply(SCATTER_ALONG_AXIS, *inputs, axis=axis, distinct=distinct, shape=template)[0]


@derivative(SCATTER_ALONG_AXIS)
def _scatter_along_axis(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    _, indices, *sizes = node.inputs
    return [take_along_axis(grad, indices, axis=node.attrs["axis"]), None, *[None] * len(sizes)]


__all__ = ["SCATTER_ALONG_AXIS", "SCATTER_TO", "scatter_along_axis", "scatter_to"]
