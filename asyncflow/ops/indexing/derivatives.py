"""Derivatives of indexing: what reaches ``x[key]`` goes back to where it came from; repeated indices add."""

from __future__ import annotations

from collections.abc import Sequence

from asyncflow.graph.building.build import apply, constant
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import derivative
from asyncflow.ops.arithmetic.logic import equal
from asyncflow.ops.arrays.creation import arange, zeros
from asyncflow.ops.arrays.manipulation import reshape
from asyncflow.ops.arrays.shape import shape, size
from asyncflow.ops.derivatives.shapes import shape_of, sum_to_like
from asyncflow.ops.indexing.indexing import GETITEM, INDEX_ADD, INDEX_UPDATE, TAKE, TAKE_ALONG_AXIS
from asyncflow.ops.indexing.keys import Key, along
from asyncflow.ops.indexing.scatter import scatter_along_axis, scatter_to
from asyncflow.ops.indexing.windows import DYNAMIC_SLICE
from asyncflow.ops.searching.searching import where


@derivative(GETITEM)
def _getitem(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    x, *indices = node.inputs
    scattered = scatter_to(grad, node.attrs["key"], indices, shape_of(x), known=x.shape)
    return [scattered, *[None] * len(indices)]


@derivative(DYNAMIC_SLICE)
def _dynamic_slice(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    x, *starts = node.inputs
    bounds = [bound for start, size in zip(starts, node.attrs["sizes"], strict=True) for bound in (start, start + size)]
    key = tuple(("slice", ("input", 2 * axis), ("input", 2 * axis + 1), None) for axis in range(len(starts)))
    return [scatter_to(grad, key, bounds, shape_of(x), known=x.shape), *[None] * len(starts)]


@derivative(TAKE)
def _take(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    x, indices = node.inputs
    key = along(node.attrs["axis"], ("input", 0))
    return [scatter_to(grad, key, [indices], shape_of(x), known=x.shape), None]


@derivative(TAKE_ALONG_AXIS)
def _take_along_axis(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    x, indices = node.inputs
    return [scatter_along_axis(grad, indices, shape_of(x), axis=node.attrs["axis"]), None]


@derivative(INDEX_ADD)
def _index_add(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    _, values, *indices = node.inputs
    named = apply(GETITEM, grad, *indices, key=node.attrs["key"])[0]
    return [grad, sum_to_like(named, values), *[None] * len(indices)]


@derivative(INDEX_UPDATE)
def _index_update(node: Node, grad: Tensor) -> Sequence[Tensor | None]:
    """Gives a gradient only to the value that stayed, where the key names an element twice."""
    _, values, *indices = node.inputs
    key, zero = node.attrs["key"], constant(0, grad.dtype)
    kept = apply(INDEX_UPDATE, grad, zero, *indices, key=key)[0]
    named = apply(GETITEM, grad, *indices, key=key)[0]
    if any(index.dtype.kind != "b" and index.ndim != 0 for index in indices):
        named = where(_stayed(named, grad, indices, key), named, zero)
    return [kept, sum_to_like(named, values), *[None] * len(indices)]


def _stayed(named: Tensor, grad: Tensor, indices: Sequence[Tensor], key: Key) -> Tensor:
    """Return a mask of the named values that stayed: the same update, with distinct numbers, shows which."""
    numbers = reshape(arange(size(named)), shape(named))
    placed = apply(INDEX_UPDATE, zeros(shape(grad), dtype="int64"), numbers, *indices, key=key)[0]
    return equal(apply(GETITEM, placed, *indices, key=key)[0], numbers)
