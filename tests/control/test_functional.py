from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest

import asyncflow as af
from asyncflow.control.functional import foldl, foldr, scan
from asyncflow.lift.map_fn import map_fn

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Run = Callable[..., Awaitable[Any]]

SIX = np.array([1, 2, 3, 4, 5, 6])


def add_and_double(state: Any, x: Any) -> Any:
    return (state + x) * 2


@pytest.mark.parametrize(
    ("fold", "initializer", "want"), [(foldl, None, 208), (foldl, 10, 880), (foldr, None, 450), (foldr, 10, 1282)]
)
@pytest.mark.parametrize("is_dynamic", [False, True])
async def test_folds(
    graph: af.Graph, run: Run, fold: Callable[..., Any], initializer: Any, want: int, is_dynamic: bool
) -> None:
    elems = af.placeholder("int64", (None,) if is_dynamic else (6,))
    result = fold(add_and_double, elems, initializer)
    assert result.shape == ()
    assert await run(result, {elems: SIX}) == want


@pytest.mark.parametrize(
    ("options", "want"),
    [
        ({}, [1, 2, 6, 24, 120, 720]),
        ({"initializer": 2}, [2, 4, 12, 48, 240, 1440]),
        ({"reverse": True}, [720, 720, 360, 120, 30, 6]),
        ({"reverse": True, "initializer": 2}, [1440, 1440, 720, 240, 60, 12]),
    ],
)
@pytest.mark.parametrize("parallel_iterations", [1, 32])
async def test_scan(
    graph: af.Graph, run: Run, options: dict[str, Any], want: list[int], parallel_iterations: int
) -> None:
    result = scan(lambda a, x: a * x, SIX, parallel_iterations=parallel_iterations, **options)
    assert result.shape == (6,)
    assert (await run(result)).tolist() == want


def test_functions_are_called_once(graph: af.Graph) -> None:
    calls: list[str] = []

    def noted(name: str, result: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            calls.append(name)
            return result(*args)

        return call

    map_fn(noted("map", lambda x: x), SIX)
    scan(noted("scan", lambda a, x: a), SIX)
    foldl(noted("foldl", lambda a, x: a), SIX)
    foldr(noted("foldr", lambda a, x: a), SIX, 1)
    assert calls == ["map", "scan", "foldl", "foldr"]


class Pair(NamedTuple):
    left: Any
    right: Any


async def test_nests_go_in_and_out(graph: af.Graph, run: Run) -> None:
    a, b = np.arange(6.0).reshape(3, 2), np.array([True, False, True])
    result = map_fn(
        lambda row: Pair({"sum": af.sum(row["a"]), "is_even": af.logical_not(row["b"])}, (row["a"] * 2, 7)),
        {"a": a, "b": b},
    )
    assert result.right[0].shape == (3, 2)
    left, (twice, seven) = await run(result)
    np.testing.assert_array_equal(left["sum"], a.sum(1))
    np.testing.assert_array_equal(left["is_even"], ~b)
    np.testing.assert_array_equal(twice, a * 2)
    assert seven.tolist() == [7, 7, 7]


async def test_scan_and_folds_of_nests(graph: af.Graph, run: Run) -> None:
    elems = (SIX, SIX * 10)

    def step(state: dict[str, Any], row: tuple[Any, Any]) -> dict[str, Any]:
        return {"total": state["total"] + row[0], "last": row[1]}

    start = {"total": 100, "last": 0}
    scanned, left, right = await run([scan(step, elems, start), foldl(step, elems, start), foldr(step, elems, start)])
    assert scanned["total"].tolist() == (100 + SIX.cumsum()).tolist()
    assert scanned["last"].tolist() == (SIX * 10).tolist()
    assert left == {"total": 121, "last": 60}
    assert right == {"total": 121, "last": 10}


async def test_dtypes(graph: af.Graph, run: Run) -> None:
    words = np.array(["a", "bc"], np.dtypes.StringDType())
    same = map_fn(lambda word: (word, af.equal(word, "a")), words)
    got = await run([same, map_fn(lambda x: af.astype(x, "float32"), SIX)])
    assert got[0][0].tolist() == ["a", "bc"]
    assert got[0][1].tolist() == [True, False]
    assert got[1].dtype == np.float32


async def test_captures_and_outer_tensors(graph: af.Graph, run: Run) -> None:
    scale = af.placeholder("int64", ())
    outer = af.constant([5, 6])
    scaled, constant = map_fn(lambda x: (x * scale, outer), SIX)
    got = await run([scaled, constant], {scale: 3})
    assert got[0].tolist() == (SIX * 3).tolist()
    assert got[1].tolist() == [[5, 6]] * 6


@pytest.mark.parametrize("parallel_iterations", [1, 2, 32])
async def test_nested_maps(graph: af.Graph, run: Run, parallel_iterations: int) -> None:
    table = np.arange(12).reshape(3, 4)
    result = map_fn(
        lambda row: map_fn(lambda x: x * x + af.sum(row), row, parallel_iterations=parallel_iterations),
        table,
        parallel_iterations=parallel_iterations,
    )
    assert result.shape == (3, 4)
    np.testing.assert_array_equal(await run(result), table**2 + table.sum(1, keepdims=True))


async def test_a_map_in_a_loop_in_a_branch(graph: af.Graph, run: Run) -> None:
    pred = af.placeholder("bool", ())
    start = af.constant([1, 2, 3])

    def loop() -> Any:
        return af.while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, map_fn(lambda v: v + i, x)), (0, start))[1]

    result = af.cond(pred, loop, lambda: start)
    assert (await run(result, {pred: True})).tolist() == [4, 5, 6]
    assert (await run(result, {pred: False})).tolist() == [1, 2, 3]


