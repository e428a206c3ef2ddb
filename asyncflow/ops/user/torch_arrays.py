"""torch's tensors and the arrays of devices, in one memory: NumPy's on the host, CuPy's on a card."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np

from asyncflow.graph.values.dtypes import DType, bfloat16, dtype_name
from asyncflow.values import Array

TorchTensor: TypeAlias = Any
"""A `torch.Tensor`; PyTorch need not be installed."""


def torch_dtype(torch: ModuleType, dtype: DType) -> object:
    """torch's dtype of that name."""
    return getattr(torch, dtype_name(dtype))


class HostTensors:
    """Tensors and NumPy's arrays."""

    def __init__(self, torch: ModuleType) -> None:
        self._torch = torch

    def active(self) -> AbstractContextManager[object]:
        """Return a context that does nothing."""
        return nullcontext()

    def random_state(self) -> TorchTensor:
        """The state of the random numbers."""
        return self._torch.get_rng_state()

    def tensor(self, value: Array) -> TorchTensor:
        """Return a tensor in the memory of an array or scalar; nothing may write to it."""
        torch, array = self._torch, np.asarray(value)
        if dtype_name(array.dtype) == "bfloat16":
            return self.tensor(array.view(np.int16)).view(torch.bfloat16)
        if any(stride < 0 or stride % array.itemsize for stride in array.strides):
            # torch has no such strides. With an extent of 1 they are in C order: only a real copy is rid of them.
            array = array.copy(order="C")
        # torch warns of arrays that are locked, and has no way to lock a tensor.
        return torch.from_numpy(array if array.flags.writeable else np.asarray(_Unlocked(array)))

    def array(self, tensor: TorchTensor) -> Array:
        """An array in the memory of a tensor."""
        torch = self._torch
        tensor = tensor.resolve_conj().resolve_neg()
        if tensor.dtype is torch.bfloat16:
            bits: Array = tensor.contiguous().view(torch.int16).numpy()
            return bits.view(bfloat16())
        array: Array = tensor.numpy()
        return array

    def places(self, tensors: Iterable[TorchTensor]) -> set[int]:
        """Addresses of the memory of tensors."""
        return {x.untyped_storage().data_ptr() for x in tensors}

    def output(self, tensor: TorchTensor, shared: Collection[int]) -> Array:
        """Return an array in the memory of a tensor; locked if that memory is among `shared`, otherwise free to be
        written to.
        """
        array = self.array(tensor)
        if tensor.untyped_storage().data_ptr() in shared:
            array.flags.writeable = False
        return array


class _Unlocked:
    """A locked array, for code that must be told that it may write to it."""

    def __init__(self, array: Array) -> None:
        interface = array.__array_interface__
        self.array = array
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


class CudaTensors:
    """Tensors and CuPy's arrays, on the stream that is CuPy's current one when they are made."""

    def __init__(self, torch: ModuleType, xp: ModuleType) -> None:
        self._torch = torch
        self._xp = xp
        self._streams: dict[tuple[int, int], AbstractContextManager[object]] = {}

    def active(self) -> AbstractContextManager[object]:
        """A block in which CuPy's current stream is torch's; nothing may be awaited in it."""
        cuda, torch = self._xp.cuda, self._torch
        key = cuda.get_current_stream().ptr, cuda.runtime.getDevice()
        stream = self._streams.get(key)
        if stream is None:
            stream = self._streams[key] = torch.cuda.ExternalStream(key[0], device=f"cuda:{key[1]}")
        stack = ExitStack()
        stack.enter_context(torch.cuda.device(key[1]))
        stack.enter_context(torch.cuda.stream(stream))
        return stack

    def random_state(self) -> TorchTensor:
        """The state of the random numbers."""
        return self._torch.cuda.get_rng_state()

    def tensor(self, value: Array | np.generic) -> TorchTensor:
        """A tensor in the memory of an array; a number of the host is filled in by a kernel."""
        torch = self._torch
        if isinstance(value, np.generic) or not value.size:
            device = f"cuda:{self._xp.cuda.runtime.getDevice()}"
            # An array without elements has no address, by which DLPack finds a card.
            fill = value.item() if value.size else 0
            return torch.full(value.shape, fill, dtype=torch_dtype(torch, value.dtype), device=device)
        if min(value.strides, default=0) < 0:
            # torch has no such strides, and aborts the process. With an extent of 1 they are in C order.
            value = value.copy(order="C")
        # Both sides have one stream, so neither waits.
        return torch.from_dlpack(value)

    def places(self, tensors: Iterable[TorchTensor]) -> set[int]:
        """Addresses of the memory of tensors."""
        return {x.untyped_storage().data_ptr() for x in tensors}

    def output(self, tensor: TorchTensor, shared: Collection[int]) -> Array:
        """An array that owns the memory of a tensor; a copy if that is among `shared`: CuPy cannot lock arrays."""
        tensor = tensor.detach().resolve_conj().resolve_neg()
        is_shared = tensor.untyped_storage().data_ptr() in shared
        array: Array = self._xp.from_dlpack(tensor.clone() if is_shared else tensor.contiguous())
        return array
