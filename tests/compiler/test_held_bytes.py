"""Bytes that compiled runs report, compared with Python's allocator."""

from __future__ import annotations

import asyncio
import gc
import re
import tracemalloc
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from tests.others import held_bytes

SIZE = 1 << 16
VALUE = 4 * SIZE
"""Bytes of a value: 256 KiB."""

Program = Callable[[], tuple[Any, Mapping[af.Tensor, Any]]]


def read_only(shape: tuple[int, ...]) -> np.ndarray:
    """An array that is fed without a copy."""
    return np.frombuffer(np.full(shape, 0.5, np.float32).tobytes(), np.float32).reshape(shape)


def fed(*shape: int, known: bool = True) -> tuple[af.Tensor, dict[af.Tensor, np.ndarray]]:
    x = af.placeholder("float32", shape if known else (None, *shape[1:]))
    return x, {x: read_only(shape)}


def straight_line(*, known: bool = True) -> Program:
    def program() -> Any:
        x, feeds = fed(256, 256, known=known)
        a, b, c = af.sin(x), af.cos(x), af.exp(x)
        d = a * b + c
        return af.sum(af.concat([d, d + a, a, b]) * 2.0), feeds

    return program


def repeated(step: Callable[[Any, Any], Any], n: int = 40, *, known: bool = True, gradient: bool = True) -> Program:
    """Repeat `step` of the last value and the first one, `n` times, with its gradient."""

    def program() -> Any:
        x, feeds = fed(256, 256, known=known)
        _, y = af.while_loop(lambda i, _: i < n, lambda i, y: (i + 1, step(y, x)), [af.constant(0), x])
        return (af.sum(af.gradients(af.sum(y), [x])[0]) if gradient else af.sum(y)), feeds

    return program


def inner_loop(y: af.Tensor, x: af.Tensor) -> Any:
    return af.sin(af.while_loop(lambda j, _: j < 5, lambda j, z: (j + 1, af.tanh(z * x)), [af.constant(0), y])[1])


def written(*, dynamic: bool = False, gradient: bool = False) -> Program:
    def program() -> Any:
        x, feeds = fed(SIZE)
        array = af.TensorArray("float32", 0 if dynamic else 20, element_shape=(SIZE,), dynamic_size=dynamic)
        _, _, array = af.while_loop(
            lambda i, *_: i < 20,
            lambda i, y, array: (i + 1, af.tanh(y * x), array.write(i, y)),
            [af.constant(0), x, array],
        )
        y = af.sum(array.stack() * 2.0)
        return (af.sum(af.gradients(y, [x])[0]) if gradient else y), feeds

    return program


def appended() -> Any:
    x, feeds = fed(1, SIZE)
    store = af.RowStore("float32", (SIZE,))
    _, _, store = af.while_loop(
        lambda i, *_: i < 20, lambda i, y, store: (i + 1, af.sin(y), store.append(y)), [af.constant(0), x, store]
    )
    return af.sum(store.slice(0, 20)), feeds


def scanned() -> Any:
    xs, feeds = fed(20, SIZE)
    w, more = fed(SIZE)
    return af.sum(af.gradients(af.sum(af.scan(lambda y, x: af.tanh(y * w + x), xs, w)), [w])[0]), feeds | more


def assigned() -> Any:
    x, feeds = fed(SIZE)
    variable = af.Variable(np.zeros(SIZE, np.float32))

    def body(i: af.Tensor) -> Any:
        return i + 1 + af.astype(af.sum(variable.assign_add(af.sin(x))) * 0.0, "int32")

    return af.while_loop(lambda i: i < 20, body, [af.constant(0)]), feeds


def either(y: af.Tensor, x: af.Tensor) -> Any:
    return af.cond(af.sum(y) > 0, lambda: af.tanh(y * x), lambda: af.sin(y))


def in_turn(y: af.Tensor, x: af.Tensor) -> Any:
    """Branches of which now one is taken, and now the other."""
    return af.cond(af.sum(y) > 0, lambda: -af.tanh(y * x) * 3.0, lambda: -af.sin(y))


def recomputed(y: af.Tensor, x: af.Tensor) -> Any:
    return af.recompute(lambda z: af.tanh(af.sin(z) * x) + af.cos(z * x))(y)


