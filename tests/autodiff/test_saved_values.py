"""Values that a loop saves for its gradient, and values that are computed again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.autodiff.stores.saved_values import SAVE

Run = Callable[..., Awaitable[Any]]


def viewed(x: Any, times: int) -> Any:
    """Return `x` after a number of pairs of reshapes."""
    for _ in range(times):
        x = af.squeeze(af.expand_dims(x, axis=0), axis=0)
    return x


@pytest.mark.usefixtures("graph")
@pytest.mark.parametrize(("times", "saved"), [(0, set()), (10, set()), (350, {"squeeze"})])
async def test_what_a_long_chain_of_views_gives_is_saved(run: Run, times: int, saved: set[str]) -> None:
    """Cheap values are computed again, but only in few steps: Python's stack would overflow before a chain of hundreds
    ends.
    """
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
