from __future__ import annotations

import random
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import asyncflow as af
from asyncflow.control.stores.array_store import ArrayKind
from asyncflow.control.stores.array_value import ArrayValue

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Run = Callable[..., Awaitable[Any]]

DTYPES = ["bool", "int8", "uint16", "int32", "int64", "float16", "float32", "float64", "complex64", "complex128"]
ALL_DTYPES = [*DTYPES, "bfloat16", "string"]


def sample(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    count = np.arange(int(np.prod(shape))).reshape(shape)
    if dtype == "string":
        return count.astype(np.dtypes.StringDType())
    if dtype == "bfloat16":
        return count.astype(ml_dtypes.bfloat16)
    return (count % 2 if dtype == "bool" else count).astype(dtype)


def assert_same(got: Any, want: np.ndarray) -> None:
    assert np.asarray(got).dtype == want.dtype
    np.testing.assert_array_equal(np.asarray(got), want)


async def cause(run: Run, fetch: Any, feeds: Any = None) -> BaseException:
    """Return the cause of the run's failure."""
    with pytest.raises(af.KernelError) as caught:
        await run(fetch, feeds)
    assert caught.value.__cause__ is not None
    return caught.value.__cause__


# -- every operation on every dtype ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("row", [(), (2,), (0, 1)])
async def test_write_read_and_stack(graph: af.Graph, run: Run, dtype: str, row: tuple[int, ...]) -> None:
    values = sample(dtype, (3, *row))
    array = af.TensorArray(dtype, 3, clear_after_read=False)
    for index in (2, 0, 1):
        array = array.write(index, values[index, ...])
    stacked = array.stack()
    assert stacked.shape == (3, *row)
    got = await run([stacked, array.read(1), array.gather([2, 0]), array.size()])
    assert_same(got[0], values)
    assert_same(got[1], values[1, ...])
    assert_same(got[2], values[[2, 0]])
    assert_same(got[3], np.array(3))


@pytest.mark.parametrize("dtype", ALL_DTYPES)
async def test_unstack_scatter_split_and_concat(graph: af.Graph, run: Run, dtype: str) -> None:
    values = sample(dtype, (4, 2))
    unstacked = af.TensorArray(dtype, 4, clear_after_read=False).unstack(values)
    scattered = af.TensorArray(dtype, 4).scatter([3, 1, 0, 2], values)
    pieces = af.TensorArray(dtype, 3, clear_after_read=False).split(values, [3, 0, 1])
    got = await run(
        [unstacked.stack(), unstacked.concat(), scattered.stack(), pieces.concat(), pieces.read(0), pieces.read(1)]
    )
    for value, want in zip(
        got, [values, values.reshape(-1), values[[2, 1, 3, 0]], values, values[:3], values[3:3]], strict=True
    ):
        assert_same(value, want)


async def test_vectors_give_scalars(graph: af.Graph, run: Run) -> None:
    array = af.TensorArray("float32", 3, clear_after_read=False).unstack(np.array([1, 2, 3], np.float32))
    assert array.element_shape == ()
    assert_same(await run(array.read(1)), np.array(2, np.float32))
    assert_same(await run(array.gather([])), np.array([], np.float32))


async def test_size_and_indices_may_be_tensors(graph: af.Graph, run: Run) -> None:
    size, index = af.placeholder("int32", ()), af.placeholder("uint8", ())
    array = af.TensorArray("int64", size, element_shape=()).write(index, 7)
    stacked = array.stack()
    assert stacked.shape == (None,)
    assert_same(await run(stacked, {size: np.int32(3), index: np.uint8(1)}), np.array([0, 7, 0]))


def test_whole_arrays_are_not_copied() -> None:
    values = np.arange(6.0).reshape(3, 2)
    kind = ArrayKind(values.dtype, None, dynamic_size=False, clear_after_read=False)
    array = ArrayValue.create(np, kind, 3).unstack(values)
    assert array.stack() is values
    assert np.shares_memory(array.read(1), values)


async def test_numbers_take_the_dtype_and_arrays_must_have_it(graph: af.Graph, run: Run) -> None:
    array = af.TensorArray("float32", 2)
    assert_same(await run(array.write(0, 1).write(1, 2.5).stack()), np.array([1, 2.5], np.float32))
    for value in (np.float64(1), af.constant(1.0), "text"):
        with pytest.raises(af.DTypeError):
            array.write(0, value)


async def test_identity_takes_control_edges(graph: af.Graph, run: Run) -> None:
    array = af.TensorArray("int64", 1).write(0, 3)
    with af.control_dependencies([af.assert_that(af.constant(False), "not yet")]):
        later = array.identity()
    assert isinstance(await cause(run, later.stack()), AssertionError)


# -- states ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [None, *range(8)])
async def test_each_handle_sees_its_own_lineage(graph: af.Graph, seed: int | None) -> None:
    start = af.TensorArray("int64", 3, element_shape=(), clear_after_read=False).write(0, 1)
    left = start.write(1, 2)
    right = start.write(1, 20).write(2, 30)
    after = left.write(2, 3)
    async with af.Session(seed=seed, regions=seed is None) as session:
        got = await session.run([array.stack() for array in (start, left, right, after)])
    assert [value.tolist() for value in got] == [[1, 0, 0], [1, 2, 0], [1, 20, 30], [1, 2, 3]]


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 4), st.integers(0, 99)), max_size=30))
def test_states_agree_with_plain_dicts(steps: list[tuple[int, int, int]]) -> None:
    kind = ArrayKind(np.dtype("int64"), (), dynamic_size=True, clear_after_read=False)
    states: list[tuple[ArrayValue, dict[int, int]]] = [(ArrayValue.create(np, kind, 2), {})]
    for pick, index, value in steps:
        state, model = states[pick % len(states)]
        if index in model:
            with pytest.raises(ValueError, match=f"element {index} of the TensorArray is written a second time"):
                state.write(index, np.int64(value))
        else:
            states.append((state.write(index, np.int64(value)), {**model, index: value}))
    for state, model in states:
        assert state.size == max([2, *(index + 1 for index in model)])
        assert state.stack().tolist() == [model.get(index, 0) for index in range(state.size)]


