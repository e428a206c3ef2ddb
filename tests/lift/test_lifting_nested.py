"""Branches and loops that rows of rows decide: `vmap` in `vmap`, and with everything else that stands in bodies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import asyncflow as af

if TYPE_CHECKING:
    from collections.abc import Callable

RNG = np.random.default_rng(8)
X = RNG.normal(size=(4, 5, 3))
W = RNG.normal(size=(4, 3))


def branch(x: Any, w: Any) -> Any:
    return af.cond(af.sum(x * w) > 0.0, lambda: x * 2.0 + w, lambda: af.tanh(x))


def loop(x: Any, w: Any) -> Any:
    grow = lambda i, y: (i + 1, y + af.abs(x) + w * w)  # noqa: E731
    return af.while_loop(lambda i, y: af.sum(y) < 8.0, grow, (0, x))


def branch_in_loop(x: Any, w: Any) -> Any:
    return af.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, branch(y, w) * 0.5), (0, x))[1]


def loop_in_branch(x: Any, w: Any) -> Any:
    return af.cond(x[0] > 0.0, lambda: loop(x, w)[1], lambda: branch(x, w))


def slope(x: Any, w: Any) -> Any:
    return af.gradients(af.sum(branch_in_loop(x, w) ** 2), [x, w])


BODIES: list[Callable[[Any, Any], Any]] = [branch, loop, branch_in_loop, loop_in_branch, slope]


@pytest.mark.parametrize("of_outer", [True, False], ids=["own", "shared"])
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("regions", [True, False])
async def test_rows_of_rows_go_their_own_ways(body: Any, of_outer: bool, regions: bool) -> None:
    """Values of the outer rows alone, of the inner ones alone and of neither reach them too."""
    with af.Graph() as graph:
        x, w = af.placeholder("float64", (None, None, 3)), af.constant(W)
        inner = lambda rows, own: af.vmap(lambda row: body(row, own))(rows)  # noqa: E731
        found = af.vmap(inner, (0, 0 if of_outer else None))(x, w if of_outer else w[0])
        one = lambda lift: lambda row: af.map_fn(lambda x: body(x, row[1]), row[0], lift=lift)  # noqa: E731
        shared = w if of_outer else af.broadcast_to(w[0], (4, 3))
        looped = af.map_fn(one(False), (x, shared), lift=False)
    async with af.Session(graph, regions=regions) as session:
        got, want = await session.run((found, looped), {x: X})
        none = await session.run(found, {x: X[:, :0]})
    for a, b, c in zip(*map(_leaves, (got, want, none)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)
        assert c.shape == (4, 0, *b.shape[2:])


def _leaves(value: Any) -> list[Any]:
    return list(value) if isinstance(value, tuple | list) else [value]


async def test_rows_of_rows_draw_what_loops_over_them_draw() -> None:
    def drawn(x: Any) -> Any:
        walk = lambda i, y: (i + 1, y + af.random.uniform((3,)))  # noqa: E731
        walked = lambda: af.while_loop(lambda i, y: af.sum(y) < 3.0, walk, (0, x))[1]  # noqa: E731
        return af.cond(af.sum(x) > 0.0, lambda: x + af.random.normal((3,)), walked)

    found = []
    for outer, inner in ((True, True), (True, False), (False, True), (False, False)):
        with af.Graph(seed=3) as graph:
            rows = lambda row: af.map_fn(drawn, row, lift=inner, name="inner")  # noqa: B023, E731
            y = af.map_fn(rows, af.constant(X), lift=outer, name="outer")
        async with af.Session(graph) as session:
            found.append(await session.run(y))
    assert all(np.array_equal(each, found[0]) for each in found)


@pytest.mark.parametrize("in_branch", [True, False])
async def test_a_check_that_fails_names_both_rows_as_loops_do(in_branch: bool) -> None:
    def checked(x: Any) -> Any:
        with af.control_dependencies([af.assert_that(af.sum(x) < 20.0, "too large")]):
            return x * 1.0

    fed = np.abs(X)
    fed[2, 3] = 9.0
    told = []
    for lift in (True, False):
        with af.Graph() as graph:
            body = lambda x: af.cond(x[0] > 0.0, lambda: checked(x), lambda: x) if in_branch else checked(x)  # noqa: E731
            rows = lambda row: af.map_fn(body, row, lift=lift, name="inner")  # noqa: B023, E731
            y = af.map_fn(rows, af.constant(fed), lift=lift, name="outer")
        async with af.Session(graph) as session:
            with pytest.raises(af.KernelError, match="too large") as failed:
                await session.run(y)
        told.append((failed.value.reason, failed.value.location))
        assert failed.value.tag == "outer/2/inner/3"
    assert told[0] == told[1]


async def test_derivatives_of_three_axes() -> None:
    def each(x: Any) -> Any:
        return af.cond(
            x > 0.0, lambda: af.while_loop(lambda y: y < 3.0, lambda y: y * 1.5 + 0.1, (x,))[0], lambda: x**3
        )

    derivatives = []
    for fn in (
        af.vmap(af.vmap(af.vmap(each))),
        lambda x: af.map_fn(each, af.reshape(x, (-1,)), lift=False),
    ):
        with af.Graph() as graph:
            x = af.constant(X)
            (first,) = af.gradients(af.sum(fn(x) ** 2), [x])
            (second,) = af.gradients(af.sum(first * first), [x])
        async with af.Session(graph) as session:
            derivatives.append(await session.run((first, second)))
    for one, other in zip(*derivatives, strict=True):
        np.testing.assert_allclose(one, other)


def test_the_gradient_of_rows_that_rows_part_is_refused() -> None:
    """The gradient looks at the numbers of the rows that each branch has taken."""
    inner = lambda rows: af.sum(af.vmap(lambda x: af.cond(x > 0.0, lambda: x * x, lambda: x))(rows))  # noqa: E731
    with af.Graph(), pytest.raises(af.GraphError, match="rows of each row are parted, as many as the run says"):
        af.vmap(lambda rows: af.gradients(inner(rows), [rows])[0])(af.constant(W))


def test_map_fn_in_map_fn_is_lifted_and_says_so() -> None:
    with af.Graph() as graph:
        af.map_fn(lambda rows: af.map_fn(lambda x: branch(x, x), rows), af.constant(X), name="outer")
    assert graph.remarks["outer"] == "map_fn computes all rows at once"


@pytest.mark.slow
@pytest.mark.parametrize("lift_parts", [True, False])
async def test_rows_in_vertices_go_their_own_ways(lift_parts: bool) -> None:
    """In each of the three parts of a vertex function, with gradients."""

    def grown(x: Any, s: Any) -> Any:
        more = lambda: af.while_loop(lambda y: af.sum(y) < 5.0, lambda y: y + af.abs(x) + 0.1, (s,))[0]  # noqa: E731
        return af.cond(af.sum(x * s) > 0.0, more, lambda: x * s)

    def summed(h: Any, lift: bool) -> Any:
        return af.tanh(af.mean(af.map_fn(lambda x: grown(x, h), af.constant(W), lift=lift), axis=0))

    @af.vertex_function(state=af.spec("float64", (3,)), children=2)
    def function(v: Any) -> None:
        state = summed(v.gather(0) * 0.5 - v.gather(1) + v.pull(), True)
        v.scatter(state + summed(v.pull(), True))
        v.push(summed(state, True))

    def by_hand(pulled: Any) -> Any:
        states: dict[int, Any] = {}
        pushed = []
        for vertex, children in ((3, ()), (2, (3,)), (1, ()), (0, (1, 2))):
            given = [states[child] for child in children] + [af.zeros(3)] * 2
            state = summed(given[0] * 0.5 - given[1] + pulled[vertex], False)
            states[vertex] = state + summed(pulled[vertex], False)
            pushed.append(summed(state, False))
        return states[0], sum(map(af.sum, pushed))

    with af.Graph() as graph:
        x = af.constant(RNG.normal(size=(4, 3)))
        mapped = af.vertex_map(function, af.InputGraph.from_parents([-1, 0, 0, 2]), x, lift_parts=lift_parts)
        found = []
        for root, pushed in ((mapped.roots[0], af.sum(mapped.pushes["y"])), by_hand(x)):
            found.append((root, *af.gradients(af.sum(root**2) + pushed, [x])))
    async with af.Session(graph) as session:
        got, want = await session.run(found)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10)
