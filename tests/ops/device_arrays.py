"""A stand-in for CuPy that computes at once, and in which looking at a value on the host is an error.

Its arrays have CuPy's attributes and methods and no others. Its functions have CuPy's names and argument types: arrays,
and NumPy scalars where they are ufuncs, but never an array of NumPy's.
"""

from __future__ import annotations

import json
import operator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from asyncflow.devices.cuda.namespace import CudaNamespace
from asyncflow.graph.builtin import CONSTANT
from asyncflow.graph.op import host_inputs, runs_on_host
from asyncflow.graph.values.dtypes import VARIANT

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from asyncflow.graph.ir import Node

NAMES: dict[str, Any] = json.loads((Path(__file__).parent.parent / "fake_cupy" / "names.json").read_text())
"""The public names of real CuPy."""

_CREATION = frozenset({"arange", "empty", "eye", "full", "zeros"})
_SYNCHRONIZES = frozenset(
    {"nonzero", "unique", "argwhere", "flatnonzero", "linspace", "asnumpy", "array_equal", "allclose", "compress"}
)
_ATOMIC = "efdiILQ"


class DeviceArray:
    """An array whose values the host cannot see."""

    __array_ufunc__ = None
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, data: Any) -> None:
        self.data_ = np.asarray(data)
        assert self.data_.dtype.kind not in "OTSU", f"CuPy has no arrays of {self.data_.dtype}"

    def __getattr__(self, name: str) -> Any:
        if name not in NAMES["cupy.ndarray"] or name in ("get", "item", "tolist", "nonzero", "searchsorted"):
            raise AssertionError(f"an array of CuPy has no {name}, or gives it only after a wait")
        found = getattr(self.data_, name)
        if not callable(found):
            return DeviceArray(found) if isinstance(found, np.ndarray) else found

        def call(*args: Any, **options: Any) -> DeviceArray:
            assert not any(isinstance(value, np.ndarray) for value in args), f"{name}: CuPy takes no array of NumPy's"
            return DeviceArray(found(*_bare(args), **_bare(options)))

        return call

    def _seen(self, *_: object, **__: object) -> NoReturn:
        raise AssertionError("a kernel reads a value on the host; see Op.host_inputs and Op.runs_on_host")

    __bool__ = __int__ = __index__ = __float__ = __complex__ = __array__ = __iter__ = __contains__ = _seen

    def __len__(self) -> int:
        return len(self.data_)

    def __getitem__(self, index: Any) -> DeviceArray:
        return DeviceArray(self.data_[_index(index)])

    def __setitem__(self, index: Any, value: Any) -> None:
        assert not isinstance(value, np.ndarray), "CuPy assigns no array of NumPy's"
        self.data_[_index(index)] = _bare(value)


def _operator(name: str) -> None:
    function = getattr(operator, name)

    def forward(self: DeviceArray, other: Any) -> Any:
        return NotImplemented if isinstance(other, np.ndarray) else DeviceArray(function(self.data_, _bare(other)))

    def reflected(self: DeviceArray, other: Any) -> Any:
        return NotImplemented if isinstance(other, np.ndarray) else DeviceArray(function(_bare(other), self.data_))

    def inplace(self: DeviceArray, other: Any) -> Any:
        assert not isinstance(other, np.ndarray)
        self.data_[...] = function(self.data_, _bare(other))
        return self

    plain = name.strip("_")
    setattr(DeviceArray, f"__{plain}__", forward)
    setattr(DeviceArray, f"__r{plain}__", reflected)
    setattr(DeviceArray, f"__i{plain}__", inplace)


def _unary(name: str) -> None:
    function = getattr(operator, name)
    setattr(DeviceArray, f"__{name}__", lambda self: DeviceArray(function(self.data_)))


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and_", "or_", "xor", "lshift", "rshift"):
    _operator(_name)
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    _operator(_name)
for _name in ("neg", "pos", "invert", "abs"):
    _unary(_name)


def _bare(value: Any) -> Any:
    if isinstance(value, DeviceArray):
        return value.data_
    if isinstance(value, tuple | list):
        return type(value)([_bare(item) for item in value])
    return {key: _bare(item) for key, item in value.items()} if isinstance(value, dict) else value


def _index(index: Any) -> Any:
    for item in index if isinstance(index, tuple) else (index,):
        assert not isinstance(item, np.ndarray | list), "CuPy copies an index of NumPy's in, and may wait"
        if isinstance(item, DeviceArray):
            assert item.dtype.kind in "iu", "CuPy counts the elements of a mask, and waits"
        elif isinstance(item, slice):
            assert not any(isinstance(bound, DeviceArray) for bound in (item.start, item.stop, item.step))
    return _bare(index)


def _wrapped(result: Any) -> Any:
    if isinstance(result, tuple | list):
        return tuple(_wrapped(item) for item in result)
    return DeviceArray(result)


class _Ufunc:
    def __init__(self, ufunc: np.ufunc) -> None:
        self._ufunc = ufunc

    def __call__(self, *args: Any, out: Any = None) -> Any:
        assert not any(isinstance(value, np.ndarray) for value in args), "CuPy's ufuncs take no array of NumPy's"
        result = self._ufunc(*_bare(args))
        if out is None:
            return DeviceArray(result)
        out.data_[...] = result
        return out

    def at(self, array: DeviceArray, index: Any, values: Any) -> None:
        assert array.dtype.char in _ATOMIC, f"CuPy adds no {array.dtype} at positions"
        self._ufunc.at(array.data_, _index(index), _bare(values))


