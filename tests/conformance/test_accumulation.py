"""Behaviour 105: sums, means and gradients of float16 and bfloat16 accumulate in float32, whatever op asks."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

import asyncflow as af
from asyncflow.graph.values.dtypes import as_dtype
from asyncflow.vertex.children import REDUCE_SEGMENTS

COUNTS = {"float16": 2_100, "bfloat16": 300}
"""Numbers of ones at which a sum in the dtype itself would stop: after 2,048 and 256."""


def sums(dtype: str, count: int) -> Mapping[str, af.Tensor]:
    """Results whose every element is `count`, by op."""
    x, row, table = af.ones((count, 2), dtype=dtype), af.zeros((2,), dtype=dtype), af.zeros((1, 2), dtype=dtype)
    first = af.zeros((count,), dtype="int64")

    def gradient(y: af.Tensor, of: af.Tensor) -> af.Tensor:
        return af.gradients(af.sum(y), of)

    return {
        "sum": af.sum(x, axis=0),
        "cumulative_sum": af.cumulative_sum(x, axis=0)[-1],
        "mean": af.mean(x, axis=0) * count,
        "segment_sum": af.segment_sum(x, first, 1),
        "index_add": af.index_add(table, first, x),
        "einsum": af.einsum("ij->j", x),
        "vecdot": af.vecdot(x, x, axis=0),
        "matmul": af.matmul(x.T, x),
        "trace": af.linalg.trace(af.eye(count, dtype=dtype)),
        "norm": af.linalg.vector_norm(x, axis=0) ** 2,
        "bias": gradient(x + row, row),
        "where": gradient(af.where(x > 0, row, 0.0), row),
        "take": gradient(af.take(table, first, axis=0), table),
        "getitem": gradient(table[first], table),
        "take_along_axis": gradient(af.take_along_axis(table, af.zeros((count, 2), dtype="int64"), axis=0), table),
        "tile": gradient(af.tile(row, (count,)), row),
        "repeat": gradient(af.repeat(row, count), row),
        "map_fn": gradient(af.map_fn(lambda each: each * row, x), row),
    }


@pytest.mark.parametrize("dtype", COUNTS)
async def test_sums_go_on_counting(dtype: str) -> None:
    """Behaviour 105."""
    count = COUNTS[dtype]
    with af.Graph() as graph:
        fetches = sums(dtype, count)
    async with af.Session(graph) as session:
        found = await session.run(fetches)
    expected = np.asarray(count, found["sum"].dtype)
    for name, value in found.items():
        np.testing.assert_allclose(value.astype("float32"), expected.astype("float32"), rtol=0.01, err_msg=name)


async def test_gradients_of_loops_go_on_counting(session: af.Session) -> None:
    """Behaviour 105: the sums that gradient loops make: of captures, rows, parts and elements of arrays."""
    count = COUNTS["bfloat16"]
    with af.Graph():
        row, table, long = (af.zeros(shape, dtype="bfloat16") for shape in ((2,), (3, 2), (64, 2)))
        array = af.TensorArray("bfloat16", 1, element_shape=(2,), clear_after_read=False).write(0, row)
        start = af.zeros((2,), dtype="bfloat16")
        _, total = af.while_loop(
            lambda i, total: i < count,
            lambda i, total: (i + 1, total + row + table[0] + long[i % 2 * 0] + array.read(0)),
            (0, start),
        )
        found = await session.run(af.gradients(af.sum(total), [row, table, long]))
    expected = np.asarray(count, found[0].dtype).astype("float32")
    own, of_table, of_long = (value.astype("float32") for value in found)
    np.testing.assert_array_equal(own, 2 * expected)  # directly, and as the element of the array
    np.testing.assert_array_equal(of_table[0], expected)
    np.testing.assert_array_equal(of_long[0], expected)
    assert not of_table[1:].any()
    assert not of_long[1:].any()


async def test_many_paths_to_one_value() -> None:
    """Behaviour 105."""
    with af.Graph() as graph:
        x = af.ones((2,), dtype="bfloat16")
        slope = af.gradients([x * 1 for _ in range(300)], x)
    async with af.Session(graph) as session:
        found = await session.run(slope)
    np.testing.assert_array_equal(found.astype("float32"), 300)


@pytest.mark.parametrize("dtype", COUNTS)
async def test_moments_and_masked_means(dtype: str) -> None:
    """Behaviour 105: the variance of ones is 0, and a mean may be finite where the sum is not."""
    count = COUNTS[dtype]
    with af.Graph() as graph:
        x = af.ones((count, 2), dtype=dtype)
        spread = [af.var(x, axis=0), af.std(x, axis=0)]
        mean = af.nn.masked_mean(x * 100, af.ones((count, 2), dtype="bool"))
    async with af.Session(graph) as session:
        variance, deviation, found = await session.run([*spread, mean])
    assert not variance.any()
    assert not deviation.any()
    assert found.astype("float32") == 100


def test_children_of_a_vertex() -> None:
    """Behaviour 105: rows of children, from many and from few rows on."""
    assert REDUCE_SEGMENTS.kernel is not None
    kernel = REDUCE_SEGMENTS.kernel(np, reduce="sum")
    for dtype, count in COUNTS.items():
        x = np.ones((count, 2), as_dtype(dtype))
        for starts in ([0, count], [0, 1, count]):
            owners = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
            found = kernel(x, np.array(starts), owners)
            np.testing.assert_allclose(found[-1].astype("float32"), np.diff(starts)[-1], rtol=0.01)
