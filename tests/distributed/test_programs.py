"""Behaviour 14, 19, 23, 32, 43, 70, 71, 73 and 77 over 2, 3 and 8 simulated devices."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.testing import virtual_clock
from tests.conformance.gates import settle
from tests.distributed.clusters import COUNTS, Cluster, ring

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conftest import OpenSession

CLUSTERS = [*(Cluster(count, jitter=0.3) for count in COUNTS), Cluster(3, "cuda")]
OVER = pytest.mark.parametrize(
    "cluster", CLUSTERS, ids=lambda c: f"{c.count}" if c.kind == "sim" else f"{c.kind}-{c.count}"
)
BOTH = pytest.mark.parametrize("taken", [False, True], ids=["untaken", "taken"])
LARGE = np.ones(1 << 16, np.float32)


def on(device: str, build: Callable[[], Any]) -> Callable[[], Any]:
    """A branch whose nodes are on a device."""

    def built() -> Any:
        with af.device(device):
            return build()

    return built


@BOTH
@OVER
def test_an_assertion_on_another_device(cluster: Cluster, taken: bool) -> None:
    """Behaviour 14: a failing assert on the untaken side never fires, also on another device."""

    async def main(open_session: OpenSession) -> None:
        with af.Graph() as graph:
            pred, x = af.placeholder("bool", ()), af.placeholder("float32", (3,))

            def checked() -> af.Tensor:
                with af.control_dependencies([af.assert_that(af.all(x < 0), "x is not negative")]):
                    return af.identity(x)

            with af.device(cluster.device(0)):
                asked = af.logical_not(af.logical_not(pred))
            picked = af.cond(asked, on(cluster.device(-1), checked), on(cluster.device(1), lambda: -x))
        async with open_session(graph) as session:
            running = session.run(picked, {pred: taken, x: np.ones(3, np.float32)})
            if not taken:
                np.testing.assert_array_equal(await running, [-1, -1, -1])
                return
            with pytest.raises(af.KernelError, match="x is not negative") as caught:
                await running
            assert caught.value.device == cluster.device(-1)
            del caught  # its traceback holds the values

    cluster.run(main)


@BOTH
@OVER
def test_a_predicate_from_another_device(cluster: Cluster, taken: bool) -> None:
    """Behaviour 19: computed on one device and used on all, with one element in any shape; or fed over a constant."""

    async def main(open_session: OpenSession) -> None:
        with af.Graph() as graph:
            x, constant = af.placeholder("float32", (1, 1)), af.constant(True)
            with af.device(cluster.device(-1)):
                pred = x > 0
            sides = [
                af.cond(pred, on(device, lambda: af.sum(x) + 37), on(device, lambda: af.sum(x))) for device in devices
            ]
            replaced = af.cond(constant, on(devices[1], lambda: x * 37), on(devices[0], lambda: x * 0))
        async with open_session(graph) as session:
            fed = np.full((1, 1), 2 if taken else -2, np.float32)
            assert await session.run(sides, {x: fed}) == [39 if taken else -2] * cluster.count
            assert await session.run(replaced, {x: fed, constant: taken}) == fed * 37 * taken

    devices = cluster.devices
    cluster.run(main)


@BOTH
@OVER
def test_a_switch_is_with_its_data(cluster: Cluster, taken: bool) -> None:
    """Behaviour 23: only the predicate crosses; large captures stay where they are, not copied to the host."""

    async def main(open_session: OpenSession) -> None:
        with af.Graph() as graph:
            x, y = af.placeholder("float32", LARGE.shape), af.placeholder("float32", ())
            with af.device(cluster.device(0)):
                pred = y > 0
            with af.device(cluster.device(1)):
                there = x * 2
            home = cluster.device(1)
            picked = af.cond(pred, on(home, lambda: af.sum(there)), on(home, lambda: af.sum(there * 2)))
        trace = af.Trace()
        async with open_session(graph) as session:
            total = await session.run(picked, {x: LARGE, y: 1.0 if taken else -1.0}, trace=trace)
        assert total == LARGE.size * (2 if taken else 4)
        assert trace.transfers
        assert max(transfer.nbytes for transfer in trace.transfers) <= 8
        assert "peer" not in {firing.stream for firing in trace.firings}

    cluster.run(main)


@pytest.mark.parametrize("inner_first", [False, True])
@OVER
def test_nested_loops_split_both_ways(cluster: Cluster, inner_first: bool) -> None:
    """Behaviour 32: 1048576, the outer loop on one device and the inner one on another, and the other way round."""

    async def main(open_session: OpenSession) -> None:
        outer, inner = (cluster.device(k) for k in ((-1, 0) if inner_first else (0, -1)))
        with af.Graph() as graph:
            one = af.placeholder("float32", ())

            def row(i: Any, x: Any) -> Any:
                with af.device(inner):
                    _, doubled = af.while_loop(lambda j, _: j < 5, lambda j, v: (j + 1, v + v), (0, x), name="inner")
                with af.device(outer):
                    return i + 1, doubled * one

            _, result = af.while_loop(lambda i, _: i < 4, row, (0, one), name="outer")
        async with open_session(graph) as session:
            assert session.plan(result, [one]).partitions[1:], "the loop was to be cut"
            assert await session.run(result, {one: 1.0}) == 1048576

    cluster.run(main)


@OVER
def test_nested_loops_of_fifteen(cluster: Cluster) -> None:
    """Behaviour 32: nested loops whose counters and sums are on different devices, in each direction."""

    async def main(open_session: OpenSession) -> None:
        for shift in range(cluster.count):
            with af.Graph() as graph:

                def row(i: Any, total: Any, shift: int = shift) -> Any:
                    def cell(j: Any, subtotal: Any) -> Any:
                        with af.device(cluster.device(shift + 1)):
                            product = i * j
                        with af.device(cluster.device(shift + 2)):
                            return j + 1, subtotal + product

                    return i + 1, af.while_loop(lambda j, _: j < 6, cell, (0, total), name="inner")[1]

                with af.device(cluster.device(shift)):
                    _, total = af.while_loop(lambda i, _: i < 6, row, (0, 0), name="outer")
            async with open_session(graph) as session:
                assert await session.run(total) == 225

    cluster.run(main)


@OVER
def test_counters_stay_on_the_host(cluster: Cluster) -> None:
    """Behaviour 43: device scopes around the loop and inside it; nothing but vectors is ever copied."""

    async def main(open_session: OpenSession) -> None:
        with af.Graph() as graph:
            x = af.placeholder("float32", (64,))

            def body(i: Any, v: Any) -> Any:
                with af.device(cluster.device(-1)):
                    doubled = v * 2
                return i + 1, doubled + 1

            with af.device(cluster.device(0)):
                count, result = af.while_loop(lambda i, _: i < 5, body, (0, x))
        trace = af.Trace()
        async with open_session(graph) as session:
            counted, value = await session.run([count, result], {x: np.zeros(64, np.float32)}, trace=trace)
        assert counted == 5
        np.testing.assert_array_equal(value, np.full(64, 31, np.float32))
        devices = Counter((f.op, f.device) for f in trace.firings if f.op == "multiply")
        assert devices == {("multiply", cluster.device(-1)): 5}
        copied = {firing.outputs for firing in trace.firings if firing.stream in ("peer", "h2d", "d2h")}
        assert copied == {"float32[64]"}

    cluster.run(main)


@OVER
def test_assign_add_is_exact(cluster: Cluster) -> None:
    """Behaviour 70: of 200 concurrent runs none is lost, with a variable on each device."""

    async def main(open_session: OpenSession) -> None:
        with af.Graph() as graph:
            x = af.placeholder("int64", ())
            counts, adds = [], []
            for k in range(cluster.count):
                with af.device(cluster.device(k)):
                    counts.append(af.Variable(1, name=f"count{k}"))
            for k, count in enumerate(counts):
                with af.device(cluster.device(k + 1)):
                    step = x * 1
                adds.append(count.assign_add(step))
        async with open_session(graph) as session:
            seen = await asyncio.gather(*(session.run(adds, {x: 1}) for _ in range(200)))
            for values in zip(*seen, strict=True):
                assert sorted(values) == list(range(2, 202))
            assert await session.run(counts) == [201] * cluster.count

    cluster.run(main)


@pytest.mark.parametrize("seed", range(5))
@OVER
def test_a_read_after_a_write(cluster: Cluster, seed: int) -> None:
    """Behaviour 71: with a control edge that leads over another device the read gives B; an unfetched write is
    pruned."""

    async def main(open_session: OpenSession) -> None:
        with af.Graph(effects="unordered") as graph:
            variable = af.Variable("A", name="letter")
            untouched = af.Variable("A", name="untouched")
            untouched.assign("B")
            with af.control_dependencies([variable.assign("B")]), af.device(cluster.device(seed)):
                between = af.identity(af.constant(1.0))
            with af.control_dependencies([between]):
                after = variable.read()
        async with open_session(graph, seed=seed, placement_seed=seed) as session:
            assert await session.run([after, untouched]) == ["B", "A"]

    cluster.run(main)


@pytest.mark.parametrize("seed", range(4))
@OVER
def test_each_node_fires_once_a_tag(cluster: Cluster, seed: int) -> None:
    """Behaviour 73: a node fires on its one device; it is scheduled, started and ended in this order, and sends
    later.
    """

    async def main(open_session: OpenSession) -> None:
        with af.Graph() as graph:
            program = ring(cluster)
        trace = af.Trace()
        async with open_session(graph, seed=seed, debug=True) as session:
            total = await session.run(program.total, program.feeds(), trace=trace)
        assert total.tobytes() == program.expected().tobytes()
        kernels = [firing for firing in trace.firings if firing.stream in ("compute", "host", "async", "inline")]
        assert set(Counter((f.node, f.tag) for f in kernels).values()) == {1}
        assert {firing.device for firing in kernels} == set(cluster.devices)
        for firing in trace.firings:
            assert firing.scheduled_ns <= firing.started_ns <= firing.ended_ns
        for transfer in trace.transfers:
            assert transfer.source != transfer.target
            assert transfer.sent_ns <= transfer.received_ns
        sent = Counter((t.node, t.tag, t.target) for t in trace.transfers)
        assert set(sent.values()) == {1}

    cluster.run(main)


@OVER
def test_equal_nodes_on_different_devices_are_not_joined(cluster: Cluster) -> None:
    """Behaviour 77: CSE joins equal nodes on one device, and none across devices."""

    async def main(open_session: OpenSession) -> None:
        with af.Graph() as graph:
            x = af.placeholder("float32", (4,))
            twice = []
            for device in cluster.devices * 2:
                with af.device(device):
                    twice.append(af.exp(x))
        trace = af.Trace()
        async with open_session(graph) as session:
            await session.run(twice, {x: np.ones(4, np.float32)}, trace=trace)
        fired = Counter(firing.device for firing in trace.firings if firing.op == "exp")
        assert fired == dict.fromkeys(cluster.devices, 1)

    cluster.run(main)


@pytest.mark.parametrize("window", [2, 3])
def test_an_effect_where_the_predicate_is_does_not_hold_up_the_loop(window: int) -> None:
    """Behaviour 10, 36: as many iterations are live as on one device, though the counter is on another one.

    The effects of all iterations are in order, so the first one holds up the others; the counter goes on meanwhile.
    """

    async def main(open_session: OpenSession) -> None:
        release = asyncio.Event()
        counted: list[int] = []

        @af.op(outputs=(), stateful=True)
        async def effect() -> None:
            await release.wait()

        @af.op(outputs=lambda i: i)
        async def count(i: Any) -> Any:
            counted.append(int(i))
            return i

        def goes_on(i: Any) -> Any:
            with af.device("sim:0"):
                return i < 5

        def body(i: Any) -> Any:
            with af.device("sim:0"):
                effect()
            with af.device("sim:1"):
                return count(i) + 1

        with af.Graph() as graph:
            (result,) = af.while_loop(goes_on, body, (0,), parallel_iterations=window)
        async with open_session(graph) as session:
            running = asyncio.ensure_future(session.run(result))
            await settle()
            ahead = len(counted)
            release.set()
            assert await running == 5
        assert ahead == window

    Cluster(2).run(main)


def test_a_sum_where_the_predicate_is_does_not_hold_up_the_loop() -> None:
    """Behaviour 10, 27: it is an integer that waits for each iteration's value, and no counter."""

    async def main(open_session: OpenSession) -> None:
        release = asyncio.Event()
        begun: list[int] = []

        @af.op(outputs=lambda i: i)
        async def wait(i: Any) -> Any:
            begun.append(int(i))
            await release.wait()
            return i

        def goes_on(i: Any, total: Any) -> Any:
            with af.device("sim:0"):
                return i < 5

        def body(i: Any, total: Any) -> Any:
            with af.device("sim:1"):
                following, value = i + 1, wait(i)
            with af.device("sim:0"):
                return following, total + value

        with af.Graph() as graph:
            result = af.while_loop(goes_on, body, (0, 0), parallel_iterations=3)
        async with open_session(graph) as session:
            running = asyncio.ensure_future(session.run(result))
            await settle()
            ahead = len(begun)
            release.set()
            assert await running == (5, 10)
        assert ahead == 3

    Cluster(2).run(main)


@pytest.mark.parametrize("window", [1, 2, 5])
def test_an_iteration_is_live_until_every_card_is_done_with_it(window: int) -> None:
    """Behaviour 10: however far one card is behind, no more values than that wait for it where they are made."""
    rows, trips = 2048, 16

    def goes_on(i: Any, total: Any) -> Any:
        with af.device("sim:0"):
            return i < trips

    def body(i: Any, total: Any) -> Any:
        with af.device("sim:0"):
            made = x + af.astype(i, "float32")
        with af.device("sim:1"):
            return i + 1, total + (made @ made @ made @ made)[0, 0]

    with af.Graph() as graph:
        x = af.placeholder("float32", (rows, rows))
        _, total = af.while_loop(goes_on, body, (0, 0.0), parallel_iterations=window)

    async def main() -> int:
        async with af.Session(graph, devices=["sim:0", "sim:1"], regions=False) as session:
            await session.run(total, {x: np.ones((rows, rows), np.float32)})
            return session.devices[0].memory.peak

    with virtual_clock("2 x v100, nvlink2", shapes_only=True) as clock:
        assert clock.run(main()) == (1 + window) * 4 * rows**2, "with the one that is fed"
