"""Vertex maps of a session that are shared: sets of vertices of different runs that are computed together.

Each is driven by one task, a set of each run and a pass of the event loop at a time, so that others may join in
between. A step is a run of the core's own graph; see `asyncflow.vertex.shared`. `asyncflow.runtime.vertex_rows` keeps
the rows. A run waits in line, as for a pooled loop.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from asyncflow.runtime.run.batches import common_values
from asyncflow.runtime.scheduler.turn import Turn
from asyncflow.runtime.vertex_rows import RunOfSets, VertexRows
from asyncflow.state.waiting.lines import PlaceInLine, TellingState, ToldPlace
from asyncflow.streams.holding import current_part
from asyncflow.vertex.shared import SharedSets, install_set_gatherer

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from asyncflow.compiler.plan import Plan
    from asyncflow.runtime.run.batches import Batches
    from asyncflow.values import Array, Value


class VertexMember(ToldPlace):
    """The vertices of one run, and its firing's place in line.

    Attributes:
        sets: the vertices.
    """

    is_called_outside = True

    __slots__ = ("sets",)

    def __init__(self, pool: VertexPool, sets: RunOfSets) -> None:
        super().__init__(pool, f"the sets of {pool.shared.label}", tuple)
        self.sets = sets


class VertexPool(TellingState):
    """Runs of one shared vertex map for which what they have in common is the same.

    Args:
        pools: those of the session.
        key: names it among them.
        shared: the vertex map.
        common: what all have in common.
    """

    def __init__(self, pools: VertexPools, key: Hashable, shared: SharedSets, common: Sequence[Array]) -> None:
        super().__init__()
        self.shared = shared
        self._pools, self._batches, self._key, self._common = pools, pools.batches, key, common
        self.rows: VertexRows[VertexMember] = VertexRows(shared.specs)

    def places(self) -> list[PlaceInLine]:
        """Everybody in it."""
        return [*self.rows.members, *self.rows.waiting]

    def describe(self) -> str:
        """How many there are."""
        return f"sets of {len(self.rows.members)} runs are computed together"

    async def drive(self) -> None:
        """Computes sets until nobody is there."""
        rows, failure = self.rows, None
        try:
            plan = await self._batches.plan_of(self.shared.program)
            while True:
                rows.admit()
                self._deliver()  # graphs without vertices
                if rows.members:
                    await self._step(plan, list(rows.members))
                    self._deliver()
                if rows.is_empty:
                    break
                await asyncio.sleep(0)  # others may join
        except Exception as error:  # no plan, or the session closes
            failure = error
        finally:
            self._pools.forget(self._key)
        if failure is not None:
            self._end([*rows.members, *rows.waiting], failure)
            del failure

    async def _step(self, plan: Plan, members: list[VertexMember]) -> None:
        """Computes the next set of each; if that fails, of each half, until the one at fault is alone."""
        at = self.rows.rows(members)
        try:
            own = self.rows.inputs(members, at)
            split = self.shared.counts.own
            found = await self._batches.compute(plan, [*own[:split], *self._common, *own[split:]])
        except Exception as error:
            self._batches.count_call(self.shared, len(members), failed=1)
            if len(members) == 1 or not self.shared.is_repeatable:
                self.rows.remove(members)
                self._end(members, error)
                return
            middle = len(members) // 2
            for half in (members[:middle], members[middle:]):
                await self._step(plan, half)
            return
        self._batches.count_call(self.shared, len(members))
        self.rows.advance(members, at, found)

    def _deliver(self) -> None:
        for member, rows in self.rows.ended():
            self.tell(member, rows)

    def _end(self, members: Sequence[VertexMember], error: Exception) -> None:
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        if cause is not error:
            cause.add_note(f"in {self.shared.label}, whose sets are computed with those of other runs: {error}")
        for member in members:
            self.tell(member, cause)
        del error, cause  # who is told raises it, and its traceback leads to this frame: that would be a cycle


class VertexPools:
    """The shared vertex maps of a session in which somebody is.

    Args:
        batches: of the session.
    """

    def __init__(self, batches: Batches) -> None:
        self.batches = batches
        self._pools: dict[Hashable, VertexPool] = {}

    def join(self, shared: SharedSets, inputs: tuple[Array, ...]) -> VertexMember:
        """The place in line of one run, whose results are rows of states, and what else is asked for."""
        counts = shared.counts
        sets, common = RunOfSets.of(inputs, counts), inputs[sum(counts[:3]) :]
        shapes = tuple((x.dtype, x.shape[1:]) for x in sets.own)
        key = (shared, shapes, *common_values(shared.has_rows, inputs))
        pool = self._pools.get(key)
        if pool is None:
            pool = self._pools[key] = VertexPool(self, key, shared, common)
            self.batches.beside(pool.drive())
        member = VertexMember(pool, sets)
        pool.rows.waiting.append(member)
        return member

    def forget(self, key: Hashable) -> None:
        """Nobody is in a pool any more."""
        del self._pools[key]


def _gather(shared: SharedSets, inputs: tuple[Array, ...]) -> Value:
    part = current_part()
    assert part is not None and isinstance(part.owner, Turn) and part.owner.batches is not None
    pools = part.owner.batches.vertex_pools
    assert pools is not None
    return pools.join(shared, inputs)


install_set_gatherer(_gather)

__all__ = ["VertexMember", "VertexPool", "VertexPools"]
