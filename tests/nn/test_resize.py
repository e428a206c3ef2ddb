"""`resize`, against plain loops over pixels, and by the checks of ops."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.nn.images.layouts import Layout
from asyncflow.nn.images.resize import Mode
from asyncflow.testing import check_op, virtual_clock
from tests.fake_cupy.stand_in import stand_in

Run = Callable[..., Awaitable[Any]]

RNG = np.random.default_rng(6)
X = RNG.standard_normal((2, 3, 4, 5))

resize = af.nn.resize


def by_loop(x: np.ndarray, size: Sequence[int], place: Callable[[int, int, int], float]) -> np.ndarray:
    """Mix the pixels around ``place(number, old, new)``, along each axis."""
    pixels = x.transpose(*range(2, x.ndim), 0, 1)
    found = np.zeros((*size, *x.shape[:2]))
    for at in product(*map(range, size)):
        parts = []
        for number, old, new in zip(at, x.shape[2:], size, strict=True):
            source = min(max(place(number, old, new), 0), old - 1)
            low = int(source)
            parts.append([(low, 1 - source + low), (min(low + 1, old - 1), source - low)])
        for corner in product(*parts):
            found[at] += np.prod([share for _, share in corner]) * pixels[tuple(pixel for pixel, _ in corner)]
    return found.transpose(-2, -1, *range(len(size)))


PLACES: dict[str, tuple[Mode, bool | None, Callable[[int, int, int], float]]] = {
    "nearest": ("nearest", None, lambda at, old, new: at * old // new),
    "exact": ("nearest-exact", None, lambda at, old, new: (2 * at + 1) * old // (2 * new)),
    "edges": ("bilinear", None, lambda at, old, new: (at + 0.5) * old / new - 0.5),
    "corners": ("bilinear", True, lambda at, old, new: at * (old - 1) / max(1, new - 1)),
}


@pytest.mark.parametrize("case", PLACES)
@pytest.mark.parametrize("size", [(8, 3), (1, 13), (4, 5), (0, 2)], ids=str)
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.usefixtures("graph")
async def test_resize(run: Run, case: str, size: tuple[int, int], layout: Layout) -> None:
    mode, align_corners, place = PLACES[case]
    axes = (0, 1, 2, 3) if layout == "NCHW" else (0, 2, 3, 1)
    ys, feeds = [], {}
    for shape in ((2, 3, 4, 5), (None,) * 4):
        x = af.placeholder("float64", [shape[axis] for axis in axes])
        feeds[x] = X.transpose(axes)
        ys.append(resize(x, size, None, mode, align_corners, layout=layout))
    wanted = by_loop(X, size, place).transpose(axes)
    assert ys[0].shape == wanted.shape
    for found in await run(ys, feeds):
        np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("factor", "mode", "size"),
    [
        (2, "nearest", (8, 10)),
        ((0.5, 1.7), "nearest", (2, 8)),
        ((2, 1.7), "bilinear", (8, 8)),
        (1.01, "bilinear", (4, 5)),
    ],
    ids=str,
)
@pytest.mark.usefixtures("graph")
async def test_factors_are_used_as_they_are(run: Run, factor: Any, mode: Mode, size: tuple[int, int]) -> None:
    """An extent of 8 of 5 times 1.7 takes steps of 1 / 1.7, and not of 5 / 8, unless it stays."""
    factors = dict(zip(X.shape[2:], factor if isinstance(factor, tuple) else [factor] * 2, strict=True))

    def place(at: int, old: int, new: int) -> float:
        step = 1 if (old, mode) == (new, "bilinear") else 1 / factors[old]
        return int(at * step) if mode == "nearest" else (at + 0.5) * step - 0.5

    whole, opened = af.placeholder("float64", X.shape), af.placeholder("float64", (None,) * 4)
    ys = [resize(x, scale_factor=factor, mode=mode) for x in (whole, opened)]
    assert ys[0].shape == (2, 3, *size)
    for found in await run(ys, {whole: X, opened: X}):
        np.testing.assert_allclose(found, by_loop(X, size, place), rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("graph")
async def test_other_ranks_and_dtypes(run: Run) -> None:
    x = X[:, :, :, 0]
    edges = PLACES["edges"][2]
    line, cube, whole = await run(
        [
            resize(x, 7, mode="linear", layout="NCW"),
            resize(X[:, :1, None], [2, 3, 9], mode="trilinear"),
            resize(np.arange(4)[None, None], 8),
        ]
    )
    np.testing.assert_allclose(line, by_loop(x, [7], edges), rtol=1e-12)
    np.testing.assert_allclose(cube, by_loop(X[:, :1, None], [2, 3, 9], edges), rtol=1e-12)
    np.testing.assert_array_equal(whole, [[[0, 0, 1, 1, 2, 2, 3, 3]]])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.usefixtures("graph")
async def test_values_of_16_bits_are_mixed_in_float32(run: Run, dtype: str) -> None:
    x = af.astype(X, dtype)
    found, rounded = await run([resize(x, (9, 9), mode="bilinear"), x])
    assert found.dtype.name == dtype
    wanted = by_loop(rounded.astype(np.float64), (9, 9), PLACES["edges"][2])
    rounding = 2.0**-8 if dtype == "bfloat16" else 2.0**-11
    np.testing.assert_allclose(found.astype(np.float64), wanted, rtol=rounding, atol=1e-3)


@pytest.mark.parametrize("case", PLACES)
def test_gradients_and_rows(case: str) -> None:
    mode, align_corners, _ = PLACES[case]
    assert check_op(resize, X[:, :1], size=(6, 3), mode=mode, align_corners=align_corners) == []


@pytest.mark.usefixtures("graph")
async def test_no_pixels(run: Run) -> None:
    x = af.placeholder("float64", (None,) * 4)
    empty = np.zeros((0, 3, 4, 5))
    np.testing.assert_array_equal(await run(resize(x, 3), {x: empty}), np.zeros((0, 3, 3, 3)))
    doubled = resize(x, scale_factor=2, mode="bilinear")
    np.testing.assert_array_equal(await run(doubled, {x: np.zeros((2, 3, 0, 5))}), np.zeros((2, 3, 0, 10)))
    with pytest.raises(af.KernelError, match="IndexError: cannot do a non-empty take from an empty axes"):
        await run(resize(x, 3), {x: np.zeros((2, 3, 0, 5))})


async def test_on_a_card(graph: af.Graph) -> None:
    ys = [resize(X, (7, 4), None, mode, align_corners) for mode, align_corners, _ in PLACES.values()]
    with stand_in(nbytes=16 << 20):
        async with af.Session(graph, devices=["cuda:0"]) as session:
            found = await session.run(ys)
    for y, (_, _, place) in zip(found, PLACES.values(), strict=True):
        np.testing.assert_allclose(y, by_loop(X, (7, 4), place), rtol=1e-12, atol=1e-12)


def test_shapes_alone() -> None:
    async def main() -> Any:
        with af.Graph() as graph:
            y = resize(af.placeholder("float32", (None, 3, 4, 5)), scale_factor=2, mode="bilinear")
            async with af.Session(graph, devices=["sim:0"]) as session:
                return await session.run(y, {y.graph.nodes[0].outputs[0]: X.astype(np.float32)})

    with virtual_clock("1 x v100", shapes_only=True) as clock:
        assert clock.run(main()).shape == (2, 3, 8, 10)


MISTAKES: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: resize(X), af.GraphError, "takes size or scale_factor, and not both"),
    (lambda: resize(X, 2, 2.0), af.GraphError, "takes size or scale_factor, and not both"),
    (lambda: resize(X, (2, 3, 4)), af.ShapeError, "size is a number, or one for each of 2 axes"),
    (lambda: resize(X, 2.5), af.GraphError, "size must be an int"),  # type: ignore[arg-type]
    (lambda: resize(X, -1), af.ShapeError, "size is at least 0; got -1"),
    (lambda: resize(X, scale_factor=0), af.ShapeError, "scale_factor is above 0"),
    (lambda: resize(X, scale_factor=float("nan")), af.ShapeError, "scale_factor is above 0"),
    (lambda: resize(X, scale_factor="2"), af.GraphError, "scale_factor is"),  # type: ignore[arg-type]
    (lambda: resize(X, 2, mode="area"), af.GraphError, "mode is one of nearest, nearest-exact, linear"),  # type: ignore[arg-type]
    (lambda: resize(X, 2, mode="linear"), af.ShapeError, "'linear' does not fit 2 axes of pixels"),
    (lambda: resize(X, 2, align_corners=True), af.GraphError, "align_corners is for linear modes, not for 'nearest'"),
    (lambda: resize(X.astype(int), 2, mode="bilinear"), af.DTypeError, "'bilinear' takes floats, not int64"),
    (lambda: resize(X[0, 0], 2), af.ShapeError, "does not fit 0 axes of pixels"),
    (lambda: resize(X[:, :, :0], 2), af.ShapeError, "there are no pixels along axis 2"),
    (lambda: resize(X, 2, layout="NWC"), af.ShapeError, "layout='NWC' fits"),
]


@pytest.mark.parametrize(("build", "error", "message"), MISTAKES)
@pytest.mark.usefixtures("graph")
def test_mistakes(build: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build()
