"""A CPU and cards in one session: each computes with what the other has made, and the caller gets NumPy's arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.testing import virtual_clock
from tests.distributed.clusters import Cluster

if TYPE_CHECKING:
    from tests.conftest import OpenSession

MIXED = Cluster(2, "mixed")
CPU, CARD = MIXED.devices


def run(fetches: Any, feeds: dict[af.Tensor, Any], **options: Any) -> Any:
    async def main(open_session: OpenSession) -> Any:
        async with open_session(fetches[0].graph, **options) as session:
            return await session.run(fetches, feeds)

    return MIXED.run(main)


@pytest.mark.parametrize("fusion", [True, False], ids=["fused", "unfused"])
@pytest.mark.parametrize("length", [3, 100])
@pytest.mark.parametrize("dtype", ["bool", "int8", "int64", "uint8", "float32"])
def test_a_small_array_from_the_cpu_in_a_region_of_the_card(
    graph: af.Graph, dtype: str, length: int, fusion: bool
) -> None:
    x = af.placeholder(dtype, (None,))
    with af.device(CPU):
        flipped = af.flip(x)
    with af.device(CARD):
        doubled = af.logical_not(af.logical_xor(flipped, True)) if dtype == "bool" else flipped * 2 + 1
        chosen = af.where(flipped != x[0], flipped, x)
    value = (np.arange(length) % 3).astype(dtype)
    expected = value[::-1] if dtype == "bool" else value[::-1] * value.dtype.type(2) + value.dtype.type(1)
    first, second = run([doubled, chosen], {x: value}, fusion=fusion)
    np.testing.assert_array_equal(first, expected)
    np.testing.assert_array_equal(second, np.where(value[::-1] != value[0], value[::-1], value))


@pytest.mark.parametrize("compute_streams", [1, 3])
def test_a_mask_in_a_loop_of_the_card(graph: af.Graph, compute_streams: int) -> None:
    """The region of the loop goes on in steps; values copied in for it stay as long as the region does."""
    x = af.placeholder("float64", (None,))
    with af.device(CPU):
        mask = af.sin(x) > 0
    with af.device(CARD):
        loops = [
            af.while_loop(lambda i, _: i < 100, lambda i, v, k=k: (i + 1, af.where(mask, v + k, v)), (0, x))[1]
            for k in range(4)
        ]
    value = np.array([1.0, -1.0, 2.0])
    for k, found in enumerate(run(loops, {x: value}, compute_streams=compute_streams)):
        np.testing.assert_array_equal(found, [1 + 100 * k, -1, 2 + 100 * k])


def test_a_vector_from_the_cpu_in_a_loop_that_the_card_runs(graph: af.Graph) -> None:
    x = af.placeholder("int64", (3,))
    with af.device(CPU):
        flipped = af.flip(x)
    with af.device(CARD):
        first = af.while_loop(lambda v: af.sum(v) < 100, lambda v: v * 2 + 1, flipped)
        second = af.while_loop(lambda v: af.sum(v) < 100, lambda v: v + flipped, x)
    for found, expected in zip(
        run([first, second], {x: np.array([1, 2, 3])}, device_while=True),
        ([63, 47, 31], [49, 34, 19]),
        strict=True,
    ):
        np.testing.assert_array_equal(found, expected)


def test_a_number_from_a_simulated_cpu_decides_on_a_card(graph: af.Graph) -> None:
    """It comes as a number of the host, as the compiler expects: its region does not wait for the card."""
    x, n = af.placeholder("float64", (None, 2)), af.placeholder("int64", (None,))
    with af.device(CPU):
        size = af.size(x)
    with af.device("sim:0"):

        def body(i: af.Tensor, y: af.Tensor) -> Any:
            count = (size + i) % 3
            return i + 1, af.while_loop(lambda j, _: j < count, lambda j, z: (j + 1, z + 1), (0, y))[1]

        y = af.while_loop(lambda i, _: i < af.max(n), body, (0, x))[1]

    async def main() -> Any:
        async with af.Session(graph, [CPU, "sim:0"]) as session:
            return await session.run(y, {x: np.zeros((2, 2)), n: [3, 1]})

    with virtual_clock() as clock:
        np.testing.assert_array_equal(clock.run(main()), np.full((2, 2), 3.0))


def test_what_a_function_of_the_user_hands_on(graph: af.Graph) -> None:
    """The function returns the very array that it was given, which the host has and the compiler does not know of."""

    @af.op(outputs=lambda spec: spec)
    def itself(value: Any) -> Any:
        return value

    x = af.placeholder("int64", (None,))
    with af.device(CARD):
        vector = itself(af.shape(x)) * 2 + 1
    (found,) = run([vector], {x: np.arange(3)})
    np.testing.assert_array_equal(found, [7])


def test_a_gradient_whose_loop_becomes_a_region_elsewhere(graph: af.Graph) -> None:
    """The variables of its loop were the card's, and all that is computed in it the CPU's."""
    x = af.placeholder("float32", (None,))

    def square(v: af.Tensor) -> af.Tensor:
        with af.device(CPU):
            return v * v

    y = af.while_loop(lambda v: af.sum(v) < 100, lambda v: af.cond(af.sum(v) > 0, lambda: v + 1, lambda: square(v)), x)
    with af.device(CARD):
        total = af.sum(y)
    (gradient,) = run([af.gradients(total, x)], {x: np.arange(3, dtype=np.float32)})
    assert type(gradient) is np.ndarray
    np.testing.assert_array_equal(gradient, [1, 1, 1])


@pytest.mark.parametrize("first", [CPU, CARD])
def test_a_stream_of_values_from_both(graph: af.Graph, first: str) -> None:
    x = af.placeholder("float32", (3,))
    streamed: list[af.Tensor] = []

    def body(i: af.Tensor, v: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
        with af.device(CPU):
            half = v * 0.5
        with af.device(CARD):
            twice = v * 2
        streamed[:] = [half, twice] if first == CPU else [twice, half]
        return i + 1, half + twice

    af.while_loop(lambda i, _: i < 2, body, (0, x))

    async def main(open_session: OpenSession) -> list[Any]:
        async with open_session(graph) as session:
            return [item async for item in session.stream(streamed, {x: np.ones(3, np.float32)})]

    found = MIXED.run(main)
    assert {type(value) for item in found for value in item} == {np.ndarray}
    halves = [[0.5] * 3, [1.25] * 3]
    for item, half in zip(found, halves, strict=True):
        expected = [half, np.multiply(half, 4)]
        for value, wanted in zip(item, expected if first == CPU else expected[::-1], strict=True):
            np.testing.assert_array_equal(value, wanted)
