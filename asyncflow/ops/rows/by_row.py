"""`row_by_row`: the row rule of ops that have no better one: one firing, which calls the op's kernel for each row.

Ops that draw random numbers have it too: each row draws as the loop iteration of its number would. So the numbers do
not depend on the other rows.

A function of the user's may take any time for a row. So its rows can be computed in parts (`RowKernel.begin`): whoever
calls stops between two rows, to go on elsewhere or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from itertools import islice, product, repeat
from math import inf
from time import perf_counter_ns
from typing import Any, Self, TypeAlias, TypeVar, cast

import numpy as np

from asyncflow.errors import RowByRow, in_row
from asyncflow.graph.building.build import apply
from asyncflow.graph.ir import Attrs, Node, Tensor
from asyncflow.graph.op import (
    DRAWS,
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
from asyncflow.graph.values.dtypes import VARIANT
from asyncflow.graph.values.shapes import Shape, format_shape, is_static, merge
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.arrays.shape import shape
from asyncflow.ops.cost import elements
from asyncflow.ops.draws import RowContexts
from asyncflow.ops.rows.folded import FoldedRows
from asyncflow.ops.rows.rule import CannotLift, LiftedValue, RowAxis, no_row_rule, row_rule
from asyncflow.ops.user.results import require_rows
from asyncflow.values import Array, Conduct, Kernel, Namespace, Value

_State: TypeAlias = "tuple[Array, Iterator[tuple[Value, ...]], float, list[Value]]"

Number = TypeVar("Number")
"""A number of one row, or of all rows."""


@row_rule("row by row")
def row_by_row(node: Node, rows: RowAxis, inputs: Sequence[LiftedValue]) -> Sequence[Tensor]:
    """The row rule that calls the kernel of one row for each of them, in one firing.

    Raises:
        CannotLift: the kernel is a coroutine, or a user's, whose results may be of another shape for each row.
    """
    op = node.op
    if op.conduct.is_async and op.rows_kernel is None:
        why = "is async or has limits (timeout=, rate=, ...): it awaits for each row"
        raise CannotLift(f"{node.name} ({op.name}) {why if op.conduct.is_user else 'awaits, for each row by itself'}")
    if op.rows_kernel is not None:  # one call for all rows, so each input needs the row axis
        inputs = [LiftedValue(rows.spread(value), has_rows=True) for value in inputs]
    elif op.conduct.is_user and not all(is_static(y.shape) for y in node.outputs):
        raise CannotLift(f"{node.name} ({op.name}) leaves the shape of its results open, and rows need one")
    attrs = {"loops": rows.places()} if op.conduct.needs_context else {"host": tuple(sorted(host_inputs(node)))}
    return apply(
        calling(op, on_host=runs_on_host(node)),
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


def calling(op: Op, *, on_host: bool) -> Op:
    """Return the op that calls the kernel of `op` for each row.

    Args:
        op: any.
        on_host: its kernel computes with NumPy wherever the node is.
    """
    conduct = op.conduct
    if conduct.is_user:
        return _OF_USER[conduct.is_repeatable, op.takes_any_arrays, conduct.is_async]
    if conduct.needs_context:
        return BY_ROW_DRAWN
    if op.effects is not None:
        return BY_ROW_CHECKED
    return _ON_HOST if on_host else BY_ROW


def op_of(node: Node) -> Op:
    """The op whose kernel a node calls row by row."""
    return _op(node.attrs["calls"])


def called_op(node: Node) -> Op:
    """Return the op whose kernel a firing of any node calls in the end: once, or for each row."""
    return op_of(node) if node.op in BY_ROW_OPS else node.op


def _op(op: Op | str) -> Op:
    return find_op(op) if isinstance(op, str) else op


def _infer(first: Spec, *inputs: Spec, specs: tuple[Spec, ...], **attrs: object) -> tuple[Spec, ...]:
    # The number of rows, unknown while lifting, may be known by now from the shape of the row numbers.
    rows = first.shape[:1] if first.shape else (None,)
    return tuple(Spec(x.dtype, merge(x.shape, (*rows, *x.shape[1:]))) if x.shape else x for x in specs)


def _kernel(
    xp: Namespace, *, calls: Op | str, arguments: Attrs, host: Sequence[int], single: bool, **attrs: object
) -> Kernel:
    op, rows = _op(calls), cast("Attrs", attrs)
    stacked = RowKernel(xp, bound_kernel(op, xp, arguments, of_scalars=False), single=single, **rows)
    if op.rows_kernel is None:
        return stacked
    of_rows = op.rows_kernel(xp, **arguments)

    def at_once(numbers: Array, *inputs: Array) -> tuple[Array, ...]:
        # A user's function is not called a second time: it may have effects.
        try:
            found = of_rows(*inputs)
        except Exception:
            if op.conduct.is_user:
                raise
            return stacked(numbers, *inputs)  # row by row, to name the row in the error
        results: tuple[Array, ...] = (found,) if single else found
        require_rows(results, len(numbers))
        return results

    async def in_turn(numbers: Array, *inputs: Array) -> tuple[Array, ...]:
        found = await of_rows(*inputs)
        results: tuple[Array, ...] = (found,) if single else found
        require_rows(results, len(numbers))
        return results

    if op.conduct.is_async:
        return in_turn
    return _AtOnce(at_once, stacked) if op.conduct.is_user else at_once


def _drawing_kernel(
    xp: Namespace, *, calls: Op | str, arguments: Attrs, loops: Sequence[tuple[int, int, int]], **attrs: object
) -> Kernel:
    rows = cast("Attrs", attrs)
    of_row = bound_kernel(_op(calls), np, arguments, of_scalars=False)
    stacked = RowKernel(np, of_row, **rows)
    of_rows = getattr(of_row, "of_rows", None)

    def run(context: KernelContext, numbers: Array, *inputs: Array) -> Value:
        if of_rows is not None and len(numbers):
            try:
                found = of_rows(lambda: _contexts(context, numbers, loops), inputs, rows["has_rows"])
            except Exception:  # some row failed: single calls find and name it
                found = None
            if found is not None:
                return stacked.stacked(found) if isinstance(found, list) else (found,)
        contexts = [context._replace(tag=_tag(context.tag, each, loops)) for each in numbers.tolist()]
        return stacked.begin(inf, numbers, *inputs, told=contexts)

    return run


def _contexts(context: KernelContext, numbers: Array, loops: Sequence[tuple[int, int, int]]) -> RowContexts:
    """Return the contexts of rows, with tags as from `_tag`."""
    # `_tag` only moves numbers, so it works on whole columns as well.
    columns = _tag(context.tag, [*numbers.T], loops)
    tags = np.empty((len(numbers), len(columns)), np.int64)
    for place, column in enumerate(columns):
        tags[:, place] = column
    return RowContexts(context.seed, context.run, tags)


def _tag(
    tag: tuple[Number, ...], numbers: Sequence[Number], loops: Sequence[tuple[int, int, int]]
) -> tuple[Number, ...]:
    """Return the tag of a row in a loop over rows: the row's numbers stand before the numbers of inner loops.

    Such as ``(5, 7, 2)`` for tag ``(5, 2)``, numbers ``(7,)`` and loops ``((1, 1, 0),)``: row 7 in iteration 2 of a
    loop inside the rows, in iteration 5 of a loop around them. With ``((1, 1, 1),)`` it is ``(7, 2)``: the loop around
    brought rows in turn, so its number is left out.

    Args:
        tag: of the firing.
        numbers: of the row, outer axes first.
        loops: for each axis the number of its own numbers, of loops inside it, and of surrounding loops that bring its
            rows in turn. Draws of a row do not depend on the numbers of those loops.
    """
    # Innermost axis first: its numbers go behind the places of all other axes, which then stay valid.
    found, end = list(tag), len(numbers)
    for width, inside, around in reversed(loops):
        place = len(tag) - inside
        found[place - around : place] = numbers[end - width : end]
        end -= width
    return tuple(found)


class Paused:
    """Work on rows that has stopped between two of them: `go_on` gives its results, or this again."""

    __slots__ = ()

    def go_on(self) -> Paused | tuple[Array, ...]:
        """Go on, until all is done or the time of another part is over."""
        raise NotImplementedError


class PausingKernel:
    """A kernel for rows that may be computed in parts."""

    __slots__ = ("_check",)

    def __init__(self) -> None:
        self._check: Callable[[Value], Value] | None = None

    def __call__(self, numbers: Array, *inputs: Array) -> tuple[Array, ...]:
        """The results of all rows."""
        found = self.begin(inf, numbers, *inputs)
        assert not isinstance(found, Paused)
        return found

    def begin(self, limit_ns: float, numbers: Array, *inputs: Array) -> Paused | tuple[Array, ...]:
        """The results; paused each time that calls have taken longer than `limit_ns` together."""
        raise NotImplementedError

    def followed_by(self, check: Callable[[Value], Value]) -> Self:
        """Return the kernel with ``check(results)`` applied to its results; several checks apply in the order added."""
        found, before = copy(self), self._check
        found._check = check if before is None else lambda results: check(before(results))
        return found

    def checked(self, results: tuple[Array, ...]) -> tuple[Array, ...]:
        """Return the results after the checks."""
        return results if self._check is None else cast("tuple[Array, ...]", self._check(results))


class _Found(Paused):
    """Results that are there."""

    __slots__ = ("_results",)

    def __init__(self, results: tuple[Array, ...]) -> None:
        self._results = results

    def go_on(self) -> tuple[Array, ...]:
        return self._results


class _AtOnce(PausingKernel):
    """A user's function of many rows, and the same of each row, for rows that the former leaves to it."""

    __slots__ = ("_call", "_each")

    def __init__(self, call: Callable[..., tuple[Array, ...]], each: RowKernel) -> None:
        super().__init__()
        self._call, self._each = call, each

    def begin(self, limit_ns: float, numbers: Array, *inputs: Array) -> Paused | tuple[Array, ...]:
        started = perf_counter_ns()
        try:
            results = self._call(numbers, *inputs)
        except RowByRow:
            each = self._each if self._check is None else self._each.followed_by(self._check)
            return each.begin(limit_ns, numbers, *inputs)
        found = self.checked(results)
        # A call cannot stop midway. After a long one, let other tasks run before its results are used.
        return found if perf_counter_ns() - started <= limit_ns else _Found(found)


