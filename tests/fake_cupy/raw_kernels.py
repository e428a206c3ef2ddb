"""`cupy.RawKernel` as `cuLaunchKernel` launches it: the source compiled for the host, and run thread by thread.

Rules, besides the rules of the engine
1. A launch is given a record: a table with the address of each parameter, and behind it the parameters, of 8 bytes
   each. The record must have as many as the kernel's signature. Behind a smaller parameter the bytes are 0.
2. The record is read at the launch, and may then be written again.
3. An address must be in memory in use at the launch, a piece handed out by a pool or an allocation outside of pools.
   The kernel may touch that piece alone; an access beside it loses the device.
4. Two launches never share static memory: blocks run one after the other.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from tests.fake_cupy.elementwise import compiled
from tests.fake_cupy.errors import CompileException, DeviceFault

if TYPE_CHECKING:
    from tests.fake_cupy.engine import Queue
    from tests.fake_cupy.kernels import Kernels

SIZES = {
    "bool": 1,
    "signed char": 1,
    "unsigned char": 1,
    "short": 2,
    "unsigned short": 2,
    "int": 4,
    "unsigned int": 4,
    "long long": 8,
    "unsigned long long": 8,
    "float": 4,
    "double": 8,
}
"""Bytes of the types that parameters may have, beside addresses."""

TYPES = [
    ctypes.c_uint,
    ctypes.c_uint,
    *(ctypes.POINTER(ctypes.c_ulonglong) for _ in range(3)),
    ctypes.POINTER(ctypes.c_int),
]
"""Types of what a kernel on the host takes: blocks, threads, parameters, and of addresses the bounds."""


class RecordError(AssertionError):
    """A launch whose record does not fit the kernel: a card would compute something, or be lost later."""


@dataclass(frozen=True, slots=True)
class KernelParameter:
    """A parameter of a raw kernel: its C++ type, or the type that it points to."""

    ctype: str
    name: str
    is_address: bool


def parameters_of(source: str, name: str) -> list[KernelParameter]:
    """The signature of a kernel in CUDA C++."""
    found = re.search(rf'extern "C" __global__\s+void {name}\(([^)]*)\)', source)
    if found is None:
        raise CompileException(f"named symbol not found: {name}", source, name, ())
    parameters = []
    for text in found[1].split(","):
        kind, _, own = text.strip().rpartition(" ")
        is_address = kind.endswith("*")
        ctype = kind.removesuffix("*").strip()
        if not is_address and ctype.removeprefix("const ") not in SIZES:
            raise CompileException(f"the stand-in has no parameters of type {ctype!r}", source, name, ())
        parameters.append(KernelParameter(ctype, own, is_address))
    return parameters


class RawKernel:
    """A kernel given as CUDA C++. Its `kernel` is compiled and loaded when it is asked for, for the current device."""

    _kernels: ClassVar[Kernels]
    _loaded: ClassVar[dict[int, LoadedKernel]]

    def __init__(self, code: str, name: str, options: tuple[str, ...] = (), **more: Any) -> None:
        if more:
            raise NotImplementedError("the fake's RawKernel takes code, name and options")
        if options != ("--fmad=false",):
            raise NotImplementedError(f"the fake's compiler does not contract, and is given {options}")
        self.code, self.name, self.options = code, name, options
        self._own: dict[int, LoadedKernel] = {}

    @property
    def kernel(self) -> LoadedKernel:
        platform = self._kernels.platform
        device = platform.runtime.getDevice()
        if device not in self._own:
            platform.engine.log("compile")
            found = LoadedKernel(self._kernels, self.code, self.name, device)
            self._own[device] = self._loaded[found.ptr] = found
        return self._own[device]


class LoadedKernel:
    """`cupy.cuda.function.Function`: a kernel on one device, by its handle `ptr`."""

    def __init__(self, kernels: Kernels, source: str, name: str, device: int) -> None:
        self.ptr = kernels.platform.engine.new_ptr()
        self._kernels = kernels
        self._name = name
        self._device = device
        self._parameters = parameters_of(source, name)
        self._run = compiled(on_host(source, name, self._parameters), name, TYPES)

    def launch(self, extents: Sequence[int], shared_nbytes: int, queue: Queue, record: int) -> None:
        """Give the kernel to a queue.

        Raises:
            RecordError: the parameters at the address `record` do not fit.
        """
        engine = self._kernels.platform.engine
        engine.enter("launchKernel", self._device)
        (blocks, *rest), name = extents, self._name
        threads = rest[2]
        if rest[:2] != [1, 1] or rest[3:] != [1, 1] or shared_nbytes or threads > 1024:
            raise RecordError(f"{name}: the stand-in has no such grid: {extents}, {shared_nbytes} bytes shared")
        if queue.device != self._device:
            raise RecordError(f"{name} is on device {self._device}, and was given to a stream of device {queue.device}")
        values = self._unpacked(record)
        bounds = [
            self._bounds(parameter, value) if parameter.is_address else (0, 0)
            for parameter, value in zip(self._parameters, values, strict=True)
        ]
        addresses = [value for value, (_, high) in zip(values, bounds, strict=True) if high]
        engine.give(queue, name, lambda: self._execute(blocks, threads, values, bounds), addresses=addresses)

    def _unpacked(self, record: int) -> list[int]:
        """The parameters, as unsigned numbers."""
        count = len(self._parameters)
        table = (ctypes.c_ulonglong * count).from_address(record)
        expected = [record + 8 * (count + index) for index in range(count)]
        if list(table) != expected:
            raise RecordError(f"{self._name} takes {count} parameters, and its record has another number")
        values = list((ctypes.c_ulonglong * count).from_address(record + 8 * count))
        for parameter, value in zip(self._parameters, values, strict=True):
            nbytes = 8 if parameter.is_address else SIZES[parameter.ctype.removeprefix("const ")]
            if value >> 8 * nbytes:
                raise RecordError(f"{self._name}: {parameter.name} has {nbytes} bytes, and is given {value:#x}")
        return values

    def _bounds(self, parameter: KernelParameter, address: int) -> tuple[int, int]:
        memory, pieces = self._kernels.platform.memory, self._kernels.platform.pieces
        bounds = pieces.bounds(address)
        if bounds is None and not pieces.is_pooled(address):
            bounds = memory.allocation(self._device, address)
        if bounds is None or memory.device_of(address) != self._device:
            raise RecordError(
                f"{self._name}: {parameter.name} is {address:#x}, which is in no memory in use on device {self._device}"
            )
        return bounds

    def _execute(self, blocks: int, threads: int, values: Sequence[int], bounds: Sequence[tuple[int, int]]) -> None:
        """Run it; on the GPU thread."""
        memory = self._kernels.platform.memory
        for low, high in bounds:
            if high and not memory.is_live(low, high - low):
                raise DeviceFault(700)
        count, outside = len(values), ctypes.c_int(0)
        lists = [values, [low for low, _ in bounds], [high for _, high in bounds]]
        self._run(blocks, threads, *((ctypes.c_ulonglong * count)(*each) for each in lists), ctypes.byref(outside))
        if outside.value:
            raise DeviceFault(700)


def on_host(source: str, name: str, parameters: Sequence[KernelParameter]) -> str:
    """The kernel in C++ for the host, with a function ``run`` that takes its parameters from arrays."""
    head = re.search(rf'extern "C" __global__\s+void {name}\([^)]*\)', source)
    assert head is not None
    checked = [
        f"{f'Checked<{parameter.ctype}>' if parameter.is_address else parameter.ctype} {parameter.name}"
        for parameter in parameters
    ]
    own = source.replace(head[0], f"static void {name}({', '.join(checked)})")
    given = []
    for index, parameter in enumerate(parameters):
        if parameter.is_address:
            places = ", ".join(f"(char*){array}[{index}]" for array in ("values", "low", "high"))
            given.append(f"Checked<{parameter.ctype}>{{{places}, outside}}")
        else:
            given.append(f"*(const {parameter.ctype.removeprefix('const ')}*)&values[{index}]")
    word = "unsigned long long"
    has_barriers = str("__syncthreads" in source).lower()
    return (
        f"{own}\n"
        f'extern "C" void run(unsigned blocks, unsigned threads, {word}* values, {word}* low, {word}* high, '
        "int* outside) {\n"
        f"asyncflow_run(blocks, threads, {has_barriers}, [&] {{ {name}({', '.join(given)}); }});\n}}\n"
    )
