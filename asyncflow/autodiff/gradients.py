"""`gradients`: reverse-mode derivatives of a graph, as more graph (EuroSys '18 §5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Literal, TypeAlias, TypeVar, overload

from asyncflow.autodiff import row_rules
from asyncflow.autodiff.bodies import cond_gradient, while_gradient
from asyncflow.autodiff.bodies.gradient_body import GradientBody
from asyncflow.autodiff.dependencies import Dependencies, nodes_behind
from asyncflow.autodiff.stores import row_gradients
from asyncflow.autodiff.sweep import Sweep, add_gradients, value_of
from asyncflow.control.nest_types import AttrsLike, DataclassLike, NamedTupleLike
from asyncflow.errors import DTypeError, GraphError, ShapeError
from asyncflow.graph.building.build import TensorLike, as_tensor, graph_for, is_symbolic, symbolic
from asyncflow.graph.graph import Graph, Subgraph
from asyncflow.graph.ir import Tensor
from asyncflow.graph.structured import deep
from asyncflow.graph.values import nest
from asyncflow.graph.values.dtypes import VARIANT
from asyncflow.graph.values.shapes import format_shape, is_compatible
from asyncflow.ops.arrays.creation import ones
from asyncflow.ops.derivatives import all as _rules
from asyncflow.ops.derivatives.shapes import carries_gradient, checked_shape, shape_of, zeros_of
from asyncflow.state.elements.queue_ops import PUTS, TAKES
from asyncflow.state.variables.variable import Variable
from asyncflow.values import Nest

_RULES = (_rules, row_gradients, row_rules, cond_gradient, while_gradient)
"""The modules whose import has installed the derivatives of the library's operations."""

_Found: TypeAlias = Tensor | Nest
"""A gradient, or None for an x on which no y depends. That is rare, so no program has to test for it."""
_Source: TypeAlias = Tensor | Variable
_Fields = TypeVar("_Fields", bound=NamedTupleLike | DataclassLike | AttrsLike)


@overload
def gradients(
    ys: Nest, xs: _Source, grad_ys: Nest = None, stop_gradients: Nest = (), *, unconnected: Literal["zero"]
) -> Tensor: ...
@overload
def gradients(
    ys: Nest, xs: _Source, grad_ys: Nest = None, stop_gradients: Nest = (), unconnected: Literal["none"] = "none"
) -> _Found: ...
@overload
def gradients(
    ys: Nest,
    xs: _Fields,
    grad_ys: Nest = None,
    stop_gradients: Nest = (),
    unconnected: Literal["none", "zero"] = "none",
) -> _Fields: ...
@overload
def gradients(
    ys: Nest, xs: tuple[_Source, ...], grad_ys: Nest = None, stop_gradients: Nest = (), *, unconnected: Literal["zero"]
) -> tuple[Tensor, ...]: ...
@overload
def gradients(
    ys: Nest,
    xs: tuple[_Source, ...],
    grad_ys: Nest = None,
    stop_gradients: Nest = (),
    unconnected: Literal["none"] = "none",
) -> tuple[_Found, ...]: ...
@overload
def gradients(
    ys: Nest, xs: Sequence[_Source], grad_ys: Nest = None, stop_gradients: Nest = (), *, unconnected: Literal["zero"]
) -> list[Tensor]: ...
@overload
def gradients(
    ys: Nest,
    xs: Sequence[_Source],
    grad_ys: Nest = None,
    stop_gradients: Nest = (),
    unconnected: Literal["none"] = "none",
) -> list[_Found]: ...
@overload
def gradients(
    ys: Nest,
    xs: Mapping[str, _Source],
    grad_ys: Nest = None,
    stop_gradients: Nest = (),
    *,
    unconnected: Literal["zero"],
) -> dict[str, Tensor]: ...
@overload
def gradients(
    ys: Nest,
    xs: Mapping[str, _Source],
    grad_ys: Nest = None,
    stop_gradients: Nest = (),
    unconnected: Literal["none"] = "none",
) -> dict[str, _Found]: ...
@overload
def gradients(
    ys: Nest, xs: Nest, grad_ys: Nest = None, stop_gradients: Nest = (), unconnected: Literal["none", "zero"] = "none"
) -> Nest: ...


