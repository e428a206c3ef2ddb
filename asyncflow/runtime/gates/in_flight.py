"""The runs of a session that have started and not ended, and how one starts once it has passed the gates."""

from __future__ import annotations

import asyncio
import secrets
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from asyncflow.compiler.memory_advice import memory_advice
from asyncflow.devices.machine.cost import INLINE_LIMIT_NS
from asyncflow.devices.memory import TRACKED_BYTES
from asyncflow.errors import OutOfMemoryError, SessionClosedError
from asyncflow.runtime.executor.kernels.single_call import Begun, quiet_context, run_single_call, run_user_call
from asyncflow.runtime.executor.turn import Turn
from asyncflow.runtime.gates.atomic import AtomicRuns, Claim
from asyncflow.runtime.gates.cuts import Cuts
from asyncflow.runtime.run.run import Run
from asyncflow.runtime.values.fetches import is_fresh
from asyncflow.runtime.watch.observer import Observers, start_observed
from asyncflow.streams.holding import is_within

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from asyncflow.compiler.plan import Plan
    from asyncflow.devices.protocol import Device
    from asyncflow.runtime.calls.session_options import SessionOptions
    from asyncflow.runtime.gates.admission import AdmissionTicket
    from asyncflow.runtime.gates.versions import Versions
    from asyncflow.runtime.run.ask import Ask
    from asyncflow.values import Value


@dataclass(slots=True, eq=False, kw_only=True)
class Passed:
    """The things that the gates have given to one run.

    Attributes:
        ticket: its place in the session; None where it needs none.
        claim: on the states that it has for itself; None unless it is atomic.
        begun: its only firing, which has begun on the event loop.
        has_age: where memory is short it waits for older runs, and younger ones for it.
        number: of the run that it is done again for; None the first time.
    """

    ticket: AdmissionTicket | None = None
    claim: Claim | None = None
    begun: Begun | None = None
    has_age: bool = False
    number: int | None = None


_NOTHING = Passed()


