"""Memory that graphs share: parts of blocks, which are free again in any order, from any thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import pairwise
from random import Random
from typing import Any
from zlib import crc32

import pytest

from asyncflow.devices.cuda.graphs.blocks import SMALL_BYTES, GraphMemory, SharedBlocks
from tests.devices.cards import CapturingCard
from tests.fake_cupy import FakeCupy
from tests.patience import PATIENCE_S

UNIT = 512


class Card(CapturingCard):
    def __init__(self, cupy: FakeCupy) -> None:
        super().__init__(cupy)
        self.shared = SharedBlocks()

    def graph(self, label: str = "graph") -> GraphMemory:
        return GraphMemory(self.cupy, self.pool, self.shared, label)

    @property
    def used(self) -> int:
        return self.pool.account.used


@pytest.fixture
def card(fake: FakeCupy) -> Iterator[Card]:
    card = Card(fake)
    with card.stream:
        yield card


def test_a_graph_uses_parts_of_a_block_of_another_one(card: Card) -> None:
    first, second = card.graph(), card.graph()
    whole = first.malloc(64 * UNIT)
    start = whole.ptr
    del whole
    parts = [second.malloc(n * UNIT) for n in (10, 20, 30)]
    assert [part.ptr - start for part in parts] == [0, 10 * UNIT, 30 * UNIT]
    assert card.used == 64 * UNIT
    del first
    assert card.used == 64 * UNIT
    del second
    assert card.used == 64 * UNIT  # of arrays
    del parts
    assert card.used == 0


def test_parts_are_merged_when_they_are_free(card: Card) -> None:
    graph = card.graph()
    block = graph.malloc(60 * UNIT)
    start = block.ptr
    del block
    parts = [graph.malloc(20 * UNIT) for _ in range(3)]
    for index in (0, 2, 1):
        parts[index] = None
    assert graph.malloc(60 * UNIT).ptr == start
    assert card.used == 60 * UNIT


def test_small_arrays_split_no_large_block(card: Card) -> None:
    graph = card.graph()
    graph.malloc(64 * UNIT)
    small = graph.malloc(SMALL_BYTES)
    assert card.used == 64 * UNIT + SMALL_BYTES
    assert graph.malloc(SMALL_BYTES + 1).ptr != small.ptr
    assert card.used == 64 * UNIT + SMALL_BYTES


def test_an_array_is_alone_where_no_earlier_graph_was(card: Card) -> None:
    cupy: Any = card.cupy
    first, second = card.graph(), card.graph()

    def array(graph: GraphMemory, size: int) -> Any:
        card.stream.pool, before = graph, card.stream.pool
        try:
            return cupy.empty(size)
        finally:
            card.stream.pool = before

    own = array(first, 4096)
    assert first.has_alone(own)
    del own
    assert not second.has_alone(array(second, 4096))
    with second.alone():
        alone = array(second, 4096)
    assert second.has_alone(alone)
    assert not first.has_alone(cupy.empty(4096))
    most, rest = array(first, 3000), array(first, 600)
    assert not first.has_alone(most)  # of the block that both have had
    assert not first.has_alone(rest)


def test_an_array_keeps_no_block_that_is_much_larger(card: Card) -> None:
    graph = card.graph()
    card.stream.pool = graph
    cupy: Any = card.cupy
    cupy.empty(4096)
    first, second = cupy.empty(2048), cupy.empty(1000)
    assert card.used == 4096 * 8
    assert graph.has_alone(first)
    assert not graph.has_alone(second)


def test_parts_never_overlap_and_nothing_stays(card: Card, pytestconfig: pytest.Config) -> None:
    dice = Random(crc32(f"{pytestconfig.getoption('turn')}".encode()))
    graphs = [card.graph() for _ in range(3)]
    held: list[Any] = []
    for _ in range(300):
        held.append(dice.choice(graphs).malloc(dice.choice((1, 700, 5_000, 20_000, 70_000))))
        if dice.random() < 0.6:
            del held[dice.randrange(len(held))]
        if dice.random() < 0.05:
            graphs[dice.randrange(3)] = card.graph()
        spans = sorted((pointer.ptr, pointer.ptr + pointer.mem.size) for pointer in held)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        assert card.used >= sum({block: size for graph in graphs for block, size in graph.held.items()}.values())
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join(PATIENCE_S)
    graphs.clear()
    assert card.used == 0
    assert card.shared.alive() == []
