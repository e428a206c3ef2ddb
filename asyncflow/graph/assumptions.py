"""Assumptions: conclusions that building a graph drew from values which a run may be fed.

A shape argument that is a constant gives a static shape, and later nodes build on that shape. A run that feeds the
constant must therefore agree with the conclusion, or it would compute with a shape that no longer holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from asyncflow.errors import SourceLocation, user_location
from asyncflow.graph.builtin import CONSTANT

if TYPE_CHECKING:
    from asyncflow.graph.ir import Node, Tensor


@dataclass(frozen=True, slots=True)
class Assumption:
    """A conclusion drawn while a graph was built, and its place.

    Attributes:
        rule: name of the rule that draws it from the values of `tensors`.
        tensors: of the graph or of bodies in it.
        value: the conclusion: an array for the value of one tensor, or a number.
        location: the user's line that needed it.
        version: version of the graph at that time; the node that needed it has at least this id.
    """

    rule: str
    tensors: tuple[Tensor, ...]
    value: Any
    location: SourceLocation
    version: int

    def reader(self) -> Node | None:
        """Return the first node that was built on the conclusion; None if there is none, or a text does not tell."""
        nodes = self.tensors[0].node.graph.root.walk()
        built = [node for node in nodes if node.id >= self.version and node.location == self.location]
        return min((node for node in built if node.op is not CONSTANT), key=lambda node: node.id, default=None)


def assume(rule: str, tensors: tuple[Tensor, ...], value: object, location: SourceLocation | None = None) -> None:
    """Record that the graph of `tensors` is built on this conclusion; `location` is the user's line by default."""
    root = tensors[0].node.graph.root
    key = (rule, tensors)
    if key not in root.assumptions:
        root.assumptions[key] = Assumption(rule, tensors, value, location or user_location(), root.version)
