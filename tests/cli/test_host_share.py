"""Advice of ``asyncflow simulate`` for a busy host: exactly the model's advice."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import asyncflow as af
from asyncflow.cli.simulation.host_share import HostShare, format_host, host_share
from asyncflow.profiler import summarize
from asyncflow.testing import virtual_clock


def _busy(step: Callable[[af.Tensor], af.Tensor], launches: str) -> tuple[HostShare, str]:
    """Return the host's share in runs that launch a lot, and the advice."""
    with af.Graph() as graph:
        x = y = af.placeholder("float32", (8, 8))
        for _ in range(12):
            y = step(y)

    async def main() -> af.Trace:
        async with af.Session(graph) as session:
            with af.Trace(detail="region") as trace:
                for _ in range(20):
                    await session.run(y, {x: np.ones((8, 8), np.float32)})
            return trace

    with virtual_clock("v100", launches=launches) as clock:  # type: ignore[arg-type]
        summary = summarize(clock.run(main()))
        share = host_share([clock.machine], summary.wall_ns)
        return share, "\n".join(format_host(share, summary, clock.machine.launches))


def test_graphs_are_advised_where_they_save_the_stated_share() -> None:
    def step(y: af.Tensor) -> af.Tensor:
        return af.tanh(y) + af.sum(y, axis=0)

    (without, said), (with_graphs, _) = (_busy(step, launches) for launches in ("regions", "graphs"))
    assert "bound by   the host" in said and "CUDA graphs" in said
    saved = sum(without.busy_ns.values()) - sum(with_graphs.busy_ns.values())
    # The first two runs of a region are none of a graph, and the third captures it.
    assert without.saved_by_graphs_ns * 17 / 20 == pytest.approx(saved, rel=0.02)


def test_graphs_are_not_advised_where_they_change_nothing() -> None:
    """No region that sorts can be one."""
    (without, said), (with_graphs, _) = (_busy(af.sort, launches) for launches in ("regions", "graphs"))
    assert "bound by   the host" in said and "bigger batches" in said
    assert "graphs" not in said and "cut over devices" not in said
    assert without.saved_by_graphs_ns == 0 and without.busy_ns == with_graphs.busy_ns