def gradients(
    ys: Nest, xs: Nest, grad_ys: Nest = None, stop_gradients: Nest = (), unconnected: Literal["none", "zero"] = "none"
) -> Nest:
    """Return the derivatives of the sum of all elements of `ys` with respect to each of `xs` (EuroSys '18 §5).

    Works in reverse through every operation, branch and loop, nested anyhow, and through its own results, so that
    gradients of gradients are gradients. It adds nodes to the graph. A loop built before may get more results, which
    keep values for its gradient, but its present ones do not change. With several `ys`, what reaches an x is added up.

    In the body of a branch or loop, `ys` and `xs` may also stand outside it. There, the loop variables of an iteration
    are values of their own: what became of them in earlier iterations is no part of the gradient.

    Args:
        ys: a tensor, or a nest of tensors, of floats or complex numbers; others have no gradient.
        xs: a tensor or `Variable`, or a nest of them. The gradient of a variable is the sum over all its reads; earlier
            assignments do not count, as a variable's value comes from outside the graph.
        grad_ys: what to multiply each y's derivatives by, in the same nest; ones if None, also for a part of it. A
            complex y needs one.
        stop_gradients: tensors that count as constants.
        unconnected: ``"none"`` gives None for an x on which no y depends, ``"zero"`` zeros. An x that only ops without
            a derivative connect (such as `argmax`) has a gradient of zeros, and integers have None. No y depends on
            what went into a queue that it comes from, and without ``"zero"`` that is refused.

    Returns:
        The nest of `xs`, with a tensor of the same dtype and shape for each, or None.

    Raises:
        GraphError: an op on the way has no derivative, tensors belong to other graphs or bodies, or a complex y has no
            grad_y.
        DTypeError, ShapeError: a grad_y does not fit its y.
        ValueError: (in the run, as the cause of a KernelError) the same of shapes that only a run knows.

    >>> import asyncflow as af
    >>> with af.Graph() as graph:
    ...     x = af.placeholder("float64", ())
    ...     slope = gradients(x * x, x)
    >>> async def main():
    ...     async with af.Session(graph) as session:
    ...         return await session.run(slope, {x: 3.0})
    >>> af.run(main())
    np.float64(6.0)
    """
    if unconnected not in ("none", "zero"):
        raise GraphError(f"unconnected is 'none' or 'zero'; got {unconnected!r}")
    y_leaves, y_structure = nest.flatten(ys)
    x_leaves, x_structure = nest.flatten(xs)
    if not y_leaves:
        raise GraphError("gradients: ys is empty; pass at least one tensor")
    graph = graph_for(*y_leaves)
    with graph.root.lock, graph:
        targets = [_tensor(graph, leaf, "ys") for leaf in y_leaves]
        sources = [leaf if isinstance(leaf, Variable) else _tensor(graph, leaf, "xs") for leaf in x_leaves]
        stopped = [_tensor(graph, leaf, "stop_gradients") for leaf in nest.flatten(stop_gradients)[0]]
        found = _Gradients(graph, targets, sources, stopped).find(_given(y_structure, grad_ys))
        # None would be correct for such an x, but would hide that training through a queue has no effect.
        if unconnected == "none":
            unreached = [x for x, grad in zip(sources, found, strict=True) if grad is None and isinstance(x, Tensor)]
            _refuse_queues(graph, targets, unreached)
        else:
            found = [_zeros(x) if grad is None else grad for x, grad in zip(sources, found, strict=True)]
        return x_structure.unflatten(found)


def _refuse_queues(graph: Graph, ys: Sequence[Tensor], xs: Sequence[Tensor]) -> None:
    """Refuse gradients from a queue's output to its input, which would be None without a word."""
    puts = [node for node in graph.nodes if node.op in PUTS] if xs else []
    if not puts:
        return  # the usual case: the walks below cost as much as a sweep
    reached = Dependencies({}).of(graph.nodes, dict.fromkeys(xs, 1))
    filled = {put.attrs["queue"].effect_key: put for put in puts if any(x in reached for x in put.inputs)}
    for inner in deep(nodes_behind(graph, ys)):
        put = filled.get(inner.attrs["queue"].effect_key) if inner.op in TAKES else None
        if put is not None:
            raise GraphError(
                f"gradients: a y comes out of queue {inner.attrs['queue'].name!r}, and an x goes into it at "
                f"{put.location}; no gradient goes through a queue, as its elements may come from other runs. "
                f'unconnected="zero" takes them for constants'
            )


