"""Work of launchers: launches, uploads, counts, failures; kernels of the host; regions step by step."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from asyncflow.devices.cuda.device import CudaDevice
from asyncflow.devices.cuda.launch import LONG_ELEMENTS, STEP_LAUNCHES, is_coroutine_function
from asyncflow.devices.cuda.progress import MOST_AHEAD
from asyncflow.devices.cuda.transfers.pinned import PinnedSlab
from asyncflow.devices.cuda.values import CudaArray, CudaOpaque
from asyncflow.devices.memory import MemoryLimitExceeded
from asyncflow.devices.protocol import CodeInfo, KernelInfo
from asyncflow.errors import DeviceLostError, InternalError
from asyncflow.streams.cuda.stream import active
from asyncflow.values import Conduct
from tests.fake_cupy import FakeCupy
from tests.patience import PATIENCE_S

VALUE = np.arange(12.0).reshape(3, 4)


@pytest.fixture
def cupy() -> Iterator[FakeCupy]:
    with FakeCupy(devices=2) as fake:
        yield fake


@asynccontextmanager
async def opened(cupy: FakeCupy, index: int = 0, **options: Any) -> AsyncIterator[CudaDevice]:
    device = CudaDevice(cupy, index, pinned=PinnedSlab(cupy, 64 << 10), **options)
    await device.open()
    try:
        yield device
    finally:
        cupy.resume()
        assert await device.aclose(PATIENCE_S)


def info(**options: Any) -> KernelInfo:
    return KernelInfo(**{"name": "node", "flops": lambda *_: 0.0, "infer": lambda _: None, **options})


async def test_a_kernel_gets_arrays_and_scalars_while_its_stream_is_active(cupy: FakeCupy) -> None:
    seen: list[Any] = []

    def kernel(*args: Any) -> Any:
        seen.append((active.stream, [type(value) for value in args]))
        return args[0] + args[1]

    async with opened(cupy) as device:
        x = await device.fed(VALUE, "x")
        launch = device.bind(kernel, info())
        y = launch(x, VALUE, np.asarray(2.0), np.float32(3), "text", CudaOpaque([1], device, device.compute))
        assert seen == [(device.compute, [cupy.ndarray, cupy.ndarray, np.float64, np.float32, str, list])]
        assert active.stream is None and device.pool.label == "node"
        assert (type(y), y.name, y.stream, y.device) == (CudaArray, "node", device.compute, "cuda:0")
        assert np.array_equal(await device.fetched(y), 2 * VALUE)


@pytest.mark.parametrize("is_generator", [False, True])
async def test_a_region_gets_numbers_of_the_host_as_scalars(cupy: FakeCupy, is_generator: bool) -> None:
    """A row of a pool gives arrays of rank 0, which CuPy refuses."""

    def scaled(x: Any, factor: Any) -> tuple[Any]:
        return (x * factor,)

    def steps(x: Any, factor: Any) -> Generator[bool, int | None, tuple[Any]]:
        yield True
        return scaled(x, factor)

    async with opened(cupy) as device:
        x = await device.fed(VALUE, "x")
        launch = device.bind_region(steps if is_generator else scaled, info(single=False), is_generator=is_generator)
        found: Any = launch(x, np.asarray(2))
        if is_generator:
            with pytest.raises(StopIteration) as ended:
                for _ in range(3):
                    next(found)
            found = ended.value.value
        assert np.array_equal(await device.fetched(found[0]), 2 * VALUE)


@pytest.mark.parametrize(
    ("output", "kind"),
    [
        (np.float64(2), np.float64),
        (np.asarray(2.0), np.float64),
        (3, int),
        ("text", str),
        (None, type(None)),
        (np.arange(4), np.ndarray),
        (np.arange(65), CudaArray),
        (np.ones(4), CudaArray),
        (np.array(["a"], object), np.ndarray),
        ([1], CudaOpaque),
    ],
)
async def test_what_a_kernel_gives(cupy: FakeCupy, output: Any, kind: type) -> None:
    async with opened(cupy) as device:
        assert type(device.bind(lambda: output, info())()) is kind
        (only,) = device.bind(lambda: (output,), info(single=False))()
        assert type(only) is kind


async def test_inputs_that_the_host_reads_are_not_copied_in(cupy: FakeCupy) -> None:
    async with opened(cupy) as device:
        launch = device.bind(
            lambda context, x, shape: x.reshape(tuple(shape)),
            info(conduct=Conduct(needs_context=True), host_inputs=frozenset({1})),
        )
        y = launch("context", await device.fed(VALUE, "x"), np.array([4, 3]))
        assert y.shape == (4, 3)


@pytest.mark.parametrize("streams", [1, 2])
async def test_a_stream_waits_once_for_a_value_that_was_copied_in(cupy: FakeCupy, streams: int) -> None:
    async with opened(cupy, compute_streams=streams) as device:
        x = device.copy_in(VALUE, "x")
        launches = [device.bind(lambda x: x + 1, info(stream=stream)) for stream in range(streams)]
        before = len(cupy.engine.launches)
        for launch in launches * 5:
            launch(x)
        waits = [name for _, name in cupy.engine.launches[before:] if name == "streamWaitEvent"]
        # With one stream a small value is copied there, and with two on a third.
        assert len(waits) == (0 if streams == 1 else 2)


async def test_values_of_another_device_are_refused(cupy: FakeCupy) -> None:
    async with opened(cupy) as device, opened(cupy, 1) as other:
        x = await other.fed(VALUE, "x")
        with pytest.raises(InternalError, match="'node' runs on cuda:0 and was given 'x', which is on cuda:1"):
            device.bind(lambda x: x + 1, info())(x)


@pytest.mark.parametrize("code", [701, 700])
@pytest.mark.parametrize("kind", ["kernel", "region", "steps"])
async def test_a_launch_that_cuda_refuses(cupy: FakeCupy, kind: str, code: int) -> None:
    """Only some errors are the device's last."""

    def steps(x: Any) -> Generator[bool, int | None, tuple[Any, ...]]:
        yield True
        return (x + 1,)

    async with opened(cupy) as device:
        x = await device.fed(VALUE, "x")
        if kind == "kernel":
            launch: Callable[..., Any] = device.bind(lambda x: x + 1, info())
        elif kind == "region":
            launch = device.bind_region(lambda x: (x + 1,), info(single=False), is_generator=False)
        else:
            bound = device.bind_region(steps, info(single=False), is_generator=True)
            launch = lambda x: list(bound(x))  # noqa: E731
        cupy.fail_next(code, "launchKernel")
        with pytest.raises(DeviceLostError if code == 700 else cupy.cuda.driver.CUDADriverError) as refused:
            launch(x)
        assert active.stream is None
        if code == 700:
            assert "launched last was 'node'" in str(refused.value)
            assert isinstance(refused.value.__cause__, cupy.cuda.driver.CUDADriverError)
        else:
            launch(x)


