"""Rows of children, reduced for each vertex: whatever their numbers are, and to every order of derivatives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.graph.building.build import apply
from asyncflow.graph.structured import WhileNode
from asyncflow.state.variables.variable import VARIABLE_READ
from asyncflow.vertex.children import REDUCE_SEGMENTS, SPREAD_SEGMENTS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Run = Callable[..., Awaitable[Any]]

COUNTS = {
    "none": [],
    "empty ones": [0, 0],
    "few rows": [2, 0, 1],
    "each one": [1] * 100,
    "many, some empty": [0, 3, 1, 0, 2, 1] * 20 + [0],
    "one has most": [1, 2] * 10 + [500],
    "all many": [20] * 10,
}


@pytest.mark.parametrize("dtype", ["float32", "int64", "bool"])
@pytest.mark.parametrize("reduce", ["sum", "max"])
@pytest.mark.parametrize("name", COUNTS)
def test_segments_are_reduced_as_one_by_one(name: str, reduce: str, dtype: str) -> None:
    counts = np.array(COUNTS[name], np.int64)
    starts, owners = np.concatenate([[0], counts.cumsum()]), np.repeat(np.arange(len(counts)), counts)
    x = np.random.default_rng(0).integers(-9, 9, (len(owners), 2, 3)).astype(dtype)
    assert REDUCE_SEGMENTS.kernel is not None
    found = REDUCE_SEGMENTS.kernel(np, reduce=reduce)(x, starts, owners)
    operation = np.add if reduce == "sum" else np.maximum
    assert (found.dtype, found.shape) == (x.dtype, (len(counts), 2, 3))
    for segment, rows in enumerate(np.split(x, starts[1:-1]) if len(counts) else []):
        expected = operation.reduce(rows, axis=0, dtype=x.dtype) if len(rows) else np.zeros((2, 3), dtype)
        np.testing.assert_array_equal(found[segment], expected)


@pytest.mark.slow
@pytest.mark.parametrize("reduce", ["sum", "max"])
async def test_derivatives_of_segments(graph: af.Graph, run: Run, reduce: str) -> None:
    """Sums and their transpose are each other's; against the same by plain operations, to the second order."""
    counts = np.array([2, 0, 3], np.int64)
    starts, owners = af.constant(np.concatenate([[0], counts.cumsum()])), af.constant(np.repeat(np.arange(3), counts))
    x, y = af.placeholder("float64", (None, 2)), af.placeholder("float64", (3, 2))
    reduced = apply(REDUCE_SEGMENTS, x, starts, owners, reduce=reduce)[0]
    each = (
        [af.sum(x[:2], axis=0), af.sum(x[2:], axis=0)]
        if reduce == "sum"
        else [af.max(x[:2], axis=0), af.max(x[2:], axis=0)]
    )
    plain = af.stack([each[0], af.zeros(2, dtype="float64"), each[1]])
    pairs = [
        (reduced, plain),
        (apply(SPREAD_SEGMENTS, y, starts, owners)[0] * x, af.gather(y, owners) * x),
    ]
    fetches = []
    for values in zip(*pairs, strict=True):
        total = af.sum(af.sin(values[0])) + af.sum(values[1] ** 2)
        once = af.gradients(total, [x, y])
        fetches.append([*values, *once, *af.gradients(af.sum(af.sin(once[0])) + af.sum(once[1] ** 2), [x, y])])
    rng = np.random.default_rng(1)
    mine, theirs = await run(fetches, {x: rng.normal(size=(5, 2)), y: rng.normal(size=(3, 2))})
    for one, other in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12)


async def test_a_function_of_each_child_reads_a_variable_once(graph: af.Graph, run: Run) -> None:
    """No loop reads it, and results are the bits of a function to which its value is given."""
    w = af.Variable(np.random.default_rng(0).normal(size=(3, 3)), name="w")
    x = np.random.default_rng(1).normal(size=(6, 3))
    tree = af.InputGraph.from_parents([-1, 0, 0, 1, 1, 3])
    state = af.spec("float64", (3,))
    given = w.read()

    @af.vertex_function(state=state)
    def reads(v: Any) -> None:
        v.scatter(v.pull() + v.gather_all(lambda child: af.tanh(child @ w)))

    @af.vertex_function(state=state)
    def is_given(v: Any) -> None:
        v.scatter(v.pull() + v.gather_all(lambda child: af.tanh(child @ given)))

    fetches = []
    for function, weight in ((reads, w), (is_given, given)):
        total = af.sum(af.vertex_map(function, tree, x).roots ** 2)
        fetches.append([total, *af.gradients(total, [weight])])
    loops = [node for node in graph.nodes if isinstance(node, WhileNode)]
    assert loops
    assert not [node for loop in loops for node in loop.body.walk() if node.op is VARIABLE_READ]
    mine, theirs = await run(fetches)
    for one, other in zip(mine, theirs, strict=True):
        np.testing.assert_array_equal(one, other)
