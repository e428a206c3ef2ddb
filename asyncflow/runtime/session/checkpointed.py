"""`CheckpointedSession`: how a session's state is saved, restored, and replaced while runs go on."""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path

from asyncflow.checkpoint.checkpoints import Checkpoints, Restored
from asyncflow.checkpoint.saver import as_path, as_step
from asyncflow.errors import SourceLocation, located_at, user_location
from asyncflow.graph.resource import Resource
from asyncflow.runtime.gates.runs import Runs
from asyncflow.values import Value


class CheckpointedSession(ABC):
    """The methods of `Session` that write and read checkpoints; the session provides state and runs."""

    _runs: Runs
    _checkpoints: Checkpoints
    _swapping: asyncio.Lock

    @abstractmethod
    def _bind(self) -> asyncio.AbstractEventLoop:
        """Makes the session one of the running event loop, and refuses another's."""

    async def save(
        self,
        path: str | os.PathLike[str],
        variables: Sequence[Resource] | None = None,
        *,
        step: int | None = None,
    ) -> Path:
        """Save the session's state under a directory, as one step, and return its path: ``path/step-12``.

        The step has the state of one moment at which no run that writes several variables is half way. Runs go on
        meanwhile, and neither they nor the event loop wait for it. It is on the disk as a whole when this returns.

        Args:
            path: the directory of the steps; made if need be.
            variables: what to save; None for the state of all that the session's graph and its runs have to do with,
                and the counters of its random numbers.
            step: the number of the step; None for the next free number.

        Raises:
            CheckpointError: it cannot be written, or two variables have one name; the steps there are as they were.
            RuntimeError: this is awaited inside a run that writes several variables; see `Saver.maybe_save`.

        Cancellation: nothing is left of the step, unless it is there already.
        """
        self._bind()
        root = as_path(path)
        number = None if step is None else as_step(step)
        return await self._checkpoints.write(root, await self._checkpoints.cut(variables), number, None)

    def restore(
        self,
        path: str | os.PathLike[str],
        variables: Sequence[Resource] | None = None,
        *,
        strict: bool = True,
    ) -> Coroutine[object, object, Restored]:
        """Restore the saved values of the session's variables, all at once or none.

        All is read and checked before the first variable changes, and they change when no run that uses them is in
        flight. Runs in flight end with the values they began with, and later ones wait until the new ones are there.

        Args:
            path: a step, or a directory of steps, whose latest one is taken.
            variables: what to restore, whatever else the checkpoint holds; None for all that `save` saves, with the
                counters of random numbers.
            strict: the checkpoint has to hold the same variables, of the same dtypes and shapes, of an equal graph.
                False restores what fits and is not damaged, and tells of the rest, by a warning too.

        Raises:
            CheckpointError: there is no checkpoint, it is damaged, or it is another program's; names file and tensor.
            RuntimeError: this is awaited inside a run that uses the variables.
        """
        return self._restore(user_location(), path, variables, strict)

    async def _restore(
        self,
        called_at: SourceLocation,
        path: str | os.PathLike[str],
        variables: Sequence[Resource] | None,
        strict: bool,
    ) -> Restored:
        self._bind()
        with located_at(called_at):  # a new task has no user line in its call stack
            return await self._checkpoints.restore(as_path(path), variables, strict)

    async def swap_variables(
        self,
        source: str | os.PathLike[str] | Mapping[Resource | str, Value],
        variables: Sequence[Resource] | None = None,
    ) -> tuple[str, ...]:
        """Give variables new values for all runs that start from now on, while runs in flight keep the old ones.

        The values are read and checked, and plans for them compiled, beside the present ones; then all change in one
        step of the event loop. So no run waits, and each run sees one version from its first read to its last. Batches
        and pools are computed for members of one version. A run that another one asks for is a run of its own. The
        memory of an old version is given back when its last run has ended. Queues, tables and counters of random
        numbers stay.

        Writes of a run in flight to the old version would be lost. So the swap is refused while such a run may write a
        variable to be replaced. `restore` waits for such runs.

        Args:
            source: a step, or a directory of steps, whose latest one is taken; any graph may have written it. Or values
                by variable, or by its name, which are copied.
            variables: the variables to replace; None for all of the session, or for the keys of a mapping. A checkpoint
                may have more.

        Returns:
            The names of the variables that have been replaced.

        Raises:
            CheckpointError: there is no checkpoint, it is damaged, a variable is missing there, or has another dtype or
                shape; one is in a container, or is written by a run in flight. All variables are as they were.

        Cancellation: the old version stays.
        """
        self._bind()
        given = source if isinstance(source, Mapping) else as_path(source)
        async with self._swapping:  # in order of the calls: the last one wins
            versions = await self._checkpoints.new_versions(given, variables)
            await self._runs.versions.install(versions)
        return tuple(version.name for version in versions)
