"""Plans of one firing that waits where others compute it: no scheduler, and the rules of runs all the same."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.runtime.executor import lone_firing
from asyncflow.runtime.executor.turn import Turn
from asyncflow.runtime.run.run import Run
from asyncflow.runtime.shared.batches import Batches
from asyncflow.runtime.shared.bodies import Bodies
from tests.others import others_end
from tests.patience import PATIENCE_S
from tests.runtime.test_waits import positive

SIZE = 3


def batched(x: af.Tensor) -> af.Tensor:
    found: af.Tensor = af.batched(positive)(x)
    return found


def pooled(x: af.Tensor) -> af.Tensor:
    found: af.Tensor = af.while_loop(lambda i, _: i < 2, lambda i, v: (i + 1, positive(v)), (0, x), pool=af.Pool(4))[1]
    return found


def shared(x: af.Tensor) -> af.Tensor:
    @af.vertex_function(state=af.spec("float64", (SIZE,)), children=1)
    def cell(v: Any) -> None:
        v.scatter(positive(v.pull()) + v.gather(0))

    found: af.Tensor = af.vertex_map(cell, af.InputGraph.chain([2]), x, initial=0.0, share=True).roots
    return found


@pytest.fixture
def lone(monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    """The runs that took no scheduler."""
    found: list[Run] = []
    start = lone_firing.LoneFiring.start

    def noted(self: lone_firing.LoneFiring, feeds: Any) -> None:
        assert isinstance(self.run, Run)
        found.append(self.run)
        start(self, feeds)

    monkeypatch.setattr(lone_firing.LoneFiring, "start", noted)
    return found


@pytest.fixture
def goes_on(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Hold back all computing until the event is set."""
    event, plan_of = asyncio.Event(), Bodies.plan_of

    async def waits(self: Bodies, *args: Any) -> Any:
        await event.wait()
        return await plan_of(self, *args)

    monkeypatch.setattr(Bodies, "plan_of", waits)
    return event


