"""Derivatives of TensorArrays, held against the same programs without arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import asyncflow as af
from asyncflow.autodiff.gradients import gradients
from asyncflow.autodiff.stores.store_gradients import JOINED_GRADIENTS
from asyncflow.ops.derivatives.shapes import zeros_of
from tests.autodiff.sweep import KNOWN, gradients_at

if TYPE_CHECKING:
    from collections.abc import Sequence

Array: TypeAlias = "np.ndarray[Any, Any]"


def array(size: Any, dtype: Any = "float64", **options: Any) -> af.TensorArray:
    return af.TensorArray(dtype, size, clear_after_read=False, **options)


def rows_of(x: af.Tensor) -> af.TensorArray:
    return array(af.shape(x)[0], x.dtype).unstack(x)


# -- against plain operations ----------------------------------------------------------------------------------------

X = np.arange(12.0).reshape(4, 3) / 7 + 0.3
Y = np.cos(np.arange(3.0))

PAIRS: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[Array, ...]]] = {
    "write_read": (
        lambda x, y: (lambda a: a.read(0) * a.read(1) + a.read(0))(array(2).write(1, y).write(0, x)),
        lambda x, y: x * y + x,
        (X, Y),
    ),
    "unstack_stack": (lambda x: rows_of(x).stack() ** 2, lambda x: x**2, (X,)),
    "unstack_gather": (lambda x: rows_of(x).gather([3, 0, 3]) ** 2, lambda x: af.take(x, [3, 0, 3], axis=0) ** 2, (X,)),
    "scatter_read": (
        lambda x: (lambda a: a.read(5) * a.read(2) ** 2)(array(6, x.dtype).scatter([2, 0, 5, 1], x)),
        lambda x: x[2] * x[0] ** 2,
        (X,),
    ),
    "scatter_stack": (
        lambda x: array(4, x.dtype).scatter([2, 0, 3, 1], x).stack() ** 3,
        lambda x: af.take(x, [1, 3, 0, 2], axis=0) ** 3,
        (X,),
    ),
    "split_concat": (
        lambda x: array(3, x.dtype).split(x, [1, 0, 3]).concat() ** 2,
        lambda x: x**2,
        (X,),
    ),
    "split_read": (
        lambda x: (lambda a: a.read(2) ** 2 * a.read(0))(array(3, x.dtype).split(x, [1, 1, 2])),
        lambda x: x[2:] ** 2 * x[:1],
        (X,),
    ),
    "write_concat": (
        lambda x, y: array(2).write(0, x).write(1, af.expand_dims(y, axis=0)).concat() ** 2,
        lambda x, y: af.concat([x, af.expand_dims(y, axis=0)]) ** 2,
        (X, Y),
    ),
    "write_stack": (
        lambda y: array(2, y.dtype).write(1, y).write(0, y * y).stack() ** 2,
        lambda y: af.stack([y * y, y]) ** 2,
        (Y,),
    ),
    "identity": (lambda x: rows_of(x).identity().read(1) ** 2, lambda x: x[1] ** 2, (X,)),
    "nothing_read": (lambda x: (rows_of(x), x**3)[1], lambda x: x**3, (X,)),
    "zeros_read": (
        lambda x: array(3, x.dtype, element_shape=(3,)).write(0, x[0]).stack() * x[1],
        lambda x: af.stack([x[0], x[0] * 0, x[0] * 0]) * x[1],
        (X,),
    ),
}


def differentiated(build: Callable[..., Any]) -> Callable[..., Any]:
    """The gradients of `build`, weighted so that their own gradients are not zeros."""

    def built(*xs: af.Tensor) -> list[af.Tensor]:
        found = gradients(build(*xs), list(xs))
        return [grad * (k + 2) for k, grad in enumerate(found)]

    return built


def check_derivatives(program: Callable[..., Any], plain: Callable[..., Any], values: Any, known: str) -> None:
    """Both derivatives of a program with a store, with these known shapes, equal the derivatives of a plain program."""
    for order in (lambda build: build, differentiated):
        found = gradients_at(order(program), *values, known=known, find=gradients)
        expected = gradients_at(order(plain), *values, find=gradients)
        for mine, theirs in zip(found, expected, strict=True):
            assert mine is not None
            assert theirs is not None
            np.testing.assert_allclose(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("known", KNOWN)
@pytest.mark.parametrize("name", PAIRS)
def test_an_array_changes_no_derivative(name: str, known: str) -> None:
    """First and second order, with all, ranks and nothing known of shapes."""
    check_derivatives(*PAIRS[name], known)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"])
def test_every_dtype_keeps_itself(dtype: str) -> None:
    """A gradient has the dtype of the written value, whether it is read, stacked or joined, zeros included."""
    with af.Graph():
        x = af.placeholder(dtype, (2, 2))
        a = rows_of(x)
        pieces = array(2, dtype).split(x, [1, 1])
        for y in (a.read(0), a.stack(), a.gather([1]), pieces.concat(), pieces.read(1)):
            assert gradients(y, x, zeros_of(y)).spec == x.spec


def test_static_shapes_are_kept() -> None:
    """Static shapes of a value are kept in its gradient, though a run supplies the rest."""
    with af.Graph():
        x = af.placeholder("float64", (None, 3))
        a = rows_of(x)
        for y in (a.read(0), a.stack(), array(2).split(x, [1, 1]).concat()):
            assert gradients(y, x).shape == (None, 3)


# -- random programs -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Program:
    """Rows of a value go into an array and come out again.

    Attributes:
        writer: how they go in.
        pieces: the rows that each element is made of; one row each, but for `split`.
        reads: how they come out, and which elements.
    """

    writer: str
    pieces: tuple[tuple[int, ...], ...]
    reads: tuple[tuple[str, tuple[int, ...]], ...]

    def rows(self, elements: Sequence[int]) -> list[int]:
        """The rows of elements, one after the other."""
        return [row for element in elements for row in self.pieces[element]]

    def written(self, x: af.Tensor) -> af.TensorArray:
        """The array."""
        empty = array(len(self.pieces))
        if self.writer == "split":
            return empty.split(x, [len(piece) for piece in self.pieces])
        if self.writer == "unstack":
            return empty.unstack(x)
        order = np.argsort([row for (row,) in self.pieces])
        if self.writer == "scatter":
            return empty.scatter(order, x)
        for row, element in enumerate(order.tolist()):
            empty = empty.write(element, x[row])
        return empty

    def results(self, x: af.Tensor) -> list[af.Tensor]:
        """Return the rows of the elements read, one after the other."""
        a = self.written(x)
        readers: dict[str, Callable[[tuple[int, ...]], af.Tensor]] = {
            "read": lambda elements: a.read(elements[0]),
            "stack": lambda elements: a.stack(),
            "gather": lambda elements: a.gather(list(elements)),
            "concat": lambda elements: a.concat(),
        }
        return [af.reshape(readers[name](elements), (-1, 2)) for name, elements in self.reads]


@st.composite
def programs(draw: st.DrawFn) -> Program:
    writer = draw(st.sampled_from(["write", "unstack", "scatter", "split"]))
    if writer == "split":
        ends = np.cumsum([0, *draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))]).tolist()
        pieces = tuple(tuple(range(start, stop)) for start, stop in pairwise(ends))
    else:
        rows = list(range(draw(st.integers(1, 5))))
        pieces = tuple((row,) for row in (rows if writer == "unstack" else draw(st.permutations(rows))))
    everything = tuple(range(len(pieces)))
    # Rows alone cannot be joined, nor pieces of different lengths stacked.
    names = ["read", "concat"] if writer == "split" else ["read", "stack", "gather"]
    reads = []
    for name in draw(st.lists(st.sampled_from(names), min_size=1, max_size=4)):
        some = st.lists(st.sampled_from(everything), min_size=1, max_size=1 if name == "read" else 6)
        reads.append((name, tuple(draw(some)) if name in ("read", "gather") else everything))
    return Program(writer, pieces, tuple(reads))


@settings(max_examples=50)
@given(programs())
def test_random_programs(program: Program) -> None:
    """Arrays only move values: the gradient of each row is the sum of what reaches the places it has come to."""
    everything = program.rows(range(len(program.pieces)))
    x, expected = np.arange(2.0 * len(everything)).reshape(-1, 2), np.zeros((len(everything), 2))
    rng = np.random.default_rng(3)
    grads = []
    for _, elements in program.reads:
        rows = program.rows(elements)
        grads.append(rng.integers(-9, 10, (len(rows), 2)).astype("float64"))
        np.add.at(expected, rows, grads[-1])
    (found,) = gradients_at(program.results, x, grad=grads, known="rank", find=gradients)
    np.testing.assert_array_equal(found, expected)


# -- the values ------------------------------------------------------------------------------------------------------


def test_joined_gradients_are_as_long_as_their_pieces() -> None:
    """Slices of too few rows would be empty without a word."""
    split = JOINED_GRADIENTS.kernel
    assert split is not None
    assert [grad.tolist() for _, grad in split(np, axis=0)(np.arange(3.0), np.array([1, 2])).entries()] == [[0], [1, 2]]
    with pytest.raises(ValueError, match=r"\[2\] has reached the joined elements .* lengths add up to 3"):
        split(np, axis=0)(np.arange(2.0), np.array([1, 2]))


def test_a_read_in_a_loop_adds_one_entry_an_iteration() -> None:
    """The gradient loop of reads of a captured array appends to one store; none is made of one entry to be merged."""
    with af.Graph() as graph:
        x = af.placeholder("float64", (5,))
        rows = rows_of(x)
        _, total = af.while_loop(lambda i, t: i < 5, lambda i, t: (i + 1, t + rows.read(i)), (0, 0.0))
        gradients(total, x)
    assert "merge_gradients" not in {node.op.name for node in graph.walk()}


def test_no_rule_uses_the_array_itself() -> None:
    """So forward arrays may be used up, closed and freed before the gradient runs, and loops need not save them."""
    with af.Graph() as graph:
        x = af.placeholder("float64", (None, 2))
        a = rows_of(x)
        scattered, pieces = array(5).scatter([0, 1], x), array(2).split(x, [1, 1])
        ys = [a.read(0), a.stack(), a.gather([1]), scattered.read(1), pieces.concat(), array(1).write(0, x).read(0)]
        before = len(graph.nodes)
        gradients(ys, x)
    forward = set(graph.nodes[:before])
    used = {each.node for node in graph.nodes[before:] for each in node.inputs if each.dtype == object}
    assert not used & forward
