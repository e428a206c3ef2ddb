"""The `fused` op: several elementwise ops that one kernel computes.

An array namespace that launches kernels of our own (`asyncflow.devices.cuda.kernels`) gets one. One with an
`ElementwiseKernel`, as CuPy's has, gets such a kernel. Elsewhere the ops run one by one. The results equal the separate
ops' to the bit: every op's result is rounded to its dtype, and multiplications and additions stay apart
(``--fmad=false``: NVRTC would contract them).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np

from asyncflow.compiler.program.kernels.chains import Chain, Member, Read
from asyncflow.compiler.program.kernels.kernel_text import OPTIONS, KernelSource, body_of, kernel_source
from asyncflow.compiler.program.kernels.layouts import Shapes, loop_of, shapes_of
from asyncflow.compiler.program.kernels.packed import PackedChain
from asyncflow.devices.protocol import Placed
from asyncflow.graph.ir import Node
from asyncflow.graph.op import NEW, Memory, Op, bound_kernel
from asyncflow.graph.values.shapes import Shape, is_static
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.cost import elements
from asyncflow.ops.straight_line import LineStep, straight_line
from asyncflow.values import Kernel, Namespace, Value


@lru_cache(maxsize=1024)
def _compiled(elementwise_kernel: Callable[..., Kernel], source: KernelSource) -> Kernel:
    """The kernel object of `source`; making it compiles nothing, calling it does, once per dtype and rank."""
    return elementwise_kernel(
        source.in_params, source.out_params, source.operation, source.name, preamble=source.preamble, options=OPTIONS
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
    computing = sum(not (member.is_view or member.joins) for member in chain.members)
    return float(computing * max(elements(shape) for shape in (*inputs, *outputs)))


def _kernel(xp: Namespace, *, chain: Chain) -> Kernel:
    one_by_one = _one_by_one(xp, chain)
    launches = getattr(xp, "launches", None)
    elementwise_kernel = getattr(xp, "ElementwiseKernel", None)
    if launches is None and elementwise_kernel is None:
        return one_by_one
    if chain.has_ends:
        apart = one_by_one if all(member.ends for member in chain.members) else _with_ends_apart(xp, chain)
        return apart if launches is None else PackedChain(chain, launches, apart)
    if launches is not None:
        return PackedChain(chain, launches, one_by_one)
    run = _compiled(elementwise_kernel, kernel_source(chain))
    if body_of(chain).reads != tuple(map(Read, range(len(chain.inputs)))):
        run = _with_views(run, xp, chain)
    scalars = [index for index, spec in enumerate(chain.inputs) if spec.shape == ()]
    if scalars:
        run = _with_scalars(run, one_by_one, scalars, may_be_alone=len(scalars) == len(chain.inputs))
    return run if _has_one_shape(chain) else _with_checked_shapes(run, one_by_one, chain)


def _one_by_one(xp: Namespace, chain: Chain) -> Kernel:
    """The members' own kernels, in turn."""
    steps = [LineStep(_own_kernel(xp, chain, member), member.operands) for member in chain.members]
    run = straight_line(len(chain.inputs), steps, chain.outputs if len(chain.outputs) > 1 else chain.outputs[0])
    shared = [chain.member(output).op.traits.memory is not Memory.NEW for output in chain.outputs]
    return _giving_new(run, shared) if any(shared) else run


def _giving_new(run: Kernel, are_shared: Sequence[bool]) -> Kernel:
    """`run`, with copies for the outputs that may be inputs or look into inputs, as one kernel's never do."""

    def launch(*inputs: Placed) -> Value:
        found = run(*inputs)
        if len(are_shared) == 1:
            return found.copy()
        return tuple([value.copy() if shared else value for value, shared in zip(found, are_shared, strict=True)])

    return launch


def _own_kernel(xp: Namespace, chain: Chain, member: Member) -> Kernel:
    of_scalars = all(chain.specs[operand].shape == () for operand in member.operands)
    return bound_kernel(member.op, xp, member.attrs, of_scalars=of_scalars)


