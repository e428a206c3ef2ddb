"""Open extents that are known to be one: gradients of bodies neither keep their shapes nor sum for them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.graph.graph import Subgraph
from asyncflow.ops.derivatives.open_extents import extents

Run = Callable[..., Awaitable[Any]]

pytestmark = pytest.mark.usefixtures("graph")


def loop(step: Callable[[Any], Any], x: Any, times: int = 3) -> Any:
    return af.while_loop(lambda i, _: i < times, lambda i, x: (i + 1, step(x)), (0, x), name="loop")[1]


def open_sums(slope: af.Tensor) -> list[Any]:
    """The sums to a shape that only a run knows, in bodies."""
    sums = [node for node in slope.graph.walk() if node.op.name == "sum_to" and isinstance(node.graph, Subgraph)]
    return [node for node in sums if node.attrs["shape"] is None or None in node.attrs["shape"]]


async def test_an_open_batch_costs_what_a_known_one_does(run: Run) -> None:
    """Gates that are cut out of one value, multiplied and added: nothing has been stretched."""

    def step(x: Any) -> Any:
        gates = af.concat([x, x * 2], axis=-1) @ w + b
        left, right = gates[:, :3], gates[:, 3:]
        return af.tanh(left) * af.sigmoid(right) + left * x

    x, w, b = af.placeholder("float64", (None, 3)), af.placeholder("float64", (6, 6)), af.placeholder("float64", (6,))
    slope, of_bias = af.gradients(loop(step, x), [x, b])
    assert not open_sums(slope)
    values = np.random.default_rng(0).normal(size=(4, 3))
    feeds = {x: values, w: np.full((6, 6), 0.3), b: np.arange(6) / 10}
    known = af.placeholder("float64", (4, 3))
    expected = af.gradients(loop(step, known), [known, b])
    for got, wanted in zip(*await run(((slope, of_bias), expected), {**feeds, known: values}), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-12)


@pytest.mark.parametrize("rows", [1, 4])
async def test_what_only_looks_alike_is_still_summed(rows: int, run: Run) -> None:
    """A loop variable and captures, of open extents of their own: one may be stretched by another."""
    x, y = af.placeholder("float64", (None, 3)), af.placeholder("float64", (None, 3))
    total = af.while_loop(
        lambda i, *_: i < 2,
        lambda i, a, t: (i + 1, af.sin(a), t + af.sum(a * y) + af.sum(a * x[:1])),
        (0, x, np.float64(0)),
        shape_invariants=((), (None, 3), ()),
    )[2]
    values, others = np.random.default_rng(0).normal(size=(rows, 3)), np.random.default_rng(1).normal(size=(4, 3))
    slope = await run(af.gradients(total, x), {x: values, y: others})
    reach = others if rows == 4 else others.sum(0, keepdims=True)
    weight = reach + values[:1]
    expected = weight * (1 + np.cos(values))
    expected[:1] += (values + np.sin(values)).sum(0, keepdims=True)
    np.testing.assert_allclose(slope, expected, rtol=1e-12)


def test_extents_known_to_be_equal() -> None:
    """Extents that are not known to be equal: parts, sums of extents, other values, and anything that a run may
    feed.
    """
    x, y = af.placeholder("float64", (None, 3)), af.placeholder("float64", (None, 3))
    seen: dict[str, Any] = {}

    def step(a: Any) -> Any:
        b = x * 2
        twice = af.concat([b, b], axis=0)
        seen.update(
            a=a, b=b, same=af.tanh(b) @ np.ones((3, 5)), turned=af.permute_dims(b, (1, 0)), part=b[:2], other=y + b
        )
        seen.update(twice=twice, again=twice + 1, flat=af.reshape(b, (-1, 3)))
        return a

    loop(step, af.placeholder("float64", (None, 3), name="z"))
    first = {name: (extents(value) or ())[0] for name, value in seen.items()}
    assert first["b"] == first["same"] == first["flat"] == (extents(seen["turned"]) or ())[1]
    assert first["twice"] == first["again"]
    assert len({first[name] for name in ("a", "b", "part", "other", "twice")}) == 5
    assert extents(x * 2) != extents(af.tanh(x * 2))
