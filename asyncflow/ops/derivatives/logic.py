"""Comparisons, tests and bitwise functions give booleans and integers, through which nothing flows back."""

from __future__ import annotations

from asyncflow.graph.op import not_differentiable
from asyncflow.ops import logic as lo
from asyncflow.ops.utility import ALL, ANY

not_differentiable(
    *(lo.EQUAL, lo.GREATER, lo.GREATER_EQUAL, lo.LESS, lo.LESS_EQUAL, lo.NOT_EQUAL, ALL, ANY),
    *(lo.ISFINITE, lo.ISINF, lo.ISNAN, lo.SIGNBIT, lo.LOGICAL_AND, lo.LOGICAL_NOT, lo.LOGICAL_OR, lo.LOGICAL_XOR),
    because="its result is boolean",
)
not_differentiable(
    *(lo.BITWISE_AND, lo.BITWISE_INVERT, lo.BITWISE_OR, lo.BITWISE_XOR),
    *(lo.BITWISE_LEFT_SHIFT, lo.BITWISE_RIGHT_SHIFT),
    because="it is defined for integers and booleans alone",
)
