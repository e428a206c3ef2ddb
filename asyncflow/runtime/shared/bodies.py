"""`Bodies`: the bodies that runs share, as batches and pools compile and compute them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, cast

from asyncflow.compiler.lowering.single_call import find_single_call
from asyncflow.compiler.program.request import PlanRequest
from asyncflow.devices.machine.cost import INLINE_LIMIT_NS
from asyncflow.errors import contained_exits
from asyncflow.runtime.executor.kernels.single_call import CountedCall
from asyncflow.runtime.run.ask import Ask
from asyncflow.runtime.watch.trace import current_trace

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
    from contextvars import Context

    from asyncflow.compiler.plan import Plan
    from asyncflow.devices.memory import MemoryAccount
    from asyncflow.devices.protocol import Device
    from asyncflow.graph.resource import Resource
    from asyncflow.lift.calls.batched import BodyProgram
    from asyncflow.runtime.calls.session_options import SessionOptions
    from asyncflow.runtime.executor.kernels.single_call import Begun
    from asyncflow.runtime.executor.turn import Turn
    from asyncflow.runtime.run.run import Run
    from asyncflow.runtime.watch.observer import Observers
    from asyncflow.runtime.watch.trace import Trace
    from asyncflow.values import Array, Value


class Starter(Protocol):
    """The runs in flight of a session, among them the runs of bodies; see `InFlight`."""

    observers: Observers | None
    turn: Turn
    quiet: Context

    def may_compute(self, plan: Plan) -> bool:
        """Return True if a plan may run here and now, as far as other runs are concerned."""

    def run_single_call(
        self,
        plan: Plan,
        values: Sequence[Value],
        timeout: float | None,
        asked_s: float,
        limit_ns: float = ...,
        *,
        is_part: bool = ...,
    ) -> list[Value] | Begun | None:
        """The fetched values of a plan that is one call; None if the scheduler has to do it."""

    def start(self, plan: Plan, values: Sequence[Value], ask: Ask) -> Run:
        """Starts a run, which may have ended when this returns."""

    def tell_ended(self) -> None:
        """Wake the callers that wait for a run to end."""


class Bodies:
    """The bodies that runs of one session share.

    Args:
        starter: starts runs of them.
        devices: of the session, by name.
        options: of the session.
        plan_of: the plan of a request, for the states of one version; see `Versions.plan_of`.

    Attributes:
        starter: as given.
    """

    def __init__(
        self,
        starter: Starter,
        devices: Mapping[str, Device],
        options: SessionOptions,
        plan_of: Callable[[PlanRequest, Mapping[Resource, object]], Awaitable[Plan]],
    ) -> None:
        self.starter = starter
        self._devices = devices
        self._options = options
        self._plan_of = plan_of

    # -- plans ---------------------------------------------------------------------------------------------------

    async def plan_of(self, program: BodyProgram, stores_on: str | None = None) -> Plan:
        """Return the plan of a body that runs share.

        Args:
            program: the body.
            stores_on: the device that has what the stores among its inputs hold.
        """
        regions = self._options.regions
        request = PlanRequest(program.graph.home, program.fetches, program.feeds, regions=regions, stores_on=stores_on)
        return await self._plan_of(request, program.states)

    def threads_of(self, plan: Plan) -> int:
        """Return the most calls of a body at the same time: a user's function gets one at a time."""
        devices = [self._devices[partition.device] for partition in plan.partitions]
        has_users = any(node.conduct.is_user for partition in plan.partitions for node in partition.nodes)
        return 1 if has_users else min(device.threads for device in devices)

    def memory_home(self, plan: Plan) -> str | None:
        """Return the device that a body runs on, if it is a single one and can keep values between runs."""
        device = self._devices[plan.partitions[0].device]
        is_home = len(plan.partitions) == 1 and device.asynchronous is not None and device.capabilities.own_memory
        return device.name if is_home else None

    def memory_of(self, plan: Plan) -> MemoryAccount:
        """The account of the device that computes a body of one partition."""
        return self._devices[plan.partitions[0].device].memory

    def count_rows(self, plan: Plan, rows: Iterable[Value], label: str) -> None:
        """Count arrays of rows that a body of one partition is given; a `memory_limit` leaves room for them."""
        memory = self.memory_of(plan)
        if memory.limit is None:
            for array in rows:
                memory.track(array, label)

    # -- running -------------------------------------------------------------------------------------------------

    def may_call(self, plan: Plan) -> bool:
        """Return True if a body may be computed here and now, as far as other runs are concerned."""
        return self.starter.may_compute(plan) and current_trace() is None

    def counted_call(self, plan: Plan) -> CountedCall | None:
        """The steps of a pooled loop as calls; None if they need the scheduler."""
        devices = list(self._devices.values())
        # Steps draw by row keys, so only kernels that swap values need a context.
        has_context = all(device.swapping is None for device in devices)
        options = {"may_loop": True, "has_context": has_context}
        call = None if self._options.debug else find_single_call(plan.partitions, devices, **options)
        if call is None:
            return None
        return CountedCall(call, self._devices[plan.partitions[0].device], self.starter.quiet)

    def run_short(self, plan: Plan, values: list[Array], limit_ns: float = INLINE_LIMIT_NS) -> list[Array] | None:
        """The fetched values of a body; None if computing them may take longer than the event loop is to be held."""
        if plan.single_call is None:
            return None
        with contained_exits:
            found = self.starter.run_single_call(plan, list(values), None, 0.0, limit_ns, is_part=True)
        return cast("list[Array] | None", found)

    async def run_batch(self, plan: Plan, values: list[Array]) -> list[Array]:
        """The fetched values of a body; see `start_batch`."""
        with contained_exits:
            return cast("list[Array]", await self.start_batch(plan, values, trace=current_trace()).wait())

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
        now_s = self.starter.turn.loop.time()
        ask = Ask(asked_s=now_s, trace=trace, name=name, on_end=on_end, staying=staying, is_part=True)
        return self.starter.start(plan, values, ask)
