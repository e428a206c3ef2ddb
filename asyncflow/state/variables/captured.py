"""`CapturedVariable`: a variable as the code of a CUDA graph finds it, which is bound to addresses and runs once.

The graph reads a buffer in place of the variable, and stores its last value there. So the kernels of the variable's
nodes are bound to this object, and not to the variable's state, while the code is captured.

For any other reader values never change. So a graph may write to a buffer only once nothing else refers to the value in
it. Reference counts tell: a fetch, a checkpoint or another run that still reads a value holds the `HeldValue`, its
handle or its array. The device counts references to the latter two.
"""

from __future__ import annotations

from dataclasses import dataclass
from sys import getrefcount
from threading import Lock
from typing import cast

from asyncflow.graph.values.dtypes import DType
from asyncflow.state.variables.held import HeldValue, Holder, holder_of
from asyncflow.state.variables.variable_state import VariableState
from asyncflow.values import Array, Kernel, Namespace, Value


class CapturedVariable:
    """A stand-in for a `VariableState`, with the methods that kernels call.

    Attributes:
        value: what a read gives now; a capture sets it before the code runs, and takes it afterwards.
        is_written: True if the code may write it.
    """

    __slots__ = ("_state", "_xp", "is_written", "value")

    def __init__(self, state: VariableState, xp: Namespace, *, is_written: bool) -> None:
        self._state = state
        self._xp = xp
        self.is_written = is_written
        self.value: Value = None

    # -- for kernels ---------------------------------------------------------------------------------------------

    def read(self) -> Value:
        """The value."""
        return self.value

    def read_in(self, xp: Namespace) -> Value:
        """The value, of the namespace that the code was bound for."""
        return self.value

    def assign(self, x: Array, xp: Namespace | None = None) -> Value:
        """Make `x` the value, and return it."""
        self._state.check(x)
        self.value = x
        return x

    def apply(self, fn: Kernel, *args: Value, xp: Namespace | None = None) -> Value:
        """Make ``fn(old, *args)`` the value, and return it."""
        return self.assign(fn(self.value, *args))

    # -- for every launch ----------------------------------------------------------------------------------------

    def given(self) -> Value | None:
        """The variable's value, for a kernel of the device: an array of its namespace, or a number; None without one.

        Raises:
            DeviceLostError: it was in the memory of a device that is lost.
            MemoryLimitExceeded: it is elsewhere, and does not fit.
        """
        return None if self._state.value is None else self._state.read_in(self._xp)

    @property
    def name(self) -> str:
        """The variable's name."""
        return self._state.name

    @property
    def key(self) -> object:
        """The variable's state, by which other graphs know it."""
        return self._state

    @property
    def kind(self) -> tuple[DType, tuple[int, ...]] | None:
        """The dtype and shape of the present value; None without a value."""
        value = self._state.value
        if value is None:
            return None
        # A holder's handle has dtype and shape, too.
        array = cast(Array, value.handle) if type(value) is HeldValue else value
        return array.dtype, array.shape

    # -- for graphs bound to addresses, as of CUDA ---------------------------------------------------------------

    @property
    def handle(self) -> object | None:
        """The handle of the present value, or of its copy; None if the device has neither."""
        state = self._state
        value, copies = state.value, state.copies
        if copies is not None and copies[0] is not value:
            copies = state.copies = None  # drop copies of an older value, which would keep its buffer
        if type(value) is HeldValue and value.holder is holder_of(self._xp):
            return value.handle
        here = None if copies is None else copies[1].get(self._xp)
        return here.handle if type(here) is HeldValue else None

    @property
    def is_alone(self) -> bool:
        """True if nothing but the state refers to the present value, apart from the value's handle."""
        state = self._state
        if type(state.value) is not HeldValue:
            return True
        copies = state.copies
        return getrefcount(state.value) == _IN_SLOT + (copies is not None and copies[0] is state.value)

    def present(self) -> list[object]:
        """The present value as the state keeps it, in a list: no other reference to it is made."""
        return [self._state.value]

    def move(self, handle: object) -> None:
        """Take note that `handle` has a copy of the present value. A value of the same device is then let go."""
        state, here = self._state, HeldValue(handle, _holder(self._xp))
        if not state.lock.acquire(blocking=False):
            return  # another thread is about to replace the value
        value = state.value
        if type(value) is HeldValue and value.holder is here.holder:
            here.host = value.host
            state.value = here
        elif value is not None:
            others = {} if state.copies is None or state.copies[0] is not value else state.copies[1]
            state.copies = (value, {**others, self._xp: here})
        state.lock.release()

    def replace(self, handle: object, present: list[object]) -> bool:
        """Make a value with `handle` the present one: a copy of it so far, to which a graph is about to write.

        A reader on another thread finds it written once that thread gets the lock `capturing`. So the caller holds that
        lock, and this one must not be waited for.

        Returns False if the graph must not be launched: `present` is not the present value any more, or in use.
        """
        state = self._state
        if not state.lock.acquire(blocking=False):
            return False
        is_present = state.value is present[0]
        if is_present:
            state.value = HeldValue(handle, _holder(self._xp))
            state.copies = None
        state.lock.release()
        was_there = isinstance(present[0], HeldValue) and present[0].handle is handle
        return is_present and (not was_there or getrefcount(present[0]) == _IN_LIST)

    # -- for graphs that are given values, as of simulated cards -------------------------------------------------

    @property
    def lock(self) -> Lock:
        """Held between `given` and `put`, so that no write of another thread comes in between."""
        return self._state.lock

    def put(self, x: Value) -> None:
        """Make the result of a launch the variable's value."""
        self._state.put(x, self._xp)


def _holder(xp: Namespace) -> Holder:
    holder = holder_of(xp)
    assert holder is not None, "arrays of the host have no addresses"
    return holder


@dataclass(slots=True)
class _Slot:
    value: object


_SLOT, _LIST = _Slot(object()), [object()]
_IN_SLOT, _IN_LIST = getrefcount(_SLOT.value), getrefcount(_LIST[0])
"""Counts of references to an object that one slot, or one list, holds."""
