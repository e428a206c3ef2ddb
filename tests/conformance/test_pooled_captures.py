"""102: captures and stores of pooled and batched bodies, whoever is stepped together, and for however long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import numpy as np
import pytest

import asyncflow as af
from asyncflow.control.stores.row_block import RowBlock
from asyncflow.testing import virtual_clock
from tests.conftest import OpenSession, any_cards
from tests.others import others_end

LENGTHS = (2, 6, 0, 4, 3, 1)
"""Steps of each request: groups shrink to one row while other rows are there."""


def whole(store: Any, _: af.Tensor) -> af.Tensor:
    stacked: af.Tensor = store.stack()
    return stacked


Append = Callable[[Any, af.Tensor, af.Tensor], Any]
"""Gives the store with one more entry, from what the step has seen of it."""


def of_rows() -> tuple[Any, Append]:
    return af.RowStore("int64", (2,)), lambda store, row, _: store.append(af.expand_dims(row, axis=0))


def of_elements() -> tuple[Any, Append]:
    array = af.TensorArray("int64", dynamic_size=True, element_shape=(2,), clear_after_read=False)
    return array, lambda store, row, _: store.write(store.size(), row)


def of_elements_read_once() -> tuple[Any, Append]:
    def new() -> af.TensorArray:
        return af.TensorArray("int64", dynamic_size=True, element_shape=(2,))

    return new(), lambda _, row, seen: new().unstack(af.concat([seen, af.expand_dims(row, axis=0)]))


PATIENT_TURNS = 3000
"""So often a test looks again whether something has been freed."""

STORES: dict[str, tuple[Callable[[], tuple[Any, Append]], Callable[[Any, af.Tensor], af.Tensor]]] = {
    "rows, stacked": (of_rows, whole),
    "rows, sliced by size": (of_rows, lambda store, i: store.slice(store.size() // 2, store.size())),
    "rows, sliced by step": (of_rows, lambda store, i: store.slice(i // 2, i)),
    "elements, stacked": (of_elements, whole),
    "elements, read once": (of_elements_read_once, whole),
}


async def test_captures_are_the_same_for_every_row(open_session: OpenSession) -> None:
    """Behaviour 102: a vector, a matrix, a scalar and a variable, beside rows of several shapes and lengths: equal
    to the bit."""
    vector = af.Variable(np.array([3, -5, 7]), name="vector")
    matrix = af.Variable(np.arange(9).reshape(3, 3) - 4, name="matrix")
    with af.Graph() as graph:
        x, n = af.placeholder("int64", (None, 3), name="x"), af.placeholder("int64", (), name="n")
        shift, turn, factor = vector.read(), matrix.read() * 2, af.sum(vector.read())

        def body(i: af.Tensor, s: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
            return i + 1, (s @ turn + shift) * factor + vector.read()

        y = af.while_loop(lambda i, s: i < n, body, (0, x), pool=af.Pool(4), name="steps")[1]

    def alone(s: np.ndarray[Any, Any], length: int) -> np.ndarray[Any, Any]:
        for _ in range(length):
            s = (s @ ((np.arange(9).reshape(3, 3) - 4) * 2) + [3, -5, 7]) * 5 + [3, -5, 7]
        return s

    asked = [(np.full((1 + k % 2, 3), k), length) for k, length in enumerate(LENGTHS)]
    async with open_session(graph) as session:
        found = await asyncio.gather(*(session.run(y, {x: start, n: length}) for start, length in asked))
        await others_end()
    for (start, length), last in zip(asked, found, strict=True):
        assert last.tolist() == alone(start, length).tolist()


@pytest.mark.parametrize("kind", STORES)
async def test_stores_have_any_number_of_entries(open_session: OpenSession, kind: str) -> None:
    """Behaviour 102: what a step looks at is as long as each one's store, and they are stepped together
    nevertheless, or by turns."""
    made, view = STORES[kind]
    with af.Graph() as graph:
        x, n = af.placeholder("int64", (2,), name="x"), af.placeholder("int64", (), name="n")
        empty, append = made()

        def body(i: af.Tensor, s: af.Tensor, store: Any) -> tuple[af.Tensor, af.Tensor, Any]:
            seen = view(store, i)
            s = s + af.sum(seen * (i + 1), axis=0)
            return i + 1, s, append(store, s, seen)

        start = append(empty, x, af.reshape(x, (-1, 2))[:0])
        last = af.while_loop(lambda i, *_: i < n, body, (n // 4, x, start), pool=af.Pool(3), name="steps")
        y = last[1], last[2].stack()

    def alone(s: np.ndarray[Any, Any], length: int) -> tuple[Any, Any]:
        rows = [s]
        for i in range(length // 4, length):
            first, end = {
                "rows, sliced by size": (len(rows) // 2, len(rows)),
                "rows, sliced by step": (i // 2, i),
            }.get(kind, (0, len(rows)))
            s = s + sum(rows[first:end], np.zeros(2, np.int64)) * (i + 1)
            rows.append(s)
        return s.tolist(), np.array(rows).tolist()

    lengths = (5, 7, 0, 5, 2, 5) if kind != "rows, sliced by step" else (3, 3, 0, 2, 1, 3)
    async with open_session(graph) as session:
        runs = [session.run(y, {x: np.array([k, 1]), n: length}) for k, length in enumerate(lengths)]
        found = await asyncio.gather(*runs)
        await others_end()
    for k, (length, (sums, rows)) in enumerate(zip(lengths, found, strict=True)):
        assert (sums.tolist(), rows.tolist()) == alone(np.array([k, 1]), length)


async def test_captures_of_left_activations_are_not_kept(
    open_session: OpenSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of a request that has ended are freed while others go on beside the place where it stood."""
    blocks: WeakSet[RowBlock] = WeakSet()
    begin = RowBlock.__init__

    def noted(block: RowBlock, *args: Any) -> None:
        begin(block, *args)
        blocks.add(block)

    monkeypatch.setattr(RowBlock, "__init__", noted)
    with af.Graph() as graph:
        n = af.placeholder("int64", (), name="n")
        store = af.RowStore("int64", ()).append([7])
        last = af.while_loop(
            lambda i, _: i < n, lambda i, store: (i + 1, store), (0, store), pool=af.Pool(3), name="steps"
        )
        y = last[1].stack()

    def largest(session: af.Session) -> int:
        counts = session.statistics().batches.get("steps")
        return 0 if counts is None else counts.largest

    async def comes_true(holds: Callable[[], bool]) -> bool:
        for _ in range(PATIENT_TURNS):
            if holds():
                return True
            await asyncio.sleep(1e-4)
        return False

    async with open_session(graph) as session:
        endless = [asyncio.ensure_future(session.run(y, {n: 1 << 60})) for _ in range(2)]
        has_two = await comes_true(lambda: largest(session) == 2)
        theirs = set(blocks)
        found, most = await session.run(y, {n: 3}), largest(session)
        is_freed = await comes_true(lambda: theirs.issuperset(blocks))
        theirs.clear()
        for each in endless:
            each.cancel()
        await asyncio.gather(*endless, return_exceptions=True)
        await others_end()
    assert (has_two, most, found.tolist()) == (True, 3, [7])
    assert is_freed


