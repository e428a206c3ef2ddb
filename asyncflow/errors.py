"""Errors, warnings, and the lines of the user's code that caused them.

Every error asyncflow raises on purpose derives from `AsyncflowError`::

    AsyncflowError
    ├── GraphError                  a program that cannot be built            (build time)
    │   ├── ShapeError                (also ValueError)
    │   │   └── AxisError               (also IndexError)
    │   └── DTypeError                (also TypeError)
    ├── FeedError                   a value that may not be fed               (also ValueError)
    ├── FetchError                  a thing that cannot be fetched, or a dead fetch
    ├── PlacementError              no device can run a node as requested
    ├── KernelError                 a node failed while running: node, tag, device, inputs, user line
    │   ├── EndOfInput                an input has no more elements
    │   ├── OutOfMemoryError          (also MemoryError)
    │   └── QueueClosedError          nothing will come out of a queue any more, or may be put in
    ├── HazardError                 two streams touch one buffer without an event between them
    ├── DeadlineExceeded            a run's ``timeout=`` passed               (also TimeoutError)
    ├── OverloadedError             a run refused because the session is busy
    ├── ClientDisconnected          a run cancelled because its client has gone      (`asyncflow.serving`)
    ├── CheckpointError             a file that cannot be saved or restored
    ├── SessionClosedError          a session used after close or drain, or after a fork
    └── InternalError               a bug in asyncflow itself

`RaceWarning` is a warning: a program has more than one outcome.

`asyncio.CancelledError` stays itself: cancelling a run is not an error.

All of them pickle, with their message, attributes and notes, and with their cause or its text.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

import numpy as np

from asyncflow.pickling import portable, revived

_OURS = (
    str(Path(__file__).resolve().parent) + "/",
    str(Path(np.__file__).parent) + "/",
    contextlib.__file__,
    "<asyncflow ",
)
"""Folders and files whose frames a user has not written: NumPy's, which asks tensors for values, among them.

The last of them are regions, which the compiler has written.
"""

_GENERATED = f"{__package__}."
"""Begins the names of modules whose dataclasses have an `__init__`, whose code stands in no file."""

_STARTERS: tuple[str, ...] = (str(Path(asyncio.__file__).parent) + "/", threading.__file__)
"""Files that stand below a task or thread in the call stack."""


@dataclass(frozen=True, slots=True)
class SourceLocation:
    """A line of the user's code."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


UNKNOWN_LOCATION = SourceLocation("<unknown>", 0, "<unknown>")


@dataclass(frozen=True, slots=True)
class LoopIdentity:
    """The name of a loop, the same for every driver: generated code, the scheduler, a card, or the host for a card.

    Attributes:
        name: that of its `while` node, or of the frame that a user has entered by hand.
        location: the user's line that built it.
        by_hand: a user made it of primitives, so that it has no node of its own.
    """

    name: str
    location: SourceLocation = UNKNOWN_LOCATION
    by_hand: bool = False

    @property
    def label(self) -> str:
        """The last part of the loop's name, as tags show it."""
        return self.name.rpartition("/")[2]

    def check(self, count: int, limit: int | None) -> None:
        """Raises TooManyIterations if `count` iterations are more than the limit; None is none."""
        if limit is not None and count > limit:
            raise TooManyIterations(self, limit)


class TooManyIterations(Exception):
    """A loop went on after the session's ``max_iterations``: the cause of a `KernelError`.

    Attributes:
        loop: which.
        limit: how many iterations it may run.
    """

    def __init__(self, loop: LoopIdentity, limit: int) -> None:
        self.loop = loop
        self.limit = limit
        super().__init__(loop, limit)

    def __str__(self) -> str:
        return f"loop {self.loop.label} reached max_iterations={self.limit}"


_WRITTEN_AT = "\n  written at "


_definition: ContextVar[SourceLocation] = ContextVar("asyncflow_definition", default=UNKNOWN_LOCATION)
"""The name of a place for which the call stack has no line of the user's."""


