"""Memory with fixed addresses for values of variables, which CUDA graphs write in place."""

from __future__ import annotations

from sys import getrefcount
from types import SimpleNamespace
from typing import TYPE_CHECKING, Protocol
from weakref import WeakKeyDictionary, WeakValueDictionary

from asyncflow.devices.cuda.values import CudaArray, CudaHome

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncflow.devices.cuda.memory import CudaPool
    from asyncflow.devices.values import ArraySpec
    from asyncflow.streams.cuda.cupy_types import Cupy, CupyArray
    from asyncflow.streams.cuda.stream import CudaStream


class MemoryHome(CudaHome, Protocol):
    """The device of buffers, as they see it: a `CudaDevice`."""

    pool: CudaPool

    @property
    def cupy(self) -> Cupy:
        """The module of CuPy."""


class LentMemory:
    """Memory of a graph for one of its outputs, which users of the output hold after a launch.

    Attributes:
        array: the memory; no other reference to it, to its pointer or its memory is kept by the graph.
    """

    __slots__ = ("array",)

    def __init__(self, array: CupyArray) -> None:
        self.array = array

    def references(self) -> tuple[int, ...]:
        """Return the numbers of references to the array, its pointer, and the pointer's memory."""
        return getrefcount(self.array), getrefcount(self.array.data), getrefcount(self.array.data.mem)

    @property
    def is_held(self) -> bool:
        """True if a user of the output refers to the memory."""
        return self.references() != _WITHOUT_USERS

    @property
    def shows_users(self) -> bool:
        """True if the memory has no user now, and the counts would show each kind of user.

        Another version of CuPy or Python may count in another way: outputs are then not lent.
        """
        return not self.is_held and all(
            self._shows(user) for user in (lambda x: x, lambda x: x.view(), lambda x: x.data, lambda x: x.data.mem)
        )

    def _shows(self, use: Callable[[CupyArray], object]) -> bool:
        user = use(self.array)
        is_seen = self.is_held
        del user
        return is_seen and not self.is_held


_WITHOUT_USERS = LentMemory(SimpleNamespace(data=SimpleNamespace(mem=object()))).references()
"""Counts of references to an array in a slot, to its pointer and the pointer's memory, that have no other owner."""


class VariableBuffer:
    """Memory with a fixed address for the values of a variable.

    Attributes:
        handle: of the value in it, which readers get. Graphs refer to the buffer, and not to the handle or its array.
    """

    __slots__ = ("__weakref__", "_unheld", "handle")

    def __init__(self, device: MemoryHome, stream: CudaStream, kind: ArraySpec, name: str) -> None:
        dtype, shape = kind
        device.pool.label = name
        self.handle = CudaArray(device.cupy.empty(shape, dtype), device, stream, name)
        self._unheld = self._references()

    @property
    def array(self) -> CupyArray:
        """The memory, in C order."""
        return self.handle.array

    def _references(self) -> tuple[int, ...]:
        # Views refer to the array, to its pointer or to the pointer's memory.
        return (
            getrefcount(self.handle),
            getrefcount(self.handle.array),
            getrefcount(self.handle.array.data),
            getrefcount(self.handle.array.data.mem),
        )

    def is_held(self, values: int) -> bool:
        """Return True if anything but `values` values of the variable's state refers to the memory."""
        first, *others = self._unheld
        return self._references() != (first + values, *others)


class VariableBuffers:
    """The buffers of one variable on one compute stream, for values of one dtype and shape.

    They last as long as the graphs that are bound to them.
    """

    __slots__ = ("_device", "_kind", "_made", "_name", "_stream")

    def __init__(self, device: MemoryHome, stream: CudaStream, kind: ArraySpec, name: str) -> None:
        self._device = device
        self._stream = stream
        self._kind = kind
        self._name = name
        self._made: WeakValueDictionary[int, VariableBuffer] = WeakValueDictionary()

    def get(self, turn: int) -> VariableBuffer:
        """Return the buffer of a turn, 0 or 1; made when first asked for, while the stream is active.

        Raises:
            MemoryLimitExceeded: it does not fit.
        """
        buffer = self._made.get(turn)
        if buffer is None:
            buffer = self._made[turn] = VariableBuffer(self._device, self._stream, self._kind, self._name)
        return buffer

    def turn_of(self, handle: object) -> int | None:
        """Return the turn of the buffer with that handle; None if it is of none."""
        return next((turn for turn, buffer in self._made.items() if buffer.handle is handle), None)


class BuffersByVariable:
    """The buffers of all variables on one device."""

    __slots__ = ("_device", "_found")

    def __init__(self, device: MemoryHome) -> None:
        self._device = device
        self._found: WeakKeyDictionary[object, dict[tuple[CudaStream, ArraySpec], VariableBuffers]] = (
            WeakKeyDictionary()
        )

    def get(self, state: object, stream: CudaStream, kind: ArraySpec, name: str) -> VariableBuffers:
        """Return the buffers of the variable with that state, called `name`, for values of one dtype and shape."""
        found = self._found.setdefault(state, {})
        buffers = found.get((stream, kind))
        if buffers is None:
            buffers = found[stream, kind] = VariableBuffers(self._device, stream, kind, name)
        return buffers
