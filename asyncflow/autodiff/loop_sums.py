"""What a gradient loop adds up: what reaches the captures and variables of the forward loop, iteration by iteration.

What reaches a part of a value, such as one row, is not made as large as the whole in each iteration. A part that is the
same in all of them is added up as it is, and put in its place behind the loop; rows that are picked by number go to
stores of gradients, with one entry an iteration.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Protocol

from asyncflow.autodiff.gradient_body import zeros_if_none
from asyncflow.autodiff.store_gradients import (
    ROWS_GRADIENT,
    STORE,
    element_gradients,
    merge_gradients,
    no_gradient,
    rows_gradient,
)
from asyncflow.autodiff.sweep import add_gradients, sum_gradients
from asyncflow.graph.build import apply, constant
from asyncflow.graph.builtin import is_constant
from asyncflow.graph.dtypes import int64
from asyncflow.graph.ir import Tensor
from asyncflow.graph.scopes import device
from asyncflow.graph.shapes import is_static, size_of
from asyncflow.ops.datatypes import astype
from asyncflow.ops.derivatives.scatter import SCATTER_TO, WHOLE, scatter_to
from asyncflow.ops.derivatives.shapes import ensure_shape, shape_of, zeros_of
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
    """One or several loop variables of a gradient loop."""

    def specs(self, grads: Sequence[Tensor]) -> Sequence[Spec]:
        """Of the loop variables."""
        ...

    def starts(self) -> Sequence[Tensor]:
        """Their initial values, in the graph around the loop."""
        ...

    def added(self, totals: Sequence[Tensor], grads: Sequence[Tensor], index: Tensor) -> Sequence[Tensor]:
        """Their next values, in the body, with what has come in iteration number `index` of the forward loop."""
        ...

    def finished(self, outputs: Sequence[Tensor], count: Tensor) -> Tensor:
        """The gradient that their last values stand for after `count` iterations, in the graph around the loop."""
        ...


class LoopSums:
    """What has reached captures and variables so far, as loop variables of a gradient loop.

    Args:
        body: of the gradient loop.
        index: the number of the forward iteration, in `body`.

    Attributes:
        parameters: the loop variables, as `body` sees them; it gets their next values.
    """

    def __init__(self, body: GradientBody, index: Tensor) -> None:
        self.body = body
        self.index = index
        self.parameters: list[Tensor] = []
        self._sums: list[tuple[Tensor | Variable, _Sum, int]] = []

    def add(self, target: Tensor | Variable, grads: Sequence[Tensor]) -> None:
        """Adds what reaches `target`, from outside the loop, in an iteration; the body is the current graph."""
        kinds: dict[Hashable, tuple[_Sum, list[Tensor]]] = {}
        for grad in grads:
            key, kind = self._kind(target, grad)
            kinds.setdefault(key, (kind, []))[1].append(grad)
        for kind, alike in kinds.values():
            totals = [self.body.add_input(spec, "var") for spec in kind.specs(alike)]
            with device(alike[0].node.device):
                added = kind.added(totals, alike, self.index)
                self.body.results += [ensure_shape(x, total.shape) for x, total in zip(added, totals, strict=True)]
            self.parameters += totals
            self._sums.append((target, kind, len(totals)))

    def starts(self) -> list[Tensor]:
        """The initial values; the graph around the loop is the current one."""
        return [start for _, kind, _ in self._sums for start in kind.starts()]

    def totals(self, outputs: Sequence[Tensor], count: Tensor) -> dict[Tensor | Variable, Tensor]:
        """What has reached each target in `count` iterations; those that nothing has reached are left out."""
        found: dict[Tensor | Variable, list[Tensor]] = {}
        left = iter(outputs)
        for target, kind, length in self._sums:
            found.setdefault(target, []).append(kind.finished(list(islice(left, length)), count))
        return {target: sum_gradients(grads) for target, grads in found.items()}

    def _kind(self, target: Tensor | Variable, grad: Tensor) -> tuple[Hashable, _Sum]:
        """How to sum up `grad` and those of equal key."""
        node = grad.node
        if node.op is SCATTER_TO and len(node.attrs["keys"]) == 1:
            (key,) = node.attrs["keys"]
            value, indices, _ = _scattered(node)
            outer = self._outside(indices)
            if outer is not None and is_static(value.shape):
                return ("part", key, *map(id, outer)), _Part(target, node, outer)
            if _names_rows(key) and _are_few(value, indices[0], target):
                if indices[0].ndim == 0:
                    return "rows", _Rows(target)
                if is_static(value.shape) and is_static(indices[0].shape):
                    return ("picked", id(node)), _Picked(target, node)
        return "whole", _Whole(target)

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

    def specs(self, grads: Sequence[Tensor]) -> Sequence[Spec]:
        return [self.target.spec]

    def starts(self) -> Sequence[Tensor]:
        return [zeros_if_none(None, self.target)]

    def added(self, totals: Sequence[Tensor], grads: Sequence[Tensor], index: Tensor) -> Sequence[Tensor]:
        return [add_gradients(totals[0], sum_gradients(grads))]

    def finished(self, outputs: Sequence[Tensor], count: Tensor) -> Tensor:
        return outputs[0]


class _Part:
    """A sum of what reaches ``target[key]``, the same in all iterations."""

    def __init__(self, target: Tensor | Variable, node: Node, indices: Sequence[Tensor]) -> None:
        self.target = target
        self.key = node.attrs["keys"][0]
        self.value = node.inputs[0]
        self.indices = indices

    def specs(self, grads: Sequence[Tensor]) -> Sequence[Spec]:
        return [self.value.spec]

    def starts(self) -> Sequence[Tensor]:
        return [zeros_of(self.value)]

    def added(self, totals: Sequence[Tensor], grads: Sequence[Tensor], index: Tensor) -> Sequence[Tensor]:
        return [add_gradients(totals[0], sum_gradients([grad.node.inputs[0] for grad in grads]))]

    def finished(self, outputs: Sequence[Tensor], count: Tensor) -> Tensor:
        like = _tensor(self.target)
        indices = [constant(x.node.attrs["value"]) if is_constant(x) else x for x in self.indices]
        return scatter_to(outputs[0], self.key, indices, shape_of(like), known=like.shape)


class _Rows:
    """What reaches rows of a value, one at a time, as a store of their gradients."""

    def __init__(self, target: Tensor | Variable) -> None:
        self.target = target

    def specs(self, grads: Sequence[Tensor]) -> Sequence[Spec]:
        return [STORE]

    def starts(self) -> Sequence[Tensor]:
        return [no_gradient()]

    def added(self, totals: Sequence[Tensor], grads: Sequence[Tensor], index: Tensor) -> Sequence[Tensor]:
        total = totals[0]
        for grad in grads:
            value, (row,), _ = _scattered(grad.node)
            if row.dtype.kind == "i":  # it may count from the end
                row = remainder(astype(row, int64), _count_of_rows(grad.node))
            total = merge_gradients(total, element_gradients(row, value))
        return [total]

    def finished(self, outputs: Sequence[Tensor], count: Tensor) -> Tensor:
        return rows_gradient(outputs[0], _tensor(self.target))


class _Picked:
    """What reaches several rows of a value at a time, in stores of one entry an iteration: values, and their rows."""

    def __init__(self, target: Tensor | Variable, node: Node) -> None:
        self.target = target
        self.key = node.attrs["keys"][0]
        self.kept = node.inputs[:2]

    def specs(self, grads: Sequence[Tensor]) -> Sequence[Spec]:
        return [STORE, STORE]

    def starts(self) -> Sequence[Tensor]:
        return [no_gradient(), no_gradient()]

    def added(self, totals: Sequence[Tensor], grads: Sequence[Tensor], index: Tensor) -> Sequence[Tensor]:
        pairs = zip(totals, self.kept, strict=True)
        return [merge_gradients(total, element_gradients(index, value)) for total, value in pairs]

    def finished(self, outputs: Sequence[Tensor], count: Tensor) -> Tensor:
        like = _tensor(self.target)
        values, rows = (_stacked(store, x.spec, count) for store, x in zip(outputs, self.kept, strict=True))
        return scatter_to(values, self.key, [rows], shape_of(like), known=like.shape)


def _stacked(store: Tensor, entry: Spec, count: Tensor) -> Tensor:
    """All entries of a store that has one for each iteration."""
    assert entry.shape is not None
    shape = (None, *entry.shape)
    return apply(ROWS_GRADIENT, store, count, is_scattered=False, dtype=entry.dtype, shape=shape)[0]


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
