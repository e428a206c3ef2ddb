"""Life of a stream: takes work until stopped, and never in a fork of the process that made it."""

from __future__ import annotations

import os
import warnings
import weakref
from dataclasses import dataclass, field
from typing import ClassVar

from asyncflow.errors import SessionClosedError
from asyncflow.streams.latch import Latch


@dataclass(slots=True, eq=False, repr=False, weakref_slot=True)
class Lifecycle:
    """The state that a stream and its thread share about their end; base class of the work queue and the reaper.

    Attributes:
        name: of the stream.
        stopped: takes no more work.
        forked: this process is a child of the owner's.
        ended: set when all work is done, as the thread's last act.
        after_fork: what to say in a child.
    """

    name: str
    stopped: bool = field(default=False, init=False)
    forked: bool = field(default=False, init=False)
    ended: Latch = field(default_factory=Latch, init=False)
    after_fork: ClassVar[str]

    def __post_init__(self) -> None:
        _alive.add(self)

    @property
    def is_used(self) -> bool:
        """True if there may be unfinished work whose end must be awaited."""
        return True

    def stop(self) -> None:
        """Refuse further work; finish the work already given. Idempotent, never blocks."""
        raise NotImplementedError

    def watch(self, stream: object) -> None:
        """Warn if the stream is dropped and not closed; its thread ends then, after the work that it has."""
        # Not at exit: the interpreter drops daemon threads by itself, and a warning would come too late.
        weakref.finalize(stream, _dropped, self).atexit = False

    def refuse_if_closed(self) -> None:
        """Raise unless work may be given."""
        if self.stopped:
            self.refuse_if_forked()
            raise SessionClosedError(f"stream {self.name} is closed and takes no more work; open a new session")

    def refuse_if_forked(self) -> None:
        """Raise in a process that has the stream but, being a fork, not its thread."""
        if self.forked:
            raise SessionClosedError(
                f"stream {self.name} belongs to the parent of process {os.getpid()}: {self.after_fork}"
            )


def _dropped(lifecycle: Lifecycle) -> None:
    if not lifecycle.stopped and lifecycle.is_used:
        lifecycle.stop()
        message = f"stream {lifecycle.name} was dropped and not closed; close its session (async with)"
        warnings.warn(message, ResourceWarning, stacklevel=2)


_alive: weakref.WeakSet[Lifecycle] = weakref.WeakSet()
"""Streams of this process, to be closed in a forked child; asking for the pid at each call costs more."""


def _close_all_in_child() -> None:
    for lifecycle in list(_alive):
        lifecycle.stopped = True
        lifecycle.forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_all_in_child)
