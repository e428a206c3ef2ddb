"""The batches of a session: firings that wait for others, and the runs that compute them together.

A batch is a run like any other, of the body's own graph; see `asyncflow.lift.calls.batched`. `Batcher` decides which
members a batch has, and when it starts.
"""

from __future__ import annotations

import asyncio
import logging
import warnings
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from math import ceil, inf
from random import Random
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, TypeVar, cast
from weakref import WeakKeyDictionary

import numpy as np

from asyncflow.devices.machine.cost import INLINE_LIMIT_NS
from asyncflow.devices.values import DeviceArray, DeviceValue, RowsToJoin
from asyncflow.errors import DeadlineExceeded, ExitRaised, OutOfMemoryError, SessionClosedError, of_firing
from asyncflow.lift.calls.batched import Join, SharedBody, SharedCode, install_gatherer
from asyncflow.runtime.executor.kernels.provenance import describe
from asyncflow.runtime.executor.turn import BURST_NS, Turn
from asyncflow.runtime.shared.batcher import BatchCall, Batcher, Lane
from asyncflow.runtime.shared.call_costs import CallCosts
from asyncflow.runtime.shared.step_turns import StepTurns
from asyncflow.runtime.shared.step_waits import StepWaits
from asyncflow.runtime.shared.work import common_values
from asyncflow.runtime.watch.trace import Trace
from asyncflow.state.waiting.lines import LinedState, PlaceInLine, TellingState, ToldPlace
from asyncflow.streams.futures import resolve
from asyncflow.streams.holding import RunPart, current_part

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Coroutine, Hashable, Mapping, Sequence

    from asyncflow.compiler.plan import Plan
    from asyncflow.runtime.run.run import Run
    from asyncflow.runtime.shared.bodies import Bodies
    from asyncflow.runtime.shared.pools import Pools
    from asyncflow.runtime.shared.vertex_pools import VertexPools
    from asyncflow.values import Array, Value

T = TypeVar("T")

_log = logging.getLogger("asyncflow.runtime")

_MOST_KINDS = 64
"""Number of kinds of arguments per function for which call times are kept."""

_ROUNDINGS = 256
"""Tolerance of a member's result beside the largest element, as a multiple of the precision of its dtype."""


class BatchMember(ToldPlace):
    """A firing of a batched function, and its place in line.

    Attributes:
        shared: the shared body that it calls.
        known: plans, times and counts of that body.
        inputs: inputs of its node.
        home: the device on which some inputs are, and its results will be; None for the host.
        leaving: places of results that are for the host all the same.
        signature: equal for members that may share a call.
        context: the caller's context variables.
        part: the run that it is part of.
        others: see `Gathered`.
    """

    __slots__ = (
        *("context", "deadline_ns", "home", "inputs", "known", "leaving", "nbytes"),
        *("offered_ns", "part", "priority", "shared", "signature"),
    )

    def __init__(self, shared: SharedBody, inputs: tuple[Array, ...], leaving: Collection[int] = ()) -> None:
        super().__init__(_NOWHERE, shared.what, shared.results_of)
        self.leaving = leaving
        self.shared = shared
        self.inputs = inputs

    def when_called(self, wake: Callable[[], None]) -> None:
        """Join the members of the session whose run this is called for, on its event loop."""
        part = current_part()
        assert part is not None and isinstance(part.owner, Turn)
        batches = part.owner.batches
        assert isinstance(batches, Batches)
        self.state = batches
        try:
            self._join(batches, part)
        except Exception as error:  # raised by a user's function of shapes
            self.outcome, self.is_called = error, True
        super().when_called(wake)

    def _join(self, batches: Batches, part: RunPart) -> None:
        shared = self.shared
        self.inputs = inputs = shared.inside(self.inputs)
        kind = shared.kind(inputs)
        self.home = _home(inputs)
        self.signature: Hashable = (shared, kind, self.home, *common_values(shared.has_rows, inputs))
        self.known = batches.known_of(shared)
        self.context = copy_context()
        # Only `max_bytes` needs it.
        self.nbytes = 0 if shared.batch.max_bytes is None else sum([getattr(value, "nbytes", 0) for value in inputs])
        self.offered_ns = batches.turn.clock()
        self.deadline_ns = inf
        self.part, self.priority = part, part.priority
        if part.deadline_s < inf:
            self.deadline_ns = self.offered_ns + (part.deadline_s - batches.turn.loop.time()) * 1e9
        lost = self.known.lost_kinds
        batches.join(self, self.known.costs_of(kind))
        if self.known.lost_kinds > lost:
            batches.tell_apart(self)