def some_rows(count: int, size: int) -> Program:
    """A loop that saves the last rows of 64: a few are copied, most of them keep all."""

    def program() -> Any:
        x, feeds = fed(size)

        def body(i: af.Tensor, y: af.Tensor, z: af.Tensor) -> Any:
            rows = af.stop_gradient(af.sin(af.reshape(y, (1, size)) * af.ones((64, 1), dtype="float32")))
            return i + 1, rows[-1], z * rows[-count:]

        start = af.ones((count, 1), dtype="float32") * x
        _, _, z = af.while_loop(lambda i, *_: i < 40, body, [af.constant(0), x, start])
        return af.sum(af.gradients(af.sum(z), [x])[0]), feeds

    return program


def parts(y: af.Tensor, x: af.Tensor) -> Any:
    """All parts of one value, as the gates of a cell are."""
    a, b, c, d = af.split(af.concat([y, y * 0.5, y + x, y - x], axis=1), 4, axis=1)
    return a * b + c * d


PROGRAMS: dict[str, Program] = {
    "straight line": straight_line(),
    "straight line of open shape": straight_line(known=False),
    "loop": repeated(lambda y, x: af.sin(y) * 2.0 + af.cos(y * x), 50, gradient=False),
    "gradient": repeated(lambda y, x: af.tanh(y * x) + af.sin(y)),
    "gradient of a short loop": repeated(lambda y, x: af.tanh(y * x) + af.sin(y), 4),
    "gradient of open shape": repeated(lambda y, x: af.tanh(y * x) + af.sin(y), known=False),
    "gradient of products": repeated(lambda y, x: af.tanh(y @ x * 0.01)),
    "gradient of nested loops": repeated(inner_loop, 6),
    "gradient of branches": repeated(either),
    "gradient of both branches": repeated(in_turn),
    "gradient of recomputed pieces": repeated(recomputed),
    "gradient of a small part": some_rows(1, 8192),
    "gradient of a large part": some_rows(48, 1024),
    "gradient of parts": repeated(parts),
    "array": written(),
    "growing array": written(dynamic=True),
    "gradient of an array": written(gradient=True),
    "rows": appended,
    "gradient of a scan": scanned,
    "variable": assigned,
}


async def peaks(program: Program, **options: Any) -> tuple[int, int]:
    """The most that a session held, as it says, and as Python's allocator does."""
    with af.Graph() as graph:
        fetches, feeds = program()
    gc.collect()
    async with af.Session(graph, **options) as session:
        session.plan(fetches, list(feeds))
        await session.run(fetches, feeds)  # the first one compiles
        gc.collect()
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            await session.run(fetches, feeds)
            traced = tracemalloc.get_traced_memory()[1] - before
        finally:
            tracemalloc.stop()
        return session.statistics().memory["cpu:0"].peak, traced


@pytest.mark.parametrize("name", PROGRAMS)
async def test_a_compiled_run_without_a_limit_reports_its_bytes(name: str) -> None:
    said, traced = await peaks(PROGRAMS[name])
    assert said == pytest.approx(traced, rel=0.06)


async def test_small_saved_values_count_as_well() -> None:
    def program() -> Any:
        x, feeds = fed(128)
        _, y = af.while_loop(
            lambda i, _: i < 4000, lambda i, y: (i + 1, af.sin(y) * 0.99 + af.tanh(y)), [af.constant(0), x]
        )
        return af.sum(af.gradients(af.sum(y), [x])[0]), feeds

    said, traced = await peaks(program)
    assert said == pytest.approx(traced, rel=0.06)


@pytest.mark.parametrize("options", [{}, {"memory_limit": 1 << 30}], ids=["no limit", "limit"])
@pytest.mark.parametrize("name", ["straight line", "loop", "gradient", "gradient of nested loops"])
async def test_a_trace_of_what_really_runs_has_the_most_that_was_held(name: str, options: Any) -> None:
    trace = af.Trace(detail="region")
    with af.Graph() as graph:
        fetches, feeds = PROGRAMS[name]()
    async with af.Session(graph, **options) as session:
        await session.run(fetches, feeds, trace=trace)
        peak = session.statistics().memory["cpu:0"].peak
    assert max(sample.nbytes for sample in trace.memory) == peak >= 3 * VALUE
    assert af.profiler.summarize(trace).devices[0].peak_nbytes == peak


