"""The gradient of `cond`: a `cond` on the same predicate, whose branches differentiate the forward branches.

Values of a forward branch that its gradient needs become results of the forward `cond`. In the other branch these
results are empty, and never read (EuroSys '18 §5).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, reduce

from asyncflow.autodiff.bodies.gradient_body import GradientBody, zeros_if_none
from asyncflow.autodiff.stores.part_sums import are_parts, whole_sum, with_parts
from asyncflow.autodiff.stores.saved_values import new_store, store_node
from asyncflow.autodiff.stores.store_gradients import no_gradient
from asyncflow.autodiff.sweep import Sweep, sweep_rule, value_of
from asyncflow.control.cond import COND, add_cond
from asyncflow.graph.building.build import constant, graph_for
from asyncflow.graph.builtin import is_constant
from asyncflow.graph.graph import Subgraph, reopened
from asyncflow.graph.ir import Tensor
from asyncflow.graph.structured import CondNode
from asyncflow.graph.values.dtypes import VARIANT
from asyncflow.graph.values.shapes import is_subshape, relax
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.arrays.creation import zeros
from asyncflow.ops.derivatives.shapes import carries_gradient, ensure_shape
from asyncflow.state.variables.variable import Variable


@sweep_rule(COND)
def _differentiate(node: CondNode, grads: Sequence[Tensor | None], sweep: Sweep) -> Sequence[Tensor | None]:
    """Builds the gradient of each input of a `cond`, in the current graph.

    Args:
        node: to be differentiated.
        grads: of its outputs.
        sweep: in progress, which has reached the node; it takes the gradients of variables read inside.
    """
    graph = graph_for()
    wanted = [
        place
        for place, tensor in enumerate(node.captures)
        if tensor in sweep.connected and carries_gradient(tensor.spec)
    ]
    variables = list(sweep.variables.values())
    label = graph.unique_name("cond")
    predicate = graph.import_tensor(node.predicate)
    n_results = len(grads)
    branches, sweeps = [], []
    for side, forward in zip(("true", "false"), node.subgraphs, strict=True):
        branch = GradientBody(graph, f"{label}/{side}", forward, partial(_restore, node))
        with branch:
            inner = Sweep(forward.nodes, [forward.inputs[place] for place in wanted], variables)
            for result, grad in zip(forward.results[:n_results], grads, strict=True):
                if grad is not None and result in inner.connected:
                    inner.give(result, ensure_shape(branch.import_tensor(grad), result.shape))
            inner.run()
        branches.append(branch)
        sweeps.append(inner)
    reached = [
        place
        for place in wanted
        if any(inner.reaches(body.inputs[place]) for inner, body in zip(sweeps, node.subgraphs, strict=True))
    ]
    read = [variable for variable in variables if any(inner.reaches_variable(variable) for inner in sweeps)]
    found: list[Tensor | None] = [None] * len(node.inputs)
    if not reached and not read:
        return found
    around: list[Tensor | Variable] = [*(node.captures[place] for place in reached), *read]
    inside: list[list[Tensor | Variable]] = [
        [*(forward.inputs[place] for place in reached), *read] for forward in node.subgraphs
    ]
    in_parts = [
        # Only a loop around the branch can add up parts.
        isinstance(graph, GradientBody) and all(map(_has_parts, sweeps, values))
        for values in zip(*inside, strict=True)
    ]
    for branch, inner, values in zip(branches, sweeps, inside, strict=True):
        with branch:
            branch.results += [
                reduce(with_parts, inner.contributions(x), no_gradient()) if parts else _total(inner, x)
                for x, parts in zip(values, in_parts, strict=True)
            ]
    outputs = add_cond(predicate, branches, label).outputs
    for x, output, parts in zip(around, outputs, in_parts, strict=True):
        if isinstance(x, Tensor):
            sweep.give(x, whole_sum(output, x) if parts else ensure_shape(output, x.shape))
        else:
            sweep.give_variable(x.serial, whole_sum(output, value_of(x)) if parts else output)
    return found


def _has_parts(sweep: Sweep, x: Tensor | Variable) -> bool:
    """Return True if all gradients that reach a value in a branch are parts."""
    return all(are_parts(grad, x.spec.shape) for grad in sweep.contributions(x))


def _total(sweep: Sweep, x: Tensor | Variable) -> Tensor:
    return zeros_if_none(sweep.gradient(x) if isinstance(x, Tensor) else sweep.gradient_of_variable(x), x)


def _restore(node: CondNode, body: GradientBody, tensor: Tensor) -> Tensor | None:
    """A value of a forward branch; None to compute it again."""
    if is_constant(tensor):
        with body:
            return constant(tensor.node.attrs["value"])
    captured = node.captured(body.forward)
    if tensor in captured:
        return body.import_tensor(captured[tensor])
    if body.is_cheap(tensor, lambda each: each in captured or each in _exports(node)):
        return None
    restored = body.import_tensor(_exported(node, body.forward, tensor))
    if is_subshape(restored.shape, tensor.shape):
        return restored
    with body:
        return ensure_shape(restored, tensor.shape)


def _exports(node: CondNode) -> dict[Tensor, Tensor]:
    """The outputs of the forward `cond` that show values of its branches."""
    exports: dict[Tensor, Tensor] = node.graph.kept_for_gradients.setdefault(node, {})
    return exports


def _exported(node: CondNode, forward: Subgraph, tensor: Tensor) -> Tensor:
    """Return the output of the forward `cond` that shows a value of one of its branches."""
    exported = _exports(node)
    if tensor not in exported:
        (other,) = (branch for branch in node.subgraphs if branch is not forward)
        with reopened(other):
            if tensor.dtype == VARIANT:
                absent = new_store()
                inside = store_node(tensor)
                absent.node.colocated_with = None if inside is None else inside.name
            else:
                absent = zeros((0,) * (tensor.ndim or 0), dtype=tensor.dtype)
        forward.results.append(tensor)
        other.results.append(absent)
        exported[tensor] = node.add_output(Spec(tensor.dtype, relax(tensor.shape, absent.shape)))
    return exported[tensor]
