"""`vertex_function`: what one vertex computes from its inputs and its children's states (Cavs §3.1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Never, NoReturn

from asyncflow.autodiff.pieces.recompute import RECOMPUTED
from asyncflow.control.body import result_tensor, user_function
from asyncflow.errors import DTypeError, GraphError, ShapeError, located_at
from asyncflow.graph.building.build import TensorLike, refuse_coroutines
from asyncflow.graph.graph import Graph, Subgraph, current_graph
from asyncflow.graph.ir import Tensor
from asyncflow.graph.op import NEW_EACH, define, not_differentiable
from asyncflow.graph.values import nest
from asyncflow.graph.values.dtypes import bool_, dtype_name, float64
from asyncflow.graph.values.shapes import format_shape, is_static, is_subshape
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.arrays.datatypes import astype
from asyncflow.ops.axes import static_int
from asyncflow.ops.promotion import kind_of
from asyncflow.ops.reductions.statistical import accumulator_dtype
from asyncflow.state.variables.variable import VARIABLE_READ
from asyncflow.values import Nest

REDUCTIONS: Final = ("sum", "mean", "max")
REDUCE_CHILDREN = define(
    "reduce_children", lambda *inputs, each, reduce, reads: tuple(x.spec for x in each.results), conduct=NEW_EACH
)
"""The results of all children together: `each` is computed for every child. `vertex_map` builds it for all vertices.

