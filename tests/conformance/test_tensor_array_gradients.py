"""Behaviour 49-51: gradients of TensorArrays, in graphs, loops and branches, with the values TensorFlow gives."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.autodiff.gradients import gradients
from tests.conformance.gates import settle
from tests.conftest import held_buffers

Run = Callable[..., Awaitable[Any]]

pytestmark = pytest.mark.usefixtures("graph")

WINDOWS = pytest.mark.parametrize("window", [1, 3, 32])


def array(size: Any = 3, dtype: str = "float64", *, kept: bool = True, **options: Any) -> af.TensorArray:
    """An array that can be read many times, unless it is not `kept`."""
    return af.TensorArray(dtype, size, clear_after_read=not kept, **options)


def source(value: Any) -> af.Tensor:
    """A value that nothing is known of while compiling, so that its gradients are computed in the run."""
    values = np.asarray(value, "float64")
    return af.Variable(values, name="source").read()


async def fails_with(run: Run, fetches: Any, feeds: Any, message: str) -> None:
    """Runs; the run must fail in a kernel, with a ValueError."""
    with pytest.raises(af.KernelError, match=message) as caught:
        await run(fetches, feeds)
    assert isinstance(caught.value.__cause__, ValueError)


# -- 49: every reader and writer -------------------------------------------------------------------------------------


async def test_repeated_reads_add(run: Run) -> None:
    """Behaviour 49: elements of shapes [1,2] and [], the first read twice: one grad_y alone, two of one read, all."""
    x, y = source([[4.0, 5.0]]), source(3.0)
    written = array(2).write(0, x).write(1, y)
    first, second, again = written.read(0), written.read(1), written.read(0)
    one, other = np.array([[2.0, 3.0]]), np.array([[1.0, -1.0]])
    results = (
        gradients(first, x, one),
        gradients([first, again], x, [one, other]),
        gradients(second, y, -2.0),
        gradients([first, again, second], [x, y], [one, other, -2.0]),
    )
    alone, added, scalar, (of_x, of_y) = await run(results)
    np.testing.assert_array_equal(alone, [[2, 3]])
    np.testing.assert_array_equal(added, [[3, 2]])
    np.testing.assert_array_equal(of_x, [[3, 2]])
    assert scalar == of_y == -2


async def test_stack_read_and_concat_add(run: Run) -> None:
    """Behaviour 49: two elements stacked, joined, and the first read."""
    x, y = source([-1.0, 1.0]), source([-10.0, 10.0])
    written = array(2).write(0, x).write(1, y)
    grad_ys = [np.array([[2.0, 3.0], [4.0, 5.0]]), np.array([-0.5, 1.5]), np.array([20.0, 30.0, 40.0, 50.0])]
    of_x, of_y = await run(gradients([written.stack(), written.read(0), written.concat()], [x, y], grad_ys))
    np.testing.assert_array_equal(of_x, [2.0 - 0.5 + 20.0, 3.0 + 1.5 + 30.0])
    np.testing.assert_array_equal(of_y, [4.0 + 40.0, 5.0 + 50.0])


@pytest.mark.parametrize("size", [2, 0])
async def test_unstack_and_reads(run: Run, size: int) -> None:
    """Behaviour 49: rows of one value, the first read twice; of a fixed size and growing."""
    x = source([[1.0, -1.0], [10.0, -10.0]])
    rows = array(size, dynamic_size=not size).unstack(x)
    grad_ys = [np.array([2.0, 3.0]), np.array([-1.5, 1.5]), np.array([4.0, 5.0])]
    grad = gradients([rows.read(0), rows.read(0), rows.read(1)], x, grad_ys)
    np.testing.assert_array_equal(await run(grad), [[0.5, 4.5], [4, 5]])


async def test_split_and_concat(run: Run) -> None:
    """Behaviour 49: pieces of lengths 2 and 1 joined again, and one of them read."""
    x = source([[1.0, -1.0], [10.0, -10.0], [100.0, -100.0]])
    pieces = array(2).split(x, [2, 1])
    grad = np.array([[2.0, -2.0], [20.0, -20.0], [200.0, -200.0]])
    joined = gradients(pieces.concat(), x, grad)
    both = gradients([pieces.concat(), pieces.read(0)], x, [grad, np.ones((2, 2))])
    last = gradients(pieces.read(1), x)
    joined_value, both_value, last_value = await run((joined, both, last))
    np.testing.assert_array_equal(joined_value, grad)
    np.testing.assert_array_equal(both_value, grad + [[1, 1], [1, 1], [0, 0]])
    np.testing.assert_array_equal(last_value, [[0, 0], [0, 0], [1, 1]])


async def test_scatter_and_reads(run: Run) -> None:
    """Behaviour 49: written to places 1 and 8 of a growing array; both read, then one, whose fellow gets zeros."""
    x = source([[1.0, -1.0], [10.0, -10.0]])
    scattered = array(0, dynamic_size=True).scatter([1, 8], x)
    one, other = np.array([2.0, 3.0]), np.array([4.0, 5.0])
    all_read, one_read = await run(
        (gradients([scattered.read(1), scattered.read(8)], x, [one, other]), gradients(scattered.read(1), x, one))
    )
    np.testing.assert_array_equal(all_read, [[2, 3], [4, 5]])
    np.testing.assert_array_equal(one_read, [[2, 3], [0, 0]])


async def test_gather(run: Run) -> None:
    """Behaviour 49: two of ten rows are gathered, then one of them twice."""
    x = source([[float(k), -float(k)] for k in range(10)])
    rows = array(10).unstack(x)
    grad = np.array([[2.0, 3.0], [4.0, 5.0]])
    once, twice = await run((gradients(rows.gather([1, 8]), x, grad), gradients(rows.gather([8, 8]), x, grad)))
    expected = np.zeros((10, 2))
    expected[[1, 8]] = grad
    np.testing.assert_array_equal(once, expected)
    np.testing.assert_array_equal(twice, np.where(np.arange(10)[:, None] == 8, grad.sum(0), 0))


async def test_unread_elements_get_zeros(run: Run) -> None:
    """Behaviour 49: every writer gets zeros, in the shape of its element."""
    x, y, z = source([1.0, 2.0]), source(np.ones((2, 3))), source(np.ones((3, 2)))
    written = array(2).write(0, x).write(1, 7.0)
    rows, pieces = array(2).unstack(y), array(2).split(z, [1, 2])
    total = written.read(1) + rows.read(1)[0] + pieces.read(0)[0, 0]
    of_x, of_y, of_z = await run(gradients(total, [x, y, z]))
    np.testing.assert_array_equal(of_x, [0, 0])
    np.testing.assert_array_equal(of_y, [[0, 0, 0], [1, 0, 0]])
    np.testing.assert_array_equal(of_z, [[1, 0], [0, 0], [0, 0]])


async def test_of_unknown_shapes(run: Run) -> None:
    """Behaviour 49: nothing is known of the elements; each gradient has the shape of its value."""
    x, y = af.placeholder("float64", None), af.placeholder("float64", None)
    written = array(3).write(0, x).write(2, y)
    total = af.sum(written.read(0) * written.read(0)) + af.sum(written.read(2))
    for shape in ((), (2,), (0, 3)):
        values = np.full(shape, 5.0)
        of_x, of_y = await run(gradients(total, [x, y]), {x: values, y: values + 1})
        assert of_x.shape == of_y.shape == shape
        np.testing.assert_array_equal(of_x, 2 * values)
        np.testing.assert_array_equal(of_y, np.ones(shape))


@pytest.mark.parametrize(
    ("read", "good", "bad"),
    [
        (lambda a: a.read(0), (2,), (1,)),
        (lambda a: a.read(0), (2,), (3,)),
        (lambda a: a.stack(), (1, 2), (1, 3)),
        (lambda a: a.gather([0]), (1, 2), (1, 1)),
        (lambda a: a.concat(), (2,), (3,)),
    ],
)
async def test_mismatched_shapes_refuse_to_aggregate(
    run: Run, read: Callable[[af.TensorArray], af.Tensor], good: tuple[int, ...], bad: tuple[int, ...]
) -> None:
    """Behaviour 49: a fed grad_y of another shape is not broadcast; the error has both shapes."""
    x, grad = af.placeholder("float64", None), af.placeholder("float64", None)
    written = array(1).write(0, x)
    found = gradients([written.read(0), read(written)], x, [np.ones(2), grad])
    np.testing.assert_array_equal(await run(found, {x: np.ones(2), grad: np.ones(good)}), [2, 2])
    await fails_with(run, found, {x: np.ones(2), grad: np.ones(bad)}, rf"shape .*{bad[-1]}\].* shape .*2\]")


async def test_mismatched_shapes_known_while_building() -> None:
    """Behaviour 49: refused when the graph is built."""
    x = source([1.0, 2.0])
    with pytest.raises(af.ShapeError, match=r"float64\[2\].*\[3\]"):
        gradients(array(1, element_shape=(2,)).write(0, x).read(0), x, np.ones(3))


async def test_each_element_is_written_once(run: Run) -> None:
    """Behaviour 49: a gradient changes nothing of that, and does not hide it."""
    x = source(1.0)
    twice = array(1).write(0, x).write(0, x)
    read = twice.read(0)
    await fails_with(run, (read, gradients(read, x)), {}, "second time")


async def test_elements_that_are_no_floats(run: Run) -> None:
    """Behaviour 49: through an array of integers nothing flows, and the rest of the path is not disturbed."""
    x = source([1.5, 2.5])
    counts = array(2, "int64").unstack(af.astype(x, "int64"))
    total = af.sum(x * af.astype(counts.stack(), "float64"))
    np.testing.assert_array_equal(await run(gradients(total, x)), [1, 2])


# -- 50: what is shared, and where it is -----------------------------------------------------------------------------


async def test_two_gradient_calls_share_nothing(run: Run) -> None:
    """Behaviour 50: two calls on one array give what each alone gives, run together or apart."""
    x = source([3.0, 4.0])
    rows = array(2).unstack(x)
    first, second = rows.read(0) * 2, rows.read(1) * 5 + rows.read(0)
    one, two, both = gradients(first, x), gradients(second, x), gradients([first, second], x)
    for value in (await run((one, two, both)), [await run(each) for each in (one, two, both)]):
        np.testing.assert_array_equal(value[0], [2, 0])
        np.testing.assert_array_equal(value[1], [1, 5])
        np.testing.assert_array_equal(value[2], [3, 5])


async def test_double_gradient(run: Run) -> None:
    """Behaviour 50: x is written and read, and squared: the second derivative is 2.0."""
    x = source(4.0)
    squared = array(1).write(0, array(1).write(0, x).read(0) ** 2).read(0)
    once = gradients(squared, x)
    assert await run((once, gradients(once, x))) == (8.0, 2.0)


async def test_double_gradient_of_a_loop(run: Run) -> None:
    """Behaviour 50: powers of x go through an array: y = x + x^2 + ... + x^5."""
    x = source(2.0)

    def body(i: Any, power: Any, powers: Any) -> Any:
        return i + 1, power * x, powers.write(i, power)

    _, _, powers = af.while_loop(lambda i, p, a: i < 5, body, (0, x, array(5, element_shape=())))
    y = af.sum(powers.stack())
    once = gradients(y, x)
    twice = gradients(once, x)
    assert await run((y, once, twice, gradients(twice, x))) == (62.0, 129.0, 222.0, 294.0)


def test_the_gradient_is_on_the_forward_device(graph: af.Graph) -> None:
    """Behaviour 50: nodes of the gradient ask for the device that the forward node asked for."""
    x = source([1.0, 2.0])
    with af.device("cpu:1"):
        rows = array(2).unstack(x)
        y = rows.read(0) * rows.read(1)
    before = len(graph.nodes)
    gradients(y, x)
    of_array = [node for node in graph.nodes[before:] if "tensor_array" in node.name]
    assert {"accumulate_gradient", "rows_gradient"} <= {node.op.name for node in of_array}
    assert {node.device for node in of_array} == {"cpu:1"}


async def test_used_up_and_closed_arrays(run: Run) -> None:
    """Behaviour 50: the gradient needs no element: neither elements that a read has freed, nor any after close."""
    x = source([3.0, 4.0])
    rows = array(2, kept=False).unstack(x)
    y = rows.read(0) ** 2 + rows.read(1)
    with af.control_dependencies([y]):
        closed = rows.close()
    with af.control_dependencies([closed]):
        grad = gradients(y, x)
    np.testing.assert_array_equal(await run(grad), [6, 1])


SIDE = 64
"""Of the elements whose memory is looked at."""


def _multiples(x: af.Tensor) -> af.Tensor:
    """The sum of ``k * x * x`` for k < 8, through an array that one loop writes and another reads."""
    empty = array(8, element_shape=(SIDE, SIDE))
    _, written = af.while_loop(
        lambda k, a: k < 8, lambda k, a: (k + 1, a.write(k, x * x * af.astype(k, "float64"))), (0, empty)
    )
    return af.while_loop(lambda i, t: i < 8, lambda i, t: (i + 1, t + written.read(i)), (0, af.zeros((SIDE, SIDE))))[1]


async def threads_let_go(session: af.Session) -> None:
    """Returns when the streams' threads have dropped the work that they did last, with its result."""
    for device in session.devices:
        for stream in device.compute_streams:
            stream.enqueue(int)
            await stream.record().wait()


