"""Loops that carry windows, such as ``x[i : i + 2]``, whose extent is known if the value goes on as far."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import asyncflow as af

Run = Callable[..., Awaitable[Any]]

CARRIED: dict[str, Callable[[Any, Any], Any]] = {
    "after": lambda x, i: x[i : i + 2],
    "before": lambda x, i: x[i - 1 : i + 1],
    "shifted": lambda x, i: x[2 + i : i + 4 - 0],
    "computed with": lambda x, i: af.sin(x[i : i + 2] * 2.0) + x[i + 1 : 3 + i],
    "of a matrix": lambda x, i: af.stack([x, x], axis=1)[i : i + 2, 0],
    "of a part": lambda x, i: x[1:][i : i + 2],
}


@pytest.mark.parametrize("kind", CARRIED)
async def test_a_loop_carries_windows(run: Run, graph: af.Graph, kind: str) -> None:
    window, values = CARRIED[kind], np.linspace(0.0, 1.0, 9)
    x, n = af.placeholder("float64", (None,)), af.placeholder("int64", ())
    last = af.while_loop(lambda i, _: i < n, lambda i, _: (i + 1, window(x, i)), (1, af.zeros(2)))[1]
    sums = af.scan(lambda total, i: total + window(x, i), af.arange(1, n), initializer=af.zeros(2))
    assert last.shape == (2,)
    (gradient,) = af.gradients(af.sum(last), [x])
    with af.Graph():
        at = [window(af.constant(values), i) for i in (1, 2, 3)]
        expected = await run(at)
    found, total, slope = await run([last, sums[-1], gradient], {x: values, n: 4})
    np.testing.assert_allclose(found, expected[-1])
    np.testing.assert_allclose(total, sum(expected))
    assert np.count_nonzero(slope) in (2, 3)


async def test_a_window_past_the_end_fails_in_the_run(run: Run, graph: af.Graph) -> None:
    x, n = af.placeholder("float64", (None,)), af.placeholder("int64", ())
    last = af.while_loop(lambda i, _: i < n, lambda i, w: (i + 1, x[i : i + 2]), (0, af.zeros(2)), name="loop")[1]
    assert (await run(last, {x: np.arange(4.0), n: 3})).tolist() == [2.0, 3.0]
    with pytest.raises(af.KernelError, match=r"has shape \[1\]; it is to have shape \[2\]|shapes \[1\] and \[2\]"):
        await run(last, {x: np.arange(4.0), n: 4})
    assert (await run(x[n : n + 2], {x: np.arange(4.0), n: 3})).tolist() == [3.0]  # elsewhere slices end as NumPy's


@pytest.mark.parametrize("body", [lambda x, i: x[i : 2 * i], lambda x, i: x[i : i + 3], lambda x, i: x[i::2]])
def test_other_extents_are_refused_while_the_graph_is_built(graph: af.Graph, body: Callable[[Any, Any], Any]) -> None:
    x = af.placeholder("float64", (None,))
    with pytest.raises(af.ShapeError, match=r"has shape \[2\] but the body returns \[\?\]"):
        af.while_loop(lambda i, _: i < 3, lambda i, _: (i + 1, body(x, i)), (0, af.zeros(2)))
