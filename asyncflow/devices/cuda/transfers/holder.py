"""Values on a CUDA device that outlive a run, and that kernels of other sessions may read: see `CudaHolder`.

A session's variable is read by that session alone. Every session may read a container's variable, on any device, event
loop and thread, while the writing session goes on or after it was closed. So nothing here asks the writer. A reader
records an event on the writer's stream by itself, behind all work given to that stream by then. It then copies the
array, and refers to it until the copy is done.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from asyncflow.devices.cuda.transfers.buffers import BuffersByVariable
from asyncflow.devices.cuda.transfers.exchange import follow, read
from asyncflow.devices.cuda.values import CudaArray
from asyncflow.streams.cuda.stream import active, capturing

if TYPE_CHECKING:
    from asyncflow.devices.cuda.device import CudaDevice
    from asyncflow.streams.cuda.cupy_types import CupyArray
    from asyncflow.values import Array


class CudaHolder:
    """The memory of one CUDA device, for values that are kept; the handles are `CudaArray`.

    `keep`, `use`, `receive` and `fetched` belong to the thread of the device's event loop.

    Attributes:
        buffers: memory of variables that CUDA graphs use.
    """

    __slots__ = ("_device", "buffers")

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self.buffers = BuffersByVariable(device)

    @property
    def device(self) -> str:
        """The name of the device."""
        return self._device.name

    def check(self) -> None:
        """Raise if the device is lost.

        Raises:
            DeviceLostError: it is.
        """
        self._device.check()

    def keep(self, array: CupyArray) -> CudaArray:
        """A handle for an array that the kernel which is running has made; in C order, which any device can copy."""
        device = self._device
        if not array.flags.c_contiguous:
            array = device.cupy.ascontiguousarray(array)
        return CudaArray(array, device, active.stream or device.compute, device.pool.label)

    def use(self, handle: CudaArray) -> CupyArray:
        """The array, which work given to the stream that is active finds written."""
        stream = active.stream or self._device.compute
        handle.order(stream)
        # A copy from the host is in memory of the first stream, also if this stream was the first to wait for it.
        self._device.hold(stream, handle.array)
        return handle.array

    def receive(self, handle: CudaArray, source: CudaHolder) -> CudaArray:
        """A copy, here, of an array of another device, of whichever session; both are kept until it is made.

        Raises:
            DeviceLostError: one of the two devices is lost.
            MemoryLimitExceeded: it does not fit.
        """
        self.check()
        source.check()
        device = self._device
        try:
            order = partial(follow, event=source._written(handle))
            return device.copies.copied(handle.array, source._device.physical, device.pool.label, order)
        except RuntimeError as error:
            raise source._device.cause_of(device.cause_of(error))  # noqa: B904 - which has its cause

    def to_host(self, handle: CudaArray) -> Array:
        """A copy in the host's memory. Blocks until the writer's stream has done its present work.

        Raises:
            DeviceLostError: the device is lost.
        """
        device = self._device
        self.check()
        try:
            return read(device.cupy, handle.array, self._written(handle), device.physical)
        except RuntimeError as error:
            raise device.cause_of(error)  # noqa: B904 - which has its cause

    async def fetched(self, handle: CudaArray) -> CupyArray:
        """The same without blocking, on the event loop of the device, which is open.

        Raises:
            DeviceLostError: the device is lost.
        """
        return await self._device.fetched(handle)

    def _written(self, handle: CudaArray) -> CupyArray:
        """An event that completes when the array is written; recorded by the caller's thread.

        The device may be closed: its CUDA streams live on, and its remaining work is done.
        """
        device, cupy = self._device, self._device.cupy
        with capturing, cupy.cuda.Device(device.physical):
            event = cupy.cuda.Event(block=True, disable_timing=True)
            cupy.cuda.runtime.eventRecord(event.ptr, handle.stream.raw.ptr)
        return event
