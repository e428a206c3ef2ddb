"""Promotion of operands of different dtypes, and the dtype and shape rules that follow from it.

NEP 50: Python scalars are weak, so they take the dtype of the other operand; everything else is strong. A weak operand
becomes a constant of the promoted dtype when the graph is built, so kernels only ever see typed values.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from operator import attrgetter
from typing import TypeAlias, TypeGuard, TypeVar

import numpy as np

from asyncflow.errors import DTypeError, brief
from asyncflow.graph.building.build import TensorLike, apply, as_tensor, constant, graph_for
from asyncflow.graph.ir import Tensor
from asyncflow.graph.op import NEW, Op, register
from asyncflow.graph.values.dtypes import VARIANT, DType, bool_, dtype_name, promote, string
from asyncflow.graph.values.shapes import broadcast
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.cuda.source import Writer, function, of_ufunc
from asyncflow.values import Kernel

WeakScalar: TypeAlias = bool | int | float | complex
UnaryFunction: TypeAlias = Callable[[TensorLike], Tensor]
BinaryFunction: TypeAlias = Callable[[TensorLike, TensorLike], Tensor]
_Published = TypeVar("_Published", bound=Callable[..., Tensor])


_UFUNCS: dict[Op, np.ufunc] = {}
"""The ufuncs of ops that are ufuncs."""


def is_weak(value: TensorLike) -> TypeGuard[WeakScalar]:
    """Return True if `value` is a Python scalar, which takes the dtype of the other operand; NumPy scalars keep
    theirs.
    """
    return isinstance(value, bool | int | float | complex) and not isinstance(value, np.generic)


def promoted_dtype(operands: Iterable[DType | WeakScalar]) -> DType:
    """The common dtype of dtypes and weak scalars.

    Raises:
        DTypeError: there is none.
    """
    listed = list(operands)
    strong = [x for x in listed if isinstance(x, np.dtype)]
    weak = [x for x in listed if not isinstance(x, np.dtype)]
    if VARIANT in strong:
        raise DTypeError("a variant has no arithmetic; only the ops that made it read it")
    if not strong:
        return promote(weak)
    common = promote(strong)
    # For NumPy bfloat16 is a foreign dtype, and a weak float beside it a float64.
    if common.name == "bfloat16" and not any(isinstance(x, complex) for x in weak):
        return common
    return promote([common, *weak])


def promote_operands(*operands: TensorLike) -> tuple[Tensor, ...]:
    """The operands as tensors: weak scalars as constants of the promoted dtype, all others with their own dtype.

    Raises:
        DTypeError: the dtypes have nothing in common, or a Python integer does not fit.
        GraphError: no graph is being built and no operand is a tensor.
    """
    with graph_for(*operands):
        items = [x if is_weak(x) else as_tensor(x) for x in operands]
        if not any(is_weak(x) for x in items):
            return tuple(x for x in items if isinstance(x, Tensor))
        dtype = promoted_dtype(x.dtype if isinstance(x, Tensor) else x for x in items)
        return tuple(x if isinstance(x, Tensor) else weak_constant(x, dtype) for x in items)


def weak_constant(value: WeakScalar, dtype: DType) -> Tensor:
    """Return `value` cast, as NumPy does, to its promoted dtype: a float may become infinite.

    Raises:
        DTypeError: it is an integer that does not fit `dtype`, or no float at all.
    """
    if dtype.kind == "b":
        return constant(bool(value))
    if dtype.kind in "iu":
        return constant(value, promote([dtype, value]))
    try:
        with np.errstate(all="ignore"):
            return constant(np.array(float(value) if isinstance(value, int) else value).astype(dtype))
    except OverflowError:
        raise DTypeError(f"{brief(value)} is too large for any float") from None


def promote_compared(*operands: TensorLike) -> tuple[Tensor, ...]:
    """Like `promote_operands` for comparisons, which are exact: an integer outside the other's range stays itself.

    Raises:
        DTypeError: the dtypes have nothing in common.
    """
    with graph_for(*operands):
        items = [_exact(x) if is_weak(x) else x for x in operands]
        tensors = [x if is_weak(x) else as_tensor(x) for x in items]
        integers = [x.dtype for x in tensors if isinstance(x, Tensor) and x.dtype.kind in "iu"]
        for position, x in enumerate(tensors):
            if type(x) is int and any(not np.iinfo(dtype).min <= x <= np.iinfo(dtype).max for dtype in integers):
                tensors[position] = constant(x)
        return promote_operands(*tensors)


def _exact(value: WeakScalar) -> WeakScalar:
    """Integers that no integer dtype holds compare as floats do."""
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return math.copysign(math.inf, value > 0 or -1) if abs(value) > sys.float_info.max else float(value)
    return value


def binary(op: Op, x1: TensorLike, x2: TensorLike) -> Tensor:
    """Applies a one-output op to two promoted operands."""
    return apply(op, *promote_for(op, x1, x2, partial(_promote_to_loop, _UFUNCS[op])))[0]


def _promote_to_loop(ufunc: np.ufunc, x1: TensorLike, x2: TensorLike) -> tuple[Tensor, ...]:
    """Promote as `promote_operands` does, for a NumPy ufunc, which casts a weak scalar to the dtype of its loop.

    So 256 divides a uint8, as true division computes in floats, and ``logical_and`` takes any integer as true.
    """
    if is_weak(x1) == is_weak(x2):
        return promote_operands(x1, x2)
    with graph_for(x1, x2):
        operands = [x if is_weak(x) else as_tensor(x) for x in (x1, x2)]
        loop = _loop_of(ufunc, tuple(x.dtype if isinstance(x, Tensor) else type(x) for x in operands))
        if loop is None:
            return promote_operands(*operands)
        pairs = zip(operands, loop, strict=False)
        return tuple(x if isinstance(x, Tensor) else weak_constant(x, dtype) for x, dtype in pairs)


@lru_cache(maxsize=4096)
def _loop_of(ufunc: np.ufunc, operands: tuple[DType | type[WeakScalar], ...]) -> tuple[DType, ...] | None:
    """The dtypes in which `ufunc` computes with a dtype and a weak scalar; None where it is not NumPy that says so."""
    (strong,) = (x for x in operands if isinstance(x, np.dtype))
    if strong.kind not in "biufc":
        return None
    try:
        # To NumPy a Python bool is a strong one.
        return ufunc.resolve_dtypes((*(bool_ if x is bool else x for x in operands), None))
    except TypeError:
        return None


def comparison(op: Op, x1: TensorLike, x2: TensorLike) -> Tensor:
    """Applies a one-output op to two operands that it compares."""
    return apply(op, *promote_for(op, x1, x2, promote_compared))[0]


def ufunc_op(
    name: str,
    cuda: Writer | str | None = None,
    scalar_kernel: Kernel | None = None,
    *,
    ufunc: np.ufunc | None = None,
    is_total: bool = True,
) -> Op:
    """Registers the op that is a ufunc of NumPy's (and CuPy's), with its dtypes and broadcasting.

    Args:
        name: of the op.
        cuda: writes it in CUDA C++, or says why that cannot be; by default as C's math function of the op's name.
        scalar_kernel: as in `Op`.
        ufunc: None for NumPy's of that name.
        is_total: as in `Op`.
    """
    found: np.ufunc = ufunc or getattr(np, name)
    op = Op(
        name,
        by_ufunc(found),
        lambda xp: getattr(xp, found.__name__),
        scalar_kernel=scalar_kernel,
        is_total=is_total,
        rows="elementwise",
        cuda=cuda if isinstance(cuda, str) else of_ufunc(found, cuda or function(name)),
        traits=NEW,
    )
    _UFUNCS[op] = found
    return register(op)


def unary_op(
    module: str, name: str, doc: str, cuda: Writer | None = None, scalar_kernel: Kernel | None = None
) -> tuple[Op, UnaryFunction]:
    """The op that is NumPy's ufunc of that name, of one operand, and the function of `module` that applies it."""
    op = ufunc_op(name, cuda, scalar_kernel)

    def applied(x: TensorLike, /) -> Tensor:
        return apply(op, x)[0]

    return op, published(applied, module, name, doc)


