"""The passes that make a structured graph smaller without changing what it computes, in order."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from asyncflow.compiler.batching.batch_loops import batch_loops
from asyncflow.compiler.optimize.cse import eliminate_common_subexpressions
from asyncflow.compiler.optimize.fold import fold
from asyncflow.compiler.optimize.hoist import hoist
from asyncflow.compiler.optimize.loop_variables import reduce_loop_variables
from asyncflow.compiler.optimize.prune import prune
from asyncflow.compiler.optimize.simplify import simplify
from asyncflow.compiler.program.frames import has_primitives
from asyncflow.graph.verify import verify

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from asyncflow.graph.graph import Graph
    from asyncflow.graph.ir import Node


def optimize(
    graph: Graph,
    *,
    keep: Collection[Node],
    on_host: bool,
    check_numerics: bool,
    debug: bool,
    block_bytes: int | None = None,
) -> None:
    """Runs the passes on a private copy of a graph, in place, before its effects are ordered.

    A graph with primitives written by hand is left as it is.

    Args:
        graph: from `extract`.
        keep: nodes that the run was asked to run.
        on_host: the plan will run on the CPU, so folding on it gives the same bits.
        check_numerics: runs fail on NaN and infinity: a value that is not used must not be computed either.
        debug: verify the graph after every pass.
        block_bytes: batch products over the iterations of loops, in blocks of at most so many bytes; None: do not.
    """
    if has_primitives(graph.walk()):
        return
    passes: list[Callable[[Graph], None]] = [reduce_loop_variables]
    if on_host:
        passes.append(fold)
    passes += [simplify, eliminate_common_subexpressions]
    if not check_numerics:
        passes.append(hoist)
        if block_bytes is not None:
            passes.append(partial(batch_loops, block_bytes=block_bytes))
    passes.append(partial(prune, keep=keep))
    for run in passes:
        run(graph)
        if debug:
            verify(graph)
