"""Steps that change variables along their gradients: `sgd`, `momentum`, `adam`.

Every variable is written once a step, atomically, and so is everything remembered for it. Runs of one step that overlap
each take effect in full, on the values that are there when they write.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from asyncflow.errors import DTypeError, GraphError, ShapeError, user_location
from asyncflow.graph.build import TensorLike, as_tensor, constant, graph_for, group
from asyncflow.graph.dtypes import dtype_name, float32, float64, int64
from asyncflow.graph.ir import Tensor
from asyncflow.graph.shapes import format_shape, is_compatible, is_static
from asyncflow.ops.datatypes import astype
from asyncflow.ops.elementwise import sqrt, square
from asyncflow.ops.promotion import is_weak, kind_of
from asyncflow.state.variable import Variable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from asyncflow.graph.dtypes import DType, DTypeLike
    from asyncflow.graph.ir import Node

Pairs: TypeAlias = "Iterable[tuple[TensorLike | None, Variable]]"
"""Gradients and the variables they belong to."""


def sgd(pairs: Pairs, learning_rate: TensorLike) -> Node:
    """Adds a step of gradient descent: ``w -= learning_rate * g``.

    Args:
        pairs: a gradient and its variable each, such as ``zip(af.gradients(loss, weights), weights)``. Floats; a
            gradient has the dtype and shape of its variable.
        learning_rate: a number or a scalar tensor.

    Returns:
        The node that has run when all variables have changed.

    Raises:
        GraphError: no gradient (None) for a variable, a variable twice, or none at all.
        DTypeError, ShapeError: a gradient does not fit its variable.

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
    return group(
        *(variable.assign_sub(_scalar(learning_rate, grad.dtype) * grad) for grad, variable in _checked("sgd", pairs))
    )


def momentum(pairs: Pairs, learning_rate: TensorLike, momentum: TensorLike = 0.9, *, nesterov: bool = False) -> Node:
    """Adds a step of gradient descent with momentum: ``v = momentum * v + g``, then ``w -= learning_rate * v``.

    A change of the learning rate takes effect at once, since ``v`` is a sum of gradients and not of steps.

    Args:
        pairs: as for `sgd`.
        learning_rate: a number or a scalar tensor.
        momentum: what is kept of ``v`` from step to step; a number or a scalar tensor.
        nesterov: look ahead along ``v``: ``w -= learning_rate * (g + momentum * v)``.

    Returns:
        The node that has run when all variables have changed. ``v`` is a variable named ``<w>/momentum``, at first
        zeros; each call makes its own, unless they are in a container.

    Raises:
        GraphError, DTypeError, ShapeError: as for `sgd`; and a variable whose shape is not known in full.
    """
    steps = []
    for grad, variable in _checked("momentum", pairs):
        rate, kept = _scalar(learning_rate, grad.dtype), _scalar(momentum, grad.dtype)
        velocity = _slot(variable, "momentum").update(lambda v, g, kept: kept * v + g, grad, kept)
        steps.append(variable.assign_sub(rate * (grad + kept * velocity if nesterov else velocity)))
    return group(*steps)