@pytest.mark.parametrize("device", ["cpu:0", "cuda:0", "cuda:1"])
async def test_stores_stay_where_they_were_made(device: str) -> None:
    """Behaviour 102: steps are made where elements and rows are, and their results are read there."""
    with af.Graph() as graph:
        x, n = af.placeholder("int64", (2,), name="x"), af.placeholder("int64", (), name="n")
        with af.device(device):
            array = af.TensorArray("int64", 0, dynamic_size=True, element_shape=(2,), clear_after_read=False)
            rows = af.RowStore("int64", (2,)).append(af.expand_dims(x, axis=0))

        def body(i: af.Tensor, array: af.TensorArray, rows: af.RowStore) -> tuple[Any, ...]:
            array = array.write(i, af.sum(rows.stack(), axis=0))
            return i + 1, array, rows.append(af.expand_dims(array.read(i // 2) + 1, axis=0))

        _, array, rows = af.while_loop(lambda i, *_: i < n, body, (0, array, rows), pool=af.Pool(2), name="steps")
        y = array.stack(), rows.stack()

    def alone(start: list[int], length: int) -> tuple[Any, Any]:
        written, kept = [], np.array([start])
        for i in range(length):
            written.append(kept.sum(0))
            kept = np.concatenate([kept, [written[i // 2] + 1]])
        return np.array(written).tolist(), kept.tolist()

    with any_cards(7):
        async with af.Session(graph, devices=["cuda:0", "cuda:1", "cpu:0"]) as session:
            asked = [([k, 1], length) for k, length in enumerate((3, 2, 3, 1))]
            runs = [session.run(y, {x: np.array(start), n: length}) for start, length in asked]
            for each, found in zip(asked, await asyncio.gather(*runs), strict=True):
                assert tuple(part.tolist() for part in found) == alone(*each)


def test_only_equal_captures_are_shared() -> None:
    """Behaviour 102: long strings of equal length stand at equal places of their arrays; a call has one value of
    each capture."""
    texts = [np.array([f"{k}, a text that is too long to stand in the array itself"], "T") for k in range(2)]
    text = af.Variable(texts[0], name="text")
    with af.Graph() as graph:
        x, new = af.placeholder("float64", ()), af.placeholder("string", (1,))
        change, words = text.assign(new), text.read()
        y = af.batched(lambda x: (x, words[0]), max_size=2, max_delay_s=1.0)(x)

    async def main() -> None:
        async with af.Session(graph) as session:
            first = asyncio.ensure_future(session.run(y, {x: 1.0}))
            await asyncio.sleep(0.1)
            await session.run(change, {new: texts[1]})
            found = [await session.run(y, {x: 1.0}), await first]
            assert [str(each[1])[0] for each in found] == ["1", "0"]

    with virtual_clock() as clock:
        clock.run(main())
