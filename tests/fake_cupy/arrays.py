"""`cupy.ndarray`: an array in device memory, whose operations are queued on the current stream."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from tests.fake_cupy import indexing
from tests.fake_cupy.kernels import Kernels
from tests.fake_cupy.memory_map import Operand

if TYPE_CHECKING:
    from tests.fake_cupy.module import FakeCupy
    from tests.fake_cupy.pool import MemoryPointer
    from tests.fake_cupy.streams import Device, Stream


def supported(dtype: Any) -> np.dtype[Any]:
    """The dtype, if device arrays can have it."""
    dtype = np.dtype(dtype)
    if dtype.char not in "?bhilqBHILQefdFD" and dtype.name != "bfloat16":
        raise ValueError(f"Unsupported dtype {dtype}")
    return dtype


class Flags(SimpleNamespace):
    """Memory layout of an array; there is no ``writeable``, as in CuPy."""

    c_contiguous: bool
    f_contiguous: bool
    owndata: bool

    @property
    def forc(self) -> bool:
        return self.c_contiguous or self.f_contiguous

    @property
    def fnc(self) -> bool:
        return self.f_contiguous and not self.c_contiguous

    def __getitem__(self, name: str) -> bool:
        return bool(getattr(self, name.lower()))


def contiguous(shape: tuple[int, ...], itemsize: int, order: str) -> tuple[int, ...]:
    """The strides of an array without gaps."""
    axes = range(len(shape)) if order == "F" else range(len(shape) - 1, -1, -1)
    strides = [0] * len(shape)
    step = itemsize
    for axis in axes:
        strides[axis] = step
        step *= max(shape[axis], 1)
    return tuple(strides)


class Capsule:
    """The result of `__dlpack__`: only this fake, and libraries in its memory, can read it."""

    def __init__(self, array: Array) -> None:
        self.array = array


class Array:
    """Takes the arguments of `cupy.ndarray`; the memory is not initialised."""

    _kernels: ClassVar[Kernels]
    _fake: ClassVar[FakeCupy]
    __array_priority__ = 100

    def __init__(
        self,
        shape: int | tuple[int, ...],
        dtype: Any = float,
        memptr: MemoryPointer | None = None,
        strides: tuple[int, ...] | None = None,
        order: str = "C",
    ) -> None:
        lengths = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
        self._shape = tuple(operator.index(n) for n in lengths)
        if any(n < 0 for n in self.shape):
            raise ValueError("Negative dimensions are not allowed")
        self.dtype = supported(dtype)
        if strides is not None and memptr is None:
            raise ValueError("memptr is required if strides is given.")
        if strides is None:
            strides = contiguous(self.shape, self.dtype.itemsize, order or "C")
        self.strides: tuple[int, ...] = tuple(strides)
        self.base: Array | None = None
        self.data: MemoryPointer = self._fake.cuda.memory.alloc(self.nbytes) if memptr is None else memptr

    @classmethod
    def of(cls, source: np.ndarray, order: str = "K") -> Array:
        """A new array with the values of a NumPy array, copied on the current stream."""
        source = np.asarray(source)
        supported(source.dtype)
        if not source.flags.forc or order in ("C", "F"):
            source = np.asarray(source, order="F" if order == "F" else "C")
        target = cls._kernels.empty_as(source)
        cls._kernels.from_host(source, target)
        return target

    def alias(self, shape: tuple[int, ...], strides: tuple[int, ...], offset: int, dtype: Any) -> Array:
        """A view."""
        view = type(self)(shape, dtype, self.data + offset if offset else self.data, strides)
        view.base = self if self.base is None else self.base
        return view

    # What the host knows

    @property
    def operand(self) -> Operand:
        return Operand(self.data.device_id, self.data.ptr, self.dtype, self.shape, self.strides)

    @property
    def shape(self) -> tuple[int, ...]:
        """Not to be assigned to, other than in CuPy: take a view by `reshape`."""
        return self._shape

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def device(self) -> Device:
        return self.data.device

    @property
    def flags(self) -> Flags:
        def fits(order: str) -> bool:
            # The stride of an axis of length one says nothing.
            wanted = contiguous(self.shape, self.itemsize, order)
            triples = zip(self.shape, self.strides, wanted, strict=True)
            return self.size == 0 or all(n == 1 or had == want for n, had, want in triples)

        return Flags(c_contiguous=fits("C"), f_contiguous=fits("F"), owndata=self.base is None)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        stream = self._kernels.platform.current_stream().ptr
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "descr": self.dtype.descr,
            "strides": None if self.flags.c_contiguous else self.strides,
            "data": (self.data.ptr, False),
            "version": 3,
            "stream": stream or 1,
        }

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of unsized object")
        return self.shape[0]

    def __iter__(self) -> Iterator[Array]:
        if not self.shape:
            raise TypeError("iteration over a 0-d array")
        return (self[i] for i in range(self.shape[0]))

    # To the host

    def get(
        self, stream: Stream | None = None, order: str = "C", out: np.ndarray | None = None, blocking: bool = True
    ) -> np.ndarray:
        """A copy in host memory; asynchronous only into pinned memory with ``blocking=False``."""
        platform = self._kernels.platform
        device = self.data.device_id
        if out is None:
            out = np.empty(self.shape, self.dtype, order="C" if order == "A" and self.flags.c_contiguous else order)  # type: ignore[call-overload]
        elif not isinstance(out, np.ndarray):
            raise TypeError(f"Only numpy.ndarray can be obtained from cupy.ndarray. Actual type: {type(out)}")
        elif out.dtype != self.dtype:
            raise TypeError(f"{out.dtype} array cannot be obtained from {self.dtype} array")
        elif out.shape != self.shape:
            raise ValueError(f"Shape mismatch. Expected shape: {self.shape}, actual shape: {out.shape}")
        target = out
        if self.size == 0:
            return target
        engine = platform.engine
        queue = engine.queue((platform.current_stream() if stream is None else stream).ptr, device)
        if queue.capture is not None:
            raise RuntimeError("copies between host and device memory are not supported during stream capture")
        engine.enter("memcpyAsync", device)
        source = self.operand
        item = engine.give(queue, "get", lambda: np.copyto(target, platform.memory.view(source)))
        pinned = platform.memory.is_pinned(int(target.ctypes.data), target.nbytes)
        if blocking or not pinned:
            engine.block("get", lambda: item.done, device)
        return target

    def set(self, arr: np.ndarray, stream: Stream | None = None) -> None:
        """Copy from a NumPy array; only pinned memory is copied asynchronously."""
        if not isinstance(arr, np.ndarray):
            raise TypeError(f"Only numpy.ndarray can be set to cupy.ndarray. (actual: {type(arr)})")
        if arr.dtype != self.dtype:
            raise TypeError(f"{arr.dtype} array cannot be set to {self.dtype} array")
        if arr.shape != self.shape:
            raise ValueError(f"Shape mismatch. Old shape: {self.shape}, new shape: {arr.shape}")
        if stream is None:
            self._kernels.from_host(arr, self, staged=False)
        else:
            with self.device, stream:
                self._kernels.from_host(arr, self, staged=False)

    def item(self) -> Any:
        if self.size != 1:
            raise ValueError("can only convert an array of size 1 to a Python scalar")
        return self.get().item()

    def tolist(self) -> Any:
        return self.get().tolist()

    def __bool__(self) -> bool:
        if self.size > 1:
            raise ValueError(
                "The truth value of an array with more than one element is ambiguous. Use a.any() or a.all()"
            )
        return bool(self.get())

    def __int__(self) -> int:
        return int(self.get())

    def __float__(self) -> float:
        return float(self.get())

    def __complex__(self) -> complex:
        return complex(self.get())

    def __repr__(self) -> str:
        return repr(self.get())

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise TypeError(
            "Implicit conversion to a NumPy array is not allowed. "
            "Please use `.get()` to construct a NumPy array explicitly."
        )

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        function = getattr(self._fake, ufunc.__name__)
        outs = kwargs.pop("out", None)
        if outs is not None:
            kwargs["out"] = outs[0] if len(outs) == 1 else outs
        return (function if method == "__call__" else getattr(function, method))(*inputs, **kwargs)

    def __array_function__(self, function: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
        owner: Any = self._fake
        for name in function.__module__.split(".")[1:]:
            owner = getattr(owner, name)
        return getattr(owner, function.__name__)(*args, **kwargs)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, self.data.device_id)

    def __dlpack__(self, *, stream: int | None = None, **_: Any) -> Capsule:
        """Makes the consumer's stream wait for CuPy's current one, whichever stream wrote the array."""
        cuda = self._fake.cuda
        with cuda.Device(self.data.device_id):
            if stream not in (None, -1, cuda.get_current_stream().ptr or 1):
                written = cuda.get_current_stream().record()
                cuda.runtime.streamWaitEvent(0 if stream == 1 else stream, written.ptr)
        return Capsule(self)

    # Views, copies and indexing

    def __getitem__(self, index: Any) -> Array:
        return indexing.getitem(self, index)

    def __setitem__(self, index: Any, value: Any) -> None:
        indexing.setitem(self, index, value)

    def fill(self, value: Any) -> None:
        """Set every element to a scalar."""
        if isinstance(value, np.ndarray):
            if value.shape:
                raise ValueError("non-scalar numpy.ndarray cannot be used for fill")
            value = value.item()
        if not (isinstance(value, self._kernels.ndarray) and not value.shape) and not np.isscalar(value):
            raise TypeError(f"Unsupported type {type(value)}")
        self._kernels.mutate("fill", indexing.assign_scalar, self, (value,))

    def astype(
        self, dtype: Any, order: str = "K", casting: str | None = None, subok: bool | None = None, copy: bool = True
    ) -> Array:
        dtype = supported(dtype)
        if casting is not None and not np.can_cast(self.dtype, dtype, casting):  # type: ignore[arg-type]
            raise TypeError(
                f"Cannot cast array data from {self.dtype!r} to {dtype!r} according to the rule {casting!r}"
            )
        if not copy and dtype == self.dtype and order in ("K", "A"):
            return self
        result: Array = self._kernels.call("astype", lambda x: x.astype(dtype, order=order), (self,))
        return result

    def copy(self, order: str = "C") -> Array:
        result: Array = self._kernels.call("copy", lambda x: x.copy(order=order), (self,))
        return result

    def view(self, dtype: Any = None, type: Any = None) -> Array:
        found = self._kernels.view(self, lambda x: x.view() if dtype is None else x.view(supported(dtype)))
        assert found is not None
        return found

    def reshape(self, *shape: Any, order: str = "C", copy: bool | None = None) -> Array:
        lengths = shape[0] if len(shape) == 1 else shape
        return self._viewed("reshape", lambda x: np.reshape(x, lengths, order=order))  # type: ignore[call-overload]

    def ravel(self, order: str = "C") -> Array:
        return self._viewed("ravel", lambda x: x.ravel(order))  # type: ignore[arg-type]

    def transpose(self, *axes: Any) -> Array:
        return self._viewed("transpose", lambda x: x.transpose(*axes))

    def swapaxes(self, axis1: int, axis2: int) -> Array:
        return self._viewed("swapaxes", lambda x: x.swapaxes(axis1, axis2))

    def squeeze(self, axis: Any = None) -> Array:
        return self._viewed("squeeze", lambda x: x.squeeze(axis))

    def diagonal(self, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Array:
        return self._viewed("diagonal", lambda x: x.diagonal(offset, axis1, axis2))

    @property
    def T(self) -> Array:
        return self.transpose()

    @property
    def mT(self) -> Array:
        return self.swapaxes(-1, -2)

    @property
    def real(self) -> Array:
        return self._viewed("real", lambda x: x.real)

    @property
    def imag(self) -> Array:
        return self._viewed("imag", lambda x: x.imag)

    def _viewed(self, name: str, function: Callable[[np.ndarray], np.ndarray]) -> Array:
        """A view if NumPy makes one, else a copy."""
        view = self._kernels.view(self, function)
        if view is not None:
            return view
        copied: Array = self._kernels.call(name, function, (self,))
        return copied

    def __copy__(self) -> Array:
        return self.copy()

    def __deepcopy__(self, _: Any) -> Array:
        with self.device:
            return self.copy()

    def scatter_add(self, slices: Any, value: Any) -> None:
        self._fake.add.at(self, slices, value)

    def __getattr__(self, name: str) -> Any:
        """The remaining methods are the module's functions."""
        known = type(self)._fake.tables["cupy.ndarray"]
        if name not in known:
            raise AttributeError(f"'cupy.ndarray' object has no attribute {name!r}")
        return self._fake.method(self, name, known[name])

    __hash__ = None  # type: ignore[assignment]


