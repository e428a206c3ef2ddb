"""Loops with matrix products, run with and without `loop_batching`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

import asyncflow as af

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

WIDTH = 32
Array = np.ndarray[Any, Any]


def values(*shape: int, dtype: str = "float32", seed: int = 0) -> Array:
    """Random numbers, small enough for products of products."""
    return (np.random.default_rng(seed).standard_normal(shape) / max(shape[-1], 1) ** 0.5).astype(dtype)


async def run_both(fetches: Sequence[af.Tensor], feeds: Mapping[af.Tensor, Any], **options: Any) -> str:
    """Runs with batching and without, compares, and gives what the plan says of batching."""
    found: list[list[Array]] = []
    said = ""
    for batching in (True, False):
        async with af.Session(debug=True, loop_batching=batching, **options) as session:
            found.append(await session.run(list(fetches), dict(feeds)))
            lines = session.plan(list(fetches), list(feeds)).explain().splitlines()
            about = "\n".join(line for line in lines if "at once" in line)
            assert batching or not about
            said = said or about
    for batched, plain in zip(*found, strict=True):
        assert (batched.dtype, batched.shape) == (plain.dtype, plain.shape)
        np.testing.assert_allclose(batched, plain, rtol=2e-4, atol=2e-5)
    return said


def where(error: af.KernelError) -> tuple[Any, ...]:
    """Return the place and the reason that an error states."""
    return error.node, error.tag, str(error.__cause__), str(error.location)


class Recurrent:
    """``h = tanh(xs[t] @ w + h @ u)`` over rows of `xs`, and its feeds."""

    def __init__(self, steps: int, batch: int = 8, width: int = WIDTH, *, known: bool = True) -> None:
        free = None if not known else batch
        self.xs = af.placeholder("float32", (steps if known else None, free, width), name="xs")
        self.w = af.placeholder("float32", (width if known else None, 16 * width), name="w")
        self.u = af.placeholder("float32", (16 * width, 16 * width), name="u")
        self.h = af.placeholder("float32", (free, 16 * width), name="h")
        self.feeds = {
            self.xs: values(steps, batch, width, seed=1),
            self.w: values(width, 16 * width, seed=2),
            self.u: values(16 * width, 16 * width, seed=3),
            self.h: values(batch, 16 * width, seed=4),
        }

    def step(self, x: af.Tensor, h: af.Tensor) -> af.Tensor:
        """Compute the state after a cell."""
        return af.tanh(x @ self.w + h @ self.u)

    def loop(self, first: int = 0, last: af.Tensor | int | None = None) -> af.Tensor:
        """The state after iterations `first` up to `last`, or all."""
        end = af.shape(self.xs)[0] if last is None else last
        return af.while_loop(
            lambda t, h: t < end, lambda t, h: (t + 1, self.step(self.xs[t], h)), (first, self.h), name="loop"
        )[1]
