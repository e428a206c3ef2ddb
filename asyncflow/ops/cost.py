"""Arithmetic operations of an op, where they are not one per output element.

Estimates for the cost model: ``flops(input_shapes, output_shapes, **attrs)``. An extent that is not known counts as 1.
What counts is the time, in operations of a matrix product: whoever expects too little holds up the event loop, where
the first firing of what seems short takes place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from asyncflow.graph.values.shapes import Shape

PASS = 10.0
"""Operations of a matrix product in the time in which NumPy passes over one element of an array."""

_MOVE = 3 * PASS
"""The same for an element that is found by its index."""

_COMPARE = 8 * PASS
"""The same for a step of sorting."""


def elements(shape: Shape) -> int:
    """Number of elements, counting unknown extents as 1."""
    return math.prod(1 if dim is None else dim for dim in shape or ())


def free(inputs: Sequence[Shape], outputs: Sequence[Shape], **attrs: object) -> float:
    """Cost of ops that give another view of their input's memory."""
    return 0.0


def per_input_element(inputs: Sequence[Shape], outputs: Sequence[Shape], **attrs: object) -> float:
    """Cost of reductions and searches: one pass over the first input."""
    return PASS * elements(inputs[0])


def several_passes(inputs: Sequence[Shape], outputs: Sequence[Shape], **attrs: object) -> float:
    """Cost of ops that look at the first input again and again, as whoever needs its maximum or mean first does."""
    return 3 * PASS * elements(inputs[0])


def moving(inputs: Sequence[Shape], outputs: Sequence[Shape], **attrs: object) -> float:
    """Cost of ops that find the elements of their first output by index."""
    return _MOVE * elements(outputs[0])


def moving_in(inputs: Sequence[Shape], outputs: Sequence[Shape], **attrs: object) -> float:
    """Cost of ops that put the elements of all their inputs somewhere."""
    return _MOVE * sum(map(elements, inputs))


def moving_all(inputs: Sequence[Shape], outputs: Sequence[Shape], **attrs: object) -> float:
    """Return the cost of ops that move the elements of their first input into their first output by index."""
    return _MOVE * (elements(outputs[0]) + elements(inputs[0]))


def sorting(inputs: Sequence[Shape], outputs: Sequence[Shape], **attrs: object) -> float:
    """Return the cost of ops that sort their first input."""
    size = elements(inputs[0])
    return _COMPARE * size * math.log2(size + 1)