async def test_freed_after_success(session: af.Session) -> None:
    """Behaviour 50: with its gradient run, the device holds nothing of an array."""
    x = af.placeholder("float64", (SIDE, SIDE))
    total = _multiples(x)
    value, grad = await session.run((total, gradients(total, x, x + 1)), {x: np.full((SIDE, SIDE), 3.0)})
    np.testing.assert_array_equal(value, np.full((SIDE, SIDE), 28.0 * 9))
    np.testing.assert_array_equal(grad, np.full((SIDE, SIDE), 56.0 * 3 * 4))
    assert sum(device.memory.peak for device in session.devices) >= 8 * SIDE * SIDE * 8, "the elements were counted"
    del value, grad
    await threads_let_go(session)
    assert held_buffers(session) == {}


async def test_freed_after_an_error(session: af.Session) -> None:
    """Behaviour 50: a gradient of another shape is met when half of them are read."""
    x = af.placeholder("float64", (None, None))
    rows = array(8)
    for k in range(8):
        rows = rows.write(k, x * x)
    grad = af.placeholder("float64", None)
    found = gradients([rows.read(k) for k in range(8)], x, [grad] * 4 + [af.ones_like(x)] * 4)
    await fails_with(session.run, found, {x: np.full((SIDE, SIDE), 3.0), grad: np.ones((SIDE, 1))}, r"\[64,1\]")
    gc.collect()  # the exception just caught and its traceback refer to one another
    await threads_let_go(session)
    assert held_buffers(session) == {}


