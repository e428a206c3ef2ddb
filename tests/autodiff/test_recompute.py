"""`recompute`: pieces of programs whose inner values the gradient computes again."""

from __future__ import annotations

import tracemalloc
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.autodiff.pieces.recompute import BARRIER
from asyncflow.compiler.optimize.cse import eliminate_common_subexpressions
from asyncflow.testing import virtual_clock
from tests.conftest import small_cards

Run = Callable[..., Awaitable[Any]]
Marker = Callable[[Callable[..., Any]], Callable[..., Any]]
Program = Callable[[Marker], tuple[list[Any], dict[Any, Any]]]

VALUES = np.random.default_rng(0).standard_normal((4, 4)) / 4


def repeat(count: int, body: Callable[[Any], Any], start: Any) -> Any:
    return af.while_loop(lambda i, _: i < count, lambda i, x: (i + 1, body(x)), (0, start))[1]


def slopes(y: Any, *xs: Any, order: int = 2) -> list[Any]:
    """Return the gradients of all orders; each order differentiates the squares of the previous gradients."""
    found = [y]
    for _ in range(order):
        found += af.gradients(af.sum(af.square(found[-1])), list(xs), unconnected="zero")
    return found


def straight(mark: Marker) -> tuple[list[Any], dict[Any, Any]]:
    x, w = af.placeholder("float64", (4, 4)), af.placeholder("float64", (4, 4))
    f = mark(lambda x, w: af.tanh(af.sin(x @ w) * af.exp(x @ w)))
    return slopes(f(f(x, w), w), x, w), {x: VALUES, w: VALUES.T}


def in_loops_and_branches(mark: Marker) -> tuple[list[Any], dict[Any, Any]]:
    x, w = af.placeholder("float64", (4, 4)), af.placeholder("float64", (4, 4))
    f = mark(lambda a: af.sin(a @ w) * a)
    g = mark(lambda a: af.cond(af.sum(a) > 0, lambda: f(a), lambda: repeat(2, lambda b: af.tanh(b @ w + a), a)))
    return slopes(repeat(3, g, g(x)), x, w), {x: VALUES, w: VALUES.T}


def with_random_numbers(mark: Marker) -> tuple[list[Any], dict[Any, Any]]:
    """Drawn in the piece, in a piece in the piece, and in a loop in the piece."""
    x = af.placeholder("float64", (4, 4))
    inner = mark(lambda a: af.dropout(af.sin(a), 0.3, seed=5))
    outer = mark(lambda a: repeat(2, lambda b: af.sin(b + af.random.normal((4, 4), seed=3)), inner(inner(a))) * a)
    return slopes(repeat(3, outer, outer(x)), x), {x: VALUES}


def with_variables(mark: Marker) -> tuple[list[Any], dict[Any, Any]]:
    x, v = af.placeholder("float64", (4, 4)), af.Variable(VALUES.T, name="v")
    f = mark(lambda a: af.sin(a * v) + repeat(2, lambda b: af.sin(b) @ v, a))
    return slopes(repeat(3, f, x) + f(x), x, v), {x: VALUES}


def with_nests(mark: Marker) -> tuple[list[Any], dict[Any, Any]]:
    """A function with positional and keyword arguments, static ones, integers, and an argument that is returned as it
    is.
    """
    x = af.placeholder("float64", (4, 4))

    def fn(pair: Any, scale: float, *, rows: Any) -> Any:
        a, b = pair["a"], pair["b"]
        return {"c": af.sin(a * b)[rows] * scale, "a": a, "n": rows}

    found = mark(fn)({"a": x, "b": x * 2}, 3.0, rows=af.constant([0, 2]))
    return slopes(af.sum(found["c"], axis=0) + found["a"], x), {x: VALUES}


def of_rows(mark: Marker) -> tuple[list[Any], dict[Any, Any]]:
    """Lifted before the gradient is taken, and after."""
    x = af.placeholder("float64", (4, 4))
    f = mark(lambda a: af.sin(a + af.random.normal((4,), seed=3)) * af.sum(repeat(2, lambda b: af.sin(b) * a, a)))
    drawn = mark(lambda a: repeat(2, lambda b: af.sin(b + af.random.normal((4,), seed=3)), a))
    inside = af.vmap(lambda row: af.gradients(af.sum(f(row)), row))(x)
    mapped = af.map_fn(drawn, x)
    return [inside, *slopes(af.vmap(f)(x), x), *slopes(mapped, x, order=1)], {x: VALUES}


