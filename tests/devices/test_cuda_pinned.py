from __future__ import annotations

import gc
import threading
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncflow.devices.cuda.transfers import pinned
from asyncflow.devices.cuda.transfers.pinned import (
    ALIGNMENT,
    PinnedBuffer,
    PinnedSlab,
    close_shared_slab,
    default_pinned_bytes,
    shared_slab,
)
from tests.patience import PATIENCE_S


class Host:
    """The two calls of CuPy's that pin memory, on page-aligned memory of NumPy's."""

    def __init__(self, room: int | None = None) -> None:
        self.cuda = SimpleNamespace(runtime=self)
        self.allocated: dict[int, np.ndarray] = {}
        self.flags: list[int] = []
        self.freed: list[int] = []
        self._room = room

    def hostAlloc(self, nbytes: int, flags: int) -> int:
        if self._room is not None and nbytes > self._room:
            raise MemoryError("cudaErrorMemoryAllocation")
        if self._room is not None:
            self._room -= nbytes
        self.flags.append(flags)
        memory = np.zeros(nbytes + 4096, np.uint8)
        address: int = -(-memory.ctypes.data // 4096) * 4096
        self.allocated[address] = memory
        return address

    def freeHost(self, address: int) -> None:
        del self.allocated[address]
        self.freed.append(address)


def slab_of(units: int) -> PinnedSlab:
    return PinnedSlab(Host(), units * ALIGNMENT)


def taken(slab: PinnedSlab, nbytes: int) -> PinnedBuffer:
    buffer = slab.take(nbytes)
    assert buffer is not None
    return buffer


def test_memory_is_pinned_once_and_for_all_cards() -> None:
    host = Host()
    slab = PinnedSlab(host, 4 * ALIGNMENT)
    assert len(host.allocated) == 1 and host.flags == [1]
    buffers = [taken(slab, ALIGNMENT) for _ in range(4)]
    assert slab.take(1) is None
    assert len(host.allocated) == 1
    assert sorted(b.ptr for b in buffers) == [next(iter(host.allocated)) + i * ALIGNMENT for i in range(4)]


def test_pieces_are_aligned_and_do_not_overlap() -> None:
    slab = slab_of(8)
    first, second = taken(slab, 1), taken(slab, ALIGNMENT + 1)
    assert first.ptr % ALIGNMENT == second.ptr % ALIGNMENT == 0
    assert second.ptr == first.ptr + ALIGNMENT
    assert (first.nbytes, second.nbytes) == (1, ALIGNMENT + 1)
    assert slab.free_bytes == 5 * ALIGNMENT


def test_the_first_hole_that_is_large_enough_is_taken() -> None:
    slab = slab_of(8)
    a, _b, c, _d = (taken(slab, n * ALIGNMENT) for n in (2, 1, 3, 1))
    at_a, at_c = a.ptr, c.ptr
    a.free()
    c.free()
    assert taken(slab, 3 * ALIGNMENT).ptr == at_c
    assert taken(slab, ALIGNMENT).ptr == at_a


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1)])
def test_holes_that_touch_become_one(order: tuple[int, ...]) -> None:
    slab = slab_of(3)
    buffers = [taken(slab, ALIGNMENT) for _ in range(3)]
    for index in order:
        assert slab.take(3 * ALIGNMENT) is None
        buffers[index].free()
    assert taken(slab, 3 * ALIGNMENT).ptr == buffers[0].ptr


def test_a_view_is_the_memory_itself() -> None:
    slab = slab_of(4)
    before, buffer, after = taken(slab, ALIGNMENT), taken(slab, ALIGNMENT), taken(slab, ALIGNMENT)
    around = before.view(np.uint8, (ALIGNMENT,)), after.view(np.uint8, (ALIGNMENT,))
    view = buffer.view(np.float32, (4, 32))
    view[...] = np.arange(128, dtype=np.float32).reshape(4, 32)
    assert view.ctypes.data == buffer.ptr and view.flags.c_contiguous and view.flags.writeable
    assert np.array_equal(buffer.view("f4", (128,)), np.arange(128))
    assert not any(side.any() for side in around)
    assert buffer.view(np.int8, ()).shape == ()
    assert buffer.view(np.int64, (0, 5)).size == 0


