"""Values of variables in the memory of a device, where only its kernels find them at once.

A device with a memory of its own has a `Holder`, the attribute ``holder`` of its array namespace. A kernel that writes
a variable there leaves a `HeldValue`. A reader elsewhere, in another session too, has the holders copy it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, final

import numpy as np

from asyncflow.values import Array, Namespace


class Holder(Protocol):
    """The memory of one device of one session, as states see it.

    A *handle* is what `keep` makes of an array: it knows when it is written. Only a CUDA graph writes to it again, once
    nothing else refers to its `HeldValue`, to the handle or to the array.
    """

    @property
    def device(self) -> str:
        """The name of the device."""

    def keep(self, array: Array) -> object:
        """A handle for an array that the kernel which is running has made; another array, if it is a view with gaps."""

    def use(self, handle: object) -> Array:
        """The array of a handle of this holder, for the kernel which is running: it finds it written."""

    def receive(self, handle: object, source: Holder) -> object:
        """A handle for a copy, here, of an array that is with `source`; never blocks.

        Called where a kernel of this device is running. Both arrays are kept until the copy is done.
        """

    def to_host(self, handle: object) -> Array:
        """A copy of the array in the host's memory, from any thread. Blocks until the work that writes it has ended."""

    async def fetched(self, handle: object) -> Array:
        """`to_host` that does not block, on the event loop of the device."""

    def check(self) -> None:
        """Raise if the device, with all its memory, is lost.

        Raises:
            DeviceLostError: it is.
        """


@final
@dataclass(slots=True, eq=False, repr=False)
class HeldValue:
    """A value in the memory of a device.

    Attributes:
        handle: of `holder`, for the array.
        holder: where it is.
        host: a read-only copy for the host, made at the first need.
    """

    handle: object
    holder: Holder
    host: Array | None = None

    def __repr__(self) -> str:
        return f"<HeldValue on {self.holder.device}>"

    def on_host(self) -> Array:
        """Return the value for the host: a read-only array, or a scalar. The first call blocks."""
        if self.host is None:
            self.host = as_host_value(self.holder.to_host(self.handle))
        return self.host


def holder_of(xp: Namespace) -> Holder | None:
    """The holder of the arrays of a namespace; None for the host, and for simulated devices, which use NumPy's."""
    holder: Holder | None = None if xp is np else getattr(xp, "holder", None)
    return holder


def as_host_value(array: Any) -> Any:
    """A fresh array as a state's value: read-only, and of rank 0 a scalar."""
    if isinstance(array, np.ndarray):
        if not array.ndim:
            return array[()]
        array.flags.writeable = False
    return array
