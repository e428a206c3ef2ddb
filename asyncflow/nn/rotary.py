"""`rotary_embedding`: positions as rotations of pairs of queries' and keys' elements (Su et al. 2021)."""

from __future__ import annotations

import numpy as np

from asyncflow.errors import DTypeError, ShapeError
from asyncflow.graph.building.build import TensorLike, as_tensor, graph_for
from asyncflow.graph.ir import Tensor
from asyncflow.graph.values.dtypes import dtype_name, float32, float64
from asyncflow.graph.values.shapes import broadcast, format_shape, is_compatible
from asyncflow.ops.arithmetic.elementwise import add, cos, multiply, sin, subtract
from asyncflow.ops.arrays.creation import arange
from asyncflow.ops.arrays.datatypes import astype
from asyncflow.ops.arrays.manipulation import concat, expand_dims, reshape, stack
from asyncflow.ops.arrays.shape import extent_of, shape
from asyncflow.ops.axes import check_flag, static_int
from asyncflow.ops.promotion import kind_of


def rotary_embedding(
    input: TensorLike,
    positions: TensorLike | None = None,
    *,
    base: float = 10_000.0,
    rotary_dim: int | None = None,
    interleaved: bool = False,
) -> Tensor:
    """Rotate pairs of elements of queries or keys by angles that grow with their positions.

    The product of a rotated query and a rotated key then depends on the distance between their positions alone. Pair
    number i at position p turns by ``p / base ** (2 * i / rotary_dim)``.

    Args:
        input: floats, ``(..., length, width)``.
        positions: integers or floats that broadcast to ``(..., length)``, such as the number of keys in a cache; None
            for 0, 1, 2, ….
        base: of the wavelengths; a number.
        rotary_dim: an even number of elements, from the first on, that are rotated; None for the whole width.
        interleaved: a pair is two neighbours; else an element of the first half and the same of the second half.

    Returns:
        A tensor like `input`. Angles are computed in float64, and products of 16 bits in float32.

    Raises:
        DTypeError, ShapeError: inputs do not fit, or the width is not known.
    """
    check_flag(interleaved, "interleaved")
    with graph_for(input, positions):
        x = as_tensor(input)
        if kind_of(x.dtype) != "f":
            raise DTypeError(f"rotary_embedding: takes floats, not {dtype_name(x.dtype)}; convert with af.astype first")
        if x.shape is None or len(x.shape) < 2 or x.shape[-1] is None:
            raise ShapeError(f"rotary_embedding: input is (..., length, width), of a known width; got {x!r}")
        width = x.shape[-1]
        count = width if rotary_dim is None else static_int(rotary_dim, "rotary_dim")
        if not 0 <= count <= width or count % 2:
            raise ShapeError(f"rotary_embedding: rotates an even number of elements, up to {width}; got {count}")
        places = arange(extent_of(x, -2)) if positions is None else as_tensor(positions)
        if kind_of(places.dtype) not in "iuf":
            raise DTypeError(f"rotary_embedding: positions are integers or floats; got {places!r}")
        rows = x.shape[:-1]
        if places.shape is None or not is_compatible(broadcast([places.shape, rows]), rows):
            raise ShapeError(f"rotary_embedding: positions broadcast to {format_shape(rows)}; got {places!r}")
        rates = float(base) ** (-np.arange(0, count, 2) / max(1, count))
        angles = multiply(expand_dims(astype(places, float64), axis=-1), rates)
        wide = x.dtype if x.dtype.itemsize >= float32.itemsize else float32
        turned = _turned(
            astype(x[..., :count], wide), astype(cos(angles), wide), astype(sin(angles), wide), interleaved
        )
        found = astype(turned, x.dtype)
        return found if count == width else concat([found, x[..., count:]], axis=-1)


def _turned(x: Tensor, cosine: Tensor, sine: Tensor, interleaved: bool) -> Tensor:
    half = (x.shape or (0,))[-1] or 0
    first, second = (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., : half // 2], x[..., half // 2 :])
    pair = [
        subtract(multiply(first, cosine), multiply(second, sine)),
        add(multiply(second, cosine), multiply(first, sine)),
    ]
    return reshape(stack(pair, axis=-1), shape(x)) if interleaved else concat(pair, axis=-1)
