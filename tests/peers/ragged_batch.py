"""Triton Inference Server 3395: requests of different shapes in one batch, without padding."""

from __future__ import annotations

import asyncio

import numpy as np

import asyncflow as af


def means(rows: af.Tensor, offsets: af.Tensor) -> af.Tensor:
    """Return the mean row of each request; `rows` has the rows of all requests, one after another."""
    totals = af.concat([af.zeros((1, 4)), af.cumulative_sum(rows, axis=0)])
    sums = af.take(totals, offsets[1:], axis=0) - af.take(totals, offsets[:-1], axis=0)
    return sums / af.astype(offsets[1:] - offsets[:-1], "float64")[:, None]


async def main() -> None:
    with af.Graph() as graph:
        rows = af.placeholder("float64", (None, 4))
        mean = af.batched(means, ragged="packed")(rows)
    requests = [np.random.default_rng(n).normal(size=(n, 4)) for n in (3, 50, 7, 1)]
    async with af.Session(graph) as session:
        for _ in range(3):
            answers = await asyncio.gather(*(session.run(mean, {rows: request}) for request in requests))
            for request, answer in zip(requests, answers, strict=True):
                np.testing.assert_allclose(answer, request.mean(axis=0))
        (counts,) = session.statistics().batches.values()
    assert counts.largest > 1, "requests of different lengths shared a call"


if __name__ == "__main__":
    af.run(main())
