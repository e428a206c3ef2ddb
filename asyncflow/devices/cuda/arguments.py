"""Arguments and results of the kernels of a CUDA device: arrays ordered after whoever wrote them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from asyncflow.devices.cuda.memory import home_of
from asyncflow.devices.cuda.values import CudaArray, CudaHome, CudaOpaque
from asyncflow.devices.values import as_scalar, is_plain, is_shape, stays_on_host
from asyncflow.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncflow.devices.protocol import KernelInfo, Placed
    from asyncflow.streams.cuda.cupy_types import Cupy, CupyArray
    from asyncflow.streams.cuda.stream import CudaStream
    from asyncflow.values import Array, Value


class KernelHome(CudaHome, Protocol):
    """The device of kernels, as their arguments see it: a `CudaDevice`."""

    @property
    def cupy(self) -> Cupy:
        """The module of CuPy."""

    @property
    def compute_streams(self) -> Sequence[CudaStream]:
        """Streams of the device's kernels."""

    def copy_in(self, value: Array, name: str, /) -> CudaArray:
        """Copy an array of the host to the device."""

    def hold(self, stream: CudaStream, /, *arrays: CupyArray) -> None:
        """Keep memory of other streams until the work given to `stream` in this turn is done."""


class Values:
    """Device values in and out of the kernels of one stream."""

    __slots__ = ("_device", "_is_alone", "_ndarray", "stream")

    def __init__(self, device: KernelHome, stream: CudaStream) -> None:
        self.stream = stream
        self._device = device
        self._ndarray = device.cupy.ndarray
        self._is_alone = len(device.compute_streams) == 1

    def raw(self, value: Placed, name: str) -> Placed:
        """Return the argument of a kernel for `value`, which its stream now waits for.

        A host array of rank 0, such as a row of a pool gives, becomes a scalar: CuPy refuses such arrays.
        """
        kind = type(value)
        if kind is CudaArray:
            if value.stream is not self.stream:
                self._order(value, name)
            return value.array
        if kind is CudaOpaque:
            value.order(self.stream)
            return value.value
        return as_scalar(value) if kind is np.ndarray else value

    def uploaded(self, value: Value, name: str) -> Placed:
        """The result of `raw`; an array of the host is copied to the device first."""
        if type(value) is np.ndarray and value.ndim and not stays_on_host(value):
            value = self._device.copy_in(value, name)
            self.hold((value,))
        return self.raw(value, name)

    def brought(self, arguments: tuple[Placed, ...], positions: Sequence[int]) -> tuple[Placed, ...]:
        """`arguments`, with copies on the device for arrays of the host at these positions."""
        found = [index for index in positions if type(arguments[index]) is np.ndarray]
        if not found:
            return arguments
        values = list(arguments)
        for index in found:
            values[index] = self._device.copy_in(values[index], "upload")
        return tuple(values)

    def _order(self, value: CudaArray, name: str) -> None:
        device = self._device
        if value.home is not device:
            raise InternalError(
                f"{name!r} runs on {device.name} and was given {value.name!r}, which is on {value.device} and was not "
                "sent"
            )
        if self._is_alone:
            value.settle(self.stream)
            return
        value.order(self.stream)

    def hold(self, arguments: Sequence[Value]) -> None:
        """Keep memory of other streams, and devices, until the work given to this stream in this turn is done.

        Call it before a launch: memory held for earlier launches may be handed over from then on.
        """
        if not self._is_alone:
            self.stream.note_launched()
            self._device.hold(self.stream, *[x.array for x in arguments if type(x) is CudaArray])
        for x in arguments:
            if type(x) is CudaOpaque and (x.is_foreign or not self._is_alone):
                self.stream.hold(x)

    def inside(self, arguments: Sequence[Value]) -> list[CupyArray]:
        """Return the arrays in stores that are in memory of other streams.

        A kernel that takes an array out of its store has used it, perhaps, after the last reference to it has gone.
        """
        if self._is_alone:
            return []
        found: list[CupyArray] = []
        looked_at: list[Value] = [x.value for x in arguments if type(x) is CudaOpaque]
        while looked_at:  # nested stores add to the list
            value = looked_at.pop()
            if isinstance(value, self._ndarray):
                found += [value] if home_of(value) is not self.stream else []
            elif (held := getattr(value, "held", None)) is not None:
                looked_at += [*held.since(0), *held.buffers()]
        return found

    def placed(self, place: int, output: Value, info: KernelInfo) -> Placed:
        """Return the device value for an output; a host array stays if the compiler has planned that."""
        if place in info.code.host_outputs and type(output) is np.ndarray:
            return output
        return self.wrapped(output, info.name)

    def wrapped(self, output: Value, name: str) -> Placed:
        """Return the device value for a kernel's output."""
        if isinstance(output, self._ndarray):
            return CudaArray(output, self._device, self.stream, name)
        output = as_scalar(output)
        if is_plain(output):
            return output
        if isinstance(output, np.ndarray):
            return output if is_shape(output) or stays_on_host(output) else self._device.copy_in(output, name)
        return CudaOpaque(output, self._device, self.stream)
