"""`minimize`: from a loss to a training step in one line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncflow.autodiff.gradients import gradients
from asyncflow.graph import nest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from asyncflow.graph.ir import Node, Tensor
    from asyncflow.state.variable import Variable


def minimize(loss: Tensor, variables: Any, step: Callable[[Iterable[tuple[Any, Variable]]], Node]) -> Node:
    """Adds the gradients of `loss` and a step along them.

    Args:
        loss: what is to become smaller, a float scalar.
        variables: a nest of variables; `loss` depends on each.
        step: called with pairs of a gradient and a variable, such as ``partial(af.optim.sgd, learning_rate=0.1)``.

    Returns:
        What `step` returns: the node to run.

    >>> import asyncflow as af
    >>> w = af.Variable(3.0, name="w")
    >>> with af.Graph():
    ...     train = minimize(w * w, [w], lambda pairs: af.optim.adam(pairs, learning_rate=0.01))
    """
    listed = nest.flatten(variables)[0]
    return step(zip(gradients(loss, listed), listed, strict=True))


__all__ = ["minimize"]
