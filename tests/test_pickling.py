"""98, F71: errors cross to other processes whole; graphs and sessions say what to send in their place."""

from __future__ import annotations

import asyncio
import copy
import inspect
import multiprocessing
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow import errors
from asyncflow.errors import AsyncflowError, KernelError, OutOfMemoryError, SourceLocation
from asyncflow.pickling import Unavailable
from tests.patience import PATIENCE_S

WHERE: dict[str, Any] = {
    "node": "add_3",
    "op": "add",
    "tag": "loop/3",
    "device": "cpu:0",
    "inputs": ("float32[3]",),
    "location": SourceLocation("model.py", 12, "build"),
}

SPECIAL: dict[type[AsyncflowError], Callable[[], AsyncflowError]] = {
    KernelError: lambda: KernelError("it broke", **WHERE),
    OutOfMemoryError: lambda: OutOfMemoryError("too much", requested=3, used=2, limit=1, **WHERE),
}
"""Constructors of errors that take more than a message."""


class Foreign(Exception):
    """An object that another process cannot make."""

    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")


def error_classes() -> list[type[AsyncflowError]]:
    found = vars(errors).values()
    return [kind for kind in found if inspect.isclass(kind) and issubclass(kind, AsyncflowError)]


def sent(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("kind", error_classes())
@pytest.mark.parametrize("cause", [None, ZeroDivisionError("by zero"), Foreign(code=7), KernelError("inner", **WHERE)])
def test_every_error_pickles(kind: type[AsyncflowError], cause: BaseException | None) -> None:
    """Behaviour 98: with message, attributes, notes and cause, or the cause's text where its class may not be known."""
    error = SPECIAL.get(kind, lambda: kind("the message"))()
    error.add_note("a note")
    error.__cause__ = cause
    for found in (sent(error), sent(sent(error)), copy.copy(error)):
        assert type(found) is kind
        assert str(found) == str(error) and found.args == error.args
        assert vars(found) == vars(error)
        assert found.__notes__ == ["a note"]
        if isinstance(cause, Foreign):
            assert isinstance(found.__cause__, Unavailable) and str(found.__cause__) == "Foreign: code 7"
        else:
            assert type(found.__cause__) is type(cause) and str(found.__cause__) == str(cause)


def run_and_fail(program: Callable[[], af.Tensor], options: dict[str, Any]) -> Any:
    """In another process: builds, and runs, what raises."""

    async def main() -> Any:
        with af.Graph() as graph:
            fetch = program()
        async with af.Session(graph, **options) as session:
            return await session.run(fetch)

    return asyncio.run(main())


def divides() -> af.Tensor:
    @af.op(outputs=af.spec("float64", ()))
    def fails(x: Any) -> Any:
        raise ZeroDivisionError("nothing to divide by")

    return fails(af.constant(1.0))


def takes_much() -> af.Tensor:
    return af.sum(af.ones((1000, 1000)) * af.random.normal((1000, 1000)))


def lacks_a_feed() -> af.Tensor:
    return af.placeholder("float32", ()) + 1.0


def does_not_fit() -> af.Tensor:
    return af.zeros((2, 3)) + af.zeros((4, 5))


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    # One process for all: its start is what takes long. Not a fork, as this process has threads.
    with ProcessPoolExecutor(1, multiprocessing.get_context("forkserver")) as made:
        yield made


@pytest.mark.parametrize(
    ("program", "options", "kind", "said"),
    [
        (divides, {}, KernelError, "nothing to divide by"),
        (takes_much, {"memory_limit": 1 << 20}, OutOfMemoryError, "over its limit"),
        (lacks_a_feed, {}, af.FeedError, "placeholder"),
        (does_not_fit, {}, af.ShapeError, r"\[2,3\]"),
    ],
)
@pytest.mark.slow
def test_an_error_comes_out_of_a_process_pool(
    pool: ProcessPoolExecutor, program: Callable[[], af.Tensor], options: dict[str, Any], kind: type[Any], said: str
) -> None:
    """Fault F71: as itself, and the pool lives on."""
    with pytest.raises(kind, match=said) as caught:
        pool.submit(run_and_fail, program, options).result(PATIENCE_S)
    assert __file__ in str(caught.value) or not isinstance(caught.value, KernelError)
    assert "run_and_fail" in str(caught.value.__cause__)  # the text of the traceback there
    assert pool.submit(int, "3").result(PATIENCE_S) == 3


def test_objects_other_than_errors_say_how_to_send_them(graph: af.Graph) -> None:
    """Behaviour 98: graphs name their text form, sessions values."""
    x = af.placeholder("float32", (None,), name="x")
    y = af.cond(af.sum(x) > 0, lambda: x + 1.0, lambda: x)
    session = af.Session(graph)
    for value in (graph, x, y.node, {"nest": [y]}, session.plan(y, [x]), af.TensorArray("float32", size=2)):
        with pytest.raises(TypeError, match=r"cannot pickle <(Graph|Tensor|Node).*print_graph.*parse_graph"):
            pickle.dumps(value)
    with pytest.raises(TypeError, match=r"cannot pickle <Session.*make a session in the other"):
        pickle.dumps(session)
    with pytest.raises(TypeError, match=r"cannot pickle <Prepared.*prepare it"):
        pickle.dumps(session.prepare(y, [x]))
    assert len(af.parse_graph(sent(af.print_graph(graph))).nodes) == len(graph.nodes)


async def test_graphs_are_copied_as_ever(session: af.Session, graph: af.Graph) -> None:
    x = af.placeholder("float32", (None,), name="x")
    y = af.while_loop(lambda v: af.sum(v) < 10.0, lambda v: v * 2.0, (x,))[0]
    twin = copy.deepcopy(graph)
    feeds = np.ones(3, np.float32)
    np.testing.assert_array_equal(
        await session.run(twin.tensor(y.name), {twin.tensor("x"): feeds}), await session.run(y, {x: feeds})
    )
    with twin:
        assert af.identity(twin.tensor("x")).graph is twin
    assert copy.copy(y).name == y.name
    with pytest.raises(af.GraphError, match=r"would share its nodes, .*; use copy\.deepcopy\(graph\)"):
        copy.copy(graph)


async def test_a_graph_that_has_run_is_copied_without_its_plans(session: af.Session, graph: af.Graph) -> None:
    x, v = af.placeholder("float32", (), name="x"), af.Variable(np.float32(1.0), name="v")
    y = x + v.read()
    v.assign(x)
    assert await session.run(y, {x: 1.0}, trace=af.Trace()) == 2.0
    for copied in (copy.deepcopy(graph), copy.deepcopy({"nest": [y]})["nest"][0].graph):
        assert copied is not graph
        assert not copied.compiled
        assert await session.run(copied.tensor(y.name), {copied.tensor("x"): 1.0}) == 2.0


async def test_variables_and_sessions_are_not_doubled(session: af.Session, graph: af.Graph) -> None:
    """98: a copy of a variable is the variable, whose value stays; a session says that there is no copy."""
    v = af.Variable(1.0)
    assert copy.copy(v) is v
    assert copy.deepcopy({"nest": [v]})["nest"][0] is v
    held = {"session": session, "call": session.prepare(v.read())}
    for value in (session, held, held["call"]):
        with pytest.raises(TypeError, match=r"cannot copy <Session on .*>: .*; make another session"):
            copy.deepcopy(value)
    with pytest.raises(TypeError, match="cannot copy <Session"):
        copy.copy(session)
    assert await session.run(v.read()) == 1.0
