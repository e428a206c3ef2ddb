"""Arrays that a CUDA device takes from other libraries, and those that it lends them, both without the host.

What is taken is copied, on `peer`: a feed is a snapshot, whatever its owner does next. What is lent is the array
itself. Its memory belongs to a stream of ours, which must not use it again while others still read it; see
`Exchange.take_back`.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from asyncflow.devices.cuda.values import CudaArray, Landing
from asyncflow.devices.foreign import Loan, current_streams, hold_back, view
from asyncflow.streams.cuda.stream import active_stream

if TYPE_CHECKING:
    from asyncflow.devices.cuda.device import CudaDevice
    from asyncflow.devices.foreign import ForeignArray
    from asyncflow.devices.protocol import Deliver


class Exchange:
    """What one device takes and lends; its methods belong to the thread of the event loop, and none blocks."""

    __slots__ = ("_device", "_returned")

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._returned: deque[Any] = deque()

    def feed(self, foreign: ForeignArray, deliver: Deliver, name: str) -> None:
        """Copy an array of another library in: ``deliver(device_value, error)`` is called at once.

        Ordering: after what that library's current stream has been given so far, before what it is given next.
        """
        self._device.answer(deliver, self._copied, foreign, name)

    def _copied(self, foreign: ForeignArray, name: str) -> CudaArray:
        device = self._device
        cupy, peer = device.cupy, device.peer
        there, written = view(cupy, foreign)
        here = device.copies.new(there.shape, there.dtype, name)
        peer.wait(device.compute.record())  # earlier kernels may still be using the memory
        with peer.activate():
            peer.raw.wait_event(written)
        if there.nbytes:
            device.copies.copy_from(foreign.card, here, there, name)
        copied = peer.record()
        landing = Landing(here, device.compute)
        peer.hold(landing, there, foreign)
        hold_back(cupy, foreign.card, copied.raw)
        return CudaArray(here, device.name, peer, name, copied, landing)

    def lend(self, value: CudaArray) -> Any:
        """The array itself as a ``cupy.ndarray``, for others, who must not write to it.

        One with negative strides is copied: PyTorch aborts the process where it gets such an array.

        Ordering: work that CuPy's current stream is given from here on finds it written.
        """
        cupy, card, array = self._device.cupy, self._device.physical, value.array
        if not value.nbytes:
            return array
        if min(array.strides, default=0) < 0:
            array = self._device.copies.contiguous(value, is_copy=True)
        for current in (cupy.cuda.get_current_stream(card), cupy.cuda.get_current_stream()):
            current.wait_event(value.written.raw)  # `__dlpack__` looks at the stream of whichever card is current
        memory = cupy.cuda.memory.UnownedMemory(array.data.ptr, value.nbytes, Loan(array, self._returned.append), card)
        return cupy.ndarray(array.shape, array.dtype, cupy.cuda.memory.MemoryPointer(memory, 0), array.strides)

    def take_back(self) -> None:
        """Use the memory of arrays again that others have let go of.

        Ordering: after what CuPy's and PyTorch's current streams have been given so far.
        """
        if not self._returned or active_stream() is not None:
            return  # inside a block of ours, nobody can see whose stream was the current one
        device = self._device
        returned = [self._returned.popleft() for _ in range(len(self._returned))]
        try:
            self._catch_up()
        except RuntimeError as error:
            device.cause_of(error)  # notes that the device is lost, which whoever launches next is told
        del returned

    def _catch_up(self) -> None:
        """Let our kernels wait for what the current streams of other libraries have been given."""
        device = self._device
        cupy, card = device.cupy, device.physical
        with cupy.cuda.Device(card):
            for current in current_streams(cupy, card):
                event = cupy.cuda.Event(disable_timing=True)
                cupy.cuda.runtime.eventRecord(event.ptr, current)
                for stream in device.compute_streams:
                    stream.raw.wait_event(event)

    def close(self) -> None:
        """Forget what has come back: there is no work of ours any more."""
        self._returned.clear()


__all__ = ["Exchange"]
