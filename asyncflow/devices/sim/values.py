"""Values that flow through a graph on simulated devices: arrays that know when, where and by which work they were
written.

Anything that is neither a `SimArray` nor a `SimOpaque` is a *host value*: counters, predicates, strings. A simulation
of shapes has a `SimUnknown` in place of a host value that depends on data.

A `Storage` is a piece of the device's memory. It counts from the launch that fills it to the death of the last array
viewing it. Then it goes back to the pool of the stream it was allocated for *at once, with no event*, as in CuPy's
memory pools: the next work on that stream may overwrite it. So at that moment every work that touched it must come
before the next work of that stream; if not, that is a hazard. Memory allocated by the device is then overwritten with a
pattern, so that late reads show in the results.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NoReturn, Protocol

import numpy as np

from asyncflow.devices.memory import ChargedAccount, format_bytes, owner_of
from asyncflow.devices.values import DeviceArray, DeviceValue, DType, NoData
from asyncflow.errors import FetchError, HazardError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from asyncflow.devices.protocol import Deliver, Placed, Shape
    from asyncflow.streams.sim.stream import SimEvent, SimStream
    from asyncflow.values import Array, Index, Value


SMALL_BYTES = 4096
"""A simulation of shapes only still computes values up to this size."""

_POISON_BYTE = b"\xdd"


class SimMemoryAccount(ChargedAccount):
    """The memory of a simulated device: a buffer counts while a copy still uses it, even without other references.

    One thread drives all devices of a machine, and it alone charges. So the account needs no lock. Other threads may
    look at the figures, and then settle at the same time.
    """

    __slots__ = ()

    @property
    def used(self) -> int:
        """Bytes held now."""
        if self._credited:
            self._settle()
        return self.at_most

    def charge(self, nbytes: int, label: str, *, is_again: bool = False) -> int:
        """See `ChargedAccount`."""
        if self._credited:
            self._settle()
        used, limit = self.at_most + nbytes, self._limit
        if limit is not None and used > limit:
            return super().charge(nbytes, label, is_again=is_again)
        # A lock would take a tenth of a simulation's time. As in `ChargedAccount.charge`, no call stands between
        # reading `at_most` and writing it, so that no other thread or finalizer comes between.
        self.at_most = used
        self.total += nbytes
        if used > self._lap:
            self._lap = used
        requests = self.requests
        requests.allocations = charge = requests.allocations + 1
        self._charges[charge] = nbytes, label
        return charge

    def _settle(self) -> None:
        credited = self._credited
        while credited:
            try:
                charge = credited.popleft()
            except IndexError:  # another thread has settled the last one
                return
            nbytes, _ = self._charges.pop(charge)
            self.at_most -= nbytes

    def check(self, nbytes: int, label: str) -> None:
        """Raise unless `nbytes` more fit.

        Raises:
            MemoryLimitExceeded: they do not.
        """
        limit = self._limit
        if limit is None or self.used + nbytes <= limit:
            return
        if not self.make_room(nbytes) or self.used + nbytes > limit:
            raise self.refusal(nbytes, label, limit)

    def check_charge(self, nbytes: int, label: str) -> None:
        """Raise as `check` does, just before `charge` is called, which settles freed bytes."""
        if self._limit is not None and self.at_most + nbytes > self._limit:
            self.check(nbytes, label)

    def one_kernel(self) -> AbstractContextManager[None]:
        """Return a context for one kernel, which has its outputs before it drops values taken out of a store: both
        count at once.
        """
        return _OneKernel(self)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Credit memory freed inside the block at once, even while a kernel runs, which did not take it."""
        credit, self.credit = self.credit, self._credited.append
        try:
            yield
        finally:
            self.credit = credit


class _OneKernel:
    """The time in which a kernel runs, at whose end freed bytes are credited to an account."""

    __slots__ = ("_account", "_at_once", "_late")

    def __init__(self, account: SimMemoryAccount) -> None:
        self._account = account
        self._late: list[int] = []

    def __enter__(self) -> None:
        self._at_once, self._account.credit = self._account.credit, self._late.append

    # Only the account is late: the memory is back in its pool, and its hazards were checked.
    def __exit__(self, *exc: object) -> None:
        self._account.credit = at_once = self._at_once
        for charge in self._late:
            at_once(charge)


class StorageWatch(Protocol):
    """The part of a simulated machine that storage reports to."""

    def check_reuse(self, storage: Storage, /) -> None:
        """Check that storage which is freed may be overwritten."""

    def keep(self, owner: Array, storage: Storage, /) -> None:
        """Keep storage as long as an array of state lives."""


