"""Fault F1-F5, F7-F9 and F16: a kernel fails."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.errors import TooManyIterations
from asyncflow.graph.building.build import apply
from asyncflow.graph.op import OPAQUE, Op
from tests.conftest import assert_baseline
from tests.faults.kernels import INT, CoroutineGate, ThreadGate, in_flight, raising, ticks, until
from tests.runtime.hand_written import counting_loop

Run = Callable[..., Awaitable[Any]]


async def test_one_of_32_parallel_iterations(session: af.Session, graph: af.Graph) -> None:
    """Fault F1: the error names node and iteration; siblings are cancelled and their results dropped."""
    gate = CoroutineGate()
    after: list[int] = []

    @af.op(outputs=INT)
    async def fragile(i: Any) -> Any:
        if i != 7:
            return i
        await until(lambda: len(gate.started) == 31)
        raise LookupError("no seven")

    @af.op(outputs=())
    def note(x: Any) -> None:
        after.append(int(x))

    def body(i: af.Tensor, last: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
        waited = af.cond(af.equal(i, 7), lambda: fragile(i), lambda: gate.op(i))
        with af.control_dependencies([note(waited)]):
            waited = af.identity(waited)
        return i + 1, waited

    _, last = af.while_loop(lambda i, _: i < 100, body, (0, 0), name="busy")
    with pytest.raises(af.KernelError, match="LookupError: no seven") as caught:
        await session.run(last)
    assert (caught.value.op, caught.value.tag) == ("fragile", "busy/7")
    assert isinstance(caught.value.__cause__, LookupError)
    others = [i for i in range(32) if i != 7]
    assert (gate.started, gate.cancelled, after) == (others, others, [])
    assert_baseline(session)
    _, total = af.while_loop(lambda i, _: i < 100, lambda i, t: (i + 1, t + i), (0, 0))
    assert await session.run(total) == 4950


async def test_kernels_in_flight_are_waited_for(session: af.Session, graph: af.Graph) -> None:
    """Fault F1: a kernel that has started ends before the error is raised; what would follow it does not start."""
    gate, started = ThreadGate(), []

    @af.op(outputs=INT)
    def follower(x: Any) -> Any:
        started.append(x)
        return x

    @af.op(outputs=INT)
    async def fails(x: Any) -> Any:
        await until(gate.entered.is_set)
        raise LookupError

    fetches = [follower(gate.op(1)), fails(2)]
    async with in_flight(session.run(fetches), gate.entered.is_set) as task:
        await ticks(50)
        assert not task.done()
        gate.opened.set()
        with pytest.raises(af.KernelError, match="fails"):
            await task
    assert started == []


@pytest.mark.parametrize("seed", range(5))
async def test_two_failures_in_one_tick(graph: af.Graph, seed: int) -> None:
    """Fault F2: the one of the earlier node is raised, the other becomes its note, whatever order they ran in."""
    gate = CoroutineGate()

    @af.op(outputs=INT)
    async def fails(x: Any) -> Any:
        await gate._wait(x)
        raise ValueError(f"number {x}")

    first, second = fails(1), fails(2)
    async with af.Session(graph, debug=True, seed=seed) as session:
        async with in_flight(session.run([second, first]), lambda: len(gate.started) == 2) as task:
            gate.opened.set()
            with pytest.raises(af.KernelError, match="number 1") as caught:
                await task
    (note,) = caught.value.__notes__
    assert note.startswith("also failed: KernelError: ValueError: number 2")


async def test_a_later_failure_of_an_earlier_node(session: af.Session, graph: af.Graph) -> None:
    """Fault F2: ticks count before nodes: what fails while the run is being stopped is a note."""
    waiting = asyncio.Event()

    @af.op(outputs=INT)
    async def clumsy(x: Any) -> Any:
        try:
            waiting.set()
            await asyncio.Event().wait()
        finally:
            await ticks(3)
            raise OSError("while cleaning up")

    @af.op(outputs=INT)
    async def fails(x: Any) -> Any:
        await waiting.wait()
        raise LookupError("the cause")

    fetches = [clumsy(1), fails(2)]
    with pytest.raises(af.KernelError, match="the cause") as caught:
        await session.run(fetches)
    assert caught.value.__notes__ == ["also failed: KernelError: OSError: while cleaning up"]


@pytest.mark.parametrize("on_thread", [False, True], ids=["inline", "thread"])
@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
async def test_exceptions_meant_for_the_interpreter(
    session: af.Session, graph: af.Graph, error: type[BaseException], on_thread: bool
) -> None:
    """Fault F3: raised unchanged in the awaiting task; the event loop and the stream thread go on."""
    failing = raising(lambda: error("from a kernel"), on_thread=on_thread)
    with pytest.raises(error, match="from a kernel") as caught:
        await session.run(failing(1))
    assert f"built at {__file__}:" in caught.value.__notes__[0]
    gate = ThreadGate()
    gate.opened.set()
    assert await session.run(gate.op(3)) == 3


class _NoException(BaseException):
    """An error of a library that does not want it to be caught."""


ODD_ERRORS = (
    GeneratorExit,
    StopIteration,
    StopAsyncIteration,
    asyncio.CancelledError,
    KeyboardInterrupt,
    SystemExit,
    _NoException,
)


def _plain(error: BaseException, cost: float) -> Any:
    @af.op(outputs=INT, name="odd", cost=cost)
    def odd(x: Any) -> Any:
        raise error

    return odd


def _coroutine(error: BaseException, cost: float) -> Any:
    @af.op(outputs=INT, name="odd")
    async def odd(x: Any) -> Any:
        await asyncio.sleep(cost)
        raise error

    return odd


def _shared(error: BaseException, cost: float) -> Any:
    @af.op(outputs=INT, name="odd", batch=af.Batch())
    def odd(x: Any) -> Any:
        raise error

    return odd


def _vertices(error: BaseException, cost: float) -> Any:
    odd = _plain(error, cost)

    @af.vertex_function(state=INT, children=1)
    def cell(v: af.Vertex) -> None:
        v.scatter(odd(v.gather(0)))

    return af.vertex_map(cell, af.InputGraph.chain([2]), share=True).roots


def _from_input(error: BaseException, cost: float) -> Any:
    async def elements() -> AsyncIterator[int]:
        raise error
        yield 1

    return lambda x: af.from_async_generator(elements, INT, name="odd").next(name="odd")


WAYS: dict[str, Callable[[BaseException], af.Tensor]] = {
    "inline": lambda error: _plain(error, 1.0)(1),
    "thread": lambda error: _plain(error, 1e12)(1),
    "coroutine": lambda error: _coroutine(error, 0.0)(1),
    "map_fn": lambda error: af.map_fn(_plain(error, 1.0), af.constant([1, 2])),
    "vmap": lambda error: af.vmap(_plain(error, 1e12))(af.constant([1, 2])),
    "map_fn of coroutines": lambda error: af.map_fn(_coroutine(error, 0.0), af.constant([1, 2])),
    "loop": lambda error: af.while_loop(lambda i: i < 3, _plain(error, 1.0), 0),
    "shared": lambda error: _shared(error, 1.0)(1),
    "batched": lambda error: af.batched(_plain(error, 1.0))(af.constant(1)),
    "pool": lambda error: af.while_loop(lambda i: i < 3, _plain(error, 1.0), 0, pool=af.Pool(4)),
    "pool on a thread": lambda error: af.while_loop(lambda i: i < 3, _plain(error, 1e12), 0, pool=af.Pool(4)),
    "shared vertices": lambda error: _vertices(error, 1.0),
    "input": lambda error: _from_input(error, 1.0)(1),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("error", ODD_ERRORS)
@pytest.mark.filterwarnings("ignore:.* takes one row:UserWarning")
async def test_whatever_a_function_raises_is_named(
    session: af.Session, graph: af.Graph, error: type[BaseException], way: str
) -> None:
    """Fault F3, F4: the error says which line, the event loop goes on, and so does the session."""
    failing, fine = WAYS[way](error("odd")), af.constant(1) + 1
    stays = error in (KeyboardInterrupt, SystemExit, _NoException) and way != "input"
    with pytest.raises(error if stays else af.KernelError) as caught:
        await session.run(failing)
    told = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    assert "odd" in told
    assert f"built at {__file__}:" in told
    assert await session.run(fine) == 2
    assert session.statistics().runs == 0


@pytest.mark.parametrize("error", [GeneratorExit, asyncio.CancelledError, StopIteration])
async def test_whatever_an_observer_raises_changes_no_run(
    session: af.Session, graph: af.Graph, error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    """Fault F3."""

    def raises(self: object, *args: object) -> None:
        raise error("odd")

    methods = dict.fromkeys(("run_began", "run_ended", "batch_ended", "pool_stepped"), raises)
    session.observe(type("Observer", (), methods)())
    assert await session.run(_coroutine_one()) == 1
    assert "an observer of runs raised" in caplog.text


def _coroutine_one() -> af.Tensor:
    @af.op(outputs=INT)
    async def one() -> Any:
        return 1

    return one()


async def test_a_coroutine_that_is_cancelled_before_it_begins(session: af.Session, graph: af.Graph) -> None:
    """Fault F3: it is closed, so Python does not say that it was never awaited."""
    begun: list[int] = []

    @af.op(outputs=INT, name="late")
    async def late(x: Any) -> Any:
        begun.append(1)
        return x

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(af.KernelError, match="at once"):
            await session.run([late(1), raising(lambda: LookupError("at once"))(1)])
        gc.collect()
    assert not begun


async def test_a_coroutine_that_raises_cancelled_error(run: Run, graph: af.Graph) -> None:
    """Fault F4: a failure of the node, not a cancellation of the run."""

    @af.op(outputs=INT)
    async def quits(x: Any) -> Any:
        raise asyncio.CancelledError("by itself")

    with pytest.raises(af.KernelError, match="CancelledError") as caught:
        await run(quits(1))
    assert caught.value.op == "quits"
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


@pytest.mark.parametrize("on_thread", [False, True], ids=["inline", "thread"])
async def test_a_kernel_that_raises_cancelled_error(run: Run, graph: af.Graph, on_thread: bool) -> None:
    """Fault F4: the same for a plain function."""
    with pytest.raises(af.KernelError, match="CancelledError: odd"):
        await run(raising(lambda: asyncio.CancelledError("odd"), on_thread=on_thread)(1))


async def test_the_path_of_frames(run: Run, graph: af.Graph) -> None:
    """Fault F5: inside nested loops inside a branch, the error says which iterations, and where it was built."""

    @af.op(outputs=INT)
    def fragile(i: Any, j: Any) -> Any:
        if (i, j) == (3, 7):
            raise LookupError("here")
        return j + 1

    def outer(i: af.Tensor) -> af.Tensor:
        def inner(j: af.Tensor) -> af.Tensor:
            return af.cond(j >= 0, lambda: fragile(i, j), lambda: j)

        (steps,) = af.while_loop(lambda j: j < 10, inner, (0,), name="inner")
        return i + 1 + steps * 0

    result = af.cond(af.constant(True), lambda: af.while_loop(lambda i: i < 5, outer, (0,), name="outer")[0], lambda: 0)
    with pytest.raises(af.KernelError) as caught:
        await run(result)
    error = caught.value
    assert error.tag.replace("cond/true_fn/", "") == "outer/3/inner/7"
    assert f"in iteration {error.tag}" in str(error)
    assert error.inputs == ("int64[]", "int64[]")
    assert error.location.file == __file__


def _liar(declared: af.Spec, value: Any, *, single: bool = True) -> af.Tensor:
    """A built-in op, so to speak, whose kernel does not do as its shape rule says."""
    spec = declared if single else (declared, declared)
    op = Op("liar", lambda x: spec, lambda xp: lambda x: value, traits=OPAQUE)
    return apply(op, af.constant(np.float32(1)))[0]


WRONG_RESULTS = {
    "shape": (np.zeros(3, np.float32), True, r"output 0 is float32\[3\]; declared float32\[2\]"),
    "dtype": (np.zeros(2, np.float64), True, r"output 0 is float64\[2\]; declared float32\[2\]"),
    "kind": ([0.0, 0.0], True, r"output 0 is a list, not an array; declared float32\[2\]"),
    "count": ((np.zeros(2, np.float32),), False, r"returned 1 values for 2 outputs"),
}


@pytest.mark.parametrize("wrong", WRONG_RESULTS)
async def test_results_are_held_against_the_declaration(run: Run, graph: af.Graph, wrong: str) -> None:
    """Fault F7, F8: in debug mode a kernel that breaks its op's shape rule is named with both sides."""
    value, single, message = WRONG_RESULTS[wrong]
    with pytest.raises(af.KernelError, match=message) as caught:
        await run(_liar(af.spec("float32", (2,)), value, single=single))
    assert isinstance(caught.value.__cause__, TypeError)
    assert caught.value.op == "liar"


