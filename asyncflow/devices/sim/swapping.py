"""Moving of saved values by a simulated card: to the host on ``d2h`` when they go, back on ``h2d`` ahead of their
reads.

What the host has no room for goes on to its disk, and is read from there first. A CPU on virtual time has its values in
the host's memory, so that they go to the disk at once.

Copies take the time of the card's link and engines. The device's memory is free when the host has seen the end of the
copy out. A returning value has the event of its copy, for which its reader waits.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from asyncflow.devices.memory import owner_of
from asyncflow.devices.protocol import Placed, Shape, recording
from asyncflow.devices.saved.saved_handle import Movable, SavedState
from asyncflow.devices.saved.swap import TOGETHER
from asyncflow.devices.sim.values import SimArray, SimOpaque, Storage
from asyncflow.devices.swapping import Swapping

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncflow.devices.saved.saved_handle import SavedHandle, Space
    from asyncflow.devices.sim.device import SimDevice
    from asyncflow.devices.values import DType
    from asyncflow.streams.sim.stream import SimEvent
    from asyncflow.values import Array, Value


class _Contents(NamedTuple):
    """The contents of a piece of memory, on the device or on the host; no data in a simulation of shapes."""

    data: Array | None
    dtype: DType
    shape: Shape
    storage: Storage | None = None


class SimSwapping(Swapping):
    """A mover of a simulated card's saved values to the host's memory, and of the host's values to its disk."""

    def __init__(self, device: SimDevice, spaces: Sequence[Space], *, ns_per_byte: float) -> None:
        self.together = TOGETHER if device.capabilities.own_memory else 0
        super().__init__(device.memory, spaces, ns_per_byte=ns_per_byte)
        self.start_ns = device.machine.driver.swap_s * 1e9
        self.part_ns = device.machine.driver.part_s * 1e9
        self._device = device
        self._flights: dict[SavedHandle, tuple[SimEvent, _Contents]] = {}

    def movable(self, value: Value, writer: object = None) -> Movable | None:
        """Return how an array with device memory of its own can be moved; None for other values."""
        if not isinstance(value, np.ndarray):
            return None
        owner, machine = owner_of(value), self._device.machine
        storage = machine.kept(owner)
        if type(storage) is not Storage or storage.home is not self._device or storage.nbytes != value.nbytes:
            return None
        if machine.shapes_only:
            contents = _Contents(None, value.dtype, value.shape, storage)
            return Movable(storage, contents, partial(_without_data, value.dtype, value.shape))
        if owner.nbytes != value.nbytes:
            return None
        layout = partial(_view, value.dtype, value.shape, value.strides)
        return Movable(storage, _Contents(owner, owner.dtype, owner.shape, storage), layout)

    def send(self, handle: SavedHandle) -> None:
        """Copy the values out, after their writers."""
        arrays: list[SimArray] = []
        nbytes = 0
        for value in handle.held:
            data, dtype, shape, storage = cast("_Contents", value.here)
            assert storage is not None
            arrays.append(SimArray(data, dtype, shape, storage, storage.written, value.label))
            value.start = nbytes
            nbytes += value.nbytes
        with recording(self._device, None):  # `Swapping` notes the copy
            event = copied = self._device.copy_out(arrays[0], *arrays[1:])
            if _is_on_disk(handle):
                event = self._device.through_disk(handle.nbytes, handle.label, copied)
        there = _in_one([_Contents(array.data, array.dtype, array.shape) for array in arrays], nbytes)
        self._flights[handle] = copied, there
        self._device.when_over(event, self._is_out, handle, event.time_ns - copied.started_ns)

    def _is_out(self, handle: SavedHandle, taken_ns: int) -> None:
        flight = self._flights.pop(handle, None)
        if flight is not None:
            self.sent(handle, flight[1], taken_ns)
            return
        with self._noted(handle, "d2h", taken_ns), self._locked():  # it counts as away already
            self.moves.took(handle.nbytes, taken_ns)

    def leave_early(self, nbytes: float) -> None:
        """Have values that are leaving count as away, the oldest first, until `nbytes` more are free on the device.

        Then other values go that may. The next work on their memory waits for their copies, as on a CUDA device where
        an allocation finds no room.
        """
        if self._lock.locked():  # a value on its way back asks for room ahead of its reads, and waits for no copy
            return
        account = self._device.memory
        before = account.used
        with self._locked():
            if self._leave(before - nbytes):
                return
            self.hand_over(least=2)
            for handle in self.moves.clear(nbytes - before + account.used).out:
                self.send(handle)
            self._leave(before - nbytes)

    def _leave(self, most: float) -> bool:
        """Count leaving values as away until at most `most` bytes are held; return True if so."""
        for handle, (copied, there) in [*self._flights.items()]:
            if self._device.memory.used <= most:
                return True
            if handle.state is not SavedState.KEPT and not _is_on_disk(handle):
                del self._flights[handle]
                self._has_left(handle, there, None)
                self._device.let_go(copied)
        return self._device.memory.used <= most

    def bring(self, handle: SavedHandle) -> None:
        """Copy the values in, to new memory."""
        data, dtype, shape, _ = handle.there
        data = None if data is None else data.copy(order="K")
        with recording(self._device, None):
            read = self._device.through_disk(handle.nbytes, handle.label) if _is_on_disk(handle) else None
            copied = self._device.copied_in(data, dtype, shape, handle.label, after=read, parts=len(handle.held))
        copied.storage.keep(data)
        self.arrive(handle, copied.storage, _Contents(data, dtype, shape, copied.storage))
        event = copied.written
        self._device.when_over(event, self.brought, handle, event.time_ns - (read or event).started_ns)

    def take_over(self, nbytes: float) -> None:
        """See `Mover`."""
        self._device.hand_over(nbytes)

    def parts_of(self, there: Placed, start: int) -> tuple[Placed, Placed]:
        """See `Mover`."""
        data, dtype, (nbytes,), _ = cast("_Contents", there)
        before, behind = (None, None) if data is None else (data[:start], data[start:])
        return _Contents(before, dtype, (start,)), _Contents(behind, dtype, (nbytes - start,))

    def must_wait(self, store: Placed, number: int | None = None) -> bool:
        """See `Swapping`."""
        return super().must_wait(store.value if isinstance(store, SimOpaque) else store, number)

    def discard(self, there: object) -> None:
        """Do nothing: the copy goes with its last reference."""

    def now_ns(self) -> int:
        """The time of the thread that launches."""
        return self._device.dispatched_ns

    def ended_ns(self) -> int:
        """Virtual time, of which that thread is ahead."""
        return self._device.machine.now_ns()

    def comes_late(self, handle: SavedHandle, *, was_away: bool) -> bool:
        """Return True if launched work will have ended before the copy in."""
        device, contents = self._device, cast("_Contents", handle.block)
        assert contents.storage is not None
        return max(device.compute.end().time_ns, device.dispatched_ns) < contents.storage.written.time_ns


def _is_on_disk(handle: SavedHandle) -> bool:
    return handle.space is not None and handle.space.name == "disk"


def _in_one(values: Sequence[_Contents], nbytes: int) -> _Contents:
    """A copy of one value, or of several one behind the other."""
    first = values[0]
    if len(values) == 1:
        return first if first.data is None else first._replace(data=first.data.copy(order="K"))
    data = None if first.data is None else np.concatenate([_flat(value.data).view(np.uint8) for value in values])
    return _Contents(data, np.dtype(np.uint8), (nbytes,))


def _flat(data: Array | None) -> Array:
    assert data is not None
    return (data if data.flags.c_contiguous else data.T).reshape(-1)


def _view(dtype: DType, shape: Shape, strides: tuple[int, ...], contents: _Contents, start: int) -> Array:
    data = contents.data
    assert data is not None
    flat = data if data.flags.c_contiguous else data.T
    return np.ndarray(shape, dtype, flat, start, strides)


def _without_data(dtype: DType, shape: Shape, contents: _Contents, start: int) -> Array:
    assert contents.storage is not None
    array: Array = contents.storage.keep_stand_in(dtype, shape)
    return array
