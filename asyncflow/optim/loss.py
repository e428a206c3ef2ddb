"""Losses: one float scalar."""

from __future__ import annotations

from asyncflow.errors import DTypeError, GraphError, ShapeError
from asyncflow.graph.building.build import as_tensor
from asyncflow.graph.ir import Tensor
from asyncflow.graph.values import nest
from asyncflow.ops.promotion import kind_of


def as_loss(what: str, value: object, advice: str = "") -> Tensor:
    """Convert `value` to a tensor, after a check that it can be differentiated.

    Args:
        what: names it in messages.
        value: what the user gave or returned.
        advice: added to the message if it is several values.

    Raises:
        GraphError, DTypeError, ShapeError: it is no float scalar. A shape that is not known may turn out to be one.
    """
    if nest.flatten(value)[1].kind is not None:
        raise GraphError(f"{what} is one tensor to differentiate; got {value!r}{advice}")
    tensor = as_tensor(value)
    if kind_of(tensor.dtype) != "f":
        raise DTypeError(f"{what} is {tensor!r}; only a float has a gradient")
    if tensor.shape not in ((), None):
        raise ShapeError(f"{what} is {tensor!r}; it must be a scalar: take its af.sum or af.mean")
    return tensor
