"""Functions with limits in random schedules: nothing is lost, no call overtakes another, and no limit is passed."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

import asyncflow as af
from asyncflow.runtime.executor.kernels.limited_calls import LimitStatistics
from asyncflow.streams.virtual import VirtualClockLoop
from tests.conftest import assert_baseline

END_S = 10_000.0
"""Of virtual time, after which every call must have ended."""


class Schedule:
    """Runs that call one function with limits, at moments that a seed draws; attempts fail, and runs are cancelled.

    Attributes:
        begun: the number of the run of each attempt, and when it began.
        results: for each run that gave one.
    """

    def __init__(self, seed: int) -> None:
        draw = self.random = random.Random(seed)
        self.seed = seed
        self.slots = draw.choice((None, 1, 2, 3))
        self.rate = draw.choice((None, (1, 0.5), (3, 2.0)))
        self.timeout = draw.choice((None, 1.0))
        self.retries = draw.choice((0, 1, 3) if self.slots or self.rate or self.timeout else (1, 3))
        self.begun: list[tuple[int, float]] = []
        self.running: Counter[int] = Counter()
        self.results: dict[int, float] = {}
        self.is_plain_sailing = draw.random() < 0.3

    def build(self) -> None:
        limits: dict[str, Any] = {"backoff": 0.2} if self.retries else {}

        @af.op(
            outputs=af.spec("float64", ()),
            timeout=self.timeout,
            retries=self.retries,
            max_concurrency=self.slots,
            rate=self.rate,
            **limits,
        )
        async def tool(x: Any) -> float:
            self.begun.append((int(x), asyncio.get_running_loop().time()))
            self.running[0] += 1
            assert self.slots is None or self.running[0] <= self.slots
            try:
                await asyncio.sleep(0.5 if self.is_plain_sailing else self.random.choice((0, 0.1, 0.5, 2.0)))
                if not self.is_plain_sailing and self.random.random() < 0.3:
                    raise ConnectionError("no answer")
                return float(x) * 2
            finally:
                self.running[0] -= 1

        with af.Graph() as graph:
            self.x = af.placeholder("float64", ())
            self.y = tool(self.x) + 0.0
        self.graph = graph

    async def run(self) -> LimitStatistics:
        self.build()
        options: dict[str, Any] = {"max_runs": self.random.choice((1, 2, 5))} if self.random.random() < 0.5 else {}
        async with af.Session(self.graph, devices=["cpu:0"], seed=self.seed, **options) as session:
            async with asyncio.timeout(END_S), asyncio.TaskGroup() as group:
                for number in range(self.random.randint(3, 12)):
                    task = group.create_task(self._run(session, number))
                    if not self.is_plain_sailing:
                        await asyncio.sleep(self.random.choice((0, 0, 0.1, 1.0)))
                        if self.random.random() < 0.2:
                            asyncio.get_running_loop().call_later(self.random.uniform(0, 3), task.cancel)
            assert_baseline(session)
            return session.statistics().limits.get("tool", LimitStatistics())

    async def _run(self, session: af.Session, number: int) -> None:
        is_plain = self.is_plain_sailing
        timeout = None if is_plain or self.random.random() < 0.7 else self.random.uniform(0.5, 5)
        try:
            self.results[number] = await session.run(
                self.y, {self.x: float(number)}, timeout=timeout, priority=0 if is_plain else self.random.randint(0, 2)
            )
        except (af.KernelError, af.DeadlineExceeded, af.OverloadedError):
            assert not is_plain

    def check(self, counts: LimitStatistics) -> None:
        assert counts.running == counts.waiting == counts.backing_off == counts.left_behind == self.running[0] == 0
        assert counts.attempts == len(self.begun) == counts.retries + len({number for number, _ in self.begun})
        assert self.results == {number: number * 2 for number in self.results}
        if self.rate is not None:
            count, seconds = self.rate
            times = [time for _, time in self.begun]
            assert all(b - a >= seconds - 1e-6 for a, b in zip(times, times[count:], strict=False))
        if self.is_plain_sailing:
            numbers = [number for number, _ in self.begun]
            assert len(self.results) == len(numbers)
            assert all(a < b for a, b in pairwise(numbers)), "in the order in which they came"


def schedules(seeds: range) -> int:
    attempts = 0
    for seed in seeds:
        schedule = Schedule(seed)
        try:
            with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
                counts = runner.run(schedule.run())
            schedule.check(counts)
        except BaseException as error:
            error.add_note(f"schedule {seed}: {vars(schedule)}")
            raise
        attempts += len(schedule.begun)
    return attempts


def test_no_schedule_loses_a_call_or_passes_a_limit() -> None:
    """Fault F18: slots and tokens come back whatever ends a call."""
    assert schedules(range(8)) > 40


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_no_schedule_of_hundreds_loses_a_call_or_passes_a_limit(part: int) -> None:
    """Fault F18."""
    assert schedules(range(100 + 60 * part, 160 + 60 * part)) > 200