class _Module:
    """The module that `CudaNamespace` takes for CuPy."""

    ndarray = DeviceArray

    def __getattr__(self, name: str) -> Any:
        if name not in NAMES["cupy"]:
            raise AttributeError(f"CuPy has no {name}")
        assert name not in _SYNCHRONIZES, f"cupy.{name} waits for the device"
        found = getattr(np, name)
        if isinstance(found, np.ufunc):
            return _Ufunc(found)
        if not callable(found) or isinstance(found, type) or name == "result_type":
            return found
        return self._function(name, found)

    @property
    def linalg(self) -> _Functions:
        """CuPy's linear algebra."""
        return _Functions(self, "linalg")

    @property
    def fft(self) -> _Functions:
        """CuPy's Fourier transforms."""
        return _Functions(self, "fft")

    def asarray(self, value: Any) -> Any:
        """Copies an array of NumPy's in."""
        return value if isinstance(value, DeviceArray) else DeviceArray(np.array(value))

    def _function(self, name: str, function: Callable[..., Any], signature: str = "") -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            flat = [item for value in args for item in (value if isinstance(value, tuple | list) else (value,))]
            if name not in _CREATION:
                taken = (np.ndarray, np.generic) if name not in ("where", "take", "isfinite") else np.ndarray
                assert not any(isinstance(item, taken) for item in flat), f"cupy.{name} takes CuPy's arrays alone"
            if name == "full":
                assert not isinstance(args[1], np.ndarray)
            _check_options(name, signature or NAMES["cupy"][name], options)
            return _wrapped(function(*_bare(args), **_bare(options)))

        return call


class _Functions:
    """A module of CuPy's functions, which all take arrays."""

    def __init__(self, module: _Module, name: str) -> None:
        self._module, self._name = module, name

    def __getattr__(self, name: str) -> Any:
        signature = NAMES[f"cupy.{self._name}"][name]
        return self._module._function(name, getattr(getattr(np, self._name), name), signature)


def _check_options(name: str, signature: str, options: dict[str, Any]) -> None:
    """Options are in the signature of CuPy's function."""
    words = {word.strip("+/").rstrip("=") for word in signature.split()}
    unknown = set() if "**kwargs" in words else set(options) - words
    assert not unknown, f"{name} of CuPy takes no {unknown}"


XP = CudaNamespace(_Module())
"""The namespace of kernels on a CUDA device, on these arrays."""


def on_device(value: Any, *, counters: bool, scalars: bool) -> Any:
    """Return the form in which a kernel on a device gets a value of NumPy's.

    Args:
        value: a value of any dtype.
        counters: integers and booleans of rank 0 are on the device, too.
        scalars: all other numbers of rank 0 are on the device.
    """
    if not isinstance(value, np.ndarray | np.generic):
        return value
    is_there = value.ndim or (counters if value.dtype.kind in "biu" else scalars)
    return DeviceArray(value) if is_there else np.asarray(value)[()]


def values_of(result: Any) -> np.ndarray[Any, Any]:
    """A kernel's output as an array of NumPy's, whoever has it."""
    return np.asarray(result.data_ if isinstance(result, DeviceArray) else result)


_checked: set[str] = set()


def check_on_device(node: Node, inputs: Sequence[Any], expected: Sequence[Any]) -> None:
    """Run the kernel of `node` as on a CUDA device, and compare its results with NumPy's.

    Nodes are left out if they run on the host, have state, or carry arrays in a variant. Nodes run only once if they
    differ in their values and extents alone.
    """
    tensors = (*node.inputs, *node.outputs)
    if node.op is CONSTANT or runs_on_host(node) or node.op.effects is not None:
        return
    if any(x.dtype == VARIANT for x in tensors):
        return
    kinds = [(value.dtype.str, value.ndim, bool(value.size)) for value in inputs]
    case = f"{node.op.name} {node.attrs} {kinds}"
    if case in _checked:
        return
    _checked.add(case)
    assert node.op.kernel is not None
    kernel, on_host = node.op.kernel(XP, **node.attrs), host_inputs(node)
    for counters, scalars in ((False, True), (True, True), (False, False)):
        given = [
            value if place in on_host else on_device(value, counters=counters, scalars=scalars)
            for place, value in enumerate(inputs)
        ]
        with np.errstate(all="ignore"):
            result = kernel(*given)
        outputs = (result,) if node.single else result
        for output, value, wanted in zip(node.outputs, outputs, expected, strict=True):
            found, want = values_of(value), np.asarray(wanted)
            assert found.dtype == output.dtype, f"{node.op.name}: {found.dtype} on a device, rule said {output.spec}"
            assert found.shape == want.shape, f"{node.op.name}: {found.shape} on a device, {want.shape} on the host"
            if found.dtype.kind == "V":
                found, want = found.astype(np.float32), want.astype(np.float32)
            np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-7, err_msg=node.op.name)


__all__ = ["NAMES", "XP", "DeviceArray", "check_on_device", "on_device", "values_of"]
