"""A CUDA device on the stand-in for CuPy: its copies, the values that it keeps alive, its waits, and its end."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from asyncflow.devices.cuda.device import CudaDevice
from asyncflow.devices.cuda.launch import CudaLauncher
from asyncflow.devices.cuda.memory import home_of
from asyncflow.devices.cuda.progress import MARK_EVERY, MOST_AHEAD
from asyncflow.devices.cuda.transfers import copies
from asyncflow.devices.cuda.transfers.copies import COPY_INLINE_BYTES, SMALL_BYTES, SMALL_PINNED_BYTES
from asyncflow.devices.cuda.transfers.pinned import ALIGNMENT, PinnedBuffer, PinnedSlab
from asyncflow.devices.cuda.values import CudaArray, CudaOpaque
from asyncflow.devices.protocol import KernelInfo
from asyncflow.errors import DeviceLostError, PlacementError
from asyncflow.graph.values.spec import Spec
from asyncflow.state.variables.variable_state import VariableState
from asyncflow.streams.cuda.stream import CudaStream
from tests.fake_cupy import FakeCupy
from tests.patience import PATIENCE_S

PINNED = 256 << 10
LARGE = np.arange(2 * SMALL_BYTES // 8, dtype=np.float64)
"""A value that is copied on a stream of its own."""


@pytest.fixture
def cupy() -> Iterator[FakeCupy]:
    with FakeCupy(devices=2) as fake:
        yield fake
        fake.engine.errors.clear()


@asynccontextmanager
async def opened(cupy: FakeCupy, index: int = 0, **options: Any) -> AsyncIterator[CudaDevice]:
    device = CudaDevice(cupy, index, **{"pinned": PinnedSlab(cupy, PINNED), **options})
    await device.open()
    try:
        yield device
    finally:
        cupy.resume()
        assert await device.aclose(PATIENCE_S)


def fed(device: CudaDevice, value: np.ndarray[Any, Any]) -> asyncio.Future[CudaArray]:
    future: asyncio.Future[CudaArray] = device.fed(value, "x")
    return future


def fetched(device: CudaDevice, value: Any) -> asyncio.Future[Any]:
    future: asyncio.Future[Any] = device.fetched(value)
    return future


def computed(device: CudaDevice, compute: Callable[..., Any], *values: CudaArray, stream: int = 0) -> CudaArray:
    """Return the result of a kernel on one of the compute streams."""
    lane = device.compute_streams[stream]
    for value in values:
        value.order(lane)
    device.hold(lane, *[value.array for value in values])
    lane.work.given += 1
    with lane:
        return CudaArray(compute(*[value.array for value in values]), device, lane, "y")


def launch(device: CudaDevice) -> None:
    """Launch a kernel."""
    computed(device, lambda: device.cupy.zeros(1))


def lend_all(slab: PinnedSlab) -> list[PinnedBuffer]:
    lent = []
    while hole := slab.largest_hole:
        buffer = slab.take(hole)
        assert buffer is not None
        lent.append(buffer)
    return lent


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        await turns(1)


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


# -- values -----------------------------------------------------------------------------------------------------------

LAYOUTS: dict[str, Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.T,
    "every other": lambda x: x[:, ::2],
    "backwards": lambda x: x[::-1],
    "broadcast": lambda x: np.broadcast_to(x[:1], (5, x.shape[1])),
    "empty": lambda x: x[:0],
    "one": lambda x: x[:1, :1],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [np.bool_, np.float16, ml_dtypes.bfloat16, np.complex64])
@pytest.mark.parametrize("rows", [6, 20_000])
async def test_arrays_go_there_and_back(cupy: FakeCupy, dtype: Any, layout: str, rows: int) -> None:
    made = np.random.default_rng(0).integers(0, 2, (rows, 14))
    value = LAYOUTS[layout](made.astype(dtype))
    async with opened(cupy) as device:
        result = await fetched(device, await fed(device, value))
        assert (result.dtype, result.shape) == (value.dtype, value.shape)
        assert np.array_equal(result, value) and result.flags.writeable and result.base is None


@pytest.mark.parametrize("value", [np.float32(2), np.float64(3), np.complex64(1j), np.float16(4)])
async def test_values_of_rank_0_come_back_as_scalars(cupy: FakeCupy, value: Any) -> None:
    async with opened(cupy) as device:
        result = await fetched(device, computed(device, lambda: cupy.full((), value, value.dtype)))
        assert type(result) is type(value) and result == value


async def test_a_scalar_that_finds_no_pinned_memory_is_a_scalar_all_the_same(cupy: FakeCupy) -> None:
    async with opened(cupy) as device:
        lent = lend_all(device.copies._slab) + lend_all(device.copies._small)
        one = computed(device, lambda: cupy.full((), 1.5))
        waiting = fetched(device, one)
        await turns()
        for buffer in lent:
            buffer.free()
        result = await waiting
        assert type(result) is np.float64 and result == 1.5


@pytest.mark.parametrize("layout", ["transposed", "every other", "backwards"])
async def test_a_view_is_fetched_in_order(cupy: FakeCupy, layout: str) -> None:
    value = np.arange(60_000.0).reshape(300, 200)
    async with opened(cupy) as device:
        x = await fed(device, value)
        for part in (LAYOUTS[layout], lambda x: LAYOUTS[layout](x[:4])):
            y = computed(device, part, x)
            assert np.array_equal(await fetched(device, y), part(value))


async def test_opaque_values_are_handed_over_once_what_made_them_is_done(cupy: FakeCupy) -> None:
    async with opened(cupy) as device:
        cupy.pause()
        computed(device, lambda: cupy.zeros(3))
        waiting = fetched(device, CudaOpaque("state", device, device.compute))
        await turns()
        assert not waiting.done()
        cupy.resume()
        assert await waiting == "state"


# -- the host's side --------------------------------------------------------------------------------------------------


async def test_the_event_loop_is_never_blocked(cupy: FakeCupy) -> None:
    async with opened(cupy, memory_limit=32 << 20) as device:
        lent = lend_all(device.copies._slab)
        warm = len(cupy.blocking())
        sizes = (1, 100, SMALL_BYTES // 8, COPY_INLINE_BYTES // 8, PINNED, 3 * PINNED)
        values = [np.random.default_rng(n).random(n) for n in sizes]
        feeds = [fed(device, value) for value in values]
        device.copy_in(np.arange(64.0), "a small one")
        await turns()
        for buffer in lent:
            buffer.free()
        arrays = await asyncio.gather(*feeds)
        results = await asyncio.gather(*[fetched(device, x) for x in arrays])
        assert all(np.array_equal(result, value) for result, value in zip(results, values, strict=True))
        assert cupy.blocking()[warm:] == []


async def test_many_fetches_in_pieces_do_not_wait_for_one_another_for_ever(
    cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each keeps two pieces on their way, and there is room for three of them."""
    monkeypatch.setattr(copies, "PIECE_BYTES", 4096)
    async with opened(cupy, pinned=PinnedSlab(cupy, 3 * 4096)) as device:
        values = [np.random.default_rng(n).random(5_000) for n in range(6)]
        arrays = [await fed(device, value) for value in values]
        results = await asyncio.gather(*[fetched(device, x) for x in arrays])
        assert all(np.array_equal(result, value) for result, value in zip(results, values, strict=True))
        await until(lambda: device.copies._slab.free_bytes == 3 * 4096)