@contextlib.contextmanager
def located_at(place: Callable[..., object] | SourceLocation) -> Iterator[None]:
    """Give `user_location` a line, or the definition of a function, for call stacks without a line of the user.

    The call stack of a coroutine ends at its caller only if the caller awaits it; that of a task has no line of the
    user. So a plain function notes `user_location` for a coroutine that may warn, and makes the coroutine.
    """
    if not isinstance(place, SourceLocation):
        code = getattr(inspect.unwrap(place), "__code__", None)
        place = (
            _definition.get() if code is None else SourceLocation(code.co_filename, code.co_firstlineno, code.co_name)
        )
    token = _definition.set(place)
    try:
        yield
    finally:
        _definition.reset(token)


def is_users(file: str) -> bool:
    """Return True if a user may have written the code in a file."""
    return not file.startswith(_OURS)


def user_location() -> SourceLocation:
    """The innermost line of the call stack that lies outside asyncflow."""
    frame: FrameType | None = sys._getframe(1)
    file = ""
    while frame is not None:  # one loop without calls, as each node runs it, and gradients run it 15 frames deeper
        file = frame.f_code.co_filename
        is_generated = file == "<string>" and str(frame.f_globals.get("__name__")).startswith(_GENERATED)
        if not (is_generated or file.startswith(_OURS)):
            break
        frame = frame.f_back
    if frame is None or file.startswith(_STARTERS):
        # The task's own stack ends here: the line that started the event loop is of no use.
        return _definition.get()
    return SourceLocation(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def warn_user(message: str, *, registry: dict[str | tuple[str, type[Warning], int], int] | None = None) -> None:
    """Warn about an argument or call with no effect, or a surprising effect; the warning names the user's line.

    Args:
        message: the problem, and how to solve it.
        registry: as of `warnings.warn_explicit`: filters that show a warning once look it up here; None shows each.
    """
    here = user_location()
    warnings.warn_explicit(message, UserWarning, here.file, here.line, registry=registry)


def told(error: BaseException) -> str:
    """Return kind and message of an error, for another error's message; user-defined classes may fail to format
    theirs.
    """
    try:
        return f"{type(error).__name__}: {error}"
    except Exception as failure:
        return f"{type(error).__name__} (its message cannot be read: {type(failure).__name__})"


def brief(value: object) -> str:
    """`repr(value)` for a message: 60 characters at most; users' classes may fail to give theirs."""
    try:
        text = repr(value)
    except Exception as failure:
        text = f"<{type(value).__name__} without a repr: {type(failure).__name__}>"
    return text if len(text) <= 60 else f"{text[:57]}..."


def counted(count: int, what: str) -> str:
    """Return a number and a noun, such as ``1 node`` or ``3 nodes``."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def a_kind(kind: type) -> str:
    """Return the name of a type with its article: ``an int``, ``a tuple``, ``an ndarray``."""
    name = kind.__name__ or "object of a class without a name"  # `type("", (), {})` makes one
    return f"an {name}" if name[0].lower() in "aeio" or name.startswith("nd") else f"a {name}"


class AsyncflowError(Exception):
    """Base of every error asyncflow raises on purpose."""

    def __reduce__(self) -> tuple[Any, ...]:
        return revived, (type(self), self.args, self.__dict__, portable(self.__cause__))


class GraphError(AsyncflowError):
    """A program that cannot be built; raised where the user wrote it, which the message names.

    Attributes:
        reason: the message without that line.
    """

    def __init__(self, message: str = "") -> None:
        self.reason, place, _ = message.partition(_WRITTEN_AT)
        if not place:
            here = user_location()
            if here is not UNKNOWN_LOCATION and f"built at {here}" not in message:
                message += f"{_WRITTEN_AT}{here}"
        super().__init__(message)


def told_at(error: GraphError, place: str) -> GraphError:
    """The same error, which also says where it is."""
    return type(error)(f"{place}: {error.reason}")


class ShapeError(GraphError, ValueError):
    """Shapes that do not fit together."""


class AxisError(ShapeError, IndexError):
    """An axis that a value of that rank does not have, or one named twice."""


class DTypeError(GraphError, TypeError):
    """Dtypes that do not fit together."""


class FeedError(AsyncflowError, ValueError):
    """A fed value that does not fit its tensor, is missing, or may not be fed."""


class FetchError(AsyncflowError):
    """A fetch that is not possible, or turned out dead."""


class PlacementError(AsyncflowError):
    """No device can run a node as requested."""


class DeadlineExceeded(AsyncflowError, TimeoutError):
    """A run missed its ``timeout=``, or was dropped from the queue because it would have."""


class OverloadedError(AsyncflowError):
    """A run that was refused because its session is busy; nothing of it was computed.

    Attributes:
        retry_after_s: after how many seconds to ask again, as for the header ``Retry-After`` of a 503 or 429: by then
            all that goes before it should have ended, by what runs of their kinds took on average.
        runs: how many runs were in flight.
        queued: how many waited.
    """

    def __init__(self, message: str, *, retry_after_s: float = 0.0, runs: int = 0, queued: int = 0) -> None:
        self.retry_after_s = retry_after_s
        self.runs = runs
        self.queued = queued
        super().__init__(message)


class ClientDisconnected(AsyncflowError):
    """A run was cancelled because the client that its result was for has gone; see `serving.run_or_disconnect`."""


class CheckpointError(AsyncflowError):
    """A checkpoint that cannot be written, or a file that is not a whole checkpoint."""


class ReplayError(AsyncflowError):
    """A recorded run cannot be done again, or did not go the same way; the message says at which firing."""


class SessionClosedError(AsyncflowError):
    """A session used after it was closed, while or after it was drained, or in a forked child."""


class HazardError(AsyncflowError):
    """An access of two streams to one buffer that no event orders; only simulated devices detect hazards."""


class DeviceLostError(AsyncflowError):
    """A device that a failed kernel has broken: none of its values is left, and CUDA takes no more work."""


class InternalError(AsyncflowError):
    """A bug in asyncflow: please report it with the text of the error."""


class KernelError(AsyncflowError):
    """A failure of a node during a run; ``__cause__`` is the original exception.

    Attributes:
        node: name of the node; empty where it is an awaited method that failed, as `Queue.get`, which is no node.
        op: name of its op.
        tag: the frames and iterations it ran in, such as ``outer/3/inner/7``; empty outside loops.
        device: name of the device.
        inputs: ``dtype[shape]`` of each input value.
        location: the user's line that built the node.
        reason: what happened, without the provenance.
    """

    def __init__(
        self,
        reason: str,
        *,
        node: str = "",
        op: str = "",
        tag: str = "",
        device: str = "",
        inputs: tuple[str, ...] = (),
        location: SourceLocation = UNKNOWN_LOCATION,
    ) -> None:
        self.reason = reason
        self.node = node
        self.op = op
        self.tag = tag
        self.device = device
        self.inputs = inputs
        self.location = location
        super().__init__(self._message())

    def move_to(self, *, node: str, op: str, tag: str, inputs: tuple[str, ...], location: SourceLocation) -> None:
        """Names a more exact place of the failure."""
        self.node, self.op, self.tag, self.inputs, self.location = node, op, tag, inputs, location
        self.args = (self._message(),)

    def _message(self) -> str:
        if not self.node:
            return self.reason
        where = f" in iteration {self.tag}" if self.tag else ""
        lines = [f"{self.reason}", f"  node    {self.node} ({self.op}){where}"]
        if self.device:
            lines.append(f"  device  {self.device}")
        if self.inputs:
            lines.append(f"  inputs  {', '.join(self.inputs)}")
        lines.append(f"  built at {self.location}")
        return "\n".join(lines)


class BodyFailure(Exception):
    """A kernel failed in a body that is computed for several firings; each of them fails with this.

    Attributes:
        error: what the kernel raised, which is the cause of `inner`.
        inner: of the body's own run.
        tag: as in `KernelError`, inside the firing.
    """

    def __init__(self, error: Exception, inner: KernelError, tag: str) -> None:
        self.error, self.inner, self.tag = error, inner, tag
        super().__init__(error, inner, tag)


_NO_EXIT: Final = (Exception, asyncio.CancelledError, GeneratorExit)
"""Errors that tasks and generators may end with; any other that leaves a task ends the event loop."""


class RowByRow(Exception):
    """Raised by a kernel of `Op.rows_kernel`: these rows are to be computed one by one. Records know it by its name."""


class ExitRaised(Exception):
    """A `BaseException` that is no `Exception`, raised by a user's function in a body computed for several firings.

    Each firing fails with `error`; raised out of the body's own task, it would end the event loop.
    """

    def __init__(self, error: BaseException) -> None:
        self.error = error
        super().__init__(error)


class _ContainedExits:
    __slots__ = ()

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None and not isinstance(error, _NO_EXIT):
            raise ExitRaised(error) from error


contained_exits: Final = _ContainedExits()
"""Inside this context, a function's exit becomes an `ExitRaised`."""


def of_firing(error: Exception, tag: str | None = None) -> BaseException:
    """The error of a firing if the run of a body failed with this, in that iteration (None: the run knows)."""
    if isinstance(error, ExitRaised):
        return error.error
    cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
    if cause is error or not isinstance(error, KernelError):
        return cause
    return BodyFailure(cause, error, error.tag if tag is None else tag)


class RaceWarning(UserWarning):
    """A program with unordered effects that may have several outcomes, and no `allow_races` for them.

    `allow_races` says so of a variable; ``warnings.filterwarnings("ignore", category=af.RaceWarning)`` of all.
    """


_ROW, _ATTEMPT = "asyncflow_row", "asyncflow_attempt"
"""Notes on errors of users, which may have attributes of any other names, and refuse to be written to."""


def in_row(error: Exception, label: str, numbers: Sequence[int]) -> None:
    """Notes in which row a kernel failed that works on many; `row_of` tells it."""
    for each in map(str, numbers):
        label = label.replace(":", each, 1) if ":" in label else f"{label}/{each}"
    vars(error)[_ROW] = label


def row_of(error: BaseException) -> str:
    """The row, such as ``map/3``, in which a kernel failed; empty if it does not work on rows."""
    return str(vars(error).get(_ROW, ""))


def in_attempt(error: Exception, which: str) -> None:
    """Note which attempt of a function failed for good; `attempt_of` tells it."""
    vars(error)[_ATTEMPT] = which


def attempt_of(error: BaseException) -> str:
    """Return the attempt, such as ``attempt 3 of 3``, that failed for good; empty if there could be only one."""
    return str(vars(error).get(_ATTEMPT, ""))


class EndOfInput(KernelError):
    """An input has no more elements, or is closed."""


class OutOfMemoryError(KernelError, MemoryError):
    """A device's memory limit would be passed.

    Attributes:
        requested: bytes asked for.
        used: bytes in use on the device.
        limit: the device's limit in bytes.
    """

    def __init__(self, reason: str, *, requested: int, used: int, limit: int, **provenance: object) -> None:
        self.requested = requested
        self.used = used
        self.limit = limit
        super().__init__(reason, **provenance)  # type: ignore[arg-type]


class QueueClosedError(KernelError):
    """A queue is closed: nothing may be put in any more, or there will never be as much as is to be taken.

    Of an awaited `Queue.put` or `Queue.get`, which is no node, the provenance is empty.

    Attributes:
        queue: its name.
        left: how many elements are left in it, which can still be taken.
    """

    def __init__(self, reason: str, *, queue: str = "", left: int = 0, **provenance: object) -> None:
        self.queue = queue
        self.left = left
        super().__init__(reason, **provenance)  # type: ignore[arg-type]
