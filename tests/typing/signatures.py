"""Types of decorated functions and of control flow: checked by mypy and pyright, and run as a test.

Every `assert_type` is for the type checker; a line with a ``type: ignore`` in it has to be wrong, or mypy complains.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, assert_type

import numpy as np

import asyncflow as af

Vector = Annotated[af.Tensor, af.spec("float64", (None,))]


class Pair(NamedTuple):
    """Two tensors."""

    first: af.Tensor
    second: af.Tensor


@dataclass
class State:
    """Two tensors."""

    h: af.Tensor
    c: af.Tensor


@af.function
def norm(x: Vector, order: int = 2) -> af.Tensor:
    """A function with an annotation that describes an array, and another that makes a number part of the trace."""
    return af.sum(abs(x) ** order) ** (1 / order)


@af.op(outputs=af.spec("float64", ()))
def total(x: np.ndarray[tuple[int], np.dtype[np.float64]], *, scale: float = 1.0) -> float:
    """A function of arrays."""
    return float(x.sum()) * scale


class Model:
    """Has a function among its methods."""

    @af.function
    def scaled(self, x: Vector, by: int = 2) -> af.Tensor:
        """A method."""
        return x * by


def build() -> None:
    """Control flow gives the nest that it got."""
    with af.Graph():
        x = af.placeholder("float64", (None,))
        assert_type(af.cond(af.sum(x) > 0, lambda: x, lambda: -x), af.Tensor)
        assert_type(af.cond(af.sum(x) > 0, lambda: Pair(x, x), lambda: Pair(-x, x)), Pair)
        assert_type(af.while_loop(lambda y: af.sum(y) > 1, lambda y: y / 2, x), af.Tensor)
        assert_type(
            af.while_loop(lambda y, z: af.sum(y) > 1, lambda y, z: (y / 2, z), (x, x)), tuple[af.Tensor, af.Tensor]
        )
        assert_type(
            af.while_loop(lambda p: af.sum(p.first) > 1, lambda p: Pair(p.second, p.first / 2), Pair(x, x)), Pair
        )
        state = af.while_loop(lambda s: af.sum(s.h) > 1, lambda s: State(s.h / 2, s.c), State(x, x))
        assert_type(state, State)
        array = af.TensorArray("float64", 3)
        both = af.while_loop(lambda y, a: af.sum(y) > 1, lambda y, a: (y / 2, a.write(0, y)), (x, array))
        assert_type(both, tuple[af.Tensor, af.TensorArray])
        store = af.RowStore("float64", (2,))
        grown = af.while_loop(lambda y, s: af.sum(y) > 1, lambda y, s: (y / 2, s.append(af.stack([y]))), (x, store))
        assert_type(grown, tuple[af.Tensor, af.RowStore])
        assert_type(af.cond(af.sum(x) > 0, lambda: None, lambda: None), af.Node)
        assert_type(af.value_and_grad(build_loss)(x)[0], af.Tensor)


def differentiate() -> None:
    """`gradients` gives the nest of `xs`; without "zero" any gradient may be None, which no test for is asked."""
    with af.Graph():
        x, w = af.placeholder("float64", ()), af.Variable(2.0)
        y = x * x * w
        assert_type(af.gradients(y, x, unconnected="zero"), af.Tensor)
        assert_type(af.gradients(y, w, unconnected="zero"), af.Tensor)
        assert_type(af.gradients(y, x), af.Tensor | Any)
        assert_type(af.gradients(y, x) * 2, af.Tensor | Any)
        assert_type(af.gradients(y, [x, w], unconnected="zero"), list[af.Tensor])
        assert_type(af.gradients(y, [w]), list[af.Tensor | Any])
        assert_type(af.gradients(y, (x, w), unconnected="zero"), tuple[af.Tensor, ...])
        assert_type(af.gradients(y, {"w": w}, unconnected="zero"), dict[str, af.Tensor])
        assert_type(af.gradients(y, Pair(x, y)), Pair)
        assert_type(af.gradients(y, State(x, y), unconnected="zero"), State)
        af.gradients(y, x, unconnected="zero").no_such_method  # type: ignore[attr-defined]  # noqa: B018


def build_loss(x: af.Tensor) -> af.Tensor:
    """Of a plain function, `value_and_grad` keeps the signature."""
    return af.sum(x * x)


async def main() -> tuple[float, float, float]:
    """Functions are awaited with arrays, and methods bound to their instance."""
    xs = np.array([3.0, 4.0])
    return float(await norm(xs)), total(xs, scale=2.0), float((await Model().scaled(xs, by=3))[0])
