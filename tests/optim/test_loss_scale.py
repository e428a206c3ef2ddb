"""Loss scaling: small gradients of float16 survive, and steps with gradients that are not finite are left out."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import asyncflow as af
from asyncflow.optim import loss_scale

FIRST = 2.0**15


def small_loss(w: af.Variable, x: af.Tensor) -> af.Tensor:
    """Return a loss in float16 of weights in float32, whose gradient is 0 in float16 without a factor."""
    half = af.astype(w, "float16") * x
    return af.sum(half) * np.float16(1e-3)


@pytest.mark.parametrize("scale", [None, FIRST])
async def test_small_gradients_survive(graph: af.Graph, scale: float | None) -> None:
    w = af.Variable(np.ones(3, np.float32), name="w")
    x = af.placeholder("float16", (3,))
    train = af.optim.minimize(small_loss(w, x), [w], partial(af.optim.sgd, learning_rate=1e6), loss_scale=scale)
    async with af.Session(graph) as session:
        await session.run(train, {x: np.full(3, 1e-5, np.float16)})
        moved = 1 - await session.run(w)
    np.testing.assert_allclose(moved, 0.0 if scale is None else 0.01, rtol=0.05)


@pytest.mark.parametrize("effects", ["ordered", "unordered"])
async def test_steps_that_are_not_finite_are_left_out(effects: str) -> None:
    w = af.Variable(np.ones(3, np.float32), name="w")
    with af.Graph(effects=effects) as graph:  # type: ignore[arg-type]
        x = af.placeholder("float16", (3,))
        train = af.optim.minimize(small_loss(w, x), [w], af.optim.adam, loss_scale=FIRST)
        af.allow_races(w)
    by_name = {each.name: each for each in graph.resources}
    for each in graph.resources:
        af.allow_races(each)

    async def state() -> dict[str, np.ndarray]:
        return {name: np.asarray(await session.run(each)) for name, each in by_name.items()}

    async with af.Session(graph) as session:
        await session.run(train, {x: np.ones(3, np.float16)})
        before = await state()
        assert before["w/adam_step"] == 1
        assert before["loss_scale"] == FIRST
        assert before["loss_scale/finite_steps"] == 1
        await session.run(train, {x: np.array([1, np.inf, 1], np.float16)})
        after = await state()
    assert after.pop("loss_scale") == FIRST / 2
    assert after.pop("loss_scale/finite_steps") == 0
    for name, value in after.items():
        np.testing.assert_array_equal(value, before[name])


async def test_the_factor_grows_and_is_bounded(graph: af.Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scale, "GROWTH_STEPS", 2)
    monkeypatch.setattr(loss_scale, "MOST", 2.0)
    w = af.Variable(np.ones((), np.float32), name="w")
    x = af.placeholder("float32", ())
    train = af.optim.minimize(w * x, [w], partial(af.optim.sgd, learning_rate=0.1), loss_scale=1)
    factor = next(each for each in graph.resources if each.name == "loss_scale")
    async with af.Session(graph) as session:
        found = []
        for value in (1, 1, 1, 1, np.inf, np.nan):
            await session.run(train, {x: value})
            found.append(float(await session.run(factor)))
        assert found == [1, 2, 2, 2, 1, 1]
        np.testing.assert_allclose(await session.run(w), 0.6, rtol=1e-6)


@pytest.mark.usefixtures("graph")
def test_mistakes() -> None:
    w, other = af.Variable(1.0, name="w"), af.Variable(1.0, name="other")
    step = partial(af.optim.sgd, learning_rate=0.1)
    for scale in (0.5, float("nan"), "large"):
        with pytest.raises(af.GraphError, match="minimize: loss_scale is a number from 1 to"):
            af.optim.minimize(w * w, [w], step, loss_scale=scale)  # type: ignore[arg-type]
    with pytest.raises(af.GraphError, match="variable 'other' has no gradient"):
        af.optim.minimize(w * w, [w, other], step, loss_scale=FIRST)
