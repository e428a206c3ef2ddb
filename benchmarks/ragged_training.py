"""A training step of an LSTM layer over sequences of different lengths, sorted by them: longest first.

asyncflow runs the loop over the rows whose sequences have not ended, as NumPy by hand and PyTorch do. *Masked* is the
loop over all rows, in which ended sequences keep their state, like `dynamic_rnn` of TensorFlow 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from benchmarks.harness import ASYNCFLOW, Result, Trial, compare
from benchmarks.lstm import (
    TOLERANCE,
    AsyncflowStep,
    Model,
    cell,
    random_model,
    tensorflow_step,
    timed_step,
    timed_step_await,
)
from benchmarks.lstm_by_hand import ByHand
from benchmarks.lstm_peers import torch_loop, torch_module
from benchmarks.lstm_training import TORCH_MODULE
from benchmarks.peers import NO_PEERS, NUMPY, TENSORFLOW_1, TORCH, Peers

if TYPE_CHECKING:
    from numpy.typing import NDArray

NAME = "ragged_training"
MASKED: Final = f"{ASYNCFLOW} masked"


def random_lengths(batch: int, shortest: int, longest: int) -> NDArray[np.int32]:
    """The same every time, both ends among them, longest first."""
    lengths = np.random.default_rng(1).integers(shortest, longest, batch, np.int32, endpoint=True)
    lengths[[0, -1]] = longest, shortest
    return np.sort(lengths)[::-1].copy()


def active_rows(lengths: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the number of sequences that have not ended, by step."""
    counts: NDArray[np.int32] = np.sum(lengths > np.arange(lengths[0])[:, None], axis=1, dtype=np.int32)
    return counts


def sliced(system: Any, model: Model, steps: Any, counts: Any) -> Any:
    """The sum of the squares of all outputs; step t has the first ``counts[t]`` rows."""

    def body(t: Any, h: Any, c: Any, total: Any) -> Any:
        rows = slice(counts[t])
        h, c = cell(system, model, model.xs[t, rows], h[rows], c[rows])
        return t + 1, h, c, total + system.sum(system.square(h))

    some_rows = None, model.h.shape[-1]
    return system.while_loop(
        lambda t, *_: t < steps,
        body,
        (np.int32(0), model.h, model.c, np.float32(0)),
        shape_invariants=((), some_rows, some_rows, ()),
    )[-1]


def masked(system: Any, model: Model, steps: Any, lengths: Any) -> Any:
    """The same with all rows in every step."""

    def body(t: Any, h: Any, c: Any, total: Any) -> Any:
        is_active = (t < lengths)[:, None]
        after, c_after = cell(system, model, model.xs[t], h, c)
        total = total + system.sum(system.square(system.where(is_active, after, np.float32(0))))
        return t + 1, system.where(is_active, after, h), system.where(is_active, c_after, c), total

    return system.while_loop(lambda t, *_: t < steps, body, (np.int32(0), model.h, model.c, np.float32(0)))[-1]


async def measure(
    peers: Peers = NO_PEERS,
    *,
    repeats: int = 5,
    shortest: int = 5,
    longest: int = 60,
    batch: int = 64,
    hidden: int = 256,
) -> list[Result]:
    """ms per training step: asyncflow both ways, NumPy by hand, TensorFlow, PyTorch both ways."""
    model = random_model(longest, batch, hidden)
    lengths = random_lengths(batch, shortest, longest)
    counts = active_rows(lengths)
    outputs = int(counts.sum()) * hidden
    steps = np.array(longest, np.int32)
    ours = {
        ASYNCFLOW: AsyncflowStep(model, sliced, outputs, [steps, counts]),
        MASKED: AsyncflowStep(model, masked, outputs, [steps, lengths]),
    }
    trials: dict[str, Trial] = {system: timed_step_await(outputs, step.run) for system, step in ours.items()}
    trials[NUMPY] = timed_step(outputs, ByHand(model, counts.tolist()))
    if (tensorflow := peers.tensorflow) is not None:
        run = tensorflow_step(tensorflow, model, masked, outputs, [steps, lengths])
        trials[TENSORFLOW_1] = timed_step(outputs, run)
    if (torch := peers.torch) is not None:
        trials[TORCH] = timed_step(outputs, torch_loop(torch, model, outputs, counts.tolist()))
        trials[TORCH_MODULE] = timed_step(outputs, torch_module(torch, model, outputs, lengths.tolist()))
    case = f"hidden {hidden}, batch {batch}, {shortest} to {longest} steps"
    try:
        return await compare(NAME, case, trials, repeats=repeats, lead_ins=1, tolerance=TOLERANCE)
    finally:
        for step in ours.values():
            await step.session.aclose()
