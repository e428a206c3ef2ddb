"""What is known of a value before the graph runs: its dtype and partial shape."""

from __future__ import annotations

from dataclasses import dataclass
from types import UnionType
from typing import Union, get_args, get_origin

from asyncflow.errors import GraphError
from asyncflow.graph.dtypes import DType, DTypeLike, as_dtype, dtype_name
from asyncflow.graph.shapes import Shape, ShapeLike, as_shape, format_shape


@dataclass(frozen=True, slots=True)
class Spec:
    """Dtype and partial shape of a value; prints as ``float32[2,?]``."""

    dtype: DType
    shape: Shape = None

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)}{format_shape(self.shape)}"

    @property
    def rank(self) -> int | None:
        """Number of dimensions, or None if unknown."""
        return None if self.shape is None else len(self.shape)


def spec_of(annotation: object) -> Spec | None:
    """The description in an annotation: ``af.spec(...)`` itself, or one in ``Annotated[af.Tensor, af.spec(...)]``."""
    if isinstance(annotation, Spec):
        return annotation
    if get_origin(annotation) in (Union, UnionType):
        found = [each for each in map(spec_of, get_args(annotation)) if each is not None]
    else:
        described = getattr(annotation, "__metadata__", ())
        if any(each is spec for each in described):
            raise GraphError(
                "Annotated[..., af.spec] describes nothing; Annotated[af.Tensor, af.spec(dtype, shape)] does"
            )
        found = [each for each in described if isinstance(each, Spec)]
    if len(found) > 1:
        raise GraphError(f"an annotation describes one array; got {' and '.join(map(str, found))}")
    return found[0] if found else None


def spec(dtype: DTypeLike, shape: ShapeLike = None) -> Spec:
    """Describes a value by dtype and partial shape (None: unknown rank; None items: unknown extents).

    >>> str(spec("float32", (2, None)))
    'float32[2,?]'
    """
    return Spec(as_dtype(dtype), as_shape(shape))
