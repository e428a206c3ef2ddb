"""The failures of work on streams: raised by an event, or logged, with tracebacks that begin in the work."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import TypeVar

_log = logging.getLogger("asyncflow.streams")

_Error = TypeVar("_Error", bound=BaseException)


def without_this_frame(error: _Error) -> _Error:
    """The exception with a traceback that begins in the work: the frame of who called it keeps the arguments alive."""
    return error.with_traceback(error.__traceback__.tb_next if error.__traceback__ else None)


def as_one(failures: Sequence[BaseException], stream: str) -> BaseException:
    """The one failure of work on the stream of that name, or a group of several."""
    if len(failures) == 1:
        return failures[0]
    return BaseExceptionGroup(f"{len(failures)} failures on stream {stream}", failures)


def log_unreported(failures: Iterable[BaseException], stream: str) -> None:
    """Say what would be lost with the stream."""
    for failure in failures:
        _log.error("work on stream %s failed and no event was awaited", stream, exc_info=failure)
