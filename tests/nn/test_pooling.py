"""Pooling, against loops over windows, and by the checks of ops."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.ops.windows import pool
from asyncflow.ops.windows.geometry import Windows
from asyncflow.testing import check_op
from tests.fake_cupy.stand_in import stand_in
from tests.nn.layer_cases import random_case
from tests.nn.test_convolution import compare

Run = Callable[..., Awaitable[Any]]

RNG = np.random.default_rng(7)
NAMES = [f"{name}{rank}d" for name in ("max_pool", "avg_pool", "adaptive_avg_pool") for rank in (1, 2, 3)]
X = RNG.permutation(120).astype(float).reshape(2, 2, 5, 6) / 10
LAYERS: dict[str, Callable[[Any], af.Tensor]] = {
    "max": lambda x: af.nn.max_pool2d(x, 3, 2, 1),
    "dilated max": lambda x: af.nn.max_pool2d(x, 2, 1, dilation=2, ceil_mode=True),
    "mean": lambda x: af.nn.avg_pool2d(x, (2, 3), (1, 2), 1, ceil_mode=True, count_include_pad=False),
    "adaptive mean": lambda x: af.nn.adaptive_avg_pool2d(x, (3, 4)),
    "whole mean": lambda x: af.nn.adaptive_avg_pool2d(x, 1, layout="NHWC"),
}


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("graph")
async def test_random_calls(run: Run, name: str, seed: int) -> None:
    random = np.random.default_rng([seed, NAMES.index(name)])
    await compare(run, random_case(random, name), random)


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_gradients_and_rows(layer: Callable[[Any], af.Tensor]) -> None:
    def slope(x: af.Tensor) -> Any:
        y = af.identity(x)
        return af.gradients(af.sum(layer(y) ** 3), y)

    assert check_op(layer, X) == []
    assert check_op(slope, X, tolerance=1e-6) == []


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
async def test_on_a_card(graph: af.Graph, layer: Callable[[Any], af.Tensor]) -> None:
    x = af.placeholder("float64", X.shape)
    y = layer(x)
    fetches = [y, af.gradients(af.sum(y * y), x)]
    async with af.Session(graph) as session:
        wanted = await session.run(fetches, {x: X})
    with stand_in(nbytes=16 << 20):
        async with af.Session(graph, devices=["cuda:0"]) as session:
            found = await session.run(fetches, {x: X})
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12)


@pytest.mark.usefixtures("graph")
async def test_nan_infinities_and_equal_elements(run: Run) -> None:
    """A window with a NaN gives NaN; of equal elements the first one has the gradient, and of NaNs the last."""
    x = af.placeholder("float64", (None, 1, 4))
    y = af.nn.max_pool1d(x, 2, 2, 0)
    grad = af.gradients(y, x, af.constant([[[1.0, 2.0]]] * 3))
    fed = np.array([[[np.nan, 1, 2, np.nan]], [[3, 3, -np.inf, -np.inf]], [[np.nan, np.nan, 1, 2]]])
    found, slope = await run([y, grad], {x: fed})
    np.testing.assert_array_equal(found[:, 0], [[np.nan, np.nan], [3, -np.inf], [np.nan, 2]])
    np.testing.assert_array_equal(slope[:, 0], [[1, 0, 0, 2], [1, 0, 2, 0], [0, 1, 0, 2]])


@pytest.mark.usefixtures("graph")
async def test_a_window_of_nothing_but_infinities_gives_its_gradient_to_an_element(run: Run) -> None:
    """The first place of this window is outside of the input."""
    x = af.placeholder("float64", (1, 2))
    y = af.nn.max_pool1d(x, 3, 1, 1)
    found = await run(af.gradients(af.sum(y), x), {x: np.full((1, 2), -np.inf)})
    assert found.tolist() == [[2, 0]]


@pytest.mark.parametrize("dtype", ["int8", "uint16", "float16", "bfloat16"])
@pytest.mark.usefixtures("graph")
async def test_dtypes(run: Run, dtype: str) -> None:
    x = af.astype(af.constant(np.arange(24).reshape(1, 1, 4, 6)), dtype)
    found = await run(af.nn.max_pool2d(x, 2, padding=1))
    assert found.dtype.name == dtype
    assert found[0, 0].astype(int).tolist() == [[0, 2, 4, 5], [12, 14, 16, 17], [18, 20, 22, 23]]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.usefixtures("graph")
async def test_values_of_16_bits_are_summed_in_float32(run: Run, dtype: str) -> None:
    x = af.astype(af.full((1, 3000), 60000.0), dtype)
    found = await run([af.nn.avg_pool1d(x, 3000), af.nn.adaptive_avg_pool1d(x, 7), af.nn.adaptive_avg_pool1d(x, 1)])
    for each in found:
        assert each.dtype.name == dtype
        np.testing.assert_allclose(each.astype(float), 60000, rtol=0.01)


def test_gradients_of_many_windows_are_summed_in_float32() -> None:
    """One element is the largest of 2,500 windows."""
    x = np.zeros((1, 4999), np.float16)
    x[0, 2499] = 1
    windows = Windows((1,), (0,), (0,), (1,))
    assert pool.POOL_PLACES.kernel is not None
    assert pool.UNPOOLED.kernel is not None
    places = pool.POOL_PLACES.kernel(np, windows=windows, kernel=(2500,))(x)
    back = pool.UNPOOLED.kernel(np, windows=windows, kernel=(2500,), shape=(4999,))
    assert back(np.ones((1, 2500), np.float16), places)[0, 2499] == 2500


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("shape", [(0, 2, 5, 6), (2, 2, 0, 6)], ids=str)
@pytest.mark.usefixtures("graph")
async def test_empty_batches_and_images(run: Run, shape: tuple[int, ...], is_open: bool) -> None:
    x = af.placeholder("float64", [None] * 4 if is_open else shape)
    y, z = af.nn.max_pool2d(x, 3, 1, 1), af.nn.avg_pool2d(x, 2, 1, 1, True, False)
    grad = af.gradients(af.sum(y) + af.sum(z), x)
    found = await run([y, z, grad], {x: np.ones(shape)})
    assert [each.shape for each in found] == [shape, (*shape[:2], shape[2] and 6, 7), shape]


MISTAKES: list[tuple[Callable[[], object], type[Exception], str]] = [
    (
        lambda: af.nn.max_pool2d(X, 8),
        af.ShapeError,
        "a window reaches over 8 elements along spatial axis 0, which has 5",
    ),
    (lambda: af.nn.max_pool2d(X, 0), af.GraphError, "max_pool2d: kernel_size is an int from 1 on, or 2 of them; got 0"),
    (lambda: af.nn.max_pool2d(X, 2, 0), af.GraphError, "max_pool2d: stride is an int from 1 on"),
    (lambda: af.nn.max_pool2d(X, 2, padding=2), af.GraphError, "padding 2 is more than half of a window over 2"),
    (lambda: af.nn.max_pool2d(X, 2, ceil_mode=1), af.GraphError, "ceil_mode is True or False"),  # type: ignore[arg-type]
    (lambda: af.nn.max_pool2d(X > 1, 2), af.DTypeError, "takes real numbers, not bool"),
    (lambda: af.nn.max_pool3d(X[0, 0], 2), af.ShapeError, "max_pool3d: input has 5 axes, or 4 without a batch"),
    (lambda: af.nn.avg_pool2d(X.astype(int), 2), af.DTypeError, "takes floats, not int64"),
    (lambda: af.nn.avg_pool2d(X, 2, divisor_override=0), af.GraphError, "avg_pool2d: divisor_override is not 0"),
    (lambda: af.nn.avg_pool2d(X, 2, count_include_pad=0), af.GraphError, "count_include_pad is True or False"),  # type: ignore[arg-type]
    (
        lambda: af.nn.adaptive_avg_pool2d(X, (2, 2, 2)),
        af.GraphError,
        "adaptive_avg_pool2d: output_size is an int or None",
    ),
    (lambda: af.nn.adaptive_avg_pool2d(X, 0), af.GraphError, "output_size is an int from 1 on"),
    (lambda: af.nn.adaptive_avg_pool2d(X[:, :, :0], 2), af.ShapeError, "an axis without elements has no means"),
    (
        lambda: af.nn.avg_pool2d(af.placeholder("float32"), 2, layout="NHWC"),
        af.ShapeError,
        "with layout='NHWC' the rank",
    ),
]


@pytest.mark.parametrize(("build", "error", "message"), MISTAKES)
@pytest.mark.usefixtures("graph")
def test_mistakes(build: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build()


@pytest.mark.usefixtures("graph")
async def test_a_mistake_that_only_the_run_finds(run: Run) -> None:
    x = af.placeholder("float64", (None, None, None))
    with pytest.raises(af.KernelError, match="a window reaches over 4 elements"):
        await run(af.nn.max_pool1d(x, 4), {x: X[0, :, :, :3]})
