"""Windows: parts of fixed extents at places that only the run knows."""

from __future__ import annotations

from collections.abc import Iterable

from asyncflow.errors import ShapeError
from asyncflow.graph.building.build import TensorLike, apply, as_tensor, graph_for
from asyncflow.graph.ir import Tensor
from asyncflow.graph.op import PARTS, define, inputs_from
from asyncflow.graph.values.shapes import format_shape
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.axes import static_int
from asyncflow.ops.cost import free
from asyncflow.ops.indexing.indexing import getitem
from asyncflow.ops.promotion import require_kind
from asyncflow.values import Array, Kernel, Namespace


def _window_spec(x: Spec, *starts: Spec, sizes: tuple[int, ...]) -> Spec:
    for start in starts:
        require_kind(start, "iu", "integer starts")
        if start.shape not in ((), None):
            raise ShapeError(f"a start is an integer scalar, not {start}")
    if x.rank not in (None, len(sizes)):
        raise ShapeError(f"takes a start and a size for each axis of {format_shape(x.shape)}, got {len(sizes)}")
    for axis, (size, extent) in enumerate(zip(sizes, x.shape or (None,) * len(sizes), strict=True)):
        if size < 0 or (extent is not None and size > extent):
            raise ShapeError(f"a window of {size} does not fit axis {axis} of {format_shape(x.shape)}")
    return Spec(x.dtype, sizes)


def _window_kernel(xp: Namespace, *, sizes: tuple[int, ...]) -> Kernel:
    def cut(x: Array, *starts: Array) -> Array:
        if x.ndim != len(sizes):
            raise ValueError(f"takes a start and a size for each axis of {format_shape(x.shape)}, got {len(sizes)}")
        window = []
        for axis, (start, size) in enumerate(zip(map(int, starts), sizes, strict=True)):
            if not 0 <= start <= x.shape[axis] - size:
                raise IndexError(f"a window of {size} from {start} on leaves axis {axis} of {format_shape(x.shape)}")
            window.append(slice(start, start + size))
        return x[tuple(window)]

    return cut


DYNAMIC_SLICE = define(
    "dynamic_slice", _window_spec, _window_kernel, flops=free, host_inputs=inputs_from(1), traits=PARTS
)


def dynamic_slice(x: TensorLike, starts: TensorLike | Iterable[TensorLike], sizes: Iterable[int], /) -> Tensor:
    """Return the part of `x` with extents `sizes` that begins at `starts`, so that its shape is known though its place
    is not.

    ``x[i:i + 2]`` is shorter where `x` ends before, so its extent is not known; this is never shorter.

    Args:
        x: any tensor.
        starts: where it begins along each axis, from the front: integers and integer scalar tensors, or one integer
            vector of known length.
        sizes: extents, ints: one for each axis.

    Raises:
        ShapeError: `starts` or `sizes` are not one for each axis, or a size is larger than its axis.
        IndexError: (in the run, as the cause of a KernelError) the window does not lie within `x`.

    >>> import asyncflow as af
    >>> with af.Graph():
    ...     i = af.placeholder("int64", ())
    ...     dynamic_slice(af.placeholder("float32", (None, 8)), [i, 0], [2, 8])
    <Tensor dynamic_slice:0 float32[2,8]>
    """
    extents = tuple(static_int(size, "a size") for size in sizes)
    with graph_for(x, starts):
        if isinstance(starts, list | tuple):
            places = [as_tensor(start) for start in starts]
        else:
            vector = as_tensor(starts)
            if not vector.shape or len(vector.shape) != 1 or vector.shape[0] is None:
                raise ShapeError(f"dynamic_slice: starts are one vector of known length, or listed; got {vector!r}")
            places = [getitem(vector, axis) for axis in range(vector.shape[0])]
        if len(places) != len(extents):
            raise ShapeError(f"dynamic_slice: takes a size for each start; got {len(places)} starts, sizes {extents}")
        return apply(DYNAMIC_SLICE, x, *places, sizes=extents)[0]
