"""`Mutex`: critical sections of a graph, one of which is entered at a time; `Barrier`: where runs wait for each other.

What holds a mutex is a run. It lets go of it at the end of the section, and at the latest at its own end, however that
comes: a run that fails, is cancelled or runs out of time has then left the section.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, MutableMapping
from functools import partial
from typing import ClassVar

import numpy as np

from asyncflow.entered import Entered
from asyncflow.errors import GraphError
from asyncflow.graph.building.build import graph_for
from asyncflow.graph.graph import Graph
from asyncflow.graph.ir import Node
from asyncflow.graph.op import WAITS, Access, KernelContext, define, not_differentiable
from asyncflow.graph.resource import Resource
from asyncflow.state.waiting.lines import NOT_YET, LinedState, PlaceInLine
from asyncflow.values import Conduct, Kernel, Namespace, Value


def whole_number(value: object, what: str, least: int = 1) -> int:
    """Check a whole number given by a user, of at least `least`.

    Raises:
        GraphError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise GraphError(f"{what} is a whole number of at least {least}; got {value!r}")
    return int(value)


_sections: Entered[tuple[Mutex, Iterator[None]]] = Entered("asyncflow_sections")
"""Mutexes whose sections are being built."""


class Mutex(Resource):
    """A mutex: ``with mutex: ...`` makes the nodes inside a section, and one section runs at a time.

    The section begins before all nodes built inside and ends after them. A run that needs one of them runs all of them.
    A waiting section suspends its own firing; sections enter in the order they came. Sections of one run follow one
    another as they are written, also in a loop's iterations. A run that ends early has left the section; its writes
    stay.

    Args:
        name: for messages, and the key inside a container; None generates one.
        container: a name shared by sessions; None for a lock of the session's own.

    Raises:
        GraphError: a section stands in another of the same mutex, or no graph is being built.

    >>> import asyncflow as af
    >>> lock, total = Mutex(name="lock"), af.Variable(0, name="total")
    >>> with af.Graph() as graph:
    ...     with lock:
    ...         _ = total.assign(total.read() + 1)
    """

    noun = "mutex"
    waits: ClassVar[bool] = True

    def __init__(self, *, name: str | None = None, container: str | None = None) -> None:
        super().__init__(name, container)

    def __enter__(self) -> None:
        section = self._section()
        next(section)
        _sections.enter((self, section))

    def __exit__(self, *exc: object) -> None:
        entered = next(each for each in reversed(_sections.all()) if each[0] is self)
        _sections.leave(entered)
        next(entered[1], None)

    def _section(self) -> Iterator[None]:
        graph = graph_for()
        around: Graph | None = graph
        while around is not None:
            if any(node.op is LOCK and node.attrs["mutex"] is self for node in around.scope.controls):
                raise GraphError(f"a section of {self!r} is inside another one of it, and would wait for it for ever")
            around = around.parent
        lock = graph.add_node(LOCK, (), {"mutex": self}, (), name=f"{self.name}/lock")
        first = len(graph.nodes)
        with graph.scoped(controls=(*graph.scope.controls, lock)):
            yield
        unlock = graph.add_node(UNLOCK, (), {"mutex": self}, (), name=f"{self.name}/unlock")
        unlock.control_inputs = [lock, *graph.nodes[first:-1]]
        lock.attrs["until"] = unlock.name

    def create_state(self) -> MutexState:
        """Make a state in which no run is in a section."""
        return MutexState(self.name, "Mutex")


class Barrier(Resource):
    """A barrier: `wait` suspends a firing until `n` firings have come, and then all of them go on.

    They are of different runs, or of different nodes of one; iterations of one loop pass one after the other. A firing
    that is stopped while it waits has not come.

    Args:
        n: how many wait for each other, at least 1.
        name: for messages, and the key inside a container; None generates one.
        container: a name shared by sessions; None for a barrier of the session's own.
    """

    noun = "barrier"
    waits: ClassVar[bool] = True

    def __init__(self, n: int, *, name: str | None = None, container: str | None = None) -> None:
        super().__init__(name, container)
        self.n = whole_number(n, "Barrier: n")

    @property
    def signature(self) -> str:
        """See `Resource.signature`."""
        return f"Barrier({self.n})"

    def wait(self) -> Node:
        """A node that has run when n have come."""
        return graph_for().add_node(WAIT, (), {"barrier": self}, (), name=f"{self.name}/wait")

    def create_state(self) -> BarrierState:
        """Make a state in which no firing waits."""
        return BarrierState(self.name, self.n)


# -- state -----------------------------------------------------------------------------------------------------------


