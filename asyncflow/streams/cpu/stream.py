"""The CPU's stream: one thread that does its work in order.

Three objects, so that dropping a stream ends its thread::

    ThreadStream ──▶ _WorkQueue ◀── thread        the thread never refers to the stream
                       ▲
    ThreadEvent ───────┘

| state of a `_WorkQueue` | enters by                  | giving work          | the thread                             |
|---------------------|----------------------------|----------------------|----------------------------------------|
| idle                | creation                   | starts the thread    | does not exist                         |
| serving             | first work                 | appends              | does jobs in order                     |
| stopped             | `stop`, or stream dropped  | `SessionClosedError` | does its queued work, then ends        |
| abandoned           | `aclose` ran out of grace  | `SessionClosedError` | ends its job, refuses the rest, ends   |
| forked              | fork, in the child         | `SessionClosedError` | does not exist                         |

NumPy and BLAS release the GIL inside large kernels: a thread of its own pays off.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from time import perf_counter_ns
from typing import TypeAlias

import numpy as np

from asyncflow.errors import SessionClosedError
from asyncflow.streams.failures import KeptFailures, without_this_frame
from asyncflow.streams.latch import Latch
from asyncflow.streams.lifecycle import Lifecycle
from asyncflow.streams.mailbox import Mailbox
from asyncflow.streams.protocol import Event

Deliver: TypeAlias = Callable[[object, BaseException | None, int, int], None]
"""Takes ``(result, error, started_ns, ended_ns)`` on the event loop; the times are `time.perf_counter_ns`."""

_ThreadJob: TypeAlias = "Callable[[_WorkQueue], object]"


class ThreadStream:
    """A FIFO queue of work done by one daemon thread, which starts with the first work.

    All methods belong to the thread of the event loop that owns the stream; none of them blocks. Work runs with NumPy's
    floating-point warnings off: in a graph, inf and nan are values. A stream must be closed; a stream that is dropped
    instead warns, and its thread ends after the work given.

    Attributes:
        name: as given, such as ``cpu:0/compute``; the thread's name is ``asyncflow:<name>``.
    """

    __slots__ = ("__weakref__", "_mailbox", "_queue", "_thread", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self._queue = _WorkQueue(name)
        self._thread: threading.Thread | None = None
        self._mailbox: Mailbox[ThreadSubmission] | None = None

    @property
    def pending(self) -> int:
        """Number of items given to the stream and not done yet; records and waits count."""
        return self._queue.given - self._queue.finished

    def enqueue(self, work: Callable[..., object], *args: object) -> None:
        """Do ``work(*args)`` after all earlier work.

        Its result is dropped. Its failure is kept, and raised by the next event that is awaited; a failure that no
        event has raised when the thread ends is logged.

        Raises:
            SessionClosedError: the stream is closed, or this process is a fork of its owner.
        """
        self._give(partial(_do, work, args))

    def submit(
        self, work: Callable[..., object], args: tuple[object, ...], deliver: Deliver, loop: asyncio.AbstractEventLoop
    ) -> ThreadSubmission:
        """Do ``work(*args)`` after all earlier work, then call ``deliver(result, error, started_ns, ended_ns)`` once.

        The submission that is returned can be withdrawn while the work has not started.

        ``deliver`` is called on ``loop``, in order, with one wake-up of the loop for a whole batch of completions. It
        runs in the stream thread's `contextvars` context: hand tasks made there their own ``context=``. ``error`` is
        whatever ``work`` raised, `SystemExit` and `KeyboardInterrupt` included; the thread goes on. If ``loop`` is
        closed by then the result is dropped (see `Mailbox.post`).

        Raises:
            SessionClosedError: the stream is closed, or this process is a fork of its owner.
        """
        mailbox = self._mailbox
        # One mailbox per loop, so that a batch of completions wakes the loop once. A stream has one loop at a time.
        if mailbox is None or mailbox.loop is not loop:
            self._mailbox = mailbox = Mailbox(loop, ThreadSubmission.finish, ThreadSubmission.drop)
        submission = ThreadSubmission([(work, args)], deliver, mailbox)
        self._give(submission.run)
        mailbox.expect()  # after `_give`, which raises on a closed stream; this thread takes posts out later
        return submission

    def record(self) -> ThreadEvent:
        """An event that completes when all work given so far is done; on an idle stream it is done already."""
        self._queue.refuse_if_closed()
        event = ThreadEvent(self._queue)
        if self.pending == 0:
            event.set()
        else:
            self._give(event.mark)
        return event

    def wait(self, event: Event) -> None:
        """Make work given from here on wait for ``event``; the calling thread does not wait.

        Only the order changes: a failure before ``event`` is raised where ``event`` is awaited, not here.

        Raises:
            TypeError: ``event`` is of a kind that a thread cannot wait for.
        """
        if not isinstance(event, ThreadEvent):
            raise TypeError(f"stream {self.name} can wait for a ThreadEvent, not for {type(event).__name__}")
        self._queue.refuse_if_closed()
        # An event of the same stream needs no wait: jobs run in order.
        if event.queue is not self._queue and not event.done():
            self._give(event.hold_up)

    def stop(self) -> None:
        """Refuse further work; the thread ends after the work already given."""
        self._queue.stop()
        self._mailbox = None

    async def aclose(self, grace_s: float) -> bool:
        """`stop`, then wait up to ``grace_s`` seconds until the thread has ended; True if it has. Idempotent.

        After the grace, work that has not started is not started any more: submitted work is delivered a
        `SessionClosedError`.

        Cancellation: the stream stays stopped, and its thread still ends after the work it has.
        """
        self.stop()
        if self._thread is None or self._queue.forked:
            return True
        try:
            async with asyncio.timeout(grace_s):
                await self._queue.ended.wait()
        except TimeoutError:
            self._queue.abandoned = True
            return False
        self._thread.join()  # the thread signals last, so this takes microseconds
        return True

    def _give(self, job: _ThreadJob) -> None:
        jobs = self._queue
        jobs.refuse_if_closed()
        if self._thread is None:
            self._start()
        jobs.given += 1  # before the job can finish: `pending` never falls below 0
        jobs.jobs.put(job)

    def _start(self) -> None:
        thread = threading.Thread(target=_serve, args=(self._queue,), name=f"asyncflow:{self.name}", daemon=True)
        thread.start()
        self._thread = thread
        self._queue.watch(self)


class ThreadEvent(Latch):
    """A point in a `ThreadStream`'s order: behind as many jobs as had been given to its queue."""

    __slots__ = ("_behind", "queue")

    def __init__(self, queue: _WorkQueue) -> None:
        super().__init__()
        self.queue = queue
        self._behind = queue.given

    def mark(self, jobs: _WorkQueue) -> None:
        """Mark the event as reached; runs as a job of the event's own stream."""
        jobs.finished += 1
        self.set()

    def hold_up(self, jobs: _WorkQueue) -> None:
        """The job of another stream: a pause until it is done."""
        self.block()
        jobs.finished += 1

    async def wait(self) -> None:
        """Return when the work before this point is done; may be awaited on any running loop, any number of times.

        Raises:
            BaseException: what enqueued work before this point failed with, as a group if there were several.
            SessionClosedError: this process is a fork of the stream's owner, which has no thread to do the work.

        Cancellation: leaves the event and the stream as they were.
        """
        if not self.done():
            self.queue.refuse_if_forked()
            await super().wait()
        self.queue.failures.raise_before(self._behind, self.queue.name)


