"""`generate`: the source of regions, the numbers they give, and what their errors say."""

from __future__ import annotations

import gc
import inspect
import linecache
import re
import traceback
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import asyncflow as af
from asyncflow.compiler.program.kernels.kernels import bind_kernel
from asyncflow.compiler.regions.code.codegen import RegionGenerator
from asyncflow.compiler.regions.code.region_code import RegionCode
from asyncflow.compiler.regions.regions import Region
from asyncflow.graph.building.build import apply
from asyncflow.graph.builtin import PLACEHOLDER
from asyncflow.graph.ir import is_name
from asyncflow.graph.op import KernelContext
from asyncflow.graph.text.parse import parse_graph
from asyncflow.graph.text.text import print_graph
from asyncflow.state.containers import StateStore
from tests.compiler.stages import golden, regions_made
from tests.conformance.gates import Gate
from tests.texts import texts


def region_of(graph: af.Graph, fetches: Any) -> Region:
    """The only region that `fetches` need, with all placeholders fed, before any optimisation."""
    made = regions_made(graph, list(fetches) if isinstance(fetches, tuple | list) else [fetches])
    (node,) = [node for node in made.nodes if node.op.name == "region"]
    region: Region = node.attrs["region"]
    return region


def region_code(graph: af.Graph, fetches: Any) -> RegionCode:
    """Return the code of a region."""
    bind = partial(bind_kernel, xp=np, resolve=StateStore().lookup, check_outputs=False, check_numerics=False)
    return RegionGenerator(region=region_of(graph, fetches), bind=bind).generate("region")


def body_of(code: RegionCode) -> str:
    """The source without its first line, which binds kernels and constants."""
    first, _, body = code.source.partition("\n")
    assert first.startswith("def ") and first.endswith("):")
    return inspect.cleandoc(body)


# -- the source ------------------------------------------------------------------------------------------------------


def test_a_counter(graph: af.Graph) -> None:
    n = af.placeholder("int64", (), name="n")
    code = region_code(graph, af.while_loop(lambda i: i < n, lambda i: i + 1, (0,), name="count"))
    assert code.is_generator
    assert not code.conduct.needs_context
    assert (
        code.source
        == golden("""
        def region(feed, *, constant=constant, constant_1=constant_1):
            budget = 1
            var = constant
            count_iteration = 0
            while var < feed:
                add = var + constant_1
                var = add
                count_iteration += 1
                budget -= 1
                if not budget:
                    budget = yield
            return (var, )
    """)
        + "\n"
    )


