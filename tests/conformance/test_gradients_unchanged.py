"""Behaviour 104: a value that passes through a piece of a program unchanged keeps its gradient."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import asyncflow as af

Run = Callable[..., Awaitable[Any]]

pytestmark = pytest.mark.usefixtures("graph")

VALUE = np.array([0.3, -0.5, 0.7])


def passed(a: Any, w: Any) -> dict[str, Any]:
    """`a` and `w` behind pieces that give them as they are."""

    @af.vertex_function(state=af.spec("float64", ()), children=1)
    def cell(v: Any) -> None:
        x = v.pull()
        v.scatter(v.gather(0))
        v.push(x, "x")
        v.push(w[0], "w")

    def looped(count: int) -> Any:
        return af.while_loop(lambda i, p, q: i < count, lambda i, p, q: (i + 1, p, q), (0, a, w))[1:]

    custom = af.custom_gradient(lambda x, y: ((x, y), lambda *grads: grads))
    vertices = af.vertex_map(cell, af.InputGraph.chain([3]), a).pushes
    return {
        "recompute": af.recompute(lambda a, b: (a, w, af.sin(b)))(a, a)[:2],
        "recompute in recompute": af.recompute(lambda a: af.recompute(lambda b: (a, w, af.sin(b)))(af.cos(a)))(a)[:2],
        "cond": af.cond(a[0] > 0, lambda: (a, w), lambda: (w, a)),
        "while_loop": looped(2),
        "while_loop, not entered": looped(0),
        "map_fn": [x[0] for x in af.map_fn(lambda row: (a, w), a)],
        "map_fn, a loop": [x[0] for x in af.map_fn(lambda row: (a, w), a, lift=False)],
        "rows of map_fn": [af.map_fn(lambda row: row, a), w],
        "custom_gradient": custom(a, w),
        "vertex_map": [vertices["x"], vertices["w"] * 1.0],
    }


async def test_what_passes_unchanged_keeps_its_gradient(run: Run) -> None:
    """Behaviour 104."""
    a = af.placeholder("float64", (3,))
    w = a * 2.0
    slopes = {name: af.gradients(values, [a, w]) for name, values in passed(a, w).items()}
    found = await run(slopes, {a: VALUE})
    of_a, of_w = found.pop("vertex_map")
    assert ([*of_a], [*of_w]) == ([7.0, 1.0, 1.0], [3.0, 0.0, 0.0])  # each of three vertices pushes w[0]
    for name, pair in found.items():
        assert [[*x] for x in pair] == [[3.0] * 3, [1.0] * 3], name
