"""Conformance of the graph optimisations: nodes that they must never join."""

from __future__ import annotations

from typing import Any

import numpy as np

import asyncflow as af
from asyncflow.compiler.optimize.cse import eliminate_common_subexpressions as cse
from tests.compiler.stages import optimized
from tests.conftest import OpenSession


async def test_pieces_that_are_never_joined(open_session: OpenSession, graph: af.Graph) -> None:
    """Behaviour 77: CSE never merges stateful, random or differently placed nodes, and never across frames."""
    calls: list[Any] = []

    @af.op(outputs=af.spec("float64", ()))
    def mine(value: Any) -> Any:
        calls.append(value)
        return np.float64(value)

    x = af.placeholder("float64", (), name="x")
    variable = af.Variable(0.0, name="variable")
    stateful = [variable.assign_add(x), variable.assign_add(x)]
    random = [af.random.normal((3,)), af.random.normal((3,))]
    user = [mine(x), mine(x)]
    with af.device("cpu"):
        placed = af.exp(x)
    with af.device("cpu:0"):
        elsewhere = af.exp(x)
    arrays = [af.TensorArray("float64", size=1).write(0, x).stack() for _ in range(2)]
    outside = af.sin(x)
    _, inside = af.while_loop(lambda i, s: i < 2, lambda i, s: (i + 1, s + af.sin(x)), (0, 0.0))
    fetches = [*stateful, *random, *user, placed, elsewhere, af.exp(x), *arrays, outside, inside]
    text = optimized(graph, fetches, cse)
    counted = ("variable_assign_add", "random_normal", "mine", "exp", "tensor_array_write", "sin")
    assert {op: text.count(f"= {op}(") for op in counted} == dict(zip(counted, (2, 2, 2, 3, 2, 2), strict=True))
    async with open_session(graph) as session:
        first, second, a, b, *rest = await session.run(fetches, {x: 1.0})
    assert (first, second) == (1.0, 2.0)
    assert not np.array_equal(a, b)
    assert calls == [1.0, 1.0]
    assert rest[-1] == 2 * np.sin(1.0)
