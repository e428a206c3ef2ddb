"""Time to order the vertices of a batch (Cavs, fig. 9): by batch and by size of the graph, and beside a step.

*schedule* is the host op that runs in each step: it checks the arrays, finds sets and ranks. *batch* is what a user
calls before: it joins the graphs of a batch. *make* comes once for each graph: it looks for cycles, and finds heights,
which a schedule has only to sort; where heights are not fed, it finds them. DyNet's figure is the time to build its
graph, which takes the place of all. Its search for equal work is part of its computation, and not in the figure.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import numpy as np

import asyncflow as af
from asyncflow.vertex.schedule import SCHEDULE
from benchmarks import tree_peers
from benchmarks.harness import ASYNCFLOW, Figure, Result, Sample, Trial, compare
from benchmarks.peers import NO_PEERS, Peers
from benchmarks.plots import Chart, draw_charts
from benchmarks.results import curves_of
from benchmarks.sequences import Sequences
from benchmarks.trees import TreeFcByHand
from benchmarks.vertex_models import MODELS, SIZES, Sizes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from benchmarks.simulation import Curve

NAME: Final = "scheduling"
SCHEDULE_TIME: Final = Figure("schedule", "us")
BATCH_TIME: Final = Figure("batch", "us")
MAKE_TIME: Final = Figure("make", "us")
SHARE: Final = Figure("schedule, of a training step", "%")
SORTS: Final = "numpy, one sort of as many bytes"
WITHOUT_HEIGHTS: Final = "asyncflow, heights not known"
DYNET_GRAPH: Final = "dynet, building the graph"
BATCHES: Final = (1, 16, 32, 64, 128, 256)
_MANY: Final = 20
"""Calls in one trial."""


async def measure(
    peers: Peers = NO_PEERS,
    *,
    repeats: int = 5,
    models: Sequence[str] = MODELS,
    batches: Sequence[int] = (1, 16),
    hiddens: Sequence[int] = (64,),
    vertices: Sequence[int] = (1_000, 10_000, 100_000),
    depth: int = 50,
    sizes: Sizes = SIZES,
) -> list[Result]:
    """us a batch, and % of a training step.

    Args:
        peers: of which DyNet takes part.
        repeats: measured trials.
        models: whose batches are ordered.
        batches: samples in them.
        hiddens: extents of the training steps that are compared with.
        vertices: of one random tree each.
        depth: of these.
        sizes: of the models.
    """
    results: list[Result] = []
    for size in vertices:
        case = f"random tree of depth {depth}, {size} vertices"
        numbers = np.random.default_rng(0).integers(0, depth, size).astype(np.uint8)
        tree = random_tree(size, depth)
        trials = {
            ASYNCFLOW: _timed(SCHEDULE_TIME, _scheduling(tree, None)),
            WITHOUT_HEIGHTS: _timed(SCHEDULE_TIME, _scheduling(tree, None, known=())),
            SORTS: _timed(SCHEDULE_TIME, partial(np.argsort, numbers, kind="stable")),
        }
        results += await compare(NAME, case, trials, repeats=repeats, baselines=[SORTS])
        making = {ASYNCFLOW: _timed(MAKE_TIME, partial(replace, tree, heights=None))}
        results += await compare(NAME, case, making, repeats=repeats)
    for model in models:
        for batch in batches:
            graphs, arity = _graphs(sizes, model, batch)
            case = f"{model}, batch {batch}"
            together = af.InputGraph.batch(graphs)
            trials = {
                ASYNCFLOW: _timed(SCHEDULE_TIME, _scheduling(together, arity)),
                WITHOUT_HEIGHTS: _timed(SCHEDULE_TIME, _scheduling(together, arity, known=())),
            }
            if peers.dynet is not None and model == "Tree-FC":
                trials[DYNET_GRAPH] = _timed(SCHEDULE_TIME, _building(sizes, peers.dynet, batch), calls=2)
            results += await compare(NAME, case, trials, repeats=repeats)
            joining = {ASYNCFLOW: _timed(BATCH_TIME, partial(af.InputGraph.batch, graphs))}
            results += await compare(NAME, case, joining, repeats=repeats)
            for hidden in hiddens:
                results += await _share(model, batch, hidden, sizes, repeats)
    return results


def random_tree(size: int, depth: int) -> af.InputGraph:
    """Return a tree of `depth` levels; the parent of each vertex is any of the level above."""
    random = np.random.default_rng(0)
    levels = np.sort(np.concatenate([np.arange(depth), random.integers(1, depth, size - depth)]))
    starts = np.searchsorted(levels, np.arange(depth + 1))
    parents = random.integers(starts[np.maximum(levels - 1, 0)], np.maximum(starts[levels], 1))
    parents[0] = -1
    return af.InputGraph.from_parents(parents)


def _graphs(sizes: Sizes, model: str, batch: int) -> tuple[list[af.InputGraph], int | None]:
    """The graphs of a batch, and the arity of the model."""
    samples = sizes.samples(model, batch, 1)
    if isinstance(samples, Sequences):
        return [af.InputGraph.chain([length]) for length in samples.lengths], 1
    return list(samples.trees.graph), 2 if model == "Tree-FC" else None


def _building(sizes: Sizes, dy: Any, batch: int) -> Callable[[], Any]:
    """Builds the graph of Tree-FC in DyNet."""
    trees, by_hand = sizes.trees("Tree-FC", batch, 64)
    assert isinstance(by_hand, TreeFcByHand)
    return tree_peers.dynet_graph(dy, trees, by_hand)


def _scheduling(graph: af.InputGraph, arity: int | None, known: tuple[str, ...] = ("heights",)) -> Callable[[], Any]:
    assert SCHEDULE.kernel is not None
    kernel = SCHEDULE.kernel(np, policy="breadth_first", arity=arity, n_types=None, known=known)
    arrays = [getattr(graph, name) for name in ("offsets", "children", "samples", *known)]
    return lambda: kernel(*arrays)


def _timed(figure: Figure, work: Callable[[], Any], calls: int = _MANY) -> Trial:
    async def trial() -> Sample:
        started = perf_counter()
        for _ in range(calls):
            work()
        return Sample({figure: (perf_counter() - started) * 1e6 / calls})

    return trial


async def _share(model: str, batch: int, hidden: int, sizes: Sizes, repeats: int) -> list[Result]:
    """The share of scheduling in a training step; both are measured next to each other."""
    graphs, arity = _graphs(sizes, model, batch)
    ours = sizes.ours(model, batch, hidden)
    schedule = _scheduling(af.InputGraph.batch(graphs), arity)

    async def trial() -> Sample:
        started = perf_counter()
        for _ in range(_MANY):
            schedule()
        scheduled = perf_counter()
        await ours.step()
        taken = perf_counter() - scheduled
        return Sample({SHARE: (scheduled - started) / _MANY / taken * 100})

    try:
        case = f"{model}, batch {batch}, hidden {hidden}"
        return await compare(NAME, case, {ASYNCFLOW: trial}, repeats=repeats, lead_ins=1)
    finally:
        await ours.session.aclose()


def draw(results: Sequence[Result], folder: Path) -> list[Path]:
    """Time of scheduling by batch."""
    curves: dict[str, Curve] = {}
    for model in MODELS:
        found = curves_of(results, SCHEDULE_TIME, {batch: f"{model}, batch {batch}" for batch in BATCHES})
        curves |= {f"{model}{'' if name == ASYNCFLOW else f', {name}'}": curve for name, curve in found.items()}
    if not curves:
        return []
    chart = Chart(title="ordering the vertices of a batch", x="batch", y="us", curves=curves, is_log=True)
    return [draw_charts(folder / f"{NAME}.png", [chart])]