def softened(x: Any) -> Any:
    """The result needs `e`, and the gradient `t` as well, which is built for it alone."""

    @af.custom_gradient
    def fn(x: Any) -> Any:
        e = af.exp(x)
        t = af.tanh(e)
        return af.log(1 + e), lambda grad: grad * t * (1 - 1 / (1 + e))

    return fn(x)


def with_gradients_of_the_users(mark: Marker) -> tuple[list[Any], dict[Any, Any]]:
    """Gradients in the piece, a branch, a loop, and rows; of a function whose gradient calls one again."""
    x = af.placeholder("float64", (4, 4))
    sine = af.custom_gradient(lambda x: (af.sin(x), lambda grad: grad * cosine(x)))
    cosine = af.custom_gradient(lambda x: (af.cos(x), lambda grad: -grad * sine(x)))

    @af.custom_gradient
    def again(a: Any) -> Any:
        y = repeat(2, lambda b: af.sin(b) * a, a)
        return y, lambda grad: af.gradients(y, a, grad_ys=grad) * 2.0

    def piece(a: Any) -> Any:
        b = af.cond(af.sum(a) > -9.0, lambda: softened(a), lambda: a)
        c = again(a) * af.map_fn(sine, a, lift=False)
        return b * c

    return slopes(mark(piece)(x), x), {x: VALUES}


def passing_through(mark: Marker) -> tuple[list[Any], dict[Any, Any]]:
    """Arguments, captured values and variables, at the top, in a piece in the piece, and in a loop."""
    x, w, v = af.placeholder("float64", (4, 4)), af.placeholder("float64", (4, 4)), af.Variable(VALUES + 1, name="v")
    outside = af.exp(w)
    inner = mark(lambda a, b: (a, af.sin(b), outside))

    def piece(a: Any, b: Any) -> Any:
        a, c, d = inner(b, a)
        return a, c * b, v.read(), d

    def step(i: Any, a: Any, b: Any) -> Any:
        a, b, c, d = mark(piece)(a, b)
        return i + 1, a * c, b + d

    a, b = af.while_loop(lambda i, a, b: i < 2, step, (0, x, w))[1:]
    return slopes(af.sin(a) + b * mark(piece)(x, w)[2], x, w, v), {x: VALUES, w: VALUES.T}


PROGRAMS = [
    straight,
    in_loops_and_branches,
    with_random_numbers,
    with_variables,
    with_nests,
    of_rows,
    with_gradients_of_the_users,
    passing_through,
]


async def results(program: Program, mark: Marker, **options: Any) -> list[Any]:
    with af.Graph(seed=7) as graph:
        fetches, feeds = program(mark)
    async with af.Session(graph, debug=True, **options) as session:
        found: list[Any] = await session.run(fetches, feeds)
        return found


@pytest.mark.parametrize(
    ("program", "regions"),
    [*((program, True) for program in PROGRAMS), (in_loops_and_branches, False), (with_variables, False)],
)
async def test_gradients_are_the_same(program: Program, regions: bool) -> None:
    """Behaviour 68, for values computed again; random numbers are equal."""
    expected = await results(program, lambda fn: fn, regions=regions)
    found = await results(program, af.recompute, regions=regions)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-14)


@pytest.mark.slow
@pytest.mark.parametrize("program", [in_loops_and_branches, with_random_numbers])
def test_gradients_are_the_same_on_three_simulated_devices(program: Program) -> None:
    async def check() -> None:
        expected = await results(program, lambda fn: fn)
        found = await results(program, af.recompute, placement_seed=1)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-14)

    with virtual_clock("3 x v100, nvlink2") as clock:
        clock.run(check())


@pytest.mark.slow
@pytest.mark.parametrize("program", [in_loops_and_branches, with_random_numbers])
async def test_gradients_are_the_same_on_cards(program: Program) -> None:
    expected = await results(program, lambda fn: fn)
    with small_cards(0):
        found = await results(program, af.recompute, devices=["cuda:0"])
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-14)


async def test_inner_values_are_not_kept() -> None:
    """Of eight blocks of six values, the blocks' arguments, and the values of one block at a time."""
    value = np.ones((256, 256))

    def block(x: Any) -> Any:
        for _ in range(6):
            x = af.sin(x) * 1.01
        return x

    peaks = {}
    for mark in (lambda fn: fn, af.recompute):
        with af.Graph() as graph:
            x = y = af.placeholder("float64", (256, 256))
            for _ in range(8):
                y = mark(block)(y)
            slope = af.gradients(af.sum(y), x)
        async with af.Session(graph) as session:
            await session.run(slope, {x: value})
            tracemalloc.start()
            await session.run(slope, {x: value})
            peaks[mark is af.recompute] = tracemalloc.get_traced_memory()[1] / value.nbytes
            tracemalloc.stop()
    assert peaks[False] > 45
    assert peaks[True] < 20


