"""Loops that end with their input."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

import asyncflow as af

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Runner = Callable[..., Awaitable[Any]]

NUMBER = af.spec("float64", ())


def numbers(count: int) -> af.Input:
    async def generate() -> Any:
        for number in range(count):
            yield float(number)

    return af.from_async_generator(generate, NUMBER)


async def test_counts_and_has_its_effects_in_order(graph: af.Graph, run: Runner) -> None:
    v = af.Variable(1.0)
    count = af.loop_over(numbers(5), lambda x: v.update(lambda old, new: 2 * old + new, x))
    assert await run((count, v)) == (5, ((((1 * 2 + 0) * 2 + 1) * 2 + 2) * 2 + 3) * 2 + 4)
    assert await run(count) == 0, "the input has ended"


async def test_carries_its_loop_variables(graph: af.Graph, run: Runner) -> None:
    found = af.loop_over(numbers(4), lambda x, s: {"sum": s["sum"] + x, "n": s["n"] + 1}, {"sum": 0.0, "n": 0})
    assert await run(found) == {"sum": 6.0, "n": 4}
    assert await run(af.loop_over(numbers(0), lambda x, s: s + x, 7.0)) == 7.0


async def test_trains(graph: af.Graph, run: Runner) -> None:
    """A training loop in the graph: gradients of each element's loss, and steps in its order."""
    w = af.Variable(0.0)

    def step(x: af.Tensor) -> af.Tensor:
        (grad,) = af.gradients((w * x - 2 * x) ** 2, [w])
        assert grad is not None
        return w.assign_sub(0.05 * grad)

    assert await run(af.loop_over(numbers(6), step)) == 6
    expected = 0.0
    for x in range(6):
        expected -= 0.05 * 2 * (expected * x - 2 * x) * x
    assert await run(w.read()) == pytest.approx(expected)


async def test_a_body_that_fails_has_taken_its_element(graph: af.Graph) -> None:
    given, v = numbers(5), af.Variable(0.0)
    bad = af.placeholder("int64", ())

    def body(x: af.Tensor) -> af.Tensor:
        return v.assign_add(af.constant([1.0, 2.0])[af.where(x == 2, bad, 0)])

    loop = af.loop_over(given, body, parallel_iterations=1)
    async with af.Session(graph) as session:
        with pytest.raises(af.KernelError, match="out of bounds"):
            await session.run(loop, {bad: 9})
        assert await session.run(v.read()) == 2.0
        assert await session.run(loop, {bad: 1}) == 2


async def test_runs_share_the_elements_of_one_input(graph: af.Graph) -> None:
    given, v = numbers(40), af.Variable(0.0)
    loop = af.loop_over(given, v.assign_add)
    async with af.Session(graph) as session:
        counts: list[Any] = await asyncio.gather(*(session.run(loop) for _ in range(3)), return_exceptions=True)
        assert await session.run(v.read()) == sum(range(40))
    counted = [each for each in counts if not isinstance(each, af.EndOfInput)]
    assert counted and all(each >= 0 for each in counted)


async def test_elements_that_are_nests_where_there_are_several_devices(graph: af.Graph) -> None:
    async def pairs() -> Any:
        for number in range(5):
            yield {"x": float(number), "y": [number, 2.0]}

    given, v = af.from_async_generator(pairs, {"x": NUMBER, "y": af.spec("float64", (2,))}), af.Variable(0.0)
    first = given.next()["x"]
    loop = af.loop_over(given, lambda element: v.assign_add(element["x"] + af.sum(element["y"])))
    async with af.Session(graph, devices=["cpu:0", "cpu:1"]) as session:
        assert await session.run((first, loop, v)) == (0.0, 4, 28.0)


def test_needs_an_order() -> None:
    with af.Graph(effects="unordered"), pytest.raises(af.GraphError, match="ordered effects"):
        af.loop_over(numbers(1), lambda x: x)


def test_mistakes_are_told() -> None:
    lines = af.read_lines("lines")
    with af.Graph():
        with pytest.raises(af.GraphError, match=r"takes an input, such as af.read_lines\(paths\); got \[1, 2\]"):
            af.loop_over([1, 2], lambda x: x)  # type: ignore[arg-type]
        with pytest.raises(af.GraphError, match="takes a function of an element second; got 5"):
            af.loop_over(lines, 5)  # type: ignore[arg-type]
    for wrong in (5, [5]):
        with pytest.raises(af.GraphError, match=r"paths is the path of a file, or several; got"):
            af.read_lines(wrong)  # type: ignore[arg-type]