@pytest.mark.parametrize("seed", range(6))
async def test_failed_copies_leave_their_room_to_waiting_ones(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors of the copies, with the frames that hold buffers, are kept; another card shares the pinned memory."""
    with FakeCupy(devices=2, seed=seed) as cupy:
        monkeypatch.setattr(copies, "PIECE_BYTES", 4096)
        slab = PinnedSlab(cupy, 2 * 4096)
        async with opened(cupy, pinned=slab) as device, opened(cupy, 1, physical=1, pinned=slab) as other:
            x, y = [await fed(there, np.arange(5_000.0)) for there in (device, other)]
            cupy.pause()
            doomed = [fetched(device, x), fed(device, np.ones(5_000)), fetched(device, x)]
            await turns()
            waiting = [fetched(other, y), fed(other, np.ones(5_000))]
            await turns(seed)
            cupy.fail_device(0)
            cupy.resume()
            errors = await asyncio.gather(*doomed, return_exceptions=True)
            assert [type(error) for error in errors] == [DeviceLostError] * 3
            async with asyncio.timeout(PATIENCE_S):
                assert np.array_equal((await asyncio.gather(*waiting))[0], np.arange(5_000.0))
                await until(lambda: slab.free_bytes == slab.nbytes)  # tickets of other streams come later


async def test_the_slab_serves_the_loops_of_several_threads(cupy: FakeCupy) -> None:
    slab = PinnedSlab(cupy, PINNED)
    waits = threading.Event()
    value, results = np.random.default_rng(0).random(PINNED), []

    async def other() -> None:
        async with opened(cupy, 1, pinned=slab) as device:
            feeding = fed(device, value)
            await turns()
            waits.set()
            results.append(await fetched(device, await feeding))

    async with opened(cupy, pinned=slab):
        lent = lend_all(slab)
        thread = threading.Thread(target=lambda: asyncio.run(other(), debug=True))
        thread.start()
        await asyncio.to_thread(waits.wait)
        for buffer in lent:
            buffer.free()
        await asyncio.to_thread(thread.join)
    assert np.array_equal(results[0], value)


async def test_a_cancelled_copy_keeps_its_memory_until_the_card_is_done_with_it(cupy: FakeCupy) -> None:
    """Only the end of the event loop cancels one."""
    async with opened(cupy) as device:
        slab = device.copies._slab
        x = await fed(device, np.zeros(PINNED))
        await until(lambda: slab.free_bytes == PINNED)
        cupy.pause()
        waiting = fetched(device, x)
        await until(lambda: cupy.pending(device.d2h.raw) > 0)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        gc.collect()
        assert slab.free_bytes < PINNED
        cupy.resume()
        done = asyncio.Event()
        device.when_done(lambda _error: done.set())
        await done.wait()
        gc.collect()
        await until(lambda: slab.free_bytes == PINNED)


async def test_a_copy_in_marks_its_end_once(cupy: FakeCupy) -> None:
    """The mark is for users of the array and for the host's end of it, which is lent again only after it."""
    async with opened(cupy) as device:
        slab = device.copies._slab
        cupy.pause()
        launch(device)
        x = await fed(device, LARGE)
        # A kernel and a mark of who had the memory; a wait for it, the copy, and the mark of its end.
        assert (cupy.pending(device.compute.raw), cupy.pending(device.h2d.raw)) == (2, 3)
        assert slab.free_bytes == PINNED - LARGE.nbytes
        waiting = fetched(device, x)
        waiting.cancel()
        del x, waiting
        gc.collect()
        await turns()
        assert slab.free_bytes == PINNED - 2 * LARGE.nbytes
        cupy.resume()
        await until(lambda: slab.free_bytes == PINNED)


async def test_a_copy_in_waits_for_no_stream_that_is_known_to_be_idle(cupy: FakeCupy) -> None:
    async with opened(cupy) as device:
        launch(device)
        ended = asyncio.Event()
        device.when_done(lambda _error: ended.set())
        await ended.wait()
        assert device.compute.is_idle and device.has_ended()
        before = len(cupy.engine.launches)
        x = await fed(device, LARGE)
        assert [name for _, name in cupy.engine.launches[before:]] == ["memcpyAsync", "eventRecord"]
        assert not device.has_ended()
        assert np.array_equal(await fetched(device, x), LARGE)


async def test_a_small_copy_in_takes_one_call_of_cuda(cupy: FakeCupy) -> None:
    """The copy is on the stream of its readers; the host's end of it is lent again after the next ticket there."""
    async with opened(cupy) as device:
        slab, before = device.copies._small, len(cupy.engine.launches)
        cupy.pause()
        launch(device)
        x = await fed(device, np.arange(8.0))
        assert [name for _, name in cupy.engine.launches[before + 1 :]] == ["memcpyAsync"]
        assert slab.free_bytes == SMALL_PINNED_BYTES - ALIGNMENT and not device.has_ended()
        del x
        await turns()
        assert slab.free_bytes == SMALL_PINNED_BYTES - ALIGNMENT
        ended = asyncio.Event()
        device.when_done(lambda _error: ended.set())
        cupy.resume()
        await ended.wait()
        assert slab.free_bytes == SMALL_PINNED_BYTES


async def test_a_small_fetch_behind_all_work_says_that_this_has_ended(cupy: FakeCupy) -> None:
    """Then nothing is left to wait for at the end of a run; a later kernel has to be waited for."""
    async with opened(cupy) as device:
        x = computed(device, lambda x: x + 1, await fed(device, np.arange(8.0)))
        before = len(cupy.engine.launches)
        assert np.array_equal(await fetched(device, x), np.arange(1.0, 9.0))
        assert [name for _, name in cupy.engine.launches[before:]] == ["memcpyAsync", "eventRecord"]
        assert device.has_ended()
        cupy.pause()
        early = fetched(device, x)
        launch(device)
        cupy.step(2)
        await early
        assert not device.has_ended()
        cupy.resume()


async def test_small_copies_beside_large_ones_hold_up_no_kernel(cupy: FakeCupy) -> None:
    """A card makes one copy in a direction at a time: kernels behind a small one would wait for the large ones."""
    async with opened(cupy) as device:
        large, small = (computed(device, lambda n=n: cupy.full(n, 1.0)) for n in (LARGE.size, 8))
        cupy.pause()
        going = [fetched(device, large), fetched(device, small)]
        before = cupy.pending(device.compute.raw)
        coming = [await fed(device, LARGE), await fed(device, LARGE[:8])]
        # For the second feed the memory has to be free once more.
        assert cupy.pending(device.compute.raw) == before + 2
        assert [value.stream for value in coming] == [device.h2d, device.h2d]
        cupy.resume()
        assert (await going[1]).sum() == 8 and (await going[0]).sum() == LARGE.size


async def test_a_large_fetch_behind_all_work_says_so_too(cupy: FakeCupy) -> None:
    async with opened(cupy) as device:
        x = computed(device, lambda x: x + 1, await fed(device, LARGE))
        assert np.array_equal(await fetched(device, x), LARGE + 1)
        assert device.has_ended()


async def test_a_copy_in_pieces_marks_the_end_of_each(cupy: FakeCupy) -> None:
    async with opened(cupy) as device:
        value = np.arange(2 * COPY_INLINE_BYTES // 8, dtype=np.float64)
        pieces, before = value.nbytes // PINNED, len(cupy.engine.launches)
        x = await fed(device, value)
        given = Counter(name for _, name in cupy.engine.launches[before:])
        assert given["memcpyAsync"] == pieces > 1 and given["eventRecord"] == pieces
        assert np.array_equal(await fetched(device, x), value)


async def test_a_reader_of_a_failed_copy_hears_of_it(cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    def view(*_: object) -> Any:
        raise MemoryError("no memory for the result")

    async with opened(cupy) as device:
        x = await fed(device, np.zeros(8))
        monkeypatch.setattr(PinnedBuffer, "view", view)
        with pytest.raises(MemoryError, match="no memory for the result"):
            await fetched(device, x)
        monkeypatch.undo()
        await until(lambda: device.copies._small.free_bytes == device.copies._small.nbytes)


async def test_a_failing_callback_does_not_keep_others_from_theirs(cupy: FakeCupy) -> None:
    seen: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: seen.append(context))

    def fail(value: Any, error: BaseException | None) -> None:
        raise ZeroDivisionError

    async with opened(cupy) as device:
        x = await fed(device, np.arange(8.0))
        cupy.pause()
        x.to_host(fail)
        waiting = fetched(device, x)
        cupy.resume()
        assert (await waiting)[7] == 7.0
    assert [type(context["exception"]) for context in seen] == [ZeroDivisionError]


# -- memory -----------------------------------------------------------------------------------------------------------


async def test_memory_has_a_home(cupy: FakeCupy) -> None:
    async with opened(cupy, compute_streams=2) as device:
        x = await fed(device, np.arange(8.0))
        y = computed(device, lambda x: x + 1, x, stream=1)
        view = computed(device, lambda x: x[2:], x, stream=1)
        homes = [home_of(array.array) for array in (x, y, view)]
        assert homes == [device.compute_streams[index] for index in (0, 1, 0)]
        assert home_of(cupy.zeros(3)) is None


@pytest.mark.parametrize("seed", range(8))
async def test_views_of_another_streams_memory_are_kept_while_they_are_read(seed: int) -> None:
    """The first stream frees its memory and uses it again at once; the second one still reads it, as a view."""
    with FakeCupy(seed=seed) as cupy:
        async with opened(cupy, compute_streams=2) as device:
            sums = []
            cupy.pause()
            for number in range(6):
                x = computed(device, lambda number=number: cupy.full((64, 64), float(number)))
                view = computed(device, lambda x: x.reshape(-1), x, stream=1)
                del x
                sums.append(computed(device, lambda x: x.sum(), view, stream=1))
                del view
                for _ in range(3):
                    computed(device, lambda: cupy.full((64, 64), -1.0))
            cupy.resume()
            assert [await fetched(device, x) for x in sums] == [64.0 * 64 * number for number in range(6)]


@pytest.mark.parametrize("seed", range(8))
async def test_a_restored_variable_is_kept_while_another_stream_than_the_first_reads_it(seed: int) -> None:
    """The copy from the host is in memory of the first stream, whichever stream reads it first."""
    with FakeCupy(seed=seed) as cupy:
        async with opened(cupy, compute_streams=2) as device:
            state, sums = VariableState("w", Spec(np.dtype("float64"), (64, 4))), []
            for number in range(6):
                state.restore({"": np.full((64, 4), float(number))})
                computed(device, lambda: state.read_in(device.xp).sum(), stream=1)
                await turns()  # so that the work of the first read is done
                cupy.pause()
                sums.append(computed(device, lambda: state.read_in(device.xp).sum(), stream=1))
                state.forget()  # as an assignment would
                for _ in range(3):
                    computed(device, lambda: cupy.full((64, 4), -1.0))
                cupy.resume()
            assert [await fetched(device, x) for x in sums] == [64.0 * 4 * number for number in range(6)]


@pytest.mark.parametrize("seed", range(8))
async def test_a_copy_in_order_of_a_view_keeps_its_source(seed: int) -> None:
    with FakeCupy(seed=seed) as cupy:
        async with opened(cupy, compute_streams=2) as device:
            cupy.pause()
            x = computed(device, lambda: cupy.full((64, 32), 3.0), stream=0)
            view = computed(device, lambda x: x.T, x, stream=1)
            waiting = fetched(device, view)
            del x, view
            for _ in range(4):
                computed(device, lambda: cupy.full((64, 32), -1.0))
            cupy.resume()
            assert np.array_equal(await waiting, np.full((32, 64), 3.0))


def sent(device: CudaDevice, value: CudaArray, source: CudaDevice) -> asyncio.Future[CudaArray]:
    """Return a value of one device on another."""
    received: asyncio.Future[CudaArray] = device._future_of(lambda deliver: device.receive(value, source, deliver))
    return received


async def test_a_small_value_goes_to_another_card_without_a_ticket(cupy: FakeCupy) -> None:
    """Streams wait for events; the host hears of the end by the next fetch, which says so of both cards."""
    async with opened(cupy) as one, opened(cupy, 1, physical=1) as other:
        x = computed(one, lambda: cupy.full(8, 2.0))
        before = len(cupy.engine.launches)
        y = await sent(other, x, one)
        names = [name for _, name in cupy.engine.launches[before:]]
        assert names == ["eventRecord", "streamWaitEvent", "memcpyPeerAsync", "eventRecord"]
        await turns()
        assert len(cupy.engine.launches) == before + 4 and other.peer.pending and not one.has_ended()
        z = computed(other, lambda y: y + 1, y)
        del x, y
        assert np.array_equal(await fetched(other, z), np.full(8, 3.0))
        assert one.has_ended() and other.has_ended() and not other.peer.pending


@pytest.mark.parametrize("size", [8, 4096, copies.KEPT_BYTES])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 12))])
async def test_memory_of_a_value_that_is_sent_is_not_used_before(seed: int, size: int) -> None:
    """Both hosts drop it at once, and allocate the same size again and again; the copies have not begun."""
    with FakeCupy(devices=2, seed=seed, nbytes=64 << 20) as cupy:
        async with opened(cupy) as one, opened(cupy, 1, physical=1) as other:
            cupy.pause()
            sums = []
            for number in range(6):
                x = computed(one, lambda number=number: cupy.full(size, float(number)))
                y = await sent(other, x, one)
                del x
                computed(one, lambda: cupy.full(size, -1.0))
                sums.append(computed(other, lambda y: y.sum(), y))
                del y
                computed(other, lambda: cupy.full(size, -2.0))
                await turns(number % 3)
            cupy.resume()
            assert [float(await fetched(other, each)) for each in sums] == [size * number for number in range(6)]


