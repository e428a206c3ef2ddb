"""Reductions at the end of chains: several threads share a row, whose bits do not depend on the number of rows."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import asyncflow as af
from asyncflow.compiler.program.kernels.row_text import LONGEST_ROW, block_of, lanes_of
from asyncflow.compiler.regions.fuse import fuse_line
from asyncflow.graph.graph import Graph
from tests.compiler.elementwise_kernel import CompiledNumpy
from tests.compiler.test_fuse import fuse_and_compare, fused_nodes, line_of, members
from tests.compiler.test_packed import LAYOUTS, Packed, laid
from tests.fake_cupy import FakeCupy


def numbers(*shape: int, dtype: Any = "float32") -> np.ndarray:
    return np.random.default_rng(sum(shape)).integers(-9, 9, shape).astype(dtype)


def run(graph: Graph, results: list[Any], feeds: dict[Any, Any]) -> tuple[Any, list[Any]]:
    """Compute `results`, of which all are one kernel's, on the fake; returns the kernel, and their values."""
    made, fused = fuse_line(line_of(graph), results)
    (node,) = [each for each in made if each.op.name != "constant"]
    assert node.op.kernel is not None
    constants = {
        each.outputs[0]: each.op.kernel(np, **each.attrs)()
        for each in made
        if each is not node and each.op.kernel is not None
    }
    with_cupy = next(value for value in feeds.values() if hasattr(value, "get"))._fake
    kernel: Any = node.op.kernel(Packed(with_cupy), **node.attrs)
    found = kernel(*(feeds[x] if x in feeds else np.asarray(constants[x])[()] for x in node.inputs))
    values = dict(zip(node.outputs, (found,) if node.single else found, strict=True))
    return kernel, [values[result].get() for result in fused]


def test_lanes() -> None:
    assert [lanes_of(length) for length in (1, 2, 3, 8, 255, 256, 9999)] == [1, 2, 2, 8, 128, 256, 256]
    assert [block_of(lanes) for lanes in (1, 128, 256)] == [128, 128, 256]


def test_ends_that_are_taken_in(graph: Graph) -> None:
    x = af.placeholder("float32", (4, 3, 5))
    y = x * x - x
    fused = {
        "sum": af.sum(y, axis=-1),
        "max": af.max(y, axis=2, keepdims=True),
        "mean": af.mean(y, axis=(-1,)),
    }
    made = fuse_and_compare(graph, [*fused.values()], {x: numbers(4, 3, 5)}, np)
    (node,) = fused_nodes(made)
    assert members(node)[-3:] == ["sum", "max", "mean"]


@pytest.mark.parametrize(
    "end",
    [
        lambda y: af.sum(y, axis=0),
        lambda y: af.sum(y, axis=(0, 2)),
        lambda y: af.prod(y, axis=2),
        lambda y: af.sum(af.matrix_transpose(y), axis=-1),
        lambda y: af.argmax(y, axis=-1),
    ],
)
def test_ends_that_stay_alone(graph: Graph, end: Any) -> None:
    x = af.placeholder("float32", (4, 3, 5))
    made = fuse_and_compare(graph, [end(x * x - x)], {x: numbers(4, 3, 5)}, np)
    assert members(fused_nodes(made)[0])[-1] == "subtract"


def test_reductions_over_other_axes_are_kernels_of_their_own(graph: Graph) -> None:
    x = af.placeholder("float32", (4, 5))
    y = x * x - x
    made = fuse_and_compare(graph, [af.sum(y, axis=1), af.sum(y)], {x: numbers(4, 5)}, np)
    assert [members(node) for node in fused_nodes(made)] == [["multiply", "subtract", "sum"]]
    assert [node.op.name for node in made] == ["fused", "sum"]


