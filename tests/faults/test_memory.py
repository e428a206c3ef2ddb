"""Fault F30 and the memory part of F62: the limit of a device, and when buffers are freed."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from tests.conftest import OpenSession, assert_baseline
from tests.faults.kernels import LARGE, VECTOR, CoroutineGate, double_vector, in_flight
from tests.others import held_bytes

FEW = np.ones(100, np.float32)


async def test_out_of_memory(graph: af.Graph) -> None:
    """Fault F30: requested, held and limit in bytes, and the largest live values; the session stays usable."""
    x = af.placeholder("float32", (None,))
    parts = [x * k for k in range(2, 5)]
    async with af.Session(graph, debug=True, memory_limit=1_000_000) as session:
        with pytest.raises(af.OutOfMemoryError) as caught:
            await session.run(parts, {x: LARGE})
        error = caught.value
        assert isinstance(error, MemoryError)
        assert isinstance(error, af.KernelError)
        assert (error.requested, error.used, error.limit) == (400_000, 1_200_000, 1_000_000)
        assert error.op == "multiply"
        assert "largest now: multiply" in str(error)
        del caught, error
        assert_baseline(session)
        assert session.statistics().used_bytes == {"cpu:0": 0}
        (one,) = await session.run(parts[:1], {x: LARGE})
        np.testing.assert_array_equal(one, LARGE * 2)


async def test_other_runs_go_on(graph: af.Graph) -> None:
    """Fault F30: only the run whose value passed the limit fails."""
    gate = CoroutineGate()
    x, ticket = af.placeholder("float32", (None,)), af.placeholder("int64", ())
    held = x * 2
    with af.control_dependencies([held.node]):
        opened = gate.op(ticket)  # by then, what the run holds is there
    with af.control_dependencies([opened.node]):
        total = af.sum(held) + af.sum(x)
    async with af.Session(graph, memory_limit=1_000_000) as session:
        waiting = session.run(total, {x: LARGE, ticket: 1})
        async with in_flight(waiting, lambda: gate.started) as task:
            with pytest.raises(af.OutOfMemoryError):
                await session.run([x * 3, x * 4, x * 5], {x: LARGE})
            gate.opened.set()
            assert await task == 300_000


async def test_memory_error_of_a_kernel(session: af.Session, graph: af.Graph) -> None:
    """Fault F30: what the allocator itself refuses is the same kind of error, with its node."""

    @af.op(outputs=VECTOR)
    def greedy(x: Any) -> Any:
        raise MemoryError("no 8 EiB")

    x = af.placeholder("float32", (None,))
    with pytest.raises(af.OutOfMemoryError, match="no 8 EiB") as caught:
        await session.run(greedy(x), {x: FEW})
    assert caught.value.op == "greedy"


@pytest.mark.usefixtures("no_collector")
class TestBuffersAreFreedAtOnce:
    """Fault F62: no reference cycle holds a buffer once a run has ended, however it ended."""

    async def test_after_success(self, session: af.Session, graph: af.Graph) -> None:
        """Fault F62: with loops, captures and a stream thread."""
        x, doubled = double_vector()

        @af.op(outputs=VECTOR, cost=1e12)
        def heavy(v: Any) -> Any:
            return v + 1

        _, grown = af.while_loop(lambda i, _: i < 3, lambda i, v: (i + 1, heavy(v) + doubled), (0, x))
        result = await session.run([doubled, grown], {x: LARGE})
        assert await held_bytes(session) == 2 * LARGE.nbytes
        del result
        assert await held_bytes(session) == 0

    @pytest.mark.parametrize("cost", [None, 1e12], ids=["inline", "thread"])
    async def test_after_a_failure(self, session: af.Session, graph: af.Graph, cost: float | None) -> None:
        """Fault F62: the error keeps the failing kernel's inputs alive, and takes them with it."""
        x, doubled = double_vector()

        @af.op(outputs=VECTOR, cost=cost)
        def failing(v: Any) -> Any:
            raise LookupError

        _, result = af.while_loop(lambda i, _: i < 3, lambda i, v: (i + 1, failing(v)), (0, doubled))
        with pytest.raises(af.KernelError) as caught:
            await session.run(result, {x: LARGE})
        del caught
        assert await held_bytes(session) == 0

    async def test_after_a_failing_coroutine(self, session: af.Session, graph: af.Graph) -> None:
        """Fault F62: the same for a task's error."""
        x, doubled = double_vector()

        @af.op(outputs=VECTOR)
        async def failing(v: Any) -> Any:
            raise LookupError

        with pytest.raises(af.KernelError) as caught:
            await session.run(failing(doubled), {x: LARGE})
        del caught
        assert await held_bytes(session) == 0

    async def test_after_a_cancel_in_a_loop(self, session: af.Session, graph: af.Graph) -> None:
        """Fault F62: live iterations, parked tokens and inner frames included."""
        gate = CoroutineGate()
        x, doubled = double_vector()

        def outer(i: Any, v: Any) -> Any:
            _, inner = af.while_loop(lambda j, _: j < 2, lambda j, w: (j + gate.op(j) * 0 + 1, w + doubled), (0, v))
            return i + 1, inner * 1

        _, result = af.while_loop(lambda i, _: i < 3, outer, (0, x), parallel_iterations=2)
        async with in_flight(session.run(result, {x: LARGE}), lambda: gate.started) as task:
            assert await held_bytes(session) > 0
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        del task
        assert await held_bytes(session) == 0

    async def test_after_a_deadline(self, session: af.Session, graph: af.Graph) -> None:
        """Fault F62: the same when time runs out."""
        x, doubled = double_vector()
        _, result = af.while_loop(lambda i, _: i >= 0, lambda i, v: (i + 1, v * 1), (0, doubled))
        with pytest.raises(af.DeadlineExceeded) as caught:
            await session.run(result, {x: LARGE}, timeout=0.02)
        del caught
        assert await held_bytes(session) == 0

    async def test_after_a_stream_left_early(self, session: af.Session, graph: af.Graph) -> None:
        """Fault F62: items that were not taken are freed too."""
        x, doubled = double_vector()
        seen: list[af.Tensor] = []

        def body(i: Any, v: Any) -> Any:
            seen.append(v + doubled)
            return i + 1, seen[0]

        af.while_loop(lambda i, _: i < 50, body, (0, x), parallel_iterations=4)
        stream = session.stream(seen[0], {x: LARGE})
        item = await anext(stream)
        await stream.aclose()
        del item, stream
        assert await held_bytes(session) == 0


