"""Requests of one tree each, whose sets of vertices are computed together, or each request by itself.

A Tree-LSTM over syntax trees of functions. No two requests have the same structure, so only the sets of vertices that
are ready at the same time can share calls.
"""

from __future__ import annotations

import asyncio
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

import asyncflow as af
from benchmarks.harness import ASYNCFLOW, Figure, Result, Sample, Trial, compare
from benchmarks.peers import NO_PEERS, Peers
from benchmarks.trees import tree_lstm
from examples.syntax_trees import read_functions

if TYPE_CHECKING:
    from asyncflow.runtime.calls.calls import Prepared

    Request = list[Any]

TIME = Figure("time of a request, with all of them", "us")
MEDIAN = Figure("half of the requests are answered within", "ms")
ALONE = "each by itself"


async def measure(
    peers: Peers = NO_PEERS,
    *,
    repeats: int = 5,
    hidden: tuple[int, ...] = (150,),
    clients: tuple[int, ...] = (1, 32),
    requests: int = 192,
    files: int = 20,
) -> list[Result]:
    """Microseconds of a request, and milliseconds until it is answered, with `share=True`, and without.

    Args:
        peers: none takes part.
        repeats: measured trials.
        hidden: extents.
        clients: how many requests are under way.
        requests: in all.
        files: how many files of the library the syntax trees come from.
    """
    functions = [function for part in read_functions(files) for function in part]
    random, found = np.random.default_rng(2), []
    trees = [functions[k].tree for k in random.choice(len(functions), requests, replace=len(functions) < requests)]
    for width in hidden:
        asked = [_values(tree, random.standard_normal((tree.n_vertices, width), np.float32)) for tree in trees]
        with af.Graph() as graph:
            structure, x = af.InputGraph.placeholder(), af.placeholder("float32", (None, width))
            function, _ = tree_lstm(width)
            shared, alone = (af.vertex_map(function, structure, x, share=share).roots[0] for share in (True, False))
        feeds = [structure.offsets, structure.children, structure.samples, structure.heights, x]
        async with af.Session(graph) as session:
            for each in clients:
                trials: dict[str, Trial] = {
                    ASYNCFLOW: _trial(session.prepare(shared, feeds), asked, each),
                    ALONE: _trial(session.prepare(alone, feeds), asked, each),
                }
                case = f"Tree-LSTM, {width} wide, {requests} syntax trees, {each} at a time"
                found += await compare("tree_requests", case, trials, repeats=repeats, lead_ins=2, tolerance=1e-4)
    return found


def _values(tree: af.InputGraph, x: Any) -> Request:
    x.flags.writeable = False  # fed without a copy, as the guide says
    return [tree.offsets, tree.children, tree.samples, tree.heights, x]


def _trial(run: Prepared, requests: list[Request], clients: int) -> Trial:
    async def trial() -> Sample:
        left = iter(enumerate(requests))
        answers: list[Any] = [None] * len(requests)
        taken: list[float] = []

        async def client() -> None:
            for number, values in left:
                asked = perf_counter()
                answers[number] = (await run(*values))[0]
                taken.append(perf_counter() - asked)

        started = perf_counter()
        await asyncio.gather(*(client() for _ in range(clients)))
        figures = {TIME: (perf_counter() - started) * 1e6 / len(requests), MEDIAN: float(np.median(taken)) * 1e3}
        return Sample(figures, np.array(answers))

    return trial
