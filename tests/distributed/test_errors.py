"""Fault F2, F30 and F34, Behaviour 72 and 76: failures on one of several devices."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.graph.building.build import apply
from asyncflow.graph.op import OPAQUE, WAITS, Op
from asyncflow.testing import virtual_clock
from tests.conftest import AuditedRun, assert_baseline
from tests.distributed.clusters import COUNTS, Cluster, assert_nothing_left, ring
from tests.faults.kernels import INT, CoroutineGate, in_flight

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conftest import OpenSession

LARGE = np.ones(1 << 18, np.float32)
"""1 MiB."""


class Fragile:
    """An op that passes its vector on, and raises on the devices that are armed, from iteration 2 on."""

    def __init__(self) -> None:
        self.armed: set[str] = set()

    def on(self, device: str, i: af.Tensor, x: af.Tensor) -> af.Tensor:
        @af.op(outputs=lambda i, x: x, name="fragile")
        def kernel(i: Any, x: Any) -> Any:
            if i == 2 and device in self.armed:
                raise LookupError(f"on {device}")
            return x

        with af.device(device):
            passed: af.Tensor = kernel(i, x)
        return passed


def fragile_loop(cluster: Cluster, fragile: Fragile) -> tuple[af.Tensor, af.Tensor]:
    """Six iterations that go through all devices, each of which can fail; and their feeds."""
    x = af.placeholder("float32", (3,))

    def body(i: af.Tensor, *parts: af.Tensor) -> tuple[af.Tensor, ...]:
        return (i + 1, *(fragile.on(cluster.device(k), i, part) + parts[k - 1] for k, part in enumerate(parts)))

    result = af.while_loop(lambda i, *_: i < 6, body, (0, *[x] * cluster.count), name="loop")[1]
    assert isinstance(result, af.Tensor)
    return result, x


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sim", "cpu", "cuda"])
@pytest.mark.parametrize("count", COUNTS)
def test_an_error_on_each_device_in_turn(count: int, kind: Any) -> None:
    """Fault F1, Behaviour 72, 76: it is raised with its device and tag, every Recv that waits ends, and the next
    run is right."""

    async def main(open_session: OpenSession) -> None:
        fragile, feed = Fragile(), np.ones(3, np.float32)
        with af.Graph() as graph:
            result, x = fragile_loop(cluster, fragile)
        async with open_session(graph) as session:
            for device in cluster.devices:
                fragile.armed = {device}
                with pytest.raises(af.KernelError, match=f"LookupError: on {device}") as caught:
                    await session.run(result, {x: feed})
                assert (caught.value.device, caught.value.tag) == (device, "loop/2")
                assert not hasattr(caught.value, "__notes__")
                del caught
                assert AuditedRun.leftovers == []
                assert_nothing_left(session)
                fragile.armed.clear()
                np.testing.assert_array_equal(await session.run(result, {x: feed}), feed * 2**6)

    cluster = Cluster(count, kind=kind, jitter=0.2)
    cluster.run(main)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("count", COUNTS)
def test_errors_on_all_devices(count: int, seed: int) -> None:
    """Fault F2, Behaviour 72: one is raised, others that came before all had stopped are its notes; a seed repeats
    them."""

    async def main(open_session: OpenSession) -> tuple[str, list[str]]:
        fragile = Fragile()
        with af.Graph() as graph:
            result, x = fragile_loop(cluster, fragile)
        fragile.armed = set(cluster.devices)
        async with open_session(graph, seed=seed) as session:
            with pytest.raises(af.KernelError, match="LookupError: on sim:") as caught:
                await session.run(result, {x: np.ones(3, np.float32)})
            told = caught.value.device, getattr(caught.value, "__notes__", [])
            del caught
            return told

    cluster = Cluster(count, jitter=0.2, seed=seed)
    told = cluster.run(main)
    assert all(note.startswith("also failed: KernelError: LookupError: on sim:") for note in told[1])
    assert cluster.run(main) == told


async def never(x: Any) -> Any:
    """A coroutine that only a cancel ends."""
    await asyncio.get_running_loop().create_future()


@pytest.mark.parametrize("count", COUNTS)
def test_an_abort_ends_all_that_wait(count: int) -> None:
    """Behaviour 76: every other device waits for a value that never comes; one error, and it is the same for all."""

    async def main(open_session: OpenSession) -> None:
        endless = af.op(outputs=INT, name="endless")(never)

        @af.op(outputs=INT)
        async def failing(x: Any) -> Any:
            for _ in range(50):
                await asyncio.sleep(0)
            raise LookupError("stop")

        with af.Graph() as graph:
            with af.device(cluster.device(0)):
                source, bad = endless(1), failing(2)
            waiting = []
            for k in range(1, count):
                with af.device(cluster.device(k)):
                    waiting.append(source + k)
        async with open_session(graph) as session:
            with pytest.raises(af.KernelError, match="LookupError: stop") as caught:
                await session.run([bad, *waiting])
            assert not hasattr(caught.value, "__notes__")
        assert AuditedRun.leftovers == []

    cluster = Cluster(count)
    cluster.run(main)


@pytest.mark.parametrize("kind", ["sim", "cpu", "cuda"])
def test_a_coroutine_that_cannot_be_made(kind: Any) -> None:
    """Behaviour 76: the function that should make a coroutine raises instead, and the run ends like any failed run."""

    def call(x: Any) -> Any:
        raise LookupError("no coroutine")

    async def main(open_session: OpenSession) -> None:
        broken = Op(name="broken", infer=lambda x: x, kernel=lambda xp: call, conduct=WAITS)
        with af.Graph() as graph, af.device(cluster.device(1)):
            lost = apply(broken, af.constant(1.0))[0]
        async with open_session(graph) as session:
            with pytest.raises(af.KernelError, match="LookupError: no coroutine"):
                await session.run(lost)

    cluster = Cluster(2, kind=kind)
    cluster.run(main)


@pytest.mark.parametrize("kind", ["sim", "cpu", "cuda"])
def test_a_wrong_dtype_is_not_sent(kind: Any) -> None:
    """Behaviour 76: in debug mode, a value that is not as declared fails where it is made, not where it is received."""

    async def main(open_session: OpenSession) -> None:
        spec = af.spec("float32", (2,))
        liar = Op("liar", lambda x: spec, lambda xp: lambda x: np.zeros(2, np.float64), traits=OPAQUE)
        with af.Graph() as graph:
            with af.device(cluster.device(0)):
                lie = apply(liar, af.constant(np.ones(2, np.float32)))[0]
            with af.device(cluster.device(1)):
                used = lie + 1
        async with open_session(graph, debug=True) as session:
            with pytest.raises(af.KernelError, match=r"output 0 is float64\[2\]; declared float32\[2\]") as caught:
                await session.run(used)
            assert (caught.value.op, caught.value.device) == ("liar", cluster.device(0))

    cluster = Cluster(2, kind=kind)
    cluster.run(main)


def test_a_device_that_is_not_there() -> None:
    """Behaviour 76: a node asks for a device that the session has not: an error before anything runs, with both."""

    async def main(open_session: OpenSession) -> None:
        with af.Graph() as graph, af.device("sim:7"):
            lost = af.constant(1.0) + 1
        async with open_session(graph) as session:
            with pytest.raises(af.PlacementError, match=r"'sim:7'.*this session has sim:0, sim:1") as caught:
                await session.run(lost)
            assert __file__ in str(caught.value)
            assert session.statistics().completed == 0

    Cluster(2).run(main)


@pytest.mark.slow
def test_five_thousand_loop_variables_over_a_transfer() -> None:
    """Behaviour 76: every one of them comes from another device."""

    async def main(open_session: OpenSession) -> None:
        with af.Graph() as graph:
            x = af.placeholder("float32", (2,))
            with af.device("sim:0"):
                starts = [x + np.float32(k) for k in range(5000)]

            def body(i: af.Tensor, *values: af.Tensor) -> tuple[af.Tensor, ...]:
                with af.device("sim:1"):
                    return (i + 1, *(value * 2 for value in values))

            _, *ends = af.while_loop(lambda i, *_: i < 2, body, (0, *starts))
        async with open_session(graph, optimize=False) as session:  # joining 5000 variables takes most of a minute
            results = await session.run(ends, {x: np.ones(2, np.float32)})
        assert np.array_equal(results, [[4 * (1 + k)] * 2 for k in range(5000)])

    Cluster(2).run(main)


@pytest.mark.parametrize("count", COUNTS)
def test_out_of_memory_on_one_device(count: int) -> None:
    """Fault F30: requested, used, limit and the five largest; what runs elsewhere goes on, and so does the device."""

    async def main(open_session: OpenSession) -> None:
        gate = CoroutineGate()
        with af.Graph() as graph:
            x, ticket = af.placeholder("float32", LARGE.shape), af.placeholder("int64", ())
            with af.device(cluster.device(-1)):
                parts = [af.roll(x, k) for k in range(1, 9)]  # which become no one kernel
                total = sum(parts[1:], start=parts[0])
                modest = x + 1
            with af.device(cluster.device(0)):
                held = x * 2
                with af.control_dependencies([gate.op(ticket).node]):
                    slow = af.sum(held)
        async with open_session(graph, memory_limit=6 * LARGE.nbytes) as session:
            waiting = session.run(slow, {x: LARGE, ticket: 1})
            async with in_flight(waiting, lambda: gate.started) as task:
                with pytest.raises(af.OutOfMemoryError) as caught:
                    await session.run([total, *parts], {x: LARGE})
                error = caught.value
                assert error.device == cluster.device(-1)
                assert (error.requested, error.limit) == (LARGE.nbytes, 6 * LARGE.nbytes)
                assert error.used > error.limit
                largest = str(error).partition("largest now: ")[2]
                assert largest.partition("\n")[0].count("1.0 MiB") == 5, str(error)
                del caught, error
                np.testing.assert_array_equal(await session.run(modest, {x: LARGE}), LARGE + 1)
                gate.opened.set()
                assert await task == 2 * LARGE.size

    cluster = Cluster(count)
    cluster.run(main)


@pytest.mark.parametrize("count", [1, 2])
def test_a_feed_that_does_not_fit(count: int) -> None:
    """Fault F30: it names the placeholder's line, and the run is over: nothing of it is left."""

    async def main(open_session: OpenSession) -> None:
        with af.Graph() as graph:
            small, x = af.placeholder("float32", (2,)), af.placeholder("float32", LARGE.shape)
            sums = [af.sum(small), *on_each(cluster, lambda: af.sum(x))]
        async with open_session(graph, memory_limit=LARGE.nbytes - 1) as session:
            with pytest.raises(af.OutOfMemoryError) as caught:
                await session.run(sums, {small: np.ones(2, np.float32), x: LARGE})
            error = caught.value
            assert (error.requested, error.limit) == (LARGE.nbytes, LARGE.nbytes - 1)
            assert error.location == x.node.location
            assert error.inputs == (f"float32[{LARGE.size}]",)
            del caught, error
            assert_nothing_left(session)
            assert await session.run(sums[0], {small: np.ones(2, np.float32)}) == 2

    cluster = Cluster(count)
    cluster.run(main)