class RowKernel(PausingKernel):
    """A kernel that calls the kernel of one row for each row, and stacks the results.

    Args:
        xp: the array namespace.
        of_row: the kernel of one row.
        has_rows: for each input, whether it has a row axis; others are the same for all rows.
        specs: of the stacked results.
        single: `of_row` gives one value, not a tuple.
        label: of the rows, for errors.
    """

    __slots__ = ("_has_rows", "_keeps", "_specs", "_xp", "label", "of_row", "single")

    def __init__(
        self,
        xp: Namespace,
        of_row: Kernel,
        *,
        has_rows: Sequence[bool],
        specs: Sequence[Spec],
        single: bool,
        label: str,
    ) -> None:
        super().__init__()
        self._xp, self.of_row, self._has_rows, self._specs, self.single = xp, of_row, has_rows, specs, single
        self.label = label
        # Stores keep their rows, but a row is a view of an array that is written to later.
        self._keeps = any(spec.dtype == VARIANT for spec in specs)

    def begin(
        self, limit_ns: float, numbers: Array, *inputs: Array, told: Sequence[object] | None = None
    ) -> Paused | tuple[Array, ...]:
        """As of `PausingKernel`; each call is told one thing more in front, if that is given."""
        columns: list[Iterator[Value]] = [] if told is None else [iter(told)]
        columns += [self._column(x) if own else repeat(x) for x, own in zip(inputs, self._has_rows, strict=True)]
        rows = zip(*columns, strict=False) if columns else repeat(())
        return self.go_on(numbers, rows, limit_ns, [])

    def go_on(
        self, numbers: Array, rows: Iterator[tuple[Value, ...]], limit_ns: float, results: list[Value]
    ) -> Paused | tuple[Array, ...]:
        """Compute the rows that have no results yet, until all have or calls took longer than `limit_ns`."""
        of_row, started = self.of_row, perf_counter_ns()
        left = len(numbers) - len(results)
        for values in islice(rows, left):  # if an input has more rows than the others, its extra rows are ignored
            try:
                results.append(of_row(*values))
            except Exception as error:
                in_row(error, self.label, numbers[len(results)].tolist())
                raise
            # Checked after a row, so that each part computes at least one row and the loop ends with any limit.
            if perf_counter_ns() - started > limit_ns:
                return _RowsOfFiring(self, (numbers, rows, limit_ns, results))
        if len(results) < len(numbers):
            raise ValueError(f"an input has {len(results)} rows; there are {len(numbers)}")
        return self.stacked(results)

    def _column(self, x: Array) -> Iterator[Array]:
        if self._keeps and x.ndim > 1:
            return (x[row].copy() for row in range(x.shape[0]))
        return iter(x) if self._xp is np else map(x.__getitem__, range(x.shape[0]))

    def stacked(self, results: Sequence[Any]) -> tuple[Array, ...]:
        """Stack the results of all rows, with the row axis in front."""
        if self.single and self._check is None:  # fast path for most user functions, which may be as short as this code
            return (_stacked(self._xp, self._specs[0], results),)
        columns: list[Sequence[Any]] = [results] if self.single else list(zip(*results, strict=True))
        columns = columns or [()] * len(self._specs)
        found = [_stacked(self._xp, spec, column) for spec, column in zip(self._specs, columns, strict=True)]
        return self.checked(tuple(found))


