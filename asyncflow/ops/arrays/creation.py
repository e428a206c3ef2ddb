"""Creation functions of the Array API standard. Sizes and bounds may be tensors: then the run decides the shape.

`dtype` None is float64 where nothing else says one. `device`, such as ``"cpu"``, asks for the result to be made there;
None leaves that to `asyncflow.device` and the session.
"""

from __future__ import annotations

import math
import sys
from functools import partial
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from asyncflow.errors import DTypeError, GraphError, ShapeError, a_kind
from asyncflow.graph.building.build import TensorLike, apply, as_tensor, constant, graph_for, identity, is_symbolic
from asyncflow.graph.building.scopes import placed_on
from asyncflow.graph.ir import Tensor
from asyncflow.graph.op import KERNELS, define, inputs_from
from asyncflow.graph.values.dtypes import DType, DTypeLike, as_dtype, dtype_name, float64
from asyncflow.graph.values.operators import install
from asyncflow.graph.values.shapes import Shape, is_static
from asyncflow.graph.values.spec import Spec, known_value
from asyncflow.ops.arrays.datatypes import astype, broadcast_arrays
from asyncflow.ops.arrays.extents import Extent, ExtentsLike, shape_reader, split_extents, template_shape
from asyncflow.ops.arrays.known_values import KnownValues, assumed, conclusion, default_value
from asyncflow.ops.arrays.manipulation import reshape
from asyncflow.ops.axes import static_int
from asyncflow.ops.promotion import kind_of, promote_operands, promoted_dtype, require_kind, same

if TYPE_CHECKING:
    from typing_extensions import CapsuleType

    from asyncflow.values import Array, Kernel, Namespace


class SupportsDLPack(Protocol):
    """An array of another library that can be handed over in place."""

    def __dlpack__(self, *, stream: None = ...) -> CapsuleType:
        """The capsule."""

    def __dlpack_device__(self) -> tuple[int, int]:
        """Kind and number of the device that holds it."""


# -- one value everywhere --------------------------------------------------------------------------------------------


def _scalars(*inputs: Spec) -> None:
    for x in inputs:
        if x.rank not in (0, None):
            raise ShapeError(f"takes tensors of rank 0 here, not {x}")


def _full_spec(value: Spec, *sizes: Spec, shape: Shape) -> Spec:
    _scalars(value)
    return Spec(value.dtype, template_shape(shape, sizes))


def _full_kernel(xp: Namespace, *, shape: Shape) -> Kernel:
    read = shape_reader(shape)
    return lambda value, *sizes: xp.full(read(sizes), value, dtype=value.dtype)


def _full_like_spec(x: Spec, value: Spec) -> Spec:
    _scalars(value)
    return Spec(value.dtype, x.shape)


def _full_like_kernel(xp: Namespace) -> Kernel:
    return lambda x, value: xp.full(x.shape, value, dtype=value.dtype)


FULL = define("full", _full_spec, _full_kernel, host_inputs=inputs_from(1), traits=KERNELS)
FULL_LIKE = define("full_like", _full_like_spec, _full_like_kernel, traits=KERNELS)


def full(
    shape: ExtentsLike, fill_value: TensorLike, *, dtype: DTypeLike | None = None, device: str | None = None
) -> Tensor:
    """A tensor with `fill_value` everywhere.

    Args:
        shape: ints and integer tensors of rank 0, or one integer tensor of rank 1.
        fill_value: a number, or a tensor of rank 0.
        dtype: None takes that of `fill_value`.
        device: where to make it; None for no request.
    """
    template, sizes = split_extents(shape)
    value = _fill_value(fill_value, dtype)
    with placed_on(device):
        return apply(FULL, value, *sizes, shape=template)[0]


def full_like(
    x: TensorLike, /, fill_value: TensorLike, *, dtype: DTypeLike | None = None, device: str | None = None
) -> Tensor:
    """A tensor shaped like `x`, with `fill_value` everywhere.

    Args:
        x: any tensor; only its shape and dtype matter.
        fill_value: a scalar.
        dtype: of the result; None for that of `x`.
        device: where to make it; None for no request.
    """
    with graph_for(x):
        x = as_tensor(x)
        value = _fill_value(fill_value, x.dtype if dtype is None else dtype)
        with placed_on(device):
            # With a known shape, `x` is not an input: it need not be computed or kept.
            return apply(FULL, value, shape=x.shape)[0] if is_static(x.shape) else apply(FULL_LIKE, x, value)[0]


