"""The steps of a pooled loop whose rows stand in the memory of a device: launched, and not waited for.

A step is launched before it is known which rows go on after the previous step, whose flags are copied to the host
meanwhile. Several steps are launched at once while no row has come or gone for a while. A row that has ended is
computed once more; then slabs are made of the rows that are left and the new ones. Where a step fails, the
rows come to the host as they were before, and are stepped there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from asyncflow.errors import contained_exits
from asyncflow.lift.calls.pooled import SEVERAL
from asyncflow.runtime.shared.rows.pool import RowGroup
from asyncflow.runtime.watch.trace import current_trace
from asyncflow.streams.beside import call_beside

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Mapping, Sequence

    from asyncflow.compiler.plan import Plan
    from asyncflow.runtime.run.run import Run
    from asyncflow.runtime.shared.pools import LoopPool, PooledActivation
    from asyncflow.runtime.shared.rows.placed_rows import PlacedRows
    from asyncflow.values import Array, Value

    Group = PlacedRows[PooledActivation]


class _Before(NamedTuple):
    """The places of values before a step.

    Attributes:
        places: of rows in the slabs.
        slabs: of the inputs that have rows.
        steps: number of steps that the pool had made.
    """

    places: Mapping[PooledActivation, int]
    slabs: Sequence[Value]
    steps: int


class _StepAhead(NamedTuple):
    """A step that was launched.

    Attributes:
        before: where values stood before it, and before the rows for it were brought together.
        run: that it is.
        rows: whose.
        following: their next variables, on the device.
        made: how many steps that is.
    """

    before: _Before
    run: _PlacedRun
    rows: Sequence[PooledActivation]
    following: Sequence[Value]
    made: int


class _PlacedRun:
    """A run of which some values stay on the device.

    Args:
        run: that was started.
        staying: the numbers of these values.
    """

    def __init__(self, run: Run, staying: Sequence[int | None]) -> None:
        self._run = run
        self._staying = [index for index in staying if index is not None]
        self._values: list[Array] | None = None

    async def values(self) -> Sequence[Array]:
        """Return all values at its end."""
        values = self._values
        if values is None:
            with contained_exits:
                values = self._values = cast("list[Array]", await self._run.wait())
        return values

    async def staying(self) -> Sequence[Value]:
        """Return the staying values, which are there once they have been launched: mostly by now."""
        with contained_exits:
            is_there = await self._run.wait_for_staying()
        if is_there:
            return [self._run.stayed[index] for index in self._staying]
        return (await self.values())[: len(self._staying)]


class PlacedSteps:
    """The steps of one pool.

    Args:
        pool: whose.
    """

    def __init__(self, pool: LoopPool) -> None:
        self._pool = pool
        self._unread: _StepAhead | None = None
        self._several: asyncio.Task[Plan] | None = None

    async def step(self, group: Group) -> None:
        """Launch a step of all rows, and then read which rows go on after the previous step."""
        unread, self._unread = self._unread, None
        before = _Before(dict(zip(group.rows, group.places, strict=True)), group.slabs, self._pool.rows.steps)
        try:
            self._unread = await self._launch(group, before)
        except Exception as error:
            if unread is None or await self._read(group, unread):
                await self._fail(group, before, error)
        else:
            if unread is not None:
                await self._read(group, unread)
        if not group.rows:
            await self.forget()

    async def catch_up(self, group: Group) -> None:
        """Read which rows go on after the last launched step."""
        unread, self._unread = self._unread, None
        if unread is not None:
            await self._read(group, unread)

    async def forget(self) -> None:
        """Wait for the end of a step whose results no row uses."""
        unread, self._unread = self._unread, None
        if unread is not None:
            try:
                await unread.run.values()
            except Exception:
                pass  # rows that have ended have no caller to report a failure to

    async def _launch(self, group: Group, before: _Before) -> _StepAhead:
        pool = self._pool
        if (exchanged := group.exchanged()) is not None:
            plan = await pool.bodies.plan_of(pool.shared.exchange)
            group.settled(await self._start(plan, exchanged, group.width).staying())
        several = self._plan_of_several() if pool.may_step(SEVERAL) else None
        plan = await pool.bodies.plan_of(pool.shared.once) if several is None else several
        run = self._start(plan, group.all_inputs(), pool.shared.n_vars)
        following = await run.staying()
        group.slabs = [*following, *group.slabs[len(following) :]]
        made = 1 if several is None else SEVERAL
        pool.rows.steps += made
        return _StepAhead(before, run, tuple(group.rows), following, made)

    def _plan_of_several(self) -> Plan | None:
        """The plan of several steps; None as long as it is being made."""
        if self._several is None:
            self._several = self._pool.batches.beside(self._make_several())
        return self._several.result() if self._several.done() else None

    async def _make_several(self) -> Plan:
        shared = self._pool.shared
        return await self._pool.bodies.plan_of(await call_beside(lambda: shared.several, outlasts_program=False))

    def _start(self, plan: Plan, values: Sequence[Value], staying: int = 0) -> _PlacedRun:
        run = self._pool.bodies.start_batch(plan, values, trace=current_trace(), staying=range(staying))
        return _PlacedRun(run, plan.fetches[:staying])

    async def _read(self, group: Group, step: _StepAhead) -> bool:
        """Has those leave that do not go on after a step; False if that failed, and so have all later ones."""
        pool = self._pool
        try:
            goes_on = (await step.run.values())[-1]
            there = set(group.rows)
            left = [activation in there for activation in step.rows]
            if any(left):
                pool.count(sum(left), step.made)
            ended = [row for row in np.logical_not(goes_on).nonzero()[0].tolist() if left[row]]
            if not ended:
                return True
            plan = await pool.bodies.plan_of(pool.shared.taking(pool.shared.n_vars))
            results = await self._start(plan, [np.array(ended), *step.following]).values()
        except Exception as error:
            await self._fail(group, step.before, error)
            return False
        activations = [step.rows[index] for index in ended]
        for activation in activations:
            if activation in group.rows:  # or else it was cancelled meanwhile
                pool.rows.remove(group, group.rows.index(activation))
        pool.deliver([(each, [x[k, ...].copy() for x in results]) for k, each in enumerate(activations)])
        return True

    async def _fail(self, group: Group, before: _Before, error: Exception) -> None:
        """Brings rows to the host as they were before a step that has failed; ends them if it cannot be repeated."""
        pool = self._pool
        await self.forget()
        if not pool.shared.is_repeatable:
            pool.end_group(group, error)
            return
        rows = pool.rows
        rows.group_type = RowGroup
        rows.steps = before.steps
        placed = [each for each in group.rows if before.places.get(each, -1) >= 0]
        if placed:
            places = np.array([before.places[each] for each in placed])
            plan = await pool.bodies.plan_of(pool.shared.taking(len(pool.shared.has_rows)))
            found = await self._start(plan, [places, *before.slabs]).values()
            for k, each in enumerate(placed):
                each.inputs = group.with_rows(each, [x[k, ...] for x in found])
        fresh = set(group.rows).difference(placed)
        for each in rows.remove_where(lambda _: True):
            each.since = 0 if each in fresh else each.since - before.steps
            each.is_checked = True
            pool.join(each)
