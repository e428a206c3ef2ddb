"""Limits that errors of programs without loops name: the program fits into them."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.compiler.memory_advice import memory_advice
from asyncflow.testing import virtual_clock
from tests.fake_cupy.stand_in import stand_in

if TYPE_CHECKING:
    from collections.abc import Callable

LARGE = 8 << 20
SIDE = 128
NAMED = r"memory_limit=([\d_]+) is predicted to be enough"

Built = tuple[Any, dict[Any, Any]]


def training_step() -> Built:
    """A step that changes variables, which nothing may run twice."""
    x = af.placeholder("float32", (SIDE, SIDE))
    weights = [af.Variable(np.eye(SIDE, dtype=np.float32), name=f"w{number}") for number in range(2)]
    h: Any = x
    for w in weights:
        h = af.tanh(h @ w.read() + 0.5)
    loss = af.mean(af.square(h))
    changed = [w.assign_sub(grad) for w, grad in zip(weights, af.gradients(loss, weights), strict=True)]
    return [loss, *changed], {x: np.ones((SIDE, SIDE), np.float32)}


def branches_and_views() -> Built:
    """A branch, views of a feed, and a loop that saves nothing."""
    x = af.placeholder("float32", (SIDE, SIDE))
    taken = af.cond(af.sum(x) > 0, lambda: af.sin(x) @ x, lambda: af.cos(x))
    _, y = af.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, af.matrix_transpose(y) @ x + y), (0, taken))
    return [af.sort(y), x[:64] + 1], {x: np.ones((SIDE, SIDE), np.float32)}


async def run(build: Callable[[], Built], device: str, limit: int) -> tuple[list[Any] | str, int]:
    """The values, or the error and its notes, and the most bytes held."""
    with af.Graph() as graph:
        fetches, feeds = build()
    async with af.Session(graph, devices=[device], memory_limit=limit) as session:
        try:
            found: list[Any] | str = await session.run(fetches, feeds)
        except af.OutOfMemoryError as error:
            found = "\n".join((str(error), *getattr(error, "__notes__", ())))
        return found, session.devices[0].memory.peak


def run_on(device: str, build: Callable[[], Built], limit: int) -> tuple[Any, int]:
    if device == "sim:0":
        with virtual_clock("v100") as clock:
            return clock.run(run(build, device, limit))
    if device == "cuda:0":
        with stand_in(nbytes=2 * LARGE):
            return asyncio.run(run(build, device, limit))
    return asyncio.run(run(build, device, limit))


@pytest.mark.parametrize("build", [training_step, branches_and_views])
@pytest.mark.parametrize("device", ["cpu:0", "sim:0", "cuda:0"])
def test_the_named_limit_is_enough(device: str, build: Callable[[], Built]) -> None:
    """F30: with variables, views of feeds, branches, and loops without gradients."""
    expected, peak = run_on(device, build, LARGE)
    message, _ = run_on(device, build, peak // 2)
    named = re.search(NAMED, message)
    assert named is not None
    assert int(named[1]) < 4 * peak
    values, _ = run_on(device, build, int(named[1]))
    for value, other in zip(values, expected, strict=True):
        np.testing.assert_array_equal(value, other)


def test_no_limit_is_named_where_only_a_run_knows_sizes() -> None:
    def open_rows() -> Built:
        x = af.placeholder("float32", (None, SIDE))
        return af.sin(x) + af.cos(x), {x: np.ones((SIDE, SIDE), np.float32)}

    message, _ = run_on("cpu:0", open_rows, SIDE * SIDE)
    assert "raise memory_limit=" in message
    assert "predicted" not in message


async def test_no_limit_is_named_that_the_run_has() -> None:
    """Runs at a time may pass a limit in which each of them fits: a higher one for one run is no help."""
    with af.Graph() as graph:
        fetches, feeds = branches_and_views()
    async with af.Session(graph, devices=["cpu:0"], memory_limit=LARGE) as session:
        plan = session.plan(fetches, list(feeds))
        devices = {device.name: device for device in session.devices}
        failures = (
            af.OutOfMemoryError("", requested=1, used=limit, limit=limit, device="cpu:0") for limit in (LARGE, 1 << 16)
        )
        none, some = (list(memory_advice(failure, plan, devices)) for failure in failures)
    assert none == []
    assert re.search(NAMED, some[0])


@pytest.mark.parametrize("choice", ["auto", "recompute", "keep"])
def test_an_unplanned_loop_over_devices_is_named_with_what_holds_less(choice: Any) -> None:
    """Nothing is planned for a loop whose device is not certain: the error says so, and names the option."""

    async def train() -> str:
        with af.Graph() as graph:
            x = af.placeholder("float32", (32, 64))

            def body(t: af.Tensor, h: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
                for card in range(2):
                    with af.device(f"sim:{card}"):
                        h = af.tanh(h * 0.5)
                return t + 1, h

            _, h = af.while_loop(lambda t, _: t < 50, body, (0, x))
            grad = af.gradients(af.sum(h), x)
        async with af.Session(graph, memory_limit=300_000, saved_values=choice) as session:
            try:
                await session.run(grad, {x: np.ones((32, 64), np.float32)})
            except af.OutOfMemoryError as error:
                return "\n".join(getattr(error, "__notes__", ()))
        return "it fits"

    with virtual_clock("2 x v100, nvlink2") as clock:
        told = clock.run(train())
    assert (told == "it fits") == (choice == "recompute")
    advice = 'not certain on which device it runs; its saved values .* saved_values="recompute" can hold less'
    assert bool(re.search(rf"loop while \(.*test_memory_advice.py:\d+\): .*{advice}", told)) == (choice == "auto")