USER_MISTAKES = {
    "shape": (af.spec("float32", (2,)), np.zeros(3, np.float32), "shape"),
    "dtype": (af.spec("float32", (2,)), np.zeros(2, np.int64), "dtype int64"),
    "nothing": (af.spec("float32", (2,)), None, "None"),
    "text": (af.spec("float32", (2,)), "abc", "'abc'"),
    "too few": ((INT, INT), (1,), "returned 1 value.* 2 are declared"),
    "too many": ((INT, INT), (1, 2, 3), "returned 3 values.* 2 are declared"),
}


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("mistake", USER_MISTAKES)
async def test_results_of_user_ops_are_always_checked(graph: af.Graph, mistake: str, debug: bool) -> None:
    """Fault F7, F8: a user's op that returns something else than it declares, in debug mode or not."""
    outputs, returned, message = USER_MISTAKES[mistake]
    mistaken = af.op(outputs=outputs, name="mistaken")(lambda x: returned)
    async with af.Session(graph, debug=debug) as session:
        with pytest.raises(af.KernelError, match=message) as caught:
            await session.run(mistaken(1))
    assert isinstance(caught.value.__cause__, TypeError | ValueError)


@pytest.mark.parametrize(("bad", "found"), [(np.nan, "1 NaN and 0 infinite"), (np.inf, "0 NaN and 1 infinite")])
async def test_check_numerics_names_the_first_node(graph: af.Graph, bad: float, found: str) -> None:
    """Fault F9: of the nodes that see NaN or infinity, the check names the first one; without the check it is a
    value.
    """
    x = af.placeholder("float32", (2,))
    doubled = (x - 1) * 2
    feeds = {x: np.array([bad, 1], np.float32)}
    async with af.Session(graph, check_numerics=True) as session:
        with pytest.raises(af.KernelError, match=f"check_numerics: output 0 has {found}") as caught:
            await session.run(doubled, feeds)
        assert caught.value.op == "subtract"
        np.testing.assert_array_equal(await session.run(doubled, {x: np.ones(2, np.float32)}), [0, 0])
    async with af.Session(graph) as session:
        np.testing.assert_array_equal(await session.run(doubled, feeds), [bad, 0])


