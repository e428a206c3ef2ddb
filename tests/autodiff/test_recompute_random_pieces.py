"""Random pieces under `recompute`: gradients, second ones and Jacobians equal the results without `recompute`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import numpy as np
import pytest

import asyncflow as af

SEEDS = 2 * int(os.environ.get("ASYNCFLOW_SEEDS", "1"))
STEP = 1e-5
X = np.array([0.7, -0.4, 0.2])

Mark = Callable[[Callable[..., Any]], Callable[..., Any]]


def smooth(k: float) -> Callable[..., Any]:
    """A function of two values with a gradient of its own, which is the true one; `e` serves both, `t` that alone."""

    @af.custom_gradient
    def fn(a: Any, b: Any) -> Any:
        e = af.exp(a * k)
        t = af.cos(b)
        return af.sin(b) / (1.0 + e), lambda grad: (-grad * af.sin(b) * e * k / (1.0 + e) ** 2, grad * t / (1.0 + e))

    return fn


@af.custom_gradient
def differentiated(a: Any, b: Any) -> Any:
    """The gradient of this function goes through a loop of the function."""
    y = af.while_loop(lambda i, v: i < 2, lambda i, v: (i + 1, af.sin(v) * b), (0, a))[1]
    return y, lambda grad: tuple(af.gradients(y, [a, b], grad_ys=grad))


class Writer:
    """Writes a program by the numbers of a seed: the same each time, but for what `mark` does with pieces.

    Attributes:
        is_smooth: differences of the program are its gradient: nothing is stopped or drawn.
        kinds: of statements that were written.
    """

    def __init__(self, seed: int, mark: Mark, variable: af.Variable) -> None:
        self.random = Random(seed)
        self.mark = mark
        self.variable = variable
        self.is_smooth = True
        self.kinds: set[str] = set()
        self.outside: list[Any] = []

    def program(self, x: Any, w: Any) -> Any:
        """A vector made of two, behind a loop over pieces or a piece alone."""
        self.outside = [af.tanh(w * 2.0), w]
        if self.random.random() < 0.5:
            found = self.piece([x, w], 2)
        else:
            found = af.while_loop(
                lambda i, a, b: i < 2, lambda i, a, b: (i + 1, *self.piece([a, b], 1)[:2]), (0, x, w)
            )[1:]
        return sum(found[1:], found[0])

    def piece(self, values: Sequence[Any], depth: int) -> list[Any]:
        """Return the results of a piece: at least one of the values that it makes, some of its arguments, and outside
        values.
        """

        def build(*given: Any) -> tuple[Any, ...]:
            made = self.block(list(given), depth)
            passed = [given[self.random.randrange(len(given))]] + [self.outside[self.random.randrange(2)]]
            return (made, *passed[: self.random.randrange(3)], made * 0.5)

        return list(self.mark(build)(*values))

    def block(self, scope: list[Any], depth: int) -> Any:
        for _ in range(self.random.randint(1, 3)):
            scope.append(self.statement(scope, depth))
        return scope[-1]

    def statement(self, scope: list[Any], depth: int) -> Any:
        a, b = (scope[self.random.randrange(len(scope))] for _ in range(2))
        plain = ["sin", "multiply", "custom", "custom", "variable", "stop", "draw", "outside"]
        nested = ["cond", "loop", "own loop", "piece", "rows", "loop over rows", "differentiated"]
        kind = self.random.choice(nested if depth and self.random.random() < 0.7 else plain)
        self.kinds.add(kind)
        match kind:
            case "sin":
                return af.sin(a) + b * 0.3
            case "multiply":
                return af.tanh(a * b + 0.1)
            case "custom":
                return smooth(self.random.uniform(0.2, 0.8))(a, b)
            case "differentiated":
                return differentiated(a, b)
            case "variable":
                return a * self.like(self.variable.read(), a)
            case "outside":
                return a + af.sin(self.like(self.outside[self.random.randrange(2)], a)) * b
            case "stop":
                self.is_smooth = False
                return a * af.stop_gradient(af.cos(b))
            case "draw":
                self.is_smooth = False
                return a * (1.0 + af.random.uniform(a.shape, seed=self.random.randrange(100)))
            case "cond":
                above = af.sum(a) > self.random.uniform(-0.5, 0.5)
                return af.cond(above, lambda: self.block([a, b], depth - 1), lambda: self.block([b, a], depth - 1))
            case "loop":
                count = self.random.randint(1, 3)
                body = lambda i, v: (i + 1, self.block([v, a], depth - 1))  # noqa: E731
                return af.while_loop(lambda i, v: i < count, body, (0, b))[1]
            case "own loop":
                grown = lambda i, v: (i + 1, v * 1.1 + af.abs(self.block([v, a], depth - 1)) * 0.2 + 0.1)  # noqa: E731
                return af.while_loop(lambda i, v: af.sum(v * v) < 2.0, grown, (0, b))[1]
            case "piece":
                return self.piece([a, b], depth - 1)[self.random.randrange(2)]
        if a.ndim == 0:
            return af.sin(a) * b
        row = lambda u: self.block([u, af.sum(b) * 0.2], depth - 1)  # noqa: E731
        return af.map_fn(row, a, lift="auto" if kind == "rows" else False)

    @staticmethod
    def like(x: Any, a: Any) -> Any:
        """A vector, in a function of rows its sum."""
        return x if a.ndim else af.sum(x)


def derivatives(y: Any, xs: Sequence[Any]) -> dict[str, Any]:
    first = af.gradients(af.sum(y * af.constant([1.0, 0.6, -0.8])), xs, unconnected="zero")
    weighted = sum(af.sum(grad * af.constant([0.5, 1.5, 1.0])) for grad in first)
    second = af.gradients(weighted, xs, unconnected="zero")
    return {"value": y, "first": first, "weighted": weighted, "second": second}


async def found(seed: int, mark: Mark) -> tuple[Writer, dict[str, Any], dict[str, Any]]:
    """The writer, the derivatives at `X`, and central differences of the value and of the first derivatives."""
    with af.Graph(seed=seed) as graph:
        x, w, v = af.placeholder("float64", (3,)), af.placeholder("float64", (3,)), af.Variable(X[::-1] + 0.1, name="v")
        writer = Writer(seed, mark, v)
        y = writer.program(x, w)
        fetches = derivatives(y, [x, w, v])
        try:
            fetches["jacobian"] = af.jacobian(y, x)
        except af.GraphError as reason:  # not for several rows at once, which holds without `recompute` too
            fetches["refused"] = af.constant(str(reason))
    async with af.Session(graph, debug=True) as session:
        feeds = {x: X, w: X * 0.5 + 0.2}
        got = await session.run(fetches, feeds)
        slopes: dict[str, Any] = {"jacobian": [], "second": []}
        for place in range(3 if writer.is_smooth else 0):
            step = np.zeros(3)
            step[place] = STEP
            ahead, behind = [
                await session.run([y, fetches["weighted"]], {**feeds, x: X + way * step}) for way in (1, -1)
            ]
            for name, one, other in zip(slopes, ahead, behind, strict=True):
                slopes[name].append((one - other) / (2 * STEP))
    return writer, got, slopes


def near(got: Any, expected: Any, tolerance: float, what: str) -> None:
    largest = max(1.0, float(np.max(np.abs(expected), initial=0)))
    np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance * largest, err_msg=what)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_pieces(seed: int) -> None:
    """Within rounding, as gradients of one value may come in another order; and near differences of the program."""

    async def check() -> None:
        _, plain, _ = await found(seed, lambda fn: fn)
        writer, got, slopes = await found(seed, af.recompute)
        assert "refused" in plain or "refused" not in got, got
        for name in plain.keys() & got.keys() - {"refused"}:
            near(got[name], plain[name], 1e-11, f"{name}, of {sorted(writer.kinds)}")
        if writer.is_smooth:
            near(got["second"][0], slopes["second"], 1e-4, "second derivatives")
            if "jacobian" in got:
                near(got["jacobian"].T, slopes["jacobian"], 1e-4, "jacobian")

    asyncio.run(check())


def test_the_pieces_hold_everything() -> None:
    """Otherwise the test above would look at less than it seems to."""
    kinds: set[str] = set()
    for seed in range(40):
        with af.Graph():
            x, w, v = af.placeholder("float64", (3,)), af.placeholder("float64", (3,)), af.Variable(X, name="v")
            writer = Writer(seed, lambda fn: fn, v)
            writer.program(x, w)
        kinds |= writer.kinds
    assert len(kinds) == 14, sorted(kinds)
