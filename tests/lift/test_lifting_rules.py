"""Every op has a row rule or a reason, and a node over many rows equals the node over each of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from asyncflow.graph.building.build import placeholder
from asyncflow.graph.graph import Graph, Subgraph
from asyncflow.graph.ir import Node, Tensor
from asyncflow.graph.op import registered_ops
from asyncflow.graph.values.dtypes import VARIANT
from asyncflow.graph.values.spec import Spec
from asyncflow.lift.lifting import lift
from asyncflow.ops.rows.rule import CannotLift, LiftedValue, row_rule_of, why_no_row_rule
from tests.ops.test_host_inputs import PROGRAMS, run_here, traced

ROWS = 3


def test_every_op_has_a_row_rule_or_says_why_not() -> None:
    known = [op for op in registered_ops() if not op.conduct.is_user and op.name.isidentifier()]
    missing = [op.name for op in known if row_rule_of(op) is None and why_no_row_rule(op) is None]
    assert not missing, f"define these with rows= (see `Op`), or give a reason with no_row_rule: {missing}"
    both = [op.name for op in known if row_rule_of(op) is not None and why_no_row_rule(op) is not None]
    assert not both


def _rows_of(value: Any, n_rows: int) -> Any:
    """Return rows like a value: floats are scaled, and integers that may count positions are permuted."""
    value = np.asarray(value)
    rows = []
    for row in range(n_rows):
        if value.dtype.kind in "fc" and value.dtype.itemsize > 2:
            rows.append((value * (1 + 0.125 * row)).astype(value.dtype))
        else:
            rows.append(np.roll(value, row) if value.ndim == 1 else value)
    return np.stack(rows) if rows else np.empty((0, *value.shape), value.dtype)


def _of_row(node: Node, values: list[Any]) -> tuple[Any, ...]:
    kernel = node.op.kernel
    assert kernel is not None
    found = kernel(np, **node.attrs)(*[np.asarray(value)[()] for value in values])
    return (found,) if node.single else tuple(found)


def _lifted(node: Node, flags: list[bool], values: list[Any], n_rows: int, known: bool) -> list[Any]:
    """The outputs of a node for all rows; raises CannotLift."""
    with Graph() as graph:
        body = Subgraph(graph, "row")
        given: dict[Tensor, LiftedValue] = {}
        fed: dict[Tensor, Any] = {}
        inputs = []
        for x, value, has_rows in zip(node.inputs, values, flags, strict=True):
            shape: Any = np.shape(value)
            if not known:
                own = x.shape if x.shape is not None else shape[has_rows:]
                shape = ((None,) if has_rows else ()) + tuple(own)
            outer = placeholder(x.dtype, shape)
            inner = body.add_input(Spec(x.dtype, shape[1:] if has_rows else shape), "row")
            given[inner] = LiftedValue(outer, has_rows)
            fed[outer] = np.asarray(value)[()]
            inputs.append(inner)
        with body:
            specs = node.op.infer(*(x.spec for x in inputs), **node.attrs)
            one = body.add_node(node.op, inputs, node.attrs, specs)
        if known:
            found = lift(body, given, one.outputs, n_rows, "row")
        else:
            rows = placeholder("int64", ())
            fed[rows] = np.int64(n_rows)
            found = lift(body, given, one.outputs, rows, "row")
        done = run_here(graph.nodes, fed)
        for expected, y in zip(one.outputs, found, strict=True):
            assert y.dtype == expected.dtype
            assert y.shape is None or expected.shape is None or len(y.shape) == 1 + len(expected.shape)
        return [done[y] for y in found]


def _flags(node: Node, thorough: bool) -> Iterator[list[bool]]:
    """Yield choices of the inputs that have rows: all of them; each alone; and all but one."""
    places = range(len(node.inputs))
    found = [[True for _ in places]]
    if thorough:
        found += [[place == k for place in places] for k in places]
        found += [[place <= k for place in places] for k in places]
    elif len(found[0]) > 1:
        found.append([place == 0 for place in places])
    yield from (each for number, each in enumerate(found) if each not in found[:number])


_ERRORS = (ValueError, IndexError, AssertionError, FloatingPointError, TypeError, np.linalg.LinAlgError)


def _check(node: Node, values: list[Any], thorough: bool) -> bool:
    """Compares a node over rows with it row by row; says whether it was lifted at all."""
    is_lifted = False
    for flags in _flags(node, thorough):
        whole = [_rows_of(x, ROWS) if has_rows else x for x, has_rows in zip(values, flags, strict=True)]
        of_row = [[x[row] if has_rows else x for x, has_rows in zip(whole, flags, strict=True)] for row in range(ROWS)]
        try:
            expected = [_of_row(node, row) for row in of_row]
        except _ERRORS:
            continue  # such rows do not fit one another
        for n_rows, known in ((ROWS, False), (ROWS, True), (0, True), (0, False))[: 4 if thorough else 1]:
            given = [x[:n_rows] if has_rows else x for x, has_rows in zip(whole, flags, strict=True)]
            try:
                found = _lifted(node, flags, given, n_rows, known)
            except CannotLift:
                break
            is_lifted = True
            for place, y in enumerate(found):
                wanted = np.stack([np.asarray(row[place]) for row in expected])[:n_rows]
                seen = f"{node.op.name} {node.attrs} {flags} {[np.shape(v) for v in values]} {n_rows} rows {known}"
                # Of no rows that are computed one by one, only what is known while the graph is built is known.
                assert np.shape(y) == wanted.shape or not n_rows, seen
                if wanted.dtype.kind in "fc":
                    np.testing.assert_allclose(
                        y, wanted[: len(y)], rtol=1e-5, atol=1e-6, err_msg=seen
                    ) if n_rows else None
                elif n_rows:
                    assert np.array_equal(y, wanted), seen
    return is_lifted


@pytest.mark.parametrize("thorough", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("place", range(len(PROGRAMS)))
def test_a_node_over_rows_equals_its_result_for_each_row(place: int, thorough: bool) -> None:
    build, arrays, known = PROGRAMS[place]
    nodes, fed = traced(build, arrays, known)
    values = run_here(nodes, dict(fed))
    seen = set()
    with np.errstate(all="ignore"):
        for node in nodes:
            specs = [x.spec for x in (*node.inputs, *node.outputs)]
            key = (node.op.name, *(map(str, specs)), repr(node.attrs))
            if not _has_rule(node) or key in seen or any(each.dtype.kind in "TO" for each in specs):
                continue
            seen.add(key)
            _check(node, [values[x] for x in node.inputs], thorough)


def _has_rule(node: Node) -> bool:
    op = node.op
    draws = op.conduct.needs_context or op.conduct.is_random
    return bool(node.inputs and node.outputs) and row_rule_of(op) is not None and not draws and not op.conduct.is_user


@pytest.mark.slow
def test_every_rule_is_looked_at() -> None:
    """But for stores, checks, draws (`test_lifting.py`), functions of users, tables, vertices and batched calls.

    Tests of their own look at these.
    """
    looked_at: set[str] = set()
    with np.errstate(all="ignore"):
        for build, arrays, known in PROGRAMS:
            nodes, fed = traced(build, arrays, known)
            values = run_here(nodes, dict(fed))
            for node in nodes:
                if _has_rule(node) and node.op.name not in looked_at:
                    specs = [x.spec for x in (*node.inputs, *node.outputs)]
                    if not any(each.dtype == VARIANT for each in specs) and _check(
                        node, [values[x] for x in node.inputs], thorough=True
                    ):
                        looked_at.add(node.op.name)
    ruled = {op.name for op in registered_ops() if row_rule_of(op) is not None and not op.conduct.needs_context}
    stores = {
        name for name in ruled if name.startswith(("tensor_array", "saved_value", "save_value", "store_", "table_"))
    }
    stores |= {
        "row_store",
        "add_row_gradients",
        "joined_gradients",
        "pieces_gradient",
        "row_gradients",
        "accumulate_gradient",
        "add_parts",
        "element_gradient",
        "merge_gradients",
        "part_of_sum",
    }
    others = {
        "arange",
        "assert",
        "barrier",
        "batched",
        "custom_gradient",
        "check_row_by_row",
        "reduce_children",
        "rows_gradient",
        "stacked_gradients",
    } | {name for name in ruled if name.startswith("user_")}
    assert ruled - looked_at == stores | others, "call new ops in a program of tests/ops/test_host_inputs.py"
