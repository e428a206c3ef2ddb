"""Contributions of the parts of a vertex function to its speed: parts left out one by one (Cavs, fig. 10), and kinds of
work.

*All in the loop* leaves eager and lazy operations in the sets, *without regions* has each operation called by the
executor, *without batched products* leaves gradients of weights in the loop, *two streams* cuts the batch in
two, whose loops overlap. `work_kinds` has the kinds of work (tables 1 and 3).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from benchmarks import work_kinds
from benchmarks.harness import ASYNCFLOW, Result, Trial, compare
from benchmarks.peers import JAX, NO_PEERS, NUMPY, Peers
from benchmarks.plots import draw_bars
from benchmarks.trees import STEP, timed_sample
from benchmarks.vertex_models import BY_LEVEL, BY_NODE, MODELS, SIZES, TOLERANCE, Sizes, case, peer_works

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

NAME: Final = "vertex_parts"
VARIANTS: Final[dict[str, dict[str, Any]]] = {
    ASYNCFLOW: {},
    f"{ASYNCFLOW}, all in the loop": {"lift_parts": False},
    f"{ASYNCFLOW}, without regions": {"regions": False},
    f"{ASYNCFLOW}, without batched products": {"without": ["batch_loops"]},
    f"{ASYNCFLOW}, two streams": {"streams": 2, "compute_streams": 2},
}


async def measure(
    peers: Peers = NO_PEERS,
    *,
    repeats: int = 3,
    models: Sequence[str] = MODELS[1:],
    batch: int = 16,
    hidden: int = 256,
    sizes: Sizes = SIZES,
) -> list[Result]:
    """Measure us a sample with parts left out, and ms of each kind of work.

    Args:
        peers: whose kinds of work are measured as well; DyNet does not tell them apart.
        repeats: measured trials of each variant.
        models: some models of `vertex_models`.
        batch: samples.
        hidden: extent.
        sizes: of the models.
    """
    results: list[Result] = []
    for model in models:
        ours = {name: sizes.ours(model, batch, hidden, **options) for name, options in VARIANTS.items()}
        trials = {name: timed_sample(batch, each.step) for name, each in ours.items()}
        plain = {
            name: sizes.ours(model, batch, hidden, regions=False, **options)
            for name, options in list(VARIANTS.items())[:2]
        }
        kinds = {name: work_kinds.of_asyncflow(each) for name, each in plain.items()}
        kinds |= _peers_kinds(peers, sizes, model, batch, hidden)
        try:
            named = case(model, batch, hidden)
            results += await compare(NAME, named, trials, repeats=repeats, lead_ins=1, tolerance=TOLERANCE)
            results += await compare(NAME, named, kinds, repeats=repeats, lead_ins=1)
        finally:
            for each in (*ours.values(), *plain.values()):
                await each.session.aclose()
    return results


def _peers_kinds(peers: Peers, sizes: Sizes, model: str, batch: int, hidden: int) -> dict[str, Trial]:
    works = peer_works(peers, sizes.samples(model, batch, hidden), sizes)
    by_hand = peer_works(NO_PEERS, sizes.samples(model, batch, hidden), sizes)[NUMPY]
    timed: dict[str, Callable[[Any], Iterable[tuple[str, float]]]] = {
        JAX: partial(work_kinds.of_jax, peers.jax),
        BY_LEVEL: partial(work_kinds.of_torch, peers.torch),
        BY_NODE: partial(work_kinds.of_torch, peers.torch),
    }
    kinds = {name: work_kinds.trial_of(partial(of, works[name])) for name, of in timed.items() if name in works}
    return {NUMPY: work_kinds.trial_of(partial(work_kinds.of_numpy, work_kinds.with_timed_arrays(by_hand))), **kinds}


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
