"""Halving of failed work: all members that can succeed do so, in their order, in few calls."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, log2

import pytest

from asyncflow.runtime.lines.halving import halves, in_halves


class Calls:
    """Calls that fail with any of the members at fault, or for more than fit."""

    def __init__(self, at_fault: Sequence[int] = (), fits: int = 100) -> None:
        self.at_fault, self.fits = set(at_fault), fits
        self.made: list[list[int]] = []
        self.failed: list[int] = []

    async def compute(self, members: Sequence[int]) -> list[int]:
        self.made.append(list(members))
        if len(members) > self.fits or not self.at_fault.isdisjoint(members):
            raise ValueError(f"not for {list(members)}")
        return list(members)

    def give_up(self, members: Sequence[int], error: Exception) -> Sequence[int]:
        if len(members) > 1:
            return members
        self.failed += members
        return ()


def test_both_halves_are_there_unless_one_would_be_empty() -> None:
    assert halves([1, 2, 3]) == [[1, 2], [3]]
    assert (halves([1]), halves([])) == ([[1]], [])
    assert halves(range(4, 8)) == [range(4, 6), range(6, 8)]


async def test_the_example() -> None:
    calls = Calls([3])
    assert await in_halves(range(5), calls.compute, calls.give_up) == [[0, 1, 2], [4]]
    assert calls.made == [[0, 1, 2, 3, 4], [0, 1, 2], [3, 4], [3], [4]]


@pytest.mark.parametrize("size", [1, 2, 7, 16])
async def test_one_at_fault_is_found_in_few_calls(size: int) -> None:
    for at_fault in range(size):
        calls = Calls([at_fault])
        found = await in_halves(range(size), calls.compute, calls.give_up)
        assert [each for part in found for each in part] == [each for each in range(size) if each != at_fault]
        assert calls.failed == [at_fault]
        assert len(calls.made) <= 1 + 2 * ceil(log2(size)) if size > 1 else len(calls.made) == 1


async def test_where_memory_is_short_parts_that_fit_are_computed() -> None:
    calls = Calls(fits=3)
    assert await in_halves(range(11), calls.compute, calls.give_up) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10]]
    assert not calls.failed


async def test_members_that_are_given_up_are_not_computed_again() -> None:
    calls = Calls([0])
    assert await in_halves(range(8), calls.compute, lambda members, error: ()) == []
    assert calls.made == [list(range(8))]
