"""`recompute`: a piece of a graph that its gradient runs again, so that no inner value is kept.

The piece stands in the graph as it is. Behind it stands one node that passes its results on, and has as further inputs
all that the piece uses: gradients that arrive there make a copy of the piece, and go through that. A `BARRIER` node
gives the copy its inputs once the gradients are there. So it runs late, and no pass takes it for the piece itself.

All is told by the graph: the piece is what lies between the inputs and the results of the node. So it may be copied,
lifted over rows and printed like everything else.
"""

from __future__ import annotations

from functools import cache, wraps
from typing import TYPE_CHECKING, ParamSpec

from asyncflow.autodiff.pieces.custom_gradient import (
    CustomRule,
    Gradients,
    TracedGradient,
    custom_rule,
    keep_copied_rule,
    traced_gradient,
)
from asyncflow.autodiff.pieces.random_again import axes_of, draws, forget_key, told_key
from asyncflow.autodiff.sweep import Sweep, sweep_rule
from asyncflow.errors import GraphError
from asyncflow.graph.building.build import apply, as_tensor, graph_for, identity, is_symbolic, refuse_coroutines
from asyncflow.graph.building.copying import Copier
from asyncflow.graph.builtin import PARAMETER, PLACEHOLDER
from asyncflow.graph.facts import RECOMPUTE
from asyncflow.graph.graph import Graph
from asyncflow.graph.op import KERNELS, NEW_EACH, Access, define, derivative
from asyncflow.graph.structured import deep
from asyncflow.graph.values import nest
from asyncflow.graph.values.dtypes import VARIANT
from asyncflow.ops.cost import free
from asyncflow.ops.derivatives.shapes import carries_gradient
from asyncflow.ops.random.random_again import draw_by_key, random_key
from asyncflow.state.variables.variable import VARIABLE_READ

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from asyncflow.graph.ir import Node, Tensor
    from asyncflow.graph.values.spec import Spec
    from asyncflow.values import Kernel, Namespace, Nest

P = ParamSpec("P")


def _first(*inputs: Spec, count: int, **attrs: object) -> tuple[Spec, ...]:
    return inputs[:count]


def _kernel(xp: Namespace, *, count: int, **attrs: object) -> Kernel:
    return lambda *values: values[:count]


RECOMPUTED = define("recomputed", _first, _kernel, flops=free, is_total=True, traits=KERNELS)
"""Passes on `count` results; of what else it is given, `arguments` come first."""

BARRIER = define("barrier", _first, _kernel, flops=free, conduct=NEW_EACH, traits=KERNELS)
"""Passes on `count` values once all its inputs are there."""


@derivative(BARRIER)
def _through(node: Node, *grads: Tensor | None) -> Sequence[Tensor | None]:
    return [*grads, *[None] * (len(node.inputs) - len(grads))]


def recompute(fn: Callable[P, Nest]) -> Callable[P, Nest]:
    """Make a function that builds part of a graph, and whose inner values are computed again for its gradient.

    Its arguments are kept for the gradient, and nothing that it computes from them: the gradient runs it again, once
    what reaches its results is there. That takes its time once more, and saves the memory of all its inner values; also
    in loops, where the arguments of each iteration are saved, and one piece inside another (as `jax.checkpoint`).
    Values computed from captured tensors and variables alone may be shared with the forward program.

    Random numbers come out equal; in vertex functions they are refused. Gradients are the same within rounding, and to
    the bit where they add up in the same order.

    Args:
        fn: takes tensors, or nests of them, and anything else; returns a tensor or a nest. It may use tensors from
            outside, and read variables. In its branches and loops, a variable is read again: none may be changed in
            between.

    Returns:
        A function that takes and returns the same.

    Raises:
        GraphError: from the function: it would run something twice that changes state, awaits or is the user's own, and
            is not declared with ``@af.op(pure=True)``; or a TensorArray or RowStore goes in or out.

    >>> import asyncflow as af
    >>> with af.Graph() as graph:
    ...     x = af.placeholder("float64", ())
    ...     slope = af.gradients(recompute(lambda x: af.sin(x) * x)(x), x)
    >>> async def main():
    ...     async with af.Session(graph) as session:
    ...         return await session.run(slope, {x: 0.0})
    >>> af.run(main())
    np.float64(0.0)
    """
    if not callable(fn):
        raise GraphError(f"recompute takes a function; got {fn!r}")
    refuse_coroutines(fn)
    name = getattr(fn, "__qualname__", type(fn).__qualname__)

    @wraps(fn)
    def recomputed(*args: P.args, **kwargs: P.kwargs) -> Nest:
        given = [leaf for leaf in nest.flatten((args, kwargs))[0] if is_symbolic(leaf)]
        with graph_for(*given) as graph:
            arguments = [graph.import_tensor(as_tensor(leaf)) for leaf in given]
            built = len(graph.nodes)
            returned = fn(*args, **kwargs)
            refuse_coroutines(returned)
            found, structure = nest.flatten(returned)
            outputs = [graph.import_tensor(as_tensor(leaf)) for leaf in found]
            return structure.unflatten(_passed(name, graph, outputs, arguments, graph.nodes[built:]))

    return recomputed


