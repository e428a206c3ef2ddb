"""The base of every kind of device: streams for its work, an account of its memory, an array namespace."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from time import perf_counter_ns
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np

from asyncflow.devices.decisions import LoopCode
from asyncflow.devices.figures.host import NO_TIMES
from asyncflow.devices.memory import MemoryAccount, Requests, format_bytes
from asyncflow.devices.options import positive_count
from asyncflow.devices.values import ArraySpec as ArraySpec
from asyncflow.devices.values import Deliver as Deliver
from asyncflow.devices.values import DeviceValue, is_shape
from asyncflow.devices.values import Into as Into
from asyncflow.devices.values import Placed as Placed
from asyncflow.devices.values import Shape as Shape
from asyncflow.streams.protocol import Stream
from asyncflow.values import Conduct

if TYPE_CHECKING:
    from asyncflow.devices.captures import GraphCode
    from asyncflow.devices.figures.host import Launch
    from asyncflow.devices.saved.memory_gate import MemoryGate
    from asyncflow.devices.swapping import Swapping
    from asyncflow.values import Array, Kernel, Value


@dataclass(frozen=True, slots=True)
class KernelRecipe:
    """The parts of a kernel, for a device that makes it elsewhere: in another process, or by another compiler.

    Attributes:
        op: the name of the op, for `asyncflow.graph.op.find_op`.
        attrs: the node's.
    """

    op: str
    attrs: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeInfo:
    """Facts about the code of a region or loop, which a device runs as a whole, and of some kernels.

    Attributes:
        vectors: positions of arguments that it takes for the device's, and that may be vectors of the host; they are
            copied in.
        launches: how many kernels it launches at a time.
        graph: the code for CUDA graphs, if it may become some.
        could_capture: it might, if the session asked for it.
        host_outputs: positions of outputs that stay on the host, where they are made.
    """

    vectors: tuple[int, ...] = ()
    launches: int = 1
    graph: GraphCode | None = None
    could_capture: bool = False
    host_outputs: Collection[int] = ()


# Shared by all kernels with defaults: a program binds thousands of kernels, and the objects are frozen.
_PLAIN: Final = Conduct()
_NO_CODE: Final = CodeInfo()


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelInfo:
    """Facts about a kernel, beside the function, for a device that launches it.

    Attributes:
        name: the node's, for timelines and errors.
        stream: which of the device's compute streams it runs on.
        single: the kernel returns its one output itself, rather than a tuple of outputs.
        conduct: that of its op; a context that it needs is handed on as it is.
        is_async: the kernel is a coroutine function of the user's: it runs on the host, on host arrays.
        may_run_on_host: all outputs are integers or booleans of rank 0, so that with such inputs it need not be
            launched at all.
        keeps_arrays: it may hold on to its inputs, or hand out what others hold on to (state, tensor arrays).
        moves_references: it stores values, or finds stored ones, as they are: a few lines of Python.
        uses_state: it touches a variable; on the host it may have to wait for what a device has written.
        host_inputs: positions of inputs that the kernel reads on the host, such as shapes.
        stays: positions of inputs that a kernel of the host takes as they are, on the device. The kernel is then told
            of the outputs that only the host uses (``leaving=``), and other outputs may be on the device, too.
        on_host: the kernel for NumPy, where its outputs belong on the host if its inputs are there; None on a device
            with the host's memory.
        is_metadata: it needs no data of the device's, and its result is on the host.
        in_region: it is called by the code of a region, and not by itself.
        launch: way of launching it.
        kernels: number of kernels that it launches.
        code: of a region or loop.
        recipe: the kernel's ingredients, if it is a plain function of arrays; None if it uses state or user code, or
            checks its results.
        flops: ``flops(input_shapes, output_shapes)``, for the cost model.
        infer: ``infer(input_specs, values)`` returns the specs of the outputs, given the inputs' specs and known values
            by position; None if further data decide.
    """

    name: str
    stream: int = 0
    single: bool = True
    conduct: Conduct = _PLAIN
    is_async: bool = False
    may_run_on_host: bool = False
    keeps_arrays: bool = False
    moves_references: bool = False
    uses_state: bool = False
    host_inputs: frozenset[int] = frozenset()
    stays: frozenset[int] = frozenset()
    on_host: Kernel | None = None
    is_metadata: bool = False
    in_region: bool = False
    launch: Launch = "launch"
    kernels: int = 1
    code: CodeInfo = _NO_CODE
    recipe: KernelRecipe | None = None
    flops: Callable[[Sequence[Shape], Sequence[Shape]], float]
    infer: Callable[[Sequence[ArraySpec], Mapping[int, Array]], Sequence[ArraySpec] | None]


class Span(NamedTuple):
    """Work that a device did, for timelines; times are nanoseconds of the event loop's clock."""

    label: str
    stream: str
    """``compute``, ``compute:1``, ``h2d``, ``d2h`` or ``peer``; ``host`` for a kernel that was not launched."""
    started_ns: int
    ended_ns: int
    nbytes: int
    """Of a copy; 0 for a kernel."""
    memory: tuple[int, ...] = ()
    """Time of the launch, and bytes held by the device then (`asyncflow.devices.swapping.memory_sample`), if reported:
    a region launches many kernels."""


