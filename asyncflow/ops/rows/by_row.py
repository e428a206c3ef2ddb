"""`row_by_row`: the row rule of ops that have no better one: one firing, which calls the op's kernel for each row.

Ops that draw random numbers have it too: each row draws as the iteration of a loop that has its number would, so that
the numbers do not depend on what is computed beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import numpy as np

from asyncflow.errors import in_row
from asyncflow.graph.build import apply
from asyncflow.graph.dtypes import VARIANT
from asyncflow.graph.ir import Attrs, Node, Tensor
from asyncflow.graph.op import (
    OPAQUE,
    Access,
    KernelContext,
    Op,
    bound_kernel,
    define,
    find_op,
    host_inputs,
    is_registered,
    runs_on_host,
)
from asyncflow.graph.shapes import Shape, format_shape, is_static
from asyncflow.graph.spec import Spec
from asyncflow.ops.cost import elements
from asyncflow.ops.custom import require_rows
from asyncflow.ops.rows.folded import FoldedRows
from asyncflow.ops.rows.rule import CannotLift, LiftedValue, RowAxis, no_row_rule, row_rule
from asyncflow.ops.shape import shape
from asyncflow.values import Array, Kernel, Namespace


@row_rule("row by row")
def row_by_row(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    """The row rule that calls the kernel of one row for each of them, in one firing.

    Raises:
        CannotLift: the kernel is a coroutine, or a user's, whose results may be of another shape for each row.
    """
    op = node.op
    if op.is_async:
        raise CannotLift(f"{node.name} ({op.name}) awaits, for each row by itself")
    if op.rows_kernel is not None:
        inputs = [LiftedValue(rows.spread(value), has_rows=True) for value in inputs]
    elif op.is_user and not all(is_static(y.shape) for y in node.outputs):
        raise CannotLift(f"{node.name} ({op.name}) leaves the shape of its results open, and rows need one")
    attrs = {"loops": rows.places()} if op.needs_context else {"host": tuple(sorted(host_inputs(node)))}
    return apply(
        _calling(node),
        rows.numbers(),
        *(value.tensor for value in inputs),
        name=node.name.rpartition("/")[2],
        calls=op.name if is_registered(op) else op,
        arguments=dict(node.attrs),
        has_rows=tuple(value.has_rows for value in inputs),
        specs=tuple(Spec(y.dtype, rows.shape(y.shape)) for y in node.outputs),
        single=node.single,
        label=rows.label,
        **attrs,
    )


def _calling(node: Node) -> Op:
    if node.op.needs_context:
        return BY_ROW_DRAWN
    if node.op.effects is not None:
        return BY_ROW_CHECKED
    return _ON_HOST if runs_on_host(node) else BY_ROW


def op_of(node: Node) -> Op:
    """The op whose kernel a node calls row by row."""
    return _op(node.attrs["calls"])


def _op(op: Op | str) -> Op:
    return find_op(op) if isinstance(op, str) else op


def _infer(first: Spec, *inputs: Spec, specs: tuple[Spec, ...], **attrs: object) -> tuple[Spec, ...]:
    return specs


def _kernel(
    xp: Namespace, *, calls: Op | str, arguments: Attrs, host: Sequence[int], single: bool, **attrs: object
) -> Kernel:
    op, rows = _op(calls), cast("Attrs", attrs)
    of_row = bound_kernel(op, xp, arguments, of_scalars=False)
    stacked = _stacking(xp, lambda row, *values: of_row(*values), single=single, **rows)
    if op.rows_kernel is None:
        return stacked
    of_rows = op.rows_kernel(xp, **arguments)

    def at_once(numbers: Array, *inputs: Array) -> tuple[Array, ...]:
        try:
            found = of_rows(*inputs)
        except Exception:
            if op.is_user:
                raise
            return stacked(numbers, *inputs)  # which names the row
        results: tuple[Array, ...] = (found,) if single else found
        require_rows(results, len(numbers))
        return results

    return at_once


def _drawing_kernel(
    xp: Namespace, *, calls: Op | str, arguments: Attrs, loops: Sequence[tuple[int, int, int]], **attrs: object
) -> Kernel:
    of_row, rows = bound_kernel(_op(calls), np, arguments, of_scalars=False), cast("Attrs", attrs)

    def run(context: KernelContext, numbers: Array, *inputs: Array) -> tuple[Array, ...]:
        contexts = [context._replace(tag=_tag(context.tag, each, loops)) for each in numbers.tolist()]
        return _stacking(np, lambda row, *values: of_row(contexts[row], *values), **rows)(numbers, *inputs)

    return run


def _tag(tag: tuple[int, ...], numbers: Sequence[int], loops: Sequence[tuple[int, int, int]]) -> tuple[int, ...]:
    """The tag that a row has in a loop over rows: its numbers stand before those of the loops inside.

    Args:
        tag: of the firing.
        numbers: of the row, outer axes first.
        loops: for each axis how many of the numbers are its own, how many loops are inside of it, and how many around
            bring its rows in turn: what rows draw does not depend on their numbers.
    """
    found, end = list(tag), len(numbers)
    for width, inside, around in reversed(loops):
        place = len(tag) - inside
        found[place - around : place] = numbers[end - width : end]
        end -= width
    return tuple(found)


def _stacking(
    xp: Namespace, of_row: Kernel, *, has_rows: Sequence[bool], specs: Sequence[Spec], single: bool, label: str
) -> Callable[..., tuple[Array, ...]]:
    """Calls ``of_row(row, *values)`` for each row, and stacks what it gives."""

    keeps = any(spec.dtype == VARIANT for spec in specs)  # what it is given, which is a row that others write to

    def row_of(x: Array, row: int) -> Array:
        found: Array = x[row].copy() if keeps and x.ndim > 1 else x[row]
        return found

    def run(numbers: Array, *inputs: Array) -> tuple[Array, ...]:
        results: list[Sequence[Array]] = []
        for row in range(len(numbers)):
            try:
                found = of_row(
                    row, *(row_of(x, row) if split else x for x, split in zip(inputs, has_rows, strict=True))
                )
            except Exception as error:
                in_row(error, label, numbers[row].tolist())
                raise
            results.append((found,) if single else found)
        return tuple(_stacked(xp, spec, [found[place] for found in results]) for place, spec in enumerate(specs))

    return run


def _stacked(xp: Namespace, spec: Spec, values: Sequence[Array]) -> Array:
    """Results of all rows, with the row axis in front.

    Raises:
        ValueError: they differ in shape.
    """
    if spec.dtype == VARIANT:  # what is no array, such as a store of each row's own
        found = np.empty(len(values), object)
        found[:] = values
        return found
    if not values:
        return xp.empty((0, *(extent or 0 for extent in (spec.shape or ())[1:])), spec.dtype)
    for row, value in enumerate(values):
        if value.shape != values[0].shape:
            raise ValueError(
                f"results of rows stand side by side, so they need one shape; row 0 gave "
                f"{format_shape(values[0].shape)}, row {row} gave {format_shape(value.shape)}"
            )
    return xp.stack([xp.asarray(value) for value in values])


def _flops(
    inputs: Sequence[Shape],
    outputs: Sequence[Shape],
    *,
    calls: Op | str,
    arguments: Attrs,
    has_rows: Sequence[bool],
    **attrs: object,
) -> float:
    of_row = [x if x is None or not split else x[1:] for x, split in zip(inputs[1:], has_rows, strict=True)]
    results = [None if x is None else x[1:] for x in outputs]
    flops = _op(calls).flops
    each = elements(results[0]) if flops is None else flops(of_row, results, **arguments)
    return each * elements((outputs[0] or (1,))[:1])


def _host(node: Node) -> tuple[int, ...]:
    return (0, *(1 + place for place in node.attrs["host"]))


BY_ROW = define("row_by_row", _infer, _kernel, host_inputs=_host, flops=_flops, traits=OPAQUE)
_ON_HOST = define("row_by_row_on_host", _infer, _kernel, flops=_flops, runs_on_host=True)
BY_ROW_CHECKED = define(
    "check_row_by_row", _infer, _kernel, flops=_flops, effects=lambda node: ((node, Access.WRITE),), runs_on_host=True
)
BY_ROW_DRAWN = define(
    "draw_row_by_row", _infer, _drawing_kernel, flops=_flops, needs_context=True, is_random=True, runs_on_host=True
)
BY_ROW_OPS = (BY_ROW, _ON_HOST, BY_ROW_CHECKED)
"""The ops that call the kernel of another for each row; their first input are the numbers of rows, a vector each."""


@row_rule(*BY_ROW_OPS, BY_ROW_DRAWN)
def _rows_of_rows(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    """Rows of each row: all of them are the rows of one node."""
    numbers, *values = inputs
    folded = FoldedRows(rows, shape(numbers.tensor)[1 if numbers.has_rows else 0])
    flat = [folded.fold(value, split).tensor for value, split in zip(values, node.attrs["has_rows"], strict=True)]
    attrs = {**node.attrs, "label": folded.label(node.attrs["label"])}
    if node.op is BY_ROW_DRAWN:
        attrs["loops"] = (*rows.places(), *attrs["loops"])
    attrs["has_rows"] = tuple(
        split or value.has_rows for value, split in zip(values, node.attrs["has_rows"], strict=True)
    )
    attrs["specs"] = tuple(Spec(spec.dtype, spec.shape and (None, *spec.shape[1:])) for spec in node.attrs["specs"])
    return [folded.unfold(y) for y in apply(node.op, folded.numbers(numbers), *flat, **attrs)]


no_row_rule("as found", because="what it gives is as long as the run finds it, for each row")
