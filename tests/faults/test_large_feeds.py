"""Fault F37: arrays above 1 MiB are copied on a thread, and locked arrays are not copied at all."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.runtime.values import feeds as feeds_module
from asyncflow.runtime.values.copies import CopyThread
from tests.faults.kernels import CoroutineGate, in_flight
from tests.patience import PATIENCE_S

COUNT = (1 << 18) + 1
"""Number of elements of a float32 array of more than 1 MiB."""


class CopyGate:
    """Holds up copies until it is opened, and notes on which threads they are made."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.opened = threading.Event()
        self.threads: list[threading.Thread] = []

    def __call__(self, array: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        self.threads.append(threading.current_thread())
        self.entered.set()
        assert self.opened.wait(PATIENCE_S)
        return np.array(array, dtype=dtype, order="C", copy=True, subok=False)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[CopyGate]:
    made = CopyGate()
    monkeypatch.setattr(feeds_module, "_copy", made)
    yield made
    made.opened.set()


def ones() -> np.ndarray[Any, Any]:
    return np.ones(COUNT, np.float32)


LAYOUTS: dict[str, Callable[[], np.ndarray[Any, Any]]] = {
    "C": ones,
    "strided": lambda: np.ones(2 * COUNT, np.float32)[::2],
    "big-endian": lambda: np.ones(COUNT, ">f4"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_the_event_loop_goes_on_while_a_large_feed_is_copied(
    session: af.Session, graph: af.Graph, gate: CopyGate, layout: str
) -> None:
    """Fault F37."""
    x = af.placeholder("float32", (None,))
    async with in_flight(session.run(af.sum(x), {x: LAYOUTS[layout]()}), gate.entered.is_set) as task:
        assert not task.done()
        gate.opened.set()
        assert await task == COUNT
    assert threading.main_thread() not in gate.threads


async def test_changes_after_a_large_feed_is_copied_are_not_seen(session: af.Session, graph: af.Graph) -> None:
    """Fault F37."""
    holding = CoroutineGate()
    x, ticket = af.placeholder("float32", None), af.placeholder("int64", ())
    with af.control_dependencies([holding.op(ticket).node]):
        late = x + 0
    fed = ones()
    async with in_flight(session.run(late, {x: fed, ticket: 1}), lambda: holding.started) as task:
        fed[:] = -1
        holding.opened.set()
        np.testing.assert_array_equal(await task, ones())


async def test_a_wrong_large_feed_is_refused_before_it_is_copied(session: af.Session, gate: CopyGate) -> None:
    """Fault F37."""
    with af.Graph():
        x = af.placeholder("float32", (3,), name="x")
    with pytest.raises(af.FeedError, match=rf"x:0: expected float32\[3\][\s\S]*its shape is \[{COUNT}\]"):
        await session.run(x, {x: ones()})
    assert gate.threads == []


async def test_a_deadline_holds_while_a_feed_is_copied(session: af.Session, gate: CopyGate) -> None:
    """Fault F37."""
    with af.Graph():
        x = af.placeholder("float32", None)
        y = af.sum(x)
    session.plan(y, [x])  # else its time might be up before there is one
    with pytest.raises(af.DeadlineExceeded, match=r"the feeds were not copied within timeout=0.01 s; it did not start"):
        await session.run(y, {x: ones()}, timeout=0.01)
    gate.opened.set()
    assert await session.run(y, {x: ones()}, timeout=60) == COUNT


async def test_a_run_cancelled_while_its_feed_is_copied_leaves_the_session_usable(
    session: af.Session, gate: CopyGate
) -> None:
    with af.Graph():
        x = af.placeholder("float32", None)
        y = af.sum(x)
    async with in_flight(session.run(y, {x: ones()}), gate.entered.is_set) as task:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.opened.set()
    assert await session.run(y, {x: ones()}) == COUNT


def _locked(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    array.flags.writeable = False
    return array


FREE: dict[str, Callable[[], np.ndarray[Any, Any]]] = {
    "read-only": lambda: _locked(np.arange(6.0)),
    "of bytes": lambda: np.frombuffer(np.arange(6.0).tobytes()),
    "of bytes, reshaped": lambda: np.frombuffer(np.arange(6.0).tobytes()).reshape(2, 3),
}
COPIED: dict[str, Callable[[], np.ndarray[Any, Any]]] = {
    "writable": lambda: np.arange(6.0),
    "a read-only view": lambda: _locked(np.arange(6.0)[:]),
    "a part": lambda: _locked(np.arange(12.0))[:6],
    "of a bytearray": lambda: _locked(np.frombuffer(bytearray(np.arange(6.0).tobytes()))),
}


@pytest.mark.parametrize("kind", [*FREE, *COPIED])
async def test_locked_arrays_are_not_copied(session: af.Session, kind: str) -> None:
    """Fault F37: also `bytes`, which is how a service gets its arrays; an array that could still be written to is
    copied.
    """
    seen: list[np.ndarray[Any, Any]] = []

    @af.op(outputs=())
    def look(x: Any) -> None:
        seen.append(x)

    with af.Graph():
        x = af.placeholder("float64", None)
        node = look(x)
    fed = {**FREE, **COPIED}[kind]()
    await session.run(node, {x: fed})
    np.testing.assert_array_equal(seen[0], fed)
    assert np.shares_memory(seen[0], fed) == (kind in FREE)


async def test_large_results_that_others_have_too_are_copied_on_a_thread(
    session: af.Session, graph: af.Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F37: they belong to the caller; of a run's own results nothing is copied."""
    copied: list[Any] = []
    on_thread = CopyThread._made

    async def made(copies: CopyThread, copy: Callable[[], Any]) -> Any:
        copied.append(copy)
        return await on_thread(copies, copy)

    monkeypatch.setattr(CopyThread, "_made", made)
    constant, small = af.constant(ones()), af.constant([1.0])
    results = await session.run([constant, constant, constant * 2, small, af.on_device(constant)])
    assert len(copied) == 3
    results[0][:] = -1
    np.testing.assert_array_equal(results[1], ones())
    np.testing.assert_array_equal(await session.run(constant), ones())


async def test_large_streamed_items_belong_to_the_consumer(session: af.Session, graph: af.Graph) -> None:
    seen: list[af.Tensor] = []

    def body(i: Any, v: Any) -> Any:
        seen.append(v + 1)
        return i + 1, seen[0]

    x = af.placeholder("float32", (None,))
    af.while_loop(lambda i, _: i < 3, body, (0, x))
    items = []
    async for item in session.stream(seen[0], {x: ones()}):
        items.append(item[0])
        item[:] = -100
    assert items == [2, 3, 4]
