"""The gradient of `while`: a `while` that runs as many iterations as the forward one did, from the last to the first.

Its loop variables are a counter, what reaches each loop variable of the forward loop, and what has reached each capture
and variable so far. Values of the forward body that it needs are saved, one store per value (`saved_values`); what is
cheap is computed again from what is there: constants, captures, counters, casts and reshapes (DESIGN §8).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from asyncflow.autodiff.gradient_body import GradientBody
from asyncflow.autodiff.saved_values import new_store, no_gradient, save, saved_value, store_node
from asyncflow.autodiff.sweep import StructuredRule, Sweep, add_gradients
from asyncflow.control.while_loop import add_loop
from asyncflow.graph.build import constant
from asyncflow.graph.builtin import CONSTANT
from asyncflow.graph.captures import add_variable
from asyncflow.graph.dtypes import VARIANT, int64
from asyncflow.graph.graph import STRUCTURED, Graph, Subgraph, current_graph, reopened
from asyncflow.graph.ir import Tensor
from asyncflow.graph.scopes import colocate_with, device
from asyncflow.graph.spec import Spec
from asyncflow.ops.datatypes import astype
from asyncflow.ops.derivatives.shapes import carries_gradient, ensure_shape, zeros_of
from asyncflow.ops.elementwise import add, subtract
from asyncflow.ops.logic import greater

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from asyncflow.graph.ir import Node
    from asyncflow.state.variable import Variable

_CHEAP = frozenset(
    {
        "astype",
        "broadcast_to",
        "ensure_shape",
        "expand_dims",
        "getitem",
        "identity",
        "matrix_transpose",
        "permute_dims",
        "rank",
        "reshape",
        "shape",
        "size",
        "squeeze",
    }
)
"""Ops that cost next to nothing, most of them as they only look at their input in another way."""

_COUNT = Spec(int64, ())


def differentiate_while(
    node: Node, grads: Sequence[Tensor | None], sweep: Sweep, structured: StructuredRule
) -> Sequence[Tensor | None]:
    """What reaches each input of a `while`, in the current graph."""
    return _WhileGradient(node, grads, sweep, structured).run()


class _WhileGradient:
    def __init__(self, node: Node, grads: Sequence[Tensor | None], sweep: Sweep, structured: StructuredRule) -> None:
        graph = current_graph()
        assert graph is not None
        self.node = node
        self.graph: Graph = graph
        self.sweep = sweep
        self.structured = structured
        self.body: Subgraph = node.attrs["body"]
        self.n_vars: int = node.attrs["n_vars"]
        self.grads = grads
        self.kept = _kept(node)

    def run(self) -> Sequence[Tensor | None]:
        node, n_vars = self.node, self.n_vars
        wanted = {
            place
            for place, tensor in enumerate(node.inputs)
            if tensor in self.sweep.connected and carries_gradient(tensor.spec)
        }
        variables = list(self.sweep.variables.values())
        active = self.active_variables(wanted)
        if not active:
            return [None] * len(node.inputs)
        captures = [place for place in sorted(wanted) if place >= n_vars]
        # All of the forward loop as it is now: what is saved for this gradient joins it below.
        in_body = [self.body.inputs[place] for place in active]
        results = [self.body.results[place] for place in active]
        captured = [self.body.inputs[place] for place in captures]
        outer = [node.inputs[place] for place in captures]
        finals = [node.outputs[place] for place in active]
        initial = [self.grads[place] for place in active]
        count = self.graph.import_tensor(self.kept.count())
        label = self.graph.unique_name("while")
        condition = Subgraph(self.graph, f"{label}/cond")
        body = GradientBody(self.graph, f"{label}/body", self.body, self.kept.restore)
        specs = [_COUNT, *(x.spec for x in in_body), *(x.spec for x in outer), *(v.spec for v in variables)]
        inner_cond = [condition.add_input(spec, "var") for spec in specs]
        inner = [body.add_input(spec, "var") for spec in specs]
        with condition:
            condition.results.append(greater(inner_cond[0], 0))
        with body:
            index = subtract(inner[0], 1)
            self.kept.indexes[body] = index
            reverse = Sweep(self.body, [*in_body, *captured], variables, (), self.structured)
            for result, grad in zip(results, inner[1:], strict=False):
                reverse.give(result, grad)
            reverse.run({})
            body.results.append(index)
            for x in in_body:
                body.results.append(ensure_shape(_or_zeros(reverse.gradient(x), x), x.shape))
            sums = inner[1 + len(in_body) :]
            for total, x in zip(sums, captured, strict=False):
                body.results.append(ensure_shape(_added(total, reverse.gradient(x)), x.shape))
            for total, variable in zip(sums[len(captured) :], variables, strict=True):
                body.results.append(
                    ensure_shape(_added(total, reverse.gradient_of_variable(variable)), variable.spec.shape)
                )
        starts = [count]
        starts += [
            self.graph.import_tensor(given) if given is not None else _or_zeros(None, final)
            for given, final in zip(initial, finals, strict=True)
        ]
        starts += [_or_zeros(None, x) for x in outer]
        starts += [_or_zeros(None, variable) for variable in variables]
        loop = add_loop(
            condition, body, starts, specs, label, node.attrs["parallel_iterations"], node.attrs["swap_memory"]
        )
        del self.kept.indexes[body]
        found = loop.outputs[1:]
        # The forward loop may have got loop variables meanwhile, in front of its captures.
        reached: list[Tensor | None] = [None] * len(node.inputs)
        shift = node.attrs["n_vars"] - n_vars
        for place, output in zip(active, found, strict=False):
            reached[place] = ensure_shape(output, node.inputs[place].shape)
        for place, output in zip(captures, found[len(active) :], strict=False):
            reached[place + shift] = output
        for variable, output in zip(variables, found[len(active) + len(captures) :], strict=True):
            if reverse.reaches_variable(variable):
                self.sweep.give_variable(variable.serial, output)
        return reached

    def active_variables(self, wanted: set[int]) -> list[int]:
        """The loop variables between what is wanted and what has a gradient."""
        node, n_vars = self.node, self.n_vars
        inputs = self.sweep.dependencies.inputs_of(node)
        reads = self.sweep.dependencies.variables_of(node)
        wanted_mask = sum(1 << place for place in wanted)
        active = []
        for place in range(n_vars):
            if not carries_gradient(self.body.inputs[place].spec):
                continue
            is_connected = inputs[place] & wanted_mask or reads[place]
            matters = any(grad is not None and inputs[output] >> place & 1 for output, grad in enumerate(self.grads))
            if is_connected and matters:
                active.append(place)
        return active


def _or_zeros(grad: Tensor | None, x: Tensor | Variable) -> Tensor:
    if grad is not None:
        return grad
    if x.spec.dtype == VARIANT:
        return no_gradient()
    return zeros_of(x if isinstance(x, Tensor) else x.read())


def _added(total: Tensor, grad: Tensor | None) -> Tensor:
    return total if grad is None else add_gradients(total, grad)


def _kept(node: Node) -> _Kept:
    kept = node.graph.root.kept_for_gradients
    if node not in kept:
        kept[node] = _Kept(node)
    found: _Kept = kept[node]
    return found


class _Kept:
    """What a forward loop keeps for its gradients, and how their bodies find it.

    Attributes:
        indexes: the number of the forward iteration, in each gradient body that is being built.
    """

    def __init__(self, node: Node) -> None:
        self.node = node
        self.indexes: dict[GradientBody, Tensor] = {}
        self.stores: dict[Tensor, Tensor] = {}
        self._count: Tensor | None = None
        self._counters: dict[Tensor, int] | None = None

    @property
    def forward(self) -> Subgraph:
        """The body of the loop."""
        body: Subgraph = self.node.attrs["body"]
        return body

    def count(self) -> Tensor:
        """How many iterations the loop has run: a result it has, or gets."""
        if self._count is None:
            counters = self.counters()
            for place, parameter in enumerate(self.forward.inputs[: self.node.attrs["n_vars"]]):
                if counters.get(parameter) == 0 and parameter.spec == _COUNT:
                    self._count = self.node.outputs[place]
                    break
            else:
                inner, self._count = self._add_variable(lambda: constant(0, int64))
                with reopened(self.forward):
                    self.forward.results.append(add(inner, 1))
                counters[inner] = 0
        return self._count

    def number(self) -> Tensor:
        """The number of the iteration, in the forward body."""
        self.count()
        return next(
            parameter for parameter, first in self.counters().items() if first == 0 and parameter.spec == _COUNT
        )

    def counters(self) -> dict[Tensor, int]:
        """The loop variables that go up by one from a known integer, and that integer."""
        if self._counters is None:
            self._counters = {}
            pairs = zip(self.forward.inputs, self.node.inputs, self.forward.results, strict=False)
            for parameter, initial, result in pairs:
                if parameter.dtype.kind in "iu" and _is_constant(initial) and _is_successor(result, parameter):
                    self._counters[parameter] = int(initial.node.attrs["value"])
        return self._counters

    def restore(self, body: GradientBody, tensor: Tensor) -> Tensor:
        """A value of the forward body, in a gradient body."""
        node = tensor.node
        if _is_constant(tensor):
            with body:
                return constant(node.attrs["value"])
        if tensor in self.counters():
            first = self.counters()[tensor]
            with body:
                value = self.indexes[body] if first == 0 else add(self.indexes[body], first)
                return value if tensor.dtype == int64 else astype(value, tensor.dtype)
        capture = self.captured(tensor)
        if capture is not None:
            return body.import_tensor(capture)
        if self.is_cheap(body, tensor):
            return self.computed_again(body, tensor)
        store = self.store(tensor)
        inner = body.import_tensor(store)
        with body, device(None), colocate_with(_home(store)):
            return saved_value(inner, self.indexes[body], tensor.spec)

    def captured(self, tensor: Tensor) -> Tensor | None:
        """The value outside that a body's input stands for; None for anything else."""
        n_vars = self.node.attrs["n_vars"]
        for inner, outer in zip(self.forward.inputs[n_vars:], self.node.inputs[n_vars:], strict=True):
            if inner is tensor:
                return outer
        return None

    def is_cheap(self, body: GradientBody, tensor: Tensor) -> bool:
        """Whether a value is computed again from what is there, rather than saved."""
        node = tensor.node
        if node.op.name not in _CHEAP or node.control_inputs:
            return False
        return all(
            _is_constant(each)
            or each in self.counters()
            or self.captured(each) is not None
            or body.has_restored(each)
            or each in self.stores
            or self.is_cheap(body, each)
            for each in node.inputs
        )

    def computed_again(self, body: GradientBody, tensor: Tensor) -> Tensor:
        node = tensor.node
        with body, device(node.device):
            inputs = [body.import_tensor(each) for each in node.inputs]
            specs = node.outputs[0].spec if node.single else tuple(output.spec for output in node.outputs)
            again = body.add_node(node.op, inputs, node.attrs, specs, location=node.location)
        return again.outputs[tensor.index]

    def store(self, tensor: Tensor) -> Tensor:
        """The result of the forward loop that holds a value of each iteration: a store beside what makes the value."""
        if tensor not in self.stores:
            inner, store = self._add_variable(new_store)
            self.stores[tensor] = store
            home = _home(store)
            if (inside := store_node(tensor)) is not None:
                home.colocated_with = inside.name
            with reopened(self.forward), device(self.request(tensor)), colocate_with(home):
                self.forward.results.append(save(inner, self.number(), tensor))
        return self.stores[tensor]

    def request(self, tensor: Tensor) -> str | None:
        """The device asked for by the node that makes a value of the forward body, or the next of a loop variable."""
        for variable, result in zip(self.forward.inputs, self.forward.results, strict=False):
            if variable is tensor:
                tensor = result
        # What is asked for a branch or loop is not asked for what it gives.
        return None if tensor.node.op.name in STRUCTURED else tensor.node.device

    def _add_variable(self, make: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
        """A loop variable more, with its initial value in front of the loop."""
        graph = self.node.graph
        before = len(graph.nodes)
        with reopened(graph):
            initial = make()
        made = graph.nodes[before:]
        del graph.nodes[before:]
        place = graph.nodes.index(self.node)
        graph.nodes[place:place] = made
        for part in self.node.subgraphs:
            part.closed = False
        try:
            return add_variable(self.node, initial)
        finally:
            for part in self.node.subgraphs:
                part.closed = True


def _home(store: Tensor) -> Node:
    node = store_node(store)
    assert node is not None
    return node


def _is_constant(tensor: Tensor) -> bool:
    return tensor.node.op is CONSTANT and not tensor.node.control_inputs


def _is_successor(result: Tensor, parameter: Tensor) -> bool:
    node = result.node
    if node.op.name != "add" or len(node.inputs) != 2:
        return False
    a, b = node.inputs
    other = b if a is parameter else a if b is parameter else None
    return other is not None and _is_constant(other) and bool(np.all(other.node.attrs["value"] == 1))
