"""One reverse sweep over the nodes of a graph or body: what reaches each value, from the last node to the first.

New nodes join the current graph, which for the body of a loop or branch is a `GradientBody`: there a forward value is
imported like any other, and is found where it is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import reduce
from typing import TypeAlias

from asyncflow.autodiff.dependencies import Dependencies
from asyncflow.autodiff.stores.part_sums import are_parts, joined_parts
from asyncflow.autodiff.stores.store_gradients import merge_gradients
from asyncflow.errors import GraphError, user_location
from asyncflow.graph.building.build import graph_for
from asyncflow.graph.building.scopes import device
from asyncflow.graph.builtin import PARAMETER
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import Op, derivative_of, why_not_differentiable
from asyncflow.graph.values.dtypes import VARIANT
from asyncflow.ops.arithmetic.elementwise import add
from asyncflow.ops.derivatives.shapes import carries_gradient
from asyncflow.ops.indexing.scatter import sum_of_gradients
from asyncflow.state.variables.variable import VARIABLE_READ, Variable

SweepRule: TypeAlias = "Callable[..., Sequence[Tensor | None]]"
"""``rule(node, grads, sweep)``: a derivative that may give the sweep more than what reaches the node's inputs, such as
gradients of variables that are read inside of it.
"""

_rules: dict[Op, SweepRule] = {}


def sweep_rule(op: Op) -> Callable[[SweepRule], SweepRule]:
    """Makes the decorated function the derivative of an op, which is told of the sweep."""

    def install(rule: SweepRule) -> SweepRule:
        _rules[op] = rule
        return rule

    return install


class Sweep:
    """Gradients on their way to the values of one graph or body.

    Args:
        nodes: of the graph, in its order: at least the nodes behind the given tensors.
        wanted: values of it whose gradients are asked for.
        variables: variables whose gradients are asked for, wherever they are read.
        stopped: values that count as constants.
        views: values at which to stop where what reaches them is made of parts.
    """

    def __init__(
        self,
        nodes: Iterable[Node],
        wanted: Collection[Tensor],
        variables: Sequence[Variable],
        stopped: Collection[Tensor] = (),
        views: Collection[Tensor] = frozenset(),
    ) -> None:
        self.nodes = tuple(nodes)  # a copy: gradients may add nodes to the same graph
        self.wanted = frozenset(wanted)
        self.stopped = frozenset(stopped)
        self.views = views
        self.variables = {variable.serial: variable for variable in variables}
        self.bits = {serial: 1 << place for place, serial in enumerate(self.variables, start=1)}
        self.dependencies = Dependencies(self.bits)
        self.connected = self.dependencies.of(self.nodes, dict.fromkeys(wanted, 1), self.stopped)
        self._location = user_location()
        self._grads: dict[Tensor, list[Tensor]] = {}
        self._of_variables: dict[int, list[Tensor]] = {}

    def run(self) -> None:
        """Sweeps, from the gradients that were given."""
        for node in reversed(self.nodes):
            if not any(tensor in self._grads and tensor not in self.stopped for tensor in node.outputs):
                continue
            if node.op is VARIABLE_READ:
                self._leave(node)
            elif self.is_left(node.outputs[0]):
                continue
            elif node.inputs or node.op in _rules or node.op.conduct.waits_in_line:
                self._step(node)

    def inside(self, nodes: Iterable[Node], wanted: Collection[Tensor], stands_for: Mapping[Tensor, Tensor]) -> Sweep:
        """Make a sweep for the same variables over a copy of nodes, whose values stand for the originals in this
        sweep.
        """
        stopped = [stands_for[x] for x in self.stopped if x in stands_for]
        return Sweep(nodes, wanted, list(self.variables.values()), stopped)

    def give(self, tensor: Tensor, grad: Tensor) -> None:
        """Add a gradient to a value."""
        if tensor in self.connected and carries_gradient(tensor.spec):
            self._grads.setdefault(tensor, []).append(grad)

    def give_variable(self, serial: int, grad: Tensor) -> None:
        """Add a gradient to a variable."""
        self._of_variables.setdefault(serial, []).append(grad)

    def gradient(self, tensor: Tensor) -> Tensor | None:
        """The gradient of a value; None if none has reached it."""
        grads = self._grads.get(tensor)
        if not grads:
            return None
        if len(grads) > 1:
            # Sum on the value's device; a parameter has no device of its own.
            maker = grads[0].node if tensor.node.op is PARAMETER else tensor.node
            with device(maker.device):
                grads[:] = [sum_gradients(joined_parts(grads, tensor))]
        return grads[0]

    def contributions(self, x: Tensor | Variable) -> Sequence[Tensor]:
        """The gradients that have reached a value or a variable along each path, not yet added up."""
        return self._grads.get(x, ()) if isinstance(x, Tensor) else self._of_variables.get(x.serial, ())

    def is_left(self, tensor: Tensor) -> bool:
        """Return True if the sweep has stopped at a value, which is one of `views`."""
        return tensor in self.views and all(are_parts(grad, tensor.shape) for grad in self.contributions(tensor))

    def gradient_of_variable(self, variable: Variable) -> Tensor | None:
        """The gradient of a variable; None if none has reached it."""
        grads = self._of_variables.get(variable.serial)
        return sum_gradients(grads) if grads else None

    def reaches(self, tensor: Tensor) -> bool:
        """Return True if a gradient has reached the value."""
        return tensor in self._grads

    def reaches_variable(self, variable: Variable) -> bool:
        """Return True if a gradient has reached the variable."""
        return variable.serial in self._of_variables

    def _leave(self, read: Node) -> None:
        serial = read.attrs["variable"].serial
        if serial in self.variables:
            self._of_variables.setdefault(serial, []).extend(self.contributions(read.outputs[0]))

    def _step(self, node: Node) -> None:
        graph = graph_for()
        n_nodes, first = len(graph.nodes), graph.root.version
        # The name scope lets errors in a run name the differentiated node; the gradient requests the same device.
        with graph.scoped(name_scope=f"{graph.scope.name_scope}gradients/{node.name}/", device=node.device):
            grads = [None if tensor in self.stopped else self.gradient(tensor) for tensor in node.outputs]
            reached = self._derivative(node, grads)
        for made in graph.nodes[n_nodes:]:
            # Errors also show the user's line of that node, except for nodes built by a user's own gradient.
            if made.id >= first and made.location == self._location:
                made.location = node.location
        for tensor, grad in zip(node.inputs, reached, strict=True):
            if grad is not None:
                self.give(tensor, grad)

    def _derivative(self, node: Node, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        if node.op in _rules:
            return _rules[node.op](node, grads, self)
        rule = derivative_of(node.op)
        if rule is not None and (node.op.conduct.waits_in_line or any(carries_gradient(x.spec) for x in node.inputs)):
            return rule(node, *grads)
        if rule is None and why_not_differentiable(node.op) is None:
            raise GraphError(
                f"{node.op.name} has no derivative, and a gradient is asked for that flows through {node.name}; cut it "
                f"with af.stop_gradient, or give the op one (@af.op(gradient=...), af.custom_gradient)"
                f"\n  built at {node.location}"
            )
        return [None] * len(node.inputs)


def value_of(x: Tensor | Variable) -> Tensor:
    """Return the tensor, or a read of the variable where the user has placed it, not beside the differentiated
    nodes.
    """
    if isinstance(x, Tensor):
        return x
    with device(None):
        return x.read()


def sum_gradients(grads: Sequence[Tensor]) -> Tensor:
    """The sum of gradients of one value, at least one."""
    return reduce(merge_gradients, grads) if grads[0].dtype == VARIANT else sum_of_gradients(grads)


def add_gradients(total: Tensor, grad: Tensor) -> Tensor:
    """The sum of two gradients of one value, on the device of the second."""
    with device(grad.node.device):
        return merge_gradients(total, grad) if total.dtype == VARIANT else add(total, grad)
