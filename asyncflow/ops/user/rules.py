"""User-defined derivatives: the arguments of their functions, and checks of the results."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

from asyncflow.errors import DTypeError, GraphError, ShapeError, brief
from asyncflow.graph.building.build import TensorLike, as_tensor, graph_for, refuse_coroutines
from asyncflow.graph.ir import Attrs, Node, Tensor
from asyncflow.graph.op import Derivative
from asyncflow.graph.values import nest
from asyncflow.graph.values.dtypes import VARIANT, dtype_name
from asyncflow.graph.values.shapes import format_shape, is_compatible
from asyncflow.ops.derivatives.shapes import carries_gradient, checked_shape, zeros_of
from asyncflow.values import Nest


def accepted_arguments(function: Callable[..., object], arguments: Attrs) -> Attrs:
    """The `arguments` that `function` takes by name."""
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return {name: value for name, value in arguments.items() if takes_all or name in parameters}


def output_gradients(outputs: Sequence[Tensor], grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return the gradients of `outputs` for a user's function: zeros for missing ones, None for outputs that can
    have none.
    """
    return [
        zeros_of(y) if grad is None and carries_gradient(y.spec) and y.dtype != VARIANT else grad
        for y, grad in zip(outputs, grads, strict=True)
    ]


def input_gradients(
    what: str, node: Node, inputs: Sequence[Tensor], structures: Sequence[nest.Structure], returned: Nest
) -> list[Tensor | None]:
    """The gradient of each tensor of `inputs`, from what a user's function returned.

    Args:
        what: the function, for messages.
        node: the node to be differentiated.
        inputs: the leaves of all arguments.
        structures: the nest of each argument; the function returns one gradient each, in a tuple or list, or that of
            a single one itself.
        returned: by the function; None, also for a part, where nothing flows.

    Raises:
        GraphError, DTypeError, ShapeError: it does not fit the inputs. Shapes that only a run knows are checked there.
    """
    refuse_coroutines(returned)
    nests = [None] * len(structures) if returned is None else _one_each(what, node, structures, returned)
    leaves: list[object] = []
    for place, (structure, found) in enumerate(zip(structures, nests, strict=True)):
        if found is None:
            leaves += [None] * structure.size
            continue
        rule = f"{what} returned as gradient {place} {brief(found)}, which is no nest like argument {place}"
        made = f"\n  differentiates {node.name}, built at {node.location}"
        leaves += nest.match(structure, found, rule, nested_leaves=True, advice=made)
    return [_of_input(what, node, x, leaf) for x, leaf in zip(inputs, leaves, strict=True)]


def _one_each(what: str, node: Node, structures: Sequence[nest.Structure], returned: Nest) -> Sequence[Nest]:
    is_list = isinstance(returned, tuple | list) and not hasattr(returned, "_fields")
    if len(structures) == 1 and (not is_list or _fits(structures[0], returned)):
        return [returned]
    if not is_list or len(returned) != len(structures):
        seen = f"{len(returned)} values" if is_list else brief(returned)
        raise GraphError(
            f"{what} returns one gradient for each of {len(structures)} arguments, in a tuple; it returned {seen}"
            f"\n  differentiates {node.name}, built at {node.location}"
        )
    found: Sequence[Nest] = returned
    return found


def _fits(structure: nest.Structure, returned: Nest) -> bool:
    if structure.kind is None:
        return False
    try:
        nest.flatten_like(structure, returned, nested_leaves=True)
    except nest.StructureMismatch:
        return False
    return True


def _of_input(what: str, node: Node, x: Tensor, value: TensorLike | None) -> Tensor | None:
    if value is None or not carries_gradient(x.spec):
        return None
    is_symbolic = isinstance(value, Tensor)
    grad = as_tensor(value) if is_symbolic else as_tensor(value, x.dtype)
    if grad.dtype != x.dtype:
        raise DTypeError(
            f"{what} returned {grad!r} as the gradient of {x!r}, which needs dtype {dtype_name(x.dtype)}; convert it "
            f"with af.astype\n  differentiates {node.name}, built at {node.location}"
        )
    if not is_compatible(grad.shape, x.shape):
        raise ShapeError(
            f"{what} returned {grad!r} as the gradient of {x!r}: it is to have shape {format_shape(x.shape)}"
            f"\n  differentiates {node.name}, built at {node.location}"
        )
    graph = graph_for()
    return checked_shape(graph.import_tensor(grad), x, f"what {what} returned as the gradient of {x!r}")


def rule_of_op(name: str, gradient: Callable[..., object]) -> Derivative:
    """The derivative of a user's op that has ``gradient(inputs, outputs, grads, **arguments)``; see `@op`."""

    def rule(node: Node, *grads: Tensor | None) -> Sequence[Tensor | None]:
        structure = nest.flatten(node.attrs["outputs"])[1]
        inputs = tuple(node.inputs)
        returned = gradient(
            inputs,
            structure.unflatten(node.outputs),
            structure.unflatten(output_gradients(node.outputs, grads)),
            **accepted_arguments(gradient, node.attrs["arguments"]),
        )
        return input_gradients(f"the gradient of @op {name}", node, inputs, [nest.LEAF] * len(inputs), returned)

    return rule
