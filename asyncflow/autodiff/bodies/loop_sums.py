"""Sums that a gradient loop makes, iteration by iteration: gradients of the forward loop's captures and variables.

What reaches a part of a value, such as one row, is not made as large as the whole in each iteration. A part that is the
same in all of them is added up as it is, and put in its place behind the loop; all others go to a sum of parts
(`part_sums`), also from loops and branches inside.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import reduce

from asyncflow.autodiff.bodies.gradient_body import GradientBody, zeros_if_none
from asyncflow.autodiff.stores.part_sums import are_parts, whole_sum, with_parts
from asyncflow.autodiff.stores.store_gradients import no_gradient
from asyncflow.autodiff.stores.stores import STORE
from asyncflow.autodiff.sweep import add_gradients, sum_gradients, value_of
from asyncflow.graph.building.build import constant
from asyncflow.graph.building.scopes import device
from asyncflow.graph.builtin import is_constant
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.values.dtypes import summed_in
from asyncflow.graph.values.shapes import is_static
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.arrays.datatypes import in_dtype
from asyncflow.ops.derivatives.shapes import ensure_shape, shape_of, zeros_of
from asyncflow.ops.indexing.scatter import SCATTER_TO, parts_of, scatter_to
from asyncflow.state.variables.variable import Variable


class LoopSums:
    """Gradients of captures and variables so far, as loop variables of a gradient loop.

    Args:
        body: of the gradient loop.

    Attributes:
        parameters: the loop variables, as `body` sees them; it gets their next values.
    """

    def __init__(self, body: GradientBody) -> None:
        self.body = body
        self.parameters: list[Tensor] = []
        self._sums: list[_Sum] = []

    def add(self, target: Tensor | Variable, grads: Sequence[Tensor]) -> None:
        """Adds what reaches `target`, from outside the loop, in an iteration; the body is the current graph."""
        kinds: dict[Hashable, tuple[_Sum, list[Tensor]]] = {}
        for grad in grads:
            key, kind = self._kind(target, grad)
            kinds.setdefault(key, (kind, []))[1].append(grad)
        for kind, alike in kinds.values():
            total = self.body.add_input(kind.spec, "var")
            with device(alike[0].node.device):
                self.body.results.append(ensure_shape(kind.added(total, alike), total.shape))
            self.parameters.append(total)
            self._sums.append(kind)

    def starts(self) -> list[Tensor]:
        """The initial values; the graph around the loop is the current one."""
        return [kind.start() for kind in self._sums]

    def totals(self, outputs: Sequence[Tensor]) -> list[tuple[Tensor | Variable, Tensor]]:
        """The gradients of the targets: for each any number of them, which add up."""
        return [(kind.target, kind.finished(output)) for kind, output in zip(self._sums, outputs, strict=True)]

    def _kind(self, target: Tensor | Variable, grad: Tensor) -> tuple[Hashable, _Sum]:
        """Return the way to sum up `grad` and other gradients of equal key."""
        node = grad.node
        if node.op is SCATTER_TO and len(node.attrs["keys"]) == 1:
            (key,) = node.attrs["keys"]
            ((value, indices),) = parts_of(node.inputs, node.attrs["keys"])
            outer = self._outside(indices)
            if outer is not None and is_static(value.shape):
                return ("part", key, *map(id, outer)), _KeySum(target, node, outer)
        return ("parts", _Parts(target)) if are_parts(grad, target.spec.shape) else ("whole", _Sum(target))

    def _outside(self, tensors: Sequence[Tensor]) -> list[Tensor] | None:
        """Values of the body that are the same in all iterations, as they are outside; None if one is not."""
        captured = {inner: outer for outer, inner in self.body.captures.items()}
        if not all(tensor in captured or is_constant(tensor) for tensor in tensors):
            return None
        return [captured.get(tensor, tensor) for tensor in tensors]


class _Sum:
    """A loop variable of a gradient loop: a sum of the shape of the whole, or as a subclass says."""

    def __init__(self, target: Tensor | Variable) -> None:
        self.target = target

    @property
    def spec(self) -> Spec:
        """The spec of the loop variable, which accumulates as `summed_in` says."""
        return _wide_spec(self.target.spec)

    def start(self) -> Tensor:
        """Return its initial value, in the graph around the loop."""
        return in_dtype(zeros_if_none(None, self.target), self.spec.dtype)

    def added(self, total: Tensor, grads: Sequence[Tensor]) -> Tensor:
        """Return its next value, in the body, with the gradients of an iteration."""
        return add_gradients(total, in_dtype(sum_gradients(grads), total.dtype))

    def finished(self, output: Tensor) -> Tensor:
        """Return the gradient that its last value stands for, in the graph around the loop."""
        return in_dtype(output, self.target.spec.dtype)


class _KeySum(_Sum):
    """A sum of what reaches ``target[key]``, the same in all iterations."""

    def __init__(self, target: Tensor | Variable, node: Node, indices: Sequence[Tensor]) -> None:
        super().__init__(target)
        self.key = node.attrs["keys"][0]
        self.value = node.inputs[0]
        self.indices = indices

    @property
    def spec(self) -> Spec:
        return _wide_spec(self.value.spec)

    def start(self) -> Tensor:
        return in_dtype(zeros_of(self.value), self.spec.dtype)

    def added(self, total: Tensor, grads: Sequence[Tensor]) -> Tensor:
        return super().added(total, [grad.node.inputs[0] for grad in grads])

    def finished(self, output: Tensor) -> Tensor:
        output, like = super().finished(output), value_of(self.target)
        body = self.value.graph  # copy the body's constants; use constants outside, as a run may feed them
        indices = [constant(x.node.attrs["value"]) if x.graph is body else x for x in self.indices]
        return scatter_to(output, self.key, indices, shape_of(like), known=like.shape)


class _Parts(_Sum):
    """Gradients of parts of a value, which differ between iterations."""

    @property
    def spec(self) -> Spec:
        return STORE

    def start(self) -> Tensor:
        return no_gradient()

    def added(self, total: Tensor, grads: Sequence[Tensor]) -> Tensor:
        return reduce(with_parts, grads, total)

    def finished(self, output: Tensor) -> Tensor:
        return whole_sum(output, value_of(self.target))


def _wide_spec(spec: Spec) -> Spec:
    return replace(spec, dtype=summed_in(spec.dtype))
