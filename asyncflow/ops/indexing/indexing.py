"""Indexing: ``x[key]``, `take` and `gather`, and their opposites, which give a changed copy.

Negative positions count from the back. On the CPU a position out of range raises an IndexError that names it and the
extent; a GPU does not check positions, as that would mean waiting for it, and wraps them around.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import numpy as np

from asyncflow.errors import ShapeError
from asyncflow.graph.building.build import TensorLike, apply, as_tensor, graph_for
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import KERNELS, NEW, NEW_UNCAPTURED, VIEW, Op, define
from asyncflow.graph.values import operators
from asyncflow.graph.values.dtypes import uint64
from asyncflow.graph.values.shapes import Shape, broadcast, format_shape, normalize_axis
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.axes import replaced, static_int
from asyncflow.ops.cost import PASS, elements, free, moving
from asyncflow.ops.indexing.add_at import add_at
from asyncflow.ops.indexing.in_place import OwnBuffer, writable
from asyncflow.ops.indexing.keys import (
    ELLIPSIS,
    Key,
    along,
    compile_key,
    device_index,
    encode,
    host_indices,
    indexed_shape,
    is_flag,
)
from asyncflow.ops.promotion import require_kind
from asyncflow.values import Array, Kernel, Namespace, Value

# -- x[key] ----------------------------------------------------------------------------------------------------------


def _getitem_spec(x: Spec, *indices: Spec, key: Key) -> Spec:
    return Spec(x.dtype, indexed_shape(x.shape, key, indices))


def _getitem_kernel(xp: Namespace, *, key: Key) -> Kernel:
    static, build = compile_key(key)
    if static is not None:  # avoids a Python frame for each firing
        return operator.itemgetter(static[0] if len(static) == 1 else static)
    if xp is np:
        return operator.getitem if key == (("input", 0),) else lambda x, *indices: x[build(*indices)]

    def kernel(x: Any, *indices: Array) -> Value:
        index = build(*indices)
        return x[index if isinstance(x, np.ndarray | np.generic) else device_index(xp, index)]

    return kernel


def _key_inputs(first: int) -> Callable[[Node], Collection[int]]:
    """Positions of the inputs that indexing reads on the host, for an op whose tensors of a key begin at `first`."""

    def find(node: Node) -> Collection[int]:
        found = host_indices(node.attrs["key"], [x.spec for x in node.inputs[first:]])
        return range(len(node.inputs)) if found is None else [first + number for number in found]

    return find


def _getitem_flops(inputs: Sequence[Shape], outputs: Sequence[Shape], *, key: Key) -> float:
    # An integer from a tensor indexes like a literal one: the result is a view.
    views = all(index == () for index in inputs[1:])
    return free(inputs, outputs) if views else moving(inputs, outputs)


GETITEM = define(
    "getitem", _getitem_spec, _getitem_kernel, flops=_getitem_flops, host_inputs=_key_inputs(1), traits=VIEW
)


def getitem(x: TensorLike, key: object, /) -> Tensor:
    """``x[key]`` with NumPy's meaning; what ``x[...]`` on a tensor calls.

    Args:
        x: any tensor.
        key: an item or a tuple of them: ints, slices whose bounds are ints or integer scalar tensors, ``...``, None,
            integer arrays and tensors (which broadcast together), boolean masks.

    Raises:
        ShapeError: too many indices, or an int that is out of range for sure.
        DTypeError: an index tensor of floats, strings or complex numbers.
    """
    with graph_for(x):
        tensor = as_tensor(x)
        entries, indices = encode(key)
        if tensor.dtype.kind not in "biufcV" and ELLIPSIS not in entries:
            # NumPy gives a Python str for one element of a string array; with an ellipsis it stays an array.
            entries = (*entries, ELLIPSIS)
        return apply(GETITEM, tensor, *indices, key=entries)[0]


def sliced(x: Tensor, axis: int, start: int | Tensor | None, stop: int | Tensor | None) -> Tensor:
    """``x[start:stop]`` along `axis`; bounds may be integer scalar tensors."""
    tensors: list[Tensor] = []
    bounds: list[object] = []
    for bound in (start, stop):
        if bound is None or isinstance(bound, int):
            bounds.append(bound)
        else:
            bounds.append(("input", len(tensors)))
            tensors.append(bound)
    return apply(GETITEM, x, *tensors, key=along(axis, ("slice", *bounds, None)))[0]


def at_position(x: Tensor, axis: int, position: int) -> Tensor:
    """The slice of `x` at one position along `axis`, without that axis."""
    return apply(GETITEM, x, key=along(axis, ("int", position)))[0]


# -- take, gather ----------------------------------------------------------------------------------------------------


def _take_spec(x: Spec, indices: Spec, *, axis: int) -> Spec:
    require_kind(indices, "iu", "integer indices")
    if x.shape is None:
        return Spec(x.dtype)
    at = normalize_axis(axis, len(x.shape))
    if indices.shape is None:
        return Spec(x.dtype)
    return Spec(x.dtype, (*x.shape[:at], *indices.shape, *x.shape[at + 1 :]))


TAKE = define("take", _take_spec, lambda xp, axis: partial(xp.take, axis=axis), traits=NEW)


def take(x: TensorLike, indices: TensorLike, /, *, axis: int | None = None) -> Tensor:
    """Slices of `x` at the positions `indices` along `axis`.

    Args:
        x: a tensor of rank 1 or higher.
        indices: integers of any shape, which takes the place of `axis` in the result.
        axis: may be left out for rank 1.

    Raises:
        ShapeError: `axis` is missing or out of range.
    """
    with graph_for(x, indices):
        tensor = as_tensor(x)
        if axis is None and tensor.ndim != 1:
            raise ShapeError(f"take: axis may only be left out for a value of rank 1, not {tensor!r}; give axis=")
        return gather(tensor, indices, axis=0 if axis is None else axis)


def gather(x: TensorLike, indices: TensorLike, /, *, axis: int = 0) -> Tensor:
    """Slices of `x` at the positions `indices` along `axis`: `take` with rows as the default.

    Args:
        x: a tensor of rank 1 or higher.
        indices: integers of any shape, which takes the place of `axis` in the result.
        axis: along which the positions count.
    """
    with graph_for(x, indices):
        tensor, positions, at = as_tensor(x), as_tensor(indices), static_int(axis, "axis")
        if tensor.dtype.kind in "TO" or positions.dtype == uint64:
            # NumPy's `take` turns one string into a Python str, and refuses uint64.
            require_kind(positions.spec, "iu", "integer indices")
            return getitem(tensor, _key_along(tensor, at, positions))
        return apply(TAKE, tensor, positions, axis=at)[0]


def _key_along(x: Tensor, axis: int, positions: Tensor) -> tuple[object, ...]:
    """Return the key that indexes one axis."""
    if x.ndim is not None:
        axis = normalize_axis(axis, x.ndim)
    if axis < 0:  # the rank is unknown: count from the end
        return (..., positions, *(slice(None),) * (-1 - axis))
    return (*(slice(None),) * axis, positions)


def _along_spec(x: Spec, indices: Spec, *, axis: int) -> Spec:
    require_kind(indices, "iu", "integer indices")
    if x.shape is None or indices.shape is None:
        return Spec(x.dtype, None if x.rank is None else (None,) * x.rank)
    if len(x.shape) != len(indices.shape):
        seen = f"{format_shape(x.shape)} and {format_shape(indices.shape)}"
        raise ShapeError(f"x and indices must have one rank, got {seen}")
    # Along the axis the extents may differ: positions are read there, not paired.
    along = indices.shape[normalize_axis(axis, len(x.shape))]
    others = broadcast((replaced(x.shape, axis, 1), replaced(indices.shape, axis, 1)))
    return Spec(x.dtype, replaced(others, axis, along))


TAKE_ALONG_AXIS = define(
    "take_along_axis", _along_spec, lambda xp, axis: partial(xp.take_along_axis, axis=axis), traits=KERNELS
)


def take_along_axis(x: TensorLike, indices: TensorLike, /, *, axis: int = -1) -> Tensor:
    """Elements of `x` at positions along `axis` given for each slice, such as `argsort` gives.

    Args:
        x: a tensor of rank 1 or higher.
        indices: integers, of the rank of `x`; the other axes broadcast.
        axis: along which the positions count.
    """
    with graph_for(x, indices):
        return apply(TAKE_ALONG_AXIS, x, indices, axis=static_int(axis, "axis"))[0]


# -- changed copies --------------------------------------------------------------------------------------------------


def _changed_spec(x: Spec, values: Spec, *indices: Spec, key: Key) -> Spec:
    target = indexed_shape(x.shape, key, indices)
    if target is not None and values.shape is not None and not _fits(values.shape, target):
        raise ShapeError(
            f"values of shape {format_shape(values.shape)} do not broadcast to {format_shape(target)}, "
            f"the shape of the changed elements"
        )
    return x


def _fits(shape: tuple[int | None, ...], target: tuple[int | None, ...]) -> bool:
    if len(shape) > len(target):
        return False
    pairs = zip(reversed(shape), reversed(target), strict=False)
    # Only values are broadcast, never their target, so 1 in `target` does not accept every extent.
    return all(dim in (1, None) or extent in (None, dim) for dim, extent in pairs)


def _added_spec(x: Spec, values: Spec, *indices: Spec, key: Key) -> Spec:
    require_kind(x, "biufc", "numbers and booleans")
    return _changed_spec(x, values, *indices, key=key)


def _update_kernel(xp: Namespace, *, key: Key) -> Kernel:
    _, build = compile_key(key)

    def kernel(x: Array, values: Array, *indices: Array, own: Array | OwnBuffer | None = None) -> Array:
        index = build(*indices)
        result = writable(np, x, index, own)
        result[index] = values
        return result

    def device_kernel(x: Array, values: Array, *indices: Array) -> Array:
        # Only NumPy takes a single boolean as an index: `_key_inputs` has then brought all inputs to the host.
        if any(map(is_flag, indices)):
            return kernel(x, values, *indices)
        result = xp.array(x)
        result[device_index(xp, build(*indices))] = xp.asarray(values)
        return result

    kernel.takes_own = True  # type: ignore[attr-defined]
    return kernel if xp is np else device_kernel


def _add_kernel(xp: Namespace, *, key: Key) -> Kernel:
    static, build = compile_key(key)

    def basic(x: Array, values: Array, own: Array | OwnBuffer | None = None) -> Array:
        result = writable(xp, x, static, own)
        result[static] += values
        return result

    def kernel(x: Array, values: Array, *indices: Array, own: Array | OwnBuffer | None = None) -> Array:
        index = build(*indices)
        result = writable(np, x, index, own)
        add_at(np, result, index, values)
        return result

    def device_kernel(x: Array, values: Array, *indices: Array) -> Array:
        if any(map(is_flag, indices)):
            return kernel(x, values, *indices)
        result = xp.array(x)
        add_at(xp, result, device_index(xp, build(*indices)), values)
        return result

    basic.takes_own = kernel.takes_own = True  # type: ignore[attr-defined]
    if static is not None:
        return basic
    return kernel if xp is np else device_kernel


def _changed_flops(inputs: Sequence[Shape], outputs: Sequence[Shape], **attrs: object) -> float:
    return PASS * elements(outputs[0]) + moving((), inputs[1:])


INDEX_UPDATE = define(
    "index_update",
    _changed_spec,
    _update_kernel,
    flops=_changed_flops,
    host_inputs=_key_inputs(2),
    traits=NEW_UNCAPTURED,
)
INDEX_ADD = define(
    "index_add", _added_spec, _add_kernel, flops=_changed_flops, host_inputs=_key_inputs(2), traits=NEW_UNCAPTURED
)


def index_update(x: TensorLike, key: object, values: TensorLike, /) -> Tensor:
    """A copy of `x` with ``x[key]`` replaced by `values`; which value stays where `key` names an element twice is open.

    Args:
        x: any tensor.
        key: as for `getitem`.
        values: of the dtype of `x` (Python numbers adapt); broadcast to the shape of ``x[key]``.

    Raises:
        ShapeError: `values` do not broadcast.
        DTypeError: `values` have another dtype.
    """
    return _change(INDEX_UPDATE, x, key, values)


def index_add(x: TensorLike, key: object, values: TensorLike, /) -> Tensor:
    """A copy of `x` with `values` added to ``x[key]``; where `key` names an element twice both are added.

    The gradient of `getitem`. Arguments and errors as for `index_update`; `x` holds numbers or booleans ("or").
    """
    return _change(INDEX_ADD, x, key, values)


def scatter_add(x: TensorLike, indices: TensorLike, updates: TensorLike, /, *, axis: int = 0) -> Tensor:
    """A copy of `x` with `updates` added to its slices at the positions `indices` along `axis`; duplicates all add.

    The gradient of `gather`.

    Args:
        x: a tensor of numbers, of rank 1 or higher.
        indices: integers of any shape.
        updates: of the dtype of `x`, broadcast to the shape that `gather` gives.
        axis: along which the positions count.
    """
    return _scatter(INDEX_ADD, x, indices, updates, axis)


def scatter_update(x: TensorLike, indices: TensorLike, updates: TensorLike, /, *, axis: int = 0) -> Tensor:
    """A copy of `x` with its slices at the positions `indices` along `axis` replaced.

    Arguments as for `scatter_add`; which of several updates of one slice stays is open.
    """
    return _scatter(INDEX_UPDATE, x, indices, updates, axis)


def _scatter(op: Op, x: TensorLike, indices: TensorLike, updates: TensorLike, axis: int) -> Tensor:
    with graph_for(x, indices, updates):
        tensor, positions = as_tensor(x), as_tensor(indices)
        require_kind(positions.spec, "iu", "integer indices")
        return _change(op, tensor, _key_along(tensor, static_int(axis, "axis"), positions), updates)


def _change(op: Op, x: TensorLike, key: object, values: TensorLike) -> Tensor:
    with graph_for(x, values):
        tensor = as_tensor(x)
        entries, indices = encode(key)
        return apply(op, tensor, as_tensor(values, tensor.dtype), *indices, key=entries)[0]


operators.install(getitem=getitem)
