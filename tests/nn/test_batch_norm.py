"""`batch_norm`, against NumPy, and by the checks of ops."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.nn.images.layouts import Layout
from asyncflow.nn.norms.batch_norm import BATCH_NORM, _gradient, _normalized, _of_ops, _statistics
from asyncflow.testing import check_op, virtual_clock
from tests.fake_cupy.stand_in import stand_in

Run = Callable[..., Awaitable[Any]]

RNG = np.random.default_rng(5)
X = RNG.standard_normal((3, 4, 2, 5)) * 2 + 1
WEIGHT, BIAS = RNG.standard_normal(4), RNG.standard_normal(4)
MEAN, VARIANCE = RNG.standard_normal(4), RNG.random(4) + 0.5
COUNT = X.size // 4

batch_norm = af.nn.batch_norm


def column(x: np.ndarray) -> np.ndarray:
    return x[:, None, None]


def normal(x: np.ndarray, mean: np.ndarray, variance: np.ndarray, eps: float = 1e-5) -> np.ndarray:
    return (x - column(mean)) / np.sqrt(column(variance) + eps)


def of_batch(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return x.mean((0, 2, 3)), x.var((0, 2, 3))


def running() -> tuple[af.Variable, af.Variable]:
    return af.Variable(MEAN, name="mean"), af.Variable(VARIANCE, name="variance")


def kept(x: np.ndarray, momentum: float = 0.1, steps: int = 1) -> list[np.ndarray]:
    """Return the running statistics after some steps on one batch."""
    stays = (1 - momentum) ** steps
    mean, variance = of_batch(x)
    count = x.size // 4
    return [stays * MEAN + (1 - stays) * mean, stays * VARIANCE + (1 - stays) * variance * count / (count - 1)]


def equal(found: Any, wanted: Any, tolerance: float = 1e-12) -> None:
    for y, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(y, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", [X.shape, (None, 4, None, 5), (None,) * 4], ids=["static", "open", "all open"])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.usefixtures("graph")
async def test_batch_norm(run: Run, shape: tuple[int | None, ...], layout: Layout) -> None:
    axes = (0, 1, 2, 3) if layout == "NCHW" else (0, 2, 3, 1)
    x = af.placeholder("float64", [shape[axis] for axis in axes])
    mean, variance = running()
    ys = [
        batch_norm(x, MEAN, VARIANCE, WEIGHT, BIAS, layout=layout),
        batch_norm(x, MEAN, VARIANCE, eps=0.3, layout=layout),
        batch_norm(x, mean, variance, WEIGHT, BIAS, True, 0.2, layout=layout),
        batch_norm(x, None, None, bias=BIAS, training=True, eps=0.3, layout=layout),
    ]
    found = await run([*ys, mean.read(), variance.read()], {x: X.transpose(axes)})
    wanted = [
        normal(X, MEAN, VARIANCE) * column(WEIGHT) + column(BIAS),
        normal(X, MEAN, VARIANCE, 0.3),
        normal(X, *of_batch(X)) * column(WEIGHT) + column(BIAS),
        normal(X, *of_batch(X), 0.3) + column(BIAS),
    ]
    equal(found, [*(y.transpose(axes) for y in wanted), *kept(X, 0.2)])


@pytest.mark.parametrize("shape", [(6, 4), (6, 4, 3), (2, 4, 3, 1, 2)], ids=str)
@pytest.mark.usefixtures("graph")
async def test_other_ranks(run: Run, shape: tuple[int, ...]) -> None:
    x = RNG.standard_normal(shape)
    whole = x.reshape(*x.shape[:2], -1, 1)
    wanted = normal(whole, *of_batch(whole)).reshape(shape)
    last = batch_norm(np.moveaxis(x, 1, -1), None, None, training=True, layout="NHWC")
    found, turned = await run([batch_norm(x, None, None, training=True), last])
    equal([found, np.moveaxis(turned, -1, 1)], [wanted, wanted])


@pytest.mark.usefixtures("graph")
async def test_the_mean_may_be_much_larger_than_the_deviation(run: Run) -> None:
    x = (X + 1e4).astype(np.float32)
    (found,) = await run([batch_norm(x, None, None, training=True)])
    equal([found], [normal(x.astype(np.float64), *of_batch(x.astype(np.float64)))], 5e-4)


@pytest.mark.usefixtures("graph")
async def test_many_rows_add_up_in_float64(run: Run) -> None:
    x = np.full((300_000, 1), 0.1, np.float32)
    mean, variance = af.Variable(np.zeros(1, np.float32)), af.Variable(np.ones(1, np.float32))
    y = batch_norm(x, mean, variance, training=True, momentum=1.0)
    _, found, square = await run([y, mean.read(), variance.read()])
    assert abs(found[0] - 0.1) < 1e-8
    assert square[0] < 1e-15


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("training", [False, True])
async def test_dtypes(graph: af.Graph, dtype: str, training: bool) -> None:
    x = af.astype(X, dtype)
    mean, variance = (af.Variable(start.astype(np.float32)) for start in (MEAN, VARIANCE))
    weight = af.placeholder("float32", (4,))
    y = batch_norm(x, mean, variance, weight, af.astype(BIAS, dtype), training)
    grad = af.gradients(af.sum(astype64(y) ** 2), weight)
    async with af.Session(graph) as session:
        found, by_weight = await session.run([y, grad], {weight: WEIGHT.astype(np.float32)})
        statistics = [await session.run(each) for each in (mean, variance)]
    assert found.dtype.name == dtype
    assert by_weight.dtype == np.float32
    tolerance = {"float16": 0.02, "bfloat16": 0.1, "float32": 1e-5}[dtype]
    wanted = normal(X, *(of_batch(X) if training else (MEAN, VARIANCE))) * column(WEIGHT) + column(BIAS)
    equal([found.astype(np.float64)], [wanted], tolerance)
    equal(statistics, kept(X) if training else [MEAN, VARIANCE], tolerance)


def astype64(x: af.Tensor) -> af.Tensor:
    return af.astype(x, "float64")


# -- gradients and rows ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_gradients_and_rows(layout: Layout) -> None:
    x = X if layout == "NCHW" else np.moveaxis(X, 1, -1)

    def trained(x: af.Tensor, w: af.Tensor, b: af.Tensor) -> af.Tensor:
        return batch_norm(x, None, None, w, b, training=True, layout=layout)

    def applied(x: af.Tensor, mean: af.Tensor, variance: af.Tensor, w: af.Tensor) -> af.Tensor:
        return batch_norm(x, mean, variance, w, layout=layout)

    assert check_op(trained, x, WEIGHT, BIAS) == []
    assert check_op(lambda x: batch_norm(x, None, None, training=True, layout=layout), x) == []
    assert check_op(applied, x, MEAN, VARIANCE, WEIGHT) == []


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.usefixtures("graph")
async def test_gradients_of_gradients(run: Run, scaled: bool, shifted: bool) -> None:
    xs = [af.placeholder("float64", x.shape) for x in (X, WEIGHT, BIAS)]
    feeds = dict(zip(xs, (X, WEIGHT, BIAS), strict=True))
    x, weight, bias = xs

    def third(y: af.Tensor) -> list[af.Tensor]:
        total = af.sum(y**3)
        for _ in range(2):
            total = sum(af.sum(g * g) for g in af.gradients(total, xs) if g is not None)  # type: ignore[assignment]
        return [g for g in af.gradients(total, xs) if g is not None]

    affine = [weight] * scaled + [bias] * shifted
    plain = _of_ops(x, affine, axis=1, eps=0.1, scaled=scaled)
    y = batch_norm(x, None, None, weight if scaled else None, bias if shifted else None, True, eps=0.1)
    assert y.node.op is BATCH_NORM
    found, wanted = await run([third(y), third(plain)], feeds)
    assert len(found) == 1 + scaled + shifted
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-8 * np.abs(b).max())


@pytest.mark.usefixtures("graph")
async def test_rows_change_no_statistics() -> None:
    mean, variance = running()
    with pytest.raises(af.GraphError, match=r"vmap.*changes Variable\('mean'\), once for each row"):
        af.vmap(lambda x: batch_norm(x, mean, variance, training=True))(X[None])


# -- running statistics ----------------------------------------------------------------------------------------------


async def test_gradients_alone_change_statistics(graph: af.Graph) -> None:
    mean, variance = running()
    weight, bias = af.Variable(WEIGHT), af.Variable(BIAS)
    loss = af.sum(batch_norm(X, mean, variance, weight, bias, training=True) * X)
    for of in af.gradients(loss, [weight, bias]):
        async with af.Session(graph) as session:
            await session.run(of)
            equal([await session.run(mean), await session.run(variance)], kept(X))


async def test_inference_and_loss_change_none(graph: af.Graph) -> None:
    mean, variance = running()
    y = batch_norm(X, mean, variance)
    batch_norm(X, mean, variance, training=True)  # which nothing asks for
    async with af.Session(graph) as session:
        await session.run([y, af.gradients(af.sum(y), mean.read())])
        equal([await session.run(mean), await session.run(variance)], [MEAN, VARIANCE])


async def test_requests_that_overlap_lose_no_update(graph: af.Graph) -> None:
    mean, variance = running()
    x = af.placeholder("float64", X.shape)
    y = batch_norm(x, mean, variance, training=True)
    async with af.Session(graph) as session:
        await asyncio.gather(*(session.run(y, {x: X}) for _ in range(20)))
        equal([await session.run(mean), await session.run(variance)], kept(X, steps=20))


async def test_in_a_while_loop(graph: af.Graph) -> None:
    mean, variance = running()
    x = af.placeholder("float64", X.shape)

    def step(i: af.Tensor, y: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
        return i + 1, batch_norm(y, mean, variance, WEIGHT, BIAS, training=True) + af.sin(y)

    _, looped = af.while_loop(lambda i, y: i < 3, step, (0, x))
    grad = af.gradients(af.sum(looped**2), x)
    async with af.Session(graph) as session:
        found = [*await session.run([looped, grad], {x: X}), await session.run(mean), await session.run(variance)]
    y: af.Tensor = x
    for _ in range(3):
        _, y = step(af.constant(0), y)
    plain = af.gradients(af.sum(y**2), x)
    async with af.Session(graph) as session:
        wanted = [*await session.run([y, plain], {x: X}), await session.run(mean), await session.run(variance)]
    equal(found, wanted, 1e-10)


async def test_rows_of_map_fn_change_statistics_in_order(graph: af.Graph) -> None:
    mean, variance = running()
    batches = np.stack([X, X * 2 + 1, X - 3])
    ys = af.map_fn(lambda x: batch_norm(x, mean, variance, training=True, momentum=0.5), batches)
    async with af.Session(graph) as session:
        found = await session.run(ys)
        statistics = await session.run(mean)
    equal(found, [normal(x, *of_batch(x)) for x in batches])
    wanted = MEAN
    for x in batches:
        wanted = (wanted + of_batch(x)[0]) / 2
    equal([statistics], [wanted])


@pytest.mark.parametrize("shape", [(0, 4, 2, 5), (3, 4, 0, 5)], ids=str)
@pytest.mark.parametrize("is_open", [False, True])
async def test_empty_batches(graph: af.Graph, shape: tuple[int, ...], is_open: bool) -> None:
    mean, variance = running()
    x = af.placeholder("float64", (None, 4, None, None) if is_open else shape)
    ys = [batch_norm(x, mean, variance, training=training) for training in (False, True)]
    grads = [af.gradients(af.sum(y * y), x) for y in ys]
    async with af.Session(graph) as session:
        for found in await session.run([*ys, *grads], {x: np.zeros(shape)}):
            assert found.shape == shape
        equal([await session.run(mean), await session.run(variance)], [MEAN, VARIANCE])


@pytest.mark.usefixtures("graph")
async def test_one_value_a_channel_fails_the_run(run: Run) -> None:
    x = af.placeholder("float64", (None, 4))
    with pytest.raises(
        af.KernelError, match=r"training needs more than 1 value for each channel; the input is \[1, 4\]"
    ):
        await run(batch_norm(x, None, None, training=True), {x: np.zeros((1, 4))})


async def test_constant_statistics_are_folded(graph: af.Graph) -> None:
    x = af.placeholder("float64", X.shape)
    y = batch_norm(x, MEAN, VARIANCE, WEIGHT, BIAS)
    async with af.Session(graph) as session:
        text = session.plan(y, [x]).explain()
    assert "sqrt" not in text
    assert "divide" not in text


def test_blocks_bound_the_memory() -> None:
    """A copy of these values takes 8 MiB."""
    x = RNG.standard_normal((512, 8, 16, 16), dtype=np.float32)
    attrs: dict[str, Any] = {"axis": 1, "eps": 0.1, "scaled": True}
    mean, variance, _ = _statistics(np, x, axis=1)
    for kernel, results in (
        (lambda: _statistics(np, x, axis=1), 0),
        (lambda: _normalized(np, x, mean, variance, mean, **attrs), 1),
        (lambda: _gradient(np, x, x, mean, variance, mean, **attrs), 1),
    ):
        tracemalloc.start()
        kernel()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < results * x.nbytes + (1 << 20)


# -- devices ---------------------------------------------------------------------------------------------------------


def trained(x: af.Tensor) -> tuple[list[af.Tensor], list[af.Variable]]:
    mean, variance = running()
    y = batch_norm(x, mean, variance, WEIGHT, BIAS, training=True)
    return [y, af.gradients(af.sum(y**3), x), batch_norm(x, mean, variance)], [mean, variance]


async def test_on_a_card(graph: af.Graph) -> None:
    x = af.placeholder("float64", X.shape)
    fetches, variables = trained(x)
    found = []
    for devices in (["cpu:0"], ["cuda:0"]):
        with stand_in(nbytes=16 << 20):
            async with af.Session(graph, devices=devices) as session:
                ys = [await session.run(fetches, {x: X}) for _ in range(2)][-1]
                found.append([*ys, *[await session.run(each) for each in variables]])
    on_cpu, on_card = found
    equal(on_card, on_cpu, 1e-10)


@pytest.mark.parametrize("shapes_only", [False, True])
def test_on_simulated_cards(shapes_only: bool) -> None:
    async def main() -> list[Any]:
        with af.Graph() as graph:
            x = af.placeholder("float64", X.shape)
            fetches, variables = trained(x)
            async with af.Session(graph, devices=["sim:0"]) as session:
                ys = await session.run(fetches, {x: X})
                return [*ys, *[await session.run(each) for each in variables]]

    with virtual_clock("1 x v100", shapes_only=shapes_only) as clock:
        found = clock.run(main())
    assert [y.shape for y in found] == [X.shape] * 3 + [(4,)] * 2
    if not shapes_only:
        equal(found[:1] + found[3:], [normal(X, *of_batch(X)) * column(WEIGHT) + column(BIAS), *kept(X)])


# -- mistakes --------------------------------------------------------------------------------------------------------

ZEROS = np.zeros(4)
MISTAKES: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: batch_norm(X.astype(int), ZEROS, ZEROS), af.DTypeError, "batch_norm: takes floats, not int64"),
    (lambda: batch_norm(X, None, None), af.GraphError, "without training it needs running_mean and running_var"),
    (lambda: batch_norm(X, ZEROS, None), af.GraphError, "running_mean and running_var together, or neither"),
    (lambda: batch_norm(X, ZEROS, ZEROS, training=True), af.GraphError, "training changes running_mean, so it is an"),
    (
        lambda: batch_norm(X, *running(), training=af.placeholder("bool", ())),  # type: ignore[arg-type]
        af.GraphError,
        "training is True or False; got .*; choose in the run with af.cond",
    ),
    (
        lambda: batch_norm(X, *running(), training=True, momentum=None),  # type: ignore[arg-type]
        af.GraphError,
        "batch_norm: momentum is a number; got None",
    ),
    (lambda: batch_norm(X, ZEROS, ZEROS, eps="0"), af.GraphError, "batch_norm: eps is a number"),  # type: ignore[arg-type]
    (lambda: batch_norm(X[0, 0, 0], ZEROS, ZEROS), af.ShapeError, r"input is \(batch, channels, ...\)"),
    (lambda: batch_norm(X, ZEROS[1:], ZEROS), af.ShapeError, r"running_mean has shape \[4\]"),
    (lambda: batch_norm(X, ZEROS, ZEROS, WEIGHT[1:]), af.ShapeError, r"weight has shape \[4\]"),
    (
        lambda: batch_norm(X, ZEROS, ZEROS, bias=af.constant(BIAS, "float32")),
        af.DTypeError,
        "bias is float64; got .*float32",
    ),
    (
        lambda: batch_norm(X, af.Variable(np.zeros(3), name="short"), running()[1], training=True),
        af.ShapeError,
        r"running_mean has shape \[4\]; got Variable\('short'",
    ),
    (
        lambda: batch_norm(X, af.Variable(np.zeros(4, int), name="whole"), running()[1], training=True),
        af.DTypeError,
        "running_mean is floats; got Variable",
    ),
    (lambda: batch_norm(X[:1, :, 0, 0], None, None, training=True), af.ShapeError, "needs more than 1 value for each"),
    (lambda: batch_norm(X, ZEROS, ZEROS, layout="NCW"), af.ShapeError, "a known rank that layout='NCW' fits"),
    (lambda: batch_norm(X, ZEROS, ZEROS, layout="CNHW"), af.GraphError, "layout is one of NCHW, NHWC"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("build", "error", "message"), MISTAKES)
@pytest.mark.usefixtures("graph")
def test_mistakes(build: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build()
