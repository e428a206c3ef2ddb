"""Gradients of values that loops read in parts: they cost as much as the parts, and equal dense gradients."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from functools import partial
from math import prod
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.autodiff.stores import part_sums
from asyncflow.autodiff.stores.part_sums import PartSum
from asyncflow.autodiff.stores.stores import StoreGradient
from asyncflow.devices.memory import MemoryAccount

Run = Callable[..., Awaitable[Any]]
Read = Callable[[Any, Any, Any], Any]
"""Of an array, by an iteration's number; the last argument makes a vector of numbers."""

pytestmark = pytest.mark.usefixtures("graph")

ROWS = 12


def flat(x: Any) -> Any:
    return x.reshape(-1) if isinstance(x, np.ndarray) else af.reshape(x, (-1,))


READS: dict[str, Read] = {
    "row": lambda x, t, stack: x[t],
    "row from the end": lambda x, t, stack: x[-t - 1],
    "slice of one": lambda x, t, stack: x[t : t + 1],
    "window": lambda x, t, stack: x[t : t + 3],
    "window with a step": lambda x, t, stack: x[t : t + 5 : 2],
    "window counted from the end": lambda x, t, stack: x[-t - 3 : -t - 1],
    "window cut off": lambda x, t, stack: x[t + 8 : t + 11],
    "empty window": lambda x, t, stack: x[t:t],
    "backwards": lambda x, t, stack: x[t + 2 : t : -1],
    "rows": lambda x, t, stack: x[stack([t, t + 1])],
    "rows twice": lambda x, t, stack: x[stack([t, 0, t])],
    "rows from the end": lambda x, t, stack: x[stack([-t - 1, t])],
    "element": lambda x, t, stack: x[t, 1],
    "part of a row": lambda x, t, stack: x[t, 1:],
    "column of a window": lambda x, t, stack: x[t : t + 2, 0],
    "rows and columns": lambda x, t, stack: x[stack([t, t]), stack([0, 1])],
    "row of a view": lambda x, t, stack: x.T[1:][:, t],
    "element of a view": lambda x, t, stack: flat(x)[t],
    "window of a row": lambda x, t, stack: x[0][t : t + 2],
    "window of a column": lambda x, t, stack: x[:, 1][t : t + 2],
}


def summed(trips: Any, read: Callable[[Any], Any]) -> Any:
    """Return the sum of cubes of the parts that a loop reads."""
    return af.while_loop(
        lambda t, total: t < trips, lambda t, total: (t + 1, total + af.sum(read(t) ** 3)), (0, np.float64(0))
    )[1]


def scattered(x: Any, trips: int, read: Read, slope: Callable[[Any], Any]) -> Any:
    """Return NumPy's gradient: the `slope` of each part, added up at the places of the part."""
    places, total = np.arange(x.size).reshape(x.shape), np.zeros(x.shape)
    for t in range(trips):
        named = read(places, t, np.array)
        np.add.at(total.reshape(-1), np.ravel(named), slope(np.ravel(x.reshape(-1)[named])))
    return total


@pytest.mark.parametrize("shape", [(ROWS, 3), (None, None)], ids=["known", "open"])
async def test_parts_add_up(shape: Any, graph: af.Graph) -> None:
    """To second order, whatever is known of shapes."""
    x = af.placeholder("float64", shape)
    slopes = {
        name: af.gradients(summed(4, partial(lambda read, t: read(x, t, af.stack), read)), x)
        for name, read in READS.items()
    }
    curvature = af.gradients(sum(map(af.sum, slopes.values())), x)
    values = np.random.default_rng(0).normal(size=(ROWS, 3))
    async with af.Session(graph) as session:
        first, second = await session.run((slopes, curvature), {x: values})
    for name, read in READS.items():
        expected = scattered(values, 4, read, lambda x: 3 * x**2)
        np.testing.assert_allclose(first[name], expected, rtol=1e-12, err_msg=name)
    expected = sum(scattered(values, 4, read, lambda x: 6 * x) for read in READS.values())
    np.testing.assert_allclose(second, expected, rtol=1e-12)


