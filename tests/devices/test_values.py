from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from asyncflow.devices.values import is_array, stays_on_host


@pytest.mark.parametrize(
    ("value", "is_one", "stays"),
    [
        (np.zeros(2, np.float32), True, False),
        (np.zeros(2, np.int64), True, False),
        (np.zeros((), np.float32), True, False),
        (np.float32(1), True, False),
        (np.zeros((), np.int32), True, True),
        (np.int32(1), True, True),
        (np.uint8(1), True, True),
        (np.bool_(True), True, True),
        (np.array(["a"]), False, True),
        (np.array([b"a"]), False, True),
        (np.array([None]), False, True),
        (np.str_("a"), False, True),
        (1.0, False, True),
        (1, False, True),
        ([1.0], False, True),
        (None, False, True),
    ],
    ids=repr,
)
def test_arrays_go_to_the_device_but_for_counters_and_predicates(value: Any, is_one: bool, stays: bool) -> None:
    assert is_array(value) is is_one
    assert stays_on_host(value) is stays
