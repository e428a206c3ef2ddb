"""Inputs in runs: the elements that each run gets, positions, and the rest after sessions."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import asyncflow as af
from tests.faults.kernels import until

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from asyncflow.inputs.input import InputState

    Runner = Callable[..., Awaitable[Any]]


@pytest.fixture
def lines(tmp_path: Path) -> af.Input:
    path = tmp_path / "lines"
    path.write_text("\n".join(map(str, range(20))))
    return af.read_lines(path)


async def test_takes_in_the_order_written_and_each_element_once(graph: af.Graph, lines: af.Input, run: Runner) -> None:
    pair = [lines.next(), lines.next()]
    assert await run(pair) == ["0", "1"]
    found = await asyncio.gather(*(run(pair[0]) for _ in range(18)))
    assert sorted(map(int, found)) == [*range(2, 20)]
    assert not await run(lines.has_more())
    with pytest.raises(af.EndOfInput, match=r"(?s)'lines' has no more elements\n.*built at .*test_input.py"):
        await run(pair[0])


async def test_conformance_36_elements_of_a_loop_are_in_order(graph: af.Graph, lines: af.Input, run: Runner) -> None:
    """Effects run in program order in the iterations of a loop, in the predicate and in the body."""
    table = af.Table(20, af.spec("int64", ()))

    def body(i: af.Tensor) -> af.Tensor:
        table.append(af.astype(lines.next() == af.astype(i, "string"), "int64"))
        return i + 1

    (count,) = af.while_loop(lambda i: lines.has_more(), body, (0,))
    assert await run(count) == 20
    assert (await run(table.gather(np.arange(20)))).all()


async def test_each_session_reads_for_itself(graph: af.Graph, lines: af.Input) -> None:
    element, other = lines.next(), lines.batch(3).next()
    async with af.Session(graph) as one, af.Session(graph) as two:
        assert [await one.run(element), await one.run(element), await two.run(element)] == ["0", "1", "0"]
        assert (await two.run(other)).tolist() == ["0", "1", "2"]


async def test_elements_are_batched_padded_and_repeated(graph: af.Graph, tmp_path: Path, run: Runner) -> None:
    path = tmp_path / "records"
    path.write_bytes(b"".join(n.to_bytes(8, "little") + bytes([n] * n) for n in (1, 3, 2)))
    rows, lengths = af.read_records(path).batch(2, pad=0).repeat(2).next()
    assert (str(rows.spec), str(lengths.spec)) == ("uint8[?,?]", "int64[?]")
    found = [await run((rows, lengths)) for _ in range(4)]
    assert [each[0].tolist() for each in found[:2]] == [[[1, 0, 0], [3, 3, 3]], [[2, 2]]]
    assert [each[1].tolist() for each in found] == [[1, 3], [2]] * 2


async def test_fault_18_a_run_that_is_cancelled_takes_nothing(graph: af.Graph) -> None:
    """F18: at every step of a run that waits for an element; the next run gets it."""
    gate = asyncio.Event()

    async def numbers() -> Any:
        await gate.wait()
        for number in range(3):
            yield number

    element = af.from_async_generator(numbers, af.spec("int64", ())).next()
    async with af.Session(graph) as session:
        for steps in range(8):
            waiting = asyncio.ensure_future(session.run(element))
            for _ in range(steps):
                await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        with pytest.raises(af.DeadlineExceeded):
            await session.run(element, timeout=0.0)
        gate.set()
        assert [await session.run(element) for _ in range(3)] == [0, 1, 2]


async def test_closing_a_session_leaves_nothing_open(graph: af.Graph, lines: af.Input) -> None:
    """Threads that are left a fixture finds, and a file that is left open is a warning, which fails the test."""
    closed = []

    async def forever() -> Any:
        try:
            while True:
                yield 1
                await asyncio.sleep(0)
        finally:
            closed.append(True)

    number = af.from_async_generator(forever, af.spec("int64", ())).next()
    element = lines.repeat().next()
    async with af.Session(graph) as session:
        assert await session.run((number, element)) == (1, "0")
        assert any(thread.name.startswith("asyncflow reads lines") for thread in threading.enumerate())
    assert closed == [True]
    assert not [each for each in asyncio.all_tasks() if each is not asyncio.current_task()]


async def test_a_run_that_fails_leaves_its_input_usable(graph: af.Graph, lines: af.Input, run: Runner) -> None:
    element, i = lines.next(), af.placeholder("int64", ())
    with af.control_dependencies([element]):
        broken = af.constant([1, 2])[i]
    with pytest.raises(af.KernelError):
        await run(broken, {i: 5})
    assert await run(element) == "1", "the run that failed had taken one"


# -- positions -------------------------------------------------------------------------------------------------------


async def taken(state: InputState, most: int = 100) -> list[list[str]]:
    """Return the next batches, at most `most`."""
    found: list[list[str]] = []
    while len(found) < most and await state.has_more():
        found.append((await state.next())[0].tolist())
    return found


async def test_a_position_goes_on_where_it_was_captured(lines: af.Input) -> None:
    """The elements are a function of the position, also behind a shuffle and a repeat."""
    given = lines.shuffle(7, seed=3).repeat(2).batch(3)
    whole = await taken(given.create_state())
    assert len(whole) == 14
    for position in (0, 1, 6, 13, 14):
        state, other = given.create_state(), given.create_state()
        before = await taken(state, position)
        capture = state.capture()
        await taken(state, 2)
        state.restore(capture)
        assert [*before, *await taken(state)] == whole
        other.restore(capture)
        assert await taken(other) == whole[position:]
        assert other.position == len(whole)


@pytest.mark.parametrize(
    "arrays", [{}, {"position": np.array(-1)}, {"position": np.array([1])}, {"position": np.array(1), "x": np.array(1)}]
)
async def test_a_position_that_is_none_is_refused(lines: af.Input, arrays: dict[str, Any]) -> None:
    state = lines.create_state()
    assert (await state.next()) == ("0",)
    with pytest.raises(af.CheckpointError, match="input 'lines' has a position"):
        state.restore(arrays)
    assert (await state.next()) == ("1",)
    await state.aclose()


async def _nothing() -> Any:
    return
    yield


def test_describes_its_elements_and_refuses_impossible_ones(graph: af.Graph, lines: af.Input) -> None:
    assert str(lines.spec) == "string[]" and lines.batch(4, drop_remainder=True).spec == af.spec("string", (4,))
    with pytest.raises(af.GraphError, match="padding needs"):
        af.from_async_generator(_nothing, af.spec("int64")).batch(2, pad=0)
    with pytest.raises(af.GraphError, match=r"input_next\) changes Input\('lines'\), once for each row"):
        af.vmap(lambda x: (lines.next(), x))(af.constant([1, 2]))


async def test_an_element_that_is_there_needs_no_task(tmp_path: Path) -> None:
    """Only a firing that has to wait is a task; and later firings do not overtake it."""
    (tmp_path / "lines").write_text("".join(f"{k}\n" for k in range(9)))
    lines = af.read_lines(tmp_path / "lines", prefetch=9, name="lines")
    with af.Graph() as graph:
        line, more = lines.next(), lines.has_more()
    tasks: list[asyncio.Task[Any]] = []

    def note(loop: Any, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        tasks.append(asyncio.Task(coroutine, loop=loop, **options))
        return tasks[-1]

    async with af.Session(graph) as session:
        assert await session.run(line) == "0"
        reading = session.state.lookup(lines).reading
        await until(lambda: len(reading._ready) == 8)
        loop = asyncio.get_running_loop()
        loop.set_task_factory(note)
        try:
            assert [str(await session.run(line)) for _ in range(8)] == [str(k) for k in range(1, 9)]
            assert not tasks
            assert not await session.run(more)
            assert len(tasks) == 1
        finally:
            loop.set_task_factory(None)
        assert session.state.lookup(lines).position == 9
