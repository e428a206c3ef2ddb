"""Loops of a CUDA device: launched where they can be captured, else driven by the host, with the same results."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import numpy as np
import pytest

from asyncflow.devices.cuda.device import CudaDevice
from asyncflow.devices.cuda.graphs import loop_launch as cuda_while_launch
from asyncflow.devices.cuda.graphs.conditional import ENDED, MOST_ITERATIONS, STOPPED, TOO_LONG
from asyncflow.devices.cuda.graphs.loop_launch import Patience, WhileLauncher
from asyncflow.devices.cuda.values import CudaArray
from asyncflow.devices.decisions import Branch, Loop, LoopCode
from asyncflow.devices.protocol import KernelInfo, is_coroutine_kernel
from asyncflow.errors import LoopIdentity, TooManyIterations
from tests.fake_cupy.stand_in import stand_in
from tests.patience import PATIENCE_S

LOOP = LoopIdentity("loop")
INFO = KernelInfo(name="while", single=False, flops=lambda *_: 0.0, infer=lambda *_: None)


@pytest.fixture
async def device() -> AsyncIterator[CudaDevice]:
    with stand_in(nbytes=16 << 20) as fake:
        device = CudaDevice(fake, compute_streams=2)
        await device.open()
        yield device
        assert await device.aclose(PATIENCE_S)


@pytest.fixture(params=["launched", "driven"])
def bind(device: CudaDevice, request: pytest.FixtureRequest) -> Callable[..., WhileLauncher]:
    """Binds functions of the device's namespace."""
    bindings = device.cupy.bindings if request.param == "launched" else None

    def bound(condition: Callable[..., Any], body: Callable[..., Any], **options: Any) -> WhileLauncher:
        code = LoopCode(condition=condition, body=body, **{"identity": LOOP, **options})
        return WhileLauncher(device, bindings, code, INFO)

    return bound


async def fetched(device: CudaDevice, values: Sequence[Any]) -> list[Any]:
    return [await found if type(value) is CudaArray else value for value in values for found in [device.fetched(value)]]


class Sums:
    """The sum of the first numbers below a limit, with a counter that begins on the host."""

    def __init__(self, device: CudaDevice) -> None:
        self.device = device
        self.functions = (self.is_below, self.add_up)

    def is_below(self, i: Any, total: Any, n: Any) -> Any:
        return self.device.cupy.less(i, n)

    def add_up(self, i: Any, total: Any, n: Any) -> tuple[Any, ...]:
        add = self.device.cupy.add if isinstance(i, self.device.cupy.ndarray) else np.add
        return add(i, np.int64(1)), self.device.cupy.add(total, i)

    def inputs(self, n: int) -> list[Any]:
        return [np.int64(0), self.device.copy_in(np.zeros(2), "total"), self.device.copy_in(np.asarray([n]), "n")]

    async def run(self, launcher: WhileLauncher, n: int) -> list[Any]:
        return await fetched(self.device, await launcher(*self.inputs(n)))


@pytest.fixture
def sums(device: CudaDevice) -> Sums:
    return Sums(device)


@pytest.mark.parametrize("n", [0, 1, 30])
async def test_results(sums: Sums, bind: Callable[..., WhileLauncher], n: int) -> None:
    launcher = bind(*sums.functions, n_vars=2)
    assert is_coroutine_kernel(launcher)
    for _ in range(2):
        i, total = await sums.run(launcher, n)
        assert i == n
        assert total.tolist() == [n * (n - 1) / 2] * 2


@pytest.mark.parametrize("limit", [1, 5, 6, 7])
async def test_the_limit_is_an_error_only_where_more_would_follow(
    sums: Sums, bind: Callable[..., WhileLauncher], limit: int
) -> None:
    launcher = bind(*sums.functions, n_vars=2, limit=limit)
    for n in (0, limit - 1, limit):
        assert (await sums.run(launcher, n))[0] == n
    with pytest.raises(TooManyIterations):
        await sums.run(launcher, limit + 1)


@pytest.mark.parametrize("limit", [None, 7, 8, 9, 10])
async def test_a_long_loop_is_launched_again_and_again(
    sums: Sums, bind: Callable[..., WhileLauncher], limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_while_launch, "FIRST_ITERATIONS", 4)
    launcher = bind(*sums.functions, n_vars=2, limit=limit)
    for n in (3, 4, 5, 7):
        assert (await sums.run(launcher, n))[1].tolist() == [n * (n - 1) / 2] * 2
    if limit is not None:
        with pytest.raises(TooManyIterations):
            await sums.run(launcher, limit + 1)
        assert (await sums.run(launcher, limit))[0] == limit


