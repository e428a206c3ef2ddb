"""The runs of a session: what a call passes through before it is one, and those in flight."""

from __future__ import annotations

import asyncio
import secrets
from contextvars import copy_context
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from asyncflow.compiler.lowering.single_call import SingleCall, find_single_call
from asyncflow.compiler.program.request import PlanRequest, tell_watchers
from asyncflow.devices.cost import INLINE_LIMIT_NS
from asyncflow.devices.memory import TRACKED_BYTES
from asyncflow.errors import AsyncflowError, OutOfMemoryError, SessionClosedError, contained_exits
from asyncflow.lift.batched import BodyProgram, SharedCode
from asyncflow.runtime.observer import Observers, start_observed
from asyncflow.runtime.options import as_priority, as_timeout, check_trace
from asyncflow.runtime.run.admission import Admission, AdmissionTicket, ExpectedRun, in_time
from asyncflow.runtime.run.atomic import AtomicRuns, Claim
from asyncflow.runtime.run.batches import Batches
from asyncflow.runtime.run.channel import Channel
from asyncflow.runtime.run.cuts import Cuts
from asyncflow.runtime.run.memory_turns import MemoryTurns
from asyncflow.runtime.run.pools import Pools
from asyncflow.runtime.run.run import Run
from asyncflow.runtime.run.single_call import Begun, CountedCall, quiet_context, run_single_call, run_user_call
from asyncflow.runtime.run.versions import CompileFor, Versions
from asyncflow.runtime.run.vertex_pools import VertexPools
from asyncflow.runtime.scheduler.limited_calls import LimitedCalls
from asyncflow.runtime.scheduler.turn import Turn
from asyncflow.runtime.trace import Trace, current_trace, write_trace
from asyncflow.runtime.values.copies import CopyThread
from asyncflow.runtime.values.feeds import at_hand
from asyncflow.runtime.values.fetches import is_fresh, user_value
from asyncflow.runtime.values.foreign_feeds import as_of_now
from asyncflow.streams.beside import call_beside
from asyncflow.streams.holding import enclosing_parts, is_within, note_ask

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Collection, Hashable, Iterable, Mapping, Sequence

    from asyncflow.compiler.plan import Plan
    from asyncflow.devices.memory import MemoryAccount
    from asyncflow.devices.protocol import Device
    from asyncflow.runtime.session.calls import Call
    from asyncflow.runtime.session.plans import PlanCache
    from asyncflow.runtime.session.session_options import SessionOptions
    from asyncflow.state.containers import StateStore
    from asyncflow.values import Array, Nest, Value


