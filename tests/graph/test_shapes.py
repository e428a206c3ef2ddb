"""Partial shapes: tables, and laws that hold for any shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncflow.errors import ShapeError
from asyncflow.graph.values import shapes
from asyncflow.graph.values.shapes import Shape
from asyncflow.graph.values.spec import Spec, spec

FULL = st.lists(st.integers(0, 3), max_size=4).map(tuple)
PARTIAL = st.none() | st.lists(st.none() | st.integers(0, 3), max_size=4).map(tuple)


@st.composite
def forgetting(draw: st.DrawFn, full: tuple[int, ...]) -> Shape:
    """A shape that `full` is a case of."""
    if draw(st.integers(0, 9)) == 0:
        return None
    return tuple(draw(st.sampled_from([dim, None])) for dim in full)


@pytest.mark.parametrize(
    ("given_shape", "expected"),
    [(None, None), (3, (3,)), ((), ()), ([2, None], (2, None)), ((np.int64(2),), (2,))],
)
def test_as_shape_takes(given_shape: Any, expected: Shape) -> None:
    assert shapes.as_shape(given_shape) == expected


@pytest.mark.parametrize("bad", [-1, (1, -2), (1.0,), ("3",), (True,), True, ((1,),)])
def test_as_shape_refuses(bad: Any) -> None:
    with pytest.raises(ShapeError, match="a shape holds non-negative ints, or None where unknown; got"):
        shapes.as_shape(bad)


@pytest.mark.parametrize(
    ("shape", "text"), [(None, "[...]"), ((), "[]"), ((2, None), "[2,?]"), ((0,), "[0]"), ((None,), "[?]")]
)
def test_format_shape(shape: Shape, text: str) -> None:
    assert shapes.format_shape(shape) == text
    assert str(Spec(np.dtype("int8"), shape)) == f"int8{text}"


def test_spec_takes_likes() -> None:
    assert spec(float, [None]) == Spec(np.dtype("float64"), (None,))
    assert (spec("int8").rank, spec("int8", (1, None)).rank) == (None, 2)


@given(PARTIAL)
def test_size_is_known_exactly_for_static_shapes(shape: Shape) -> None:
    assert (shapes.size_of(shape) is not None) == shapes.is_static(shape)


@pytest.mark.parametrize(("shape", "size"), [((), 1), ((2, 3), 6), ((2, 0), 0)])
def test_size_of(shape: Shape, size: int) -> None:
    assert shapes.size_of(shape) == size


@given(st.data())
def test_shapes_of_one_value_merge_to_what_both_say(data: st.DataObject) -> None:
    full = data.draw(FULL)
    a, b = data.draw(forgetting(full)), data.draw(forgetting(full))
    assert shapes.is_compatible(a, b)
    merged = shapes.merge(a, b)
    assert shapes.is_subshape(full, merged)
    assert shapes.is_subshape(merged, a)
    assert shapes.is_subshape(merged, b)


@given(PARTIAL, PARTIAL)
def test_merge_fails_exactly_where_shapes_are_incompatible(a: Shape, b: Shape) -> None:
    if shapes.is_compatible(a, b):
        assert shapes.merge(a, b) == shapes.merge(b, a)
        return
    with pytest.raises(ShapeError, match="cannot be of one value"):
        shapes.merge(a, b)


@given(PARTIAL, PARTIAL)
def test_relax_covers_both(a: Shape, b: Shape) -> None:
    relaxed = shapes.relax(a, b)
    assert relaxed == shapes.relax(b, a)
    assert shapes.is_subshape(a, relaxed)
    assert shapes.is_subshape(b, relaxed)
    assert shapes.relax(a, a) == a


@given(FULL, FULL)
def test_broadcast_of_full_shapes_is_numpys(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    try:
        expected = np.broadcast_shapes(a, b)
    except ValueError:
        with pytest.raises(ShapeError, match="do not broadcast: extents must be equal or 1"):
            shapes.broadcast([a, b])
        return
    assert shapes.broadcast([a, b]) == expected


@given(st.data())
def test_broadcast_of_partial_shapes_covers_every_case(data: st.DataObject) -> None:
    a, b = data.draw(FULL), data.draw(FULL)
    partial = [data.draw(forgetting(a)), data.draw(forgetting(b))]
    try:
        full = shapes.broadcast([a, b])
    except ShapeError:
        return
    assert shapes.is_subshape(full, shapes.broadcast(partial))


@pytest.mark.parametrize(
    ("given_shapes", "expected"),
    [
        ([], ()),
        ([None, (2,)], None),
        ([(None,), (3,)], (3,)),
        ([(None,), (1,)], (None,)),
        ([(None, 1), (4,)], (None, 4)),
        ([(None,), (0,)], (0,)),
    ],
)
def test_broadcast_knows_what_can_be_known(given_shapes: list[Shape], expected: Shape) -> None:
    assert shapes.broadcast(given_shapes) == expected


def test_broadcast_error_shows_the_shapes() -> None:
    with pytest.raises(ShapeError, match=r"shapes \[2\] and \[4,3\] do not broadcast: .* found \[2, 3\]"):
        shapes.broadcast([(2,), (4, 3)])


@pytest.mark.parametrize(("axis", "rank", "expected"), [(0, 1, 0), (-1, 3, 2), (2, 3, 2), (-3, 3, 0)])
def test_normalize_axis(axis: int, rank: int, expected: int) -> None:
    assert shapes.normalize_axis(axis, rank) == expected


@pytest.mark.parametrize(("axis", "rank"), [(0, 0), (3, 3), (-4, 3)])
def test_normalize_axis_refuses(axis: int, rank: int) -> None:
    with pytest.raises(ShapeError, match=f"axis {axis} is out of range for a value of rank {rank}"):
        shapes.normalize_axis(axis, rank)
