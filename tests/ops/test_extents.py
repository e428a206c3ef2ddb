"""Known extents of computed shapes: from constants, wherever they are used."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import asyncflow as af


@pytest.fixture(autouse=True)
def _graph(graph: af.Graph) -> None:
    """Every test builds."""


def test_shapes_made_of_constants_are_known() -> None:
    x, pair = af.placeholder("float64", (None,)), af.constant([2, 3])
    assert af.reshape(x, pair).shape == (2, 3)
    assert af.reshape(x, [pair[0], -1]).shape == (2, None)
    assert af.full(af.concat([[5], pair], axis=0), 1.0).shape == (5, 2, 3)
    assert af.zeros((pair[0], pair[1] * 2)).shape == (2, 6)
    assert af.broadcast_to(1.0, af.shape(af.ones((2, 3)))[::-1]).shape == (3, 2)
    n = af.placeholder("int64", ())
    assert af.zeros((n, pair[0])).shape == (None, 2)


@pytest.mark.parametrize("where", ["body", "branch", "inner"])
async def test_constants_that_a_body_captures_are_known(run: Any, where: str) -> None:
    """So that loops whose body computes its shape keep it."""
    pair, n = af.constant([2, 3]), af.placeholder("int64", ())

    def make(value: Any) -> Any:
        return af.reshape(af.concat([value, value], axis=None)[: af.prod(pair)] + 1, pair)

    def body(i: Any, value: Any) -> Any:
        if where == "body":
            return i + 1, make(value)
        if where == "branch":
            return i + 1, af.cond(i > 0, lambda: make(value), lambda: make(value * 0))
        return i + 1, af.while_loop(lambda j, _: j < 1, lambda j, v: (j + 1, make(v)), (0, value))[1]

    _, result = af.while_loop(lambda i, _: i < n, body, (0, af.zeros((2, 3))))
    assert result.shape == (2, 3)
    assert (await run(result, {n: 3})).tolist() == [[3.0] * 3] * 2


def test_a_shape_may_be_an_array() -> None:
    shape: Any = np.array([2, 3])
    assert af.zeros(shape).shape == (2, 3)
    with pytest.raises(af.DTypeError, match=r"a shape holds integers, not 1\.0"):
        af.zeros(shape / shape)
    with pytest.raises(af.ShapeError, match=r"a shape is an int, a sequence of ints, or a tensor; got 1\.5"):
        af.zeros(1.5)  # type: ignore[arg-type]
    with pytest.raises(af.GraphError, match=r"axis must be an int known while the graph is built, got array"):
        af.sum(af.ones((2, 3)), axis=shape)
