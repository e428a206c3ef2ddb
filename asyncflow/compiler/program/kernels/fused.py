"""The `fused` op: several elementwise ops that one kernel computes.

Where the array namespace has an `ElementwiseKernel`, as CuPy's has, it is one kernel of generated source; elsewhere the
ops run one by one. The results equal the separate ops' to the bit: every op's result is rounded to its dtype, and
multiplications and additions stay apart (``--fmad=false``: NVRTC would contract them).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from asyncflow.errors import InternalError
from asyncflow.graph.ir import Attrs, Node
from asyncflow.graph.op import KERNELS, Op, bound_kernel
from asyncflow.graph.values.shapes import Shape, is_static
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.cost import elements
from asyncflow.ops.cuda.functions import helpers
from asyncflow.ops.cuda.source import HALVES, c_type, expression
from asyncflow.ops.straight_line import LineStep, straight_line
from asyncflow.values import Kernel, Namespace, Value

_OPTIONS = ("--fmad=false",)

_LONGEST_NAME = 60


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """An op of a chain.

    Attributes:
        op: which.
        attrs: its node's.
        operands: numbers of the values it takes; see `Chain`.
        spec: of its output.
        name: its node's, for people.
    """

    op: Op
    attrs: Attrs
    operands: tuple[int, ...]
    spec: Spec
    name: str


@dataclass(frozen=True, eq=False)
class Chain:
    """Elementwise ops that feed one another. Values are numbered: first the inputs, then each member's output.

    Attributes:
        inputs: specs of the inputs from outside.
        members: in an order in which they can run.
        outputs: numbers of the values used outside, all of them members' outputs.
    """

    inputs: tuple[Spec, ...]
    members: tuple[Member, ...]
    outputs: tuple[int, ...]

    @property
    def specs(self) -> tuple[Spec, ...]:
        """Of all values."""
        return (*self.inputs, *(member.spec for member in self.members))

    @cached_property
    def sources(self) -> tuple[tuple[int, ...], ...]:
        """For each output, the inputs it depends on, which determine its shape."""
        found: list[frozenset[int]] = [frozenset((index,)) for index in range(len(self.inputs))]
        for member in self.members:
            found.append(frozenset().union(*(found[operand] for operand in member.operands)))
        return tuple(tuple(sorted(found[output])) for output in self.outputs)

    def __repr__(self) -> str:
        return f"Chain({', '.join(member.op.name for member in self.members)})"


@dataclass(frozen=True, slots=True)
class KernelSource:
    """The parts of an `ElementwiseKernel`."""

    in_params: str
    out_params: str
    operation: str
    name: str
    preamble: str


def kernel_source(chain: Chain) -> KernelSource:
    """The source of the one kernel: inputs are ``x0``, …, outputs ``y0``, …, and the number k value is ``v<k>``."""
    specs = chain.specs
    lines: list[str] = []
    values: list[str] = []
    for index, spec in enumerate(chain.inputs):
        if spec.dtype.name in HALVES:
            lines.append(f"const float v{index} = static_cast<float>(x{index});")
        values.append(f"v{index}" if spec.dtype.name in HALVES else f"x{index}")
    for member in chain.members:
        dtypes = [specs[operand].dtype for operand in member.operands]
        operands = [values[operand] for operand in member.operands]
        text = expression(member.op, member.attrs, dtypes, member.spec.dtype, operands)
        if text is None:
            raise InternalError(f"{member.name}: {member.op.name} has no source for {dtypes}")
        lines.append(f"const {c_type(member.spec.dtype)} v{len(values)} = {text};")
        values.append(f"v{len(values)}")
    for index, output in enumerate(chain.outputs):
        dtype = specs[output].dtype.name
        stored = f"static_cast<{dtype}>({values[output]})" if dtype in HALVES else values[output]
        lines.append(f"y{index} = {stored};")
    operation = "\n".join(lines)
    return KernelSource(
        in_params=", ".join(f"{spec.dtype.name} x{index}" for index, spec in enumerate(chain.inputs)),
        out_params=", ".join(f"{specs[output].dtype.name} y{index}" for index, output in enumerate(chain.outputs)),
        operation=operation,
        name=_kernel_name(chain),
        preamble="\n".join((*_half_headers(chain), helpers(operation))),
    )


def _half_headers(chain: Chain) -> Iterator[str]:
    """Yield the headers of half-precision types: CuPy includes only the headers of a kernel's parameters."""
    stored = {chain.specs[number].dtype.name for number in (*range(len(chain.inputs)), *chain.outputs)}
    for name in sorted({spec.dtype.name for spec in chain.specs} & HALVES - stored):
        yield f'#ifdef __CUDACC_RTC__\n#include "cupy/{name}.cuh"\n#endif'


def _kernel_name(chain: Chain) -> str:
    """A name that says what the kernel does, for profilers."""
    joined = "_".join(("asyncflow", *(re.sub(r"\W", "_", member.op.name, flags=re.ASCII) for member in chain.members)))
    return joined if len(joined) <= _LONGEST_NAME else f"{joined[:_LONGEST_NAME]}_{len(chain.members)}"


