"""A training step of an LSTM layer over sequences of one length: forward, and backward through the loop.

Every system gets one thread, or every system two: inside products, or between them. NumPy by hand is the reference: one
product for all steps wherever the state does not matter, buffers made once.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from threadpoolctl import threadpool_limits

from benchmarks.harness import ASYNCFLOW, Result, Trial, compare
from benchmarks.lstm import (
    TOLERANCE,
    AsyncflowStep,
    Model,
    looped,
    looped_joined,
    random_model,
    tensorflow_step,
    timed_step,
    timed_step_await,
)
from benchmarks.lstm_by_hand import ByHand
from benchmarks.lstm_peers import jax_scan, torch_loop, torch_module
from benchmarks.peers import JAX, NO_PEERS, NUMPY, TENSORFLOW_1, TORCH, Peers

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

NAME = "lstm_training"
JOINED: Final = f"{ASYNCFLOW}, concat"
"""With cells that multiply input and state in one product, as they are mostly written."""
TORCH_MODULE: Final = "torch nn.LSTM"


async def measure(
    peers: Peers = NO_PEERS,
    *,
    repeats: int = 5,
    steps: int = 100,
    batch: int = 64,
    hidden: int = 512,
    threads: Sequence[int] = (1, 2),
) -> list[Result]:
    """Measure ms per training step, for every number of threads: inside products, and above one also between them."""
    model = random_model(steps, batch, hidden)
    results = []
    for count in threads:
        case = f"hidden {hidden}, batch {batch}, {steps} steps, {count} thread{'s' * (count > 1)}"
        with _threads(peers, count):
            results += await _compare(case, model, peers, repeats, inside=count)
    for count in threads:
        if count > 1:
            # Not beside the others: the session with the fewest threads inside products decides for the process.
            case = f"hidden {hidden}, batch {batch}, {steps} steps, {count} threads between products"
            results += await _compare(case, model, peers, repeats, between=count)
    return results


async def _compare(
    case: str, model: Model, peers: Peers, repeats: int, *, inside: int = 1, between: int = 1
) -> list[Result]:
    outputs = model.xs.size
    fed = [np.array(len(model.xs), np.int32)]
    ours = {
        system: AsyncflowStep(model, program, outputs, fed, threads=inside, compute_streams=between)
        for system, program in {ASYNCFLOW: looped, JOINED: looped_joined}.items()
    }
    trials: dict[str, Trial] = {system: timed_step_await(outputs, step.run) for system, step in ours.items()}
    if (tensorflow := peers.tensorflow) is not None:
        run = tensorflow_step(tensorflow, model, looped, outputs, fed, threads=max(inside, between))
        trials[TENSORFLOW_1] = timed_step(outputs, run)
    if between == 1:
        trials[NUMPY] = timed_step(outputs, ByHand(model))
        if peers.torch is not None:
            trials[TORCH] = timed_step(outputs, torch_loop(peers.torch, model, outputs))
            trials[TORCH_MODULE] = timed_step(outputs, torch_module(peers.torch, model, outputs))
    if peers.jax is not None and inside == between == 1:
        # Its number of threads is that of the process.
        trials[JAX] = timed_step(outputs, jax_scan(peers.jax, model, outputs))
    try:
        return await compare(NAME, case, trials, repeats=repeats, lead_ins=1, tolerance=TOLERANCE)
    finally:
        for step in ours.values():
            await step.session.aclose()


@contextmanager
def _threads(peers: Peers, count: int) -> Iterator[None]:
    """Set `count` threads for NumPy and PyTorch; TensorFlow gets them between ops, as its threads inside are one number
    a process.
    """
    torch: Any = peers.torch
    before = torch.get_num_threads() if torch is not None else 0
    with threadpool_limits(limits=count, user_api="blas"):
        if torch is not None:
            torch.set_num_threads(count)
        try:
            yield
        finally:
            if torch is not None:
                torch.set_num_threads(before)
