"""Optimiser steps that change variables along gradients: `sgd`, `momentum`, `adam`.

Every variable is written once a step, atomically, and so is everything remembered for it. Runs of one step that overlap
each take effect in full, on the values that are there when they write.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

import numpy as np

from asyncflow.errors import DTypeError, GraphError, ShapeError, brief
from asyncflow.graph.building.build import TensorLike, as_tensor, graph_for, group
from asyncflow.graph.building.scopes import name_scope
from asyncflow.graph.graph import Graph
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.values import nest
from asyncflow.graph.values.dtypes import DTypeLike, dtype_name, float32, float64, int64
from asyncflow.graph.values.shapes import format_shape, is_compatible, is_static
from asyncflow.ops.arithmetic.elementwise import sqrt, square
from asyncflow.ops.arrays.datatypes import astype
from asyncflow.ops.promotion import kind_of
from asyncflow.optim.scalars import as_dtype_of, as_scalar, is_number, share
from asyncflow.state.variables.variable import Variable

Pairs: TypeAlias = "Iterable[tuple[TensorLike | None, Variable]]"
"""Pairs of a gradient and its variable."""


def sgd(pairs: Pairs, learning_rate: TensorLike) -> Node:
    """Adds a step of gradient descent: ``w -= learning_rate * g``.

    Args:
        pairs: a gradient and its variable each, such as ``zip(af.gradients(loss, weights), weights)``. Floats; a
            gradient has the dtype and shape of its variable.
        learning_rate: a number or a scalar tensor, which is converted to the dtype of each variable.

    Returns:
        The node that has run when all variables have changed.

    Raises:
        GraphError: no pairs, no gradient (None) for a variable, or a variable twice.
        DTypeError, ShapeError: a gradient does not fit its variable, or the learning rate is no scalar.

    >>> import asyncflow as af
    >>> w = af.Variable(3.0, name="w")
    >>> with af.Graph() as graph:
    ...     step = sgd([(2 * w, w)], learning_rate=0.25)
    >>> async def main():
    ...     async with af.Session(graph) as session:
    ...         await session.run(step)
    ...         print(await session.run(w))
    >>> af.run(main())
    1.5
    """
    graph, checked = _checked("sgd", pairs)
    with graph, name_scope("sgd"):
        return group(
            *(
                variable.assign_sub(as_scalar("sgd: learning_rate", learning_rate, grad.dtype) * grad)
                for grad, variable in checked
            )
        )


def momentum(pairs: Pairs, learning_rate: TensorLike, momentum: TensorLike = 0.9, *, nesterov: bool = False) -> Node:
    """Add a step of gradient descent with momentum: ``v = momentum * v + g``, then ``w -= learning_rate * v``.

    A change of the learning rate takes effect at once, since ``v`` is a sum of gradients and not of steps.

    Args:
        pairs: as for `sgd`.
        learning_rate: as for `sgd`.
        momentum: share of ``v`` kept from step to step; a number, at least 0 and below 1, or a scalar tensor.
        nesterov: look ahead along ``v``: ``w -= learning_rate * (g + momentum * v)``.

    Returns:
        The node that has run when all variables have changed. ``v`` is a variable named ``<w>/momentum``, at first
        zeros; each call makes its own, unless they are in a container.

    Raises:
        GraphError, DTypeError, ShapeError: as for `sgd`; a variable whose shape is not known in full; and a momentum
            out of range.
    """
    if is_number(momentum):
        share("momentum: momentum", momentum)
    graph, checked = _checked("momentum", pairs, remembers=True)
    with graph, name_scope("momentum"):
        steps = []
        for grad, variable in checked:
            rate = as_scalar("momentum: learning_rate", learning_rate, grad.dtype)
            kept = as_scalar("momentum: momentum", momentum, grad.dtype)
            velocity = _slot(variable, "momentum").update(lambda v, g, kept: kept * v + g, grad, kept)
            steps.append(variable.assign_sub(rate * (grad + kept * velocity if nesterov else velocity)))
        return group(*steps)


def adam(
    pairs: Pairs, learning_rate: TensorLike = 0.001, *, beta1: float = 0.9, beta2: float = 0.999, epsilon: float = 1e-8
) -> Node:
    """Add a step of Adam, with bias correction (Kingma and Ba 2015, algorithm 1).

    ``m = beta1 * m + (1 - beta1) * g`` and ``s = beta2 * s + (1 - beta2) * g**2`` are running means. In step t, which
    counts from 1: ``w -= learning_rate * m / (1 - beta1**t) / (sqrt(s / (1 - beta2**t)) + epsilon)``. For variables of
    16 bits the means are float32, as squares of small gradients would else vanish.

    Args:
        pairs: as for `sgd`.
        learning_rate: as for `sgd`.
        beta1: how much of the mean gradient stays in a step; a number, at least 0 and below 1.
        beta2: how much of the mean square stays in a step, likewise.
        epsilon: keeps the quotient finite; a number, at least 0.

    Returns:
        The node that has run when all variables have changed. Three variables for each remember its past:
        ``<w>/adam_mean``, ``<w>/adam_square`` and ``<w>/adam_step``; each call makes its own, unless they are in a
        container.

    Raises:
        GraphError, DTypeError, ShapeError: as for `momentum`; and a `beta` or `epsilon` out of range.
    """
    beta1, beta2 = share("adam: beta1", beta1), share("adam: beta2", beta2)
    if not is_number(epsilon) or not epsilon >= 0:
        raise GraphError(f"adam: epsilon is a number, at least 0; got {brief(epsilon)}")
    graph, checked = _checked("adam", pairs, remembers=True)
    with graph, name_scope("adam"):
        return group(
            *(_adam_step(grad, variable, learning_rate, beta1, beta2, float(epsilon)) for grad, variable in checked)
        )


def _adam_step(
    grad: Tensor, variable: Variable, learning_rate: TensorLike, beta1: float, beta2: float, epsilon: float
) -> Tensor:
    given = as_scalar("adam: learning_rate", learning_rate, float64)
    dtype = float32 if grad.dtype.itemsize < float32.itemsize else grad.dtype
    grad = as_dtype_of(grad, dtype)
    # In float64: in float32, 1 - 0.999**t is off in the fourth digit when t is small.
    t = astype(_slot(variable, "adam_step", (), int64).assign_add(1), float64)
    bias1, bias2 = 1 - beta1**t, 1 - beta2**t
    rate = astype(given / bias1, dtype)
    scale = astype(1 / sqrt(bias2), dtype)
    mean = _slot(variable, "adam_mean", dtype=dtype).update(lambda m, g: beta1 * m + (1 - beta1) * g, grad)
    squares = _slot(variable, "adam_square", dtype=dtype).update(lambda s, g: beta2 * s + (1 - beta2) * square(g), grad)
    step = rate * mean / (scale * sqrt(squares) + epsilon)
    return variable.assign_sub(as_dtype_of(step, variable.dtype))


def _checked(what: str, pairs: Pairs, *, remembers: bool = False) -> tuple[Graph, list[tuple[Tensor, Variable]]]:
    """Return the graph to build in, and the pairs, with gradients as tensors. All are checked before anything is built.

    Args:
        what: names the step in messages.
        pairs: what the user gave.
        remembers: True if the step keeps a variable of the same shape for each one.
    """
    listed = _listed(what, pairs)
    seen = set()
    for grad, variable in listed:
        if variable.effect_key in seen:
            raise GraphError(f"{what}: variable {variable.name!r} comes twice; add its gradients up")
        seen.add(variable.effect_key)
        if grad is None:
            raise GraphError(
                f"{what}: variable {variable.name!r} has no gradient, as the loss does not depend on it; leave it out"
            )
        if _is_nest(grad):
            raise GraphError(
                f"{what}: the gradient of variable {variable.name!r} is one tensor; got {brief(grad)}; what "
                f"clip_by_global_norm returns is (gradients, norm): take its [0]"
            )
    graph = graph_for(*(grad for grad, _ in listed))
    with graph:
        found = [(as_tensor(grad), variable) for grad, variable in listed]
        for grad, variable in found:
            _check_fits(what, grad, variable)
            if remembers:
                _static_shape(variable)
    return graph, found


def _listed(what: str, pairs: object) -> list[tuple[TensorLike | None, Variable]]:
    rule = f"{what}: takes pairs of (gradient, variable), such as zip(af.gradients(loss, weights), weights)"
    if isinstance(pairs, Tensor | Variable | Mapping) or not isinstance(pairs, Iterable):
        raise GraphError(f"{rule}; got {brief(pairs)}")
    listed = list(pairs)
    if not listed:
        raise GraphError(f"{what}: there is no variable to change")
    for pair in listed:
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[1], Variable):
            raise GraphError(f"{rule}; got {brief(pair)}")
    return listed


def _is_nest(grad: object) -> bool:
    """Return True if `grad` holds several tensors; a list of numbers counts as one."""
    leaves, structure = nest.flatten(grad)
    return structure.kind is not None and not all(map(is_number, leaves))


def _check_fits(what: str, grad: Tensor, variable: Variable) -> None:
    if kind_of(variable.dtype) != "f":
        raise DTypeError(f"{what}: variable {variable.name!r} is {variable.spec}; only floats follow a gradient")
    if grad.dtype != variable.dtype:
        raise DTypeError(
            f"{what}: the gradient {grad!r} of variable {variable.name!r}, which holds {dtype_name(variable.dtype)}, "
            f"has another dtype"
        )
    if not is_compatible(grad.shape, variable.shape):
        raise ShapeError(
            f"{what}: the gradient {grad!r} of variable {variable.name!r}, of shape {format_shape(variable.shape)}, "
            f"has another shape"
        )


def _slot(
    variable: Variable, name: str, shape: tuple[int, ...] | None = None, dtype: DTypeLike | None = None
) -> Variable:
    """Make a variable for an optimiser's state, of the shape of `variable` unless told; at first zeros."""
    zeros = np.zeros(_static_shape(variable) if shape is None else shape, variable.dtype if dtype is None else dtype)
    return Variable(zeros, name=f"{variable.name}/{name}", container=variable.container)


def _static_shape(variable: Variable) -> tuple[int, ...]:
    if variable.shape is None or not is_static(variable.shape):
        raise GraphError(
            f"variable {variable.name!r} is {variable.spec}, and its optimiser state needs a "
            f"shape that is known in full: give it one, Variable(..., shape=...)"
        )
    return tuple(extent for extent in variable.shape if extent is not None)
