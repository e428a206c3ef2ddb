"""`batch_sums`: sums of products over iterations, added in blocks, equal the sums of the loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.compiler.batching.pending_sums import PendingSums, _PendingRows, pays
from asyncflow.devices.sim.namespace import SimNamespace
from asyncflow.devices.sim.values import no_data
from tests.compiler.batching import WIDTH, Array, Recurrent, run_both, values, where

if TYPE_CHECKING:
    from collections.abc import Sequence

N, M = 48, 32


class Sums:
    """``total = total + xs[t].T @ gs[t]``, and its feeds."""

    def __init__(self, steps: int = 60, rows: int | None = 8, dtype: str = "float32", known: bool = True) -> None:
        free = rows if known else None
        self.steps = steps
        self.xs = af.placeholder(dtype, (None, free, M), name="xs")
        self.gs = af.placeholder(dtype, (None, free, N), name="gs")
        self.feeds = {
            self.xs: values(steps, rows or 0, M, dtype="float64", seed=1).astype(dtype),
            self.gs: values(steps, rows or 0, N, dtype="float64", seed=2).astype(dtype),
        }

    def loop(self, *starts: Any, body: Any) -> Sequence[af.Tensor]:
        """The loop variables behind the counter, after all rows."""
        last = af.shape(self.xs)[0]
        found = af.while_loop(
            lambda t, *_: t < last,
            lambda t, *totals: (t + 1, *body(self.xs[t], self.gs[t], *totals)),
            (0, *starts),
            name="loop",
        )
        return found[1:]


def gradients_of(cell: Recurrent) -> list[af.Tensor]:
    """Of the mean square of the last state, by the weights and the first state."""
    y = cell.loop()
    return af.gradients(af.mean(y * y), [cell.w, cell.u, cell.h])


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("regions", [True, False])
async def test_gradients_of_weights(graph: af.Graph, known: bool, regions: bool) -> None:
    """Both weights' gradients are one sum, as they share an operand."""
    cell = Recurrent(40, known=known)
    said = await run_both(gradients_of(cell), cell.feeds, regions=regions)
    assert said.count("made ahead") == 1
    assert said.count("summed up, with 1 more") == 1


@pytest.mark.parametrize("known", [True, False])
async def test_an_lstm_with_a_bias(graph: af.Graph, known: bool) -> None:
    """The gradient of the bias joins the gradients of the weights."""
    cell = Recurrent(30, known=known)
    bias = af.placeholder("float32", (16 * WIDTH,), name="bias")
    c = af.placeholder("float32", (8 if known else None, 4 * WIDTH), name="c")
    u = af.placeholder("float32", (4 * WIDTH, 16 * WIDTH), name="short")

    def body(t: af.Tensor, h: af.Tensor, c: af.Tensor) -> tuple[af.Tensor, ...]:
        gates = cell.xs[t] @ cell.w + h @ u + bias
        i, f, o, g = (gates[:, k * 4 * WIDTH : (k + 1) * 4 * WIDTH] for k in range(4))
        c = af.sigmoid(f) * c + af.sigmoid(i) * af.tanh(g)
        return t + 1, af.sigmoid(o) * af.tanh(c), c

    last = af.shape(cell.xs)[0]
    _, h, _ = af.while_loop(lambda t, *_: t < last, body, (0, c, c))
    grads = af.gradients(af.mean(h * h), [cell.w, u, bias, c])
    feeds = {
        cell.xs: cell.feeds[cell.xs],
        cell.w: cell.feeds[cell.w],
        bias: values(16 * WIDTH, seed=8),
        c: values(8, 4 * WIDTH, seed=9),
        u: values(4 * WIDTH, 16 * WIDTH, seed=10),
    }
    said = await run_both([h, *grads], feeds)
    assert said.count("summed up, with 2 more") == 1


