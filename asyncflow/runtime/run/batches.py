"""The batches of a session: firings that wait for others, and the runs that compute them together.

A batch is a run like any other, of the body's own graph; see `asyncflow.lift.batched`. `asyncflow.runtime.batcher` says
who is in it, and when it starts.
"""

from __future__ import annotations

import asyncio
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Protocol

import numpy as np

from asyncflow.compiler.program.request import PlanRequest
from asyncflow.lift.batched import BodyProgram, SharedBody, install_gatherer
from asyncflow.runtime.batcher import BatchCall, Batcher, Gathered
from asyncflow.runtime.scheduler.turn import Turn
from asyncflow.streams.holding import current_part

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from asyncflow.compiler.plan import Plan
    from asyncflow.values import Array

_SAME_BYTES = 4096
"""Values that are to be the same for all members are compared byte by byte up to this size; larger ones are the same
array, or they are not."""


@dataclass(slots=True, eq=False)
class BatchMember(Gathered):
    """One firing.

    Attributes:
        inputs: of its node.
        done: gets its results.
        context: the caller's context variables.
    """

    shared: SharedBody = field(kw_only=True)
    inputs: tuple[Array, ...] = field(kw_only=True)
    done: asyncio.Future[Sequence[Array]] = field(kw_only=True)
    context: Context = field(kw_only=True)


class RunsBatches(Protocol):
    """Runs the bodies of batched functions."""

    async def plan_of(self, request: PlanRequest) -> Plan: ...

    def run_short(self, plan: Plan, values: list[Array]) -> list[Array] | None:
        """The fetched values; None if that is not for the event loop."""

    async def run_batch(self, plan: Plan, values: list[Array]) -> list[Array]:
        """The fetched values."""


class Batches:
    """Members of one session that wait or are under way.

    Args:
        turn: of the session.
        runs: of the session.
        seed: of the sizes that are tried out.
    """

    def __init__(self, turn: Turn, runs: RunsBatches, seed: int) -> None:
        self._turn = turn
        self._runs = runs
        self._batcher: Batcher[BatchMember] = Batcher(seed)
        self._plans: dict[BodyProgram, Plan] = {}
        self._under_way: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    async def join(self, shared: SharedBody, inputs: tuple[Array, ...]) -> Sequence[Array]:
        """The results of one member.

        Cancellation: it leaves; if it is under way, its result is dropped.

        Raises:
            Exception: computing this member failed.
        """
        turn = self._turn
        done: asyncio.Future[Sequence[Array]] = turn.loop.create_future()
        nbytes = sum(getattr(value, "nbytes", 0) for value in inputs)
        context = copy_context()
        member = BatchMember(nbytes, turn.clock(), shared=shared, inputs=inputs, done=done, context=context)
        kind, signature = _signatures(shared, inputs)
        self._batcher.offer(signature, kind, shared.batch, member)
        turn.wake()
        try:
            return await done
        except asyncio.CancelledError:
            self._batcher.withdraw(signature, member)
            raise

    def clear(self) -> None:
        """Forgets the plans: the session has closed."""
        self._plans.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def flush(self, *, is_idle: bool) -> None:
        """Starts what is due; `is_idle` says that nothing else in the session can go on."""
        if not self._batcher.lanes:
            return
        for call in self._batcher.take(self._turn.clock(), is_idle=is_idle):
            call.members[0].context.copy().run(self._start, call)
        self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        wake_ns = self._batcher.wake_ns()
        if wake_ns < inf:
            self._timer = self._turn.loop.call_later((wake_ns - self._turn.clock()) / 1e9, self._turn.wake)

    def _start(self, call: BatchCall[BatchMember]) -> None:
        """Computes a batch: here and now, if it is short, or else beside."""
        started_ns = self._turn.clock()
        members = call.members
        shared = members[0].shared
        program = shared.one if len(members) == 1 else shared.many
        plan = self._plans.get(program)
        try:
            found = None if plan is None else self._runs.run_short(plan, _values(members))
        except Exception as error:
            self._failed(call, error)
            return
        if found is not None:
            self._ended(call, found, started_ns)
            return
        task = self._turn.loop.create_task(self._compute(call, program))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def _compute(self, call: BatchCall[BatchMember], program: BodyProgram) -> None:
        try:
            plan = self._plans.get(program)
            if plan is None:
                plan = await self._runs.plan_of(PlanRequest(program.graph, program.fetches, program.feeds))
                self._plans[program] = plan
            started_ns = self._turn.clock()
            results = await self._runs.run_batch(plan, _values(call.members))
        except Exception as error:
            self._failed(call, error)
        else:
            self._ended(call, results, started_ns)

    def _ended(self, call: BatchCall[BatchMember], results: Sequence[Array], started_ns: int) -> None:
        self._batcher.ended(call, self._turn.clock() - started_ns)
        members = call.members
        if len(members) > 1:
            for value in results:
                if isinstance(value, np.ndarray):
                    value.flags.writeable = False  # members have views of it
        for row, member in enumerate(members):
            if not member.done.done():
                member.done.set_result(results if len(members) == 1 else [value[row] for value in results])
        if self._batcher.lanes:
            self._turn.wake()

    def _failed(self, call: BatchCall[BatchMember], error: Exception) -> None:
        shared = call.members[0].shared
        if self._batcher.failed(call, divisible=shared.is_repeatable):
            cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
            cause.add_note(f"in {shared.label}, a batched function, in a call for {len(call.members)}: {error}")
            for member in call.members:
                if not member.done.done():
                    member.done.set_exception(cause)
        self._turn.wake()


def _values(members: Sequence[BatchMember]) -> list[Array]:
    """The values that the body's graph is fed for these members."""
    first = members[0]
    if len(members) == 1:
        return list(first.inputs)
    return [
        np.stack([member.inputs[place] for member in members]) if has_rows else first.inputs[place]
        for place, has_rows in enumerate(first.shared.has_rows)
    ]


def _signatures(shared: SharedBody, inputs: Sequence[Array]) -> tuple[Hashable, Hashable]:
    """Equal for members whose calls take equally long, and for those that may share one."""
    kind = (shared, *((value.dtype, value.shape) for value in inputs))
    pairs = zip(inputs, shared.has_rows, strict=True)
    return kind, (kind, *(_identity(value) for value, has_rows in pairs if not has_rows))


def _identity(value: Array) -> Hashable:
    return value.tobytes() if value.nbytes <= _SAME_BYTES else id(value)


async def _gather(shared: SharedBody, inputs: tuple[Array, ...]) -> Sequence[Array]:
    part = current_part()
    assert part is not None and isinstance(part.owner, Turn) and part.owner.batches is not None
    return await part.owner.batches.join(shared, inputs)


install_gatherer(_gather)

__all__ = ["BatchMember", "Batches"]
