"""Sequences of one length: their order, and where each vertex finds its child, are plain sequences of numbers.

Every policy orders them alike: all first vertices, all second ones, and so on.
"""

from __future__ import annotations

import numpy as np

from asyncflow.values import Array


def are_equal_chains(offsets: Array, children: Array, samples: Array) -> bool:
    """Return True if the arrays are equal to ``InputGraph.chain([n, n, ...])``; they need not be a valid graph."""
    count, size = len(samples) - 1, len(offsets) - 1
    if count < 1 or size < count or size % count or len(children) != size - count:
        return False
    numbers = np.arange(size).reshape(count, -1)
    before = np.arange(count)  # each sample has one child less than vertices
    return bool(
        offsets[0] == 0
        and samples[-1] == size
        and (samples[:-1] == numbers[:, 0]).all()
        and (offsets[1:].reshape(numbers.shape) == numbers - before[:, None]).all()
        and (children.reshape(count, -1 if children.size else 0) == numbers[:, :-1]).all()
    )


def order_chains(count: int, size: int, arity: int | None) -> tuple[Array, ...]:
    """The schedule of `count` chains that have `size` vertices together; see `VertexSchedule`."""
    numbers = np.arange(size)
    order = numbers.reshape(count, -1).T.flatten()
    positions = numbers.reshape(-1, count).T.flatten()
    set_starts = np.arange(0, size + 1, count)
    roots = np.arange(size - count + 1, size + 1)
    if arity is None:
        starts = np.zeros(size + 1, np.int64)
        starts[count:] = numbers[: size - count + 1]
        return order, positions, set_starts, roots, np.arange(1, size - count + 1), starts, np.arange(count, size)
    table = np.zeros((size, arity), np.int64)
    table[count:, 0] = numbers[1 : size - count + 1]
    return order, positions, set_starts, roots, table