def test_a_view_of_bfloat16() -> None:
    view = taken(slab_of(1), 8).view(ml_dtypes.bfloat16, (2, 2))
    view[...] = 1.5
    assert view.dtype == ml_dtypes.bfloat16 and float(view.sum()) == 6.0


def test_a_view_keeps_its_buffer() -> None:
    slab = slab_of(1)
    view = taken(slab, ALIGNMENT).view(np.uint8, (8,))[2:]
    gc.collect()
    assert slab.take(1) is None
    del view
    assert slab.take(1) is not None


def test_a_view_larger_than_its_buffer_is_refused() -> None:
    buffer = taken(slab_of(1), 100)
    with pytest.raises(ValueError, match=r"float32\[26\] takes 104 bytes, and the pinned buffer has 100"):
        buffer.view(np.float32, (26,))


def test_a_freed_buffer_is_neither_seen_nor_freed_again() -> None:
    slab = slab_of(1)
    buffer = taken(slab, 10)
    buffer.free()
    other = taken(slab, 10)
    with pytest.raises(ValueError, match="was freed"):
        buffer.view(np.uint8, (1,))
    with pytest.raises(ValueError, match="freed twice"):
        buffer.free()
    del buffer
    assert slab.take(1) is None  # it is still the other's
    other.free()
    assert slab.free_bytes == ALIGNMENT


@pytest.mark.parametrize("nbytes", [0, -1, 2 * ALIGNMENT + 1])
def test_what_never_fits_is_refused(nbytes: int) -> None:
    slab = slab_of(2)
    with pytest.raises(ValueError, match=f"1 to 1024 bytes .*, not {nbytes}; copy in pieces, or pin more"):
        slab.take(nbytes)
    with pytest.raises(ValueError, match="copy in pieces"):
        slab.wait_for(nbytes, lambda buffer: buffer.free())


def test_whole_units_are_pinned() -> None:
    host = Host()
    slab = PinnedSlab(host, 4 * ALIGNMENT + 100)
    assert (slab.nbytes, len(host.allocated)) == (4 * ALIGNMENT, 1)
    small, large = taken(slab, ALIGNMENT), taken(slab, 2 * ALIGNMENT)
    assert [small.ptr] == list(host.allocated) and large.ptr == small.ptr + ALIGNMENT
    assert slab.take(2 * ALIGNMENT) is None
    assert slab.free_bytes == ALIGNMENT


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "the pinned memory in bytes"),
        (1.5, "the pinned memory in bytes"),
        (ALIGNMENT - 1, "leave none of 512 bytes"),
    ],
)
def test_sizes_are_checked_before_anything_is_pinned(nbytes: Any, text: str) -> None:
    host = Host()
    with pytest.raises(ValueError, match=text):
        PinnedSlab(host, nbytes)
    assert not host.flags


def test_what_cannot_be_pinned_is_refused() -> None:
    host = Host(room=2 * ALIGNMENT)
    with pytest.raises(MemoryError, match="cudaErrorMemoryAllocation"):
        PinnedSlab(host, 3 * ALIGNMENT)
    assert not host.allocated


# -- waiting -----------------------------------------------------------------------------------------------------------


