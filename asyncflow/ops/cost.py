"""How much arithmetic an op does, where that is not one operation per output element.

Estimates for the cost model: ``flops(input_shapes, output_shapes, **attrs)``. An extent that is not known counts as 1.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncflow.graph.shapes import Shape


def elements(shape: Shape) -> int:
    """Number of elements, counting unknown extents as 1."""
    return math.prod(1 if dim is None else dim for dim in shape or ())


def free(inputs: Sequence[Shape], outputs: Sequence[Shape], **attrs: object) -> float:
    """Cost of ops that give another view of their input's memory."""
    return 0.0


def per_input_element(inputs: Sequence[Shape], outputs: Sequence[Shape], **attrs: object) -> float:
    """Cost of reductions and searches: one operation per element of the first input."""
    return float(elements(inputs[0]))


def sorting(inputs: Sequence[Shape], outputs: Sequence[Shape], **attrs: object) -> float:
    """Cost of ops that sort their first input."""
    size = elements(inputs[0])
    return size * math.log2(size + 1)


__all__ = ["elements", "free", "per_input_element", "sorting"]
