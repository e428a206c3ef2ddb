"""Queues in checkpoints: their elements, in their order, and whether they are closed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import asyncflow as af
from tests.state.queue_kinds import KINDS

if TYPE_CHECKING:
    from pathlib import Path

SPEC = {"x": af.spec("float32", (None, 2)), "word": af.spec("string", ())}


def element(k: int) -> dict[str, Any]:
    return {"x": np.full((k, 2), k, np.float32), "word": "é" * k}


@pytest.mark.parametrize("kind", KINDS)
async def test_elements_come_back_in_their_order(kind: str, tmp_path: Path) -> None:
    queue = KINDS[kind].make(9, SPEC, "work")
    with af.Graph() as graph:
        taken = KINDS[kind].value(queue.dequeue())
    async with af.Session(graph) as session:
        for k in range(5, 0, -1):
            await queue.put(KINDS[kind].element(element(k), k))
        await session.run(taken)
        path = await session.save(tmp_path)
        queue.close_nowait()
        expected = [await session.run(taken) for _ in range(4)]
        with pytest.raises(af.QueueClosedError):
            await session.run(taken)
        await session.restore(path)
        assert_same([await session.run(taken) for _ in range(4)], expected)
    queue = KINDS[kind].make(9, SPEC, "work")
    with af.Graph() as graph:
        taken = KINDS[kind].value(queue.dequeue())
    async with af.Session(graph, restore=path) as session:
        assert_same([await session.run(taken) for _ in range(4)], expected)
        await queue.put(KINDS[kind].element(element(7), 7))  # it is open


def assert_same(found: list[Any], expected: list[Any]) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one["x"], other["x"])
        assert one["word"] == other["word"]


async def test_an_empty_queue_that_is_closed(tmp_path: Path) -> None:
    queue = af.FIFOQueue(9, SPEC, name="work")
    with af.Graph() as graph:
        taken = queue.dequeue()
    async with af.Session(graph) as session:
        queue.close_nowait()
        path = await session.save(tmp_path)
    async with af.Session(graph, restore=path) as session:
        with pytest.raises(af.QueueClosedError):
            await session.run(taken)


async def test_a_queue_of_other_elements(tmp_path: Path) -> None:
    queue = af.FIFOQueue(9, SPEC, name="work")
    with af.Graph() as graph:
        queue.dequeue()
    async with af.Session(graph) as session:
        await queue.put(element(2))
        path = await session.save(tmp_path)
    for spec, message in (
        (af.spec("int64", ()), r"tensor 'work': value 0 of its elements is not int64\[\] there"),
        (
            SPEC | {"x": af.spec("float32", (3, 2))},
            r"value 0 of an element is no float32\[3,2\] there",
        ),
    ):
        with af.Graph() as graph:
            af.FIFOQueue(9, spec, name="work").dequeue()
        async with af.Session(graph) as session:
            with pytest.raises(af.CheckpointError, match=message):
                await session.restore(path)
