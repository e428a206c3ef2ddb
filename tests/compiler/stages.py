"""A graph after each of the compiler's passes, as text. Every pass must leave a sound graph."""

from __future__ import annotations

from textwrap import dedent
from typing import TYPE_CHECKING, Any

import asyncflow as af
from asyncflow.compiler.lowering.lower import lower
from asyncflow.compiler.program.extract import extract
from asyncflow.compiler.program.order_effects import order_effects
from asyncflow.compiler.regions.regions import make_regions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from asyncflow.graph.graph import Graph


def extracted(
    graph: Graph, fetches: Sequence[Any], *, streamed: Sequence[af.Tensor] = (), all_effects: bool = False
) -> str:
    """After `extract`, with all placeholders fed."""
    return _text(_extracted(graph, fetches, streamed=streamed, all_effects=all_effects))


def optimized(graph: Graph, fetches: Sequence[Any], *passes: Callable[[Graph], None]) -> str:
    """After `extract` and these optimisations."""
    copied = _extracted(graph, fetches)
    for run in passes:
        run(copied)
        af.verify(copied)
    return _text(copied)


def ordered(graph: Graph, fetches: Sequence[Any]) -> str:
    """After `extract` and `order_effects`."""
    return _text(_ordered(graph, fetches))


def lowered(graph: Graph, fetches: Sequence[Any]) -> str:
    """After all passes, without regions."""
    return _text(lower(_ordered(graph, fetches)).graph)


def regions_made(graph: Graph, fetches: Sequence[Any], *, streamed: Sequence[af.Tensor] = ()) -> Graph:
    """The graph after `make_regions`; a region has no text of its own."""
    made = _ordered(graph, fetches, streamed=streamed)
    make_regions(made)
    af.verify(made)
    return made


def _extracted(graph: Graph, fetches: Sequence[Any], **options: Any) -> Graph:
    before, version = af.print_graph(graph), graph.version
    feeds = [node.outputs[0] for node in graph.nodes if node.op.name == "placeholder"]
    copied = extract(graph, fetches, feeds, **options).graph
    assert (af.print_graph(graph), graph.version) == (before, version), "the user's graph is never changed"
    return copied


def _ordered(graph: Graph, fetches: Sequence[Any], **options: Any) -> Graph:
    copied = _extracted(graph, fetches, **options)
    af.verify(copied)
    order_effects(copied)
    af.verify(copied)
    return copied


def _text(graph: Graph) -> str:
    """The nodes, without the header; what one writes on one line in a test may be long."""
    af.verify(graph)
    _, _, nodes = af.print_graph(graph).partition("\n\n")
    return nodes.replace(", parallel_iterations=32", "").replace(", swap_memory=false", "").strip()


def golden(text: str) -> str:
    """An expected text as written in a test: indented, with line breaks around it."""
    return dedent(text).strip()
