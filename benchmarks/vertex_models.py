"""Training steps of Cavs' four models (ATC '18, fig. 8), by batch size and by hidden extent, beside the peers.

asyncflow runs a vertex function, declared over one vertex. *By level* is written by hand, knowing how to cut the batch;
*by node* is the first version of most programs, and DyNet batches it by itself. Figures are for one sample: a sequence
or a tree.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from benchmarks import sequences, tree_peers
from benchmarks.harness import ASYNCFLOW, Result, compare
from benchmarks.lstm import AsyncflowStep, Step, comparable, looped
from benchmarks.lstm_by_hand import ByHand
from benchmarks.lstm_peers import jax_scan, torch_loop, torch_module
from benchmarks.peers import DYNET, JAX, NO_PEERS, NUMPY, Peers
from benchmarks.plots import Chart, draw_charts
from benchmarks.ragged_training import sliced
from benchmarks.results import curves_of
from benchmarks.sequences import OfVertices, Sequences
from benchmarks.trees import (
    STEP,
    OfAsyncflow,
    TreeFcByHand,
    TreeLstmByHand,
    batch_of,
    complete,
    timed_sample,
    torch_step,
    tree_fc,
    tree_lstm,
)
from examples.syntax_trees import read_functions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from benchmarks.trees import Trees

NAME: Final = "vertex_models"
MODELS: Final = ("Fixed-LSTM", "Var-LSTM", "Tree-FC", "Tree-LSTM")
BY_LEVEL: Final = "torch by level"
BY_NODE: Final = "torch by node"
TORCH_MODULE: Final = "torch nn.LSTM"
WHILE_LOOP: Final = f"{ASYNCFLOW} while_loop"
DYNAMIC_RNN: Final = f"{ASYNCFLOW} dynamic_rnn"
TOLERANCE: Final = 5e-2
"""Gradients are sums over thousands of vertices, and a `relu` of a value near 0 passes all of it, or nothing."""
BATCHES: Final = (1, 16, 32, 64, 128, 256)
HIDDENS: Final = (64, 128, 256, 512, 1024)
AT: Final = (16, 256)
"""As in the pictures; see `measure`."""


class OfTrees(NamedTuple):
    """A batch for Tree-FC or Tree-LSTM, and its step by hand."""

    trees: Trees
    by_hand: TreeFcByHand | TreeLstmByHand


@dataclass(frozen=True, slots=True)
class Sizes:
    """Common sizes of all batches of the models.

    Attributes:
        steps: of Fixed-LSTM; Var-LSTM has 5 up to this number.
        leaves: of each tree of Tree-FC.
        files: number of files of the library that the syntax trees of Tree-LSTM come from.
        by_node: the most vertices for which systems that go by node take part.
    """

    steps: int = 60
    leaves: int = 256
    files: int = 60
    by_node: int = 8200

    def samples(self, model: str, batch: int, hidden: int) -> OfTrees | Sequences:
        """A batch of a model."""
        return self.trees(model, batch, hidden) if model.startswith("Tree") else self.sequences(model, batch, hidden)

    def trees(self, model: str, batch: int, hidden: int) -> OfTrees:
        """A batch for Tree-FC or Tree-LSTM."""
        if model == "Tree-FC":
            trees = batch_of([complete(self.leaves)] * batch, hidden)
            return OfTrees(trees, TreeFcByHand(trees, hidden))
        functions = [function for part in read_functions(self.files) for function in part]
        chosen = np.random.default_rng(2).choice(len(functions), batch, replace=len(functions) < batch)
        trees = batch_of([functions[place].tree for place in chosen], hidden)
        return OfTrees(trees, TreeLstmByHand(trees, hidden))

    def sequences(self, model: str, batch: int, hidden: int) -> Sequences:
        """A batch for Fixed-LSTM or Var-LSTM."""
        return sequences.sequences(batch, hidden, self.steps if model == MODELS[0] else min(5, self.steps), self.steps)

    def ours(self, model: str, batch: int, hidden: int, **options: Any) -> OfAsyncflow | OfVertices:
        """The vertex function over such a batch."""
        if not model.startswith("Tree"):
            return OfVertices(self.sequences(model, batch, hidden), **options)
        function = tree_fc(hidden) if model == "Tree-FC" else tree_lstm(hidden)
        return OfAsyncflow(self.trees(model, batch, hidden).trees, function, **options)


SIZES: Final = Sizes()


async def measure(
    peers: Peers = NO_PEERS,
    *,
    repeats: int = 3,
    models: Sequence[str] = MODELS,
    batches: Sequence[int] = (1, 16),
    hiddens: Sequence[int] = (64, 256),
    at: tuple[int, int] = AT,
    sizes: Sizes = SIZES,
) -> list[Result]:
    """Measure us a sample.

    Args:
        peers: systems beside NumPy.
        repeats: measured trials of each system.
        models: some of `MODELS`.
        batches: samples.
        hiddens: hidden extents.
        at: the batch by which hidden extents are compared, and the hidden extent by which batches are.
        sizes: of the models.
    """
    results: list[Result] = []
    for model in models:
        for batch, hidden in dict.fromkeys([*((batch, at[1]) for batch in batches), *((at[0], n) for n in hiddens)]):
            samples = sizes.samples(model, batch, hidden)
            ours = sizes.ours(model, batch, hidden)
            works = {ASYNCFLOW: ours.step, **peer_works(peers, samples, sizes)}
            sessions, answer_of = [ours.session], None
            if isinstance(samples, Sequences):
                loops, answer_of = _loops(samples), partial(weights_of, samples)
                works |= {name: loop.run for name, loop in loops.items()}
                sessions += [loop.session for loop in loops.values()]
            trials = {name: timed_sample(batch, work, answer_of) for name, work in works.items()}
            try:
                results += await compare(
                    NAME, case(model, batch, hidden), trials, repeats=repeats, lead_ins=1, tolerance=TOLERANCE
                )
            finally:
                for session in sessions:
                    await session.aclose()
    return results


def case(model: str, batch: int, hidden: int) -> str:
    """The name of a case."""
    return f"{model}, batch {batch}, hidden {hidden}"


# -- systems ---------------------------------------------------------------------------------------------------------


def peer_works(peers: Peers, samples: OfTrees | Sequences, sizes: Sizes = SIZES) -> dict[str, Callable[[], Any]]:
    """A training step in NumPy and in each of the peers that take part."""
    if isinstance(samples, Sequences):
        return _sequence_works(peers, samples, many=len(samples.rows) > sizes.by_node)
    return _tree_works(peers, *samples, many=len(samples.trees.xs) > sizes.by_node)


def _tree_works(peers: Peers, trees: Trees, by_hand: Any, *, many: bool) -> dict[str, Callable[[], Any]]:
    is_fc = isinstance(by_hand, TreeFcByHand)
    works: dict[str, Callable[[], Any]] = {NUMPY: by_hand.step}
    if (torch := peers.torch) is not None:
        works[BY_LEVEL] = torch_step(torch, trees, by_hand)
        if not many:
            by_node: Callable[..., Any] = tree_peers.torch_by_node if is_fc else tree_peers.torch_lstm_by_node
            works[BY_NODE] = by_node(torch, trees, by_hand)
    if (jax := peers.jax) is not None:
        by_level: Callable[..., Any] = tree_peers.jax_by_level if is_fc else tree_peers.jax_lstm_by_level
        works[JAX] = by_level(jax, trees, by_hand)
    if (dy := peers.dynet) is not None and not many:
        batched: Callable[..., Any] = tree_peers.dynet if is_fc else tree_peers.dynet_lstm
        works[DYNET] = batched(dy, trees, by_hand)
    return works


def _sequence_works(peers: Peers, batch: Sequences, *, many: bool) -> dict[str, Callable[[], Any]]:
    model, outputs, is_fixed = batch.model, batch.outputs, batch.is_fixed
    listed = None if is_fixed else batch.counts.tolist()
    works: dict[str, Callable[[], Any]] = {NUMPY: ByHand(model, listed)}
    if (torch := peers.torch) is not None:
        works[BY_LEVEL] = torch_loop(torch, model, outputs, listed)
        works[TORCH_MODULE] = torch_module(torch, model, outputs, None if is_fixed else batch.lengths.tolist())
        if not many:
            works[BY_NODE] = sequences.torch_by_node(torch, batch)
    if (jax := peers.jax) is not None:
        works[JAX] = jax_scan(jax, model, outputs) if is_fixed else sequences.jax_masked(jax, batch)
    if (dy := peers.dynet) is not None and not many:
        works[DYNET] = sequences.dynet(dy, batch)
    return works


def _loops(batch: Sequences) -> dict[str, AsyncflowStep | sequences.OfDynamicRnn]:
    """Other programs of asyncflow for the same sequences."""
    last = np.array(len(batch.model.xs), np.int32)
    program, fed = (looped, [last]) if batch.is_fixed else (sliced, [last, batch.counts])
    return {
        WHILE_LOOP: AsyncflowStep(batch.locked, program, batch.outputs, fed),
        DYNAMIC_RNN: sequences.OfDynamicRnn(batch),
    }


def weights_of(batch: Sequences, step: Step) -> Any:
    """The loss and the gradients of weights, which all systems have, in one array."""
    loss, grads = step
    return comparable((loss, list(grads)[: len(batch.model.weights)]), batch.outputs)


# -- pictures --------------------------------------------------------------------------------------------------------


def draw(results: Sequence[Result], folder: Path) -> list[Path]:
    """Time a sample by batch and by hidden extent, for each model."""
    charts = list(_charts(results))
    if not charts:
        return []
    note = "training, time a sample; one thread for everybody"
    return [draw_charts(folder / f"{NAME}.png", charts, note=note, columns=4)]


def _charts(results: Sequence[Result]) -> Iterator[Chart]:
    batch, hidden = AT
    by_batch = {model: {each: case(model, each, hidden) for each in BATCHES} for model in MODELS}
    by_hidden = {model: {each: case(model, batch, each) for each in HIDDENS} for model in MODELS}
    for x, fixed, cases in (("batch", f"hidden {hidden}", by_batch), ("hidden", f"batch {batch}", by_hidden)):
        for model, named in cases.items():
            curves = {name: curve for name, curve in curves_of(results, STEP, named).items() if name not in _UNDRAWN}
            if curves:
                yield Chart(title=f"{model}, {fixed}", x=x, y="us a sample", curves=curves, is_log=True)


_UNDRAWN: Final = (WHILE_LOOP, DYNAMIC_RNN)
"""They stand in tables: more curves than a chart can show."""
