"""Pass: joins nodes that compute the same value into the first of them (common-subexpression elimination).

Equal nodes have the same graph or body, op, inputs, control inputs, device constraint and attributes, down to the bits
of floats. Ops with effects, state, randomness, the user's code or TensorArrays are never joined.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np

from asyncflow.compiler.program.purity import has_variants
from asyncflow.compiler.program.replacements import Replacements, join_inputs
from asyncflow.graph.graph import Graph
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.structured import StructuredNode
from asyncflow.graph.values.dtypes import string
from asyncflow.graph.values.spec import Spec
from asyncflow.values import Array

_LARGEST = 64 * 1024
"""Bytes of an array among the attributes; comparing larger ones costs more than it is likely to gain."""


class _Unhashable(Exception):
    """An attribute is not plain data that can be compared."""


def eliminate_common_subexpressions(graph: Graph) -> None:
    """Joins nodes of `graph`, and of each of its bodies, in place."""
    seen: dict[Hashable, Node] = {}
    replaced = Replacements()
    kept: list[Node] = []
    for node in graph.nodes:
        if replaced.tensors:
            replaced.apply(node)
        if isinstance(node, StructuredNode):
            _join_captures(node)
            for body in node.subgraphs:
                eliminate_common_subexpressions(body)
        elif node.op.is_pure and node.outputs:
            first = _first(node, seen)
            if first is not node:
                replaced.nodes[node] = first
                replaced.tensors.update(zip(node.outputs, first.outputs, strict=True))
                continue
        kept.append(node)
    if len(kept) < len(graph.nodes):
        replaced.apply_to_results(graph)
        graph.nodes[:] = kept


def _first(node: Node, seen: dict[Hashable, Node]) -> Node:
    try:
        attrs = _attrs_key(node)
    except _Unhashable:
        return node
    # By their ids: `==` of tensors builds a node.
    key = (node.op, *map(id, node.inputs), attrs, node.device, node.colocated_with, *node.control_inputs)
    first = seen.setdefault(key, node)
    return node if first is not node and has_variants((*node.inputs, *node.outputs)) else first


def _join_captures(node: StructuredNode) -> None:
    """Makes the bodies see each outer tensor once."""
    first: dict[Tensor, int] = {}
    places = enumerate(node.captures, start=node.first_capture)
    join_inputs(node, {place: same for place, outer in places if (same := first.setdefault(outer, place)) != place})


def _attrs_key(node: Node) -> Hashable:
    """Return a key that is equal for nodes with equal attributes only; raises `_Unhashable` for attributes that are
    no plain data.
    """
    return tuple([(name, _key(value)) for name, value in node.attrs.items()]) if node.attrs else ()


_PLAIN = frozenset({int, bool, str, bytes, type(None), type(...), type, Spec})


def _key(value: Any) -> Hashable:
    """`value` as something that is equal for equal values of one type: not for 1 and True, nor for 0.0 and -0.0."""
    kind = type(value)
    if kind is np.ndarray:
        return _array_key(value)
    if kind in _PLAIN or isinstance(value, np.dtype):
        return kind, value
    if kind in (float, complex):
        return kind, np.asarray(value).tobytes()
    if kind in (tuple, list):
        return kind, *[_key(item) for item in value]
    if kind is slice:
        return kind, _key(value.start), _key(value.stop), _key(value.step)
    if isinstance(value, np.generic):
        return kind, value.dtype, value.tobytes()
    raise _Unhashable(f"{kind.__name__} {value!r}")


def _array_key(value: Array) -> Hashable:
    if value.nbytes > _LARGEST or value.dtype.kind == "O":
        raise _Unhashable(f"an array of {value.nbytes} bytes")
    if value.dtype == string:
        return string, value.shape, tuple(value.ravel().tolist())
    # Rounding of sums and products depends on memory order: equal values with other strides differ.
    return value.dtype, value.shape, value.strides, value.tobytes()
