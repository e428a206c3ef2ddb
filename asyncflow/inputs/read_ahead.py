"""`ReadAhead`: one reading of a source, a few elements ahead of the program.

Reading is a *job*: on a thread for a blocking source, in a task for an asynchronous source. A job ends when enough
elements wait, and the next begins when half of them have been taken (back-pressure), so nothing waits in a thread. Only
the job touches the source.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias, cast

from asyncflow.errors import EndOfInput
from asyncflow.inputs.stages import Element, Passes, Stacked, Stage
from asyncflow.state.elements.element_orders import ArrivalOrder
from asyncflow.state.elements.taken import current_taken
from asyncflow.streams.beside import giving_way

Source: TypeAlias = "Callable[[], Generator[Element | Stacked] | AsyncGenerator[Element]]"
"""Opens a source for one pass. The iterator closes its open files when it ends, fails, or is closed."""

CLOSE_S = 5.0
"""Seconds for a read that is under way, when its session closes."""


class ReadAhead:
    """Elements of a source, on one event loop.

    Args:
        name: of the input, for messages.
        source: what to read.
        stages: what elements go through.
        ahead: how many elements are read before they are asked for; at least 1.
        skip: how many elements to leave out.
        returned: numbers of elements below `skip` that are not left out, in ascending order.

    Attributes:
        waits: number of times that a consumer found no element and had to wait.
    """

    def __init__(
        self,
        name: str,
        source: Source,
        stages: Sequence[Stage],
        ahead: int,
        skip: int = 0,
        returned: Sequence[int] = (),
    ) -> None:
        self._name = name
        self._source = source
        self._ahead = ahead
        self._skip = skip
        self._kept = tuple(returned)  # the first elements that are delivered
        self._read = 0  # number of elements read, skipped elements included
        self._passes = Passes(stages)
        self._reading: Generator[Element | Stacked] | AsyncGenerator[Element] | None = None
        self._parts: Iterator[Sequence[Element]] = iter(())  # elements read, in groups of the size that the stages take
        self._ready = ArrivalOrder()
        self._end: Exception | None = None  # why reading ended; ready elements come first
        self._job: asyncio.Future[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._changed = asyncio.Event()
        self._waiting = 0
        self._is_closing = False
        self.waits = 0

    # -- taking elements -----------------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """True if an element is ready and no consumer waits."""
        return bool(self._ready) and not self._waiting

    def take_nowait(self) -> Element:
        """Takes the next element, which is ready."""
        (element,) = self._ready.remove(1)
        self._read_on()
        taken = current_taken()
        if taken is not None:
            taken.add(self._give_back, (element,), self._ready.last)
        return element

    def _give_back(self, elements: Sequence[Element], where: object) -> None:
        """Put elements of a run that has ended early back to their places."""
        self._ready.give_back(elements, where)
        self._changed.set()

    @property
    def progress(self) -> tuple[int, list[int]]:
        """The number of the first element never taken, and the numbers of earlier elements given back."""
        removed, returned = self._ready.removed
        kept = self._kept
        numbers = [kept[n] if n < len(kept) else self._skip + n - len(kept) for n in returned]
        return self._skip + max(0, removed - len(kept)), [*numbers, *kept[removed:]]

    async def has_more(self) -> bool:
        """Return True if another element comes; wait until that is known.

        Raises:
            Exception: reading has failed.
        """
        if not self._ready:
            await self._wait()
        if not self._ready and not isinstance(self._end, EndOfInput):
            raise self._failure()
        return bool(self._ready)

    async def take(self) -> Element:
        """The next element. Cancellation: none is taken.

        Raises:
            EndOfInput: there is none.
            Exception: reading has failed.
        """
        while not self._ready:
            if not await self.has_more():
                raise self._failure()
        return self.take_nowait()

    def _failure(self) -> Exception:
        assert self._end is not None
        return EndOfInput(str(self._end)) if isinstance(self._end, EndOfInput) else self._end

    async def _wait(self) -> None:
        self._waiting += 1  # before the last check, as the job checks it after each element
        self.waits += 1
        try:
            while not self._ready and self._end is None:
                self._changed.clear()
                self._read_on()
                if not self._ready and self._end is None:
                    await self._changed.wait()
        finally:
            self._waiting -= 1

    # -- the job -------------------------------------------------------------------------------------------------

    def _read_on(self) -> None:
        if self._job is not None or self._end is not None or 2 * len(self._ready) > self._ahead:
            return
        self._loop = asyncio.get_running_loop()
        if self._reading is None:
            self._open()
        if isinstance(self._reading, AsyncGenerator):
            self._job = self._loop.create_task(self._read_awaiting(), name=f"read {self._name}")
        else:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1, thread_name_prefix=f"asyncflow reads {self._name}")
            self._job = self._loop.run_in_executor(self._pool, self._read_blocking)
        self._job.add_done_callback(self._job_ended)

    def _job_ended(self, job: asyncio.Future[None]) -> None:
        self._job = None
        if job.cancelled():
            self._end = self._end or RuntimeError("reading was cancelled, and not by the session")
        elif (error := job.exception()) is not None:
            # Do not raise an error that would end the interpreter in the application's event loop.
            self._end = error if isinstance(error, Exception) else RuntimeError(f"reading ended with {error!r}")
        self._changed.set()
        if self._is_closing:
            return
        if self._end is not None and self._pool is not None:
            self._pool.shutdown(wait=False)
            self._pool = None
        elif self._waiting:
            self._read_on()

    def _is_enough(self) -> bool:
        return len(self._ready) >= self._ahead or self._is_closing

    def _read_blocking(self) -> None:
        try:
            while not self._is_enough() and self._end is None:
                for elements in giving_way(self._parts):
                    self._deliver(self._passes.feed(elements))
                    if self._is_enough():
                        return
                self._pass_ended()
        except BaseException:
            cast("Generator[Element | Stacked]", self._reading).close()  # a stage has failed: close the file
            raise

    async def _read_awaiting(self) -> None:
        try:
            while not self._is_enough() and self._end is None:
                async for element in cast("AsyncGenerator[Element]", self._reading):
                    self._deliver(self._passes.feed((element,)))
                    break
                else:
                    self._pass_ended()
        except BaseException as error:
            await cast("AsyncGenerator[Element]", self._reading).aclose()
            if isinstance(error, KeyboardInterrupt | SystemExit):  # a task that raises it would end the event loop
                raise RuntimeError(f"reading ended with {error!r}") from error
            raise

    def _open(self) -> None:
        self._reading = self._source()
        if not isinstance(self._reading, AsyncGenerator):
            self._parts = _parts(self._reading, self._passes.at_once)

    def _pass_ended(self) -> None:
        """Opens the source for the next pass, if there is one."""
        found, more = self._passes.end_of_pass()
        self._deliver(found)
        if more:
            self._open()
        else:
            self._end = EndOfInput(f"input {self._name!r} has no more elements")

    def _deliver(self, elements: Iterable[Element]) -> None:
        for element in elements:
            number, self._read = self._read, self._read + 1
            if number < self._skip and number not in self._kept:
                continue
            self._ready.append(element)
            if self._waiting and self._loop is not None:
                self._loop.call_soon_threadsafe(self._changed.set)

    # -- the end -------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Stop reading; waiting consumers get `EndOfInput`. Open files are closed when this object is dropped."""
        self._is_closing = True
        self._end = self._end or EndOfInput(f"input {self._name!r} is closed")
        self._changed.set()
        if isinstance(self._job, asyncio.Task):
            self._job.cancel()

    async def aclose(self) -> None:
        """Stops, and closes the source. A read that takes longer than 5 s is left behind."""
        self.stop()
        if self._job is not None:
            await asyncio.wait([self._job], timeout=CLOSE_S)
        if self._job is None:
            if isinstance(self._reading, AsyncGenerator):
                await self._reading.aclose()
            elif self._reading is not None and self._pool is not None:
                await asyncio.get_running_loop().run_in_executor(self._pool, self._reading.close)
        if self._pool is not None:
            self._pool.shutdown(wait=self._job is None)


def _parts(reading: Iterable[Element | Stacked], size: int) -> Iterator[Sequence[Element]]:
    """Yield the elements of a source in parts of at most `size` elements."""
    for found in reading:
        if not isinstance(found, Stacked):
            yield (found,)
        elif size == 1:
            for element in found:
                yield (element,)
        else:
            for begin in range(0, len(found), size):
                yield found[begin : begin + size]
