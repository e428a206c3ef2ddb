"""Tables: building their ops, and runs that write and read rows."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.graph.graph import node_effects
from asyncflow.graph.op import Access
from asyncflow.graph.text.text import print_graph
from asyncflow.state.containers import StateStore, reset_container

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Runner = Callable[..., Awaitable[Any]]

ROW = {"x": af.spec("float32", (2,)), "n": af.spec("int64", ())}


def row(number: Any) -> dict[str, Any]:
    return {"n": number, "x": af.astype(af.stack([number, -number]), "float32")}


# -- building --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: af.Table(0, af.spec("int64", ())), af.GraphError, "room for 1 row or more; got rows=0"),
        (
            lambda: af.Table(1.5, af.spec("int64", ())),  # type: ignore[arg-type]
            af.GraphError,
            "rows must be an int",
        ),
        (lambda: af.Table(2, (af.spec("int64", ()), 3)), af.GraphError, r"described by af.spec.*got 3"),
        (lambda: af.Table(2, {}), af.GraphError, "has something in it"),
        (lambda: af.Table(2, af.spec("string", ())), af.DTypeError, "numbers or booleans; got string"),
        (lambda: af.Table(2, af.spec("int64", (None,))), af.ShapeError, r"known in full; got \[\?\]"),
        (lambda: af.Table(2, af.spec("int64")), af.ShapeError, "known in full"),
        (lambda: af.Table(2, ROW, name="a:0"), af.GraphError, "no ':' in it"),
        (lambda: af.Table(2, ROW, container="c"), af.GraphError, "needs a name"),
        (
            lambda: af.Table(2, ROW).append({"x": [1.0, 2.0]}),
            af.GraphError,
            "not a row of table .*expected a dict with",
        ),
        (lambda: af.Table(2, ROW).append({"x": [1.0, 2.0], "n": 1.5}), af.DTypeError, r"row\['n'\] of table .* 1.5"),
        (
            lambda: af.Table(2, ROW).append({"x": np.zeros(2), "n": 1}),
            af.DTypeError,
            r"row\['x'\] .* convert with af.asty",
        ),
        (
            lambda: af.Table(2, ROW).append({"x": [1.0, 2.0], "n": [1]}),
            af.ShapeError,
            r"takes a row .*, or several, with",
        ),
        (
            lambda: af.Table(2, ROW).append({"x": [1.0], "n": 1}),
            af.ShapeError,
            r"row\['x'\] of table 'table_\d+' takes \[2\] here; got \[1\]",
        ),
        (lambda: af.Table(2, ROW).write([0, 1], {"x": [1.0, 2.0], "n": [1, 2]}), af.ShapeError, r"takes \[2,2\] here"),
        (lambda: af.Table(2, ROW).write(0.5, {"x": [1.0, 2.0], "n": 1}), af.DTypeError, "found by integers"),
        (lambda: af.Table(2, ROW).gather([True]), af.DTypeError, "found by integers"),
    ],
)
def test_refuses_what_cannot_be(graph: af.Graph, build: Callable[[], object], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        build()


def test_effects_name_the_shared_table(graph: af.Graph) -> None:
    table = af.Table(2, af.spec("int64", ()), name="t", container="c")
    other = af.Table(2, af.spec("int64", ()))
    key = ("container", "c", "t")
    assert node_effects(table.append(1).node) == ((key, Access.WRITE),)
    assert node_effects(table.size().node) == ((key, Access.READ),)
    assert node_effects(other.gather(0).node) == ((("table", other.serial), Access.READ),)


def test_prints_and_parses(graph: af.Graph) -> None:
    table = af.Table(2, ROW, name="t")
    table.sample((3, 2), seed=7)
    text = print_graph(graph)
    assert "table_sample() {seed=7, shape=(3, 2), table=@t} : (float32[3,2,2], int64[3,2])" in text


# -- runs ------------------------------------------------------------------------------------------------------------


async def test_reads_and_writes_happen_as_written(graph: af.Graph, run: Runner) -> None:
    table = af.Table(4, ROW, name="t")
    before = table.size()
    first = table.append(row(af.constant(1)))
    middle = table.gather([0, 1])
    more = table.append({"n": [2, 3], "x": np.ones((2, 2), np.float32)})
    there = table.write(3, row(af.constant(9)))
    after = table.gather(np.arange(4))
    found = await run((before, first, middle["n"], more, there, after["n"], after["x"], table.size()))
    assert [np.asarray(x).tolist() for x in found] == [
        *(0, 0, [1, 0], [1, 2], 3, [1, 2, 3, 9]),
        [[1, -1], [1, 1], [1, 1], [9, -9]],
        4,
    ]
    assert (await run(table.append(row(af.constant(5))))).tolist() == 3, "behind the last that was appended"


async def test_conformance_35_rows_of_a_loop_are_in_order(graph: af.Graph, run: Runner) -> None:
    """Effects of a body run iteration by iteration; each reads what the one before has written."""
    table = af.Table(5, af.spec("int64", ()))

    def body(i: af.Tensor) -> af.Tensor:
        last = table.gather((i + 4) % 5)
        table.append(last + i)
        return i + 1

    loop = af.while_loop(lambda i: i < 12, body, (0,))
    await run(loop)
    sums = np.cumsum(np.arange(12))
    expected = [0] * 5
    for i, value in enumerate(sums):
        expected[i % 5] = int(value)
    assert (await run(table.gather(np.arange(5)))).tolist() == expected


async def test_conformance_22_and_72_what_does_not_run_writes_nothing(graph: af.Graph, run: Runner) -> None:
    """A write on the untaken side, one behind an error, and a sample of no rows on either side of a cond."""
    table = af.Table(3, af.spec("int64", ()), name="t")
    flag, i = af.placeholder("bool", ()), af.placeholder("int64", ())
    kept = af.cond(flag, lambda: table.append(1), lambda: af.constant(-1))
    drawn = af.cond(table.size() > 0, lambda: table.sample(()), lambda: af.constant(-2))
    bad = table.append(af.constant([1, 2, 3])[i])
    assert await run((kept, drawn), {flag: False}) == (-1, -2)
    with pytest.raises(af.KernelError):
        await run(bad, {i: 7})
    with pytest.raises(af.KernelError, match="'t' is sampled before it has a row") as caught:
        await run(table.sample(table.size() + 2))
    assert "KernelContext" not in str(caught.value)
    assert await run(table.size()) == 0
    assert await run((kept, drawn), {flag: True}) == (0, 1)


async def test_conformance_70_appends_of_many_runs_lose_nothing(graph: af.Graph, run: Runner) -> None:
    table = af.Table(64, ROW)
    n = af.placeholder("int64", ())
    add = table.append(row(n))
    await asyncio.gather(*(run(add, {n: k}) for k in range(50)))
    rows = await run(table.gather(np.arange(50)))
    assert sorted(rows["n"].tolist()) == list(range(50))
    assert np.array_equal(rows["x"], np.stack([rows["n"], -rows["n"]], axis=1))


async def test_conformance_71_an_unfetched_write_is_pruned(graph: af.Graph, run: Runner) -> None:
    table = af.Table(3, af.spec("int64", ()))
    size = table.size()
    table.append(1)
    assert await run((size, table.size())) == (0, 0)


async def test_conformance_79_sessions_share_a_container_until_it_is_reset() -> None:
    def shared(rows: int = 3, dtype: str = "int64") -> af.Table:
        return af.Table(rows, af.spec(dtype, ()), name="t", container="of tables")

    try:
        with af.Graph():
            add, size = shared().append(1), shared().size()
        async with af.Session() as one, af.Session() as two:
            await one.run(add)
            assert await two.run(size) == 1
        variable = af.Variable(1, name="t", container="of tables")
        for other, seen in [
            (shared(4), "of 4 rows"),
            (shared(dtype="int8"), "row int8"),
            (variable, "as a variable int64"),
        ]:
            with pytest.raises(af.GraphError, match=seen):
                StateStore().lookup(other)
        reset_container("of tables")
        assert StateStore().lookup(shared(4)).size == 0
    finally:
        reset_container("of tables")


async def test_a_sample_is_a_function_of_seed_run_and_iteration(open_session: Any) -> None:
    """Equal numbers on every cell, of the generator that `af.random` has for the firing."""
    with af.Graph(seed=5) as graph:
        table = af.Table(100, af.spec("int64", ()))
        fill = table.append(np.arange(40))
        drawn = table.sample((2, 3), seed=11)
        loop = af.map_fn(lambda i: table.sample(2, seed=12), af.constant([0, 1, 2]), lift=False)
    async with open_session(graph) as session:
        await session.run(fill)
        first, rows = await session.run((drawn, loop))
        again = await session.run(drawn)
    assert first.tolist() == of_run(2, ()).integers(0, 40, (2, 3)).tolist()
    assert rows.tolist() == [of_run(2, (i,), seed=12).integers(0, 40, 2).tolist() for i in range(3)]
    assert again.tolist() == of_run(3, ()).integers(0, 40, (2, 3)).tolist()


def of_run(run: int, tag: tuple[int, ...], seed: int = 11) -> np.random.Generator:
    counter = np.array([0, run, len(tag), *(tag or (0,))], np.uint64)
    return np.random.Generator(np.random.Philox(counter=counter, key=np.array([5, seed], np.uint64)))


def test_samples_without_a_seed_differ(graph: af.Graph) -> None:
    table = af.Table(2, af.spec("int64", ()), name="t")
    assert len({table.sample(2).node.attrs["seed"] for _ in range(2)}) == 2


async def test_gathers_go_over_rows_and_writes_do_not(graph: af.Graph, run: Runner) -> None:
    table = af.Table(6, ROW, name="t")
    fill = table.append({"n": np.arange(6), "x": np.zeros((6, 2), np.float32)})
    rows = af.vmap(lambda i: table.gather(i * 2)["n"])(af.constant([[0, 1], [2, 1]]))
    assert (await run((fill, rows)))[1].tolist() == [[0, 2], [4, 2]]
    with pytest.raises(af.GraphError, match=r"table_append\) changes Table\('t'\), once for each row"):
        af.vmap(lambda i: table.append(row(i)))(af.constant([1, 2]))
    with pytest.raises(af.GraphError, match="rows would draw from one table"):
        af.vmap(lambda i: table.sample(2)["n"] + i)(af.constant([1, 2]))


async def test_no_gradient_flows_through_rows(graph: af.Graph, run: Runner) -> None:
    """Rows are data, like a feed: values computed from them have gradients, which end at the rows."""
    table, w = af.Table(3, af.spec("float64", ()), name="t"), af.Variable(2.0)
    x = af.placeholder("float64", ())
    written = table.write(0, x * w)
    y = table.gather(0) * w
    (grad,) = af.gradients(y, [w])
    assert await run((written, y, grad), {x: 3.0}) == (0, 12.0, 6.0)
    assert af.gradients(table.gather(0), [x]) == [None]


async def test_gradients_do_not_sample_again(graph: af.Graph, open_session: Any) -> None:
    """A loop's gradient is of the rows that it has drawn."""
    table, w = af.Table(50, af.spec("float64", ()), name="t"), af.Variable(1.5)
    fill = table.append(np.arange(50.0))

    def body(i: af.Tensor, total: af.Tensor, seen: af.Tensor) -> tuple[af.Tensor, ...]:
        rows = table.sample(4, seed=3)
        return i + 1, total + af.sum(af.sin(rows * w)), seen + af.sum(rows * af.cos(rows * 1.5))

    _, total, by_hand = af.while_loop(lambda i, *_: i < 9, body, (0, 0.0, 0.0))
    (grad,) = af.gradients(total, [w])
    async with open_session(graph) as session:
        await session.run(fill)
        slope, expected = await session.run((grad, by_hand))
    assert np.isclose(slope, expected)
    async with open_session(graph, saved_values="recompute") as session:
        with pytest.raises(af.GraphError, match=r"would run .*table_sample\) again, and it has an effect"):
            await session.run(grad)


@pytest.mark.parametrize(
    ("effects", "expected"),
    [("ordered", {(0, 1, 2)}), ("unordered", {(*at, size) for at in ((0, 1), (1, 0)) for size in range(3)})],
)
def test_every_outcome_is_found_by_exploring(effects: Any, expected: set[tuple[int, ...]]) -> None:
    with af.Graph(effects=effects) as graph:
        table = af.Table(2, af.spec("int64", ()), name="t")
        fetches = table.append(7), table.append(8), table.size()
    found = af.explore(graph, fetches)
    assert not found.stopped
    assert {tuple(map(int, each.fetches)) for each in found.outcomes} == expected
    for each in found.outcomes:
        rows = each.variables[table]["row"].tolist()
        assert [rows[int(at)] for at in each.fetches[:2]] == [7, 8]


async def test_a_fetched_row_is_the_users(graph: af.Graph, run: Runner) -> None:
    table = af.Table(2, af.spec("int64", (2,)))
    written, read = table.write(0, [1, 2]), table.gather(0)
    await run(written)
    fetched = await run(read)
    fetched[:] = 9
    assert (await run(read)).tolist() == [1, 2]
