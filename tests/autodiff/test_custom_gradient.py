"""`custom_gradient` and `@op(gradient=...)`: gradients that users write."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.compiler.optimize.simplify import simplify

Run = Callable[..., Awaitable[Any]]

pytestmark = pytest.mark.usefixtures("graph")

SCALAR = af.spec("float64", ())


# -- custom_gradient -------------------------------------------------------------------------------------------------


async def test_nests_in_and_out(run: Run) -> None:
    """Arguments and results are nests; grad_fn takes and gives nests like them."""
    seen: list[Any] = []

    @af.custom_gradient
    def mix(pair: Any, z: Any, *, factor: float) -> Any:
        def grad_fn(first: Any, rest: Any) -> Any:
            seen.append((first, rest))
            return {"a": first * 10.0, "b": rest["w"]}, first * factor

        return (pair["a"] + z, {"w": pair["b"] * 1.0}), grad_fn

    a, b, z = af.constant(1.0), af.constant([1.0, 2.0]), af.constant(5.0)
    first, rest = mix({"a": a, "b": b}, z, factor=7.0)
    assert mix.__name__ == "mix"
    found = await run([first, rest, af.gradients([first, rest["w"] * 3.0], [a, b, z])])
    assert found[0] == 6.0
    assert [grad.tolist() for grad in found[2]] == [10.0, [3.0, 3.0], 7.0]
    assert [type(part) for part in seen[0]] == [af.Tensor, dict]


async def test_what_grad_fn_gets_where_nothing_arrives(run: Run) -> None:
    """Zeros of the result's shape; None for an integer."""
    seen: list[Any] = []

    @af.custom_gradient
    def three(x: Any) -> Any:
        def grad_fn(used: Any, unused: Any, whole: Any) -> Any:
            seen.append(whole)
            return used + af.sum(unused)

        return (x, af.stack([x, x, x]), af.astype(x, "int64")), grad_fn

    x = af.constant(2.0)
    assert await run(af.gradients(three(x)[0], x)) == 1.0
    assert seen == [None]


async def test_the_gradient_of_a_single_argument(run: Run) -> None:
    """As it is, or alone in a tuple; so for a nest, which may be a tuple itself."""
    x, w = af.constant(1.0), af.constant(2.0)
    for grad_fn in (lambda grad: grad, lambda grad: (grad,), lambda grad: [grad]):
        custom = af.custom_gradient(lambda x, grad_fn=grad_fn: (x * 2.0, grad_fn))
        assert await run(af.gradients(custom(x), x)) == 1.0
    for nested in (lambda grad: (grad, None), lambda grad: ((grad, None),)):
        custom = af.custom_gradient(lambda pair, grad_fn=nested: (pair[0] * pair[1], grad_fn))
        assert await run(af.gradients(custom((x, w)), [x, w], unconnected="zero")) == [1.0, 0.0]


async def test_none_where_nothing_flows(run: Run) -> None:
    """For an argument, for all of them, and for a leaf of one."""
    x, y = af.constant(2.0), af.constant(3.0)
    first = af.custom_gradient(lambda x, y: (x * y, lambda grad: (grad, None)))
    assert await run(af.gradients(first(x, y), [x, y])) == [1.0, 0.0]
    nothing = af.custom_gradient(lambda x: (x * 1.0, lambda grad: None))
    assert await run(af.gradients(nothing(x), x)) == 0.0
    leaf = af.custom_gradient(lambda p: (p[0] * p[1], lambda grad: (None, grad)))
    assert await run(af.gradients(leaf((x, y)), [x, y])) == [0.0, 1.0]


async def test_numbers_and_variables_as_arguments(run: Run) -> None:
    """A variable is read at the call; the gradient of it is what grad_fn gives."""
    product = af.custom_gradient(lambda x, w: (x * w, lambda grad: (grad * 100.0, grad * 1000.0)))
    v = af.Variable(2.0)
    y = product(3.0, v)
    assert await run([y, af.gradients(y, v)]) == [6.0, 1000.0]


