"""`StateAccess`: the state of a session as checkpoints take it and give it back, whatever runs meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Mapping
from typing import TypeVar

import numpy as np

from asyncflow.checkpoint.manifest import RandomState
from asyncflow.devices.protocol import Device
from asyncflow.runtime.gates.runs import Runs
from asyncflow.state.variables.held import HeldValue, as_host_value, holder_of
from asyncflow.streams.beside import call_beside
from asyncflow.streams.futures import resolve
from asyncflow.values import Array

T = TypeVar("T")


class StateAccess:
    """The side of a session that checkpoints see: it is a `SessionRuns` of `asyncflow.checkpoint`.

    Args:
        runs: of the session.
        devices: of the session, by name.
        homes: the device that each state is on, where devices have memories of their own.
    """

    def __init__(self, runs: Runs, devices: Mapping[str, Device], homes: Mapping[Hashable, str] | None) -> None:
        self._in_flight = runs.in_flight
        self._devices = devices
        self._homes = {} if homes is None else homes  # plans fill it when they are made
        self.at_rest = runs.in_flight.cuts.take
        self.alone = runs.alone

    @property
    def random(self) -> RandomState:
        """The counters that random numbers are made from."""
        return RandomState(self._in_flight.random_seed, self._in_flight.begun + self._in_flight.numbered_from)

    @random.setter
    def random(self, state: RandomState) -> None:
        self._in_flight.random_seed = state.seed
        self._in_flight.numbered_from = state.runs - self._in_flight.begun

    def is_on_host(self, key: Hashable, value: Array | HeldValue) -> bool:
        """Return True if a value of a state is on the host as it is; simulated cards take time for copies of theirs."""
        home = self._devices.get(self._homes.get(key, ""))
        return type(value) is not HeldValue and (home is None or home.asynchronous is None)

    async def to_host(self, name: str, key: Hashable, value: Array | HeldValue) -> Array:
        """A value of a state, on the host; the event loop goes on meanwhile.

        Raises:
            DeviceLostError: it was in the memory of a device that is lost.
        """
        if type(value) is HeldValue:
            await self._fetch(value)
            return value.on_host()
        home = self._devices.get(self._homes.get(key, ""))
        copy = None if home is None or home.asynchronous is None else home.asynchronous.copy_state_out
        if copy is not None:
            there: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            copy(np.asarray(value).nbytes, name, lambda _value, _error: resolve(there))
            await there
        return value

    async def _fetch(self, value: HeldValue) -> None:
        if value.host is not None:
            return
        value.holder.check()
        if any(holder_of(device.xp) is value.holder for device in self._devices.values()):
            value.host = as_host_value(await value.holder.fetched(value.handle))
        else:  # a device of another session with this container, perhaps on another event loop
            await call_beside(value.on_host)
