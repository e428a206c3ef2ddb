"""The bodies of gradients of branches and loops, in which forward values are used as if they were there."""

from __future__ import annotations

from collections.abc import Callable

from asyncflow.autodiff.stores.store_gradients import no_gradient
from asyncflow.autodiff.sweep import value_of
from asyncflow.graph.building.copying import Copier
from asyncflow.graph.builtin import is_constant
from asyncflow.graph.graph import Graph, Subgraph
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.values.dtypes import VARIANT
from asyncflow.ops.derivatives.shapes import zeros_of
from asyncflow.state.variables.variable import Variable

_FEW = 32
"""Steps that are taken again at most: in a longer chain, some values are kept."""


class GradientBody(Subgraph):
    """A subgraph in which the tensors of a forward body stand for the values they had there.

    Attributes:
        forward: the forward body.
        restore: gives such a value, as a tensor of this body, or None to have its node copied here. Called once for
            each tensor.
    """

    def __init__(
        self, parent: Graph, label: str, forward: Subgraph, restore: Callable[[GradientBody, Tensor], Tensor | None]
    ) -> None:
        super().__init__(parent, label)
        self.forward = forward
        self.restore = restore
        self._restored: dict[Tensor, Tensor] = {}

    def can_use(self, graph: Graph) -> bool:
        """Return True also for tensors of the forward body; see `Graph.can_use`."""
        return graph is self.forward or super().can_use(graph)

    def import_tensor(self, tensor: Tensor) -> Tensor:
        """See `Graph.import_tensor`."""
        if tensor.node.graph is not self.forward:
            return super().import_tensor(tensor)
        found = self._restored.get(tensor)
        # A new copier each time: if the body kept it, only the garbage collector would free the body.
        return _RestoredValues(self, self._restored).value(tensor) if found is None else found

    def restored(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """Pairs of a value of the forward body and its counterpart here."""
        return tuple(self._restored.items())

    def is_cheap(self, tensor: Tensor, is_there: Callable[[Tensor], bool]) -> bool:
        """Return True if a value is cheaper to compute again, in few steps from present values, than to keep."""
        steps: set[Node] = set()
        open_ = [tensor]
        while open_:
            each = open_.pop()
            node = each.node
            is_known = each is not tensor and (is_constant(each) or each in self._restored or is_there(each))
            if is_known or node in steps:
                continue
            if not node.op.traits.is_cheap or node.control_inputs or len(steps) == _FEW:
                return False
            steps.add(node)
            open_ += node.inputs
        return True


class _RestoredValues(Copier):
    """Values of a forward body in a gradient body: restored, or computed again from such values."""

    target: GradientBody

    def known(self, x: Tensor) -> Tensor | None:
        """See `Copier.known`."""
        return self.target.restore(self.target, x)


def zeros_if_none(grad: Tensor | None, x: Tensor | Variable) -> Tensor:
    """The gradient of `x`: zeros if nothing has reached it."""
    if grad is not None:
        return grad
    if x.spec.dtype == VARIANT:
        return no_gradient()
    return zeros_of(value_of(x))
