"""A simulated device: NumPy's results on virtual time.

A kernel is computed at once, when it is launched; a cost model tells *when it would have run*. The model covers the
speed of the card and its links (`asyncflow.devices.figures.presets`), the order of its streams, and the events between
them. It also covers the thread of the host (`asyncflow.devices.figures.host`), which takes a while for each launch and
drives all devices, one after another. No result is visible before its time: only events tell the host of it.

It is used like a CUDA device, as the machine's ``launches`` says. It runs regions with fused chains in them, one node
at a time, or regions that become CUDA graphs. Each call of the host there is one call here.

It has the hazards of a CUDA device and finds them (`HazardError`): values are ordered by events alone, and freed memory
goes back to its stream's pool with no event. So a program that works here without a hazard waits for the right events
there.

===================  ===========================================================================================
kernel               host, then its compute stream: ``max(kernel_s, flops / rate, bytes / bandwidth)``
kernel on the host   host: numbers whose inputs are there, views, references that state hands out
feed                 host, then ``h2d`` over the card's host link, after all that compute has been given
fetch                host, then ``d2h`` over the card's host link, after what wrote the value; then the host again
receive              host, then ``peer`` over the peer link; or ``d2h`` there and ``h2d`` here, with no peer link
===================  ===========================================================================================

A CPU on virtual time is the same thing with the host's memory: its copies in and out take no time, and a call of NumPy
is part of its kernel. Its regions have no fused chains, and do not become CUDA graphs.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Literal, TypeGuard

import numpy as np

from asyncflow.devices.captures import free_graphs
from asyncflow.devices.figures.presets import kernel_ns
from asyncflow.devices.memory import spill_advice
from asyncflow.devices.protocol import Deliver, Device, KernelInfo, Mark, Placed
from asyncflow.devices.saved.saved_handle import Space
from asyncflow.devices.sim.launch import SimHostLauncher
from asyncflow.devices.sim.links import CopyLane, first_common_gap
from asyncflow.devices.sim.machine import SimMachine
from asyncflow.devices.sim.regions import SimRegionLauncher
from asyncflow.devices.sim.repeated import sim_launcher
from asyncflow.devices.sim.swapping import SimSwapping
from asyncflow.devices.sim.timeline import Timeline
from asyncflow.devices.sim.values import (
    SMALL_BYTES,
    SimArray,
    SimMemoryAccount,
    SimOpaque,
    SimUnknown,
    Storage,
    missing_data,
)
from asyncflow.devices.values import DeviceValue, DType, as_scalar, stays_on_host
from asyncflow.streams.sim.stream import SimEvent, SimStream
from asyncflow.values import Array, Kernel, Value

_NS_PER_S = 1e9

IN_ORDER_BYTES = 4096
"""Size of the largest value that is copied on the compute stream; see `SMALL_BYTES` of a CUDA device's copies."""

_FARTHEST_AHEAD_NS = 1_000_000
"""Nanoseconds that the host may be ahead of the clock before launching has to pause."""


