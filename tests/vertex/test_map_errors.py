"""Mistakes of newcomers, and errors found in a run: each message says what to do, and names the user's line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.errors import FeedError, GraphError, KernelError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Run = Callable[..., Awaitable[Any]]

STATE = af.spec("float64", (3,))
CHAINS = af.InputGraph.chain([4, 5])
ROWS = np.zeros((9, 3))


def declared(body: Callable[[Any], object], children: int | None = 1) -> Any:
    return af.vertex_function(state=STATE, children=children)(body)  # type: ignore[arg-type]


@declared
def total(v: Any) -> None:
    v.scatter(v.pull() + v.gather(0))


def scatters(value: Callable[[Any], object], children: int | None = 1) -> Any:
    return declared(lambda v: v.scatter(value(v)), children)


async def coroutine(v: Any) -> None:
    v.scatter(v.pull())


@af.op(outputs=lambda x: x)
async def waits(x: Any) -> Any:
    return x


MISTAKES: dict[str, tuple[Callable[[], object], str]] = {
    "called": (
        lambda: total(af.constant(ROWS)),
        r"vertex function total is not called: af\.vertex_map\(total, graph, pulls\) computes it for all vertices",
    ),
    "too few rows": (
        lambda: af.vertex_map(total, CHAINS, ROWS[:7]),
        r"pulls\['x'\] has a row for each vertex, 9; got <Tensor .* float64\[7,3\]>",
    ),
    "too many rows": (
        lambda: af.vertex_map(total, CHAINS, np.zeros((12, 3))),
        r"pulls\['x'\] has a row for each vertex, 9; got <Tensor .* float64\[12,3\]>",
    ),
    "parts by word": (
        lambda: af.vertex_map(total, CHAINS, ROWS, lift_parts="yes"),  # type: ignore[arg-type]
        "lift_parts is True or False, got 'yes'",
    ),
    "share by number": (
        lambda: af.vertex_map(total, CHAINS, ROWS, share=1),  # type: ignore[arg-type]
        "share is True or False, got 1",
    ),
    "no rows": (lambda: af.vertex_map(total, CHAINS, 1.0), r"pulls\['x'\] has a row for each vertex, 9; got"),
    "another name": (
        lambda: af.vertex_map(scatters(lambda v: v.pull("words")), CHAINS, {"word": ROWS}),
        "vertex function <lambda> pulls 'words', and vertex_map is given 'word'",
    ),
    "nothing to pull": (
        lambda: af.vertex_map(total, CHAINS),
        "vertex function total pulls 'x', and vertex_map is given none",
    ),
    "gather of any number": (
        lambda: af.vertex_map(scatters(lambda v: v.gather(0), None), CHAINS, ROWS),
        r"has any number of children; v.gather_all\(\) reads them all, and children=2 says",
    ),
    "all children of a function that tells them apart": (
        lambda: af.vertex_map(scatters(lambda v: v.gather_all(), 2), CHAINS, ROWS),
        r"tells children apart, as children=2 says; v.gather\(k\) reads one",
    ),
    "gather of a child too many": (
        lambda: af.vertex_map(scatters(lambda v: v.gather(1)), CHAINS, ROWS),
        r"has children 0 to 0; got v.gather\(1\)",
    ),
    "no scatter": (
        lambda: af.vertex_map(declared(lambda v: v.push(v.pull())), CHAINS, ROWS),
        "scatters nothing; v.scatter gives the state that parents gather",
    ),
    "a second scatter": (
        lambda: af.vertex_map(declared(lambda v: [v.scatter(v.pull()) for _ in range(2)]), CHAINS, ROWS),
        "scatters a second time; a vertex has one state",
    ),
    "another dtype": (
        lambda: af.vertex_map(scatters(lambda v: af.astype(v.pull(), "float32")), CHAINS, ROWS),
        "scatters float32 as state, which is declared as float64; convert it with af.astype",
    ),
    "another shape": (
        lambda: af.vertex_map(scatters(lambda v: af.sum(v.pull())), CHAINS, ROWS),
        r"scatters shape \[\] as state, which is declared as \[3\]",
    ),
    "a result": (
        lambda: af.vertex_map(declared(lambda v: (v.scatter(v.pull()), v.pull())), CHAINS, ROWS),
        "returns .*; it gives its state by v.scatter, and results by v.push",
    ),
    "a coroutine function": (lambda: declared(coroutine), "coroutine is a coroutine function; make it an op"),
    "an op that awaits": (
        lambda: af.vertex_map(scatters(lambda v: waits(v.pull())), CHAINS, ROWS),
        r"computes many vertices at once, but .*waits \(waits\) .*built at",
    ),
    "a variable": (
        lambda: af.vertex_map(scatters(lambda v: af.Variable(ROWS[0], name="w").assign_add(v.pull())), CHAINS, ROWS),
        r"w/assign_add \(variable_assign_add\) changes Variable\('w'\), once for each row .*built at",
    ),
    "a tensor of another function": (
        lambda: [af.vertex_map(each, CHAINS, ROWS) for each in leaking()],
        "was built inside vertex_map/leaks and is used in vertex_map_1/<lambda>, which lies outside it",
    ),
    "no types": (
        lambda: af.vertex_map({"word": total, "phrase": total}, CHAINS, ROWS),
        "vertex_map of 2 functions needs a graph with types; this one has none",
    ),
    "no functions": (lambda: af.vertex_map({}, CHAINS, ROWS), "takes what @af.vertex_function gives; got no function"),
    "no vertex function": (lambda: af.vertex_map(len, CHAINS), "takes what @af.vertex_function gives; got <built-in"),  # type: ignore[arg-type]
    "no graph": (lambda: af.vertex_map(total, [1, 2], ROWS), r"vertices of an af.InputGraph; got \[1, 2\]"),  # type: ignore[arg-type]
    "another policy": (
        lambda: af.vertex_map(total, CHAINS, ROWS, policy="bfs"),
        "policies are 'breadth_first', 'depth', 'agenda'; got 'bfs'",
    ),
    "another initial state": (
        lambda: af.vertex_map(total, CHAINS, ROWS, initial=(0, 0)),
        "initial is no nest like the state of vertex function total: expected one value, got a tuple of 2",
    ),
    "initial of another shape": (
        lambda: af.vertex_map(total, CHAINS, ROWS, initial=np.zeros(4)),
        r"initial is float64\[4\], and the state of vertex function total float64\[3\]",
    ),
    "initial of another dtype": (
        lambda: af.vertex_map(total, CHAINS, ROWS, initial=af.zeros(3, dtype="float32")),
        r"initial is float32, and the state of vertex function total float64\[3\]",
    ),
    "no call of the decorator": (
        lambda: af.vertex_function(total.__wrapped__),
        r"has to know the state of a vertex: write @af.vertex_function\(state=af.spec",
    ),
    "no state": (lambda: af.vertex_function()(total.__wrapped__), "a state has at least one part"),
    "a state of no shape": (
        lambda: af.vertex_function(state=af.spec("float64", (None,)))(total.__wrapped__),
        "state is described by af.spec.*known in full",
    ),
}


def leaking() -> list[Any]:
    kept: list[Any] = []

    def leaks(v: Any) -> None:
        kept.append(v.pull())
        v.scatter(v.pull())

    return [declared(leaks), scatters(lambda v: v.pull() + kept[0])]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_named_with_the_line(mistake: str) -> None:
    wrong, message = MISTAKES[mistake]
    with af.Graph(), pytest.raises(GraphError, match=message) as found:
        wrong()
    assert __file__ in str(found.value)


def test_outside_of_a_graph() -> None:
    with pytest.raises(GraphError, match="no graph is being built here; write `with"):
        af.vertex_map(total, CHAINS, ROWS)


@pytest.mark.parametrize("rows", [7, 12, 0])
async def test_rows_that_a_run_finds_wrong(graph: af.Graph, run: Run, rows: int) -> None:
    """The extent may be known of neither, of the rows, or of the graph alone."""
    fed, x, fixed = af.InputGraph.placeholder(), af.placeholder("float64", (None, 3)), np.zeros((rows, 3))
    message = rf"pulls\['x'\] has a row for each vertex: the graph has 9 vertices, and .* of shape \[{rows},3\]"
    for batch, pulled, feeds in (
        (fed, x, {**fed.feeds(CHAINS), x: fixed}),
        (CHAINS, x, {x: fixed}),
        (fed, fixed, fed.feeds(CHAINS)),
    ):
        found = af.vertex_map(total, batch, pulled)
        with pytest.raises(KernelError, match=message):
            await run(found.roots, feeds)


async def test_a_graph_as_the_key_of_a_feed(graph: af.Graph, run: Run) -> None:
    fed = af.InputGraph.placeholder()
    roots = af.vertex_map(total, fed, ROWS).roots
    with pytest.raises(FeedError, match=r"keyed by tensors.*; write feeds=\{\*\*graph.feeds\(data\), ...\}"):
        await run(roots, {fed: CHAINS})
    assert (await run(roots, fed.feeds(CHAINS))).shape == (2, 3)


async def test_a_graph_that_a_run_finds_wrong(graph: af.Graph, run: Run) -> None:
    """The error names sample and vertex, and no line of ours as the user's."""
    fed, x = af.InputGraph.placeholder(), af.placeholder("float64", (None, 3))
    roots = af.vertex_map(total, fed, x).roots
    wide = af.InputGraph.batch([CHAINS, af.InputGraph.from_parents([-1, 0, 0])])
    with pytest.raises(KernelError, match=r"vertex 0 of sample 2 .* has 2 children; at most 1 are allowed") as found:
        await run(roots, {**fed.feeds(wide), x: np.zeros((12, 3))})
    assert "written at" not in str(found.value)
    assert "<asyncflow" not in str(found.value.__cause__)
    assert f"built at {__file__}" in str(found.value)
    assert (await run(roots, {**fed.feeds(CHAINS), x: ROWS})).shape == (2, 3)


