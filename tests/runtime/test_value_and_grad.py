"""`value_and_grad`: of functions that build graphs, and of awaited functions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import asyncflow as af

Run = Callable[..., Awaitable[Any]]


def loss(weights: Any, x: Any) -> Any:
    """The sum of ``(w x + b) ** 2``."""
    return af.sum((weights["w"] * x + weights["b"]) ** 2)


async def test_of_a_function_that_builds(run: Run, graph: af.Graph) -> None:
    """In a graph: value and a nest of gradients like the argument."""
    value, grads = af.value_and_grad(loss)({"w": af.constant(2.0), "b": 1.0}, [3.0, 4.0])
    assert await run((value, grads)) == (130.0, {"w": 2 * (7 * 3 + 9 * 4), "b": 32.0})


async def test_of_a_function_that_is_awaited() -> None:
    """The result is a function of the same kind; called again with the same kind of arguments, it is not traced
    again.
    """
    calls: list[None] = []

    @af.value_and_grad
    @af.function
    def traced(weights: Any, x: Any) -> Any:
        calls.append(None)
        return loss(weights, x)

    assert isinstance(traced, af.Function)
    for w in (2.0, 0.0):
        value, grads = await traced({"w": w, "b": 1.0}, np.array([3.0, 4.0]))
        assert value == (3 * w + 1) ** 2 + (4 * w + 1) ** 2
        assert grads == {"w": 2 * ((3 * w + 1) * 3 + (4 * w + 1) * 4), "b": 2 * (7 * w + 2)}
    assert len(calls) == 1


async def test_the_original_stays() -> None:
    """The original function still gives its value alone."""
    square = af.function(lambda x: x * x)
    assert await af.value_and_grad(square)(3.0) == (9.0, 6.0)
    assert await square(3.0) == 9.0


async def test_annotations_hold() -> None:
    """A list for a parameter that is described as one array; a static number."""

    @af.function
    def power(x: af.spec("float32", (None,)), n: int) -> Any:  # type: ignore[valid-type]
        return af.sum(x**n)

    value, grad = await af.value_and_grad(power)([1.0, 2.0], 3)
    assert value == 9.0
    assert (grad.dtype, grad.tolist()) == (np.dtype("float32"), [3.0, 12.0])


async def test_inlined_and_in_loops() -> None:
    """Gradient descent, with the loop in the graph: half the distance to 5 in each step."""
    slope = af.value_and_grad(af.function(lambda x: (x - 5.0) ** 2))

    @af.function
    def descend(x: Any) -> Any:
        return af.while_loop(lambda i, x: i < 10, lambda i, x: (i + 1, x - 0.25 * slope(x)[1]), (0, x))[1]

    assert await descend(0.0) == pytest.approx(5.0 * (1 - 0.5**10))


async def test_several_arguments() -> None:
    """A tuple of gradients, one for each of argnums; a tuple too if that is a list of one."""
    product = af.function(lambda x, n, y: x * y * n)
    assert await af.value_and_grad(product, (0, 2))(2.0, 10, 3.0) == (60.0, (30.0, 20.0))
    assert await af.value_and_grad(product, [-1])(2.0, 10, 3.0) == (60.0, (20.0,))


async def test_aux() -> None:
    """The auxiliary result is only passed on."""
    fn = af.function(lambda x: (x * x, {"twice": x * 2.0}))
    assert await af.value_and_grad(fn, has_aux=True)(3.0) == ((9.0, {"twice": 6.0}), 6.0)


async def test_variables(run: Run, graph: af.Graph) -> None:
    """Variables stay variables, so that all their reads count."""
    weights = {"w": af.Variable(2.0), "b": af.Variable([1.0, 1.0])}
    value, grads = af.value_and_grad(loss)(weights, [3.0, 4.0])
    found = await run((value, grads))
    assert (found[0], found[1]["w"], found[1]["b"].tolist()) == (130.0, 114.0, [14.0, 18.0])


async def test_variables_of_an_awaited_function() -> None:
    """The values of the variables are the session's."""
    v = af.Variable(2.0)
    step = af.value_and_grad(af.function(lambda v, x: v * v * x))
    assign = af.function(v.assign)
    async with af.Session():
        assert await step(v, 3.0) == (12.0, 12.0)
        await assign(5.0)
        assert await step(v, 3.0) == (75.0, 30.0)