def _with_scalars(run: Kernel, one_by_one: Kernel, scalars: Sequence[int], *, may_be_alone: bool) -> Kernel:
    """`run` for inputs among which there are values of rank 0, which may be on the host.

    The kernel takes NumPy scalars there, but no arrays, and needs one input that is on the device.
    """

    def launch(*inputs: Placed) -> Value:
        if may_be_alone and not any(hasattr(value, "__cuda_array_interface__") for value in inputs):
            return one_by_one(*inputs)
        values = list(inputs)
        for index in scalars:
            if isinstance(values[index], np.ndarray):
                values[index] = values[index][()]
        return run(*values)

    return launch


def _with_ends_apart(xp: Namespace, chain: Chain) -> Kernel:
    """A kernel of all but the members that join or reduce values, and then these members' own kernels."""
    values = tuple(dict.fromkeys(each.value for each in (*chain.stores, *chain.reduced)))
    computed = Chain(chain.inputs, tuple(member for member in chain.members if not member.ends), values)
    n_inputs, n_values = len(chain.inputs), len(values)
    places = {value: n_inputs + place for place, value in enumerate(values)}
    steps = [LineStep(_kernel(xp, chain=computed), tuple(range(n_inputs)), n_values if n_values > 1 else None)]
    for output in chain.outputs:
        if (member := chain.member(output)).ends:
            places[output] = n_inputs + n_values + len(steps) - 1
            steps.append(LineStep(_own_kernel(xp, chain, member), tuple([places[each] for each in member.operands])))
    results = [places[output] for output in chain.outputs]
    return straight_line(n_inputs, steps, results if len(results) > 1 else results[0])


def _with_views(run: Kernel, xp: Namespace, chain: Chain) -> Kernel:
    """`run`, given its inputs as the chain looks at them."""
    reads = body_of(chain).reads
    views = {
        step: _own_kernel(xp, chain, chain.member(step))
        for read in reads
        for step in read.steps
        if chain.member(step).is_view
    }
    find_shapes = lru_cache(maxsize=64)(lambda shapes: shapes_of(chain, shapes))

    def launch(*inputs: Placed) -> Value:
        shapes = find_shapes(_shapes(inputs)) or ()  # as checked before
        looked: list[Placed] = []
        for read in reads:
            value = inputs[read.source]
            for step in read.steps:
                value = views[step](value) if step in views else xp.broadcast_to(value, shapes[step])
            looked.append(value)
        return run(*looked)

    return launch


def _shapes(values: Sequence[Placed]) -> Shapes:
    return tuple([getattr(value, "shape", ()) for value in values])


def _has_one_shape(chain: Chain) -> bool:
    """Return True if the outputs are known to have the broadcast shape of the inputs, which is the kernel's."""
    every = range(len(chain.inputs))
    if not chain.has_views and all(len(sources) == len(every) for sources in chain.sources):
        return True
    shapes = {spec.shape for spec in chain.inputs}
    if not all(map(is_static, shapes)):
        return False
    return _is_one_shape(chain, tuple(tuple(dim or 0 for dim in spec.shape or ()) for spec in chain.inputs))


def _is_one_shape(chain: Chain, shapes: Shapes) -> bool:
    """Return True if one kernel can do it for inputs of these shapes."""
    found = shapes_of(chain, shapes)
    return found is not None and loop_of(chain, found) is not None


def _with_checked_shapes(run: Kernel, one_by_one: Kernel, chain: Chain) -> Kernel:
    """Return `run` guarded by a check that one kernel can do it: unknown extents may turn out to be 1."""
    fits = lru_cache(maxsize=64)(lambda shapes: _is_one_shape(chain, shapes))

    def launch(*inputs: Placed) -> Value:
        return run(*inputs) if fits(_shapes(inputs)) else one_by_one(*inputs)

    return launch


FUSED = Op("fused", _infer, _kernel, flops=_flops, traits=NEW)


def alone(node: Node, xp: Namespace) -> Kernel:
    """The kernel of one elementwise node as it would be fused."""
    inputs = tuple(tensor.spec for tensor in node.inputs)
    n_inputs = len(inputs)
    member = Member(node.op, node.attrs, tuple(range(n_inputs)), node.outputs[0].spec, node.name)
    return _kernel(xp, chain=Chain(inputs, (member,), (n_inputs,)))