async def test_small_values_from_another_card_make_room(cupy: FakeCupy) -> None:
    """They are kept for the next ticket; an allocation that finds no room lets the streams wait instead."""
    value = np.ones(1024)
    limit = 4 * value.nbytes
    async with opened(cupy) as one, opened(cupy, 1, physical=1, memory_limit=limit) as other:
        x = computed(one, lambda: cupy.full(1024, 2.0))
        cupy.pause()
        places = set()
        for _ in range(12):
            y = await sent(other, x, one)
            places.add(y.array.data.ptr)
            del y
            await turns(1)  # the future's callback refers to it, too
        assert len(places) == 4 and other.memory.used <= limit
        cupy.resume()


async def test_a_value_on_its_way_from_a_lost_card(cupy: FakeCupy) -> None:
    async with opened(cupy) as one, opened(cupy, 1, physical=1) as other:
        x = computed(one, lambda: cupy.full(8, 2.0))
        cupy.pause()
        y = await sent(other, x, one)
        cupy.fail_device(0)
        cupy.resume()
        with pytest.raises(DeviceLostError, match="cuda:0 is lost"):
            await fetched(one, x)
        with pytest.raises(DeviceLostError, match="cuda:0 is lost"):
            await sent(other, x, one)
        assert not one.has_ended()
        del y