def binary_op(
    module: str, name: str, doc: str, cuda: Writer | None = None, scalar_kernel: Kernel | None = None
) -> tuple[Op, BinaryFunction]:
    """The same of two operands, which are promoted."""
    op = ufunc_op(name, cuda, scalar_kernel)

    def applied(x1: TensorLike, x2: TensorLike, /) -> Tensor:
        return binary(op, x1, x2)

    return op, published(applied, module, name, doc)


def published(function: _Published, module: str, name: str, doc: str) -> _Published:
    """`function` as one of `module` that has been written out there."""
    function.__module__, function.__name__, function.__qualname__, function.__doc__ = module, name, name, doc
    return function


def promote_for(
    op: Op,
    x1: TensorLike,
    x2: TensorLike,
    convert: Callable[[TensorLike, TensorLike], tuple[Tensor, ...]] = promote_operands,
) -> tuple[Tensor, ...]:
    """The operands as promoted tensors; an error names the op and the user's line."""
    if isinstance(x1, Tensor) and isinstance(x2, Tensor):
        return x1, x2  # no conversion: `apply` brings them into the current graph
    try:
        return convert(x1, x2)
    except DTypeError as error:
        raise DTypeError(f"{op.name}: {error.reason}\n  operands {x1!r}, {x2!r}") from None