def _fill_value(value: TensorLike, dtype: DTypeLike | None) -> Tensor:
    if is_symbolic(value):
        return as_tensor(value) if dtype is None else astype(value, dtype)
    return constant(value, dtype)


def _number(value: Literal[0, 1], dtype: DTypeLike) -> Tensor:
    if kind_of(as_dtype(dtype)) not in "biufc":
        raise DTypeError(f"there is no {value} of dtype {dtype_name(as_dtype(dtype))}; use af.full")
    return constant(np.asarray(value).astype(as_dtype(dtype)))


def zeros(shape: ExtentsLike, *, dtype: DTypeLike | None = None, device: str | None = None) -> Tensor:
    """A tensor of zeros.

    Args:
        shape: as for `full`.
        dtype: of the result; None for float64.
        device: where to make it; None for no request.
    """
    return full(shape, _number(0, float64 if dtype is None else dtype), device=device)


def ones(shape: ExtentsLike, *, dtype: DTypeLike | None = None, device: str | None = None) -> Tensor:
    """Return a tensor of ones.

    Args:
        shape: as for `full`.
        dtype: of the result; None for float64.
        device: where to make it; None for no request.
    """
    return full(shape, _number(1, float64 if dtype is None else dtype), device=device)


def empty(shape: ExtentsLike, *, dtype: DTypeLike | None = None, device: str | None = None) -> Tensor:
    """A tensor whose values do not matter: zeros, because runs are reproducible.

    Args:
        shape: as for `full`.
        dtype: of the result; None for float64.
        device: where to make it; None for no request.
    """
    return zeros(shape, dtype=dtype, device=device)


def zeros_like(x: TensorLike, /, *, dtype: DTypeLike | None = None, device: str | None = None) -> Tensor:
    """Zeros shaped like `x`.

    Args:
        x: any tensor; only its shape and dtype matter.
        dtype: of the result; None for that of `x`.
        device: where to make it; None for no request.
    """
    with graph_for(x):
        x = as_tensor(x)
        return full_like(x, _number(0, dtype or x.dtype), dtype=dtype, device=device)


def ones_like(x: TensorLike, /, *, dtype: DTypeLike | None = None, device: str | None = None) -> Tensor:
    """Return ones shaped like `x`.

    Args:
        x: any tensor; only its shape and dtype matter.
        dtype: of the result; None for that of `x`.
        device: where to make it; None for no request.
    """
    with graph_for(x):
        x = as_tensor(x)
        return full_like(x, _number(1, dtype or x.dtype), dtype=dtype, device=device)


def empty_like(x: TensorLike, /, *, dtype: DTypeLike | None = None, device: str | None = None) -> Tensor:
    """A tensor shaped like `x` whose values do not matter.

    Args:
        x: any tensor; only its shape and dtype matter.
        dtype: of the result; None for that of `x`.
        device: where to make it; None for no request.
    """
    return zeros_like(x, dtype=dtype, device=device)


# -- ranges ----------------------------------------------------------------------------------------------------------


def _arange_spec(start: Spec, stop: Spec, step: Spec, *, dtype: DType, length: int | None) -> Spec:
    _scalars(start, stop, step)
    for bound in (start, stop, step):
        require_kind(bound, "iuf", "real numbers")
    known = _length(known_value(start), known_value(stop), known_value(step)) if length is None else length
    return Spec(dtype, (known,))


def _arange_kernel(xp: Namespace, *, dtype: DType, length: int | None) -> Kernel:
    return lambda start, stop, step: xp.arange(start.item(), stop.item(), step.item(), dtype=dtype)


ARANGE = define("arange", _arange_spec, _arange_kernel, host_inputs=inputs_from(0), traits=KERNELS)


def arange(
    start: TensorLike,
    /,
    stop: TensorLike | None = None,
    step: TensorLike = 1,
    *,
    dtype: DTypeLike | None = None,
    device: str | None = None,
) -> Tensor:
    """Evenly spaced values ``start, start + step, …`` up to but not including `stop`, as a vector.

    Args:
        start: first value; the only argument is taken for `stop`, and `start` is 0.
        stop: where to stop.
        step: distance; not 0. Any of the three may be a tensor of rank 0, then only the run knows the length.
        dtype: None takes the promoted dtype of the three.
        device: where to make it; None for no request.

    Raises:
        GraphError: a step of 0, or an infinite or undefined length.
        ShapeError: more elements than an array can have.
    """
    if stop is None:
        start, stop = 0, start
    bounds = promote_operands(start, stop, step)
    found = promoted_dtype(bound.dtype for bound in bounds) if dtype is None else as_dtype(dtype)
    with placed_on(device):
        # NumPy would raise in the run, too, but without the line that built the node.
        step_value = default_value(bounds[2])
        if step_value is not None and step_value.size == 1 and step_value.item() == 0:
            raise GraphError("arange: the step is 0, so the values never reach the stop")
        try:
            length = assumed(_LENGTH, *bounds)
        except (OverflowError, ValueError):
            seen = ", ".join(str(value.item()) for value in map(default_value, bounds) if value is not None)
            raise GraphError(f"arange: start, stop and step are finite numbers; got {seen}") from None
        if length is not None and length > sys.maxsize:
            raise ShapeError(f"arange: a vector has at most {sys.maxsize} elements; these would be {length:.3g}")
        return apply(ARANGE, *bounds, dtype=found, length=length)[0]


