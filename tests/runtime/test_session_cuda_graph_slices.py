"""Sessions whose loops are captured in slices: other runs meanwhile, cancellation and failures between slices."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pytest

import asyncflow as af
from asyncflow.devices.captures import WARM_UPS, slice_budget
from asyncflow.devices.cuda.device import CudaDevice
from asyncflow.devices.cuda.graphs import graph as cuda_graph
from asyncflow.devices.cuda.graphs.graph import capture_in_slices
from asyncflow.runtime.executor.turn import BURST_NS
from tests.clocks import WorkClock
from tests.conftest import small_cards
from tests.fake_cupy import FakeCupy

STEPS = 10
LOST = 700
"""CUDA's code of an illegal address, after which the card refuses all work."""


def trained(w: af.Variable, x: af.Tensor) -> Any:
    """A step of training through a loop: its loss and its update."""
    loss = af.sum(af.while_loop(lambda i, _: i < STEPS, lambda i, h: (i + 1, af.tanh(h @ w + x)), (0, x))[1])
    return loss, af.optim.sgd(zip(af.gradients(loss, [w]), [w], strict=True), 0.1)


@dataclass
class Trial:
    """A session that trains, and has been warmed up: its next step is captured.

    Attributes:
        cupy: the stand-in.
        session: of one card.
        step: what to fetch.
        w: the variable.
        feeds: for a step.
        other: another fetch, which is never captured.
    """

    cupy: FakeCupy
    session: af.Session
    step: Any
    w: af.Variable
    feeds: Any
    other: af.Tensor

    async def run(self) -> Any:
        """The loss of one step."""
        found = await self.session.run(self.step, self.feeds)
        return found[0]

    def explained(self) -> str:
        """The plan's line about the captured region."""
        lines = self.session.plan(self.step, list(self.feeds)).explain().splitlines()
        return next(line for line in lines if line.startswith("      # "))

    @property
    def is_captured(self) -> bool:
        return "1 made" in self.explained()


@asynccontextmanager
async def warmed_up(**options: Any) -> AsyncIterator[Trial]:
    with small_cards(0) as cupy:
        with af.Graph() as graph:
            w = af.Variable(np.linspace(-1, 1, 16, dtype=np.float32).reshape(4, 4), name="w")
            x = af.placeholder("float32", (2, 4))
            step, other = trained(w, x), af.tanh(x)
        feeds = {x: np.linspace(0, 1, 8, dtype=np.float32).reshape(2, 4)}
        async with af.Session(graph, ["cuda:0"], cuda_graphs=True, **options) as session:
            trial = Trial(cupy, session, step, w, feeds, other)
            for _ in range(WARM_UPS):
                await trial.run()
            yield trial


async def without_graphs(steps: int) -> tuple[list[Any], Any]:
    """Return the losses of steps that launch their kernels one by one, and the variable after them."""
    with small_cards(0), af.Graph() as graph:
        w = af.Variable(np.linspace(-1, 1, 16, dtype=np.float32).reshape(4, 4), name="w")
        x = af.placeholder("float32", (2, 4))
        step = trained(w, x)
        feeds = {x: np.linspace(0, 1, 8, dtype=np.float32).reshape(2, 4)}
        # Products by the handle that graphs use.
        async with af.Session(graph, ["cuda:0"]) as session:
            (card,) = session.devices
            assert isinstance(card, CudaDevice)
            card.make_capturable()
            return [(await session.run(step, feeds))[0] for _ in range(steps)], await session.run(w)


Noting: TypeAlias = "Callable[[Callable[[int], object]], list[int]]"


@pytest.fixture
def at_each_slice(monkeypatch: pytest.MonkeyPatch, work: WorkClock) -> Noting:
    """Has a function called with the number of each stop between slices; gives the numbers so far.

    Each slice takes as long as runs may hold the event loop at a time.
    """

    def note(call: Callable[[int], object]) -> list[int]:
        slices: list[int] = []

        def budget(launches: int, asked: int | None) -> int:
            slices.append(len(slices) + 1)
            call(slices[-1])
            return slice_budget(launches, asked)

        def captured(*arguments: Any) -> Any:
            steps, asked = capture_in_slices(*arguments), None
            while True:
                try:
                    steps.send(asked)
                except StopIteration as ended:
                    return ended.value
                work.work(BURST_NS)
                asked = yield

        monkeypatch.setattr(cuda_graph, "slice_budget", budget)
        monkeypatch.setattr(cuda_graph, "capture_in_slices", captured)
        return slices

    return note


async def test_a_step_of_training_in_a_long_loop_becomes_one_launch(at_each_slice: Noting) -> None:
    slices = at_each_slice(lambda _: None)
    async with warmed_up() as trial:
        losses = [await trial.run() for _ in range(3)]
        assert trial.is_captured
        assert len(slices) >= STEPS  # each kernel is one of a few in a slice
        trial.cupy.engine.launches.clear()
        losses.append(await trial.run())
        names = [name for _, name in trial.cupy.engine.launches]
        assert names.count("graph") == 1
        assert set(names) <= {"graph", "memcpyAsync", "eventRecord", "streamWaitEvent", "poison"}
        left = await trial.session.run(trial.w)
    wanted, expected = await without_graphs(WARM_UPS + 4)
    assert [loss.tobytes() for loss in losses] == [loss.tobytes() for loss in wanted[WARM_UPS:]]
    assert left.tobytes() == expected.tobytes()