async def test_methods() -> None:
    """A bound method is a function of its other arguments."""

    class Model:
        scale = 3.0

        @af.function
        def value(self, x: Any) -> Any:
            return x * x * self.scale

    assert await af.value_and_grad(Model().value)(2.0) == (12.0, 12.0)


async def test_an_argument_that_does_not_matter() -> None:
    """Zeros of its shape."""
    _, (dx, dy) = await af.value_and_grad(af.function(lambda x, y: x * 2.0), (0, 1))(1.0, np.ones((2, 2)))
    assert (dx, dy.tolist()) == (2.0, [[0.0, 0.0], [0.0, 0.0]])


async def test_twice() -> None:
    """The gradient of a gradient."""
    first = af.value_and_grad(af.function(lambda x: x**4))
    second = af.value_and_grad(af.function(lambda x: first(x)[1]))
    assert await second(2.0) == (32.0, 48.0)


@pytest.mark.parametrize("argnums", [(), True, "x", (0.5,)])
def test_argnums_are_numbers(argnums: Any) -> None:
    """Of arguments."""
    with pytest.raises(af.GraphError, match="argnums is the number of an argument, or several; got"):
        af.value_and_grad(loss, argnums)


def test_argnums_that_may_be_something_else() -> None:
    """A third argument in the place of the second, and things that are no sequence."""
    with pytest.raises(af.GraphError, match=r"got True; did you mean has_aux=True\?"):
        af.value_and_grad(loss, True)
    wrong: Any
    for wrong in (0.5, None):
        with pytest.raises(af.GraphError, match=f"argnums is the number of an argument, or several; got {wrong}"):
            af.value_and_grad(loss, wrong)


def test_a_method_that_is_decorated_in_its_class(graph: af.Graph) -> None:
    """The method's argument 0 is self, which has no gradient."""

    class Model:
        @af.value_and_grad
        def value(self, x: Any) -> Any:
            return x * x

    with pytest.raises(af.DTypeError, match=r"argument 0 is <.*, and gradients are by .* argnums=1 for a method"):
        Model().value(2.0)


async def test_a_list_is_no_array(graph: af.Graph) -> None:
    """The list is passed on as the nest it is; the error of the function says what to pass."""
    either: Any
    for either in (lambda x: x**2, af.function(lambda x: x**2)):
        with pytest.raises(TypeError) as caught:
            await af.value_and_grad(either)([1.0, 2.0])
        assert "argument 0 of value_and_grad is a list" in caught.value.__notes__[0]
    with pytest.raises(TypeError) as caught:
        af.value_and_grad(lambda x: x["w"] ** "2")({"w": 1.0})
    assert not hasattr(caught.value, "__notes__")


def test_outside_a_graph() -> None:
    """The message is about the graph, not about the argument."""
    with pytest.raises(af.GraphError, match="no graph is being built here"):
        af.value_and_grad(lambda x: x * x)(2.0)


def test_refused_arguments(graph: af.Graph) -> None:
    """Things that are no functions, arguments without gradients or by name, values that are no float scalars."""
    wrong: Any = 3
    with pytest.raises(af.GraphError, match="value_and_grad takes a function; got 3"):
        af.value_and_grad(wrong)
    square = af.value_and_grad(lambda x: x * x)
    with pytest.raises(af.DTypeError, match=r"argument 0 is int64, .*: pass 2\.0, not 2"):
        square(2)
    with pytest.raises(af.GraphError, match="pass argument 0 by position; got 0 positional arguments"):
        square(x=2.0)
    with pytest.raises(af.ShapeError, match=r"float64\[2\]>; it must be a scalar: take its af.sum or af.mean"):
        square(np.array([1.0, 2.0]))
    with pytest.raises(af.DTypeError, match="only a float has a gradient"):
        af.value_and_grad(af.argmax)(np.array([1.0, 2.0]))
    with pytest.raises(af.GraphError, match=r"its value is one tensor to differentiate; .*has_aux=True takes"):
        af.value_and_grad(lambda x: (x, x))(1.0)
    with pytest.raises(af.GraphError, match=r"with has_aux it returns \(value, aux\); got"):
        af.value_and_grad(lambda x: x, has_aux=True)(1.0)
