"""Batches from queues: of sizes that only a run knows, of no elements, and of strings."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import asyncflow as af

Run = Callable[..., Awaitable[Any]]


async def test_a_run_says_how_many_are_taken(run: Run, graph: af.Graph) -> None:
    queue = af.FIFOQueue(10, (af.spec("int64", ()), af.spec("float32", (2,))))
    n = af.placeholder("int32", ())
    many, up_to = queue.dequeue_many(n), queue.dequeue_up_to(n)
    assert [x.shape for x in (*many, *up_to)] == [(None,), (None, 2)] * 2
    await run(queue.enqueue_many((np.arange(6), np.ones((6, 2), np.float32))))
    for taken in ([0, 1], [], [2, 3, 4]):
        numbers, rows = await run(many, {n: len(taken)})
        assert numbers.tolist() == taken
        assert rows.shape == (len(taken), 2)
    assert await run(queue.size()) == 1
    with pytest.raises(af.KernelError, match=r"dequeue_many\(-1\) of queue .* n is at least 0"):
        await run(many, {n: -1})
    await run(queue.close())
    assert (await run(up_to, {n: 4}))[0].tolist() == [5]


async def test_no_elements_are_taken_at_once_whatever_is_there(session: af.Session, graph: af.Graph) -> None:
    queue = af.PaddingQueue(4, {"text": af.spec("string", (None,)), "image": af.spec("int8", (None, None, 3))})
    for close in (False, True):
        if close:
            queue.close_nowait(session=session)
        in_run = await session.run([queue.dequeue_many(0), queue.dequeue_up_to(0)])
        for elements, lengths in (*in_run, await queue.get_many(0, session=session)):
            assert elements["text"].shape == (0, 0)
            assert elements["image"].shape == (0, 0, 0, 3)
            assert (lengths["text"].shape, lengths["image"].shape) == ((0,), (0, 2))


async def test_strings_are_padded_with_empty_ones(run: Run, graph: af.Graph) -> None:
    queue = af.PaddingQueue(4, (af.spec("string", (None,)), af.spec("float32", (None,)), af.spec("bool", (None,))))
    for words in (["a", "bc"], ["d"]):
        await run(queue.enqueue((words, np.ones(len(words), np.float32), np.ones(len(words), bool))))
    (words, numbers, flags), _ = await run(queue.dequeue_many(2))
    assert words.tolist() == [["a", "bc"], ["d", ""]]
    assert (numbers.tolist(), flags.tolist()) == ([[1.0, 1.0], [1.0, 0.0]], [[True, True], [True, False]])
