"""`gradients` and `stop_gradient`: accepted arguments, messages of refusals, and Fault F6."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from contextvars import Context
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.compiler.optimize.simplify import simplify
from asyncflow.graph.values.dtypes import bfloat16

Run = Callable[..., Awaitable[Any]]

pytestmark = pytest.mark.usefixtures("graph")

HERE = re.escape(__file__)


# -- nests, weights, dtypes ------------------------------------------------------------------------------------------


async def test_nests_of_xs_and_ys(run: Run) -> None:
    """The result is a nest like xs, of tensors and variables alike."""
    a, v = af.constant(2.0), af.Variable(3.0)
    slopes = af.gradients({"p": a * v, "q": (a * a, v)}, {"a": a, "both": [v, a]})
    assert await run(slopes) == {"a": 7.0, "both": [3.0, 7.0]}


async def test_grad_ys_weigh(run: Run) -> None:
    """`grad_ys` has a weight for each y, a Python number or a list among them; None stands for ones."""
    x = af.constant([1.0, 2.0])
    slope = af.gradients([x * x, af.sum(x), x], x, grad_ys=[[10.0, 100.0], 0.5, None])
    assert (await run(slope)).tolist() == [21.5, 401.5]


async def test_a_tensor_as_grad_y(run: Run) -> None:
    """The tensor may be symbolic, and of a shape that only a run knows."""
    x, weight = af.constant([1.0, 2.0]), af.placeholder("float64")
    slope = af.gradients(x * x, x, grad_ys=weight)
    assert slope.shape == (2,)
    assert (await run(slope, {weight: [3.0, 4.0]})).tolist() == [6.0, 16.0]


async def test_x_is_y(run: Run) -> None:
    """The slope of a value by itself is 1, whatever else it depends on."""
    x = af.constant(3.0)
    y = x * x
    assert await run(af.gradients(y, [y, x])) == [1.0, 6.0]


async def test_an_x_given_twice(run: Run) -> None:
    """Each place gets the whole gradient."""
    x, v = af.constant(3.0), af.Variable(2.0)
    assert await run(af.gradients(x * v, [x, x, v, v])) == [2.0, 2.0, 3.0, 3.0]


def test_no_xs() -> None:
    """An empty nest has an empty nest of gradients."""
    assert af.gradients(af.constant(1.0), []) == []


async def test_bfloat16(run: Run) -> None:
    """Gradients, ones and zeros of bfloat16."""
    x, other = af.placeholder(bfloat16(), (2,)), af.placeholder(bfloat16(), (3,))
    slope, zeros = af.gradients(x * x, [x, other], unconnected="zero")
    found = await run([slope, zeros], {x: np.array([1.0, 2.0], bfloat16()), other: np.ones(3, bfloat16())})
    assert [value.dtype for value in found] == [bfloat16()] * 2
    assert [value.astype("float32").tolist() for value in found] == [[2.0, 4.0], [0.0, 0.0, 0.0]]


async def test_without_a_graph_being_built(run: Run) -> None:
    """The graph of ys is where the gradient goes."""
    x = af.constant(3.0)
    y = x * x
    nowhere = Context()
    slope = nowhere.run(af.gradients, y, x, 2.0)
    stopped = nowhere.run(af.stop_gradient, y)
    assert await run([slope, stopped]) == [12.0, 9.0]


def test_stopped_values_cost_nothing(graph: af.Graph) -> None:
    """The compiler leaves the node out."""
    x = af.placeholder("float64", ())
    y = af.stop_gradient(x * 2.0) + 1.0
    simplify(graph)
    assert [node.op.name for node in graph.nodes if node.op.name == "stop_gradient"] == []
    assert y.node.inputs[0].node.op.name == "multiply"


def test_stop_gradient_keeps_known_values() -> None:
    """dtype and shape, and it stands in the text form."""
    x = af.stop_gradient(af.placeholder("float32", (2, None)))
    assert (x.dtype, x.shape) == (np.dtype("float32"), (2, None))
    af.verify(af.parse_graph(af.print_graph(x.graph)))


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [3.0, "x", np.ones(2), object()])
def test_ys_and_xs_of_the_wrong_kind(wrong: Any) -> None:
    """Numbers and arrays are constants: nothing to differentiate, nor to differentiate by."""
    x = af.constant(1.0)
    with pytest.raises(af.GraphError, match=rf"gradients: xs are tensors and variables; got .*\n  written at {HERE}"):
        af.gradients(x, [x, wrong])
    with pytest.raises(af.GraphError, match="gradients: ys are tensors and variables; got"):
        af.gradients([x, wrong], x)
    with pytest.raises(af.GraphError, match="gradients: stop_gradients are tensors and variables; got"):
        af.gradients(x, x, stop_gradients=wrong)


def test_nodes_are_no_ys() -> None:
    """A group has no value."""
    x = af.constant(1.0)
    with pytest.raises(af.GraphError, match="gradients: ys are tensors and variables; got <Node group"):
        af.gradients(af.group(x), x)


def test_tensor_arrays_are_no_xs() -> None:
    """Only the elements of a TensorArray are xs."""
    array = af.TensorArray("float64", size=2, element_shape=()).write(0, 1.0)
    y = array.read(0)
    with pytest.raises(
        af.GraphError, match=r"xs are tensors and variables; .* is a TensorArray or RowStore: use the values read"
    ):
        af.gradients(y, array)
    with pytest.raises(af.GraphError, match=r"ys are tensors and variables; .* is a TensorArray"):
        af.gradients([y, array], y)


def test_no_ys() -> None:
    """There has to be something to differentiate."""
    with pytest.raises(af.GraphError, match="ys is empty"):
        af.gradients([], af.constant(1.0))


def test_unconnected_is_none_or_zero() -> None:
    """The argument has two values."""
    x = af.constant(1.0)
    wrong: Any = "zeros"
    with pytest.raises(af.GraphError, match="unconnected is 'none' or 'zero'; got 'zeros'"):
        af.gradients(x, x, unconnected=wrong)


def test_tensors_of_another_graph() -> None:
    """Tensors of another graph cannot be on the way."""
    x = af.constant(1.0)
    with af.Graph():
        other = af.constant(2.0)
    with pytest.raises(af.GraphError, match=r"gradients: xs: .*belongs to another graph"):
        af.gradients(x, other)
    with pytest.raises(af.GraphError, match=r"gradients: ys: .*belongs to another graph"):
        af.gradients(other, x)


def test_xs_inside_a_loop_asked_for_from_outside() -> None:
    """The message says what to do instead."""
    inside: list[Any] = []

    def body(i: Any, v: Any) -> Any:
        inside.append(v * 2.0)
        return i + 1, inside[0]

    r = af.while_loop(lambda i, v: i < 3, body, (0, 1.0))[1]
    message = (
        r"gradients: xs: <Tensor while/body/multiply:0 float64\[\]> was built inside while/body and is used in this "
        r"graph, .*\n  built at .*; or, to differentiate by what a loop starts with, pass that; or call gradients "
        rf"inside the function\n  written at {HERE}:"
    )
    with pytest.raises(af.GraphError, match=message):
        af.gradients(r, inside)
    with pytest.raises(af.GraphError, match=r"gradients: ys: .*was built inside while/body"):
        af.gradients(inside, r)


def test_xs_of_the_other_branch() -> None:
    """Branches do not see one another."""
    x = af.constant(1.0)
    inside: list[Any] = []

    def true_fn() -> Any:
        inside.append(x * 2.0)
        return inside[0]

    with pytest.raises(af.GraphError, match=r"gradients: xs: .*was built inside cond/true and is used in cond/false"):
        af.cond(x > 0.0, true_fn, lambda: af.gradients(x * x, inside[0]))


def test_grad_ys_that_do_not_fit() -> None:
    """In number and nest, dtype, and shape."""
    x = af.constant([1.0, 2.0])
    with pytest.raises(af.GraphError, match="grad_ys has one gradient for each of ys, in the same nest: expected a"):
        af.gradients([x, x], x, grad_ys=[x])
    with pytest.raises(af.GraphError, match="grad_ys has one gradient for each of ys"):
        af.gradients([x, x], x, grad_ys=(x, x))
    with pytest.raises(af.DTypeError, match=r"the grad_y of <Tensor constant:0 float64\[2\]> is .* one dtype"):
        af.gradients(x, x, grad_ys=af.constant([1, 2]))
    with pytest.raises(af.ShapeError, match=r"has shape \[3\]; it has that of its y"):
        af.gradients(x, x, grad_ys=[1.0, 2.0, 3.0])


@pytest.mark.parametrize("known", [(3,), (None,), None])
async def test_grad_ys_that_do_not_fit_in_the_run(run: Run, known: Any) -> None:
    """The run compares shapes that only it knows, and still refuses a grad_y that would broadcast."""
    x, weight = af.placeholder("float64", known), af.placeholder("float64", None if known == (3,) else known)
    slope = af.gradients(x * x, x, grad_ys=weight)
    values = np.arange(3.0)
    for wrong in (np.ones(1), np.ones(2)) if known == (None,) else (np.ones(1), np.ones((2, 3)), 1.0):
        with pytest.raises(
            af.KernelError, match=r"(?s)the grad_y of .* has shape .*; it is to have shape \[3\].*"
        ) as e:
            await run(slope, {x: values, weight: wrong})
        assert isinstance(e.value.__cause__, ValueError)
        assert re.search(HERE, str(e.value))
    assert (await run(slope, {x: values, weight: np.ones(3)})).tolist() == [0.0, 2.0, 4.0]


async def test_gradients_by_a_grad_y(run: Run) -> None:
    """A check of its shape is differentiated like everything else, also in a loop whose values change their shape."""
    x, weight = af.placeholder("float64", (None,)), af.placeholder("float64", (None,))

    def body(i: Any, total: Any) -> Any:
        part = x[:i]
        slope = af.gradients(part * part, part, grad_ys=weight[:i])
        return i + 1, total + af.sum(slope)

    _, y = af.while_loop(lambda i, _: i < 3, body, (1, 0.0))
    by_weight = af.gradients(y, weight)
    assert (await run(by_weight, {x: [1.0, 2.0, 3.0], weight: [1.0, 1.0, 1.0]})).tolist() == [4.0, 4.0, 0.0]


def test_an_op_without_a_derivative() -> None:
    """The message names the op and the node, says what to do, and where the node was built; not if nothing flows."""
    bare = af.op(outputs=af.spec("float64", ()), name="bare")(lambda x: x)
    x = af.constant(1.0)
    y = bare(x * 2.0)
    message = rf"bare has no derivative, .* flows through bare; cut it with af.stop_gradient, .*\n  built at {HERE}:"
    with pytest.raises(af.GraphError, match=message):
        af.gradients(y, x)
    assert af.gradients(af.stop_gradient(y), x) is None
    with pytest.raises(af.GraphError, match="bare has no derivative"):
        af.gradients(af.while_loop(lambda i, v: i < 2, lambda i, v: (i + 1, bare(v)), (0, x)), x)


# -- Fault F6 ------------------------------------------------------------------------------------------------------


def line_of(marker: str) -> int:
    with open(__file__, encoding="utf-8") as source:
        return next(number for number, line in enumerate(source, start=1) if line.rstrip().endswith(f"# {marker}"))


async def failure(graph: af.Graph, fetch: Any, feeds: Any, regions: bool) -> af.KernelError:
    async with af.Session(graph, check_numerics=True, regions=regions) as session:
        with pytest.raises(af.KernelError) as caught:
            await session.run(fetch, feeds)
    return caught.value


async def test_a_gradient_that_fails_names_the_forward_node(graph: af.Graph, regions: bool) -> None:
    """Fault F6: the slope of a square root at 0 is infinite: the error has the root's name and line."""
    x = af.placeholder("float64", ())
    root = af.sqrt(x)  # the root
    error = await failure(graph, af.gradients(root + 1.0, x), {x: 0.0}, regions)
    assert error.node.startswith("gradients/sqrt/")
    assert (error.location.file, error.location.line) == (__file__, line_of("the root"))


