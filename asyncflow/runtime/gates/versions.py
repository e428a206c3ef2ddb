"""Versions of variables: later runs see new values, while runs in flight keep the old ones.

The kernels of a plan are bound to states. So a new version has states of its own, and plans that are bound to these,
compiled beside the plans in use. The *flip* puts both in the place of the old ones, in one step of the event loop: a
run in flight goes on with the kernels that it has, and no read asks which version it is of.

What a run writes would be lost with the version that it began with. Runs in flight at the flip that write the variables
therefore prevent it: it is refused, and the old version stays.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

from asyncflow.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Mapping

    from asyncflow.checkpoint.checkpoints import NewVersion
    from asyncflow.compiler.plan import Plan
    from asyncflow.compiler.program.kernels.kernels import Resolve
    from asyncflow.compiler.program.request import PlanRequest
    from asyncflow.graph.resource import Resource
    from asyncflow.runtime.calls.plans import PlanCache
    from asyncflow.runtime.run.run import Run
    from asyncflow.runtime.values.copies import CopyThread
    from asyncflow.state.containers import StateStore
    from asyncflow.state.variables.variable_state import VariableState


_ROUNDS: Final = 4
"""Rounds in which other calls go on while plans that came meanwhile are compiled; then the last plans are, before
any call.
"""


class CompileFor(Protocol):
    """Makes the plan of a request; `resolve` looks up states, if it is not the session that does."""

    def __call__(self, request: PlanRequest, *, resolve: Resolve | None = None) -> Plan:
        """Return a plan that is shared with no other caller."""


@dataclass(frozen=True, slots=True, eq=False)
class _Retired:
    """States that no new run sees, and the runs that still do."""

    states: list[VariableState]
    runs: set[Run]


@dataclass(slots=True, eq=False)
class Versions:
    """The versions of a session's variables; belongs to the thread of its event loop."""

    _in_flight: Collection[Run]
    _plans: PlanCache
    _compile: CompileFor
    _state: StateStore
    """Store of the states."""
    _copies: CopyThread
    """Thread that gives memory back."""
    retired: list[_Retired] = field(default_factory=list, init=False)

    def check_writers(self, names: Mapping[Hashable, str]) -> None:
        """Check that no run in flight may write some states; `names` has the names of their variables, by key.

        Raises:
            CheckpointError: a run may; the error names the variables.
        """
        written = {names[key] for run in self._in_flight for key in run.survey.writes.intersection(names)}
        if written:
            listed = ", ".join(map(repr, sorted(written)))
            raise CheckpointError(
                f"nothing was replaced: a run in flight writes {listed}, and its writes would be lost; let it end "
                "first, name other variables=, or use restore, which waits for such runs"
            )

    async def install(self, versions: Collection[NewVersion]) -> None:
        """Install new versions, seen by runs that start after this has returned.

        Raises:
            CheckpointError: a run in flight writes a variable of a version.
            AsyncflowError: a plan cannot be compiled; the old versions stay.
        """
        new = {id(version.old): version.new for version in versions}
        names = {version.key: version.name for version in versions}
        self.check_writers(names)

        def resolve(resource: Resource) -> object:
            state = self._state.lookup(resource)
            return new.get(id(state), state)

        renewed: dict[Plan, Plan] = {}
        renew = partial(self._compile, resolve=resolve)
        rounds = 0
        # New plans may arrive during compilation, so limit the rounds.
        while missing := [plan for plan in self._plans.alive(names.keys()) if plan not in renewed]:
            rounds += 1
            for plan in missing:
                if rounds > _ROUNDS:
                    renewed[plan] = renew(plan.request)
                else:
                    renewed[plan] = await self._plans.compiled(plan.request, renew)
                    await asyncio.sleep(0)
        self.check_writers(names)
        self._plans.flip(renewed)
        self._state.replace(new)
        before = {run for run in self._in_flight if not run.survey.states.isdisjoint(names)}
        self.retired.append(_Retired([version.old for version in versions], before))
        self._free()

    def on_end(self, run: Run) -> None:
        """A run has ended, and some may have been of old versions."""
        for each in self.retired:
            each.runs.discard(run)
        self._free()

    def _free(self) -> None:
        """Give back the memory of versions that no run sees any more: on a thread, since much memory takes long."""
        over = [each for each in self.retired if not each.runs]
        if over:
            self.retired = [each for each in self.retired if each.runs]
            self._copies.drop([state.forget() for each in over for state in each.states])

    async def plan_of(self, request: PlanRequest, states: Mapping[Resource, object]) -> Plan:
        """The plan of a body that runs share, for the states of the version that these are of."""

        def is_latest() -> bool:
            return all(self._state.lookup(resource) is state for resource, state in states.items())

        if is_latest():
            plan = await self._plans.get(request, self._compile)
            plan.is_shared = True
            if is_latest():  # check again after compiling
                return plan

        def resolve(resource: Resource) -> object:
            return states[resource] if resource in states else self._state.lookup(resource)

        return await self._plans.compiled(request, partial(self._compile, resolve=resolve))
