"""A run that is done again calls no function: what each call gave, or raised, is in the record, bit for bit."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.graph.values.dtypes import as_dtype
from tests.conftest import OpenSession
from tests.faults.kernels import until

FLOAT = af.spec("float64", ())


class Answers:
    """A tool that answers otherwise each time, and counts how often it was asked."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, x: Any) -> Any:
        self.count += 1
        return x + 0.1 * self.count

    async def later(self, x: Any) -> Any:
        await asyncio.sleep(0)
        return self(x)


def _vertices(op: Any, x: Any) -> Any:
    @af.vertex_function(state=af.spec("float64", (1,)), children=1)
    def double(v: af.Vertex) -> None:
        seen = op(v.pull() + v.gather(0)[0])
        v.push(seen)
        v.scatter(af.reshape(seen, (1,)))

    return af.vertex_map(double, af.InputGraph.chain([2, 1]), x).pushes["y"]


PLACES: dict[str, tuple[Any, dict[str, Any]]] = {
    "alone": (lambda op, x: op(x[0]) * op(x[1]), {}),
    "stateful": (lambda op, x: op(x[0]) * op(x[1]), {"stateful": True}),
    "map_fn": (af.map_fn, {}),
    "at once": (lambda op, x: af.vmap(op)(x), {"rows": True}),
    "loop": (lambda op, x: af.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, op(y)), (0, x[0]))[1], {}),
    "branch": (lambda op, x: af.cond(x[0] > 0, lambda: op(x[0]), lambda: op(x[1])), {}),
    "vertices": (_vertices, {}),
    "update": (lambda op, x: af.Variable(1.0, name="v").update(lambda v, y: v * op(y), x[0]), {}),
}


SHARED: dict[str, tuple[Any, dict[str, Any]]] = {
    "batch": (lambda op, x: op(x[0]) * op(x[1]), {"batch": af.Batch(2)}),
    "pool": (
        lambda op, x: af.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, op(y)), (0, x[0]), pool=af.Pool(2))[1],
        {},
    ),
}
"""Functions that compute calls of several runs together: a record has their results, whichever run computed them."""


@pytest.mark.parametrize("place", [*PLACES, "coroutine"])
async def test_each_effect_once(open_session: OpenSession, tmp_path: Path, place: str) -> None:
    """Behaviour 112: the values of the recorded run come again, though nothing is asked again."""
    answers, path = Answers(), tmp_path / "run.json"
    build, options = PLACES["alone" if place == "coroutine" else place]
    tool = answers.later if place == "coroutine" else answers
    async with open_session() as session:
        op = af.op(tool, outputs=FLOAT, name="tool", **options)  # type: ignore[call-overload]
        program = await _recorded(session, path, op, build)
    asked = answers.count
    await _again(path, *program)
    assert answers.count == asked
    with pytest.raises(af.ReplayError, match=r"gave another value|differs from that in the record"):
        await af.replay(path, program[0], live=True)
    assert answers.count > asked


@pytest.mark.parametrize("place", SHARED)
@pytest.mark.filterwarnings("ignore:.* takes one row:UserWarning")
async def test_each_effect_of_shared_calls_once(open_session: OpenSession, tmp_path: Path, place: str) -> None:
    """Behaviour 112: nor are functions called in batches and pools."""
    answers, path = Answers(), tmp_path / "run.json"
    build, options = SHARED[place]
    async with open_session() as session:
        op = af.op(answers, outputs=FLOAT, name="tool", **options)  # type: ignore[call-overload]
        program = await _recorded(session, path, op, build)
        await until(lambda: len(asyncio.all_tasks()) == 1)  # a pool compiles for later
    asked = answers.count
    await _again(path, *program)
    assert answers.count == asked


