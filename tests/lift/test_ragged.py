"""Members of different extents in one call: whatever their lengths, each gets its own part."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import asyncflow as af
from asyncflow.lift.calls.ragged import RaggedRows

Array = np.ndarray[Any, Any]
EDGES = (2, 5)
WAYS = {
    "pad": af.Batch(pad=-7),
    "bucket": af.Batch(bucket=EDGES),
    "function": af.Batch(bucket=lambda length: length + 3, pad=1),
    "packed": af.Batch(ragged="packed"),
}


def ragged_of(way: str) -> RaggedRows:
    """Of a table whose rows and, if padded, columns differ, a vector, and a scalar; results are the first two."""
    with af.Graph():
        columns = 2 if way == "packed" else None
        given = [
            af.placeholder("int64", (None, columns)),
            af.placeholder("float32", (None,)),
            af.placeholder("int64", ()),
        ]
        ragged = RaggedRows(WAYS[way], given, "f")

    def shapes_with(lengths: dict[Any, int], members: int) -> list[Any]:
        of = {tuple(extent): length for extent, length in lengths.items()}
        return [(of[0, 0], of.get((0, 1), 2)), (of[1, 0],)]

    ragged.find_parts([x.spec for x in given[:2]], shapes_with, ())
    return ragged


@st.composite
def members_of(draw: st.DrawFn, columns: int | None) -> list[tuple[Array, ...]]:
    lengths = st.integers(0, 7)
    shapes = draw(st.lists(st.tuples(lengths, lengths, lengths), min_size=1, max_size=6))
    return [
        (
            np.full((rows, wide if columns is None else columns), 100 + number),
            np.arange(long, dtype=np.float32) + 1000 * number,
            np.array(number),
        )
        for number, (rows, wide, long) in enumerate(shapes)
    ]


@pytest.mark.parametrize("way", WAYS)
@given(data=st.data())
def test_each_member_gets_its_own_part(way: str, data: st.DataObject) -> None:
    """Fault F42: a call that returns its arguments returns each member's own, to the bit, and their lengths."""
    ragged = ragged_of(way)
    members = data.draw(members_of(2 if way == "packed" else None))
    inputs = [ragged.with_told(member) for member in members]
    fed = [ragged.joined(place, np, rows) for place, rows in enumerate(zip(*inputs, strict=True))]
    parts = list(ragged.parts(fed[:2], fed, inputs))
    assert len(parts) == len(members)
    for part, member in zip(parts, members, strict=True):
        for found, expected in zip(part, member, strict=False):
            np.testing.assert_array_equal(found, expected, strict=True)
    assert fed[2].tolist() == list(range(len(members)))
    told = fed[ragged.told]
    for extent, lengths in zip(ragged.extents, told if way == "packed" else told.T, strict=True):
        own = [member[extent.place].shape[extent.axis] for member in members]
        if way == "packed":
            assert [end - start for start, end in pairwise(lengths.tolist())] == own
        else:
            assert lengths.tolist() == own


@pytest.mark.parametrize("way", ["pad", "bucket", "function"])
@given(data=st.data())
def test_padding_fills_to_the_longest_or_to_the_edge(way: str, data: st.DataObject) -> None:
    """Members of one kind, which share a call, are all padded to the same edge."""
    ragged = ragged_of(way)
    members = data.draw(members_of(None))
    inputs = [ragged.with_told(member) for member in members]
    kinds = {ragged.kind(each) for each in inputs}
    vectors = [each[1] for each in members]
    padded = ragged.joined(1, np, vectors)
    longest = max(map(len, vectors))
    edge = next((edge for edge in EDGES if edge >= longest), longest)
    assert padded.shape == (len(members), {"pad": longest, "bucket": edge, "function": longest + 3}[way])
    fill = {"pad": -7, "bucket": 0, "function": 1}[way]
    for row, vector in zip(padded, vectors, strict=True):
        assert (row[len(vector) :] == fill).all()
    if way == "pad":
        assert len(kinds) == 1
    if way == "bucket":
        alike = {
            tuple(next((e for e in EDGES if e >= n), n) for n in (*each[0].shape, len(each[1]))) for each in members
        }
        assert len(kinds) == len(alike)


def test_a_result_of_another_length_belongs_to_no_member() -> None:
    ragged = ragged_of("packed")
    inputs = [ragged.with_told((np.ones((n, 2), int), np.ones(n, np.float32), np.array(0))) for n in (1, 2)]
    fed = [ragged.joined(place, np, rows) for place, rows in enumerate(zip(*inputs, strict=True))]
    with pytest.raises(ValueError, match="result 1 of f has extent 2 where there are 3"):
        list(ragged.parts([fed[0], fed[1][1:]], fed, inputs))
