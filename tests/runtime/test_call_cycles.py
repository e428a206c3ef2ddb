"""Calls of functions with limits that wait for one another for ever: the last one gets an error."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

import asyncflow as af
from tests.faults.kernels import until
from tests.patience import PATIENCE_S
from tests.runtime.test_limited_calls import SCALAR, on_virtual_time


async def of_each_other(names: Sequence[str], is_async: bool = True, **limits: Any) -> list[Any]:
    """Run functions at once, each of which awaits a run of the next one once all have begun; return what each gave."""
    begun = {name: threading.Event() for name in names}

    def made(name: str, after: str) -> Any:
        def feeds(x: Any) -> dict[Any, float]:
            begun[name].set()
            return {x_in: x - 1}

        async def awaits(x: Any) -> Any:
            if x <= 0:
                return x
            fed = feeds(x)
            await until(lambda: all(event.is_set() for event in begun.values()))
            return 1 + await session.run(results[after], fed)

        def waits(x: Any) -> Any:
            if x <= 0:
                return x
            fed = feeds(x)
            assert all(event.wait(PATIENCE_S) for event in begun.values())
            return 1 + session.run_threadsafe(results[after], fed).result(PATIENCE_S)

        call: Callable[[Any], Any] = awaits if is_async else waits
        call.__name__ = call.__qualname__ = name
        return af.op(outputs=SCALAR, max_concurrency=1, **limits)(call)

    with af.Graph() as graph:
        x_in = af.placeholder("float64", ())
        results = {name: made(name, names[(k + 1) % len(names)])(x_in) for k, name in enumerate(names)}
    async with af.Session(graph, devices=["cpu:0"]) as session:
        runs = [session.run(results[name], {x_in: 1.0}) for name in names]
        return await asyncio.gather(*runs, return_exceptions=True)


@pytest.mark.parametrize("is_async", [True, False])
async def test_functions_that_wait_for_one_another_are_told_so(is_async: bool) -> None:
    found = await of_each_other(["first", "second", "third"], is_async)
    (failed,) = [outcome for outcome in found if isinstance(outcome, Exception) and "for ever" in str(outcome)][:1]
    assert all(name in str(failed) for name in ("first", "second", "third"))
    assert 1.0 in found  # a slot is free again once one of them has failed


def test_functions_that_wait_for_one_another_may_have_a_timeout() -> None:
    found = on_virtual_time(partial(of_each_other, ["first", "second"], timeout=5.0))
    assert all("did not return within timeout=5 s" in str(outcome) for outcome in found)


async def test_calls_of_one_function_that_wait_for_one_another_are_told_so() -> None:
    begun: list[float] = []

    @af.op(outputs=SCALAR, max_concurrency=2)
    async def asks(x: Any) -> Any:
        if x <= 0:
            return x
        begun.append(float(x))
        await until(lambda: len(begun) == 2)
        return 1 + await session.run(y, {x_in: x - 1})

    with af.Graph() as graph:
        x_in = af.placeholder("float64", ())
        y = asks(x_in)
    async with af.Session(graph) as session:
        found = await asyncio.gather(*(session.run(y, {x_in: 1.0}) for _ in range(2)), return_exceptions=True)
    errors = [str(each) for each in found if isinstance(each, Exception)]
    assert len(errors) == 1 and "this call of asks would wait for ever" in errors[0]