async def test_freed_after_cancel(session: af.Session) -> None:
    """Behaviour 50: cancelled while the gradient of the array is being read."""
    x = af.placeholder("float64", (SIDE, SIDE))
    arrived = asyncio.Event()

    @af.op(outputs=af.spec("int64", ()))
    async def never(total: Any) -> Any:
        arrived.set()
        return await asyncio.get_running_loop().create_future()

    grad = gradients(_multiples(x), x, x + 1)
    waiting = never(grad[0, 0])
    task = asyncio.create_task(session.run((grad, waiting), {x: np.full((SIDE, SIDE), 3.0)}))
    await arrived.wait()
    await settle()
    are_mixed = len({device.kind for device in session.devices}) > 1
    assert held_buffers(session) or are_mixed  # then the gradient may be the host's already, as a result
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    del task
    await settle()  # the loop still has a callback of the run, which does nothing any more
    await threads_let_go(session)
    assert held_buffers(session) == {}


# -- 51: arrays in loops and branches --------------------------------------------------------------------------------


@WINDOWS
@pytest.mark.parametrize("size", [3, 0])
async def test_as_loop_variable(run: Run, window: int, size: int) -> None:
    """Behaviour 51: gradient to input, state and captured variable.

    In each of three steps ``out = v[t] + var + state`` goes to the array and v[t] is added to the state.
    """
    v = source(np.arange(15.0).reshape(3, 5))
    var = af.Variable(np.arange(100.0, 105.0), name="var")
    state = source(np.ones(5))

    def body(t: Any, outs: Any, state: Any) -> Any:
        return t + 1, outs.write(t, v[t] + var + state), state + v[t]

    outs = af.while_loop(
        lambda t, outs, state: t < 3,
        body,
        (0, array(size, dynamic_size=not size, element_shape=(5,)), state),
        parallel_iterations=window,
    )[1].stack()
    grad_val = -np.arange(15.0).reshape(3, 5)
    value, (of_v, of_state, of_var) = await run((outs, gradients(outs, [v, state, var], grad_val)))
    rows = np.arange(15.0).reshape(3, 5)
    np.testing.assert_array_equal(value, rows + np.arange(100, 105) + 1 + [[0] * 5, rows[0], rows[0] + rows[1]])
    np.testing.assert_array_equal(of_v, [grad_val.sum(0), grad_val[1:].sum(0), grad_val[2]])
    np.testing.assert_array_equal(of_state, grad_val.sum(0))
    np.testing.assert_array_equal(of_var, grad_val.sum(0))


