"""A recorded run is done again in the same order, bit for bit, wherever it runs; or where it is not is said."""

from __future__ import annotations

import asyncio
import json
import math
import warnings
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.control.stores.row_block import RowState
from asyncflow.semantics.state import digest
from tests.conftest import OpenSession
from tests.faults.kernels import late, until
from tests.patience import PATIENCE_S
from tests.semantics.programs import stateful_program

pytestmark = pytest.mark.filterwarnings("ignore::asyncflow.RaceWarning")


@pytest.mark.parametrize("program", range(4))
async def test_a_run_is_done_again_bit_for_bit(open_session: OpenSession, tmp_path: Path, program: int) -> None:
    """Behaviour 70: of a program with several outcomes, the one of the record comes again."""
    graph, fetches, _ = stateful_program(Random(program), "unordered")
    path = tmp_path / "run.json"
    for seed in range(3):
        async with open_session(graph, seed=seed) as session:
            await session.run(fetches)
            fetched = await session.run(fetches, record=path)
        again = await af.replay(path)
        assert list(map(digest, again.values())) == list(map(digest, fetched))
        assert await af.replay(path, graph) == again


async def test_nodes_are_fetched_again_as_they_were(open_session: OpenSession, tmp_path: Path) -> None:
    """Behaviour 70: a node gives no value, in the run and in the replay, from the file or a graph."""
    with af.Graph(effects="unordered") as graph:
        v = af.Variable(0, name="v")
        fetches = [v.assign(v + 1).node, v.assign(v + 2), v]
    async with open_session(graph, seed=1) as session:
        fetched = await session.run(fetches, record=tmp_path / "run.json")
    for given in (None, graph):
        assert await af.replay(tmp_path / "run.json", given) == dict(
            zip(("v/assign", "v/assign_1:0", "@v"), fetched, strict=True)
        )


async def test_random_numbers_feeds_and_open_variables(open_session: OpenSession, tmp_path: Path) -> None:
    """Behaviour 71: random numbers equal the recorded run's, and a variable without a value has none."""
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


async def test_numbers_and_strings_are_fed_in_the_dtype_of_their_tensors(
    open_session: OpenSession, tmp_path: Path
) -> None:
    """Behaviour 71: Python's numbers, strings and lists are no arrays of NumPy's default dtypes."""
    with af.Graph() as graph:
        x, words = af.placeholder("float32", (None,), name="x"), af.placeholder("string", (), name="words")
        fetches = [x * 2, af.identity(words)]
    async with open_session(graph) as session:
        fetched = await session.run(fetches, {x: [1.5, 2], words: "a ü"}, record=tmp_path / "run.json")
    numbers, text = (await af.replay(tmp_path / "run.json")).values()
    assert np.asarray(numbers).dtype == np.float32
    assert text == "a ü"
    np.testing.assert_array_equal(np.asarray(numbers), fetched[0])


async def test_a_stopped_replay_stops_in_the_same_place(open_session: OpenSession, tmp_path: Path) -> None:
    """Behaviour 84: a cancelled run is written down, and done again as far as it came."""
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
    """A record has no result of a node that was under way when another node failed; in the replay it may have one."""
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


