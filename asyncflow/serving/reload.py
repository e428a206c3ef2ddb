"""New checkpoints for a session that serves: `Reload`."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Final, Self

from asyncflow.checkpoint.directory import step_path, steps
from asyncflow.checkpoint.saver import as_path
from asyncflow.errors import AsyncflowError, SessionClosedError
from asyncflow.runtime.calls.options import as_seconds
from asyncflow.runtime.session.session import Session
from asyncflow.serving.arguments import check_kind
from asyncflow.streams.beside import call_beside

_log: Final = logging.getLogger("asyncflow.serving")


class Reload:
    """A reload: watches a directory of checkpoints, and gives a session the variables of each newer complete step.

    Works while it is entered with ``async with``; the first look is taken then, so that the server begins with the
    latest step. Every run sees the variables of one step (`Session.swap_variables`). While a step cannot be loaded, the
    session goes on with its present variables. The failure is logged once; every look tries again.

    Args:
        session: open before this is entered: `lifespan` takes it as one of ``beside``.
        path: where `Saver` or `Session.save` write steps.
        every_s: how long to wait between two looks.

    Attributes:
        step: the number of the step that the session has from here; None before the first.

    Raises:
        TypeError, ValueError: an argument is not that.
        NotADirectoryError: there is no directory `path`.
    """

    def __init__(self, session: Session, path: str | os.PathLike[str], *, every_s: float = 5.0) -> None:
        check_kind(session, Session, "Reload")
        self.step: int | None = None
        self._session = session
        self._path = as_path(path)
        if not self._path.is_dir():
            raise NotADirectoryError(f"Reload watches a directory of checkpoints, and there is none at {path!r}")
        self._every_s = as_seconds(every_s, "every_s", may_be_zero=False)
        self._told: int | None = None
        self._watching: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self.look()
        self._watching = asyncio.get_running_loop().create_task(self._watch())
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait((self._watching,))

    async def look(self) -> bool:
        """Loads the latest step, if it is newer than that of the session; whether it did.

        Raises:
            SessionClosedError: the session is closed.
        """
        latest = -1
        try:
            latest = max(await call_beside(steps, self._path), default=-1)
            if latest <= (-1 if self.step is None else self.step):
                return False
            await self._session.swap_variables(step_path(self._path, latest))
        except SessionClosedError:
            raise
        except (AsyncflowError, MemoryError) as error:
            if self._told != latest:
                self._told = latest
                _log.warning("no newer variables: %s", error)
            return False
        self.step = latest
        return True

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            try:
                await self.look()
            except SessionClosedError:
                return
