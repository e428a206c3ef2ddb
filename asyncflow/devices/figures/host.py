"""The time of the thread that drives simulated devices.

On this runtime one thread, the event loop's, does all work outside of cards. It starts runs, interprets nodes, launches
kernels, gives copies to streams, and is notified when they end. However many cards there are, there is one such thread.
A program whose launches keep it busy does not get faster with more cards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal, TypeAlias, get_args

from asyncflow.streams.sim.stream import HostClock

Launches: TypeAlias = Literal["regions", "nodes", "graphs"]
"""Ways in which kernels come to a card: by regions with fused chains, one node at a time, or by regions made CUDA
graphs.
"""

LAUNCHES: Final[tuple[Launches, ...]] = get_args(Launches)

Call: TypeAlias = Literal[
    "run", "node", "primitive", "step", "view", "region", "launch", "product", "library", "graph", "buffer", "copy",
    "part", "transfer", "event", "delivery",
]  # fmt: skip
"""The work of a host, by the name of its cost."""

Launch: TypeAlias = Literal["launch", "product", "library"]
"""The calls that launch a node's kernels: a kernel of its own, a product of cuBLAS, or another function of CuPy's."""


_PRIMITIVES = 3
"""Primitives that a loop's variable passes in an iteration: Merge, Switch and NextIteration."""


_PART = 0.095
"""Share of a copy's time that one more value in it takes: of the lines of Python that the stand-in runs for both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTimes:
    """Expected times of a host's thread for one device, in nanoseconds; 0 for a device that computes by itself.

    Attributes:
        driver: the thread; equal for all devices that one thread drives.
        run_ns: starting a run on the device, and ending it.
        send_ns: sending a value to another device.
        region_ns: calling a region, without its kernels.
        launch_ns: launching a node's kernels, by how they are launched.
        view_ns: making a view of an array.
        step_ns: a number that the host computes, or a value that is saved or found again.
        variable_ns: handing a loop's variable on to the next iteration.
    """

    driver: Hashable
    run_ns: float = 0.0
    send_ns: float = 0.0
    region_ns: float = 0.0
    launch_ns: Mapping[Launch, float]
    view_ns: float = 0.0
    step_ns: float = 0.0
    variable_ns: float = 0.0


NO_TIMES: Final = HostTimes(driver="the host", launch_ns={"launch": 0.0, "product": 0.0, "library": 0.0})


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Times, in seconds, of a host thread's activities.

    Attributes:
        name: as `host_named` reads it.
        summary: description for people.
        thread_a_device: every device has a thread of its own; else one thread drives all devices of a process.
        launches: way of launching kernels, unless the user chooses one.
        run_s: starting a run on one device, and ending it.
        node_s: interpreting a node, without its launches.
        primitive_s: passing a value on in a loop or branch that is interpreted: Enter, Merge, Switch and the like.
        step_s: a number that a region computes on the host, or a value that it saves or finds again.
        view_s: an array that looks into another, made by a region.
        region_s: calling a region.
        launch_s: launching a kernel: one of elementwise operations, fused or not.
        product_s: launching a product of matrices.
        library_s: calling another function of CuPy's, such as a sum, a mean or a concatenation.
        graph_s: calling a region that is a CUDA graph.
        buffer_s: copying a value to or from a buffer of a CUDA graph.
        copy_s: giving a copy to a stream, with all that keeps its memory until it is done.
        event_s: letting a stream wait for another.
        delivery_s: hearing that something is done, and telling whoever waits.
        wake_s: latency from the end of something until the thread hears of it, in which it is free for other work.
        source: where the figures come from.
    """

    name: str
    summary: str
    thread_a_device: bool = False
    launches: Launches = "regions"
    run_s: float
    node_s: float
    primitive_s: float
    step_s: float
    view_s: float
    region_s: float
    launch_s: float
    product_s: float
    library_s: float
    graph_s: float
    buffer_s: float
    copy_s: float
    event_s: float
    delivery_s: float
    wake_s: float = 0.0
    source: str = ""

    @property
    def part_s(self) -> float:
        """The time for one more saved value in a copy, with the time to read the value."""
        return _PART * self.swap_s

    @property
    def transfer_s(self) -> float:
        """The time of copying a value from one device to another, of which the thread hears on both sides."""
        return self.copy_s + 2 * self.wake_s

    @property
    def swap_s(self) -> float:
        """The time to move a saved value: to order the copy, to give the copy to a stream, and to hear of the end.

        Copies were measured with the tickets that end them, so that `delivery_s` is in `copy_s`.
        """
        return self.event_s + self.copy_s

    def times(self, driver: Hashable = "the host") -> HostTimes:
        """Return the times of regions for a device that `driver` drives."""
        return HostTimes(
            driver=driver,
            run_ns=self.run_s * 1e9,
            send_ns=(self.transfer_s + self.delivery_s + 2 * self.node_s) * 1e9,
            region_ns=self.region_s * 1e9,
            launch_ns={call: self.cost_s(call) * 1e9 for call in get_args(Launch)},
            view_ns=self.view_s * 1e9,
            step_ns=self.step_s * 1e9,
        )

    def times_of_nodes(self, driver: Hashable) -> HostTimes:
        """Return the times where each node is interpreted; see `times`."""
        node_ns = self.node_s * 1e9
        return replace(
            self.times(driver),
            region_ns=0.0,
            launch_ns={call: self.cost_s(call) * 1e9 + node_ns for call in get_args(Launch)},
            view_ns=node_ns,
            step_ns=node_ns,
            variable_ns=_PRIMITIVES * self.primitive_s * 1e9,
        )

    def times_of_graphs(self, driver: Hashable) -> HostTimes:
        """Return the times where regions are CUDA graphs, of whose nodes none takes the host any; see `times`."""
        return replace(self.times(driver), launch_ns=NO_TIMES.launch_ns, view_ns=0.0, step_ns=0.0)

    def times_of_cpu(self, driver: Hashable) -> HostTimes:
        """Return the times of regions for a CPU: kernels include the calls of NumPy; see `times`."""
        node_ns, step_ns = self.node_s * 1e9, self.step_s * 1e9
        return replace(self.times(driver), launch_ns=NO_TIMES.launch_ns, region_ns=node_ns, view_ns=step_ns)

    def cost_s(self, call: Call) -> float:
        """The time of one call."""
        seconds: float = getattr(self, f"{call}_s")
        return seconds


