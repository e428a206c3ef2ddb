"""`atomic=True`: what a run reads and writes of variables is one step for every other run of its session."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from functools import partial
from random import Random
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from tests.faults.kernels import INT, CoroutineGate, in_flight, until
from tests.patience import PATIENCE_S


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
    """Without `atomic`, another run sees one variable written and the other not; also a run without a scheduler."""
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


async def test_it_waits_for_runs_in_flight_and_others_queue_behind_it(program: Program) -> None:
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


async def test_a_cancelled_or_late_claim_holds_up_no_run(program: Program) -> None:
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


async def test_a_failed_claim_holds_up_no_run(program: Program) -> None:
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


class Nest:
    """Variables, and runs with a coroutine that asks for other runs."""

    def __init__(self, count: int = 2) -> None:
        self.variables = [af.Variable(0, name=f"v{k}") for k in range(count)]
        self.begun = 0
        """Number of runs that have come to their coroutine."""

    def reader(self, *which: int) -> Any:
        with af.Graph():
            return [self.variables[k].read() + 0 for k in which]

    def outer(self, which: Sequence[int], inside: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Reads variables, then awaits ``inside()``."""

        @af.op(outputs=INT)
        async def asks(*_: Any) -> Any:
            self.begun += 1
            await inside()
            return np.int64(0)

        with af.Graph():
            return asks(*(self.variables[k].read() for k in which), af.constant(0))


async def test_a_run_inside_another_does_not_see_half_of_an_atomic_one(program: Program) -> None:
    """That other touches nothing of it, and so goes on beside it."""
    nest, seen = Nest(), []
    async with af.Session() as session:

        async def look() -> None:
            seen.append(list(await session.run(program.read)))

        async with in_flight(program.run(session, 1, atomic=True), lambda: program.gate.started) as writing:
            looking = asyncio.create_task(session.run(nest.outer([], look)))
            await turns()
            assert not seen
            program.gate.opened.set()
            await asyncio.gather(writing, looking)
        assert seen == [[1, 1]]


async def test_a_run_inside_an_awaited_one_goes_before_the_atomic_run(program: Program) -> None:
    """Also where that wait leads over others: each waits for a claim behind which the other's run is."""
    nest, gate = Nest(2), asyncio.Event()
    ends: list[str] = []
    async with af.Session() as session, asyncio.timeout(PATIENCE_S):

        def inside(name: str, which: int) -> Callable[[], Coroutine[Any, Any, Any]]:
            async def ask() -> None:
                await gate.wait()
                await session.run(nest.reader(which))
                ends.append(name)

            return ask

        runs = [
            asyncio.create_task(session.run(nest.outer([0], inside("first", 1)))),
            asyncio.create_task(session.run(nest.outer([1], inside("second", 0)))),
        ]
        await until(lambda: nest.begun == 2)
        for which in (0, 1):
            fetch = nest.outer([which], partial(_note, ends, f"atomic {which}"))
            runs.append(asyncio.create_task(session.run(fetch, atomic=True)))
        await until(lambda: len(claims_of(session)) == 2)
        assert not ends
        gate.set()
        await asyncio.gather(*runs)
        assert sorted(ends) == ["atomic 0", "atomic 1", "first", "second"]
        assert ends.index("second") < ends.index("atomic 1")
        assert ends.index("first") < ends.index("atomic 0")


def claims_of(session: af.Session) -> Sequence[object]:
    return session._runs.in_flight.atomic.claims


def waiters_of(session: af.Session) -> Iterable[object]:
    return session._runs.in_flight.atomic._waiters


async def _note(ends: list[str], name: str) -> None:
    ends.append(name)


async def test_two_atomic_runs_that_need_each_others_variables_are_refused() -> None:
    """The second to ask is: it would wait for the first, which waits for it."""
    nest, started = Nest(2), []
    async with af.Session() as session, asyncio.timeout(PATIENCE_S):

        def inside(mine: int) -> Callable[[], Coroutine[Any, Any, Any]]:
            async def ask() -> None:
                started.append(mine)
                await until(lambda: len(started) == 2)
                await session.run(nest.reader(1 - mine))

            return ask

        runs = [session.run(nest.outer([k], inside(k)), atomic=True) for k in (0, 1)]
        results = await asyncio.gather(*runs, return_exceptions=True)
        refused = [result for result in results if isinstance(result, af.KernelError)]
        assert len(refused) == 1
        assert "would wait for each other for ever" in str(refused[0])
        assert list(await session.run(nest.reader(0, 1))) == [0, 0]


async def test_an_atomic_run_inside_another_claims_what_that_one_has_not() -> None:
    """The run waits for others, is one step for them, and is refused if it would wait for runs that wait for it."""
    nest, gate = Nest(3), asyncio.Event()
    order: list[str] = []
    async with af.Session() as session, asyncio.timeout(PATIENCE_S):

        async def claims() -> None:
            await session.run(nest.outer([0, 1], partial(hold, "inner")), atomic=True)

        async def hold(name: str) -> None:
            order.append(name)
            await gate.wait()

        async with in_flight(session.run(nest.outer([0], claims), atomic=True), lambda: order) as outer:
            others = [asyncio.create_task(session.run(nest.reader(k))) for k in (0, 1)]
            await session.run(nest.reader(2))
            await turns()
            assert not any(other.done() for other in others)
            gate.set()
            await asyncio.gather(outer, *others)
        gate.clear()

        async def asks() -> None:
            await gate.wait()
            await session.run(nest.reader(0))

        begun = nest.begun
        user = asyncio.create_task(session.run(nest.outer([1], asks)))
        await until(lambda: nest.begun > begun)

        async def claims_too_late() -> None:
            gate.set()
            await until(lambda: waiters_of(session))  # for what this one is part of
            await session.run(nest.reader(1), atomic=True)

        with pytest.raises(af.KernelError, match="would wait for each other for ever"):
            await session.run(nest.outer([0], claims_too_late), atomic=True)
        await user


