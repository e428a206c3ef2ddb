"""Critical sections, which one run is in at a time, and barriers."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import asyncflow as af
from tests.conftest import OpenSession
from tests.faults.kernels import INT, late, ticks

Run = Callable[..., Awaitable[Any]]


class Inside:
    """Coroutine ops that enter and leave a section; two at a time are noted."""

    def __init__(self) -> None:
        self.now = self.most = self.count = 0
        self.order: list[int] = []

        @af.op(outputs=INT, stateful=True)
        async def visit(x: Any) -> Any:
            self.now += 1
            self.most = max(self.most, self.now)
            self.order.append(int(x))
            await asyncio.sleep(0)
            self.now -= 1
            self.count += 1
            return x

        self.visit = visit


async def test_read_add_write_loses_nothing(session: af.Session, graph: af.Graph) -> None:
    """Behaviour 70: a program that may lose updates without a mutex, and without `atomic`, is exact."""
    lock, v, inside = af.Mutex(name="lock"), af.Variable(0, name="v"), Inside()
    with lock:
        write = v.assign(inside.visit(v.read()) + 1)
    await asyncio.gather(*(session.run(write) for _ in range(30)))
    assert await session.run(v) == 30
    assert (inside.most, inside.count) == (1, 30)


async def test_sections_of_one_run_follow_one_another(session: af.Session, graph: af.Graph) -> None:
    """Though only one node of the first is asked for: a section runs as a whole, or not at all."""
    lock, v = af.Mutex(name="lock"), af.Variable(0, name="v")
    with lock:
        first = v.read() + 0
        v.assign_add(10)
    with lock:
        second = v.read() + 0
    with lock:
        v.assign_add(100)
    assert await session.run((first, second)) == (0, 10)
    assert await session.run(v) == 10


async def test_a_section_in_a_loop(session: af.Session, graph: af.Graph) -> None:
    """Iterations enter one after the other, and so do iterations of parallel runs."""
    lock, v, inside = af.Mutex(name="lock"), af.Variable(0, name="v"), Inside()

    def body(i: Any) -> Any:
        with lock:
            v.assign(inside.visit(v.read()) + 1)
        return i + 1

    loop = af.while_loop(lambda i: i < 5, body, (0,))[0]
    assert await asyncio.gather(*(session.run(loop) for _ in range(4))) == [5] * 4
    assert await session.run(v) == 20
    assert inside.most == 1


async def test_a_section_on_a_branch(session: af.Session, graph: af.Graph) -> None:
    lock, v = af.Mutex(name="lock"), af.Variable(0, name="v")
    pred = af.placeholder("bool", ())

    def taken() -> Any:
        with lock:
            return v.assign_add(1) + 0

    y = af.cond(pred, taken, lambda: af.constant(-1))
    assert [await session.run(y, {pred: each}) for each in (True, False, True)] == [1, -1, 2]


@pytest.mark.parametrize("way", ["failure", "cancel", "timeout"])
async def test_a_run_that_ends_early_has_left(session: af.Session, graph: af.Graph, way: str) -> None:
    """Fault F18: in the section, or in line for it."""
    lock = af.Mutex(name="lock")
    gates = [asyncio.get_running_loop().create_future() for _ in range(2)]

    @af.op(outputs=INT)
    async def gate(k: Any) -> Any:
        await gates[int(k)]
        return k

    k = af.placeholder("int64", ())
    with lock:
        y = gate(k)
    holder = asyncio.ensure_future(session.run(y, {k: 0}, timeout=0.2 if way == "timeout" else None))
    await ticks(20)
    waiting = asyncio.ensure_future(session.run(y, {k: 1}))
    behind = asyncio.ensure_future(session.run(y, {k: 1}))
    await ticks(20)
    waiting.cancel()
    gates[1].set_result(None)
    if way == "failure":
        gates[0].set_exception(LookupError("no"))
    elif way == "cancel":
        holder.cancel()
    kinds = {"failure": af.KernelError, "cancel": asyncio.CancelledError, "timeout": af.DeadlineExceeded}
    with pytest.raises(kinds[way]):
        await holder
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await behind == 1


async def test_a_late_run_names_the_awaited_mutex(session: af.Session, graph: af.Graph) -> None:
    lock, queue = af.Mutex(name="lock"), af.FIFOQueue(1, INT, name="q")
    with lock:
        y = queue.dequeue()
    holder = asyncio.ensure_future(session.run(y))
    await ticks(50)
    assert re.search(r"lock/lock: (mutex 'lock' \(Mutex, 1 wait\)|Mutex\('lock'\))", await late(session, y))
    await queue.put(1)
    assert await holder == 1


async def test_a_mutex_in_a_container(open_session: OpenSession, graph: af.Graph) -> None:
    """Sections of sessions that share it exclude one another."""
    lock, inside = af.Mutex(name="lock", container="test"), Inside()
    x = af.placeholder("int64", ())
    with lock:
        y = inside.visit(x)
    async with open_session() as one, open_session() as two:
        await asyncio.gather(*((one, two)[k % 2].run(y, {x: k}) for k in range(10)))
    assert (inside.most, inside.count) == (1, 10)
    with pytest.raises(af.GraphError, match="already holds 'lock' as a Mutex"):
        async with open_session() as session:
            await session.run(af.FIFOQueue(1, INT, name="lock", container="test").size())
    af.reset_container("test")


def test_a_section_in_itself_is_refused(graph: af.Graph) -> None:
    lock, other = af.Mutex(name="lock"), af.Mutex(name="other")
    with lock, other, pytest.raises(af.GraphError, match="is inside another one of it"), lock:
        pass

    def body(i: Any) -> Any:
        with lock:
            return i + 1

    with lock, pytest.raises(af.GraphError, match="is inside another one of it"):
        af.while_loop(lambda i: i < 3, body, (0,))
    with pytest.raises(af.GraphError, match="Barrier: n is a whole number of at least 1; got 0"):
        af.Barrier(0)


async def test_a_barrier_lets_n_go_on_at_once(session: af.Session, graph: af.Graph) -> None:
    """The next n follow; a coroutine that gives up has not come."""
    barrier = af.Barrier(3, name="b")
    x = af.placeholder("int64", ())
    with af.control_dependencies([barrier.wait()]):
        y = x + 0
    tasks = [asyncio.ensure_future(session.run(y, {x: k})) for k in range(2)]
    await ticks(20)
    tasks.pop().cancel()
    await ticks(20)
    tasks += [asyncio.ensure_future(session.run(y, {x: k})) for k in (1, 2)]
    assert await asyncio.gather(*tasks) == [0, 1, 2]
    assert "Barrier" in await late(session, y, {x: 0})
    assert await session.run([af.Barrier(1, name="one").wait(), x + 1], {x: 4}) == [None, 5]


async def test_two_nodes_of_one_run_meet(session: af.Session, graph: af.Graph) -> None:
    barrier = af.Barrier(2, name="b")
    assert await session.run([barrier.wait(), barrier.wait()]) == [None, None]
