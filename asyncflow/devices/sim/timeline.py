"""The work a simulated device is given, and when: the base of `SimDevice`, as `Progress` is that of a CUDA device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, overload
from weakref import WeakValueDictionary

from asyncflow.devices.figures.host import Call, Launch
from asyncflow.devices.figures.presets import CARDS, Card, kernel_ns, work_ns
from asyncflow.devices.protocol import (
    Capabilities,
    CountedSpans,
    LaunchingDevice,
    LogicalDevice,
    RequestingSpans,
    Span,
    Spans,
)
from asyncflow.devices.sim.machine import SimMachine
from asyncflow.devices.sim.values import SimArray, SimMemoryAccount, Storage
from asyncflow.streams.sim.stream import SimEvent, SimStream
from asyncflow.values import Value

_NS_PER_S = 1e9


class NotedSpans(Sequence[Span]):
    """The spans that a simulated device has noted, each made when it is asked for.

    Notes stand in a flat list, `_COLUMNS` elements a span: a traced run makes thousands, which the garbage collector
    would look at again and again if each were an object.
    """

    __slots__ = ("_notes",)

    def __init__(self, notes: Spans) -> None:
        self._notes = notes

    def __len__(self) -> int:
        return len(self._notes) // _COLUMNS

    @overload
    def __getitem__(self, index: int) -> Span: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Span]: ...

    def __getitem__(self, index: int | slice) -> Span | Sequence[Span]:
        return [*self][index]

    def __iter__(self) -> Iterator[Span]:
        notes = iter(self._notes)
        for label, role, started_ns, ended_ns, nbytes, now_ns, used, moved in zip(*[notes] * _COLUMNS, strict=True):
            yield _new_tuple(Span, (label, role, started_ns, ended_ns, nbytes, (now_ns, used, *moved)))


_COLUMNS = 8

_new_tuple = tuple.__new__  # bypasses the named tuple's constructor, which would take longer than the rest


class _HeldStorages(list[Storage]):
    """Memory that is kept until an event is over."""

    __slots__ = ("__weakref__",)


class Timeline(LaunchingDevice[SimStream]):
    """The streams of a simulated device, the thread of the host that gives them work, and the record of that.

    Attributes (more in `LogicalDevice`):
        machine: what the device is part of.
        card: how fast it is.
        thread: that of the host which drives it.
    """

    memory: SimMemoryAccount

    def __init__(self, machine: SimMachine, index: int, kind: Literal["sim", "cpu"], compute_streams: int) -> None:
        self._is_card = kind == "sim"
        # CPUs, too: interpreting each node of a long loop takes many times as long as computing it.
        runs_regions = machine.launches != "nodes"
        captures = self._is_card and runs_regions
        capabilities = Capabilities(
            own_memory=self._is_card,
            runs_regions=runs_regions,
            captures="never" if not captures else "always" if machine.launches == "graphs" else "asked",
        )
        super().__init__(kind, index, capabilities, compute_streams)
        if not self._is_card:
            self.handover_ns = LogicalDevice.handover_ns
        self.machine = machine
        self.card: Card = machine.spec.cards[index] if self._is_card else CARDS["cpu"]
        self.thread = machine.thread_of(self.name, index)
        host = machine.driver
        of_kernels = host.times_of_graphs if machine.launches == "graphs" else host.times
        self.host_times = (of_kernels if runs_regions else host.times_of_nodes)(self.thread)
        if runs_regions and not self._is_card:
            # Figures of regions and views hold for CuPy. A CPU's region calls NumPy, whose times include the call.
            self.host_times = host.times_of_cpu(self.thread)
        self.make_streams(lambda name: SimStream(name, machine.host), "peer")
        self.peer = self._streams["peer"]
        self._roles = {stream: role for role, stream in self._streams.items()}
        self._graph_ns: int | None = None
        self._card_free_ns = 0
        self._held: WeakValueDictionary[SimEvent, _HeldStorages] = WeakValueDictionary()

    @property
    def dispatched_ns(self) -> int:
        """The time at which the host will have done all its present work, for whatever device."""
        return self.thread.ready_ns

    def now_ns(self) -> int:
        """`dispatched_ns`."""
        return self.dispatched_ns

    def charge(self, call: Call, times: int = 1) -> None:
        """Let the host spend time on an activity that no other call covers."""
        self.thread.spend(call, times)

    def call_region(self) -> None:
        """Let the host call a region, which on a CPU is a function of NumPy's calls."""
        self.thread.spend("region" if self._is_card else "node")

    # -- for launchers -------------------------------------------------------------------------------------------

    def order(self, stream: SimStream, events: Iterable[SimEvent]) -> None:
        """Let `stream` wait for the events of other streams."""
        for event in events:
            if event.stream is not stream:
                stream.wait(event)

    def settle_on(self, stream: SimStream, array: SimArray) -> None:
        """Let a compute stream wait for an array's writer, if it does not yet; the host needs to ask only once."""
        if array.written.stream is stream or stream in array.followers:
            return
        if self._graph_ns is None:
            self.thread.spend("event")
        array.followers = (*array.followers, stream)

    def launch_kernel(
        self,
        stream: SimStream,
        flops: float,
        nbytes: int,
        is_wide: bool,
        name: str,
        fired: bool = True,
        launch: Launch = "launch",
    ) -> SimEvent:
        """Launch a kernel of this cost on a compute stream; `fired` if a node was interpreted for it alone.

        Kernels of several streams share the card: each begins when the work of earlier ones is done. The rest of a
        kernel that lasts longer than its work, because of the shortest kernel time, overlaps.
        """
        return self.launch_for(stream, *self.cost(flops, nbytes, is_wide), name, fired, launch)

    def cost(self, flops: float, nbytes: int, is_wide: bool) -> tuple[float, int]:
        """Return the seconds that a kernel takes without jitter, and the nanoseconds of work in that."""
        card, itemsize = self.card, 8 if is_wide else 4
        return kernel_ns(card, flops, nbytes, itemsize) / _NS_PER_S, work_ns(card, flops, nbytes, itemsize)

    def launch_for(
        self, stream: SimStream, seconds: float, taken_ns: int, name: str, fired: bool, launch: Launch
    ) -> SimEvent:
        """Launch a kernel of known `cost`; see `launch_kernel`."""
        machine, thread = self.machine, self.thread
        duration_ns = machine.duration_ns(seconds) if machine.jitter else round(seconds * _NS_PER_S)
        if self._graph_ns is not None:
            earliest_ns = max(self._graph_ns, stream.free_at_ns + round(self.card.graph_node_s * _NS_PER_S))
        else:
            self.memory.requests.kernels += 1
            if fired:
                thread.spend("node")
            earliest_ns = thread.spend(launch) if self._is_card else thread.free_at_ns  # no stream begins in the past
        if earliest_ns < self._card_free_ns:
            earliest_ns = self._card_free_ns
        event = stream.launch(duration_ns, earliest_ns, name)
        self._card_free_ns = event.started_ns + min(taken_ns, duration_ns)
        if self._spans is not None:
            self._note(name, self._roles[stream], event.started_ns, event.time_ns)
        return event

    def run_on_host(self, name: str, call: Call = "node") -> None:
        """Let the host spend time on a node without a launch."""
        if self._graph_ns is None:
            ended_ns = self.thread.spend(call)
            if self._spans is not None:
                self._note(name, "host", ended_ns - self.thread.call_ns[call], ended_ns)

    @contextmanager
    def in_graph(self) -> Iterator[None]:
        """A block whose launches are part of one CUDA graph, which the host launches first."""
        self._graph_ns = self.thread.spend("graph")
        self.memory.requests.graphs += 1
        before = self.memory.requests.allocations
        try:
            yield
        finally:
            self._graph_ns = None
            self._allocated(before - self.memory.requests.allocations)  # arrays in the memory of the graph

    def fill_buffers(self, stream: SimStream, arrays: Iterable[SimArray], name: str) -> None:
        """Copy values to the buffers of a graph."""
        for array in arrays:
            self.order(stream, (array.written,))
            self.machine.check_read(stream, array, name)
            array.storage.read_by(self._copied_buffer(stream, array, name))

    def empty_buffers(self, stream: SimStream, arrays: Iterable[SimArray], name: str) -> None:
        """Copy values from the buffers of a graph: they are there when that is done."""
        for array in arrays:
            self._allocated(1)
            event = self._copied_buffer(stream, array, name)
            if array.written.stream is stream:
                array.written = event

    def _allocated(self, count: int) -> None:
        if isinstance(self._spans, RequestingSpans):
            self._spans.requests.allocations += count

    def _copied_buffer(self, stream: SimStream, array: SimArray, name: str) -> SimEvent:
        ready_ns = max(self.thread.spend("buffer"), self._card_free_ns)
        self.memory.requests.copies += 1
        event = stream.launch(round(kernel_ns(self.card, 0.0, 2 * array.nbytes)), ready_ns, name)
        self._card_free_ns = event.time_ns
        self._record(event, 0)
        return event

    def hold(self, event: SimEvent, storages: Sequence[Storage]) -> None:
        """Keep memory until the host has seen the event: the ledger of work in flight."""
        # A copy may outlive all references to the memory that it reads.
        held = self._held.get(event)
        if held is not None:  # a copy may read several values
            held += storages
            return
        self._held[event] = held = _HeldStorages(storages)  # only the timer refers to it, so a closed loop frees it
        self.when_over(event, held.clear)

    def hand_over(self, nbytes: float) -> bool:
        """Free up to `nbytes` held for other streams, as `CudaDevice.hand_over` does; return True if any were freed."""
        memory, landing = self.memory, self.machine.landing
        own: object = self
        before = memory.used
        with memory.at_once():
            for event, held in [*self._held.items()]:
                if before - memory.used < nbytes and event.stream in self._roles:
                    self.let_go(event, held)
            for event in [*landing]:
                if before - memory.used < nbytes and landing[event].home is own:
                    self._follow(event, [landing.pop(event)])
        return memory.used < before

    def let_go(self, event: SimEvent, held: _HeldStorages | None = None) -> None:
        """Free memory that is held until an event: streams in whose order it is used again wait for that instead."""
        held = self._held.get(event) if held is None else held
        if held is not None:
            self._follow(event, held)
            held.clear()

    def _follow(self, event: SimEvent, storages: Iterable[Storage]) -> None:
        for pool in {storage.pool for storage in storages}:
            if not pool.has_seen(event):
                self.thread.spend("event")
                pool.wait(event)

    # -- calls at later times -------------------------------------------------------------------------------------

    def _told(self, call: Callable[..., object], *args: Value) -> None:
        """Call a function once the host has had time to notice the event."""
        wake_ns = round(self.machine.driver.wake_s * _NS_PER_S)
        if wake_ns:
            self.machine.loop.call_at_ns(self.machine.now_ns() + wake_ns, self._heard, call, *args)
        else:
            self._heard(call, *args)

    def _heard(self, call: Callable[..., object], *args: Value) -> None:
        self._call_at(self.thread.spend("delivery"), call, *args)

    def _call_at(self, when_ns: int, call: Callable[..., object], *args: Value) -> None:
        if when_ns <= self.machine.now_ns():
            call(*args)
        else:
            self.machine.loop.call_at_ns(when_ns, call, *args)

    def when_over(self, event: SimEvent, call: Callable[..., object], *args: Value) -> None:
        """Let the host see the event when it is done, and call a function then."""
        self.machine.loop.call_at_ns(event.time_ns, _observe, event, call, args)

    def settle(self, spans: Spans) -> Sequence[Span]:
        """The spans that were recorded."""
        counted: Sequence[Span] = spans
        return counted if type(spans) is CountedSpans else NotedSpans(spans)

    def _record(self, event: SimEvent, nbytes: int, role: str = "") -> None:
        if self._spans is not None:
            self._note(event.label, role or self._roles[event.stream], event.started_ns, event.time_ns, nbytes)

    def _note(self, label: str, role: str, started_ns: int, ended_ns: int, nbytes: int = 0) -> None:
        """Record work, the time at which the host launches it, and the bytes that the device holds then."""
        spans, swapping = self._spans, self.swapping
        assert spans is not None
        if type(spans) is CountedSpans:
            spans.append(None)
            return
        # Not by `Swapping.sample`, which takes a lock: one thread drives all simulated devices.
        moved: tuple[int, ...] = () if swapping is None else swapping.moves.sample()
        spans += (label, role, started_ns, ended_ns, nbytes, self.machine.loop.now_ns, self.memory.used, moved)


def _observe(event: SimEvent, call: Callable[..., object], args: tuple[Value, ...]) -> None:
    event.stream.host.observe(event)
    call(*args)