class _Nowhere(LinedState):
    """The state of members that no run waits for yet."""

    def places(self) -> list[PlaceInLine]:
        """Return no places: no deadlock report needs these members."""
        return []

    def left(self, place: PlaceInLine) -> None:
        """Do nothing: no run waits for a place here."""


_NOWHERE = _Nowhere()


class BatchStatistics(NamedTuple):
    """Calls of one batched function, or steps of one pooled loop, so far.

    Attributes:
        calls: number of calls.
        members: number of members in all calls.
        largest: the most members of a call.
        failed: calls that failed; failed calls of several members are computed again in halves.
        cost_ns: how long calls of each size take, for the arguments that were seen last.
    """

    calls: int = 0
    members: int = 0
    largest: int = 0
    failed: int = 0
    cost_ns: Mapping[int, float] = MappingProxyType({})


@dataclass(slots=True, eq=False)
class KnownBody:
    """Plans, times and counts of one call of a batched function in a graph.

    Attributes:
        plans: of its programs, for each version of variables: over one member (False), over many (True).
        costs: by the dtypes and shapes of arguments, those seen last behind.
        threads: how many calls its device may compute at the same time.
        device: name of the device.
        calls: number of calls.
        members: number of members of all calls.
        largest: the most members of a call.
        failed: calls that failed.
        lost_kinds: number of times that costs of a kind of arguments were dropped, as there were too many kinds.
        is_told: True once the user was warned that members are too different.
    """

    plans: WeakKeyDictionary[SharedCode, dict[bool, Plan]] = field(default_factory=WeakKeyDictionary)
    costs: dict[Hashable, CallCosts] = field(default_factory=dict)
    threads: int = 1
    device: str = ""
    calls: int = 0
    members: int = 0
    largest: int = 0
    failed: int = 0
    lost_kinds: int = 0
    is_told: bool = False

    def plans_of(self, shared: SharedCode) -> dict[bool, Plan]:
        """Return the plans for the version of `shared`."""
        return self.plans.setdefault(shared, {})

    def costs_of(self, kind: Hashable) -> CallCosts:
        costs = self.costs.pop(kind, None) or CallCosts(threads=self.threads)
        if len(self.costs) >= _MOST_KINDS:
            del self.costs[next(iter(self.costs))]
            self.lost_kinds += 1
        self.costs[kind] = costs
        return costs

    def use_threads(self, threads: int) -> None:
        """The device is known by now."""
        self.threads = threads
        for costs in self.costs.values():
            costs.threads = threads

    def count(self, size: int, *, calls: int = 1, failed: int = 0) -> None:
        """Count calls, or steps, of `size` members each."""
        self.calls += calls
        self.members += calls * size
        self.largest = max(self.largest, size)
        self.failed += failed


