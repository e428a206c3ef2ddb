"""The last reads of saved values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.autodiff.stores.row_gradients import READ_ROWS
from asyncflow.autodiff.stores.saved_values import READ_SAVED
from asyncflow.autodiff.stores.store_gradients import ELEMENT_GRADIENT


def loop(x: Any, *, times: int = 5) -> Any:
    _, y = af.while_loop(lambda i, _: i < times, lambda i, y: (i + 1, af.tanh(y) * af.sin(y)), (0, x))
    return y


def slope(x: Any) -> Any:
    return af.gradients(loop(x), x)


def nested(x: Any) -> Any:
    """Stores of the inner loop are values of the outer one's."""
    _, y = af.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, loop(y)), (0, x))
    return af.gradients(y, x)


def nested_with_products(x: Any) -> Any:
    """A choice of what the innermost loop saves leaves reads in the gradients around without a use."""

    def step(y: Any, times: tuple[int, ...]) -> Any:
        if not times:
            z = af.cumulative_sum(y)
            return af.sin(z) * y
        return af.while_loop(lambda i, _: i < times[0], lambda i, y: (i + 1, step(y, times[1:])), (0, y))[1]

    return af.gradients(step(x, (2, 3, 2)), x)


def in_branch(x: Any) -> Any:
    """The forward loop is in a branch, and so is the gradient loop."""
    return af.gradients(af.cond(af.sum(x) > 0, lambda: loop(x), lambda: x), x)


def branch_in_loop(x: Any) -> Any:
    def body(i: Any, y: Any) -> Any:
        return i + 1, af.cond(i % 2 == 0, lambda: loop(y, times=2), lambda: af.sin(y))

    _, y = af.while_loop(lambda i, _: i < 4, body, (0, x))
    return af.gradients(y, x)


def twice(x: Any) -> Any:
    """Two gradient loops read what one loop has saved."""
    y = loop(x)
    return af.gradients(y, x) + af.gradients(af.sum(y * y), x)


def in_another_loop(x: Any) -> Any:
    """The gradient loop runs again and again over the same stores."""
    y = loop(x)
    _, total = af.while_loop(
        lambda i, _: i < 3, lambda i, s: (i + 1, s + af.gradients(y, x, af.ones_like(y) * s)), (0, af.ones_like(x))
    )
    return total


def second(x: Any) -> Any:
    """The first gradient loop is differentiated, and its reads are repeated."""
    return af.gradients(slope(x), x)


@pytest.mark.parametrize(
    ("build", "last"),
    [
        (slope, "all"),
        (nested, "all"),
        (nested_with_products, "all"),
        (in_branch, "all"),
        (branch_in_loop, "all"),
        (twice, "none"),
        (in_another_loop, "none"),
        (second, "some"),
    ],
)
async def test_a_read_is_the_last_if_no_other_can_come(
    session: af.Session, graph: af.Graph, build: Callable[[Any], Any], last: str
) -> None:
    """Results equal the results without the pass."""
    x = af.placeholder("float64", (3,))
    y = build(x)
    plan = session.plan(y, [x])
    reads = [node for node in plan.graph.walk() if node.op is READ_SAVED]
    regions = [inner for node in plan.graph.walk() if "region" in node.attrs for inner in node.attrs["region"].walk()]
    reads += [node for node in regions if node.op is READ_SAVED]
    marked = [bool(node.attrs.get("is_last")) for node in reads]
    assert marked
    assert {"all": all(marked), "none": not any(marked), "some": any(marked)}[last]
    feeds = {x: np.array([0.3, 1.1, 0.7])}
    async with af.Session(graph, without=["last_reads"]) as plain:
        np.testing.assert_array_equal(await session.run(y, feeds), await plain.run(y, feeds))


def through_array(x: Any) -> Any:
    """One loop writes an array, another reads each element."""
    array = af.TensorArray("float64", 5, element_shape=(3,), clear_after_read=False)
    _, _, array = af.while_loop(
        lambda i, *_: i < 5, lambda i, y, array: (i + 1, af.sin(y), array.write(i, y)), (0, x, array)
    )
    _, total = af.while_loop(lambda i, _: i < 5, lambda i, s: (i + 1, s * array.read(i)), (0, af.ones_like(x)))
    return af.sum(total)


def slope_through_array(x: Any) -> Any:
    return af.gradients(through_array(x), x)


def slope_through_rows(x: Any) -> Any:
    """The same with a store of rows."""
    _, _, rows = af.while_loop(
        lambda i, *_: i < 5,
        lambda i, y, rows: (i + 1, af.sin(y), rows.append(af.reshape(y, (1, 3)))),
        (0, x, af.RowStore("float64", (3,))),
    )
    _, total = af.while_loop(
        lambda i, _: i < 5, lambda i, s: (i + 1, s * af.reshape(rows.slice(i, i + 1), (3,))), (0, af.ones_like(x))
    )
    return af.gradients(af.sum(total), x)


def slope_of_rows_that_read_one_another(x: Any) -> Any:
    """Additions to the sums of rows, in the loop that reads them, have versions."""
    _, rows = af.while_loop(
        lambda i, *_: i < 5,
        lambda i, rows: (i + 1, rows.append(af.sin(rows.slice(i, i + 1)))),
        (0, af.RowStore("float64", (3,)).append(af.reshape(x, (1, 3)))),
    )
    return af.gradients(af.sum(rows.stack()), x)


def one_element_again_and_again(x: Any) -> Any:
    """An element that is read five times has five gradients, and each depends on the others in the second gradient."""
    array = af.TensorArray("float64", 1, element_shape=(3,), clear_after_read=False).write(0, x)
    _, total = af.while_loop(lambda i, _: i < 5, lambda i, s: (i + 1, s * array.read(0)), (0, af.ones_like(x)))
    return af.gradients(af.gradients(af.sum(total), x), x)


def two_readers(x: Any) -> Any:
    """Two gradients ask for the same elements."""
    y = through_array(x)
    return af.gradients(y, x) + af.gradients(y * y, x)


@pytest.mark.parametrize(
    ("build", "last"),
    [
        (slope_through_array, 1),
        (slope_through_rows, 1),
        (slope_of_rows_that_read_one_another, 0),
        (one_element_again_and_again, 0),
        (two_readers, None),
    ],
)
async def test_a_gradient_of_an_element_is_read_last_where_that_was_written_once(
    session: af.Session, graph: af.Graph, build: Callable[[Any], Any], last: int | None
) -> None:
    """Results equal the results without the pass."""
    x = af.placeholder("float64", (3,))
    y = build(x)
    plan = session.plan(y, [x])
    regions = [inner for node in plan.graph.walk() if "region" in node.attrs for inner in node.attrs["region"].walk()]
    reads = [node for node in (*plan.graph.walk(), *regions) if node.op in (ELEMENT_GRADIENT, READ_ROWS)]
    assert reads
    if last is not None:
        assert sum(bool(node.attrs.get("is_last")) for node in reads) == last
    feeds = {x: np.array([0.3, 1.1, 0.7])}
    async with af.Session(graph, without=["last_reads"]) as plain:
        np.testing.assert_array_equal(await session.run(y, feeds), await plain.run(y, feeds))