def positive(x: Any) -> Any:
    af.assert_that(af.sum(x) > 0, "not positive")
    return x


@af.op(outputs=lambda x: x)
def checked(x: Any) -> Any:
    if x.sum() < 0:
        raise ValueError("not positive")
    return x


def lazily(v: Any) -> None:
    v.scatter(v.pull())
    v.push(positive(v.pull() + 0.0 * v.gather(0)))


FAILING: dict[str, tuple[Any, str]] = {
    "eager": (scatters(lambda v: positive(v.pull()) + v.gather(0)), "1/3"),
    "core": (scatters(lambda v: positive(v.pull() + 0.0 * v.gather(0))), "1/3"),
    "lazy": (declared(lazily), "1/3"),
    "unused": (declared(lambda v: [positive(v.pull() + 0.0 * v.gather(0)), v.scatter(v.pull())][1]), "1/3"),
    "branch": (
        scatters(lambda v: af.cond(v.is_leaf, v.pull, lambda: positive(v.pull() + 0.0 * v.gather(0)))),
        "1/3",
    ),
    "own op": (scatters(lambda v: checked(v.pull() + 0.0 * v.gather(0))), "1/3"),
    "child": (scatters(lambda v: v.pull() + 0.0 * v.gather_all(positive), None), "1/4/0"),
}


