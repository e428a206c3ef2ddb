from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import asyncflow as af
from asyncflow.control.stores.row_block import RowBlock, RowKind, RowState
from tests.control.test_tensor_array import assert_same, cause, sample

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Run = Callable[..., Awaitable[Any]]

FLOAT = np.dtype("float32")


def make(row: tuple[int, ...] = (), capacity: int = 0) -> RowState:
    return RowState(RowBlock(np, RowKind(FLOAT, row), capacity), 0)


def numbers(*values: float) -> np.ndarray:
    return np.array(values, FLOAT)


# -- states ------------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=30),
    st.integers(0, 8),
)
def test_states_agree_with_plain_lists(steps: list[tuple[int, int]], capacity: int) -> None:
    """Each step appends some rows to any state there is; views taken on the way stay as they were."""
    states = [make(capacity=capacity)]
    lists: list[list[float]] = [[]]
    views = []
    for number, (at, count) in enumerate(steps):
        place = at % len(states)
        rows = [float(100 * number + k) for k in range(count)]
        states.append(states[place].append(numbers(*rows)))
        lists.append(lists[place] + rows)
        views.append((states[-1].slice(0, states[-1].size), lists[-1]))
    for state, rows in zip(states, lists, strict=True):
        assert state.size == len(rows)
        assert state.take(np.arange(len(rows))[::-1]).tolist() == rows[::-1]
    for view, rows in views:
        assert view.tolist() == rows


def test_linear_appends_copy_no_row_but_to_grow() -> None:
    state, blocks = make((4,)), set()
    held = []
    for count in range(1000):
        state = state.append(np.full((1, 4), count, FLOAT))
        blocks.add(id(state.block))
        held.append(state.block)
    assert len(blocks) <= 11
    assert sum(len({id(block): block for block in held}[key].array) for key in blocks) <= 3 * 1024
    with_room = make((4,), 1000)
    block = with_room.block
    for _ in range(1000):
        with_room = with_room.append(np.zeros((1, 4), FLOAT))
    assert with_room.block is block


def test_slices_are_read_only_views() -> None:
    state = make((), 3).append(numbers(1, 2, 3))
    view = state.slice(1, 3)
    assert np.shares_memory(view, state.block.array)
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 7


@pytest.mark.parametrize("indices", [[2], [1, 2], [0, 2], [0, 1, 2, 3, 4], [1, 3, 5], [[1, 2], [3, 4]], [[0, 2]]])
def test_rows_at_even_distances_are_a_view(indices: Any) -> None:
    state = make((2,), 6).append(np.arange(12, dtype=FLOAT).reshape(6, 2))
    taken = state.take(np.array(indices))
    assert np.shares_memory(taken, state.block.array)
    assert taken.tolist() == state.slice(0, 6)[indices].tolist()
    with pytest.raises(ValueError, match="read-only"):
        taken[0] = 7


@pytest.mark.parametrize(
    "indices", [[], [2, 1], [1, 1], [0, 1, 3], [0, 2, 2], [1, 2, 1, 4], [-2, -1], [-1, 0], [[1, 2], [1, 3]]]
)
def test_other_rows_are_a_copy(indices: Any) -> None:
    state = make((2,), 6).append(np.arange(12, dtype=FLOAT).reshape(6, 2))
    at = np.array(indices, np.int64)
    taken = state.take(at)
    assert not np.shares_memory(taken, state.block.array)
    assert taken.tolist() == state.slice(0, 6)[at].tolist()


def test_even_rows_of_which_some_are_not_there_are_refused() -> None:
    with pytest.raises(IndexError, match="row 3 was asked for of a RowStore that has 3"):
        make((2,), 8).append(np.zeros((3, 2), FLOAT)).take(np.array([1, 2, 3]))


def test_appended_rows_are_copied() -> None:
    rows = numbers(1, 2)
    state = make().append(rows)
    rows[:] = -1
    assert state.slice(0, 2).tolist() == [1, 2]


# -- in graphs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "int64", "float16", "float32", "complex128", "bfloat16"])
@pytest.mark.parametrize("row", [(), (2,), (0, 1)])
async def test_append_take_slice_and_stack(graph: af.Graph, run: Run, dtype: str, row: tuple[int, ...]) -> None:
    values = sample(dtype, (5, *row))
    fed = af.placeholder(dtype, (None, *row))
    store = af.RowStore(dtype, row)
    empty = store.stack()
    store = store.append(values[:2]).append(fed).append(fed[:0])
    indices = af.placeholder("int32", (None, 2))
    assert (store.dtype, store.row_shape, store.kind) == (values.dtype, row, RowKind(values.dtype, row))
    assert store.take(indices).shape == (None, 2, *row)
    assert store.slice(1, 3).shape == (2, *row)
    assert store.slice(1, store.size()).shape == (None, *row)
    places = np.array([[4, 0], [-1, 2], [4, 4]], np.int32)
    fetches = [
        empty,
        store.stack(),
        store.take(indices),
        store.take(3),
        store.slice(1, 4),
        store.take([]),
    ]
    found = await run(fetches, {fed: values[2:], indices: places})
    expected = [values[:0], values, values[places], values[3], values[1:4], values[:0]]
    for got, want in zip(found, expected, strict=True):
        assert_same(got, np.asarray(want))


