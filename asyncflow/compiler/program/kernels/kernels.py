"""Binding of each node's kernel to device, attributes and state, and guards where the session asks for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from inspect import isawaitable, iscoroutinefunction
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from asyncflow.autodiff.stores.checkpoints import CHECKPOINT, SAVE_FIRST, SEGMENT_STORE
from asyncflow.autodiff.stores.saved_values import READ_SAVED, SAVE
from asyncflow.compiler.program.host_values import (
    computes_on_host,
    is_metadata,
    keeps_on_host,
    may_be_host_vector,
    may_stay_on_host,
)
from asyncflow.compiler.program.kernels.fused import alone
from asyncflow.compiler.program.kernels.work import flops_of, kernel_count, launch_of
from asyncflow.compiler.program.purity import has_variants
from asyncflow.control.stores.tensor_array import TENSOR_ARRAY
from asyncflow.devices.memory import TRACKED_BYTES, MemoryLimitExceeded
from asyncflow.devices.protocol import ArraySpec, AsynchronousDevice, CodeInfo, KernelInfo, KernelRecipe, Shape
from asyncflow.devices.values import as_scalar
from asyncflow.errors import OutOfMemoryError, a_kind
from asyncflow.graph.builtin import CONSTANT
from asyncflow.graph.op import bound_kernel, host_inputs, is_registered, runs_on_host
from asyncflow.graph.resource import Resource, resources_of
from asyncflow.graph.structured import PooledNode
from asyncflow.graph.values.dtypes import VARIANT, dtype_name
from asyncflow.graph.values.shapes import format_shape, is_compatible, is_static, size_of
from asyncflow.graph.values.spec import KnownSpec, Spec
from asyncflow.ops.arithmetic.elementwise import FLOOR_DIVIDE, REMAINDER
from asyncflow.ops.rows.by_row import PausingKernel
from asyncflow.state.waiting.awaiting import granted
from asyncflow.state.waiting.lines import ToldPlace
from asyncflow.streams.holding import in_line
from asyncflow.values import Array

if TYPE_CHECKING:
    from asyncflow.control.stores.array_value import ArrayValue
    from asyncflow.graph.ir import Node, Tensor
    from asyncflow.values import Kernel, Namespace, Value

Resolve: TypeAlias = Callable[[Resource], Any]
"""Gives the state a session keeps for a resource."""


SMALL_BYTES = TRACKED_BYTES
"""Kernels on known shapes of fewer bytes are never worth timing, accounting or moving off the event loop."""

_NO_CODE = CodeInfo()

_NO_VALUES: Mapping[int, Array] = MappingProxyType({})


def is_small_spec(spec: Spec) -> bool:
    """Return True if values of this spec are known to be small."""
    size = size_of(spec.shape)
    return size is not None and size * spec.dtype.itemsize < SMALL_BYTES


def is_light(nodes: Iterable[Node]) -> bool:
    """Return True if all values of these nodes, also in their bodies, are known to be small."""
    return all(
        all(is_small_spec(tensor.spec) for tensor in (*node.inputs, *node.outputs))
        and all(is_light(body.nodes) for body in node.subgraphs)
        for node in nodes
    )


SAVES = (SAVE, SAVE_FIRST, CHECKPOINT)
"""Ops that save their third input, or may, depending on their second input, the number of the iteration."""


def waits_for_saved(node: Node) -> Sequence[Tensor] | None:
    """Return the store, and for a read the number, for which `node` may have to wait; None if it never waits.

    Values known to be small never move.
    """
    if node.op is READ_SAVED:
        return None if is_small_spec(node.outputs[0].spec) else node.inputs
    return None if node.op not in SAVES or is_small_spec(node.inputs[2].spec) else node.inputs[:1]


def asks_for_memory(body: Iterable[Node]) -> bool:
    """Return True if iterations with these nodes, inner loops included, save or read values that may move."""
    return any(waits_for_saved(node) is not None for node in body)


def bind_kernel(node: Node, xp: Namespace, resolve: Resolve, *, check_outputs: bool, check_numerics: bool) -> Kernel:
    """The callable that runs `node` on one device.

    Args:
        node: of an op with a kernel.
        xp: the device's array namespace.
        resolve: looks up the state of resources among the attributes.
        check_outputs: hold every output against the op's shape rule.
        check_numerics: fail on NaN and infinity.
    """
    attrs = {name: resolve(value) if isinstance(value, Resource) else value for name, value in node.attrs.items()}
    if xp is not np and node.op in (FLOOR_DIVIDE, REMAINDER) and node.outputs[0].dtype.kind not in "biu":
        # CuPy's ufuncs differ from NumPy's: their 1.0 // 0.2 is 5, not 4.
        kernel = alone(node, xp)
    else:
        kernel = bound_kernel(node.op, xp, attrs, of_scalars=all(tensor.shape == () for tensor in node.inputs))
    if node.op.conduct.is_async:
        if isinstance(node, PooledNode) and has_variants(node.inputs):
            return partial(kernel, stores_on=node.device)
        return kernel
    if xp is not np and any(dtype_name(tensor.dtype) == "bfloat16" for tensor in node.outputs):
        kernel = _casting(node, kernel)
    if check_outputs:
        kernel = _followed_by(kernel, _output_check(node, xp))
    if check_numerics and any(tensor.dtype.kind in "fc" for tensor in node.outputs):
        kernel = _followed_by(kernel, _number_check(node))
    return kernel


def bind_launch(
    node: Node,
    bare: Callable[[Namespace], Kernel],
    device: AsynchronousDevice,
    stream: int,
    found: AbstractSet[Tensor],
    *,
    in_region: bool = False,
    is_checked: bool = False,
) -> Kernel:
    """Return the launcher of `node` on one of the device's compute streams.

    Args:
        node: of an op with a kernel.
        bare: gives the node's kernel for an array namespace.
        device: where it runs.
        stream: number of the compute stream.
        found: tensors that are on the host for certain.
        in_region: the code of a region calls it.
        is_checked: what `bare` gives is more than the op's own kernel.
    """
    if node.op is CONSTANT and not node.control_inputs:
        # The value is copied in when the plan is made, not at each firing.
        value = bare(np)()
        if not (is_host_spec(node.outputs[0].spec) or node.outputs[0] in found):
            value = _constant_on(device, node, value)
        return lambda: value
    able = device.capabilities
    leaves_results = able.leaves_numbers and any(x in found for x in node.outputs)
    on_host = runs_on_host(node) and (able.own_memory or leaves_results)
    there = [place for place, x in enumerate(node.outputs) if x in found and x.shape != ()]
    may_stay = able.leaves_numbers and (may_stay_on_host(node) or keeps_on_host(node, found))
    keeps_arrays, everything = _keeps_arrays(node), frozenset(range(len(node.inputs)))
    info = KernelInfo(
        name=node.name,
        stream=stream,
        single=node.single,
        conduct=node.op.conduct,
        is_async=node.op.conduct.is_async or on_host,
        may_run_on_host=all(is_host_spec(tensor.spec) for tensor in node.outputs),
        keeps_arrays=keeps_arrays,
        moves_references=node.op in (*SAVES, READ_SAVED, SEGMENT_STORE),
        uses_state=any(True for _ in resources_of(node)),
        host_inputs=everything if runs_on_host(node) and not keeps_arrays else host_inputs(node),
        code=CodeInfo(host_outputs=tuple(there)) if there else _NO_CODE,
        stays=getattr(node.attrs.get("shared"), "stays", frozenset()),
        on_host=giving_scalars(bare(np), node) if may_stay else None,
        is_metadata=is_metadata(node) or (node.op is READ_SAVED and node.outputs[0] in found),
        in_region=in_region,
        launch=launch_of(node),
        kernels=kernel_count(node, found),
        recipe=None if is_checked else _recipe(node),  # kernels remade from a recipe elsewhere would not check
        flops=partial(kernel_flops, node),
        infer=partial(kernel_specs, node),
    )
    kernel = bare(np if on_host else device.xp)
    if node.op.conduct.is_async and not iscoroutinefunction(kernel):
        kernel = _awaiting(kernel)
    return device.bind(partial(_one_by_one, kernel) if node.op is TENSOR_ARRAY else kernel, info)


def _awaiting(kernel: Kernel) -> Kernel:
    async def call(*inputs: Value, **told: Value) -> Value:
        found = kernel(*inputs, **told)
        if isinstance(found, ToldPlace):
            return await granted(found)
        with in_line():
            return await found if isawaitable(found) else await granted(found)

    return call


def bind_member(
    node: Node,
    bare: Callable[[Namespace], Kernel],
    device: AsynchronousDevice,
    stream: int,
    on_host: AbstractSet[Tensor],
) -> Kernel:
    """The function called for a node of a region: a kernel on the device's arrays and host values.

    Where the arrays of a device are NumPy's, as a simulated one's are, they have to be told apart from the host's: such
    a region is made of device values, and its kernels launch themselves.
    """
    if device.xp is np:  # only launchers inspect types, which tell device arrays from host arrays
        return bind_launch(node, bare, device, stream, on_host, in_region=True)
    if node.op is CONSTANT and not node.control_inputs:
        value = bare(np)()
        if node.outputs[0].shape == () or node.outputs[0] not in on_host:
            value = device.resident(_constant_on(device, node, value), stream)
        return lambda: value
    if computes_on_host(node, on_host):
        return giving_scalars(bare(np), node)
    kernel, read = bare(device.xp), host_inputs(node)
    vectors = [
        index
        for index, tensor in enumerate(node.inputs)
        if tensor in on_host and tensor.spec.shape != () and index not in read
    ]
    if vectors:
        return _uploading(kernel, vectors, device.xp, node.op.conduct.needs_context)
    operands = [index for index in range(len(node.inputs)) if index not in read]
    # A store that drops elements as they are read cannot be read twice.
    may_repeat = not node.op.conduct.needs_context and not has_variants(node.inputs)
    if operands and may_repeat and all(node.inputs[k].shape in ((), None) for k in operands):
        return _of_numbers(kernel, operands, device.xp)
    return kernel


def giving_scalars(kernel: Kernel, node: Node) -> Kernel:
    """`kernel`, computed by NumPy, with scalars for arrays of rank 0: other array libraries refuse NumPy's arrays."""
    if kernel is node.op.scalar_kernel or isinstance(kernel, np.ufunc):
        return kernel  # these return scalars already
    if node.single:
        return lambda *inputs: as_scalar(kernel(*inputs))
    return lambda *inputs: tuple([as_scalar(value) for value in kernel(*inputs)])


