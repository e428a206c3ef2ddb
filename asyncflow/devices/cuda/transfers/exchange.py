"""Arrays exchanged with other libraries on a card, by DLPack and without the host: taken, read, and lent.

A library (CuPy, PyTorch, JAX) orders its work by a *current stream* of each thread. Its arrays are valid in the order
of that stream, and it knows nothing of ours. So whoever reads an array of it does two things: wait for what that stream
has been given, and make that stream wait, before it goes on, for having read. All of this enqueues; nothing here waits
but `read`.

A taken array is copied, on `peer`: a feed is a snapshot, even if its owner changes the array next. A lent array is the
array itself. Its memory belongs to one of our streams, which must not use it again while others still read it; see
`Exchange.take_back`.

``cupy`` is a parameter where there need be no device: only the CUDA backend imports it.
"""

from __future__ import annotations

import sys
from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from asyncflow.devices.cuda.values import CudaArray
from asyncflow.streams.cuda.stream import CudaStream, active

if TYPE_CHECKING:
    from asyncflow.devices.cuda.device import CudaDevice
    from asyncflow.devices.protocol import Deliver
    from asyncflow.devices.values import DType
    from asyncflow.streams.cuda.cupy_types import Cupy, CupyArray, Raw
    from asyncflow.values import Array, Value

HOST_MEMORY = frozenset({1, 3})
"""DLPack's numbers of memory that NumPy reads: the host's, and what CUDA has pinned of it."""

CUDA_MEMORY = frozenset({2, 13})
"""DLPack's numbers of memory that a card's kernels read: the card's, and what CUDA moves by itself."""


@dataclass(slots=True, eq=False, repr=False)
class ForeignArray:
    """An array in a card's memory that another library made.

    Attributes:
        value: that library's object, which has ``__dlpack__``.
        dtype: of its elements.
        shape: its extents.
        card: CUDA's number of the card.
        written: completes when the array is written; None if the library's current stream says so itself.
    """

    value: Any
    dtype: DType
    shape: tuple[int, ...]
    card: int
    written: Raw = None

    @property
    def ndim(self) -> int:
        """The rank."""
        return len(self.shape)

    def __repr__(self) -> str:
        return f"<ForeignArray {type(self.value).__name__} {self.dtype}{list(self.shape)} on card {self.card}>"

    def snapshot(self, cupy: Cupy) -> ForeignArray:
        """Return a copy that does not change any more, made by the library itself in the order of its current stream.

        A later reader may find another current stream, so the copy brings its event. Libraries without such a method,
        as far as we know them, do not change arrays at all.

        Args:
            cupy: the module; None without it, and then no reader will be able to look.
        """
        value = self.value
        if self.written is not None:  # already a copy
            return self
        if not hasattr(value, "clone" if _is_torch(value) else "copy"):
            return self
        device: Any = getattr(value, "device", None)
        with device if hasattr(device, "__enter__") else nullcontext():  # CuPy copies to the current card
            copied = value.clone() if _is_torch(value) else value.copy()
        written = None if cupy is None else _event_after(cupy, value, self.card)
        return ForeignArray(copied, self.dtype, self.shape, self.card, written)


def _event_after(cupy: Cupy, value: Value, card: int) -> Raw:
    """An event after all that the current stream of the value's library has been given."""
    with cupy.cuda.Device(card):
        event = cupy.cuda.Event(disable_timing=True)
        torch: Raw = sys.modules["torch"] if _is_torch(value) else None
        current = (
            cupy.cuda.get_current_stream(card).ptr if torch is None else torch.cuda.current_stream(card).cuda_stream
        )
        cupy.cuda.runtime.eventRecord(event.ptr, current)
    return event


@dataclass(slots=True, eq=False, repr=False)
class Loan:
    """A loan: keeps memory of a device for as long as other code has an array in it, and then hands it back.

    The last reference may go on any thread, at any bytecode: `give_back` has to be a bare ``deque.append``.
    """

    array: CupyArray
    give_back: Raw

    def __del__(self) -> None:
        self.give_back(self.array)