class MeetingState(LinedState):
    """One line, in which all wait for the same.

    Args:
        name: for messages.
        what: it is the state of, for messages.
    """

    def __init__(self, name: str, what: str) -> None:
        super().__init__()
        self.name = name
        self.what = what
        self.line: deque[PlaceInLine] = deque()

    def places(self) -> list[PlaceInLine]:
        """See `LinedState.places`."""
        return list(self.line)

    def left(self, place: PlaceInLine) -> None:
        """See `LinedState.left`."""
        if place in self.line:
            self.line.remove(place)
            self.settle()

    def settle(self) -> None:
        """Call the places that may go on."""

    def describe(self) -> str:
        """See `LinedState.describe`."""
        return f"{self.what}, {len(self.line)} wait"


class MutexPlace(PlaceInLine):
    """A place of a run that wants to enter a section; `at_end` is the run's, and tells it from others."""

    __slots__ = ("at_end",)

    def __init__(self, state: MutexState, what: str, at_end: MutableMapping[object, Callable[[], None]]) -> None:
        super().__init__(state, what, lambda _: ())
        self.at_end = at_end


class MutexState(MeetingState):
    """The run that is in a section, and the waiting runs; thread-safe.

    Invariant: while no run is in a section, only a called one waits.
    """

    owner: object = None

    def enter(self, at_end: MutableMapping[object, Callable[[], None]]) -> Value | PlaceInLine:
        """Enters a section, or gives a place in line; `at_end` gets what lets go of it when the run ends."""
        with self.lock:
            self.check()
            if self.owner is None and not self.line:
                self._own(at_end)
                return ()
            place = MutexPlace(self, f"mutex {self.name!r}", at_end)
            self.line.append(place)
        return place

    def _own(self, at_end: MutableMapping[object, Callable[[], None]]) -> None:
        self.owner = at_end
        at_end[self] = partial(self.release, at_end)

    def release(self, at_end: object) -> None:
        """Leaves the section, if that run is in it."""
        with self.lock:
            if self.owner is at_end:
                self.owner = None
                self.settle()
        self.wake_called()

    def settle(self) -> None:
        """See `MeetingState.settle`."""
        if self.line and self.owner is None:
            self.call(self.line[0])

    def claimed(self, place: PlaceInLine) -> object:
        """See `LinedState.claimed`."""
        assert isinstance(place, MutexPlace)
        if self.owner is not None or not self.line or self.line[0] is not place:
            place.is_called = False
            return NOT_YET
        self.line.popleft()
        self._own(place.at_end)
        return None


class BarrierState(MeetingState):
    """The firings that have come to a barrier; thread-safe."""

    def __init__(self, name: str, n: int) -> None:
        super().__init__(name, f"Barrier({n})")
        self.n = n

    def come(self) -> PlaceInLine:
        """A place in line; the last one calls all."""
        place = PlaceInLine(self, f"barrier {self.name!r}", lambda _: ())
        with self.lock:
            self.check()
            self.line.append(place)
            if len(self.line) == self.n:
                # A cancelled run leaves only in the next turn of its event loop: do not count it.
                self.line = deque(each for each in self.line if each.is_given_up is None or not each.is_given_up())
            if len(self.line) == self.n:
                while self.line:
                    self.call(self.line.popleft())
        self.wake_called()
        return place

    def claimed(self, place: PlaceInLine) -> object:
        """See `LinedState.claimed`."""
        return NOT_YET if place in self.line else None


# -- ops -------------------------------------------------------------------------------------------------------------


def _lock_kernel(xp: Namespace, *, mutex: MutexState, until: str = "") -> Kernel:
    def run(context: KernelContext) -> Value:
        assert context.at_end is not None
        return mutex.enter(context.at_end)

    return run


def _unlock_kernel(xp: Namespace, *, mutex: MutexState) -> Kernel:
    def run(context: KernelContext) -> Value:
        mutex.release(context.at_end)
        return ()

    return run


_of_mutex = partial(
    define,
    effects=lambda node: ((node.attrs["mutex"].effect_key, Access.WRITE),),
    conduct=Conduct(needs_context=True, is_async=True, is_undone=True),
)
LOCK = _of_mutex("mutex_lock", lambda *, mutex, until="": (), _lock_kernel)
UNLOCK = _of_mutex("mutex_unlock", lambda *, mutex: (), _unlock_kernel)
WAIT = define(
    "barrier_wait",
    lambda *, barrier: (),
    lambda xp, *, barrier: barrier.come,
    # One effect for each node: two ordered nodes would never meet.
    effects=lambda node: (((node.attrs["barrier"].effect_key, node.name), Access.WRITE),),
    conduct=WAITS,
)
MEETING_OPS = (LOCK, UNLOCK, WAIT)
not_differentiable(*MEETING_OPS, because="nothing flows through it: it says when others run")
