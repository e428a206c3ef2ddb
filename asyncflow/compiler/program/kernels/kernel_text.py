"""The CUDA C++ of chains: as the parts of an `ElementwiseKernel` of CuPy's, and as whole kernels of our own.

Both have the same expressions. A kernel of our own is written for one memory layout of its arrays (`Form`). The driver
launches it, and passes addresses, extents and strides.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, TypeAlias

from asyncflow.compiler.program.kernels.chains import Chain, Read
from asyncflow.compiler.program.kernels.row_text import rows_text
from asyncflow.errors import InternalError
from asyncflow.ops.cuda.functions import helpers
from asyncflow.ops.cuda.source import HALVES, c_type, expression, stored_type

OPTIONS = ("--fmad=false",)

_LONGEST_NAME = 60


@dataclass(frozen=True, slots=True)
class ElementWork:
    """The work of a chain on one element.

    Attributes:
        reads: the values loaded, ``x0``, ``x1``, and so on.
        lines: declare and compute, in C++.
        stored: for each value to be stored, its dtype's name and its expression.
        reduced: for each value to be reduced, its variable.
    """

    reads: tuple[Read, ...]
    lines: tuple[str, ...]
    stored: tuple[tuple[str, str], ...]
    reduced: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class KernelSource:
    """The parts of an `ElementwiseKernel`."""

    in_params: str
    out_params: str
    operation: str
    name: str
    preamble: str


def body_of(chain: Chain) -> ElementWork:
    """Return the work on one element: number k of the values in use is called ``x<k>`` or ``v<k>``."""
    specs = chain.specs
    reads, values = in_use(chain)
    names: dict[tuple[int, tuple[int, ...]], str] = {}
    lines: list[str] = []
    for index, read in enumerate(reads):
        is_half = specs[read.source].dtype.name in HALVES
        names[read.source, read.steps] = f"v{index}" if is_half else f"x{index}"
        if is_half:
            lines.append(f"const float v{index} = static_cast<float>(x{index});")
    for number, steps in values:
        member = chain.member(number)
        inner = (number, *steps) if steps else ()
        operands = [names[_seen(chain, operand, inner)] for operand in member.operands]
        dtypes = [specs[operand].dtype for operand in member.operands]
        text = expression(member.op, member.attrs, dtypes, member.spec.dtype, operands)
        if text is None:
            raise InternalError(f"{member.name}: {member.op.name} has no source for {dtypes}")
        name = names[number, steps] = f"v{len(names)}"
        lines.append(f"const {c_type(member.spec.dtype)} {name} = {text};")
    stored = []
    for store in chain.stores:
        dtype, name = specs[store.value].dtype.name, names[_seen(chain, store.value, ())]
        stored.append((dtype, f"static_cast<{dtype}>({name})" if dtype in HALVES else name))
    reduced = tuple([names[_seen(chain, each.value, ())] for each in chain.reduced])
    return ElementWork(reads, tuple(lines), tuple(stored), reduced)


_Seen: TypeAlias = tuple[int, tuple[int, ...]]
"""A value, and the members through whose operands it is looked at, from it on."""


def _seen(chain: Chain, number: int, steps: tuple[int, ...]) -> _Seen:
    """The value behind the views at the end of `steps`, for a kernel computes or loads that one."""
    while number >= len(chain.inputs) and chain.member(number).is_view:
        steps = (number, *steps)
        (number,) = chain.member(number).operands
    return number, steps


def in_use(chain: Chain) -> tuple[tuple[Read, ...], list[_Seen]]:
    """Return the values to load and to compute, each after its operands."""
    found: set[_Seen] = set()
    ahead = [_seen(chain, store.value, ()) for store in (*chain.stores, *chain.reduced)]
    while ahead:
        seen = ahead.pop()
        if seen in found:
            continue
        found.add(seen)
        number, steps = seen
        if number >= len(chain.inputs):
            inner = (number, *steps) if steps else ()
            ahead += [_seen(chain, operand, inner) for operand in chain.member(number).operands]
    in_order = sorted(found)
    reads = tuple(Read(*seen) for seen in in_order if seen[0] < len(chain.inputs))
    return reads, in_order[len(reads) :]


@lru_cache(maxsize=1024)
def kernel_source(chain: Chain) -> KernelSource:
    """Return the source for an `ElementwiseKernel`, whose parameters are the reads ``x0``, … and outputs ``y0``, …"""
    body = body_of(chain)
    lines = (*body.lines, *(f"y{index} = {stored};" for index, (_, stored) in enumerate(body.stored)))
    operation = "\n".join(lines)
    dtypes = [chain.inputs[read.source].dtype.name for read in body.reads]
    return KernelSource(
        in_params=", ".join(f"{dtype} x{index}" for index, dtype in enumerate(dtypes)),
        out_params=", ".join(f"{dtype} y{index}" for index, (dtype, _) in enumerate(body.stored)),
        operation=operation,
        name=kernel_name(chain),
        preamble="\n".join((*_headers(chain, of_stored=False), helpers(operation))),
    )


def _headers(chain: Chain, *, of_stored: bool) -> Iterator[str]:
    """Yield the headers of half-precision types, for an `ElementwiseKernel` without those of its parameters."""
    stored = {chain.specs[number].dtype.name for number in (*range(len(chain.inputs)), *chain.outputs)}
    for name in sorted({spec.dtype.name for spec in chain.specs} & HALVES - (set() if of_stored else stored)):
        yield f'#ifdef __CUDACC_RTC__\n#include "cupy/{name}.cuh"\n#endif'


def kernel_name(chain: Chain) -> str:
    """A name that says what the kernel does, for profilers."""
    joined = "_".join(("asyncflow", *(re.sub(r"\W", "_", member.op.name, flags=re.ASCII) for member in chain.members)))
    return joined if len(joined) <= _LONGEST_NAME else f"{joined[:_LONGEST_NAME]}_{len(chain.members)}"


# -- kernels of our own ----------------------------------------------------------------------------------------------

Lie: TypeAlias = Literal["flat", "strided", "one", "number"]
"""The place of an operand: one element after another in the order of the loop, with strides of its own, one element for
all, or a number among the parameters.
"""


class Form(NamedTuple):
    """A memory layout of the operands of a kernel.

    Attributes:
        rank: of the loop.
        reads: of each read.
        stores: of each value that is stored.
        lanes: number of threads that share a row where rows are reduced, a power of 2; else 0.
        is_long: True if numbers of 32 bits are too few for the elements.
    """

    rank: int
    reads: tuple[Lie, ...]
    stores: tuple[Lie, ...]
    is_long: bool = False
    lanes: int = 0


@lru_cache(maxsize=1024)
def packed_source(chain: Chain, form: Form) -> str:
    """Return the source of a kernel of our own.

    Its parameters are, in this order: for each read an address or a number, and for each store and each reduction an
    address. The number of elements follows, or of rows and of the elements in a row. Then come the extents of the loop
    but the first, and the strides of strided operands, in elements.
    """
    body = body_of(chain)
    index = "long long" if form.is_long else "int"
    parameters, loads, stores, strides = [], [], [], []
    for number, (read, lie) in enumerate(zip(body.reads, form.reads, strict=True)):
        dtype = chain.inputs[read.source].dtype
        if lie == "number":
            # A half is passed as a float, the type it is computed in.
            parameters.append(f"const {c_type(dtype)} x{number}")
            continue
        parameters.append(f"const {stored_type(dtype.name)}* p{number}")
        loads.append(f"const {stored_type(dtype.name)} x{number} = p{number}[{_place(lie, f'p{number}', form.rank)}];")
        strides += _strides(lie, f"p{number}", form.rank)
    for number, ((name, text), lie) in enumerate(zip(body.stored, form.stores, strict=True)):
        parameters.append(f"{stored_type(name)}* q{number}")
        stores.append(f"q{number}[{_place(lie, f'q{number}', form.rank)}] = {text};")
        strides += _strides(lie, f"q{number}", form.rank)
    for number, reduced in enumerate(chain.reduced):
        dtype = chain.member(chain.outputs[reduced.output]).spec.dtype
        parameters.append(f"{stored_type(dtype.name)}* z{number}")
    sizes = ("rows", "length") if form.lanes else ("n",)
    extents = [f"n{axis}" for axis in range(1, form.rank)]
    parameters += [f"const {index} {name}" for name in (*sizes, *extents, *strides)]
    computed = "\n".join((*_positions(form, index), *loads, *body.lines))
    operation = "\n".join((computed, *stores))
    if form.lanes:
        operation = rows_text(chain, body.reduced, (operation, computed), index, form.lanes)
    else:
        start = f"({index})blockIdx.x * ({index})blockDim.x + ({index})threadIdx.x"
        step = f"({index})gridDim.x * ({index})blockDim.x"
        operation = f"for ({index} i = {start}; i < n; i += {step}) {{\n{operation}\n}}"
    return "\n".join(
        (
            *_headers(chain, of_stored=True),
            helpers(operation),
            f'extern "C" __global__ void {kernel_name(chain)}({", ".join(parameters)}) {{',
            operation,
            "}\n",
        )
    )


def _place(lie: Lie, name: str, rank: int) -> str:
    """Return the number of the element, for element ``i`` of the loop."""
    if lie == "one":
        return "0"
    return "i" if lie == "flat" else " + ".join(f"i{axis} * {name}_{axis}" for axis in range(rank))


def _strides(lie: Lie, name: str, rank: int) -> list[str]:
    return [f"{name}_{axis}" for axis in range(rank)] if lie == "strided" else []


def _positions(form: Form, index: str) -> Iterator[str]:
    """Yield the declarations of the element's position along each axis, ``i0``, … of the loop."""
    if "strided" not in (*form.reads, *form.stores):
        return
    left = "i"
    for axis in range(form.rank - 1, 0, -1):
        yield f"const {index} i{axis} = {left} % n{axis};"
        if axis > 1:
            yield f"const {index} r{axis} = {left} / n{axis};"
        left = f"r{axis}" if axis > 1 else f"({left} / n{axis})"
    yield f"const {index} i0 = {left};"


def parameters_of(
    form: Form, extents: Sequence[int], strides: Sequence[Sequence[int]], sizes: Sequence[int]
) -> list[int]:
    """The numbers behind the operands of a kernel of this form: see `packed_source`.

    Args:
        form: of the kernel.
        extents: of the loop.
        strides: of each operand along each axis of the loop, in elements.
        sizes: the number of elements, or of rows and of the elements in a row.
    """
    lies = (*form.reads, *form.stores)
    own = [
        step
        for lie, steps in zip(lies, strides or ((),) * len(lies), strict=True)
        if lie == "strided"
        for step in steps
    ]
    mask = (1 << (64 if form.is_long else 32)) - 1
    return [number & mask for number in (*sizes, *extents[1:], *own)]