@WINDOWS
async def test_two_serial_loops(run: Run, window: int) -> None:
    """Behaviour 51: one loop writes x and then twice the element before, another sums them: 31."""
    x = source(2.0)

    def fill(i: Any, acc: Any) -> Any:
        return i + 1, acc.write(i, af.cond(i == 0, lambda: x, lambda: acc.read(i - 1) * 2.0))

    _, acc = af.while_loop(lambda i, a: i < 5, fill, (0, array(5, element_shape=())), parallel_iterations=window)
    _, total = af.while_loop(
        lambda i, t: i < 5, lambda i, t: (i + 1, t + acc.read(i)), (0, 0.0), parallel_iterations=window
    )
    assert await run((total, gradients(total, x))) == (62.0, 31.0)


@WINDOWS
async def test_a_table_from_nested_loops(run: Run, window: int) -> None:
    """Behaviour 51: a 3 x 3 table of x[i] * y[j], one array as a variable of both loops, read again in two loops."""
    x, y = source([1.0, 2.0, 3.0]), source([4.0, 5.0, 6.0])

    def row(i: Any, table: Any) -> Any:
        def cell(j: Any, table: Any) -> Any:
            return j + 1, table.write(i * 3 + j, x[i] * y[j])

        return i + 1, af.while_loop(lambda j, t: j < 3, cell, (0, table), parallel_iterations=window)[1]

    empty = array(9, element_shape=())
    _, table = af.while_loop(lambda i, t: i < 3, row, (0, empty), parallel_iterations=window)
    cells = af.reshape(table.stack(), (3, 3))
    weights = np.arange(1.0, 10.0).reshape(3, 3)
    value, (of_x, of_y) = await run((cells, gradients(cells, [x, y], weights)))
    np.testing.assert_array_equal(value, np.outer([1, 2, 3], [4, 5, 6]))
    np.testing.assert_array_equal(of_x, weights @ [4, 5, 6])
    np.testing.assert_array_equal(of_y, [1, 2, 3] @ weights)