@pytest.mark.parametrize("copy", ["receive", "feed"])
@pytest.mark.parametrize(("used_on", "is_kept"), [(None, True), (0, False), (1, True)])
async def test_memory_that_a_copy_fills_is_kept_until_its_home_waits_for_the_copy(
    copy: str, used_on: int | None, is_kept: bool
) -> None:
    """The host is far ahead: the copy of a value that it has used and dropped has not even begun."""
    value = np.full(4096, 2.0)
    with FakeCupy(seed=3) as cupy:
        async with opened(cupy) as one, opened(cupy, 1, compute_streams=2) as other:
            cupy.pause()
            source = computed(one, lambda: cupy.full(4096, 2.0))
            used = other.memory.used
            x = await (
                fed(other, value)
                if copy == "feed"
                else other._future_of(lambda deliver: other.receive(source, one, deliver))
            )
            total = None if used_on is None else computed(other, lambda x: x.sum(), x, stream=used_on)
            before = other.memory.used
            del x
            await turns(1)  # the future's callback refers to it, too
            assert before - other.memory.used == (0 if is_kept else value.nbytes)
            for _ in range(3):  # what is free is used again
                computed(other, lambda: cupy.full(4096, -1.0))
            cupy.resume()
            if total is not None:
                assert await fetched(other, total) == 8192.0
            del total
            other.when_done(lambda _error: None)  # small values from other cards wait for the next ticket
            await until(lambda: other.memory.used == used)


