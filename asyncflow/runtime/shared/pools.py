"""The pooled loops of a session: activations of different runs that are stepped together.

A task drives each pool, a step and a pass of the event loop at a time. Others may join in between. A step is a call of
the loop's own graph, and where that is not for the event loop, a run; see `asyncflow.lift.calls.pooled`.
`asyncflow.runtime.shared.rows.pool` keeps the rows. An activation waits in line, as for a queue: no task waits for it.
"""

from __future__ import annotations

import asyncio
import re
import warnings
from collections.abc import Awaitable, Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import compress
from math import inf
from time import perf_counter_ns
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakSet

import numpy as np

from asyncflow.compiler.plan import Plan
from asyncflow.errors import KernelError, TooManyIterations, of_firing, row_of
from asyncflow.graph.ir import Tensor
from asyncflow.graph.values.shapes import format_shape
from asyncflow.lift.calls.batched import install_gatherer
from asyncflow.lift.calls.pooled import STEPS, SharedLoop
from asyncflow.runtime.executor.turn import BURST_NS, Turn
from asyncflow.runtime.lines.halving import in_halves
from asyncflow.runtime.shared.batches import Batches
from asyncflow.runtime.shared.placed_pools import PlacedSteps
from asyncflow.runtime.shared.rows.placed_rows import PlacedRows
from asyncflow.runtime.shared.rows.pool import PoolRows, RowGroup
from asyncflow.runtime.shared.step_rules import at_once, in_groups
from asyncflow.runtime.shared.work import SharedMember, SharedWork, SharedWorks, common_values
from asyncflow.state.waiting.lines import PlaceInLine
from asyncflow.streams.holding import RunPart, current_part
from asyncflow.values import Array, Value

if TYPE_CHECKING:
    from asyncflow.runtime.shared.bodies import Bodies

_TURN_NS = BURST_NS
"""Longest time of steps in one pass of the event loop, over all pools."""

_BESIDE_NS = 20_000_000
"""Longest time of a run of steps elsewhere, unless rows come or go: other work waits for its thread (20 ms)."""

_STEPS = re.compile(rf"{STEPS}/\d+/?")
"""Begins the tag of what fails in a step."""

_MANY_GROUPS = 4
"""Number of shapes of a captured value beside equal variables, from which the user is told."""

_told: WeakSet[SharedLoop] = WeakSet()
"""Loops whose users have been told."""

_MOST_CALM = 5
"""Most passes that make up to four times as many steps as the previous, while no row comes or goes."""


class _Steps:
    """The steps of a pooled loop, by one of its graphs.

    Args:
        bodies: of the session.
        plan: of the graph.
        has_rows: flags of the inputs that each activation has of its own; the others are equal for all activations.
        is_one: it is over one activation, without a row axis.
    """

    def __init__(self, bodies: Bodies, plan: Plan, has_rows: Sequence[bool], *, is_one: bool) -> None:
        self._bodies, self._plan, self._has_rows, self.is_one = bodies, plan, has_rows, is_one
        self._call = bodies.counted_call(plan)

    def most(self, size: int, time_ns: float) -> int:
        """Return how many steps on `size` elements fit into `time_ns` on the event loop."""
        call = self._call
        if call is None or call.is_user:
            return 0
        if (expected_ns := call.expected_ns(size)) > time_ns or not self._bodies.may_call(self._plan):
            return 0
        return int(time_ns / max(expected_ns, 1.0))

    def most_beside(self, size: int, time_ns: float) -> int:
        """Return how many steps a run makes in about that time: several where it can be told its most steps."""
        call = self._call
        return 1 if call is None else max(1, int(time_ns / max(call.expected_ns(size), 1.0)))

    def expected_ns(self, size: int) -> float:
        """Return the time of a step on `size` elements; 0 if it is not known."""
        return 0.0 if self._call is None else self._call.expected_ns(size)

    def call(self, given: list[Array], size: int, most: int) -> list[Array]:
        """Return the next variables, the flags of rows that go on, and the number of steps made, here and now."""
        assert self._call is not None
        return self._call([most, *given], size)

    async def run(self, given: list[Array], size: int, most: Array) -> list[Array]:
        """The same, wherever that is; `most` may be lowered meanwhile."""
        started = perf_counter_ns()
        found = await self._bodies.run_batch(self._plan, [most, *given])
        if self._call is not None:
            self._call.learn(size, perf_counter_ns() - started, int(found[-1]))
        return found

    async def run_rows(self, values: list[Array], size: int, most: Array) -> list[Array]:
        """As `run`, of the values of rows."""
        return self.rows_of(await self.run(self.given(values), size, most))

    def count(self, values: list[Array]) -> None:
        """Count the slabs that values of rows are parts of."""
        self._bodies.count_rows(self._plan, compress(values, self._has_rows), "rows")

    def given(self, values: list[Array]) -> list[Array]:
        """Return the values of rows as the graph takes them; shared captures stay as they are."""
        if self.is_one:
            return [_first_row(x) if own else x for x, own in zip(values, self._has_rows, strict=True)]
        return [np.ones(len(values[0]), bool), *values]

    def rows_of(self, found: list[Array]) -> list[Array]:
        """Return the outcome as the values of these rows."""
        return [*map(_one_row, found[:-1]), found[-1]] if self.is_one else found