async def test_made_fresh_inside_a_body(run: Run) -> None:
    """Behaviour 51: each iteration has an array of its own: the sum of x^2 k + x over k < 5."""
    x = source(3.0)

    def body(k: Any, total: Any) -> Any:
        fresh = array(2).write(0, x * x * af.astype(k, "float64")).write(1, x)
        return k + 1, total + af.sum(fresh.stack())

    _, total = af.while_loop(lambda k, t: k < 5, body, (0, 0.0))
    once = gradients(total, x)
    assert await run((total, once, gradients(once, x))) == (105.0, 65.0, 20.0)


@pytest.mark.parametrize("taken", [True, False])
async def test_made_or_written_in_a_branch(run: Run, taken: bool) -> None:
    """Behaviour 51: made in either branch, and written in one of them alone."""
    pred = af.placeholder("bool", ())
    x = source(3.0)
    outer = array(2, element_shape=()).write(0, x)
    made = af.cond(pred, lambda: array(1).write(0, x * x), lambda: array(1).write(0, 5 * x))
    written = af.cond(pred, lambda: outer.write(1, x * x * x), lambda: outer)
    of_made, of_written, twice = await run(
        (
            gradients(made.read(0), x),
            gradients(af.sum(written.stack()), x),
            gradients(gradients(made.read(0), x), x),
        ),
        {pred: taken},
    )
    assert of_made == (6 if taken else 5)
    assert of_written == (28 if taken else 1)
    assert twice == (2 if taken else 0)


