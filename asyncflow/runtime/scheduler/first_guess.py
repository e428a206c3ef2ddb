"""How long will a firing take that has not been measured? What nobody can say goes to a thread, to be measured there.

The event loop must not be the place where it turns out that a function of the user's waits for a second, or that the
values in a run are large. So a kernel's first firing is on the loop only if its work is known to be short, by the
shapes that are there. Nothing is known of a user's function without ``cost=``, nor of an op that is told by a value how
much to make, such as `arange`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Final

from asyncflow.compiler.placement.node_costs import NS_PER_ELEMENT, kernel_ns
from asyncflow.compiler.plan import PlanNode
from asyncflow.compiler.program.work import makes_what_it_is_told
from asyncflow.devices.cost import INLINE_LIMIT_NS, MeasuredCost
from asyncflow.errors import GraphError
from asyncflow.graph.ir import Node
from asyncflow.graph.shapes import is_static
from asyncflow.graph.spec import Spec
from asyncflow.values import Value

ON_A_THREAD: Final = MeasuredCost(base_ns=inf)
"""Of a function that has asked for a run and waited for it: short as that was, the event loop would wait for itself."""


def first_guess(node: PlanNode, inputs: Sequence[Value]) -> MeasuredCost:
    """The expected cost of a kernel on such inputs; infinite where nobody can say."""
    source = node.source
    if node.estimate is not None:
        too_long = node.estimate.expects(INLINE_LIMIT_NS, inputs)
        return MeasuredCost(base_ns=inf if too_long else node.estimate.once_ns)
    if (source.op.is_user and source.op.flops is None) or makes_what_it_is_told(source):
        return MeasuredCost(base_ns=inf)
    given = _specs(source, inputs[len(inputs) - len(source.inputs) :])
    base_ns = kernel_ns(source, [spec.shape for spec in given], [spec.shape for spec in _made(source, given)])
    return MeasuredCost(base_ns=base_ns, slope_ns=NS_PER_ELEMENT if source.op.flops is None else 0.0)


def _specs(source: Node, values: Sequence[Value]) -> list[Spec]:
    return [
        Spec(tensor.dtype, shape) if (shape := getattr(value, "shape", None)) is not None else tensor.spec
        for tensor, value in zip(source.inputs, values, strict=True)
    ]


def _made(source: Node, given: Sequence[Spec]) -> Sequence[Spec]:
    """The specs of the outputs, as the shapes that are there have them."""
    declared = [tensor.spec for tensor in source.outputs]
    if source.op.is_user or all(is_static(spec.shape) for spec in declared):
        return declared
    try:
        made = source.op.infer(*given, **source.attrs)
    except GraphError:
        return declared  # the kernel refuses them too, and its words are for the user
    return (made,) if isinstance(made, Spec) else made
