"""Fault F25-F28, F51 and F62: loops, threads, processes and signals around a session."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
from typing import Any

import pytest

import asyncflow as af
from asyncflow.compiler.pipeline import compile_plan
from asyncflow.runtime.calls import plans as plans_module
from asyncflow.runtime.session import session as session_module
from tests.faults import programs
from tests.faults.kernels import CoroutineGate, ThreadGate, ticks, until
from tests.patience import PATIENCE_S

# Starting a process takes as long as a hundred tests: those on the standard loop run by turns.
both_loops = pytest.mark.parametrize("loop", [pytest.param("asyncio", marks=pytest.mark.slow), "uvloop"])


@both_loops
def test_the_loop_ends_with_runs_in_flight(loop: str) -> None:
    """Fault F25: `asyncio.run` cancels them, and there is not a word on standard error."""
    status, out, err = programs.run(
        """
        def start(session):
            one = asyncio.ensure_future
            loop = endless()
            yield one(session.run(loop))
            yield one(session.run(CoroutineGate().op(1)))
            yield one(asyncio.wait_for(session.run(CoroutineGate().op(1)), 60))
            yield from (one(session.run(CoroutineGate().op(k) + loop)) for k in range(9))
            yield one(anext(session.stream(loop.node.attrs["body"].results[0])))

        async def main():
            global session, pending
            session = af.Session()
            with af.Graph():
                pending = list(start(session))
            await ticks(5)

        with asyncio.Runner(loop_factory=FACTORY) as runner:
            runner.run(main())
        asyncio.run(session.aclose())
        print(session.statistics().runs, all(each.cancelled() for each in pending))
        """,
        loop,
    )
    assert (status, out, err) == (0, "0 True\n", "")


@both_loops
def test_the_stream_thread_is_joined(loop: str) -> None:
    """Fault F25: leaving `async with` by a cancel ends the run and the threads."""
    status, out, err = programs.run(
        """
        async def main():
            gate = ThreadGate()
            async with af.Session() as session:
                with af.Graph():
                    pending = asyncio.ensure_future(session.run(gate.op(1)))
                pending.add_done_callback(asyncio.Future.exception)
                await until(gate.entered.is_set)
                asyncio.get_running_loop().call_soon(gate.opened.set)
                raise LookupError("the body fails")
        try:
            asyncio.Runner(loop_factory=FACTORY).run(main())
        except LookupError:
            print([t.name for t in threading.enumerate() if t.name.startswith("asyncflow")])
        """,
        loop,
    )
    assert (status, out) == (0, "[]\n"), err
    assert "never" not in err
    assert "destroyed" not in err


def _run_once(session: af.Session, fetch: af.Tensor) -> None:
    asyncio.run(session.run(fetch))


async def test_another_event_loop(session: af.Session, graph: af.Graph) -> None:
    """Fault F26: refused at once, from another thread's loop; the session's own goes on."""
    fetch = af.constant(1) + 1
    with pytest.raises(RuntimeError, match=r"bound to a different event loop.*run_threadsafe"):
        await asyncio.to_thread(_run_once, session, fetch)
    assert await session.run(fetch) == 2


def _close(session: af.Session) -> None:
    asyncio.run(session.aclose())


async def test_another_event_loop_closes_nothing(session: af.Session, graph: af.Graph) -> None:
    """Fault F26: its runs and threads belong to the loop that goes on."""
    fetch = af.constant(1) + 1
    assert await session.run(fetch) == 2
    with pytest.raises(RuntimeError, match=r"different event loop, which is still open: await its aclose\(\) there"):
        await asyncio.to_thread(_close, session)
    assert await session.run(fetch) == 2


def test_a_loop_that_was_closed_with_a_run_in_flight(graph: af.Graph) -> None:
    """Fault F26: nothing will ever end that run, so that closing elsewhere does not wait for it."""
    session, gate, loop = af.Session(), ThreadGate(), asyncio.new_event_loop()

    async def start() -> asyncio.Task[object]:
        task = asyncio.ensure_future(session.run(gate.op(1)))
        await until(gate.entered.is_set)
        return task

    task = loop.run_until_complete(start())
    loop.close()
    gate.opened.set()
    asyncio.run(session.aclose())
    assert session.statistics().runs == 0
    coroutine = task.get_coro()
    assert coroutine is not None
    coroutine.close()
    task._log_destroy_pending = False  # type: ignore[attr-defined]


async def test_run_threadsafe(session: af.Session, graph: af.Graph) -> None:
    """Fault F26: from any thread, with results, errors and cancellation."""
    x, gate = af.placeholder("int64", ()), CoroutineGate()
    fetch, waiting = x + 1, gate.op(x)
    futures = [await asyncio.to_thread(session.run_threadsafe, fetch, {x: k}) for k in range(20)]
    assert [await asyncio.wrap_future(future) for future in futures] == list(range(1, 21))
    failed = await asyncio.to_thread(session.run_threadsafe, fetch, {x: "no"})
    with pytest.raises(af.FeedError):
        await asyncio.wrap_future(failed)
    cancelled = await asyncio.to_thread(session.run_threadsafe, waiting, {x: 1})
    await until(lambda: gate.started)
    cancelled.cancel()
    await until(lambda: gate.cancelled)
    late = await asyncio.to_thread(lambda: session.run_threadsafe(waiting, {x: 2}, timeout=0.01).exception())
    assert isinstance(late, af.DeadlineExceeded)


async def test_run_threadsafe_where_it_cannot_work(graph: af.Graph) -> None:
    """Fault F26: before there is a loop, on the loop's own thread, and after close."""
    fetch = af.constant(1) + 1
    session = af.Session()
    with pytest.raises(RuntimeError, match="no event loop yet"):
        session.run_threadsafe(fetch)
    async with session:
        with pytest.raises(RuntimeError, match="await session"):
            session.run_threadsafe(fetch)
    with pytest.raises(af.SessionClosedError):
        session.run_threadsafe(fetch)


