"""A CUDA device: CuPy's kernels on streams of its own, which nobody on the event loop ever waits for.

One invariant keeps it simple: *a value is valid in the order of its compute stream*. A kernel counts as done once it is
launched. Only copies (to and from the host, from other devices) and reading a value touch events; each of them records
on the producer, waits on the consumer, and keeps the memory referenced until the event has completed.

Memory is taken from the pool while the compute stream is CuPy's current one, so freed memory is used again in the order
of that stream. The host's side of every copy is pinned (`asyncflow.devices.pinned`).
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter_ns
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from asyncflow.devices.cuda_launch import HostLauncher, Launcher, RegionLauncher
from asyncflow.devices.cuda_memory import CudaMemoryAccount, CudaPool, install_allocator
from asyncflow.devices.cuda_namespace import cuda_namespace
from asyncflow.devices.cuda_timing import Clock, PendingSpan
from asyncflow.devices.cuda_values import CudaArray, CudaOpaque, as_scalar, stays_on_host
from asyncflow.devices.memory import format_bytes
from asyncflow.devices.names import DeviceName
from asyncflow.devices.options import positive_count
from asyncflow.devices.pinned import PinnedBuffer, PinnedSlab, shared_slab
from asyncflow.devices.protocol import Deliver, Device, KernelInfo, Mark, Span
from asyncflow.errors import DeviceLostError
from asyncflow.streams.cuda import CudaStream
from asyncflow.streams.thread import ThreadStream

if TYPE_CHECKING:
    pass

MARK_EVERY = 128
"""Launches between two marks that tell how far the device has got."""

MOST_AHEAD = 512
"""Launches that may be in flight before launching has to pause: at about 1,000 the driver would block the caller."""

COPY_INLINE_BYTES = 1 << 20
"""A copy between host arrays up to this size is made on the event loop; a larger one on the device's host thread."""

PIECE_BYTES = 32 << 20
"""Larger values go through pinned memory in pieces of this size."""

_NS_PER_LAUNCH = 8_000.0
_NS_PER_FLOP = 1e9 / 10e12
_NS_PER_BYTE = 1e9 / 1.5e12
_NS_PER_COPY = 12_000.0
_NS_PER_HOST_BYTE = 1e9 / 20e9


