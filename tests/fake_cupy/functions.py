"""The functions of `cupy`, `cupy.linalg` and `cupy.fft`: NumPy's, under CuPy's names, signatures and strictness."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.fake_cupy import indexing
from tests.fake_cupy.errors import CompileException
from tests.fake_cupy.kernels import Kernels

if TYPE_CHECKING:
    from tests.fake_cupy.arrays import Array


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


VIEWS = names(
    "array_split atleast_1d atleast_2d atleast_3d broadcast_to diagonal dsplit expand_dims flip fliplr flipud "
    "hsplit imag matrix_transpose moveaxis permute_dims ravel real reshape rollaxis rot90 split squeeze swapaxes "
    "transpose vsplit"
)
"""Functions that give views where they can."""

SYNCHRONOUS = names(
    "argwhere asarray_chkfinite bincount compress delete digitize extract flatnonzero histogram histogram2d "
    "histogramdd intersect1d ix_ nanmedian nonzero piecewise roots setdiff1d setxor1d "
    "trim_zeros "
    "tril_indices triu_indices mask_indices union1d unique unique_all unique_counts unique_inverse unique_values "
    "linalg.cholesky linalg.cond "
    "linalg.det linalg.eig linalg.eigh linalg.eigvals linalg.eigvalsh linalg.inv linalg.lstsq linalg.matrix_power "
    "linalg.matrix_rank linalg.pinv linalg.qr linalg.slogdet linalg.solve linalg.svd linalg.tensorinv "
    "linalg.tensorsolve"
)
"""Functions that wait for the stream: the shape depends on the values, or an error code is looked at.