async def test_gradients_through_nested_loops_and_scan(graph: af.Graph) -> None:
    """An inner loop's sums belong to each iteration of the outer one."""
    cell = Recurrent(12)

    def inner(h: af.Tensor) -> af.Tensor:
        return af.while_loop(lambda t, h: t < 12, lambda t, h: (t + 1, cell.step(cell.xs[t], h)), (0, h))[1]

    outer = af.while_loop(lambda k, h: k < 3, lambda k, h: (k + 1, inner(h)), (0, cell.h))[1]
    scanned = af.scan(lambda h, x: cell.step(x, h), cell.xs, cell.h)
    fetches = [
        *af.gradients(af.mean(outer * outer), [cell.w, cell.u, cell.h]),
        *af.gradients(af.mean(scanned * scanned), [cell.w, cell.u, cell.h]),
    ]
    said = await run_both(fetches, cell.feeds)
    assert said.count("summed up") >= 2


async def test_gradients_of_gradients(graph: af.Graph) -> None:
    """Second derivatives are loops like any other."""
    cell = Recurrent(6, batch=4, width=8)
    first = af.gradients(af.mean(cell.loop() ** 2.0), [cell.w])[0]
    second = af.gradients(af.sum(first * first), [cell.w, cell.u])
    assert "summed up" in await run_both([first, *second], cell.feeds)