async def test_a_loop_saves_the_arguments_alone(graph: af.Graph) -> None:
    """Also of pieces with gradients of the user's, at any depth; and nothing of what passes through."""
    x, w = af.placeholder("float32", (64, 64)), af.placeholder("float32", (64, 64))
    pieces = [
        lambda a: af.tanh(af.softmax(a @ w) @ w + a),
        lambda a: softened(a @ w) * a,
        lambda a: af.cond(af.sum(a) > 0, lambda: softened(a @ w) * a, lambda: a @ w),
    ]
    slopes = [af.gradients(repeat(3, af.recompute(each), x), w) for each in pieces]
    passing = af.recompute(lambda a, b: (a, af.tanh(b @ w)))
    loop = af.while_loop(lambda i, a, b: i < 3, lambda i, a, b: (i + 1, *passing(a * 2, b)), (0, x, x))
    slopes.append(af.gradients(loop[1:], [x, w]))
    async with af.Session(graph) as session:
        saved = [[each.value for each in session.plan(slope, [x, w]).saved] for slope in slopes]
    assert saved == [["while/body/var_1"], ["while_1/body/var_1"], ["while_2/body/var_1"], ["while_3/body/var_2"]]


def test_no_pass_takes_the_copy_for_the_piece(graph: af.Graph) -> None:
    x = af.placeholder("float64", ())
    slope = af.gradients(af.recompute(lambda a: af.sin(af.cos(a)))(x), x)
    eliminate_common_subexpressions(graph)
    ops = [node.op.name for node in graph.nodes]
    assert ops.count("barrier") == 1
    assert ops.count("cos") >= 3, "that of the program, of the copy, and of its derivative"
    assert slope.node.op is not BARRIER


async def test_functions_and_methods(run: Run) -> None:
    class Layer:
        scale = 3.0

        @af.recompute
        def apply(self, x: Any) -> Any:
            return af.square(x) * self.scale

    @af.function
    def loss(x: Any) -> Any:
        return Layer().apply(x)

    value, slope = await af.value_and_grad(loss)(2.0)
    assert (value, slope) == (12.0, 12.0)
    assert Layer.apply.__name__ == "apply"


async def test_the_text_of_a_graph_has_all_that_is_needed() -> None:
    with af.Graph() as graph:
        x = af.placeholder("float64", (), name="x")
        af.identity(af.recompute(lambda a: af.sin(a) * a)(x), name="y")
    parsed = af.parse_graph(af.print_graph(graph))
    with parsed:
        slope = af.gradients(parsed.tensor("y:0"), parsed.tensor("x:0"))
    async with af.Session(parsed) as session:
        assert await session.run(slope, {parsed.tensor("x:0"): 1.0}) == np.sin(1.0) + np.cos(1.0)


async def test_a_vertex_function_computes_again() -> None:
    """The state of a vertex is made of its child's; a batch of two chains."""
    values = np.random.default_rng(0).standard_normal((5, 4))
    found = []
    for mark in (lambda fn: fn, af.recompute):
        step = mark(lambda inputs, child: af.tanh(af.sin(inputs) * child + inputs))

        @af.vertex_function(state=af.spec("float64", (4,)), children=1)
        def cell(v: Any, step: Any = step) -> None:
            v.scatter(step(v.pull(), v.gather(0)))
            v.push(af.sum(v.gather(0)))

        with af.Graph(seed=7):
            x = af.placeholder("float64", (5, 4))
            mapped = af.vertex_map(cell, af.InputGraph.chain([3, 2]), x)
            slope = af.gradients(af.sum(mapped.pushes["y"]), x)
        async with af.Session() as session:
            found.append(await session.run([mapped.pushes["y"], slope], {x: values}))
    np.testing.assert_allclose(found[1][0], found[0][0], rtol=1e-12)
    np.testing.assert_allclose(found[1][1], found[0][1], rtol=1e-12)