def test_linear_writes_do_not_copy() -> None:
    kind = ArrayKind(np.dtype("int64"), (), dynamic_size=False, clear_after_read=True)
    array = first = ArrayValue.create(np, kind, 100)
    for index in range(100):
        array = array.write(index, np.int64(index))
    assert array._store is first._store
    assert first.write(0, np.int64(5))._store is not first._store


def test_threads_may_share_an_array() -> None:
    kind = ArrayKind(np.dtype("int64"), (), dynamic_size=True, clear_after_read=True)
    array = ArrayValue.create(np, kind, 200)
    for index in range(200):
        array = array.write(index, np.int64(index))
    seen: list[int] = []
    failures: list[BaseException] = []
    grown: list[ArrayValue] = []

    def read() -> None:
        for index in range(200):
            try:
                seen.append(int(array.read(index)))
            except ValueError as error:
                failures.append(error)

    def write() -> None:
        state = array
        for index in range(200, 400):
            state = state.write(index, np.int64(index))
        grown.append(state)

    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work) for work in (read, read, write, write)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(switch)
    assert sorted(seen) == list(range(200))
    assert len(failures) == 200
    for state in grown:
        assert state.size == 400
        assert state.gather(range(200, 400)).tolist() == list(range(200, 400))


# -- what is refused ---------------------------------------------------------------------------------------------------


async def test_second_write(graph: af.Graph, run: Run) -> None:
    array = af.TensorArray("int64", 2, element_shape=()).write(1, 3)
    for again in (array.write(1, 4), array.scatter([0, 1], [1, 2]), array.unstack([1, 2])):
        error = await cause(run, again.stack())
        assert isinstance(error, ValueError)
        assert "element 1 of the TensorArray is written a second time" in str(error)
    whole = af.TensorArray("int64", 2).unstack([1, 2])
    assert "element 0 of the TensorArray is written a second" in str(await cause(run, whole.write(0, 1).stack()))
    twice = af.TensorArray("int64", 2).scatter([1, 1], [1, 2])
    assert "element 1" in str(await cause(run, twice.stack()))


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("seed", [None, 1])
async def test_second_read(whole: bool, seed: int | None) -> None:
    def make(clear: bool) -> af.TensorArray:
        array = af.TensorArray("int64", 2, clear_after_read=clear)
        return array.unstack([5, 6]) if whole else array.write(0, 5).write(1, 6)

    reads: list[Callable[[af.TensorArray], af.Tensor]] = [
        lambda array: array.read(1),
        lambda array: array.stack(),
        lambda array: array.gather([1]),
        lambda array: array.identity().read(1),
    ]
    async with af.Session(seed=seed, regions=seed is None) as session:
        for first in reads:
            for second in reads:
                with af.Graph():
                    array, kept = make(True), make(False)
                    once, often = [first(array), second(array)], [first(kept), second(kept)]
                error = await cause(session.run, once)
                assert isinstance(error, ValueError)
                assert "of the TensorArray is read a second time" in str(error)
                await session.run(often)