async def test_in_a_loop(graph: af.Graph, regions: bool) -> None:
    """Fault F6: in the gradient of a loop too, with the iteration."""
    x = af.placeholder("float64", ())

    def body(i: Any, v: Any) -> Any:
        w = af.sqrt(x)  # the root in the loop
        return i + 1, v + w

    y = af.while_loop(lambda i, v: i < 3, body, (0, 0.0))[1]
    error = await failure(graph, af.gradients(y, x), {x: 0.0}, regions)
    assert re.fullmatch(r"gradients/while/.*/gradients/while/body/sqrt/\w+", error.node)
    assert error.tag.endswith("while/0")
    assert (error.location.file, error.location.line) == (__file__, line_of("the root in the loop"))


async def test_what_a_users_gradient_has_built(graph: af.Graph, regions: bool) -> None:
    """Fault F6: an error in a user's own gradient names its line, and the node's name says which node is
    differentiated.
    """

    @af.custom_gradient
    def same(x: Any) -> Any:
        return x, lambda grad: grad / (x - x)  # the user's gradient

    x = af.placeholder("float64", ())
    error = await failure(graph, af.gradients(same(x), x), {x: 1.0}, regions)
    assert error.node.startswith("gradients/same/")
    assert (error.location.file, error.location.line) == (__file__, line_of("the user's gradient"))


