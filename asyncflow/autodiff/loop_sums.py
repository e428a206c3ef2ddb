"""What a gradient loop adds up: what reaches the captures and variables of the forward loop, iteration by iteration.

What reaches a part of a value, such as one row, is not made as large as the whole in each iteration. A part that is the
same in all of them is added up as it is, and put in its place behind the loop; rows that are picked by number go to a
store of gradients, one entry each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from asyncflow.autodiff.gradient_body import is_constant, zeros_if_none
from asyncflow.autodiff.saved_values import (
    STORE,
    element_gradients,
    merge_gradients,
    no_gradient,
    rows_gradient,
    stacked_gradients,
)
from asyncflow.autodiff.sweep import add_gradients, sum_gradients
from asyncflow.graph.build import constant
from asyncflow.graph.dtypes import int64
from asyncflow.graph.ir import Tensor
from asyncflow.graph.scopes import device
from asyncflow.graph.shapes import is_static, size_of
from asyncflow.ops.creation import zeros
from asyncflow.ops.datatypes import astype
from asyncflow.ops.derivatives.scatter import SCATTER_TO, WHOLE, scatter_to
from asyncflow.ops.derivatives.shapes import ensure_shape, shape_of
from asyncflow.ops.elementwise import remainder
from asyncflow.ops.keys import ELLIPSIS

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from asyncflow.autodiff.gradient_body import GradientBody
    from asyncflow.graph.ir import Node
    from asyncflow.graph.spec import Spec
    from asyncflow.ops.keys import Key
    from asyncflow.state.variable import Variable

_FEW = 4
"""Rows that are so many times smaller than the whole are kept for themselves."""


class _Sum(Protocol):
    """One loop variable of a gradient loop."""

    def spec(self, values: Sequence[Tensor]) -> Spec:
        """Of the loop variable."""
        ...

    def start(self, total: Tensor) -> Tensor:
        """Its initial value, in the graph around the loop."""
        ...

    def added(self, total: Tensor, values: Sequence[Tensor]) -> Tensor:
        """Its next value, in the body, with what has come in this iteration."""
        ...

    def finished(self, output: Tensor) -> Tensor:
        """The gradient that its last value stands for, in the graph around the loop."""
        ...


class LoopSums:
    """What has reached captures and variables so far, as loop variables of a gradient loop.

    Args:
        body: of the gradient loop.

    Attributes:
        parameters: the loop variables, as `body` sees them; it gets their next values.
    """

    def __init__(self, body: GradientBody) -> None:
        self.body = body
        self.parameters: list[Tensor] = []
        self._sums: list[tuple[Tensor | Variable, _Sum]] = []

    def add(self, target: Tensor | Variable, grads: Sequence[Tensor]) -> None:
        """Adds what reaches `target`, from outside the loop, in an iteration; the body is the current graph."""
        kinds: dict[Hashable, tuple[_Sum, list[Tensor]]] = {}
        for grad in grads:
            key, kind, value = self._kind(target, grad)
            kinds.setdefault(key, (kind, []))[1].append(value)
        for kind, values in kinds.values():
            total = self.body.add_input(kind.spec(values), "var")
            with device(values[0].node.device):
                self.body.results.append(ensure_shape(kind.added(total, values), total.shape))
            self.parameters.append(total)
            self._sums.append((target, kind))

    def starts(self) -> list[Tensor]:
        """The initial values; the graph around the loop is the current one."""
        return [kind.start(total) for (_, kind), total in zip(self._sums, self.parameters, strict=True)]

    def totals(self, outputs: Sequence[Tensor]) -> dict[Tensor | Variable, Tensor]:
        """What has reached each target in all iterations; those that nothing has reached are left out."""
        found: dict[Tensor | Variable, list[Tensor]] = {}
        for (target, kind), output in zip(self._sums, outputs, strict=True):
            found.setdefault(target, []).append(kind.finished(output))
        return {target: sum_gradients(grads) for target, grads in found.items()}

    def _kind(self, target: Tensor | Variable, grad: Tensor) -> tuple[Hashable, _Sum, Tensor]:
        """How to sum up `grad` and those of equal key, and what of it."""
        node = grad.node
        if node.op is SCATTER_TO and len(node.attrs["keys"]) == 1:
            (key,) = node.attrs["keys"]
            value, indices, _ = _scattered(node)
            outer = self._outside(indices)
            if outer is not None and is_static(value.shape):
                return ("part", key, *map(id, outer)), _Part(target, key, outer), value
            if _names_rows(key) and _are_few(value, indices[0], target):
                return "rows", _Rows(target), grad
        return "whole", _Whole(target), grad

    def _outside(self, tensors: Sequence[Tensor]) -> list[Tensor] | None:
        """Values of the body that are the same in all iterations, as they are outside; None if one is not."""
        captured = {inner: outer for outer, inner in self.body.captures.items()}
        if not all(tensor in captured or is_constant(tensor) for tensor in tensors):
            return None
        return [captured.get(tensor, tensor) for tensor in tensors]


class _Whole:
    """A sum of the shape of the whole."""

    def __init__(self, target: Tensor | Variable) -> None:
        self.target = target

    def spec(self, values: Sequence[Tensor]) -> Spec:
        return self.target.spec

    def start(self, total: Tensor) -> Tensor:
        return zeros_if_none(None, self.target)

    def added(self, total: Tensor, values: Sequence[Tensor]) -> Tensor:
        return add_gradients(total, sum_gradients(values))

    def finished(self, output: Tensor) -> Tensor:
        return output


class _Part:
    """A sum of what reaches ``target[key]``."""

    def __init__(self, target: Tensor | Variable, key: Key, indices: Sequence[Tensor]) -> None:
        self.target = target
        self.key = key
        self.indices = indices

    def spec(self, values: Sequence[Tensor]) -> Spec:
        return values[0].spec

    def start(self, total: Tensor) -> Tensor:
        return zeros(shape_of(total), dtype=total.dtype)

    def added(self, total: Tensor, values: Sequence[Tensor]) -> Tensor:
        return add_gradients(total, sum_gradients(values))

    def finished(self, output: Tensor) -> Tensor:
        like = _tensor(self.target)
        indices = [constant(x.node.attrs["value"]) if is_constant(x) else x for x in self.indices]
        return scatter_to(output, self.key, indices, shape_of(like), known=like.shape)


class _Rows:
    """What reaches rows of a value, as a store of gradients."""

    def __init__(self, target: Tensor | Variable) -> None:
        self.target = target

    def spec(self, values: Sequence[Tensor]) -> Spec:
        return STORE

    def start(self, total: Tensor) -> Tensor:
        return no_gradient()

    def added(self, total: Tensor, values: Sequence[Tensor]) -> Tensor:
        for grad in values:
            value, (rows,), _ = _scattered(grad.node)
            numbers = rows if rows.dtype.kind == "u" else remainder(astype(rows, int64), _count_of_rows(grad.node))
            entries = element_gradients(numbers, value) if rows.ndim == 0 else stacked_gradients(value, numbers)
            total = merge_gradients(total, entries)
        return total

    def finished(self, output: Tensor) -> Tensor:
        return rows_gradient(output, _tensor(self.target))


def _tensor(target: Tensor | Variable) -> Tensor:
    return target if isinstance(target, Tensor) else target.read()


def _scattered(node: Node) -> tuple[Tensor, Sequence[Tensor], Sequence[Tensor]]:
    """Of a scatter with one key: the values, the tensors in the key, and the extents that only a run knows."""
    template = node.attrs["shape"]
    n_sizes = 1 if template is None else template.count(None)
    end = len(node.inputs) - n_sizes
    return node.inputs[0], node.inputs[1:end], node.inputs[end:]


def _count_of_rows(node: Node) -> Tensor:
    """The first extent of what a scatter gives."""
    template, (*_, sizes) = node.attrs["shape"], _scattered(node)
    if template is None:
        return sizes[0][0]
    return sizes[0] if template[0] is None else constant(template[0], int64)


def _names_rows(key: Key) -> bool:
    """Whether a key is one tensor, for the first axis."""
    return key[0] == ("input", 0) and all(entry in (WHOLE, ELLIPSIS) for entry in key[1:])


def _are_few(value: Tensor, rows: Tensor, target: Tensor | Variable) -> bool:
    """Whether these are numbers of rows, of few compared to the whole; one is few if nothing is known."""
    if rows.dtype.kind not in "iu" or rows.ndim not in (0, 1):
        return False
    part, whole = size_of(value.shape), size_of(target.spec.shape)
    return rows.ndim == 0 if part is None or whole is None else part * _FEW <= whole
