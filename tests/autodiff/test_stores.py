"""The stores that loops carry: versions, of saved values and of gradients that add up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from asyncflow.autodiff.stores.stores import SavedValues, StoreGradient, StoreLog


def test_versions_of_a_store_keep_their_meaning() -> None:
    """Two go on from one: the first in place, the second in a copy."""
    base = SavedValues(StoreLog(), 0, 0).saved(0, "a")
    left, right = base.saved(1, "b"), base.saved(1, "c")
    assert left.log is base.log
    assert [each.length for each in (base, left, right)] == [1, 2, 2]
    assert [left.read(index) for index in (0, 1)] == ["a", "b"]
    assert [right.read(index) for index in (0, 1)] == ["a", "c"]


def test_values_are_saved_in_order() -> None:
    with pytest.raises(IndexError, match="value number 2 is saved into a store of 1"):
        SavedValues(StoreLog(), 0, 0).saved(0, "a").saved(2, "c")


def test_bytes_count_only_the_own_version() -> None:
    """Arrays, scalars and stores count; values without a size count as nothing."""
    inner = SavedValues(StoreLog(), 0, 0).saved(0, np.zeros(4))
    values = SavedValues(StoreLog(), 0, 0).saved(0, inner).saved(1, np.float32(1)).saved(2, "text")
    assert [inner.nbytes, values.nbytes, SavedValues(StoreLog(), 0, 0).nbytes] == [32, 36, 0]
    assert inner.saved(1, np.zeros(1)).nbytes == 40
    assert inner.nbytes == 32


def entries(*indices: int) -> list[tuple[int, Any]]:
    return [(index, np.full(2, 10.0**place)) for place, index in enumerate(indices)]


def test_versions_of_a_store_gradient_keep_their_meaning() -> None:
    """Two go on from one: the first in place, the second in a copy; none sees what the others got."""
    base = StoreGradient.of(entries(0))
    left = base.with_entries(entries(0, 1))
    right = base.with_entries(entries(1))
    assert left.log is base.log
    assert right.log is not base.log
    assert [index for index, _ in base.entries()] == [0]
    assert [index for index, _ in left.entries()] == [0, 0, 1]
    assert [index for index, _ in right.entries()] == [0, 1]
    assert [len(each.read(0)) for each in (base, left, right)] == [1, 2, 1]
    assert [len(each.read(1)) for each in (base, left, right)] == [0, 1, 1]
    assert [each.nbytes for each in (base, left, right)] == [16, 48, 32]


def test_merging_appends_the_shorter_one() -> None:
    """So a loop that adds a few entries to many in each iteration takes time for the few, whichever comes first."""
    many, few = StoreGradient.of(entries(*range(9))), StoreGradient.of(entries(3))
    merged = few.merged(many)
    assert merged.log is many.log
    assert merged.length == 10
    assert merged.merged(StoreGradient.of(())) is merged
    np.testing.assert_array_equal(merged.total(3, (2,), np), [1001, 1001])


def test_totals_are_of_one_shape() -> None:
    """A total of another shape is refused even if it would broadcast; an element without a gradient has no total."""
    found = StoreGradient.of([(0, np.ones(2)), (0, np.ones(1))])
    with pytest.raises(ValueError, match=r"\[1\] has reached element 0.*\[2\]"):
        found.total(0, (2,), np)
    assert found.total(1, (2,), np) is None