async def test_counts_may_be_tensors(graph: af.Graph, run: Run) -> None:
    n = af.placeholder("int32", ())
    store = af.RowStore("int64", (), n + 2).append(af.arange(10))
    assert (await run(store.slice(n, n + 3), {n: 4})).tolist() == [4, 5, 6]
    assert (await run(store.take(af.constant([1], "uint64")), {n: 4})).tolist() == [1]


async def test_lists_take_the_dtype_and_arrays_must_have_it(graph: af.Graph, run: Run) -> None:
    store = af.RowStore("float32", (2,)).append([[1, 2]])
    assert_same(await run(store.stack()), np.array([[1, 2]], np.float32))
    with pytest.raises(af.DTypeError, match=r"rows of this RowStore are float32; got int64\[1,2\]: convert with"):
        store.append(np.array([[1, 2]]))


@pytest.mark.parametrize("seed", range(5))
async def test_each_handle_sees_its_own_lineage(graph: af.Graph, seed: int) -> None:
    """A store that several append to is copied, never overwritten, in whatever order they run."""
    shared = af.RowStore("int64", (), 50).append([0, 1])
    view = shared.stack()
    stores = [shared.append([10 * k, 10 * k + 1]).append([k]) for k in range(1, 5)]
    fetches = [view, *(store.stack() for store in stores), shared.stack()]
    async with af.Session(graph, regions=False, seed=seed, debug=True) as session:
        found = await session.run(fetches)
    grown = [[0, 1, 10 * k, 10 * k + 1, k] for k in range(1, 5)]
    assert [value.tolist() for value in found] == [[0, 1], *grown, [0, 1]]


async def test_what_a_run_gave_is_not_written_by_a_later_one(graph: af.Graph, run: Run) -> None:
    x = af.placeholder("float64", (None,))
    view = af.RowStore("float64", (), 4).append(x).stack()
    first = await run(view, {x: [1.0, 2.0]})
    second = await run(view, {x: [3.0, 4.0]})
    assert (first.tolist(), second.tolist()) == ([1.0, 2.0], [3.0, 4.0])


def levels(x: af.Tensor, depth: int) -> af.RowStore:
    """Each level has the sums of neighbours of the one before: a triangle."""

    def level(i: af.Tensor, start: af.Tensor, store: af.RowStore) -> Any:
        stop = store.size()
        below = store.take(af.arange(start, stop - 1)) + store.slice(start + 1, stop)
        return i + 1, stop, store.append(below)

    start = af.RowStore(x.dtype, tuple(x.shape or ())[1:]).append(x)
    return af.while_loop(lambda i, *_: i < depth, level, (0, af.constant(0), start))[2]


def triangle(x: np.ndarray) -> np.ndarray:
    found = [x]
    while len(found[-1]) > 1:
        found.append(found[-1][:-1] + found[-1][1:])
    return np.concatenate(found)


async def test_loop_variable(graph: af.Graph, run: Run) -> None:
    x = af.placeholder("float64", (None, 3))
    values = np.arange(18.0).reshape(6, 3) ** 2
    assert_same(await run(levels(x, 5).stack(), {x: values}), triangle(values))


async def test_made_and_appended_in_branches(graph: af.Graph, run: Run) -> None:
    p = af.placeholder("bool", ())
    store = af.cond(p, lambda: af.RowStore("int64").append([1]), lambda: af.RowStore("int64", (), 9))
    store = af.cond(p, lambda: store, lambda: store.append([2, 3]))
    assert (await run(store.stack(), {p: True})).tolist() == [1]
    assert (await run(store.stack(), {p: False})).tolist() == [2, 3]


async def test_part_of_any_nest(graph: af.Graph, run: Run) -> None:
    def body(state: dict[str, Any]) -> dict[str, Any]:
        stores = state["stores"][0].append(af.reshape(state["i"], (1,))), state["stores"][1]
        return {"i": state["i"] + 1, "stores": stores}

    first = {"i": af.constant(0), "stores": (af.RowStore("int64"), af.RowStore("float32", (2,)))}
    last = af.while_loop(lambda state: state["i"] < 3, body, first)
    assert (await run(last["stores"][0].stack())).tolist() == [0, 1, 2]


async def test_in_functions() -> None:
    @af.function
    def doubled(x: Any) -> Any:
        store = af.RowStore("float64").append(x)
        return store.append(store.stack()).stack()

    assert (await doubled(np.array([1.0, 2.0]))).tolist() == [1.0, 2.0, 1.0, 2.0]


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_stores_of_another_kind_do_not_match(graph: af.Graph) -> None:
    other = af.RowStore("int64", (2,))
    with pytest.raises(af.GraphError, match=r"RowStore of float64\[3\], got RowStore of int64\[2\]"):
        af.while_loop(lambda i, s: i < 2, lambda i, s: (i + 1, other), (0, af.RowStore("float64", (3,))))