@pytest.fixture(params=[False, True], ids=["at once", "later"])
def later(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """True if the session never has time in the pass in which it is asked."""
    if request.param:
        monkeypatch.setattr(Turn, "has_time", lambda self: False)
    return bool(request.param)


programs = pytest.mark.parametrize("program", [batched, pooled, shared])
Program = Callable[[af.Tensor], af.Tensor]


def graph_of(program: Program) -> tuple[af.Graph, af.Tensor, af.Tensor]:
    with af.Graph() as graph:
        x = af.placeholder("float64", (2, SIZE) if program is shared else (SIZE,), name="x")
        y = program(x)
    return graph, x, y


def fed(program: Program, number: float) -> Any:
    return np.full((2, SIZE) if program is shared else SIZE, number)


def result(program: Program, number: float) -> float:
    return {"batched": number + 1, "pooled": number + 2, "shared": 2 * number + 2}[program.__name__]


async def until_in_line(runs: list[Run], count: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while sum(bool(run.executors[0].waiting()) for run in runs) < count:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0)


@programs
async def test_one_without_a_scheduler_gives_what_one_with_it_does(program: Program, lone: list[Run]) -> None:
    """A traced run has a scheduler, and shows its firings."""
    graph, x, y = graph_of(program)
    trace = af.Trace()
    async with af.Session(graph) as session:
        assert (await session.run(y, {x: fed(program, 3.0)}) == result(program, 3.0)).all()
        assert len(lone) == 1
        assert (await session.run(y, {x: fed(program, 4.0)}, trace=trace) == result(program, 4.0)).all()
        assert len(lone) == 1
        assert y.node.name in [firing.node for firing in trace.firings]


async def test_only_from_feeds_to_fetches(lone: list[Run]) -> None:
    """Feeds may be in any order, or not needed; whatever else is to be done takes a scheduler."""

    def less(u: af.Tensor, v: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
        return u - v, v

    with af.Graph() as graph:
        a, b, c = (af.placeholder("float64", (), name=name) for name in "abc")
        y, z = af.batched(less)(c, b)
        more = y + 1.0
    async with af.Session(graph) as session:
        assert await session.prepare(y, [b, a, c])(2.0, 9.0, 5.0) == 3.0
        assert await session.prepare([z, y], [a, c, b])(9.0, 5.0, 2.0) == [2.0, 3.0]
        assert len(lone) == 2
        assert await session.run(more, {b: 2.0, c: 5.0}) == 4.0
        assert await session.run([y, a], {a: 1.0, b: 2.0, c: 5.0}) == [3.0, 1.0]
        assert len(lone) == 2


@programs
async def test_a_failure_says_where(program: Program, lone: list[Run]) -> None:
    graph, x, y = graph_of(program)
    async with af.Session(graph) as session:
        asked = [session.run(y, {x: fed(program, number)}) for number in (1.0, -9.0, 2.0)]
        found: list[Any] = await asyncio.gather(*asked, return_exceptions=True)
        first, failed, last = found
        assert len(lone) == 3
        assert (first == result(program, 1.0)).all()
        assert (last == result(program, 2.0)).all()
        assert isinstance(failed, af.KernelError)
        assert isinstance(failed.__cause__, ValueError)
        assert f"{__file__}:" in str(failed)
        assert "a negative one" in str(failed)
        del failed, found
        await others_end()
        assert session.statistics().runs == 0


@pytest.mark.usefixtures("work")
@programs
async def test_cancelled_at_every_pass_it_leaves_the_others(program: Program, later: bool, lone: list[Run]) -> None:
    """Fault F18: before it stands in line, there, or when its result is there."""
    graph, x, y = graph_of(program)
    async with af.Session(graph) as session:
        fates = set()
        for passes in range(14):
            runs = [asyncio.ensure_future(session.run(y, {x: fed(program, float(k))})) for k in range(3)]
            for _ in range(passes):
                await asyncio.sleep(0)
            fates.add(runs[1].cancel())
            found: list[Any] = await asyncio.gather(*runs, return_exceptions=True)
            for number in (0, 2):
                assert (found[number] == result(program, float(number))).all()
            assert isinstance(found[1], asyncio.CancelledError) or (found[1] == result(program, 1.0)).all()
            await others_end()
            assert session.statistics().runs == 0
        assert fates == {True, False}
        assert len(lone) >= 3 * 13


@programs
async def test_a_deadline_names_the_awaited_resource(program: Program, goes_on: asyncio.Event, lone: list[Run]) -> None:
    graph, x, y = graph_of(program)
    async with af.Session(graph) as session:
        other, late = (asyncio.ensure_future(session.run(y, {x: fed(program, k)}, timeout=1e6)) for k in (1.0, 2.0))
        await until_in_line(lone, 2)
        lone[1]._expire(1e6)  # as the timer would
        with pytest.raises(af.DeadlineExceeded, match=r"while these waited:\n") as caught:
            await late
        node = y.node
        assert f"{node.name}: " in str(caught.value)
        assert f"built at {node.location}" in str(caught.value)
        assert session.statistics().runs == 1
        goes_on.set()
        assert (await other == result(program, 1.0)).all()


@programs
async def test_a_session_that_closes_ends_it(
    program: Program, later: bool, goes_on: asyncio.Event, lone: list[Run]
) -> None:
    graph, x, y = graph_of(program)
    session = af.Session(graph)
    async with session:
        run = asyncio.ensure_future(session.run(y, {x: fed(program, 1.0)}))
        await until_in_line(lone, 1)
        assert session.statistics().runs == 1
        await session.aclose(grace_s=0)
        with pytest.raises(af.SessionClosedError, match="while the run was in flight"):
            await run


async def test_a_run_that_is_stopped_before_it_stands_in_line(monkeypatch: pytest.MonkeyPatch, lone: list[Run]) -> None:
    """In the same pass, in which the session had no time for it: it never joins."""
    graph, x, y = graph_of(batched)
    joined: list[object] = []
    join = Batches.join

    def noted(self: Batches, *each: Any) -> None:
        joined.append(each)
        join(self, *each)

    monkeypatch.setattr(Batches, "join", noted)
    async with af.Session(graph) as session:
        await session.run(y, {x: fed(batched, 1.0)})
        with monkeypatch.context() as during:
            during.setattr(Turn, "has_time", lambda self: False)
            run = asyncio.ensure_future(session.run(y, {x: fed(batched, 1.0)}))
            await asyncio.sleep(0)
        lone[-1].close()
        with pytest.raises(af.SessionClosedError):
            await run
        assert (await session.run(y, {x: fed(batched, 2.0)}) == 3.0).all()
        assert (len(lone), len(joined)) == (3, 2)


async def test_an_interrupt_while_a_result_is_taken_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault F28: as itself, and later runs are right."""
    graph, x, y = graph_of(pooled)
    async with af.Session(graph) as session:

        def interrupted(*_: object) -> object:
            raise KeyboardInterrupt

        with monkeypatch.context() as during:
            during.setattr("asyncflow.state.waiting.lines.ToldPlace.take_outcome", interrupted)
            with pytest.raises(KeyboardInterrupt):
                await session.run(y, {x: fed(pooled, 1.0)})
        assert (await session.run(y, {x: fed(pooled, 2.0)}) == 4.0).all()
        assert session.statistics().runs == 0


@pytest.mark.parametrize("build", [batched, pooled])
async def test_what_draws_takes_no_scheduler_either(
    build: Callable[[af.Tensor], af.Tensor], lone: list[Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key of the draw is made of the run, so it draws the same numbers as beside other nodes."""
    monkeypatch.setitem(globals(), "positive", lambda x: x + af.random.normal((SIZE,), seed=3))
    with af.Graph(seed=1) as graph:
        x = af.placeholder("float64", (SIZE,))
        y = build(x)
        twice = y * 2.0
    found: list[list[Any]] = []
    for fetch in (y, twice):
        async with af.Session(graph) as session:
            found.append(await asyncio.gather(*(session.run(fetch, {x: np.ones(SIZE)}) for _ in range(4))))
    assert len(lone) == 4
    assert np.array_equal(2 * np.array(found[0]), found[1])
    assert len(np.unique(found[0])) == 4 * SIZE
