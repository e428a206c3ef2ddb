"""Simulated machines with round figures, and kernels for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from asyncflow.devices.figures.host import Host
from asyncflow.devices.figures.presets import Card, Link, MachineSpec
from asyncflow.devices.protocol import ArraySpec, KernelInfo
from asyncflow.devices.sim.device import SimDevice
from asyncflow.devices.sim.machine import SimMachine
from asyncflow.devices.values import DeviceValue
from asyncflow.streams.virtual import VirtualClockLoop
from asyncflow.values import Array

US = 1_000
KERNEL_NS, DISPATCH_NS, HOST_OP_NS = 2 * US, 1 * US, 500
LATENCY_NS = 3 * US

CARD = Card(
    name="round",
    flops_per_s=1e12,
    bytes_per_s=1e11,
    memory_bytes=1 << 30,
    kernel_s=2e-6,
    copy_engines=2,
)
# What launches a kernel takes DISPATCH_NS, half of it to interpret its node; so does what copies.
HOST = Host(
    name="round",
    summary="one thread, at round figures",
    launches="nodes",
    run_s=0.0,
    node_s=5e-7,
    primitive_s=0.0,
    step_s=1e-7,
    view_s=2e-7,
    region_s=3e-6,
    launch_s=5e-7,
    product_s=5e-7,
    library_s=5e-7,
    graph_s=4e-6,
    buffer_s=3e-7,
    copy_s=1e-6,
    event_s=0.0,
    delivery_s=0.0,
)
HOST_LINK = Link(name="host", bytes_per_s=1e10, latency_s=3e-6)
PEER_LINK = Link(name="peer", bytes_per_s=4e10, latency_s=1e-6)


def machine_of(
    loop: VirtualClockLoop,
    cards: int = 2,
    *,
    card: Card = CARD,
    peer: Link | None = PEER_LINK,
    message_s: float = 0.0,
    host: Host = HOST,
    **options: Any,
) -> SimMachine:
    return SimMachine(MachineSpec((card,) * cards, HOST_LINK, peer, message_s), loop, host=host, **options)


def size_of(shape: Sequence[int]) -> int:
    return int(np.prod(shape))


def bind(
    device: SimDevice,
    kernel: Callable[..., Any],
    name: str = "kernel",
    *,
    flops: float | None = None,
    infer: Callable[[Sequence[ArraySpec]], Sequence[ArraySpec] | None] | None = None,
    **options: Any,
) -> Callable[..., Any]:
    """A kernel of one operation an output element, or of `flops` operations; its output is like its first input."""

    def count(inputs: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> float:
        return float(sum(map(size_of, outputs))) if flops is None else flops

    def find(specs: Sequence[ArraySpec], values: Mapping[int, Array]) -> Sequence[ArraySpec] | None:
        return infer(specs) if infer is not None else specs[:1] or None

    info = KernelInfo(name=name, flops=count, infer=find, **options)
    return device.bind(kernel, info)


async def fetched(device: SimDevice, value: DeviceValue) -> Any:
    """Return the result of a copy to the host, once it has ended."""
    future = device.machine.loop.create_future()
    value.to_host(lambda array, error: future.set_result((array, error)))
    array, error = await future
    assert error is None
    return array


def received(device: SimDevice, value: Any, source: SimDevice) -> Any:
    """Return the result of a receive that ends at once."""
    got: list[Any] = []
    device.receive(value, source, lambda array, error: got.append((array, error)))
    ((array, error),) = got
    assert error is None, error
    return array


async def idle(device: SimDevice) -> None:
    """Until all work is done."""
    future = device.machine.loop.create_future()
    device.when_done(lambda _: future.set_result(None))
    await future
