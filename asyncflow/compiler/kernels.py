"""Binds each node's kernel to its device, attributes and state, and guards it where the session asks for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from asyncflow.devices.memory import TRACKED_BYTES, MemoryLimitExceeded
from asyncflow.devices.protocol import KernelInfo
from asyncflow.errors import OutOfMemoryError
from asyncflow.graph.builtin import CONSTANT
from asyncflow.graph.dtypes import VARIANT
from asyncflow.graph.resource import Resource
from asyncflow.graph.shapes import format_shape, is_compatible, is_static, size_of
from asyncflow.graph.spec import Spec

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    from asyncflow.devices.protocol import ArraySpec, AsynchronousDevice, Shape
    from asyncflow.graph.ir import Node
    from asyncflow.graph.op import Kernel

Resolve: TypeAlias = Callable[[Resource], Any]
"""Gives the state a session keeps for a resource."""


SMALL_BYTES = TRACKED_BYTES
"""Kernels on known shapes of fewer bytes are never worth timing, accounting or moving off the event loop."""


def is_small_spec(spec: Spec) -> bool:
    """Whether values of this spec are known to be small."""
    size = size_of(spec.shape)
    return size is not None and size * spec.dtype.itemsize < SMALL_BYTES


def bind_kernel(node: Node, xp: ModuleType, resolve: Resolve, *, check_outputs: bool, check_numerics: bool) -> Kernel:
    """The callable that runs `node` on one device.

    Args:
        node: of an op with a kernel.
        xp: the device's array namespace.
        resolve: looks up the state of resources among the attributes.
        check_outputs: hold every output against the op's shape rule.
        check_numerics: fail on NaN and infinity.
    """
    attrs = {name: resolve(value) if isinstance(value, Resource) else value for name, value in node.attrs.items()}
    assert node.op.kernel is not None, f"{node.op.name} has no kernel"
    kernel = node.op.kernel(xp, **attrs)
    if node.op.scalar_kernel is not None and all(tensor.shape == () for tensor in node.inputs):
        kernel = node.op.scalar_kernel
    if node.op.is_async:
        return kernel
    if check_outputs:
        kernel = _with_checked_outputs(node, kernel)
    if check_numerics and any(tensor.dtype.kind in "fc" for tensor in node.outputs):
        kernel = _with_checked_numbers(node, kernel)
    return kernel


def bind_launch(node: Node, kernel: Kernel, device: AsynchronousDevice, stream: int) -> Kernel:
    """`kernel`, which runs `node`, as something that launches it on one of the device's compute streams."""
    if node.op is CONSTANT and not node.control_inputs:
        value = kernel()
        if not is_host_spec(node.outputs[0].spec):
            value = _constant_on(device, node, value)
        return lambda: value
    op, attrs = node.op, node.attrs

    def flops(inputs: Sequence[Shape], outputs: Sequence[Shape]) -> float:
        if op.flops is not None:
            return op.flops(inputs, outputs, **attrs)
        return float(sum(size_of(shape) or 0 for shape in outputs))

    def infer(inputs: Sequence[ArraySpec]) -> Sequence[ArraySpec] | None:
        inferred = op.infer(*(Spec(dtype, shape) for dtype, shape in inputs), **attrs)
        specs = (inferred,) if isinstance(inferred, Spec) else inferred
        if not all(is_static(spec.shape) for spec in specs):
            return None
        return [(spec.dtype, tuple(dim or 0 for dim in spec.shape or ())) for spec in specs]

    info = KernelInfo(
        name=node.name,
        stream=stream,
        single=node.single,
        needs_context=op.needs_context,
        is_async=op.is_async,
        may_run_on_host=all(is_host_spec(tensor.spec) for tensor in node.outputs),
        keeps_arrays=op.is_user
        or op.effects is not None
        or any(tensor.spec.dtype == VARIANT for tensor in (*node.inputs, *node.outputs)),
        flops=flops,
        infer=infer,
    )
    return device.bind(kernel, info)


def _constant_on(device: AsynchronousDevice, node: Node, value: Any) -> Any:
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
    """Whether values of this spec stay on the host: counters, indices and predicates."""
    return spec.shape == () and spec.dtype.kind in "biu"


def _with_checked_outputs(node: Node, kernel: Kernel) -> Kernel:
    expected = [tensor.spec for tensor in node.outputs]

    def checked(*inputs: Any) -> Any:
        result = kernel(*inputs)
        values = (result,) if node.single else result
        if len(values) != len(expected):
            raise TypeError(f"the kernel returned {len(values)} values for {len(expected)} outputs")
        for index, (value, spec) in enumerate(zip(values, expected, strict=True)):
            if spec.dtype == VARIANT or isinstance(value, str):
                continue
            if not isinstance(value, np.ndarray | np.generic):
                raise TypeError(f"output {index} is a {type(value).__name__}, not an array; declared {spec}")
            if value.dtype != spec.dtype or not is_compatible(value.shape, spec.shape):
                raise TypeError(f"output {index} is {value.dtype}{format_shape(value.shape)}; declared {spec}")
        return result

    return checked


def _with_checked_numbers(node: Node, kernel: Kernel) -> Kernel:
    def checked(*inputs: Any) -> Any:
        result = kernel(*inputs)
        for index, value in enumerate((result,) if node.single else result):
            if getattr(value, "dtype", VARIANT).kind in "fc" and not np.isfinite(value).all():
                nans, infinite = int(np.isnan(value).sum()), int(np.isinf(value).sum())
                raise FloatingPointError(
                    f"check_numerics: output {index} has {nans} NaN and {infinite} infinite values"
                )
        return result

    return checked
