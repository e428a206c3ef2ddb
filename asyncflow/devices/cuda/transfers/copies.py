"""The copies of a CUDA device: from the host, to the host, and from other CUDA devices.

Each kind has a stream of its own. A copy waits, on its stream, for the writer of its source and for earlier users of
its target's memory. A ticket keeps both ends until it is done, the target as `Landing` says; the event loop waits for
nothing. Small values between card and host are copied on the compute stream instead, where nothing has to wait.

The host's end is pinned memory. Small values are copied there at once. Large values go through it in pieces, which the
device's host thread fills or empties while the next piece is copied.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from asyncflow.devices.captures import NotCapturableError
from asyncflow.devices.cuda.transfers.pinned import PinnedBuffer, PinnedSlab
from asyncflow.devices.cuda.values import CudaArray, Landing
from asyncflow.devices.protocol import recording
from asyncflow.devices.values import DType, as_scalar
from asyncflow.streams.cuda.stream import CudaEvent, CudaStream, active
from asyncflow.streams.futures import resolve

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from asyncflow.devices.cuda.device import CudaDevice
    from asyncflow.devices.protocol import Deliver, Into, Placed, Spans
    from asyncflow.streams.cuda.cupy_types import Cupy, CupyArray
    from asyncflow.values import Array


_log = logging.getLogger("asyncflow.devices")

COPY_INLINE_BYTES = 1 << 20
"""A copy between host arrays up to this size is made on the event loop; a larger one on the device's host thread."""

PIECE_BYTES = 32 << 20
"""Larger values go through pinned memory in pieces of this size."""

SMALL_BYTES = 4096
"""Size of the largest values with pinned memory of their own, which large ones cannot use up."""

SMALL_PINNED_BYTES = 512 << 10

KEPT_BYTES = 64 << 10
"""Size of the largest value between cards that waits in memory for the next ticket, and gives none of its own."""

_AHEAD = 2
"""Pieces of one value that are on their way to the host at a time: one is copied while the other is emptied."""


