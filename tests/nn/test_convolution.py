"""Convolution and transposed convolution, against loops over windows, and by the checks of ops."""

from __future__ import annotations

import tracemalloc
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.ops.windows import conv
from asyncflow.ops.windows.geometry import Windows
from asyncflow.testing import check_op, virtual_clock
from tests.fake_cupy.stand_in import stand_in
from tests.nn.layer_cases import LAYOUTS, Case, plain, random_case

Run = Callable[..., Awaitable[Any]]

RNG = np.random.default_rng(6)
NAMES = [f"{name}{rank}d" for name in ("conv", "conv_transpose") for rank in (1, 2, 3)]
X, W, BIAS = RNG.standard_normal((2, 4, 6, 5)), RNG.standard_normal((6, 2, 3, 2)), RNG.standard_normal(6)
OPTIONS: dict[str, Any] = {"stride": (2, 1), "padding": (1, 0), "dilation": (1, 2), "groups": 2}


async def compare(run: Run, case: Case, random: np.random.Generator) -> None:
    """Check a call of random layout, of which some extents are open."""
    x, *rest = case.arrays
    options, is_last = dict(case.options), random.random() < 0.3
    if is_last:
        options["layout"] = LAYOUTS[case.rank]
        x = np.moveaxis(x, -1 - case.rank, -1)
    shape = [None if random.random() < 0.4 else n for n in x.shape]
    tensors = [af.placeholder("float64", shape), *(af.placeholder("float64", each.shape) for each in rest)]
    y = getattr(af.nn, case.name)(*tensors, **options)
    found = await run(y, dict(zip(tensors, [x, *rest], strict=True)))
    np.testing.assert_allclose(
        np.moveaxis(found, -1, -1 - case.rank) if is_last else found, plain(case), rtol=1e-12, atol=1e-12
    )


def choose_ways(monkeypatch: pytest.MonkeyPatch, random: np.random.Generator) -> None:
    """Cut and join blocks as for larger images."""
    monkeypatch.setattr(conv, "BLOCK_BYTES", int(random.choice([1, 3000, 1 << 20])))
    monkeypatch.setattr(conv, "FEW_TERMS", int(random.choice([0, 100])))
    monkeypatch.setattr(conv, "FEW_OUTPUTS", int(random.choice([0, 100])))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("graph")
async def test_random_calls(run: Run, monkeypatch: pytest.MonkeyPatch, name: str, seed: int) -> None:
    """Also in blocks of few windows, which cut images along each axis, and in every way of making products."""
    random = np.random.default_rng([seed, NAMES.index(name)])
    choose_ways(monkeypatch, random)
    await compare(run, random_case(random, name), random)


def alone(op: Callable[..., Any], given: int, value: Any) -> Callable[..., Any]:
    """Return a function of one of two inputs, of which the other is the same for all rows."""
    return lambda x: op(value, x) if given == 0 else op(x, value)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_and_rows(monkeypatch: pytest.MonkeyPatch, groups: int, transposed: bool) -> None:
    choose_ways(monkeypatch, np.random.default_rng([groups, transposed]))
    w = W if groups == 2 else RNG.standard_normal((6, 4, 3, 2))
    w = np.swapaxes(w, 0, 1).reshape(4, -1, 3, 2) if transposed else w

    def op(x: af.Tensor, w: af.Tensor) -> af.Tensor:
        options = {**OPTIONS, "groups": groups}
        return af.nn.conv_transpose2d(x, w, **options) if transposed else af.nn.conv2d(x, w, **options)

    assert check_op(op, X, w) == []
    assert check_op(alone(op, 0, X), w) == []
    assert check_op(alone(op, 1, w), X) == []


@pytest.mark.parametrize("groups", [1, 2])
def test_gradients_of_gradients_and_their_rows(groups: int) -> None:
    w = W if groups == 2 else RNG.standard_normal((6, 4, 3, 2))
    x = X[:, :, :4]

    def op(x: af.Tensor, w: af.Tensor) -> list[af.Tensor]:
        x, w = af.identity(x), af.identity(w)
        y = af.nn.conv2d(x, w, **{**OPTIONS, "groups": groups})
        return list(af.gradients(af.sum(y**3), [x, w]))

    assert check_op(op, x, w, tolerance=1e-6) == []
    assert check_op(alone(op, 0, x), w, tolerance=1e-6) == []
    assert check_op(alone(op, 1, w), x, tolerance=1e-6) == []


