"""Async generators as inputs."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.inputs import generators
from asyncflow.state.variables.immutable import immutable
from tests.inputs.test_files import everything

SPEC = {"x": af.spec("float32", (None,)), "n": af.spec("int64", ())}


async def test_nests_of_yielded_values() -> None:
    async def rows() -> Any:
        kept = np.zeros(2, np.float32)
        for number in range(3):
            kept[:] = number  # what was yielded before must not change
            await asyncio.sleep(0)
            yield {"n": number, "x": kept}

    found = await everything(af.from_async_generator(rows, SPEC, prefetch=3))
    assert [(each["n"], each["x"].tolist()) for each in found] == [(0, [0, 0]), (1, [1, 1]), (2, [2, 2])]


async def test_large_elements_are_copied_on_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault F37: the event loop goes on meanwhile, and the generator has its array back when it goes on."""
    threads: list[threading.Thread] = []

    def noted(value: Any) -> Any:
        threads.append(threading.current_thread())
        return immutable(value)

    async def rows() -> Any:
        kept = np.zeros(1 << 19, np.float32)
        for number in range(3):
            kept[:] = number
            yield kept
        yield kept[:2]

    monkeypatch.setattr(generators, "immutable", noted)
    found = await everything(af.from_async_generator(rows, af.spec("float32", (None,))))
    assert [(len(each), float(each.min()), float(each.max())) for each in found[:3]] == [
        (1 << 19, k, k) for k in range(3)
    ]
    assert [thread is threading.main_thread() for thread in threads] == [False] * 3 + [True]


@pytest.mark.parametrize(
    ("element", "message"),
    [
        ({"x": [1.0]}, "element of 'generated': expected a dict with keys 'x', 'n'"),
        ({"x": [1.0], "n": 1.5}, r"element\['n'\] of 'generated' is declared as int64\[\], and cannot be 1.5"),
        ({"x": np.ones(2), "n": 1}, r"element\['x'\] .* came as float64\[2\]"),
        ({"x": 1.0, "n": 1}, r"came as float32\[\]"),
    ],
)
async def test_elements_that_are_not_as_declared(element: Any, message: str) -> None:
    async def one() -> Any:
        yield element

    with pytest.raises(af.KernelError, match=message):
        await everything(af.from_async_generator(one, SPEC))


async def test_a_cancelled_generator_has_failed() -> None:
    """The awaited call was cancelled by others: an end would be taken for the end of the data."""

    async def cancelled() -> Any:
        yield 1
        raise asyncio.CancelledError

    found: list[Any] = []
    with pytest.raises(af.KernelError, match="reading was cancelled, and not by the session"):
        await everything(af.from_async_generator(cancelled, af.spec("int64", ())), found)
    assert found == [1]


async def test_its_exception_is_the_cause() -> None:
    async def broken() -> Any:
        yield 1
        raise LookupError("no more rows")

    with pytest.raises(af.KernelError, match="no more rows") as caught:
        await everything(af.from_async_generator(broken, af.spec("int64", ())))
    assert isinstance(caught.value.__cause__, LookupError)


@pytest.mark.parametrize("fn", [3, lambda: iter(()), asyncio.sleep])
def test_takes_async_generator_functions_alone(fn: Any) -> None:
    with pytest.raises(af.GraphError, match="takes an async generator function"):
        af.from_async_generator(fn, af.spec("int64", ()))
