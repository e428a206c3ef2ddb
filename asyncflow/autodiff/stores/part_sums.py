"""Sums of gradients that reach parts of one value: rows, slices, windows, elements picked by number.

A part is kept as it comes, with the key that names it, until the parts are as large together as the whole; then they
are added up in one array. So a loop pays for the parts that it reads, however long the array is. The kept parts are
never much larger than the array. A sum is a VARIANT that loops carry and branches give; the next one takes its memory.

The gradient of such a sum is one, too: the parts added here are read from it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

import numpy as np

from asyncflow.autodiff.stores.store_gradients import merge_gradients, no_gradient
from asyncflow.autodiff.stores.stores import STORE, StoreLog, StoreVersion
from asyncflow.graph.building.build import apply
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import KERNELS, READS_STORE, define, derivative
from asyncflow.graph.values.dtypes import DType, summed_in
from asyncflow.graph.values.shapes import Shape, size_of
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.arrays.extents import apply_to_shape, shape_reader, template_shape
from asyncflow.ops.cost import free
from asyncflow.ops.derivatives.shapes import ENSURE_SHAPE, ensure_shape, shape_of
from asyncflow.ops.indexing import scatter
from asyncflow.ops.indexing.keys import (
    ELLIPSIS,
    Key,
    compile_key,
    device_index,
    host_indices,
    indexed_shape,
    is_flag,
)
from asyncflow.values import Array, Kernel, Namespace

_WHOLE: Key = (ELLIPSIS,)

_ENTRY = 64
"""Elements that a part counts as beside its own: keeping it takes about as much memory."""

_FEW = 4
"""Divisor of the whole's elements: parts that are known to have more than that are added up as wholes."""


class _PartPlace:
    """The place that parts of one key go to, for one node."""

    __slots__ = ("_add", "_is_rows", "_xp")

    def __init__(self, xp: Namespace, key: Key) -> None:
        self._xp = xp
        self._add = scatter.part_kernel(xp, key, is_first=False)
        self._is_rows = scatter.names_rows(key)

    def add(self, result: Array, parts: Sequence[_Part]) -> None:
        """Add parts of this place to an array."""
        ranks = {_rank(part[2][0]) for part in parts} if self._is_rows else None
        if ranks == {0}:
            for _, values, (row,) in parts:
                result[row] += values
        elif ranks == {1}:  # for adding at positions, a call costs more than a row
            rows = self._xp.concatenate([indices[0] for _, _, indices in parts])
            self._add(result, self._xp.concatenate([values for _, values, _ in parts]), [rows])
        else:
            for _, values, indices in parts:
                self._add(result, values, indices)


def _rank(rows: Array) -> int | None:
    """The rank of numbers of rows; None for a mask."""
    return None if rows.dtype.kind == "b" else rows.ndim


_Part: TypeAlias = "tuple[_PartPlace | None, Array, Sequence[Array]]"
"""The place it goes to, None for the whole; values; and the tensors in the key."""


@dataclass(frozen=True, slots=True)
class _PartedValue:
    """The value that the parts are parts of; parts accumulate in the dtype `wide`, as `summed_in` says."""

    xp: Namespace
    extents: tuple[int, ...]
    dtype: DType
    wide: DType
    size: int

    def added_up(self, parts: Sequence[_Part]) -> Array:
        """Return an array with all parts in their places."""
        (place, values, _), *rest = parts
        if place is None and not rest:
            return values
        is_whole = place is None
        # Copy a whole gradient: it may belong to a user, or to another sum.
        copied = self.xp.array(values) if is_whole else self.xp.zeros(self.extents, self.wide)
        result = copied.astype(self.wide, copy=False)
        alike: dict[_PartPlace | None, list[_Part]] = {}
        for part in rest if is_whole else parts:
            alike.setdefault(part[0], []).append(part)
        for place, group in alike.items():
            if place is None:
                for _, whole, _ in group:
                    result += whole
            else:
                place.add(result, group)
        return result


class _PartLog(StoreLog[_Part]):
    __slots__ = ()
    entry_nbytes = 120  # a triple, and the tuple in it

    def since(self, count: int) -> Sequence[object]:
        """Return the values behind the first `count`; None for parts already added up."""
        return [None if place is None else values for place, values, _ in self[count:]]

    def buffers(self) -> Sequence[Array]:
        """Return the sum, if it was made here; a view, or its base, counts by itself."""
        return [values for place, values, _ in self[:1] if place is None and values.base is None]