def test_a_value_with_the_mean_of_its_own_row_takes_two_kernels(graph: Graph) -> None:
    x = af.placeholder("float64", (4, 6))
    y = af.square(x) + 1.0
    z = (y - af.mean(y, axis=-1, keepdims=True)) * 2.0
    made = fuse_and_compare(graph, [z], {x: numbers(4, 6, dtype="float64")}, np)
    assert [members(node)[-1] for node in fused_nodes(made)] == ["mean", "multiply"]


def test_a_long_row_is_left_to_cupy(graph: Graph, shared: FakeCupy) -> None:
    x = af.placeholder("float32", (1, LONGEST_ROW + 1))
    long = af.sum(x * x - x, axis=1)
    made, _ = fuse_line(line_of(graph), [long])
    assert [members(node)[-1] for node in fused_nodes(made)] == ["subtract"]
    with Graph() as other:
        unknown = af.placeholder("int32", (None, None))
        total = af.sum(unknown * unknown - unknown, axis=1)
        for length in (LONGEST_ROW + 1, 0, 7):
            value = numbers(2, length, dtype="int32")
            kernel, (got,) = run(other, [total], {unknown: shared.asarray(value)})
            np.testing.assert_array_equal(got, (value * value - value).sum(axis=1))
            assert [found is not None for found in kernel._layouts.values()] == [length == 7]


@pytest.mark.slow
def test_a_row_has_the_same_bits_in_every_batch(graph: Graph, shared: FakeCupy) -> None:
    x = af.placeholder("float32", (None, None))
    total = af.sum(x * 0.1 - x, axis=1)
    value = np.random.default_rng(len("batch")).normal(size=(37, 300)).astype("f")
    whole = run(graph, [total], {x: shared.asarray(value)})[1][0]
    for first, last in ((0, 1), (3, 4), (36, 37), (10, 30)):
        part = run(graph, [total], {x: shared.asarray(value[first:last])})[1][0]
        assert part.tobytes() == whole[first:last].tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "int8", "uint64", "bool"])
def test_dtypes(graph: Graph, shared: FakeCupy, dtype: str) -> None:
    numpy_dtype = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    x = af.placeholder(dtype, (None, 9))
    y = af.where(af.equal(x, 3), x, af.maximum(x, x))
    results = [af.sum(y, axis=1), af.mean(y, axis=1), af.max(y, axis=1), af.min(y, axis=1)]
    value = (abs(numbers(5, 9)) if dtype == "uint64" else numbers(5, 9)).astype(numpy_dtype)
    _, got = run(graph, results, {x: shared.asarray(value)})
    wide = value.astype(np.float64)
    wants = [wide.sum(axis=1), wide.mean(axis=1), wide.max(axis=1), wide.min(axis=1)]
    for found, result, want in zip(got, results, wants, strict=True):
        assert found.dtype == result.dtype
        np.testing.assert_allclose(found.astype(np.float64), want, rtol=1e-2 if found.dtype.itemsize == 2 else 0)


@pytest.mark.slow
def test_a_nan_is_the_extreme_of_its_row(graph: Graph, shared: FakeCupy) -> None:
    x = af.placeholder("float32", (3, 5))
    y = x * x - x
    value = numbers(3, 5)
    value[1, 3] = np.nan
    _, (most, least) = run(graph, [af.max(y, axis=1), af.min(y, axis=1)], {x: shared.asarray(value)})
    np.testing.assert_array_equal(most, (value * value - value).max(axis=1))
    np.testing.assert_array_equal(least, (value * value - value).min(axis=1))


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=3),
    st.sampled_from([1, 2, 31, 130, 700]),
    st.integers(0, 3),
    st.sampled_from(LAYOUTS),
    st.booleans(),
)
def test_random_rows(shared: FakeCupy, rows: list[int], length: int, n_axes: int, layout: str, keepdims: bool) -> None:
    """Whole numbers, as their sums do not depend on the order, beside the value itself and a join of it."""
    shape = (*rows, length)
    axis = tuple(range(len(shape) - max(min(n_axes, len(shape)), 1), len(shape)))
    with af.Graph() as graph:
        x, c = af.placeholder("float64", shape), af.placeholder("float64", (1, length))
        y = x * c - x
        results = [
            y,
            af.sum(y, axis=axis, keepdims=keepdims),
            af.max(af.abs(y), axis=axis, keepdims=keepdims),
            af.concat([y, x * c], axis=0),
        ]
    value, factor = numbers(*shape, dtype="float64"), numbers(1, length, dtype="float64")
    _, got = run(graph, results, {x: laid(shared, value, layout), c: shared.asarray(factor)})
    want = value * factor - value
    np.testing.assert_array_equal(got[0], want)
    np.testing.assert_array_equal(got[1], want.sum(axis=axis, keepdims=keepdims))
    np.testing.assert_array_equal(got[2], abs(want).max(axis=axis, keepdims=keepdims))
    np.testing.assert_array_equal(got[3], np.concatenate([want, value * factor]))


