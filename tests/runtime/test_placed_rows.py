"""The rows of a pool in the memory of a device: as a pure machine, and on the stand-in for a card."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from random import Random
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.runtime.executor.turn import Turn
from asyncflow.runtime.shared.placed_pools import _PlacedRun
from asyncflow.runtime.shared.rows.placed_rows import PlacedRows
from tests.fake_cupy.module import FakeCupy
from tests.fake_cupy.stand_in import stand_in
from tests.others import others_end
from tests.patience import PATIENCE_S
from tests.runtime.test_pool import HAS_ROWS, Counting

Array = np.ndarray[Any, Any]


@pytest.fixture
def cupy() -> Iterator[FakeCupy]:
    with stand_in(devices=1, seed=3) as fake:
        yield fake


@pytest.mark.parametrize("seed", range(20))
def test_every_row_has_its_owners_values(seed: int) -> None:
    """Activations come and go between two exchanges; NumPy does the device's part here."""
    random = Random(seed)
    group: PlacedRows[Counting] = PlacedRows(HAS_ROWS, 2, 8, is_watched=False)
    made = 0
    for _ in range(40):
        for _ in range(random.randrange(4)):
            each = Counting(made, made * 10, 0, np.array(1))
            group.add(each, each.inputs)
            made += 1
        for _ in range(min(random.randrange(3), len(group.rows))):
            group.remove(random.randrange(len(group.rows)))
        if not group.rows:
            continue
        if random.random() < 0.3:
            for each, place in zip(group.rows, group.places, strict=True):
                given = [np.asarray(slab)[place] for slab in group.slabs] if place >= 0 else each.inputs[:3]
                value, pair, *_ = group.with_rows(each, given)
                assert (int(value) // 10, pair.tolist()) == (each.name, [each.name, each.start])
        exchanged = group.exchanged()
        if exchanged is not None:
            keep, *given = map(np.asarray, exchanged)
            pairs = zip(given[: group.width], given[group.width :], strict=True)
            group.settled([np.concatenate([slab[keep], fresh]) for slab, fresh in pairs])
            assert group.exchanged() is None
        value, pair, _, by = map(np.asarray, group.all_inputs())
        assert by is group.rows[0].inputs[3]
        names = [each.name for each in group.rows]
        assert [x // 10 for x in value.tolist()] == names
        assert pair[:, 0].tolist() == names


def counting() -> tuple[af.Graph, af.Tensor, af.Tensor, af.Tensor]:
    with af.Graph() as graph:
        x, n = af.placeholder("float32", (4,), name="x"), af.placeholder("float32", (), name="n")
        y = af.while_loop(lambda s: af.sum(s) < n, lambda s: s + af.tanh(x), x, pool=af.Pool(4), name="steps")
    return graph, x, n, y


async def test_variables_stay_on_a_card_and_nothing_blocks(cupy: FakeCupy) -> None:
    """The feeds and fetches of a step do not depend on the variables; the log shows no call that waits."""
    graph, x, n, y = counting()
    start = np.full(4, 10, np.float32)
    async with af.Session(graph, devices=["cuda:0"], memory_limit=8 << 20) as session:
        await session.run(y, {x: start, n: 44})
        warm = len(cupy.blocking())
        found = await asyncio.gather(*(session.run(y, {x: start, n: 44 + 4 * k}) for k in range(3)))
        assert cupy.blocking()[warm:] == []
    for k, value in enumerate(found):
        assert value.tolist() == [11 + k] * 4


@pytest.mark.usefixtures("work")
@pytest.mark.parametrize("has_time", [True, False])
async def test_the_next_step_is_launched_before_a_predicate_is_read(
    cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch, has_time: bool
) -> None:
    """The log has the kernels of a step, one copy of its predicate, and the next step: all of it while no work is done.

    Rows that have ended by then are computed once more, and dropped. This also holds if a step is launched in a later
    pass, since the loop is busy.
    """
    if not has_time:
        monkeypatch.setattr(Turn, "has_time", lambda _turn: False)
    graph, x, n, y = counting()
    feeds = {x: np.full(4, 10, np.float32), n: 40 + 4 * 2.5}
    log: list[str] = []
    are_launched = asyncio.Event()
    give = cupy.engine.give

    def noted(queue: Any, name: str, *args: Any, **options: Any) -> Any:
        if name in ("asyncflow_tanh_add_sum", "memcpyAsync"):
            if log == [] and name != "memcpyAsync":
                cupy.pause()
            if log or name != "memcpyAsync":
                log.append("copy" if name == "memcpyAsync" else "step")
            if log == ["step", "copy"] * 2:
                are_launched.set()
        return give(queue, name, *args, **options)

    async with af.Session(graph, devices=["cuda:0"], memory_limit=8 << 20) as session:
        await session.run(y, feeds)
        before = session.statistics()
        monkeypatch.setattr(cupy.engine, "give", noted)
        run = asyncio.ensure_future(session.run(y, feeds))
        try:
            async with asyncio.timeout(PATIENCE_S):
                await are_launched.wait()
            for _ in range(20):
                await asyncio.sleep(0)
            assert log == ["step", "copy"] * 2
        finally:
            cupy.resume()
        assert (await run).tolist() == [13] * 4
        assert log[: 2 * 4] == ["step", "copy"] * 4
        assert log.count("step") == 4
        after = session.statistics()
    assert after.batches["steps"].calls == before.batches["steps"].calls + 3
    # The request, who goes on at all, a row in, a row out, and the steps.
    assert after.completed == before.completed + 4 + 4


@pytest.mark.slow
async def test_several_steps_are_one_launch_while_no_activation_comes_or_goes(cupy: FakeCupy) -> None:
    """Activations that end in between keep the variables of their last step, and none makes more steps than allowed."""
    graph, x, n, y = counting()
    start = np.full(4, 10, np.float32)
    async with af.Session(graph, devices=["cuda:0"], max_iterations=100) as session:

        async def asked(*steps: int) -> list[Any]:
            feeds = ({x: start, n: 40 + 4 * count - 2} for count in steps)
            found = await asyncio.gather(*(session.run(y, each) for each in feeds), return_exceptions=True)
            return [type(each) if isinstance(each, BaseException) else each.tolist() for each in found]

        async with asyncio.timeout(PATIENCE_S):
            while True:  # until the plan of several steps is there
                before = session.statistics()
                assert await asked(90) == [[100] * 4]
                after = session.statistics()
                if after.completed - before.completed < 60:
                    break
        assert after.batches["steps"].calls >= 90
        assert await asked(9, 21, 22, 70) == [[10 + count] * 4 for count in (9, 21, 22, 70)]
        assert await asked(100, 40, 101) == [[110] * 4, [50] * 4, af.KernelError]


async def test_limits_of_steps_that_were_launched_ahead(cupy: FakeCupy) -> None:
    """An activation that ends with its last permitted step has its result, though one more step was launched."""
    graph, x, n, y = counting()
    start = np.full(4, 10, np.float32)
    async with af.Session(graph, devices=["cuda:0"], max_iterations=5) as session:
        asked = ({x: start, n: 40 + 4 * steps - 2} for steps in (5, 6, 2, 5, 9))
        found = await asyncio.gather(*(session.run(y, feeds) for feeds in asked), return_exceptions=True)
    ends = [type(each) if isinstance(each, BaseException) else each.tolist() for each in found]
    assert ends == [[15] * 4, af.KernelError, [12] * 4, [15] * 4, af.KernelError]
    del found


async def test_an_activation_that_joins_behind_a_failed_step_has_made_none(
    cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step that was under way when it came was not its own, and it may make as many as it is allowed."""
    graph, x, n, y = counting()
    steps: list[_PlacedRun] = []
    failed: list[_PlacedRun] = []
    exchanges = 0
    has_begun = asyncio.Event()
    staying, values = _PlacedRun.staying, _PlacedRun.values

    async def noted(run: _PlacedRun) -> Any:
        nonlocal exchanges
        if len(run._staying) == 1:  # the variable
            steps.append(run)
            has_begun.set()
        else:
            exchanges += 1
            failed.extend(steps[-1:])
        return await staying(run)

    async def failing(run: _PlacedRun) -> Any:
        found = await values(run)
        if run in failed:
            raise RuntimeError("the device had no room")
        return found

    start = np.full(4, 10, np.float32)
    async with af.Session(graph, devices=["cuda:0"], max_iterations=5) as session:
        await session.run(y, {x: start, n: 44})
        monkeypatch.setattr(_PlacedRun, "staying", noted)
        monkeypatch.setattr(_PlacedRun, "values", failing)
        first, *later = (session.run(y, {x: start, n: 40 + 4 * count - 2}) for count in (5, 5, 6))
        run = asyncio.ensure_future(first)
        await has_begun.wait()
        found = await asyncio.gather(run, *later, return_exceptions=True)
    assert len(failed) == 1
    assert exchanges == 2
    ends = [type(each) if isinstance(each, BaseException) else each.tolist() for each in found]
    assert ends == [[15] * 4, [15] * 4, af.KernelError]
    del found


@pytest.mark.parametrize("seed", range(8))
async def test_whoever_comes_and_goes_between_steps(cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Arrivals and cancels at any pass; launches that fail, then or later: each gets its own result."""
    random = Random(seed)

    def failing(method: Callable[[_PlacedRun], Awaitable[Any]]) -> Callable[[_PlacedRun], Awaitable[Any]]:
        async def fails(run: _PlacedRun) -> Any:
            found = await method(run)
            if run._staying and random.random() < 0.05 * (seed % 3):
                raise RuntimeError("the device had no room")
            return found

        return fails

    for name in ("staying", "values"):
        monkeypatch.setattr(_PlacedRun, name, failing(getattr(_PlacedRun, name)))
    graph, x, n, y = counting()
    async with af.Session(graph, devices=["cuda:0"], max_iterations=6) as session:
        await session.run(y, {x: np.full(4, 10, np.float32), n: 44})

        async def request(name: int) -> None:
            for _ in range(random.randrange(12)):
                await asyncio.sleep(0)
            start, steps = random.randint(10, 40), random.randint(0, 8)
            feeds = {x: np.full(4, start, np.float32), n: 4 * (start + steps) - 1}
            run = asyncio.ensure_future(session.run(y, feeds))
            if name % 4 == 3:
                for _ in range(random.randrange(20)):
                    await asyncio.sleep(0)
                run.cancel()
            found = (await asyncio.gather(run, return_exceptions=True))[0]
            if isinstance(found, asyncio.CancelledError):
                return
            if steps > 6:
                assert isinstance(found, af.KernelError)
            else:
                assert not isinstance(found, BaseException)
                assert found.tolist() == [start + steps] * 4

        await asyncio.gather(*(request(name) for name in range(16)))
        await others_end()
        assert session.statistics().runs == 0


async def test_rows_of_a_card_that_fails_are_stepped_one_by_one(cupy: FakeCupy) -> None:
    """A failing row, in the step that only others make again, ends only itself."""

    @af.op(outputs=af.spec("float32", (4,)), rows=True, pure=True)
    def checked(x: Array) -> Array:
        if (x >= 13).any():
            raise ValueError("13")
        return x

    with af.Graph() as graph:
        x, n = af.placeholder("float32", (4,), name="x"), af.placeholder("float32", (), name="n")
        y = af.while_loop(lambda s: af.sum(s) < n, lambda s: checked(s) + 1, x, pool=af.Pool(8))
    async with af.Session(graph, devices=["cuda:0"]) as session:
        asked = [(k, k + 3) for k in range(8, 14)]
        runs = (session.run(y, {x: np.full(4, a, np.float32), n: 4 * b}) for a, b in asked)
        found = await asyncio.gather(*runs, return_exceptions=True)
    for (start, end), result in zip(asked, found, strict=True):
        if end > 13:
            assert isinstance(result, af.KernelError)
        else:
            assert not isinstance(result, BaseException)
            assert result.tolist() == [end] * 4
        assert start < end
    del found, result