async def test_two_arrays_from_one(run: Run) -> None:
    """Behaviour 51: both go on from one state and write the same element; what reaches it is added up."""
    x = source(3.0)
    base = array(2, element_shape=()).write(0, x)
    left, right = base.write(1, x * x), base.write(1, 5 * x)
    total = af.sum(left.stack()) * 10 + af.sum(right.stack())
    assert await run(gradients(total, x)) == 10 * (1 + 6) + (1 + 5)


@WINDOWS
async def test_older_versions_in_a_loop(run: Run, window: int) -> None:
    """Behaviour 51: a loop hands on the array of the iteration before, too: it lacks the last element."""
    x = source([2.0, 3.0, 4.0, 5.0])

    def body(i: Any, newest: Any, before: Any) -> Any:
        return i + 1, newest.write(i, x[i] * x[i]), newest

    empty = array(4, element_shape=())
    _, newest, before = af.while_loop(lambda i, a, b: i < 4, body, (0, empty, empty), parallel_iterations=window)
    weights, others = np.array([1.0, 10.0, 100.0, 1000.0]), np.array([1.0, 1.0, 1.0, 7.0])
    last, both, older = await run(
        (
            before.stack(),
            gradients([newest.stack(), before.stack()], x, [weights, others]),
            gradients(before.read(2), x),
        )
    )
    np.testing.assert_array_equal(last, [4, 9, 16, 0])
    np.testing.assert_array_equal(both, 2 * np.array([2, 3, 4, 5]) * [2, 11, 101, 1000])
    np.testing.assert_array_equal(older, [0, 0, 8, 0])


@WINDOWS
async def test_written_and_read_by_each_iteration(run: Run, window: int) -> None:
    """Behaviour 51: Fibonacci-like, element i = x * (element i-1 + element i-2), with first and second derivative."""
    x = source(0.5)

    def body(i: Any, a: Any) -> Any:
        return i + 1, a.write(i, x * (a.read(i - 1) + a.read(i - 2)))

    start = array(8, element_shape=()).write(0, 1.0).write(1, x)
    _, a = af.while_loop(lambda i, a: i < 8, body, (2, start), parallel_iterations=window)
    polynomials = [np.polynomial.Polynomial([1.0]), np.polynomial.Polynomial([0.0, 1.0])]
    for _ in range(6):
        polynomials.append(polynomials[1] * (polynomials[-1] + polynomials[-2]))
    once = gradients(a.read(7), x)
    value, first, second = await run((a.read(7), once, gradients(once, x)))
    np.testing.assert_allclose(value, polynomials[7](0.5))
    np.testing.assert_allclose(first, polynomials[7].deriv()(0.5))
    np.testing.assert_allclose(second, polynomials[7].deriv(2)(0.5))


