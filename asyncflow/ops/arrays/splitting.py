"""`split`: the opposite of `concat`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TypeAlias

from asyncflow.errors import GraphError, ShapeError
from asyncflow.graph.building.build import TensorLike, apply
from asyncflow.graph.ir import Tensor
from asyncflow.graph.op import PARTS, define
from asyncflow.graph.values.shapes import format_shape, normalize_axis
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.axes import replaced, static_int
from asyncflow.ops.cost import free
from asyncflow.values import Array, Kernel, Namespace

Sections: TypeAlias = int | tuple[int, ...]


def _sizes(extent: int, sections: Sections) -> tuple[int, ...]:
    """The extents of the parts.

    Raises:
        ShapeError: they do not fill `extent`.
    """
    if isinstance(sections, int):
        if extent % sections:
            raise ShapeError(f"an extent of {extent} cannot be split into {sections} equal parts; give their sizes")
        return (extent // sections,) * sections
    rest = extent - sum(size for size in sections if size >= 0)
    if rest < 0 or (rest and -1 not in sections):
        raise ShapeError(f"parts of {list(sections)} do not fill an extent of {extent}")
    return tuple(rest if size == -1 else size for size in sections)


def _split_spec(x: Spec, *, sections: Sections, axis: int) -> tuple[Spec, ...]:
    count = sections if isinstance(sections, int) else len(sections)
    if x.shape is None:
        return (Spec(x.dtype),) * count
    if not x.shape:
        raise ShapeError(f"needs a value of rank 1 or more, got {format_shape(x.shape)}")
    extent = x.shape[normalize_axis(axis, len(x.shape))]
    if extent is not None:
        sizes: Sequence[int | None] = _sizes(extent, sections)
    elif isinstance(sections, int):
        sizes = (None,) * count
    else:
        sizes = tuple(None if size == -1 else size for size in sections)
    return tuple(Spec(x.dtype, replaced(x.shape, axis, size)) for size in sizes)


def _split_kernel(xp: Namespace, *, sections: Sections, axis: int) -> Kernel:
    def kernel(x: Array) -> tuple[Array, ...]:
        at = axis % x.ndim
        bounds = accumulate(_sizes(x.shape[at], sections), initial=0)
        return tuple(x[(slice(None),) * at + (slice(start, stop),)] for start, stop in pairwise(bounds))

    return kernel


SPLIT = define("split", _split_spec, _split_kernel, flops=free, rows="axis", traits=PARTS)


def split(x: TensorLike, sections: int | Sequence[int], /, *, axis: int = 0) -> tuple[Tensor, ...]:
    """Consecutive parts of `x` along `axis`, which `concat` puts together again.

    Args:
        x: any tensor of rank 1 or higher.
        sections: how many parts, all of one size; or the size of each, of which one may be -1 for "the rest". (NumPy
            takes the positions where to cut.)
        axis: along which to cut.

    Raises:
        ShapeError: the parts do not fill the axis; where its extent is not known, the run fails instead.
        GraphError: no parts, a size below -1, or several of -1.
    """
    listed = isinstance(sections, tuple | list)
    parts = tuple(static_int(size, "a size") for size in sections) if listed else static_int(sections, "sections")  # type: ignore[union-attr]
    if isinstance(parts, int):
        if parts < 1:
            raise GraphError(f"split: takes one part or more, got {parts}")
    elif not parts or min(parts) < -1 or parts.count(-1) > 1:
        raise GraphError(f"split: sizes are 0 or more, and at most one is -1 for the rest; got {list(parts)}")
    return apply(SPLIT, x, sections=parts, axis=static_int(axis, "axis"))
