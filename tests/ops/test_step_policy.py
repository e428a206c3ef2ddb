"""Policies of users decide when steps of shared work begin, and how many members join them; times are virtual."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.runtime.executor.turn import Turn
from asyncflow.testing import virtual_clock
from tests.patience import PATIENCE_S
from tests.vertex.evaluation import slotted, slotted_alone

Make = Callable[[af.StepPolicy], "Shared"]


class Shared:
    """A program whose runs share steps under a policy, and the results of its runs."""

    x: af.Tensor

    def __init__(self, policy: af.StepPolicy) -> None:
        self.policy = policy
        with af.Graph() as self.graph:
            self.found = self.build()

    def build(self) -> af.Tensor:
        raise NotImplementedError

    def feeds(self, k: int) -> dict[af.Tensor, Any]:
        return {self.x: np.full(4, k, np.float64)}

    def is_right(self, k: int, found: Any) -> bool:
        return bool(np.allclose(found, self.expected(k)))

    def expected(self, k: int) -> Any:
        raise NotImplementedError

    async def run(self, session: af.Session, k: int, **options: Any) -> None:
        assert self.is_right(k, await session.run(self.found, self.feeds(k), **options))


class Batched(Shared):
    def build(self) -> af.Tensor:
        self.x = af.placeholder("float64", (4,))
        found = af.batched(lambda x: x * 2 + 1, policy=self.policy)(self.x)
        assert isinstance(found, af.Tensor)
        return found

    def expected(self, k: int) -> Any:
        return np.full(4, k * 2 + 1)


class Pooled(Shared):
    def build(self) -> af.Tensor:
        self.x = af.placeholder("float64", (4,))
        pool = af.Pool(8, policy=self.policy)
        return af.while_loop(lambda i, v: i < 30, lambda i, v: (i + 1, v + 1), (0, self.x), pool=pool)[1]

    def expected(self, k: int) -> Any:
        return np.full(4, k + 30)


class Vertices(Shared):
    def build(self) -> af.Tensor:
        self.structure, self.x = af.InputGraph.placeholder(), af.placeholder("float64", (None, 2))
        found = af.vertex_map(slotted, self.structure, self.x, initial=0.0, share=True, policy=self.policy).roots
        assert isinstance(found, af.Tensor)
        return found

    def feeds(self, k: int) -> dict[af.Tensor, Any]:
        return {**self.structure.feeds(TREE), self.x: np.full((3, 2), 0.1 * k)}

    def expected(self, k: int) -> Any:
        return slotted_alone(TREE, np.full((3, 2), 0.1 * k))[1]


TREE = af.InputGraph.from_parents([-1, 0, 0])
KINDS = pytest.mark.parametrize("kind", [Batched, Pooled, Vertices], ids=lambda kind: kind.__name__.lower())


def run(main: Callable[[], Any]) -> Any:
    with virtual_clock() as clock:
        return clock.run(main())


def four_or_2_ms(step: af.NextStep) -> int | af.WaitUntil:
    first_s = min(member.since_s for member in step.waiting)
    return 4 if len(step.waiting) >= 4 or step.now_s >= first_s + 0.002 else af.WaitUntil(first_s + 0.002)


@KINDS
def test_members_wait_for_as_many_or_as_long_as_the_policy_says(kind: type[Shared]) -> None:
    """Four together begin at once; the fifth begins after 2 ms."""
    joined: list[tuple[int, float]] = []

    def watched(step: af.NextStep) -> int | af.WaitUntil:
        found = four_or_2_ms(step)
        if isinstance(found, int):
            joined.append((min(found, len(step.waiting)), step.now_s - step.waiting[0].since_s))
        return found

    shared = kind(watched)

    async def main() -> None:
        async with af.Session(shared.graph) as session:
            await asyncio.gather(*(shared.run(session, k) for k in range(5)))

    run(main)
    assert [count for count, _ in joined] == [4, 1]
    assert joined[0][1] < 0.002 <= joined[1][1]


@KINDS
def test_a_policy_is_told_of_waiting_members_in_their_order(kind: type[Shared]) -> None:
    told: list[af.NextStep] = []

    def policy(step: af.NextStep) -> int | af.WaitUntil:
        told.append(step)
        return len(step.waiting) if len(step.waiting) == 3 else af.WaitUntil()

    shared = kind(policy)

    async def main() -> float:
        async with af.Session(shared.graph) as session:
            now_s = asyncio.get_running_loop().time()
            options: tuple[dict[str, Any], ...] = ({"priority": 2}, {"timeout": 50.0}, {"timeout": 0.5})
            await asyncio.gather(*(shared.run(session, k, **each) for k, each in enumerate(options)))
            return now_s

    run(main)
    last = told[-1]
    assert [member.priority for member in last.waiting] == [0, 0, 2]
    left_s = [member.deadline_s - last.now_s for member in last.waiting]
    assert left_s[0] < 1 < left_s[1] <= 50 < left_s[2]
    assert (last.joined, last.expected_s(3) >= 0) == (0, True)


@KINDS
def test_a_policy_that_fails_is_named_and_fails_its_members_alone(kind: type[Shared]) -> None:
    """Later runs, for which it does not fail, go on."""
    calls = 0

    def greedy(step: af.NextStep) -> int:
        nonlocal calls
        calls += 1
        return 1 // (calls > 1)

    shared = kind(greedy)

    async def main() -> af.KernelError:
        async with af.Session(shared.graph) as session:
            with pytest.raises(af.KernelError) as caught:
                await shared.run(session, 0)
            await shared.run(session, 1)
            return caught.value

    error = run(main)
    assert isinstance(error.__cause__, ZeroDivisionError)
    assert any("greedy" in note and "the policy of" in note for note in error.__cause__.__notes__)


@KINDS
@pytest.mark.parametrize("found", [-1, True, "all", None, 1.5])
def test_a_policy_that_returns_something_else_is_named(kind: type[Shared], found: Any) -> None:
    def odd(step: af.NextStep) -> Any:
        return found

    shared = kind(odd)

    async def main() -> str:
        async with af.Session(shared.graph) as session:
            with pytest.raises(af.KernelError) as caught:
                await shared.run(session, 0)
            return str(caught.value.__cause__)

    told = run(main)
    assert "odd, the policy of" in told
    assert f"returned {found!r}" in told


@KINDS
@pytest.mark.parametrize("until", [lambda now_s: now_s - 0.1, lambda now_s: np.nan, lambda now_s: "soon"])
def test_a_policy_that_waits_for_no_time_to_come_is_named(kind: type[Shared], until: Callable[[float], Any]) -> None:
    """It would be asked again and again at one time, or never."""
    asked = 0

    def early(step: af.NextStep) -> af.WaitUntil:
        nonlocal asked
        asked += 1
        assert asked < 1_000, "asked again and again at one time"
        return af.WaitUntil(until(step.now_s))

    shared = kind(early)

    async def main() -> Exception:
        async with af.Session(shared.graph) as session:
            with pytest.raises(af.KernelError) as caught:
                await shared.run(session, 0, timeout=1.0)
            assert isinstance(caught.value.__cause__, ValueError)
            return caught.value.__cause__

    told = str(run(main))
    assert "early, the policy of" in told
    assert "returned WaitUntil(time_s=" in told


@KINDS
def test_members_leave_while_the_policy_has_all_of_them_wait(kind: type[Shared]) -> None:
    """By a deadline or a cancellation; and a session that ends waits for no policy."""
    shared = kind(lambda step: af.WaitUntil())

    async def main() -> None:
        async with af.Session(shared.graph) as session:
            with pytest.raises(af.DeadlineExceeded):
                await shared.run(session, 0, timeout=0.25)
            task = asyncio.ensure_future(shared.run(session, 1))
            await asyncio.sleep(0.1)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await asyncio.sleep(0.1)
            assert session.statistics().runs == 0
            last = asyncio.ensure_future(shared.run(session, 2))
            await asyncio.sleep(0.1)
            assert not last.done()
        await last

    run(main)


@KINDS
def test_a_time_that_no_clock_shows_is_waited_for_all_the_same(kind: type[Shared]) -> None:
    """A sum of floats may lie between the nanoseconds of a clock, and just behind the one at which it is due."""
    asked = 0

    def late(step: af.NextStep) -> int | af.WaitUntil:
        nonlocal asked
        asked += 1
        assert asked < 1_000, "asked again and again at one time"
        until_s = step.waiting[0].since_s + 0.1 + 0.2
        return 1 if step.now_s >= until_s else af.WaitUntil(until_s)

    shared = kind(late)

    async def main() -> None:
        async with af.Session(shared.graph) as session:
            for k in range(10):
                await asyncio.sleep(0.013 * k + 1 / 3)
                await shared.run(session, k)

    run(main)


@KINDS
def test_members_come_and_leave_while_the_policy_counts_them(kind: type[Shared]) -> None:
    """Some are cancelled, some are late; the three that stay are stepped together."""
    told: list[tuple[int, int]] = []

    def threes(step: af.NextStep) -> int | af.WaitUntil:
        told.append((len(step.waiting), step.joined))
        return 3 if len(step.waiting) >= 3 else af.WaitUntil()

    shared = kind(threes)

    async def main() -> None:
        async with af.Session(shared.graph) as session:
            staying = []
            for k in range(3):
                staying.append(asyncio.ensure_future(shared.run(session, k)))
                await asyncio.sleep(0.1)
                if k < 1:
                    with pytest.raises(af.DeadlineExceeded):
                        await shared.run(session, k, timeout=0.1)
                    leaving = asyncio.ensure_future(shared.run(session, k))
                    await asyncio.sleep(0.1)
                    leaving.cancel()
                    await asyncio.gather(leaving, return_exceptions=True)
            await asyncio.gather(*staying)

    run(main)
    assert told.count((3, 0)) == 1
    assert max(told) == (3, 0)


@KINDS
@pytest.mark.parametrize("is_late", [False, True], ids=["cancelled", "late"])
def test_a_policy_is_asked_when_a_member_leaves(kind: type[Shared], *, is_late: bool) -> None:
    """No other member comes, and no time is waited for."""
    told: list[int] = []

    def once_one_has_left(step: af.NextStep) -> int | af.WaitUntil:
        told.append(len(step.waiting))
        return 1 if len(step.waiting) < max(told) else af.WaitUntil()

    shared = kind(once_one_has_left)

    async def main() -> None:
        async with af.Session(shared.graph) as session:
            options = {"timeout": 0.5} if is_late else {}
            staying = asyncio.ensure_future(shared.run(session, 0))
            leaving = asyncio.ensure_future(shared.run(session, 1, **options))
            await asyncio.sleep(0.25)
            if not is_late:
                leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
            await asyncio.wait_for(staying, PATIENCE_S)

    run(main)
    assert set(told) == {1, 2}


@KINDS
def test_a_policy_is_asked_once_the_session_is_idle(kind: type[Shared], monkeypatch: pytest.MonkeyPatch) -> None:
    """No member comes, and no time is waited for."""
    told: list[bool] = []
    turns: list[Turn] = []
    begin = Turn.__init__

    def begun(turn: Turn, loop: asyncio.AbstractEventLoop) -> None:
        begin(turn, loop)
        turns.append(turn)

    class Busy:
        """Work that has something to do until the policy is asked meanwhile."""

        is_queued = False

        def drive(self, deadline_ns: int, /) -> bool:
            return all(told)

    def when_idle(step: af.NextStep) -> int | af.WaitUntil:
        told.append(step.is_idle)
        return 1 if not all(told) and step.is_idle else af.WaitUntil()

    monkeypatch.setattr(Turn, "__init__", begun)
    shared = kind(when_idle)

    async def main() -> None:
        async with af.Session(shared.graph) as session:
            staying, leaving = (asyncio.ensure_future(shared.run(session, k)) for k in range(2))
            await asyncio.sleep(0.25)
            turns[0].enqueue(Busy())
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
            await asyncio.wait_for(staying, PATIENCE_S)

    run(main)
    assert told[-1]


def test_empty_graphs_let_in_by_one_keep_no_others_waiting() -> None:
    """A policy is asked again after each step, also after one in which all members have ended at once."""
    is_full = False

    def one_of_three(step: af.NextStep) -> int | af.WaitUntil:
        nonlocal is_full
        is_full = is_full or len(step.waiting) == 3
        return 1 if is_full else af.WaitUntil()

    class Empty(Vertices):
        def feeds(self, k: int) -> dict[af.Tensor, Any]:
            return {**self.structure.feeds(af.InputGraph.from_parents([])), self.x: np.empty((0, 2))}

        def expected(self, k: int) -> Any:
            return np.empty((0, 3))

    shared = Empty(one_of_three)

    async def main() -> None:
        async with af.Session(shared.graph) as session:
            await asyncio.gather(*(shared.run(session, k, timeout=1.0) for k in range(3)))

    run(main)


class Rule:
    """A policy that is an object: members join in pairs."""

    def __init__(self) -> None:
        self.joined = 0

    def __call__(self, step: af.NextStep) -> int | af.WaitUntil:
        if len(step.waiting) < 2:
            return af.WaitUntil()
        self.joined += 2
        return 2

    def method(self, step: af.NextStep) -> int | af.WaitUntil:
        return self(step)


@af.vertex_function(state=af.spec("float64", (2,)))
def summed(v: af.Vertex) -> None:
    """Any number of children."""
    v.scatter(v.pull() + v.gather_all())


@af.vertex_function(state=af.spec("float64", (2,)), children=2)
def pushing(v: af.Vertex) -> None:
    state = v.pull() + v.gather(0) + v.gather(1)
    v.scatter(state)
    v.push(state * 2, "twice")


def mapped(function: af.VertexFunction, structure: af.InputGraph, x: af.Tensor, **options: Any) -> af.Tensor:
    found = af.vertex_map(function, structure, x, initial=0.0, share=True, **options)
    state = found.pushes["twice"][0] / 2 if found.pushes else found.roots[0]
    assert isinstance(state, af.Tensor)
    return state


def in_branch(function: af.VertexFunction, structure: af.InputGraph, x: af.Tensor, **options: Any) -> af.Tensor:
    found: af.Tensor = af.cond(x[0, 0] > -1.0, lambda: mapped(function, structure, x, **options), lambda: x[0])
    return found


def in_loop(function: af.VertexFunction, structure: af.InputGraph, x: af.Tensor, **options: Any) -> af.Tensor:
    """Each iteration waits for the one before, and computes the same."""
    return af.while_loop(
        lambda i, y: i < 2,
        lambda i, y: (i + 1, mapped(function, structure, x + y * 0.0, **options)),
        (0, af.zeros((2,), dtype="float64")),
    )[1]


def of_a_variable(function: af.VertexFunction, structure: af.InputGraph, x: af.Tensor, **options: Any) -> af.Tensor:
    """Each version of the variable has a copy of the code."""
    one = af.Variable(np.ones(()), name="one")

    @af.vertex_function(state=af.spec("float64", (2,)), children=2)
    def scaled(v: af.Vertex) -> None:
        v.scatter(v.pull() * one + v.gather(0) + v.gather(1))

    return mapped(scaled, structure, x, **options)


def of_data(function: af.VertexFunction, structure: af.InputGraph, x: af.Tensor, **options: Any) -> af.Tensor:
    return mapped(function, TREE, x, **options)


FORMS: dict[str, tuple[Callable[..., af.Tensor], af.VertexFunction, dict[str, Any]]] = {
    "any number of children": (mapped, summed, {}),
    "rows of all vertices": (mapped, pushing, {}),
    "in one part": (mapped, pushing, {"lift_parts": False}),
    "in a branch": (in_branch, summed, {}),
    "in a loop": (in_loop, summed, {}),
    "of a variable": (of_a_variable, summed, {}),
    "of data": (of_data, summed, {}),
}


@pytest.mark.parametrize("policy_of", [lambda rule: rule, lambda rule: rule.method], ids=["object", "method"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_shared_map_asks_its_policy(form: str, policy_of: Callable[[Rule], af.StepPolicy]) -> None:
    """Two runs together are right, and one alone never begins."""
    build, function, options = FORMS[form]
    rule = Rule()
    with af.Graph() as graph:
        structure, x = af.InputGraph.placeholder(), af.placeholder("float64", (None, 2))
        found = build(function, structure, x, policy=policy_of(rule), **options)

    async def main() -> None:
        async with af.Session(graph) as session:

            async def one(k: int, **options: Any) -> None:
                feeds = {x: np.full((3, 2), 0.5 * k)}
                feeds |= {} if form == "of data" else structure.feeds(TREE)
                values = await session.run(found, feeds, **options)
                assert values.tolist() == [1.5 * k] * 2

            with pytest.raises(af.DeadlineExceeded):
                await one(0, timeout=1.0)
            assert rule.joined == 0
            await asyncio.gather(one(1), one(2))

    run(main)
    assert rule.joined == (4 if form == "in a loop" else 2)


def test_a_policy_lets_few_of_many_rows_join() -> None:
    """No step of the pool has more than two, though there is room for eight."""
    largest = 0

    def two(step: af.NextStep) -> int:
        nonlocal largest
        largest = max(largest, step.joined)
        return max(0, 2 - step.joined)

    shared = Pooled(two)

    async def main() -> int:
        async with af.Session(shared.graph) as session:
            await asyncio.gather(*(shared.run(session, k) for k in range(9)))
            (pool,) = session.statistics().batches.values()
            return pool.largest

    assert run(main) == 2
    assert largest <= 2


def test_no_more_members_join_than_there_is_room_for() -> None:
    shared = Pooled(lambda step: 1_000)

    async def main() -> int:
        async with af.Session(shared.graph) as session:
            await asyncio.gather(*(shared.run(session, k) for k in range(20)))
            (pool,) = session.statistics().batches.values()
            return pool.largest

    assert run(main) == 8


def test_a_policy_is_a_function() -> None:
    with pytest.raises(af.GraphError, match=r"Batch: policy is a function of an af\.NextStep, or None; got 3"):
        af.Batch(policy=3)  # type: ignore[arg-type]
    with pytest.raises(af.GraphError, match="Pool: policy is a function"):
        af.Pool(policy="fifo")  # type: ignore[arg-type]
    with pytest.raises(af.GraphError, match="leave out max_delay_s= and cost="):
        af.Batch(max_delay_s=0.1, policy=four_or_2_ms)
    with af.Graph(), pytest.raises(af.GraphError, match="with share=True"):
        structure, x = af.InputGraph.placeholder(), af.placeholder("float64", (None, 2))
        af.vertex_map(slotted, structure, x, initial=0.0, policy=four_or_2_ms)
