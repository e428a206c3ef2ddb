"""Scatters: zeros of a shape with values added at positions, the transposes of indexing; and sums of them.

`scatter_to` is the transpose of `getitem` and `take`, `scatter_along_axis` that of `take_along_axis`. Values for one
element all add up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Sequence
from functools import reduce
from typing import TypeVar

import numpy as np

from asyncflow.errors import ShapeError
from asyncflow.graph.building.build import apply
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import KERNELS, OPAQUE, define, derivative, gradient_of_first, inputs_from
from asyncflow.graph.values.dtypes import summed_in
from asyncflow.graph.values.shapes import Shape, format_shape, is_compatible, merge
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.arithmetic.elementwise import add
from asyncflow.ops.arrays.creation import arange
from asyncflow.ops.arrays.datatypes import astype
from asyncflow.ops.arrays.extents import ExtentsLike, apply_to_shape, shape_reader, template_shape
from asyncflow.ops.arrays.manipulation import concat, reshape
from asyncflow.ops.arrays.shape import shape as shape_tensor
from asyncflow.ops.cost import moving_all
from asyncflow.ops.indexing.add_at import add_at
from asyncflow.ops.indexing.indexing import GETITEM, take_along_axis
from asyncflow.ops.indexing.keys import (
    ELLIPSIS,
    WHOLE,
    Key,
    compile_key,
    device_index,
    host_indices,
    indexed_shape,
    is_flag,
)
from asyncflow.values import Array, Index, Kernel, Namespace

T = TypeVar("T")

_MANY = 2048
"""Number of values from which they are grouped before they are added; for fewer, that would take longer."""

# -- at keys ---------------------------------------------------------------------------------------------------------


def names_rows(key: Key) -> bool:
    """Return True if a key is one tensor, for the first axis."""
    return key[0] == ("input", 0) and all(entry in (WHOLE, ELLIPSIS) for entry in key[1:])


def _size_count(shape: Shape) -> int:
    """Number of extents that a template leaves open."""
    return 1 if shape is None else shape.count(None)


def index_count(key: Key) -> int:
    """Number of tensors in a key."""
    return sum((entry[0] == "input") + sum(isinstance(bound, tuple) for bound in entry[1:]) for entry in key)


def parts_of(inputs: Sequence[T], keys: Sequence[Key]) -> list[tuple[T, Sequence[T]]]:
    """Return the values for each key and the tensors in the key; the rest of `inputs` are sizes."""
    parts, at = [], 0
    for key in keys:
        end = at + 1 + index_count(key)
        parts.append((inputs[at], inputs[at + 1 : end]))
        at = end
    return parts


def sizes_of(inputs: Sequence[T], shape: Shape) -> Sequence[T]:
    """The extents that the template `shape` leaves open, behind all else."""
    return inputs[len(inputs) - _size_count(shape) :]


def _scatter_spec(*inputs: Spec, keys: tuple[Key, ...], shape: Shape, known: Shape) -> Spec:
    target = merge(template_shape(shape, sizes_of(inputs, shape)), known)
    for key, (values, indices) in zip(keys, parts_of(inputs, keys), strict=True):
        named = indexed_shape(target, key, indices)
        if not is_compatible(values.shape, named):
            seen = f"{format_shape(values.shape)} for {format_shape(named)}"
            raise ShapeError(f"values must be shaped like what the key names, got {seen}")
    return Spec(inputs[0].dtype, target)


def _scatter_kernel(xp: Namespace, *, keys: tuple[Key, ...], shape: Shape, known: Shape) -> Kernel:
    read = shape_reader(shape)
    add_parts = [part_kernel(xp, key, is_first=place == 0) for place, key in enumerate(keys)]

    def scatter(*inputs: Array) -> Array:
        dtype = inputs[0].dtype
        wide = summed_in(dtype)
        result = xp.zeros(read(sizes_of(inputs, shape)), dtype=wide)
        # The first part is assigned, not added, if its key names no element twice: the array is all zeros.
        for add_part, (values, indices) in zip(add_parts, parts_of(inputs, keys), strict=True):
            add_part(result, values, indices)
        return result if wide is dtype else result.astype(dtype)

    if xp is np:
        return scatter
    # Only NumPy takes a single boolean as a key: such a scatter runs on the host.
    on_host = _scatter_kernel(np, keys=keys, shape=shape, known=known)

    def scatter_or_host(*inputs: Array) -> Array:
        has_flag = any(is_flag(index) for _, indices in parts_of(inputs, keys) for index in indices)
        return (on_host if has_flag else scatter)(*inputs)

    return scatter_or_host


def host_places(node: Node, first: int = 0) -> Collection[int]:
    """Positions of the inputs whose values a scatter reads: sizes, and what indexing with the keys does.

    Args:
        node: with the attributes of a scatter.
        first: position of its first values.
    """
    keys, shape = node.attrs["keys"], node.attrs["shape"]
    places = list(range(first, len(node.inputs)))
    found = places[len(places) - _size_count(shape) :]
    for key, (_, numbers) in zip(keys, parts_of(places, keys), strict=True):
        read = host_indices(key, [node.inputs[number].spec for number in numbers])
        if read is None:
            return places
        found.extend(numbers[number] for number in read)
    return found


def part_kernel(xp: Namespace, key: Key, *, is_first: bool) -> Callable[[Array, Array, Sequence[Array]], None]:
    """A function that adds values to an array at a key; `is_first`: to zeros alone."""
    static, build = compile_key(key)

    def set_slices(result: Array, values: Array, indices: Sequence[Array]) -> None:
        result[static] = values

    def add_at_slices(result: Array, values: Array, indices: Sequence[Array]) -> None:
        result[static] += values

    def add_at_indices(result: Array, values: Array, indices: Sequence[Array]) -> None:
        index = build(*indices) if xp is np else device_index(xp, build(*indices))
        for item in indices:
            if item.ndim and item.dtype.kind != "b":
                _add_at(xp, result, index if isinstance(index, tuple) else (index,), values)
                return
        result[index] += values  # slices, single positions and masks name no element twice

    if static is None:
        return add_at_indices
    return set_slices if is_first else add_at_slices


def _add_at(xp: Namespace, result: Array, index: tuple[Index, ...], values: Array) -> None:
    """``result[index] += values`` where values for one element all add."""
    # `np.add.at` is fast only for vectors, and the alternatives cost some passes over the positions.
    is_quick = xp is not np or values.size < _MANY or result.ndim == 1
    axis = None if is_quick else _only_axis(index, result.ndim)
    if axis is None:
        add_at(xp, result, index, values)
        return
    extent, inner = result.shape[axis], math.prod(result.shape[axis + 1 :])
    (rows,) = (item for item in index if isinstance(item, np.ndarray))
    rows = counted(rows, extent, axis)
    if are_distinct(rows.reshape(-1), extent):  # with distinct rows, plain indexing adds each value
        whole: list[Index] = [slice(None)] * axis
        result[(*whole, rows)] += values
        return
    # NumPy adds at positions of a vector several times faster than at rows.
    outer = math.prod(result.shape[:axis])
    at = rows.reshape(1, -1, 1) + np.arange(outer).reshape(-1, 1, 1) * extent
    positions = at * inner + np.arange(inner)
    add_at(np, result.reshape(-1), positions.reshape(-1), values.reshape(-1))


def add_at_rows(xp: Namespace, result: Array, rows: Array, values: Array) -> None:
    """``result[rows] += values`` where values for one row all add."""
    _add_at(xp, result, (rows,), values)


def are_distinct(positions: Array, extent: int) -> bool:
    """Return True if positions below `extent` are distinct."""
    if extent > 16 * positions.size:  # counting would take memory for each possible position
        ordered = np.sort(positions)
        return not (ordered[1:] == ordered[:-1]).any()
    return bool(np.bincount(positions, minlength=1).max() <= 1)


def _only_axis(index: tuple[Index, ...], rank: int) -> int | None:
    """Return the axis that `index` picks from by one array of integers, if it takes all other axes whole."""
    at = [place for place, item in enumerate(index) if isinstance(item, np.ndarray)]
    others = [item for item in index if not isinstance(item, np.ndarray)]
    if len(at) != 1 or any(item is not Ellipsis and item != slice(None) for item in others):
        return None
    behind = Ellipsis in index[: at[0]] if Ellipsis in others else False
    return rank - (len(index) - at[0]) if behind else at[0]


def counted(rows: Array, extent: int, axis: int) -> Array:
    """`rows` as int64 counted from the front; out of range raises, as indexing does."""
    wrong = (rows < -extent) | (rows >= extent) if rows.dtype.kind == "i" else rows >= extent
    if wrong.any():
        raise IndexError(f"index {rows[wrong].flat[0]} is out of bounds for axis {axis} with size {extent}")
    counted = rows.astype(np.int64)
    return np.where(counted < 0, counted + extent, counted)


SCATTER_TO = define(
    "scatter_to", _scatter_spec, _scatter_kernel, flops=moving_all, host_inputs=host_places, traits=KERNELS
)


def scatter_to(
    values: Tensor, key: Key, indices: Sequence[Tensor], shape: ExtentsLike, *, known: Shape = None
) -> Tensor:
    """Return zeros of `shape` with `values` added at a key: the transpose of ``x[key]``.

    Args:
        values: of the shape of ``x[key]``.
        key: encoded, see `asyncflow.ops.indexing.keys`.
        indices: the tensors in it.
        shape: of `x`.
        known: the known part of a shape given as a tensor.
    """
    return apply_to_shape(SCATTER_TO, shape, values, *indices, keys=(key,), known=known)


@derivative(SCATTER_TO)
def _scatter_to(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    keys = node.attrs["keys"]
    grads: list[Tensor | None] = []
    for key, (_, indices) in zip(keys, parts_of(node.inputs, keys), strict=True):
        grads += [apply(GETITEM, grad, *indices, key=key)[0], *[None] * len(indices)]
    return [*grads, *[None] * (len(node.inputs) - len(grads))]


# -- sums of gradients -----------------------------------------------------------------------------------------------


def sum_of_gradients(grads: Sequence[Tensor]) -> Tensor:
    """The sum of what reaches one value along several paths.

    Slices of it come back in one array: they would else make as many arrays of the size of the whole as there are
    slices. Slices side by side that make up the whole, as the gates of an LSTM are, are joined.

    Args:
        grads: at least one; all of one dtype and, in the run, one shape.

    Three or more of float16 or bfloat16 are added in float32.
    """
    groups: dict[Hashable, list[Node]] = {}
    rest: list[Tensor] = []
    for grad in grads:
        node = grad.node
        # Group by the same tensors as sizes: equality of others is unknown before the run.
        if node.op is SCATTER_TO:
            shape, known = node.attrs["shape"], node.attrs["known"]
            groups.setdefault((shape, known, tuple(sizes_of(node.inputs, shape))), []).append(node)
        else:
            rest.append(grad)
    terms = [*rest, *map(_joined, groups.values())]
    dtype = terms[0].dtype
    wide = summed_in(dtype)
    if wide is dtype or len(terms) < 3:
        return reduce(add, terms)
    return astype(reduce(add, [astype(term, wide) for term in terms]), dtype)


def _joined(nodes: Sequence[Node]) -> Tensor:
    """The sum of what several scatters to one shape give."""
    first = nodes[0]
    if len(nodes) == 1:
        return first.outputs[0]
    shape, known = first.attrs["shape"], first.attrs["known"]
    keys = tuple(key for node in nodes for key in node.attrs["keys"])
    parts = [part for node in nodes for part in parts_of(node.inputs, node.attrs["keys"])]
    tiling = _tiling(keys, first.outputs[0].shape)
    if tiling is not None:
        axis, order = tiling
        return concat([parts[place][0] for place in order], axis=axis)
    inputs = [item for values, indices in parts for item in (values, *indices)]
    return apply(SCATTER_TO, *inputs, *sizes_of(first.inputs, shape), keys=keys, shape=shape, known=known)[0]


def _tiling(keys: Sequence[Key], shape: Shape) -> tuple[int, list[int]] | None:
    """The axis along which the keys are slices side by side that make up the whole, and their order; None if not."""
    if shape is None:
        return None
    cuts = [sliced_axis(key, shape) for key in keys]
    slices = [(cut[1], cut[2], place) for place, cut in enumerate(cuts) if cut is not None]
    axes = {cut[0] for cut in cuts if cut is not None}
    if len(slices) < len(keys) or len(axes) > 1:
        return None
    (axis,) = axes
    slices.sort()
    starts, ends = [start for start, _, _ in slices], [stop for _, stop, _ in slices]
    # Each slice starts where the previous one ends, the first at 0, and the last ends at the extent.
    return (axis, [place for _, _, place in slices]) if [*starts, shape[axis]] == [0, *ends] else None


def sliced_axis(key: Key, shape: tuple[int | None, ...]) -> tuple[int, int, int] | None:
    """``(axis, start, stop)`` of a key that slices one axis and takes all others whole; None for any other."""
    if ELLIPSIS in key:
        at = key.index(ELLIPSIS)
        key = (*key[:at], *(WHOLE,) * (len(shape) + 1 - len(key)), *key[at + 1 :])
    sliced = [axis for axis, entry in enumerate(key) if entry != WHOLE]
    if len(sliced) != 1 or sliced[0] >= len(shape):
        return None
    (axis,) = sliced
    entry, extent = key[axis], shape[axis]
    if entry[0] != "slice" or extent is None or any(isinstance(bound, tuple) for bound in entry[1:]):
        return None
    start, stop, step = slice(*entry[1:]).indices(extent)
    return (axis, start, stop) if step == 1 else None


# -- along an axis ---------------------------------------------------------------------------------------------------


def _along_spec(values: Spec, indices: Spec, *sizes: Spec, axis: int, distinct: bool, shape: Shape) -> Spec:
    return Spec(values.dtype, template_shape(shape, sizes))


def _along_kernel(xp: Namespace, *, axis: int, distinct: bool, shape: Shape) -> Kernel:
    read = shape_reader(shape)

    def scatter(values: Array, indices: Array, *sizes: Array) -> Array:
        result = xp.zeros(read(sizes), dtype=values.dtype)
        at, rank = axis % result.ndim, result.ndim
        index = tuple(
            indices if i == at else xp.arange(result.shape[i]).reshape([-1 if k == i else 1 for k in range(rank)])
            for i in range(rank)
        )
        if distinct:
            result[index] = values
        else:
            add_at(xp, result, index, values)
        return result

    return scatter


SCATTER_ALONG_AXIS = define(
    "scatter_along_axis", _along_spec, _along_kernel, flops=moving_all, host_inputs=inputs_from(2), traits=OPAQUE
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
    return apply_to_shape(SCATTER_ALONG_AXIS, shape, values, indices, axis=axis, distinct=distinct)


def along_indices(node: Node) -> list[Tensor]:
    """Return indices, one for each axis, of the targets of a scatter along an axis; the rank of the values is known."""
    values, indices = node.inputs[:2]
    assert values.shape is not None
    dims = values.shape
    rank = len(dims)

    def counted(axis: int) -> Tensor:
        extent = dims[axis] if dims[axis] is not None else shape_tensor(values)[axis]
        return reshape(arange(extent), [-1 if k == axis else 1 for k in range(rank)])

    return [indices if i == node.attrs["axis"] % rank else counted(i) for i in range(rank)]


gradient_of_first(SCATTER_ALONG_AXIS, lambda node, grad: take_along_axis(grad, node.inputs[1], axis=node.attrs["axis"]))
