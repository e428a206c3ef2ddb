"""`cupy.ElementwiseKernel`: its C++ body is compiled for the host and really run, an element at a time."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from tests.fake_cupy.errors import CompileException
from tests.fake_cupy.kernels import Kernels

if TYPE_CHECKING:
    from tests.fake_cupy.arrays import Array

HEADER = Path(__file__).with_name("cuda_on_host.hpp")
OPTIONS = ("-O1", "-std=c++17", "-fPIC", "-ffp-contract=off", "-w")
TYPE_NAMES = {
    "bool": "bool",
    "int8": "signed char",
    "int16": "short",
    "int32": "int",
    "int64": "long long",
    "uint8": "unsigned char",
    "uint16": "unsigned short",
    "uint32": "unsigned int",
    "uint64": "unsigned long long",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float32": "float",
    "float64": "double",
    "complex64": "thrust::complex<float>",
    "complex128": "thrust::complex<double>",
}
_loaded: dict[str, Any] = {}


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a kernel; its `dtype` is None where `ctype` is a letter that stands for any type."""

    name: str
    dtype: np.dtype[Any] | None
    ctype: str
    raw: bool
    is_const: bool


def parse(text: str, is_const: bool) -> list[Parameter]:
    """The parameters of a list such as ``"float32 x, raw T y"``."""
    return [parse_one(part.split(), is_const) for part in text.split(",") if part.strip()]


def parse_one(words: Sequence[str], is_const: bool) -> Parameter:
    if len(words) < 2:
        raise ValueError(f"Syntax error: {' '.join(words)}")
    *keywords, kind, name = words
    raw = False
    for keyword in keywords:
        if keyword == "raw":
            raw = True
        elif keyword == "_non_const":
            is_const = False
        else:
            raise Exception(f'Unknown keyword "{keyword}"')
    if name in ("i", "_ind"):
        raise ValueError(f"Can not use '{name}' as a parameter name")
    if len(kind) == 1:
        return Parameter(name, None, kind, raw, is_const)
    dtype = np.dtype(kind)
    if dtype.name not in TYPE_NAMES:
        raise ValueError(f"Unsupported dtype {dtype}")
    return Parameter(name, dtype, TYPE_NAMES[dtype.name], raw, is_const)


LOOP = [ctypes.c_longlong, ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_longlong)]
"""Types of what the loop of an `ElementwiseKernel` takes."""


def compiled(source: str, name: str, types: Sequence[Any]) -> Any:
    """Return the function ``run`` of a C++ source, built at most once; kept between processes in the temporary folder.

    Raises:
        CompileException: it does not compile.
        RuntimeError: this machine has no C++ compiler.
    """
    header = HEADER.read_text()
    key = _key(header, source)
    if key in _loaded:
        return _loaded[key]
    folder = Path(tempfile.gettempdir()) / f"asyncflow-fake-cupy-{os.getuid() if hasattr(os, 'getuid') else 0}"
    library = folder / f"{key}.so"
    if not library.exists():
        folder.mkdir(mode=0o700, exist_ok=True)
        _compile(["-shared", "-include", str(_header(folder, header)), "-x", "c++", "-"], source, library, name)
    run = ctypes.CDLL(str(library)).run
    run.argtypes = types
    run.restype = None
    _loaded[key] = run
    return run


def _key(*parts: str) -> str:
    return hashlib.sha256("\0".join((*parts, *OPTIONS)).encode()).hexdigest()[:32]


def _header(folder: Path, text: str) -> Path:
    """Return the path of the header, which is there compiled as well: reading it takes four fifths of a compilation."""
    header = folder / f"{_key(text)}.hpp"
    compiled_header = header.with_name(f"{header.name}.gch")
    if not compiled_header.exists():
        with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as written:
            written.write(text)
        Path(written.name).replace(header)
        _compile(["-x", "c++-header", str(header)], text, compiled_header, HEADER.name)
    return header