async def test_a_loop_is_one_launch_and_the_host_is_asked_once(
    device: CudaDevice, sums: Sums, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_while_launch, "LONG_S", math.inf)  # however busy the machine is
    condition, body = sums.functions
    code = LoopCode(condition=condition, body=body, n_vars=2, identity=LOOP)
    launcher = WhileLauncher(device, device.cupy.bindings, code, INFO)
    await sums.run(launcher, 3)
    for n in (3, 300):
        device.cupy.engine.launches.clear()
        await sums.run(launcher, n)
        names = [name for _, name in device.cupy.engine.launches]
        assert names.count("graph") == 1
        assert not {"cupy_less", "cupy_add", "set_loop"} & set(names)


async def test_runs_that_overlap_do_not_disturb_one_another(sums: Sums, bind: Callable[..., WhileLauncher]) -> None:
    launcher = bind(*sums.functions, n_vars=2)
    counts = (5, 0, 9, 2)
    runs = await asyncio.gather(*(sums.run(launcher, n) for n in counts))
    assert [values[0] for values in runs] == list(counts)
    assert [values[1][0] for values in runs] == [n * (n - 1) / 2 for n in counts]


async def test_what_cannot_be_captured_gives_the_same(device: CudaDevice) -> None:
    def multiplied(i: Any, x: Any) -> tuple[Any, ...]:
        return i + np.int64(1), device.cupy.matmul(x, x)

    code = LoopCode(condition=lambda i, x: device.cupy.max(x) < 100, body=multiplied, n_vars=2, identity=LOOP)
    launcher = WhileLauncher(device, device.cupy.bindings, code, INFO)
    x = np.full((2, 2), 1.0)
    i, found = await fetched(device, await launcher(np.int64(0), device.copy_in(x, "x")))
    count = 0
    while x.max() < 100:
        x, count = x @ x, count + 1
    assert (i, found.tolist()) == (count, x.tolist())


async def test_what_the_body_raises_is_raised(device: CudaDevice, bind: Callable[..., WhileLauncher]) -> None:
    def broken(x: Any) -> Any:
        raise ZeroDivisionError("of the user's")

    launcher = bind(lambda x: device.cupy.max(x) < 1, broken, n_vars=1)
    with pytest.raises(ZeroDivisionError):
        await launcher(device.copy_in(np.zeros(2), "x"))


# -- branches and loops inside -----------------------------------------------------------------------------------------


class Rows:
    """Adds the numbers below i, for each i below a limit, with the other sign if i is odd."""

    def __init__(self, device: CudaDevice) -> None:
        self.xp = device.cupy
        self.device = device
        self.functions = (self.is_below, self.add_row)

    def is_below(self, i: Any, total: Any, n: Any) -> Any:
        return self.xp.less(i, n)

    def add_row(self, i: Any, total: Any, n: Any) -> Any:
        add, less = self.xp.add, self.xp.less
        is_odd = self.xp.equal(i % 2, self.xp.ones_like(n))
        row = Loop(
            lambda j, row, i: less(j, i),
            lambda j, row, i: (add(j, np.int64(1)), add(row, j)),
            (np.int64(0), self.xp.zeros(2)),
            (add(i, self.xp.zeros_like(n)),),
            LoopIdentity("row"),
        )
        _, row = yield row
        (total,) = yield Branch(is_odd, lambda t, r: (t - r,), lambda t, r: (t + r,), (total, row))
        return add(i, np.int64(1)), total

    @staticmethod
    def expected(n: int) -> float:
        return sum((-1) ** (i % 2) * i * (i - 1) / 2 for i in range(n))

    async def run(self, launcher: WhileLauncher, n: int) -> list[Any]:
        total, limit = self.device.copy_in(np.zeros(2), "total"), self.device.copy_in(np.asarray([n]), "n")
        i, found = await fetched(self.device, await launcher(np.int64(0), total, limit))
        return [int(i), found.tolist()]


@pytest.fixture
def rows(device: CudaDevice) -> Rows:
    return Rows(device)


