from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow.errors import DTypeError, GraphError, ShapeError
from asyncflow.graph.building.build import constant, placeholder
from asyncflow.graph.graph import Graph
from asyncflow.graph.values.dtypes import string
from asyncflow.ops.arrays import manipulation as m
from asyncflow.ops.arrays import shape as shapes
from tests.ops.against_numpy import NUMBERS, compare, sample
from tests.ops.conftest import _evaluate

WORDS = np.array([["a", "bc"], ["d", ""]], dtype=string)

VIEWS = [
    ("expand_dims", (2, 3), m.expand_dims, lambda x: x[None]),
    ("expand_dims", (2, 3), lambda t: m.expand_dims(t, axis=(0, -1)), lambda x: x[None, ..., None]),
    ("expand_dims", (2, 3), lambda t: m.expand_dims(t, axis=(2, 0)), lambda x: x[None, :, None]),
    ("expand_dims", (2, 3), lambda t: m.expand_dims(t, axis=(-1, -3)), lambda x: x[:, None, :, None]),
    ("expand_dims", (2, 3), lambda t: m.expand_dims(t, axis=()), lambda x: x),
    ("expand_dims", (), lambda t: m.expand_dims(t, axis=-1), lambda x: x[None]),
    ("squeeze", (1, 3, 1), lambda t: m.squeeze(t, 0), lambda x: x[0]),
    ("squeeze", (1, 3, 1), lambda t: m.squeeze(t, (0, -1)), lambda x: x[0, :, 0]),
    ("squeeze", (1,), lambda t: m.squeeze(t, 0), lambda x: x[0]),
    ("permute_dims", (2, 3, 4), lambda t: m.permute_dims(t, (2, 0, -2)), lambda x: x.transpose(2, 0, 1)),
    ("permute_dims", (), lambda t: m.permute_dims(t, ()), lambda x: x),
    ("flip", (2, 3), m.flip, np.flip),
    ("flip", (2, 3), lambda t: m.flip(t, axis=-1), lambda x: np.flip(x, -1)),
    ("flip", (), m.flip, lambda x: x),
    ("roll", (2, 3), lambda t: m.roll(t, 1), lambda x: np.roll(x, 1)),
    ("roll", (2, 3), lambda t: m.roll(t, (1, -2), axis=(0, 1)), lambda x: np.roll(x, (1, -2), (0, 1))),
    ("roll", (2, 3), lambda t: m.roll(t, 4, axis=1), lambda x: np.roll(x, 4, 1)),
    ("repeat", (2, 3), lambda t: m.repeat(t, 2), lambda x: np.repeat(x, 2)),
    ("repeat", (2, 3), lambda t: m.repeat(t, 0, axis=1), lambda x: np.repeat(x, 0, 1)),
    ("repeat", (2, 3), lambda t: m.repeat(t, [2, 0, 1], axis=-1), lambda x: np.repeat(x, [2, 0, 1], -1)),
    ("repeat", (), lambda t: m.repeat(t, 3), lambda x: np.repeat(x, 3)),
    ("tile", (2, 3), lambda t: m.tile(t, 2), lambda x: np.tile(x, 2)),
    ("tile", (2, 3), lambda t: m.tile(t, (2, 1, 2)), lambda x: np.tile(x, (2, 1, 2))),
    ("tile", (), lambda t: m.tile(t, ()), lambda x: x),
    ("tile", (2,), lambda t: m.tile(t, 0), lambda x: np.tile(x, 0)),
    ("reshape", (2, 6), lambda t: m.reshape(t, (3, -1)), lambda x: x.reshape(3, 4)),
    ("reshape", (2, 6), lambda t: m.reshape(t, -1), lambda x: x.reshape(-1)),
    ("reshape", (1, 1), lambda t: m.reshape(t, ()), lambda x: x.reshape(())),
    ("reshape", (), lambda t: m.reshape(t, (1, 1)), lambda x: x.reshape(1, 1)),
    ("reshape", (0, 3), lambda t: m.reshape(t, (0, 7)), lambda x: x.reshape(0, 7)),
    ("reshape", (0, 3), lambda t: m.reshape(t, (-1, 7)), lambda x: x.reshape(-1, 7)),
    ("concat", (2, 3), lambda t: m.concat([t, t], axis=-1), lambda x: np.concatenate([x, x], -1)),
    ("concat", (2, 3), lambda t: m.concat([t, t], axis=None), lambda x: np.concatenate([x, x], None)),
    ("concat", (0, 3), lambda t: m.concat([t]), lambda x: x),
    ("stack", (2, 3), lambda t: m.stack([t, t], axis=-1), lambda x: np.stack([x, x], -1)),
    ("stack", (), lambda t: m.stack([t, t]), lambda x: np.stack([x, x])),
]