def test_a_complex_y_needs_its_grad_y(graph: af.Graph) -> None:
    """A default of ones would be an arbitrary direction."""
    z = af.placeholder("complex64", (2,), name="z")
    with pytest.raises(af.GraphError, match=r"multiply:0 .* is complex.* grad_ys=, such as af(?s:.*)written at"):
        af.gradients(z * z, z)
    with pytest.raises(af.GraphError, match=r"grad_ys="):
        af.gradients([af.abs(z), z * z], z, grad_ys=[af.ones((2,), dtype="float32"), None])
    (found,) = af.gradients([z * z], [z], grad_ys=[np.ones(2, "complex64")])
    assert found.dtype == z.dtype


def test_a_gamma_of_a_constant_shape_parameter_stops_no_gradient() -> None:
    """The gradient flows although the number of draws depends on the differentiated value."""
    with af.Graph():
        x = af.placeholder("float64", (None,))
        (slope,) = af.gradients(af.sum(x * af.random.gamma((af.shape(x)[0],), alpha=2.0, seed=1)), [x])
        assert slope.shape == (None,)
        with pytest.raises(af.GraphError, match="random_gamma has no gradient with respect to alpha"):
            af.gradients(af.sum(af.random.gamma((3,), alpha=x[0], seed=2)), [x])
