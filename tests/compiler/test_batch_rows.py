"""`batch_rows`: products made ahead of a loop's iterations equal the products in the loop, within rounding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.compiler.batching.products_ahead import PRODUCTS_AHEAD
from tests.compiler.batching import WIDTH, Array, Recurrent, run_both, values, where

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each product of two matrices."""
    rows: list[int] = []
    multiply = np.matmul

    def counting(left: Array, right: Array, **options: Any) -> Array:
        rows.append(left.size // left.shape[-1])
        return multiply(left, right, **options)

    monkeypatch.setattr(np, "matmul", counting)
    return rows


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("regions", [True, False])
async def test_rows_are_multiplied_ahead(graph: af.Graph, known: bool, regions: bool, products: list[int]) -> None:
    """Shapes known or not, in regions and interpreted: fewer products, of more rows."""
    cell = Recurrent(40, known=known)
    y = cell.loop()
    said = await run_both([y], cell.feeds, regions=regions)
    assert said == "loop/body/matmul: made ahead, for several iterations at once"
    batched = len(products) - 2 * 40
    assert 40 < batched < 40 + 15
    assert max(products) > 8


async def test_no_iterations_at_all(graph: af.Graph) -> None:
    """Nothing is multiplied for a loop that does not run, even if it could not be."""
    cell = Recurrent(0, known=False)
    said = await run_both([cell.loop()], {**cell.feeds, cell.w: values(7, 16 * WIDTH)})
    assert said


async def test_a_loop_that_ends_early_makes_little_in_vain(graph: af.Graph, products: list[int]) -> None:
    """Blocks double where only the data say when the loop ends."""
    cell = Recurrent(500)
    stop = af.placeholder("float32", (), name="stop")
    t, y = af.while_loop(
        lambda t, h: af.sum(h * 0.0) + af.astype(t, "float32") < stop,
        lambda t, h: (t + 1, cell.step(cell.xs[t], h)),
        (0, cell.h),
    )
    async with af.Session(debug=True) as session:
        feeds = {**cell.feeds, stop: np.float32(40)}
        assert "ahead" in session.plan([t, y], list(feeds)).explain()
        await session.run([t, y], feeds)
    in_loop, ahead = 40, len(products) - 40
    assert ahead < 10
    assert sum(products) // 8 - in_loop < 2 * 40


async def test_rows_that_are_not_there_are_not_missed(graph: af.Graph) -> None:
    """Making rows ahead must not fail where the loop does not come."""
    cell = Recurrent(7, known=False)
    limit = af.placeholder("float32", (), name="limit")
    y = af.while_loop(
        lambda t, h: af.astype(t, "float32") < limit,
        lambda t, h: (t + 1, cell.step(cell.xs[t], h)),
        (0, cell.h),
    )[1]
    for stop in (1.0, 3.0, 6.0, 7.0):
        assert "ahead" in await run_both([y], {**cell.feeds, limit: np.float32(stop)})


async def test_a_counter_from_anywhere_and_bounds_of_any_kind(graph: af.Graph) -> None:
    """From 5 on; up to and with a bound; a bound on the left; an iteration limit; a bound that is not reached."""
    cell = Recurrent(30)
    last = af.placeholder("int32", (), name="last")
    start = (np.int32(5), cell.h)

    def body(t: af.Tensor, h: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
        return t + 1, cell.step(cell.xs[t], h)

    fetches = [
        af.while_loop(lambda t, h: t <= last, body, start)[1],
        af.while_loop(lambda t, h: last > t, body, start)[1],
        af.while_loop(lambda t, h: af.logical_and(t < last, af.sum(h) < 1e9), body, start)[1],
        af.while_loop(lambda t, h: t < 1000, body, start, maximum_iterations=9)[1],
        af.while_loop(lambda t, h: t <= 20, body, start)[1],
        cell.loop(first=5),
    ]
    said = await run_both(fetches, {**cell.feeds, last: 28})
    assert said.count("ahead") == len(fetches)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int64"])
async def test_down_to_the_least_number_there_is(graph: af.Graph, dtype: str) -> None:
    """A counter that goes down, past which there may be no number of its dtype."""
    cell = Recurrent(12)
    start = (np.dtype(dtype).type(11), cell.h)
    fetches = [
        af.while_loop(lambda t, h: t > 0, lambda t, h: (t - 1, cell.step(cell.xs[t], h)), start)[1],
        af.while_loop(lambda t, h: t >= 1, lambda t, h: (t - 1, cell.step(cell.xs[t - 1], h)), start)[1],
        af.while_loop(lambda t, h: af.not_equal(t, 0), lambda t, h: (t - 1, cell.step(cell.xs[t], h)), start)[1],
    ]
    said = await run_both(fetches, cell.feeds)
    assert said.count("ahead") == len(fetches)


async def test_up_to_the_greatest_number_there_is(graph: af.Graph) -> None:
    """A block ends with the numbers of the counter's dtype."""
    cell = Recurrent(128)
    y = af.while_loop(
        lambda t, h: af.not_equal(t, 127), lambda t, h: (t + 1, cell.step(cell.xs[t], h)), (np.int8(90), cell.h)
    )[1]
    assert await run_both([y], cell.feeds)


async def test_rows_of_a_tensor_array_scan_and_folds(graph: af.Graph) -> None:
    """Elements of a TensorArray are rows of its source, whether each may be read once or more often."""
    cell = Recurrent(20)
    array = af.TensorArray("float32", size=20, element_shape=(8, WIDTH)).unstack(cell.xs)
    read = af.while_loop(lambda t, h: t < 20, lambda t, h: (t + 1, cell.step(array.read(t), h)), (0, cell.h))[1]
    fetches = [
        read,
        af.scan(lambda h, x: cell.step(x, h), cell.xs, cell.h),
        af.foldl(lambda h, x: cell.step(x, h), cell.xs, cell.h),
        af.foldr(lambda h, x: cell.step(x, h), cell.xs, cell.h),
        af.map_fn(lambda x: af.tanh(x @ cell.w), cell.xs, lift=False),
    ]
    said = await run_both(fetches, cell.feeds)
    assert said.count("ahead") == len(fetches)


async def test_reading_an_element_twice_still_fails(graph: af.Graph) -> None:
    """Reading ahead does not count as a read of the program; elements that the program reads are used up."""
    cell = Recurrent(20)
    array = af.TensorArray("float32", size=20, element_shape=(8, WIDTH)).unstack(cell.xs)
    t, h = af.while_loop(lambda t, h: t < 10, lambda t, h: (t + 1, cell.step(array.read(t), h)), (0, cell.h))
    with af.control_dependencies([t.node]):
        later, again = array.read(15), array.read(3)
    async with af.Session(debug=True) as session:
        await session.run([h, later], cell.feeds)
        with pytest.raises(af.KernelError, match="read"):
            await session.run([h, again], cell.feeds)


async def test_what_rows_are_made_of_moves_along(graph: af.Graph) -> None:
    """Layers over the inputs, looked up and joined rows, and rows that are not next to each other."""
    cell = Recurrent(24)
    table = af.placeholder("float32", (50, WIDTH), name="table")
    ids = af.placeholder("int32", (24, 8), name="ids")
    wide = af.placeholder("float32", (2 * WIDTH, 16 * WIDTH), name="wide")
    inputs: list[Callable[[af.Tensor], af.Tensor]] = [
        lambda t: af.tanh(cell.xs[t] @ cell.w) @ cell.u,
        lambda t: af.take(table, ids[t], axis=0) @ cell.w,
        lambda t: af.concat([cell.xs[t], cell.xs[23 - t]], axis=1) @ wide,
        lambda t: (2.0 * cell.xs[(t * 7) % 24]) @ cell.w,
        lambda t: cell.xs[t, :, :] @ cell.w,
        lambda t: af.expand_dims(cell.xs[t], axis=0)[0] @ cell.w,
    ]

    def loop(row: Callable[[af.Tensor], af.Tensor]) -> af.Tensor:
        return af.while_loop(lambda t, h: t < 24, lambda t, h: (t + 1, af.tanh(row(t) + h @ cell.u)), (0, cell.h))[1]

    feeds = {
        **cell.feeds,
        table: values(50, WIDTH, seed=5),
        ids: np.random.default_rng(6).integers(0, 50, (24, 8), dtype="int32"),
        wide: values(2 * WIDTH, 16 * WIDTH, seed=7),
    }
    said = await run_both([loop(row) for row in inputs], feeds)
    assert said.count("ahead") == len(inputs)


async def test_layers_over_the_inputs_are_made_together(graph: af.Graph, products: list[int]) -> None:
    """Only the second of two layers is left in the loop; values between them are not computed twice."""
    cell = Recurrent(40)
    y = af.while_loop(
        lambda t, h: t < 40, lambda t, h: (t + 1, h + af.tanh(cell.xs[t] @ cell.w) @ cell.u), (0, cell.h), name="loop"
    )[1]
    async with af.Session(debug=True) as session:
        plan = session.plan([y], list(cell.feeds)).explain(source=True)
        await session.run([y], cell.feeds)
    assert "loop/body/matmul_1: made ahead" in plan and "loop/body/matmul:" not in plan
    assert "k_tanh" not in plan
    assert len(products) < 20


async def test_vectors_and_stacks_of_matrices(graph: af.Graph) -> None:
    """Rows of rank 1, from the left and the right, and of rank 3."""
    xs = af.placeholder("float64", (30, 600), name="xs")
    stacks = af.placeholder("float64", (30, 3, 4, 600), name="stacks")
    w = af.placeholder("float64", (600, 300), name="w")
    fetches = [
        af.while_loop(lambda t, s: t < 30, lambda t, s: (t + 1, 0.5 * s + af.tanh(xs[t] @ w)), (0, np.zeros(300)))[1],
        af.while_loop(lambda t, s: t < 30, lambda t, s: (t + 1, 0.5 * s + af.tanh(w.T @ xs[t])), (0, np.zeros(300)))[1],
        af.while_loop(
            lambda t, s: t < 30, lambda t, s: (t + 1, 0.5 * s + af.tanh(stacks[t] @ w)), (0, np.zeros((3, 4, 300)))
        )[1],
    ]
    feeds = {
        xs: values(30, 600, dtype="float64"),
        stacks: values(30, 3, 4, 600, dtype="float64"),
        w: values(600, 300, dtype="float64"),
    }
    said = await run_both(fetches, feeds)
    assert said.count("ahead") == 3


async def test_nested_loops(graph: af.Graph) -> None:
    """An inner loop has rows of its own in each iteration of the outer one."""
    cell = Recurrent(10)

    def inner(k: af.Tensor, h: af.Tensor) -> af.Tensor:
        scaled = cell.w * af.astype(k, "float32")
        return af.while_loop(
            lambda t, h: t < 10, lambda t, h: (t + 1, af.tanh(cell.xs[t] @ scaled + h @ cell.u)), (0, h)
        )[1]

    y = af.while_loop(lambda k, h: k < 4, lambda k, h: (k + 1, inner(k, h)), (1, cell.h))[1]
    assert (await run_both([y], cell.feeds)).count("ahead") == 1


async def test_an_index_out_of_range_fails_in_its_iteration(graph: af.Graph) -> None:
    """The same node, iteration, reason and line as without batching."""
    cell = Recurrent(7, known=False)
    y = cell.loop(last=9)
    seen = []
    for batching in (True, False):
        async with af.Session(debug=True, loop_batching=batching) as session:
            with pytest.raises(af.KernelError) as failed:
                await session.run(y, dict(cell.feeds))
        seen.append(where(failed.value))
    assert seen[0] == seen[1]
    assert seen[0][:2] == ("loop/body/getitem", "loop/7")


async def test_operands_that_do_not_fit_fail_as_in_the_loop(graph: af.Graph) -> None:
    """Only the run can tell that the operands do not fit."""
    xs = af.placeholder("float32", (None, None, None), name="xs")
    w = af.placeholder("float32", (None, None), name="w")
    y = af.while_loop(lambda t, s: t < 5, lambda t, s: (t + 1, s + af.sum(xs[t] @ w)), (0, np.float32(0)), name="loop")[
        1
    ]
    seen = []
    for batching in (True, False):
        async with af.Session(debug=True, loop_batching=batching) as session:
            assert ("ahead" in session.plan(y, [xs, w]).explain()) is batching
            with pytest.raises(af.KernelError) as failed:
                await session.run(y, {xs: values(5, 3, 4), w: values(5, 6)})
            await session.run(y, {xs: values(5, 3, 4), w: values(4, 6)})
        seen.append(where(failed.value))
    assert seen[0] == seen[1]
    assert seen[0][:2] == ("loop/body/matmul", "loop/0")


def ahead_of(rows: Array, matrix: Array) -> Any:
    """``rows[t] @ matrix``, made ahead from iteration 0 on."""
    steps = (
        ("getitem", {"key": (("input", 0),)}, (1, 0), False),
        ("matmul", {"dtype": np.dtype("float32")}, (4, 2), False),
    )
    bind = PRODUCTS_AHEAD.kernel
    assert bind is not None
    ahead = bind(
        np,
        steps=steps,
        results=(5,),
        n_inputs=3,
        course=(np.dtype("int64"), 1, None, False),
        block_bytes=1 << 20,
    )
    return ahead(rows, matrix, np.int64(0))


def test_bytes_of_rows_made_ahead() -> None:
    """Nothing is held before the first look; then the rows of the last two blocks."""
    rows, matrix = values(20, 3, 8), values(8, 2)
    held = ahead_of(rows, matrix)
    sizes = [held.nbytes]
    for index in range(7):
        np.testing.assert_allclose(held.row(0, index), rows[index] @ matrix, rtol=1e-5)
        sizes.append(held.nbytes)
    assert sizes == [0, 24, 72, 72, 144, 144, 144, 144]


@pytest.mark.parametrize("seed", range(5))
def test_members_of_a_product_do_not_depend_on_the_first_asker(seed: int) -> None:
    """Iterations overlap, and some run on threads; the last bits of a row depend on how many rows a product has."""
    rows, matrix = values(40, 3, 48), values(48, 48)

    def found(order: Any) -> dict[int, tuple[bytes, int]]:
        held, seen = ahead_of(rows, matrix), {}
        for index in order:
            product = held.row(0, index)
            seen[index] = product.tobytes(), (product if product.base is None else product.base).size
        return seen

    in_order = found(range(40))
    assert found(np.random.default_rng(seed).permutation(40).tolist()) == in_order
