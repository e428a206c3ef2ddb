from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow import linalg as la
from tests.autodiff.sweep import assert_derivatives
from tests.ops.against_numpy import compare

DTYPES = ("float32", "float64", "complex64", "complex128")
SQUARE = [(3, 3), (1, 1), (0, 0), (2, 3, 3), (0, 2, 2), (2, 0, 0)]
ANY = [(3, 2), (2, 3), (3, 3), (2, 3, 2), (0, 3, 2)]


def draw(*shape: int, dtype: str = "float64", seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape) + (1j * rng.normal(size=shape) if dtype.startswith("c") else 0)
    return (x + 2 * np.eye(shape[-2], shape[-1])).astype(dtype)


def hermitian(*shape: int, dtype: str = "float64") -> np.ndarray:
    x = draw(*shape, dtype=dtype)
    return x @ x.conj().swapaxes(-1, -2) + np.eye(shape[-1]).astype(dtype)


def close(evaluate: Any, build: Any, expected: Any, *arrays: np.ndarray, **options: Any) -> None:
    """`compare` of numbers that are right to the digits of their dtype."""
    for how in ("all", "rank", "nothing"):
        with af.Graph():
            shapes = {"all": lambda x: x.shape, "rank": lambda x: (None,) * x.ndim, "nothing": lambda x: None}
            given = [af.placeholder(x.dtype, shapes[how](x)) for x in arrays]
            y = build(*given, **options)
        got = np.asarray(evaluate(y, dict(zip(given, arrays, strict=True))))
        want = np.asarray(expected)
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        digits = 1e-3 if got.dtype.itemsize == (8 if got.dtype.kind == "c" else 4) else 1e-9
        np.testing.assert_allclose(got, want, rtol=digits, atol=digits)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SQUARE)
def test_square_matrices(evaluate: Any, shape: tuple[int, ...], dtype: str) -> None:
    x, good = draw(*shape, dtype=dtype), hermitian(*shape, dtype=dtype)
    lower = np.linalg.cholesky(good)
    close(evaluate, la.cholesky, lower, good)
    close(evaluate, lambda t: la.cholesky(t, upper=True), lower.conj().swapaxes(-1, -2), good)
    close(evaluate, la.det, np.linalg.det(x), x)
    close(evaluate, la.inv, np.linalg.inv(x), x)
    sign, size = np.linalg.slogdet(x)
    close(evaluate, lambda t: la.slogdet(t).sign, sign, x)
    close(evaluate, lambda t: la.slogdet(t).logabsdet, size, x)
    close(evaluate, la.eigvalsh, np.linalg.eigvalsh(good), good)
    close(evaluate, lambda t: la.eigh(t).eigenvalues, np.linalg.eigh(good)[0], good)
    close(evaluate, lambda t: rebuilt(*la.eigh(t)), good, good)
    for n in (-2, 0, 1, 5):
        close(evaluate, lambda t, n=n: la.matrix_power(t, n), np.linalg.matrix_power(x, n), x)


def rebuilt(values: af.Tensor, vectors: af.Tensor) -> af.Tensor:
    return (vectors * af.expand_dims(values, -2)) @ af.conj(af.matrix_transpose(vectors))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ANY)
def test_any_matrices(evaluate: Any, shape: tuple[int, ...], dtype: str) -> None:
    x = draw(*shape, dtype=dtype)
    for mode in ("reduced", "complete"):
        q, r = np.linalg.qr(x, mode=mode)
        close(evaluate, lambda t, m=mode: la.qr(t, mode=m).Q, q, x)
        close(evaluate, lambda t, m=mode: la.qr(t, mode=m).R, r, x)
    for full in (True, False):
        u, s, vh = np.linalg.svd(x, full_matrices=full)
        close(evaluate, lambda t, f=full: la.svd(t, full_matrices=f).U, u, x)
        close(evaluate, lambda t, f=full: la.svd(t, full_matrices=f).S, s, x)
        close(evaluate, lambda t, f=full: la.svd(t, full_matrices=f).Vh, vh, x)
    close(evaluate, la.svdvals, np.linalg.svd(x, compute_uv=False), x)
    close(evaluate, la.pinv, np.linalg.pinv(x), x)
    close(evaluate, lambda t: la.pinv(t, rtol=0.9), np.linalg.pinv(x, 0.9), x)