class CudaDevice:
    """One logical CUDA device of a session.

    Any number of them may share a card; each has streams, memory, a limit and a throttle of its own.

    Attributes:
        cupy: the module.
        pool: where its memory comes from.
        launched: kernels launched since the last mark.
    """

    def __init__(
        self,
        cupy: Any,
        index: int = 0,
        *,
        physical: int = 0,
        memory_limit: int | None = None,
        compute_streams: int = 1,
        pinned: PinnedSlab | None = None,
    ) -> None:
        """Make the device ``cuda:<index>``; nothing of CUDA is touched before `start`.

        Args:
            cupy: the module.
            index: its number among the CUDA devices of the session.
            physical: the card's number.
            memory_limit: most bytes it may hold; None for what the card has. With a limit, all of it is
                taken from the card at the start, and CUDA is not asked for memory in a run.
            compute_streams: how many kernels may run at once.
            pinned: host memory for copies; None for the one that all devices share.

        Raises:
            ValueError: `memory_limit` or `compute_streams` is no positive int.
        """
        self.cupy = cupy
        self.physical = physical
        self._name = str(DeviceName("cuda", index))
        self._count = positive_count(compute_streams, "the number of compute streams")
        self._xp = cuda_namespace(cupy)
        self._given_slab = pinned
        self.pool = CudaPool(cupy, physical, self._name, memory_limit)
        self.launched = 0
        self._in_flight = 0
        self._resumes: list[Callable[[], None]] = []
        self._spans: list[Any] | None = None
        self._lost: BaseException | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._host = ThreadStream(f"{self._name}/host")
        self._is_started = False

    async def open(self) -> None:
        """`start` on a thread that may wait. Idempotent."""
        if not self._is_started:
            await asyncio.to_thread(self.start)

    def start(self) -> None:
        """Make streams, memory and the clock; blocks. Idempotent.

        Raises:
            MemoryLimitExceeded: the card has less memory free than the limit.
        """
        if self._is_started:
            return
        self._is_started = True
        cupy, name = self.cupy, self._name
        install_allocator(cupy)
        roles = ["compute", *(f"compute:{i}" for i in range(1, self._count)), "h2d", "d2h", "peer"]
        streams = [CudaStream(cupy, self.physical, f"{name}/{role}", self.pool) for role in roles]
        *compute, self._h2d, self._d2h, self._peer = streams
        self._compute = tuple(compute)
        self._streams = tuple(streams)
        self._roles = dict(zip(streams, roles, strict=True))
        lose = weakref.WeakMethod(self._lose)
        for stream in streams:
            stream.on_lost = lambda error: (method := lose()) and method(error)
        self._slab = self._given_slab or shared_slab(cupy)
        with self.compute.activate():
            self.pool.prime()
        self._clock = Clock(cupy, self.compute)

    def __repr__(self) -> str:
        return f"<CudaDevice {self._name} on card {self.physical}>"

    # -- the `Device` protocol -----------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """Such as ``cuda:0``."""
        return self._name

    @property
    def kind(self) -> str:
        """``cuda``."""
        return "cuda"

    @property
    def xp(self) -> ModuleType:
        """CuPy, with what it lacks."""
        return self._xp

    @property
    def compute(self) -> CudaStream:
        """The first stream of kernels."""
        return self._compute[0]

    @property
    def compute_streams(self) -> tuple[CudaStream, ...]:
        """The streams of kernels."""
        return self._compute

    @property
    def h2d(self) -> CudaStream:
        """The stream of copies from host memory."""
        return self._h2d

    @property
    def d2h(self) -> CudaStream:
        """The stream of copies to host memory."""
        return self._d2h

    @property
    def peer(self) -> CudaStream:
        """The stream of copies from other devices."""
        return self._peer

    @property
    def memory(self) -> CudaMemoryAccount:
        """The bytes it holds, and their limit."""
        return self.pool.account

    @property
    def is_asynchronous(self) -> bool:
        """True."""
        return True

    @property
    def runs_regions(self) -> bool:
        """True: one call enqueues all kernels of a region."""
        return True

    def kernel_ns(self, flops: float, nbytes: float) -> float:
        """The expected time of a kernel, for placement before anything is measured."""
        return max(_NS_PER_LAUNCH, _NS_PER_FLOP * flops, _NS_PER_BYTE * nbytes)

    def transfer_ns(self, nbytes: float, target: Device) -> float:
        """The expected time until a value of so many bytes made here is there on `target`."""
        if target is self:
            return 0.0
        if isinstance(target, CudaDevice):
            per_byte = _NS_PER_BYTE if target.physical == self.physical else _NS_PER_HOST_BYTE / 4
            return _NS_PER_COPY + per_byte * nbytes
        return _NS_PER_COPY + _NS_PER_HOST_BYTE * nbytes

    async def aclose(self, grace_s: float) -> bool:
        """Take no more work and wait up to ``grace_s`` seconds for what there is; True if all ended. Idempotent."""
        if not self._is_started:
            return await self._host.aclose(grace_s)
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=grace_s)
        for stream in self._streams:
            stream.stop()
        ended = await asyncio.gather(*(stream.aclose(grace_s) for stream in self._streams))
        if all(ended) and self._lost is None:
            await asyncio.to_thread(self.pool.release)
        return all(ended) and await self._host.aclose(grace_s)

    def describe(self) -> str:
        """One line for people: name, card, memory in use, limit."""
        now = self.memory.statistics()
        limit = "no limit" if now.limit is None else f"limit {format_bytes(now.limit)}"
        return f"{self._name}  card {self.physical}  {format_bytes(now.used)} in {now.buffers} buffers, {limit}"

    # -- launching -----------------------------------------------------------------------------------------------

    def bind(self, kernel: Callable[..., Any], info: KernelInfo) -> Callable[..., Any]:
        """A function that launches `kernel` on device values and host values; see `Launcher`."""
        return HostLauncher(self, kernel, info) if info.is_async else Launcher(self, kernel, info)

    def bind_region(self, function: Callable[..., Any], info: KernelInfo, *, is_generator: bool) -> Callable[..., Any]:
        """A function that enqueues a region; see `RegionLauncher`."""
        return RegionLauncher(self, function, info, is_generator=is_generator)

    def activate(self) -> Any:
        """A context in which this device's calls are cheaper; it must not be left open where something waits."""
        return self.compute.activate()

    def check(self) -> None:
        """Raise if the device is lost.

        Raises:
            DeviceLostError: an earlier kernel has broken it.
        """
        if self._lost is not None:
            raise self._loss() from self._lost

    def _loss(self) -> DeviceLostError:
        return DeviceLostError(
            f"{self._name} is lost: a kernel or copy failed with {self._lost}, after which CUDA refuses all work in "
            "this process; CUDA_LAUNCH_BLOCKING=1 shows which kernel it was. Start the process anew"
        )

    def _lose(self, error: BaseException) -> None:
        if self._lost is None:
            self._lost = error
        resumes, self._resumes = self._resumes, []
        for resume in resumes:
            resume()

    def throttle(self, resume: Callable[[], None]) -> bool:
        """Whether so much is launched and not done that launching has to pause; then calls ``resume()`` once, later."""
        if self.launched >= MARK_EVERY:
            count, self.launched = self.launched, 0
            self._in_flight += count
            for stream in self._compute[1:]:
                self.compute.wait(stream.record())
            self.compute.notify(lambda _error: self._caught_up(count))
        if self._in_flight < MOST_AHEAD or self._lost is not None:
            return False
        self._resumes.append(resume)
        return True

    def _caught_up(self, count: int) -> None:
        self._in_flight -= count
        if self._in_flight < MOST_AHEAD // 2 and self._resumes:
            resumes, self._resumes = self._resumes, []
            for resume in resumes:
                resume()

    def mark(self) -> Mark:
        """None: `when_done` says that all work launched before it is called has ended, whoever launched it."""
        return None

    def when_done(
        self, done: Callable[[BaseException | None], None], mark: Mark = None, *, elsewhere: bool = False
    ) -> None:
        """Call ``done(error)`` once, never before this returns, when all work launched has ended."""
        del mark, elsewhere
        left = len(self._streams)
        failure: BaseException | None = None

        def ended(error: BaseException | None) -> None:
            nonlocal left, failure
            left -= 1
            failure = failure or error
            if not left:
                done(None if failure is None else self._loss_of(failure))

        for stream in self._streams:
            stream.notify(ended)

    def _loss_of(self, error: BaseException) -> BaseException:
        self._lose(error)
        loss = self._loss()
        loss.__cause__ = error
        return loss

    def require_data(self, value: Any, name: str) -> None:
        """Does nothing: what was computed has data."""

    # -- values in -----------------------------------------------------------------------------------------------

    def constant(self, value: Any) -> Any:
        """A device value that has been there from the start; what has rank 0, and all that is no array, stays."""
        if stays_on_host(value):
            return value
        return self.copy_in(value, "constant") if np.ndim(value) else as_scalar(value)

    def resident(self, constant: Any, stream: int) -> Any:
        """The constant's array, which all later work of a compute stream finds there."""
        if type(constant) is not CudaArray:
            return constant
        constant.order(self._compute[stream])
        return constant.array

    def copy_in(self, value: np.ndarray[Any, Any], name: str) -> CudaArray:
        """A copy of an array of the host, which the caller may then change.

        Blocks while CUDA copies if the pinned memory is full or too small; `feed` never does.
        """
        self.check()
        array = self._new(value.shape, value.dtype, name)
        nbytes = value.nbytes
        if not nbytes:
            return CudaArray(array, self._name, self.compute, name)
        buffer = self._slab.take(nbytes) if nbytes <= self._slab.largest else None
        if buffer is None:
            return self._copied_pageable(array, value, name)
        np.copyto(buffer.view(value.dtype, value.shape), value)
        self._own(self._h2d)
        self._copy(self._h2d, array.data.ptr, buffer.ptr, value.nbytes, self.cupy.cuda.runtime.memcpyHostToDevice, name)
        self._h2d.notify(_freeing(buffer), array)
        return CudaArray(array, self._name, self._h2d, name, self._h2d.record())

    def _copied_pageable(self, array: Any, value: np.ndarray[Any, Any], name: str) -> CudaArray:
        with self.compute.activate():
            array.set(np.ascontiguousarray(value))
            self.compute.raw.synchronize()
        return CudaArray(array, self._name, self.compute, name)

    def feed(self, value: Any, deliver: Deliver, name: str = "feed") -> None:
        """Copy a host value in: ``deliver(device_value, error)`` is called once, now or later.

        `value` must not change before that. Counters, predicates and what is no array stay host values.
        """
        if np.ndim(value) == 0 or stays_on_host(value):
            deliver(as_scalar(value), None)
            return
        if value.nbytes <= COPY_INLINE_BYTES and self._slab.largest_hole >= value.nbytes:
            try:
                copied = self.copy_in(value, name)
            except Exception as error:
                deliver(None, error)
            else:
                deliver(copied, None)
            return
        self._spawn(self._feed_in_pieces(np.ascontiguousarray(value), name), deliver)

    async def _feed_in_pieces(self, value: np.ndarray[Any, Any], name: str) -> CudaArray:
        self.check()
        array = self._new(value.shape, value.dtype, name)
        flat = value.reshape(-1).view(np.uint8)
        for start in range(0, value.nbytes, self._piece):
            part = flat[start : start + self._piece]
            buffer = await self._room(part.nbytes)
            try:
                await self.in_host_thread(np.copyto, buffer.view(np.dtype(np.uint8), part.shape), part)
                self.check()
                if not start:
                    self._own(self._h2d)
                kind = self.cupy.cuda.runtime.memcpyHostToDevice
                self._copy(self._h2d, array.data.ptr + start, buffer.ptr, part.nbytes, kind, name)
            except BaseException:
                buffer.free()
                raise
            self._h2d.notify(_freeing(buffer), array)
        return CudaArray(array, self._name, self._h2d, name, self._h2d.record())

    def fed(self, value: np.ndarray[Any, Any], name: str) -> Any:
        """`feed` for coroutines: the device value, or a future of it."""
        return self._future_of(lambda deliver: self.feed(value, deliver, name))

    # -- values out ----------------------------------------------------------------------------------------------

    def fetch(self, value: Any, deliver: Deliver) -> bool:
        """Copy a device value to the host: later, ``deliver(array, error)`` is called once.

        Returns:
            False, without ever calling `deliver`, if `value` is a host value, usable as it is.
        """
        if type(value) is CudaOpaque:
            self.compute.notify(lambda error: deliver(value.value, error))
            return True
        if type(value) is not CudaArray:
            return False
        self.check()
        nbytes = value.nbytes
        if not nbytes:
            empty = np.empty(value.shape, value.dtype)
            self._d2h.notify(lambda error: deliver(empty, error))
            return True
        if nbytes > min(COPY_INLINE_BYTES, self._slab.largest) or (buffer := self._slab.take(nbytes)) is None:
            self._spawn(self._fetch_in_pieces(value), deliver)
            return True
        array = self._contiguous(value)
        self._copy_out(value, array.data.ptr, buffer, nbytes)

        def copied(error: BaseException | None) -> None:
            result = None if error is not None else buffer.view(value.dtype, value.shape).copy()[()]
            buffer.free()
            deliver(result, None if error is None else self._loss_of(error))

        self._d2h.notify(copied, array)
        return True

    async def _fetch_in_pieces(self, value: CudaArray) -> np.ndarray[Any, Any]:
        array = self._contiguous(value)
        result = np.empty(value.shape, value.dtype)
        flat = result.reshape(-1).view(np.uint8)
        for start in range(0, value.nbytes, self._piece):
            part = flat[start : start + self._piece]
            buffer = await self._room(part.nbytes)
            done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            try:
                self.check()
                self._copy_out(value, array.data.ptr + start, buffer, part.nbytes)
            except BaseException:
                buffer.free()
                raise
            self._d2h.notify(_resolving(done), array)
            try:
                await asyncio.shield(done)
                await self.in_host_thread(np.copyto, part, buffer.view(np.dtype(np.uint8), part.shape))
            finally:
                buffer.free()
        return result

    def _copy_out(self, value: CudaArray, pointer: int, buffer: PinnedBuffer, nbytes: int) -> None:
        value.order(self._d2h)
        self._copy(self._d2h, buffer.ptr, pointer, nbytes, self.cupy.cuda.runtime.memcpyDeviceToHost, value.name)

    def fetched(self, value: Any) -> Any:
        """`fetch` for coroutines: a host value, or a future of it."""
        if type(value) is not CudaArray and type(value) is not CudaOpaque:
            return value
        return self._future_of(lambda deliver: self.fetch(value, deliver))

    # -- between devices -----------------------------------------------------------------------------------------

    def send(self) -> int:
        """Now: what is said to another device is said at once."""
        return perf_counter_ns()

    def receive(self, value: Any, source: Device, deliver: Deliver, sent_ns: int | None = None) -> None:
        """Take over a value of `source`: ``deliver(value_here, error)`` is called once, now or later.

        An array of another CUDA device is delivered at once, and has its event; both sides' memory is kept until the
        copy is done. Cards that cannot reach each other are copied through the host by the driver.
        """
        del sent_ns
        if type(value) is CudaOpaque:
            deliver(value.value, None)
        elif type(value) is not CudaArray:
            self.feed(value, deliver)
        else:
            assert isinstance(source, CudaDevice)
            try:
                self.check()
                received = self._received(value, source)
            except Exception as error:  # whoever receives gets it, whichever side was at fault
                deliver(None, error)
            else:
                deliver(received, None)

    def _received(self, value: CudaArray, source: CudaDevice) -> CudaArray:
        here = self._new(value.shape, value.dtype, value.name)
        there = source._contiguous(value)
        self._own(self._peer)
        value.order(self._peer)
        runtime, pointers = self.cupy.cuda.runtime, (here.data.ptr, there.data.ptr)
        if self.physical == source.physical:
            self._copy(self._peer, *pointers, value.nbytes, runtime.memcpyDeviceToDevice, value.name)
        else:
            self._copy_from_card(source.physical, *pointers, value.nbytes, value.name)
        self._peer.hold(here, there, value)
        return CudaArray(here, self._name, self._peer, value.name, self._peer.record())

    def _copy_from_card(self, card: int, target: int, origin: int, nbytes: int, name: str) -> None:
        enable_peer_access(self.cupy, self.physical, card)
        with self._peer.activate(), self.timed(self._peer, name, nbytes):
            self.cupy.cuda.runtime.memcpyPeerAsync(target, self.physical, origin, card, nbytes, self._peer.raw.ptr)

    # -- copies --------------------------------------------------------------------------------------------------

    @property
    def _piece(self) -> int:
        return min(PIECE_BYTES, self._slab.largest)

    def _new(self, shape: tuple[int, ...], dtype: np.dtype[Any], name: str) -> Any:
        """New memory of the device, from the arena of its compute stream."""
        self.pool.label = name
        with self.compute.activate():
            return self.cupy.empty(shape, dtype)

    def _own(self, stream: CudaStream) -> None:
        """Let `stream` write to memory allocated just now: earlier kernels may still be using it."""
        stream.wait(self.compute.record())

    def _contiguous(self, value: CudaArray) -> Any:
        """The array, or a copy of it made on its stream, in C order."""
        array = value.array
        if array.flags.c_contiguous:
            return array
        stream = self.compute
        value.order(stream)
        self.pool.label = value.name
        with stream.activate():
            copied = self.cupy.ascontiguousarray(array)
        if value.stream is not stream:
            value.settle(stream)
        else:
            value.renew()
        return copied

    def _copy(self, stream: CudaStream, target: int, origin: int, nbytes: int, kind: int, name: str) -> None:
        with stream.activate(), self.timed(stream, name, nbytes):
            if nbytes:
                self.cupy.cuda.runtime.memcpyAsync(target, origin, nbytes, kind, stream.raw.ptr)

    def _room(self, nbytes: int) -> asyncio.Future[PinnedBuffer]:
        """Pinned memory, once there is some."""
        future: asyncio.Future[PinnedBuffer] = asyncio.get_running_loop().create_future()
        self._slab.wait_for(nbytes, lambda buffer: buffer.free() if future.done() else future.set_result(buffer))
        return future

    async def in_host_thread(self, work: Callable[..., Any], *args: Any) -> Any:
        """What ``work(*args)`` gives, computed on the device's host thread."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def deliver(result: object, error: BaseException | None, _started: int, _ended: int) -> None:
            _resolve(future, result, error)

        self._host.submit(work, args, deliver, loop)
        return await asyncio.shield(future)

    def _future_of(self, ask: Callable[[Deliver], object]) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        ask(lambda value, error: _resolve(future, value, error))
        return future

    def _spawn(self, work: Coroutine[Any, Any, Any], deliver: Deliver) -> None:
        """Run a copy of several steps; nothing cancels it, since the memory it uses is the device's."""
        task: asyncio.Task[Any] = asyncio.get_running_loop().create_task(work, name=f"{self._name} copy")
        self._tasks.add(task)

        def done(task: asyncio.Task[Any]) -> None:
            self._tasks.discard(task)
            if task.cancelled():
                deliver(None, asyncio.CancelledError("the event loop cancelled a copy"))
            elif error := task.exception():
                deliver(None, error)
            else:
                deliver(task.result(), None)

        task.add_done_callback(done)

    # -- timelines -----------------------------------------------------------------------------------------------

    def record_into(self, spans: list[Any] | None) -> list[Any] | None:
        """Add the work launched from here on to `spans`; None: nobody wants to know. Gives what it was added to."""
        if spans is not None and self._clock.is_old:
            self._host.enqueue(self._clock.refresh)
        before, self._spans = self._spans, spans
        return before

    def recorded(self) -> list[Any] | None:
        """What the work launched now is added to."""
        return self._spans

    def settle(self, spans: Sequence[Any]) -> Sequence[Span]:
        """The spans of work that has ended, with their times."""
        return [span.settled() for span in spans]

    def timed(self, stream: CudaStream, name: str, nbytes: int = 0) -> AbstractContextManager[None]:
        """Record when the work that is given to `stream` inside begins and ends there, if somebody wants to know."""
        if self._spans is None:
            return _UNTIMED
        return PendingSpan(self._clock, stream, name, self._roles[stream], nbytes, self._spans)


