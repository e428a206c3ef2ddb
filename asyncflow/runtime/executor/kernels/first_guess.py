"""Expected time of a firing that has not been measured. Firings of unknown length go to a thread, to be measured there.

A function of the user's may wait for a second, or the values in a run may be large; the event loop must not be the
place that finds out. So a kernel's first firing is on the loop only if its work is known to be short, by the present
shapes. Nothing is known of a user's function without ``cost=``, nor of an op whose output size depends on a value, such
as `arange`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from weakref import WeakKeyDictionary

from asyncflow.compiler.placement.node_costs import NS_PER_ELEMENT, kernel_ns
from asyncflow.compiler.plan import PlanNode
from asyncflow.compiler.program.kernels.work import makes_what_it_is_told
from asyncflow.devices.machine.cost import INLINE_LIMIT_NS, MeasuredCost, Proof, UserCost
from asyncflow.errors import GraphError
from asyncflow.graph.ir import Node
from asyncflow.graph.op import Op
from asyncflow.graph.values.shapes import is_static
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.rows.by_row import called_op
from asyncflow.values import Value

_proofs: WeakKeyDictionary[Op, Proof] = WeakKeyDictionary()


def first_guess(node: PlanNode, inputs: Sequence[Value]) -> MeasuredCost:
    """Return the expected cost of a kernel, or a region, on such inputs; infinite where nothing is known."""
    source = node.source
    if node.conduct.is_user and (node.times.estimate is not None or called_op(source).flops is None):
        return user_cost(node)
    if node.times.estimate is not None:
        too_long = node.times.estimate.expects(INLINE_LIMIT_NS, inputs)
        return MeasuredCost(base_ns=inf if too_long else node.times.estimate.once_ns)
    if makes_what_it_is_told(source):
        return MeasuredCost(base_ns=inf)
    given = _specs(source, inputs[len(inputs) - len(source.inputs) :])
    base_ns = kernel_ns(source, [spec.shape for spec in given], [spec.shape for spec in _made(source, given)])
    if node.conduct.is_user:
        return user_cost(node, base_ns)
    return MeasuredCost(base_ns=base_ns, slope_ns=NS_PER_ELEMENT if source.op.flops is None else 0.0)


def user_cost(node: PlanNode, base_ns: float = inf) -> UserCost:
    """Return the expected cost of a firing that calls functions of the user's, all nodes of which share their proof."""
    called = node.region_nodes() if node.region is not None else (node.source,)
    ops = dict.fromkeys(called_op(each) for each in called if each.op.conduct.is_user)
    return UserCost(list(map(_proof_of, ops)), base_ns)


def _proof_of(op: Op) -> Proof:
    proof = _proofs.get(op)
    if proof is None:
        proof = _proofs[op] = Proof()
    return proof


def _specs(source: Node, values: Sequence[Value]) -> list[Spec]:
    return [
        Spec(tensor.dtype, shape) if (shape := getattr(value, "shape", None)) is not None else tensor.spec
        for tensor, value in zip(source.inputs, values, strict=True)
    ]


def _made(source: Node, given: Sequence[Spec]) -> Sequence[Spec]:
    """The specs of the outputs, as the shapes that are there have them."""
    declared = [tensor.spec for tensor in source.outputs]
    if source.op.conduct.is_user or all(is_static(spec.shape) for spec in declared):
        return declared
    try:
        made = source.op.infer(*given, **source.attrs)
    except GraphError:
        return declared  # the kernel refuses them, too, with a message for users
    return (made,) if isinstance(made, Spec) else made
