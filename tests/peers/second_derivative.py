"""TensorFlow 1's control flow: the second derivative of a loop with a branch and a loop in it."""

from __future__ import annotations

import math

import asyncflow as af


@af.function
def derivatives(x: af.Tensor) -> tuple[af.Tensor, af.Tensor, af.Tensor]:
    def body(i: af.Tensor, y: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
        inner = af.while_loop(lambda j, z: j < i + 2, lambda j, z: (j + 1, af.sin(z) * y), (0, x))[1]
        return i + 1, af.cond(i % 2 == 0, lambda: inner * y, lambda: inner + x)

    y = af.while_loop(lambda i, y: i < 3, body, (0, x * 1.0))[1]
    first = af.gradients(y, x)
    return y, first, af.gradients(first, x)


async def main() -> None:
    x, step = 1.13, 1e-6
    (up, up_first, _), (down, down_first, _) = await derivatives(x + step), await derivatives(x - step)
    _, first, second = await derivatives(x)
    assert math.isclose(first, (up - down) / (2 * step), rel_tol=1e-6)
    assert math.isclose(second, (up_first - down_first) / (2 * step), rel_tol=1e-6)


if __name__ == "__main__":
    af.run(main())
