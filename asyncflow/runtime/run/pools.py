"""The pooled loops of a session: activations of different runs that are stepped together.

Each pool is driven by one task, a step and a pass of the event loop at a time, so that others may join in between. A
step is a run of the loop's own graph; see `asyncflow.lift.pooled`. `asyncflow.runtime.pool` keeps the rows.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from asyncflow.errors import LoopIdentity, TooManyIterations
from asyncflow.lift.pooled import SharedLoop, install_pool_gatherer
from asyncflow.runtime.pool import Activation, PoolRows
from asyncflow.runtime.run.batches import common_values
from asyncflow.runtime.scheduler.turn import Turn
from asyncflow.streams.holding import current_part

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from asyncflow.compiler.plan import Plan
    from asyncflow.runtime.run.batches import Batches
    from asyncflow.values import Array


@dataclass(slots=True, eq=False)
class PooledActivation(Activation):
    """One activation, and who waits for it."""

    done: asyncio.Future[Sequence[Array]] = field(kw_only=True)


class Pools:
    """Activations of pooled loops of one session.

    Args:
        batches: of the session.
        max_iterations: of any loop; None for no limit.
    """

    def __init__(self, batches: Batches, max_iterations: int | None) -> None:
        self._batches = batches
        self._max_iterations = max_iterations
        self._pools: dict[Hashable, PoolRows[PooledActivation]] = {}

    async def join(self, shared: SharedLoop, inputs: tuple[Array, ...]) -> Sequence[Array]:
        """The last loop variables of one activation.

        Cancellation: it leaves before the next step.

        Raises:
            Exception: a step of this activation failed.
        """
        activation = PooledActivation(inputs, done=asyncio.get_running_loop().create_future())
        key = (shared, *common_values(shared.has_rows, inputs))
        pool = self._pools.get(key)
        if pool is None:
            pool = self._pools[key] = PoolRows(shared.pool.capacity, shared.n_vars, shared.has_rows)
            self._batches.beside(self._drive(key, shared, pool))
        pool.join(activation)
        try:
            return await activation.done
        except asyncio.CancelledError:
            activation.is_gone = True
            raise

    async def _drive(self, key: Hashable, shared: SharedLoop, pool: PoolRows[PooledActivation]) -> None:
        """Steps a pool until nobody is in it."""
        try:
            check, step = await self._batches.plan_of(shared.check), await self._batches.plan_of(shared.step)
            while not pool.is_empty:
                self._drop(shared, pool)
                first = pool.admit()
                if len(pool.rows) > first:
                    _deliver(pool.settle(first, await self._flags(shared, pool, check, first)))
                if pool.rows:
                    await self._step(shared, pool, step)
                await asyncio.sleep(0)  # others may join
        except Exception as error:  # no plan, or the session closes
            for activation in (*pool.rows, *pool.waiting):
                _fail(activation, error)
        finally:
            del self._pools[key]

    async def _flags(self, shared: SharedLoop, pool: PoolRows[PooledActivation], check: Plan, first: int) -> Array:
        """Which of those that joined go on; who fails does not."""
        end = len(pool.rows)
        found = await self._computed(shared, pool, check, first, end)
        return np.zeros(end - first, bool) if found is None else found[0]

    async def _step(self, shared: SharedLoop, pool: PoolRows[PooledActivation], step: Plan) -> None:
        count = len(pool.rows)
        self._batches.count_call(shared, count)
        found = await self._computed(shared, pool, step, 0, count)
        if found is None:
            pool.settle(0, np.zeros(count, bool))
        else:
            *following, goes_on = found
            _deliver(pool.advance(following, goes_on))

    async def _computed(
        self, shared: SharedLoop, pool: PoolRows[PooledActivation], plan: Plan, first: int, end: int
    ) -> list[Array] | None:
        """Values for a range of rows; None if there are none for any of them.

        What cannot be computed for all of them is computed in halves: memory may be short, or a row is at fault. Such a
        one fails alone, and has zeros, by which it does not go on.
        """
        try:
            return await self._batches.compute(plan, pool.inputs(first, end))
        except Exception as error:
            if end - first == 1 or not shared.is_repeatable:
                for activation in pool.rows[first:end]:
                    _fail(activation, error)
                return None
        middle = (first + end) // 2
        halves = [(at, await self._computed(shared, pool, plan, at, to)) for at, to in ((first, middle), (middle, end))]
        known = next((values for _, values in halves if values is not None), None)
        if known is None:
            return None
        whole = [np.zeros((end - first, *value.shape[1:]), value.dtype) for value in known]
        for at, values in halves:
            for rows, value in zip(whole, values or (), strict=False):
                rows[at - first : at - first + len(value)] = value
        return whole

    def _drop(self, shared: SharedLoop, pool: PoolRows[PooledActivation]) -> None:
        """Removes who is gone, or has made too many steps."""
        if self._max_iterations is None and not any(activation.is_gone for activation in pool.rows):
            return
        limit = self._max_iterations
        for row in reversed(range(len(pool.rows))):
            activation = pool.rows[row]
            if activation.is_gone:
                pool.remove(row)
            elif limit is not None and pool.steps - activation.since >= limit:
                _fail(pool.remove(row), TooManyIterations(LoopIdentity(shared.label), limit))


def _deliver(ended: Sequence[tuple[PooledActivation, list[Array]]]) -> None:
    for activation, results in ended:
        if not activation.done.done():
            activation.done.set_result(results)


def _fail(activation: PooledActivation, error: Exception) -> None:
    if not activation.done.done():
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        activation.done.set_exception(cause)


async def _gather(shared: SharedLoop, inputs: tuple[Array, ...]) -> Sequence[Array]:
    part = current_part()
    assert part is not None and isinstance(part.owner, Turn) and part.owner.batches is not None
    pools = part.owner.batches.pools
    assert pools is not None
    return await pools.join(shared, inputs)


install_pool_gatherer(_gather)

__all__ = ["Pools"]
