"""A CUDA device: CuPy's kernels on streams of its own, for which the event loop never waits.

One invariant keeps it simple: *a value is valid in the order of its compute stream*. A kernel counts as done once it is
launched. Only large copies (to and from the host), copies from other devices and tickets touch events; a copy records
on the producer, waits on the consumer, and keeps the memory referenced until the event has completed.

Memory is taken from the pool while a compute stream is CuPy's current one. So freed memory is used again in the order
of that stream, its *home*. Memory that another stream reads or writes is kept until that stream is done with it.

The copies are in `asyncflow.devices.cuda.transfers.copies`, what launches kernels in `asyncflow.devices.cuda.launch`,
how far the device has got and whether it is lost in `asyncflow.devices.cuda.progress`.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from asyncflow.devices.cuda.graphs.loop_launch import WhileLauncher
from asyncflow.devices.cuda.graphs.products import Products, cublas
from asyncflow.devices.cuda.kernels import KernelLaunches
from asyncflow.devices.cuda.launch import CudaHostLauncher, CudaLauncher, CudaRegionLauncher
from asyncflow.devices.cuda.memory import CudaPool, home_of, install_allocator
from asyncflow.devices.cuda.namespace import CountedNamespace, CudaNamespace
from asyncflow.devices.cuda.progress import Progress
from asyncflow.devices.cuda.timing import Clock, HostSpan, PendingSpan
from asyncflow.devices.cuda.transfers.copies import CudaCopies, enable_peer_access
from asyncflow.devices.cuda.transfers.exchange import Exchange, ForeignArray
from asyncflow.devices.cuda.transfers.holder import CudaHolder
from asyncflow.devices.cuda.transfers.pinned import PinnedSlab, shared_slab
from asyncflow.devices.cuda.transfers.swapping import CudaSwapping
from asyncflow.devices.cuda.values import CudaArray, CudaOpaque, Landing
from asyncflow.devices.decisions import LoopCode
from asyncflow.devices.figures.presets import DEFAULT_HOST
from asyncflow.devices.memory import ChargedAccount, MemoryLimitExceeded
from asyncflow.devices.protocol import Deliver, Device, Into, KernelInfo, Placed, Span, Spans
from asyncflow.devices.saved.saved_handle import Space
from asyncflow.devices.values import DeviceValue, RowsToJoin, as_scalar, is_plain, stays_on_host
from asyncflow.errors import PlacementError
from asyncflow.foreign_names import install
from asyncflow.streams.beside import call_beside
from asyncflow.streams.cpu.stream import ThreadStream
from asyncflow.streams.cuda.bindings import LEAST_VERSION, cuda_bindings
from asyncflow.streams.cuda.stream import CudaStream, active, capturing
from asyncflow.streams.futures import resolve
from asyncflow.streams.holding import ThreadHold, holding, refuse_to_queue

if TYPE_CHECKING:
    from asyncflow.streams.cuda.cupy_types import Cupy, CupyArray, Raw
    from asyncflow.values import Array, Kernel, Value

_log = logging.getLogger("asyncflow.devices")

_NS_PER_KERNEL = 3_000.0
_NS_PER_FLOP = 1e9 / 10e12
_NS_PER_BYTE = 1e9 / 1.5e12
_NS_PER_COPY = 60_000.0
"""Nanoseconds of a copy, host work included: one thread launches for all devices, so spreading small kernels gains
nothing.
"""
_NS_PER_HOST_BYTE = 1e9 / 20e9


class CudaDevice(Progress):
    """One logical CUDA device of a session.

    Any number of them may share a card; each has streams, memory, a limit and a throttle of its own.

    Attributes (more in `Progress`):
        copies: moves its values.
        exchange: takes arrays from other libraries, and lends them some.
    """

    host_times = DEFAULT_HOST.times()  # measured on the host of another card
    swapping: CudaSwapping

    def __init__(
        self,
        cupy: Cupy,
        index: int = 0,
        *,
        physical: int = 0,
        memory_limit: int | None = None,
        compute_streams: int = 1,
        pinned: PinnedSlab | None = None,
        host: Space | None = None,
        spill_directory: str | None = None,
    ) -> None:
        """Make the device ``cuda:<index>``; CUDA is not touched before `start`.

        Args:
            cupy: the module.
            index: its number among the CUDA devices of the session.
            physical: the card's number.
            memory_limit: most bytes it may hold; None for what the card has. With a limit, all of it is taken from the
                card at the start, and CUDA is not asked for memory in a run. With several compute streams it is: memory
                belongs to one of them, and how much each needs is not known.
            compute_streams: how many kernels may run at once.
            pinned: host memory for copies; None for the slab that all devices share.
            host: where saved values go; None for as much memory there as they take.
            spill_directory: where they go beyond that; None for nowhere.

        Raises:
            OSError: there can be no file in that directory.
            ValueError: `memory_limit` or `compute_streams` is no positive int.
        """
        super().__init__(cupy, physical, index, compute_streams)
        self.pool = CudaPool(cupy, physical, self.name, memory_limit)
        self.memory: ChargedAccount = self.pool.account
        self.swapping = CudaSwapping(self, host or Space("host"), spill_directory)
        self.memory.make_room = self.swapping.make_room
        self.memory.advise = self.swapping.advice
        self._namespace = CudaNamespace(cupy, self.upload, CudaHolder(self))
        self.xp: ModuleType = self._namespace
        self._given_slab = pinned
        self._host = ThreadStream(f"{self.name}/host")
        self.exchange = Exchange(self)
        self._is_started = False

    @property
    def store_xp(self) -> ModuleType:
        """A namespace for a store that launches kernels of its own, which counts them."""
        return CountedNamespace(self._namespace, self.memory.requests)

    async def open(self) -> None:
        """`start` on a thread that may wait. Idempotent."""
        if not self._is_started:
            await call_beside(self.start)

    def start(self) -> None:
        """Make streams, memory and the clock; blocks. Idempotent.

        Raises:
            PlacementError: the card has less memory free than the limit, or refuses something else.
            DeviceLostError: the card takes no work, because an earlier kernel of this process has broken it.
        """
        if self._is_started:
            return
        try:
            self._start()
        except MemoryLimitExceeded as error:
            raise PlacementError(f"device {self.name} does not get the memory that it is to have: {error}") from error
        except RuntimeError as error:
            cause = self.cause_of(error)
            if cause is error:
                raise PlacementError(f"device {self.name} cannot be opened: {error}") from error
            raise cause from error
        self._is_started = True

    def _start(self) -> None:
        cupy = self.cupy
        install_allocator(cupy)
        if (bindings := cuda_bindings()) is not None:
            self._namespace.launches = KernelLaunches(cupy, bindings)
        self.make_streams(lambda name: CudaStream(cupy, self.physical, name, self.pool), "peer", "clock")
        self.peer, clock = self._streams["peer"], self._streams["clock"]
        self._copying = copying = self.h2d, self.d2h, self.peer
        self._probe = clock
        self._roles = {stream: role for role, stream in self._streams.items()}
        lose = weakref.WeakMethod(self._lose)
        for stream in self.streams:
            stream.on_lost = lambda error: (method := lose()) and method(error)
        with cupy.cuda.Device(self.physical):
            self.copies = CudaCopies(self, self._given_slab or shared_slab(cupy), copying)
            self.swapping.pin()
        enable_peer_access(cupy, self.physical)
        if self._count == 1:
            with self.compute:
                self.pool.prime()
        # On its own, idle stream: a late answer would make the clock wrong by the delay.
        self._clock = Clock(cupy, clock)

    def __repr__(self) -> str:
        return f"<CudaDevice {self.name} on card {self.physical}>"

    # -- as a `LogicalDevice` ------------------------------------------------------------------------------------

    @property
    def what(self) -> str:
        """The card of the device."""
        return f"card {self.physical}"

    def check_loops(self) -> None:
        """Raise if the package for loops that the card runs by itself is missing.

        Raises:
            PlacementError: there is not.
        """
        if cuda_bindings() is None:
            raise PlacementError(
                f"device_while=True needs the package cuda-bindings, version {LEAST_VERSION} or later, which is not "
                f"installed, is older, or cannot be imported: {install('cuda13')} (or cuda12, whichever "
                "CuPy there is), or leave device_while out, and the host drives the loops"
            )

    def kernel_ns(self, flops: float, nbytes: float) -> float:
        """The expected time of a kernel, for placement before anything is measured."""
        return max(_NS_PER_KERNEL, _NS_PER_FLOP * flops, _NS_PER_BYTE * nbytes)

    def transfer_ns(self, nbytes: float, target: Device) -> float:
        """Return the expected time until a value of `nbytes` bytes made here is present on `target`."""
        if target is self:
            return 0.0
        if isinstance(target, CudaDevice):
            per_byte = _NS_PER_BYTE if target.physical == self.physical else _NS_PER_HOST_BYTE / 4
            return _NS_PER_COPY + per_byte * nbytes
        return _NS_PER_COPY + _NS_PER_HOST_BYTE * nbytes

    async def aclose(self, grace_s: float) -> bool:
        """Refuse further work and wait up to ``grace_s`` seconds for present work; return True if all of it ended.
        Idempotent.
        """
        if self._is_started:
            await self.copies.ended(grace_s)
        have_ended = await super().aclose(grace_s)
        is_over = await self._host.aclose(grace_s) and await self.swapping.aclose(grace_s) and have_ended
        if is_over and self._is_started and self._lost is None:
            self._is_started = False
            await call_beside(self._release)
        return is_over

    def _release(self) -> None:
        self.exchange.close()
        if self._namespace.products is not None:
            with self.cupy.cuda.Device(self.physical):
                self._namespace.products.close()
            self._namespace.products = None
        self.swapping.give_back()
        self.pool.release()
        self.copies.close()

    # -- launching -----------------------------------------------------------------------------------------------

    def bind(self, kernel: Kernel, info: KernelInfo) -> Kernel:
        """A function that launches `kernel` on device values and host values; see `CudaLauncher`."""
        return CudaHostLauncher(self, kernel, info) if info.is_async else CudaLauncher(self, kernel, info)

    def bind_region(self, function: Kernel, info: KernelInfo, *, is_generator: bool) -> Kernel:
        """A function that enqueues a region; see `CudaRegionLauncher`."""
        return CudaRegionLauncher(self, function, info, is_generator=is_generator)

    def bind_loop(self, loop: LoopCode, info: KernelInfo) -> WhileLauncher:
        """Return a loop that the card runs by itself, if it can be captured; see `WhileLauncher`."""
        self.make_capturable()
        return WhileLauncher(self, cuda_bindings(), loop, info)

    def make_capturable(self) -> None:
        """Make products of matrices from here on so that CUDA graphs can hold them, if there is a cuBLAS for it."""
        with capturing, self.cupy.cuda.Device(self.physical):
            if self._namespace.products is not None or (library := cublas(self.cupy)) is None:
                return
            try:
                streams = [stream.raw for stream in self.compute_streams]
                self._namespace.products = Products(self.cupy, library, streams)
            except RuntimeError:  # usually out of memory
                _log.info("%s makes no CUDA graphs of products", self.name, exc_info=True)

    def activate(self) -> Raw:
        """A context in which this device's calls are cheaper; it must not be left open where something waits."""
        if self.exchange.returned:
            self.exchange.take_back()
        return self.compute

    # -- values in -----------------------------------------------------------------------------------------------

    def constant(self, value: Placed) -> Placed:
        """Return a device value that exists from the start; values of rank 0, and anything but arrays, stay on the
        host.
        """
        if stays_on_host(value):
            return value
        if not np.ndim(value):
            return as_scalar(value)
        if _is_on_loop():
            return self.copy_in(value, "constant")
        # Large plans are compiled on a thread, which may wait.
        self.check()
        return self.copied_pageable(value, "constant")

    def resident(self, constant: Value, stream: int) -> Placed:
        """The constant's array, which all later work of a compute stream finds there."""
        if type(constant) is not CudaArray:
            return constant
        if _is_on_loop():  # else the caller has waited for the copy
            constant.order(self.compute_streams[stream])
        return constant.array

    def upload(self, value: Array) -> CupyArray:
        """The array for one of the host that a kernel uses, on the compute stream that is active."""
        stream = active.stream or self.compute
        if not _is_on_loop():
            return self.copied_pageable(value, "upload").array
        copied = self.copy_in(value, "upload")
        copied.settle(stream)
        self.hold(stream, copied.array)
        return copied.array

    def copy_in(self, value: Array, name: str) -> CudaArray:
        """A copy of an array of the host, which the caller may then change.

        Blocks until all earlier work has ended if the pinned memory is full or too small; `feed` never does.
        """
        return self.copies.bring(value, name)

    def copied_pageable(self, value: Array, name: str) -> CudaArray:
        """A copy of an array of the host, without pinned memory; blocks until all earlier work has ended.

        Any thread may call it. Another thread may capture on the compute stream meanwhile. Memory allocated, or events
        recorded, there would then belong to the graph, and no thread may wait for that stream, or copy on it.
        """
        cupy = self.cupy
        with capturing, self.compute:
            array = self.copies.new(value.shape, value.dtype, name)
            ready = cupy.cuda.Event(block=True, disable_timing=True)
            ready.record()  # earlier kernels may still be using the memory
        with cupy.cuda.Device(self.physical):
            ready.synchronize()
            copying = cupy.cuda.Stream(non_blocking=True)  # as in `exchange.read`
            array.set(np.asarray(value, order="C"), stream=copying)
            self.memory.requests.copies += 1
            copying.synchronize()
        return CudaArray(array, self, self.compute, name)

    def feed_into(self, value: Placed, deliver: Deliver, into: Into | None) -> None:
        """`feed`; ``into(array)`` may offer memory of the compute stream for the copy."""
        self.feed(value, deliver, into=into)

    def feed(self, value: Placed, deliver: Deliver, name: str = "feed", into: Into | None = None) -> None:
        """Copy a host value in: ``deliver(device_value, error)`` is called once, now or later.

        `value` must not change before that, but for a `ForeignArray`. Counters, predicates and anything but arrays stay
        host values.
        """
        if self.exchange.returned:
            self.exchange.take_back()
        if type(value) is ForeignArray:
            self.exchange.feed(value, deliver, name)
            return
        if type(value) is CudaArray and value.home is self:
            deliver(value, None)  # it has stayed
            return
        if type(value) is RowsToJoin:
            self.answer(deliver, self._joined, value, name)
            return
        if np.ndim(value) == 0 or stays_on_host(value):
            deliver(as_scalar(value), None)
            return
        self.copies.feed(value, deliver, name, into)

    def _joined(self, value: RowsToJoin, name: str) -> Placed:
        info = KernelInfo(name=name, flops=lambda *_: 0.0, infer=lambda *_: None)
        return CudaLauncher(self, lambda *rows: value.join(self.xp, rows), info)(*value.rows)

    def fed(self, value: Array, name: str, into: Into | None = None) -> Placed:
        """`feed` for coroutines: the device value, or a future of it."""
        return self._future_of(lambda deliver: self.feed(value, deliver, name, into))

    # -- values out ----------------------------------------------------------------------------------------------

    def fetched(self, value: Value) -> Placed:
        """`DeviceValue.to_host` for coroutines: a host value, or a future of it."""
        return self._future_of(value.to_host) if isinstance(value, DeviceValue) else value

    # -- between devices -----------------------------------------------------------------------------------------

    def receive(self, value: Value, source: Device, deliver: Deliver, sent_ns: int | None = None) -> None:
        """Take over a value of `source`: ``deliver(value_here, error)`` is called once, now or later.

        An array of another CUDA device is delivered at once, and has its event.
        """
        if type(value) is CudaOpaque:
            deliver(value.value, None)
        elif type(value) is CudaArray:
            assert isinstance(source, CudaDevice)
            self.answer(deliver, self.copies.receive, value, source)  # delivers errors of either side
        else:
            super().receive(value, source, deliver, sent_ns)

    # -- helpers -------------------------------------------------------------------------------------------------

    def hold(self, stream: CudaStream, *arrays: Value) -> None:
        """Keep arrays until the work given to `stream` in this turn is done, unless their memory belongs to it.

        Freed memory is used again in the order of its home, which is the only compute stream if there is one.
        """
        if self._count > 1 and (foreign := [array for array in arrays if home_of(array) is not stream]):
            stream.hold(*foreign)

    def hold_taken(self, stream: CudaStream, value: Value) -> None:
        """Keep a value that a store has given up, for the region that has taken it and goes on in steps on `stream`.

        A store gives up another store with all arrays of that one.
        """
        if self._count == 1:
            return
        is_array = isinstance(value, self.cupy.ndarray)
        if is_plain(value) or (is_array and home_of(value) is stream):
            return
        held = value if is_array else CudaOpaque(value, self, stream)
        stream.hold(held)
        if stream.taken is not None:
            stream.taken.append(held)

    def hand_over(self, nbytes: float) -> None:
        """Free up to `nbytes` that are kept only until the work of another stream is done.

        The host may be 256 launches ahead of the card. What these read on another stream than its home is kept
        meanwhile, and no iteration has asked for room for it. The home waits for that work instead, and uses the memory
        at once. Streams then overlap less, so only an allocation that finds no room asks for it.
        """
        enough = self.memory.used - nbytes
        for stream in self._copying:
            stream.note_launched()  # its held objects belong only to its own copies
        for stream in (*self.compute_streams, self.peer, self.d2h, self.h2d):
            for _ in stream.hand_over(self._heirs):
                if self.memory.used <= enough:
                    return

    def _heirs(self, held: object) -> Collection[CudaStream] | None:
        """Return the streams in whose order the memory held by a ticket is used again; None if they are not known."""
        if type(held) is CudaOpaque:
            return None if held.is_foreign else self.compute_streams
        if type(held) is Landing:
            return (held.home,)
        home = home_of(held) if isinstance(held, self.cupy.ndarray) else None
        return (home,) if home in self.compute_streams else None

    async def in_host_thread(self, work: Callable[..., Placed], *args: Value) -> Placed:
        """The result of ``work(*args)``, computed on the device's host thread."""
        loop, context = asyncio.get_running_loop(), copy_context()
        refuse_to_queue(context)
        future: asyncio.Future[Placed] = loop.create_future()

        def deliver(result: object, error: BaseException | None, _started: int, _ended: int) -> None:
            resolve(future, result, error)

        self._host.submit(context.run, (holding, ThreadHold(), work, *args), deliver, loop)
        return await asyncio.shield(future)

    def _future_of(self, ask: Callable[[Deliver], object]) -> asyncio.Future[Placed]:
        future: asyncio.Future[Placed] = asyncio.get_running_loop().create_future()
        # Of several futures that fail, only the first one's error is awaited; asyncio would complain about the others.
        future.add_done_callback(lambda future: future.cancelled() or future.exception())
        ask(partial(resolve, future))
        return future

    # -- timelines -----------------------------------------------------------------------------------------------

    def record_into(self, spans: Spans | None) -> Spans | None:
        """Add the work launched from here on to `spans`; None stops that. Returns the former target."""
        if spans is not None and self._clock.is_old:
            self._host.enqueue(self._clock.refresh)
        return super().record_into(spans)

    def settle(self, spans: Spans) -> Sequence[Span]:
        """The spans of work that has ended, with their times."""
        return [] if self._lost is not None else [span.settled() for span in spans]

    def timed_on_host(self, name: str) -> AbstractContextManager[None]:
        """`timed`, for a kernel that is not launched."""
        return _UNTIMED if self._spans is None else HostSpan(name, self._spans)

    def timed(self, stream: CudaStream, name: str, nbytes: int = 0, role: str = "") -> AbstractContextManager[None]:
        """Record begin and end of the work that is given to `stream` inside the block, if spans are recorded.

        Timelines show the work on the stream of that `role`, or else on its own.
        """
        if self._spans is None:
            return _UNTIMED
        self.launched += 2  # its two events take as much of the stream's queue as kernels
        return PendingSpan(self._clock, stream, name, role or self._roles[stream], nbytes, self._spans)


def _is_on_loop() -> bool:
    return asyncio._get_running_loop() is not None


_UNTIMED = nullcontext()