def _uploading(kernel: Kernel, positions: Sequence[int], xp: Namespace, needs_context: bool) -> Kernel:
    """A kernel that uses vectors of the host as data, such as the sizes of an array."""
    shift = 1 if needs_context else 0

    def call(*inputs: Value) -> Value:
        values = list(inputs)
        for position in positions:
            values[position + shift] = xp.asarray(values[position + shift])
        return kernel(*values)

    return call


def _of_numbers(kernel: Kernel, operands: Sequence[int], xp: Namespace) -> Kernel:
    """Wrap `kernel` so that host numbers are copied to the device, where NumPy would make an array of them alone."""

    def call(*inputs: Value) -> Value:
        result = kernel(*inputs)
        if isinstance(result, np.ndarray) or (type(result) is tuple and any(isinstance(x, np.ndarray) for x in result)):
            values = list(inputs)
            for index in operands:
                if isinstance(values[index], np.generic):
                    values[index] = xp.full((), values[index])  # by a fill: a CUDA graph cannot copy from the host
            result = kernel(*values)
        return result

    return call


def find_unknown_vectors(inputs: Sequence[Tensor], on_host: AbstractSet[Tensor]) -> tuple[int, ...]:
    """Positions of the inputs that code takes for the device's, and that may come as vectors of the host."""
    return tuple(
        index for index, tensor in enumerate(inputs) if tensor not in on_host and may_be_host_vector(tensor.spec)
    )


