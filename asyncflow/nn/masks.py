"""Masks of the steps of padded sequences that count."""

from __future__ import annotations

from asyncflow.errors import DTypeError
from asyncflow.graph.building.build import TensorLike, as_tensor
from asyncflow.graph.ir import Tensor
from asyncflow.graph.values.dtypes import dtype_name, int64, summed_in
from asyncflow.ops.arithmetic.elementwise import maximum
from asyncflow.ops.arithmetic.logic import less
from asyncflow.ops.arrays.creation import arange
from asyncflow.ops.arrays.datatypes import astype, broadcast_to, in_dtype
from asyncflow.ops.arrays.extents import Extent
from asyncflow.ops.arrays.manipulation import expand_dims
from asyncflow.ops.derivatives.shapes import shape_of
from asyncflow.ops.reductions.counts import count_nonzero
from asyncflow.ops.reductions.statistical import sum
from asyncflow.ops.searching.searching import where


def sequence_mask(lengths: TensorLike, steps: Extent) -> Tensor:
    """``t < lengths[b]`` at ``[t, b]``: which steps of a time-major batch lie inside their sequence.

    Args:
        lengths: integers, ``(batch,)``.
        steps: extent of the time axis; an int or an integer scalar tensor.

    Returns:
        Booleans, ``(steps, batch)``.

    Raises:
        DTypeError: `lengths` are no integers.

    >>> import asyncflow as af
    >>> with af.Graph() as graph:
    ...     mask = sequence_mask([2, 0, 3], 3)
    >>> async def main():
    ...     async with af.Session(graph) as session:
    ...         print(await session.run(mask))
    >>> af.run(main())
    [[ True False  True]
     [ True False  True]
     [False False  True]]
    """
    return less(expand_dims(arange(steps, dtype=int64), axis=1), expand_dims(as_lengths(lengths), axis=0))


def as_lengths(lengths: TensorLike) -> Tensor:
    """Return lengths as int64: a small dtype may not be able to count the steps.

    Raises:
        DTypeError: the lengths are no integers.
    """
    tensor = as_tensor(lengths)
    if tensor.dtype.kind not in "iu":
        raise DTypeError(f"lengths are integers, not {dtype_name(tensor.dtype)}")
    return tensor if tensor.dtype == int64 else astype(tensor, int64)


def masked_mean(values: TensorLike, mask: TensorLike) -> Tensor:
    """Return the mean of `values` where `mask` is true, or 0 if that is nowhere. Masked values may be anything, even
    NaN.

    Masked values have a gradient of 0. The computation before may have made them NaN, such as the square root of a
    negative padding. The gradients before that are then NaN all the same, as 0 times NaN is. Mask its input, too:
    ``masked_mean(af.sqrt(af.where(mask, x, 1.0)), mask)``.

    Args:
        values: floats.
        mask: booleans, that broadcast to the shape of `values`.

    Returns:
        A scalar of the dtype of `values`.
    """
    x = as_tensor(values)
    chosen = broadcast_to(mask, shape_of(x))
    total = sum(where(chosen, x, 0), dtype=summed_in(x.dtype))
    mean = total / astype(maximum(count_nonzero(chosen), 1), total.dtype)
    return in_dtype(mean, x.dtype)
