"""Sessions on CUDA devices, on the stand-in for CuPy: launching ahead, memory, loss, cancellation, timelines."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from contextvars import ContextVar
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.cli.devices import list_devices
from asyncflow.devices.cuda.backend import CudaBackend, cuda_backend
from asyncflow.devices.cuda.transfers.pinned import shared_slab
from asyncflow.errors import DeviceLostError, PlacementError
from asyncflow.streams.cuda.stream import CudaStream
from tests.fake_cupy import FakeCupy
from tests.fake_cupy.stand_in import stand_in

PINNED = 128 << 10

Make = Callable[..., FakeCupy]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes the stand-in that sessions find from then on."""
    with ExitStack() as made:

        def cards(**options: Any) -> FakeCupy:
            fake = made.enter_context(stand_in(pinned_nbytes=PINNED, **options))
            made.callback(fake.wait_idle)
            made.callback(fake.resume)
            return fake

        yield cards


@pytest.fixture
def cupy(make: Make) -> FakeCupy:
    return make(devices=2)


@asynccontextmanager
async def opened(graph: af.Graph, devices: list[str], **options: Any) -> AsyncIterator[af.Session]:
    async with af.Session(graph, devices, **options) as session:
        try:
            yield session
        finally:
            cuda_backend().cupy.resume()  # where a test failed


def counting(count: int, parallel_iterations: int = 32) -> tuple[af.Graph, af.Tensor, af.Tensor]:
    """A loop of `count` kernels, which the host decides about; its start and its result."""
    with af.Graph() as graph:
        x = af.placeholder("float32", (4,))
        _, y = af.while_loop(
            lambda i, _: i < count,
            lambda i, y: (i + 1, y + 1.0),
            (af.constant(0), x),
            parallel_iterations=parallel_iterations,
        )
    return graph, x, y


def halving() -> tuple[af.Graph, af.Tensor, af.Tensor]:
    """A loop that a value of the device ends, and how many iterations it took."""
    with af.Graph() as graph:
        x = af.placeholder("float32", (4,))
        _, count = af.while_loop(
            lambda y, _: af.max(y) > 1.0, lambda y, n: (y * 0.5, n + 1.0), (x, af.constant(np.zeros(4, "float32")))
        )
    return graph, x, count


START = np.zeros(4, "float32")


async def stepped(cupy: FakeCupy, is_so: Callable[[], Any]) -> None:
    """Lets a paused card do one thing at a time until it is so: a card that ran on might have passed that by."""
    while not is_so():
        cupy.step()
        await asyncio.sleep(0)


async def settled(quantity: Callable[[], int]) -> int:
    """Return the value of `quantity` once a hundred turns of the event loop do not change it."""
    before = -1
    while before != (now := quantity()):
        before = now
        for _ in range(100):
            await asyncio.sleep(0)
    return now


# -- launching ---------------------------------------------------------------------------------------------------------


