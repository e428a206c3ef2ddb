"""What each part of a vertex function's speed is from: parts left out one by one (Cavs, fig. 10), and kinds of work.

*All in the loop* leaves eager and lazy operations in the sets, *without regions* has each operation called by the
executor, *without batched products* leaves gradients of weights in the loop, *two streams* cuts the batch in
two, whose loops overlap. Kinds of work (tables 1 and 3) are read off the trace of a step without regions, in
which each operation is timed by itself: *products*, other *arithmetic*, and *memory*, which moves rows and computes
nothing but sums of gradients.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

import asyncflow as af
from benchmarks import sequences
from benchmarks.harness import ASYNCFLOW, Figure, Result, Sample, Trial, compare
from benchmarks.peers import NO_PEERS, Peers
from benchmarks.plots import draw_bars
from benchmarks.trees import OfAsyncflow, tree_fc, tree_lstm
from benchmarks.vertex_models import MODELS, STEP, TOLERANCE, case, of_trees, timed_sample

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from benchmarks.lstm import Step

NAME: Final = "vertex_parts"
VARIANTS: Final[dict[str, dict[str, Any]]] = {
    ASYNCFLOW: {},
    f"{ASYNCFLOW}, all in the loop": {"lift_parts": False},
    f"{ASYNCFLOW}, without regions": {"regions": False},
    f"{ASYNCFLOW}, without batched products": {"without": ["batch_loops"]},
    f"{ASYNCFLOW}, two streams": {"streams": 2, "compute_streams": 2},
}
PRODUCTS: Final = frozenset({"matmul", "add_products", "sums", "pending_sums", "row_ahead", "rows_ahead"})
MEMORY: Final = frozenset(
    {
        "add_parts",
        "add_row_gradients",
        "concat",
        "part_of_sum",
        "reduce_segments",
        "row_gradients",
        "row_store",
        "row_store_append",
        "row_store_slice",
        "row_store_take",
        "scatter_to",
        "spread_segments",
        "take",
    }
)
SCHEDULING: Final = frozenset({"schedule", "check_rows"})
WORK: Final = {kind: Figure(f"{kind}, a step", "ms") for kind in ("products", "arithmetic", "memory", "scheduling")}
CALLS: Final = {kind: Figure(f"{kind}, calls a step", "") for kind in WORK}


async def measure(
    peers: Peers = NO_PEERS,
    *,
    repeats: int = 3,
    models: Sequence[str] = MODELS[1:],
    batch: int = 16,
    hidden: int = 256,
    leaves: int = 256,
    steps: int = 60,
    files: int = 60,
) -> list[Result]:
    """us a sample with parts left out, and ms of each kind of work.

    Args:
        peers: none takes part.
        repeats: measured trials of each variant.
        models: some of those of `vertex_models`.
        batch: samples.
        hidden: extent.
        leaves: of each tree of Tree-FC.
        steps: most of Var-LSTM.
        files: how many files of the library syntax trees come from.
    """
    results: list[Result] = []
    for model in models:

        def step(model: str = model, **options: Any) -> _Step:
            return _Step(model, batch, hidden, leaves=leaves, steps=steps, files=files, **options)

        ours = {name: step(**options) for name, options in VARIANTS.items()}
        trials: dict[str, Trial] = {name: timed_sample(batch, each.run) for name, each in ours.items()}
        traced = {name: step(regions=False, **options) for name, options in list(VARIANTS.items())[:2]}
        kinds: dict[str, Trial] = {name: each.kinds for name, each in traced.items()}
        try:
            named = case(model, batch, hidden)
            results += await compare(NAME, named, trials, repeats=repeats, lead_ins=1, tolerance=TOLERANCE)
            results += await compare(NAME, named, kinds, repeats=repeats, lead_ins=1)
        finally:
            for each in (*ours.values(), *traced.values()):
                await each.session.aclose()
    return results


class _Step:
    """A training step of one of the models."""

    def __init__(
        self, model: str, batch: int, hidden: int, *, leaves: int, steps: int, files: int, **options: Any
    ) -> None:
        options.setdefault("lift_parts", True)
        if model.startswith("Tree"):
            trees, _ = of_trees(model, batch, hidden, leaves=leaves, files=files)
            ours = OfAsyncflow(trees, tree_fc(hidden) if model == "Tree-FC" else tree_lstm(hidden), **options)
            self.session, self._run = ours.session, (ours.loss, ours.grads)
            self._feeds = ours.feeds
        else:
            each = sequences.OfVertices(sequences.sequences(batch, hidden, min(5, steps), steps), **options)
            self.session, self._run, self._feeds = each.session, each.fetches, each.feeds

    async def run(self) -> tuple[Any, ...]:
        """The loss, and its gradients of the weights."""
        step: Step = await self.session.run(self._run, self._feeds)
        return step[0], *step[1]

    async def kinds(self) -> Sample:
        """The time of each kind of work, and how many calls it takes."""
        trace = af.Trace()
        await self.session.run(self._run, self._feeds, trace=trace)
        figures: dict[Figure, float] = defaultdict(float)
        for firing in trace.firings:
            kind = _kind(firing.op)
            figures[WORK[kind]] += firing.computing_ns / 1e6
            figures[CALLS[kind]] += 1
        return Sample({figure: figures[figure] for figure in (*WORK.values(), *CALLS.values())})


def _kind(op: str) -> str:
    for kind, ops in (("products", PRODUCTS), ("memory", MEMORY), ("scheduling", SCHEDULING)):
        if op in ops:
            return kind
    return "arithmetic"


def draw(results: Sequence[Result], folder: Path) -> list[Path]:
    """A bar for each variant."""
    paths = []
    for model in MODELS:
        found = [each for each in results if each.figure == STEP and each.case.startswith(f"{model}, ")]
        if found:
            bars = {each.system: (each.median, each.worst, each.best) for each in found}
            name = f"{NAME}_{model.lower().replace('-', '_')}.png"
            paths.append(draw_bars(folder / name, found[0].case, "us a sample", bars))
    return paths
