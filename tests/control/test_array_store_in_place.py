"""Arrays of fixed size keep their elements in one block: written values are copied, stacked ones are not."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import asyncflow as af
from asyncflow.control.stores.array_store import ArrayKind
from asyncflow.control.stores.array_value import ArrayValue

FLOAT = np.dtype("float32")


def make(size: int, dtype: np.dtype = FLOAT, *, clear: bool = False, dynamic: bool = False) -> ArrayValue:
    return ArrayValue.create(np, ArrayKind(dtype, None, dynamic_size=dynamic, clear_after_read=clear), size)


def filled(values: np.ndarray, *, clear: bool = False) -> ArrayValue:
    array = make(len(values), values.dtype, clear=clear)
    for index, value in enumerate(values):
        array = array.write(index, value)
    return array


# -- what is written is copied -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("clear", [False, True])
def test_the_owner_of_a_written_buffer_may_overwrite_it(clear: bool) -> None:
    buffer, array = np.empty(3, FLOAT), make(4, clear=clear)
    for index in range(4):
        buffer[:] = index
        array = array.write(index, buffer)
    buffer[:] = -1
    assert array.stack().tolist() == [[index] * 3 for index in range(4)]


def test_a_write_keeps_no_reference() -> None:
    value = np.ones(3, FLOAT)
    before = sys.getrefcount(value)
    array = make(2).write(0, value)
    assert sys.getrefcount(value) == before
    assert not np.shares_memory(array.read(0), value)


def test_scatter_copies_rows() -> None:
    values = np.arange(6, dtype=FLOAT).reshape(3, 2)
    array = make(4).scatter([2, 0, 3], values).write(1, np.full(2, 9, FLOAT))
    values[:] = -1
    assert array.stack().tolist() == [[2, 3], [9, 9], [0, 1], [4, 5]]


# -- what is read is not -----------------------------------------------------------------------------------------------


def test_stack_and_reads_share_the_block_and_lock_it() -> None:
    array = filled(np.arange(6, dtype=FLOAT).reshape(3, 2))
    whole, row = array.stack(), array.read(1)
    assert np.shares_memory(whole, array.stack())
    assert np.shares_memory(whole, row)
    for locked in (whole, row):
        with pytest.raises(ValueError, match="read-only"):
            locked[0] = 7


def test_a_stack_that_clears_gives_the_block_away() -> None:
    array = filled(np.arange(6, dtype=FLOAT).reshape(3, 2), clear=True)
    block = array._store.block
    assert block is not None
    inside, whole = block.array, array.stack()
    assert whole is inside
    assert whole.base is None
    assert whole.flags.writeable
    assert block.array is block.readable is None


def test_the_last_read_frees_the_block() -> None:
    array = filled(np.arange(6, dtype=FLOAT).reshape(3, 2), clear=True)
    block = array._store.block
    assert block is not None
    array.read(2)
    array.read(0)
    assert block.array is not None
    array.read(1)
    assert block.array is block.readable is None


def test_elements_written_after_a_clearing_read_are_freed_one_by_one() -> None:
    array = make(3, clear=True).write(0, np.zeros(2, FLOAT))
    array.read(0)
    value = np.ones(2, FLOAT)
    before = sys.getrefcount(value)
    array = array.write(1, value)
    assert array.read(1) is value
    assert sys.getrefcount(value) == before


@pytest.mark.parametrize("dtype", ["bool", "int8", "float64", "complex64", ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
@pytest.mark.parametrize("clear", [False, True])
def test_results_equal_numpys(dtype: str, shape: tuple[int, ...], clear: bool) -> None:
    values = (np.arange(5 * int(np.prod(shape))) % 3).reshape(5, *shape).astype(dtype)
    for got in (filled(values, clear=clear).stack(), filled(values, clear=clear).gather(range(5))):
        assert got.dtype == values.dtype
        assert got.shape == values.shape
        assert np.array_equal(got, values)
    array = filled(values, clear=clear)
    for index in range(5):
        row = array.read(index)
        assert row.dtype == values.dtype
        assert np.array_equal(row, values[index])


def test_text_stays_as_it_is() -> None:
    text = np.array(["a", "a text that is too long to be stored in place"], np.dtypes.StringDType())
    array = make(2, text.dtype).write(0, text[0, ...]).write(1, text[1, ...])
    assert array._store.block is None
    assert array.stack().tolist() == text.tolist()


# -- no block, or only for some elements -------------------------------------------------------------------------------


@pytest.mark.parametrize("array", [make(2, dynamic=True), make(1), make(2**60)], ids=["growing", "one", "huge"])
def test_arrays_without_a_block_keep_written_elements(array: ArrayValue) -> None:
    value = np.ones(3, FLOAT)
    assert array.write(0, value).read(0) is value


def test_another_shape_falls_back() -> None:
    array = make(3).write(0, np.zeros(2, FLOAT)).write(1, np.ones(3, FLOAT)).write(2, np.ones(2, FLOAT))
    assert [array.read(index).tolist() for index in range(3)] == [[0, 0], [1, 1, 1], [1, 1]]
    values, lengths = array.concat()
    assert values.tolist() == [0, 0, 1, 1, 1, 1, 1]
    assert lengths.tolist() == [2, 3, 2]
    with pytest.raises(ValueError, match=r"element 0 has shape \[2\], element 1 has shape \[3\]"):
        array.stack()


def test_a_row_is_not_broadcast() -> None:
    array = make(2).write(0, np.zeros(3, FLOAT)).write(1, np.ones(1, FLOAT))
    assert array.read(1).shape == (1,)


def test_unwritten_elements_are_zeros() -> None:
    array = make(3).write(1, np.ones(2, FLOAT))
    before = array.stack()
    after = array.write(0, np.full(2, 5, FLOAT))
    assert before.tolist() == array.stack().tolist() == [[0, 0], [1, 1], [0, 0]]
    assert after.stack().tolist() == [[5, 5], [1, 1], [0, 0]]
    assert array.read(0).tolist() == [0, 0]


# -- older handles -----------------------------------------------------------------------------------------------------


def test_forks_do_not_see_each_other() -> None:
    start = make(3).write(0, np.float32(1))
    left = start.write(1, np.float32(2)).write(2, np.float32(3))
    right = start.write(1, np.float32(20)).write(2, np.float32(30))
    assert left.stack().tolist() == [1, 2, 3]
    assert right.stack().tolist() == [1, 20, 30]
    assert start.stack().tolist() == [1, 0, 0]


def test_a_fork_of_an_empty_array_has_a_block_of_its_own() -> None:
    empty = make(2)
    arrays = [empty.write(0, np.float32(n)).write(1, np.float32(n + 1)) for n in (1, 5)]
    stacks = [array.stack() for array in arrays]
    assert [stack.tolist() for stack in stacks] == [[1, 2], [5, 6]]
    assert all(np.shares_memory(stack, array.stack()) for stack, array in zip(stacks, arrays, strict=True))


@pytest.mark.parametrize("through_fork", [False, True])
def test_a_clearing_read_in_a_fork_uses_the_element_up_in_all(through_fork: bool) -> None:
    start = make(2, clear=True).write(0, np.float32(1))
    left, right = start.write(1, np.float32(2)), start.write(1, np.float32(3))
    first, second = (right, left) if through_fork else (left, right)
    first.stack()
    with pytest.raises(ValueError, match="element 0 of the TensorArray is read a second time"):
        second.stack()


steps = st.lists(
    st.tuples(st.sampled_from(["write", "odd", "read", "stack"]), st.integers(0, 10**6), st.integers(0, 3)),
    max_size=25,
)


@given(steps, st.booleans())
def test_agrees_with_an_array_that_keeps_elements_one_by_one(steps: list[tuple[str, int, int]], clear: bool) -> None:
    """A growing array has no block: every step does the same to both, be it a result or an error."""
    pairs = [(make(4, clear=clear), make(4, clear=clear, dynamic=True))]
    for count, (step, pick, index) in enumerate(steps):
        outcomes: list[object] = []
        value = np.full(3 if step == "odd" else 2, count, FLOAT)
        pair = pairs[pick % len(pairs)]
        for array in pair:
            try:
                if step in ("write", "odd"):
                    outcomes.append(array.write(index, value.copy()))
                else:
                    outcomes.append((array.read(index) if step == "read" else array.stack()).tolist())
            except ValueError as error:
                outcomes.append(str(error))
        one, other = outcomes
        if isinstance(one, ArrayValue) and isinstance(other, ArrayValue):
            pairs.append((one, other))
        else:
            assert one == other


# -- errors and threads ------------------------------------------------------------------------------------------------


def test_errors_are_as_ever() -> None:
    array = filled(np.zeros((2, 2), FLOAT), clear=True)
    with pytest.raises(ValueError, match="element 1 of the TensorArray is written a second time"):
        array.write(1, np.zeros(2, FLOAT))
    with pytest.raises(TypeError, match="elements of the TensorArray are float32; got float64"):
        array.write(1, np.zeros(2))
    with pytest.raises(ValueError, match="element 1 of the TensorArray is written a second time"):
        make(3).scatter([1, 1], np.zeros((2, 2), FLOAT))
    array.stack()
    for read in (array.stack, lambda: array.read(0), lambda: array.gather([0])):
        with pytest.raises(ValueError, match="element 0 of the TensorArray is read a second time"):
            read()


@pytest.mark.parametrize("clear", [False, True])
def test_close_frees_the_block(clear: bool) -> None:
    array = filled(np.zeros((2, 2), FLOAT), clear=clear)
    block = array._store.block
    assert block is not None
    array.close()
    assert block.array is block.readable is None
    for use in (array.stack, lambda: array.read(0)):
        with pytest.raises(ValueError, match="used after close"):
            use()


def test_writers_of_one_handle_and_readers_do_not_disturb_each_other() -> None:
    start = make(64).write(0, np.zeros(8, FLOAT))
    ready = threading.Barrier(4)

    def fill(number: int) -> bool:
        ready.wait()
        array = start
        for index in range(1, 64):
            array = array.write(index, np.full(8, number * 100 + index, FLOAT))
            assert start.read(index).tolist() == [0] * 8
        return array.stack()[1:, 0].tolist() == [number * 100 + index for index in range(1, 64)]

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(fill, range(4)))


# -- in a graph --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clear", [False, True])
@pytest.mark.parametrize("regions", [False, True])
async def test_a_fetched_stack_belongs_to_the_user(clear: bool, regions: bool) -> None:
    with af.Graph() as graph:
        array = af.TensorArray("float32", 3, clear_after_read=clear)
        for index in range(3):
            array = array.write(index, np.full(2, index, np.float32))
        stacked = array.stack()
    async with af.Session(graph, regions=regions) as session:
        for _ in range(2):
            got = await session.run(stacked)
            assert got.tolist() == [[0, 0], [1, 1], [2, 2]]
            got[:] = -1