MIB = 1 << 20


def saves_small(count: int) -> tuple[af.Tensor, af.Tensor]:
    """A loop that saves two arrays of 4,000 bytes an iteration."""
    x = af.placeholder("float64", (500,))
    _, y = af.while_loop(lambda i, _: i < count, lambda i, v: (i + 1, af.sin(v) * v), (0, x))
    return x, af.gradients(af.sum(y), x)


def writes_small(count: int) -> tuple[af.Tensor, af.Tensor]:
    """A loop that writes an array of 4,000 bytes an iteration."""
    x = af.placeholder("float64", (500,))
    rows = af.TensorArray("float64", dynamic_size=True, element_shape=(500,))
    _, rows = af.while_loop(
        lambda i, _: i < count, lambda i, r: (i + 1, r.write(i, x * af.astype(i, x.dtype))), (0, rows)
    )
    return x, rows.read(count - 1)


def fills_a_block(count: int) -> tuple[af.Tensor, af.Tensor]:
    """A loop that writes to an array of known size, which makes room for all at once."""
    x = af.placeholder("float64", (500,))
    rows = af.TensorArray("float64", size=count)
    _, rows = af.while_loop(lambda i, _: i < count, lambda i, r: (i + 1, r.write(i, x * 2.0)), (0, rows))
    return x, rows.read(count - 1)


def writes_scalars(count: int) -> tuple[af.Tensor, af.Tensor]:
    """A loop that writes numbers, whose values are a small part of the memory."""
    x = af.placeholder("float64", (500,))
    rows = af.TensorArray("float64", dynamic_size=True, element_shape=())
    _, rows = af.while_loop(lambda i, _: i < 16 * count, lambda i, r: (i + 1, r.write(i, x[0])), (0, rows))
    return x, rows.read(0)


@pytest.mark.parametrize("program", [saves_small, writes_small, fills_a_block, writes_scalars])
async def test_small_values_of_stores_count(open_session: OpenSession, program: Any) -> None:
    """The limit holds within 1 MiB, and what fits runs; without one nothing is watched."""
    with af.Graph() as graph:
        many = program(6000)
    with af.Graph() as fewer:
        few = program(400)
    x = np.full(500, 0.5)
    async with open_session(graph, memory_limit=2 * MIB, debug=False, saved_values="keep") as session:
        with pytest.raises(af.OutOfMemoryError, match=r"largest now: (saved_values|tensor_array|while)") as caught:
            await session.run(many[1], {many[0]: x})
        assert caught.value.limit < caught.value.used < 3 * MIB or program is fills_a_block
        del caught
        gc.collect()
        assert session.statistics().used_bytes["cpu:0"] == 0
    async with open_session(fewer, memory_limit=4 * MIB, debug=False) as session:
        result = await session.run(few[1], {few[0]: x})
        assert np.all(np.isfinite(result))


async def test_values_read_for_the_last_time_or_saved_twice_count_no_more(open_session: OpenSession) -> None:
    """A store is looked through before its limit counts as passed."""
    with af.Graph() as graph:
        x = af.placeholder("float64", (500,))
        rows = af.TensorArray("float64", dynamic_size=True, element_shape=(500,))

        def body(i: af.Tensor, total: af.Tensor, rows: Any) -> Any:
            rows = rows.write(i, x * 2.0)
            return i + 1, total + rows.read(i), rows

        _, total, _ = af.while_loop(lambda i, *_: i < 1500, body, (0, x, rows))
    async with open_session(graph, memory_limit=2 * MIB, debug=False, saved_values="keep") as session:
        np.testing.assert_array_equal(await session.run(total, {x: np.ones(500)}), np.full(500, 3001.0))
