"""PyTorch 153679: gradients of a scan over the states of another scan."""

from __future__ import annotations

import numpy as np

import asyncflow as af


@af.function
def loss_and_slopes(first: af.Tensor, second: af.Tensor, xs: af.Tensor) -> tuple[af.Tensor, list[af.Tensor]]:
    def layer(decay: af.Tensor, rows: af.Tensor) -> af.Tensor:
        return af.scan(lambda state, x: af.sin(decay * state + x), rows, af.zeros(3))

    loss = af.sum(layer(second, layer(first, xs)) ** 2)
    return loss, af.gradients(loss, [first, second])


async def main() -> None:
    decays, xs, step = [0.7, -0.4], np.random.default_rng(0).normal(size=(20, 3)), 1e-6
    _, slopes = await loss_and_slopes(*decays, xs)
    for each in range(2):
        up, down = ([d + sign * step * (k == each) for k, d in enumerate(decays)] for sign in (1, -1))
        difference = (await loss_and_slopes(*up, xs))[0] - (await loss_and_slopes(*down, xs))[0]
        np.testing.assert_allclose(slopes[each], difference / (2 * step), rtol=1e-6)


if __name__ == "__main__":
    af.run(main())