@pytest.mark.parametrize(("name", "shape", "build", "reference"), VIEWS)
def test_against_numpy(evaluate: Any, name: Any, shape: Any, build: Any, reference: Any) -> None:
    for dtype in ("bool", "int8", "float32", "complex64", ml_dtypes.bfloat16):
        x = sample(shape, dtype)
        compare(evaluate, build, reference(x), x)


@pytest.mark.parametrize(
    ("build", "reference"),
    [
        (lambda t: m.concat([t, t]), lambda x: np.concatenate([x, x])),
        (lambda t: m.stack([t, t]), lambda x: np.stack([x, x])),
        (lambda t: m.reshape(t, -1), lambda x: x.reshape(-1)),
        (lambda t: m.repeat(t, 2), lambda x: np.repeat(x, 2)),
        (lambda t: m.tile(t, (1, 2)), lambda x: np.tile(x, (1, 2))),
        (m.flip, np.flip),
        (lambda t: m.roll(t, 1, axis=0), lambda x: np.roll(x, 1, 0)),
    ],
)
def test_strings(evaluate: Any, build: Any, reference: Any) -> None:
    compare(evaluate, build, reference(WORDS), WORDS)


def test_unstacked_strings_stay_arrays(evaluate: Any) -> None:
    expected = tuple(np.asarray(word, dtype=string) for word in WORDS[:, 0])
    compare(evaluate, m.unstack, expected, WORDS[:, 0], known=("all",))


@pytest.mark.parametrize(("first", "second"), [(a, b) for a in NUMBERS for b in NUMBERS if a < b])
def test_joining_promotes(evaluate: Any, first: Any, second: Any) -> None:
    x, y = sample((2, 3), first), sample((2, 3), second, 1)
    compare(evaluate, lambda s, t: m.concat([s, t]), np.concatenate([x, y]), x, y, known=("all",))
    compare(evaluate, lambda s, t: m.stack([s, t]), np.stack([x, y]), x, y, known=("all",))


def test_python_numbers_are_weak_when_stacked(evaluate: Any) -> None:
    x = np.float32(2)
    compare(evaluate, lambda t: m.stack([t, 1, 0.5]), np.array([2, 1, 0.5], np.float32), x)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_unstack(evaluate: Any, axis: Any) -> None:
    x = sample((2, 3), "float32")
    compare(evaluate, lambda t: m.unstack(t, axis=axis), tuple(np.moveaxis(x, axis, 0)), x, known=("all",))


@pytest.mark.parametrize(("source", "destination"), [(0, -1), (-1, 0), ((0, 1), (2, 0)), ((2, 0), (-2, -1)), ((), ())])
def test_moveaxis(evaluate: Any, source: Any, destination: Any) -> None:
    x = sample((2, 3, 4), "int32")
    expected = np.moveaxis(x, source, destination)
    compare(evaluate, lambda t: m.moveaxis(t, source, destination), expected, x, known=("all", "rank"))


