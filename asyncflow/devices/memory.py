"""Bytes of arrays held by a device, the largest ones, and the limit.

An account only watches: it holds weak references to the buffers that kernels returned, and a buffer leaves the account
when Python frees it. Buffers may be freed on any thread, at any bytecode, even inside this module. So the weak
reference's callback is a bare ``deque.append``, which takes no lock, and the next reader of the account first settles
the freed ones.

Many small values together are large: what a loop saves for its gradient, or writes to a TensorArray. If there is a
limit, a *store* of values counts as one buffer. It has the bytes that Python takes for the small values put into it.
That is too much once a value is taken out again, or if it is there twice; so before the limit counts as passed, all
stores are looked through.
"""

from __future__ import annotations

import heapq
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from sys import getsizeof
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from asyncflow.devices.options import positive_count

TRACKED_BYTES = 4096
"""Size in bytes below which arrays are not counted by themselves: watching one costs more than it holds."""

_BUFFER, TOLD = -1, -2
"""Counts of a `Watch` of no store: of a buffer, and of an object that reports its own bytes
(`asyncflow.devices.told`).
"""

_SLACK_BYTES = 512 << 10
"""Bytes put into stores between two looks through them; the limit may be passed by this amount."""

_TOP = 5

Buffer = np.ndarray[tuple[int, ...], np.dtype[np.generic]]


class Held(Protocol):
    """Values that the states of one store share; a state has it as its attribute ``held``.

    Attributes:
        entry_nbytes: what an entry takes beside its value.
        gives_views: values that are read may be views of parts of `buffers`.
        grown_from: bytes of buffers that were copied to make these.
    """

    entry_nbytes: int
    gives_views: bool
    grown_from: int

    def since(self, count: int) -> Sequence[object]:
        """Return the values put in behind the first `count`; None for an absent value, or one in `buffers`."""

    def buffers(self) -> Sequence[Buffer]:
        """Arrays that it has made for values to come."""


