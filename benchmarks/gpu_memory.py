"""On a card: a training step of an LSTM layer over sequences whose saved values do not fit into a memory limit.

The limit is a fifth more than the shortest sequence takes if its loop keeps all saved values; a sequence twice as long
does not fit then. The benchmark measures the time of an iteration, with the limit and without one, and the memory.
Weights and inputs, the same few rows again and again, are on the card from the start, and little comes back.
"""

from __future__ import annotations

import sys
from contextlib import AsyncExitStack
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import numpy as np

import asyncflow as af
from benchmarks.gpu import CARD, saved_timeline
from benchmarks.harness import ASYNCFLOW, DifferentAnswers, Figure, Result, Sample, Trial, compare
from benchmarks.lstm import cell, random_model
from benchmarks.peers import NO_PEERS, Peers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

NAME: Final = "gpu_memory"
ITERATION: Final = Figure("time an iteration", "ms")
PEAK: Final = Figure("peak of the card's memory", "MiB")
MOVED: Final = Figure("moved out in a step", "MiB")
LATE: Final = Figure("reads that nobody asked ahead for", "values")
DIFFERENCE: Final = Figure("largest difference from keeping", "of 1")
PREDICTED: Final = Figure("predicted time an iteration", "ms")
PREDICTED_PEAK: Final = Figure("predicted memory", "MiB")

FREE: Final = "without a limit"
KEEP, SWAP, RECOMPUTE = "keep", "swap", "recompute"
EXACT: Final = (FREE, KEEP)
"""Ways whose results have the same bits. Others compute values again with other kernels, or sum products of fewer rows,
which round differently on hosts without AVX-512.
"""

TOLERANCE: Final = 1e-3
ROWS: Final = 4
SHARE: Final = 1.2
"""The limit, by what the shortest sequence takes."""

MODELS: Final[Sequence[Mapping[str, int]]] = (
    {"hidden": 512, "batch": 512, "steps": 100},
    {"hidden": 2048, "batch": 512, "steps": 20},
)
"""Models: kernels of the first take less time than their launches, kernels of the second more."""

MiB: Final = 1 << 20


class LimitedStep:
    """A training step in a session of its own, which has to be closed.

    Args:
        steps: the length of the sequence.
        hidden, batch: of the layer.
        options: of the session.
    """

    def __init__(self, steps: int, *, hidden: int, batch: int, **options: Any) -> None:
        self.steps = steps
        numbers = random_model(ROWS, batch, hidden)
        with af.Graph() as graph:
            model = numbers.map(lambda value: af.Variable(value).read())

            def body(t: Any, h: Any, c: Any, total: Any) -> Any:
                h, c = cell(af, model, model.xs[t % ROWS], h, c)
                return t + 1, h, c, total + af.sum(af.square(h))

            variables = (np.int32(0), model.h, model.c, np.float32(0))
            loss = af.while_loop(lambda t, *_: t < steps, body, variables)[-1]
            # Of gradients, which are large, sums that tell them apart.
            grads = af.gradients(loss, list(model.parameters))
            self._fetches = [loss, *(af.sum(grad, axis=0) for grad in grads)]
        self.session = af.Session(graph, devices=[CARD], **options)
        self._predicted: dict[Figure, float] | None = None

    def explain(self) -> str:
        """Return the plan's choice for saved values, and its predicted cost."""
        return self.session.plan(self._fetches).explain(memory=True)

    def predicted(self) -> dict[Figure, float]:
        """Return the plan's prediction; nothing if it has not chosen."""
        if self._predicted is None:
            self._predicted = {}
            for loop in self.session.plan(self._fetches).memory:
                self._predicted[PREDICTED] = loop.way.ns / loop.figures.iterations / 1e6
                self._predicted[PREDICTED_PEAK] = (loop.held if loop.values else loop.kept_all) / MiB
        return self._predicted

    async def run(self, trace: af.Trace | None = None) -> NDArray[np.float32]:
        """One step: the loss, and sums of the gradients."""
        values = await self.session.run(self._fetches, trace=trace)
        return np.concatenate([np.ravel(value) for value in values])

    def memory(self) -> af.DeviceMemory:
        """Of the card, so far."""
        return self.session.statistics().memory[CARD]

    def late(self) -> int:
        """Reads so far of values that were away."""
        swapping = self.session.devices[0].swapping
        return 0 if swapping is None else swapping.statistics().late


