"""The bodies of gradients of branches and loops, in which forward values are used as if they were there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncflow.graph.graph import Graph, Subgraph

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncflow.graph.ir import Tensor


class GradientBody(Subgraph):
    """A subgraph in which the tensors of a forward body stand for the values they had there.

    Attributes:
        forward: the forward body.
        restore: gives such a value, as a tensor of this body; called once for each tensor.
    """

    def __init__(
        self, parent: Graph, label: str, forward: Subgraph, restore: Callable[[GradientBody, Tensor], Tensor]
    ) -> None:
        super().__init__(parent, label)
        self.forward = forward
        self.restore = restore
        self._restored: dict[Tensor, Tensor] = {}

    def can_use(self, graph: Graph) -> bool:
        """See `Graph.can_use`: also those of the forward body."""
        return graph is self.forward or super().can_use(graph)

    def import_tensor(self, tensor: Tensor) -> Tensor:
        """See `Graph.import_tensor`."""
        if tensor.node.graph is not self.forward:
            return super().import_tensor(tensor)
        if tensor not in self._restored:
            self._restored[tensor] = self.restore(self, tensor)
        return self._restored[tensor]

    def has_restored(self, tensor: Tensor) -> bool:
        """Whether a value of the forward body is here already."""
        return tensor in self._restored
