"""Losses, given for each example: what to do with the examples (`mean`, `masked_mean`, weights) is up to the caller."""

from __future__ import annotations

import numpy as np

from asyncflow.errors import DTypeError, ShapeError
from asyncflow.graph.building.build import TensorLike, apply, as_tensor, constant, graph_for
from asyncflow.graph.ir import Tensor
from asyncflow.graph.op import OPAQUE, define, not_differentiable
from asyncflow.graph.values.shapes import format_shape, is_compatible
from asyncflow.ops.arithmetic.elementwise import multiply, negative, square, subtract
from asyncflow.ops.arrays.datatypes import astype
from asyncflow.ops.arrays.manipulation import expand_dims, squeeze
from asyncflow.ops.axes import Axes
from asyncflow.ops.indexing.indexing import take_along_axis
from asyncflow.ops.layers.nn import log_softmax, softplus
from asyncflow.ops.promotion import is_weak, kind_of, same
from asyncflow.ops.reductions.statistical import mean, sum
from asyncflow.values import Array, Kernel, Namespace


def _class_numbers_kernel(xp: Namespace) -> Kernel:
    def check(labels: Array, scores: Array) -> Array:
        classes = scores.shape[-1]
        # A negative label would count from the last class. On GPUs labels wrap around, as checking would wait.
        if xp is np and labels.size and not 0 <= labels.min() <= labels.max() < classes:
            wrong = labels.min() if labels.min() < 0 else labels.max()
            raise IndexError(f"label {wrong} is no class: they are numbered from 0, and there are {classes}")
        return labels

    return check


CLASS_NUMBERS = define(
    "class_numbers",
    same,
    _class_numbers_kernel,
    rows_kernel=_class_numbers_kernel,
    rows="row by row",
    cuda="it looks at the numbers, and refuses some",
    traits=OPAQUE,
)
not_differentiable(CLASS_NUMBERS, because="labels are integers")


def softmax_cross_entropy(logits: TensorLike, labels: TensorLike) -> Tensor:
    """``-log(softmax(logits))`` at the label, or the mean of it over a distribution of labels; exact where it is small.

    Args:
        logits: floats, ``(..., classes)``.
        labels: integers ``(...)``, the number of the class, from 0, also where the loss is masked afterwards; or floats
            of the shape and dtype of `logits`, the weight of every class, such as `one_hot` gives.

    Returns:
        ``(...)``, of the dtype of `logits`.

    Raises:
        DTypeError, ShapeError: `labels` are neither.
        IndexError: (in the run on a CPU, as the cause of a KernelError) a label below 0, or of `classes` or more.
    """
    with graph_for(logits, labels):
        x, y = as_tensor(logits), as_tensor(labels)
        if kind_of(y.dtype) in "iu":
            if x.shape is not None and not is_compatible(y.shape, x.shape[:-1]):
                raise _unfit(x, y)
            scores = log_softmax(x)
            checked = apply(CLASS_NUMBERS, y, scores)[0]
            return negative(squeeze(take_along_axis(scores, expand_dims(checked, axis=-1), axis=-1), axis=-1))
        if y.dtype != x.dtype:
            raise DTypeError(
                f"softmax_cross_entropy: labels are integers, or floats of the dtype of the logits; got {y!r} for {x!r}"
            )
        if not is_compatible(x.shape, y.shape):
            raise _unfit(x, y)
        return negative(sum(multiply(y, log_softmax(x)), axis=-1))


def _unfit(logits: Tensor, labels: Tensor) -> ShapeError:
    return ShapeError(
        f"softmax_cross_entropy: logits of shape {format_shape(logits.shape)} need integer labels of all its axes but "
        f"the last, or floats of its shape; got {labels!r}"
    )


def sigmoid_cross_entropy(logits: TensorLike, labels: TensorLike) -> Tensor:
    """``-z log(σ(x)) - (1 - z) log(1 - σ(x))`` for logits x and labels z, element by element; exact where it is small.

    Args:
        logits: floats.
        labels: of the same dtype, from 0 to 1, or integers or booleans; they broadcast with `logits`.

    Returns:
        Of the dtype of `logits`, and the shape they broadcast to.

    Raises:
        DTypeError: `logits` are no floats, or `labels` floats of another dtype.
    """
    with graph_for(logits, labels):
        x = as_tensor(logits)
        if kind_of(x.dtype) != "f":
            raise DTypeError(f"sigmoid_cross_entropy: logits are floats; got {x!r}")
        z = constant(labels, x.dtype) if is_weak(labels) else as_tensor(labels)
        if kind_of(z.dtype) in "biu":
            z = astype(z, x.dtype)
        if z.dtype != x.dtype:
            raise DTypeError(
                f"sigmoid_cross_entropy: labels are of the dtype of the logits, or integers or booleans; got {z!r} for "
                f"{x!r}"
            )
        # Two terms without a difference of large numbers; their derivatives are exact, too.
        return z * softplus(negative(x)) + (1 - z) * softplus(x)


def mean_squared_error(predictions: TensorLike, targets: TensorLike, *, axis: Axes = None) -> Tensor:
    """Return the mean of ``(predictions - targets)**2`` over `axis`, or over all elements if it is None.

    Args:
        predictions: floats.
        targets: likewise; they broadcast together.
        axis: an axis or several.

    Returns:
        Of their dtype, with the axes that are left; a scalar if `axis` is None.
    """
    return mean(square(subtract(predictions, targets)), axis=axis)