class Runs:
    """Runs calls on the devices of one session; after `bind`, on its event loop alone.

    Args:
        devices: by name.
        plans: those of the session.
        compile: makes one that is missing.
        state: of the session's variables.
        options: of the session.

    Attributes:
        closed: why nothing runs any more; None while the session is open.
        drained: why nothing new runs any more; None while the session is not drained.
        in_flight: those that the scheduler runs.
        begun: how many there have been, the ones that needed no scheduler included.
        copies: of large arrays.
        admission: who has to wait; None without a limit.
        batches: firings that are computed together; None before `bind`.
        limited: functions with limits; None before `bind`.
        observers: who is told of runs; None while there never was one.
        memory_turns: who is done again; None without a limit of memory.
        random_seed: of the random ops of graphs without one.
        cuts: who waits for a moment between runs.
        versions: of variables.
        numbered_from: the number of a run, which random numbers depend on, is so much more than it is in `begun`.
    """

    def __init__(
        self,
        devices: Mapping[str, Device],
        plans: PlanCache,
        compile: CompileFor,
        state: StateStore,
        options: SessionOptions,
    ) -> None:
        self.closed: str | None = None
        self.drained: str | None = None
        self._is_stopping = False
        self._calls = 0
        self.in_flight: set[Run] = set()
        self.begun = 0
        self.copies = CopyThread()
        accounts = [device.memory for device in devices.values()]
        self.admission = (
            None
            if options.max_runs is None
            else Admission(options, accounts, sum(device.threads for device in devices.values()))
        )
        self.memory_turns = None if options.memory_limit is None else MemoryTurns()
        self._devices = devices
        self._plans = plans
        self._compile = compile
        self._options = options
        self.random_seed = secrets.randbits(63)
        self.numbered_from = 0
        self._quiet = quiet_context()
        self._atomic = AtomicRuns()
        self.cuts = Cuts(self.in_flight, self._atomic)
        self.versions = Versions(self.in_flight, plans, compile, state, self.copies)
        self.batches: Batches | None = None
        self.limited: LimitedCalls | None = None
        self.observers: Observers | None = None
        self._turn: Turn
        self._ended: asyncio.Event | None = None

    def bind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Runs are on this event loop from now on."""
        self._turn = Turn(loop)
        self.limited = self._turn.limited = LimitedCalls(loop, self._options.seed)
        self.batches = self._turn.batches = Batches(self._turn, self, self._options.seed or 0)
        self.batches.vertex_pools = VertexPools(self.batches)
        self.batches.pools = Pools(self.batches, self._options.max_iterations, is_watched=self._options.debug)

    # -- calls ---------------------------------------------------------------------------------------------------

    async def call(
        self,
        call: Call,
        values: Sequence[Value],
        timeout: float | None,
        trace: Trace | str | Path | None,
        allow_dead: bool,
        atomic: bool,
        priority: int = 0,
        is_wanted: Callable[[], bool] | None = None,
    ) -> Nest:
        """Do what `Session.run` promises, once it is known what to run.

        A caller on another thread may leave unnoticed; ``is_wanted()`` then says if it still takes the result.
        """
        note_ask()
        if timeout is not None:
            timeout = as_timeout(timeout)
        if type(priority) is not int:
            priority = as_priority(priority)
        if self.drained is not None:
            self._check_drained()
        if trace is None:
            recorder = current_trace()
        else:
            check_trace(trace, may_be_path=True)
            recorder = trace if isinstance(trace, Trace) else Trace()
        asked_s = self._turn.loop.time()
        graph = call.request.home.ref()  # nobody else may have it while the run goes on
        plan = call.plan if recorder is None and graph is not None and call.version == graph.version else None
        checked = begun = None
        waits = False
        if plan is not None and plan.single_call is not None and not atomic:
            # What needs no scheduler is over before anybody could wait for it.
            checked, waits = call.check(values)
            if not (waits or plan.read_on_host):
                found = self._run_single_call(plan, plan.single_call, checked, timeout, asked_s)
                if type(found) is list:
                    return call.result(plan, found, allow_dead=allow_dead)
                begun = cast("Begun | None", found)
        ticket = claim = taken = None
        is_whole = False
        self._calls += 1
        try:
            # Before anything is copied; a run that is part of another needs no leave.
            if begun is None and self.admission is not None:
                ticket = self._apply(self.admission, call.plan, timeout, asked_s, priority, values)
            if checked is None:
                checked, waits = call.check(values)
            if ticket is not None and ticket.turn is not None and self.admission is not None:
                checked = as_of_now(checked)
                await self.admission.wait(ticket)
            if plan is None or plan.read_on_host or waits:
                plan, checked = await self._ready(call, plan, checked, waits, timeout, asked_s, recorder)
                if plan.single_call is not None and recorder is None and not atomic:
                    found = self._run_single_call(plan, plan.single_call, checked, timeout, asked_s)
                    if type(found) is list:
                        return call.result(plan, found, allow_dead=allow_dead)
                    begun = cast("Begun | None", found)
                if ticket is None and begun is None and self.admission is not None and self.admission.is_auto:
                    ticket = self._apply(self.admission, plan, timeout, asked_s, priority, checked)
                    if ticket is not None and ticket.turn is not None:
                        checked = as_of_now(checked)
                        await self.admission.wait(ticket)
            if atomic or self._atomic.claims:
                checked = as_of_now(checked)
                claim = await self._claimed(plan, atomic, timeout, asked_s, ticket)
            if ticket is not None:
                ticket.queue.begin(ticket, plan.cost, self._turn.loop.time())
            staying = frozenset(plan.fetches[index] for index in call.staying) if call.staying else ()
            start = partial(self._start, plan, checked, timeout, asked_s, recorder, None, staying, claim)
            start = partial(start, priority=priority, begun=begun, ticket=ticket)
            is_recorded = recorder is not None and recorder.order is not None
            if timeout is not None and plan.only_awaits and self.admission is not None and self.admission.is_auto:
                fetched = await self._in_crowd(self.admission, start, plan)
            elif self.memory_turns is None or atomic or is_recorded or not plan.is_repeatable or is_within(self._turn):
                run = start()
                taken, work = run.taken, run.wait()
                del run  # an error that somebody keeps leads here
                fetched = await work
            else:
                fetched = await self._in_turn(start, plan, timeout, asked_s, ticket)
            fetched = await self.copies.of_results(fetched)
            if self.memory_turns is not None:
                self._hand_over(fetched)
            if is_wanted is not None and not is_wanted():
                raise asyncio.CancelledError
            is_whole = True
        except BaseException as error:
            if taken is not None:
                taken.settle(error)
            raise
        finally:
            if claim is not None:
                self._atomic.leave(claim)
            if ticket is not None and self.admission is not None:
                self.admission.leave(ticket, self._turn.loop.time(), is_whole=is_whole)
            try:
                # One that was refused leaves the trace that is there.
                if recorder is not None and checked is not None and isinstance(trace, str | Path):
                    await call_beside(write_trace, recorder, Path(trace))
            except BaseException as error:
                if taken is not None:
                    taken.settle(error)
                raise
            finally:
                self._calls -= 1
                if self._ended is not None:
                    self._ended.set()
        if taken is not None:
            taken.settle(None)
        return call.result(plan, fetched, allow_dead=allow_dead)

    async def _in_crowd(self, admission: Admission, start: Callable[..., Run], plan: Plan) -> list[Value]:
        """The values of a run that waits in coroutines, and is refused where too many of its plan do."""
        if is_within(self._turn):
            return await start().wait()
        with admission.in_progress(plan.cost):
            return await start().wait()

    def expect(self, timeout: float | None, priority: int) -> ExpectedRun:
        """Does what `Session.expect_run` promises."""
        if self.closed is not None:
            raise SessionClosedError(self.closed)
        if self.drained is not None:
            self._check_drained()
        if self.admission is None:
            return ExpectedRun(None, inf)
        now_s = asyncio.get_running_loop().time()
        return self.admission.expect(inf if timeout is None else now_s + timeout, now_s, priority)

    def _hand_over(self, fetched: Sequence[Value]) -> None:
        """Has results count no longer: they are the caller's, as what he feeds is."""
        own = [x for x in fetched if type(x) is np.ndarray and x.nbytes >= TRACKED_BYTES and is_fresh(x)]
        for device in self._devices.values() if own else ():
            device.memory.forget(own)

    async def warm_up(self, call: Call, values: Sequence[Value], sizes: Sequence[int]) -> int:
        """Does what `Session.warm_up` promises."""
        plan = await self._plans.get(call.request, self._compile)
        nodes = [node.source for partition in plan.partitions for node in partition.nodes]
        for shared in [node.attrs["shared"] for node in nodes if isinstance(node.attrs.get("shared"), SharedCode)]:
            for program in shared.programs():
                await self.plan_of(program)
        if not plan.is_repeatable:
            return 0
        number = self.begun + self.numbered_from
        for size in sizes:
            runs = (self.call(call, values, None, None, True, False) for _ in range(size))
            for result in await asyncio.gather(*runs, return_exceptions=True):
                if isinstance(result, BaseException):
                    raise result
        if self.begun + self.numbered_from == number + sum(sizes):  # or others have had numbers, too
            self.numbered_from -= sum(sizes)
        return sum(sizes)

    async def stream(
        self,
        ask: Callable[[], tuple[Call, Sequence[Value]]],
        timeout: float | None,
        trace: Trace | None,
        priority: int = 0,
    ) -> AsyncGenerator[Nest, None]:
        """Does what `Session.stream` promises; ``ask()`` gives what to run, and the values to feed."""
        timeout = as_timeout(timeout)
        priority = as_priority(priority)
        check_trace(trace, may_be_path=False)
        if self.drained is not None:
            self._check_drained()
        call, values = ask()
        checked, waits = call.check(values)
        asked_s = self._turn.loop.time()
        recorder = trace or current_trace()
        channel = Channel(self._turn.loop)
        ticket: AdmissionTicket | None = None
        run: Run | None = None
        self._calls += 1
        try:
            plan, checked = await self._ready(call, None, checked, waits, timeout, asked_s, recorder)
            checked = as_of_now(checked)
            if self.admission is not None:
                ticket = self._apply(self.admission, plan, timeout, asked_s, priority, values)
                if ticket is not None:
                    await self.admission.wait(ticket)
            if self._atomic.claims:
                await self._claimed(plan, False, timeout, asked_s, ticket)
            if ticket is not None:
                ticket.queue.begin(ticket, plan.cost, self._turn.loop.time())
            run = self._start(plan, checked, timeout, asked_s, recorder, channel, priority=priority, ticket=ticket)
            while (items := await channel.get()) is not None:
                # The loop goes on with the same arrays, so the consumer gets copies.
                copies = await self.copies.of_results(items, shared=True)
                found = zip(call.request.streamed, items, copies, strict=True)
                yield call.structure.unflatten([user_value(x, copy, copy is value, False) for x, value, copy in found])
            await run.wait()
        except AsyncflowError as error:
            if run is not None and run.taken is not None:
                run.taken.settle(error)
            raise
        finally:
            try:
                if run is not None and not run.is_finished:
                    run.stop("cancelled")
                    await run.wait()
            finally:
                channel.discard()  # what nobody has taken leads to the run, and the run to the channel
                if ticket is not None and self.admission is not None:
                    self.admission.leave(ticket, self._turn.loop.time())
                self._calls -= 1
                self.tell_ended()

    # -- what a call waits for -----------------------------------------------------------------------------------

    def _check_drained(self) -> None:
        """Raises SessionClosedError, but for what a run of the drained session asks for: it is part of that one."""
        if not is_within(self._turn):
            raise SessionClosedError(self.closed or self.drained)

    def _apply(
        self,
        admission: Admission,
        plan: Plan | None,
        timeout: float | None,
        asked_s: float,
        priority: int,
        values: Sequence[Value],
    ) -> AdmissionTicket | None:
        """Return the leave of a run to start, or its place among those that wait; None where it needs none.

        Raises:
            OverloadedError: it may not even wait.
        """
        if admission.expected:
            admission.arrived()
        # With "auto" a plan says whether its runs need a place; it is compiled first.
        if admission.is_auto and (plan is None or plan.gathers or admission.spares(plan, self._calls, self.begun)):
            return None
        if is_within(self._turn):
            return None
        end_s = inf if timeout is None else asked_s + timeout
        return admission.apply(plan, end_s, self._turn.loop.time(), priority, values)

    async def _ready(
        self,
        call: Call,
        plan: Plan | None,
        values: list[Value],
        waits: bool,
        timeout: float | None,
        asked_s: float,
        trace: Trace | None,
    ) -> tuple[Plan, list[Value]]:
        """The plan of a call, kept there unless it is for a trace that looks inside regions; the values where it is.

        While a large graph is compiled, those of other libraries may change: they are taken as of now.
        """
        if waits:
            async with in_time(timeout, asked_s, "what is fed was not copied"):
                values = await self.copies.of_feeds(values)
        if plan is None:
            values = as_of_now(values)
            inside = trace is not None and trace.detail == "node"
            request = call.request._replace(regions=False) if inside else call.request
            version = request.graph.version
            tell_watchers(request, values)
            async with in_time(timeout, asked_s, "the graph was not compiled", "that goes on, for later runs"):
                plan = await self._plans.get(request, self._compile)
            if not inside:
                if call.plan is not None and not plan.cost.recent_s:
                    plan.cost = call.plan.cost  # the graph has grown, and the run does what it did
                call.plan, call.version = plan, version
        if plan.read_on_host or waits:
            async with in_time(timeout, asked_s, "what the run needs of other libraries and devices was not there"):
                values = await at_hand(values, call.request.feeds, plan, self._devices)
        return plan, values

    async def _claimed(
        self, plan: Plan, atomic: bool, timeout: float | None, asked_s: float, ticket: AdmissionTicket | None
    ) -> Claim | None:
        """Returns when a run may start as far as atomic ones are concerned; its own claim, if it is one."""
        within = enclosing_parts()

        async def wait() -> Claim | None:
            if atomic:
                return await self._atomic.claim(plan.states, within, self.in_flight)
            await self._atomic.wait(plan.states, within)
            return None

        async with in_time(timeout, asked_s, "other runs that use the same variables did not end"):
            if self.admission is None or ticket is None:
                return await wait()
            while True:
                claim = await self.admission.held_up(ticket, wait)
                if not ticket.is_aside:
                    return claim
                try:
                    await self.admission.back(ticket)
                except BaseException:
                    if claim is not None:
                        self._atomic.leave(claim)
                    raise
                if claim is not None:
                    return claim  # else others may have claimed what the run uses, meanwhile

    async def _in_turn(
        self,
        start: Callable[..., Run],
        plan: Plan,
        timeout: float | None,
        asked_s: float,
        ticket: AdmissionTicket | None,
    ) -> list[Value]:
        """The values of a run that is done again, alone, if it passes the memory limit beside others."""
        number: int | None = None
        turns, batches = self.memory_turns, self.batches
        assert turns is not None and batches is not None

        async def attempt() -> list[Value]:
            nonlocal number
            if turns.is_alone and batches.is_left_over():
                async with waits():
                    await self._wait(lambda: self.closed is not None or not batches.is_left_over(), None)
            if self._atomic.claims:
                await self._claimed(plan, False, timeout, asked_s, ticket)
            run = start(has_age=True, number=number)
            number = run.number  # it draws the same again, and later runs what they draw in any case
            return await run.wait()

        waits = partial(in_time, timeout, asked_s, "runs that it does not fit into memory with did not end")
        return await turns.values(attempt, waits, batches.is_left_over)

    # -- running -------------------------------------------------------------------------------------------------

    def _run_single_call(
        self,
        plan: Plan,
        call: SingleCall,
        values: list[Value],
        timeout: float | None,
        asked_s: float,
        limit_ns: float = INLINE_LIMIT_NS,
        *,
        is_part: bool = False,
    ) -> list[Value] | Begun | None:
        """The fetched values of a plan that is one call; None, or what is begun, if the scheduler has to do it."""
        has_own_turn = limit_ns > INLINE_LIMIT_NS
        if self.closed is not None or self._options.debug or not (has_own_turn or self._turn.has_time()):
            return None
        # It is over at once, so a deadline that has not passed will be kept.
        if timeout is not None and self._turn.loop.time() >= asked_s + timeout:
            return None
        if self._atomic.claims and self._atomic.holds_up(plan.states):
            return None
        began_s = 0.0 if self.observers is None else self.observers.now()
        device = self._devices[plan.partitions[0].device]
        if call.node.is_user:
            # What is begun is neither refused nor begun anew, and an observer sees the calls of a function in its run.
            is_limited = self.admission is not None and not self.admission.is_auto
            if is_part or is_limited or self.observers is not None or self.memory_turns is not None:
                return None
            made = run_user_call(call, device, values)
            if type(made) is list:
                self.begun += 1
                plan.used = self.begun
            return made
        try:
            found = run_single_call(call, device, self._quiet, values, limit_ns)
        except OutOfMemoryError:
            if self.memory_turns is None or not plan.is_repeatable:
                raise
            return None  # others may end
        if found is not None:
            self.begun += 1
            plan.used = self.begun
            if is_part:
                self.numbered_from -= 1  # see `_start`
            elif self.memory_turns is not None:
                self._hand_over(found)
            if self.observers is not None:
                start_observed(began_s)
        return found

    def _start(
        self,
        plan: Plan,
        values: Sequence[Value],
        timeout: float | None,
        asked_s: float,
        trace: Trace | None,
        channel: Channel | None,
        staying: Collection[int | None] = (),
        claim: Claim | None = None,
        *,
        has_age: bool = False,
        is_part: bool = False,
        priority: int = 0,
        name: str = "",
        on_end: Callable[[Run], None] | None = None,
        number: int | None = None,
        begun: Begun | None = None,
        ticket: AdmissionTicket | None = None,
    ) -> Run:
        if self._is_stopping or (self.closed is not None and not is_part):  # while the plan was compiled
            raise SessionClosedError(self.closed or self.drained)
        self.begun += 1
        plan.used = self.begun
        # A stream waits for its consumer, which may itself wait for runs of the session.
        if channel is None and not (plan.waits or plan.takes or plan.awaits):
            ticket = None  # the run never waits, so it keeps its place to its end
        run = Run(
            plan,
            number=self.begun + self.numbered_from if number is None else number,
            devices=self._devices,
            turn=self._turn,
            options=self._options,
            seed=self.random_seed if plan.graph.seed is None else plan.graph.seed,
            trace=trace,
            emitter=channel,
            staying=staying,
            on_end=self._forget if on_end is None else partial(self._forget, then=on_end),
            has_age=has_age,
            name=name,
            ticket=ticket,
            context=copy_context() if self.observers is None else start_observed(self.observers.now()),
        )
        run.part.priority = priority
        run.begun = begun
        if is_part or number is not None:
            self.numbered_from -= 1  # the numbers of runs, and so what they draw, depend on no batch
        elif trace is not None and trace.order is not None:
            trace.order.run, trace.order.placement = run.number, plan.placement.devices
        if claim is not None:
            claim.part = run.part
        if self._atomic.claims:
            self._atomic.on_start(run)
        self.in_flight.add(run)
        run.start(values, timeout, asked_s)
        return run

    def _forget(self, run: Run, then: Callable[[Run], None] | None = None) -> None:
        self.in_flight.discard(run)
        if self._atomic.claims:
            self._atomic.on_end(run)
        if self.cuts.waiting:
            self.cuts.on_end(run)
        if self.versions.retired:
            self.versions.on_end(run)
        if self._ended is not None:
            self._ended.set()
        if then is not None:
            then(run)

    def tell_ended(self) -> None:
        """Has those look again who wait for something to end."""
        if self._ended is not None:
            self._ended.set()

    async def alone(self, states: frozenset[Hashable], act: Callable[[], None]) -> None:
        """Calls `act` when no run that touches `states` is in flight; later ones wait until it has returned.

        Raises:
            RuntimeError: a run that touches them asks, and would wait for itself.
        """
        claim = await self._atomic.claim(states, enclosing_parts(), self.in_flight)
        try:
            act()
        finally:
            self._atomic.leave(claim)

    # -- batches -------------------------------------------------------------------------------------------------

    async def plan_of(self, program: BodyProgram, stores_on: str | None = None) -> Plan:
        """Return the plan of a body that runs share.

        Args:
            program: the body.
            stores_on: the device that has what the stores among its inputs hold.
        """
        regions = self._options.regions
        request = PlanRequest(program.graph.home, program.fetches, program.feeds, regions=regions, stores_on=stores_on)
        return await self.versions.plan_of(request, program.states)

    def run_short(self, plan: Plan, values: list[Array], limit_ns: float = INLINE_LIMIT_NS) -> list[Array] | None:
        """The fetched values of a body; None if computing them may take longer than the event loop is to be held."""
        if plan.single_call is None:
            return None
        with contained_exits:
            found = self._run_single_call(plan, plan.single_call, list(values), None, 0.0, limit_ns, is_part=True)
        return cast("list[Array] | None", found)

    def counted_call(self, plan: Plan) -> CountedCall | None:
        """The steps of a pooled loop as calls; None if they need the scheduler."""
        devices = list(self._devices.values())
        # Steps draw by the keys of their rows. What else asks for a context moves values out of a memory that is full.
        has_context = all(device.swapping is None for device in devices)
        options = {"may_loop": True, "has_context": has_context}
        call = None if self._options.debug else find_single_call(plan.partitions, devices, **options)
        return None if call is None else CountedCall(call, self._devices[plan.partitions[0].device], self._quiet)

    def may_call(self, plan: Plan) -> bool:
        """Whether a body may be computed here and now, as far as other runs are concerned."""
        is_held_up = self._atomic.claims and self._atomic.holds_up(plan.states)
        return self.closed is None and not is_held_up and current_trace() is None

    async def run_batch(self, plan: Plan, values: list[Array]) -> list[Array]:
        """The fetched values of a body; see `start_batch`."""
        with contained_exits:
            return cast("list[Array]", await self.start_batch(plan, values, trace=current_trace()).wait())

    def memory_of(self, plan: Plan) -> MemoryAccount:
        """The account of the device that computes a body of one partition."""
        return self._devices[plan.partitions[0].device].memory

    def count_rows(self, plan: Plan, rows: Iterable[Value], label: str) -> None:
        """Count arrays of rows that a body of one partition is given; a `memory_limit` leaves room for them."""
        memory = self.memory_of(plan)
        if memory.limit is None:
            for array in rows:
                memory.track(array, label)

    def threads_of(self, plan: Plan) -> int:
        """How many calls of a body may be computed at the same time: a user's function gets one at a time."""
        devices = [self._devices[partition.device] for partition in plan.partitions]
        has_users = any(node.is_user for partition in plan.partitions for node in partition.nodes)
        return 1 if has_users else min(device.threads for device in devices)

    def memory_home(self, plan: Plan) -> str | None:
        """The device that a body runs on, if it is one, and can keep values between runs."""
        device = self._devices[plan.partitions[0].device]
        is_home = len(plan.partitions) == 1 and device.asynchronous is not None and device.capabilities.own_memory
        return device.name if is_home else None

    def start_batch(
        self,
        plan: Plan,
        values: Sequence[Value],
        on_end: Callable[[Run], None] | None = None,
        trace: Trace | None = None,
        name: str = "",
        staying: Sequence[int] = (),
    ) -> Run:
        """A run of a body: a part of the runs that it computes for, also while these are drained.

        Args:
            plan: of the body.
            values: to feed.
            on_end: is called with the run at its end, which may be before this returns.
            trace: to record into.
            name: as the trace shows it.
            staying: which of the fetched values stay on their device.
        """
        now_s = self._turn.loop.time()
        keeps = frozenset(plan.fetches[index] for index in staying)
        return self._start(plan, values, None, now_s, trace, None, keeps, is_part=True, name=name, on_end=on_end)

    # -- ending --------------------------------------------------------------------------------------------------

    def refuse(self, why: str) -> None:
        """Starts nothing more, and ends all waiting."""
        self.closed = why
        if self.admission is not None:
            self.admission.close(why)
        if self.batches is not None and self._turn.loop.is_closed():
            self.in_flight.clear()  # no callback will ever say that they have ended

    def release(self) -> None:
        """Lets go of what was kept for later runs."""
        if self.batches is not None:
            self.batches.clear()

    async def drain(self, why: str, grace_s: float) -> None:
        """Refuses what is new, and gives what was asked for before so many seconds to end; then stops the rest."""
        self.drained = why
        if self.batches is not None:
            self.batches.hurry()
        if grace_s > 0:
            await self._wait(lambda: not (self._calls or self.in_flight), grace_s)
        self._is_stopping = True
        if self.admission is not None:
            self.admission.close(why)
        for run in list(self.in_flight):
            run.close()
        await self._wait(lambda: not self.in_flight, None)

    async def end(self, grace_s: float) -> None:
        """Gives runs in flight so many seconds to end, but for streams whose consumers have gone: those are stopped."""
        if self.batches is not None and self.in_flight:
            self.batches.hurry()
        for run in list(self.in_flight):
            if run.emitter is not None and not run.emitter.has_consumer:
                run.close()
        if grace_s > 0:
            await self._wait(lambda: not self.in_flight, grace_s)

    async def stop(self) -> None:
        """Stops what is still in flight."""
        self._is_stopping = True
        for run in list(self.in_flight):
            run.close()
        if self.batches is not None:
            await self.batches.aclose()
        self.tell_ended()
        await self._wait(lambda: not self.in_flight, None)

    async def _wait(self, is_over: Callable[[], bool], grace_s: float | None) -> None:
        self._ended = ended = self._ended or asyncio.Event()
        try:
            async with asyncio.timeout(grace_s):
                while not is_over():
                    ended.clear()
                    await ended.wait()
        except TimeoutError:
            pass  # the caller stops what is left
