"""Derivatives of RowStores, held against the same programs with `concat` and `take`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import asyncflow as af
from asyncflow.autodiff.gradients import gradients
from asyncflow.autodiff.stores.row_gradients import RowGradient, _Added
from asyncflow.control.stores.row_block import RowBlock, RowKind
from tests.autodiff.sweep import KNOWN
from tests.autodiff.test_store_gradients import check_derivatives
from tests.control.test_row_store import levels

Array: TypeAlias = "np.ndarray[Any, Any]"
X = np.arange(12.0).reshape(4, 3) / 7 + 0.3
Y = np.cos(np.arange(6.0)).reshape(2, 3)


def store(*parts: af.Tensor) -> af.RowStore:
    made = af.RowStore(parts[0].dtype, (3,))
    for part in parts:
        made = made.append(part)
    return made


PAIRS: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[Array, ...]]] = {
    "stack": (lambda x, y: store(x, y).stack() ** 2, lambda x, y: af.concat([x, y]) ** 2, (X, Y)),
    "take": (
        lambda x, y: store(x, y).take([[5, 0], [-1, 0]]) ** 2,
        lambda x, y: af.take(af.concat([x, y]), [[5, 0], [-1, 0]], axis=0) ** 2,
        (X, Y),
    ),
    "take_one": (lambda x: store(x).take(2) ** 2, lambda x: x[2] ** 2, (X,)),
    "slice": (lambda x, y: store(x, y).slice(3, 5) ** 3, lambda x, y: af.concat([x, y])[3:5] ** 3, (X, Y)),
    "nothing": (lambda x: store(x[:0], x).take([]) ** 2 + store(x).slice(1, 1), lambda x: x[:0] ** 2, (X,)),
    "shared": (
        lambda x, y: (lambda s: s.append(y * 2).take([4, 1]) * s.append(y).take([4, 0]) + s.slice(0, 2))(store(x)),
        lambda x, y: af.stack([y[0] * y[0] * 2 + x[0], x[1] * x[0] + x[1]]),
        (X, Y),
    ),
}


@pytest.mark.parametrize("known", KNOWN)
@pytest.mark.parametrize("name", PAIRS)
def test_a_store_changes_no_derivative(name: str, known: str) -> None:
    """First and second order, with all, ranks and nothing known of shapes."""
    check_derivatives(*PAIRS[name], known)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"])
def test_every_dtype_and_shape_keeps_itself(dtype: str) -> None:
    with af.Graph():
        x = af.placeholder(dtype, (None, 3))
        made = store(x)
        for y in (made.take([1]), made.stack(), made.slice(0, 1)):
            assert gradients(y, x, af.ones_like(y)).spec == x.spec


@pytest.mark.parametrize("sign", [1, -1])
async def test_branches(graph: af.Graph, run: Callable[..., Any], sign: int) -> None:
    """One branch appends a row that it has taken; gradients to the third order."""
    x = af.placeholder("float64", (4, 3))
    made = af.cond(
        x[0, 0] > 0,
        lambda: (lambda s: s.append(s.take([0, 0]) * s.slice(1, 3)))(store(x)),
        lambda: store(x),
    )
    plain = af.concat([x, af.take(x, [0, 0], axis=0) * x[1:3]]) if sign > 0 else x
    grads = [af.sin(made.stack()), af.sin(plain)]
    for _ in range(3):
        grads = [gradients(af.sum(af.sin(grad)), x) for grad in grads]
        found, expected = await run(grads, {x: sign * X})
        np.testing.assert_allclose(found, expected, rtol=1e-9)


async def test_integers_get_none(graph: af.Graph) -> None:
    x = af.placeholder("float64", (2,))
    counts = af.RowStore("int64").append(af.astype(x, "int64"))
    y = x * af.astype(counts.take([1, 1]), "float64")
    async with af.Session(graph) as session:
        assert (await session.run(gradients(y, x), {x: [2.0, 3.0]})).tolist() == [3.0, 3.0]


# -- in loops ----------------------------------------------------------------------------------------------------------


def unrolled(x: af.Tensor, depth: int) -> af.Tensor:
    found = [x]
    for _ in range(depth):
        found.append(found[-1][:-1] + found[-1][1:])
    return af.concat(found)


@pytest.mark.parametrize("regions", [True, False])
@pytest.mark.parametrize("parallel_iterations", [1, 10])
async def test_levels_of_a_loop(graph: af.Graph, regions: bool, parallel_iterations: int) -> None:
    """Each iteration takes rows of earlier ones; gradients to the second order."""
    x = af.placeholder("float64", (None, 2))

    def level(i: af.Tensor, start: af.Tensor, rows: af.RowStore) -> Any:
        stop = rows.size()
        left, right = rows.take(af.arange(start, stop - 1)), rows.slice(start + 1, stop)
        return i + 1, stop, rows.append(left * right + rows.take(af.zeros_like(af.arange(start, stop - 1))))

    first = af.RowStore("float64", (2,)).append(x)
    loop = af.while_loop(
        lambda i, *_: i < 3, level, (0, af.constant(0), first), parallel_iterations=parallel_iterations
    )
    rows = [x]
    for _ in range(3):
        rows.append(rows[-1][:-1] * rows[-1][1:] + x[0])
    fetches = []
    for y in (loop[2].stack(), af.concat(rows)):
        (once,) = gradients([af.sum(y**2)], [x])
        fetches.append([y, once, gradients(af.sum(af.sin(once)), x)])
    async with af.Session(graph, regions=regions) as session:
        found, expected = await session.run(fetches, {x: X[:, :2]})
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-12)


async def test_a_store_from_outside_a_loop(graph: af.Graph, run: Callable[..., Any]) -> None:
    """All iterations add to the gradient of one store."""
    x = af.placeholder("float64", (4, 3))
    rows = store(x)
    _, total = af.while_loop(
        lambda i, _: i < 6, lambda i, t: (i + 1, t + rows.take(i % 4) ** 2 + t * rows.take(0)), (0, af.zeros(3))
    )
    plain = af.zeros(3)
    for i in range(6):
        plain = plain + x[i % 4] ** 2 + plain * x[0]
    found, expected = await run([gradients(total, x), gradients(plain, x)], {x: X})
    np.testing.assert_allclose(found, expected, rtol=1e-12)


async def test_loops_on_several_devices(graph: af.Graph) -> None:
    x = af.placeholder("float64", (None, 3))
    y = levels(x, 3).stack()
    fetches = [gradients(y**2, x), gradients(unrolled(x, 3) ** 2, x)]
    async with af.Session(graph, devices=["cpu:0", "cpu:1"]) as session:
        found, expected = await session.run(fetches, {x: X})
    np.testing.assert_allclose(found, expected, rtol=1e-12)


async def test_in_functions() -> None:
    @af.value_and_grad
    @af.function
    def loss(x: Any) -> Any:
        return af.sum(levels(af.reshape(x, (-1, 3)), 1).stack() ** 2)

    value, grad = await loss(X[:2])
    total = X[0] + X[1]
    np.testing.assert_allclose(value, (X[:2] ** 2).sum() + (total**2).sum(), rtol=1e-12)
    np.testing.assert_allclose(grad, 2 * (X[:2] + total), rtol=1e-12)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Rows that blocks and sums made room for, and how often."""
    counts = {"blocks": 0, "sums": 0, "rows": 0}
    block, total_of = RowBlock.__init__, RowGradient._total

    def init(self: RowBlock, xp: Any, kind: RowKind, capacity: int) -> None:
        counts["blocks"] += 1
        counts["rows"] += capacity
        block(self, xp, kind, capacity)

    def total(self: RowGradient, rows: int, first: int, **options: Any) -> Any:
        before, found = self.log.total, total_of(self, rows, first, **options)
        if found is not before:
            counts["sums"] += 1
            counts["rows"] += len(found)
        return found

    monkeypatch.setattr(RowBlock, "__init__", init)
    monkeypatch.setattr(RowGradient, "_total", total)
    return counts


