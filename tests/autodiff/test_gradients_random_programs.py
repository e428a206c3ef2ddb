"""Gradients of random programs, first and second, equal central differences in every mode of running."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, note, settings
from hypothesis import strategies as st

import asyncflow as af
from asyncflow.autodiff.gradients import gradients
from tests.autodiff.programs import Block, Graph, If, Let, Loop, Name, Numbers, Program, evaluate
from tests.autodiff.strategies import programs, write_program

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

STEP = 1e-5
"""Of central differences in float64."""
MARGIN = 1e-2
"""Least distance from its threshold of a float that decides a branch."""

settings.register_profile(
    "random-gradients",
    max_examples=120 * int(os.environ.get("ASYNCFLOW_SEEDS", "1")),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
IN_CI = settings.get_profile("random-gradients")


@dataclass(frozen=True)
class Differentiated:
    """A program as a graph, with its gradients and the gradients of their weighted sum, None where there are none."""

    graph: af.Graph
    feeds: dict[str, af.Tensor]
    setters: dict[str, af.Tensor]
    value: af.Tensor
    first: dict[str, af.Tensor | None]
    weighted: af.Tensor | None
    second: dict[str, af.Tensor | None]


def differentiate(program: Program, weights: Mapping[str, Any], *, at_once: bool) -> Differentiated:
    """The gradients with respect to all inputs and variables, by one call or by one for each."""
    with af.Graph() as graph:
        variables = {name: af.Variable(value, name=name) for name, value in program.variables.items()}
        inputs = {name: af.placeholder("float64", np.shape(value)) for name, value in program.inputs.items()}
        feeds = {name: af.placeholder("float64", np.shape(value)) for name, value in program.variables.items()}
        value = evaluate(program, Graph(variables), inputs)
        xs = {**inputs, **variables}
        first = {name: gradients(value, x) for name, x in xs.items()} if not at_once else gradients(value, xs)
        terms = [af.sum(grad * weights[name]) for name, grad in first.items() if grad is not None]
        weighted = sum(terms[1:], terms[0]) if terms else None
        second = gradients(weighted, xs) if weighted is not None else {}
        setters = {name: variable.assign(feeds[name]) for name, variable in variables.items()}
    return Differentiated(graph, {**inputs, **feeds}, setters, value, first, weighted, second)


class Runner:
    """A runner of a differentiated program, for any values of its inputs and variables."""

    def __init__(self, program: Differentiated, session: af.Session) -> None:
        self.program = program
        self.session = session

    async def run(self, fetches: Any, at: Mapping[str, Any]) -> Any:
        feeds = self.program.feeds
        if self.program.setters:
            await self.session.run(self.program.setters, {feeds[name]: at[name] for name in self.program.setters})
        inputs = {feed: at[name] for name, feed in feeds.items() if name not in self.program.setters}
        return await self.session.run(fetches, inputs)


def numbers(program: Program, at: Mapping[str, Any]) -> tuple[float, float]:
    """Return NumPy's result, and its margin."""
    machine = Numbers({name: at[name] for name in program.variables})
    value = evaluate(program, machine, {name: at[name] for name in program.inputs})
    return float(value), float(machine.margin)


def moved(at: Mapping[str, Any], name: str, step: Any) -> dict[str, Any]:
    """`at`, with one value moved."""
    return {**at, name: at[name] + step}


def differences(program: Program, at: Mapping[str, Any], name: str) -> Any:
    """The gradient with respect to one value, by central differences in NumPy."""
    slopes = np.zeros(np.shape(at[name]))
    for index in np.ndindex(slopes.shape):
        step = np.zeros(slopes.shape)
        step[index] = STEP
        above, below = (numbers(program, moved(at, name, way * step))[0] for way in (1, -1))
        slopes[index] = (above - below) / (2 * STEP)
    return slopes