async def test_one_of_several_results(graph: af.Graph, run: Run) -> None:
    first, second = map_fn(lambda x: (x, 12 // (x - 3)), SIX)
    assert (await run(first)).tolist() == SIX.tolist()
    assert second.shape == (6,)


@pytest.mark.parametrize("seed", range(5))
async def test_order_does_not_matter(graph: af.Graph, seed: int) -> None:
    result = map_fn(lambda x: foldl(lambda a, y: a * y + x, SIX), SIX), scan(add_and_double, SIX, 1, reverse=True)
    async with af.Session(seed=seed, regions=False) as session:
        mapped, scanned = await session.run(result)
    want = []
    for x in SIX.tolist():
        total = 1
        for y in SIX.tolist()[1:]:
            total = total * y + x
        want.append(total)
    assert mapped.tolist() == want
    state = 1
    states: list[int] = []
    for x in reversed(SIX.tolist()):
        state = (state + x) * 2
        states.insert(0, state)
    assert scanned.tolist() == states


async def test_no_rows(graph: af.Graph, run: Run) -> None:
    elems = af.placeholder("float64", (None, 4))
    none = np.empty((0, 4))
    shaped = map_fn(lambda x: af.astype(x[:2], "float32"), elems)
    got = await run(
        [shaped, scan(lambda a, x: a, elems, af.ones((2, 4))), foldl(lambda a, x: a, elems, 7)], {elems: none}
    )
    assert got[0].shape == (0, 2)
    assert got[0].dtype == np.float32
    assert got[1].shape == (0, 2, 4)
    assert got[2] == 7
    static = scan(lambda a, x: a, np.arange(0), af.ones((2, 4)))
    assert static.shape == (0, 2, 4)
    assert (await run(static)).shape == (0, 2, 4)


async def test_no_rows_and_no_initializer(graph: af.Graph, run: Run) -> None:
    for function in (scan, foldl, foldr):
        with pytest.raises(af.ShapeError, match=f"{function.__name__} of no rows needs an initializer"):
            function(add_and_double, np.arange(0))
        elems = af.placeholder("int64", (None,))
        with pytest.raises(af.KernelError, match=r"cannot read element (0|-1) of a TensorArray of size 0"):
            await run(function(add_and_double, elems), {elems: np.arange(0)})


async def test_unknown_rank(graph: af.Graph, run: Run) -> None:
    elems = af.placeholder("int64")
    result = map_fn(lambda x: x + 1, elems)
    assert result.shape is None
    assert (await run(result, {elems: np.ones((2, 3), int)})).tolist() == [[2, 2, 2], [2, 2, 2]]
    with pytest.raises(af.KernelError, match="map_fn goes over the first axis, but elems is a scalar"):
        await run(result, {elems: 1})


async def test_elems_that_do_not_fit(graph: af.Graph, run: Run) -> None:
    with pytest.raises(af.ShapeError, match=r"elems\[0\] has 6, elems\[1\] has 2"):
        map_fn(lambda row: row[0], (SIX, np.array([1, 2])))
    with pytest.raises(af.ShapeError, match=r"elems\['x'\] is a scalar"):
        foldl(lambda a, x: a, {"x": 1}, 0)
    with pytest.raises(af.GraphError, match="at least one tensor"):
        map_fn(lambda row: 1, ())
    elems = af.placeholder("int64", (None,))
    with pytest.raises(af.KernelError, match="has size 6; got 2 rows"):
        await run(map_fn(lambda row: row[0] + row[1], (SIX, elems)), {elems: [1, 2]})


def test_results_that_do_not_fit(graph: af.Graph) -> None:
    with pytest.raises(af.GraphError, match="must return a value to stack"):
        map_fn(lambda x: None, SIX)
    with pytest.raises(af.DTypeError, match=r"result\.handle of map_fn is a TensorArray"):
        map_fn(lambda x: af.TensorArray("int64", 1), SIX)
    with pytest.raises(af.GraphError, match="fn of scan must return a state like the one it is given"):
        scan(lambda a, x: a[0], SIX, (1, 2))
    with pytest.raises(af.DTypeError, match=r"state\[1\] of scan begins as int64 but fn returns float64"):
        scan(lambda a, x: (a[0], x / 2), SIX, (1, 2))
    with pytest.raises(af.ShapeError, match=r"state of foldl begins with shape \[\] but fn returns \[1\]"):
        foldl(lambda a, x: af.reshape(x, (1,)), SIX, 1)
    with pytest.raises(af.GraphError, match="no values"):
        foldr(lambda a, x: a, SIX, ())
    with pytest.raises(af.GraphError, match="parallel_iterations"):
        map_fn(lambda x: x, SIX, parallel_iterations=0)


async def test_results_that_differ_in_shape(graph: af.Graph, run: Run) -> None:
    with pytest.raises(af.KernelError, match=r"element 0 has shape \[1\], element 1 has shape \[2\]"):
        await run(map_fn(af.arange, SIX))


async def test_errors_name_the_row(graph: af.Graph, run: Run) -> None:
    def check(x: af.Tensor) -> Any:
        with af.control_dependencies([af.assert_that(x < 4, "too large")]):
            return x + 1

    with pytest.raises(af.KernelError, match="too large") as caught:
        await run(map_fn(check, SIX, parallel_iterations=1, name="rows"))
    assert caught.value.tag == "rows/3"


def test_the_graph_is_sound(graph: af.Graph) -> None:
    map_fn(lambda x: scan(lambda a, y: a + y * x, SIX, 0), SIX)
    af.verify(graph)
    text = af.print_graph(graph)
    assert af.print_graph(af.parse_graph(text)) == text