async def test_what_went_before_an_atomic_run_is_waited_for_by_it() -> None:
    """Also when the run that asked for it has ended."""
    nest, gate = Nest(1), asyncio.Event()
    order: list[str] = []
    async with af.Session() as session, asyncio.timeout(PATIENCE_S):

        async def leaves_one_behind() -> None:
            await until(lambda: claims_of(session))
            inside = session.run(nest.outer([0], partial(hold, "inside")))
            left.append(asyncio.create_task(inside))
            await until(lambda: order)

        async def hold(name: str) -> None:
            order.append(name)
            await gate.wait()

        left: list[asyncio.Task[Any]] = []
        outer = asyncio.create_task(session.run(nest.outer([0], leaves_one_behind)))
        await until(lambda: nest.begun)
        atomic = asyncio.create_task(session.run(nest.outer([0], partial(hold, "atomic")), atomic=True))
        await outer
        await turns()
        assert order == ["inside"]
        gate.set()
        await asyncio.gather(atomic, *left)
        assert order == ["inside", "atomic"]


@pytest.mark.parametrize("is_atomic", [True, False], ids=["one inside an atomic run", "an atomic run inside one"])
async def test_a_waiting_run_goes_before_a_claim_when_it_closes_a_circle_later(is_atomic: bool) -> None:
    """A waits inside, for an atomic run that waits for B; then B needs what A, or the run around A, has."""
    nest, gate = Nest(2), asyncio.Event()
    async with af.Session() as session, asyncio.timeout(PATIENCE_S):

        async def ask(*which: int, **options: Any) -> None:
            await session.run(nest.reader(*which), **options)

        async def later(*which: int, **options: Any) -> None:
            await gate.wait()
            await ask(*which, **options)

        b = asyncio.create_task(session.run(nest.outer([0], partial(later, 1, atomic=not is_atomic))))
        await until(lambda: nest.begun)
        waiting = asyncio.create_task(ask(0, atomic=True))
        await until(lambda: claims_of(session))
        a = asyncio.create_task(session.run(nest.outer([1], partial(ask, 0)), atomic=is_atomic))
        await until(lambda: waiters_of(session))
        gate.set()
        await asyncio.gather(a, b, waiting)


@pytest.mark.parametrize("seed", range(6))
async def test_random_nests_see_whole_steps(seed: int) -> None:
    """Atomic runs write a pair in two runs inside them; whoever reads both, inside anything, sees them equal.

    Those inside ask for later pairs alone, so no two wait for each other, and none is refused.
    """
    random = Random(seed)
    nest = Nest(6)
    pairs = [nest.reader(2 * pair, 2 * pair + 1) for pair in range(3)]
    with af.Graph():
        x = af.placeholder("int64", ())
        writes = [variable.assign(x) for variable in nest.variables]
    async with af.Session() as session, asyncio.timeout(PATIENCE_S):

        async def look(pair: int) -> None:
            a, b = await session.run(pairs[pair])
            assert a == b

        async def further(pair: int) -> None:
            await turns(random.randrange(4))
            if pair < 2:
                await random.choice([look, write, visit])(random.randrange(pair + 1, 3))

        async def write(pair: int) -> None:
            number = np.int64(random.randrange(100))

            async def inside() -> None:
                await session.run(writes[2 * pair], {x: number})
                await further(pair)
                await session.run(writes[2 * pair + 1], {x: number})

            await session.run(nest.outer([2 * pair, 2 * pair + 1], inside), atomic=True)

        async def visit(pair: int) -> None:
            touched = [2 * pair] if random.random() < 0.3 else []

            async def inside() -> None:
                await further(pair)
                await look(pair)

            await session.run(nest.outer(touched, inside))

        async def begin() -> None:
            await turns(random.randrange(6))
            await random.choice([look, write, visit])(random.randrange(3))

        await asyncio.gather(*(begin() for _ in range(16)))


@pytest.mark.parametrize("seed", range(8))
async def test_random_nests_end(seed: int) -> None:
    """Whatever waits for whatever: each run ends, or is refused; and nothing is claimed any more."""
    random = Random(seed)
    nest = Nest(3)
    async with af.Session() as session, asyncio.timeout(PATIENCE_S):

        async def ask(depth: int) -> None:
            await turns(random.randrange(5))
            touched = random.sample(range(3), random.randrange(3))

            async def inside() -> None:
                for _ in range(random.randrange(3) if depth < 2 else 0):
                    await ask(depth + 1)

            await session.run(nest.outer(touched, inside), atomic=random.random() < 0.5)

        results = await asyncio.gather(*(ask(0) for _ in range(10)), return_exceptions=True)
        refused = [result for result in results if result is not None]
        assert all("wait for" in str(error) for error in refused)
        assert not claims_of(session)
        assert not waiters_of(session)
