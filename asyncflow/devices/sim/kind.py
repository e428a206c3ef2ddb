"""The kind ``sim``, and the replacement for the kind ``cpu`` on virtual time."""

from __future__ import annotations

from typing import Literal

from asyncflow.devices.kinds import DeviceDescription, DeviceKind, DeviceOptions
from asyncflow.devices.sim.device import SimDevice
from asyncflow.devices.sim.machine import current_machine


class SimKind(DeviceKind):
    """Devices of the simulated machine that is in use, if there is one."""

    def __init__(self, name: Literal["sim", "cpu"]) -> None:
        """Make the kind of this name: the machine's cards, or CPUs of its host."""
        self.name: Literal["sim", "cpu"] = name

    def open(self, index: int, options: DeviceOptions) -> SimDevice:
        """Card `index` of the machine, or a CPU."""
        machine = current_machine()
        assert machine is not None, "there is none, as `why_not` says"
        return SimDevice(
            machine,
            index,
            kind=self.name,
            memory_limit=options.memory_limit,
            compute_streams=options.compute_streams,
            host=options.host,
            spills=options.spill_directory is not None,
        )

    def why_not(self, index: int) -> str | None:
        """Return the reason why there is no such card."""
        machine = current_machine()
        if machine is None:
            inside = "open the session inside asyncflow.testing.virtual_clock()"
            return f"simulated devices exist on virtual time only; {inside}"
        cards = machine.spec.cards
        if self.name == "cpu" or index < len(cards):
            return None
        plural = f"{len(cards)} cards, sim:0 to sim:{len(cards) - 1}" if len(cards) > 1 else "1 card, sim:0"
        return (
            f"the simulated machine has {plural}; name one of them, or give virtual_clock() a machine with more, such "
            f'as "{index + 1} x {cards[-1].name}"'
        )

    def describe(self) -> tuple[DeviceDescription, ...]:
        """Return no description: this machine has no simulated devices."""
        return ()