@pytest.mark.parametrize(
    "bounds",
    [
        [(6, 9), (3, 6), (0, 3)],
        [(1, 2), (7, 8), (3, 5)],
        [(0, 4), (4, 4), (4, 9)],
        [(0, 4), (3, 6), (8, 9)],
        [(2, 5), (2, 5), (0, 9)],
        [(-3, 9), (-9, -7), (3, 4)],
        [(5, 20), (4, 2), (0, 1)],
    ],
)
async def test_ranges_of_rows_that_meet_or_do_not(bounds: list[tuple[int, int]], graph: af.Graph) -> None:
    """Ranges that do not meet are written and not added, with zeros between them."""
    x, starts, stops = af.placeholder("float64", (None, 2)), *(af.constant(each) for each in zip(*bounds, strict=True))
    _, total = af.while_loop(
        lambda t, _: t < 3,
        lambda t, y: (t + 1, y + af.sum(x[starts[t] : stops[t]] ** 2)),
        (0, np.float64(0)),
    )
    values = np.random.default_rng(0).normal(size=(9, 2))
    async with af.Session(graph) as session:
        found = await session.run(af.gradients(total, x), {x: values})
    expected = np.zeros_like(values)
    for start, stop in bounds:
        expected[start:stop] += 2 * values[start:stop]
    np.testing.assert_allclose(found, expected, rtol=1e-15)


# -- work ------------------------------------------------------------------------------------------------------------


def one_of_two(x: Any, t: Any, stack: Any) -> Any:
    return af.cond(t % 2 == 0, lambda: x[t : t + 1], lambda: x[t + 1 : t + 2] * 2)


def pairs(x: Any, t: Any, stack: Any) -> Any:
    """An inner loop that reads by its own number and by that of the outer one."""
    return af.while_loop(lambda k, _: k < 2, lambda k, y: (k + 1, y + x[t] * x[k + t]), (0, np.zeros(2)))[1]


def along(x: Any, t: Any, stack: Any) -> Any:
    """Read an element of each column, by a number of its own."""
    return af.take_along_axis(x, af.reshape(stack([t, t + 1]), (1, 2)), axis=0)


def views(x: Any, t: Any, stack: Any) -> Any:
    """Views that the body makes, one of another, read in one iteration in several ways."""
    rows = af.reshape(x.T, (2, 1, -1))
    return af.sum(rows[0, 0, t : t + 2]) + af.sum(rows[1, :, t]) + x.T[0, t] * x[t, 1] + af.sum(x.T[:, stack([t, t])])


def several(x: Any, t: Any, stack: Any) -> Any:
    return af.sum(x[t]) + af.sum(x[t : t + 2]) + af.sum(af.take(x, stack([t, t]), axis=0))


WORK: dict[str, Read] = {
    **{name: READS[name] for name in ("row", "slice of one", "window", "rows from the end", "part of a row")},
    "in a branch": one_of_two,
    "in a loop": pairs,
    "several": several,
    "along an axis": along,
    "views": views,
}

_MOVED = {"enter", "exit", "merge", "next_iteration", "switch", "variable_read"}
"""Ops that copy nothing."""