async def test_what_only_the_host_uses_is_not_copied(cupy: FakeCupy) -> None:
    """Feeds of functions of the host, constants for them, and values between them, or for a fetch, are not copied."""

    @af.op(outputs=af.spec("float32", (40,)))
    def added(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return x + y

    with af.Graph() as graph:
        x = af.placeholder("float32", (40,))
        y = added(added(x, np.ones(40, np.float32)), x)
        z = y * 2.0
    fed = np.arange(40, dtype=np.float32)
    async with opened(graph, ["cuda:0"]) as session:

        async def copies(fetches: Any) -> tuple[Any, int]:
            before = len(cupy.engine.launches)
            found = await session.run(fetches, {x: fed})
            return found, sum(name == "memcpyAsync" for _, name in cupy.engine.launches[before:])

        found, count = await copies(y)
        np.testing.assert_array_equal(found, 2 * fed + 1)
        assert count == 0
        found, count = await copies(z)
        np.testing.assert_array_equal(found, 4 * fed + 2)
        assert count == 2, "into the card for the product, and out"
        found, count = await copies(af.on_device(y))
        assert isinstance(found, cupy.ndarray)
        np.testing.assert_array_equal(found.get(), 2 * fed + 1)
        assert count == 1


@pytest.mark.slow
@pytest.mark.parametrize("regions", [False, True])
async def test_thousands_of_launches_never_block_the_event_loop(cupy: FakeCupy, regions: bool) -> None:
    """The card has stopped, and the loop goes on: launching pauses long before the driver would make it wait."""
    graph, x, y = counting(5_000)
    async with opened(graph, ["cuda:0"], regions=regions, memory_limit=8 << 20) as session:
        await session.run(y, {x: START})
        warm = len(cupy.blocking())
        cupy.pause()
        before = len(cupy.engine.launches)
        running = asyncio.ensure_future(session.run(y, {x: START}))
        launched = await settled(lambda: len(cupy.engine.launches)) - before
        assert 64 < launched < 1_000 and not running.done()
        cupy.resume()
        assert (await running)[0] == 5_000
        assert cupy.blocking()[warm:] == []


@pytest.mark.slow
async def test_the_throttle_holds_for_all_runs_together_and_one_is_cancelled(cupy: FakeCupy) -> None:
    graph, x, y = counting(1_000)
    async with opened(graph, ["cuda:0"], regions=False, memory_limit=8 << 20) as session:
        await session.run(y, {x: START})
        cupy.pause()
        before = len(cupy.engine.launches)
        runs = [asyncio.ensure_future(session.run(y, {x: START + n})) for n in range(5)]
        assert await settled(lambda: len(cupy.engine.launches)) - before < 1_000
        runs[2].cancel()
        cupy.resume()
        results: list[Any] = await asyncio.gather(*runs, return_exceptions=True)
        assert isinstance(results.pop(2), asyncio.CancelledError)
        assert [result[0] for result in results] == [1_000, 1_001, 1_003, 1_004]


async def test_the_host_runs_ahead_of_a_loop_that_it_decides_about(cupy: FakeCupy) -> None:
    graph, x, y = counting(50)
    async with opened(graph, ["cuda:0"], regions=False) as session:
        await session.run(y, {x: START})
        cupy.pause()
        before = len(cupy.engine.launches)
        running = asyncio.ensure_future(session.run(y, {x: START}))
        await settled(lambda: len(cupy.engine.launches))
        names = Counter(name for _, name in cupy.engine.launches[before:])
        assert names["cupy_add"] == 50
        cupy.resume()
        assert (await running)[0] == 50


@pytest.mark.parametrize("regions", [False, True])
async def test_a_predicate_of_the_device_costs_one_ticket(
    cupy: FakeCupy, regions: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: Counter[str] = Counter()
    notify = CudaStream.notify

    def counted(stream: CudaStream, *args: Any) -> None:
        asked[stream.name] += 1
        notify(stream, *args)

    graph, x, count = halving()
    async with opened(graph, ["cuda:0"], regions=regions) as session:
        await session.run(count, {x: START + 4.0})
        monkeypatch.setattr(CudaStream, "notify", counted)
        tickets = []
        for start in (4.0, 1024.0):
            asked.clear()
            assert (await session.run(count, {x: START + start}))[0] == np.log2(start)
            tickets.append(sum(asked.values()))
        assert tickets[1] - tickets[0] <= 8 + 1  # eight iterations more, and a mark of the throttle


@pytest.mark.parametrize("seed", range(6))
async def test_concurrent_runs_some_of_them_cancelled(make: Make, seed: int) -> None:
    """With one to three streams a device, with regions and without."""
    make(devices=2, seed=seed)
    streams = 1 + seed % 3
    rng = random.Random(seed)
    with af.Graph() as graph:
        x = af.placeholder("float32", (None, 8))
        total = af.Variable(np.zeros(8, "float32"), name="total")
        _, y = af.while_loop(
            lambda i, _: i < 5, lambda i, y: (i + 1, af.tanh(y.mT @ y @ y.mT).mT + x), (af.constant(0), x)
        )
        parts = af.concat([af.sum(y * k, axis=0) for k in (1.0, 2.0, 3.0)])
        added = total.assign_add(af.constant(np.ones(8, "float32")))
    devices = ["cuda:0", "cuda:1", "cuda:2"]
    async with opened(graph, devices, compute_streams=streams, placement_seed=seed, regions=bool(seed % 2)) as session:
        feeds = [np.random.default_rng(n).random((rng.choice((1, 5, 300)), 8), "float32") for n in range(6)]
        alone = [await session.run(parts, {x: value}) for value in feeds]
        runs = [asyncio.ensure_future(session.run((parts, added), {x: value})) for value in feeds]
        doomed = set(rng.sample(range(6), 2))
        for number in rng.sample(range(6), 6):
            for _ in range(rng.randrange(3)):
                await asyncio.sleep(0)
            if number in doomed:
                runs[number].cancel()
        results = await asyncio.gather(*runs, return_exceptions=True)
        for number, (result, expected) in enumerate(zip(results, alone, strict=True)):
            if not isinstance(result, BaseException):
                assert np.array_equal(result[0], expected), number
            else:
                assert isinstance(result, asyncio.CancelledError) and number in doomed
        assert session.statistics().runs == 0
        assert (await session.run(total))[0] <= 6


async def test_two_sessions_with_three_devices_each_on_one_card(make: Make) -> None:
    make(devices=1)
    with af.Graph() as graph:
        x = af.placeholder("float32", (8, 8))
        y = x
        for k in range(6):
            with af.device(f"cuda:{k % 3}"):
                y = y @ x + 1.0
    value = np.random.default_rng(0).random((8, 8), "float32")
    expected = value
    for _ in range(6):
        expected = expected @ value + 1
    devices = ["cuda:0", "cuda:1", "cuda:2"]
    async with opened(graph, devices, memory_limit=4 << 20) as one, opened(graph, devices) as other:
        assert [device.physical for device in one.devices] == [0, 0, 0]  # type: ignore[attr-defined]
        results = await asyncio.gather(*[session.run(y, {x: value}) for session in (one, other) * 5])
        for result in results:
            np.testing.assert_allclose(result, expected, rtol=1e-5)


# -- what the host computes --------------------------------------------------------------------------------------------

threads: list[tuple[int, object]] = []
variable: ContextVar[str] = ContextVar("variable", default="none")


@af.op(outputs=af.spec("float32", (None,)))
def where_am_i(x: Any) -> Any:
    threads.append((threading.get_ident(), variable.get()))
    return x + 1


@af.op(outputs=af.spec("float32", (None,)))
async def where_is_the_loop(x: Any) -> Any:
    await asyncio.sleep(0)
    threads.append((threading.get_ident(), variable.get()))
    return x + 1


@af.op(outputs=af.spec("float32", (4,)))
def added(x: Any, y: Any) -> Any:
    return x + y


@pytest.mark.parametrize(
    ("size", "op", "on_loop"),
    [(10, where_am_i, True), (100_000, where_am_i, False), (100_000, where_is_the_loop, True)],
)
async def test_long_kernels_of_the_host_run_on_a_thread(cupy: FakeCupy, size: int, op: Any, on_loop: bool) -> None:
    with af.Graph() as graph:
        x = af.placeholder("float32", (None,))
        y = op(x * 1.0)
    threads.clear()
    variable.set("the caller's")
    async with opened(graph, ["cuda:0"]) as session:
        assert (await session.run(y, {x: np.zeros(size, "float32")})).sum() == size
    ((thread, seen),) = threads
    assert (thread == threading.get_ident()) == on_loop and seen == "the caller's"


# -- memory ------------------------------------------------------------------------------------------------------------


def _sum_of_vectors(x: af.Tensor, s: af.Tensor, captures: bool) -> af.Tensor:
    """`x` and vectors of one element that are made of a number, in ways that CuPy has for arrays alone."""
    vectors = [
        s[None],
        af.reshape(s, (1,)),
        af.real(af.astype(s, "complex128")[None]),
        af.broadcast_arrays(s, np.ones(1))[0],
        af.expand_dims(s, axis=0),
        af.flip(s[None]),
    ]
    if not captures:  # a graph can hold none of these
        vectors += [af.vecdot(s[None], s[None])[None], af.TensorArray("float64", 1).write(0, s).read(0)[None]]
    for vector in vectors:
        x = x * 2.0 + vector
    return x


@pytest.mark.parametrize("captures", [False, True])
async def test_regions_make_arrays_of_numbers_of_the_host(cupy: FakeCupy, captures: bool) -> None:
    """NumPy's arrays would be on the host, where no kernel finds them."""
    with af.Graph() as graph:
        x, s = af.placeholder("float64", (3,)), af.placeholder("float64", ())
        y = _sum_of_vectors(x, s * 2.0 + 1.0, captures)
    fed = np.arange(3.0)
    async with af.Session(graph, ["cpu:0"]) as here, opened(graph, ["cuda:0"], cuda_graphs=captures) as there:
        for number in (2.0, 2.0, 2.0, 2.0, 3.0):
            found = await there.run(y, {x: fed, s: number})
            np.testing.assert_allclose(found, await here.run(y, {x: fed, s: number}))
        labels = [buffer.label for buffer in there.devices[0].memory.top(100)]
        assert any(label.startswith("CUDA graph of ") for label in labels) == captures


@pytest.mark.parametrize("regions", [False, True])
async def test_out_of_memory_names_the_node_and_leaves_the_session_usable(cupy: FakeCupy, regions: bool) -> None:
    with af.Graph() as graph:
        x = af.placeholder("float32", (None, 64))
        a = af.exp(x)
        y = af.sum(af.concat([a, a * 2.0]) @ af.constant(np.ones((64, 64), "float32")))
    async with opened(graph, ["cuda:0"], memory_limit=2 << 20, regions=regions) as session:
        (device,) = session.devices
        small = np.zeros((10, 64), "float32")
        expected = await session.run(y, {x: small})
        used = device.memory.used
        with pytest.raises(af.OutOfMemoryError, match="cuda:0") as caught:
            await session.run(y, {x: np.zeros((3_000, 64), "float32")})
        assert caught.value.device == "cuda:0" and caught.value.limit == 2 << 20
        assert caught.value.node and "built at" in str(caught.value)
        assert device.memory.used == used  # although the error is still there
        assert await session.run(y, {x: small}) == expected


async def test_a_feed_that_does_not_fit(cupy: FakeCupy) -> None:
    graph, x, y = counting(3)
    with graph:
        big = af.placeholder("float64", (None,), name="big")
        total = af.sum(big)
    async with opened(graph, ["cuda:0"], memory_limit=1 << 20) as session:
        for size in (140_000, 500_000):  # inline, and in pieces
            with pytest.raises(af.OutOfMemoryError, match="feed"):
                await session.run(total, {big: np.zeros(size)})
        assert (await session.run(y, {x: START}))[0] == 3


@pytest.mark.parametrize("limit", [8 << 20, None])
async def test_a_closed_session_lets_go_of_its_arrays_without_blocking(cupy: FakeCupy, limit: int | None) -> None:
    with af.Graph() as graph:
        x = af.placeholder("float32", (4,))
        weights = af.Variable(np.ones((64, 4), "float32"))
        y = weights.assign_add(af.constant(np.ones((64, 4), "float32"))) @ x + af.constant(np.ones(64, "float32"))
    async with opened(graph, ["cuda:0"], memory_limit=limit) as session:
        assert (await session.run(y, {x: START + 1.0}))[0] == 9
        warm = len(cupy.blocking())
    gc.collect()
    assert cupy.blocking()[warm:] == []
    assert session.devices[0].memory.used == 0


async def test_sessions_take_over_the_streams_of_earlier_ones(cupy: FakeCupy) -> None:
    graph, x, y = counting(5)
    pointers = []
    for _ in range(3):
        async with opened(graph, ["cuda:0"]) as session:
            pointers.append({stream.raw.ptr for stream in session.devices[0].streams})  # type: ignore[attr-defined]
            assert (await session.run(y, {x: START}))[0] == 5
    assert pointers[0] == pointers[1] == pointers[2]


# -- cancellation and closing ------------------------------------------------------------------------------------------


async def test_a_run_is_cancelled_while_its_fetch_is_in_pieces(cupy: FakeCupy) -> None:
    with af.Graph() as graph:
        x = af.placeholder("float64", (None,))
        y = x * 2.0
    value = np.random.default_rng(0).random(PINNED)
    async with opened(graph, ["cuda:0"]) as session:
        await session.run(y, {x: value})
        cupy.pause()
        running = asyncio.ensure_future(session.run(y, {x: value}))
        await stepped(cupy, lambda: session.devices[0].d2h.pending)
        running.cancel()
        for _ in range(50):
            await asyncio.sleep(0)
        assert not running.done()  # nothing outlives the await
        cupy.resume()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert np.array_equal(await session.run(y, {x: value}), value * 2)
    assert shared_slab(cupy).free_bytes == PINNED


async def test_a_session_closes_while_a_feed_is_in_pieces(cupy: FakeCupy) -> None:
    with af.Graph() as graph:
        x = af.placeholder("float64", (None,))
        y = af.sum(x)
    async with opened(graph, ["cuda:0"]) as session:
        cupy.pause()
        running = asyncio.ensure_future(session.run(y, {x: np.ones(4 * PINNED)}))
        await stepped(cupy, lambda: session.devices[0].h2d.pending)
        cupy.resume()
        await session.aclose(grace_s=0)
    with pytest.raises(af.SessionClosedError):
        await running
    assert shared_slab(cupy).free_bytes == PINNED


# -- loss --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("traced", [False, True])
async def test_every_run_in_flight_hears_of_a_lost_card(
    cupy: FakeCupy, traced: bool, caplog: pytest.LogCaptureFixture
) -> None:
    graph, x, y = counting(2_000)
    halves, start, count = halving()
    async with opened(graph, ["cuda:0"], regions=False) as session, opened(halves, ["cuda:0"]) as other:
        await session.run(y, {x: START})
        await other.run(count, {start: START + 4.0})
        cupy.pause()
        trace = af.Trace() if traced else None
        runs = [asyncio.ensure_future(session.run(y, {x: START}, trace=trace)) for _ in range(3)]
        runs += [asyncio.ensure_future(other.run(count, {start: START + 4.0}, trace=trace)) for _ in range(2)]
        await settled(lambda: len(cupy.engine.launches))
        cupy.fail_device(0)
        cupy.resume()
        for running in runs:
            with pytest.raises(DeviceLostError, match=r"cuda:0 is lost: .*illegal memory access.*launched last was"):
                await running
        with pytest.raises(DeviceLostError):
            await session.run(y, {x: START})
        with pytest.raises(DeviceLostError):
            async with opened(graph, ["cuda:0"]):
                pass
        async with opened(graph, ["cuda:1"]) as on_another:
            assert (await on_another.run(y, {x: START}))[0] == 2_000
    gc.collect()
    assert "never retrieved" not in caplog.text


async def test_a_kernel_of_the_host_with_several_lost_inputs(cupy: FakeCupy, caplog: pytest.LogCaptureFixture) -> None:
    with af.Graph() as graph:
        x = af.placeholder("float32", (4,))
        y = added(x + 1.0, x * 2.0)
    with caplog.at_level(logging.ERROR):
        async with opened(graph, ["cuda:0"]) as session:
            await session.run(y, {x: START})
            cupy.pause()
            running = asyncio.ensure_future(session.run(y, {x: START}))
            await settled(lambda: len(cupy.engine.launches))
            cupy.fail_device(0)
            cupy.resume()
            with pytest.raises(DeviceLostError):
                await running
        del running
        gc.collect()
    assert "never retrieved" not in caplog.text


# -- timelines ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("work")
@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize("regions", [False, True])
async def test_a_timeline_of_events(cupy: FakeCupy, regions: bool, streams: int) -> None:
    with af.Graph() as graph:
        x = af.placeholder("float32", (64, 64))
        y = af.exp(x @ x)
    trace = af.Trace()
    async with opened(graph, ["cuda:0"], regions=regions, compute_streams=streams) as session:
        await session.run(y, {x: np.zeros((64, 64), "float32")}, trace=trace)
    (run,) = trace.runs
    assert {firing.stream for firing in trace.firings} == {"compute", "h2d", "d2h"}
    copies = {firing.stream for firing in trace.firings if firing.op == "copy"}
    assert copies == {"h2d", "d2h"}
    slack_ns = 100  # how wrong the anchor of the device's clock may be
    for firing in trace.firings:
        assert run.started_ns - slack_ns <= firing.started_ns <= firing.ended_ns <= run.ended_ns + slack_ns
    by_stream: dict[str, list[tuple[int, int]]] = {}
    for firing in trace.firings:
        by_stream.setdefault(firing.stream, []).append((firing.started_ns, firing.ended_ns))
    for spans in by_stream.values():
        spans.sort()
        assert all(before[1] <= after[0] for before, after in pairwise(spans))


# -- what users see ----------------------------------------------------------------------------------------------------


def listed_devices() -> list[str]:
    """A line each, without what an environment that holds NumPy back adds to the CPU's."""
    return [line for line in list_devices().splitlines() if "holds NumPy" not in line]


def test_the_list_of_devices(make: Make) -> None:
    make(devices=2, nbytes=32 << 20)
    lines = listed_devices()
    assert lines[1].split(maxsplit=1) == ["cuda:0", "Fake H200, 32.0 MiB"]
    assert lines[2].split(maxsplit=1) == ["cuda:1", "Fake H200, 32.0 MiB"]


def test_the_list_of_devices_without_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    off = CudaBackend(None, reason="no NVIDIA driver found; cupy is not installed")
    monkeypatch.setattr("asyncflow.devices.cuda.kind.cuda_backend", lambda: off)
    assert listed_devices()[1].split(maxsplit=1) == ["cuda", f"off: {off.reason}"]
    with pytest.raises(
        PlacementError, match="device cuda:0: CUDA is off on this machine: no NVIDIA driver found; cupy"
    ):
        af.Session(devices=["cuda:0"])


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (["cuda:0", "cuda"], "device cuda:0 is named 2 times in devices="),
        (["cuda:x"], "cuda:x"),
        (["gpu:0"], "unknown kind of device in 'gpu:0'"),
    ],
)
def test_names_of_devices(cupy: FakeCupy, devices: list[str], message: str) -> None:
    with pytest.raises((PlacementError, ValueError), match=message):
        af.Session(devices=devices)