class SimDevice(Timeline):
    """One simulated device of a session: ``sim:<index>``, card `index` of the machine, or ``cpu:<index>``.

    Its streams and memory are its own, as if no other session used the card; links and the host are shared by all.

    Attributes (more in `Timeline`):
        state_events: the last work of each compute stream that wrote state.
    """

    def __init__(
        self,
        machine: SimMachine,
        index: int = 0,
        *,
        kind: Literal["sim", "cpu"] = "sim",
        memory_limit: int | None = None,
        compute_streams: int = 1,
        host: Space | None = None,
        spills: bool = False,
    ) -> None:
        """Open the device.

        Args:
            machine: it is one of.
            index: number of the device within its kind.
            kind: a card, or a CPU of the host.
            memory_limit: bytes; None for the memory of the card, or no limit.
            compute_streams: for kernels.
            host: where saved values of a card go; None for as much memory as they take.
            spills: beyond that, values go to the host's disk; so do values of a CPU with a limit.

        Raises:
            ValueError: `memory_limit` or `compute_streams` is no positive int.
        """
        super().__init__(machine, index, kind, compute_streams)
        limit = self.card.memory_bytes if memory_limit is None and kind == "sim" else memory_limit
        self.memory = SimMemoryAccount(self.name, limit)
        self.memory.make_room = self._make_room
        self.state_events: dict[SimStream, SimEvent] = {}
        if kind == "sim" or limit is not None:
            self._move_saved([host or Space("host")] if kind == "sim" else [], spills=spills)
        # A card with one copy engine copies in one direction at a time: both directions share a lane.
        into, out = CopyLane(f"{self.name} in"), CopyLane(f"{self.name} out")
        self._engine_in, self._engine_out = (into, out) if self.card.copy_engines > 1 else (into, into)

    def _move_saved(self, spaces: list[Space], *, spills: bool) -> None:
        """Let saved values go to these places, and, if it `spills`, to the host's disk when they are full."""
        if spills:
            spaces.append(Space("disk"))
            disk = SimStream(f"{self.name}/disk", self.machine.host)
            self._streams = {**self._streams, "disk": disk}
            self._roles[disk] = "disk"
        if spaces:
            spec = self.machine.spec
            rate = spec.host_link.bytes_per_s if self._is_card else spec.disk_bytes_per_s
            self.swapping = SimSwapping(self, spaces, ns_per_byte=_NS_PER_S / rate)
        self.memory.advise = spill_advice if self.swapping is None else self.swapping.advice

    @property
    def store_xp(self) -> ModuleType:
        """A namespace that notes kernels on a card; NumPy on a CPU, whose kernels have their time by the node."""
        return self.machine.noting if self._is_card else self.xp

    def __repr__(self) -> str:
        return f"<SimDevice {self.name}, {self.card.name}>"

    def _make_room(self, nbytes: float) -> bool:
        """Free up to `nbytes` of leaving values, or held for other streams, or by graphs that can be made again.

        Returns True if any were freed.
        """
        before = self.memory.used
        with self.memory.at_once():
            if isinstance(self.swapping, SimSwapping):
                self.swapping.leave_early(nbytes)
        has_freed = self.memory.used < before
        missing = nbytes - before + self.memory.used
        if missing > 0:
            has_freed |= self.hand_over(missing)
        graphs = [cache for cache, memory in self.machine.graphs.items() if memory is self.memory]
        with self.memory.at_once():  # otherwise freed bytes would count only when the running kernel ends
            has_freed |= free_graphs(graphs, lambda: self.memory.has_room(nbytes))
        return has_freed

    # -- as a `LogicalDevice` ------------------------------------------------------------------------------------

    @property
    def what(self) -> str:
        """Name of the simulated card."""
        return f"simulated {self.card.name}"

    def check_event_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Raise unless the time of `loop` is the machine's: on another, nothing would ever be done.

        Raises:
            RuntimeError: it is not.
        """
        if self.machine.loop is not loop:
            raise RuntimeError(
                f"device {self.name} is simulated, and this event loop ({type(loop).__module__}."
                f"{type(loop).__qualname__}) is not on its virtual time; start the program's coroutine by "
                "clock.run(main()) inside `with virtual_clock() as clock`, and by asyncio.run(main()) or "
                "af.run(main()) under `asyncflow simulate`"
            )

    def kernel_ns(self, flops: float, nbytes: float) -> float:
        """The time of a kernel of float32 operations on its stream, without jitter."""
        return kernel_ns(self.card, flops, nbytes)

    def transfer_ns(self, nbytes: float, target: Device) -> float:
        """The time of the copies that bring a value to `target`, without jitter and without others in their way."""
        if target is self:
            return 0.0
        peer = self.machine.spec.peer_link
        if peer is not None and isinstance(target, SimDevice) and self._is_card and target._is_card:
            return (peer.latency_s + nbytes / peer.bytes_per_s) * _NS_PER_S
        there = target._host_copy_s(nbytes) if isinstance(target, SimDevice) else 0.0
        return (self._host_copy_s(nbytes) + there) * _NS_PER_S

    async def aclose(self, grace_s: float) -> bool:
        """Refuse further work and wait up to ``grace_s`` seconds of virtual time for present work. Idempotent.

        Cancellation: the streams stay closed.
        """
        have_ended = await super().aclose(grace_s)
        if have_ended:
            self.machine.host.forget(self._streams.values())
        return have_ended

    # -- as a `LaunchingDevice` ----------------------------------------------------------------------------------

    def bind_region(self, function: Kernel, info: KernelInfo, *, is_generator: bool) -> Kernel:
        """A function that runs a region's on device values; see `SimRegionLauncher`."""
        return SimRegionLauncher(self, function, info, is_generator=is_generator)

    def bind(self, kernel: Kernel, info: KernelInfo) -> Kernel:
        """A function that launches `kernel` on device values and host values; see `SimLauncher`.

        Scalars of launched kernels are device values too. Arrays that the kernel returns are the device's to overwrite
        once they are freed, unless ``info.keeps_arrays``.
        """
        return SimHostLauncher(self, kernel, info) if info.is_async else sim_launcher(self, kernel, info)

    def constant(self, value: Placed) -> Placed:
        """Return a device value that exists from the start; numbers and anything but arrays stay host values.

        Raises:
            MemoryLimitExceeded: it does not fit.
        """
        if self.leaves_on_host(value):
            return as_scalar(value)
        origin = self.compute.origin("constant")
        storage = Storage(self, self.compute, origin, value.nbytes, None)
        data = None if self.machine.shapes_only and value.nbytes > SMALL_BYTES else value
        return SimArray(data, value.dtype, value.shape, storage, origin, "constant")

    def feed(self, value: Value, deliver: Deliver) -> None:
        """Copy a host value in and deliver the copy at once; numbers and anything but arrays stay host values."""
        try:
            copied = self.copy_in(value)
        except Exception as error:  # out of memory, or a data hazard
            deliver(None, error)
        else:
            deliver(copied, None)

    def copy_in(self, value: Placed, name: str = "feed") -> Placed:
        """Return a copy of a host value on the device; numbers and anything but arrays stay host values.

        Raises:
            MemoryLimitExceeded: it does not fit.
            HazardError: memory was freed too early, since the last call.
        """
        self.machine.check()
        if self.leaves_on_host(value):
            return as_scalar(value)
        has_data = type(value) is not SimUnknown and not (self.machine.shapes_only and value.nbytes > SMALL_BYTES)
        data = value.copy() if has_data else None
        # Check before the copy is on a stream: `Storage` would refuse it only after it occupied the link.
        self.memory.check(value.nbytes, name)
        stream = self.compute if self._is_in_order(value.nbytes, self.h2d) else self.h2d
        return self.copied_in(data, value.dtype, value.shape, name, after=None, stream=stream)

    def copy_to_host(self, value: SimArray, deliver: Deliver) -> None:
        """Copy an array to the host: at the copy's end, ``deliver(array, error)`` is called once.

        In a simulation of shapes, an array without data arrives as a read-only array of NaN (0 for integers) that takes
        no memory.

        Raises:
            HazardError: memory was freed too early, since the last call.
        """
        self.machine.check()
        is_last = value.written.stream in self.compute_streams and not value.followers
        stream = value.written.stream if is_last and self._is_in_order(value.nbytes, self.d2h) else self.d2h
        self.when_over(self.copy_out(value, stream=stream), self._told, _deliver_copy, value, deliver)

    def copy_state_out(self, nbytes: int, name: str, deliver: Deliver) -> None:
        """Take the time of a copy of so much state to the host, behind all that has written state by now."""
        self.order(self.d2h, self.state_events.values())
        lanes = (self._engine_out, self.machine.lane(f"{self.name} to host"))
        event = self._copy(self.d2h, lanes, self._host_copy_s(nbytes), nbytes, name)
        self.when_over(event, self._told, deliver, None, None)

    def tell_host(self, value: SimOpaque, deliver: Deliver) -> None:
        """Deliver an object that is no array once the work that made it is done.

        Raises:
            HazardError: memory was freed too early, since the last call.
        """
        self.machine.check()
        self.order(self.d2h, value.events)
        self.when_over(self.d2h.launch(0, self.thread.spend("node")), self._told, deliver, value.value, None)

    def send(self) -> int:
        """Return the time at which a message sent now to another device is on its way: once the host gets to it."""
        return self.thread.spend("node")

    def receive(self, value: Value, source: Device, deliver: Deliver, sent_ns: int | None = None) -> None:
        """Take over a value of `source`: ``deliver(value_here, error)`` is called once.

        An array is delivered at once, and has its event; the memory on both sides stays until the copy is done. A host
        value comes as a message, sent at `sent_ns` (None: when the source's host has made it).
        """
        if not isinstance(value, SimArray):
            if sent_ns is None:
                sent_ns = source.dispatched_ns if isinstance(source, SimDevice) else self.machine.now_ns()
            self._deliver_message(value, sent_ns, deliver)
            return
        if self._is_card and not value.shape and isinstance(source, SimDevice) and not source._is_card:
            # The compiler relies on it: on a real CPU, the number would already be on the host.
            source.read_value(value, partial(self._take_number, deliver))
            return
        try:
            self.machine.check()
            self.memory.check(value.nbytes, value.name)
            received = self._received(value, source)
        except Exception as error:  # errors of either side go to the receiver
            deliver(None, error)
            return
        deliver(received, None)

    def read_value(self, value: DeviceValue, deliver: Deliver) -> None:
        """Copy a value to the host for a kernel that reads it there: a `SimUnknown` for a value without data."""
        if isinstance(value, SimArray) and value.data is None:
            unknown = SimUnknown(value.dtype, value.shape, value.name)
            self.copy_to_host(value, lambda _, error: deliver(None if error else unknown, error))
        elif isinstance(value, SimUnknown):
            deliver(value, None)
        else:
            value.to_host(deliver)

    def require_data(self, value: Value, name: str) -> None:
        """Raise unless Python can look at `value`, which the node `name` needs.

        Raises:
            FetchError: it is an array of a simulation of shapes, and has none.
        """
        if _lacks(value):
            raise missing_data(value.name, repr(name))

    def assume_decision(self, value: Value, name: str, iteration: int) -> Value | None:
        """Return the decision of the loop's condition `name`, if that has no data and the machine assumes a number of
        iterations; None if `value` holds it.

        Raises:
            FetchError: it has no data, and the machine assumes nothing.
        """
        if not _lacks(value):
            return None
        if self.machine.iterations is None:
            raise missing_data(value.name, repr(name), "say how often such loops run: iterations=, or --iterations")
        return np.bool_(iteration < self.machine.iterations)

    def throttle(self, resume: Callable[[], None]) -> bool:
        """Return True if launching must pause, as the host is far ahead of the clock; then call ``resume()``."""
        ahead_ns = self.dispatched_ns - self.machine.now_ns()
        if ahead_ns < _FARTHEST_AHEAD_NS:
            return False
        # Resume at half of the lead, so that a loop launches a batch of kernels each time, not one per pause.
        self.machine.loop.call_at_ns(self.dispatched_ns - _FARTHEST_AHEAD_NS // 2, resume)
        return True

    def mark(self) -> Mark:
        """The point up to which work is launched now."""
        return self.dispatched_ns, [stream.end() for stream in self._streams.values()]

    def when_done(
        self, done: Callable[[BaseException | None], None], mark: Mark = None, *, elsewhere: bool = False
    ) -> None:
        """Call ``done(None)`` once, never before this returns, when all work launched up to `mark` has ended.

        With `elsewhere`, later by the time of a message.

        Raises:
            HazardError: memory was freed too early, since the last call.
        """
        self.machine.check()
        dispatched_ns, ends = self.mark() if mark is None else mark
        last_ns = max(dispatched_ns, *(end.time_ns for end in ends))
        if elsewhere:
            last_ns += self._message_ns

        def observe() -> None:
            # From here on the host may read values written by the streams, and freed memory counts as free.
            for end in ends:
                self.machine.host.observe(end)
            self._told(done, None)

        self.machine.loop.call_at_ns(max(last_ns, self.machine.now_ns()), observe)

    # -- copies --------------------------------------------------------------------------------------------------

    def _host_copy_s(self, nbytes: float) -> float:
        link = self.machine.spec.host_link
        return link.latency_s + nbytes / link.bytes_per_s if self._is_card else 0.0

    def leaves_on_host(self, value: Placed) -> bool:
        """Return True if the device leaves a host value on the host: anything but arrays, and numbers of rank 0.

        A CPU on virtual time whose kernels are called node by node takes numbers with a fraction all the same.
        """
        leaves_numbers = self.capabilities.leaves_numbers
        if type(value) is SimUnknown:
            return not value.shape and (leaves_numbers or value.dtype.kind in "biu")
        return stays_on_host(value) or (leaves_numbers and np.ndim(value) == 0)

    def copy_out(self, value: SimArray, *others: SimArray, stream: SimStream | None = None) -> SimEvent:
        """Copy arrays to the host, on ``d2h`` or another stream, by one copy."""
        stream = stream or self.d2h
        values = value, *others
        for each in values:
            self._pack(each)
            self.order(stream, (each.written,))
        self.settle_on(stream, value)  # one event for all: the newest writer's event follows the others
        lanes = (self._engine_out, self.machine.lane(f"{self.name} to host"))
        nbytes = sum(each.nbytes for each in values)
        if others:
            self.thread.spend("part", len(others))
        event = self._copy(stream, lanes, self._host_copy_s(nbytes), nbytes, value.name, role="d2h")
        for each in values:
            self._read(each, event)
        return event

    def copied_in(
        self,
        data: Array | None,
        dtype: DType,
        shape: tuple[int, ...],
        name: str,
        after: SimEvent | None,
        call: Literal["copy", "transfer"] = "copy",
        stream: SimStream | None = None,
        parts: int = 1,
    ) -> SimArray:
        """An array of the host on the device, copied on ``h2d`` or `stream`; `call` is what the host does for it.

        It may consist of the `parts` of several saved values.
        """
        stream = stream or self.h2d
        self._own_memory(stream)
        if after is not None:
            self.order(stream, (after,))
        nbytes = math.prod(shape) * dtype.itemsize
        if parts > 1:
            self.thread.spend("part", parts - 1)
        lanes = (self._engine_in, self.machine.lane(f"host to {self.name}"))
        event = self._copy(stream, lanes, self._host_copy_s(nbytes), nbytes, name, call, "h2d")
        return self._filled(data, dtype, shape, event, name)

    def through_disk(self, nbytes: int, name: str, after: SimEvent | None = None) -> SimEvent:
        """Write `nbytes` of the host's memory to the disk, which all devices share, or read them."""
        disk = self._streams["disk"]
        if after is not None:
            self.order(disk, (after,))
        seconds = nbytes / self.machine.spec.disk_bytes_per_s
        return self._copy(disk, (self.machine.lane("disk"),), seconds, nbytes, name)

    def _received(self, value: SimArray, source: Device) -> SimArray:
        """An array of another device, here."""
        machine = self.machine
        assert isinstance(source, SimDevice), "every device of a machine is simulated"
        data = None if value.data is None else value.data.copy()
        link = machine.spec.peer_link
        if link is None or not (self._is_card and source._is_card):
            out = source.copy_out(value)
            # The second copy counts as the transfer between devices: it has its event, memory and message.
            return self.copied_in(data, value.dtype, value.shape, value.name, out, "transfer")
        source._pack(value)
        self._own_memory(self.peer)
        self.settle_on(self.peer, value)
        self.order(self.peer, (value.written,))
        lanes = (self._engine_in, machine.lane(f"{source.name} to {self.name}"))
        seconds = link.latency_s + value.nbytes / link.bytes_per_s
        event = self._copy(self.peer, lanes, seconds, value.nbytes, value.name, "transfer")
        source._read(value, event)
        return self._filled(data, value.dtype, value.shape, event, value.name)

    def _pack(self, value: SimArray) -> None:
        """Launch the copy of an array with gaps to C order, as copies between memories need it."""
        data = value.data
        if self._is_card and isinstance(data, np.ndarray) and not data.flags.c_contiguous:
            self.settle_on(self.compute, value)
            self.order(self.compute, (value.written,))
            # The bytes are read and written. Readers now wait for this event, even on streams that waited for the
            # former writer: `followers` starts anew.
            event = self.launch_kernel(self.compute, 0.0, 2 * value.nbytes, False, value.name, fired=False)
            value.storage.read_by(event)
            value.written = event
            value.followers = ()

    def _own_memory(self, stream: SimStream) -> None:
        """Let `stream` write to memory allocated now: compute, for which it is allocated, may still be using it."""
        end = self.compute.end()
        if stream is not self.compute and not self.machine.host.has_seen(end):
            self.thread.spend("event")
            stream.wait(end)

    def _is_in_order(self, nbytes: int, usual: SimStream) -> bool:
        """Return True if a CUDA device would copy a value in the order of its kernels, not on the `usual` stream."""
        is_small = self._is_card and nbytes <= IN_ORDER_BYTES and len(self.compute_streams) == 1
        return is_small and not usual.pending

    def _copy(
        self,
        stream: SimStream,
        lanes: Sequence[CopyLane],
        seconds: float,
        nbytes: int,
        name: str,
        call: Literal["copy", "transfer"] = "copy",
        role: str = "",
    ) -> SimEvent:
        duration_ns = self.machine.duration_ns(seconds)
        ready_ns = stream.ready_ns(self.thread.spend(call))
        self.memory.requests.copies += 1
        event = stream.launch(duration_ns, first_common_gap(lanes, ready_ns, duration_ns), name)
        for lane in lanes:
            lane.occupy(event.started_ns, event.time_ns, self.machine.now_ns())
        self._record(event, nbytes, role)
        return event

    def _read(self, value: SimArray, event: SimEvent) -> None:
        """Note that a copy reads the array, and keep that until the copy is done."""
        self.machine.check_read(event.stream, value, event.label)
        value.storage.read_by(event)
        self.hold(event, (value.storage,))

    def _filled(self, data: Array | None, dtype: DType, shape: tuple[int, ...], event: SimEvent, name: str) -> SimArray:
        """New memory on the device that a copy fills."""
        nbytes = math.prod(shape) * dtype.itemsize
        storage = Storage(self, self.compute, event, nbytes, data if isinstance(data, np.ndarray) else None)
        # The last array of this memory may die before the copy that fills it ends: until then `landing` keeps it.
        self.machine.landing[event] = storage
        self.when_over(event, self.machine.landing.pop, event, None)
        if self.machine.shapes_only and nbytes > SMALL_BYTES:
            data = storage.array = None
        return SimArray(data, dtype, shape, storage, event, name)

    # -- time ----------------------------------------------------------------------------------------------------

    @property
    def _message_ns(self) -> int:
        return round(self.machine.spec.message_s * _NS_PER_S)

    def _deliver_message(self, value: Value, sent_ns: int, deliver: Deliver) -> None:
        due_ns = sent_ns
        # A Python object is sent as a message of size 0, once the work behind its arrays is done.
        if isinstance(value, SimOpaque):
            due_ns = max(due_ns, *(event.time_ns for event in value.events))
            value = value.value
        self._call_at(due_ns + self._message_ns, self._take_message, value, deliver)

    def _take_number(self, deliver: Deliver, value: Value, error: BaseException | None) -> None:
        if error is None:
            self._deliver_message(value, self.machine.now_ns(), deliver)
        else:
            deliver(None, error)

    def _take_message(self, value: Value, deliver: Deliver) -> None:
        self._call_at(self.thread.spend("node"), deliver, value, None)


def _deliver_copy(value: SimArray, deliver: Deliver) -> None:
    deliver(value.stand_in() if value.data is None else value.data.copy(), None)


def _lacks(value: Value) -> TypeGuard[SimUnknown | SimArray]:
    """Return True for a value of a simulation of shapes that has no data."""
    return isinstance(value, SimUnknown) or (isinstance(value, SimArray) and value.data is None)
