"""Writing to an array where it stands, in a loop that nobody else sees it in; see `RegionGenerator.put_while`."""

from __future__ import annotations

import numpy as np

from asyncflow.values import Array, Index, Namespace


class OwnBuffer:
    """An array that was given to a loop to write to, which gets its values back if the loop fails.

    Attributes:
        array: what was given.
    """

    __slots__ = ("_overwritten", "array")

    def __init__(self, array: Array) -> None:
        self.array = array
        self._overwritten: list[tuple[Index, Array]] = []

    def note(self, index: Index) -> None:
        """Keeps what stands at an index."""
        self._overwritten.append((index, np.array(self.array[index])))

    def restore(self) -> None:
        """Writes back what was there."""
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
