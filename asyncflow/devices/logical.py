"""The base of every kind of device: its name, its streams, how it ends, how it describes itself."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter_ns
from types import ModuleType
from typing import Any, Generic, TypeVar

import numpy as np

from asyncflow.devices.decisions import LoopCode
from asyncflow.devices.memory import MemoryAccount, format_bytes
from asyncflow.devices.names import DeviceName
from asyncflow.devices.options import positive_count
from asyncflow.devices.protocol import (
    AsynchronousDevice,
    Capabilities,
    Deliver,
    Device,
    KernelInfo,
    Placed,
    Span,
    Spans,
)
from asyncflow.devices.swapping import Swapping
from asyncflow.devices.values import DeviceValue, is_shape
from asyncflow.streams.protocol import Stream
from asyncflow.values import Kernel, Value

AnyStream = TypeVar("AnyStream", bound=Stream)

_NOTHING = nullcontext()


class LogicalDevice(Generic[AnyStream]):
    """The base of devices whose kernels give their results when they return; see `Device` for what the rest is.

    Whoever derives from it sets `memory` and the streams.

    Attributes:
        name, kind, capabilities, xp, memory, compute, compute_streams, h2d, d2h: see `Device`.
    """

    asynchronous: AsynchronousDevice | None = None
    swapping: Swapping | None = None
    xp: ModuleType = np
    memory: MemoryAccount
    threads: int = 1
    handover_ns: float = 50_000.0  # two turns of the event loop, and the waking of a thread
    compute: AnyStream
    h2d: AnyStream
    d2h: AnyStream

    def __init__(self, kind: str, index: int, capabilities: Capabilities, compute_streams: int) -> None:
        """Name the device ``<kind>:<index>``.

        Args:
            kind: the name of its kind.
            index: its number among them.
            capabilities: what it can do.
            compute_streams: how many streams of kernels it is to have.

        Raises:
            ValueError: `compute_streams` is no positive int.
        """
        self.kind = kind
        self.name = str(DeviceName(kind, index))
        self.capabilities = capabilities
        self.compute_streams: tuple[AnyStream, ...] = ()
        self._count = positive_count(compute_streams, "the number of compute streams")
        self._streams: Mapping[str, AnyStream] = {}

    def make_streams(self, make: Callable[[str], AnyStream], *others: str) -> None:
        """Make the streams, by role: those of kernels, ``h2d``, ``d2h`` and others.

        Args:
            make: gives a stream of this name.
            others: more roles.
        """
        compute = ["compute", *(f"compute:{number}" for number in range(1, self._count))]
        self._streams = {role: make(f"{self.name}/{role}") for role in (*compute, "h2d", "d2h", *others)}
        self.compute_streams = tuple(self._streams[role] for role in compute)
        self.compute = self.compute_streams[0]
        self.h2d, self.d2h = self._streams["h2d"], self._streams["d2h"]

    @property
    def streams(self) -> tuple[AnyStream, ...]:
        """Every stream there is."""
        return tuple(self._streams.values())

    async def aclose(self, grace_s: float) -> bool:
        """Take no more work and wait up to ``grace_s`` seconds for what there is; True if all ended. Idempotent.

        Cancellation: the streams stay stopped, and still end after the work they have.
        """
        for stream in self.streams:
            stream.stop()  # before anything is awaited: from here on a cancel leaves no stream open
        return all(await asyncio.gather(*(stream.aclose(grace_s) for stream in self.streams)))

    def describe(self) -> str:
        """One line for people: name, what it is, memory in use, limit."""
        now = self.memory.statistics()
        limit = "no limit" if now.limit is None else f"limit {format_bytes(now.limit)}"
        return f"{self.name}  {self.what}  {format_bytes(now.used)} in {now.buffers} buffers, {limit}"

    @property
    def what(self) -> str:
        """A few words for people about the device."""
        return self.kind

    def check_event_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Does nothing: any event loop will do."""

    def check_loops(self) -> None:
        """Does nothing: it runs no loops, or lacks nothing to do so."""


class LaunchingDevice(LogicalDevice[AnyStream]):
    """The base of asynchronous devices: what there is to do where nothing is; see `AsynchronousDevice`."""

    charge: Callable[[Any, int], None] | None = None
    copy_state_out: Callable[[int, str, Deliver], None] | None = None
    handover_ns = 5_000.0  # streams wait for events by themselves
    region_ns = launch_ns = view_ns = step_ns = variable_ns = 0.0
    _spans: Spans | None = None

    @property
    def asynchronous(self) -> Any:  # type: ignore[override] # an attribute would be a cycle
        """The device itself."""
        return self

    async def open(self) -> None:
        """Does nothing: it is ready."""

    def start(self) -> None:
        """Does nothing, too."""

    def activate(self) -> AbstractContextManager[object]:
        """Does nothing: no thread has a current device of the kind."""
        return _NOTHING

    def bind_region(self, function: Kernel, info: KernelInfo, *, is_generator: bool) -> Kernel:
        """Does not run regions.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(f"{self.name} does not run regions, and was given {info.name}")

    def bind_loop(self, loop: LoopCode, info: KernelInfo) -> Kernel:
        """Does not run loops.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(f"{self.name} does not run loops, and was given {info.name}")

    def resident(self, constant: Value, stream: int) -> Placed:
        """The constant: what uses it orders itself."""
        return constant

    def require_data(self, value: Value, name: str) -> None:
        """Does nothing: what was computed has data."""

    def now_ns(self) -> int:
        """The time of the host."""
        return perf_counter_ns()

    def send(self) -> int:
        """Now: what is said to another device is said at once."""
        return perf_counter_ns()

    def receive(self, value: Value, source: Device, deliver: Deliver, sent_ns: int | None = None) -> None:
        """Take over a value of `source` by way of the host: ``deliver(value_here, error)`` is called once."""
        if not isinstance(value, DeviceValue):
            # The host keeps what it has made for itself, such as the shape of an array.
            stays = source.capabilities.own_memory or is_shape(value)
            deliver(value, None) if stays else self.feed(value, deliver)
            return

        def take(host_value: Any, error: BaseException | None) -> None:
            if error is None:
                self.feed(host_value, deliver)
            else:
                deliver(None, error)

        value.to_host(take)

    @abstractmethod
    def feed(self, value: Value, deliver: Deliver) -> None:
        """See `AsynchronousDevice`."""

    def record_into(self, spans: Spans | None) -> Spans | None:
        """Add the work launched from here on to `spans`; None: nobody wants to know. Gives what it was added to."""
        before, self._spans = self._spans, spans
        return before

    def recorded(self) -> Spans | None:
        """The list that the work launched now is added to."""
        return self._spans

    def settle(self, spans: Spans) -> Sequence[Span]:
        """`spans`: they were known when they were recorded."""
        return spans