def test_rank(evaluate: Any) -> None:
    x = np.array([[[1.0, 2.0], [2.0, 4.0]], [[1.0, 0.0], [0.0, 0.1]], [[0.0, 0.0], [0.0, 0.0]]])
    compare(evaluate, la.matrix_rank, np.array([1, 2, 0]), x)
    compare(evaluate, lambda t: la.matrix_rank(t, rtol=0.2), np.array([1, 1, 0]), x)
    compare(evaluate, la.matrix_rank, np.int64(0), np.zeros((0, 3)))
    compare(evaluate, la.matrix_rank, np.zeros(2, "int64"), np.zeros((2, 3, 0), "float32"))


@pytest.mark.parametrize(
    ("left", "right"), [((3, 3), (3, 2)), ((2, 3, 3), (3, 2)), ((3, 3), (2, 3, 1)), ((2, 1, 3, 3), (2, 3, 2))]
)
def test_solve(evaluate: Any, left: Any, right: Any) -> None:
    for dtype in DTYPES:
        a, b = draw(*left, dtype=dtype), np.ones(right, dtype)
        with af.Graph():
            for known in (lambda x: x.shape, lambda x: (None,) * x.ndim):
                x1, x2 = (af.placeholder(x.dtype, known(x)) for x in (a, b))
                got = evaluate(la.solve(x1, x2), {x1: a, x2: b})
                np.testing.assert_allclose(a @ got, np.broadcast_to(b, got.shape), rtol=1e-4, atol=1e-4)
                assert got.dtype == dtype
    vector = np.arange(3.0)
    with af.Graph():
        got = evaluate(la.solve(draw(*left), vector))
    np.testing.assert_allclose((draw(*left) @ got[..., None])[..., 0], np.broadcast_to(vector, got.shape), atol=1e-9)


def test_solve_promotes(evaluate: Any) -> None:
    with af.Graph():
        assert la.solve(np.eye(2, dtype="float32"), np.ones((2, 1))).dtype == af.float64


# -- derivatives -----------------------------------------------------------------------------------------------------


