"""Feeds that are in the memory of a card already, and fetches that stay there, on the stand-in for CuPy."""

from __future__ import annotations

import asyncio
import gc
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.devices.cuda.backend import CudaBackend
from asyncflow.errors import DeviceLostError
from asyncflow.runtime.values import foreign_feeds
from tests.fake_cupy import FakeCupy
from tests.fake_cupy.stand_in import stand_in
from tests.interop.libraries import Library

if TYPE_CHECKING:
    from collections.abc import Iterator

SEEDS = range(8)
ALLOCATIONS = {"free", "freeHost", "hostAlloc", "malloc"}
"""Allocations that the event loop's thread may make at the start of a session, and this test for its own arrays."""

LENGTH = 3000
"""Of arrays that are too large for the host to keep as shapes."""


@pytest.fixture(params=SEEDS)
def fake(request: pytest.FixtureRequest) -> Iterator[FakeCupy]:
    """Two cards, which serve their streams in an order of their own."""
    with stand_in(devices=2, nbytes=16 << 20, seed=request.param) as fake:
        yield fake


@pytest.fixture
def one_fake() -> Iterator[FakeCupy]:
    """Two cards, in one order."""
    with stand_in(devices=2, nbytes=16 << 20) as fake:
        yield fake


@pytest.fixture
def library(fake: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> Library:
    """A library whose current streams are known, as PyTorch's are."""
    library = Library(fake)
    monkeypatch.setitem(sys.modules, "torch", library.module())
    return library


@pytest.fixture
def x(graph: af.Graph) -> af.Tensor:
    return af.placeholder("float32", (None,), name="x")


def ones(fake: FakeCupy, value: float = 1.0) -> Any:
    """An array on card 0 that is written in the order of CuPy's current stream, by several kernels."""
    array = fake.zeros(LENGTH, np.float32)
    for _ in range(4):
        array += np.float32(value / 4)
    return array


async def on_its_way(run: Any) -> asyncio.Task[Any]:
    """A run that has enqueued all it can while the cards are paused."""
    task = asyncio.create_task(run)
    await asyncio.sleep(0)
    return task


# -- feeds -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cuda:0", "cpu:0"])
async def test_a_feed_is_a_snapshot_in_the_order_of_cupys_stream(fake: FakeCupy, x: af.Tensor, device: str) -> None:
    y = x * 2
    async with af.Session(devices=[device]) as session:
        for is_known in (False, True):  # whether there is a plan already
            fake.pause()
            stream = fake.cuda.Stream(non_blocking=True)
            with stream:
                array = ones(fake)
                run = await on_its_way(session.run(y, {x: array}))
                array.fill(-1)
            del array
            fake.resume()
            np.testing.assert_array_equal(await run, np.full(LENGTH, 2, np.float32), err_msg=str(is_known))
    assert set(fake.blocking()) <= ALLOCATIONS


@pytest.mark.parametrize("device", ["cuda:0", "cuda:1", "cpu:0"])
async def test_a_feed_is_a_snapshot_in_the_order_of_a_librarys_stream(
    fake: FakeCupy, library: Library, x: af.Tensor, device: str
) -> None:
    with af.device(device):
        y = x * 2
    devices = ["cpu:0"] if device == "cpu:0" else ["cuda:0", "cuda:1"]
    async with af.Session(devices=devices) as session:
        for _ in range(2):
            fake.pause()
            tensor = library.tensor(np.zeros(LENGTH, np.float32))
            tensor.fill_(1)
            run = await on_its_way(session.run(y, {x: tensor}))
            tensor.fill_(-1)
            del tensor
            fake.resume()
            np.testing.assert_array_equal(await run, np.full(LENGTH, 2, np.float32))


async def test_a_feed_on_a_card_does_not_pass_through_the_host(one_fake: FakeCupy, x: af.Tensor) -> None:
    y = x + 1
    async with af.Session(devices=["cuda:0"]) as session:
        trace = af.Trace(detail="region")
        array = ones(one_fake)
        value = await session.run(af.on_device(y), {x: array}, trace=trace)
        assert isinstance(value, one_fake.ndarray)
        streams = {firing.stream for firing in trace.firings}
    assert not streams & {"h2d", "d2h"}, streams


async def test_feeds_of_other_layouts_ranks_and_cards(one_fake: FakeCupy, graph: af.Graph) -> None:
    fake = one_fake
    m = af.placeholder("float32", (None, None))
    n = af.placeholder("float32", ())
    i = af.placeholder("int64", None)
    matrix = np.arange(6, dtype=np.float32).reshape(2, 3)
    async with af.Session(devices=["cuda:0"]) as session:
        with fake.cuda.Device(1):
            far, across = fake.asarray(matrix), fake.asarray(matrix.T.copy()).T
        for array in (fake.asarray(matrix.T.copy()).T, far, across):
            np.testing.assert_array_equal(
                await session.run(m * n, {m: array, n: fake.asarray(np.float32(2))}), 2 * matrix
            )
        empty = fake.zeros((0, 3), np.float32)
        assert (await session.run(m + n, {m: empty, n: 1.0})).shape == (0, 3)
        assert await session.run(i + 1, {i: fake.asarray(np.int64(4))}) == 5


async def test_what_does_not_fit_is_refused(one_fake: FakeCupy, x: af.Tensor) -> None:
    async with af.Session(devices=["cuda:0"]) as session:
        with pytest.raises(af.FeedError, match=r"x:0: expected float32\[\?\], got an ndarray: its dtype is float64"):
            await session.run(x + 1, {x: one_fake.zeros(3, np.float64)})
        with pytest.raises(af.FeedError, match=r"x:0: expected float32\[\?\], got an ndarray: its shape is \[3,1\]"):
            await session.run(x + 1, {x: one_fake.zeros((3, 1), np.float32)})


async def test_a_card_without_cupy(one_fake: FakeCupy, x: af.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign_feeds, "cuda_backend", lambda: CudaBackend(None, reason="no NVIDIA driver found"))
    async with af.Session() as session:
        with pytest.raises(af.FeedError, match=r"x:0: .*takes CuPy to read \(no NVIDIA driver found\)"):
            await session.run(x + 1, {x: one_fake.zeros(3, np.float32)})


async def test_more_than_fits_is_out_of_memory(one_fake: FakeCupy, x: af.Tensor) -> None:
    array = one_fake.zeros(100_000, np.float32)
    async with af.Session(devices=["cuda:0"], memory_limit=200_000) as session:
        with pytest.raises(af.OutOfMemoryError):
            await session.run(x + 1, {x: array})
        assert session.statistics().used_bytes == {"cuda:0": 0}


async def test_functions_take_arrays_on_cards(one_fake: FakeCupy) -> None:
    @af.function
    def doubled(x: Any) -> Any:
        return 2 * x

    async with af.Session(devices=["cuda:0"]):
        np.testing.assert_array_equal(await doubled(ones(one_fake)), np.full(LENGTH, 2, np.float32))


async def test_streams_take_arrays_on_cards(one_fake: FakeCupy, x: af.Tensor) -> None:
    seen: list[af.Tensor] = []

    def body(i: af.Tensor, total: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
        seen.append(total + x)
        return i + 1, seen[0]

    af.while_loop(lambda i, _: i < 3, body, (af.constant(0), af.zeros((LENGTH,), dtype="float32")))
    async with af.Session(devices=["cuda:0"]) as session:
        items = [float(item[0]) async for item in session.stream(seen[0], {x: ones(one_fake)})]
    assert items == [1.0, 2.0, 3.0]


# -- while a graph is built -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cuda:0", "cpu:0"])
async def test_arrays_on_cards_are_constants(fake: FakeCupy, library: Library, x: af.Tensor, device: str) -> None:
    """Copied to the host, in the order of CuPy's current stream."""
    stream = fake.cuda.Stream(non_blocking=True)
    with stream:
        array = ones(fake)
        with fake.cuda.Device(1):
            far = fake.asarray(np.arange(LENGTH, dtype=np.float32)) * 1
        v, built = af.Variable(array, name="v"), [af.constant(array), x + array, array[:3] + x[:3], af.constant(far)]
        array.fill(-1)
    async with af.Session(devices=[device]) as session:
        values = await session.run([v, *built], {x: np.ones(LENGTH, np.float32)})
    assert [set(value.tolist()) for value in values[:4]] == [{1.0}, {1.0}, {2.0}, {2.0}]
    np.testing.assert_array_equal(values[4], np.arange(LENGTH))


def test_lists_of_arrays_on_cards_are_refused(one_fake: FakeCupy, graph: af.Graph) -> None:
    with pytest.raises(
        af.DTypeError, match=r"of a list: NumPy cannot read it \(TypeError: Implicit.* give a NumPy array"
    ):
        af.constant([one_fake.zeros(3), one_fake.zeros(3)])


# -- fetches ---------------------------------------------------------------------------------------------------------


async def test_a_fetch_stays_on_its_device(one_fake: FakeCupy, x: af.Tensor) -> None:
    v = af.Variable(np.arange(LENGTH, dtype=np.float32), name="v")
    y = x + 1
    array = ones(one_fake)
    async with af.Session(devices=["cuda:0"]) as session:
        both = [af.on_device(y), y, af.on_device(v), {"size": af.on_device(af.size(x))}, af.on_device("x:0")]
        predict = session.prepare(af.on_device(y), [x])
        async with af.Session(x.graph.root, devices=["cuda:0"]) as named:
            stays, comes, variable, host, fed = await named.run(both, {x: array})
        assert isinstance(stays, one_fake.ndarray) and isinstance(comes, np.ndarray)
        np.testing.assert_array_equal(stays.get(), comes)
        np.testing.assert_array_equal(variable.get(), np.arange(LENGTH, dtype=np.float32))
        np.testing.assert_array_equal(fed.get(), array.get())
        assert isinstance(host["size"], np.ndarray) and host["size"].shape == () and host["size"] == LENGTH
        again = await predict(stays)  # what was fetched can be fed
        np.testing.assert_array_equal(again.get(), comes + 1)


async def test_a_nest_stays_on_its_device(one_fake: FakeCupy, x: af.Tensor) -> None:
    v = af.Variable(np.zeros(LENGTH, np.float32), name="v")
    async with af.Session(x.graph, devices=["cuda:0"]) as session:
        stay, total = await session.run([af.on_device({"y": [x + 1, "x:0"], "v": v}), af.sum(x)], {x: ones(one_fake)})
    (y, same), variable = stay["y"], stay["v"]
    assert all(isinstance(value, one_fake.ndarray) for value in (y, same, variable))
    assert [set(value.get().tolist()) for value in (y, same, variable)] == [{2.0}, {1.0}, {0.0}]
    assert total == LENGTH


@pytest.mark.slow
async def test_lent_memory_is_not_used_while_others_read_it(fake: FakeCupy, library: Library, x: af.Tensor) -> None:
    y = x + 1
    array = ones(fake)
    # Room for one fed array and one result.
    async with af.Session(devices=["cuda:0"], memory_limit=2 * 12_288) as session:
        predict = session.prepare(af.on_device(y), [x])
        lent = [await predict(array)]
        for current in (fake.cuda.Stream.null, library.streams[0]):
            fake.pause()
            with current:
                copied = [lent[0] * 1 for _ in range(20)]
            lent.clear()
            gc.collect()
            run = await on_its_way(predict(array * 0))
            fake.resume()
            lent.append(await run)
            del run  # which keeps its result
            fake.wait_idle()
            assert set(copied[-1].get().tolist()) == ({2.0} if current is fake.cuda.Stream.null else {1.0})


async def test_values_returned_to_a_lost_device(one_fake: FakeCupy, x: af.Tensor) -> None:
    feeds = {x: np.ones(LENGTH, np.float32)}
    async with af.Session(devices=["cuda:0"]) as session:
        lent = [await session.run(af.on_device(x + 1), feeds)]
        one_fake.fail_device(0)
        lent.clear()
        with pytest.raises(DeviceLostError, match="cuda:0 is lost"):
            await session.run(x + 1, feeds)


async def test_lent_arrays_outlive_their_session(one_fake: FakeCupy, x: af.Tensor) -> None:
    async with af.Session(devices=["cuda:0"]) as session:
        value = await session.run(af.on_device(x + 1), {x: ones(one_fake)})
    assert set(value.get().tolist()) == {2.0}


async def test_dead_fetches_and_nodes(one_fake: FakeCupy, x: af.Tensor) -> None:
    left, right = af.raw.switch(x, af.placeholder("bool", (), name="taken"))
    async with af.Session(devices=["cuda:0"]) as session:
        feeds = {x: np.ones(LENGTH, np.float32), x.graph.tensor("taken:0"): True}
        values = await session.run([af.on_device(left + 1), af.on_device(right + 1)], feeds, allow_dead=True)
        assert sorted(type(value).__name__ for value in values) == ["NoneType", "ndarray"]
        with pytest.raises(af.FetchError, match="is dead"):
            await session.run([af.on_device(left + 1), af.on_device(right + 1)], feeds)
        with pytest.raises(af.FetchError, match="is a node, which has no value"):
            await session.run(af.on_device(af.group(x)), feeds)


async def test_on_a_cpu_the_array_is_numpys(graph: af.Graph) -> None:
    x = af.placeholder("float32", None)
    async with af.Session() as session:
        value, total, both = await session.run(
            [af.on_device(x * 2), af.on_device(af.sum(x)), (af.on_device(x), x)], {x: np.ones(3, np.float32)}
        )
    assert np.from_dlpack(value).tolist() == [2.0, 2.0, 2.0]
    assert np.from_dlpack(total) == 3.0 and total.shape == ()
    assert not np.shares_memory(*both)
