"""The common base of values of asynchronous devices, and which values of the host such a device leaves there."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NoReturn, TypeAlias

import numpy as np

from asyncflow.values import Array, Index, Kernel, Namespace

DType: TypeAlias = "np.dtype[Any]"

Shape: TypeAlias = tuple[int, ...]

ArraySpec: TypeAlias = "tuple[DType, Shape]"
"""dtype and shape of an array."""

Deliver: TypeAlias = Callable[[Any, BaseException | None], None]
"""Takes ``(value, error)``; one of the two is None."""

Placed: TypeAlias = Any
"""A value where a device keeps it: a `DeviceValue`, a number of the host, or an object that only kernels understand."""

Into: TypeAlias = Callable[[Placed], Placed]
"""Takes an array of the host, and gives memory of a device for its copy; None for new memory."""


class StoreNamespace(ModuleType):
    """The array library `xp` for stores that launch kernels of their own, with each function wrapped to note them."""

    def __init__(self, name: str, doc: str, xp: ModuleType) -> None:
        super().__init__(name, doc)
        self._xp = xp

    def __getattr__(self, name: str) -> object:
        found: object = getattr(self._xp, name)
        if isinstance(found, type | ModuleType) or not callable(found):
            return found
        call = self._noting(found)
        setattr(self, name, call)  # so that the next look-up does not come here
        return call

    @abstractmethod
    def _noting(self, function: Kernel) -> Kernel:
        """Return a function that calls `function`, and notes the kernel that this launches."""


class NoData(np.ndarray):  # of any rank and dtype
    """The one element that an array of a simulation of shapes has at every index: its base, as it has no data."""

    __slots__ = ()


class DeviceValue:
    """A value on a device, valid in the order of its streams; anything else is a *host value*.

    It is no `abc.ABC`, whose `isinstance` is slower: every launch asks what its arguments are.
    """

    __slots__ = ()

    @abstractmethod
    def to_host(self, deliver: Deliver) -> None:
        """Copy the value to the host: later, ``deliver(host_value, error)`` is called once."""


class DeviceArray(DeviceValue):
    """An array that only its device's work may look into: Python and NumPy are refused.

    Attributes:
        name: of the node that made it.
        can_lend: whether `lend` has something to give.
    """

    __slots__ = ()

    name: str
    can_lend = False

    def lend(self) -> Placed:
        """Return the array itself, in its library's class, for other code, which must not write to it."""
        raise NotImplementedError(f"arrays on {self.device} cannot be lent")

    def __getitem__(self, key: Index) -> Placed:
        """A view of a part, where arrays may stay when a run has ended; the key is one of NumPy's basic ones."""
        raise NotImplementedError(f"arrays on {self.device} have no parts")

    @property
    @abstractmethod
    def device(self) -> str:
        """The name of the logical device it is on."""

    @property
    @abstractmethod
    def dtype(self) -> DType:
        """Of the elements."""

    @property
    @abstractmethod
    def shape(self) -> Shape:
        """The extents."""

    @property
    def ndim(self) -> int:
        """The rank."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.size * self.dtype.itemsize

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} {self.dtype}{list(self.shape)} on {self.device}>"

    def __array__(self, *_: object, **__: object) -> NoReturn:
        raise self._unseen("NumPy")

    def __bool__(self) -> NoReturn:
        raise self._unseen("Python")

    def __iter__(self) -> NoReturn:
        raise self._unseen("Python")

    @abstractmethod
    def _unseen(self, who: str) -> Exception:
        """The error to raise where `who` reads it on the host."""


@dataclass(slots=True, eq=False, repr=False)
class RowsToJoin:
    """Arrays, some of them on a device, that are fed as one: they are joined on the device.

    Attributes:
        rows: the arrays.
        join: ``join(xp, rows)`` returns the joined array.
    """

    rows: Sequence[Placed]
    join: Callable[[Namespace, Sequence[Placed]], Array]


_OF_NUMPY = (np.ndarray, np.generic)  # building a union in each call would take longer than the check


def is_array(value: object) -> bool:
    """Return True if a device can hold a host value: an array or scalar of NumPy's, not of strings or objects."""
    return isinstance(value, _OF_NUMPY) and value.dtype.kind not in "OSUT"


def stays_on_host(value: object) -> bool:
    """Return True if devices leave a host value on the host: anything that is no `is_array`, and counters and
    predicates.
    """
    if not isinstance(value, _OF_NUMPY) or value.dtype.kind in "OSUT":
        return True
    return value.ndim == 0 and value.dtype.kind in "biu"


_FEW = 64
"""Maximum number of elements of a shape."""

_PLAIN = (type(None), str, bytes, bool, int, float, complex, np.generic)


def is_plain(value: object) -> bool:
    """Return True if a value made on the device belongs to the host all the same: a number or text of Python's or
    NumPy's.
    """
    return isinstance(value, _PLAIN)


def is_shape(value: object) -> bool:
    """Return True if a value made by the host may be a shape, and stays there: a short vector of integers."""
    return isinstance(value, np.ndarray) and value.ndim <= 1 and value.dtype.kind in "biu" and value.size <= _FEW


def as_scalar(value: Placed) -> Placed:
    """A NumPy scalar for an array of rank 0 of numbers, which CuPy would refuse; anything else as it is."""
    is_number = isinstance(value, np.ndarray) and value.ndim == 0 and value.dtype.kind not in "OSUT"
    return value[()] if is_number else value
