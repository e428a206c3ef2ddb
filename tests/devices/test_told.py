from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from asyncflow.autodiff.stores.stores import SavedValues, StoreLog
from asyncflow.control.stores.array_store import ArrayKind
from asyncflow.control.stores.array_value import ArrayValue
from asyncflow.control.stores.row_block import RowBlock, RowKind, RowState
from asyncflow.devices import told
from asyncflow.devices.told import Holding, ToldAccount

KIB = 1024
FEW = 2 * KIB
"""Bytes of Python objects for the arrays of a test."""


def array(nbytes: int = 64 * KIB) -> np.ndarray:
    return np.zeros(nbytes, np.uint8)


def saved(*values: Any) -> SavedValues:
    store = SavedValues(StoreLog(), 0, 0)
    for index, value in enumerate(values):
        store = store.saved(index, value)
    return store


def test_what_functions_hold_at_the_same_time_adds_up() -> None:
    account = ToldAccount("cpu:0")
    first, second = Holding(), Holding()
    account.tell(first, 10 * KIB, 5 * KIB)
    assert (account.used, account.peak) == (10 * KIB, 15 * KIB)
    account.tell(second, 20 * KIB, 0)
    assert (account.used, account.peak) == (30 * KIB, 30 * KIB)
    account.tell(first, KIB, 0)
    assert (account.used, account.peak) == (21 * KIB, 30 * KIB)
    del second
    account.passed(KIB)
    assert (account.used, account.peak) == (KIB, 30 * KIB)
    account.passed(40 * KIB)
    assert (account.used, account.peak) == (KIB, 41 * KIB)
    del first
    assert account.used == 0


def test_a_function_that_raises_no_peak_is_counted_once_it_may_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most functions are short, and are over by then; the peak is right in any case."""
    account, first, second = ToldAccount("cpu:0"), Holding(), Holding()
    account.tell(first, 10 * KIB, 0)
    del first
    account.tell(second, 4 * KIB, 0)
    assert (account.used, account.peak) == (0, 10 * KIB)
    clock = itertools.count(told._MOST_NS, told._MOST_NS)
    monkeypatch.setattr(told, "perf_counter_ns", lambda: next(clock))
    account.pause(second, 4 * KIB, 0)
    account.pause(second, 4 * KIB, 0)
    assert account.used == 4 * KIB
    account.tell(second, KIB, 0)
    assert (account.used, account.peak) == (KIB, 10 * KIB)
    account.tell(Holding(), 20 * KIB, 0)
    assert account.peak == 21 * KIB


def test_a_finalizer_may_ask_for_the_bytes_while_others_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python may collect garbage after any call of the account."""
    account, ended, second = ToldAccount("cpu:0"), [Holding()], Holding()
    account.tell(ended[0], 10 * KIB, 0)
    find, asked = ToldAccount._watch_of, list[int]()

    def interrupted(self: ToldAccount, what: object) -> Any:
        ended.clear()
        asked.append(self.used)
        return find(self, what)

    monkeypatch.setattr(ToldAccount, "_watch_of", interrupted)
    account.tell(second, 20 * KIB, 0)
    assert (asked, account.used) == ([0], 20 * KIB)


def test_tracked_arrays_count_beside_reports() -> None:
    account, holding, value = ToldAccount("cpu:0"), Holding(), array()
    account.track(value, "node")
    account.tell(holding, KIB, 0)
    assert account.used == 65 * KIB
    del value
    assert account.used == KIB


def test_a_store_counts_as_long_as_it_lives_and_values_until_they_are_taken() -> None:
    account, holding = ToldAccount("cpu:0"), Holding()
    store = saved(array(), array(), array())
    account.tell(holding, 0, 0, (store,))
    assert 192 * KIB <= account.used <= 192 * KIB + FEW
    store.read_last(2)
    account.tell(holding, 0, 0, (store,))
    assert 128 * KIB <= account.used <= 128 * KIB + FEW
    del holding
    assert account.used >= 128 * KIB
    del store
    assert account.used == 0


def test_a_first_value_that_the_function_was_given_is_another_s() -> None:
    account, given = ToldAccount("cpu:0"), array()
    holding = Holding(given, np.float32(1), None)
    account.tell(holding, 0, 0, (whole := saved(given, array()),), (begun := saved(given, array()),))
    assert 64 * KIB <= account.used <= 64 * KIB + FEW
    account.tell(holding, 0, 0, (), (own := saved(array(), array()),))
    assert 128 * KIB <= account.used <= 128 * KIB + FEW  # of which the second is in `saved`, too
    assert whole.length == begun.length == own.length == 2


def test_what_several_stores_have_counts_once() -> None:
    account, given, both = ToldAccount("cpu:0"), array(), array()
    holding = Holding(given)
    one, two = saved(both, given, both), saved(array(), both, both[: 8 * KIB], np.float32(1))
    account.tell(holding, 0, 0, (), (), (one, two))
    assert 128 * KIB <= account.used <= 128 * KIB + FEW
    del one
    account.tell(holding, 0, 0, (), (), (two,))
    assert 128 * KIB <= account.used <= 128 * KIB + FEW


def test_values_that_leave_a_store_in_any_order_are_found_gone() -> None:
    account, holding = ToldAccount("cpu:0"), Holding()
    kind = ArrayKind(np.dtype(np.uint8), (64 * KIB,), dynamic_size=True, clear_after_read=True)
    values = ArrayValue.create(np, kind, 0)
    for index in range(100):
        values = values.write(index, array())
    account.tell(holding, 0, 0, (), (), (values,))
    assert account.used >= 6400 * KIB
    account.tell(holding, 0, 0, (), (), (values,))
    for index in range(50):
        values.read(index)
    found = []
    for _ in range(7):  # each time pays for a few looks, of a hundred
        account.tell(holding, 0, 0, (), (), (values,), may_look=False)
        found.append(account.used)
    assert len(set(found[:6])) == 1
    assert found[0] >= 6400 * KIB
    assert 3200 * KIB <= found[6] <= 3300 * KIB
    values.read(99)
    account.tell(holding, 0, 0, (), (), (values,))
    assert account.used < found[6]


def test_a_block_that_has_grown_stood_beside_the_old_one() -> None:
    account, holding = ToldAccount("cpu:0"), Holding()
    state = RowState(RowBlock(np, RowKind(np.dtype(np.uint8), (64 * KIB,)), 2), 0)
    for _ in range(3):
        state = state.append(array()[np.newaxis])
    account.tell(holding, 0, 0, (), (), (state,))
    assert (account.used, account.peak) == (256 * KIB, 384 * KIB)


def test_a_store_that_reports_its_bytes() -> None:
    account, holding = ToldAccount("cpu:0"), Holding()
    account.tell(holding, KIB, 0, (), (), (array(),))
    assert account.used == 65 * KIB


def test_where_a_function_may_stop_it_tells_at_most_a_hundredth_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    account, holding = ToldAccount("cpu:0"), Holding()
    ticks = itertools.count(0, 1_000)
    clock: Callable[[], int] = lambda: next(ticks)  # noqa: E731
    monkeypatch.setattr(told, "perf_counter_ns", clock)
    found = []
    for nbytes in range(1, 810):
        account.pause(holding, nbytes * KIB, 0)
        found.append(account.used // KIB)
    assert sorted(set(found)) == [0, 501, 601, 701, 801]  # not where the first half a millisecond may be all