def test_run_threadsafe_after_its_loop(graph: af.Graph) -> None:
    """Fault F26: an error that says so, and no coroutine that is never awaited."""
    session, fetch = af.Session(), af.constant(1) + 1
    asyncio.run(session.run(fetch))
    with pytest.raises(af.SessionClosedError, match="event loop is closed"):
        session.run_threadsafe(fetch)
    asyncio.run(session.aclose())


@both_loops
def test_fork(loop: str) -> None:
    """Fault F27: the child's first use is an error and not a deadlock; parent and new sessions are fine."""
    status, out, err = programs.run(
        """
        warnings.simplefilter("ignore", DeprecationWarning)  # Python warns of a fork in a process with threads
        with af.Graph() as graph:
            gate = ThreadGate()
            gate.opened.set()
            fetch = gate.op(20) + 1

        async def use(session):
            return await session.run(fetch)

        async def fresh():
            async with af.Session(graph) as session:
                return await use(session)

        def child(session):
            try:
                asyncio.Runner(loop_factory=FACTORY).run(use(session))
            except af.SessionClosedError as error:
                print("child:", error, flush=True)
            print("child:", asyncio.Runner(loop_factory=FACTORY).run(fresh()), flush=True)

        async def main():
            async with af.Session(graph) as session:
                await use(session)
                pid = await asyncio.to_thread(fork, session)
                assert os.waitpid(pid, 0)[1] == 0
                print("parent:", await use(session))

        def fork(session):
            pid = os.fork()
            if pid == 0:
                child(session)
                os._exit(0)
            return pid

        asyncio.Runner(loop_factory=FACTORY).run(main())
        """,
        loop,
    )
    assert status == 0, err
    first, second, third = out.splitlines()
    assert first.startswith("child: this session belongs to the parent process")
    assert (second, third) == ("child: 21", "parent: 21")