@pytest.mark.parametrize("in_turns", [True, False])
@pytest.mark.parametrize("what", ["array", "copied in", "opaque"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))])
async def test_memory_that_waits_for_another_stream_makes_room(seed: int, what: str, in_turns: bool) -> None:
    """The host is far ahead: no array that the second stream reads has been read, and only four fit.

    Their home waits for that stream and uses the memory again, whether or not the turn of the event loop has ended.
    """
    value = np.ones((64, 64))
    with FakeCupy(seed=seed) as cupy:
        limit, pinned = 4 * value.nbytes + 8192, PinnedSlab(cupy, 12 * value.nbytes)
        async with opened(cupy, compute_streams=2, memory_limit=limit, pinned=pinned) as device:
            info = KernelInfo(name="total", flops=lambda *_: 0.0, infer=lambda *_: None, stream=1)
            total = CudaLauncher(device, lambda x: (x[0] if isinstance(x, list) else x).sum(), info)
            sums = []
            cupy.pause()
            for number in range(12):
                if what == "copied in":
                    x = device.copy_in(number * value, "x")
                else:
                    x = computed(device, lambda number=number: cupy.full((64, 64), float(number)))
                sums.append(total(CudaOpaque([x.array], device, device.compute) if what == "opaque" else x))
                del x
                if in_turns:
                    await turns(1)
            cupy.resume()
            if what != "opaque":  # which nothing orders after what wrote the array, unless its kernel does
                assert [await fetched(device, x) for x in sums] == [64.0 * 64 * number for number in range(12)]
            del sums
            await until(lambda: not device.memory.used)