# -- shape rules -----------------------------------------------------------------------------------------------------

_dtype_of, _shape_of = attrgetter("dtype"), attrgetter("shape")


def same(x: Spec, *_: Spec, **attrs: object) -> Spec:
    """Rule of ops whose output is like their first input."""
    return x


def predicate(*inputs: Spec) -> Spec:
    """Return the spec of ops that compare their broadcast inputs; a shape rule."""
    promoted_dtype(map(_dtype_of, inputs))
    return Spec(bool_, broadcast(map(_shape_of, inputs)))


def by_ufunc(ufunc: np.ufunc) -> Callable[..., Spec]:
    """Rule of an op that is NumPy's `ufunc`: its dtypes, broadcast shapes. Strings are refused."""

    def infer(*inputs: Spec) -> Spec:
        # No generators: each element would take as long as a call, and half of all nodes come here.
        return Spec(ufunc_dtype(ufunc, *map(_dtype_of, inputs)), broadcast(map(_shape_of, inputs)))

    return infer


@lru_cache(maxsize=4096)
def ufunc_dtype(ufunc: np.ufunc, *inputs: DType) -> DType:
    """The dtype NumPy's `ufunc` gives for inputs of these dtypes.

    Raises:
        DTypeError: it does not take them.
    """
    seen = " and ".join(dtype_name(dtype) for dtype in inputs)
    if string in inputs or VARIANT in inputs:
        raise DTypeError(f"is not defined for {seen}; only numbers and booleans")
    # Refuse mixtures that NumPy computes in a dtype wider than both, such as bfloat16 with int32.
    promoted_dtype(inputs)
    try:
        *_, dtype = ufunc.resolve_dtypes((*inputs, *(None,) * ufunc.nout))
    except TypeError:
        raise DTypeError(f"is not defined for {seen}; convert with af.astype first") from None
    return dtype


def require_kind(x: Spec, kinds: str, what: str) -> None:
    """Raises DTypeError unless the dtype of `x` is of one of the NumPy `kinds` (bfloat16 counts as ``"f"``)."""
    if kind_of(x.dtype) not in kinds:
        raise DTypeError(f"takes {what}, not {dtype_name(x.dtype)}; convert with af.astype first")


def kind_of(dtype: DType) -> str:
    """NumPy's kind character: b, i, u, f, c; ``T`` strings, ``O`` variants; bfloat16 is ``f`` here, not ``V``."""
    return "f" if dtype.name == "bfloat16" else dtype.kind


def real_dtype(dtype: DType) -> DType:
    """The dtype of the real part."""
    return np.dtype(f"float{dtype.itemsize * 4}") if dtype.kind == "c" else dtype
