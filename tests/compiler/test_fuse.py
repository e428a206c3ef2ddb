"""`fuse_line` and the `fused` op: what becomes one kernel, and that it gives the results of the ops one by one."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import asyncflow as af
from asyncflow.compiler.program.kernels.fused import FUSED
from asyncflow.compiler.program.kernels.kernel_text import kernel_source
from asyncflow.compiler.program.kernels.kernels import bind_kernel
from asyncflow.compiler.regions.code.codegen import RegionGenerator
from asyncflow.compiler.regions.fuse import fuse_line, fuse_region
from asyncflow.graph.graph import Graph
from asyncflow.state.containers import StateStore
from tests.compiler.elementwise_kernel import CompiledNumpy
from tests.compiler.stages import regions_made
from tests.conftest import small_cards

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from asyncflow.graph.ir import Node, Tensor


pytestmark = pytest.mark.usefixtures("quiet")


def line_of(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.op.name != "placeholder"]


def fused_nodes(nodes: Sequence[Node]) -> list[Node]:
    return [node for node in nodes if node.op is FUSED]


def members(node: Node) -> list[str]:
    return [member.op.name for member in node.attrs["chain"].members]


def run_line(nodes: Sequence[Node], feeds: Mapping[Tensor, Any], results: Sequence[Tensor], xp: Any = np) -> list[Any]:
    """The values of `results`; fails unless the nodes can run in this order."""
    values = dict(feeds)
    for node in nodes:
        assert node.op.kernel is not None
        made = node.op.kernel(xp, **node.attrs)(*(values[tensor] for tensor in node.inputs))
        values.update(zip(node.outputs, (made,) if node.single else made, strict=True))
    return [values[result] for result in results]


def assert_same(got: Sequence[Any], want: Sequence[Any]) -> None:
    for a, b in zip(got, want, strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        if a.dtype.kind in "biu":
            assert np.array_equal(a, b)
        else:
            alike = (a == b) & (np.signbit(a) == np.signbit(b)) | (np.isnan(a) & np.isnan(b))
            assert alike.all(), f"{a[~alike]} is not {b[~alike]}"


def fuse_and_compare(graph: Graph, results: Sequence[Tensor], feeds: Mapping[Tensor, Any], xp: Any) -> list[Node]:
    """Return the line after fusing, which computes the same results as before."""
    nodes = line_of(graph)
    want = run_line(nodes, feeds, results)
    made, fused_results = fuse_line(nodes, results)
    assert_same(run_line(made, feeds, fused_results, xp), want)
    return made


# -- what is fused ---------------------------------------------------------------------------------------------------


def test_a_chain_becomes_one_kernel_with_scalars_as_parameters(graph: Graph) -> None:
    x, y = af.placeholder("float32", (3, 4)), af.placeholder("float32", (4,))
    z = af.tanh(x * 2.0 + y) - 1.0
    xp = CompiledNumpy()
    nodes = line_of(graph)
    made, (result,) = fuse_line(nodes, [z])
    (fused,) = fused_nodes(made)
    assert members(fused) == ["multiply", "add", "tanh", "subtract"]
    source = kernel_source(fused.attrs["chain"])
    assert source.in_params == "float32 x0, float32 x1, float32 x2, float32 x3"
    assert source.out_params == "float32 y0"
    assert source.operation.splitlines() == [
        "const float v4 = x0 * x1;",
        "const float v5 = v4 + x2;",
        "const float v6 = tanhf(v5);",
        "const float v7 = v6 - x3;",
        "y0 = v7;",
    ]
    assert source.name == "asyncflow_multiply_add_tanh_subtract"
    assert source.preamble == ""
    feeds = {x: np.arange(12, dtype="f").reshape(3, 4) / 8, y: np.arange(4, dtype="f")}
    (got,) = run_line(made, feeds, [result], xp)
    np.testing.assert_allclose(got, np.tanh(feeds[x] * np.float32(2) + feeds[y]) - 1, rtol=1e-6)
    assert xp.launched == [source.name]
    assert fused.location == z.node.location


def test_values_used_outside_are_written_too(graph: Graph) -> None:
    x = af.placeholder("float64", (2, 3))
    a = x + 1.0
    b = a * a
    c = b - x
    total = af.prod(b)
    feeds = {x: np.arange(6.0).reshape(2, 3)}
    made = fuse_and_compare(graph, [a, c, total], feeds, CompiledNumpy())
    (fused,) = fused_nodes(made)
    assert members(fused) == ["add", "multiply", "subtract"]
    assert len(fused.outputs) == 3
    assert [node.op.name for node in made][-2:] == ["fused", "prod"]


def test_a_chain_that_something_else_runs_between_stays_two(graph: Graph) -> None:
    x = af.placeholder("float64", (3, 3))
    a = af.sin(x) + 1.0
    b = af.matmul(a, a)
    c = b * a - x
    feeds = {x: np.arange(9.0).reshape(3, 3)}
    made = fuse_and_compare(graph, [c], feeds, np)
    assert [members(node) for node in fused_nodes(made)] == [["sin", "add"], ["multiply", "subtract"]]


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("turn", [1, -1])
def test_chains_that_wait_for_one_another_in_a_circle_are_not_all_fused(graph: Graph, count: int, turn: int) -> None:
    inputs = [af.placeholder("float64", (2,)) for _ in range(count)]
    first = [af.negative(x) for x in inputs]
    sums = [af.prod(y) for y in first]
    last = [af.square(y * sums[(index + turn) % count]) for index, y in enumerate(first)]
    feeds = {x: np.array([1.0, 2.0 + index]) for index, x in enumerate(inputs)}
    made = fuse_and_compare(graph, last, feeds, np)
    whole = [node for node in fused_nodes(made) if len(members(node)) == 3]
    assert len(whole) == count - 1


def test_nodes_of_one_input_run_together(graph: Graph) -> None:
    x = af.placeholder("float32", (5,))
    results = [af.exp(x), af.negative(x), af.sum(x)]
    made, _ = fuse_line(line_of(graph), results)
    assert [members(node) for node in fused_nodes(made)] == [["exp", "negative"]]


def test_control_edges_order_and_are_kept(graph: Graph) -> None:
    x = af.placeholder("float64", (2,))
    a = x + 1.0
    with af.control_dependencies([a]):
        middle = af.sum(x)
    with af.control_dependencies([middle]):
        b = a * 2.0
    last = b - 1.0
    with af.control_dependencies([last]):
        end = af.sum(x, axis=0, keepdims=True)
    made, _ = fuse_line(line_of(graph), [middle, last, end])
    (fused,) = fused_nodes(made)
    assert members(fused) == ["multiply", "subtract"]
    assert fused.control_inputs == [middle.node]
    assert end.node.control_inputs == [fused]
    order = [node for node in made if node.op.name != "constant"]
    assert order == [a.node, middle.node, fused, end.node]


def test_nodes_left_alone(graph: Graph) -> None:
    count = af.placeholder("int32", ())
    loss = af.placeholder("float32", ())
    z = af.placeholder("complex64", (3,))
    unknown = af.placeholder("float32", None)
    small, large = af.placeholder("float32", (1, 3)), af.placeholder("float32", (4, 3))
    results = [
        count + 1 - 2,  # counters stay on the host
        af.greater(loss * 1.5, 2.0),  # and so do predicates
        z * z + z,
        unknown * unknown + 1.0,
        (small * 2.0) + large,  # of two shapes
        af.square(af.sum(large, axis=0)),
    ]
    made, _ = fuse_line(line_of(graph), results)
    assert not fused_nodes(made)


def test_ops_whose_own_kernels_are_many_are_fused_alone(graph: Graph) -> None:
    x = af.placeholder("float32", (3,))
    y = af.sigmoid(x)
    made, (result,) = fuse_line(line_of(graph), [y])
    assert [members(node) for node in made] == [["sigmoid"]]
    assert result.node is made[0]
    z = af.relu(af.sum(x, axis=0, keepdims=True))
    made, (result,) = fuse_line([z.node], [z])
    assert made == [z.node] and result is z


def test_kernels_are_bounded(graph: Graph) -> None:
    x = af.placeholder("float64", (2,))
    y = x
    for _ in range(100):
        y = af.negative(y)
    terms = [af.placeholder("float64", (2,)) for _ in range(40)]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    feeds = {tensor: np.array([1.0, float(index)]) for index, tensor in enumerate([x, *terms])}
    made = fuse_and_compare(graph, [y, total], feeds, np)
    assert max(len(members(node)) for node in fused_nodes(made)) == 64
    assert max(len(node.inputs) + len(node.outputs) for node in fused_nodes(made)) == 20
    assert sum(len(members(node)) for node in fused_nodes(made)) == 139


def test_a_long_line_is_fused_piece_by_piece(graph: Graph) -> None:
    x = af.placeholder("float64", (2,))
    y = x
    for _ in range(1100):
        y = af.negative(y)
    made = fuse_and_compare(graph, [y], {x: np.array([1.0, -2.0])}, np)
    assert sum(len(members(node)) for node in fused_nodes(made)) == 1100
    assert len(made) < 20


def test_half_precision_is_rounded_after_every_op(graph: Graph) -> None:
    for dtype in ("float16", "bfloat16"):
        x = af.placeholder(dtype, (64,))
        y = (x * x + x) / 3.0 - x
        values = np.linspace(-9, 9, 64).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
        nodes = [node for node in line_of(graph) if x.node.id < node.id]
        want = run_line(nodes, {x: values}, [y])
        made, results = fuse_line(nodes, [y])
        xp = CompiledNumpy()
        assert_same(run_line(made, {x: values}, results, xp), want)
        assert len(xp.launched) == 1


def test_half_precision_in_between_needs_its_header(graph: Graph) -> None:
    x = af.placeholder("float32", (64,))
    y = af.astype(af.astype(af.astype(x, "bfloat16"), "float16"), "float32")
    made = fuse_and_compare(graph, [y], {x: np.linspace(-9, 9, 64, dtype="f")}, CompiledNumpy())
    source = kernel_source(fused_nodes(made)[0].attrs["chain"])
    assert source.preamble.count("#include") == 2
    assert '#ifdef __CUDACC_RTC__\n#include "cupy/bfloat16.cuh"\n#endif' in source.preamble


# -- shapes that only the run knows ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "launches"), [((5, 5), 1), ((1, 5), 0), ((5, 1), 1)])
def test_an_unknown_extent_of_1(graph: Graph, rows: tuple[int, int], launches: int) -> None:
    x, y = af.placeholder("float64", (None, 3)), af.placeholder("float64", (None, 3))
    a = x + 1.0
    b = a * y
    feeds = {x: np.arange(rows[0] * 3.0).reshape(-1, 3), y: np.arange(rows[1] * 3.0).reshape(-1, 3)}
    xp = CompiledNumpy()
    made = fuse_and_compare(graph, [a, b], feeds, xp)
    assert [members(node) for node in fused_nodes(made)] == [["add", "multiply"]]
    assert len(xp.launched) == launches


def test_shapes_that_do_not_fit_fail_as_the_op_does(graph: Graph) -> None:
    x, y = af.placeholder("float64", (None,)), af.placeholder("float64", (None,))
    a = x + 1.0
    b = a * y
    made, results = fuse_line(line_of(graph), [a, b])
    with pytest.raises(ValueError, match="could not be broadcast together"):
        run_line(made, {x: np.ones(2), y: np.ones(3)}, results, CompiledNumpy())


def test_scalars_from_the_host(graph: Graph) -> None:
    x, rate, step = af.placeholder("float32", (4,)), af.placeholder("float32", ()), af.placeholder("int32", ())
    y = x - rate * x * af.astype(step, "float32")
    for given_rate in (np.float32(0.5), np.array(0.5, "f")):
        feeds = {x: np.arange(4, dtype="f"), rate: given_rate, step: np.int32(3)}
        nodes = line_of(graph)
        want = run_line(nodes, feeds, [y])
        made, results = fuse_line(nodes, [y])
        xp = CompiledNumpy()
        assert_same(run_line(made, feeds, results, xp), want)
        # CuPy takes NumPy scalars there, but no NumPy arrays.
        assert sorted(map(type, xp.inputs[0]), key=repr) == [np.float32, np.float32, np.ndarray]


def test_scalars_alone_have_no_size_to_launch_for(graph: Graph) -> None:
    x, y = af.placeholder("float32", ()), af.placeholder("float32", ())
    z = x * y - x
    xp = CompiledNumpy()
    made = fuse_and_compare(graph, [z], {x: np.float32(2), y: np.float32(3)}, xp)
    assert len(fused_nodes(made)) == 1
    assert xp.launched == []


# -- regions ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_branches_and_loops_of_a_region_are_fused(graph: Graph) -> None:
    x = af.placeholder("float64", (3,), name="x")
    n = af.placeholder("int64", (), name="n")

    def body(i: Any, y: Any) -> Any:
        z = af.cond(af.less(i, 2), lambda: y * 2.0 + x, lambda: af.sin(y) - x)
        return i + 1, z * 0.5 + 1.0

    _, y = af.while_loop(lambda i, y: af.less(i, n), body, (af.constant(0), x * x + 1.0))
    made = regions_made(graph, [y * 2.0 - x])
    (node,) = [node for node in made.nodes if node.op.name == "region"]
    region = node.attrs["region"]
    feeds = {"x": np.array([0.1, 0.2, 0.3]), "n": np.int64(4)}
    inputs = [feeds[names] for names in ("n", "x")] if region.inputs[0].dtype.kind == "i" else list(feeds.values())
    want = _run_region(region, inputs, np)
    fused = fuse_region(region)
    chains = [members(inner) for inner in fused.walk() if inner.op is FUSED]
    assert sorted(chains) == sorted(
        [
            ["multiply", "add"],
            ["multiply", "subtract"],
            ["multiply", "add"],
            ["sin", "subtract"],
            ["multiply", "add"],
        ]
    )
    xp = CompiledNumpy()
    assert_same(_run_region(fused, inputs, xp), want)
    assert len(xp.launched) == 10
    assert all(spec.spec == other.spec for spec, other in zip(fused.outputs, region.outputs, strict=True))


def _run_region(region: Any, inputs: Sequence[Any], xp: Any) -> Any:
    bind = partial(bind_kernel, xp=xp, resolve=StateStore().lookup, check_outputs=True, check_numerics=False)
    code = RegionGenerator(region=region, bind=bind).generate("region")
    running = code.function(*inputs)
    budget = None
    while True:
        try:
            running.send(budget)
        except StopIteration as end:
            return end.value
        budget = 1000


# -- random programs -------------------------------------------------------------------------------------------------

FLOATS = ("float32", "float64")
INTEGERS = ("int8", "uint8", "int32", "int64", "uint64")
BINARY = ("add", "subtract", "multiply", "floor_divide", "remainder")
UNARY = ("negative", "abs", "square", "floor", "sign")


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[tuple[Any, ...]], list[bool]]:
    """Steps: an op, and which of the values so far it takes; and which values are results."""
    kinds = ["binary", "unary", "divide", "compare", "where", "astype", "clip", "bitwise", "reduce"]
    steps = [
        (draw(st.sampled_from(kinds)), *(draw(st.integers(0, 10**6)) for _ in range(4)))
        for _ in range(draw(st.integers(3, 14)))
    ]
    return steps, [draw(st.booleans()) for _ in steps]


def build(steps: Sequence[tuple[Any, ...]], shapes: Sequence[tuple[int | None, ...]]) -> tuple[list[Any], list[Any]]:
    """Placeholders, and the value of every step."""
    dtypes = ["float64", "float32", "int32", "int64", "uint8", "bool", "float16"]
    fed = [af.placeholder(dtype, shapes[i % len(shapes)]) for i, dtype in enumerate(dtypes)]
    values = list(fed)
    made = []
    for kind, *numbers in steps:
        value = _step(kind, numbers, values)
        made.append(value)
        values.append(value)
    return fed, made


def _of_kind(values: Sequence[Any], kinds: str, number: int) -> Any:
    return (found := [value for value in values if value.dtype.kind in kinds])[number % len(found)]


def _step(kind: str, numbers: Sequence[int], values: Sequence[Any]) -> Any:
    first, second, third, choice = numbers
    x = _of_kind(values, "iuf", first)
    y = _of_kind([value for value in values if value.dtype == x.dtype], "iuf", second)
    match kind:
        case "binary":
            return getattr(af, BINARY[choice % len(BINARY)])(x, y)
        case "unary":
            return getattr(af, UNARY[choice % len(UNARY)])(x)
        case "divide":
            float_x = _of_kind(values, "f", first)
            return float_x / (2.0 if choice % 2 else _of_kind(values, "f", second))
        case "compare":
            return (af.less, af.equal, af.greater_equal)[choice % 3](x, y)
        case "where":
            return af.where(_of_kind(values, "b", third), x, y)
        case "astype":
            wide = _of_kind(values, "biu" if choice % 2 else "bf", first)
            return af.astype(wide, (FLOATS if wide.dtype.kind == "f" else INTEGERS + FLOATS)[third % 2])
        case "clip":  # NumPy takes either of two zeros for the larger
            return af.clip(x, 1, 3)
        case "bitwise":
            flag = _of_kind(values, "b", first)
            return (af.bitwise_xor, af.logical_and)[choice % 2](flag, _of_kind(values, "b", second))
    return af.max(x, axis=choice % 2, keepdims=True)


def feeds_for(fed: Sequence[Any], extents: Sequence[tuple[int, ...]]) -> dict[Any, Any]:
    rng = np.random.default_rng(7)
    found = {}
    for index, tensor in enumerate(fed):
        numbers: Any = rng.integers(-3, 9, extents[index % len(extents)])
        numbers = numbers + rng.random(numbers.shape) if tensor.dtype.kind == "f" else abs(numbers)
        found[tensor] = numbers.astype(tensor.dtype) if tensor.dtype.kind != "b" else numbers % 2 == 1
    return found


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(program=programs(), known=st.booleans(), ones=st.booleans())
def test_a_fused_line_gives_what_its_ops_give(program: Any, known: bool, ones: bool) -> None:
    """Ops run singly, which is quick, with shapes known or not: right nodes, right order, right shapes."""
    _check_program(program, np, known=known, ones=ones)


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(program=programs(), ones=st.booleans())
def test_compiled_source_gives_the_bits_of_the_ops(program: Any, ones: bool) -> None:
    _check_program(program, CompiledNumpy(), known=False, ones=ones)


def _check_program(program: Any, xp: Any, *, known: bool, ones: bool) -> None:
    steps, shown = program
    extents = [(3, 4), (1, 4), (3, 4)] if ones else [(3, 4)]
    with Graph() as graph:
        fed, made = build(steps, extents if known else [(None, None)])
    results = [value for value, is_shown in zip(made, shown, strict=True) if is_shown] or made[-1:]
    fuse_and_compare(graph, results, feeds_for(fed, extents), xp)


async def test_explain_shows_the_source_of_kernels() -> None:
    with small_cards(0):
        with af.Graph() as graph:
            x = af.placeholder("float32", (None, 4))
            y = af.tanh(x * 2 + 1)
        async with af.Session(graph, devices=["cuda:0"]) as session:
            shown = session.plan(y, [x]).explain(source=True)
            assert "fused = k_fused(" in shown
            assert "(float32 x0, " in shown and "tanhf(" in shown
            assert "fused" not in session.plan(y, [x]).explain()
        async with af.Session(graph, devices=["cuda:0"], fusion=False) as session:
            assert "fused" not in session.plan(y, [x]).explain(source=True)
