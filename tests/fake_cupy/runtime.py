"""`cupy.cuda.runtime`: the functions of the CUDA runtime over the engine and the memory map."""

# ruff: noqa: N815 - the constants have the names of CUDA

from __future__ import annotations

import ctypes
import threading
from typing import Any, NamedTuple

from tests.fake_cupy.engine import Engine, Item, Kind, Queue
from tests.fake_cupy.errors import CUDARuntimeError
from tests.fake_cupy.memory_map import MemoryMap

NOT_READY = 600


class EventState:
    """A CUDA event: the last point it was recorded at."""

    def __init__(self, device: int, flags: int) -> None:
        self.device = device
        self.flags = flags
        self.mark: Item | None = None
        self.is_captured = False

    @property
    def done(self) -> bool:
        return self.mark is None or self.mark.done


class PointerAttributes(NamedTuple):
    """Attributes of an address that CUDA knows."""

    device: int
    devicePointer: int
    hostPointer: int
    type: int


class Runtime:
    """The fake of `cupy.cuda.runtime`, with its names, arguments and errors.

    Calls that block their thread are logged. Destructors (`eventDestroy`, `streamDestroy`, `free`, `freeHost`) stay
    silent on a lost device, where real ones print "Exception ignored".
    """

    CUDARuntimeError = CUDARuntimeError
    is_hip = False
    memcpyHostToHost, memcpyHostToDevice, memcpyDeviceToHost, memcpyDeviceToDevice, memcpyDefault = range(5)
    eventDefault, eventBlockingSync, eventDisableTiming, eventInterprocess = 0, 1, 2, 4
    streamDefault, streamNonBlocking = 0, 1
    streamLegacy, streamPerThread = 1, 2
    streamCaptureModeGlobal, streamCaptureModeThreadLocal, streamCaptureModeRelaxed = range(3)
    hostAllocDefault, hostAllocPortable, hostAllocMapped, hostAllocWriteCombined = 0, 1, 2, 4
    memoryTypeUnregistered, memoryTypeHost, memoryTypeDevice, memoryTypeManaged = range(4)
    cudaDevAttrMultiProcessorCount, cudaDevAttrAsyncEngineCount = 16, 40

    def __init__(self, engine: Engine, memory: MemoryMap, *, peers: bool, name: str) -> None:
        self._engine = engine
        self._memory = memory
        self._peers = peers
        self._name = name
        self._local = threading.local()
        self._events: dict[int, EventState] = {}
        self._peer_access: set[tuple[int, int]] = set()
        # `cudaFree` waits for the device; here the memory waits instead, so that a destructor never blocks.
        self._reclaim = [Queue(-1 - device, device, blocking=False) for device in range(engine.devices)]
        for queue in self._reclaim:
            engine._queues[queue.ptr] = queue

    # Devices

    def getDeviceCount(self) -> int:
        return self._engine.devices

    def getDevice(self) -> int:
        return int(getattr(self._local, "device", 0))

    def setDevice(self, device: int) -> None:
        if not 0 <= device < self._engine.devices:
            raise CUDARuntimeError(101)
        self._local.device = device

    def driverGetVersion(self) -> int:
        return 13000

    def runtimeGetVersion(self) -> int:
        return 13020

    def memGetInfo(self) -> tuple[int, int]:
        self._enter("memGetInfo")
        region = self._memory.regions[self.getDevice()]
        return region.free_bytes, region.nbytes

    def getDeviceProperties(self, device: int) -> dict[str, Any]:
        if not 0 <= device < self._engine.devices:
            raise CUDARuntimeError(101)
        return {
            "name": self._name.encode(),
            "totalGlobalMem": self._memory.regions[device].nbytes,
            "major": 9,
            "minor": 0,
            "multiProcessorCount": 4,
            "clockRate": 1_000_000,
            "memoryClockRate": 1_000_000,
            "memoryBusWidth": 512,
            "asyncEngineCount": 3,
            "warpSize": 32,
            "maxThreadsPerBlock": 1024,
            "concurrentKernels": 1,
            "integrated": 0,
            "pciBusID": device + 1,
        }

    def deviceGetAttribute(self, attrib: int, device: int) -> int:
        known = {self.cudaDevAttrMultiProcessorCount: 4, self.cudaDevAttrAsyncEngineCount: 3, 75: 9, 76: 0}
        if attrib not in known:
            raise NotImplementedError(f"the fake knows no device attribute {attrib}; add it to runtime.py")
        return known[attrib]

    def deviceGetPCIBusId(self, device: int) -> str:
        return f"0000:{device + 1:02X}:00.0"

    def deviceSynchronize(self) -> None:
        device = self.getDevice()
        self._enter("deviceSynchronize")
        queues = [queue for queue in self._engine.all_queues() if queue.device == device]
        self._engine.block("deviceSynchronize", lambda: all(queue.idle for queue in queues), device)

    def deviceCanAccessPeer(self, device: int, peerDevice: int) -> int:
        return int(self._peers and device != peerDevice)

    def deviceEnablePeerAccess(self, peerDevice: int) -> None:
        device = self.getDevice()
        self._enter("deviceEnablePeerAccess")
        if peerDevice == device or not 0 <= peerDevice < self._engine.devices:
            raise CUDARuntimeError(101)
        if not self._peers:
            raise CUDARuntimeError(217)
        if (device, peerDevice) in self._peer_access:
            raise CUDARuntimeError(704)
        self._peer_access.add((device, peerDevice))

    def deviceDisablePeerAccess(self, peerDevice: int) -> None:
        if (self.getDevice(), peerDevice) not in self._peer_access:
            raise CUDARuntimeError(705)
        self._peer_access.remove((self.getDevice(), peerDevice))

    # Streams

    def streamCreate(self) -> int:
        return self.streamCreateWithFlags(self.streamDefault)

    def streamCreateWithFlags(self, flags: int) -> int:
        self._enter("streamCreateWithFlags")
        return self._engine.create_queue(self.getDevice(), blocking=not flags & self.streamNonBlocking)

    def streamCreateWithPriority(self, flags: int, priority: int) -> int:
        return self.streamCreateWithFlags(flags)

    def streamDestroy(self, stream: int) -> None:
        self._engine.destroy_queue(stream)

    def streamGetFlags(self, stream: int) -> int:
        return self.streamDefault if self._queue(stream).blocking else self.streamNonBlocking

    def streamQuery(self, stream: int) -> int:
        queue = self._queue(stream)
        if queue.capture is not None:
            return queue.capture.break_with(900).status
        code = self._status("streamQuery", queue.device)
        return code or (0 if queue.idle else NOT_READY)

    def streamSynchronize(self, stream: int) -> None:
        queue = self._queue(stream)
        self._enter("streamSynchronize", queue.device)
        if queue.capture is not None:
            raise queue.capture.break_with(900)
        self._engine.block("streamSynchronize", lambda: queue.idle, queue.device)

    def streamWaitEvent(self, stream: int, event: int, flags: int = 0) -> None:
        queue = self._queue(stream)
        self._enter("streamWaitEvent", queue.device)
        state = self._event(event)
        if state.is_captured:
            raise NotImplementedError("the fake has no captures of several streams")
        if queue.capture is not None:
            raise queue.capture.break_with(905)
        mark = state.mark
        if mark is not None:
            self._engine.give(queue, "streamWaitEvent", None, (mark,), kind=Kind.MARK)

    def streamIsCapturing(self, stream: int) -> bool:
        capture = self._queue(stream).capture
        if capture is not None and capture.invalid:
            raise CUDARuntimeError(901)
        return capture is not None

    # Events

    def eventCreate(self) -> int:
        return self.eventCreateWithFlags(0)

    def eventCreateWithFlags(self, flags: int) -> int:
        self._enter("eventCreateWithFlags")
        ptr = self._engine.new_ptr()
        self._events[ptr] = EventState(self.getDevice(), flags)
        return ptr

    def eventDestroy(self, event: int) -> None:
        self._events.pop(event, None)

    def eventRecord(self, event: int, stream: int) -> None:
        queue, state = self._queue(stream), self._event(event)
        self._enter("eventRecord", queue.device)
        if state.device != queue.device:
            raise CUDARuntimeError(400)
        state.is_captured = queue.capture is not None
        state.mark = self._engine.give(queue, "eventRecord", None, kind=self._room_of(state))

    def _room_of(self, state: EventState) -> Kind:
        if state.flags & self.eventBlockingSync:
            return Kind.SLEEPER
        return Kind.MARK if state.flags & self.eventDisableTiming else Kind.WORK

    def eventQuery(self, event: int) -> int:
        """The code, not an exception: 0 done, 600 not ready, or an error."""
        state = self._event(event)
        if state.is_captured:
            return 907
        code = self._status("eventQuery", state.device)
        return code or (0 if state.done else NOT_READY)

    def eventSynchronize(self, event: int) -> None:
        state = self._event(event)
        self._enter("eventSynchronize", state.device)
        if state.is_captured:
            raise CUDARuntimeError(907)
        mark = state.mark
        self._engine.block("eventSynchronize", lambda: mark is None or mark.done, state.device)

    def eventElapsedTime(self, start: int, end: int) -> float:
        """Milliseconds between two points that were reached."""
        states = self._event(start), self._event(end)
        for state in states:
            self._enter("eventElapsedTime", state.device)
            if state.mark is None or state.flags & self.eventDisableTiming:
                raise CUDARuntimeError(400)
        first, last = states[0].mark, states[1].mark
        assert first is not None and last is not None
        if not (first.done and last.done):
            raise CUDARuntimeError(NOT_READY)
        return (last.done_ns - first.done_ns) / 1e6

    # Memory

    def malloc(self, size: int) -> int:
        device = self.getDevice()
        self._enter("malloc", device)
        self._engine.log("malloc")
        try:
            return self._memory.malloc(device, size)
        except CUDARuntimeError:
            queue = self._reclaim[device]
            if queue.idle:
                raise
        self._engine.block("malloc behind free", lambda: queue.idle, device)
        return self._memory.malloc(device, size)

    def free(self, ptr: int) -> None:
        if self._engine.closed:
            return
        device = self._memory.device_of(ptr)
        if device is None:
            raise CUDARuntimeError(1)
        self._engine.log("free")
        marks = [queue.last for queue in self._engine.all_queues() if queue.device == device]
        after = [mark for mark in marks if mark is not None]
        self._engine.give(self._reclaim[device], "free", lambda: self._memory.free(ptr), after, internal=True)

    def hostAlloc(self, size: int, flags: int) -> int:
        self._enter("hostAlloc")
        self._engine.log("hostAlloc")
        return self._memory.host_alloc(size)

    def freeHost(self, ptr: int) -> None:
        self._engine.log("freeHost")
        self._memory.host_free(ptr)

    def pointerGetAttributes(self, ptr: int) -> PointerAttributes:
        self._enter("pointerGetAttributes")
        device = self._memory.device_of(ptr)
        if device is not None:
            return PointerAttributes(device, ptr, 0, self.memoryTypeDevice)
        if self._memory.is_pinned(ptr, 1):
            return PointerAttributes(self.getDevice(), ptr, ptr, self.memoryTypeHost)
        return PointerAttributes(-1, 0, ptr, self.memoryTypeUnregistered)

    # Copies

    def memcpyAsync(self, dst: int, src: int, size: int, kind: int, stream: int) -> None:
        """Enqueue a copy; a copy of pageable host memory blocks, as on a card."""
        self._spoil_first(dst)
        self._copy("memcpyAsync", dst, src, size, kind, self._queue(stream))

    def memcpyPeerAsync(self, dst: int, dstDevice: int, src: int, srcDevice: int, size: int, stream: int) -> None:
        queue = self._queue(stream)
        if self._memory.device_of(dst) != dstDevice or self._memory.device_of(src) != srcDevice:
            raise CUDARuntimeError(1)
        self._spoil_first(dst)
        self._copy("memcpyPeerAsync", dst, src, size, self.memcpyDeviceToDevice, queue)

    def _spoil_first(self, ptr: int) -> None:
        """Do the spoiling that is due on the device of a target, whose memory may have been taken earlier."""
        device = self._memory.device_of(ptr)
        for queue in self._engine.all_queues():
            if queue.device == device:
                self._engine.do_spoiling(queue)

    def memcpy(self, dst: int, src: int, size: int, kind: int) -> None:
        """Copy through the null stream and wait for it."""
        device = self._memory.device_of(dst if kind == self.memcpyHostToDevice else src)
        queue = self._engine.queue(0, self.getDevice() if device is None else device)
        self._copy("memcpy", dst, src, size, kind, queue)
        self._engine.block("memcpy", lambda: queue.idle, queue.device)

    def memcpyPeer(self, dst: int, dstDevice: int, src: int, srcDevice: int, size: int) -> None:
        self.memcpy(dst, src, size, self.memcpyDeviceToDevice)

    def memsetAsync(self, ptr: int, value: int, size: int, stream: int) -> None:
        queue = self._queue(stream)
        self._enter("memsetAsync", queue.device)
        if not self._memory.is_live(ptr, size):
            raise CUDARuntimeError(1)
        self._engine.give(queue, "memsetAsync", lambda: self._memory.fill(ptr, value & 0xFF, size), addresses=[ptr])

    def memset(self, ptr: int, value: int, size: int) -> None:
        self.memsetAsync(ptr, value, size, 0)

    def _copy(self, name: str, dst: int, src: int, size: int, kind: int, queue: Queue) -> None:
        self._enter(name, queue.device)
        if size == 0:
            return
        ends = self._memory.device_of(src) is not None, self._memory.device_of(dst) is not None
        kinds = {1: (False, True), 2: (True, False), 3: (True, True)}
        if kinds.get(kind, ends) != ends:
            raise CUDARuntimeError(1)
        for ptr, on_device in zip((src, dst), ends, strict=True):
            if on_device and not self._memory.is_live(ptr, size):
                raise CUDARuntimeError(1)
        memory = self._memory
        if queue.capture is not None and not (ends[0] or memory.is_pinned(src, size)):
            raise queue.capture.break_with(900)
        if queue.capture is not None and not (ends[1] or memory.is_pinned(dst, size)):
            raise queue.capture.break_with(900)
        if not ends[0] and not memory.is_pinned(src, size):
            # Staged: what the host writes afterwards is not copied.
            self._engine.log(f"{name} from pageable memory")
            staged = ctypes.string_at(src, size)
            self._engine.give(queue, name, lambda: self._unstage(dst, staged))
        elif not ends[1] and not memory.is_pinned(dst, size):
            mark = self._engine.give(queue, name, lambda: memory.copy(dst, src, size, pageable=True))
            self._engine.block(f"{name} to pageable memory", lambda: mark.done, queue.device)
        else:
            self._engine.give(queue, name, lambda: memory.copy(dst, src, size), addresses=[dst, src])

    def _unstage(self, dst: int, staged: bytes) -> None:
        self._memory.fill(dst, 0, len(staged))
        ctypes.memmove(dst, staged, len(staged))

    # Checks

    def _queue(self, stream: int) -> Queue:
        return self._engine.queue(stream, self.getDevice())

    def _event(self, event: int) -> EventState:
        state = self._events.get(event)
        if state is None:
            raise CUDARuntimeError(400)
        return state

    def _enter(self, call: str, device: int | None = None) -> None:
        self._engine.enter(call, self.getDevice() if device is None else device)

    def _status(self, call: str, device: int) -> int:
        try:
            self._engine.enter(call, device)
        except CUDARuntimeError as error:
            return error.status
        return 0
