"""`custom_gradient`: a piece of a graph whose gradient the user writes.

The piece stands in the graph as it is. Behind it stands one node that passes its results on and has its arguments as
inputs too: gradients that arrive there go to the user's function, and from there to the arguments, past the piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import update_wrapper
from types import MethodType

from asyncflow.autodiff.stop_gradient import STOP_GRADIENT
from asyncflow.autodiff.sweep import Sweep, sweep_rule
from asyncflow.errors import GraphError, brief
from asyncflow.graph import nest
from asyncflow.graph.build import apply, as_tensor, graph_for, identity, refuse_coroutines
from asyncflow.graph.builtin import PARAMETER
from asyncflow.graph.dtypes import VARIANT
from asyncflow.graph.graph import Subgraph
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import OPAQUE, define
from asyncflow.graph.spec import Spec
from asyncflow.graph.structured import StructuredNode
from asyncflow.ops.derivatives.shapes import carries_gradient
from asyncflow.ops.derivatives.user_rules import input_gradients, output_gradients
from asyncflow.state.variable import VARIABLE_READ, Variable
from asyncflow.values import Kernel, Namespace, Nest


def _infer(*inputs: Spec, n_outputs: int) -> tuple[Spec, ...]:
    return inputs[:n_outputs]


def _kernel(xp: Namespace, *, n_outputs: int) -> Kernel:
    return lambda *values: values[:n_outputs]


CUSTOM_GRADIENT = define("custom_gradient", _infer, _kernel, is_total=True, traits=OPAQUE)


@dataclass(frozen=True, slots=True)
class CustomRule:
    """The user's rule by which a node is differentiated.

    Attributes:
        name: of the user's function.
        grad_fn: what it returned.
        arguments: the nest of each of its arguments.
        results: the nest it returned.
        captured: tensors its results depend on besides its arguments.
        variables: variables read in branches and loops of it.
    """

    name: str
    grad_fn: Callable[..., Nest]
    arguments: tuple[nest.Structure, ...]
    results: nest.Structure
    captured: tuple[Tensor, ...]
    variables: tuple[Variable, ...]

    def gradients(self, grads: Sequence[Tensor | None]) -> Nest:
        """The gradients that the user's function gives for those of the results."""
        given = self.results.unflatten(grads)
        return self.grad_fn(*given) if self.results.kind in (tuple, list) else self.grad_fn(given)


def custom_gradient(fn: Callable[..., object]) -> Callable[..., Nest]:
    """Makes a function that builds part of a graph differentiate as it says itself.

    Works in graphs, branches, loop bodies and functions alike, and to any order: what `grad_fn` builds is
    differentiated like everything else. `grad_fn` is called once for each gradient that is asked for; in a function of
    one row (`vmap`) once, and what it builds holds for each row.

    Args:
        fn: takes tensors, or nests of them, by position, and static values by name; returns ``(ys, grad_fn)``. `ys` is
            a tensor or a nest. ``grad_fn(*grads)`` takes what reaches each of `ys`, one argument for each if that is a
            tuple or list: zeros where nothing does, None for integers. It returns one gradient for each argument of
            `fn`, of the same nest, dtypes and shapes, in a tuple; None where nothing flows. It may use any tensor that
            `fn` has built, and call `gradients`: there, no argument depends on another.

    Returns:
        A function that takes the same arguments and returns `ys`.

    Raises:
        GraphError: `fn` does not return such a pair. From `gradients`: one is asked for that would flow into something
            else than an argument of `fn` that it uses, which would be lost: a tensor from outside, or a variable. Pass
            them as arguments, or cut them with `stop_gradient`.
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
        return self if instance is None else _Differentiable(MethodType(self._fn, instance))

    def __call__(self, *xs: Nest, **arguments: object) -> Nest:
        """The results, behind a node that differentiates as the function says."""
        name = self._name
        with graph_for(*nest.flatten(xs)[0]) as graph:
            # Values of their own: inside, no argument depends on another.
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
            passed = apply(CUSTOM_GRADIENT, *outputs, *inputs, name=_node_name(self._fn), n_outputs=len(outputs))
            structures = tuple(nest.flatten(x)[1] for x in taken)
            rule = CustomRule(name, grad_fn, structures, results, captured, variables)
            graph.root.kept_for_gradients[passed[0].node] = rule
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
    variables: dict[int, Variable] = {}
    stack = list(outputs)
    while stack:
        tensor = stack.pop()
        node = tensor.node
        if tensor in seen or node.op is STOP_GRADIENT:
            continue
        seen.add(tensor)
        if node.id < first or node.op is PARAMETER or node.op is VARIABLE_READ:
            if carries_gradient(tensor.spec):
                captured.append(tensor)
            continue
        stack += node.inputs
        if isinstance(node, StructuredNode):
            variables.update((variable.serial, variable) for variable in _variables_in(node))
    return tuple(captured), tuple(variables.values())


def _variables_in(node: Node) -> Iterable[Variable]:
    inner = (each for body in node.subgraphs for each in body.walk())
    return [each.attrs["variable"] for each in inner if each.op is VARIABLE_READ]


@sweep_rule(CUSTOM_GRADIENT)
def _differentiate(node: Node, grads: Sequence[Tensor | None], sweep: Sweep) -> Sequence[Tensor | None]:
    """Gives what reaches each input of the node, in the current graph."""
    rule: CustomRule | None = node.graph.root.kept_for_gradients.get(node)
    if rule is None:
        raise GraphError(
            f"{node.name} has a gradient of its own, which is not there: the graph was read from text, in which "
            f"functions have no place\n  built at {node.location}"
        )
    lost: list[Tensor | Variable] = [x for x in rule.captured if x in sweep.connected]
    lost += [x for x in rule.variables if x.serial in sweep.variables]
    if lost:
        raise GraphError(
            f"custom_gradient: {rule.name} uses {lost[0]!r}, which is none of its arguments, and a gradient is asked "
            f"for that would flow there: pass it as an argument, or cut it with af.stop_gradient"
            f"\n  built at {node.location}"
        )
    n_outputs = node.attrs["n_outputs"]
    inputs = node.inputs[n_outputs:]
    returned = rule.gradients(output_gradients(node.outputs, grads))
    found = input_gradients(f"grad_fn of {rule.name}", node, inputs, rule.arguments, returned)
    return [*[None] * n_outputs, *found]


def traced_gradient(node: Node, rule: CustomRule) -> tuple[Subgraph, list[Tensor | None], list[Tensor | None]]:
    """The body that the user's function builds in the node's graph; what reaches the outputs there, and the inputs."""
    back = Subgraph(node.graph, node.graph.root.unique_name(f"{node.name}/gradient"))
    n_outputs = node.attrs["n_outputs"]
    grads = [back.add_input(y.spec, "grad") if carries_gradient(y.spec) else None for y in node.outputs]
    with back:
        returned = rule.gradients(grads)
        found = input_gradients(f"grad_fn of {rule.name}", node, node.inputs[n_outputs:], rule.arguments, returned)
    return back, grads, found