async def test_a_read_in_one_lineage_uses_the_element_up_in_all(graph: af.Graph) -> None:
    start = af.TensorArray("int64", 2).write(0, 1)
    left, right = start.write(1, 2), start.write(1, 3)
    for seed in range(6):
        async with af.Session(seed=seed, regions=False) as session:
            assert "element 0" in str(await cause(session.run, [left.read(0), right.read(0)]))
            assert await session.run([left.read(1), right.read(1)]) == [2, 3]


def test_reading_frees() -> None:
    kind = ArrayKind(np.dtype("float64"), None, dynamic_size=False, clear_after_read=True)
    value = np.ones(1000)
    before = sys.getrefcount(value)
    array = ArrayValue.create(np, kind, 1).write(0, value)
    assert sys.getrefcount(value) == before + 1
    array.read(0)
    assert sys.getrefcount(value) == before
    rows = ArrayValue.create(np, kind, 1000).unstack(np.ones(1000))
    assert rows.stack().shape == (1000,)
    assert rows._store.rows is not None
    assert rows._store.rows.array is None


async def test_unwritten_elements(graph: af.Graph, run: Run) -> None:
    declared = af.TensorArray("float32", 2, element_shape=(2,))
    assert_same(await run(declared.stack()), np.zeros((2, 2), np.float32))
    learned = af.TensorArray("int64", 3, clear_after_read=False).write(1, [4, 5])
    assert_same(await run(learned.read(0)), np.array([0, 0]))
    assert_same(await run(learned.stack()), np.array([[0, 0], [4, 5], [0, 0]]))
    assert_same(await run(af.TensorArray("string", 1, element_shape=()).read(0)), np.array("", np.dtypes.StringDType()))
    error = await cause(run, af.TensorArray("int64", 2, element_shape=(None, 3)).read(0))
    assert isinstance(error, ValueError)
    assert "element 0, which was never written, needs the shape of an element, but only [?,3] is known" in str(error)


@pytest.mark.parametrize("dynamic", [False, True])
async def test_bounds(graph: af.Graph, run: Run, dynamic: bool) -> None:
    array = af.TensorArray("int64", 2, dynamic_size=dynamic, element_shape=())
    index = af.placeholder("int64", ())
    fetches = {"read": array.read(index), "write": array.write(index, 1).stack()}
    for name in fetches:
        error = await cause(run, fetches[name], {index: np.int64(-1)})
        assert isinstance(error, IndexError)
        assert f"cannot {name} element -1" in str(error)
    assert "cannot read element 2 of a TensorArray of size 2" in str(await cause(run, fetches["read"], {index: 2}))
    if dynamic:
        assert_same(await run(fetches["write"], {index: 3}), np.array([0, 0, 0, 1]))
    else:
        assert "has size 2 and does not grow" in str(await cause(run, fetches["write"], {index: 2}))


async def test_scatter_grows_sparsely(graph: af.Graph, run: Run) -> None:
    array = af.TensorArray("float32", dynamic_size=True, clear_after_read=False)
    array = array.scatter([1, 8], np.array([[1, -1], [10, -10]], np.float32))
    size, first, last, gap = await run([array.size(), array.read(1), array.read(8), array.read(4)])
    assert size == 9
    assert_same(np.stack([first, last, gap]), np.array([[1, -1], [10, -10], [0, 0]], np.float32))


def test_shapes_are_checked_while_building(graph: af.Graph) -> None:
    array = af.TensorArray("float64", 2, element_shape=(None, 3))
    for wrong in (array.write, lambda i, x: array.scatter([i], x[None])):
        with pytest.raises(af.ShapeError, match=r"elements of the TensorArray have shape \[\?,3\]; got \[2,2\]"):
            wrong(0, np.ones((2, 2)))
    with pytest.raises(af.ShapeError, match="rank 1"):
        array.split(np.ones((4, 3)), [[2], [2]])
    with pytest.raises(af.ShapeError, match="scalar cannot be taken apart"):
        array.unstack(1.0)
    with pytest.raises(af.ShapeError, match="scalars cannot be joined"):
        af.TensorArray("int64", 2, element_shape=()).concat()
    with pytest.raises(af.ShapeError, match="not negative"):
        af.TensorArray("int64", -1)
    with pytest.raises(af.DTypeError, match="an index must be integers"):
        array.read(1.0)
    with pytest.raises(af.GraphError, match="arrays in an array"):
        array.write(0, array.handle)


