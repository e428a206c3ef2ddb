"""Homes of the states of resources: a session, or a named container that all sessions of the process share."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from threading import Lock
from typing import Any, Protocol
from weakref import WeakKeyDictionary, ref

from asyncflow.entered import Entered
from asyncflow.errors import CheckpointError, GraphError, SessionClosedError
from asyncflow.graph.resource import Resource
from asyncflow.state.capture import CheckpointedState, check_capture
from asyncflow.state.elements.queue import QueueState
from asyncflow.state.variables.held import Holder
from asyncflow.state.variables.variable_state import VariableState
from asyncflow.state.waiting.lines import LinedState, lined_states
from asyncflow.values import Array


class HasState(Protocol):
    """A session, seen from its resources."""

    @property
    def state(self) -> StateStore:
        """Store of the session's states."""


entered_stores: Entered[StateStore] = Entered("asyncflow_stores")
"""Stores of the sessions in whose ``async with`` blocks the code runs."""

_containers: dict[str, dict[str, tuple[str, Any]]] = {}
"""Containers by name: for each name inside, the kind and the state."""
_lock = Lock()


class StateStore:
    """The states one session uses.

    A state of the session's own lives as long as both the session and the resource; one in a container until
    `reset_container`, and after that as long as plans that use it.
    """

    __slots__ = ("__weakref__", "_private", "_shared", "awaited", "flips", "is_closed")

    def __init__(self) -> None:
        # By serial number: a variable's == builds a node, so it cannot be the key of a weak mapping.
        self._private: dict[int, tuple[ref[Resource], Any]] = {}
        self._shared: WeakKeyDictionary[Any, tuple[str, Hashable]] = WeakKeyDictionary()
        self.awaited: dict[str, tuple[str, Mapping[str, Array]]] = {}
        """Kinds and arrays of restored states that are not in use yet, by their names in checkpoints."""
        self.is_closed = False
        self.flips = 0
        """Number of calls of `replace`: states looked up before may be out of use."""

    def lookup(self, resource: Resource) -> Any:
        """Return the state of `resource`, created on first use.

        Raises:
            GraphError: its container holds another kind of thing under its name.
            CheckpointError: the value restored for it in advance does not fit.
        """
        if resource.container is not None:
            state = _shared_state(resource, resource.container)
            with _lock:  # a thread may compile a graph, and a changing set cannot be listed
                if state not in self._shared:
                    self._begin(resource, state)
                    self._shared[state] = state_key(resource), resource.effect_key
            return state
        found = self._private.get(resource.serial)
        if found is None:
            with _lock:
                found = self._private.get(resource.serial)
                if found is None:
                    found = ref(resource, _forget(ref(self), resource.serial)), resource.create_state()
                    self._begin(resource, found[1])
                    self._private[resource.serial] = found
        return found[1]

    def _begin(self, resource: Resource, state: object) -> None:
        """Give a new state the value that was restored for it in advance."""
        name = state_key(resource)
        if name in self.awaited and isinstance(state, CheckpointedState):
            kind, arrays = self.awaited[name]
            try:
                check_capture(state, kind, arrays)
            except CheckpointError as error:
                raise CheckpointError(
                    f"the checkpoint that the session began with does not fit: {name!r} {error}"
                ) from None
            state.restore(arrays)
            del self.awaited[name]

    def replace(self, new: Mapping[int, object]) -> None:
        """Put states in the place of some of the session's own, by their `id`: plans made from now on use them."""
        with _lock:
            self.flips += 1
            for serial, (resource, state) in list(self._private.items()):
                self._private[serial] = resource, new.get(id(state), state)

    async def leave(self, holders: Collection[Holder]) -> None:
        """Bring values of containers to the host that `holders`, whose devices are about to be closed, have in memory.

        All at once. A failure does not keep the other values from coming.

        Raises:
            Exception: the first error that is no lost device's; values of lost devices stay, and reads say so.
        """
        with _lock:
            states = [state for state in self._shared if isinstance(state, VariableState)]
        ends = await asyncio.gather(*(state.leave(holders) for state in states), return_exceptions=True)
        for error in ends:
            if isinstance(error, BaseException):
                raise error

    async def aclose(self) -> None:
        """End the background work of private states, such as reading ahead."""
        states = [state for _, state in self._private.values() if hasattr(state, "aclose")]
        await asyncio.gather(*(state.aclose() for state in states))

    def named(self) -> Iterator[tuple[str, Hashable, object]]:
        """Yield all states, each with its name in checkpoints, which several may have, and its unique key."""
        with _lock:
            shared = list(self._shared.items())
        for resource, state in list(self._private.values()):
            found = resource()
            if found is not None:
                yield state_key(found), found.effect_key, state
        yield from ((*key, state) for state, key in shared)

    def clear(self) -> None:
        """Forget the private states for good; waiting firings get an error. States in containers stay."""
        self.is_closed = True
        for _, state in self._private.values():
            if isinstance(state, LinedState):
                state.end(_closed)
        self._private.clear()
        self._shared.clear()
        self.awaited.clear()

    def __len__(self) -> int:
        return len(self._private)


