from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import asyncflow as af
from asyncflow import fft as ft
from tests.autodiff.sweep import assert_derivatives
from tests.ops.against_numpy import compare

NORMS: tuple[Any, ...] = ("backward", "ortho", "forward")
OF_COMPLEX = ("fft", "ifft", "irfft", "hfft")
OF_REAL = ("rfft", "ihfft")


def draw(*shape: int, dtype: str = "complex128", seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.normal(size=shape) + (1j * rng.normal(size=shape) if dtype.startswith("c") else 0)).astype(dtype)


def close(
    evaluate: Any, build: Any, expected: np.ndarray, x: np.ndarray, known: Any = ("all", "rank", "nothing")
) -> None:
    for how in known:
        shape = {"all": x.shape, "rank": (None,) * x.ndim, "nothing": None}[how]
        with af.Graph():
            given = af.placeholder(x.dtype, shape)
            y = build(given)
        got = np.asarray(evaluate(y, {given: x}))
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
        digits = 1e-5 if got.dtype in ("float32", "complex64") else 1e-12
        np.testing.assert_allclose(got, expected, rtol=digits, atol=digits)


@pytest.mark.parametrize("name", [*OF_COMPLEX, *OF_REAL])
def test_one_axis(evaluate: Any, name: str) -> None:
    ours, numpys = getattr(ft, name), getattr(np.fft, name)
    for dtype in ("float32", "float64", *(("complex64", "complex128") if name in OF_COMPLEX else ())):
        x = draw(3, 5, 4, dtype=dtype)
        for axis in (-1, 0, 1):
            close(evaluate, lambda t, a=axis: ours(t, axis=a), numpys(x, axis=axis), x)
        for n in (1, 2, 3, 7, 8):
            for norm in NORMS:
                close(evaluate, lambda t, n=n, o=norm: ours(t, n=n, norm=o), numpys(x, n, norm=norm), x, ("rank",))
    empty = draw(0, 4, dtype="float64")
    close(evaluate, ours, numpys(empty), empty)
    nothing = draw(2, 0, dtype="float64")
    close(evaluate, lambda t: ours(t, n=2), numpys(np.zeros((2, 1)), 2), nothing)


@pytest.mark.parametrize("name", ["fftn", "ifftn", "rfftn", "irfftn"])
def test_several_axes(evaluate: Any, name: str) -> None:
    ours, numpys = getattr(ft, name), getattr(np.fft, name)
    for dtype in ("float32", "float64") if name == "rfftn" else ("complex64", "float64"):
        x = draw(3, 4, 5, dtype=dtype)
        close(evaluate, ours, numpys(x), x, ("all", "rank"))
        for norm in NORMS:
            close(evaluate, lambda t, o=norm: ours(t, axes=(0, -1), norm=o), numpys(x, axes=(0, -1), norm=norm), x)
        wanted = numpys(x, s=(2, 6), axes=(-2, -1))
        close(evaluate, lambda t: ours(t, s=(2, 6)), wanted, x)
        close(evaluate, lambda t: ours(t, s=(2, 6), axes=(1, 2)), wanted, x, ("all", "rank"))


def test_frequencies(evaluate: Any) -> None:
    for n in (1, 4, 5):
        for ours, numpys in ((ft.fftfreq, np.fft.fftfreq), (ft.rfftfreq, np.fft.rfftfreq)):
            with af.Graph():
                assert evaluate(ours(n)).tolist() == numpys(n).tolist()
                y = ours(n, d=0.5, dtype="float32", device="cpu")
                assert (y.dtype, y.device) == (af.float32, "cpu")
                assert evaluate(y).tolist() == numpys(n, 0.5).astype("float32").tolist()


@pytest.mark.parametrize("shape", [(), (5,), (4, 3), (0, 2)])
def test_shifts(evaluate: Any, shape: tuple[int, ...]) -> None:
    x = np.arange(float(np.prod(shape))).reshape(shape)
    for ours, numpys in ((ft.fftshift, np.fft.fftshift), (ft.ifftshift, np.fft.ifftshift)):
        compare(evaluate, ours, numpys(x) if shape else x, x, known=("all",))
        for axes in (0, -1, (0,)) if shape else ():
            compare(evaluate, lambda t, a=axes, f=ours: f(t, axes=a), numpys(x, axes), x, known=("all",))