@pytest.mark.parametrize("regions", [True, False])
async def test_forward_and_backward_copy_no_store(graph: af.Graph, made: dict[str, int], regions: bool) -> None:
    """A loop of n iterations makes room for a few n rows; a copy in each of them would make it n * n."""
    n, x = af.placeholder("int64", ()), af.placeholder("float64", (1, 3))

    def body(i: af.Tensor, rows: af.RowStore) -> Any:
        return i + 1, rows.append(af.tanh(rows.take(af.reshape(i // 2, (1,))) + rows.slice(i, i + 1)))

    _, rows = af.while_loop(lambda i, _: i < n, body, (0, store(x)))
    grad = gradients(rows.stack(), x)
    async with af.Session(graph, regions=regions) as session:
        await session.run(grad, {n: 256, x: X[:1]})
    assert made["blocks"] <= 12
    assert 1 <= made["sums"] <= 4
    assert made["rows"] <= 7 * 256


# -- random programs ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.sampled_from("atsa"), st.integers(0, 9), st.integers(0, 9)), max_size=9), st.integers(0, 1000)
)
def test_random_programs(steps: list[tuple[str, int, int]], seed: int) -> None:
    """Appends to, and reads of, any state so far, by the same steps on stores and on plain tensors."""

    def build(x: af.Tensor, *, plain: bool) -> af.Tensor:
        states: list[Any] = [x if plain else store(x)]
        sizes = [4]
        results = [x**2]
        for kind, at, number in steps:
            place = at % len(states)
            state, size = states[place], sizes[place]
            start, stop = sorted((number % size, at % (size + 1)))
            indices = [number % size, (number * at) % size, number % size]
            if kind == "t":
                results.append((af.take(state, indices, axis=0) if plain else state.take(indices)) ** 2)
            elif kind == "s":
                results.append((state[start:stop] if plain else state.slice(start, stop)) ** 3)
            else:
                rows = results[number % len(results)] * 0.5
                states.append(af.concat([state, rows]) if plain else state.append(rows))
                sizes.append(size + ((rows.shape or (0,))[0] or 0))
        ends = [state if plain else state.stack() for state in states]
        return af.concat([*results, *ends])

    with af.Graph() as graph:
        x = af.placeholder("float64", X.shape)
        y = build(x, plain=False)
        (grad,) = gradients([y], [x], [_weights(y)])
        (again,) = gradients([af.sum(af.sin(grad))], [x])
        plain_y = build(x, plain=True)
        (plain_grad,) = gradients([plain_y], [x], [_weights(plain_y)])
        (plain_again,) = gradients([af.sum(af.sin(plain_grad))], [x])

    async def main() -> Any:
        async with af.Session(graph, regions=bool(seed % 2), seed=seed, debug=True) as session:
            return await session.run({"g": grad, "a": again, "pg": plain_grad, "pa": plain_again}, {x: X})

    found = af.run(main())
    np.testing.assert_allclose(found["g"], found["pg"], rtol=1e-9)
    np.testing.assert_allclose(found["a"], found["pa"], rtol=1e-9, atol=1e-12)


def _weights(y: af.Tensor) -> af.Tensor:
    return af.reshape(af.cos(af.astype(af.arange(af.size(y)), "float64")), af.shape(y))


# -- versions ----------------------------------------------------------------------------------------------------------

KIND = RowKind(np.dtype("float64"), ())


def added(size: int, rows: list[int], *values: float) -> _Added:
    return size, np.array(rows), np.array(values)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (2, 0, 1)])
def test_versions_keep_their_meaning_in_whatever_order_they_are_read(order: tuple[int, ...]) -> None:
    first = RowGradient.of(np, KIND, [added(4, [0, 3, 3], 1, 2, 4)])
    second = first.with_entries([added(3, [1], 8)])
    other = first.with_entries([added(3, [2, 0], 16, 32)])
    versions = [first, second, other]
    expected = [[1, 0, 0, 6], [1, 8, 0, 6], [33, 0, 16, 6]]
    for place in order:
        assert versions[place].range(0, 4).tolist() == expected[place]
        assert versions[place].rows(4, np.array([3, 0])).tolist() == [6, expected[place][0]]
    assert first.merged(second).range(0, 4).tolist() == [2, 8, 0, 12]


def test_rows_read_are_not_changed_by_later_additions() -> None:
    first = RowGradient.of(np, KIND, [added(4, [0], 1)])
    seen = first.range(0, 4)
    second = first.with_entries([added(4, [0], 1)])
    assert second.range(0, 4).tolist() == [2, 0, 0, 0]
    assert seen.tolist() == [1, 0, 0, 0]


def test_rows_that_nothing_has_reached_are_zeros() -> None:
    kind = RowKind(np.dtype("float64"), (2,))
    total = RowGradient.of(np, kind, [(6, np.array([[4, -2], [1, 1]]), np.ones((2, 2, 2)))])
    assert total.rows(6, np.array([3, 4])).tolist() == [[0, 0], [2, 2]]
    assert total.range(0, 2).tolist() == [[0, 0], [2, 2]]
    again = total.with_entries([(6, slice(1, 4), np.ones((3, 2))), (5, np.array(2), np.ones(2))])
    assert again.range(0, 6)[:, 0].tolist() == [0, 3, 2, 1, 2, 0]


def test_an_older_version_reads_rows_that_newer_ones_left_alone(made: dict[str, int]) -> None:
    """So it need not begin anew where iterations overtake one another."""
    first = RowGradient.of(np, KIND, [added(4, [3], 1)])
    second = first.with_entries([added(2, [1], 1)])
    assert second.range(1, 2).tolist() == [1]
    assert first.range(2, 4).tolist() == [0, 1]
    assert made["sums"] == 1
    assert first.range(0, 4).tolist() == [0, 0, 0, 1]
    assert made["sums"] == 2


def test_kept_additions_are_not_much_larger_than_the_store() -> None:
    total = RowGradient.of(np, KIND, [added(4, [0], 1)])
    for _ in range(1000):
        total = total.with_entries([added(4, [1], 1)])
        assert total.length <= 8
    assert total.range(0, 4).tolist() == [1, 1000, 0, 0]


@pytest.mark.parametrize("rows", [[5, 199], [5, 5], [-1, 199], [-1, -2, 198]])
def test_few_rows_of_a_long_store_may_be_named_twice(rows: list[int]) -> None:
    """Also once from the front and once from the back: then they are added up, though nothing has come before."""
    total = RowGradient.of(np, KIND, [added(200, rows, *range(1, 1 + len(rows)))])
    expected = np.zeros(200)
    np.add.at(expected, rows, np.arange(1.0, 1 + len(rows)))
    np.testing.assert_array_equal(total.range(0, 200), expected)


async def test_gradients_of_another_shape_are_refused(graph: af.Graph) -> None:
    x, g = af.placeholder("float64", (4, 3)), af.placeholder("float64", None)

    @af.custom_gradient
    def wrong(x: Any) -> Any:
        return x, lambda grad: g

    y = wrong(store(x).take(af.placeholder("int64", None, name="at")))
    async with af.Session(graph) as session:
        with pytest.raises(af.KernelError, match=r"shape"):
            await session.run(gradients(y, x), {x: X, g: np.ones(3), "at": [0, 1]})


@pytest.mark.parametrize("regions", [True, False])
async def test_stores_of_nested_loops(graph: af.Graph, regions: bool) -> None:
    """A store is made in each outer iteration, and another goes through all of them; a branch appends to it now and
    then.
    """
    x = af.placeholder("float64", (2, 3))

    def outer(i: af.Tensor, kept: af.RowStore) -> Any:
        def inner(j: af.Tensor, own: af.RowStore, kept: af.RowStore) -> Any:
            row = own.take(af.stack([j, af.constant(0)])) * kept.take(i)
            kept = af.cond(af.equal(j, i), lambda: kept.append(row), lambda: kept)
            return j + 1, own.append(af.sin(row)), kept

        own = af.RowStore("float64", (3,)).append(kept.slice(i, i + 1))
        _, own, kept = af.while_loop(lambda j, *_: j < 2, inner, (0, own, kept))
        return i + 1, kept.append(own.take([-1, 1]))

    _, kept = af.while_loop(lambda i, _: i < 2, outer, (0, store(x)))
    plain = x
    for i in range(2):
        own = plain[i : i + 1]
        for j in range(2):
            row = af.take(own, [j, 0], axis=0) * plain[i]
            plain = af.concat([plain, row]) if i == j else plain
            own = af.concat([own, af.sin(row)])
        plain = af.concat([plain, af.take(own, [4, 1], axis=0)])
    fetches = []
    for y in (kept.stack(), plain):
        once = af.gradients(af.sum(y**2), x)
        fetches.append([y, once, af.gradients(af.sum(af.sin(once)), x)])
    async with af.Session(graph, regions=regions) as session:
        found, expected = await session.run(fetches, {x: X[:2]})
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-10)


async def test_rows_without_elements_have_gradients() -> None:
    with af.Graph() as graph:
        x = af.placeholder("float64", (None, 2, 0))
        y = af.RowStore("float64", (2, 0)).append(x).take([[0, 1], [1, 1]])
        slope = af.gradients(y, x)
    async with af.Session(graph) as session:
        assert (await session.run(slope, {x: np.zeros((3, 2, 0))})).shape == (3, 2, 0)
