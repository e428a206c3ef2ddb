"""The host of simulated devices: one thread for all of them, or one each, and the work that takes its time.
Behaviour 99.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.devices.figures.host import COSTS, LAUNCHES, Call, HostThread
from asyncflow.devices.figures.presets import DEFAULT_HOST, HOSTS, host_named
from asyncflow.devices.sim.device import SimDevice
from asyncflow.errors import HazardError
from asyncflow.streams.sim.stream import HostClock
from asyncflow.streams.virtual import VirtualClockLoop
from asyncflow.testing import virtual_clock
from tests.devices.sim_machines import HOST, machine_of

SLOW = replace(HOST, launches="regions", launch_s=1e-3, product_s=1e-3)


def _products(cards: int, **options: Any) -> tuple[float, list[Any]]:
    """Return the seconds of ten small products on each of some cards, and the results."""
    with af.Graph() as graph:
        x = af.placeholder("float32", (4, 4))
        out = []
        for card in range(cards):
            with af.device(f"sim:{card}"):
                y = x
                for _ in range(10):
                    y = y @ x
                out.append(af.sum(y))

    async def main() -> list[Any]:
        async with af.Session(graph) as session:
            found: list[Any] = await session.run(out, {x: np.full((4, 4), 0.5, np.float32)})
            return found

    with virtual_clock(f"{cards} x v100, nvlink2", **options) as clock:
        values = clock.run(main())
        return clock.now_s, values


def test_more_cards_do_not_make_one_host_faster() -> None:
    """Behaviour 99: ten times as many launches take it ten times as long, on however many cards."""
    one, four = (_products(cards, host=SLOW)[0] for cards in (1, 4))
    assert four == pytest.approx(4 * one, rel=0.05)
    each = replace(SLOW, thread_a_device=True)
    one, four = (_products(cards, host=each)[0] for cards in (1, 4))
    assert four == pytest.approx(one, rel=0.05)


def test_a_network_has_a_host_a_card() -> None:
    loop = VirtualClockLoop()
    joined, apart = machine_of(loop), machine_of(loop, message_s=1e-4)
    for machine, count in ((joined, 1), (apart, 2)):
        for index in (0, 1):
            SimDevice(machine, index)
        assert len(machine.threads) == count
    loop.close()


def test_a_thread_does_one_thing_after_another() -> None:
    loop = VirtualClockLoop()
    thread = HostThread(HOST, HostClock(loop))
    assert [thread.spend("copy"), thread.spend("launch", 4)] == [1_000, 3_000]
    loop.call_at_ns(10_000, loop.stop)
    loop.run_forever()
    assert thread.spend("copy") == 11_000, "it was idle meanwhile"
    assert thread.calls == {"copy": 2, "launch": 4}
    assert thread.busy_ns == {"copy": 2_000, "launch": 2_000}
    loop.close()


@pytest.mark.parametrize("launches", LAUNCHES)
def test_however_kernels_are_launched_the_values_are_the_same(launches: Any) -> None:
    with af.Graph() as graph:
        x = af.placeholder("float32", (8, 8))
        _, y = af.while_loop(
            lambda i, y: i < 7, lambda i, y: (i + 1, af.tanh(y * x) * np.float32(0.3) + af.softmax(y)), (np.int32(0), x)
        )
        z = af.tanh(y) * np.float32(2) + af.sum(af.exp(y), axis=0) + af.max(y, axis=0)
        slope = af.gradients(af.sum(z), x)
    fed = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)

    async def main(**options: Any) -> Any:
        async with af.Session(graph, **options) as session:
            values = [await session.run(slope, {x: fed})]
            for _ in range(4):  # the last as a graph
                values += await session.run([y, z], {x: fed})
            return values

    expected = af.run(main(optimize=False, regions=False))
    with virtual_clock("v100", launches=launches) as clock:
        found = clock.run(main(optimize=False))
        (thread,) = clock.machine.threads.values()
        assert (thread.calls["region"] > 0) == (launches != "nodes")
        assert (thread.calls["graph"] > 0) == (launches == "graphs")
        assert clock.machine.hazards == []
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_values_that_a_region_saves_and_finds_again_are_no_views() -> None:
    """Values that a loop saves for its gradient stay where they are: entries of a list, without a call of an array
    library.
    """
    with af.Graph() as graph:
        x, steps = af.placeholder("float32", (8, 8)), af.placeholder("int32", ())
        _, y = af.while_loop(lambda i, _: i < steps, lambda i, y: (i + 1, af.tanh(af.exp(y) * x)), (np.int32(0), x))
        slope = af.gradients(af.sum(y), x)

    async def calls(count: int) -> Counter[Call]:
        async with af.Session(graph) as session:
            await session.run(slope, {x: np.zeros((8, 8), np.float32), steps: 1})
            (thread,) = clock.machine.threads.values()
            before = thread.calls.copy()
            await session.run(slope, {x: np.zeros((8, 8), np.float32), steps: count})
            return thread.calls - before

    with virtual_clock("v100", host=SLOW) as clock:
        more = clock.run(calls(7)) - clock.run(calls(3))
    assert more["launch"] > 0 and more["view"] == 0
    assert more["step"] >= 4 * (2 + 2), "at least two values are saved, and found again"


def test_a_hazard_in_a_region_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimDevice, "order", lambda *_: None)
    with af.Graph() as graph:
        x = af.placeholder("float32", (64, 64))  # a smaller one is copied on the stream of the region
        y = af.tanh(x @ x) @ x

    async def main() -> None:
        async with af.Session(graph) as session:
            await session.run(y, {x: np.eye(64, dtype=np.float32)})

    with (
        virtual_clock("v100", launches="regions") as clock,
        pytest.raises((HazardError, af.KernelError), match="'feed'"),
    ):
        clock.run(main())


def test_hosts_describe_themselves_and_the_source_of_their_figures() -> None:
    assert next(iter(HOSTS.values())) is DEFAULT_HOST is host_named("asyncflow")
    assert "benchmarks.gpu_model to the runs of 20" in DEFAULT_HOST.source and not DEFAULT_HOST.thread_a_device
    for host in HOSTS.values():
        assert host.source and host.launches in LAUNCHES
        assert all(0 < getattr(host, name) < 1e-3 for name in COSTS)
    assert HOSTS["c++"].thread_a_device
    with pytest.raises(ValueError, match=r"unknown host 'rust'; hosts are asyncflow, c\+\+"):
        host_named("rust")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"host": "rust"}, ValueError, "unknown host 'rust'"),
        ({"host": 3}, TypeError, "a host is the name of one, or a Host; got int 3"),
        ({"launches": "kernels"}, ValueError, "launches is one of 'regions', 'nodes', 'graphs'; got 'kernels'"),
    ],
)
def test_options_that_make_no_sense(options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        virtual_clock(**options)