def test_a_constant_that_does_not_fit() -> None:
    """Fault F30: it is on the device before any run, and the error is that of a value in one, with its line."""

    async def main(open_session: OpenSession) -> None:
        with af.Graph() as graph:
            large = af.constant(LARGE)
            (total,) = on_each(cluster, lambda: af.sum(large * 2))
        async with open_session(graph, memory_limit=LARGE.nbytes - 1, optimize=False) as session:
            with pytest.raises(af.OutOfMemoryError) as caught:
                await session.run(total)
            assert (caught.value.requested, caught.value.device) == (LARGE.nbytes, "sim:0")
            assert caught.value.location == large.node.location

    cluster = Cluster(1)
    cluster.run(main)


def on_each(cluster: Cluster, build: Callable[[], af.Tensor]) -> list[af.Tensor]:
    """The same on each device."""
    built = []
    for device in cluster.devices:
        with af.device(device):
            built.append(build())
    return built


@pytest.mark.parametrize("found_by", ["a copy to the host", "a copy to another device", "an iteration", "the end"])
def test_a_hazard_ends_the_run_whoever_finds_it(found_by: str) -> None:
    """The next call of a device finds memory that was freed too early, and raises in code that no run waits for."""

    async def main() -> None:
        machine = clock.machine

        @af.op(outputs=lambda x: x)
        def careless(x: Any) -> Any:
            machine.hazards.append("freed too early")
            return x + 1

        graph, fetch = build(careless)
        async with af.Session(graph, devices=["sim:0", "sim:1"]) as session:
            with pytest.raises(af.AsyncflowError, match="freed too early"):
                await session.run(fetch)
            assert_baseline(session)

    def build(careless: Any) -> tuple[af.Graph, Any]:
        with af.Graph() as graph, af.device("sim:0"):
            vector = af.constant(np.ones(3, np.float32))
            if found_by == "a copy to the host":
                return graph, careless(vector)
            if found_by == "an iteration":
                return graph, looping(careless)
            made = careless(vector)
            if found_by == "the end":
                return graph, made.node
            with af.device("sim:1"):
                return graph, (made + 1).node

    def looping(careless: Any) -> af.Node:
        """A loop whose iteration ends on sim:1 when `careless` is launched there."""

        def body(i: af.Tensor, x: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
            with af.device("sim:1"):
                return i + 1, careless(x)

        result = af.while_loop(lambda i, _: i < 1, body, (0, np.ones(3, np.float32)))[1]
        with af.device("sim:1"):
            return af.identity(result).node

    with virtual_clock("2 x v100, nvlink2") as clock:
        clock.run(main())
    assert AuditedRun.leftovers == []


@pytest.mark.parametrize("count", COUNTS)
def test_no_peer_link(count: int) -> None:
    """Fault F34: without a link between cards, copies go by way of the host, and the results are equal."""

    def streams(cluster: Cluster) -> tuple[set[str], bytes]:
        async def main(open_session: OpenSession) -> tuple[set[str], bytes]:
            with af.Graph() as graph:
                program = ring(cluster)
            trace = af.Trace()
            async with open_session(graph) as session:
                total = await session.run(program.total, program.feeds(), trace=trace)
            assert total.tobytes() == program.expected().tobytes()
            copies = {firing.stream for firing in trace.firings} & {"peer", "h2d", "d2h"}
            transferred = sum(transfer.nbytes for transfer in trace.transfers)
            assert transferred > 0
            return copies, total.tobytes()

        return cluster.run(main)

    linked, staged = streams(Cluster(count, jitter=0.1)), streams(Cluster(count, link="", jitter=0.1))
    assert linked[1] == staged[1]
    assert "peer" in linked[0]
    assert staged[0] == {"h2d", "d2h"}