def adam(
    pairs: Pairs,
    learning_rate: TensorLike = 0.001,
    *,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-8,
) -> Node:
    """Adds a step of Adam, with bias correction (Kingma and Ba 2015, algorithm 1).

    ``m = beta1 * m + (1 - beta1) * g`` and ``s = beta2 * s + (1 - beta2) * g**2`` are means of what has come so far.
    In step t, which counts from 1: ``w -= learning_rate * m / (1 - beta1**t) / (sqrt(s / (1 - beta2**t)) + epsilon)``.
    For variables of 16 bits the means are float32, as squares of small gradients would else vanish.

    Args:
        pairs: as for `sgd`.
        learning_rate: a number or a scalar tensor.
        beta1: how much of the mean gradient stays in a step, at least 0 and below 1.
        beta2: how much of the mean square stays in a step, likewise.
        epsilon: keeps the quotient finite.

    Returns:
        The node that has run when all variables have changed. Three variables for each remember its past:
        ``<w>/adam_mean``, ``<w>/adam_square`` and ``<w>/adam_step``; each call makes its own, unless they are in a
        container.

    Raises:
        GraphError, DTypeError, ShapeError: as for `momentum`; and a `beta` out of range.
    """
    for name, beta in (("beta1", beta1), ("beta2", beta2)):
        if not 0 <= beta < 1:
            raise GraphError(f"adam: {name} is at least 0 and below 1; got {beta!r}\n  written at {user_location()}")
    steps = []
    for grad, variable in _checked("adam", pairs):
        dtype = float32 if grad.dtype.itemsize < float32.itemsize else grad.dtype
        grad = _cast(grad, dtype)
        # In float64: in float32, 1 - 0.999**t is off in the fourth digit when t is small.
        t = astype(_slot(variable, "adam_step", (), int64).assign_add(1), float64)
        bias1, bias2 = 1 - beta1**t, 1 - beta2**t
        rate = astype(_scalar(learning_rate, float64) / bias1, dtype)
        scale = astype(1 / sqrt(bias2), dtype)
        mean = _slot(variable, "adam_mean", dtype=dtype).update(lambda m, g: beta1 * m + (1 - beta1) * g, grad)
        squares = _slot(variable, "adam_square", dtype=dtype).update(
            lambda s, g: beta2 * s + (1 - beta2) * square(g), grad
        )
        step = rate * mean / (scale * sqrt(squares) + epsilon)
        steps.append(variable.assign_sub(_cast(step, variable.dtype)))
    return group(*steps)


def _checked(what: str, pairs: Pairs) -> Iterator[tuple[Tensor, Variable]]:
    """The pairs, with gradients as tensors, in the graph they are in."""
    listed = list(pairs)
    if not listed:
        raise GraphError(f"{what}: there is no variable to change\n  written at {user_location()}")
    seen = set()
    for grad, variable in listed:
        if not isinstance(variable, Variable):
            raise GraphError(f"{what}: takes (gradient, variable); got {variable!r}\n  written at {user_location()}")
        if variable.effect_key in seen:
            raise GraphError(
                f"{what}: variable {variable.name!r} comes twice; add its gradients up\n  written at {user_location()}"
            )
        seen.add(variable.effect_key)
        if grad is None:
            raise GraphError(
                f"{what}: variable {variable.name!r} has no gradient, as the loss does not depend on it; leave it out"
                f"\n  written at {user_location()}"
            )
        with graph_for(grad):
            tensor = as_tensor(grad)
            _check_fits(what, tensor, variable)
            yield tensor, variable


def _check_fits(what: str, grad: Tensor, variable: Variable) -> None:
    if kind_of(variable.dtype) != "f":
        raise DTypeError(
            f"{what}: variable {variable.name!r} is {variable.spec}; only floats follow a gradient"
            f"\n  written at {user_location()}"
        )
    if grad.dtype != variable.dtype:
        raise DTypeError(
            f"{what}: the gradient {grad!r} of variable {variable.name!r}, which holds {dtype_name(variable.dtype)}, "
            f"has another dtype\n  written at {user_location()}"
        )
    if not is_compatible(grad.shape, variable.shape):
        raise ShapeError(
            f"{what}: the gradient {grad!r} of variable {variable.name!r}, of shape {format_shape(variable.shape)}, "
            f"has another shape\n  written at {user_location()}"
        )


def _slot(
    variable: Variable, name: str, shape: tuple[int, ...] | None = None, dtype: DTypeLike | None = None
) -> Variable:
    """A variable that remembers something of another, of its shape unless told; at first zeros."""
    if shape is None:
        if variable.shape is None or not is_static(variable.shape):
            raise GraphError(
                f"variable {variable.name!r} is {variable.spec}, and what is remembered for it needs a shape that is "
                f"known in full: give it one, Variable(..., shape=...)\n  written at {user_location()}"
            )
        shape = tuple(extent for extent in variable.shape if extent is not None)
    zeros = np.zeros(shape, variable.dtype if dtype is None else dtype)
    return Variable(zeros, name=f"{variable.name}/{name}", container=variable.container)


def _scalar(x: TensorLike, dtype: DType) -> Tensor:
    """A number or tensor as a tensor of that dtype."""
    return constant(x, dtype) if is_weak(x) else _cast(as_tensor(x), dtype)


def _cast(x: Tensor, dtype: DType) -> Tensor:
    return x if x.dtype == dtype else astype(x, dtype)


__all__ = ["Pairs", "adam", "momentum", "sgd"]