class PartSum(StoreVersion[_Part]):
    """The gradients of parts of a value, added up when they are as large as the whole.

    Attributes:
        whole: the value that has the parts.
        size: elements that have come since the last time that all were added up; see `_ENTRY`.
    """

    __slots__ = ("_total", "size", "whole")

    def __init__(self, whole: _PartedValue, log: StoreLog[_Part], length: int, nbytes: int, size: int) -> None:
        self.log, self.length, self.nbytes = log, length, nbytes  # here, as each iteration of a loop makes one
        self.whole = whole
        self.size = size
        self._total: Array | None = None

    @classmethod
    def of(cls, whole: _PartedValue, parts: Sequence[_Part]) -> PartSum:
        """Make a sum of these parts alone, added up if they are as large as the whole."""
        size = sum(values.size + _ENTRY for _, values, _ in parts)
        if size >= whole.size:
            parts, size = [(None, whole.added_up(parts), ())], 0
        return cls(whole, _PartLog(parts), len(parts), sum(values.nbytes for _, values, _ in parts), size)

    def parts(self) -> Sequence[_Part]:
        """Return all parts, or their sum if that is known."""
        return self.entries() if self._total is None else [(None, self._total, ())]

    def with_parts(self, parts: Sequence[_Part]) -> PartSum:
        """The sum with more parts."""
        size, nbytes = self.size, self.nbytes
        for _, values, _ in parts:
            size += values.size + _ENTRY
            nbytes += values.nbytes
        # Then add up: the sum becomes the first part of a new log. The cost is proportional to the parts added.
        if size >= self.whole.size:
            return PartSum.of(self.whole, [*self.parts(), *parts])
        return PartSum(self.whole, self.grown(parts), self.length + len(parts), nbytes, size)

    def merged(self, other: PartSum) -> PartSum:
        """The sum with the parts of `other`; the cost is that of the shorter one."""
        return self.with_parts(other.parts()) if other.length <= self.length else other.merged(self)

    def total(self) -> Array:
        """Return the sum of all parts, each in its place of the whole; nothing writes to it."""
        if self._total is None:  # two threads may both add up, with the same result
            self._total = self.whole.added_up(self.parts())
        return self._total if self._total.dtype == self.whole.dtype else self._total.astype(self.whole.dtype)


# -- ops -------------------------------------------------------------------------------------------------------------


def _add_kernel(xp: Namespace, *, keys: tuple[Key, ...], shape: Shape, known: Shape) -> Kernel:
    places, read = [None if key == _WHOLE else _PartPlace(xp, key) for key in keys], shape_reader(shape)
    place, n_indices = places[0], scatter.index_count(keys[0])

    def add(total: PartSum, *inputs: Array) -> PartSum:
        if len(places) == 1:
            parts: list[_Part] = [(place, inputs[0], inputs[1 : 1 + n_indices])]
        else:
            parts = [(place, *part) for place, part in zip(places, scatter.parts_of(inputs, keys), strict=True)]
        if total.length:
            grown: PartSum = total.with_parts(parts)
            return grown
        # An empty store has no shape: the first part brings the whole's shape.
        extents = read(scatter.sizes_of(inputs, shape))
        dtype = inputs[0].dtype
        return PartSum.of(_PartedValue(xp, extents, dtype, summed_in(dtype), prod(extents)), parts)

    return add


def _part_kernel(xp: Namespace, *, key: Key, shape: Shape, dtype: DType) -> Kernel:
    (static, build), n_indices, read = compile_key(key), scatter.index_count(key), shape_reader(shape)

    def part(total: PartSum, *inputs: Array) -> Array:
        index = static if static is not None else build(*inputs[:n_indices])
        if static is None and xp is not np:
            index = device_index(xp, index)
        if total.length:
            return total.total()[index]
        # Zeros of the whole are a view of one zero, without memory: only the part takes memory.
        nothing = xp.broadcast_to(xp.zeros((), dtype), read(inputs[n_indices:]))[index]
        return xp.zeros(nothing.shape, dtype)

    return part


def _part_spec(total: Spec, *inputs: Spec, key: Key, shape: Shape, dtype: DType) -> Spec:
    n_indices = scatter.index_count(key)
    return Spec(dtype, indexed_shape(template_shape(shape, inputs[n_indices:]), key, inputs[:n_indices]))


def _part_host_inputs(node: Node) -> Collection[int]:
    key = node.attrs["key"]
    count = scatter.index_count(key)
    read = host_indices(key, [x.spec for x in node.inputs[1 : 1 + count]])
    assert read is not None, "a single boolean names no part"
    return [*(1 + number for number in read), *range(1 + count, len(node.inputs))]