def view(cupy: Cupy, foreign: ForeignArray) -> tuple[CupyArray, Raw]:
    """A CuPy array in C order in the same memory, and an event that completes when all is written to it.

    One in another order is copied to C order first, in the memory of CuPy's own pool.

    Ordering: what the library's current stream has been given so far, or what `foreign.written` says. CuPy's current
    stream on the card waits for it.
    """
    array = foreign.value if isinstance(foreign.value, cupy.ndarray) else cupy.from_dlpack(foreign.value)
    with cupy.cuda.Device(foreign.card):
        if foreign.written is not None:
            cupy.cuda.runtime.streamWaitEvent(cupy.cuda.get_current_stream(foreign.card).ptr, foreign.written.ptr)
        if not array.flags.c_contiguous:
            array = cupy.ascontiguousarray(array)
        written = cupy.cuda.Event(disable_timing=True)  # spins: a stream has few events on which a thread can sleep
        written.record()
    return array, written


def follow(stream: CudaStream, event: Raw) -> None:
    """Let a stream of ours wait for a ``cupy.cuda.Event``."""
    stream.work.given += 1
    with stream:
        stream.raw.wait_event(event)


def hold_back(cupy: Cupy, card: int, event: Raw) -> None:
    """Make the current streams of code that may next write to an array on the card wait for ``event``."""
    for stream in current_streams(cupy, card):
        cupy.cuda.runtime.streamWaitEvent(stream, event.ptr)


def current_streams(cupy: Cupy, card: int) -> list[int]:
    """The streams of a card that CuPy and PyTorch use on this thread, as CUDA's pointers."""
    found = [cupy.cuda.get_current_stream(card).ptr]
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        found.append(torch.cuda.current_stream(card).cuda_stream)
    return list(dict.fromkeys(found))


def read(cupy: Cupy, array: CupyArray, written: Raw, card: int) -> Array:
    """The values of a CuPy array, when the event has completed. Blocks: call it on a thread that may wait."""
    with cupy.cuda.Device(card):
        # Not the default stream, which would also wait for other work of the card. No memory is allocated on this one,
        # so no pool keeps any for it.
        copying = cupy.cuda.Stream(non_blocking=True)
        copying.wait_event(written)
        ready = cupy.cuda.Event(block=True, disable_timing=True)
        ready.record(copying)
        ready.synchronize()
        values: Array = array.get(stream=copying)
    return values


class Exchange:
    """The exchange of one device; its methods belong to the thread of the event loop, and none blocks.

    Attributes:
        returned: arrays that others have let go of, for `take_back`.
    """

    __slots__ = ("_device", "returned")

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self.returned: deque[Raw] = deque()

    def feed(self, foreign: ForeignArray, deliver: Deliver, name: str) -> None:
        """Copy an array of another library in: ``deliver(device_value, error)`` is called at once.

        Ordering: after the work given to that library's current stream so far, before later work on it.
        """
        self._device.answer(deliver, self._copied, foreign, name)

    def _copied(self, foreign: ForeignArray, name: str) -> CudaArray:
        cupy = self._device.cupy
        there, written = view(cupy, foreign)
        copied = self._device.copies.copied(there, foreign.card, name, partial(follow, event=written), foreign)
        if there.nbytes:
            hold_back(cupy, foreign.card, copied.written.point.raw)
        return copied

    def lend(self, value: CudaArray) -> CupyArray:
        """Return the array itself as a ``cupy.ndarray``, for other code, which must not write to it.

        One with negative strides is copied: PyTorch aborts the process where it gets such an array.

        Ordering: work that CuPy's current stream is given from here on finds it written.
        """
        cupy, card, array = self._device.cupy, self._device.physical, value.array
        if not value.nbytes:
            return array
        if min(array.strides, default=0) < 0:
            array = self._device.copies.contiguous(value, is_copy=True)
        for current in (cupy.cuda.get_current_stream(card), cupy.cuda.get_current_stream()):
            current.wait_event(value.written.point.raw)  # `__dlpack__` reads the stream of the current card
        memory = cupy.cuda.memory.UnownedMemory(array.data.ptr, value.nbytes, Loan(array, self.returned.append), card)
        return cupy.ndarray(array.shape, array.dtype, cupy.cuda.memory.MemoryPointer(memory, 0), array.strides)

    def take_back(self) -> None:
        """Use the memory of arrays again that others have let go of.

        Ordering: after what CuPy's and PyTorch's current streams have been given so far.
        """
        if active.stream is not None:
            return  # inside one of our blocks, the caller's current stream is hidden
        device = self._device
        returned = [self.returned.popleft() for _ in range(len(self.returned))]
        try:
            self._catch_up()
        except RuntimeError as error:
            device.cause_of(error)  # notes that the device is lost, and the next launch raises
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
                    stream.work.given += 1
                    stream.raw.wait_event(event)

    def close(self) -> None:
        """Forget the returned loans: the device has no work any more."""
        self.returned.clear()


def _is_torch(value: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)
