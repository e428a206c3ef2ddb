"""Which devices are there, and how does a session get the ones it names?"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from asyncflow.devices import hardware
from asyncflow.devices.cpu.device import CpuDevice
from asyncflow.devices.cuda.backend import cuda_backend
from asyncflow.devices.cuda.device import CudaDevice
from asyncflow.devices.memory import format_bytes
from asyncflow.devices.names import DeviceName, DeviceSpec
from asyncflow.devices.protocol import Device, has_own_memory
from asyncflow.devices.sim.device import SimDevice
from asyncflow.devices.sim.machine import SimMachine, current_machine
from asyncflow.errors import PlacementError

_DEFAULT = ("cpu:0",)
_AVAILABLE = "available are logical CPU devices, as many as you like: cpu:0, cpu:1, ..."


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceDescription:
    """One line of ``asyncflow devices``."""

    name: str
    """Such as ``cpu:0``; a kind alone where there is none of it."""
    available: bool
    detail: str
    """What it is; where it is not available, why."""


def open_devices(
    specs: Sequence[str] | None = None, memory_limit: int | None = None, compute_streams: int = 1
) -> tuple[Device, ...]:
    """The devices of a session, in the order named; the caller closes them.

    CUDA devices beyond the number of cards share them: on a machine with two, ``cuda:2`` is a second logical device on
    card 0, with streams and a memory limit of its own.

    On virtual time (`asyncflow.testing.virtual_clock`) all devices are simulated, CPUs too.

    Args:
        specs: their names; a kind alone is its device 0. None means ``["cpu:0"]``, and on virtual time all cards of
            the machine.
        memory_limit: bytes that each may hold; None for no limit, and for cards what the card has.
        compute_streams: how many streams of kernels each has.

    Raises:
        PlacementError: a name that is none, is there twice, or is of a kind that is not available; or no name at all.
        ValueError: ``memory_limit`` or ``compute_streams`` is no positive int.
    """
    machine = current_machine()
    if isinstance(specs, str):
        raise PlacementError(f"devices= is a list of names, not one str; say devices=[{specs!r}]")
    if specs is not None and not isinstance(specs, Iterable):
        raise PlacementError(
            f"devices= is a list of names, such as ['cpu:0', 'cpu:1']; got {type(specs).__name__} {specs!r}"
        )
    if specs is None:
        specs = _DEFAULT if machine is None else [f"sim:{index}" for index in range(len(machine.spec.cards))]
    names = [_full_name(spec) for spec in specs]
    if not names:
        raise PlacementError(f"devices= is empty and a session needs one; leave it out for {_DEFAULT[0]}; {_AVAILABLE}")
    for name in names:
        _check_available(name, machine)
        if names.count(name) > 1:
            raise PlacementError(f"device {name} is named {names.count(name)} times in devices=; name each once")
    if machine is None:
        sharing = sum(name.kind == "cpu" for name in names)
        return tuple(
            _open_cuda(name.index, memory_limit, compute_streams)
            if name.kind == "cuda"
            else CpuDevice(name.index, memory_limit=memory_limit, compute_streams=compute_streams, sharing=sharing)
            for name in names
        )
    return tuple(
        SimDevice(
            machine,
            name.index,
            kind="sim" if name.kind == "sim" else "cpu",
            memory_limit=memory_limit,
            compute_streams=compute_streams,
        )
        for name in names
    )


def _open_cuda(index: int, memory_limit: int | None, compute_streams: int) -> CudaDevice:
    """One of a session's CUDA devices; those beyond the number of cards share them in turn."""
    backend = cuda_backend()
    card = index % len(backend.cards)
    return CudaDevice(backend.cupy, index, physical=card, memory_limit=memory_limit, compute_streams=compute_streams)


def has_one_memory(devices: Sequence[Device]) -> bool:
    """Whether all of the devices can follow a reference into the memory of any other."""
    return not any(has_own_memory(device) for device in devices)


def check_event_loop(devices: Sequence[Device], loop: asyncio.AbstractEventLoop) -> None:
    """Raise unless the time of `loop` is that of the simulated devices: on another, nothing would ever be done.

    Raises:
        RuntimeError: it is not.
    """
    for device in devices:
        if isinstance(device, SimDevice) and device.machine.loop is not loop:
            raise RuntimeError(
                f"device {device.name} is simulated, and this event loop ({type(loop).__module__}."
                f"{type(loop).__qualname__}) is not on its virtual time; start the program's coroutine by "
                "clock.run(main()) inside `with virtual_clock() as clock`, and by asyncio.run(main()) or "
                "af.run(main()) under `asyncflow simulate`"
            )


def available_devices() -> tuple[DeviceDescription, ...]:
    """The devices that this machine has, and for those it has not, why."""
    memory = hardware.usable_memory()
    parts = (
        hardware.processor(),
        f"{hardware.usable_cores()} cores",
        "memory unknown" if memory is None else format_bytes(memory),
        hardware.blas_library(),
    )
    cpu = DeviceDescription(name="cpu:0", available=True, detail=", ".join(parts))
    backend = cuda_backend()
    if backend.cupy is None:
        return (cpu, DeviceDescription(name="cuda", available=False, detail=f"off: {backend.reason}"))
    cards = (
        DeviceDescription(name=f"cuda:{card}", available=True, detail=line) for card, line in enumerate(backend.cards)
    )
    return (cpu, *cards)


def _full_name(spec: str) -> DeviceName:
    parsed = DeviceSpec.parse(spec)
    return DeviceName(parsed.kind or "cpu", parsed.index or 0)


def _check_available(name: DeviceName, machine: SimMachine | None) -> None:
    if name.kind == "cuda":
        _check_cuda(name, machine)
    if name.kind == "sim":
        _check_simulated(name, machine)


def _check_simulated(name: DeviceName, machine: SimMachine | None) -> None:
    if machine is None:
        raise PlacementError(
            f"device {name}: simulated devices exist on virtual time only; open the session inside "
            f"asyncflow.testing.virtual_clock(); {_AVAILABLE}"
        )
    cards = machine.spec.cards
    if name.index >= len(cards):
        plural = f"{len(cards)} cards, sim:0 to sim:{len(cards) - 1}" if len(cards) > 1 else "1 card, sim:0"
        raise PlacementError(
            f"device {name}: the simulated machine has {plural}; name one of them, or give virtual_clock() a machine "
            f'with more, such as "{name.index + 1} x {cards[-1].name}"'
        )


def _check_cuda(name: DeviceName, machine: SimMachine | None) -> None:
    if machine is not None:
        raise PlacementError(
            f"device {name}: there are no real cards on virtual time; the simulated ones are sim:0, sim:1, ..."
        )
    backend = cuda_backend()
    if backend.cupy is None:
        raise PlacementError(f"device {name}: CUDA is off on this machine: {backend.reason}; {_AVAILABLE}")