@both_loops
def test_interrupt(loop: str) -> None:
    """Fault F28: Ctrl+C ends a run at once with KeyboardInterrupt; the program decides about its output."""
    source = """
        async def main(fetch):
            async with af.Session() as session:
                pending = asyncio.ensure_future(session.run(fetch))
                await ticks(20)
                print("running", flush=True)
                await pending

        with af.Graph():
            always = af.constant(True)
            without_kernels = af.while_loop(lambda i: always, lambda i: i, (0,))[0]
            fetches = [endless(), without_kernels, CoroutineGate().op(1)]
        for fetch in fetches:
            try:
                with asyncio.Runner(loop_factory=FACTORY) as runner:
                    runner.run(main(fetch))
            except KeyboardInterrupt:
                print("interrupted", flush=True)
    """
    with programs.started(source, loop) as process:
        assert process.stdout is not None
        for _ in range(3):
            assert process.stdout.readline() == "running\n"
            process.send_signal(signal.SIGINT)
            assert process.stdout.readline() == "interrupted\n"
        out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out, err) == (0, "", "")


@both_loops
def test_a_process_that_ignores_interrupts(loop: str) -> None:
    """Fault F66: as a job in the background does; its runs go on to their end."""
    source = """
        signal.signal(signal.SIGINT, signal.SIG_IGN)

        async def main():
            gate = CoroutineGate()
            async with af.Session() as session:
                with af.Graph():
                    pending = asyncio.ensure_future(session.run(gate.op(20) + 1))
                await until(lambda: gate.started)
                print("running", flush=True)
                await asyncio.to_thread(sys.stdin.readline)
                gate.opened.set()
                print(await pending)

        with asyncio.Runner(loop_factory=FACTORY) as runner:
            runner.run(main())
    """
    with programs.started(source, loop) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate("go on\n", timeout=PATIENCE_S)
    assert (process.returncode, out, err) == (0, "21\n", "")


@both_loops
def test_interrupted_twice(loop: str) -> None:
    """Fault F66: the second one, while a run waits for a kernel on a thread, leaves nothing behind either."""
    source = """
        gate = ThreadGate()

        async def main():
            async with af.Session() as session:
                with af.Graph():
                    pending = asyncio.ensure_future(session.run(gate.op(1)))
                await until(gate.entered.is_set)
                main = asyncio.current_task()
                watching = asyncio.ensure_future(until(main.cancelling))
                watching.add_done_callback(lambda _: print("cancelled", flush=True))
                print("running", flush=True)
                await pending

        with asyncio.Runner(loop_factory=FACTORY) as runner:
            try:
                runner.run(main())
            except KeyboardInterrupt:
                print("interrupted", flush=True)
                gate.opened.set()
    """
    with programs.started(source, loop) as process:
        assert process.stdout is not None
        for said in ("running\n", "cancelled\n"):
            assert process.stdout.readline() == said
            process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out) == (0, "interrupted\n"), err
    assert "never" not in err
    assert "Fatal" not in err


async def test_close_lets_runs_end(graph: af.Graph) -> None:
    """Fault F51: leaving `async with` waits for the runs in flight."""
    gate = CoroutineGate()
    async with af.Session(graph) as session:
        run = asyncio.ensure_future(session.run(gate.op(4)))
        await until(lambda: gate.started)
        asyncio.get_running_loop().call_soon(gate.opened.set)
    assert run.done()
    assert await run == 4


async def test_close_stops_runs_after_the_grace(graph: af.Graph) -> None:
    """Fault F51: then they fail with `SessionClosedError`, and new ones are refused meanwhile."""
    gate, session = CoroutineGate(), af.Session(graph)
    run = asyncio.ensure_future(session.run(gate.op(4)))
    await until(lambda: gate.started)
    closing = asyncio.ensure_future(session.aclose(grace_s=0.01))
    await ticks(1)
    with pytest.raises(af.SessionClosedError):
        await session.run(af.constant(1))
    await closing
    with pytest.raises(af.SessionClosedError, match="closed while the run was in flight"):
        await run
    assert gate.cancelled == [4]


