"""Common parts of tests of placement: devices that only have costs, ops that only cost, graphs placed on them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import asyncflow as af
from asyncflow.compiler.placement.constraints import resolve_requests
from asyncflow.compiler.placement.place import Placement, place
from asyncflow.compiler.program.extract import extract
from asyncflow.devices.figures.host import NO_TIMES, HostTimes
from asyncflow.devices.memory import MemoryAccount
from asyncflow.devices.protocol import Capabilities
from asyncflow.graph.building.build import apply
from asyncflow.graph.op import OPAQUE, Op

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from asyncflow.devices.protocol import Device
    from asyncflow.graph.graph import Graph
    from asyncflow.graph.values.spec import Spec
    from asyncflow.values import Kernel

MS = 1e6
"""ns."""


@dataclass(eq=False)
class FakeDevice:
    """A device as placement sees it.

    `slowness` is ns per operation, so that an op of `MS` operations takes a millisecond on the usual one. `host` is
    what each call of the host takes, such as a launch, in ns.
    """

    name: str
    slowness: float = 1.0
    limit: int | None = None
    latency: float = 50_000.0
    ns_per_byte: float = 0.0
    host: float = 0.0
    memory: MemoryAccount = field(init=False)
    n_asked: int = 0

    def __post_init__(self) -> None:
        self.memory = MemoryAccount(self.name, self.limit)

    @property
    def kind(self) -> str:
        return self.name.partition(":")[0]

    @property
    def asynchronous(self) -> FakeDevice | None:
        return None if self.kind == "cpu" else self

    @property
    def host_times(self) -> HostTimes:
        ns, launches = self.host, dict.fromkeys(NO_TIMES.launch_ns, self.host)
        return HostTimes(driver="the host", run_ns=ns, send_ns=ns, region_ns=ns, launch_ns=launches)

    @property
    def capabilities(self) -> Capabilities:
        is_card = self.kind == "cuda"
        return Capabilities(own_memory=is_card, kernels="arrays" if is_card else "all")

    def kernel_ns(self, flops: float, nbytes: float) -> float:
        self.n_asked += 1
        return 2_000.0 + flops * self.slowness

    def transfer_ns(self, nbytes: float, target: Device) -> float:
        self.n_asked += 1
        return self.latency + nbytes * self.ns_per_byte


def devices(*names: str, **options: Any) -> list[Device]:
    return [cast("Device", FakeDevice(name, **options)) for name in names]


def _flops(inputs: object, outputs: object, *, flops: float, spec: object) -> float:
    return flops


def _kernel(xp: Any, *, flops: float, spec: Spec) -> Kernel:
    return lambda *_: xp.zeros(spec.shape, spec.dtype)


WORK = Op(name="work", infer=lambda *_, flops, spec: spec, kernel=_kernel, flops=_flops, traits=OPAQUE)
"""Takes as long, and makes a value as large, as its attributes say."""


def work(*inputs: af.Tensor, ms: float = 1.0, shape: tuple[int, ...] = (4,), name: str | None = None) -> af.Tensor:
    return apply(WORK, *inputs, flops=ms * MS, spec=af.spec("float32", shape), name=name)[0]


@dataclass
class Placed:
    """A placed graph."""

    graph: Graph
    placement: Placement

    def __getitem__(self, node: str | af.Tensor) -> str:
        """The device of a node, by its name in the user's graph."""
        name = node if isinstance(node, str) else node.node.name
        device = self.graph.node(name).device
        assert device is not None
        return device

    def why(self, node: str | af.Tensor) -> str:
        return self.placement.reasons[node if isinstance(node, str) else node.node.name]


def placed(
    graph: Graph,
    fetches: Sequence[Any],
    on: Sequence[Device],
    costs: Mapping[str, float] | None = None,
    *,
    soft: bool = True,
) -> Placed:
    """`graph` extracted, its constraints resolved, and placed. Every node must have come to one of the devices."""
    copied = extracted(graph, fetches)
    notes = resolve_requests(copied, graph, on, soft=soft)
    placement = place(copied, on, costs, notes=notes)
    names = {device.name for device in on}
    for node in copied.walk():
        assert node.device in names
        assert placement.devices[node.name] == node.device
        assert placement.reasons[node.name]
    return Placed(copied, placement)


def extracted(graph: Graph, fetches: Sequence[Any]) -> Graph:
    feeds = [node.outputs[0] for node in graph.nodes if node.op.name == "placeholder"]
    return extract(graph, fetches, feeds).graph