class InFlight:
    """The runs in flight of one session.

    Args:
        devices: by name.
        options: of the session.

    Attributes:
        runs: runs of the scheduler.
        closed: why nothing runs any more; None while the session is open.
        drained: why nothing new runs any more; None while the session is not drained.
        is_stopping: True if no run starts any more, and runs in flight are stopped.
        begun: number of runs so far, including calls that needed no scheduler.
        numbered_from: the number of a run, which random numbers depend on, is so much more than it is in `begun`.
        random_seed: of the random ops of graphs without one.
        observers: told of runs; None until the first is added.
        turn: the session's share of the event loop, from when it has one.
        atomic: the claims of atomic runs.
        cuts: cuts of the session's state that wait for a moment between runs.
        versions: of variables, whose memory is given back when the last run that sees them has ended.
        quiet: a context without floating-point warnings.
        ended: set when a run has ended; None until a caller waits for that.
    """

    versions: Versions
    turn: Turn

    def __init__(self, devices: Mapping[str, Device], options: SessionOptions) -> None:
        self.runs: set[Run] = set()
        self.closed: str | None = None
        self.drained: str | None = None
        self.is_stopping = False
        self.begun = 0
        self.numbered_from = 0
        self.random_seed = secrets.randbits(63)
        self.observers: Observers | None = None
        self.atomic = AtomicRuns()
        self.cuts = Cuts(self.runs, self.atomic)
        self.quiet = quiet_context()
        self._devices = devices
        self._options = options
        self._has_limit = options.memory_limit is not None
        self._has_places = isinstance(options.max_runs, int)
        self.ended: asyncio.Event | None = None

    def check_drained(self) -> None:
        """Raises SessionClosedError, but for what a run of the drained session asks for: it is part of that one."""
        if not is_within(self.turn):
            raise SessionClosedError(self.closed or self.drained)

    def may_compute(self, plan: Plan) -> bool:
        """Return True if a plan may run here and now, as far as other runs are concerned."""
        return self.closed is None and not (self.atomic.claims and self.atomic.holds_up(plan.survey.states))

    # -- starting ------------------------------------------------------------------------------------------------

    def run_single_call(
        self,
        plan: Plan,
        values: Sequence[Value],
        timeout: float | None,
        asked_s: float,
        limit_ns: float = INLINE_LIMIT_NS,
        *,
        is_part: bool = False,
    ) -> list[Value] | Begun | None:
        """Return the fetched values of a plan that is one call; None, or the begun call, if the scheduler has to do
        it.
        """
        call = plan.single_call
        has_own_turn = limit_ns > INLINE_LIMIT_NS
        if call is None or self.closed is not None or self._options.debug:
            return None
        if not (has_own_turn or self.turn.has_time()):
            return None
        # The call ends at once, so a deadline that has not passed will be met.
        if timeout is not None and self.turn.loop.time() >= asked_s + timeout:
            return None
        if self.atomic.claims and self.atomic.holds_up(plan.survey.states):
            return None
        began_s = 0.0 if self.observers is None else self.observers.now()
        device = self._devices[plan.partitions[0].device]
        if call.node.conduct.is_user:
            # A started call can be neither refused nor restarted, and observers expect a function's calls in its run.
            if is_part or self._has_places or self.observers is not None or self._has_limit:
                return None
            made = run_user_call(call, device, values)
            if type(made) is list:
                self.begun += 1
                plan.used = self.begun
            return made
        try:
            found = run_single_call(call, device, self.quiet, values, limit_ns)
        except OutOfMemoryError as error:
            if not (self._has_limit and plan.survey.is_repeatable):
                for advice in memory_advice(error, plan, self._devices):
                    error.add_note(advice)
                raise
            return None  # others may end
        if found is not None:
            self.begun += 1
            plan.used = self.begun
            if is_part:
                self.numbered_from -= 1  # see `start`
            elif self._has_limit:
                self.hand_over(found)
            if self.observers is not None:
                start_observed(began_s)
        return found

    def start(self, plan: Plan, values: Sequence[Value], ask: Ask, passed: Passed = _NOTHING) -> Run:
        """Starts a run, which may have ended when this returns.

        Raises:
            SessionClosedError: the session was closed while the plan was compiled.
        """
        if self.is_stopping or (self.closed is not None and not ask.is_part):
            raise SessionClosedError(self.closed or self.drained)
        self.begun += 1
        plan.used = self.begun
        # A stream waits for its consumer, which may itself wait for runs of the session.
        may_wait = ask.emitter is not None or plan.survey.waits or plan.survey.takes or plan.survey.awaits
        run = Run(
            plan,
            number=self.begun + self.numbered_from if passed.number is None else passed.number,
            devices=self._devices,
            turn=self.turn,
            options=self._options,
            seed=self.random_seed if plan.graph.seed is None else plan.graph.seed,
            trace=ask.trace,
            emitter=ask.emitter,
            staying=frozenset([plan.fetches[index] for index in ask.staying]) if ask.staying else (),
            on_end=self._forget if ask.on_end is None else partial(self._forget, then=ask.on_end),
            has_age=passed.has_age,
            name=ask.name,
            ticket=passed.ticket if may_wait else None,  # otherwise it keeps its slot to its end
            context=copy_context() if self.observers is None else start_observed(self.observers.now()),
        )
        run.part.priority = ask.priority
        run.begun = passed.begun
        if ask.is_part or passed.number is not None:
            self.numbered_from -= 1  # run numbers, and so their random numbers, do not depend on batches
        elif ask.trace is not None and ask.trace.order is not None:
            ask.trace.order.begin(run.number, plan.placement.devices)
        if passed.claim is not None:
            passed.claim.part = run.part
        if self.atomic.claims:
            self.atomic.on_start(run)
        self.runs.add(run)
        run.start(values, ask.timeout, ask.asked_s)
        return run

    def hand_over(self, fetched: Sequence[Value]) -> None:
        """Has results count no longer: they are the caller's, as what he feeds is."""
        own = [x for x in fetched if type(x) is np.ndarray and x.nbytes >= TRACKED_BYTES and is_fresh(x)]
        for device in self._devices.values() if own else ():
            device.memory.forget(own)

    # -- ending --------------------------------------------------------------------------------------------------

    def _forget(self, run: Run, then: Callable[[Run], None] | None = None) -> None:
        self.runs.discard(run)
        if self.atomic.claims:
            self.atomic.on_end(run)
        if self.cuts.waiting:
            self.cuts.on_end(run)
        if self.versions.retired:
            self.versions.on_end(run)
        if self.ended is not None:
            self.ended.set()
        if then is not None:
            then(run)

    def tell_ended(self) -> None:
        """Wake the callers that wait for a run to end."""
        if self.ended is not None:
            self.ended.set()

    async def wait(self, is_over: Callable[[], bool], grace_s: float | None) -> None:
        """Wait until ``is_over()`` holds, asked whenever a run has ended, for `grace_s` seconds at most."""
        self.ended = ended = self.ended or asyncio.Event()
        try:
            async with asyncio.timeout(grace_s):
                while not is_over():
                    ended.clear()
                    await ended.wait()
        except TimeoutError:
            pass  # the caller stops the remaining runs

    def close_all(self) -> None:
        """End runs in flight because the session closes."""
        for run in list(self.runs):
            run.close()