@dataclass(slots=True, eq=False, repr=False)
class _WorkQueue(Lifecycle):
    """State shared by a stream, its events and its thread.

    Only the owner's thread writes ``given``, and only the stream's thread writes ``finished``. ``finished`` counts a
    job only when all its effects can be seen, so ``given == finished`` means an idle stream. ``jobs`` ends with None.
    """

    given: int = 0
    finished: int = 0
    abandoned: bool = False
    jobs: SimpleQueue[_ThreadJob | None] = field(default_factory=SimpleQueue)
    failures: KeptFailures = field(default_factory=KeptFailures)
    after_fork = "its thread did not survive the fork; open a new session in the child"

    def stop(self) -> None:
        """Refuse further jobs; the thread ends after the queued ones."""
        if not self.stopped:
            self.stopped = True
            self.jobs.put(None)


def _do(work: Callable[..., object], args: tuple[object, ...], jobs: _WorkQueue) -> None:
    """The job of fire-and-forget work."""
    if jobs.abandoned:
        jobs.failures.keep(jobs.finished, _abandonment(jobs))
    else:
        try:
            work(*args)
        except BaseException as exc:
            jobs.failures.keep(jobs.finished, without_this_frame(exc))
    jobs.finished += 1


@dataclass(slots=True, eq=False)
class ThreadSubmission:
    """Work whose outcome is delivered to an event loop.

    `call` holds the work and its arguments until the thread takes them out, or `withdraw` does: a list changes in one
    step, so only one of the two finds them. The thread has no local variable for the outcome, and lets go of nothing
    late: once it is delivered, all that belongs to it is freed.
    """

    call: list[tuple[Callable[..., object], tuple[object, ...]]]
    deliver: Deliver | None
    mailbox: Mailbox[ThreadSubmission]
    result: object = None
    error: BaseException | None = None
    started_ns: int = 0
    ended_ns: int = 0

    def run(self, jobs: _WorkQueue) -> None:
        """Run the work and post the outcome; runs as a job of the stream."""
        try:
            work, args = self.call.pop()
        except IndexError:  # it was withdrawn
            jobs.finished += 1
            return
        self.started_ns = perf_counter_ns()
        if jobs.abandoned:
            self.error = _abandonment(jobs)
        else:
            try:
                self.result = work(*args)
            except BaseException as exc:
                self.error = without_this_frame(exc)
        self.ended_ns = perf_counter_ns()
        del work, args  # freed before the post, so that the loop then reads correct memory accounts
        jobs.finished += 1
        self.mailbox.post(self)

    def withdraw(self) -> bool:
        """Drop the work if it has not started, and return True: it is never done, and nothing is delivered.

        Belongs to the loop's thread.
        """
        try:
            self.call.pop()
        except IndexError:
            return False
        self.deliver = None
        self.mailbox.forget()
        return True

    def finish(self) -> None:
        """Deliver the outcome; on the loop's thread."""
        deliver, result, error = self.deliver, self.result, self.error
        self.deliver = self.result = self.error = None
        assert deliver is not None, "an outcome is delivered once"
        try:
            deliver(result, error, self.started_ns, self.ended_ns)
        finally:
            del error  # its traceback may refer to this frame: avoid a cycle

    def drop(self) -> None:
        """Drop all references: no caller waits for the outcome any more."""
        self.deliver = self.result = self.error = None


def _serve(jobs: _WorkQueue) -> None:
    """The thread: do jobs in order until the queue is stopped."""
    np.seterr(all="ignore")  # of this thread's context only
    try:
        while (job := jobs.jobs.get()) is not None:
            job(jobs)
            del job  # hold no buffer while blocked in get
        jobs.failures.log(jobs.name)
    finally:
        jobs.ended.set()


def _abandonment(jobs: _WorkQueue) -> SessionClosedError:
    return SessionClosedError(f"stream {jobs.name} was closed, and its grace passed, before this work could start")