@pytest.mark.parametrize("regions", [False, True])
async def test_memory_that_does_not_fit_is_refused_under_the_nodes_name(cupy: FakeCupy, regions: bool) -> None:
    async with opened(cupy, memory_limit=1 << 16) as device:
        x = await device.fed(VALUE, "x")
        used = device.memory.used

        def kernel(x: Any) -> Any:
            held = cupy.zeros(1 << 12)
            return (cupy.concatenate([held, cupy.zeros(1 << 12)]),)

        launch: Callable[..., Any] = device.bind(kernel, info(single=False))
        if regions:
            launch = device.bind_region(kernel, info(single=False), is_generator=False)
        error: MemoryLimitExceeded | None = None
        try:
            launch(x)
        except MemoryLimitExceeded as refusal:
            error = refusal.with_traceback(None)  # as the runtime does: frames hold what is too much
        assert error is not None and error.requested == 1 << 15 and error.top[0].label == "node"
        assert device.memory.used == used and active.stream is None


async def test_a_step_of_a_region_counts_as_its_possible_launches(cupy: FakeCupy) -> None:
    def steps(x: Any) -> Generator[bool | None, int | None, tuple[Any, ...]]:
        for _ in range(4):
            x = x + 1
            yield None
        return (x,)

    async with opened(cupy) as device:
        x = await device.fed(VALUE, "x")
        device.launched = 0
        firing = device.bind_region(steps, info(single=False, code=CodeInfo(launches=1000)), is_generator=True)(x)
        assert firing.send(None) is None and active.stream is None
        assert device.launched == STEP_LAUNCHES
        firing.send(2)
        assert device.launched == 3 * STEP_LAUNCHES
        firing.close()
        device.bind_region(lambda x: (x,), info(single=False, code=CodeInfo(launches=5)), is_generator=False)(x)
        assert device.launched == 3 * STEP_LAUNCHES + 5


