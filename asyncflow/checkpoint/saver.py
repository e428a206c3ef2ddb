"""`Saver`: publishes checkpoints of a session while it trains, and starts it from the latest one."""

from __future__ import annotations

import asyncio
import contextlib
import numbers
import os
import warnings
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Final, overload

from asyncflow.checkpoint.checkpoints import Checkpoints, Restored, SessionSnapshot
from asyncflow.checkpoint.directory import step_of, steps
from asyncflow.errors import AsyncflowError, CheckpointError, GraphError, brief, user_location
from asyncflow.graph.building.build import as_tensor, graph_for, is_symbolic
from asyncflow.graph.graph import Graph, current_graph
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import Access, Effects, Op
from asyncflow.graph.resource import Resource, resources_of
from asyncflow.graph.values.spec import Spec
from asyncflow.streams.beside import call_beside
from asyncflow.values import Conduct, Kernel, Namespace, Value

PATIENCE_S: Final = 10.0
"""Seconds that a saver waits for a moment at which no run is half way; it then skips this step with a warning."""


class Saver(Resource):
    """A saver: publishes checkpoints of one session under a directory, while the session runs.

    ``af.Session(graph, restore=saver)`` attaches it: the session begins with the latest step there, if there is one,
    and from then on the saver publishes: by the clock if it has `every_s`, or where the program calls `maybe_save`, at
    these calls. Taking a checkpoint delays no run; a step that cannot be written is a warning, and training goes on.

    Args:
        path: the directory of the steps; made with the first.
        every_steps: publish once this number of steps has been made since the last checkpoint.
        every_s: publish once this number of seconds has passed since the last checkpoint.
        keep: how many steps stay; older ones are deleted after a publish. None for all.

    Attributes:
        error: why the last step was not published; None if it was.
        step: the number of the last step that was taken, or that the session began with; 0 before any.

    Raises:
        TypeError, ValueError: an argument is of another type, or out of its range.
    """

    noun = "saver"

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        every_steps: int | None = None,
        every_s: float | None = None,
        keep: int | None = None,
    ) -> None:
        super().__init__(None, None)
        self.path = as_path(path)
        self.every_steps = None if every_steps is None else _whole(every_steps, "every_steps", 1)
        self.every_s = None if every_s is None else _seconds(every_s, "every_s")
        self.keep = None if keep is None else _whole(keep, "keep", 1)
        self.error: CheckpointError | None = None
        self._location = user_location()
        self._session: Checkpoints | None = None
        self._beside: asyncio.Task[None] | None = None
        self._writing: asyncio.Task[None] | None = None
        self.step = 0
        self._saved_s = 0.0
        self._asks = False
        """The program says when a step ends."""

    def create_state(self) -> Saver:
        """The saver: it is for one session at a time."""
        return self

    # -- for programs --------------------------------------------------------------------------------------------

    async def save(self, step: int | None = None) -> Path:
        """Publish a checkpoint now, between runs, and return its directory once it is on the disk.

        Args:
            step: number of the step; None for the next free number.

        Raises:
            CheckpointError: the checkpoint cannot be written; existing ones are unchanged.
            RuntimeError: no open session has been given the saver.
        """
        session = self._attached()
        number = None if step is None else _whole(step, "step", 0)
        await self._written()  # waits for the previous step
        path = await session.write(self.path, await session.cut(), number, self.keep)
        self._note(max(step_of(path), self.step))
        return path

    @overload
    def maybe_save(self, step: int) -> Coroutine[object, object, bool]: ...
    @overload
    def maybe_save(self, step: Tensor) -> Node: ...

    def maybe_save(self, step: int | Tensor) -> Coroutine[object, object, bool] | Node:
        """Publish a checkpoint if one is due; the write goes on in the background.

        With a number, to be awaited, between runs: ``await saver.maybe_save(step)`` gives whether one was due. With a
        tensor, a node, for loops that make many steps in one run: it is ordered with all accesses to variables in the
        graph built so far, so put it where a step ends. While the step before is still being written, both wait for
        that.

        Args:
            step: how many steps have been made.

        Raises:
            GraphError: the saver was given neither `every_steps` nor `every_s`, or the step is no number.
            RuntimeError: no open session has been given the saver; as a `KernelError`, if a node finds that.
        """
        if self.every_steps is None and self.every_s is None:
            raise GraphError("maybe_save is never due: give the saver every_steps= or every_s=, or await saver.save()")
        self._asks = True
        if not is_symbolic(step) and current_graph() is not None:
            raise GraphError(f"in a graph, maybe_save takes a tensor that counts the steps; got {brief(step)}")
        if not is_symbolic(step):
            return self._maybe_save(_whole(step, "step", 0), in_order=False)
        with graph_for(step) as graph:
            x = graph.import_tensor(as_tensor(step))
            _saver_spec(x.spec)
            return graph.add_node(SAVER, [x], {"saver": self, "touched": _touched(graph)}, ())

    # -- for sessions --------------------------------------------------------------------------------------------

    async def start(self, session: Checkpoints) -> Restored | None:
        """Attach the saver to a session, which begins with the latest step, if there is one.

        Raises:
            RuntimeError: it is attached to another.
            CheckpointError: the latest step is damaged, or another program's.
        """
        if self._session is not None:
            raise RuntimeError(f"{self!r} belongs to another session, which is still open: make a saver for each")
        restored = await session.start(self.path) if await call_beside(steps, self.path) else None
        self._session = session
        self._note(0 if restored is None else restored.step)
        if self.every_s is not None:
            self._beside = asyncio.create_task(self._publish_beside(self.every_s))
        return restored

    async def stop(self, session: Checkpoints) -> None:
        """Detach the saver from that session, once the checkpoint being written is complete. Idempotent."""
        if self._session is not session:
            return
        beside, self._beside = self._beside, None
        if beside is not None:
            beside.cancel()
            await asyncio.wait([beside])
        try:
            await self._written()
        finally:
            self._session = None

    # -- saving --------------------------------------------------------------------------------------------------

    def _attached(self) -> Checkpoints:
        if self._session is None:
            raise RuntimeError(
                f"the saver of {self.path} belongs to no open session: af.Session(graph, restore=saver) gives it one"
            )
        return self._session

    def _is_due(self, step: int) -> bool:
        if step <= self.step:
            return False
        if self.every_steps is not None and step // self.every_steps > self.step // self.every_steps:
            return True
        return self.every_s is not None and _now_s() - self._saved_s >= self.every_s

    def _note(self, step: int) -> None:
        self.step, self._saved_s = step, _now_s()

    async def _maybe_save(self, step: int, *, in_order: bool) -> bool:
        session = self._attached()
        if not self._is_due(step):
            return False
        await self._written()  # a disk slower than training delays it: otherwise cuts would pile up in memory
        try:
            async with asyncio.timeout(PATIENCE_S):
                cut = await session.cut(in_order=in_order)
        except TimeoutError:
            self._say(CheckpointError(_no_moment(step)))
            return False
        if not self._is_due(step):  # another run came first while this one waited
            return False
        self._note(step)
        self._writing = asyncio.create_task(self._write(session, cut, step, self._writing))
        return True

    async def _write(
        self, session: Checkpoints, cut: SessionSnapshot, step: int | None, before: asyncio.Task[None] | None
    ) -> None:
        if before is not None:
            await asyncio.wait([before])
        try:
            path = await session.write(self.path, cut, step, self.keep)
        except AsyncflowError as error:
            self._say(error)
        else:
            self.error = None
            self.step = max(step_of(path), self.step)

    async def _written(self) -> None:
        """Return when no checkpoint is being written; a cancelled caller leaves the writer at work."""
        if self._writing is not None:
            await asyncio.wait([self._writing])
            self._writing = None

    async def _publish_beside(self, every_s: float) -> None:
        """Publish by the clock, as long as the program does not say when."""
        while True:
            await asyncio.sleep(every_s)
            if self._asks:
                return
            session = self._attached()
            try:
                async with asyncio.timeout(PATIENCE_S):
                    cut = await session.cut()
            except TimeoutError:
                self._say(CheckpointError(_no_moment(None)))
                continue
            self._note(self.step)  # the time of the cut, not of the end of writing
            await self._write(session, cut, None, None)

    def _say(self, error: AsyncflowError) -> None:
        """Note and warn of a step that was not published: training goes on."""
        self.error = error if isinstance(error, CheckpointError) else CheckpointError(str(error))
        with contextlib.suppress(UserWarning):  # if warnings are errors, only `error` reports it
            warnings.warn_explicit(
                f"a checkpoint was not published: {error}", UserWarning, self._location.file, self._location.line
            )

    def __repr__(self) -> str:
        return f"Saver({str(self.path)!r})"


