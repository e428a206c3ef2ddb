"""The ops every graph needs, whatever the library of operations is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncflow.graph.op import Op, register
from asyncflow.graph.spec import Spec

if TYPE_CHECKING:
    from asyncflow.graph.ir import Tensor
    from asyncflow.graph.op import Kernel
    from asyncflow.values import Array, Namespace, Value


def _spec_attr(*, spec: Spec) -> Spec:
    return spec


def _constant_spec(*, value: Array) -> Spec:
    return Spec(value.dtype, value.shape)


def _constant_kernel(xp: Namespace, *, value: Array) -> Kernel:
    # A NumPy scalar is several times cheaper to compute with than a 0-d array, and means the same.
    # A device copies in what it needs elsewhere.
    stored = value[()] if value.ndim == 0 and value.dtype.kind in "biufc" else value
    return lambda: stored


PLACEHOLDER = register(Op(name="placeholder", infer=_spec_attr))
PARAMETER = register(Op(name="parameter", infer=_spec_attr))
CONSTANT = register(Op(name="constant", infer=_constant_spec, kernel=_constant_kernel, is_total=True))
IDENTITY = register(Op(name="identity", infer=lambda x: x, kernel=lambda xp: _same, is_total=True))
NO_OP = register(Op(name="no_op", infer=lambda *_: (), kernel=lambda xp: _nothing))


def is_constant(tensor: Tensor) -> bool:
    """Whether the value is known while the graph is built, and there from the start of a run."""
    return tensor.node.op is CONSTANT and not tensor.node.control_inputs


def _same(value: Value) -> Value:
    return value


def _nothing(*_: Value) -> tuple[()]:
    return ()
