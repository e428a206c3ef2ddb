"""A loop that runs in another process: ``python -m examples.remote_device``, from the root of the checkout."""

from __future__ import annotations

import numpy as np

import asyncflow as af
from asyncflow.devices import register_kind
from asyncflow.testing import check_device
from examples.remote_device.device import KIND


async def main() -> None:
    """Find a square root by Newton's method, on ``remote:0``."""
    with af.Graph() as graph, af.device("remote:0"):
        square = af.placeholder("float64", (None,))
        root = af.while_loop(
            lambda root: af.max(af.abs(root * root - square)) > 1e-12,
            lambda root: (root + square / root) / 2.0,
            (square,),
        )
    async with af.Session(graph, devices=["remote:0"]) as session:
        print(await session.run(root, {square: np.array([2.0, 9.0, 10.0])}))
        print(session.devices[0].describe())


if __name__ == "__main__":
    register_kind(KIND)
    check_device("remote")
    af.run(main())
