"""`dynamic_slice`: parts of fixed extents at places that only the run knows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import asyncflow as af
from tests.autodiff.sweep import assert_derivatives
from tests.ops.against_numpy import compare


@pytest.mark.parametrize("starts", [(0, 0), (2, 1), (3, 0)])
def test_windows_are_numpys_slices(evaluate: Any, starts: tuple[int, int]) -> None:
    x = np.arange(15).reshape(5, 3)
    i, j = starts
    want = x[i : i + 2, j : j + 2]
    compare(evaluate, lambda x, i, j: af.dynamic_slice(x, [i, j], (2, 2)), want, x, np.int64(i), np.int8(j))
    compare(evaluate, lambda x, at: af.dynamic_slice(x, at, (2, 2)), want, x, np.array(starts), known=("all",))


def test_extents_are_known_whatever_else_is() -> None:
    with af.Graph():
        x, i = af.placeholder("float32"), af.placeholder("int64", ())
        assert af.dynamic_slice(x, [i, 0], [2, 8]).shape == (2, 8)
        start = af.zeros((2, 8), dtype="float32")
        _, kept = af.while_loop(
            lambda t, _: t < 3, lambda t, _: (t + 1, af.dynamic_slice(x, [t, 0], [2, 8])), (0, start)
        )
        assert kept.shape == (2, 8)


@pytest.mark.parametrize("start", [-1, 4])
def test_a_window_that_leaves_its_tensor_fails_the_run(evaluate: Any, start: int) -> None:
    with af.Graph():
        x, i = af.placeholder("float64", (None,)), af.placeholder("int64", ())
        with pytest.raises(IndexError, match=rf"a window of 2 from {start} on leaves axis 0 of \[5\]"):
            evaluate(af.dynamic_slice(x, [i], [2]), {x: np.ones(5), i: np.int64(start)})


def test_what_does_not_fit_is_refused() -> None:
    with af.Graph():
        x = af.placeholder("float64", (5, 3))
        refused: list[tuple[Any, Any, str]] = [
            ([0], [2], r"a start and a size for each axis of \[5,3\], got 1"),
            ([0, 0], [2], r"a size for each start; got 2 starts"),
            ([0, 0], [2, 4], r"a window of 4 does not fit axis 1 of \[5,3\]"),
            ([0, [0, 0]], [2, 2], r"a start is an integer scalar"),
            (af.placeholder("int64", (None,)), [2, 2], r"one vector of known length"),
        ]
        for starts, sizes, message in refused:
            with pytest.raises(af.ShapeError, match=message):
                af.dynamic_slice(x, starts, sizes)


def test_the_gradient_goes_back_to_its_place() -> None:
    x = np.random.default_rng(0).normal(size=(5, 3))
    assert_derivatives(lambda x: af.square(af.dynamic_slice(x, [af.constant(2), 1], [2, 2])), x, order=2)


async def test_windows_of_rows(run: Any) -> None:
    """Each row has starts of its own: values and gradients, inside and outside, equal the rows one by one."""
    rng = np.random.default_rng(0)
    rows, shared = rng.normal(size=(4, 6, 3)), rng.normal(size=(6, 3))
    starts = np.array([[0, 0], [4, 1], [2, 1], [4, 0]])

    def of_row(x: af.Tensor, start: af.Tensor, w: af.Tensor) -> af.Tensor:
        return af.sum(af.dynamic_slice(x, start, (2, 2)) ** 2 * af.dynamic_slice(w, start, (2, 2)))

    def all_of(xs: Any, at: Any, w: Any, map_rows: Any) -> list[af.Tensor]:
        inside = map_rows(lambda x, start: af.gradients(of_row(x, start, w), [x, w]), (xs, at))
        total = af.sum(map_rows(lambda x, start: of_row(x, start, w), (xs, at)))
        (first,) = af.gradients(total, [xs])
        return [total, first, *af.gradients(total, [w]), *af.gradients(af.sum(first**2), [xs, w]), *inside]

    def vmapped(function: Any, values: Any) -> Any:
        return af.vmap(function)(*values)

    def mapped(function: Any, values: Any) -> Any:
        return af.map_fn(lambda row: function(*row), values)

    def one_by_one(function: Any, values: Any) -> Any:
        found = [function(*(value[k] for value in values)) for k in range(4)]
        if isinstance(found[0], af.Tensor):
            return af.stack(found)
        return [af.stack(each) for each in zip(*found, strict=True)]

    with af.Graph():
        xs, at = af.placeholder("float64", (4, 6, 3)), af.placeholder("int64", (4, 2))
        w = af.placeholder("float64", (6, 3))
        ways = [all_of(xs, at, w, way) for way in (vmapped, mapped, one_by_one)]
        *found, expected = await run(ways, {xs: rows, at: starts, w: shared})
    for way in found:
        for one, other in zip(way, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12)


@pytest.mark.parametrize("start", [-1, 4])
async def test_a_window_of_a_row_that_leaves_its_tensor(run: Any, start: int) -> None:
    """The run fails and names the row: a negative position would be counted from the end."""
    with af.Graph():
        at = af.placeholder("int64", (3,))
        y = af.vmap(lambda i: af.dynamic_slice(af.ones(5), [i], [2]))(at)
        with pytest.raises(af.KernelError, match="out of bounds for axis 0 with size 5") as failed:
            await run(y, {at: [0, start, 1]})
    assert "vmap/1" in str(failed.value)