def enable_peer_access(cupy: Any, card: int, other: int) -> None:
    """Let `card` read the memory of `other` without going through the host, if the two can; asked once a pair."""
    known = _peers.setdefault(id(cupy), set())
    if (card, other) in known:
        return
    known.add((card, other))
    runtime = cupy.cuda.runtime
    if runtime.deviceCanAccessPeer(card, other):
        with cupy.cuda.Device(card):
            try:
                runtime.deviceEnablePeerAccess(other)
            except runtime.CUDARuntimeError as error:
                if error.status != _ALREADY_ENABLED:
                    raise


_UNTIMED = nullcontext()
_peers: dict[int, set[tuple[int, int]]] = {}
_ALREADY_ENABLED = 704
_ResultOf: TypeAlias = "asyncio.Future[Any]"


def _resolve(future: _ResultOf, value: Any, error: BaseException | None) -> None:
    if future.done():
        return  # cancelled meanwhile
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)


def _resolving(future: asyncio.Future[None]) -> Callable[[BaseException | None], None]:
    return lambda error: _resolve(future, None, error)


def _freeing(buffer: PinnedBuffer) -> Callable[[BaseException | None], None]:
    # After an error nothing runs any more, so nobody writes to it either.
    return lambda _error: buffer.free()


__all__ = ["CudaDevice"]
