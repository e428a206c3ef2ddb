"""`vmap`: a function of one row, called with many."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import wraps
from typing import TypeAlias

from asyncflow.control.body import refuse_handles, result_tensor, user_function
from asyncflow.errors import GraphError, ShapeError, brief
from asyncflow.graph.building.build import as_tensor, graph_for
from asyncflow.graph.graph import Subgraph
from asyncflow.graph.ir import Tensor
from asyncflow.graph.values import nest
from asyncflow.graph.values.spec import Spec
from asyncflow.lift.lifting import in_rows, lift
from asyncflow.ops.arrays.known_values import empty_body
from asyncflow.ops.arrays.manipulation import moveaxis
from asyncflow.ops.arrays.shape import shape
from asyncflow.ops.axes import static_int
from asyncflow.ops.rows.rule import CannotLift, LiftedValue
from asyncflow.values import Nest

InAxes: TypeAlias = "int | Sequence[InAxes] | dict[str, InAxes] | None"
"""The axis of the rows, None for an argument common to all rows; or a nest of these as far as it goes."""


def vmap(fn: Callable[..., Nest], in_axes: InAxes = 0, out_axes: InAxes = 0) -> Callable[..., Nest]:
    """Return the function that computes ``fn`` for each row of its arguments, all at once.

    `fn` is called once for each call, with the rows of one number. Its operations are built for all rows together: a
    branch runs on the rows that take it, a loop on the rows that go on, and random numbers are each row's own. It
    nests, and gradients go through it and stand in it.

    Args:
        fn: takes nests of tensors, all by position; returns a nest.
        in_axes: along which axis of the arguments the rows stand: one for all, or a sequence with one for each
            argument, that may be a nest like the argument. None: the argument is the same for every row.
        out_axes: where the row axis of the results goes: one for all, or a nest like the result.

    Returns:
        A function of the same arguments, which adds nodes to the current graph.

    Raises:
        GraphError: `fn` is no function; or (when called) no argument has rows, or `fn` cannot be computed for several
            rows at once, as it awaits or changes a variable: the message names the cause. `map_fn` makes a loop of
            that.
        ShapeError: numbers of rows that differ, or a rank that is not known.

    >>> import asyncflow as af
    >>> with af.Graph():
    ...     af.vmap(lambda row, matrix: row @ matrix, in_axes=(0, None))(af.ones((5, 3)), af.ones((3, 2)))
    <Tensor vmap/matmul_1:0 float64[5,2]>
    """

    if not callable(fn):
        raise GraphError(f"vmap: fn is a function of rows; got {brief(fn)}")

    @wraps(fn)
    def over_rows(*arguments: Nest) -> Nest:
        leaves, structure = nest.flatten(arguments)
        with graph_for(*leaves) as graph:
            tensors = [graph.import_tensor(as_tensor(leaf)) for leaf in leaves]
            axes = _axes_of("in_axes", in_axes, structure)
            label = graph.unique_name("vmap")
            front = [
                moveaxis(x, axis, 0) if axis is not None and x.shape else x
                for x, axis in zip(tensors, axes, strict=True)
            ]
            count = _count(front, axes, list(structure.paths("argument")))
            front = [x if axis is None else in_rows(x, count) for x, axis in zip(front, axes, strict=True)]
            body = Subgraph(graph, label)
            known: dict[Tensor, LiftedValue] = {}
            with body:
                rows = [_row(body, x, axis is not None) for x, axis in zip(front, axes, strict=True)]
                known.update(
                    (row, LiftedValue(x, axis is not None)) for row, x, axis in zip(rows, front, axes, strict=True)
                )
                called = user_function(fn, "fn of vmap", len(arguments), f"{len(arguments)} arguments")
                returned, result = nest.flatten(called(*structure.unflatten(rows)))
                values = [result_tensor(body, leaf) for leaf in returned]
                refuse_handles("vmap", result.paths("result"), values)
            try:
                found = lift(body, known, values, count, label)
            except CannotLift as reason:
                raise GraphError(f"vmap: {reason}; af.map_fn makes a loop over rows of it") from None
            empty_body(body)
            back = _out_axes(out_axes, result)
            return result.unflatten([moveaxis(x, 0, axis) if axis else x for x, axis in zip(found, back, strict=True)])

    return over_rows


def _row(body: Subgraph, x: Tensor, has_rows: bool) -> Tensor:
    return body.add_input(Spec(x.dtype, x.shape[1:] if has_rows and x.shape is not None else x.shape), "row")


def _count(tensors: Sequence[Tensor], axes: Sequence[int | None], paths: Sequence[str]) -> int | Tensor:
    extents: dict[int, str] = {}
    open_ones: list[Tensor] = []
    for x, axis, path in zip(tensors, axes, paths, strict=True):
        if axis is None:
            continue
        if x.shape is None:
            wanted = "vmap needs to know the rank of arguments with rows while the graph is built"
            raise ShapeError(f"{wanted}; that of {path}, {x!r}, is unknown: give it one with af.reshape")
        if not x.shape:
            raise ShapeError(f"vmap: {path} has no axis {axis} for rows: {x!r}; say None for it in in_axes")
        if x.shape[0] is None:
            open_ones.append(x)
        else:
            extents.setdefault(x.shape[0], path)
    if len(extents) > 1:
        listed = ", ".join(f"{path} has {extent}" for extent, path in extents.items())
        raise ShapeError(f"vmap needs one number of rows; {listed}")
    if not extents and not open_ones:
        raise GraphError("vmap: no argument has rows; in_axes is None for all of them")
    return next(iter(extents)) if extents else shape(open_ones[0])[0]


def _out_axes(axes: InAxes, result: nest.Structure) -> list[int]:
    found = _axes_of("out_axes", axes, result)
    if None in found:
        raise GraphError("vmap: out_axes says where the row axis of each result goes, so it is an int, and never None")
    return [axis for axis in found if axis is not None]


def _axes_of(what: str, axes: InAxes, structure: nest.Structure) -> list[int | None]:
    """An axis for each leaf."""
    if axes is None:
        return [None] * structure.size
    if isinstance(axes, tuple | list | dict):
        keys = structure.keys if isinstance(axes, dict) else range(len(structure.children))
        parts: dict[Hashable, InAxes] = dict(axes.items() if isinstance(axes, dict) else enumerate(axes))
        if structure.kind is None or parts.keys() != set(keys):
            raise GraphError(f"vmap: {what}={axes!r} does not fit {nest.describe(structure)}")
        pairs = zip(keys, structure.children, strict=True)
        return [axis for key, child in pairs for axis in _axes_of(what, parts[key], child)]
    return [static_int(axes, f"vmap: {what}")] * structure.size