@pytest.mark.parametrize("shape", [(None, 3), (None, None), None])
def test_unstack_into_a_number_that_the_run_checks(evaluate: Any, shape: Any) -> None:
    x = sample((2, 3), "float32")
    with Graph():
        t = placeholder("float32", shape)
        parts = m.unstack(t, num=2)
    assert parts[0].shape == (None if shape is None else shape[1:])
    for part, row in zip(parts, x, strict=True):
        np.testing.assert_array_equal(evaluate(part, {t: x}), row)
        with pytest.raises(Exception, match=r"unstack: num=2, but axis 0 of \[3,3\] has 3 slices"):
            evaluate(part, {t: np.ones((3, 3), np.float32)})


def test_roll_by_a_tensor(evaluate: Any) -> None:
    x = sample((2, 3), "float32")
    both = np.roll(x, (1, -2), (0, 1))
    compare(evaluate, lambda t, n: m.roll(t, n, axis=(0, 1)), both, x, np.array([1, -2]))
    compare(evaluate, lambda t, n: m.roll(t, (n, -2), axis=(0, 1)), both, x, np.array(1))
    compare(evaluate, lambda t, n: m.roll(t, n, axis=1), np.roll(x, -1, 1), x, np.int32(-1))
    compare(evaluate, m.roll, np.roll(x, 2), x, np.array(2, np.uint64))


@pytest.mark.parametrize(
    "counts", [np.array(2), np.array([1, 3], np.uint8), np.array([0, 2], np.uint64), np.array([2])]
)
def test_repeat_by_a_tensor(evaluate: Any, counts: Any) -> None:
    x = sample((2, 3), "float32")
    compare(evaluate, lambda t, n: m.repeat(t, n, axis=0), np.repeat(x, counts.astype(int), 0), x, counts)


def test_reshape_to_shapes_only_the_run_knows(evaluate: Any) -> None:
    x, n = sample((2, 6), "float32"), np.int64(4)
    compare(evaluate, m.reshape, x.reshape(4, 3), x, np.array([4, 3]))
    compare(evaluate, m.reshape, x.reshape(-1), x, np.array([-1], np.int8))
    compare(evaluate, lambda t, k: m.reshape(t, (k, -1)), x.reshape(4, 3), x, n)
    compare(evaluate, lambda t, k: m.reshape(t, (k, 3)), x.reshape(4, 3), x, n)
    compare(evaluate, m.reshape, x.reshape(12), x, np.array([12]))
    compare(evaluate, lambda s, t: m.reshape(s, shapes.shape(t)), x.reshape(3, 4), x, np.zeros((3, 4)))


def test_known_parts_of_reshaped_values() -> None:
    with Graph():
        x, k = placeholder("float32", (None, 4)), placeholder("int64", ())
        assert m.reshape(x, (2, -1)).shape == (2, None)
        assert m.reshape(x, (k, 2, -1)).shape == (None, 2, None)
        assert m.reshape(x, placeholder("int64", (3,))).shape == (None, None, None)
        assert m.reshape(x, placeholder("int64", (None,))).shape is None
        assert m.reshape(placeholder("float32", (3, 4)), (2, -1), copy=True).shape == (2, 6)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=4), st.data())
def test_reshape_agrees_with_numpy_on_what_fits(dims: Any, data: Any) -> None:
    x = np.zeros((2, 3, 2), np.int8)
    target = tuple(data.draw(st.permutations([*dims, *data.draw(st.sampled_from([[], [-1]]))])))
    try:
        expected = x.reshape(target)
    except ValueError:
        with Graph(), pytest.raises(ShapeError):
            m.reshape(placeholder("int8", x.shape), target)
        return
    compare(_evaluate, lambda t: m.reshape(t, target), expected, x)


@pytest.mark.parametrize("shape", [(), (3,), (0, 2), (2, 3, 4)])
def test_shape_size_and_rank(evaluate: Any, shape: Any) -> None:
    x = sample(shape, "float32")
    compare(evaluate, shapes.shape, np.array(shape, np.int64), x)
    compare(evaluate, shapes.size, np.int64(x.size), x)
    compare(evaluate, shapes.rank, np.int64(x.ndim), x)


