"""Shuffling, batching and repeating alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import asyncflow as af
from asyncflow.graph.values import nest
from asyncflow.inputs.stages import Batched, Element, Passes, Repetition, Shuffle, Stacked, Stage, as_value

INT = af.spec("int64", ())


def passed(stages: list[Stage], source: list[Element], most: int = 200) -> list[Element]:
    """Return the elements that come out, pass after pass, at most `most`."""
    passes, more = Passes(stages), True
    found: list[Element] = []
    while more and len(found) < most:
        for element in source:
            found.extend(passes.feed([element]))
        out, more = passes.end_of_pass()
        found.extend(out)
    return found


def numbers(count: int) -> list[Element]:
    return [(np.int64(k),) for k in range(count)]


def of(elements: list[Element]) -> list[Any]:
    return [np.asarray(element[0]).tolist() for element in elements]


def batch(size: int, *, drop: bool = False) -> Batched:
    return Batched(size, (INT,), None, drop)


@given(st.integers(0, 12), st.integers(1, 15), st.integers(1, 3), st.integers(1, 5))
@settings(max_examples=60)
def test_every_element_of_every_pass_comes_out_once(count: int, held: int, times: int, size: int) -> None:
    stages: list[Stage] = [Shuffle(held, 3), Repetition(times), batch(size)]
    found = of(passed(stages, numbers(count)))
    assert all(len(each) == size for each in found[:-1])
    flat = [x for each in found for x in each]
    per_pass = [sorted(flat[k * count : (k + 1) * count]) for k in range(times)]
    assert len(flat) == count * times
    assert all(each == [*range(count)] for each in per_pass), "passes do not mix in front of the repeat"
    assert of(passed(stages, numbers(count))) == found


@given(st.lists(st.integers(0, 7), max_size=6), st.integers(1, 15), st.integers(1, 5), st.booleans(), st.booleans())
@settings(max_examples=100)
def test_how_many_go_in_at_a_time_makes_no_difference(
    cuts: list[int], held: int, size: int, shuffles: bool, drops: bool
) -> None:
    """Nor whether they stand in arrays; elements of two leaves, one of rank 0."""
    whole = np.arange(3 * sum(cuts), dtype=np.float32).reshape(-1, 3)
    specs = (af.spec("float32", (3,)), INT)
    stages: list[Stage] = [*([Shuffle(held, 3)] if shuffles else []), Batched(size, specs, None, drops)]
    one_by_one = passed(stages, list(zip(whole, np.arange(len(whole)), strict=True)))
    passes, found, begin = Passes(stages), list[Element](), 0
    assert passes.at_once == size
    for count in cuts:
        part = Stacked((whole[begin : begin + count], np.arange(begin, begin + count)))
        found.extend(passes.feed(part if count % 2 else list(part)))
        begin += count
    found.extend(passes.end_of_pass()[0])
    assert [[x.tolist() for x in each] for each in found] == [[x.tolist() for x in each] for each in one_by_one]
    assert {tuple(x.dtype for x in each) for each in found} <= {tuple(spec.dtype for spec in specs)}


def test_a_shuffle_is_of_its_seed_and_the_pass() -> None:
    one, two = (of(passed([Shuffle(30, seed), Repetition(2)], numbers(30))) for seed in (1, 2))
    assert one[:30] != two[:30] and one[:30] != one[30:] and one[:30] != [*range(30)]
    near = of(passed([Shuffle(3, 1)], numbers(30)))
    assert all(place >= number - 3 for place, number in enumerate(near)), "no element comes before it can be held"


def test_all_orders_are_equally_likely() -> None:
    counts: dict[tuple[int, ...], int] = {}
    for seed in range(1200):
        order = tuple(of(passed([Shuffle(3, seed)], numbers(3))))
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 6 and min(counts.values()) > 140, counts


@pytest.mark.parametrize("times", [3, None])
def test_a_pass_that_gives_nothing_is_the_last(times: int | None) -> None:
    """The source gives two elements, which make no batch: another pass would give nothing either."""
    passes = Passes([batch(3, drop=True), Repetition(times), Shuffle(2, 0)])
    assert [*passes.feed(numbers(2))] == []
    assert passes.end_of_pass() == ([], False)


def test_batches_behind_a_repeat_cross_passes() -> None:
    assert of(passed([Repetition(2), batch(2)], numbers(3))) == [[0, 1], [2, 0], [1, 2]]
    assert of(passed([batch(2), Repetition(2)], numbers(3))) == [[0, 1], [2], [0, 1], [2]]
    assert of(passed([batch(2, drop=True)], numbers(3))) == [[0, 1]]
    assert len(passed([Repetition(None)], numbers(3))) == 201
    assert passed([Repetition(None)], []) == [], "what is empty does not go on for ever"


def test_padding_fills_open_extents_and_tells_lengths() -> None:
    specs = (af.spec("float32", (None,)), af.spec("int64", (2,)), af.spec("int64", (None, 1, None)))
    elements = [(np.ones(n, np.float32), np.array([n, n]), np.full((n, 1, m), 5)) for n, m in ((1, 2), (3, 0), (0, 1))]
    stage = Batched(3, specs, -1, False)
    floats, pairs, cubes, lengths, extents = stage.joined([elements])
    assert floats.tolist() == [[1, -1, -1], [1, 1, 1], [-1, -1, -1]] and floats.dtype == np.float32
    assert pairs.tolist() == [[1, 1], [3, 3], [0, 0]]
    assert cubes.shape == (3, 3, 1, 2) and cubes[0].tolist() == [[[5, 5]], [[-1, -1]], [[-1, -1]]]
    assert lengths.tolist() == [1, 3, 0] and extents.tolist() == [[1, 2], [3, 0], [0, 1]]
    _, structure = nest.flatten({"a": 1, "b": (2, 3)})
    whole, leaves = stage.outputs(structure)
    assert whole.unflatten("fpcle") == ({"a": "f", "b": ("p", "c")}, {"a": "l", "b": (None, "e")})
    assert list(map(str, leaves)) == ["float32[?,?]", "int64[?,2]", "int64[?,?,1,?]", "int64[?]", "int64[?,2]"]


def test_batches_of_unlike_elements_say_what_to_do() -> None:
    with pytest.raises(af.ShapeError, match=r"have shapes \[1\] and \[2\]; fill them up with pad=0"):
        Batched(2, (af.spec("int64", (None,)),), None, False).joined([[(np.ones(1, int),)], [(np.ones(2, int),)]])


@pytest.mark.parametrize(
    ("value", "spec", "found"),
    [
        (3, af.spec("float32", ()), np.float32(3)),
        ([1, 2], af.spec("int8", (None,)), np.array([1, 2], np.int8)),
        (np.float64(1.5), af.spec("float64", ()), np.float64(1.5)),
        ("text", af.spec("string", ()), "text"),
        ([], af.spec("float32", (None,)), np.zeros(0, np.float32)),
    ],
)
def test_values_take_the_declared_spec(value: Any, spec: Any, found: Any) -> None:
    given = as_value(value, spec, "x")
    assert type(given) is type(found) and np.array_equal(given, found)
    assert isinstance(given, str) or given.dtype == found.dtype


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (1.5, r"x is declared as int64\[2\], and cannot be 1.5"),
        (np.str_("one"), r"x is declared as int64\[2\], and cannot be .*'one'"),
        (np.ones(2), r"came as float64\[2\]"),
        ([1, 2, 3], r"came as int64\[3\]"),
        ("text", "cannot be 'text'"),
    ],
)
def test_values_that_are_not_as_declared(value: Any, message: str) -> None:
    with pytest.raises((af.DTypeError, af.ShapeError), match=message):
        as_value(value, af.spec("int64", (2,)), "x")
