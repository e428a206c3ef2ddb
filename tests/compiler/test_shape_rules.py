"""Shapes without values: what a run does not compute when only a shape is needed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.compiler.program.extract import extract


def ops_of(graph: af.Graph, fetch: Any, *feeds: af.Tensor) -> list[str]:
    return [node.op.name for node in extract(graph, [fetch], feeds).graph.nodes]


async def test_no_forward_work_for_a_shape(graph: af.Graph) -> None:
    """Behaviour 100: a gradient whose rule needs no forward value asks for none, though its extents are open."""
    x, g = af.placeholder("float64", (None, 3), name="x"), af.placeholder("float64", (None, 2), name="g")
    w = af.placeholder("float64", (3, 2), name="w")
    by_x, by_w = af.gradients(x @ w, [x, w], g)
    assert ops_of(graph, by_x, w, g).count("matmul") == 1
    assert ops_of(graph, by_w, x, w, g).count("matmul") + ops_of(graph, by_w, x, w, g).count("tensordot") == 1
    values = {w: np.ones((3, 2)), g: np.ones((4, 2))}
    async with af.Session(graph) as session:
        assert (await session.run(by_x, values)).tolist() == [[2.0] * 3] * 4
        assert (await session.run(by_w, {**values, x: np.ones((4, 3))})).tolist() == [[4.0] * 2] * 3
        with pytest.raises(af.KernelError, match=r"the grad_y of .* has shape \[4,2\]; it is to have shape \[1,2\]"):
            await session.run(by_w, {**values, x: np.ones((1, 3))})


async def test_ones_and_sums_need_shapes_alone(graph: af.Graph) -> None:
    """Behaviour 100: through whatever broadcasts, is reshaped or joined; an error of shapes is still found."""
    x, b = af.placeholder("float64", (None, 3), name="x"), af.placeholder("float64", (None, 1), name="b")
    y = af.concat([af.exp(x) + b, x], axis=0)
    slope = af.gradients(af.permute_dims(y, (1, 0)), b)
    assert not {"exp", "concat"} & set(ops_of(graph, slope, x, b))
    async with af.Session(graph) as session:
        assert (await session.run(slope, {x: np.ones((4, 3)), b: np.ones((1, 1))})).tolist() == [[12.0]]
        assert (await session.run(slope, {x: np.ones((4, 3)), b: np.ones((4, 1))})).tolist() == [[3.0]] * 4
        with pytest.raises(af.KernelError, match=r"do not broadcast"):
            await session.run(slope, {x: np.ones((4, 3)), b: np.ones((2, 1))})


async def test_what_else_needs_a_value_computes_it_once(graph: af.Graph) -> None:
    """Behaviour 100: nodes with effects, or with a shape that depends on values, are computed."""
    x = af.placeholder("float64", (None,), name="x")
    y = af.exp(x)
    assert ops_of(graph, [y + 1, af.shape(y)][1], x) == ["feed", "shape", "shape_by_rule", "fetch"]
    both = af.stack([af.sum(y), af.astype(af.shape(y)[0], "float64")])
    assert "shape_by_rule" not in ops_of(graph, both, x)
    (where,) = af.nonzero(x)
    assert "nonzero" in ops_of(graph, af.shape(where * 2), x)
    assert "print" in ops_of(graph, af.shape(af.print(x)), x)


@pytest.mark.parametrize("element_shape", [(None,), None])
async def test_shapes_of_elements_that_are_read_twice(graph: af.Graph, element_shape: Any) -> None:
    """Behaviour 100: a gradient that needs only the shape of an element reads none, so it may be read elsewhere."""
    x = af.placeholder("float64", (None, None), name="x")
    array = af.TensorArray("float64", 2, element_shape=element_shape).unstack(x)
    one, other = array.read(0), array.read(0)
    written = af.TensorArray("float64", 2, element_shape=element_shape).write(1, x[0])
    slopes = [af.gradients(one * 2 + other, x), af.gradients(one * 2, x), af.gradients(written.read(1) * 2, x)]
    async with af.Session(graph) as session:
        first, second, third, value = await session.run([*slopes, other], {x: np.ones((2, 3))})
    assert first.tolist() == [[3.0] * 3, [0.0] * 3]
    assert second.tolist() == third.tolist() == [[2.0] * 3, [0.0] * 3]
    assert value.tolist() == [1.0] * 3


def test_a_check_of_a_long_chain_takes_no_longer_than_the_chain(graph: af.Graph) -> None:
    """Behaviour 100: whether a shape is at hand is asked once of each value."""
    x, g = af.placeholder("float64", (None,), name="x"), af.placeholder("float64", (None,), name="g")
    y = x
    for _ in range(60):
        y = y + y
    assert "shape_by_rule" not in ops_of(graph, af.gradients(y, x, g), g)