class Batches(TellingState):
    """Members of one session that wait or are under way.

    Args:
        turn: of the session.
        bodies: of the session.
        seed: of the sizes that are tried out.
    """

    def __init__(self, turn: Turn, bodies: Bodies, seed: int) -> None:
        super().__init__()
        self.turn = turn
        self.bodies = bodies
        # Members of one call may call again together: runs go on in the next pass, and clients wake up after it. A
        # member that waited meanwhile must wait for them, or the two groups would have separate calls for ever.
        self._back_by = 0
        """The number of the pass by which they are back."""
        self._left = 0
        """Number of members of the last call, which may come back soon."""
        self._batcher: Batcher[BatchMember] = Batcher(seed)
        # A function is dropped with the graph that calls it.
        self._known: WeakKeyDictionary[SharedCode, KnownBody] = WeakKeyDictionary()
        self._random = Random(seed)
        self.checked_share = 0.0
        """Share of the calls for several members that is also computed one by one."""
        self.pools: Pools
        """Pooled loops of the session."""
        self.vertex_pools: VertexPools
        """Vertex maps of the session that are shared."""
        self._under_way: set[asyncio.Task[object]] = set()
        self._runs_of: dict[BatchCall[BatchMember], Run] = {}
        self.steps = StepWaits(turn)
        """The turns of pools and batches; the batches are one stepper."""
        self.place: Hashable = None
        self.is_stepping = False
        self._timer: asyncio.TimerHandle | None = None

    # -- for members ---------------------------------------------------------------------------------------------

    def join(self, member: BatchMember, costs: CallCosts) -> None:
        """Let a member wait for a call with these learnt costs."""
        self.steps.turns.come(self, member.priority)
        self._batcher.offer(member.signature, costs, member.shared.batch, member, member.shared.label)
        self.turn.wake()

    @property
    def rank(self) -> float:
        """The lowest number of priority among members; infinity if there are none."""
        return min((lane.rank for lane in self._batcher.lanes.values()), default=inf)

    def places(self) -> list[PlaceInLine]:
        """Return the places of all members."""
        return [member for lane in self._batcher.lanes.values() for member in lane.everybody()]

    def tell_apart(self, member: BatchMember) -> None:
        """Warn, the first time, if members that wait share no call as each has arguments of another shape."""
        shared, known = member.shared, member.known
        lanes = [lane for lane in self._batcher.lanes.values() if next(lane.everybody()).known is known]
        if known.is_told or len(lanes) < 2 or 2 * known.calls < known.members or shared.batch.tells is not None:
            return
        known.is_told = True
        warnings.warn_explicit(
            f"{shared.label} is hardly batched: {known.calls} calls were for {known.members} members. Members of one "
            f"call have arguments of equal shapes, and there were more than {_MOST_KINDS} shapes; pad=, bucket= or "
            'ragged="packed" lets different ones share a call',
            UserWarning,
            shared.location.file,
            shared.location.line,
        )

    def left(self, place: PlaceInLine) -> None:
        """Note that a member is not wanted any more: it leaves, or its result is dropped."""
        assert isinstance(place, BatchMember)
        if place.is_called:
            return  # the member has its result, or failed before it joined
        call = self._batcher.withdraw(place.signature, place)
        run = None if call is None else self._runs_of.get(call)
        if run is not None:
            run.stop("cancelled")
        elif place.shared.has_loop or place.shared.batch.policy is not None:
            self.turn.wake()  # its call may now be overdue, or the policy may start a call without it

    def describe(self) -> str:
        """Return the number of members in words."""
        return f"{len(self.places())} wait or are computed"

    def is_left_over(self) -> bool:
        """Return whether a computation goes on, and holds memory, for members none of which is wanted any more."""
        works = (*self.pools, *self.vertex_pools)
        return any(run.is_stopped for run in self._runs_of.values()) or any(work.is_left() for work in works)

    def known_of(self, shared: SharedCode) -> KnownBody:
        """Plans, times and counts of a batched call, or a pooled loop, in all versions of variables."""
        known = self._known.get(shared.origin)
        if known is None:
            known = self._known[shared.origin] = KnownBody()
        return known

    def clear(self) -> None:
        """Forget the plans: the session has closed."""
        self._known.clear()
        self.pools.clear()
        self.vertex_pools.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not (self._under_way or self._runs_of):  # else the session was dropped while calls were in progress
            self.steps.turns = StepTurns()
            del self.pools.batches, self.vertex_pools.batches  # they refer back to this object

    def hurry(self) -> None:
        """Let no member wait for `max_delay_s` any more: the session ends, and no more will come."""
        self._batcher.is_ending = True
        self.turn.wake()
        for work in (*self.pools, *self.vertex_pools):
            work.changed.admit()

    @property
    def is_ending(self) -> bool:
        """True if the session ends, so that no more members will come."""
        return self._batcher.is_ending

    async def aclose(self) -> None:
        """Stop calls under way."""
        under_way = list(self._under_way)
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)

    def flush(self, *, is_idle: bool) -> bool:
        """Start calls that are due, as far as there is time.

        Args:
            is_idle: True if nothing else in the session can go on.

        Returns:
            Whether members have been computed, each alone.
        """
        # Asked once in each idle pass: a policy that refuses again waits for another event.
        if is_idle and self.steps.held_while_busy:
            self.steps.ask_held()
        if not self._batcher.lanes:
            return False
        turn = self.turn
        now_ns = turn.clock()
        for call in self._batcher.overdue(now_ns):
            self._rid_others_of(call)
        # A pass is not idle while members of the last call may still call again, even if no other work is ready.
        if is_idle and turn.number < self._back_by and self._batcher.count() < self._left:
            turn.wake()
            is_idle = False
        end = turn.now() + BURST_NS
        most = 0
        self.steps.holds_calls = False
        held_until_ns = partial(self._held_until_ns, now_ns) if self.steps.turns.is_contended else None
        for call in self._batcher.take(now_ns, is_idle=is_idle, held_until_ns=held_until_ns):
            for each in (call, *call.beside):
                # In the context of a member: user code in the call sees the context variables of its caller.
                most = max(most, len(each.members))
                each.members[0].context.run(self._start, each)
            if turn.now() >= end:  # short calls are computed here: give the event loop a turn, then go on
                turn.wake()
                break
        self._set_timer(now_ns)
        return most == 1

    def _held_until_ns(self, now_ns: int, lane: Lane[BatchMember]) -> float:
        known = next(lane.everybody()).known
        room = known.threads if lane.costs.predict_ns(len(lane)) > BURST_NS else 1
        until_ns = self.steps.turns.held_until_ns(self, lane.rank, known.device, room, now_ns)
        self.steps.holds_calls = self.steps.holds_calls or until_ns > now_ns
        return until_ns

    def _took(self, call: BatchCall[BatchMember], taken_ns: float, now_ns: int) -> None:
        """Report a call that has ended to the turns of pools and batches."""
        self.place = call.members[0].known.device
        rank = min(member.priority for member in call.members)
        self.steps.turns.took(rank, self.place, taken_ns, now_ns - taken_ns, now_ns)
        self.steps.look()

    def _rid_others_of(self, call: BatchCall[BatchMember]) -> None:
        """Compute the staying members of a call that takes too long again in halves, where that does no harm."""
        shared = call.members[0].shared
        # If all members have left, the call is being stopped: it has not failed, and only frees its lane.
        if len(call.members) == 1 or not shared.is_repeatable or all(member.is_gone for member in call.members):
            self._batcher.set_apart(call)
        else:
            call.members[0].known.count(len(call.members), failed=1)
            why = "a member has left, and the call takes too long; the others are computed again in halves"
            self._show(call, int(call.started_ns), DeadlineExceeded(why))
            self._batcher.divide(call)
            self._runs_of[call].stop("cancelled")

    def _set_timer(self, now_ns: int) -> None:
        """Schedule the pass in which a member is due; a member that becomes due after `now_ns` is not missed."""
        if not self._batcher.lanes and self._timer is None:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        wake_ns = self._batcher.wake_ns(now_ns)
        if wake_ns < inf:
            self._timer = self.turn.loop.call_later((ceil(wake_ns) - self.turn.clock()) / 1e9, self.turn.wake)

    def _start(self, call: BatchCall[BatchMember]) -> None:
        """Compute a batch: here and now if it is short, or else in a task."""
        first = call.members[0]
        if call.failure is not None:
            self._failed(call, call.failure, divisible=False)
            call.failure = None
            return
        plan = first.known.plans_of(first.shared).get(first.shared.is_for_many(len(call.members)))
        if plan is None:
            self.beside(self._planned(call))
        else:
            self._compute(call, plan)

    def beside(self, work: Coroutine[object, object, T]) -> asyncio.Task[T]:
        """Start a task that the session's end cancels."""
        task = self.turn.loop.create_task(work)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        return task

    async def _planned(self, call: BatchCall[BatchMember]) -> None:
        """Compute a batch once it has a plan, without members that have left meanwhile."""
        try:
            shared = call.members[0].shared
            # This takes time: members may leave meanwhile, and a single member needs another plan.
            await self._plan(shared, len(call.members))
            staying = [member for member in call.members if not member.is_gone]
            if not staying:
                self._batcher.failed(call, divisible=False)
                self.turn.wake()
                return
            plan = await self._plan(shared, len(staying))
            call.members = staying
        except Exception as error:
            self._failed(call, error)
        else:
            self._compute(call, plan)

    async def _from_host(self, call: BatchCall[BatchMember], plan: Plan) -> None:
        """Compute a batch away from the device of its members' values, once these have come to the host."""
        try:
            for member in call.members:
                member.inputs = tuple(await asyncio.gather(*map(_on_host, member.inputs)))
                member.home = None
        except Exception as error:
            self._failed(call, error)
        else:
            self._compute(call, plan)

    def _compute(self, call: BatchCall[BatchMember], plan: Plan) -> None:
        started_ns, first = self.turn.clock(), call.members[0]
        if first.home is not None and first.home != self.bodies.memory_home(plan):
            self.beside(self._from_host(call, plan))
            return
        try:
            fed = first.shared.fed([member.inputs for member in call.members], _gathered)
            if len(call.members) > 1:
                self.bodies.count_rows(plan, compress(fed, first.shared.has_rows), first.shared.label)
            traces = _traces_of(call.members)
            results = None if traces else self.bodies.run_short(plan, fed)
            if results is None:
                name = _name_of(call.members) if traces else ""
                ended = partial(self._over, call, fed, started_ns)
                staying = () if first.home is None else _staying(call.members)
                run = self.bodies.start_batch(plan, fed, ended, next(iter(traces), None), name, staying=staying)
                if not run.is_finished:
                    self._runs_of[call] = run
                    if first.shared.has_loop:
                        call.started_ns = started_ns
                return
        except Exception as error:
            self._failed(call, error)
        else:
            self._ended(call, fed, results, started_ns)

    def _over(self, call: BatchCall[BatchMember], fed: Sequence[Array], started_ns: int, run: Run) -> None:
        """The run of a call has ended."""
        self._runs_of.pop(call, None)
        try:
            results = cast("list[Array]", run.outcome())
            traces = _traces_of(call.members)
            for trace in traces[1:]:
                trace.runs.append(traces[0].runs[-1])
        except BaseException as error:
            self._failed(call, error)
        else:
            if run.is_stopped:  # all of its members have left
                self._batcher.failed(call, divisible=False)
                self.turn.wake()
            else:
                self._ended(call, fed, results, started_ns)

    async def _plan(self, shared: SharedBody, size: int) -> Plan:
        known, is_many = self.known_of(shared), shared.is_for_many(size)
        plans = known.plans_of(shared)
        plan = plans.get(is_many)
        if plan is None:
            plan = plans[is_many] = await self.bodies.plan_of(shared.many if is_many else shared.one)
            known.device = plan.partitions[0].device
            known.use_threads(self.bodies.threads_of(plan) if shared.is_repeatable else 1)
        return plan

    async def compute(self, plan: Plan, values: list[Array], limit_ns: int = INLINE_LIMIT_NS) -> list[Array]:
        """The fetched values of a body's plan: here and now, if that takes no longer."""
        found = self.bodies.run_short(plan, values, limit_ns)
        return await self.bodies.run_batch(plan, values) if found is None else found

    def _ended(
        self, call: BatchCall[BatchMember], fed: Sequence[Array], results: Sequence[Array], started_ns: int
    ) -> None:
        members, shared = call.members, call.members[0].shared
        try:
            if len(members) > 1:
                for value in results:
                    # A member's result is a view of the call's result, whose other parts belong to other members.
                    if isinstance(value, np.ndarray):
                        value.flags.writeable = False  # members get views of it
            parts = list(shared.parts(results, fed, [member.inputs for member in members]))
        except Exception as error:
            self._failed(call, error)
            return
        now_ns = self.turn.clock()
        # Before telling the members: they may call again at once, and then find their lane free.
        self._batcher.ended(call, now_ns - started_ns, now_ns)
        if self.steps.turns.is_contended:
            self._took(call, now_ns - started_ns, now_ns)
        if len(members) > 1:
            self._back_by, self._left = self.turn.number + 2, len(members)
        members[0].known.count(len(members))
        self._show(call, started_ns, None)
        if len(members) > 1 and self._random.random() < self.checked_share:
            self.beside(self._check(members, parts))
        for member, part in zip(members, parts, strict=True):
            self.tell(member, part)
        if self._batcher.lanes:
            self.turn.wake()

    def count_call(self, shared: SharedCode, size: int, *, calls: int = 1, failed: int = 0) -> None:
        """Count calls, or steps, of `size` members each."""
        self.known_of(shared).count(size, calls=calls, failed=failed)
        if self.bodies.starter.observers is not None and not isinstance(shared, SharedBody):
            self.bodies.starter.observers.pool_stepped(shared.label, size, calls)

    def _show(self, call: BatchCall[BatchMember], started_ns: int, error: BaseException | None) -> None:
        """Tell the observers of a call that has ended."""
        if self.bodies.starter.observers is not None:
            contexts = [member.context for member in call.members]
            taken_s = (self.turn.clock() - started_ns) / 1e9
            self.bodies.starter.observers.batch_ended(call.members[0].shared.label, contexts, taken_s, error)

    def statistics(self) -> dict[str, BatchStatistics]:
        """Of each batched function that graphs call, by its name in the graph."""
        found: dict[str, BatchStatistics] = {}
        for shared, known in list(self._known.items()):
            latest = next(reversed(known.costs.values()), CallCosts())
            cost_ns = dict(sorted(latest.taken_ns.items()))
            before = found.get(shared.label, BatchStatistics())  # of another graph
            found[shared.label] = BatchStatistics(
                before.calls + known.calls,
                before.members + known.members,
                max(before.largest, known.largest),
                before.failed + known.failed,
                cost_ns,
            )
        return found

    async def _check(self, members: Sequence[BatchMember], together: Sequence[Sequence[Array]]) -> None:
        """Compute each member by itself, and log where the result is another."""
        shared = members[0].shared
        plan = await self._plan(shared, 1)
        if members[0].home is not None:
            together = [await asyncio.gather(*map(_on_host, found)) for found in together]
        for row, (member, found) in enumerate(zip(members, together, strict=True)):
            try:
                fed = shared.fed([member.inputs], _gathered)
                (alone,) = shared.parts(await self.bodies.run_batch(plan, fed), fed, [member.inputs])
            except SessionClosedError:
                return
            except Exception as error:
                _log.warning(
                    "member %d of a call of %s for %d has results together, and fails alone: %s",
                    *(row, shared.label, len(members), error),
                )
                continue
            for place, (one, many) in enumerate(zip(alone, found, strict=True)):
                if not _agree(np.asarray(one), np.asarray(many)):
                    given = ", ".join(map(describe, member.inputs))
                    _log.warning(
                        "result %d of %s differs for member %d of a call for %d (arguments %s): %r together, %r alone",
                        *(place, shared.label, row, len(members), given, many, one),
                    )

    def _failed(self, call: BatchCall[BatchMember], error: BaseException, *, divisible: bool = True) -> None:
        shared = call.members[0].shared
        error = error.error if isinstance(error, ExitRaised) else error
        call.members[0].known.count(len(call.members), failed=1)
        self._show(call, self.turn.clock(), error)
        self.steps.look()
        lacks_memory = isinstance(error, OutOfMemoryError | MemoryError)
        if self._batcher.failed(call, divisible=divisible and shared.is_repeatable, lacks_memory=lacks_memory):
            cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
            cause.add_note(f"in {shared.label}, a batched function, in a call for {len(call.members)}: {error}")
            for member in call.members:
                self.tell(member, of_firing(error) if isinstance(error, Exception) else cause)
            del error, cause  # members raise the error, and its traceback refers to this frame: avoid a cycle
        self.turn.wake()