async def test_max_iterations(graph: af.Graph, regions: bool) -> None:
    """Fault F16: a loop that would not end stops at the session's limit, and is named."""
    (endless,) = af.while_loop(lambda i: i >= 0, lambda i: i + 1, (0,), name="endless")
    (short,) = af.while_loop(lambda i: i < 100, lambda i: i + 1, (0,))
    async with af.Session(graph, debug=True, max_iterations=100, regions=regions) as session:
        with pytest.raises(af.KernelError, match="loop endless reached max_iterations=100") as caught:
            await session.run(endless)
        assert (caught.value.tag, caught.value.node, caught.value.op) == ("endless/100", "endless", "while")
        assert_baseline(session)
        assert await session.run(short) == 100


async def test_a_loop_written_by_hand_has_no_node_but_its_back_edges(graph: af.Graph) -> None:
    """Fault F16: the error names the back edges, whatever their names are."""
    with af.name_scope("endless"):
        counting_loop(10**9, frame="endless")
    (back_edge,) = (node for node in graph.nodes if node.op.name == "next_iteration")
    assert back_edge.name == "endless/next_iteration"
    async with af.Session(graph, max_iterations=5) as session:
        with pytest.raises(af.KernelError, match="loop endless reached max_iterations=5") as caught:
            await session.run(graph.nodes[-1].outputs[0])
    assert (caught.value.tag, caught.value.node, caught.value.op) == ("endless/5", back_edge.name, "next_iteration")
    assert isinstance(caught.value.__cause__, TooManyIterations)


async def test_there_is_no_limit_by_default(run: Run, graph: af.Graph) -> None:
    """Fault F16: None is off."""
    (long,) = af.while_loop(lambda i: i < 20_000, lambda i: i + 1, (0,))
    assert await run(long) == 20_000


async def test_an_error_that_cannot_tell_its_message_keeps_its_place(run: Any, graph: af.Graph) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    @af.op(outputs=af.spec("float64", ()))
    def fails(x: Any) -> Any:
        raise Mute

    with pytest.raises(af.KernelError, match=r"Mute \(its message cannot be read: RuntimeError\)") as caught:
        await run(fails(af.constant(1.0)))
    assert caught.value.node == "fails"