async def test_straight_through(run: Run) -> None:
    """Gradients pass an op that has none, and each use of the function counts."""
    rounded = af.custom_gradient(lambda x: (af.round(x), lambda grad: grad))
    x = af.constant([0.4, 1.6])
    y = rounded(x)
    slope = af.gradients(y * rounded(y), x)
    assert (await run(slope)).tolist() == [0.0, 4.0]


async def test_one_inside_another(run: Run) -> None:
    """The outer function's gradient replaces the inner one."""
    inner = af.custom_gradient(lambda x: (x * 2.0, lambda grad: grad * 5.0))
    outer = af.custom_gradient(lambda x: (inner(x) + 1.0, lambda grad: grad * 7.0))
    x = af.constant(1.0)
    assert await run([af.gradients(inner(x), x), af.gradients(outer(x), x)]) == [5.0, 7.0]


async def test_gradients_inside_grad_fn(run: Run) -> None:
    """grad_fn may differentiate for itself: here it doubles the true slope, in a loop."""

    @af.custom_gradient
    def cube(x: Any) -> Any:
        y = x * x * x
        return y, lambda grad: af.gradients(y, x, grad_ys=grad) * 2.0

    x = af.constant(1.1)
    y = af.while_loop(lambda i, v: i < 2, lambda i, v: (i + 1, cube(v)), (0, x))[1]
    assert await run([af.gradients(cube(x), x), af.gradients(y, x)]) == pytest.approx([6 * 1.1**2, 4 * 9 * 1.1**8])


async def test_arguments_that_depend_on_one_another(run: Run) -> None:
    """In grad_fn the gradient by one is not that by another too: f(v, v*x) = v * v*x, in a branch in a loop as well."""

    @af.custom_gradient
    def product(a: Any, b: Any) -> Any:
        y = a * b
        return y, lambda grad: tuple(af.gradients(y, [a, b], grad_ys=grad))

    v, x = af.constant(3.0), af.constant(5.0)
    r = af.while_loop(
        lambda i, u: i < 1, lambda i, u: (i + 1, af.cond(i < 1, lambda: product(u, u * x), lambda: u)), (0, v)
    )[1]
    assert await run([af.gradients(product(v, v * x), [v, x]), af.gradients(r, [v, x])]) == [[30.0, 9.0]] * 2
    assert await run(af.gradients(product(v, v), v)) == 6.0


async def test_in_a_function(run: Run) -> None:
    """Also where an `@af.function` is awaited."""
    clipped = af.custom_gradient(lambda x: (x, lambda grad: af.clip(grad, -1.0, 1.0)))

    @af.function
    def slope(x: Any) -> Any:
        return af.gradients(clipped(x) ** 3, x)

    with af.Graph():
        pass
    assert await run(slope(af.constant(2.0))) == 1.0


async def test_captured_values_are_constants(run: Run) -> None:
    """A tensor from outside may be used, if no gradient is asked for that would flow there, or if it is stopped."""
    w, x = af.constant(3.0), af.constant(2.0)
    product = af.custom_gradient(lambda x: (x * w, lambda grad: grad * w))
    assert await run(af.gradients(product(x), x)) == 3.0
    stopped = af.custom_gradient(lambda x: (x * af.stop_gradient(w), lambda grad: grad * w))
    assert await run(af.gradients(stopped(x) + w, [x, w])) == [3.0, 1.0]


def test_gradients_into_captured_values_are_refused() -> None:
    """Of a tensor from outside, and of variables read in the function or in a loop of it; in loop bodies too."""
    w, v, x = af.constant(3.0), af.Variable(3.0), af.constant(2.0)
    product = af.custom_gradient(lambda x: (x * (w * 2.0), lambda grad: grad))
    with pytest.raises(af.GraphError, match=r"<lambda> uses <Tensor constant:0 .*>, which is not one of its arg"):
        af.gradients(product(x), w)
    in_loop = af.while_loop(lambda i, y: i < 2, lambda i, y: (i + 1, product(y)), (0, x))[1]
    with pytest.raises(af.GraphError, match=r"uses <Tensor while/body/capture_constant:0 .* pass it as an argument"):
        af.gradients(in_loop, [x, w])
    reads = af.custom_gradient(lambda x: (x * v, lambda grad: grad))
    with pytest.raises(
        af.GraphError, match=r"uses Variable\(.*which is not one of its arguments.*let grad_fn take variables="
    ):
        af.gradients(reads(x), v)

    def read_in_loop(x: Any) -> Any:
        return af.while_loop(lambda i, y: i < 2, lambda i, y: (i + 1, y * v), (0, x))[1], lambda grad: grad

    y = af.custom_gradient(read_in_loop)(x)
    with pytest.raises(af.GraphError, match=r"read_in_loop uses Variable\('.*'\), which is not one of its arguments"):
        af.gradients(y, v)


