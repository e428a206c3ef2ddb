"""`gradients`: reverse-mode derivatives of a graph, as more graph (EuroSys '18 §5)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from asyncflow.autodiff.structured import differentiate_structured
from asyncflow.autodiff.sweep import Sweep
from asyncflow.errors import DTypeError, GraphError, ShapeError, user_location
from asyncflow.graph import nest
from asyncflow.graph.build import SupportsTensor, as_tensor
from asyncflow.graph.graph import current_graph
from asyncflow.graph.ir import Tensor
from asyncflow.graph.shapes import format_shape, is_compatible
from asyncflow.ops.creation import ones
from asyncflow.ops.derivatives import all as _rules
from asyncflow.ops.derivatives.shapes import carries_gradient, shape_of, zeros_of
from asyncflow.state.variable import Variable

if TYPE_CHECKING:
    from asyncflow.graph.build import TensorLike
    from asyncflow.graph.graph import Graph


_RULES = _rules.__all__
"""The modules whose import has installed the derivatives of the library's operations."""


def gradients(
    ys: Any,
    xs: Any,
    grad_ys: Any = None,
    stop_gradients: Any = (),
    unconnected: Literal["none", "zero"] = "none",
) -> Any:
    """The derivatives of the sum of all elements of `ys` with respect to each of `xs`.

    Works in reverse through every operation, branch and loop, nested anyhow, and through what it gives itself, so that
    gradients of gradients are gradients. It adds nodes to the graph; a loop built before may get more results, which
    keep values for its gradient, but those it has do not change. With several `ys`, what reaches an x is added up.

    Args:
        ys: a tensor, or a nest of tensors, of floats or complex numbers; others have no gradient.
        xs: a tensor or `Variable`, or a nest of them. The gradient of a variable is that of all its reads.
        grad_ys: what to multiply each y's derivatives by, in the same nest; ones if None.
        stop_gradients: tensors that count as constants.
        unconnected: ``"none"`` gives None for an x on which no y depends, ``"zero"`` zeros. An x that only ops without
            a derivative connect (such as `argmax`) has a gradient of zeros.

    Returns:
        The nest of `xs`, with a tensor of the same dtype and shape for each, or None.

    Raises:
        GraphError: an op on the way has no derivative, or tensors belong to other graphs or bodies.
        DTypeError, ShapeError: a grad_y does not fit its y.

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
        raise GraphError(f"unconnected is 'none' or 'zero'; got {unconnected!r}\n  written at {user_location()}")
    y_leaves, y_structure = nest.flatten(ys)
    x_leaves, x_structure = nest.flatten(xs)
    targets = [_tensor(leaf, "ys") for leaf in y_leaves]
    graph = current_graph() or next((y.graph.root for y in targets), None)
    if graph is None:
        raise GraphError(f"gradients: ys is empty; pass at least one tensor\n  written at {user_location()}")
    with graph:
        targets = [graph.import_tensor(y) for y in targets]
        sources = [
            leaf if isinstance(leaf, Variable) else graph.import_tensor(_tensor(leaf, "xs")) for leaf in x_leaves
        ]
        given = [None] * len(targets) if grad_ys is None else nest.flatten_like(y_structure, grad_ys)
        stopped = [graph.import_tensor(_tensor(leaf, "stop_gradients")) for leaf in nest.flatten(stop_gradients)[0]]
        found = _Gradients(graph, targets, sources, stopped).find(given)
        if unconnected == "zero":
            found = [_zeros(x) if grad is None else grad for x, grad in zip(sources, found, strict=True)]
        return x_structure.unflatten(found)


def _tensor(leaf: Any, what: str) -> Tensor:
    if isinstance(leaf, Tensor):
        return leaf
    if isinstance(leaf, SupportsTensor):
        return leaf.__asyncflow_tensor__()
    raise GraphError(f"gradients: {what} are tensors and variables; got {leaf!r}\n  written at {user_location()}")


def _zeros(x: Tensor | Variable) -> Tensor | None:
    if isinstance(x, Variable):
        x = x.read()
    return zeros_of(x) if x.dtype.kind in "fc" else None


class _Gradients:
    def __init__(
        self, graph: Graph, targets: list[Tensor], sources: list[Tensor | Variable], stopped: list[Tensor]
    ) -> None:
        self.targets = targets
        self.sources = sources
        tensors = [x for x in sources if isinstance(x, Tensor)]
        variables = [x for x in sources if isinstance(x, Variable)]
        self.sweep = Sweep(graph, tensors, variables, stopped, differentiate_structured)

    def find(self, given: list[TensorLike | None]) -> list[Tensor | None]:
        """The gradient of each source."""
        for y, grad in zip(self.targets, given, strict=True):
            if carries_gradient(y.spec):
                self.sweep.give(y, _seed(y, grad))
        self.sweep.run({})
        return [self._of(x) for x in self.sources]

    def _of(self, x: Tensor | Variable) -> Tensor | None:
        connected = self.sweep.connected
        if isinstance(x, Variable):
            bit = self.sweep.bits[x.serial]
            found = self.sweep.gradient_of_variable(x)
            if found is None and any(connected.get(y, 0) & bit for y in self.targets if carries_gradient(y.spec)):
                found = _zeros(x)
            return found
        if not carries_gradient(x.spec):
            return None
        found = self.sweep.gradient(x)
        if found is None and self._reaches(x):
            found = zeros_of(x)
        return found

    def _reaches(self, x: Tensor) -> bool:
        """Whether a y depends on `x`, though nothing flows back to it."""
        depends = self.sweep.dependencies.of(x.graph, {x: 1})
        return any(depends.get(y, 0) & 1 for y in self.targets if carries_gradient(y.spec))


def _seed(y: Tensor, given: TensorLike | None) -> Tensor:
    if given is None:
        return ones(shape_of(y), dtype=y.dtype)
    grad = as_tensor(given, y.dtype) if not isinstance(given, Tensor) else given
    if grad.dtype != y.dtype:
        raise DTypeError(f"the grad_y of {y!r} is {grad!r}; they have one dtype\n  written at {user_location()}")
    if not is_compatible(grad.shape, y.shape):
        raise ShapeError(
            f"the grad_y of {y!r} has shape {format_shape(grad.shape)}; it has that of its y"
            f"\n  written at {user_location()}"
        )
    return y.graph.import_tensor(grad)
