"""The progress of a simulated program, and what its loops say about the time left."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from asyncflow.cli.main import main
from asyncflow.cli.simulation import progress
from asyncflow.cli.simulation.progress import ProgramProgress, shown_progress
from asyncflow.runtime.watch.trace import RunSpan, Trace
from asyncflow.streams.virtual import VirtualClockLoop


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class WatchedProgram:
    """A program that makes a step each time it is told to, and its progress on a clock of the test's."""

    def __init__(self, stream: io.StringIO) -> None:
        self.now_s = 100.0
        self.trace = Trace()
        self.loop = VirtualClockLoop()
        machine: Any = SimpleNamespace(loop=self.loop, now_ns=lambda: 2_500_000)
        self.progress = ProgramProgress(self.trace, [machine], stream, lambda: self.now_s)
        self._go = asyncio.Event()

    async def step(self) -> None:
        self._go.clear()
        await self._go.wait()
        self.trace.runs.append(cast("RunSpan", object()))

    async def steps(self, count: int, seconds: float) -> None:
        for _ in range(count):
            self._go.set()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            self.now_s += seconds


async def two_loops(watched: WatchedProgram, epochs: Iterable[object]) -> None:
    async def epoch() -> None:
        for _, _ in enumerate([0] * 5):
            await watched.step()

    for _ in epochs:
        await epoch()


@pytest.mark.parametrize("epochs", [range(4), ["a", "b", "c", "d"], {1: 1, 2: 2, 3: 3, 4: 4}.items()])
def test_loops_around_a_run_tell_how_much_is_left(epochs: Iterable[object]) -> None:
    watched, told = WatchedProgram(io.StringIO()), []

    async def watch() -> None:
        program = asyncio.ensure_future(two_loops(watched, epochs))
        await asyncio.sleep(0)
        for _ in range(4):
            watched.progress.look()
            told.append(watched.progress.state())
            await watched.steps(5, 2.0)
        await program

    watched.loop.run_until_complete(watch())
    watched.loop.close()
    assert told == [
        "[........................]   0%  0 runs, 2.50 ms simulated in 0 s",
        "[######..................]  25%  5 runs, 2.50 ms simulated in 10 s, about 30 s left",
        "[############............]  50%  10 runs, 2.50 ms simulated in 20 s, about 20 s left",
        "[##################......]  75%  15 runs, 2.50 ms simulated in 30 s, about 10 s left",
    ]


def test_a_program_in_no_loop_of_known_length_has_no_estimate() -> None:
    watched = WatchedProgram(io.StringIO())

    async def watch() -> str:
        async def program() -> None:
            while True:
                await watched.step()

        running = asyncio.ensure_future(program())
        await asyncio.sleep(0)
        await watched.steps(1, 4000.0)
        watched.progress.look()
        state = watched.progress.state()
        running.cancel()
        return state

    assert watched.loop.run_until_complete(watch()) == "1 run, 2.50 ms simulated in 1:06:40 h"
    watched.loop.close()


def test_a_terminal_shows_one_line_that_changes_and_goes_away() -> None:
    terminal, lines = Terminal(), io.StringIO()
    for stream in (terminal, lines):
        watched = WatchedProgram(stream)
        watched.progress.show()
        watched.progress.clear()
        watched.loop.close()
    assert terminal.getvalue() == "\r\x1b[K0 runs, 2.50 ms simulated in 0 s\r\x1b[K"
    assert lines.getvalue() == "simulate: 0 runs, 2.50 ms simulated in 0 s\n"


def test_coroutines_are_read_where_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """On another thread they would change meanwhile."""
    readers: list[threading.Thread] = []
    iterators_of = progress._iterators_of

    def noted(coroutine: object) -> list[Iterator[object]]:
        readers.append(threading.current_thread())
        return iterators_of(coroutine)

    monkeypatch.setattr(progress, "_iterators_of", noted)
    monkeypatch.setattr(progress, "BAR_S", 0.0)
    watched, terminal = WatchedProgram(Terminal()), Terminal()

    async def program() -> None:
        for _ in range(1 << 20):
            await asyncio.sleep(0)
            if "%  " in terminal.getvalue():
                break

    with shown_progress(watched.trace, watched.progress._machines, terminal):
        watched.loop.run_until_complete(program())
    watched.loop.close()
    watched.progress.ask()  # a closed loop has nothing to say
    assert "%  " in terminal.getvalue()
    assert set(readers) == {threading.current_thread()}


def test_nothing_is_left_of_it_after_the_program() -> None:
    terminal = Terminal()
    with pytest.raises(ZeroDivisionError), shown_progress(Trace(), [], terminal):
        raise ZeroDivisionError
    assert terminal.getvalue() == "\r\x1b[K"


def test_standard_output_stays_clean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """However often the progress is shown."""
    monkeypatch.setattr("asyncflow.cli.simulation.progress.LINE_S", 0.0)
    program = tmp_path / "program.py"
    program.write_text(
        "import asyncflow as af\n"
        "async def main():\n"
        "    with af.Graph() as graph:\n"
        "        y = af.while_loop(lambda i: i < 2000, lambda i: (i + 1,), (af.constant(0),))[0]\n"
        "    async with af.Session(graph) as session:\n"
        "        for _ in range(3):\n"
        "            await session.run(y)\n"
    )
    assert main(["simulate", f"{program}:main", "--devices", "v100"]) == 0
    seen = capsys.readouterr()
    assert "simulated in" not in seen.out and seen.out.startswith("\nmachine")
    assert "simulated in" in seen.err
