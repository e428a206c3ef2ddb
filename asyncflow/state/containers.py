"""Homes of the states of resources: a session, or a named container that all sessions of the process share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from threading import Lock
from typing import Any
from weakref import WeakSet, ref

from asyncflow.graph.resource import Resource
from asyncflow.state.held import Holder

_containers: dict[str, dict[str, Any]] = {}
_lock = Lock()


class StateStore:
    """The states one session uses.

    A state of the session's own lives as long as both the session and the resource; one in a container until
    `reset_container`, and after that as long as plans that use it.
    """

    __slots__ = ("__weakref__", "_private", "_shared")

    def __init__(self) -> None:
        # By serial number: a variable's == builds a node, so it cannot be the key of a weak mapping.
        self._private: dict[int, tuple[ref[Resource], Any]] = {}
        self._shared: WeakSet[Any] = WeakSet()

    def lookup(self, resource: Resource) -> Any:
        """The state of `resource`, created on first use.

        Raises:
            GraphError: its container holds another kind of thing under its name.
        """
        if resource.container is not None:
            state = _shared_state(resource, resource.container)
            with _lock:  # a graph may be compiled on a thread, and a set that changes cannot be listed
                self._shared.add(state)
            return state
        found = self._private.get(resource.serial)
        if found is None:
            entry = ref(resource, _forget(ref(self), resource.serial)), resource.create_state()
            found = self._private.setdefault(resource.serial, entry)
        return found[1]

    async def leave(self, holders: Collection[Holder]) -> None:
        """Brings to the host what `holders`, whose devices are about to be closed, have of containers' values.

        All at once. One that fails does not keep the others from coming.

        Raises:
            Exception: the first error that is no lost device's; values of lost devices stay, and reads say so.
        """
        with _lock:
            states = list(self._shared)
        ends = await asyncio.gather(*(state.leave(holders) for state in states), return_exceptions=True)
        for error in ends:
            if isinstance(error, BaseException):
                raise error

    async def aclose(self) -> None:
        """Ends what states of the session's own have under way outside of runs, such as reading ahead."""
        states = [state for _, state in self._private.values() if hasattr(state, "aclose")]
        await asyncio.gather(*(state.aclose() for state in states))

    def clear(self) -> None:
        """Forgets the states of the session's own; those in containers stay there."""
        self._private.clear()
        self._shared.clear()

    def __len__(self) -> int:
        return len(self._private)


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
            states[resource.name] = resource.create_state()
        state = states[resource.name]
    state.check_resource(resource)
    return state


def reset_container(name: str) -> None:
    """Forgets all values in the container of that name, for every session that looks them up from now on.

    Sessions that have used the container keep what they hold; close them first. A container that does not exist is
    empty already.
    """
    with _lock:
        _containers.pop(name, None)


__all__ = ["StateStore", "reset_container"]
