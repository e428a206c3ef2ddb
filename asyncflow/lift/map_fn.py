"""`map_fn` and `vmap`: a function of one row, over many."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from asyncflow.control.body import refuse_handles, result_tensor, user_function
from asyncflow.control.functional import RowOrder
from asyncflow.control.primitives.enter import check_parallel_iterations
from asyncflow.control.stores.array_store import ArrayKind
from asyncflow.control.stores.tensor_array import ARRAY, TensorArray
from asyncflow.control.while_loop import add_loop
from asyncflow.errors import GraphError
from asyncflow.graph.building.build import as_tensor, graph_for
from asyncflow.graph.graph import Graph, Subgraph
from asyncflow.graph.ir import Tensor
from asyncflow.graph.structured import CondNode, WhileNode
from asyncflow.graph.values import nest
from asyncflow.graph.values.dtypes import int64
from asyncflow.graph.values.shapes import is_static
from asyncflow.graph.values.spec import Spec
from asyncflow.lift import by_row_gradient
from asyncflow.lift.lifting import in_rows
from asyncflow.lift.lifting import lift as lift_body
from asyncflow.lift.single_rows import warn_of_single_rows
from asyncflow.ops.arithmetic.elementwise import add
from asyncflow.ops.arithmetic.logic import less
from asyncflow.ops.arrays.known_values import empty_body
from asyncflow.ops.rows.rule import CannotLift, LiftedValue
from asyncflow.values import Nest

_COUNTER = Spec(int64, ())
_DERIVATIVES = by_row_gradient.__name__


def map_fn(
    fn: Callable[[Nest], Nest],
    elems: Nest,
    *,
    lift: bool | Literal["auto"] = "auto",
    parallel_iterations: int = 32,
    name: str | None = None,
) -> Nest:
    """Compute ``fn(row)`` for each row of `elems`, and stack the results.

    If possible, `fn` is *lifted*: its operations are built for all rows at once. A branch runs on the rows that take
    it, and a loop on the rows that go on. Otherwise, as when `fn` awaits or changes a variable, a loop goes over the
    rows and works on up to `parallel_iterations` at the same time. The results are the same but for rounding, random
    numbers are equal, and `plan.explain()` says which of the two it is and why.

    Args:
        fn: takes one row, a nest like `elems`; returns any nest.
        elems: a nest of tensors with one common first extent, the rows; it may be known only in the run.
        lift: "auto": lifted where that can be; True: it is an error if it cannot; False: always a loop.
        parallel_iterations: how many rows a loop may work on at once.
        name: of the loop, and what the names of lifted nodes begin with.

    Returns:
        The nest that `fn` returns, each value with a new first axis for the rows.

    Raises:
        GraphError: `elems` is empty, `fn` returns nothing, or cannot be lifted and `lift` is True.
        ShapeError: a scalar among `elems`, or first extents that differ.
        ValueError: (in the run, as the cause of a KernelError) results of different shapes; or no rows, where the
            shape of a result is not known while the graph is built.

    >>> import asyncflow as af
    >>> with af.Graph():
    ...     af.map_fn(lambda x: af.sum(x * x), af.ones((5, 3)))
    <Tensor map/sum:0 float64[5]>
    """
    check_parallel_iterations(parallel_iterations)
    if lift != "auto" and not isinstance(lift, bool):
        raise GraphError(f'map_fn: lift is "auto", True or False; got {lift!r}')
    with graph_for(*nest.flatten(elems)[0]) as graph:
        rows = RowOrder("map_fn", elems)
        fn = user_function(fn, "fn of map_fn", 1, f"one row, {nest.describe(rows.structure)}")
        loop = _MapLoop(graph, graph.unique_name("map" if name is None else name))
        structure = loop.trace(fn, rows)
        try:
            if lift is False:
                raise CannotLift("as lift=False asks")
            if lift == "auto":
                _require_alike(loop.body)
            nodes = list(loop.body.walk()) if lift is True else []
            results = loop.lifted(rows)
            warn_of_single_rows(graph, loop.label, "lift=True", "row", nodes)
            graph.root.remarks[loop.label] = "map_fn computes all rows at once"
        except CannotLift as reason:
            if lift is True:
                raise GraphError(f"map_fn(lift=True): {reason}") from None
            graph.root.remarks[loop.label] = f"map_fn is a loop over rows, {reason}"
            results = loop.build(rows, parallel_iterations)
        return structure.unflatten(results)


def _require_alike(body: Subgraph) -> None:
    """Raises CannotLift where rows of branches or loops may differ in shape, as they may in a loop over rows."""
    # Parts lifted before were checked then, if their caller asked for rows of one shape.
    for node in (each for each in body.nodes if each not in body.parted):
        for inner in node.subgraphs:
            _require_alike(inner)
        if isinstance(node, CondNode):
            saved = set(node.graph.kept_for_gradients.get(node, {}).values())
            sides = zip(node.outputs, *(branch.results for branch in node.subgraphs), strict=True)
            differ = any(
                one.shape != other.shape or not is_static(one.shape) for y, one, other in sides if y not in saved
            )
        else:
            differ = isinstance(node, WhileNode) and not all(
                is_static(x.shape) for x in node.body.inputs[: node.n_vars]
            )
        if differ:
            raise CannotLift(f"{node.name} may give rows of different shapes", node.location)


class _MapLoop:
    """The loop of a `map_fn`, built body first: only the body tells how many arrays of results there are."""

    def __init__(self, graph: Graph, label: str) -> None:
        self.label = label
        self.condition = Subgraph(graph, f"{label}/cond")
        self.body = Subgraph(graph, f"{label}/body")
        self.kinds: list[ArrayKind] = []
        self.rows: list[Tensor] = []
        self.values: list[Tensor] = []

    def trace(self, fn: Callable[[Nest], Nest], rows: RowOrder) -> nest.Structure:
        """Builds the body; gives the nest that `fn` returns."""
        body = self.body
        count = body.add_input(_COUNTER, "var")
        with body:
            self.rows = [array.read(count) for array in rows.arrays]
            leaves, structure = nest.flatten(fn(rows.structure.unflatten(self.rows)))
            if not leaves:
                raise GraphError("fn of map_fn must return a value to stack")
            values = self.values = [result_tensor(body, leaf) for leaf in leaves]
            refuse_handles("map_fn", structure.paths("result"), values)
            self.kinds = [ArrayKind(x.dtype, x.shape, dynamic_size=False, clear_after_read=True) for x in values]
            handles = [body.add_input(ARRAY, "var") for _ in values]
            written = [
                TensorArray.from_handle(handle, kind).write(count, value).handle
                for handle, kind, value in zip(handles, self.kinds, values, strict=True)
            ]
            body.results = [add(count, 1), *written]
        # Loop variables come before captures, though the last of them were made after the first captures.
        body.inputs = [count, *handles]
        return structure

    def lifted(self, rows: RowOrder) -> list[Tensor]:
        """The values of the body for all rows; the loop is then not needed."""
        counted = [in_rows(x, rows.count) for x in rows.tensors]
        known = {row: LiftedValue(x, has_rows=True) for row, x in zip(self.rows, counted, strict=True)}
        found = lift_body(self.body, known, self.values, rows.count, self.label)
        empty_body(self.body)
        return found

    def build(self, rows: RowOrder, parallel_iterations: int) -> list[Tensor]:
        """Adds the loop; gives the stacked results."""
        arrays = [TensorArray(kind.dtype, rows.count, element_shape=kind.element_shape) for kind in self.kinds]
        specs = (_COUNTER, *(ARRAY for _ in arrays))
        for spec in specs:
            self.condition.add_input(spec, "var")
        with self.condition:
            self.condition.results = [less(self.condition.inputs[0], rows.count)]
        initial = [as_tensor(0, int64), *(array.handle for array in arrays)]
        node = add_loop(self.condition, self.body, initial, specs, self.label, parallel_iterations)
        handles = zip(node.outputs[1:], self.kinds, strict=True)
        return [rows.stacked(TensorArray.from_handle(handle, kind)) for handle, kind in handles]
