"""Copies small parts of large arrays that a loop keeps, so that the arrays can be freed.

A view keeps all of its array in memory. A loop that carries ``big[-1]`` and saves it for a gradient would hold the
whole of ``big`` in each iteration. So where the parts that a loop keeps of an array are at most half of it, each part
is copied; the copy is saved and carried on. Nothing is copied if the loop saves the array itself. Nor is it if the
parts together are most of the array, as the gates of a cell are.
"""

from __future__ import annotations

from collections import defaultdict

from asyncflow.compiler.memory.saved import buffer_of, is_shared
from asyncflow.compiler.memory.store_paths import stores_of
from asyncflow.compiler.program.detached import detached_node
from asyncflow.graph.builtin import PARAMETER
from asyncflow.graph.ir import Tensor
from asyncflow.graph.structured import CondNode, WhileNode
from asyncflow.graph.values.shapes import size_of
from asyncflow.ops.arithmetic.elementwise import POSITIVE

_LEAST = 4096
"""Bytes of an array that must go with a copy: it takes a kernel of its own."""


def copy_parts(loop: WhileNode) -> None:
    """Copy parts of arrays that `loop` saves or carries, in place, if it saves values."""
    saves = {store.save: store.value for store in stores_of(loop)}
    if not saves:
        return
    body, variables = loop.body, dict(loop.carried)
    saved = set(saves.values())
    parts: dict[Tensor, set[Tensor]] = defaultdict(set)
    for value in (*saved, *variables.values()):
        array = buffer_of(value, variables)
        if value.node.op is not PARAMETER and value.node.graph is body and not is_shared(array, loop):
            parts[array].add(value)
    whole = {buffer_of(x, variables) for x in saved if _nbytes(x) == _nbytes(buffer_of(x, variables))}
    copies: dict[Tensor, Tensor] = {}
    for array, found in parts.items():
        total = _nbytes(array)
        if array in whole or total < max(2 * sum(map(_nbytes, found)), _LEAST) or not all(map(_may_be_copied, found)):
            continue
        copies.update((part, _copied(part)) for part in found)
    for save, value in saves.items():
        save.inputs[2] = copies.get(value, value)
    body.results[:] = [copies.get(x, x) for x in body.results]
    for value in dict.fromkeys((*saved, *variables.values())):
        if isinstance(value.node, CondNode):
            _copy_results(value.node, value.index, loop)


def _copy_results(node: CondNode, place: int, loop: WhileNode) -> None:
    """Copy what branches in a loop give where that is a small part of an array, in place."""
    for branch in node.subgraphs:
        result = branch.results[place]
        if isinstance(result.node, CondNode):
            _copy_results(result.node, result.index, loop)
            continue
        array = buffer_of(result, {})
        outside = node.captured(branch).get(array)
        if result is array or (outside is not None and is_shared(outside, loop)) or not _may_be_copied(result):
            continue
        if _nbytes(array) >= max(2 * _nbytes(result), _LEAST):
            branch.results[place] = _copied(result)


def _copied(part: Tensor) -> Tensor:
    """Return a copy of a value, which stands behind it."""
    graph = part.node.graph
    node = detached_node(graph, POSITIVE, [part], {}, part.node, part.spec)
    graph.nodes.insert(graph.nodes.index(part.node) + 1, node)
    return node.outputs[0]


def _may_be_copied(value: Tensor) -> bool:
    return value.dtype.kind in "iufc" and size_of(value.shape) is not None


def _nbytes(value: Tensor) -> int:
    """Return the bytes of a value; 0 if only a run knows them."""
    return (size_of(value.shape) or 0) * value.dtype.itemsize
