"""Behaviour 45-51: TensorArray end to end, in graphs and in loops. Gradients are elsewhere."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from tests.conformance.gates import settle
from tests.conftest import held_buffers
from tests.patience import PATIENCE_S

Run = Callable[..., Awaitable[Any]]

pytestmark = pytest.mark.usefixtures("graph")

DTYPES = ["bool", "int8", "int32", "int64", "uint8", "float16", "float32", "float64", "complex64"]


def sample(dtype: str) -> np.ndarray[Any, Any]:
    return np.arange(12).reshape(6, 2).astype(dtype)


def array(size: Any = 3, dtype: str = "float64", **options: Any) -> af.TensorArray:
    return af.TensorArray(dtype, size, **options)


async def fails_with(run: Run, fetches: Any, error: type[Exception], message: str) -> None:
    """Runs; the run must fail in a kernel, with this cause."""
    with pytest.raises(af.KernelError, match=message) as caught:
        await run(fetches)
    assert isinstance(caught.value.__cause__, error)


# -- 45: every operation ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
async def test_write_read_stack(run: Run, dtype: str) -> None:
    """Behaviour 45: an element is read as written, for each dtype, and stacked in order."""
    rows = sample(dtype)
    written = array(3, dtype, clear_after_read=False)
    for i in (2, 0, 1):
        written = written.write(i, rows[i])
    read, stacked, size = await run((written.read(1), written.stack(), written.size()))
    np.testing.assert_array_equal(read, rows[1])
    np.testing.assert_array_equal(stacked, rows[:3])
    assert stacked.dtype == rows.dtype and size == 3


@pytest.mark.parametrize("dtype", DTYPES)
async def test_unstack_gather_scatter(run: Run, dtype: str) -> None:
    """Behaviour 45: rows in, rows out, in any order."""
    rows = sample(dtype)
    unstacked = array(6, dtype).unstack(rows)
    scattered = array(6, dtype).scatter([5, 3, 1, 0, 2, 4], rows)
    gathered, stacked = await run((unstacked.gather([4, 0]), scattered.stack()))
    np.testing.assert_array_equal(gathered, rows[[4, 0]])
    np.testing.assert_array_equal(stacked, rows[[3, 2, 4, 1, 5, 0]])


@pytest.mark.parametrize("dtype", DTYPES)
async def test_split_and_concat(run: Run, dtype: str) -> None:
    """Behaviour 45: pieces of different lengths, an empty one among them."""
    rows = sample(dtype)
    pieces = array(3, dtype, clear_after_read=False).split(rows, [4, 0, 2])
    first, joined = await run((pieces.read(0), pieces.concat()))
    np.testing.assert_array_equal(first, rows[:4])
    np.testing.assert_array_equal(joined, rows)


async def test_identity_and_close(run: Run) -> None:
    """Behaviour 45: an identity is the same array; after close a use fails."""
    written = array(1).write(0, 4.0)
    read = written.identity().read(0)
    with af.control_dependencies([read]):
        closed = written.close()
    assert await run([read, closed]) == [4.0, None]
    with af.control_dependencies([written.close()]):
        late = written.identity().read(0)
    await fails_with(run, late, ValueError, "close")


async def test_empty_elements(run: Run) -> None:
    """Behaviour 45: three elements of shape [0,1] stack to [3,0,1]."""
    written = array(3)
    for i in range(3):
        written = written.write(i, np.zeros((0, 1)))
    assert (await run(written.stack())).shape == (3, 0, 1)


# -- 46: twice, and not at all ---------------------------------------------------------------------------------------


async def test_a_second_write_fails(run: Run) -> None:
    """Behaviour 46: an element is written once on the way to any array."""
    await fails_with(run, array().write(0, 1.0).write(0, 2.0).stack(), ValueError, "0")


async def test_two_branches_from_one_array(run: Run) -> None:
    """Behaviour 46: arrays are values, so each of two arrays made from one may write the same element."""
    base = array(1, clear_after_read=False)
    assert await run([base.write(0, 1.0).read(0), base.write(0, 2.0).read(0)]) == [1.0, 2.0]


async def test_an_unwritten_element(run: Run) -> None:
    """Behaviour 46: decided: zeros if the shape is known, from the declaration or from a write, else an error."""
    declared = array(2, element_shape=(2,)).read(1)
    written = array(2).write(0, np.ones(3)).read(1)
    np.testing.assert_array_equal(await run(declared), [0, 0])
    np.testing.assert_array_equal(await run(written), [0, 0, 0])
    await fails_with(run, array(2).read(1), ValueError, "1")


async def test_a_second_read(run: Run) -> None:
    """Behaviour 46: it fails after `clear_after_read`, and works where that is off."""

    def read_twice(**options: Any) -> Any:
        written = array(1, **options).write(0, 1.0)
        first = written.read(0)
        with af.control_dependencies([first]):
            return first, written.read(0)

    assert await run(read_twice(clear_after_read=False)) == (1.0, 1.0)
    await fails_with(run, read_twice(), ValueError, "clear_after_read")


# -- 47: indices, dtypes, shapes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", [-1, 3, 100])
@pytest.mark.parametrize("use", ["write", "read", "gather", "scatter"])
async def test_an_index_outside(run: Run, index: int, use: str) -> None:
    """Behaviour 47: below 0 or past the end."""
    written = array(3, element_shape=())
    fetch = {
        "write": lambda: written.write(index, 1.0).size(),
        "read": lambda: written.read(index),
        "gather": lambda: written.gather([0, index]),
        "scatter": lambda: written.scatter([0, index], [1.0, 2.0]).size(),
    }[use]()
    await fails_with(run, fetch, IndexError, str(index))


async def test_dynamic_size(run: Run) -> None:
    """Behaviour 47: a write past the end makes the array longer; a negative index fails all the same."""
    grown = array(0, dynamic_size=True, element_shape=()).write(2, 5.0)
    size, stacked = await run((grown.size(), grown.stack()))
    assert size == 3
    np.testing.assert_array_equal(stacked, [0, 0, 5])
    await fails_with(run, array(0, dynamic_size=True).write(-1, 1.0).size(), IndexError, "-1")


async def test_sparse_growth(run: Run) -> None:
    """Behaviour 47: scatter at 1 and 8 gives 9 elements, the others zero."""
    grown = array(0, dynamic_size=True).scatter([1, 8], [[1.0, 2.0], [3.0, 4.0]])
    expected = np.zeros((9, 2))
    expected[[1, 8]] = [[1, 2], [3, 4]]
    np.testing.assert_array_equal(await run(grown.stack()), expected)


def test_a_wrong_dtype() -> None:
    """Behaviour 47: a build error."""
    with pytest.raises(af.DTypeError, match="elements of the TensorArray are float64; got int32"):
        array().write(0, np.int32(1))


async def test_a_wrong_shape(run: Run) -> None:
    """Behaviour 47: a build error where the shape is declared; when elements are stacked, where it is not."""
    with pytest.raises(af.ShapeError, match=r"have shape \[2\]; got \[3\]"):
        array(element_shape=(2,)).write(0, np.ones(3))
    await fails_with(run, array(2).write(0, np.ones(2)).write(1, np.ones(3)).stack(), ValueError, "shape")


# -- 48: what concat, split and stack refuse -------------------------------------------------------------------------


async def test_concat_of_scalars(run: Run) -> None:
    """Behaviour 48: there is no axis to join along."""
    with pytest.raises(af.ShapeError, match="scalars cannot be joined"):
        array(1).write(0, 1.0).concat()


async def test_concat_of_unequal_trailing_extents(run: Run) -> None:
    """Behaviour 48: only the first axis may differ."""
    written = array(2).write(0, np.ones((1, 2))).write(1, np.ones((1, 3)))
    await fails_with(run, written.concat(), ValueError, "shape")


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        pytest.param([1, 2, 4], "7|add up", id="wrong sum"),
        pytest.param([3, 3], "2", id="wrong count"),
        pytest.param([7, -1, 0], "-1|negative", id="negative"),
    ],
)
async def test_split_lengths_that_do_not_fit(run: Run, lengths: list[int], message: str) -> None:
    """Behaviour 48: each fault its own error."""
    await fails_with(run, array(3).split(np.ones((6, 2)), lengths).size(), ValueError, message)


def test_split_lengths_are_a_vector() -> None:
    """Behaviour 48: a build error otherwise, as for scalars to split."""
    with pytest.raises(af.ShapeError, match="lengths must have rank 1"):
        array().split(np.ones((6, 2)), 3)
    with pytest.raises(af.ShapeError, match="scalar cannot be taken apart"):
        array().split(1.0, [1])


async def test_stack_of_no_elements(run: Run) -> None:
    """Behaviour 48: [0,5,10] if the element shape is known, else an error."""
    assert (await run(array(0, element_shape=(5, 10)).stack())).shape == (0, 5, 10)
    await fails_with(run, array(0).stack(), ValueError, "shape")


# -- 50: nothing is left ---------------------------------------------------------------------------------------------


SIDE = 128
"""Large enough to be counted: 128 KiB an element."""


def filled(i: Any, written: Any) -> Any:
    return i + 1, written.write(i, af.ones((SIDE, SIDE)) * af.astype(i, "float64"))


async def test_arrays_are_freed_after_success(session: af.Session) -> None:
    """Behaviour 50: the device holds nothing when the run has ended."""
    _, written = af.while_loop(lambda i, a: i < 8, filled, (0, array(8)))
    total = await session.run(af.sum(written.stack()))
    assert total == 28 * SIDE * SIDE
    assert sum(device.memory.peak for device in session.devices) >= 8 * SIDE * SIDE * 8, "the elements were counted"
    assert held_buffers(session) == {}


async def test_arrays_are_freed_after_an_error(session: af.Session) -> None:
    """Behaviour 50: a write past the end after eight good ones."""
    _, written = af.while_loop(lambda i, a: i < 10, filled, (0, array(8)))
    await fails_with(session.run, written.stack(), IndexError, "8")
    gc.collect()  # the exception just caught and its traceback refer to one another
    assert held_buffers(session) == {}


async def test_arrays_are_freed_after_cancel(session: af.Session) -> None:
    """Behaviour 50: cancelled with elements written."""
    arrived = asyncio.Event()

    @af.op(outputs=af.spec("int64", ()))
    async def never_past_five(i: Any) -> Any:
        if i == 5:
            arrived.set()
            await asyncio.get_running_loop().create_future()
        return i

    _, written = af.while_loop(lambda i, a: i < 8, lambda i, a: filled(never_past_five(i), a), (0, array(8)))
    task = asyncio.create_task(session.run(written.stack()))
    await arrived.wait()
    async with asyncio.timeout(PATIENCE_S):  # a write may be on its way to a stream's thread and back
        while all(device.memory.used < SIDE * SIDE * 8 for device in session.devices):
            await settle()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    del task
    assert held_buffers(session) == {}


# -- 51: arrays in loops and branches --------------------------------------------------------------------------------


async def test_two_serial_loops(run: Run) -> None:
    """Behaviour 51: one loop writes, and the next sums its elements: 31."""
    _, _, written = af.while_loop(
        lambda i, x, a: i < 5, lambda i, x, a: (i + 1, x * 2, a.write(i, x)), (0, 1.0, array(5, element_shape=()))
    )
    _, total, _ = af.while_loop(lambda i, t, a: i < 5, lambda i, t, a: (i + 1, t + a.read(i), a), (0, 0.0, written))
    assert await run(total) == 31.0


@pytest.mark.parametrize("window", [1, 32])
async def test_a_table_from_nested_loops(run: Run, window: int) -> None:
    """Behaviour 51: 3 x 3, one array as a variable of both loops."""

    def row(i: Any, table: Any) -> Any:
        def cell(j: Any, table: Any) -> Any:
            return j + 1, table.write(i * 3 + j, i * 10 + j)

        return i + 1, af.while_loop(lambda j, t: j < 3, cell, (0, table), parallel_iterations=window)[1]

    _, table = af.while_loop(
        lambda i, t: i < 3, row, (0, array(9, "int64", element_shape=())), parallel_iterations=window
    )
    np.testing.assert_array_equal(await run(af.reshape(table.stack(), (3, 3))), [[0, 1, 2], [10, 11, 12], [20, 21, 22]])


async def test_made_fresh_inside_a_body(run: Run) -> None:
    """Behaviour 51: each iteration has one of its own, so each may write element 0."""

    def body(i: Any, total: Any) -> Any:
        fresh = array(2, "int64").write(0, i).write(1, i * i)
        return i + 1, total + af.sum(fresh.stack())

    assert await run(af.while_loop(lambda i, t: i < 5, body, (0, 0))) == (5, 10 + 30)


@pytest.mark.parametrize("taken", [True, False])
async def test_made_or_written_in_a_branch(run: Run, taken: bool) -> None:
    """Behaviour 51: an array may be a branch's result, and be captured by both."""
    pred = af.placeholder("bool", ())
    outer = array(2, element_shape=()).write(0, 1.0)
    made = af.cond(pred, lambda: array(1).write(0, 10.0), lambda: array(1).write(0, 20.0))
    written = af.cond(pred, lambda: outer.write(1, 5.0), lambda: outer)
    first, second = await run((made.read(0), written.stack()), {pred: taken})
    assert first == (10.0 if taken else 20.0)
    np.testing.assert_array_equal(second, [1.0, 5.0 if taken else 0.0])


async def test_a_fold_written_by_hand(run: Run) -> None:
    """Behaviour 51: an array unstacked from a fed value of unknown length, read in a loop."""
    xs = af.placeholder("float64", (None,))
    n = af.shape(xs)[0]
    rows = array(n).unstack(xs)
    _, total = af.while_loop(lambda i, t: i < n, lambda i, t: (i + 1, t * 2 + rows.read(i)), (af.zeros_like(n), 0.0))
    for values in ([], [1.0], [1.0, 2.0, 3.0]):
        assert await run(total, {xs: np.array(values)}) == sum(x * 2**k for k, x in enumerate(reversed(values)))