async def test_a_step_of_a_region_launches_no_more_than_the_card_is_ahead(cupy: FakeCupy) -> None:
    """Its driver may have measured a clock that hardly moves, and ask for thousands of iterations."""
    budgets: list[int | None] = []

    def steps(x: Any) -> Generator[bool | None, int | None, tuple[Any, ...]]:
        budgets.append((yield None))
        budgets.append((yield None))
        yield None
        return (x,)

    async with opened(cupy) as device:
        x = await device.fed(VALUE, "x")
        firing = device.bind_region(steps, info(single=False, code=CodeInfo(launches=4)), is_generator=True)(x)
        for budget in (None, 3, 4096):
            firing.send(budget)
        firing.close()
    assert budgets == [3, MOST_AHEAD // 4]


@pytest.mark.parametrize("seed", range(6))
async def test_a_region_that_is_given_up_keeps_what_its_kernels_read(seed: int) -> None:
    """Memory of the first stream, read on the second one, by a region that is stopped half-way."""
    written: list[Any] = []

    def steps(x: Any) -> Generator[bool | None, int | None, tuple[Any, ...]]:
        written.append(x.sum())
        yield None
        return (x,)

    with FakeCupy(seed=seed) as cupy:
        async with opened(cupy, compute_streams=2) as device:
            cupy.pause()
            x = device.bind(lambda: cupy.full((64, 64), 2.0), info())()
            firing = device.bind_region(steps, info(stream=1, single=False), is_generator=True)(x)
            firing.send(None)
            firing.close()
            del x, firing
            fill = device.bind(lambda: cupy.full((64, 64), -1.0), info())
            for _ in range(3):
                fill()
            cupy.resume()
            total = CudaArray(written.pop(), device, device.compute_streams[1], "total")
            assert await device.fetched(total) == 2.0 * 64 * 64


@pytest.mark.parametrize("seed", range(6))
async def test_a_store_of_another_stream_is_waited_for(seed: int) -> None:
    with FakeCupy(seed=seed) as cupy:
        async with opened(cupy, compute_streams=2) as device:
            cupy.pause()
            fill = device.bind_region(
                lambda: ([cupy.full((64, 64), 2.0)],), info(stream=1, single=False), is_generator=False
            )
            (store,) = fill()
            read = [device.bind(lambda store: store[0].sum(), info(stream=stream)) for stream in (0, 1)]
            before = len(cupy.engine.launches)
            totals = [launch(store) for launch in read * 2]
            waits = [name for _, name in cupy.engine.launches[before:] if name == "streamWaitEvent"]
            assert len(waits) == 1
            cupy.resume()
            assert [await device.fetched(total) for total in totals] == [2.0 * 64 * 64] * 4


class Store(list[Any]):
    """A store of arrays, or of stores; see `asyncflow.devices.memory.Held`."""

    entry_nbytes = grown_from = 0
    gives_views = False

    @property
    def held(self) -> Store:
        return self

    def since(self, count: int) -> list[Any]:
        return self[count:]

    def buffers(self) -> list[Any]:
        return []


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("way", ["kernel", "region", "steps"])
async def test_an_array_taken_from_a_store_stays_until_it_is_read(seed: int, is_nested: bool, way: str) -> None:
    """The first stream has made it, and uses the memory again once the second has read it."""

    def taken(store: Store) -> Any:
        found = store.pop()
        return found.pop() if is_nested else found

    def steps(store: Store) -> Generator[bool | None, int | None, tuple[Any, ...]]:
        array = taken(store)
        yield None
        return (array.sum(),)

    with FakeCupy(seed=seed) as cupy:
        async with opened(cupy, compute_streams=2) as device:

            def filled() -> Store:
                array = cupy.full((64, 64), 2.0)
                return Store([Store([array]) if is_nested else array])

            store = device.bind(filled, info(keeps_arrays=True))()
            if way == "kernel":
                cupy.pause()
                total = device.bind(lambda store: taken(store).sum(), info(stream=1))(store)
            elif way == "region":
                cupy.pause()
                region = lambda store: (taken(store).sum(),)  # noqa: E731
                (total,) = device.bind_region(region, info(stream=1, single=False), is_generator=False)(store)
            else:
                firing: Any = device.bind_region(steps, info(stream=1, single=False), is_generator=True)(store)
                firing.send(None)
                ended: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
                device.when_done(ended.set_result)
                await ended  # so nothing is held for the first step any more
                cupy.pause()
                with pytest.raises(StopIteration) as returned:
                    firing.send(None)
                (total,) = returned.value.value
                del firing, returned
            for _ in range(3):
                device.bind(lambda: cupy.full((64, 64), -1.0), info())()
            cupy.resume()
            assert await device.fetched(total) == 2.0 * 64 * 64
            assert device.compute_streams[1].taken is None


async def test_kernels_of_the_host_get_arrays_of_numpy(cupy: FakeCupy) -> None:
    async def later(x: Any) -> Any:
        return np.unique(x)

    async with opened(cupy) as device:
        x = await device.fed(np.array([3.0, 1.0, 3.0]), "x")
        for kernel in (np.unique, later):
            y = await device.bind(kernel, info(is_async=True))(x)
            assert type(y) is CudaArray and np.array_equal(await device.fetched(y), [1.0, 3.0])
        big = await device.fed(np.ones(LONG_ELEMENTS + 1), "big")
        assert (await device.fetched(await device.bind(later, info(is_async=True))(big))) == [1.0]


def test_kernels_that_must_be_called_on_the_loop() -> None:
    async def function() -> None: ...

    class Asked:
        async def __call__(self) -> None: ...

    assert is_coroutine_function(function) and is_coroutine_function(Asked())
    assert not is_coroutine_function(np.unique) and not is_coroutine_function(len)
