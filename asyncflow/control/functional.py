"""`scan`, `foldl`, `foldr`: a function over the rows of tensors, as a loop with TensorArrays.

The function is called once, while the graph is built.
"""

from __future__ import annotations

from collections.abc import Callable

from asyncflow.control.body import require_kept, result_tensor, user_function
from asyncflow.control.stores.tensor_array import TensorArray
from asyncflow.control.while_loop import while_loop
from asyncflow.control.windows import of_whole_windows
from asyncflow.errors import GraphError, ShapeError
from asyncflow.graph.building.build import as_tensor, constant, graph_for
from asyncflow.graph.building.scopes import control_dependencies
from asyncflow.graph.graph import Subgraph
from asyncflow.graph.ir import Tensor
from asyncflow.graph.values import nest
from asyncflow.graph.values.dtypes import int64
from asyncflow.ops.arithmetic.elementwise import add, subtract
from asyncflow.ops.arithmetic.logic import less
from asyncflow.ops.arrays.shape import rank, shape
from asyncflow.ops.checks.checks import assert_that
from asyncflow.ops.indexing.indexing import getitem
from asyncflow.values import Nest


def scan(
    fn: Callable[[Nest, Nest], Nest],
    elems: Nest,
    initializer: Nest = None,
    *,
    reverse: bool = False,
    parallel_iterations: int = 32,
    name: str | None = None,
) -> Nest:
    """The states ``state = fn(state, row)`` after each row of `elems`, stacked.

    Args:
        fn: takes the state so far and one row; returns the next state: the same nest, dtypes and shapes.
        elems: a nest of tensors with one common first extent, the rows; it may be known only in the run.
        initializer: the state before the first row. None: the first row, to which `fn` is then not applied; there
            must be one.
        reverse: go from the last row to the first; results stay at their rows' places.
        parallel_iterations: how many rows may be worked on at once, as far as states allow.
        name: of the loop.

    Returns:
        A nest like the state, each value with a new first axis for the rows.

    Raises:
        GraphError, DTypeError, ShapeError: `elems` does not fit together, or `fn` returns another kind of state than
            it was given; the message names the part.

    >>> import asyncflow as af
    >>> with af.Graph():
    ...     af.scan(lambda total, x: total + x, af.ones((5, 3)))
    <Tensor tensor_array_stack:0 float64[5,3]>
    """
    state, _, arrays = _over_rows(
        "scan", fn, elems, initializer, parallel_iterations, name, reverse=reverse, stacks=True
    )
    return state.structure.unflatten(arrays)


def foldl(
    fn: Callable[[Nest, Nest], Nest],
    elems: Nest,
    initializer: Nest = None,
    *,
    parallel_iterations: int = 32,
    name: str | None = None,
) -> Nest:
    """The state ``state = fn(state, row)`` after the last row of `elems`; arguments as for `scan`.

    >>> import asyncflow as af
    >>> with af.Graph():
    ...     af.foldl(lambda total, x: total + x, af.ones((5, 3)))
    <Tensor foldl:1 float64[3]>
    """
    state, values, _ = _over_rows("foldl", fn, elems, initializer, parallel_iterations, name, reverse=False)
    return state.structure.unflatten(values)


def foldr(
    fn: Callable[[Nest, Nest], Nest],
    elems: Nest,
    initializer: Nest = None,
    *,
    parallel_iterations: int = 32,
    name: str | None = None,
) -> Nest:
    """The state ``state = fn(state, row)`` after going from the last row to the first; arguments as for `scan`.

    >>> import asyncflow as af
    >>> with af.Graph():
    ...     af.foldr(lambda total, x: total + x, af.ones((5, 3)))
    <Tensor foldr:1 float64[3]>
    """
    state, values, _ = _over_rows("foldr", fn, elems, initializer, parallel_iterations, name, reverse=True)
    return state.structure.unflatten(values)


def _over_rows(
    what: str,
    fn: Callable[[Nest, Nest], Nest],
    elems: Nest,
    initializer: Nest,
    parallel_iterations: int,
    name: str | None,
    *,
    reverse: bool,
    stacks: bool = False,
) -> tuple[_State, list[Tensor], list[Tensor]]:
    """Return the kind of state, the last state, and, if it `stacks`, the states after each row."""
    with graph_for(*nest.flatten((elems, initializer))[0]):
        rows = RowOrder(what, elems, reverse=reverse)
        state, first = rows.start(initializer)
        fn = state.function(fn, rows)
        arrays = [TensorArray(x.dtype, rows.count, element_shape=x.shape) for x in state.initial] if stacks else []
        if first and stacks:
            place = rows.place(constant(0))
            arrays = [array.write(place, x) for array, x in zip(arrays, state.initial, strict=True)]

        def step(count: Tensor, values: list[Tensor], written: list[TensorArray]) -> tuple[Nest, ...]:
            place = rows.place(count)
            after = state.after(fn, values, rows.read(place))
            return add(count, 1), after, [array.write(place, x) for array, x in zip(written, after, strict=False)]

        _, values, arrays = while_loop(
            lambda count, values, written: less(count, rows.count),
            step,
            (as_tensor(first, int64), state.initial, arrays),
            parallel_iterations=parallel_iterations,
            name=what if name is None else name,
        )
        return state, values, [rows.stacked(array) for array in arrays]


