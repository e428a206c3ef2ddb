from __future__ import annotations

import gc
import sys
import threading
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

from asyncflow.devices import TRACKED_BYTES, LiveBuffer, MemoryAccount, MemoryLimitExceeded, MemoryStatistics
from tests.patience import PATIENCE_S

KIB = 1024


def array(nbytes: int) -> np.ndarray:
    return np.zeros(nbytes, np.uint8)


def test_a_buffer_counts_while_it_lives() -> None:
    account = MemoryAccount("cpu:0")
    first, second = array(10 * KIB), array(20 * KIB)
    account.track(first, "a")
    account.track(second, "b")
    assert account.used == 30 * KIB
    del first
    assert (account.used, account.peak) == (20 * KIB, 30 * KIB)
    del second
    assert account.statistics() == MemoryStatistics(device="cpu:0", used=0, peak=30 * KIB, limit=None, buffers=0)


@pytest.mark.parametrize(
    "value", [array(TRACKED_BYTES - 1), np.float32(1), 3, None, "text", [array(KIB)], bytes(2 * TRACKED_BYTES)]
)
def test_small_values_and_other_things_are_not_counted(value: object) -> None:
    account = MemoryAccount("cpu:0")
    account.track(value)
    assert account.statistics().buffers == 0


def test_the_smallest_array_that_counts() -> None:
    account = MemoryAccount("cpu:0")
    value = array(TRACKED_BYTES)
    account.track(value)
    assert account.used == TRACKED_BYTES


def test_views_count_as_the_buffer_they_look_into_and_once() -> None:
    account = MemoryAccount("cpu:0")
    base = array(64 * KIB)
    views = [base[: 8 * KIB], base[1::2][::2], base.reshape(2, -1).T, as_strided(base, (8 * KIB,), (8,))]
    for view in views:
        account.track(view, "view")
    account.track(base)
    assert account.used == 64 * KIB
    del base, view
    assert account.used == 64 * KIB
    views.clear()
    gc.collect()  # as_strided leaves a cycle
    assert account.used == 0


def test_a_broadcast_counts_its_real_memory() -> None:
    account = MemoryAccount("cpu:0")
    small = np.broadcast_to(np.zeros(8), (1000, 8))
    account.track(small)
    assert account.used == 0
    large = np.broadcast_to(array(8 * KIB), (1000, 8 * KIB))
    account.track(large)
    assert account.used == 8 * KIB


def test_an_id_that_is_used_again_is_another_buffer() -> None:
    account = MemoryAccount("cpu:0")
    ids = set()
    for _ in range(100):
        value = array(8 * KIB)
        ids.add(id(value))
        account.track(value)
        assert account.used == 8 * KIB
        del value
    assert len(ids) < 100, "no id was used again, so this showed nothing"
    assert account.peak == 8 * KIB


def test_an_id_that_is_used_again_before_any_look() -> None:
    account = MemoryAccount("cpu:0")
    ids = set()
    for number in range(100):
        value = array(8 * KIB)
        ids.add(id(value))
        account.track(value, str(number))
        account.track(value, "again")
        if number < 99:
            del value
    assert len(ids) < 100, "no id was used again, so this showed nothing"
    assert account.top() == (LiveBuffer(8 * KIB, "99"),)
    assert account.total == 100 * 8 * KIB


def test_counted_values_need_no_lock() -> None:
    account = MemoryAccount("cpu:0")
    value = array(8 * KIB)
    account.track(value)
    with account._lock:
        other = threading.Thread(target=account.track, args=(value[KIB:],))
        other.start()
        other.join(timeout=PATIENCE_S)
        assert not other.is_alive()


def test_over_the_limit_raises_and_lists_the_buffers() -> None:
    account = MemoryAccount("cpu:0", 32 * KIB)
    kept = array(20 * KIB)
    account.track(kept, "loop/matmul")
    exact = array(12 * KIB)
    account.track(exact, "exact")
    assert account.used == account.limit
    del exact
    value = array(16 * KIB)
    with pytest.raises(MemoryLimitExceeded) as caught:
        account.track(value, "loop/add")
    exceeded = caught.value
    assert (exceeded.requested, exceeded.used, exceeded.limit) == (16 * KIB, 36 * KIB, 32 * KIB)
    assert exceeded.top == (LiveBuffer(20 * KIB, "loop/matmul"), LiveBuffer(16 * KIB, "loop/add"))
    assert str(exceeded).startswith(
        "cpu:0 holds 36.0 KiB, over its limit of 32.0 KiB, after a value of 16.0 KiB; largest now: "
        "loop/matmul 20.0 KiB, loop/add 16.0 KiB; raise memory_limit="
    )
    del value
    assert account.used == 20 * KIB


