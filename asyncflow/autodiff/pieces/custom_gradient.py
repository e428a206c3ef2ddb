"""`custom_gradient`: a piece of a graph whose gradient the user writes.

The piece stands in the graph as it is. Behind it stands one node that passes its results on and has its arguments as
inputs too: gradients that arrive there go to the user's function, and from there to the arguments, past the piece.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import update_wrapper
from types import MethodType
from typing import NamedTuple, TypeAlias

from asyncflow.autodiff.stop_gradient import STOP_GRADIENT
from asyncflow.autodiff.sweep import Sweep, sweep_rule, value_of
from asyncflow.errors import GraphError, brief
from asyncflow.graph.building.build import apply, as_tensor, graph_for, identity, refuse_coroutines
from asyncflow.graph.builtin import PARAMETER
from asyncflow.graph.graph import Graph, Subgraph
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import KERNELS, define
from asyncflow.graph.structured import deep
from asyncflow.graph.values import nest
from asyncflow.graph.values.dtypes import VARIANT
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.derivatives.shapes import carries_gradient
from asyncflow.ops.user.rules import input_gradients, output_gradients
from asyncflow.state.variables.variable import VARIABLE_READ, Variable
from asyncflow.values import Kernel, Namespace, Nest


def _infer(*inputs: Spec, n_outputs: int, runs_again: bool = False) -> tuple[Spec, ...]:
    return inputs[:n_outputs]


def _kernel(xp: Namespace, *, n_outputs: int, runs_again: bool = False) -> Kernel:
    return lambda *values: values[:n_outputs]


CUSTOM_GRADIENT = define("custom_gradient", _infer, _kernel, is_total=True, traits=KERNELS)
"""Passes on `n_outputs` results; with `runs_again`, as the copy of a node that has run once for all that use it."""


Gradients: TypeAlias = "list[Tensor | None]"


@dataclass(frozen=True, slots=True)
class CustomRule:
    """The user's rule by which a node is differentiated.

    Attributes:
        name: name of the user's function.
        grad_fn: the user's gradient function.
        arguments: the nest of each of its arguments.
        results: the nest it returned.
        captured: tensors its results depend on besides its arguments and its reads of variables.
        variables: variables that it reads, its branches and loops included.
        gives_variables: True if `grad_fn` gives gradients for `variables` too.
    """

    name: str
    grad_fn: Callable[..., Nest]
    arguments: tuple[nest.Structure, ...]
    results: nest.Structure
    captured: tuple[Tensor, ...]
    variables: tuple[Variable, ...]
    gives_variables: bool

    def gradients(self, node: Node, grads: Sequence[Tensor | None]) -> tuple[Gradients, Gradients]:
        """Return the results of the user's function for each argument of `node`, and for each of its variables.

        Args:
            node: of `CUSTOM_GRADIENT`.
            grads: what reaches its outputs.
        """
        given = self.results.unflatten(output_gradients(node.outputs, grads))
        places = given if self.results.kind in (tuple, list) else (given,)
        what = f"grad_fn of {self.name}"
        if self.gives_variables:
            returned, of_variables = self._pair(node, self.grad_fn(*places, variables=list(self.variables)))
            reads = [value_of(variable) for variable in self.variables]
            found = input_gradients(f"{what}, for variables,", node, reads, [nest.LEAF] * len(reads), of_variables)
        else:
            returned, found = self.grad_fn(*places), [None] * len(self.variables)
        inputs = node.inputs[node.attrs["n_outputs"] :]
        return input_gradients(what, node, inputs, self.arguments, returned), found

    def _pair(self, node: Node, returned: Nest) -> tuple[Nest, Nest]:
        if not isinstance(returned, tuple | list) or len(returned) != 2:
            raise GraphError(
                f"grad_fn of {self.name} takes variables=, so it is to return the gradients of the arguments and a "
                f"list of the variables' gradients, (grads, variable_grads); it returned {brief(returned)}"
                f"\n  differentiates {node.name}, built at {node.location}"
            )
        first, second = returned
        return first, second


def custom_rule(node: Node) -> CustomRule | None:
    """Return the rule by which a node of `CUSTOM_GRADIENT` is differentiated; None for other nodes, or without one."""
    return node.graph.kept_for_gradients.get(node) if node.op is CUSTOM_GRADIENT else None


def keep_copied_rule(
    made: Node,
    rule: CustomRule,
    gradients: Callable[[Sequence[Tensor | None]], tuple[Gradients, Gradients]],
    captured: Iterable[Tensor],
) -> None:
    """Give the copy of a node the rule of the original.

    Args:
        made: the copy.
        rule: of the original.
        gradients: gives what `CustomRule.gradients` does.
        captured: what the copy depends on in place of the rule's own.
    """

    # With the signature of a user's function, so that copies are differentiated and copied like the original.
    def grad_fn(*given: Tensor | None, variables: object = ()) -> Nest:
        found, of_variables = gradients(given)
        return (found, of_variables) if rule.gives_variables else found

    inputs = made.inputs[made.attrs["n_outputs"] :]
    results = nest.flatten(made.outputs)[1]
    made.graph.kept_for_gradients[made] = replace(
        rule, grad_fn=grad_fn, arguments=(nest.LEAF,) * len(inputs), results=results, captured=tuple(captured)
    )


def custom_gradient(fn: Callable[..., object]) -> Callable[..., Nest]:
    """Make a function that builds part of a graph define its own derivative.

    Works in graphs, branches, loop bodies and functions alike, and to any order: what `grad_fn` builds is
    differentiated like everything else. `grad_fn` is called once for each gradient that is asked for. In a function of
    one row (`vmap`) and for each copy of a piece under `recompute` it is called once; its nodes are then repeated.

    Args:
        fn: takes tensors, or nests of them, by position, and static values by name; returns ``(ys, grad_fn)``. `ys` is
            a tensor or a nest. ``grad_fn(*grads)`` takes what reaches each of `ys`, one argument for each if that is a
            tuple or list: zeros where nothing does, None for integers. It returns one gradient for each argument of
            `fn`, of the same nest, dtypes and shapes, in a tuple; None where nothing flows. It may use any tensor that
            `fn` has built, and call `gradients`: there, no argument depends on another. `fn` may read variables, and
            `grad_fn` have a parameter ``variables``. It then gets a list of the variables that `ys` depends on, in the
            order of their reads. It returns a pair: the gradients of the arguments, and a list with one for each
            variable.

    Returns:
        A function that takes the same arguments and returns `ys`.

    Raises:
        GraphError: `fn` does not return such a pair. From `gradients`: one is asked for that would flow into something
            else than an argument of `fn` that it uses, which would be lost: a tensor from outside, or a variable for
            which `grad_fn` gives none. Pass them as arguments, or cut them with `stop_gradient`.
        DTypeError, ShapeError: from `gradients`: what `grad_fn` returns does not fit the arguments.
        ValueError: (in the run, as the cause of a KernelError) the same of shapes that only a run knows.

    >>> import asyncflow as af
    >>> @custom_gradient
    ... def clipped(x, *, limit=1.0):
    ...     return x, lambda grad: af.clip(grad, -limit, limit)
    >>> with af.Graph() as graph:
    ...     x = af.placeholder("float64", ())
    ...     slope = af.gradients(100 * clipped(x, limit=5.0), x)
    >>> async def main():
    ...     async with af.Session(graph) as session:
    ...         return await session.run(slope, {x: 3.0})
    >>> af.run(main())
    np.float64(5.0)
    """
    refuse_coroutines(fn)
    if not callable(fn):
        raise GraphError(f"custom_gradient takes a function; got {fn!r}")
    return _Differentiable(fn)


class _Differentiable:
    """A function under `custom_gradient`; in a class, a method: ``self`` is no argument to differentiate."""

    def __init__(self, fn: Callable[..., object]) -> None:
        update_wrapper(self, fn)
        self._fn = fn
        self._name = getattr(fn, "__qualname__", type(fn).__qualname__)

    def __repr__(self) -> str:
        return f"<custom_gradient {self._name}>"

    def __get__(self, instance: object, owner: type | None = None) -> Callable[..., Nest]:
        # Bind like a function: `self` is not an argument to differentiate.
        return self if instance is None else _Differentiable(MethodType(self._fn, instance))

    def __call__(self, *xs: Nest, **arguments: object) -> Nest:
        """The results, behind a node that differentiates as the function says."""
        name = self._name
        with graph_for(*nest.flatten(xs)[0]) as graph:
            # Separate identities: inside, no argument depends on another.
            taken = [nest.map_leaves(identity, x) for x in xs]
            inputs, _ = nest.flatten(taken)
            first = graph.root.version
            ys, grad_fn = _pair(name, self._fn(*taken, **arguments))
            found, results = nest.flatten(ys)
            outputs = [as_tensor(y) for y in found]
            _refuse_arrays(name, inputs, outputs)
            if not outputs:
                raise GraphError(f"custom_gradient: {name} returned no tensors")
            captured, variables = _used(outputs, inputs, first)
            # Placed behind results and arguments: the sweep meets this node first, and continues at the arguments.
            passed = apply(CUSTOM_GRADIENT, *outputs, *inputs, name=_node_name(self._fn), n_outputs=len(outputs))
            structures = tuple(nest.flatten(x)[1] for x in taken)
            # Without variable reads no pair is required: one grad_fn may serve functions with variables and without.
            gives_variables = bool(variables) and _takes_variables(grad_fn)
            rule = CustomRule(name, grad_fn, structures, results, captured, variables, gives_variables)
            # Kept on the graph, not in an attribute: the text of a graph cannot contain functions.
            passed[0].node.graph.kept_for_gradients[passed[0].node] = rule
            return results.unflatten(passed)


def _node_name(fn: Callable[..., object]) -> str:
    name = getattr(fn, "__name__", "")
    return name if name.isidentifier() else CUSTOM_GRADIENT.name


def _pair(name: str, returned: Nest) -> tuple[Nest, Callable[..., Nest]]:
    refuse_coroutines(returned)
    if not isinstance(returned, tuple | list) or len(returned) != 2 or not callable(returned[1]):
        raise GraphError(
            f"custom_gradient: {name} is to return its results and the function for their gradients, "
            f"(ys, grad_fn); it returned {brief(returned)}"
        )
    ys, grad_fn = returned
    refuse_coroutines(grad_fn)
    return ys, grad_fn


def _takes_variables(grad_fn: Callable[..., Nest]) -> bool:
    try:
        return "variables" in inspect.signature(grad_fn).parameters
    except ValueError:  # a builtin function without a signature
        return False


def _refuse_arrays(name: str, inputs: Iterable[Tensor], outputs: Iterable[Tensor]) -> None:
    for tensor in (*inputs, *outputs):
        if tensor.dtype == VARIANT:
            raise GraphError(
                f"custom_gradient: {name} takes and returns tensors; {tensor!r} is a TensorArray or RowStore: "
                f"stack it, or unstack inside"
            )


def _used(
    outputs: Iterable[Tensor], inputs: Iterable[Tensor], first: int
) -> tuple[tuple[Tensor, ...], tuple[Variable, ...]]:
    """The tensors and variables that `outputs` depend on besides `inputs`, by the nodes built since number `first`."""
    seen = set(inputs)
    captured: list[Tensor] = []
    read: list[Node] = []
    stack = list(outputs)
    while stack:
        tensor = stack.pop()
        node = tensor.node
        if tensor in seen or node.op is STOP_GRADIENT:  # no gradient flows past it
            continue
        seen.add(tensor)
        # Numbers of nodes only grow, so a smaller one was built before the function was called.
        if node.id < first or node.op is PARAMETER:
            if carries_gradient(tensor.spec):
                captured.append(tensor)
            continue
        stack += node.inputs
        read += (each for each in deep([node]) if each.op is VARIABLE_READ)
    # Sorted by number, the order of the function's lines: the walk above goes backwards.
    variables = [each.attrs["variable"] for each in sorted(read, key=lambda each: each.id)]
    found = {variable.serial: variable for variable in variables if carries_gradient(variable.spec)}
    return tuple(captured), tuple(found.values())


@sweep_rule(CUSTOM_GRADIENT)
def _differentiate(node: Node, grads: Sequence[Tensor | None], sweep: Sweep) -> Sequence[Tensor | None]:
    """Return what reaches each input of the node, in the current graph."""
    rule = custom_rule(node)
    if rule is None:
        raise GraphError(
            f"{node.name} lacks its user-defined gradient: the graph was read from text, which cannot contain "
            f"functions\n  built at {node.location}"
        )
    # Refuse only if a requested gradient would flow there: otherwise a captured weight would forbid all gradients.
    lost: list[Tensor | Variable] = [x for x in rule.captured if x in sweep.connected]
    if not rule.gives_variables:
        lost += [x for x in rule.variables if x.serial in sweep.variables]
    if lost:
        advice = "let grad_fn take variables=, " if isinstance(lost[0], Variable) else ""
        raise GraphError(
            f"custom_gradient: {rule.name} uses {lost[0]!r}, which is not one of its arguments, and a gradient is "
            f"asked for that would flow there: pass it as an argument, {advice}or cut it with af.stop_gradient"
            f"\n  built at {node.location}"
        )
    found, of_variables = rule.gradients(node, grads)
    for variable, grad in zip(rule.variables, of_variables, strict=True):
        if grad is not None and variable.serial in sweep.variables:
            sweep.give_variable(variable.serial, grad)
    return [*[None] * node.attrs["n_outputs"], *found]


class TracedGradient(NamedTuple):
    """Nodes built by a user's gradient of one node.

    Attributes:
        body: that holds them; it captures values of the node's graph, and of those around.
        grads: the gradient of each output of the node, in `body`; None for outputs without one.
        found: what reaches each argument.
        of_variables: what reaches each variable of the rule.
    """

    body: Subgraph
    grads: list[Tensor | None]
    found: list[Tensor | None]
    of_variables: list[Tensor | None]

    def wanted(self) -> list[Tensor]:
        """Return the values that it gives, in the order of `found` and `of_variables`."""
        return [x for x in (*self.found, *self.of_variables) if x is not None]

    def unflatten(self, values: Iterable[Tensor]) -> tuple[Gradients, Gradients]:
        """Return `found` and `of_variables` with `values` in place of the tensors of `wanted`."""
        rest = iter(values)
        one, other = ([None if x is None else next(rest) for x in part] for part in (self.found, self.of_variables))
        return one, other


class _TraceBody(Subgraph):
    """A body that uses values of all graphs around without changing those graphs: they may be finished."""

    def import_tensor(self, tensor: Tensor) -> Tensor:
        """See `Graph.import_tensor`."""
        if tensor.node.graph is self:
            return tensor
        if not self.can_use(tensor.node.graph):
            return super().import_tensor(tensor)
        outer = _nearest(self.parent, tensor)
        if outer not in self.captures:
            self.captures[outer] = self.add_input(outer.spec, "capture")
        return self.captures[outer]


def _nearest(graph: Graph | None, tensor: Tensor) -> Tensor:
    """Return the tensor that stands for a captured one in the innermost body around; it may be the tensor itself."""
    if graph is None or tensor.graph is graph:
        return tensor
    outer = _nearest(graph.parent, tensor)
    return graph.captures.get(outer, outer) if isinstance(graph, Subgraph) else outer


def traced_gradient(node: Node, rule: CustomRule) -> TracedGradient:
    """Return what the user's function builds for the gradient of `node`, in a body in the node's graph."""
    body = _TraceBody(node.graph, node.graph.root.unique_name(f"{node.name}/gradient"))
    grads = [body.add_input(y.spec, "grad") if carries_gradient(y.spec) else None for y in node.outputs]
    with body:
        return TracedGradient(body, grads, *rule.gradients(node, grads))
