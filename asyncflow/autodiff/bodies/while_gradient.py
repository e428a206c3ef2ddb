"""The gradient of `while`: a `while` that runs as many iterations as the forward one did, from the last to the first.

Its loop variables are a counter, the gradients of the forward loop variables, and the sums so far for each capture and
variable (EuroSys '18 §5). Values of the forward body that it needs are saved, one store per value (`saved_values`).
Cheap values are computed again from present ones: constants, captures, counters, casts and reshapes
(docs/design/gradients.md).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, reduce
from operator import or_

import numpy as np

from asyncflow.autodiff.bodies.gradient_body import GradientBody, zeros_if_none
from asyncflow.autodiff.bodies.loop_sums import LoopSums
from asyncflow.autodiff.stores.saved_values import new_store, save, saved_value, store_node
from asyncflow.autodiff.sweep import Sweep, sweep_rule
from asyncflow.control.while_loop import WHILE, add_loop
from asyncflow.graph.building.build import constant, graph_for
from asyncflow.graph.building.copying import Copier
from asyncflow.graph.building.scopes import colocate_with, device
from asyncflow.graph.builtin import PARAMETER, is_constant
from asyncflow.graph.graph import Graph, Subgraph, reopened
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import derivative_of
from asyncflow.graph.structured import StructuredNode, WhileNode
from asyncflow.graph.values.dtypes import int64
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.arithmetic.elementwise import ADD, add, subtract
from asyncflow.ops.arithmetic.logic import greater
from asyncflow.ops.arrays.datatypes import astype
from asyncflow.ops.cost import free
from asyncflow.ops.derivatives.shapes import carries_gradient, ensure_shape
from asyncflow.ops.indexing.indexing import GETITEM
from asyncflow.state.variables.variable import Variable

_COUNT = Spec(int64, ())

_MOST_VIEWS = 16
"""Maximum depth of views of views that are told apart from values computed in each iteration."""


@sweep_rule(WHILE)
def _differentiate(node: WhileNode, grads: Sequence[Tensor | None], sweep: Sweep) -> Sequence[Tensor | None]:
    """Builds the gradient of each input of a `while`, in the current graph.

    Args:
        node: to be differentiated.
        grads: of its outputs.
        sweep: in progress, which has reached the node; it takes the gradients of variables read inside.
    """
    return _WhileGradient(node, grads, sweep).run()


class _WhileGradient:
    """Builds the gradient of one loop.

    Attributes:
        grads: what reaches each output of the loop.
        active: places of changing loop variables that lie between the wanted values and the outputs with gradients.
        fixed: places of unchanging ones, and of the captures that are wanted and matter.
        variables: variables that are wanted and matter.
        outside: copies, beside the forward loop, of values of its body that are the same in each iteration.
    """

    def __init__(self, node: WhileNode, grads: Sequence[Tensor | None], sweep: Sweep) -> None:
        self.node = node
        self.graph = graph_for()
        self.sweep = sweep
        self.forward = node.body
        self.grads = grads
        self.kept = _kept(node)
        self.outside = _Outside(node.graph, self.kept)
        self.active, self.fixed, self.variables = self.find_places()

    def find_places(self) -> tuple[list[int], list[int], list[Variable]]:
        """The places that the gradient is about; see the attributes."""
        node, sweep, n_vars = self.node, self.sweep, self.node.n_vars
        wanted = [
            place
            for place, tensor in enumerate(node.inputs)
            if tensor in sweep.connected and carries_gradient(tensor.spec)
        ]
        wanted_mask = sum(1 << place for place in wanted)
        inputs, reads = sweep.dependencies.inputs_of(node), sweep.dependencies.variables_of(node)
        given = [place for place, grad in enumerate(self.grads) if grad is not None]
        matters = reduce(or_, (inputs[place] for place in given), 0)
        read = reduce(or_, (reads[place] for place in given), 0)
        passed = [
            place
            for place, x in enumerate(self.forward.inputs[:n_vars])
            if matters >> place & 1 and carries_gradient(x.spec) and (inputs[place] & wanted_mask or reads[place])
        ]
        active = [place for place in passed if not self.is_fixed(place)]
        fixed = [place for place in passed if self.is_fixed(place)]
        fixed += [place for place in wanted if place >= n_vars and matters >> place & 1]
        return active, fixed, [x for serial, x in sweep.variables.items() if read & sweep.bits[serial]]

    def is_fixed(self, place: int) -> bool:
        """Return True if a loop variable is the same in every iteration, as captures are."""
        return self.forward.results[place] is self.forward.inputs[place]

    def run(self) -> Sequence[Tensor | None]:
        """The gradients of the loop's inputs."""
        node, kept = self.node, self.kept
        reached: list[Tensor | None] = [None] * len(node.inputs)
        for place in self.fixed:
            if place < len(self.grads) and (grad := self.grads[place]) is not None:
                reached[place] = ensure_shape(grad, node.inputs[place].shape)
        if not self.active:
            return reached
        # Tensors, not places: each value saved below adds a variable to the forward loop, in front of its captures,
        # whose places then move.
        in_body = [self.forward.inputs[place] for place in self.active]
        results = [self.forward.results[place] for place in self.active]
        fixed = [self.forward.inputs[place] for place in self.fixed]
        outer = [node.inputs[place] for place in self.fixed]
        starts = [self.graph.import_tensor(kept.counted[1]), *map(self.start, self.active)]
        label = self.graph.unique_name("while")
        body = GradientBody(self.graph, f"{label}/body", self.forward, kept.restore)
        parameters = [body.add_input(spec, "var") for spec in (_COUNT, *(x.spec for x in in_body))]
        with body:
            # The variable counts the iterations still to go back through; the current iteration's index is one less.
            kept.indexes[body] = subtract(parameters[0], 1)
            views = dict.fromkeys(self.views(fixed))
            reverse = Sweep(self.forward.nodes, [*in_body, *fixed], self.variables, views=views)
            for result, grad in zip(results, parameters[1:], strict=True):
                if result in reverse.connected:
                    reverse.give(result, ensure_shape(grad, result.shape))
            reverse.run()
            # In the order of `parameters`. A loop variable whose old value is unused gets zeros, not the gradient that
            # reached its new value: assignment ends the old value's gradient.
            body.results.append(kept.indexes[body])
            body.results += [ensure_shape(zeros_if_none(reverse.gradient(x), x), x.shape) for x in in_body]
            sums = LoopSums(body)
            for x, around in zip(fixed, outer, strict=True):
                sums.add(around, reverse.contributions(x))
            for x in views:
                if reverse.reaches(x) and reverse.is_left(x):
                    sums.add(self.outside.value(x), reverse.contributions(x))
            for variable in self.variables:
                sums.add(variable, reverse.contributions(variable))
        starts += sums.starts()
        loop = self.add_loop(body, [*parameters, *sums.parameters], starts, label)
        del kept.indexes[body]
        for place, output in zip(self.active, loop.outputs[1:], strict=False):
            reached[place] = ensure_shape(output, node.inputs[place].shape)
        for target, total in sums.totals(loop.outputs[len(parameters) :]):
            # Given one by one, so that an outer loop sees which gradients are parts.
            if isinstance(target, Tensor):
                self.give(target, total)
            else:
                self.sweep.give_variable(target.serial, total)
        # Only loop variables have entries, as their places stay; captures, whose places may have moved, were given
        # theirs above.
        return reached + [None] * (len(node.inputs) - len(reached))

    # -- views of values that are the same in every iteration --------------------------------------------------------

    def views(self, fixed: Collection[Tensor]) -> list[Tensor]:
        """Return the views that the forward body makes of `fixed` values, and of one another.

        Gradients of parts of a view are added up as such, and go through the view once, behind the loop. In each
        iteration it would be as large as the whole.
        """
        depths = {x: 0 for x in fixed if x.dtype.kind in "fc"}

        def is_same(x: Tensor) -> bool:
            return x in depths or is_constant(x) or self.kept.captured(x) is not None

        for node in self.forward.nodes:
            depth = depths.get(node.inputs[0], _MOST_VIEWS) if node.inputs else _MOST_VIEWS
            is_view = node.single and node.op.is_pure and (node.op is GETITEM or node.op.flops is free)
            if depth < _MOST_VIEWS and is_view and not node.control_inputs and all(map(is_same, node.inputs)):
                depths[node.outputs[0]] = depth + 1
        return [x for x, depth in depths.items() if depth]

    def give(self, target: Tensor, total: Tensor) -> None:
        """Pass a gradient on to an outside value, or through a view made outside."""
        if target.node not in self.outside.nodes.values():
            self.sweep.give(target, total)
            return
        rule = derivative_of(target.node.op)
        assert rule is not None
        for x, grad in zip(target.node.inputs, rule(target.node, total), strict=True):
            if grad is not None:
                self.give(x, grad)

    def start(self, place: int) -> Tensor:
        """The gradient of a loop variable after the last iteration."""
        grad, final = self.grads[place], self.node.outputs[place]
        return ensure_shape(self.graph.import_tensor(zeros_if_none(grad, final)), final.shape)

    def add_loop(self, body: GradientBody, parameters: Sequence[Tensor], starts: Sequence[Tensor], label: str) -> Node:
        """Add the gradient loop, once its body is built; `parameters` are the body's inputs that are loop variables."""
        body.inputs = [*parameters, *body.captures.values()]
        condition = Subgraph(self.graph, f"{label}/cond")
        specs = [parameter.spec for parameter in parameters]
        count, *_ = [condition.add_input(spec, "var") for spec in specs]
        with condition:
            condition.results.append(greater(count, 0))
        node = self.node
        return add_loop(condition, body, starts, specs, label, node.parallel_iterations, node.swap_memory)


