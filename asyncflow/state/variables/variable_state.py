"""`VariableState`: the value of a variable, in one session or in a container.

Values never change in place: a write computes the new value beside the old one and swaps it in, if the old one is still
there, and else computes again. So a read takes no lock, and a reader keeps the value it saw. No lock is held while a
kernel runs, except by a write that has lost this race many times.

Where a value is:

======================  ====================  ==================================================
written last by         the value is          read elsewhere, in this or another session
======================  ====================  ==================================================
no run, or the host     an array of NumPy's   copied by a device with a memory of its own, once
such a device           a `HeldValue` there   copied by the device or host that reads it, once
a simulated device      an array of NumPy's   as it is, which takes no virtual time
a session that closed   an array of NumPy's   as above: closing brings it to the host
======================  ====================  ==================================================
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from threading import Lock
from typing import Any, ClassVar

import numpy as np

from asyncflow.errors import AsyncflowError, CheckpointError, DeviceLostError, DTypeError, ShapeError
from asyncflow.graph.values.dtypes import dtype_name
from asyncflow.graph.values.shapes import format_shape, is_static, is_subshape
from asyncflow.graph.values.spec import Spec
from asyncflow.state.variables.held import HeldValue, Holder, as_host_value, holder_of
from asyncflow.state.variables.immutable import immutable
from asyncflow.values import Array, Kernel, Namespace, Value

MOST_RACES = 32
"""Number of lost races after which a write makes others wait: faster writers could win for ever."""


class VariableState:
    """The value of a variable in one session or container; thread-safe.

    Invariants: `value` is None, a NumPy scalar, an immutable array, or a `HeldValue`; it fits `spec`; it is only ever
    replaced as a whole, under `lock`. Values made by a device with a memory of its own stay there. Every other device
    that reads such a value, or a NumPy array, keeps a copy here until it reads another value. Only where nothing else
    refers to a value may a CUDA graph write to its memory: it is then another `HeldValue` (`captured`).

    Attributes:
        name: of the variable.
        spec: of all its values.
        value: the present one.
        copies: a value and its copies by namespace: a `HeldValue`, or an array where there is no holder.
        lock: held while the value is replaced.
    """

    __slots__ = ("__weakref__", "_shape", "copies", "lock", "name", "spec", "value")

    def __init__(self, name: str, spec: Spec, initial: Array | None = None) -> None:
        self.name = name
        self.spec = spec
        self.value: Array | HeldValue | None = None if initial is None else immutable(initial)
        self._shape = spec.shape if is_static(spec.shape) else None
        self.lock = Lock()
        self.copies: tuple[Array | HeldValue, dict[Namespace, Array | HeldValue]] | None = None

    def __repr__(self) -> str:
        return f"<VariableState {self.name} {self.spec}{'' if self.value is not None else ', no value yet'}>"

    def read(self) -> Array:
        """The value, on the host. Blocks until that is written and copied, if a device holds it.

        Raises:
            AsyncflowError: there is none yet.
            DeviceLostError: it was in the memory of a device that is lost.
        """
        value = self.value
        if value is None or type(value) is HeldValue:
            return self.read_in(np)
        return value  # fast path: on a CPU, all reads of variables end here

    def _found(self) -> Array | HeldValue:
        value = self.value
        if value is None:
            raise AsyncflowError(
                f"variable {self.name!r} is read before it has a value; assign to it earlier in the program or in an "
                f"earlier run, or give it an initial value: Variable(value, name={self.name!r})"
            )
        return value

    def read_in(self, xp: Namespace) -> Array:
        """Return the value for a kernel of namespace `xp`; a value elsewhere is copied once, at the first read.

        Raises:
            AsyncflowError: there is none yet.
            DeviceLostError: it was in the memory of a device that is lost.
        """
        value: Array = self._converted(self._found(), xp)
        return value

    def _converted(self, value: Any, xp: Namespace) -> Any:
        if type(value) is not HeldValue:
            if xp is np or not isinstance(value, np.ndarray):
                return value
        elif xp is np:
            return self._on_host(value)
        here = value
        if type(value) is not HeldValue or value.holder is not holder_of(xp):
            copies = self.copies
            if copies is None or copies[0] is not value:
                copies = self.copies = (value, {})
            here = copies[1].get(xp)
            if here is None:
                here = copies[1][xp] = self._copied(value, xp)
        return here.holder.use(here.handle) if type(here) is HeldValue else here

    def _copied(self, value: Array | HeldValue, xp: Namespace) -> Array | HeldValue:
        holder = holder_of(xp)
        if holder is None:
            return xp.asarray(self._on_host(value) if type(value) is HeldValue else value)
        if type(value) is not HeldValue:
            return HeldValue(holder.keep(xp.asarray(value)), holder)
        self._check_there(value)
        return HeldValue(holder.receive(value.handle, value.holder), holder)

    def _on_host(self, value: HeldValue) -> Array:
        if value.host is None:
            self._check_there(value)
        return value.on_host()

    def _check_there(self, value: HeldValue) -> None:
        try:
            value.holder.check()
        except DeviceLostError as error:
            raise DeviceLostError(
                f"the value of variable {self.name!r} was in the memory of {value.holder.device}, which is lost, and "
                "the value with it; assign another one before anything reads it"
            ) from error

    def assign(self, x: Any, xp: Namespace = np) -> Value:
        """Make `x` the value, copied unless it is immutable, and return the value.

        Raises:
            DTypeError, ShapeError: it does not fit.
        """
        self.check(x)
        given = immutable(x)
        value = _held(given, xp)
        with self.lock:
            self.value = value
        return given

    def put(self, x: Value, xp: Namespace) -> None:
        """Make `x`, an array of `xp` that fits, the value; the caller holds `lock`."""
        self.value = _held(immutable(x), xp)

    def apply(self, fn: Kernel, *args: Value, xp: Namespace = np) -> Value:
        """Make ``fn(old, *args)`` the value and return it; call `fn` again if another write came between.

        `fn` computes with arrays of the namespace `xp`.

        Raises:
            AsyncflowError: there is no old value.
            DeviceLostError: the old value was in the memory of a device that is lost.
            DTypeError, ShapeError: the new one does not fit; the old one stays.
        """
        for _ in range(MOST_RACES):
            old = self._found()
            given = self._computed(fn, old, args, xp)
            value = _held(given, xp)
            with self.lock:
                if self.value is old:
                    self.value = value
                    return given
        with self.lock:
            given = self._computed(fn, self._found(), args, xp)
            self.value = _held(given, xp)
            return given

    def _computed(self, fn: Kernel, old: Array | HeldValue, args: tuple[Value, ...], xp: Namespace) -> Value:
        new = fn(self._converted(old, xp), *args)
        self.check(new)
        return immutable(new)

    @property
    def last_write(self) -> object:
        """An object that only the last write has made: the value, which no write changes in place."""
        return self.value

    # -- checkpoints ---------------------------------------------------------------------------------------------

    kind: ClassVar[str] = "variable"

    def capture(self) -> Mapping[str, Array | HeldValue]:
        """Capture the present value, by reference; an empty mapping without a value."""
        value = self.value
        return {} if value is None else {"": value}

    def check_arrays(self, arrays: Mapping[str, Array]) -> None:
        """Check that the captured array fits the variable.

        Raises:
            CheckpointError: it has another dtype or shape.
        """
        for array in arrays.values():
            found = Spec(array.dtype, array.shape)
            if found.dtype != self.spec.dtype or not is_subshape(found.shape, self.spec.shape):
                raise CheckpointError(f"it is {found} there, and the variable is {self.spec}")

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Make the captured array the value: a device that reads it copies it then."""
        given = arrays.get("")
        if given is not None and not given.ndim:
            given = immutable(given)
        with self.lock:
            self.value = given

    def successor(self, arrays: Mapping[str, Array]) -> VariableState:
        """A state of the same variable, with a value that was captured."""
        made = VariableState(self.name, self.spec)
        made.restore(arrays)
        return made

    def forget(self) -> object:
        """Drop the value, which is not read any more; return the objects that hold the memory until dropped."""
        with self.lock:
            held = self.value, self.copies
            self.value = self.copies = None
        return held

    # -- between sessions ----------------------------------------------------------------------------------------

    def read_on_host(self) -> Callable[[], object] | None:
        """The function to call, on a thread that may block, so that `read` does not, unless a device writes again.

        None: `read` does not block as it is.
        """
        value = self.value
        return value.on_host if type(value) is HeldValue and value.host is None else None

    async def leave(self, holders: Collection[Holder]) -> None:
        """Bring the value to the host if it is with one of `holders`, whose devices are about to be closed."""
        copies, value = self.copies, self.value
        if copies is not None:
            for xp in list(copies[1]):
                if holder_of(xp) in holders:
                    copies[1].pop(xp, None)
            if copies[0] is not value:  # copies of an old value, which may be with `holders`, too
                self.copies = None
        if type(value) is not HeldValue or value.holder not in holders:
            return
        host = value.host
        if host is None:
            try:
                host = as_host_value(await value.holder.fetched(value.handle))
            except DeviceLostError:
                return  # readers get the error
        with self.lock:
            if self.value is value:
                self.value = host
                self.copies = None

    def check(self, x: Array) -> None:
        """Check that a value fits the variable.

        Raises:
            DTypeError, ShapeError: it does not.
        """
        dtype = getattr(x, "dtype", None)
        if dtype != self.spec.dtype:
            found = type(x).__name__ if dtype is None else dtype_name(dtype)
            raise DTypeError(f"variable {self.name!r} holds {dtype_name(self.spec.dtype)}, not {found}")
        if x.shape != self._shape and (self._shape is not None or not is_subshape(x.shape, self.spec.shape)):
            raise ShapeError(
                f"variable {self.name!r} is {self.spec}; a value of shape {format_shape(x.shape)} does not fit"
            )


def _held(value: Any, xp: Namespace) -> Any:
    """The value as a state keeps it, which a kernel of the namespace `xp` has made."""
    if xp is np:
        return value
    holder = holder_of(xp)
    if holder is None or isinstance(value, np.ndarray | np.generic):
        return value
    return HeldValue(holder.keep(value), holder)
