"""Shapes of a chain's values, and the places in memory that its kernel reads: found by NumPy, on arrays without values.

The ops of views themselves say which elements they look at: they are given arrays that have the shapes and strides of
the real ones, and whose elements are never touched.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from asyncflow.compiler.program.kernels.chains import Chain, Lengths, Member, Read
from asyncflow.ops.axes import reduced
from asyncflow.values import Array, Kernel

Shapes: TypeAlias = tuple[Lengths, ...]


def without_values(shape: Lengths, strides: Lengths | None = None, itemsize: int = 1) -> Array:
    """An array whose elements must not be touched: there is no memory for them. In C order without `strides`."""
    if strides is None:
        strides = steps_of(shape, itemsize)
    return np.lib.stride_tricks.as_strided(np.empty(1, f"V{itemsize}"), shape, strides)


def steps_of(shape: Lengths, itemsize: int) -> Lengths:
    """Return the strides of an array in C order."""
    steps, step = [], itemsize
    for extent in reversed(shape):
        steps.append(step)
        step *= extent
    return tuple(reversed(steps))


def view_kernel(member: Member) -> Kernel:
    """The function by which NumPy looks at an array as this member does."""
    assert member.op.kernel is not None
    kernel = member.op.kernel(np, **member.attrs)

    def look(array: Array) -> Array:
        found = kernel(array)
        # If integers choose one element, NumPy copies it: with an axis behind, the result is a view.
        view: Array = found if isinstance(found, np.ndarray) else kernel(array[..., np.newaxis]).reshape(())
        return view

    return look


def shapes_of(chain: Chain, shapes: Shapes) -> Shapes | None:
    """Return the shapes of all values for these of the inputs; None if the shapes do not fit one another."""
    found = list(shapes)
    try:
        for member in chain.members:
            given = tuple([found[operand] for operand in member.operands])
            if member.is_view:
                found.append(view_kernel(member)(without_values(given[0])).shape)
            elif member.scales:
                found.append(given[0])
            elif member.reduces:
                axis, keepdims = member.attrs["axis"], member.attrs["keepdims"]
                found.append(tuple(extent or 0 for extent in reduced(given[0], axis, keepdims) or ()))
            elif member.joins:
                found.append(_beside_one_another(given, member.attrs["axis"]))
            else:
                found.append(np.broadcast_shapes(*given))
    except (ValueError, IndexError):
        return None
    return tuple(found)


def _beside_one_another(shapes: Shapes, axis: int) -> Lengths:
    """Return the shape of arrays of one rank joined along an axis."""
    extents = list(shapes[0])
    extents[axis] = sum(shape[axis] for shape in shapes)
    return tuple(extents)


def loop_of(chain: Chain, shapes: Shapes) -> Lengths | None:
    """Return the common shape of the values to store; None if there are several, which one kernel cannot compute."""
    first, *others = (shapes[store.value] for store in (*chain.stores, *chain.reduced))
    return first if all(other == first for other in others) else None


def looked_at(chain: Chain, read: Read, array: Array, shapes: Shapes) -> Array:
    """The view of an input that the kernel reads.

    Args:
        chain: of the kernel.
        read: which input, and how.
        array: the input.
        shapes: of all values.
    """
    for step in read.steps:
        member = chain.member(step)
        array = view_kernel(member)(array) if member.is_view else np.broadcast_to(array, shapes[step])
    return array


def stored_at(chain: Chain, shapes: Shapes) -> list[tuple[Lengths, int]]:
    """For each store, the strides of its place in the output, and the distance of its first element, in elements."""
    found = []
    for store in chain.stores:
        strides = steps_of(shapes[chain.outputs[store.output]], 1)
        member = chain.joined(store.output)
        if member is None:
            found.append((strides, 0))
            continue
        axis = member.attrs["axis"]
        before = sum(shapes[operand][axis] for operand in member.operands[: store.piece])
        found.append((strides, before * strides[axis]))
    return found


def rows_of(chain: Chain, loop: Lengths) -> Lengths:
    """Return the number of rows that a chain reduces, and their length."""
    kept = len(loop) - chain.n_reduced
    return math.prod(loop[:kept]), math.prod(loop[kept:])


def collapsed(shape: Lengths, strides: Sequence[Lengths]) -> tuple[Lengths, list[Lengths]]:
    """Return the fewest axes that a loop over arrays of one shape needs, and each array's strides along them."""
    axes = [axis for axis, extent in enumerate(shape) if extent != 1]
    extents: list[int] = []
    steps: list[list[int]] = [[] for _ in strides]
    for axis in axes:
        extent = shape[axis]
        if extents and all(own[-1] == each[axis] * extent for own, each in zip(steps, strides, strict=True)):
            extents[-1] *= extent
            for own, each in zip(steps, strides, strict=True):
                own[-1] = each[axis]
            continue
        extents.append(extent)
        for own, each in zip(steps, strides, strict=True):
            own.append(each[axis])
    return tuple(extents), [tuple(own) for own in steps]
