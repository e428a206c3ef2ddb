"""A line gives its members by priority, place and arrival, whoever leaves it in between."""

from __future__ import annotations

from random import Random

import pytest

from asyncflow.runtime.lines.priority_line import PriorityLine
from asyncflow.runtime.lines.shares import PriorityShares


def test_of_one_priority_the_lowest_place_goes_first_and_of_equal_ones_the_first() -> None:
    line = PriorityLine[float, str]()
    assert [line.add(0, place, name) for place, name in ((2.0, "b"), (1.0, "a"), (2.0, "c"), (1.0, "d"))] == [
        0,
        0,
        2,
        1,
    ]
    assert (list(line), len(line)) == (["a", "d", "b", "c"], 4)
    assert [line.pop() for _ in range(4)] == ["a", "d", "b", "c"]
    assert not line


def test_a_member_that_leaves_is_told_from_others_at_its_place() -> None:
    line = PriorityLine[float, object]()
    first, second, other = object(), object(), object()
    line.add(0, 1.0, first)
    line.add(0, 1.0, second)
    assert line.discard(0, 1.0, other) is line.discard(0, 2.0, first) is line.discard(3, 1.0, first) is None
    assert line.discard(0, 1.0, second) == 1
    assert line.discard(0, 1.0, second) is None
    assert list(line) == [first]


def test_a_turn_that_is_taken_counts_though_the_member_stays() -> None:
    line = PriorityLine[float, str]()
    for name in ("a", "b"):
        line.add(0, 0.0, name)
    line.add(5, 0.0, "low")
    assert [line.take_turn() for _ in range(8)] == ["a"] * 7 + ["low"]
    assert [line.next(len), line.count_before(0, 0.5), line.count_before(7, 0.5)] == ["a", 2, 0]


@pytest.mark.parametrize("seed", range(20))
def test_a_line_is_what_sorting_it_each_time_would_give(seed: int) -> None:
    """Among members that come, leave and have their turn in any order."""
    random = Random(seed)
    line, shares = PriorityLine[tuple[float, int], int](), PriorityShares()
    there: dict[int, tuple[int, tuple[float, int]]] = {}
    for number in range(600):
        action = random.random()
        if action < 0.5 or not there:
            priority, place = random.choice((0, 0, 1, 5)), (random.choice((1.0, 2.0, 3.0)), random.randrange(3))
            there[number] = priority, place
            before = sum(other[0] == priority and other[1] <= place for other in there.values())
            assert line.add(priority, place, number) == before - 1, f"seed {seed}"
        elif action < 0.7:
            member = random.choice(list(there))
            assert line.discard(*there.pop(member), member) is not None, f"seed {seed}"
        else:
            turn = shares.pick({priority for priority, _ in there.values()})
            # Members were numbered as they came, so sorting by place keeps those of equal places in order.
            expected = min((place, each) for each, (priority, place) in there.items() if priority == turn)[1]
            assert line.pop() == expected, f"seed {seed}"
            del there[expected]
        assert sorted(line) == sorted(there), f"seed {seed}"