class RowOrder:
    """The rows to go over, and the order to go in."""

    def __init__(self, what: str, elems: Nest, *, reverse: bool = False) -> None:
        self.what = what
        self.reverse = reverse
        if callable(elems):
            raise GraphError(f"{what}(fn, elems) takes the function first; got {elems!r} as elems")
        leaves, self.structure = nest.flatten(elems)
        self.tensors = [as_tensor(leaf) for leaf in leaves]
        if not self.tensors:
            raise GraphError(f"{what} needs at least one tensor to go over; got {elems!r}")
        self.count = self._count(self.tensors)
        self.arrays = [self._array(tensor) for tensor in self.tensors]

    def _count(self, tensors: list[Tensor]) -> int | Tensor:
        extents: dict[int, str] = {}
        for path, tensor in zip(self.structure.paths("elems"), tensors, strict=True):
            if tensor.shape == ():
                raise ShapeError(f"{self.what} goes over the first axis, but {path} is a scalar: {tensor!r}")
            extent = tensor.shape[0] if tensor.shape else None
            if extent is not None:
                extents.setdefault(extent, path)
        if len(extents) > 1:
            listed = ", ".join(f"{path} has {extent}" for extent, path in extents.items())
            raise ShapeError(f"{self.what} goes over all of elems at once, so they need one first extent; {listed}")
        if extents:
            return next(iter(extents))
        path, first = next(self.structure.paths("elems")), tensors[0]
        text = f"{self.what} goes over the first axis, but {path} is a scalar"
        with control_dependencies([] if first.shape else [assert_that(less(0, rank(first)), text)]):
            return getitem(shape(first), 0)

    def _array(self, tensor: Tensor) -> TensorArray:
        # The rows are views of a tensor that lives anyway, so freeing them one by one would gain nothing.
        row = None if tensor.shape is None else tensor.shape[1:]
        return TensorArray(tensor.dtype, self.count, element_shape=row, clear_after_read=False).unstack(tensor)

    def place(self, count: Tensor) -> Tensor:
        """The row that is taken after `count` others."""
        return subtract(subtract(self.count, 1), count) if self.reverse else count

    def read(self, place: Tensor) -> Nest:
        """A row, as a nest like `elems`."""
        return self.structure.unflatten([array.read(place) for array in self.arrays])

    def start(self, initializer: Nest) -> tuple[_State, int]:
        """The state to begin with, and how many rows it stands for."""
        if initializer is not None:
            return _State(self.what, initializer), 0
        if isinstance(self.count, int) and self.count == 0:
            raise ShapeError(f"{self.what} of no rows needs an initializer")
        return _State(self.what, self.read(self.place(constant(0)))), 1

    def stacked(self, array: TensorArray) -> Tensor:
        """All elements of an array with one element for each row."""
        length = self.count if isinstance(self.count, int) else None
        return TensorArray.from_handle(array.handle, array.kind, length=length).stack()


class _State:
    """The state that a scan or fold hands from row to row."""

    def __init__(self, what: str, initial: Nest) -> None:
        self.what = what
        leaves, self.structure = nest.flatten(initial)
        self.initial = [as_tensor(leaf) for leaf in leaves]
        if not self.initial:
            raise GraphError(f"the initializer of {what} has no values: {initial!r}")

    def function(self, fn: Callable[[Nest, Nest], Nest], rows: RowOrder) -> Callable[..., Nest]:
        """`fn`, which takes the state and a row."""
        arguments = f"the state, {nest.describe(self.structure)}, and one row, {nest.describe(rows.structure)}"
        return user_function(fn, f"fn of {self.what}", 2, arguments)

    def after(self, fn: Callable[[Nest, Nest], Nest], values: list[Tensor], row: Nest) -> list[Tensor]:
        """The state that `fn` makes of the state and a row, checked against the one it began with."""
        returned = fn(self.structure.unflatten(values), row)
        rule = (
            f"fn of {self.what} must return a state like the one it is given, {nest.describe(self.structure)}, which "
            f"begins as the initializer (or the first row)"
        )
        leaves = nest.match(self.structure, returned, rule)
        body = graph_for()
        assert isinstance(body, Subgraph)
        after = [
            of_whole_windows(result_tensor(body, leaf, like), like.shape, f"the state of {self.what}")
            for leaf, like in zip(leaves, self.initial, strict=True)
        ]
        for path, new, old in zip(self.structure.paths("state"), after, self.initial, strict=True):
            require_kept(f"{path} of {self.what}", old.spec, "fn", new)
        return after