async def test_shapes_are_checked_in_the_run(graph: af.Graph, run: Run) -> None:
    x = af.placeholder("float64")
    array = af.TensorArray("float64", 2, element_shape=(None, 3)).write(1, x)
    assert array.element_shape == (None, 3)
    assert "element 1 has shape [2,2]" in str(await cause(run, array.stack(), {x: np.ones((2, 2))}))
    free = af.TensorArray("float64", 2).write(0, [1.0]).write(1, x)
    error = await cause(run, free.stack(), {x: np.ones(2)})
    assert "element 0 has shape [1], element 1 has shape [2]" in str(error)
    assert_same(await run(free.concat(), {x: np.ones(2)}), np.ones(3))


async def test_concat(graph: af.Graph, run: Run) -> None:
    x = af.placeholder("float64")
    array = af.TensorArray("float64", 2).write(0, x).write(1, np.ones((2, 3)))
    assert "element 0 is a scalar" in str(await cause(run, array.concat(), {x: 1.0}))
    error = await cause(run, array.concat(), {x: np.ones((3, 2))})
    assert "element 0 has shape [3,2], element 1 has shape [2,3]" in str(error)
    assert_same(await run(af.TensorArray("int8", 0, element_shape=(None, 2)).concat()), np.empty((0, 2), np.int8))
    assert "needs the shape of an element" in str(await cause(run, af.TensorArray("int8").concat()))


@pytest.mark.parametrize(
    ("values", "lengths", "message"),
    [
        (np.ones(4), [1, 2], "must add up to 4, the rows given; got 3"),
        (np.ones(4), [1, 1, 2], "has size 2; got 3 lengths"),
        (np.ones(4), [5, -1], "not negative; got [5, -1]"),
        (np.ones(4), [[4]], "needs a vector of lengths; got shape"),
        (1.0, [1, 1], "got a scalar"),
    ],
)
async def test_split_refuses(graph: af.Graph, run: Run, values: Any, lengths: Any, message: str) -> None:
    x, n = af.placeholder("float64"), af.placeholder("int64")
    array = af.TensorArray("float64", 2).split(x, n)
    error = await cause(run, array.concat(), {x: np.float64(values), n: np.int64(lengths)})
    assert isinstance(error, ValueError)
    assert message in str(error)


async def test_unstack_fills_the_whole_array(graph: af.Graph, run: Run) -> None:
    error = await cause(run, af.TensorArray("int64", 2).unstack([1, 2, 3]).stack())
    assert "unstack fills the whole TensorArray, which has size 2; got 3 rows" in str(error)
    assert_same(await run(af.TensorArray("int64", dynamic_size=True).unstack([1, 2, 3]).stack()), np.array([1, 2, 3]))


async def test_stack_of_nothing(graph: af.Graph, run: Run) -> None:
    empty = af.TensorArray("float32", 0, element_shape=(5, 10)).stack()
    assert empty.shape == (0, 5, 10)
    assert (await run(empty)).shape == (0, 5, 10)
    unstacked = af.TensorArray("float32", 0).unstack(np.empty((0, 5, 10), np.float32))
    assert (await run(unstacked.stack())).shape == (0, 5, 10)
    error = str(await cause(run, af.TensorArray("float32").stack()))
    assert "a stack of no elements needs the shape" in error and "or let fn of map_fn or scan return values" in error


async def test_close(graph: af.Graph, run: Run) -> None:
    array = af.TensorArray("int64", 2).write(0, 1)
    early = array.read(0)
    later = array.write(1, 2)
    closed = later.close()
    with af.control_dependencies([closed]):
        uses = [array.size(), later.stack(), array.write(1, 5).size(), later.gather([1]), array.read(1)]
    assert await run([early, closed]) == [1, None]
    for use in uses:
        error = await cause(run, use)
        assert isinstance(error, ValueError)
        assert "used after close()" in str(error)


# -- in branches and loops ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parallel_iterations", [1, 2, 32])
async def test_loop_variable(graph: af.Graph, run: Run, parallel_iterations: int) -> None:
    n = af.placeholder("int64", ())
    _, array = af.while_loop(
        lambda i, array: i < n,
        lambda i, array: (i + 1, array.write(i, i * i)),
        (0, af.TensorArray("int64", n, element_shape=())),
        parallel_iterations=parallel_iterations,
    )
    for count in (0, 1, 50):
        assert_same(await run(array.stack(), {n: count}), np.arange(count) ** 2)


