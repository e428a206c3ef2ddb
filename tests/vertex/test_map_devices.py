"""`vertex_map` over devices: nodes go where they are asked to, and loops of parts of a batch are shared out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import asyncflow as af
from tests.vertex.evaluation import H, U, V, W, forest, slotted_alone

pytestmark = pytest.mark.asyncio(loop_factories=["asyncio", "uvloop"])  # sessions on devices of their own

DEVICES = ["cpu:0", "cpu:1"]


@af.vertex_function(state=af.spec("float64", (H,)), children=2)
def elsewhere(v: Any) -> None:
    """As `slotted`; eager and lazy nodes are on another device than the sets."""
    with af.device("cpu:1"):
        own = v.pull() @ W
    h = af.tanh(own + v.gather(0) @ U - v.gather(1) @ V)
    v.scatter(h)
    with af.device("cpu:1"):
        v.push(af.sum(h * v.gather(0)) + af.sum(v.pull()))


@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize("regions", [True, False], ids=["regions", "interpreted"])
async def test_nodes_are_where_they_are_asked_to(regions: bool, streams: int) -> None:
    data, rows = forest(np.random.default_rng(0), [5, 1, 6]), np.random.default_rng(1).normal(size=(12, 2))
    with af.Graph() as graph:
        fed, x = af.InputGraph.placeholder(), af.placeholder("float64", (None, 2))
        with af.device("cpu:0"):
            found = af.vertex_map(elsewhere, fed, x, streams=streams)
    async with af.Session(graph, devices=DEVICES, regions=regions) as session:
        fetches = found.pushes["y"], found.roots
        feeds = {**fed.feeds(data), x: rows}
        pushed, roots = await session.run(fetches, feeds)
        want_pushed, want_roots = slotted_alone(data, rows)
        np.testing.assert_allclose(pushed, want_pushed, rtol=1e-12)
        np.testing.assert_allclose(roots, want_roots, rtol=1e-12)
        placed = session.plan(fetches, list(feeds)).placement.devices
    of: dict[str, list[str]] = {"matmul": [], "tanh": [], "multiply": []}
    for name, device in placed.items():
        op = name.rpartition("/")[2].partition("_")[0]
        if name.startswith("vertex_map/elsewhere/") and op in of:
            of[op].append(device)
    assert of["matmul"].count("cpu:1") == streams, "what is eager, once for each part"
    assert of["matmul"].count("cpu:0") >= 2 * streams
    assert set(of["tanh"]) == {"cpu:0"}
    assert set(of["multiply"]) == {"cpu:1"}


async def test_loops_of_two_parts_are_shared_out() -> None:
    """No device is requested; the products of each part are on a device of their own."""
    hidden = 512
    u = np.ones((hidden, hidden), np.float32) / hidden

    @af.vertex_function(state=af.spec("float32", (hidden,)), children=1)
    def products(v: Any) -> None:
        v.scatter(af.tanh(v.pull() + v.gather(0) @ u))

    chains = af.InputGraph.chain([3, 2, 3])
    with af.Graph() as graph:
        fed, x = af.InputGraph.placeholder(), af.placeholder("float32", (None, hidden))
        roots = [af.vertex_map(products, fed, x, streams=streams).roots for streams in (2, 1)]
    async with af.Session(graph, devices=DEVICES) as session:
        feeds = {**fed.feeds(chains), x: np.linspace(-1, 1, 8 * hidden, dtype=np.float32).reshape(8, hidden)}
        placed = session.plan(roots[0], list(feeds)).placement.devices  # before kernels are measured
        parts, whole = await session.run(roots, feeds)
        np.testing.assert_allclose(parts, whole, rtol=1e-6)
    assert {device for name, device in placed.items() if "products/matmul" in name} == set(DEVICES)
