"""Costs of a node to build, to compile and to run, as graphs grow: flat lines mean that nothing is super-linear."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

import asyncflow as af
from benchmarks.harness import ASYNCFLOW, Figure, Result, Sample, Trial, compare
from benchmarks.peers import NO_PEERS, TENSORFLOW_1, Peers
from benchmarks.programs import chain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.peers import TensorFlow

BUILD = Figure("build a node", "µs")
COMPILE = Figure("compile a node", "µs")
RUN = Figure("run a node", "µs")
SCALE, OFFSET, FED = np.float32(0.5), np.float32(1.0), np.float32(3.0)


async def measure(
    peers: Peers = NO_PEERS,
    *,
    repeats: int = 3,
    nodes: Sequence[int] = (1_000, 10_000, 100_000),
    tensorflow_nodes: int = 10_000,
) -> list[Result]:
    """µs per node to build, compile and run; TensorFlow up to `tensorflow_nodes`, for it takes long to build more."""
    results = []
    for count in nodes:
        trials: dict[str, Trial] = {ASYNCFLOW: _trial(count)}
        if peers.tensorflow is not None and count <= tensorflow_nodes:
            trials[TENSORFLOW_1] = _tensorflow_trial(peers.tensorflow, count)
        results += await compare("graph_size", f"{count:,} nodes", trials, repeats=repeats, warm_ups=0)
    return results


def _trial(nodes: int) -> Trial:
    async def trial() -> Sample:
        started = perf_counter()
        with af.Graph() as graph:
            x = af.placeholder("float32", ())
            y = chain(x, af.constant(SCALE), af.constant(OFFSET), nodes)
        built = perf_counter()
        async with af.Session(graph) as session:
            session.plan(y, [x])
            compiled = perf_counter()
            answer = await session.run(y, {x: FED})
            ran = perf_counter()
        return _sample(nodes, built - started, compiled - built, ran - compiled, answer)

    return trial


def _tensorflow_trial(tensorflow: TensorFlow, nodes: int) -> Trial:
    v1 = tensorflow.v1

    async def trial() -> Sample:
        started = perf_counter()
        with tensorflow.graph() as graph:
            x = v1.placeholder(v1.float32, ())
            y = chain(x, v1.constant(SCALE), v1.constant(OFFSET), nodes)
        built = perf_counter()
        with tensorflow.session(graph, threads=1) as session:
            # It compiles in the first run.
            session.run(y, {x: FED})
            compiled = perf_counter()
            answer = session.run(y, {x: FED})
            ran = perf_counter()
        run = ran - compiled
        return _sample(nodes, built - started, compiled - built - run, run, answer)

    return trial


def _sample(nodes: int, build: float, compiling: float, run: float, answer: object) -> Sample:
    per_node = 1e6 / nodes
    return Sample({BUILD: build * per_node, COMPILE: compiling * per_node, RUN: run * per_node}, answer)