async def _recorded(session: af.Session, path: Path, op: Any, build: Any) -> tuple[af.Graph, str, bytes]:
    """Run and record a program; return its name, the name of the fetch, and its bytes."""
    with af.Graph() as graph:
        x = af.placeholder("float64", (3,), name="x")
        y = build(op, x) + 1.0
    fetched = await session.run(y, {x: [1.0, 2.0, 3.0]}, record=path)
    return graph, y.name, np.asarray(fetched).tobytes()


async def _again(path: Path, graph: af.Graph, name: str, expected: bytes) -> None:
    for _ in range(2):
        found = (await af.replay(path, graph))[name]
        assert np.asarray(found).tobytes() == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "complex64", "int8", "bool", "string"])
async def test_results_to_the_bit(tmp_path: Path, dtype: str) -> None:
    """Behaviour 112: NaN with its bits, the sign of zero, dtypes and shapes; as NumPy's scalars and arrays."""
    bits = {"float32": "<u4", "bfloat16": "<u2", "float16": "<u2"}.get(dtype)
    patterns = {"<u4": [0x7FC12345, 0x80000000, 0xFF800000, 1], "<u2": [0x7E01, 0x8000, 0xFF81, 1]}
    if bits is not None:
        value = np.array(patterns[bits], bits).view(as_dtype(dtype)).reshape(2, 2)
    else:
        value = np.array(["", "ü\n", "a", "b"] if dtype == "string" else [0, 1, 1, 0]).astype(as_dtype(dtype))
        value = value.reshape(2, 2)
    made: list[Any] = [value, value[1, 1], np.empty((0, 3), as_dtype(dtype))]
    asked = 0

    @af.op(outputs=(af.spec(dtype, (2, 2)), af.spec(dtype, ()), af.spec(dtype, (0, 3))))
    def tool(x: Any) -> Any:
        nonlocal asked
        asked += 1
        return tuple(each.copy() if isinstance(each, np.ndarray) else each for each in made)

    with af.Graph() as graph:
        fetches = list(tool(af.placeholder("float64", (), name="x")))
    async with af.Session(graph) as session:
        fetched = await session.run(fetches, {"x:0": 1.0}, record=tmp_path / "run.json")
    again = await af.replay(tmp_path / "run.json", graph)
    for one, other in zip(fetched, again.values(), strict=True):
        one, other = np.asarray(one), np.asarray(other)
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.tolist() == other.tolist() if dtype == "string" else one.tobytes() == other.tobytes()
    assert asked == 1


class NoAnswerError(ConnectionError):
    """An error that takes more than a message."""

    def __init__(self, host: str, code: int) -> None:
        super().__init__(host, code)
        self.host = host

    def __str__(self) -> str:
        return f"{self.host} does not answer"


async def _failure(run: Awaitable[object]) -> tuple[str, str, str, bool]:
    """The message of a run that fails, and the class and message of what its function raised."""
    try:
        await run
    except af.KernelError as error:
        cause = error.__cause__
        return str(error), type(cause).__name__, str(cause), isinstance(cause, ConnectionError)
    raise AssertionError("it did not fail")


@pytest.mark.parametrize(
    "made",
    [lambda: ValueError("no"), lambda: KeyError("k"), lambda: NoAnswerError("mail", 3), lambda: af.GraphError("odd")],
)
@pytest.mark.parametrize("rows", [False, True])
async def test_what_a_function_raised(
    open_session: OpenSession, tmp_path: Path, made: Callable[[], Exception], rows: bool
) -> None:
    """Behaviour 112: the same error comes again, at the same row, and calls before it are not made either."""
    asked, path = 0, tmp_path / "run.json"

    @af.op(outputs=FLOAT)
    def tool(x: Any) -> Any:
        nonlocal asked
        asked += 1
        if x > 2:
            raise made()
        return x

    with af.Graph() as graph:
        x = af.placeholder("float64", (3,), name="x")
        y = af.map_fn(tool, x) if rows else tool(x[2])
    async with open_session(graph) as session:
        first = await _failure(session.run(y, {x: [1.0, 2.0, 3.0]}, record=path))
    before = asked
    assert await _failure(af.replay(path, graph)) == first
    assert asked == before


