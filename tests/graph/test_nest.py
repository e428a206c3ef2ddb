"""Nests come apart into leaves and go together again, and say where two of them differ."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncflow.graph.values import nest
from tests.texts import texts

Point = namedtuple("Point", ["x", "y"])


@dataclass(frozen=True)
class State:
    h: Any
    c: Any


@dataclass
class Box:
    """Registered as a container with a label that has to match."""

    label: str
    items: list[Any]


class Opaque:
    pass


nest.register(
    Box, lambda b: (tuple(range(len(b.items))), tuple(b.items), b.label), lambda aux, xs: Box(str(aux), list(xs))
)

NESTS = st.recursive(
    st.integers() | st.none(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(texts(max_size=2), inner, max_size=3)
        | st.builds(Point, inner, inner)
        | st.builds(State, inner, inner)
        | st.builds(Box, st.just("box"), st.lists(inner, max_size=2))
    ),
    max_leaves=12,
)


@given(NESTS)
def test_flatten_and_unflatten_round_trip(value: Any) -> None:
    leaves, structure = nest.flatten(value)
    assert structure.unflatten(leaves) == value
    assert structure.size == len(leaves) == len(list(structure.paths()))
    assert nest.flatten(structure.unflatten(leaves))[1] == structure
    assert nest.flatten_like(structure, value) == leaves


@given(NESTS)
def test_map_leaves_keeps_the_structure(value: Any) -> None:
    mapped = nest.map_leaves(lambda leaf: leaf + 1, value)
    assert nest.flatten(mapped)[1] == nest.flatten(value)[1]
    assert nest.flatten(mapped)[0] == [leaf + 1 for leaf in nest.flatten(value)[0]]


@pytest.mark.parametrize(
    "value",
    [
        OrderedDict(b=1, a=2),
        defaultdict(int, {"b": 1}),
        {},
        [],
        (),
        None,
        Opaque,
        Opaque(),
        "text",
        {"k": Point(1, [2])},
    ],
)
def test_kinds_are_kept(value: Any) -> None:
    leaves, structure = nest.flatten(value)
    back = structure.unflatten(leaves)
    assert back == value
    assert type(back) is type(value)


def test_dicts_match_in_any_order() -> None:
    _, structure = nest.flatten({"a": 0, "b": 0})
    assert nest.flatten_like(structure, {"b": 2, "a": 1}) == [1, 2]


def test_paths_read_like_python() -> None:
    _, structure = nest.flatten({"state": State([1, 2], Point(3, (4,)))})
    assert list(structure.paths("vars")) == [
        "vars['state'].h[0]",
        "vars['state'].h[1]",
        "vars['state'].c.x",
        "vars['state'].c.y[0]",
    ]


@pytest.mark.parametrize(
    ("expected", "got", "message"),
    [
        (1, (1,), "^expected one value, got a tuple of 1 value$"),
        ((1, 2), [1, 2], "^expected a tuple of 2 values, got a list of 2 values$"),
        ((1, 2), (1, 2, 3), "^expected a tuple of 2 values, got a tuple of 3 values$"),
        ((1, 2), (), "^expected a tuple of 2 values, got an empty tuple$"),
        ({"a": 1}, {"b": 1}, "^expected a dict with keys 'a', got a dict with keys 'b'$"),
        ({"a": (1, [2])}, {"a": (1, 2)}, r"^\['a'\]\[1\]: expected a list of 1 value, got one value$"),
        (State(1, Point(1, 2)), State(1, Point(1, (2,))), r"^\.c\.y: expected one value, got a tuple of 1 value$"),
        (State(1, 2), Point(1, 2), "^expected a State with fields h, c, got a Point with fields x, y$"),
        (1, None, "^expected one value, got None$"),
        (None, 1, "^expected None, got one value$"),
        (Box("a", [1]), Box("b", [1]), "^expected a Box with 'a', got 'b'$"),
    ],
)
def test_mismatches_say_where(expected: Any, got: Any, message: str) -> None:
    _, structure = nest.flatten(expected)
    with pytest.raises(nest.StructureMismatch, match=message):
        nest.flatten_like(structure, got)


def test_nested_leaves_may_be_containers() -> None:
    _, structure = nest.flatten((1, 2))
    assert nest.flatten_like(structure, ((2, 3), None), nested_leaves=True) == [(2, 3), None]


@pytest.mark.parametrize("leaves", [[1], [1, 2, 3]])
def test_a_wrong_number_of_leaves_is_refused(leaves: list[int]) -> None:
    _, structure = nest.flatten((0, 0))
    with pytest.raises(ValueError, match=f"{len(leaves)} leaves for a structure with 2"):
        structure.unflatten(leaves)


def test_registered_leaves_stay_whole() -> None:
    @dataclass
    class Whole:
        part: int

    value = Whole(1)
    assert nest.flatten(value)[0] == [1]
    nest.register_leaf(Whole)
    assert nest.flatten([value])[0] == [value]


def test_attrs_classes_are_containers() -> None:
    @attrs.frozen
    class Cell:
        h: Any
        _c: Any

    @attrs.define
    class Pair:
        first: Any
        second: Any = None

    given = Pair(Cell(1, [2, 3]), {"x": 4})
    leaves, structure = nest.flatten(given)
    assert leaves == [1, 2, 3, 4]
    assert structure.unflatten(leaves) == given
    assert list(structure.paths()) == [".first.h", ".first._c[0]", ".first._c[1]", ".second['x']"]
    with pytest.raises(nest.StructureMismatch, match=r"\.first: expected a Cell with fields h, _c, got one value"):
        nest.flatten_like(structure, Pair(1, {"x": 4}))
