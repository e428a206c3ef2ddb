"""A pass of the compiler: a name, and a function that changes a program within a context."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import TypeAlias

from asyncflow.compiler.batching.batch_loops import block_bytes
from asyncflow.compiler.memory.plan_memory import PlannedLoop
from asyncflow.compiler.memory.saved import Saved
from asyncflow.compiler.placement.place import Placement
from asyncflow.compiler.plan import Partition
from asyncflow.compiler.program.kernels.device_kernels import Kernels
from asyncflow.compiler.program.kernels.kernels import Resolve
from asyncflow.compiler.program.request import PlanOptions, PlanRequest
from asyncflow.compiler.program.survey import Survey
from asyncflow.devices.protocol import Device
from asyncflow.devices.swapping import Swapping
from asyncflow.graph.graph import Graph
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import Op


@dataclass(slots=True)
class Program:
    """A graph on its way to a plan, with the findings of passes.

    Attributes:
        request: the kind of run that it is compiled for.
        graph: at first the user's, which no pass changes; from `extract` on a private copy.
        fetches: one FETCH node per fetch; None for a fetched node, which has no value.
        kept: the fetched nodes.
        is_hand_written: some of its control flow is written in primitives, which optimizations leave alone.
        notes: which control flow written by hand stays on one device, and why.
        remarks: how parts of it were built.
        placement: why each node is where it is.
        survey: what a run of it touches.
        kernels: for people, which kernels of users nodes call.
        saved: what its loops save for their gradients.
        memory: the treatment of saved values on devices with a limit.
        memory_notes: why nothing is predicted for some loops, and what values hold in the order of the plan.
        kept_on_host: tensors whose values a pass keeps on the host.
        on_host: tensors whose values are on the host, where devices have a memory of their own.
        loop_reasons: loops that decide by values of their card, and why the host drives them all the same.
        loops: for people, the driver of each loop on a card.
        streams: the compute stream of each node; 0 for those left out.
        places: sets of nodes that are live together, for every node but constants, once the graph is lowered.
        partitions: one per device.
    """

    request: PlanRequest
    graph: Graph
    fetches: list[Node | None] = field(default_factory=list)
    kept: list[Node] = field(default_factory=list)
    is_hand_written: bool = False
    notes: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    placement: Placement | None = None
    survey: Survey | None = None
    kernels: tuple[str, ...] = ()
    saved: tuple[Saved, ...] = ()
    memory: tuple[PlannedLoop, ...] = ()
    memory_notes: tuple[str, ...] = ()
    kept_on_host: AbstractSet[Tensor] = frozenset()
    on_host: AbstractSet[Tensor] = frozenset()
    loop_reasons: Mapping[Node, str] = field(default_factory=dict)
    loops: tuple[str, ...] = ()
    streams: Mapping[Node, int] = field(default_factory=dict)
    places: Mapping[Node, object] = field(default_factory=dict)
    partitions: list[Partition] = field(default_factory=list)

    @property
    def order(self) -> list[int | None]:
        """For each fetch, which of the fetched values it is; None for a fetched node."""
        positions = count()
        return [None if fetch is None else next(positions) for fetch in self.fetches]


@dataclass(frozen=True, kw_only=True)
class Context:
    """The setting in which passes run, besides the program; all plans of a session share it, but for the costs.

    Attributes:
        devices: the session's devices, the preferred one first.
        options: the session's options.
        resolve: looks up the state of resources.
        costs: mean nanoseconds that nodes took in earlier runs, by name.
        homes: where state is, of devices with a memory of their own; what a plan puts somewhere is added. None if all
            devices share one memory.
        placed: the devices of nodes by name in a run that is done again.
        warned: ops that the host computes for a card, and of which the log has told.
    """

    devices: Sequence[Device]
    options: PlanOptions
    resolve: Resolve
    costs: Mapping[str, float] = field(default_factory=dict)
    homes: dict[Hashable, str] | None = None
    placed: Mapping[str, str] = field(default_factory=dict)
    warned: set[tuple[Op, str]] = field(default_factory=set)

    @cached_property
    def kernels(self) -> Kernels:
        """Kernels of users for kinds of device."""
        return Kernels(self.options.kernels)

    @cached_property
    def asynchronous(self) -> frozenset[str]:
        """Names of the devices that do not wait for their kernels."""
        return frozenset(device.name for device in self.devices if device.asynchronous is not None)

    @cached_property
    def enqueuing(self) -> frozenset[str]:
        """Names of asynchronous devices whose regions enqueue."""
        return frozenset(device.name for device in self.devices if device.capabilities.runs_regions)

    @cached_property
    def fusing(self) -> frozenset[str]:
        """Names of devices whose kernels may be made of several nodes: cards, as NumPy computes node by node."""
        return frozenset(device.name for device in self.devices if device.capabilities.fuses)

    @cached_property
    def is_on_host(self) -> bool:
        """True if all kernels run on arrays in the host's memory: kernels run while compiling then give the same
        bits.
        """
        return not any(device.capabilities.own_memory for device in self.devices)

    @cached_property
    def has_streams(self) -> bool:
        """True if a device has several streams for kernels."""
        return any(len(device.compute_streams) > 1 for device in self.devices)

    @cached_property
    def has_limits(self) -> bool:
        """True if a device has a memory limit."""
        return any(device.memory.limit is not None for device in self.devices)

    @cached_property
    def swapping(self) -> dict[str, Swapping]:
        """The movers of saved values, by the name of the device, where anything does."""
        return {device.name: device.swapping for device in self.devices if device.swapping is not None}

    @cached_property
    def block_bytes(self) -> int | None:
        """Most bytes of a block of iterations that are done at once; None if they are done one by one."""
        return block_bytes(self.devices)

    @cached_property
    def has_device_loops(self) -> bool:
        """True if all devices whose regions enqueue may, and can, run loops by themselves."""
        cards = [device.capabilities for device in self.devices if device.capabilities.runs_regions]
        return self.options.device_while and bool(cards) and all(card.runs_loops for card in cards)


Run: TypeAlias = "Callable[[Program, Context], None]"
When: TypeAlias = "Callable[[Program, Context], object]"


@dataclass(frozen=True, slots=True)
class Pass:
    """A step on the way from a graph to a plan.

    Attributes:
        name: that of the module that holds it.
        run: does it, in place. It wraps the function that does the work, and so has that function's ``__module__``.
        when: whether it may find something to do; None for always.
        needed: why it may not be left out; empty if plans are right without it.
        is_analysis: it finds something out, or says where nodes run, and changes no edge: nothing is to be verified.
    """

    name: str
    run: Run
    when: When | None = None
    needed: str = ""
    is_analysis: bool = False
