"""Bodies over many rows give what they give row by row, gradients and random numbers included."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import asyncflow as af

RNG = np.random.default_rng(0)
X = RNG.normal(size=(7, 3))
W = RNG.normal(size=(3, 4))


def _body(w: Any) -> Any:
    """Branches and loops that each row takes and leaves for itself."""

    def body(row: Any) -> Any:
        h = af.tanh(row @ w) + 1.0
        y = af.cond(af.sum(h) > 4.0, lambda: h * 2, lambda: h - 1)
        steps, z = af.while_loop(
            lambda i, z: af.sum(z) < 30.0, lambda i, z: (i + 1, z + af.abs(af.sum(row)) + h * 0.1 + 0.5), (0, y)
        )
        thrice = af.while_loop(lambda i, z: i < 3, lambda i, z: (i + 1, z * 0.9), (0, z))[1]
        return {"z": z, "steps": steps, "thrice": thrice, "softmax": af.softmax(h), "shape": af.shape(h)}

    return body


@pytest.mark.parametrize("regions", [True, False])
async def test_a_lifted_body_gives_what_the_loop_over_rows_gives(regions: bool) -> None:
    with af.Graph() as graph:
        x, w = af.constant(X), af.constant(W)
        lifted, looped = (af.map_fn(_body(w), x, lift=lift) for lift in (True, False))
        grads = [af.gradients(af.sum(y["z"]) + af.sum(y["thrice"]), [x, w]) for y in (lifted, looped)]
    async with af.Session(graph, regions=regions) as session:
        (got, want), (got_grads, want_grads) = await session.run(((lifted, looped), grads))
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-12, err_msg=name)
    assert len(set(want["steps"].tolist())) > 2
    for one, other in zip(got_grads, want_grads, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10)


async def test_rows_draw_the_numbers_that_the_iterations_of_a_loop_draw() -> None:
    def noisy(row: Any) -> Any:
        walk = af.while_loop(lambda i, z: i < 3, lambda i, z: (i + 1, z + af.random.normal((3,)) * row), (0, row))[1]
        return walk, af.random.normal((2,))

    found = []
    for lift in (True, False):
        with af.Graph(seed=1) as graph:
            y = af.map_fn(noisy, af.constant(X), lift=lift, name="map")
        async with af.Session(graph) as session:
            found.append(await session.run(y))
    for one, other in zip(*found, strict=True):
        assert np.array_equal(one, other)
