"""The memory of a CUDA device: admission of allocations, their source, and notice when they are freed.

Three parts. A `ChargedAccount` says how many bytes a logical device holds and refuses what passes its limit *before*
CUDA is asked. A `CudaPool` takes admitted memory from a CuPy pool of its own, whose limit is only the backstop. It
attaches a `Lease` to each piece, which tells the account when Python frees it. `install_allocator` makes CuPy's
allocations inside ``with stream:`` come from that stream's pool.

A CuPy pool keeps its free memory by the stream that was current at the allocation. It hands a freed piece out again *at
once, with no event*. So all memory of a logical device is allocated with its compute stream active. A piece that
another stream works on is kept referenced until an event of that stream has completed.

Arrays may be freed on any thread, at any bytecode, also by a garbage collection inside this module. So a `Lease` then
takes no lock of this module (CuPy's own pool is made for it). The next reader settles the account.

``cupy`` is a parameter everywhere: only the CUDA backend imports it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from asyncflow.devices.memory import ChargedAccount, MemoryLimitExceeded, Requests, format_bytes
from asyncflow.streams.cuda.stream import CudaStream, active

if TYPE_CHECKING:
    from asyncflow.devices.captures import GivesWay
    from asyncflow.streams.cuda.cupy_types import Cupy, CupyArray, Raw

ALLOCATION_BYTES = 512
"""Granularity of CuPy's pools, which is the size that counts: an array of 4 bytes holds 512."""


class DeviceMemoryExhausted(MemoryLimitExceeded):
    """A CUDA device has no piece of the requested size, although its limit would allow it.

    The free memory is in smaller pieces, or the card has less than the limit: other programs and other devices use it.

    Attributes:
        why: the cause, in words.
        remedy: advice for it. A higher limit has a larger piece. A lower one is what a full card has, and gradients
            are planned for it.
    """

    def __init__(self, *, why: str, remedy: str, **figures: Any) -> None:
        self.why = why
        self.remedy = remedy
        super().__init__(**figures)

    def _message(self, largest: str) -> str:
        return (
            f"{self.device} has no {format_bytes(self.requested)} in one piece; it would hold "
            f"{format_bytes(self.used)} of {format_bytes(self.limit)}, but {self.why}; largest now: {largest}; "
            f"{self.remedy}, or run fewer iterations or requests at once"
        )


class Lease:
    """A piece of a pool's memory, counted until the last reference to it goes.

    Attributes:
        home: the stream that was active at the allocation, in whose order the memory is used again.
        pointer: CuPy's pointer to the piece, which gives it back to its pool.
        pool: CuPy's pool. A piece does not keep its pool alive, and a dropped pool frees memory that is still in use.
    """

    __slots__ = ("__weakref__", "_account", "_charge", "home", "pointer", "pool")

    def __init__(self, account: ChargedAccount, charge: int, pointer: Raw, pool: Raw) -> None:
        self._account = account
        self._charge = charge
        self.home = active.stream
        self.pointer = pointer
        self.pool = pool

    def __del__(self) -> None:
        # Return memory to the pool first, then credit the account: no thread may be admitted before it is free.
        self.pointer = None
        self._account.credit(self._charge)


def home_of(array: CupyArray) -> CudaStream | None:
    """The stream in whose order the memory that CuPy's array looks into is used again; None if that is not known."""
    owner = getattr(array.data.mem, "_owner", None)
    return owner.home if type(owner) is Lease else None


