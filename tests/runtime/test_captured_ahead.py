"""Graphs captured before any run launches them: `Session.warm_up` and ``Session.prepare(capture=True)`` on a card."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.devices.captures import WARM_UPS
from asyncflow.devices.cuda.device import CudaDevice
from asyncflow.devices.cuda.graphs import graph as cuda_graph
from tests.conftest import small_cards
from tests.fake_cupy import FakeCupy

X = np.linspace(0, 1, 8, dtype=np.float32).reshape(2, 4)


def trained(x: af.Tensor, steps: int = 6) -> tuple[af.Variable, Any]:
    """A step of training through a loop."""
    w = af.Variable(np.linspace(-1, 1, 16, dtype=np.float32).reshape(4, 4), name="w")
    h = af.while_loop(lambda i, _: i < steps, lambda i, h: (i + 1, af.tanh(h @ w + x)), (0, x))[1]
    loss = af.sum(h)
    return w, [loss, af.optim.adam([(af.gradients(loss, [w])[0], w)], 0.1)]


def chained(x: af.Tensor) -> af.Tensor:
    for _ in range(5):
        x = af.tanh(x * 2 + 1) - af.max(x)
    return x


@dataclass
class Trial:
    cupy: FakeCupy
    session: af.Session
    x: af.Tensor
    rows: af.Tensor
    w: af.Variable
    step: Any
    pure: af.Tensor

    def graphs(self) -> int:
        """Return the number of graphs launched since the last call."""
        names = [name for _, name in self.cupy.engine.launches]
        self.cupy.engine.launches.clear()
        return names.count("graph")

    def explained(self, fetches: Any) -> str:
        return self.session.plan(fetches, [self.x]).explain().partition("comes again: ")[2].partition("\n")[0]


@asynccontextmanager
async def on_a_card(**options: Any) -> AsyncIterator[Trial]:
    with small_cards(0) as cupy:
        with af.Graph() as graph:
            x, rows = (af.placeholder("float32", (size, 4), name=name) for size, name in ((2, "x"), (None, "rows")))
            w, step = trained(x)
            pure = chained(rows)
        async with af.Session(graph, ["cuda:0"], **{"cuda_graphs": True, **options}) as session:
            (card,) = session.devices
            assert isinstance(card, CudaDevice)
            card.make_capturable()  # so that products are the same without graphs
            yield Trial(cupy, session, x, rows, w, step, pure)


async def seen(steps: int, ahead: Callable[[Trial], Any] | None = None, **options: Any) -> list[bytes]:
    """Return the bits of losses and of the variable."""
    async with on_a_card(**options) as trial:
        if ahead is not None:
            await ahead(trial)
        losses = [(await trial.session.run(trial.step, {trial.x: X * n}))[0] for n in range(steps)]
        return [loss.tobytes() for loss in losses] + [(await trial.session.run(trial.w)).tobytes()]


async def test_a_step_that_writes_is_captured_by_the_warm_up_and_changes_nothing() -> None:
    async def warm(trial: Trial) -> None:
        before = await trial.session.run(trial.w)
        assert await trial.session.warm_up(trial.step, {trial.x: X}) == 0
        assert "1 made, for 1 kind of inputs" in trial.explained(trial.step)
        assert (await trial.session.run(trial.w) == before).all()
        assert trial.graphs() == 0
        await trial.session.warm_up(trial.step, {trial.x: X})
        assert "1 made" in trial.explained(trial.step)

    wanted = await seen(4, cuda_graphs=False)
    assert await seen(4, warm) == wanted

    async with on_a_card() as trial:
        await trial.session.warm_up(trial.step, {trial.x: X})
        await trial.session.run(trial.step, {trial.x: X})
        assert trial.graphs() == 1  # of the first run


async def test_a_program_that_only_computes_is_run_until_it_is_captured() -> None:
    async with on_a_card() as trial:
        assert await trial.session.warm_up(trial.pure, {trial.rows: X}, sizes=[1, 2]) == 3 * (WARM_UPS + 1)
        trial.graphs()
        await trial.session.run(trial.pure, {trial.rows: X})
        assert trial.graphs() == 1


async def test_a_prepared_call_captures_at_the_first_call_of_each_kind() -> None:
    wanted = await seen(3, cuda_graphs=False)
    async with on_a_card() as trial:
        predict = trial.session.prepare(trial.pure, [trial.rows], capture=True)
        train = trial.session.prepare(trial.step, [trial.x], capture=True)
        for value in (X, X[:1], X):
            await predict(value)
            assert trial.graphs() == 1
        losses = []
        for n in range(3):
            losses.append((await train(X * n))[0])
            assert trial.graphs() == 1
        assert [loss.tobytes() for loss in losses] == wanted[:3]
        assert (await trial.session.run(trial.w)).tobytes() == wanted[3]


async def test_capture_needs_a_session_that_makes_graphs() -> None:
    async with on_a_card(cuda_graphs=False) as trial:
        with pytest.raises(ValueError, match=r"prepare: capture=True .* open it with cuda_graphs=True"):
            trial.session.prepare(trial.pure, [trial.rows], capture=True)


async def test_values_that_do_not_fit_are_told_and_leave_the_graphs_of_others() -> None:
    with small_cards(0), af.Graph() as graph:
        x, y = (af.placeholder("float32", (None,), name=name) for name in "xy")
        w = af.Variable(np.float32(0), name="w")
        step = w.assign_add(af.max(chained(x + y)))
        async with af.Session(graph, ["cuda:0"], cuda_graphs=True) as session:
            for _ in range(3):
                with pytest.raises(af.KernelError, match="broadcast"):
                    await session.warm_up(step, {x: X[0], y: X[0, :3]})
            await session.warm_up(step, {x: X[0], y: X[0]})
            assert "1 made, for 1 kind of inputs" in session.plan(step, [x, y]).explain()
            assert await session.run(w) == 0


@pytest.mark.parametrize("at", [1, 4])
async def test_a_cancelled_warm_up_leaves_nothing(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = await seen(3, cuda_graphs=False)
    stops: list[int] = []
    warming: list[asyncio.Task[int]] = []

    def budget(launches: int, asked: int | None) -> int:
        stops.append(launches)
        if len(stops) == at:
            warming[0].cancel()
        return 1

    monkeypatch.setattr(cuda_graph, "slice_budget", budget)

    async def warm(trial: Trial) -> None:
        warming.append(asyncio.create_task(trial.session.warm_up(trial.step, {trial.x: X})))
        with pytest.raises(asyncio.CancelledError):
            await warming[0]
        assert trial.cupy.engine.captures == []
        assert "0 made" in trial.explained(trial.step)

    assert await seen(3, warm) == wanted


async def test_runs_meanwhile_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that run between the slices of a warm-up change the variable, which the graph then reads."""
    monkeypatch.setattr(cuda_graph, "slice_budget", lambda launches, asked: 1)

    async def warm(trial: Trial) -> None:
        warming = asyncio.ensure_future(trial.session.warm_up(trial.step, {trial.x: X}))
        for n in range(2):
            await asyncio.sleep(0)
            losses.append((await trial.session.run(trial.step, {trial.x: X * n}))[0].tobytes())
        await warming
        assert "1 made" in trial.explained(trial.step)

    losses: list[bytes] = []
    first = await seen(2, cuda_graphs=False)
    await seen(2, warm)
    assert losses == first[:2]