def as_path(path: str | os.PathLike[str]) -> Path:
    """`path` as given to `save`, `restore` or a saver.

    Raises:
        TypeError: it is none.
        ValueError: it is empty.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"the path of a checkpoint is a string or a Path; got {brief(path)}")
    if not os.fspath(path):
        raise ValueError("the path of a checkpoint is empty")
    return Path(path)


def as_step(step: int) -> int:
    """`step` as given to `save`.

    Raises:
        TypeError, ValueError: it is no whole number, or less than 0.
    """
    return _whole(step, "step", 0)


def _seconds(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} is a number of seconds, or None; got {brief(value)}")
    seconds = float(value)
    if not seconds > 0:
        raise ValueError(f"{name} is more than 0 seconds; got {value}")
    return seconds


def _whole(value: object, name: str, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} is a whole number; got {brief(value)}")
    if value < least:
        raise ValueError(f"{name} is at least {least}; got {value}")
    return int(value)


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def _no_moment(step: int | None) -> str:
    which = "" if step is None else f"step {step}: "
    return (
        f"{which}for {PATIENCE_S:g} s a run that writes several variables was half way; if one run makes all steps, "
        "put saver.maybe_save(step) into its loop"
    )


# -- the node --------------------------------------------------------------------------------------------------------


def _touched(graph: Graph) -> tuple[Resource, ...]:
    """The resources of all nodes so far: in `graph`, and around it."""
    around: Sequence[Node] = ()
    inner: Graph | None = graph
    while inner is not None:
        around = (*around, *inner.walk())
        inner = inner.parent
    found = dict.fromkeys(resource for node in around for resource in resources_of(node))
    return tuple(resource for resource in found if not isinstance(resource, Saver))


def _saver_spec(step: Spec, **_: object) -> tuple[Spec, ...]:
    if step.dtype.kind not in "iu" or step.shape not in (None, ()):
        raise GraphError(f"maybe_save takes the number of steps made, a whole number; got {step}")
    return ()


def _saver_kernel(xp: Namespace, *, saver: Saver, touched: object) -> Kernel:
    async def call(step: Value) -> tuple[()]:
        await saver._maybe_save(int(step), in_order=True)  # type: ignore[call-overload]  # a number of NumPy's
        return ()

    return call


def _saver_effects(node: Node) -> Effects:
    reads = dict.fromkeys(resource.effect_key for resource in node.attrs["touched"])
    return ((node.attrs["saver"].effect_key, Access.WRITE), *((key, Access.READ) for key in reads))


SAVER = Op(
    "maybe_save", _saver_spec, _saver_kernel, effects=_saver_effects, conduct=Conduct(is_async=True, is_user=True)
)
"""Not registered, like ops of users: a graph that is read from a file saves nothing."""
