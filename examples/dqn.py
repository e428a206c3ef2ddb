"""Teaches a network to balance a pole on a cart by deep Q-learning, with everything in one graph (EuroSys '18 §6.5).

A step looks at the cart, chooses a push, awaits the environment's answer, and writes the result to a `Table`. It learns
from rows that it samples there, and copies the weights to a target network now and then; both are under conds. Learning
needs nothing of the environment's answer, so the program learns while it awaits the answer.

    python examples/dqn.py --output demo-out

The environment is made of ops, or is a coroutine function that answers from outside (`--latency`). A step can be a run
of its own (`Agent.step`), or an episode (`Agent.episode`); `Driver` does the same from Python, with a graph for each
part, to compare. It prints returns, and writes the timeline of an episode.
"""

from __future__ import annotations

import argparse
import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import asyncflow as af
from asyncflow import profiler

HIDDEN, BATCH, ROWS = 128, 256, 50_000
WARM_UP, COPY_EVERY, EXPLORED = 200, 500, 3_000
"""Steps before it learns, between copies of the weights, and until it hardly tries at random any more."""
RATE, DISCOUNT, LEAST_CHANCE = 2e-3, 0.95, 0.02
LONGEST = 200
"""Steps of an episode in which the pole has not fallen; the return is how many there were."""

Weights = Sequence[af.Variable]
Floats = NDArray[np.float32]

# -- the cart and its pole ---------------------------------------------------------------------------------------------


def moved(xp: Any, state: Sequence[Any], force: Any) -> tuple[Any, ...]:
    """Position, speed, angle and angular speed, 20 ms later (Barto, Sutton and Anderson, 1983).

    By the functions of `xp`: NumPy's, or the graph's.
    """
    x, speed, angle, turning = state
    sine, cosine = xp.sin(angle), xp.cos(angle)
    push = (force + turning * turning * sine * 0.05) / 1.1
    bend = (sine * 9.8 - cosine * push) / (0.5 * (4 / 3 - cosine * cosine * (0.1 / 1.1)))
    pull = push - bend * cosine * (0.05 / 1.1)
    return x + speed * 0.02, speed + pull * 0.02, angle + turning * 0.02, turning + bend * 0.02


def answer(state: Floats, action: int) -> tuple[Floats, np.bool_]:
    """The next state, and whether the pole has fallen or the cart has left the track; by NumPy."""
    after = moved(np, [np.float32(x) for x in state], np.float32(20 * action - 10))
    return np.array(after, np.float32), np.bool_(abs(after[0]) > 2.4 or abs(after[2]) > 0.209)


Environment = Callable[[af.Tensor, af.Tensor], tuple[af.Tensor, af.Tensor]]