COSTS: Final = tuple(f"{call}_s" for call in get_args(Call))
"""The names of the costs of a `Host`."""


@dataclass(slots=True, eq=False, repr=False)
class HostThread:
    """One thread of the host on virtual time: it does one thing after another, in the order in which it is asked to.

    Attributes:
        host: how long it takes for what.
        free_at_ns: when it has done all that it was asked to.
        calls: how often it did what.
        busy_ns: how long each took in all.
        saved_by_graphs_ns: how much less it would have taken if regions that can be had been CUDA graphs.
        call_ns: nanoseconds that one call of each kind takes.
    """

    host: Host
    _clock: HostClock
    free_at_ns: int = 0
    calls: Counter[Call] = field(default_factory=Counter)
    busy_ns: Counter[Call] = field(default_factory=Counter)
    saved_by_graphs_ns: int = 0
    call_ns: dict[Call, int] = field(init=False)

    def __post_init__(self) -> None:
        self.call_ns = {call: round(self.host.cost_s(call) * 1e9) for call in get_args(Call)}

    def __repr__(self) -> str:
        return f"<HostThread of {self.host.name}, free at {self.free_at_ns} ns>"

    @property
    def ready_ns(self) -> int:
        """The time at which the thread could begin with other work."""
        return max(self.free_at_ns, self._clock.now_ns())

    def spend(self, call: Call, times: int = 1) -> int:
        """Spend time on calls; return the time at which they are done."""
        taken_ns = self.call_ns[call] if times == 1 else self.taken_ns(call, times)
        self.calls[call] += times
        self.busy_ns[call] += taken_ns
        free_ns, now_ns = self.free_at_ns, self._clock.loop.now_ns
        if free_ns < now_ns:
            free_ns = now_ns
        self.free_at_ns = free_ns = free_ns + taken_ns
        return free_ns

    def taken_ns(self, call: Call, times: int = 1) -> int:
        """Return the nanoseconds that `times` calls take."""
        return self.call_ns[call] if times == 1 else round(self.host.cost_s(call) * 1e9 * times)

    def note_region(self, taken_ns: int, arrays: int) -> None:
        """Note the time of a region that could have been a CUDA graph with this number of buffers."""
        graph_ns = round((self.host.graph_s + arrays * self.host.buffer_s) * 1e9)
        self.saved_by_graphs_ns += max(taken_ns - graph_ns, 0)