async def measure_memory(
    peers: Peers = NO_PEERS,
    *,
    repeats: int = 3,
    models: Sequence[Mapping[str, int]] = MODELS,
    lengths: Sequence[int] = (1, 2, 4),
) -> list[Result]:
    """Measure ms an iteration and MiB, by the length of the sequence (in multiples of `steps`), and by the way."""
    results = []
    for model in models:
        limit = await limit_of(model)
        for times in lengths:
            results += await _measured(model, times, limit, repeats)
    return results


async def limit_of(model: Mapping[str, int]) -> int:
    """Bytes in which `steps` iterations fit, and a few more."""
    step = LimitedStep(**model)
    async with step.session:
        await step.run()
        return int(SHARE * step.memory().peak)


async def _measured(model: Mapping[str, int], times: int, limit: int, repeats: int) -> list[Result]:
    sizes = {**model, "steps": times * model["steps"]}
    case = f"hidden {sizes['hidden']}, batch {sizes['batch']}, {sizes['steps']} steps, limit {limit / MiB:,.0f} MiB"
    ways: dict[str, dict[str, Any]] = {FREE: {}, ASYNCFLOW: {"memory_limit": limit}}
    ways |= {way: {"memory_limit": limit, "saved_values": way} for way in (KEEP, SWAP, RECOMPUTE)}
    answers, trials = {}, {}
    async with AsyncExitStack() as stack:
        for name, options in ways.items():
            step = LimitedStep(**sizes, **options)
            await stack.enter_async_context(step.session)
            try:
                answers[name] = await step.run()
            except af.OutOfMemoryError as error:
                print(f"{case}: {name} does not fit: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
            else:
                trials[name] = _trial(name, step, answers[FREE])
        return await compare(NAME, case, trials, repeats=repeats)


def _trial(name: str, step: LimitedStep, expected: NDArray[np.float32]) -> Trial:
    async def trial() -> Sample:
        moved, late = step.memory().moved_out, step.late()
        started = perf_counter()
        answer = await step.run()
        seconds = perf_counter() - started
        memory = step.memory()
        difference = np.max(np.abs(answer - expected) / np.maximum(1, np.abs(expected)))
        if not difference < TOLERANCE:
            raise DifferentAnswers(f"{NAME}: {name} differs from keeping all by {difference}")
        figures = {
            ITERATION: 1e3 * seconds / step.steps,
            PEAK: memory.peak / MiB,
            MOVED: (memory.moved_out - moved) / MiB,
            LATE: step.late() - late,
            DIFFERENCE: float(difference),
            **step.predicted(),
        }
        return Sample(figures, answer if name in EXACT else None)

    return trial


def draw_memory(
    results: Sequence[Result], folder: Path, *, models: Sequence[Mapping[str, int]] = MODELS, times: int = 2
) -> list[Path]:
    """Draw the plans for sequences that do not fit, and timelines of steps whose values move."""

    async def drawn() -> list[Path]:
        lines, paths = [], []
        for model in models:
            limit, longer = await limit_of(model), {**model, "steps": times * model["steps"]}
            for way in ("auto", SWAP):
                step = LimitedStep(**longer, memory_limit=limit, saved_values=way)
                async with step.session:
                    lines += [f"{way}, {longer}", step.explain()]
                    for _ in range(2):
                        await step.run()
                    if way == SWAP:
                        trace = af.Trace()
                        await step.run(trace)
                        paths += saved_timeline(trace, folder, f"{NAME}_{model['hidden']}")
                    lines += [f"after three steps: {step.memory()}, {step.late()} reads late", ""]
        paths.append(folder / f"{NAME}.txt")
        paths[-1].write_text("\n".join(lines), encoding="utf-8")
        return paths

    return af.run(drawn())
