"""Deep Q-learning in one graph, and driven from Python with a graph for each part (EuroSys '18 §6.5).

In the graph, a step is a run of its own, or an episode is; the environment is made of ops, or is awaited from outside,
and then the graph learns meanwhile. Out of the graph, Python asks for an action, steps the environment, keeps the
results in NumPy's arrays, and feeds a batch of them for learning. Every step learns.
"""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

import asyncflow as af
from benchmarks.harness import ASYNCFLOW, Figure, Result, Sample, Trial, compare
from benchmarks.peers import NO_PEERS, Peers
from examples import dqn

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

NAME = "dqn"
STEP = Figure("time of a step", "ms")
A_RUN_A_STEP = "asyncflow, a run a step"
OUT_OF_GRAPH = "out of the graph"


async def measure(
    peers: Peers = NO_PEERS, *, repeats: int = 5, steps: int = 1000, latencies_ms: tuple[float, ...] = (0.0, 1.0)
) -> list[Result]:
    """Milliseconds of a step of acting and learning; asyncflow's own system has an episode a run."""
    results = []
    for latency_ms in latencies_ms:
        environment = dqn.awaited_pole(latency_ms / 1000) if latency_ms else dqn.pole
        episodic, stepwise = dqn.new_agent(environment), dqn.new_agent(environment)
        async with (
            af.Session(episodic.graph) as one,
            af.Session(stepwise.graph) as two,
            dqn.Driver(latency_s=latency_ms / 1000) as driver,
        ):

            async def episode(session: af.Session = one, agent: dqn.Agent = episodic) -> int:
                return int(await session.run(agent.episode))

            async def step(session: af.Session = two, agent: dqn.Agent = stepwise) -> int:
                await session.run(agent.step)
                return 1

            for play in (episode, step, driver.episode):
                await _played(play, dqn.WARM_UP + 1)
            trials: dict[str, Trial] = {
                ASYNCFLOW: _trial(episode, steps),
                A_RUN_A_STEP: _trial(step, steps),
                OUT_OF_GRAPH: _trial(driver.episode, steps),
            }
            case = f"environment of {latency_ms:g} ms, {steps:,} steps"
            results += await compare(NAME, case, trials, repeats=repeats)
    return results


async def _played(play: Callable[[], Awaitable[int]], steps: int) -> int:
    done = 0
    while done < steps:
        done += await play()
    return done


def _trial(play: Callable[[], Awaitable[int]], steps: int) -> Trial:
    async def trial() -> Sample:
        started = perf_counter()
        done = await _played(play, steps)
        return Sample({STEP: (perf_counter() - started) * 1000 / done})

    return trial


__all__ = ["measure"]
