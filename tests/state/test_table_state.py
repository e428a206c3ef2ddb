"""The rows of a table alone: what writes do to them, readers on other threads, and captures."""

from __future__ import annotations

import gc
import sys
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import asyncflow as af
from asyncflow.state.table_state import PAGE_BYTES, TableState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROW_BYTES = PAGE_BYTES // 4
"""Four such rows are a page."""


def scalar(number: int) -> Any:
    """A value of rank 0, as kernels have them."""
    return np.int64(number)


def state(rows: int = 10, **specs: af.Spec) -> TableState:
    found = specs or {"x": af.spec("int64", ())}
    return TableState("t", rows, list(found), list(found.values()))


def large(rows: int) -> TableState:
    """A table of four rows a page."""
    return state(rows, x=af.spec("int64", (ROW_BYTES // 8,)))


def fill(table: TableState, numbers: Any) -> None:
    """Appends large rows, each of one number."""
    table.append(np.repeat(np.asarray(numbers)[:, None], ROW_BYTES // 8, axis=1))


def firsts(arrays: dict[str, Any]) -> list[int]:
    """The number that each large row is made of; all of a row is of one write."""
    x = arrays["x"]
    assert (x == x[:, :1]).all()
    found: list[int] = x[:, 0].tolist()
    return found


_ints = st.integers(0, 4)
_steps = st.one_of(
    st.tuples(st.just("append"), st.just(0)),
    st.tuples(st.just("appends"), st.integers(0, 12)),
    st.tuples(st.just("write"), _ints),
    st.tuples(st.just("writes"), st.lists(_ints, max_size=6)),
)


@given(st.lists(_steps, max_size=12))
@settings(max_examples=60)
def test_rows_are_as_in_a_list(steps: list[tuple[str, Any]]) -> None:
    table, model, size, end = state(5), [0] * 5, 0, 0
    for number, (verb, given_) in enumerate(steps, 1):
        if verb in ("append", "appends"):
            count = 1 if verb == "append" else given_
            places = [(end + k) % 5 for k in range(count)]
            values: Any = scalar(number) if verb == "append" else number * 100 + np.arange(count)
            assert table.append(values).tolist() == (places[0] if verb == "append" else places)
            end, size = (end + count) % 5, max(size, min(end + count, 5))
        else:
            places = [given_] if verb == "write" else given_
            values = scalar(number) if verb == "write" else number * 100 + np.arange(len(places))
            table.write(np.array(given_, np.int64), values)
            size = max([size, *(place + 1 for place in places)])
        for place, value in zip(places, np.atleast_1d(values).tolist(), strict=True):
            model[place] = value
    assert (table.size, table.end) == (size, end)
    assert table.gather(np.arange(5))[0].tolist() == model


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda t: t.write(scalar(10), scalar(1)), IndexError, "'t' has rows 0 to 9; got 10"),
        (lambda t: t.write(np.array([0, -1]), np.arange(2)), IndexError, "got -1"),
        (lambda t: t.gather(np.array([3, 99])), IndexError, "got 99"),
        (lambda t: t.gather(np.uint64(2**63)), IndexError, "got 9223372036854775808"),
        (
            lambda t: t.write(np.array([0, 1]), np.arange(3)),
            af.ShapeError,
            r"x of table 't' takes \[2\] here; got \[3\]",
        ),
        (lambda t: t.sample(np.random.default_rng(0), ()), af.AsyncflowError, "sampled before it has a row"),
    ],
)
def test_refuses_and_stays_as_it_is(call: Callable[[TableState], object], error: type, message: str) -> None:
    table = state()
    with pytest.raises(error, match=message):
        call(table)
    assert table.size == 0 and not table.gather(np.arange(10))[0].any()


def test_one_wrong_part_keeps_all_parts_from_being_written() -> None:
    table = state(x=af.spec("int64", (2,)), y=af.spec("float32", ()))
    with pytest.raises(af.ShapeError, match="y of table"):
        table.append(np.ones(2, np.int64), np.ones(3, np.float32))
    assert table.size == 0 and not table.gather(scalar(0))[0].any()


def test_rows_read_stay() -> None:
    table = state()
    table.append(scalar(1))
    row, rows, drawn = (
        table.gather(scalar(0)),
        table.gather(np.array([0])),
        table.sample(np.random.default_rng(0), (2,)),
    )
    table.write(scalar(0), scalar(2))
    assert [x[0].tolist() for x in (row, rows, drawn)] == [1, [1], [1, 1]]


@pytest.fixture
def hasty_threads() -> Iterator[None]:
    """Threads change as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_fault_50_readers_on_other_threads_see_whole_rows(hasty_threads: None) -> None:
    """F50: two writers and two readers of one row of many parts; no reader sees parts of two writes."""
    table = state(2, **{f"x{k}": af.spec("int64", ()) for k in range(20)})
    torn: list[set[int]] = []
    done = threading.Event()

    def write(number: int) -> None:
        for _ in range(300):
            table.write(scalar(0), *[scalar(number)] * 20)

    def read() -> None:
        while not done.is_set():
            found = {int(x) for x in table.gather(scalar(0))}
            if len(found) > 1:
                torn.append(found)

    readers = [threading.Thread(target=read) for _ in range(2)]
    writers = [threading.Thread(target=write, args=(number,)) for number in (1, 2)]
    for thread in readers + writers:
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    for thread in readers:
        thread.join()
    assert not torn


def test_a_write_is_in_place_and_touches_its_rows_alone() -> None:
    """A write costs the same for any size of table, since it takes no new memory, and reads no other rows."""
    table = state(100_000)
    (column,) = table._columns
    table._columns = [Noting(column)]  # type: ignore[list-item]
    table.write(scalar(77_777), scalar(5))
    table.append(scalar(6))
    table.append(np.array([7, 8]))
    assert [np.asarray(at).tolist() for at in table._columns[0].written] == [77_777, 0, [1, 2]]  # type: ignore[attr-defined]
    assert table.gather(np.array([0, 1, 2, 77_777]))[0].tolist() == [6, 7, 8, 5]


class Noting:
    """A column that notes where it is written, and can do nothing that goes over all of it."""

    def __init__(self, column: Any) -> None:
        self.column, self.written = column, []  # type: tuple[Any, list[Any]]
        self.shape, self.ndim, self.take = column.shape, column.ndim, column.take

    def __setitem__(self, at: Any, value: Any) -> None:
        self.written.append(at)
        self.column[at] = value


# -- captures --------------------------------------------------------------------------------------------------------


def test_a_capture_is_the_table_of_its_moment() -> None:
    table = large(10)
    fill(table, range(10))
    before = table.capture()
    fill(table, [100, 101])
    between = table.capture()
    table.write(np.array([8, 9, 1]), np.full((3, ROW_BYTES // 8), 200))
    assert firsts(before.arrays()) == list(range(10))
    assert firsts(between.arrays()) == [100, 101, *range(2, 10)]
    assert before.arrays()["position"].tolist() == [10, 10, 0]
    assert between.arrays()["position"].tolist() == [10, 10, 2]
    assert firsts(table.capture().arrays()) == [100, 200, *range(2, 8), 200, 200]


def test_taking_a_capture_copies_nothing_and_a_write_one_page_once() -> None:
    table = large(12)
    fill(table, range(10))
    capture = table.capture()
    assert capture._pages == {}
    for _ in range(3):
        table.write(scalar(5), np.zeros(ROW_BYTES // 8, np.int64))
    table.write(scalar(11), np.zeros(ROW_BYTES // 8, np.int64))
    assert {page: kept[0][:, 0].tolist() for page, kept in capture._pages.items()} == {
        1: [4, 5, 6, 7],
        2: [8, 9, 0, 0],  # rows 8 and 9 are part of it
    }
    assert firsts(capture.arrays()) == list(range(10))
    assert capture.is_done and capture._pages == {}


def test_a_capture_that_is_read_or_dropped_costs_writes_nothing() -> None:
    table = large(8)
    fill(table, range(8))
    read, dropped = table.capture(), table.capture()
    assert firsts(read.arrays()) == list(range(8))
    del dropped
    gc.collect()
    fill(table, [50])
    assert not table._captures and read._pages == {}


def test_writes_beside_a_reader_of_the_capture() -> None:
    table = large(40)
    fill(table, range(40))
    capture, found = table.capture(), []
    reader = threading.Thread(target=lambda: found.append(firsts(capture.arrays())))
    reader.start()
    for number in range(200):
        fill(table, [1000 + number])
    reader.join()
    assert found == [list(range(40))]


def test_restore_equals_the_capture() -> None:
    table, other = large(6), large(6)
    fill(table, range(4))
    arrays = table.capture().arrays()
    capture = other.capture()
    fill(other, [7, 8])
    later = other.capture()
    other.restore(arrays)
    fill(other, [9])
    assert firsts(other.capture().arrays()) == [0, 1, 2, 3, 9]
    assert firsts(capture.arrays()) == []
    assert firsts(later.arrays()) == [7, 8]
    assert firsts(arrays) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.pop("x"), "has position, x; found position$"),
        (lambda a: a.update(y=a["x"]), "found position, x, y"),
        (lambda a: a.update(position=np.array([5, 2, 2])), "has 10 rows; found position"),
        (lambda a: a.update(position=np.array([10, 11, 2])), "11 rows, the next at 2, are not of one of 10"),
        (lambda a: a.update(position=np.array([10, 3, 3])), r"x of table 't' is int64\[3\]; found int64\[2\]"),
        (lambda a: a.update(x=a["x"].astype("int32")), r"is int64\[2\]; found int32\[2\]"),
    ],
)
def test_restore_refuses_what_does_not_fit(change: Callable[[dict[str, Any]], object], message: str) -> None:
    table = state()
    table.append(np.array([1, 2]))
    arrays = table.capture().arrays()
    table.append(np.array([3]))
    change(arrays)
    with pytest.raises(af.CheckpointError, match=message):
        table.restore(arrays)
    assert (table.size, table.gather(np.arange(4))[0].tolist()) == (3, [1, 2, 3, 0])
