"""The rows of a pool in the memory of a device: as a pure machine, and on the stand-in for a card."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.runtime.placed_rows import PlacedRows
from tests.fake_cupy.module import FakeCupy
from tests.fake_cupy.stand_in import stand_in
from tests.runtime.test_pool import HAS_ROWS, Counting

Array = np.ndarray[Any, Any]


@pytest.fixture
def cupy() -> Iterator[FakeCupy]:
    with stand_in(devices=1, seed=3) as fake:
        yield fake


@pytest.mark.parametrize("seed", range(20))
def test_every_row_has_its_owners_values(seed: int) -> None:
    """Whoever comes and goes between two exchanges; what is asked of the device is done here by NumPy."""
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
            standing = np.array([place for place in group.places if place >= 0], np.int64)
            slabs = [np.asarray(slab)[standing] for slab in group.slabs]
            for each, (value, pair, *_) in group.brought(slabs):
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
        flags = np.array([random.random() < 0.8 for _ in names])
        assert group.ended(flags) == [row for row, goes_on in enumerate(flags) if not goes_on]


def counting() -> tuple[af.Graph, af.Tensor, af.Tensor, af.Tensor]:
    with af.Graph() as graph:
        x, n = af.placeholder("float32", (4,), name="x"), af.placeholder("float32", (), name="n")
        y = af.while_loop(lambda s: af.sum(s) < n, lambda s: s + af.tanh(x), x, pool=af.Pool(4), name="steps")
    return graph, x, n, y


async def test_variables_stay_on_a_card_and_nothing_blocks(cupy: FakeCupy) -> None:
    """What is fed and fetched in a step does not depend on the variables; the log shows no call that waits."""
    graph, x, n, y = counting()
    start = np.full(4, 10, np.float32)
    async with af.Session(graph, devices=["cuda:0"], memory_limit=8 << 20) as session:
        await session.run(y, {x: start, n: 44})
        warm = len(cupy.blocking())
        found = await asyncio.gather(*(session.run(y, {x: start, n: 44 + 4 * k}) for k in range(3)))
        assert cupy.blocking()[warm:] == []
    for k, value in enumerate(found):
        assert value.tolist() == [11 + k] * 4


async def test_the_next_step_is_launched_before_a_predicate_is_read(cupy: FakeCupy) -> None:
    """Two steps are launched at a time, and waited for together; who ends with the first has its values."""
    graph, x, n, y = counting()
    start = np.full(4, 10, np.float32)
    async with af.Session(graph, devices=["cuda:0"], memory_limit=8 << 20) as session:
        assert (await session.run(y, {x: start, n: 44})).tolist() == [11] * 4  # one step, though two were made
        assert session.statistics().batches["steps"].calls == 1
        assert (await session.run(y, {x: start, n: 45})).tolist() == [12] * 4
        before = session.statistics()
        assert (await session.run(y, {x: start, n: 40 + 4 * 19.5})).tolist() == [30] * 4
        after = session.statistics()
        assert after.batches["steps"].calls == before.batches["steps"].calls + 20
        # The request, who goes on at all, a row in, a row out, and the steps.
        assert after.completed == before.completed + 4 + 10


async def test_rows_of_a_card_that_fails_are_stepped_one_by_one(cupy: FakeCupy) -> None:
    """A row at fault, in the step that only others make again, ends nobody but itself."""

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