ADD_PARTS = define(
    "add_parts",
    lambda total, *inputs, **attrs: STORE,
    _add_kernel,
    flops=free,
    host_inputs=lambda node: scatter.host_places(node, 1),
    traits=KERNELS,
)
PART_OF_SUM = define("part_of_sum", _part_spec, _part_kernel, host_inputs=_part_host_inputs, traits=READS_STORE)


def are_parts(grad: Tensor, whole: Shape) -> bool:
    """Return True if a gradient for a value of shape `whole` consists of comparatively few parts, as far as known."""
    node = _maker(grad)
    if node.op is PART_OF_SUM:
        return bool(node.attrs["key"] == _WHOLE)
    if node.op is scatter.SCATTER_ALONG_AXIS:
        values, size = node.inputs[0].shape, size_of(whole)
        return values is not None and (size is None or (size_of(values) or 0) * _FEW <= size)
    if node.op is not scatter.SCATTER_TO:
        return False
    parts, size = scatter.parts_of(node.inputs, node.attrs["keys"]), size_of(whole)
    if any(is_flag(index) for _, indices in parts for index in indices):
        return False
    sizes = [size_of(values.shape) for values, _ in parts]
    return size is None or sum(each or 0 for each in sizes) * _FEW <= size


def with_parts(total: Tensor, grad: Tensor) -> Tensor:
    """A sum, with the parts of a gradient that is made of them."""
    node = _maker(grad)
    if node.op is PART_OF_SUM:
        return merge_gradients(total, node.inputs[0])
    if node.op is scatter.SCATTER_ALONG_AXIS:
        values, _, *sizes = node.inputs
        indices = scatter.along_indices(node)
        key = tuple(("input", place) for place in range(len(indices)))
        shape = node.attrs["shape"]
        return apply(ADD_PARTS, total, values, *indices, *sizes, keys=(key,), shape=shape, known=None)[0]
    return apply(ADD_PARTS, total, *node.inputs, **node.attrs)[0]


def whole_sum(total: Tensor, like: Tensor) -> Tensor:
    """The gradient of the forward value `like` that a sum stands for."""
    return ensure_shape(apply_to_shape(PART_OF_SUM, shape_of(like), total, key=_WHOLE, dtype=like.dtype), like.shape)


def joined_parts(grads: Sequence[Tensor], like: Tensor) -> Sequence[Tensor]:
    """Return gradients of the forward value `like`, with all partial ones joined in one sum if there is a sum already.

    Otherwise a slice used before a loop would come back as zeros of the whole, which would be added to the sum.
    """
    parts = [grad for grad in grads if are_parts(grad, like.shape)]
    sums = [grad for grad in parts if _maker(grad).op is PART_OF_SUM]
    if not sums or len(parts) == 1:
        return grads
    total = _maker(sums[0]).inputs[0]
    for grad in parts:
        if grad is not sums[0]:
            total = with_parts(total, grad)
    return [*(grad for grad in grads if not any(grad is part for part in parts)), whole_sum(total, like)]


def _maker(grad: Tensor) -> Node:
    """The node that makes a gradient, whatever is known of its shape."""
    while grad.node.op is ENSURE_SHAPE:
        grad = grad.node.inputs[0]
    return grad.node


# -- their derivatives -----------------------------------------------------------------------------------------------


@derivative(ADD_PARTS)
def _add_parts(node: Node, grads: Tensor) -> Sequence[Tensor | None]:
    _, *inputs = node.inputs
    keys, shape = node.attrs["keys"], node.attrs["shape"]
    sizes = scatter.sizes_of(inputs, shape)
    reached: list[Tensor | None] = [grads]
    for key, (values, indices) in zip(keys, scatter.parts_of(inputs, keys), strict=True):
        part = apply(PART_OF_SUM, grads, *indices, *sizes, key=key, shape=shape, dtype=values.dtype)[0]
        reached += [ensure_shape(part, values.shape), *[None] * len(indices)]
    return [*reached, *[None] * len(sizes)]


@derivative(PART_OF_SUM)
def _part_of_sum(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    _, *inputs = node.inputs
    key, shape = node.attrs["key"], node.attrs["shape"]
    grads = apply(ADD_PARTS, no_gradient(), grad, *inputs, keys=(key,), shape=shape, known=None)[0]
    return [grads, *[None] * len(inputs)]