async def test_close_with_an_abandoned_stream(graph: af.Graph) -> None:
    """Fault F51: a consumer that holds its stream and does nothing does not hold up the close."""
    (result,) = af.while_loop(lambda i: i < 1000, lambda i: i + 1, (0,))
    session = af.Session(graph)
    stream = session.stream(result.node.attrs["body"].results[0])
    assert await anext(stream) == 1
    await session.aclose(grace_s=0.01)
    with pytest.raises(af.SessionClosedError):
        async for _ in stream:
            pass


async def test_close_twice_and_use_after_close(graph: af.Graph) -> None:
    """Fault F51: idempotent; every use afterwards is refused."""
    fetch = af.constant(1) + 1
    session = af.Session(graph)
    async with session:
        await session.run(fetch)
    await session.aclose()
    await session.aclose(grace_s=0)
    for use in (session.run(fetch), session.__aenter__(), anext(session.stream(fetch))):
        with pytest.raises(af.SessionClosedError, match="make a new one"):
            await use
    assert session.statistics().runs == 0


async def test_a_cancelled_close_still_closes(graph: af.Graph) -> None:
    """Fault F51: cancelling `aclose` cuts the grace short, and nothing is left."""
    gate, session = CoroutineGate(), af.Session(graph)
    run = asyncio.ensure_future(session.run(gate.op(4)))
    await until(lambda: gate.started)
    closing = asyncio.ensure_future(session.aclose(grace_s=60))
    await ticks(2)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    with pytest.raises(af.SessionClosedError):
        await run
    assert session.statistics().runs == 0


async def test_close_while_a_large_graph_is_compiled(graph: af.Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault F51: the run that waited for its plan does not start in a closed session."""
    compiling, go_on = threading.Event(), threading.Event()

    def held(*args: Any, **options: Any) -> Any:
        compiling.set()
        assert go_on.wait(PATIENCE_S)
        return compile_plan(*args, **options)

    monkeypatch.setattr(session_module, "compile_plan", held)
    monkeypatch.setattr(plans_module, "_COMPILED_INLINE", 0)
    session = af.Session(graph)
    run = asyncio.ensure_future(session.run(af.constant(0) + 1))
    await until(compiling.is_set)
    await session.aclose()
    go_on.set()
    with pytest.raises(af.SessionClosedError):
        await run


@pytest.mark.parametrize("collector", [True, False], ids=["gc", "no gc"])
def test_a_session_dropped_without_close(collector: bool) -> None:
    """Fault F62: a ResourceWarning; the thread ends, without the garbage collector's help."""
    with af.Graph() as graph:
        gate = ThreadGate()
        gate.opened.set()
        fetch = gate.op(1)

    async def use() -> None:
        session = af.Session(graph)
        assert await session.run(fetch) == 1

    gc.collect()
    if not collector:
        gc.disable()
    try:
        with pytest.warns(ResourceWarning, match="dropped without close; use `async with`"):
            asyncio.run(use())
    finally:
        gc.enable()
    for thread in threading.enumerate():
        if thread.name.startswith("asyncflow"):
            thread.join(timeout=PATIENCE_S)
            assert not thread.is_alive()


def test_a_session_never_used_needs_no_close() -> None:
    """Fault F62: it holds nothing yet."""
    af.Session()


async def test_a_coroutine_thrown_away_stops_its_run(session: af.Session, graph: af.Graph) -> None:
    """Fault F62: the run cannot be awaited any more, so it ends by itself."""
    gate = CoroutineGate()
    coroutine = session.run(gate.op(1))
    coroutine.send(None)
    assert session.statistics().runs == 1
    coroutine.close()
    await until(lambda: session.statistics().runs == 0)