@pytest.mark.parametrize("made", [lambda: ValueError("no"), lambda: NoAnswerError("mail", 3)])
@pytest.mark.parametrize("place", SHARED)
@pytest.mark.filterwarnings("ignore:.* takes one row:UserWarning")
async def test_what_a_function_raised_in_shared_calls(
    open_session: OpenSession, tmp_path: Path, place: str, made: Callable[[], Exception]
) -> None:
    """Behaviour 112: a run that failed in a batch or pool fails again as it did, and no function is called."""
    asked, path = 0, tmp_path / "run.json"
    build, options = SHARED[place]

    def tool(x: Any) -> Any:
        nonlocal asked
        asked += 1
        if x > 1.5:
            raise made()
        return x + 0.25

    op = af.op(tool, outputs=FLOAT, name="tool", **options)  # type: ignore[call-overload]
    with af.Graph() as graph:
        x = af.placeholder("float64", (3,), name="x")
        y = build(op, x)
    async with open_session(graph) as session:
        first = await _failure(session.run(y, {x: [1.25, 2.0, 3.0]}, record=path))
        await until(lambda: len(asyncio.all_tasks()) == 1)  # a pool compiles for later
    before = asked
    for _ in range(2):
        assert await _failure(af.replay(path, graph)) == first
    assert asked == before


async def test_functions_under_way_and_runs_that_they_ask_for(tmp_path: Path) -> None:
    """Behaviour 112: a call without an answer is not made again, and runs of a function have calls of their own."""
    answers, asked, path = Answers(), [0, 0], tmp_path / "run.json"
    inner_op = af.op(answers, outputs=FLOAT, name="inner")  # type: ignore[call-overload]
    with af.Graph() as inner:
        z = inner_op(af.constant(1.0))

    @af.op(outputs=FLOAT)
    async def agent(x: Any) -> Any:
        asked[0] += 1
        return await session.run(z) + await session.run(z) + x

    @af.op(outputs=FLOAT)
    async def never(x: Any) -> Any:
        asked[1] += 1
        started.set()
        await asyncio.Event().wait()

    with af.Graph() as graph:
        y = agent(af.constant(2.0))
        w = never(y)
    started = asyncio.Event()
    async with af.Session(inner) as session, af.Session(graph) as outer:
        fetched = await outer.run(y, record=path)
        run = asyncio.ensure_future(outer.run(w, record=tmp_path / "stopped.json"))
        await started.wait()
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
    before = (answers.count, *asked)
    assert (await af.replay(path, graph))[y.name] == fetched
    assert await af.replay(tmp_path / "stopped.json", graph) == {}
    assert (answers.count, *asked) == before


async def test_an_older_record_and_pure_functions(tmp_path: Path) -> None:
    """Behaviour 112: a record without results says what to do; a pure function is just called."""
    path, calls = tmp_path / "run.json", list[str]()

    def tool(name: str, x: Any) -> Any:
        calls.append(name)
        return x

    with af.Graph() as graph:
        x = af.placeholder("float64", (), name="x")
        pure = af.op(partial(tool, "pure"), outputs=FLOAT, name="pure", pure=True)(x)  # type: ignore[call-overload]
        other = af.op(partial(tool, "other"), outputs=FLOAT, name="other")(x)  # type: ignore[call-overload]
    async with af.Session(graph) as session:
        await session.run([pure, other], {x: 1.0}, record=path)
    await af.replay(path, graph)
    assert sorted(calls) == ["other", "pure", "pure"]
    found = json.loads(path.read_text())
    found["format"] = "asyncflow record 3"
    found["answers"] = []
    path.write_text(json.dumps(found))
    with pytest.raises(af.ReplayError, match=r"earlier release.* what other gave.*\n?.*live=True"):
        await af.replay(path, graph)
    await af.replay(path, graph, live=True)
    assert sorted(calls) == ["other", "other", "pure", "pure", "pure"]