@pytest.mark.usefixtures("graph")
async def test_rows_of_filters_are_one_convolution(run: Run) -> None:
    filters = af.placeholder("float64", (None, 6, 4, 3, 2))
    x = af.constant(X)
    y = af.vmap(lambda w: af.nn.conv2d(x, w))(filters)
    fed = RNG.standard_normal((3, 6, 4, 3, 2))
    (node,) = [node for node in y.graph.nodes if node.op is conv.CONV]
    assert node.attrs["groups"] == 1
    for count in (3, 0):
        found = await run(y, {filters: fed[:count]})
        wanted = [
            plain(Case("conv2d", [X, w], {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1}))
            for w in fed[:count]
        ]
        np.testing.assert_allclose(found, np.reshape(wanted, found.shape), rtol=1e-12, atol=1e-12)
        assert found.shape == (count, 2, 6, 4, 4)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.usefixtures("graph")
async def test_values_of_16_bits_are_summed_in_float32(run: Run, dtype: str) -> None:
    x, w = ones = [af.astype(af.ones(shape), dtype) for shape in ((1, 3000, 2, 2), (1, 3000, 1, 1))]
    y = af.nn.conv2d(x, w)
    grads = af.gradients(af.sum(y), ones)
    found, *slopes = await run([y, *grads])
    assert found.dtype.name == dtype
    assert [each.dtype.name for each in slopes] == [dtype] * 2
    # Adding in its own dtype, float16 would stop at 2,048 and bfloat16 at 256.
    np.testing.assert_allclose(found.astype(float), 3000, rtol=0.01)
    np.testing.assert_allclose(slopes[1].astype(float), 4, rtol=0.01)