def _first_row(values: Array) -> Array:
    """Return the only row of a slab: a copy, as a store may keep the value, and the slab is written to."""
    row: Array = values[0] if values.ndim == 1 else values[0].copy()
    return row


def _one_row(value: Value) -> Array:
    if isinstance(value, np.ndarray | np.generic):
        return np.asarray(value)[np.newaxis]
    row = np.empty(1, object)  # a store
    row[0] = value
    return row


class _Code(NamedTuple):
    """A pooled loop, compiled."""

    check: Plan
    many: _Steps
    one: _Steps | None
    """None where a step, or a predicate, is not to be computed again."""
    is_placed: bool
    """True if its rows stand in the memory of a device."""
    has_own_memory: bool
    """That device has some."""
    device: str
    threads: int
    """Number of its steps that the device makes at a time."""
    emitting: dict[tuple[bool | Tensor, ...], _Steps]
    """Its steps by the values that they hand out."""


class PooledActivation(SharedMember):
    """An activation, which is the place of its firing in line.

    Attributes:
        streamed: values of the body that it hands out in each step.
        untaken: number of steps whose streamed values the consumer has not taken yet.
        is_parked: True if it is set aside until the consumer takes values.
        others: see `Activation`.
    """

    has_inputs = True

    __slots__ = (
        *("inputs", "is_checked", "number", "since"),
        *("is_parked", "streamed", "untaken"),
    )

    def __init__(self, pool: LoopPool, inputs: Sequence[Array], part: RunPart, streamed: tuple[Tensor, ...]) -> None:
        super().__init__(pool, f"a loop of {pool.shared.label}", part)
        self.inputs = inputs
        self.streamed = streamed
        self.untaken = 0
        self.is_parked = False
        self.is_checked = False
        self.number = self.since = 0