def _p(*shape: Any) -> Any:
    return placeholder("float32", shape)


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: m.concat([]), GraphError, "at least one array"),
        (lambda: m.concat([_p(2, 3), _p(3)]), ShapeError, r"one rank, got \[2,3\], \[3\]"),
        (lambda: m.concat([_p(2, 3), _p(2, 4)]), ShapeError, "equal extents along the other axes"),
        (lambda: m.concat([_p(), _p()]), ShapeError, "axis 0 is out of range"),
        (lambda: m.concat([_p(2), constant(np.array(["a"], dtype=string))]), DTypeError, "no common dtype"),
        (lambda: m.stack([_p(2), _p(3)]), ShapeError, "equal extents"),
        (lambda: m.stack([_p(2), _p(2, 1)]), ShapeError, "must have one shape"),
        (lambda: m.unstack(_p(None, 2)), ShapeError, "loop over it with af.map_fn"),
        (lambda: m.unstack(placeholder("int8")), ShapeError, "must be known while the graph is built"),
        (lambda: m.unstack(_p(3, 2), num=2), ShapeError, "num=2, but axis 0 of .* has 3 slices"),
        (lambda: m.unstack(_p(None), num=-1), ShapeError, "num is not negative"),
        (lambda: m.roll(_p(2), constant([1, 2]), axis=0), ShapeError, "a place for each of several axes"),
        (lambda: m.roll(_p(2, 2), constant([1]), axis=(0, 1)), ShapeError, "a place for each of several axes"),
        (lambda: m.squeeze(_p(2, 1), 0), ShapeError, "only axes of extent 1"),
        (lambda: m.permute_dims(_p(2, 3), (0,)), ShapeError, "must name every axis"),
        (lambda: m.permute_dims(_p(2, 3), (0, 0)), ShapeError, "names an axis twice"),
        (lambda: m.moveaxis(placeholder("int8"), 0, 1), ShapeError, "use permute_dims"),
        (lambda: m.moveaxis(_p(2, 3), (0, 1), 0), ShapeError, "equally many axes"),
        (lambda: m.flip(_p(2), axis=1), ShapeError, "axis 1 is out of range"),
        (lambda: m.roll(_p(2), (1, 2), axis=0), ShapeError, "several shifts"),
        (lambda: m.roll(_p(2), (1, 2), axis=(0,)), ShapeError, "must have one length"),
        (lambda: m.roll(_p(2), _p()), DTypeError, "an integer shift, not float32"),
        (lambda: m.repeat(_p(2), -1), ShapeError, "repeats must be 0 or more"),
        (lambda: m.repeat(_p(2), [1, 2, 3]), ShapeError, "3 counts for an axis of extent 2"),
        (lambda: m.repeat(_p(2), 1.5), DTypeError, "integer repeats"),
        (lambda: m.tile(_p(2), -1), ShapeError, "repetitions must be 0 or more"),
        (lambda: m.reshape(_p(2, 3), (4,)), ShapeError, r"6 elements of \[2,3\] do not fill a shape of \(4,\)"),
        (lambda: m.reshape(_p(2, 3), (-1, 4)), ShapeError, "do not fill"),
        (lambda: m.reshape(_p(2, 3), (-1, -1)), ShapeError, "at most one -1"),
        (lambda: m.reshape(_p(2, 3), (-2,)), ShapeError, "non-negative ints"),
        (lambda: m.reshape(_p(2, 3), (1.5,)), GraphError, "an extent must be an int"),
        (lambda: m.reshape(_p(2, 3), _p(2)), DTypeError, "an integer shape, not float32"),
        (lambda: m.reshape(_p(0, 3), (0, -1)), ShapeError, "undetermined if another extent is 0"),
        (lambda: m.expand_dims(_p(2), axis=3), ShapeError, "axis 3 is out of range for a value of rank 2"),
    ],
)
def test_errors_name_the_fault(build: Any, error: Any, message: Any) -> None:
    with Graph(), pytest.raises(error, match=message):
        build()
