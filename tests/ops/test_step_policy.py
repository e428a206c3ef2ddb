"""Policies of users decide when steps of shared work begin, and how many members join them; times are virtual."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.testing import virtual_clock
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
