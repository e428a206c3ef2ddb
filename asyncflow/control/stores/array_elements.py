"""Facts on a TensorArray behind a loop or branch, read off the graph that made and wrote the array.

A handle that comes out of a loop or branch is a new tensor, of which Python knows nothing yet. Its elements were
written before the loop, or in its body: what the shapes of those writes have in common holds for every element. The
array was made before the loop, too, unless the body replaces it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from asyncflow.control.stores.array_store import Common, widen
from asyncflow.graph.builtin import IDENTITY, PARAMETER
from asyncflow.graph.graph import Subgraph
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import Op
from asyncflow.graph.structured import CondNode, PooledNode, WhileNode
from asyncflow.graph.values.dtypes import VARIANT
from asyncflow.graph.values.shapes import Shape, merge

ElementRule: TypeAlias = "Callable[[Node], Shape]"
"""The shape of the elements that a node writes into an array."""


def elements_of(handle: Tensor, declared: Shape, writers: Mapping[Op, ElementRule]) -> tuple[Common, Node | None]:
    """Return the shape of an array's elements, and the node that made the array, as far as known.

    Args:
        handle: carries the array.
        declared: the shape that each element has.
        writers: the ops that write elements into the array that is their first input, with the rules for these
            elements.
    """
    written = _Written(declared, writers)
    if not written.follow(handle, None):
        return (declared,), None
    return written.common, next(iter(written.makers)) if len(written.makers) == 1 else None


class _Written:
    """Joins the shapes of the writes on the way to a handle."""

    def __init__(self, declared: Shape, writers: Mapping[Op, ElementRule]) -> None:
        self._declared = declared
        self._writers = writers
        self.common: Common = None
        self.makers: set[Node] = set()

    def follow(self, handle: Tensor, start: Tensor | None) -> bool:
        """Adds the writes from `start`, or from where the array was made, to `handle`; whether all were found."""
        while handle is not start:
            node = handle.node
            element = self._writers.get(node.op)
            if element is not None:
                self.common = widen(self.common, merge(self._declared, element(node)))
                handle = node.inputs[0]
            elif node.op is IDENTITY:
                handle = node.inputs[0]
            elif node.op is PARAMETER:
                outer = _captured(handle)
                if outer is None:
                    return False  # an outer loop's variable: its elements are unknown
                handle = outer
            elif isinstance(node, WhileNode | PooledNode):
                variable, result = node.carried[handle.index]
                if not self.follow(result, variable):
                    return False
                handle = node.inputs[handle.index]
            elif isinstance(node, CondNode):
                return all(self.follow(branch.results[handle.index], start) for branch in node.subgraphs)
            else:
                self.makers.add(node)
                return all(tensor.dtype != VARIANT for tensor in node.inputs)
        return True


def _captured(inner: Tensor) -> Tensor | None:
    """The tensor around a body that `inner` stands for in it; None for a loop variable."""
    graph = inner.graph
    assert isinstance(graph, Subgraph)
    return next((outer for outer, each in graph.captures.items() if each is inner), None)


# -- the shape of the elements that a node writes ----------------------------------------------------------------------


def value_written(node: Node) -> Shape:
    """The shape written by a node that writes its third input."""
    return node.inputs[2].shape


def rows_written(place: int) -> ElementRule:
    """The shape written by a node that writes the rows of its input number `place`."""

    def row(node: Node) -> Shape:
        shape = node.inputs[place].shape
        return shape[1:] if shape else None

    return row


def pieces_written(node: Node) -> Shape:
    """The shape written by a node that cuts its second input into pieces."""
    shape = node.inputs[1].shape
    return (None, *shape[1:]) if shape else None
