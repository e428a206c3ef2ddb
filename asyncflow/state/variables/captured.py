"""`CapturedVariable`: a variable as the code of a CUDA graph finds it, which is bound to buffers and runs once.

The graph reads a buffer in place of the variable, and its last value is a result of the graph. So the kernels of the
variable's nodes are bound to this object, and not to the variable's state, while the code is captured.
"""

from __future__ import annotations

from threading import Lock

from asyncflow.state.variables.variable_state import VariableState
from asyncflow.values import Array, Kernel, Namespace, Value


class CapturedVariable:
    """A stand-in for a `VariableState`, with the methods that kernels call.

    Attributes:
        value: what a read gives now; the launch of a graph sets it before the code runs, and takes it afterwards.
    """

    __slots__ = ("_state", "_xp", "value")

    def __init__(self, state: VariableState, xp: Namespace) -> None:
        self._state = state
        self._xp = xp
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

    # -- for launches --------------------------------------------------------------------------------------------

    def given(self) -> Value | None:
        """The variable's value, for a kernel of the device: an array of its namespace, or a number; None without one.

        Raises:
            DeviceLostError: it was in the memory of a device that is lost.
            MemoryLimitExceeded: it is elsewhere, and does not fit.
        """
        return None if self._state.value is None else self._state.read_in(self._xp)

    @property
    def lock(self) -> Lock:
        """Held between `given` and `put`, so that no write of another thread comes in between."""
        return self._state.lock

    def put(self, x: Value) -> None:
        """Make the result of a launch the variable's value."""
        self._state.put(x, self._xp)