@pytest.mark.parametrize("lift_parts", [True, False], ids=["parts", "whole"])
@pytest.mark.parametrize("name", FAILING)
async def test_what_fails_names_function_sample_and_vertex(
    graph: af.Graph, run: Run, name: str, lift_parts: bool
) -> None:
    """Behaviour 84: also where nothing that is asked for depends on it, and the session stays usable."""
    function, place = FAILING[name]
    x, rows = af.placeholder("float64", (9, 3)), np.ones((9, 3))
    roots = af.vertex_map(function, CHAINS, x, lift_parts=lift_parts).roots
    rows[7] = -5.0
    with pytest.raises(KernelError, match="not positive") as found:
        await run(roots, {x: rows})
    vertices = "sample/vertex/child" if name == "child" else "sample/vertex"
    assert f"vertex_map/{function.name} ({vertices})/{place}" in found.value.tag
    assert f"built at {__file__}" in str(found.value)
    assert (await run(roots, {x: np.ones((9, 3))})).shape == (2, 3)


@pytest.mark.parametrize("of_gathered", [True, False])
async def test_a_position_out_of_range_names_sample_and_vertex(graph: af.Graph, of_gathered: bool) -> None:
    x, places = af.placeholder("float64", (9, 3)), np.zeros(9, np.int64)

    def body(v: Any) -> None:
        state, place = v.gather(0), v.pull("place")
        v.scatter(v.pull() + (state if of_gathered else v.pull())[place] + state)

    places[7] = 4
    roots = af.vertex_map(declared(body), CHAINS, {"x": x, "place": places}).roots
    async with af.Session(graph) as session:
        with pytest.raises(KernelError, match="index 4 is out of bounds for axis 0 with size 3") as found:
            await session.run(roots, {x: ROWS})
    assert "vertex_map/body (sample/vertex)/1/3" in found.value.tag
    assert f"built at {__file__}" in str(found.value)
