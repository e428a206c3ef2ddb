"""JAX 13184: reverse mode through a while loop that decides by its data when to end."""

from __future__ import annotations

import asyncio
import math

import asyncflow as af


@af.function
def root_and_slope(x: af.Tensor) -> tuple[af.Tensor, af.Tensor]:
    """Newton's method; no bound on the number of iterations is known."""
    root = af.while_loop(lambda r: abs(r * r - x) > 1e-12, lambda r: (r + x / r) / 2, x)
    return root, af.gradients(root, x)


async def main() -> None:
    values = [2.0, 30.0, 4e6]
    for x, (root, slope) in zip(values, await asyncio.gather(*map(root_and_slope, values)), strict=True):
        assert math.isclose(root, math.sqrt(x), rel_tol=1e-12)
        assert math.isclose(slope, 0.5 / math.sqrt(x), rel_tol=1e-9)


if __name__ == "__main__":
    af.run(main())
