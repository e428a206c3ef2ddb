"""Behaviour 40-44: what a loop's tensors, functions, fetches, devices and buffers may do."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.graph.graph import Subgraph

Run = Callable[..., Awaitable[Any]]

pytestmark = pytest.mark.usefixtures("graph")


def body_of(result: af.Tensor) -> Subgraph:
    body: Subgraph = result.node.attrs["body"]
    return body


# -- 40: leaks -------------------------------------------------------------------------------------------------------


def leaked_tensor() -> af.Tensor:
    kept = []

    def body(i: Any) -> Any:
        kept.append(i * 2)
        return i + 1

    af.while_loop(lambda i: i < 3, body, (0,), name="leaky")
    return kept[0]


LEAKS: dict[str, Callable[[af.Tensor], Any]] = {
    "outside": lambda leaked: leaked + 1,
    "in another loop": lambda leaked: af.while_loop(lambda i: i < leaked, lambda i: i + 1, (0,)),
    "in a cond": lambda leaked: af.cond(True, lambda: leaked, lambda: leaked),
    "as a loop variable": lambda leaked: af.while_loop(lambda i: i < 3, lambda i: i + 1, (leaked,)),
    "as a control input": af.group,
}


@pytest.mark.parametrize("use", LEAKS)
def test_a_tensor_leaked_from_a_body(use: str) -> None:
    """Behaviour 40: its use is a build error that names the body and the user's line."""
    with pytest.raises(af.GraphError, match=r"leaky/body.*lies outside it[\s\S]*test_while_scope.py"):
        LEAKS[use](leaked_tensor())


async def test_fetching_a_leaked_tensor(run: Run) -> None:
    """Behaviour 40: it has one value per iteration, so there is nothing to fetch."""
    with pytest.raises(af.FetchError, match="leaky/body"):
        await run(leaked_tensor())


async def test_an_outer_bodys_tensor_in_an_inner_loop(run: Run) -> None:
    """Behaviour 40: enclosing bodies are fair game."""

    def body(i: Any, total: Any) -> Any:
        _, inner = af.while_loop(lambda j, t: j < i, lambda j, t: (j + 1, t + i), (0, total))
        return i + 1, inner

    assert await run(af.while_loop(lambda i, t: i < 4, body, (0, 0))) == (4, 1 + 4 + 9)


# -- 41: functions in a body -----------------------------------------------------------------------------------------


@af.op(outputs=af.spec("float64", ()))
def squared_in_python(x: np.float64) -> np.float64:
    return x * x


@af.function
def squared_as_graph(x: Any) -> Any:
    return x * x


@pytest.mark.parametrize("square", [lambda x: x * x, squared_in_python, squared_as_graph])
async def test_functions_in_the_body(run: Run, square: Callable[[Any], Any]) -> None:
    """Behaviour 41: 2 becomes 65536 after 4 squarings, however squaring is written."""
    assert await run(af.while_loop(lambda i, x: i < 4, lambda i, x: (i + 1, square(x)), (0, 2.0))) == (4, 65536.0)


async def test_a_function_in_nested_loops(run: Run) -> None:
    """Behaviour 41: called in both bodies."""

    def body(i: Any, x: Any) -> Any:
        _, inner = af.while_loop(lambda j, y: j < 2, lambda j, y: (j + 1, squared_as_graph(y)), (0, x))
        return i + 1, squared_as_graph(inner)

    assert await run(af.while_loop(lambda i, x: i < 2, body, (0, 1.5))) == (2, pytest.approx(1.5**64))


# -- 42: fetches and feeds -------------------------------------------------------------------------------------------


async def test_every_set_of_fetches_agrees(run: Run) -> None:
    """Behaviour 42: unused loop variables are dropped, the others stay the same."""
    a, b, c = af.while_loop(lambda a, b, c: a < 5, lambda a, b, c: (a + 1, b + a, c * 2), (0, 0, 1))
    values = {a: 5, b: 10, c: 32}
    for fetches in ([a], [b], [c], [c, a], [b, c], [a, b, c]):
        assert await run(fetches) == [values[fetch] for fetch in fetches]


async def test_feeding_an_inner_tensor_is_refused(run: Run) -> None:
    """Behaviour 42: with the reason and what to do instead."""
    (result,) = af.while_loop(lambda i: i < 3, lambda i: i + 1, (0,))
    inner = body_of(result).inputs[0]
    with pytest.raises(af.FeedError, match=r"a value per iteration or branch taken.*feed what enters"):
        await run(result, {inner: 1})


async def test_feeding_a_result_skips_the_loop(run: Run) -> None:
    """Behaviour 42: a loop's output is outside it and can be fed."""
    x, y = af.while_loop(lambda x, y: x < 3, lambda x, y: (x + 1, y + x), (0, 0))
    assert await run([x + y, x], {y: 100}) == [103, 3]
    assert await run(x * 2, {x: 21}) == 42


# -- 43: device scopes -----------------------------------------------------------------------------------------------


async def test_device_scopes(run: Run) -> None:
    """Behaviour 43: around the loop, inside the body, and a body defined outside the scope."""

    def body(x: Any) -> Any:
        with af.device("cpu:0"):
            y = x * 2
        return y + 1

    with af.device("cpu"):
        (around,) = af.while_loop(lambda x: x < 100, body, (1,))
    (bare,) = af.while_loop(lambda x: x < 100, body, (1,))

    def devices(result: af.Tensor) -> list[str | None]:
        return [node.device for node in body_of(result).nodes if node.op.name in ("multiply", "add")]

    assert [devices(around), devices(bare)] == [["cpu:0", "cpu"], ["cpu:0", None]]
    assert await run((around, bare)) == (127, 127)


# -- 44: buffers -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_thousand_iterations_hold_few_buffers(session: af.Session) -> None:
    """Behaviour 44: the values of an iteration are freed when the next one has used them.

    Cards may be as many iterations behind their host as may run at once. Values on their way between cards are kept.
    """
    block = np.ones((64, 64))
    in_flight = 32 if session.devices[-1].kind == "cuda" and len(session.devices) > 1 else 0
    _, x = af.while_loop(lambda i, x: i < 1000, lambda i, x: (i + 1, af.sin(x) + 0.5), (0, block))
    await session.run(x)
    peaks = [device.memory.peak for device in session.devices]
    assert 0 < max(peaks) <= (8 + 2 * in_flight) * block.nbytes
