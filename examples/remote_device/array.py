"""Arrays in the memory of another process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from asyncflow.devices import DeviceArray

if TYPE_CHECKING:
    from asyncflow.devices.protocol import ArraySpec, Deliver
    from examples.remote_device.device import RemoteDevice


class RemoteArray(DeviceArray):
    """An array in the memory of the process, which drops it when the last reference here is gone.

    Attributes:
        home: the device.
        number: its number in the process.
        unsent: its elements, until the process needs them.
    """

    __slots__ = ("_charge", "dtype", "home", "name", "number", "shape", "unsent")

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    def __init__(
        self, home: RemoteDevice, spec: ArraySpec, name: str, unsent: np.ndarray[Any, Any] | None = None
    ) -> None:
        """Count an array of this dtype and shape, which a message yet to be sent fills.

        Raises:
            MemoryLimitExceeded: it does not fit.
        """
        self._charge = 0
        self.home = home
        self.dtype, self.shape = spec
        self.name = name
        self.unsent = unsent
        self._charge = home.memory.charge(self.nbytes, name)
        self.number = home.next_number()

    def __del__(self) -> None:
        if self._charge:
            self.home.memory.credit(self._charge)
            if self.unsent is None:
                self.home.freed.append(self.number)

    @property
    def device(self) -> str:
        """The name of the device."""
        return self.home.name

    def to_host(self, deliver: Deliver) -> None:
        """Ask the process for a copy."""
        self.home.copy_to_host(self, deliver)

    def _unseen(self, who: str) -> Exception:
        return TypeError(f"{who} reads {self.name!r}, which is in the memory of {self.device}; fetch the value first")