class CudaCopies:
    """The copies of one device; its methods belong to the thread of the event loop, and none but `bring` may block."""

    __slots__ = ("_card", "_d2h", "_device", "_h2d", "_peer", "_runtime", "_slab", "_small", "_tasks")

    def __init__(
        self, device: CudaDevice, slab: PinnedSlab, streams: tuple[CudaStream, CudaStream, CudaStream]
    ) -> None:
        """Pins a little memory, which blocks.

        Args:
            device: whose copies.
            slab: pinned memory for all but small values.
            streams: h2d, d2h and peer.
        """
        self._device = device
        self._h2d, self._d2h, self._peer = streams
        self._runtime = device.cupy.cuda.runtime
        self._card = device.cupy.cuda.Device(device.physical)
        self._slab = slab
        self._small = PinnedSlab(device.cupy, SMALL_PINNED_BYTES)
        self._tasks: set[asyncio.Task[Placed]] = set()

    async def ended(self, grace_s: float) -> None:
        """Wait up to ``grace_s`` seconds for the copies in pieces."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=grace_s)

    def close(self) -> None:
        """Give pinned memory back, once all streams have ended; blocks."""
        self._small.close()

    # -- copies in -----------------------------------------------------------------------------------------------

    def bring(self, value: Array, name: str) -> CudaArray:
        """A copy of an array of the host, which the caller may then change.

        Blocks until all earlier work has ended if the pinned memory is full or too small; `feed` never does.

        Raises:
            NotCapturableError: the current stream captures.
        """
        device = self._device
        device.check()
        try:
            # the copy stream and its tickets would become part of the capture
            if active.stream is not None and device.cupy.cuda.get_current_stream().is_capturing():
                raise NotCapturableError(f"it copies {name!r} from the host")
            buffer = self._pinned(value.nbytes)
            if buffer is not None or not value.nbytes:
                return self._brought(value, buffer, name)
            return device.copied_pageable(value, name)
        except RuntimeError as error:
            raise device.cause_of(error)  # noqa: B904 - which has its cause

    def feed(self, value: Array, deliver: Deliver, name: str, into: Into | None = None) -> None:
        """Copy an array in: ``deliver(device_value, error)`` is called once, now or later.

        ``into(value)`` may offer memory of the compute stream for it.
        """
        nbytes = value.nbytes
        buffer = self._pinned(nbytes) if nbytes <= COPY_INLINE_BYTES else None
        if buffer is None and nbytes:
            self._spawn(self._feed_in_pieces(value, name, self._device.recorded(), into), deliver)
        else:
            self._device.answer(deliver, self._brought, value, buffer, name, into)

    def _brought(self, value: Array, buffer: PinnedBuffer | None, name: str, into: Into | None = None) -> CudaArray:
        device = self._device
        if buffer is None:
            return CudaArray(self.new(value.shape, value.dtype, name), device, device.compute, name)
        try:
            array = self._target(value, name, into)
            np.copyto(buffer.view(value.dtype, value.shape), value)
            if self._is_in_order(buffer, self._h2d):
                kind = self._runtime.memcpyHostToDevice
                self._copy(device.compute, array.data.ptr, buffer.ptr, value.nbytes, kind, name, "h2d")
                device.compute.keep(buffer)
                return CudaArray(array, device, device.compute, name)
            self._own(self._h2d)
            landing = Landing(array, device.compute)
            landed = self._copy_in(landing, 0, buffer, name)
        except Exception:
            buffer.free()  # now: other copies wait for it, and the traceback would keep it
            raise
        return CudaArray(array, device, self._h2d, name, landed, landing)

    def _target(self, value: Array, name: str, into: Into | None) -> CupyArray:
        offered: CupyArray | None = None if into is None else into(value)
        return self.new(value.shape, value.dtype, name) if offered is None else offered

    def _copy_in(self, landing: Landing, offset: int, buffer: PinnedBuffer, name: str) -> CudaEvent:
        kind = self._runtime.memcpyHostToDevice
        self._copy(self._h2d, landing.array.data.ptr + offset, buffer.ptr, buffer.nbytes, kind, name)
        return self._h2d.conclude(buffer.free, landing)

    async def _feed_in_pieces(self, value: Array, name: str, spans: Spans | None, into: Into | None) -> CudaArray:
        device = self._device
        device.check()
        with recording(device, spans):
            array = self._target(value, name, into)
        landing, landed = Landing(array, device.compute), None
        self._own(self._h2d)
        if not value.flags.c_contiguous:
            value = await device.in_host_thread(np.ascontiguousarray, value)
        flat = value.reshape(-1).view(np.uint8)
        for start in range(0, value.nbytes, self._piece):
            part = flat[start : start + self._piece]
            # If this is cancelled, the buffer goes back when the host thread lets go of it.
            buffer = await self._room(part.nbytes)
            try:
                await device.in_host_thread(np.copyto, buffer.view(np.uint8, part.shape), part)
                device.check()
                with recording(device, spans):
                    landed = self._copy_in(landing, start, buffer, name)
            except Exception:
                buffer.free()  # now: other copies wait for it, and the traceback would keep it
                raise
        return CudaArray(array, device, self._h2d, name, landed, landing)

    # -- copies out ----------------------------------------------------------------------------------------------

    def fetch(self, value: CudaArray, deliver: Deliver) -> None:
        """Copy a device value to the host: later, ``deliver(array, error)`` is called once."""
        device = self._device
        device.check()
        try:
            self._fetch(value, deliver)
        except RuntimeError as error:
            raise device.cause_of(error)  # noqa: B904 - which has its cause

    def _fetch(self, value: CudaArray, deliver: Deliver) -> None:
        nbytes, shape, dtype = value.array.nbytes, value.array.shape, value.array.dtype
        if not nbytes:
            self._d2h.notify(self.told(lambda: np.empty(shape, dtype), deliver))
            return
        buffer = self._pinned(nbytes) if nbytes <= COPY_INLINE_BYTES else None
        if buffer is None:
            self._spawn(self._fetch_in_pieces(value, self._device.recorded()), deliver)
            return
        source = value.stream
        # On the value's stream the copy follows all earlier work, so its end is the end of that work.
        is_last = not value.is_recorded
        stream = source if is_last and self._is_in_order(buffer, self._d2h) else self._d2h
        try:
            array = self.contiguous(value)
            self._copy_out(value, array, 0, buffer, stream)
        except Exception:
            buffer.free()
            raise
        if is_last and stream is not source:
            stream.work.follow(source.work, source.work.given)

        def emptied() -> CupyArray:
            try:
                return as_scalar(buffer.view(dtype, shape).copy())
            finally:
                buffer.free()

        stream.notify(self.told(emptied, deliver), array, buffer)

    def told(self, read: Callable[[], Placed], deliver: Deliver) -> Callable[[BaseException | None], None]:
        """Return a notice that delivers the result of ``read()``, or the reason for its absence."""

        def notice(error: BaseException | None) -> None:
            result = None
            if error is not None:
                error = self._device.loss_of(error)
            else:
                try:
                    result = read()
                except Exception as failure:  # out of memory: the waiting callers get this error
                    error = failure
            deliver(result, error)

        return notice

    def _copy_out(
        self, value: CudaArray, array: CupyArray, offset: int, buffer: PinnedBuffer, stream: CudaStream
    ) -> None:
        value.order(stream)
        kind = self._runtime.memcpyDeviceToHost
        self._copy(stream, buffer.ptr, array.data.ptr + offset, buffer.nbytes, kind, value.name, "d2h")

    async def _fetch_in_pieces(self, value: CudaArray, spans: Spans | None) -> Placed:
        device = self._device
        device.check()
        with recording(device, spans):
            array = self.contiguous(value)
        result = np.empty(value.shape, value.dtype)
        flat = result.reshape(-1).view(np.uint8)
        coming: deque[tuple[Array, PinnedBuffer, asyncio.Future[None]]] = deque()
        try:
            for start in range(0, value.nbytes, self._piece):
                part = flat[start : start + self._piece]
                # A copy lands its pieces before it waits for room: two copies that hold room could deadlock.
                while coming and (len(coming) == _AHEAD or self._slab.largest_hole < part.nbytes):
                    await self._land(*coming.popleft())
                buffer = await self._room(part.nbytes)
                with recording(device, spans):
                    coming.append((part, buffer, self._leave(value, array, start, buffer)))
            while coming:
                await self._land(*coming.popleft())
        finally:
            for _, buffer, done in coming:  # empty, unless a copy failed
                done.add_done_callback(_freeing_after(buffer))
        return as_scalar(result)

    def _leave(self, value: CudaArray, array: CupyArray, offset: int, buffer: PinnedBuffer) -> asyncio.Future[None]:
        """Give the copy of a piece to the stream; the future is that of its end."""
        try:
            self._device.check()
            self._copy_out(value, array, offset, buffer, self._d2h)
        except Exception:
            buffer.free()
            raise
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._d2h.notify(partial(resolve, done, None), array, buffer)
        return done

    async def _land(self, part: Array, buffer: PinnedBuffer, done: asyncio.Future[None]) -> None:
        try:
            await asyncio.shield(done)
            await self._device.in_host_thread(np.copyto, part, buffer.view(np.uint8, part.shape))
        except asyncio.CancelledError:
            # If it is being emptied, it goes back when the host thread lets go of it.
            if not done.done():
                done.add_done_callback(_freeing_after(buffer))
            raise
        except Exception:
            buffer.free()
            raise
        buffer.free()

    # -- from other devices --------------------------------------------------------------------------------------

    def receive(self, value: CudaArray, source: CudaDevice) -> CudaArray:
        """Take over an array of another CUDA device; both sides' memory is kept until the copy is done.

        Cards that cannot reach each other are copied through the host by the driver.
        """
        device = self._device
        source.check()
        try:
            return self._received(value, source)
        except RuntimeError as error:
            raise source.cause_of(device.cause_of(error))  # noqa: B904 - which has its cause

    def _received(self, value: CudaArray, source: CudaDevice) -> CudaArray:
        array = source.copies.contiguous(value)
        writer, is_last = value.stream, not value.is_recorded
        received = self.copied(array, source.physical, value.name, value.order)
        if is_last and array.nbytes:
            received.written.stream.work.follow(writer.work, writer.work.given)
        return received

    def copied(
        self, there: CupyArray, card: int, name: str, order: Callable[[CudaStream], object], *holds: object
    ) -> CudaArray:
        """A copy of an array in C order, made on `peer`.

        Args:
            there: the array, which is kept until the copy is made.
            card: that it is on.
            name: of the copy.
            order: lets a stream wait until the array is written.
            holds: what else to keep.
        """
        device, peer = self._device, self._peer
        here = self.new(there.shape, there.dtype, name)
        nbytes = there.nbytes
        if not nbytes:
            return CudaArray(here, device, device.compute, name)
        self._own(peer)
        order(peer)
        target, origin = here.data.ptr, there.data.ptr
        if card == device.physical:
            self._copy(peer, target, origin, nbytes, self._runtime.memcpyDeviceToDevice, name)
        else:
            self._copy_from_card(card, target, origin, nbytes, name)
        landing = Landing(here, device.compute)
        if nbytes <= KEPT_BYTES:
            peer.keep(landing, there, *holds)
        else:
            peer.hold(landing, there, *holds)
        written = peer.record()
        written.given = peer.work.given  # no launch is in progress on this stream
        return CudaArray(here, device, peer, name, written, landing)

    def _copy_from_card(self, card: int, target: int, origin: int, nbytes: int, name: str) -> None:
        device, stream = self._device, self._peer
        stream.work.given += 1
        with stream, device.timed(stream, name, nbytes):
            self._runtime.memcpyPeerAsync(target, device.physical, origin, card, nbytes, stream.raw.ptr)
        device.launched += _LAUNCHES
        device.memory.requests.copies += 1

    # -- saved values --------------------------------------------------------------------------------------------

    def move_out(
        self,
        values: Sequence[tuple[CupyArray, CudaStream, CudaStream, int]],
        buffer: PinnedBuffer,
        name: str,
        done: Callable[[BaseException | None], None],
    ) -> tuple[list[Landing], CudaEvent]:
        """Copy the memory of arrays to places in `buffer`; return the landings, and the event at the end.

        The arrays are given with the streams that have made them, and the home streams of their memory.
        ``done(error)`` is called once the copies have ended. Both ends are kept until then, arrays as `Landing` says.
        """
        d2h, kind, copy = self._d2h, self._runtime.memcpyDeviceToHost, self._runtime.memcpyAsync
        landings = [Landing(array, home) for array, _, home, _ in values]
        for stream in {stream for _, stream, _, _ in values}:  # an event recorded on each follows all writers
            d2h.wait(stream.record())
        d2h.work.given += len(values)
        stream_ptr, target = d2h.raw.ptr, buffer.ptr
        with self._card, self._device.timed(d2h, name, buffer.nbytes):
            for array, _, _, start in values:
                memory = array.data.mem
                copy(target + start, memory.ptr, memory.size, kind, stream_ptr)
        self._device.launched += _LAUNCHES - 1 + len(values)
        self._device.memory.requests.copies += len(values)
        return landings, d2h.conclude(done, *landings, buffer)

    def move_in(
        self,
        array: CupyArray,
        buffer: PinnedBuffer,
        start: int,
        name: str,
        done: Callable[[BaseException | None], None],
    ) -> CudaArray:
        """Copy what `move_out` has left in `buffer`, from a byte on, to new memory; the value knows its event, and
        work may use it.
        """
        self._own(self._h2d)
        landing = Landing(array, self._device.compute)
        self._copy(self._h2d, array.data.ptr, buffer.ptr + start, array.nbytes, self._runtime.memcpyHostToDevice, name)
        landed = self._h2d.conclude(done, landing, buffer)
        return CudaArray(array, self._device, self._h2d, name, landed, landing)

    # -- shared parts --------------------------------------------------------------------------------------------

    def new(self, shape: tuple[int, ...], dtype: DType, name: str) -> CupyArray:
        """New memory of the device, from the arena of its first compute stream."""
        self._device.pool.label = name
        with self._device.compute:
            return self._device.cupy.empty(shape, dtype)

    def contiguous(self, value: CudaArray, *, is_copy: bool = False) -> CupyArray:
        """Return the array, or a copy of it in C order; work ordered after `value` finds either written.

        Args:
            value: of the device.
            is_copy: copy even an array in C order, whose strides may be any where an extent is 1.
        """
        array, device = value.array, self._device
        if array.flags.c_contiguous and not is_copy:
            return array
        if value.stream not in device.compute_streams:
            value.settle(device.compute)
        stream = value.stream
        device.pool.label = value.name
        stream.work.given += 1
        with stream:
            copied = array.copy(order="C")
        device.launched += 1
        device.memory.requests.kernels += 1
        value.renew()
        device.hold(stream, array)
        return copied

    def _own(self, stream: CudaStream) -> None:
        """Let `stream` write to memory allocated just now: earlier kernels may still be using it."""
        compute = self._device.compute
        if compute.work.given != compute.work.passed:
            stream.wait(compute.record())

    def _is_in_order(self, buffer: PinnedBuffer, usual: CudaStream) -> bool:
        """Return True if a value in `buffer` had better be copied in the order of its kernels, on their stream.

        The `usual` stream would take three or four calls of CUDA and a ticket more. A small copy takes as long as one
        kernel. With several compute streams it would make one of them wait for another. While other copies
        are under way, as of saved values, the next kernels would wait: a card makes one copy in a direction at a time.
        """
        return buffer.slab is self._small and len(self._device.compute_streams) == 1 and not usual.pending

    def _copy(
        self, stream: CudaStream, target: int, origin: int, nbytes: int, kind: int, name: str, role: str = ""
    ) -> None:
        stream.work.given += 1
        # Faster than making the stream current as well.
        with self._card, self._device.timed(stream, name, nbytes, role):
            self._runtime.memcpyAsync(target, origin, nbytes, kind, stream.raw.ptr)
        self._device.launched += _LAUNCHES
        self._device.memory.requests.copies += 1

    @property
    def _piece(self) -> int:
        return min(PIECE_BYTES, self._slab.nbytes)

    def _pinned(self, nbytes: int) -> PinnedBuffer | None:
        """Pinned memory, if there is some now."""
        if not nbytes:
            return None
        if nbytes <= SMALL_BYTES and (buffer := self._small.take(nbytes)) is not None:
            return buffer
        return self._slab.take(nbytes) if nbytes <= self._slab.nbytes else None

    def _room(self, nbytes: int) -> asyncio.Future[PinnedBuffer]:
        """Pinned memory of the slab, once there is some."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[PinnedBuffer] = loop.create_future()

        def take(buffer: PinnedBuffer) -> None:
            if future.done():
                buffer.free()
            else:
                future.set_result(buffer)

        def given(buffer: PinnedBuffer) -> None:
            try:
                loop.call_soon_threadsafe(take, buffer)  # sessions on other threads share the slab
            except RuntimeError:
                if not loop.is_closed():
                    raise
                buffer.free()

        self._slab.wait_for(nbytes, given)
        return future

    def _spawn(self, work: Coroutine[object, object, Placed], deliver: Deliver) -> None:
        """Run a copy of several steps; nothing cancels it, since the memory it uses is the device's."""
        device = self._device
        task: asyncio.Task[Placed] = asyncio.get_running_loop().create_task(work, name=f"{device.name} copy")
        self._tasks.add(task)

        def done(task: asyncio.Task[Placed]) -> None:
            self._tasks.discard(task)
            if task.cancelled():
                deliver(None, asyncio.CancelledError("the event loop cancelled a copy"))
            elif error := task.exception():
                deliver(None, device.cause_of(error))
            else:
                deliver(task.result(), None)

        task.add_done_callback(done)


