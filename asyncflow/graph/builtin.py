"""The ops every graph needs, whatever the library of operations is."""

from __future__ import annotations

from asyncflow.graph.ir import Tensor
from asyncflow.graph.op import OPAQUE, WHOLE_VIEW, define
from asyncflow.graph.values.spec import Spec
from asyncflow.values import Array, Kernel, Namespace


def _spec_attr(*, spec: Spec) -> Spec:
    return spec


def _constant_spec(*, value: Array) -> Spec:
    return Spec(value.dtype, value.shape)


def _constant_kernel(xp: Namespace, *, value: Array) -> Kernel:
    # A NumPy scalar is several times cheaper to compute with than a 0-d array, and means the same. Other devices copy
    # it in.
    stored = value[()] if value.ndim == 0 and value.dtype.kind in "biufc" else value
    return lambda: stored


PLACEHOLDER = define("placeholder", lambda *, spec, is_lent=False: spec)
"""A value to feed; if it `is_lent`, a loop of the run may write to it, and gives it back as it was if it fails."""
PARAMETER = define("parameter", _spec_attr)
CONSTANT = define("constant", _constant_spec, _constant_kernel, is_total=True, traits=OPAQUE)
IDENTITY = define(
    "identity",
    lambda x: x,
    lambda xp: lambda value: value,
    is_total=True,
    rows="elementwise",
    cuda="its value is its input's: there is nothing to launch",
    traits=WHOLE_VIEW,
)
NO_OP = define("no_op", lambda *_: (), lambda xp: lambda *_: (), traits=OPAQUE)


def is_constant(tensor: Tensor) -> bool:
    """Return True if the value is known while the graph is built, and present from the start of a run."""
    return tensor.node.op is CONSTANT and not tensor.node.control_inputs