def both(function: Any) -> Any:
    """`function` of the Hermitian part: it reads one triangle alone."""
    return lambda t: function((t + af.conj(af.matrix_transpose(t))) / 2)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_derivatives_of_square_matrices(dtype: str) -> None:
    x, good = draw(2, 2, 2, dtype=dtype), hermitian(2, 2, dtype=dtype)
    assert_derivatives(la.det, x, order=2, known=("all",))
    assert_derivatives(la.inv, x, order=2, known=("all", "nothing"))
    assert_derivatives(lambda t: list(la.slogdet(t)), x)
    assert_derivatives(lambda t: la.slogdet(t).logabsdet, x, order=2, known=("all",))
    assert_derivatives(both(la.cholesky), good, order=2, known=("all", "nothing"))
    assert_derivatives(both(lambda t: la.cholesky(t, upper=True)), hermitian(3, 3, dtype=dtype), known=("rank",))
    assert_derivatives(both(la.eigvalsh), good, order=2, known=("all", "nothing"))
    assert_derivatives(both(lambda t: la.eigh(t).eigenvalues), good, known=("all", "nothing"))
    assert_derivatives(lambda t: la.matrix_power(t, 3), x, known=("all",))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_derivatives_of_vectors(dtype: str) -> None:
    """Of complex matrices, of magnitudes: phases are open."""
    size: Any = af.abs if dtype == "complex128" else af.identity
    good = hermitian(3, 3, dtype=dtype)
    assert_derivatives(both(lambda t: size(la.eigh(t).eigenvectors)), good, known=("all", "nothing"))
    assert_derivatives(both(lambda t: [la.eigh(t)[0], size(la.eigh(t)[1])]), good[:2, :2], order=2, known=("all",))
    for shape in ((3, 3), (3, 2), (2, 3)):
        x = draw(*shape, dtype=dtype)

        def parts(t: af.Tensor) -> list[af.Tensor]:
            u, s, vh = la.svd(t, full_matrices=False)
            return [size(u), s, size(vh), size((u * af.expand_dims(af.square(s), -2)) @ vh)]

        for place in range(4):
            assert_derivatives(lambda t, p=place, f=parts: f(t)[p], x, known=("all", "nothing"))
        assert_derivatives(lambda t: la.svd(t).S, x, known=("all",))
        assert_derivatives(la.svdvals, x, known=("all", "nothing"))
    assert_derivatives(la.svdvals, draw(2, 2, dtype=dtype), order=2, known=("all",))


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_derivatives_of_any_matrices(dtype: str) -> None:
    for shape in ((3, 3), (3, 2), (2, 3, 2)):
        x = draw(*shape, dtype=dtype)
        assert_derivatives(lambda t: la.qr(t).Q, x, known=("all", "nothing"))
        assert_derivatives(lambda t: la.qr(t).R, x, known=("all",))
        assert_derivatives(lambda t: list(la.qr(t)), x, known=("all",))
    for shape in ((3, 2), (2, 3), (2, 2)):
        assert_derivatives(la.pinv, draw(*shape, dtype=dtype), order=2, known=("all",))


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_derivatives_of_solve(dtype: str) -> None:
    a, b = draw(2, 2, 2, dtype=dtype), np.ones((2, 3), dtype) * np.arange(3)
    assert_derivatives(la.solve, a, b, order=2, known=("all",))
    assert_derivatives(la.solve, a[0], b[:, 1], known=("all", "rank"))
    assert_derivatives(la.solve, a, b[:, 1], known=("all", "rank"))


# -- errors ----------------------------------------------------------------------------------------------------------


def test_errors(evaluate: Any) -> None:
    squares: tuple[Any, ...] = (la.cholesky, la.det, la.inv, la.slogdet, la.eigh, la.eigvalsh)
    anywhere: tuple[Any, ...] = (la.inv, la.qr, la.svd, la.svdvals, la.pinv, la.matrix_rank)
    with af.Graph():
        for function in (*squares, lambda x: la.matrix_power(x, 2)):
            with pytest.raises(af.ShapeError, match="takes square matrices, got"):
                function(af.ones((2, 3)))
        for function in anywhere:
            with pytest.raises(af.ShapeError, match="rank 2 or more"):
                function(af.ones(2))
            with pytest.raises(af.DTypeError, match="takes matrices of float32, float64"):
                function(af.ones((2, 2), dtype="int64"))
        with pytest.raises(af.GraphError, match="mode must be 'reduced' or 'complete', got 'r'"):
            la.qr(af.ones((2, 2)), mode="r")  # type: ignore[arg-type]
        with pytest.raises(af.ShapeError, match="differ in rows"):
            la.solve(af.eye(3), af.ones((2, 1)))
        with pytest.raises(af.ShapeError, match="it may be a vector or matrices"):
            la.solve(af.eye(3), af.placeholder("float64"))
        with pytest.raises(np.linalg.LinAlgError, match="Singular"):
            evaluate(la.inv(af.zeros((2, 2))))
        wide = af.placeholder("float64", (2, 3))
        with pytest.raises(af.GraphError, match="qr has a gradient where R is square"):
            af.gradients(af.sum(la.qr(wide).R), wide)
        with pytest.raises(af.GraphError, match="svd has a gradient through U and Vh of square matrices only"):
            af.gradients(af.sum(la.svd(wide).U), wide)


async def test_in_a_session() -> None:
    with af.Graph() as graph:
        x = af.placeholder("float64", (2, 2))
        loss = la.slogdet(x @ x.T).logabsdet + la.vector_norm(la.solve(x, af.ones(2)))
        grad = af.gradients(loss, x)
    async with af.Session(graph) as session:
        got = await session.run(grad, {x: draw(2, 2)})
    assert np.isfinite(got).all()
