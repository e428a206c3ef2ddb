"""`fftconvolve` against sums of products, by the rules of SciPy's function of that name."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import asyncflow as af
from asyncflow.ops.transforms.convolution import _fast
from tests.autodiff.sweep import assert_derivatives

RNG = np.random.default_rng(0)
MODES: tuple[Any, ...] = ("full", "same", "valid")
DTYPES = ("bool", "int8", "uint32", "int64", "float16", "float32", "float64", "complex64", "complex128")


def numbers(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    drawn = RNG.integers(0, 2 if dtype == "bool" else 9, shape)
    return (drawn * (1 - 0.5j) if dtype.startswith("c") else drawn).astype(dtype)


def convolved(x: Any, y: Any, mode: str, axes: tuple[int, ...] | None) -> np.ndarray:
    """The sum of products, with SciPy's dtypes, and cut as SciPy does."""
    single = all(each.dtype in (np.float16, np.float32, np.complex64) for each in (x, y))
    kind = "complex" if "c" in (x.dtype.kind, y.dtype.kind) else "float"
    dtype = np.dtype(kind + str(({"float": 32, "complex": 64} if single else {"float": 64, "complex": 128})[kind]))
    summed = [axis % x.ndim for axis in (range(x.ndim) if axes is None else axes)]
    full = [n + m - 1 if a in summed else max(n, m) for a, (n, m) in enumerate(zip(x.shape, y.shape, strict=True))]
    found = np.zeros(full, "complex128")
    for place in product(*(range(y.shape[axis]) for axis in summed)):
        part: list[Any] = [slice(None)] * x.ndim
        target: list[Any] = [slice(None)] * x.ndim
        for axis, at in zip(summed, place, strict=True):
            part[axis], target[axis] = slice(at, at + 1), slice(at, at + x.shape[axis])
        found[tuple(target)] += x.astype("complex128") * y[tuple(part)]
    wanted = {
        "full": full,
        "same": list(x.shape),
        "valid": [
            abs(n - m) + 1 if a in summed else full[a] for a, (n, m) in enumerate(zip(x.shape, y.shape, strict=True))
        ],
    }[mode]
    middle = tuple(slice((n - m) // 2, (n - m) // 2 + m) for n, m in zip(full, wanted, strict=True))
    return found[middle].astype(dtype) if kind == "complex" else found[middle].real.astype(dtype)


@st.composite
def calls(draw: Any) -> tuple[np.ndarray, np.ndarray, str, tuple[int, ...] | None, tuple[bool, bool]]:
    rank = draw(st.integers(1, 3))
    mode = draw(st.sampled_from(MODES))
    axes = draw(st.none() | st.lists(st.integers(-rank, rank - 1), min_size=1, unique_by=lambda axis: axis % rank))
    summed = range(rank) if axes is None else [axis % rank for axis in axes]
    one, other = [], []
    for axis in range(rank):
        n = draw(st.integers(1, 6))
        if axis not in summed:
            n, m = draw(st.sampled_from([(n, n), (n, 1), (1, n)]))
        else:
            m = draw(st.integers(1, n if mode == "valid" else 6))
        one.append(n)
        other.append(m)
    if mode == "valid" and axes is None and draw(st.booleans()):
        one, other = other, one
    dtypes = draw(st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES)))
    x, y = (numbers(tuple(shape), dtype) for shape, dtype in zip((one, other), dtypes, strict=True))
    return x, y, mode, None if axes is None else tuple(axes), (draw(st.booleans()), draw(st.booleans()))


@settings(max_examples=20, deadline=None)
@given(calls())
def test_it_is_the_sum_of_products(call: Any) -> None:
    x, y, mode, axes, are_known = call
    with af.Graph() as graph:
        a, b = (
            af.placeholder(value.dtype, value.shape if known else (None,) * value.ndim)
            for value, known in zip((x, y), are_known, strict=True)
        )
        z = af.fftconvolve(a, b, mode, axes=axes)
    wanted = convolved(x, y, mode, axes)
    assert z.dtype == wanted.dtype
    assert z.shape is not None
    assert all(known in (None, extent) for known, extent in zip(z.shape, wanted.shape, strict=True))
    assert not all(are_known) or z.shape == wanted.shape

    async def run() -> Any:
        async with af.Session(graph) as session:
            return await session.run(z, {a: x, b: y})

    found = af.run(run())
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    digits = 1e-5 if wanted.dtype in ("float32", "complex64") else 1e-12
    np.testing.assert_allclose(found, wanted, rtol=digits, atol=digits * max(1.0, np.abs(wanted).max()))