class SimHome(Protocol):
    """The device of a value, as the value sees it: a `SimDevice`."""

    @property
    def name(self) -> str:
        """Name of the device."""

    @property
    def memory(self) -> ChargedAccount:
        """Account of the device's memory."""

    @property
    def machine(self) -> StorageWatch:
        """Machine that the device belongs to."""

    def copy_to_host(self, array: SimArray, deliver: Deliver, /) -> None:
        """Copy an array to the host."""

    def tell_host(self, opaque: SimOpaque, deliver: Deliver, /) -> None:
        """Deliver an object once the work on it is done."""


class Storage:
    """A piece of a device's memory; it is freed when the last reference to it goes.

    Attributes:
        home: the device, which counts it.
        pool: the stream for which it was allocated, and which may overwrite it as soon as it is free.
        nbytes: its size.
        written: the work that filled it.
        readers: the latest work of each other stream that read it; None for none.
        array: NumPy's array of this memory, to be overwritten at the end; None if other code may still use it: values
            of state, constants, values without data.
    """

    __slots__ = ("__weakref__", "_charge", "array", "home", "nbytes", "pool", "readers", "written")

    def __init__(
        self, home: SimHome, pool: SimStream, written: SimEvent, nbytes: int, array: Array | None = None
    ) -> None:
        """Count the memory.

        Raises:
            MemoryLimitExceeded: it does not fit.
        """
        self._charge = 0  # for `__del__`, if the charge below fails
        self._charge = home.memory.charge(nbytes, written.label)
        self.home = home
        self.pool = pool
        self.written = written
        self.nbytes = nbytes
        self.array = array
        self.readers: dict[SimStream, SimEvent] | None = None

    def __repr__(self) -> str:
        return f"<Storage of {self.written.label} on {self.home.name}, {self.nbytes} B>"

    def __del__(self) -> None:
        if not self._charge:
            return
        # May run on any thread, inside any call: `credit` takes no lock, and hazards are noted here but raised later.
        # If only the pool's own stream used the memory, its order is enough, and no check is needed.
        home = self.home
        home.memory.credit(self._charge)
        if self.readers is not None or self.written.stream is not self.pool:
            home.machine.check_reuse(self)
        if self.array is not None:
            poison(self.array)

    def read_by(self, event: SimEvent) -> None:
        """Note the latest work of a stream that reads the memory; work of its pool comes before what overwrites it."""
        if event.stream is not self.pool:
            if self.readers is None:
                self.readers = {}
            self.readers[event.stream] = event

    def keep_stand_in(self, dtype: DType, shape: Shape) -> Placed:
        """`keep` memory that has no data; return what state keeps in place of its array."""
        self.array = None
        return no_data(dtype, shape, self)

    def keep(self, array: Array | None = None) -> None:
        """Let state have the memory: it is not overwritten, and lives as long as state's `array` of it."""
        # State may hand out the array again after all its `SimArray` objects are gone.
        self.array = None
        if array is not None:
            self.home.machine.keep(owner_of(array), self)


class StoreBuffer(Storage):
    """Memory that a store has filled by itself, such as a sum of gradients: it counts, and no output views it.

    The kernel that first returns it takes as long as filling new memory, and that memory is then counted instead.
    """

    __slots__ = ()


class BlockStorage(Storage):
    """Memory that a store fills part by part, and of which it gives views: they depend on all that the store does."""

    __slots__ = ()


class SimArray(DeviceArray):
    """An array on a simulated device; a view shares the `Storage` of its base.

    Attributes:
        data: NumPy's array or scalar; None in a simulation of shapes.
        dtype: of the elements.
        shape: the extents.
        storage: its memory.
        written: the work that wrote it, whose event a reader has to wait for.
        name: of the node that made it.
        followers: streams that wait for `written` already.
    """

    __slots__ = ("__weakref__", "data", "dtype", "followers", "name", "shape", "storage", "written")

    dtype: DType
    shape: Shape

    def __init__(
        self, data: Array | None, dtype: DType, shape: Shape, storage: Storage, written: SimEvent, name: str
    ) -> None:
        self.data = data
        self.dtype = dtype
        self.shape = shape
        self.storage = storage
        self.written = written
        self.name = name
        self.followers: tuple[SimStream, ...] = ()

    @property
    def device(self) -> str:
        """Name of the array's device."""
        return self.storage.home.name

    def __getitem__(self, key: Index) -> SimArray:
        """A view of a part, written by the same work."""
        # Index an array without values to find the shape: a simulation of shapes has no other.
        part = self.stand_in()[key]
        data = None if self.data is None else part
        return SimArray(data, self.dtype, part.shape, self.storage, self.written, self.name)

    def to_host(self, deliver: Deliver) -> None:
        """Copy the array to the host, on ``d2h``; see `SimDevice.copy_to_host`."""
        self.storage.home.copy_to_host(self, deliver)

    def stand_in(self) -> Placed:
        """`data`, or where there is none something of the dtype and shape that takes no memory: NaN, or 0."""
        return no_data(self.dtype, self.shape) if self.data is None else self.data

    def any_stand_in(self) -> Placed:
        """`stand_in` for a kernel that does not keep it: one for all arrays of the dtype and shape."""
        return _shared_no_data(self.dtype, self.shape) if self.data is None else self.data

    def _unseen(self, who: str) -> HazardError:
        return HazardError(
            f"{who} reads {self.name!r} on {self.device} although nothing has waited for {self.written.stream.name} to "
            "write it; fetch the value first"
        )