def _passed(
    name: str, graph: Graph, outputs: Sequence[Tensor], arguments: Sequence[Tensor], built: Iterable[Node]
) -> Sequence[Tensor]:
    """Return the results behind the node that differentiates them, if there are nodes to run again."""
    piece = {node for node in built if node.op not in _NOT_COPIED}
    nodes = _between(outputs, arguments, piece.__contains__)
    for node in nodes:
        _refuse_effects(name, node)
    inside, given = set(nodes), set(arguments)
    used = dict.fromkeys(x for node in nodes for x in node.inputs if x in given or x.node not in inside)
    own = [x for x in used if x in given and carries_gradient(x.spec)]
    unchanged = [x for x in outputs if x in given or x.node not in inside]
    inputs = list(dict.fromkeys((*own, *used, *unchanged)))
    for x in (*outputs, *inputs):
        if x.dtype == VARIANT:
            raise GraphError(
                f"recompute: {name} takes, uses and returns tensors; {x!r} is a TensorArray or RowStore: stack it, or "
                f"unstack inside"
            )
    if not nodes:
        return outputs
    is_random = any(draws(node) for node in deep(nodes))
    if is_random:
        inputs.append(random_key())
    return apply(RECOMPUTED, *outputs, *inputs, count=len(outputs), arguments=len(own), is_random=is_random)


# -- nodes that run again ---------------------------------------------------------------------------------------------

_NOT_COPIED = frozenset({PARAMETER, PLACEHOLDER, VARIABLE_READ})
"""Ops of nodes whose values are there, and which mean something else in another place."""


def _between(outputs: Iterable[Tensor], inputs: Iterable[Tensor], is_in: Callable[[Node], bool]) -> list[Node]:
    """Return the nodes between `inputs` and `outputs` for which `is_in` holds, each behind the nodes whose values it
    uses.
    """
    given = set(inputs)
    found: dict[Node, None] = {}
    # An explicit stack: a piece may be deeper than Python's recursion limit.
    open_ = [x.node for x in outputs if x not in given and is_in(x.node)]
    while open_:
        node = open_[-1]
        before = [x.node for x in node.inputs if x not in given and x.node not in found and is_in(x.node)]
        if before and node not in found:
            open_ += before
        else:
            found[open_.pop()] = None
    return list(found)


def _may_run_again(node: Node) -> bool:
    return node.op not in _NOT_COPIED and all(map(_is_repeatable, deep([node])))


def _is_repeatable(node: Node) -> bool:
    """Return True if running a node twice has no visible effect, bodies aside."""
    return node.op in _NOT_COPIED or RECOMPUTE.allows(node.op)


def _refuse_effects(name: str, node: Node) -> None:
    for each in deep([node]):
        if not _is_repeatable(each):
            raise GraphError(
                f"recompute: {name} uses {each.name} ({each.op.name}), which would run twice; "
                f"{RECOMPUTE.why_not(each.op)}"
                f"\n  built at {each.location}"
            )


# -- the gradient -----------------------------------------------------------------------------------------------------


