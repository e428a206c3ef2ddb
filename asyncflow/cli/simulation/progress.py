"""The progress of a simulated program, shown on standard error and never on standard output.

A program does not say how much work it has. The loops of the program do. While it awaits a run, the iterators of the
``for`` loops around the ``await`` are among the references of its suspended coroutines. They tell how many items are
left. They are read on the event loop's thread, where no coroutine runs meanwhile; another thread displays the result.
"""

from __future__ import annotations

import asyncio
import gc
import operator
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from asyncflow.errors import counted
from asyncflow.profiler.summary import format_duration

if TYPE_CHECKING:
    from asyncflow.devices.sim.machine import SimMachine
    from asyncflow.runtime.watch.trace import Trace

BAR_S, LINE_S = 0.5, 10.0
"""Seconds between two states of the bar on a terminal, and between two lines elsewhere."""

ANSWER_S = 0.1
"""Seconds for which an event loop that is busy is waited for, before an older state is shown."""

_WIDTH = 24

_EXAMPLES: tuple[Iterable[object], ...] = ([], (), range(0), {}, {}.values(), {}.items(), set())
_COUNTED = tuple(type(iter(example)) for example in _EXAMPLES)
"""Types of iterators that know how many items are left."""

_WRAPPERS = (enumerate, zip, map)


class ProgramProgress:
    """The progress of a program whose runs are simulated.

    Attributes:
        is_terminal: the stream shows one line that changes, rather than a line each time.
    """

    def __init__(
        self,
        trace: Trace,
        machines: Sequence[SimMachine],
        stream: TextIO,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin now.

        Args:
            trace: of all runs.
            machines: one for each event loop of the program so far.
            stream: where to show it.
            clock: seconds of real time.
        """
        self.is_terminal = stream.isatty()
        self._trace = trace
        self._machines = machines
        self._stream = stream
        self._clock = clock
        self._started_s = clock()
        self._loops = _ForLoops()
        self._known: tuple[float, float | None] | None = None
        self._is_asked = False
        """An event loop is to look, and has not yet."""

    def ask(self) -> None:
        """Ask the event loop to look at its coroutines, and wait briefly for the answer; called on another thread."""
        if self._is_asked or not self._machines:
            return
        looked = threading.Event()

        def answer() -> None:
            self.look()
            self._is_asked = False
            looked.set()

        self._is_asked = True
        try:
            self._machines[-1].loop.call_soon_threadsafe(answer)
        except RuntimeError:  # it is closed
            self._is_asked = False
        else:
            looked.wait(ANSWER_S)

    def look(self) -> None:
        """Find out how much is done; called on the event loop's thread."""
        self._known = self._loops.look(self._machines[-1].loop, self._clock()) or self._known

    def show(self) -> None:
        """Write the state of now."""
        state = self.state()
        self._stream.write(f"\r\x1b[K{state}" if self.is_terminal else f"simulate: {state}\n")
        self._stream.flush()

    def clear(self) -> None:
        """Remove the bar, so that further output starts on a line of its own."""
        if self.is_terminal:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def state(self) -> str:
        """Return one line: share of the program done, simulated time, and time left."""
        now_s = self._clock()
        machine = self._machines[-1]
        known = self._known
        runs, virtual = counted(len(self._trace.runs), "run"), format_duration(machine.now_ns())
        told = f"{runs}, {virtual} simulated in {_seconds(now_s - self._started_s)}"
        if known is None:
            return told
        done, left_s = known
        bar = f"[{'#' * int(done * _WIDTH):.<{_WIDTH}}] {done:4.0%}  {told}"
        return bar if left_s is None else f"{bar}, about {_seconds(left_s)} left"


class _ForLoops:
    """The ``for`` loops around the awaits of a program's coroutines."""

    def __init__(self) -> None:
        self._lengths: dict[int, tuple[object, int]] = {}
        """Iterators by id, kept so that no other takes the id, each with the number of items it had at first."""
        self._outermost: object = None
        self._since: tuple[float, float] = (0.0, 0.0)
        """Time at which the outermost loop was first seen, and items left of the loop then."""

    def look(self, loop: asyncio.AbstractEventLoop, now_s: float) -> tuple[float, float | None] | None:
        """Return the part of the outermost loop that is done, and the seconds that the rest will take.

        None where nothing that the program awaits stands in a loop of known length; no seconds at first.
        """
        iterators = max((_iterators_of(task.get_coro()) for task in asyncio.all_tasks(loop)), key=len, default=[])
        if not iterators:
            return None
        left = part = 1.0  # items left, and their share of all items
        for iterator in reversed(iterators):
            items = operator.length_hint(iterator)
            _, length = self._lengths.setdefault(id(iterator), (iterator, items + 1))
            left = items + part
            part = left / length
        self._lengths = {id(each): self._lengths[id(each)] for each in iterators}
        if self._outermost is not iterators[0]:
            self._outermost, self._since = iterators[0], (now_s, left)
        since_s, left_then = self._since
        done = left_then - left
        return 1 - part, (now_s - since_s) * left / done if done > 0 else None


def _iterators_of(coroutine: object) -> list[Iterator[object]]:
    """Return the iterators of known length in a coroutine and in the coroutines that it awaits; outermost first."""
    found: list[Iterator[object]] = []
    while coroutine is not None:
        for reference in gc.get_referents(coroutine):
            inside = gc.get_referents(reference) if isinstance(reference, _WRAPPERS) else ()
            found += [each for each in (reference, *inside) if isinstance(each, _COUNTED)]
        coroutine = getattr(coroutine, "cr_await", None)
    return found


def _seconds(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02} h" if hours else f"{minutes}:{rest:02} min" if minutes else f"{rest} s"


@contextmanager
def shown_progress(trace: Trace, machines: Sequence[SimMachine], stream: TextIO | None = None) -> Iterator[None]:
    """Show the progress of runs in the block, from a separate thread: a bar on a terminal, lines elsewhere."""
    progress = ProgramProgress(trace, machines, sys.stderr if stream is None else stream)
    ended = threading.Event()

    def show_often() -> None:
        while not ended.wait(BAR_S if progress.is_terminal else LINE_S):
            progress.ask()
            progress.show()

    thread = threading.Thread(target=show_often, name="asyncflow progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        progress.clear()
