"""Values known while a graph is built, and feeds that contradict the conclusions drawn from them.

A rule draws a conclusion from the values of some tensors, such as the length of ``arange``. `assumed` draws it while
the graph is built, and records it in the graph; `refuse_contradictions` draws it again with the values of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from asyncflow.errors import FeedError, brief
from asyncflow.graph.assumptions import assume, first_reader
from asyncflow.graph.builtin import CONSTANT, PARAMETER
from asyncflow.graph.graph import Graph, Subgraph
from asyncflow.graph.ir import Assumption, Tensor
from asyncflow.graph.op import bound_kernel
from asyncflow.graph.values.shapes import is_static, size_of
from asyncflow.ops.arrays.shape import SHAPE
from asyncflow.values import Array

_LARGEST_FOUND = 64
"""Most elements of a value that is computed while the graph is built: shapes and the like."""

_DEEPEST = 32
"""Longest chain of operations that is computed."""

_NOTHING_FED: Mapping[Tensor, Array] = MappingProxyType({})


class KnownValues:
    """Values known without a run: constants, results computed from small ones, and `fed` values."""

    def __init__(self, fed: Mapping[Tensor, Array] = _NOTHING_FED) -> None:
        self.fed = fed
        self._found: dict[Tensor, Array | None] = {}

    def value(self, x: Tensor) -> Array | None:
        """Return the value of `x`; None if only a run knows it."""
        if x in self.fed:
            return self.fed[x]
        node = x.node
        if node.op is CONSTANT:
            value: Array = node.attrs["value"]
            return value
        if node.op is PARAMETER:
            outer = outer_tensor(x)
            return None if outer is None else self.value(outer)
        if x not in self._found:
            self._found[x] = None  # also during the search, against cycles
            self._found[x] = self._computed(x)
        return self._found[x]

    def _computed(self, x: Tensor) -> Array | None:
        node, size = x.node, size_of(x.shape)
        if not node.op.is_pure or not node.single or not node.inputs or size is None or size > _LARGEST_FOUND:
            return None
        if x.dtype.kind not in "biu" or len(self._found) > _DEEPEST:
            return None
        if node.op is SHAPE and is_static(node.inputs[0].shape):
            return np.array(node.inputs[0].shape, x.dtype)
        values = [self.value(source) for source in node.inputs]
        known = [value[()] for value in values if value is not None and value.size <= _LARGEST_FOUND]
        if len(known) < len(values):
            return None
        try:
            with np.errstate(all="ignore"):
                return np.asarray(bound_kernel(node.op, np, node.attrs, of_scalars=False)(*known))
        except Exception:
            return None  # it fails again in the run, and is reported there


def outer_tensor(x: Tensor) -> Tensor | None:
    """Return the tensor outside that a body's input captures; None for anything else."""
    captures: Mapping[Tensor, Tensor] = getattr(x.node.graph, "captures", {})
    return next((outer for outer, inner in captures.items() if inner is x), None)


# -- while a graph is built ------------------------------------------------------------------------------------------

Rule = Callable[..., Any]
"""Takes `KnownValues` and tensors; returns a conclusion, or None if it cannot draw one."""

_VALUE = "value"
_RULES: dict[str, Rule] = {_VALUE: lambda known, x: known.value(x)}


def conclusion(name: str) -> Callable[[Rule], Rule]:
    """Register a rule under `name`, which messages and texts of graphs show: "the length of arange"."""

    def register(rule: Rule) -> Rule:
        _RULES[name] = rule
        return rule

    return register


def assumed(name: str, *tensors: Tensor) -> Any:
    """Return the conclusion of a rule, on which the graph is built from now on; None if it draws none."""
    found = _RULES[name](KnownValues(), *tensors)
    if found is not None:
        assume(name, tensors, found)
    return found


def static_value(x: Tensor) -> Array | None:
    """Return the value of `x` if it is known while the graph is built; a run cannot feed another one from now on.

    Known are constants, also captured, and small integers and booleans that are computed from nothing else.
    """
    value: Array | None = assumed(_VALUE, x)
    return value


def default_value(x: Tensor) -> Array | None:
    """Return the value as `static_value` does, for checks only: nothing may be built on it, as a run may feed
    another value.
    """
    return KnownValues().value(x)


# -- assumptions about feeds -----------------------------------------------------------------------------------------


def assumptions_about(graph: Graph, fed: Collection[Tensor]) -> list[Assumption]:
    """Return the assumptions of a root graph that depend on the values of tensors which a run feeds."""
    return [each for each in list(graph.assumptions.values()) if not _origins(each.tensors).isdisjoint(fed)]


def _origins(tensors: Iterable[Tensor]) -> set[Tensor]:
    """All that some tensors are computed from, and themselves."""
    found: set[Tensor] = set()
    pending = list(tensors)
    while pending:
        x = pending.pop()
        if x not in found:
            found.add(x)
            outer = outer_tensor(x) if x.node.op is PARAMETER else None
            pending += x.node.inputs if outer is None else [outer]
    return found


def empty_body(body: Subgraph) -> None:
    """Remove every node of a body that is replaced, and keep its assumptions for the captured tensors.

    A conclusion from values that the body computes becomes one about each captured value that leads there.
    """
    captured = {inner: outer for outer, inner in body.captures.items()}
    for each in list(body.root.assumptions.values()):
        sources = [captured[x] for x in _origins(each.tensors) if x in captured]
        if sources and all(x in captured for x in each.tensors):
            assume(each.rule, tuple(captured[x] for x in each.tensors), each.value, each.location)
            continue
        for source in sources:
            value = KnownValues().value(source)
            if value is not None:
                assume(_VALUE, (source,), value, each.location)
    body.take_back(0)


def refuse_contradictions(assumptions: Iterable[Assumption], fed: Mapping[Tensor, Array]) -> None:
    """Check the values of a run against the assumptions of its graph.

    Raises:
        FeedError: the values lead to another conclusion; the message names the fed tensor, the node, and the lines of
            both.
    """
    for each in assumptions:
        rule = _RULES.get(each.rule)
        if rule is None or not _is_same(rule(KnownValues(fed), *each.tensors), each.value):
            raise _contradiction(each, fed)


def _is_same(found: object, assumed: object) -> bool:
    if found is None:
        return False
    found, assumed = np.asarray(found), np.asarray(assumed)
    if found.shape != assumed.shape or found.dtype != assumed.dtype:
        return False
    if found.dtype.kind == "T":
        return bool(np.all(found == assumed))
    return found.tobytes() == assumed.tobytes()  # the same NaNs, and the same signs of zeros


def _contradiction(assumption: Assumption, fed: Mapping[Tensor, Array]) -> FeedError:
    origins = _origins(assumption.tensors)
    x = next(tensor for tensor in fed if tensor in origins)
    reader = first_reader(assumption)
    name = "a part of the graph" if reader is None else f"node {reader.name}"
    what = f"{assumption.tensors[0].name} =" if assumption.rule == _VALUE else f"the {assumption.rule}"
    return FeedError(
        f"cannot feed {x.name} the value {_shown(fed[x])}: {name} was built for {what} {_shown(assumption.value)}, at "
        f"{assumption.location}, and the fed value contradicts it; use a placeholder in place of {x.name} if its value "
        f"differs between runs\n  built at {x.node.location}"
    )


def _shown(value: object) -> str:
    array = np.asarray(value)
    return brief(array.tolist()) if array.size <= _LARGEST_FOUND else f"of shape {array.shape}"
