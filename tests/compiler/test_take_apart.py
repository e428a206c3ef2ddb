"""`take_apart`: a product of joined rows is a sum of products where one of them can be made ahead."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import asyncflow as af
from tests.compiler.batching import Array, run_both, values, where

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS, BATCH, IN, HIDDEN = 20, 8, 32, 128

Shapes = list[tuple[tuple[int, ...], tuple[int, ...]]]


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Shapes:
    """The shapes of the operands of each product."""
    found: Shapes = []
    multiply = np.matmul

    def counting(left: Array, right: Array, **options: Any) -> Array:
        found.append((left.shape, right.shape))
        return multiply(left, right, **options)

    monkeypatch.setattr(np, "matmul", counting)
    return found


@pytest.fixture
def few_flops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small products are worth it."""
    monkeypatch.setattr("asyncflow.compiler.batching.batch_rows._WORTH_FLOPS", 1000)


class Joined:
    """``h = tanh(product(xs[t], h, c))``, and its feeds; `c` is a second state, of which the first half is new."""

    def __init__(self, product: Callable[[Any, Any, Any, Any], Any], rows: int, *, known: bool = True) -> None:
        batch = BATCH if known else None
        self.product = product
        self.xs = af.placeholder("float32", (STEPS if known else None, batch, IN), name="xs")
        self.w = af.placeholder("float32", (rows, HIDDEN), name="w")
        self.h = af.placeholder("float32", (batch, HIDDEN), name="h")
        self.feeds: dict[Any, Any] = {
            self.xs: values(STEPS, BATCH, IN, seed=1),
            self.w: values(rows, HIDDEN, seed=2),
            self.h: values(BATCH, HIDDEN, seed=4),
        }

    def loop(self) -> af.Tensor:
        return af.while_loop(
            lambda t, h, c: t < af.shape(self.xs)[0],
            lambda t, h, c: (t + 1, af.tanh(self.product(self.xs[t], h, c, self.w)), h),
            (0, self.h, self.h * 0.5),
            name="loop",
        )[1]

    def with_gradients(self) -> list[af.Tensor]:
        """Return the loop's result, and its gradients by the feeds."""
        y = self.loop()
        return [y, *af.gradients(af.mean(y * y), [self.w, self.h, self.xs])]


CELLS: dict[str, tuple[Callable[[Any, Any, Any, Any], Any], int]] = {
    "in front": (lambda x, h, c, w: af.concat([x, h], axis=-1) @ w, IN + HIDDEN),
    "behind": (lambda x, h, c, w: af.concat([h, x], axis=1) @ w, IN + HIDDEN),
    "between": (lambda x, h, c, w: af.concat([h, x, x * 2, c], axis=-1) @ w, 2 * IN + 2 * HIDDEN),
    "on both sides": (lambda x, h, c, w: af.concat([x, h, x], axis=-1) @ w, 2 * IN + HIDDEN),
    "used twice": (lambda x, h, c, w: af.concat([x, h], axis=-1) @ w + af.concat([x, c], axis=-1) @ w, IN + HIDDEN),
    "a vector": (
        lambda x, h, c, w: af.stack([af.permute_dims(w, (1, 0)) @ af.concat([x[0], h[0]])] * BATCH),
        IN + HIDDEN,
    ),
}


@pytest.mark.parametrize(("name", "known"), list(zip(CELLS, [True, False] * 3, strict=True)))
async def test_what_a_loop_joins_is_made_ahead_in_part(
    name: str, known: bool, graph: af.Graph, few_flops: None
) -> None:
    """Wherever it stands, and within rounding as without."""
    cell = Joined(*CELLS[name], known=known)
    assert "made ahead" in await run_both(cell.with_gradients(), cell.feeds)


@pytest.mark.parametrize(("name", "known"), list(zip(CELLS, [False, True] * 3, strict=True)))
async def test_parts_made_ahead_are_equal_in_regions_and_interpreted(
    name: str, known: bool, graph: af.Graph, few_flops: None
) -> None:
    """Bit for bit."""
    cell = Joined(*CELLS[name], known=known)
    fetches, found = cell.with_gradients(), []
    for regions in (True, False):
        async with af.Session(graph, regions=regions) as session:
            found.append(await session.run(fetches, cell.feeds))
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


async def test_the_loop_keeps_its_own_work(graph: af.Graph, products: Shapes) -> None:
    """Forward the state's product alone, backward as many columns as the state has: as if written apart."""
    cell = Joined(*CELLS["in front"], known=True)
    cell.xs = af.placeholder("float32", (STEPS, BATCH, 4 * HIDDEN), name="wide")
    cell.w = af.placeholder("float32", (5 * HIDDEN, HIDDEN), name="tall")
    feeds = {cell.xs: values(STEPS, BATCH, 4 * HIDDEN), cell.w: values(5 * HIDDEN, HIDDEN), cell.h: cell.feeds[cell.h]}
    y = cell.loop()
    async with af.Session(graph) as session:
        await session.run([y, af.gradients(af.sum(y * y), cell.h)], feeds)
    state, square = (BATCH, HIDDEN), (HIDDEN, HIDDEN)
    assert products.count((state, square)) == 2 * STEPS
    assert len(products) < 2 * STEPS + 10


@pytest.mark.parametrize(
    "product",
    [
        pytest.param(lambda x, h, c, w: af.concat([h, c], axis=-1) @ w, id="nothing can be made ahead"),
        pytest.param(lambda x, h, c, w: af.concat([x[:, :1], h, c[:, 1:]], axis=-1) @ w, id="too little can"),
        pytest.param(lambda x, h, c, w: af.concat([h, c], axis=-1) @ (w * af.sum(h)), id="the matrix changes"),
    ],
)
async def test_what_does_not_pay_stays_as_it_is(product: Any, graph: af.Graph, products: Shapes) -> None:
    """The loop has a single product an iteration."""
    cell = Joined(product, 2 * HIDDEN)
    async with af.Session(graph) as session:
        assert "made ahead" not in session.plan(cell.loop(), list(cell.feeds)).explain()
        await session.run(cell.loop(), cell.feeds)
    assert products == [((BATCH, 2 * HIDDEN), (2 * HIDDEN, HIDDEN))] * STEPS


async def test_rows_that_cannot_be_joined_are_still_refused(graph: af.Graph) -> None:
    """A single row, which a sum would have broadcast; in the same iteration."""
    cell = Joined(*CELLS["in front"], known=False)
    feeds = {**cell.feeds, cell.xs: values(STEPS, 1, IN)}
    y = cell.loop()
    found = []
    for batching in (True, False):
        async with af.Session(graph, loop_batching=batching) as session:
            with pytest.raises(af.KernelError, match="concat") as caught:
                await session.run(y, feeds)
            found.append(where(caught.value)[1])
    assert found[0] == found[1]


async def test_a_constant_matrix(graph: af.Graph) -> None:
    """The matrix stands in the body itself."""
    w = values(IN + HIDDEN, 16 * HIDDEN)
    cell = Joined(lambda x, h, c, _: (af.concat([x, h], axis=-1) @ w)[:, :HIDDEN], 1)
    assert "made ahead" in await run_both([cell.loop()], {k: v for k, v in cell.feeds.items() if k is not cell.w})
