"""Shapes of a chain's values, and the places in memory that its kernel reads: found by NumPy, on arrays without values.

The ops of views themselves say which elements they look at: they are given arrays that have the shapes and strides of
the real ones, and whose elements are never touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from asyncflow.compiler.program.kernels.chains import Chain, Lengths, Member, Read
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
    return member.op.kernel(np, **member.attrs)


def shapes_of(chain: Chain, shapes: Shapes) -> Shapes | None:
    """Return the shapes of all values for these of the inputs; None if the shapes do not fit one another."""
    found = list(shapes)
    try:
        for member in chain.members:
            given = [found[operand] for operand in member.operands]
            is_view = member.is_view
            found.append(
                view_kernel(member)(without_values(given[0])).shape if is_view else np.broadcast_shapes(*given)
            )
    except (ValueError, IndexError):
        return None
    return tuple(found)


def loop_of(chain: Chain, shapes: Shapes) -> Lengths | None:
    """Return the common shape of the outputs; None if they have several, so that one kernel cannot do it."""
    first, *others = (shapes[output] for output in chain.outputs)
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