async def test_what_a_launch_under_way_holds_is_not_handed_over(cupy: FakeCupy) -> None:
    async with opened(cupy, compute_streams=2) as device:
        lane = device.compute_streams[1]
        x, y = (computed(device, lambda: cupy.zeros(1024)) for _ in "xy")
        device.hold(lane, x.array)
        lane.note_launched()
        device.hold(lane, y.array)
        used, nbytes = device.memory.used, y.array.nbytes
        del x, y
        device.hand_over(2 * nbytes)
        assert device.memory.used == used - nbytes
        await until(lambda: not device.memory.used)


@pytest.mark.parametrize("streams", [1, 2, 3])
async def test_a_limit_can_be_used_up_on_any_stream(cupy: FakeCupy, streams: int) -> None:
    async with opened(cupy, memory_limit=1 << 20, compute_streams=streams) as device:
        for stream in (*range(streams), 0):
            x = computed(device, lambda: cupy.zeros(1 << 20, np.uint8), stream=stream)
            assert device.memory.used == 1 << 20
            del x


async def test_a_device_gives_its_memory_back(cupy: FakeCupy) -> None:
    free = cupy.memory_map.regions[0].free_bytes
    async with opened(cupy, memory_limit=8 << 20) as device:
        x = await fed(device, np.zeros(1000))
        await fetched(device, x)
        del x
        warm = len(cupy.blocking())
    assert cupy.blocking()[warm:] == []
    cupy.wait_idle()
    assert cupy.memory_map.regions[0].free_bytes == free