class LoopPool(SharedWork):
    """A pool: activations of one loop whose shared inputs are equal.

    Args:
        pools: pools of the session.
        key: key of the pool among them.
        shared: the loop.
        stores_on: the device that has what TensorArrays and RowStores among the variables hold; None without any.
    """

    def __init__(self, pools: Pools, key: Hashable, shared: SharedLoop, stores_on: str | None) -> None:
        super().__init__(pools, key)
        self.shared, self.policy, self.label = shared, shared.pool.policy, shared.label
        self.stores_on = stores_on
        self.bodies = pools.batches.bodies
        self._pools = pools
        self._code: _Code
        self.rows: PoolRows[PooledActivation] = PoolRows(
            *(shared.pool.capacity, shared.n_vars, shared.has_rows),
            is_watched=pools.is_watched,
            by_size=shared.by_size,
        )
        self._placed = PlacedSteps(self)
        self._has_streams = False
        # Number of passes of the event loop since an activation last joined or left.
        self._calm = 0
        self._is_long = False
        """The last step took longer than a turn."""
        self._most_beside = np.array(1)
        """Number of steps that the run under way makes."""
        # Number of steps of the pool at which the first row may reach its limit of iterations.
        self._next_limit = inf if pools.max_iterations is None else 0

    # -- waiting activations -------------------------------------------------------------------------------------

    def join(self, activation: PooledActivation) -> None:
        """Add an activation that waits for its first step, or for the next after it was set aside."""
        if activation.is_checked and self._next_limit < inf:
            self._next_limit = 0
        self._has_streams = self._has_streams or activation.streamed != ()
        self.rows.join(activation)
        self.come(activation.priority)
        if self.rows.live < self.shared.pool.capacity:
            self._most_beside[...] = 1  # or the number of steps that it has made already

    def give_way(self, rank: float) -> None:
        """End the run under way after its present step, if steps of that rank go first."""
        if rank < self.stepper.rank:
            self._most_beside[...] = 1

    def members(self) -> Iterator[PooledActivation]:
        """See `SharedWork.members`."""
        return self.rows.everybody()

    def left(self, place: PlaceInLine) -> None:
        """Note that an activation is not wanted any more."""
        assert isinstance(place, PooledActivation)
        super().left(place)
        self.rows.give_up(place)
        self._most_beside[...] = 1

    def describe(self) -> str:
        """Return the number of activations in words."""
        return f"{self.rows.live} of at most {self.shared.pool.capacity} are stepped together"

    def may_step(self, count: int) -> bool:
        """Return whether `count` steps may be made at once: no row has come or gone for a while, or made too many."""
        is_calm = self._calm == _MOST_CALM and self.shared.has_several
        return is_calm and self.rows.steps + count <= self._next_limit

    def count(self, size: int, steps: int = 1) -> None:
        """Count steps of `size` rows."""
        self.batches.count_call(self.shared, size, calls=steps)

    # -- steps ---------------------------------------------------------------------------------------------------

    async def prepare(self) -> None:
        """See `SharedWork.prepare`."""
        code = self._code = await self.works.code_of(self.shared, self.stores_on, self._compiled)
        self.stepper.place, self.stepper.is_in_line = code.device, code.has_own_memory
        if code.is_placed and not self._has_streams:
            self.rows.group_type = PlacedRows

    async def _compiled(self) -> _Code:
        shared, bodies = self.shared, self.bodies
        check, many, *one = [await bodies.plan_of(program, self.stores_on) for program in shared.programs()]
        has_own_memory = bodies.memory_home(many) is not None
        is_placed = shared.is_static and has_own_memory
        alone = _Steps(bodies, one[0], shared.has_rows, is_one=True) if one else None
        for kind, plan in zip(("steps of several requests", "steps of one request"), (many, *one), strict=False):
            regions = [node.region for partition in plan.partitions for node in partition.nodes if node.region]
            shared.step_sources[kind] = "\n".join(region.source for region in regions)
        device, threads = many.partitions[0].device, bodies.threads_of(many)
        steps = _Steps(bodies, many, shared.has_rows, is_one=False)
        return _Code(check, steps, alone, is_placed, has_own_memory, device, threads, {})

    async def wait_for_turn(self) -> None:
        """See `SharedWork.wait_for_turn`."""
        # A short step holds the GIL, whichever thread it runs on.
        self.stepper.room = self._code.threads if self._is_long else 1
        self._is_long = False
        await super().wait_for_turn()

    async def step(self) -> None:
        """Let activations leave and join, and step each group."""
        rows, turn, code = self.rows, self.batches.turn, self._code
        before = rows.live
        rows.drop()
        # With a policy, rows join by count alone: a single row still steps in a group, as it may not stay alone.
        is_free = self.policy is None
        may_be_alone = code.one is not None and rows.group_type is RowGroup and is_free
        alone = rows.single_out() if may_be_alone and rows.live < 2 else None
        may_join = alone is None and rows.line.by_priority and not (is_free and rows.live == self.shared.pool.capacity)
        for group, first in rows.admit(self._joining(code.many)) if may_join else ():
            await self._check(code.check, group, first)
        if len(rows.groups) >= _MANY_GROUPS and self.shared.origin not in _told:
            self._tell_apart()
        if rows.steps >= self._next_limit:
            await self._end_endless()
        if code.one is not None and rows.alone is not None:
            streamed = rows.alone.streamed
            await self._step_alone(await self._emitting(streamed, is_one=True) if streamed else code.one, rows.alone)
        end = turn.now() + _TURN_NS
        for group in list(rows.groups.values()):
            if turn.now() > end:  # let the event loop run between groups
                await asyncio.sleep(0)
                end = turn.now() + _TURN_NS
            if not group.rows:
                continue
            if isinstance(group, PlacedRows):
                self._is_long = True
                await self._placed.step(group)
            elif self._has_streams:
                await self._step_emitting(group)
            else:
                # A step of one row without a row axis takes less time, but would copy the values it changes.
                steps = code.one if len(group.rows) == 1 and not self.shared.changed else None
                await self._step(steps or code.many, group)
        # An activation that has left may be about to join again.
        self._calm = min(self._calm + 1, _MOST_CALM) if before == rows.live else 0
        if rows.is_empty:
            await self._placed.forget()

    def _tell_apart(self) -> None:
        """Warn, the first time, if requests share no step as their captured values differ in shape."""
        shared = self.shared
        for place, name in shared.captured_names.items():
            shapes = self.rows.shapes_apart(place)
            if len(shapes) >= _MANY_GROUPS:
                _told.add(shared.origin)
                some = ", ".join(map(format_shape, shapes[:_MANY_GROUPS]))
                warnings.warn_explicit(
                    f"{self.label} steps requests apart: {name}, which the loop captures, has shapes {some}, and only "
                    "requests with equal shapes share a step; pad it to one shape before the loop",
                    UserWarning,
                    shared.loop.location.file,
                    shared.loop.location.line,
                )
                return

    async def goes_on(self) -> bool:
        """See `SharedWork.goes_on`."""
        if self.rows.is_empty:
            return False
        if self.is_held:
            await self.wait_for_change()
        await asyncio.sleep(0)  # other activations may join
        return True

    def _joining(self, steps: _Steps) -> int:
        """Return the number of waiting activations that join."""
        rows = self.rows
        first = next(iter(rows.line.by_priority.values()))[0]

        def expected_s(size: int) -> float:
            of_one = zip(first.inputs, self.shared.has_rows, strict=True)
            return steps.expected_ns(size * sum([getattr(x, "size", 1) for x, own in of_one if own])) / 1e9

        rule = in_groups if rows.is_growing and not rows.has_returned() else at_once
        return self.joining(rows.line, rows.live, self.shared.pool.capacity, expected_s, rule)

    def close(self) -> None:
        """See `SharedWork.close`."""
        del self._placed  # it refers to this pool: avoid a cycle

    async def _check(self, check: Plan, group: RowGroup[PooledActivation], first: int) -> None:
        """Has those leave that have joined a group and do not go on at all."""
        end = len(group.rows)
        parts = await self._halved(group, first, end, lambda values: self.batches.compute(check, values))
        goes_on = np.zeros(end - first, bool)
        for at, found in parts:
            goes_on[at - first : at - first + len(found[0])] = found[0]
        self.deliver(self.rows.settle(group, first, goes_on))

    async def _step(self, steps: _Steps, group: RowGroup[PooledActivation], streamed: tuple[Tensor, ...] = ()) -> None:
        """Step a group: many times, as far as no other work waits for that; once where that fails, or for streams."""
        count, size, most = len(group.rows), group.size(), 1.0
        if self.shared.is_repeatable and not streamed:
            # In a full pool, no activation can join before another leaves, which ends the call.
            is_full = self.rows.live == self.shared.pool.capacity
            most = inf if is_full else 4 ** (self._calm + 2 * steps.is_one)
        values = group.inputs(0, count)
        if not group.is_counted:
            steps.count(values)
            group.is_counted = True
        try:
            found = await self._at_once(steps, steps.given(values), size, most)
        except Exception as error:
            self.end_group(group, error)
            return
        if found is not None:
            self._advance(group, self._handed_out(group, 0, steps.rows_of(found), streamed))
            return
        one = np.array(1)
        parts = await self._halved(group, 0, count, lambda values: steps.run_rows(values, size, one))
        self._advance_parts(group, [(first, self._handed_out(group, first, found, streamed)) for first, found in parts])

    async def _at_once(self, steps: _Steps, given: list[Array], size: int, most: float) -> list[Array] | None:
        """Return the outcome of at most `most` steps, here and now or, where that takes too long, elsewhere.

        None where a single step is to be made that has not been tried yet, or is to show which row is at fault.

        Raises:
            Exception: the step has failed, and cannot be repeated.
        """
        limit = self._next_limit - self.rows.steps
        if here := min(most, limit, steps.most(size, _TURN_NS / self.works.sharing)):
            try:
                return steps.call(given, size, int(here))
            except Exception:
                if not self.shared.is_repeatable:
                    raise
        if (beside := self._beside(steps, size)) > 1:
            with suppress(Exception):
                return await steps.run(given, size, beside)
        return None

    def _beside(self, steps: _Steps, size: int) -> Array:
        """Return the most steps of a run, which drops to 1 once a row comes or goes."""
        # Requests that stream wait for this run between two of their values.
        has_streams = any(isinstance(each, LoopPool) and each._has_streams for each in self._pools)
        is_short = self.stepper.is_behind or has_streams
        time_ns = (_TURN_NS if is_short else _BESIDE_NS) / max(len(self.rows.groups), 1)
        most = steps.most_beside(size, time_ns) if self.shared.is_repeatable and not self._has_streams else 1
        self._is_long = self._is_long or steps.most_beside(size, _TURN_NS) == 1
        self._most_beside = np.array(int(min(most, self._next_limit - self.rows.steps)))
        return self._most_beside

    async def _step_alone(self, steps: _Steps, activation: PooledActivation) -> None:
        """Steps the only one, often or, where that takes too long for the event loop, or fails, once."""
        rows, values = self.rows, list(activation.inputs)
        has_rows, changed = self.shared.has_rows, self.shared.changed
        size = sum([getattr(value, "size", 1) for value, own in zip(values, has_rows, strict=True) if own])
        for place in changed:
            if values[place] is not rows.alone_owns.get(place):  # others may have it, and steps write to it
                values[place] = values[place].copy()
        try:
            most = 1 if activation.streamed else 4 ** (self._calm + 2)
            found = await self._at_once(steps, values, size, most)
            found = await steps.run(values, size, np.array(1)) if found is None else found
        except Exception as error:
            rows.remove_where(lambda each: each is activation)
            self._fail([activation], error)
            return
        n_vars = self.shared.n_vars
        following, emitted, (goes_on, made) = found[:n_vars], found[n_vars:-2], found[-2:]
        if made:  # a loop whose condition is false at once has no values to hand out
            self._hand_out(activation, emitted)
        self.count(1, int(made))
        rows.advance_alone(following, goes_on=bool(goes_on), steps=int(made))
        rows.alone_owns = {place: values[place] for place in changed if following[place] is values[place]}
        if not goes_on:
            self.tell(activation, following)
        elif activation.untaken >= self.shared.ahead:
            rows.park_alone()
            activation.is_parked = True

    async def _emitting(self, streamed: tuple[Tensor, ...], *, is_one: bool) -> _Steps:
        """Return the steps that hand out these values."""
        steps = self._code.emitting.get((is_one, *streamed))
        if steps is None:
            plan = await self.bodies.plan_of(self.shared.emitting(streamed, is_one=is_one), self.stores_on)
            steps = _Steps(self.bodies, plan, self.shared.has_rows, is_one=is_one)
            self._code.emitting[is_one, *streamed] = steps
        return steps

    async def _step_emitting(self, group: RowGroup[PooledActivation]) -> None:
        """Step a group once, and hand out its streamed values; an activation too far ahead of its consumer is set
        aside.
        """
        streamed = tuple(dict.fromkeys(x for activation in group.rows for x in activation.streamed))
        await self._step(await self._emitting(streamed, is_one=False), group, streamed)
        for each in list(self.rows.groups.values()):
            for row in reversed(range(len(each.rows))):
                if each.rows[row].untaken >= self.shared.ahead:
                    self.rows.park(each, row).is_parked = True

    def _handed_out(
        self, group: RowGroup[PooledActivation], first: int, found: list[Array], streamed: tuple[Tensor, ...]
    ) -> list[Array]:
        """Return the outcome of a step from a row on without its streamed values, which consumers get."""
        n_vars = self.shared.n_vars
        emitted = dict(zip(streamed, found[n_vars:-2], strict=True))
        for row, activation in enumerate(group.rows[first : first + len(found[-2])] if streamed else ()):
            self._hand_out(activation, [emitted[x][row, ...] for x in activation.streamed])
        return [*found[:n_vars], *found[-2:]]

    def _hand_out(self, activation: PooledActivation, values: list[Array]) -> None:
        """Give the consumer of an activation copies of the values of a step."""
        if values and not (activation.is_gone or activation.is_called):
            assert activation.part.emitter is not None
            activation.untaken += 1
            activation.part.emitter.offer(tuple(map(np.copy, values)), partial(self._taken, activation))

    def _taken(self, activation: PooledActivation) -> None:
        """A consumer has taken what a step has handed out."""
        activation.untaken -= 1
        if activation.is_parked and not activation.is_gone:
            activation.is_parked = False
            self._pools.rejoin(self.key, activation)

    def _advance(self, group: RowGroup[PooledActivation], found: list[Array]) -> None:
        *following, goes_on, made = found
        self.count(len(group.rows), int(made))
        self.deliver(self.rows.advance(group, following, goes_on, int(made)))

    def _advance_parts(self, group: RowGroup[PooledActivation], parts: list[tuple[int, list[Array]]]) -> None:
        """As `_advance`, after a step that was made in parts; rows that are in none have failed."""
        if len(parts) == 1 and len(parts[0][1][-2]) == len(group.rows):
            self._advance(group, parts[0][1])
            return
        self.count(len(group.rows))
        self.deliver(self.rows.part(group, [(first, found[:-2], found[-2]) for first, found in parts]))

    async def _halved(
        self,
        group: RowGroup[PooledActivation],
        first: int,
        end: int,
        compute: Callable[[list[Array]], Awaitable[list[Array]]],
    ) -> list[tuple[int, list[Array]]]:
        """Values for the parts of a range of rows, by the first row of each.

        A row that is at fault fails alone, and is in no part.
        """

        async def computed(rows: Sequence[int]) -> tuple[int, list[Array]]:
            return rows[0], await compute(group.inputs(rows[0], rows[-1] + 1))

        def failed(rows: Sequence[int], error: Exception) -> Sequence[int]:
            if len(rows) > 1 and self.shared.is_repeatable:
                return rows
            self._fail(group.rows[rows[0] : rows[-1] + 1], error)
            return ()

        return await in_halves(range(first, end), computed, failed)

    async def _end_endless(self) -> None:
        """End activations that have made too many steps."""
        for group in list(self.rows.groups.values()):
            if isinstance(group, PlacedRows):
                await self._placed.catch_up(group)
        limit, rows = self._pools.max_iterations, self.rows
        assert limit is not None
        endless = rows.remove_where(lambda activation: rows.steps - activation.since >= limit)
        for activation in endless:
            self._fail([activation], TooManyIterations(self.shared.loop, limit))
        self._next_limit = limit + min((activation.since for activation in rows.everybody()), default=rows.steps)

    def deliver(self, ended: list[tuple[PooledActivation, list[Array]]]) -> None:
        """Give activations that have ended their results."""
        ended.reverse()
        while ended:  # drop each result once it is delivered, not after all are used
            self.tell(*ended.pop())

    def fail_all(self, error: Exception) -> None:
        """See `SharedWork.fail_all`."""
        self._fail(list(self.rows.everybody()), error)
        del error

    def _fail(self, activations: Sequence[PooledActivation], error: Exception) -> None:
        inside = ""
        if isinstance(error, KernelError):  # rows, and the loop of steps, are not iterations of the user's
            row = "" if error.__cause__ is None else row_of(error.__cause__)
            inside = _STEPS.sub("", error.tag).removesuffix(row).rstrip("/")
        for activation in activations:
            tag = f"{self.shared.label}/{self.rows.steps - activation.since}"
            self.tell(activation, of_firing(error, f"{tag}/{inside}".rstrip("/")))
        del error  # members raise the error, and its traceback refers to this frame: avoid a cycle

    def end_group(self, group: RowGroup[PooledActivation], error: Exception) -> None:
        """Fails all rows of a group: whose fault it was cannot be found out."""
        activations = [self.rows.remove(group, row) for row in reversed(range(len(group.rows)))]
        self._fail(activations, error)


