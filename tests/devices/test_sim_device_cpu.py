"""CPUs on virtual time run regions as cards do: the host calls a function where it would interpret many nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np
import pytest

import asyncflow as af
from asyncflow.testing import virtual_clock
from asyncflow.values import Array

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncflow.devices.figures.host import Call, Launches
    from asyncflow.devices.sim.device import SimDevice

ROWS = np.arange(36, dtype=np.float32).reshape(3, 12) / 36
LENGTHS = np.array([9, 4, 12])


def gradients_of_loops(names: Sequence[str]) -> tuple[af.Graph, list[af.Tensor], list[af.Tensor]]:
    """A ragged loop on each device, whose iterations a fed vector counts, and the gradient on the first device."""
    with af.Graph() as graph:
        w = af.Variable(np.full((12, 12), 0.1, np.float32), name="w")
        with af.device(names[0]):
            weights = w.read()
        fed, costs = [], []
        for name in names:
            x = af.placeholder("float32", (3, 12), name="x")
            lengths = af.placeholder("int64", (None,), name="lengths")
            fed += [x, lengths]
            with af.device(name):
                most = af.max(lengths)

                def step(i: af.Tensor, y: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
                    return i + 1, af.tanh(af.matmul(y, weights)) * 0.5 + 0.25

                _, y = af.while_loop(lambda i, _, most=most: i < most, step, (0, x))
                costs.append(af.mean(y * af.astype(af.expand_dims(lengths, 1), "float32")))
        with af.device(names[0]):
            cost = af.sum(af.stack(costs))
            (gradient,) = af.gradients(cost, [w])
            done = w.assign_add(gradient * 0.01)
    return graph, [cost, done], fed


def trained(
    names: Sequence[str], launches: Launches, *, shapes_only: bool = False
) -> tuple[list[Array], dict[Call, int]]:
    """The costs and variables of three steps, and how often the host did what."""
    graph, fetches, fed = gradients_of_loops(names)
    found: list[Array] = []
    calls: dict[Call, int] = {}

    async def steps() -> None:
        async with af.Session(graph, devices=names) as session:
            for _ in range(3):
                values = dict(zip(fed, [ROWS, LENGTHS] * len(names), strict=True))
                found.extend(await session.run(fetches, values))
            calls.update(cast("SimDevice", session.devices[0]).thread.calls)

    with virtual_clock("2 x v100", launches=launches, shapes_only=shapes_only) as clock:
        clock.run(steps())
    return found, calls


@pytest.mark.parametrize("names", [("cpu:0",), ("cpu:0", "cpu:1"), ("sim:0", "cpu:0")], ids="+".join)
def test_a_cpu_runs_regions(names: Sequence[str]) -> None:
    by_nodes, interpreted = trained(names, "nodes")
    for launches in ("regions", "graphs"):
        found, calls = trained(names, launches)
        for value, expected in zip(found, by_nodes, strict=True):
            np.testing.assert_array_equal(value, expected)
        assert calls["node"] * 10 < interpreted["node"]
        assert calls["primitive"] * 10 < interpreted["primitive"]


def test_a_region_of_a_cpu_takes_the_host_no_time_of_cupy() -> None:
    """Views, launches and calls of regions have the times of a card's library."""
    _, calls = trained(["cpu:0"], "regions")
    assert not calls.keys() & {"region", "view", "launch", "product", "library", "graph"}
    assert calls["step"]


def test_shapes_alone_take_the_same_calls() -> None:
    with_data, alone = trained(["cpu:0"], "regions"), trained(["cpu:0"], "regions", shapes_only=True)
    assert with_data[1] == alone[1]
