"""Behaviour 68: whatever is saved for gradients, and whatever is computed again, they are the same to the bit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.autodiff.stores.saved_values import new_store, save, saved_value
from asyncflow.compiler.memory.saving import choose_saved
from asyncflow.compiler.program.kernels import kernels
from asyncflow.graph.structured import WhileNode
from tests.cells import Arrangement
from tests.property.differentiable import COLUMNS, FREE, ROWS, random_loss

OpenSession = Callable[..., AbstractAsyncContextManager[af.Session]]


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("seed", "order"),
    [(8, 1), pytest.param(12, 1, marks=SLOW), pytest.param(23, 1, marks=SLOW), pytest.param(0, 2, marks=SLOW)],
)
async def test_gradients_do_not_depend_on_the_saved_values(
    open_session: OpenSession,
    arrangement: Arrangement,
    cards: bool,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    order: int,
) -> None:
    """Behaviour 68: loops in loops, with branches, to the second order; all is computed again that may be."""
    for name, value in FREE.items():
        monkeypatch.setattr(choose_saved, name, value)
    with af.Graph() as graph:
        x = af.placeholder("float32", (None if seed % 2 else ROWS, COLUMNS))
        w = af.placeholder("float32", (COLUMNS, COLUMNS))
        fetched = [random_loss(Random(seed), x, w, is_open=bool(seed % 2))]
        fetched += af.gradients(fetched[0], [x, w], unconnected="zero")
        if order == 2:
            fetched += af.gradients(af.sum(af.square(fetched[1])), [x, w], unconnected="zero")
    random = np.random.default_rng(seed)
    fed = {x: random.standard_normal((ROWS, COLUMNS), np.float32)}
    fed[w] = random.standard_normal((COLUMNS, COLUMNS), np.float32)
    values, saved = [], []
    for without in ([], ["choose_saved"]):
        async with open_session(graph, without=without) as session:
            values.append(await session.run(fetched, fed))
            saved.append([each.value for each in session.plan(fetched, list(fed)).saved])
    assert saved[0] != saved[1]
    for one, other in zip(*values, strict=True):
        if cards and arrangement.draw is not None:
            # Nodes are elsewhere, and what was copied between cards lies in memory in another order.
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
        else:
            assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


@pytest.mark.parametrize(
    ("seed", "order"),
    [(8, 1), pytest.param(12, 1, marks=SLOW), pytest.param(23, 1, marks=SLOW), pytest.param(0, 2, marks=SLOW)],
)
async def test_gradients_do_not_depend_on_where_values_are(
    open_session: OpenSession, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seed: int, order: int
) -> None:
    """Behaviour 66, 68: kept; away, on the host or on disk, whatever their size, alone or in pairs; and in a file, but
    for a few.
    """
    monkeypatch.setattr(WhileNode, "swap_memory", True)
    monkeypatch.setattr(kernels, "is_small_spec", lambda spec: False)
    with af.Graph() as graph:
        x = af.placeholder("float32", (ROWS, COLUMNS))
        w = af.placeholder("float32", (COLUMNS, COLUMNS))
        fetched = [random_loss(Random(seed), x, w)]
        fetched += af.gradients(fetched[0], [x, w], unconnected="zero")
        if order == 2:
            fetched += af.gradients(af.sum(af.square(fetched[1])), [x, w], unconnected="zero")
    random = np.random.default_rng(seed)
    fed = {x: random.standard_normal((ROWS, COLUMNS), np.float32)}
    fed[w] = random.standard_normal((COLUMNS, COLUMNS), np.float32)
    file = {"memory_limit": 16 << 20, "spill_directory": str(tmp_path)}
    pairs = {**file, "together": 2 * 4 * ROWS * COLUMNS}
    ways: list[dict[str, Any]] = [{"saved_values": "keep"}, file, pairs, {**file, "host_memory_limit": 100}]
    values: list[Any] = []
    moved = []
    for options in ways:
        together = options.pop("together", 0)
        async with open_session(graph, **options) as session:
            for device in session.devices:
                if device.swapping is not None:
                    device.swapping.moves.least_bytes = 0
                    if device.swapping.together:  # values of a CPU move one by one
                        device.swapping.moves.together = together
            values.append(await session.run(fetched, fed))
            moved.append(sum(memory.moved_out for memory in session.statistics().memory.values()))
    assert moved[0] == 0 < min(moved[1], moved[3])  # two values stay, as the newest pair does
    for other in values[1:]:
        for one, another in zip(values[0], other, strict=True):
            assert np.asarray(one).tobytes() == np.asarray(another).tobytes()


async def test_a_counter_that_is_computed_again_begins_where_the_loop_does(
    session: af.Session, graph: af.Graph
) -> None:
    """Behaviour 68: gradients find it from the number of the iteration."""
    x = af.placeholder("float64", (1000,))

    def body(i: Any, y: Any) -> Any:
        return i + 1, af.sin(y * af.astype(i, "float64")) * y

    _, y = af.while_loop(lambda i, _: i < 7, body, (3, x))
    fed = value = np.linspace(0.1, 1.5, 1000)
    slope = np.ones_like(fed)
    for k in range(3, 7):
        slope = slope * (np.cos(value * k) * k * value + np.sin(value * k))
        value = np.sin(value * k) * value
    np.testing.assert_allclose(await session.run(af.gradients(y, x), {x: fed}), slope, rtol=1e-9)


async def test_a_buffer_that_has_two_names_is_paid_for_once(
    session: af.Session, arrangement: Arrangement, graph: af.Graph
) -> None:
    """Behaviour 68: what an iteration gives is what the next begins with: both take less than the one and half of
    the other."""
    x, c = af.placeholder("float64", (2, 4096)), af.placeholder("float64", (2, 4096))

    def body(i: Any, y: Any, total: Any) -> Any:
        half = af.cumulative_sum(af.mean(y * y, axis=0, keepdims=True), axis=1)
        z = half + c
        return i + 1, z, total + af.exp(z) * z

    *_, total = af.while_loop(lambda i, *_: i < 4, body, (0, x, af.zeros_like(x)))
    saved = session.plan(af.gradients(total, x), [x, c]).saved
    assert sum(each.nbytes or 0 for each in saved) == (1 + (arrangement.without == "choose_saved")) * 2 * 4096 * 8


async def test_a_loops_initial_store_is_not_its_later_one(session: af.Session, graph: af.Graph) -> None:
    """Behaviour 68: only the first iteration reads it; the other store is read again behind the loop."""
    x = af.placeholder("float64", (3,))

    def filled(x: Any) -> Any:
        return af.while_loop(
            lambda i, *_: i < 4, lambda i, y, store: (i + 1, y + 1, save(store, i, y)), (0, x, new_store())
        )[2]

    first, other = filled(x), filled(x * 2)
    _, _, total = af.while_loop(
        lambda i, *_: i < 4,
        lambda i, store, total: (i + 1, other, total + saved_value(store, i, x.spec)),
        (0, first, af.zeros_like(x)),
    )
    again = saved_value(other, af.astype(total[0] * 0, "int64") + 2, x.spec)
    fed = np.array([1.0, 2.0, 3.0])
    found = await session.run([total, again], {x: fed})
    np.testing.assert_array_equal(found, [fed + 6 * fed + 6, 2 * fed + 2])
