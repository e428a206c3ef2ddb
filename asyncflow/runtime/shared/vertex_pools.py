"""Vertex maps of a session that are shared: sets of vertices of different runs that are computed together.

A task drives each map, a set of each run and a pass of the event loop at a time. Others may join in between. A step is
a run of the core's own graph; see `asyncflow.vertex.shared`. `VertexRows` keeps the rows. A run waits in line, as for a
pooled loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Iterable, Sequence

from asyncflow.compiler.plan import Plan
from asyncflow.devices.machine.cost import INLINE_LIMIT_NS
from asyncflow.devices.memory import MemoryAccount
from asyncflow.errors import of_firing
from asyncflow.lift.calls.batched import install_gatherer
from asyncflow.runtime.executor.turn import BURST_NS, Turn
from asyncflow.runtime.lines.halving import in_halves
from asyncflow.runtime.lines.priority_line import PriorityLine
from asyncflow.runtime.shared.batches import Batches
from asyncflow.runtime.shared.rows.vertex_rows import RunOfSets, VertexGroup, VertexRows, joined
from asyncflow.runtime.shared.work import SharedMember, SharedWork, SharedWorks, common_values
from asyncflow.state.waiting.lines import PlaceInLine
from asyncflow.streams.holding import RunPart, current_part
from asyncflow.values import Array, Value
from asyncflow.vertex.shared import SharedSets

_MANY = 4096
"""Graphs of more vertices are ordered by themselves, so that other runs do not wait for that."""


class VertexMember(SharedMember):
    """The vertices of one run, and its firing's place in line.

    Attributes:
        sets: the vertices.
    """

    __slots__ = ("sets",)

    def __init__(self, pool: VertexPool, sets: RunOfSets, part: RunPart) -> None:
        super().__init__(pool, f"the sets of {pool.shared.label}", part)
        self.sets = sets


class VertexPool(SharedWork):
    """Runs of one shared vertex map whose shared inputs are equal.

    Args:
        pools: pools of the session.
        key: names it among them.
        shared: the vertex map.
        common: the shared inputs.
    """

    def __init__(self, pools: VertexPools, key: Hashable, shared: SharedSets, common: Sequence[Array]) -> None:
        super().__init__(pools, key)
        self.shared, self.policy, self.label = shared, shared.policy, shared.label
        self._common = common
        self.rows: VertexRows[VertexMember] = VertexRows(shared.specs, shared.counts.states, shared.gives_rows)
        self._line = PriorityLine[float, VertexMember]()
        """Runs that join with a later step."""
        self._memory: MemoryAccount
        self._joining: list[VertexMember] = []
        """Runs whose graphs are being ordered."""
        self._ended: list[tuple[VertexMember, list[Array]]] = []
        """Runs that are still to be told, and their results."""
        self._plan: Plan
        """By which sets are computed."""
        self._order: Plan | None = None
        """By which graphs are put in order, while sets are computed."""
        self._burst_end = 0.0
        self._is_awaited = False
        """True if arrivals are looked at in the next pass of the event loop."""

    def members(self) -> list[VertexMember]:
        """See `SharedWork.members`."""
        return [*self.rows.members, *self._line, *self._joining]

    def places(self) -> list[PlaceInLine]:
        """See `LinedState.places`; those too that are still to be told."""
        return [*self.members(), *(member for member, _ in self._ended)]

    def describe(self) -> str:
        """Return the number of runs in words."""
        return f"sets of {len(self.rows.members)} runs are computed together"

    def join(self, member: VertexMember) -> None:
        """One joins when its graph is in order, which is made so while others compute."""
        self._line.add(member.priority, member.due_s, member)
        self.come(member.priority)
        self.batches.steps.look()
        if not (self._is_awaited or self.policy is not None):
            self._is_awaited = True
            self.batches.turn.loop.call_soon(self._arrived)

    async def prepare(self) -> None:
        """See `SharedWork.prepare`."""
        self._plan, self._order = await self.works.code_of(self.shared, None, self._compiled)
        self.stepper.place = self._plan.partitions[0].device
        self._burst_end = self.batches.turn.now() + BURST_NS

    async def _compiled(self) -> tuple[Plan, Plan]:
        plan_of = self.batches.bodies.plan_of
        return await plan_of(self.shared.program), await plan_of(self.shared.order)

    async def step(self) -> None:
        """Compute the next set of each run."""
        rows = self.rows
        self._count(rows.drop())
        if not rows.groups:
            taken = self._taken()
            while taken:
                await self._join(taken.pop(0))
        elif self.policy is not None and self._line:
            self._arrived()
        if rows.groups:
            # While a thread computes this step, members that ended with the previous step go on, and new members join.
            if self._ended:
                self.batches.turn.loop.call_soon(self._deliver)
            await in_halves(list(rows.groups), self._compute, self._failed)
            self._ended += rows.ended()

    async def goes_on(self) -> bool:
        """See `SharedWork.goes_on`; a run that is alone has several sets computed before others may join."""
        rows, turn = self.rows, self.batches.turn
        if not rows.groups:
            self._deliver()
            if not (self._line or self._joining):
                return False
            if self.is_held or not self._line or (self.policy is not None and self._joining):
                await self.wait_for_change()
        elif rows.is_for_one and not self._line and turn.now() < self._burst_end:
            return True
        await asyncio.sleep(0)  # others may join
        self._burst_end = turn.now() + BURST_NS
        return True

    def close(self) -> None:
        """Have no graphs put in order any more."""
        self._order = None

    def _arrived(self) -> None:
        """Begin to order the graphs of waiting runs."""
        self._is_awaited = False
        if self._order is not None:
            for members in self._taken():
                self.batches.beside(self._join(members))

    def _taken(self) -> list[list[VertexMember]]:
        """Return lists of waiting runs to put in order together; large graphs begin here, in tasks of their own."""
        line = self._line
        for member in [each for each in line if each.is_gone]:
            line.discard(member.priority, member.due_s, member)
        most = self.joining(line, len(self.rows.members) + len(self._joining))
        together, empty = self.rows.sorted_out([line.pop() for _ in range(most)])
        self._ended += empty
        found = []
        for members in together:
            self._joining += members
            large = [member for member in members if member.sets.size > _MANY]
            for member in large:
                self.batches.beside(self._join([member]))
            if len(large) < len(members):
                found.append([member for member in members if member not in large])
        return found

    async def _join(self, members: list[VertexMember]) -> None:
        """Order graphs as one; if that fails, each by itself, and runs at fault are told."""
        failure = None
        try:
            group = await self._in_order(members)
            self.rows.groups.append(group)  # `groups` may be a new list by now
        except Exception as error:  # an invalid input graph, not a node of the function
            failure = error.__cause__ if isinstance(error.__cause__, Exception) else error
        if failure is not None and len(members) > 1:
            del failure  # and values in its frames
            for member in members:
                await self._join([member])
            return
        self._joining = [member for member in self._joining if member not in members]
        self.changed.admit()
        if failure is not None:
            self._fail(members, failure)
            del failure

    async def _in_order(self, members: list[VertexMember]) -> VertexGroup[VertexMember]:
        assert self._order is not None
        self._memory = self.batches.bodies.memory_of(self._order)
        graphs = joined([member.sets for member in members])
        schedule = await self.batches.compute(self._order, graphs, self._limit_ns)
        group = VertexGroup.of(members, schedule, self.shared.specs)
        for array in group.arrays():
            self._memory.track(array, self.shared.label)
        return group

    def _count(self, groups: Iterable[VertexGroup[VertexMember]]) -> None:
        """Has the rows of groups counted that are new, though their members are not."""
        for group in groups:
            for array in group.arrays():
                self._memory.count(array, self.shared.label)

    async def _compute(self, groups: Sequence[VertexGroup[VertexMember]]) -> None:
        """Compute the next set of each group."""
        own, split = self.rows.inputs(groups), self.shared.counts.own
        values = [*own[:split], *self._common, *own[split:]]
        self.rows.advance(groups, await self.batches.compute(self._plan, values, self._limit_ns))
        self.batches.count_call(self.shared, sum([len(group.places) for group in groups]))

    def _failed(
        self, groups: Sequence[VertexGroup[VertexMember]], error: Exception
    ) -> Sequence[VertexGroup[VertexMember]]:
        """Make groups of the runs whose sets have failed, each of which may be at fault; or end the runs."""
        size = sum([len(group.places) for group in groups])
        self.batches.count_call(self.shared, size, failed=1)
        if size == 1 or not self.shared.is_repeatable:
            self.rows.remove(groups)
            self._fail([member for group in groups for member in group.members], of_firing(error))
            return ()
        parted = self.rows.part(groups)
        self._count(parted)
        return parted

    @property
    def _limit_ns(self) -> int:
        """Return how long it holds the event loop at a time: the turn is its own, as it is of steps of pooled loops.

        A thread would hold the interpreter's lock by turns with the loop: it takes longer, and saves nothing.
        """
        return max(BURST_NS // self.works.sharing, INLINE_LIMIT_NS)

    def _deliver(self) -> None:
        ended, self._ended = self._ended, []
        for member, found in ended:
            self.tell(member, found)

    def fail_all(self, error: Exception) -> None:
        """See `SharedWork.fail_all`; members whose sets are all computed have their results."""
        self._deliver()
        self._fail(self.members(), error)
        del error

    def _fail(self, members: Sequence[VertexMember], error: BaseException) -> None:
        for member in members:
            self.tell(member, error)
        del error  # members raise the error, and its traceback refers to this frame: avoid a cycle


class VertexPools(SharedWorks):
    """The shared vertex maps of a session that have members."""

    def join(self, shared: SharedSets, inputs: tuple[Array, ...], part: RunPart) -> VertexMember:
        """The place in line of one run, whose results are rows of states, and what else is asked for."""
        counts = shared.counts
        sets, common = RunOfSets.of(inputs, counts, shared.pulls), inputs[sum(counts[:3]) :]
        shapes = tuple((x.dtype, x.shape[1:]) for x in sets.own)
        key = (shared, shapes, *common_values(shared.has_rows, inputs))
        pool = self.work(key, lambda: VertexPool(self, key, shared, common))
        member = VertexMember(pool, sets, part)
        pool.join(member)
        return member


def _gather(shared: SharedSets, inputs: tuple[Array, ...]) -> Value:
    part = current_part()
    assert part is not None and isinstance(part.owner, Turn)
    batches = part.owner.batches
    assert isinstance(batches, Batches)
    return batches.vertex_pools.join(shared, inputs, part)


install_gatherer(SharedSets, _gather)