class LiveBuffer(NamedTuple):
    """A buffer that is alive."""

    nbytes: int
    label: str
    """Label given when it was tracked: the name of the node that made it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryStatistics:
    """One moment of an account, in bytes."""

    device: str
    used: int
    peak: int
    limit: int | None
    buffers: int
    """Number of live buffers."""


class MemoryLimitExceeded(Exception):
    """A device holds more than its limit; the runtime turns this into an `OutOfMemoryError` with provenance.

    Attributes:
        requested: bytes of the buffer that passed the limit.
        used: bytes held, that buffer included.
        limit: the limit in bytes.
        top: the largest buffers alive, largest first.
    """

    def __init__(
        self, *, device: str, requested: int, used: int, limit: int, top: tuple[LiveBuffer, ...], advice: str = ""
    ) -> None:
        self.device = device
        self.requested = requested
        self.used = used
        self.limit = limit
        self.top = top
        largest = ", ".join(f"{buffer.label or 'unnamed'} {format_bytes(buffer.nbytes)}" for buffer in top)
        # A buffer larger than the limit is helped by neither fewer iterations nor a place for saved values.
        super().__init__(self._message(largest) + (f"; {advice}" if advice and requested <= limit else ""))

    def __copy__(self) -> MemoryLimitExceeded:
        # By default `copy` gives `__init__` the message as a positional argument, which it does not take.
        copied = type(self).__new__(type(self), *self.args)
        copied.__dict__.update(self.__dict__)
        return copied

    def _message(self, largest: str) -> str:
        held, most = format_bytes(self.used), format_bytes(self.limit)
        if held == most:  # equal when rounded, such as 4.0 MiB over a limit of 4.0 MiB
            held, most = f"{self.used} bytes", f"{self.limit} bytes"
        return (
            f"{self.device} holds {held}, over its limit of {most}, after a value of "
            f"{format_bytes(self.requested)}; largest now: {largest}; "
            + (
                "raise memory_limit=, or run fewer iterations or requests at once"
                if self.requested <= self.limit
                else "that value alone is larger than the limit: raise memory_limit=, or feed or compute it in parts"
            )
        )


@dataclass(slots=True)
class Requests:
    """Counts of the requests of a host to a card; a device counts from the start.

    Attributes:
        kernels: launched one by one, not as parts of a graph. The kernel of a node counts once, also if CuPy makes
            several launches of one node.
        graphs: launched.
        copies: within the card's memory, to it, and from it.
        allocations: of arrays; the pool has memory for most of them.
    """

    kernels: int = 0
    graphs: int = 0
    copies: int = 0
    allocations: int = 0

    def add(self, other: Requests) -> None:
        """Add other counts."""
        self.kernels += other.kernels
        self.graphs += other.graphs
        self.copies += other.copies
        self.allocations += other.allocations

    def since(self, earlier: Requests) -> Requests:
        """Return the requests since earlier counts of the same device."""
        return Requests(
            self.kernels - earlier.kernels,
            self.graphs - earlier.graphs,
            self.copies - earlier.copies,
            self.allocations - earlier.allocations,
        )


class MemoryAccount:
    """The account of one device.

    Invariant, under the lock and after `_settle`: ``_live`` holds exactly the tracked buffers that are alive, by the
    id of the array that owns them, and ``at_most`` is their sum. An id is reused only after its owner was freed, hence
    after its callback ran, hence never while `_settle` has not seen it.
    """

    __slots__ = (
        "_exact",
        "_freed",
        "_lap",
        "_laps",
        "_lent",
        "_limit",
        "_live",
        "_lock",
        "_peak",
        "_stores",
        "advise",
        "at_most",
        "device",
        "fed",
        "requests",
        "total",
    )

    device: str
    """The name of the device."""

    total: int
    """Bytes counted so far, including freed ones."""

    requests: Requests
    """Counts of the host's requests to the device. A charge has its number among the allocations."""

    fed: int
    """Bytes of feeds among `total`: a feed counts once a store holds it, and no iteration takes it."""

    advise: Callable[[], str]
    """Says, for errors, why more did not move away."""

    at_most: int
    """Bytes held now, plus bytes freed since the last look."""

    def __init__(self, device_name: str, limit: int | None = None) -> None:
        """Open an account.

        Raises:
            ValueError: ``limit`` is no positive number of bytes.
        """
        self.device = device_name
        self._limit = None if limit is None else positive_count(limit, f"the memory limit of {device_name} in bytes")
        self._live: dict[int, Watch] = {}
        self._freed: deque[Watch] = deque()
        self._lock = threading.RLock()  # reentrant: settling may run finalizers that take it
        self.at_most = 0
        self._peak = self._lap = self.total = self.fed = 0
        self._lent: set[int] = set()
        self._laps: dict[Hashable, int] = {}
        self._stores = 0
        self._exact = 0
        self.requests = Requests()
        self.advise = str  # `str()` is an empty string: no advice

    @property
    def limit(self) -> int | None:
        """Bytes the device may hold; None is no limit."""
        return self._limit

    @property
    def used(self) -> int:
        """Bytes held now."""
        with self._lock:
            self._settle()
            return self.at_most

    @property
    def exact(self) -> int:
        """Bytes held now, with the values in stores counted anew."""
        with self._lock:
            self._settle()
            if self._stores:
                self._look_through()
            return self.at_most

    @property
    def peak(self) -> int:
        """The most bytes ever held at a time."""
        return max(self._peak, self._lap)

    def lap(self, of: Hashable = "iterations") -> tuple[int, int]:
        """Return the peak of bytes held since the last call with the same name, and the bytes held now."""
        with self._lock:
            self._settle()
            # All names share one counter, `_lap`, which each allocation raises. This call resets it, so its peak first
            # goes into the laps of the other names.
            self._laps.setdefault(of, 0)
            for name, most in self._laps.items():
                self._laps[name] = max(most, self._lap)
            self._peak = max(self._peak, self._lap)
            most = self._laps[of]
            self._lap = self._laps[of] = self.at_most
            return most, self.at_most

    def end_laps(self, of: Hashable) -> None:
        """Forget a name by which laps were asked for."""
        with self._lock:
            self._laps.pop(of, None)

    def track(self, value: object, label: str = "") -> None:
        """Count the buffer behind ``value`` until it is freed; ``label`` is the name of the node that made it.

        Anything but an array of at least `TRACKED_BYTES` is ignored, and, where there is a limit, but a state of a
        store. A view counts as the buffer it looks into, and a buffer counts once however many views of it are tracked.

        Raises:
            MemoryLimitExceeded: the device now holds more than its limit; the buffer stays counted while it lives.
        """
        # Called for each firing, so the usual exit takes two checks. A view may show more bytes than its buffer has
        # (broadcasting) or fewer (a slice). Small slices are ignored: their buffers were tracked when they were made.
        if isinstance(value, np.ndarray) and value.nbytes >= TRACKED_BYTES:
            likely = value if value.base is None else value.base
            watch = self._live.get(id(likely))
            if watch is not None and watch() is likely:  # the usual case, without the lock
                return
            owner = value if value.base is None else owner_of(value)
            nbytes = owner.nbytes
            if nbytes >= TRACKED_BYTES:
                used = self._watch(owner, nbytes, label)
                if self._limit is not None and used > self._limit:
                    del value, likely, owner  # a traceback keeps this frame, which must not keep the buffer
                    self._check(nbytes)
        elif self._limit is not None:
            held: Held | None = getattr(value, "held", None)
            if held is not None:
                nbytes = self._put(held, label)
                if self.at_most > self._limit:
                    del value, held
                    self._check(nbytes, min(_SLACK_BYTES, self._limit // 8))

    def count(self, array: Buffer, label: str) -> None:
        """Count an array that owns its memory, as `track` does, whatever the limit."""
        self._watch(array, array.nbytes, label)

    def uncounted(self, values: Iterable[object]) -> list[Buffer]:
        """Return the uncounted buffers behind a run's feeds; `forget` them when it has ended."""
        arrays = [value for value in values if isinstance(value, np.ndarray) and value.nbytes >= TRACKED_BYTES]
        lent = [owner for owner in map(owner_of, arrays) if id(owner) not in self._live]
        self._lent.update(map(id, lent))
        return lent

    def forget(self, buffers: Iterable[Buffer]) -> None:
        """Stop counting buffers that belong to the caller, which may keep them or feed them again."""
        with self._lock:
            self._settle()
            for buffer in buffers:
                self._lent.discard(id(buffer))
                # A weak reference that is dropped never calls back, so `_settle` will not look for this key.
                watch = self._live.pop(id(buffer), None)
                self.at_most -= 0 if watch is None else watch.nbytes

    def top(self, n: int = _TOP) -> tuple[LiveBuffer, ...]:
        """The ``n`` largest buffers that are counted and alive, largest first."""
        return tuple(heapq.nlargest(n, self._buffers()))

    def statistics(self) -> MemoryStatistics:
        """A snapshot."""
        with self._lock:
            buffers = len(self._buffers())
            return MemoryStatistics(
                device=self.device, used=self.at_most, peak=self.peak, limit=self._limit, buffers=buffers
            )

    def _buffers(self) -> list[LiveBuffer]:
        with self._lock:
            self._settle()
            return [LiveBuffer(watch.nbytes, watch.label) for watch in self._live.values()]

    def _check(self, requested: int, slack: int = 0) -> None:
        """Raise if the limit is passed, after a look through the stores if `slack` has come since the last."""
        limit = self._limit
        assert limit is not None
        with self._lock:
            self._settle()
            if self._stores and self.at_most > self._exact + slack:
                self._look_through()
            used = self.at_most
            if used <= limit or (self._exact <= limit and used <= self._exact + slack):
                return
        raise MemoryLimitExceeded(
            device=self.device, requested=requested, used=used, limit=limit, top=self.top(), advice=self.advise()
        )

    def _put(self, held: Held, label: str) -> int:
        """Count values put into a store since the last time; return their bytes."""
        key = id(held)
        with self._lock:
            self._settle()
            watch = self._live.get(key)
            if watch is None:
                watch = self._live[key] = Watch(held, self._freed.append)
                watch.key, watch.nbytes, watch.label, watch.count = key, 0, label, 0
                self._stores += 1
            fresh = held.since(watch.count)
            watch.count += len(fresh)
            nbytes = len(fresh) * held.entry_nbytes + sum(map(_small_nbytes, fresh))
            watch.nbytes += nbytes
            self.at_most += nbytes
            self.total += nbytes
            self._lap = max(self._lap, self.at_most)
        # A feed counts once a store holds it. Large arrays count by themselves (`_small_nbytes` excludes them), so that
        # two stores, or a store and a run, count a shared array once.
        buffers = [owner_of(value) for value in fresh if isinstance(value, np.ndarray)]
        for buffer in (*held.buffers(), *buffers):
            if buffer.nbytes >= TRACKED_BYTES and self._watch(buffer, buffer.nbytes, label):
                nbytes += buffer.nbytes
        return nbytes

    def _look_through(self) -> None:
        """Count the present values in stores, each array once."""
        seen: set[int] = set()
        # A copy, since an allocation below may run finalizers on this thread, which has the lock and may track more.
        for watch in list(self._live.values()):
            held: Any = watch() if watch.count >= 0 else None
            if held is None:
                continue
            nbytes = 0
            for value in held.since(0):
                if isinstance(value, np.ndarray):
                    if id(value) in seen:
                        continue
                    seen.add(id(value))
                nbytes += _small_nbytes(value)
            nbytes += watch.count * held.entry_nbytes
            self.at_most += nbytes - watch.nbytes
            watch.nbytes = nbytes
        self._exact = self.at_most

    def _watch(self, owner: Buffer, nbytes: int, label: str) -> int:
        """Count a buffer unless it is counted; return the bytes now in use, or 0 if unchanged."""
        key, live, freed = id(owner), self._live, self._freed
        with self._lock:
            if freed:
                self._settle()
            if key in live:
                return 0
            watch = live[key] = Watch(owner, freed.append)
            watch.key, watch.nbytes, watch.label, watch.count = key, nbytes, label, _BUFFER
            self.total += nbytes
            if self._lent and key in self._lent:
                self.fed += nbytes
            used = self.at_most = self.at_most + nbytes
            if used > self._lap:
                self._lap = used
            return used

    def _settle(self) -> None:
        freed, live = self._freed, self._live
        while freed:
            watch = freed.popleft()
            del live[watch.key]
            self.at_most -= watch.nbytes
            if watch.count != _BUFFER:
                self._end(watch)

    def _end(self, watch: Watch) -> None:
        """Forget notes on a store or other object that has gone."""
        self._stores -= 1


class ChargedAccount(MemoryAccount):
    """The account of a device with a memory of its own, which reports its own allocations and frees.

    Invariant, under the lock and after `_settle`: ``_charges`` holds exactly the charges that were not credited, and
    ``at_most`` is their sum. All methods may be called on any thread.

    Attributes:
        make_room: asked once for a number of bytes that do not fit; returns True if it has freed some.
    """

    __slots__ = ("_charges", "_credited", "credit", "make_room")

    credit: Callable[[int], None]
    """Count a charge no longer; exactly once a charge. It is a bare ``deque.append``: it takes no lock."""

    def __init__(self, device_name: str, limit: int | None = None) -> None:
        """Open an account.

        Raises:
            ValueError: ``limit`` is no positive number of bytes.
        """
        super().__init__(device_name, limit)
        self._charges: dict[int, tuple[int, str]] = {}
        self._credited: deque[int] = deque()
        self.credit = self._credited.append
        self.make_room: Callable[[float], bool] = lambda _nbytes: False

    @property
    def used(self) -> int:
        """Bytes held now."""
        if self._credited:
            with self._lock:
                self._settle()
        return self.at_most

    def track(self, value: object, label: str = "") -> None:
        """Do nothing: host arrays are not in the device's memory, and its own are counted when they are allocated."""

    def charge(self, nbytes: int, label: str, *, is_again: bool = False) -> int:
        """Count ``nbytes``; gives what `credit` takes.

        Raises:
            MemoryLimitExceeded: they do not fit, and are not counted.
        """
        limit = self._limit
        with self._lock:
            # No call, and no object that the garbage collector watches, between reading `at_most` and writing it: a
            # collection there could run a finalizer that charges, too.
            credited = self._credited
            while credited:  # as `_settle` does
                freed, _ = self._charges.pop(credited.popleft())
                self.at_most -= freed
            used = self.at_most + nbytes
            if limit is None or used <= limit:
                self.at_most = used
                self.total += nbytes
                if used > self._lap:
                    self._lap = used
                requests = self.requests
                requests.allocations = charge = requests.allocations + 1
                self._charges[charge] = nbytes, label
                return charge
        if not is_again and self.make_room(nbytes):  # outside the lock: it frees memory, which calls this account
            return self.charge(nbytes, label, is_again=True)
        raise self.refusal(nbytes, label, limit)

    def has_room(self, nbytes: float) -> bool:
        """Return True if `nbytes` more fit; False without a limit, where the card itself was full."""
        return self._limit is not None and self.used + nbytes <= self._limit

    def refusal(
        self, nbytes: int, label: str, limit: int, kind: Callable[..., MemoryLimitExceeded] = MemoryLimitExceeded
    ) -> MemoryLimitExceeded:
        """The error that says that ``nbytes`` more for ``label`` do not fit; its numbers are as if they were there."""
        buffers = [*self._buffers(), LiveBuffer(nbytes, label)]
        used = sum(buffer.nbytes for buffer in buffers)
        top = tuple(heapq.nlargest(_TOP, buffers))
        return kind(device=self.device, requested=nbytes, used=used, limit=limit, top=top, advice=self.advise())

    def _buffers(self) -> list[LiveBuffer]:
        with self._lock:
            self._settle()
            charges = list(self._charges.values())
        return [LiveBuffer(nbytes, label) for nbytes, label in charges]

    def _settle(self) -> None:
        credited = self._credited
        while credited:
            nbytes, _ = self._charges.pop(credited.popleft())
            self.at_most -= nbytes


class Watch(weakref.ref[object]):
    """A weak reference to a buffer, or to a store, with the counted bytes.

    Attributes:
        key: the id of the referent.
        nbytes: of a buffer, or of all that is in a store.
        label: the name of the node that made it.
        count: of a store's values; negative for anything else.
    """

    __slots__ = ("count", "key", "label", "nbytes")

    count: int
    key: int
    nbytes: int
    label: str


def _small_nbytes(value: object) -> int:
    """The bytes that a value in a store takes, but for buffers that count by themselves."""
    if isinstance(value, np.generic):
        return getsizeof(value)
    if not isinstance(value, np.ndarray):
        return 0  # a nested store, which counts by itself
    owner = owner_of(value)
    if owner.nbytes >= TRACKED_BYTES:
        return 0
    return getsizeof(owner) if owner is value else getsizeof(value) + getsizeof(owner)


def owner_of(value: npt.NDArray[np.generic]) -> Buffer:
    """The array whose buffer ``value`` looks into: itself unless it is a view.

    The chain of bases may pass through objects that are no arrays (`numpy.lib.stride_tricks.as_strided`), and may end
    in one (a memory map); the last array on it is the owner.
    """
    owner: Buffer = value
    base: object = value.base
    if base is None:
        return owner
    while base is not None:
        if isinstance(base, np.ndarray):
            owner = base
        base = getattr(base, "base", None)
    return owner


def spill_advice() -> str:
    """The advice for a CPU whose memory is short and that has no file."""
    return (
        'or let gradients run iterations again, with saved_values="recompute"; or give spill_directory=, to which '
        "values of 64 KiB and more go that loops save for gradients"
    )


def format_bytes(nbytes: int) -> str:
    """Bytes for people: ``512 B``, ``1.5 MiB``."""
    if nbytes < 1024:
        return f"{nbytes} B"
    size = float(nbytes)
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1024:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:.1f} TiB"
