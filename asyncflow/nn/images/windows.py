"""Arguments of convolution and pooling: layouts, and an int for each spatial axis."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Concatenate, ParamSpec, TypeAlias, get_args

from asyncflow.errors import GraphError, ShapeError, brief
from asyncflow.graph.building.build import TensorLike, as_tensor
from asyncflow.graph.ir import Tensor
from asyncflow.nn.images.layouts import Layout
from asyncflow.ops.arrays.manipulation import moveaxis
from asyncflow.ops.axes import static_int
from asyncflow.ops.promotion import published, require_kind

Sizes: TypeAlias = int | Sequence[int]
"""An int for all spatial axes, or an int for each."""

_P = ParamSpec("_P")


def by_rank(
    function: Callable[Concatenate[int, _P], Tensor],
) -> tuple[Callable[_P, Tensor], Callable[_P, Tensor], Callable[_P, Tensor]]:
    """Return the functions of a layer over one, two and three axes, given a function that takes that number first."""
    return _of_rank(function, 1), _of_rank(function, 2), _of_rank(function, 3)


def _of_rank(function: Callable[Concatenate[int, _P], Tensor], rank: int) -> Callable[_P, Tensor]:
    name = function.__name__.removeprefix("_")
    doc = function.__doc__ or ""
    if rank != 2:
        doc = f"Return what `{name}2d` gives, over {'one spatial axis' if rank == 1 else 'three spatial axes'}."

    def layer(*arguments: _P.args, **named: _P.kwargs) -> Tensor:
        return function(rank, *arguments, **named)

    layer.__annotations__ = {name: each for name, each in function.__annotations__.items() if name != "rank"}
    signature = inspect.signature(function)
    layer.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])  # type: ignore[attr-defined]
    return published(layer, function.__module__, f"{name}{rank}d", doc)


class Images:
    """The input of a layer, and its layout.

    Args:
        name: of the layer's functions, without the number of axes.
        rank: number of spatial axes.
        input: the images; kinds: of their dtype, as NumPy's characters, and `what` they are in words.
        layout: where the channels are.

    Attributes:
        x: the images, with channels in front of the spatial axes.
    """

    def __init__(self, name: str, rank: int, input: TensorLike, layout: str, kinds: str = "f", what: str = "floats"):
        self.name, self.rank = f"{name}{rank}d", rank
        fitting = [each for each in get_args(Layout) if len(each) in (4, rank + 2)]
        if layout not in fitting:
            raise GraphError(f"{self.name}: layout is one of {', '.join(fitting)}; got {brief(layout)}")
        self._is_last = layout[1] != "C"
        x = as_tensor(input)
        require_kind(x.spec, kinds, what)
        if x.ndim not in (None, rank + 1, rank + 2):
            raise ShapeError(f"{self.name}: input has {rank + 2} axes, or {rank + 1} without a batch; got {x!r}")
        if self._is_last and x.ndim is None:
            raise ShapeError(f"{self.name}: with layout={layout!r} the rank of the input is known; got {x!r}")
        self.x = moveaxis(x, -1, -1 - rank) if self._is_last else x

    def laid_out(self, y: Tensor) -> Tensor:
        """Return a result in the layout of the input."""
        return moveaxis(y, -1 - self.rank, -1) if self._is_last else y

    def sizes(self, what: str, value: object, least: int = 1) -> tuple[int, ...]:
        """Return an argument as an int for each axis.

        Raises:
            GraphError: it is something else, or an int is below `least`.
        """
        listed = list(value) if isinstance(value, list | tuple) else [value] * self.rank
        found = tuple(static_int(item, f"{self.name}: {what}") for item in listed)
        if len(found) != self.rank or any(item < least for item in found):
            raise GraphError(
                f"{self.name}: {what} is an int from {least} on, or {self.rank} of them; got {brief(value)}"
            )
        return found