# -- variables that the function reads -------------------------------------------------------------------------------


async def test_gradients_for_variables(run: Run) -> None:
    """The function returns a gradient for each variable that its results depend on. The order is that of their reads,
    also in branches and loops.
    """
    v, w, unused = af.Variable(3.0, name="v"), af.Variable(5.0, name="w"), af.Variable(7.0, name="unused")
    given: list[Any] = []

    @af.custom_gradient
    def product(x: Any) -> Any:
        af.identity(unused)
        read = v.read()
        y = af.while_loop(lambda i, y: i < 2, lambda i, y: (i + 1, y * w), (0, x * read))[1]

        def grad_fn(grad: Any, variables: Any = None) -> Any:
            given.append(variables)
            return grad * 10.0, [grad * read, None if len(given) > 1 else grad * 1000.0]

        return y, grad_fn

    x = af.constant(2.0)
    y = product(x)
    slopes = af.gradients(y * 2.0, [x, v, w])
    assert await run([y, slopes, af.gradients(slopes[1], v)]) == [150.0, [20.0, 6.0, 2000.0], 2.0]
    assert given == [[v, w]]
    assert await run(af.gradients(y, [w, unused], unconnected="zero")) == [0.0, 0.0]


@pytest.mark.parametrize("mark", [lambda fn: fn, af.recompute])
async def test_gradients_for_variables_in_bodies(run: Run, mark: Any) -> None:
    """In loops and branches, over rows, which share a variable, and in what runs again."""
    v = af.Variable([3.0, 4.0], name="v")

    @af.custom_gradient
    def product(x: Any) -> Any:
        read = af.sin(v)
        return x * read, lambda grad, variables: (grad * read, [grad * x * 100.0])

    x = af.constant([[1.0, 2.0], [5.0, 6.0], [7.0, 8.0]])
    rows = mark(af.vmap(lambda row: af.cond(row[0] > 4.0, lambda: product(row), lambda: row)))(x)
    looped = af.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, mark(product)(y)), (0, x[0]))[1]
    found = await run([af.gradients(rows, v), *af.gradients(looped, [x, v])])
    np.testing.assert_array_equal(found[0], [1200.0, 1400.0])
    s = np.sin([3.0, 4.0])
    np.testing.assert_allclose(found[1], [[*s**3], [0, 0], [0, 0]])
    np.testing.assert_allclose(found[2], 300 * s**2 * [1.0, 2.0])


def test_gradients_for_variables_that_do_not_fit() -> None:
    """The message says what to return; variables that are not read leave everything as it is."""
    v, x = af.Variable(3.0), af.constant(1.0)
    lone = af.custom_gradient(lambda x: (x * v, lambda grad, variables=None: grad))
    with pytest.raises(af.GraphError, match=r"takes variables=, so it is to return .*\(grads, variable_grads\)"):
        af.gradients(lone(x), x)
    many = af.custom_gradient(lambda x: (x * v, lambda grad, variables=None: (grad, [grad, grad])))
    with pytest.raises(af.GraphError, match=r"for variables, returns one gradient for each of 1 arg"):
        af.gradients(many(x), v)
    none = af.custom_gradient(lambda x: (x * 2.0, lambda grad, variables=None: grad * 3.0))
    assert af.gradients(none(x), x) is not None


@pytest.mark.parametrize("returned", [None, 1.0, (1.0,), (1.0, 2.0), (1.0, 2.0, 3.0)])
def test_functions_return_a_pair(returned: Any) -> None:
    """Results and the function for their gradients."""
    with pytest.raises(af.GraphError, match=r"is to return its results and the function .* it returned"):
        af.custom_gradient(lambda x: returned)(af.constant(1.0))