async def test_other_runs_launch_while_a_run_captures(at_each_slice: Noting) -> None:
    async with warmed_up() as trial:
        cupy, counts = trial.cupy, list[int]()
        slices = at_each_slice(lambda _: counts.append(len(cupy.engine.launches)))
        capturing = asyncio.create_task(trial.run())
        others = 0
        while not capturing.done():
            found = await trial.session.run(trial.other, trial.feeds)
            assert found.shape == (2, 4)
            others += 1
        assert len(slices) >= STEPS
        assert counts[-1] > counts[0]
        assert trial.is_captured


async def test_steps_that_run_meanwhile_go_without_a_graph(at_each_slice: Noting) -> None:
    at_each_slice(lambda _: None)
    async with warmed_up() as trial:
        trial.cupy.engine.launches.clear()
        losses = await asyncio.gather(trial.run(), trial.run(), trial.run())
        assert trial.is_captured
        assert [name for _, name in trial.cupy.engine.launches].count("graph") == 1
        last = await trial.run()
        assert len({loss.tobytes() for loss in (*losses, last)}) > 1
        # Each of them has read the weights, and changed them, in an order of its own.
        left = await trial.session.run(trial.w)
    assert np.isfinite(left).all()


@pytest.mark.parametrize("at", [1, 2, STEPS // 2, STEPS + 3])
async def test_a_run_is_cancelled_at_a_slice(at_each_slice: Noting, at: int) -> None:
    async with warmed_up() as trial:
        used = trial.session.devices[0].memory.used
        run: asyncio.Task[Any] | None = None

        def cancel(number: int) -> None:
            assert run is not None
            if number == at:
                run.cancel()

        slices = at_each_slice(cancel)
        before = await trial.session.run(trial.w)
        run = asyncio.create_task(trial.run())
        with pytest.raises(asyncio.CancelledError):
            await run
        assert at <= len(slices) <= at + 1
        assert trial.cupy.engine.captures == []
        assert not trial.is_captured
        assert (await trial.session.run(trial.w)).tobytes() == before.tobytes()
        assert trial.session.devices[0].memory.used <= used  # copies of older values of variables have gone as well
        losses = [await trial.run() for _ in range(2)]
        assert trial.is_captured
    wanted, _ = await without_graphs(WARM_UPS + 2)
    assert [loss.tobytes() for loss in losses] == [loss.tobytes() for loss in wanted[WARM_UPS:]]


@pytest.mark.parametrize("at", [1, STEPS // 2])
async def test_a_kernel_that_cannot_be_captured_leaves_the_run_to_launches(at_each_slice: Noting, at: int) -> None:
    async with warmed_up() as trial:
        at_each_slice(lambda number: trial.cupy.fail_next(1, "launchKernel") if number == at else None)
        losses = [await trial.run() for _ in range(2)]
        assert trial.cupy.engine.captures == []
        assert "none is made: CUDA" in trial.explained()
    wanted, _ = await without_graphs(WARM_UPS + 2)
    assert [loss.tobytes() for loss in losses] == [loss.tobytes() for loss in wanted[WARM_UPS:]]


@pytest.mark.parametrize("at", [1, STEPS // 2])
async def test_a_card_that_is_lost_during_a_capture_ends_the_run_at_its_node(at_each_slice: Noting, at: int) -> None:
    async with warmed_up() as trial:
        at_each_slice(lambda number: trial.cupy.fail_next(LOST, "launchKernel") if number == at else None)
        with pytest.raises(af.DeviceLostError, match=r"cuda:0 is lost") as caught:
            await trial.run()
        assert trial.cupy.engine.captures == []
        with pytest.raises(af.DeviceLostError):
            await trial.session.run(trial.other, trial.feeds)
    assert "launched last was" in str(caught.value)


@pytest.mark.parametrize("is_late", [False, True], ids=["at the launch", "in a replay"])
async def test_a_card_that_is_lost_with_a_graph_names_its_nodes_and_lines(is_late: bool) -> None:
    async with warmed_up() as trial:
        await trial.run()
        assert trial.is_captured
        if is_late:
            trial.cupy.engine.launches.clear()
            trial.cupy.pause()
            run = asyncio.ensure_future(trial.run())
            for _ in range(20):
                await asyncio.sleep(0)
            assert "graph" in [name for _, name in trial.cupy.engine.launches]
            trial.cupy.fail_device(0, LOST)  # with the replay under way, and not behind the run's last copy
            trial.cupy.resume()
        else:
            trial.cupy.fail_next(LOST, "graphLaunch")
            run = asyncio.ensure_future(trial.run())
        with pytest.raises(af.DeviceLostError, match=r"cuda:0 is lost") as caught:
            await run
    place = rf"'[\w/]+' \({__file__}:\d+\)"
    assert re.search(rf"latest CUDA graph was that of {place} to {place}, \d+ nodes; without", str(caught.value))