# -- derivatives -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*OF_COMPLEX, *OF_REAL])
def test_derivatives(name: str) -> None:
    ours = getattr(ft, name)
    x = draw(2, 3, dtype="complex128" if name in OF_COMPLEX else "float64")
    assert_derivatives(ours, x, known=("all", "nothing"))
    for n in (2, 3, 6):
        assert_derivatives(lambda t, n=n: ours(t, n=n, norm="ortho"), x, known=("all", "nothing"))
    for norm in NORMS:
        assert_derivatives(lambda t, o=norm: ours(t, axis=0, norm=o), x, known=("rank",))


@pytest.mark.parametrize("name", [*OF_COMPLEX, *OF_REAL])
def test_second_derivatives(name: str) -> None:
    ours = getattr(ft, name)
    x = draw(3, dtype="complex128" if name in OF_COMPLEX else "float64")
    assert_derivatives(lambda t: af.square(af.abs(ours(t))), x, order=2, known=("nothing",))
    assert_derivatives(lambda t: af.square(af.abs(ours(t, n=3))), x, order=2, known=("all",))


def test_derivatives_along_several_axes_and_of_real_input() -> None:
    x = draw(2, 3, dtype="float64")
    assert_derivatives(lambda t: ft.irfftn(ft.rfftn(t, s=(3, 4)), axes=(0, 1)), x, known=("all", "nothing"))
    assert_derivatives(lambda t: ft.ifftn(ft.fftn(t, axes=(0, 1))), draw(2, 2), known=("all",))
    assert_derivatives(ft.fft, draw(3, dtype="float64"))
    assert_derivatives(ft.fftshift, draw(3, dtype="float64"), known=("all",))


# -- errors ----------------------------------------------------------------------------------------------------------


def test_errors() -> None:
    with af.Graph():
        x = af.ones((2, 3))
        for function in (ft.fft, ft.rfft, ft.hfft, ft.ihfft):
            with pytest.raises(af.GraphError, match="norm is 'backward', 'ortho' or 'forward', got 'none'"):
                function(x, norm="none")  # type: ignore[arg-type]
            with pytest.raises(af.GraphError, match="n is 1 or more, got 0"):
                function(x, n=0)
            with pytest.raises(IndexError, match="axis 2 is out of range"):
                function(x, axis=2)
            with pytest.raises(af.DTypeError, match=r"takes float32, float64.*not int64"):
                function(af.ones(3, dtype="int64"))
            with pytest.raises(af.ShapeError, match="nothing to transform along axis -1"):
                function(af.ones((2, 0)))
        with pytest.raises(af.DTypeError, match=r"rfft: takes real numbers, not complex128; use af\.fft\.fft"):
            ft.rfft(af.astype(x, "complex128"))
        with pytest.raises(af.ShapeError, match="stands for none; give n"):
            ft.irfft(af.ones(1))
        with pytest.raises(af.ShapeError, match="must have one length"):
            ft.fftn(x, s=(2, 2), axes=(0,))
        with pytest.raises(af.ShapeError, match="there is no axis to transform"):
            ft.fftn(af.ones(()))
        unknown = af.placeholder("float64")
        with pytest.raises(af.ShapeError, match=r"fftn: the rank of .* is not known; give axes"):
            ft.fftn(unknown)
        with pytest.raises(af.ShapeError, match="fftshift: the rank"):
            ft.fftshift(unknown)
        with pytest.raises(af.ShapeError, match="ifftshift: the extent of axis 0"):
            ft.ifftshift(af.placeholder("float64", (None,)))
        with pytest.raises(af.GraphError, match="fftfreq: n is 1 or more and d is not 0, got n=0"):
            ft.fftfreq(0)
        with pytest.raises(af.DTypeError, match="frequencies are floats"):
            ft.rfftfreq(3, dtype="int64")


async def test_in_a_session() -> None:
    x = draw(4, 8, dtype="float32")
    with af.Graph() as graph:
        given = af.placeholder("float32", (None, None))
        power = af.sum(af.square(af.abs(ft.rfft(given, norm="ortho"))))
        grad = af.gradients(power, given)
    async with af.Session(graph) as session:
        got = await session.run(grad, {given: x})
    half = np.fft.rfft(x, norm="ortho")
    full = np.zeros((4, 8), complex)
    full[:, :5] = 2 * half
    np.testing.assert_allclose(got, np.fft.ifft(full, norm="ortho").real, rtol=1e-4, atol=1e-5)
