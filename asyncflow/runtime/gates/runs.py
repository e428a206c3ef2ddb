"""The runs of a session: the gates that a call passes before it is one.

The gates come in this order. A call that needs no scheduler is done at once. Else it waits for its place (`Admission`),
for its plan and feeds, and for atomic runs (`AtomicRuns`). It runs, and where memory is short again, alone
(`MemoryTurns`). Its results are copied. `Session.stream` passes the same gates.
"""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, cast

from asyncflow.compiler.program.request import tell_watchers
from asyncflow.devices.captures import WARM_UPS
from asyncflow.errors import AsyncflowError, SessionClosedError
from asyncflow.lift.calls.batched import SharedCode
from asyncflow.runtime.calls.options import as_priority, as_timeout, check_trace
from asyncflow.runtime.executor.kernels.limited_calls import LimitedCalls
from asyncflow.runtime.executor.turn import Turn
from asyncflow.runtime.gates.admission import Admission, AdmissionTicket, ExpectedRun
from asyncflow.runtime.gates.captured_ahead import capture_ahead
from asyncflow.runtime.gates.in_flight import InFlight, Passed
from asyncflow.runtime.gates.memory_turns import MemoryTurns
from asyncflow.runtime.gates.versions import CompileFor, Versions
from asyncflow.runtime.run.ask import Ask
from asyncflow.runtime.run.channel import Channel
from asyncflow.runtime.shared.batches import Batches
from asyncflow.runtime.shared.bodies import Bodies
from asyncflow.runtime.shared.pools import Pools
from asyncflow.runtime.shared.vertex_pools import VertexPools
from asyncflow.runtime.values.copies import CopyThread, has_large
from asyncflow.runtime.values.feeds import at_hand
from asyncflow.runtime.values.fetches import user_value
from asyncflow.runtime.values.foreign_feeds import as_of_now
from asyncflow.runtime.watch.trace import Trace, current_trace, write_trace
from asyncflow.streams.beside import call_beside
from asyncflow.streams.holding import enclosing_parts, is_within, note_ask

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Hashable, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

    from asyncflow.compiler.plan import Plan
    from asyncflow.devices.protocol import Device
    from asyncflow.runtime.calls.calls import Call
    from asyncflow.runtime.calls.plans import PlanCache
    from asyncflow.runtime.calls.session_options import SessionOptions
    from asyncflow.runtime.executor.kernels.single_call import Begun
    from asyncflow.runtime.gates.atomic import Claim
    from asyncflow.runtime.run.run import Run
    from asyncflow.state.containers import StateStore
    from asyncflow.state.elements.taken import Taken
    from asyncflow.values import Nest, Value


@dataclass(slots=True, eq=False, kw_only=True)
class _GatedCall(Passed):
    """A call on its way through the gates.

    Attributes:
        call: what to run.
        ask: the options of the call.
        plan: of the call; None until it is known.
        waits: some of the values still have to be copied or read.
        allow_dead: fetches on a branch not taken give None.
        is_wanted: returns whether the caller, on another thread, still takes the result.
        values: the fed values, once they are checked.
        is_checked: True once the values are checked.
        taken: the elements that its run has taken and gives back if it ends early.
    """

    call: Call = field(kw_only=False)
    ask: Ask = field(kw_only=False)
    plan: Plan | None = None
    waits: bool = False
    allow_dead: bool = False
    is_wanted: Callable[[], bool] | None = None
    values: list[Value] = field(default_factory=list)
    is_checked: bool = False
    taken: Taken | None = None

    def take_now(self) -> None:
        """Copy fed values before the call waits: the caller may change them afterwards."""
        self.values = as_of_now(self.values)


