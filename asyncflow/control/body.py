"""Bodies of branches and loops: calling the user's function once inside a subgraph, and joining captures."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from asyncflow.control.primitives.switch import PREDICATE_SHAPE, check_predicate
from asyncflow.errors import DTypeError, GraphError, ShapeError
from asyncflow.graph.building.build import (
    TensorLike,
    add_control_input,
    as_tensor,
    constant,
    identity,
    refuse_coroutines,
)
from asyncflow.graph.graph import Graph
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.values import nest
from asyncflow.graph.values.dtypes import VARIANT, dtype_name, promote
from asyncflow.graph.values.shapes import format_shape, is_subshape
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.arrays.manipulation import as_scalar
from asyncflow.values import Nest

_WEAK = (bool, int, float, complex)


def user_function(function: object, role: str, n_arguments: int, arguments: str) -> Callable[..., Nest]:
    """Check that `function` takes its future arguments and is no coroutine function, and return it.

    Args:
        function: what the user gave.
        role: what for, such as ``true_fn of cond``.
        n_arguments: how many it is called with, all by position.
        arguments: description of the arguments, such as ``2 loop variables``.

    Raises:
        GraphError: it is no function, is a coroutine function, or takes other arguments.
    """
    refuse_coroutines(function)
    if not callable(function):
        takes = f"of {arguments}" if n_arguments else "without arguments"
        advice = "" if n_arguments else ": write lambda: x"
        raise GraphError(f"{role} is a function {takes}; got {function!r}{advice}")
    _check_arity(function, role, n_arguments, arguments)

    def call(*values: Nest) -> Nest:
        returned = function(*values)
        refuse_coroutines(*nest.flatten(returned)[0])
        return returned

    return call


def _check_arity(function: Callable[..., object], role: str, n_arguments: int, arguments: str) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # some builtins have no signature
    try:
        signature.bind(*range(n_arguments))
    except TypeError as error:
        name = getattr(function, "__name__", repr(function))
        raise GraphError(
            f"{role} is called with {arguments if n_arguments else 'no arguments'}, which {name}{signature} does not "
            f"take: {error}"
        ) from None


def user_functions(functions: Iterable[object], default: object) -> list[Callable[..., Nest]]:
    """Functions without arguments, numbered from 0 in messages, and a default, unless None; see `user_function`."""
    named = [(function, f"branch {index}") for index, function in enumerate(functions)]
    named += [] if default is None else [(default, "default")]
    return [user_function(function, role, 0, "") for function, role in named]


def as_predicate(pred: TensorLike, what: str) -> Tensor:
    """Return `pred` as a boolean scalar; a single element, such as one of shape ``[1,1]``, is reshaped.

    If extents are unknown, the run counts the elements.

    Raises:
        GraphError: it is a nest.
        ShapeError, DTypeError: it is not a boolean, or certainly has several elements.
    """
    structure = nest.flatten(pred)[1]
    if structure.kind is not None:
        raise GraphError(f"{what} is one boolean scalar; got {nest.describe(structure)}")
    tensor = as_tensor(pred)
    if not set(tensor.shape or ()) <= {1, None}:
        check_predicate(tensor.spec)
    return as_scalar(tensor, PREDICATE_SHAPE, "predicate")


def result_tensor(body: Graph, value: Any, like: Tensor | None = None) -> Tensor:
    """A leaf of what a body returned, as a tensor of the body.

    A `Node` becomes a boolean that is true once the node has run. A Python number takes the dtype of `like`.
    """
    with body:
        if isinstance(value, Node):
            done = identity(constant(True), name="done")
            add_control_input(done.node, value)
            return done
        if like is not None and type(value) in _WEAK and promote([like.dtype, value]) == like.dtype:
            return constant(value, like.dtype)
        return as_tensor(value)


def require_kept(state: str, spec: Spec, function: str, found: Tensor) -> None:
    """Raise DTypeError or ShapeError if a function of one step gives its state back with another dtype or shape.

    Args:
        state: the state, or a path in it, for the message.
        spec: of the state before the first step.
        function: what gives it back.
        found: the state behind the step.
    """
    if found.dtype != spec.dtype:
        raise DTypeError(
            f"{state} begins as {dtype_name(spec.dtype)} but {function} returns {dtype_name(found.dtype)}; convert one "
            f"with af.astype"
        )
    if not is_subshape(found.shape, spec.shape):
        raise ShapeError(
            f"{state} begins with shape {format_shape(spec.shape)} but {function} returns {format_shape(found.shape)}; "
            f"a state keeps its shape"
        )


def refuse_handles(what: str, paths: Iterable[str], values: Sequence[Tensor]) -> None:
    """Raises DTypeError for a TensorArray or RowStore among values that get a row axis.

    Args:
        what: the public function, such as ``"map_fn"``.
        paths: where each value stands, for the message.
        values: the tensors.
    """
    for path, value in zip(paths, values, strict=True):
        if value.dtype == VARIANT:
            raise DTypeError(
                f"{path} of {what} is a TensorArray or RowStore, and these cannot be stacked; return what stack() "
                f"gives instead"
            )


def add_outer_controls(node: Node) -> None:
    """Make a structured node wait for the outside nodes that its bodies named as control inputs."""
    for body in node.subgraphs:
        for outer in body.outer_controls:
            add_control_input(node, outer)
