"""`RunScope`: the side of a run that its executors see."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Collection, Mapping, Sized
    from contextvars import Context

    from asyncflow.devices.protocol import Device
    from asyncflow.ops.rows.by_row import Paused
    from asyncflow.runtime.executor.kernels.sliced_region import RegionGenerator
    from asyncflow.runtime.executor.turn import Turn
    from asyncflow.runtime.scheduler.rendezvous import Rendezvous
    from asyncflow.runtime.watch.trace import Trace
    from asyncflow.state.elements.taken import Taken
    from asyncflow.streams.holding import RunPart, TakesItems
    from asyncflow.values import Value


class ScopeOptions(Protocol):
    """The options of a session that executors ask for."""

    @property
    def seed(self) -> int | None:
        """Of the order in which ready nodes are taken; None for the order in which they became ready."""

    @property
    def max_iterations(self) -> int | None:
        """The most iterations of any loop; None for no limit."""

    @property
    def debug(self) -> bool:
        """True if kernels that hold the event loop are logged."""


class PlaceInSession(Protocol):
    """The place of a run in its session, which the run gives back while it waits for other runs."""

    @property
    def is_aside(self) -> bool:
        """True if the run has given it back."""

    @property
    def is_auto(self) -> bool:
        """True if the run gives it back whenever it waits."""

    def step_aside(self) -> None:
        """Give the place to other runs."""

    def come_back(self, go_on: Callable[[], None], /) -> bool:
        """Return True if the run has a place now; else ``go_on()`` is called when it has."""


class RunScope(Protocol):
    """A run, as the executors of its partitions see it, with their ports, regions, coroutines and threads.

    The class is only a description: a `Run` has all of it by itself, so an executor's accesses cost nothing.
    """

    id: int
    """Unique in the process."""
    number: int
    """Counts the session's runs."""
    seed: int
    """Of random ops."""
    devices: Mapping[str, Device]
    """Devices of the session, by name."""
    turn: Turn
    """The session's share of the event loop."""
    rendezvous: Rendezvous
    """Meeting point of its partitions."""
    trace: Trace | None
    """Trace that records it; None without one."""
    part: RunPart
    """The run, as seen by runs requested inside it."""
    context: Context
    """Context variables of its caller, for the user's kernels."""
    own_context: Context | None
    """The context in which kernels find the elements that the run has taken; None if it takes none."""
    at_end: dict[object, Callable[[], None]]
    """Functions that let go of what the run holds."""
    has_age: bool
    """True if it waits for older runs when memory is short, and younger ones for it."""
    in_caller: bool
    """True if it goes on in its caller's task alone."""
    awaited: asyncio.Future[None] | None
    """The future that the caller's task waits for."""
    begun: Paused | RegionGenerator | None
    """Its only firing, if that has begun on the event loop and continues on a thread."""
    taken: Taken | None
    """Elements that it gives back if it ends early; None if it takes none."""
    staying: Collection[int | None]
    """Indexes of the fetches whose values stay on their device."""

    @property
    def options(self) -> ScopeOptions:
        """Of the session."""

    @property
    def executors(self) -> Sized:
        """Executors made so far."""

    @property
    def emitter(self) -> TakesItems | None:
        """Takes streamed values."""

    @property
    def ticket(self) -> PlaceInSession | None:
        """Place in the session; None if it keeps that to its end."""

    @property
    def is_stopped(self) -> bool:
        """True if it ends early: none of its firings starts, or goes on, any more."""

    def leaves_to_caller(self, step: Callable[[], object], *, later: bool = False) -> bool:
        """Leaves a step to the caller's task, if the run goes on there alone and this is not there."""

    def is_given_up(self) -> bool:
        """Returns True if the caller has been cancelled."""

    def stay(self, index: int, value: Value) -> None:
        """A value of `staying` is there."""

    def stop(self, status: str) -> None:
        """Stops the run early."""

    def close(self) -> None:
        """End the run because its session closes."""

    def on_failed(self) -> None:
        """An executor has failed: the others stop too."""

    def on_quiet(self) -> None:
        """Note that an executor has nothing left to do: the run ends when none has."""

    def look_aside(self) -> None:
        """Gives the run's place in the session to others if all that is left of it waits for other runs."""

    def come_back(self) -> None:
        """Goes on: the run has its place again."""
