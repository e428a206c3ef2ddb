"""Assumptions: conclusions that building a graph drew from values which a run may be fed.

A shape argument that is a constant gives a static shape, and later nodes build on that shape. A run that feeds the
constant must therefore agree with the conclusion, or it would compute with a shape that no longer holds.
"""

from __future__ import annotations

from asyncflow.errors import SourceLocation, user_location
from asyncflow.graph.builtin import CONSTANT
from asyncflow.graph.ir import Assumption, Node, Tensor


def first_reader(assumption: Assumption) -> Node | None:
    """Return the first node that was built on a conclusion; None if there is none, or a text does not tell."""
    nodes = assumption.tensors[0].node.graph.root.walk()
    built = [node for node in nodes if node.id >= assumption.version and node.location == assumption.location]
    return min((node for node in built if node.op is not CONSTANT), key=lambda node: node.id, default=None)


def assume(rule: str, tensors: tuple[Tensor, ...], value: object, location: SourceLocation | None = None) -> None:
    """Record that the graph of `tensors` is built on this conclusion; `location` is the user's line by default."""
    root = tensors[0].node.graph.root
    key = (rule, tensors)
    if key not in root.assumptions:
        root.assumptions[key] = Assumption(rule, tensors, value, location or user_location(), root.version)
