"""Views and joins in chains: which become part of a kernel, and that the results are the same to the bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import asyncflow as af
from asyncflow.compiler.program.kernels.kernel_text import body_of
from asyncflow.compiler.regions.fuse import fuse_line
from asyncflow.graph.graph import Graph
from tests.compiler.elementwise_kernel import CompiledNumpy
from tests.compiler.test_fuse import assert_same, fuse_and_compare, fused_nodes, line_of, members, run_line
from tests.compiler.test_packed import LAYOUTS, compare
from tests.fake_cupy import FakeCupy

pytestmark = pytest.mark.usefixtures("quiet")


def numbers(*shape: int, dtype: str = "float32") -> np.ndarray:
    found = np.random.default_rng(sum(shape)).normal(size=shape) * 4
    return found.astype(dtype) if dtype != "bool" else found > 0


def chains(graph: Graph, results: Sequence[Any]) -> list[list[str]]:
    made, _ = fuse_line(line_of(graph), results)
    return [members(node) for node in fused_nodes(made)]


# -- what is taken in ------------------------------------------------------------------------------------------------


def test_a_cell_is_one_kernel_with_its_gates_cut_and_its_gradients_joined(graph: Graph) -> None:
    x, y, c = af.placeholder("float32", (3, 8)), af.placeholder("float32", (3, 8)), af.placeholder("float32", (3, 2))
    i, f, o, g = af.split(x + y, 4, axis=-1)
    new = f * c + i * g
    joined = af.concat([new * o, new, i - g, f - c], axis=1)
    feeds = {x: numbers(3, 8), y: numbers(3, 8), c: numbers(3, 2)}
    (node,) = fused_nodes(fuse_and_compare(graph, [new, joined], feeds, np))
    assert [output.shape for output in node.outputs] == [(3, 2), (3, 8)]
    assert members(node).count("getitem") == 4 and members(node)[-1] == "concat"
    body = body_of(node.attrs["chain"])
    assert len(body.reads) == 9 and len(body.stored) == 5


def test_parts_that_others_use_too_stay_alone(graph: Graph) -> None:
    x = af.placeholder("float32", (4, 6))
    left, right = af.split(x * 2.0 + 1.0, 2, axis=1)
    a, b = left * right - left, af.matmul(left, af.matrix_transpose(right))
    assert chains(graph, [a, b]) == [["multiply", "add"], ["multiply", "subtract"]]


def test_no_value_is_computed_for_more_elements_than_it_has(graph: Graph) -> None:
    x = af.placeholder("float32", (6,))
    y = af.square(x) * x
    overlapping = y[:5] - y[1:]
    assert chains(graph, [overlapping * 2.0]) == [
        ["square", "multiply"],
        ["getitem", "getitem", "subtract", "multiply"],
    ]


def test_a_repeated_value_is_computed_before(graph: Graph) -> None:
    row = af.placeholder("float32", (1, 3))
    wide = af.broadcast_to(af.square(row) * row, (5, 3))
    assert chains(graph, [wide - 1.0 + wide]) == [["square", "multiply"], ["broadcast_to", "subtract", "add"]]


def test_a_transposed_chain_is_read_in_another_order(graph: Graph) -> None:
    x, y = af.placeholder("float32", (3, 4)), af.placeholder("float32", (4, 3))
    z = af.matrix_transpose(x * x - 1.0) * y + y
    feeds = {x: numbers(3, 4), y: numbers(4, 3)}
    (node,) = fused_nodes(fuse_and_compare(graph, [z], feeds, CompiledNumpy()))
    assert members(node) == ["multiply", "subtract", "matrix_transpose", "multiply", "add"]


@pytest.mark.parametrize("key", [(0, 1), (1, -1), (..., 1, 0), (1, slice(0, 1))])
def test_an_element_is_read_where_it_stands(graph: Graph, key: Any) -> None:
    """NumPy copies an element that integers choose, and its place would be lost."""
    x, y = af.placeholder("float32", (4,)), af.placeholder("float32", (2, 3))
    z = af.square(x) + y[key] - y[1, 1] * x[3]
    (node,) = fused_nodes(fuse_and_compare(graph, [z], {x: numbers(4), y: numbers(2, 3)}, CompiledNumpy()))
    assert "getitem" in members(node)


def test_keys_that_only_the_run_knows_stay_alone(graph: Graph) -> None:
    x, t = af.placeholder("float32", (5, 3)), af.placeholder("int64", ())
    assert chains(graph, [x[t] * 2.0 - 1.0]) == [["multiply", "subtract"]]
    unknown = af.placeholder("float32", (None, 3))
    assert chains(graph, [unknown[2] * 2.0 - 1.0])[-1] == ["multiply", "subtract"]
    assert chains(graph, [unknown[1:] * 2.0 - 1.0])[-1] == ["getitem", "multiply", "subtract"]


def test_results_that_are_joined_with_others_stay_alone(graph: Graph) -> None:
    x, y = af.placeholder("float32", (3, 2)), af.placeholder("float32", (3, 2))
    a = af.square(x) * x
    assert chains(graph, [af.concat([a, a + 1.0, y], axis=1)]) == [["square", "multiply", "add"]]
    flat = af.concat([a, a + 1.0], axis=None)
    assert "concat" not in chains(graph, [flat])[-1]


def test_a_chain_does_not_use_its_own_joined_results(graph: Graph) -> None:
    x = af.placeholder("float32", (3, 2))
    a = af.square(x) * x
    joined = af.concat([a, a - x], axis=0)
    b = joined[:3] * a + joined[3:]
    fuse_and_compare(graph, [b], {x: numbers(3, 2)}, np)
    fuse_and_compare(graph, [joined, b], {x: numbers(3, 2)}, np)


@pytest.mark.slow
def test_unknown_extents(graph: Graph, shared: FakeCupy) -> None:
    x, c = af.placeholder("float32", (None, 8)), af.placeholder("float32", (None, 2))
    i, f, o, _ = af.split(x * x - 1.0, 4, axis=-1)
    results = [af.concat([i * c, f - c, o * c], axis=-1), i * f]
    for rows in (3, 1, 0):
        feeds = {x: numbers(rows, 8), c: numbers(rows, 2)}
        (kernel,) = compare(shared, results, feeds, ["C", "F"])
        (launch,) = kernel._layouts.values()
        assert launch is not None and launch.shapes == ((rows, 6), (rows, 2))
    # The rows of one operand are those of both, if the other has one.
    (kernel,) = compare(shared, results, {x: numbers(1, 8), c: numbers(4, 2)}, ["C"])
    assert list(kernel._layouts.values()) == [None]


def test_an_empty_slice_and_a_failing_one(graph: Graph) -> None:
    x = af.placeholder("float64", (None,))
    y = x[3:] * 2.0 - x[:-2]
    made, results = fuse_line(line_of(graph), [y])
    assert run_line(made, {x: np.arange(2.0)}, results)[0].shape == (0,)
    np.testing.assert_array_equal(run_line(made, {x: np.arange(4.0)}, results)[0], [6.0, 5.0])
    with pytest.raises(ValueError, match="could not be broadcast"):
        run_line(made, {x: np.arange(5.0)}, results)


# -- random programs -------------------------------------------------------------------------------------------------

KINDS = ("binary", "unary", "where", "split", "slice", "transpose", "new axis", "drop", "broadcast", "concat", "astype")


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[tuple[str, int, int, int]], int, list[str]]:
    """Steps, which values are results, and layouts."""
    places = st.integers(0, 10**6)
    step = st.tuples(st.sampled_from(KINDS), places, places, places)
    return (
        draw(st.lists(step, min_size=4, max_size=16)),
        draw(st.integers(0, 2**20)),
        draw(st.lists(st.sampled_from(LAYOUTS), min_size=1)),
    )


def build(steps: Sequence[tuple[str, int, int, int]], *, is_known: bool) -> tuple[dict[Any, np.ndarray], list[Any]]:
    """Feeds, and the values of all steps."""
    shapes = [((4, 6), "float32"), ((4, 6), "float64"), ((6, 4), "float32"), ((6,), "int32"), ((4, 1), "float16")]
    feeds = {
        af.placeholder(dtype, tuple(None if extent == 4 and not is_known else extent for extent in shape)): numbers(
            *shape, dtype=dtype
        )
        for shape, dtype in shapes
    }
    values, made = list(feeds), []
    for kind, *chosen in steps:
        found = _step(kind, chosen, values)
        values += found
        made += found
    return feeds, made


def _step(kind: str, chosen: Sequence[int], values: Sequence[Any]) -> list[Any]:
    first, second, third = chosen
    x = values[-1 - first % min(len(values), 6)]
    alike = [value for value in values if value.shape == x.shape]
    y = alike[second % len(alike)]
    axis = third % len(x.shape) if x.shape else 0
    match kind:
        case "binary":
            return [(af.add, af.multiply, af.subtract)[third % 3](x, af.astype(y, x.dtype))]
        case "unary":
            return [(af.negative, af.square, af.abs)[third % 3](x)]
        case "where":
            return [af.where(af.less(x, 1), x, af.astype(y, x.dtype))]
        case "split" if x.shape and x.shape[axis] and not x.shape[axis] % 2:
            return list(af.split(x, 2, axis=axis))
        case "slice" if x.shape and (x.shape[axis] or 0) > 2:
            key = (slice(1, None), slice(None, -1), slice(None, None, -1), slice(None, None, 2))[second % 4]
            return [x[(*(slice(None),) * axis, key)]]
        case "transpose" if len(x.shape) > 1:
            return [af.matrix_transpose(x)]
        case "new axis" if len(x.shape) < 3:
            return [af.expand_dims(x, axis)]
        case "drop" if x.shape and x.shape[axis] == 1:
            return [af.squeeze(x, axis)]
        case "broadcast" if None not in x.shape and len(x.shape) < 3:
            return [af.broadcast_to(x, (2, *x.shape))]
        case "concat" if x.shape and x.shape[axis] is not None:
            return [af.concat([x, af.astype(y, x.dtype), af.negative(x)], axis=axis - len(x.shape) * (second % 2))]
        case "astype":
            return [af.astype(x, ("float32", "float64", "int32", "float16")[second % 4])]
    return [af.negative(x)]


def _results(made: Sequence[Any], chosen: int) -> list[Any]:
    return [value for place, value in enumerate(made) if chosen >> place & 1] or [made[-1]]


@settings(max_examples=60, deadline=None)
@given(programs(), st.booleans())
def test_random_views_by_the_ops_one_by_one(
    program: tuple[list[tuple[str, int, int, int]], int, list[str]], is_known: bool
) -> None:
    """Right nodes, right order, right shapes."""
    steps, chosen, _ = program
    with af.Graph() as graph:
        feeds, made = build(steps, is_known=is_known)
    results = _results(made, chosen)
    nodes = line_of(graph)
    want = run_line(nodes, feeds, results)
    fused, replaced = fuse_line(nodes, results)
    assert_same(run_line(fused, feeds, replaced), want)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(programs(), st.booleans())
def test_random_views_as_kernels_of_our_own(
    shared: FakeCupy, program: tuple[list[tuple[str, int, int, int]], int, list[str]], is_known: bool
) -> None:
    steps, chosen, layouts = program
    with af.Graph():
        feeds, made = build(steps, is_known=is_known)
        compare(shared, _results(made, chosen), feeds, layouts)


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(programs())
def test_random_views_as_kernels_of_cupy(
    program: tuple[list[tuple[str, int, int, int]], int, list[str]],
) -> None:
    steps, chosen, _ = program
    with af.Graph() as graph:
        feeds, made = build(steps, is_known=True)
    fuse_and_compare(graph, _results(made, chosen), feeds, CompiledNumpy())
