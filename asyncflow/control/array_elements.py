"""What the elements of a TensorArray have in common, read off the graph that wrote them.

A handle that comes out of a loop or branch is a new tensor, of which Python knows nothing yet. Its elements were
written before the loop, or in its body: what the shapes of those writes have in common holds for every element.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from asyncflow.control.array_store import Common, widen
from asyncflow.graph.builtin import IDENTITY, PARAMETER
from asyncflow.graph.graph import Subgraph
from asyncflow.graph.shapes import merge

if TYPE_CHECKING:
    from asyncflow.graph.ir import Node, Tensor
    from asyncflow.graph.shapes import Shape


def elements_of(handle: Tensor, declared: Shape) -> Common:
    """What is known of the elements of the array that `handle` carries, each of which has the shape `declared`."""
    written = _Written(declared)
    return written.common if written.follow(handle, None) else (declared,)


def element_of(node: Node) -> Shape:
    """The shape of the elements that a node writes, which is one of the ops that write."""
    return _ELEMENTS[node.op.name](node)


class _Written:
    """Joins the shapes of the writes on the way to a handle."""

    def __init__(self, declared: Shape) -> None:
        self._declared = declared
        self.common: Common = None

    def follow(self, handle: Tensor, start: Tensor | None) -> bool:
        """Adds the writes from `start`, or from where the array was made, to `handle`; whether all were found."""
        while handle is not start:
            node = handle.node
            element = _ELEMENTS.get(node.op.name)
            if element is not None:
                self.common = widen(self.common, merge(self._declared, element(node)))
                handle = node.inputs[0]
            elif node.op is IDENTITY:
                handle = node.inputs[0]
            elif node.op is PARAMETER:
                outer = _captured(handle)
                if outer is None:
                    return False  # a variable of a loop around this one: anything may be in it
                handle = outer
            elif node.op.name == "while":
                body = node.attrs["body"]
                if not self.follow(body.results[handle.index], body.inputs[handle.index]):
                    return False
                handle = node.inputs[handle.index]
            elif node.op.name == "cond":
                return all(self.follow(branch.results[handle.index], start) for branch in node.subgraphs)
            else:
                return node.op.name == "tensor_array"
        return True


def _captured(inner: Tensor) -> Tensor | None:
    """The tensor around a body that `inner` stands for in it; None for a loop variable."""
    graph = inner.graph
    assert isinstance(graph, Subgraph)
    return next((outer for outer, each in graph.captures.items() if each is inner), None)


def _value(node: Node) -> Shape:
    return node.inputs[2].shape


def _row(place: int) -> Callable[[Node], Shape]:
    def row(node: Node) -> Shape:
        shape = node.inputs[place].shape
        return shape[1:] if shape else None

    return row


def _piece(node: Node) -> Shape:
    shape = node.inputs[1].shape
    return (None, *shape[1:]) if shape else None


_ELEMENTS: Final[Mapping[str, Callable[[Node], Shape]]] = {
    "tensor_array_write": _value,
    "tensor_array_unstack": _row(1),
    "tensor_array_scatter": _row(2),
    "tensor_array_split": _piece,
}
"""The shape of the elements that a node writes, by the name of its op."""
