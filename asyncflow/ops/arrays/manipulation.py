"""Manipulation functions: other shapes and orders of the same elements."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeAlias

import numpy as np

from asyncflow.errors import GraphError, ShapeError
from asyncflow.graph.building.build import TensorLike, apply, as_tensor, graph_for, is_symbolic
from asyncflow.graph.ir import Attrs, Tensor
from asyncflow.graph.op import KERNELS, NEW, OPAQUE, WHOLE_VIEW, Memory, Op, Traits, define, inputs_from
from asyncflow.graph.values.dtypes import int64
from asyncflow.graph.values.shapes import Shape, format_shape, normalize_axis
from asyncflow.graph.values.spec import Spec, known_value
from asyncflow.ops.arrays.known_values import static_value
from asyncflow.ops.axes import Axes, as_axes, flat_extent, normalize_axes, replaced, static_int
from asyncflow.ops.cost import free
from asyncflow.ops.promotion import promote_operands, promoted_dtype, require_kind
from asyncflow.values import Array, Kernel, Namespace, Value

Dims: TypeAlias = tuple[int | None, ...]


# -- joining ---------------------------------------------------------------------------------------------------------


def _concat_spec(*xs: Spec, axis: int | None) -> Spec:
    dtype = promoted_dtype(x.dtype for x in xs)
    if axis is None:
        return Spec(dtype, (_total(flat_extent(x.shape) for x in xs),))
    shapes = [x.shape for x in xs if x.shape is not None]
    if not shapes:
        return Spec(dtype)
    rank = len(shapes[0])
    if any(len(shape) != rank for shape in shapes):
        raise ShapeError(f"joined values must have one rank, got {_listed(xs)}")
    at = normalize_axis(axis, rank)
    rest = [_agreed([shape[i] for shape in shapes], xs) if i != at else None for i in range(rank)]
    rest[at] = _total(shape[at] for shape in shapes) if len(shapes) == len(xs) else None
    return Spec(dtype, tuple(rest))


def _total(extents: Iterable[int | None]) -> int | None:
    listed = list(extents)
    known = [extent for extent in listed if extent is not None]
    return sum(known) if len(known) == len(listed) else None


def _agreed(dims: list[int | None], xs: Sequence[Spec]) -> int | None:
    known = {dim for dim in dims if dim is not None}
    if len(known) > 1:
        raise ShapeError(f"joined values must have equal extents along the other axes, got {_listed(xs)}")
    return known.pop() if known else None


def _listed(xs: Sequence[Spec]) -> str:
    return ", ".join(format_shape(x.shape) for x in xs)


def _stack_spec(*xs: Spec, axis: int) -> Spec:
    dtype = promoted_dtype(x.dtype for x in xs)
    shapes = [x.shape for x in xs if x.shape is not None]
    if not shapes:
        return Spec(dtype)
    if any(len(shape) != len(shapes[0]) for shape in shapes):
        raise ShapeError(f"stacked values must have one shape, got {_listed(xs)}")
    dims: list[int | None] = [_agreed([shape[i] for shape in shapes], xs) for i in range(len(shapes[0]))]
    dims.insert(normalize_axis(axis, len(dims) + 1), len(xs))
    return Spec(dtype, tuple(dims))


def _concat_kernel(xp: Namespace, *, axis: int | None) -> Kernel:
    def concat(*xs: Array, out: Array | None = None) -> Array:
        return xp.concatenate(xs, axis=axis, out=out)

    concat.takes_out = True  # type: ignore[attr-defined]
    return concat


CONCAT = define("concat", _concat_spec, _concat_kernel, rows="axis", traits=NEW)
STACK = define("stack", _stack_spec, lambda xp, axis: lambda *xs: xp.stack(xs, axis=axis), rows="axis", traits=NEW)


def concat(arrays: Sequence[TensorLike], /, *, axis: int | None = 0) -> Tensor:
    """Join `arrays` along an existing axis; None flattens them first. Their dtypes promote.

    Raises:
        ShapeError: other axes differ in extent.
        GraphError: there are no arrays.
    """
    return _join(CONCAT, arrays, None if axis is None else static_int(axis, "axis"))


def stack(arrays: Sequence[TensorLike], /, *, axis: int = 0) -> Tensor:
    """`arrays`, all of one shape, joined along a new axis. Their dtypes promote.

    Raises:
        ShapeError: their shapes differ.
        GraphError: there are no arrays.
    """
    return _join(STACK, arrays, static_int(axis, "axis"))


def _join(op: Op, arrays: Sequence[TensorLike], axis: int | None) -> Tensor:
    listed = list(arrays)
    if not listed:
        raise GraphError(f"{op.name} needs at least one array")
    return apply(op, *promote_operands(*listed), axis=axis)[0]


def _unstack_spec(x: Spec, *, axis: int, num: int | None = None) -> tuple[Spec, ...]:
    if x.shape is None:
        if num is not None:
            return (Spec(x.dtype),) * num
        raise ShapeError("the length of the result must be known while the graph is built; this rank is not")
    at = normalize_axis(axis, len(x.shape))
    extent = num if x.shape[at] is None else x.shape[at]
    if extent is None:
        raise ShapeError(
            f"the length of the result must be known while the graph is built, but axis {axis} of "
            f"{format_shape(x.shape)} is not; give num=, or loop over it with af.map_fn or af.scan"
        )
    if num is not None and num != extent:
        raise ShapeError(f"num={num}, but axis {axis} of {format_shape(x.shape)} has {extent} slices")
    return (Spec(x.dtype, x.shape[:at] + x.shape[at + 1 :]),) * extent


def _unstack_kernel(xp: Namespace, *, axis: int, num: int | None = None) -> Kernel:
    def kernel(x: Array) -> tuple[Array, ...]:
        parts = xp.moveaxis(x, axis, 0)
        if num is not None and len(parts) != num:
            raise ValueError(f"unstack: num={num}, but axis {axis} of {format_shape(x.shape)} has {len(parts)} slices")
        # The ellipsis keeps each part an array: one string would otherwise be a Python str.
        return tuple(parts[i, ...] for i in range(len(parts)))

    return kernel


UNSTACK = define("unstack", _unstack_spec, _unstack_kernel, flops=free, rows="axis", traits=KERNELS)


def unstack(x: TensorLike, /, *, axis: int = 0, num: int | None = None) -> tuple[Tensor, ...]:
    """Return the slices of `x` along `axis`, without that axis.

    Args:
        x: of rank 1 or more.
        axis: along which it is cut.
        num: number of slices, where the extent of `axis` is not known while the graph is built; the run checks it.

    Raises:
        ShapeError: the extent of `axis` is not known and `num` is not given, or `num` is another one.
    """
    given: Attrs = {} if num is None else {"num": static_int(num, "num")}
    if given.get("num", 0) < 0:
        raise ShapeError(f"unstack: num is not negative; got {num}")
    return apply(UNSTACK, x, axis=static_int(axis, "axis"), **given)


# -- axes ------------------------------------------------------------------------------------------------------------


def _expand_dims_spec(x: Spec, *, axis: tuple[int, ...]) -> Spec:
    if x.shape is None:
        return x
    new = normalize_axes(axis, len(x.shape) + len(axis))
    rest = iter(x.shape)
    return Spec(x.dtype, tuple(1 if i in new else next(rest) for i in range(len(x.shape) + len(axis))))


def _expand_dims_kernel(xp: Namespace, *, axis: tuple[int, ...]) -> Kernel:
    if not axis or min(axis) < 0 <= max(axis):
        return partial(xp.expand_dims, axis=axis)
    # Indexing with None is the same, ten times as fast.
    front = min(axis) >= 0
    positions = range(max(axis) + 1) if front else range(min(axis), 0)
    key = tuple(None if i in axis else slice(None) for i in positions)
    return operator.itemgetter(key if front else (..., *key))


def view_op(name: str, infer: Callable[..., Spec], kernel: Callable[..., Kernel]) -> Op:
    """Define an op whose result is another name for the memory of its input."""
    return define(name, infer, kernel, is_total=True, flops=free, traits=WHOLE_VIEW)


EXPAND_DIMS = view_op("expand_dims", _expand_dims_spec, _expand_dims_kernel)


def expand_dims(x: TensorLike, /, axis: int | tuple[int, ...] = 0) -> Tensor:
    """`x` with new axes of extent 1 at the positions `axis` of the result."""
    axes = as_axes(axis)
    return apply(EXPAND_DIMS, x, axis=axes if isinstance(axes, tuple) else (axes,))[0]


def _squeeze_spec(x: Spec, *, axis: tuple[int, ...]) -> Spec:
    if x.shape is None:
        return x
    axes = normalize_axes(axis, len(x.shape))
    if any(x.shape[i] not in (1, None) for i in axes):
        raise ShapeError(f"only axes of extent 1 can be dropped, not axis {axis} of {format_shape(x.shape)}")
    return Spec(x.dtype, tuple(dim for i, dim in enumerate(x.shape) if i not in axes))


SQUEEZE = view_op("squeeze", _squeeze_spec, lambda xp, axis: operator.methodcaller("squeeze", axis))


def squeeze(x: TensorLike, /, axis: int | tuple[int, ...]) -> Tensor:
    """`x` without the axes `axis`, which have extent 1.

    Raises:
        ShapeError: another extent.
    """
    axes = as_axes(axis)
    return apply(SQUEEZE, x, axis=axes if isinstance(axes, tuple) else (axes,))[0]


def _permute_spec(x: Spec, *, axes: tuple[int, ...]) -> Spec:
    order = normalize_axes(axes, len(axes))  # refuses repeated axes, even if the rank is unknown
    if x.shape is None:
        return Spec(x.dtype, (None,) * len(axes))
    if len(axes) != len(x.shape):
        raise ShapeError(f"axes {axes} must name every axis of {format_shape(x.shape)} once")
    return Spec(x.dtype, tuple(x.shape[i] for i in order))


PERMUTE_DIMS = view_op("permute_dims", _permute_spec, lambda xp, axes: operator.methodcaller("transpose", axes))


def permute_dims(x: TensorLike, /, axes: Sequence[int]) -> Tensor:
    """Return `x` with the axes reordered: axis ``i`` of the result is axis ``axes[i]`` of `x`."""
    return apply(PERMUTE_DIMS, x, axes=tuple(static_int(axis, "an axis") for axis in axes))[0]


def moveaxis(x: TensorLike, source: int | tuple[int, ...], destination: int | tuple[int, ...], /) -> Tensor:
    """`x` with axes moved from `source` to `destination`; the others keep their order.

    Args:
        x: a tensor of known rank.
        source: one axis or several.
        destination: where they go, as many.

    Raises:
        ShapeError: the rank of `x` is not known, or the axes do not pair up.
    """
    tensor = as_tensor(x)
    if tensor.ndim is None:
        raise ShapeError(f"moveaxis: {tensor!r} has an unknown rank; use permute_dims, whose axes say what the rank is")
    sources, targets = (normalize_axes(as_axes(axis), tensor.ndim) for axis in (source, destination))
    if len(sources) != len(targets):
        raise ShapeError(f"moveaxis: source {source} and destination {destination} must name equally many axes")
    order = [axis for axis in range(tensor.ndim) if axis not in sources]
    # In ascending order, so that a later insertion does not move an earlier one.
    for target, axis in sorted(zip(targets, sources, strict=True)):
        order.insert(target, axis)
    return permute_dims(tensor, order)


# -- reordering ------------------------------------------------------------------------------------------------------


def _flip_spec(x: Spec, *, axis: Axes) -> Spec:
    if x.shape is not None:
        normalize_axes(axis, len(x.shape))
    return x


FLIP = define(
    "flip",
    _flip_spec,
    lambda xp, axis: partial(xp.flip, axis=axis),
    flops=free,
    rows="axes",
    traits=Traits(Memory.WHOLE_VIEW, is_capturable=True, is_cheap=False),
)


def flip(x: TensorLike, /, *, axis: Axes = None) -> Tensor:
    """`x` in reverse order along `axis`, or along all axes."""
    return apply(FLIP, x, axis=as_axes(axis))[0]


def _roll_spec(x: Spec, by: Spec | None = None, *, shift: int | tuple[int, ...] | None, axis: Axes) -> Spec:
    if by is not None:
        require_kind(by, "iu", "an integer shift")
        count = len(axis) if isinstance(axis, tuple) else None
        if by.rank not in (None, 0, 1) or (by.rank == 1 and (count is None or by.shape not in ((count,), (None,)))):
            seen = f"axis {axis} and a shift of shape {format_shape(by.shape)}"
            raise ShapeError(f"a shift is a scalar, or a vector with a place for each of several axes; got {seen}")
    if isinstance(shift, tuple) and isinstance(axis, tuple) and len(shift) != len(axis):
        raise ShapeError(f"shift {shift} and axis {axis} must have one length")
    if isinstance(shift, tuple) and not isinstance(axis, tuple):
        raise ShapeError(f"several shifts {shift} need as many axes, got axis {axis}")
    if x.shape is not None and axis is not None:
        for item in axis if isinstance(axis, tuple) else (axis,):
            normalize_axis(item, len(x.shape))
    return x


def _roll_kernel(xp: Namespace, *, shift: int | tuple[int, ...] | None, axis: Axes) -> Kernel:
    if shift is None:
        return lambda x, by: xp.roll(x, _places(by, axis), axis)
    return partial(xp.roll, shift=shift, axis=axis)


def _places(by: Array, axis: Axes) -> int | tuple[int, ...]:
    if not np.ndim(by):
        return int(by)
    if not isinstance(axis, tuple) or len(by) != len(axis):
        raise ValueError(f"roll: {len(by)} shifts for axis {axis}")  # NumPy would add up the shifts along the same axis
    return tuple(by.tolist())


ROLL = define("roll", _roll_spec, _roll_kernel, host_inputs=inputs_from(1), traits=KERNELS)


def roll(x: TensorLike, /, shift: TensorLike, *, axis: Axes = None) -> Tensor:
    """`x` with elements moved `shift` places on along `axis`; those pushed out come in again at the other end.

    Args:
        x: any tensor.
        shift: an int, one int per axis, an integer scalar tensor, or a vector with an item per axis; ints in a tuple
            may be scalar tensors.
        axis: one axis, several, or None to roll the flattened `x`.
    """
    axes = as_axes(axis)
    if isinstance(shift, tuple | list) and any(map(is_symbolic, shift)):
        with graph_for(x, *shift):
            shift = stack(shift)
    if is_symbolic(shift):
        return apply(ROLL, x, shift, shift=None, axis=axes)[0]
    return apply(ROLL, x, shift=as_axes(shift), axis=axes)[0]


# -- repeating -------------------------------------------------------------------------------------------------------


def _repeat_spec(x: Spec, counts: Spec | None = None, *, repeats: int | None, axis: int | None) -> Spec:
    if repeats is not None and repeats < 0:
        raise ShapeError(f"repeats must be 0 or more, got {repeats}")
    shape: Shape = (flat_extent(x.shape),) if axis is None else x.shape
    at = 0 if axis is None else axis
    if counts is not None:
        _check_counts(counts, shape, at)
    if shape is None:
        return Spec(x.dtype)
    extent = shape[normalize_axis(at, len(shape))]
    each = repeats if counts is None else known_value(counts)
    # A single count, even as a vector of length 1, holds for all elements.
    longer = None if extent is None or each is None else int(np.broadcast_to(each, extent).sum())
    return Spec(x.dtype, replaced(shape, at, longer))


def _check_counts(counts: Spec, shape: Shape, axis: int) -> None:
    require_kind(counts, "iu", "integer repeats")
    if counts.shape is None or counts.shape == ():
        return
    if len(counts.shape) > 1:
        raise ShapeError(f"repeats must be a scalar or a vector, got {format_shape(counts.shape)}")
    (given,) = counts.shape
    extent = None if shape is None else shape[normalize_axis(axis, len(shape))]
    if given not in (None, 1) and extent not in (None, given):
        raise ShapeError(f"repeats names {given} counts for an axis of extent {extent}")


def _repeat_kernel(xp: Namespace, *, repeats: int | None, axis: int | None) -> Kernel:
    if repeats is not None:
        return partial(xp.repeat, repeats=repeats, axis=axis)
    if xp is np:  # NumPy refuses counts of uint64
        return lambda x, counts: np.repeat(x, counts.astype(int64), axis=axis)

    def take(x: Array, counts: Array) -> Array:
        # CuPy's `repeat` launches a kernel for each element.
        x = xp.asarray(x)
        whole, at = (x.reshape(-1), 0) if axis is None or not x.ndim else (x, axis)
        return xp.take(whole, xp.asarray(np.repeat(np.arange(whole.shape[at]), counts.astype(int64))), axis=at)

    return take


REPEAT = define("repeat", _repeat_spec, _repeat_kernel, host_inputs=inputs_from(1), traits=OPAQUE)


def repeat(x: TensorLike, repeats: TensorLike, /, *, axis: int | None = None) -> Tensor:
    """Each element of `x` several times in a row.

    Args:
        x: any tensor.
        repeats: how often: an int, or integers in a scalar or a vector with one count per element along `axis`.
        axis: along which to repeat; None flattens `x` first.
    """
    at = None if axis is None else static_int(axis, "axis")
    if isinstance(repeats, int | np.integer):
        return apply(REPEAT, x, repeats=static_int(repeats, "repeats"), axis=at)[0]
    with graph_for(x, repeats):
        return apply(REPEAT, x, repeats, repeats=None, axis=at)[0]


def _tile_spec(x: Spec, *, repetitions: tuple[int, ...]) -> Spec:
    if any(count < 0 for count in repetitions):
        raise ShapeError(f"repetitions must be 0 or more, got {repetitions}")
    if x.shape is None:
        return x
    rank = max(len(x.shape), len(repetitions))
    dims = (1,) * (rank - len(x.shape)) + x.shape
    counts = (1,) * (rank - len(repetitions)) + repetitions
    return Spec(x.dtype, tuple(None if d is None else d * n for d, n in zip(dims, counts, strict=True)))


TILE = define("tile", _tile_spec, lambda xp, repetitions: partial(xp.tile, reps=repetitions), traits=KERNELS)


def tile(x: TensorLike, repetitions: int | tuple[int, ...], /) -> Tensor:
    """Copies of `x` side by side, `repetitions` along each axis; the shorter of shape and counts is led by ones."""
    counts = as_axes(repetitions)
    return apply(TILE, x, repetitions=counts if isinstance(counts, tuple) else (counts,))[0]


# -- reshape ---------------------------------------------------------------------------------------------------------


def _reshape_spec(x: Spec, *, shape: tuple[int, ...], rule: str = "") -> Spec:
    """`rule`: the message if the elements do not fit, with ``{}`` for the shape; see `as_scalar`."""
    try:
        return Spec(x.dtype, _reshaped(x, shape))
    except ShapeError:
        if not rule:
            raise
        raise ShapeError(rule.format(format_shape(x.shape))) from None


def _reshape_kernel(xp: Namespace, *, shape: tuple[int, ...], rule: str = "") -> Kernel:
    reshaped = operator.methodcaller("reshape", shape)
    # Most reshapes have no rule, and a Python frame would take longer than the reshape itself.
    if not rule:
        return reshaped

    def kernel(x: Array) -> Value:
        try:
            found: Value = reshaped(x)
        except ValueError:
            # NumPy's message names a reshape that users never wrote: they passed a predicate.
            raise ValueError(rule.format(format_shape(x.shape))) from None
        return found

    return kernel


def _reshaped(x: Spec, dims: Dims) -> Shape:
    """The shape that `dims` (-1: the rest; None: only the run knows) give to `x`."""
    if dims.count(-1) > 1 or any(dim is not None and dim < -1 for dim in dims):
        raise ShapeError(f"a new shape holds non-negative ints and at most one -1, got {dims}")
    if None in dims:  # only the run knows the extent for -1, and whether the elements fill the shape
        return tuple(None if dim == -1 else dim for dim in dims)
    rest = math.prod(dim for dim in dims if dim is not None and dim != -1)
    size = flat_extent(x.shape)
    if size is not None and (size % rest if -1 in dims and rest else size != rest and -1 not in dims):
        raise ShapeError(f"{size} elements of {format_shape(x.shape)} do not fill a shape of {dims}")
    if -1 in dims and not rest:
        raise ShapeError(f"-1 in {dims} is undetermined if another extent is 0")
    return tuple((None if size is None else size // rest) if dim == -1 else dim for dim in dims)


RESHAPE = view_op("reshape", _reshape_spec, _reshape_kernel)


def _reshape_to_spec(x: Spec, shape: Spec, *, dims: Dims | None) -> Spec:
    require_kind(shape, "iu", "an integer shape")
    if shape.rank not in (None, 1):
        raise ShapeError(f"a shape must be a vector, got {format_shape(shape.shape)}")
    if (value := known_value(shape)) is not None:
        return Spec(x.dtype, _reshaped(x, tuple(value.tolist())))
    if dims is not None:
        return Spec(x.dtype, _reshaped(x, dims))
    count = None if shape.shape is None else shape.shape[0]
    return Spec(x.dtype, None if count is None else (None,) * count)


RESHAPE_TO = define(
    "reshape_to",
    _reshape_to_spec,
    lambda xp, dims: lambda x, shape: x.reshape(tuple(shape.tolist())),
    flops=free,
    host_inputs=(1,),
    traits=KERNELS,
)


def _known(dim: TensorLike) -> TensorLike:
    """An extent that is known while the graph is built, as an int; any other as it is."""
    known = static_value(dim) if isinstance(dim, Tensor) and dim.dtype.kind in "iu" and dim.ndim == 0 else None
    return dim if known is None else int(known)


def reshape(x: TensorLike, /, shape: TensorLike, *, copy: bool | None = None) -> Tensor:
    """`x` in another shape with as many elements, in row-major order.

    Args:
        x: any tensor.
        shape: ints, of which one may be -1 for "the rest" and any may be an integer scalar tensor; or an integer
            vector tensor, such as `asyncflow.shape` gives.
        copy: accepted for the standard's sake; values never change, so copies cannot be told apart.

    Raises:
        ShapeError: the number of elements does not fit.
    """
    if is_symbolic(shape):
        with graph_for(x, shape):
            vector = as_tensor(shape)
        known = static_value(vector) if vector.dtype.kind in "iu" and vector.ndim == 1 else None
        # With a known shape, the elements are counted here, not in each run.
        if known is None:
            return apply(RESHAPE_TO, x, vector, dims=None)[0]
        shape = known.tolist()
    listed = [_known(dim) for dim in (shape if isinstance(shape, Iterable) else [shape])]
    if not any(is_symbolic(dim) for dim in listed):
        return apply(RESHAPE, x, shape=tuple(static_int(dim, "an extent") for dim in listed))[0]
    dims = tuple(None if is_symbolic(dim) else static_int(dim, "an extent") for dim in listed)
    with graph_for(x, *listed):
        return apply(RESHAPE_TO, x, stack(listed), dims=dims)[0]


def as_scalar(x: Tensor, rule: str, name: str) -> Tensor:
    """Return `x` as a scalar; the run fails if it turns out to have several elements.

    Args:
        x: a tensor that may have one element.
        rule: the message of that failure, with ``{}`` for the shape.
        name: of the node.
    """
    return x if x.shape == () else apply(RESHAPE, x, shape=(), rule=rule, name=name)[0]