class _Outside(Copier):
    """Copies, beside a loop, of nodes that give the same in each iteration."""

    def __init__(self, graph: Graph, kept: _Kept) -> None:
        super().__init__(graph)
        self.kept = kept

    def known(self, x: Tensor) -> Tensor | None:
        """See `Copier.known`."""
        return self.kept.captured(x)

    def made(self, node: Node) -> Node:
        """See `Copier.made`."""
        with reopened(self.target):
            return super().made(node)


def _kept(node: WhileNode) -> _Kept:
    kept = node.graph.root.kept_for_gradients
    if node not in kept:
        kept[node] = _Kept(node)
    found: _Kept = kept[node]
    return found


class _Kept:
    """Values that a forward loop keeps for its gradients, and their lookup in gradient bodies.

    Attributes:
        forward: the body of the loop.
        indexes: the number of the forward iteration, in each gradient body that is being built.
    """

    def __init__(self, node: WhileNode) -> None:
        self.node = node
        self.forward = node.body
        self.indexes: dict[GradientBody, Tensor] = {}
        self.stores: dict[Tensor, Tensor] = {}

    @cached_property
    def counted(self) -> tuple[Tensor, Tensor]:
        """The number of the iteration, in the forward body, and how many there are, by a counter it has or gets.

        What a counter begins with is a constant, which the compiler knows, but a run may feed another value.
        """
        counter = next((variable for variable in self.counters if variable.spec == _COUNT), None)
        if counter is None:
            inner, count = self._add_variable(lambda: constant(0, int64))
            with reopened(self.forward):
                self.forward.results.append(add(inner, 1))
            return inner, count
        place, first = self._place(counter), self.counters[counter]
        inner = self._captured_inside(first)
        with reopened(self.forward):
            number = subtract(counter, inner)
        with reopened(self.node.graph):
            return number, subtract(self.node.outputs[place], first)

    @cached_property
    def counters(self) -> dict[Tensor, Tensor]:
        """The loop variables that go up by one from a constant integer, and that."""
        triples = zip(self.forward.inputs, self.node.inputs, self.forward.results, strict=False)
        return {
            parameter: initial
            for parameter, initial, result in triples
            if parameter.dtype.kind in "iu"
            and is_constant(initial)
            and initial.shape == parameter.shape == ()
            and is_successor(result, parameter)
        }

    def restore(self, body: GradientBody, tensor: Tensor) -> Tensor | None:
        """A value of the forward body, in a gradient body; None to compute it again."""
        # Cheapest first: a store, which holds a value of every iteration, is the last resort.
        if is_constant(tensor):
            with body:
                return constant(tensor.node.attrs["value"])
        if tensor is self.counted[0]:
            return self.indexes[body]
        if tensor in self.counters:
            with body:
                first = astype(body.import_tensor(self.counters[tensor]), int64)
                return astype(add(self.indexes[body], first), tensor.dtype)
        capture = self.captured(tensor)
        if capture is not None:
            return body.import_tensor(capture)
        if body.is_cheap(tensor, self.is_there):
            return None
        store = self.store(tensor)
        inner = body.import_tensor(store)
        with body, device(None), colocate_with(_home(store)):
            return saved_value(inner, self.indexes[body], tensor.spec)

    def captured(self, tensor: Tensor) -> Tensor | None:
        """The value outside that a body's input stands for in every iteration; None for anything else."""
        if tensor.node.op is not PARAMETER:
            return None
        place = self._place(tensor)
        is_fixed = place >= self.node.n_vars or self.forward.results[place] is tensor
        return self.node.inputs[place] if is_fixed else None

    def is_there(self, tensor: Tensor) -> bool:
        """Return True if a value need not be saved for its own sake."""
        return (
            tensor is self.counted[0]
            or tensor in self.counters
            or tensor in self.stores
            or self.captured(tensor) is not None
        )

    def store(self, tensor: Tensor) -> Tensor:
        """The result of the forward loop that holds a value of each iteration: a store beside what makes the value."""
        if tensor not in self.stores:
            inner, store = self._add_variable(new_store)
            self.stores[tensor] = store
            home = _home(store)
            # A store of an inner loop is saved as one value, so all nodes that use either store must be on one device.
            if (inside := store_node(tensor)) is not None:
                home.colocated_with = inside.name
            number = self.counted[0]
            with reopened(self.forward), device(self.request(tensor)), colocate_with(home):
                self.forward.results.append(save(inner, number, tensor))
        return self.stores[tensor]

    def request(self, tensor: Tensor) -> str | None:
        """The device asked for by the node that makes a value of the forward body, or the next of a loop variable."""
        if tensor.node.op is PARAMETER:
            tensor = self.forward.results[self._place(tensor)]
        # A device requested for a whole branch or loop does not hold for its results.
        return None if isinstance(tensor.node, StructuredNode) else tensor.node.device

    def _place(self, parameter: Tensor) -> int:
        """The place of an input of the body among all of them."""
        return next(place for place, inner in enumerate(self.forward.inputs) if inner is parameter)

    def _captured_inside(self, outer: Tensor) -> Tensor:
        """A value outside, as the forward body sees it."""
        with self._unlocked():
            return self.node.add_capture(outer, self.forward)

    @contextmanager
    def _unlocked(self) -> Iterator[None]:
        """Lets parameters join the finished bodies."""
        for part in self.node.subgraphs:
            part.closed = False
        try:
            yield
        finally:
            for part in self.node.subgraphs:
                part.closed = True

    def _add_variable(self, make: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
        """Adds a loop variable, with its initial value in front of the loop."""
        graph = self.node.graph
        before = len(graph.nodes)
        with reopened(graph):
            initial = make()
        # Nodes stand behind their inputs: move the nodes just built from the end to the front of the loop that uses
        # them.
        made = graph.nodes[before:]
        del graph.nodes[before:]
        place = graph.nodes.index(self.node)
        graph.nodes[place:place] = made
        with self._unlocked():
            return self.node.add_variable(initial)


def _home(store: Tensor) -> Node:
    node = store_node(store)
    assert node is not None
    return node


def is_successor(result: Tensor, parameter: Tensor) -> bool:
    """Return True if a loop variable goes up by one: `result` is the next iteration's `parameter`."""
    node = result.node
    if node.op is not ADD or len(node.inputs) != 2:
        return False
    a, b = node.inputs
    other = b if a is parameter else a if b is parameter else None
    return other is not None and is_constant(other) and bool(np.all(other.node.attrs["value"] == 1))