def test_scalars_are_multiplied_in_their_own_dtype() -> None:
    with af.Graph():
        assert af.fftconvolve(af.constant(2), af.constant(3)).dtype == np.int64


def test_known_parts_of_shapes() -> None:
    def shape_of(x: Any, y: Any, mode: Any, axes: Any = None) -> Any:
        with af.Graph():
            return af.fftconvolve(af.placeholder("float32", x), af.placeholder("float32", y), mode, axes=axes).shape

    assert shape_of((None, 100), (1, 9), "same", 1) == (None, 100)
    assert shape_of((4, 100), (4, None), "same", 1) == (4, 100)
    assert shape_of((4, 100), (4, None), "full", 1) == (4, None)
    assert shape_of((None, 8), (3, 5), "valid") == (None, 4)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_derivatives(mode: Any, dtype: str) -> None:
    x, y = (RNG.normal(size=shape) + (1j if dtype.startswith("c") else 0) for shape in ((2, 5), (1, 3)))
    assert_derivatives(lambda x, y: af.fftconvolve(x, y, mode, axes=1), x, y, known=("all", "rank"))


@pytest.mark.parametrize("shared", ["neither", "x", "y"])
@pytest.mark.parametrize("known", [True, False])
async def test_rows(shared: str, known: bool) -> None:
    xs, ys = RNG.normal(size=(4, 7)), RNG.normal(size=(4, 3))
    with af.Graph() as graph:
        a, b = (af.placeholder("float64", value.shape if known else (4, None)) for value in (xs, ys))
        if shared == "x":
            z = af.vmap(lambda y: af.fftconvolve(a[0], y, "same"))(b)
        elif shared == "y":
            z = af.vmap(lambda x: af.fftconvolve(x, b[0], "same"))(a)
        else:
            z = af.vmap(lambda x, y: af.fftconvolve(x, y, "same"))(a, b)
    async with af.Session(graph) as session:
        found = await session.run(z, {a: xs, b: ys})
    pairs = [(xs[0] if shared == "x" else x, ys[0] if shared == "y" else y) for x, y in zip(xs, ys, strict=True)]
    np.testing.assert_allclose(found, [np.convolve(x, y, "same") for x, y in pairs], atol=1e-12)


@pytest.mark.parametrize(
    ("x", "y", "options", "message"),
    [
        ((3,), (3,), {"mode": "all"}, r"mode is 'full', 'same' or 'valid'; got 'all'"),
        ((3,), (3,), {"axes": ()}, r"axes is empty; leave it out for all axes"),
        ((3,), (3,), {"axes": (0, 0)}, r"names an axis twice"),
        ((3,), (3, 1), {}, r"both arrays have one rank; got float64\[3\] and float64\[3,1\]"),
        (None, (3, 1), {}, r"the rank of .* is not known; give its placeholder one"),
        ((3, 2), (4, 5), {"axes": 1}, r"axis 0 is not in axes, and 3 and 4 do not broadcast"),
        (
            (3, 2),
            (2, 5),
            {"mode": "valid"},
            r"'valid' needs one array that is at least as large as the other along all",
        ),
        ((0,), (3,), {}, r"an empty array has no convolution"),
    ],
)
def test_refusals(x: Any, y: Any, options: Any, message: str) -> None:
    with af.Graph():
        given = af.placeholder("float64", x), af.placeholder("float64", y)
        with pytest.raises(af.GraphError, match=message):
            af.fftconvolve(*given, **options)


@pytest.mark.parametrize(("x", "y"), [((1, 6), (3, 2)), ((4, 1, 5), (1, 3, 2))])
async def test_valid_refuses_in_the_run_what_only_the_run_knows(x: tuple[int, ...], y: tuple[int, ...]) -> None:
    """Neither array is the larger one, so there is no part that needs no zeros."""
    with af.Graph() as graph:
        a, b = given = [af.placeholder("float64", (None,) * len(shape)) for shape in (x, y)]
        z = af.fftconvolve(a, b, "valid")
    async with af.Session(graph) as session:
        with pytest.raises(af.KernelError, match="needs one array that is at least as large as the other along all"):
            await session.run(z, dict(zip(given, map(np.ones, (x, y)), strict=True)))
        assert (await session.run(z, dict(zip(given, map(np.ones, (y, y)), strict=True)))).shape == (1,) * len(y)


def test_lengths_that_are_transformed_fast() -> None:
    assert [_fast(least) for least in (1, 7, 11, 97, 1021, 1025)] == [1, 8, 12, 100, 1024, 1080]