_LENGTH = "length of arange"


@conclusion(_LENGTH)
def _arange_length(known: KnownValues, *bounds: Tensor) -> int | None:
    return _length(*map(known.value, bounds))


def _length(*bounds: Array | None) -> int | None:
    numbers = [value.item() for value in bounds if value is not None and value.size == 1 and value.dtype.kind != "c"]
    if len(numbers) < 3 or numbers[2] == 0:
        return None
    start, stop, step = numbers
    # Count in floats, as NumPy does: if rounding passes the stop, both get one more element.
    length: int = math.ceil((stop - start) / step)
    return max(0, length)


def _linspace_spec(start: Spec, stop: Spec, *size: Spec, num: Shape, dtype: DType, endpoint: bool) -> Spec:
    _scalars(start, stop)
    for bound in (start, stop):
        require_kind(bound, "biufc", "numbers")
    return Spec(dtype, template_shape(num, size))


def _linspace_kernel(xp: Namespace, *, num: Shape, dtype: DType, endpoint: bool) -> Kernel:
    read = shape_reader(num)
    return lambda start, stop, *size: xp.linspace(start, stop, *read(size), endpoint=endpoint, dtype=dtype)


# On the host: CuPy waits to inspect array steps, and rounds differently.
LINSPACE = define("linspace", _linspace_spec, _linspace_kernel, runs_on_host=True)


def linspace(
    start: TensorLike,
    stop: TensorLike,
    /,
    num: Extent,
    *,
    dtype: DTypeLike | None = None,
    device: str | None = None,
    endpoint: bool = True,
) -> Tensor:
    """`num` evenly spaced values from `start` to `stop`, as a vector.

    Args:
        start: first value, rank 0.
        stop: last value, rank 0; left out if not `endpoint`.
        num: how many; an int or an integer tensor of rank 0.
        dtype: None takes the promoted dtype of `start`, `stop` and a Python float.
        device: where to make it; None for no request.
        endpoint: whether `stop` is the last value.
    """
    bounds = promote_operands(start, stop)
    common = promoted_dtype([*(x.dtype for x in bounds), 1.0])
    found = common if dtype is None else as_dtype(dtype)
    template, size = split_extents((num,))
    if common.name != "bfloat16":  # NumPy cannot promote bfloat16 with other dtypes
        bounds = tuple(astype(x, common) if x.dtype.name == "bfloat16" else x for x in bounds)
    with placed_on(device):
        return apply(LINSPACE, *bounds, *size, num=template, dtype=found, endpoint=endpoint)[0]


# -- matrices and grids ----------------------------------------------------------------------------------------------


def _eye_spec(*sizes: Spec, shape: Shape, k: int, dtype: DType) -> Spec:
    return Spec(dtype, template_shape(shape, sizes))


def _eye_kernel(xp: Namespace, *, shape: Shape, k: int, dtype: DType) -> Kernel:
    read = shape_reader(shape)
    return lambda *sizes: xp.eye(*read(sizes), k=k, dtype=dtype)


EYE = define("eye", _eye_spec, _eye_kernel, host_inputs=inputs_from(0), traits=KERNELS)


def eye(
    n_rows: Extent,
    n_cols: Extent | None = None,
    /,
    *,
    k: int = 0,
    dtype: DTypeLike | None = None,
    device: str | None = None,
) -> Tensor:
    """Return a matrix with ones on diagonal `k` (above the main one if positive) and zeros elsewhere.

    Args:
        n_rows: an int or an integer tensor of rank 0.
        n_cols: likewise; None for a square matrix.
        k: which diagonal, an int.
        dtype: element type.
        device: where to make it; None for no request.
    """
    found = as_dtype(float64 if dtype is None else dtype)
    if kind_of(found) not in "biufc":
        raise DTypeError(f"eye: takes a dtype of numbers, not {dtype_name(found)}")
    template, sizes = split_extents((n_rows, n_rows if n_cols is None else n_cols))
    with placed_on(device):
        return apply(EYE, *sizes, shape=template, k=static_int(k, "k"), dtype=found)[0]