class RequestingSpans(list[Any]):
    """Spans, and the requests to their device in the same time.

    Attributes:
        device: the name of the device, if the device counts requests.
        requests: the counts.
        began: counts of the device when it began to record.
    """

    __slots__ = ("began", "device", "requests")

    def __init__(self) -> None:
        super().__init__()
        self.device = ""
        self.requests = self.began = Requests()


class CountedSpans(RequestingSpans):
    """Spans of which only the number is needed: a device may put None in place of each."""

    __slots__ = ()


class CoroutineKernel:
    """A bound kernel whose call gives a coroutine: its firings get tasks, whatever its op is."""

    __slots__ = ()


class HostKernel(CoroutineKernel):
    """A kernel that a device leaves to the host, which takes present values as they are.

    Attributes:
        staying: positions of outputs that only the host uses: they are not copied in.
        offers: per output, the function that may offer memory for its copy; empty without any.
    """

    __slots__ = ("offers", "staying")

    staying: Collection[int]
    offers: Sequence[Into | None]


def is_coroutine_kernel(kernel: object) -> bool:
    """Return True if a call of a bound kernel gives a coroutine."""
    return isinstance(kernel, CoroutineKernel)


def host_kernel(kernel: object) -> HostKernel | None:
    """Return a bound kernel that its device leaves to the host; None for other kernels."""
    return kernel if isinstance(kernel, HostKernel) else None


Spans: TypeAlias = list[Any]
"""The notes of a device about the work that it launches; only it knows what a note is, and `settle` reads them."""

Mark: TypeAlias = Any
"""A point in the work of an asynchronous device, which only that device understands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Abilities of a device, for planning code, which does not look at the device's kind.

    Attributes:
        own_memory: its arrays are in a memory that neither the host nor another device can read, so that operands have
            to be copied in.
        runs_regions: one call enqueues all kernels of a region; else kernels are launched one by one.
        captures: when regions that can become graphs do.
        runs_loops: loops that decide by its arrays may run on it, without the host.
        kernels: ops with kernels: ``"all"``, or ops on ``"arrays"``. The latter leaves work with strings, users'
            functions, and outputs of data-dependent shapes to the host.
        takes_foreign: arrays that other libraries have in its memory may be fed, and are copied there.
    """

    own_memory: bool = False
    runs_regions: bool = False
    captures: Literal["never", "asked", "always"] = "never"
    runs_loops: bool = False
    kernels: Literal["all", "arrays"] = "all"
    takes_foreign: bool = False

    @property
    def leaves_numbers(self) -> bool:
        """True if numbers stay with the host while regions run: so regions count iterations."""
        return self.own_memory or self.runs_regions

    @property
    def fuses(self) -> bool:
        """True if a kernel of a region may compute several nodes, as a card's can; NumPy has a call for each."""
        return self.own_memory and self.runs_regions

    def capture_if(self, asked: bool) -> bool:
        """Return True if regions become graphs, given whether the session asks for it."""
        return self.captures == "always" or (asked and self.captures == "asked")


# Covariant, so that a device with streams of its own kind is a `Device`: callers only read streams.
AnyStream = TypeVar("AnyStream", bound=Stream, covariant=True)