@pytest.mark.parametrize("n", [0, 1, 2, 7])
async def test_results_of_inner_loops(rows: Rows, bind: Callable[..., WhileLauncher], n: int) -> None:
    launcher = bind(*rows.functions, n_vars=2)
    for _ in range(2):
        assert await rows.run(launcher, n) == [n, [rows.expected(n)] * 2]


async def test_the_event_loop_never_waits_for_a_predicate(
    device: CudaDevice, rows: Rows, bind: Callable[..., WhileLauncher]
) -> None:
    launcher = bind(*rows.functions, n_vars=2)
    await rows.run(launcher, 3)
    before = len(device.cupy.blocking())
    await asyncio.gather(*(rows.run(launcher, n) for n in (4, 2)))
    assert [name for name in device.cupy.blocking()[before:] if name != "malloc"] == []


async def test_runs_with_decisions_inside_do_not_disturb_one_another(
    rows: Rows, bind: Callable[..., WhileLauncher]
) -> None:
    launcher = bind(*rows.functions, n_vars=2)
    counts = (5, 0, 6, 2)
    found = await asyncio.gather(*(rows.run(launcher, n) for n in counts))
    assert found == [[n, [rows.expected(n)] * 2] for n in counts]


@pytest.mark.parametrize(("first", "most"), [(1, 1), (1, 4), (1, 64), (64, 64)])
async def test_what_goes_on_for_too_long_inside_is_launched_again_or_driven(
    rows: Rows, bind: Callable[..., WhileLauncher], first: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_while_launch, "FIRST_ITERATIONS", first)
    monkeypatch.setattr(cuda_while_launch, "MOST_ITERATIONS", most)
    launcher = bind(*rows.functions, n_vars=2)
    for n in (2, 4, 12):
        assert await rows.run(launcher, n) == [n, [rows.expected(n)] * 2]


def test_launches_are_as_long_as_waiting_for_them_allows() -> None:
    """Longer if the last one was short, shorter if it was long, and never so short again that an iteration was lost."""
    patience, seen = Patience(), []
    for outcome, took_s in ((STOPPED, 0.01), (STOPPED, 0.1), (ENDED, 0.01), (STOPPED, 0.3), (ENDED, 9.0), (ENDED, 9.0)):
        assert patience.learn(outcome, took_s) is (outcome == STOPPED)
        seen.append(patience.most)
    assert seen == [4096, 4096, 4096, 1024, 256, 64]
    for _ in range(5):
        assert patience.learn(TOO_LONG, 0.3)
    assert patience.most == MOST_ITERATIONS
    assert not patience.learn(TOO_LONG, 0.3)
    patience.learn(STOPPED, 9.0)
    assert patience.most == MOST_ITERATIONS


@pytest.mark.parametrize("limit", [1, 4])
async def test_the_limit_is_one_of_each_loop(rows: Rows, bind: Callable[..., WhileLauncher], limit: int) -> None:
    """Of an inner one each time that it is come to."""
    launcher = bind(*rows.functions, n_vars=2, identity=LoopIdentity("all"), limit=limit)
    assert await rows.run(launcher, limit) == [limit, [rows.expected(limit)] * 2]
    with pytest.raises(TooManyIterations, match="all"):
        await rows.run(launcher, limit + 1)

    def long_rows(i: Any, total: Any, n: Any) -> Any:
        add = rows.xp.add
        j = rows.xp.zeros_like(n)
        (j,) = yield Loop(lambda j: rows.xp.less(j, limit + 1), lambda j: (add(j, 1),), (j,), (), LoopIdentity("row"))
        return add(i, np.int64(1)), add(total, j)

    with pytest.raises(TooManyIterations, match="row"):
        await rows.run(bind(rows.is_below, long_rows, n_vars=2, identity=LoopIdentity("all"), limit=limit), 1)


async def test_what_a_branch_raises_is_raised(device: CudaDevice, bind: Callable[..., WhileLauncher]) -> None:
    def broken(x: Any) -> Any:
        raise ZeroDivisionError("of the user's")

    def body(x: Any) -> Any:
        (x,) = yield Branch(device.cupy.max(x) < 1, broken, broken, (x,))
        return (x,)

    launcher = bind(lambda x: device.cupy.max(x) < 1, body, n_vars=1)
    with pytest.raises(ZeroDivisionError):
        await launcher(device.copy_in(np.zeros(2), "x"))
