"""Holds an op against NumPy, fed with everything that may be known of its inputs: all, the rank, nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from asyncflow.graph.building.build import placeholder
from asyncflow.graph.graph import Graph
from asyncflow.graph.ir import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from asyncflow.graph.op import Op

KNOWN = ("all", "rank", "nothing")
NUMBERS = ("bool", "int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64", "complex64")


def compare(
    evaluate: Callable[..., Any],
    build: Callable[..., Any],
    expected: Any,
    *arrays: Any,
    known: Sequence[str] = KNOWN,
    exact: bool = True,
) -> None:
    """Builds ``build(*placeholders)``, runs it on `arrays`, and compares values, dtypes and shapes."""
    values = [np.asarray(array) for array in arrays]
    for how in known:
        with Graph():
            inputs = [placeholder(value.dtype, _shape(value, how)) for value in values]
            built = build(*inputs)
        outputs = (built,) if isinstance(built, Tensor) else tuple(built)
        wanted = expected if isinstance(expected, tuple) else (expected,)
        assert len(outputs) == len(wanted)
        for output, want in zip(outputs, wanted, strict=True):
            # NumPy scalars are fed for rank 0, as constants and scalar kernels give them.
            got = np.asarray(evaluate(output, dict(zip(inputs, [_fed(value) for value in values], strict=True))))
            assert got.dtype == np.asarray(want).dtype
            assert got.shape == np.shape(want)
            (np.testing.assert_array_equal if exact else np.testing.assert_allclose)(got, want)
            if how == "all" and output.shape is not None:
                assert len(output.shape) == got.ndim


def _shape(value: np.ndarray, how: str) -> tuple[int | None, ...] | None:
    return {"all": value.shape, "rank": (None,) * value.ndim, "nothing": None}[how]


def _fed(value: np.ndarray) -> Any:
    return value[()] if value.ndim == 0 and value.dtype.kind in "biufcV" else value


def kernel_of(op: Op) -> Callable[..., Any]:
    """The op's kernel factory, which every op but the structured ones has."""
    assert op.kernel is not None
    return op.kernel


def sample(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> np.ndarray:
    """Small whole numbers (complex ones with an imaginary part), exact in every dtype."""
    rng = np.random.default_rng(seed)
    numbers = rng.integers(0, 5, shape)
    if np.dtype(dtype).kind == "c":
        return (numbers + 1j * rng.integers(0, 3, shape)).astype(dtype)
    return numbers.astype(dtype)