async def elements(read: Read, n: int, kind: str = "captured") -> int:
    """Return the number of elements that kernels make for a gradient, and for its sum, of an array of `n` rows."""
    values = np.ones((n, 2))
    with af.Graph() as graph:
        x = af.Variable(values, name="x") if kind == "variable" else af.placeholder("float64", (n, 2))

        def body(t: Any, same: Any, total: Any) -> Any:
            return t + 1, same, total + af.sum(read(same if kind == "carried" else x, t, af.stack) ** 3)

        trips = (n // 4, x if kind == "carried" else 0, np.float64(0))
        y = af.while_loop(lambda t, *_: t < n // 2, body, trips)[2]
        slope = af.gradients(y, x)
        fetches = slope, af.gradients(af.sum(slope), x)
    trace = af.Trace()
    async with af.Session(graph, regions=False) as session:
        await session.run(fetches, {} if kind == "variable" else {x: values}, trace=trace)
    made = [firing.outputs for firing in trace.firings if firing.op not in _MOVED]
    shapes = [shape for outputs in made for shape in re.findall(r"float64\[([\d,]*)\]", outputs)]
    return sum(prod(map(int, filter(None, shape.split(",")))) for shape in shapes)


@pytest.mark.parametrize("name", WORK)
async def test_a_gradient_costs_what_the_loop_reads(name: str) -> None:
    """Behaviour 100: four times the rows and iterations are four times the work, to second order."""
    few, many = [await elements(WORK[name], n) for n in (12, 48)]
    assert many < 5 * few


@pytest.mark.parametrize("kind", ["carried", "variable"])
async def test_wherever_the_array_is_from(kind: str) -> None:
    """Behaviour 100: a loop variable that the body leaves as it is, and a variable that it reads."""
    few, many = [await elements(several, n, kind) for n in (12, 48)]
    assert many < 5 * few


# -- what is kept ----------------------------------------------------------------------------------------------------


class Counting:
    """The part of NumPy that sums of parts use; counts the elements that it makes."""

    def __init__(self) -> None:
        self.made = 0

    def __getattr__(self, name: str) -> Any:
        def counted(*args: Any, **options: Any) -> Any:
            made = getattr(np, name)(*args, **options)
            self.made += made.size
            return made

        return counted


def adding(xp: Any, shape: tuple[int, ...]) -> Callable[..., PartSum]:
    """Return the kernel that adds rows by number."""
    assert part_sums.ADD_PARTS.kernel is not None
    return part_sums.ADD_PARTS.kernel(xp, keys=((("input", 0),),), shape=shape, known=None)


def sum_of(xp: Any, n: int, trips: int) -> Any:
    """Of rows of 8, in an array of n rows."""
    add = adding(xp, (n, 8))
    total: Any = StoreGradient.of(())
    for k in range(trips):
        total = add(total, np.full(8, k), np.int64(k % n))
    return total


def test_parts_are_added_up_when_they_are_as_large_as_the_whole() -> None:
    """However many iterations there are: the work is that of the parts, and no more of them are kept than pays."""
    xp, n, trips = Counting(), 64, 10_000
    total = sum_of(xp, n, trips)
    assert total.length < n
    assert xp.made < 10 * 8 * trips
    expected = [sum(range(row, trips, n)) for row in range(n)]
    np.testing.assert_array_equal(total.total(), np.repeat(expected, 8).reshape(n, 8))


def test_versions_keep_their_meaning() -> None:
    """Both that follow one version, though only the first grows in place; and both orders of a sum of two."""
    add = adding(np, (300,))
    first = add(StoreGradient.of(()), np.float64(1), np.int64(0))
    second, third = add(first, np.float64(2), np.int64(1)), add(first, np.float64(3), np.int64(-1))
    found = [each.total()[[0, 1, 299]].tolist() for each in (first, second, third)]
    assert found == [[1, 0, 0], [1, 2, 0], [1, 0, 3]]
    assert second.merged(third).total()[[0, 1, 299]].tolist() == [2, 2, 3]
    assert first.merged(second).total()[[0, 1, 299]].tolist() == [2, 2, 0]


def test_wholes_are_added_up_as_they_come() -> None:
    """An outer loop over sums that have become wholes keeps one array."""
    total = sum_of(np, 64, 64)
    for _ in range(5):
        total = total.merged(sum_of(np, 64, 64))
    assert total.length == 1
    np.testing.assert_array_equal(total.total()[:, 0], 6 * np.arange(64))


def test_kept_parts_count_under_a_memory_limit() -> None:
    """Single parts count, and so does the array into which parts were added up."""
    account = MemoryAccount("cpu:0", limit=1 << 20)
    parts, whole = sum_of(np, 1000, 50), sum_of(np, 1000, 1000)
    for total, least, most in ((parts, 50 * 64, 50 * 500), (whole, 64_000, 2 * 64_000)):
        before = account.statistics().used
        account.track(total)
        assert least <= account.statistics().used - before <= most


async def test_a_slice_in_front_of_the_loop_joins_its_sum(graph: af.Graph, run: Run) -> None:
    x = af.placeholder("float64", (None, 3))
    y = summed(ROWS, lambda t: x[t]) + af.sum(x[1:4] ** 2) + af.sum(x[:2, 0]) + af.sum(x)
    (grad,) = af.gradients(y, [x])
    value = np.random.default_rng(0).standard_normal((ROWS, 3))
    expected = 3 * value**2 + 1
    expected[1:4] += 2 * value[1:4]
    expected[:2, 0] += 1
    np.testing.assert_allclose(await run(grad, {x: value}), expected)
    second = af.gradients(grad, [x])[0]
    doubled = 6 * value
    doubled[1:4] += 2
    np.testing.assert_allclose(await run(second, {x: value}), doubled)
    assert {"add_parts", "part_of_sum"} <= {each.op.name for each in behind(grad)}
    assert "scatter_to" not in {each.op.name for each in behind(grad)}


def behind(x: af.Tensor) -> set[Any]:
    """The nodes in front of all loops that a tensor is made of."""
    found, waiting = set(), [x.node]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting.extend(each.node for each in node.inputs)
    return found


async def test_rows_by_masks(run: Run) -> None:
    """A mask that changes from iteration to iteration."""
    x = af.placeholder("float64", (5, 2))
    y = summed(5, lambda t: x[af.arange(5) < t])
    expected = np.outer([4, 3, 2, 1, 0], [3, 3])
    np.testing.assert_array_equal(await run(af.gradients(y, x), {x: np.ones((5, 2))}), expected)