_NOTHING = nullcontext()  # shared, as it has no state: each turn of an executor enters a context


class LogicalDevice(ABC, Generic[AnyStream]):
    """A place where kernels run and values live; kernels of one of these give their results when they return.

    The invariant: a value is valid in the order of its device's ``compute`` stream. Whoever touches it elsewhere, on
    ``h2d``, ``d2h``, another device or the host, orders that with an event (`asyncflow.streams`).

    A subclass sets `memory` and the streams.

    Attributes:
        name: such as ``cpu:0``.
        kind: the name of its kind, such as ``cpu``.
        capabilities: its abilities.
        xp: the array namespace its kernels compute in, such as `numpy`.
        store_xp: the same for stores that launch kernels of their own, which a simulated card has to notice.
        compute: the first stream of kernels.
        compute_streams: the streams of kernels; independent kernels on different ones overlap.
        h2d: the stream of copies from host memory.
        d2h: the stream of copies to host memory.
        memory: the bytes it holds, and their limit.
        swapping: the mover of saved values, away and back; None if nothing does.
        pacing: the gate that measures the bytes of loops' iterations, on a device with a limit and without `swapping`.
        asynchronous: the device itself, if a kernel's result is there only in the order of its stream, not when it
            returns.
        threads: how many long kernels it computes at the same time, in any order; 1 where a stream has them all.
        handover_ns: the expected time until what one of its streams has made is there on another.
    """

    asynchronous: AsynchronousDevice | None = None
    swapping: Swapping | None = None
    pacing: MemoryGate | None = None
    xp: ModuleType = np
    memory: MemoryAccount
    threads: int = 1
    handover_ns: float = 50_000.0  # two turns of the event loop and waking a thread
    compute: AnyStream
    h2d: AnyStream
    d2h: AnyStream

    def __init__(self, kind: str, index: int, capabilities: Capabilities, compute_streams: int) -> None:
        """Name the device ``<kind>:<index>``.

        Args:
            kind: the name of its kind.
            index: its number among them.
            capabilities: abilities of the device.
            compute_streams: how many streams of kernels it is to have.

        Raises:
            ValueError: `compute_streams` is no positive int.
        """
        self.kind = kind
        self.name = f"{kind}:{index}"
        self.capabilities = capabilities
        # Filled by subclasses: streams of a card need its context and pool, which open later.
        self.compute_streams: tuple[AnyStream, ...] = ()
        self._count = positive_count(compute_streams, "the number of compute streams")
        self._streams: Mapping[str, AnyStream] = {}

    def make_streams(self, make: Callable[[str], AnyStream], *others: str) -> None:
        """Make the streams, by role: streams of kernels, ``h2d``, ``d2h`` and others.

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
    def store_xp(self) -> ModuleType:
        """Namespace of stores that launch kernels of their own."""
        return self.xp

    @property
    def streams(self) -> tuple[AnyStream, ...]:
        """Every stream there is."""
        return tuple(self._streams.values())

    @abstractmethod
    def kernel_ns(self, flops: float, nbytes: float) -> float:
        """Return the expected time of a kernel with `flops` operations on `nbytes` bytes; for placement."""

    @abstractmethod
    def transfer_ns(self, nbytes: float, target: Device) -> float:
        """Return the expected time until a value of `nbytes` bytes made here is present on `target`; for placement."""

    async def aclose(self, grace_s: float) -> bool:
        """Refuse further work and wait up to ``grace_s`` seconds for present work; return True if all of it ended.
        Idempotent.

        Cancellation: the streams stay stopped, and still end after the work they have.
        """
        for stream in self.streams:
            stream.stop()  # before the first await: a cancellation then leaves no stream open
        # All at once: their work may wait for one another, and the grace period holds for the device.
        return all(await asyncio.gather(*(stream.aclose(grace_s) for stream in self.streams)))

    def describe(self) -> str:
        """Return one line for people: name, description, memory in use, limit."""
        now = self.memory.statistics()
        limit = "no limit" if now.limit is None else f"limit {format_bytes(now.limit)}"
        return f"{self.name}  {self.what}  {format_bytes(now.used)} in {now.buffers} buffers, {limit}"

    @property
    def what(self) -> str:
        """A few words for people about the device."""
        return self.kind

    def check_event_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Raise unless the device can work for this event loop.

        Raises:
            RuntimeError: it is on another time than the device.
        """

    def check_loops(self) -> None:
        """Raise if the device `runs_loops` and a package for making them is missing.

        Raises:
            PlacementError: the package is missing.
        """


