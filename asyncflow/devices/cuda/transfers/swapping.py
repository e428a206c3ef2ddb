"""Moving of saved values by a CUDA device: to pinned memory on ``d2h`` when they go, back on ``h2d`` ahead of their
reads.

Only streams wait: the copy out for the writer of the value, and the reader for the copy in. The device's memory is free
when the host sees that the copy out has ended. It is free at once where an allocation finds no room (`make_room`), or
where launching would have to pause (`_hurry`). Then the next work on the memory's home stream waits for the copy, as
its order protects the memory.

Values for the spill file pass through pinned memory, a few at a time; a thread writes and reads. Streams cannot wait
for a value in the file, so the launcher of its reader waits (`must_wait`, `throttle`).

All methods, except the methods for dying stores, belong to the thread of the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from copy import copy
from functools import partial
from time import perf_counter_ns
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from asyncflow.devices.captures import free_graphs
from asyncflow.devices.cuda.memory import ALLOCATION_BYTES, Lease
from asyncflow.devices.cuda.transfers.passage import Passage
from asyncflow.devices.cuda.transfers.slabs import PinnedSlabs
from asyncflow.devices.cuda.values import CudaArray, CudaOpaque, Landing
from asyncflow.devices.figures.presets import DEFAULT_HOST
from asyncflow.devices.memory import MemoryLimitExceeded, format_bytes
from asyncflow.devices.protocol import Placed, Shape, recording
from asyncflow.devices.saved.saved_handle import Movable, SavedEntry, SavedHandle, SavedState, Space
from asyncflow.devices.saved.spill import SpillBlock, SpillFile
from asyncflow.devices.saved.swap import TOGETHER, Orders
from asyncflow.devices.saved.working_set import WorkingSet
from asyncflow.devices.swapping import Swapping
from asyncflow.streams.cuda.stream import CudaEvent, CudaStream, active

if TYPE_CHECKING:
    from asyncflow.devices.cuda.device import CudaDevice
    from asyncflow.devices.cuda.transfers.pinned import PinnedBuffer
    from asyncflow.devices.values import DType
    from asyncflow.streams.cuda.cupy_types import CupyArray
    from asyncflow.values import Value

_NS_PER_BYTE = 1e9 / 20e9
"""Nanoseconds a byte over PCIe, until measured."""


_ELSEWHERE = frozenset((SavedState.AWAY, SavedState.COMING))


class _OnHost(NamedTuple):
    """Values in pinned memory, or passing it on the way to the file; `written` if the copy to there may not have ended.

    They may be a part of the buffer, `nbytes` from `start` on.
    """

    buffer: PinnedBuffer
    nbytes: int
    written: CudaEvent | None = None
    start: int = 0


class _Made(NamedTuple):
    """An array that has not moved, the stream that made it, and the home stream of its memory."""

    array: CupyArray
    stream: CudaStream
    home: CudaStream


class _Flight(NamedTuple):
    """A copy out that has not ended."""

    landings: list[Landing]
    ended: CudaEvent
    there: _OnHost


class CudaSwapping(Swapping):
    """Moves saved values of a CUDA device to the host's memory, and to a file beyond its limit."""

    together = TOGETHER

    def __init__(self, device: CudaDevice, host: Space, directory: str | None) -> None:
        """Args: the device, and where values go: the host's memory, and the spill file's directory if there is one."""
        spaces = [host] if directory is None else [host, Space("disk")]
        super().__init__(device.memory, spaces, ns_per_byte=_NS_PER_BYTE)
        self.gate.in_pieces = True
        self.start_ns = DEFAULT_HOST.swap_s * 1e9
        self.part_ns = DEFAULT_HOST.part_s * 1e9
        self._device = device
        self._ndarray = device.cupy.ndarray
        self._file = None if directory is None else SpillFile(directory)
        self.has_file = directory is not None
        self._passage = Passage(f"{device.name}/swap", PinnedSlabs(device.cupy), host, self._locked)
        self._flights: dict[SavedHandle, _Flight] = {}
        self._absent: set[SavedHandle] = set()
        self._wanted: SavedHandle | None = None
        self._is_bringing = self._is_bringing_wanted = False
        self._last_end_ns = 0

    # -- movable values ------------------------------------------------------------------------------------------

    def writer(self) -> CudaStream:
        """See `Mover`."""
        return active.stream or self._device.compute

    def movable(self, value: Value, writer: Placed) -> Movable | None:
        """Return how an array with device memory of its own can be moved; None for other values."""
        if not isinstance(value, self._ndarray):
            return None
        memory, flags = value.data.mem, value.flags
        lease = getattr(memory, "_owner", None)
        if type(lease) is not Lease or lease.home not in self._device.compute_streams:
            return None
        if memory.size - value.nbytes >= ALLOCATION_BYTES or not (flags.c_contiguous or flags.f_contiguous):
            return None
        view = partial(self._view, value.dtype, value.shape, value.strides, value.data.ptr - memory.ptr)
        return Movable(lease, _Made(value, writer, lease.home), view)

    def _view(
        self, dtype: DType, shape: Shape, strides: tuple[int, ...], offset: int, here: _Made | CudaArray, start: int
    ) -> CupyArray:
        """The array itself, which work given to the active stream finds there."""
        device = self._device
        stream = active.stream or device.compute
        if type(here) is CudaArray:
            here.order(stream)
        elif here.stream is not stream:
            stream.wait(here.stream.record())
        device.hold_taken(stream, here.array)
        pointer = device.cupy.cuda.memory.MemoryPointer(here.array.data.mem, start + offset)
        return self._ndarray(shape, dtype, pointer, strides)

    # -- copies out ----------------------------------------------------------------------------------------------

    def send(self, handle: SavedHandle) -> None:
        """Copy the values out, after the writers, once there is pinned memory; to the file if the host has no more
        room.
        """
        nbytes = 0
        for value in handle.held:
            value.start = nbytes
            nbytes += value.here.array.data.mem.size
        assert handle.space is not None
        if handle.space.name == "host":
            self._passage.with_room(nbytes, partial(self._leave, handle, 0))
        else:
            self._passage.enter(nbytes, partial(self._passage.with_room, nbytes, partial(self._leave, handle, nbytes)))

    def _leave(self, handle: SavedHandle, passing: int, buffer: PinnedBuffer | None) -> None:
        # Values dropped meanwhile leave their room in the buffer empty.
        held = [] if buffer is None or handle.state is not SavedState.LEAVING else handle.held
        if buffer is not None and held:
            there = _OnHost(buffer, buffer.nbytes)
            done = partial(self._is_out, handle, there, passing, perf_counter_ns())
            arrays: list[tuple[CupyArray, CudaStream, CudaStream, int]] = [(*value.here, value.start) for value in held]
            try:
                with recording(self._device, None):  # `Swapping` notes the copy
                    landings, ended = self._device.copies.move_out(arrays, buffer, handle.label, done)
            except RuntimeError as error:
                self._passage.failure = f"a copy of {handle.label!r} to the host failed: {self._device.cause_of(error)}"
            else:
                self._flights[handle] = _Flight(landings, ended, there._replace(written=ended))
                return
        self._later(self._stays, handle, passing)

    def _is_out(
        self, handle: SavedHandle, there: _OnHost, passing: int, started_ns: int, error: BaseException | None
    ) -> None:
        # If not in flight, it counts as away already. Keep no reference to the flight: its memory must be free before
        # callers are told.
        is_leaving = self._flights.pop(handle, None) is not None
        taken_ns = self._taken_ns(started_ns)
        if is_leaving and error is not None:
            self.not_sent(handle)
        elif is_leaving:
            self.sent(handle, there, taken_ns)
        elif error is None:
            with self._noted(handle, "d2h", taken_ns), self._locked():
                self.moves.took(handle.nbytes, taken_ns)
        if passing and error is None:
            self._write(handle, there.buffer)
        else:
            self._passage.leave(passing)

    def _stays(self, handle: SavedHandle, passing: int) -> None:
        self.not_sent(handle)
        self._passage.leave(passing)

    def _write(self, handle: SavedHandle, buffer: PinnedBuffer) -> None:
        """Have a value that is away go on to the file; it stays in pinned memory if it cannot."""
        assert self._file is not None

        def written(block: SpillBlock | None, error: BaseException | None, *_times: int) -> None:
            if error is not None:
                self._passage.failure = str(error)
                self.spaces[-1].limit = 0
            elif handle.state is SavedState.AWAY and _is_buffer(handle.there, buffer):
                handle.there = block
            else:
                self.discard(block)
            self._passage.leave(buffer.nbytes)

        if handle.state is SavedState.AWAY and _is_buffer(handle.there, buffer):
            self._passage.submit(self._file.write, (_bytes(buffer), handle.label), written)
        else:
            self._passage.leave(buffer.nbytes)

    # -- copies in -----------------------------------------------------------------------------------------------

    def bring(self, handle: SavedHandle) -> None:
        """Copy the value in, to new memory; from the file once a thread has read it."""
        there, is_on_host = handle.there, type(handle.there) is _OnHost
        nbytes = there.nbytes
        self._is_bringing, self._is_bringing_wanted = True, handle is self._wanted
        try:
            array = self._device.copies.new((nbytes,), np.dtype(np.uint8), handle.label)
            if is_on_host:
                if there.written is not None:
                    self._device.h2d.wait(there.written)
                self._come(handle, array, there.buffer, there.start)
        except RuntimeError as error:
            raise self._device.cause_of(error)  # noqa: B904 - which has its cause
        finally:
            self._is_bringing = False
        if not is_on_host:
            self._passage.enter(
                nbytes, partial(self._passage.with_room, nbytes, partial(self._read, handle, array)), is_first=True
            )

    def take_over(self, nbytes: float) -> None:
        """See `Mover`."""
        self._device.hand_over(nbytes)

    def parts_of(self, there: Placed, start: int) -> tuple[Placed, Placed] | None:
        """See `Mover`; a block of the file has one checksum, so the block is read whole."""
        if type(there) is not _OnHost:
            return None
        buffer, nbytes, written, begin = there
        return _OnHost(buffer, start, written, begin), _OnHost(buffer, nbytes - start, written, begin + start)

    def _come(self, handle: SavedHandle, array: CupyArray, buffer: PinnedBuffer, start: int = 0) -> None:
        done = partial(self._has_come, handle, perf_counter_ns())
        with recording(self._device, None):
            here = self._device.copies.move_in(array, buffer, start, handle.label, done)
        self.arrive(handle, array.data.mem._owner, here)

    def _has_come(self, handle: SavedHandle, started_ns: int, error: BaseException | None) -> None:
        taken_ns = self._taken_ns(started_ns)
        if error is None:
            self.brought(handle, taken_ns)
        else:
            self.not_brought(handle, self._named(handle, self._device.loss_of(error)))

    def _read(self, handle: SavedHandle, array: CupyArray, buffer: PinnedBuffer | None) -> None:
        assert self._file is not None
        if buffer is None:
            error = MemoryError(f"the saved value {handle.label!r} cannot be read back: {self._passage.failure}")
            self._later(self._is_read, handle, array, None, None, error)
        else:
            read = partial(self._is_read, handle, array, buffer)
            self._passage.submit(self._file.read, (handle.there, _bytes(buffer), handle.label), read)

    def _is_read(
        self,
        handle: SavedHandle,
        array: CupyArray,
        buffer: PinnedBuffer | None,
        _result: object,
        error: BaseException | None,
        *_times: int,
    ) -> None:
        self._absent.discard(handle)
        if handle.state is SavedState.GONE:
            self.brought(handle, 0)
        elif error is None and buffer is not None:
            try:
                with self._locked():
                    self._come(handle, array, buffer)
            except RuntimeError as failure:
                error = self._named(handle, self._device.cause_of(failure))
        if error is not None and handle.state is not SavedState.GONE:
            self.not_brought(handle, error)
        self._passage.leave(array.nbytes)

    def must_wait(self, store: Placed, number: int | None = None) -> bool:
        """See `Swapping`; a value in the file is asked for, if it was not, and `throttle` pauses until it is there."""
        if number is None:
            return self.moves.is_short and not self._hurry(None)
        values: Placed = store.value if type(store) is CudaOpaque else store
        entry = values.log[number]
        if type(entry) is not SavedEntry or entry.value.handle.state not in _ELSEWHERE:
            return False
        if self._file is not None and self._must_read(entry):
            return True
        is_away = entry.value.handle.state is SavedState.AWAY
        return is_away and self.moves.is_short and not self._hurry(None)

    def _must_read(self, entry: SavedEntry) -> bool:
        handle = entry.value.handle
        if not self._is_in_file(handle):
            return False
        with self._locked():
            try:
                self._start(self.moves.wanted(handle, self.now_ns(), entry.rank), handle)
            except MemoryLimitExceeded as error:
                handle.error = copy(error)  # without traceback and context
            if handle.state is not SavedState.COMING or handle.is_here:
                return False
            self._absent.add(handle)
        return True

    def _is_in_file(self, handle: SavedHandle) -> bool:
        if type(handle.there) is not SpillBlock or handle.error is not None:
            return False
        return handle.state is SavedState.AWAY or (handle.state is SavedState.COMING and not handle.is_here)

    @property
    def is_held_up(self) -> bool:
        """True if memory is short, or a value has been asked for that is not read from the file yet."""
        return bool(self._absent) or self.moves.is_short

    # -- room on the device --------------------------------------------------------------------------------------

    def lacks(self, run: int, *sets: WorkingSet) -> bool:
        """See `Swapping`; streams wait for copies out in place of the host, for no more of them than it takes."""
        return super().lacks(run, *sets) and not self._hurry(run)

    def throttle(self, resume: Callable[[], None], loop: asyncio.AbstractEventLoop, run: int | None = None) -> bool:
        """See `Swapping`, and `lacks`."""
        if (run is None and not self.is_held_up) or self._hurry(run):
            return False
        return super().throttle(resume, loop, run)

    def _hurry(self, run: int | None) -> bool:
        """Return True if launching may go on once the oldest of the leaving values count as away."""
        if run is None and self._absent:
            return False
        with self._locked():
            # The oldest first, as their copies end first; no more than needed, as leaving values may still be read.
            for handle in [*self._flights]:
                if self.gate.may_go_on(run):
                    return True
                self._leave_early(handle)
            return self.gate.may_go_on(run)

    def make_room(self, nbytes: float) -> bool:
        """Free `nbytes` at once, for an allocation that found no room; return True if any bytes were freed.

        Values that are leaving go first, then memory held for other streams, then other values that may. The next work
        on their streams waits for those copies and that work, and the host for nothing.
        """
        # Only the loop's thread gives tickets; and a wait for a copy would become part of a capture.
        if asyncio._get_running_loop() is None:
            return False
        if active.stream is not None and self._device.cupy.cuda.get_current_stream().is_capturing():
            return False
        if self._is_bringing:  # inside the lock; a prefetch pushes no value out
            return self._is_bringing_wanted and self._free(nbytes)
        with self._locked():
            return self._free(nbytes)

    def _free(self, nbytes: float) -> bool:
        account = self._device.memory
        before = account.used
        for handle in [*self._flights]:
            if before - account.used < nbytes:
                self._leave_early(handle)
        # Before other values that may move: each of them costs two copies, but held memory costs one event.
        if (missing := nbytes - before + account.used) > 0:
            self._device.hand_over(missing)
            # Capturing a graph again costs less than two copies of a value in each run.
            if free_graphs(self._device.pool.graphs, lambda: account.has_room(nbytes)):
                return True
        self.hand_over(least=2)
        while (missing := nbytes - before + account.used) > 0:
            going = self.moves.clear(missing).out
            for handle in going:
                self.send(handle)
            left = [self._leave_early(handle) for handle in going if handle in self._flights]
            if not any(left):  # no pinned memory for them yet
                break
        return account.used < before

    def _leave_early(self, handle: SavedHandle) -> bool:
        """Return True if the memory of a value that leaves, or is GONE, may be used again before its copy has ended."""
        flight = self._flights[handle]
        if handle.state is SavedState.KEPT:  # a reader wanted it meanwhile: its memory is in use
            return False
        for home in {landing.home for landing in flight.landings}:
            home.wait(flight.ended)
        for landing in flight.landings:
            landing.awaited_by(landing.home)
        del self._flights[handle]
        self._has_left(handle, flight.there, None)
        return True

    # -- shared parts --------------------------------------------------------------------------------------------

    def discard(self, there: object) -> None:
        """Free the block of a file; pinned memory goes with its last reference, which a copy may have."""
        if isinstance(there, SpillBlock) and self._file is not None:
            self._file.free(there)

    def now_ns(self) -> int:
        """The time of the host, which launches."""
        return perf_counter_ns()

    def comes_late(self, handle: SavedHandle, *, was_away: bool) -> bool:
        """Return True if the value was not asked for ahead: the host does not know how far streams will be by then."""
        return was_away

    def advice(self) -> str:
        """The failure of a copy, of pinning or of the file, if there was one."""
        return self._passage.failure or super().advice()

    async def aclose(self, grace_s: float) -> bool:
        """Release all waiting code, and end the thread; return True if it has ended."""
        self.close()
        return await self._passage.aclose(grace_s)

    def pin(self) -> None:
        """Pin the first memory, which blocks, if memory can be short."""
        if self._device.memory.limit is not None:
            try:
                self._passage.slabs.grow(1)
            except RuntimeError as error:
                self._passage.refuse(error)

    def give_back(self) -> None:
        """Give back disk space and pinned memory, once no copy is in flight; blocks."""
        if self._file is not None:
            self._file.close()
        self._passage.slabs.close()

    def _start(self, orders: Orders, wanted: SavedHandle | None = None) -> None:
        self._wanted = wanted
        try:
            super()._start(orders, wanted)
        finally:
            self._wanted = None

    def _later(self, call: Callable[..., None], *args: object) -> None:
        """Outside of the lock."""
        asyncio.get_running_loop().call_soon(call, *args)

    def _taken_ns(self, started_ns: int) -> int:
        """The time of a copy that has ended now, at most: it began no earlier than another ended."""
        now = perf_counter_ns()
        taken_ns, self._last_end_ns = now - max(started_ns, self._last_end_ns), now
        return taken_ns

    def _named(self, handle: SavedHandle, error: BaseException) -> BaseException:
        where = "" if handle.space is None else f", which was on the {handle.space.name}"
        error.add_note(f"the saved value {handle.label!r} ({format_bytes(handle.nbytes)}){where}, did not come back")
        return error


def _is_buffer(there: object, buffer: PinnedBuffer) -> bool:
    return isinstance(there, _OnHost) and there.buffer is buffer


def _bytes(buffer: PinnedBuffer) -> memoryview:
    return buffer.view(np.uint8, (buffer.nbytes,)).data