@pytest.mark.slow
def test_cupy_reduces_by_itself_without_bindings(graph: Graph) -> None:
    x = af.placeholder("float64", (3, 5))
    y = x * x - x
    xp = CompiledNumpy()
    fuse_and_compare(graph, [y, af.sum(y, axis=1), af.concat([y, y * x], axis=1)], {x: numbers(3, 5, dtype="f8")}, xp)
    assert len(xp.launched) == 1


def soft(value: np.ndarray) -> np.ndarray:
    weights = np.exp(value - value.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def test_a_softmax_is_one_kernel_with_the_scores_before_it(graph: Graph) -> None:
    x = af.placeholder("float32", (3, 5))
    scores = x * 0.5
    results = [af.softmax(scores), af.log_softmax(scores, axis=1), af.max(scores, axis=-1)]
    with np.errstate(all="ignore"):
        made = fuse_and_compare(graph, results, {x: numbers(3, 5)}, np)
    assert [members(node) for node in fused_nodes(made)] == [["multiply", "softmax", "log_softmax", "max"]]
    with Graph() as other:
        y = af.placeholder("float32", (3, 5))
        alone = af.softmax(y)
        upright = af.softmax(y, axis=0)
    assert [members(node) for node in fused_nodes(fuse_line(line_of(other), [alone, upright])[0])] == [["softmax"]]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("length", [1, 3, 300])
def test_softmax(graph: Graph, shared: FakeCupy, dtype: str, length: int) -> None:
    numpy_dtype = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    x, y = af.placeholder(dtype, (None, None)), af.placeholder(dtype, (None, None))
    scores = x - y
    results = [scores, af.softmax(scores), af.sum(scores, axis=1), af.log_softmax(scores)]
    value = numbers(70, length).astype(numpy_dtype)
    other = laid(shared, np.ones((70, length), numpy_dtype), "gaps")
    _, got = run(graph, results, {x: shared.asarray(value), y: other})
    wide = (value - np.ones_like(value)).astype(np.float64)
    tolerance = {"float64": 1e-12, "float32": 1e-5}.get(dtype, 2e-2)
    for found, want in zip(got, [wide, soft(wide), wide.sum(axis=1), np.log(soft(wide))], strict=True):
        assert found.dtype == numpy_dtype
        np.testing.assert_allclose(found.astype(np.float64), want, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
def test_a_softmax_of_infinities_and_nans(graph: Graph, shared: FakeCupy) -> None:
    x = af.placeholder("float32", (5, 4))
    value = np.array([[np.inf, 0, 1, 2], [-np.inf] * 4, [-np.inf, 0, 0, -np.inf], [np.nan, 1, 2, 3], [88, 1e38, 0, 0]])
    with np.errstate(all="ignore"):
        _, (got,) = run(graph, [af.softmax(x * 1.0)], {x: shared.asarray(value.astype("f"))})
        np.testing.assert_allclose(got, soft(value.astype("f")), rtol=1e-6)
