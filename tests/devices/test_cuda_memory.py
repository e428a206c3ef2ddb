from __future__ import annotations

import gc
import random
import re
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow.devices import LiveBuffer, MemoryLimitExceeded, MemoryStatistics
from asyncflow.devices.cuda.memory import CudaPool, DeviceMemoryExhausted, PrivatePool, install_allocator
from asyncflow.devices.memory import ChargedAccount
from asyncflow.streams.cuda.stream import CudaStream
from tests.fake_cupy import FakeCupy
from tests.patience import PATIENCE_S

UNIT = 512
MIB = 2**20


@pytest.fixture
def fake() -> Iterator[FakeCupy]:
    with FakeCupy(devices=2, nbytes=4 * MIB) as cupy:
        yield cupy


class Logical:
    """A logical device as far as its memory goes."""

    def __init__(self, cupy: FakeCupy, name: str = "cuda:0", limit: int | None = None, physical: int = 0) -> None:
        self.pool = CudaPool(cupy, physical, name, limit)
        self.account = self.pool.account
        self.compute = CudaStream(cupy, physical, f"{name}/compute", self.pool)

    def take(self, nbytes: int, label: str = "") -> Any:
        self.pool.label = label
        with self.compute:
            return self.pool.malloc(nbytes)

    @property
    def reserved(self) -> int:
        """Bytes that the pool has from the card."""
        with self.compute:
            return self.pool._pool.total_bytes()

    @property
    def lent(self) -> int:
        """Bytes that the pool has given out, as CuPy counts them."""
        with self.compute:
            return self.pool._pool.used_bytes()


def stalls(cupy: FakeCupy) -> list[str]:
    """The blocking calls, but for the memory of the flags, which a card's first stream pins."""
    return [name for _, name in cupy.calls if name != "hostAlloc"]


# -- counting ----------------------------------------------------------------------------------------------------------


def test_memory_counts_from_allocation_to_the_last_reference(fake: FakeCupy) -> None:
    device = Logical(fake)
    first, second = device.take(3 * UNIT, "a"), device.take(UNIT, "b")
    assert device.account.used == device.lent == 4 * UNIT
    view = first + UNIT
    del first
    assert device.account.used == 4 * UNIT
    del view
    assert device.account.used == device.lent == UNIT
    del second
    assert device.lent == 0
    assert device.account.statistics() == MemoryStatistics(
        device="cuda:0", used=0, peak=4 * UNIT, limit=None, buffers=0
    )


@pytest.mark.parametrize(("nbytes", "counted"), [(1, UNIT), (UNIT, UNIT), (UNIT + 1, 2 * UNIT)])
def test_what_counts_is_what_the_pool_gives_out(fake: FakeCupy, nbytes: int, counted: int) -> None:
    device = Logical(fake)
    pointer = device.take(nbytes)
    assert device.account.used == device.lent == pointer.mem.size == counted
    assert (pointer.device_id, pointer.mem.device_id) == (0, 0)


def test_nothing_counts_for_nothing(fake: FakeCupy) -> None:
    device = Logical(fake, limit=UNIT)
    full, empty = device.take(UNIT), device.take(0)
    assert device.account.used == full.mem.size and empty.ptr == 0
    assert device.account.statistics().buffers == 1


def test_host_arrays_are_not_in_the_device_s_memory() -> None:
    account = ChargedAccount("cuda:0", limit=UNIT)
    account.track(np.zeros(MIB), "host")
    assert account.used == 0


def test_the_largest_are_shown_with_the_name_they_were_allocated_under(fake: FakeCupy) -> None:
    device = Logical(fake)
    held = [device.take(n * UNIT, f"n{n}") for n in (2, 7, 1, 4, 6, 3, 5)]
    device.pool.label = "later"
    assert device.account.top() == tuple(LiveBuffer(n * UNIT, f"n{n}") for n in (7, 6, 5, 4, 3))
    assert device.account.top(1) == (LiveBuffer(7 * UNIT, "n7"),)
    del held[1]
    assert device.account.top(1) == (LiveBuffer(6 * UNIT, "n6"),)


def test_memory_is_in_the_pool_again_before_it_is_off_the_account(fake: FakeCupy) -> None:
    device = Logical(fake)
    pointer = device.take(UNIT)
    seen: list[tuple[int, int]] = []
    credit = device.account.credit

    def watch(charge: int) -> None:
        seen.append((device.lent, device.account.used))
        credit(charge)

    device.account.credit = watch
    del pointer
    assert seen == [(0, UNIT)]
    assert device.account.used == 0


