"""Sets have no derivatives."""

from __future__ import annotations

from asyncflow.graph.op import not_differentiable
from asyncflow.ops.sets import UNIQUE_ALL, UNIQUE_COUNTS, UNIQUE_INVERSE, UNIQUE_VALUES

not_differentiable(
    UNIQUE_ALL,
    UNIQUE_COUNTS,
    UNIQUE_INVERSE,
    UNIQUE_VALUES,
    because="how many elements are distinct, and which, jumps with their values",
)