def test_a_vertex_function_draws_in_front(graph: af.Graph) -> None:
    @af.vertex_function(state=af.spec("float64", (4,)), children=1)
    def cell(v: Any) -> None:
        v.scatter(af.recompute(lambda x: af.sin(x) * af.random.normal((4,)))(v.gather(0)))

    with pytest.raises(af.GraphError, match=r"cell draws random numbers inside of af.recompute"):
        af.vertex_map(cell, af.InputGraph.chain([3]), {})


# -- what is refused --------------------------------------------------------------------------------------------------


def test_a_user_op_has_to_be_declared_pure(graph: af.Graph) -> None:
    x = af.placeholder("float64", ())
    calls: list[float] = []

    def body(v: Any) -> Any:
        calls.append(float(v))
        return np.sin(v)

    options: Any = {"outputs": af.spec("float64", ()), "gradient": lambda inputs, outputs, grad: grad * af.cos(*inputs)}
    impure = af.op(name="impure", **options)(body)
    with pytest.raises(
        af.GraphError, match=r"uses impure \(impure\), which would run twice; .*pure=True.*\n.*test_recomp"
    ):
        af.recompute(lambda a: impure(a) * 2)(x)
    pure = af.op(name="declared_pure", pure=True, **options)(body)
    assert af.gradients(af.recompute(lambda a: af.square(pure(a)))(x), x) is not None


def test_effects_are_never_run_twice(graph: af.Graph) -> None:
    x, v = af.placeholder("float64", ()), af.Variable(1.0, name="v")
    with pytest.raises(af.GraphError, match=r"v/assign_add .*would run twice; take it out of the function"):
        af.recompute(lambda a: a * v.assign_add(a))(x)
    with pytest.raises(af.GraphError, match="would run twice"):
        af.recompute(lambda a: repeat(2, lambda b: b * v.assign_add(b), a))(x)

    def beside(a: Any) -> Any:
        v.assign_add(1.0)
        return af.sin(a)

    af.gradients(af.recompute(beside)(x), x)
    writes = [node for node in graph.walk() if node.op.name == "variable_assign_add" and node.graph is graph]
    assert len(writes) == 2, "that of the first call, which failed, and this one: no gradient has another"


def test_a_variable_that_has_changed_is_not_read_again(graph: af.Graph) -> None:
    x, v = af.placeholder("float64", ()), af.Variable(1.0, name="v")
    y = af.recompute(lambda a: af.cond(a > 0, lambda: a * v, lambda: a))(x)
    af.gradients(y, x)
    v.assign(2.0)
    with pytest.raises(af.GraphError, match=r"reads Variable.*in a branch or loop.* v/assign changes the variable"):
        af.gradients(y, x)


def test_what_a_gradient_of_the_users_loses_is_refused(graph: af.Graph) -> None:
    """As outside of pieces: a captured tensor is no argument."""
    x, w = af.placeholder("float64", ()), af.placeholder("float64", ())
    product = af.custom_gradient(lambda x: (x * w, lambda grad: grad * w))
    y = af.recompute(lambda a: product(a) * a)(x)
    af.gradients(y, x)
    with pytest.raises(af.GraphError, match=r"which is not one of its arguments, and a gradient is asked for that"):
        af.gradients(y, [x, w])


def test_a_gradient_of_the_users_is_built_where_one_flows(graph: af.Graph) -> None:
    def broken(grad: Any) -> Any:
        raise RuntimeError("no gradient of this")

    x = af.placeholder("float64", ())
    unwanted = af.custom_gradient(lambda x: (af.sin(x), broken))
    y, z = af.recompute(lambda a: (unwanted(a), a * a))(x)
    assert af.gradients(z, x) is not None
    with pytest.raises(RuntimeError, match="no gradient of this"):
        af.gradients(y, x)


def test_arrays_and_inner_values(graph: af.Graph) -> None:
    x = af.placeholder("float64", (3,))
    inner: list[Any] = []

    def leaking(a: Any) -> Any:
        inner.append(af.sin(a))
        return inner[0] * 2

    y = af.recompute(leaking)(x)
    with pytest.raises(af.GraphError, match="inside of a function whose values are computed again"):
        af.gradients(y, inner[0])
    with pytest.raises(af.GraphError, match="is a TensorArray or RowStore"):
        af.recompute(lambda a: af.TensorArray("float64", size=3).unstack(a))(x)
    with pytest.raises(af.GraphError, match="recompute takes a function; got 3"):
        af.recompute(3)  # type: ignore[arg-type]
    with pytest.raises(af.GraphError, match="is pure=True and has effects"):
        af.op(outputs=af.spec("float64", ()), pure=True, stateful=True)(lambda: 1.0)