class Pools(SharedWorks):
    """The pools of a session that have activations.

    Args:
        batches: batches of the session.
        max_iterations: of any loop; None for no limit.
        is_watched: True if rows carry the number of their owner.
    """

    def __init__(self, batches: Batches, max_iterations: int | None, *, is_watched: bool) -> None:
        super().__init__(batches)
        self.max_iterations = max_iterations
        self.is_watched = is_watched

    def join(
        self,
        shared: SharedLoop,
        inputs: tuple[Array, ...],
        part: RunPart,
        streamed: tuple[Tensor, ...],
        stores_on: str | None,
    ) -> PooledActivation:
        """Return the place in line of an activation, whose results are its last loop variables.

        Args:
            shared: the loop.
            inputs: initial values of the variables, and captured values.
            part: the run that the activation is part of.
            streamed: values of the body that it hands out.
            stores_on: see `LoopPool`.
        """
        # Activations that stream values have pools of their own, as the host hands out the values.
        key = shared, streamed != (), stores_on, *common_values(shared.has_rows, inputs)
        pool = self._pool(key, shared, stores_on)
        activation = PooledActivation(pool, inputs, part, streamed)
        pool.join(activation)
        if self.batches.steps.turns.is_contended:
            for other in self:
                other.give_way(activation.priority)
            self.batches.steps.look()  # its own pool may step now
        return activation

    def rejoin(self, key: Hashable, activation: PooledActivation) -> None:
        """Let an activation that was set aside go on; its earlier pool may be gone."""
        assert isinstance(activation.state, LoopPool)
        pool = activation.state = self._pool(key, activation.state.shared, activation.state.stores_on)
        pool.join(activation)

    def _pool(self, key: Hashable, shared: SharedLoop, stores_on: str | None) -> LoopPool:
        return self.work(key, lambda: LoopPool(self, key, shared, stores_on))


def _gather(
    shared: SharedLoop,
    inputs: tuple[Array, ...],
    streamed: tuple[Tensor, ...] = (),
    stores_on: str | None = None,
) -> Value:
    part = current_part()
    assert part is not None and isinstance(part.owner, Turn)
    batches = part.owner.batches
    assert isinstance(batches, Batches)
    return batches.pools.join(shared, inputs, part, streamed, stores_on)


install_gatherer(SharedLoop, _gather)