@pytest.mark.parametrize("name", ["gradient", "gradient of nested loops", "gradient of both branches", "growing array"])
async def test_nothing_is_held_once_runs_have_ended(name: str) -> None:
    with af.Graph() as graph:
        fetches, feeds = PROGRAMS[name]()
    async with af.Session(graph) as session:
        await asyncio.gather(*(session.run(fetches, feeds) for _ in range(3)))
        assert await held_bytes(session) == 0
        assert session.statistics().memory["cpu:0"].peak >= 5 * VALUE


async def test_a_run_that_fails_holds_nothing_any_more() -> None:
    with af.Graph() as graph:
        x, feeds = fed(SIZE)

        def body(i: af.Tensor, y: af.Tensor) -> Any:
            af.assert_that(i < 7, "enough")
            return i + 1, af.tanh(y * x)

        _, y = af.while_loop(lambda i, _: i < 20, body, [af.constant(0), x])
        gradient = af.sum(af.gradients(af.sum(y), [x])[0])
    async with af.Session(graph) as session:
        with pytest.raises(af.KernelError):
            await session.run(gradient, feeds)
        gc.collect()
        assert await held_bytes(session) == 0


async def test_values_of_a_variable_count_once_a_run_has_made_them() -> None:
    variable = af.Variable(np.zeros(SIZE, np.float32))
    with af.Graph() as graph:
        x, feeds = fed(SIZE)
        after = af.sum(variable.assign(af.sin(x)))
    async with af.Session(graph) as session:
        assert session.statistics().memory["cpu:0"].held == 0
        for _ in range(2):
            await session.run(after, feeds)
            assert session.statistics().memory["cpu:0"].held == VALUE


@pytest.mark.parametrize("kind", ["batched", "pooled"])
async def test_rows_of_several_runs_count(kind: str) -> None:
    with af.Graph() as graph:
        x, n = af.placeholder("float32", (SIZE,)), af.placeholder("int32", ())
        if kind == "batched":
            y = af.batched(lambda row: af.tanh(row * 2.0) + af.sin(row), max_size=8)(x)
        else:
            step: Any = lambda i, y: (i + 1, af.tanh(y * 2.0) + af.sin(y))  # noqa: E731
            y = af.while_loop(lambda i, _: i < n, step, [af.constant(0), x], pool=af.Pool(8))[1]
        total = af.sum(y)
    async with af.Session(graph) as session:
        await asyncio.gather(*(session.run(total, {x: read_only((SIZE,)), n: np.int32(20)}) for _ in range(8)))
        # Those given, two of the body's, and what it gives.
        assert 4 * 8 * VALUE <= session.statistics().memory["cpu:0"].peak <= 6 * 8 * VALUE
        assert await held_bytes(session) == 0


async def source(fetches: Any, feeds: Any) -> str:
    async with af.Session(fetches.graph) as session:
        return str(session.plan(fetches, list(feeds)).explain(source=True))


async def test_what_computes_with_numbers_tells_nothing(graph: af.Graph) -> None:
    n = af.placeholder("int32", ())
    i, x = af.while_loop(lambda i, _: i < n, lambda i, x: (i + 1, x * 0.5 + 1.0), [af.constant(0), af.constant(1.0)])
    code = await source(x + af.astype(i, "float32"), [n])
    assert re.search(r"while \w+ < ", code)
    assert not re.search(r"tell|pause|passed|Holding", code)


async def test_a_small_straight_line_tells_nothing(graph: af.Graph) -> None:
    x = af.placeholder("float32", (8,))
    y = x
    for _ in range(20):
        y = y * 0.5 + 1.0
    assert not re.search(r"tell|pause|passed|Holding", await source(y, [x]))


async def test_an_iteration_tells_only_where_it_stops(graph: af.Graph) -> None:
    x = af.placeholder("float32", (SIZE,))
    _, y = af.while_loop(lambda i, _: i < 20, lambda i, y: (i + 1, af.tanh(y * x)), [af.constant(0), x])
    code = await source(af.sum(af.gradients(af.sum(y), [x])[0]), [x])
    lines = code.splitlines()
    told = [number for number, line in enumerate(lines) if re.search(r"\b(tell|pause|passed)\(", line)]
    inside = [number for number in told if lines[number].startswith(" " * 12)]
    assert len(told) >= 4
    assert inside
    assert all("if not budget:" in lines[number - 1] for number in inside if "pause(" in lines[number])
    assert all("pause(" in lines[number] for number in inside)
