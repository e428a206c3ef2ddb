"""The spec of a value, known before the graph runs: its dtype and partial shape."""

from __future__ import annotations

from dataclasses import dataclass
from types import UnionType
from typing import Union, get_args, get_origin

from asyncflow.errors import GraphError
from asyncflow.graph.values.dtypes import DType, DTypeLike, as_dtype, dtype_name
from asyncflow.graph.values.shapes import Shape, ShapeLike, as_shape, format_shape, is_compatible
from asyncflow.values import Array


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


@dataclass(frozen=True, slots=True, eq=False)
class KnownSpec(Spec):
    """The spec of a value that is known: a size, bound or count, from which shape rules tell the shape of a result.

    A shapes-only simulation gives them to the rules of ops that read values on the host.
    """

    value: Array | None = None


def known_value(x: Spec) -> Array | None:
    """Return the value that a spec describes; None if only a run with data has it."""
    return x.value if isinstance(x, KnownSpec) else None


def known_int(x: Spec) -> int | None:
    """Return the integer that a spec describes; None if it is not known."""
    value = known_value(x)
    return None if value is None else int(value)


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


def specs_agree(inferred: Spec | tuple[Spec, ...], given: Spec | tuple[Spec, ...]) -> bool:
    """Return True if the outputs of a node can match the op's shape rule: same number and dtypes, fitting shapes."""
    if isinstance(inferred, Spec) and isinstance(given, Spec):
        return inferred.dtype == given.dtype and is_compatible(inferred.shape, given.shape)
    if not isinstance(inferred, tuple) or not isinstance(given, tuple) or len(inferred) != len(given):
        return False
    return all(map(specs_agree, inferred, given))


def show_specs(specs: Spec | tuple[Spec, ...]) -> str:
    """Format specs as an op's shape rule gives them: one, or a tuple in parentheses."""
    return f"({', '.join(map(str, specs))})" if isinstance(specs, tuple) else str(specs)
