"""Kernels of a remote device: their places, and the messages of their calls."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncflow.devices import CoroutineKernel, KernelInfo
from asyncflow.devices.protocol import recording
from asyncflow.devices.values import as_scalar
from examples.remote_device.array import RemoteArray

if TYPE_CHECKING:
    from examples.remote_device.device import RemoteDevice


class RemoteKernel:
    """A kernel that the process runs: a call sends the numbers of its inputs and outputs, and waits for nothing."""

    def __init__(self, device: RemoteDevice, info: KernelInfo) -> None:
        self._device = device
        self._info = info
        self._number: int | None = None

    def __call__(self, *inputs: Any) -> Any:
        """Outputs whose elements are there once the process has computed them.

        Raises:
            DeviceLostError: the process has died.
            MemoryLimitExceeded: the outputs do not fit.
        """
        device, info = self._device, self._info
        if info.on_host is not None and not any(isinstance(value, RemoteArray) for value in inputs):
            with device.timed(info.name, "host"):
                return info.on_host(*inputs)
        device.check()
        specs = info.infer([(value.dtype, value.shape) for value in inputs], {})
        assert specs is not None, f"{info.name} reads no values on the host, and so its inputs' shapes are enough"
        outputs = []
        for spec in specs:
            assert spec is not None
            outputs.append(RemoteArray(device, spec, info.name))
        arguments, numbers = [device.use(value) for value in inputs], [x.number for x in outputs]
        device.tell(device.timed(info.name, "compute"), "call", self._bound(), arguments, numbers)
        return outputs[0] if info.single else tuple(outputs)

    def _bound(self) -> int:
        if self._number is None:
            recipe = self._info.recipe
            assert recipe is not None
            self._number = self._device.next_kernel()
            self._device.tell(None, "bind", self._info.name, recipe.op, dict(recipe.attrs))
        return self._number


class MetadataKernel:
    """A kernel that looks at dtypes and shapes alone, which are known here."""

    def __init__(self, device: RemoteDevice, kernel: Callable[..., Any], info: KernelInfo) -> None:
        self._device = device
        self._kernel = kernel
        self._info = info

    def __call__(self, *inputs: Any) -> Any:
        """Return the kernel's results."""
        with self._device.timed(self._info.name, "host"):
            found = self._kernel(*[_stand_in(value) if isinstance(value, RemoteArray) else value for value in inputs])
        return as_scalar(found) if self._info.single else tuple(map(as_scalar, found))


class HostKernel(CoroutineKernel):
    """A kernel that runs here: it waits for copies of its inputs, and copies of its outputs go to the process."""

    def __init__(self, device: RemoteDevice, kernel: Callable[..., Any], info: KernelInfo) -> None:
        self._device = device
        self._kernel = kernel
        self._info = info

    def __call__(self, *inputs: Any) -> Coroutine[Any, Any, Any]:
        """A coroutine of the outputs.

        Raises (from the coroutine):
            DeviceLostError: the process has died.
            MemoryLimitExceeded: the outputs do not fit.
            BaseException: what the kernel raises, as it is.
        """
        return self._run(inputs, self._device.recorded())

    async def _run(self, inputs: Sequence[Any], spans: list[Any] | None) -> Any:
        with recording(self._device, spans):
            waiting = [self._device.fetched(value) for value in inputs]
        values = [await value if isinstance(value, asyncio.Future) else value for value in waiting]
        result = self._kernel(*values)
        if inspect.isawaitable(result):
            result = await result
        if self._info.single:
            return self._device.brought(result, self._info.name)
        return tuple([self._device.brought(output, self._info.name) for output in result])


def _stand_in(value: RemoteArray) -> Any:
    """An array of the same dtype and shape that takes no memory."""
    return np.broadcast_to(np.zeros((), value.dtype), value.shape)