def _compile(options: Sequence[str], source: str, target: Path, name: str) -> None:
    """Compile `source` to the file `target`, which appears as a whole: other processes may want it at the same time."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise RuntimeError("the fake's ElementwiseKernel needs a C++ compiler (g++ or c++) on the PATH")
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        output = Path(work) / "output"
        command = [compiler, *OPTIONS, *options, "-o", str(output)]
        done = subprocess.run(command, input=source, capture_output=True, text=True, check=False, timeout=100)
        if done.returncode:
            raise CompileException(f"{done.stderr}\n{source}", source, name, OPTIONS, "g++")
        output.replace(target)


class ElementwiseKernel:
    """A kernel given as the C++ of one element.

    The first launch of each set of types compiles, which is logged as the blocking call ``"compile"``.
    """

    _kernels: ClassVar[Kernels]

    def __init__(
        self,
        in_params: str,
        out_params: str,
        operation: str,
        name: str = "kernel",
        reduce_dims: bool = True,
        preamble: str = "",
        no_return: bool = False,
        return_tuple: bool = False,
        *,
        loop_prep: str = "",
        after_loop: str = "",
        options: tuple[str, ...] = (),
    ) -> None:
        if not name.isidentifier():
            raise ValueError(f'Invalid kernel name: "{name}"')
        self.in_params, self.out_params = tuple(parse(in_params, True)), tuple(parse(out_params, False))
        self.params = self.in_params + self.out_params
        names = [parameter.name for parameter in self.params]
        if len(set(names)) < len(names):
            raise ValueError(f"a parameter name is used twice in kernel {name!r}: {names}")
        self.nin, self.nout, self.nargs = len(self.in_params), len(self.out_params), len(self.params)
        self.operation, self.name, self.preamble = operation, name, preamble
        self.no_return, self.return_tuple = no_return, return_tuple
        self._loop_prep, self._after_loop = loop_prep, after_loop
        self._built: dict[tuple[str, ...], Any] = {}

    def __call__(self, *args: Any, size: int | None = None, stream: Any = None, block_size: int = 128) -> Any:
        if len(args) not in (self.nin, self.nargs):
            raise TypeError(
                f"Wrong number of arguments for {self.name!r}. "
                f"It must be either {self.nin} or {self.nargs} (with outputs), but given {len(args)}."
            )
        array = self._kernels.ndarray
        for value in args:
            if not isinstance(value, (array, int, float, complex, np.generic)):
                raise TypeError(f"Unsupported type {type(value)}")
        outs: list[Array] = list(args[self.nin :])
        if any(not isinstance(value, array) for value in outs):
            raise TypeError("Output arguments type must be cupy.ndarray")
        types = self._types(args)
        shape = self._shape(args, size)
        if not outs:
            if any(parameter.raw for parameter in self.out_params):
                raise ValueError("Output array size is Undecided")
            outs = [array(shape, types[parameter.ctype]) for parameter in self.out_params]
        for parameter, value in zip(self.out_params, outs, strict=True):
            if not parameter.raw and value.shape != shape:
                raise ValueError(f"Out shape is mismatched: {parameter.name} is {value.shape}, the loop is {shape}")
        self._launch(args[: self.nin], outs, types, shape, stream)
        if self.no_return:
            return None
        return tuple(outs) if self.return_tuple or len(outs) != 1 else outs[0]

    def _types(self, args: Sequence[Any]) -> dict[str, np.dtype[Any]]:
        """The dtype of every C type among the parameters: arrays decide on the letters before scalars."""
        array = self._kernels.ndarray
        types = {p.ctype: p.dtype for p in self.params if p.dtype is not None}
        pairs = list(zip(self.params, args, strict=False))
        for parameter, value in pairs:
            if isinstance(value, array):
                decided = types.setdefault(parameter.ctype, value.dtype)
                if decided != value.dtype:
                    raise TypeError(f"Type is mismatched. {parameter.name} {value.dtype} {decided}")
        for parameter, value in pairs:
            if not isinstance(value, array):
                types.setdefault(parameter.ctype, np.asarray(value).dtype)
        for parameter in self.params:
            if parameter.ctype not in types:
                raise ValueError(f"the type {parameter.ctype} of {parameter.name} is not decided by any argument")
        return types

    def _shape(self, args: Sequence[Any], size: int | None) -> tuple[int, ...]:
        """That of the loop: all arguments that are not raw, broadcast."""
        array = self._kernels.ndarray
        looped = [
            value
            for parameter, value in zip(self.params, args, strict=False)
            if isinstance(value, array) and not parameter.raw
        ]
        if looped:
            if size is not None:
                raise ValueError("Specified 'size' can be used only if all of the Array are 'raw'.")
            return np.broadcast_shapes(*(value.shape for value in looped))
        if size is None:
            raise ValueError("Loop size is undecided.")
        return (size,)

    def _launch(
        self,
        inputs: Sequence[Any],
        outs: Sequence[Array],
        types: dict[str, np.dtype[Any]],
        shape: tuple[int, ...],
        stream: Any,
    ) -> None:
        kernels = self._kernels
        run = self._function(types)
        if not np.prod(shape, dtype=np.int64):
            return
        array = kernels.ndarray
        reads = [value for value in (*inputs, *outs) if isinstance(value, array)]
        scalars = [
            None if isinstance(value, array) else np.asarray(value).astype(types[parameter.ctype])
            for parameter, value in zip(self.in_params, inputs, strict=True)
        ]

        def execute(*views: np.ndarray) -> None:
            remaining = iter(views)
            values = [next(remaining) if scalar is None else scalar for scalar in scalars]
            self._execute(run, values, list(remaining), shape)

        if stream is None:
            kernels.launch(self.name, execute, reads)
        else:
            with stream:
                kernels.launch(self.name, execute, reads)

    def _execute(
        self, run: Any, inputs: Sequence[np.ndarray], outs: Sequence[np.ndarray], shape: tuple[int, ...]
    ) -> None:
        """Run the loop on contiguous arrays; runs on the GPU thread."""
        held = []
        for parameter, value in zip(self.params, (*inputs, *outs), strict=True):
            if parameter.is_const and not parameter.raw and value.shape:
                value = np.broadcast_to(value, shape)
            held.append(np.ascontiguousarray(value))
        pointers = (ctypes.c_void_p * len(held))(*(value.ctypes.data for value in held))
        sizes = (ctypes.c_longlong * len(held))(*(value.size for value in held))
        run(int(np.prod(shape, dtype=np.int64)), pointers, sizes)
        for value, computed in zip(outs, held[len(inputs) :], strict=True):
            if computed.ctypes.data != value.ctypes.data:
                value[...] = computed.reshape(value.shape)

    def _function(self, types: dict[str, np.dtype[Any]]) -> Any:
        key = tuple(types[parameter.ctype].name for parameter in self.params)
        if key not in self._built:
            self._kernels.platform.engine.log("compile")
            self._built[key] = compiled(self.source(types), self.name, LOOP)
        return self._built[key]

    def source(self, types: dict[str, np.dtype[Any]]) -> str:
        """The C++ that is compiled after the header."""
        letters = {parameter.ctype for parameter in self.params if parameter.dtype is None}
        lines = [f"typedef {TYPE_NAMES[types[letter].name]} {letter};" for letter in sorted(letters)]
        lines += [self.preamble, 'extern "C" void run(long long size_, void** args_, long long* sizes_) {']
        lines.append("Indexer _ind{size_, 0};")
        for index, parameter in enumerate(self.params):
            const = "const " if parameter.is_const else ""
            pointer = f"({const}{parameter.ctype}*)args_[{index}]"
            if parameter.raw:
                lines.append(f"Raw<{const}{parameter.ctype}> {parameter.name}{{{pointer}, sizes_[{index}]}};")
            else:
                lines.append(f"{const}{parameter.ctype}* p{index}_ = {pointer};")
        lines += [f"{self._loop_prep};", "for (ptrdiff_t i = 0; i < size_; ++i) {", "_ind.i_ = i;"]
        for index, parameter in enumerate(self.params):
            if not parameter.raw:
                const = "const " if parameter.is_const else ""
                lines.append(f"{const}{parameter.ctype} &{parameter.name} = p{index}_[sizes_[{index}] == 1 ? 0 : i];")
        lines += [f"{self.operation};", "}", f"{self._after_loop};", "}"]
        return "\n".join(lines) + "\n"
