"""Counters of loops: variables that go up or down by one in each iteration, and the number of iterations."""

from __future__ import annotations

from asyncflow.graph.builtin import is_constant
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.structured import WhileNode
from asyncflow.ops.arithmetic.elementwise import ADD, SUBTRACT
from asyncflow.ops.arithmetic.logic import LESS, LESS_EQUAL


def counters(loop: WhileNode) -> list[tuple[int, int]]:
    """Places of the loop variables that go up or down by one, and which of the two."""
    found: list[tuple[int, int]] = []
    for place, (variable, result) in enumerate(loop.carried):
        if result.node.op in (ADD, SUBTRACT) and variable.dtype.kind in "iu" and variable.shape == ():
            step = _step(result.node, variable)
            if step in (1, -1):
                found.append((place, step))
    return found


def trip_count(loop: WhileNode) -> int | None:
    """The number of iterations of a loop that only counts up to a constant; None for all others."""
    node = loop.decision.node
    if node.op not in (LESS, LESS_EQUAL):
        return None
    counter, bound = node.inputs
    for place, step in counters(loop):
        start = loop.inputs[place]
        bound = loop.captured(loop.predicate).get(bound, bound)
        if step == 1 and counter is loop.predicate.inputs[place] and is_constant(start) and is_constant(bound):
            distance = int(bound.node.attrs["value"]) - int(start.node.attrs["value"])
            return max(0, distance + (node.op is LESS_EQUAL))
    return None


def _step(node: Node, variable: Tensor) -> int:
    """By how much an addition or subtraction changes `variable`; 0 if that is not known."""
    left, right = node.inputs
    if node.op is ADD and right is variable:
        left, right = right, left
    if left is not variable or not is_constant(right) or right.shape != ():
        return 0
    return int(right.node.attrs["value"]) * (1 if node.op is ADD else -1)