def _binary(name: str, swapped: bool) -> Callable[[Array, Any], Any]:
    def operate(self: Array, other: Any) -> Any:
        if not isinstance(other, (Array, int, float, complex, np.generic, np.ndarray)):
            return NotImplemented
        function = getattr(self._fake, name)
        return function(other, self) if swapped else function(self, other)

    return operate


def _in_place(name: str) -> Callable[[Array, Any], Array]:
    def operate(self: Array, other: Any) -> Array:
        getattr(self._fake, name)(self, other, out=self)
        return self

    return operate


def _unary(name: str) -> Callable[[Array], Any]:
    return lambda self: getattr(self._fake, name)(self)


ARITHMETIC = {
    "add": "add",
    "sub": "subtract",
    "mul": "multiply",
    "truediv": "true_divide",
    "floordiv": "floor_divide",
    "mod": "remainder",
    "pow": "power",
    "matmul": "matmul",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
    "lshift": "left_shift",
    "rshift": "right_shift",
    "divmod": "divmod",
}
COMPARISONS = {
    "eq": "equal",
    "ne": "not_equal",
    "lt": "less",
    "le": "less_equal",
    "gt": "greater",
    "ge": "greater_equal",
}
for symbol, ufunc in ARITHMETIC.items():
    setattr(Array, f"__{symbol}__", _binary(ufunc, swapped=False))
    setattr(Array, f"__r{symbol}__", _binary(ufunc, swapped=True))
    if symbol not in ("divmod", "matmul"):
        setattr(Array, f"__i{symbol}__", _in_place(ufunc))
for symbol, ufunc in COMPARISONS.items():
    setattr(Array, f"__{symbol}__", _binary(ufunc, swapped=False))
for symbol, ufunc in {"neg": "negative", "pos": "positive", "abs": "absolute", "invert": "invert"}.items():
    setattr(Array, f"__{symbol}__", _unary(ufunc))