class LaunchingDevice(LogicalDevice[AnyStream]):
    """A device whose kernels are launched and not waited for; its values are its own kind of object.

    *Host values* (anything that is no `DeviceValue`, such as NumPy scalars) may be mixed with them in every call. All
    methods are called on the event loop's thread, and none but `start` blocks. Optional operations do nothing here.

    Attributes (more in `LogicalDevice`):
        host_times: the expected times of the host that launches for it.
        charge: takes the host's work that no other call tells of, and its count, where that is simulated: ``"run"``,
            for a run that begins on the device, or ``"primitive"``; else None.
        copy_state_out: takes bytes and a name, and delivers None once so much state has come to the host, if that is
            simulated. None without such a simulation: arrays that state keeps there are NumPy's, or know their
            `Holder`.
    """

    charge: Callable[[Any, int], None] | None = None
    copy_state_out: Callable[[int, str, Deliver], None] | None = None
    handover_ns = 5_000.0  # streams wait for events without the host
    host_times = NO_TIMES
    _spans: Spans | None = None

    # A check of `is None` tells the executor whether to launch; no `isinstance` in the paths of a firing.
    @property
    def asynchronous(self) -> AsynchronousDevice:  # type: ignore[override] # an attribute would be a cycle
        """The device itself."""
        return self

    def now_ns(self) -> int:
        """The time of the thread that launches, in nanoseconds: how long launching takes is measured by it."""
        return perf_counter_ns()

    async def open(self) -> None:
        """Get ready for the first call, without blocking the event loop. Idempotent."""

    def start(self) -> None:
        """Do as `open`, for callers that cannot await: may block. Idempotent."""

    def activate(self) -> AbstractContextManager[object]:
        """A context in which the device's calls cost less; nothing may wait inside."""
        return _NOTHING

    @abstractmethod
    def bind(self, kernel: Kernel, info: KernelInfo) -> Kernel:
        """A function that launches `kernel` on device values, and gives device values.

        For a coroutine function (``info.is_async``) it is one again: it waits for its inputs and calls it on NumPy
        arrays.
        """

    # Not abstract, nor are the next two: a device without the capability needs no code for them.
    def bind_region(self, function: Kernel, info: KernelInfo, *, is_generator: bool) -> Kernel:
        """A function that runs a region's generated one on device values; only for a device that `runs_regions`.

        With `is_generator` it gives a generator, each step of which enqueues some of the region. Its attribute `graphs`
        is for `Plan.explain`: as a string, the graphs that the region has become.
        """
        raise NotImplementedError(f"{self.name} does not run regions, and was given {info.name}")

    def bind_loop(self, loop: LoopCode, info: KernelInfo) -> Kernel:
        """A coroutine function that runs a loop on device values; only for a device that `runs_loops`."""
        raise NotImplementedError(f"{self.name} does not run loops, and was given {info.name}")

    @abstractmethod
    def constant(self, value: Value) -> Placed:
        """A device value that has been there from the start."""

    def resident(self, constant: Value, stream: int) -> Placed:
        """The form of such a value in regions of one compute stream; only for a device that `runs_regions`."""
        return constant

    @abstractmethod
    def feed(self, value: Value, deliver: Deliver) -> None:
        """Copy a host value in: ``deliver(device_value, error)`` is called once, now or later.

        Kernels wait for the copy by themselves; `value` must not change before it is delivered. On a device that has a
        memory of its own, a value that has stayed there is delivered as it is, and `RowsToJoin` are joined.
        """

    def feed_into(self, value: Value, deliver: Deliver, into: Into | None) -> None:
        """`feed`; ``into(array)`` may offer memory for the copy, which no device needs to use (`PlanNode.offer_of`)."""
        self.feed(value, deliver)

    def send(self) -> int:
        """Return the time at which a message sent now to another device is on its way, in nanoseconds of the event
        loop's clock.
        """
        return perf_counter_ns()

    def receive(self, value: Value, source: Device, deliver: Deliver, sent_ns: int | None = None) -> None:
        """Take over a value of `source`, by way of the host: ``deliver(value_here, error)`` is called once.

        `sent_ns` is what `send` of the source said (None: it is sent now). `value` is kept referenced until the copy is
        done, whatever becomes of the run. Errors are delivered, not raised: the caller is the sender.
        """
        if not isinstance(value, DeviceValue):
            # Values made for the host, such as a shape, stay there. An array of a source that computes in the host's
            # memory is data, and is copied in like a feed.
            stays = source.capabilities.own_memory or is_shape(value)
            deliver(value, None) if stays else self.feed(value, deliver)
            return

        # By way of the host, the one path that every pair of devices has. Devices with a link override this.
        def take(host_value: Any, error: BaseException | None) -> None:
            if error is None:
                self.feed(host_value, deliver)
            else:
                deliver(None, error)

        value.to_host(take)

    def read_value(self, value: DeviceValue, deliver: Deliver) -> None:
        """Copy a value to the host for a kernel that reads it there; ``deliver(host_value, error)`` is called once.

        A simulation of shapes may deliver something that has a shape and no data.
        """
        value.to_host(deliver)

    def require_data(self, value: Value, name: str) -> None:
        """Raise unless Python can look at `value`, as the node `name` has to: a simulation may know its shape alone."""

    def assume_decision(self, value: Value, name: str, iteration: int) -> Value | None:
        """Return the decision of the loop's condition `name` in an iteration; None if `value` holds it.

        A simulation of shapes assumes a number of iterations for loops whose conditions depend on data.
        """
        self.require_data(value, name)
        return None

    @abstractmethod
    def throttle(self, resume: Callable[[], None]) -> bool:
        """Return True if launching must pause for unfinished work; then call ``resume()`` once, later.

        Without this a loop could be launched to its end before anything has happened, or for ever.
        """

    # Runs take marks before they end and check them later, when other runs may have launched more work.
    @abstractmethod
    def mark(self) -> Mark:
        """The point up to which work is launched now, for `when_done`."""

    @abstractmethod
    def when_done(
        self, done: Callable[[BaseException | None], None], mark: Mark = None, *, elsewhere: bool = False
    ) -> None:
        """Call ``done(error)`` once, never before this returns, when all work launched up to `mark` has ended.

        Without a mark that is all launched by now. The error is None unless the device failed, after which none of its
        values is worth anything. With `elsewhere` another device is told, which may take the time of a message.
        """

    def has_ended(self) -> bool:
        """Return True if all work launched so far is known to have ended, so that `when_done` need not be called."""
        return False

    def record_into(self, spans: Spans | None) -> Spans | None:
        """Add the work launched from here on to `spans`; None stops that. Returns the former target.

        What a coroutine kernel launches goes where it would have gone when it was called. `spans` is for `settle`.
        """
        # A plain attribute is enough: all launches are on one event loop's thread, and none waits.
        before, self._spans = self._spans, spans
        if before is not spans:  # usually equal: runs without a trace record into None
            now = replace(self.memory.requests)
            if isinstance(before, RequestingSpans):
                before.requests.add(now.since(before.began))
            if isinstance(spans, RequestingSpans):
                spans.began = now
                spans.device = self.name if self.capabilities.own_memory else ""
        return before

    def recorded(self) -> Spans | None:
        """The list that the work launched now is added to."""
        return self._spans

    def settle(self, spans: Spans) -> Sequence[Span]:
        """The spans that were recorded, once the work has ended."""
        return spans


Device: TypeAlias = LogicalDevice[Stream]
"""Any device."""

AsynchronousDevice: TypeAlias = LaunchingDevice[Stream]
"""Any device whose kernels are launched and not waited for."""


def recording(device: AsynchronousDevice, spans: Spans | None) -> AbstractContextManager[object]:
    """Record work launched inside the block, and no other, in `spans`; see `AsynchronousDevice.record_into`."""
    if spans is None and device._spans is None:  # the usual case: a run without a trace
        return _NOTHING
    return _recording(device, spans)


@contextmanager
def _recording(device: AsynchronousDevice, spans: Spans | None) -> Iterator[None]:
    before = device.record_into(spans)
    try:
        yield
    finally:
        device.record_into(before)