def state_key(resource: Resource) -> str:
    """The name of a resource's state in checkpoints: the container stands before a colon, which no name has."""
    return resource.name if resource.container is None else f"{resource.container}:{resource.name}"


def _closed() -> SessionClosedError:
    return SessionClosedError("the session is closed, and the elements of its queues are gone with it")


def find_state(resource: Resource, session: HasState | None) -> object:
    """The state of `resource` for code of the application's: in its container, or in a session.

    Args:
        resource: in a container or in none.
        session: None takes the one of the ``async with`` block around.

    Raises:
        GraphError: there is no such block, or `session` is none.
        SessionClosedError: the session is closed.
    """
    if resource.container is not None:
        return _shared_state(resource, resource.container)
    if session is not None:
        if not hasattr(session, "state"):
            raise GraphError(f"session= is an af.Session; got {session!r}")
        store = session.state
    else:
        stores = entered_stores.all()
        if not stores:
            raise GraphError(
                f"{resource!r} is in no container, so each session has one of its own, and there is no `async with "
                "af.Session(...)` around this code; pass session=, or give the resource a container"
            )
        store = next((each for each in reversed(stores) if not each.is_closed), stores[-1])
    if store.is_closed:
        raise _closed()
    return store.lookup(resource)


def _forget(store: ref[StateStore], serial: int) -> Callable[[ref[Resource]], None]:
    # Neither end keeps the other alive: module-level variables outlive sessions, and sessions outlive their graphs.
    def forget(_: ref[Resource]) -> None:
        alive = store()
        if alive is not None:
            alive._private.pop(serial, None)

    return forget


def _shared_state(resource: Resource, container: str) -> Any:
    with _lock:
        states = _containers.setdefault(container, {})
        if resource.name not in states:
            states[resource.name] = resource.signature, resource.create_state()
        signature, state = states[resource.name]
    if signature != resource.signature:
        raise GraphError(
            f"container {container!r} already holds {resource.name!r} as {signature}, and it is asked for as "
            f"{resource.signature}; use another name, or reset_container({container!r}) first"
        )
    return state


def reset_container(name: str) -> None:
    """Forget all values in the container of that name, for sessions that look them up from now on.

    Sessions that have used the container keep its states, waiting runs included; close them first. A coroutine that
    waits in `Queue.get` or `Queue.put` gets a `QueueClosedError`. A container that does not exist is empty already.
    """
    with _lock:
        states = _containers.pop(name, {})
    for _, state in states.values():
        if isinstance(state, QueueState):
            state.leave_container(name)


def _forget_lines() -> None:
    for state in list(lined_states):
        state.forget_lines()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_lines)
