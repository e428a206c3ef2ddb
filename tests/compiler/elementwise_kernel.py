"""`ElementwiseKernel` for NumPy arrays: the body compiled by g++ and run as a loop."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from asyncflow.compiler.program.kernels.kernel_text import KernelSource
from asyncflow.ops.cuda.source import stored_type
from tests.patience import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Sequence

_FLAGS = [
    "-std=c++17",
    "-O0",  # a thousand functions compile in a quarter of the time that -O1 takes, and run once
    "-ffp-contract=off",
    "-shared",
    "-fPIC",
    "-Wall",
    "-Wno-unused-variable",
    "-Wno-bool-compare",
]

HALVES = """
__device__ inline unsigned asyncflow_bits(float f) { union { float f; unsigned u; } v; v.f = f; return v.u; }
__device__ inline float asyncflow_float(unsigned u) { union { float f; unsigned u; } v; v.u = u; return v.f; }
// A float with a last bit that says whether more digits follow, so that rounding it again is rounding once.
__device__ inline float asyncflow_to_odd(double d) {
  const float f = static_cast<float>(d);
  if (d != d || static_cast<double>(f) == d || f - f != 0) return f;
  unsigned u = asyncflow_bits(f);
  if ((static_cast<double>(f) > d) == (d > 0)) u -= 1;
  return asyncflow_float(u | 1);
}
class float16 {
  unsigned short h;
public:
  __device__ float16(float f) {
    const unsigned u = asyncflow_bits(f), sign = (u >> 16) & 0x8000, a = u & 0x7fffffff;
    if (a > 0x7f800000) h = sign | 0x7e00;
    else if (a >= 0x47800000) h = sign | 0x7c00;
    else if (a < 0x38800000) h = sign | (asyncflow_bits(asyncflow_float(a) + 0.5f) - 0x3f000000);
    else h = sign | ((a + 0xc8000fff + ((a >> 13) & 1)) >> 13);
  }
  explicit __device__ float16(double d) : float16(asyncflow_to_odd(d)) {}
  __device__ operator float() const {
    const unsigned sign = (h & 0x8000u) << 16, a = h & 0x7fffu;
    if (a >= 0x7c00) return asyncflow_float(sign | 0x7f800000 | ((a & 0x3ff) << 13));
    const float f = asyncflow_float(a << 13) * asyncflow_float(0x77800000);  // times 2 to the 112
    return asyncflow_float(sign | asyncflow_bits(f));
  }
};
class bfloat16 {
  unsigned short h;
public:
  __device__ bfloat16(float f) {
    const unsigned u = asyncflow_bits(f);
    h = f != f ? (u >> 16) | 0x40 : (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  }
  explicit __device__ bfloat16(double d) : bfloat16(static_cast<float>(d)) {}
  __device__ operator float() const { return asyncflow_float(static_cast<unsigned>(h) << 16); }
};
"""


def dtype_of(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def parameters(text: str) -> list[tuple[str, str]]:
    """Dtype and name of each parameter."""
    return [tuple(item.split()) for item in text.split(",")]  # type: ignore[misc]


def loops(sources: Sequence[KernelSource], *, head: str, qualifier: str, start: str, step: str) -> str:
    """One function per source that runs its body for each element; pointers to arrays are its parameters."""
    written = [head]
    for number, source in enumerate(sources):
        inputs, outputs = parameters(source.in_params), parameters(source.out_params)
        named = [f"const {stored_type(d)}* p_{n}" for d, n in inputs] + [f"{stored_type(d)}* p_{n}" for d, n in outputs]
        bound = [f"const {stored_type(d)} &{n} = p_{n}[i];" for d, n in inputs]
        bound += [f"{stored_type(d)} &{n} = p_{n}[i];" for d, n in outputs]
        written.append(
            f"namespace n{number} {{\n{source.preamble}\n"
            f'extern "C" {qualifier} void kernel_{number}(long long size, {", ".join(named)}) {{\n'
            f"for (long long i = {start}; i < size; i += {step}) {{\n"
            + "\n".join((*bound, source.operation))
            + "\n}}\n}"
        )
    return "\n".join(written)


def compiled(sources: Sequence[KernelSource]) -> list[Any]:
    """For each source, a function of NumPy arrays and scalars that gives the tuple of its outputs."""
    head = f"#include <math.h>\n#define __device__\n{HALVES}"
    text = loops(sources, head=head, qualifier="", start="0", step="1")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "kernels.so"
        command = ["g++", *_FLAGS, "-x", "c++", "-", "-o", str(library)]
        ran = subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
        assert not ran.returncode, f"{ran.stderr}\n{text}"
        loaded = ctypes.CDLL(str(library))
    return [_runner(getattr(loaded, f"kernel_{number}"), source) for number, source in enumerate(sources)]


def _runner(function: Any, source: KernelSource) -> Any:
    inputs = [dtype_of(dtype) for dtype, _ in parameters(source.in_params)]
    outputs = [dtype_of(dtype) for dtype, _ in parameters(source.out_params)]

    def run(*values: Any) -> tuple[np.ndarray, ...]:
        assert len(values) == len(inputs)
        for value, dtype in zip(values, inputs, strict=True):
            assert not isinstance(value, np.ndarray) or value.dtype == dtype, f"{value.dtype} for a {dtype}"
        converted = [np.asarray(value, dtype) for value, dtype in zip(values, inputs, strict=True)]
        arrays = [np.ascontiguousarray(array) for array in np.broadcast_arrays(*converted)]
        shape = np.broadcast_shapes(*(np.shape(value) for value in values))
        results = [np.empty(shape, dtype) for dtype in outputs]
        pointers = [ctypes.c_void_p(array.ctypes.data) for array in (*arrays, *results)]
        function(ctypes.c_longlong(results[0].size), *pointers)
        return tuple(results)

    return run


# -- a CUDA compiler -------------------------------------------------------------------------------------------------


def compile_as_cuda(sources: Sequence[KernelSource]) -> None:
    """Compiles the kernels for an sm_90 GPU, where NVRTC is installed (nvidia-cuda-nvrtc); elsewhere as C++."""
    thread = "blockIdx.x * blockDim.x + threadIdx.x"
    text = loops(
        sources, head=HALVES, qualifier="__global__", start=f"(long long){thread}", step="blockDim.x * gridDim.x"
    )
    # CuPy has headers for its half types; here they are those above.
    text = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    library = _nvrtc()
    if library is None:
        _check_cpp(text)
    else:
        _check_cuda(library, text)


def _nvrtc() -> Path | None:
    found = find_spec("nvidia")
    folders = found.submodule_search_locations or () if found else ()
    return next((file for folder in folders for file in sorted(Path(folder).rglob("libnvrtc.so.*"))), None)


def _check_cuda(library: Path, text: str) -> None:
    nvrtc = ctypes.CDLL(str(library))
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    options = [b"--gpu-architecture=sm_90", b"--std=c++17", b"--fmad=false", b"-ftz=true"]
    assert not nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernels.cu", 0, None, None)
    status = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    assert not status, log.value.decode()


def _check_cpp(text: str) -> None:
    head = "#include <math.h>\n#define __device__\n#define __global__\nstatic struct { int x; } blockIdx, blockDim, "
    command = ["g++", "-std=c++17", "-fsyntax-only", "-x", "c++", "-"]
    written = f"{head}threadIdx, gridDim;\n{text}"
    ran = subprocess.run(command, input=written, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert not ran.returncode, f"{ran.stderr}\n{text}"


class CompiledNumpy:
    """NumPy with an `ElementwiseKernel`, called as CuPy's is.

    Attributes:
        launched: names of the kernels that ran.
        inputs: what each was called with.
    """

    def __init__(self) -> None:
        self.launched: list[str] = []
        self.inputs: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def ElementwiseKernel(
        self, in_params: str, out_params: str, operation: str, name: str, *, preamble: str, options: tuple[str, ...]
    ) -> Any:
        assert options == ("--fmad=false",)
        run = _compile_one(in_params, out_params, operation, name, preamble)

        def launch(*values: Any) -> Any:
            self.launched.append(name)
            self.inputs.append(values)
            results = run(*values)
            return results if len(results) > 1 else results[0]

        return launch


@cache
def _compile_one(in_params: str, out_params: str, operation: str, name: str, preamble: str) -> Any:
    return compiled([KernelSource(in_params, out_params, operation, name, preamble)])[0]
