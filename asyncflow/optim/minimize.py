"""`minimize`: from a loss to a training step in one line."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from asyncflow.autodiff.gradients import gradients
from asyncflow.control.body import user_function
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.values import nest
from asyncflow.optim.loss import as_loss
from asyncflow.optim.loss_scale import scaled_step
from asyncflow.state.variables.variable import Variable
from asyncflow.values import Nest

_PAIRS = "pairs of (gradient, variable) alone (as partial(af.optim.sgd, learning_rate=0.1) is)"


def minimize(
    loss: Tensor,
    variables: Nest,
    step: Callable[[Iterable[tuple[Nest, Variable]]], Node],
    *,
    loss_scale: float | None = None,
) -> Node:
    """Add the gradients of `loss` and a step along them.

    Args:
        loss: the value to minimise, a float scalar.
        variables: a nest of variables of floats; `loss` depends on each.
        step: called with pairs of a gradient and a variable, such as ``partial(af.optim.sgd, learning_rate=0.1)``.

    Returns:
        What `step` returns: the node to run.

    Raises:
        GraphError, DTypeError, ShapeError: `loss` is no float scalar, `step` no function of pairs; and as from
            `gradients` and from `step`, which refuses a variable that `loss` does not depend on.

    >>> import asyncflow as af
    >>> w = af.Variable(3.0, name="w")
    >>> with af.Graph():
    ...     train = minimize(w * w, [w], lambda pairs: af.optim.adam(pairs, learning_rate=0.01))
    """
    change: Callable[[Iterable[tuple[Nest, Variable]]], Node] = user_function(step, "step of minimize", 1, _PAIRS)
    target = as_loss("minimize: the loss", loss)
    listed = nest.flatten(variables)[0]
    if loss_scale is not None:
        return scaled_step(target, listed, change, loss_scale)
    return change(zip(gradients(target, listed), listed, strict=True))
