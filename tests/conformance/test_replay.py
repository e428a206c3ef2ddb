"""A recorded run is done again in the same order, bit for bit, wherever it runs; or where it is not is said."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.semantics.state import digest
from tests.conftest import OpenSession
from tests.semantics.programs import stateful_program

pytestmark = pytest.mark.filterwarnings("ignore::asyncflow.RaceWarning")


@pytest.mark.parametrize("program", range(4))
async def test_70_a_run_is_done_again_bit_for_bit(open_session: OpenSession, tmp_path: Path, program: int) -> None:
    """CONFORMANCE 70: of a program with several outcomes, the one of the record comes again."""
    graph, fetches, _ = stateful_program(Random(program), "unordered")
    path = tmp_path / "run.json"
    for seed in range(3):
        async with open_session(graph, seed=seed) as session:
            await session.run(fetches)
            fetched = await session.run(fetches, record=path)
        again = await af.replay(path)
        assert list(map(digest, again.values())) == list(map(digest, fetched))
        assert await af.replay(path, graph) == again


async def test_71_random_numbers_feeds_and_open_variables(open_session: OpenSession, tmp_path: Path) -> None:
    """CONFORMANCE 71: random numbers are those of the recorded run, and a variable without a value has none."""
    with af.Graph() as graph:
        x = af.placeholder("float32", (None,), name="x")
        kept = af.Variable(af.spec("float32", (None,)), name="kept")
        drawn = af.random.normal((3,), dtype="float32") + x
        fetches = [drawn, kept.assign(drawn * 2), af.constant(["a", "ü"])]
    path = tmp_path / "run.json"
    async with open_session(graph) as session:
        before = await session.run(fetches, {x: np.ones(3, np.float32)})
        fetched = await session.run(fetches, {x: np.ones(3, np.float32)}, record=str(path))
    assert not np.array_equal(before[0], fetched[0])
    for name, value in (await af.replay(path)).items():
        np.testing.assert_array_equal(value, fetched[[fetch.name for fetch in fetches].index(name)])


async def test_84_what_was_stopped_stops_where_it_was(open_session: OpenSession, tmp_path: Path) -> None:
    """CONFORMANCE 84: a cancelled run is written down, and done again as far as it came."""
    started = asyncio.Event()

    @af.op(outputs=af.spec("int64", ()))
    async def never(x: np.int64) -> np.int64:
        started.set()
        await asyncio.Event().wait()
        return x

    with af.Graph() as graph:
        count = af.Variable(0, name="count")
        y = never(count.assign_add(1))
    path = tmp_path / "run.json"
    async with open_session(graph) as session:
        run = asyncio.create_task(session.run(y, record=path))
        await started.wait()
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
    assert await af.replay(path, graph) == {}
    with pytest.raises(af.ReplayError, match="an op of your own"):
        await af.replay(path)


async def test_a_loop_that_was_stopped_stops_there(open_session: OpenSession, tmp_path: Path) -> None:
    """A record that ends amid a loop is not taken for one of another program."""
    reached = asyncio.Event()

    @af.op(outputs=af.spec("int64", ()))
    def count(i: np.int64) -> np.int64:
        if i == 40:
            reached.set()
        return i + 1

    with af.Graph() as graph:
        y = af.while_loop(lambda i: i >= 0, count, 0)
    path = tmp_path / "run.json"
    async with open_session(graph) as session:
        run = asyncio.create_task(session.run(y, record=path))
        await reached.wait()
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
    assert await af.replay(path, graph) == {}


async def test_what_had_not_ended_may_end_now(open_session: OpenSession, tmp_path: Path) -> None:
    """A record has no result of what was under way when another node failed; in the replay it may have one."""
    is_again = False

    @af.op(outputs=af.spec("int64", ()))
    async def slow(x: np.int64) -> np.int64:
        if not is_again:
            await asyncio.Event().wait()
        return x

    @af.op(outputs=af.spec("int64", ()))
    async def failing(x: np.int64) -> np.int64:
        for _ in range(9):
            await asyncio.sleep(0)
        raise ValueError("at last")

    with af.Graph() as graph:
        fetches = [slow(af.constant(1)), failing(af.constant(2))]
    path = tmp_path / "run.json"
    async with open_session(graph) as session:
        with pytest.raises(af.KernelError, match="at last"):
            await session.run(fetches, record=path)
    is_again = True
    with pytest.raises(af.KernelError, match="at last"):
        await af.replay(path, graph)


async def test_what_failed_fails_again(open_session: OpenSession, tmp_path: Path) -> None:
    with af.Graph() as graph:
        x = af.placeholder("int64", (), name="x")
        with af.control_dependencies([af.assert_that(x > 0, "x is too small")]):
            z = x + 1
    path = tmp_path / "run.json"
    async with open_session(graph) as session:
        with pytest.raises(af.KernelError, match="too small"):
            await session.run(z, {x: 0}, record=path)
    with pytest.raises(af.KernelError, match="too small"):
        await af.replay(path)


async def test_the_first_firing_that_differs_is_named(open_session: OpenSession, tmp_path: Path) -> None:
    with af.Graph(effects="unordered") as graph:
        total = af.Variable(1, name="total")
        first = total.assign_add(1)
        second = total.update(lambda old: old * 3)
        third = total.assign_add(5)
    path = tmp_path / "run.json"
    async with open_session(graph, seed=1) as session:
        await session.run([first, second, third], record=path)

    def changed(**fields: Any) -> Path:
        other = tmp_path / "other.json"
        other.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
        return other

    picks = json.loads(path.read_text())["picks"]
    place = next(k for k, pick in enumerate(picks) if pick[1].startswith("total/"))
    name = picks[place][1]
    wrong = [pick[:3] + [0] if k == place and pick[3] is not None else pick for k, pick in enumerate(picks)]
    if wrong != picks:  # values on a card are not looked at
        with pytest.raises(af.ReplayError, match=rf"firing {place + 1} of {len(picks)}, {name}, gave another value"):
            await af.replay(changed(picks=wrong))
    unknown = [[0, "nobody", "", None], *picks]
    with pytest.raises(af.ReplayError, match=r"firing 1 of .* nobody, did not become ready here; ready: "):
        await af.replay(changed(picks=unknown))
    with pytest.raises(af.ReplayError, match="the record ends after 0 firings"):
        await af.replay(changed(picks=[]))
    with pytest.raises(af.ReplayError, match="differs from that in the record"):
        await af.replay(changed(checksums=[1, 2, 3]))
    with pytest.raises(af.ReplayError, match="ended with KernelError: x; this one gave"):
        await af.replay(changed(status="KernelError: x"))


@pytest.mark.parametrize(
    "damage",
    [
        {"graph": None},
        {"fetches": 3},
        {"fetches": [1]},
        {"fetches": []},
        {"checksums": []},
        {"status": None},
        {"options": []},
        {"options": {"nothing": 1}},
        {"options": {"threads": "x"}},
        {"devices": ["cpu"] * 2 + ["abacus:0"]},
        {"devices": 3},
    ],
    ids=str,
)
async def test_other_fields_than_a_run_has_are_named(tmp_path: Path, damage: dict[str, object]) -> None:
    """A record whose JSON is sound but whose fields are not, or whose devices are not here, is no failed run."""
    with af.Graph() as graph:
        y = af.constant(1) + 1
    path = tmp_path / "run.json"
    async with af.Session(graph) as session:
        await session.run(y, record=path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **damage}))
    with pytest.raises(af.ReplayError):
        await af.replay(path)
