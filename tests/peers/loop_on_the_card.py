"""PyTorch 184989: a while loop on a card whose iterations do not wait for the host."""

from __future__ import annotations

import numpy as np

import asyncflow as af


async def main() -> None:
    with af.Graph() as graph:
        most = af.placeholder("float32", ())
        grown = af.while_loop(lambda x: af.sum(x) < most, lambda x: x * 1.01 + 0.1, af.ones(8, dtype="float32"))
    copies = []
    async with af.Session(graph, ["cuda:0"], device_while=True) as session:
        for bound in (100.0, 10_000.0):
            trace = af.Trace(detail="region")
            result = await session.run(grown, {most: bound}, trace=trace)
            x = np.ones(8, np.float32)
            while x.sum() < bound:
                x = x * np.float32(1.01) + np.float32(0.1)
            np.testing.assert_allclose(result, x, rtol=1e-4)
            copies.append(sum(firing.stream == "d2h" for firing in trace.firings))
    assert copies[0] == copies[1], "the host reads the result, and nothing in between"


if __name__ == "__main__":
    af.run(main())
