"""Counters of loops: the variables that go up or down by one in each iteration."""

from __future__ import annotations

from asyncflow.graph.builtin import is_constant
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.structured import WhileNode
from asyncflow.ops.arithmetic.elementwise import ADD, SUBTRACT


def counters(loop: WhileNode) -> list[tuple[int, int]]:
    """Places of the loop variables that go up or down by one, and which of the two."""
    found: list[tuple[int, int]] = []
    for place, (variable, result) in enumerate(loop.carried):
        if result.node.op in (ADD, SUBTRACT) and variable.dtype.kind in "iu" and variable.shape == ():
            step = _step(result.node, variable)
            if step in (1, -1):
                found.append((place, step))
    return found


def _step(node: Node, variable: Tensor) -> int:
    """By how much an addition or subtraction changes `variable`; 0 if that is not known."""
    left, right = node.inputs
    if node.op is ADD and right is variable:
        left, right = right, left
    if left is not variable or not is_constant(right) or right.shape != ():
        return 0
    return int(right.node.attrs["value"]) * (1 if node.op is ADD else -1)