async def test_fewer_products(graph: af.Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixty products of 8 rows are four."""
    sums = Sums()
    (total,) = sums.loop(np.zeros((M, N), "float32"), body=lambda x, g, total: [total + x.T @ g])
    summed: list[int] = []
    multiply = np.matmul

    def counting(left: Array, right: Array, **options: Any) -> Array:
        summed.append(left.shape[-1])
        return multiply(left, right, **options)

    monkeypatch.setattr(np, "matmul", counting)
    async with af.Session(debug=True) as session:
        await session.run(total, sums.feeds)
    assert summed == [128, 128, 128, 96]


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64"])
@pytest.mark.parametrize("known", [True, False])
async def test_totals_start_anywhere(graph: af.Graph, dtype: str, known: bool) -> None:
    """From numbers, from either side of the addition, with and without the sum of rows; with nothing to add."""
    sums = Sums(dtype=dtype, known=known)
    start, bias = values(M, N, dtype=dtype, seed=5), values(N, dtype=dtype, seed=6)
    totals = sums.loop(
        start,
        start,
        bias,
        body=lambda x, g, a, b, c: [a + x.T @ g, (2.0 * x).T @ g + b, c + af.sum(g, axis=0)],
    )
    assert "summed up, with 1 more" in await run_both(totals, sums.feeds)
    none = {placeholder: array[:0] for placeholder, array in sums.feeds.items()}
    assert await run_both(totals, none)


async def test_what_the_loop_reads_stays_in_it(graph: af.Graph) -> None:
    """Totals that the body, the predicate or another variable looks at, that differ, or that are integers."""
    sums = Sums()
    zeros = np.zeros((M, N), "float32")
    read = sums.loop(zeros, np.float32(0), body=lambda x, g, a, s: [a + x.T @ g, s + af.sum(a)])
    twice = sums.loop(zeros, zeros, body=lambda x, g, a, b: [a + x.T @ g, a])
    product = sums.loop(zeros, np.float32(0), body=lambda x, g, a, s: [a + (p := x.T @ g), s + af.sum(p)])
    seen = af.while_loop(
        lambda t, a: af.logical_and(t < 60, af.sum(a) < 1e9),
        lambda t, a: (t + 1, a + sums.xs[t].T @ sums.gs[t]),
        (0, zeros),
    )[1]
    scaled = sums.loop(zeros, body=lambda x, g, a: [0.5 * a + x.T @ g])
    counts = af.while_loop(
        lambda t, a: t < 60,
        lambda t, a: (t + 1, a + af.astype(sums.xs[t].T * 4, "int32") @ af.astype(sums.gs[t] * 4, "int32")),
        (0, np.zeros((M, N), "int32")),
    )[1]
    fetches = [*read, *twice, *product, seen, *scaled, counts]
    assert await run_both(fetches, sums.feeds) == ""


async def test_values_streamed_out_of_the_loop_stay_in_it(graph: af.Graph) -> None:
    """Each total is read."""
    sums = Sums(steps=4)
    seen: list[af.Tensor] = []

    def body(x: af.Tensor, g: af.Tensor, total: af.Tensor) -> list[af.Tensor]:
        seen.append(total + x.T @ g)
        return seen[-1:]

    sums.loop(np.zeros((M, N), "float32"), body=body)
    found = []
    for batching in (True, False):
        async with af.Session(debug=True, loop_batching=batching) as session:
            found.append([total async for total in session.stream(seen[0], sums.feeds)])
    np.testing.assert_array_equal(found[0], found[1])
    assert len(found[0]) == 4


async def test_rows_of_changing_number(graph: af.Graph) -> None:
    """A block takes any number of rows; rows beyond its size, or of another width, begin another block."""
    sums = Sums(rows=200, known=False)
    n = af.placeholder("int64", (None,), name="n")
    total = af.while_loop(
        lambda t, a: t < 60,
        lambda t, a: (t + 1, a + sums.xs[t, : n[t]].T @ sums.gs[t, : n[t]]),
        (0, np.zeros((M, N), "float32")),
    )[1]
    lengths = np.random.default_rng(3).integers(0, 200, 60)
    assert await run_both([total], {**sums.feeds, n: lengths})


async def test_operands_that_do_not_fit_fail_as_in_the_loop(graph: af.Graph) -> None:
    """The product's node, iteration, reason and line."""
    sums = Sums(known=False)
    (total,) = sums.loop(np.zeros((M, N), "float32"), body=lambda x, g, total: [total + x.T @ g])
    seen = []
    for batching in (True, False):
        async with af.Session(debug=True, loop_batching=batching) as session:
            with pytest.raises(af.KernelError) as failed:
                await session.run(total, {**sums.feeds, sums.gs: values(60, 9, N)})
        seen.append(where(failed.value))
    assert seen[0] == seen[1]


# -- the value -------------------------------------------------------------------------------------------------------


XPS = [np, SimNamespace(shapes_only=False)]
"""Namespaces of a CPU, and of a card, where operands are kept and nothing is copied until there are enough."""


@pytest.mark.parametrize("xp", XPS)
def test_pending_sums_fill_blocks_and_settle(xp: Any) -> None:
    """In any number of blocks, settled in between or not."""
    rows = [values(n, M + N, dtype="float64", seed=n) for n in (3, 3, 3, 5, 1, 3, 2)]
    for block_bytes in (1, 5_000, 1 << 20):
        pending = PendingSums([np.ones((M, N)), np.ones(N)], block_bytes, xp)
        for index, row in enumerate(rows):
            left, right = row[:, :M].T, row[:, M:]
            pending.add([right, right], [left, None])
            if index == 3:
                pending.settle()
        product, total = pending.settle()
        np.testing.assert_allclose(product, 1 + sum(row[:, :M].T @ row[:, M:] for row in rows))
        np.testing.assert_allclose(total, 1 + sum(row[:, M:].sum(axis=0) for row in rows))
        assert pending.nbytes == product.nbytes + total.nbytes


def test_blocks_grow_with_the_rows_of_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last steps of ragged sequences, which a gradient begins with, have few rows; the others have many."""
    many, multiplied = 256, []
    multiply = np.matmul

    def counting(left: Array, right: Array, **options: Any) -> Array:
        multiplied.append(len(right))
        return multiply(left, right, **options)

    monkeypatch.setattr(np, "matmul", counting)
    pending = PendingSums([np.zeros((many, 4 * many), "float32")], 1 << 26)
    rows = [values(count, 5 * many, seed=count) for count in (1, 1, 3, *range(4, 16))]
    for row in rows:
        pending.add([row[:, many:]], [row[:, :many].T])
    (total,) = pending.settle()
    assert sum(multiplied) == sum(map(len, rows))
    assert len(multiplied) <= 3
    joined = np.concatenate(rows)
    np.testing.assert_allclose(total, multiply(joined[:, :many].T, joined[:, many:]), rtol=1e-3, atol=1e-3)


def test_sums_of_rows_without_data_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulation of shapes gives such rows, and a CPU would take as long for the products as in a real run."""
    monkeypatch.setattr(np, "matmul", None)
    pending = PendingSums([np.ones((M, N), "float32"), np.ones(N, "float32")], 1 << 20)
    left, known, unknown = values(M, 3), values(3, N), no_data(np.dtype("float32"), (3, N))
    for right in (known, unknown, known, *[unknown] * 200):
        pending.add([right, right], [left, None])
    product, total = pending.settle()
    assert product.shape == (M, N)
    assert total.shape == (N,)
    assert np.isnan(product).all()
    assert np.isnan(total).all()


@pytest.mark.parametrize("xp", XPS)
def test_sums_whose_operands_turn_out_to_differ_are_added_one_by_one(xp: Any) -> None:
    """The operands were only expected to be the same."""
    x, g, other = values(4, M), values(4, N), values(4, N, seed=7)
    pending = PendingSums([np.zeros((M, N), "float32"), np.zeros((M, N), "float32")], 1 << 20, xp)
    pending.add([g, g], [x.T, x.T])
    pending.add([g, other], [x.T, x.T])
    pending.add([g, g], [x.T, x.T])
    first, second = pending.settle()
    np.testing.assert_allclose(first, 3 * (x.T @ g), rtol=1e-5)
    np.testing.assert_allclose(second, x.T @ (2 * g + other), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("xp", XPS)
def test_operands_that_do_not_fit_a_block_are_multiplied_as_they_are(xp: Any) -> None:
    """The operands broadcast, or fail, as in the loop."""
    x, g = values(4, M), values(4, N)
    for total, right, left in (
        (np.zeros((2, M, N), "float32"), np.stack([g, g]), x.T),
        (np.zeros((M, N), "float32"), g, np.stack([x.T, x.T])),
        (np.zeros((1, N), "float32"), g, None),
    ):
        pending = PendingSums([total], 1 << 20, xp)
        pending.add([right], [left])
        (found,) = pending.settle()
        np.testing.assert_allclose(found, total + (right.sum(axis=0) if left is None else left @ right), rtol=1e-5)
    with pytest.raises(ValueError, match="matmul"):
        PendingSums([np.zeros((M, N), "float32")], 1 << 20, xp).add([g], [x])


def test_a_card_multiplies_kept_rows_once_there_are_enough() -> None:
    """By one launch for each operand, one for each product, and one for adding it to the total."""
    xp: Any = SimNamespace(shapes_only=False)
    rows = [values(8, M + N, dtype="float64", seed=seed) for seed in range(64)]
    pending = PendingSums([np.zeros((M, N))], 1 << 20, xp)
    for row in rows:
        pending.add([row[:, M:]], [row[:, :M].T])
    multiplied, added = [0.0, 0.0, 2.0 * 64 * M * N], [float(M * N)]
    assert [noted.flops for noted in xp.taken()] == [*multiplied, *added] * 7
    (total,) = pending.settle()
    np.testing.assert_allclose(total, sum(row[:, :M].T @ row[:, M:] for row in rows))


def test_a_product_of_many_rows_is_not_worth_copying_them() -> None:
    """Copying would take longer than the additions it saves."""
    assert pays(64, 512, 2048)
    assert not pays(10_000, 16, 16)
    assert not pays(0, 16, 16)


@pytest.mark.parametrize("streams", [1, 2])
async def test_large_products_are_added_several_at_a_time(
    graph: af.Graph, streams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The products are gradients of an LSTM's weights, 64 rows of hidden 512; blocks are smaller on several streams."""
    steps, rows, width = 4, 64, 512
    x = af.ones((rows, 2 * width), dtype="float32")
    w, bias = (af.placeholder("float32", shape) for shape in ((2 * width, 4 * width), (4 * width,)))
    _, total = af.while_loop(
        lambda t, _: t < steps,
        lambda t, total: (t + 1, total + af.sum(af.square((x * af.astype(t, "float32")) @ w + bias))),
        (np.int32(0), np.float32(0)),
    )
    grads = af.gradients(total, [w, bias])
    multiplied = []
    monkeypatch.setattr(
        _PendingRows, "_multiply", lambda block, multiply=_PendingRows._multiply: multiplied.append(multiply(block))
    )
    async with af.Session(compute_streams=streams) as session:
        found = await session.run(
            [grad[0] for grad in grads], {w: np.zeros(w.shape, "float32"), bias: np.ones(bias.shape, "float32")}
        )
    assert (found[0][0], found[1]) == (2 * rows * sum(range(steps)), 2 * rows * steps)
    assert 1 <= len(multiplied) <= steps // 2