def _triangle_spec(x: Spec, *, k: int) -> Spec:
    require_kind(x, "biufc", "numbers")
    if x.rank is not None and x.rank < 2:
        raise ShapeError(f"takes a matrix or a stack of them, rank 2 or more; got {x}")
    return same(x)


TRIL = define("tril", _triangle_spec, lambda xp, k: partial(xp.tril, k=k), rows="matrices", traits=KERNELS)
TRIU = define("triu", _triangle_spec, lambda xp, k: partial(xp.triu, k=k), rows="matrices", traits=KERNELS)


def tril(x: TensorLike, /, *, k: int = 0) -> Tensor:
    """The lower triangle of the last two axes, with zeros above diagonal `k`."""
    return apply(TRIL, x, k=static_int(k, "k"))[0]


def triu(x: TensorLike, /, *, k: int = 0) -> Tensor:
    """The upper triangle of the last two axes, with zeros below diagonal `k`."""
    return apply(TRIU, x, k=static_int(k, "k"))[0]


def meshgrid(*arrays: TensorLike, indexing: Literal["xy", "ij"] = "xy") -> list[Tensor]:
    """Coordinate grids of vectors: one tensor a vector, all of the shape their extents span.

    Args:
        arrays: vectors, or scalars that count as vectors of one.
        indexing: ``"ij"`` puts vector `i` along axis `i`; ``"xy"`` swaps the first two axes.
    """
    if indexing not in ("xy", "ij"):
        raise GraphError(f"meshgrid(indexing={indexing!r}): indexing must be 'xy' or 'ij'")
    with graph_for(*arrays):
        vectors = [as_tensor(x) for x in arrays]
        for x in vectors:
            if x.ndim not in (0, 1, None):
                raise ShapeError(f"meshgrid: takes vectors, not {x!r}")
        axes = list(range(len(vectors)))
        if indexing == "xy":
            axes[:2] = axes[1::-1]  # also correct for a single vector
        columns = [reshape(x, (-1,) + (1,) * (len(axes) - 1 - axis)) for x, axis in zip(vectors, axes, strict=True)]
        return broadcast_arrays(*columns)


# -- from other arrays -----------------------------------------------------------------------------------------------


def asarray(
    obj: TensorLike, /, *, dtype: DTypeLike | None = None, device: str | None = None, copy: bool | None = None
) -> Tensor:
    """Return `obj` as a tensor, converted to `dtype` if given.

    Arrays are copied when the graph is built, so later changes to them are not seen.

    Args:
        obj: a tensor, an array, a number, or nested lists of numbers.
        dtype: of the result; None keeps that of `obj`.
        device: where to make it; None for no request.
        copy: False refuses objects that must be copied, which is all but a tensor of that dtype.

    Raises:
        DTypeError: a value that no tensor can hold, or that does not fit `dtype`.
        ValueError: `copy` is False, and a copy is necessary.
    """
    if copy is False and not (is_symbolic(obj) and (dtype is None or as_dtype(dtype) == as_tensor(obj).dtype)):
        raise ValueError(f"asarray(copy=False): {a_kind(type(obj))} becomes a tensor only by a copy; leave copy= out")
    if not is_symbolic(obj):
        with placed_on(device):
            return constant(obj, dtype)
    found = as_tensor(obj) if dtype is None else astype(obj, dtype)
    return found if device is None else to_device(found, device)


def to_device(x: Tensor, device: str) -> Tensor:
    """`x` on `device`: a node that is placed there."""
    with graph_for(x), placed_on(device):
        return identity(x)  # a node placed there: the runtime copies `x` if it is elsewhere


def from_dlpack(x: SupportsDLPack, /, *, device: str | None = None, copy: bool | None = None) -> Tensor:
    """A constant with the values of another library's array in host memory, copied.

    Args:
        x: an array in host memory, of a library that speaks DLPack.
        device: where to make it; None for no request.
        copy: accepted for the standard's sake.

    Raises:
        GraphError: an array that NumPy cannot read, such as one in GPU memory.
    """
    try:
        array = np.from_dlpack(x)
    except (AttributeError, BufferError, RuntimeError, TypeError) as error:
        raise GraphError(f"from_dlpack: cannot read {type(x).__name__} in host memory: {error}") from error
    with placed_on(device):
        return constant(array)  # a copy, as the other library may write to its array


install(to_device=to_device)
