"""Nodes of a loop that its last iteration needs, apart from nodes that only make variables for a further one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from asyncflow.graph.builtin import CONSTANT, IDENTITY, NO_OP, PARAMETER
from asyncflow.graph.graph import Subgraph, has_side_effect
from asyncflow.graph.ir import Node
from asyncflow.graph.structured import WhileNode

SILENT: Final = (CONSTANT, PARAMETER, NO_OP)
"""Ops that leave no line in the source."""


def only_node(condition: Subgraph) -> Node | None:
    """The one node that computes a predicate; None: there are several, or none."""
    working = [n for n in condition.nodes if n.op not in (CONSTANT, PARAMETER, NO_OP)]
    is_only = len(working) == 1 and working[0] is condition.results[0].node
    return working[0] if is_only and working[0].op.kernel is not None and working[0].op is not IDENTITY else None


def needed_to_end(loop: WhileNode, kept: Iterable[int]) -> tuple[list[Node], list[Node]]:
    """Return the nodes of a body that its last iteration needs, and the nodes that only make variables for a further
    one.

    `kept` are the variables read after the loop. Effects, and what users wrote, are not left out.
    """
    body, decided = loop.body, {x for node in loop.predicate.nodes for x in node.inputs}
    places = {*kept, *(place for place, x in enumerate(loop.predicate.inputs[: loop.n_vars]) if x in decided)}
    wanted = [body.results[place].node for place in places]
    wanted += [node for node in body.nodes if has_side_effect(node) or node.op.conduct.is_user or node.subgraphs]
    needed: set[Node] = set()
    while wanted:
        node = wanted.pop()
        if node not in needed:
            needed.add(node)
            wanted += node.sources
    for_next = [node for node in body.nodes if node not in needed and node.op not in SILENT]
    return [node for node in body.nodes if node in needed or node.op in SILENT], for_next