async def test_what_others_gave_is_in_the_record(
    open_session: OpenSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Behaviour 78: elements that were there before, that came while the run waited, and that went elsewhere."""
    queue = af.FIFOQueue(2, {"x": af.spec("float32", (None,)), "word": af.spec("string", ())}, name="work")
    with af.Graph() as graph:
        taken = [queue.dequeue() for _ in range(3)]
        size, put = queue.size(), queue.enqueue({"x": [0.5], "word": "mine"})
        fetches = [taken, [af.sum(each["x"]) for each in taken], size, put]
    path = tmp_path / "run.json"
    async with open_session(graph) as session:
        await queue.put({"x": [1.0], "word": "a"}, session=session)
        run = asyncio.create_task(session.run(fetches, record=path))
        await queue.put({"x": [1.0, 2.0], "word": "ü"}, session=session)
        await queue.put({"x": [], "word": ""}, session=session)
        fetched = await run
    assert "cannot be replayed" not in caplog.text
    again = list((await af.replay(path, graph)).values())
    assert again.pop() is None
    flat = [*(value for each in fetched[0] for value in (each["word"], each["x"])), *fetched[1], fetched[2]]
    assert sorted(map(repr, again)) == sorted(map(repr, flat))
    with pytest.raises(af.ReplayError, match=r"it uses FIFOQueue\('work'\), which has no text form"):
        await af.replay(path)


async def test_nodes_are_where_earlier_runs_had_put_their_variables(open_session: OpenSession, tmp_path: Path) -> None:
    """Behaviour 78: a device that has a variable in its memory keeps it, and a replay has no such earlier runs."""
    with af.Graph() as graph:
        totals = [af.Variable(np.ones(3), name=f"total_{k}") for k in range(8)]
        steps = [total.assign_add(1.0) for total in totals]
    path = tmp_path / "run.json"
    async with open_session(graph) as session:
        for step in reversed(steps):
            await session.run(step)
        fetched = await session.run(steps, record=path)
    again = (await af.replay(path, graph)).values()
    np.testing.assert_array_equal(list(again), fetched)


@pytest.mark.parametrize("shape", [(), (3,), (0, 2), (400, 350)], ids=str)
@pytest.mark.parametrize("kind", ["batch", "pool"])
async def test_what_shared_work_gave_is_in_the_record(
    open_session: OpenSession, tmp_path: Path, kind: str, shape: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """Behaviour 78: rows that a card computed, of any size, on the side where the run had them."""

    @af.batched(max_size=4)
    def squashed(x: Any, n: Any) -> Any:
        return af.tanh(x) + 0.5, n + 1

    with af.Graph() as graph:
        fed, n = af.placeholder("float64", (2, *shape), name="x"), af.constant(1)
        x = af.sum(fed, axis=0)  # a number, too, is on the card then
        if kind == "batch":
            y, n = squashed(x, n)
            z, n = squashed(af.exp(y), n)
        else:
            z, n = af.while_loop(lambda y, n: n < 3, lambda y, n: (af.tanh(y) + 0.5, n + 1), (x, n), pool=af.Pool(4))
        fetches = [af.exp(z), n + 0, af.sum(z)]
    path = tmp_path / "run.json"
    feeds = {fed: np.linspace(-2, 2, 2 * math.prod(shape)).reshape(2, *shape)}
    async with open_session(graph) as session:
        fetched = await session.run(fetches, feeds, record=path)
        await until(lambda: len(asyncio.all_tasks()) == 1)  # a pool compiles for later
    assert "cannot be replayed" not in caplog.text
    for _ in range(2):
        again = (await af.replay(path, graph)).values()
        for one, other in zip(fetched, again, strict=True):
            assert np.asarray(one).dtype == np.asarray(other).dtype
            assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


async def test_a_replay_of_what_the_record_lacks_is_refused_before_it_runs(
    open_session: OpenSession, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behaviour 112: a pool gives a store of which there are no copies."""
    monkeypatch.setattr(RowState, "content", lambda state: None)
    calls: list[int] = []

    @af.op(outputs=af.spec("int64", ()), pure=True)
    def look(x: Any) -> Any:
        calls.append(int(x))
        return x

    with af.Graph() as graph:
        store = af.RowStore("int64", ())
        _, found = af.while_loop(
            lambda i, store: i < 6,
            lambda i, store: (i + 1, store.append(af.expand_dims(i, axis=0))),
            (look(af.constant(0)), store),
            pool=af.Pool(4),
        )
    path = tmp_path / "run.json"
    async with open_session(graph) as session:
        assert list(await session.run(found.stack(), record=path)) == [0, 1, 2, 3, 4, 5]
        await until(lambda: len(asyncio.all_tasks()) == 1)
    assert "cannot be replayed: what while was given is not in the record" in caplog.text
    calls.clear()
    with pytest.raises(af.ReplayError, match=r"holds no values of a simulation .*\n  built at .*test_replay"):
        await af.replay(path, graph)
    assert not calls


@pytest.mark.parametrize("is_closed", [False, True])
async def test_a_caller_without_a_result_gets_none_again(
    open_session: OpenSession, tmp_path: Path, *, is_closed: bool
) -> None:
    """Behaviour 78: a timeout, and a queue that is closed with some left, whatever the queue would give now."""
    queue = af.FIFOQueue(4, af.spec("int64", ()), name="work")
    with af.Graph() as graph:
        total = af.sum(queue.dequeue_many(3))
    path = tmp_path / "run.json"
    async with open_session(graph) as session:
        await queue.put(1, session=session)
        if is_closed:
            queue.close_nowait(session=session)
        if is_closed:
            with pytest.raises(af.QueueClosedError):
                await session.run(total, record=path)
        else:
            await late(session, total, record=path)
    if is_closed:
        with pytest.raises(af.QueueClosedError, match="queue 'work' is closed; 1 element is left") as caught:
            await af.replay(path, graph)
        assert (caught.value.left, caught.value.node) == (1, "work/dequeue_many")
    else:
        assert await af.replay(path, graph) == {}


async def test_inputs_sections_and_tables_are_done_again(open_session: OpenSession, tmp_path: Path) -> None:
    """Behaviour 37: a loop over the rest of an input, with a section and a table in it."""

    async def numbers() -> AsyncIterator[int]:
        for number in range(9):
            yield number

    source = af.from_async_generator(numbers, af.spec("int64", ()), name="numbers")
    mutex, seen, met = af.Mutex(name="mutex"), af.Table(4, af.spec("int64", ()), name="seen"), af.Barrier(1, name="met")
    total = af.Variable(0, name="total")
    with af.Graph() as graph:
        first, met_one = source.next(), met.wait()

        def body(number: af.Tensor) -> None:
            with mutex:
                total.assign(total + number)
            seen.append(number)

        count = af.loop_over(source, body)
        rows = seen.gather([0, 1, 2, 3])
    path = tmp_path / "run.json"
    async with open_session(graph) as session:
        await session.run([first, met_one])
        fetched = await session.run([count, rows, total, met_one], record=path)
    for _ in range(2):
        again = await af.replay(path, graph)
        assert list(map(repr, again.values())) == list(map(repr, fetched))


async def test_a_saver_does_not_save_again(tmp_path: Path) -> None:
    saver, total = af.Saver(tmp_path / "steps", every_steps=1), af.Variable(0, name="total")
    with af.Graph() as graph:
        step = total.assign_add(1)
        saved = saver.maybe_save(step)
    async with af.Session(graph, restore=saver) as session:
        await session.run([step, saved], record=tmp_path / "run.json")
    before = sorted((tmp_path / "steps").iterdir())
    assert len(before) == 1
    assert set(await af.replay(tmp_path / "run.json", graph)) == {step.name, saved.name}
    assert sorted((tmp_path / "steps").iterdir()) == before


async def test_what_shared_a_batch_is_done_again(open_session: OpenSession, tmp_path: Path) -> None:
    """Behaviour 84: what a call gave that was computed for several runs is in the record."""
    weights = af.Variable(np.random.default_rng(0).normal(size=(64, 8)).astype("float32"), name="weights")
    score = af.batched(lambda row: af.exp(row @ weights), max_size=4)
    with af.Graph() as graph:
        x = af.placeholder("float32", (64,), name="x")
        y = af.sum(score(x))
    path = tmp_path / "run.json"
    rows = np.random.default_rng(1).normal(size=(5, 64)).astype("float32")
    async with open_session(graph) as session:
        recorded, *_ = await asyncio.gather(
            session.run(y, {x: rows[0]}, record=path), *(session.run(y, {x: row}) for row in rows[1:])
        )
    assert repr(list((await af.replay(path, graph)).values())) == repr([recorded])


async def test_a_replay_can_be_stopped(open_session: OpenSession, tmp_path: Path) -> None:
    """A task that waits for a replay can be cancelled as elsewhere: this is no other way that the run went."""
    started, is_again = asyncio.Event(), False

    @af.op(outputs=af.spec("int64", ()))
    async def slow(x: np.int64) -> np.int64:
        if is_again:
            started.set()
            await asyncio.Event().wait()
        return x

    with af.Graph() as graph:
        y = slow(af.constant(1))
    path = tmp_path / "run.json"
    async with open_session(graph) as session:
        await session.run(y, record=path)
    is_again = True
    again = asyncio.create_task(af.replay(path, graph, live=True))
    await asyncio.wait_for(started.wait(), PATIENCE_S)
    again.cancel()
    with pytest.raises(asyncio.CancelledError):
        await again


async def test_lines_match_the_program(tmp_path: Path) -> None:
    """Errors and warnings of a record's own graph name the user's line, and races are not reported again."""
    with af.Graph(effects="unordered") as graph:
        v = af.Variable(1, name="v")
        fetches = [v.assign_add(1), v.read(), af.constant([1, 2])[v.assign(5)]]
    path = tmp_path / "run.json"
    async with af.Session(graph) as session:
        with pytest.raises(af.KernelError) as first:
            await session.run(fetches, record=path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(af.KernelError) as again:
            await af.replay(path)
    assert str(again.value) == str(first.value)
    assert f"{__file__}:" in str(again.value)


async def test_another_graph_is_named(tmp_path: Path) -> None:
    with af.Graph() as graph:
        y = af.Variable(1, name="v") + 1
    with af.Graph() as other:
        af.constant(1)
    async with af.Session(graph) as session:
        await session.run(y, record=tmp_path / "run.json")
    with pytest.raises(af.ReplayError, match="was recorded with another graph: the one given has no 'add:0'"):
        await af.replay(tmp_path / "run.json", other)
    with pytest.raises(TypeError, match="replay takes a graph, or None"):
        await af.replay(tmp_path / "run.json", y)  # type: ignore[arg-type]


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
        {"answers": [[0, "card", ["1.0", [0]]]]},
        {"answers": [[0, "card", ["array(float64[2], 1.0, 2.0)", []]]]},
        {"answers": [[0, "card", ["array(float64[2], 1.0, 2.0)", [1]]]]},
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


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_an_error_after_the_end_does_not_come_before_it(
    open_session: OpenSession, tmp_path: Path, *, is_cancelled: bool
) -> None:
    """Behaviour 78: a function under way fails only when its run is ended; its replay ends as the run did."""
    reached = asyncio.Event()

    @af.op(outputs=af.spec("int64", ()))
    async def late(x: np.int64) -> np.int64:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise ValueError("too late") from None
        return x

    @af.op(outputs=af.spec("int64", ()))
    async def quick(x: np.int64) -> np.int64:
        await asyncio.sleep(0)
        return x

    @af.op(outputs=af.spec("int64", ()))
    async def last(x: np.int64) -> np.int64:
        if not is_cancelled:
            raise ValueError("in time")
        reached.set()
        await asyncio.Event().wait()
        return x

    with af.Graph() as graph:
        fetches = [late(af.constant(1)), last(quick(af.constant(2)))]
    path = tmp_path / "run.json"
    async with open_session(graph) as session:
        run = asyncio.create_task(session.run(fetches, record=path))
        if is_cancelled:
            await reached.wait()
            run.cancel()
        with pytest.raises(asyncio.CancelledError if is_cancelled else af.KernelError):
            await run
    if is_cancelled:
        assert await af.replay(path, graph) == {}
    else:
        with pytest.raises(af.KernelError, match="in time"):
            await af.replay(path, graph)


async def test_a_run_that_was_stopped_at_its_very_end_gives_no_values(tmp_path: Path) -> None:
    """Behaviour 78: a deadline may pass when all firings have ended, and before the caller has the values."""
    path = tmp_path / "run.json"
    with af.Graph() as graph:
        y = af.tanh(af.constant([1.0, 2.0]))
    async with af.Session(graph) as session:
        await session.run(y, record=path)
    found = json.loads(path.read_text())
    path.write_text(json.dumps({**found, "status": "DeadlineExceeded: too late", "checksums": []}))
    assert await af.replay(path, graph) == {}


async def test_a_run_that_does_not_begin_has_no_record(tmp_path: Path) -> None:
    """Behaviour 78: a refused run leaves no record, and keeps its own error."""
    gate = asyncio.Event()

    @af.op(outputs=af.spec("float64", ()))
    async def wait(x: np.float64) -> np.float64:
        await gate.wait()
        return x

    path = tmp_path / "run.json"
    with af.Graph() as graph:
        x = af.placeholder("float64", (), name="x")
        y = wait(x)
    async with af.Session(graph, max_runs=1, max_queued=0) as session:
        first = asyncio.create_task(session.run(y, {x: 1.0}))
        await until(lambda: session.statistics().runs == 1)
        with pytest.raises(af.OverloadedError):
            await session.run(y, {x: 1.0}, record=path)
        gate.set()
        await first
        with pytest.raises(af.FeedError):
            await session.run(y, {x: ["a", "b"]}, record=path)
    assert not path.exists()


def _touched(kind: str, tool: Any) -> tuple[Any, Any]:
    """Return a function that touches a variable or table, and a write of another run."""
    if kind == "table":
        table = af.Table(3, af.spec("float64", ()), name="table")
        return lambda x: (table.append(x), af.sum(table.gather([0, 1, 2])), table.size()), lambda: table.append(0.25)
    v = af.Variable(2.0, name="v")
    touches: dict[str, Any] = {
        "read": lambda x: v.read() * x,
        "assign": lambda x: (v.assign_add(x), v.read()),
        "update": lambda x: v.update(lambda old, y: old * tool(y), x),
    }
    return touches[kind], lambda: v.assign_add(0.5)


@pytest.mark.parametrize("kind", ["read", "assign", "update", "table"])
@pytest.mark.parametrize("is_first", [False, True])
async def test_what_other_runs_wrote_is_in_the_record(
    open_session: OpenSession, tmp_path: Path, kind: str, *, is_first: bool
) -> None:
    """Behaviour 78: another run writes a variable or table before its first use, or between two."""
    written, reached, calls = asyncio.Event(), asyncio.Event(), 0

    @af.op(outputs=af.spec("float64", ()), stateful=True)
    async def wait(x: np.float64) -> np.float64:
        reached.set()
        await written.wait()
        return x

    def tool(x: Any) -> Any:
        nonlocal calls
        calls += 1
        return x + calls

    op = af.op(tool, outputs=af.spec("float64", ()), name="tool")  # type: ignore[call-overload]
    touch, write = _touched(kind, op)
    with af.Graph() as graph:
        x = af.placeholder("float64", (), name="x")
        before = [] if is_first else [touch(x)]
        with af.control_dependencies([wait(x)]):
            fetches = [*before, touch(x + 1.0), touch(x + 2.0)]
    with af.Graph():
        change = write()
    path = tmp_path / "run.json"
    async with open_session() as session:
        run = asyncio.create_task(session.run(fetches, {x: 1.5}, record=path))
        await reached.wait()
        await session.run(change)
        written.set()
        fetched = await run
    asked = calls
    again = await af.replay(path, graph)
    leaves = [leaf for each in fetched for leaf in (each if isinstance(each, tuple) else (each,))]
    assert [np.asarray(each).tobytes() for each in again.values()] == [np.asarray(each).tobytes() for each in leaves]
    assert calls == asked


@pytest.mark.parametrize("clears", [False, True])
async def test_stores_of_a_pool_are_replayed_where_they_were(
    open_session: OpenSession, tmp_path: Path, *, clears: bool
) -> None:
    """Behaviour 112: TensorArrays and RowStores, on a card too, with elements that were read or never written."""
    with af.Graph() as graph:
        x = af.placeholder("float32", (2,), name="x")
        written = af.TensorArray("float32", 5, element_shape=(2,), clear_after_read=clears)
        numbers = af.TensorArray("float32", 5, element_shape=(), clear_after_read=clears).unstack(
            np.arange(5, dtype=np.float32)
        )
        counts = af.TensorArray("int64", 5, element_shape=(), clear_after_read=clears).write(3, af.argmax(x))
        rows = af.RowStore("float32", (2,))

        def body(i: af.Tensor, y: af.Tensor, a: Any, b: Any, c: Any, s: Any) -> Any:
            y = y * b.read(i) - 1.5
            return i + 1, y, a.write(i, y), b, c.write(i, i * i + af.argmin(y)), s.append(af.stack([y, -y]))

        _, _, a, b, c, s = af.while_loop(
            lambda i, *_: i < 3, body, (0, af.exp(x), written, numbers, counts, rows), pool=af.Pool(4)
        )
        c, s = c.write(4, c.size()), s.append(af.exp(af.reshape(x, (1, 2))))
        fetches = [*(a.read(i) for i in range(4)), b.read(4), b.size(), c.stack(), s.stack(), s.take([3, 0]), s.size()]
    path = tmp_path / "run.json"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        async with open_session(graph) as session:
            fetched = await session.run(fetches, {x: np.array([-0.0, 2.5], np.float32)}, record=path)
    again = await af.replay(path, graph)
    for one, other in zip(fetched, again.values(), strict=True):
        assert np.asarray(one).dtype == np.asarray(other).dtype
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
