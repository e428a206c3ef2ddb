"""Bodies over many rows equal their results row by row, gradients and random numbers included."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import asyncflow as af

RNG = np.random.default_rng(0)
X = RNG.normal(size=(7, 3))
W = RNG.normal(size=(3, 4))


def _body(w: Any) -> Any:
    """Branches and loops that each row takes and leaves for itself."""

    def body(row: Any) -> Any:
        h = af.tanh(row @ w) + 1.0
        y = af.cond(af.sum(h) > 4.0, lambda: h * 2, lambda: h - 1)
        steps, z = af.while_loop(
            lambda i, z: af.sum(z) < 30.0, lambda i, z: (i + 1, z + af.abs(af.sum(row)) + h * 0.1 + 0.5), (0, y)
        )
        thrice = af.while_loop(lambda i, z: i < 3, lambda i, z: (i + 1, z * 0.9), (0, z))[1]
        return {"z": z, "steps": steps, "thrice": thrice, "softmax": af.softmax(h), "shape": af.shape(h)}

    return body


@pytest.mark.parametrize("regions", [True, False])
async def test_a_lifted_body_gives_what_the_loop_over_rows_gives(regions: bool) -> None:
    with af.Graph() as graph:
        x, w = af.constant(X), af.constant(W)
        lifted, looped = (af.map_fn(_body(w), x, lift=lift) for lift in (True, False))
        grads = [af.gradients(af.sum(y["z"]) + af.sum(y["thrice"]), [x, w]) for y in (lifted, looped)]
    async with af.Session(graph, regions=regions) as session:
        (got, want), (got_grads, want_grads) = await session.run(((lifted, looped), grads))
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-12, err_msg=name)
    assert len(set(want["steps"].tolist())) > 2
    for one, other in zip(got_grads, want_grads, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10)


async def test_rows_draw_the_numbers_that_the_iterations_of_a_loop_draw() -> None:
    def noisy(row: Any) -> Any:
        walk = af.while_loop(lambda i, z: i < 3, lambda i, z: (i + 1, z + af.random.normal((3,)) * row), (0, row))[1]
        return walk, af.random.normal((2,))

    found = []
    for lift in (True, False):
        with af.Graph(seed=1) as graph:
            y = af.map_fn(noisy, af.constant(X), lift=lift, name="map")
        async with af.Session(graph) as session:
            found.append(await session.run(y))
    for one, other in zip(*found, strict=True):
        assert np.array_equal(one, other)


def _with_stores(row: Any) -> Any:
    """Loops that save values and TensorArrays, differentiated inside of the body."""
    table = af.linalg.outer(row, row)

    def step(i: Any, h: Any, out: Any) -> Any:
        h = af.tanh(h + table[i] * row[i])
        return i + 1, h, out.write(i, h)

    _, last, out = af.while_loop(lambda i, *_: i < 3, step, (0, row, af.TensorArray("float64", 3)))
    y = af.sum(last * last) + af.sum(out.stack() ** 2)
    (first,) = af.gradients(y, [row])
    (second,) = af.gradients(af.sum(first * first), [row])
    return y, first, second


def _checked(row: Any) -> Any:
    ramp = af.linspace(row[0], row[1], 4)
    with af.control_dependencies([af.assert_that(af.all(row < 100.0), "too large", [row])]):
        return af.check_numerics(row * 2.0), ramp


@pytest.mark.parametrize("body", [_with_stores, _checked])
async def test_stores_and_checks_over_rows(body: Any) -> None:
    with af.Graph() as graph:
        lifted, looped = (af.map_fn(body, af.constant(X), lift=lift) for lift in (True, False))
    async with af.Session(graph) as session:
        got, want = await session.run((lifted, looped))
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10)


@pytest.mark.parametrize(("bad", "name"), [(1000.0, "AssertionError: too large"), (np.nan, "FloatingPointError")])
async def test_a_check_that_fails_names_the_row_as_the_loop_does(bad: float, name: str) -> None:
    x = X.copy()
    x[4, 1] = bad
    told = []
    for lift in (True, False):
        with af.Graph() as graph:
            y = af.map_fn(
                lambda row: af.check_numerics(row) if bad != bad else _checked(row)[0],
                af.constant(x),
                lift=lift,
                name="map",
            )
        async with af.Session(graph) as session:
            with pytest.raises(af.KernelError, match=name) as failed:
                await session.run(y)
        assert failed.value.tag == "map/4"
        told.append((failed.value.reason, failed.value.location))
    assert told[0] == told[1]


@pytest.mark.filterwarnings("ignore:.* takes one row:UserWarning")
async def test_functions_of_users_are_called_for_each_row_or_for_all_of_them() -> None:
    shapes: list[tuple[int, ...]] = []

    def halved(x: Any) -> Any:
        shapes.append(x.shape)
        return x / 2

    gradient = lambda inputs, outputs, grads: grads * 0.5  # noqa: E731
    declared = af.spec("float64", (3,))
    by_row = af.op(outputs=declared, gradient=gradient)(halved)
    at_once = af.op(outputs=declared, gradient=gradient, rows=True, name="at_once")(halved)
    with af.Graph() as graph:
        x = af.constant(X)
        ys = [af.map_fn(each, x, lift=True) for each in (by_row, at_once)]
        alone = at_once(x[0])
        grads = af.gradients([af.sum(y * y) for y in ys], [x])
    async with af.Session(graph) as session:
        (one, other), single, (grad,) = await session.run((ys, alone, grads))
    np.testing.assert_allclose(one, X / 2)
    np.testing.assert_allclose(other, X / 2)
    np.testing.assert_allclose(single, X[0] / 2)
    np.testing.assert_allclose(grad, X)
    assert sorted(shapes) == sorted([(3,)] * 7 + [(7, 3), (1, 3)])


async def test_map_fn_is_lifted_where_it_can_be_and_the_plan_says_why_not() -> None:
    @af.op(outputs=af.spec("float64", (3,)))
    async def waits(x: Any) -> Any:
        return x

    with af.Graph() as graph:
        ys = [
            af.map_fn(fn, af.constant(X), name=name) for name, fn in (("fast", lambda row: row * 2.0), ("slow", waits))
        ]
        loop = af.map_fn(lambda row: row, af.constant(X), lift=False, name="asked")
        with pytest.raises(
            af.GraphError, match=r"map_fn\(lift=True\): .*waits\) is async or has limits .* for each row, built at"
        ):
            af.map_fn(waits, af.constant(X), lift=True)
    async with af.Session(graph) as session:
        told = session.plan([*ys, loop]).explain()
        alone = session.plan(ys[0]).explain()
    assert "fast: map_fn" in alone
    assert "slow: map_fn" not in alone
    assert "fast: map_fn computes all rows at once" in told
    assert "slow: map_fn is a loop over rows, slow/body/waits (waits) is async or has limits " in told
    assert "asked: map_fn is a loop over rows, as lift=False asks" in told


async def test_rows_that_differ_in_number_fail_the_run_however_they_broadcast() -> None:
    with af.Graph() as graph:
        one, other = af.placeholder("float64", (None,)), af.placeholder("float64", (None,))
        loose = af.placeholder("float64")
        found = [af.map_fn(lambda row: row[0] + row[1], (one, each)) for each in (other, loose)]
        found.append(af.vmap(af.add)(one, other))
    async with af.Session(graph) as session:
        for y in found:
            with pytest.raises(af.KernelError, match="has size 3; got 1 rows"):
                await session.run(y, {one: [1.0, 2.0, 3.0], other: [1.0], loose: [1.0]})


def _unpacking(body: Any) -> Any:
    return lambda each: body(*each)


_INDEXED: dict[str, Any] = {
    "own": lambda row, i: row[i],
    "shared": lambda row, i: af.constant(X)[i, 1],
    "take": lambda row, i: af.take(af.constant(X.T), i, axis=1),
    "take_along_axis": lambda row, i: af.take_along_axis(row, af.stack([i, i])),
    "update": lambda row, i: af.index_update(row, i, 1.0),
    "scatter_add": lambda row, i: af.scatter_add(row, i, 1.0),
    "embedding": lambda row, i: af.embedding(af.constant(X), i),
    "branch": lambda row, i: af.cond(i > 1, lambda: row[i], lambda: row[0]),
    "apart": lambda row, i: af.zeros((3, 2, 3))[i, :, i * 0],
    "rows of rows": lambda row, i, lift: af.map_fn(lambda j: row[j], af.stack([i * 0, i]), lift=lift, name="inner"),
}


@pytest.mark.parametrize("regions", [True, False])
@pytest.mark.parametrize("name", _INDEXED)
async def test_a_position_out_of_range_names_the_row_as_the_loop_does(name: str, regions: bool) -> None:
    """So does the extent, and the number of its axis is that of a row."""
    told = []
    for lift in (True, False):
        with af.Graph() as graph:
            positions = af.placeholder("int64", (None,))
            body = partial(_INDEXED[name], lift=lift) if name == "rows of rows" else _INDEXED[name]
            y = af.map_fn(_unpacking(body), (af.constant(X), positions), lift=lift, name="map")
        async with af.Session(graph, regions=regions) as session:
            with pytest.raises(
                af.KernelError, match=r"IndexError: index 9 is out of bounds for axis . with size"
            ) as failed:
                await session.run(y, {positions: [0, 2, 1, 9, 0, -8, 1]})
        told.append((failed.value.tag, failed.value.reason, failed.value.location))
    assert told[0] == told[1]
    assert told[0][0].startswith("map/3")
