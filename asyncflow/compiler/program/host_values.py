"""Pass: finds the values that are certainly on the host, if devices have a memory of their own.

A kernel whose inputs are all on the host and whose outputs have rank 0 is computed there, by NumPy: counters,
predicates and learning rates cost no launch, and a loop that decides by them needs not wait for its device. The run
finds the same again, by looking at the values; here it is found beforehand, for decisions of the compiler.

Vectors of integers are there if a pass keeps them there (`host_vectors.py`), and shapes are. The code of a region takes
all other arrays for the device's. Some come as vectors of the host all the same, such as a mask that a CPU has made:
they are copied in where the region begins. A branch or loop in which the one meets the other is no part of a region.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from typing import TypeAlias

from asyncflow.autodiff.stores.checkpoints import CHECKPOINT, SAVE_FIRST, SEGMENT_STORE
from asyncflow.autodiff.stores.saved_values import MOVING_STORE, NEW_STORE, READ_SAVED, SAVE
from asyncflow.compiler.program.extract import FEED
from asyncflow.compiler.program.purity import has_variants
from asyncflow.control.primitives.loop_cond import LOOP_COND
from asyncflow.graph.builtin import CONSTANT, IDENTITY, PARAMETER
from asyncflow.graph.facts import MOVE
from asyncflow.graph.graph import Graph, Subgraph
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import Memory, host_inputs, runs_on_host
from asyncflow.graph.structured import CondNode, StructuredNode, WhileNode
from asyncflow.graph.values.dtypes import VARIANT
from asyncflow.graph.values.spec import Spec

STORES = frozenset({NEW_STORE, MOVING_STORE, SAVE, CHECKPOINT, SAVE_FIRST, SEGMENT_STORE, READ_SAVED})
"""Ops of stores, which return saved values unchanged: a number that the host has counted stays there."""

NUMBERS = "biufc"
"""Kinds of dtype whose values of rank 0 are NumPy scalars on the host."""


def is_metadata(node: Node) -> bool:
    """Return True if the node reads shape and dtype of its input without the data."""
    return node.op.traits.memory is Memory.METADATA


def is_scalar_spec(spec: Spec) -> bool:
    """Return True if values of this spec are numbers of rank 0."""
    return spec.shape == () and spec.dtype.kind in NUMBERS


def may_stay_on_host(node: Node) -> bool:
    """Return True if the node is computed on the host when its inputs are there."""
    if not MOVE.allows(node.op):
        return False
    if any(tensor.spec.dtype == VARIANT for tensor in node.inputs):
        return False
    return bool(node.outputs) and all(is_scalar_spec(tensor.spec) for tensor in node.outputs)


def computes_on_host(node: Node, found: AbstractSet[Tensor]) -> bool:
    """Return True if the host computes the node, as it has all inputs."""
    if not all(tensor in found for tensor in node.inputs):
        return False
    return may_stay_on_host(node) or keeps_on_host(node, found)


def keeps_on_host(node: Node, found: AbstractSet[Tensor]) -> bool:
    """Return True if the node computes integers alone, and the host is to have all of them, vectors too."""
    if not node.outputs or not MOVE.allows(node.op) or node.op.kernel is None or runs_on_host(node):
        return False
    if has_variants(node.inputs):
        return False
    return all(x in found and x.dtype.kind in "biu" for x in node.outputs)


def finds_its_inputs(node: Node, found: AbstractSet[Tensor]) -> bool:
    """Return True if no input of a node on a card has to be copied to or from the host."""
    read = host_inputs(node)
    for index, tensor in enumerate(node.inputs):
        if index in read:
            is_mask = tensor.shape != () and tensor.dtype.kind == "b"  # masks are copied in, to find true positions
            is_found = tensor in found and not is_mask
        else:
            is_found = tensor not in found or tensor.shape == ()
        if not is_found:
            return False
    return True


def may_be_host_vector(spec: Spec) -> bool:
    """Return True if a value of this spec may be on the host unnoticed: a short vector of integers.

    Devices leave such a one where it was made, since it may be a shape.
    """
    return spec.dtype.kind in "biu" and (spec.shape is None or len(spec.shape) == 1)


def mixes_vectors(node: Node, found: AbstractSet[Tensor]) -> bool:
    """Return True if a branch or loop returns a vector that is sometimes on the host, and sometimes on the device.

    Args:
        node: any.
        found: what `find_host_values` has found.
    """
    if isinstance(node, CondNode):
        places = zip(node.outputs, *(branch.results for branch in node.subgraphs), strict=True)
    elif isinstance(node, WhileNode):
        places = zip(node.body.inputs, node.inputs, node.body.results, strict=False)
    else:
        return False
    return any(
        place not in found and any(value in found and value.shape != () for value in values)
        for place, *values in places
    )


Kept: TypeAlias = "Callable[[Node, AbstractSet[Tensor]], Iterable[Tensor]]"
"""Gives the outputs of a node, no branch or loop, that a pass keeps on the host, given the tensors found there."""


def keeping(kept: AbstractSet[Tensor]) -> Kept:
    """Return the rule that keeps these tensors on the host."""
    return lambda node, _: [x for x in node.outputs if x in kept] if kept else ()


_NONE = keeping(frozenset())


def find_host_values(graph: Graph, kept: Kept = _NONE) -> set[Tensor]:
    """Return the tensors of a structured graph, also inside branches and loops, whose values are on the host."""
    found: set[Tensor] = set()
    add_host_values(graph.nodes, found, kept=kept)
    return found


def add_host_values(nodes: Iterable[Node], found: set[Tensor], *, in_buffers: bool = False, kept: Kept = _NONE) -> None:
    """Add the host values among `nodes` to the ones `found` before them.

    In a loop that a device runs, variables and deciding values are `in_buffers` of the device.
    """
    for node in nodes:
        if isinstance(node, CondNode):
            _visit_cond(node, found, in_buffers, kept)
        elif isinstance(node, WhileNode):
            _visit_while(node, found, in_buffers, kept)
        elif is_on_host(node, found):
            found.update(node.outputs)
        else:
            found.update(kept(node, found))
            found.update(node.outputs[place] for place in node.op.traits.host_outputs)


def is_on_host(node: Node, found: AbstractSet[Tensor]) -> bool:
    """Return True if the outputs of a node, no branch or loop, are on the host, given the tensors `found` there."""
    if node.op is CONSTANT or node.op is FEED:
        return is_scalar_spec(node.outputs[0].spec)
    if node.op is PARAMETER:
        return False  # decided where the body is entered
    if node.op is IDENTITY:
        return node.inputs[0] in found
    if node.op is LOOP_COND:
        return True  # the scheduler reads it on the host
    if node.op in STORES:
        # A store counts as on the host while all its saved values are.
        return all(x in found for x in node.inputs) and all(_is_kept(x.spec) for x in node.outputs)
    if is_metadata(node):
        return True
    return computes_on_host(node, found)


def _is_kept(spec: Spec) -> bool:
    return spec.dtype == VARIANT or is_scalar_spec(spec)


def _visit_cond(node: CondNode, found: set[Tensor], in_buffers: bool, kept: Kept) -> None:
    for branch in node.subgraphs:
        found.update(captured_on_host(node, branch, found))
        add_host_values(branch.nodes, found, in_buffers=in_buffers, kept=kept)
    if not in_buffers or node.predicate in found:
        results = zip(node.outputs, *(branch.results for branch in node.subgraphs), strict=True)
        found.update(output for output, *each in results if all(result in found for result in each))


def _visit_while(node: WhileNode, found: set[Tensor], in_buffers: bool, kept: Kept) -> None:
    # A variable is on the host if it starts there, and no iteration moves it.
    stay = [tensor in found and not in_buffers for tensor in node.inputs[: node.n_vars]]
    while True:
        inside = set(found)
        for part in node.subgraphs:
            inside.update(captured_on_host(node, part, found))
            inside.update(variable for variable, stays in zip(part.inputs, stay, strict=False) if stays)
            add_host_values(part.nodes, inside, in_buffers=in_buffers, kept=kept)
        after = [stays and result in inside for stays, result in zip(stay, node.body.results, strict=False)]
        if after == stay:
            break
        stay = after
    found |= inside
    found.update(output for output, stays in zip(node.outputs, stay, strict=False) if stays)


def captured_on_host(node: StructuredNode, body: Subgraph, found: AbstractSet[Tensor]) -> list[Tensor]:
    """The inputs of a body that stand for captures on the host."""
    return [inner for inner, outer in node.captured(body).items() if outer in found]