@sweep_rule(RECOMPUTED)
def _differentiate(node: Node, grads: Sequence[Tensor | None], sweep: Sweep) -> Sequence[Tensor | None]:
    """Give the sweep the gradient of each value that the piece uses; nothing is left for the node's inputs.

    Args:
        node: of `RECOMPUTED`.
        grads: what reaches its outputs.
        sweep: in progress, which has reached the node; it takes the gradients of variables read inside.
    """
    graph = graph_for()
    count = node.attrs["count"]
    outputs, inputs = node.inputs[:count], node.inputs[count:]
    key = inputs[-1] if node.attrs["is_random"] else None
    whole = _between(outputs, inputs, cache(_may_run_again))
    _refuse_inner(node, whole, sweep)
    _refuse_changed(node, whole)
    arrived = {place: grad for place, grad in enumerate(grads) if grad is not None}
    nodes, traces = _needed_again([outputs[place] for place in arrived], inputs, whole, draws_again=key is not None)
    within = set(nodes)
    # If a body is lifted in parts, values of another part may stand between the piece and its inputs.
    taken = {x for each in nodes for x in each.inputs if x.node not in within}
    used = [x for x in dict.fromkeys((*inputs, *taken)) if x in taken]
    differentiable = [x for x in used if carries_gradient(x.spec)]
    seen = {x: graph.import_tensor(x) for x in inputs if x in taken}
    # Separate identities: two values of the forward body may be one value here.
    seen.update((x, identity(graph.import_tensor(x))) for x in differentiable)
    late = [x for x in inputs[: node.attrs["arguments"]] if x in taken] or differentiable
    if late:
        # Wait for the gradients, which the copy does not use. Otherwise it would run with the forward program, and its
        # values would be held until they are read.
        behind = apply(BARRIER, *(seen[x] for x in late), *arrived.values(), count=len(late))
        seen.update(zip(late, behind, strict=True))
    copy = _PieceCopy(seen, key, traces, frozenset(inputs))
    first = len(graph.nodes)
    copy.copy(nodes)
    wanted = [x for x in differentiable if x in sweep.connected]
    inner = sweep.inside(graph.nodes[first:], [seen[x] for x in wanted], copy.tensors)
    for place, grad in arrived.items():
        if outputs[place].node in within:
            inner.give(copy.value(outputs[place]), grad)
        else:
            sweep.give(outputs[place], grad)
    inner.run()
    for serial, variable in sweep.variables.items():
        for grad in inner.contributions(variable):
            sweep.give_variable(serial, grad)
    for x in wanted:
        found = inner.gradient(seen[x])
        if found is not None:
            sweep.give(x, found)
    return [None] * len(node.inputs)


def _needed_again(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], whole: Sequence[Node], *, draws_again: bool
) -> tuple[list[Node], dict[Node, TracedGradient]]:
    """Return the nodes of a piece that its gradient runs again, and the traces of the user's gradients in it.

    A gradient that the user has written may use any value of the piece, so values that no output needs run again too.

    Args:
        outputs: the results of the piece that a gradient has reached.
        inputs: of the node behind the piece, behind its results.
        whole: the nodes behind all results of the piece.
        draws_again: the piece has a key, by which random numbers are drawn again.
    """
    first = min((node.id for node in whole), default=0)  # older nodes do not belong to the piece

    @cache
    def is_in(node: Node) -> bool:
        return node.id >= first and _may_run_again(node) and (draws_again or not any(map(draws, deep([node]))))

    ends = list(outputs)
    traces: dict[Node, TracedGradient] = {}
    while True:
        nodes = _between(ends, inputs, is_in)
        rules = {each: custom_rule(each) for each in deep(nodes) if each not in traces}
        found = {each: traced_gradient(each, rule) for each, rule in rules.items() if rule is not None}
        if not found:
            return nodes, traces
        traces |= found
        ends += [x for trace in found.values() for x in trace.body.captures if x.graph is outputs[0].graph]


