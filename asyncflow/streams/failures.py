"""The failures of work on streams: raised by an event, or logged, with tracebacks that begin in the work."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from threading import Lock
from typing import TypeVar

_log = logging.getLogger("asyncflow.streams")

_Error = TypeVar("_Error", bound=BaseException)


def without_this_frame(error: _Error) -> _Error:
    """Drop the first frame of the exception's traceback: the frame of the caller keeps the arguments alive."""
    return error.with_traceback(error.__traceback__.tb_next if error.__traceback__ else None)


@dataclass(slots=True, eq=False)
class KeptFailures:
    """Failures of enqueued work on one stream, until an awaited event raises them; thread-safe."""

    _kept: list[tuple[int, BaseException]] = field(default_factory=list)
    _lock: Lock = field(default_factory=Lock)
    _is_logged: bool = False

    def keep(self, number: int, failure: BaseException) -> None:
        """Work of that number failed; later work has no lower one."""
        with self._lock:
            self._kept.append((number, failure))

    def raise_before(self, number: int, stream: str) -> None:
        """Raise, once, what work with lower numbers on the stream of that name failed with, several as a group."""
        with self._lock:
            taken = [failure for at, failure in self._kept if at < number]
            self._kept = self._kept[len(taken) :]
        try:
            if taken:
                message = f"{len(taken)} failures on stream {stream}"
                raise taken[0] if len(taken) == 1 else BaseExceptionGroup(message, taken)
        finally:
            del taken  # the traceback refers to this frame: avoid a cycle

    def log(self, stream: str) -> None:
        """Say, once, what would be lost with the stream; an event that is awaited later raises it all the same."""
        for _, failure in () if self._is_logged else self._kept:
            _log.error("work on stream %s failed and no event was awaited", stream, exc_info=failure)
        self._is_logged = True