def test_what_else_is_refused() -> None:
    """Things that are no functions, coroutine functions, TensorArrays, no results."""
    wrong: Any = 3

    async def coroutine(x: Any) -> Any:
        return x

    with pytest.raises(af.GraphError, match="custom_gradient takes a function; got 3"):
        af.custom_gradient(wrong)
    with pytest.raises(af.GraphError, match="is a coroutine function"):
        af.custom_gradient(coroutine)
    with pytest.raises(af.GraphError, match="is a TensorArray"):
        af.custom_gradient(lambda a: (a, lambda grad: grad))(af.TensorArray("float64", size=1))
    with pytest.raises(af.GraphError, match="returned no tensors"):
        af.custom_gradient(lambda a: ((), lambda: 0.0))(1.0)


WRONG_GRADIENTS: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "too few": (lambda grad: grad, af.GraphError, "returns one gradient for each of 2 arguments, in a tuple; it retu"),
    "too many": (lambda grad: (grad, grad, grad), af.GraphError, "it returned 3 values"),
    "dtype": (lambda grad: (af.astype(grad, "float32"), None), af.DTypeError, "which needs dtype float64"),
    "shape": (lambda grad: (grad, af.stack([grad, grad])), af.ShapeError, r"it is to have shape \[\]"),
}


@pytest.mark.parametrize("wrong", WRONG_GRADIENTS)
def test_gradients_that_do_not_fit(wrong: str) -> None:
    """Gradients of the wrong number, dtype or shape are refused, of custom_gradient and of ops; the message names the
    function.
    """
    grad_fn, kind, message = WRONG_GRADIENTS[wrong]
    x, y = af.constant(1.0), af.constant(2.0)
    custom = af.custom_gradient(lambda x, y: (x * y, grad_fn))
    of_op = af.op(outputs=SCALAR, name="product", gradient=lambda xs, out, grad: grad_fn(grad))(lambda x, y: x * y)
    with pytest.raises(kind, match=f"(?s)grad_fn of .*<lambda> .*{message}.*differentiates custom_gradient, built at"):
        af.gradients(custom(x, y), [x, y])
    with pytest.raises(kind, match=f"(?s)the gradient of @op product .*{message}.*differentiates product, built at"):
        af.gradients(of_op(x, y), [x, y])


async def test_gradients_whose_shape_only_a_run_knows(run: Run) -> None:
    """Shapes are compared in the run, and not broadcast; for custom_gradient and ops alike."""

    def grad_fn(grad: Any) -> Any:
        return grad[:1]

    x, vector = af.placeholder("float64", (None,)), af.spec("float64", (None,))
    custom = af.custom_gradient(lambda x: (x * 2.0, grad_fn))
    of_op = af.op(outputs=vector, name="double", gradient=lambda xs, out, grad: grad_fn(grad))(lambda x: x * 2.0)
    for slope, what in (
        (af.gradients(custom(x), x), "grad_fn of .*<lambda> returned as the gradient of"),
        (af.gradients(of_op(x), x), "the gradient of @op double returned as the gradient of"),
    ):
        assert (await run(slope, {x: [3.0]})).tolist() == [1.0]
        with pytest.raises(af.KernelError, match=rf"what {what} .* has shape \[1\]; it is to have shape \[2\]"):
            await run(slope, {x: [3.0, 4.0]})


def test_a_gradient_of_another_nest() -> None:
    """The message says which argument."""
    custom = af.custom_gradient(lambda x, p: (x * p["w"], lambda grad: (grad, [grad])))
    x, w = af.constant(1.0), af.constant(2.0)
    with pytest.raises(af.GraphError, match="no nest like argument 1: expected a dict with keys 'w', got a list"):
        af.gradients(custom(x, {"w": w}), [x, w])