async def test_fibonacci_reads_its_own_writes(graph: af.Graph, run: Run) -> None:
    array = af.TensorArray("int64", 20, clear_after_read=False, element_shape=()).write(0, 1).write(1, 1)
    _, array = af.while_loop(
        lambda i, array: i < 20,
        lambda i, array: (i + 1, array.write(i, array.read(i - 1) + array.read(i - 2))),
        (2, array),
    )
    assert (await run(array.stack())).tolist()[-3:] == [2584, 4181, 6765]


async def test_table_from_nested_loops(graph: af.Graph, run: Run) -> None:
    def row(i: af.Tensor, table: af.TensorArray) -> Any:
        made = af.TensorArray("int64", 3, element_shape=())
        _, made = af.while_loop(lambda j, made: j < 3, lambda j, made: (j + 1, made.write(j, i * 10 + j)), (0, made))
        return i + 1, table.write(i, made.stack())

    _, table = af.while_loop(lambda i, table: i < 3, row, (0, af.TensorArray("int64", 3, element_shape=(3,))))
    assert_same(await run(table.stack()), np.array([[0, 1, 2], [10, 11, 12], [20, 21, 22]]))


async def test_made_in_either_branch(graph: af.Graph, run: Run) -> None:
    pred = af.placeholder("bool", ())
    array = af.cond(
        pred,
        lambda: af.TensorArray("int64", 2).unstack([1, 2]),
        lambda: af.TensorArray("int64", 3).unstack([3, 4, 5]),
    )
    assert (await run(array.stack(), {pred: True})).tolist() == [1, 2]
    assert (await run(array.stack(), {pred: False})).tolist() == [3, 4, 5]


async def test_written_in_one_branch(graph: af.Graph, run: Run) -> None:
    def body(i: af.Tensor, array: af.TensorArray) -> Any:
        return i + 1, af.cond(af.equal(i % 2, 0), lambda: array.write(i, i), lambda: array)

    _, array = af.while_loop(lambda i, array: i < 5, body, (0, af.TensorArray("int64", 5, element_shape=())))
    assert (await run(array.stack())).tolist() == [0, 0, 2, 0, 4]


def test_arrays_of_another_kind_do_not_match(graph: af.Graph) -> None:
    other = af.TensorArray("int64", 2)
    with pytest.raises(af.GraphError, match=r"TensorArray of float64\[...\], got TensorArray of int64\[...\]"):
        af.while_loop(lambda i, array: i < 2, lambda i, array: (i + 1, other), (0, af.TensorArray("float64", 2)))


def test_what_writes_show_is_known_behind_loops_and_branches(graph: af.Graph) -> None:
    array = af.TensorArray("int64", 4)
    assert array.write(0, [1]).write(1, [1, 2]).element_shape == (None,)
    _, after = af.while_loop(lambda i, array: i < 4, lambda i, array: (i + 1, array.write(i, [1, 2])), (0, array))
    assert after.element_shape == (2,)
    assert after.stack().shape == (4, 2)
    _, more = af.while_loop(lambda i, array: i < 4, lambda i, array: (i + 1, array.write(i, [1])), (0, after))
    assert more.element_shape == (None,), "those written before the loop are still there"
    x = af.placeholder("int64", (None, 3))
    either = af.cond(x[0, 0] > 0, lambda: array.unstack(x), lambda: array.scatter([0], x[:1]).identity())
    assert either.element_shape == (3,)
    assert af.cond(x[0, 0] > 0, lambda: after, lambda: either).element_shape == (None,)


def test_what_writes_show_is_known_behind_nested_loops(graph: af.Graph) -> None:
    def row(i: af.Tensor, array: af.TensorArray) -> tuple[af.Tensor, af.TensorArray]:
        assert array.element_shape is None, "an earlier iteration may have written anything"
        _, array = af.while_loop(lambda j, a: j < 2, lambda j, a: (j + 1, a.write(2 * i + j, [1, 2])), (0, array))
        assert array.element_shape is None
        return i + 1, af.cond(i > 1, array.identity, lambda: array)

    _, array = af.while_loop(lambda i, _: i < 2, row, (0, af.TensorArray("int64", 4)))
    assert array.element_shape == (2,)


