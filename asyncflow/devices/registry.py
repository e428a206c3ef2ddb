"""Device lookup: the devices of a machine, and the devices that a session names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from asyncflow.devices.cpu.kind import CpuKind
from asyncflow.devices.cuda.kind import CudaKind
from asyncflow.devices.kinds import DeviceDescription, DeviceKind, DeviceOptions, find_kind, kind_names, register_kind
from asyncflow.devices.names import DeviceName, DeviceSpec
from asyncflow.devices.protocol import Device
from asyncflow.devices.saved.saved_handle import Space
from asyncflow.devices.sim.kind import SimKind
from asyncflow.devices.sim.machine import SimMachine, current_machine
from asyncflow.errors import PlacementError

_SIMULATED = {"cpu": SimKind("cpu"), "sim": SimKind("sim")}
"""The kinds that there are on virtual time."""

for _kind in (CpuKind(), CudaKind(), _SIMULATED["sim"]):
    register_kind(_kind)

_DEFAULT = ("cpu:0",)
_defaults: list[Sequence[str]] = []
"""Devices in place of `_DEFAULT`; the last of them holds."""
_AVAILABLE = "available are logical CPU devices, as many as you like: cpu:0, cpu:1, ..."


@contextmanager
def default_devices(names: Sequence[str]) -> Iterator[None]:
    """Open these devices for sessions inside the block that name none."""
    _defaults.append(names)
    try:
        yield
    finally:
        _defaults.pop()


def open_devices(
    specs: Sequence[str] | None = None,
    memory_limit: int | None = None,
    compute_streams: int = 1,
    *,
    host_memory_limit: int | None = None,
    spill_directory: str | None = None,
) -> tuple[Device, ...]:
    """Open the devices of a session, in the order named; the caller closes them.

    CUDA devices beyond the number of cards share them: on a machine with two, ``cuda:2`` is a second logical device on
    card 0, with streams and a memory limit of its own.

    On virtual time (`asyncflow.testing.virtual_clock`) all devices are simulated, CPUs too.

    Args:
        specs: their names; a kind alone is its device 0. None means ``["cpu:0"]``, and on virtual time all cards of
            the machine.
        memory_limit: bytes that each may hold; None for no limit, and for cards what the card has.
        compute_streams: how many streams of kernels each has.
        host_memory_limit: bytes of saved values of all of them that the host's memory takes; None for no limit.
        spill_directory: where saved values go beyond that, and CPU devices' values; None for nowhere.

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
        default = _defaults[-1] if _defaults else _DEFAULT
        specs = (
            default if machine is None or _defaults else [f"sim:{index}" for index in range(len(machine.spec.cards))]
        )
    names = [_full_name(spec) for spec in specs]
    if not names:
        raise PlacementError(f"devices= is empty and a session needs one; leave it out for {_DEFAULT[0]}; {_AVAILABLE}")
    kinds: list[DeviceKind] = []
    for name in names:
        kinds.append(_available_kind(name, machine))
        if names.count(name) > 1:
            raise PlacementError(f"device {name} is named {names.count(name)} times in devices=; name each once")
    sharing = Counter(kinds)
    host = Space("host", host_memory_limit)
    return tuple(
        kind.open(
            name.index,
            DeviceOptions(
                memory_limit=memory_limit,
                compute_streams=compute_streams,
                sharing=sharing[kind],
                host=host,
                spill_directory=spill_directory,
            ),
        )
        for name, kind in zip(names, kinds, strict=True)
    )


def _available_kind(name: DeviceName, machine: SimMachine | None) -> DeviceKind:
    kind = find_kind(name.kind) if machine is None else _SIMULATED.get(name.kind)
    if kind is None:
        raise PlacementError(
            f"device {name}: there are no real cards on virtual time; the simulated ones are sim:0, sim:1, ..."
        )
    missing = kind.why_not(name.index)
    if missing is not None:
        raise PlacementError(f"device {name}: {missing}{f'; {_AVAILABLE}' if machine is None else ''}")
    return kind


def _full_name(spec: str) -> DeviceName:
    parsed = DeviceSpec.parse(spec)
    return DeviceName(parsed.kind, parsed.index or 0)


def available_devices() -> tuple[DeviceDescription, ...]:
    """Return the devices of this machine, and reasons for missing ones."""
    kinds = [find_kind(name) for name in kind_names()]
    return tuple(line for kind in kinds if kind is not None for line in kind.describe())