def _tensor(graph: Graph, leaf: TensorLike, what: str) -> Tensor:
    """Return the tensor of a leaf, in `graph` or a graph whose values can be used there."""
    tensor = symbolic(leaf)
    if not isinstance(tensor, Tensor):
        raise GraphError(f"gradients: {what} are tensors and variables; got {leaf!r}")
    if tensor.dtype == VARIANT and what != "stop_gradients":
        raise GraphError(
            f"gradients: {what} are tensors and variables; {tensor!r} is a TensorArray or RowStore: use the values "
            "read from it or written to it"
        )
    if graph.can_use(tensor.graph):
        return tensor
    try:
        return graph.import_tensor(tensor)
    except GraphError as error:
        is_inside = what == "xs" and tensor.graph.root is graph.root
        raise GraphError(f"gradients: {what}: {error.reason}{_INSIDE if is_inside else ''}") from None


_INSIDE = "; or, to differentiate by what a loop starts with, pass that; or call gradients inside the function"


def _given(structure: nest.Structure, grad_ys: Nest) -> list[TensorLike | None]:
    if grad_ys is None:
        return [None] * structure.size
    rule = "gradients: grad_ys has one gradient for each of ys, in the same nest"
    return nest.match(structure, grad_ys, rule, nested_leaves=True)


def _zeros(x: Tensor | Variable) -> Tensor | None:
    return zeros_of(value_of(x)) if carries_gradient(x.spec) else None


class _Gradients:
    """Sweeps over the graph being built and, if that is a body, over the graphs around it, as it captures their values.

    Args:
        graph: the graph being built.
        targets: tensors to differentiate; in `graph` or around it.
        sources: tensors and variables to differentiate by.
        stopped: tensors that count as constants.
    """

    def __init__(
        self, graph: Graph, targets: list[Tensor], sources: list[Tensor | Variable], stopped: list[Tensor]
    ) -> None:
        self.targets = targets
        self.sources = sources
        self.stopped = frozenset(stopped)
        self.graphs = tuple(_graphs_around(graph))
        self.sweeps: dict[Graph, Sweep] = {}
        variables = [x for x in sources if isinstance(x, Variable)]
        ends = [*targets, *(outer for level in self.graphs for outer, _ in _taken(level))]
        # Outer graphs first: a value that a body takes is wanted there if the value outside depends on a source.
        for level in self.graphs:
            wanted = [x for x in sources if isinstance(x, Tensor) and x.graph is level]
            wanted += [inner for outer, inner in _taken(level) if outer in self.sweeps[outer.graph].connected]
            # The gradient of a captured value flows to the graph that made it, not to inputs from which it may be
            # recomputed here.
            cut = self.stopped.union(inner for _, inner in _taken(level))
            nodes = nodes_behind(level, [tensor for tensor in ends if tensor.graph is level])
            self.sweeps[level] = Sweep(nodes, wanted, variables, cut)

    def find(self, given: list[TensorLike | None]) -> list[Tensor | None]:
        """The gradient of each source."""
        for y, grad in zip(self.targets, given, strict=True):
            if carries_gradient(y.spec):
                self.sweeps[y.graph].give(y, _seed(y, grad))
        # Inner graphs first: gradients of taken values arrive outside before the graph there is swept.
        for level in reversed(self.graphs):
            sweep = self.sweeps[level]
            sweep.run()
            for outer, inner in _taken(level):
                reached = sweep.gradient(inner) if inner in sweep.wanted else None
                if reached is not None:
                    self.sweeps[outer.graph].give(outer, reached)
        found = [self._found(x) for x in self.sources]
        # Zeros only for a source that a target depends on through ops without a derivative, searched only if needed.
        if any(grad is None for grad in found):
            connected = self._connected()
            for place, x in enumerate(self.sources):
                if found[place] is None and connected >> place & 1:
                    found[place] = _zeros(x)
                elif found[place] is None:
                    self._refuse_start(x)
        return found

    def _refuse_start(self, x: Tensor | Variable) -> None:
        """Raise if targets depend on `x` only by the initial values of a loop around them."""
        if isinstance(x, Variable):
            return
        dependencies = Dependencies({})
        outside = dependencies.of(x.graph.nodes, {x: 1})
        for level in self.graphs:
            starts = level.starts if isinstance(level, Subgraph) else {}
            inside = [inner for inner, outer in starts.items() if outer in outside]
            depends = dependencies.of(self.sweeps[level].nodes, dict.fromkeys(inside, 1)) if inside else {}
            if any(y in depends for y in self.targets):
                raise GraphError(
                    f"gradients: in the body of {level.label}, {x!r} only matters for what the loop starts with, and "
                    f"its iterations are not differentiated there: ask for the gradient by the loop variable, or call "
                    f"gradients behind the loop"
                )

    def _found(self, x: Tensor | Variable) -> Tensor | None:
        if isinstance(x, Tensor):
            return self.sweeps[x.graph].gradient(x)
        grads = [sweep.gradient_of_variable(x) for sweep in self.sweeps.values()]  # each graph may read it
        found = [grad for grad in grads if grad is not None]
        return reduce(add_gradients, found) if found else None

    def _connected(self) -> int:
        """Return the places of the sources that a target depends on, though their gradient may be zero, as bits."""
        # A set of places for each tensor, so that one walk serves all sources.
        bits: dict[Tensor, int] = {}
        variables: dict[int, int] = {}
        for place, x in enumerate(self.sources):
            if isinstance(x, Variable):
                variables[x.serial] = variables.get(x.serial, 0) | 1 << place
            else:
                bits[x] = bits.get(x, 0) | 1 << place
        dependencies = Dependencies(variables)
        for level in self.graphs:
            known = {x: mask for x, mask in bits.items() if x.graph is level}
            for outer, inner in _taken(level):
                known[inner] = known.get(inner, 0) | bits.get(outer, 0)
            bits.update(dependencies.of(self.sweeps[level].nodes, known, self.stopped))
        return reduce(or_, (bits.get(y, 0) for y in self.targets if carries_gradient(y.spec)), 0)