def test_the_number_of_elements_is_known_behind_a_loop_if_it_is_a_constant(graph: af.Graph) -> None:
    n = af.placeholder("int64", ())

    def filled(array: af.TensorArray, start: af.TensorArray | None = None) -> af.Tensor:
        body = (lambda i, a: (i + 1, a.write(i, 0.5))) if start is None else (lambda i, a: (i + 1, start.write(i, 0.5)))
        return af.while_loop(lambda i, _: i < n, body, (0, array))[1].stack()

    assert filled(af.TensorArray("float64", 4)).shape == (4,)
    assert filled(af.TensorArray("float64", n)).shape == (None,)
    assert filled(af.TensorArray("float64", 4, dynamic_size=True)).shape == (None,)
    assert filled(af.TensorArray("float64", 4), af.TensorArray("float64", 3)).shape == (None,), (
        "another takes its place"
    )


async def test_a_fed_size_agrees_with_a_shape_that_was_built_on_it_behind_a_loop(run: Run, graph: af.Graph) -> None:
    size = af.constant(3)
    array = af.TensorArray("int64", size)
    stacked = af.while_loop(lambda i, _: i < 3, lambda i, a: (i + 1, a.write(i, i)), (0, array))[1].stack()
    assert_same(await run(stacked), np.arange(3))
    with pytest.raises(af.FeedError, match="constant"):
        await run(stacked, {size: 4})


async def test_elements_are_known_behind_a_pooled_loop(run: Run, graph: af.Graph) -> None:
    x = af.placeholder("int64", (2,))
    body = lambda i, a: (i + 1, a.write(i, x * i))  # noqa: E731
    start = (0, af.TensorArray("int64", 3))
    stacked = af.while_loop(lambda i, _: i < 3, body, start, pool=af.Pool(2))[1].stack()
    assert stacked.shape == (3, 2)
    assert_same(await run(stacked, {x: [1, 2]}), np.outer(np.arange(3), [1, 2]))


def test_arrays_that_change_places_in_a_loop_stay_unknown(graph: af.Graph) -> None:
    a, b = af.TensorArray("int64", 2).write(0, 1), af.TensorArray("int64", 2).write(0, [1])
    _, a, b = af.while_loop(lambda i, a, b: i < 1, lambda i, a, b: (i + 1, b, a), (0, a, b))
    assert (a.element_shape, b.element_shape) == (None, None)


def test_a_write_whose_array_is_dropped_is_warned_of(graph: af.Graph) -> None:
    def forgetful(i: af.Tensor, array: af.TensorArray) -> tuple[af.Tensor, af.TensorArray]:
        array.write(i, i)
        return i + 1, array

    with pytest.warns(UserWarning, match=r"a write at .*test_tensor_array.py:\d+ gave was dropped") as warned:
        af.while_loop(lambda i, array: i < 2, forgetful, (0, af.TensorArray("int64", 2)))
    assert [Path(each.filename).name for each in warned] == ["test_tensor_array.py"]
    array = af.TensorArray("int64", 2)
    array.write(0, 1)
    with pytest.warns(UserWarning, match="was dropped"):
        array.stack()
    array.stack()


def test_a_write_that_is_used_or_kept_is_not_warned_of(graph: af.Graph) -> None:
    array = af.TensorArray("int64", 2)
    first = array.write(0, 1)
    array.write(1, 1).stack()
    array.write(1, 2).identity().stack()
    array.size()
    first.stack()


def test_graphs_with_arrays_have_a_text_form(graph: af.Graph) -> None:
    array = af.TensorArray("bfloat16", 2, dynamic_size=True, element_shape=(None, 3)).write(0, np.ones((1, 3)).tolist())
    array.concat()
    af.verify(graph)
    text = af.print_graph(graph)
    assert af.print_graph(af.parse_graph(text)) == text


@pytest.mark.slow
async def test_ten_thousand_writes(graph: af.Graph, run: Run) -> None:
    _, array = af.while_loop(
        lambda i, array: i < 10_000,
        lambda i, array: (i + 1, array.write(i, i)),
        (0, af.TensorArray("int64", dynamic_size=True, element_shape=())),
    )
    assert_same(await run(array.stack()), np.arange(10_000))


async def test_any_order_of_writes(graph: af.Graph, run: Run) -> None:
    order = random.Random(3).sample(range(16), 16)
    array = af.TensorArray("int64", 16)
    for index in order:
        array = array.write(index, index)
    assert_same(await run(array.stack()), np.arange(16))