@lru_cache(maxsize=1024)
def _compiled(elementwise_kernel: Callable[..., Kernel], source: KernelSource) -> Kernel:
    """The kernel object of `source`; making it compiles nothing, calling it does, once per dtype and rank."""
    return elementwise_kernel(
        source.in_params, source.out_params, source.operation, source.name, preamble=source.preamble, options=_OPTIONS
    )


# -- the op ----------------------------------------------------------------------------------------------------------


def _infer(*inputs: Spec, chain: Chain) -> Spec | tuple[Spec, ...]:
    specs = list(inputs)
    for member in chain.members:
        inferred = member.op.infer(*(specs[operand] for operand in member.operands), **member.attrs)
        assert isinstance(inferred, Spec), f"{member.op.name} has several outputs"
        specs.append(inferred)
    found = tuple(specs[output] for output in chain.outputs)
    return found if len(found) > 1 else found[0]


def _flops(inputs: Sequence[Shape], outputs: Sequence[Shape], *, chain: Chain) -> float:
    return float(len(chain.members) * elements(outputs[0]))


def _kernel(xp: Namespace, *, chain: Chain) -> Kernel:
    one_by_one = _one_by_one(xp, chain)
    elementwise_kernel = getattr(xp, "ElementwiseKernel", None)
    if elementwise_kernel is None:
        return one_by_one
    run = _compiled(elementwise_kernel, kernel_source(chain))
    scalars = [index for index, spec in enumerate(chain.inputs) if spec.shape == ()]
    if scalars:
        run = _with_scalars(run, one_by_one, scalars, may_be_alone=len(scalars) == len(chain.inputs))
    return run if _has_one_shape(chain) else _with_checked_shapes(run, one_by_one, chain)


def _one_by_one(xp: Namespace, chain: Chain) -> Kernel:
    """The members' own kernels, in turn."""
    steps = [LineStep(_own_kernel(xp, chain, member), member.operands) for member in chain.members]
    return straight_line(len(chain.inputs), steps, chain.outputs if len(chain.outputs) > 1 else chain.outputs[0])


def _own_kernel(xp: Namespace, chain: Chain, member: Member) -> Kernel:
    of_scalars = all(chain.specs[operand].shape == () for operand in member.operands)
    return bound_kernel(member.op, xp, member.attrs, of_scalars=of_scalars)


def _with_scalars(run: Kernel, one_by_one: Kernel, scalars: Sequence[int], *, may_be_alone: bool) -> Kernel:
    """`run` for inputs among which there are values of rank 0, which may be on the host.

    The kernel takes NumPy scalars there, but no arrays, and needs one input that is on the device.
    """

    def launch(*inputs: Any) -> Value:
        if may_be_alone and not any(hasattr(value, "__cuda_array_interface__") for value in inputs):
            return one_by_one(*inputs)
        values = list(inputs)
        for index in scalars:
            if isinstance(values[index], np.ndarray):
                values[index] = values[index][()]
        return run(*values)

    return launch


def _has_one_shape(chain: Chain) -> bool:
    """Return True if the outputs are known to have the broadcast shape of the inputs, which is the kernel's."""
    every = range(len(chain.inputs))
    if all(len(sources) == len(every) for sources in chain.sources):
        return True
    shapes = {spec.shape for spec in chain.inputs}
    if not all(map(is_static, shapes)):
        return False
    known = tuple(tuple(dim or 0 for dim in spec.shape or ()) for spec in chain.inputs)
    return _is_one_shape(chain, known)


def _is_one_shape(chain: Chain, shapes: tuple[tuple[int, ...], ...]) -> bool:
    """Return True if the outputs have the broadcast shape of the inputs' `shapes`."""
    try:
        whole = np.broadcast_shapes(*shapes)
    except ValueError:
        return False  # the ops one by one say which of them do not fit
    return all(np.broadcast_shapes(*(shapes[index] for index in sources)) == whole for sources in chain.sources)


def _with_checked_shapes(run: Kernel, one_by_one: Kernel, chain: Chain) -> Kernel:
    """Return `run` guarded by a check that one kernel can do it: unknown extents may turn out to be 1."""
    fits = lru_cache(maxsize=64)(lambda shapes: _is_one_shape(chain, shapes))

    def launch(*inputs: Any) -> Value:
        shapes = tuple([getattr(value, "shape", ()) for value in inputs])
        return run(*inputs) if fits(shapes) else one_by_one(*inputs)

    return launch


FUSED = Op("fused", _infer, _kernel, flops=_flops, traits=KERNELS)


def alone(node: Node, xp: Namespace) -> Kernel:
    """The kernel of one elementwise node as it would be fused."""
    inputs = tuple(tensor.spec for tensor in node.inputs)
    n_inputs = len(inputs)
    member = Member(node.op, node.attrs, tuple(range(n_inputs)), node.outputs[0].spec, node.name)
    return _kernel(xp, chain=Chain(inputs, (member,), (n_inputs,)))