def _traces_of(members: Sequence[BatchMember]) -> list[Trace]:
    """Return the traces that the members' runs are recorded into, except traces that record or replay an order."""
    found = {id(trace): trace for member in members if isinstance(trace := member.part.trace, Trace)}
    return [trace for trace in found.values() if trace.order is None]


def _name_of(members: Sequence[BatchMember]) -> str:
    runs = ", ".join(map(str, dict.fromkeys(member.part.run for member in members)))
    return f"{members[0].shared.label} for {len(members)}, of run {runs}"


def _staying(members: Sequence[BatchMember]) -> list[int]:
    """Places of results that some of the members need on their device."""
    return [k for k in members[0].shared.staying if any(k not in member.leaving for member in members)]


def _home(values: Sequence[Value]) -> str | None:
    """The device on which some values are; None for the host."""
    for value in values:
        if isinstance(value, DeviceArray):
            return value.device
    return None


def _gathered(join: Join, rows: Sequence[Array]) -> Array:
    """Return one input of all members; if some have it on a device, it is joined there when it is fed."""
    return join(np, rows) if _home(rows) is None else cast("Array", RowsToJoin(rows, join))


def _on_host(value: Value) -> Awaitable[Array]:
    """Return a future of the value on the host."""
    found: asyncio.Future[Array] = asyncio.get_running_loop().create_future()
    deliver = partial(resolve, found)
    if isinstance(value, DeviceValue):
        value.to_host(deliver)
    else:
        deliver(value, None)
    return found


def _agree(one: Array, other: Array) -> bool:
    """Return whether two results are equal within rounding; results of exact dtypes, to the bit."""
    if one.dtype.kind not in "fcV":
        return bool(np.array_equal(one, other))
    tolerance = _ROUNDINGS * float(np.finfo(one.dtype).eps) if one.dtype.kind in "fc" else _ROUNDINGS / 256
    one, other = (x.astype(np.float64) if x.dtype.kind == "V" else x for x in (one, other))
    scale = float(np.max(np.abs(one), initial=1.0, where=np.isfinite(one)))
    return bool(np.allclose(one, other, rtol=tolerance, atol=tolerance * scale, equal_nan=True))


install_gatherer(SharedBody, BatchMember)

__all__ = ["BatchMember", "Batches"]
