"""Shapes given as arguments: ints where known, tensors where only a run knows them.

Such an argument becomes a plain attribute, the *template*, and inputs for its open extents: ``(2, n)`` is the template
``(2, None)`` with the input `n`. A whole shape in one vector is the template None with that vector as input.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any, SupportsIndex, TypeAlias

import numpy as np

from asyncflow.errors import DTypeError, ShapeError, brief
from asyncflow.graph.building.build import SupportsTensor, TensorLike, apply, as_tensor, is_symbolic
from asyncflow.graph.ir import Attrs, Tensor
from asyncflow.graph.op import Op
from asyncflow.graph.values.shapes import Shape, is_static
from asyncflow.graph.values.spec import Spec, known_int, known_value
from asyncflow.ops.arrays.known_values import static_value
from asyncflow.values import Array

Extent: TypeAlias = "SupportsIndex | Tensor | SupportsTensor"
ExtentsLike: TypeAlias = "Extent | Sequence[Extent]"


def split_extents(shape: ExtentsLike | None) -> tuple[Shape, tuple[Tensor, ...]]:
    """The template of a shape argument and the tensors it leaves open.

    Args:
        shape: an int, an integer tensor of rank 0 or 1, or a sequence of ints and integer tensors of rank 0.

    Raises:
        ShapeError: a negative or unknown extent, or an unknown rank.
        DTypeError: an extent that is no integer.
    """
    if is_symbolic(shape):
        whole = _integer(as_tensor(shape))
        known = static_value(whole)
        if known is not None:
            return tuple(_extent(int(item)) for item in np.atleast_1d(known)), ()
        if whole.ndim == 0:
            return (None,), (whole,)
        if whole.ndim not in (1, None):
            raise ShapeError(f"a shape is an integer tensor of rank 1; {whole!r} has rank {whole.ndim}")
        return None, (whole,)
    if shape is None:
        raise ShapeError("the shape is None, of unknown rank while the graph is built; take it from af.shape(x)")
    given: Any = shape.tolist() if isinstance(shape, np.ndarray) else shape
    try:
        listed = [given] if isinstance(given, SupportsIndex) else list(given)
    except TypeError:
        raise ShapeError(f"a shape is an int, a sequence of ints, or a tensor; got {brief(shape)}") from None
    items = [_scalar(x) if is_symbolic(x) else _extent(x) for x in listed]
    template = tuple(None if isinstance(item, Tensor) else item for item in items)
    return template, tuple(item for item in items if isinstance(item, Tensor))


def template_shape(template: Shape, sizes: Sequence[Spec]) -> Shape:
    """Return the shape that a template and its inputs describe, as far as known."""
    if template is not None:
        rest = iter(sizes)
        return tuple(known_int(next(rest)) if extent is None else extent for extent in template) if sizes else template
    (vector,) = sizes
    if (value := known_value(vector)) is not None:
        return tuple(value.tolist())
    length = vector.shape[0] if vector.shape else None
    return None if length is None else (None,) * length


def in_given_shape(x: Spec, *sizes: Spec, shape: Shape, **attrs: object) -> Spec:
    """Return the spec of an op of one value whose result has a given shape and the value's dtype; a shape rule."""
    return Spec(x.dtype, template_shape(shape, sizes))


def apply_to_shape(op: Op, shape: ExtentsLike, *inputs: TensorLike, **attrs: object) -> Tensor:
    """The result of an op that is told a shape: its template as an attribute, and what that leaves open behind all."""
    template, sizes = split_extents(shape)
    given: Attrs = {**attrs, "shape": template}
    return apply(op, *inputs, *sizes, **given)[0]


def brought_to_shape(op: Op, x: Tensor, shape: ExtentsLike) -> Tensor:
    """The result of an op that brings a value to a shape; `x` itself if that is known to be its own."""
    template, sizes = split_extents(shape)
    # Extents that only a run knows may differ, though they look alike here.
    if is_static(template) and x.shape == template:
        return x
    return apply(op, x, *sizes, shape=template)[0]


def shape_reader(template: Shape) -> Callable[[Sequence[Array]], tuple[int, ...]]:
    """A function from the values of the inputs to the shape."""
    if template is None:
        return lambda sizes: tuple(int(item) for item in sizes[0].tolist())
    if None not in template:
        fixed = tuple(item for item in template if item is not None)
        return lambda sizes: fixed

    def read(sizes: Sequence[Array]) -> tuple[int, ...]:
        rest = iter(sizes)
        return tuple(int(next(rest)) if item is None else item for item in template)

    return read


def _scalar(x: Tensor | SupportsTensor) -> Tensor | int:
    tensor = _integer(as_tensor(x))
    if tensor.ndim not in (0, None):
        raise ShapeError(f"an extent is an integer tensor of rank 0; {tensor!r} has rank {tensor.ndim}")
    known = static_value(tensor)
    return tensor if known is None else _extent(int(known))


def _integer(x: Tensor) -> Tensor:
    if x.dtype.kind not in "iu":
        raise DTypeError(f"a shape holds integers; {x!r} does not")
    return x


def _extent(value: object) -> int:
    if value is None:
        raise ShapeError("an extent is None, not known while the graph is built; take it from af.shape(x) instead")
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise DTypeError(f"a shape holds integers, not {value!r}")
    extent = operator.index(value)
    if extent < 0:
        raise ShapeError(f"an extent is not negative; got {extent}")
    if extent > sys.maxsize:  # a run would find out, too, but without the line that built the node
        raise ShapeError(f"an extent is at most {sys.maxsize}; got {extent:.3g}")
    return extent