def _one_by_one(new_array: Kernel, size: Array) -> ArrayValue:
    """A TensorArray for a device that knows when each value is written, and when its memory is free."""
    array: ArrayValue = new_array(size)
    return array.one_by_one()


def _recipe(node: Node) -> KernelRecipe | None:
    is_plain = node.op.is_pure and is_registered(node.op) and not _keeps_arrays(node)
    return KernelRecipe(node.op.name, node.attrs) if is_plain else None


def _keeps_arrays(node: Node) -> bool:
    if node.op.conduct.is_user or any(tensor.spec.dtype == VARIANT for tensor in (*node.inputs, *node.outputs)):
        return True
    # A check writes only to itself, so that it is not pruned.
    return node.op.effects is not None and any(resource is not node for resource, _ in node.op.effects(node))


def kernel_flops(node: Node, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> float:
    """Return the operations of one firing of a node on values of these shapes."""
    flops = flops_of(node, inputs, outputs)
    # Without a rule, count one operation per element: simulated kernels take their time from this.
    return float(sum(size_of(shape) or 0 for shape in outputs)) if flops is None else flops


def kernel_specs(
    node: Node, inputs: Sequence[ArraySpec], values: Mapping[int, Array] = _NO_VALUES
) -> Sequence[ArraySpec] | None:
    """Return dtypes and shapes of the outputs for such inputs; None if they depend on further values.

    Args:
        node: the node.
        inputs: dtypes and shapes of its inputs.
        values: known values of inputs, by their positions.
    """
    specs = [KnownSpec(*spec, values[place]) if place in values else Spec(*spec) for place, spec in enumerate(inputs)]
    inferred = node.op.infer(*specs, **node.attrs)
    outputs = (inferred,) if isinstance(inferred, Spec) else inferred
    if not all(is_static(spec.shape) for spec in outputs):
        return None
    return [(spec.dtype, tuple(dim or 0 for dim in spec.shape or ())) for spec in outputs]


def _constant_on(device: AsynchronousDevice, node: Node, value: Value) -> Value:
    try:
        return device.constant(value)
    except MemoryLimitExceeded as error:
        raise OutOfMemoryError(
            str(error),
            node=node.name,
            op=node.op.name,
            device=device.name,
            location=node.location,
            requested=error.requested,
            used=error.used,
            limit=error.limit,
        ) from error


def is_host_spec(spec: Spec) -> bool:
    """Return True if values of this spec stay on the host: counters, indices and predicates."""
    return spec.shape == () and spec.dtype.kind in "biu"


def _casting(node: Node, kernel: Kernel) -> Kernel:
    """`kernel` with outputs of the dtypes that the graph has: CuPy widens bfloat16 here and there."""
    dtypes = [tensor.dtype for tensor in node.outputs]
    if node.single:
        return lambda *inputs: kernel(*inputs).astype(dtypes[0], copy=False)
    return lambda *inputs: tuple(
        [value.astype(dtype, copy=False) for value, dtype in zip(kernel(*inputs), dtypes, strict=True)]
    )


def _followed_by(kernel: Kernel, check: Callable[[Value], Value]) -> Kernel:
    """A kernel whose results are checked."""
    if isinstance(kernel, PausingKernel):  # a wrapped kernel could not pause between rows
        return kernel.followed_by(check)
    return lambda *inputs: check(kernel(*inputs))


def _output_check(node: Node, xp: Namespace) -> Callable[[Value], Value]:
    expected = [tensor.spec for tensor in node.outputs]
    arrays = np.ndarray, np.generic, xp.ndarray

    def checked(result: Any) -> Value:
        values = (result,) if node.single else result
        if len(values) != len(expected):
            raise TypeError(f"the kernel returned {len(values)} values for {len(expected)} outputs")
        for index, (value, spec) in enumerate(zip(values, expected, strict=True)):
            if spec.dtype == VARIANT or isinstance(value, str):
                continue
            # In a region, a number fed from a card's memory reaches kernels of the host unconverted.
            if not (isinstance(value, arrays) or hasattr(value, "__cuda_array_interface__")):
                raise TypeError(f"output {index} is {a_kind(type(value))}, not an array; declared {spec}")
            if value.dtype != spec.dtype or not is_compatible(value.shape, spec.shape):
                raise TypeError(f"output {index} is {value.dtype}{format_shape(value.shape)}; declared {spec}")
        return result

    return checked


def _number_check(node: Node) -> Callable[[Value], Value]:
    def checked(result: Any) -> Value:
        # One pass over good values; only the message needs to distinguish NaN and infinity.
        for index, value in enumerate((result,) if node.single else result):
            if getattr(value, "dtype", VARIANT).kind in "fc" and not np.isfinite(value).all():
                nans, infinite = int(np.isnan(value).sum()), int(np.isinf(value).sum())
                raise FloatingPointError(
                    f"check_numerics: output {index} has {nans} NaN and {infinite} infinite values"
                )
        return result

    return checked
