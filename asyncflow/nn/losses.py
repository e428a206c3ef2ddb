"""Losses, given for each example: what to do with the examples (`mean`, `masked_mean`, weights) is up to the caller."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncflow.errors import DTypeError, ShapeError, user_location
from asyncflow.graph.build import as_tensor, graph_for
from asyncflow.graph.shapes import format_shape, is_compatible
from asyncflow.ops.elementwise import multiply, negative, square, subtract
from asyncflow.ops.indexing import take_along_axis
from asyncflow.ops.manipulation import expand_dims, squeeze
from asyncflow.ops.nn import log_softmax, softplus
from asyncflow.ops.promotion import kind_of
from asyncflow.ops.statistical import mean, sum

if TYPE_CHECKING:
    from asyncflow.graph.build import TensorLike
    from asyncflow.graph.ir import Tensor
    from asyncflow.ops.axes import Axes


def softmax_cross_entropy(logits: TensorLike, labels: TensorLike) -> Tensor:
    """``-log(softmax(logits))`` at the label, or the mean of it over a distribution of labels; exact where it is small.

    Args:
        logits: floats, ``(..., classes)``.
        labels: integers ``(...)``, the number of the class, from 0; or floats of the shape and dtype of `logits`, the
            weight of every class, such as `one_hot` gives.

    Returns:
        ``(...)``, of the dtype of `logits`.

    Raises:
        DTypeError, ShapeError: `labels` are neither.
        IndexError: (in the run on a CPU, as the cause of a KernelError) a label of `classes` or more.
    """
    with graph_for(logits, labels):
        x, y = as_tensor(logits), as_tensor(labels)
        if kind_of(y.dtype) in "iu":
            if x.shape is not None and not is_compatible(y.shape, x.shape[:-1]):
                raise _unfit(x, y)
            picked = take_along_axis(log_softmax(x), expand_dims(y, axis=-1), axis=-1)
            return negative(squeeze(picked, axis=-1))
        if y.dtype != x.dtype:
            raise DTypeError(
                f"softmax_cross_entropy: labels are integers, or floats of the dtype of the logits; got {y!r} for {x!r}"
                f"\n  written at {user_location()}"
            )
        if not is_compatible(x.shape, y.shape):
            raise _unfit(x, y)
        return negative(sum(multiply(y, log_softmax(x)), axis=-1))


def _unfit(logits: Tensor, labels: Tensor) -> ShapeError:
    return ShapeError(
        f"softmax_cross_entropy: logits of shape {format_shape(logits.shape)} need integer labels of all its axes but "
        f"the last, or floats of its shape; got {labels!r}\n  written at {user_location()}"
    )


def sigmoid_cross_entropy(logits: TensorLike, labels: TensorLike) -> Tensor:
    """``-z log(σ(x)) - (1 - z) log(1 - σ(x))`` for logits x and labels z, element by element; exact where it is small.

    Args:
        logits: floats.
        labels: of the same dtype, from 0 to 1; they broadcast with `logits`.
    """
    with graph_for(logits, labels):
        x, z = as_tensor(logits), as_tensor(labels)
        # Two terms without a difference of large numbers, whose derivatives are exact, too.
        return z * softplus(negative(x)) + (1 - z) * softplus(x)


def mean_squared_error(predictions: TensorLike, targets: TensorLike, *, axis: Axes = None) -> Tensor:
    """The mean of ``(predictions - targets)**2`` over `axis`, over everything if it is None.

    Args:
        predictions: floats.
        targets: likewise; they broadcast together.
        axis: an axis or several.
    """
    return mean(square(subtract(predictions, targets)), axis=axis)


__all__ = ["mean_squared_error", "sigmoid_cross_entropy", "softmax_cross_entropy"]
