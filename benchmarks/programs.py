"""Programs that several workloads run. They use operators only, so every system can build and Python can run them."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


def chain(x: T, scale: T, offset: T, nodes: int) -> T:
    """`nodes` operations, each on the result of the one before: ``x * scale + offset`` over and over.

    Products and sums alternate, so that no optimiser can merge two of them.
    """
    for index in range(nodes):
        x = x + offset if index % 2 else x * scale  # type: ignore[operator]
    return x
