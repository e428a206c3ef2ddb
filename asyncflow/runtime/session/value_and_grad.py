"""`value_and_grad`: a function that gives its value and its gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import ParamSpec, TypeVar, overload

from asyncflow.autodiff.gradients import gradients
from asyncflow.errors import DTypeError, GraphError, brief
from asyncflow.graph.building.build import as_tensor, refuse_coroutines
from asyncflow.graph.ir import Tensor
from asyncflow.graph.values import nest
from asyncflow.graph.values.dtypes import dtype_name
from asyncflow.ops.derivatives.shapes import carries_gradient
from asyncflow.optim.loss import as_loss
from asyncflow.runtime.session.function import Function
from asyncflow.state.variables.variable import Variable
from asyncflow.values import Nest, Value

P = ParamSpec("P")
R = TypeVar("R")


@overload
def value_and_grad(fn: Function[P], argnums: int | Sequence[int] = 0, has_aux: bool = False) -> Function[P]: ...
@overload
def value_and_grad(
    fn: Callable[P, R], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[P, tuple[R, Nest]]: ...


def value_and_grad(
    fn: Callable[..., object], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., Nest]:
    """Return a function that returns the result of `fn` and its gradients: ``(value, grads)``.

    For an `@af.function` it is an `@af.function` too, to be awaited or inlined; for a function that builds part of a
    graph, it builds that part and the gradients. An argument that does not matter has a gradient of zeros.

    Args:
        fn: returns a float scalar.
        argnums: the number of the argument to differentiate by, or several: any nests of floats, complex numbers and
            variables, where a list is a nest of its items and no array. They are passed by position; of a method that
            is decorated in its class, argument 0 is `self`.
        has_aux: `fn` returns ``(value, aux)``, of which `aux`, any nest, is only passed on: ``((value, aux), grads)``.

    Returns:
        A function of the same arguments. Its `grads` are a nest like the argument, or a tuple of nests for several.

    Raises:
        GraphError, DTypeError, ShapeError: `fn` is called with something, or returns something, that has no gradient.

    >>> import asyncflow as af
    >>> @value_and_grad
    ... @af.function
    ... def loss(weights, x):
    ...     return af.sum((weights["w"] * x + weights["b"]) ** 2)
    >>> async def main():
    ...     return await loss({"w": 2.0, "b": 1.0}, 3.0)
    >>> af.run(main())
    (np.float64(49.0), {'w': np.float64(42.0), 'b': np.float64(14.0)})
    """
    refuse_coroutines(fn)
    if not callable(fn):
        raise GraphError(f"value_and_grad takes a function; got {fn!r}")
    if isinstance(fn, Function):
        return fn.with_body(_differentiated(fn.fn, argnums, has_aux))
    return _differentiated(fn, argnums, has_aux)


def _differentiated(fn: Callable[..., Nest], argnums: int | Sequence[int], has_aux: bool) -> Callable[..., Nest]:
    name = getattr(fn, "__qualname__", type(fn).__qualname__)
    places = list(argnums) if isinstance(argnums, Sequence) else [argnums]
    if not places or any(isinstance(place, bool) or not isinstance(place, int) for place in places):
        advice = "; did you mean has_aux=True?" if argnums is True else ""
        raise GraphError(
            f"value_and_grad of {name}: argnums is the number of an argument, or several; got {argnums!r}{advice}"
        )

    @wraps(fn)
    def differentiated(*args: object, **kwargs: object) -> Nest:
        passed = list(args)
        for place in places:
            if not -len(args) <= place < len(args):
                raise GraphError(
                    f"value_and_grad of {name}: pass argument {place} by position; got {len(args)} positional arguments"
                )
            passed[place] = nest.map_leaves(partial(_source, name, place), passed[place])
        try:
            returned = fn(*passed, **kwargs)
        except TypeError as error:
            for place in places:
                _explain_list(error, place, args[place])
            raise
        value = _value(name, returned, has_aux)
        found = gradients(value, [passed[place] for place in places], unconnected="zero")
        grads = found[0] if isinstance(argnums, int) else tuple(found)
        return ((value, returned[1]) if has_aux else value), grads

    return differentiated


def _source(name: str, place: int, leaf: Value) -> Tensor | Variable:
    """The sources to differentiate by: a variable stays one, so that all its reads count."""
    try:
        source = leaf if isinstance(leaf, Variable) else as_tensor(leaf)
    except DTypeError as error:
        raise DTypeError(
            f"value_and_grad of {name}: argument {place} is {brief(leaf)}, and gradients are by floats and complex "
            f"numbers: name another with argnums, such as argnums=1 for a method, whose argument 0 is self"
        ) from error
    if not carries_gradient(source.spec):
        raise DTypeError(
            f"value_and_grad of {name}: argument {place} is {dtype_name(source.spec.dtype)}, and gradients are by "
            f"floats and complex numbers: pass 2.0, not 2; or name others with argnums"
        )
    return source


def _explain_list(error: TypeError, place: int, argument: Value) -> None:
    """Adds a note if `argument` is a list where an array may have been meant."""
    if isinstance(argument, list) and all(map(_is_scalar, nest.flatten(argument)[0])):
        error.add_note(
            f"argument {place} of value_and_grad is a list, which is a nest and stays one: pass np.array(...) to "
            f"differentiate by an array"
        )


def _is_scalar(leaf: Value) -> bool:
    return leaf.shape == () if isinstance(leaf, Tensor) else isinstance(leaf, int | float | complex)


def _value(name: str, returned: Nest, has_aux: bool) -> Tensor:
    if has_aux and not (isinstance(returned, tuple | list) and len(returned) == 2):
        raise GraphError(f"value_and_grad of {name}: with has_aux it returns (value, aux); got {returned!r}")
    what = f"value_and_grad of {name}: its value"
    return as_loss(what, returned[0]) if has_aux else as_loss(what, returned, "; has_aux=True takes (value, aux)")