def test_waiting_calls_are_served_in_turn() -> None:
    slab = slab_of(4)
    held = [taken(slab, ALIGNMENT) for _ in range(4)]
    served: list[tuple[str, int]] = []
    kept: list[PinnedBuffer] = []

    def ask(name: str, units: int) -> None:
        def call(buffer: PinnedBuffer) -> None:
            served.append((name, buffer.nbytes // ALIGNMENT))
            kept.append(buffer)

        slab.wait_for(units * ALIGNMENT, call)

    ask("large", 2)
    ask("small", 1)
    held.pop().free()
    assert served == []  # the small one does not overtake
    assert slab.take(1) is None  # nor does one that never waited
    held.pop().free()
    assert served == [("large", 2)]
    held.pop().free()
    assert served == [("large", 2), ("small", 1)]
    held.pop().free()
    assert slab.take(1) is not None


def test_room_that_is_there_is_given_at_once() -> None:
    slab = slab_of(1)
    got: list[PinnedBuffer] = []
    slab.wait_for(10, got.append)
    assert [buffer.nbytes for buffer in got] == [10]


def test_one_call_may_free_take_and_wait() -> None:
    slab = slab_of(2)
    first = taken(slab, 2 * ALIGNMENT)
    story: list[str] = []

    def second(buffer: PinnedBuffer) -> None:
        story.append("second")
        slab.wait_for(2 * ALIGNMENT, last)
        buffer.free()

    def third(buffer: PinnedBuffer) -> None:
        story.append("third")
        assert slab.take(1) is None
        buffer.free()

    def last(buffer: PinnedBuffer) -> None:
        story.append("last")
        buffer.free()

    slab.wait_for(2 * ALIGNMENT, second)
    slab.wait_for(ALIGNMENT, third)
    first.free()
    assert story == ["second", "third", "last"]
    assert slab.free_bytes == 2 * ALIGNMENT


def test_what_a_waiter_raises_comes_out_and_costs_the_others_nothing() -> None:
    slab = slab_of(1)
    buffer = taken(slab, 1)
    got: list[PinnedBuffer] = []

    def fail(_: PinnedBuffer) -> None:
        raise KeyError("mine")

    slab.wait_for(1, fail)
    slab.wait_for(1, got.append)
    with pytest.raises(KeyError, match="mine"):
        buffer.free()
    slab.serve()
    assert len(got) == 1


def test_a_dropped_buffer_comes_back_and_waiters_hear_of_it_at_the_next_call() -> None:
    slab = slab_of(1)
    buffer = taken(slab, 1)
    got: list[PinnedBuffer] = []
    slab.wait_for(1, got.append)
    del buffer
    assert not got
    slab.serve()
    assert len(got) == 1


# -- threads and the garbage collector ---------------------------------------------------------------------------------


def test_buffers_dropped_on_other_threads_and_in_cycles_come_back() -> None:
    slab = slab_of(800)  # enough even if no collection comes before the end

    def work() -> None:
        for _ in range(200):
            buffer = taken(slab, ALIGNMENT)
            cycle: list[object] = [buffer]
            cycle.append(cycle)  # only the collector frees it, wherever it runs
            del buffer, cycle
            gc.collect(0)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert slab.free_bytes == slab.nbytes
    assert taken(slab, slab.nbytes).nbytes == slab.nbytes


def test_a_buffer_dropped_while_the_slab_is_locked_by_another_thread_blocks_no_thread() -> None:
    slab = slab_of(2)
    buffer = taken(slab, 1)
    locked, done = threading.Event(), threading.Event()
    in_time: list[bool] = []

    def hold() -> None:
        with slab._lock:
            locked.set()
            in_time.append(done.wait(PATIENCE_S))

    thread = threading.Thread(target=hold)
    thread.start()
    assert locked.wait(PATIENCE_S)
    del buffer
    done.set()
    thread.join()
    assert in_time == [True]
    assert slab.free_bytes == slab.nbytes


# -- the process's slab ------------------------------------------------------------------------------------------------


def test_devices_share_one_slab() -> None:
    host, other = Host(), Host()
    slab = shared_slab(host, 4 * ALIGNMENT)
    assert shared_slab(host) is slab and shared_slab(host, 99) is slab
    assert shared_slab(other, ALIGNMENT) is not slab
    buffer = taken(slab, 1)
    with pytest.raises(RuntimeError, match="512 bytes of pinned memory are on loan"):
        close_shared_slab(host)
    assert shared_slab(host) is slab
    buffer.free()
    close_shared_slab(host)
    close_shared_slab(host)
    close_shared_slab(other)
    assert not host.allocated and len(host.freed) == 1
    with pytest.raises(RuntimeError, match="closed"):
        slab.take(1)
    assert shared_slab(host, ALIGNMENT) is not slab
    close_shared_slab(host)


@pytest.mark.parametrize(("memory", "expected"), [(None, 256), (2**40, 256), (400 * 2**20, 100)])
def test_a_process_pins_no_more_than_its_share(
    monkeypatch: pytest.MonkeyPatch, memory: int | None, expected: int
) -> None:
    monkeypatch.setattr(pinned, "usable_memory", lambda: memory)
    assert default_pinned_bytes() == expected * 2**20


# -- first fit against a model -----------------------------------------------------------------------------------------


class FirstFit(RuleBasedStateMachine):
    """The model is a map of units, each lent or not; buffers carry their number as contents."""

    @initialize(units=st.integers(1, 48))
    def pin(self, units: int) -> None:
        self.slab = slab_of(units)
        self.lent = [False] * units
        self.buffers: list[tuple[PinnedBuffer, int, int]] = []
        self.waiting: list[int] = []
        self.served: list[PinnedBuffer] = []
        self.stamp = 0  # at most 255: fewer buffers are taken in a run

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        nbytes = data.draw(st.integers(1, len(self.lent) * ALIGNMENT))
        buffer = self.slab.take(nbytes)
        if self.waiting:
            assert buffer is None
        else:
            self._compare(buffer, nbytes)

    @rule(data=st.data())
    def wait(self, data: st.DataObject) -> None:
        self.waiting.append(data.draw(st.integers(1, len(self.lent) * ALIGNMENT)))
        self.slab.wait_for(self.waiting[-1], self.served.append)
        self._serve()

    @precondition(lambda self: self.buffers)
    @rule(data=st.data(), drop=st.booleans())
    def free(self, data: st.DataObject, drop: bool) -> None:
        index = data.draw(st.integers(0, len(self.buffers) - 1))
        buffer, start, units = self.buffers.pop(index)
        self.lent[start : start + units] = [False] * units
        if drop:
            del buffer
            self.slab.serve()
        else:
            buffer.free()
        self._serve()

    @invariant()
    def bytes_are_whole(self) -> None:
        assert self.slab.free_bytes == self.lent.count(False) * ALIGNMENT
        for buffer, *_, units in self.buffers:
            view = buffer.view(np.uint8, (buffer.nbytes,))
            assert (view == view[0]).all() and units == -(-buffer.nbytes // ALIGNMENT)
        assert len({int(buffer.view(np.uint8, ())) for buffer, *_ in self.buffers}) == len(self.buffers)

    @invariant()
    def holes_are_sorted_and_apart(self) -> None:
        for (offset, size), (following, _) in pairwise(self.slab._holes):
            assert size > 0 and offset + size < following

    def teardown(self) -> None:
        while self.buffers:
            self.buffers.pop()[0].free()
            while self.served:
                self.served.pop().free()
        self.slab.close()

    def _serve(self) -> None:
        """Compare the buffers that have been handed out, in turn, with the model's."""
        while self.waiting:
            buffer = self.served.pop(0) if self.served else None
            self._compare(buffer, self.waiting[0])
            if buffer is None:
                return
            self.waiting.pop(0)
        assert not self.served

    def _compare(self, buffer: PinnedBuffer | None, nbytes: int) -> None:
        place = self._first(-(-nbytes // ALIGNMENT))
        if buffer is None:
            assert place is None
            return
        assert place is not None and buffer.nbytes == nbytes
        start, units = place
        assert self.slab._address is not None and buffer.ptr == self.slab._address + start * ALIGNMENT
        self.lent[start : start + units] = [True] * units
        self.stamp += 1
        buffer.view(np.uint8, (nbytes,))[...] = self.stamp
        self.buffers.append((buffer, start, units))

    def _first(self, units: int) -> tuple[int, int] | None:
        for start in range(len(self.lent) - units + 1):
            if not any(self.lent[start : start + units]):
                return start, units
        return None


TestFirstFit = FirstFit.TestCase
TestFirstFit.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


@given(st.lists(st.integers(1, 5 * ALIGNMENT), max_size=40), st.randoms(use_true_random=False))
@settings(max_examples=50, deadline=None)
def test_whatever_the_order_of_frees_the_whole_slab_is_one_hole_again(sizes: list[int], random: Any) -> None:
    slab = slab_of(60)
    buffers = [buffer for buffer in map(slab.take, sizes) if buffer is not None]
    random.shuffle(buffers)
    for buffer in buffers:
        buffer.free()
    assert slab.largest_hole == slab.nbytes