def test_the_text_form(graph: af.Graph) -> None:
    """The text round-trips, in bodies too; only the function is not in it."""
    custom = af.custom_gradient(lambda x: (x * 2.0, lambda grad: grad))
    x = af.constant(1.0, name="x")
    y = custom(x)
    af.while_loop(lambda v: v < 100.0, custom, y)
    af.verify(graph)
    text = af.print_graph(graph)
    parsed = af.parse_graph(text)
    af.verify(parsed)
    assert af.print_graph(parsed) == text
    with parsed, pytest.raises(af.GraphError, match="the graph was read from text, which cannot contain functions"):
        af.gradients(parsed.tensor("custom_gradient:0"), parsed.tensor("x:0"))


def test_the_compiler_leaves_the_node_out(graph: af.Graph) -> None:
    """Only the nodes that the function has built are left."""
    custom = af.custom_gradient(lambda x: ((x * 2.0, x), lambda *grads: grads[0]))
    doubled, same = custom(af.placeholder("float64", ()))
    total = doubled + same
    simplify(graph)
    assert "custom_gradient" not in {node.op.name for node in graph.nodes}
    assert [x.node.op.name for x in total.node.inputs] == ["multiply", "placeholder"]


# -- ops -------------------------------------------------------------------------------------------------------------


async def test_an_ops_gradient(run: Run) -> None:
    """The gradient function gets inputs, outputs and their gradients as tensors, and the static arguments that it
    names.
    """
    seen: list[Any] = []

    def gradient(inputs: Any, outputs: Any, grads: Any, *, n: int) -> Any:
        seen.append((len(inputs), sorted(outputs), grads["whole"], n))
        (x,) = inputs
        return grads["power"] * n * outputs["power"] / x

    @af.op(outputs={"power": SCALAR, "whole": af.spec("int64", ())}, gradient=gradient)
    def power(x: Any, *, n: int, unused: str = "") -> Any:
        return {"power": x**n, "whole": np.int64(x)}

    x = af.constant(2.0)
    assert await run(af.gradients(power(x, n=3, unused="no")["power"], x)) == 12.0
    assert seen == [(1, ["power", "whole"], None, 3)]


async def test_an_ops_gradient_made_of_the_op(run: Run) -> None:
    """To any order."""

    def gradient(inputs: Any, output: Any, grad: Any, *, quarters: int = 0) -> Any:
        return grad * wave(inputs[0], quarters=quarters + 1)

    @af.op(outputs=SCALAR, gradient=gradient)
    def wave(x: Any, *, quarters: int = 0) -> Any:
        return np.sin(x + quarters * np.pi / 2)

    x = af.constant(0.5)
    first = af.gradients(wave(x), x)
    assert await run([first, af.gradients(first, x)]) == pytest.approx([np.cos(0.5), -np.sin(0.5)])


async def test_a_coroutine_ops_gradient(run: Run) -> None:
    """An async op is differentiated like another."""

    @af.op(outputs=SCALAR, gradient=lambda xs, y, grad: (grad * xs[1], grad * xs[0]))
    async def product(x: Any, w: Any) -> Any:
        return x * w

    x, w = af.constant(2.0), af.constant(3.0)
    assert await run(af.gradients(product(x, w), [x, w])) == [3.0, 2.0]


async def test_an_op_of_integers(run: Run) -> None:
    """Gradients for integer inputs are dropped, whatever the function returns."""
    scaled = af.op(outputs=SCALAR, name="scaled", gradient=lambda xs, y, grad: (grad * 2.0, grad))(lambda x, n: x * n)
    x, n = af.constant(2.0), af.constant(3)
    assert af.gradients(scaled(x, n), n) is None
    assert await run(af.gradients(scaled(x, n), x)) == 2.0


async def test_a_method_has_a_gradient_of_its_own() -> None:
    class Scaled:
        def __init__(self, by: float) -> None:
            self.by = by

        @af.custom_gradient
        def __call__(self, x: af.Tensor) -> Any:
            return x * self.by, lambda grad: grad * 7.0

        @staticmethod
        @af.custom_gradient
        def static(x: af.Tensor) -> Any:
            return x, lambda grad: grad * 5.0

    with af.Graph() as graph:
        x = af.placeholder("float64", ())
        y, z = Scaled(3.0)(x), Scaled.static(x)
        fetches = y, af.gradients(y, x), af.gradients(z, x)
    async with af.Session(graph) as session:
        assert await session.run(fetches, {x: 2.0}) == (6.0, 7.0, 5.0)