def test_a_loop_in_a_loop_with_a_branch(graph: af.Graph) -> None:
    def inner(j: af.Tensor, u: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
        return j + 1, af.cond(u > 5, lambda: u - 1, lambda: u + j)

    def outer(i: af.Tensor, t: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
        return i + 1, af.while_loop(lambda j, _: j < i, inner, (0, t), name="inner")[1]

    code = region_code(graph, af.while_loop(lambda i, _: i < 4, outer, (0, 0), name="outer"))
    assert body_of(code) == golden("""
        budget = 1
        var = constant
        var_1 = constant_1
        outer_iteration = 0
        while var < constant_2:
            add = var + constant_3
            var_2 = constant_1_1
            var_1_1 = var_1
            inner_iteration = 0
            while var_2 < var:
                add_1 = var_2 + constant_4
                greater = var_1_1 > constant_1_2
                if greater:
                    subtract = var_1_1 - constant_5
                    cond = subtract
                else:
                    add_2 = var_1_1 + var_2
                    cond = add_2
                var_2 = add_1
                var_1_1 = cond
                inner_iteration += 1
                budget -= 1
                if not budget:
                    budget = yield
            var = add
            var_1 = var_1_1
            outer_iteration += 1
            budget -= 1
            if not budget:
                budget = yield
        return (var, var_1, )
    """)


def test_loop_variables_that_change_places(graph: af.Graph) -> None:
    """At once, where one by one would lose a value."""
    code = region_code(graph, af.while_loop(lambda i, a, b: i < 3, lambda i, a, b: (i + 1, b, a), (0, 1.0, 2.0)))
    assert "        var, var_1, var_2 = add, var_2, var_1\n" in code.source


def test_a_branch_that_does_nothing(graph: af.Graph) -> None:
    x = af.placeholder("int64", (), name="x")
    code = region_code(graph, af.cond(x > 5, lambda: x, lambda: -x, name="pick"))
    assert not code.is_generator
    assert body_of(code) == golden("""
        greater = feed > constant
        if greater:
            pick = feed
        else:
            negative = -feed
            pick = negative
        return (pick, )
    """)


def test_branches_for_their_effects(graph: af.Graph) -> None:
    """A branch without any says so."""
    x, v = af.placeholder("int64", (), name="x"), af.Variable(0, name="v")
    picked = af.cond(x > 5, lambda: v.assign_add(x), lambda: x, name="pick")
    with af.control_dependencies([picked]):
        after = v.read()
    source = region_code(graph, after).source
    assert "    if greater:\n        assign_add = k_variable_assign_add(feed)\n" in source


def test_captures_are_the_outer_variables(graph: af.Graph) -> None:
    """Values that a loop does not change are computed once and cost nothing an iteration."""
    x = af.placeholder("int64", (), name="x")
    scale = x * 3
    code = region_code(graph, af.while_loop(lambda i: i < scale, lambda i: i + scale, (x,), name="loop"))
    assert body_of(code) == golden("""
        budget = 1
        multiply = feed * constant
        var = feed
        loop_iteration = 0
        while var < multiply:
            add = var + multiply
            var = add
            loop_iteration += 1
            budget -= 1
            if not budget:
                budget = yield
        return (var, )
    """)


def test_an_op_of_several_outputs(graph: af.Graph) -> None:
    x = af.placeholder("int64", (3,), name="x")
    found = af.unique_counts(x)
    code = region_code(graph, [found.counts + 1, found.values])
    assert body_of(code) == golden("""
        unique_counts, unique_counts_1, = k_unique_counts(feed)
        add = k_add(unique_counts_1, constant)
        del unique_counts_1
        return (unique_counts, add, )
    """)


async def test_large_values_are_let_go_after_their_last_use() -> None:
    """A region of 40 sorts of 2 MB holds a few of them at a time, not all."""
    with af.Graph():
        x = af.placeholder("float64", (500, 500))
        y = x
        for _ in range(40):
            y = af.sort(y + 1.0)
        total = af.sum(y)
    async with af.Session() as session:
        session.plan(total, [x])
        rows = np.ones((500, 500))
        tracemalloc.start()
        await session.run(total, {x: rows})
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 6 * rows.nbytes


def test_the_source_goes_with_the_function(graph: af.Graph) -> None:
    """A service whose graphs grow compiles for ever; code that it no longer uses must not stay in `linecache`."""
    code = region_code(graph, af.while_loop(lambda i: i < 3, lambda i: i + 1, (0,)))
    filename = code.filename
    assert filename in linecache.cache
    del code
    gc.collect()
    assert filename not in linecache.cache


def test_a_predicate_of_several_ops(graph: af.Graph) -> None:
    n = af.placeholder("int64", (), name="n")
    code = region_code(graph, af.while_loop(lambda i: (i < n) & (i < 10), lambda i: i + 1, (0,), name="loop"))
    assert "\n    while True:\n        less = var < feed\n" in code.source
    assert ":\n            break\n" in code.source


def test_a_later_loop_begins_a_budget_of_its_own(graph: af.Graph) -> None:
    """A budget found by light iterations would keep heavy ones going for seconds."""
    n = af.placeholder("int64", (), name="n")
    rows = af.placeholder("float64", (64, 64), name="rows")
    (count,) = af.while_loop(lambda i: i < n, lambda i: i + 1, (0,), name="light")
    heavy = af.while_loop(lambda i, _: i < count, lambda i, x: (i + 1, x @ x), (0, rows), name="heavy")
    code = region_code(graph, heavy)
    before, between, after = code.source.split("budget = yield True\n")
    assert "while var <" in before
    assert "k_matmul(" in between
    assert "while" not in after, "where a loop that takes its time has ended, its iterations can be counted"
    light, heavy_loop, end = code.phases
    assert [phase.label for phase in (light, heavy_loop)] == ["light", "heavy"]
    assert (end.nodes, code.label) == ([], "light, heavy")


def test_names_are_python_names(graph: af.Graph) -> None:
    """Whatever nodes are called, and whatever the function uses itself."""
    x = af.placeholder("int64", (), name="x")
    awkward = ["budget", "context", "for", "2nd", "grün-blau", "track", "None", "k_add"]
    total = x
    for name in awkward:
        total = af.while_loop(lambda i: i < 9, lambda i: i + 2, (total,), name=name)[0]
    code = region_code(graph, total)
    assert body_of(code).count("while ") == len(awkward)


NAMES = texts(min_size=1, max_size=4).filter(is_name)
"""Names that a node may have; names that failed before come once each."""


@settings(max_examples=10, deadline=None, derandomize=True)
@given(names=st.lists(NAMES, min_size=6, max_size=6))
@example(names=["\u00b5", "\u03bc", "\ufb01", "fi", "x\u00b2", "v\u2080"])
@example(names=["\u00bd", "\u00aa", "a", "__debug__", "budget", "\x00\n"])
@example(names=["\ud800", "_", "None", "in_iteration", "k_add", "\U0001d4b6"])
def test_any_name_gives_the_same_bits(names: list[str]) -> None:
    """Behaviour 91: variables of the source are the nodes' own, whatever these are called."""
    code, found = [], []
    for given_names in (names, list("abcdef")):
        first, second, third, loop, branch, scope = given_names
        with af.Graph(seed=1) as graph:
            x = af.random.normal((3,), seed=1, name=first)
            y = af.random.normal((3,), seed=2, name=second)
            with af.name_scope(scope):
                step = af.identity(x - y + af.constant(0.5, name=third), name=third)
                _, total = af.while_loop(lambda i, s: i < 3, lambda i, s: (i + 1, s + step), (0, x), name=loop)  # noqa: B023
                picked = af.cond(af.sum(total) > 0, lambda: total - y, lambda: total + y, name=branch)  # noqa: B023
        assert print_graph(parse_graph(print_graph(graph))) == print_graph(graph)
        code.append(region_code(graph, [step, picked]))
        found.append(_run(code[-1]))
    assert code[0].source.isascii()
    assert_same_bits(*found)


def _run(code: RegionCode) -> Any:
    running = code.function(KernelContext(seed=1, run=0, tag=()))
    try:
        running.send(None)
        while True:
            running.send(10)
    except StopIteration as stop:
        return stop.value


def test_constants_and_kernels_are_local(graph: af.Graph) -> None:
    """The function looks nothing up in a global table."""
    v = af.Variable(np.zeros(3), name="v")
    code = region_code(graph, [v.assign_add(np.ones(3)), af.sum(v.read())])
    used = code.function.__code__
    assert not set(used.co_names) & set(code.function.__globals__)


# -- the numbers -----------------------------------------------------------------------------------------------------


async def both_ways(graph: af.Graph, fetches: Any, feeds: Any = None) -> tuple[Any, Any]:
    """Values with regions and without, neither in debug mode, in which scalars go through checked kernels."""
    results = []
    for regions in (True, False):
        async with af.Session(graph, regions=regions) as session:
            results.append(await session.run(fetches, feeds))
    return results[0], results[1]


def assert_same_bits(first: Any, second: Any) -> None:
    assert len(first) == len(second)
    for a, b in zip(first, second, strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert a.tobytes() == b.tobytes()


EDGES: dict[str, tuple[str, list[Any]]] = {
    "int8": ("int8", [-128, -1, 0, 1, 7, 127]),
    "int32": ("int32", [-(2**31), -1, 0, 3, 2**31 - 1]),
    "int64": ("int64", [-(2**63), -1, 0, 3, 2**63 - 1]),
    "uint8": ("uint8", [0, 1, 3, 255]),
    "float32": ("float32", [0.0, -0.0, 0.1, 1.5, -3.25, 3e38, np.inf, -np.inf, np.nan]),
    "float64": ("float64", [0.0, -0.0, 0.1, -1e308, np.inf, np.nan]),
    "bool": ("bool", [False, True]),
}
ARITHMETIC: list[Callable[[Any, Any], Any]] = [
    lambda a, b: a + b,
    lambda a, b: a - b,
    lambda a, b: a * b,
    lambda a, b: a // b,
    lambda a, b: a % b,
    lambda a, b: -a,
    lambda a, b: abs(a),
]
INTEGER: list[Callable[[Any, Any], Any]] = [
    lambda a, b: a & b,
    lambda a, b: a | b,
    lambda a, b: a ^ b,
    lambda a, b: ~a,
    lambda a, b: a << (b & 3),
    lambda a, b: a >> (b & 3),
]
LOGICAL: list[Callable[[Any, Any], Any]] = [lambda a, b: a & b, lambda a, b: a | b, lambda a, b: a ^ b, lambda a, b: ~a]
COMPARISONS: list[Callable[[Any, Any], Any]] = [
    lambda a, b: a < b,
    lambda a, b: a <= b,
    lambda a, b: a > b,
    lambda a, b: a >= b,
    lambda a, b: a == b,
    lambda a, b: a != b,
]


def operations(dtype: str) -> list[Callable[[Any, Any], Any]]:
    if dtype == "bool":
        return [*LOGICAL, *COMPARISONS[4:]]
    if dtype.startswith("float"):
        return [*ARITHMETIC, *COMPARISONS, lambda a, b: a / b]
    signs = ARITHMETIC[:5] if dtype.startswith("uint") else ARITHMETIC
    return [*signs, *INTEGER, *COMPARISONS]


@pytest.mark.parametrize("kind", EDGES)
async def test_scalars_give_the_same_bits(graph: af.Graph, kind: str) -> None:
    """Overflow, division by zero, NaN and signed zeros are what the ufuncs make of them, dtypes included."""
    dtype, values = EDGES[kind]
    a, b = af.placeholder(dtype, ()), af.placeholder(dtype, ())
    fetches = [operation(a, b) for operation in operations(dtype)]
    as_arrays = [operation(af.expand_dims(a), af.expand_dims(b)) for operation in operations(dtype)]
    async with (
        af.Session(graph) as compiled,
        af.Session(graph, regions=False) as interpreted,
    ):
        for x in values:
            for y in values:
                feeds = {a: np.dtype(dtype).type(x), b: np.dtype(dtype).type(y)}
                got = await compiled.run(fetches, feeds)
                assert_same_bits(got, await interpreted.run(fetches, feeds))
                assert_same_bits(got, [value[0] for value in await compiled.run(as_arrays, feeds)])


async def test_five_float32_operations_in_a_loop(graph: af.Graph) -> None:
    """Each rounded to float32, none to float64."""

    def body(i: Any, x: Any) -> Any:
        return i + 1, (x * 1.0001 + 0.5) / 1.01 - x * 0.125

    x = af.placeholder("float32", ())
    result = af.while_loop(lambda i, _: i < 1000, body, (0, x))
    first, second = await both_ways(graph, list(result), {x: np.float32(0.1)})
    assert_same_bits(first, second)
    want = np.float32(0.1)
    f = np.float32
    for _ in range(1000):
        want = (want * f(1.0001) + f(0.5)) / f(1.01) - want * f(0.125)
    assert first[1] == want
    assert first[1].dtype == np.float32


@pytest.mark.parametrize("value", [np.nan, 0.0, np.inf])
async def test_nan_in_predicates(graph: af.Graph, value: float) -> None:
    """A comparison with NaN is false: the loop ends, and `cond` takes its second branch."""
    x = af.placeholder("float64", ())
    looped = af.while_loop(lambda i, y: (y <= 3) & (i < 5), lambda i, y: (i + 1, y + 1), (0, x))
    picked = af.cond(x < 1, lambda: 1, lambda: 2)
    first, second = await both_ways(graph, [*looped, picked], {x: value})
    assert_same_bits(first, second)
    assert first[0] == (4 if value == 0.0 else 0)
    assert first[2] == (1 if value == 0.0 else 2)


@pytest.mark.parametrize("trips", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("dtype", ["int64", "float32"])
@pytest.mark.parametrize("shape", [(), (3,), (700,)], ids=["scalars", "small", "large"])
async def test_rebinding_order(graph: af.Graph, trips: int, dtype: str, shape: tuple[int, ...]) -> None:
    """Swaps, rotations and shifts of loop variables, with buffers of any size."""
    n = af.placeholder("int64", ())
    start = [af.full(shape, value, dtype=dtype) for value in (1, 2, 3)]

    def loop(step: Callable[[Any, Any, Any], Any]) -> Any:
        return af.while_loop(lambda i, *_: i < n, lambda i, a, b, c: (i + 1, *step(a, b, c)), (0, *start))[1:]

    steps: list[Callable[[Any, Any, Any], Any]] = [
        lambda a, b, c: (b, a, c),
        lambda a, b, c: (b, c, a),
        lambda a, b, c: (c, a, b),
        lambda a, b, c: (b, c, c + a),
        lambda a, b, c: (a + b, a, b),
        lambda a, b, c: (b, b, a * 2),
        lambda a, b, c: (a + 1, a + 1 + b, a + b + c),
        lambda a, b, c: (b * 1, a * 1, -c),
        lambda a, b, c: (c, c + 1, c + 1 + a),
    ]
    fetches = [value for step in steps for value in loop(step)]
    first, second = await both_ways(graph, fetches, {n: trips})
    assert_same_bits(first, second)
    for index, step in enumerate(steps):
        values: Any = [np.full(shape, value, dtype) for value in (1, 2, 3)]
        for _ in range(trips):
            values = step(*values)
        assert_same_bits(first[3 * index : 3 * index + 3], [np.asarray(value, dtype) for value in values])


def _last_and_all(n: Any, x: Any) -> Any:
    """A value that a TensorArray keeps while the loop goes on with its buffer."""
    array = af.TensorArray("float32", 0, dynamic_size=True, element_shape=x.shape)
    _, y, array = af.while_loop(
        lambda i, *_: i < n, lambda i, y, a: (i + 1, af.tanh(y + 1) * 2, a.write(i, y * 3)), (0, x, array)
    )
    return [y, array.stack()]


def _views(n: Any, x: Any) -> Any:
    """Results that look into the memory of others."""
    return list(
        af.while_loop(
            lambda i, *_: i < n,
            lambda i, y, z: (i + 1, af.reshape(af.reshape(y + 1, (-1,)) * 2, x.shape), (z + y)[::-1]),
            (0, x, x),
        )
    )


def _views_by_number(n: Any, x: Any) -> Any:
    """Views of which the run says where they begin or how many they are."""

    def body(i: Any, y: Any, z: Any) -> Any:
        e, f = af.tanh(y), af.exp(z * 0.001)
        row, rows = e[n % 2], af.broadcast_to(f, (n % 2 + 1, *x.shape))
        return i + 1, e * 2 + row, af.sum(f * 0.5 + rows, axis=0)

    return list(af.while_loop(lambda i, *_: i < n, body, (0, x, x)))


def _kept_by_a_variable(n: Any, x: Any) -> Any:
    v = af.Variable(np.zeros(x.shape, np.float32), name="v")

    def body(i: Any, y: Any) -> Any:
        z = y * 2 + 1
        with af.control_dependencies([v.assign(z)]):
            return i + 1, z * 0.5 + y

    _, y = af.while_loop(lambda i, _: i < n, body, (0, x))
    with af.control_dependencies([y]):
        return [y, v.read()]


def _kept_by_the_predicate(n: Any, x: Any) -> Any:
    """The predicate passes the loop variable to a user function that keeps it."""
    v = af.Variable(np.zeros(x.shape, np.float32), name="v")

    def condition(i: Any, y: Any) -> Any:
        with af.control_dependencies([af.cond(i < n, lambda: v.assign(y), v.read)]):
            return i + 0 < n + 1

    _, y = af.while_loop(condition, lambda i, y: (i + 1, af.tanh(y * 0.5 + 1)), (0, x))
    with af.control_dependencies([y]):
        return [y, v.read()]


def _passed_in_and_out(n: Any, x: Any) -> Any:
    def inner(j: Any, y: Any) -> Any:
        return j + 1, af.cond(af.sum(y) > 100, lambda: y - x, lambda: y + x + 1)

    def outer(i: Any, y: Any, z: Any) -> Any:
        y2 = y * 1.5
        _, w = af.while_loop(lambda j, _: j < i, inner, (0, y2))
        return i + 1, w, y2 + z

    return list(af.while_loop(lambda i, *_: i < n, outer, (0, x, x)))


def _untouched_start(n: Any, x: Any) -> Any:
    """The value before the loop is fetched too."""
    start = x * 2
    _, y = af.while_loop(lambda i, _: i < n, lambda i, y: (i + 1, af.tanh(y * 0.5 + start)), (0, start))
    return [start, y, start + y]


def _maybe_the_old(n: Any, x: Any) -> Any:
    """A branch that gives back the variable itself, or a new value."""

    def body(i: Any, y: Any, z: Any) -> Any:
        return i + 1, af.cond(i % 2 == 0, lambda: y * 2 + 1, lambda: y), y + z

    return list(af.while_loop(lambda i, *_: i < n, body, (0, x, x)))


def _growing(n: Any, x: Any) -> Any:
    """Shapes that differ in every iteration."""
    return list(
        af.while_loop(
            lambda i, _: i < n,
            lambda i, y: (i + 1, af.concat([y * 2 + 1, af.reshape(x, (-1,))])),
            (0, af.reshape(x, (-1,))),
            shape_invariants=((), (None,)),
        )
    )


def _changed(n: Any, x: Any) -> Any:
    """Rows that are written in place, twice in a step, or added to; their earlier values are fetched, too."""

    def body(i: Any, y: Any, z: Any, w: Any) -> Any:
        y = af.index_update(y, i % 2, x[1] * 2 + af.astype(i, "float32"))
        z = af.index_update(af.index_add(z, (slice(None), i % 2), 1.0), 0, af.sum(y, axis=0))
        return i + 1, y, z, af.index_add(w, 1, z[0] * 0.01)

    found = af.while_loop(lambda i, *_: i < n, body, (0, x, x, x * 2))
    return [x, *found]


def _changed_while_it_is_read(n: Any, x: Any) -> Any:
    """Rows that are read after the change: by nodes, by the written values, a TensorArray, another variable, and a
    predicate.
    """
    array = af.TensorArray("float32", 0, dynamic_size=True, element_shape=x.shape)

    def body(i: Any, a: Any, b: Any, c: Any, d: Any, e: Any, kept: Any) -> Any:
        a, before = af.index_update(a, 0, a[1] + 1), a
        b = af.index_update(b, slice(1, None), b[:-1])
        c = af.index_update(c, i % 2, b[0])
        e, d = af.index_update(d, 0, a[0]), af.index_update(e, 1, before[0] * 0.5)
        return i + 1, a, b, c, d, e, kept.write(i, c)

    def goes_on(i: Any, a: Any, b: Any, *_: Any) -> Any:
        return (i < n) & (af.sum(b[0]) < 1e9)

    *found, kept = af.while_loop(goes_on, body, (0, x, x, x, x, x * 2, array))
    view = af.while_loop(
        lambda i, *_: i < n,
        lambda i, y, _: (i + 1, z := af.index_update(y, 0, y[1] + 1), z[0]),
        (0, x, x[0]),
    )
    twice = af.while_loop(
        lambda i, *_: i < n,
        lambda i, y, same, seen: (i + 1, z := af.index_update(y, 0, y[1] + 1), z, seen + same),
        (0, x, x, x),
    )
    return [*found, kept.stack(), *view, *twice]


def _changed_in_an_inner_loop(n: Any, x: Any) -> Any:
    """The inner loop begins with a value that the outer one has kept, or with its own last result."""

    def inner(y: Any) -> Any:
        return af.while_loop(lambda j, _: j < 2, lambda j, y: (j + 1, af.index_add(y, j, 1.0)), (0, y))[1]

    def outer(i: Any, y: Any, z: Any, w: Any) -> Any:
        return i + 1, inner(y), y + z, inner(inner(w)) - y * 0.1

    return list(af.while_loop(lambda i, *_: i < n, outer, (0, x, x, x)))


BUFFERS = [
    _changed,
    _changed_while_it_is_read,
    _changed_in_an_inner_loop,
    _last_and_all,
    _views,
    _views_by_number,
    _kept_by_a_variable,
    _kept_by_the_predicate,
    _passed_in_and_out,
    _untouched_start,
    _maybe_the_old,
    _growing,
]


@pytest.mark.parametrize("trips", [0, 1, 2, 5])
@pytest.mark.parametrize("rows", [2, 40])
@pytest.mark.parametrize("program", BUFFERS)
async def test_no_buffer_is_written_that_is_still_read(
    graph: af.Graph, program: Callable[[Any, Any], Any], rows: int, trips: int
) -> None:
    """Every value is the same as without regions, although buffers are reused for speed; feeds are never written to."""
    n, x = af.placeholder("int64", ()), af.placeholder("float32", (rows, rows))
    fetches = program(n, x)
    fed = np.arange(rows * rows, dtype=np.float32).reshape(rows, rows) / 100
    before = fed.copy()
    first, second = await both_ways(graph, fetches, {n: trips, x: fed})
    assert_same_bits(first, second)
    assert_same_bits([fed], [before])


UNARY: list[Callable[[Any], Any]] = [
    af.tanh,
    af.negative,
    lambda a: a * 0.5 + 1,
    lambda a: a[::-1],
    lambda a: af.permute_dims(a, (1, 0)),
    lambda a: af.reshape(af.reshape(a, (-1,)), a.shape),
    lambda a: a - af.mean(a),
]
BINARY: list[Callable[[Any, Any], Any]] = [
    lambda a, b: a + b,
    lambda a, b: a - b,
    lambda a, b: af.tanh(a @ b * 0.01),
    af.maximum,
    lambda a, b: af.where(a > b, a, b * 0.25),
    lambda a, b: af.cond(af.sum(a) > 0, lambda: a - b, lambda: b),
    lambda a, b: af.while_loop(lambda j, _: j < 2, lambda j, c: (j + 1, af.tanh(c + b)), (0, a))[1],
]


def random_step(random: np.random.Generator) -> Callable[..., list[Any]]:
    """A body of three matrices: ten operations on values of its own, and any three of them as the next."""
    script = [(int(random.integers(14)), *map(int, random.integers(0, 3 + k, 2))) for k in range(10)]
    chosen = [int(k) for k in random.integers(0, 13, 3)]

    def step(*variables: Any) -> list[Any]:
        values = list(variables)
        for op, a, b in script:
            values.append(UNARY[op](values[a]) if op < 7 else BINARY[op - 7](values[a], values[b]))
        return [values[k] for k in chosen]

    return step


def random_changes(random: np.random.Generator) -> Callable[..., list[Any]]:
    """A body of three matrices, which gives back most of them changed in places, and reads them before and behind."""
    step = random_step(random)
    targets, chosen = random.integers(0, 3, 6), random.permutation(3) if random.random() < 0.3 else np.arange(3)
    places, reads = random.integers(0, 40, 6), random.integers(0, 6, 6)
    is_added = random.random(6) < 0.3

    def changing(i: Any, *variables: Any) -> list[Any]:
        values, others = list(variables), step(*variables)
        for target, place, read, adds in zip(targets, places, reads, is_added, strict=True):
            source = (*values, *others)[read]
            key = (i + place) % 40 if place % 2 else slice(place % 7, place % 7 + 3)
            part = source[1] if place % 2 else source[2:5]
            values[target] = (af.index_add if adds else af.index_update)(values[target], key, af.tanh(part))
        values[2] = values[2] if is_added[0] else others[0]
        return [values[k] for k in chosen]

    return changing


@pytest.mark.parametrize("seed", [*range(40), 1322, 1519])
async def test_random_bodies_that_change_places(graph: af.Graph, seed: int) -> None:
    random = np.random.default_rng(seed)
    step, n = random_changes(random), af.placeholder("int64", ())
    start = [af.placeholder("float32", (40, 40)) for _ in range(3)]
    fetches = af.while_loop(lambda i, *_: i < n, lambda i, *values: (i + 1, *step(i, *values)), (0, *start))
    feeds = {n: 5} | {x: random.normal(size=(40, 40)).astype(np.float32) for x in start}
    first, second = await both_ways(graph, [*fetches, *start], feeds)
    assert_same_bits(first, second)


def test_rows_of_a_loop_variable_are_written_in_place(graph: af.Graph) -> None:
    """Writing in place needs a variable that is not read any more: here not `z`, which is read behind its change."""
    x = af.placeholder("float32", (40, 40))

    def body(i: Any, y: Any, z: Any) -> Any:
        y = af.index_update(y, i, y[i] + 1)
        changed = af.index_update(z, i, y[0])
        return i + 1, y, changed, z - 1

    found = af.while_loop(lambda i, *_: i < 9, lambda i, y, z, _: body(i, y, z), (0, x, x, x))
    written = [line.split() for line in body_of(region_code(graph, found)).splitlines() if " = k_index_update" in line]
    assert [line[-1] for line in written] == ["own=own)", "var)"]


@pytest.mark.parametrize("ends", ["by itself", "with an error", "as it is closed"])
def test_what_a_loop_is_lent_is_written_to_unless_it_fails(graph: af.Graph, ends: str) -> None:
    """Then it is as it was: also where elements were written several times."""
    (x,) = apply(PLACEHOLDER, spec=af.spec("float32", (40, 40)), is_lent=True)
    step = af.placeholder("int64", ())

    def body(i: Any, y: Any) -> Any:
        return i + 1, af.index_add(af.index_update(y, 0, y[1] + 1), (i * step, slice(0, 30)), 2.0)

    fetches = af.while_loop(lambda i, _: i < 4, body, (0, x))
    lent = np.arange(1600, dtype=np.float32).reshape(40, 40)
    before, expected = lent.copy(), lent.copy()
    for i in range(4):
        expected[0] = expected[1] + 1
        expected[i, :30] += 2
    code = region_code(graph, fetches)
    by_place = [lent, np.int64(20 if ends == "with an error" else 1)]
    running = code.function(*(by_place[x.node.attrs["index"]] for x in region_of(graph, fetches).inputs))
    running.send(None)
    running.send(1)  # and two iterations are made
    assert not np.array_equal(lent, before)
    if ends == "as it is closed":
        running.close()
    else:
        with pytest.raises((StopIteration, IndexError)) as ended:
            while True:
                running.send(9)
        if isinstance(ended.value, StopIteration):
            assert ends == "by itself"
            assert ended.value.value[1] is lent
            assert_same_bits([lent], [expected])
            return
    assert_same_bits([lent], [before])


@pytest.mark.parametrize("seed", [*range(40), 1117, 1322, 1419])
async def test_random_bodies_with_buffers(graph: af.Graph, seed: int) -> None:
    """Any mix of views, branches and inner loops, over loop variables that change places.

    In the last seeds products read results of a transpose, whose last bits depend on its order in memory.
    """
    random = np.random.default_rng(seed)
    step, n = random_step(random), af.placeholder("int64", ())
    start = [af.placeholder("float32", (40, 40)) for _ in range(3)]
    fetches = af.while_loop(lambda i, *_: i < n, lambda i, *values: (i + 1, *step(*values)), (0, *start))
    feeds = {n: 5} | {x: random.normal(size=(40, 40)).astype(np.float32) for x in start}
    first, second = await both_ways(graph, [*fetches, *start], feeds)
    assert_same_bits(first, second)
    for limit in (1 << 30, 100_000):  # of the second no buffer is kept, but results are written over what has ended
        async with af.Session(graph, memory_limit=limit) as session:
            assert_same_bits(first, await session.run([*fetches, *start], feeds))


async def test_buffers_are_kept_and_counted_under_a_limit(graph: af.Graph) -> None:
    """Two take turns while the loop runs, and are gone behind it; the account sees each once."""
    x, w = af.placeholder("float32", (64, 64)), af.placeholder("float32", (64, 64))
    _, y = af.while_loop(lambda i, _: i < 50, lambda i, y: (i + 1, y @ w), (0, x))
    total = af.sum(af.sort(y))
    value = np.eye(64, dtype=np.float32)
    async with af.Session(graph, memory_limit=64 * value.nbytes) as session:
        code = session.plan(total, [x, w]).explain(source=True)
        written = r"(\w+) = k_matmul\(\w+, \w+, out=(buffer\w*)\)\n +if \1 is not \2:\n +\2 = \1\n +track\(\1, "
        assert len(re.findall(written, code)) == 1
        assert await session.run(total, {x: value, w: value}) == 64
        # Two feeds, and the two buffers, or the last of them and the sorted values.
        assert session.statistics().memory["cpu:0"].peak <= 4 * value.nbytes + 8192


async def test_buffers_that_would_be_much_of_a_limit_are_not_kept(graph: af.Graph) -> None:
    x = af.placeholder("float32", (64, 64))
    _, y = af.while_loop(lambda i, _: i < 50, lambda i, y: (i + 1, af.tanh(y + 1) * 2), (0, x))
    value = np.zeros((64, 64), np.float32)
    results = []
    for values in (64, 8):
        async with af.Session(graph, memory_limit=values * value.nbytes) as session:
            code = session.plan(y, [x]).explain(source=True)
            written = dict(re.findall(r"(\w+)(?: = \w+)? = \w+\(.*, out=(\w+)\)", code))
            if values == 64:
                assert written.keys() >= {"tanh", "multiply"}
                assert all(name.startswith("buffer") for name in written.values())
            else:  # only over values that end there, which takes nothing
                assert written == {"tanh": "add_1", "multiply": "tanh"}
            results.append(await session.run([y], {x: value}))
    assert_same_bits(*results)


@pytest.mark.parametrize("counts", [[], [5] * 4, [40, 40, 7, 7, 1, 0], [1, 3, 30, 30, 2]], ids=str)
@pytest.mark.parametrize("stop", [0, 1, 40])
async def test_buffers_of_as_many_rows_as_the_run_says(graph: af.Graph, counts: list[int], stop: int) -> None:
    """Buffers are reused if there are as many rows as before; other rows are broadcast, or get a buffer."""
    fed, x, w = (
        af.placeholder("int64", (None,)),
        af.placeholder("float32", (None, 48)),
        af.placeholder("float32", (48, 48)),
    )
    end = af.placeholder("int64", ())

    def body(i: Any, rows: Any, array: Any) -> Any:
        a = x[: fed[i]]
        b = af.tanh(a * 0.5 + x[0]) * (a - 1)
        c = af.concat([b[:, :16] * 2, -a[:, 16:]], axis=1) @ w
        d = af.cond(fed[i] == stop, lambda: (c + x[:end]) * 0.5, lambda: c * 2 - 1)
        return i + 1, af.tanh(d) * rows[:1] + 1, array.write(i, d * 3 + (x[:end] - c) * c)

    array = af.TensorArray("float32", af.size(fed), element_shape=(None, 48))
    start = af.placeholder("float32", (None, 48))
    n, last, array = af.while_loop(
        lambda i, *_: i < af.size(fed), body, (np.int64(0), start, array), shape_invariants=((), (None, 48), None)
    )
    random = np.random.default_rng(0)
    many, weights = random.standard_normal((40, 48), np.float32), random.standard_normal((48, 48), np.float32)
    feeds = {fed: counts, x: many, w: weights / 7, start: many[:3], end: 1}
    first, second = await both_ways(graph, [n, last, array.concat(), last * 2 + many[:1]], feeds)
    assert_same_bits(first, second)


async def test_results_of_one_run_are_not_written_by_the_next(graph: af.Graph) -> None:
    n, x = af.placeholder("int64", ()), af.placeholder("float32", (40, 40))
    _, y = af.while_loop(lambda i, _: i < n, lambda i, y: (i + 1, af.tanh(y + 1) * 2), (0, x))
    async with af.Session(graph) as session:
        first = await session.run(y, {n: 5, x: np.zeros((40, 40), np.float32)})
        kept = first.copy()
        await session.run(y, {n: 6, x: np.ones((40, 40), np.float32)})
    assert_same_bits([first], [kept])


# -- random numbers --------------------------------------------------------------------------------------------------


async def test_random_numbers_do_not_depend_on_regions() -> None:
    """Draws count by run, node and tag, and a region knows its tags."""
    with af.Graph(seed=3) as graph:

        def inner(j: Any, total: Any) -> Any:
            return j + 1, total + af.random.uniform((), dtype="float64") * af.random.normal((), dtype="float64")

        def outer(i: Any, total: Any) -> Any:
            _, total = af.while_loop(lambda j, _: j < i, inner, (0, total))
            return i + 1, af.cond(i % 2 == 0, lambda: total, lambda: total + af.random.uniform((), dtype="float64"))

        result = af.while_loop(lambda i, _: i < 6, outer, (0, np.float64(0.0)))
        fetches = [*result, af.random.normal((4,))]
    results = []
    for regions in (True, False):
        async with af.Session(graph, regions=regions) as session:
            results.append([await session.run(fetches) for _ in range(3)])
    for first, second in zip(*results, strict=True):
        assert_same_bits(first, second)
    assert results[0][0][1] != results[0][1][1], "every run draws new numbers"


async def test_random_numbers_in_a_region_inside_a_loop() -> None:
    """The tags of the loop around the region count too."""
    with af.Graph(seed=3) as graph:
        gate = Gate()
        gate.open()

        def inner(j: Any, total: Any) -> Any:
            return j + 1, total + af.random.uniform((), dtype="float64")

        def outer(i: Any, total: Any) -> Any:
            _, drawn = af.while_loop(lambda j, _: j < 3, inner, (0, np.float64(0.0)))
            return i + 1, total * 2 + gate(drawn)

        result = af.while_loop(lambda i, _: i < 4, outer, (0, np.float64(0.0)))
    first, second = await both_ways(graph, list(result))
    assert_same_bits(first, second)


# -- errors ----------------------------------------------------------------------------------------------------------


async def test_an_error_names_the_node_and_its_iteration(graph: af.Graph, regions: bool) -> None:
    """As without regions: node, op, tag, inputs and the user's line."""
    table = af.placeholder("int64", (3,), name="table")

    def inner(j: Any, total: Any) -> Any:
        line.append(inspect.currentframe().f_lineno + 1)  # type: ignore[union-attr]
        return j + 1, total + table[i_now[0] + j]

    def outer(i: Any, total: Any) -> Any:
        i_now[:] = [i]
        return i + 1, af.while_loop(lambda j, _: j < 2, inner, (0, total), parallel_iterations=1)[1]

    line: list[int] = []
    i_now: list[Any] = []
    result = af.while_loop(lambda i, _: i < 9, outer, (0, 0), parallel_iterations=1)
    async with af.Session(graph, regions=regions) as session:
        with pytest.raises(af.KernelError) as caught:
            await session.run(list(result), {table: [1, 2, 3]})
    error = caught.value
    assert isinstance(error.__cause__, IndexError)
    assert error.op == "getitem"
    assert error.node.startswith("while/body/while/body/")
    assert error.tag == "while/2/while/1"
    assert error.inputs == ("int64[3]", "int64[]")
    assert str(error.location).endswith(f"test_codegen.py:{line[0]}")
    assert error.device == "cpu:0"


async def test_an_error_in_a_predicate(graph: af.Graph, regions: bool) -> None:
    """The error names the iteration that would begin."""
    table = af.placeholder("bool", (3,), name="table")
    (count,) = af.while_loop(lambda i: table[i], lambda i: i + 1, (0,), name="loop")
    async with af.Session(graph, regions=regions) as session:
        with pytest.raises(af.KernelError) as caught:
            await session.run(count, {table: [True] * 3})
    assert (caught.value.op, caught.value.tag) == ("getitem", "loop/3")
    assert caught.value.inputs == ("bool[3]", "int64[]")


async def test_an_error_outside_loops_and_in_branches(graph: af.Graph, regions: bool) -> None:
    table, at = af.placeholder("int64", (3,), name="table"), af.placeholder("int64", (), name="at")
    picked = af.cond(at > 5, lambda: table[at] + 1, lambda: at * 2, name="pick")
    async with af.Session(graph, regions=regions) as session:
        with pytest.raises(af.KernelError) as caught:
            await session.run(picked * 2, {table: [1, 2, 3], at: 7})
        assert await session.run(picked * 2, {table: [1, 2, 3], at: 3}) == 12
    assert (caught.value.op, caught.value.tag) == ("getitem", "")
    assert caught.value.node.startswith("pick/true/")


async def test_an_error_in_a_region_inside_a_loop_that_waits(graph: af.Graph, regions: bool) -> None:
    """Tags of the interpreted loop come first."""
    gate = Gate()
    gate.open()
    table = af.placeholder("int64", (3,), name="table")

    def outer(i: Any) -> Any:
        (last,) = af.while_loop(lambda j: j <= i, lambda j: j + 1 + table[j] * 0, (0,), name="inner")
        return gate(last)

    (result,) = af.while_loop(lambda i: i < 9, outer, (0,), name="outer", parallel_iterations=1)
    async with af.Session(graph, regions=regions) as session:
        with pytest.raises(af.KernelError) as caught:
            await session.run(result, {table: [1, 2, 3]})
    assert (caught.value.op, caught.value.tag) == ("getitem", "outer/3/inner/3")


async def test_the_traceback_shows_the_generated_line(graph: af.Graph) -> None:
    table = af.placeholder("int64", (3,), name="table")
    (count,) = af.while_loop(lambda i: i < 9, lambda i: i + 1 + table[i] * 0, (0,), name="loop")
    code = region_code(graph, count)
    assert linecache.getlines(code.filename) == code.source.splitlines(keepends=True)
    async with af.Session(graph) as session:
        with pytest.raises(af.KernelError) as caught:
            await session.run(count, {table: [1, 2, 3]})
    shown = "".join(traceback.format_exception(caught.value.__cause__))
    assert 'File "<asyncflow region ' in shown
    assert "k_getitem(" in shown


def test_every_line_that_computes_has_its_place(graph: af.Graph) -> None:
    """The line of the source names the node it belongs to."""
    x = af.placeholder("int64", (), name="x")
    (count,) = af.while_loop(lambda i: i < x, lambda i: i + af.square(x), (0,), name="loop")
    code = region_code(graph, -count)
    lines = code.source.splitlines()
    named = {place.node.op.name: lines[number - 1].strip() for number, place in code.places.items()}
    assert named["less"] == "while var < feed:"
    assert named["square"].startswith("square = ")
    assert named["negative"] == "negative = -var"
    loops = {place.node.op.name: place.loops for place in code.places.values()}
    assert loops["square"] == (("loop", "loop_iteration"),)
    assert loops["negative"] == ()


@pytest.mark.parametrize("limit", [1, 2, 5])
async def test_max_iterations(graph: af.Graph, regions: bool, limit: int) -> None:
    """A loop of exactly as many passes; the next one is refused, by name and tag."""
    n = af.placeholder("int64", ())
    (count,) = af.while_loop(lambda i: i < n, lambda i: i + 1, (0,), name="bounded")
    async with af.Session(graph, regions=regions, max_iterations=limit) as session:
        assert await session.run(count, {n: limit}) == limit
        with pytest.raises(af.KernelError, match=f"loop bounded reached max_iterations={limit}"):
            await session.run(count, {n: limit + 1})


async def test_max_iterations_counts_each_activation(graph: af.Graph, regions: bool) -> None:
    """An inner loop may run as often in every iteration of the outer one."""

    def outer(i: Any, total: Any) -> Any:
        return i + 1, total + af.while_loop(lambda j: j < 5, lambda j: j + 1, (0,))[0]

    _, total = af.while_loop(lambda i, _: i < 5, outer, (0, 0))
    async with af.Session(graph, regions=regions, max_iterations=5) as session:
        assert await session.run(total) == 25


async def test_a_concatenation_writes_to_a_buffer(graph: af.Graph) -> None:
    x = af.placeholder("float32", (64, 64), name="x")

    def body(i: af.Tensor, y: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
        return i + 1, af.tanh(af.concat([y[:32] * 2, y[32:]]) @ x)

    _, y = af.while_loop(lambda i, y: i < 3, body, (np.int32(0), x))
    value = np.random.default_rng(0).standard_normal((64, 64), np.float32)
    async with af.Session(graph) as session:
        assert "k_concat(multiply, getitem_1, out=" in session.plan(y, [x]).explain(source=True)
        found = await session.run(y, {x: value})
    expected = value
    for _ in range(3):
        expected = np.tanh(np.concatenate([expected[:32] * 2, expected[32:]]) @ value)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("trips", [0, 1, 4])
@pytest.mark.parametrize("fetched", ["total", "both"])
async def test_the_last_iteration_leaves_out_what_a_further_one_would_read(
    graph: af.Graph, monkeypatch: pytest.MonkeyPatch, trips: int, fetched: str
) -> None:
    """The product that only a further iteration would read is left out, unless the variable is fetched."""
    random, multiplied, multiply = np.random.default_rng(0), [], np.matmul

    def counting(*operands: Any, **options: Any) -> Any:
        multiplied.append(1)
        return multiply(*operands, **options)

    monkeypatch.setattr(np, "matmul", counting)
    w = af.constant(random.standard_normal((256, 256)).astype("float32") / 16)
    n, start = af.placeholder("int64", ()), af.placeholder("float32", (None, 256))
    _, x, total = af.while_loop(
        lambda i, x, total: i < n,
        lambda i, x, total: (i + 1, af.tanh(x) @ w, total + af.sum(x * x)),
        (0, start, np.float32(0)),
        shape_invariants=((), (None, 256), ()),
    )
    feeds = {n: np.int64(trips), start: random.standard_normal((256, 256)).astype("float32")}
    found = []
    for regions in (True, False):
        async with af.Session(graph, regions=regions) as session:
            found.append(await session.run([total] if fetched == "total" else [total, x], feeds))
    assert_same_bits(*found)
    left_out = fetched == "total" and trips > 0
    assert len(multiplied) == 2 * trips - left_out