def assert_near(got: Any, expected: Any, name: str) -> None:
    """Equal but for what central differences lose; nothing stands for zeros."""
    if got is None:
        got = np.zeros(np.shape(expected))
    assert got.shape == np.shape(expected), name
    largest = max(1.0, float(np.max(np.abs(expected), initial=0)))
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5 * largest, err_msg=name)


async def check(program: Program, *, at_once: bool, **options: Any) -> None:
    at = {**program.inputs, **program.variables}
    rng = np.random.default_rng(7)
    weights = {name: rng.uniform(0.5, 1.5, np.shape(value)) for name, value in at.items()}
    expected, margin = numbers(program, at)
    assume(margin > MARGIN)
    built = differentiate(program, weights, at_once=at_once)
    fetches = {"value": built.value, **{name: grad for name, grad in built.first.items() if grad is not None}}
    async with af.Session(built.graph, debug=True, **options) as session:
        runner = Runner(built, session)
        first = await runner.run(fetches, at)
        np.testing.assert_allclose(first["value"], expected, rtol=1e-10, atol=1e-10)
        for name in at:
            assert_near(first.get(name), differences(program, at, name), f"gradient of {name}")
        if built.weighted is not None:
            await check_second(runner, at, rng)


async def check_second(runner: Runner, at: Mapping[str, Any], rng: np.random.Generator) -> None:
    """Holds second derivatives against differences of first ones, along one direction for each input."""
    second = {name: grad for name, grad in runner.program.second.items() if grad is not None}
    found = await runner.run(second, at) if second else {}
    for name, value in at.items():
        direction = rng.uniform(0.5, 1.5, np.shape(value))
        above, below = [
            await runner.run(runner.program.weighted, moved(at, name, w * STEP * direction)) for w in (1, -1)
        ]
        slope = np.sum(found[name] * direction) if name in found else np.float64(0)
        assert_near(slope, (above - below) / (2 * STEP), f"second derivative of {name}")


@pytest.mark.slow
@pytest.mark.timeout(900)  # a failure takes hypothesis up to five minutes to simplify
@pytest.mark.parametrize(
    "options",
    [
        {"regions": True},
        {"regions": False, "seed": 5},
        {"regions": True, "devices": ["cpu:0", "cpu:1", "cpu:2"], "placement_seed": 11},
    ],
    ids=["regions", "interpreted", "three"],
)
@given(program=programs(), at_once=st.booleans())
@IN_CI
def test_random_programs(program: Program, at_once: bool, options: Mapping[str, Any]) -> None:
    """First and second order, in every arrangement."""
    note(f"af.Session({options})")
    asyncio.run(check(program, at_once=at_once, **options))


def parts(block: Block, place: str = "") -> set[str]:
    """Return the kinds of statements in a block, with their nesting: ``Loop/If/Loop``."""
    found: set[str] = set()
    for statement in block.statements:
        path = f"{place}{type(statement).__name__}"
        found.add(path)
        match statement:
            case If(then=then, otherwise=otherwise):
                found |= parts(then, f"{path}/") | parts(otherwise, f"{path}/")
            case Loop(body=body):
                found |= parts(body, f"{path}/") | pass_through(statement)
            case Let():
                pass
    return found


def pass_through(loop: Loop) -> set[str]:
    """Return a label if a loop returns one of its variables unchanged."""
    pairs = zip(loop.body.results, loop.inner, strict=True)
    return {"pass-through"} if any(result == Name(name) for result, name in pairs) else set()


def nested(kinds: Sequence[str]) -> set[str]:
    return {f"{a}/{b}/{c}" for a in kinds for b in kinds for c in kinds}


def test_the_programs_hold_everything() -> None:
    """Otherwise the test above would look at less than it seems to."""
    drawn = [write_program(Random(seed).randrange) for seed in range(300)]
    assert set().union(*(parts(program.body) for program in drawn)) >= nested(("Loop", "If")) | {"pass-through"}
    assert {len(program.variables) for program in drawn} == {0, 1, 2}