class Runs:
    """Runs calls on the devices of one session; after `bind`, on its event loop alone.

    Args:
        devices: by name.
        plans: plans of the session.
        compile: compiles a missing plan.
        state: of the session's variables.
        options: of the session.

    Attributes:
        in_flight: runs that have started.
        copies: of large arrays.
        admission: lets runs start within the limits; None without a limit.
        batches: firings that are computed together; None before `bind`.
        limited: functions with limits; None before `bind`.
        memory_turns: turns of runs that are computed again; None without a limit of memory.
        versions: of variables.
    """

    def __init__(
        self,
        devices: Mapping[str, Device],
        plans: PlanCache,
        compile: CompileFor,
        state: StateStore,
        options: SessionOptions,
    ) -> None:
        self._calls = 0
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
        self.in_flight = InFlight(devices, options)
        self.versions = Versions(self.in_flight.runs, plans, compile, state, self.copies)
        self.in_flight.versions = self.versions
        self._bodies = Bodies(self.in_flight, devices, options, self.versions.plan_of)
        self.batches: Batches | None = None
        self.limited: LimitedCalls | None = None

    def bind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Runs are on this event loop from now on."""
        turn = self.in_flight.turn = Turn(loop)
        self.limited = turn.limited = LimitedCalls(loop, self._options.seed)
        self.batches = turn.batches = Batches(turn, self._bodies, self._options.seed or 0)
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
        """Run a call (`Session.run`) once its request is known; `Ask` has the other options."""
        note_ask()
        if timeout is not None or type(priority) is not int:
            timeout, priority = as_timeout(timeout), as_priority(priority)
        in_flight = self.in_flight
        if in_flight.drained is not None:
            in_flight.check_drained()
        recorder = current_trace() if trace is None else _recorder(trace)
        asked_s = in_flight.turn.loop.time()
        graph = call.request.home.ref()  # the caller may drop its own reference during the run
        plan = call.plan if recorder is None and graph is not None and call.version == graph.version else None
        checked, begun, waits = None, None, False
        if plan is not None and plan.single_call is not None and not atomic:
            # A single call without a scheduler ends before any caller could wait for it.
            checked, waits = call.check(values)
            if not (waits or plan.survey.read_on_host):
                found = in_flight.run_single_call(plan, checked, timeout, asked_s)
                if type(found) is list:
                    return call.result(plan, found, allow_dead=allow_dead)
                begun = cast("Begun | None", found)
        ask = Ask(asked_s, timeout, recorder, priority, atomic, None, call.staying)
        ticket, admission = None, self.admission
        if admission is not None and begun is None:
            ticket = admission.enter(call.plan, ask, values, in_flight.turn, self._calls + 1, in_flight.begun)
        held = atomic or in_flight.atomic.claims or ticket or begun or is_wanted or self.memory_turns
        if plan is not None and not (held or plan.survey.takes or (timeout is not None and plan.survey.only_awaits)):
            if checked is None:
                checked, waits = call.check(values)
            if not (waits or plan.survey.read_on_host):
                return call.result(plan, await self._free(plan, checked, ask), allow_dead=allow_dead)
        passing = _GatedCall(call, ask, ticket=ticket, begun=begun, plan=plan, waits=waits)
        passing.allow_dead, passing.is_wanted = allow_dead, is_wanted
        passing.values, passing.is_checked = checked or [], checked is not None
        return await self._passed(passing, values, trace)

    async def _free(self, plan: Plan, values: list[Value], ask: Ask) -> list[Value]:
        """The fetched values of a call that no gate holds up.

        Most calls wait for nothing. They go without the record that gates need, which saves a small request a tenth of
        its instructions.
        """
        self._calls += 1  # a drained session waits for it
        try:
            fetched = await self.in_flight.start(plan, values, ask).wait()
            return await self.copies.of_results(fetched) if has_large(fetched) else fetched
        finally:
            self._calls -= 1
            if self.in_flight.ended is not None:
                self.in_flight.ended.set()

    async def _passed(self, passing: _GatedCall, values: Sequence[Value], trace: Trace | str | Path | None) -> Nest:
        """The result of a call that passes the gates; its trace is written where `trace` is a path."""
        ask, in_flight, is_whole = passing.ask, self.in_flight, False
        self._calls += 1
        try:
            try:
                plan, fetched = await self._open(passing, values)
                if fetched is None:
                    if self.memory_turns is None and (ask.timeout is None or not plan.survey.only_awaits):
                        run = in_flight.start(plan, passing.values, ask, passing)
                        passing.taken, work = run.taken, run.wait()
                        del run  # an error kept by the caller refers to this frame
                    else:
                        work = self._carefully(plan, passing)
                    fetched = await work
                    if has_large(fetched):
                        fetched = await self.copies.of_results(fetched)
                    if self.memory_turns is not None:
                        in_flight.hand_over(fetched)
                    if passing.is_wanted is not None and not passing.is_wanted():
                        raise asyncio.CancelledError
                    is_whole = True
            finally:
                if passing.claim is not None or passing.ticket is not None:
                    self._leave(passing, is_whole=is_whole)
                # A refused run does not overwrite the existing trace file.
                if isinstance(trace, str | Path) and passing.is_checked and ask.trace is not None:
                    await call_beside(write_trace, ask.trace, Path(trace))
        except BaseException as error:
            if passing.taken is not None:
                passing.taken.settle(error)
            raise
        finally:
            self._calls -= 1
            if in_flight.ended is not None:
                in_flight.ended.set()
        if passing.taken is not None:
            passing.taken.settle(None)
        return passing.call.result(plan, fetched, allow_dead=passing.allow_dead)

    async def stream(
        self,
        ask: Callable[[], tuple[Call, Sequence[Value]]],
        timeout: float | None,
        trace: Trace | None,
        priority: int = 0,
    ) -> AsyncGenerator[Nest, None]:
        """Stream the results of a call (`Session.stream`); ``ask()`` returns the call and the values to feed."""
        timeout, priority = as_timeout(timeout), as_priority(priority)
        check_trace(trace, may_be_path=False)
        in_flight = self.in_flight
        if in_flight.drained is not None:
            in_flight.check_drained()
        call, values = ask()
        channel, asked_s = Channel(in_flight.turn.loop), in_flight.turn.loop.time()
        recorder = trace or current_trace()
        asked = Ask(asked_s=asked_s, timeout=timeout, trace=recorder, priority=priority, emitter=channel)
        passing = _GatedCall(call, asked, ticket=self._enter(call.plan, asked, values))
        run: Run | None = None
        self._calls += 1
        try:
            plan, _ = await self._open(passing, values)
            run = in_flight.start(plan, passing.values, asked, passing)
            while (items := await channel.get()) is not None:
                # The loop goes on using the same arrays, so the consumer gets copies.
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
                channel.discard()  # avoid a cycle: values in the channel refer to the run, and the run to the channel
                self._leave(passing)
                self._calls -= 1
                in_flight.tell_ended()

    async def warm_up(self, call: Call, values: Sequence[Value], sizes: Sequence[int]) -> int:
        """Warm up a call (`Session.warm_up`)."""
        in_flight = self.in_flight
        plan = await self._plans.get(call.request, self._compile)
        nodes = [node for partition in plan.partitions for node in partition.nodes]
        attrs = [node.source.attrs.get("shared") for node in nodes]
        for program in [program for x in attrs if isinstance(x, SharedCode) for program in x.programs()]:
            shared = await self._bodies.plan_of(program)
            nodes += [node for partition in shared.partitions for node in partition.nodes]
        if not plan.survey.is_repeatable:
            await self.capture(call, values)
            return 0
        # CUDA graphs are captured when shapes repeat, and each of `sizes` makes batches of another shape.
        times = WARM_UPS + 1 if any(getattr(node.kernel, "graphs", None) is not None for node in nodes) else 1
        made, number = times * sum(sizes), in_flight.begun + in_flight.numbered_from
        for size in [size for size in sizes for _ in range(times)]:
            runs = (self.call(call, values, None, None, True, False) for _ in range(size))
            for result in await asyncio.gather(*runs, return_exceptions=True):
                if isinstance(result, BaseException):
                    raise result
        if in_flight.begun + in_flight.numbered_from == number + made:  # else other runs have taken numbers, too
            in_flight.numbered_from -= made
        return made

    async def capture(self, call: Call, values: Sequence[Value]) -> None:
        """Capture CUDA graphs for such values before there are runs (`capture_ahead`)."""
        checked, waits = call.check(values)
        checked = await self.copies.of_feeds(as_of_now(checked)) if waits else checked
        plan = await self._plans.get(call.request, self._compile)
        checked = await at_hand(checked, call.request.feeds, plan, self._devices)
        await capture_ahead(plan, checked, self._devices, self.in_flight)

    def expect(self, timeout: float | None, priority: int) -> ExpectedRun:
        """Expect a run (`Session.expect_run`)."""
        if self.in_flight.closed is not None:
            raise SessionClosedError(self.in_flight.closed)
        if self.in_flight.drained is not None:
            self.in_flight.check_drained()
        if self.admission is None:
            return ExpectedRun(None, inf)
        now_s = asyncio.get_running_loop().time()
        return self.admission.expect(inf if timeout is None else now_s + timeout, now_s, priority)

    # -- gates ---------------------------------------------------------------------------------------------------

    def _enter(self, plan: Plan | None, ask: Ask, values: Sequence[Value], calls: int = 0) -> AdmissionTicket | None:
        """Return the ticket of a call (`Admission.enter`), before anything is copied; `calls` include it."""
        if self.admission is None:
            return None
        in_flight = self.in_flight
        return self.admission.enter(plan, ask, values, in_flight.turn, calls or self._calls + 1, in_flight.begun)

    async def _open(self, passing: _GatedCall, values: Sequence[Value]) -> tuple[Plan, list[Value] | None]:
        """Comes back when a run may start, with its plan; and with its fetched values, if it is over by then."""
        ask, in_flight, admission = passing.ask, self.in_flight, self.admission
        if not passing.is_checked:
            passing.values, passing.waits = passing.call.check(values)
            passing.is_checked = True
        if admission is not None and passing.ticket is not None and passing.ticket.turn is not None:
            passing.take_now()
            await admission.wait(passing.ticket)
        plan = passing.plan
        if plan is None or plan.survey.read_on_host or passing.waits:
            plan = await self._ready(passing)
            if plan.single_call is not None and ask.trace is None and not ask.atomic and ask.emitter is None:
                found = in_flight.run_single_call(plan, passing.values, ask.timeout, ask.asked_s)
                if type(found) is list:
                    return plan, found
                passing.begun = cast("Begun | None", found)
            if admission is not None and admission.is_auto and passing.ticket is None and passing.begun is None:
                passing.ticket = self._enter(plan, ask, passing.values, self._calls)
                if passing.ticket is not None and passing.ticket.turn is not None:
                    passing.take_now()
                    await admission.wait(passing.ticket)
        if ask.atomic or in_flight.atomic.claims:
            passing.take_now()
            passing.claim = await self._claimed(plan, passing)
        if passing.ticket is not None:
            passing.ticket.queue.begin(passing.ticket, plan.cost, in_flight.turn.loop.time())
        return plan, None

    async def _ready(self, passing: _GatedCall) -> Plan:
        """The plan of a call, kept there unless it is for a trace that looks inside regions; its values where it is."""
        call, ask, plan = passing.call, passing.ask, passing.plan
        if passing.waits:
            async with ask.in_time("the feeds were not copied"):
                passing.values = await self.copies.of_feeds(passing.values)
        if plan is None:
            passing.take_now()
            inside = ask.trace is not None and ask.trace.detail == "node"
            request = call.request._replace(regions=False) if inside else call.request
            version = request.graph.version
            tell_watchers(request, passing.values)
            async with ask.in_time("the graph was not compiled", "that goes on, for later runs"):
                plan = await self._plans.get(request, self._compile)
            if not inside:
                if call.plan is not None and not plan.cost.recent_s:
                    plan.cost = call.plan.cost  # the graph has grown, but the run does the same work
                call.plan, call.version = plan, version
        if plan.survey.read_on_host or passing.waits:
            async with ask.in_time("values of other libraries and devices had not arrived"):
                passing.values = await at_hand(passing.values, call.request.feeds, plan, self._devices)
        return plan

    async def _claimed(self, plan: Plan, passing: _GatedCall) -> Claim | None:
        """Returns when a run may start as far as atomic ones are concerned; its own claim, if it is one."""
        atomic, within, ticket = self.in_flight.atomic, enclosing_parts(), passing.ticket

        async def wait() -> Claim | None:
            if passing.ask.atomic:
                return await atomic.claim(plan.survey.states, within, self.in_flight.runs)
            await atomic.wait(plan.survey.states, within)
            return None

        async with passing.ask.in_time("other runs that use the same variables did not end"):
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
                        atomic.leave(claim)
                    raise
                if claim is not None:
                    return claim  # else another run may have claimed its resources meanwhile

    async def _carefully(self, plan: Plan, passing: _GatedCall) -> list[Value]:
        """The values of a run that may not fit: beside runs of its plan that wait, too, or into a limited memory."""
        in_flight, ask, admission, turns = self.in_flight, passing.ask, self.admission, self.memory_turns
        is_part = is_within(in_flight.turn)
        if ask.timeout is not None and plan.survey.only_awaits and admission is not None and admission.is_auto:
            with nullcontext() if is_part else admission.in_progress(plan.cost):
                return await in_flight.start(plan, passing.values, ask, passing).wait()
        is_recorded = ask.trace is not None and ask.trace.order is not None
        if turns is None or ask.atomic or is_recorded or is_part or not plan.survey.is_repeatable:
            run = in_flight.start(plan, passing.values, ask, passing)
            passing.taken, work = run.taken, run.wait()
            del run  # an error kept by the caller refers to this frame
            return await work
        waits = partial(ask.in_time, "runs that it does not fit into memory with did not end")
        return await turns.values(partial(self._attempt, plan, passing, turns, waits), waits, self._is_left_over)

    async def _attempt(
        self,
        plan: Plan,
        passing: _GatedCall,
        turns: MemoryTurns,
        waits: Callable[[], AbstractAsyncContextManager[None]],
    ) -> list[Value]:
        """The values of a run that is done again, alone, if it passes the memory limit beside others."""
        in_flight = self.in_flight
        if turns.is_alone and self._is_left_over():
            async with waits():
                await in_flight.wait(lambda: in_flight.closed is not None or not self._is_left_over(), None)
        if in_flight.atomic.claims:
            await self._claimed(plan, passing)
        passing.has_age = True
        run = in_flight.start(plan, passing.values, passing.ask, passing)
        passing.number = run.number  # the same number draws the same random numbers again
        return await run.wait()

    def _is_left_over(self) -> bool:
        """Return True if memory is held for runs that have been stopped."""
        return self.batches is not None and self.batches.is_left_over()

    def _leave(self, passing: _GatedCall, *, is_whole: bool = False) -> None:
        """Give back what the gates gave to a call that has ended in any way."""
        if passing.claim is not None:
            self.in_flight.atomic.leave(passing.claim)
        if passing.ticket is not None and self.admission is not None:
            self.admission.leave(passing.ticket, self.in_flight.turn.loop.time(), is_whole=is_whole)

    async def alone(self, states: frozenset[Hashable], act: Callable[[], None]) -> None:
        """Calls `act` when no run that touches `states` is in flight; later ones wait until it has returned.

        Raises:
            RuntimeError: a run that touches them asks, and would wait for itself.
        """
        atomic = self.in_flight.atomic
        claim = await atomic.claim(states, enclosing_parts(), self.in_flight.runs)
        try:
            act()
        finally:
            atomic.leave(claim)

    # -- ending --------------------------------------------------------------------------------------------------

    def refuse(self, why: str) -> None:
        """Start no more runs, and end all waiting."""
        self.in_flight.closed = why
        if self.admission is not None:
            self.admission.close(why)
        if self.batches is not None and self.in_flight.turn.loop.is_closed():
            self.in_flight.runs.clear()  # no callback will ever report their end

    def release(self) -> None:
        """Release plans and costs kept for later runs."""
        if self.batches is not None:
            self.batches.clear()

    async def drain(self, why: str, grace_s: float) -> None:
        """Refuse new calls, give earlier ones `grace_s` seconds to end, then stop the rest."""
        in_flight = self.in_flight
        in_flight.drained = why
        if self.batches is not None:
            self.batches.hurry()
        if grace_s > 0:
            await in_flight.wait(lambda: not (self._calls or in_flight.runs), grace_s)
        in_flight.is_stopping = True
        if self.admission is not None:
            self.admission.close(why)
        in_flight.close_all()
        await in_flight.wait(lambda: not in_flight.runs, None)

    async def end(self, grace_s: float) -> None:
        """Give runs in flight `grace_s` seconds to end; stop streams whose consumers have gone at once."""
        in_flight = self.in_flight
        if self.batches is not None and in_flight.runs:
            self.batches.hurry()
        for run in list(in_flight.runs):
            if run.emitter is not None and not run.emitter.has_consumer:
                run.close()
        if grace_s > 0:
            await in_flight.wait(lambda: not in_flight.runs, grace_s)

    async def stop(self) -> None:
        """Stop runs that are still in flight."""
        in_flight = self.in_flight
        in_flight.is_stopping = True
        in_flight.close_all()
        if self.batches is not None:
            await self.batches.aclose()
        in_flight.tell_ended()
        await in_flight.wait(lambda: not in_flight.runs, None)


def _recorder(trace: object) -> Trace:
    """The trace to record into, for a run that was asked for with a trace or with the path of one.

    Raises:
        TypeError: it is neither.
    """
    check_trace(trace, may_be_path=True)
    return trace if isinstance(trace, Trace) else Trace()
