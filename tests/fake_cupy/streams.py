"""`cupy.cuda.Device`, `Stream` and `Event`, and which of them are current: a matter of each thread."""

from __future__ import annotations

import threading
from typing import Any, ClassVar

from tests.fake_cupy import graphs
from tests.fake_cupy.graphs import Graph
from tests.fake_cupy.runtime import Runtime


class ThreadStreams(threading.local):
    """The current streams of one thread, a device each, as in `cupy/cuda/stream.pyx`."""

    def __init__(self, devices: int, null: Stream) -> None:
        self.current: list[Stream] = [null] * devices
        self.stacks: list[list[Stream]] = [[null] for _ in range(devices)]
        self.entered: list[int] = []


class ThreadDevices(threading.local):
    """The devices to go back to, of one thread."""

    def __init__(self) -> None:
        self.stack: list[int] = []


class Device:
    """A device by its ordinal; without one, the current device."""

    _runtime: ClassVar[Runtime]
    _devices: ClassVar[ThreadDevices]

    def __init__(self, device: int | Device | None = None) -> None:
        self.id = self._runtime.getDevice() if device is None else int(device)

    def __enter__(self) -> Device:
        previous = self._runtime.getDevice()
        self._devices.stack.append(previous)
        if previous != self.id:
            self._runtime.setDevice(self.id)
        return self

    def __exit__(self, *_: object) -> None:
        self._runtime.setDevice(self._devices.stack.pop())

    def __int__(self) -> int:
        return self.id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and other.id == self.id

    def __hash__(self) -> int:
        return self.id

    def __repr__(self) -> str:
        return f"<CUDA Device {self.id}>"

    def use(self) -> Device:
        self._runtime.setDevice(self.id)
        return self

    def synchronize(self) -> None:
        with self:
            self._runtime.deviceSynchronize()

    @property
    def mem_info(self) -> tuple[int, int]:
        with self:
            return self._runtime.memGetInfo()

    @property
    def compute_capability(self) -> str:
        return "90"

    @property
    def pci_bus_id(self) -> str:
        return self._runtime.deviceGetPCIBusId(self.id)


class Event:
    """A CUDA event, of the device current when it is made."""

    _runtime: ClassVar[Runtime]
    _streams: ClassVar[ThreadStreams]

    def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
        self.ptr = 0
        if interprocess and not disable_timing:
            raise ValueError("Timing must be disabled for interprocess events")
        self.ptr = self._runtime.eventCreateWithFlags(block * 1 | disable_timing * 2 | interprocess * 4)

    def __del__(self) -> None:
        if self.ptr:
            self._runtime.eventDestroy(self.ptr)

    @property
    def done(self) -> bool:
        """False also after an error, as in CuPy: ask `runtime.eventQuery` instead."""
        return self._runtime.eventQuery(self.ptr) == 0

    def record(self, stream: Stream | None = None) -> None:
        if stream is None:
            stream = self._streams.current[self._runtime.getDevice()]
        self._runtime.eventRecord(self.ptr, stream.ptr)

    def synchronize(self) -> None:
        self._runtime.eventSynchronize(self.ptr)


class Stream:
    """A CUDA stream of the device current when it is made; `null` is that of every device."""

    _runtime: ClassVar[Runtime]
    _streams: ClassVar[ThreadStreams]
    _event: ClassVar[type[Event]]
    null: ClassVar[Stream]

    def __init__(
        self, null: bool = False, non_blocking: bool = False, ptds: bool = False, priority: int | None = None
    ) -> None:
        self.ptr = 0
        self.device_id = -1
        if ptds:
            raise NotImplementedError("the fake has no per-thread default stream")
        if not null:
            self.device_id = self._runtime.getDevice()
            self.ptr = self._runtime.streamCreateWithFlags(int(non_blocking))

    def __del__(self) -> None:
        if self.ptr:
            self._runtime.streamDestroy(self.ptr)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.ptr == self.ptr

    def __hash__(self) -> int:
        return self.ptr

    def __repr__(self) -> str:
        return f"<Stream {self.ptr} (device {self.device_id})>"

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.ptr)

    def _device(self) -> int:
        current = self._runtime.getDevice()
        if self.device_id not in (-1, current):
            raise RuntimeError(
                f"The device that the stream is created on ({self.device_id})"
                f" does not match with the current device ({current})"
            )
        return current

    def __enter__(self) -> Stream:
        device = self._device()
        self._streams.stacks[device].append(self)
        self._streams.entered.append(device)
        self._streams.current[device] = self
        return self

    def __exit__(self, *_: object) -> None:
        device = self._streams.entered.pop()
        self._streams.stacks[device].pop()
        self._streams.current[device] = self._streams.stacks[device][-1]

    def use(self) -> Stream:
        self._streams.current[self._device()] = self
        return self

    @property
    def done(self) -> bool:
        return self._runtime.streamQuery(self.ptr) == 0

    @property
    def is_non_blocking(self) -> bool:
        return bool(self._runtime.streamGetFlags(self.ptr) & 1)

    def synchronize(self) -> None:
        self._runtime.streamSynchronize(self.ptr)

    def record(self, event: Event | None = None) -> Event:
        if event is None:
            event = self._event()
        self._runtime.eventRecord(event.ptr, self.ptr)
        return event

    def wait_event(self, event: Event) -> None:
        self._runtime.streamWaitEvent(self.ptr, event.ptr)

    def begin_capture(self, mode: int | None = None) -> None:
        if self.ptr in (0, 1):
            raise RuntimeError("cannot capture on the default (legacy) stream")
        if mode not in (None, self._runtime.streamCaptureModeRelaxed):
            raise NotImplementedError("the fake captures in relaxed mode")
        engine = self._runtime._engine
        engine.enter("streamBeginCapture", self.device_id)
        graphs.begin(engine, engine.queue(self.ptr, self.device_id))

    def end_capture(self) -> Graph:
        engine = self._runtime._engine
        captured = graphs.end(engine, engine.queue(self.ptr, self.device_id))
        engine.enter("graphInstantiate", self.device_id)
        streams, runtime = self._streams, self._runtime
        return Graph(engine, captured, lambda: streams.current[runtime.getDevice()])

    def is_capturing(self) -> bool:
        return self._runtime.streamIsCapturing(self.ptr)


def stream_classes(runtime: Runtime) -> tuple[type[Device], type[Stream], type[Event], ThreadStreams]:
    """The classes of one fake, which find its runtime by themselves."""
    shared: dict[str, Any] = {"_runtime": runtime}
    device: type[Device] = type("Device", (Device,), {**shared, "_devices": ThreadDevices()})
    event: type[Event] = type("Event", (Event,), shared)
    stream: type[Stream] = type("Stream", (Stream,), {**shared, "_event": event})
    stream.null = stream(null=True)
    streams = ThreadStreams(runtime.getDeviceCount(), stream.null)
    event._streams = stream._streams = streams
    return device, stream, event, streams