def test_sums_of_blocks_are_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of blocks of one image each, whose sum NumPy does not compute in float32 by itself."""
    monkeypatch.setattr(conv, "BLOCK_BYTES", 1)
    assert conv.CONV_WEIGHT.kernel is not None
    windows = Windows((1, 1), (0, 0), (0, 0), (1, 1))
    images = np.ones((2500, 1, 1, 1), np.float16)
    found = conv.CONV_WEIGHT.kernel(np, windows=windows, groups=1, shape=(1, 1, 1))(images, images)
    assert found.tolist() == [[[[2500]]]]


EMPTY = [(0, 4, 6, 5), (2, 4, 0, 5), (0, 4, 0, 0)]


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("shape", EMPTY, ids=str)
@pytest.mark.usefixtures("graph")
async def test_empty_batches_and_images(run: Run, shape: tuple[int, ...], is_open: bool) -> None:
    x, w = af.placeholder("float64", (None, 4, None, None) if is_open else shape), af.Variable(W)
    y, t = af.nn.conv2d(x, w, padding=1, groups=2), af.nn.conv_transpose2d(x, W[:4], padding=1)
    grads = af.gradients(af.sum(y) + af.sum(t), [x, w])
    found, transposed, *slopes = await run([y, t, *grads], {x: np.ones(shape)})
    assert found.shape == (shape[0], 6, shape[2], shape[3] and shape[3] + 1)
    assert transposed.shape == (shape[0], 2, shape[2], shape[3] and shape[3] - 1)
    assert [g.shape for g in slopes] == [shape, W.shape]
    assert not slopes[1].any()


async def test_on_a_card(graph: af.Graph) -> None:
    x = af.placeholder("float64", X.shape)
    y = af.nn.conv2d(x, W, BIAS, **OPTIONS)
    fetches = [y, *af.gradients(af.sum(y * y), [x])]
    async with af.Session(graph) as session:
        wanted = await session.run(fetches, {x: X})
    with stand_in(nbytes=16 << 20):
        async with af.Session(graph, devices=["cuda:0"]) as session:
            found = await session.run(fetches, {x: X})
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("images", "channels", "extent"), [(2, 32, 64), (25, 64, 8), (16, 256, 4)])
def test_memory_of_one_block(images: int, channels: int, extent: int) -> None:
    """Extra memory is that of a block: not of an unfolded image, and not of two blocks where the last is smaller."""
    x = np.ones((images, channels, extent, extent), np.float32)
    w = np.ones((channels, channels, 3, 3), np.float32)
    windows = Windows((1, 1), (1, 1), (1, 1), (1, 1))
    calls = [(conv.CONV, {}, x, w), (conv.CONV_WEIGHT, {"shape": w.shape[1:]}, x, x)]
    for op, attrs, *inputs in [*calls, (conv.CONV_INPUT, {"shape": x.shape[1:]}, x, w)]:
        assert op.kernel is not None
        run = op.kernel(np, windows=windows, groups=1, **attrs)
        tracemalloc.start()
        y = run(*inputs)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak - y.nbytes < 4 << 20


def test_a_simulation_of_shapes_alone(graph: af.Graph) -> None:
    """As long as the products take on a card: eight images take longer than one."""
    x = af.placeholder("float32", (None, 64, None, None))
    w = af.Variable(np.zeros((64, 64, 3, 3), np.float32))
    y = af.nn.max_pool2d(af.nn.conv2d(x, w, padding=1), 2)
    fetches = [y, *af.gradients(af.sum(y), [x, w])]

    async def main() -> None:
        async with af.Session(graph, devices=["sim:0"]) as session:
            for count in (1, 8):
                started = clock.now_s
                found = await session.run(fetches, {x: np.zeros((count, 64, 112, 112), np.float32)})
                took.append(clock.now_s - started)
                assert [each.shape for each in found] == [(count, 64, 56, 56), (count, 64, 112, 112), w.shape]

    took: list[float] = []
    with virtual_clock("v100", shapes_only=True) as clock:
        clock.run(main())
    assert took[1] > 4 * took[0]


MISTAKES: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: af.nn.conv2d(X, W), af.ShapeError, "4 channels of the input are not 1 groups of 2 that each filter takes"),
    (lambda: af.nn.conv2d(X, W[:5], groups=2), af.ShapeError, "5 filters are not divided into 2 groups of one size"),
    (
        lambda: af.nn.conv2d(X[:, :, :2], W, groups=2),
        af.ShapeError,
        "a window reaches over 3 elements along spatial axis 0, which has 2, and 0 and 0",
    ),
    (lambda: af.nn.conv2d(X, W, groups=2, dilation=3), af.ShapeError, "a window reaches over 7 elements"),
    (lambda: af.nn.conv2d(X, W, stride=0), af.GraphError, "conv2d: stride is an int from 1 on, or 2 of them; got 0"),
    (
        lambda: af.nn.conv2d(X, W, dilation=(1, 2, 3)),
        af.GraphError,
        "conv2d: dilation is an int from 1 on, or 2 of them",
    ),
    (lambda: af.nn.conv2d(X, W, padding=-1), af.GraphError, "conv2d: padding is an int from 0 on"),
    (lambda: af.nn.conv2d(X, W, padding="full"), af.GraphError, "padding is 'same', 'valid', or numbers"),  # type: ignore[arg-type]
    (
        lambda: af.nn.conv2d(X, W, 2, padding="same", stride=2),
        af.GraphError,
        "padding='same' keeps the extents, so stride is 1",
    ),
    (lambda: af.nn.conv2d(X, W, groups=0), af.GraphError, "conv2d: groups is 1 or more; got 0"),
    (
        lambda: af.nn.conv2d(X, W, groups=2, layout="NCW"),
        af.GraphError,
        "conv2d: layout is one of NCHW, NHWC; got 'NCW'",
    ),
    (lambda: af.nn.conv2d(X[0, 0], W), af.ShapeError, "conv2d: input has 4 axes, or 3 without a batch"),
    (
        lambda: af.nn.conv2d(X, W[0]),
        af.ShapeError,
        r"takes weights of filters, channels, and 2 axes of a window; got \[2,3,2\]",
    ),
    (lambda: af.nn.conv2d(X.astype(int), W), af.DTypeError, "takes floats, not int64"),
    (
        lambda: af.nn.conv2d(X, W.astype("float32")),
        af.DTypeError,
        "takes two values of one dtype, not float64 and float32",
    ),
    (lambda: af.nn.conv2d(X, W, BIAS[:4], groups=2), af.ShapeError, r"conv2d: bias has shape \[6\]"),
    (
        lambda: af.nn.conv2d(X, W, af.constant(BIAS, "float32"), groups=2),
        af.DTypeError,
        "bias has the dtype of the input",
    ),
    (lambda: af.nn.conv2d(X, W[:, :, :0], groups=2), af.ShapeError, "a window has one element or more"),
    (
        lambda: af.nn.conv_transpose2d(X, W),
        af.ShapeError,
        "conv_transpose2d: the input has 4 channels, and weight is for 6",
    ),
    (
        lambda: af.nn.conv_transpose2d(X, W[:4], output_padding=1),
        af.GraphError,
        "output_padding is below the stride or the dilation",
    ),
    (
        lambda: af.nn.conv_transpose2d(X, W[:4], padding=4),
        af.ShapeError,
        "nothing is left of spatial axis 0: it would have 0 elements",
    ),
    (lambda: af.nn.conv_transpose2d(X, W[0]), af.ShapeError, "conv_transpose2d: weight has 4 axes"),
]


@pytest.mark.parametrize(("build", "error", "message"), MISTAKES)
@pytest.mark.usefixtures("graph")
def test_mistakes(build: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build()


@pytest.mark.parametrize(
    ("fed", "message"),
    [(X[:, :3], "3 channels of the input are not 2 groups of 2"), (X[:, :, :1], "a window reaches over 3 elements")],
)
@pytest.mark.usefixtures("graph")
async def test_mistakes_that_only_the_run_finds(run: Run, fed: Any, message: str) -> None:
    x = af.placeholder("float64", (None, None, None, None))
    with pytest.raises(af.KernelError, match=message):
        await run(af.nn.conv2d(x, W, groups=2), {x: fed})