@dataclass(slots=True, eq=False, repr=False)
class SimOpaque(DeviceValue):
    """An object that is no array but was made of some, such as a state of a TensorArray.

    Attributes:
        value: the object.
        events: the work that it depends on, one event a stream.
        home: the device it is on.
    """

    value: Value
    events: tuple[SimEvent, ...]
    home: SimHome

    def to_host(self, deliver: Deliver) -> None:
        """Deliver the object once the work is done."""
        self.home.tell_host(self, deliver)

    def __repr__(self) -> str:
        return f"<SimOpaque {self.value!r}>"


class SimUnknown(DeviceValue):
    """A value of the host in a simulation of shapes that would be computed from data: its dtype and shape are known.

    Attributes:
        dtype: of the elements.
        shape: the extents.
        name: of the node that made it.
    """

    __slots__ = ("dtype", "name", "shape")

    def __init__(self, dtype: DType, shape: Shape, name: str) -> None:
        self.dtype = dtype
        self.shape = shape
        self.name = name

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    def to_host(self, deliver: Deliver) -> None:
        """Deliver the `stand_in` at once."""
        deliver(self.stand_in(), None)

    def stand_in(self) -> Placed:
        """Return an array of the same dtype and shape that takes no memory: NaN, or 0."""
        return no_data(self.dtype, self.shape)

    # Otherwise a predicate or an index without data would choose an arbitrary path of the program.
    def __bool__(self) -> NoReturn:
        raise self._unseen()

    def __index__(self) -> NoReturn:
        raise self._unseen()

    def __repr__(self) -> str:
        return f"<SimUnknown {self.name} {self.dtype}{list(self.shape)}>"

    def _unseen(self) -> FetchError:
        return missing_data(self.name)


def missing_data(name: str, reader: str = "Python", way: str = "let the program decide by counters") -> FetchError:
    """Return the error to raise where `reader` needs the data of the value `name`; `way` is how to go without it."""
    return FetchError(
        f"{reader} needs the data of {name!r}, which a shapes-only simulation does not have: it was computed from "
        f"arrays of more than {format_bytes(SMALL_BYTES)}; simulate with data, or {way}"
    )


def quiet() -> AbstractContextManager[None]:
    """The context in which kernels compute: infinities and NaN are values in a graph."""
    return np.errstate(all="ignore")


def poison(array: Array) -> None:
    """Overwrite a freed array with NaN, or bytes 0xDD."""
    if not (array.flags.owndata and array.flags.writeable):
        return  # not the device's own memory
    dtype = array.dtype
    if dtype.kind in "fc":
        array.fill(np.nan)
    elif dtype.kind == "b":
        array.fill(True)  # the only nonzero byte that is a bool
    elif dtype.itemsize:
        array.fill(np.frombuffer(_POISON_BYTE * dtype.itemsize, dtype)[0])


class StandIn(NoData):
    """The one element that an array without data has at every index: the owner of that array's memory.

    Attributes:
        storage: the memory that the array stands for; None for an array that state does not keep.
    """

    __slots__ = ("storage",)

    storage: Storage | None


def no_data(dtype: DType, shape: Shape, storage: Storage | None = None) -> Placed:
    """Return a read-only array of NaN, or 0 for dtypes without NaN, that takes no memory; a NumPy scalar for rank 0.

    The array stands for `storage`, and keeps it alive.
    """
    found = _NO_DATA.get(dtype)
    if found is None:
        number = np.full((), np.nan if dtype.kind in "fc" else 0, dtype)
        is_buffer = dtype.isbuiltin == 1 and dtype.kind in "biufc"  # fast path: a plain buffer can have these dtypes
        found = _NO_DATA[dtype] = number[()], number.tobytes(), is_buffer
    number, element_bytes, is_buffer = found
    if not shape:
        return number
    # Built on bytes, so all its views are known to be read-only, and state need not copy them.
    element = _new_array(StandIn, (), dtype, element_bytes)
    element.storage = storage
    if is_buffer:
        return np.ndarray(shape, dtype, element, 0, (0,) * len(shape))
    return np.broadcast_to(element, shape)


# Only for arrays outside state: an array that state keeps needs its own storage.
_shared_no_data = lru_cache(256)(no_data)

_NO_DATA: dict[DType, tuple[Placed, bytes, bool]] = {}
"""A number for each dtype, its bytes, which all that `no_data` returns look into, and whether a buffer may have it."""

_new_array = np.ndarray.__new__