def enable_peer_access(cupy: Cupy, card: int) -> None:
    """Let `card` and the cards passed earlier copy to one another without the host, if they can.

    May take milliseconds: call it at start-up, on a worker thread.
    """
    known = _cards.setdefault(cupy, set())
    for other in known - {card}:
        for one, another in ((card, other), (other, card)):
            _enable(cupy, one, another)
    known.add(card)


def _enable(cupy: Cupy, card: int, other: int) -> None:
    runtime = cupy.cuda.runtime
    if runtime.deviceCanAccessPeer(card, other):
        with cupy.cuda.Device(card):
            try:
                runtime.deviceEnablePeerAccess(other)
            except runtime.CUDARuntimeError as error:
                if error.status != _ALREADY_ENABLED:  # copies then go through the host
                    _log.info("card %d cannot reach the memory of card %d: %s", card, other, error)


_LAUNCHES = 3
"""Operations that a copy adds to the queue of its stream beside the copy itself: waits and marks."""

_ALREADY_ENABLED = 704
_cards: dict[Cupy, set[int]] = {}


def _freeing_after(buffer: PinnedBuffer) -> Callable[[asyncio.Future[None]], None]:
    def free(done: asyncio.Future[None]) -> None:
        done.exception()  # retrieved here, as the caller has already raised an error
        buffer.free()

    return free