async def test_branches_in_loops(run: Run) -> None:
    """Behaviour 51: every second iteration writes, the others pass the array on; unwritten elements are zeros."""
    x = source([1.0, 2.0, 3.0, 4.0, 5.0])

    def body(i: Any, a: Any) -> Any:
        return i + 1, af.cond(i % 2 == 0, lambda: a.write(i, x[i] ** 2), lambda: a)

    _, a = af.while_loop(lambda i, a: i < 5, body, (0, array(5, element_shape=())))
    value, grad = await run((a.stack(), gradients(a.stack(), x, np.arange(1.0, 6.0))))
    np.testing.assert_array_equal(value, [1, 0, 9, 0, 25])
    np.testing.assert_array_equal(grad, [2, 0, 18, 0, 50])


async def test_loops_in_branches(run: Run) -> None:
    """Behaviour 51: a branch fills an array in a loop, or returns an empty one."""
    pred = af.placeholder("bool", ())
    x = source(3.0)

    def filled() -> Any:
        empty = array(4, element_shape=())
        return af.while_loop(lambda i, a: i < 4, lambda i, a: (i + 1, a.write(i, x * x)), (0, empty))[1]

    total = af.sum(af.cond(pred, filled, lambda: array(4, element_shape=())).stack())
    grad = gradients(total, x)
    assert await run((total, grad), {pred: True}) == (36.0, 24.0)
    assert await run((total, grad), {pred: False}) == (0.0, 0.0)


async def test_growing_elements(run: Run) -> None:
    """Behaviour 51: element k is x[:k + 1]; joined, they hold x[j] once for each k >= j."""
    x = source([1.0, 2.0, 3.0, 4.0])
    empty = array(4, element_shape=(None,))
    _, a = af.while_loop(lambda k, a: k < 4, lambda k, a: (k + 1, a.write(k, x[: k + 1])), (0, empty))
    value, grad = await run((a.concat(), gradients(a.concat() ** 2, x)))
    np.testing.assert_array_equal(value, [1, 1, 2, 1, 2, 3, 1, 2, 3, 4])
    np.testing.assert_array_equal(grad, 2 * np.array([1, 2, 3, 4]) * [4, 3, 2, 1])


async def test_concat_and_split_inside_a_loop(run: Run) -> None:
    """Behaviour 51: in each iteration a value is cut in two pieces, which are joined the other way round."""
    x = source([1.0, 2.0, 3.0, 4.0])

    def body(k: Any, value: Any) -> Any:
        pieces = array(2, element_shape=(None,)).split(value, af.stack([k, 4 - k]))
        turned = array(2, element_shape=(None,)).write(0, pieces.read(1)).write(1, pieces.read(0))
        return k + 1, af.concat([turned.concat() * value, value[:0]])

    _, value = af.while_loop(lambda k, v: k < 4, body, (1, x), shape_invariants=(None, (None,)))

    def plain(v: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        for k in (1, 2, 3):
            v = np.roll(v, -k) * v
        return v

    at, weights = np.array([1.0, 2.0, 3.0, 4.0]), np.array([1.0, -1.0, 2.0, 0.5])
    step = 1e-6
    slopes = [weights @ (plain(at + step * e) - plain(at - step * e)) / (2 * step) for e in np.eye(4)]
    found, grad = await run((value, gradients(value, x, weights)))
    np.testing.assert_allclose(found, plain(at))
    np.testing.assert_allclose(grad, slopes, rtol=1e-6)
