"""`SavedValues`, the store that a loop carries from iteration to iteration, and when values are not saved in one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.autodiff.saved_values import SAVE, Items, SavedValues

Run = Callable[..., Awaitable[Any]]


def test_versions_of_a_store_keep_their_meaning() -> None:
    """Two go on from one: the first in place, the second in a copy."""
    base = SavedValues(Items(), 0, 0).saved(0, "a")
    left, right = base.saved(1, "b"), base.saved(1, "c")
    assert left.items is base.items
    assert [each.length for each in (base, left, right)] == [1, 2, 2]
    assert [left.read(index) for index in (0, 1)] == ["a", "b"]
    assert [right.read(index) for index in (0, 1)] == ["a", "c"]


def test_values_are_saved_in_order() -> None:
    with pytest.raises(IndexError, match="value number 2 is saved into a store of 1"):
        SavedValues(Items(), 0, 0).saved(0, "a").saved(2, "c")


def test_bytes_are_those_of_the_version() -> None:
    """Of arrays, scalars and stores; what has no size counts nothing."""
    inner = SavedValues(Items(), 0, 0).saved(0, np.zeros(4))
    values = SavedValues(Items(), 0, 0).saved(0, inner).saved(1, np.float32(1)).saved(2, "text")
    assert [inner.nbytes, values.nbytes, SavedValues(Items(), 0, 0).nbytes] == [32, 36, 0]
    assert inner.saved(1, np.zeros(1)).nbytes == 40
    assert inner.nbytes == 32


def viewed(x: Any, times: int) -> Any:
    """`x`, through so many pairs of reshapes."""
    for _ in range(times):
        x = af.squeeze(af.expand_dims(x, axis=0), axis=0)
    return x


@pytest.mark.usefixtures("graph")
@pytest.mark.parametrize(("times", "saved"), [(0, set()), (10, set()), (500, {"squeeze"})])
async def test_what_a_long_chain_of_views_gives_is_saved(run: Run, times: int, saved: set[str]) -> None:
    """What is cheap is computed again, but in few steps: Python's stack would end before a chain of hundreds does."""
    x = af.placeholder("float64", (2,))

    def body(i: Any, y: Any) -> Any:
        other = af.sin(viewed(y, times))
        return i + 1, af.sin(y) * other

    _, y = af.while_loop(lambda i, _: i < 2, body, (0, x))
    slope = af.gradients(y, x)
    found = {node.inputs[2].node.op.name for node in y.graph.walk() if node.op is SAVE}
    assert found == {"parameter", "sin", *saved}
    values = np.array([0.5, 2.0])
    expected = np.sin(2 * np.sin(values) ** 2) * np.sin(2 * values)
    np.testing.assert_allclose(await run(slope, {x: values}), expected, rtol=1e-12)
