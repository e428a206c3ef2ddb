"""Comparisons, tests and bitwise functions give booleans and integers, through which nothing flows back."""

from __future__ import annotations

from asyncflow.graph.op import not_differentiable
from asyncflow.ops import logic
from asyncflow.ops.utility import ALL, ANY

not_differentiable(
    logic.EQUAL,
    logic.GREATER,
    logic.GREATER_EQUAL,
    logic.ISFINITE,
    logic.ISINF,
    logic.ISNAN,
    logic.LESS,
    logic.LESS_EQUAL,
    logic.LOGICAL_AND,
    logic.LOGICAL_NOT,
    logic.LOGICAL_OR,
    logic.LOGICAL_XOR,
    logic.NOT_EQUAL,
    logic.SIGNBIT,
    ALL,
    ANY,
    because="its result is boolean",
)
not_differentiable(
    logic.BITWISE_AND,
    logic.BITWISE_INVERT,
    logic.BITWISE_LEFT_SHIFT,
    logic.BITWISE_OR,
    logic.BITWISE_RIGHT_SHIFT,
    logic.BITWISE_XOR,
    because="it is defined for integers and booleans alone",
)