async def test_a_limit_that_the_card_does_not_have(cupy: FakeCupy) -> None:
    device = CudaDevice(cupy, memory_limit=1 << 40)
    with pytest.raises(PlacementError, match=r"device cuda:0 does not get the memory that it is to have: .* 1\.0 TiB"):
        await device.open()
    assert await device.aclose(PATIENCE_S)
    async with opened(cupy) as other:
        assert (await fetched(other, await fed(other, np.ones(3)))).sum() == 3


# -- other devices ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(300, 200), (0, 3), (1,), ()])
@pytest.mark.parametrize(("physical", "peers"), [(0, True), (1, True), (1, False)])
async def test_arrays_go_to_another_device(physical: int, peers: bool, shape: tuple[int, ...]) -> None:
    value = np.random.default_rng(0).random(shape)
    with FakeCupy(devices=2, peers=peers, seed=1) as cupy:
        async with opened(cupy) as one, opened(cupy, 1, physical=physical) as other:
            x = computed(one, lambda: cupy.full((), value)) if not shape else await fed(one, value)
            for part in (lambda x: x, lambda x: x.T):
                y = computed(one, part, x)
                arriving = other._future_of(lambda deliver, y=y: other.receive(y, one, deliver))  # type: ignore[misc]
                del y
                computed(one, lambda: cupy.full(shape, -1.0))
                result = await fetched(other, await arriving)
                assert np.array_equal(result, part(value))


async def test_peer_access_is_asked_for_at_the_start(cupy: FakeCupy) -> None:
    async with opened(cupy), opened(cupy, 1, physical=1):
        assert cupy.cuda.runtime._peer_access == {(0, 1), (1, 0)}


# -- how far it has got -----------------------------------------------------------------------------------------------