class _RowsOfFiring(Paused):
    """The rows of one firing, as far as they are computed; `RowKernel.go_on` says what of."""

    __slots__ = ("_kernel", "_state")

    def __init__(self, kernel: RowKernel, state: _State) -> None:
        self._kernel, self._state = kernel, state

    def go_on(self) -> Paused | tuple[Array, ...]:
        return self._kernel.go_on(*self._state)


def _stacked(xp: Namespace, spec: Spec, values: Sequence[Array]) -> Array:
    """Results of all rows, with the row axis in front.

    Raises:
        ValueError: they differ in shape.
    """
    if spec.dtype == VARIANT:  # objects, such as one store for each row: `np.array` might unpack them
        found = np.empty(len(values), object)
        found[:] = values
        return found
    if not values:
        return xp.empty((0, *(extent or 0 for extent in (spec.shape or ())[1:])), spec.dtype)
    if xp is np and set(map(type, values)) == {spec.dtype.type}:
        return np.array(values, spec.dtype)  # scalars: a fraction of the time of stacking
    for row, value in enumerate(values):
        if value.shape != values[0].shape:
            raise ValueError(
                f"results of rows stand side by side, so they need one shape; row 0 gave "
                f"{format_shape(values[0].shape)}, row {row} gave {format_shape(value.shape)}"
            )
    if xp is np and values[0].ndim:  # like `stack`, in half the time for few rows
        return np.concatenate([*map(np.asarray, values)]).reshape(len(values), *values[0].shape)
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
    # Skip the first input, the row numbers, which the called op does not get.
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
BY_ROW_DRAWN = define("draw_row_by_row", _infer, _drawing_kernel, flops=_flops, conduct=DRAWS, runs_on_host=True)
_OF_USER = {
    (pure, anywhere, waits): define(
        f"user{'_pure' * pure}{'_anywhere' * anywhere}{'_waiting' * waits}_row_by_row",
        _infer,
        _kernel,
        host_inputs=_host,
        flops=_flops,
        conduct=Conduct(is_user=True, is_repeatable=pure, is_async=waits),
        takes_any_arrays=anywhere,
    )
    for pure, anywhere, waits in product((False, True), repeat=3)
}
"""Ops that call a user's function, by `is_repeatable`, `takes_any_arrays` and `is_async` of the op."""
BY_ROW_OPS = (BY_ROW, _ON_HOST, BY_ROW_CHECKED, *_OF_USER.values())
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


no_row_rule("as found", because="the length of its result is known only in the run, for each row")