When in doubt a function is named here: a test then finds a call that may block.
"""

MUTATORS = names("copyto fill_diagonal place put put_along_axis putmask")
"""Functions that change their first argument."""

TRUTHS = names("allclose array_equal array_equiv count_nonzero")
"""Functions that give a 0-d array where NumPy gives a Python value."""

SEQUENCES = names(
    "broadcast_arrays column_stack concat concatenate dstack hstack row_stack stack vstack broadcast_shapes ix_ "
    "lexsort meshgrid"
)
"""Functions whose first argument is a list or tuple of arrays (or of lengths)."""

HOST_VALUES = names(
    "array_split dsplit full full_like hsplit pad repeat split take tensordot tile vsplit array_str array_repr "
    "result_type can_cast ndim shape size common_type min_scalar_type isscalar iscomplexobj isrealobj"
)
"""Functions some of whose arguments may be NumPy arrays."""

MOST_JOINED = 8
"""Most arrays that `concatenate` and its users join without copying a table of addresses to the device."""

NEW = names("arange empty eye full identity linspace logspace ones tri zeros indices fromfunction")
"""Functions that take lengths and scalars."""


class BoundSignature(inspect.Signature):
    """The signature of a real CuPy function, as written in names.json."""

    @classmethod
    @cache
    def parse(cls, text: str) -> BoundSignature:
        kind = inspect.Parameter
        kinds = {"**": kind.VAR_KEYWORD, "*": kind.VAR_POSITIONAL, "+": kind.KEYWORD_ONLY, "/": kind.POSITIONAL_ONLY}
        parameters = []
        for word in text.split():
            mark = next((mark for mark in kinds if word.startswith(mark)), "")
            default = None if word.endswith("=") else kind.empty
            parameters.append(
                kind(word[len(mark) :].rstrip("="), kinds.get(mark, kind.POSITIONAL_OR_KEYWORD), default=default)
            )
        return cls(parameters)

    def check(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            self.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"cupy.{name}(): {error}; the signature is {name}{self}") from None


@cache
def tables() -> dict[str, dict[str, str]]:
    """The public names of CuPy's namespaces: a function's signature, or the type of anything else in ``<>``."""
    loaded: dict[str, dict[str, str]] = json.loads(Path(__file__).with_name("names.json").read_text())
    return loaded


def parts_of(tree: Any) -> Iterator[Any]:
    """Yield the leaves of nested lists or tuples, and anything else itself."""
    if isinstance(tree, (list, tuple)):
        for part in tree:
            yield from parts_of(part)
    else:
        yield tree


class Functions:
    """Makes the functions of one fake."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels

    def find(self, namespace: str, name: str) -> Any:
        """The attribute `name` of `cupy` or of its namespace ``"linalg"`` or ``"fft"``.

        Raises:
            AttributeError: CuPy has no such name, or the fake does not cover it.
        """
        full = f"cupy.{namespace}" if namespace else "cupy"
        table = tables()[full]
        if name not in table:
            raise AttributeError(f"module {full!r} has no attribute {name!r}")
        owner = getattr(np, namespace) if namespace else np
        thing = getattr(owner, name, NotImplemented)
        if thing is NotImplemented or table[name] in ("<module>", "<CClass>", "<RClass>", "<nd_grid>", "<_LazyModule>"):
            raise AttributeError(f"{full}.{name} is not covered by the fake")
        if not callable(thing) or isinstance(thing, type):
            return thing
        label = f"{namespace}.{name}" if namespace else name
        if isinstance(thing, np.ufunc):
            return Ufunc(self.kernels, label, thing)
        signature = None if table[name].startswith("<") else BoundSignature.parse(table[name])
        return self.wrap(label, thing, signature)

    def wrap(self, name: str, function: Callable[..., Any], signature: BoundSignature | None) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if signature is not None:
                signature.check(name, args, kwargs)
            return self.call(name, function, args, kwargs)

        call.__name__ = name
        return call

    def call(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call NumPy's `function` the way CuPy's function of that name goes about it."""
        self._check_host_values(name, args, kwargs)
        array = self.kernels.ndarray
        if name in MUTATORS:
            self.kernels.mutate(name, function, args[0], args[1:], kwargs)
            return None
        if name in VIEWS and args and isinstance(args[0], array):
            return self._view(name, function, args, kwargs)
        if name in ("empty", "full", "ones", "zeros") and math.prod(np.atleast_1d(args[0]).tolist()) > 1 << 60:
            raise AssertionError(f"CuPy counts the bytes of shape {args[0]} modulo 2**64, and writes behind them")
        if name in ("empty", "empty_like"):
            return self._empty(function, args, kwargs)
        if name == "take":
            args, kwargs = self._indices(args, {"mode": "wrap", **kwargs})
        truth = function
        if name in TRUTHS:
            function = lambda *a, **k: np.asarray(truth(*a, **k))  # noqa: E731 - a def would need another name
        if name == "broadcast_arrays":
            shape = np.broadcast_shapes(*(a.shape for a in args))
            return [self.call("broadcast_to", np.broadcast_to, (a, shape), {}) for a in args]
        if name in ("cumsum", "cumprod") and kwargs.get("dtype") is None and args[0].dtype.name == "bfloat16":
            raise CompileException("error: no operator matches these operands: bfloat16, bfloat16", "", name, ())
        if name == "repeat" and any(isinstance(part, array) for part in (*args[1:], *kwargs.values())):
            raise ValueError("cupy.ndarray cannot be specified as `repeats` argument.")
        now = name in SYNCHRONOUS or (name == "where" and len(args) == 1)
        result = self.kernels.call(name, function, args, kwargs, now=now)
        return list(result) if name == "meshgrid" else result

    def _check_host_values(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """CuPy's functions take device arrays: no NumPy arrays, and no lists where an array is expected."""
        first = args[0] if args else None
        if name not in HOST_VALUES and name not in NEW:
            for part in parts_of([args, list(kwargs.values())]):
                if isinstance(part, np.ndarray):
                    raise TypeError(f"Unsupported type {type(part)}: cupy.{name} takes device arrays")
            if isinstance(first, (list, tuple)) and name not in SEQUENCES:
                raise TypeError(f"Unsupported type {type(first)}: cupy.{name} takes a device array")
        if name in ("concatenate", "concat", "stack", "vstack", "hstack", "dstack", "column_stack", "row_stack"):
            for part in first or ():
                if not isinstance(part, self.kernels.ndarray):
                    raise TypeError(f"Only cupy arrays can be concatenated, not {type(part).__name__}")
            if len(first or ()) > MOST_JOINED and self.kernels.current_queue().capture is not None:
                raise RuntimeError("the current stream is capturing, so H2D transfers are disallowed")

    def _view(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        source, rest = args[0], args[1:]
        pieces = self._pieces(source, function, rest, kwargs)
        if pieces is not None:
            return pieces
        view = self.kernels.view(source, lambda x: function(x, *rest, **kwargs))
        return self.kernels.call(name, function, args, kwargs) if view is None else view

    def _pieces(
        self, source: Array, function: Callable[..., Any], rest: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Any] | None:
        """The views of a splitting function; None for functions of one result."""
        if "split" not in function.__name__:
            return None
        count = len(function(self.kernels.platform.memory.view(source.operand), *rest, **kwargs))

        def piece(index: int) -> Array:
            view = self.kernels.view(source, lambda x: function(x, *rest, **kwargs)[index])
            assert view is not None
            return view

        return [piece(index) for index in range(count)]

    def _empty(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Array:
        """Memory without a kernel."""
        if args and isinstance(args[0], self.kernels.ndarray):
            like = args[0]
            plain = function(np.empty(like.shape, like.dtype, "F" if like.flags.fnc else "C"), *args[1:], **kwargs)
        else:
            plain = function(*args, **kwargs)
        return self.kernels.empty_as(plain)

    def _indices(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """`take` accepts indices on the host, and copies them."""
        if len(args) > 1 and isinstance(args[1], (list, np.ndarray)):
            args = (args[0], self.kernels.ndarray.of(np.asarray(args[1], int)), *args[2:])
        return args, kwargs


SCATTERED = {
    "add": "int32 int64 float16 float32 float64 uint32 uint64",
    "subtract": "int32 uint32",
    "maximum": "int32 int64 float32 float64 uint32 uint64",
    "minimum": "int32 int64 float32 float64 uint32 uint64",
    "bitwise_and": "int32 uint32 int64 uint64",
    "bitwise_or": "int32 uint32 int64 uint64",
    "bitwise_xor": "int32 uint32 int64 uint64",
}
"""The dtypes that each ``ufunc.at`` has atomic instructions for."""


def _floor_divide(x1: Any, x2: Any, **options: Any) -> Any:
    """CuPy's: the quotient is rounded first, so that ``1.0 // 0.2`` is 5."""
    result = np.floor_divide(x1, x2, **options)
    return np.floor(np.divide(x1, x2, dtype=result.dtype)) if _is_float(result.dtype) else result


def _remainder(x1: Any, x2: Any, **options: Any) -> Any:
    """CuPy's: ``x1 - x1 // x2 * x2``."""
    result = np.remainder(x1, x2, **options)
    if not _is_float(result.dtype):
        return result
    return np.subtract(x1, _floor_divide(x1, x2, **options) * x2, dtype=result.dtype)


def _matmul(x1: Any, x2: Any, **options: Any) -> Any:
    """CuPy's: stacks of matrices of bfloat16 go where it has no kernel for them."""
    if max(np.ndim(x1), np.ndim(x2)) > 2 and "bfloat16" in (x1.dtype.name, x2.dtype.name):
        raise TypeError("data type 'E' not understood")
    return np.matmul(x1, x2, **options)


def _is_float(dtype: np.dtype[Any]) -> bool:
    return dtype.kind == "f" or dtype.name == "bfloat16"


OTHERWISE: dict[str, Callable[..., Any]] = {
    "floor_divide": _floor_divide,
    "matmul": _matmul,
    "mod": _remainder,
    "remainder": _remainder,
}
"""Ufuncs that CuPy computes in another way than NumPy, with other results."""


class Ufunc:
    """A universal function: device arrays and scalars only."""

    def __init__(self, kernels: Kernels, name: str, ufunc: np.ufunc) -> None:
        self._kernels, self._ufunc = kernels, ufunc
        self._function: Callable[..., Any] = OTHERWISE.get(name, ufunc)
        self.__name__ = self.name = name if name == "matmul" else f"cupy_{name}"
        self.nin, self.nout, self.nargs = ufunc.nin, ufunc.nout, ufunc.nargs
        self.types = ufunc.types

    def __repr__(self) -> str:
        return f"<ufunc '{self.name}'>"

    def _check(self, values: tuple[Any, ...]) -> None:
        for value in values:
            if not isinstance(value, (self._kernels.ndarray, int, float, complex, np.generic)):
                raise TypeError(f"Unsupported type {type(value)}")

    def __call__(
        self, *args: Any, out: Any = None, dtype: Any = None, casting: str = "same_kind", axes: Any = None
    ) -> Any:
        if not self.nin <= len(args) <= self.nargs:
            raise TypeError(f"Wrong number of arguments for {self.name}: {len(args)}")
        inputs, outs = args[: self.nin], args[self.nin :]
        self._check(inputs)
        if outs and out is not None:
            raise ValueError("Cannot specify 'out' as both a positional and keyword argument")
        kwargs = {"out": outs or out, "casting": casting}
        kwargs |= {key: value for key, value in (("dtype", dtype), ("axes", axes)) if value is not None}
        return self._kernels.call(self.name, self._function, inputs, kwargs)

    def reduce(self, array: Array, axis: Any = 0, dtype: Any = None, out: Any = None, keepdims: bool = False) -> Any:
        self._check((array,))
        kwargs = {"axis": axis, "dtype": dtype, "out": out, "keepdims": keepdims}
        return self._kernels.call(f"{self.name}.reduce", self._ufunc.reduce, (array,), kwargs)

    def accumulate(self, array: Array, axis: int = 0, dtype: Any = None, out: Any = None) -> Any:
        self._check((array,))
        kwargs = {"axis": axis, "dtype": dtype, "out": out}
        return self._kernels.call(f"{self.name}.accumulate", self._ufunc.accumulate, (array,), kwargs)

    def outer(self, A: Any, B: Any, **kwargs: Any) -> Any:
        self._check((A, B))
        return self._kernels.call(f"{self.name}.outer", self._ufunc.outer, (A, B), kwargs)

    def at(self, a: Array, indices: Any, b: Any = None) -> None:
        """Scatter; an index may occur more than once."""
        kind = self._ufunc.__name__
        if kind not in SCATTERED:
            raise NotImplementedError(f"`{self.name}.at` is not supported yet")
        parts, arrays, masks = indexing.prepare(self._kernels, indices)
        if arrays and a.dtype.name not in SCATTERED[kind].split():
            raise TypeError(f"cupy.{kind}.at only supports {SCATTERED[kind]} as data type, not {a.dtype}")
        ufunc = self._ufunc

        def scatter(target: np.ndarray, where: tuple[Any, ...], value: Any) -> None:
            ufunc.at(target, where, np.asarray(value).astype(target.dtype))

        indexing.scatter(a, parts, masks, f"{self.name}.at", scatter, b)


class Namespace:
    """`cupy.linalg` and `cupy.fft`."""

    def __init__(self, functions: Functions, name: str) -> None:
        self._functions, self._name = functions, name

    def __getattr__(self, name: str) -> Any:
        thing = self._functions.find(self._name, name)
        setattr(self, name, thing)
        return thing
