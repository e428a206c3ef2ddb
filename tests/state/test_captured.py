"""Programs with variables, stores and gradients give the same values in CUDA graphs as launched, to the bit."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.devices.captures import WARM_UPS
from tests.fake_cupy.stand_in import stand_in
from tests.patience import PATIENCE_S

SHAPE = (4, 3)
RUNS = WARM_UPS + 8
UNARY = (af.tanh, af.sin, af.abs, lambda x: x * 0.5 + 0.1)


class Program:
    """A random program over three variables, a counter, and feeds: an array, a rate, and a number that branches."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.graph = af.Graph()
        with self.graph:
            self.variables = [af.Variable(np.full(SHAPE, 0.25 * (k + 1), np.float32), name=f"v{k}") for k in range(3)]
            self.count = af.Variable(0, name="count")
            self.x = af.placeholder("float32", SHAPE, name="x")
            self.rate = af.placeholder("float32", (), name="rate")
            self.n = af.placeholder("int64", (), name="n")
            self.fetches: list[Any] = []
            self.trained: list[str] = []
            value = self.x
            for _ in range(self.random.randrange(3, 7)):
                value = self.random.choice(
                    [self.straight, self.loop, self.array, self.gradient, self.branch, self.write, self.write]
                )(value)
            self.fetches += [value, af.sum(value)]
            if self.random.random() < 0.5:
                self.fetches.append(self.count.assign_add(1))

    def straight(self, x: Any) -> Any:
        for _ in range(3):
            x = self.random.choice(UNARY)(x) + self.read()
        return x

    def read(self) -> Any:
        return self.random.choice([*self.variables, self.rate])

    def loop(self, x: Any) -> Any:
        function, times = self.random.choice(UNARY), self.random.choice([3, self.n])
        writes, variable = self.random.random() < 0.4, self.random.choice(self.variables)

        def body(i: Any, y: Any) -> Any:
            y = function(y) * self.rate + variable
            return i + 1, variable.assign_sub(y * 0.01) if writes else y

        return af.while_loop(lambda i, _: i < times, body, (0, x))[1]

    def array(self, x: Any) -> Any:
        function = self.random.choice(UNARY)
        stack = af.TensorArray("float32", self.n, element_shape=SHAPE)
        _, y, stack = af.while_loop(
            lambda i, *_: i < self.n, lambda i, y, a: (i + 1, function(y + 0.1), a.write(i, y)), (0, x, stack)
        )
        return af.sum(stack.stack(), axis=0) + y

    def gradient(self, x: Any) -> Any:
        variable, function = self.random.choice(self.variables), self.random.choice(UNARY)
        times, start = self.random.choice([4, self.n]), af.stop_gradient(x)
        _, y = af.while_loop(lambda i, _: i < times, lambda i, y: (i + 1, function(y * variable)), (0, start))
        grad = af.gradients(af.sum(y * y), variable)
        steps = [lambda pairs: af.optim.sgd(pairs, self.rate)]
        if variable.name not in self.trained:  # such a step has variables of its own, by the name of this one
            self.trained.append(variable.name)
            steps = [lambda pairs: af.optim.adam(pairs, 0.01), lambda pairs: af.optim.momentum(pairs, self.rate)]
        self.fetches.append(self.random.choice(steps)([(grad, variable)]))
        return y

    def branch(self, x: Any) -> Any:
        variable = self.random.choice(self.variables)
        return af.cond(self.n > 3, lambda: variable.assign_add(x * 0.01) + x, lambda: af.sin(x) + variable)

    def write(self, x: Any) -> Any:
        variable = self.random.choice(self.variables)
        kind = self.random.randrange(4)
        if kind == 0:
            return variable.assign(af.tanh(x))
        if kind == 1:
            return variable.assign_add(x * 0.01) * 2.0 + variable
        if kind == 2:
            self.fetches.append(variable.update(lambda old, y: old * 0.5 + y, af.sin(x)))
            return x
        before = variable + 0.0  # read before the write, and used after it
        after = variable.assign(x * 0.5)
        return before + after


async def found(program: Program, seed: int, **options: Any) -> list[Any]:
    """The results of many runs with other things in between, as bytes; and how many graphs were launched."""
    random, results = Random(seed), list[Any]()

    def feeds() -> dict[Any, Any]:
        numbers = np.random.default_rng(random.randrange(1 << 30))
        return {
            program.x: numbers.normal(size=SHAPE).astype(np.float32),
            program.rate: np.float32(random.choice([0.5, 0.25])),
            program.n: random.choice([2, 2, 2, 5]),
        }

    def note(values: Any) -> None:
        results.append([None if value is None else np.asarray(value).tobytes() for value in values])

    async with af.Session(program.graph, ["cuda:0"], seed=1, **options) as session:
        for _ in range(RUNS):
            note(await session.run(program.fetches, feeds(), timeout=PATIENCE_S))
            action = random.randrange(8)
            if action == 0:
                note(await session.run([*program.variables, program.count]))
            elif action == 1:
                await session.swap_variables({program.variables[0]: np.ones(SHAPE, np.float32)})
            elif action == 2:
                both = await asyncio.gather(*(session.run(program.variables) for _ in range(2)))
                note([value for values in both for value in values])
            elif action == 3:
                task = asyncio.ensure_future(session.run(program.variables[1]))
                await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait([task])
        note(await session.run([*program.variables, program.count]))
    return results


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("options", [{}, {"memory_limit": 1 << 20}], ids=["whole", "limited"])
def test_captured_programs_give_what_launched_ones_give(seed: int, options: dict[str, Any]) -> None:
    program = Program(seed)
    with stand_in(devices=1, nbytes=64 << 20):
        expected = asyncio.run(found(program, seed, **options))
    with stand_in(devices=1, nbytes=64 << 20) as cupy:
        given = asyncio.run(found(program, seed, cuda_graphs=True, **options))
        graphs = [name for _, name in cupy.engine.launches].count("graph")
    assert given == expected
    assert graphs > 0
