"""Arguments of a cell: its input and the parts of its state, checked against one another and the weights.

Without these checks a wrong state would broadcast or be promoted, and the loss would be silently wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from asyncflow.errors import DTypeError, GraphError, ShapeError, brief
from asyncflow.graph.building.build import TensorLike, as_tensor
from asyncflow.graph.ir import Tensor
from asyncflow.graph.values import nest
from asyncflow.graph.values.dtypes import dtype_name
from asyncflow.graph.values.shapes import format_shape
from asyncflow.ops.promotion import kind_of

Weight: TypeAlias = Any
"""An array, a tensor or a `Variable` that a cell computes with. A second read finds the same object."""


def cell_arguments(
    what: str, x: TensorLike, state: Mapping[str, TensorLike], weights: Mapping[str, Tensor | None]
) -> list[Tensor]:
    """Return the input and the parts of the state as tensors: ``(batch, n_in)`` and ``(batch, hidden)``, or without
    `batch`.

    Args:
        what: names the cell in messages.
        x: the input.
        state: the parts of the state, by name.
        weights: tensors read from the weights, by name.

    Raises:
        DTypeError: the input is no float, or another has another dtype.
        ShapeError: extents that are known do not fit.
    """
    parts = {"x": as_tensor(x)}
    for name, part in state.items():
        if _is_nest(part):
            found = nest.describe(nest.flatten(part)[1])
            raise GraphError(f"{what}: its state {name} is one tensor; got {found}")
        parts[name] = as_tensor(part)
    _check_dtypes(what, {**parts, **{f"weights.{name}": x for name, x in weights.items() if x is not None}})
    _check_shapes(what, parts)
    return list(parts.values())


def pair(what: str, state: object) -> tuple[TensorLike, TensorLike]:
    """The two parts of a state.

    Raises:
        GraphError: it is no pair. A tensor with two rows is none either.
    """
    if not isinstance(state, tuple | list) or len(state) != 2:
        raise GraphError(f"{what}: its state is a pair (h, c), each of shape [batch,hidden]; got {brief(state)}")
    return state[0], state[1]


def check_weights(what: str, weights: object, kind: type) -> None:
    """Raises GraphError unless `weights` are of that class."""
    if not isinstance(weights, kind):
        raise GraphError(
            f"{what}: weights are {kind.__name__}, such as af.nn.{what.removesuffix('_cell')}_weights gives; got "
            f"{type(weights).__name__}"
        )


def _is_nest(part: object) -> bool:
    """Return True if `part` is several tensors; lists of numbers count as one tensor."""
    leaves, structure = nest.flatten(part)
    return structure.kind is not None and not all(isinstance(leaf, int | float) for leaf in leaves)


def _check_dtypes(what: str, tensors: Mapping[str, Tensor]) -> None:
    x = tensors["x"]
    if kind_of(x.dtype) != "f":
        raise DTypeError(f"{what}: x is floats; got {x!r}")
    for name, tensor in tensors.items():
        if tensor.dtype != x.dtype:
            raise DTypeError(
                f"{what}: x is {dtype_name(x.dtype)} and {name} is {dtype_name(tensor.dtype)}; all are of one dtype: "
                f"convert one with af.astype"
            )


def _check_shapes(what: str, tensors: Mapping[str, Tensor]) -> None:
    """Checks that each is a matrix, or each a vector, and that they agree on `batch` and `hidden`."""
    ranks = {len(tensor.shape) for tensor in tensors.values() if tensor.shape is not None}
    seen: dict[str, int] = {}
    for name, tensor in tensors.items():
        if (extents := tensor.shape) is None:
            continue
        axes = ("batch", "n_in" if name == "x" else "hidden")[-len(extents) :]
        if ranks not in ({1}, {2}) or any(
            extent is not None and seen.setdefault(axis, extent) != extent
            for axis, extent in zip(axes, extents, strict=True)
        ):
            shapes = ", ".join(f"{name} {format_shape(tensor.shape)}" for name, tensor in tensors.items())
            raise ShapeError(
                f"{what}: x is [batch,n_in] and its state [batch,hidden], or both are without batch; got {shapes}"
            )
