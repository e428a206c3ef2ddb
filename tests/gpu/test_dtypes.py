"""T17: every op on the card, against NumPy, over dtypes; with rank 0, nothing in it, and odd strides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import asyncflow as af
from asyncflow.graph.values.dtypes import VARIANT
from tests.gpu.card import Card
from tests.gpu.figures import Figures
from tests.gpu.on_loop import on_loop
from tests.ops.test_host_inputs import PROGRAMS

TOLERANCE = {"bfloat16": 5e-2, "float16": 5e-3, "float32": 1e-5, "float64": 1e-9, "complex64": 1e-5, "complex128": 1e-9}

NAMES = [getattr(build, "__name__", str(build)) for build, _, _ in PROGRAMS]


Program = tuple[af.Graph, list[af.Tensor], list[af.Tensor]]
"""A graph, its feeds and its fetches."""


def _built(build: Callable[..., Any], arrays: Any, *, gradients: bool) -> Program:
    with af.Graph(seed=0) as graph:  # random numbers are the same on every device
        inputs = [af.placeholder(x.dtype, x.shape) for x in arrays]
        built = build(*inputs)
        outputs = [y for y in (built if isinstance(built, tuple | list) else (built,)) if y.dtype != VARIANT]
        ys = [y for y in outputs if y.dtype.kind in "fc"]
        xs = [x for x in inputs if x.dtype.kind in "fc"]
        if gradients and ys and xs:
            outputs += af.gradients(ys, xs, [af.ones_like(y) for y in ys], unconnected="zero")
    return graph, inputs, outputs


Named = dict[str, Any]
"""By number and name of its node: a value, or the error instead."""


async def _values(device: str, program: Program, arrays: Any, **options: Any) -> Named:
    """All at once; if that fails, one by one, so that one run on a card tells of every op that fails there."""
    graph, inputs, fetches = program
    fed = dict(zip(inputs, arrays, strict=True))
    names = [f"{number} {tensor.node.name}" for number, tensor in enumerate(fetches)]
    with np.errstate(all="ignore"):
        async with af.Session(graph, devices=[device], **options) as session:
            try:
                values = await session.run(fetches, fed)
            except af.AsyncflowError:
                values = [await _value_or_error(session, fetch, fed) for fetch in fetches]
    return dict(zip(names, values, strict=True))


async def _value_or_error(session: af.Session, fetch: af.Tensor, fed: Any) -> Any:
    try:
        return await session.run(fetch, fed)
    except af.AsyncflowError as error:
        return error


def _compare(found: Named, wanted: Named, tolerance: float) -> None:
    """Raises one AssertionError that lists every difference."""
    assert found.keys() == wanted.keys()
    problems = {name: _difference(found[name], wanted[name], tolerance) for name in found}
    assert not any(problems.values()), "\n".join(f"{name}: {text}" for name, text in problems.items() if text)


def _difference(found: Any, wanted: Any, tolerance: float) -> str:
    if isinstance(found, Exception):
        return f"{type(found).__name__} {found}"
    found, wanted = np.asarray(found), np.asarray(wanted)
    if (found.dtype, found.shape) != (wanted.dtype, wanted.shape):
        return f"{found.dtype}{list(found.shape)} in place of {wanted.dtype}{list(wanted.shape)}"
    if found.tolist() == wanted.tolist():
        return ""
    if wanted.dtype.kind in "fcV":
        exact = np.complex128 if wanted.dtype.kind == "c" else np.float64
        a, b = found.astype(exact), wanted.astype(exact)
        if np.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True):
            return ""
    return f"{found.ravel()[:8]} in place of {wanted.ravel()[:8]}"


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=NAMES)
@on_loop
async def test_t17_every_op_and_its_gradient(card: Card, program: tuple[Callable[..., Any], Any, bool]) -> None:
    build, arrays, _ = program
    arrays = [np.asarray(x) for x in arrays]
    built = _built(build, arrays, gradients=True)
    wanted = await _values("cpu:0", built, arrays)
    choices: list[dict[str, Any]] = [{}, {"regions": False}]
    for options in choices[: card.choose(2, 1)]:
        _compare(await _values("cuda:0", built, arrays, **options), wanted, 1e-9)


UNARY = {
    "f": "abs acos acosh asin asinh atan atanh cos cosh exp expm1 log log1p log10 log2 negative positive reciprocal "
    "sign sin sinh sqrt square tan tanh ceil floor round trunc isfinite isinf isnan signbit relu sigmoid gelu softplus",
    "i": "abs negative positive sign square ceil floor round trunc isfinite isnan bitwise_invert",
}
BINARY = {
    "f": "add atan2 copysign divide floor_divide hypot logaddexp maximum minimum multiply remainder subtract pow equal "
    "greater greater_equal less less_equal not_equal",
    "i": "add floor_divide maximum minimum multiply remainder subtract equal greater less not_equal bitwise_and "
    "bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift",
}
REDUCED = {"f": "sum prod max min mean", "i": "sum prod max min"}
DTYPES = ("bfloat16", "float16", "float32", "float64", "int8", "uint8", "int32", "int64", "uint32")


def _numbers(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """In (0, 1], where nearly all functions are defined, or from 1 to 5."""
    kind = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
    random = np.random.default_rng(0)
    numbers = random.integers(1, 6, shape)
    return (numbers / 5 if dtype.startswith(("float", "bfloat")) else numbers).astype(kind)


def _table(dtype: str) -> Callable[..., list[Any]]:
    kind = "f" if "float" in dtype else "i"

    def build(x: Any, y: Any) -> list[Any]:
        found = [getattr(af, name)(x) for name in UNARY[kind].split()]
        found += [getattr(af, name)(x, y) for name in BINARY[kind].split()]
        found += [getattr(af, name)(x, axis=axis) for name in REDUCED[kind].split() for axis in (None, 0)]
        # Views with strides of their own, and both operands of one shape.
        found += [x.T + y.T, x[::-1, 1:] * y[::-1, 1:], af.flip(x) - y]
        return found

    return build


@pytest.mark.slow
@pytest.mark.parametrize("regions", [True, False], ids=["fused", "one_by_one"])
@pytest.mark.parametrize("dtype", DTYPES)
@on_loop
async def test_t17_dtypes(card: Card, figures: Figures, dtype: str, regions: bool) -> None:
    arrays = [_numbers(dtype, (6, 5)), np.ascontiguousarray(_numbers(dtype, (6, 5))[::-1])]
    built = _built(_table(dtype), arrays, gradients=False)
    wanted = await _values("cpu:0", built, arrays)
    _compare(await _values("cuda:0", built, arrays, regions=regions), wanted, TOLERANCE.get(dtype, 1e-6))
    figures["fetches"] = len(wanted)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1, 1)], ids=str)
@on_loop
async def test_t17_rank_0_and_empty_arrays(card: Card, shape: tuple[int, ...]) -> None:
    def build(x: Any, y: Any) -> list[Any]:
        return [
            x + y,
            af.exp(x) * 2.0,
            af.sum(x),
            af.where(x > y, x, y),
            af.reshape(x, (-1,)),
            af.concat([x, y], axis=None),
        ]

    arrays = [_numbers("float32", shape), _numbers("float32", shape)]
    built = _built(build, arrays, gradients=True)
    _compare(await _values("cuda:0", built, arrays), await _values("cpu:0", built, arrays), 1e-6)
