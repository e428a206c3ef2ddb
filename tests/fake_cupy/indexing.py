"""``a[index]`` and ``a[index] = value`` as CuPy does them.

Integers and slices give views. Arrays gather and scatter, and an index out of bounds wraps around. A boolean array
needs the number of true values, so it waits for the stream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tests.fake_cupy.arrays import Array
    from tests.fake_cupy.kernels import Kernels


def prepare(kernels: Kernels, index: Any) -> tuple[tuple[Any, ...], bool, bool]:
    """The index as a tuple, whether there are arrays in it, and whether one of them is boolean."""
    parts = list(index) if isinstance(index, tuple) else [index]
    arrays = masks = False
    for position, part in enumerate(parts):
        if part is None or part is Ellipsis or isinstance(part, slice):
            continue
        if np.isscalar(part) and not isinstance(part, (bool, np.bool_)):
            if not isinstance(part, (int, np.integer)):
                raise IndexError(f"only integers, slices and arrays are valid indices, not {part!r}")
            continue
        if not isinstance(part, kernels.ndarray):
            part = kernels.ndarray.of(np.asarray(part, np.int32 if isinstance(part, list) and not part else None))
            parts[position] = part
        if part.dtype.kind not in "biu":
            raise IndexError(f"arrays used as indices must be of integer or boolean type. (actual: {part.dtype.type})")
        arrays = True
        masks = masks or part.dtype.kind == "b"
    return tuple(parts), arrays, masks


def wrapped(shape: tuple[int, ...], index: tuple[Any, ...]) -> tuple[Any, ...]:
    """The index of NumPy arrays with the integers in them taken modulo their axis."""
    used = sum(
        part.ndim if isinstance(part, np.ndarray) and part.dtype.kind == "b" else 1
        for part in index
        if part is not None and part is not Ellipsis
    )
    result: list[Any] = []
    axis = 0
    for part in index:
        if isinstance(part, np.ndarray):
            result.append(part % max(shape[axis], 1) if part.dtype.kind != "b" else part)
            axis += part.ndim if part.dtype.kind == "b" else 1
        else:
            result.append(part)
            axis += len(shape) - used if part is Ellipsis else part is not None
    return tuple(result)


def getitem(array: Array, index: Any) -> Array:
    kernels = array._kernels
    parts, arrays, masks = prepare(kernels, index)
    if not arrays:
        # With an ellipsis NumPy gives an array also for a single element.
        whole = parts if any(part is Ellipsis for part in parts) else (*parts, Ellipsis)
        view = kernels.view(array, lambda values: values[whole])
        assert view is not None
        return view
    taken: Array = kernels.call(
        "boolean index" if masks else "take",
        lambda values, where: np.asarray(values[wrapped(values.shape, where)]),
        (array, parts),
        now=masks,
    )
    return taken


def setitem(array: Array, index: Any, value: Any) -> None:
    kernels = array._kernels
    parts, arrays, masks = prepare(kernels, index)
    if not arrays:
        target = getitem(array, parts)
        if not isinstance(value, kernels.ndarray):
            target.fill(value)
            return
        if same_place(target, value):
            return
        kernels.mutate("elementwise copy", assign, target, (value,))
        return
    if not isinstance(value, kernels.ndarray):
        value = kernels.ndarray.of(np.asarray(value, array.dtype))
    scatter(array, parts, masks, "scatter update", put, value)


def same_place(left: Array, right: Array) -> bool:
    return left.operand == right.operand


def assign(target: np.ndarray, value: np.ndarray) -> None:
    with np.errstate(all="ignore"):
        target[...] = value.astype(target.dtype, copy=True)


def assign_scalar(target: np.ndarray, value: Any) -> None:
    with np.errstate(all="ignore"):
        target[...] = np.asarray(value).astype(target.dtype)


def put(target: np.ndarray, where: tuple[Any, ...], value: np.ndarray) -> None:
    target[where] = value.astype(target.dtype)


def scatter(
    array: Array,
    parts: tuple[Any, ...],
    masks: bool,
    name: str,
    function: Callable[[np.ndarray, tuple[Any, ...], np.ndarray], None],
    value: Any,
) -> None:
    """``function(array, index, value)``, which changes the array at the index."""
    if masks:
        # CuPy counts the true values on the host first, whatever is written.
        array._kernels.synchronize(f"{name} at a boolean index")

    def run(target: np.ndarray, where: tuple[Any, ...], values: Any) -> None:
        function(target, wrapped(target.shape, where), values)

    if masks:
        array._kernels.launch_mutation(name, run, array, (parts, value))
    else:
        array._kernels.mutate(name, run, array, (parts, value))
