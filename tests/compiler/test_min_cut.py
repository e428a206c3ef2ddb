"""The cut between kept values and values to compute again has the least cost of all ways to choose."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import compress, product
from random import Random

import pytest

from asyncflow.compiler.memory.saving.min_cut import smallest_cut

Graph = tuple[Sequence[int], Sequence[int | None], Sequence[Collection[int]], Collection[int]]


def random_graph(seed: int, count: int) -> Graph:
    random = Random(seed)
    costs = [random.randint(0, 6) for _ in range(count)]
    prices = [None if random.random() < 0.3 else random.randint(0, 3) for _ in range(count)]
    inputs = [[x for x in range(value) if random.random() < 0.35] for value in range(count)]
    return costs, prices, inputs, [value for value in range(count) if random.random() < 0.4]


def computed_again(kept: Collection[int], graph: Graph) -> set[int] | None:
    """Return the values to compute again if these values are kept; None if that is impossible."""
    _, prices, inputs, needed = graph
    found: set[int] = set()
    open_ = [value for value in needed if value not in kept]
    while open_:
        value = open_.pop()
        if prices[value] is None:
            return None
        found.add(value)
        open_ += [x for x in inputs[value] if x not in kept and x not in found]
    return found


def price(kept: Collection[int], again: Collection[int], graph: Graph) -> int:
    costs, prices, *_ = graph
    return sum(costs[value] for value in kept) + sum(prices[value] or 0 for value in again)


@pytest.mark.parametrize("seed", range(40))
def test_no_other_choice_is_better(seed: int) -> None:
    graph = random_graph(seed, 1 + seed % 9)
    kept, again = smallest_cut(*graph)
    required = computed_again(kept, graph)
    assert required is not None and required <= again
    values = range(len(graph[0]))
    every = [list(compress(values, chosen)) for chosen in product((False, True), repeat=len(values))]
    possible = [(choice, found) for choice in every if (found := computed_again(choice, graph)) is not None]
    assert price(kept, again, graph) == min(price(*each, graph) for each in possible)


def test_equal_choices_compute_least_again() -> None:
    """In a chain of values of equal cost the last one is kept, which is the needed value."""
    cut = smallest_cut([5] * 4, [None, 0, 0, 0], [[], [0], [1], [2]], [3])
    assert cut == (frozenset({3}), frozenset())


def test_free_values_are_computed_again() -> None:
    assert smallest_cut([5, 5], [1, 1], [[], [0]], [1]) == (frozenset(), frozenset({0, 1}))


def test_nothing_is_needed() -> None:
    assert smallest_cut([], [], [], []) == (frozenset(), frozenset())