async def test_a_run_that_copied_nothing_takes_one_ticket(cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    notify = CudaStream.notify

    def counted(stream: CudaStream, *args: Any) -> None:
        asked.append(stream.name)
        notify(stream, *args)

    async with opened(cupy) as device:
        await fetched(device, await fed(device, np.zeros(3)))
        await until(lambda: not device.h2d.pending and not device.d2h.pending)
        monkeypatch.setattr(CudaStream, "notify", counted)
        ended = asyncio.Event()
        launch(device)
        device.when_done(lambda _error: ended.set())
        await ended.wait()
        assert asked == ["cuda:0/compute"]
        asked.clear()
        ended.clear()
        device.when_done(lambda _error: ended.set())
        assert not ended.is_set()
        await ended.wait()
        assert asked == []
        cupy.pause()
        launch(device)
        x = device.copy_in(LARGE, "x")
        asked.clear()
        ended.clear()
        device.when_done(lambda _error: ended.set())
        assert asked == ["cuda:0/compute", "cuda:0/h2d"]
        cupy.step(2)
        await turns()
        assert not ended.is_set()
        cupy.resume()
        await ended.wait()
        del x


async def test_launching_pauses_and_goes_on_even_if_a_callback_fails(cupy: FakeCupy) -> None:
    failures: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: failures.append(context))
    resumed: list[str] = []

    def fail() -> None:
        raise ZeroDivisionError

    async with opened(cupy) as device:
        cupy.pause()
        is_far_ahead = False
        for _ in range(MOST_AHEAD // MARK_EVERY):
            computed(device, lambda: cupy.zeros(1))
            device.launched += MARK_EVERY
            is_far_ahead = device.throttle(fail)
        assert is_far_ahead and device.throttle(lambda: resumed.append("second"))
        await turns()
        assert resumed == []
        cupy.resume()
        await until(lambda: bool(resumed))
        assert [type(context["exception"]) for context in failures] == [ZeroDivisionError]
        assert not device.throttle(fail)


async def test_a_lost_device_pauses_no_launcher(cupy: FakeCupy) -> None:
    resumed: list[str] = []
    async with opened(cupy) as device:
        cupy.pause()
        computed(device, lambda: cupy.zeros(1))
        device.launched = MOST_AHEAD
        assert device.throttle(lambda: resumed.append("once"))
        cupy.fail_device(0)
        cupy.resume()
        await until(lambda: bool(resumed))
        assert not device.throttle(lambda: resumed.append("never"))
        assert resumed == ["once"]


async def test_a_lost_device_says_so_everywhere(cupy: FakeCupy) -> None:
    loss = "cuda:0 is lost: .*illegal memory access.*launched last was 'x',"
    async with opened(cupy) as device, opened(cupy, 1, physical=1) as other:
        x = await fed(device, np.zeros(PINNED))
        small = await fed(device, np.zeros(4))
        cupy.pause()
        for stream in (device.compute, device.h2d, device.d2h):  # whichever the card goes on with
            cupy.fail_stream(stream.raw)
        waiting = [
            fetched(device, x),
            fetched(device, small),
            fetched(device, CudaOpaque(1, device, device.compute)),
            fed(device, np.ones(PINNED)),
        ]
        ended: list[BaseException | None] = []
        device.when_done(ended.append)
        cupy.resume()
        for future in waiting:
            with pytest.raises(DeviceLostError, match=loss):
                await future
        await until(lambda: bool(ended))
        assert isinstance(ended[0], DeviceLostError) and ended[0].__cause__ is not None
        for call in (device.check, lambda: fetched(device, x), lambda: device.copy_in(np.ones(3), "x")):
            with pytest.raises(DeviceLostError, match=loss):
                call()
        got: list[Any] = []
        other.receive(small, device, lambda _value, error: got.append(error))
        device.receive(await fed(other, np.zeros(4)), other, lambda _value, error: got.append(error))
        assert [type(error) for error in got] == [DeviceLostError] * 2
        other.check()


async def test_a_refused_call_loses_the_device_only_if_nothing_else_works(cupy: FakeCupy) -> None:
    async with opened(cupy) as device:
        cupy.fail_next(701, "launchKernel")
        with pytest.raises(cupy.cuda.driver.CUDADriverError) as refused:
            computed(device, lambda: cupy.full(3, 1.0))
        assert device.cause_of(refused.value) is refused.value
        device.check()
        cupy.fail_next(700, "launchKernel")
        with pytest.raises(cupy.cuda.driver.CUDADriverError) as refused:
            computed(device, lambda: cupy.full(3, 1.0))
        assert isinstance(device.cause_of(refused.value), DeviceLostError)
        with pytest.raises(DeviceLostError):
            device.check()


# -- the end ----------------------------------------------------------------------------------------------------------


async def test_copies_in_flight_end_before_the_device_does(cupy: FakeCupy) -> None:
    value = np.random.default_rng(0).random(PINNED)
    async with opened(cupy) as device:
        array = await fed(device, value)
        feeding, fetching = fed(device, value), fetched(device, array)
    assert np.array_equal(await fetching, value) and feeding.result().nbytes == value.nbytes


async def test_what_does_not_end_in_time_is_given_up(cupy: FakeCupy) -> None:
    device = CudaDevice(cupy, pinned=PinnedSlab(cupy, PINNED))
    await device.open()
    cupy.pause()
    x = computed(device, lambda: cupy.zeros(3))
    fetching = fetched(device, x)
    assert not await device.aclose(0.0)
    cupy.resume()
    assert (await fetching).sum() == 0
    assert await device.aclose(PATIENCE_S)


async def test_a_device_that_was_never_opened_closes(cupy: FakeCupy) -> None:
    assert await CudaDevice(cupy).aclose(PATIENCE_S)
