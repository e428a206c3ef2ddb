"""PyTorch 195977: a recurrence whose state and output are one tanh, with its gradient."""

from __future__ import annotations

from typing import Annotated

import numpy as np

import asyncflow as af

Weights = Annotated[af.Tensor, af.spec("float64", (4, 4))]


@af.function
def slope(w: Weights, xs: af.Tensor) -> af.Tensor:
    states = af.scan(lambda state, x: af.tanh(state @ w + x), xs, af.zeros(4))
    return af.gradients(af.sum(states**2), w)


def slope_by_hand(w: np.ndarray, xs: np.ndarray) -> np.ndarray:
    states = [np.zeros(4)]
    for x in xs:
        states.append(np.tanh(states[-1] @ w + x))
    total, behind = np.zeros((4, 4)), np.zeros(4)
    for before, after in zip(states[-2::-1], states[:0:-1], strict=True):
        change = (2 * after + behind) * (1 - after**2)
        total, behind = total + np.outer(before, change), w @ change
    return total


async def main() -> None:
    random = np.random.default_rng(0)
    w, xs = random.normal(size=(4, 4)), random.normal(size=(30, 4))
    np.testing.assert_allclose(await slope(w, xs), slope_by_hand(w, xs), rtol=1e-9)


if __name__ == "__main__":
    af.run(main())