class CudaPool:
    """The source of one logical device's memory; logical devices that share a card have a pool each.

    Attributes:
        account: what the device holds.
        graphs: caches of CUDA graphs, whose memory is the pool's.
        graph_launched: first and last node of the CUDA graph launched last, for people.
        label: what the next allocations are called in ``account.top()``: the name of the node that runs.
        name: of the logical device, such as ``cuda:0``.
        physical: CUDA's number of the card.
    """

    __slots__ = (
        "_cupy",
        "_memory",
        "_out_of_memory",
        "_pointer",
        "_pool",
        "account",
        "graph_launched",
        "graphs",
        "label",
        "name",
        "physical",
    )

    def __init__(self, cupy: Cupy, physical: int, name: str, limit: int | None = None) -> None:
        """Open a pool; ``limit`` is in bytes, None is no limit but the card's.

        Raises:
            ValueError: ``limit`` is no positive number of bytes.
        """
        self.account = ChargedAccount(name, limit)
        self.graphs: WeakSet[GivesWay] = WeakSet()
        self.graph_launched = ""
        self.label = ""
        self.name = name
        self.physical = physical
        self._cupy = cupy
        self._pointer = cupy.cuda.memory.MemoryPointer
        self._memory = cupy.cuda.memory.UnownedMemory
        self._out_of_memory = cupy.cuda.memory.OutOfMemoryError
        self._pool = cupy.cuda.MemoryPool()
        if limit is not None:
            with cupy.cuda.Device(physical):
                self._pool.set_limit(size=limit)

    @property
    def limit(self) -> int | None:
        """Bytes that may be held; None is no limit."""
        return self.account.limit

    def malloc(self, nbytes: int, label: str | None = None, *, is_again: bool = False) -> Raw:
        """A CuPy ``MemoryPointer`` to ``nbytes`` of device memory, called ``label`` or else `label` in the account.

        Raises:
            MemoryLimitExceeded: they pass the limit, and nothing was allocated; or (`DeviceMemoryExhausted`) the pool
                has no such piece.

        Ordering: the memory belongs to the stream that is active. Earlier work of that stream may still use it; later
        work of that stream may overwrite it as soon as the last reference to the pointer goes.
        """
        if not nbytes:
            return self._pool.malloc(0)
        if label is None:
            label = self.label
        size = -(-nbytes // ALLOCATION_BYTES) * ALLOCATION_BYTES
        account = self.account
        charge = account.charge(size, label)
        try:
            pointer = self._pool.malloc(size)
        except BaseException as error:
            account.credit(charge)
            if not isinstance(error, self._out_of_memory):
                raise
            if is_again or not account.make_room(inf):  # all of it: free pieces join once the pieces between go
                raise self._exhausted(size, label) from error
        else:
            lease = Lease(account, charge, pointer, self._pool)
            return self._pointer(self._memory(pointer.ptr, size, lease, self.physical), 0)
        return self.malloc(nbytes, label, is_again=True)

    def prime(self) -> int:
        """Take the whole limit from the card as one slab; gives its bytes, 0 where there is no limit.

        From then on allocations split and merge that slab: CUDA, which may stall all streams of the card to allocate
        or free, is not asked any more. May take milliseconds: call it at start-up, on a worker thread.

        Raises:
            DeviceMemoryExhausted: the card has less.

        Ordering: the slab belongs to the stream that is active.
        """
        if self.limit is None:
            return 0
        # Memory already in the pool is part of the limit. The slab is not counted, as it returns to the pool at once.
        room: int = (self.limit - self._pool.total_bytes()) // ALLOCATION_BYTES * ALLOCATION_BYTES
        if room > 0:
            try:
                self._pool.malloc(room)
            except self._out_of_memory as error:
                raise self._exhausted(room, "the memory limit") from error
        return max(room, 0)

    def release(self) -> None:
        """Give free whole blocks back to the card; live arrays stay valid. Idempotent.

        Stalls the card and the calling thread: call it when the device is closed, on a worker thread.
        """
        with self._cupy.cuda.Device(self.physical):
            self._pool.free_all_blocks()

    def _exhausted(self, nbytes: int, label: str) -> MemoryLimitExceeded:
        reserved: int = self._pool.total_bytes()
        on_card, total = self._cupy.cuda.runtime.memGetInfo()
        limit = self.limit
        if limit is not None and nbytes > limit - reserved:  # the pool may not take another piece from the card
            why = f"the {format_bytes(self._pool.free_bytes())} that are free are in smaller pieces"
            remedy = f"raise memory_limit= by {format_bytes(nbytes)} or more"
            if on_card < nbytes:
                remedy += f", once other programs leave that free on the card ({format_bytes(on_card)} are)"
        else:
            most, others = reserved + on_card, total - reserved - on_card
            used = f"other programs and devices use {format_bytes(others)} of the card's"
            why = f"{used if others else 'the card has'} {format_bytes(total)}"
            remedy = "lower memory_limit= to" if limit is not None else "pass memory_limit="
            remedy += f" at most {most:_} ({format_bytes(most)}), for which the session plans gradients"
        kind = partial(DeviceMemoryExhausted, why=why, remedy=remedy)
        return self.account.refusal(nbytes, label, total if limit is None else limit, kind)


class PrivatePool:
    """A pool of a device for the arrays of a captured CUDA graph, whose addresses are the graph's for as long as it is.

    Memory freed here can only be allocated again here, never by the rest of the device. It takes whole blocks from the
    device's pool. They count, under one name, from their first use until the private pool and all its arrays are gone.
    So it keeps within the device's limit, and where that pool is primed CUDA is not asked either.

    The holder of the graph holds the pool, which is the stream's pool only during the capture.
    """

    __slots__ = ("_cupy", "_physical", "_pool")

    def __init__(self, cupy: Cupy, parent: CudaPool, label: str) -> None:
        self._cupy = cupy
        self._pool = cupy.cuda.MemoryPool(partial(parent.malloc, label=label))
        self._physical = parent.physical

    def malloc(self, nbytes: int) -> Raw:
        """A CuPy ``MemoryPointer`` to ``nbytes`` of device memory.

        Raises:
            MemoryLimitExceeded: as of `CudaPool.malloc`.
        """
        pointer = self._pool.malloc(nbytes)
        if not nbytes:
            return pointer
        # The pool lives as long as its last array: see `Lease`. Only its blocks are counted.
        memory = self._cupy.cuda.memory
        owned = memory.UnownedMemory(pointer.ptr, pointer.mem.size, (pointer, self._pool), self._physical)
        return memory.MemoryPointer(owned, 0)


def active_requests() -> Requests:
    """Return the counts of the device whose stream is active; where that captures, counts that no caller reads."""
    pool = None if active.stream is None else active.stream.pool
    return pool.account.requests if isinstance(pool, CudaPool) else Requests()


class Dispatch:
    """CuPy's allocator while asyncflow runs: the pool of the stream that is active on this thread.

    Attributes:
        before: the allocator that was there before, for allocations outside of any stream of asyncflow's.
    """

    __slots__ = ("before",)

    def __init__(self, before: Callable[[int], Raw]) -> None:
        self.before = before

    def __call__(self, nbytes: int) -> Raw:
        """A ``MemoryPointer`` to ``nbytes``; CuPy calls this for each array that it makes."""
        stream = active.stream
        if stream is None or stream.pool is None:
            return self.before(nbytes)
        return stream.pool.malloc(nbytes)


def install_allocator(cupy: Cupy) -> None:
    """Make allocations inside ``with stream:`` come from that stream's pool; others go where they went before.

    Does nothing if it is installed already. It stays for the life of the process, and costs other users one lookup.

    Raises:
        ValueError: the caller is inside ``cupy.cuda.using_allocator``, where CuPy refuses it.
    """
    before = cupy.cuda.get_allocator()
    if not isinstance(before, Dispatch):
        cupy.cuda.set_allocator(Dispatch(before))
