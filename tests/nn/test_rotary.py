"""`rotary_embedding`, against complex numbers in NumPy, and by the checks of ops."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow.testing import check_op
from tests.fake_cupy.stand_in import stand_in

Run = Callable[..., Awaitable[Any]]

RNG = np.random.default_rng(4)
X = RNG.standard_normal((2, 3, 5, 8))
POSITIONS = np.array([[3, 4, 5, 6, 7], [0, 1, 2, 3, 4]])

rotary = af.nn.rotary_embedding


def by_numpy(x: np.ndarray, positions: Any, count: int = 8, base: float = 1e4, interleaved: bool = False) -> Any:
    part, rest = x[..., :count], x[..., count:]
    if interleaved:
        pairs = part[..., ::2] + 1j * part[..., 1::2]
    else:
        pairs = part[..., : count // 2] + 1j * part[..., count // 2 :]
    pairs = pairs * np.exp(1j * np.asarray(positions)[..., None] / base ** (np.arange(count // 2) * 2 / max(1, count)))
    if interleaved:
        turned = np.stack([pairs.real, pairs.imag], axis=-1).reshape(part.shape)
    else:
        turned = np.concatenate([pairs.real, pairs.imag], axis=-1)
    return np.concatenate([turned, rest], axis=-1)


@pytest.mark.parametrize("shape", [X.shape, (None, 3, None, 8)], ids=["static", "open"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.usefixtures("graph")
async def test_rotary_embedding(run: Run, shape: tuple[int | None, ...], interleaved: bool) -> None:
    x = af.placeholder("float64", shape)
    found = await run(
        [
            rotary(x, interleaved=interleaved),
            rotary(x, POSITIONS[:, None], base=100, interleaved=interleaved),
            rotary(x, 2.5, rotary_dim=4, interleaved=interleaved),
            rotary(x, rotary_dim=0, interleaved=interleaved),
        ],
        {x: X},
    )
    wanted = [
        by_numpy(X, np.arange(5), interleaved=interleaved),
        by_numpy(X, POSITIONS[:, None], base=100, interleaved=interleaved),
        by_numpy(X, np.full(5, 2.5), 4, interleaved=interleaved),
        X,
    ]
    for y, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(y, want, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("graph")
async def test_products_depend_on_distances_alone(run: Run) -> None:
    q, k = (RNG.standard_normal(8) * np.ones((4, 1)) for _ in range(2))
    found = await run([af.sum(rotary(q, at + np.arange(4)) * rotary(k, at + 3), axis=-1) for at in (0, 1, 900_000)])
    for products in found[1:]:
        np.testing.assert_allclose(products, found[0], rtol=1e-8)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.usefixtures("graph")
async def test_dtypes(run: Run, dtype: str) -> None:
    found = await run(rotary(af.astype(X, dtype), 100_000))
    assert found.dtype.name == dtype
    tolerance = 1e-6 if dtype == "float32" else 0.03
    np.testing.assert_allclose(found.astype(np.float64), by_numpy(X, 100_000), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("interleaved", [False, True])
def test_gradients_and_rows(interleaved: bool) -> None:
    (left_out,) = check_op(rotary, X[0, :2], rotary_dim=6, interleaved=interleaved)
    assert "of a known width" in left_out
    (left_out,) = check_op(lambda x, p: rotary(x, p, interleaved=interleaved), X[0, 0], np.arange(5.0))
    assert "of a known width" in left_out


async def test_on_a_card(graph: af.Graph) -> None:
    y = rotary(X, POSITIONS[:, None], interleaved=True)
    with stand_in(nbytes=16 << 20):
        async with af.Session(graph, devices=["cuda:0"]) as session:
            found = await session.run(y)
    np.testing.assert_allclose(found, by_numpy(X, POSITIONS[:, None], interleaved=True), rtol=1e-12, atol=1e-12)


MISTAKES: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: rotary(X.astype(int)), af.DTypeError, "rotary_embedding: takes floats, not int64"),
    (lambda: rotary(X[0, 0, 0]), af.ShapeError, r"input is \(..., length, width\), of a known width"),
    (lambda: rotary(X, rotary_dim=5), af.ShapeError, "rotates an even number of elements, up to 8; got 5"),
    (lambda: rotary(X, rotary_dim=10), af.ShapeError, "up to 8; got 10"),
    (lambda: rotary(X[..., :7]), af.ShapeError, "an even number of elements, up to 7; got 7"),
    (lambda: rotary(X, [True] * 5), af.DTypeError, "positions are integers or floats"),
    (lambda: rotary(X, np.zeros((4, 2, 3, 5))), af.ShapeError, r"positions broadcast to \[2,3,5\]"),
    (lambda: rotary(X, interleaved=1), af.GraphError, "interleaved is True or False"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("build", "error", "message"), MISTAKES)
@pytest.mark.usefixtures("graph")
def test_mistakes(build: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build()
