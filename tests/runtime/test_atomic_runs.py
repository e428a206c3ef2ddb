"""`atomic=True`: what a run reads and writes of variables is one step for every other run of its session."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from tests.faults.kernels import INT, CoroutineGate, in_flight


class Program:
    """Two variables that are meant to be equal, written one after the other with a wait in between."""

    def __init__(self, *, container: str | None = None) -> None:
        self.gate = CoroutineGate()
        self.a = af.Variable(0, name="a", container=container)
        self.b = af.Variable(0, name="b", container=container)
        self.other = af.Variable(7, name="other")
        with af.Graph():
            self.x = af.placeholder("int64", ())
            first = self.a.assign(self.x)
            with af.control_dependencies([first]):
                waited = self.gate.op(self.x)
            self.write = self.b.assign(waited)
            self.pair = [self.a.read() + 0, self.b.read() + 0]
            self.unrelated = self.other.read() + 0
        with af.Graph():
            self.read = [self.a.read(), self.b.read()]
            self.alone = self.other.read() + 1

    def run(self, session: af.Session, number: int, **options: Any) -> Any:
        return session.run(self.write, {self.x: np.int64(number)}, **options)


@pytest.fixture
def program() -> Program:
    return Program()


@pytest.fixture(autouse=True)
def _containers() -> Iterator[None]:
    yield
    af.reset_container("atomic")


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("debug", [False, True])
async def test_a_run_that_writes_several_variables_is_one_step(program: Program, debug: bool) -> None:
    """Without it, another run sees the one written and the other not; also one that needs no scheduler."""
    async with af.Session(debug=debug) as session:
        await session.run(program.read)
        async with in_flight(program.run(session, 1), lambda: program.gate.started) as writing:
            assert list(await session.run(program.read)) == [1, 0]
            program.gate.opened.set()
            await writing
        program.gate.opened.clear()
        program.gate.started.clear()
        async with in_flight(program.run(session, 2, atomic=True), lambda: program.gate.started) as writing:
            reading = asyncio.create_task(session.run(program.read))
            await turns()
            assert not reading.done()
            assert await session.run(program.alone) == 8  # touches neither
            program.gate.opened.set()
            await writing
            assert list(await reading) == [2, 2]
        assert list(await session.run(program.read)) == [2, 2]


async def test_it_waits_for_those_in_flight_and_others_queue_behind_it(program: Program) -> None:
    async with af.Session() as session:
        prepared = session.prepare(program.write, [program.x])
        async with in_flight(program.run(session, 1), lambda: program.gate.started) as first:
            second = asyncio.create_task(prepared(2, atomic=True))
            third = asyncio.create_task(program.run(session, 3, atomic=True))
            await turns()
            reading = asyncio.create_task(session.run(program.read))
            await turns()
            assert program.gate.started == [1]
            assert not reading.done()
            program.gate.opened.set()
            await asyncio.gather(first, second, third)
            assert program.gate.started == [1, 2, 3]
            assert len(set(await reading)) == 1


async def test_one_that_is_cancelled_or_late_holds_up_nobody(program: Program) -> None:
    async with af.Session() as session:
        async with in_flight(program.run(session, 1), lambda: program.gate.started) as first:
            waiting = asyncio.create_task(program.run(session, 2, atomic=True))
            await turns()
            waiting.cancel()
            await asyncio.wait([waiting])
            with pytest.raises(af.DeadlineExceeded, match=r"did not end within timeout=0.001 s; it did not start"):
                await program.run(session, 3, atomic=True, timeout=0.001)
            assert list(await session.run(program.read)) == [1, 0]
            program.gate.opened.set()
            await first
        assert program.gate.started == [1]


async def test_one_that_fails_holds_up_nobody(program: Program) -> None:
    with program.read[0].graph:
        wrong = af.constant([1])[program.a.read() + 9]
    async with af.Session() as session:
        with pytest.raises(af.KernelError):
            await session.run(wrong, atomic=True)
        assert list(await session.run(program.read)) == [0, 0]


async def test_runs_inside_it_are_part_of_it() -> None:
    program = Program()
    program.gate.opened.set()
    async with af.Session() as session:

        @af.op(outputs=INT)
        async def inside(x: Any) -> Any:
            return (await session.run(program.read))[0]

        @af.op(outputs=INT)
        async def inside_alone(x: Any) -> Any:
            return (await session.run(program.read, atomic=True))[0]

        with af.Graph():
            fine = inside(program.a.assign_add(1))
            wrong = inside_alone(program.a.assign_add(1))
        assert await session.run(fine, atomic=True) == 1
        with pytest.raises(af.KernelError, match="this one would wait for the run it is part of"):
            await session.run(wrong)


async def test_a_function_may_be_one_step() -> None:
    a, b, gate = af.Variable(0), af.Variable(0), CoroutineGate()

    @af.function(atomic=True)
    def write(x: Any) -> Any:
        first = a.assign(x)
        with af.control_dependencies([first]):
            return b.assign(gate.op(x))

    @af.function
    def read() -> Any:
        return a.read(), b.read()

    async with af.Session():
        async with in_flight(write(np.int64(3)), lambda: gate.started) as writing:
            reading = asyncio.ensure_future(read())
            await turns()
            gate.opened.set()
            assert await writing == 3
            assert await reading == (3, 3)


async def test_many_at_once_lose_nothing(program: Program) -> None:
    """Moving amounts from one to the other never shows a wrong sum."""
    with af.Graph():
        x = af.placeholder("int64", ())
        move = [program.a.assign_sub(x), program.b.assign_add(x)]
        total = program.a.read() + program.b.read()
    async with af.Session(debug=True) as session:
        moves = [session.run(move, {x: np.int64(k)}, atomic=True) for k in range(10)]
        sums = [session.run(total) for _ in range(10)]
        ends = await asyncio.gather(*(run for both in zip(moves, sums, strict=True) for run in both))
        assert [end for end in ends if not isinstance(end, list)] == [0] * 10
        assert list(await session.run(program.read)) == [-45, 45]
