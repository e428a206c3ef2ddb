"""Looking at values while the graph runs: printing, and checks that stop the run."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np

from asyncflow.errors import GraphError
from asyncflow.graph.building.build import TensorLike, apply, as_tensor, graph_for, identity
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import Access, Effects, define
from asyncflow.graph.values.spec import Spec
from asyncflow.ops.promotion import kind_of, require_kind, same
from asyncflow.values import Array, Kernel, Namespace


def _text(value: Array, summarize: int | None) -> str:
    array = np.asarray(value)
    if array.ndim == 0:
        return str(array[()])
    if summarize is None:
        return np.array2string(array, threshold=sys.maxsize)
    return np.array2string(array, threshold=2 * summarize, edgeitems=summarize)


# -- printing --------------------------------------------------------------------------------------------------------


def _print_kernel(xp: Namespace, *, message: str, summarize: int | None) -> Kernel:
    def write(*values: Array) -> Array:
        parts = [message] if message else []
        line = " ".join([*parts, *(_text(value, summarize) for value in values)])
        # One call, so that lines of several runs do not mix.
        sys.stdout.write(line + "\n")
        return values[0]

    return write


PRINT = define("print", same, _print_kernel, effects=lambda node: (("stdout", Access.WRITE),), runs_on_host=True)


def print_(*values: TensorLike, message: str = "", summarize: int | None = 3) -> Tensor:
    """Print values to standard output when the node runs, and return the first value.

    Lines come in the order they were written in the program. At the top level of a graph a print runs only if its
    result is used or fetched, or stands in `control_dependencies`; inside branches and loops it always runs.

    Args:
        values: what to print, on one line.
        message: text before them.
        summarize: how many items at each end of each axis of a long array; None for all.

    Raises:
        GraphError: there is no value.
    """
    if not values:
        raise GraphError("print needs a value; write af.print(af.constant(0), message=...) to print text alone")
    return apply(PRINT, *values, message=str(message), summarize=summarize)[0]


# -- checks ----------------------------------------------------------------------------------------------------------


def _check_numerics_kernel(xp: Namespace, *, message: str) -> Kernel:
    def check(x: Array) -> Array:
        if not xp.isfinite(x).all():
            nans, infinities = int(xp.isnan(x).sum()), int(xp.isinf(x).sum())
            found = f"{nans} NaN and {infinities} Inf among {x.size} values"
            raise FloatingPointError(f"{message}: {found}" if message else found)
        return x

    return check


def _check_numerics_spec(x: Spec, *, message: str) -> Spec:
    require_kind(x, "fc", "floats or complex numbers")
    return x


CHECK_NUMERICS = define(
    "check_numerics",
    _check_numerics_spec,
    _check_numerics_kernel,
    rows_kernel=_check_numerics_kernel,
    rows="row by row",
    runs_on_host=True,
)


def check_numerics(x: TensorLike, message: str = "") -> Tensor:
    """Return `x`; the run fails with a FloatingPointError that counts NaNs and infinities if `x` holds any.

    Only what uses the result is protected. Integers and booleans pass.
    """
    x = as_tensor(x)
    return identity(x) if kind_of(x.dtype) in "biu" else apply(CHECK_NUMERICS, x, message=str(message))[0]


def _assert_effects(node: Node) -> Effects:
    # Its own resource: never pruned from a body that runs, and not ordered with other assertions.
    return ((node, Access.WRITE),)


def _assert_spec(condition: Spec, *data: Spec, message: str, summarize: int | None) -> Spec:
    require_kind(condition, "b", "a boolean condition")
    return condition


def _assert_kernel(xp: Namespace, *, message: str, summarize: int | None) -> Kernel:
    def check(condition: Array, *data: Array) -> Array:
        if not condition.all():
            lines = [message or "the condition does not hold", *(f"  {_text(item, summarize)}" for item in data)]
            raise AssertionError("\n".join(lines))
        return condition

    return check


ASSERT = define(
    "assert",
    _assert_spec,
    _assert_kernel,
    rows_kernel=_assert_kernel,
    effects=_assert_effects,
    rows="row by row",
    runs_on_host=True,
)


def assert_that(
    condition: TensorLike, message: str = "", data: Sequence[TensorLike] = (), *, summarize: int | None = 3
) -> Tensor:
    """Fails the run with an AssertionError unless every element of `condition` is true.

    Inside branches and loops it always runs; at the top level put the result into `control_dependencies` or fetch it.

    Args:
        condition: booleans of any shape.
        message: what went wrong.
        data: values to show, one a line.
        summarize: how many items at each end of each axis of a long array; None for all.

    Returns:
        The condition.
    """
    with graph_for(condition, *data):
        return apply(ASSERT, condition, *data, message=str(message), summarize=summarize)[0]