Its inputs are what `each` captures, and then the values of its `reads` of variables.
"""
not_differentiable(REDUCE_CHILDREN, because="it is only in vertex functions, and the nodes built from them are")


@dataclass(frozen=True, slots=True)
class TracedFunction:
    """A vertex function as a body over one vertex.

    Attributes:
        body: its nodes.
        pulls: the values that it pulls, by name.
        gathers: the states of single children, by slot.
        side_by_side: a part of the states of several children as one vector, by its number and their slots.
        is_leaf: the value that says whether the vertex has no children.
        scattered: the state.
        pushes: the values that it pushes, by name.
    """

    body: Subgraph
    pulls: dict[str, Tensor] = field(default_factory=dict)
    gathers: dict[int, list[Tensor]] = field(default_factory=dict)
    side_by_side: dict[tuple[int, tuple[int, ...]], Tensor] = field(default_factory=dict)
    is_leaf: list[Tensor] = field(default_factory=list)
    scattered: list[Tensor] = field(default_factory=list)
    pushes: dict[str, Tensor] = field(default_factory=dict)

    @property
    def of_children(self) -> set[Tensor]:
        """All that it is given of children told apart."""
        return {*self.side_by_side.values(), *(x for tensors in self.gathers.values() for x in tensors)}


class Vertex:
    """A vertex, as its vertex function sees it: reads children and pulls, gives a state and pushes."""

    def __init__(self, function: VertexFunction, traced: TracedFunction, pulls: Mapping[str, Spec]) -> None:
        self._function = function
        self._traced = traced
        self._pulls = pulls

    def gather(self, child: int) -> Nest:
        """Return the state of a child, by its number; `initial` where the vertex has no such child.

        Raises:
            GraphError: the function declares fewer children.
        """
        arity = self._function.children
        if arity is None:
            raise GraphError(
                f"{self._function} has any number of children; v.gather_all() reads them all, and children=2 says that "
                "there are at most two"
            )
        if not 0 <= static_int(child, "v.gather(child): child") < arity:
            raise GraphError(f"{self._function} has children 0 to {arity - 1}; got v.gather({child!r})")
        gathers = self._traced.gathers
        if child not in gathers:  # a second call returns the same value, so that gradients of both uses add up
            gathers[child] = [self._traced.body.add_input(spec, f"child_{child}") for spec in self._function.specs]
        return self._function.structure.unflatten(gathers[child])

    def gather_all(self, fn: Callable[[Nest], Nest] | None = None, *, reduce: str = "sum") -> Nest:
        """Return the states of all children, reduced to one; zeros where there are none.

        Args:
            fn: computed from each child's state, and values of the vertex, before the reduction; such as a forget gate
                for each child. None: the state itself.
            reduce: ``"sum"``, ``"mean"`` or ``"max"``. A sum of integers is int64 or uint64, as that of `af.sum`, and
                their mean is float64.

        Raises:
            GraphError: there is no such reduction, `fn` gives nothing, or the function tells children apart.
        """
        if self._function.children is not None:
            raise GraphError(
                f"{self._function} tells children apart, as children={self._function.children} says; v.gather(k) reads "
                "one of them, and v.gather_all() is for functions without children="
            )
        if reduce not in REDUCTIONS:
            raise GraphError(f"v.gather_all(reduce={reduce!r}): reductions are {', '.join(map(repr, REDUCTIONS))}")
        body = self._here("gather_all")
        # A separate body, as its rows are children: it is lifted over all children of all vertices of a set.
        each = Subgraph(body, f"{body.label}/each")
        with each:
            child = [each.add_input(spec, "child") for spec in self._function.specs]
            state = self._function.structure.unflatten(child)
            leaves, structure = nest.flatten(state if fn is None else fn(state))
            refuse_coroutines(*leaves)
            each.results = [result_tensor(each, leaf) for leaf in leaves]
            if reduce != "max":  # the sum behind a mean, too, is of the dtype that the mean has
                each.results = [_widened(x, reduce) for x in each.results]
        if not leaves:
            raise GraphError(f"{self._function}: the function of v.gather_all gives nothing to reduce")
        specs = tuple(x.spec for x in each.results)
        # Variables are read once, like the variables of the vertex itself, and not in each set.
        reads = tuple(node for node in each.nodes if node.op is VARIABLE_READ and not node.control_inputs)
        attrs = {"each": each, "reduce": reduce, "reads": [node.outputs[0] for node in reads]}
        inputs = [*each.captures, *(node.attrs["variable"].read() for node in reads)]
        node = body.add_node(REDUCE_CHILDREN, inputs, attrs, specs, name="children")
        return structure.unflatten(node.outputs)

    def scatter(self, state: Nest) -> None:
        """Give the state of the vertex, which its parents gather.

        Raises:
            GraphError: it is given a second time, or is another nest than was declared.
            DTypeError, ShapeError: it differs from the declared state.
        """
        body = self._here("scatter")
        function, traced = self._function, self._traced
        if traced.scattered:
            raise GraphError(f"{function} scatters a second time; a vertex has one state")
        leaves = nest.match(function.structure, state, f"{function} scatters another state than it declares")
        for path, leaf, spec in zip(function.structure.paths("state"), leaves, function.specs, strict=True):
            traced.scattered.append(_fitting(function, path, result_tensor(body, leaf), spec))

    def pull(self, name: str = "x") -> Tensor:
        """An input of the vertex, by name: a row of what `vertex_map` is given under it.

        Raises:
            GraphError: it is given nothing under that name.
        """
        if name not in self._pulls:
            known = ", ".join(map(repr, self._pulls)) or "none"
            raise GraphError(f"{self._function} pulls {name!r}, and vertex_map is given {known}")
        # Becomes an input only if it is read: rows that no vertex function reads are not reordered.
        pulls = self._traced.pulls
        if name not in pulls:
            pulls[name] = self._traced.body.add_input(self._pulls[name], f"pull_{name}")
        return pulls[name]

    def push(self, value: TensorLike, name: str = "y") -> None:
        """Give a result of the vertex, by name; `vertex_map` returns the results of all vertices.

        Raises:
            GraphError: something was pushed under that name.
        """
        body = self._here("push")
        if name in self._traced.pushes:
            raise GraphError(f"{self._function} pushes {name!r} a second time; give it another name")
        self._traced.pushes[name] = result_tensor(body, value)

    @property
    def is_leaf(self) -> Tensor:
        """True, as a boolean scalar, if the vertex has no children."""
        if not self._traced.is_leaf:
            self._traced.is_leaf.append(self._traced.body.add_input(Spec(bool_, ()), "is_leaf"))
        return self._traced.is_leaf[0]

    def _here(self, what: str) -> Graph:
        body = self._traced.body
        # A value of a branch's body cannot be used outside of it, where the vertex's state and results are.
        if current_graph() is not body:
            raise GraphError(
                f"{self._function}: v.{what} is called in a branch or loop; return the value, and call it outside"
            )
        return body


def _widened(x: Tensor, reduce: str) -> Tensor:
    # Before the reduction, as NumPy's own sums and means do: added in their own dtype, small integers would wrap.
    dtype = float64 if reduce == "mean" and kind_of(x.dtype) in "biu" else accumulator_dtype(x.dtype)
    return x if dtype == x.dtype else astype(x, dtype)


def _fitting(function: VertexFunction, path: str, value: Tensor, spec: Spec) -> Tensor:
    if value.dtype != spec.dtype:
        raise DTypeError(
            f"{function} scatters {dtype_name(value.dtype)} as {path}, which is declared as {dtype_name(spec.dtype)}; "
            "convert it with af.astype"
        )
    if not is_subshape(value.shape, spec.shape):
        raise ShapeError(
            f"{function} scatters shape {format_shape(value.shape)} as {path}, which is declared as "
            f"{format_shape(spec.shape)}"
        )
    return value


class VertexFunction:
    """A function of a vertex; made by the decorator `vertex_function`.

    Attributes:
        name: of the decorated function; messages and nodes have it.
        function: the decorated function, checked to take a vertex.
        children: how many a vertex may have; None for any number.
        specs: of the parts of a state.
        structure: their nest.
    """

    def __init__(self, function: Callable[[Vertex], None], state: Nest, children: int | None) -> None:
        self.name = getattr(function, "__name__", "vertex function")
        self.function = user_function(function, "a vertex function", 1, "the vertex")
        self.specs, self.structure = nest.flatten(state)
        for path, spec in zip(self.structure.paths("state"), self.specs, strict=True):
            if not isinstance(spec, Spec) or not is_static(spec.shape):
                raise GraphError(
                    f"vertex_function({self.name}): {path} is described by af.spec(dtype, shape), with a shape that is "
                    f"known in full; got {spec!r}"
                )
        if not self.specs:
            raise GraphError(f"vertex_function({self.name}): a state has at least one part; got {state!r}")
        self.children = None if children is None else static_int(children, f"vertex_function({self.name}): children")
        if self.children is not None and self.children < 0:
            raise GraphError(f"vertex_function({self.name}): children is a number, or None for any; got {children}")
        self.__doc__, self.__wrapped__ = function.__doc__, function

    def __repr__(self) -> str:
        return f"vertex function {self.name}"

    def __call__(self, *_: object) -> NoReturn:
        """A vertex function is not called, but mapped.

        Raises:
            GraphError: always.
        """
        raise GraphError(f"{self} is not called: af.vertex_map({self.name}, graph, pulls) computes it for all vertices")

    def trace(self, graph: Graph, label: str, pulls: Mapping[str, Spec]) -> TracedFunction:
        """The function as a body over one vertex; it is called once.

        Args:
            graph: around the body.
            label: of the body.
            pulls: specs of what each vertex may pull.

        Raises:
            GraphError: it does not scatter, or does something that a vertex cannot.
        """
        traced = TracedFunction(Subgraph(graph, label))
        # Called once for all input graphs: the nodes built here are lifted over the vertices of each set.
        with traced.body, located_at(self.__wrapped__):
            returned = self.function(Vertex(self, traced, pulls))
        refuse_coroutines(returned)
        if returned is not None:
            raise GraphError(f"{self} returns {returned!r}; it gives its state by v.scatter, and results by v.push")
        if not traced.scattered:
            raise GraphError(f"{self} scatters nothing; v.scatter gives the state that parents gather")
        if any(node.op is RECOMPUTED and node.attrs["is_random"] for node in traced.body.walk()):
            # Parts of a vertex run at different times, and with other vertices, than the parts that use their values.
            raise GraphError(f"{self} draws random numbers inside of af.recompute; draw them in front, and pass them")
        return traced


def vertex_function(
    *function: Never, state: Nest = (), children: int | None = None
) -> Callable[[Callable[[Vertex], None]], VertexFunction]:
    """Declare the computation of a vertex, once, for input graphs of any structure (Cavs, ATC '18).

    The function gets a vertex `v`. It reads inputs by ``v.pull(name)`` and its children's states by ``v.gather(k)`` or
    ``v.gather_all()``, gives its own by ``v.scatter``, and results by ``v.push``. It may use any tensors around it, as
    weights are, and any operations, branches and loops. `vertex_map` runs it over the vertices of an `InputGraph`, many
    at once.

    Args:
        function: nothing: the decorator is called with the state first.
        state: a `Spec`, or a nest of them: what a vertex scatters, and its parents gather.
        children: how many a vertex may have at most, told apart by number; None: any number, all alike.

    Raises:
        GraphError: it takes no vertex, or the state is described by something else.

    >>> import asyncflow as af
    >>> @af.vertex_function(state=af.spec("float64", ()))
    ... def total(v):
    ...     v.scatter(v.pull("x") + v.gather_all())
    >>> with af.Graph():
    ...     tree, values = af.InputGraph.from_nested(((1.0, 2.0), 3.0))
    ...     x = af.scatter_update(af.zeros(5), tree.leaves, values)
    ...     af.vertex_map(total, tree, {"x": x}).roots
    <Tensor vertex_map/row_store_take:0 float64[?]>
    """
    if function:  # written without parentheses, as decorators without arguments are
        raise GraphError(
            "vertex_function has to know the state of a vertex: write "
            '@af.vertex_function(state=af.spec("float32", (n,))), and children=2 for numbered children'
        )
    return lambda function: VertexFunction(function, state, children)