def test_arguments_are_checked_while_building(graph: af.Graph) -> None:
    with pytest.raises(af.ShapeError, match=r"the shape of a row is known in full; got \[2,\?\]"):
        af.RowStore("float64", (2, None))
    with pytest.raises(af.DTypeError, match="numbers or booleans; got string"):
        af.RowStore("string")
    with pytest.raises(af.ShapeError, match="capacity of a RowStore is not negative; got -1"):
        af.RowStore("float64", (), -1)
    with pytest.raises(af.DTypeError, match=r"capacity of a RowStore is an integer scalar; got float64\[\]"):
        af.RowStore("float64", (), 1.5)
    store = af.RowStore("float64", (2,))
    with pytest.raises(af.ShapeError, match=r"append takes rows of shape \[\?,2\]; got \[2\]"):
        store.append([1.0, 2.0])
    with pytest.raises(af.DTypeError, match="take needs integer indices of rows; got float64"):
        store.take([0.5])
    with pytest.raises(af.ShapeError, match="slice needs 0 <= start <= stop; got 2 and 1"):
        store.slice(2, 1)
    with pytest.raises(af.DTypeError, match=r"start of a RowStore is an integer scalar; got int64\[1\]"):
        store.slice([0], 1)
    with pytest.raises(af.GraphError, match=r"has no indexing; use .take"):
        store[0]
    with pytest.raises(af.GraphError, match="cannot be iterated over"):
        list(store)
    assert repr(store) == f"<RowStore {store.handle.name} float64[2]>"


async def test_rows_are_checked_in_the_run(graph: af.Graph, run: Run) -> None:
    x, n = af.placeholder("float64", None), af.placeholder("int64", ())
    store = af.RowStore("float64", (2,)).append(x)
    error = await cause(run, store.stack(), {x: np.zeros((3, 4))})
    assert isinstance(error, ValueError)
    assert str(error) == "rows for a RowStore of float64[2] were expected; got float64[3,4]"
    error = await cause(run, store.slice(1, n), {x: np.zeros((3, 2)), n: 4})
    assert isinstance(error, IndexError)
    assert str(error) == "rows 1 to 4 were asked for of a RowStore that has 3"
    error = await cause(run, af.RowStore("int8", (), n).stack(), {n: -2})
    assert str(error) == "the capacity of a RowStore is not negative; got -2"
    error = await cause(run, af.RowStore("float64", (2,), n).stack(), {n: 1 << 60})
    assert isinstance(error, MemoryError)
    assert "room for 1152921504606846976 rows of a RowStore of float64[2] takes 18,446," in str(error)


async def test_rows_out_of_range_are_refused_on_the_cpu(graph: af.Graph) -> None:
    """Spare room, and rows of another state, are out of range for a state."""
    store = af.RowStore("float64", (), 10).append([1.0])
    more = store.append([2.0])
    async with af.Session(graph, devices=["cpu:0"]) as session:
        error = await cause(session.run, [store.take([1]), more.take([1])])
        assert isinstance(error, IndexError)
        assert str(error) == "row 1 was asked for of a RowStore that has 1"
        error = await cause(session.run, af.RowStore("int8").take(0))
        assert str(error) == "row 0 was asked for of a RowStore that has 0"
        error = await cause(session.run, more.take([[0, -3]]))
        assert str(error) == "row -3 was asked for of a RowStore that has 2"


def test_an_append_whose_store_is_dropped_is_warned_of(graph: af.Graph) -> None:
    store = af.RowStore("int64")
    store.append([1])
    with pytest.warns(UserWarning, match=r"append at .*test_row_store.py:\d+ gave was dropped.*store = store.append"):
        store.stack()


def test_graphs_with_stores_have_a_text_form(graph: af.Graph) -> None:
    store = af.RowStore("bfloat16", (2, 3), 7).append(np.ones((1, 2, 3)).tolist())
    store.take([[0]])
    store.slice(0, store.size())
    af.verify(graph)
    text = af.print_graph(graph)
    assert af.print_graph(af.parse_graph(text)) == text


# -- memory ------------------------------------------------------------------------------------------------------------


async def test_the_memory_limit_ends_the_run_and_not_the_session(graph: af.Graph) -> None:
    n = af.placeholder("int64", ())
    _, store = af.while_loop(
        lambda i, _: i < n, lambda i, s: (i + 1, s.append(af.zeros((1, 64)))), (0, af.RowStore("float64", (64,)))
    )
    async with af.Session(graph, devices=["cpu:0"], memory_limit=1 << 20) as session:
        with pytest.raises(af.OutOfMemoryError, match=r"largest now: \S*row_store_append"):
            await session.run(store.size(), {n: 10_000})
        assert await session.run(store.size(), {n: 100}) == 100
