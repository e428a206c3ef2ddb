"""Golden runs: the first node whose values differ between two sessions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.testing import compare_sessions, virtual_clock
from asyncflow.testing.golden import ValueLog, _Occurrence, difference, logged
from tests.fake_cupy.stand_in import stand_in

X = np.linspace(-1, 1, 6).reshape(2, 3)


def looped(x: af.Tensor, w: af.Variable) -> af.Tensor:
    return af.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, af.tanh(y @ w)), (0, x))[1]


async def test_equal_sessions_do_not_differ(graph: af.Graph) -> None:
    x = af.placeholder("float64", (None, 3))
    z = looped(x, af.Variable(np.ones((3, 3))))
    grad = af.gradients(af.sum(z * z), x)
    async with af.Session(graph) as first, af.Session(graph, regions=False, optimize=False) as second:
        assert await compare_sessions(first, second, [z, grad], {x: X}) is None
        assert await compare_sessions(first, first, z, {x: X}, tolerance=0) is None


async def test_the_first_node_that_differs_is_named_with_its_line(graph: af.Graph) -> None:
    w = af.Variable(np.ones((3, 3)), name="w")
    x = af.placeholder("float64", (None, 3))
    before = af.exp(x)
    product = looped(before, w)
    async with af.Session(graph) as first, af.Session(graph) as second:
        await second.swap_variables({w: np.ones((3, 3)) * 1.5})
        told = await compare_sessions(first, second, product, {x: X})
        assert told is not None
        lines = told.splitlines()
        assert lines[0] == (
            "first difference: while/body/w/read, in iteration while/0: by 0.5 at most, of values up to 1 "
            "(tolerance 1.5e-08 of these)"
        )
        assert lines[1].startswith("  float64[3, 3] [1., 1., 1., 1., 1., 1., ...]  built at ")
        assert lines[2].startswith("  float64[3, 3] [1.5, 1.5, 1.5, 1.5, 1.5, 1.5, ...]  built at ")
        assert "test_golden.py:" in lines[1]
        assert lines[3] == "  3 values before are equal"


async def test_nodes_of_iterations_are_told_apart(graph: af.Graph) -> None:
    calls: list[int] = []

    @af.op(outputs=lambda x: x, stateful=True)
    def drifting(x: np.ndarray) -> np.ndarray:
        calls.append(0)
        return x + (len(calls) == 5)

    start = af.placeholder("float64", ())
    y = af.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, drifting(y)), (0, start))[1]
    async with af.Session(graph) as first, af.Session(graph) as second:
        told = await compare_sessions(first, second, y, {start: 2.0})
    assert told is not None
    assert "first difference: while/body/drifting, in iteration while/1: by 1 at most" in told


@pytest.mark.parametrize("tolerance", [None, 1e-3])
async def test_tolerance_is_a_share_of_the_largest_magnitude(graph: af.Graph, tolerance: float | None) -> None:
    w = af.Variable(np.array([100.0, 0.0], np.float32), name="w")
    y = w.read()
    async with af.Session(graph) as first, af.Session(graph) as second:
        for moved, differs in ((0.02, False), (0.2, tolerance is None or tolerance < 2e-3)):
            await second.swap_variables({w: np.array([100.0, moved], np.float32)})
            told = await compare_sessions(first, second, y, tolerance=tolerance)
            assert (told is not None) == differs


NAN, INF = np.nan, np.inf
PAIRS: list[tuple[Any, Any, str | None]] = [
    ([1.0, NAN, INF], [1.0, NAN, INF], None),
    ([1.0, NAN], [1.0, 2.0], "1 of 2 elements are not finite in one of them"),
    ([INF, 1.0], [-INF, 1.0], "1 of 2 elements are not finite in one of them"),
    ([1, 2, 3], [1, 2, 4], "1 of 3 elements differ"),
    ([True], [False], "1 of 1 elements differ"),
    ([1.0], [1.0, 2.0], "another dtype or shape"),
    ([1.0], [1], "another dtype or shape"),
    ([1j], [1j + 1e-3], "by 0.001 at most"),
    ([], [], None),
    ([0.0], [0.0], None),
    ([0.0], [1e-300], "by 1e-300 at most, of values up to 0"),
]


@pytest.mark.parametrize(("x", "y", "why"), PAIRS)
def test_values(x: Any, y: Any, why: str | None) -> None:
    logs = [ValueLog(), ValueLog()]
    for log, value in zip(logs, (x, y), strict=True):
        log.values[_Occurrence("same", "", 0)] = [np.array([7]), np.asarray(value)]
        log.locations["same"] = None
    told = difference(*logs)
    assert told is None if why is None else str(told).startswith(f"first difference: same, output 1: {why}")


async def test_a_card_beside_a_cpu(graph: af.Graph) -> None:
    x = af.placeholder("float64", X.shape)
    w = af.Variable(np.ones((3, 3)), name="w")
    z = looped(x, w)
    with stand_in(nbytes=16 << 20):
        async with af.Session(graph) as first, af.Session(graph, devices=["cuda:0"]) as second:
            assert await compare_sessions(first, second, z, {x: X}) is None
            with logged() as log:
                await second.run(z, {x: X})
            await log.copied()
            assert all(each is not None for firing, values in log.values.items() for each in values)
            await second.swap_variables({w: np.ones((3, 3)) * 2})
            told = await compare_sessions(first, second, z, {x: X})
    assert told is not None
    assert told.startswith("first difference: while/body/w/read, in iteration while/0: by 1 at most")


def test_simulated_cards() -> None:
    async def main() -> str | None:
        with af.Graph() as graph:
            x = af.placeholder("float64", X.shape)
            z = looped(x, af.Variable(np.ones((3, 3))))
        async with af.Session(graph, devices=["sim:0"]) as first, af.Session(graph, devices=["sim:1"]) as second:
            return await compare_sessions(first, second, z, {x: X})

    with virtual_clock("2 x v100, nvlink2") as clock:
        assert clock.run(main()) is None


@pytest.mark.usefixtures("graph")
async def test_mistakes() -> None:
    async with af.Session() as session:
        with pytest.raises(af.GraphError, match="tolerance is a number, at least 0; got -1"):
            await compare_sessions(session, session, af.constant(1.0), tolerance=-1)


async def test_values_are_kept_though_a_function_writes_to_them_again(graph: af.Graph) -> None:
    buffer = np.zeros(3)

    @af.op(outputs=lambda i: af.spec("float64", (3,)), stateful=True)
    def filled(i: np.ndarray) -> np.ndarray:
        buffer[int(i)] = 1
        return buffer

    last = af.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, filled(i)), (0, af.zeros(3)))[1]
    with logged() as log:
        async with af.Session(graph) as session:
            await session.run(last)
    written = [values[0] for firing, values in log.values.items() if firing.node.endswith("filled")]
    np.testing.assert_array_equal(np.stack([x for x in written if x is not None]), np.tril(np.ones((3, 3))))