def pole(state: af.Tensor, action: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
    """`answer` as ops."""
    after = moved(af, af.unstack(state), af.astype(action * 20 - 10, "float32"))
    fallen = af.logical_or(af.abs(after[0]) > 2.4, af.abs(after[2]) > 0.209)
    return af.stack(after), fallen


def awaited_pole(latency_s: float) -> Environment:
    """`answer` from outside, after a while: such as of a simulator that is a server."""

    @af.op(outputs=(af.spec("float32", (4,)), af.spec("bool", ())), stateful=True, name="pole")
    async def ask(state: Floats, action: Any) -> tuple[Floats, np.bool_]:
        await asyncio.sleep(latency_s)
        return answer(state, int(action))

    return ask


# -- the network -------------------------------------------------------------------------------------------------------


def new_weights(seed: int) -> list[af.Variable]:
    """Return the weights of a network of one hidden layer."""
    rng = np.random.default_rng(seed)
    shapes = [(4, HIDDEN), (HIDDEN,), (HIDDEN, 2), (2,)]
    return [
        af.Variable((rng.normal(size=shape) / math.sqrt(shape[0]) if len(shape) > 1 else np.zeros(shape)).astype("f4"))
        for shape in shapes
    ]


def q_values(weights: Weights, states: af.Tensor) -> af.Tensor:
    """Return the value of each push, in each state."""
    w, b, v, c = weights
    return af.maximum(states @ w + b, 0.0) @ v + c


def learned(online: Weights, target: Weights, batch: dict[str, af.Tensor]) -> af.Tensor:
    """The loss of a batch, once the weights have learned from it."""
    best = af.max(q_values(target, batch["after"]), axis=1)
    goal = 1.0 + af.where(batch["fallen"], 0.0, best * DISCOUNT)
    values = q_values(online, batch["state"])
    error = af.where(batch["action"] == 1, values[:, 1], values[:, 0]) - goal
    size = af.abs(error)
    loss = af.mean(af.where(size < 1.0, 0.5 * error * error, size - 0.5))
    grads = af.gradients(loss, online, unconnected="zero")
    with af.control_dependencies([af.optim.adam(zip(grads, online, strict=True), learning_rate=RATE)]):
        return af.identity(loss)


def copied(online: Weights, target: Weights) -> af.Tensor:
    """True, once the target network has the weights."""
    with af.control_dependencies([to.assign(of) for to, of in zip(target, online, strict=True)]):
        return af.constant(True)


ROW = {
    "state": af.spec("float32", (4,)),
    "action": af.spec("int64", ()),
    "after": af.spec("float32", (4,)),
    "fallen": af.spec("bool", ()),
}

# -- one graph ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Agent:
    """The graph: fetch `step` for one step, or `episode` for one until the pole falls.

    Attributes:
        step: how many steps the episode has had, and whether it ends with this one.
        episode: the return of an episode.
    """

    graph: af.Graph
    step: tuple[af.Tensor, af.Tensor]
    episode: af.Tensor


def new_agent(environment: Environment = pole, seed: int = 0) -> Agent:
    """An agent that acts in an environment, and all it remembers."""
    online, target = new_weights(seed), new_weights(seed)
    memory, steps = af.Table(ROWS, ROW, name="memory"), af.Variable(0, name="steps")

    def start() -> af.Tensor:
        return af.random.uniform((4,), low=-0.05, high=0.05, dtype="float32")

    def act(state: af.Tensor) -> tuple[af.Tensor, af.Tensor, list[af.Tensor]]:
        """The next state, whether the pole has fallen, and what else a step does."""
        number = steps.assign_add(1)
        greedy = af.argmax(q_values(online, state))
        chance = af.maximum(LEAST_CHANCE, 1.0 - number / EXPLORED)
        action = af.where(af.random.uniform() < chance, af.random.integers(high=2), greedy)
        # Written before the answer is asked for, so that it does not wait for it.
        loss = af.cond(number > WARM_UP, lambda: learned(online, target, memory.sample(BATCH)), lambda: np.float32(0))
        copy = af.cond(number % COPY_EVERY == 0, lambda: copied(online, target), lambda: np.bool_(False))
        after, fallen = environment(state, action)
        row = memory.append({"state": state, "action": action, "after": after, "fallen": fallen})
        return after, fallen, [loss, copy, row]

    with af.Graph(seed=seed) as graph:
        cart, age = af.Variable(np.zeros(4, np.float32), name="cart"), af.Variable(0, name="age")
        count = age.assign_add(1)
        after, fallen, done = act(af.cond(count == 1, start, cart.read))
        ends = af.logical_or(fallen, count >= LONGEST)
        with af.control_dependencies([*done, cart.assign(after), age.assign(af.where(ends, 0, count))]):
            step = af.identity(count), af.identity(ends)

        def further(state: af.Tensor, _: af.Tensor, count: af.Tensor) -> tuple[af.Tensor, ...]:
            return *act(state)[:2], count + 1  # in a loop all effects happen

        _, _, episode = af.while_loop(
            lambda _, fallen, count: af.logical_and(af.logical_not(fallen), count < LONGEST),
            further,
            (start(), np.bool_(False), 0),
            name="episode",
        )
    return Agent(graph, step, episode)


# -- the same, driven from Python --------------------------------------------------------------------------------------


class Driver:
    """The agent with a graph for each part, and the rest in Python; use with ``async with``."""

    def __init__(self, seed: int = 0, latency_s: float = 0.0) -> None:
        self._latency_s = latency_s
        self._rng = np.random.default_rng(seed)
        self._memory = {name: np.zeros((ROWS, *spec.shape), spec.dtype) for name, spec in ROW.items()}  # type: ignore[misc]
        self._steps = 0
        online, target = new_weights(seed), new_weights(seed)
        with af.Graph() as graph:
            self._state = af.placeholder("float32", (4,), name="state")
            self._greedy = af.argmax(q_values(online, self._state))
            self._batch = {name: af.placeholder(s.dtype, (BATCH, *s.shape), name=name) for name, s in ROW.items()}  # type: ignore[misc]
            self._loss = learned(online, target, self._batch)
            self._copied = copied(online, target)
        self._session = af.Session(graph)

    async def __aenter__(self) -> Driver:
        await self._session.__aenter__()
        return self

    async def __aexit__(self, *exc: Any) -> None:
        await self._session.__aexit__(*exc)

    async def episode(self) -> int:
        """Plays one, and learns after each step; its return."""
        state, count, fallen = self._rng.uniform(-0.05, 0.05, 4).astype("f4"), 0, False
        while not fallen and count < LONGEST:
            state, fallen = await self._step(state)
            count += 1
        return count

    async def _step(self, state: Floats) -> tuple[Floats, bool]:
        self._steps += 1
        run, rng, memory = self._session.run, self._rng, self._memory
        action = int(await run(self._greedy, {self._state: state}))
        if rng.random() < max(LEAST_CHANCE, 1 - self._steps / EXPLORED):
            action = int(rng.integers(2))
        if self._latency_s:
            await asyncio.sleep(self._latency_s)
        after, fallen = answer(state, action)
        row = {"state": state, "action": action, "after": after, "fallen": fallen}
        for name, column in memory.items():
            column[(self._steps - 1) % ROWS] = row[name]
        if self._steps > WARM_UP:
            drawn = rng.integers(0, min(self._steps, ROWS), BATCH)
            await run(self._loss, {self._batch[name]: column[drawn] for name, column in memory.items()})
        if self._steps % COPY_EVERY == 0:
            await run(self._copied)
        return after, bool(fallen)


# -- the program -------------------------------------------------------------------------------------------------------


async def train(agent: Agent, episodes: int, *, goal: float = math.inf) -> list[int]:
    """Return the returns of episodes, each a run; stop once the last 20 have returned `goal` on average."""
    returns: list[int] = []
    async with af.Session(agent.graph) as session:
        while len(returns) < episodes and (len(returns) < 20 or np.mean(returns[-20:]) < goal):
            returns.append(int(await session.run(agent.episode)))
            if len(returns) % 20 == 0:
                print(f"episode {len(returns):4}: the last 20 returned {np.mean(returns[-20:]):.1f} on average")
    return returns


async def draw(latency_s: float, page: Path) -> None:
    """Writes the timeline of a few steps whose environment is awaited, and of the learning beside it."""
    agent, trace = new_agent(awaited_pole(latency_s)), af.Trace()
    async with af.Session(agent.graph, regions=False) as session:
        for _ in range(WARM_UP + 5):
            await session.run(agent.step)
        for _ in range(3):
            await session.run(agent.step, trace=trace)
    profiler.save(trace, page)


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains, and says whether the goal was reached; 1 if not."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--episodes", type=int, default=400, help="most episodes to play")
    parser.add_argument("--goal", type=float, default=150.0, help="mean return of 20 episodes that is enough")
    parser.add_argument("--seed", type=int, default=0, help="of weights, starts and choices")
    parser.add_argument("--latency", type=float, default=0.001, help="seconds of the environment in the timeline")
    parser.add_argument("--output", type=Path, default=Path("demo-out"), help="folder for the timeline")
    options = parser.parse_args(arguments)
    returns = af.run(train(new_agent(seed=options.seed), options.episodes, goal=options.goal))
    reached = float(np.mean(returns[-20:]))
    print(
        f"\n{'PASS' if reached >= options.goal else 'FAIL'}: the last 20 episodes returned {reached:.1f} of {LONGEST} "
        f"on average, after {len(returns)} episodes and {sum(returns)} steps"
    )
    options.output.mkdir(parents=True, exist_ok=True)
    af.run(draw(options.latency, options.output / "dqn.html"))
    print(f"Timeline of three steps: {options.output / 'dqn.html'}")
    return int(reached < options.goal)


if __name__ == "__main__":
    raise SystemExit(main())
