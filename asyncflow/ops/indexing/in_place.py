"""Writes to an array in place, in a loop that has the only reference to it; see `RegionGenerator.put_while`."""

from __future__ import annotations

import numpy as np

from asyncflow.values import Array, Index, Namespace


class OwnBuffer:
    """An array lent to a loop for writing, whose values are restored if the loop fails.

    Attributes:
        array: the lent array.
    """

    __slots__ = ("_overwritten", "array")

    def __init__(self, array: Array) -> None:
        self.array = array
        self._overwritten: list[tuple[Index, Array]] = []

    def note(self, index: Index) -> None:
        """Keep the values at an index."""
        self._overwritten.append((index, np.array(self.array[index])))

    def restore(self) -> None:
        """Write the kept values back."""
        while self._overwritten:
            index, values = self._overwritten.pop()
            self.array[index] = values


def writable(xp: Namespace, x: Array, index: Index, own: Array | OwnBuffer | None) -> Array:
    """An array with the values of `x` to write to at an index: `x` itself if it is its caller's own."""
    if own is x:
        return x
    if isinstance(own, OwnBuffer) and own.array is x:
        own.note(index)
        return x
    return xp.array(x)