class _PieceCopy(Copier):
    """A copy of nodes, in the current graph.

    Attributes:
        key: of the random numbers, in the forward program; None if they are drawn anew.
        traces: nodes of the user's gradients in the piece, as far as known.
        given: inputs of the node behind the piece; none while the nodes of a user's gradient are copied.
    """

    def __init__(
        self,
        seen: dict[Tensor, Tensor],
        key: Tensor | None,
        traces: Mapping[Node, TracedGradient],
        given: Collection[Tensor] = (),
    ) -> None:
        super().__init__(graph_for(), seen)
        self.key = key
        self.key_axes = 0 if key is None else axes_of(key)
        self.traces = traces
        self.given = given

    def value(self, x: Tensor) -> Tensor:
        """See `Copier.value`; a value from outside stands for itself."""
        return self.target.import_tensor(self.tensors.get(x, x))

    def note(self, x: Tensor, stand_in: Tensor) -> None:
        """See `Copier.note`; extents that are equal in the original are equal in the copy."""
        super().note(x, stand_in)
        if x in x.graph.extents and x.graph.is_subgraph and stand_in.graph.is_subgraph:
            stand_in.graph.extents[stand_in] = x.graph.extents[x]

    def made(self, node: Node) -> Node:
        """See `Copier.made`."""
        is_piece = node.op is RECOMPUTED and node.attrs["is_random"]
        key = None
        if self.key is not None and (is_piece or draws(node) or told_key(node) in self.given):
            key = self.value(self.key)  # in front of its users
        made = super().made(node)
        if key is not None and is_piece:
            # The inner piece draws by this key, which is one of its inputs, as it comes from outside.
            made.inputs.insert(-1, key)
        elif key is not None:
            forget_key(made)
            draw_by_key(made, key, self.loops, self.key_axes)
        rule = custom_rule(node)
        if rule is not None:
            if self.given:
                made.attrs["runs_again"] = True
            trace = self.traces.get(node) or traced_gradient(node, rule)
            self._keep_rule(made, rule, trace)
        return made

    def _keep_rule(self, made: Node, rule: CustomRule, trace: TracedGradient) -> None:
        """Give the copy of a node the user's gradient, over the copies of the values that it uses."""
        for outer in trace.body.captures:
            if outer not in self.tensors and self.target.can_use(outer.graph):
                # Import now: gradients of this node are built where the value cannot be reached.
                self.tensors[outer] = self.target.import_tensor(outer)

        def gradients(given: Sequence[Tensor | None]) -> tuple[Gradients, Gradients]:
            seen = {inner: self.tensors.get(outer, outer) for outer, inner in trace.body.captures.items()}
            arrived = zip(trace.grads, given, strict=True)
            copy = _PieceCopy(seen | {x: grad for x, grad in arrived if x is not None and grad is not None}, None, {})
            copy.copy(trace.body.nodes)
            return trace.unflatten(map(copy.value, trace.wanted()))

        keep_copied_rule(made, rule, gradients, [self.tensors.get(x, x) for x in rule.captured])


def _refuse_inner(node: Node, nodes: Iterable[Node], sweep: Sweep) -> None:
    for each in nodes:
        for x in each.outputs:
            if x in sweep.wanted:
                raise GraphError(
                    f"recompute: a gradient is asked for by {x!r}, which is inside of a function whose values are "
                    f"computed again; return it, or make it an argument\n  built at {x.node.location}"
                )


def _refuse_changed(node: Node, nodes: Iterable[Node]) -> None:
    """Raise where a branch or loop that runs again would read a variable that has been changed since."""
    reads = {each.attrs["variable"]: each for each in deep(nodes) if each.op is VARIABLE_READ}
    if not reads:
        return
    for other in node.graph.root.walk():
        # In a loop's body, a write before the piece also follows it, before the gradient reads: in the next iteration.
        if not (node.graph.is_subgraph or other.id > node.id) or other.op.effects is None:
            continue
        for variable, read in reads.items():
            if (variable.effect_key, Access.WRITE) in other.op.effects(other):
                raise GraphError(
                    f"recompute: {read.name} reads {variable!r} in a branch or loop, which runs again for the "
                    f"gradient, and {other.name} changes the variable before that: read it outside of the branch or "
                    f"loop\n  built at {read.location}\n  changed at {other.location}"
                )
