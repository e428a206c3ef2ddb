"""`ordered`: things come after the things that they need, and otherwise keep their order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncflow.compiler.program.ordered import ordered
from asyncflow.errors import InternalError


@given(st.permutations(range(8)), st.lists(st.tuples(st.integers(0, 7), st.integers(0, 9)), max_size=16))
def test_each_stands_behind_its_needs(things: list[int], pairs: list[tuple[int, int]]) -> None:
    """A needed thing that is not among them does not count."""
    needs = {thing: [other for one, other in pairs if one == thing and other > thing] for thing in things}
    found = ordered(things, needs.__getitem__)
    assert sorted(found) == sorted(things)
    place = {thing: number for number, thing in enumerate(found)}
    assert all(place[other] < place[thing] for thing in things for other in needs[thing] if other in place)


def test_what_needs_nothing_that_is_late_stays_where_it_stood() -> None:
    assert ordered([3, 1, 2, 0], {3: [], 1: [0], 2: [3], 0: []}.__getitem__) == [3, 0, 1, 2]


def test_a_circle_is_told() -> None:
    with pytest.raises(InternalError, match="1 waits for itself by way of 2"):
        ordered([1, 2], {1: [2], 2: [1]}.__getitem__)