def test_the_last_stand_in_counts(make: Make) -> None:
    first, second = make(), make()
    assert cuda_backend().cupy is second is not first


def test_importing_the_package_does_not_import_cupy(tmp_path: Any) -> None:
    """Not even where there is one: importing it takes half a second, and may warn."""
    (tmp_path / "cupy.py").write_text("raise SystemExit('cupy was imported')\n")
    code = "import sys, asyncflow, asyncflow.devices, asyncflow.cli; assert 'cupy' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {code}"],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("regions", [False, True])
async def test_rows_of_a_store_never_make_the_host_wait(cupy: FakeCupy, regions: bool) -> None:
    """The host knows where rows are, and the card has their values; so it is for their gradients."""
    with af.Graph() as graph:
        x, children = af.placeholder("float32", (None, 4)), af.placeholder("int64", (None, 2))

        def level(i: af.Tensor, store: af.RowStore) -> tuple[af.Tensor, af.RowStore]:
            below = store.take(children[4 * i : 4 * i + 4])
            return i + 1, store.append(af.tanh(af.sum(below, axis=1)))

        first = af.RowStore("float32", (4,)).append(x)
        _, store = af.while_loop(lambda i, _: i < 5, level, (0, first))
        y = store.stack()
        fetches = [y, af.gradients(af.sum(y), x)]
    rng = np.random.default_rng(0)
    below = np.array([rng.integers(0, 4 + 4 * (i // 4), 2) for i in range(20)])
    feeds = {x: rng.normal(size=(4, 4)).astype("float32"), children: below}
    async with opened(graph, ["cuda:0"], regions=regions) as session:
        await session.run(fetches, feeds)
        warm = len(cupy.blocking())
        cupy.pause()
        running = asyncio.ensure_future(session.run(fetches, feeds))
        before = len(cupy.engine.launches)
        launched = await settled(lambda: len(cupy.engine.launches)) - before
        assert launched > 25
        cupy.resume()
        states, _ = await running
        assert [name for name in cupy.blocking()[warm:] if name != "malloc"] == []
    expected = list(feeds[x])
    for left, right in below:
        expected.append(np.tanh(expected[left] + expected[right]))
    np.testing.assert_allclose(states, expected, rtol=1e-5)


async def test_batched_calls_never_block_the_event_loop(cupy: FakeCupy) -> None:
    """Members' rows come and go by copies that the event loop does not wait for."""
    with af.Graph() as graph:
        x = af.placeholder("float32", (64,))
        fn = af.batched(lambda x: af.tanh(x * 2), cost="none")
        _, y = af.while_loop(lambda i, x: i < 5, lambda i, x: (i + 1, fn(x) + 1), (0, x))
    value = np.linspace(-1, 1, 64, dtype=np.float32)
    expected = value
    for _ in range(5):
        expected = np.tanh(expected * 2) + np.float32(1)
    async with af.Session(graph, devices=["cuda"]) as session:
        await asyncio.gather(*(session.run(y, {x: value}) for _ in range(8)))  # which allocates and compiles
        warm = len(cupy.blocking())
        found = await asyncio.gather(*(session.run(y, {x: value}) for _ in range(8)))
        assert [name for name in cupy.blocking()[warm:] if name != "malloc"] == []
        (counts,) = session.statistics().batches.values()
    for result in found:
        np.testing.assert_allclose(result, expected, rtol=1e-5)
    assert counts.largest > 1