def _graphs_around(graph: Graph) -> dict[Graph, None]:
    """Return the graphs whose values can be used in `graph`, each behind the graphs it takes values from."""
    found: dict[Graph, None] = {}
    if graph.parent is not None:
        found |= _graphs_around(graph.parent)
    # Found twice, a graph keeps its first place: outer graphs come before inner ones.
    if isinstance(graph, GradientBody):  # a user's gradient function calls `gradients` in turn
        found |= _graphs_around(graph.forward)
    found[graph] = None
    return found


def _taken(graph: Graph) -> Sequence[tuple[Tensor, Tensor]]:
    """The values that a body takes from others: pairs of the tensor there and here."""
    if not isinstance(graph, Subgraph):
        return ()
    restored = graph.restored() if isinstance(graph, GradientBody) else ()
    known = {inner for _, inner in restored}  # restored values are captures as well: each pair once
    return (*restored, *((outer, inner) for outer, inner in graph.captures.items() if inner not in known))


def _seed(y: Tensor, given: TensorLike | None) -> Tensor:
    """The gradient of `y` that is given from outside, in the current graph."""
    if given is None:
        if y.dtype.kind == "c":
            raise GraphError(
                f"gradients: {y!r} is complex, so it has no single direction to rise in: give its weights with "
                f"grad_ys=, "
                f"such as af.ones_like(y), or differentiate a real number made of it, such as af.real(y) or af.abs(y)"
            )
        return ones(shape_of(y), dtype=y.dtype)
    grad = as_tensor(given) if is_symbolic(given) else as_tensor(given, y.dtype)
    if grad.dtype != y.dtype:
        raise DTypeError(f"the grad_y of {y!r} is {grad!r}; they have one dtype")
    if not is_compatible(grad.shape, y.shape):
        raise ShapeError(f"the grad_y of {y!r} has shape {format_shape(grad.shape)}; it has that of its y")
    return checked_shape(grad, y, f"the grad_y of {y!r}")