# -- limits ------------------------------------------------------------------------------------------------------------


def test_a_limit_refuses_before_anything_is_allocated(fake: FakeCupy) -> None:
    device = Logical(fake, limit=10 * UNIT)
    with pytest.raises(MemoryLimitExceeded):
        device.take(10 * UNIT + 1, "matmul")
    assert device.reserved == 0
    assert stalls(fake) == []
    assert device.account.statistics() == MemoryStatistics(device="cuda:0", used=0, peak=0, limit=10 * UNIT, buffers=0)


def test_a_refusal_names_the_holders_of_memory(fake: FakeCupy) -> None:
    device = Logical(fake, limit=MIB)
    held = [device.take(MIB // 2, "lstm/gates"), device.take(MIB // 4, "lstm/state")]
    with pytest.raises(MemoryLimitExceeded) as caught:
        device.take(3 * MIB // 8, "matmul")
    error = caught.value
    assert type(error) is MemoryLimitExceeded
    assert (error.device, error.requested, error.used, error.limit) == ("cuda:0", 3 * MIB // 8, 9 * MIB // 8, MIB)
    assert error.top == (
        LiveBuffer(MIB // 2, "lstm/gates"),
        LiveBuffer(3 * MIB // 8, "matmul"),
        LiveBuffer(MIB // 4, "lstm/state"),
    )
    assert str(error) == (
        "cuda:0 holds 1.1 MiB, over its limit of 1.0 MiB, after a value of 384.0 KiB; largest now: lstm/gates "
        "512.0 KiB, matmul 384.0 KiB, lstm/state 256.0 KiB; raise memory_limit=, or run fewer iterations or requests "
        "at once"
    )
    assert device.account.used == 3 * MIB // 4
    del held[0]
    held.append(device.take(3 * MIB // 8, "matmul"))
    assert device.account.used == 5 * MIB // 8


def test_what_just_fits_is_admitted(fake: FakeCupy) -> None:
    device = Logical(fake, limit=4 * UNIT)
    held = [device.take(3 * UNIT), device.take(1)]
    with pytest.raises(MemoryLimitExceeded):
        device.take(1)
    assert device.account.used == device.account.peak == 4 * UNIT and len(held) == 2


def test_logical_devices_on_one_card_have_limits_of_their_own(fake: FakeCupy) -> None:
    first, second = Logical(fake, "cuda:0", 4 * UNIT), Logical(fake, "cuda:1", 8 * UNIT)
    full = first.take(4 * UNIT)
    with pytest.raises(MemoryLimitExceeded, match="cuda:0 holds"):
        first.take(1)
    more = second.take(8 * UNIT)
    with pytest.raises(MemoryLimitExceeded, match="cuda:1 holds"):
        second.take(1)
    assert (first.account.used, second.account.used) == (full.mem.size, more.mem.size)
    del full
    assert (first.account.used, second.account.used) == (0, 8 * UNIT)


@pytest.mark.parametrize("limit", [0, -1, 1.5, True])
def test_a_limit_is_a_positive_int(fake: FakeCupy, limit: Any) -> None:
    with pytest.raises(ValueError, match="the memory limit of cuda:0 in bytes is a positive int"):
        CudaPool(fake, 0, "cuda:0", limit)


def in_pieces(fake: FakeCupy, limit: int) -> tuple[Logical, list[Any]]:
    """Return a device with two free units apart from each other, and the arrays between them."""
    device = Logical(fake, limit=limit)
    with device.compute:
        device.pool.prime()
    held = [device.take(UNIT, f"n{n}") for n in range(4)]
    del held[2], held[0]
    return device, held


def test_memory_in_pieces_is_an_error_that_says_so(fake: FakeCupy) -> None:
    device, _held = in_pieces(fake, limit=4 * UNIT)
    with pytest.raises(DeviceMemoryExhausted) as caught:
        device.take(2 * UNIT, "large")
    error = caught.value
    assert (error.requested, error.used, error.limit) == (2 * UNIT, 4 * UNIT, 4 * UNIT)
    assert error.top[0] == LiveBuffer(2 * UNIT, "large")
    assert isinstance(error.__cause__, fake.cuda.memory.OutOfMemoryError)
    assert str(error) == (
        "cuda:0 has no 1.0 KiB in one piece; it would hold 2.0 KiB of 2.0 KiB, but the 1.0 KiB that are free are in "
        "smaller pieces; largest now: large 1.0 KiB, n3 512 B, n1 512 B; raise memory_limit= by 1.0 KiB or more, or "
        "run fewer iterations or requests at once"
    )
    assert device.account.used == device.lent == 2 * UNIT


def test_a_limit_raised_by_what_the_error_says_has_a_piece(fake: FakeCupy) -> None:
    device, _held = in_pieces(fake, limit=6 * UNIT)
    assert device.take(2 * UNIT, "large").mem.size == 2 * UNIT


def test_pieces_on_a_full_card_need_room_on_the_card(fake: FakeCupy) -> None:
    others, device = Logical(fake, "cuda:1"), Logical(fake, limit=4 * UNIT)
    with device.compute:
        device.pool.prime()
    rest = others.take(fake.cuda.runtime.memGetInfo()[0])
    held = [device.take(UNIT, f"n{n}") for n in range(4)]
    del held[2], held[0]
    with pytest.raises(DeviceMemoryExhausted, match=r"by 1\.0 KiB or more, once other programs leave .* \(0 B are\)"):
        device.take(2 * UNIT, "large")
    assert rest.mem.size


def test_a_full_card_is_an_error_with_the_card_s_size_for_a_limit(fake: FakeCupy) -> None:
    device = Logical(fake)
    with pytest.raises(DeviceMemoryExhausted) as caught:
        device.take(5 * MIB, "matmul")
    assert caught.value.limit == fake.cuda.runtime.memGetInfo()[1]
    assert (caught.value.requested, device.account.used) == (5 * MIB, 0)
    assert "but the card has 4.0 MiB; " in str(caught.value)
    assert "pass memory_limit= at most 4_194_304 (4.0 MiB), for which the session plans" in str(caught.value)


def test_the_limit_that_a_full_card_s_error_names_can_be_taken(fake: FakeCupy) -> None:
    others, device = Logical(fake, "cuda:1"), Logical(fake, limit=3 * MIB)
    used = others.take(2 * MIB)
    with pytest.raises(DeviceMemoryExhausted) as caught, device.compute:
        device.pool.prime()
    assert "but other programs and devices use 2.0 MiB of the card's 4.0 MiB; " in str(caught.value)
    named = re.search(r"lower memory_limit= to at most ([\d_]+) ", str(caught.value))
    assert named is not None
    fitting = Logical(fake, limit=int(named[1]))
    with fitting.compute:
        assert fitting.pool.prime() == int(named[1]) == 4 * MIB - used.mem.size


def test_another_failure_of_cuda_leaves_nothing_counted(fake: FakeCupy) -> None:
    device = Logical(fake, limit=MIB)
    fake.fail_next(999, "malloc")
    with pytest.raises(fake.cuda.runtime.CUDARuntimeError):
        device.take(UNIT)
    assert device.account.statistics().buffers == device.account.used == 0


# -- one slab ----------------------------------------------------------------------------------------------------------


def test_a_primed_pool_asks_cuda_for_nothing_more(fake: FakeCupy) -> None:
    limit = 200 * UNIT + 100
    device = Logical(fake, limit=limit)
    with device.compute:
        assert device.pool.prime() == 200 * UNIT
    assert (device.reserved, device.account.used, device.account.peak) == (200 * UNIT, 0, 0)
    fake.calls.clear()
    chance, held = random.Random(3), []
    for _ in range(500):
        held.append(device.take(chance.randint(1, 3 * UNIT)))
        if len(held) > 20:
            del held[chance.randrange(len(held))]
    with device.compute:
        assert device.pool.prime() == 0  # there is nothing left to take
    assert device.reserved == 200 * UNIT
    assert stalls(fake) == []


def test_no_limit_is_no_slab(fake: FakeCupy) -> None:
    device = Logical(fake)
    with device.compute:
        assert device.pool.prime() == 0
    assert device.reserved == 0


def test_a_limit_that_the_card_has_not_got_is_found_at_once(fake: FakeCupy) -> None:
    device = Logical(fake, limit=5 * MIB)
    with pytest.raises(DeviceMemoryExhausted, match=r"cuda:0 has no 5\.0 MiB in one piece"), device.compute:
        device.pool.prime()


def test_a_released_pool_keeps_live_arrays(fake: FakeCupy) -> None:
    device = Logical(fake)
    kept, freed = device.take(UNIT), device.take(3 * UNIT)
    del freed
    assert device.reserved == 4 * UNIT
    device.pool.release()
    device.pool.release()
    assert device.reserved == device.account.used == kept.mem.size == UNIT


def test_memory_outlives_its_pool(fake: FakeCupy) -> None:
    def free() -> int:
        fake.wait_idle()  # it is given back in the order of a stream
        return fake.cuda.runtime.memGetInfo()[0]

    before = free()
    device = Logical(fake)
    account, pool = device.account, weakref.ref(device.pool._pool)
    kept = device.take(UNIT)
    held = free()
    del device
    gc.collect()
    assert pool() is not None  # CuPy's pools free what is in use when they go
    assert free() == held < before and account.used == UNIT
    del kept
    gc.collect()
    assert pool() is None
    assert free() == before and account.used == 0


# -- threads and the garbage collector ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_memory_freed_by_the_collector_on_any_thread_is_off_the_account(fake: FakeCupy) -> None:
    device = Logical(fake, limit=64 * UNIT)
    refused = []

    def work(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(150):
            try:
                cycle: list[object] = [device.take(chance.randint(1, 4 * UNIT), f"thread {seed}")]
            except MemoryLimitExceeded:
                refused.append(seed)
                gc.collect()
            else:
                cycle.append(cycle)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert refused
    assert device.account.used == device.lent == 0
    assert device.account.statistics().buffers == 0 and device.account.peak <= 64 * UNIT


def test_memory_freed_while_another_thread_reads_the_account_blocks_no_thread(fake: FakeCupy) -> None:
    device = Logical(fake)
    pointer = device.take(UNIT)
    locked, done = threading.Event(), threading.Event()
    in_time: list[bool] = []

    def hold() -> None:
        with device.account._lock:
            locked.set()
            in_time.append(done.wait(PATIENCE_S))

    thread = threading.Thread(target=hold)
    thread.start()
    assert locked.wait(PATIENCE_S)
    del pointer
    done.set()
    thread.join()
    assert in_time == [True]
    assert device.account.used == 0


def test_a_collection_inside_the_account_may_free_and_allocate(fake: FakeCupy) -> None:
    device = Logical(fake)

    class Finalized:
        """Frees memory, and allocates and frees some more, at whatever moment it is collected."""

        def __init__(self) -> None:
            self.itself, self.pointer = self, device.take(2 * UNIT, "garbage")

        def __del__(self) -> None:
            device.take(UNIT, "in a finalizer")
            collected.append(device.account.used)

    collected: list[int] = []
    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(200):
            Finalized()
            device.account.top()
            device.account.statistics()
    finally:
        gc.set_threshold(*before)
    # A thread that another test has left may be collecting just now: then this does nothing, and that thread goes on.
    until = time.monotonic() + PATIENCE_S
    while len(collected) < 200 and time.monotonic() < until:
        gc.collect()
    assert len(collected) == 200
    assert device.account.used == device.lent == 0


def test_a_finalizer_that_allocates_while_freed_memory_is_counted_off_is_counted() -> None:
    """Python may collect garbage after any call of the account."""
    account = ChargedAccount("cuda:0")

    class Interrupted(deque[int]):
        def popleft(self) -> int:
            charge = super().popleft()
            account.charge(2 * UNIT, "in a finalizer")
            return charge

    account._credited = Interrupted([account.charge(UNIT, "freed")])
    account.charge(4 * UNIT, "next")
    assert account.used == sum(buffer.nbytes for buffer in account.top()) == 6 * UNIT


# -- private pools -----------------------------------------------------------------------------------------------------


def test_a_private_pool_keeps_its_blocks_and_counts_them_under_its_name(fake: FakeCupy) -> None:
    device = Logical(fake, limit=8 * UNIT)
    graph = PrivatePool(fake, device.pool, "graph of loop")
    device.compute.pool = graph
    with device.compute:
        temporary, kept = graph.malloc(2 * UNIT), graph.malloc(1)
        used = temporary.ptr
        del temporary
        again = graph.malloc(2 * UNIT)
    assert again.ptr == used
    assert device.account.top() == (LiveBuffer(2 * UNIT, "graph of loop"), LiveBuffer(UNIT, "graph of loop"))
    del again
    other = device.take(2 * UNIT, "other")
    assert other.ptr != used
    assert device.account.used == 5 * UNIT
    device.compute.pool = device.pool
    del graph
    gc.collect()
    assert device.account.used == 5 * UNIT  # an array of it is alive
    del kept
    gc.collect()
    assert device.account.used == device.lent == other.mem.size


def test_a_private_pool_is_within_the_limit_and_the_slab(fake: FakeCupy) -> None:
    device = Logical(fake, limit=8 * UNIT)
    graph = PrivatePool(fake, device.pool, "graph")
    with device.compute:
        device.pool.prime()
        fake.calls.clear()
        held = [device.pool.malloc(5 * UNIT, "outside"), graph.malloc(3 * UNIT), graph.malloc(0)]
        with pytest.raises(MemoryLimitExceeded) as caught:
            graph.malloc(1)
    assert caught.value.top[:2] == (LiveBuffer(5 * UNIT, "outside"), LiveBuffer(3 * UNIT, "graph"))
    assert stalls(fake) == []
    assert device.reserved == device.account.used == 8 * UNIT
    held.clear()
    assert device.account.used == 3 * UNIT


# -- where allocations go ----------------------------------------------------------------------------------------------


def test_allocations_come_from_the_pool_of_the_active_stream(fake: FakeCupy) -> None:
    first, second = Logical(fake, "cuda:0"), Logical(fake, "cuda:1", physical=1)
    install_allocator(fake)
    allocate = fake.cuda.get_allocator()
    held = []
    with first.compute:
        first.pool.label, second.pool.label = "one", "two"
        held.append(allocate(UNIT))
        with second.compute:
            held.append(allocate(2 * UNIT))
        held.append(allocate(3 * UNIT))
    assert first.account.top() == (LiveBuffer(3 * UNIT, "one"), LiveBuffer(UNIT, "one"))
    assert second.account.top() == (LiveBuffer(2 * UNIT, "two"),)
    assert [pointer.device_id for pointer in held] == [0, 1, 0]


def test_arrays_count_as_long_as_something_looks_into_them(fake: FakeCupy) -> None:
    cupy: Any = fake
    device = Logical(fake, limit=MIB)
    install_allocator(fake)
    with device.compute:
        device.pool.label = "zeros"
        zeros = cupy.zeros((100, 128), np.float32)
        device.pool.label = "add"
        view = (zeros + zeros).T[3:]
    assert device.account.top() == (LiveBuffer(100 * UNIT, "zeros"), LiveBuffer(100 * UNIT, "add"))
    del zeros
    assert device.account.used == 100 * UNIT
    with pytest.raises(MemoryLimitExceeded, match=r"after a value of 1\.0 MiB; largest now: full"):
        with device.compute:
            device.pool.label = "full"
            cupy.full(MIB, 1, np.int8)
    del view
    assert device.account.used == 0


def test_other_allocations_go_where_they_went_before(fake: FakeCupy) -> None:
    asked: list[int] = []
    pool = fake.cuda.MemoryPool()

    def before(nbytes: int) -> Any:
        asked.append(nbytes)
        return pool.malloc(nbytes)

    fake.cuda.set_allocator(before)
    install_allocator(fake)
    device = Logical(fake)
    allocate = fake.cuda.get_allocator()
    outside = allocate(1)
    with device.compute:
        inside = allocate(2)
        thread = threading.Thread(target=lambda: fake.cuda.get_allocator()(3))  # nothing is active on that thread
        thread.start()
        thread.join()
        device.compute.pool = None
        unpooled = allocate(4)
    assert asked == [1, 3, 4]
    assert device.account.used == inside.mem.size == UNIT
    assert outside.ptr and unpooled.ptr


def test_the_allocator_is_installed_once(fake: FakeCupy) -> None:
    install_allocator(fake)
    installed = fake.cuda.get_allocator()
    install_allocator(fake)
    assert fake.cuda.get_allocator() is installed


# -- against a model ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@given(
    limit=st.integers(1, 40),
    steps=st.lists(st.tuples(st.booleans(), st.integers(1, 12 * UNIT)), max_size=60),
)
@settings(max_examples=60, deadline=None)
def test_the_account_agrees_with_a_model_and_with_cupy(limit: int, steps: list[tuple[bool, int]]) -> None:
    with FakeCupy(nbytes=MIB) as cupy:
        device = Logical(cupy, limit=limit * UNIT)
        held: list[Any] = []
        model: list[int] = []
        peak = 0
        for allocate, number in steps:
            size = -(-number // UNIT)
            if not allocate and held:
                del model[number % len(held)], held[number % len(held)]
            elif sum(model) + size > limit:
                with pytest.raises(MemoryLimitExceeded) as caught:
                    device.take(number)
                assert type(caught.value) is MemoryLimitExceeded
                assert caught.value.used == (sum(model) + size) * UNIT
            else:
                try:
                    held.append(device.take(number))
                except DeviceMemoryExhausted:  # in pieces
                    assert device.reserved > 0
                else:
                    model.append(size)
                    peak = max(peak, sum(model))
            assert device.account.used == device.lent == sum(model) * UNIT
            assert device.account.statistics().buffers == len(model)
        assert peak * UNIT <= device.account.peak <= limit * UNIT
        held.clear()
        assert device.account.used == device.lent == 0
