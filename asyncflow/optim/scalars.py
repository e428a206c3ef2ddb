"""Learning rates, bounds and other single numbers: what an option of a training step may be."""

from __future__ import annotations

from numbers import Real
from typing import TypeGuard

from asyncflow.errors import DTypeError, GraphError, ShapeError, brief
from asyncflow.graph.building.build import TensorLike, as_tensor, constant
from asyncflow.graph.ir import Tensor
from asyncflow.graph.values.dtypes import DType
from asyncflow.ops.arrays.datatypes import astype
from asyncflow.ops.promotion import is_weak, kind_of


def as_scalar(what: str, x: TensorLike, dtype: DType) -> Tensor:
    """A number or a scalar tensor as a tensor of that dtype; one of another dtype is converted.

    Args:
        what: names it in messages, such as ``sgd: learning_rate``.
        x: what the user gave.
        dtype: a float.

    Raises:
        DTypeError, ShapeError: it is neither.
    """
    rule = f"{what} is a number or a scalar tensor"
    if is_number(x) and is_weak(x):
        return constant(x, dtype)
    try:
        tensor = as_tensor(x)
    except DTypeError:
        raise DTypeError(f"{rule}; got {brief(x)}") from None
    if kind_of(tensor.dtype) not in "iuf":
        raise DTypeError(f"{rule}; got {brief(x)}")
    if tensor.shape not in ((), None):
        raise ShapeError(f"{rule}; got {brief(x)}")
    return as_dtype_of(tensor, dtype)


def as_dtype_of(x: Tensor, dtype: DType) -> Tensor:
    """Convert `x` if it has another dtype."""
    return x if x.dtype == dtype else astype(x, dtype)


def is_number(x: object) -> TypeGuard[int | float]:
    """Return True if `x` is a real number, of Python or NumPy, and no boolean."""
    return isinstance(x, Real) and not isinstance(x, bool)


def share(what: str, x: object) -> float:
    """The share of something that is kept from step to step.

    Raises:
        GraphError: it is no number, or not at least 0 and below 1.
    """
    if not is_number(x) or not 0 <= x < 1:
        raise GraphError(f"{what} is a number, at least 0 and below 1; got {brief(x)}")
    return float(x)