def test_a_value_that_is_too_large_by_itself_is_told_apart() -> None:
    """No place to move others to, and no other order, would help; so no such advice is given."""
    account = MemoryAccount("cpu:0", 32 * KIB)
    account.advise = lambda: "or give spill_directory="
    value = array(40 * KIB)
    with pytest.raises(MemoryLimitExceeded, match="that value alone is larger than the limit") as caught:
        account.track(value, "feed")
    assert str(caught.value).endswith("raise memory_limit=, or feed or compute it in parts")


def test_top_gives_the_largest_first() -> None:
    account = MemoryAccount("cpu:0")
    values = [array(k * 5 * KIB) for k in (2, 3, 1)]
    for k, value in enumerate(values):
        account.track(value, str(k))
    assert account.top(2) == (LiveBuffer(15 * KIB, "1"), LiveBuffer(10 * KIB, "0"))


@pytest.mark.parametrize("limit", [0, -1, 1.5, True, "1 GB"])
def test_a_limit_is_a_positive_int(limit: object) -> None:
    with pytest.raises(ValueError, match=r"the memory limit of cpu:0 in bytes is a positive int, not"):
        MemoryAccount("cpu:0", limit)  # type: ignore[arg-type]


def test_a_limit_may_be_a_number_of_numpy_s() -> None:
    assert MemoryAccount("cpu:0", np.int64(5 * KIB)).limit == 5 * KIB  # type: ignore[arg-type]


def test_buffers_made_and_freed_by_many_threads_add_up() -> None:
    account = MemoryAccount("cpu:0")
    kept: list[np.ndarray] = []

    def churn() -> None:
        for k in range(500):
            value = array(8 * KIB)
            account.track(value)
            if k % 50 == 0:
                kept.append(value)

    threads = [threading.Thread(target=churn) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert account.used == len(kept) * 8 * KIB
    kept.clear()
    assert account.statistics().buffers == account.used == 0


def test_a_value_just_over_the_limit_is_told_in_bytes() -> None:
    """Both figures would read 8.0 KiB."""
    account = MemoryAccount("cpu:0", 8192)
    value = np.zeros(8196, np.uint8)
    with pytest.raises(MemoryLimitExceeded, match="cpu:0 holds 8196 bytes, over its limit of 8192 bytes, after"):
        account.track(value)


class Kept(list[Any]):
    """A store of values as they come."""

    __slots__ = ("__weakref__",)
    entry_nbytes = 8

    def since(self, count: int) -> list[Any]:
        return self[count:]

    def buffers(self) -> tuple[()]:
        return ()


class State:
    def __init__(self, held: Kept) -> None:
        self.held = held


def test_a_store_counts_small_values_once_and_while_it_lives() -> None:
    account = MemoryAccount("cpu:0", 1 << 20)
    held, value = Kept(), np.ones(100)
    held.append(value)
    for _ in range(3):
        account.track(State(held), "saved")
    assert account.used == sys.getsizeof(value) + 8
    assert [buffer.label for buffer in account.top()] == ["saved"]
    number, view, large = np.float32(1.0), value[2:].copy()[1:], np.ones(1000)
    held += [number, view, large]  # a large array counts by itself, though nobody had counted it before
    account.track(State(held), "saved")
    account.track(large, "again")
    assert account.used == sum(map(sys.getsizeof, (value, number, view, view.base))) + 4 * 8 + large.nbytes
    del held
    assert account.used == large.nbytes
    del large
    assert account.used == 0


def test_without_a_limit_stores_are_left_alone() -> None:
    account, held = MemoryAccount("cpu:0"), Kept([np.ones(100)])
    account.track(State(held))
    assert account.used == 0


def test_a_store_is_looked_through_before_the_limit_counts_as_passed() -> None:
    account, held, same = MemoryAccount("cpu:0", 100_000), Kept(), np.ones(400)
    for _ in range(1000):
        held.append(same)
        account.track(State(held), "same")
    assert account.used < 100_000
    with pytest.raises(MemoryLimitExceeded) as caught:
        for _ in range(1000):
            held.append(np.ones(400))
            account.track(State(held), "others")
    assert 100_000 < caught.value.used < 120_000


def test_feeds_are_forgotten_and_present_buffers_are_not() -> None:
    """By its buffer, whatever view of it is tracked; once, though it may be freed later."""
    account = MemoryAccount("cpu:0", 1 << 20)
    made, fed, small = np.ones(10_000), np.ones(20_000), np.ones(3)
    account.track(made)
    found = account.uncounted([made, fed[5:], small, 3.0])
    assert [id(buffer) for buffer in found] == [id(fed)]
    account.track(fed.reshape(100, 200))
    assert account.used == made.nbytes + fed.nbytes
    assert account.fed == fed.nbytes
    account.forget(found)
    account.forget(found)
    assert account.used == made.nbytes
    del fed, found
    assert account.used == made.nbytes
    del made
    assert account.used == 0
